"""Memory that a session gives back between steps, and takes again: a session that is parked.

State that may not stay in memory is written to the paths first. Then the pages of homes, staging slots, gradient
slots and all other memory of the session are given back to the system; their addresses stay reserved. The next
request that needs memory takes it again, and state is read back to its home when it is visited.

Invariants: no version and no bit changes; memory is given back only when nothing in it is needed any more; state that
does not fit on the paths is refused before anything moves.
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
from offload.engine.executor import no_visit
from offload.errors import ConfigError, InfeasiblePlanError, InternalError, OffloadError
from offload.memory.arenas import Arena, available_bytes
from offload.memory.nodes import check_free
from offload.plan import Home
from offload.predict.forecast import predict_back_s
from offload.schedule.loop import pump
from offload.schedule.operations import Evict, RunVisit, StopEviction
from offload.schedule.staging import Phase
from offload.session.parts import SessionParts
from offload.session.scratch import BufferRequests
from offload.session.sweeps import Sweeps
from offload.units import format_bytes, format_seconds

log = logging.getLogger("offload")


def check_keep_host(keep_host: object, sizes: Mapping[str, object]) -> None:
    """Refuse arguments of `park` that say in bytes how much stays: either nothing stays or what fits the budget.

    Raises:
        ConfigError: `sizes` has an argument, or `keep_host` is no bool.
    """
    for name, value in (*sizes.items(), ("keep_host", keep_host)):
        if not isinstance(value, bool) or name != "keep_host":
            allowed = "nothing stays by park(), and what host_memory has room for by park(keep_host=True)"
            raise ConfigError(name, value, allowed)


@dataclass(slots=True)
class PendingPark:
    """A park that is under way.

    Attributes:
        batches: Subgroups to be written to the paths, one batch after another: from host memory, then from the GPU.
        to_host: Subgroups at home on the GPU whose state stays in host memory.
        moves_bytes: State that is written to the paths from homes or staging slots.
        started_s: When `park` was called (`time.monotonic`).
        kept: Address and size of memory that is kept, as somebody holds gradients in it.
        leave: The operation that writes the present batch.
        done: Set when the park has ended, well or not.
        error: Why memory was not given back.
    """

    batches: deque[tuple[int, ...]]
    to_host: tuple[int, ...]
    moves_bytes: int
    started_s: float
    kept: Sequence[tuple[int, int]] = ()
    leave: Evict | None = None
    done: waits.Latch = field(default_factory=waits.Latch)
    error: OffloadError | None = None

    def wait(self) -> None:
        """Wait until the park has ended; raise its error if it failed."""
        waits.wait_for(self.done.wait, lambda: f"{format_bytes(self.moves_bytes)} of state to leave memory")
        if self.error is not None:
            raise self.error


class Parking:
    """One session's memory between steps: given back, and taken again.

    All methods belong to the engine thread.

    Attributes:
        is_parked: Whether memory has been given back, and none taken again.
        figures: Of the last park that gave memory back, by the names of metrics.
    """

    def __init__(self, parts: SessionParts, sweeps: Sweeps, wants: BufferRequests) -> None:
        self.is_parked = False
        self.figures: Mapping[str, float] = {}
        self._parts = parts
        self._sweeps = sweeps
        self._buffer_requests = wants
        self._pending: PendingPark | None = None
        self._numbers = 0  # of parks and batches so far: each has its own
        self._kept_ranges: Sequence[tuple[int, int]] = ()  # host memory that stays: (address, bytes)
        self._staged_before: tuple[int, ...] = ()
        """Subgroups that lay in staging slots before memory was given back: the next step has to fetch them."""
        self._on_host: tuple[Arena, Mapping[int, int]] | None = None
        """Host memory for state at home on the GPU while the session is parked, and its address by subgroup."""

    @property
    def is_parked_or_parking(self) -> bool:
        """Whether only requests may use memory: the session is parked, or is about to be."""
        return self.is_parked or self._pending is not None

    @property
    def evicted_bytes(self) -> int:
        """State at home in memory that lies on the paths now."""
        subgroups = self._parts.plan.layout.subgroups
        return sum(s.state_bytes for s in subgroups if self._parts.machine.is_evicted(s.index))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of parking; none before the first park. Any thread."""
        return {**self.figures, metrics.AWAY_BYTES: self.evicted_bytes} if self._numbers else {}

    # Memory is given back

    def begin(self, accepted: Callable[[], Sequence[tuple[int, int]]], *, keep_host: bool) -> PendingPark:
        """Begin a park, which `advance` then carries on between requests; see `Engine.park`.

        Raises:
            ConfigError: A gradient has arrived that no step has used, or a backward pass has not been taken.
            InfeasiblePlanError: The paths have no room for state that has to leave memory; nothing has changed.
        """
        parts, machine = self._parts, self._parts.machine
        plan, subgroups = parts.plan, parts.plan.layout.subgroups
        if parts.gradients.have_arrived():
            raise ConfigError("park", "gradients", "use them in a step, or call zero_grad() first: memory would go")

        if self._buffer_requests.are_in_use("activations"):
            raise ConfigError("park", "activations", "take the backward pass, or drop its loss: memory would go")

        def at(home: Home) -> list[int]:
            numbers = (number for number, place in enumerate(plan.homes) if place is home)
            return [number for number in numbers if not machine.is_fresh(number) and not machine.is_evicted(number)]

        on_gpu, host_bytes = at(Home.GPU), plan.budgets.host_bytes if keep_host else 0
        leaving, staying = self._split(at(Home.HOST), host_bytes)
        host_bytes -= sum(subgroups[number].state_bytes for number in staying)
        leaving_gpu, to_host = self._split(on_gpu, host_bytes)
        self._check_room((*leaving, *leaving_gpu))
        if self.is_parked and on_gpu:
            on_host = tuple(self._on_host[1]) if self._on_host is not None else ()
            if to_host == on_host:
                leaving_gpu = to_host = ()  # the last park has put them where they may stay
            else:
                self._reallocate_memory()
        moving = (*leaving, *leaving_gpu, *machine.staging.dirty)
        self._staged_before = tuple(machine.slots) or self._staged_before
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
        """Return which subgroups leave memory, and which stay, so that no more than `nbytes` of state stays."""
        leaving, staying = list[int](), list[int]()
        for number in numbers:
            size = self._parts.plan.layout.subgroups[number].state_bytes
            (leaving if size > nbytes else staying).append(number)
            nbytes -= 0 if size > nbytes else size
        return tuple(leaving), tuple(staying)

    def _check_room(self, leaving: Sequence[int]) -> None:
        """Refuse to write subgroups to the paths if these have no room for them beside promised checkpoints."""
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
        """Return address and size of host memory that holds nothing now, of `nbytes` or more."""
        return self._parts.memory.scratch(nbytes, staging=not self._parts.machine.slots)

    def is_due(self) -> bool:
        """Return whether `advance` has something to do."""
        pending, machine = self._pending, self._parts.machine
        if pending is None or not machine.has_no_sweep:
            return False
        if machine.broken is not None or self._finished is not None:
            return True
        may_begin = machine.saver.under_way is None and not machine.is_evicting and Phase.BUSY not in machine.phases
        may_begin = may_begin and not machine.scratch["activations"].owners
        return pending.leave is None and may_begin

    @property
    def _finished(self) -> tuple[Evict, Exception | None] | None:
        """The present batch and its error or None, once it has ended; batches that were given up end for nobody."""
        finished = self._parts.machine.finished_eviction
        return finished if finished is not None and self._pending and finished[0] is self._pending.leave else None

    def advance(self) -> None:
        """Write the next batch to the paths, or give memory back when all batches are written; called when due."""
        machine, pending = self._parts.machine, self._pending
        if pending is None:
            return
        finished = self._finished
        machine.take_finished_eviction()
        error: BaseException | None = machine.broken
        if error is None and finished is not None:
            error = finished[1]
        if error is None:
            try:
                if pending.batches:
                    self._begin_eviction(pending)
                    return
                self._free_memory(pending)
            except InternalError:
                raise
            except OffloadError as failed:
                error = failed
        self.end(error)

    def _begin_eviction(self, pending: PendingPark) -> None:
        """Begin to write the next batch to the paths."""
        parts, batch = self._parts, pending.batches.popleft()
        self._check_room(batch)  # again: a path may have failed since `begin`
        if parts.plan.homes[batch[0]] is Home.GPU if batch else False:
            parts.lanes.copy_to_host(as_pieces(self._copies(self._place_on_host(batch))))
        self._numbers += 1
        pending.leave = Evict(self._numbers, batch)
        parts.allocate()
        parts.machine.handle(pending.leave)
        parts.executor.submit(parts.machine.take_operations())

    def _place_on_host(self, batch: Sequence[int], address: int = 0) -> Mapping[int, int]:
        """Choose host addresses for a batch at home on the GPU, from `address` on or in scratch memory; return them.

        Until told otherwise, the engine looks for the state of these subgroups there. Nothing is copied.
        """
        subgroups = self._parts.plan.layout.subgroups
        sizes = [subgroups[number].state_bytes for number in batch]
        address = address or self._scratch(sum(sizes))[0]
        places = dict(zip(batch, (address + end for end in accumulate(sizes, initial=0)), strict=False))
        self._parts.memory.set_temporary_homes(places)
        return places

    def _copies(self, places: Mapping[int, int]) -> list[tuple[int, int, int]]:
        """Return rows of (device address, host address, bytes) of state at home on the GPU."""
        homes, subgroups = self._parts.lanes.homes, self._parts.plan.layout.subgroups
        return [(homes[number].address, address, subgroups[number].state_bytes) for number, address in places.items()]

    def _free_memory(self, pending: PendingPark) -> None:
        """Give all memory back that holds no state, and log what was given back and how long taking it will take."""
        parts, machine, memory = self._parts, self._parts.machine, self._parts.memory
        homes = [s for s in parts.plan.layout.subgroups if parts.plan.homes[s.index] is Home.HOST]
        kept = [s for s in homes if not machine.is_evicted(s.index) and not machine.is_fresh(s.index)]
        ranges = [*pending.kept, *((memory.state_address(s.index), s.state_bytes) for s in kept)]
        if pending.to_host:
            nbytes = sum(parts.plan.layout.subgroups[number].state_bytes for number in pending.to_host)
            arena = memory.allocate_arena(nbytes)
            places = self._place_on_host(pending.to_host, arena.address)
            try:
                parts.lanes.copy_to_host(as_pieces(self._copies(places)))
            except OffloadError:
                memory.free_arena(arena)
                raise
            self._on_host = arena, places
        if self._on_host is not None:
            ranges.append((self._on_host[0].address, self._on_host[0].nbytes))
        self._free_device_memory()
        self._kept_ranges = ranges
        try:
            given_bytes = memory.discard_pages(ranges)
        finally:  # `arrived` on other threads reads it, to take memory again before writing to slots
            self.is_parked = True
        seconds = time.monotonic() - pending.started_s
        self.figures = {
            metrics.PARK_MOVED_BYTES: pending.moves_bytes,
            metrics.GIVEN_BACK_BYTES: given_bytes,
            metrics.PARK_S: seconds,
            metrics.PREDICTED_BACK_S: self._predicted_back_s(given_bytes),
        }
        log.info(
            "parked: %s of memory given back, %s written in %s; %s of state comes home when it is used; "
            "back in about %s",
            format_bytes(given_bytes),
            format_bytes(pending.moves_bytes),
            format_seconds(seconds),
            format_bytes(self.evicted_bytes),
            format_seconds(self.figures[metrics.PREDICTED_BACK_S]),
        )

    def _free_device_memory(self) -> None:
        """Give all memory on the device back that the session has for good."""
        self._parts.lanes.wait()
        self._parts.lanes.memory.free_all()

    def _predicted_back_s(self, given_bytes: int) -> float:
        """Return the seconds predicted for taking memory again and reading back state that has left it."""
        parts, machine = self._parts, self._parts.machine
        plan, reads = parts.plan, Counter[int]()
        away = [number for number in range(len(plan.homes)) if machine.is_evicted(number)]
        for number in (*away, *self._staged_before):
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
        """End the park under way, if there is one: nothing more leaves memory; `error` is raised by its `wait`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        machine = self._parts.machine
        if not machine.is_evicting:
            self._parts.memory.set_temporary_homes(self._on_host[1] if self._on_host is not None else {})
        elif machine.broken is None:
            machine.handle(StopEviction())
        if error is not None:
            kept = f"state stays in memory, which is not given back: {error}"
            log.warning("%s", kept)
            pending.error = error if isinstance(error, OffloadError) else OffloadError(kept)
        pending.done.set()

    # Memory is taken again

    def end_for_request(self, *, needs_memory: bool) -> None:
        """Before a request begins: end the park under way, or finish it, and take memory again if `needs_memory`.

        Raises:
            OffloadError: There is no memory; the session stays parked.
        """
        if self._pending is not None:
            self._finish_or_end(ends=needs_memory)
        if needs_memory and self.is_parked:
            self._reallocate_memory()
        if needs_memory and self._numbers and self._parts.machine.broken is None:
            self._fetch_to_gpu()

    def _finish_or_end(self, *, ends: bool) -> None:
        """Wait until the park under way is finished; with `ends` only until its present batch is."""
        machine, pending = self._parts.machine, self._pending
        if ends and pending is not None:
            log.info("a park ends early, as the session is used")
            pending.batches.clear()
            if machine.is_evicting:
                machine.handle(StopEviction())
            pump(machine, self._parts.executor, lambda m: not m.is_evicting)
            self.end(None)
        while self._pending is not None:
            pump(machine, self._parts.executor, lambda m: self.is_due())
            self.advance()

    def _reallocate_memory(self) -> None:
        """Take memory again that was given back, all or none of it, and copy state back to the GPU.

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
            parts.lanes.memory.reallocate_all()
            undo.callback(self._free_device_memory)
            undo.callback(parts.memory.discard_pages, self._kept_ranges)
            parts.memory.restore_pages()
            if self._on_host is not None:
                parts.lanes.copy_to_device(self._copies(self._on_host[1]))
            undo.pop_all()
        self.is_parked = False
        if self._on_host is not None:
            arena, self._on_host = self._on_host[0], None
            parts.memory.set_temporary_homes({})
            parts.memory.free_arena(arena)

    def _fetch_to_gpu(self) -> None:
        """Read state at home on the GPU back from the paths, batch by batch through host memory."""
        parts, machine = self._parts, self._parts.machine
        homes = enumerate(parts.plan.homes)
        away = [number for number, home in homes if home is Home.GPU and machine.is_evicted(number)]
        for batch in self._batches(away):
            places = self._place_on_host(batch)

            def visit(run: RunVisit, places: Mapping[int, int] = places) -> None:
                number = run.visit.subgroup
                parts.lanes.copy_to_device(self._copies({number: places[number]}))

            self._sweeps.begin(batch, visit, changes=False)
            pump(machine, parts.executor, lambda m: m.finished_sweep is not None)
            machine.take_finished_sweep()
            parts.executor.set_visitor(no_visit)
            if machine.broken is not None:
                raise machine.broken
        parts.memory.set_temporary_homes({})
