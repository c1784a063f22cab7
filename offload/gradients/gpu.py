"""Gradients on a GPU: their norms, and their way to where they are used.

A gradient that the CPU will use is copied to its slot in host memory, in its own dtype; one that the GPU will use
stays where it is. Its squares are summed on the GPU in the same pass. Gradients of further backward passes are added
on the GPU where the first one has stayed, and in host memory where it has left (see `additions.py`), so that nothing
travels twice.

Small gradients are collected in a bucket, and leave together: in few copies (see `pieces.py`), and with one kernel
for all their sums. A bucket leaves when it is full, with a large gradient, when backward ends, and whenever somebody
asks for what it holds.

The caller drops a gradient before it has been read. It is held until then, and the caller's stream waits for the
oldest when too much is held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from offload.device.host import HostMemory
from offload.device.lanes import GpuLanes
from offload.device.pieces import Pieces, as_pieces
from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.engine.tables import Tables
from offload.errors import ConfigError, InternalError
from offload.gradients.additions import Additions, Sending
from offload.gradients.store import GradientSlots, GradientStore
from offload.kernels import CpuUpdateKernel
from offload.kernels.reference import TORCH_DTYPES
from offload.layout import SEGMENT_ALIGN_NUMEL, Segment
from offload.limits import Limits
from offload.memory.arenas import Arena
from offload.plan import Plan
from offload.plan.budget import BROUGHT_AHEAD
from offload.protocols import DeviceLane, Mark
from offload.schedule.operations import Visit

BLOCK_BYTES = 8


@dataclass(slots=True)
class _Parameter:
    """What is known of one parameter's gradient since the last step."""

    numel: int
    slot: torch.Tensor
    stays: bool
    blocks: npt.NDArray[np.float64]
    device_blocks: int
    arrivals: int = 0
    kept: int = 0
    dtype: DtypeCode = DtypeCode.NONE
    mark: Departure | None = None
    added: bool = False

    def forget(self) -> None:
        """Drop what has arrived."""
        self.arrivals, self.kept, self.mark, self.added = 0, 0, None, False


@dataclass(slots=True)
class _Region:
    """Block sums of parameters that one `add` took up, on the device and in host memory."""

    device: int
    host: Arena


class Departure:
    """The mark of a bucket's gradients. It is on no lane before they leave, so only `on_lane` may be followed."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self.left: Mark | None = None
        """On lane `GRADIENTS`, once the bucket has left."""
        self.sending: Sending = []
        """Those of further passes, once it has."""

    def on_lane(self) -> Mark:
        """Return a mark of the device; have the bucket leave, if it has not."""
        if self.left is None:
            self._leave()
        if self.left is None:
            raise InternalError("a bucket of gradients has been lost (this is a bug in offload, please report it)")
        return self.left

    def reached(self) -> bool:
        """See `Mark.reached`."""
        return self.left is not None and self.left.reached()

    def landed(self) -> bool:
        """Return whether the gradients are where the CPU reads them, those of further passes added."""
        return self.reached() and all(filling.ended.is_set() for filling in self.sending)

    def wait(self) -> None:
        """See `Mark.wait`."""
        self.on_lane().wait()

    def time_s(self) -> float:
        """See `Mark.time_s`: it is not timed."""
        return self.on_lane().time_s()


@dataclass(slots=True)
class _Bucket:
    """Gradients of different parameters that wait for others to leave with.

    Attributes:
        caller: The lane of backward on which they are made.
        departure: Their mark.
        first: Position, address and dtype of those that are the first of their parameters.
        further: The same of those that are added in host memory.
        nbytes: Of all.
        sending: How far the further ones have come, once they have begun to leave.
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
        lanes: The session's.
        limits: When gradients leave.

    Attributes:
        positions: What is known of each parameter's gradient.
        in_transit: Gradients that the caller has dropped and that are still read, each with the mark after which it
            is not.
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
        self.positions: list[_Parameter] = []
        self.in_transit: deque[tuple[Mark, torch.Tensor]] = deque()
        self.additions = Additions(lanes, kernel)
        self._in_transit_bytes = 0
        self._bucket: _Bucket | None = None
        self._lock = threading.RLock()
        self._regions: list[_Region] = []
        self._slots_bytes = 0
        self._slot_addresses: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._wide: dict[int, torch.Tensor] = {}
        self._to_bring: dict[int, tuple[Visit, list[Mark], Pieces]] = {}
        self._gap_bytes = 0  # see `PieceCopies.to_host`
        self._ahead: set[int] = set()  # visits that have not begun, and whose gradients are on their way

    # Memory

    def used_bytes(self, plan: Plan) -> int:
        """See `GradientStore.used_bytes`."""
        return super().used_bytes(plan) + sum(wide.nbytes for wide in self._wide.values())

    def _needs_slot(self, plan: Plan, position: int) -> bool:
        return any(not plan.updates_on_gpu(subgroup) for subgroup, _ in plan.layout.places[position])

    def _give_back(self, unused: Sequence[tuple[Arena, tuple[int, ...]]]) -> None:
        if unused:
            self.lanes.wait()
        super()._give_back(unused)

    def _new_blocks(self, plan: Plan, first: int, counts: list[int]) -> list[npt.NDArray[np.float64]]:
        del self.positions[first:]  # left by an `adopt` that failed
        region, device = self._memory.arena(BLOCK_BYTES * sum(counts)) if sum(counts) else None, 0
        if region is not None:
            device = self.lanes.device.allocate(region.nbytes)
            self._regions.append(_Region(device, region))
        offset, empty = 0, torch.empty(0, dtype=torch.float32, device="cpu")
        for parameter, count in zip(self._parameters[first:], counts, strict=True):
            blocks = region.numpy(offset, count, np.float64) if region is not None else np.zeros(0)
            self.positions.append(_Parameter(parameter.numel, empty, False, blocks, device + offset))
            offset += count * BLOCK_BYTES
        for found, slot, places in zip(self.positions, self._slots, plan.layout.places, strict=False):
            found.slot, found.stays = slot, any(plan.updates_on_gpu(subgroup) for subgroup, _ in places)
        self._slots_bytes = sum(slot.nbytes for slot in self._slots)
        self._slot_addresses, _ = self.slots_at()
        # Gaps between slots that are smaller than any slot are padding.
        items = (TORCH_DTYPES[self._like.dtype_of(parameter)].itemsize for parameter in self._parameters)
        self._gap_bytes = SEGMENT_ALIGN_NUMEL * min(items, default=0)
        return [found.blocks for found in self.positions[first:]]

    def bound_at(self) -> npt.NDArray[np.uint64]:
        """See `GradientStore.bound_at`."""
        has_left = [found.mark is not None for found in self.positions]
        return np.where(has_left, self._slot_addresses, self._tables.gradients)

    def has_landed(self, segments: Sequence[Segment]) -> bool:
        """See `GradientStore.has_landed`."""
        marks = dict.fromkeys(self.positions[segment.parameter].mark for segment in segments)
        return all(mark is None or mark.landed() for mark in marks)

    def stays(self, position: int) -> bool:
        """Return whether the GPU updates part of a parameter, and so reads its gradient where it lies."""
        return self.positions[position].stays

    def has_arrived(self, position: int) -> bool:
        """See `Gradients.has_arrived`."""
        return self.positions[position].arrivals > 0

    def have_arrived(self) -> bool:
        """Return whether gradients have arrived that have not been forgotten."""
        return any(found.arrivals for found in self.positions)

    # During backward

    def arrived(self, position: int, address: int, dtype: DtypeCode) -> Departure:
        """Take in one backward pass's gradient, which lies on the device.

        Returns:
            The mark after which its memory is not read any more. Except where `stays` is set: there the first
            gradient is read, and added to, until `forget`.

        Raises:
            ConfigError: If its dtype is not that of the slot, or of the passes before.
        """
        found = self.positions[position]
        with self._lock:
            self._check_dtype(found, dtype)
            if self._bucket is not None and found.mark is self._bucket.departure:
                self.leave()  # the one before
            if not found.arrivals:
                found.mark = self._collect(position, address, dtype, first=True)
                found.kept, found.dtype = address, dtype
            else:
                mark = self._accumulate(found, address) if found.stays else None
                if mark is None or found.slot.numel():
                    mark = self._collect(position, address, dtype, first=False)
                    found.added = True
                found.mark = mark
            found.arrivals += 1
            mark = found.mark
        self.bind(position, found.kept, dtype, True)
        self._gathered[position] = dtype
        return mark

    def _collect(self, position: int, address: int, dtype: DtypeCode, *, first: bool) -> Departure:
        """Have a gradient leave to its slot, or to be added there; by itself or with others."""
        caller = self.lanes.device.caller()
        if self._bucket is not None and self._bucket.caller != caller:
            self.leave()
        if self._bucket is None:
            self._bucket = _Bucket(caller, Departure(self.leave))
        bucket, nbytes = self._bucket, self.positions[position].numel * int(ITEM_BYTES[dtype])
        (bucket.first if first else bucket.further).append((position, address, dtype))
        bucket.nbytes += nbytes
        count, most = len(bucket.first) + len(bucket.further), self._limits
        if nbytes >= most.large_gradient_bytes or bucket.nbytes >= most.bucket_bytes or count >= most.bucket_count:
            self.leave()
        return bucket.departure

    def _accumulate(self, found: _Parameter, address: int) -> Departure:
        """Add the gradient of a further pass on the GPU."""
        device = self.lanes.device
        device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
        where, added = (address, found.dtype, found.numel, found.device_blocks), (found.kept, found.dtype, True)
        device.gradient_blocks(DeviceLane.GRADIENTS, *where, *added)
        departure = Departure(self.leave)
        departure.left = device.mark(DeviceLane.GRADIENTS, timed=False)
        return departure

    def leave(self) -> None:
        """Have the gradients in the bucket leave; any thread.

        After an interrupt they leave again, whole, except that none is added twice.
        """
        with self._lock:
            bucket, device = self._bucket, self.lanes.device
            if bucket is None:
                return
            made = device.mark_caller(bucket.caller)
            leaving = [
                (address, found.slot.data_ptr(), found.numel * int(ITEM_BYTES[dtype]))
                for position, address, dtype in bucket.first
                if (found := self.positions[position]).slot.numel()
            ]
            count = len(leaving) + len(bucket.further)
            for lane in (DeviceLane.LEAVING, DeviceLane.PIECES)[:count]:
                device.follow(lane, made)
            if leaving:
                self.lanes.pieces.to_host(as_pieces(leaving), self._gap_bytes, DeviceLane.LEAVING)
            device.follow(DeviceLane.GRADIENTS, made)
            self._sum(bucket.first)
            if bucket.further:
                self._send(bucket)
            if count:  # after the sums, so that these do not wait for their own copies
                device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.LEAVING, timed=False))
            bucket.departure.sending = bucket.sending or []
            bucket.departure.left = device.mark(DeviceLane.GRADIENTS, timed=self.lanes.wakes)
            self._bucket = None
            self.lanes.wake(bucket.departure.left)

    def _sum(self, gradients: Sequence[tuple[int, int, DtypeCode]]) -> None:
        """Sum the blocks of gradients: rows of (position, address, dtype)."""
        device = self.lanes.device
        if len(gradients) == 1:
            position, address, dtype = gradients[0]
            found = self.positions[position]
            device.gradient_blocks(DeviceLane.GRADIENTS, address, dtype, found.numel, found.device_blocks)
            return
        for dtype in sorted({dtype for _, _, dtype in gradients}):
            found_at = [(self.positions[n], address) for n, address, code in gradients if code is dtype]
            rows = [(address, found.numel, found.device_blocks) for found, address in found_at]
            device.sum_gradients(DeviceLane.GRADIENTS, dtype, np.array(rows, np.uint64))

    def _send(self, bucket: _Bucket) -> None:
        """Have the further gradients in a bucket leave to be added."""
        if bucket.sending is None:
            rows = [
                (address, found.slot.data_ptr(), found.numel, dtype)
                for position, address, dtype in bucket.further
                if (found := self.positions[position]).slot.numel()
            ]
            bucket.sending = self.additions.prepare(rows, self._slots_bytes)
        self.additions.send(bucket.sending)

    def _check_dtype(self, found: _Parameter, dtype: DtypeCode) -> None:
        item = int(ITEM_BYTES[dtype])
        if (found.slot.numel() and item != found.slot.element_size()) or (
            found.arrivals and dtype is not found.dtype
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
        """Let go of the oldest gradient that is held: whatever uses its memory next waits until it has been read."""
        mark, gradient = self.in_transit[0]
        if elsewhere:
            mark.wait()
        else:
            device = self.lanes.device
            device.follow(DeviceLane.CALLER, mark.on_lane() if isinstance(mark, Departure) else mark)
            device.give_up(gradient)
        self._drop_oldest()  # last: an interrupt before leaves it held

    def _drop_read(self) -> None:
        while self.in_transit and self.in_transit[0][0].reached():
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._in_transit_bytes -= self.in_transit.popleft()[1].nbytes
        if not self.in_transit:  # an interrupt may have come between the two
            self._in_transit_bytes = 0

    # Between passes

    def bind(self, position: int, address: int, dtype: DtypeCode, gathered: bool) -> None:
        """See `Gradients.bind`."""
        super().bind(position, address, dtype, gathered)
        found = self.positions[position]
        if not gathered and found.arrivals:  # the caller has another gradient for it
            self.finish()
            found.forget()

    def _all_gathered(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        tables, chosen = self._tables, np.array(positions, np.int64)
        anew = chosen[self._gathered[chosen] == DtypeCode.NONE]
        dtypes = map(DtypeCode, tables.gradient_dtypes[anew].tolist())
        if anew.size:  # the caller keeps them: behind its work
            device = self.lanes.device
            device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
            self._sum(list(zip(anew.tolist(), tables.gradients[anew].tolist(), dtypes, strict=True)))
        self.settle()
        return chosen

    def finish(self) -> None:
        """Have all gradients leave, and wait until those of further passes have been added in host memory."""
        self.leave()
        self.additions.finish()

    def settle(self) -> None:
        """Finish all additions, and copy all block sums to host memory."""
        device = self.lanes.device
        self.finish()
        for region in self._regions:
            self.lanes.copy(DeviceLane.GRADIENTS, region.host.address, region.device, region.host.nbytes)
        device.mark(DeviceLane.GRADIENTS, timed=False).wait()
        self._drop_read()
        for found in self.positions:
            if found.added and not found.stays:
                address, blocks = found.slot.data_ptr(), found.blocks.ctypes.data
                self._kernel.gradient_blocks(address, found.dtype, found.numel, blocks)

    def forget(self) -> None:
        """Drop all gradients: the next to arrive is the first of its parameter."""
        device = self.lanes.device
        for _, gradient in self.in_transit:
            device.give_up(gradient)
        # The caller may use their memory again.
        mark = device.mark(DeviceLane.GRADIENTS, timed=False)
        device.follow(DeviceLane.CALLER, mark)
        with self._lock:
            if self._bucket is not None:  # nobody has begun to read what it holds
                self._bucket.departure.left, self._bucket = mark, None
        self.additions.forget()
        for found in self.positions:
            found.forget()
        self._drop_all()

    def _drop_all(self) -> None:
        self.in_transit.clear()
        self._in_transit_bytes = 0

    # In a step

    def begin_step(self, plan: Plan, visits: Sequence[Visit]) -> bool:
        """Find out what each visit of a step needs, and fetch the gradients that the CPU will use first.

        Returns:
            Whether `used_bytes` has grown by that.
        """
        tables, wide = self._tables, len(self._wide)
        self.lanes.forget_inputs()
        self._to_bring.clear()
        self._ahead.clear()
        self.addresses = addresses = self._slot_addresses.copy()
        for visit in visits:
            copies: list[tuple[int, int, int]] = []
            marks: list[Mark] = []
            for segment in plan.layout.subgroups[visit.subgroup].segments:
                position = segment.parameter
                if not tables.is_active(position) or not segment.numel:
                    continue
                mark = self.positions[position].mark
                if mark is not None:  # it arrived during backward
                    marks.append(mark.on_lane())
                elif not visit.gpu:
                    item = TORCH_DTYPES[DtypeCode(tables.gradient_dtypes[position])].itemsize
                    slot = self._slots[position]
                    if item > slot.element_size() and addresses[position] == self._slot_addresses[position]:
                        addresses[position] = self._wide_slot(position).data_ptr()
                    start, nbytes = segment.start * item, segment.numel * item
                    source = int(tables.gradients[position]) + start
                    copies.append((source, int(addresses[position]) + start, nbytes))
            self._to_bring[visit.subgroup] = visit, list(dict.fromkeys(marks)), as_pieces(copies)
        self._bring_ahead()
        return len(self._wide) > wide

    def bring(self, subgroup: int) -> None:
        """Fetch the gradients of a visit that begins, and of those after it; make each run wait for its own.

        Not all at the step's begin: enqueueing a copy takes time in which no update starts, and what else leaves the
        GPU would wait behind all of them.
        """
        if subgroup in self._to_bring:
            self.lanes.bring(*self._to_bring.pop(subgroup), self._gap_bytes)
        self._ahead.discard(subgroup)
        self._bring_ahead()

    def coming(self, subgroup: int) -> None:
        """Fetch the gradients of a visit whose state is being fetched: it runs as soon as that is there."""
        if subgroup in self._to_bring:
            self._bring_early(subgroup)

    def _bring_early(self, subgroup: int) -> None:
        visit, marks, copies = self._to_bring.pop(subgroup)
        self.lanes.bring(visit, marks, copies, self._gap_bytes)
        if len(copies):
            self._ahead.add(subgroup)

    def _bring_ahead(self) -> None:
        """Have gradients of `BROUGHT_AHEAD` visits on their way that have not begun."""
        while self._to_bring and len(self._ahead) < BROUGHT_AHEAD:
            self._bring_early(next(iter(self._to_bring)))

    def _wide_slot(self, position: int) -> torch.Tensor:
        """Return the second slot of a parameter: for the fp32 gradient of a 16-bit weight."""
        if position not in self._wide:
            numel = self._slots[position].numel()
            self._wide[position] = self._memory.arena(4 * numel).tensor(0, numel, torch.float32)
        return self._wide[position]

    def close(self) -> None:
        """Let go of all slots and buffers, and give the memory for additions back; the device has been closed."""
        self._bucket = None
        self._drop_all()
        self.additions.close()
        self._wide.clear()
        super().close()
