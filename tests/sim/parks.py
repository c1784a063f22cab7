"""One seed, one scenario in which state leaves memory: parks, ended early at random, among sweeps and checkpoints."""

from __future__ import annotations

import random
from collections import Counter

import saves

from offload.schedule.machine import Machine
from offload.schedule.operations import Leave, Stay
from offload.schedule.staging import Phase


def random_actions(rng: random.Random) -> list[saves.Action]:
    """Return what the session does; `flag` of "park" has it end early."""
    actions = [saves.Action("sweep")]
    for _ in range(rng.randrange(3, 10)):
        what = rng.choice(("sweep", "sweep", "save", "park", "park", "park", "wait"))
        actions.append(saves.Action(what, rng.random() < 0.3))
    return [*actions, saves.Action("wait")]


class Session(saves.Session):
    """A session that also parks: what may stay, and when it is ended early, is drawn."""

    parks = 0

    def park(self, flag: bool) -> None:
        machine = self.machine
        self.wait(False)
        self.pump(lambda machine: Phase.BUSY not in machine.phases and not machine.is_leaving)
        if machine.broken is not None:
            return
        homes = [n for n in range(len(self.plan.homes)) if self.plan.is_resident(n) and not machine.is_away(n)]
        leaving = [n for n in homes if n in self.filled and self.rng.random() < 0.7]
        room = sum(
            (Counter(nbytes for _, _, nbytes in self.plan.layout.subgroups[n].tiles) for n in leaving), Counter()
        )
        if machine.index.missing_bytes(room, spare=True):
            self.outcome.counts["refused"] += 1
            return
        self.parks += 1
        leave, has_stayed = Leave(self.parks, tuple(leaving)), False
        self.allocate()
        self.tell(leave)
        if flag:
            events = self.inner.events + self.rng.randrange(6)
            self.pump(lambda machine: self.inner.events >= events or not machine.is_leaving)
            has_stayed = machine.is_leaving and machine.broken is None
            if has_stayed:
                self.tell(Stay())
                self.outcome.counts["stayed"] += 1
                if self.rng.random() < 0.5:
                    return  # a sweep may begin while the last of it leaves
        self.pump(lambda machine: not machine.is_leaving)
        finished = machine.take_finished_leave()
        if machine.broken is not None or finished is None:
            return
        assert finished[0] is leave
        if finished[1] is not None:
            self.outcome.counts["park failed"] += 1
        elif not has_stayed:
            self.executor.left()
            self.outcome.counts["parked"] += 1
            assert all(map(machine.is_away, leaving)), "state has not left memory"
            assert not machine.slots, "a staging slot is in use"
            assert all(self.executor.is_clean(n) for n in self.filled if n not in homes or n in leaving)

    def save(self, flag: bool) -> None:
        self.pump(lambda machine: not machine.is_leaving)
        super().save(flag)


def run_seed(seed: int, machine_type: type[Machine] = Machine, *, self_check: bool = True) -> saves.Outcome:
    """Run one scenario; raise if anything is not as it has to be."""
    return saves.run_seed(seed, machine_type, self_check=self_check, session_type=Session, actions=random_actions)
