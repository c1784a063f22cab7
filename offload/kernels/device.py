"""`DeviceKernel`: the interface of an accelerator's kernels, which enqueue work on the caller's stream; and checks.

Invariants: bit for bit what `offload.kernels.reference` defines.
Not done here: owning the memory that addresses point at, events, waiting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.errors import invariant
from offload.kernels.table import as_segment_rows
from offload.rules import UpdateRule

if TYPE_CHECKING:
    import numpy.typing as npt

_native: Any = import_module("offload._native")

SLOT_BYTES = np.where(ITEM_BYTES, ITEM_BYTES, 4)
"""Bytes of an element by `DtypeCode`; NONE counts as fp32: it stands for fp32 weights, which are their masters."""


class DeviceKernel(ABC):
    """Enqueues updates and the gathering of gradients on one device.

    Every call returns when its work is enqueued on the calling thread's current stream of the device. Work in flight
    at once, on several streams, must not share memory. Any thread may call. The kernel must live until its work has
    been done.
    """

    device: torch.device
    """The device whose memory tables and addresses point at."""

    def compile(self, rule: UpdateRule, kinds: Iterable[tuple[DtypeCode, DtypeCode, int]]) -> None:  # noqa: B027
        """Compile and load what updates and gradients need, so that no step waits for that; by default nothing.

        Args:
            rule: The update rule.
            kinds: Kinds of parameters: dtypes of gradient and weight, and the code of the state's format.
        """

    def send(self, table: npt.NDArray[Any]) -> Any:
        """Send the table of an update on the current stream to the device.

        The table is copied before this returns; the memory it points at must live until the stream has done the
        update. The update is fastest if all addresses are multiples of four elements. For formats with scales these
        are the addresses at which a segment's first block begins, up to 63 elements before the segment.

        Args:
            table: From `offload.kernels.table`, shape [segments], contiguous, in host memory. Its addresses are this
                device's, each a multiple of its element's size. Segments must not overlap.

        Returns:
            The argument for one call of `update`.

        Raises:
            InternalError: The table cannot be right. Nothing was enqueued.
        """
        table = as_segment_rows(table)
        problem = _native.check_table(table.ctypes.data, table.size)  # a text, empty if the table is right
        invariant(not problem, problem)
        return self._send(table)

    def update(self, sent: Any) -> None:
        """Enqueue the update of a table that was sent; nothing for None, a table that changes nothing."""
        if sent is not None:
            self._update(sent)

    def gather(
        self,
        source_address: int,
        source_dtype: DtypeCode,
        numel: int,
        blocks_address: int,
        destination_address: int = 0,
        destination_dtype: DtypeCode = DtypeCode.NONE,
        *,
        accumulate: bool = False,
    ) -> None:
        """Enqueue one pass over a gradient: sums of squares of its blocks, and its copy into or addition to a slot.

        A block is `NORM_BLOCK_NUMEL` elements. Its sum is infinite or NaN if, and only if, one of its elements is, so
        the sums are the overflow flag too. Added in order on the host (`offload.kernels.norm_sq_at`), they are the
        squared norm.

        Args:
            source_address: Address of the gradient on this device, a multiple of its element's size.
            source_dtype: Its element type.
            numel: Its elements.
            blocks_address: Address of float64, shape [ceil(numel / NORM_BLOCK_NUMEL)].
            destination_address: The slot, 0 for none. Must not overlap the source, unless it is the source.
            destination_dtype: The source's dtype, or FLOAT32 to widen.
            accumulate: Add to what the slot holds (`reference.accumulate`); the sums are those of the result.

        Raises:
            InternalError: The arguments cannot be right. Nothing was enqueued.
        """
        source_code, slot_code = int(source_dtype), int(destination_dtype)
        problem = _native.check_gradient_blocks(
            source_address, source_code, numel, blocks_address, destination_address, slot_code
        )
        invariant(not problem, problem)
        has_slot = destination_address not in (0, source_address)  # else there is nothing to copy
        invariant(has_slot or not accumulate, "a gradient is accumulated into a slot of its own")
        if numel == 0:  # there is no block, so no sum is written
            return
        if not has_slot:
            destination_address, slot_code = 0, int(DtypeCode.NONE)
        invariant(source_address % int(SLOT_BYTES[source_code]) == 0, "source is not aligned to its elements")
        invariant(destination_address % int(SLOT_BYTES[slot_code]) == 0, "destination is not aligned to its elements")
        self._gather(
            (source_address, source_code), numel, blocks_address, (destination_address, slot_code), accumulate
        )

    def copy_pieces(self, pieces: npt.NDArray[np.uint64]) -> None:
        """Enqueue copies of many pieces of the device's memory, bit for bit.

        Args:
            pieces: Rows of (target, source, bytes), all of them even. No target overlaps anything else.

        Raises:
            InternalError: The table cannot be right. Nothing was enqueued.
        """
        not_empty = pieces[pieces[:, 2] > 0]
        # Sizes are not 0 here, so a 0 is an address.
        invariant(bool(not_empty.all()), "a piece of memory at address 0")
        invariant(not (not_empty % np.uint64(2)).any(), "a piece of memory that is not made of 16-bit words")
        if len(not_empty):
            self._copy_pieces(not_empty)

    def sum_rows(self, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """Enqueue the sums of squares of many gradients' blocks; see `gather`.

        Args:
            dtype: Element type of all.
            rows: Of (address of a gradient, its elements, address of its blocks).

        Raises:
            InternalError: The table cannot be right. Nothing was enqueued.
        """
        not_empty = _checked_rows(dtype, rows)
        if len(not_empty):
            self._sum_rows(int(dtype), not_empty)

    def fingerprint_rows(self, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """Enqueue the fingerprints of many gradients, in parts; see `CpuUpdateKernel.fingerprints`.

        A gradient has one part of 64 bits for each of its blocks of `NORM_BLOCK_NUMEL` elements. The sum of its parts
        modulo 2^64 is its fingerprint.

        Args:
            dtype: Element type of all.
            rows: Of (address of a gradient, its elements, address of its parts).

        Raises:
            InternalError: The table cannot be right. Nothing was enqueued.
        """
        not_empty = _checked_rows(dtype, rows)
        if len(not_empty):
            self._fingerprint_rows(int(dtype), not_empty)

    # What subclasses implement; arguments have been checked

    @abstractmethod
    def _send(self, table: npt.NDArray[Any]) -> Any:
        """Send a table; return the argument for `_update`, or None if there is nothing to update."""

    @abstractmethod
    def _update(self, sent: Any) -> None:
        """Enqueue the update of a table that was sent."""

    @abstractmethod
    def _gather(
        self, source: tuple[int, int], numel: int, blocks: int, slot: tuple[int, int], accumulate: bool
    ) -> None:
        """Enqueue the work of `gather`; source and slot are (address, `DtypeCode`), for no slot (0, NONE)."""

    @abstractmethod
    def _copy_pieces(self, pieces: npt.NDArray[np.uint64]) -> None:
        """Enqueue copies of pieces that are not empty."""

    @abstractmethod
    def _sum_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        """Enqueue sums of gradients that have elements."""

    @abstractmethod
    def _fingerprint_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        """Enqueue fingerprints, in parts, of gradients that have elements."""


def _checked_rows(dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the rows of gradients that have elements, after checking them.

    A row is (address of a gradient, its elements, address of what is written: 8 bytes for each block of the norm).
    """
    not_empty = rows[rows[:, 1] > 0]
    invariant(dtype is not DtypeCode.NONE, "gradients without a dtype")
    # Numbers of elements are not 0 here, so a 0 is an address.
    invariant(bool(not_empty.all()), "a gradient, or its sums, at address 0")
    alignments = np.array([SLOT_BYTES[int(dtype)], 1, 8], np.uint64)  # of gradient address, elements, sums' address
    is_aligned = not_empty % alignments == 0
    invariant(bool(is_aligned.all()), "a gradient, or its sums, not aligned to its elements")
    return not_empty
