"""Memory that a session gives back between steps, and takes again: a session that is parked.

State that may not stay in memory leaves it for the paths first. Then homes, staging slots, gradient slots and all
other memory of the session go back to the system; their addresses stay. The next request that needs memory takes it
again, and state comes home when it is visited.

Invariants: no version and no bit changes; memory is given back only when nothing in it counts any more; what does not
fit on the paths is refused before anything moves.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from offload import waits
from offload.errors import ConfigError, InfeasiblePlanError, OffloadError
from offload.memory.arenas import available_bytes
from offload.plan import Home
from offload.schedule.loop import pump
from offload.schedule.operations import Leave, Stay
from offload.schedule.staging import Phase
from offload.session.parts import SessionParts
from offload.units import format_bytes, format_seconds

log = logging.getLogger("offload")


@dataclass(slots=True)
class PendingPark:
    """A park that is under way.

    Attributes:
        leave: What leaves memory.
        moves_bytes: State that leaves it, or is flushed from staging slots.
        started_s: When it was asked for (`time.monotonic`).
        has_begun: Whether it leaves already.
        done: Set when the park has ended, well or not.
        error: Why memory was not given back.
    """

    leave: Leave
    moves_bytes: int
    started_s: float
    has_begun: bool = False
    done: waits.Latch = field(default_factory=waits.Latch)
    error: OffloadError | None = None

    def wait(self) -> None:
        """Wait until it has ended; raise what it has failed with."""
        waits.wait_for(self.done.wait, lambda: f"{format_bytes(self.moves_bytes)} of state to leave memory")
        if self.error is not None:
            raise self.error


class Parking:
    """What one session gives back between steps.

    All methods belong to the engine thread.

    Args:
        parts: Its parts.

    Attributes:
        is_parked: Whether memory has been given back, and none taken again.
        figures: Of the last park that gave memory back, by the names of metrics.
    """

    def __init__(self, parts: SessionParts) -> None:
        self.is_parked = False
        self.figures: Mapping[str, float] = {}
        self._parts = parts
        self._pending: PendingPark | None = None
        self._numbers = 0

    @property
    def is_held(self) -> bool:
        """Whether nothing but requests may use memory: the session is parked, or is about to be."""
        return self.is_parked or self._pending is not None

    @property
    def away_bytes(self) -> int:
        """State at home in memory that lies on the paths now."""
        subgroups = self._parts.plan.layout.subgroups
        return sum(s.state_bytes for s in subgroups if self._parts.machine.is_away(s.index))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of parking; none before the first park. Any thread."""
        return {**self.figures, "park/away_bytes": self.away_bytes} if self._numbers else {}

    def begin(self, host_bytes: int, gpu_bytes: int) -> PendingPark:
        """Begin to park: it goes on between requests.

        Args:
            host_bytes: State that may stay at home in host memory.
            gpu_bytes: State that may stay at home on the GPU.

        Raises:
            ConfigError: Gradients have left the GPU that no step has used.
            InfeasiblePlanError: The paths have no room for what has to leave; nothing has changed.
        """
        parts, machine = self._parts, self._parts.machine
        plan, subgroups = parts.plan, parts.plan.layout.subgroups
        if parts.gradients.have_arrived():
            raise ConfigError("park", "gradients", "use them in a step, or call zero_grad() first: memory would go")
        leaving, room, left_bytes = [], Counter[int](), host_bytes
        for subgroup in subgroups:
            number = subgroup.index
            if plan.homes[number] is not Home.HOST or machine.is_fresh(number) or machine.is_away(number):
                continue
            left_bytes -= subgroup.state_bytes
            if left_bytes < 0:
                left_bytes += subgroup.state_bytes
                leaving.append(number)
                room.update(nbytes for _, _, nbytes in subgroup.tiles)
        leaving_bytes = sum(subgroups[number].state_bytes for number in leaving)
        if leaving and not plan.budgets.paths:
            advice = "give paths, or let it stay: park(host_memory=...)"
            raise InfeasiblePlanError("the state that leaves memory", leaving_bytes, {"paths": 0}, advice)
        if missing_bytes := machine.index.missing_bytes(room, spare=True):
            offers = {"room on the paths beside promised checkpoints": max(0, leaving_bytes - missing_bytes)}
            advice = "free space, raise max_bytes, add a path, or let more stay: park(host_memory=...)"
            raise InfeasiblePlanError("the state that leaves memory", leaving_bytes, offers, advice)
        flushed_bytes = sum(subgroups[number].state_bytes for number in machine.staging.dirty)
        self._numbers += 1
        leave = Leave(self._numbers, tuple(leaving))
        self._pending = pending = PendingPark(leave, leaving_bytes + flushed_bytes, time.monotonic())
        return pending

    def is_due(self) -> bool:
        """Return whether `serve` has something to do."""
        pending, machine = self._pending, self._parts.machine
        if pending is None or not machine.idle:
            return False
        if machine.broken is not None or self._finished is not None:
            return True
        may_begin = machine.saver.under_way is None and not machine.is_leaving and Phase.BUSY not in machine.phases
        return not pending.has_begun and may_begin

    @property
    def _finished(self) -> tuple[Leave, Exception | None] | None:
        """How the pending park's leave has ended, once it has; one that was given up may end later, for nobody."""
        finished = self._parts.machine.finished_leave
        return finished if finished is not None and self._pending and finished[0] is self._pending.leave else None

    def serve(self) -> None:
        """Begin to have state leave memory, or give memory back when all has left it."""
        parts, machine, pending = self._parts, self._parts.machine, self._pending
        if pending is None:
            return
        finished = self._finished
        if finished is None and machine.broken is None:
            pending.has_begun = True
            machine.handle(pending.leave)
            parts.executor.submit(machine.take_operations())
            return
        machine.take_finished_leave()
        error = machine.broken if finished is None else finished[1]
        if error is None:
            try:
                self._give_back(pending)
            except OffloadError as failed:
                error = failed
        self.give_up(error)

    def _give_back(self, pending: PendingPark) -> None:
        """Give all memory back that holds no state."""
        parts, machine = self._parts, self._parts.machine
        parts.lanes.wait()
        homes = (s for s in parts.plan.layout.subgroups if parts.plan.homes[s.index] is Home.HOST)
        kept = [s for s in homes if not machine.is_away(s.index) and not machine.is_fresh(s.index)]
        self.is_parked = True
        given_bytes = parts.memory.park(kept, parts.tiers)
        seconds = time.monotonic() - pending.started_s
        self.figures = {
            "park/moved_bytes": pending.moves_bytes,
            "park/given_back_bytes": given_bytes,
            "park/seconds": seconds,
        }
        log.info(
            "parked: %s of memory given back, %s written in %s; %s of state comes home when it is used",
            format_bytes(given_bytes),
            format_bytes(pending.moves_bytes),
            format_seconds(seconds),
            format_bytes(self.away_bytes),
        )

    def give_up(self, error: BaseException | None) -> None:
        """End the park under way, if there is one: nothing more leaves memory."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        machine = self._parts.machine
        if machine.is_leaving and machine.broken is None:
            machine.handle(Stay())
        if error is not None:
            kept = f"state stays in memory, which is not given back: {error}"
            log.warning("%s", kept)
            pending.error = error if isinstance(error, OffloadError) else OffloadError(kept)
        pending.done.set()

    def make_way(self, *, needs_memory: bool) -> None:
        """Let a request begin: finish or end the park under way, and take memory again if it is needed.

        Raises:
            OffloadError: There is no memory; the session stays parked.
        """
        if self._pending is not None:
            self._finish(ends=needs_memory)
        if needs_memory and self.is_parked:
            self.unpark()

    def _finish(self, *, ends: bool) -> None:
        """Finish the park under way, or have it end early."""
        machine = self._parts.machine
        if ends and self._pending is not None and not self._pending.has_begun:
            self.give_up(None)
        if ends and self._pending is not None:
            log.info("a park ends early, as the session is used")
            machine.handle(Stay())
        while self._pending is not None:
            pump(machine, self._parts.executor, lambda m: self.is_due())
            if ends and machine.broken is None:
                self.give_up(None)
            else:
                self.serve()

    def unpark(self) -> None:
        """Take memory again.

        Raises:
            InfeasiblePlanError: The system has less; the session stays parked.
        """
        parts = self._parts
        needed, available = int(self.figures.get("park/given_back_bytes", 0)), available_bytes()
        if needed > available:
            advice = "free memory: the session stays parked, and nothing is lost"
            raise InfeasiblePlanError("memory of a parked session", needed, {"what is free": available}, advice)
        parts.memory.unpark(parts.tiers)
        self.is_parked = False
