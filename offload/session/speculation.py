"""Updates that are admitted before their step is sealed: versions beside the live ones, during backward.

When all gradients of a streamed subgroup are there, it is updated as if nothing were clipped, with weights written to
an *image* of them. The step makes the rows that it would use, and takes the version of a subgroup as its own where
these rows, and the bytes of gradients (and fp32 weights), are those that the version was made from, bit for bit. All
other versions have never been: a mistake costs time, and changes nothing.

Not known here: how a version lies beside another one (`offload.schedule.machine`), whose gradients they are.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.errors import ConfigError, InternalError, OffloadError, known
from offload.kernels.reference import DTYPE_CODES
from offload.kernels.table import active_rows
from offload.layout import Subgroup
from offload.memory.arenas import Arena, available_bytes
from offload.protocols import WAKE
from offload.schedule.operations import Admit, Begin, Hold, Run, Seal, Stop, Sweep, Visit
from offload.session.parts import SessionParts
from offload.session.step import StepAccount

log = logging.getLogger("offload")

LONGEST_PAUSE = 64
"""Steps without speculation after steps that revoked most of it, at most; twice as many each time."""

UNREADABLE = (ArithmeticError, ConfigError, LookupError, RuntimeError, TypeError, ValueError)
"""What hyperparameters raise that cannot be read now. Not all exceptions: a signal handler may raise others."""

Foreseen = tuple[Sequence[Any], Sequence[torch.Tensor]]
"""Hyperparameters of all groups, and memory to be kept while updates read it: fp32 weights, gradients in no slot."""

SUMS = 2
"""Fingerprints of a segment: of its gradient, and of its fp32 weight."""


@dataclass(slots=True)
class _Made:
    """What a version beside the live one was made from.

    Attributes:
        address: Of its state in memory, then.
        table: The rows that its update was told.
        sums: Fingerprints of what it has read, by segment; complete when it has run.
    """

    address: int
    table: npt.NDArray[Any]
    sums: npt.NDArray[np.uint64]


class Speculation:
    """What one session updates before the step that it is for.

    Gradients count as final at the arrival that was their last in the step before, so there is none before the first
    step, nor before one after a step that was clipped.

    Args:
        parts: Its parts.
    """

    def __init__(self, parts: SessionParts) -> None:
        self.hyperparameters: Callable[[], Foreseen | None] | None = None
        """Returns those of all groups, as the step will have them, or None; without it there is no speculation."""
        self.is_last_pass: Callable[[], bool] | None = None
        """Returns whether the backward pass under way is the last before a step, where somebody knows."""
        self.open: Callable[[tuple[Visit, ...], Callable[[Run], npt.NDArray[Any]]], Sweep]
        """Returns an open sweep of some visits, which a visitor works for."""
        self.account = StepAccount()
        """Of the step that was sealed last."""
        self._parts = parts
        self._dropped_bytes = 0  # of versions that have been revoked since the last step, for other requests
        self._wanted = False
        self._pause = self._next_pause = 0
        self._scale = 1.0
        self._arrivals = np.zeros(0, np.int64)
        self._expected = np.zeros(0, np.int64)
        self._arrived_at = np.zeros(0, np.int64)
        self._finals = np.zeros(0, np.int64)  # 1 for what has arrived for the last time before the step
        self._has_heard = False  # whether a pass since the last step has said that it is not the last
        self._clock = 0
        self._all_arrived = False  # whether all gradients of the last step arrived, and no others
        self._lock = threading.RLock()
        self._left: dict[int, int] = {}  # subgroups that are open to be made: parameters that have not all arrived
        self._waits: dict[int, int] = {}  # the same when none has arrived
        self._order: list[int] = []
        self._final: deque[int] = deque()
        self._has_rows = False
        self._images: Arena | None = None
        self._image_at: dict[int, int] = {}
        self._imaged: frozenset[int] = frozenset()  # subgroups that there was memory for, or not
        self._made: dict[int, _Made] = {}
        self._slots = np.zeros(0, np.uint64), np.zeros(0, np.int32)
        self._elsewhere: set[int] = set()  # parameters whose gradients lie in no slot
        self._lies: dict[int, torch.Tensor] = {}  # ... and those of them that updates may read
        self._kept: Sequence[torch.Tensor] = ()

    # On the caller's thread, or that of backward

    def arrived(self, position: int, gradient: torch.Tensor | None = None) -> None:
        """Take note that a gradient lies in its slot, accumulated or new, or where the given one does."""
        if self.hyperparameters is None:
            return
        with self._lock:
            self._grow()
            self._arrivals[position] += 1
            self._clock += 1
            self._arrived_at[position] = self._clock
            if gradient is not None:
                self._elsewhere.add(position)
            if self._finals[position] or not self._is_final(position):
                return
            self._finals[position] = 1
            if self._wanted:
                if gradient is not None:
                    self._lies.setdefault(position, gradient)  # another one may still be read
                for subgroup, _ in self._parts.plan.layout.places[position]:
                    if subgroup in self._left:
                        self._left[subgroup] -= 1
                        if not self._left[subgroup]:
                            self._admit(subgroup)

    def _is_final(self, position: int) -> bool:
        """Return whether a gradient that has arrived is what the step will read.

        Who says of every pass that it is the last may know of none: then as many count as before the last step.
        """
        if self.is_last_pass is not None:
            is_last = self.is_last_pass()
            self._has_heard |= not is_last
            if self._has_heard:
                return is_last and bool(self._expected[position])
        return bool(self._arrivals[position] == self._expected[position])

    def begins(self, active: Sequence[int]) -> None:
        """Take note that a step begins: what arrives from now on is for the next one."""
        with self._lock:
            self._wanted = False
            if self.hyperparameters is None:
                return
            self._grow()
            self._expected = np.zeros_like(self._arrivals)
            self._expected[active] = self._arrivals[active]
            self._all_arrived = bool(np.array_equal(self._expected, self._arrivals)) and bool(active)
            self._all_arrived = self._all_arrived and bool((self._expected[active] > 0).all())
            self._forget_arrivals()

    def restart(self) -> bool:
        """Forget arrivals, as gradients are dropped; return whether something was made from them."""
        if not self._arrivals.any():  # as when a step has just taken them, and goes on
            return False
        with self._lock:
            any_arrived = bool(self._arrivals.any())
            self._forget_arrivals()
            return any_arrived and (self._wanted or bool(self._lies))

    def _forget_arrivals(self) -> None:
        self._arrivals[:] = self._finals[:] = 0
        self._has_heard = False
        self._left.update(self._waits)

    def _grow(self) -> None:
        count = len(self._parts.plan.layout.parameters)
        if len(self._arrivals) < count:
            # The last one says that all have, if this is interrupted.
            for name in ("_expected", "_arrived_at", "_finals", "_arrivals"):
                known = getattr(self, name)
                setattr(self, name, np.concatenate([known, np.zeros(count - len(known), np.int64)]))

    def _admit(self, subgroup: int, unreadable: tuple[type[Exception], ...] = UNREADABLE) -> None:
        if not self._has_rows:
            try:
                foreseen = self.hyperparameters() if self.hyperparameters is not None else None
                if foreseen is not None:
                    groups, self._kept = foreseen
                    active = np.flatnonzero(self._expected).tolist()
                    self._parts.tables.expect_step(groups, self._scale, active)
            except unreadable:  # which may be put right before the step; else that says so
                foreseen = None
            if foreseen is None:
                self._wanted = False
                return
            self._slots = self._parts.gradients.read_at()
            self._has_rows = True
        for segment in self._parts.plan.layout.subgroups[subgroup].segments if self._lies else ():
            gradient = self._lies.get(segment.parameter)
            if gradient is not None:
                addresses, dtypes = self._slots
                addresses[segment.parameter] = gradient.data_ptr()
                dtypes[segment.parameter] = DTYPE_CODES[gradient.dtype]
        self._final.append(subgroup)
        self._parts.queue.post(WAKE)

    # On the engine thread

    def is_due(self) -> bool:
        """Return whether there is something to be opened or admitted, between requests."""
        machine = self._parts.machine
        if machine.broken is not None:
            return False
        if not machine.is_open:
            return self._wanted and machine.idle and machine.finished is None
        with contextlib.suppress(OffloadError):
            return self._has_landed()
        return True  # a GPU has failed: `serve` says so

    def _has_landed(self) -> bool:
        """Return whether gradients of the next subgroup are where an update reads them.

        Lanes of a GPU wake this thread when more of them are.
        """
        if not self._final:
            return False
        return self._parts.gradients.has_landed(self._parts.plan.layout.subgroups[self._final[0]].segments)

    def _may_have(self, subgroup: Subgroup) -> bool:
        """Return whether a subgroup can be updated before its step is sealed."""
        parts, number = self._parts, subgroup.index
        if not parts.plan.may_speculate(number) or parts.machine.is_fresh(number):
            return False
        return not parts.plan.layout.begins_within_block(subgroup)  # where no fingerprint can begin

    def serve(self) -> None:
        """Do what is due."""
        parts, machine = self._parts, self._parts.machine
        if not machine.is_open:
            subgroups = parts.plan.layout.subgroups
            # Another plan may have come since they were chosen.
            chosen = (number for number in self._order if self._may_have(subgroups[number]))
            machine.handle(Begin(self.open(tuple(Visit(number, speculative=True) for number in chosen), self._visit)))
        final = []
        while self._has_landed():
            final.append(self._final.popleft())
        if final:
            machine.handle(Admit(tuple(final)))
        parts.executor.submit(machine.take_operations())

    def _visit(self, run: Run) -> npt.NDArray[Any]:
        """Return what the kernel of a speculative run is told."""
        subgroup = run.visit.subgroup
        segments = len(self._parts.plan.layout.subgroups[subgroup].segments)
        sums = np.zeros((segments, SUMS), np.uint64)
        self._parts.lanes.await_sent(subgroup)
        address, table = self._parts.views.speculative_table(run, self._image_of(subgroup), self._slots, sums)
        self._made[subgroup] = _Made(address, table, sums)
        return table

    def _image_of(self, subgroup: int) -> int:
        """Return the address of the image of a subgroup's new weights."""
        return known(self._images, "there is no image of weights").address + self._image_at[subgroup]

    def confirmed(self, subgroups: Collection[int], account: StepAccount) -> tuple[int, ...]:
        """Return which of `subgroups` have a version that their step would make again; see `seal`.

        Args:
            subgroups: Those that the step updates.
            account: The step's.
        """
        machine, self.account = self._parts.machine, account
        account.revoked_bytes, self._dropped_bytes = self._dropped_bytes, 0
        if not machine.is_open or machine.broken is not None:
            return ()
        chosen = tuple(self._unchanged([subgroup for subgroup in machine.beside if subgroup in subgroups]))
        account.confirmed_bytes = self._state_bytes(chosen)
        account.revoked_bytes += self._state_bytes(machine.beside) - account.confirmed_bytes
        return chosen

    def seal(self, confirmed: tuple[int, ...], rest: Sweep) -> None:
        """End what is open: take over some versions and their weights, and begin what is left of the step."""
        machine = self._parts.machine
        machine.handle(Seal(confirmed, rest) if machine.is_open else Begin(rest))
        if machine.broken is None:
            try:
                for subgroup in confirmed:
                    self._publish(subgroup)
            except InternalError:
                raise
            except OffloadError as error:  # a GPU has failed, and the step with it
                machine.handle(Stop(error))
            self._end()
        self._let_go()

    def revoke(self) -> None:
        """End what is open, for another request than a step.

        It is made again once a step: whoever goes on for long without steps has nothing written for them.
        """
        machine = self._parts.machine
        if machine.is_open:
            self._wanted = self._wanted and not self._dropped_bytes and machine.broken is None
            self._dropped_bytes += self._state_bytes(machine.beside)
            machine.handle(Seal())
            if machine.broken is not None:  # an update may still run: what it reads and writes stays
                return
            self._end()
            if self._wanted:
                self._prepare()
        if not self._arrivals.any():  # they have been dropped
            self._final.clear()
            self._let_go()

    def _state_bytes(self, numbers: Collection[int]) -> int:
        subgroups = self._parts.plan.layout.subgroups
        return sum(subgroups[number].state_bytes for number in numbers)

    def _let_go(self) -> None:
        """Let go of gradients, which no update reads any more."""
        if self._parts.machine.broken is None:  # else some may
            self._lies.clear()

    def _end(self) -> None:
        self._made.clear()
        self._final.clear()
        self._kept = ()

    def _unchanged(self, subgroups: Sequence[int]) -> list[int]:
        """Return the subgroups that the step would update from the same rows and bytes."""
        parts, tables, made = self._parts, self._parts.tables, self._made
        layout, bound = parts.plan.layout, parts.gradients.bound_at()

        def is_alike(number: int) -> bool:
            image = self._image_of(number) if parts.plan.weights_on_gpu else None
            # Of gradients that are on their way nobody can tell.
            return parts.gradients.has_landed(layout.subgroups[number].segments) and tables.matches_speculative(
                number, made[number].address, made[number].table, bound, image
            )

        alike = [number for number in subgroups if is_alike(number)]
        if not alike:
            return []
        ranges = [tables.read_by(number, made[number].table) for number in alike]
        addresses, sizes = (np.concatenate(column) for column in zip(*ranges, strict=True))
        found = self._parts.kernel.fingerprints(addresses.reshape(-1), sizes.reshape(-1)).reshape(-1, SUMS)
        read = np.concatenate([made[number].sums for number in alike])
        same = (found == read).all(axis=1)
        ends = np.cumsum([len(made[number].sums) for number in alike])
        return [number for number, rows in zip(alike, np.split(same, ends[:-1]), strict=True) if rows.all()]

    def _publish(self, subgroup: int) -> None:
        """Put the weights of a version where they belong."""
        active = active_rows(self._made[subgroup].table)
        copies = self._parts.tables.weight_copies(subgroup, self._image_of(subgroup), active)
        self._parts.lanes.send_weights(subgroup, copies, time.monotonic())

    def stepped(self, scale: float, clip: float) -> None:
        """Take note of a step that has ended well, and choose what to update before the next one."""
        if self.hyperparameters is None:
            with contextlib.suppress(OffloadError):  # a GPU that has failed, as the next step will find
                self._free_images()
            return
        confirmed_bytes, revoked_bytes = self.account.confirmed_bytes, self.account.revoked_bytes
        if revoked_bytes > confirmed_bytes:
            self._next_pause = min(LONGEST_PAUSE, max(1, 2 * self._next_pause))
            self._pause = self._next_pause + 1
        elif confirmed_bytes:
            self._next_pause = 0
        self._pause = max(self._pause - 1, 0)
        self._scale = scale
        if self._all_arrived and clip == 1 and not self._pause:
            self._prepare()

    def _prepare(self) -> None:
        """Choose the subgroups to be updated before the next step, if there are any.

        If another thread holds the lock there are none: it may be in a signal handler that waits for this thread.
        """
        if not self._lock.acquire(blocking=False):
            self._wanted = False
            return
        try:
            self._choose()
        finally:
            self._lock.release()

    def _choose(self) -> None:
        self._grow()
        self._left.clear()
        self._waits.clear()
        self._final.clear()
        self._has_rows = False
        turns: dict[int, int] = {}
        for subgroup in self._parts.plan.layout.subgroups:
            number = subgroup.index
            if not self._may_have(subgroup):
                continue
            waits = {s.parameter for s in subgroup.segments if s.numel and self._expected[s.parameter]}
            if waits:
                self._waits[number] = len(waits)
                self._left[number] = sum(not self._is_there(position) for position in waits)
                turns[number] = max(int(self._arrived_at[position]) for position in waits)
        self._order = sorted(turns, key=lambda number: turns[number])
        self._wanted = bool(self._order) and self._take_images()
        for number in self._order:
            if number not in self._image_at:
                del self._waits[number], self._left[number]
        self._order = [number for number in self._order if number in self._image_at]
        for number in self._order:
            if self._wanted and not self._left[number]:  # it has arrived while the last step went on
                self._admit(number, (Exception,))  # no signal handler's, on this thread

    def _is_there(self, position: int) -> bool:
        """Return whether all of a gradient has arrived, and an update can read it."""
        has_place = position not in self._elsewhere or position in self._lies
        return has_place and bool(self._finals[position])

    def _take_images(self) -> bool:
        """Have memory for new weights, of those first whose gradients arrive first; return whether there is any."""
        subgroups = self._parts.plan.layout.subgroups
        if self._imaged.issuperset(self._order):
            return True
        chosen = dict.fromkeys((*self._order, *self._imaged))
        wanted = [number for number in chosen if self._parts.plan.may_speculate(number)]
        places, end, needed = {}, 0, sum(subgroups[number].weight_bytes for number in wanted)
        try:
            self._free_images()
            share = 1 if self._parts.plan.image_bytes else 2  # half of it, where no plan has counted them
            most = available_bytes() // share
            for number in wanted:
                nbytes = subgroups[number].weight_bytes
                if end + nbytes <= most:
                    places[number] = end
                    end += nbytes
            if end < needed:
                text = "updated during backward are %d of %d subgroups: new weights have %d of %d bytes of memory"
                log.warning(text, len(places), len(wanted), end, needed)
            self._images = self._parts.memory.arena(max(end, 1))
        except OffloadError as error:
            self.hyperparameters = None
            log.warning("nothing is updated during backward: %s", error)
            return False
        self._image_at, self._imaged = places, frozenset(wanted)
        return bool(places)

    def _free_images(self) -> None:
        """Free the memory for new weights; no version is beside a live one."""
        if self._images is not None:
            self._parts.lanes.wait()  # weights may still be on their way from there
        old, self._images = self._images, None
        self._parts.memory.give_back(old)
        self._image_at, self._imaged = {}, frozenset()

    def hold(self) -> None:
        """Start no further update: a request has come in."""
        machine = self._parts.machine
        machine.handle(Hold())
        self._parts.executor.submit(machine.take_operations())
