"""Operations and events: what the engine asks a lane to do, and what the lane reports back. Nouns only.

A *sweep* is a sequence of *visits*, each one subgroup's turn. A *save* is a checkpoint of all state at one moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from offload.errors import OffloadError
from offload.plan.budget import Plan
from offload.protocols import ScratchOwner, TileId
from offload.schedule.index import TileRecord

# Sweeps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Visit:
    """One subgroup's turn in a sweep.

    Attributes:
        subgroup: Which one.
        changes: Whether the visitor changes the state.
        overwrites: Whether the visitor replaces the whole state, so that nothing has to be fetched.
        gpu: Whether it runs on the GPU.
        weight_bytes: Size of the weights that lie on the GPU and pass through a weight slot for a run on the CPU; 0
            for none. If the visit changes them, they are pushed to the GPU after the run.
        fetches: Whether the run reads these weights, so that they are first copied from the GPU to the weight slot.
        speculative: Whether it makes a speculative version, beside the live one: a visit of an open sweep.
        reads: The owner of the subgroup's gradients in scratch, if the visit reads them there. None if it needs no
            gradients, or these do not pass through buffers.
    """

    subgroup: int
    changes: bool = True
    overwrites: bool = False
    gpu: bool = False
    weight_bytes: int = 0
    fetches: bool = False
    speculative: bool = False
    reads: ScratchOwner | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sequence of visits that succeeds or fails as one.

    An *open* sweep belongs to a step whose rows (scalars, norm) are not known yet. Its visits are admitted one by
    one. Each makes a speculative version of its subgroup, beside the live one. `SealStep` confirms some of these
    versions and revokes the others.

    Attributes:
        number: Identifies the sweep; grows by one.
        step: Version that changed tiles get.
        visits: In the preferred order; no subgroup twice.
        is_open: Whether the sweep is open.
    """

    number: int
    step: int
    visits: tuple[Visit, ...]
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class ReadTile:
    """Fetch one tile from its slot in a store to `buffer_offset` in staging slot `slot`, or in its home (slot None).

    With an `owner` it is a tile of scratch, and `slot` the number of the owner's buffer.
    """

    op: int
    tile: TileId
    slot: int | None
    buffer_offset: int
    record: TileRecord
    owner: ScratchOwner | None = None


@dataclass(frozen=True, slots=True)
class WriteTile:
    """Flush one tile from `buffer_offset` in staging slot `slot`, or in its home (slot None), to a slot of a store.

    With an `owner` it is a tile of scratch, and `slot` the number of the owner's buffer.
    """

    op: int
    tile: TileId
    slot: int | None
    buffer_offset: int
    record: TileRecord
    owner: ScratchOwner | None = None


@dataclass(frozen=True, slots=True)
class RunVisit:
    """Let the visitor work on a subgroup's state.

    Attributes:
        op: Operation id.
        sweep: Number of the sweep.
        visit: The visit.
        slot: Staging slot that holds the state, or None for a resident subgroup.
        fresh: Whether the memory is undefined, as the state has never been changed.
        transfer_slot: On the GPU the staging slot that the state was copied to, on the CPU the weight slot; or None.
        gradient_buffer: The buffer that holds its gradients, if they pass through one.
    """

    op: int
    sweep: int
    visit: Visit
    slot: int | None
    fresh: bool
    transfer_slot: int | None = None
    gradient_buffer: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy a visit's state (if it runs on the GPU) or weights (on the CPU) between host memory and the GPU.

    State or weights are fetched before the run, and flushed after it. A flush of weights reports back as soon as
    it is queued on its lane; `AwaitPush` waits for its end.

    Attributes:
        op: Operation id.
        subgroup: Number of the subgroup.
        what: "state" or "weights".
        way: "fetch", towards the device that runs the visit, or "flush", away from it.
        transfer_slot: GPU staging slot of the state, or weight slot of the weights.
        nbytes: Size.
        slot: Staging slot in host memory of the state, or None for its home.
    """

    op: int
    subgroup: int
    what: Literal["state", "weights"]
    way: Literal["fetch", "flush"]
    transfer_slot: int
    nbytes: int
    slot: int | None = None

    @property
    def lane(self) -> str:
        """The copy engine of the GPU that carries it.

        State is fetched to the GPU (h2d) and flushed to the host (d2h). Weights are for a visit on the CPU, so they
        go the other way: they are fetched from the GPU (d2h) and flushed to it (h2d).
        """
        return "h2d" if (self.what == "state") == (self.way == "fetch") else "d2h"


@dataclass(frozen=True, slots=True)
class AwaitPush:
    """Wait until flushed weights have been copied out of their weight slot."""

    op: int
    subgroup: int
    transfer_slot: int
    lane: ClassVar[str] = "h2d"


@dataclass(frozen=True, slots=True)
class FreeHome:
    """Give the memory of a subgroup's home back to the system: its state is on storage."""

    op: int
    subgroup: int


# Saves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """A request to save all state.

    Attributes:
        number: Identifies the save; grows.
        sink: Number of the path that gets a copy of everything, or None to hold slots where they are.
        empty: Whether this rank saves nothing, as another one has the same state and saves it.
    """

    number: int
    sink: int | None = None
    empty: bool = False


@dataclass(frozen=True, slots=True)
class SaveTile:
    """Write one tile for a checkpoint.

    Attributes:
        op: Operation id.
        tile: A tile of a subgroup's state, or of its `weight_tiles`.
        record: The slot to write to, and the version.
        source_offset: Byte offset of the tile in the subgroup's resident state, or in the image of its weights.
        buffer: Copy buffer to write from; None for state at home in host memory.
        gathers: Whether the tile has to be copied into that buffer first: it is of weights, or of state on a GPU.
    """

    op: int
    tile: TileId
    record: TileRecord
    source_offset: int
    buffer: int | None
    gathers: bool = False


@dataclass(frozen=True, slots=True)
class CopyTile:
    """Read one tile for a checkpoint into a copy buffer, from which a `SaveTile` then writes it to the sink."""

    op: int
    tile: TileId
    record: TileRecord
    buffer: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Make all writes to a path that have ended durable."""

    op: int
    path: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit a checkpoint of these records, which are all durable."""

    op: int
    number: int
    records: Mapping[TileId, TileRecord]


SaveOperation = SaveTile | CopyTile | Sync | Commit


def tile_label(operation: ReadTile | WriteTile | SaveTile | CopyTile) -> str:
    """Return what a timeline calls the transfer of a tile: of state or weights, or of scratch if it has an owner."""
    tile = operation.tile
    if isinstance(operation, ReadTile | WriteTile) and operation.owner is not None:
        of_subgroup = f" of subgroup {tile.subgroup}" if operation.owner.kind == "gradients" else ""
        return f"{operation.owner.kind}{of_subgroup} tile {tile.tile}"
    return f"subgroup {tile.subgroup} tensor {tile.tensor} tile {tile.tile}"


Operation = ReadTile | WriteTile | RunVisit | Transfer | AwaitPush | FreeHome | SaveOperation


# Events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginSweep:
    """Event: start a sweep, while none is under way."""

    sweep: Sweep


@dataclass(frozen=True, slots=True)
class Admit:
    """Event: let visits of the open sweep run once their state is in memory; other subgroups are ignored."""

    subgroups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PauseOpenSweep:
    """Event: start no further visit of the open sweep, which is about to be sealed."""


@dataclass(frozen=True, slots=True)
class SealStep:
    """Event: seal the open sweep, of which no visit runs.

    Attributes:
        confirmed: Subgroups whose speculative version becomes the live one; all other versions are revoked.
        rest: The sweep of the step's remaining visits, which begins now; None where there is no step.
    """

    confirmed: tuple[int, ...] = ()
    rest: Sweep | None = None


@dataclass(frozen=True, slots=True)
class RequestBuffer:
    """Event: a caller needs an owner's scratch buffer until `ReleaseBuffer`, to fill it or else to read it.

    Only the caller touches a buffer that it fills. Gradients are filled between sweeps, since visits read them. For
    the visits, the machine itself requests the buffers.
    """

    owner: ScratchOwner
    fills: bool


@dataclass(frozen=True, slots=True)
class ReleaseBuffer:
    """Event: the caller of `RequestBuffer` has filled or read the buffer, or gives that up."""

    owner: ScratchOwner
    fills: bool


@dataclass(frozen=True, slots=True)
class Discard:
    """Event: an owner's scratch is not needed any more. The machine itself discards what a visit has read."""

    owner: ScratchOwner


@dataclass(frozen=True, slots=True)
class BeginSave:
    """Event: start a save; between sweeps, with no save under way, and no subgroup fresh unless the save is empty."""

    save: Save


@dataclass(frozen=True, slots=True)
class AbortSave:
    """Event: give up the save under way."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Evict:
    """Event: move the state of subgroups from their homes in memory to storage; between sweeps and saves.

    Staging slots that hold changes are flushed, and all are empty in the end. A visit has the state read to its home
    again.

    Attributes:
        number: Identifies the eviction; grows.
        subgroups: Subgroups at home in memory; the stores have room for their state.
    """

    number: int
    subgroups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopEviction:
    """Event: end an eviction early, since the state is needed: only flushes that have begun go on."""


@dataclass(frozen=True, slots=True)
class OutcomeTold:
    """Event: the caller of a sweep, a save or an eviction has been told that it is finished."""

    finished: Sweep | Save | Evict


@dataclass(frozen=True, slots=True)
class Extend:
    """Event: go on with a plan that adds subgroups and staging slots, or changes which are updated on the GPU.

    Between sweeps and saves, with nothing in flight.
    """

    plan: Plan


@dataclass(frozen=True, slots=True)
class MakeSlots:
    """Event: make all slots that plan and checkpoints need, so that their room can be allocated."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """Event: the disk has room for the first `ends[path]` bytes of each store.

    Slots may be lent once there is room for all slots that plan and checkpoints need.
    """

    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LimitGpuSlots:
    """Event: from now on only the first `count` of the plan's staging slots on the GPU may be used.

    No visit runs there; copies out of the other slots go on.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Reshare:
    """Event: spread tiles over the paths in other proportions from now on; one share for each path."""

    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Event: go on from checkpoints' state where it lies on storage; with nothing in flight.

    Attributes:
        stores: Paths whose empty stores were replaced by those of the checkpoints, and the bytes these may grow to.
        held_records: What checkpoints hold in these, by the numbers of saves.
        records: For some streamed subgroups, every tile; these records replace the newest versions.
    """

    stores: Mapping[int, int]
    held_records: Mapping[int, Mapping[TileId, TileRecord]]
    records: Mapping[TileId, TileRecord]


@dataclass(frozen=True, slots=True)
class ReleaseSave:
    """Event: free the slots of a finished save that no other save holds and that are not live."""

    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """Event: an operation has ended well.

    After a write, `record` is that of the tile as written, with its checksum; None if the operation's own one holds.
    """

    op: int
    record: TileRecord | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: an operation has failed; no part of it counts as done."""

    op: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Stop:
    """Event: issue nothing new; a sweep under way fails with `error` now, without waiting for what is in flight."""

    error: OffloadError


Event = (
    BeginSweep
    | Admit
    | PauseOpenSweep
    | SealStep
    | RequestBuffer
    | ReleaseBuffer
    | Discard
    | BeginSave
    | AbortSave
    | Evict
    | StopEviction
    | OutcomeTold
    | Extend
    | MakeSlots
    | Allocated
    | LimitGpuSlots
    | Reshare
    | TakeOver
    | ReleaseSave
    | Done
    | Failed
    | Stop
)
