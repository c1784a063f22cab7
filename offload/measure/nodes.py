"""Rates of memory nodes: the update, reads, writes and the GPU's link, with memory that is bound to one node.

Passes go over equally many bytes on all nodes: on one with fewer bytes, caches would make it seem faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial

from offload import waits
from offload.device.lanes import GpuLanes
from offload.device.none import NO_LANES, Lanes
from offload.formats import EXACT, EXACT_ADAMW
from offload.kernels import CpuUpdateKernel
from offload.kernels.table import trial_bytes
from offload.measure.gpu import D2H, H2D, GpuProbe
from offload.measure.probe import ALIGNMENT_BYTES, SHARE_OF_AVAILABLE, enough_bytes
from offload.measure.samples import CpuProbe, Runs, repeated
from offload.measure.workbench import CHUNK_NUMEL, UPDATE_DEPTH, TrialState
from offload.memory.arenas import Arena
from offload.memory.nodes import free_bytes
from offload.plan import GpuRates, NodeRates
from offload.protocols import Queue


def probe_nodes(
    kernel: CpuUpdateKernel, queue: Queue, numbers: Sequence[int], most_bytes: int, lanes: Lanes = NO_LANES
) -> tuple[NodeRates, ...]:
    """Measure memory nodes, one after the other; half a second for each.

    Args:
        kernel: The session's kernel, on the cores that will update.
        queue: The kernel's; nothing else may report to it meanwhile.
        numbers: The nodes' numbers.
        most_bytes: Most memory to allocate on each node, unless the smallest trial needs more.
        lanes: The session's, with nothing on them.

    Raises:
        OffloadError: A node has no memory for it, or this process may not use it.
    """
    least = UPDATE_DEPTH * CHUNK_NUMEL * trial_bytes(EXACT_ADAMW) + ALIGNMENT_BYTES  # bytes of the smallest trial
    affordable = (free_bytes(number) // SHARE_OF_AVAILABLE for number in numbers)
    nbytes = max(least, min(most_bytes, enough_bytes(), *affordable))
    return tuple(_probe_node(kernel, queue, number, nbytes, lanes) for number in numbers)


def _probe_node(kernel: CpuUpdateKernel, queue: Queue, number: int, nbytes: int, lanes: Lanes) -> NodeRates:
    """Measure one node with `nbytes` of memory bound to it: the update, reads, writes, and the GPU's link."""
    # Whole chunks, whose tensors are aligned.
    numel = (nbytes - ALIGNMENT_BYTES) // trial_bytes(EXACT_ADAMW) // CHUNK_NUMEL * CHUNK_NUMEL
    with contextlib.closing(Arena(nbytes, prefault=True, node=number)) as arena:
        state = TrialState(EXACT_ADAMW, numel, UPDATE_DEPTH, borrowed=(arena.address, arena.nbytes))
        kernels = {kernel.threads: kernel}
        cpu = CpuProbe(Runs(queue), kernels, states={EXACT: state}, variants={}, least=state.chunks)
        cpu.rate()  # warms up
        update_bytes_per_s = max(repeated(cpu.rate))
        # Passes are calls of the C library, which ctypes makes without the GIL, so that threads run side by side:
        # `memset` writes zeros; `memchr` seeks a byte that is 1, and reads all memory, as there is none.
        libc = ctypes.CDLL(None)
        write = partial(_pass_rate, kernel.threads, arena, lambda at, size: libc.memset(at, 0, size))
        read = partial(_pass_rate, kernel.threads, arena, lambda at, size: libc.memchr(at, 1, size))
        write_bytes_per_s = max(repeated(write))  # first, so that all is 0 for the reads
        read_bytes_per_s = max(repeated(read))
    link = lanes.measure_rates(partial(_link_rates, number=number))
    link_bytes_per_s = min(link.h2d_bytes_per_s, link.d2h_bytes_per_s) if link.lanes else 0.0  # 0: there is no GPU
    return NodeRates(number, update_bytes_per_s, read_bytes_per_s, write_bytes_per_s, link_bytes_per_s)


def _pass_rate(threads: int, arena: Arena, work: Callable[[ctypes.c_void_p, ctypes.c_size_t], object]) -> float:
    """Return the bytes a second that several threads together reach in one pass, each over its part of an arena.

    Args:
        threads: How many.
        arena: The memory.
        work: Passes over a part; called with its address and its size.
    """
    size = arena.nbytes // threads

    def work_on_part(number: int) -> None:
        work(ctypes.c_void_p(arena.address + number * size), ctypes.c_size_t(size))

    parts = [partial(work_on_part, number) for number in range(threads)]
    started_s = time.perf_counter()
    waits.side_by_side(parts, "offload-probe", lambda: "memory to be probed")
    return threads * size / (time.perf_counter() - started_s)


def _link_rates(lanes: GpuLanes, number: int) -> GpuRates:
    """Return the rates of copies between the GPU and a node, both ways at once: the best of three runs.

    A first run before these does not count: it determines their length.
    """
    with contextlib.closing(GpuProbe(lanes, EXACT_ADAMW, CHUNK_NUMEL, node=number)) as probe:
        _first, *runs = [probe.rates(H2D, D2H) for _ in range(4)]
    h2d, d2h = (max(run[f"gpu/{lane}"] for run in runs) for lane in ("h2d", "d2h"))
    # Only the link's rates are used. A valid rate stands in for that of updates, which does not depend on the node.
    return GpuRates(update_bytes_per_s=h2d, h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h)
