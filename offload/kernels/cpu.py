"""The CPU's update kernel: worker threads of our own, running the widest instruction set that the CPU has.

Invariants: bit for bit what `offload.kernels.reference` defines, whatever the instruction set, the number of
threads, the cutting of work, and the caller's floating-point mode. Nothing is read or written twice.
Not done here: owning the memory that tables and addresses point at; ordering of updates that share memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntFlag
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from offload.dtypes import DtypeCode
from offload.errors import ConfigError, InternalError, SessionBrokenError, invariant
from offload.kernels.table import as_segment_rows
from offload.protocols import NORM_BLOCK_NUMEL, SEGMENT_DTYPE, Queue, Seal, SealedState

if TYPE_CHECKING:
    import numpy.typing as npt

_native: Any = import_module("offload._native")
invariant(SEGMENT_DTYPE.itemsize == _native.SEGMENT_BYTES, "SEGMENT_DTYPE is not the native Segment")


PREFETCH_SETTING = "OFFLOAD_PREFETCH_BYTES"
"""Environment variable: how many bytes ahead updates prefetch memory, instead of this processor's number in
csrc/kernels/prefetch.cpp. One number, or two: the second is for formats with scales. `bench/kernel.py --tune`
measures them."""


def prefetch_setting(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return how many bytes ahead updates are to prefetch, as `PREFETCH_SETTING` says; None if it is not set.

    Returns:
        Two distances: for formats without scales and for formats with scales. If the setting is one number, both are
        that number.

    Raises:
        ConfigError: They cannot be used.
    """
    setting = environ.get(PREFETCH_SETTING, "")
    if not setting:
        return None
    try:
        numbers = [int(each) for each in setting.split(",")]
    except ValueError:
        numbers = []  # which is refused below
    most = _native.MOST_PREFETCH_BYTES
    if len(numbers) not in (1, 2) or not all(0 <= number <= most for number in numbers):
        advice = f"give one number of bytes or two, such as 512 or 2048,512, each from 0 to {most}"
        raise ConfigError(PREFETCH_SETTING, setting, advice)
    return numbers[0], numbers[-1]


class StreamVariant(IntFlag):
    """How `CpuUpdateKernel.stream` moves bytes; combined by `|`."""

    PLAIN = 0
    WEIGHT_NONTEMPORAL = 1
    """Write the weight past the caches."""
    STATE_NONTEMPORAL = 2
    """Write the state past the caches."""
    TENSOR_BY_TENSOR = 4
    """4096 elements of one tensor, then of the next, instead of all side by side."""
    PREFETCH = 8
    """Side by side only: ask for data ahead of its use, as the update does."""


def instruction_sets() -> list[str]:
    """Return the instruction sets that this CPU runs, fastest last: "scalar", "avx2", "avx512"."""
    return list(_native.instruction_sets())


def norm_sq_at(addresses: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint64]) -> float:
    """Return the squared L2 norm of gradients from each parameter's block sums, in the order of parameters.

    It is infinite or NaN if a gradient has an element that is (or if the sum is beyond float64), and only then.

    Args:
        addresses: Where each parameter's block sums (float64) lie, in the order of parameters.
        counts: How many each has.
    """
    addresses = np.ascontiguousarray(addresses, np.uint64)
    counts = np.ascontiguousarray(counts, np.uint64)
    invariant(addresses.shape == counts.shape, "block sums with other numbers of addresses and counts")
    return float(_native.norm_sq(addresses.ctypes.data, counts.ctypes.data, addresses.size))


class CpuUpdateKernel:
    """Runs updates, and sums of squares, on worker threads that it owns. An `UpdateKernel`.

    `submit` and `close` may be called from any thread; so may `run` and `gradient_blocks`, which share the
    workers with submitted updates. Updates in flight at once must not share memory. Also a context manager.

    If `PREFETCH_SETTING` is set, making a kernel sets how far ahead all kernels of the process prefetch.

    Args:
        queue: Where submitted updates report, an `offload._native.CompletionQueue`. None if only the
            synchronous calls will be used.
        threads: Number of worker threads; None for one per CPU that this process may use.
        instruction_set: One of `instruction_sets()`; None for the fastest.

    Raises:
        ValueError: `threads` is below 1, or the CPU lacks the instruction set.
        ConfigError: `PREFETCH_SETTING` cannot be used.
    """

    def __init__(
        self, queue: Queue | None = None, threads: int | None = None, *, instruction_set: str | None = None
    ) -> None:
        if threads is None:
            threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if threads < 1:
            raise ValueError(f"threads: {threads} cannot be used; at least 1 is needed")
        if instruction_set is not None and instruction_set not in instruction_sets():
            raise ValueError(
                f"instruction_set: {instruction_set!r} cannot be used; this CPU has {instruction_sets()}"
            )
        prefetch_bytes = prefetch_setting()
        if prefetch_bytes is not None:
            _native.set_prefetch_bytes(*prefetch_bytes)
        self._can_submit = queue is not None
        self._closed = False
        # Native code always takes a queue; without `submit` nothing is reported to it. "" is the fastest set.
        self._native = _native.CpuKernels(
            _native.CompletionQueue() if queue is None else queue, threads, instruction_set or ""
        )

    @property
    def instruction_set(self) -> str:
        """Name of the instruction set in use."""
        return str(self._native.instruction_set)

    @property
    def threads(self) -> int:
        """Number of worker threads."""
        return int(self._native.threads)

    def submit(self, op: int, table: npt.NDArray[Any]) -> None:
        """Start updating the segments of `table`; completes on the queue as operation `op`.

        The table is copied; the memory it points at must live until the completion. The completion's `started_s` is
        when the first worker took the update up.

        Args:
            op: Comes back in the completion.
            table: From `offload.kernels.table`, shape [segments], contiguous. Segments must not overlap.

        Raises:
            InternalError: The table cannot be right, or the kernel was made without a queue. Nothing was
                started.
            SessionBrokenError: The kernel is closed, or belongs to the parent process.
        """
        invariant(self._can_submit, "an update was submitted to a kernel that has no queue")
        rows = as_segment_rows(table)
        self._call("submit", op, rows.ctypes.data, rows.size)

    def submit_sealed(self, op: int, table: npt.NDArray[Any], state: SealedState, expected: Seal | None) -> Seal:
        """Start an update, as `submit` does, that verifies the state's checksums first and makes new ones afterwards.

        Both are done block by block, while a block is in the cache for its update. A block that does not match
        `expected` is not updated, and the completion says `ERROR_CHECKSUM`, with (the tensor's number << 32 | the
        tile's) as its detail.

        Args:
            op: Comes back in the completion.
            table: As for `submit`; a row for each offset in `state`.
            state: Where the state lies.
            expected: The checksums that the last update of this subgroup has returned; None if memory need not be
                verified.

        Returns:
            The checksums of the new state; to be used once the update has ended well.

        Raises:
            InternalError: As `submit`.
            SessionBrokenError: As `submit`.
        """
        invariant(self._can_submit, "an update was submitted to a kernel that has no queue")
        rows = as_segment_rows(table)
        offsets = np.ascontiguousarray(state.offsets, np.uint64)
        invariant(offsets.size == rows.size, "a sealed update needs an offset for each segment")
        layout = offsets.ctypes.data, state.tensors, state.numel, state.tile_numel
        seal: Seal = self._call("submit_sealed", op, rows.ctypes.data, rows.size, *layout, expected)
        return seal

    def run(self, table: npt.NDArray[Any]) -> None:
        """Update the segments of `table` and return when they are done; the GIL is released.

        A table that is one piece of work (65536 elements or fewer) runs on the calling thread.

        Raises:
            InternalError, SessionBrokenError: As `submit` does.
        """
        rows = as_segment_rows(table)
        self._call("run", rows.ctypes.data, rows.size)

    def gradient_blocks(
        self,
        source_address: int,
        source_dtype: DtypeCode,
        numel: int,
        blocks_address: int,
        destination_address: int = 0,
        destination_dtype: DtypeCode = DtypeCode.NONE,
    ) -> int:
        """Write the sum of squares of each block of a gradient, and optionally copy the gradient, in one pass.

        A block is `NORM_BLOCK_NUMEL` elements, counted from the gradient's start. Synchronous; the GIL is released.
        65536 elements or fewer are done on the calling thread.

        Args:
            source_address: Address of the gradient, any alignment.
            source_dtype: Its element type.
            numel: Its elements.
            blocks_address: Address of float64, shape [ceil(numel / NORM_BLOCK_NUMEL)].
            destination_address: Where the gradient is copied to, 0 for nowhere. Must not overlap the source,
                unless it is the source.
            destination_dtype: The source's dtype, or FLOAT32 to widen.

        Returns:
            The fingerprint (see `fingerprints`) of the copy, or of the source if none is made.

        Raises:
            InternalError: The arguments cannot be right. Nothing was written.
            SessionBrokenError: The kernel is closed, or belongs to the parent process.
        """
        fingerprint: int = self._call(
            "gradient_blocks",
            source_address,
            int(source_dtype),
            numel,
            blocks_address,
            destination_address,
            int(destination_dtype),
        )
        return fingerprint

    def fingerprints(
        self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Return a fingerprint of 64 bits for each gradient, which changes when any of its bits does.

        It depends on every bit and on its place, and on nothing else: not on instruction set, threads or alignment.
        Two different gradients have the same one by chance only, once in about 2^64; `offload.kernels.reference`
        defines it. Synchronous; the GIL is released, and the memory is read once.

        Args:
            addresses: Where each gradient lies, at any alignment.
            sizes: Its bytes.

        Raises:
            InternalError: An address is null.
            SessionBrokenError: The kernel is closed, or belongs to the parent process.
        """
        addresses = np.ascontiguousarray(addresses, np.uint64)
        sizes = np.ascontiguousarray(sizes, np.uint64)
        invariant(addresses.shape == sizes.shape, "gradients with other numbers of addresses and sizes")
        result = np.empty(addresses.shape, np.uint64)
        self._call("fingerprints", addresses.ctypes.data, sizes.ctypes.data, addresses.size, result.ctypes.data)
        return result

    def add(self, rows: npt.NDArray[np.uint64], dtype: DtypeCode) -> None:
        """Add gradients to other gradients of the same dtype in place, as torch's `add_` does.

        A NaN comes out as a quiet one. Synchronous; the GIL is released.

        Args:
            rows: Rows of (address of the target, address of the source, elements), at any alignment. The source is
                added to the target. No target overlaps anything else.
            dtype: Of all elements.

        Raises:
            InternalError: The arguments cannot be right. Nothing was written.
            SessionBrokenError: The kernel is closed, or belongs to the parent process.
        """
        rows = np.ascontiguousarray(rows, np.uint64)
        invariant(rows.ndim == 2 and rows.shape[1] == 3, f"gradients to be added as a table of shape {rows.shape}")
        self._call("add", rows.ctypes.data, len(rows), int(dtype))

    def stream(self, table: npt.NDArray[Any], variant: StreamVariant) -> None:
        """Move the bytes that `run` would move, with next to no arithmetic, to measure what memory allows.

        Master and state are negated, 16-bit gradients are copied to 16-bit weights. Scales are left out, and so may
        be up to 63 elements at the end of a segment.

        Args:
            table: As for `run`; every segment with a 16-bit gradient and a 16-bit weight. With
                `WEIGHT_NONTEMPORAL` or `STATE_NONTEMPORAL`, tensors aligned to 64 bytes.
            variant: How to store.

        Raises:
            InternalError: The table cannot be right or cannot be streamed over.
        """
        rows = as_segment_rows(table)
        invariant(
            np.all(rows["weight"] != 0)
            and np.all(rows["state"] != 0)
            and np.all(rows["gradient_dtype"] != int(DtypeCode.FLOAT32)),
            "only segments with two state tensors and 16-bit gradients and weights can be streamed over",
        )
        if variant & (StreamVariant.WEIGHT_NONTEMPORAL | StreamVariant.STATE_NONTEMPORAL):
            aligned = all(np.all(rows[name] % 64 == 0) for name in ("master", "master_low", "state", "weight"))
            invariant(aligned, "non-temporal streams need tensors aligned to 64 bytes")
        self._call("stream", rows.ctypes.data, rows.size, int(variant))

    def close(self) -> None:
        """Finish what is in flight and end the threads; idempotent."""
        self._closed = True  # first: what another thread calls from here on is refused
        self._native.close()

    def __enter__(self) -> Self:
        """Return the kernel itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a native method; raise its ValueError (wrong arguments, our bug) and RuntimeError (closed) as ours."""
        if self._closed:
            raise SessionBrokenError("the update kernel is closed; make a new one")
        try:
            return getattr(self._native, method)(*arguments)
        except ValueError as error:
            raise InternalError(f"{method}: {error} (this is a bug in offload, please report it)") from error
        except RuntimeError as error:
            raise SessionBrokenError(f"{method}: {error}; make a new one") from error


def blocks_numel(numel: int) -> int:
    """Return how many block sums a gradient of `numel` elements has."""
    return -(-numel // NORM_BLOCK_NUMEL)
