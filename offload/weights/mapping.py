"""A file with weights, mapped into memory, and calls that have its pages read before weights are used.

The file has no name, so nothing of it is left however the process ends. It has no holes, so a full disk is noticed
when the file is made. The kernel (Linux) decides which of its pages are in memory. This module tells it which pages
come next, and which are not needed for now. It has pages read by a call that can fail: else an error of the drive
would be a signal (SIGBUS), at any instruction that reads a weight.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from offload import metrics
from offload.errors import ConfigError, TierError, TierFullError
from offload.kernels.table import weights_at
from offload.layout import round_up
from offload.units import format_bytes

PAGE_BYTES = mmap.PAGESIZE
ALIGNMENT_BYTES = 64
"""Each weight begins at a multiple of this in its file."""
FOLIO_BYTES = 2 << 20
"""Most bytes that the kernel writes as a unit (a folio). A unit that the next range shares is not written yet."""

# Advice for madvise, from linux/mman.h.
_COLD = 20  # reclaim these pages first
_POPULATE_READ = 22  # read them into memory and map them now
_POPULATE_WRITE = 23  # the same, to be written to
_SYNC_WRITE = 2  # of sync_file_range: begin to write, without waiting

UPDATING = b"(offload-update"
"""How `/proc/.../stat` of an update thread begins after its number; `csrc/kernels/worker_pool.cpp` names threads."""

VISITS_BEFORE_RELEASE = 2
"""How many visits later a subgroup's weights are let go, as that many updates are under way at once."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_files: list[weakref.ref[MappedFile]] = []
"""All files that were made, also those that are gone; only ever added to, as several threads read it."""


class MappedFile(mmap.mmap):
    """A file without a name, all of it mapped, shared and writable.

    It lives as long as any tensor that lies in it, as tensors keep this mapping. A forked child process sees the same
    bytes, and its writes change them for both.

    Args:
        folder: An existing folder on the drive.
        nbytes: Its size; room for it is reserved.

    Attributes:
        address: Its first address in memory.
        descriptor: The file's.
        folder: The folder in whose file system it lies.
        nbytes: Its size.

    Raises:
        ConfigError: The folder cannot be used.
        TierFullError: There is no room.
    """

    address: int
    descriptor: int
    folder: str
    nbytes: int

    def __new__(cls, folder: str | os.PathLike[str], nbytes: int) -> Self:
        """Make the file, and map it: not in `__init__`, as a mapping's arguments are those of `mmap.__new__`."""
        place = os.fspath(folder)
        try:
            descriptor = _open_nameless(place)
        except OSError as error:
            raise ConfigError("path", place, f"give a folder that can be written to: {error.strerror}") from error
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, descriptor)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
            except OSError as error:
                kind = TierFullError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else TierError
                what = f"{format_bytes(nbytes)} of weights"
                raise kind("reserve", tier="file", path=place, errno=error.errno, detail=what) from error
            try:
                self = super().__new__(cls, descriptor, nbytes, mmap.MAP_SHARED)
            except OSError as error:
                raise TierError("map", tier="file", path=place, errno=error.errno) from error
            # No error: the descriptor is closed with this mapping, and not at the end of the block.
            weakref.finalize(self, opened.pop_all().close)
        self.folder, self.nbytes, self.descriptor = place, nbytes, descriptor
        self.address = np.frombuffer(self, np.uint8).ctypes.data
        _files.append(weakref.ref(self))
        return self

    def holds(self, address: int) -> bool:
        """Return whether an address lies in this mapping."""
        return self.address <= address < self.address + self.nbytes

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that lies at an offset; it keeps this mapping alive."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self, dtype=dtype, count=numel, offset=offset)

    def fault_in(self, offset: int, nbytes: int, *, to_write: bool = False) -> None:
        """Wait until a range is in memory, so that using it now neither waits nor fails.

        Args:
            offset: Where it begins in the file, in bytes.
            nbytes: Its size.
            to_write: Whether it is about to be written to.

        Raises:
            TierError: It cannot be read, or no block can be written.
        """
        code = self._advise(offset, nbytes, _POPULATE_WRITE if to_write else _POPULATE_READ)
        if code == errno.EINVAL:  # Linux before 5.14 does not know this advice
            code = self._read(offset, nbytes)
        if code == errno.EFAULT:  # the drive has failed: an access to this memory would have raised SIGBUS
            code = errno.EIO
        if code:
            detail = "weights that are mapped from there"
            raise TierError("read", tier="file", path=self.folder, offset=offset, errno=code, detail=detail)

    def advise_unneeded(self, offset: int, nbytes: int, *, was_written: bool = False) -> None:
        """Say that a range is not needed for now: the kernel then reclaims its memory first when it needs some.

        Errors are ignored: without the advice the range is as readable as with it.

        Args:
            offset: Where it begins.
            nbytes: Its size.
            was_written: Whether the range was written to. Then begin to write it to the drive, as its memory can be
                reclaimed only after that. The end that shares a unit of `FOLIO_BYTES` with the next range is left to
                be written with that one.
        """
        if was_written:
            start = offset // FOLIO_BYTES * FOLIO_BYTES
            end = (offset + nbytes) // FOLIO_BYTES * FOLIO_BYTES
            if start < end:
                _libc.sync_file_range(self.descriptor, start, end - start, _SYNC_WRITE)
        self._advise(offset, nbytes, _COLD)

    def _advise(self, offset: int, nbytes: int, advice: int) -> int:
        """Call madvise on the pages of a range; return 0, or an errno."""
        start, end = _page_bounds(offset, nbytes)
        while _libc.madvise(self.address + start, min(end, self.nbytes) - start, advice) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EINTR, errno.EAGAIN):
                return code
        return 0

    def _read(self, offset: int, nbytes: int) -> int:
        """Read a range of the file by plain reads, which leave it in the page cache; return 0, or an errno."""
        end = offset + nbytes
        buffer = bytearray(min(nbytes, 1 << 20))  # its content is thrown away
        try:
            for start in range(offset, end, len(buffer)):
                os.preadv(self.descriptor, [memoryview(buffer)[: end - start]], start)
        except OSError as error:
            return error.errno or errno.EIO
        return 0


class LayerReadAhead:
    """Reads the layers of a model whose weights lie in a file: each at its turn, and the next one ahead.

    The layer expected next is the one that followed the same two layers last time: after 1 and 2 it is 3 in forward,
    after 3 and 2 it is 1 in backward. So passes may come in any order. If two layers have not followed each other
    before, it is the neighbour in the direction of the pass.

    Args:
        file: The file.
        layers: For each layer the ranges of its weights in the file: offset and size.
    """

    def __init__(self, file: MappedFile, layers: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._file = file
        self._layers = layers
        self._thread = ReadAheadThread()
        self._last = -1  # the layer whose turn it is; -1 for none
        self._before = -1  # the one before it
        self._following: dict[tuple[int, int], int] = {}  # by two layers, the one that came after them last time

    def begin(self, number: int) -> None:
        """Begin a layer's turn: wait until it is in memory, read ahead the next one, and let go of the one before.

        Raises:
            TierError: The layer cannot be read.
        """
        last = self._last
        if number != last:  # else its turn goes on
            self._following[self._before, last] = number
            self._before = last
            self._last = number
        neighbour = number + 1 if number > self._before else number - 1
        coming = self._following.get((self._before, number), neighbour)
        for offset, nbytes in self._layers[number]:
            self._file.fault_in(offset, nbytes)
        if 0 <= coming < len(self._layers) and coming != number:
            self._thread.read_ahead(self._file, self._layers[coming])
        if last not in (-1, number, coming):  # it is not used again soon
            for offset, nbytes in self._layers[last]:
                self._file.advise_unneeded(offset, nbytes)


class ReadAheadThread:
    """A thread that reads ahead. An error there is ignored, as it comes again when the range is used.

    It faults pages in. The kernel's hint `MADV_WILLNEED` needs no thread, but reads into single pages, each of which
    costs again when it is mapped, written to or let go of. That takes 8 times the processor time (Linux 6.18,
    512 MiB read to be written: 0.53 s against 0.07 s).
    """

    _pid = 0  # of the process that has the thread

    def read_ahead(self, file: MappedFile, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask the thread to read ranges of a file; an earlier request that it has not begun is dropped."""
        if self._pid != os.getpid():  # a forked child does not have its parent's thread
            self._pid = os.getpid()
            self._requests = SimpleQueue[Any]()
            threading.Thread(
                target=_serve_read_ahead, args=(self._requests,), name="offload-weights", daemon=True
            ).start()
            end = weakref.finalize(self, self._requests.put, None)  # ends the thread with this object
            end.atexit = False  # the end of the process ends it anyway
        self._requests.put((file, ranges))


def _serve_read_ahead(requests: SimpleQueue[Any]) -> None:
    """Read the ranges that requests ask for, until a request is None; the read-ahead thread's work."""
    while (request := _wait_for_newest_request(requests)) is not None:
        file, ranges = request
        with contextlib.suppress(TierError):
            for offset, nbytes in ranges:
                file.fault_in(offset, nbytes)
        del request, file  # so that the file is not kept alive while this waits


def _wait_for_newest_request(requests: SimpleQueue[Any]) -> Any:
    """Wait for a request, drop all but the newest one, and return that; None if one of them is None."""
    request = requests.get()
    with contextlib.suppress(Empty):  # which ends the loop: `request` is the newest one then
        while request is not None:
            request = requests.get_nowait()
    return request


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """The weights in mapped files that an update writes to.

    Attributes:
        ranges: File, offset and bytes of each range.
    """

    ranges: Sequence[tuple[MappedFile, int, int]]

    def fault_in(self) -> None:
        """Wait until all ranges are in memory, to be written to.

        Raises:
            TierError: They cannot be read.
        """
        for file, offset, nbytes in self.ranges:
            file.fault_in(offset, nbytes, to_write=True)

    def start_write_back(self) -> None:
        """Begin to write all ranges, and mark their memory as the first to be reclaimed."""
        for file, offset, nbytes in self.ranges:
            file.advise_unneeded(offset, nbytes, was_written=True)


class MappedWeightsWindow:
    """Reads the weights of one update after another, and lets go of them `VISITS_BEFORE_RELEASE` updates later.

    It does not hear when an update has ended, so it counts those that have begun since. It is for one thread.
    """

    def __init__(self) -> None:
        self._not_released: deque[MappedWeights] = deque()  # of the last updates, oldest first

    def begin(self, visit: MappedWeights) -> None:
        """Let go of an earlier update's weights, and wait until those of the next one, `visit`, are in memory.

        Raises:
            TierError: They cannot be read.
        """
        if len(self._not_released) == VISITS_BEFORE_RELEASE:
            self._not_released.popleft().start_write_back()
        visit.fault_in()
        self._not_released.append(visit)

    def metrics(self) -> dict[str, float]:
        """Return how often this process's updates have waited for a drive (major faults); nothing before a visit."""
        return {metrics.WEIGHT_FAULTS: _major_faults(UPDATING)} if self._not_released else {}


def mapped_weights_of(table: npt.NDArray[Any]) -> MappedWeights | None:
    """Return the weights of an update that lie in mapped files; None if none does, as in most programs.

    Args:
        table: The update's: rows of `offload.protocols.SEGMENT_DTYPE`.
    """
    files = _living_files()
    if not files:
        return None
    addresses, sizes = weights_at(table)
    ranges: list[tuple[MappedFile, int, int]] = []
    for file in files:
        offsets = addresses - np.uint64(file.address)  # unsigned: huge for addresses before the file
        inside = np.flatnonzero((offsets < np.uint64(file.nbytes)) & (sizes > 0))
        ranges += [(file, *each) for each in joined((int(offsets[i]), int(sizes[i])) for i in inside)]
    return MappedWeights(ranges) if ranges else None


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (offset, bytes), sorted, and joined where they are at most a page apart: so calls are fewer."""
    runs: list[tuple[int, int]] = []
    for offset, nbytes in sorted(ranges):
        begin, size = runs[-1] if runs else (0, 0)
        if runs and offset <= begin + size + PAGE_BYTES:
            runs[-1] = begin, max(offset + nbytes - begin, size)
        else:
            runs.append((offset, nbytes))
    return runs


def is_mapped(address: int) -> bool:
    """Return whether an address lies in a mapped file."""
    return any(file.holds(address) for file in _living_files())


def _major_faults(name: bytes) -> int:
    """Return how many major page faults (accesses that wait for a drive) threads of a name of this process had.

    `name` begins with the parenthesis that stands before it in `/proc/.../stat`.
    """
    total = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            with open(f"/proc/self/task/{task}/stat", "rb") as file:
                head, _, fields = file.read().rpartition(b")")  # the name stands in parentheses, and may have spaces
            if head.endswith(name):
                total += int(fields.split()[9])  # majflt: field 12 of proc(5), counted here from field 3
    return total


def _living_files() -> list[MappedFile]:
    """Return the mapped files that are still in use; copies the list first, as other threads may add to it."""
    return [file for reference in [*_files] if (file := reference()) is not None]


def up(nbytes: int, unit: int = ALIGNMENT_BYTES) -> int:
    """Round up to a multiple of `unit`."""
    return round_up(nbytes, unit)


def _page_bounds(offset: int, nbytes: int) -> tuple[int, int]:
    """Return begin and end, in bytes, of the whole pages that hold a range."""
    return offset // PAGE_BYTES * PAGE_BYTES, up(offset + nbytes, PAGE_BYTES)


def _open_nameless(folder: str) -> int:
    """Return a descriptor of a new file without a name; raises `OSError` if the folder cannot have one."""
    flags = os.O_RDWR | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # not every file system has O_TMPFILE: then a file is made, and unlinked
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    descriptor, name = tempfile.mkstemp(prefix="offload-weights-", dir=folder)
    os.unlink(name)
    return descriptor
