"""What all probes work with: state to update in memory, and tiles to move on a path, as loads of lanes."""

from __future__ import annotations

import ctypes
import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.errors import OffloadError, TierError
from offload.formats import StateSpec
from offload.kernels import CpuUpdateKernel, StreamVariant
from offload.kernels.table import trial_items, trial_table
from offload.measure.drive import Load
from offload.memory.arenas import HUGE_PAGE_BYTES, Arena
from offload.plan.rates import UPDATE_MEMORY_COST
from offload.protocols import Completion, Tier, TileId, TileRequest, UpdateKernel
from offload.tiers import slot_bytes, tier_error

CHUNK_NUMEL = 1 << 21
"""Elements of one update at most."""

UPDATE_DEPTH = 2
"""Updates in flight at once, as in a step."""

UNSEEN_SLOWDOWN = 0.03
"""Slow-downs of the update below this are noise, and say nothing about what I/O costs."""


def memory_cost(
    memory_bytes_per_s: float, cpu_bytes_per_s: float, speed: float, io_bytes_per_s: float, spread: float = 0.0
) -> float:
    """Return `memory_cost` of a path (or a link) from what its traffic left of the update.

    With it `Rates.cpu_speed` gives that part back for a path at its rates. Beside an update the path itself may have
    been slower; as predictions let it go on at its rates, the loss is spread over those.

    Args:
        memory_bytes_per_s: Host memory bandwidth.
        cpu_bytes_per_s: The update's rate alone.
        speed: The part of it that was left; 1 for all.
        io_bytes_per_s: The path's rates, both directions together.
        spread: How far apart the runs for `speed` are; a loss of less than half of it is noise.
    """
    left = memory_bytes_per_s - speed * cpu_bytes_per_s * UPDATE_MEMORY_COST
    cost = max(0.0, left / io_bytes_per_s)
    # An update that was not slowed leaves only an upper limit: take plain DMA's cost where that is below it.
    return min(cost, 1.0) if 1 - speed <= max(UNSEEN_SLOWDOWN, spread / 2) else cost


class Borrowed:
    """Memory of somebody else, as an arena.

    Args:
        address: Where it begins.
        nbytes: Its size.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def numpy(self, offset: int, numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See `Arena.numpy`."""
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        return np.frombuffer(memoryview(memory), dtype, numel, offset)

    def close(self) -> None:
        """Leave it to its owner."""


class TrialState:
    """State, gradient and weight of `numel` elements in huge pages, to be updated chunk by chunk.

    Args:
        spec: What the state is.
        numel: Elements.
        depth: Updates in flight at once.
        prefault: Touch all memory now.
        borrowed: Where to put it, if there is room: the address of memory that nobody uses, and its size.

    Attributes:
        chunks: How many there are.
    """

    def __init__(
        self,
        spec: StateSpec,
        numel: int,
        depth: int = 1,
        *,
        prefault: bool = False,
        borrowed: tuple[int, int] = (0, 0),
    ) -> None:
        self.numel = numel
        self._spec = spec
        self._depth = depth
        self._items = trial_items(spec)
        offsets, end = {}, 0
        for index, (name, stored) in enumerate(self._items.items()):
            # Tensors a large power of two apart would compete for the same places in the first-level cache.
            offsets[name] = -(-end // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + index * (68 << 10)
            end = offsets[name] + stored.offset(numel)
        self._arena: Arena | Borrowed
        if end <= borrowed[1]:
            self._arena = Borrowed(*borrowed)
            ctypes.memset(self._arena.address, 0, end)  # some bits, as moments, take the kernel several times as long
        else:
            self._arena = Arena(end, prefault=prefault)
        self.close = self._arena.close
        self._addresses = {name: self._arena.address + offset for name, offset in offsets.items()}
        values = np.random.default_rng(0).standard_normal(min(numel, 1 << 16), np.float32)
        halves = values.view(np.uint16)[1::2]  # the upper half of a float32 is a bfloat16
        if self._items["master"].item_bytes == 4:
            _repeat(values, self._arena.numpy(offsets["master"], numel, np.float32))
        else:
            _repeat(halves, self._arena.numpy(offsets["master"], numel, np.uint16))
        _repeat(halves, self._arena.numpy(offsets["gradient"], numel, np.uint16))
        self._chunk_numel = min(CHUNK_NUMEL, numel // depth)
        starts = range(0, numel - self._chunk_numel + 1, self._chunk_numel)
        self._chunks = [self.table(start, self._chunk_numel) for start in starts]
        self.chunks = len(self._chunks)

    def table(self, start: int, numel: int) -> np.ndarray[Any, Any]:
        """Return the segment table of a run of elements."""
        addresses = {name: address + self._items[name].offset(start) for name, address in self._addresses.items()}
        return trial_table(self._spec, addresses, numel)

    def stream_rate(self, kernel: CpuUpdateKernel, *variants: StreamVariant) -> float:
        """Return the bytes per second, reads and writes together, of passes over all memory: one for each variant."""
        whole, started_s = self.table(0, self.numel), time.perf_counter()
        for variant in variants:
            kernel.stream(whole, variant)
        moved_bytes = len(variants) * self.numel * self._spec.item_bytes * self._spec.memory_cost
        return moved_bytes / (time.perf_counter() - started_s)

    def updates(self, kernel: UpdateKernel, count: int | None) -> Load:
        """Return updates of the chunks in turn."""
        turns = [itertools.cycle(self._chunks[place :: self._depth]) for place in range(self._depth)]

        def start(op: int, place: int) -> None:
            kernel.submit(op, next(turns[place]))

        def error(completion: Completion) -> OffloadError:
            return TierError("update", tier="host", path="cpu", detail=f"the kernel reports {completion.error}")

        return Load("cpu", int(self._chunk_numel * self._spec.item_bytes), self._depth, start, error, count)


def _repeat(values: np.ndarray[Any, Any], into: np.ndarray[Any, Any]) -> None:
    """Fill an array with values over and over; nothing of its size is made on the way."""
    for start in range(0, into.size, values.size):
        part = into[start : start + values.size]
        part[:] = values[: part.size]


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of one size on a path.

    Attributes:
        tier: The path.
        tile_bytes: Size of a tile, a multiple of a sector.
        number: Tells their tiles from those of other slots.
        offset: Byte offset of slot 0.
        verify: See `TileRequest`.
    """

    tier: Tier
    tile_bytes: int
    number: int = 0
    offset: int = 0
    verify: bool = True

    def load(self, verb: str, slots: range, address: int, depth: int | None = None, count: int | None = None) -> Load:
        """Return reads or writes of tiles on lane `verb`.

        Args:
            verb: "read" or "write".
            slots: Which to use in turn; those that are read have been written.
            address: Memory for `depth` tiles.
            depth: Transfers in flight at once; None for all slots.
            count: Transfers in all; None for as many as there are slots. Each slot has one only with the depth None:
                else a place that is faster takes its slots anew before a slower one has taken all of its.
        """
        depth, nbytes = depth or len(slots), self.tile_bytes
        call = self.tier.read if verb == "read" else self.tier.write
        # Each place has slots of its own: no slot is written again before it has been.
        turns = [itertools.cycle(slots[place::depth]) for place in range(depth)]

        def start(op: int, place: int) -> None:
            slot = next(turns[place])
            tile, offset = TileId(self.number, 0, slot), self.offset + slot * slot_bytes(nbytes)
            call(TileRequest(op, tile, 0, offset, address + place * nbytes, nbytes, None, self.verify))

        def error(completion: Completion) -> OffloadError:
            return tier_error("probe", completion, None, self.tier)

        what = f"path {self.tier.path}"
        return Load(verb, nbytes, depth, start, error, len(slots) if count is None else count, what)
