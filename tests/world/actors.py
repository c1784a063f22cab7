"""Actors that ask the machine itself: sweeps, plans that change, checkpoints, parks, gradients and activations.

What goes through the session's own thread is in `tests/sim/callers.py`.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from offload.errors import InfeasiblePlanError
from offload.layout import Parameter, extend_layout
from offload.plan import Budgets, Home, Plan, make_plan, visit_order
from offload.plan.budget import least_slot_bytes
from offload.protocols import SECTOR_BYTES, ScratchKind, ScratchOwner, TileId
from offload.schedule import operations as ops
from offload.schedule.index import TileRecord
from offload.schedule.machine import Machine
from offload.schedule.runs import update_visits
from offload.schedule.staging import Phase
from world.data import State, mix
from world.driver import (
    DTYPES,
    ROOMY_BYTES,
    Action,
    Driver,
    Scenario,
    checksum,
    everything,
    random_disorder,
    random_layout,
    random_placements,
    random_plan,
    random_rates,
    random_sweep,
    tight,
    with_room,
)
from world.faults import (
    CorruptPayload,
    Crash,
    FailOperation,
    Fault,
    MisdirectedWrite,
    PathFull,
    SlowLane,
)
from world.faults import random_faults as any_faults


class Sweeps(Driver):
    """Random sweeps, and at the end one that looks at everything."""

    def __init__(self, *drawn: Any, **more: Any) -> None:
        super().__init__(*drawn, **more)
        self.cached_first = self.rng.random() < 0.8
        self.updated: list[int] = []
        self.synced: dict[TileId, TileRecord] = {}
        self.may_break = not self.survives()
        self.outcome.counts["streamed"] += self.plan.staging_slots < self.plan.homes.count(Home.STREAMED)

    @classmethod
    def draw(
        cls, seed: int, rng: random.Random, plan: Plan, faulty: bool | None, before: Scenario | None = None
    ) -> Scenario:
        sweeps = [random_sweep(rng, plan) for _ in range(rng.randrange(2, 6))]
        rates, disorder = random_rates(rng, plan), random_disorder(rng, (0.0, 0.0, 0.02))
        faulty = rng.random() < 0.5 if faulty is None else faulty
        transfers = sum(len(s.tiles) for s in plan.layout.subgroups) * len(sweeps)
        faults = any_faults(seed, paths=len(plan.budgets.paths), operations=max(transfers // 2, 1)) if faulty else ()
        if faulty and rng.random() < 0.1:
            faults += (Crash(rng.randrange(1, 2 * transfers + 2)),)
        actions = [Action("sweep", visits) for visits in (*sweeps, everything(plan))]
        return Scenario(seed, plan, actions, faults, rates, disorder)

    def survives(self) -> bool:
        """Return whether no fault may break it: lanes that are slow, one path lost amid plenty."""
        harmful = [fault for fault in self.scenario.faults if not isinstance(fault, SlowLane | Crash)]
        paths = self.plan.budgets.paths
        plenty = len(paths) > 1 and all(path.available_bytes >= ROOMY_BYTES for path in paths)
        lost_path = len(harmful) == 1 and (
            isinstance(harmful[0], PathFull) or (isinstance(harmful[0], FailOperation) and harmful[0].kind == "write")
        )
        return not harmful or (plenty and lost_path)

    def visit(self, run: ops.RunVisit, state: State) -> None:
        number = run.visit.subgroup
        if run.visit.changes:
            mix(run, state)
            self.updated.append(number)
        else:
            self.seen.append((None if run.fresh else checksum(state), self.twin.checksum(number)))

    def sweep(self, visits: tuple[ops.Visit, ...]) -> None:
        self.sweeps += 1
        if self.cached_first:
            order = visit_order([visit.subgroup for visit in visits], self.machine.slots)
            by_subgroup = {visit.subgroup: visit for visit in visits}
            visits = tuple(by_subgroup[number] for number in order)
        self.updated.clear()
        read = len(self.seen) + sum(not visit.changes for visit in visits)
        self.go_through(self.sweeps, visits)
        assert self.machine.changed_subgroups == self.executor.moved == self.updated, (
            "it does not say which subgroups have moved"
        )
        if self.machine.broken is None:
            assert len(self.seen) == read, "a visit has not happened"
            self.twin.sweep(self.sweeps, visits)
            if self.scenario.seed % 3 == 0 and self.sweeps == 1:
                self.data.sync()
                self.synced = self.stored()

    def reshare(self, shares: tuple[float, ...]) -> None:
        """Have paths get other shares."""
        self.inner.inject(ops.Reshare(shares))

    def extend(self, grown: Plan) -> None:
        """Have the plan grow; paths that have strayed from it may be full, and a session would refuse it."""
        self.pump(lambda machine: machine.in_flight == 0)
        if self.machine.broken is None and not self.machine.index.has_room(grown.slot_counts):
            self.outcome.how = "full"
        elif self.machine.broken is None:
            self.inner.inject(ops.Extend(grown))
            self.outcome.counts["grown"] += 1

    def look_back(self) -> None:
        if self.outcome.how == "crashed":
            # What was synced and is still the newest version must have survived; nothing may have written over it.
            # A write that landed elsewhere, or a bit that flipped, is the medium's doing: what it fell on is gone.
            harmed = any(isinstance(fault, MisdirectedWrite | CorruptPayload) for fault in self.scenario.faults)
            for tile, record in self.stored().items():
                if self.synced.get(tile) == record and not harmed:
                    assert zlib.crc32(self.verify_tile(tile, record)) == record.checksum
        elif self.outcome.how == "broken":
            # A broken machine ends every further sweep at once and issues nothing for it.
            machine = self.machine
            before, visits = machine.in_flight, everything(self.scenario.grown or self.plan)
            number = 1 + sum(action.what == "sweep" for action in self.scenario.actions)
            machine.handle(ops.BeginSweep(ops.Sweep(number, 0, visits[: len(machine.phases)])))
            assert not machine.take_operations()
            assert before or machine.take_finished_sweep() is not None


class Changing(Sweeps):
    """Sweeps between which paths get other shares, and the plan grows, where that can be.

    With a GPU others are updated there from then on.
    """

    @classmethod
    def draw(
        cls, seed: int, rng: random.Random, plan: Plan, faulty: bool | None, before: Scenario | None = None
    ) -> Scenario:
        scenario = super().draw(seed, rng, plan, faulty, before)
        rng = random.Random(-1 - seed)
        sweeps = [action.value for action in scenario.actions[:-1]]
        count = len(sweeps)
        shares = {n: tuple(rng.uniform(0.05, 1.0) for _ in plan.budgets.paths) for n in range(1, count + 1)}
        shares = {number: shares[number] for number in shares if rng.random() < 0.6}
        grows_before = 0
        if (growth := cls._grown(rng, plan)) is not None:
            scenario.plan, grown = growth
            scenario.grown, grows_before = grown, rng.randrange(2, count + 1)
            new = update_visits(grown, range(len(plan.layout.subgroups), len(grown.layout.subgroups)))
            for number in range(grows_before - 1, count):
                sweeps[number] = random_sweep(rng, grown) if plan.uses_gpu else sweeps[number] + new
        scenario.actions = []
        for number, visits in enumerate((*sweeps, everything(scenario.grown or plan)), start=1):
            scenario.actions += [Action("reshare", shares[number])] if number in shares else []
            scenario.actions += [Action("extend", scenario.grown)] if number == grows_before else []
            scenario.actions.append(Action("sweep", visits))
        return scenario

    @staticmethod
    def _grown(rng: random.Random, plan: Plan) -> tuple[Plan, Plan] | None:
        """Return a plan with room for what is added to it, and what it becomes then."""
        added = [
            Parameter(f"added{i}", rng.randrange(1, 5000), rng.choice(DTYPES), 0) for i in range(rng.randrange(1, 4))
        ]
        layout = extend_layout(plan.layout, added, 1024, 4096)
        placements = random_placements(rng, len(layout.subgroups) if plan.uses_gpu else 0)
        # Room for what is added, on one of the paths.
        room = 2 * sum(nbytes + SECTOR_BYTES for s in layout.subgroups[len(plan.homes) :] for _, _, nbytes in s.tiles)
        room += len(plan.budgets.paths) * (max(s.tile_numel for s in layout.subgroups) * 4 + SECTOR_BYTES)
        wider = with_room(plan, room, rng.randrange(len(plan.budgets.paths)))
        try:
            grown = make_plan(layout, wider.budgets, kept=wider, placements=placements)
        except InfeasiblePlanError:
            return None
        # Else there are no rates, or no memory for the first plan.
        return (wider, grown) if grown.uses_gpu == plan.uses_gpu and grown.gpu_slots >= plan.gpu_slots else None


class Saves(Driver):
    """Sweeps and checkpoints; after each life another one goes on from the checkpoint that is left."""

    asks: tuple[str, ...] = ("sweep", "sweep", "save", "save", "wait")
    """What is asked for between the first sweep and the last wait, each as often as it is here."""
    most = 9
    keeps_lanes = True

    def __init__(self, *drawn: Any, **more: Any) -> None:
        super().__init__(*drawn, **more)
        self.expected: dict[int, dict[TileId, bytes]] = {}
        self.kept: list[int] = []  # committed without a sink, not released
        self.copies: list[int] = []
        self.keep = self.rng.choice((1, 1, 2))
        self.saves = 0
        self.filled: set[int] = set()
        """Subgroups that have been visited, or taken up."""

    @classmethod
    def draw_plan(cls, rng: random.Random) -> Plan:
        plan = random_plan(rng)
        return with_room(plan, 1 << 30) if rng.random() < 0.8 else plan  # for checkpoints

    @classmethod
    def draw_actions(cls, rng: random.Random, plan: Plan) -> list[Action]:
        asked = [Action(rng.choice(cls.asks), rng.random() < 0.3) for _ in range(rng.randrange(3, cls.most))]
        return [Action("sweep"), *asked, Action("wait")]

    @classmethod
    def lives(cls, rng: random.Random, least: int) -> Iterator[int]:
        yield 0
        yield from range(1, 1 + rng.randrange(1, 3))

    def resume(self, before: Saves) -> bool:
        """Go on from the newest checkpoint that another session, which was killed, has left; False if there is none.

        It goes on in the same stores, as the engine's session does when it takes them over.
        """
        sink = len(self.plan.budgets.paths)
        committed = {
            number: records
            for number, records in sorted(before.data.committed.items())
            if all(record.location.path < sink for record in records.values())
        }
        if not committed:
            return False
        before.data.crash(self.rng)  # of what was never synced nothing is promised
        newest = max(committed)
        streamed = [s for s in self.plan.layout.subgroups if not self.plan.is_resident(s.index)]
        records = {tile: committed[newest][tile] for s in streamed for tile, _, _ in s.tiles}
        limits = {n: path.available_bytes for n, path in enumerate(self.plan.budgets.paths)}
        trial = deepcopy(self.machine.index)
        for path in limits:
            held = Counter(r.location for each in committed.values() for r in each.values())
            trial.replace_store(path, limits[path], {x: n for x, n in held.items() if x.path == path})
        if not trial.has_planned_room():
            return False
        self.data.stores, self.data.committed = before.data.stores, dict(committed)
        self.inner.there = before.inner.there  # the room of what is kept
        self.expected, self.kept = {n: before.expected[n] for n in committed}, list(committed)
        self.saves, self.sweeps = before.saves, before.sweeps
        self.tell(ops.TakeOver(limits, committed, records))
        for subgroup in self.plan.layout.subgroups:
            found = self.expected[newest]
            if subgroup in streamed:
                whole = b"".join(found[tile] for tile, _, _ in subgroup.tiles)
                self.twin.states[subgroup.index] = np.frombuffer(whole, np.uint32).copy()
            if subgroup.weight_tiles:
                whole = b"".join(found[tile] for tile, _, _ in subgroup.weight_tiles)
                for weights in (self.twin.weights, self.data.weights):
                    weights[subgroup.index] = np.frombuffer(whole, np.uint32).copy()
        self.filled = {subgroup.index for subgroup in streamed}
        return True

    def act(self, actions: list[Action]) -> None:
        super().act(actions)
        if self.machine.broken is None:
            self.verify_state()

    def verify_state(self) -> None:
        """Verify that state is what it has to be, wherever it lies; but for what is under way."""
        stored = self.stored()
        for number, right in self.twin.states.items():
            tiles = self.plan.layout.subgroups[number].tiles
            match self.machine.phases[number]:
                case Phase.RESIDENT:
                    found = self.data.resident[number].tobytes()
                case Phase.READY | Phase.DIRTY:
                    found = self.data.staging[self.machine.slots[number]][: right.size].tobytes()
                case Phase.ABSENT:
                    found = b"".join(self.verify_tile(tile, stored[tile]) for tile, _, _ in tiles)
                case _:
                    continue
            assert found == right.tobytes(), f"subgroup {number} has other state"

    def look_back(self) -> None:
        """What was committed and not released is there, whatever has happened, and nothing else passes for it."""
        found = self.data.committed
        assert set(self.kept) | set(self.copies) <= set(found), "a committed checkpoint is gone"
        for number in found:
            self.verify(number, found[number])

    def verify(self, number: int, records: Mapping[TileId, TileRecord]) -> None:
        expected = self.expected[number]
        assert sorted(records) == sorted(expected), "a checkpoint does not have every tile"
        for tile, record in records.items():
            assert self.verify_tile(tile, record) == expected[tile], f"save {number}: {tile} is of another moment"

    def pump(self, until: Callable[[Machine], object]) -> None:
        """Pump until something holds (or the machine breaks), taking note of a save that ends on the way."""
        while True:
            super().pump(lambda machine: machine.saver.finished_save is not None or until(machine))
            ended = self.machine.take_finished_save()
            if ended is None:
                return
            self.end_save(*ended)

    def check_saved(self, error: Exception | None) -> None:
        if self.machine.broken is None or error is None:
            self.executor.save_ended(well=error is None)

    def end_save(self, save: ops.Save, error: Exception | None) -> None:
        self.check_saved(error)
        if error is not None:
            self.outcome.counts["failed"] += 1
            return
        self.outcome.counts["copied" if save.sink is not None else "saved"] += 1
        self.verify(save.number, self.data.committed[save.number])
        if save.sink is not None:
            self.copies.append(save.number)
            return
        assert self.data.committed[save.number] == self.machine.saver.held_records[save.number]
        self.kept.append(save.number)
        while len(self.kept) > self.keep:
            old = self.kept.pop(0)
            del self.data.committed[old]
            self.tell(ops.ReleaseSave(old))

    def draw_sweep(self) -> tuple[ops.Visit, ...]:
        return random_sweep(self.rng, self.plan)

    def sweep(self, flag: bool) -> None:
        self.sweeps += 1
        visits = self.draw_sweep()
        unfilled = [s for s in range(len(self.plan.layout.subgroups)) if s not in self.filled]
        if unfilled:  # nothing stays fresh
            visits = tuple(ops.Visit(s, gpu=self.plan.at_home_on_gpu(s)) for s in unfilled)
            self.filled.update(unfilled)
        # Its visits change weights that are masters: those have been saved by then.
        self.pump(lambda machine: not machine.saver.has_unwritten_weights)
        if self.machine.broken is not None:
            return
        sweep = ops.Sweep(self.sweeps, 10 * self.sweeps, visits)
        self.inner.inject(ops.BeginSweep(sweep))
        self.pump(lambda machine: machine.finished_sweep is not None)
        if self.machine.finished_sweep is not None:
            assert self.machine.finished_sweep is sweep
            self.end_sweep()
            if not self.machine.failed:
                self.twin.sweep(sweep.number, visits)

    def wait(self, flag: bool) -> None:
        """Wait for the save."""
        self.pump(lambda machine: machine.saver.under_way is None)

    def save(self, flag: bool) -> None:
        """Begin a save; `flag`: of a copy."""
        self.wait(False)
        self.pump(lambda machine: Phase.BUSY not in machine.phases)
        if self.machine.broken is not None:
            return
        self.saves += 1
        copies = flag and not self.copies  # one copy a run: there is one store for them
        self.expected[self.saves] = self.twin.tiles()
        self.tell(ops.BeginSave(ops.Save(self.saves, len(self.plan.budgets.paths) if copies else None)))
        self.pump(lambda machine: not machine.saver.has_unwritten_weights)


class Parks(Saves):
    """State that leaves memory, among sweeps and checkpoints: what may stay, and when it is ended early, is drawn."""

    asks = ("sweep", "sweep", "save", "park", "park", "park", "wait")
    most = 10
    parks = 0

    def park(self, flag: bool) -> None:
        """Park; `flag`: and end it early."""
        machine = self.machine
        self.wait(False)
        self.pump(lambda machine: Phase.BUSY not in machine.phases and not machine.is_evicting)
        if machine.broken is not None:
            return
        homes = [n for n in range(len(self.plan.homes)) if self.plan.is_resident(n) and not machine.is_evicted(n)]
        leaving = [n for n in homes if n in self.filled and self.rng.random() < 0.7]
        room = Counter(nbytes for n in leaving for _, _, nbytes in self.plan.layout.subgroups[n].tiles)
        if machine.index.missing_bytes(room, lent=True):
            self.outcome.counts["refused"] += 1
            return
        self.parks += 1
        leave, has_stayed = ops.Evict(self.parks, tuple(leaving)), False
        self.allocate()
        self.tell(leave)
        if flag:
            events = self.inner.events + self.rng.randrange(6)
            self.pump(lambda machine: self.inner.events >= events or not machine.is_evicting)
            has_stayed = machine.is_evicting and machine.broken is None
            if has_stayed:
                self.tell(ops.StopEviction())
                self.outcome.counts["stayed"] += 1
                if self.rng.random() < 0.5:
                    return  # a sweep may begin while the last of it leaves
        self.pump(lambda machine: not machine.is_evicting)
        finished = machine.take_finished_eviction()
        if machine.broken is not None or finished is None:
            return
        assert finished[0] is leave
        if finished[1] is not None:
            self.outcome.counts["park failed"] += 1
        elif not has_stayed:
            self.outcome.counts["parked"] += 1
            assert all(map(machine.is_evicted, leaving)), "state has not left memory"
            assert not machine.slots, "a staging slot is in use"
            right, stored = self.twin.tiles(), self.stored()
            for number in (n for n in self.filled if n not in homes or n in leaving):
                for tile, _, _ in self.plan.layout.subgroups[number].tiles:
                    assert self.verify_tile(tile, stored[tile]) == right[tile], f"{tile} has left memory as another"

    def save(self, flag: bool) -> None:
        self.pump(lambda machine: not machine.is_evicting)
        super().save(flag)


def buffered_plan(rng: random.Random) -> Plan:
    """Return a plan for gradients that pass through buffers."""
    layout = random_layout(rng)
    paths = rng.randrange(1, 4)
    budgets = Budgets(
        rng.choice((0, 0, layout.state_bytes // 3, layout.state_bytes)),
        rng.choice((1, 2, 3, 6)) * max(layout.max_subgroup_bytes, least_slot_bytes(layout.state)),
        gradients_kept_bytes=rng.choice((0, 0, layout.state_bytes // 8)),
        gradient_item_bytes=rng.choice((0, 4)),
    )
    return tight(rng, layout, budgets, [1.0] * paths)


class Buffers(Driver):
    """What the caller fills and reads in buffers, from which it leaves for the paths."""

    scratch: ScratchKind
    lags_s = (0.0, 0.02)
    events_each = 4
    """Operations that faults are aimed among, for each action."""

    @classmethod
    def draw_faults(
        cls, seed: int, rng: random.Random, plan: Plan, actions: list[Action], faulty: bool | None
    ) -> tuple[Fault, ...]:
        if rng.random() >= 0.4:
            return ()
        faults = any_faults(seed, paths=len(plan.budgets.paths), operations=cls.events_each * len(actions))
        return (*faults, Crash(rng.randrange(1, 200))) if rng.random() < 0.1 else faults

    def start(self) -> None:
        self.book = self.machine.scratch[self.scratch]

    def owner(self, number: int) -> ScratchOwner:
        return ScratchOwner(self.scratch, number)


class Fills(Buffers):
    """Gradients of passes that go back and forth between subgroups, and steps; what a step reads is compared."""

    scratch = "gradients"

    def __init__(self, *drawn: Any, **more: Any) -> None:
        super().__init__(*drawn, **more)
        self.gradients: dict[int, State] = {}
        """The twin's."""
        self.filling: list[ScratchOwner] = []
        """The one that the caller fills."""
        self.outcome.counts["leaving"] += self.plan.gradient_buffers < len(self.plan.layout.subgroups)

    @classmethod
    def draw_plan(cls, rng: random.Random) -> Plan:
        return buffered_plan(rng)

    @classmethod
    def draw_actions(cls, rng: random.Random, plan: Plan) -> list[Action]:
        actions: list[Action] = []
        count = len(plan.layout.subgroups)
        for _ in range(rng.randrange(1, 5)):
            filled: set[int] = set()
            for _ in range(rng.choice((1, 1, 2, 3))):
                order = [n for n in reversed(range(count)) if rng.random() < 0.9]
                for at in range(len(order)):
                    if rng.random() < 0.2:
                        order.insert(at, rng.choice(order[max(0, at - 3) : at + 3]))
                if rng.random() < 0.2:
                    rng.shuffle(order)
                for number in order:
                    actions.append(Action("fill", number))
                    filled.add(number)
                    if rng.random() < 0.03:
                        actions.append(Action("read", rng.sample(range(count), rng.randrange(1, count + 1))))
            if rng.random() < 0.15:
                actions.append(Action("drop"))
            else:
                wanted = sorted(filled)
                actions.append(Action("step", rng.sample(wanted, len(wanted)) if rng.random() < 0.3 else wanted))
        return [*actions, Action("read", range(count))]

    def words(self, subgroup: int) -> int:
        return sum(nbytes for _, _, nbytes in self.plan.gradient_tiles[subgroup]) // 4

    def visit(self, run: ops.RunVisit, state: State) -> None:
        """Update state with what the gradients are, or look at it."""
        number = run.visit.subgroup
        if run.gradient_buffer is not None:
            mix(run, state)
            state ^= np.uint32(checksum(self.data.gradients[run.gradient_buffer][: self.words(number)]))
        else:
            self.seen.append((None if run.fresh else checksum(state), self.twin.checksum(number)))

    def end_filling(self) -> None:
        if self.filling:
            self.tell(ops.ReleaseBuffer(self.filling.pop(), fills=True))

    def fill(self, number: int) -> None:
        """Have gradients arrive: what is there then depends on all that came, in order."""
        owner = self.owner(number)
        if self.filling != [owner]:
            self.end_filling()
            self.tell(ops.RequestBuffer(owner, fills=True))
            self.filling.append(owner)
            self.pump(lambda machine: self.book.may_fill(number))
        if self.machine.broken is None:
            self.sweeps += 1
            buffer = self.book.buffer_of(number)
            self.executor.filled(owner, buffer)
            first, size = number not in self.gradients, self.words(number)
            right = self.gradients.setdefault(number, np.zeros(size, np.uint32))
            for words in (right, self.data.gradients[buffer][:size]):
                if first:
                    words[:] = np.arange(size, dtype=np.uint32)
                words *= np.uint32(747796405)
                words += np.uint32(self.sweeps)

    def drop(self, flag: bool) -> None:
        for number in [*self.book.owners]:
            self.tell(ops.Discard(self.owner(number)))
        self.filling.clear()
        self.gradients.clear()

    def read(self, subgroups: list[int]) -> None:
        self.sweeps += 1
        before = len(self.seen)
        self.go_through(self.sweeps, tuple(ops.Visit(subgroup, changes=False) for subgroup in subgroups))
        assert self.machine.broken or len(self.seen) - before == len(subgroups), "a visit has not happened"

    def step(self, subgroups: list[int]) -> None:
        self.sweeps += 1
        self.end_filling()
        visits = update_visits(self.plan, subgroups)
        self.go_through(self.sweeps, visits)
        self.twin.sweep(self.sweeps, visits)
        for number in subgroups:
            self.twin.states[number] ^= np.uint32(checksum(self.gradients[number]))
        self.gradients.clear()


TILE_BYTES = 8192


class Packs(Buffers):
    """Activations of forward and backward passes beside steps: tiles that leave, and come back."""

    scratch = "activations"
    events_each = 3

    def __init__(self, *drawn: Any, **more: Any) -> None:
        super().__init__(*drawn, **more)
        self.kept: set[int] = set()
        """Tiles for which there was no room."""

    @classmethod
    def draw_plan(cls, rng: random.Random) -> Plan:
        plan = buffered_plan(rng)
        buffers = rng.choice((8, 12, 20, 50))
        plan = with_room(plan, rng.choice((0, 30, 30, 1000)) * (TILE_BYTES + 4096))
        return make_plan(
            plan.layout,
            replace(
                plan.budgets,
                gradients_kept_bytes=None,
                activation_bytes=buffers * TILE_BYTES,
                activation_tile_bytes=TILE_BYTES,
            ),
        )

    @classmethod
    def draw_actions(cls, rng: random.Random, plan: Plan) -> list[Action]:
        """Return forward and backward passes, some of them interrupted, read twice, or beside each other."""
        actions: list[Action] = []
        number, alive, fills = 0, list[int](), rng.random() < 0.4
        for _ in range(rng.randrange(1, 5)):
            for _ in range(rng.choice((3, 10, 40, 60))):
                actions.append(Action("pack", number))
                alive.append(number)
                number += 1
                if rng.random() < 0.05:
                    actions.append(Action(rng.choice(("step", "wait"))))
                if fills and rng.random() < 0.05:
                    actions.append(Action("fill_paths", rng.randrange(16)))
                if rng.random() < 0.03 and alive:
                    actions.append(Action("read", rng.choice(alive)))
            while alive and rng.random() < 0.995:
                at = -1 if rng.random() < 0.9 else rng.randrange(len(alive))
                if rng.random() < 0.95:
                    actions.append(Action("read", alive[at]))
                if rng.random() < 0.9:
                    actions.append(Action("discard", alive.pop(at)))
            if rng.random() < 0.5:
                actions += [Action("discard", tile) for tile in alive]
                alive = []
            if rng.random() < 0.6:
                actions.append(Action("step"))
        return [*actions, Action("wait"), Action("end")]

    def start(self) -> None:
        super().start()
        self.allocate()

    def tell(self, event: ops.Event) -> None:
        super().tell(event)
        self.executor.submit(self.machine.take_operations())

    @staticmethod
    def content(tile: int) -> State:
        return np.arange(TILE_BYTES // 4, dtype=np.uint32) * np.uint32(747796405) + np.uint32(tile)

    def step(self, flag: bool) -> None:
        """Begin a step, which goes on beside what follows."""
        self.wait(False)
        if self.machine.broken is None:
            self.sweeps += 1
            visits = update_visits(self.plan, range(len(self.plan.layout.subgroups)))
            self.inner.inject(ops.BeginSweep(ops.Sweep(self.sweeps, 10 * self.sweeps, visits)))
            self.pump(lambda machine: not machine.has_no_sweep)

    def wait(self, flag: bool) -> None:
        """Wait for the step."""
        if not self.machine.has_no_sweep:
            self.pump(lambda machine: machine.finished_sweep is not None)
        if self.machine.finished_sweep is not None:
            self.end_sweep()

    def end(self, flag: bool) -> None:
        self.pump(lambda machine: machine.in_flight == 0)

    def fill_paths(self, bits: int) -> None:
        """Have others fill some paths, and free all else."""
        self.inner.filled = {path for path in range(len(self.plan.budgets.paths)) if bits >> path & 1}

    def pack(self, tile: int) -> None:
        owner = self.owner(tile)
        self.tell(ops.RequestBuffer(owner, fills=True))
        self.pump(lambda machine: self.book.may_fill(tile) or self.book.gets_no_buffer(tile))
        if self.machine.broken is not None:
            return
        if self.book.may_fill(tile):
            buffer = self.book.buffer_of(tile)
            self.executor.filled(owner, buffer)
            self.data.activations[buffer][:] = self.content(tile)
            self.tell(ops.ReleaseBuffer(owner, fills=True))
        else:
            self.kept.add(tile)
            self.tell(ops.ReleaseBuffer(owner, fills=True))
            self.tell(ops.Discard(owner))

    def read(self, tile: int) -> None:
        if tile in self.kept:
            return
        owner = self.owner(tile)
        self.tell(ops.RequestBuffer(owner, fills=False))
        self.pump(lambda machine: self.book.is_in_buffer(tile) or self.book.error_of(tile) is not None)
        if self.machine.broken is None and self.book.error_of(tile) is not None:
            assert self.scenario.faults, f"unreadable for nothing: {self.book.error_of(tile)}"
            self.outcome.counts["unreadable"] += 1
        elif self.machine.broken is None:
            buffer = self.book.buffer_of(tile)
            self.executor.read(owner, buffer)
            assert np.array_equal(self.data.activations[buffer], self.content(tile)), f"tile {tile} has other content"
        self.tell(ops.ReleaseBuffer(owner, fills=False))

    def discard(self, tile: int) -> None:
        if tile not in self.kept:
            self.tell(ops.Discard(self.owner(tile)))

    def look_back(self) -> None:
        self.outcome.counts["kept"] += len(self.kept)
        self.outcome.counts["away"] += sum(self.book.moved.values())
