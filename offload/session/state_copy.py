"""Memory for state that is handed out: ordinary memory for little state, a mapped file without a name for more.

The kernel writes such a file's pages to disk and drops them, so a state dict of any size takes hardly any memory.
State is written to the file by system calls and not through the mapping: if the disk fails, that is an error then, no
SIGBUS. Writes of users to the tensors go to the file, too, until the process forks. From then on the mapping is
private in parent and child: pages that one of them writes become its own memory, which the other does not see.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import IO

import numpy as np
import torch

from offload.checkpoint.reader import PIECE_NUMEL
from offload.config import OffloadConfig
from offload.errors import ConfigError, InfeasiblePlanError, TierError, TierFullError
from offload.layout import round_up
from offload.memory.arenas import available_bytes
from offload.plan import Plan, Rates
from offload.protocols import Tier
from offload.tiers import innermost
from offload.tiers.filesystem import (
    MEMORY_FILE_SYSTEMS,
    NETWORK_FILE_SYSTEMS,
    UNLIMITED_BYTES,
    file_system,
    room_bytes,
)

log = logging.getLogger("offload")

ALIGNMENT = 64
"""Of a tensor in a file, in bytes."""

NO_DISKS = MEMORY_FILE_SYSTEMS | NETWORK_FILE_SYSTEMS
"""Types of file systems that are memory, or on which a file cannot be without a name."""


_FIXED, _NO_RESERVE = 0x10, 0x4000  # Linux's MAP_FIXED (replace the mapping at the address) and MAP_NORESERVE


class _Pages(mmap.mmap):
    """A mapping of a file, shared with it until the process is about to fork."""

    descriptor: int
    """A descriptor of the file for `make_private`: a duplicate, as `mmap` does not tell the one that it keeps."""

    def make_private(self) -> None:
        """Map the file anew at the same address, privately: no write of this process reaches file or child any more.

        Python's `mmap` cannot map at a given address, so libc's is called: with MAP_FIXED it replaces the old
        mapping, and tensors stay valid. A failure is only logged: a hook before a fork cannot raise.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        flags = mmap.MAP_PRIVATE | _FIXED | _NO_RESERVE
        mapped = libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(len(self)),
            ctypes.c_int(mmap.PROT_READ | mmap.PROT_WRITE),
            ctypes.c_int(flags),
            ctypes.c_int(self.descriptor),
            ctypes.c_long(0),  # offset in the file
        )
        if mapped != address:
            log.warning("a forked child shares a state dict with its parent: %s", os.strerror(ctypes.get_errno()))


_shared: weakref.WeakSet[_Pages] = weakref.WeakSet()  # with their files: `_make_all_private` ends that


def _make_all_private() -> None:
    """Make all shared mappings private, before each fork of this process."""
    while _shared:
        _shared.pop().make_private()


os.register_at_fork(before=_make_all_private)


class StateCopy:
    """New fp32 tensors that are filled piece by piece; zeros where nothing has been written.

    Args:
        numels: Elements of each.
        free_bytes_by_directory: Directories on disks, the best first, and the bytes that each has room for.
        large_bytes: Copies of more bytes lie in a file there.

    Attributes:
        tensors: Flat, each with a storage of its own.

    Raises:
        InfeasiblePlanError: Neither one of these disks nor memory has room; nothing was allocated.
    """

    def __init__(self, numels: Sequence[int], free_bytes_by_directory: Mapping[str, int], large_bytes: int) -> None:
        sizes = [numel * torch.float32.itemsize for numel in numels]
        self._offsets = list[int]()  # of the tensors in the file
        needed_bytes = 0
        for size in sizes:
            self._offsets.append(needed_bytes)
            needed_bytes += round_up(size, ALIGNMENT)
        self._file: IO[bytes] | None = None  # None if the copy lies in memory
        if needed_bytes > large_bytes:
            self._directory, self._file = _make_file(needed_bytes, free_bytes_by_directory, left_bytes=large_bytes)
        if self._file is None:
            self.tensors = [torch.zeros(numel, dtype=torch.float32, device="cpu") for numel in numels]
            return
        # The mapping lasts as long as a tensor in it, and so does its own descriptor; `close` ends only `_file`.
        pages = _Pages(self._file.fileno(), needed_bytes)
        pages.descriptor = os.dup(self._file.fileno())
        weakref.finalize(pages, os.close, pages.descriptor)
        _shared.add(pages)
        memory = np.frombuffer(pages, np.uint8)
        self.tensors = [
            torch.from_numpy(memory[offset : offset + size]).view(torch.float32)
            for offset, size in zip(self._offsets, sizes, strict=True)
        ]

    def write(self, number: int, start: int, values: torch.Tensor) -> None:
        """Copy values, flat and fp32 in host memory, to a tensor's elements from `start` on.

        Raises:
            TierError: The disk has failed.
        """
        if self._file is None:
            self.tensors[number][start : start + values.numel()] = values
            return
        unwritten = memoryview(values.numpy().view(np.uint8).data)
        offset = self._offsets[number] + start * values.itemsize
        try:
            while unwritten:
                count = os.pwrite(self._file.fileno(), unwritten, offset)
                unwritten, offset = unwritten[count:], offset + count
        except OSError as cause:
            error = TierFullError if cause.errno in (errno.ENOSPC, errno.EDQUOT) else TierError
            detail = "a copy of the state, which is whole where it was"
            raise error("write", tier="file", path=self._directory, errno=cause.errno, detail=detail) from cause

    def close(self) -> None:
        """End writing; the tensors, and the mapping that they lie in, stay."""
        if self._file is not None:
            self._file.close()


def _make_file(
    nbytes: int, free_bytes_by_directory: Mapping[str, int], left_bytes: int
) -> tuple[str, IO[bytes] | None]:
    """Return the first directory with room, and a new file of `nbytes` there; "" and None if only memory has room.

    Memory counts as having room if a copy in it would leave `left_bytes` free.

    Raises:
        InfeasiblePlanError: Nothing has room.
    """
    offers = {}
    for directory, free_bytes in free_bytes_by_directory.items():
        offers[directory] = free_bytes
        if free_bytes < nbytes:
            continue
        with contextlib.ExitStack() as close_on_error:
            try:
                file = close_on_error.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0))
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as cause:  # somebody else was faster, or there is a quota
                log.info("no file of %d bytes in %s: %s", nbytes, directory, cause)
                offers[directory] = 0
            else:
                close_on_error.pop_all()
                return directory, file
    offers["host memory"] = max(0, available_bytes() - left_bytes)
    if nbytes > offers["host memory"]:
        advice = "free some, or set TMPDIR to a directory on a disk with more; save_checkpoint needs none of it"
        raise InfeasiblePlanError("a copy of the state", nbytes, offers, advice)
    log.info("no disk has room for a copy of the state (%d bytes): it is in memory", nbytes)
    return "", None


def free_bytes_beside(config: OffloadConfig, plan: Plan, rates: Rates, tiers: Sequence[Tier]) -> dict[str, int]:
    """Return the directories for files of a session, with the bytes that each has room for: paths first, then TMPDIR.

    Space that the plan still needs on a disk, for tiles and checkpoints that are not allocated yet, is not counted.
    The arguments are the session's; `tiers` are those of its paths.
    """
    planned_bytes = plan.storage_bytes + (plan.checkpoint_bytes if plan.has_room_for_checkpoints else 0)
    most_bytes: dict[str, int] = {}  # by directory
    missing_bytes = Counter[int]()  # what the plan still needs, by disk
    for path, tier, share in zip(config.path_configs, tiers, plan.path_shares(rates), strict=True):
        data_path = getattr(innermost(tier), "data_path", None)
        if data_path is None:  # an object store
            continue
        directory = os.path.dirname(os.path.dirname(data_path))  # the path, in which the store is a directory
        with contextlib.suppress(OSError):  # if the directory was deleted, updates go on in the open files
            status = os.stat(data_path)
            allocated_bytes = status.st_blocks * 512  # the unit of st_blocks, whatever the disk
            missing_bytes[status.st_dev] += max(0, int(planned_bytes * share) - allocated_bytes)
            limit_bytes = UNLIMITED_BYTES if path.max_bytes is None else path.max_bytes - allocated_bytes
            most_bytes[directory] = limit_bytes
    with contextlib.suppress(OSError):  # there is no temporary directory
        most_bytes.setdefault(tempfile.gettempdir(), UNLIMITED_BYTES)
    free_bytes = {}
    for directory, most in most_bytes.items():
        with contextlib.suppress(OSError):
            if file_system(directory) not in NO_DISKS:
                free = room_bytes(os.statvfs(directory)) - missing_bytes[os.stat(directory).st_dev]
                free_bytes[directory] = max(0, min(most, free))
    return free_bytes


def copy_run(source: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Copy elements of a tensor, in row-major order from `start` on, to the flat `out` until it is full.

    No other copy is made, as `reshape(-1)` of a tensor that is not contiguous would. Of such a tensor the rows
    (`source[index]`) that are wanted whole are copied at once; of a row that is wanted in part, the part is copied by
    a recursive call.
    """
    if source.is_contiguous():
        out.copy_(source.view(-1)[start : start + out.numel()])
        return
    row_numel, done = source[0].numel(), 0
    while done < out.numel():
        index, offset = divmod(start + done, row_numel)  # the row that comes next, and the first element of it
        whole_rows = 0 if offset else (out.numel() - done) // row_numel
        if whole_rows:
            target = out[done : done + whole_rows * row_numel]
            target.view(whole_rows, *source.shape[1:]).copy_(source[index : index + whole_rows])
        else:
            target = out[done : done + row_numel - offset]
            copy_run(source[index], offset, target)
        done += target.numel()


def refuse_uncopyable(tensor: object, what: str) -> None:
    """Raise `ConfigError` unless `tensor` is a dense tensor whose elements can be copied as real numbers.

    Called before anything is copied. One element is copied as a trial, which waits for a GPU's work on the tensor.
    `what` is the tensor's name, for the error.
    """
    try:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("it is no tensor")
        if tensor.layout != torch.strided:
            raise TypeError("it is not dense")
        if tensor.is_complex():
            raise TypeError("it is complex")
        if tensor.numel():
            torch.empty((), dtype=torch.float32, device="cpu").copy_(tensor.detach()[(0,) * tensor.dim()])
    except (RuntimeError, TypeError, NotImplementedError) as cause:
        details = f" ({tensor.dtype}, {tensor.layout}, {tensor.device})" if isinstance(tensor, torch.Tensor) else ""
        value = f"{type(tensor).__name__}{details}"
        raise ConfigError(what, value, f"it must be a dense tensor of numbers ({cause})") from cause


def refuse_negative(tensor: torch.Tensor, what: str) -> None:
    """Raise `ConfigError` if an element is negative; NaN is not."""
    piece = torch.empty(min(PIECE_NUMEL, tensor.numel()), dtype=torch.float32, device="cpu")
    for start in range(0, tensor.numel(), PIECE_NUMEL):
        values = piece[: tensor.numel() - start]
        copy_run(tensor, start, values)
        if bool((values < 0).any()):
            raise ConfigError(what, float(values[values < 0].min()), "give no negative ones")
