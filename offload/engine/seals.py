"""Checksums of state in memory, which updates make and verify.

A *seal* is the checksums of a subgroup's state, block by block. An update on the CPU seals the state that it has
changed, while that is in the processor's cache. Flushes take their checksums from the seal, and so do checkpoints of
state at home in memory.

Tiers, too, need not verify what a seal can. The seal of a subgroup's last flush is kept. If a tile is read whose
record has the checksum of that seal, the tier does not verify it: the next update compares the state with the seal,
again block by block in the cache. If anything else is about to use the staging slot, its tiles are verified before.

Invariants: no visitor, kernel or copy uses state that was read and not verified; a write takes its checksum from a
seal only if nothing but that update has written to the memory. All methods belong to the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

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


class _SealedUpdate(NamedTuple):
    """An update that is running."""

    run: RunVisit
    seal: Seal
    """Of the state that it makes; the update fills it."""
    slot_state: _SlotState | None
    """What was known of its staging slot before it; None at home, or if nothing was known."""


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
        self._running: dict[int, _SealedUpdate] = {}
        self._offsets: dict[int, np.ndarray] = {}  # of segments, by subgroup

    def note_read(self, operation: ReadTile) -> bool:
        """Note that a tile is about to be read; return whether the tier has to verify it.

        False if it is noted as unverified: the next update, or `verify_and_forget`, compares it.
        """
        tile, slot = operation.tile, operation.slot
        if slot is None:  # to its home
            return True
        state = self._slots.get(slot)
        # A seal says that the slot has been filled: this tile is the first of a new fetch.
        if state is None or state.subgroup != tile.subgroup or state.seal is not None:
            state = self._slots[slot] = _SlotState(tile.subgroup)
        flushed_seal = self._flushed.get(tile.subgroup)
        if flushed_seal is not None and flushed_seal.checksum(tile.tensor, tile.tile) == operation.record.checksum:
            state.unverified[tile] = operation, flushed_seal
            return False
        state.unverified.pop(tile, None)  # of an earlier read of it to this slot
        return True

    def checksum_for_flush(self, operation: WriteTile) -> int | None:
        """Return the checksum of a tile that is about to be flushed, if it is known.

        The seal of the state is kept: an update verifies the tiles with it when they have been read again.
        """
        tile = operation.tile
        if operation.slot is None:
            return self._home_checksum(tile)
        state = self._slots.get(operation.slot)
        if state is None or state.subgroup != tile.subgroup or state.seal is None:
            self._flushed.pop(tile.subgroup, None)  # of an older version
            return None
        self._flushed[tile.subgroup] = state.seal
        return state.seal.checksum(tile.tensor, tile.tile)

    def checksum_for_save(self, operation: SaveTile) -> int | None:
        """Return the checksum of a tile that is about to be saved, if it is known.

        It may be for state that is saved from its home in memory; it never is for what a copy buffer holds.
        """
        return self._home_checksum(operation.tile) if operation.buffer is None else None

    def _home_checksum(self, tile: TileId) -> int | None:
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

    def seal_to_compare_or_verify(self, run: RunVisit, subgroup: Subgroup) -> Seal | None:
        """Return the seal that an update has to compare its state with; None if all tiles are verified.

        The kernel compares all tiles with one seal, or none of them. If only some tiles are unverified, or they have
        different seals, they are verified here.

        Raises:
            DamagedError: A tile does not have the checksum of its record.
        """
        state = self._read_slot_state(run)
        if state is None or not state.unverified:
            return None
        seals = [seal for _, seal in state.unverified.values()]
        has_one_seal = all(seal is seals[0] for seal in seals)
        if len(seals) == subgroup.tile_count and has_one_seal:
            return seals[0]
        self._verify(state)
        return None

    def note_started(self, run: RunVisit, seal: Seal) -> None:
        """Note that an update has started, which fills this new seal; what was known of its slot ends with it."""
        slot_state = None if run.slot is None else self._slots.pop(run.slot, None)
        self._running[run.op] = _SealedUpdate(run, seal, slot_state)

    def note_ended(self, op: int) -> None:
        """Note that an operation has ended well; if it is an update, its seal is valid from now on."""
        update = self._running.pop(op, None)
        if update is None:
            return
        run = update.run
        if run.slot is None:
            self._homes[run.visit.subgroup] = update.seal
        else:
            self._slots[run.slot] = _SlotState(run.visit.subgroup, update.seal)

    def take_damaged_read(self, op: int, detail: int) -> ReadTile:
        """Forget an update that has failed; return the read of the tile that it has reported as damaged.

        Args:
            detail: As the kernel reports it: the number of the tensor in the high 32 bits, that of the tile below.
        """
        update = self._running.pop(op)
        slot_state = known(update.slot_state, "an update has compared a slot with a seal that it does not have")
        tile = TileId(update.run.visit.subgroup, detail >> 32, detail & 0xFFFFFFFF)
        read, _ = slot_state.unverified[tile]
        return read

    def forget_home(self, subgroup: int) -> None:
        """Forget the seal of state at home in memory, which is about to be changed."""
        self._homes.pop(subgroup, None)

    def verify_and_forget(self, slot: int, subgroup: int | None) -> None:
        """Verify a slot that something other than an update is about to use, and forget its seal.

        Args:
            subgroup: The subgroup whose state it holds; None if the content will be overwritten.

        Raises:
            DamagedError: A tile does not have the checksum of its record.
        """
        state = self._slots.pop(slot, None)
        if state is not None and state.subgroup == subgroup:
            self._verify(state)

    def _read_slot_state(self, run: RunVisit) -> _SlotState | None:
        """Return what is known of the slot from which a run reads its state; None if it reads none there."""
        if run.slot is None or run.fresh:
            return None
        state = self._slots.get(run.slot)
        return state if state is not None and state.subgroup == run.visit.subgroup else None

    def _verify(self, state: _SlotState) -> None:
        """Compare all unverified tiles of a slot with their records' checksums; raise `DamagedError` if unlike."""
        for operation, _ in state.unverified.values():
            slot = known(operation.slot, "a tile at home waits to be verified")
            address = self._memory.slot_address(slot) + operation.buffer_offset
            if crc32c(address, operation.record.location.nbytes) != operation.record.checksum:
                raise DamagedError(operation)
