"""A GPU that is not there: its lanes, marks and memory, in this process, for tests of whoever drives one.

Work is done later than it is asked for: by one thread a lane, after random delays and at given rates, or, `lazy`,
only when somebody waits for it, which is as late as a device may be. So whoever uses a result without having waited
for it finds something else. Beyond that, every piece of work is compared with all open ones: two that touch
the same memory, one of them writing, must be ordered by a lane, by `follow`, or by the host having waited in between
(vector clocks). Else `HazardError` is raised, whether or not it went well this time.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import math
import mmap
import random
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from offload.combinations import CAPTURED
from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.errors import InternalError, OffloadError
from offload.formats import FORMATS, StateSpec, StateTensor
from offload.kernels import CpuUpdateKernel
from offload.kernels.reference import TORCH_DTYPES, fingerprint_parts
from offload.kernels.table import as_segment_rows
from offload.predict.streams import Order
from offload.protocols import ERROR_DEVICE, LANES, NORM_BLOCK_NUMEL, DeviceLane, Mark, Queue, SegmentFlag
from offload.rules import MASTER, RULES, segment_dtype

ALIGNMENT = 256
FREED = "freed"
"""The stream on which memory is overwritten that was given back behind lanes: whoever touches it later is found."""
POISON = 0xA5
"""What new device memory is filled with."""


Lane = DeviceLane | str
"""A lane, or one more stream: of the device itself, or of the user."""

Span = tuple[int, int, bool]
"""First address, address after the last, and whether it is written."""


class Spans:
    """The memory that a piece of work touches, sorted, to be compared with that of others."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.all = self._joined([span[:2] for span in spans])
        self.written = self._joined([span[:2] for span in spans if span[2]])

    def __bool__(self) -> bool:
        return bool(self.all[0])

    @staticmethod
    def _joined(spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Return where spans begin and end, joined where they touch."""
        begins: list[int] = []
        ends: list[int] = []
        for begin, end in sorted(spans):
            if ends and begin <= ends[-1]:
                ends[-1] = max(end, ends[-1])
            else:
                begins.append(begin)
                ends.append(end)
        return begins, ends


def conflict(left: Spans, right: Spans) -> int:
    """Return how many bytes two pieces of work touch that may not do so in any order: at one place, or 0."""
    return _common(left.written, right.all) or _common(left.all, right.written)


def _common(left: tuple[list[int], list[int]], right: tuple[list[int], list[int]]) -> int:
    """Return the bytes of the first span that two sorted lists of spans have in common."""
    if len(left[0]) > len(right[0]):
        left, right = right, left
    begins, ends = right
    for begin, end in zip(*left, strict=True):
        at = bisect.bisect_right(ends, begin)  # the first that ends later
        if at < len(begins) and begins[at] < end:
            return min(end, ends[at]) - max(begin, begins[at])
    return 0


_RULES = {rule.code: rule for rule in RULES.values()}


def _state_of(row: Any) -> StateSpec:
    return StateSpec(_RULES[int(row["rule"])], FORMATS[int(row["state_format"])])


def spans_of(row: Any) -> list[Span]:
    """Return what memory the update of a row of a segment table touches."""
    numel = int(row["numel"])
    if not numel:
        return []
    state, first_index = _state_of(row), int(row["first_index"])
    active = bool(row["flags"] & int(SegmentFlag.ACTIVE))
    row = row.reshape(1).view(segment_dtype(state.rule))[0]
    stored = state.stored if row["weight"] else (StateTensor(MASTER), *state.beside)
    sizes = {name: form.run_bytes(first_index, numel) for name, form in stored}
    sizes["weight"] = numel * int(ITEM_BYTES[row["weight_dtype"]])
    sizes |= {f"new_{name}": sizes[name] for name in ("master", "master_low", "weight") if name in sizes}
    columns = [(int(row[name]), size, True) for name, size in sizes.items()]
    columns.append((int(row["gradient"]) if active else 0, numel * int(ITEM_BYTES[row["gradient_dtype"]]), False))
    return [(at, at + size, writes) for at, size, writes in columns if at]


class _Engine:
    """What copies one way, one copy at a time."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._some = threading.Condition()
        self.waiting: dict[Lane, int] = {}  # the place of the first copy of each stream that waits
        self._turn: Lane | None = None  # whose turn it is, if it is somebody's
        self._is_busy = False

    def take(self, place: int, lane: Lane) -> None:
        """Wait for the turn of a copy."""
        with self._some:
            self.waiting[lane] = place
            self._some.wait_for(lambda: not self._is_busy and self._turn in (None, lane))
            del self.waiting[lane]
            self._is_busy, self._turn = True, lane

    def leave(self, lane: Lane, following: int | None) -> None:
        """Let the next one begin, after a copy of a stream, whose next copy has that place if it can begin."""
        with self._some:
            candidates = dict(self.waiting)
            if following is not None:
                candidates[lane] = following
            stays = self._order is Order.STAYS and following is not None
            self._turn = lane if stays else min(candidates, key=candidates.__getitem__, default=None)
            self._is_busy = False
            self._some.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing be copied within a block."""
        self.take(0, FREED)
        try:
            yield
        finally:
            self.leave(FREED, None)


class HazardError(InternalError):
    """Two pieces of work touch the same memory in no order."""


@dataclass(eq=False)
class _Work:
    """One piece of work; a mark is one that does nothing."""

    device: SimulatedDevice
    lane: Lane
    number: int
    label: str
    act: Callable[[], None]
    spans: Spans
    nbytes: int
    clock: dict[Lane, int]
    requires: list[_Work]
    done: threading.Event = field(default_factory=threading.Event)
    at_s: float = 0.0
    timed: bool = False
    engine: _Engine | None = None
    place: int = 0
    """Among all work: how much was put on lanes before."""

    @property
    def is_ready(self) -> bool:
        """Whether it waits for nothing but its engine and what is on its lane."""
        return all(other.done.is_set() for other in self.requires)

    def reached(self) -> bool:
        self.device._check_thread()
        if not self.done.is_set():
            return False
        self.device.observe(self)
        return True

    def wait(self) -> None:
        self.device._check_thread()
        self.device.finish(self)
        self.device.observe(self)
        self.device.check()

    def time_s(self) -> float:
        if not self.timed:
            raise InternalError("a mark that is not timed is asked for its time")
        return self.at_s


@dataclass(eq=False)
class _Block:
    """Memory of the user's tensors, which is given out again when it is free."""

    memory: npt.NDArray[np.uint8]
    unused: list[_Block]
    """Where it goes when it is freed: what is free on the lane that it was allocated on."""
    users: set[Lane] = field(default_factory=set)
    ends: list[_Work] = field(default_factory=list)


class _Now:
    """The mark of what the calling thread has done: it works at once."""

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def time_s(self) -> float:
        return time.monotonic()


class SimulatedDevice:
    """A `offload.protocols.Device` of memory and threads.

    The calling thread stands for the caller's stream: what it does happens at once, and `follow(CALLER, ...)` waits.
    Or, without `caller_is_host`, forward and backward are put on a lane by `caller_work`.

    Args:
        memory_bytes: Size of its memory.
        seed: Of the delays.
        lazy: Whether work is done only when somebody waits for it.
        delay_s: Longest delay before a piece of work, on threads of its own.
        bytes_per_s: Rate of copies and updates; None for as fast as it goes.
        fail_at: Number of the piece of work (marks not counted) that makes the device fail; None for never.
        pins: Whether host memory can be pinned.
        pin_limit_bytes: Most that one registration takes; None for any size.
        pin_total_bytes: Most that all registrations take together; None for any size.
        caller_is_host: Whether the calling thread stands for the caller's stream. Else that is a lane like others.
        order: How copy engines choose between streams.
        index: Which device it is. A thread works for device 0 until `prepare_thread`, and any call for another one
            is an error; users' threads call `prepare_thread`, too (torch's own calls take care of those).
    """

    def __init__(
        self,
        memory_bytes: int = 1 << 30,
        *,
        seed: int = 0,
        lazy: bool = False,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        fail_at: int | None = None,
        pins: bool = True,
        pin_limit_bytes: int | None = None,
        pin_total_bytes: int | None = None,
        caller_is_host: bool = True,
        order: Order = Order.READINESS,
        index: int = 0,
    ) -> None:
        self.name = "simulated GPU"
        self.capturing = False
        """Whether the user captures a CUDA graph from the caller's lane."""
        self._index = index
        self.prepared: set[tuple[DtypeCode, DtypeCode, int]] = set()
        """For what a real device would have compiled its kernels; see `Device.prepare`."""
        self._thread = threading.local()
        self._blocks: dict[int, _Block] = {}
        self._unused: defaultdict[tuple[Lane, int], list[_Block]] = defaultdict(list)
        self.user_bytes = 0
        """What `empty` has taken of the device's memory, used or not."""
        self.pinned: dict[int, int] = {}
        """Host memory that is pinned now: address and bytes."""
        self.pageable_bytes = 0
        """What copies have read or written of host memory that was not pinned."""
        self.done = 0
        """Pieces of work that have been done, marks not counted."""
        self.reserve_bytes = memory_bytes // 10
        self.node: int | None = None
        self._memory_bytes = memory_bytes
        self._random = random.Random(seed)
        self._lazy = lazy
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self.fail_at = fail_at
        self._pin_limits = (
            0 if not pins else math.inf if pin_limit_bytes is None else pin_limit_bytes,
            math.inf if pin_total_bytes is None else pin_total_bytes,
        )
        self.caller_is_host = caller_is_host
        lanes: tuple[Lane, ...] = (*LANES, FREED, *(() if caller_is_host else (DeviceLane.CALLER,)))
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._borrowed: list[int] = []
        self._kernel = CpuUpdateKernel(threads=1)
        self._lock = threading.RLock()
        self._doing = threading.RLock()
        self._queues: dict[Lane, deque[_Work]] = {}
        self._clocks: dict[Lane, dict[Lane, int]] = {}
        self._following: dict[Lane, list[_Work]] = {}
        self._host_clock: dict[Lane, int] = {}
        self._open: list[_Work] = []
        self._engines = {DeviceLane.H2D: _Engine(order), DeviceLane.D2H: _Engine(order)}
        """What copies: one way each, and one copy at a time, whatever lane it is on."""
        self._puts = 0
        self._failure: OffloadError | None = None
        self._acting = 0
        self._closed = False
        self._some = threading.Condition(self._lock)
        self._reports: deque[tuple[_Work | _Now, Queue, int]] = deque()
        self._threads = [threading.Thread(target=self._post_reports, name="sim-device-reports", daemon=True)]
        self._threads[0].start()
        for lane in lanes:
            self._open_lane(lane)

    def _open_lane(self, lane: Lane) -> None:
        self._queues[lane], self._clocks[lane], self._following[lane] = deque(), {}, []
        if not self._lazy:
            name = f"sim-device-{_name(lane).lower()}"
            self._threads.append(threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True))
            self._threads[-1].start()

    # Threads

    def prepare_thread(self) -> None:
        """See `Device.prepare_thread`."""
        self._thread.index = self._index

    def _check_thread(self) -> None:
        index = getattr(self._thread, "index", 0)
        if index != self._index:
            raise OffloadError(f"{self.name} {self._index} is asked by a thread that works for device {index}")

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Make a stream of the user's, of that name, the calling thread's caller's lane."""
        before, self._thread.stream = self._caller, name
        try:
            yield
        finally:
            self._thread.stream = before

    @property
    def _caller(self) -> Lane:
        return getattr(self._thread, "stream", DeviceLane.CALLER)

    def prepare(self, rule: str, kinds: Iterable[tuple[DtypeCode, DtypeCode, int]]) -> None:
        """See `Device.prepare`."""
        self.prepared |= set(kinds)

    # Memory

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory as torch's allocator would, on the caller's lane, which fills it.

        What was freed is given out again at once, on the lane that it was allocated on; what `record_use` notes, when
        the lane that gave it up has come to where it was freed.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            unused = self._unused[self._caller, nbytes]
            block = next((block for block in unused if all(mark.reached() for mark in block.ends)), None)
            if block is None:
                block = _Block(np.empty(nbytes, np.uint8), unused)
                self.user_bytes += nbytes
            else:
                unused.remove(block)
        begin = block.memory.ctypes.data
        self.caller_work("new memory", lambda: ctypes.memset(begin, POISON, nbytes), [(begin, begin + nbytes, True)])
        view = block.memory[:]
        self._blocks[begin] = block
        weakref.finalize(view, self._free, block).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def _free(self, block: _Block) -> None:
        with self._lock:
            users, block.users = block.users, set()
            if self._failure is None and not self._closed:
                block.ends = [self.put(lane, "mark", lambda: None, (), 0) for lane in users]
                block.unused.append(block)

    def record_use(self, tensor: torch.Tensor) -> None:
        """See `Device.record_use`."""
        block = self._blocks.get(tensor.data_ptr())
        if block is not None and self._unused[self._caller, block.memory.nbytes] is not block.unused:
            block.users.add(self._caller)

    @property
    def taken_bytes(self) -> int:
        """What `allocate` has given out, and nobody has given back."""
        with self._lock:
            return sum(block.nbytes for block in self._memory.values())

    def free_bytes(self) -> int:
        """See `Device.free_bytes`."""
        self._check_thread()
        return self._memory_bytes - self.taken_bytes

    def cached_bytes(self) -> int:
        """See `Device.cached_bytes`: nothing is cached."""
        return 0

    def allocate(self, nbytes: int, caller: Hashable = None) -> int:
        """See `Device.allocate`."""
        self._check_thread()
        with self._lock:
            if nbytes > self.free_bytes():
                raise OffloadError(f"{self.name}: no memory for {nbytes} bytes; {self.free_bytes()} are free")
            block = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
            skip = -block.ctypes.data % ALIGNMENT
            address: int = block.ctypes.data + skip
            self._memory[address] = memory = block[skip : skip + nbytes]
            if caller is not None:
                self._borrowed.append(address)
                if caller is not DeviceLane.CALLER or not self.caller_is_host:
                    self._overwrite(cast(Lane, caller), memory, "new memory")
            return address

    def release(self, address: int) -> None:
        """See `Device.release`."""
        with self._lock:
            block = self._memory[address]
            if self._failure is None:  # else nothing is done any more
                self.host_access(address, block.nbytes, writes=True)
            del self._memory[address]

    def return_borrowed(self) -> None:
        """See `Device.return_borrowed`."""
        with self._lock:
            borrowed, self._borrowed = [self._memory.pop(address) for address in self._borrowed], []
            if not borrowed or self._failure is not None:
                return
            self._open = [work for work in self._open if work.lane != FREED or not work.done.is_set()]
            for lane in LANES:
                self.follow(FREED, self.put(lane, "mark", lambda: None, (), 0))
            for block in borrowed:
                self._overwrite(FREED, block, "memory that was given back")

    def _overwrite(self, lane: Lane, memory: npt.NDArray[np.uint8], label: str) -> None:
        begin = memory.ctypes.data
        self.put(lane, label, lambda: memory.fill(POISON), ((begin, begin + memory.nbytes, True),), 0)

    def pin(self, address: int, nbytes: int) -> None:
        """See `Device.pin`."""
        self._check_thread()
        with self._lock:
            limit, total = self._pin_limits
            if nbytes > limit or sum(self.pinned.values()) + nbytes > total:
                raise OffloadError(f"{self.name}: {nbytes} bytes cannot be locked")
            first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
            for other, size in self.pinned.items():
                if other // mmap.PAGESIZE <= last and first <= (other + size - 1) // mmap.PAGESIZE:
                    raise OffloadError(f"{self.name}: a page at {address} has been registered before")
            self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        """See `Device.unpin`."""
        self._check_thread()
        nbytes = self.pinned.pop(address)
        if self._failure is None:
            self.host_access(address, nbytes, writes=True)

    # Order

    def mark(self, lane: DeviceLane, *, timed: bool = True) -> Mark:
        """See `Device.mark`."""
        self._check_caller(lane)
        if lane is DeviceLane.CALLER and self.caller_is_host:
            return _Now()
        mark = self.put(self._caller if lane is DeviceLane.CALLER else lane, "mark", lambda: None, (), 0)
        mark.timed = timed
        return mark

    def caller(self) -> Lane:
        """See `Device.caller`."""
        self._check_caller(DeviceLane.CALLER)
        return self._caller

    def mark_caller(self, caller: Hashable) -> Mark:
        """See `Device.mark_caller`."""
        if caller is DeviceLane.CALLER and self.caller_is_host:
            return _Now()
        return self.put(cast(Lane, caller), "mark", lambda: None, (), 0)

    def follow(self, lane: Lane, mark: Mark) -> None:
        """See `Device.follow`."""
        self._check_caller(lane)
        if lane is DeviceLane.CALLER and self.caller_is_host:
            mark.wait()
        elif isinstance(mark, _Work):
            with self._lock:
                lane = self._caller if lane is DeviceLane.CALLER else lane
                if lane not in self._queues:
                    self._open_lane(lane)
                self._following[lane].append(mark)

    def _check_caller(self, lane: Lane) -> None:
        self._check_thread()
        if lane is DeviceLane.CALLER and self.capturing:
            CAPTURED.refuse("optimizer", "used while a CUDA graph is captured")

    def report(self, mark: Mark, queue: Queue, op: int) -> None:
        """See `Device.report`."""
        with self._lock:
            if isinstance(mark, _Work | _Now):
                mark.time_s()
                self._reports.append((mark, queue, op))
            self._some.notify_all()

    def host_access(self, address: int, nbytes: int, *, writes: bool) -> None:
        """Say that the host touches memory now.

        Raises:
            HazardError: Work that nobody has waited for touches it, too.
        """
        with self._lock:
            self._compare("the host", Spans([(address, address + nbytes, writes)]), self._host_clock)

    def _compare(self, label: str, spans: Spans, clock: dict[Lane, int]) -> None:
        for work in self._open:
            if clock.get(work.lane, -1) >= work.number:
                continue
            if nbytes := conflict(spans, work.spans):
                raise HazardError(
                    f"{label} and {work.label} (number {work.number} on {_name(work.lane)}) touch the same "
                    f"{nbytes} bytes in no order"
                )

    def observe(self, work: _Work) -> None:
        """Take note that the host knows that a piece of work, and what came before it, has been done."""
        with self._lock:
            _merge(self._host_clock, {**work.clock, work.lane: work.number})
            self._open = [w for w in self._open if self._host_clock.get(w.lane, -1) < w.number]

    # Work

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int, piece_bytes: int = 0) -> None:
        """See `Device.copy`."""
        if nbytes:
            self._check_registrations(source if lane is DeviceLane.H2D else target, nbytes)
        for start in range(0, nbytes, piece_bytes or max(nbytes, 1)):
            size = min(piece_bytes or nbytes, nbytes - start)
            self.copy_on(lane, lane is DeviceLane.H2D, target + start, source + start, size)
            if piece_bytes:
                self.put(lane, "a pause", lambda: None, (), 0)

    def copy_on(self, lane: Lane, to_device: bool, target: int, source: int, nbytes: int) -> None:
        """Put a copy on a lane, or on a stream of the user's."""
        self.put(
            lane,
            f"a copy of {nbytes} bytes",
            lambda: ctypes.memmove(target, source, nbytes),
            ((source, source + nbytes, False), (target, target + nbytes, True)),
            nbytes,
            engine=self._engines[DeviceLane.H2D if to_device else DeviceLane.D2H],
        )

    def _check_registrations(self, address: int, nbytes: int) -> None:
        with self._lock:
            for start, size in self.pinned.items():
                if start <= address and address + nbytes <= start + size:
                    return
                if start < address + nbytes and address < start + size:
                    raise OffloadError(f"{self.name}: invalid argument: {nbytes} bytes that are pinned in part")
            self.pageable_bytes += nbytes

    def copy_pieces(self, lane: DeviceLane, pieces: npt.NDArray[np.uint64]) -> None:
        """See `Device.copy_pieces`."""
        rows = [row for row in pieces.tolist() if row[2]]
        if any(number % 2 for row in rows for number in row):
            raise InternalError("a piece of memory that is not made of 16-bit words")

        def act() -> None:
            for target, source, nbytes in rows:
                ctypes.memmove(target, source, nbytes)

        spans = [(source, source + nbytes, False) for _, source, nbytes in rows]
        spans += [(target, target + nbytes, True) for target, _, nbytes in rows]
        nbytes = sum(row[2] for row in rows)
        reads, written = Spans(spans[: len(rows)]).all, Spans(spans).written
        if _common(reads, written) or sum(written[1]) - sum(written[0]) != nbytes:
            raise HazardError("pieces are copied over one another")
        if rows:
            self.follow(lane, self._send_table(32 * len(rows)))
            self.put(lane, f"a copy of {len(rows)} pieces", act, tuple(spans), nbytes)

    def _send_table(self, nbytes: int) -> _Work:
        engine = self._engines[DeviceLane.H2D]
        return self.put(DeviceLane.H2D, "a table", lambda: None, (), nbytes, engine=engine)

    def send_table(self, table: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], _Work]:
        """See `Device.send_table`."""
        rows = as_segment_rows(table).copy()
        return rows, self._send_table(rows.nbytes)

    def update(self, sent: tuple[npt.NDArray[Any], _Work]) -> None:
        """See `Device.update`."""
        rows, there = sent
        spans = [span for row in rows for span in spans_of(row)]
        nbytes = sum(int(_state_of(row).item_bytes * int(row["numel"])) for row in rows)
        self.follow(DeviceLane.UPDATE, there)
        self.put(DeviceLane.UPDATE, "an update", lambda: self._kernel.run(rows), tuple(spans), nbytes)

    def gradient_blocks(
        self,
        lane: DeviceLane,
        source: int,
        dtype: DtypeCode,
        numel: int,
        blocks: int,
        target: int = 0,
        target_dtype: DtypeCode = DtypeCode.NONE,
        accumulate: bool = False,
    ) -> None:
        """See `Device.gradient_blocks`."""
        if not numel:
            return

        def act() -> None:
            if accumulate:
                into = _tensor(target, numel, target_dtype)
                into.add_(_tensor(source, numel, dtype))
                self._kernel.gradient_blocks(target, target_dtype, numel, blocks)
            else:
                self._kernel.gradient_blocks(source, dtype, numel, blocks, target, target_dtype)

        count = -(-numel // NORM_BLOCK_NUMEL)
        spans: tuple[Span, ...] = (
            (source, source + numel * int(ITEM_BYTES[dtype]), False),
            (blocks, blocks + 8 * count, True),
        )
        if target:
            spans += ((target, target + numel * int(ITEM_BYTES[target_dtype]), True),)
        self.put(lane, "a gradient", act, spans, numel * int(ITEM_BYTES[dtype]))

    def sum_gradients(self, lane: DeviceLane, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """See `Device.sum_gradients`."""
        self._look_at(lane, dtype, rows, "gradients", self._kernel.gradient_blocks)

    def fingerprint_gradients(self, lane: DeviceLane, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """See `Device.fingerprint_gradients`."""

        def of_one(source: int, dtype: DtypeCode, numel: int, parts: int) -> None:
            found = fingerprint_parts(_tensor(source, numel, dtype))
            ctypes.memmove(parts, found.data_ptr(), found.nbytes)

        self._look_at(lane, dtype, rows, "fingerprints", of_one)

    def _look_at(
        self,
        lane: DeviceLane,
        dtype: DtypeCode,
        rows: npt.NDArray[np.uint64],
        label: str,
        of_one: Callable[[int, DtypeCode, int, int], object],
    ) -> None:
        """Put on a lane what reads many gradients, and writes 64 bits for each block of each."""
        listed = [row for row in rows.tolist() if row[1]]

        def act() -> None:
            for source, numel, blocks in listed:
                of_one(source, dtype, numel, blocks)

        item = int(ITEM_BYTES[dtype])
        spans = [(source, source + numel * item, False) for source, numel, _ in listed]
        spans += [(blocks, blocks + 8 * -(-numel // NORM_BLOCK_NUMEL), True) for _, numel, blocks in listed]
        if listed:
            self.follow(lane, self._send_table(32 * len(listed)))
            self.put(lane, label, act, tuple(spans), item * sum(row[1] for row in listed))

    def caller_work(self, label: str, act: Callable[[], Any], spans: Iterable[Span]) -> None:
        """Put work on the caller's lane: a piece of forward or backward that touches `spans`."""
        self.put(self._caller, label, act, tuple(spans), 0)

    def put(
        self,
        lane: Lane,
        label: str,
        act: Callable[[], Any],
        spans: tuple[Span, ...],
        nbytes: int,
        *,
        engine: _Engine | None = None,
    ) -> _Work:
        """Put a piece of work on a lane, or on a stream."""
        self._check_thread()
        with self._lock:
            self.check()
            if self._closed:
                raise OffloadError(f"{self.name} is closed")
            if lane not in self._queues:
                self._open_lane(lane)
            requires, self._following[lane] = self._following[lane], []
            clock = self._clocks[lane]
            for other in requires:
                _merge(clock, {**other.clock, other.lane: other.number})
            _merge(clock, self._host_clock)
            number = clock.get(lane, -1) + 1
            touched = Spans(spans)
            self._compare(label, touched, clock)
            clock[lane] = number
            self._puts = place = self._puts + 1
            work = _Work(
                self, lane, number, label, act, touched, nbytes, dict(clock), requires, engine=engine, place=place
            )
            self._queues[lane].append(work)
            if spans:
                self._open.append(work)
            self._some.notify_all()
            return work

    def _serve(self, lane: Lane) -> None:
        while True:
            with self._some:
                while not self._queues[lane] and not self._closed:
                    self._some.wait()
                if not self._queues[lane]:
                    return
                work = self._queues[lane][0]
                delay_s = self._random.random() * self._delay_s if work.spans else 0.0
            for other in work.requires:
                other.done.wait()
            if self._bytes_per_s:
                delay_s += work.nbytes / self._bytes_per_s
            if work.engine is not None:
                work.engine.take(work.place, lane)
            if delay_s:
                time.sleep(delay_s)
            with self._lock:
                self._queues[lane].popleft()
            self.do(work)
            if work.engine is not None:
                with self._lock:
                    following = self._queues[lane][0] if self._queues[lane] else None
                stays = following is not None and following.engine is work.engine and following.is_ready
                work.engine.leave(lane, following.place if following is not None and stays else None)

    def finish(self, work: _Work) -> None:
        """Return when a piece of work has been done; do it, if nobody else does."""
        if not self._lazy:
            work.done.wait()
            return
        with self._doing:
            while not work.done.is_set():
                first = self._queues[work.lane][0]
                for other in first.requires:
                    self.finish(other)
                with self._lock:
                    self._queues[work.lane].popleft()
                self.do(first)

    def do(self, work: _Work) -> None:
        """Do a piece of work, unless the device has failed."""
        with self._lock:
            if work.spans and self._failure is None:
                self.done += 1
                if self.fail_at is not None and self.done > self.fail_at:
                    self._failure = OffloadError(f"{self.name} has failed in {work.label}")
            acts = self._failure is None
            self._acting += acts
        if acts:
            try:
                work.act()
            except OffloadError as error:
                self._failure = error
            with self._some:
                self._acting -= 1
                self._some.notify_all()
        work.at_s = time.monotonic()
        work.done.set()

    def _post_reports(self) -> None:
        while True:
            with self._some:
                while not self._reports and not self._closed:
                    self._some.wait()
                if not self._reports:
                    return
                mark, queue, op = self._reports.popleft()
            error = 0
            if isinstance(mark, _Work):
                self.finish(mark)
                self.observe(mark)
                error = ERROR_DEVICE if self._failure is not None else 0
            queue.post(op, error=error, started_s=mark.time_s(), finished_s=mark.time_s())

    def check(self) -> None:
        """Raise what made the device fail, if anything has; from then on it touches no memory."""
        if self._failure is not None:
            with self._some:
                while self._acting:
                    self._some.wait()
            raise self._failure

    def close(self) -> None:
        """See `Device.close`."""
        with self._lock:
            if self._closed:
                return
            left = [work for queue in self._queues.values() for work in queue]
        for work in left:
            self.finish(work)
        with self._some:
            self._closed = True
            self._some.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run on it
                thread.join()
        self._kernel.close()
        self._memory.clear()
        self._borrowed.clear()


def _name(lane: Lane) -> str:
    return lane if isinstance(lane, str) else lane.name


def _merge(clock: dict[Lane, int], other: dict[Lane, int]) -> None:
    for lane, number in other.items():
        clock[lane] = max(clock.get(lane, -1), number)


def _tensor(address: int, numel: int, dtype: DtypeCode) -> torch.Tensor:
    found = TORCH_DTYPES[dtype]
    if found is None:
        raise InternalError("a gradient without a dtype")
    memory = (ctypes.c_char * (numel * found.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=found)
