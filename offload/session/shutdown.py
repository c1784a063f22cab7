"""The end of a session: who waits for what, and for how long, before its parts are freed."""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import partial

from offload import waits
from offload.session.parts import SessionParts
from offload.session.thread import EngineThread
from offload.tiers import innermost

log = logging.getLogger("offload")


class Shutdown:
    """The end of one session.

    Calls that may hang are made on a thread of their own, which keeps all that lanes still use: memory is freed only
    after the lanes that work on it have ended, however long that takes. `close` waits for that thread for a limited
    time. If a device answers later, the thread goes on and frees everything then.
    """

    def __init__(self, parts: SessionParts, thread: EngineThread) -> None:
        self._parts = parts
        self._thread = thread
        self.freed = False
        self.work: waits.BackgroundWork | None = None
        """Ends the engine thread and frees the parts."""
        self._stop = waits.BackgroundWork(thread.stop, "offload-stop")
        self._is_remainder_logged = False
        self._gives_up = False  # whether a close was interrupted: the next one waits for a limited time only

    def close(self) -> None:
        """Close the session as `Engine.close` says; if this is interrupted, another call carries on.

        Called by a signal handler that interrupts a request of this session, it is put off until that has ended.
        """
        thread = self._thread
        if os.getpid() != thread.pid:  # in a forked child, where a lock that another thread held is never released
            return
        if thread.is_in_turn and not thread.closed:  # in a signal handler that interrupts a turn
            thread.close_later(self)
            return
        try:
            with thread.lock:
                if not self.freed:
                    self._close()
        except BaseException:
            self._gives_up = True
            raise

    def _close(self) -> None:
        """Wait for a checkpoint and the mirror, then for the engine thread and the freeing of parts.

        If all is well, the session's own tiles and the engine thread may take as long as they need; other waits have
        limits. While an exception is on its way limits are shorter, and the engine thread has one, too. They are
        shortest where the session broke or a close was interrupted. What has not ended by then goes on in the
        background, and is logged once.
        """
        self._thread.closed = True
        self._finish_save()
        limits = self._parts.limits
        if self._parts.is_whole:
            waits_for_mirror = not self._is_given_up and sys.exception() is None
            self._parts.saves.end_mirror(limits.close_s if waits_for_mirror else 0.0)
        self._parts.lanes.given_up = True  # ends the touching of new memory, for which `_stop` would wait
        # Anew after an error; else an earlier close may have begun it, and this one goes on waiting.
        if self.work is None or (self.work.done and self.work.error is not None):
            self._stop = waits.BackgroundWork(self._thread.stop, "offload-stop")
            work = partial(self._end_all, self._stop)
            self.work = waits.BackgroundWork(partial(self._parts.on_device, work), "offload-end")
        self.work.start()
        waits.wait_for(self._stop.wait, self._describe_thread_wait, self._most_wait_s(usual_s=None))
        waits.wait_for(self.work.wait, self._describe_unfreed, self._most_wait_s(self._parts.config.stall_timeout_s))
        if self.work.done and self.work.error is not None:
            raise self.work.error
        if not self.work.done and not self._is_remainder_logged:
            self._is_remainder_logged = True
            log.error(
                "the session is closed, but this does not end: %s; it stays as it is until it does",
                self._describe_unfreed(),
            )

    def _most_wait_s(self, usual_s: float | None) -> float | None:
        """Return how many seconds to wait for the engine thread, or for parts to be freed; None for any time.

        That is `usual_s` if all goes well, `Limits.unwind_s` while an exception is on its way, and `Limits.settle_s`
        once given up (`_is_given_up`): 0 then if an earlier close has waited to no avail, and logged that.
        """
        if self._is_given_up:
            return 0.0 if self._is_remainder_logged else self._parts.limits.settle_s
        return self._parts.limits.unwind_s if sys.exception() is not None else usual_s

    @property
    def _is_given_up(self) -> bool:
        """Whether to wait only briefly: the session has broken, or an earlier close was interrupted."""
        return self._gives_up or self._thread.broken is not None

    def _describe_thread_wait(self) -> str:
        """Say for the log what `_close` waits for; "" while operations are in flight, which the executor logs."""
        return "" if self._parts.is_whole and self._parts.machine.in_flight else "the engine thread to end"

    def _describe_unfreed(self) -> str:
        """Say for the log what is not freed yet."""
        memory = f"{sum(arena.nbytes for arena in self._parts.memory.arenas)} bytes of host memory"
        if not self._stop.done:
            return f"the engine thread (with all paths, and {memory})"
        open_tiers = [*self._parts.closing]
        places = ", ".join(str(getattr(innermost(tier), "store_path", tier.path)) for tier in open_tiers)
        return f"requests to {places} (with their threads and open files, and {memory})" if places else memory

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, but for other ranks' parts of it only for a limited time."""
        pending = self._parts.saves.pending if self._parts.is_whole else None
        if pending is None or self._is_given_up:
            return
        limits, is_raising = self._parts.limits, sys.exception() is not None
        pending.wait_for_ranks(limits.settle_s if is_raising else limits.close_s)
        pending.wait()

    def _end_all(self, stop: waits.BackgroundWork) -> None:
        """End the engine thread, then free everything; on the thread `offload-end`."""
        stop.start()
        stop.wait()
        if stop.error is not None:
            raise stop.error
        try:
            self._parts.ends.close()
        finally:
            self.freed = True

    def forgotten(self) -> None:
        """Close the session of an engine that the garbage collector has found."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            # The collector may run on a thread of the session's own, which would wait for its own end.
            work = partial(self._parts.on_device, self.close)
            threading.Thread(target=work, name="offload-close").start()
