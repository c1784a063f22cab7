"""Bytes for a simulated run: staging slots, resident state and what every path holds, in memory.

The model is unkind on purpose, so that a rule that is broken shows in the bytes: a buffer holds rubbish from the
moment a read into it starts until it ends; a slot of a store is unreadable from the moment a write to it starts;
a write takes its payload, and a visit its state, at the last moment.

What a crash leaves is `SimStore.crash`: everything synced that was not written to since, and of the unsynced
writes some, chosen by the seed.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.errors import CorruptRecordError
from offload.formats import FP32
from offload.plan.budget import Plan
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule import operations as ops
from offload.schedule.index import Location, TileRecord
from offload.schedule.saving import SAVE_DEPTH

State = npt.NDArray[np.uint32]

Update = Callable[[ops.RunVisit, State], None]
"""Works on the whole state of a run's subgroup, in place; its words are whatever the callable takes them for."""

RUBBISH = 0xDEADBEEF
_MASK = 0xFFFFFFFF


def mix(run: ops.RunVisit, state: State) -> None:
    """Stand in for an update: every word depends on its place and on all sweeps that changed it, in order."""
    if not run.visit.changes:
        return
    if run.fresh or run.visit.overwrites:
        state[:] = np.arange(state.size, dtype=np.uint32)
        state *= np.uint32(2654435761)
        state += np.uint32(run.visit.subgroup)
    state *= np.uint32(1664525)
    state += np.uint32((1013904223 + 40503 * run.sweep) & _MASK)


def mix_weights(run: ops.RunVisit, weights: State) -> None:
    """Stand in for what an update does to weights that are masters."""
    weights *= np.uint32(22695477)
    weights += np.uint32((run.sweep * 69069 + run.visit.subgroup) & _MASK)


@dataclass(frozen=True, slots=True)
class StoredTile:
    """What one slot of a store holds: the header's identity and the payload."""

    tile: TileId
    step: int
    checksum: int
    payload: bytes


def path_name(plan: Plan, path: int) -> str:
    """Return a path's name; the one after the last is the store that takes copies."""
    return plan.budgets.paths[path].name if path < len(plan.budgets.paths) else "copies"


class SimStore:
    """Slots of one path by byte offset; None where a write has started and not ended."""

    def __init__(self) -> None:
        self.slots: dict[int, StoredTile | None] = {}
        self._durable: dict[int, StoredTile | None] = {}

    def sync(self, written: Mapping[int, StoredTile | None] | None = None) -> None:
        """Make what had been written (by then; by now, if None) survive a crash."""
        self._durable.update(self.slots if written is None else written)

    def crash(self, rng: random.Random) -> None:
        """Lose unsynced writes: each slot written since the last sync holds the old, the new, or neither."""
        for offset in sorted(self.slots.keys() | self._durable.keys()):
            now, before = self.slots.get(offset), self._durable.get(offset)
            if now is not before:
                self.slots[offset] = rng.choice((now, before, None))
        self._durable = dict(self.slots)


def _rubbish(nbytes: int, count: int = 1) -> list[State]:
    """Return buffers of that size in which nothing has been put."""
    return [np.full(nbytes // FP32.item_bytes, RUBBISH, np.uint32) for _ in range(count)]


class SimData:
    """Memory and stores of one simulated session.

    A run does `update` to its state; `pushed` is told of pushed weights when they are on the GPU.

    A read, a write and a copy take what is at their source at the last moment, when they end.
    """

    def __init__(
        self, plan: Plan, update: Update = mix, pushed: Callable[[ops.Transfer], None] = lambda push: None
    ) -> None:
        self.plan = plan
        self.update = update
        self.pushed = pushed
        subgroups = plan.layout.subgroups
        self.staging = _rubbish(plan.slot_bytes, plan.staging_slots)
        self.resident = {s.index: _rubbish(s.state_bytes)[0] for s in subgroups if plan.is_resident(s.index)}
        self.gpu = _rubbish(plan.gpu_slot_bytes, plan.gpu_slots)
        self.gradients = _rubbish(plan.gradient_buffer_bytes, plan.gradient_buffers)
        """What each gradient buffer holds."""
        self.activations = _rubbish(plan.budgets.activation_tile_bytes, plan.activation_buffers)
        """What each activation buffer holds."""
        # One more than there are paths: the store that takes copies.
        self.stores = [SimStore() for _ in range(len(plan.budgets.paths) + 1)]
        self.weights = {s.index: np.zeros(s.numel, np.uint32) for s in subgroups if s.weight_tiles}
        """Of each subgroup whose weights are its masters, their image."""
        self.images: dict[int, State] = {}
        """The same of versions beside the live ones, until they are published."""
        self.buffers = _rubbish(max((n for s in subgroups for _, _, n in s.tiles), default=0), SAVE_DEPTH)
        self.committed: dict[int, Mapping[TileId, TileRecord]] = {}
        """What a resumed process would find: the records of each checkpoint, by its save's number."""
        self._syncing: dict[int, dict[int, StoredTile | None]] = {}
        self._committing: dict[int, Mapping[TileId, TileRecord]] = {}

    def sync(self) -> None:
        """Make everything written so far, on all paths, survive a crash."""
        for store in self.stores:
            store.sync()

    def crash(self, rng: random.Random) -> None:
        """Lose unsynced writes on all paths; a commit on its way has happened, or not."""
        for store in self.stores:
            store.crash(rng)
        for number, records in self._committing.items():
            if rng.random() < 0.5:
                self.committed[number] = records
        self._committing.clear()

    def begin(self, operation: ops.Operation) -> None:
        """Let an operation start."""
        match operation:
            case ops.ReadTile() | ops.CopyTile():
                self._buffer(operation)[:] = RUBBISH
            case ops.WriteTile() | ops.SaveTile():
                self._begin_write(operation.record.location)
            case ops.RunVisit(visit=visit) if operation.fresh or visit.overwrites:
                self._state(operation)[:] = RUBBISH
            case ops.Transfer(what="state"):
                self._ends(operation)[1][:] = RUBBISH
            case ops.FreeHome(subgroup=subgroup):
                self.resident[subgroup][:] = RUBBISH
            case ops.Sync(op=op, path=path):  # only what has been written by now becomes durable
                self._syncing[op] = dict(self.stores[path].slots)
            case ops.Commit(number=number, records=records):
                self._committing[number] = records

    def end(self, operation: ops.Operation, *, flip_bit: bool = False, misdirect: bool = False) -> TileRecord | None:
        """Let an operation end well, as far as its lane can tell; return the record that a write reports.

        Args:
            operation: Which.
            flip_bit: Whether a bit of a write's payload flips on the medium.
            misdirect: Whether a write lands in the store's first other slot (or past all, if there is none).

        Raises:
            CorruptRecordError: If a slot does not hold the tile that is read in this version with this checksum.
        """
        match operation:
            case ops.ReadTile() | ops.CopyTile():
                self._end_read(operation)
            case ops.WriteTile() | ops.SaveTile():
                return self._end_write(operation, flip_bit, misdirect)
            case ops.RunVisit():
                self._end_run(operation)
            case ops.Transfer(what="state"):
                source, target = self._ends(operation)
                target[:] = source
            case ops.Transfer(way="flush"):
                self.pushed(operation)
            case ops.Sync(op=op, path=path):
                self.stores[path].sync(self._syncing.pop(op))
            case ops.Commit(number=number):
                self.committed[number] = self._committing.pop(number)
        return None

    def undo_commit(self, commit: ops.Commit) -> None:
        """Let a commit fail: nothing is left of it."""
        del self._committing[commit.number]

    def _end_read(self, operation: ops.ReadTile | ops.CopyTile) -> None:
        """Verify the slot as a tier does, then fill the buffer."""
        record, location = operation.record, operation.record.location
        found = self.stores[location.path].slots.get(location.offset)
        if found is None:
            problem = "the slot holds no record"
        elif (found.tile, found.step) != (operation.tile, record.step):
            problem = f"the slot holds {found.tile} of step {found.step}"
        elif found.checksum != record.checksum or zlib.crc32(found.payload) != record.checksum:
            problem = "checksum differs"
        elif len(found.payload) != location.nbytes:
            problem = f"the slot holds {len(found.payload)} bytes"
        else:
            self._buffer(operation)[:] = np.frombuffer(found.payload, np.uint32)
            return
        raise CorruptRecordError(
            "read",
            tier="simulated",
            path=path_name(self.plan, location.path),
            offset=location.offset,
            detail=f"{operation.tile} of step {record.step}: {problem}",
        )

    def _begin_write(self, location: Location) -> None:
        """Lose what its slot held, and whatever else lies in its bytes."""
        slots = self.stores[location.path].slots
        stop = location.offset + SECTOR_BYTES + location.nbytes
        for offset, stored in slots.items():
            end = offset + SECTOR_BYTES + (len(stored.payload) if stored is not None else 0)
            if offset < stop and location.offset < end:
                slots[offset] = None
        slots[location.offset] = None

    def _end_write(self, write: ops.WriteTile | ops.SaveTile, flip_bit: bool, misdirect: bool) -> TileRecord:
        location = write.record.location
        slots = self.stores[location.path].slots
        payload = self._buffer(write).tobytes()
        checksum = zlib.crc32(payload)
        if flip_bit:
            payload = bytes((payload[0] ^ 1,)) + payload[1:]
        offset = location.offset
        if misdirect:
            others = [other for other in sorted(slots) if other != offset]
            offset = others[0] if others else offset + (1 << 40)
        slots[offset] = StoredTile(write.tile, write.record.step, checksum, payload)
        return replace(write.record, checksum=checksum)

    def _end_run(self, run: ops.RunVisit) -> None:
        self.update(run, self._state(run))
        weights = self.weights.get(run.visit.subgroup)
        if weights is not None and run.visit.speculative:
            weights = self.images[run.visit.subgroup] = weights.copy()
        if weights is not None and run.visit.changes:
            mix_weights(run, weights)

    def publish(self, subgroup: int) -> None:
        """Put the weights of a version beside the live one where they belong."""
        if subgroup in self.weights:
            self.weights[subgroup][:] = self.images[subgroup]

    def _ends(self, copy: ops.Transfer) -> tuple[State, State]:
        words = self.plan.layout.subgroups[copy.subgroup].state_bytes // FP32.item_bytes
        host = self.resident[copy.subgroup] if copy.slot is None else self.staging[copy.slot][:words]
        gpu = self.gpu[copy.transfer_slot][:words]
        return (host, gpu) if copy.way == "fetch" else (gpu, host)

    def tile_in_memory(self, tile: TileId, offset: int, nbytes: int) -> npt.NDArray[Any]:
        """Return a tile of state at home in memory, or of weights."""
        subgroup = self.plan.layout.subgroups[tile.subgroup]
        whole = self.weights if tile.tensor >= len(subgroup.tensors) else self.resident
        return whole[tile.subgroup][offset // FP32.item_bytes : (offset + nbytes) // FP32.item_bytes]

    def _buffer(self, operation: ops.ReadTile | ops.WriteTile | ops.SaveTile | ops.CopyTile) -> npt.NDArray[Any]:
        if isinstance(operation, ops.SaveTile | ops.CopyTile):
            nbytes = operation.record.location.nbytes
            if isinstance(operation, ops.SaveTile) and (operation.buffer is None or operation.gathers):
                # Gathered when it is started, but read here, at the last moment: the rules allow no difference.
                return self.tile_in_memory(operation.tile, operation.source_offset, nbytes)
            return self.buffers[operation.buffer or 0][: nbytes // FP32.item_bytes]
        start = operation.buffer_offset // FP32.item_bytes
        numel = operation.record.location.nbytes // FP32.item_bytes
        if operation.slot is None:
            return self.resident[operation.tile.subgroup][start : start + numel]
        buffers = {"gradients": self.gradients, "activations": self.activations}
        memory = self.staging if operation.owner is None else buffers[operation.owner.kind]
        return memory[operation.slot][start : start + numel]

    def _state(self, run: ops.RunVisit) -> State:
        subgroup = run.visit.subgroup
        words = self.plan.layout.subgroups[subgroup].state_bytes // FP32.item_bytes
        if run.visit.gpu and run.transfer_slot is not None:
            return self.gpu[run.transfer_slot][:words]
        return self.resident[subgroup] if run.slot is None else self.staging[run.slot][:words]
