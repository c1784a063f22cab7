"""Memory nodes: which there are, what is free there, binding memory to one, and asking where pages lie.

A node is what Linux calls a NUMA node: memory that is equally far from everything, of a socket or of a CXL card, with
CPUs or without. Memory is bound before it is first touched, so that no page has to move.

Not done here: which node something should lie on (`offload.plan`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from offload.errors import ConfigError, InfeasiblePlanError, OffloadError
from offload.memory import touching
from offload.protocols import MAX_NODES

STATUS = Path("/proc/self/status")
"""Where Linux tells which nodes this process may have memory on."""

MOST_ASKED = 4096
"""Pages of an arena whose node is asked for, spread evenly: about a millisecond."""

_MPOL_BIND = 2
_SYSCALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}
"""Numbers of mbind and move_pages, by processor."""

_NAMED = re.compile(r"^Node \d+ (\w+(?:\(\w+\))?):\s+(\d+) kB$", re.MULTILINE)
_REFUSED = (errno.EPERM, errno.ENOSYS, errno.EACCES)

log = logging.getLogger("offload")

told: set[str] = set()
"""What this process has been told once."""


def memory_nodes() -> list[int]:
    """Return the numbers of the nodes that have memory for this process; none where the kernel does not tell."""
    with contextlib.suppress(OSError):
        allowed = re.search(r"^Mems_allowed_list:\s*(\S+)$", STATUS.read_text(), re.MULTILINE)
        if allowed is not None:
            return [n for n in sorted(touching.numbers_in(allowed[1])) if _meminfo(n).get("MemTotal")]
    return []


def check_nodes(field: str, numbers: Iterable[int]) -> None:
    """Raise `ConfigError` if there is no memory node of one of these numbers for this process."""
    here = memory_nodes()
    for number in numbers:
        if number not in here:
            names = " and ".join(f"node{each}" for each in here)
            allowed = f"there is memory on {names}" if here else "the kernel tells of no memory nodes: give one size"
            raise ConfigError(field, f"node{number}", allowed)


def free_bytes(number: int) -> int:
    """Return what is free on a node, the page cache that would give way included."""
    found = _meminfo(number)
    return sum(found.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))


def check_free(needed_bytes: Mapping[int, int], remedy: str) -> None:
    """Raise `InfeasiblePlanError` if a memory node has less free than it is to hold; going on, one may be killed."""
    for number, needed in needed_bytes.items():
        free = free_bytes(number)
        if needed > free:
            offers = {f"what is free on node{number}": free}
            raise InfeasiblePlanError(f"memory on node{number}", needed, offers, remedy)


def cpus_near(numbers: Iterable[int]) -> frozenset[int]:
    """Return the CPUs of some nodes; none where they have none that this process may use, or all of them."""
    here = touching.nodes_here()
    found = frozenset().union(*(here.get(number, ()) for number in numbers))
    return frozenset() if found >= os.sched_getaffinity(0) else found


def bind(address: int, nbytes: int, number: int) -> frozenset[int]:
    """Bind pages that nobody has touched to a node.

    Args:
        address: Where they begin; at a page.
        nbytes: How many bytes.
        number: The node's.

    Returns:
        Nothing where they are bound. Where the system does not let this process bind memory, which is said once, the
        node's CPUs: a thread that runs there has to touch the pages first.

    Raises:
        OffloadError: There is no such node, or this process may have no memory there.
    """
    mask = (ctypes.c_ulong * (MAX_NODES // 64))()
    mask[number // 64] = 1 << number % 64
    code = system_call(
        0, ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _MPOL_BIND, mask, ctypes.c_ulong(MAX_NODES + 1), 0
    )
    if code in _REFUSED:
        near = touching.nodes_here().get(number, frozenset())
        instead = (
            "threads on its CPUs touch it first" if near else "it has no CPUs to touch it first, and lies elsewhere"
        )
        _tell(
            f"memory cannot be bound to node{number}, as the system refuses mbind (%s), which containers without "
            f"CAP_SYS_NICE do: {instead}",
            os.strerror(code),
        )
        return near
    if code:
        raise OffloadError(f"memory cannot be bound to node{number}: {os.strerror(code)} (a cpuset may exclude it)")
    return frozenset()


def where(address: int, nbytes: int) -> dict[int, int]:
    """Return how many bytes of some memory lie on each node, by up to `MOST_ASKED` of its pages.

    Pages that have not been touched lie nowhere. Nothing where the system does not say, which is said once.
    """
    count = -(-nbytes // mmap.PAGESIZE)
    asked = range(0, count, -(-count // MOST_ASKED)) if count else range(0)
    pages = (ctypes.c_void_p * len(asked))(*(address + page * mmap.PAGESIZE for page in asked))
    status = (ctypes.c_int * len(asked))()
    code = system_call(1, 0, ctypes.c_ulong(len(asked)), pages, None, status, 0) if asked else 0
    if code:
        _tell("the system does not say on which node memory lies (move_pages: %s)", os.strerror(code))
        return {}
    counts = Counter(node for node in status if node >= 0)  # else the page is not there
    return {node: counts[node] * nbytes // len(asked) for node in sorted(counts)}


def system_call(which: int, *arguments: object) -> int:
    """Return the error of a system call, 0 for none."""
    numbers: Sequence[int] = _SYSCALLS.get(platform.machine(), ())
    if not numbers:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(numbers[which]), *arguments) else 0


def _tell(text: str, *parts: object) -> None:
    if text not in told:
        told.add(text)
        log.warning(f"{text} (said once)", *parts)


def _meminfo(number: int) -> dict[str, int]:
    """Return bytes by name, as the kernel tells them of a node."""
    with contextlib.suppress(OSError):
        text = (touching.NODES / f"node{number}" / "meminfo").read_text()
        return {name: int(size) << 10 for name, size in _NAMED.findall(text)}
    return {}
