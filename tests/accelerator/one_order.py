"""Whether ranks issue the collectives of a device in one order, over all the groups that they share.

A device's backend of collectives, as NCCL, has a kernel on each rank wait there for the others'. Kernels of two
groups that ranks have launched in different orders may wait for each other for ever, wherever they do not fit on the
device at once (torch.distributed, "using multiple NCCL communicators concurrently"; its NCCL_LAUNCH_ORDER_IMPLICIT).
gloo does not mind, so each rank notes what it issues, and ranks compare notes when they end.

The order of one run says little, as threads may have been lucky. So a thread of a library's own issues none: nothing
orders what it does with what the program does. Threads of torch do, within a backward pass, for which the program
waits.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typing_extensions

PROGRAM, TORCH = "the program's thread", "a thread of torch"
_DEPTH = 5
"""Callers that a note has, innermost last."""
_NOBODY = (str(Path(torch.__file__).parent), typing_extensions.__file__, threading.__file__, "<")
"""Where files' names begin whose functions are no callers: torch's own, and those that wrap them."""


class Collective(NamedTuple):
    """One collective as a rank has issued it, of a group whose name is the same on all of its ranks."""

    group: str
    ranks: tuple[int, ...]
    name: str
    thread: str
    callers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} of group {self.group!r}, by {self.thread}: {' > '.join(self.callers) or 'native code'}"


_issued: list[Collective] = []
_checks = itertools.count()


def note(group: str, ranks: Sequence[int]) -> Callable[[str], None]:
    """Return what notes the collectives of a group as they are issued."""
    members = tuple(ranks)

    def told(name: str) -> None:
        thread = threading.current_thread()
        if thread is threading.main_thread():
            who = PROGRAM
        else:
            who = TORCH if isinstance(thread, threading._DummyThread) else f"thread {thread.name!r}"
        _issued.append(Collective(group, members, name, who, _callers()))

    return told


def _callers() -> tuple[str, ...]:
    found = list[str]()
    frame: Any = sys._getframe(1).f_back
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        if not code.co_filename.startswith(_NOBODY):
            found.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))


def broken(issued: Sequence[Sequence[Collective]]) -> list[str]:
    """Return where ranks have not issued collectives in one order; by rank, what each has."""
    found = []
    for rank, all_of_it in enumerate(issued):
        strange = [number for number, each in enumerate(all_of_it) if each.thread not in (PROGRAM, TORCH)]
        found += [f"rank {rank}: {len(strange)} by other threads, the first:"] if strange else []
        found += [f"  number {number}, {all_of_it[number]}" for number in strange[:1]]
    for one in range(len(issued)):
        for other in range(one + 1, len(issued)):
            both = [[each for each in issued[rank] if {one, other} <= {*each.ranks}] for rank in (one, other)]
            here, there = ([(each.group, each.name) for each in some] for some in both)
            if here == there:
                continue
            number = next((n for n, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), -1)
            if number < 0:
                number = min(len(here), len(there))
            found += [f"ranks {one} and {other} differ from number {number} on:"]
            found += [
                f"  rank {rank}: {some[number] if number < len(some) else 'nothing'}"
                for rank, some in zip((one, other), both, strict=True)
            ]
    return found


def check() -> None:
    """Compare what all ranks have issued since the last time; each calls it, at its end.

    Raises:
        AssertionError: There is no one order; it says where not.
    """
    rank, ranks = torch.distributed.get_rank(), range(torch.distributed.get_world_size())
    prefix = f"one_order-{next(_checks)}"
    store = torch.distributed.PrefixStore(prefix, torch.distributed.distributed_c10d._get_default_store())
    store.set(f"issued-{rank}", pickle.dumps(_issued))
    issued = [pickle.loads(store.get(f"issued-{other}")) for other in ranks]
    store.set(f"read-{rank}", "")
    store.wait([f"read-{other}" for other in ranks])  # the store may end with one of them
    _issued.clear()
    found = broken(issued)
    assert not found, "collectives of the device are issued in no one order:\n" + "\n".join(found)
