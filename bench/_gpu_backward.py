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
from offload.device.memory import Block
from offload.device.pieces import as_pieces
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
    """Seconds that a thread takes to enqueue a copy, to launch a kernel, and to record an event or wait for one."""

    copy_s: float = 10e-6
    launch_s: float = 10e-6
    event_s: float = 10e-6


class VirtualMark:
    """A point on a lane; also what says that a buffer's gradients have been added, in the place of a latch."""

    def __init__(self, device: VirtualDevice, ends_s: float) -> None:
        self._device, self.ends_s = device, ends_s

    def reached(self) -> bool:
        return self._device.now_s >= self.ends_s

    is_set = reached

    def wait(self) -> None:
        self._device.now_s = max(self._device.now_s, self.ends_s)


class VirtualDevice:
    """A GPU's lanes, and the thread that calls it, which has come as far as `now_s`."""

    node = None

    def __init__(self, calls: Calls, rates: Rates) -> None:
        self.calls, self.rates = calls, rates
        self.now_s = 0.0
        self._ends_s: dict[DeviceLane, float] = dict.fromkeys(DeviceLane, 0.0)
        self._free_s: dict[str, float] = {}
        self._memory = Memory(1 << 40, 256)

    def _put(self, lane: DeviceLane, engine: str, seconds: float) -> None:
        starts_s = max(self.now_s, self._ends_s[lane], self._free_s.get(engine, 0.0))
        self._ends_s[lane] = self._free_s[engine] = starts_s + seconds

    def compute(self, seconds: float, launches: int) -> None:
        """Put work of the caller's on its lane."""
        for _ in range(launches):
            self.now_s += self.calls.launch_s
        self._put(DeviceLane.CALLER, "caller", seconds)

    def end(self) -> None:
        """Wait for all lanes."""
        self.now_s = max(self.now_s, *self._ends_s.values())

    # As `Device` has it

    def caller(self) -> Hashable:
        return 0

    def mark(self, lane: DeviceLane, *, timed: bool = True) -> VirtualMark:
        self.now_s += self.calls.event_s
        return VirtualMark(self, max(self.now_s, self._ends_s[lane]))

    def mark_caller(self, caller: Hashable) -> VirtualMark:
        return self.mark(DeviceLane.CALLER, timed=False)

    def follow(self, lane: DeviceLane, mark: VirtualMark) -> None:
        self.now_s += self.calls.event_s
        self._ends_s[lane] = max(self._ends_s[lane], mark.ends_s)

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int, piece_bytes: int = 0) -> None:
        self.now_s += self.calls.copy_s
        engine = "h2d" if lane is DeviceLane.H2D else "d2h"
        self._put(lane, engine, nbytes / getattr(self.rates.gpu, f"{engine}_bytes_per_s"))

    def _kernel(self, lane: DeviceLane, nbytes: float, table_bytes: int) -> None:
        if table_bytes:
            self.copy(DeviceLane.H2D, 0, 0, table_bytes)
            self.follow(lane, self.mark(DeviceLane.H2D, timed=False))
        self.now_s += self.calls.launch_s
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
        return self._memory.allocate_arena(nbytes).address

    def release(self, address: int) -> None:
        pass

    def record_use(self, gradient: Any) -> None:
        pass


def tensor_at(address: int, count: int, dtype: torch.dtype) -> Any:
    """Return what stands for a tensor, and has no memory."""
    sizes = {"numel": lambda: count, "element_size": lambda: dtype.itemsize, "data_ptr": lambda: address}
    return SimpleNamespace(dtype=dtype, nbytes=count * dtype.itemsize, **sizes)


class Memory:
    """Memory that is addresses alone, as an arena and as what gives arenas."""

    def __init__(self, address: int, grain_bytes: int = 4096, nbytes: int = 0) -> None:
        self.address, self.nbytes = address, nbytes
        self._next, self._grain_bytes = address, grain_bytes

    def allocate_arena(self, nbytes: int, **how: Any) -> Memory:
        address = self._next
        self._next += -(-nbytes // self._grain_bytes) * self._grain_bytes
        return Memory(address, nbytes=nbytes)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> Any:
        return tensor_at(self.address + offset, count, dtype)

    def numpy(self, offset: int, count: int, dtype: Any) -> np.ndarray:
        return np.zeros(count, dtype)


class VirtualLanes(GpuLanes):
    """The product's lanes, with memory that is addresses alone."""

    def __init__(self, device: VirtualDevice, plan: Plan) -> None:
        super().__init__(device, SimpleNamespace(post=lambda *about, **times: None), named_nodes=True)
        self._memory = Memory(1 << 45)
        if plan.piece_buffer_bytes:
            nbytes = 4 * plan.piece_buffer_bytes
            self.pieces.replace_buffers(Block(nbytes, device.allocate(nbytes)))
        self.use_plan(plan)

    def allocate_arena(self, nbytes: int, **how: Any) -> Any:
        return self._memory.allocate_arena(nbytes)


class VirtualAdditions(Additions):
    """The product's additions, whose thread is a lane of the virtual clock."""

    def __init__(self, lanes: VirtualLanes) -> None:
        super().__init__(lanes, SimpleNamespace(add=None))
        self._thread_lock.acquire()  # no thread is started
        self._work = SimpleNamespace(put=self._add)
        self._free_s = 0.0

    def _add(self, filling: Filling) -> None:
        device = self._lanes.device
        nbytes = sum(count * int(ITEM_BYTES[dtype]) for dtype, rows in filling.rows.items() for _, _, count in rows)
        self._free_s = max(self._free_s, filling.mark.ends_s)
        self._free_s += nbytes * ADD_MEMORY_COST / device.rates.memory_bytes_per_s
        filling.ended = VirtualMark(device, self._free_s)

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


def backward_s(
    plan: Plan,
    rates: Rates,
    calls: Calls,
    compute_s: float,
    *,
    passes: int = 1,
    limits: Limits | None = None,
    additions: type[VirtualAdditions] = VirtualAdditions,
    kind: type[GpuGradients] = GpuGradients,
) -> float:
    """Return the seconds of the last of some backward passes, until all its gradients are where the step reads them.

    Gradients of all passes after the first are added. The plan is of a session whose gradients leave, as `kind` and
    `limits` say; `compute_s` is what the GPU computes for in a pass.
    """
    device, parameters = VirtualDevice(calls, rates), plan.layout.parameters
    lanes, count = VirtualLanes(device, plan), len(parameters)
    gradients = np.zeros(count, np.uint64)
    tables: Any = SimpleNamespace(gradients=gradients, gradient_dtypes=np.zeros(count, np.int32), weights=None)
    memory: Any = Memory(1 << 44)
    store = kind(GradientSlots(None, True, True), tables, SimpleNamespace(), memory, lanes, limits or Limits())
    store.additions = adding = additions(lanes)
    store.use_plan(plan, Layout((), ()))
    numel, begun_s = sum(parameter.numel for parameter in parameters), 0.0
    for _ in range(passes):
        begun_s = device.now_s
        for position in reversed(range(count)):
            each = parameters[position].numel
            device.compute(compute_s * each / numel, TENSOR_LAUNCHES)
            address = device.allocate(2 * each)
            mark = store.arrived(position, address, DtypeCode.BFLOAT16)
            if not store.stays(position):
                store.keep_until_read(tensor_at(address, each, torch.bfloat16), mark, elsewhere=False)
        store.send_bucket()
        adding.finish()
        device.end()
    return device.now_s - begun_s


def passing_s(plan: Plan, sizes: Sequence[int], calls: Calls, rates: Rates, gathers: bool) -> tuple[float, float]:
    """Return what a thread takes to enqueue a subgroup's gradients to the host, and its weights to the device.

    Its segments have `sizes` bytes and lie beside each other in host memory; where it `gathers`, small ones share
    copies.
    """
    device = VirtualDevice(calls, rates)
    lanes = VirtualLanes(device, plan)
    if not gathers:
        lanes.pieces.replace_buffers(Block())
    places = itertools.accumulate((-(-size // PIECE_ALIGNMENT) * PIECE_ALIGNMENT for size in sizes), initial=1 << 44)
    there = itertools.count(1 << 41, 1 << 34)
    pieces = as_pieces(list(zip(there, places, sizes, strict=False)))
    lanes.pieces.to_host(pieces, lane=DeviceLane.LEAVING)
    out_s = device.now_s
    lanes.pieces.to_device(pieces)
    return out_s, device.now_s - out_s
