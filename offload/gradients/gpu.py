"""Gradients on a GPU: their norms, and their copies to the device that uses them.

A gradient that the CPU will use is copied to its slot in host memory, in its own dtype: it *leaves* the GPU. One that
the GPU will use stays where it is. The squares of both are summed on the GPU in the same pass. Gradients of further
backward passes are added on the GPU if the first one has stayed, and in host memory if it has left (see
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
from offload.gradients.store import BLOCK_BYTES, FinalGradient, GradientSlots, GradientStore
from offload.kernels import CpuUpdateKernel, blocks_numel
from offload.kernels.reference import TORCH_DTYPES
from offload.layout import SEGMENT_ALIGN_NUMEL, Segment, Subgroup
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
        slot: Its slot in host memory; empty if it has none.
        stays: Whether the GPU updates part of the parameter, and so reads the gradient where it lies.
        parts: Host memory of its block sums, or of its fingerprint: one number for each part of a segment that lies
            in one block.
        on_device: The memory of the same numbers on the device.
        starts: First element of each of its segments, which may begin anywhere in a block.
        arrivals: Backward passes that have added to it since the last step.
        address: Where the first one lies on the device; 0 for none.
        mark: Mark after which no lane reads the last one; None before any has arrived.
        was_added: Whether gradients of further passes are added in host memory.
    """

    numel: int
    slot: torch.Tensor
    stays: bool
    parts: npt.NDArray[np.uint64]
    on_device: BlockPlace
    starts: tuple[int, ...]
    arrivals: int = 0
    address: int = 0
    dtype: DtypeCode = DtypeCode.NONE
    mark: Departure | None = None
    was_added: bool = False

    @property
    def blocks(self) -> npt.NDArray[np.float64]:
        """Block sums."""
        return self.parts[: blocks_numel(self.numel)].view(np.float64)

    def first_part(self, start: int) -> int:
        """Return the number of the first part of the segment that begins at element `start`."""
        return start // NORM_BLOCK_NUMEL + self.starts.index(start)

    def reset(self) -> None:
        """Drop the gradient."""
        self.arrivals, self.address, self.mark, self.was_added = 0, 0, None, False


class Departure:
    """The mark of a bucket's gradients, on a lane once the bucket is sent; lanes may follow `on_lane()` only."""

    def __init__(self, store: GpuGradients) -> None:
        self._store = store
        self.lane_mark: Mark | None = None
        """The mark on lane `GRADIENTS`; None before the bucket is sent."""
        self.sending: Sending = []
        """Gradients of further passes, once the bucket is sent."""

    def on_lane(self) -> Mark:
        """Send the bucket, if it was not sent; return the device's mark."""
        if self.lane_mark is None:
            self._store.send_bucket()
        if self.lane_mark is None:
            raise InternalError("a bucket of gradients has been lost (this is a bug in offload, please report it)")
        return self.lane_mark

    def reached(self) -> bool:
        """Return whether the lane has passed the mark; the bucket is not sent for that."""
        return self.lane_mark is not None and self.lane_mark.reached()

    def landed(self) -> bool:
        """Return whether the gradients are in their slots, with those of further passes added."""
        return self.reached() and all(filling.ended.is_set() for filling in self.sending)

    def wait(self) -> None:
        """Send the bucket, if it was not sent, and wait until the lane has passed the mark."""
        self.on_lane().wait()

    def time_s(self) -> float:
        """Raise, as the device's mark does: it is not timed."""
        return self.on_lane().time_s()


@dataclass(slots=True)
class _Bucket:
    """Gradients of different parameters that are to be sent together.

    Attributes:
        caller: The lane of backward on which they are made.
        departure: Their mark.
        first: Position, address and dtype of gradients that are the first of their parameters.
        further: Position, address and dtype of gradients that are added in host memory.
        nbytes: Bytes of all gradients.
        sending: Progress of the further ones; None before their buffers are assigned.
    """

    caller: Hashable
    departure: Departure
    first: list[tuple[int, int, DtypeCode]] = field(default_factory=list)
    further: list[tuple[int, int, DtypeCode]] = field(default_factory=list)
    nbytes: int = 0
    sending: Sending | None = None


class GpuGradients(GradientStore):
    """Gradients of one session whose weights lie on a GPU.

    `arrived`, `hold` and `leave` belong to the threads of backward.

    Args:
        slots, tables, kernel, memory: See `GradientStore`.
        lanes: The session's lanes.
        limits: Sizes at which a bucket is sent, and at which callers wait.

    Attributes:
        records: The record of each parameter's gradient, by position.
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
        self._bucket: _Bucket | None = None
        self._lock = threading.RLock()
        # Memory of block sums, for the parameters of each `Engine.add`: on the device (address 0 while the sums are
        # in host memory alone), and in host memory.
        self._regions: list[tuple[Block, Arena]] = []
        self._slots_bytes = 0
        self._slot_addresses: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._wide: dict[int, torch.Tensor] = {}  # see `_ensure_wide_slot`
        self._to_bring: dict[int, tuple[Visit, list[Mark], Pieces]] = {}
        self._gap_bytes = 0  # see `PieceCopies.to_host`
        self._ahead: set[int] = set()  # visits that have not begun, and whose gradients are on their way
        self.final_read: Mark | None = None

    # Memory

    def used_bytes(self, plan: Plan) -> int:
        """Return the host memory for gradients, wide slots included."""
        return super().used_bytes(plan) + sum(wide.nbytes for wide in self._wide.values())

    def _needs_slot(self, plan: Plan, position: int) -> bool:
        places = plan.layout.places[position]
        return any(plan.needs_gradients(subgroup) for subgroup, _ in places)

    def _free_unused(self, unused: Sequence[tuple[Arena, tuple[int, ...]]]) -> None:
        if unused:
            self.lanes.wait()
        super()._free_unused(unused)

    def _new_blocks(self, plan: Plan, first: int, counts: list[int]) -> list[npt.NDArray[np.float64]]:
        """Make records of the parameters from number `first` on, with host and device memory for their block sums."""
        del self.records[first:]  # of an `adopt` that failed
        layout = plan.layout
        starts = [
            tuple(layout.subgroups[s].segments[n].start for s, n in segment_places)
            for segment_places in layout.places[first:]
        ]
        counts = [count + len(segment_places) for count, segment_places in zip(counts, starts, strict=True)]
        region, device_block = (
            self._memory.allocate_arena(BLOCK_BYTES * sum(counts)) if sum(counts) else None,
            Block(),
        )
        if region is not None:
            device_block = self.lanes.allocate_block(region.nbytes)
            self._regions.append((device_block, region))
        offset, empty = 0, torch.empty(0, dtype=torch.float32, device="cpu")
        for parameter, count, segment_places in zip(self._parameters[first:], counts, starts, strict=True):
            host_parts = region.numpy(offset, count, np.uint64) if region is not None else np.zeros(0, np.uint64)
            self.records.append(
                _GradientState(
                    parameter.numel, empty, False, host_parts, BlockPlace(device_block, offset), segment_places
                )
            )
            offset += count * BLOCK_BYTES
        for record, slot, places in zip(self.records, self._slots, plan.layout.places, strict=False):
            record.slot, record.stays = slot, any(plan.updates_on_gpu(subgroup) for subgroup, _ in places)
        self._slots_bytes = sum(slot.nbytes for slot in self._slots)
        self._slot_addresses, _ = self.slots_at()
        # A gap between slots that is smaller than any slot is padding, which a copy may overwrite.
        items = (TORCH_DTYPES[self._slot_settings.dtype_of(parameter)].itemsize for parameter in self._parameters)
        self._gap_bytes = SEGMENT_ALIGN_NUMEL * min(items, default=0)
        return [record.blocks for record in self.records[first:]]

    def _borrow(self, *, buffers: bool, caller: Hashable = None) -> None:
        """Allocate device memory for block sums, and for `buffers` of pieces, on the caller's stream, until returned.

        The calling thread has the lock. The stream is that of `caller` if it is given, as on the engine thread.
        """
        lanes = self.lanes
        away = [(block, host) for block, host in self._regions if not block.address]
        if not away:
            return
        device = lanes.device
        caller = device.caller() if caller is None else caller
        if buffers:
            lanes.borrow_buffers(caller)
        addresses = [device.allocate(host.nbytes, caller) for _, host in away]
        lanes.follow_borrowed(caller)
        device.follow(DeviceLane.H2D, device.mark(DeviceLane.GRADIENTS, timed=False))  # which copied them to the host
        for address, (_, host) in zip(addresses, away, strict=True):
            lanes.copy(DeviceLane.H2D, address, host.address, host.nbytes)
        device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.H2D, timed=False))
        for address, (block, _) in zip(addresses, away, strict=True):
            block.address = address  # last, so that an interrupt leaves all of this to be repeated

    def return_borrowed(self) -> None:
        """Give borrowed device memory back, if there is any; block sums are in host memory until gradients arrive."""
        if not all(block.lasts for block, _ in self._regions):
            self._copy_sums_to_host()

    def _copy_sums_to_host(self) -> None:
        """Send the bucket, copy block sums to host memory on lane `GRADIENTS`, and give borrowed memory back."""
        lanes = self.lanes
        with self._lock:
            self.send_bucket()
            self._copy_sums()
            for block, _ in self._regions:
                if not block.lasts:
                    block.address = 0
            lanes.return_borrowed()

    def _copy_sums(self) -> None:
        """Put on lane `GRADIENTS`: copy all block sums that are on the device to host memory."""
        for block, host in self._regions:
            if block.address:
                self.lanes.copy(DeviceLane.GRADIENTS, host.address, block.address, host.nbytes)

    def bound_at(self) -> GradientsAt:
        """Return where the CPU reads gradients: in their slots if they arrived during backward, else where bound."""
        tables, has_left = self._tables, [record.mark is not None for record in self.records]
        return np.where(has_left, self._slot_addresses, tables.gradients), tables.gradient_dtypes.copy()

    def has_landed(self, segments: Sequence[Segment]) -> bool:
        """Return whether the gradients of some segments that leave the GPU are in their slots."""
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
        """Note that a backward pass's gradient has arrived on the device, and collect it to be sent, or add it.

        Returns:
            The mark after which no lane reads the gradient's memory. But if the record's `stays` is set, the first
            gradient is read, and added to, until `forget`.

        Raises:
            ConfigError: If its dtype is not that of the slot, or of earlier passes.
        """
        record = self.records[position]
        with self._lock:
            self._borrow(buffers=True)
            self._check_dtype(record, dtype)
            if self._bucket is not None and record.mark is self._bucket.departure:
                self.send_bucket()  # the gradient of the pass before
            if not record.arrivals:
                record.mark = self._collect(position, address, dtype, first=True)
                record.address, record.dtype = address, dtype
            else:
                mark = self._accumulate(record, address) if record.stays else None
                if mark is None or record.slot.numel():
                    mark = self._collect(position, address, dtype, first=False)
                    record.was_added = True
                record.mark = mark
            record.arrivals += 1
            mark = record.mark
        self.bind(position, record.address, dtype, True)
        self._gathered[position] = dtype
        return mark

    def _collect(self, position: int, address: int, dtype: DtypeCode, *, first: bool) -> Departure:
        """Put a gradient into the bucket, to be copied to its slot or added there; send a bucket that is full."""
        caller = self.lanes.device.caller()
        if self._bucket is not None and self._bucket.caller != caller:
            self.send_bucket()
        if self._bucket is None:
            self._bucket = _Bucket(caller, Departure(self))
        bucket, most = self._bucket, self._limits
        (bucket.first if first else bucket.further).append((position, address, dtype))
        bucket.nbytes += self.records[position].numel * int(ITEM_BYTES[dtype])
        if bucket.nbytes >= most.bucket_bytes or len(bucket.first) + len(bucket.further) >= most.bucket_count:
            self.send_bucket()
        return bucket.departure

    def _accumulate(self, record: _GradientState, address: int) -> Departure:
        """Add the gradient of a further pass to the first one, on the GPU."""
        device = self.lanes.device
        device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
        source, target = (address, record.dtype, record.numel), (record.address, record.dtype, True)
        device.gradient_blocks(DeviceLane.GRADIENTS, *source, record.on_device.address, *target)
        departure = Departure(self)
        departure.lane_mark = device.mark(DeviceLane.GRADIENTS, timed=False)
        return departure

    def send_bucket(self) -> None:
        """Send the bucket, if there is one: enqueue copies to slots, sums and additions; on any thread.

        After an interrupt the next call sends all of it again; no gradient is added twice.
        """
        with self._lock:
            bucket, device = self._bucket, self.lanes.device
            if bucket is None:
                return
            mark = device.mark_caller(bucket.caller)
            copies = [
                (address, record.slot.data_ptr(), record.numel * int(ITEM_BYTES[dtype]))
                for position, address, dtype in bucket.first
                if (record := self.records[position]).slot.numel()
            ]
            count = len(copies) + len(bucket.further)
            for lane in (DeviceLane.LEAVING, DeviceLane.PIECES)[:count]:
                device.follow(lane, mark)
            if copies:
                self.lanes.pieces.to_host(as_pieces(copies), self._gap_bytes, DeviceLane.LEAVING)
            device.follow(DeviceLane.GRADIENTS, mark)
            self._sum(bucket.first)
            if bucket.further:
                self._send(bucket)
            if count:  # after the sums, so that these do not wait for their own copies
                device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.LEAVING, timed=False))
            bucket.departure.sending = bucket.sending or []
            bucket.departure.lane_mark = device.mark(DeviceLane.GRADIENTS, timed=self.lanes.wakes)
            self._bucket = None
            self.lanes.wake(bucket.departure.lane_mark)

    def _sum(self, gradients: Sequence[tuple[int, int, DtypeCode]]) -> None:
        """Sum the squares of gradients, block by block; rows of (position, address, dtype)."""
        device = self.lanes.device
        if len(gradients) == 1:
            position, address, dtype = gradients[0]
            record = self.records[position]
            device.gradient_blocks(DeviceLane.GRADIENTS, address, dtype, record.numel, record.on_device.address)
            return
        for dtype in sorted({dtype for _, _, dtype in gradients}):
            pairs = [(self.records[n], address) for n, address, code in gradients if code is dtype]
            rows = [(address, record.numel, record.on_device.address) for record, address in pairs]
            device.sum_gradients(DeviceLane.GRADIENTS, dtype, np.array(rows, np.uint64))

    def _send(self, bucket: _Bucket) -> None:
        """Send the further gradients in a bucket to be added in host memory."""
        if bucket.sending is None:
            rows = [
                (address, record.slot.data_ptr(), record.numel, dtype)
                for position, address, dtype in bucket.further
                if (record := self.records[position]).slot.numel()
            ]
            bucket.sending = self.additions.prepare(rows, self._slots_bytes)
        self.additions.send(bucket.sending)

    def _check_dtype(self, record: _GradientState, dtype: DtypeCode) -> None:
        """Raise `ConfigError` if a gradient's dtype is not that of its slot, or of the passes before."""
        item = int(ITEM_BYTES[dtype])
        if (record.slot.numel() and item != record.slot.element_size()) or (
            record.arrivals and dtype is not record.dtype
        ):
            raise ConfigError(
                "gradient dtype", dtype.name.lower(), "use that of the weights, or gradient_dtype float32, throughout"
            )

    def keep_until_read(self, gradient: torch.Tensor, mark: Mark, *, elsewhere: bool) -> None:
        """Keep a gradient that the caller drops until lanes have read it; free older ones if too many are held."""
        self._drop_read()
        self.in_transit.append((mark, gradient))
        self._in_transit_bytes += gradient.nbytes
        while self.in_transit and self._in_transit_bytes > self._limits.in_transit_bytes:
            self.drop_oldest_when_read(elsewhere=elsewhere)

    def drop_oldest_when_read(self, *, elsewhere: bool = False) -> None:
        """Drop the oldest gradient in transit; the caller's stream waits for lanes, or if `elsewhere` this thread."""
        mark, gradient = self.in_transit[0]
        if elsewhere:
            mark.wait()
        else:
            device = self.lanes.device
            device.follow(DeviceLane.CALLER, mark.on_lane() if isinstance(mark, Departure) else mark)
            device.record_use(gradient)
        self._drop_oldest()  # last: after an interrupt before this line, the gradient is still held

    def _drop_read(self) -> None:
        while self.in_transit and self.in_transit[0][0].reached():
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._in_transit_bytes -= self.in_transit.popleft()[1].nbytes
        if not self.in_transit:  # in case an interrupt has come between popping and subtracting
            self._in_transit_bytes = 0

    # For updates in backward, of gradients that stay where they are

    def final(self, position: int, gradient: torch.Tensor) -> FinalGradient | None:
        """Return a gradient with the mark after which it is there; None if its slot has another dtype."""
        slot = self._slots[position]
        if slot.numel() and slot.dtype is not gradient.dtype:
            return None  # the step copies it to a wide slot
        return gradient, self.lanes.device.mark(DeviceLane.CALLER, timed=False)

    def read_final(self, final: Mapping[int, FinalGradient], segments: Sequence[Segment], rows: StepRows) -> None:
        """Do nothing: `fetch_final` copies gradients to their slots, which the rows name already."""

    def fetch_final(self, final: Mapping[int, FinalGradient], subgroup: Subgroup, masters: Pieces) -> None:
        """Copy an admitted subgroup's final gradients to their slots, and fp32 weights; make its run wait for that.

        The caller may write to them meanwhile: by fingerprints, the step notices that the update has read others.
        """
        if len(masters):
            self.lanes.order_after_sent(subgroup.index)
        copies: list[tuple[int, int, int]] = masters.tolist()
        for segment in subgroup.segments:
            if segment.parameter in final and segment.numel:
                gradient, mark = final[segment.parameter]
                for lane in (DeviceLane.LEAVING, DeviceLane.PIECES):
                    self.lanes.device.follow(lane, known(mark, "a gradient on a device has no mark"))
                start, nbytes = (numel * gradient.itemsize for numel in (segment.start, segment.numel))
                target = self._slots[segment.parameter].data_ptr()
                copies.append((gradient.data_ptr() + start, target + start, nbytes))
        if copies:
            self.lanes.fetch_gradients(Visit(subgroup.index), (), as_pieces(copies), self._gap_bytes)
            self.final_read = self.lanes.device.mark(DeviceLane.LEAVING, timed=False)

    def end_final(self) -> None:
        """Wait until no lane reads the gradients of `fetch_final`, which the caller then drops."""
        mark, self.final_read = self.final_read, None
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
        """Return fingerprints; those of masters, and of gradients that have not left, are made on the device."""
        stay = np.array([masters or self.records[position].mark is None for position in positions.tolist()], bool)
        fingerprints = super().fingerprints(positions, addresses, np.where(stay, np.uint64(0), sizes))
        chosen = np.flatnonzero(stay & (sizes > 0))
        if not chosen.size:
            return fingerprints
        positions = positions[chosen]
        if masters:
            at, dtypes = self._tables.weights[positions], np.full(chosen.size, DtypeCode.FLOAT32, np.int32)
        else:
            at, dtypes = self._tables.gradients[positions], self._tables.gradient_dtypes[positions]
        fingerprints[chosen] = self._fingerprints(positions, addresses[chosen], sizes[chosen], at, dtypes)
        return fingerprints

    def _fingerprints(
        self,
        positions: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        at: npt.NDArray[np.uint64],
        dtypes: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.uint64]:
        """Return fingerprints of pieces of tensors on the device, which begin at `at`, one for each parameter."""
        starts = (addresses - at) // ITEM_BYTES[dtypes]
        numels = sizes // ITEM_BYTES[dtypes]
        # Their memory is that of the block sums, which are needed no more: a norm has been computed by now.
        self._gathered[positions] = DtypeCode.NONE
        records = [self.records[position] for position in positions.tolist()]
        first = [record.first_part(start) for record, start in zip(records, starts.tolist(), strict=True)]
        lanes, device = self.lanes, self.lanes.device
        with self._lock:
            self._borrow(buffers=False, caller=lanes.caller)
            for lane in (DeviceLane.LEAVING, DeviceLane.UPDATE, DeviceLane.H2D, DeviceLane.PIECES):
                device.follow(DeviceLane.GRADIENTS, device.mark(lane, timed=False))  # behind the caller, and updates
            device_parts = [
                record.on_device.address + number * BLOCK_BYTES for record, number in zip(records, first, strict=True)
            ]
            rows = np.stack([addresses, numels, np.array(device_parts, np.uint64)], axis=1)
            for dtype in np.unique(dtypes).tolist():
                device.fingerprint_gradients(DeviceLane.GRADIENTS, DtypeCode(dtype), rows[dtypes == dtype])
            self._copy_sums()
            device.mark(DeviceLane.GRADIENTS, timed=False).wait()
        fingerprints = [
            record.parts[start : start + blocks_numel(numel)].sum(dtype=np.uint64)
            for record, start, numel in zip(records, first, numels.tolist(), strict=True)
        ]
        return np.array(fingerprints, np.uint64)

    # Between passes

    def bind(self, position: int, address: int, dtype: DtypeCode, gathered: bool) -> None:
        """Note where a parameter's gradient lies; if it is another one, forget those that have arrived."""
        super().bind(position, address, dtype, gathered)
        record = self.records[position]
        if not gathered and record.arrivals:  # the caller has bound another gradient
            self.finish()
            record.reset()

    def _sum_changed(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """Sum the squares of gradients that have changed since, then bring all block sums to host memory."""
        tables, numbers = self._tables, np.array(positions, np.int64)
        stale = numbers[self._gathered[numbers] == DtypeCode.NONE]
        dtypes = map(DtypeCode, tables.gradient_dtypes[stale].tolist())
        if stale.size:  # their memory is the caller's: sum after its work
            device = self.lanes.device
            with self._lock:
                self._borrow(buffers=False)
                device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
                self._sum(list(zip(stale.tolist(), tables.gradients[stale].tolist(), dtypes, strict=True)))
        self.settle()
        return numbers

    def finish(self) -> None:
        """Send the bucket, and wait until gradients of further passes have been added in host memory."""
        self.send_bucket()
        self.additions.finish()

    def settle(self) -> None:
        """Finish all additions, and copy all block sums to host memory."""
        self.finish()
        self._copy_sums_to_host()
        self.lanes.device.mark(DeviceLane.GRADIENTS, timed=False).wait()
        self._drop_read()
        for record in self.records:  # what was added in host memory is not in sums that were made on the device
            if record.was_added and not record.stays:
                address, blocks = record.slot.data_ptr(), record.blocks.ctypes.data
                self._kernel.gradient_blocks(address, record.dtype, record.numel, blocks)

    def forget(self) -> None:
        """Drop all gradients: the next one of each parameter is its first."""
        device = self.lanes.device
        for _, gradient in self.in_transit:
            device.record_use(gradient)
        # The caller may use their memory again once lane `GRADIENTS` has passed.
        mark = device.mark(DeviceLane.GRADIENTS, timed=False)
        device.follow(DeviceLane.CALLER, mark)
        with self._lock:
            if self._bucket is not None:  # no lane has begun to read its gradients
                self._bucket.departure.lane_mark, self._bucket = mark, None
        self.additions.wait_and_clear_error()
        for record in self.records:
            record.reset()
        self._drop_all()
        self.return_borrowed()

    def _drop_all(self) -> None:
        self.in_transit.clear()
        self._in_transit_bytes = 0

    # In a step

    def begin_step(self, plan: Plan, visits: Sequence[Visit]) -> bool:
        """List the gradients that each visit of a step needs, and start to copy those that the CPU will use first.

        Returns:
            Whether `used_bytes` has grown, by wide slots.
        """
        tables, wide = self._tables, len(self._wide)
        self.lanes.forget_inputs()
        self._to_bring.clear()
        self._ahead.clear()
        rows = tables.begun
        for visit in visits:
            copies: list[tuple[int, int, int]] = []
            marks: list[Mark] = []
            for segment in plan.layout.subgroups[visit.subgroup].segments:
                position = segment.parameter
                if not rows.flags[position] or not segment.numel:
                    continue
                mark, slot = self.records[position].mark, self._slots[position]
                if mark is not None and (visit.gpu or slot.numel()):  # it arrived during backward
                    marks.append(mark.on_lane())
                elif not visit.gpu:
                    if mark is not None:  # it has stayed for the GPU, but the CPU updates it in this step
                        for lane in (DeviceLane.LEAVING, DeviceLane.PIECES):
                            self.lanes.device.follow(lane, mark.on_lane())
                    item = TORCH_DTYPES[DtypeCode(tables.gradient_dtypes[position])].itemsize
                    if not slot.numel() or item > slot.element_size():
                        slot = self._ensure_wide_slot(position)
                    rows.gradients[position] = target = slot.data_ptr()
                    start, nbytes = segment.start * item, segment.numel * item
                    source = int(tables.gradients[position]) + start
                    copies.append((source, target + start, nbytes))
            self._to_bring[visit.subgroup] = visit, list(dict.fromkeys(marks)), as_pieces(copies)
        self._fetch_next()
        return len(self._wide) > wide

    def fetch_for_visit(self, subgroup: int) -> None:
        """Copy the gradients of a visit that begins, and of the next visits; make each run wait for its own.

        They are not all copied when the step begins: no update starts while copies are enqueued, and other copies
        from the GPU would wait for all of them.
        """
        if subgroup in self._to_bring:
            self.lanes.fetch_gradients(*self._to_bring.pop(subgroup), self._gap_bytes)
        self._ahead.discard(subgroup)
        self._fetch_next()

    def coming(self, subgroup: int) -> None:
        """Copy the gradients of a visit whose state is being fetched: the visit runs as soon as that is there."""
        if subgroup in self._to_bring:
            self._fetch_early(subgroup)

    def _fetch_early(self, subgroup: int) -> None:
        visit, marks, copies = self._to_bring.pop(subgroup)
        self.lanes.fetch_gradients(visit, marks, copies, self._gap_bytes)
        if len(copies):
            self._ahead.add(subgroup)

    def _fetch_next(self) -> None:
        """Start copies until those of `FETCHED_AHEAD` visits that have not begun are started."""
        while self._to_bring and len(self._ahead) < FETCHED_AHEAD:
            self._fetch_early(next(iter(self._to_bring)))

    def _ensure_wide_slot(self, position: int) -> torch.Tensor:
        """Return a parameter's wide slot: for the fp32 gradient of a 16-bit weight, or for one without a slot."""
        if position not in self._wide:
            numel = self.records[position].numel
            self._wide[position] = self._memory.allocate_arena(4 * numel).tensor(0, numel, torch.float32)
        return self._wide[position]

    def close(self) -> None:
        """Free all slots and buffers, those of additions, too; the device has been closed."""
        self._bucket = None
        self._drop_all()
        self.additions.close()
        self._wide.clear()
        super().close()
