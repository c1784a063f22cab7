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
"""File in which Linux says on which nodes this process may have memory."""

MOST_ASKED = 4096
"""Most pages of an arena whose nodes are queried; these are spread evenly. It takes about a millisecond."""

_MPOL_BIND = 2
_SYSCALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}
"""Numbers of mbind and move_pages, by processor."""
_MBIND, _MOVE_PAGES = 0, 1
"""Places in these tuples."""

_FIGURE = re.compile(r"^Node \d+ (\w+(?:\(\w+\))?):\s+(\d+) kB$", re.MULTILINE)
_REFUSED = (errno.EPERM, errno.ENOSYS, errno.EACCES)

log = logging.getLogger("offload")

told: set[str] = set()
"""Warnings that have been logged: each is logged once."""


def memory_nodes() -> list[int]:
    """Return the numbers of the nodes on which this process may have memory; none if the kernel does not say."""
    with contextlib.suppress(OSError):
        allowed = re.search(r"^Mems_allowed_list:\s*(\S+)$", STATUS.read_text(), re.MULTILINE)
        if allowed is not None:
            numbers = sorted(touching.numbers_in(allowed[1]))
            return [number for number in numbers if _meminfo(number).get("MemTotal")]  # others have no memory
    return []


def check_nodes(field: str, numbers: Iterable[int]) -> None:
    """Raise `ConfigError` if one of these memory nodes does not exist or is not allowed for this process."""
    existing = memory_nodes()
    for number in numbers:
        if number not in existing:
            names = " and ".join(f"node{each}" for each in existing)
            advice = (
                f"there is memory on {names}" if existing else "the kernel tells of no memory nodes: give one size"
            )
            raise ConfigError(field, f"node{number}", advice)


def free_bytes(number: int) -> int:
    """Return the free bytes on a node, including the page cache that can be evicted."""
    meminfo = _meminfo(number)
    return sum(meminfo.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))


def check_free(needed_bytes: Mapping[int, int], remedy: str) -> None:
    """Raise `InfeasiblePlanError` if a memory node has less free than needed: the kernel could kill the process.

    `remedy` tells users what to do.
    """
    for number, needed in needed_bytes.items():
        free = free_bytes(number)
        if needed > free:
            offers = {f"what is free on node{number}": free}
            raise InfeasiblePlanError(f"memory on node{number}", needed, offers, remedy)


def cpus_near(numbers: Iterable[int]) -> frozenset[int]:
    """Return the CPUs of some nodes that this process may use, to bind threads to.

    The result is empty if there are none, and if the process may use no others: then nothing has to be bound.
    """
    cpus_by_node = touching.nodes_here()
    near = frozenset().union(*(cpus_by_node.get(number, ()) for number in numbers))
    return frozenset() if near >= os.sched_getaffinity(0) else near


def bind_pages(address: int, nbytes: int, number: int) -> frozenset[int]:
    """Bind memory whose pages have not been touched to a node.

    Returns:
        No CPUs if the pages are bound. If the system refuses to bind memory (logged once), the node's CPUs: threads
        that run on them have to touch the pages first. If it has no CPUs then, the pages will lie elsewhere.

    Raises:
        OffloadError: There is no such node, or this process may have no memory there.
    """
    mask = (ctypes.c_ulong * (MAX_NODES // 64))()  # a bit for each node
    mask[number // 64] = 1 << (number % 64)
    mask_bits = ctypes.c_ulong(MAX_NODES + 1)  # Linux reads one bit less than it is told
    code = system_call(_MBIND, ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _MPOL_BIND, mask, mask_bits, 0)
    if code in _REFUSED:
        near = touching.nodes_here().get(number, frozenset())
        instead = "threads on its CPUs touch it first"
        if not near:
            instead = "it has no CPUs to touch it first, and lies elsewhere"
        _warn_once(
            f"memory cannot be bound to node{number}, as the system refuses mbind (%s), which containers without "
            f"CAP_SYS_NICE do: {instead}",
            os.strerror(code),
        )
        return near
    if code:
        raise OffloadError(f"memory cannot be bound to node{number}: {os.strerror(code)} (a cpuset may exclude it)")
    return frozenset()


def node_bytes_of(address: int, nbytes: int) -> dict[int, int]:
    """Return how many bytes of some memory lie on each node, estimated from up to `MOST_ASKED` of its pages.

    Pages that have not been touched lie on no node. The result is empty if the system does not say (logged once).
    """
    count = -(-nbytes // mmap.PAGESIZE)  # of pages, rounded up
    sampled = range(0, count, -(-count // MOST_ASKED)) if count else range(0)  # every page, or every n-th
    pages = (ctypes.c_void_p * len(sampled))(*(address + page * mmap.PAGESIZE for page in sampled))
    status = (ctypes.c_int * len(sampled))()
    # Of this process (0). Without nodes to move pages to (None), move_pages moves nothing, and writes to `status` on
    # which node each page lies.
    code = system_call(_MOVE_PAGES, 0, ctypes.c_ulong(len(sampled)), pages, None, status, 0) if sampled else 0
    if code:
        _warn_once("the system does not say on which node memory lies (move_pages: %s)", os.strerror(code))
        return {}
    counts = Counter(node for node in status if node >= 0)  # negative: the page has not been touched
    return {node: counts[node] * nbytes // len(sampled) for node in sorted(counts)}


def system_call(which: int, *arguments: object) -> int:
    """Make a system call, `_MBIND` or `_MOVE_PAGES`, by its number; return its errno, 0 if it succeeded.

    libc has no functions for these two; libnuma has, but need not be installed.
    """
    numbers: Sequence[int] = _SYSCALLS.get(platform.machine(), ())
    if not numbers:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(numbers[which]), *arguments) else 0


def _warn_once(text: str, *parts: object) -> None:
    """Log a warning, the first time only."""
    if text not in told:
        told.add(text)
        log.warning(f"{text} (said once)", *parts)


def _meminfo(number: int) -> dict[str, int]:
    """Return the kernel's figures of a node's memory in bytes, by name."""
    with contextlib.suppress(OSError):
        text = (touching.NODES / f"node{number}" / "meminfo").read_text()
        return {name: int(size) << 10 for name, size in _FIGURE.findall(text)}
    return {}
