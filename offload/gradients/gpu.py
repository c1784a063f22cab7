"""Gradients on a GPU: their norms, and their copies to the device that uses them.

A gradient that the CPU will use is copied to its slot in host memory, in its own dtype: it *departs* from the GPU.
One that the GPU will use stays where it is. The squares of both are summed on the GPU in the same pass. Gradients of
further backward passes are added on the GPU if the first one has stayed, and in host memory if it has departed (see
`additions.py`), so that none is copied twice.

Gradients are collected in a bucket, which is *sent* as a whole: small ones in few copies (see `pieces.py`), with one
kernel for all their sums. A bucket is sent when it is full, when backward ends, and when a gradient in it is needed.

The caller drops a gradient before the lanes have read it, so a reference is held here until then. When too many bytes
are held, the caller's stream waits for the oldest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from offload.device.host import HostMemory
from offload.device.lanes import GpuLanes
from offload.device.memory import Block, BlockPlace
from offload.device.pieces import Pieces, as_pieces
from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.engine.tables import GradientsAt, StepRows, Tables
from offload.errors import ConfigError, InternalError, known
from offload.gradients.additions import Additions, Sending
from offload.gradients.store import BLOCK_SUM_BYTES, FinalGradient, GradientSlots, GradientStore, SlotArena
from offload.kernels import CpuUpdateKernel, blocks_numel
from offload.kernels.reference import TORCH_DTYPES
from offload.layout import SEGMENT_ALIGN_NUMEL, Layout, Segment, Subgroup
from offload.limits import Limits
from offload.memory.arenas import Arena
from offload.plan import Plan
from offload.plan.budget import FETCHED_AHEAD
from offload.protocols import NORM_BLOCK_NUMEL, DeviceLane, Mark
from offload.schedule.operations import Visit


@dataclass(slots=True)
class _GradientState:
    """The record of one parameter's gradient since the last step.

    Attributes:
        numel: Elements of the parameter.
        slot: Its slot in host memory; empty if it has none.
        stays: Whether the GPU updates part of the parameter, and so reads the gradient where it lies.
        host_sums: Host memory for numbers of 8 bytes: the sums of squares of the gradient's blocks, one each. Later
            parts of fingerprints: one for each block of a segment, whose blocks begin at its first element.
        device_sums: The memory of the same numbers on the device.
        segment_starts: First element of each of its segments, which may begin anywhere in a block.
        arrivals: Backward passes that have added to it since the last step.
        address: Where the first pass's gradient lies on the device; 0 for none.
        dtype: Of the first pass's gradient; those of further passes have the same.
        mark: Mark after which no lane reads the last pass's gradient; None before any has arrived.
        was_added: Whether the gradient of some further pass is added in host memory.
    """

    numel: int
    slot: torch.Tensor
    stays: bool
    host_sums: npt.NDArray[np.uint64]
    device_sums: BlockPlace
    segment_starts: tuple[int, ...]
    arrivals: int = 0
    address: int = 0
    dtype: DtypeCode = DtypeCode.NONE
    mark: Departure | None = None
    was_added: bool = False

    @property
    def blocks(self) -> npt.NDArray[np.float64]:
        """The sums of squares of its blocks, in host memory."""
        return self.host_sums[: blocks_numel(self.numel)].view(np.float64)

    def first_sum_at(self, start: int) -> int:
        """Return the index in `host_sums` of the first number of the segment that begins at element `start`.

        It is the index of the block with that element; and one more for each earlier segment, as a block in which two
        segments meet has a number for each of them.
        """
        return start // NORM_BLOCK_NUMEL + self.segment_starts.index(start)

    def reset(self) -> None:
        """Note that no gradient has arrived: the next one is the first."""
        self.arrivals = self.address = 0
        self.mark = None
        self.was_added = False


class _Collected(NamedTuple):
    """A gradient in the bucket: its parameter's position, and where it lies on the device."""

    position: int
    address: int
    dtype: DtypeCode


class _FetchOfVisit(NamedTuple):
    """What has to be done before a visit's run can read its gradients.

    Attributes:
        visit: The visit.
        marks: Marks to wait for, of gradients that arrived during backward.
        copies: Copies to host memory to be made and waited for.
    """

    visit: Visit
    marks: list[Mark]
    copies: Pieces


class Departure:
    """A `Mark` after the last work that reads a bucket's gradients; it exists before the bucket is sent.

    Whoever needs the device's own mark, so that lanes can follow it, asks `on_lane`, which sends the bucket first. A
    gradient that is added on the GPU alone has such a mark, too, without a bucket; see `_accumulate`.
    """

    def __init__(self, store: GpuGradients) -> None:
        self._store = store
        self.lane_mark: Mark | None = None
        """The device's mark on lane `GRADIENTS`; None before the bucket is sent."""
        self.sending: Sending = []
        """The bucket's gradients of further passes, which are to be added in host memory; empty until it is sent."""

    def on_lane(self) -> Mark:
        """Send the bucket, if it was not sent; return the device's mark."""
        if self.lane_mark is None:
            self._store.send_bucket()
        if self.lane_mark is None:
            raise InternalError("a bucket of gradients has been lost (this is a bug in offload, please report it)")
        return self.lane_mark

    def reached(self) -> bool:
        """Return whether the lane has passed the mark; does not send the bucket."""
        return self.lane_mark is not None and self.lane_mark.reached()

    def landed(self) -> bool:
        """Return whether the gradients are in their slots, with those of further passes added."""
        return self.reached() and all(filling.ended.is_set() for filling in self.sending)

    def wait(self) -> None:
        """Send the bucket, if it was not sent, and wait until the lane has passed the mark."""
        self.on_lane().wait()

    def time_s(self) -> float:
        """Raise an error, as the device's untimed mark does; part of the protocol `Mark`."""
        return self.on_lane().time_s()


@dataclass(slots=True)
class _Bucket:
    """Gradients of different parameters that are to be sent together.

    Attributes:
        caller: The lane of backward on which they are made.
        departure: Their mark.
        first: Gradients that are the first of their parameters since the last step: summed, and copied to slots.
        further: Gradients of further passes, which are added to slots in host memory.
        nbytes: Bytes of all gradients.
        sending: Progress of the further ones; None before their buffers are assigned.
    """

    caller: Hashable
    departure: Departure
    first: list[_Collected] = field(default_factory=list)
    further: list[_Collected] = field(default_factory=list)
    nbytes: int = 0
    sending: Sending | None = None

    def is_full(self, limits: Limits) -> bool:
        """Return whether the bucket has to be sent."""
        count = len(self.first) + len(self.further)
        return self.nbytes >= limits.bucket_bytes or count >= limits.bucket_count


class GpuGradients(GradientStore):
    """Gradients of one session whose weights lie on a GPU.

    `arrived`, `keep_until_read` and `send_bucket` belong to the threads of backward.

    Args:
        slots, tables, kernel, memory: See `GradientStore`.
        lanes: The session's lanes.
        limits: Sizes at which a bucket is sent, and at which callers wait.

    Attributes:
        records: The record of each parameter's gradient, by position.
        additions: Adds gradients of further passes in host memory.
        in_transit: Gradients that the caller has dropped and lanes may still read, each with the mark after which no
            lane does.
        final_read: Mark after which no lane reads the gradients of `fetch_final`; None if none does.
    """

    def __init__(
        self,
        slots: GradientSlots,
        tables: Tables,
        kernel: CpuUpdateKernel,
        memory: HostMemory,
        lanes: GpuLanes,
        limits: Limits,
    ) -> None:
        super().__init__(slots, tables, kernel, memory)
        self.lanes = lanes
        self._limits = limits
        self.records: list[_GradientState] = []
        self.in_transit: deque[tuple[Mark, torch.Tensor]] = deque()
        self.additions = Additions(lanes, kernel)
        self._in_transit_bytes = 0
        self._bucket: _Bucket | None = None  # None while nothing is collected
        self._lock = threading.RLock()  # for the bucket and the memory of block sums: several threads use them
        # Memory of block sums, on the device (address 0 while the sums are in host memory alone) and in host memory.
        # There is one pair for each time that parameters were added.
        self._regions: list[tuple[Block, Arena]] = []
        self._slots_bytes = 0  # of all slots
        self._slot_addresses: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # by position; 0 where there is none
        self._wide_slots: dict[int, torch.Tensor] = {}  # by position: fp32, for gradients that fit into no slot
        self._unsent_visits: dict[int, _FetchOfVisit] = {}  # by subgroup: fetches of this step that are not enqueued
        self._gap_bytes = 0  # gaps between slots that are smaller than this are padding, which a copy may overwrite
        self._visits_sent_early: set[int] = set()  # visits that have not begun, and whose gradients are on their way
        self.final_read: Mark | None = None

    # Memory

    def used_bytes(self, plan: Plan) -> int:
        """Return the host memory for gradients, wide slots included."""
        return super().used_bytes(plan) + sum(wide.nbytes for wide in self._wide_slots.values())

    def _needs_slot(self, plan: Plan, position: int) -> bool:
        """Return whether the CPU updates part of a parameter, in the step or in backward, and needs its gradient."""
        places = plan.layout.places[position]
        return any(plan.needs_gradients(subgroup) for subgroup, _ in places)

    def _free_unused(self, unused: Sequence[SlotArena]) -> None:
        """Free arenas of which no slot is in use, once no lane copies to them any more."""
        if unused:
            self.lanes.wait()
        super()._free_unused(unused)

    def _new_blocks(self, plan: Plan, first: int, counts: list[int]) -> list[npt.NDArray[np.float64]]:
        """Make records of the parameters from number `first` on, with host and device memory for their block sums.

        Also notes in all records what the plan says of slots and updates.
        """
        del self.records[first:]  # of a `use_plan` that failed
        layout = plan.layout
        starts_of_added = [_segment_starts(layout, position) for position in range(first, len(layout.places))]
        # See `first_sum_at`: room for one more number for each segment, which may share a block with the one before.
        counts = [count + len(starts) for count, starts in zip(counts, starts_of_added, strict=True)]
        device_block, host_arena = self._allocate_sums(BLOCK_SUM_BYTES * sum(counts))
        offset = 0
        empty = torch.empty(0, dtype=torch.float32, device="cpu")  # in the place of slots until `_note_slots`
        for parameter, count, starts in zip(self._parameters[first:], counts, starts_of_added, strict=True):
            no_sums = np.zeros(0, np.uint64)
            host_sums = no_sums if host_arena is None else host_arena.numpy(offset, count, np.uint64)
            device_sums = BlockPlace(device_block, offset)
            state = _GradientState(
                parameter.numel,
                empty,
                stays=False,
                host_sums=host_sums,
                device_sums=device_sums,
                segment_starts=starts,
            )
            self.records.append(state)
            offset += count * BLOCK_SUM_BYTES
        self._note_slots(plan)
        return [record.blocks for record in self.records[first:]]

    def _allocate_sums(self, nbytes: int) -> tuple[Block, Arena | None]:
        """Allocate memory of block sums on the device and in host memory; none if `nbytes` is 0."""
        if not nbytes:
            return Block(), None
        host_arena = self._memory.allocate_arena(nbytes)
        device_block = self.lanes.allocate_block(host_arena.nbytes)
        self._regions.append((device_block, host_arena))
        return device_block, host_arena

    def _note_slots(self, plan: Plan) -> None:
        """Note which slots a plan gives the records, which gradients stay on the GPU, and what lies between slots."""
        for record, slot, places in zip(self.records, self._slots, plan.layout.places, strict=True):
            record.slot = slot
            record.stays = any(plan.updates_on_gpu(subgroup) for subgroup, _ in places)
        self._slots_bytes = sum(slot.nbytes for slot in self._slots)
        self._slot_addresses, _ = self.slots_at()
        # The size of the smallest possible slot. So a smaller gap between two slots has no other slot in it.
        item_bytes = (
            TORCH_DTYPES[self._slot_settings.dtype_of(parameter)].itemsize for parameter in self._parameters
        )
        self._gap_bytes = SEGMENT_ALIGN_NUMEL * min(item_bytes, default=0)

    def _borrow(self, *, buffers: bool, caller: Hashable = None) -> None:
        """Borrow device memory for block sums that have none there, and copy these sums to it.

        The caller of this method holds the lock.

        Args:
            buffers: Whether to borrow the buffers for small pieces, too.
            caller: The stream in whose order memory is borrowed: what `Device.caller` has returned. None for the
                current stream; on the engine thread, where no stream of the user's is current, it must be given.
        """
        lanes = self.lanes
        device = lanes.device
        in_host_memory = [(block, host) for block, host in self._regions if not block.address]
        if not in_host_memory:  # memory is not borrowed here, or has been since it was returned last
            return
        caller = device.caller() if caller is None else caller
        if buffers:
            lanes.borrow_buffers(caller)
        addresses = [device.allocate(host.nbytes, caller) for _, host in in_host_memory]
        lanes.follow_borrowed(caller)  # earlier work on the caller's stream may still use this memory
        # Copy the sums back once lane `GRADIENTS` has copied them to host memory, in `_copy_sums`; later work on that
        # lane waits for these copies.
        device.follow(DeviceLane.H2D, device.mark(DeviceLane.GRADIENTS, timed=False))
        for address, (_, host) in zip(addresses, in_host_memory, strict=True):
            lanes.copy(DeviceLane.H2D, address, host.address, host.nbytes)
        device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.H2D, timed=False))
        for address, (block, _) in zip(addresses, in_host_memory, strict=True):
            block.address = address  # last, so that the next call repeats all of this after an interrupt

    def return_borrowed(self) -> None:
        """Return borrowed device memory, if there is any; block sums are in host memory until gradients arrive."""
        if not all(block.lasts for block, _ in self._regions):
            self._copy_sums_to_host()

    def _copy_sums_to_host(self) -> None:
        """Send the bucket, copy block sums to host memory on lane `GRADIENTS`, and return borrowed memory."""
        lanes = self.lanes
        with self._lock:
            self.send_bucket()
            self._copy_sums()
            for block, _ in self._regions:
                if not block.lasts:  # it is borrowed; `_borrow` gives it another address
                    block.address = 0
            lanes.return_borrowed()

    def _copy_sums(self) -> None:
        """Enqueue copies of all block sums that are on the device to host memory, on lane `GRADIENTS`."""
        for block, host in self._regions:
            if block.address:
                self.lanes.copy(DeviceLane.GRADIENTS, host.address, block.address, host.nbytes)

    def bound_at(self) -> GradientsAt:
        """Return where the CPU reads gradients: in their slots if they arrived during backward, else where bound."""
        tables = self._tables
        has_arrived = [record.mark is not None for record in self.records]
        return np.where(has_arrived, self._slot_addresses, tables.gradients), tables.gradient_dtypes.copy()

    def has_landed(self, segments: Sequence[Segment]) -> bool:
        """Return whether the gradients of some segments that arrived during backward are in their slots.

        Gradients that lie where they are bound have no mark, and are left out.
        """
        marks = dict.fromkeys(self.records[segment.parameter].mark for segment in segments)
        return all(mark is None or mark.landed() for mark in marks)

    def stays(self, position: int) -> bool:
        """Return whether the GPU updates part of a parameter, and so reads its gradient where it lies."""
        return self.records[position].stays

    def has_arrived(self, position: int) -> bool:
        """Return whether a gradient has arrived for a parameter since the last `forget`."""
        return self.records[position].arrivals > 0

    def have_arrived(self) -> bool:
        """Return whether gradients have arrived since the last `forget`."""
        return any(record.arrivals for record in self.records)

    # During backward

    def arrived(self, position: int, address: int, dtype: DtypeCode) -> Departure:
        """Note that a backward pass's gradient has arrived on the device.

        A parameter's first gradient since the last step is collected to be sent; further ones are added to it, on the
        GPU, in host memory, or in both.

        Returns:
            The mark after which no lane reads the gradient's memory. But if the record's `stays` is set, the first
            gradient is read, and added to, until `forget`.

        Raises:
            ConfigError: Its elements are not as large as the slot's, or its dtype is not that of earlier passes.
        """
        record = self.records[position]
        with self._lock:
            self._borrow(buffers=True)
            self._check_dtype(record, dtype)
            if self._bucket is not None and record.mark is self._bucket.departure:
                self.send_bucket()  # the gradient of the pass before is in it, and has to be read first
            if not record.arrivals:
                mark = self._collect(position, address, dtype, first=True)
                record.mark = mark
                record.address = address
                record.dtype = dtype
            else:
                mark = self._add_further(position, address, dtype)
            record.arrivals += 1
        # Where the first pass's gradient lies: those of further passes are added to it, or in its slot.
        self.bind(position, record.address, dtype, gathered=True)
        self._summed_dtypes[position] = dtype  # the sums are made on a lane, with the bucket, or in `settle`
        return mark

    def _add_further(self, position: int, address: int, dtype: DtypeCode) -> Departure:
        """Add the gradient of a further pass to the first one, wherever that one is read.

        It is added on the GPU if the gradient stays there, in host memory if it has a slot there, and in both if GPU
        and CPU update parts of the parameter.
        """
        record = self.records[position]
        mark = self._accumulate(record, address) if record.stays else None
        if mark is None or record.slot.numel():
            mark = self._collect(position, address, dtype, first=False)
            record.was_added = True
        record.mark = mark
        return mark

    def _collect(self, position: int, address: int, dtype: DtypeCode, *, first: bool) -> Departure:
        """Put a gradient into the bucket, to be copied to its slot or added there; send the bucket if it is full.

        A bucket has gradients of one stream only, as it is sent behind one mark on that stream.

        Returns:
            The bucket's departure, which all its gradients share: the mark after the last work that reads them. It is
            there before the bucket is sent; the device's own mark (`lane_mark`) is set in it by `send_bucket`.
        """
        caller = self.lanes.device.caller()
        if self._bucket is not None and self._bucket.caller != caller:
            self.send_bucket()
        if self._bucket is None:
            self._bucket = _Bucket(caller, Departure(self))
        bucket = self._bucket
        collected = bucket.first if first else bucket.further
        collected.append(_Collected(position, address, dtype))
        bucket.nbytes += self.records[position].numel * int(ITEM_BYTES[dtype])
        if bucket.is_full(self._limits):
            self.send_bucket()
        return bucket.departure

    def _accumulate(self, record: _GradientState, address: int) -> Departure:
        """Add the gradient of a further pass to the first one, on the GPU, and sum the squares of the result.

        This is enqueued at once, without a bucket; the mark returned is after it.
        """
        device = self.lanes.device
        device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
        source = address, record.dtype, record.numel
        first_gradient = record.address, record.dtype
        is_added = True  # not copied
        sums_address = record.device_sums.address
        device.gradient_blocks(DeviceLane.GRADIENTS, *source, sums_address, *first_gradient, is_added)
        departure = Departure(self)
        departure.lane_mark = device.mark(DeviceLane.GRADIENTS, timed=False)
        return departure

    def send_bucket(self) -> None:
        """Send the bucket, if there is one: enqueue copies to slots, sums and additions; on any thread.

        After an interrupt the next call sends all of it again; no gradient is added twice.
        """
        with self._lock:
            bucket = self._bucket
            device = self.lanes.device
            if bucket is None:
                return
            mark = device.mark_caller(bucket.caller)
            # Without a slot a gradient stays on the GPU, or has no elements.
            copies = [
                (address, record.slot.data_ptr(), record.numel * int(ITEM_BYTES[dtype]))
                for position, address, dtype in bucket.first
                if (record := self.records[position]).slot.numel()
            ]
            count = len(copies) + len(bucket.further)
            # Lanes that copy wait for the caller's work: none without copies; `LEAVING` alone for a single copy; for
            # several also `PIECES`, whose kernel gathers small ones.
            for lane in (DeviceLane.LEAVING, DeviceLane.PIECES)[:count]:
                device.follow(lane, mark)
            if copies:
                self.lanes.pieces.to_host(as_pieces(copies), self._gap_bytes, DeviceLane.LEAVING)
            device.follow(DeviceLane.GRADIENTS, mark)
            self._sum_squares(bucket.first)
            if bucket.further:
                self._begin_additions(bucket)
            # Copies and sums may read the gradients at the same time. Lane `GRADIENTS` waits for the copies only now,
            # so that the mark comes after both.
            if count:
                device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.LEAVING, timed=False))
            bucket.departure.sending = bucket.sending or []
            bucket.departure.lane_mark = device.mark(DeviceLane.GRADIENTS, timed=self.lanes.wakes)
            self._bucket = None  # only now: an interrupt before this line leaves the bucket to be sent again
            self.lanes.wake(bucket.departure.lane_mark)  # updates in backward may wait for these gradients

    def _sum_squares(self, gradients: Sequence[_Collected]) -> None:
        """Enqueue kernels that sum the squares of gradients, block by block: one for each dtype."""
        device = self.lanes.device
        if len(gradients) == 1:  # which needs no table of gradients on the device
            position, address, dtype = gradients[0]
            record = self.records[position]
            device.gradient_blocks(DeviceLane.GRADIENTS, address, dtype, record.numel, record.device_sums.address)
            return
        for dtype in sorted({each.dtype for each in gradients}):
            pairs = [(self.records[each.position], each.address) for each in gradients if each.dtype is dtype]
            rows = [(address, record.numel, record.device_sums.address) for record, address in pairs]
            device.sum_gradients(DeviceLane.GRADIENTS, dtype, np.array(rows, np.uint64))

    def _begin_additions(self, bucket: _Bucket) -> None:
        """Send the further gradients in a bucket to be added in host memory.

        The bucket keeps its `Sending`, which after an interrupt goes on where it was.
        """
        if bucket.sending is None:
            rows = [
                (address, record.slot.data_ptr(), record.numel, dtype)
                for position, address, dtype in bucket.further
                if (record := self.records[position]).slot.numel()
            ]
            bucket.sending = self.additions.prepare(rows, self._slots_bytes)
        self.additions.send(bucket.sending)

    def _check_dtype(self, record: _GradientState, dtype: DtypeCode) -> None:
        """Raise `ConfigError` if a gradient cannot lie in its slot, or be added to those of the passes before.

        It lies in the slot in its own dtype, so its elements have to be as large as the slot's. The gradients of all
        passes have to have the same dtype.
        """
        has_slot = record.slot.numel() > 0
        is_unlike_slot = has_slot and int(ITEM_BYTES[dtype]) != record.slot.element_size()
        is_unlike_earlier = record.arrivals > 0 and dtype is not record.dtype
        if is_unlike_slot or is_unlike_earlier:
            raise ConfigError(
                "gradient dtype", dtype.name.lower(), "use that of the weights, or gradient_dtype float32, throughout"
            )

    def keep_until_read(self, gradient: torch.Tensor, mark: Mark, *, elsewhere: bool) -> None:
        """Keep a gradient that the caller drops until lanes have read it; drop older ones if too much is kept.

        Args:
            gradient: The gradient.
            mark: Mark after which no lane reads it.
            elsewhere: Whether streams other than the caller's use its memory next, as FSDP2's do; see
                `drop_oldest_when_read`.
        """
        self._drop_read()
        self.in_transit.append((mark, gradient))
        self._in_transit_bytes += gradient.nbytes
        while self.in_transit and self._in_transit_bytes > self._limits.in_transit_bytes:
            self.drop_oldest_when_read(elsewhere=elsewhere)

    def drop_oldest_when_read(self, *, elsewhere: bool = False) -> None:
        """Drop the oldest gradient in transit, such that its memory is used again only once lanes have read it.

        For that the caller's stream waits for the lanes. With `elsewhere` the calling thread waits itself, as its
        current stream is not the one that uses the memory next.
        """
        mark, gradient = self.in_transit[0]
        if elsewhere:
            mark.wait()
        else:
            device = self.lanes.device
            # A lane follows the device's own marks only; `on_lane` sends the bucket first, if need be.
            device.follow(DeviceLane.CALLER, mark.on_lane() if isinstance(mark, Departure) else mark)
            device.record_use(gradient)  # its memory may be of another stream, which does not wait by itself
        self._drop_oldest()  # last: after an interrupt before this line, the gradient is still held

    def _drop_read(self) -> None:
        """Drop the gradients in transit that lanes have read."""
        while self.in_transit and self.in_transit[0][0].reached():
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest gradient in transit, whose memory is used again only after lanes have read it."""
        _, gradient = self.in_transit.popleft()
        self._in_transit_bytes -= gradient.nbytes
        if not self.in_transit:  # in case an interrupt has come between popping and subtracting
            self._in_transit_bytes = 0

    # For updates in backward, of gradients that stay where they are

    def final(self, position: int, gradient: torch.Tensor) -> FinalGradient | None:
        """Return a final gradient with the mark after which it is complete; None if its slot has another dtype.

        See `GradientStore.final`.
        """
        slot = self._slots[position]
        if slot.numel() and slot.dtype is not gradient.dtype:
            return None  # no update before the step can read it: the step copies it to a wide slot
        return gradient, self.lanes.device.mark(DeviceLane.CALLER, timed=False)

    def read_final(self, final: Mapping[int, FinalGradient], segments: Sequence[Segment], rows: StepRows) -> None:
        """Do nothing: `fetch_final` copies gradients to their slots, which the rows name already."""

    def fetch_final(self, final: Mapping[int, FinalGradient], subgroup: Subgroup, masters: Pieces) -> None:
        """Enqueue copies of an admitted subgroup's final gradients, and fp32 weights, to host memory.

        The subgroup's run waits for them. The caller may write to the gradients meanwhile: the step compares
        fingerprints, and so notices that the update has read other gradients.

        Args:
            final: Gradients that lie in no slot, by parameter, each with the mark after which it is complete.
            subgroup: The subgroup.
            masters: Copies of its fp32 weights to their image: rows of (source, target, bytes).
        """
        if len(masters):  # the last update's new weights may still be on their way to the GPU
            self.lanes.order_after_sent(subgroup.index)
        copies: list[tuple[int, int, int]] = masters.tolist()
        for segment in subgroup.segments:
            if segment.parameter in final and segment.numel:
                gradient, mark = final[segment.parameter]
                for lane in (DeviceLane.LEAVING, DeviceLane.PIECES):  # `PIECES` gathers small ones for `LEAVING`
                    self.lanes.device.follow(lane, known(mark, "a gradient on a device has no mark"))
                offset = segment.start * gradient.itemsize
                slot = self._slots[segment.parameter]
                nbytes = segment.numel * gradient.itemsize
                copies.append((gradient.data_ptr() + offset, slot.data_ptr() + offset, nbytes))
        if copies:
            visit = Visit(subgroup.index)
            self.lanes.fetch_gradients(visit, marks=(), copies=as_pieces(copies), gap_bytes=self._gap_bytes)
            self.final_read = self.lanes.device.mark(DeviceLane.LEAVING, timed=False)  # after `PIECES`, too

    def end_final(self) -> None:
        """Wait until no lane reads the gradients of `fetch_final`, which the caller then drops."""
        mark = self.final_read
        self.final_read = None
        if mark is not None:
            mark.wait()

    def fingerprints(
        self,
        positions: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        *,
        masters: bool = False,
    ) -> npt.NDArray[np.uint64]:
        """See `GradientStore.fingerprints`; each is made where its piece lies.

        The CPU makes those of gradients that arrived during backward, in their slots. The device makes those of all
        other gradients, and of masters.
        """
        records = [self.records[position] for position in positions.tolist()]
        on_device = np.array([masters or record.mark is None for record in records], bool)
        # By a size of 0 the CPU leaves out the pieces on the device.
        fingerprints = super().fingerprints(positions, addresses, np.where(on_device, np.uint64(0), sizes))
        chosen = np.flatnonzero(on_device & (sizes > 0))
        if not chosen.size:
            return fingerprints
        positions = positions[chosen]
        if masters:  # fp32 weights
            begins = self._tables.weights[positions]
            dtypes = np.full(chosen.size, DtypeCode.FLOAT32, np.int32)
        else:
            begins = self._tables.gradients[positions]
            dtypes = self._tables.gradient_dtypes[positions]
        fingerprints[chosen] = self._device_fingerprints(positions, addresses[chosen], sizes[chosen], begins, dtypes)
        return fingerprints

    def _device_fingerprints(
        self,
        positions: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        begins: npt.NDArray[np.uint64],
        dtypes: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.uint64]:
        """Return fingerprints of pieces of tensors on the device, and wait for them.

        The device computes one number for each block of a piece, in the memory of block sums. A piece's fingerprint
        is the sum of its numbers.

        Args:
            positions: Parameter of each piece.
            addresses: Address of each piece.
            sizes: Bytes of each piece.
            begins: Address of the tensor that each piece is a part of.
            dtypes: Element type of each piece.
        """
        starts = (addresses - begins) // ITEM_BYTES[dtypes]  # each piece's first element in its tensor
        numels = sizes // ITEM_BYTES[dtypes]
        # The results overwrite block sums, which are needed no more: a norm has been computed by now.
        self._summed_dtypes[positions] = DtypeCode.NONE
        records = [self.records[position] for position in positions.tolist()]
        first_sums = [record.first_sum_at(start) for record, start in zip(records, starts.tolist(), strict=True)]
        lanes, device = self.lanes, self.lanes.device
        with self._lock:
            self._borrow(buffers=False, caller=lanes.caller)
            for lane in (DeviceLane.LEAVING, DeviceLane.UPDATE, DeviceLane.H2D, DeviceLane.PIECES):
                # After updates, and after the caller's work, which these lanes have followed as the step began.
                device.follow(DeviceLane.GRADIENTS, device.mark(lane, timed=False))
            targets = [
                record.device_sums.address + number * BLOCK_SUM_BYTES
                for record, number in zip(records, first_sums, strict=True)
            ]
            rows = np.stack([addresses, numels, np.array(targets, np.uint64)], axis=1)
            for dtype in np.unique(dtypes).tolist():
                device.fingerprint_gradients(DeviceLane.GRADIENTS, DtypeCode(dtype), rows[dtypes == dtype])
            self._copy_sums()
            device.mark(DeviceLane.GRADIENTS, timed=False).wait()
        fingerprints = [
            record.host_sums[start : start + blocks_numel(numel)].sum(dtype=np.uint64)
            for record, start, numel in zip(records, first_sums, numels.tolist(), strict=True)
        ]
        return np.array(fingerprints, np.uint64)

    # Between passes

    def bind(self, position: int, address: int, dtype: DtypeCode, gathered: bool) -> None:
        """Note where a parameter's gradient lies; unless `gathered`, forget its gradients that have arrived."""
        super().bind(position, address, dtype, gathered)
        record = self.records[position]
        if not gathered and record.arrivals:  # the caller has bound another gradient
            self.finish()  # the slot is free for this one only when nothing is added there any more
            record.reset()

    def _sum_changed(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """Sum the squares of gradients that are not summed yet, then wait until all block sums are in host memory."""
        tables = self._tables
        numbers = np.array(positions, np.int64)
        stale = numbers[self._summed_dtypes[numbers] == DtypeCode.NONE]
        dtypes = map(DtypeCode, tables.gradient_dtypes[stale].tolist())
        if stale.size:  # their memory is the caller's: sum after its work
            device = self.lanes.device
            with self._lock:
                self._borrow(buffers=False)
                device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
                addresses = tables.gradients[stale].tolist()
                self._sum_squares([*map(_Collected, stale.tolist(), addresses, dtypes)])
        self.settle()
        return numbers

    def finish(self) -> None:
        """Send the bucket, and wait until gradients of further passes have been added in host memory."""
        self.send_bucket()
        self.additions.finish()

    def settle(self) -> None:
        """Wait until all additions are finished, and all block sums are up to date in host memory.

        Also returns borrowed device memory, and drops the gradients in transit that lanes have read.
        """
        self.finish()
        self._copy_sums_to_host()
        self.lanes.device.mark(DeviceLane.GRADIENTS, timed=False).wait()
        self._drop_read()
        for record in self.records:
            # The device has summed the squares of the first pass's gradient alone. The gradient of all passes is in
            # the slot, and its squares are summed there. (For one that stays, `_accumulate` has summed them.)
            if record.was_added and not record.stays:
                slot_address = record.slot.data_ptr()
                sums_address = record.blocks.ctypes.data
                self._kernel.gradient_blocks(slot_address, record.dtype, record.numel, sums_address)

    def forget(self) -> None:
        """Drop all gradients: the next one of each parameter is its first. Waits for additions under way.

        Also forgets an error of additions, and returns borrowed device memory.
        """
        device = self.lanes.device
        for _, gradient in self.in_transit:
            device.record_use(gradient)
        # The caller's stream may use their memory again, but only after what is on lane `GRADIENTS` now. That comes
        # after all copies, sums and additions that were enqueued as these gradients arrived.
        mark = device.mark(DeviceLane.GRADIENTS, timed=False)
        device.follow(DeviceLane.CALLER, mark)
        self._drop_bucket(mark)
        self.additions.wait_and_clear_error()
        for record in self.records:
            record.reset()
        self._clear_in_transit()
        self.return_borrowed()

    def _drop_bucket(self, mark: Mark) -> None:
        """Drop the bucket unsent, if there is one; whoever has yet to wait for its departure waits for `mark`."""
        with self._lock:
            if self._bucket is not None:  # nobody needs its gradients any more, so any mark will do
                self._bucket.departure.lane_mark = mark
                self._bucket = None

    def _clear_in_transit(self) -> None:
        """Drop all gradients in transit, whether lanes have read them or not."""
        self.in_transit.clear()
        self._in_transit_bytes = 0

    # In a step

    def begin_step(self, plan: Plan, visits: Sequence[Visit]) -> bool:
        """List the gradients that each visit of a step needs, and start to copy those that the CPU will use first.

        Returns:
            Whether `used_bytes` has grown, by wide slots.
        """
        wide_slots_before = len(self._wide_slots)
        self.lanes.forget_inputs()  # the last step's
        self._unsent_visits.clear()
        self._visits_sent_early.clear()
        for visit in visits:
            self._unsent_visits[visit.subgroup] = self._fetch_of(plan, visit)
        self._fetch_next()
        return len(self._wide_slots) > wide_slots_before

    def _fetch_of(self, plan: Plan, visit: Visit) -> _FetchOfVisit:
        """Return what has to be done before a visit's run can read its gradients.

        A gradient that arrived during backward has a mark; one that did not lies where it is bound on the device. A
        run on the GPU reads both where they lie, and waits for the mark. A run on the CPU waits for the mark if the
        gradient has departed to its slot. All others are copied to host memory for it, and the step's rows say where.
        """
        rows = self._tables.step_rows
        copies: list[tuple[int, int, int]] = []
        marks: list[Mark] = []
        for segment in plan.layout.subgroups[visit.subgroup].segments:
            position = segment.parameter
            if not rows.flags[position] or not segment.numel:  # the step does not update it
                continue
            mark = self.records[position].mark
            has_departed = mark is not None and self._slots[position].numel()
            if mark is not None and (visit.gpu or has_departed):
                marks.append(mark.on_lane())
            elif not visit.gpu:
                if mark is not None:  # it has stayed for the GPU, but the CPU updates it in this step
                    for lane in (DeviceLane.LEAVING, DeviceLane.PIECES):
                        self.lanes.device.follow(lane, mark.on_lane())
                copies.append(self._copy_of(segment, rows))
        return _FetchOfVisit(visit, list(dict.fromkeys(marks)), as_pieces(copies))

    def _copy_of(self, segment: Segment, rows: StepRows) -> tuple[int, int, int]:
        """Return the copy of a segment's gradient to host memory: (source, target, bytes); note its place in `rows`.

        The place is the parameter's slot, or a wide slot if it has none or a narrower one.
        """
        position = segment.parameter
        item_bytes = TORCH_DTYPES[DtypeCode(self._tables.gradient_dtypes[position])].itemsize
        slot = self._slots[position]
        if not slot.numel() or item_bytes > slot.element_size():  # no slot, or too narrow
            slot = self._ensure_wide_slot(position)
        rows.gradients[position] = slot.data_ptr()
        offset = segment.start * item_bytes
        source = int(self._tables.gradients[position]) + offset
        return source, slot.data_ptr() + offset, segment.numel * item_bytes

    def fetch_for_visit(self, subgroup: int) -> None:
        """Enqueue copies of the gradients of a visit that begins, and of the next visits; each run waits for its own.

        Not all gradients are copied when the step begins: no update starts while copies are being enqueued, and other
        copies from the GPU would wait for all of them.
        """
        if subgroup in self._unsent_visits:
            self.lanes.fetch_gradients(*self._unsent_visits.pop(subgroup), self._gap_bytes)
        self._visits_sent_early.discard(subgroup)
        self._fetch_next()

    def coming(self, subgroup: int) -> None:
        """Enqueue copies of a visit's gradients as its state starts to be fetched: it runs once both are there."""
        if subgroup in self._unsent_visits:
            self._fetch_before_visit(subgroup)

    def _fetch_before_visit(self, subgroup: int) -> None:
        """Enqueue copies of the gradients of a visit that has not begun."""
        fetch = self._unsent_visits.pop(subgroup)
        self.lanes.fetch_gradients(*fetch, self._gap_bytes)
        if len(fetch.copies):  # a visit that only waits for marks, or runs on the GPU, copies nothing ahead
            self._visits_sent_early.add(subgroup)

    def _fetch_next(self) -> None:
        """Enqueue copies of coming visits' gradients, until those of `FETCHED_AHEAD` visits are on their way."""
        while self._unsent_visits and len(self._visits_sent_early) < FETCHED_AHEAD:
            self._fetch_before_visit(next(iter(self._unsent_visits)))

    def _ensure_wide_slot(self, position: int) -> torch.Tensor:
        """Return a parameter's wide slot: for the fp32 gradient of a 16-bit weight, or for one without a slot."""
        if position not in self._wide_slots:
            numel = self.records[position].numel
            self._wide_slots[position] = self._memory.allocate_arena(4 * numel).tensor(0, numel, torch.float32)
        return self._wide_slots[position]

    def close(self) -> None:
        """Free all slots and buffers, those of additions, too; the device has been closed."""
        self._bucket = None
        self._clear_in_transit()
        self.additions.close()
        self._wide_slots.clear()
        super().close()


def _segment_starts(layout: Layout, position: int) -> tuple[int, ...]:
    """Return the first element of each of a parameter's segments."""
    return tuple(layout.subgroups[subgroup].segments[number].start for subgroup, number in layout.places[position])
