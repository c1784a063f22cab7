"""The engine thread: it owns machine and executor, and answers one request at a time.

The machine (`offload.schedule`) decides what is done next, and the executor (`offload.engine`) does it. A caller
posts a request and waits for its answer. Between requests the thread finishes flushes and checkpoints. What a request
does is not known here (offload/session/visits.py, offload/session/checkpoints.py).

A step may be answered when it has begun (`PendingStep`). The next request is taken when that step is over, and its
caller waits until then. During backward an *open* sweep may be under way, whose updates are made before their step is
requested (`Speculation`). A step seals it, and any other request revokes it.

A signal handler may interrupt a caller at any line. So all changes to a session are made on the engine thread, and a
caller's *turn* is one scope: requests that a handler makes within it are answered within it, and the session is not
closed before its end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from offload import waits
from offload._native import CompletionQueue
from offload.engine.executor import INTERRUPT, REQUEST, no_visit
from offload.errors import CheckpointError, OffloadError, SessionBrokenError, StepAbortedError, invariant, known
from offload.layout import Parameter
from offload.protocols import DeviceLane, Mark, ScratchOwner
from offload.schedule.loop import pump
from offload.schedule.machine import Machine, MachineListener
from offload.schedule.operations import Discard, ReleaseSave, Stop, Sweep
from offload.session.parking import Parking
from offload.session.parts import SessionParts
from offload.session.scratch import BufferRequest, BufferRequests
from offload.session.speculation import Speculation
from offload.session.step import PendingStep
from offload.session.sweeps import Sweeps

log = logging.getLogger("offload")


def nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class _Request:
    """What a caller asks the engine thread to do, while the caller waits."""

    begin: Callable[[], Sweep | None]
    """Runs on the engine thread while no sweep is under way, except that a step finds the open one if there is one.
    Returns the sweep that it has begun; None if it needs none."""
    applied: Callable[[], None]
    """Called on the engine thread when the sweep has ended well; no interrupt can come between that and the call."""
    begun: Callable[[], None]
    """Called on the engine thread when the first operations have started; then a pending step's caller goes on."""
    meanwhile: Callable[[], None]
    """Called on the engine thread after `begun`, while the sweep goes on."""
    seals: bool
    """Whether `begin` seals the open sweep, as a step does; before any other request the open sweep is revoked."""
    pending: PendingStep | None
    """The step, where its caller does not wait for it: the engine thread reports visits and the end to it."""
    needs_memory: bool
    """Whether a session that is parked takes memory again before `begin`."""
    error: BaseException | None = None


class _FillRequest(BufferRequest):
    """A caller's request for a subgroup's gradient buffer, to fill it."""

    def __init__(self, sweeps: Sweeps, subgroup: int) -> None:
        super().__init__(ScratchOwner("gradients", subgroup), fills=True)
        self._sweeps = sweeps

    def begin(self) -> None:
        """Open the account of the next step: bytes that move from now on count for it."""
        self._sweeps.open_account()


class Closable(Protocol):
    """An object that can be closed."""

    def close(self) -> None:
        """Close the object."""


class EngineThread(MachineListener):
    """The engine thread of one session. Headings say which thread calls the methods below them.

    A request is `_next` when a caller posts it, `_current` once the engine thread has taken it, and neither once it
    is answered. That of a pending step is answered when it has begun, but stays `_current` until its sweep has ended.
    """

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        self.pid = os.getpid()
        self.broken: BaseException | None = None
        """Why the session cannot be used any more, or None."""
        self.closed = False
        """Whether requests are refused, as the session has been closed."""
        self.lock = threading.RLock()
        """Held in a turn: only the thread that holds it may post a request."""
        self._lock_owner = threading.Condition(self.lock)  # only to ask whether the calling thread holds the lock
        self._close_after_turn: Closable | None = None  # what a signal handler has asked to close, in a turn
        self.sweeps = Sweeps(parts)
        """Numbers and versions of the machine's sweeps."""
        self.speculation = Speculation(parts, self.sweeps)
        """The updates that are made before their step is sealed."""
        self.buffer_requests = BufferRequests(parts)
        """Scratch buffers that callers want, for gradients and activations."""
        self._fill_request: BufferRequest | None = None  # of the gradient buffer that is being filled
        self.parking = Parking(parts, self.sweeps, self.buffer_requests)
        """Gives memory back between steps, and takes it again."""
        self.pending: PendingStep | None = None
        """The pending step, until somebody has waited for its end."""
        self._thread: threading.Thread | None = None  # the engine thread, once it is started
        self._opening: waits.BackgroundWork | None = None  # of `open`, once that is called
        self._starting = threading.Lock()  # held while a new thread finds out whether the session is closed already
        self._serving = False  # whether the engine thread has begun, and serves requests
        self._is_broken_logged = False
        self._aborts_untold = False  # whether the session broke in an open step, and no caller has got that error yet
        self._followed_step: PendingStep | None = None  # the pending step whose sweep is under way
        self._reported_visits = 0  # how many ended visits have been reported to it
        self._next: _Request | None = None  # posted, and not taken yet
        self._current: _Request | None = None  # taken, and not answered yet
        self._session_ends = False  # whether the request that ends the session has come in
        self._reply = CompletionQueue()  # on which a caller waits for the answer

    # On the caller's thread

    def open(self, parameters: tuple[Parameter, ...]) -> None:
        """Open the session's parts and start the engine thread; after an error the caller closes the session."""
        # Made here, as the caller's stream is not the current one on the thread `offload-open`.
        caller_mark = self._parts.lanes.device.mark(DeviceLane.CALLER, timed=False)
        # On a thread of its own, so that no interrupt comes between making a part and noting it for its end.
        work = partial(self._parts.on_device, partial(self._open, parameters, caller_mark))
        self._opening = waits.BackgroundWork(work, "offload-open")
        self._opening.do(lambda: "the paths to be opened and probed")

    def _open(self, parameters: tuple[Parameter, ...], caller_mark: Mark) -> None:
        """Open the session's parts and start the engine thread; on the thread `offload-open`."""
        self._parts.open(parameters, listener=self, filler=self, caller_mark=caller_mark)
        self._thread = threading.Thread(target=self._serve, name="offload-engine", daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether this process can use the session."""
        return not self.closed and self.broken is None and os.getpid() == self.pid

    def check_usable(self) -> None:
        """Raise an error unless this process can use the session.

        Raises:
            StepAbortedError: The session broke before a step was called; raised once.
            SessionBrokenError: The session is closed or broken, or belongs to the process that forked this one.
        """
        self.check_process()
        if self.closed:
            raise SessionBrokenError("the session is closed; make a new optimizer to go on")
        broken = self.broken
        if broken is not None:
            if self._aborts_untold:
                self._aborts_untold = False
                raise self.aborted(broken)
            raise SessionBrokenError(f"the session broke and cannot be used any more: {broken}") from broken

    def check_process(self) -> None:
        """Raise `SessionBrokenError` in a forked copy of the session, where whatever is awaited never comes."""
        if os.getpid() != self.pid:
            raise SessionBrokenError("this is a forked copy of a session; only the process that made it can use it")

    def aborted(self, error: BaseException) -> StepAbortedError:
        """Return the error to raise for the step under way, or the next one, which has failed with `error`.

        That step's number is one more than `step_number`, which counts the steps that have ended well.
        """
        if isinstance(error, OffloadError):  # else it is a bug of this library, whose traceback is needed
            error.__traceback__ = None  # the session keeps the error, which would keep its callers' frames
        parts = self._parts
        aborted = StepAbortedError(
            self.sweeps.step_number + 1, error, parts.machine.changed_subgroups, parts.saves.last_folder
        )
        aborted.__cause__ = error
        return aborted

    @property
    def is_in_turn(self) -> bool:
        """Whether the calling thread holds the lock, as in a turn and in a signal handler that interrupted one."""
        try:
            self._lock_owner.notify(0)  # wakes nobody; raises unless the calling thread owns the lock
        except RuntimeError:
            return False
        return True

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock, as the caller's turn; before that, wait for it and for the pending step.

        After the turn, close the object that `close_later` has named in it, if any.

        Raises:
            SessionBrokenError: The session cannot be used.
            StepAbortedError: The pending step has failed, or updates that were made before the next one was called.
        """
        # Before `check_usable`: if the pending step has broken the session, the step's own error is raised.
        self.finish_pending()
        self.check_usable()  # before the lock, too: in a forked copy nobody may ever release it
        try:
            with self.lock:
                self.finish_pending()  # another caller may have begun a step meanwhile
                self.check_usable()
                yield
        finally:
            has_ended = not self.is_in_turn  # else this was a signal handler's turn within another one
            if has_ended and self._close_after_turn is not None:
                closable, self._close_after_turn = self._close_after_turn, None
                closable.close()

    def close_later(self, closable: Closable) -> None:
        """Close an object when the turn under way ends; for a signal handler that has interrupted this turn."""
        self._close_after_turn = closable

    def wait_pending(self) -> None:
        """Wait until the pending step is over, if there is one; raise nothing if it has failed."""
        pending = self.pending
        if pending is not None and os.getpid() == self.pid:
            pending.wait()

    def finish_pending(self) -> None:
        """Wait until the pending step is over, if there is one, and forget it; raise its error, once.

        Unless the session is closed, the caller's stream is then ordered after the step's new weights. In a session
        that has been closed, a step that is not over is not waited for: it may hang. In a forked copy of the session
        no step is waited for, as it never ends there.
        """
        pending = self.pending
        if pending is None or os.getpid() != self.pid or (self.closed and not pending.is_over):
            return
        pending.wait()
        lanes = self._parts.lanes
        with contextlib.suppress(OffloadError):  # a device that has failed: the step's own error is raised below
            if not self.closed:
                lanes.order_caller()
                for tensor in pending.kept_tensors:  # their memory must not be reused before the lanes are done
                    lanes.device.record_use(tensor)
        self.pending = None
        if pending.error is not None:
            raise pending.error

    def wait_for(self, subgroups: Iterable[int]) -> bool:
        """Wait until the pending step's visits of some subgroups have ended; raise the step's error, once.

        Returns:
            True if a step is pending and these visits ended without error: the caller's stream must then be ordered
            after them. False if no step is pending, or if another caller has been raised the error of a failed one.
        """
        pending = self.pending
        if pending is None:
            return False
        pending.wait_for(subgroups)
        if pending.error is not None:
            self.finish_pending()  # which raises it, unless another caller has got it meanwhile
        return pending.error is None

    def request(
        self,
        begin: Callable[[], Sweep | None],
        applied: Callable[[], None] = nothing,
        meanwhile: Callable[[], None] = nothing,
        pending: PendingStep | None = None,
        *,
        begun: Callable[[], None] = nothing,
        seals: bool = False,
        needs_memory: bool = True,
    ) -> None:
        """Post a request to the engine thread, in the caller's turn, and wait until its sweep has ended.

        The arguments are the fields of `_Request`. For a `pending` step the wait is until the step has begun.

        A sweep reads gradients and writes weights until it has ended, so nothing may cut the wait short: posting and
        waiting are one native call, and an exception that is raised in this thread meanwhile (a KeyboardInterrupt, a
        signal handler's) is raised after that call. If no lane has answered for long, such an exception also ends
        the sweep, and breaks the session.

        Raises:
            BaseException: What the request ended with.
        """
        request = _Request(
            begin=begin,
            applied=applied,
            begun=begun,
            meanwhile=meanwhile,
            seals=seals,
            pending=pending,
            needs_memory=needs_memory,
        )
        # A signal handler may make this request, and have interrupted a caller just after that one set `_next` to its
        # own request, and before it posted that. So the old value is put back.
        interrupted_request = self._next
        try:
            self._exchange(request)
        finally:
            self._next = interrupted_request

    def _exchange(self, request: _Request) -> None:
        """Post a request and wait for its answer; raise its error.

        With a GPU, the lanes wait for the work that the caller has enqueued so far, and its later work for the lanes.
        """
        self.check_usable()
        self._next = request  # which the engine thread takes when it gets `REQUEST`
        lanes = self._parts.lanes
        lanes.follow_caller()
        try:
            # One native call, which nothing cuts short: see `request`.
            self._parts.queue.exchange(REQUEST, self._reply, quiet_s=waits.QUIET_S, interrupt_op=INTERRUPT)
            if request.error is not None:
                raise request.error
        except BaseException:  # weights may still be on their way to the device: the caller's stream waits for them
            with contextlib.suppress(OffloadError):
                lanes.order_caller()
            raise
        if request.pending is None:  # else whoever waits for the pending step orders its own stream
            lanes.order_caller()

    def wait_for_buffer(self, request: BufferRequest) -> None:
        """Wait until the engine thread has answered a request for a buffer, or the session cannot be used."""

        def has_ended(pause_s: float) -> bool:
            """Wait for the answer, at most `pause_s`; return whether to wait no longer."""
            return request.answered.wait(min(pause_s, waits.SLICE_S)) or not self.is_usable

        if not request.answered.is_set():
            waits.wait_for(has_ended, lambda: "")  # "": the engine thread logs what it waits for itself

    def take_memory(self) -> None:
        """Take memory again that was given back between steps, or end a park that is about to give it back."""
        if self.parking.is_parked_or_parking:
            with self.turn():
                self.request(nothing)  # before which the engine thread takes memory again

    def borrow_buffer(self, subgroup: int) -> int:
        """Wait for a subgroup's gradient buffer, and return its number; the caller fills it until the next call.

        The buffer that was returned before is released: the machine may write it to the paths.
        """
        with self.turn():
            self.take_memory()
            self._release_filled()
            self._fill_request = request = _FillRequest(self.sweeps, subgroup)
            self.buffer_requests.ask(request)
            self.wait_for_buffer(request)
            if request.error is not None:
                raise request.error
            self.check_usable()  # the wait also ends, without an answer, if the session cannot be used
            return known(request.buffer, "gradients without a buffer")

    def _release_filled(self) -> None:
        """Release the buffer that was filled last, which the machine may then write to the paths."""
        if self._fill_request is not None:
            self.buffer_requests.release(self._fill_request)  # an interrupt may repeat this, which changes nothing
            self._fill_request = None

    def begin_step(self) -> None:
        """Release the buffer that was filled last: a step begins, which reads it. On the engine thread."""
        self._release_filled()
        self.buffer_requests.take_posts()  # the release is one of them: the machine has to know it before the step

    def drop(self, dropped: Callable[[], None]) -> None:
        """Discard all gradients in buffers and on paths, then call `dropped`; no interrupt comes in between."""

        def discard_all() -> None:
            """Discard the gradients of all subgroups; on the engine thread."""
            # Nobody fills a buffer any more, and the machine then knows of all that were filled.
            self.begin_step()
            machine = self._parts.machine
            for subgroup in [*machine.scratch["gradients"].owners]:  # a copy, as discarding removes owners
                machine.handle(Discard(ScratchOwner("gradients", subgroup)))
            dropped()

        with self.turn():
            self.request(discard_all)

    def stop(self) -> None:
        """End the engine thread; if the session is still being opened, wait for that first."""
        if self._opening is not None and not self._opening.forestall():  # it has begun; else it never will
            self._opening.wait()
        with self._starting:
            is_serving = self._serving  # else the thread has not begun; it will find the session closed, and end
        if is_serving and self._thread is not None:
            self._next = None  # says that the session ends: see `_accept_request`
            self._parts.queue.post(REQUEST)
            self._thread.join()

    # On the engine thread

    def _serve(self) -> None:
        """Serve requests until the session ends; the engine thread's main function.

        After an error of its own, every further request is answered with that error.
        """
        with self._starting:
            if self.closed:  # then nobody will post a request, or wait for this thread
                return
            self._serving = True
        try:
            self._parts.lanes.device.prepare_thread()
            self._serve_requests()
        except Exception as error:
            # Nobody waits for this thread itself: callers that wait for an answer, and later ones, get the error.
            self._end_all_with(error)
            self._refuse_requests(error)

    def _end_all_with(self, error: Exception) -> None:
        """End the save, the park and the request that are under way with an error of this thread's own."""
        self.say_broken(error)
        with contextlib.suppress(Exception):  # what has failed may fail again
            self._parts.executor.drain()  # a caller that is answered may free memory that updates still write to
        self._end_save(error)
        self.parking.end(error)
        if self._current is not None:
            self._end_request(error)

    def _refuse_requests(self, error: Exception) -> None:
        """Answer every further request with an error, until the session ends."""
        executor = self._parts.executor
        while not self._session_ends:  # it has ended if the error came after the request of `stop`
            while not executor.requests:
                executor.wait()  # for requests alone: what else is reported changes nothing any more
            if self._accept_request() is None:  # the request of `stop`
                return
            self._answer(error)

    def _serve_requests(self) -> None:
        """Handle events and do what is due until the session ends; then finish what is in flight."""
        goes_on = True
        while goes_on:
            pump(self._parts.machine, self._parts.executor, self.is_due)
            goes_on = self.serve_due()
        self._finish_session()

    def is_due(self, machine: Machine) -> bool:
        """Return whether `serve_due` has something to do.

        Raises:
            InternalError: A sweep is under way and nothing is in flight that could end it: waiting would be forever.
        """
        # An open sweep may wait for visits to be admitted.
        something_goes_on = machine.in_flight or machine.has_no_sweep or machine.is_open
        invariant(something_goes_on, "a sweep is under way, and nothing that it waits for")
        return (
            machine.finished_sweep is not None
            or machine.saver.finished_save is not None
            or self.buffer_requests.is_due()
            or self.parking.is_due()
            or self._may_begin(machine)
            or self._may_speculate()
            or (self._followed_step is not None and len(machine.ended_visits) > self._reported_visits)
        )

    def _may_begin(self, machine: Machine) -> bool:
        """Return whether a request has come in and may begin: an open sweep does not delay it, but ends with it."""
        return (machine.has_no_sweep or machine.is_open) and self._parts.executor.requests > 0

    def serve_due(self) -> bool:
        """Report what has ended, then do one thing that is due: the first in the order of the branches.

        Return False once the session is to end.
        """
        machine = self._parts.machine
        self._report_ended_visits()
        self.note_save_end()
        if machine.take_finished_sweep() is not None:
            if not machine.failed:  # the sweep counts, even if a flush has broken the machine since
                known(self._current, "a sweep of nobody").applied()
            self._end_request(machine.broken if machine.failed else None)
        elif self.buffer_requests.is_due():
            self.buffer_requests.serve()
        elif self._may_begin(machine):
            if machine.is_open:
                self._pause_open_sweep(machine)
            if self._accept_request() is None:  # the request of `stop`
                return False
            self._begin_request()
        elif self.parking.is_due():
            self.parking.advance()
        elif self._may_speculate():
            self.speculation.open_and_admit()
        return True

    def _pause_open_sweep(self, machine: Machine) -> None:
        """Start no further update of the open sweep, and wait for those that run."""
        self.speculation.pause()
        pump(machine, self._parts.executor, lambda m: not m.running_count or m.broken is not None)
        self.note_save_end()  # of a save that has ended during this wait: the request may be about saves

    def _may_speculate(self) -> bool:
        """Count posted arrivals; return whether an update before its step is due, in a session that is not parked."""
        return self.speculation.count_and_is_due() and not self.parking.is_parked_or_parking

    def _begin_request(self) -> None:
        """Begin the request that was taken; answer at once if it fails or begins no sweep.

        An error that is no `OffloadError` reaches `_serve`, which answers this request and all later ones with it.
        """
        request = known(self._current, "a request from nobody")
        if not request.seals:  # else `begin` confirms what it can
            self.speculation.revoke()
            self.sweeps.close_account()
        try:
            self.parking.end_for_request(needs_memory=request.needs_memory)
            # A pending step goes on beside the caller's own copies on a GPU: its copies are cut to let those pass.
            self._parts.lanes.is_hidden = request.pending is not None
            sweep = request.begin()
        except OffloadError as error:
            self.note_save_end()  # if the session broke, so did the save that was being committed
            self._answer(error)
            return
        if sweep is None:
            self._answer(None)
        else:
            self._start_sweep(request, sweep)

    def _start_sweep(self, request: _Request, sweep: Sweep) -> None:
        """Start the first operations of a request's sweep; let the caller go on if the request is a pending step."""
        executor = self._parts.executor
        executor.submit(self._parts.machine.take_operations())
        begun, request.begun = request.begun, nothing  # drops a closure that may hold the optimizer
        if request.pending is not None:
            request.pending.begin(visit.subgroup for visit in sweep.visits)
        begun()
        if request.pending is not None:
            self.pending = self._followed_step = request.pending
            self._reported_visits = 0
            self._next = None  # no reference to what the caller owns, as in `_answer`
            self._reply.post(0)  # the answer: the caller goes on, and the step, too
        executor.end_engine_interval()  # so that learning in `meanwhile` is not counted as what a step takes to begin
        request.meanwhile()

    def _report_ended_visits(self) -> None:
        """Report visits that have ended to the pending step, which wakes callers that wait for them."""
        if self._followed_step is not None:
            visits = self._parts.machine.ended_visits
            self._followed_step.note_visited(visits[self._reported_visits :])
            self._reported_visits = len(visits)

    def _finish_session(self) -> None:
        """Finish what is in flight as the session is closed; a device that does not answer breaks the session."""
        self.speculation.revoke()
        self.parking.end(None)
        pending_save = self._parts.saves.pending
        if pending_save is not None:  # `close` has waited for it as long as it was going to
            self._is_broken_logged = True  # the save is stopped by breaking the machine, which is not to be logged
            error = CheckpointError(f"the session was closed before {pending_save.folder.path} was committed")
            self._parts.machine.handle(Stop(error))
            self.note_save_end()
        self._wait_for_idle_machine()

    def _wait_for_idle_machine(self) -> None:
        """Wait until nothing is in flight, or the machine has broken."""
        pump(self._parts.machine, self._parts.executor, lambda m: m.in_flight == 0 or m.broken is not None)

    def settle(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            BaseException: What broke the machine.
        """
        self._wait_for_idle_machine()
        if self._parts.machine.broken is not None:
            raise self._parts.machine.broken

    def say_warning(self, message: str) -> None:
        """Log a warning of the machine's."""
        log.warning("%s", message)

    def say_broken(self, error: BaseException) -> None:
        """Note and log what has broken the session; log it once and at once, as the next caller may come late."""
        if not self._is_broken_logged:
            # No caller waits for an open step, so the next one gets its error. There is no machine before `is_whole`.
            self._aborts_untold = self._parts.is_whole and self._parts.machine.is_open
            log.error("the session has broken and cannot be used any more: %s", error)
        self._is_broken_logged = True
        self.broken = error

    def note_save_end(self) -> None:
        """Pass on the outcome of a save that has finished, if one has, and free what it no longer needs."""
        finished = self._parts.machine.take_finished_save()
        if finished is not None:
            _, error = finished
            self._end_save(error)

    def _end_save(self, error: BaseException | None) -> None:
        """Tell the saves how the pending one ended; free its buffers, and the store slots that saves release then."""
        self.drop_checkpoint_buffers()
        for number in self._parts.saves.end_pending(error, broke=self.broken is not None):
            self._parts.machine.handle(ReleaseSave(number))

    def drop_checkpoint_buffers(self) -> None:
        """Free the buffers through which a checkpoint was copied.

        A session that has broken keeps these buffers until its lanes have ended, as lanes may still write to them.
        """
        if self.broken is None:
            self._parts.memory.drop_checkpoint_buffers()

    def _accept_request(self) -> _Request | None:
        """Take the next request as the current one, and return it.

        None for the request of `stop`: then note that the session ends.
        """
        self._parts.executor.requests -= 1
        self._current = self._next
        self._session_ends = self._current is None
        return self._current

    def _end_request(self, error: BaseException | None) -> None:
        """End a request, with an error or well: answer its caller, or those who wait for a pending step."""
        if error is not None:
            self._aborts_untold = False  # a caller gets this error
        pending, self._followed_step = self._followed_step, None
        if pending is None:
            self._answer(error)
            return
        self._current = None  # its caller was answered when the step had begun
        self._parts.lanes.is_hidden = False
        self._parts.executor.set_visitor(no_visit)  # which drops what the step's visitor refers to
        if error is None:  # else lanes may still use all tensors
            pending.kept_tensors = self._parts.lanes.in_use(pending.kept_tensors)
        pending.end(None if error is None else self.aborted(error))

    def _answer(self, error: BaseException | None) -> None:
        """Answer the current request's caller with an error, or None, and drop references to the caller's data."""
        request = known(self._current, "an answer to nobody")
        self._current = self._next = None
        self._parts.executor.set_visitor(no_visit)
        with contextlib.suppress(OffloadError):  # a device that has failed gives nothing back
            # What is borrowed is used again only after the work of the request, which is on lanes.
            self._parts.gradients.return_borrowed()
        request.error = error
        self._reply.post(0)
