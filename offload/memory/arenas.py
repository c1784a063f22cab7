"""Arenas: the large, aligned, exact-size blocks of memory that all state and staging buffers are cut from.

Throughput of storage depends on the pages behind a buffer more than on the I/O interface, so arenas ask for huge
pages. The system makes a page when it is first touched. `Arena.touch` touches all of an arena, by several threads:
before a device pins it, if the system refuses to bind it to its memory node, and where a caller asks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from offload.errors import OffloadError, invariant
from offload.layout import round_up
from offload.memory.nodes import bind_pages
from offload.memory.touching import Nodes, cpu_affinity, touch
from offload.protocols import SECTOR_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

HUGE_PAGE_BYTES = 2 << 20

CGROUP = Path("/sys/fs/cgroup")
"""Folder of the control groups' limits; in version 1 that of `memory` below it."""

OWN_GROUPS = Path("/proc/self/cgroup")
"""File with the control groups that this process is in."""

_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By version: files of limit and used bytes, and the prefix of names in memory.stat that count groups below, too."""

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; the mmap module does not name it
_MADV_DONTNEED_LOCKED = 24  # since Linux 5.18


def available_bytes() -> int:
    """Return the bytes of memory that this process may still take: the least of what the machine and its groups have.

    Its groups are the control groups (cgroups) that it is in, a container's, say. Those without a limit do not count.
    """
    available: int = psutil.virtual_memory().available
    for folder, version in control_groups():
        limit_name, used_name, prefix = _GROUP_FILES[version]
        with contextlib.suppress(OSError, ValueError):  # no limit there, or none that is a number
            limit_bytes = int((folder / limit_name).read_text())
            used_bytes = int((folder / used_name).read_text())
            with contextlib.suppress(OSError, ValueError):  # without these figures cached files count as used
                lines = (folder / "memory.stat").read_text().splitlines()
                figures = dict(line.split(maxsplit=1) for line in lines)
                # Cached files count as used there, but are evicted when needed, as the machine's figure assumes.
                names = (f"{prefix}active_file", f"{prefix}inactive_file", "slab_reclaimable")
                used_bytes -= sum(int(figures.get(name, 0)) for name in names)
            available = min(available, limit_bytes - used_bytes)
    return max(available, 0)


def control_groups() -> Iterator[tuple[Path, int]]:
    """Yield the folders of the control groups that this process is in, innermost first, each with its version.

    The limits of the groups above a group apply to it, too. A container sees its own group as the root.
    """
    own_group = ""  # the root, which is all there is where a container hides /proc
    with contextlib.suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():  # each "number:controllers:/name", see cgroups(7)
            _, controllers, name = line.split(":", 2)
            if not controllers:  # version 2
                own_group = name
            elif "memory" in controllers.split(","):
                yield from ((CGROUP / "memory" / group, 1) for group in _upwards(name))
    yield from ((CGROUP / group, 2) for group in _upwards(own_group))


def _upwards(group: str) -> Iterator[Path]:
    """Yield the folders of a group and of those above it, relative to the root's."""
    folder = Path(group.lstrip("/"))
    yield from (folder, *folder.parents)


class Arena:
    """One anonymous mapping of memory, which its owner cuts into views.

    Aligned to 2 MiB where it is at least that large, else to 4 KiB. Not inherited by a fork unless asked for: in the
    child the addresses are not mapped, so views must not be touched there (and nothing is copied on write here).

    Args:
        nbytes: Size; more than 0. Memory beyond it is never touched.
        huge_pages: Ask for transparent huge pages.
        inherit: Let forked children see the memory, copied on write; without it they have no such addresses.
        prefault: Touch every page now, so that later use never waits and a shortage shows here.
        node: The memory node to bind the memory to; None for the node of the thread that touches a page first. If
            the system refuses to bind it, every page is touched now, by threads on the node's CPUs.

    Attributes:
        address: Memory address of the first byte.
        nbytes: The size asked for.
        node: The memory node that the memory is bound to; None for any.

    Raises:
        OffloadError: The system does not have that much memory.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: bool = True,
        prefault: bool = False,
        inherit: bool = False,
        node: int | None = None,
    ) -> None:
        invariant(nbytes > 0, f"an arena of {nbytes} bytes")
        self.nbytes = nbytes
        self.node = node
        self._near_cpus: frozenset[int] = frozenset()  # the node's, if memory could not be bound to it
        is_large = nbytes >= HUGE_PAGE_BYTES
        alignment = HUGE_PAGE_BYTES if is_large else SECTOR_BYTES

        # The kernel aligns to pages only; the slack takes address space, not memory.
        slack = alignment - mmap.PAGESIZE if alignment > mmap.PAGESIZE else 0
        try:
            mapping = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as cause:
            raise OffloadError(f"no memory for an arena of {nbytes} bytes: {cause}") from cause
        self._mapping: mmap.mmap | None = mapping
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))  # `mmap` itself does not tell its address
        self._skip = -start % alignment  # bytes up to the first aligned address
        self.address = start + self._skip

        if not inherit:
            mapping.madvise(mmap.MADV_DONTFORK)
        if huge_pages and is_large:
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError as cause:
                if cause.errno != errno.EINVAL:  # a kernel without huge pages: slower, not wrong
                    raise
        try:
            if node is not None:
                self._near_cpus = bind_pages(start, nbytes + slack, node)
            if prefault or self._near_cpus:
                self.touch()
        except BaseException:
            self.close()
            raise

    def numpy(self, offset: int, numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a one-dimensional view of `numel` elements from byte `offset` on; nothing is copied."""
        nbytes = numel * np.dtype(dtype).itemsize
        if self._mapping is None:
            raise OffloadError("the arena has been closed")
        invariant(
            offset >= 0 and numel >= 0 and offset + nbytes <= self.nbytes,
            f"a view of bytes {offset} to {offset + nbytes} in an arena of {self.nbytes}",
        )
        if numel == 0:
            return np.empty(0, dtype)
        return np.frombuffer(self._mapping, dtype, numel, self._skip + offset)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a one-dimensional CPU tensor of `numel` elements from byte `offset` on; nothing is copied.

        `offset` is a multiple of the element size.
        """
        import torch

        invariant(offset % dtype.itemsize == 0, f"a tensor of {dtype} at byte {offset}")
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        # Made from a numpy array, which keeps the mapping open: with torch.frombuffer `close` could unmap the memory
        # of a tensor in use.
        return torch.from_numpy(self.numpy(offset, numel * dtype.itemsize, np.uint8)).view(dtype)

    def discard(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Give whole pages, by default all from `offset` on, back to the system; their content is lost.

        Their addresses stay mapped, so that they can be used again.

        Raises:
            OffloadError: The system refuses, as for memory locked by `mlockall` before Linux 5.18.
        """
        if self._mapping is None:
            return
        end = self.nbytes if nbytes is None else offset + nbytes
        length = round_up(end - offset, mmap.PAGESIZE)
        try:
            try:
                self._mapping.madvise(mmap.MADV_DONTNEED, self._skip + offset, length)
            except OSError:  # perhaps as the memory is locked: then this request works, since Linux 5.18
                self._mapping.madvise(_MADV_DONTNEED_LOCKED, self._skip + offset, length)
        except OSError as cause:
            raise OffloadError(f"{length} bytes of memory cannot be given back: {cause.strerror}") from cause

    def close(self) -> None:
        """Give the memory back: now, or when the last view of it is dropped; idempotent."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        # If views still use the mapping (BufferError), the last of them closes it: ours is the only other reference.
        with contextlib.suppress(BufferError):
            mapping.close()

    def touch(self, nodes: Nodes | None = None, given_up: Callable[[], bool] = lambda: False) -> None:
        """Touch every page, by several threads; for the arguments see `offload.memory.touching.touch`.

        Raises:
            OffloadError: The system does not have that much memory, or `given_up` says so.
        """
        if self.node is not None and self._near_cpus:  # not bound: pages lie where they are touched
            nodes = {self.node: self._near_cpus}
        touch(self.touch_part, self.nbytes, nodes, given_up)

    def touch_part(self, offset: int, nbytes: int) -> None:
        """Touch the pages of `nbytes` from `offset` (at a page) on this thread, without changing their content.

        Raises:
            OffloadError: The system does not have that much memory.
        """
        # By ctypes, which releases the GIL meanwhile, so that threads work side by side; mmap.madvise does not.
        libc = ctypes.CDLL(None, use_errno=True)
        length = round_up(nbytes, mmap.PAGESIZE)
        with cpu_affinity(self._near_cpus):  # of the node, if memory could not be bound to it; else none: any CPU
            result = libc.madvise(
                ctypes.c_void_p(self.address + offset), ctypes.c_size_t(length), ctypes.c_int(_MADV_POPULATE_WRITE)
            )
            if result == 0:
                return
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # a kernel without MADV_POPULATE_WRITE: write one byte of each page as it is
                first_bytes = self.numpy(offset, nbytes, np.uint8)[:: mmap.PAGESIZE]
                first_bytes |= np.uint8(0)
                return
        raise OffloadError(f"no memory for an arena of {self.nbytes} bytes: {os.strerror(code)}")
