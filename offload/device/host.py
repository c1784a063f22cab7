"""The host memory of one session: state at home there, staging slots, buffers between host and GPU."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Iterable, Mapping

from offload.device.none import Lanes
from offload.errors import OffloadError
from offload.layout import Layout, Subgroup, round_up
from offload.memory.arenas import Arena
from offload.memory.nodes import check_free, node_bytes_of
from offload.plan import Home, Plan

SAMPLE_BYTES = 64 << 20
"""Memory that is allocated to measure how fast that goes: little enough to take milliseconds, and enough that several
threads touch it."""


class HostMemory:
    """All arenas of a session, and the addresses of state and slots in them.

    Attributes:
        arenas: All arenas that have not been given back.
        bounce: Buffer for visits by the CPU of state at home on the GPU; None if the plan has none.
        allocate_bytes_per_s: How fast memory can be allocated again, as measured when it was given back.
        buffer_node: The memory node of all arenas but those of homes (`Plan.buffer_node`).
    """

    def __init__(self, lanes: Lanes) -> None:
        self.arenas: list[Arena] = []
        self.bounce: Arena | None = None
        self.allocate_bytes_per_s = 0.0
        self.buffer_node: int | None = None
        self._lanes = lanes
        self._homes: dict[int, int] = {}  # address of the state at home here, by subgroup
        self._home_arenas: list[Arena] = []  # in which `_homes` lie
        self._temporary_homes: dict[int, int] = {}  # see `set_temporary_homes`
        self._staging: Arena | None = None  # the staging slots
        self._slots = (0, 0)  # address of the first staging slot, and bytes of each
        self._buffers: dict[str, tuple[int, int]] = {}  # address of the first scratch buffer, bytes of each; by kind
        self._weights: Arena | None = None  # the weight slots
        self._checkpoints: Arena | None = None  # the copy buffers of checkpoints, while one needs them

    def allocate_arena(self, nbytes: int, *, inherit: bool = False, node: int | None = None) -> Arena:
        """Return memory that lasts until it is given back or the session ends.

        Args:
            nbytes: Its size.
            node: The memory node that it lies on; None for `buffer_node`.
            inherit: Whether forked processes see it, copied on write; memory for a device is never mapped there.

        Raises:
            OffloadError: The system has no such memory; `InfeasiblePlanError` if the memory node has less free.
        """
        node = self.buffer_node if node is None else node
        if node is not None:
            # The error says before these words how much the node has free.
            check_free({node: nbytes}, "free some, or lower host_memory there")
        arena = self._lanes.allocate_arena(nbytes, inherit=inherit, node=node)
        self.arenas.append(arena)
        return arena

    def free_arena(self, arena: Arena | None) -> None:
        """Free an arena that nothing uses any more; with None do nothing."""
        if arena is not None:
            self.arenas.remove(arena)
            self._lanes.free_arena(arena)

    def state_address(self, subgroup: int) -> int:
        """Return the address of a subgroup's state in host memory: its temporary home, if it has one, or its home."""
        return self._temporary_homes[subgroup] if subgroup in self._temporary_homes else self._homes[subgroup]

    def set_temporary_homes(self, addresses: Mapping[int, int]) -> None:
        """Set where state whose home is on the device lies in host memory, by subgroup; replaces all set before.

        It lies there while the session is parked, and on its way between the device and the paths.
        """
        self._temporary_homes = dict(addresses)

    def temporary_home(self, subgroup: int) -> int | None:
        """Return the address of a subgroup's temporary home, None if it has none; see `set_temporary_homes`."""
        return self._temporary_homes.get(subgroup)

    def scratch(self, nbytes: int, *, staging: bool) -> tuple[int, int]:
        """Return address and size of at least `nbytes` of memory that nothing uses between sweeps.

        The staging slots' memory is returned if it is large enough and all slots are empty, as the caller says by
        `staging`. Else it is `bounce`, which is replaced by a larger arena if it is too small.
        """
        for arena in (self._staging if staging else None, self.bounce):
            if arena is not None and arena.nbytes >= nbytes:
                return arena.address, arena.nbytes
        if self.bounce is not None:
            # First, so that both are never there at once. If the new one cannot be allocated, there is none.
            old, self.bounce = self.bounce, None
            self.free_arena(old)
        self.bounce = self.allocate_arena(nbytes)
        return self.bounce.address, nbytes

    @property
    def staging(self) -> tuple[int, int]:
        """Address and size of the staging slots; zeros if there are none."""
        arena = self._staging
        return (arena.address, arena.nbytes) if arena is not None else (0, 0)

    def slot_address(self, slot: int) -> int:
        """Return the address of a staging slot."""
        address, nbytes = self._slots
        return address + slot * nbytes

    def place_slots(self, address: int, nbytes: int) -> None:
        """Use memory from an address on for staging slots of `nbytes` each."""
        self._slots = address, nbytes

    def buffer_address(self, what: str, buffer: int) -> int:
        """Return the address of a scratch buffer of a kind ("gradients", "activations")."""
        address, nbytes = self._buffers[what]
        return address + buffer * nbytes

    def place_buffers(self, what: str, address: int, nbytes: int) -> None:
        """Use memory from an address on for scratch buffers of a kind, of `nbytes` each."""
        self._buffers[what] = address, nbytes

    def allocate_homes(self, plan: Plan, before: Layout) -> None:
        """Allocate homes for the subgroups at home in host memory that `plan` adds to the layout `before`."""
        subgroups = plan.layout.subgroups[len(before.subgroups) :]
        added: dict[int | None, list[Subgroup]] = {}  # by memory node
        for subgroup in subgroups:
            if plan.homes[subgroup.index] is Home.HOST:
                added.setdefault(plan.node_of(subgroup.index), []).append(subgroup)
        for node, on_node in added.items():
            arena = self.allocate_arena(sum(subgroup.state_bytes for subgroup in on_node), node=node)
            self._home_arenas.append(arena)
            address = arena.address
            for subgroup in on_node:
                self._homes[subgroup.index] = address
                address += subgroup.state_bytes

    def reallocate_homes(self, plan: Plan) -> None:
        """Allocate all homes anew, on the memory nodes that `plan` says; nothing lies in the old ones yet."""
        while self._home_arenas:
            self.free_arena(self._home_arenas.pop())
        self._homes.clear()
        self.allocate_homes(plan, Layout((), ()))  # an empty layout before: all of the plan's subgroups are new

    def on_nodes(self) -> dict[int, tuple[int, int, int]]:
        """Return for each memory node: bytes of arenas that belong on it, bytes of these on it now, and on others.

        Pages that have not been touched lie nowhere. Any thread.
        """
        totals: dict[int, tuple[int, int, int]] = {}
        for arena in [*self.arenas]:  # a copy: the engine thread may add arenas meanwhile
            if arena.node is not None:
                bytes_by_node = node_bytes_of(arena.address, arena.nbytes)
                here_bytes = bytes_by_node.get(arena.node, 0)
                elsewhere_bytes = sum(bytes_by_node.values()) - here_bytes
                meant, here, elsewhere = totals.get(arena.node, (0, 0, 0))
                totals[arena.node] = meant + arena.nbytes, here + here_bytes, elsewhere + elsewhere_bytes
        return totals

    def allocate_staging(self, plan: Plan, slots: Mapping[int, int]) -> None:
        """Allocate staging slots as `plan` says, if they need more memory than the old ones; nothing is in flight.

        Args:
            plan: The new plan.
            slots: Staging slots in use, by subgroup; their content is copied.
        """
        old = self._staging
        if plan.staging_slots and (old is None or plan.staging_bytes > old.nbytes):
            staging = self.allocate_arena(plan.staging_bytes)
            if old is not None:
                for subgroup, slot in slots.items():  # `slot_address` is that of the old slots until `place_slots`
                    nbytes = plan.layout.subgroups[subgroup].state_bytes
                    ctypes.memmove(staging.address + slot * plan.slot_bytes, self.slot_address(slot), nbytes)
                self.free_arena(old)
            self._staging = staging
        address, _ = self.staging
        self.place_slots(address, plan.slot_bytes)

    def allocate_device(self, plan: Plan, before: Layout) -> None:
        """Allocate the device memory that `plan` adds, and host memory for weight slots and `bounce`.

        Args:
            plan: The new plan.
            before: The present plan's layout.

        Raises:
            OffloadError: The device has no room; nothing has changed then. Or the system has no host memory.
        """
        old_slots, new_slots = self._weights, None  # the weight slots; None: the old ones stay
        nbytes = plan.weight_slots * plan.weight_slot_bytes
        if nbytes > (old_slots.nbytes if old_slots is not None else 0):
            new_slots = self.allocate_arena(nbytes)
        try:
            self._lanes.allocate_for(plan, before, new_slots.address if new_slots is not None else 0)
        except OffloadError:
            self.free_arena(new_slots)
            raise
        if new_slots is not None:
            self._lanes.wait()  # weights may still be copied from the old slots
            self.free_arena(old_slots)
            self._weights = new_slots
        if plan.bounce_bytes > (self.bounce.nbytes if self.bounce is not None else 0):
            bounce = self.allocate_arena(plan.bounce_bytes)
            self.free_arena(self.bounce)
            self.bounce = bounce

    # Given back between steps

    def discard_home(self, subgroup: Subgroup) -> None:
        """Discard the pages of a home whose state was evicted; pinned pages stay, as other homes are in use."""
        address = self._homes.get(subgroup.index)
        if address is not None:
            arena = self._home_arena(address)
            # Pages that cannot be discarded stay. `discard_pages`, at the end of a park, tries again, and raises.
            with contextlib.suppress(OffloadError):
                self._lanes.discard(arena, address - arena.address, subgroup.state_bytes)

    def touch_home(self, subgroup: int, offset: int, nbytes: int) -> None:
        """Touch the pages of a home that a path is about to read to, so that missing memory is an error here.

        State at home on the GPU is read to a temporary home, whose pages are there: then nothing is done.

        Raises:
            OffloadError: The system does not have that much memory.
        """
        if subgroup in self._homes:
            address = self._homes[subgroup] + offset
            arena = self._home_arena(address)
            arena.touch_part(address - arena.address, nbytes)

    def _home_arena(self, address: int) -> Arena:
        """Return the arena of homes that an address lies in."""
        return next(a for a in self._home_arenas if a.address <= address < a.address + a.nbytes)

    def discard_pages(self, kept: Iterable[tuple[int, int]]) -> int:
        """Give the pages of all arenas, except kept ranges, back to the system; arenas keep their addresses.

        Nothing is in flight. All arenas are unpinned, the buffers of checkpoints are freed, and
        `allocate_bytes_per_s` is measured.

        Args:
            kept: Address and size of each range whose pages stay.

        Returns:
            The bytes that were given back, touched or not.
        """
        self.drop_checkpoint_buffers()
        page = mmap.PAGESIZE
        kept_pages = sorted((address // page * page, round_up(address + nbytes, page)) for address, nbytes in kept)
        discarded_bytes = 0
        for arena in self.arenas:
            self._lanes.unpin(arena)
        for arena in self.arenas:
            # Pages before `at` have been kept or discarded.
            at, arena_end = arena.address, arena.address + arena.nbytes
            kept_here = [(start, end) for start, end in kept_pages if at <= start < arena_end]
            # The empty range at the arena's end stands for what lies behind the last kept one.
            for start, end in [*kept_here, (arena_end, arena_end)]:
                if start > at:  # what lies before each range is discarded
                    arena.discard(at - arena.address, start - at)
                    discarded_bytes += start - at
                at = max(at, end)
        self._measure_allocate_rate()
        return discarded_bytes

    def _measure_allocate_rate(self) -> None:
        """Measure `allocate_bytes_per_s`: allocate some memory as `restore_pages` does, and free it."""
        nbytes = min(SAMPLE_BYTES, max((arena.nbytes for arena in self.arenas), default=0))
        if nbytes:
            started_s = time.monotonic()
            with contextlib.suppress(OffloadError):  # if memory is short, the last measurement stays
                sample = self._lanes.allocate_arena(nbytes, node=self.buffer_node)
                try:
                    sample.touch()  # without a device nobody has touched it yet
                    self.allocate_bytes_per_s = nbytes / (time.monotonic() - started_s)
                finally:
                    self._lanes.free_arena(sample)

    def restore_pages(self) -> None:
        """Undo `discard_pages`, except that content is lost: pin all arenas, and touch the staging slots.

        Without a device nothing is pinned, and homes are touched as they are read to: see `touch_home`.
        """
        for arena in self.arenas:
            self._lanes.pin(arena)
        if self._staging is not None:
            self._staging.touch()

    def ensure_checkpoint_buffers(self, plan: Plan) -> tuple[int, int]:
        """Return address and size of memory for `CHECKPOINT_BUFFERS` tiles; allocate it if there is not enough.

        Nothing is in flight in the old buffers.

        Raises:
            OffloadError: The system has no such memory.
        """
        nbytes = max(1, plan.checkpoint_buffer_bytes)
        if self._checkpoints is None or self._checkpoints.nbytes < nbytes:
            self.drop_checkpoint_buffers()
            # Not pinned: it is freed after each checkpoint, and unpinning waits for the whole device.
            self._checkpoints = Arena(nbytes)
        return self._checkpoints.address, self._checkpoints.nbytes

    def drop_checkpoint_buffers(self) -> None:
        """Free the copy buffers; nothing is in flight there."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None

    def close(self) -> None:
        """Free all arenas, which no lane uses any more, and which are unpinned."""
        with contextlib.ExitStack() as ends:  # in reverse order, and each even if another one fails
            for arena in self.arenas:
                ends.callback(arena.close)
            ends.callback(self.drop_checkpoint_buffers)
