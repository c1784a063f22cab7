"""The GPU's kernels: a `DeviceKernel` in Triton.

Invariants: bit for bit what `offload.kernels.reference` defines; see `offload.kernels.triton_kernels` for what fixes
each rounding. State, gradient and weight are read and written once, in their own dtypes, where they lie.

Triton comes with torch's CUDA builds and is imported when a kernel is made. Without a GPU, device "cpu" runs the same
kernels through Triton's interpreter, if `TRITON_INTERPRET=1` was in the environment before Triton was imported: for
tests.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload.backends import Backend, accelerator, working_on
from offload.dtypes import DtypeCode
from offload.errors import ConfigError
from offload.formats import FORMATS
from offload.kernels.cpu import blocks_numel
from offload.kernels.device import SLOT_BYTES, DeviceKernel
from offload.protocols import NORM_BLOCK_NUMEL
from offload.rules import ADAMW, RULES, UpdateRule

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK_NUMEL = 1024
"""Elements that one program of the update works on."""

COPY_BLOCK_BYTES = 4096
"""Bytes that one program of a copy of pieces copies."""

_EXACT: dict[str, Any] = {"enable_fp_fusion": False, "sanitize_overflow": False}
UPDATE_OPTIONS: dict[str, Any] = {"num_warps": 4, **_EXACT}
GATHER_OPTIONS: dict[str, Any] = {"num_warps": 8, **_EXACT}
COPY_OPTIONS: dict[str, Any] = {"num_warps": 4, "sanitize_overflow": False}
"""How the kernels are compiled.

Without fused multiply-add, which rounds once where the definition rounds twice. Under `TRITON_DEBUG=1` without the
assertions that no integer overflows: products of hashes do.
"""

FIRST_LAUNCH = threading.Lock()
"""Held where a kernel may be loaded: other threads find it before it can be launched (Triton, `_init_handles`)."""

# By the code of a format.
_SHARED_NUMEL = np.array([found.block_numel for found in FORMATS], np.uint64)
_MASTER_BYTES = np.array([found.masters[0].format.item_bytes for found in FORMATS], np.uint64)
_STATE_BYTES = np.array([found.state(ADAMW)[0].format.item_bytes for found in FORMATS], np.uint64)
_LEAST_WORDS = 512  # of a table's memory that is used again
_SOME_ADDRESS = 1 << 40  # any that takes 64 bits: integers are compiled for by their size
_STATES = {rule.code: len(rule.state) for rule in RULES.values()}


class GpuUpdateKernel(DeviceKernel):
    """Launches kernels, one for each combination of dtypes and format in a table.

    The first call with a new combination compiles for about a second (Triton keeps the result on disk).

    Args:
        device: An accelerator, None for the current one; or "cpu" for Triton's interpreter.

    Raises:
        ConfigError: There is no such device, or no Triton.
    """

    _uploads: Uploads | None = None
    """None in the interpreter."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._launched: set[tuple[int, ...]] = set()
        compiles = device is None or torch.device(device).type != "cpu"
        self.device, backend = accelerator(device) if compiles else (torch.device("cpu"), None)
        chosen = str(self.device)
        try:
            self._kernels: Any = import_module("offload.kernels.triton_kernels")
        except ImportError as error:
            advice = f"install triton, which comes with torch's CUDA builds ({error})"
            raise ConfigError("device", chosen, advice) from error
        compiled = isinstance(self._kernels.update, self._kernels.triton.JITFunction)
        if compiled is not compiles:
            wanted = "unset" if compiles else "set to 1"
            raise ConfigError("device", chosen, f"TRITON_INTERPRET must be {wanted} before Triton is imported")
        if compiled:
            try:
                self._kernels.triton.runtime.driver.active  # noqa: B018 (makes it, with a C compiler)
            except Exception as error:
                advice = f"Triton cannot use it (it needs a C compiler and Python's headers): {error}"
                raise ConfigError("device", chosen, advice) from error
        if backend is not None:
            self._uploads = Uploads(self.device, backend)

    def compile(self, rule: UpdateRule, kinds: Iterable[tuple[DtypeCode, DtypeCode, int]]) -> None:
        """See `DeviceKernel.compile`: each kernel is launched once, with no program, which also loads it."""
        with self._current():
            table = torch.empty(2, dtype=torch.int64, device=self.device)
            pieces = table.view(torch.int32)
            self._launch(self._kernels.copy_pieces, 0, table, pieces, BLOCK=COPY_BLOCK_BYTES, **COPY_OPTIONS)
            for gradient, weight, state_format in kinds:
                for has, aligned in product((gradient, DtypeCode.NONE), (True, False)):
                    self._launch(
                        self._kernels.update,
                        0,
                        table,
                        pieces,
                        0,
                        RULE=rule.code,
                        STATES=len(rule.state),
                        GRADIENT=int(has),
                        WEIGHT=int(weight) if weight is not DtypeCode.FLOAT32 else int(DtypeCode.NONE),
                        ALIGNED=aligned,
                        STATE_FORMAT=state_format,
                        BLOCK=BLOCK_NUMEL,
                        **UPDATE_OPTIONS,
                    )
                for of_rows in (self._kernels.gather_rows, self._kernels.fingerprint_rows):
                    self._launch(of_rows, 0, table, pieces, SOURCE=int(gradient), **GATHER_OPTIONS)
                for adds, aligned in product((False, True), (True, False)):
                    self._launch(
                        self._kernels.gather,
                        0,
                        _SOME_ADDRESS,
                        BLOCK_NUMEL,
                        _SOME_ADDRESS,
                        _SOME_ADDRESS if adds else 0,
                        SOURCE=int(gradient),
                        DESTINATION=int(gradient) if adds else int(DtypeCode.NONE),
                        ACCUMULATE=adds,
                        ALIGNED=aligned,
                        **GATHER_OPTIONS,
                    )

    def _update(self, used: npt.NDArray[Any], gradients: npt.NDArray[Any]) -> None:
        active = gradients != int(DtypeCode.NONE)
        weights = np.where(used["weight"] != 0, used["weight_dtype"], int(DtypeCode.NONE))
        formats = used["state_format"]
        before = used["first_index"] % _SHARED_NUMEL[formats]
        of_master = np.where(used["weight"] != 0, _MASTER_BYTES[formats], np.uint64(4))
        of_weight, of_state = SLOT_BYTES[weights], _STATE_BYTES[formats]
        aligned = ~active | _aligned(used["gradient"], before, SLOT_BYTES[gradients])
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
        rules = used["rule"].astype(np.int64) * len(FORMATS) + used["state_format"]
        group = ((rules * 4 + gradients) * 4 + weights) * 2 + aligned
        order = np.argsort(group, kind="stable")
        blocks = -(-(before + used["numel"])[order].astype(np.int64) // BLOCK_NUMEL)
        words, row_words = _with_pieces(used.view(np.int64), order, blocks)
        programs = np.bincount(group[order], weights=blocks).astype(np.int64)

        with self._current(), self._there(words) as there:
            first = 0
            for key in np.flatnonzero(programs).tolist():
                count = int(programs[key])
                rule, state_format = divmod(key // 32, len(FORMATS))
                self._launch(
                    self._kernels.update,
                    count,
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

    def _gather(
        self, source: tuple[int, int], numel: int, blocks: int, slot: tuple[int, int], accumulate: bool
    ) -> None:
        (source_address, source_code), (slot_address, slot_code) = source, slot
        aligned = [address % (4 * int(SLOT_BYTES[code])) == 0 for address, code in (source, slot)]
        with self._current():
            self._launch(
                self._kernels.gather,
                blocks_numel(numel),
                source_address,
                numel,
                blocks,
                slot_address,
                SOURCE=source_code,
                DESTINATION=slot_code,
                ACCUMULATE=accumulate,
                ALIGNED=all(aligned),
                **GATHER_OPTIONS,
            )

    def _copy_pieces(self, pieces: npt.NDArray[np.uint64]) -> None:
        blocks = -(-pieces[:, 2].astype(np.int64) // COPY_BLOCK_BYTES)
        self._launch_rows(self._kernels.copy_pieces, pieces, blocks, BLOCK=COPY_BLOCK_BYTES, **COPY_OPTIONS)

    def _gather_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        blocks = -(-rows[:, 1].astype(np.int64) // NORM_BLOCK_NUMEL)
        self._launch_rows(self._kernels.gather_rows, rows, blocks, SOURCE=dtype, **GATHER_OPTIONS)

    def _fingerprint_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        blocks = -(-rows[:, 1].astype(np.int64) // NORM_BLOCK_NUMEL)
        self._launch_rows(self._kernels.fingerprint_rows, rows, blocks, SOURCE=dtype, **GATHER_OPTIONS)

    def _launch_rows(
        self, kernel: Any, rows: npt.NDArray[np.uint64], blocks: npt.NDArray[np.int64], **options: Any
    ) -> None:
        """Launch a kernel over rows of three words, so many programs for each."""
        table = np.zeros((len(rows), 4), np.int64)
        table[:, :3] = rows
        words, row_words = _with_pieces(table.reshape(-1), np.arange(len(rows)), blocks)
        with self._current(), self._there(words) as there:
            pieces = there[row_words:].view(torch.int32)
            self._launch(kernel, int(blocks.sum()), there[:row_words], pieces, **options)

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        """Launch a kernel; what may have to be compiled or loaded for that, by one thread at a time."""
        variant = (id(kernel), *map(_compiled_for, arguments), *options.values())
        with contextlib.nullcontext() if variant in self._launched else FIRST_LAUNCH:
            kernel[(programs,)](*arguments, **options)
            self._launched.add(variant)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Launch on this device; numpy, under the interpreter, is to keep quiet about infinities."""
        if self._uploads is None:
            return np.errstate(all="ignore")
        return torch.accelerator.device_index(self.device.index)

    def _there(self, words: npt.NDArray[np.int64]) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Lend a copy of a table, on the device, to the current stream."""
        return contextlib.nullcontext(torch.from_numpy(words)) if self._uploads is None else self._uploads.lend(words)


class Uploads:
    """Tables on their way to a device, in memory that is used again when the work that they were for has been done.

    Any thread may call. Work on one stream ends in its order, so of the tables that it has had, the oldest tells.

    Args:
        device: Where they go.
        backend: Its row.
    """

    def __init__(self, device: torch.device, backend: Backend) -> None:
        self._device, self._backend = device, backend
        # On the stream that uses a table it would wait for the state that is updated, and then for its turn among
        # copies of other state.
        self._stream = backend.stream(device, False)
        self._used: dict[Any, deque[tuple[torch.Tensor, torch.Tensor, Any]]] = {}

    @contextlib.contextmanager
    def lend(self, words: npt.NDArray[np.int64]) -> Iterator[torch.Tensor]:
        """Lend a copy to work that is now put on the current stream, which waits for it."""
        using = self._backend.current_stream(self._device)
        size = max(_LEAST_WORDS, 1 << (words.size - 1).bit_length())
        used = self._used.setdefault((using, size), deque())
        here, there, event = self._unused(used) or self._make(size, using)
        here.numpy()[: words.size] = words
        with working_on(self._stream):
            there[: words.size].copy_(here[: words.size], non_blocking=True)
        event.record(self._stream)
        using.wait_event(event)
        try:
            yield there[: words.size]
        finally:
            event.record(using)
            used.append((here, there, event))

    def _unused(self, used: deque[Any]) -> Any:
        try:
            oldest = used.popleft()
        except IndexError:
            return None
        if oldest[2].query():
            return oldest
        used.appendleft(oldest)
        return None

    def _make(self, size: int, using: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        here = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
        with working_on(self._stream):  # whose memory it is
            there = torch.empty(size, dtype=torch.int64, device=self._device)
        there.record_stream(using)  # an interrupt may let go of it while it is read
        return here, there, self._backend.event(self._device, False)


def _compiled_for(argument: Any) -> int:
    """Return what Triton tells arguments apart by: how a pointer is aligned, or the value and size of an integer."""
    if isinstance(argument, int):
        return (argument == 1) + 2 * (argument % 16 == 0) + 4 * (argument >= 1 << 31)
    return int(argument.data_ptr() % 16 == 0)


def _aligned(addresses: npt.NDArray[np.uint64], before: npt.NDArray[np.uint64], items: Any) -> Any:
    """Return whether each address, so many elements before, is a multiple of four of them; 0 is none."""
    return (addresses == 0) | ((addresses - before * items) % (4 * items) == 0)


def _with_pieces(
    rows: npt.NDArray[np.int64], order: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], int]:
    """Return a table's words, and after them, for each program, its row and which of the row's blocks (int32 each).

    Args:
        rows: The words of the table.
        order: Its rows, in the order in which programs take them.
        blocks: How many blocks each of those has.

    Returns:
        The words, and where the second part begins: at a multiple of 16 bytes, which Triton compiles for.
    """
    ends, start = np.cumsum(blocks), rows.size + rows.size % 2
    words = np.empty(start + int(ends[-1]), np.int64)
    words[: rows.size], words[rows.size : start] = rows, 0
    pieces = words[start:].view(np.int32).reshape(-1, 2)
    pieces[:, 0] = np.repeat(order, blocks)
    pieces[:, 1] = np.arange(ends[-1]) - np.repeat(ends - blocks, blocks)
    return words, start
