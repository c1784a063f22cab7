"""Operations and events: what the engine asks a lane to do, and what the lane reports back. Nouns only.

A *sweep* is a sequence of *visits*, each one subgroup's turn. A *save* is a checkpoint of all state at one moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from offload.errors import OffloadError
from offload.plan.budget import Plan
from offload.protocols import Owner, TileId
from offload.schedule.index import Record

# Sweeps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Visit:
    """One subgroup's turn in a sweep.

    Attributes:
        subgroup: Which one.
        changes: Whether the visitor changes the state.
        overwrites: Whether the visitor replaces the whole state, so that nothing has to be fetched.
        gpu: Whether it runs on the GPU.
        weight_bytes: Size of the weights that it needs in a weight slot, as they lie on the GPU and it runs on the
            CPU; 0 for none. If it changes them, they are pushed to the GPU when it has run.
        fetches: Whether the run reads these weights, so that they are fetched first.
        speculative: Whether it makes a speculative version, beside the live one: a visit of an open sweep.
        reads: Whose scratch it reads: the subgroup's gradients, where they pass through buffers.
    """

    subgroup: int
    changes: bool = True
    overwrites: bool = False
    gpu: bool = False
    weight_bytes: int = 0
    fetches: bool = False
    speculative: bool = False
    reads: Owner | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sequence of visits that succeeds or fails as one.

    An *open* sweep belongs to a step that is not known yet. It makes speculative versions, beside the live ones, of
    subgroups that are `Admit`ted one by one. `Seal` confirms some of them and revokes the others.

    Attributes:
        number: Identifies the sweep; grows by one.
        step: Version that changed tiles get.
        visits: In the order to be preferred; no subgroup twice.
        is_open: Whether the sweep is open.
    """

    number: int
    step: int
    visits: tuple[Visit, ...]
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class ReadTile:
    """Fetch one tile: from its slot in a store to its place in staging slot `slot`, or at home in memory (None).

    A tile of an `owner`'s scratch: to its place in the owner's buffer `slot`.
    """

    op: int
    tile: TileId
    slot: int | None
    buffer_offset: int
    record: Record
    owner: Owner | None = None


@dataclass(frozen=True, slots=True)
class WriteTile:
    """Flush one tile: from staging slot `slot`, or from its home in memory (None), to a free slot of a store.

    A tile of an `owner`'s scratch: from the owner's buffer `slot`.
    """

    op: int
    tile: TileId
    slot: int | None
    buffer_offset: int
    record: Record
    owner: Owner | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Let the visitor work on a subgroup's state.

    Attributes:
        op: Operation id.
        sweep: Number of the sweep.
        visit: The visit.
        slot: Staging slot that holds the state, or None for a resident subgroup.
        fresh: Whether the memory is undefined: the state has never been changed.
        through: What the visit passes through, if anything: on the GPU the staging slot that holds the state, on the
            CPU the weight slot.
        gradient_buffer: The gradient buffer that holds its gradients, if they pass through one.
    """

    op: int
    sweep: int
    visit: Visit
    slot: int | None
    fresh: bool
    through: int | None = None
    gradient_buffer: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy what a visit needs between host memory and the GPU: fetched before its run, or flushed after it.

    That is the state of a visit on the GPU, and the weights of a visit on the CPU. A flush of weights ends when it is
    on its lane; `AwaitPush` waits for its end.

    Attributes:
        op: Operation id.
        subgroup: Whose.
        what: "state" or "weights".
        way: "fetch", towards the device that runs the visit, or "flush", away from it.
        through: GPU staging slot of the state, or weight slot of the weights.
        nbytes: Size.
        slot: Staging slot in host memory of the state, or None for its home.
    """

    op: int
    subgroup: int
    what: Literal["state", "weights"]
    way: Literal["fetch", "flush"]
    through: int
    nbytes: int
    slot: int | None = None

    @property
    def lane(self) -> str:
        """The copy engine of the GPU that carries it."""
        return "h2d" if (self.what == "state") == (self.way == "fetch") else "d2h"


@dataclass(frozen=True, slots=True)
class AwaitPush:
    """Wait until weights that were flushed have left their weight slot."""

    op: int
    subgroup: int
    through: int
    lane: ClassVar[str] = "h2d"


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give back the memory of a subgroup's home: its state has left for storage."""

    op: int
    subgroup: int


# Saves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """What is to be saved.

    Attributes:
        number: Identifies the save; grows.
        sink: Number of the path that takes a copy of everything, or None to hold slots where they are.
        empty: Whether there is nothing to save: another rank has the same state and saves it.
    """

    number: int
    sink: int | None = None
    empty: bool = False


@dataclass(frozen=True, slots=True)
class SaveTile:
    """Write one tile for a checkpoint.

    Attributes:
        op: Operation id.
        tile: Which tile; of a subgroup's `weight_tiles`, if it is none of its state.
        record: Where to and in which version.
        source_offset: Byte offset of the tile in the subgroup's resident state, or in the image of its weights.
        buffer: Copy buffer to write from; None for state at home in host memory.
        gathers: Whether the tile is to be put into that buffer first: it is of weights, or of state on a GPU.
    """

    op: int
    tile: TileId
    record: Record
    source_offset: int
    buffer: int | None
    gathers: bool = False


@dataclass(frozen=True, slots=True)
class CopyTile:
    """Read one tile for a checkpoint into a copy buffer."""

    op: int
    tile: TileId
    record: Record
    buffer: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Make everything durable whose write to a path has ended."""

    op: int
    path: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Make a checkpoint of what a save names; all of that is durable."""

    op: int
    number: int
    records: Mapping[TileId, Record]


SaveOperation = SaveTile | CopyTile | Sync | Commit


def tile_label(operation: ReadTile | WriteTile | SaveTile | CopyTile) -> str:
    """Return what a timeline calls the transfer of a tile."""
    tile = operation.tile
    if isinstance(operation, ReadTile | WriteTile) and operation.owner is not None:
        of_subgroup = f" of subgroup {tile.subgroup}" if operation.owner.kind == "gradients" else ""
        return f"{operation.owner.kind}{of_subgroup} tile {tile.tile}"
    return f"subgroup {tile.subgroup} tensor {tile.tensor} tile {tile.tile}"


Operation = ReadTile | WriteTile | Run | Transfer | AwaitPush | GiveBack | SaveOperation


# Events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Event: start a sweep. None may be under way."""

    sweep: Sweep


@dataclass(frozen=True, slots=True)
class Admit:
    """Event: admit visits of the open sweep: they run when their state is there. Other subgroups are left out."""

    subgroups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """Event: start no further visit of the open sweep, which is about to be sealed."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Event: seal the open sweep, of which no visit runs.

    Attributes:
        confirmed: Subgroups whose speculative version is the live one from now on; all others are revoked.
        rest: The sweep of the step's remaining visits, which begins now; None where there is no step.
    """

    confirmed: tuple[int, ...] = ()
    rest: Sweep | None = None


@dataclass(frozen=True, slots=True)
class Want:
    """Event: somebody wants an owner's scratch buffer until `Ready`, to fill it or to read it.

    Nothing but the caller touches a buffer that it fills. Gradients, which visits read, are filled between sweeps.
    Visits want what they read without an event.
    """

    owner: Owner
    fills: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """Event: somebody who has wanted a buffer has filled it, or read it, or gives that up."""

    owner: Owner
    fills: bool


@dataclass(frozen=True, slots=True)
class Discard:
    """Event: an owner's scratch is of no use any more; a visit that has run says so without an event."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class BeginSave:
    """Event: start a save; between sweeps, with no subgroup fresh and no save under way."""

    save: Save


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Event: give up the save under way."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Leave:
    """Event: have state leave memory for storage; between sweeps and saves.

    Staging slots that hold changes are flushed, and all are empty in the end. A visit brings a subgroup's state home
    again.

    Attributes:
        number: Identifies it; grows.
        subgroups: Those at home in memory whose state leaves it; for these the stores have room.
    """

    number: int
    subgroups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stay:
    """Event: have no further state leave memory, though `Leave` has said so: it is wanted."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Event: whoever began a sweep, a save or a leave knows that it is finished."""

    finished: Sweep | Save | Leave


@dataclass(frozen=True, slots=True)
class Extend:
    """Event: go on with a plan that adds subgroups and staging slots, or has others updated on the GPU; between
    sweeps and saves, with nothing in flight."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Cut:
    """Event: make the slots that plan and checkpoints need, so that their room can be allocated."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """Event: the room of the first bytes of each path is there; what is beyond those that are needed may be lent."""

    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lend:
    """Event: only so many of the plan's staging slots on the GPU, the first ones, are there from now on.

    No visit there is under way; copies out of the others go on.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Reshare:
    """Event: spread tiles over the paths in other proportions from now on; one share for each path."""

    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Event: go on from what checkpoints hold on storage; with nothing in flight.

    Attributes:
        stores: Paths whose empty stores have been exchanged for ones that are there, and how far those may grow.
        held_records: What checkpoints hold in these, by the numbers of saves.
        records: The newest version from now on of every tile of some streamed subgroups, whatever they were before.
    """

    stores: Mapping[int, int]
    held_records: Mapping[int, Mapping[TileId, Record]]
    records: Mapping[TileId, Record]


@dataclass(frozen=True, slots=True)
class Release:
    """Event: let the slots of a finished save go."""

    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """Event: an operation has ended well; `record` is what it has written, None for that of the operation."""

    op: int
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: an operation has failed; nothing of it counts."""

    op: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Stop:
    """Event: issue nothing new; a sweep under way fails with `error` now, without waiting for what is in flight."""

    error: OffloadError


Event = (
    Begin
    | Admit
    | Hold
    | Seal
    | Want
    | Ready
    | Discard
    | BeginSave
    | GiveUp
    | Leave
    | Stay
    | Taken
    | Extend
    | Cut
    | Allocated
    | Lend
    | Reshare
    | TakeOver
    | Release
    | Done
    | Failed
    | Stop
)
