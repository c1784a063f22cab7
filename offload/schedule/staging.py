"""Where each subgroup's state is: its phase, and the slot of staging memory that it has. Pure.

Phases of a streamed subgroup (`ARROWS` has all)::

    ABSENT -> FETCHING -> READY -> BUSY -> DIRTY -> FLUSHING -> READY (clean, cached) -> ABSENT

A resident subgroup is RESIDENT or BUSY, unless its state has left memory for storage::

    RESIDENT -> FLUSHING -> ABSENT -> FETCHING -> RESIDENT

A subgroup whose state has never been changed is *fresh*: nothing is fetched
for it, and its first visit starts from undefined memory (the visitor fills it).

Visits of streamed subgroups without a slot wait for one in a line, in the order of the sweep. In an open sweep
admitted visits come first, and also get the slots of those that are not admitted.

Invariants, verified by `Staging.check`:
  * a staging slot belongs to at most one subgroup; a streamed subgroup in any state but ABSENT has one;
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
    Phase.ABSENT: (Phase.FETCHING, Phase.READY, Phase.RESIDENT),  # the last two: there is nothing to fetch
    Phase.FETCHING: (Phase.READY, Phase.RESIDENT),
    Phase.READY: (Phase.BUSY, Phase.ABSENT),
    Phase.BUSY: (Phase.READY, Phase.DIRTY, Phase.RESIDENT),
    Phase.DIRTY: (Phase.BUSY, Phase.FLUSHING, Phase.ABSENT),  # ABSENT: exchanged for what lies on storage
    # DIRTY: the flush was for a save that has failed; RESIDENT: state that was to leave memory stays there.
    Phase.FLUSHING: (Phase.READY, Phase.DIRTY, Phase.ABSENT, Phase.RESIDENT),
    Phase.RESIDENT: (Phase.BUSY, Phase.FLUSHING),
}
"""The phases that may follow each phase."""


class Slots:
    """Slots of one kind, and which subgroup has each.

    Attributes:
        owners: By slot; None for one that is free.
        limit: How many of them, from the first, are given out; None for all.
    """

    def __init__(self) -> None:
        self.owners: list[int | None] = []
        self.limit: int | None = None

    def assign(self, subgroup: int) -> int | None:
        """Return the first free slot, from now on a subgroup's; None if there is none."""
        if None not in self.owners:
            return None
        slot = self.owners.index(None)
        if self.limit is not None and slot >= self.limit:
            return None
        self.owners[slot] = subgroup
        return slot

    def free(self, slot: int) -> None:
        """Make a slot free."""
        self.owners[slot] = None


@dataclass(slots=True)
class Subgroup:
    """What is known of one subgroup.

    Attributes:
        phase: Where its state is.
        version: Step of its last change; None while it is fresh.
        slot: Its staging slot, if it has one.
        unread: Tiles that are being fetched.
        visit: Its visit in the sweep under way, until that begins.
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
        priorities: Of each visit of an open sweep: (whether it is not admitted, its place); the lowest comes first.
    """

    def __init__(self, plan: Plan) -> None:
        self.subgroups: list[Subgroup] = []
        self.slots = Slots()
        self.dirty: dict[int, None] = {}
        self.line: deque[int] = deque()
        self.priorities: dict[int, tuple[bool, int]] = {}
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

    def vacate_clean(self) -> int | None:
        """Return a slot that is empty, or whose content is on storage and not visited in this sweep."""
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
        """Return whether a visit of the open sweep may run."""
        return number in self.priorities and not self.priorities[number][0]

    def may_begin(self, number: int) -> bool:
        """Return whether a visit of the open sweep may begin: it is admitted, and the live version is on storage."""
        return self.subgroups[number].phase is Phase.READY and self.is_admitted(number)

    def admit(self, number: int) -> None:
        """Admit a visit of the open sweep: it waits for a slot before those that are not admitted."""
        self.priorities[number] = False, self.priorities[number][1]
        if number in self.line:
            self.line.remove(number)
            self.enqueue(number)

    def enqueue(self, number: int) -> None:
        """Have a streamed visit wait for a slot: as the last one, or in an open sweep by its priority."""
        place = len(self.line)
        if number in self.priorities:
            while place and self.priorities[self.line[place - 1]] > self.priorities[number]:
                place -= 1
        self.line.insert(place, number)

    def evict(self, subgroup: int) -> int | None:
        """Return the slot of the last visit that is not admitted, for a subgroup that comes before it; else None."""
        last, owner = self.priorities[subgroup], None
        for number in self.slots.owners:
            if number is None or self.subgroups[number].visit is None or self.is_admitted(number):
                continue
            if self.subgroups[number].phase is Phase.READY and self.priorities[number] > last:
                last, owner = self.priorities[number], number
        if owner is None:
            return None
        self.enqueue(owner)
        return self.vacate(owner)

    def forget_waiting(self) -> None:
        """Have nobody wait for a slot: the sweep has ended."""
        self.line.clear()
        self.priorities.clear()

    def check(self, plan: Plan) -> None:
        """Verify the invariants that the module states.

        Raises:
            InternalError: If one does not hold.
        """
        for number, subgroup in enumerate(self.subgroups):
            phase, slot, resident = subgroup.phase, subgroup.slot, plan.is_resident(number)
            wrong = ""  # texts are made of what is wrong only: a simulation asks thousands of times
            if phase in (Phase.READY, Phase.DIRTY) if resident else phase is Phase.RESIDENT:
                wrong = f"subgroup {number} is {phase}, resident: {resident}"
            elif (resident or phase is Phase.ABSENT) != (slot is None):
                wrong = f"subgroup {number} is {phase} and has slot {slot}"
            elif slot is not None and self.slots.owners[slot] != number:
                wrong = f"slot {slot} is not subgroup {number}'s"
            elif (phase is Phase.FETCHING) != (subgroup.unread > 0):
                wrong = f"fetch of {number} is lost"
            invariant(not wrong, wrong)
        owners = [owner for owner in self.slots.owners if owner is not None]
        with_slots = [subgroup for subgroup in self.subgroups if subgroup.slot is not None]
        invariant(len(owners) == len(with_slots), "a slot has an owner that left it")
