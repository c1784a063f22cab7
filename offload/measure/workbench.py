"""What probes measure with: state in memory to update, and tiles of a path to move, both as loads of lanes."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.errors import OffloadError, TierError
from offload.formats import StateSpec
from offload.kernels import CpuUpdateKernel, StreamVariant
from offload.kernels.table import trial_items, trial_table
from offload.layout import round_up
from offload.measure.drive import Load
from offload.memory.arenas import HUGE_PAGE_BYTES, Arena
from offload.plan.rates import UPDATE_MEMORY_COST
from offload.protocols import Completion, Tier, TileId, TileRequest, UpdateKernel
from offload.tiers import slot_bytes, tier_error

CHUNK_NUMEL = 1 << 21
"""Most elements of one update."""

UPDATE_DEPTH = 2
"""Updates in flight at once, as in a step."""

UNSEEN_SLOWDOWN = 0.03
"""Slow-downs of the update by less than this part are noise and show no cost of I/O."""


def memory_cost(
    memory_bytes_per_s: float, cpu_bytes_per_s: float, kept_part: float, io_bytes_per_s: float, spread: float = 0.0
) -> float:
    """Return how many bytes of memory bandwidth the update loses for each byte that a path (or a link) moves.

    Alone, the update ran at `cpu_bytes_per_s`; with the I/O beside it, at `kept_part` of that. The memory bandwidth
    that it then did not use was taken by the I/O, so the cost is that bandwidth over the bytes of I/O a second. It
    solves `kept_part = Rates.cpu_speed(cost * io_bytes_per_s)`.

    Args:
        memory_bytes_per_s: Host memory bandwidth.
        cpu_bytes_per_s: The update's rate alone.
        kept_part: The part of that rate that the update kept beside the I/O; 1 for all.
        io_bytes_per_s: The path's rates without the update, both directions together: predictions use these, even if
            the path was slower beside the update.
        spread: Spread of the runs for `kept_part`. A loss of less than half the spread is noise.
    """
    unused = memory_bytes_per_s - kept_part * cpu_bytes_per_s * UPDATE_MEMORY_COST
    cost = max(0.0, unused / io_bytes_per_s)
    is_noise = 1 - kept_part <= max(UNSEEN_SLOWDOWN, spread / 2)
    # If the slow-down is noise, the measured cost is only an upper bound; take no more than plain DMA costs, 1.
    return min(cost, 1.0) if is_noise else cost


class Borrowed:
    """Memory of another owner, with those methods of an `Arena` that `TrialState` uses."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def numpy(self, offset: int, numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array over a part of the memory, as `Arena.numpy` does."""
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        return np.frombuffer(memoryview(memory), dtype, numel, offset)

    def close(self) -> None:
        """Do nothing: the owner frees the memory."""


class TrialState:
    """State, gradient and weight of `numel` elements in huge pages, to be updated chunk by chunk.

    Args:
        spec: The rule, and how its state is stored.
        numel: Elements.
        depth: Updates in flight at once; each has chunks of its own.
        prefault: Touch all pages of memory that is allocated here.
        borrowed: Address and size of unused memory, which is used if it is large enough; zeros for none.

    Attributes:
        numel: Elements.
        chunks: Number of chunks, each of as many elements as one update has.
        close: Frees the memory, unless it was borrowed.
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
        self._items = trial_items(spec)  # the tensors, by name, with their formats
        offsets = {}  # of each tensor in the memory, in bytes
        end = 0
        for index, (name, stored) in enumerate(self._items.items()):
            # Not all at the start of a page, 68 KiB further for each tensor: tensors that lie a large power of two
            # apart would compete for the same places in the first-level cache.
            offsets[name] = round_up(end, HUGE_PAGE_BYTES) + index * (68 << 10)
            end = offsets[name] + stored.offset(numel)
        self._arena: Arena | Borrowed  # of all tensors
        _, borrowed_bytes = borrowed
        if end <= borrowed_bytes:
            self._arena = Borrowed(*borrowed)
            # Old bits, read as moments, may slow the kernel down several times: begin with zeros, as an arena does.
            ctypes.memset(self._arena.address, 0, end)
        else:
            self._arena = Arena(end, prefault=prefault)
        self.close = self._arena.close
        self._addresses = {name: self._arena.address + offset for name, offset in offsets.items()}
        self._fill(offsets)
        self._chunk_numel = min(CHUNK_NUMEL, numel // depth)
        starts = range(0, numel - self._chunk_numel + 1, self._chunk_numel)
        self._chunks = [self.table(start, self._chunk_numel) for start in starts]
        self.chunks = len(self._chunks)

    def _fill(self, offsets: Mapping[str, int]) -> None:
        """Fill master and gradient with random numbers; all else stays 0."""
        values = np.random.default_rng(0).standard_normal(min(self.numel, 1 << 16), np.float32)
        bf16_values = values.view(np.uint16)[1::2]  # the upper half of a float32 is a bfloat16
        if self._items["master"].item_bytes == 4:  # else the tensor has the upper 16 bits of the master
            _repeat(values, self._arena.numpy(offsets["master"], self.numel, np.float32))
        else:
            _repeat(bf16_values, self._arena.numpy(offsets["master"], self.numel, np.uint16))
        _repeat(bf16_values, self._arena.numpy(offsets["gradient"], self.numel, np.uint16))

    def table(self, start: int, numel: int) -> np.ndarray[Any, Any]:
        """Return the segment table of the update of `numel` elements, from element `start` on."""
        addresses = {name: address + self._items[name].offset(start) for name, address in self._addresses.items()}
        return trial_table(self._spec, addresses, numel)

    def stream_rate(self, kernel: CpuUpdateKernel, *variants: StreamVariant) -> float:
        """Make a pass over all memory for each variant; return their bytes a second, reads and writes together."""
        whole = self.table(0, self.numel)
        started_s = time.perf_counter()
        for variant in variants:
            kernel.stream(whole, variant)
        moved_bytes = len(variants) * self.numel * self._spec.item_bytes * self._spec.memory_cost
        return moved_bytes / (time.perf_counter() - started_s)

    def updates(self, kernel: UpdateKernel, count: int | None) -> Load:
        """Return a load of `count` updates (see `Load.count`), one of each chunk in turn, again and again."""
        # Each of the load's places has chunks of its own, so that no chunk has two updates at once.
        turns = [itertools.cycle(self._chunks[place :: self._depth]) for place in range(self._depth)]

        def start(op: int, place: int) -> None:
            """Start the update of a place's next chunk."""
            kernel.submit(op, next(turns[place]))

        def error(completion: Completion) -> OffloadError:
            """Return the error of an update that failed."""
            return TierError("update", tier="host", path="cpu", detail=f"the kernel reports {completion.error}")

        nbytes = int(self._chunk_numel * self._spec.item_bytes)
        return Load("cpu", nbytes, self._depth, start=start, error=error, count=count)


def _repeat(values: np.ndarray[Any, Any], into: np.ndarray[Any, Any]) -> None:
    """Fill the array `into` with repetitions of values, without a temporary array of its size."""
    for start in range(0, into.size, values.size):
        part = into[start : start + values.size]
        part[:] = values[: part.size]


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of one size on a path.

    Attributes:
        tier: The path.
        tile_bytes: Size of a tile, a multiple of a sector.
        number: Subgroup number in the ids of their tiles; other `Slots` of the path have another one.
        offset: Byte offset of slot 0 in the store.
        verify: See `TileRequest`.
    """

    tier: Tier
    tile_bytes: int
    number: int = 0
    offset: int = 0
    verify: bool = True

    def load(self, verb: str, slots: range, address: int, depth: int | None = None, count: int | None = None) -> Load:
        """Return a load that reads or writes tiles, on lane `verb`.

        As many transfers are in flight as the load has places (see `Load.start`). Each place has memory for a tile
        and slots of its own, which it uses in turn, so that no slot has two transfers at once.

        Args:
            verb: "read" or "write".
            slots: Numbers of the slots. To be read, they must have been written.
            address: Memory for `depth` tiles.
            depth: Number of places, at most one for each slot; None for one for each slot.
            count: Transfers in all; None for as many as there are slots. Each slot is then sure to have exactly one
                only if `depth` is None: otherwise a fast place begins again with its first slot before a slow one has
                come to its last.
        """
        depth = depth or len(slots)
        nbytes = self.tile_bytes
        transfer = self.tier.read if verb == "read" else self.tier.write
        turns = [itertools.cycle(slots[place::depth]) for place in range(depth)]

        def start(op: int, place: int) -> None:
            """Start the transfer of a place's next slot."""
            slot = next(turns[place])
            tile = TileId(self.number, 0, slot)
            offset = self.offset + slot * slot_bytes(nbytes)
            place_address = address + place * nbytes
            # All tiles have version 0. A read accepts the checksum that the slot's header has.
            transfer(TileRequest(op, tile, 0, offset, place_address, nbytes, checksum=None, verify=self.verify))

        def error(completion: Completion) -> OffloadError:
            """Return the error of a transfer that failed."""
            return tier_error("probe", completion, None, self.tier)

        count = len(slots) if count is None else count
        return Load(verb, nbytes, depth, start=start, error=error, count=count, what=f"path {self.tier.path}")
