"""One seed, one program of activations beside steps, with random faults; run, and compared with memory."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import fills
import numpy as np
import swarm
from programs import Program
from world import CheckedExecutor, Crash, Disorder, Fault, SimData, SimExecutor, SimulatedCrash, mix
from world import random_faults as draw_faults

from offload.errors import InternalError, OffloadError
from offload.plan import make_plan
from offload.protocols import Owner
from offload.schedule.index import TileIndex
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import Allocated, Begin, Cut, Discard, Ready, Run, Sweep, Want
from offload.schedule.runs import update_visits

MAX_EVENTS = 40_000
TILE_BYTES = 8192

Action = tuple[str, int]
"""What the caller does: "pack", "read", "discard" with a tile; "step", "wait" (for the step). What others do:
"fill" paths, by their bits, and free all else."""


def random_actions(rng: random.Random) -> list[Action]:
    """Return forward and backward passes, some of them interrupted, read twice, or beside each other."""
    actions: list[Action] = []
    number, alive, fills = 0, list[int](), rng.random() < 0.4
    for _ in range(rng.randrange(1, 5)):
        for _ in range(rng.choice((3, 10, 40, 60))):
            actions.append(("pack", number))
            alive.append(number)
            number += 1
            if rng.random() < 0.05:
                actions.append(rng.choice((("step", 0), ("wait", 0))))
            if fills and rng.random() < 0.05:
                actions.append(("fill", rng.randrange(16)))
            if rng.random() < 0.03 and alive:
                actions.append(("read", rng.choice(alive)))
        while alive and rng.random() < 0.995:
            at = -1 if rng.random() < 0.9 else rng.randrange(len(alive))
            if rng.random() < 0.95:
                actions.append(("read", alive[at]))
            if rng.random() < 0.9:
                actions.append(("discard", alive.pop(at)))
        if rng.random() < 0.5:
            actions += [("discard", tile) for tile in alive]
            alive = []
        if rng.random() < 0.6:
            actions.append(("step", 0))
    return [*actions, ("wait", 0)]


def make_program(seed: int) -> Program:
    rng = random.Random(seed)
    plan = fills.tight_plan(rng)
    buffers = rng.choice((8, 12, 20, 50))
    room = rng.choice((0, 30, 30, 1000)) * (TILE_BYTES + 4096)
    paths = tuple(replace(path, available_bytes=path.available_bytes + room) for path in plan.budgets.paths)
    budgets = replace(
        plan.budgets,
        paths=paths,
        gradients_kept_bytes=None,
        activation_bytes=buffers * TILE_BYTES,
        activation_tile_bytes=TILE_BYTES,
    )
    plan = make_plan(plan.layout, budgets)
    actions = random_actions(rng)
    disorder = rng.choice(
        (Disorder(), Disorder(rng.choice((0.5, 5.0)), rng.randrange(1, 4), rng.choice((0.0, 0.02))))
    )
    faults: tuple[Fault, ...] = ()
    if rng.random() < 0.5:
        faults = draw_faults(seed, paths=len(paths), operations=3 * len(actions))
        if rng.random() < 0.1:
            faults += (Crash(rng.randrange(1, 200)),)
    return Program(plan, swarm.random_rates(rng, plan), disorder, faults, actions)


def run_program(program: Program, machine_type: type[Machine] = Machine, *, self_check: bool = True) -> Counter[str]:
    """Run a program under the checker; what is read is compared with what was written.

    Returns:
        How it ended ("done", "broken", "crashed"), and how many tiles the caller has "kept", were "unreadable", or
        were moved ("away").

    Raises:
        InternalError: A rule was broken.
        AssertionError: It ended in a way that it must not, or read something else.
    """
    plan, found = program.plan, Counter[str]()
    index = TileIndex([(p.available_bytes, p.share) for p in plan.budgets.paths], plan.slot_counts)
    machine = machine_type(plan, index)
    scratch = machine.scratch["activations"]

    def visit(run: Run, state: np.ndarray) -> None:
        mix(run, state)

    data = SimData(plan, visit)
    inner = SimExecutor(plan, program.rates, program.faults, 0, data, program.disorder)
    executor = CheckedExecutor(inner, plan)
    kept: set[int] = set()
    sweeps = 0

    def until(condition) -> None:
        def ended(machine: Machine) -> bool:
            assert inner.events < MAX_EVENTS, "it goes on for ever"
            if self_check:
                machine.check()
            return condition(machine) or machine.broken is not None

        pump(machine, executor, ended)

    def tell(event: Allocated | Cut | Want | Ready | Discard) -> None:
        executor.observe(event)
        machine.handle(event)
        executor.submit(machine.take_operations())

    tell(Cut())
    ends = tuple(map(index.end_bytes, range(len(plan.budgets.paths))))
    inner.allocate(ends)
    tell(Allocated(ends))

    def content(tile: int) -> np.ndarray:
        return np.arange(TILE_BYTES // 4, dtype=np.uint32) * np.uint32(747796405) + np.uint32(tile)

    def wait() -> None:
        if not machine.idle:
            until(lambda m: m.finished_sweep is not None)
        if machine.finished_sweep is not None:
            machine.take_finished_sweep()
            executor.ended(well=not machine.failed)

    try:
        for what, tile in program.actions:
            owner = Owner("activations", tile)
            if machine.broken is not None:
                break
            if what == "step":
                wait()
                if machine.broken is None:
                    sweeps += 1
                    visits = update_visits(plan, range(len(plan.layout.subgroups)))
                    inner.inject(Begin(Sweep(sweeps, 10 * sweeps, visits)))
                    until(lambda m: not m.idle)
            elif what == "wait":
                wait()
            elif what == "fill":
                inner.filled = {path for path in range(len(ends)) if tile >> path & 1}
            elif what == "pack":
                tell(Want(owner, fills=True))
                until(lambda m, t=tile: scratch.may_fill(t) or scratch.finds_none(t))
                if machine.broken is None and scratch.may_fill(tile):
                    buffer = scratch.buffer_of(tile)
                    executor.filled(owner, buffer)
                    data.activations[buffer][:] = content(tile)
                    tell(Ready(owner, fills=True))
                elif machine.broken is None:
                    kept.add(tile)
                    tell(Ready(owner, fills=True))
                    tell(Discard(owner))
            elif tile in kept:
                continue
            elif what == "read":
                tell(Want(owner, fills=False))
                until(lambda m, t=tile: scratch.is_there(t) or scratch.error_of(t) is not None)
                if machine.broken is None and scratch.error_of(tile) is not None:
                    assert program.faults, f"unreadable for nothing: {scratch.error_of(tile)}"
                    found["unreadable"] += 1
                elif machine.broken is None:
                    buffer = scratch.buffer_of(tile)
                    executor.read(owner, buffer)
                    assert np.array_equal(data.activations[buffer], content(tile)), f"tile {tile} has other content"
                tell(Ready(owner, fills=False))
            else:
                tell(Discard(owner))
        until(lambda m: m.in_flight == 0)
    except SimulatedCrash:
        found["crashed"] += 1
        return found
    found["kept"], found["away"] = len(kept), sum(scratch.moved.values())
    found["broken" if machine.broken is not None else "done"] += 1
    if machine.broken is not None:
        assert isinstance(machine.broken, OffloadError), repr(machine.broken)
        assert not isinstance(machine.broken, InternalError), repr(machine.broken)
        assert program.faults, f"it broke for nothing: {machine.broken!r}"
    return found
