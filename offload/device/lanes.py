"""A session's memory on a GPU, and the work that it puts on the GPU's lanes.

The machine decides; this turns its decisions into work on lanes, orders lanes that depend on each other, and knows
every address. A copy to the GPU, or an update there, is reported as done once it is enqueued: work that depends on it
is enqueued after it, so no thread wakes up in between, and a step ends when all its work is enqueued. Only where host
memory is read or used again is the end reported: of copies from the GPU, and of copies of weights out of their slot.

All methods belong to the engine thread, except those of `GpuLanes` that say otherwise. Their `due_s` is for timelines
alone: when the event that has made an operation possible happened, on the monotonic clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from offload import metrics
from offload.device.memory import Block, BlockPlace
from offload.device.none import Lanes
from offload.device.pieces import PieceCopies, Pieces
from offload.device.pinning import PinnedMemory
from offload.errors import InternalError, OffloadError, known
from offload.kernels.table import active_rows
from offload.layout import Layout
from offload.memory.arenas import Arena
from offload.memory.touching import nodes_for
from offload.plan import NO_GPU, Budgets, GpuRates, Home, Plan, Rates
from offload.plan.budget import GPU_STAGING_SLOTS, HIDDEN_PIECE_BYTES, PIECE_BUFFERS, Offer, piece_buffer_bytes
from offload.protocols import LANES, WAKE, Device, DeviceLane, Mark, Queue
from offload.schedule.operations import AwaitPush, RunVisit, Transfer, Visit
from offload.units import format_bytes

log = logging.getLogger("offload")

LEAST_BYTES = 4096
"""Less than this is not asked of a GPU."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation on a lane of the GPU, for timelines, with the marks before and after its work on the lane."""

    lane: str
    subgroup: int
    nbytes: int
    due_s: float
    began: Mark
    ended: Mark


class WeightPlaces(Protocol):
    """Says where the weights of a subgroup lie: `offload.engine.tables.Tables`."""

    def weight_copies(self, subgroup: int, weights_address: int, chosen: npt.NDArray[Any] | None = None) -> Pieces:
        """See `Tables.weight_copies`."""


class GpuLanes(Lanes):
    """Homes, staging slots and lanes of one session on a device.

    Args:
        device: The GPU.
        queue: The queue for completions of operations.
        weights: Says where weights lie; None if no weights are copied.
        placement: The setting: which state that is not at home on the GPU is updated there: "cpu" or 0 for none,
            "gpu" or 1 for all, a number between for that share, "auto" for what the plan says.
        borrows: Whether staging slots and buffers are borrowed for each step, and not allocated by `allocate_for`.
        named_nodes: Whether arenas are bound to memory nodes that the user has named.
    """

    pins = True
    bounces = 1
    cores_beside = 2  # for the engine thread, and for the thread that runs forward and backward
    names = ("gpu", "h2d", "d2h")

    def __init__(
        self,
        device: Device,
        queue: Queue,
        weights: WeightPlaces | None = None,
        *,
        placement: str | float = "auto",
        borrows: bool = False,
        named_nodes: bool = False,
    ) -> None:
        super().__init__(device)
        self.borrows = borrows
        self._has_staging = placement not in ("cpu", 0)  # else the CPU updates all that is not at home on the GPU
        self.borrowed_bytes = 0
        """Device memory that the last step has borrowed."""
        self.caller: Hashable = None
        """The stream of the last request's caller, where memory is borrowed."""
        self._borrowed_slots: list[int] = []  # addresses
        self._shortages = 0  # steps that found less memory than planned
        is_read_by_gpu_alone = placement in ("gpu", 1)
        self._nodes = {} if named_nodes else nodes_for(device.node if is_read_by_gpu_alone else None)
        """Memory nodes that arenas are touched on; none where the system chooses, or the user has named nodes."""
        self.timed: dict[int, deque[Timed]] = {}
        """Operations on lanes whose times `take_timed` has not given out, by subgroup."""
        self.pinned = PinnedMemory(device)
        """Host memory that the device reaches by itself."""
        self.pieces = PieceCopies(device, self)
        """Copies of segments and gradients, of which many may be small."""
        self._queue = queue
        self._plan: Plan | None = None
        self._slots = Block()
        # By staging slot. State at home on the GPU has no slot: None is looked up for it, and never finds anything.
        self._ready: dict[int | None, Mark] = {}  # after the copy of state into the slot
        self._tables: dict[int | None, Any] = {}  # of the updates of state that is copied into the slot
        self._updated: dict[int, Mark] = {}  # after the last update in the slot
        self._weights = weights
        self._weights_address = 0  # of the first weight slot
        self._to_push: dict[int, npt.NDArray[np.uint64]] = {}  # copies of new weights, by subgroup
        self._written: dict[int, tuple[Mark, ...]] = {}
        """By subgroup: once all marks are reached, its new weights are in place on the device. Weights that the CPU
        has made have left host memory once the first mark is reached."""
        self._inputs: dict[int, tuple[Mark, ...]] = {}
        """By subgroup: once all its marks are reached, its run can read its gradients."""

    # What there is of memory

    def offers(self, layout: Layout, home_memory: int | str) -> Offer:
        """Return the GPU memory that a session may use for homes and for staging slots; see `Lanes.offers`.

        With "auto" it is tried whether the device can allocate that much, in one piece for each of the two.
        """
        free_bytes = self.usable_bytes(layout)
        home_bytes = 0
        staging_bytes = self._staging_bytes(layout) if self._has_staging else 0
        if home_memory == "auto":
            staging_bytes = self._try_bytes(staging_bytes)
            home_bytes = free_bytes - staging_bytes
            useful_bytes = min(home_bytes, layout.state_bytes)
            allocated_bytes = self._try_bytes(useful_bytes, beside=staging_bytes)
            # If that succeeded, all that is free is offered, though no more than all state was tried.
            if allocated_bytes != useful_bytes:
                home_bytes = allocated_bytes
        elif not self.borrows:  # borrowed memory has no homes
            home_bytes = int(home_memory)
        return Offer(on_gpu=True, gpu_bytes=home_bytes, gpu_staging_bytes=staging_bytes)

    def with_staging(self, budgets: Budgets, layout: Layout) -> Budgets:
        """Return budgets with enough staging memory for a larger layout, as far as GPU memory is free; never less."""
        staging_bytes = self._staging_bytes(layout) if self._has_staging else 0
        return dataclasses.replace(budgets, gpu_staging_bytes=max(budgets.gpu_staging_bytes, staging_bytes))

    def usable_bytes(self, layout: Layout) -> int:
        """Return the bytes of free memory that state may use, without the reserve and buffers for small pieces."""
        buffers = PIECE_BUFFERS * piece_buffer_bytes(layout.subgroups)
        return max(0, self.device.free_bytes() - self.device.reserve_bytes - buffers)

    def _staging_bytes(self, layout: Layout) -> int:
        """Return the bytes of free memory that staging slots for a layout may use.

        Slots that are allocated for good are at most `GPU_STAGING_SLOTS`; slots that are borrowed, as many as fit.
        """
        slot_bytes = max(layout.subgroup_bytes, default=0)
        usable_bytes = self.usable_bytes(layout)
        if not self.borrows:
            return min(GPU_STAGING_SLOTS * slot_bytes, usable_bytes)
        # Each slot is tried alone, as a step allocates them one by one, also from memory cached for activations.
        # (A layout without subgroups has slots of 0 bytes.)
        most = min(len(layout.subgroups), (usable_bytes + self.device.cached_bytes()) // max(slot_bytes, 1))
        return slot_bytes * self._try_count(slot_bytes, most)

    def _try_bytes(self, nbytes: int, beside: int = 0) -> int:
        """Return how much of `nbytes` the device can allocate as one piece, beside another piece of `beside` bytes.

        `nbytes` is halved until it succeeds; below `LEAST_BYTES` the result is 0. The memory is freed again, but
        torch's allocator keeps it for this process.
        """
        with contextlib.ExitStack() as ends:
            self._allocate(beside, ends)  # which has been tried before, so there is room
            while nbytes >= LEAST_BYTES:
                try:
                    self._allocate(nbytes, ends)
                    return nbytes
                except OffloadError as error:
                    log.info("less of the GPU is used: %s", error)
                    nbytes //= 2
        return 0

    def _try_count(self, nbytes: int, most: int) -> int:
        """Return how many pieces of `nbytes` the device has room for at once, up to `most`; all are freed again."""
        with contextlib.ExitStack() as ends:
            for count in range(most):
                try:
                    self._allocate(nbytes, ends)
                except OffloadError as error:
                    log.info("less of the GPU is borrowed: %s", error)
                    return count
        return most

    # Memory

    def allocate_for(self, plan: Plan, before: Layout, weight_slots: int) -> None:
        """Allocate the device memory that `plan` adds; nothing is in flight.

        Args:
            plan: The new plan.
            before: The present plan's layout.
            weight_slots: Address of host memory for the plan's weight slots; 0 to keep the present ones.

        Raises:
            OffloadError: The device has no room; nothing has changed then.
        """
        new_subgroups = plan.layout.subgroups[len(before.subgroups) :]
        at_home = [subgroup for subgroup in new_subgroups if plan.at_home_on_gpu(subgroup.index)]
        slots_bytes = self.missing_bytes(plan)
        needs_larger = plan.piece_buffer_bytes > self.pieces.buffer_bytes and not self.borrows
        buffers_bytes = PIECE_BUFFERS * plan.piece_buffer_bytes if needs_larger else 0
        # All three at once, before anything changes: if there is no room, the session goes on as it was.
        homes, slots, buffers = self.memory.allocate(sum(s.state_bytes for s in at_home), slots_bytes, buffers_bytes)
        offset = 0
        for subgroup in at_home:
            self.homes[subgroup.index] = BlockPlace(homes, offset)
            offset += subgroup.state_bytes
        if slots.nbytes:
            self.wait()  # updates are reported as done when they are enqueued, so some may still use the old slots
            self.memory.free(self._slots)
            self._slots = slots
        if buffers.nbytes:
            self.wait()  # copies to the GPU, too, are reported when they are enqueued: some may use the old buffers
            self.memory.free(self.pieces.replace_buffers(buffers))
        if weight_slots:
            self._weights_address = weight_slots

    def missing_bytes(self, plan: Plan) -> int:
        """Return the bytes that `allocate_for` allocates for staging slots; 0 if the present ones are large enough.

        They come beside the present slots, which are freed afterwards. Borrowed slots are not allocated there.
        """
        slots_bytes = plan.gpu_staging_bytes
        return slots_bytes if slots_bytes > self._slots.nbytes and not self.borrows else 0

    # Memory that is borrowed

    def allocate_block(self, nbytes: int) -> Block:
        """Return a block of memory; where memory is borrowed, one without an address, which the borrower sets.

        Raises:
            OffloadError: The device has no room.
        """
        return Block(nbytes) if self.borrows else self.memory.allocate(nbytes)[0]

    def borrow_slots(self) -> int | None:
        """Borrow staging slots for a step, the plan's or as many as there is room for, and buffers for small pieces.

        Returns:
            The number of slots; None if slots are not borrowed.
        """
        if not self.borrows:
            return None
        plan = self._known_plan
        # Before the slots, which may take all that is left: without buffers every small piece is a copy of its own.
        self.borrow_buffers(self.caller)
        available_bytes = self.device.free_bytes() + self.device.cached_bytes()
        while len(self._borrowed_slots) < plan.gpu_slots:
            try:
                # What cannot succeed is not tried, as an allocation that fails empties torch's cache.
                if available_bytes < plan.gpu_slot_bytes:
                    raise OffloadError(f"{format_bytes(available_bytes)} are left")
                self._borrowed_slots.append(self.device.allocate(plan.gpu_slot_bytes, self.caller))
            except OffloadError as error:
                self._note_shortage(len(self._borrowed_slots), plan.gpu_slots, error)
                break
            available_bytes -= plan.gpu_slot_bytes
        self.follow_borrowed(self.caller)
        buffers_bytes = PIECE_BUFFERS * self.pieces.buffer_bytes
        self.borrowed_bytes = len(self._borrowed_slots) * plan.gpu_slot_bytes + buffers_bytes
        return len(self._borrowed_slots)

    def borrow_buffers(self, caller: Hashable) -> None:
        """Borrow buffers for small pieces, in the order of a caller's stream, unless they are there.

        If there is no room for them, pieces are copied one by one.
        """
        nbytes = PIECE_BUFFERS * self._known_plan.piece_buffer_bytes
        if nbytes and not self.pieces.buffer_bytes:
            available_bytes = self.device.free_bytes() + self.device.cached_bytes()
            if available_bytes >= nbytes:
                with contextlib.suppress(OffloadError):
                    self.pieces.replace_buffers(Block(nbytes, self.device.allocate(nbytes, caller)))

    def follow_borrowed(self, caller: Hashable) -> None:
        """Make all lanes wait for what is on a caller's stream now, after memory was borrowed on that stream.

        The memory may be that of a freed tensor, which earlier work on the stream still uses. See `Device.allocate`.
        """
        mark = self.device.mark_caller(caller)
        for lane in LANES:
            self.device.follow(lane, mark)

    def return_borrowed(self) -> None:
        """Give all borrowed memory back, if any; its next use is ordered after work that is on lanes now."""
        if self.borrows:
            self._borrowed_slots = []
            self.pieces.replace_buffers(Block())
            self.device.return_borrowed()

    def _note_shortage(self, count: int, planned: int, error: OffloadError) -> None:
        """Count a step that finds less memory than planned; log the first, the second, the fourth, the eighth, ..."""
        self._shortages += 1
        is_power_of_two = self._shortages.bit_count() == 1
        if is_power_of_two:
            what = f"{count} of {planned} staging slots" if count else "no staging slot, so the CPU updates all"
            text = "backward has left less of the GPU than it did at first: a step has %s (%s)"
            log.warning(text, what, error)

    @property
    def _known_plan(self) -> Plan:
        """The plan; InternalError before `use_plan`."""
        if self._plan is None:
            raise InternalError("a GPU's staging slots are used before there is a plan")
        return self._plan

    def use_plan(self, plan: Plan) -> None:
        """Use a plan for which `allocate_for` has allocated memory; nothing is in flight."""
        self._plan = plan

    def _allocate(self, nbytes: int, undo: contextlib.ExitStack) -> None:
        """Allocate device memory, unless `nbytes` is 0; it is freed when `undo` ends."""
        if nbytes:
            undo.callback(self.device.release, self.device.allocate(nbytes))

    def state_address(self, run: RunVisit) -> int:
        """Return the device address of the state that a run on the GPU updates."""
        return (
            self.homes[run.visit.subgroup].address
            if run.transfer_slot is None
            else self._slot_address(run.transfer_slot)
        )

    def _slot_address(self, gpu_slot: int) -> int:
        """Return the device address of a staging slot."""
        if self.borrows:
            return self._borrowed_slots[gpu_slot]
        return self._slots.address + gpu_slot * self._known_plan.gpu_slot_bytes

    def _state_bytes(self, subgroup: int) -> int:
        """Return the bytes of a subgroup's state; 0 before there is a plan."""
        return self._plan.layout.subgroups[subgroup].state_bytes if self._plan is not None else 0

    def allocate_arena(self, nbytes: int, *, inherit: bool = False, node: int | None = None) -> Arena:
        """Return host memory for work of the device, pinned as far as the system allows.

        Its pages are touched first, by many threads: pinning would touch them by one, and all on that thread's node.
        Forked processes never see the memory, whatever `inherit` says: a write after a fork would replace the page by
        a copy, and the device would go on with the pinned one.
        """
        arena = Arena(nbytes, node=node)
        try:
            arena.touch(self._nodes, lambda: self.given_up)
        except BaseException:
            arena.close()
            raise
        self.pinned.pin(arena)
        return arena

    def discard(self, arena: Arena, offset: int, nbytes: int) -> None:
        """Do nothing: pages of an arena in use are pinned. `HostMemory.discard_pages` unpins arenas first."""

    def pin(self, arena: Arena) -> None:
        """Pin an arena again that was unpinned, and whose pages were given back."""
        arena.touch(self._nodes, lambda: self.given_up)
        self.pinned.pin(arena)

    def unpin(self, arena: Arena) -> None:
        """Unpin an arena; no work uses it any more."""
        self.pinned.unpin(arena)

    def free_arena(self, arena: Arena) -> None:
        """Free an arena that `allocate_arena` returned; no work uses it any more."""
        self.pinned.unpin(arena)
        arena.close()

    def metrics(self) -> dict[str, float]:
        """Return the bytes of state at home on the device, of host memory pinned and not, and of borrowed memory."""
        figures: dict[str, float] = {
            metrics.GPU_BYTES: self._plan.home_bytes[Home.GPU] if self._plan is not None else 0,
            metrics.PINNED_BYTES: self.pinned.pinned_bytes,
            metrics.UNPINNED_BYTES: self.pinned.unpinned_bytes,
        }
        if self.borrows:
            figures[metrics.BORROWED_BYTES] = self.borrowed_bytes
        return figures

    def known_rates(self, rates: Rates) -> Rates | None:
        """Return rates that were measured before; None if they have none of a GPU."""
        return rates if rates.gpu != NO_GPU else None

    def measure_rates(self, measure: Callable[[GpuLanes], GpuRates]) -> GpuRates:
        """Return the rates of these lanes, which are idle, by calling `measure`."""
        return measure(self)

    # Around the caller's work; on the caller's thread

    def follow_caller(self) -> None:
        """Make the lanes of a step wait for all work that the caller has enqueued so far.

        Where memory is borrowed, note the caller's stream, too: the step borrows on it.
        """
        mark = self.device.mark(DeviceLane.CALLER, timed=False)
        if self.borrows:
            self.caller = self.device.caller()
        # Not `GRADIENTS`: that lane is made to follow the caller wherever a gradient is handed over.
        for lane in (DeviceLane.H2D, DeviceLane.D2H, DeviceLane.UPDATE, DeviceLane.PIECES, DeviceLane.LEAVING):
            self.device.follow(lane, mark)

    def order_caller(self) -> None:
        """Make work that the caller enqueues from now on wait for new weights and state that are on lanes now.

        Updates write them (`UPDATE`), or copies to the device (`H2D`), whose small pieces are scattered (`PIECES`).
        """
        for lane in (DeviceLane.UPDATE, DeviceLane.H2D, DeviceLane.PIECES):
            self.device.follow(DeviceLane.CALLER, self.device.mark(lane, timed=False))

    def order_caller_after(self, subgroups: Iterable[int]) -> None:
        """Make work that the caller enqueues from now on wait for the new weights of visited subgroups."""
        marks = (mark for subgroup in subgroups for mark in self._written.get(subgroup, ()))
        for mark in dict.fromkeys(marks):  # each once
            self.device.follow(DeviceLane.CALLER, mark)

    def wait(self) -> None:
        """Wait until all work on the lanes has been done; any thread."""
        for lane in LANES:
            self.device.mark(lane, timed=False).wait()

    def in_use(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return all tensors, as lanes may still use them."""
        return tensors

    def wake(self, after: Mark | None = None) -> None:
        """If `wakes`, wake the engine thread to look for arrived gradients: at once, or `after` a timed mark."""
        if not self.wakes:
            return
        if after is None:
            self._queue.post(WAKE)
        else:
            self.device.report(after, self._queue, WAKE)

    # Operations

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int) -> None:
        """Put a copy on a lane: on `H2D` to the device, on all others from it; any thread.

        It is cut where pinned chunks of host memory end. While a step goes on beside the caller's work, it is also
        cut into pieces, so that copies of the caller's get in between.
        """
        host_address = source if lane is DeviceLane.H2D else target
        piece_bytes = HIDDEN_PIECE_BYTES if self.is_hidden else 0
        for offset, size in self.pinned.whole_copies(host_address, nbytes):
            self.device.copy(lane, target + offset, source + offset, size, piece_bytes)

    def copy_gradient_to_host(self, address: int, nbytes: int, bounce: int) -> int:
        """Copy a gradient to `bounce`, after work that the calling thread has enqueued, and wait; return `bounce`."""
        self.device.follow(DeviceLane.LEAVING, self.device.mark(DeviceLane.CALLER, timed=False))
        self.copy(DeviceLane.LEAVING, bounce, address, nbytes)
        self.device.mark(DeviceLane.LEAVING, timed=False).wait()
        return bounce

    def save(self, target: int, source: int, nbytes: int) -> Mark:
        """Enqueue a copy to host memory, after the caller's work; return the mark after the copy.

        Once the mark is reached, nothing reads the source any more.
        """
        self.device.follow(DeviceLane.LEAVING, self.device.mark(DeviceLane.CALLER, timed=False))
        self.copy(DeviceLane.LEAVING, target, source, nbytes)
        return self.device.mark(DeviceLane.LEAVING)

    def restore(self, target: int, source: int, nbytes: int) -> Mark:
        """Enqueue a copy back from host memory, where `save` has copied to; return the mark after it.

        The caller's later work waits for the copy.
        """
        for lane in (DeviceLane.CALLER, DeviceLane.LEAVING):  # after the target's earlier uses, and after `save`
            self.device.follow(DeviceLane.H2D, self.device.mark(lane, timed=False))
        self.copy(DeviceLane.H2D, target, source, nbytes)
        mark = self.device.mark(DeviceLane.H2D)
        self.device.follow(DeviceLane.CALLER, mark)
        return mark

    def copy_in(self, operation: Transfer, host_address: int, table: npt.NDArray[Any], due_s: float) -> None:
        """Enqueue copies of a subgroup's state to a staging slot, and of its update's table; report at once.

        The copy of the slot's former content to the host, if any, has ended. Table and mark are kept for
        `enqueue_update`, which takes them.
        """
        slot, nbytes = operation.transfer_slot, operation.nbytes
        last_update = self._updated.get(slot)
        # State that its update has not changed is not copied out, so nobody may have waited for that update.
        if last_update is not None:
            self.device.follow(DeviceLane.H2D, last_update)
        self._tables[slot] = self.device.send_table(table)  # before the state: see `Device.send_table`
        began = self.device.mark(DeviceLane.H2D)
        self.copy(DeviceLane.H2D, self._slot_address(slot), host_address, nbytes)
        self._ready[slot] = self.device.mark(DeviceLane.H2D)
        self._note_timed("h2d", operation.subgroup, nbytes, due_s, began, self._ready[slot])
        self._post(operation.op)

    def enqueue_update(self, operation: RunVisit, table: npt.NDArray[Any] | None, due_s: float) -> None:
        """Enqueue a subgroup's update on the device, and report it as done at once.

        The update's table is `table`, or the one that `copy_in` has sent with the state. The mark after the update is
        noted for whatever follows it: `copy_out`, the slot's next `copy_in`, and readers of the new weights.
        """
        subgroup, slot = operation.visit.subgroup, operation.transfer_slot
        copied, sent_table = self._ready.pop(slot, None), self._tables.pop(slot, None)
        if copied is not None:  # else the state is at home here, or fresh: it is not copied
            self.device.follow(DeviceLane.UPDATE, copied)
        if table is not None:
            sent_table = self.device.send_table(table)
        for mark in self._inputs.get(subgroup, ()):
            self.device.follow(DeviceLane.UPDATE, mark)
        began = self.device.mark(DeviceLane.UPDATE)
        if sent_table is not None:  # else it changes no segment: see `DeviceKernel.send`
            self.device.update(sent_table)
        ended = self.device.mark(DeviceLane.UPDATE)
        self._written[subgroup] = (ended,)  # the update has written the new weights, too
        if operation.transfer_slot is not None:
            self._updated[operation.transfer_slot] = ended
        self._note_timed("gpu", subgroup, self._state_bytes(subgroup), due_s, began, ended)
        self._post(operation.op)

    def has_table(self, operation: RunVisit) -> bool:
        """Return whether the table of an update was copied with its state."""
        return operation.transfer_slot in self._tables

    def copy_out(self, operation: Transfer, host_address: int, due_s: float) -> None:
        """Copy a subgroup's state back to host memory; report the operation when the copy has ended."""
        slot, nbytes = operation.transfer_slot, operation.nbytes
        self.device.follow(DeviceLane.D2H, self._updated[slot])
        began = self.device.mark(DeviceLane.D2H)
        self.copy(DeviceLane.D2H, host_address, self._slot_address(slot), nbytes)
        ended = self.device.mark(DeviceLane.D2H)
        self._note_timed("d2h", operation.subgroup, nbytes, due_s, began, ended)
        self.device.report(ended, self._queue, operation.op)

    def _post(self, op: int) -> None:
        """Report an operation as done."""
        now_s = time.monotonic()
        self._queue.post(op, started_s=now_s, finished_s=now_s)

    # Weights of subgroups that the CPU visits

    def image(self, weight_slot: int | None) -> int:
        """Return the address of a weight slot."""
        if self._plan is None or weight_slot is None:
            raise InternalError("a subgroup's weights are wanted in host memory, and it has no weight slot")
        return self._weights_address + weight_slot * self._plan.weight_slot_bytes

    def will_push(self, run: RunVisit, table: npt.NDArray[Any] | None = None) -> None:
        """Note which new weights `push` is to copy after a run: all segments', or those active in its table."""
        subgroup = run.visit.subgroup
        chosen = None if table is None else active_rows(table)
        self._to_push[subgroup] = self._weight_copies(subgroup, run.transfer_slot, chosen)

    def _weight_copies(self, subgroup: int, weight_slot: int | None, chosen: Any = None) -> Pieces:
        """Return the copies between a subgroup's weights and their slot; of `chosen` segments only, if given."""
        weights = known(self._weights, "nobody knows where weights are")
        return weights.weight_copies(subgroup, self.image(weight_slot), chosen)

    def fetch_weights(self, operation: Transfer, due_s: float) -> None:
        """Copy a subgroup's weights from the device to their slot; report the operation when they are there."""
        copies = self._weight_copies(operation.subgroup, operation.transfer_slot)
        self.order_after_sent(operation.subgroup)  # else the weights before the last step's might be read
        began = self.device.mark(DeviceLane.LEAVING)
        self.pieces.to_host(copies, lane=DeviceLane.LEAVING)
        ended = self.device.mark(DeviceLane.LEAVING)
        self._note_timed("d2h", operation.subgroup, operation.nbytes, due_s, began, ended)
        self.device.report(ended, self._queue, operation.op)

    def push(self, operation: Transfer, due_s: float) -> None:
        """Send a subgroup's new weights, which `will_push` has noted, to the device."""
        self.send_weights(operation.subgroup, self._to_push.pop(operation.subgroup), due_s)
        self._post(operation.op)

    def send_weights(self, subgroup: int, copies: npt.NDArray[np.uint64], due_s: float) -> None:
        """Enqueue copies of a subgroup's new weights to the device: rows of `Tables.weight_copies`.

        Their marks are noted for whatever has to follow them: `await_sent`, `order_after_sent`, `await_push`,
        `order_caller_after`.
        """
        began = self.device.mark(DeviceLane.H2D)
        scatters = self.pieces.to_device(copies)
        ended = self.device.mark(DeviceLane.H2D)
        marks = [ended]
        if scatters:  # small weights lie in a buffer after the copy, and in their places after the scattering
            marks.append(self.device.mark(DeviceLane.PIECES, timed=False))
        self._written[subgroup] = tuple(marks)
        self._note_timed("h2d", subgroup, int(copies[:, 2].sum()), due_s, began, ended)

    def await_sent(self, subgroup: int) -> None:
        """Make a subgroup's next run on the CPU wait also until its last new weights have left host memory.

        The run writes its own new weights to the same place.
        """
        # Of the marks of `_written`, the first says that.
        self._inputs[subgroup] = (*self._inputs.get(subgroup, ()), *self._written.get(subgroup, ())[:1])

    def order_after_sent(self, subgroup: int) -> None:
        """Let later copies from the device wait until a subgroup's last new weights are in place there."""
        for mark in self._written.get(subgroup, ()):
            for lane in (DeviceLane.LEAVING, DeviceLane.PIECES):
                self.device.follow(lane, mark)

    def await_push(self, operation: AwaitPush) -> None:
        """Report when a subgroup's new weights have left their slot, which is then free for other weights."""
        sent_mark = self._written[operation.subgroup][0]  # the first says that; see `_written`
        self.device.report(sent_mark, self._queue, operation.op)

    # Gradients that the CPU needs

    def fetch_gradients(self, visit: Visit, marks: Sequence[Mark], copies: Pieces, gap_bytes: int) -> None:
        """Make a visit's run wait for all its gradients; if the CPU updates, first enqueue their copies to the host.

        The copies are on lane `LEAVING`: on the lane of state (`D2H`) they would wait for updates not begun yet.

        Args:
            visit: The visit.
            marks: Marks of gradients that arrived during backward: once reached, the run can read them.
            copies: Gradients that still have to be copied.
            gap_bytes: See `PieceCopies.to_host`.
        """
        if visit.gpu:
            self._inputs[visit.subgroup] = tuple(marks)
        elif marks or len(copies):  # else no gradient is on its way: the run waits for none
            began, due_s = self.device.mark(DeviceLane.LEAVING), time.monotonic()
            self.pieces.to_host(copies, gap_bytes, DeviceLane.LEAVING)
            ended = self.device.mark(DeviceLane.LEAVING)
            self._inputs[visit.subgroup] = (ended,)  # also after those of `marks`, which left on this lane
            if len(copies):
                self._note_timed("d2h", visit.subgroup, int(copies[:, 2].sum()), due_s, began, ended)

    def inputs_mark(self, subgroup: int) -> Mark | None:
        """Return the first mark that a run on the CPU still has to wait for; None if it need not wait.

        It waits for its gradients to be in host memory; after `await_sent` also for its last weights to have left.
        """
        return next((mark for mark in self._inputs.get(subgroup, ()) if not mark.reached()), None)

    def report_inputs(self, subgroup: int, op: int) -> bool:
        """Report `op` when a mark is reached that a run on the CPU still waits for; return whether there is one.

        Without such a mark nothing is reported.
        """
        mark = self.inputs_mark(subgroup)
        if mark is not None:
            self.device.report(mark, self._queue, op)
        return mark is not None

    def forget_inputs(self) -> None:
        """Forget the marks and tables of a step that has ended, well or not."""
        self._inputs.clear()
        self._tables.clear()

    # Copies outside steps; the caller waits for them

    def copy_to_host(self, copies: Pieces) -> None:
        """Copy from the device, after all work that may have changed the sources, and wait.

        Small gaps between the copies in host memory are overwritten.
        """
        for lane in (DeviceLane.UPDATE, DeviceLane.H2D, DeviceLane.PIECES):
            mark = self.device.mark(lane, timed=False)
            for other in (DeviceLane.D2H, DeviceLane.PIECES):  # which copy large pieces, and gather small ones
                self.device.follow(other, mark)
        self.pieces.to_host(copies)
        self.device.mark(DeviceLane.D2H, timed=False).wait()

    def copy_to_device(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy to the device, after all work on its lanes, and wait: rows of (device, host address, bytes)."""
        for lane in (DeviceLane.UPDATE, DeviceLane.D2H):
            self.device.follow(DeviceLane.H2D, self.device.mark(lane, timed=False))
        for target, source, nbytes in copies:
            self.copy(DeviceLane.H2D, target, source, nbytes)
        self.device.mark(DeviceLane.H2D, timed=False).wait()

    def _note_timed(self, lane: str, subgroup: int, nbytes: int, due_s: float, began: Mark, ended: Mark) -> None:
        """Note an operation for timelines; `take_timed` gives it out once its marks have been reached."""
        self.timed.setdefault(subgroup, deque()).append(Timed(lane, subgroup, nbytes, due_s, began, ended))

    def take_timed(self, add: Callable[[Timed], None], subgroup: int | None = None) -> None:
        """Call `add` for all operations that have ended, or for one subgroup's, and forget them; any thread."""
        queues = [self.timed.get(subgroup, deque())] if subgroup is not None else list(self.timed.values())
        for queue in queues:
            for _ in range(len(queue)):  # each of the present ones once: what has not ended goes to the end
                with contextlib.suppress(IndexError):  # another thread has taken it
                    timed = queue.popleft()
                    if timed.ended.reached():
                        add(timed)
                    else:
                        queue.append(timed)

    def close(self) -> None:
        """Wait for the lanes, unpin host memory and close the device."""
        with contextlib.suppress(OffloadError):  # a device that has failed finishes nothing
            self.wait()
        self.pinned.close()
        self.device.close()
