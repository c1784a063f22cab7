"""NUMA nodes and the cores of a rank; and touching memory before it is used, by several threads on some nodes.

The kernel gives and clears a page when it is first touched, on the node of the CPU that touches it, unless the
process has another policy (`numactl`, say, which stays in force). Whoever locks memory has it touched, by one thread
and on that thread's node. So memory is touched here first, by threads that are bound to nodes for as long as that
takes. This asks for no memory policy, which containers may refuse; where threads may not be bound either, memory is
touched from anywhere.

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
"""Touched by one thread at a time, so on one node: parts of a subgroup lie on all of them."""

MOST_THREADS = 16

log = logging.getLogger("offload")

Nodes = Mapping[int, frozenset[int]]
"""CPUs that this process may use, by the number of their node."""


def nodes_here() -> Nodes:
    """Return the nodes with CPUs that this process may use; none where the kernel does not tell."""
    cpus, found = os.sched_getaffinity(0), {}
    for folder in NODES.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            mine = frozenset(cpus & numbers_in((folder / "cpulist").read_text()))
            if mine:
                found[int(folder.name.removeprefix("node"))] = mine
    return dict(sorted(found.items()))


def nodes_for(reader: int | None) -> Nodes:
    """Return the nodes that host memory of a session with a GPU should lie on; none where that is one anyway.

    Args:
        reader: The GPU's, if nothing else reads that memory; None where that is not known, or the CPU may update some
            of the state. It then needs what all its cores' nodes give together, and a GPU's link is slower than the
            one between nodes.
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
    """Return the cores for one of several ranks that may all run on the same ones; none where it is all of them.

    They are those of its share of NUMA nodes.

    Args:
        number: Which of them it is, from 0.
        ranks: How many they are.
    """
    parts = sorted(nodes_here().values(), key=min)
    if len(parts) < 2:
        return frozenset()
    first = number * len(parts) // ranks
    return frozenset().union(*parts[first : max(first + 1, (number + 1) * len(parts) // ranks)])


def touch(
    piece: Callable[[int, int], None],
    nbytes: int,
    nodes: Nodes | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Touch memory piece by piece, in turn on each of some nodes; a Ctrl-C is a way out.

    Args:
        piece: Touches so many bytes from an offset on; any thread.
        nbytes: How much there is.
        nodes: Which nodes; None for those of all CPUs.
        given_up: Asked before each piece; whether nobody wants the memory any more.

    Raises:
        OffloadError: There is not so much, or it was given up.
    """
    count = -(-nbytes // PIECE_BYTES)
    places: Sequence[frozenset[int]] = [*nodes.values()] if nodes else [frozenset()]
    cpus = len(frozenset().union(*places)) or len(os.sched_getaffinity(0))
    turns = [itertools.count(first, len(places)) for first in range(len(places))]  # numbers of pieces
    done: list[int] = []
    ends_early = False

    def give_up() -> None:
        nonlocal ends_early
        ends_early = True

    def touch_there(place: int, where: frozenset[int]) -> None:
        with bound(where):
            try:
                for number in turns[place]:
                    if ends_early or number >= count:
                        break
                    if given_up():
                        raise OffloadError("the session was closed while it took memory")
                    piece(number * PIECE_BYTES, min(PIECE_BYTES, nbytes - number * PIECE_BYTES))
                    done.append(number)
            except BaseException:
                give_up()
                raise

    crew = min(MOST_THREADS, cpus, count)
    if crew <= 1 and len(places) == 1:
        touch_there(0, frozenset())
        return

    def awaited() -> str:
        left_bytes = (count - len(done)) * PIECE_BYTES
        return f"{format_bytes(left_bytes)} of {format_bytes(nbytes)} of host memory to be touched"

    numbers = (number % len(places) for number in range(max(crew, len(places))))
    waits.side_by_side(
        [partial(touch_there, place, places[place]) for place in numbers], "offload-touch", awaited, give_up
    )


@contextlib.contextmanager
def bound(cpus: frozenset[int]) -> Iterator[None]:
    """Bind this thread to CPUs, if there are any; where that is refused it runs on as it did.

    Threads that it starts meanwhile stay there, as does memory that it touches.
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
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)}
