"""The GPU's kernels, a `DeviceKernel` in Triton; and `device_kernel`, which returns any device's kernel.

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

Without fused multiply-add, which rounds once where the definition rounds twice. `sanitize_overflow=False` removes the
assertions of `TRITON_DEBUG=1` that no integer overflows: products of hashes do.
"""

FIRST_LAUNCH = threading.Lock()
"""Held while a kernel may be loaded.

Triton's cache shows a compiled kernel to other threads before it is loaded (`_init_handles`), so they would launch it
too early.
"""

_LEAST_WORDS = 512  # smallest memory for a table, so that few different sizes are kept for reuse
_ROW_WORDS = SEGMENT_DTYPE.itemsize // 8  # words are of 64 bits here
_SOME_ADDRESS = 1 << 40  # any address of 64 bits: Triton compiles for the size of integers
_STATE_COUNTS = {rule.code: len(rule.state) for rule in RULES.values()}


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
        self._launched: set[tuple[int, ...]] = set()  # variants that have been compiled and loaded
        compiles = device is None or torch.device(device).type != "cpu"  # else Triton's interpreter runs the kernels
        self.device, backend = accelerator(device) if compiles else (torch.device("cpu"), None)
        self._kernels = _import_kernels(str(self.device), compiles)
        self._tables = HostTables() if backend is None else Uploads(self.device, backend, to_device)

    def compile(self, rule: UpdateRule, kinds: Iterable[tuple[DtypeCode, DtypeCode, int]]) -> None:
        """Compile and load kernels; see `DeviceKernel.compile`.

        Each variant is launched once as no program at all: Triton compiles and loads it, and nothing runs. So the
        arguments only need the types, sizes and alignments of real ones.
        """
        with self._current():
            # Any device memory: new memory is aligned to 16 bytes, as tables and their programs are.
            table = torch.empty(2, dtype=torch.int64, device=self.device)
            pieces = table.view(torch.int32)
            self._launch(self._kernels.copy_pieces, 0, table, pieces, BLOCK=COPY_BLOCK_BYTES, **COPY_OPTIONS)
            for gradient, weight, state_format in kinds:
                # With and without a gradient, aligned and not; then sums alone and added to a slot. An fp32 weight is
                # the master itself, which the kernel knows by the code NONE.
                for used_gradient, aligned in product((gradient, DtypeCode.NONE), (True, False)):
                    self._launch(
                        self._kernels.update,
                        0,
                        table,
                        pieces,
                        0,
                        RULE=rule.code,
                        STATES=len(rule.state),
                        GRADIENT=int(used_gradient),
                        WEIGHT=int(weight) if weight is not DtypeCode.FLOAT32 else int(DtypeCode.NONE),
                        ALIGNED=aligned,
                        STATE_FORMAT=state_format,
                        BLOCK=BLOCK_NUMEL,
                        **UPDATE_OPTIONS,
                    )
                for rows_kernel in (self._kernels.sum_rows, self._kernels.fingerprint_rows):
                    self._launch(rows_kernel, 0, table, pieces, SOURCE=int(gradient), **GATHER_OPTIONS)
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
        """Send a table and, in the same memory after it, its programs; return None if no segment changes.

        A program is one word: two int32 that say which segment the program works on, and which of its blocks.
        """
        words = table.size * _ROW_WORDS
        programs_at = _programs_at(words)
        # At most two blocks of each segment are partial, so this many programs suffice, a word each.
        memory = self._tables.get_table(programs_at + int(table["numel"].sum()) // BLOCK_NUMEL + 2 * table.size)
        memory.words[:words] = table.view(np.int64)
        address, room = memory.words.ctypes.data + 8 * programs_at, memory.words.size - programs_at
        problem, launches = _native.update_programs(table.ctypes.data, table.size, BLOCK_NUMEL, address, room)
        invariant(not problem, problem)  # a text, empty if the table is right
        if not launches:
            memory.queue.append(memory)  # no work reads it: it can be used again at once
            return None
        # Only the words in use: the table, and one for each program.
        self._tables.send(memory, programs_at + sum(program_count for *_, program_count in launches))
        return memory, programs_at, launches

    def _update(self, sent: SentUpdate) -> None:
        """Launch the update's kernel once for each combination of rule, format, dtypes and alignment in a table.

        Each launch takes the next `program_count` programs after the table, from number `first` on.
        """
        table, programs_at, launches = sent
        with self._current(), self._tables.in_use(table) as on_device:
            first, programs = 0, on_device[programs_at:].view(torch.int32)
            for rule, state_format, gradient, weight, aligned, program_count in launches:
                self._launch(
                    self._kernels.update,
                    program_count,
                    on_device,
                    programs,
                    first,
                    RULE=rule,
                    STATES=_STATE_COUNTS[rule],
                    GRADIENT=gradient,
                    WEIGHT=weight,
                    ALIGNED=aligned,
                    STATE_FORMAT=state_format,
                    BLOCK=BLOCK_NUMEL,
                    **UPDATE_OPTIONS,
                )
                first += program_count

    def _gather(
        self, source: tuple[int, int], numel: int, blocks: int, slot: tuple[int, int], accumulate: bool
    ) -> None:
        """Launch the gathering of a gradient, one program for each block of the norm."""
        (source_address, source_code), (slot_address, slot_code) = source, slot
        # If all are aligned, four elements are moved at a time. Without a slot its address is 0: aligned.
        is_aligned = all(address % (4 * int(SLOT_BYTES[code])) == 0 for address, code in (source, slot))
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
                ALIGNED=is_aligned,
                **GATHER_OPTIONS,
            )

    def _copy_pieces(self, pieces: npt.NDArray[np.uint64]) -> None:
        options = {"BLOCK": COPY_BLOCK_BYTES, **COPY_OPTIONS}
        self._launch_rows(self._kernels.copy_pieces, pieces, 2, COPY_BLOCK_BYTES, options)

    def _sum_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        options = {"SOURCE": dtype, **GATHER_OPTIONS}
        self._launch_rows(self._kernels.sum_rows, rows, 1, NORM_BLOCK_NUMEL, options)

    def _fingerprint_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        options = {"SOURCE": dtype, **GATHER_OPTIONS}
        self._launch_rows(self._kernels.fingerprint_rows, rows, 1, NORM_BLOCK_NUMEL, options)

    def _launch_rows(
        self, kernel: Any, rows: npt.NDArray[np.uint64], size_column: int, block: int, options: dict[str, Any]
    ) -> None:
        """Launch a kernel over rows, as one program for each block of each row; the last block of a row may be short.

        Args:
            kernel: The kernel; its arguments are the rows on the device, four words each, and the programs.
            rows: Shape [rows, 3]: addresses, and the size of what the row is about.
            size_column: The column that has the size, in elements or bytes.
            block: Size of a block, in the same unit.
            options: The kernel's constants, and how it is compiled.
        """
        rows = np.ascontiguousarray(rows)
        sizes = rows[:, size_column]
        programs_at = _programs_at(4 * len(rows))
        # Whole blocks of all rows together, and one that is short for each row: no more programs are needed.
        table = self._tables.get_table(programs_at + int(sizes.sum()) // block + len(rows))
        table.words[: 4 * len(rows)].reshape(-1, 4)[:, :3] = rows  # the fourth word of a row is unused
        address, room = table.words.ctypes.data + 8 * programs_at, table.words.size - programs_at
        # The sizes are a column of `rows`, so they lie three words apart.
        program_count = _native.row_programs(sizes.ctypes.data, len(rows), 3, block, address, room)
        self._tables.send(table, programs_at + program_count)
        with self._current(), self._tables.in_use(table) as on_device:
            self._launch(kernel, program_count, on_device, on_device[programs_at:].view(torch.int32), **options)

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        """Launch a kernel as so many programs.

        The first launch of a variant compiles and loads it, under `FIRST_LAUNCH`. A variant is what Triton compiles
        apart: the kernel, the kinds of its arguments (`_compiled_for`), and its constants.
        """
        variant = (id(kernel), *map(_compiled_for, arguments), *options.values())
        with contextlib.nullcontext() if variant in self._launched else FIRST_LAUNCH:
            kernel[(programs,)](*arguments, **options)
            self._launched.add(variant)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Make this device current within a block; under the interpreter, silence numpy's warnings of infinities."""
        if self.device.type == "cpu":
            return np.errstate(all="ignore")
        return torch.accelerator.device_index(self.device.index)


def _import_kernels(device_name: str, compiles: bool) -> Any:
    """Import and return the kernels; `ConfigError` if Triton cannot compile (`compiles`) or interpret them."""
    try:
        kernels: Any = import_module("offload.kernels.triton_kernels")
    except ImportError as error:
        advice = f"install triton, which comes with torch's CUDA builds ({error})"
        raise ConfigError("device", device_name, advice) from error
    is_compiled = isinstance(kernels.update, kernels.triton.JITFunction)
    if is_compiled is not compiles:
        wanted = "unset" if compiles else "set to 1"
        raise ConfigError("device", device_name, f"TRITON_INTERPRET must be {wanted} before Triton is imported")
    if is_compiled:
        try:
            kernels.triton.runtime.driver.active  # noqa: B018 (makes it, with a C compiler)
        except Exception as error:
            advice = f"Triton cannot use it (it needs a C compiler and Python's headers): {error}"
            raise ConfigError("device", device_name, advice) from error
    return kernels


@dataclass(slots=True, eq=False)
class ArgumentTable:
    """Memory for a kernel's table: in host memory, where it is filled, and on the device.

    Attributes:
        words: The host memory, with room after the table.
        on_host: The same as a tensor.
        on_device: The memory on the device.
        sent: An event, recorded twice for each use: after the copy to the device, then after the work that uses the
            table. None in host memory alone, as is `using`.
        using: The stream of that work, which was current in `get_table`.
        queue: Where it waits for its next use by work of that stream; see `Uploads`.
    """

    words: npt.NDArray[np.int64]
    on_host: torch.Tensor
    on_device: torch.Tensor
    sent: Any = None
    using: Any = None
    queue: deque[ArgumentTable] = field(default_factory=deque)


SentUpdate = tuple[ArgumentTable, int, list[tuple[int, int, int, int, bool, int]]]
"""A table, the word at which its programs begin, and its launches (csrc/kernels/programs.h): codes of rule, format,
gradient's and weight's dtype, whether all is aligned, and the number of programs."""


class HostTables:
    """Tables in host memory alone: for the interpreter, which uses them at once."""

    def get_table(self, words: int) -> ArgumentTable:
        """Return a table of that many words, or more, for work of the current stream."""
        on_host = torch.empty(words, dtype=torch.int64, device="cpu")
        return ArgumentTable(on_host.numpy(), on_host, on_host)

    def send(self, table: ArgumentTable, words: int) -> None:
        """Do nothing: the table is used where it was filled."""

    @contextlib.contextmanager
    def in_use(self, table: ArgumentTable) -> Iterator[torch.Tensor]:
        """Lend a sent table to work that this context enqueues on the current stream, which waits for the table."""
        yield table.on_device


class Uploads(HostTables):
    """Tables that are copied to a device; their memory is reused when the work that has used them is done.

    All tables are copied on the stream of all other copies to the device. On another one a table might wait for all
    of those copies: some copy engines stay with one stream as long as it has copies that can begin.

    Tables wait for their next use in queues, by stream and size. Work on one stream ends in order, so if the oldest
    table of a queue is still in use, all are. Any thread may call.

    Args:
        device: The device.
        backend: The device's row of `offload.backends`.
        stream: The stream of copies; None for a new one.
    """

    def __init__(self, device: torch.device, backend: Backend, stream: Any = None) -> None:
        self._device, self._backend = device, backend
        self._stream = stream or backend.stream(device, False)  # of no higher priority than others
        # By (stream, words): tables for reuse, the oldest first; the work that uses them may still be under way.
        self._queues: dict[Any, deque[ArgumentTable]] = {}

    def get_table(self, words: int) -> ArgumentTable:
        """Return a table of at least `words` words for work of the current stream: one for reuse, or a new one.

        Sizes are powers of two, so that few queues are needed. `in_use` queues the table for reuse; one that never
        gets there, because of an error, is not used again.
        """
        using = self._backend.current_stream(self._device)
        power_of_two = 1 << (words - 1).bit_length()
        size = max(_LEAST_WORDS, power_of_two)
        queue = self._queues.setdefault((using, size), deque())
        return self._take_reusable(queue) or self._make(size, using, queue)

    def send(self, table: ArgumentTable, words: int) -> None:
        """Enqueue the copy of a table's first words to the device."""
        with working_on(self._stream):
            table.on_device[:words].copy_(table.on_host[:words], non_blocking=True)
        table.sent.record(self._stream)

    @contextlib.contextmanager
    def in_use(self, table: ArgumentTable) -> Iterator[torch.Tensor]:
        """Lend a sent table to work on the stream that was current in `get_table`; queue it for reuse afterwards."""
        table.using.wait_event(table.sent)
        try:
            yield table.on_device
        finally:  # also after an error: some work may have been enqueued before it
            table.sent.record(table.using)
            table.queue.append(table)

    def _take_reusable(self, queue: deque[ArgumentTable]) -> ArgumentTable | None:
        """Take a stream's oldest table if the work with it has been done; else return None."""
        try:
            oldest = queue.popleft()
        except IndexError:  # none; not asked for before, as other threads take tables, too
            return None
        if oldest.sent.query():  # recorded last after that work
            return oldest
        queue.appendleft(oldest)
        return None

    def _make(self, size: int, using: Any, queue: deque[ArgumentTable]) -> ArgumentTable:
        """Allocate a table of `size` words for work of the stream `using`; it will wait in `queue` for its reuse."""
        on_host = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
        with working_on(self._stream):  # the allocator orders reuse of the memory by this stream
            on_device = torch.empty(size, dtype=torch.int64, device=self._device)
        on_device.record_stream(using)  # an interrupt may drop the table while work reads it
        untimed = self._backend.event(self._device, False)
        return ArgumentTable(on_host.numpy(), on_host, on_device, untimed, using, queue)


def _programs_at(words: int) -> int:
    """Return the word at which programs begin after a table: a multiple of 16 bytes, as Triton compiles for that."""
    return words + words % 2


def _compiled_for(argument: Any) -> int:
    """Return a code for what Triton compiles a variant for, given one argument of a launch.

    Of an integer: whether it is 1, whether 16 divides it, and whether it needs 64 bits. Of a tensor: whether its
    address is a multiple of 16.
    """
    if isinstance(argument, int):
        return (argument == 1) + 2 * (argument % 16 == 0) + 4 * (argument >= 1 << 31)
    return int(argument.data_ptr() % 16 == 0)


def device_kernel(device: torch.device | None = None, to_device: Any = None) -> DeviceKernel:
    """Return a device's update kernel: in Triton, or in plain torch operations where there is no Triton.

    Args:
        device: Which one; None for the current accelerator.
        to_device: The stream on which tables are copied to it; None for a new one.

    Raises:
        ConfigError: There is no such device, or no Triton where it is needed.
    """
    chosen, backend = accelerator(device)
    if backend.compiler == "triton":
        return GpuUpdateKernel(chosen, to_device)
    _warn_slow(chosen.type)
    return PlainUpdateKernel(chosen)


@cache
def _warn_slow(kind: str) -> None:
    """Log, once for each type of device, that there is no kernel."""
    log.warning("updates on %s devices are plain torch operations, many times slower than a kernel (said once)", kind)
