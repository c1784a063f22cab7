"""Updates that are admitted before their step is sealed: speculative versions, made during backward.

When all gradients of a streamed subgroup have arrived, the subgroup is updated as if nothing were clipped. Its new
weights are written to an *image*: host memory apart from the weights, which forward and backward still read. The step
then makes the rows (hyperparameters of each segment) that it would use itself. Where these rows, and the bytes of
gradients (and fp32 weights), are those that a version was made from, bit for bit, the step confirms that version and
copies its image to the weights. It revokes all other versions: a wrong guess costs time, and changes nothing.

What the engine thread calls, in the course of an iteration:

    `end_step`          a step has ended: choose the subgroups to be updated before the next one, and *arm*
    `open_and_admit`    while armed: open the next step's sweep; in backward admit subgroups with final gradients
    `begin_step`, `choose_confirmed`, `seal`    the step is called: confirm versions or revoke them
    `revoke`            another request is made: revoke all versions, and begin again after the request

A *fingerprint* is 64 bits that depend on every bit of a gradient or weight: if some bits change it changes, too, but
for a chance of 1 in about 2^64.

Not known here: where a speculative version lies (`offload.schedule.machine`), which optimizer the gradients are for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from offload.schedule.operations import Admit, BeginSweep, PauseOpenSweep, RunVisit, SealStep, Stop, Sweep, Visit
from offload.session.parts import SessionParts
from offload.session.sweeps import Sweeps

log = logging.getLogger("offload")

LONGEST_PAUSE = 64
"""Most steps of a pause: after a step that has revoked more than it confirmed, some steps go without speculation. The
first pause is one step long, and each that follows it twice as long as the one before."""

MOST_WAITING = 1024
"""How many posted arrivals wake the engine thread while no arrival can have a subgroup admitted."""

DROPPED = -1
"""Posted instead of a parameter's position: all gradients that have arrived are dropped."""

GRADIENT, WEIGHT = 0, 1
"""Columns of fingerprints, addresses and sizes: each segment has one of its gradient and one of its fp32 weight."""


class _Arrival(NamedTuple):
    """A gradient's arrival, as callers post it."""

    position: int  # of the parameter; `DROPPED` if all gradients have been dropped
    gradient: FinalGradient | None = None  # if it lies outside slots
    is_last_pass: bool | None = None  # whether its pass is the last before the step; None: not known


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """What the step would use if it were called now.

    Attributes:
        groups: Hyperparameters of all groups.
        kept_tensors: Memory to be kept while updates read it: fp32 weights, gradients outside slots.
        scale: Scale of the loss; None for the last step's.
        weights: Addresses of all weights.
    """

    groups: Sequence[Any]
    kept_tensors: Sequence[torch.Tensor]
    scale: float | None
    weights: npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Source:
    """What a speculative version was made from.

    Attributes:
        table: The rows of its update.
        sums: Fingerprints of the gradient and fp32 weight that each segment's update reads; set by the update.
    """

    table: npt.NDArray[Any]
    sums: npt.NDArray[np.uint64]


class Speculation:
    """The updates of one session that are made before their step is sealed.

    A gradient counts as final at its n-th arrival, n being its number of arrivals before the last step; or in the
    last pass, where callers say which pass is not the last. In both cases the last step has to have used it. So
    nothing is updated before the first step. Nor is anything updated before a step that follows a clipped one.

    Callers post arrivals, and what a step would use now. The engine thread counts arrivals and admits subgroups.
    """

    def __init__(self, parts: SessionParts, sweeps: Sweeps) -> None:
        self.is_on = False
        """Whether anything is updated before its step is sealed, from the next step on."""
        self.confirmed_bytes = self.revoked_bytes = 0
        """State of versions that the last sealed step has confirmed, and of those revoked since the step before."""
        self.arrivals: deque[_Arrival] = deque()
        """Posted and not counted yet."""
        self._parts = parts
        self._sweeps = sweeps
        self._first_position: int | None = None  # whose gradient arrived first: when it comes again, a pass begins
        self._is_last_pass: bool | None = None  # whether the pass is the last before the step; None: not known
        self._foreseen: _Foreseen | None = None  # by the caller, for this pass
        self._may_foresee = False  # whether a pass that begins asks the caller to `foresee`
        self._wakes_at = MOST_WAITING  # how many posted arrivals wake the engine thread: fewer can admit no subgroup
        self._figures = {metrics.CONFIRMED_BYTES: 0, metrics.REVOKED_BYTES: 0}  # of the last step that has ended
        self._revoked_bytes = 0  # of versions that were revoked for other requests since the last step
        self._is_armed = False  # whether subgroups may be opened and admitted for the next step
        self._pause_left = 0  # steps without speculation that are still to come
        self._last_pause = 0  # how many steps the last such pause took
        self._scale = 1.0  # of the loss in the last step
        self._counts: Counter[int] = Counter()  # arrivals of each gradient since the last step
        self._expected: dict[int, int] = {}  # arrivals before the last step, of gradients that it used
        self._arrival_numbers = itertools.count()
        self._arrived_at: dict[int, int] = {}  # the number of each gradient's latest arrival
        self._final: set[int] = set()  # gradients that have arrived, and of which no more comes before the step
        self._has_heard = False  # whether the caller has said of a pass since the last step that it is not the last
        self._all_arrived = False  # whether all gradients of the last step arrived, and no others
        # How many gradients of each subgroup of the next open sweep are not final yet:
        self._missing_gradients: dict[int, int] = {}
        self._order: list[int] = []  # the subgroups of the next open sweep: first those whose gradients arrive first
        self._admissible: deque[int] = deque()  # subgroups to be admitted, as soon as their gradients have landed
        self._rows: StepRows | None = None  # of the expected step
        self._images: Arena | None = None  # memory of all images
        self._image_offsets: dict[int, int] = {}  # of each subgroup's image in `_images`, in bytes
        # Subgroups for which images were last wanted; those that memory did not suffice for have no offset.
        self._image_candidates: frozenset[int] = frozenset()
        self._sources: dict[int, _Source] = {}  # of the speculative versions, by subgroup
        self._without_slot: set[int] = set()  # parameters whose gradients lie outside slots
        self._gradients_outside_slots: dict[int, FinalGradient] = {}  # final ones of these, which updates may read
        self._kept_tensors: Sequence[torch.Tensor] = ()  # memory that the updates of this pass read

    def metrics(self) -> dict[str, int]:
        """Return bytes that the last step to end has confirmed and revoked; nothing where speculation is off."""
        return self._figures if self.is_on else {}

    # On the caller's thread, or that of backward

    def announce_arrival(self, position: int, is_last_pass: bool | None) -> bool:
        """Note that a gradient is about to arrive, and whether its pass is the last before the step.

        Return whether a pass begins with it, so that the caller has to call `foresee`.
        """
        self._is_last_pass = is_last_pass
        # A pass begins with the first gradient after a step has begun, or after `drop_arrivals`, and each time that
        # the same one comes again.
        is_first = self._first_position in (None, position)
        begins_pass = self.is_on and self._may_foresee and is_first
        if begins_pass:
            self._first_position, self._foreseen = position, None
        return begins_pass

    def foresee(self, groups: Sequence[Any], kept_tensors: Sequence[torch.Tensor], scale: float | None) -> None:
        """Note what the step would use if it were called now, as a pass begins."""
        # Weights that are bound later may be freed before the step; the caller keeps those that are bound now.
        self._foreseen = _Foreseen(groups, kept_tensors, scale, self._parts.tables.weights.copy())

    def note_arrival(self, position: int, gradient: FinalGradient | None = None) -> None:
        """Post that a gradient has arrived, or more of it: in its slot, or where `gradient` lies."""
        if not self.is_on:
            return
        self.arrivals.append(_Arrival(position, gradient, self._is_last_pass))
        # A gradient outside slots wakes the thread at once, as its memory is kept until the arrival is counted.
        if len(self.arrivals) >= self._wakes_at or gradient is not None:
            self._parts.queue.post(WAKE)

    def drop_arrivals(self) -> bool:
        """Post that gradients are dropped; return whether a request has to follow, whose `revoke` undoes their use.

        It has to if a version may have been made from them, or if gradients outside slots are kept for updates.
        """
        if not self.arrivals and not self._counts:  # none since the last step began
            return False
        self._first_position = None  # the next gradient begins a pass
        self.arrivals.append(_Arrival(DROPPED))
        return self._is_armed or bool(self._gradients_outside_slots)

    # On the engine thread

    def _count_arrivals(self) -> None:
        """Count posted arrivals, and queue the subgroups whose gradients are all final with them.

        Then set `_wakes_at`: as many posted arrivals wake this thread as gradients are missing in the subgroup that
        misses fewest, since fewer cannot complete any. Arrivals may have been posted meanwhile that did not wake this
        thread, as `_wakes_at` was still higher. So count again until fewer than `_wakes_at` are posted.
        """
        while True:
            while self.arrivals:
                self._count_arrival(self.arrivals[0])
                self.arrivals.popleft()  # after counting: `drop_arrivals` looks at arrivals, then at counts
            # A subgroup that misses none has been queued.
            counts = self._missing_gradients.values() if self._is_armed else ()
            self._wakes_at = min((count for count in counts if count > 0), default=MOST_WAITING)
            if len(self.arrivals) < self._wakes_at:
                return

    def _count_arrival(self, arrival: _Arrival) -> None:
        """Count one arrival; if its gradient is final now, queue the subgroups that were missing only this one."""
        position, gradient, is_last_pass = arrival
        if position == DROPPED:
            self._forget_arrivals()
            return
        self._counts[position] += 1
        self._arrived_at[position] = next(self._arrival_numbers)
        if gradient is not None:
            self._without_slot.add(position)
        self._has_heard |= is_last_pass is False
        # More of a final gradient changes nothing here: the step compares its bits with those that were read.
        if position in self._final or not self._is_final(position, is_last_pass):
            return
        self._final.add(position)
        # `_choose_subgroups` counts final gradients when it arms. One outside slots is not kept until then: it counts
        # as missing (`_is_readable`).
        if not self._is_armed:
            return
        if gradient is not None:
            # If there is one from before `drop_arrivals` it stays: an update may read it until `revoke`.
            self._gradients_outside_slots.setdefault(position, gradient)
        for subgroup, _ in self._parts.plan.layout.places[position]:
            if subgroup in self._missing_gradients:
                self._missing_gradients[subgroup] -= 1
                if not self._missing_gradients[subgroup]:
                    self._queue_for_admission(subgroup)

    def _is_final(self, position: int, is_last_pass: bool | None) -> bool:
        """Return whether a gradient that has arrived is what the step will read.

        It is the sum of the passes so far, which is final if no further pass adds to it. If the caller has said of an
        earlier pass that it is not the last (`_has_heard`), gradients of the pass that it calls the last are final.
        Else the n-th arrival is final, n being the number of arrivals before the last step.
        """
        if self._has_heard and is_last_pass is not None:
            return is_last_pass and position in self._expected  # others are not active in the foreseen step
        return self._counts[position] == self._expected.get(position)

    def _forget_arrivals(self) -> None:
        """Forget all arrivals, as gradients were dropped or a step begins.

        Nothing more is admitted until `_choose_subgroups`: when a step ends, or `revoke` is called.
        """
        self._counts.clear()
        self._final.clear()
        self._has_heard = False
        self._admissible.clear()
        self._missing_gradients.clear()

    def _queue_for_admission(self, subgroup: int) -> None:
        """Queue a subgroup whose gradients are final for `open_and_admit`; disarm if the step cannot be foreseen."""
        if self._rows is None:
            self._rows = self._rows_of_foreseen_step()
        if self._rows is None:
            self._is_armed = False
            return
        if self._gradients_outside_slots:  # the rows have to say where these lie
            segments = self._parts.plan.layout.subgroups[subgroup].segments
            self._parts.gradients.read_final(self._gradients_outside_slots, segments, self._rows)
        self._admissible.append(subgroup)

    def _rows_of_foreseen_step(self) -> StepRows | None:
        """Return the foreseen step's rows, None if they cannot be made; keep the tensors that updates will read."""
        foreseen = self._foreseen
        if foreseen is None:
            return None
        self._kept_tensors = foreseen.kept_tensors
        gradients_at = self._parts.gradients.read_at()
        scale = self._scale if foreseen.scale is None else foreseen.scale
        clip = 1.0  # the step is expected to clip nothing
        active = [*self._expected]
        try:
            return self._parts.tables.rows(foreseen.groups, scale, clip, active, gradients_at, foreseen.weights)
        except Exception:  # if hyperparameters are still wrong in the step, the step raises this
            return None

    def count_and_is_due(self) -> bool:
        """Count posted arrivals; return whether `open_and_admit` can open a sweep, or admit a visit, now."""
        machine = self._parts.machine
        if self.arrivals:
            self._count_arrivals()
        if machine.broken is not None:
            return False
        if not machine.is_open:
            # A finished sweep has to be taken before the machine begins another.
            return self._is_armed and machine.has_no_sweep and machine.finished_sweep is None
        with contextlib.suppress(OffloadError):
            return self._next_has_landed()
        return True  # a GPU has failed: `open_and_admit` meets the error again, and breaks the session by it

    def _next_has_landed(self) -> bool:
        """Return whether the gradients of the next admissible subgroup lie where an update reads them.

        A GPU's lanes wake the engine thread when more gradients have been copied to the host.
        """
        if not self._admissible:
            return False
        return self._parts.gradients.has_landed(self._parts.plan.layout.subgroups[self._admissible[0]].segments)

    def _may_speculate(self, subgroup: Subgroup) -> bool:
        """Return whether a subgroup can be updated before its step is sealed."""
        parts, number = self._parts, subgroup.index
        # A fresh subgroup has no live version on storage, beside which a speculative one could be made.
        if not parts.plan.may_speculate(number) or parts.machine.is_fresh(number):
            return False
        # The kernel makes fingerprints only of segments that begin with a whole block of elements that share scales.
        return not parts.plan.layout.begins_within_block(subgroup)

    def open_and_admit(self) -> None:
        """Open the next step's sweep unless it is open, and admit queued subgroups whose gradients have landed."""
        machine = self._parts.machine
        with self._failures_break_session():
            if not machine.is_open:
                self._open_sweep()
            admitted = self._take_landed()
            if admitted:
                machine.handle(Admit(admitted))
            self._parts.executor.submit(machine.take_operations())

    def _open_sweep(self) -> None:
        """Open the next step's sweep, and its account, with the subgroups of `_order`, chosen after the last step."""
        subgroups = self._parts.plan.layout.subgroups
        # Asked again, as the plan may have changed since then.
        chosen = (number for number in self._order if self._may_speculate(subgroups[number]))
        visits = tuple(Visit(number, speculative=True) for number in chosen)
        self._parts.machine.handle(BeginSweep(self._sweeps.make_open(visits, self._make_table)))

    def _take_landed(self) -> tuple[int, ...]:
        """Take subgroups from the front of the queue until one's gradients have not landed, and return them.

        If what their updates read lies on a GPU, its copies to host memory are enqueued.
        """
        gradients, taken = self._parts.gradients, list[int]()
        while self._next_has_landed():
            subgroup = self._parts.plan.layout.subgroups[self._admissible[0]]
            gradients.fetch_final(self._gradients_outside_slots, subgroup, self._master_copies(subgroup))
            taken.append(self._admissible.popleft())
        return tuple(taken)

    def _master_copies(self, subgroup: Subgroup) -> Pieces:
        """Return the copies of a subgroup's fp32 weights from the GPU to its image, where the update changes them.

        Rows of (source, target, bytes). There are none for weights in host memory, which updates read where they lie,
        and none for 16-bit weights, which no update reads.
        """
        if not self._parts.plan.passing_bytes(subgroup.index) or subgroup.dtype is not DtypeCode.FLOAT32:
            return as_pieces([])
        # Weights that were bound since the pass began may be freed before they are copied.
        weights = known(self._rows, "no step is expected").weights
        return self._parts.tables.weight_copies(subgroup.index, self._image_address(subgroup.index), weights=weights)

    @contextlib.contextmanager
    def _failures_break_session(self) -> Iterator[None]:
        """Break the session if a GPU fails within this block; the next request raises the error, as nobody waits."""
        try:
            yield
        except InternalError:  # a bug of this library, no failure of a GPU
            raise
        except OffloadError as error:
            self._parts.machine.handle(Stop(error))

    def _make_table(self, run: RunVisit) -> npt.NDArray[Any]:
        """Return the kernel's table for a speculative run, and note what the run's version is made from."""
        parts, subgroup = self._parts, run.visit.subgroup
        # The run adds the fingerprints of the gradient and the fp32 weight that it reads of each segment.
        sums = np.zeros((len(parts.plan.layout.subgroups[subgroup].segments), 2), np.uint64)
        parts.lanes.await_sent(subgroup)  # the last step's weights may still be copied from the image
        rows = known(self._rows, "no step is expected")
        image = self._image_address(subgroup)
        state_address = parts.memory.slot_address(known(run.slot, "a streamed subgroup is updated in no slot"))
        weights_address = image if parts.plan.weights_on_gpu else None  # fp32 ones are copied there: `_master_copies`
        table = parts.tables.make_table(
            run, state_address, rows, weights_address=weights_address, apart=(image, sums)
        )
        self._sources[subgroup] = _Source(table, sums)
        return table

    def _image_address(self, subgroup: int) -> int:
        """Return the address of the image of a subgroup's new weights."""
        return known(self._images, "there is no image of weights").address + self._image_offsets[subgroup]

    def begin_step(self, active: Sequence[int]) -> None:
        """End the count of arrivals, as a step is sealed. As many are expected before the next step.

        Nothing is admitted until `end_step` has chosen subgroups for the next step.

        Args:
            active: Positions of the parameters that the step updates.
        """
        self._is_armed = False  # first: no arrival that is counted now has a subgroup admitted
        self._count_arrivals()
        self._may_foresee = self.is_on  # the next pass may begin while this step is pending
        self._first_position = self._foreseen = None
        self._expected = {position: self._counts[position] for position in active}
        # An active gradient that never arrived is 0 in `_expected`, and missing in `_counts`: they differ then.
        self._all_arrived = bool(active) and self._expected == self._counts
        self._forget_arrivals()

    def choose_confirmed(self, subgroups: Collection[int]) -> tuple[int, ...]:
        """Return those of a step's subgroups whose speculative versions have the bits that the step would make.

        Count the bytes of these as confirmed, and those of all other versions as revoked.
        """
        machine = self._parts.machine
        self.confirmed_bytes = 0
        self.revoked_bytes = self._revoked_bytes  # for other requests, since the last step
        self._revoked_bytes = 0
        if not machine.is_open or machine.broken is not None:  # then there is no version, or none is confirmed
            return ()
        versions = machine.speculative_versions
        confirmed = tuple(self._unchanged([subgroup for subgroup in versions if subgroup in subgroups]))
        self.confirmed_bytes = self._parts.plan.state_bytes_of(confirmed)
        self.revoked_bytes += self._parts.plan.state_bytes_of(versions) - self.confirmed_bytes
        return confirmed

    def seal(self, confirmed: tuple[int, ...], rest: Sweep) -> None:
        """Seal the open sweep, if any: copy confirmed weights from their images, and begin the rest of the step."""
        machine = self._parts.machine
        # If no sweep is open, there is no version, and `confirmed` is empty.
        machine.handle(SealStep(confirmed, rest) if machine.is_open else BeginSweep(rest))
        if machine.broken is None:  # else updates may still run: the memory of their versions is kept
            with self._failures_break_session():
                for subgroup in confirmed:
                    self._publish(subgroup)
            self._forget_versions()
        self._forget_bound_gradients()  # last: `_forget_versions` has waited until no lane reads these

    def revoke(self) -> None:
        """Revoke the open sweep, if any, before a request that is no step; it is opened again after the request.

        Once versions have been revoked since the last step, the next such request leaves the sweep closed until the
        step: else many requests would have the same state written again and again.

        The caller has paused the open sweep, so that no update of it runs.
        """
        machine = self._parts.machine
        self._count_arrivals()  # first: one may say that gradients were dropped, which `_counts` shows below
        if machine.is_open:
            # `_revoked_bytes`: if they are not 0, an earlier request since the last step has revoked versions.
            self._is_armed = self._is_armed and not self._revoked_bytes and machine.broken is None
            self._revoked_bytes += self._parts.plan.state_bytes_of(machine.speculative_versions)
            machine.handle(SealStep())  # which confirms none, and so revokes all
            if machine.broken is not None:  # an update may still run: its memory is kept
                return
            self._forget_versions()
        if self._is_armed:  # so that the sweep is opened again after the request
            self._choose_subgroups()
        if not self._counts:  # none has arrived since the last step, or all that had were dropped
            self._forget_bound_gradients()

    def _forget_bound_gradients(self) -> None:
        """Forget gradients outside slots, which no update reads any more."""
        if self._parts.machine.broken is None:  # else an update may still read some
            self._gradients_outside_slots.clear()

    def _forget_versions(self) -> None:
        """Forget all speculative versions, once no lane reads gradients or fp32 weights for them any more."""
        with self._failures_break_session():
            self._parts.gradients.end_final()
        self._sources.clear()
        self._admissible.clear()
        self._kept_tensors = ()

    def _unchanged(self, subgroups: Sequence[int]) -> list[int]:
        """Return the subgroups whose versions were made from the rows and bytes that the step would read now."""
        alike = [number for number in subgroups if self._has_same_rows(number)]
        return self._with_same_inputs(alike) if alike else []  # of none there is nothing to concatenate

    def _has_same_rows(self, number: int) -> bool:
        """Return whether the step would update a subgroup from the rows that its version was made from."""
        parts, tables = self._parts, self._parts.tables
        # Gradients that are still being copied to the host cannot be compared.
        if not parts.gradients.has_landed(parts.plan.layout.subgroups[number].segments):
            return False
        return tables.updates_alike(number, known(self._rows, "no step is expected"), tables.step_rows)

    def _with_same_inputs(self, numbers: Sequence[int]) -> list[int]:
        """Return those of some subgroups whose gradients and fp32 weights have the fingerprints that were noted.

        Fingerprints are computed for all segments of all these subgroups at once, and then compared by subgroup.
        """
        gradients, tables = self._parts.gradients, self._parts.tables
        inputs = [tables.read_by(number, self._sources[number].table, tables.step_rows) for number in numbers]
        # One element or row for each segment, one subgroup after another; see `Tables.read_by`.
        positions, addresses, sizes = (np.concatenate(column) for column in zip(*inputs, strict=True))
        of_gradients = gradients.fingerprints(positions, addresses[:, GRADIENT], sizes[:, GRADIENT])
        of_weights = gradients.fingerprints(positions, addresses[:, WEIGHT], sizes[:, WEIGHT], masters=True)
        sums_now = np.stack([of_gradients, of_weights], axis=1)
        sums_then = [self._sources[number].sums for number in numbers]
        is_same = (sums_now == np.concatenate(sums_then)).all(axis=1)  # by segment
        ends = np.cumsum([*map(len, sums_then)])  # where the segments of each subgroup end
        by_subgroup = zip(numbers, np.split(is_same, ends[:-1]), strict=True)
        return [number for number, are_same in by_subgroup if are_same.all()]

    def _publish(self, subgroup: int) -> None:
        """Copy the new weights of a confirmed version from its image to the parameters; idle segments keep theirs."""
        active = active_rows(self._sources[subgroup].table)
        copies = self._parts.tables.weight_copies(subgroup, self._image_address(subgroup), active)
        self._parts.lanes.send_weights(subgroup, copies, time.monotonic())

    def end_step(self, scale: float, clip: float) -> None:
        """Note the figures of a step that has ended well, and choose what to speculate on before the next one."""
        self._figures = {metrics.CONFIRMED_BYTES: self.confirmed_bytes, metrics.REVOKED_BYTES: self.revoked_bytes}
        if not self.is_on:  # it is off: no image is needed any more
            with contextlib.suppress(OffloadError):  # a GPU that has failed: the next step raises that
                self._free_images()
            return
        self._count_pause()
        self._scale = scale
        # Else the last step is no guide to the next one (see the class), or a pause is under way.
        if self._all_arrived and clip == 1 and not self._pause_left:
            self._count_arrivals()  # that came while the step went on
            self._choose_subgroups()
        self._may_foresee = self._is_armed  # else nothing would be admitted in the next pass

    def _count_pause(self) -> None:
        """Begin a pause if the step has revoked more than it confirmed; else count a step off the present pause.

        Each pause is twice as long as the last, up to `LONGEST_PAUSE`; after a step that confirms, one step again.
        """
        if self.revoked_bytes > self.confirmed_bytes:
            self._last_pause = min(LONGEST_PAUSE, max(1, 2 * self._last_pause))
            self._pause_left = self._last_pause
            return
        if self.confirmed_bytes:
            self._last_pause = 0
        self._pause_left = max(self._pause_left - 1, 0)

    def _choose_subgroups(self) -> None:
        """Choose the subgroups to be updated before the next step, in the order of arrivals; arm if there are any.

        Chosen is each that may be, has a gradient that the next step is expected to use, and has an image. The order
        is that in which each one's last gradient arrived before: backward is expected to go the same way again.
        """
        self._admissible.clear()
        self._rows = None  # they are made when the first subgroup is queued
        missing: dict[int, int] = {}  # how many gradients of each subgroup cannot be read yet
        last_arrivals: dict[int, int] = {}  # the number of the latest arrival, by subgroup
        for subgroup in self._parts.plan.layout.subgroups:
            number = subgroup.index
            if not self._may_speculate(subgroup):
                continue
            positions = {s.parameter for s in subgroup.segments if s.numel and s.parameter in self._expected}
            if positions:
                missing[number] = sum(not self._is_readable(position) for position in positions)
                last_arrivals[number] = max(self._arrived_at[position] for position in positions)
        self._order = sorted(last_arrivals, key=last_arrivals.__getitem__)
        self._is_armed = bool(self._order) and self._ensure_images()
        self._order = [number for number in self._order if number in self._image_offsets]
        self._missing_gradients = {number: missing[number] for number in self._order}
        for number in self._order:
            # All its gradients may have arrived already: while the last step went on, or before a `revoke`.
            # To queue the first such subgroup disarms if the step cannot be foreseen.
            if self._is_armed and not self._missing_gradients[number]:
                self._queue_for_admission(number)
        self._count_arrivals()  # which also sets how many posted arrivals wake this thread

    def _is_readable(self, position: int) -> bool:
        """Return whether a gradient is final, and an update can read it."""
        has_place = position not in self._without_slot or position in self._gradients_outside_slots
        return has_place and position in self._final

    def _ensure_images(self) -> bool:
        """Return whether there are images for `_order`, all or some; allocate them anew if needed.

        If that fails, switch speculation off.
        """
        if self._image_candidates.issuperset(self._order):  # memory was tried for all of these before
            return True
        # Those of `_order` first; then others that have had images, as far as memory suffices.
        numbers = dict.fromkeys((*self._order, *self._image_candidates))
        # Asked again of those others, as the plan may have changed.
        candidates = [number for number in numbers if self._parts.plan.may_speculate(number)]
        try:
            self._free_images()  # first, so that old and new memory are not there at once
            offsets = self._allocate_images(candidates)
        except OffloadError as error:
            self.is_on = False
            log.warning("nothing is updated during backward: %s", error)
            return False
        self._image_offsets, self._image_candidates = offsets, frozenset(candidates)
        return bool(offsets)

    def _allocate_images(self, candidates: Sequence[int]) -> dict[int, int]:
        """Allocate images for the candidates that memory suffices for, first ones first; return each one's offset."""
        subgroups = self._parts.plan.layout.subgroups
        # Images may take all available memory if the plan has counted them, else half of it.
        most_bytes = available_bytes() // (1 if self._parts.plan.image_bytes else 2)
        offsets, end = dict[int, int](), 0
        for number in candidates:
            nbytes = subgroups[number].weight_bytes
            if end + nbytes <= most_bytes:
                offsets[number] = end
                end += nbytes
        needed_bytes = sum(subgroups[number].weight_bytes for number in candidates)
        if end < needed_bytes:
            text = "updated during backward are %d of %d subgroups: new weights have %d of %d bytes of memory"
            log.warning(text, len(offsets), len(candidates), end, needed_bytes)
        self._images = self._parts.memory.allocate_arena(max(end, 1))  # no arena is empty
        return offsets

    def _free_images(self) -> None:
        """Free the memory of all images. Call it only when there is no speculative version."""
        if self._images is not None:
            self._parts.lanes.wait()  # weights may still be copied from them to the device
        images, self._images = self._images, None  # first: if freeing raises, they are not freed again
        self._parts.memory.free_arena(images)  # which does nothing with None
        self._image_offsets, self._image_candidates = {}, frozenset()

    def pause(self) -> None:
        """Start no further speculative update, as a request has come in."""
        machine = self._parts.machine
        machine.handle(PauseOpenSweep())
        self._parts.executor.submit(machine.take_operations())
