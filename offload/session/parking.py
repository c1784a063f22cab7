"""Memory that a session gives back between steps, and takes again: a session that is parked.

State that may not stay in memory leaves it for the paths first. Then homes, staging slots, gradient slots and all
other memory of the session go back to the system; their addresses stay. The next request that needs memory takes it
again, and state comes home when it is visited.

Invariants: no version and no bit changes; memory is given back only when nothing in it counts any more; what does not
fit on the paths is refused before anything moves.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from offload import metrics, waits
from offload.device.pieces import as_pieces
from offload.engine.executor import visit_nothing
from offload.errors import ConfigError, InfeasiblePlanError, InternalError, OffloadError
from offload.memory.arenas import Arena, available_bytes
from offload.memory.nodes import check_free
from offload.plan import Home
from offload.predict.forecast import predict_back_s
from offload.schedule.loop import pump
from offload.schedule.operations import Leave, Run, Stay
from offload.schedule.staging import Phase
from offload.session.parts import SessionParts
from offload.session.scratch import Wants
from offload.session.sweeps import Sweeps
from offload.units import format_bytes, format_seconds

log = logging.getLogger("offload")


def check_keep_host(keep_host: object, sizes: Mapping[str, object]) -> None:
    """Refuse what says in bytes how much stays, which is either nothing or what fits the budget.

    Raises:
        ConfigError: Names both.
    """
    for name, value in (*sizes.items(), ("keep_host", keep_host)):
        if not isinstance(value, bool) or name != "keep_host":
            allowed = "nothing stays by park(), and what host_memory has room for by park(keep_host=True)"
            raise ConfigError(name, value, allowed)


@dataclass(slots=True)
class PendingPark:
    """A park that is under way.

    Attributes:
        batches: What leaves memory for the paths, one after another: first from host memory, then from the GPU.
        to_host: Subgroups at home on the GPU whose state stays in host memory.
        moves_bytes: State that leaves memory for the paths, or is flushed from staging slots.
        started_s: When it was asked for (`time.monotonic`).
        kept: Address and size of memory that stays, as somebody holds gradients in it.
        leave: What leaves now.
        done: Set when the park has ended, well or not.
        error: Why memory was not given back.
    """

    batches: deque[tuple[int, ...]]
    to_host: tuple[int, ...]
    moves_bytes: int
    started_s: float
    kept: Sequence[tuple[int, int]] = ()
    leave: Leave | None = None
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
        sweeps: Bring state home.
        wants: What callers want of the session's scratch.

    Attributes:
        is_parked: Whether memory has been given back, and none taken again.
        figures: Of the last park that gave memory back, by the names of metrics.
    """

    def __init__(self, parts: SessionParts, sweeps: Sweeps, wants: Wants) -> None:
        self.is_parked = False
        self.figures: Mapping[str, float] = {}
        self._parts = parts
        self._sweeps = sweeps
        self._wants = wants
        self._pending: PendingPark | None = None
        self._numbers = 0
        self._kept: Sequence[tuple[int, int]] = ()  # host memory that the last park has left
        self._staged: tuple[int, ...] = ()
        """Subgroups that lay in staging slots before memory was given back: the next step has to fetch them."""
        self._on_host: tuple[Arena, Mapping[int, int]] | None = None
        """Memory for state at home on the GPU that stays in host memory meanwhile, and where it lies there."""

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
        return {**self.figures, metrics.AWAY_BYTES: self.away_bytes} if self._numbers else {}

    # Memory is given back

    def begin(self, accepted: Callable[[], Sequence[tuple[int, int]]], *, keep_host: bool) -> PendingPark:
        """Begin to park: it goes on between requests.

        Args:
            accepted: See `Engine.park`.
            keep_host: See there.

        Raises:
            ConfigError: A gradient is there that no step has used, or a backward pass has not been taken.
            InfeasiblePlanError: The paths have no room for what has to leave; nothing has changed.
        """
        parts, machine = self._parts, self._parts.machine
        plan, subgroups = parts.plan, parts.plan.layout.subgroups
        if parts.gradients.have_arrived():
            raise ConfigError("park", "gradients", "use them in a step, or call zero_grad() first: memory would go")

        if self._wants.are_in_use("activations"):
            raise ConfigError("park", "activations", "take the backward pass, or drop its loss: memory would go")

        def at(home: Home) -> list[int]:
            numbers = (number for number, place in enumerate(plan.homes) if place is home)
            return [number for number in numbers if not machine.is_fresh(number) and not machine.is_away(number)]

        on_gpu, host_bytes = at(Home.GPU), plan.budgets.host_bytes if keep_host else 0
        leaving, staying = self._split(at(Home.HOST), host_bytes)
        host_bytes -= sum(subgroups[number].state_bytes for number in staying)
        leaving_gpu, to_host = self._split(on_gpu, host_bytes)
        self._check_room((*leaving, *leaving_gpu))
        if self.is_parked and on_gpu:
            on_host = tuple(self._on_host[1]) if self._on_host is not None else ()
            if to_host == on_host:
                leaving_gpu = to_host = ()  # which are where they may stay
            else:
                self._take_memory()
        moving = (*leaving, *leaving_gpu, *machine.staging.dirty)
        self._staged = tuple(machine.slots) or self._staged
        self._numbers += 1
        self._pending = pending = PendingPark(
            deque((leaving, *self._batches(leaving_gpu))),
            to_host,
            sum(subgroups[number].state_bytes for number in moving),
            time.monotonic(),
        )
        try:  # from now on a gradient that arrives takes memory first
            pending.kept = accepted()
        except BaseException:
            self._pending = None
            raise
        return pending

    def _split(self, numbers: Sequence[int], nbytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return which subgroups leave memory, and which stay, so that no more than `nbytes` of state does."""
        leaving, staying = list[int](), list[int]()
        for number in numbers:
            size = self._parts.plan.layout.subgroups[number].state_bytes
            (leaving if size > nbytes else staying).append(number)
            nbytes -= 0 if size > nbytes else size
        return tuple(leaving), tuple(staying)

    def _check_room(self, leaving: Sequence[int]) -> None:
        """Refuse what the paths have no room for."""
        parts = self._parts
        tiles = [tile for number in leaving for tile in parts.plan.layout.subgroups[number].tiles]
        needed = sum(nbytes for _, _, nbytes in tiles)
        advice = "free space, raise max_bytes, add a path, or let host memory stay: park(keep_host=True)"
        if needed and not parts.plan.budgets.paths:
            advice = "give paths, or let it stay: park(keep_host=True)"
            raise InfeasiblePlanError("the state that leaves memory", needed, {"paths": 0}, advice)
        missing = parts.machine.index.missing_bytes(Counter(nbytes for _, _, nbytes in tiles), spare=True)
        if missing:
            offers = {"room on the paths beside promised checkpoints": max(0, needed - missing)}
            raise InfeasiblePlanError("the state that leaves memory", needed, offers, advice)

    def _batches(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Cut subgroups at home on the GPU into batches that fit into scratch memory."""
        subgroups, batches, left_bytes = self._parts.plan.layout.subgroups, list[list[int]](), 0
        largest = max((subgroups[number].state_bytes for number in numbers), default=0)
        _, scratch_bytes = self._scratch(largest) if numbers else (0, 0)
        for number in numbers:
            if subgroups[number].state_bytes > left_bytes:
                batches.append([])
                left_bytes = scratch_bytes
            batches[-1].append(number)
            left_bytes -= subgroups[number].state_bytes
        return [tuple(batch) for batch in batches]

    def _scratch(self, nbytes: int) -> tuple[int, int]:
        """Return address and size of memory that holds nothing now."""
        return self._parts.memory.scratch(nbytes, staging=not self._parts.machine.slots)

    def is_due(self) -> bool:
        """Return whether `serve` has something to do."""
        pending, machine = self._pending, self._parts.machine
        if pending is None or not machine.idle:
            return False
        if machine.broken is not None or self._finished is not None:
            return True
        may_begin = machine.saver.under_way is None and not machine.is_leaving and Phase.BUSY not in machine.phases
        may_begin = may_begin and not machine.scratch["activations"].owners
        return pending.leave is None and may_begin

    @property
    def _finished(self) -> tuple[Leave, Exception | None] | None:
        """How what leaves now has ended, once it has; what was given up may end later, for nobody."""
        finished = self._parts.machine.finished_leave
        return finished if finished is not None and self._pending and finished[0] is self._pending.leave else None

    def serve(self) -> None:
        """Have the next batch leave memory, or give memory back when all has left it."""
        machine, pending = self._parts.machine, self._pending
        if pending is None:
            return
        finished = self._finished
        machine.take_finished_leave()
        error: BaseException | None = machine.broken
        if error is None and finished is not None:
            error = finished[1]
        if error is None:
            try:
                if pending.batches:
                    self._leave(pending)
                    return
                self._give_back(pending)
            except InternalError:
                raise
            except OffloadError as failed:
                error = failed
        self.end(error)

    def _leave(self, pending: PendingPark) -> None:
        """Have the next batch leave memory."""
        parts, batch = self._parts, pending.batches.popleft()
        self._check_room(batch)  # again: a path may have failed since
        if parts.plan.homes[batch[0]] is Home.GPU if batch else False:
            parts.lanes.fetch(as_pieces(self._copies(self._lend(batch))))
        self._numbers += 1
        pending.leave = Leave(self._numbers, batch)
        parts.allocate()
        parts.machine.handle(pending.leave)
        parts.executor.submit(parts.machine.take_operations())

    def _lend(self, batch: Sequence[int], address: int = 0) -> Mapping[int, int]:
        """Have a batch at home on the GPU lie in host memory for now: in scratch memory, or from an address on."""
        subgroups = self._parts.plan.layout.subgroups
        sizes = [subgroups[number].state_bytes for number in batch]
        address = address or self._scratch(sum(sizes))[0]
        places = dict(zip(batch, (address + end for end in accumulate(sizes, initial=0)), strict=False))
        self._parts.memory.lend(places)
        return places

    def _copies(self, places: Mapping[int, int]) -> list[tuple[int, int, int]]:
        """Return rows of (device address, host address, bytes) of state at home on the GPU."""
        homes, subgroups = self._parts.lanes.homes, self._parts.plan.layout.subgroups
        return [(homes[number].address, address, subgroups[number].state_bytes) for number, address in places.items()]

    def _give_back(self, pending: PendingPark) -> None:
        """Give all memory back that holds no state."""
        parts, machine, memory = self._parts, self._parts.machine, self._parts.memory
        homes = [s for s in parts.plan.layout.subgroups if parts.plan.homes[s.index] is Home.HOST]
        kept = [s for s in homes if not machine.is_away(s.index) and not machine.is_fresh(s.index)]
        ranges = [*pending.kept, *((memory.home(s.index), s.state_bytes) for s in kept)]
        if pending.to_host:
            nbytes = sum(parts.plan.layout.subgroups[number].state_bytes for number in pending.to_host)
            arena = memory.arena(nbytes)
            places = self._lend(pending.to_host, arena.address)
            try:
                parts.lanes.fetch(as_pieces(self._copies(places)))
            except OffloadError:
                memory.give_back(arena)
                raise
            self._on_host = arena, places
        if self._on_host is not None:
            ranges.append((self._on_host[0].address, self._on_host[0].nbytes))
        self._leave_device()
        self._kept = ranges
        try:
            given_bytes = memory.give_pages_back(ranges)
        finally:  # other threads read it, and take it that memory is gone
            self.is_parked = True
        seconds = time.monotonic() - pending.started_s
        self.figures = {
            metrics.PARK_MOVED_BYTES: pending.moves_bytes,
            metrics.GIVEN_BACK_BYTES: given_bytes,
            metrics.PARK_S: seconds,
            metrics.PREDICTED_BACK_S: self._back_s(given_bytes),
        }
        log.info(
            "parked: %s of memory given back, %s written in %s; %s of state comes home when it is used; "
            "back in about %s",
            format_bytes(given_bytes),
            format_bytes(pending.moves_bytes),
            format_seconds(seconds),
            format_bytes(self.away_bytes),
            format_seconds(self.figures[metrics.PREDICTED_BACK_S]),
        )

    def _leave_device(self) -> None:
        """Give all memory on the device back that the session has for good."""
        self._parts.lanes.wait()
        self._parts.lanes.memory.give_back()

    def _back_s(self, given_bytes: int) -> float:
        """Return what `predict_back_s` says of all that was given back and all that has left memory."""
        parts, machine = self._parts, self._parts.machine
        plan, reads = parts.plan, Counter[int]()
        away = [number for number in range(len(plan.homes)) if machine.is_away(number)]
        for number in (*away, *self._staged):
            for tile, _, nbytes in plan.layout.subgroups[number].tiles:
                record = machine.index.get(tile)
                if record is not None:
                    reads[record.location.path] += nbytes
        lent = self._on_host[1] if self._on_host is not None else {}
        sizes = {number: plan.layout.subgroups[number].state_bytes for number in (*away, *lent)}
        sent_bytes = sum(nbytes for number, nbytes in sizes.items() if plan.homes[number] is Home.GPU)
        beside_bytes = 0 if parts.lanes.pins else sum(sizes.values())
        return predict_back_s(
            parts.rates, reads, sent_bytes, given_bytes - beside_bytes, beside_bytes, parts.memory.take_bytes_per_s
        )

    def end(self, error: BaseException | None) -> None:
        """End the park under way, if there is one: nothing more leaves memory."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        machine = self._parts.machine
        if not machine.is_leaving:
            self._parts.memory.lend(self._on_host[1] if self._on_host is not None else {})
        elif machine.broken is None:
            machine.handle(Stay())
        if error is not None:
            kept = f"state stays in memory, which is not given back: {error}"
            log.warning("%s", kept)
            pending.error = error if isinstance(error, OffloadError) else OffloadError(kept)
        pending.done.set()

    # Memory is taken again

    def make_way(self, *, needs_memory: bool) -> None:
        """Let a request begin: finish or end the park under way, and take memory again if it is needed.

        Raises:
            OffloadError: There is no memory; the session stays parked.
        """
        if self._pending is not None:
            self._finish(ends=needs_memory)
        if needs_memory and self.is_parked:
            self._take_memory()
        if needs_memory and self._numbers and self._parts.machine.broken is None:
            self._bring_to_gpu()

    def _finish(self, *, ends: bool) -> None:
        """Finish the park under way, or have it end early."""
        machine, pending = self._parts.machine, self._pending
        if ends and pending is not None:
            log.info("a park ends early, as the session is used")
            pending.batches.clear()
            if machine.is_leaving:
                machine.handle(Stay())
            pump(machine, self._parts.executor, lambda m: not m.is_leaving)
            self.end(None)
        while self._pending is not None:
            pump(machine, self._parts.executor, lambda m: self.is_due())
            self.serve()

    def _take_memory(self) -> None:
        """Take memory again that was given back.

        Raises:
            InfeasiblePlanError: The system has less; the session stays parked.
            OffloadError: The GPU has less; the session stays parked.
        """
        parts = self._parts
        needed, available = int(self.figures.get(metrics.GIVEN_BACK_BYTES, 0)), available_bytes()
        if needed > available:
            advice = "free memory: the session stays parked, and nothing is lost"
            raise InfeasiblePlanError("memory of a parked session", needed, {"what is free": available}, advice)
        missing = {node: meant - here for node, (meant, here, _) in parts.memory.on_nodes().items()}
        check_free(missing, "free memory there: the session stays parked, and nothing is lost")
        with contextlib.ExitStack() as undo:
            parts.lanes.memory.take_again()
            undo.callback(self._leave_device)
            undo.callback(parts.memory.give_pages_back, self._kept)
            parts.memory.take_pages()
            if self._on_host is not None:
                parts.lanes.store(self._copies(self._on_host[1]))
            undo.pop_all()
        self.is_parked = False
        if self._on_host is not None:
            arena, self._on_host = self._on_host[0], None
            parts.memory.lend({})
            parts.memory.give_back(arena)

    def _bring_to_gpu(self) -> None:
        """Bring home state that belongs on the GPU, and lies on the paths."""
        parts, machine = self._parts, self._parts.machine
        homes = enumerate(parts.plan.homes)
        away = [number for number, home in homes if home is Home.GPU and machine.is_away(number)]
        for batch in self._batches(away):
            places = self._lend(batch)

            def visit(run: Run, places: Mapping[int, int] = places) -> None:
                number = run.visit.subgroup
                parts.lanes.store(self._copies({number: places[number]}))

            self._sweeps.begin(batch, visit, changes=False)
            pump(machine, parts.executor, lambda m: m.finished_sweep is not None)
            machine.take_finished_sweep()
            parts.executor.visit_with(visit_nothing)
            if machine.broken is not None:
                raise machine.broken
        parts.memory.lend({})
