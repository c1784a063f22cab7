"""One seed, one program of gradients that pass through buffers, with random faults; run, and compared with memory."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import swarm
from programs import Program
from world import CheckedExecutor, Crash, Disorder, Fault, SimData, SimExecutor, SimulatedCrash, mix
from world import random_faults as draw_faults

from offload.errors import InternalError, OffloadError
from offload.plan import Budgets, PathBudget, Plan, make_plan
from offload.plan.budget import LEAST_SLOT_BYTES
from offload.protocols import SECTOR_BYTES, Owner
from offload.schedule.index import TileIndex
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import Begin, Discard, Ready, Run, Sweep, Visit, Want
from offload.schedule.runs import update_visits

MAX_EVENTS = 20_000

Action = tuple[str, tuple[int, ...]]
"""What the caller does, with which subgroups: "fill", "step", "read" (state), or "drop"."""


def tight_plan(rng: random.Random) -> Plan:
    """Return a plan whose paths offer no byte more than it demands (or, for some seeds, plenty)."""
    layout = swarm.random_layout(rng)
    paths = rng.randrange(1, 4)
    budgets = Budgets(
        rng.choice((0, 0, layout.state_bytes // 3, layout.state_bytes)),
        rng.choice((1, 2, 3, 6)) * max(layout.max_subgroup_bytes, LEAST_SLOT_BYTES),
        gradients_kept_bytes=rng.choice((0, 0, layout.state_bytes // 8)),
        gradient_item_bytes=rng.choice((0, 4)),
    )

    def plan(limits: list[int]) -> Plan:
        offers = tuple(PathBudget(f"path{number}", limit) for number, limit in enumerate(limits))
        return make_plan(layout, replace(budgets, paths=offers))

    roomy = plan([swarm.ROOMY_BYTES] * paths)
    if rng.random() < 0.3:
        return roomy
    demand = roomy.storage_bytes + (max(roomy.slot_counts) + SECTOR_BYTES) * (paths - 1)
    cuts = sorted(rng.randrange(demand + 1) for _ in range(paths - 1))
    return plan([stop - start for start, stop in zip([0, *cuts], [*cuts, demand], strict=True)])


def random_actions(rng: random.Random, count: int) -> list[Action]:
    """Return what a caller does: passes, back and forth between subgroups, and what comes between."""
    actions: list[Action] = []
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
                actions.append(("fill", (number,)))
                filled.add(number)
                if rng.random() < 0.03:
                    actions.append(("read", tuple(rng.sample(range(count), rng.randrange(1, count + 1)))))
        if rng.random() < 0.15:
            actions.append(("drop", ()))
        else:
            actions.append(
                ("step", tuple(rng.sample(sorted(filled), len(filled)) if rng.random() < 0.3 else sorted(filled)))
            )
    return [*actions, ("read", tuple(range(count)))]


def make_program(seed: int) -> Program:
    rng = random.Random(seed)
    plan = tight_plan(rng)
    actions = random_actions(rng, len(plan.layout.subgroups))
    rates = swarm.random_rates(rng, plan)
    disorder = rng.choice(
        (Disorder(), Disorder(rng.choice((0.5, 5.0)), rng.randrange(1, 4), rng.choice((0.0, 0.02))))
    )
    faults: tuple[Fault, ...] = ()
    if rng.random() < 0.4:
        faults = draw_faults(seed, paths=len(plan.budgets.paths), operations=4 * len(actions))
        if rng.random() < 0.1:
            faults += (Crash(rng.randrange(1, 200)),)
    return Program(plan, rates, disorder, faults, actions)


def filled_with(gradients: np.ndarray, number: int, *, first: bool) -> None:
    """Stand in for gradients that arrive: what is there then depends on all that came, in order."""
    if first:
        gradients[:] = np.arange(gradients.size, dtype=np.uint32)
    gradients *= np.uint32(747796405)
    gradients += np.uint32(number)


def updated(run: Run, state: np.ndarray, gradients: np.ndarray) -> None:
    """Stand in for an update: state depends on what the gradients were."""
    mix(run, state)
    state ^= np.uint32(zlib.crc32(gradients))


def words_of(plan: Plan, subgroup: int) -> int:
    return sum(nbytes for _, _, nbytes in plan.gradient_tiles[subgroup]) // 4


def in_memory(program: Program) -> dict[tuple[int, int], int | None]:
    """Run a program on plain arrays; return what reads see, by (action, subgroup)."""
    plan = program.plan
    states: dict[int, np.ndarray] = {}
    gradients: dict[int, np.ndarray] = {}
    seen: dict[tuple[int, int], int | None] = {}
    for number, (what, subgroups) in enumerate(program.actions, start=1):
        for subgroup in subgroups:
            if what == "fill":
                first = subgroup not in gradients
                words = gradients.setdefault(subgroup, np.zeros(words_of(plan, subgroup), np.uint32))
                filled_with(words, number, first=first)
            elif what == "read":
                seen[number, subgroup] = zlib.crc32(states[subgroup]) if subgroup in states else None
            else:
                run = Run(0, number, Visit(subgroup), None, subgroup not in states)
                words = plan.layout.subgroups[subgroup].state_bytes // 4
                updated(run, states.setdefault(subgroup, np.zeros(words, np.uint32)), gradients[subgroup])
        if what in ("step", "drop"):
            gradients.clear()
    return seen


def run_program(program: Program, machine_type: type[Machine] = Machine, *, self_check: bool = True) -> Counter[str]:
    """Run a program under the checker, and compare what it reads with memory.

    Returns:
        How it ended ("done", "broken", "crashed"), and how many tiles of gradients were "written" and "read".

    Raises:
        InternalError: A rule was broken.
        AssertionError: It ended in a way that it must not, or read something else.
    """
    plan, found = program.plan, Counter[str]()
    machine = machine_type(
        plan, TileIndex([(p.available_bytes, p.share) for p in plan.budgets.paths], plan.slot_counts)
    )
    seen: dict[tuple[int, int], int | None] = {}

    def visit(run: Run, state: np.ndarray) -> None:
        if run.gradient_buffer is not None:
            updated(run, state, data.gradients[run.gradient_buffer][: words_of(plan, run.visit.subgroup)])
        else:
            seen[run.sweep, run.visit.subgroup] = None if run.fresh else zlib.crc32(state)

    data = SimData(plan, visit)
    inner = SimExecutor(plan, program.rates, program.faults, 0, data, program.disorder)
    executor = CheckedExecutor(inner, plan)
    arrived: set[int] = set()
    filling: list[Owner] = []  # the one that the caller fills

    def until(condition) -> None:
        def ended(machine: Machine) -> bool:
            assert inner.events < MAX_EVENTS, "it goes on for ever"
            if self_check:
                machine.check()
            return condition(machine)

        pump(machine, executor, ended)

    def tell(event: Want | Ready | Discard) -> None:
        executor.observe(event)
        machine.handle(event)

    def end_filling() -> None:
        if filling:
            tell(Ready(filling.pop(), fills=True))

    def sweep(number: int, visits: tuple[Visit, ...]) -> None:
        inner.inject(Begin(Sweep(number, 10 * number, visits)))
        until(lambda m: m.finished_sweep is not None)
        machine.take_finished_sweep()
        executor.ended(well=not machine.failed)

    try:
        for number, (what, subgroups) in enumerate(program.actions, start=1):
            if machine.broken is not None:
                break
            if what == "fill":
                (subgroup,) = subgroups
                owner = Owner("gradients", subgroup)
                if filling != [owner]:
                    end_filling()
                    tell(Want(owner, fills=True))
                    filling.append(owner)
                    until(lambda m, n=subgroup: m.scratch["gradients"].may_fill(n) or m.broken is not None)
                if machine.broken is None:
                    buffer = machine.scratch["gradients"].buffer_of(subgroup)
                    executor.filled(owner, buffer)
                    words = data.gradients[buffer][: words_of(plan, subgroup)]
                    filled_with(words, number, first=subgroup not in arrived)
                    arrived.add(subgroup)
            elif what == "drop":
                for subgroup in [*machine.scratch["gradients"].owners]:
                    tell(Discard(Owner("gradients", subgroup)))
                filling.clear()
                arrived.clear()
            elif what == "read":
                sweep(number, tuple(Visit(subgroup, changes=False) for subgroup in subgroups))
            else:
                end_filling()
                sweep(number, update_visits(plan, subgroups))
                arrived.clear()
    except SimulatedCrash:
        found["crashed"] += 1
        return found
    expected = in_memory(program)
    assert all(checksum == expected[key] for key, checksum in seen.items()), "a sweep sees wrong bytes"
    found["broken" if machine.broken is not None else "done"] += 1
    if machine.broken is None:
        assert seen.keys() == expected.keys(), "a visit has not happened"
    else:
        assert isinstance(machine.broken, OffloadError), repr(machine.broken)
        assert not isinstance(machine.broken, InternalError), repr(machine.broken)
        assert program.faults, f"it broke for nothing: {machine.broken!r}"
    return found
