"""The GPU's kernels: a `DeviceKernel` in Triton; and `device_kernel`, which returns a device's kernel of any kind.

Invariants: bit for bit what `offload.kernels.reference` defines; see `offload.kernels.triton_kernels` for what fixes
each rounding. State, gradient and weight are read and written once, in their own dtypes, where they lie.

Triton comes with torch's CUDA builds and is imported when a kernel is made. Without a GPU, device "cpu" runs the same
kernels through Triton's interpreter, if `TRITON_INTERPRET=1` was in the environment before Triton was imported: for
tests.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload import _native
from offload.backends import Backend, accelerator, working_on
from offload.dtypes import DtypeCode
from offload.errors import ConfigError, invariant
from offload.kernels.cpu import blocks_numel
from offload.kernels.device import SLOT_BYTES, DeviceKernel
from offload.kernels.plain import PlainUpdateKernel
from offload.protocols import NORM_BLOCK_NUMEL, SEGMENT_DTYPE
from offload.rules import RULES, UpdateRule

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger("offload")

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

_LEAST_WORDS = 512  # of a table's memory that is used again
_ROW_WORDS = SEGMENT_DTYPE.itemsize // 8
_SOME_ADDRESS = 1 << 40  # any that takes 64 bits: integers are compiled for by their size
_STATES = {rule.code: len(rule.state) for rule in RULES.values()}


class GpuUpdateKernel(DeviceKernel):
    """Launches kernels, one for each combination of dtypes and format in a table.

    The first call with a new combination compiles for about a second (Triton keeps the result on disk).

    Args:
        device: An accelerator, None for the current one; or "cpu" for Triton's interpreter.
        to_device: The stream on which tables are sent to the device; None for a new one.

    Raises:
        ConfigError: There is no such device, or no Triton.
    """

    def __init__(self, device: torch.device | str | None = None, to_device: Any = None) -> None:
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
        self._tables = Tables() if backend is None else Uploads(self.device, backend, to_device)

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

    def _send(self, table: npt.NDArray[Any]) -> SentUpdate | None:
        words = table.size * _ROW_WORDS
        first = _programs_at(words)
        sent = self._tables.take(first + int(table["numel"].sum()) // BLOCK_NUMEL + 2 * table.size)
        sent.words[:words] = table.view(np.int64)
        address, room = sent.words.ctypes.data + 8 * first, sent.words.size - first
        problem, launches = _native.update_programs(table.ctypes.data, table.size, BLOCK_NUMEL, address, room)
        invariant(not problem, problem)
        if not launches:
            sent.unused.append(sent)
            return None
        self._tables.send(sent, first + sum(launch[-1] for launch in launches))
        return sent, first, launches

    def _update(self, sent: SentUpdate) -> None:
        table, first, launches = sent
        with self._current(), self._tables.lend(table) as there:
            begin, programs = 0, there[first:].view(torch.int32)
            for rule, state_format, gradient, weight, aligned, count in launches:
                self._launch(
                    self._kernels.update,
                    count,
                    there,
                    programs,
                    begin,
                    RULE=rule,
                    STATES=_STATES[rule],
                    GRADIENT=gradient,
                    WEIGHT=weight,
                    ALIGNED=aligned,
                    STATE_FORMAT=state_format,
                    BLOCK=BLOCK_NUMEL,
                    **UPDATE_OPTIONS,
                )
                begin += count

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
        options = {"BLOCK": COPY_BLOCK_BYTES, **COPY_OPTIONS}
        self._launch_rows(self._kernels.copy_pieces, pieces, 2, COPY_BLOCK_BYTES, options)

    def _gather_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        options = {"SOURCE": dtype, **GATHER_OPTIONS}
        self._launch_rows(self._kernels.gather_rows, rows, 1, NORM_BLOCK_NUMEL, options)

    def _fingerprint_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        options = {"SOURCE": dtype, **GATHER_OPTIONS}
        self._launch_rows(self._kernels.fingerprint_rows, rows, 1, NORM_BLOCK_NUMEL, options)

    def _launch_rows(
        self, kernel: Any, rows: npt.NDArray[np.uint64], size: int, block: int, options: dict[str, Any]
    ) -> None:
        """Launch a kernel over rows of three words, of which one is a size: a program for each block of that."""
        rows = np.ascontiguousarray(rows)
        first, sizes = _programs_at(4 * len(rows)), rows[:, size]
        table = self._tables.take(first + int(sizes.sum()) // block + len(rows))
        table.words[: 4 * len(rows)].reshape(-1, 4)[:, :3] = rows
        address, room = table.words.ctypes.data + 8 * first, table.words.size - first
        count = _native.row_programs(sizes.ctypes.data, len(rows), 3, block, address, room)
        self._tables.send(table, first + count)
        with self._current(), self._tables.lend(table) as there:
            self._launch(kernel, count, there, there[first:].view(torch.int32), **options)

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        """Launch a kernel; what may have to be compiled or loaded for that, by one thread at a time."""
        variant = (id(kernel), *map(_compiled_for, arguments), *options.values())
        with contextlib.nullcontext() if variant in self._launched else FIRST_LAUNCH:
            kernel[(programs,)](*arguments, **options)
            self._launched.add(variant)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Launch on this device; numpy, under the interpreter, is to keep quiet about infinities."""
        if self.device.type == "cpu":
            return np.errstate(all="ignore")
        return torch.accelerator.device_index(self.device.index)


@dataclass(slots=True, eq=False)
class Table:
    """A kernel's table: in host memory, where it is filled, and on the device.

    Attributes:
        words: It, and whatever is behind it in its memory, in host memory.
        here: The same.
        there: On the device.
        sent: After it has been copied there, and after it has been used there.
        using: The stream of the work that uses it.
        unused: Where it waits for its next use.
    """

    words: npt.NDArray[np.int64]
    here: torch.Tensor
    there: torch.Tensor
    sent: Any = None
    using: Any = None
    unused: deque[Table] = field(default_factory=deque)


SentUpdate = tuple[Table, int, list[tuple[int, int, int, int, bool, int]]]
"""A table, the word at which its programs begin, and its launches (csrc/kernels/programs.h)."""


class Tables:
    """Tables that are used in host memory: by the interpreter, at once."""

    def take(self, words: int) -> Table:
        """Return a table of that many words, or more, for work of the current stream."""
        here = torch.empty(words, dtype=torch.int64, device="cpu")
        return Table(here.numpy(), here, here)

    def send(self, table: Table, words: int) -> None:
        """Copy the first words of a table to the device."""

    @contextlib.contextmanager
    def lend(self, table: Table) -> Iterator[torch.Tensor]:
        """Lend a table that was sent to work that is now put on the current stream, which waits for it."""
        yield table.there


class Uploads(Tables):
    """Tables on their way to a device, in memory that is used again when the work that they were for has been done.

    They are sent on the stream of all copies to the device. On another one a table might wait for all of these: some
    copy engines go on with a stream as long as it has copies that can begin.

    Any thread may call. Work on one stream ends in its order, so of the tables that it has had, the oldest tells.

    Args:
        device: Where they go.
        backend: Its row.
        stream: On which they are sent; None for a new one.
    """

    def __init__(self, device: torch.device, backend: Backend, stream: Any = None) -> None:
        self._device, self._backend = device, backend
        self._stream = stream or backend.stream(device, False)
        self._used: dict[Any, deque[Table]] = {}

    def take(self, words: int) -> Table:
        """See `Tables.take`. A table that is not sent, or not used then, is memory that goes."""
        using = self._backend.current_stream(self._device)
        size = max(_LEAST_WORDS, 1 << (words - 1).bit_length())
        used = self._used.setdefault((using, size), deque())
        return self._unused(used) or self._make(size, using, used)

    def send(self, table: Table, words: int) -> None:
        """See `Tables.send`."""
        with working_on(self._stream):
            table.there[:words].copy_(table.here[:words], non_blocking=True)
        table.sent.record(self._stream)

    @contextlib.contextmanager
    def lend(self, table: Table) -> Iterator[torch.Tensor]:
        """See `Tables.lend`: to the stream that was current when it was taken."""
        table.using.wait_event(table.sent)
        try:
            yield table.there
        finally:
            table.sent.record(table.using)
            table.unused.append(table)

    def _unused(self, used: deque[Table]) -> Table | None:
        try:
            oldest = used.popleft()
        except IndexError:
            return None
        if oldest.sent.query():
            return oldest
        used.appendleft(oldest)
        return None

    def _make(self, size: int, using: Any, unused: deque[Table]) -> Table:
        here = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
        with working_on(self._stream):  # whose memory it is
            there = torch.empty(size, dtype=torch.int64, device=self._device)
        there.record_stream(using)  # an interrupt may let go of it while it is read
        return Table(here.numpy(), here, there, self._backend.event(self._device, False), using, unused)


def _programs_at(words: int) -> int:
    """Return where programs begin behind a table: at a multiple of 16 bytes, which Triton compiles for."""
    return words + words % 2


def _compiled_for(argument: Any) -> int:
    """Return what Triton tells arguments apart by: how a pointer is aligned, or the value and size of an integer."""
    if isinstance(argument, int):
        return (argument == 1) + 2 * (argument % 16 == 0) + 4 * (argument >= 1 << 31)
    return int(argument.data_ptr() % 16 == 0)


def device_kernel(device: torch.device | None = None, to_device: Any = None) -> DeviceKernel:
    """Return the kernel of a device: in Triton where it has that.

    Args:
        device: Which one; None for the current accelerator.
        to_device: The stream on which tables are sent there; None for one of the kernel's own.

    Raises:
        ConfigError: There is no such device, or no Triton where it is needed.
    """
    found, backend = accelerator(device)
    if backend.compiler == "triton":
        return GpuUpdateKernel(found, to_device)
    _say_slow(found.type)
    return PlainUpdateKernel(found)


@cache
def _say_slow(kind: str) -> None:
    log.warning("updates on %s devices are plain torch operations, many times slower than a kernel (said once)", kind)
