"""What a session has on a GPU, and what it puts on the GPU's lanes.

The machine decides; this turns its decisions into work on lanes, orders lanes that depend on each other, and knows
every address. A copy to the GPU, or an update there, counts as done once it is enqueued: work that depends on it is
enqueued behind it, so no thread wakes up in between and a step ends when the GPU knows all its work. Only copies from
the GPU are reported when they have really finished, since host code reads them.

All methods belong to the engine thread, except those of `GpuLanes` that say otherwise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.engine.memory import Arena
from offload.engine.operations import CopyIn, CopyOut, PushWeights, Run, Visit
from offload.engine.pinning import PinnedMemory
from offload.errors import InternalError, OffloadError
from offload.layout import Layout
from offload.plan.budget import WEIGHT_SLOTS, Plan
from offload.protocols import LANES, Device, DeviceLane, Mark, Queue


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation on a lane of the GPU, for timelines."""

    lane: str
    subgroup: int
    nbytes: int
    due_s: float
    began: Mark
    ended: Mark


@dataclass(slots=True)
class _WeightSlot:
    """Host memory where the CPU makes a subgroup's new weights, before they are copied to the GPU."""

    address: int
    subgroup: int | None = None
    pushed: Mark | None = None


class GpuLanes:
    """Homes, staging slots and lanes of one session on a device.

    Args:
        device: The GPU.
        queue: Where ends of operations are reported.
    """

    def __init__(self, device: Device, queue: Queue) -> None:
        self.device = device
        self.timed: list[Timed] = []
        """Operations put on lanes since `take_timed`, in that order."""
        self.pinned = PinnedMemory(device)
        """Host memory that the device reaches by itself."""
        self._queue = queue
        self._plan: Plan | None = None
        self._homes: dict[int, int] = {}
        self._slots_address = 0
        self._slots_bytes = 0
        self._ready: dict[int, Mark] = {}
        self._updated: dict[int, Mark] = {}
        self._left: dict[int, Mark] = {}
        self._weights: list[_WeightSlot] = []
        self._weights_of: dict[int, tuple[_WeightSlot, npt.NDArray[Any]]] = {}
        self._inputs: dict[int, tuple[Mark, ...]] = {}

    # Memory

    def adopt(self, plan: Plan, before: Layout, weight_slots: int) -> None:
        """Take device memory for what `plan` adds; nothing is in flight.

        Args:
            plan: The new plan.
            before: The layout of the plan before.
            weight_slots: Address of host memory for `WEIGHT_SLOTS` weight slots; 0 to keep those there are.

        Raises:
            OffloadError: The device has no room; nothing has changed then.
        """
        subgroups = plan.layout.subgroups[len(before.subgroups) :]
        added = [subgroup for subgroup in subgroups if plan.at_home_on_gpu(subgroup.index)]
        slots_bytes = plan.gpu_slots * plan.gpu_slot_bytes
        # Allocate everything before changing anything: without room, the session goes on as it was.
        homes = self.device.allocate(sum(subgroup.state_bytes for subgroup in added)) if added else 0
        try:
            slots = self.device.allocate(slots_bytes) if slots_bytes > self._slots_bytes else 0
        except OffloadError:
            if homes:
                self.device.release(homes)
            raise
        for subgroup in added:
            self._homes[subgroup.index] = homes
            homes += subgroup.state_bytes
        if slots:
            self.wait()
            if self._slots_address:
                self.device.release(self._slots_address)
            self._slots_address, self._slots_bytes = slots, slots_bytes
        if weight_slots:
            size = plan.weight_slot_bytes
            self._weights = [_WeightSlot(weight_slots + number * size) for number in range(WEIGHT_SLOTS)]

    def bind(self, plan: Plan) -> None:
        """Use a plan that `adopt` has taken memory for; nothing is in flight."""
        self._plan = plan

    def state_address(self, run: Run) -> int:
        """Return the device address of the state that a run on the GPU updates."""
        return self.home(run.visit.subgroup) if run.gpu_slot is None else self._slot(run.gpu_slot)

    def home(self, subgroup: int) -> int:
        """Return the device address of the state of a subgroup at home on the GPU."""
        return self._homes[subgroup]

    def _slot(self, gpu_slot: int) -> int:
        if self._plan is None:
            raise InternalError("a GPU's staging slot is used before there is a plan")
        return self._slots_address + gpu_slot * self._plan.gpu_slot_bytes

    def _state_bytes(self, subgroup: int) -> int:
        return self._plan.layout.subgroups[subgroup].state_bytes if self._plan is not None else 0

    def arena(self, nbytes: int, *, inherit: bool = False) -> Arena:
        """Return host memory, pinned for the device as far as the system allows."""
        arena = Arena(nbytes, inherit=inherit)
        self.pinned.pin(arena)
        return arena

    def give_back(self, arena: Arena) -> None:
        """Free an arena that `arena` returned; no work uses it any more."""
        self.pinned.unpin(arena)
        arena.close()

    # Around the caller's work; on the caller's thread

    def follow_caller(self) -> None:
        """Make the lanes of a step wait for all work that the caller has enqueued so far."""
        mark = self.device.mark(DeviceLane.CALLER, timed=False)
        for lane in (DeviceLane.H2D, DeviceLane.D2H, DeviceLane.UPDATE, DeviceLane.LEAVING):
            self.device.follow(lane, mark)

    def lead_caller(self) -> None:
        """Make work that the caller enqueues from now on wait for new weights and state."""
        for lane in (DeviceLane.UPDATE, DeviceLane.H2D):
            self.device.follow(DeviceLane.CALLER, self.device.mark(lane, timed=False))

    def wait(self) -> None:
        """Wait until all work on the lanes has been done; any thread."""
        for lane in LANES:
            self.device.mark(lane, timed=False).wait()

    # Operations

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int) -> None:
        """Put a copy on a lane (`H2D` copies to the device), cut where chunks of pinned memory end; any thread."""
        host = source if lane is DeviceLane.H2D else target
        for offset, size in self.pinned.whole_copies(host, nbytes):
            self.device.copy(lane, target + offset, source + offset, size)

    def copy_in(self, operation: CopyIn, host_address: int, due_s: float) -> None:
        """Copy a subgroup's state into a staging slot on the device."""
        slot, nbytes = operation.gpu_slot, self._state_bytes(operation.subgroup)
        for mark in (self._updated.get(slot), self._left.get(slot)):  # of the slot's owner before
            if mark is not None:
                self.device.follow(DeviceLane.H2D, mark)
        began = self.device.mark(DeviceLane.H2D)
        self.copy(DeviceLane.H2D, self._slot(slot), host_address, nbytes)
        self._ready[slot] = self.device.mark(DeviceLane.H2D)
        self.timed.append(Timed("h2d", operation.subgroup, nbytes, due_s, began, self._ready[slot]))
        self._post(operation.op)

    def run(self, operation: Run, table: npt.NDArray[Any] | None, due_s: float) -> None:
        """Update a subgroup on the device."""
        subgroup = operation.visit.subgroup
        copied = self._ready.pop(operation.gpu_slot, None) if operation.gpu_slot is not None else None
        if copied is not None:  # fresh state is not copied
            self.device.follow(DeviceLane.UPDATE, copied)
        for mark in self._inputs.get(subgroup, ()):
            self.device.follow(DeviceLane.UPDATE, mark)
        began = self.device.mark(DeviceLane.UPDATE)
        if table is not None:
            self.device.update(table)
        ended = self.device.mark(DeviceLane.UPDATE)
        if operation.gpu_slot is not None:
            self._updated[operation.gpu_slot] = ended
        self.timed.append(Timed("gpu", subgroup, self._state_bytes(subgroup), due_s, began, ended))
        self._post(operation.op)

    def copy_out(self, operation: CopyOut, host_address: int, due_s: float) -> None:
        """Copy a subgroup's state back; reports when it is whole in host memory."""
        slot, nbytes = operation.gpu_slot, self._state_bytes(operation.subgroup)
        self.device.follow(DeviceLane.D2H, self._updated[slot])
        began = self.device.mark(DeviceLane.D2H)
        self.copy(DeviceLane.D2H, host_address, self._slot(slot), nbytes)
        self._left[slot] = self.device.mark(DeviceLane.D2H)
        self.timed.append(Timed("d2h", operation.subgroup, nbytes, due_s, began, self._left[slot]))
        self.device.report(self._left[slot], self._queue, operation.op)

    def _post(self, op: int) -> None:
        now_s = time.monotonic()
        self._queue.post(op, started_s=now_s, finished_s=now_s)

    # Weights that the CPU makes

    def weight_slot(self, subgroup: int) -> int:
        """Return the address of a weight slot, which is the subgroup's until it is pushed or dropped."""
        free = [slot for slot in self._weights if slot.subgroup is None]
        if not free:
            raise InternalError("all weight slots are in use (this is a bug in offload, please report it)")
        slot = next((slot for slot in free if slot.pushed is None or slot.pushed.reached()), free[0])
        if slot.pushed is not None:
            slot.pushed.wait()
        slot.subgroup, slot.pushed = subgroup, None
        self._weights_of[subgroup] = slot, np.zeros((0, 3), np.uint64)
        return slot.address

    def will_push(self, subgroup: int, copies: npt.NDArray[Any]) -> None:
        """Say what `push` is to copy: rows of (device address, host address, bytes)."""
        self._weights_of[subgroup] = self._weights_of[subgroup][0], copies

    def push(self, operation: PushWeights, due_s: float) -> None:
        """Send a subgroup's new weights to the device."""
        slot, copies = self._weights_of.pop(operation.subgroup)
        began = self.device.mark(DeviceLane.H2D)
        self._copy_all(DeviceLane.H2D, copies)
        slot.subgroup, slot.pushed = None, self.device.mark(DeviceLane.H2D)
        self.timed.append(Timed("h2d", operation.subgroup, int(copies[:, 2].sum()), due_s, began, slot.pushed))
        self._post(operation.op)

    def push_now(self, subgroup: int) -> None:
        """Send a subgroup's weights to the device and wait until they are there."""
        slot, copies = self._weights_of.pop(subgroup)
        self._copy_all(DeviceLane.H2D, copies)
        self.device.mark(DeviceLane.H2D, timed=False).wait()
        slot.subgroup = None

    def drop(self, subgroup: int) -> None:
        """Give a subgroup's weight slot back: its weights have not changed."""
        slot, _ = self._weights_of.pop(subgroup)
        slot.subgroup = None

    def _copy_all(self, lane: DeviceLane, copies: npt.NDArray[Any]) -> None:
        for target, source, nbytes in copies.tolist():
            self.copy(lane, target, source, nbytes)

    # Gradients that the CPU needs

    def bring(self, visit: Visit, marks: Sequence[Mark], copies: Sequence[tuple[int, int, int]]) -> None:
        """Fetch the gradients of a visit, and make its run wait for them.

        They have a lane of their own: on that of state, copies wait for updates to end that have not begun.

        Args:
            visit: The visit.
            marks: Of gradients that arrived during backward: once reached, they are where the run reads them.
            copies: Gradients still to be fetched: rows of (host address, device address, bytes).
        """
        if visit.gpu:
            self._inputs[visit.subgroup] = tuple(marks)
        elif marks or copies:
            for mark in marks:
                self.device.follow(DeviceLane.LEAVING, mark)
            began, due_s = self.device.mark(DeviceLane.LEAVING), time.monotonic()
            for target, source, nbytes in copies:
                self.copy(DeviceLane.LEAVING, target, source, nbytes)
            ended = self.device.mark(DeviceLane.LEAVING)
            self._inputs[visit.subgroup] = (ended,)
            if copies:
                brought_bytes = sum(nbytes for _, _, nbytes in copies)
                self.timed.append(Timed("d2h", visit.subgroup, brought_bytes, due_s, began, ended))

    def inputs(self, subgroup: int) -> Mark | None:
        """Return a mark that a run on the CPU still has to wait for; None if its gradients are there."""
        return next((mark for mark in self._inputs.get(subgroup, ()) if not mark.reached()), None)

    def forget_inputs(self) -> None:
        """Forget the marks of a step that has ended."""
        self._inputs.clear()

    # Copies outside steps, which are waited for

    def fetch(self, copies: Sequence[tuple[int, int, int]], *, follows: bool = True) -> None:
        """Copy from the device and wait: rows of (host address, device address, bytes).

        Args:
            copies: The rows.
            follows: Wait for all work already on the UPDATE and H2D lanes first; otherwise only for the caller's.
        """
        for lane in (DeviceLane.UPDATE, DeviceLane.H2D) if follows else ():
            self.device.follow(DeviceLane.D2H, self.device.mark(lane, timed=False))
        for target, source, nbytes in copies:
            self.copy(DeviceLane.D2H, target, source, nbytes)
        self.device.mark(DeviceLane.D2H, timed=False).wait()

    def store(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy to the device, behind all work on its lanes, and wait: rows of (device, host address, bytes)."""
        for lane in (DeviceLane.UPDATE, DeviceLane.D2H):
            self.device.follow(DeviceLane.H2D, self.device.mark(lane, timed=False))
        for target, source, nbytes in copies:
            self.copy(DeviceLane.H2D, target, source, nbytes)
        mark = self.device.mark(DeviceLane.H2D, timed=False)
        self.device.follow(DeviceLane.UPDATE, mark)
        mark.wait()

    def take_timed(self, add: Callable[[Timed], None]) -> None:
        """Hand over all operations that have ended."""
        left = []
        for timed in self.timed:
            if timed.ended.reached():
                add(timed)
            else:
                left.append(timed)
        self.timed = left

    def close(self) -> None:
        """Wait for the lanes, unpin host memory and close the device."""
        with contextlib.suppress(OffloadError):  # a device that has failed finishes nothing
            self.wait()
        self.pinned.close()
        self.device.close()
