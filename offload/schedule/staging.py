"""Where each subgroup's state is: its phase, and the slot of staging memory that it has. Pure.

Phases of a streamed subgroup (`ARROWS` has all)::

    ABSENT -> FETCHING -> READY -> BUSY -> DIRTY -> FLUSHING -> READY (clean, cached) -> ABSENT

A resident subgroup is RESIDENT or BUSY. A subgroup whose state has never been changed is *fresh*: nothing is fetched
for it, and its first visit starts from undefined memory (the visitor fills it).

Visits of streamed subgroups without a slot wait for one in a line: in the order of the sweep, and in a sweep ahead
those first that are admitted, which also take the slots of those that are not.

Invariants, verified by `Staging.check`:
  * a staging slot belongs to at most one subgroup; a subgroup in any state but ABSENT or RESIDENT has one;
  * a slot changes hands only when its content is on storage in its newest version (or is fresh).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from offload.errors import InternalError, invariant
from offload.plan.budget import Home, Plan
from offload.schedule.operations import Visit


class Phase(Enum):
    """Where a subgroup's state is; see the module's docstring."""

    ABSENT = auto()
    FETCHING = auto()
    READY = auto()
    BUSY = auto()
    DIRTY = auto()
    FLUSHING = auto()
    RESIDENT = auto()


ARROWS: Mapping[Phase, Collection[Phase]] = {
    Phase.ABSENT: (Phase.FETCHING, Phase.READY),  # READY: there is nothing to fetch
    Phase.FETCHING: (Phase.READY,),
    Phase.READY: (Phase.BUSY, Phase.ABSENT),
    Phase.BUSY: (Phase.READY, Phase.DIRTY, Phase.RESIDENT),
    Phase.DIRTY: (Phase.BUSY, Phase.FLUSHING, Phase.ABSENT),  # ABSENT: exchanged for what lies on storage
    Phase.FLUSHING: (Phase.READY, Phase.DIRTY),  # DIRTY: the flush was for a save that has failed
    Phase.RESIDENT: (Phase.BUSY,),
}
"""The phases that may follow each phase."""


class Slots:
    """Slots of one kind, and which subgroup has each."""

    def __init__(self) -> None:
        self.owners: list[int | None] = []

    def take(self, subgroup: int) -> int | None:
        """Return the first free slot, from now on a subgroup's; None if there is none."""
        if None not in self.owners:
            return None
        slot = self.owners.index(None)
        self.owners[slot] = subgroup
        return slot

    def free(self, slot: int) -> None:
        """Take note that nobody has a slot any more."""
        self.owners[slot] = None


@dataclass(slots=True)
class Subgroup:
    """What is known of one subgroup.

    Attributes:
        phase: Where its state is.
        version: Step of its last change; None while it is fresh.
        slot: What it has of staging memory.
        unread: Tiles that are being fetched.
        visit: Of the sweep under way, not begun.
        passing: A visit that has not run, and its slot on the GPU or for weights.
    """

    phase: Phase
    version: int | None = None
    slot: int | None = None
    unread: int = 0
    visit: Visit | None = None
    passing: tuple[int, Visit] | None = None


class Staging:
    """Subgroups, their phases and slots, and who waits for a slot.

    Args:
        plan: What lives where.

    Attributes:
        subgroups: All, by number.
        slots: Whose each staging slot is.
        dirty: Staged subgroups that are to be flushed, in the order of their last change.
        line: Subgroups whose visits wait for a slot.
        turns: Of each visit in a sweep ahead: whether it is not admitted, and its place.
    """

    def __init__(self, plan: Plan) -> None:
        self.subgroups: list[Subgroup] = []
        self.slots = Slots()
        self.dirty: dict[int, None] = {}
        self.line: deque[int] = deque()
        self.turns: dict[int, tuple[bool, int]] = {}
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Take in a plan that keeps all homes and slots."""
        invariant(plan.staging_slots >= len(self.slots.owners), "a plan takes staging slots away")
        for home in plan.homes[len(self.subgroups) :]:
            self.subgroups.append(Subgroup(Phase.ABSENT if home is Home.STREAMED else Phase.RESIDENT))
        self.slots.owners.extend([None] * (plan.staging_slots - len(self.slots.owners)))

    def to(self, number: int, phase: Phase) -> None:
        """Bring a subgroup into another phase; the one place where a phase changes."""
        subgroup = self.subgroups[number]
        if phase not in ARROWS[subgroup.phase]:  # not by `invariant`: a step does this for every subgroup
            raise InternalError(f"subgroup {number} goes from {subgroup.phase} to {phase} (this is a bug in offload)")
        subgroup.phase = phase

    def changed(self, number: int) -> None:
        """Take note that a subgroup is to be flushed, its last change being the newest."""
        self.dirty.pop(number, None)
        self.dirty[number] = None
        self.to(number, Phase.DIRTY)

    def give(self, number: int, slot: int) -> None:
        """Have a subgroup own a slot that is free."""
        self.slots.owners[slot] = number
        self.subgroups[number].slot = slot

    def vacate(self, number: int) -> int | None:
        """Take a subgroup's slot, if it has one, and return it."""
        subgroup = self.subgroups[number]
        slot, subgroup.slot = subgroup.slot, None
        if slot is not None:
            self.to(number, Phase.ABSENT)
            self.slots.free(slot)
        return slot

    def take_clean(self) -> int | None:
        """Return a slot that is empty or whose content is on storage and not wanted in this sweep."""
        clean = None
        for slot, owner in enumerate(self.slots.owners):
            if owner is None:
                return slot
            if clean is None:
                subgroup = self.subgroups[owner]
                if subgroup.phase is Phase.READY and subgroup.visit is None:
                    clean = owner
        invariant(clean is None or clean not in self.dirty, "a dirty slot is given away")
        return None if clean is None else self.vacate(clean)

    # Who waits for a slot

    def is_admitted(self, number: int) -> bool:
        """Return whether a visit ahead may run."""
        return number in self.turns and not self.turns[number][0]

    def admit(self, number: int) -> None:
        """Let a visit ahead run: it waits before those that may not."""
        self.turns[number] = False, self.turns[number][1]
        if number in self.line:
            self.line.remove(number)
            self.file(number)

    def file(self, number: int) -> None:
        """Have a streamed visit wait for a slot; ahead, those that are admitted first, each kind in order."""
        behind = 0
        if number in self.turns:
            turn = self.turns[number]
            for other in reversed(self.line):
                if self.turns[other] < turn:
                    break
                behind += 1
        self.line.insert(len(self.line) - behind, number)

    def evict(self, wanted: int) -> int | None:
        """Take the slot of a visit ahead whose turn comes later than that of a subgroup."""
        turn, owner = self.turns[wanted], None
        for number in self.slots.owners:
            subgroup = None if number is None else self.subgroups[number]
            waits = subgroup is not None and subgroup.visit is not None and subgroup.phase is Phase.READY
            if number is not None and waits and not self.is_admitted(number) and self.turns[number] > turn:
                turn, owner = self.turns[number], number
        if owner is None:
            return None
        self.file(owner)
        return self.vacate(owner)

    def forget_waiting(self) -> None:
        """Have nobody wait for a slot: the sweep has ended."""
        self.line.clear()
        self.turns.clear()

    def check(self, plan: Plan) -> None:
        """Verify the invariants that the module states.

        Raises:
            InternalError: If one does not hold.
        """
        for number, subgroup in enumerate(self.subgroups):
            phase, slot, resident = subgroup.phase, subgroup.slot, plan.is_resident(number)
            at_home = phase in (Phase.RESIDENT, Phase.BUSY) if resident else phase is not Phase.RESIDENT
            invariant(at_home, f"subgroup {number} is {phase}, resident: {resident}")
            without = resident or phase is Phase.ABSENT
            invariant(without == (slot is None), f"subgroup {number} is {phase} and has slot {slot}")
            owned = slot is None or self.slots.owners[slot] == number
            invariant(owned, f"slot {slot} is not subgroup {number}'s")
            invariant((phase is Phase.FETCHING) == (subgroup.unread > 0), f"fetch of {number} is lost")
        owners = [owner for owner in self.slots.owners if owner is not None]
        with_slots = [subgroup for subgroup in self.subgroups if subgroup.slot is not None]
        invariant(len(owners) == len(with_slots), "a slot has an owner that left it")
