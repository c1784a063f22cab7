"""A few steps of a small plan through a session's lanes, to measure what a step costs beside its bytes.

Subgroups are so small that moving and updating their bytes takes hardly any time. What takes time is the engine's
thread (machine, tables, queue, learning), the wake-ups of threads, and a path's latency. The steps are made by the
same machine and executor as a session's, and rates are learnt from them as from a session's own steps.

This happens before the session's first operation, in staging memory whose content is undefined at that moment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from offload.device.host import HostMemory
from offload.device.none import NO_LANES
from offload.dtypes import DtypeCode
from offload.engine.executor import REQUEST, LiveExecutor
from offload.engine.tables import Tables
from offload.formats import BF16, EXACT_ADAMW
from offload.kernels import CpuUpdateKernel
from offload.kernels.table import trial_bytes
from offload.layout import SECTOR_NUMEL, Parameter, build_layout
from offload.measure.observe import observe, typical
from offload.memory.arenas import Arena
from offload.plan import NO_GPU, Budgets, Home, PathBudget, Plan, Rates, make_plan, visit_order
from offload.protocols import Queue, Tier
from offload.schedule.index import TileIndex
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import BeginSweep, RunVisit, Sweep
from offload.schedule.runs import update_visits
from offload.schedule.timeline import Interval

SUBGROUPS, SLOTS = 12, 4
"""Most subgroups, and most staging slots; fewer if the session has fewer."""

STEPS = 6
"""Steps at most; rates are learnt from the second half of them.

The first one reads nothing, and the first two do many things for the first time.
"""

LONGEST_S = 0.25
"""Seconds after which no further step begins, for slow paths."""


def trial_rates(
    kernel: CpuUpdateKernel,
    tiers: Sequence[Tier],
    queue: Queue,
    known: Rates,
    plan: Plan | None = None,
    memory: tuple[int, int] = (0, 0),
) -> Rates:
    """Take a few small steps, and return rates with what they show.

    They show costs and reaction of the engine's thread, and the latencies of paths. In two cases no step is taken,
    and rates stay as they are known: if there is a GPU, as calls of its runtime then cost most; and if a path lacks
    the little room that is needed.

    Args:
        kernel: The session's kernel.
        tiers: The session's tiers, with nothing in any slot yet. With an object store among them, whose requests cost
            money, all state of the steps is in memory.
        queue: The session's; nothing else may report to it meanwhile.
        known: Rates that are known of all lanes.
        plan: The session's: the small plan has as large a part of its state at home in memory. None: no state is at
            home in memory, if there are paths.
        memory: Address and size of memory whose content is lost; other memory is allocated if it is too small.

    Raises:
        OffloadError: If a path or the update fails.
    """
    if any(tier.paid for tier in tiers):  # no request is made just to try something
        tiers = ()
    small = _small_plan(tiers, plan)
    if known.gpu != NO_GPU or any(tier.free_bytes() < small.storage_bytes for tier in tiers):
        return known
    with contextlib.ExitStack() as ends:
        address, nbytes = memory
        if nbytes < small.staging_bytes:
            staging = Arena(small.staging_bytes, prefault=True)
            ends.callback(staging.close)
            address = staging.address
        # For one update at a time: state at home, gradients and weights.
        update_memory = Arena(SECTOR_NUMEL * trial_bytes(EXACT_ADAMW), prefault=True)
        ends.callback(update_memory.close)
        session = _Session(kernel, tiers, queue, small, address, update_memory.address)
        ends.callback(session.drain)  # before memory is freed: after an error or interrupt lanes may be at work on it
        observed: list[Rates] = []
        until_s = time.monotonic() + LONGEST_S
        for number in range(1, STEPS + 1):
            timeline = session.step(number, known)
            is_late = number > 1 and time.monotonic() > until_s  # a slow path: there is no time for another step
            if number > STEPS // 2 or is_late:  # earlier steps only warm up
                observed.append(observe(known, timeline))
            if is_late:
                break
        session.settle()
    return typical(observed)


def _small_plan(tiers: Sequence[Tier], plan: Plan | None) -> Plan:
    """Return a plan of a few of the smallest subgroups, with a path for each tier.

    As large a part of its state is at home in memory as in `plan`. Without a `plan` all state is streamed, if there
    are tiers.
    """
    count = SUBGROUPS
    slots = SLOTS
    streamed_part = 1.0
    if plan is not None and plan.homes:
        count = min(SUBGROUPS, len(plan.homes))
        slots = max(1, min(SLOTS, plan.staging_slots))
        streamed_part = plan.homes.count(Home.STREAMED) / len(plan.homes)
    at_home = round(count * (1 - streamed_part)) if tiers else count  # subgroups at home in memory
    # One parameter for each subgroup, of the size of a subgroup.
    parameters = [Parameter(f"a trial's {number}", SECTOR_NUMEL, DtypeCode.BFLOAT16, 0) for number in range(count)]
    layout = build_layout(parameters, SECTOR_NUMEL)
    size = layout.max_subgroup_bytes
    # Endless room: `trial_rates` compares what is needed with the real room.
    offers = tuple(PathBudget(f"path {number}", 1 << 62) for number in range(len(tiers)))
    return make_plan(layout, Budgets(host_bytes=at_home * size, staging_bytes=slots * size, paths=offers))


class _Session:
    """The machine and the executor that take the steps of a small plan.

    Args:
        kernel: Runs the updates.
        tiers: One for each path of the plan.
        queue: Gets all completions.
        plan: The small plan.
        address: Address of its staging memory.
        beside: Address of memory for all else that an update uses: the state of a subgroup at home in memory, then a
            gradient, then a weight. All subgroups share it, as one update runs at a time and its results do not
            matter.
    """

    def __init__(
        self, kernel: CpuUpdateKernel, tiers: Sequence[Tier], queue: Queue, plan: Plan, address: int, beside: int
    ) -> None:
        self._plan = plan
        self._queue = queue
        layout = plan.layout
        self._home = beside  # of all state at home in memory: one update runs at a time
        gradients = beside + layout.max_subgroup_bytes
        self._tables = Tables()
        self._tables.extend(layout)
        # One parameter for each subgroup, all with the same gradient and the same weight.
        self._tables.gradients[:] = gradients
        self._tables.gradient_dtypes[:] = DtypeCode.BFLOAT16
        self._tables.weights[:] = gradients + SECTOR_NUMEL * BF16.item_bytes
        self._groups = [layout.rule.values(layout.rule.defaults)]  # of group 0, in which all parameters are
        rooms = [(tier.free_bytes(), 1.0) for tier in tiers]  # room of each path, and equal shares of the tiles
        self._machine = Machine(plan, TileIndex(rooms, plan.slot_counts))
        self._memory = HostMemory(NO_LANES)
        self._memory.place_slots(address, plan.slot_bytes)
        self._executor = LiveExecutor(tiers, kernel, queue, self._memory)
        self._executor.use_plan(plan)
        self._executor.set_visitor(self._table, updates=True)

    def step(self, number: int, known: Rates) -> list[Interval]:
        """Take a step as a session's engine thread does, and return the step's timeline.

        Args:
            number: The step's number.
            known: The known rates.
        """
        machine = self._machine
        executor = self._executor
        # A request wakes the engine's thread, so that its first turn has a beginning in the timeline.
        self._queue.post(REQUEST)
        while not executor.requests:
            for event in executor.wait():
                machine.handle(event)
        executor.requests -= 1
        timeline, executor.timeline = executor.timeline, []  # that of the step before
        self._rows = self._tables.rows(self._groups, scale=1.0, clip=1.0, active=range(len(self._plan.homes)))
        order = visit_order(self._rows.subgroups, machine.slots)
        visits = update_visits(self._plan, order, reloads=machine.is_fresh)
        machine.handle(BeginSweep(Sweep(number, step=number, visits=visits)))
        executor.submit(machine.take_operations())
        executor.end_engine_interval()
        if timeline:
            observe(known, timeline)  # only for the time that it takes: sessions learn here from the step before
        pump(machine, executor, lambda machine: machine.finished_sweep is not None)
        machine.take_finished_sweep()
        self._check()
        return list(executor.timeline)

    def settle(self) -> None:
        """Wait for all operations in flight."""
        machine = self._machine
        pump(machine, self._executor, lambda machine: machine.in_flight == 0 or machine.broken is not None)
        self._check()

    def drain(self) -> None:
        """Wait until no lane touches the memory any more; errors are ignored."""
        self._executor.drain()

    def _check(self) -> None:
        """Raise the error that has broken the machine, if there is one."""
        if self._machine.broken is not None:
            raise self._machine.broken

    def _table(self, run: RunVisit) -> npt.NDArray[Any]:
        """Return the table of a run of a visit, for the kernel; the executor calls this as its visitor.

        All state counts as fresh, so that the update never uses what the shared memory holds from another subgroup.
        """
        address = self._home if run.slot is None else self._memory.slot_address(run.slot)
        return self._tables.make_table(replace(run, fresh=True), address, self._rows)
