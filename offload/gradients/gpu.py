"""Gradients on a GPU: their norms, and their way to the device that uses them.

A gradient that the CPU will use is copied to its slot in host memory, in its own dtype; one that the GPU will use
stays where it is. Its squares are summed on the GPU in the same pass. Gradients of further backward passes are added
on the GPU where the first one has stayed, and in host memory where it has left (see `additions.py`), so that nothing
travels twice.

Gradients are collected in a bucket, and leave together: small ones in few copies (see `pieces.py`), and with one
kernel for all their sums. A bucket leaves when it is full, when backward ends, and whenever somebody asks for a
gradient in it.

The caller drops a gradient before the lanes have read it. It is held here until then. When too many bytes are held,
the caller's stream waits for the oldest.
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
from offload.device.memory import Block, Place
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
from offload.plan.budget import BROUGHT_AHEAD
from offload.protocols import NORM_BLOCK_NUMEL, DeviceLane, Mark
from offload.schedule.operations import Visit


@dataclass(slots=True)
class _GradientRecord:
    """The record of one parameter's gradient since the last step.

    Attributes:
        parts: Memory of its block sums in the host, or of the parts that its segments have in their fingerprints.
        there: Where the same lie on the device.
        starts: First element of each of its segments, which have parts of their own: they begin anywhere in a block.
    """

    numel: int
    slot: torch.Tensor
    stays: bool
    parts: npt.NDArray[np.uint64]
    there: Place
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

    def forget(self) -> None:
        """Drop the gradient."""
        self.arrivals, self.address, self.mark, self.was_added = 0, 0, None, False


class Departure:
    """The mark of a bucket's gradients. Before they leave it is on no lane, so lanes may follow only `on_lane()`."""

    def __init__(self, store: GpuGradients) -> None:
        self._store = store
        self.lane_mark: Mark | None = None
        """On lane `GRADIENTS`; None before the bucket has left."""
        self.sending: Sending = []
        """Gradients of further passes, once the bucket has left."""

    def on_lane(self) -> Mark:
        """Return a mark of the device; have the bucket leave, if it has not."""
        if self.lane_mark is None:
            self._store.leave()
        if self.lane_mark is None:
            raise InternalError("a bucket of gradients has been lost (this is a bug in offload, please report it)")
        return self.lane_mark

    def reached(self) -> bool:
        """See `Mark.reached`."""
        return self.lane_mark is not None and self.lane_mark.reached()

    def landed(self) -> bool:
        """Return whether the gradients are in their slots, with those of further passes added."""
        return self.reached() and all(filling.ended.is_set() for filling in self.sending)

    def wait(self) -> None:
        """See `Mark.wait`."""
        self.on_lane().wait()

    def time_s(self) -> float:
        """See `Mark.time_s`; this mark is not timed."""
        return self.on_lane().time_s()


@dataclass(slots=True)
class _Bucket:
    """Gradients of different parameters that wait to leave together.

    Attributes:
        caller: The lane of backward on which they are made.
        departure: Their mark.
        first: Position, address and dtype of gradients that are the first of their parameters.
        further: Position, address and dtype of gradients that are added in host memory.
        nbytes: Bytes of all gradients.
        sending: Progress of the further ones; None before they begin to leave.
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
        limits: At which sizes gradients leave.

    Attributes:
        records: The record of each parameter's gradient, by position.
        in_transit: Gradients that the caller has dropped and lanes may still read, each with the mark after which no
            lane does.
        final_read: Mark after which no lane reads what `bring_final` was given; None where none does.
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
        self.records: list[_GradientRecord] = []
        self.in_transit: deque[tuple[Mark, torch.Tensor]] = deque()
        self.additions = Additions(lanes, kernel)
        self._in_transit_bytes = 0
        self._bucket: _Bucket | None = None
        self._lock = threading.RLock()
        # Of block sums, for the parameters of each `Engine.add`: nowhere on the device while in host memory alone.
        self._regions: list[tuple[Block, Arena]] = []
        self._slots_bytes = 0
        self._slot_addresses: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._wide: dict[int, torch.Tensor] = {}
        self._to_bring: dict[int, tuple[Visit, list[Mark], Pieces]] = {}
        self._gap_bytes = 0  # see `PieceCopies.to_host`
        self._ahead: set[int] = set()  # visits that have not begun, and whose gradients are on their way
        self.final_read: Mark | None = None

    # Memory

    def used_bytes(self, plan: Plan) -> int:
        """See `GradientStore.used_bytes`."""
        return super().used_bytes(plan) + sum(wide.nbytes for wide in self._wide.values())

    def _needs_slot(self, plan: Plan, position: int) -> bool:
        places = plan.layout.places[position]
        return any(plan.needs_gradients(subgroup) for subgroup, _ in places)

    def _give_back(self, unused: Sequence[tuple[Arena, tuple[int, ...]]]) -> None:
        if unused:
            self.lanes.wait()
        super()._give_back(unused)

    def _new_blocks(self, plan: Plan, first: int, counts: list[int]) -> list[npt.NDArray[np.float64]]:
        del self.records[first:]  # of an `adopt` that failed
        layout = plan.layout
        starts = [tuple(layout.subgroups[s].segments[n].start for s, n in each) for each in layout.places[first:]]
        counts = [count + len(each) for count, each in zip(counts, starts, strict=True)]
        region, there = self._memory.arena(BLOCK_BYTES * sum(counts)) if sum(counts) else None, Block()
        if region is not None:
            there = self.lanes.block(region.nbytes)
            self._regions.append((there, region))
        offset, empty = 0, torch.empty(0, dtype=torch.float32, device="cpu")
        for parameter, count, each in zip(self._parameters[first:], counts, starts, strict=True):
            parts = region.numpy(offset, count, np.uint64) if region is not None else np.zeros(0, np.uint64)
            self.records.append(_GradientRecord(parameter.numel, empty, False, parts, Place(there, offset), each))
            offset += count * BLOCK_BYTES
        for record, slot, places in zip(self.records, self._slots, plan.layout.places, strict=False):
            record.slot, record.stays = slot, any(plan.updates_on_gpu(subgroup) for subgroup, _ in places)
        self._slots_bytes = sum(slot.nbytes for slot in self._slots)
        self._slot_addresses, _ = self.slots_at()
        # Gaps between slots that are smaller than any slot are padding.
        items = (TORCH_DTYPES[self._like.dtype_of(parameter)].itemsize for parameter in self._parameters)
        self._gap_bytes = SEGMENT_ALIGN_NUMEL * min(items, default=0)
        return [record.blocks for record in self.records[first:]]

    def _borrow(self, *, buffers: bool, caller: Hashable = None) -> None:
        """Borrow memory for block sums, and for `buffers` of pieces, from the calling thread, which has the lock.

        On the engine thread: from `caller`.
        """
        lanes = self.lanes
        away = [(there, host) for there, host in self._regions if not there.address]
        if not away:
            return
        device = lanes.device
        caller = device.caller() if caller is None else caller
        if buffers:
            lanes.borrow_buffers(caller)
        addresses = [device.allocate(host.nbytes, caller) for _, host in away]
        lanes.follow_borrowed(caller)
        device.follow(DeviceLane.H2D, device.mark(DeviceLane.GRADIENTS, timed=False))  # which has brought them
        for address, (_, host) in zip(addresses, away, strict=True):
            lanes.copy(DeviceLane.H2D, address, host.address, host.nbytes)
        device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.H2D, timed=False))
        for address, (there, _) in zip(addresses, away, strict=True):
            there.address = address  # last: an interrupt may come before

    def return_borrowed(self) -> None:
        """Give borrowed memory back, if there is any; block sums stay in host memory until gradients arrive."""
        if not all(there.lasts for there, _ in self._regions):
            self._bring_sums()

    def _bring_sums(self) -> None:
        """Copy block sums to host memory, once lane `GRADIENTS` has come so far; give all that is borrowed back."""
        lanes = self.lanes
        with self._lock:
            self.leave()
            self._copy_sums()
            for there, _ in self._regions:
                if not there.lasts:
                    there.address = 0
            lanes.return_borrowed()

    def _copy_sums(self) -> None:
        """Put on lane `GRADIENTS`: copy all block sums that are on the device to host memory."""
        for there, host in self._regions:
            if there.address:
                self.lanes.copy(DeviceLane.GRADIENTS, host.address, there.address, host.nbytes)

    def bound_at(self) -> GradientsAt:
        """See `GradientStore.bound_at`."""
        tables, has_left = self._tables, [record.mark is not None for record in self.records]
        return np.where(has_left, self._slot_addresses, tables.gradients), tables.gradient_dtypes.copy()

    def has_landed(self, segments: Sequence[Segment]) -> bool:
        """See `GradientStore.has_landed`."""
        marks = dict.fromkeys(self.records[segment.parameter].mark for segment in segments)
        return all(mark is None or mark.landed() for mark in marks)

    def stays(self, position: int) -> bool:
        """Return whether the GPU updates part of a parameter, and so reads its gradient where it lies."""
        return self.records[position].stays

    def has_arrived(self, position: int) -> bool:
        """See `Gradients.has_arrived`."""
        return self.records[position].arrivals > 0

    def have_arrived(self) -> bool:
        """Return whether gradients have arrived since the last `forget`."""
        return any(record.arrivals for record in self.records)

    # During backward

    def arrived(self, position: int, address: int, dtype: DtypeCode) -> Departure:
        """Note that a backward pass's gradient has arrived on the device, and have it leave or be added.

        Returns:
            The mark after which no lane reads its memory. If `stays` is set, the first gradient is different: lanes
            read it and add to it until `forget`.

        Raises:
            ConfigError: If its dtype is not that of the slot, or of earlier passes.
        """
        record = self.records[position]
        with self._lock:
            self._borrow(buffers=True)
            self._check_dtype(record, dtype)
            if self._bucket is not None and record.mark is self._bucket.departure:
                self.leave()  # the gradient of the pass before
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
        """Put a gradient into the bucket: it will be copied to its slot, or added there."""
        caller = self.lanes.device.caller()
        if self._bucket is not None and self._bucket.caller != caller:
            self.leave()
        if self._bucket is None:
            self._bucket = _Bucket(caller, Departure(self))
        bucket, most = self._bucket, self._limits
        (bucket.first if first else bucket.further).append((position, address, dtype))
        bucket.nbytes += self.records[position].numel * int(ITEM_BYTES[dtype])
        if bucket.nbytes >= most.bucket_bytes or len(bucket.first) + len(bucket.further) >= most.bucket_count:
            self.leave()
        return bucket.departure

    def _accumulate(self, record: _GradientRecord, address: int) -> Departure:
        """Add the gradient of a further pass to the first one, on the GPU."""
        device = self.lanes.device
        device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
        source, target = (address, record.dtype, record.numel), (record.address, record.dtype, True)
        device.gradient_blocks(DeviceLane.GRADIENTS, *source, record.there.address, *target)
        departure = Departure(self)
        departure.lane_mark = device.mark(DeviceLane.GRADIENTS, timed=False)
        return departure

    def leave(self) -> None:
        """Have the gradients in the bucket leave; any thread.

        After an interrupt the next call has all of them leave again; none is added twice.
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
            device.gradient_blocks(DeviceLane.GRADIENTS, address, dtype, record.numel, record.there.address)
            return
        for dtype in sorted({dtype for _, _, dtype in gradients}):
            pairs = [(self.records[n], address) for n, address, code in gradients if code is dtype]
            rows = [(address, record.numel, record.there.address) for record, address in pairs]
            device.sum_gradients(DeviceLane.GRADIENTS, dtype, np.array(rows, np.uint64))

    def _send(self, bucket: _Bucket) -> None:
        """Have the further gradients in a bucket leave, and be added in host memory."""
        if bucket.sending is None:
            rows = [
                (address, record.slot.data_ptr(), record.numel, dtype)
                for position, address, dtype in bucket.further
                if (record := self.records[position]).slot.numel()
            ]
            bucket.sending = self.additions.prepare(rows, self._slots_bytes)
        self.additions.send(bucket.sending)

    def _check_dtype(self, record: _GradientRecord, dtype: DtypeCode) -> None:
        item = int(ITEM_BYTES[dtype])
        if (record.slot.numel() and item != record.slot.element_size()) or (
            record.arrivals and dtype is not record.dtype
        ):
            raise ConfigError(
                "gradient dtype", dtype.name.lower(), "use that of the weights, or gradient_dtype float32, throughout"
            )

    def hold(self, gradient: torch.Tensor, mark: Mark, *, elsewhere: bool) -> None:
        """See `Gradients.hold`."""
        self._drop_read()
        self.in_transit.append((mark, gradient))
        self._in_transit_bytes += gradient.nbytes
        while self.in_transit and self._in_transit_bytes > self._limits.in_transit_bytes:
            self.hand_back(elsewhere=elsewhere)

    def hand_back(self, *, elsewhere: bool = False) -> None:
        """Let go of the oldest gradient in transit: the next user of its memory waits until lanes have read it."""
        mark, gradient = self.in_transit[0]
        if elsewhere:
            mark.wait()
        else:
            device = self.lanes.device
            device.follow(DeviceLane.CALLER, mark.on_lane() if isinstance(mark, Departure) else mark)
            device.give_up(gradient)
        self._drop_oldest()  # last: after an interrupt before this line, the gradient is still held

    def _drop_read(self) -> None:
        while self.in_transit and self.in_transit[0][0].reached():
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._in_transit_bytes -= self.in_transit.popleft()[1].nbytes
        if not self.in_transit:  # an interrupt may have come between the two
            self._in_transit_bytes = 0

    # For updates in backward, of gradients that stay where they are

    def final(self, position: int, gradient: torch.Tensor) -> FinalGradient | None:
        """See `GradientStore.final`."""
        slot = self._slots[position]
        if slot.numel() and slot.dtype is not gradient.dtype:
            return None  # the step brings it to a wider one
        return gradient, self.lanes.device.mark(DeviceLane.CALLER, timed=False)

    def read_final(self, final: Mapping[int, FinalGradient], segments: Sequence[Segment], rows: StepRows) -> None:
        """See `GradientStore.read_final`: in their slots, as rows say already."""

    def bring_final(self, final: Mapping[int, FinalGradient], subgroup: Subgroup, masters: Pieces) -> None:
        """Copy gradients of a subgroup that is admitted to their slots, and fp32 weights; make its run wait for them.

        The caller may write to them meanwhile: the step compares what the update has read with what is there then.
        """
        if len(masters):
            self.lanes.leave_behind_sent(subgroup.index)
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
            self.lanes.bring(Visit(subgroup.index), (), as_pieces(copies), self._gap_bytes)
            self.final_read = self.lanes.device.mark(DeviceLane.LEAVING, timed=False)

    def end_final(self) -> None:
        """Wait until no lane reads what `bring_final` was given; gradients among it are dropped then."""
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
        """See `GradientStore.fingerprints`: those of masters, and of gradients that have not left, on the device."""
        stay = np.array([masters or self.records[position].mark is None for position in positions.tolist()], bool)
        found = super().fingerprints(positions, addresses, np.where(stay, np.uint64(0), sizes))
        chosen = np.flatnonzero(stay & (sizes > 0))
        if not chosen.size:
            return found
        positions = positions[chosen]
        if masters:
            at, dtypes = self._tables.weights[positions], np.full(chosen.size, DtypeCode.FLOAT32, np.int32)
        else:
            at, dtypes = self._tables.gradients[positions], self._tables.gradient_dtypes[positions]
        found[chosen] = self._fingerprints(positions, addresses[chosen], sizes[chosen], at, dtypes)
        return found

    def _fingerprints(
        self,
        positions: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        at: npt.NDArray[np.uint64],
        dtypes: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.uint64]:
        """Return fingerprints of pieces of what lies on the device: of tensors at `at`, one for each parameter."""
        starts = (addresses - at) // ITEM_BYTES[dtypes]
        numels = sizes // ITEM_BYTES[dtypes]
        # In the place of their gradients' block sums: the norm, if there is one, has been made.
        self._gathered[positions] = DtypeCode.NONE
        records = [self.records[position] for position in positions.tolist()]
        first = [record.first_part(start) for record, start in zip(records, starts.tolist(), strict=True)]
        lanes, device = self.lanes, self.lanes.device
        with self._lock:
            self._borrow(buffers=False, caller=lanes.caller)
            for lane in (DeviceLane.LEAVING, DeviceLane.UPDATE, DeviceLane.H2D, DeviceLane.PIECES):
                device.follow(DeviceLane.GRADIENTS, device.mark(lane, timed=False))  # behind the caller, and updates
            parts = [
                record.there.address + number * BLOCK_BYTES for record, number in zip(records, first, strict=True)
            ]
            rows = np.stack([addresses, numels, np.array(parts, np.uint64)], axis=1)
            for dtype in np.unique(dtypes).tolist():
                device.fingerprint_gradients(DeviceLane.GRADIENTS, DtypeCode(dtype), rows[dtypes == dtype])
            self._copy_sums()
            device.mark(DeviceLane.GRADIENTS, timed=False).wait()
        found = [
            record.parts[start : start + blocks_numel(numel)].sum(dtype=np.uint64)
            for record, start, numel in zip(records, first, numels.tolist(), strict=True)
        ]
        return np.array(found, np.uint64)

    # Between passes

    def bind(self, position: int, address: int, dtype: DtypeCode, gathered: bool) -> None:
        """See `Gradients.bind`."""
        super().bind(position, address, dtype, gathered)
        record = self.records[position]
        if not gathered and record.arrivals:  # the caller has bound another gradient
            self.finish()
            record.forget()

    def _all_gathered(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        tables, numbers = self._tables, np.array(positions, np.int64)
        stale = numbers[self._gathered[numbers] == DtypeCode.NONE]
        dtypes = map(DtypeCode, tables.gradient_dtypes[stale].tolist())
        if stale.size:  # their memory is the caller's: sum behind its work
            device = self.lanes.device
            with self._lock:
                self._borrow(buffers=False)
                device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
                self._sum(list(zip(stale.tolist(), tables.gradients[stale].tolist(), dtypes, strict=True)))
        self.settle()
        return numbers

    def finish(self) -> None:
        """Have all gradients leave, and wait until those of further passes have been added in host memory."""
        self.leave()
        self.additions.finish()

    def settle(self) -> None:
        """Finish all additions, and copy all block sums to host memory."""
        self.finish()
        self._bring_sums()
        self.lanes.device.mark(DeviceLane.GRADIENTS, timed=False).wait()
        self._drop_read()
        for record in self.records:
            if record.was_added and not record.stays:
                address, blocks = record.slot.data_ptr(), record.blocks.ctypes.data
                self._kernel.gradient_blocks(address, record.dtype, record.numel, blocks)

    def forget(self) -> None:
        """Drop all gradients: the next one of each parameter is its first."""
        device = self.lanes.device
        for _, gradient in self.in_transit:
            device.give_up(gradient)
        # The caller may use their memory again.
        mark = device.mark(DeviceLane.GRADIENTS, timed=False)
        device.follow(DeviceLane.CALLER, mark)
        with self._lock:
            if self._bucket is not None:  # no lane has begun to read its gradients
                self._bucket.departure.lane_mark, self._bucket = mark, None
        self.additions.forget()
        for record in self.records:
            record.forget()
        self._drop_all()
        self.return_borrowed()

    def _drop_all(self) -> None:
        self.in_transit.clear()
        self._in_transit_bytes = 0

    # In a step

    def begin_step(self, plan: Plan, visits: Sequence[Visit]) -> bool:
        """List the gradients that each visit of a step needs, and fetch those that the CPU will use first.

        Returns:
            Whether `used_bytes` has grown.
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
                    if mark is not None:  # it has stayed for the GPU, which does not update it in this step
                        for lane in (DeviceLane.LEAVING, DeviceLane.PIECES):
                            self.lanes.device.follow(lane, mark.on_lane())
                    item = TORCH_DTYPES[DtypeCode(tables.gradient_dtypes[position])].itemsize
                    if not slot.numel() or item > slot.element_size():
                        slot = self._wide_slot(position)
                    rows.gradients[position] = target = slot.data_ptr()
                    start, nbytes = segment.start * item, segment.numel * item
                    source = int(tables.gradients[position]) + start
                    copies.append((source, target + start, nbytes))
            self._to_bring[visit.subgroup] = visit, list(dict.fromkeys(marks)), as_pieces(copies)
        self._bring_ahead()
        return len(self._wide) > wide

    def bring(self, subgroup: int) -> None:
        """Fetch the gradients of a visit that begins, and of the next visits; make each run wait for its own.

        They are not all fetched at the step's begin: no update starts while copies are enqueued, and other copies
        from the GPU would wait behind all of them.
        """
        if subgroup in self._to_bring:
            self.lanes.bring(*self._to_bring.pop(subgroup), self._gap_bytes)
        self._ahead.discard(subgroup)
        self._bring_ahead()

    def coming(self, subgroup: int) -> None:
        """Fetch the gradients of a visit whose state is on its way: the visit runs as soon as that is there."""
        if subgroup in self._to_bring:
            self._bring_early(subgroup)

    def _bring_early(self, subgroup: int) -> None:
        visit, marks, copies = self._to_bring.pop(subgroup)
        self.lanes.bring(visit, marks, copies, self._gap_bytes)
        if len(copies):
            self._ahead.add(subgroup)

    def _bring_ahead(self) -> None:
        """Keep the gradients of `BROUGHT_AHEAD` visits that have not begun on their way."""
        while self._to_bring and len(self._ahead) < BROUGHT_AHEAD:
            self._bring_early(next(iter(self._to_bring)))

    def _wide_slot(self, position: int) -> torch.Tensor:
        """Return a parameter's second slot: for the fp32 gradient of a 16-bit weight, or where it has no other."""
        if position not in self._wide:
            numel = self.records[position].numel
            self._wide[position] = self._memory.arena(4 * numel).tensor(0, numel, torch.float32)
        return self._wide[position]

    def close(self) -> None:
        """Free all slots and buffers, those of additions, too; the device has been closed."""
        self._bucket = None
        self._drop_all()
        self.additions.close()
        self._wide.clear()
        super().close()
