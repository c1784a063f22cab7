"""Checksums that updates make of state in memory, and verify of it.

An update seals the state that it has changed while that is in the processor's cache: a flush has its checksums from
there, and so has a checkpoint those of state at home in memory. What is read back and has the checksums of a known
seal is compared with it by the next update, again block by block in the cache, and the tier leaves that out. All else
that touches a slot has it verified before.

Invariants: no visitor, kernel or copy sees state that was read and not verified; a seal is given to a write only if
nobody but that update has written to the memory. All methods belong to the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from offload._native import crc32c
from offload.errors import known
from offload.layout import Subgroup
from offload.protocols import Seal, SealedState, TileId
from offload.schedule.operations import ReadTile, Run, SaveTile, WriteTile


@dataclass(slots=True)
class _Held:
    """What is known of a staging slot."""

    subgroup: int
    seal: Seal | None = None
    """Of what it holds."""
    unverified: dict[TileId, tuple[ReadTile, Seal]] = field(default_factory=dict)
    """Tiles that are to be compared with seals before anything uses them."""


class DamagedError(Exception):
    """A tile in memory is not what was read for."""

    def __init__(self, operation: ReadTile) -> None:
        super().__init__(operation)
        self.operation = operation


class Seals:
    """See the module.

    Args:
        slot_address: Returns the memory address of a staging slot.
    """

    def __init__(self, slot_address: Callable[[int], int]) -> None:
        self._slot_address = slot_address
        self._slots: dict[int, _Held] = {}
        self._homes: dict[int, Seal] = {}  # of what is at home in memory, by subgroup
        self._flushed: dict[int, Seal] = {}  # by subgroup
        self._running: dict[int, tuple[Run, Seal, _Held | None]] = {}
        self._offsets: dict[int, np.ndarray] = {}

    def reading(self, operation: ReadTile) -> bool:
        """Return whether the tier has to verify a tile that is about to be read: nobody does later."""
        tile, slot = operation.tile, operation.slot
        held = self._slots.get(slot)
        if held is None or held.subgroup != tile.subgroup or held.seal is not None:
            held = self._slots[slot] = _Held(tile.subgroup)
        seal = self._flushed.get(tile.subgroup)
        if seal is not None and seal.checksum(tile.tensor, tile.tile) == operation.record.checksum:
            held.unverified[tile] = operation, seal
            return False
        held.unverified.pop(tile, None)
        return True

    def writing(self, operation: WriteTile) -> int | None:
        """Return the checksum of a tile that is about to be flushed, if it is known."""
        tile = operation.tile
        held = self._slots.get(operation.slot)
        if held is None or held.subgroup != tile.subgroup or held.seal is None:
            self._flushed.pop(tile.subgroup, None)
            return None
        self._flushed[tile.subgroup] = held.seal
        return held.seal.checksum(tile.tensor, tile.tile)

    def saving(self, operation: SaveTile) -> int | None:
        """Return the checksum of a tile that is about to be saved, if it is known."""
        tile = operation.tile
        seal = self._homes.get(tile.subgroup) if operation.buffer is None else None
        return None if seal is None else seal.checksum(tile.tensor, tile.tile)

    def state(self, subgroup: Subgroup, address: int) -> SealedState:
        """Return where the state of a subgroup lies, as kernels are told."""
        if subgroup.index not in self._offsets:
            self._offsets[subgroup.index] = np.array([s.offset for s in subgroup.segments], np.uint64)
        tensors = [
            (address + subgroup.offsets[name], form.item_bytes, form.item_numel, form.nbytes(subgroup.numel))
            for name, form in subgroup.tensors
        ]
        return SealedState(tensors, self._offsets[subgroup.index], subgroup.numel, subgroup.tile_numel)

    def expected(self, run: Run, subgroup: Subgroup) -> Seal | None:
        """Return the seal that an update has to compare its state with, if any.

        Raises:
            DamagedError: A tile is not what was read for.
        """
        held = self._held(run)
        if held is None or not held.unverified:
            return None
        seals = [seal for _, seal in held.unverified.values()]
        if len(seals) == subgroup.tile_count and all(seal is seals[0] for seal in seals):
            return seals[0]
        self._verify(held)
        return None

    def started(self, run: Run, seal: Seal) -> None:
        """Take note of an update that will seal what it works on."""
        self._running[run.op] = run, seal, None if run.slot is None else self._slots.pop(run.slot, None)

    def ended(self, op: int) -> None:
        """Take note of the end of an operation that has ended well."""
        found = self._running.pop(op, None)
        if found is None:
            return
        run, seal, _ = found
        if run.slot is None:
            self._homes[run.visit.subgroup] = seal
        else:
            self._slots[run.slot] = _Held(run.visit.subgroup, seal)

    def damaged(self, op: int, detail: int) -> ReadTile:
        """Return which tile an update has found to be damaged, by what it reports."""
        run, _, held = self._running.pop(op)
        held = known(held, "an update has compared a slot with a seal that it does not have")
        return held.unverified[TileId(run.visit.subgroup, detail >> 32, detail & 0xFFFFFFFF)][0]

    def touched_home(self, subgroup: int) -> None:
        """Forget the seal of state at home in memory, which something is about to work on."""
        self._homes.pop(subgroup, None)

    def touched(self, slot: int, subgroup: int | None) -> None:
        """Have a slot verified that something else than an update is about to work on, and forget its seal.

        Args:
            slot: Which one.
            subgroup: What was read into it; None where whatever it holds is written over.

        Raises:
            DamagedError: A tile is not what was read for.
        """
        held = self._slots.pop(slot, None)
        if held is not None and held.subgroup == subgroup:
            self._verify(held)

    def _held(self, run: Run) -> _Held | None:
        held = None if run.slot is None or run.fresh else self._slots.get(run.slot)
        return held if held is not None and held.subgroup == run.visit.subgroup else None

    def _verify(self, held: _Held) -> None:
        for operation, _ in held.unverified.values():
            address = self._slot_address(operation.slot) + operation.buffer_offset
            if crc32c(address, operation.record.location.nbytes) != operation.record.checksum:
                raise DamagedError(operation)
