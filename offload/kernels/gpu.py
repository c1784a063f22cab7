"""The GPU's update kernel: what `CpuUpdateKernel` does, on a CUDA device, enqueued on the caller's stream.

Invariants: bit for bit what `offload.kernels.reference` defines; see `offload.kernels.triton_kernels` for what fixes
each rounding. State, gradient and weight are read and written once, in their own dtypes, where they lie.
Not done here: owning the memory that addresses point at, events, waiting.

Triton comes with torch's CUDA builds and is imported when a kernel is made. Without a GPU, device "cpu" runs the same
kernels through Triton's interpreter, if `TRITON_INTERPRET=1` was in the environment before Triton was imported: for
tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.errors import ConfigError, invariant
from offload.kernels.cpu import blocks_numel
from offload.kernels.table import checked
from offload.protocols import BLOCK_NUMEL as SHARED_NUMEL
from offload.protocols import NORM_BLOCK_NUMEL, SEGMENT_DTYPE, SegmentFlag, StateFormat
from offload.rules import RULES, UpdateRule

if TYPE_CHECKING:
    import numpy.typing as npt

_native: Any = import_module("offload._native")

BLOCK_NUMEL = 1024
"""Elements that one program of the update works on."""

COPY_BLOCK_BYTES = 4096
"""Bytes that one program of a copy of pieces copies."""

UPDATE_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
GATHER_OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
COPY_OPTIONS: dict[str, Any] = {"num_warps": 4}
"""How the kernels are compiled: without fused multiply-add, which rounds once where the definition rounds twice."""

_ITEM_BYTES = np.where(ITEM_BYTES, ITEM_BYTES, 4)  # a segment without a weight of its own has its master
_STATE_BYTES = np.zeros(len(StateFormat), np.uint64)
_STATE_BYTES[[StateFormat.EXACT, StateFormat.COMPACT16, StateFormat.COMPACT8]] = 4, 2, 1
_SOME_ADDRESS = 1 << 40  # any that takes 64 bits: integers are compiled for by their size
_TOUCHING = int(SegmentFlag.ACTIVE | SegmentFlag.LOAD_MASTER | SegmentFlag.ZERO_STATE)
_STATES = {rule.code: len(rule.state) for rule in RULES.values()}


class GpuUpdateKernel:
    """Enqueues updates and the gathering of gradients on one CUDA device.

    Every call returns when its work is enqueued on the calling thread's current stream of the device. What is in
    flight at once, on several streams, must not share memory. Any thread may call. The first call with a new
    combination of dtypes compiles for about a second (Triton keeps the result on disk).

    Args:
        device: A CUDA device, None for the current one; or "cpu" for Triton's interpreter.

    Raises:
        ConfigError: There is no such device, or no Triton.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        chosen = torch.device("cuda" if device is None else device)
        if chosen.type not in ("cuda", "cpu"):
            raise ConfigError("device", str(chosen), "use a CUDA device")
        if chosen.type == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError("device", str(chosen), "torch sees no CUDA device")
            count = torch.cuda.device_count()
            index = torch.cuda.current_device() if chosen.index is None else chosen.index
            if not 0 <= index < count:
                raise ConfigError("device", str(chosen), f"torch sees {count} CUDA devices")
            chosen = torch.device("cuda", index)
        try:
            self._kernels: Any = import_module("offload.kernels.triton_kernels")
        except ImportError as error:
            advice = f"install triton, which comes with torch's CUDA builds ({error})"
            raise ConfigError("device", str(chosen), advice) from error
        compiled = isinstance(self._kernels.update, self._kernels.triton.JITFunction)
        if compiled is not (chosen.type == "cuda"):
            wanted = "unset" if chosen.type == "cuda" else "set to 1"
            raise ConfigError("device", str(chosen), f"TRITON_INTERPRET must be {wanted} before Triton is imported")
        if compiled:
            try:
                self._kernels.triton.runtime.driver.active  # noqa: B018 (makes it, with a C compiler)
            except Exception as error:
                advice = f"Triton cannot use it (it needs a C compiler and Python's headers): {error}"
                raise ConfigError("device", str(chosen), advice) from error
        self.device = chosen
        """Where the memory lies that tables and addresses point at."""
        streams: Any = torch.cuda
        self._uploads: Any = streams.Stream(chosen) if chosen.type == "cuda" else None

    def compile(self, rule: UpdateRule, kinds: Iterable[tuple[DtypeCode, DtypeCode, StateFormat]]) -> None:
        """Compile what aligned gradients and weights need, so that nothing waits for that later.

        Args:
            rule: The update rule.
            kinds: Of parameters: dtypes of the gradient and of the weight, and how the state is stored.
        """
        with self._current():
            self._kernels.copy_pieces.warmup(
                torch.int64, torch.int32, BLOCK=COPY_BLOCK_BYTES, grid=(1,), **COPY_OPTIONS
            )
            for gradient, weight, state_format in kinds:
                self._kernels.update.warmup(
                    torch.int64,
                    torch.int32,
                    0,
                    RULE=rule.code,
                    STATES=len(rule.state),
                    GRADIENT=int(gradient),
                    WEIGHT=int(weight) if weight is not DtypeCode.FLOAT32 else int(DtypeCode.NONE),
                    ALIGNED=True,
                    STATE_FORMAT=int(state_format),
                    BLOCK=BLOCK_NUMEL,
                    grid=(1,),
                    **UPDATE_OPTIONS,
                )
                self._kernels.gather_rows.warmup(
                    torch.int64, torch.int32, SOURCE=int(gradient), grid=(1,), **GATHER_OPTIONS
                )
                for adds in (False, True):
                    self._kernels.gather.warmup(
                        _SOME_ADDRESS,
                        BLOCK_NUMEL,
                        _SOME_ADDRESS,
                        _SOME_ADDRESS if adds else 0,
                        SOURCE=int(gradient),
                        DESTINATION=int(gradient) if adds else int(DtypeCode.NONE),
                        ACCUMULATE=adds,
                        ALIGNED=True,
                        grid=(1,),
                        **GATHER_OPTIONS,
                    )

    def update(self, table: npt.NDArray[Any]) -> None:
        """Enqueue the update of the segments of `table`, a launch for each combination of dtypes and format.

        The table is copied before this returns; the memory that it points at must live until the stream has come to
        the update's end. Fastest where addresses are multiples of four elements; in `COMPACT8`, where those would be
        that the elements before a segment's in its first block had.

        Args:
            table: From `offload.kernels.table`, shape [segments], contiguous, in host memory. Its addresses are this
                device's, each a multiple of its element's size. Segments must not overlap.

        Raises:
            InternalError: The table cannot be right. Nothing was enqueued.
        """
        table = checked(table)
        problem = _native.check_table(table.ctypes.data, table.size)
        invariant(not problem, problem)
        touched = np.flatnonzero((table["numel"] > 0) & (table["flags"] & _TOUCHING != 0))
        if not touched.size:
            return
        used = table[touched]
        active = used["flags"] & int(SegmentFlag.ACTIVE) != 0
        gradients = np.where(active, used["gradient_dtype"], int(DtypeCode.NONE))
        weights = np.where(used["weight"] != 0, used["weight_dtype"], int(DtypeCode.NONE))
        odd = touched[active & (used["gradient"] % _ITEM_BYTES[gradients] != 0)]
        invariant(not odd.size, f"segment {odd[:1].tolist()}: gradient is not aligned to its elements")

        in_blocks = used["state_format"] == int(StateFormat.COMPACT8)
        before = np.where(in_blocks, used["first_index"], np.uint64(0)) % np.uint64(SHARED_NUMEL)
        of_master = np.where(in_blocks & (used["weight"] != 0), np.uint64(2), np.uint64(4))
        of_weight, of_state = _ITEM_BYTES[weights], _STATE_BYTES[used["state_format"]]
        aligned = ~active | _aligned(used["gradient"], before, _ITEM_BYTES[gradients])
        for addresses, items in (
            (used["weight"], of_weight),
            (used["new_weight"], of_weight),
            (used["master"], of_master),
            (used["new_master"], of_master),
            (used["master_low"], np.uint64(1)),
            (used["new_master_low"], np.uint64(1)),
            *((addresses, of_state) for addresses in used["state"].T),
        ):
            aligned &= _aligned(addresses, before, items)
        rules = used["rule"].astype(np.int64) * len(StateFormat) + used["state_format"]
        group = ((rules * 4 + gradients) * 4 + weights) * 2 + aligned
        order = np.argsort(group, kind="stable")
        blocks = -(-(before + used["numel"])[order].astype(np.int64) // BLOCK_NUMEL)
        row_words = touched.size * SEGMENT_DTYPE.itemsize // 8
        words = _with_pieces(used.view(np.int64), order, blocks)
        programs = np.bincount(group[order], weights=blocks).astype(np.int64)

        with self._current():
            there = self._upload(words)
            first = 0
            for key in np.flatnonzero(programs).tolist():
                count = int(programs[key])
                rule, state_format = divmod(key // 32, len(StateFormat))
                self._kernels.update[(count,)](
                    there[:row_words],
                    there[row_words:].view(torch.int32),
                    first,
                    RULE=rule,
                    STATES=_STATES[rule],
                    GRADIENT=key // 8 % 4,
                    WEIGHT=key // 2 % 4,
                    ALIGNED=bool(key % 2),
                    STATE_FORMAT=state_format,
                    BLOCK=BLOCK_NUMEL,
                    **UPDATE_OPTIONS,
                )
                first += count

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
        """Enqueue the sums of squares of a gradient's blocks, and its copy into or addition to a slot, in one pass.

        A block's sum is not finite exactly if one of its elements is not, so the sums are the overflow flag too.
        Added in order on the host (`offload.kernels.norm_sq`), they are the norm.

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
        in_place = destination_address == source_address
        invariant(
            not accumulate or (destination_address != 0 and not in_place),
            "a gradient is accumulated into a slot of its own",
        )
        if numel == 0:
            return
        if destination_address == 0 or in_place:
            destination_address, slot_code = 0, int(DtypeCode.NONE)
        item_bytes, slot_bytes = int(_ITEM_BYTES[source_code]), int(_ITEM_BYTES[slot_code])
        invariant(source_address % item_bytes == 0, "source is not aligned to its elements")
        invariant(destination_address % slot_bytes == 0, "destination is not aligned to its elements")
        with self._current():
            self._kernels.gather[(blocks_numel(numel),)](
                source_address,
                numel,
                blocks_address,
                destination_address,
                SOURCE=source_code,
                DESTINATION=slot_code,
                ACCUMULATE=accumulate,
                ALIGNED=source_address % (4 * item_bytes) == 0 and destination_address % (4 * slot_bytes) == 0,
                **GATHER_OPTIONS,
            )

    def copy_pieces(self, pieces: npt.NDArray[np.uint64]) -> None:
        """Enqueue copies of many pieces of the device's memory, bit for bit, in one launch.

        Args:
            pieces: Rows of (target, source, bytes), all of them even. No target overlaps anything else.

        Raises:
            InternalError: The table cannot be right. Nothing was enqueued.
        """
        used = pieces[pieces[:, 2] > 0]
        invariant(bool(used.all()), "a piece of memory at address 0")
        invariant(not (used % np.uint64(2)).any(), "a piece of memory that is not made of 16-bit words")
        if not len(used):
            return
        blocks = -(-used[:, 2].astype(np.int64) // COPY_BLOCK_BYTES)
        self._launch_rows(self._kernels.copy_pieces, used, blocks, BLOCK=COPY_BLOCK_BYTES, **COPY_OPTIONS)

    def gather_rows(self, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """Enqueue the sums of squares of many gradients' blocks, in one launch; see `gather`.

        Args:
            dtype: Element type of all.
            rows: Of (address of a gradient, its elements, address of its blocks).

        Raises:
            InternalError: The table cannot be right. Nothing was enqueued.
        """
        used = rows[rows[:, 1] > 0]
        invariant(dtype is not DtypeCode.NONE, "gradients without a dtype")
        invariant(bool(used.all()), "a gradient, or its sums, at address 0")
        aligned = used % np.array([_ITEM_BYTES[int(dtype)], 1, 8], np.uint64) == 0
        invariant(bool(aligned.all()), "a gradient, or its sums, not aligned to its elements")
        if len(used):
            blocks = -(-used[:, 1].astype(np.int64) // NORM_BLOCK_NUMEL)
            self._launch_rows(self._kernels.gather_rows, used, blocks, SOURCE=int(dtype), **GATHER_OPTIONS)

    def _launch_rows(
        self, kernel: Any, rows: npt.NDArray[np.uint64], blocks: npt.NDArray[np.int64], **options: Any
    ) -> None:
        """Launch a kernel over rows of three words, so many programs for each."""
        table = np.zeros((len(rows), 4), np.int64)  # four words, so that what follows is aligned as Triton expects
        table[:, :3] = rows
        words = _with_pieces(table.reshape(-1), np.arange(len(rows)), blocks)
        with self._current():
            there = self._upload(words)
            kernel[(int(blocks.sum()),)](there[: table.size], there[table.size :].view(torch.int32), **options)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Launch on this device; numpy, under the interpreter, is to keep quiet about infinities."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return np.errstate(all="ignore")

    def _upload(self, words: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return a copy on the device, for which the current stream waits from now on."""
        if self.device.type == "cpu":
            return torch.from_numpy(words)
        pinned = torch.empty(words.size, dtype=torch.int64, device="cpu", pin_memory=True)
        pinned.numpy()[:] = words
        using = torch.cuda.current_stream(self.device)
        # On a stream of its own: on the current one it would wait for the state that is updated, and then for its
        # turn among copies of other state.
        with torch.cuda.stream(self._uploads):
            there = torch.empty(words.size, dtype=torch.int64, device=self.device)
            there.copy_(pinned, non_blocking=True)  # torch keeps both until the streams are done with them
        there.record_stream(using)
        using.wait_stream(self._uploads)
        return there


def _aligned(addresses: npt.NDArray[np.uint64], before: npt.NDArray[np.uint64], items: Any) -> Any:
    """Return whether each address, so many elements before, is a multiple of four of them; 0 is none."""
    return (addresses == 0) | ((addresses - before * items) % (4 * items) == 0)


def _with_pieces(
    rows: npt.NDArray[np.int64], order: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return a table's words, and after them, for each program, its row and which of the row's blocks (int32 each).

    Args:
        rows: The words of the table.
        order: Its rows, in the order in which programs take them.
        blocks: How many blocks each of those has.
    """
    ends = np.cumsum(blocks)
    words = np.empty(rows.size + int(ends[-1]), np.int64)
    words[: rows.size] = rows
    pieces = words[rows.size :].view(np.int32).reshape(-1, 2)
    pieces[:, 0] = np.repeat(order, blocks)
    pieces[:, 1] = np.arange(ends[-1]) - np.repeat(ends - blocks, blocks)
    return words
