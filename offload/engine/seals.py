"""Checksums of state in memory, which updates make and verify.

A *seal* is the checksums of a subgroup's state, block by block. An update seals the state that it has changed while
that is in the processor's cache. Flushes take their checksums from the seal, and so do checkpoints of state at home
in memory. If a tile is to be read whose record has the checksum of the seal that was flushed, the next update
compares it with the seal, again block by block in the cache, and the tier does not verify it. Before anything else
uses a slot, its tiles are verified.

Invariants: no visitor, kernel or copy sees state that was read and not verified; a write takes its checksum from a
seal only if nothing but that update has written to the memory. All methods belong to the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from offload._native import crc32c
from offload.device.host import HostMemory
from offload.errors import known
from offload.layout import Subgroup
from offload.protocols import Seal, SealedState, TileId
from offload.schedule.operations import ReadTile, RunVisit, SaveTile, WriteTile


@dataclass(slots=True)
class _SlotState:
    """The seals of a staging slot's content."""

    subgroup: int
    seal: Seal | None = None
    """Of the whole content; None after tiles were read, or something but an update has used the slot."""
    unverified: dict[TileId, tuple[ReadTile, Seal]] = field(default_factory=dict)
    """Tiles to compare with seals before anything uses them."""


class DamagedError(Exception):
    """A tile in memory does not have the checksum of its record."""

    def __init__(self, operation: ReadTile) -> None:
        super().__init__(operation)
        self.operation = operation


class Seals:
    """The seals of one session's state in memory, and which tiles in staging slots are not verified yet."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._slots: dict[int, _SlotState] = {}
        self._homes: dict[int, Seal] = {}  # of state at home in memory, by subgroup
        self._flushed: dict[int, Seal] = {}  # of the state that was flushed last, by subgroup
        self._running: dict[int, tuple[RunVisit, Seal, _SlotState | None]] = {}  # with what their slots held
        self._offsets: dict[int, np.ndarray] = {}  # of segments, by subgroup

    def reading(self, operation: ReadTile) -> bool:
        """Return whether the tier has to verify a tile that is about to be read; if not, the next update does."""
        tile, slot = operation.tile, operation.slot
        if slot is None:  # to its home
            return True
        state = self._slots.get(slot)
        if state is None or state.subgroup != tile.subgroup or state.seal is not None:
            state = self._slots[slot] = _SlotState(tile.subgroup)
        seal = self._flushed.get(tile.subgroup)
        if seal is not None and seal.checksum(tile.tensor, tile.tile) == operation.record.checksum:
            state.unverified[tile] = operation, seal
            return False
        state.unverified.pop(tile, None)
        return True

    def writing(self, operation: WriteTile) -> int | None:
        """Return the checksum of a tile that is about to be flushed, if it is known."""
        tile = operation.tile
        if operation.slot is None:
            return self.at_home(tile)
        state = self._slots.get(operation.slot)
        if state is None or state.subgroup != tile.subgroup or state.seal is None:
            self._flushed.pop(tile.subgroup, None)
            return None
        self._flushed[tile.subgroup] = state.seal
        return state.seal.checksum(tile.tensor, tile.tile)

    def saving(self, operation: SaveTile) -> int | None:
        """Return the checksum of a tile that is about to be saved, if it is known."""
        return self.at_home(operation.tile) if operation.buffer is None else None

    def at_home(self, tile: TileId) -> int | None:
        """Return the checksum of a tile at home in memory, if it is known."""
        seal = self._homes.get(tile.subgroup)
        return None if seal is None else seal.checksum(tile.tensor, tile.tile)

    def state(self, subgroup: Subgroup, address: int) -> SealedState:
        """Return the addresses and sizes of a subgroup's state tensors, for kernels."""
        if subgroup.index not in self._offsets:
            self._offsets[subgroup.index] = np.array([s.offset for s in subgroup.segments], np.uint64)
        tensors = [
            (address + subgroup.offsets[name], form.item_bytes, form.item_numel, form.nbytes(subgroup.numel))
            for name, form in subgroup.tensors
        ]
        return SealedState(tensors, self._offsets[subgroup.index], subgroup.numel, subgroup.tile_numel)

    def expected(self, run: RunVisit, subgroup: Subgroup) -> Seal | None:
        """Return the seal that an update has to compare its state with; None after verifying the tiles here.

        Raises:
            DamagedError: A tile does not have the checksum of its record.
        """
        state = self._slot_of(run)
        if state is None or not state.unverified:
            return None
        seals = [seal for _, seal in state.unverified.values()]
        if len(seals) == subgroup.tile_count and all(seal is seals[0] for seal in seals):
            return seals[0]
        self._verify(state)
        return None

    def started(self, run: RunVisit, seal: Seal) -> None:
        """Note that an update has started, which fills this seal."""
        self._running[run.op] = run, seal, None if run.slot is None else self._slots.pop(run.slot, None)

    def ended(self, op: int) -> None:
        """Note that an operation has ended well; if it is an update, its seal is valid from now on."""
        update = self._running.pop(op, None)
        if update is None:
            return
        run, seal, _ = update
        if run.slot is None:
            self._homes[run.visit.subgroup] = seal
        else:
            self._slots[run.slot] = _SlotState(run.visit.subgroup, seal)

    def damaged(self, op: int, detail: int) -> ReadTile:
        """Return the read of the tile that an update has reported as damaged."""
        run, _, state = self._running.pop(op)
        state = known(state, "an update has compared a slot with a seal that it does not have")
        return state.unverified[TileId(run.visit.subgroup, detail >> 32, detail & 0xFFFFFFFF)][0]

    def touched_home(self, subgroup: int) -> None:
        """Forget the seal of state at home in memory, which is about to be changed."""
        self._homes.pop(subgroup, None)

    def touched(self, slot: int, subgroup: int | None) -> None:
        """Verify a slot that something other than an update is about to use, and forget its seal.

        Args:
            subgroup: The subgroup whose state it holds; None if the content will be overwritten.

        Raises:
            DamagedError: A tile does not have the checksum of its record.
        """
        state = self._slots.pop(slot, None)
        if state is not None and state.subgroup == subgroup:
            self._verify(state)

    def _slot_of(self, run: RunVisit) -> _SlotState | None:
        """Return what is known of the slot from which a run reads its state; None if it reads none there."""
        state = None if run.slot is None or run.fresh else self._slots.get(run.slot)
        return state if state is not None and state.subgroup == run.visit.subgroup else None

    def _verify(self, state: _SlotState) -> None:
        """Compare all unverified tiles of a slot with their records' checksums."""
        for operation, _ in state.unverified.values():
            slot = known(operation.slot, "a tile at home waits to be verified")
            address = self._memory.slot_address(slot) + operation.buffer_offset
            if crc32c(address, operation.record.location.nbytes) != operation.record.checksum:
                raise DamagedError(operation)
