"""From layout and budgets to a plan: homes, placements, staging slots, bytes per path."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple, TypedDict

from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.errors import ConfigError, InfeasiblePlanError
from offload.formats import EXACT_ADAMW, StateSpec
from offload.layout import Layout, PlacedTile, Subgroup, round_up
from offload.plan.rates import Rates
from offload.protocols import ACTIVATIONS, NORM_BLOCK_NUMEL, SECTOR_BYTES, ScratchKind, ScratchOwner, TileId
from offload.units import format_bytes, format_count

DEFAULT_STAGING_SLOTS = 4
"""One is fetched, one updated, one flushed; a fourth keeps each of these from waiting for another."""

GPU_STAGING_SLOTS = 4
"""On the GPU: one is copied in, one updated, one copied out; a fourth keeps these from waiting for another."""

WEIGHT_SLOTS = 20
"""Most slots in host memory for new weights that are pushed to the GPU. With 16-bit weights each takes a sixth of its
subgroup's state (2 of 12 bytes). A push is queued after copies of state to the GPU, up to `GPU_STAGING_SLOTS` of
them; meanwhile a CPU that is fast beside the link makes the weights of many subgroups. Simulated steps of 7e9
parameters on the machine "h100-node", CPU and GPU sharing the work, over their bound: 1.28 with 8 slots, 1.18 with
12, 1.09 with 16, 1.003 with 20."""

LEAST_COPY_BYTES = 1 << 20
"""Pieces of GPU memory of at least that size are copied to and from the host each on its own: the link takes 20 us or
more for one, about as long as enqueuing a copy. Smaller ones pass through a buffer on the GPU, in one copy."""

HIDDEN_PIECE_BYTES = 32 << 20
"""Most bytes of one copy while a step goes on beside the user's work: the user's own copies wait for the one in
flight, and for one of another lane. A link of 50e9 bytes a second takes 0.7 ms for it."""

KERNEL_COPIES = 4
"""Number of copies whose enqueuing takes as long as that of gathering: a kernel, its table, events to order both."""

PIECE_BUFFERS = 4
"""Buffers on the GPU for small pieces: for each direction one that is filled and one that is emptied."""

MOST_PIECE_BUFFER_BYTES = 16 << 20
"""The link takes 300 us for a buffer of that size, several times as long as enqueuing its copy and kernel."""

PIECE_ALIGNMENT = 256
"""Of pieces beside each other in host memory, in bytes: segments' own alignment with the widest dtype."""

FETCHED_AHEAD = 16
"""For how many coming visits on the CPU gradients are fetched from a GPU in advance. State is copied from the GPU by
the same copy engine, and over a slow link a subgroup's state takes as long as several visits."""

CHECKPOINT_BUFFERS = 4
"""In host memory, for tiles copied to or from a checkpoint: two are read while two are written or taken over."""

SPARE_BUFFERS = 3
"""Gradient buffers whose content is on the paths, or is being written there: backward always finds one of them, and a
step reads this many subgroups' gradients at once."""

LEAST_BUFFERS = SPARE_BUFFERS + 2
"""Gradient buffers if none stays in memory: the spare ones, one that is filled, and the one filled before it, as
backward may add to that again."""

MOVING_ACTIVATIONS = 4
"""Number of activation tiles in flight, for each path and direction, that keeps a drive busy."""

LEAST_ACTIVATION_BUFFERS = 16
"""Some are written, some read and some filled; the others keep what backward needs first."""

MOST_ACTIVATION_TILE_BYTES = 4 << 20
LEAST_ACTIVATION_TILE_BYTES = 64 << 10

MEASURABLE_BYTES = 4 << 20
"""Bytes that every path should move in a step, so that its rate can be measured again."""

FIXED_OVERHEAD_BYTES = 32 << 20
"""Threads' stacks, tables, the library's code: a session's memory that does not depend on the model's size."""


AUTO_SUBGROUPS = 16
AUTO_SUBGROUP_NUMEL = (1 << 18, 1 << 24)
"""Defaults: enough subgroups to pipeline; least and most elements of one, so that its tiles suit a disk."""


def least_slot_bytes(state: StateSpec) -> int:
    """Return the least bytes of a staging slot: the smallest subgroup of a parameter that is added later has to fit.

    Args:
        state: The layout's rule and format. Parameters that are kept exact have three fp32 tensors instead, which may
            take more.
    """
    return max(EXACT_ADAMW.nbytes(EXACT_ADAMW.sector_numel), state.nbytes(state.sector_numel))


def choose_subgroup_numel(numel: int, staging_bytes: int | None = None, layout: Layout | None = None) -> int:
    """Return how many elements a subgroup should have, for a model of `numel` elements and the staging memory.

    That is the shard cut into `AUTO_SUBGROUPS` parts, within `AUTO_SUBGROUP_NUMEL` and what the staging memory holds.
    It is rounded down to a multiple of `StateSpec.sector_numel`, and is one of these at least.

    Args:
        numel: Elements of one rank's shard.
        staging_bytes: Memory that `DEFAULT_STAGING_SLOTS` subgroups have to fit into; None for no limit.
        layout: The layout to extend, with its rule and format; None for AdamW, exact.
    """
    state = (layout or Layout((), ())).state
    least, most = AUTO_SUBGROUP_NUMEL
    subgroup_numel = max(least, min(most, numel // AUTO_SUBGROUPS))
    # Less memory than for one slot is refused by `make_plan`.
    if staging_bytes is not None and staging_bytes >= least_slot_bytes(state):
        subgroup_numel = min(subgroup_numel, int(staging_bytes / (DEFAULT_STAGING_SLOTS * state.item_bytes)))
    return max(state.sector_numel, subgroup_numel // state.sector_numel * state.sector_numel)


class Home(Enum):
    """The tier that owns a subgroup's state between steps, fastest first; state at home in memory is resident."""

    GPU = auto()
    HOST = auto()
    STREAMED = auto()


class Placement(Enum):
    """The device that runs a subgroup's update."""

    CPU = auto()
    GPU = auto()


@dataclass(frozen=True, slots=True)
class ScratchBuffers:
    """Buffers in host memory through which one kind of scratch passes.

    Attributes:
        count: How many there are.
        alone: Most buffers that may hold data which lies nowhere else.
        staying: Number of buffers whose data need not be written; what is beyond is written as soon as possible.
        moving: Most tiles that are read ahead at once, and as many written early.
        is_planned: Whether the plan has slots for it on the paths; else it gets what state and checkpoints leave.
    """

    count: int
    alone: int
    staying: int
    moving: int
    is_planned: bool


@dataclass(frozen=True, slots=True)
class PathBudget:
    """What one path offers.

    Attributes:
        name: The path, as the user wrote it.
        available_bytes: Bytes that the session may occupy there.
        share: Weight of the path when tiles are spread.
    """

    name: str
    available_bytes: int
    share: float = 1.0


class NodeBudget(NamedTuple):
    """What one memory node offers: its number, and bytes for state at home there."""

    node: int
    nbytes: int


class Offer(TypedDict):
    """What the device that the weights are on offers: the budgets that depend on it, see `Budgets`."""

    on_gpu: bool
    gpu_bytes: int
    gpu_staging_bytes: int


NO_OFFER = Offer(on_gpu=False, gpu_bytes=0, gpu_staging_bytes=0)


@dataclass(frozen=True, slots=True)
class Budgets:
    """What each tier offers.

    Attributes:
        host_bytes: Bytes for state at home in host memory.
        staging_bytes: Bytes for staging slots; None for `DEFAULT_STAGING_SLOTS` slots.
        paths: What each path offers.
        gradient_bytes: Bytes of the gradient slots or buffers, named in the plan.
        gradients_kept_bytes: If gradients pass through buffers: host memory for those that need not be written to the
            paths until the step. None if all have slots in memory.
        gradient_item_bytes: Bytes of a gradient's element there; 0 for those of its weight.
        activation_bytes: Host memory for the buffers of activations; further ones are written to the paths.
        activation_tile_bytes: Size of one of those buffers, and of a tile of activations.
        speculates: Whether there is memory for the new weights that updates of streamed state during backward make.
        follow_rates: Whether tiles are spread in proportion to the paths' measured rates instead of their shares.
        gpu_bytes: Bytes of GPU memory for state at home there.
        gpu_staging_bytes: GPU memory for staging slots: state at home elsewhere passes through them to be updated.
        borrows: Whether that memory is allocated only from the end of backward until forward.
        weights_on_gpu: Whether the weights lie on the GPU, so that those updated on the CPU are pushed there.
        gradients_on_gpu: Whether gradients lie there, too, when a step begins: those that the CPU needs are fetched
            during the step. Else they were copied to host memory during backward.
        checkpoints: How many checkpoints are kept on the paths.
        checkpoints_required: Whether a plan without room for them is refused.
        mirrors: Whether checkpoints are copied elsewhere; one more is then kept while it is copied.
        leftover_bytes: Bytes of an ended session's stores on the paths that the checkpoint to be loaded needs. The
            session goes on in them, or deletes them with a later checkpoint, so they count as room for checkpoints.
        nodes: The part of `host_bytes` on each memory node, the fastest first; empty if there is only one.
    """

    host_bytes: int
    staging_bytes: int | None = None
    paths: tuple[PathBudget, ...] = ()
    gradient_bytes: int = 0
    gradients_kept_bytes: int | None = None
    gradient_item_bytes: int = 0
    activation_bytes: int = 0
    activation_tile_bytes: int = 0
    speculates: bool = False
    follow_rates: bool = False
    gpu_bytes: int = 0
    gpu_staging_bytes: int = 0
    borrows: bool = False
    weights_on_gpu: bool = False
    gradients_on_gpu: bool = False
    checkpoints: int = 0
    checkpoints_required: bool = False
    mirrors: bool = False
    leftover_bytes: int = 0
    nodes: tuple[NodeBudget, ...] = ()

    @property
    def most_gpu_slots(self) -> int:
        """The most staging slots on the GPU: `GPU_STAGING_SLOTS`, or as many as fit where they are borrowed."""
        # No slot is smaller than a sector; `make_plan` counts how many of the real size fit.
        return self.gpu_staging_bytes // SECTOR_BYTES if self.borrows else GPU_STAGING_SLOTS

    def with_more_host(self, nbytes: int) -> Budgets:
        """Return budgets with `nbytes` more host memory for state, on the fastest memory node."""
        nodes = self.nodes
        if nodes:
            fastest, *others = nodes
            nodes = (fastest._replace(nbytes=fastest.nbytes + nbytes), *others)
        return replace(self, host_bytes=self.host_bytes + nbytes, nodes=nodes)

    def path_shares(self, rates: Rates | None = None) -> tuple[float, ...]:
        """Return the part of all tiles that each path should hold; the sum is 1.

        By the paths' shares; with `follow_rates`, and if rates are given, by rates.

        A step reads all tiles of a path and writes as many bytes, at the same time. A path with part p of B bytes and
        rate r (read while as much is written) takes p * B / r, equal for all paths if p is proportional to r.
        """
        weights = [path.share for path in self.paths]
        if self.follow_rates and rates is not None:
            weights = [path.each_way_bytes_per_s for path in rates.paths]
        total = sum(weights)
        return tuple(weight / total for weight in weights)


@dataclass(frozen=True)
class Plan:
    """Homes, staging and bytes of all subgroups.

    Attributes:
        layout: What is placed.
        homes: For each subgroup, where its state is at home.
        placements: For each subgroup, the device that updates it: the GPU if its home is there.
        staging_slots: Number of staging slots, each as large as the largest streamed subgroup.
        slot_bytes: Bytes of one staging slot.
        budgets: What the plan was made from.
        gpu_slots: Number of staging slots on the GPU.
        nodes: For each subgroup, the memory node of its home; None if that is not in host memory. Empty if there is
            only one node.
    """

    layout: Layout
    homes: tuple[Home, ...]
    placements: tuple[Placement, ...]
    staging_slots: int
    slot_bytes: int
    budgets: Budgets
    gpu_slots: int = 0
    nodes: tuple[int | None, ...] = ()

    def is_resident(self, subgroup: int) -> bool:
        """Return whether a subgroup's state is at home in memory, of the host or the GPU."""
        return self.homes[subgroup] is not Home.STREAMED

    def may_speculate(self, subgroup: int) -> bool:
        """Return whether backward can update a subgroup before its step: a streamed one, by an elementwise rule.

        The CPU makes these updates, as its cores wait for a GPU in backward. With `Budgets.speculates` it also makes
        those that the GPU would make in the step: their gradients are copied to host memory, too.
        """
        if self.is_resident(subgroup) or self.layout.subgroups[subgroup].state.rule.is_whole:
            return False
        return self.budgets.speculates or not self.updates_on_gpu(subgroup)

    @property
    def updates_in_backward(self) -> bool:
        """Whether backward may update state: some is streamed, and gradients are not written to the paths."""
        return self.home_bytes[Home.STREAMED] > 0 and not self.gradient_buffers

    @cached_property
    def updated_in_backward(self) -> tuple[Subgroup, ...]:
        """The subgroups that can be updated in backward: those of which `may_speculate` says so."""
        return tuple(subgroup for subgroup in self.layout.subgroups if self.may_speculate(subgroup.index))

    def with_updates_in_backward(self, gradient_item_bytes: int) -> Plan:
        """Return this plan with updates in backward: gradients of what the GPU updates are copied to the host, too.

        Args:
            gradient_item_bytes: Size of their elements in host memory.
        """
        plan = replace(self, budgets=replace(self.budgets, speculates=True))
        if not self.weights_on_gpu:
            return plan  # all gradients are in host memory anyway
        numel = sum(s.numel for s in plan.updated_in_backward if self.updates_on_gpu(s.index))
        nbytes = self.budgets.gradient_bytes + gradient_item_bytes * numel
        return replace(plan, budgets=replace(plan.budgets, gradient_bytes=nbytes))

    def extra_bytes_for_updates_in_backward(self, gradient_item_bytes: int) -> tuple[int, int]:
        """Return the further bytes of host memory, and of paths, that `with_updates_in_backward` takes."""
        plan = self.with_updates_in_backward(gradient_item_bytes)
        return plan.host_bytes - self.host_bytes, plan.speculative_storage_bytes

    def needs_gradients(self, subgroup: int) -> bool:
        """Return whether the CPU needs a subgroup's gradients, to update it in the step or perhaps in backward."""
        return not self.updates_on_gpu(subgroup) or self.may_speculate(subgroup)

    def at_home_on_gpu(self, subgroup: int) -> bool:
        """Return whether a subgroup's state is at home in GPU memory."""
        return self.homes[subgroup] is Home.GPU

    def updates_on_gpu(self, subgroup: int) -> bool:
        """Return whether the GPU updates a subgroup."""
        return self.placements[subgroup] is Placement.GPU

    @property
    def weights_on_gpu(self) -> bool:
        """Whether the weights lie on the GPU."""
        return self.budgets.weights_on_gpu

    def passing_bytes(self, subgroup: int) -> int:
        """Return the bytes of weights that pass through a weight slot when the CPU visits a subgroup.

        0 if weights lie in host memory: the CPU's visits use them in place.
        """
        return self.layout.subgroups[subgroup].weight_bytes if self.budgets.weights_on_gpu else 0

    @property
    def fetches_gradients(self) -> bool:
        """Whether gradients of what the CPU updates are fetched from a GPU during the step."""
        return self.budgets.gradients_on_gpu

    def leaving_bytes(self, subgroup: int) -> int:
        """Return the bytes copied from a GPU in a step, for a subgroup's update on the CPU.

        These are gradients that are still there, and fp32 weights, since an fp32 weight is the master. A gradient has
        its weight's dtype, so both take as many bytes as the weights.
        """
        is_master = self.layout.subgroups[subgroup].dtype is DtypeCode.FLOAT32
        copies = int(self.fetches_gradients) + int(is_master)
        return self.passing_bytes(subgroup) * copies

    @cached_property
    def unborrowed(self) -> Plan:
        """This plan without its borrowed staging slots on the GPU: the CPU makes the updates that pass through them.

        The plan itself if none are borrowed.
        """
        if not (self.budgets.borrows and self.gpu_slots):
            return self
        placements = tuple(Placement.GPU if home is Home.GPU else Placement.CPU for home in self.homes)
        return replace(self, placements=placements, gpu_slots=0)

    @property
    def uses_gpu(self) -> bool:
        """Whether a step needs a GPU."""
        return self.weights_on_gpu or Placement.GPU in self.placements

    @cached_property
    def gpu_slot_bytes(self) -> int:
        """Bytes of one staging slot on the GPU, as large as the largest subgroup that is not at home there."""
        sizes = zip(self.homes, self.layout.subgroup_bytes, strict=True)
        return max((nbytes for home, nbytes in sizes if home is not Home.GPU), default=0) if self.gpu_slots else 0

    @property
    def gpu_staging_bytes(self) -> int:
        """Bytes of all staging slots on the GPU."""
        return self.gpu_slots * self.gpu_slot_bytes

    @property
    def device_bytes(self) -> dict[str, int]:
        """GPU memory of state at home there and of staging slots, by these words; empty where a step needs no GPU."""
        return {"state": self.home_bytes[Home.GPU], "staging": self.gpu_staging_bytes} if self.uses_gpu else {}

    @cached_property
    def weight_slot_bytes(self) -> int:
        """Bytes of one slot in host memory for a subgroup's weights; 0 if the weights are not on the GPU."""
        return max((self.passing_bytes(subgroup.index) for subgroup in self.layout.subgroups), default=0)

    @cached_property
    def weight_slots(self) -> int:
        """Number of weight slots: one for each subgroup that the CPU updates, at most `WEIGHT_SLOTS`.

        One at least, as state is read and replaced through it; but 0 if the weights lie in host memory.
        """
        return max(1, min(WEIGHT_SLOTS, self.placements.count(Placement.CPU))) if self.weights_on_gpu else 0

    @cached_property
    def piece_buffer_bytes(self) -> int:
        """Bytes of each of `PIECE_BUFFERS` buffers in GPU memory, for small tensors of what the CPU updates."""
        if not self.weights_on_gpu:
            return 0
        subgroups = self.layout.subgroups
        return piece_buffer_bytes(s for s in subgroups if not self.updates_on_gpu(s.index))

    @cached_property
    def bounce_bytes(self) -> int:
        """Bytes of a buffer in host memory, to which state at home on the GPU is copied for whoever reads it.

        It holds one subgroup, so it is as large as the largest such one; 0 if there is none.
        """
        sizes = zip(self.homes, self.layout.subgroup_bytes, strict=True)
        return max((nbytes for home, nbytes in sizes if home is Home.GPU), default=0)

    @cached_property
    def speculative_storage_bytes(self) -> int:
        """Bytes of paths for the versions that updates in backward make: a second slot for each tile."""
        sizes = (size for subgroup in self.updated_in_backward for size in subgroup.tile_sizes)
        return sum((nbytes + SECTOR_BYTES) * count for nbytes, count in sizes)

    @property
    def image_bytes(self) -> int:
        """Bytes of host memory for images: new weights that are made during backward and not yet in use."""
        return sum(s.weight_bytes for s in self.updated_in_backward) if self.budgets.speculates else 0

    def fits_but_for_backward(self, available: int) -> bool:
        """Return whether this plan fits `available` bytes of host memory without the images for updates in backward.

        False if the plan has no such images.
        """
        return self.image_bytes > 0 and self.host_bytes - self.image_bytes <= available

    @property
    def state_bytes(self) -> int:
        """Bytes of all state."""
        return self.layout.state_bytes

    def state_bytes_of(self, subgroups: Iterable[int]) -> int:
        """Return the bytes of these subgroups' state."""
        return sum(self.layout.subgroups[number].state_bytes for number in subgroups)

    @cached_property
    def home_bytes(self) -> dict[Home, int]:
        """Bytes of state at home in each tier."""
        totals = dict.fromkeys(Home, 0)
        for home, nbytes in zip(self.homes, self.layout.subgroup_bytes, strict=True):
            totals[home] += nbytes
        return totals

    def node_of(self, subgroup: int) -> int | None:
        """Return the memory node of a subgroup's home in host memory; None if there is only one node."""
        return self.nodes[subgroup] if self.nodes else None

    @property
    def buffer_node(self) -> int | None:
        """The memory node of staging slots, gradients and all other buffers: the fastest."""
        return self.budgets.nodes[0].node if self.budgets.nodes else None

    @cached_property
    def node_bytes(self) -> dict[int, int]:
        """Bytes of state at home on each memory node; empty if there is only one."""
        totals = {budget.node: 0 for budget in self.budgets.nodes}
        # `self.nodes` is empty, as `budgets.nodes` is, if there is only one node.
        for node, nbytes in zip(self.nodes, self.layout.subgroup_bytes, strict=False):
            if node is not None:
                totals[node] += nbytes
        return totals

    @property
    def bytes_by_node(self) -> dict[int, int]:
        """Bytes of host memory that are bound to each memory node: homes there, on the fastest also buffers.

        Empty if there is only one node.
        """
        # All host memory but homes, and but overhead, which is bound to no node.
        buffer_bytes = self.host_bytes - self.home_bytes[Home.HOST] - self.overhead_bytes
        return {
            node: home_bytes + (buffer_bytes if node == self.buffer_node else 0)
            for node, home_bytes in self.node_bytes.items()
        }

    @property
    def staging_bytes(self) -> int:
        """Bytes of all staging slots."""
        return self.staging_slots * self.slot_bytes

    @cached_property
    def gradient_tiles(self) -> tuple[tuple[PlacedTile, ...], ...]:
        """For each subgroup, the tiles of its gradients; empty if gradients do not pass through buffers."""
        if self.budgets.gradients_kept_bytes is None:
            return ()
        item_bytes = self.budgets.gradient_item_bytes  # 0: as an element of the subgroup's weights
        return tuple(s.gradient_tiles(item_bytes or int(ITEM_BYTES[s.dtype])) for s in self.layout.subgroups)

    @cached_property
    def gradient_buffer_bytes(self) -> int:
        """Bytes of one gradient buffer, as large as the largest subgroup's gradients."""
        return max((sum(tile.nbytes for tile in tiles) for tiles in self.gradient_tiles), default=0)

    @cached_property
    def gradient_buffers(self) -> int:
        """Number of gradient buffers; 0 if all gradients have slots in memory.

        `LEAST_BUFFERS`, and those that `gradients_kept_bytes` has room for; no more than subgroups.
        """
        if not self.gradient_buffer_bytes:
            return 0
        staying = (self.budgets.gradients_kept_bytes or 0) // self.gradient_buffer_bytes
        return min(LEAST_BUFFERS + staying, len(self.layout.subgroups))

    @property
    def staying_gradients(self) -> int:
        """Number of subgroups whose gradients stay in memory: all if each has a buffer, else buffers less spares."""
        has_all = self.gradient_buffers >= len(self.layout.subgroups)
        return self.gradient_buffers if has_all else self.gradient_buffers - SPARE_BUFFERS

    @cached_property
    def scratch(self) -> dict[ScratchKind, ScratchBuffers]:
        """The buffers of each kind of scratch."""
        return {
            "gradients": ScratchBuffers(
                count=self.gradient_buffers,
                alone=self.gradient_buffers,  # all: with planned room, no write is refused for good
                staying=self.staying_gradients,
                moving=0,  # none is written early or read ahead: visits request what they read
                is_planned=True,
            ),
            "activations": ScratchBuffers(
                count=self.activation_buffers,
                # As the paths may refuse writes, some buffers are left to read into.
                alone=self.activation_buffers - self.moving_activations,
                staying=self.staying_activations,
                moving=self.moving_activations,
                is_planned=False,
            ),
        }

    def scratch_tiles(self, owner: ScratchOwner) -> tuple[PlacedTile, ...]:
        """Return the tiles of an owner's scratch, with their offsets in the owner's buffer.

        Gradients of a subgroup may have several; an owner of activations is one tile, which fills its buffer.
        """
        if owner.kind == "gradients":
            return self.gradient_tiles[owner.number]
        number = owner.number % (1 << 31)  # fits the 32 bits of a slot's header
        tile = TileId(subgroup=0, tensor=ACTIVATIONS, tile=number)
        return (PlacedTile(tile, offset=0, nbytes=self.budgets.activation_tile_bytes),)

    def gradients_of(self, subgroup: int) -> ScratchOwner | None:
        """Return the owner of a subgroup's gradients in scratch; None if they do not pass through buffers."""
        return ScratchOwner("gradients", subgroup) if self.gradient_buffers else None

    @property
    def activation_buffers(self) -> int:
        """Number of buffers of activations."""
        return self.budgets.activation_bytes // max(self.budgets.activation_tile_bytes, 1)

    @property
    def moving_activations(self) -> int:
        """Most activation tiles that are read ahead at once, and written early: state waits for no more on a path."""
        # A quarter of the buffers each way at most, so that at least half of them stay (`staying_activations`).
        return min(self.activation_buffers // 4, MOVING_ACTIVATIONS * len(self.budgets.paths))

    @property
    def staying_activations(self) -> int:
        """Number of activation buffers whose data need not be written; the others are for tiles on their way."""
        return self.activation_buffers - 2 * self.moving_activations

    @property
    def activation_storage_bytes(self) -> int:
        """Most bytes that activations may take on the paths, with headers: what state and checkpoints leave."""
        return max(0, self._spare_bytes - self.checkpoint_bytes) if self.activation_buffers else 0

    def with_buffer_bytes(self, bounces: int = 0) -> Plan:
        """Return a plan whose budgets count the memory of gradient buffers, if there are any.

        Args:
            bounces: Further buffers of that size, to which gradients are copied from a device.
        """
        if not self.gradient_buffers:
            return self
        nbytes = (self.gradient_buffers + bounces) * self.gradient_buffer_bytes
        return replace(self, budgets=replace(self.budgets, gradient_bytes=nbytes))

    @cached_property
    def path_gradient_bytes(self) -> int:
        """Bytes of gradients that backward writes to the paths and the step reads."""
        # Backward fills the buffers of the last subgroups first, so these are written and the first ones stay.
        return sum(tile.nbytes for tiles in self.gradient_tiles[self.staying_gradients :] for tile in tiles)

    @property
    def gradient_storage_bytes(self) -> int:
        """Most bytes that gradients take on the paths, with headers."""
        return sum(tile.nbytes + SECTOR_BYTES for tiles in self.gradient_tiles for tile in tiles)

    @cached_property
    def slot_counts(self) -> dict[int, int]:
        """For each payload size, the most slots the stores need at once: live versions and those in flight.

        A version never overwrites the one before, so each subgroup that is being flushed needs a second slot for
        each of its tiles. At most `staging_slots` subgroups are flushed at once, and no more tiles than there are.
        Gradients need one slot for each tile, as the old copy is freed before a new one is written.
        """
        live: Counter[int] = Counter()  # tiles of all subgroups, by size
        most_of_one: Counter[int] = Counter()  # tiles of the subgroup that has most of a size
        streamed = (s for s in self.layout.subgroups if not self.is_resident(s.index))
        for sizes, subgroup_count in Counter(subgroup.tile_sizes for subgroup in streamed).items():
            for nbytes, count in sizes:
                live[nbytes] += subgroup_count * count
                most_of_one[nbytes] = max(most_of_one[nbytes], count)
        counts: Counter[int] = Counter()
        for nbytes, count in live.items():
            in_flight = min(count, self.staging_slots * most_of_one[nbytes])
            counts[nbytes] = count + in_flight
        counts.update(tile.nbytes for tiles in self.gradient_tiles for tile in tiles)
        return dict(sorted(counts.items()))

    @property
    def storage_bytes(self) -> int:
        """Most bytes the paths hold at once: every live tile with its header, and the versions in flight."""
        return sum((nbytes + SECTOR_BYTES) * count for nbytes, count in self.slot_counts.items())

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes that checkpoints may hold on the paths: kept ones, one being written, and one being mirrored.

        In the worst case no two share a version: each has all tiles with headers, including those of fp32 weights.
        """
        if not self.budgets.checkpoints or not self.budgets.paths:
            return 0
        one_bytes = 0
        for subgroup in self.layout.subgroups:
            for nbytes, count in (*subgroup.tile_sizes, *subgroup.weight_tile_sizes):
                one_bytes += (nbytes + SECTOR_BYTES) * count
        mirrored = 1 if self.budgets.mirrors else 0
        written = 1
        return (self.budgets.checkpoints + mirrored + written) * one_bytes

    @property
    def _end_bytes(self) -> int:
        """Bytes of the paths that may be unusable: all but one may end with a rest too short for the largest slot."""
        return (self.largest_tile_bytes + SECTOR_BYTES) * max(len(self.budgets.paths) - 1, 0)

    @property
    def _spare_bytes(self) -> int:
        """Bytes of the paths that are left to others than the plan's slots (state, versions in flight, gradients).

        They are left however the slots are spread over the paths; < 0 if some slots may find no room.
        """
        offered = sum(path.available_bytes for path in self.budgets.paths) + self.budgets.leftover_bytes
        return offered - self.storage_bytes - self._end_bytes

    @cached_property
    def has_room_for_checkpoints(self) -> bool:
        """Whether the paths have room for `checkpoint_bytes` beside the state."""
        # Where checkpoints take no bytes there is room for them, even if `_spare_bytes` is < 0.
        return not self.checkpoint_bytes or self.checkpoint_bytes <= self._spare_bytes

    @property
    def needed_with_checkpoints(self) -> int:
        """Bytes of the paths that suffice for the state and `checkpoint_bytes`."""
        return self.storage_bytes + self.checkpoint_bytes + self._end_bytes

    @cached_property
    def has_room_to_speculate(self) -> bool:
        """Whether the paths also have room for `speculative_storage_bytes`; else backward updates only a part."""
        return self.checkpoint_bytes + self.speculative_storage_bytes <= self._spare_bytes

    def check_rates(self, rates: Rates) -> None:
        """Verify that rates know what a step needs: every path, and the GPU if there is one.

        Raises:
            ConfigError: They do not.
        """
        if len(rates.paths) != len(self.budgets.paths):
            allowed = f"give one entry for each of the plan's {len(self.budgets.paths)} paths"
            raise ConfigError("rates.paths", len(rates.paths), allowed)
        if self.uses_gpu:
            rates.gpu.check_used(planned=False)

    @property
    def moved_bytes(self) -> int:
        """Bytes of state that a step reads, and writes: streamed state but what is in slots, which stays there."""
        return max(0, self.home_bytes[Home.STREAMED] - self.staging_bytes)

    def path_shares(self, rates: Rates) -> tuple[float, ...]:
        """Return the part of all tiles that each path should hold, by `Budgets.path_shares`; the sum is 1.

        If shares follow rates, each is large enough that a step moves `MEASURABLE_BYTES` on its path (at most half of
        an even share): a path that was slow for a while is then seen to have recovered.
        """
        shares = self.budgets.path_shares(rates)
        if not self.budgets.follow_rates or not self.moved_bytes:
            return shares
        least = min(MEASURABLE_BYTES / self.moved_bytes, 0.5 / len(shares))
        raised = [max(share, least) for share in shares]
        return tuple(share / sum(raised) for share in raised)

    @cached_property
    def largest_tile_bytes(self) -> int:
        """Bytes of the largest tile; 0 without state."""
        sizes = (size for s in self.layout.subgroups for size in (*s.tile_sizes, *s.weight_tile_sizes))
        return max((nbytes for nbytes, _ in sizes), default=0)

    @property
    def checkpoint_buffer_bytes(self) -> int:
        """Bytes of host memory for the tiles of a checkpoint that is copied or loaded."""
        return CHECKPOINT_BUFFERS * self.largest_tile_bytes

    @property
    def mirror_buffer_bytes(self) -> int:
        """Bytes of host memory for tiles that are copied to the mirror."""
        return self.checkpoint_buffer_bytes if self.budgets.mirrors else 0

    @property
    def table_bytes(self) -> int:
        """Bytes of host memory for segment tables, the norm's block sums, and `FIXED_OVERHEAD_BYTES`."""
        # For each segment 512 bytes of tables; for each block its sum, a float64.
        segments = sum(len(subgroup.segments) for subgroup in self.layout.subgroups)
        blocks = sum(-(-parameter.numel // NORM_BLOCK_NUMEL) for parameter in self.layout.parameters)
        return FIXED_OVERHEAD_BYTES + 512 * segments + 8 * blocks

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of host memory that the update of a whole parameter needs while it runs; one runs at a time."""
        layout = self.layout
        return max((p.numel * layout.state_of(p).rule.scratch_item_bytes for p in layout.parameters), default=0)

    @cached_property
    def dealt_copy_bytes(self) -> int:
        """Bytes of host memory for copies of whole dealt weights and their gradients, on their owner rank."""
        return sum(parameter.dealt_copy_bytes for parameter in self.layout.parameters)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of host memory besides state, staging and gradients: tables, buffers for updates and checkpoints."""
        buffers = self.dealt_copy_bytes + self.checkpoint_buffer_bytes + self.mirror_buffer_bytes
        return self.table_bytes + self.scratch_bytes + buffers

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the session will use in all."""
        gpu_buffers = self.weight_slots * self.weight_slot_bytes + self.bounce_bytes
        slots = self.staging_bytes + self.budgets.gradient_bytes + self.budgets.activation_bytes + self.image_bytes
        return self.home_bytes[Home.HOST] + slots + gpu_buffers + self.overhead_bytes

    def __str__(self) -> str:
        subgroups = self.layout.subgroups
        largest = max((subgroup.numel for subgroup in subgroups), default=0)
        numel = sum(parameter.numel for parameter in self.layout.parameters)
        title = (
            f"{numel:,} parameters, {format_bytes(self.state_bytes)} of optimizer state in "
            f"{format_count(len(subgroups), 'subgroup')} of at most {largest:,} elements"
        )
        lines = [*self._format_lines(), *self._gpu_lines(), *self._host_lines(), *self._storage_lines()]
        return "\n".join([title, *lines])

    def _format_lines(self) -> list[str]:
        """Return lines with the bytes of each state format, if any parameter has another than `exact`."""
        if not self.layout.state.format.rounds:
            return []
        return [
            _line(nbytes, f"state of {numel:,} parameters, {nbytes / numel:.4g} bytes each", name)
            for name, (numel, nbytes) in self.layout.formats.items()
        ]

    def _host_lines(self) -> list[str]:
        """Return the lines about host memory."""
        at_home = format_count(self.homes.count(Home.HOST), "subgroup")
        lines = [_line(self.home_bytes[Home.HOST], f"state of {at_home} at home there", "host memory")]
        for node, offered_bytes in self.budgets.nodes:
            beside = ", as is what follows but for tables and checkpoints" if node == self.buffer_node else ""
            lines.append(
                _line(self.node_bytes[node], f"of that on node{node}, of {format_bytes(offered_bytes)}{beside}")
            )
        if self.staging_slots:
            slots = f"staging, {self.staging_slots} slots of {format_bytes(self.slot_bytes)}"
            lines.append(_line(self.staging_bytes, slots))
        lines.append(_line(self.budgets.gradient_bytes, self._gradients_in_words()))
        if self.activation_buffers:
            size = format_bytes(self.budgets.activation_tile_bytes)
            buffers = f"{format_count(self.activation_buffers, 'buffer')} of {size}"
            lines.append(_line(self.budgets.activation_bytes, f"activations, {buffers}; others leave for the paths"))
        if self.image_bytes:
            lines.append(_line(self.image_bytes, "new weights, where they are made during backward"))
        if self.weights_on_gpu:
            lines.append(_line(self.weight_slots * self.weight_slot_bytes, "new weights on their way to the GPU"))
        others = (
            (self.bounce_bytes, "state at home on the GPU, while it is read"),
            (self.scratch_bytes, "updates of whole parameters"),
            (self.dealt_copy_bytes, "copies of sharded matrices that this rank updates"),
            (self.checkpoint_buffer_bytes, "checkpoints, while they are copied or loaded"),
            (self.mirror_buffer_bytes, "checkpoints, while they are mirrored"),
        )
        lines += [_line(nbytes, text) for nbytes, text in others if nbytes]
        lines.append(_line(self.table_bytes, "tables, threads and other overhead"))
        lines.append(_line(self.host_bytes, "in all"))
        return lines

    def _gradients_in_words(self) -> str:
        """Return how gradients lie in host memory."""
        if not self.gradient_buffers:
            return "gradients (in place of torch's own)"
        departing = format_bytes(self.path_gradient_bytes)
        buffers = f"{format_count(self.gradient_buffers, 'buffer')} of {format_bytes(self.gradient_buffer_bytes)}"
        return f"gradients, {buffers}; {departing} leave for the paths in backward"

    def _storage_lines(self) -> list[str]:
        """Return the lines about the paths."""
        lines = self._streamed_lines() if self.staging_slots else []
        if self.gradient_buffers:
            room = format_bytes(self.gradient_storage_bytes)
            text = f"gradients, written in backward, read in the step; room for {room}"
            lines.append(_line(self.path_gradient_bytes, text))
        if self.activation_buffers:
            text = "activations at most: what state and checkpoints leave"
            lines.append(_line(self.activation_storage_bytes, text))
        if self.image_bytes:
            too_much = (
                "" if self.has_room_to_speculate else ", which is more than there is: part is updated during backward"
            )
            text = f"versions made during backward, beside the live ones{too_much}"
            lines.append(_line(self.speculative_storage_bytes, text))
        if self.checkpoint_bytes:
            too_much = "" if self.has_room_for_checkpoints else ", which is more than there is"
            title = "" if self.staging_slots else "storage"  # `_streamed_lines` begin with that title
            text = f"beside the state in use, at most for {_checkpoints(self.budgets)}{too_much}"
            lines.append(_line(self.checkpoint_bytes, text, title))
        return lines

    def _streamed_lines(self) -> list[str]:
        """Return the lines about streamed state."""
        streamed = self.homes.count(Home.STREAMED)
        size = format_bytes(self.storage_bytes)
        text = f"state of {format_count(streamed, 'subgroup')}, {size} with headers and versions in flight"
        lines = [_line(self.home_bytes[Home.STREAMED], text, "storage")]
        if self.staging_slots >= streamed:
            lines.append(_line("", "all of it fits the staging slots: steps read and write nothing"))
        for path, share in zip(self.budgets.paths, self.budgets.path_shares(), strict=True):
            lines.append(_line("by rate" if self.budgets.follow_rates else f"{share:.0%}", f"on {path.name}"))
        return lines

    def _gpu_lines(self) -> list[str]:
        """Return the lines about GPU memory."""
        others = []  # bytes and text of lines that follow those of state and staging
        if self.piece_buffer_bytes:
            pieces_bytes = PIECE_BUFFERS * self.piece_buffer_bytes
            others.append((pieces_bytes, "small tensors on their way to and from the CPU"))
        if Placement.GPU not in self.placements:
            if self.budgets.borrows:  # staging slots were offered, and are not worth it
                others.insert(0, (0, "staging: the CPU is as fast without"))
            return [_line(nbytes, text, "GPU memory") for nbytes, text in others]
        at_home = self.homes.count(Home.GPU)
        copied = self.placements.count(Placement.GPU) - at_home
        slots = f"{self.gpu_slots} slots of {format_bytes(self.gpu_slot_bytes)}"
        if self.budgets.borrows and self.gpu_slots:  # none are borrowed if the GPU updates only what is at home there
            fitting = self.budgets.gpu_staging_bytes // self.gpu_slot_bytes
            slots = f"borrowed from backward's end to forward, {slots} ({fitting} fit)"
        text = f"staging, {slots}; {copied} of the other subgroups are updated on the GPU"
        return [
            _line(
                self.home_bytes[Home.GPU], f"state of {format_count(at_home, 'subgroup')} at home there", "GPU memory"
            ),
            _line(self.gpu_staging_bytes, text),
            *(_line(nbytes, text) for nbytes, text in others),
        ]

    def change_from(self, before: Plan) -> str:
        """Return in words how many subgroups the GPU updates now, and how many by the plan before."""
        now = self.placements.count(Placement.GPU)
        then = before.placements.count(Placement.GPU)
        return f"the GPU updates {now} of {len(self.placements)} subgroups from now on, and not {then}"


def _line(size: int | str, text: str, title: str = "") -> str:
    """Return a line of `Plan.__str__`: a title, a size (or another entry for that column), and what has it."""
    entry = size if isinstance(size, str) else format_bytes(size)
    return f"  {title:<12} {entry:>10}  {text}"


def _checkpoints(budgets: Budgets) -> str:
    """Return in words which checkpoints lie on the paths at most."""
    mirrored = ", one being mirrored" if budgets.mirrors else ""
    return f"{format_count(budgets.checkpoints, 'checkpoint')} kept{mirrored} and one being written"


def piece_buffer_bytes(subgroups: Iterable[Subgroup]) -> int:
    """Return the bytes of a buffer on the GPU through which small segments of these subgroups are copied.

    Segments under `LEAST_COPY_BYTES` are small. The buffer holds those of any one subgroup, up to
    `MOST_PIECE_BUFFER_BYTES`. A subgroup with at most `KERNEL_COPIES` small segments needs none; 0 if all are so.
    """
    needed = 0
    for subgroup in subgroups:
        item_bytes = int(ITEM_BYTES[subgroup.dtype])
        sizes = (segment.numel * item_bytes for segment in subgroup.segments)
        small = [nbytes for nbytes in sizes if nbytes < LEAST_COPY_BYTES]
        if len(small) > KERNEL_COPIES:  # else one copy for each costs no more than the kernel that gathers them
            needed = max(needed, sum(round_up(nbytes, PIECE_ALIGNMENT) for nbytes in small))
    # One unit more: the first piece in a buffer may begin anywhere within its own.
    return min(needed + PIECE_ALIGNMENT, MOST_PIECE_BUFFER_BYTES) if needed else 0


def make_plan(
    layout: Layout,
    budgets: Budgets,
    *,
    kept: Plan | None = None,
    staging_slots: int = DEFAULT_STAGING_SLOTS,
    placements: Iterable[Placement] = (),
    gpu_slots: int = GPU_STAGING_SLOTS,
    node_bytes: Sequence[NodeBudget] | None = None,
) -> Plan:
    """Choose the home of every subgroup.

    In their order, subgroups get homes in GPU memory as long as that budget lasts, then in host memory; the others
    are streamed. State at home on the GPU is updated there.

    Args:
        layout: What is to be placed.
        budgets: What each tier offers.
        staging_slots: Number of staging slots if `budgets.staging_bytes` is None.
        placements: For each subgroup, the device that updates it if its home is not the GPU; the CPU for subgroups
            beyond their end. For the GPU as many staging slots are planned as fit, up to `gpu_slots`.
        gpu_slots: The most staging slots on the GPU.
        kept: A plan for the first subgroups of `layout`, whose homes stay as they are. It gets no fewer staging
            slots, but perhaps larger ones.
        node_bytes: Bytes to use of each memory node, which are filled in this order; None for `budgets.nodes`.

    Raises:
        InfeasiblePlanError: If the state does not fit into all tiers together, or staging memory does not hold one
            subgroup (with `kept`, as many as that has slots).
    """
    sizes = layout.subgroup_bytes
    homes, nodes = _homes(sizes, budgets, kept, budgets.nodes if node_bytes is None else node_bytes)
    wanted = itertools.chain(placements, itertools.repeat(Placement.CPU))  # endless: the CPU beyond `placements`
    placed = tuple(Placement.GPU if home is Home.GPU else device for home, device in zip(homes, wanted, strict=False))
    planned_gpu_slots = 0
    if placed.count(Placement.GPU) > homes.count(Home.GPU):  # the GPU updates subgroups that have to be copied there
        largest = max(nbytes for home, nbytes in zip(homes, sizes, strict=True) if home is not Home.GPU)
        planned_gpu_slots = _count_gpu_slots(budgets, largest, gpu_slots)
    plan = Plan(
        layout,
        homes,
        placed,
        staging_slots=0,  # until `_with_staging`
        slot_bytes=0,
        budgets=budgets,
        gpu_slots=planned_gpu_slots,
        nodes=nodes if budgets.nodes else (),
    )
    plan = _with_staging(plan, kept, staging_slots)
    if plan.slot_counts:  # else nothing goes to the paths: no state is streamed, no gradient leaves
        _refuse_without_room(plan)
    refuse_without_checkpoints(plan)
    return plan


def _count_gpu_slots(budgets: Budgets, slot_bytes: int, most: int) -> int:
    """Return how many staging slots the GPU has room for, up to `most`; raise if it has room for none."""
    slots = min(most, budgets.gpu_staging_bytes // slot_bytes)
    if slots < 1:
        offers = {"GPU staging": budgets.gpu_staging_bytes}
        advice = "raise gpu_memory or lower subgroup_numel"
        raise InfeasiblePlanError("one staging slot on the GPU", slot_bytes, offers, advice)
    return slots


def _with_staging(plan: Plan, kept: Plan | None, staging_slots: int) -> Plan:
    """Return a plan with staging slots for its streamed subgroups; raise if staging memory holds too few.

    Args:
        plan: The plan, without staging slots.
        kept: A plan for the first subgroups, if there is one: at least as many slots as it has are needed.
        staging_slots: Number of slots if the budgets have no `staging_bytes`.
    """
    budgets = plan.budgets
    sizes = zip(plan.homes, plan.layout.subgroup_bytes, strict=True)
    streamed = [nbytes for home, nbytes in sizes if home is Home.STREAMED]
    if not streamed:
        return plan  # no state passes through slots
    slot_bytes = max(*streamed, least_slot_bytes(plan.layout.state))
    # A slot of `kept` may hold the only copy of its state, so that none can be taken away.
    least = max(1, kept.staging_slots if kept else 0)
    slots = count_staging_slots(budgets, slot_bytes, len(streamed), max(least, staging_slots))
    if slots < least:
        what = f"{least} staging slots as large as the largest subgroup" if least > 1 else "one staging slot"
        offers = {"staging_memory": budgets.staging_bytes or 0}
        advice = "raise staging_memory or lower subgroup_numel"
        raise InfeasiblePlanError(what, least * slot_bytes, offers, advice)
    return replace(plan, staging_slots=slots, slot_bytes=slot_bytes)


def _homes(
    sizes: Sequence[int], budgets: Budgets, kept: Plan | None, node_bytes: Sequence[NodeBudget]
) -> tuple[tuple[Home, ...], tuple[int | None, ...]]:
    """Return the homes of all subgroups, and the memory nodes of these homes.

    A subgroup gets the fastest place (tier, and node in host memory) that still has room for it; subgroups of `kept`
    stay where they are. The node is None for a home that is not in host memory, and if `node_bytes` is empty: then
    there is only one node.

    Args:
        sizes: Bytes of each subgroup's state.
        budgets: What each tier offers.
        kept: A plan for the first subgroups, or None.
        node_bytes: Bytes to use of each memory node, the fastest first.
    """
    places = [(home, kept.node_of(number)) for number, home in enumerate(kept.homes)] if kept else []
    # The bytes left in each place, the fastest first.
    room: dict[tuple[Home, int | None], float] = {(Home.GPU, None): budgets.gpu_bytes}
    for node, nbytes in node_bytes or ((None, budgets.host_bytes),):
        room[Home.HOST, node] = nbytes
    room[Home.STREAMED, None] = math.inf
    for place, nbytes in zip(places, sizes, strict=False):  # subgroups of `kept`
        room[place] -= nbytes
    fastest_first, bytes_left = [*room], [*room.values()]
    for nbytes in sizes[len(places) :]:
        index = 0
        while bytes_left[index] < nbytes:  # ends at storage, whose room is endless here
            index += 1
        bytes_left[index] -= nbytes
        places.append(fastest_first[index])
    return tuple(home for home, _ in places), tuple(node for _, node in places)


def count_staging_slots(budgets: Budgets, slot_bytes: int, streamed: int, wanted: int = DEFAULT_STAGING_SLOTS) -> int:
    """Return the number of staging slots: as many as `staging_memory` holds, or `wanted` if that is not given.

    More slots than streamed subgroups are of no use.

    Args:
        budgets: What each tier offers.
        slot_bytes: Size of one slot.
        streamed: Number of streamed subgroups.
        wanted: Number of slots if the budgets have no `staging_bytes`.
    """
    # Without paths nothing can be streamed: `make_plan` says that, and not that staging memory is too small.
    if budgets.staging_bytes is not None and budgets.paths:
        wanted = budgets.staging_bytes // slot_bytes
    return min(wanted, streamed)


_WHO_NEEDS_STORES = "`offload gc --dry-run PATH` says which checkpoints need what ended sessions have left"


def _refuse_without_room(plan: Plan) -> None:
    """Raise if the paths have too little room for a plan's streamed state."""
    budgets = plan.budgets
    offers = {"gpu_memory": budgets.gpu_bytes} if budgets.gpu_bytes else {}
    offers["host_memory"] = budgets.host_bytes
    offers |= {path.name: path.available_bytes for path in budgets.paths}
    if not budgets.paths:
        raise InfeasiblePlanError(
            "the optimizer state", plan.state_bytes, offers, "raise host_memory or give paths to stream from"
        )
    # All paths but one may end with a rest that is too short for the largest slot.
    largest = max(plan.slot_counts) + SECTOR_BYTES
    needed = plan.storage_bytes + largest * (len(budgets.paths) - 1)
    if needed > sum(path.available_bytes for path in budgets.paths):
        what = "state on storage (with the versions in flight)"
        advice = "free space on a path, add a path, or give state more host_memory"
        if budgets.leftover_bytes:
            advice += f"; stores of ended sessions take room: {_WHO_NEEDS_STORES}"
        raise InfeasiblePlanError(what, needed, offers, advice)


def refuse_without_checkpoints(plan: Plan) -> None:
    """Raise `InfeasiblePlanError` if a plan has no room for checkpoints although the budgets require that."""
    budgets = plan.budgets
    if not budgets.checkpoints_required or plan.has_room_for_checkpoints:
        return
    offers = {path.name: path.available_bytes for path in budgets.paths}
    if budgets.leftover_bytes:
        offers["stores of a checkpoint to resume from"] = budgets.leftover_bytes
    advice = "free space on a path, add a path, or lower checkpoints_kept (a Trainer's save_total_limit; "
    advice += f"0: only with copy=True); {_WHO_NEEDS_STORES}"
    what = (
        f"storage ({format_bytes(plan.storage_bytes)} for state and versions in flight, "
        f"{format_bytes(plan.checkpoint_bytes)} for {_checkpoints(budgets)})"
    )
    raise InfeasiblePlanError(what, plan.needed_with_checkpoints, offers, advice)
