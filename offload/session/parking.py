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
from typing import NamedTuple

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
    # Any size is refused, and of `keep_host` anything but a bool.
    for name, value in (*sizes.items(), ("keep_host", keep_host)):
        if name != "keep_host" or not isinstance(value, bool):
            advice = "nothing stays by park(), and what host_memory has room for by park(keep_host=True)"
            raise ConfigError(name, value, advice)


@dataclass(slots=True)
class PendingPark:
    """A park that is under way.

    Attributes:
        batches: Subgroups to be written to the paths, one batch after another: from host memory, then from the GPU.
        to_host: Subgroups at home on the GPU whose state stays in host memory.
        moves_bytes: State that is written to the paths from homes or staging slots.
        started_s: When `park` was called (`time.monotonic`).
        kept_ranges: Address and size of memory that is kept, as somebody holds gradients in it.
        eviction: The event that had the machine write the present batch; None before the first.
        done: Set when the park has ended, well or not.
        error: Why memory was not given back.
    """

    batches: deque[tuple[int, ...]]
    to_host: tuple[int, ...]
    moves_bytes: int
    started_s: float
    kept_ranges: Sequence[tuple[int, int]] = ()
    eviction: Evict | None = None
    done: waits.Latch = field(default_factory=waits.Latch)
    error: OffloadError | None = None

    def wait(self) -> None:
        """Wait until the park has ended; raise its error if it failed."""
        waits.wait_for(self.done.wait, lambda: f"{format_bytes(self.moves_bytes)} of state to leave memory")
        if self.error is not None:
            raise self.error


class _HostCopies(NamedTuple):
    """Host memory for state at home on the GPU while the session is parked, and each subgroup's address in it."""

    arena: Arena
    places: Mapping[int, int]


class Parking:
    """One session's memory between steps: given back, and taken again.

    All methods belong to the engine thread.

    Attributes:
        is_parked: Whether memory has been given back, and none taken again.
        figures: Of the last park that gave memory back, by the names of metrics.
    """

    def __init__(self, parts: SessionParts, sweeps: Sweeps, buffer_requests: BufferRequests) -> None:
        self.is_parked = False
        self.figures: Mapping[str, float] = {}
        self._parts = parts
        self._sweeps = sweeps
        self._buffer_requests = buffer_requests
        self._pending: PendingPark | None = None  # the park under way
        self._last_number = 0  # of parks and batches, which are numbered together; 0 before the first park
        self._kept_ranges: Sequence[tuple[int, int]] = ()  # host memory that stays: (address, bytes)
        self._staged_before: tuple[int, ...] = ()
        """Subgroups that lay in staging slots before memory was given back: the next step has to fetch them."""
        self._host_copies: _HostCopies | None = None  # of state at home on the GPU that stays in host memory

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
        return {**self.figures, metrics.AWAY_BYTES: self.evicted_bytes} if self._last_number else {}

    # Memory is given back

    def begin(self, accepted: Callable[[], Sequence[tuple[int, int]]], *, keep_host: bool) -> PendingPark:
        """Begin a park, which `advance` then carries on between requests.

        Args:
            accepted: Called once parking is possible; returns address and size of gradients whose memory is kept.
            keep_host: Whether state stays in host memory, up to the budget.

        Raises:
            ConfigError: A gradient has arrived that no step has used, or a backward pass has not been taken.
            InfeasiblePlanError: The paths have no room for state that has to leave memory; nothing has changed.
        """
        machine = self._parts.machine
        self._check_may_park()
        # State at home in host memory stays first, up to the budget; then state from the GPU, in what is left of it.
        host_bytes = self._parts.plan.budgets.host_bytes if keep_host else 0
        leaving_host, staying = self._split(self._in_memory_of(Home.HOST), host_bytes)
        on_gpu = self._in_memory_of(Home.GPU)
        leaving_gpu, to_host = self._split(on_gpu, host_bytes - self._parts.plan.state_bytes_of(staying))
        self._check_room((*leaving_host, *leaving_gpu))
        if self.is_parked and on_gpu:  # then the last park has copied this state to host memory
            copied_before = tuple(self._host_copies.places) if self._host_copies is not None else ()
            if to_host == copied_before:
                leaving_gpu = to_host = ()  # it stays where it is
            else:
                self._reallocate_memory()  # which first copies all of it back to the GPU
        moves_bytes = self._parts.plan.state_bytes_of((*leaving_host, *leaving_gpu, *machine.staging.dirty))
        self._staged_before = tuple(machine.slots) or self._staged_before  # a second park finds the slots empty
        self._last_number += 1
        # The first batch may be empty: its eviction flushes and empties the staging slots, too.
        batches = deque((leaving_host, *self._batches(leaving_gpu)))
        self._pending = pending = PendingPark(batches, to_host, moves_bytes, started_s=time.monotonic())
        try:  # from now on a gradient that arrives takes memory first
            pending.kept_ranges = accepted()
        except BaseException:
            self._pending = None
            raise
        return pending

    def _check_may_park(self) -> None:
        """Refuse to park while memory holds data that has no copy: gradients, or tensors saved for backward."""
        if self._parts.gradients.have_arrived():
            raise ConfigError("park", "gradients", "use them in a step, or call zero_grad() first: memory would go")
        if self._buffer_requests.are_in_use("activations"):
            raise ConfigError("park", "activations", "take the backward pass, or drop its loss: memory would go")

    def _in_memory_of(self, home: Home) -> list[int]:
        """Return the subgroups of a home in memory whose state has been made, and has not been evicted."""
        machine = self._parts.machine
        numbers = (number for number, place in enumerate(self._parts.plan.homes) if place is home)
        return [number for number in numbers if not machine.is_fresh(number) and not machine.is_evicted(number)]

    def _split(self, numbers: Sequence[int], most_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return which subgroups leave memory, and which stay: in their order, each that still fits `most_bytes`."""
        leaving, staying = list[int](), list[int]()
        left_bytes = most_bytes
        for number in numbers:
            state_bytes = self._parts.plan.layout.subgroups[number].state_bytes
            if state_bytes > left_bytes:
                leaving.append(number)
            else:
                staying.append(number)
                left_bytes -= state_bytes
        return tuple(leaving), tuple(staying)

    def _check_room(self, leaving: Sequence[int]) -> None:
        """Refuse to write subgroups to the paths if these have no room for them beside planned checkpoints."""
        parts = self._parts
        tiles = [tile for number in leaving for tile in parts.plan.layout.subgroups[number].tiles]
        needed = sum(nbytes for _, _, nbytes in tiles)
        advice = "free space, raise max_bytes, add a path, or let host memory stay: park(keep_host=True)"
        if needed and not parts.plan.budgets.paths:
            advice = "give paths, or let it stay: park(keep_host=True)"
            raise InfeasiblePlanError("the state that leaves memory", needed, {"paths": 0}, advice)
        # `lent`: in room that planned checkpoints leave.
        missing = parts.machine.index.missing_bytes(Counter(nbytes for _, _, nbytes in tiles), lent=True)
        if missing:
            offers = {"room on the paths beside planned checkpoints": max(0, needed - missing)}
            raise InfeasiblePlanError("the state that leaves memory", needed, offers, advice)

    def _batches(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Cut subgroups at home on the GPU into batches, each of which fits into unused host memory.

        Their state passes through that memory to the paths, or back, one batch at a time.
        """
        if not numbers:
            return []
        subgroups = self._parts.plan.layout.subgroups
        _, host_bytes = self._unused_host_memory(max(subgroups[number].state_bytes for number in numbers))
        batches, left_bytes = list[list[int]](), 0  # of host memory for the last batch; 0: begin one
        for number in numbers:
            if subgroups[number].state_bytes > left_bytes:
                batches.append([])
                left_bytes = host_bytes
            batches[-1].append(number)
            left_bytes -= subgroups[number].state_bytes
        return [tuple(batch) for batch in batches]

    def _unused_host_memory(self, nbytes: int) -> tuple[int, int]:
        """Return address and size of `nbytes` or more of host memory that holds nothing; it may be allocated now.

        These are the staging slots if they are large enough and no subgroup is in one.
        """
        return self._parts.memory.scratch(nbytes, staging=not self._parts.machine.slots)

    def is_due(self) -> bool:
        """Return whether `advance` has something to do."""
        pending, machine = self._pending, self._parts.machine
        if pending is None or not machine.has_no_sweep:
            return False
        if machine.broken is not None or self._finished_batch is not None:
            return True
        if pending.eviction is not None or machine.is_evicting:  # a batch is being written, or an earlier park's is
            return False
        # A save may still read state, and some state may still be on its way back from the GPU.
        nothing_moves = machine.saver.under_way is None and Phase.BUSY not in machine.phases
        # Tiles of discarded activations, too, may still be on their way from and to buffers.
        return nothing_moves and not machine.scratch["activations"].owners

    @property
    def _finished_batch(self) -> tuple[Evict, Exception | None] | None:
        """The present batch's eviction, with its error or None, once it has ended; None before.

        The end of an eviction that an earlier park has begun is ignored.
        """
        finished, pending = self._parts.machine.finished_eviction, self._pending
        is_of_batch = finished is not None and pending is not None and finished[0] is pending.eviction
        return finished if is_of_batch else None

    def advance(self) -> None:
        """When due: begin to write the next batch, or give memory back after the last; an error ends the park."""
        pending = self._pending
        if pending is None:
            return
        machine, finished = self._parts.machine, self._finished_batch
        machine.take_finished_eviction()
        # Before the first batch nothing has finished, and there is no error unless the machine has broken.
        error = machine.broken if machine.broken is not None or finished is None else finished[1]
        if error is None:
            try:
                if pending.batches:
                    self._begin_eviction(pending)
                    return
                self._free_memory(pending)
            except InternalError:  # a bug of this library breaks the session
                raise
            except OffloadError as failed:
                error = failed
        self.end(error)

    def _begin_eviction(self, pending: PendingPark) -> None:
        """Begin to write the next batch to the paths."""
        parts, batch = self._parts, pending.batches.popleft()
        self._check_room(batch)  # again: a path may have failed since `begin`
        # All of a batch has one kind of home. State from the GPU is copied to host memory, and written from there.
        if any(parts.plan.homes[number] is Home.GPU for number in batch):
            parts.lanes.copy_to_host(as_pieces(self._copies(self._place_on_host(batch))))
        self._last_number += 1
        pending.eviction = Evict(self._last_number, batch)
        parts.allocate()  # the slots that steps need get their room first
        parts.machine.handle(pending.eviction)
        parts.executor.submit(parts.machine.take_operations())

    def _place_on_host(self, batch: Sequence[int], address: int | None = None) -> Mapping[int, int]:
        """Give the subgroups of a batch at home on the GPU temporary homes in host memory; return their addresses.

        They lie one after another, from `address` on or (None) in unused memory. Until the next `set_temporary_homes`
        the engine looks for these subgroups' state there. Nothing is copied.
        """
        subgroups = self._parts.plan.layout.subgroups
        sizes = [subgroups[number].state_bytes for number in batch]
        if address is None:
            address, _ = self._unused_host_memory(sum(sizes))
        offsets = accumulate(sizes, initial=0)  # and the end of the last, which `zip` leaves out
        places = {number: address + offset for number, offset in zip(batch, offsets, strict=False)}
        self._parts.memory.set_temporary_homes(places)
        return places

    def _copies(self, places: Mapping[int, int]) -> list[tuple[int, int, int]]:
        """Return rows of (device address, host address, bytes) of state at home on the GPU."""
        homes, subgroups = self._parts.lanes.homes, self._parts.plan.layout.subgroups
        return [(homes[number].address, address, subgroups[number].state_bytes) for number, address in places.items()]

    def _free_memory(self, pending: PendingPark) -> None:
        """Give back all memory but that of state and of kept gradients; log how much, and the time to take it again.

        State at home on the GPU that is to stay in host memory is copied there before.
        """
        parts, memory = self._parts, self._parts.memory
        kept_ranges = [*pending.kept_ranges]
        for number in self._in_memory_of(Home.HOST):
            kept_ranges.append((memory.state_address(number), parts.plan.layout.subgroups[number].state_bytes))
        if pending.to_host:
            self._host_copies = self._copy_to_host(pending.to_host)
        if self._host_copies is not None:  # made now, or by the park before, whose copies stay
            kept_ranges.append((self._host_copies.arena.address, self._host_copies.arena.nbytes))
        self._free_device_memory()
        self._kept_ranges = kept_ranges
        try:
            freed_bytes = memory.discard_pages(kept_ranges)
        finally:
            # Even after an error, as some memory may be gone: threads that write gradients to slots read this, and
            # take memory again first.
            self.is_parked = True
        self._report(pending, freed_bytes)

    def _copy_to_host(self, numbers: Sequence[int]) -> _HostCopies:
        """Copy state from the GPU to new host memory, in which it stays while the session is parked."""
        memory = self._parts.memory
        arena = memory.allocate_arena(self._parts.plan.state_bytes_of(numbers))
        places = self._place_on_host(numbers, arena.address)
        try:
            self._parts.lanes.copy_to_host(as_pieces(self._copies(places)))
        except OffloadError:
            memory.free_arena(arena)
            raise
        return _HostCopies(arena, places)

    def _report(self, pending: PendingPark, freed_bytes: int) -> None:
        """Note the figures of a park that has given memory back, and log them."""
        seconds = time.monotonic() - pending.started_s
        self.figures = {
            metrics.PARK_MOVED_BYTES: pending.moves_bytes,
            metrics.GIVEN_BACK_BYTES: freed_bytes,
            metrics.PARK_S: seconds,
            metrics.PREDICTED_BACK_S: self._predicted_back_s(freed_bytes),
        }
        log.info(
            "parked: %s of memory given back, %s written in %s; %s of state comes home when it is used; "
            "back in about %s",
            format_bytes(freed_bytes),
            format_bytes(pending.moves_bytes),
            format_seconds(seconds),
            format_bytes(self.evicted_bytes),
            format_seconds(self.figures[metrics.PREDICTED_BACK_S]),
        )

    def _free_device_memory(self) -> None:
        """Free the memory on the device that the session keeps between steps, once no lane uses it."""
        self._parts.lanes.wait()
        self._parts.lanes.memory.free_all()

    def _predicted_back_s(self, freed_bytes: int) -> float:
        """Return the seconds predicted for taking memory again and reading back state that has left it.

        That is state that was evicted from its home, and state that lay in staging slots. State at home on the GPU is
        also sent there.
        """
        parts, machine, homes = self._parts, self._parts.machine, self._parts.plan.homes
        evicted = [number for number in range(len(homes)) if machine.is_evicted(number)]
        read_bytes = Counter[int]()  # by path
        for number in (*evicted, *self._staged_before):
            for tile, _, nbytes in parts.plan.layout.subgroups[number].tiles:
                record = machine.index.get(tile)
                if record is not None:
                    read_bytes[record.location.path] += nbytes
        coming_home = {*evicted, *(self._host_copies.places if self._host_copies is not None else ())}
        # Pages of homes are touched while state is read into them; all memory that is pinned is touched before that.
        beside_bytes = 0 if parts.lanes.pins else self._parts.plan.state_bytes_of(coming_home)
        return predict_back_s(
            parts.rates,
            read_bytes,
            sent_bytes=self._parts.plan.state_bytes_of(number for number in coming_home if homes[number] is Home.GPU),
            before_bytes=freed_bytes - beside_bytes,
            beside_bytes=beside_bytes,
            allocate_bytes_per_s=parts.memory.allocate_bytes_per_s,
        )

    def end(self, error: BaseException | None) -> None:
        """End the park under way, if there is one: nothing more leaves memory; its `wait` raises any `error`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        machine = self._parts.machine
        if not machine.is_evicting:  # else flushes still read the temporary homes of the present batch
            self._parts.memory.set_temporary_homes(self._host_copies.places if self._host_copies is not None else {})
        elif machine.broken is None:
            machine.handle(StopEviction())
        if error is not None:
            message = f"state stays in memory, which is not given back: {error}"
            log.warning("%s", message)
            pending.error = error if isinstance(error, OffloadError) else OffloadError(message)
        pending.done.set()

    # Memory is taken again

    def end_for_request(self, *, needs_memory: bool) -> None:
        """Before a request begins: end the park under way, or finish it, and take memory again if `needs_memory`.

        Raises:
            OffloadError: There is no memory; the session stays parked.
        """
        if self._pending is not None:
            if needs_memory:
                self._end_early(self._pending)
            else:
                self._finish()
        if needs_memory and self.is_parked:
            self._reallocate_memory()
        has_parked = self._last_number > 0  # else no state has left its home
        if needs_memory and has_parked and self._parts.machine.broken is None:
            self._fetch_to_gpu()

    def _end_early(self, pending: PendingPark) -> None:
        """End the park under way once its present batch has ended: the request needs the memory."""
        machine = self._parts.machine
        log.info("a park ends early, as the session is used")
        pending.batches.clear()
        if machine.is_evicting:
            machine.handle(StopEviction())
        pump(machine, self._parts.executor, lambda m: not m.is_evicting)
        self.end(None)

    def _finish(self) -> None:
        """Carry on the park under way until it has ended."""
        while self._pending is not None:
            pump(self._parts.machine, self._parts.executor, lambda m: self.is_due())
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
        # By memory node: bytes that are to lie there, and do not now.
        missing = {node: meant - here for node, (meant, here, _) in parts.memory.on_nodes().items()}
        check_free(missing, "free memory there: the session stays parked, and nothing is lost")
        with contextlib.ExitStack() as undo:
            parts.lanes.memory.reallocate_all()
            undo.callback(self._free_device_memory)
            undo.callback(parts.memory.discard_pages, self._kept_ranges)
            parts.memory.restore_pages()  # if it fails, some pages may be there: discarded, too
            if self._host_copies is not None:
                parts.lanes.copy_to_device(self._copies(self._host_copies.places))
            undo.pop_all()  # all has gone well
        self.is_parked = False
        if self._host_copies is not None:
            arena, self._host_copies = self._host_copies.arena, None
            parts.memory.set_temporary_homes({})
            parts.memory.free_arena(arena)

    def _fetch_to_gpu(self) -> None:
        """Read state at home on the GPU back from the paths, batch by batch through host memory."""
        parts, machine = self._parts, self._parts.machine
        homes = enumerate(parts.plan.homes)
        evicted = [number for number, home in homes if home is Home.GPU and machine.is_evicted(number)]
        for batch in self._batches(evicted):
            # The sweep fetches state to these places, as long as they are set.
            places = self._place_on_host(batch)

            def visit(run: RunVisit, places: Mapping[int, int] = places) -> None:
                """Copy the state that has been read from its place in this batch to its home."""
                number = run.visit.subgroup
                parts.lanes.copy_to_device(self._copies({number: places[number]}))

            self._sweeps.begin(batch, visit, changes=False)
            pump(machine, parts.executor, lambda m: m.finished_sweep is not None)
            machine.take_finished_sweep()
            parts.executor.set_visitor(no_visit)
            if machine.broken is not None:
                raise machine.broken
        parts.memory.set_temporary_homes({})
