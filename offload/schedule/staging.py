"""Where each subgroup's state is: its phase, and the slot of staging memory that it has. Pure.

Phases, with the usual course of streamed state first::

    ABSENT   | it gets a slot, and its tiles are read  | FETCHING
    FETCHING | all tiles are in the slot               | READY
    READY    | its visit begins                        | BUSY
    BUSY     | the visit has changed it                | DIRTY
    DIRTY    | its slot is needed, or a save           | FLUSHING
    FLUSHING | all tiles are written; it stays, cached | READY
    READY    | its slot is given to another            | ABSENT
    ABSENT   | it gets a slot, fresh or overwritten    | READY
    BUSY     | the visit has read it only              | READY
    DIRTY    | its visit begins                        | BUSY
    DIRTY    | `TakeOver` replaces it by other state   | ABSENT
    FLUSHING | the save that it is for has failed      | DIRTY
    RESIDENT | its visit begins                        | BUSY
    BUSY     | the visit has ended, at home            | RESIDENT
    RESIDENT | an `Evict` has it written               | FLUSHING
    FLUSHING | all tiles of an `Evict` are written     | ABSENT
    FLUSHING | no path takes a tile of an `Evict`      | RESIDENT
    FETCHING | all tiles are at home                   | RESIDENT
    ABSENT   | it comes home, fresh or overwritten     | RESIDENT

A subgroup whose state has never been changed is *fresh*: nothing is fetched for it, and its first visitor fills
memory that is undefined.

Visits of streamed subgroups without a slot wait for one in a line, in the order of the sweep. In an open sweep
admitted visits come first, and take slots from visits that are not admitted.

Invariants, verified by `Staging.check`:
  * a staging slot belongs to at most one subgroup; a streamed subgroup in any state but ABSENT has one;
  * a slot is given to another subgroup only when the newest version of its content is on storage (or it is fresh).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

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
    Phase.ABSENT: (Phase.FETCHING, Phase.READY, Phase.RESIDENT),
    Phase.FETCHING: (Phase.READY, Phase.RESIDENT),
    Phase.READY: (Phase.BUSY, Phase.ABSENT),
    Phase.BUSY: (Phase.READY, Phase.DIRTY, Phase.RESIDENT),
    Phase.DIRTY: (Phase.BUSY, Phase.FLUSHING, Phase.ABSENT),
    Phase.FLUSHING: (Phase.READY, Phase.DIRTY, Phase.ABSENT, Phase.RESIDENT),
    Phase.RESIDENT: (Phase.BUSY, Phase.FLUSHING),
}
"""The phases that may follow each phase: the arrows of the module's table."""


class Slots:
    """Slots of one kind, and which subgroup has each.

    Attributes:
        owners: The subgroup that has each slot; None for a free one.
        limit: How many slots, from the first, may be assigned; None for all.
    """

    def __init__(self) -> None:
        self.owners: list[int | None] = []
        self.limit: int | None = None

    def assign(self, subgroup: int) -> int | None:
        """Assign the first free slot to a subgroup and return it; None if there is none."""
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


class BegunVisit(NamedTuple):
    """A visit that has begun and not run: it waits for the device, or for a copy to its slot."""

    transfer_slot: int
    """Its slot on the GPU, or for weights."""
    visit: Visit


class Priority(NamedTuple):
    """When a visit of an open sweep gets a slot: the lowest value first, so admitted visits before all others."""

    is_not_admitted: bool  # False comes before True
    place: int
    """Index in the sweep."""


@dataclass(slots=True)
class SubgroupState:
    """What is known of one subgroup.

    Attributes:
        phase: Where its state is.
        version: Step of its last change; None while it is fresh.
        slot: Its staging slot, if it has one.
        unread: Number of tiles that are being fetched.
        visit: Its visit in the sweep under way, until that visit begins.
        begun_visit: Its visit from when it has a transfer slot until it runs.
    """

    phase: Phase
    version: int | None = None
    slot: int | None = None
    unread: int = 0
    visit: Visit | None = None
    begun_visit: BegunVisit | None = None


class Staging:
    """Subgroups, their phases and slots, and who waits for a slot.

    Attributes:
        subgroups: All, by number.
        slots: The staging slots.
        dirty: Subgroups in staging slots that have to be flushed, in the order of their last change.
        line: Subgroups whose visits wait for a slot.
        priorities: The priority of each visit of the open sweep, by subgroup; empty if the sweep is not open.
    """

    def __init__(self, plan: Plan) -> None:
        self.subgroups: list[SubgroupState] = []
        self.slots = Slots()
        self.dirty: dict[int, None] = {}
        self.line: deque[int] = deque()
        self.priorities: dict[int, Priority] = {}
        self.use_plan(plan)

    def use_plan(self, plan: Plan) -> None:
        """Go on with another plan, which keeps all homes and slots."""
        invariant(plan.staging_slots >= len(self.slots.owners), "a plan takes staging slots away")
        for home in plan.homes[len(self.subgroups) :]:
            self.subgroups.append(SubgroupState(Phase.ABSENT if home is Home.STREAMED else Phase.RESIDENT))
        self.slots.owners.extend([None] * (plan.staging_slots - len(self.slots.owners)))

    def set_phase(self, number: int, phase: Phase) -> None:
        """Change a subgroup's phase, along one of `ARROWS`; nothing else changes a phase."""
        subgroup = self.subgroups[number]
        if phase not in ARROWS[subgroup.phase]:  # not by `invariant`: a step does this for every subgroup
            raise InternalError(f"subgroup {number} goes from {subgroup.phase} to {phase} (this is a bug in offload)")
        subgroup.phase = phase

    def mark_dirty(self, number: int) -> None:
        """Mark a subgroup dirty, as the one that was changed last."""
        self.dirty.pop(number, None)
        self.dirty[number] = None
        self.set_phase(number, Phase.DIRTY)

    def assign_slot(self, number: int, slot: int) -> None:
        """Give a free slot to a subgroup."""
        self.slots.owners[slot] = number
        self.subgroups[number].slot = slot

    def vacate(self, number: int) -> int | None:
        """Free a subgroup's slot, if it has one, and return it; the subgroup is ABSENT then."""
        subgroup = self.subgroups[number]
        slot, subgroup.slot = subgroup.slot, None
        if slot is not None:
            self.set_phase(number, Phase.ABSENT)
            self.slots.free(slot)
        return slot

    def find_or_free_slot(self) -> int | None:
        """Return a free slot; if none is, free the first whose content is on storage and has no visit to come.

        None if there is no such slot either.
        """
        first_clean = None
        for slot, owner in enumerate(self.slots.owners):
            if owner is None:
                return slot
            subgroup = self.subgroups[owner]
            if first_clean is None and subgroup.phase is Phase.READY and subgroup.visit is None:
                first_clean = owner
        if first_clean is None:
            return None
        invariant(first_clean not in self.dirty, "a dirty slot is given away")
        return self.vacate(first_clean)

    # Who waits for a slot

    def is_admitted(self, number: int) -> bool:
        """Return whether a visit of the open sweep may run."""
        return number in self.priorities and not self.priorities[number].is_not_admitted

    def may_begin(self, number: int) -> bool:
        """Return whether a visit of the open sweep may begin: it is admitted, and its live version is on storage.

        The latter holds in phase READY: the state is in its slot as it lies on storage.
        """
        return self.subgroups[number].phase is Phase.READY and self.is_admitted(number)

    def admit(self, number: int) -> None:
        """Admit a visit of the open sweep: it waits for a slot before those that are not admitted."""
        self.priorities[number] = Priority(is_not_admitted=False, place=self.priorities[number].place)
        if number in self.line:
            self.line.remove(number)
            self.enqueue_for_slot(number)

    def enqueue_for_slot(self, number: int) -> None:
        """Put a streamed subgroup's visit into the line for slots: at its end, or in an open sweep by priority."""
        index = len(self.line)
        if number in self.priorities:
            while index and self.priorities[self.line[index - 1]] > self.priorities[number]:
                index -= 1
        self.line.insert(index, number)

    def preempt_slot(self, subgroup: int) -> int | None:
        """Free the slot of the last visit that is not admitted, for this subgroup's visit, and return the slot.

        The state of that visit has been read (READY), and it waits in the line again. None if no such visit comes
        after this subgroup's own.
        """
        loser = None
        last_priority = self.priorities[subgroup]  # the greatest so far: the subgroup's own, then the loser's
        for number in self.slots.owners:
            if number is None or self.subgroups[number].visit is None or self.is_admitted(number):
                continue
            if self.subgroups[number].phase is Phase.READY and self.priorities[number] > last_priority:
                last_priority, loser = self.priorities[number], number
        if loser is None:
            return None
        self.enqueue_for_slot(loser)
        return self.vacate(loser)

    def clear_line(self) -> None:
        """Empty the line for slots: the sweep has ended."""
        self.line.clear()
        self.priorities.clear()

    def check(self, plan: Plan) -> None:
        """Verify the module's invariants, for `Machine.check`."""
        for number, subgroup in enumerate(self.subgroups):
            problem = self._problem(number, subgroup, is_resident=plan.is_resident(number))
            invariant(not problem, problem)
        owners = [owner for owner in self.slots.owners if owner is not None]
        with_slots = [subgroup for subgroup in self.subgroups if subgroup.slot is not None]
        invariant(len(owners) == len(with_slots), "a slot has an owner that left it")

    def _problem(self, number: int, subgroup: SubgroupState, *, is_resident: bool) -> str:
        """Return what is wrong with a subgroup, in words; "" if nothing is.

        Texts are made only of what is wrong, since a simulation asks thousands of times.
        """
        phase, slot = subgroup.phase, subgroup.slot
        impossible_phases = (Phase.READY, Phase.DIRTY) if is_resident else (Phase.RESIDENT,)
        if phase in impossible_phases:
            return f"subgroup {number} is {phase}, resident: {is_resident}"
        has_no_slot = is_resident or phase is Phase.ABSENT
        if has_no_slot != (slot is None):
            return f"subgroup {number} is {phase} and has slot {slot}"
        if slot is not None and self.slots.owners[slot] != number:
            return f"slot {slot} is not subgroup {number}'s"
        if (phase is Phase.FETCHING) != (subgroup.unread > 0):
            return f"fetch of {number} is lost"
        return ""
