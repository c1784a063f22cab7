"""Touches memory before it is used, by several threads on some NUMA nodes; and finds nodes and the cores of a rank.

The kernel allocates and clears a page when it is first touched, on the node of the CPU that touches it, unless the
process has another policy (of `numactl`, say, which is not changed). Locking memory touches it, too, by one thread
and on that thread's node. So memory is touched here first, by threads that are bound to nodes for that time. This
needs no memory policy, which containers may refuse; if threads cannot be bound either, any CPU touches the memory.

Not done here: choosing huge pages, locking.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from offload import waits
from offload.errors import OffloadError
from offload.units import format_bytes

NODES = Path("/sys/devices/system/node")
"""Where Linux lists NUMA nodes."""

PIECE_BYTES = 16 << 20
"""Bytes that one thread touches at a time, so that they lie on one node: each subgroup is spread over all nodes."""

MOST_THREADS = 16

log = logging.getLogger("offload")

Nodes = Mapping[int, frozenset[int]]
"""CPUs that this process may use, by the number of their node."""


def nodes_here() -> Nodes:
    """Return the nodes with CPUs that this process may use, and these CPUs; none if the kernel does not say."""
    cpus = os.sched_getaffinity(0)
    cpus_by_node = {}
    for folder in NODES.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            allowed = frozenset(cpus & numbers_in((folder / "cpulist").read_text()))
            if allowed:
                cpus_by_node[int(folder.name.removeprefix("node"))] = allowed
    return dict(sorted(cpus_by_node.items()))


def nodes_for(reader: int | None) -> Nodes:
    """Return the nodes that host memory of a session with a GPU should lie on; none if there is one node only.

    Args:
        reader: The GPU's node, if nothing else reads that memory. None if that is unknown, or the CPU may update some
            of the state: then memory is spread, as the CPU needs the bandwidth of all nodes, and the GPU's link is
            slower than that between nodes.
    """
    nodes = nodes_here()
    if len(nodes) < 2:
        return {}
    if reader is not None and reader in nodes:
        log.info("host memory lies on NUMA node %d, the GPU's: nothing else reads it", reader)
        return {reader: nodes[reader]}
    numbers = ", ".join(map(str, nodes))
    log.info("host memory is spread over NUMA nodes %s, those of the CPUs that may update what lies there", numbers)
    return nodes


def cores_of_rank(number: int, ranks: int) -> frozenset[int]:
    """Return the cores that a rank is to use, where several ranks may run on the same cores: those of whole nodes.

    The nodes are divided evenly, and neighbours go to one rank. The result is empty if there is one node only: each
    rank then uses all cores. `number` is that of the rank, from 0; `ranks` is their count.
    """
    cpus_of_nodes = sorted(nodes_here().values(), key=min)
    if len(cpus_of_nodes) < 2:
        return frozenset()
    # Rank i gets the nodes from i * nodes / ranks up to (i + 1) * nodes / ranks, rounded down.
    first = number * len(cpus_of_nodes) // ranks
    beyond = max(first + 1, (number + 1) * len(cpus_of_nodes) // ranks)  # with more ranks than nodes, these share one
    return frozenset().union(*cpus_of_nodes[first:beyond])


def touch(
    touch_piece: Callable[[int, int], None],
    nbytes: int,
    nodes: Nodes | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Touch memory piece by piece, in turn on each of some nodes; a Ctrl-C interrupts it.

    With `nodes` each thread is bound to the CPUs of one node, and touches pieces of that node alone. Each node has
    the same number of threads, or one more.

    Args:
        touch_piece: Called with offset and bytes of a piece, to touch it; on any thread.
        nbytes: Bytes of the memory.
        nodes: The nodes; None to run on any CPU.
        given_up: Called before each piece; returns whether the memory is not needed any more.

    Raises:
        OffloadError: The system does not have that much memory, or it was given up.
    """
    piece_count = -(-nbytes // PIECE_BYTES)  # rounded up
    cpu_sets: Sequence[frozenset[int]] = [*nodes.values()] if nodes else [frozenset()]  # a set for each node
    cpu_count = len(frozenset().union(*cpu_sets)) or len(os.sched_getaffinity(0))
    # By node: the numbers of its pieces, every `len(cpu_sets)`-th. Its threads take them from one iterator.
    pieces_of_nodes = [itertools.count(first, len(cpu_sets)) for first in range(len(cpu_sets))]
    touched: list[int] = []
    ends_early = False

    def end_early() -> None:
        """Let all threads end before their next piece."""
        nonlocal ends_early
        ends_early = True

    def touch_pieces(index: int, cpus: frozenset[int]) -> None:
        """Touch pieces of one node until none is left; one thread's work."""
        with cpu_affinity(cpus):
            try:
                for piece in pieces_of_nodes[index]:
                    if ends_early or piece >= piece_count:
                        break
                    if given_up():
                        raise OffloadError("the session was closed while it took memory")
                    touch_piece(piece * PIECE_BYTES, min(PIECE_BYTES, nbytes - piece * PIECE_BYTES))
                    touched.append(piece)
            except BaseException:
                end_early()
                raise

    thread_count = max(min(MOST_THREADS, cpu_count, piece_count), len(cpu_sets))  # at least one a node
    if thread_count == 1:
        touch_pieces(0, cpu_sets[0])
        return

    def awaited() -> str:
        """Return what is left to do, for the log."""
        left_bytes = (piece_count - len(touched)) * PIECE_BYTES
        return f"{format_bytes(left_bytes)} of {format_bytes(nbytes)} of host memory to be touched"

    indices = (number % len(cpu_sets) for number in range(thread_count))
    works = [partial(touch_pieces, index, cpu_sets[index]) for index in indices]
    waits.side_by_side(works, "offload-touch", awaited, end_early)


@contextlib.contextmanager
def cpu_affinity(cpus: frozenset[int]) -> Iterator[None]:
    """Bind this thread to some CPUs, if any are given, while this context lasts; a refusal is ignored.

    Threads that it starts meanwhile stay bound, and memory that it touches meanwhile stays on these CPUs' node.
    """
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        if cpus:
            os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if cpus:
                os.sched_setaffinity(0, before)


def numbers_in(text: str) -> set[int]:
    """Return the numbers in a list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    return numbers
