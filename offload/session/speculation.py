"""Updates that are admitted before their step is sealed: speculative versions, made during backward.

When all gradients of a streamed subgroup are there, it is updated as if nothing were clipped, with weights written to
an *image* of them. The step makes the rows that it would use, and takes the version of a subgroup as its own where
these rows, and the bytes of gradients (and fp32 weights), are those that the version was made from, bit for bit. It
revokes all others: a mistake costs time, and changes nothing.

Not known here: where a speculative version lies (`offload.schedule.machine`), whose gradients they are.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload import metrics
from offload.device.pieces import Pieces, as_pieces
from offload.dtypes import DtypeCode
from offload.engine.tables import StepRows
from offload.errors import InternalError, OffloadError, known
from offload.gradients.store import FinalGradient
from offload.kernels.table import active_rows
from offload.layout import Subgroup
from offload.memory.arenas import Arena, available_bytes
from offload.protocols import WAKE
from offload.schedule.operations import Admit, Begin, Hold, Run, Seal, Stop, Sweep, Visit
from offload.session.parts import SessionParts
from offload.session.sweeps import Sweeps

log = logging.getLogger("offload")

LONGEST_PAUSE = 64
"""Steps without speculation after steps that revoked most of it, at most; twice as many each time."""

MOST_WAITING = 1024
"""Arrivals that the engine thread leaves where they were posted, at most, while they have nothing updated."""

DROPPED = -1
"""Posted in the place of a parameter's position: all gradients that have arrived are dropped."""

SUMS = 2
"""Fingerprints of a segment: of its gradient, and of its fp32 weight."""


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """What the step would use if it came now.

    Attributes:
        groups: Hyperparameters of all groups.
        kept: Memory to be kept while updates read it: fp32 weights, gradients in no slot.
        scale: Of the loss; None for that of the last step.
        weights: Where weights are bound.
    """

    groups: Sequence[Any]
    kept: Sequence[torch.Tensor]
    scale: float | None
    weights: npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Source:
    """What a speculative version was made from.

    Attributes:
        table: The rows of its update.
        sums: Fingerprints of what the update has read, by segment; complete when it has run.
    """

    table: npt.NDArray[Any]
    sums: npt.NDArray[np.uint64]


class Speculation:
    """The updates of one session that are made before their step is sealed.

    Gradients count as final at the arrival that was their last in the step before, so there is none before the first
    step, nor before one after a step that was clipped.

    Callers post arrivals, and what a step would use now. The engine thread counts them, and decides.

    Args:
        parts: Its parts.
        sweeps: Makes open ones.
    """

    def __init__(self, parts: SessionParts, sweeps: Sweeps) -> None:
        self.is_on = False
        """Whether anything is updated before its step is sealed, from the next step on."""
        self.confirmed_bytes = self.revoked_bytes = 0
        """State of versions that the last step which was sealed has confirmed, and of those revoked up to then."""
        self.arrivals: deque[tuple[int, FinalGradient | None, bool | None]] = deque()
        """Posted and not counted yet: position, the gradient if it lies in no slot, whether the pass is the last."""
        self._parts = parts
        self._sweeps = sweeps
        self._first_position: int | None = None  # of the gradient that came first: with it a pass begins
        self._is_last: bool | None = None  # whether the pass is the last before the step, if that is known
        self._foreseen: _Foreseen | None = None
        self._is_asking = False  # whether subgroups may be admitted in this pass, or once the pending step is over
        self._wanted = MOST_WAITING  # with fewer arrivals nothing can be admitted
        self._figures = {metrics.CONFIRMED_BYTES: 0, metrics.REVOKED_BYTES: 0}  # of the last step that has ended
        self._revoked_bytes = 0  # of versions that were revoked for other requests since the last step
        self._is_armed = False  # whether subgroups may be opened and admitted for the next step
        self._pause = self._next_pause = 0
        self._scale = 1.0
        self._counts: Counter[int] = Counter()  # arrivals of each gradient since the last step
        self._expected: dict[int, int] = {}
        self._clock = itertools.count()
        self._arrived_at: dict[int, int] = {}
        self._final: set[int] = set()  # gradients that have arrived, and of which no more comes before the step
        self._has_heard = False  # whether a pass since the last step was not the last one
        self._all_arrived = False  # whether all gradients of the last step arrived, and no others
        self._missing_gradients: dict[int, int] = {}  # by subgroup of the next open sweep: not final yet
        self._order: list[int] = []
        self._admissible: deque[int] = deque()  # subgroups whose gradients are final, and not admitted yet
        self._rows: StepRows | None = None  # of the expected step
        self._images: Arena | None = None
        self._image_offsets: dict[int, int] = {}
        self._image_candidates: frozenset[int] = frozenset()  # some may have found no memory for an image
        self._sources: dict[int, _Source] = {}
        self._slotless: set[int] = set()  # parameters whose gradients lie in no slot
        self._loose_gradients: dict[int, FinalGradient] = {}  # ... and where updates may read them
        self._kept_tensors: Sequence[torch.Tensor] = ()

    def metrics(self) -> dict[str, int]:
        """Return what the last step that has ended took over, and what it did not; nothing where this is not on."""
        return self._figures if self.is_on else {}

    # On the caller's thread, or that of backward

    def begins_pass(self, position: int, is_last: bool | None) -> bool:
        """Take note of the pass of which a gradient is about to arrive; return whether it begins, to be foreseen."""
        self._is_last = is_last
        begins = self.is_on and self._is_asking and self._first_position in (None, position)
        if begins:
            self._first_position, self._foreseen = position, None
        return begins

    def foresee(self, groups: Sequence[Any], kept: Sequence[torch.Tensor], scale: float | None) -> None:
        """Take note of what the step would use if it came now, as a pass begins."""
        # Weights that are bound later may be gone before the step; the caller has these kept.
        self._foreseen = _Foreseen(groups, kept, scale, self._parts.tables.weights.copy())

    def note_arrival(self, position: int, gradient: FinalGradient | None = None) -> None:
        """Post that a gradient has arrived, accumulated or new: in its slot, or where `gradient` lies."""
        if not self.is_on:
            return
        self.arrivals.append((position, gradient, self._is_last))
        if len(self.arrivals) >= self._wanted or gradient is not None:  # which is not to be held for nothing
            self._parts.queue.post(WAKE)

    def drop_arrivals(self) -> bool:
        """Post that gradients are dropped; return whether a version may have been made from them."""
        if not self.arrivals and not self._counts:  # as after the begin of a step
            return False
        self._first_position = None
        self.arrivals.append((DROPPED, None, None))
        return self._is_armed or bool(self._loose_gradients)

    # On the engine thread

    def _count_arrivals(self) -> None:
        """Count what has arrived, and admit the subgroups of which that was the last."""
        while True:
            while self.arrivals:
                self._count(*self.arrivals[0])
                self.arrivals.popleft()  # last: whoever drops gradients looks at both
            missing = [count for count in self._missing_gradients.values() if count > 0] if self._is_armed else []
            self._wanted = min(missing, default=MOST_WAITING)
            if len(self.arrivals) < self._wanted:  # else they have come before `_wanted` said that they count
                return

    def _count(self, position: int, gradient: FinalGradient | None, is_last: bool | None) -> None:
        if position == DROPPED:
            self._forget_arrivals()
            return
        self._counts[position] += 1
        self._arrived_at[position] = next(self._clock)
        if gradient is not None:
            self._slotless.add(position)
        if not self._is_final(position, is_last) or position in self._final:
            return
        self._final.add(position)
        if self._is_armed:
            if gradient is not None:
                self._loose_gradients.setdefault(position, gradient)  # the one before may still be read
            for subgroup, _ in self._parts.plan.layout.places[position]:
                if subgroup in self._missing_gradients:
                    self._missing_gradients[subgroup] -= 1
                    if not self._missing_gradients[subgroup]:
                        self._admit(subgroup)

    def _is_final(self, position: int, is_last: bool | None) -> bool:
        """Return whether a gradient that has arrived is what the step will read.

        Unless a pass was said not to be the last, that is its n-th arrival, n being the count before the last step.
        """
        self._has_heard |= is_last is False
        if self._has_heard and is_last is not None:
            return is_last and position in self._expected
        return self._counts[position] == self._expected.get(position)

    def _forget_arrivals(self) -> None:
        """Forget them; admit nothing more before a request, as gradients that were admitted may have been dropped."""
        self._counts.clear()
        self._final.clear()
        self._has_heard = False
        self._admissible.clear()
        self._missing_gradients.clear()

    def _admit(self, subgroup: int) -> None:
        if self._rows is None:
            self._rows = self._expect_step()
        if self._rows is None:
            self._is_armed = False
            return
        if self._loose_gradients:
            segments = self._parts.plan.layout.subgroups[subgroup].segments
            self._parts.gradients.read_final(self._loose_gradients, segments, self._rows)
        self._admissible.append(subgroup)

    def _expect_step(self) -> StepRows | None:
        """Return the rows of the step as it was foreseen; None where they cannot be made."""
        foreseen = self._foreseen
        if foreseen is None:
            return None
        self._kept_tensors, slots = foreseen.kept, self._parts.gradients.read_at()
        scale = self._scale if foreseen.scale is None else foreseen.scale
        try:
            return self._parts.tables.rows(foreseen.groups, scale, 1.0, [*self._expected], slots, foreseen.weights)
        except Exception:  # the caller may mend hyperparameters before the step, which raises it else
            return None

    def is_due(self) -> bool:
        """Count what has arrived; return whether a sweep is to be opened, or a visit to be admitted, now."""
        machine = self._parts.machine
        if self.arrivals:
            self._count_arrivals()
        if machine.broken is not None:
            return False
        if not machine.is_open:
            return self._is_armed and machine.idle and machine.finished_sweep is None
        with contextlib.suppress(OffloadError):
            return self._next_has_landed()
        return True  # a GPU has failed: `serve` says so

    def _next_has_landed(self) -> bool:
        """Return whether gradients of the next subgroup are where an update reads them.

        Lanes of a GPU wake this thread when more of them are.
        """
        if not self._admissible:
            return False
        return self._parts.gradients.has_landed(self._parts.plan.layout.subgroups[self._admissible[0]].segments)

    def _may_speculate(self, subgroup: Subgroup) -> bool:
        """Return whether a subgroup can be updated before its step is sealed."""
        parts, number = self._parts, subgroup.index
        if not parts.plan.may_speculate(number) or parts.machine.is_fresh(number):
            return False
        return not parts.plan.layout.begins_within_block(subgroup)  # where no fingerprint can begin

    def serve(self) -> None:
        """Open the sweep of the next step, and admit the visits whose gradients are there."""
        parts, machine = self._parts, self._parts.machine
        with self._stopping():
            if not machine.is_open:
                subgroups = parts.plan.layout.subgroups
                # Another plan may have come since they were chosen.
                chosen = (number for number in self._order if self._may_speculate(subgroups[number]))
                visits = tuple(Visit(number, speculative=True) for number in chosen)
                machine.handle(Begin(self._sweeps.open(visits, self._visit)))
            admitted = []
            while self._next_has_landed():
                subgroup = parts.plan.layout.subgroups[self._admissible[0]]
                parts.gradients.bring_final(self._loose_gradients, subgroup, self._masters_of(subgroup))
                admitted.append(self._admissible.popleft())
            if admitted:
                machine.handle(Admit(tuple(admitted)))
            parts.executor.submit(machine.take_operations())

    def _masters_of(self, subgroup: Subgroup) -> Pieces:
        """Return copies of fp32 weights, which are masters, from a GPU to their image, where they are updated."""
        if not self._parts.plan.passing_bytes(subgroup.index) or subgroup.dtype is not DtypeCode.FLOAT32:
            return as_pieces([])
        # Weights that were bound since the pass began may be gone when they are copied.
        weights = known(self._rows, "no step is expected").weights
        return self._parts.tables.weight_copies(subgroup.index, self._image_of(subgroup.index), weights=weights)

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Have a GPU that fails break the session; nobody waits for this, so whoever asks next is told."""
        try:
            yield
        except InternalError:
            raise
        except OffloadError as error:
            self._parts.machine.handle(Stop(error))

    def _visit(self, run: Run) -> npt.NDArray[Any]:
        """Return the kernel's table for a speculative run."""
        parts, subgroup = self._parts, run.visit.subgroup
        segments = len(parts.plan.layout.subgroups[subgroup].segments)
        sums = np.zeros((segments, SUMS), np.uint64)
        parts.lanes.await_sent(subgroup)
        rows, image = known(self._rows, "no step is expected"), self._image_of(subgroup)
        address = parts.memory.slot_address(known(run.slot, "a streamed subgroup is updated in no slot"))
        read_at = image if parts.plan.weights_on_gpu else None
        table = parts.tables.fill(run, address, rows, weights_address=read_at, apart=(image, sums))
        self._sources[subgroup] = _Source(table, sums)
        return table

    def _image_of(self, subgroup: int) -> int:
        """Return the address of the image of a subgroup's new weights."""
        return known(self._images, "there is no image of weights").address + self._image_offsets[subgroup]

    def begin_step(self, active: Sequence[int]) -> None:
        """Take note that a step begins: gradients that arrive from now on are for the next one."""
        self._is_armed = False
        self._count_arrivals()
        self._is_asking = self.is_on
        self._first_position = self._foreseen = None
        # As many arrivals as before this step are expected before the next one.
        self._expected = {position: self._counts[position] for position in active}
        self._all_arrived = bool(active) and self._expected == self._counts
        self._forget_arrivals()

    def choose_confirmed(self, subgroups: Collection[int]) -> tuple[int, ...]:
        """Return which of `subgroups`, that the step updates, have a version that it would make again; see `seal`."""
        machine, self.confirmed_bytes = self._parts.machine, 0
        self.revoked_bytes, self._revoked_bytes = self._revoked_bytes, 0
        if not machine.is_open or machine.broken is not None:
            return ()
        versions = machine.speculative_versions
        confirmed = tuple(self._unchanged([subgroup for subgroup in versions if subgroup in subgroups]))
        self.confirmed_bytes = self._state_bytes(confirmed)
        self.revoked_bytes += self._state_bytes(versions) - self.confirmed_bytes
        return confirmed

    def seal(self, confirmed: tuple[int, ...], rest: Sweep) -> None:
        """Seal the open sweep, if there is one: publish confirmed weights, and begin what is left of the step."""
        machine = self._parts.machine
        machine.handle(Seal(confirmed, rest) if machine.is_open else Begin(rest))
        if machine.broken is None:
            with self._stopping():
                for subgroup in confirmed:
                    self._publish(subgroup)
            self._forget_versions()
        self._release_gradients()

    def revoke(self) -> None:
        """Revoke the open sweep, for another request than a step.

        It is opened again once before a step: other requests alone have nothing written again and again.
        """
        machine = self._parts.machine
        self._count_arrivals()
        if machine.is_open:
            self._is_armed = self._is_armed and not self._revoked_bytes and machine.broken is None
            self._revoked_bytes += self._state_bytes(machine.speculative_versions)
            machine.handle(Seal())
            if machine.broken is not None:  # an update may still run: its memory stays
                return
            self._forget_versions()
        if self._is_armed:
            self._prepare()
        if not self._counts:  # they have been dropped
            self._release_gradients()

    def _state_bytes(self, numbers: Collection[int]) -> int:
        subgroups = self._parts.plan.layout.subgroups
        return sum(subgroups[number].state_bytes for number in numbers)

    def _release_gradients(self) -> None:
        """Let go of gradients in no slot, which no update reads any more."""
        if self._parts.machine.broken is None:  # else some may
            self._loose_gradients.clear()

    def _forget_versions(self) -> None:
        with self._stopping():  # fp32 weights on a GPU may still be on their way to images, also of what was revoked
            self._parts.gradients.end_final()
        self._sources.clear()
        self._admissible.clear()
        self._kept_tensors = ()

    def _unchanged(self, subgroups: Sequence[int]) -> list[int]:
        """Return the subgroups that the step would update from the same rows and bytes."""
        parts, tables, sources = self._parts, self._parts.tables, self._sources
        layout = parts.plan.layout

        def is_alike(number: int) -> bool:
            # Gradients that are on their way cannot be compared.
            landed = parts.gradients.has_landed(layout.subgroups[number].segments)
            return landed and tables.agree(number, known(self._rows, "no step is expected"), tables.begun)

        alike = [number for number in subgroups if is_alike(number)]
        if not alike:
            return []
        ranges = [tables.read_by(number, sources[number].table, tables.begun) for number in alike]
        positions, addresses, sizes = (np.concatenate(column) for column in zip(*ranges, strict=True))
        of_gradients = parts.gradients.fingerprints(positions, addresses[:, 0], sizes[:, 0])
        of_masters = parts.gradients.fingerprints(positions, addresses[:, 1], sizes[:, 1], masters=True)
        sums = np.stack([of_gradients, of_masters], axis=1)
        read = np.concatenate([sources[number].sums for number in alike])
        same = (sums == read).all(axis=1)
        ends = np.cumsum([len(sources[number].sums) for number in alike])
        return [number for number, rows in zip(alike, np.split(same, ends[:-1]), strict=True) if rows.all()]

    def _publish(self, subgroup: int) -> None:
        """Copy the weights of a confirmed version from its image to where they belong."""
        active = active_rows(self._sources[subgroup].table)
        copies = self._parts.tables.weight_copies(subgroup, self._image_of(subgroup), active)
        self._parts.lanes.send_weights(subgroup, copies, time.monotonic())

    def end_step(self, scale: float, clip: float) -> None:
        """Take note of a step that has ended well, and choose what to speculate on before the next one."""
        self._figures = {metrics.CONFIRMED_BYTES: self.confirmed_bytes, metrics.REVOKED_BYTES: self.revoked_bytes}
        if not self.is_on:
            with contextlib.suppress(OffloadError):  # a GPU that has failed, as the next step will find
                self._free_images()
            return
        if self.revoked_bytes > self.confirmed_bytes:
            self._next_pause = min(LONGEST_PAUSE, max(1, 2 * self._next_pause))
            self._pause = self._next_pause + 1
        elif self.confirmed_bytes:
            self._next_pause = 0
        self._pause = max(self._pause - 1, 0)
        self._scale = scale
        if self._all_arrived and clip == 1 and not self._pause:
            self._count_arrivals()
            self._prepare()
        self._is_asking = self._is_armed

    def _prepare(self) -> None:
        """Choose the subgroups to be updated before the next step, if there are any."""
        self._admissible.clear()
        self._rows = None
        missing, last_arrivals = {}, {}
        for subgroup in self._parts.plan.layout.subgroups:
            number = subgroup.index
            if not self._may_speculate(subgroup):
                continue
            positions = {s.parameter for s in subgroup.segments if s.numel and s.parameter in self._expected}
            if positions:
                missing[number] = sum(not self._has_arrived(position) for position in positions)
                last_arrivals[number] = max(self._arrived_at[position] for position in positions)
        self._order = sorted(last_arrivals, key=last_arrivals.__getitem__)
        self._is_armed = bool(self._order) and self._allocate_images()
        self._order = [number for number in self._order if number in self._image_offsets]
        self._missing_gradients = {number: missing[number] for number in self._order}
        for number in self._order:
            if self._is_armed and not self._missing_gradients[number]:  # all has arrived while the last step went on
                self._admit(number)
        self._count_arrivals()

    def _has_arrived(self, position: int) -> bool:
        """Return whether a gradient is final, and an update can read it."""
        has_place = position not in self._slotless or position in self._loose_gradients
        return has_place and position in self._final

    def _allocate_images(self) -> bool:
        """Allocate images, first for subgroups whose gradients arrive first; return whether there are any."""
        subgroups = self._parts.plan.layout.subgroups
        if self._image_candidates.issuperset(self._order):
            return True
        chosen = dict.fromkeys((*self._order, *self._image_candidates))
        candidates = [number for number in chosen if self._parts.plan.may_speculate(number)]
        offsets, end, needed = {}, 0, sum(subgroups[number].weight_bytes for number in candidates)
        try:
            self._free_images()
            share = 1 if self._parts.plan.image_bytes else 2  # half of it, where no plan has counted them
            most = available_bytes() // share
            for number in candidates:
                nbytes = subgroups[number].weight_bytes
                if end + nbytes <= most:
                    offsets[number] = end
                    end += nbytes
            if end < needed:
                text = "updated during backward are %d of %d subgroups: new weights have %d of %d bytes of memory"
                log.warning(text, len(offsets), len(candidates), end, needed)
            self._images = self._parts.memory.arena(max(end, 1))
        except OffloadError as error:
            self.is_on = False
            log.warning("nothing is updated during backward: %s", error)
            return False
        self._image_offsets, self._image_candidates = offsets, frozenset(candidates)
        return bool(offsets)

    def _free_images(self) -> None:
        """Free all images, while there is no speculative version."""
        if self._images is not None:
            self._parts.lanes.wait()  # weights may still be on their way from there
        old, self._images = self._images, None
        self._parts.memory.give_back(old)
        self._image_offsets, self._image_candidates = {}, frozenset()

    def hold(self) -> None:
        """Start no further update: a request has come in."""
        machine = self._parts.machine
        machine.handle(Hold())
        self._parts.executor.submit(machine.take_operations())
