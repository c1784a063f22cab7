"""A backward pass on a GPU that is not there: the product's own gradients and lanes, on a virtual clock.

`VirtualDevice` has the methods of a `Device` that `GpuGradients`, `GpuLanes` and `PieceCopies` call. A call takes the
calling thread its time; what it puts on a lane begins when the lane, what the lane follows and the engine that does
it are free. Nothing is copied: addresses stand for memory.

Non-goals: copy engines that choose between streams (`TimingExecutor` has these; gradients leave on one stream), and
kernels that slow each other down.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from offload.device.lanes import GpuLanes
from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.gradients.additions import Additions, Filling, Sending
from offload.gradients.gpu import GpuGradients
from offload.gradients.store import GradientSlots
from offload.layout import Layout
from offload.limits import Limits
from offload.plan import Plan, Rates
from offload.plan.budget import PIECE_ALIGNMENT
from offload.protocols import DeviceLane

ADD_MEMORY_COST = 3
"""Bytes of memory traffic for each byte that is added: two are read, one is written."""

TENSOR_LAUNCHES = 5
"""Kernels that torch launches in backward for a parameter: two products, what comes before them, and its gradient."""


@dataclass(frozen=True)
class Calls:
    """What a thread takes for calls of the GPU's runtime, in seconds.

    Attributes:
        copy_s: To enqueue a copy.
        launch_s: To launch a kernel.
        event_s: To record an event, or to have a stream wait for one.
    """

    copy_s: float = 10e-6
    launch_s: float = 10e-6
    event_s: float = 10e-6


class VirtualMark:
    """A point on a lane."""

    def __init__(self, device: VirtualDevice, ends_s: float) -> None:
        self._device = device
        self.ends_s = ends_s

    def reached(self) -> bool:
        """See `Mark.reached`."""
        return self._device.now_s >= self.ends_s

    def wait(self) -> None:
        """See `Mark.wait`."""
        self._device.now_s = max(self._device.now_s, self.ends_s)


class VirtualDevice:
    """A GPU's lanes, and the thread that calls it.

    Args:
        calls: What calls take.
        rates: Of the machine.

    Attributes:
        now_s: When the calling thread has come so far.
        moved_bytes: Of copies, by lane.
        counts: Calls, by what they are.
    """

    node = None

    def __init__(self, calls: Calls, rates: Rates) -> None:
        self.calls = calls
        self.rates = rates
        self.now_s = 0.0
        self.moved_bytes: dict[DeviceLane, int] = dict.fromkeys(DeviceLane, 0)
        self.counts = {"copies": 0, "launches": 0, "events": 0}
        self._ends_s: dict[DeviceLane, float] = dict.fromkeys(DeviceLane, 0.0)
        self._free_s: dict[str, float] = {}
        self._address = 1 << 40

    def _call(self, what: str, seconds: float) -> None:
        self.counts[what] += 1
        self.now_s += seconds

    def _put(self, lane: DeviceLane, engine: str, seconds: float) -> None:
        starts_s = max(self.now_s, self._ends_s[lane], self._free_s.get(engine, 0.0))
        self._ends_s[lane] = self._free_s[engine] = starts_s + seconds

    def compute(self, seconds: float, launches: int) -> None:
        """Put work of the caller's on its lane."""
        for _ in range(launches):
            self._call("launches", self.calls.launch_s)
        self._put(DeviceLane.CALLER, "caller", seconds)

    def end(self) -> None:
        """Wait for all lanes."""
        self.now_s = max(self.now_s, *self._ends_s.values())

    # As `Device` has it

    def caller(self) -> Hashable:
        return 0

    def mark(self, lane: DeviceLane, *, timed: bool = True) -> VirtualMark:
        self._call("events", self.calls.event_s)
        return VirtualMark(self, max(self.now_s, self._ends_s[lane]))

    def mark_caller(self, caller: Hashable) -> VirtualMark:
        return self.mark(DeviceLane.CALLER, timed=False)

    def follow(self, lane: DeviceLane, mark: VirtualMark) -> None:
        self._call("events", self.calls.event_s)
        self._ends_s[lane] = max(self._ends_s[lane], mark.ends_s)

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int, piece_bytes: int = 0) -> None:
        self._call("copies", self.calls.copy_s)
        self.moved_bytes[lane] += nbytes
        gpu, to_device = self.rates.gpu, lane is DeviceLane.H2D
        link = gpu.h2d_bytes_per_s if to_device else gpu.d2h_bytes_per_s
        self._put(lane, "h2d" if to_device else "d2h", nbytes / link)

    def _kernel(self, lane: DeviceLane, nbytes: float, table_bytes: int) -> None:
        if table_bytes:
            self.copy(DeviceLane.H2D, 0, 0, table_bytes)
            self.follow(lane, self.mark(DeviceLane.H2D, timed=False))
        self._call("launches", self.calls.launch_s)
        self._put(lane, "gpu", nbytes / (self.rates.gpu.update_bytes_per_s * 28 / 12))

    def copy_pieces(self, lane: DeviceLane, pieces: np.ndarray) -> None:
        self._kernel(lane, 2.0 * float(pieces[:, 2].sum()), pieces.nbytes)

    def gradient_blocks(
        self, lane: DeviceLane, source: int, dtype: DtypeCode, numel: int, blocks: int, *target: Any
    ) -> None:
        self._kernel(lane, (3 if target else 1) * numel * float(ITEM_BYTES[dtype]), 0)

    def sum_gradients(self, lane: DeviceLane, dtype: DtypeCode, rows: np.ndarray) -> None:
        self._kernel(lane, float(rows[:, 1].sum()) * float(ITEM_BYTES[dtype]), rows.nbytes)

    def allocate(self, nbytes: int, caller: Hashable = None) -> int:
        self._address += -(-nbytes // 256) * 256
        return self._address - -(-nbytes // 256) * 256

    def give_up(self, gradient: Any) -> None:
        pass

    def release(self, address: int) -> None:
        pass


class _Lying:
    """A tensor that has an address and a size, and no memory."""

    def __init__(self, address: int, count: int, dtype: torch.dtype) -> None:
        self.dtype, self.nbytes = dtype, count * dtype.itemsize
        self._address, self._count = address, count

    def numel(self) -> int:
        return self._count

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self._address


class _Memory:
    """Host memory that is addresses alone, as an arena and as what gives arenas."""

    def __init__(self, address: int = 1 << 44, nbytes: int = 0) -> None:
        self.address, self.nbytes, self._next = address, nbytes, address

    def arena(self, nbytes: int, **how: Any) -> _Memory:
        self._next += -(-nbytes // 4096) * 4096
        return _Memory(self._next - -(-nbytes // 4096) * 4096, nbytes)

    def give_back(self, arena: _Memory) -> None:
        pass

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> _Lying:
        return _Lying(self.address + offset, count, dtype)

    def numpy(self, offset: int, count: int, dtype: Any) -> np.ndarray:
        return np.zeros(count, dtype)


class VirtualLanes(GpuLanes):
    """The product's lanes, with memory that is addresses alone."""

    def __init__(self, device: VirtualDevice, plan: Plan) -> None:
        super().__init__(device, SimpleNamespace(post=lambda *about, **times: None), named_nodes=True)
        self._memory = _Memory(1 << 45)
        if plan.piece_buffer_bytes:
            self.pieces.adopt(device.allocate(4 * plan.piece_buffer_bytes), plan.piece_buffer_bytes)
        self.bind(plan)

    def arena(self, nbytes: int, **how: Any) -> Any:
        return self._memory.arena(nbytes)

    def give_back(self, arena: Any) -> None:
        pass


class _Added:
    """Reports when a buffer's gradients have been added, in the place of a latch."""

    def __init__(self, device: VirtualDevice, ends_s: float) -> None:
        self.mark = VirtualMark(device, ends_s)
        self.is_set, self.wait = self.mark.reached, self.mark.wait


class VirtualAdditions(Additions):
    """The product's additions, whose thread is a lane of the virtual clock."""

    def __init__(self, lanes: VirtualLanes) -> None:
        super().__init__(lanes, SimpleNamespace(add=None))
        self._serving.acquire()  # no thread is started
        self._work = SimpleNamespace(put=self._add)
        self.added_bytes = 0
        self._free_s = 0.0

    def _add(self, filling: Filling) -> None:
        device = self._lanes.device
        nbytes = sum(count * int(ITEM_BYTES[dtype]) for dtype, rows in filling.rows.items() for _, _, count in rows)
        self.added_bytes += nbytes
        self._free_s = max(self._free_s, filling.mark.ends_s)
        self._free_s += nbytes * ADD_MEMORY_COST / device.rates.memory_bytes_per_s
        filling.ended = _Added(device, self._free_s)

    def _wait(self, filling: Filling) -> None:
        filling.ended.wait()


class AddedAtOnce(VirtualAdditions):
    """What sends a gradient waits until it has been added."""

    def send(self, sending: Sending) -> None:
        for filling in sending:
            super().send([filling])
            self._wait(filling)


class LeavesAlways(GpuGradients):
    """Gradients of further passes leave for host memory wherever the first one has stayed."""

    def _needs_slot(self, plan: Plan, position: int) -> bool:
        return True

    def _accumulate(self, record: Any, address: int) -> None:
        return None


@dataclass(frozen=True)
class Backward:
    """What backward passes found.

    Attributes:
        pass_s: Of the last one, until all its gradients are where the step reads them.
        host_s: What the thread of backward took for it.
        added_bytes: What was added in host memory.
        counts: Calls of the GPU's runtime in it.
    """

    pass_s: float
    host_s: float
    added_bytes: int
    counts: dict[str, int]


def backward(
    plan: Plan,
    rates: Rates,
    calls: Calls,
    compute_s: float,
    *,
    passes: int = 1,
    limits: Limits | None = None,
    additions: type[VirtualAdditions] = VirtualAdditions,
    kind: type[GpuGradients] = GpuGradients,
) -> Backward:
    """Have gradients of some backward passes leave a GPU, and return what the last one took.

    Args:
        plan: Of a session whose gradients leave (`keep_grads=False`).
        rates: Of the machine.
        calls: What calls of the runtime take.
        compute_s: What the GPU computes for in a pass.
        passes: How many; those after the first are added.
        limits: At which sizes gradients leave.
        additions: How they are added.
        kind: How they are kept.
    """
    device, parameters = VirtualDevice(calls, rates), plan.layout.parameters
    lanes, count = VirtualLanes(device, plan), len(parameters)
    tables: Any = SimpleNamespace(
        gradients=np.zeros(count, np.uint64), gradient_dtypes=np.zeros(count, np.int32), weights=None
    )
    memory: Any = _Memory()
    gradients = kind(GradientSlots(None, True, True), tables, SimpleNamespace(), memory, lanes, limits or Limits())
    gradients.additions = adding = additions(lanes)
    gradients.adopt(plan, Layout((), ()))
    numel = sum(parameter.numel for parameter in parameters)
    found = Backward(0.0, 0.0, 0, {})
    for _ in range(passes):
        begun_s, added_bytes, before = device.now_s, adding.added_bytes, dict(device.counts)
        for position in reversed(range(count)):
            parameter = parameters[position]
            device.compute(compute_s * parameter.numel / numel, TENSOR_LAUNCHES)
            address = device.allocate(2 * parameter.numel)
            mark = gradients.arrived(position, address, DtypeCode.BFLOAT16)
            if not gradients.stays(position):
                gradient: Any = _Lying(address, parameter.numel, torch.bfloat16)
                gradients.hold(gradient, mark, elsewhere=False)
        gradients.leave()
        host_s = device.now_s - begun_s
        adding.finish()
        device.end()
        counts = {name: device.counts[name] - before[name] for name in before}
        found = Backward(device.now_s - begun_s, host_s, adding.added_bytes - added_bytes, counts)
    return found


def passing_s(plan: Plan, sizes: Sequence[int], calls: Calls, rates: Rates, *, gathers: bool) -> tuple[float, float]:
    """Return what a thread takes to enqueue a subgroup's gradients to the host, and its weights to the device.

    Args:
        plan: Says how large the buffers of small pieces are.
        sizes: Bytes of each of its segments, which lie beside each other in host memory.
        calls: What calls take.
        rates: Of the machine.
        gathers: Whether small pieces share copies.
    """
    device = VirtualDevice(calls, rates)
    lanes = VirtualLanes(device, plan)
    if not gathers:
        lanes.pieces.adopt(0, 0)
    ends = itertools.accumulate(-(-size // PIECE_ALIGNMENT) * PIECE_ALIGNMENT for size in sizes)
    places = [0, *ends][:-1]
    rows = [
        ((1 << 41) + (number << 34), (1 << 44) + place, size)
        for number, (place, size) in enumerate(zip(places, sizes, strict=True))
    ]
    pieces = np.array(rows, np.uint64).reshape(-1, 3)
    lanes.pieces.to_host(pieces, lane=DeviceLane.LEAVING)
    out_s = device.now_s
    lanes.pieces.to_device(pieces)
    return out_s, device.now_s - out_s
