"""Predicts how long a step takes: the real machine runs over simulated lanes that move no bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from offload.errors import ConfigError, invariant
from offload.plan.budget import Plan
from offload.plan.cost import in_step, mix_of
from offload.plan.planner import visit_order
from offload.plan.rates import Rates
from offload.predict.timing import TimingExecutor
from offload.protocols import ScratchOwner
from offload.schedule.index import TileIndex
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import BeginSweep, ReleaseBuffer, RequestBuffer, Sweep
from offload.schedule.runs import update_visits
from offload.schedule.timeline import Interval, covered_s
from offload.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Prediction:
    """One steady-state step.

    Attributes:
        step_s: From its begin to the end of its last update, in seconds.
        busy_s: Seconds that each lane works, by its name ("cpu", "read:0", "write:1", ...).
        lane_bytes: Bytes that each lane moves or updates.
        bound_by: The lane that works longest.
        gradients_s: Seconds to write a backward pass's gradients to the paths, if backward itself took no time.
        timeline: Every operation, in the order in which they were put on their lanes; the step begins at 0 seconds.
            Empty if `predict` was called without.
    """

    step_s: float
    busy_s: dict[str, float]
    lane_bytes: dict[str, int]
    bound_by: str
    gradients_s: float
    timeline: tuple[Interval, ...]

    def __str__(self) -> str:
        lines = [f"a step takes {format_seconds(self.step_s)}, bound by {self.bound_by}"]
        for lane, busy_s in self.busy_s.items():
            share = busy_s / self.step_s if self.step_s else 0.0
            size = format_bytes(self.lane_bytes[lane])
            lines.append(f"  {lane:<10} {size:>10} in {format_seconds(busy_s)}, busy {share:.0%} of the time")
        return "\n".join(lines)


def with_forward_s(
    prediction: Prediction, plan: Plan, forward_s: float, *, factor: float = 1.0, apart: bool = False
) -> float:
    """Return the seconds from a step's begin to the end of the forward pass into which the step goes on.

    The step updates weights in the order in which forward needs them. Forward is cut into parts, one for each update:
    a part takes time in proportion to the bytes of state updated, and begins when its weights are updated. If forward
    runs on the cores that update, it is slowed down by the time of updates, except while it waits.

    Args:
        prediction: Of the step, with a timeline.
        plan: What it predicts.
        forward_s: Seconds of the forward pass by itself.
        factor: Factor for all times of the prediction.
        apart: Whether forward runs on a GPU; not asked if weights lie there, as it does then.
    """
    updates = [interval for interval in prediction.timeline if interval.lane in ("cpu", "gpu")]
    updated_bytes = sum(interval.nbytes for interval in updates)
    if not updated_bytes:  # forward waits for no weights in particular
        return prediction.step_s * factor + forward_s
    share_cores = not (plan.weights_on_gpu or apart)
    now_s = 0.0
    for interval in sorted(updates, key=lambda interval: interval.finished_s):
        if share_cores:
            now_s += (interval.finished_s - interval.started_s) * factor
        # The next part of forward begins when its weights are updated, and the part before has ended.
        now_s = max(now_s, interval.finished_s * factor) + forward_s * interval.nbytes / updated_bytes
    return now_s


def with_backward_s(
    prediction: Prediction,
    plan: Plan,
    rates: Rates,
    forward_s: float,
    backward_s: float,
    *,
    follows: bool,
    factor: float = 1.0,
    apart: bool = False,
) -> float:
    """Return the seconds of an iteration in which all streamed state is updated during backward, none in vain.

    Usually weights are on a GPU. The CPU then updates streamed state beside backward, including what the GPU would
    update in the step. Gradients that are still on the GPU and fp32 weights are copied meanwhile; new weights are
    pushed in the step. If the passes run on no GPU (`apart` False), they share the cores with updates: the seconds of
    updates are added to theirs.

    All streamed state is read and written: in forward as much as the staging slots hold, the rest in backward. The
    step updates state at home in memory.

    Args:
        prediction: Of the step, with a timeline.
        plan: What it predicts.
        rates: The rates that it was made from.
        forward_s: Seconds of the forward pass by itself.
        backward_s: Seconds of backward by itself.
        follows: Whether the rest of the step goes on into forward (`overlap_forward`).
        factor: Factor for all times of the prediction.
        apart: Whether forward and backward run on a GPU; not asked if weights lie there, as they do then.
    """
    moves = [interval for interval in prediction.timeline if interval.lane.startswith(("read:", "write:"))]
    early_subgroups = plan.updated_in_backward
    streamed_bytes = sum(subgroup.state_bytes for subgroup in early_subgroups)
    moved_bytes = sum(interval.nbytes for interval in moves)
    update_s = prediction.busy_s.get("cpu", 0.0) * factor
    # The step's time of I/O, for as many bytes as are moved now: all of the streamed state, both ways.
    io_s = covered_s(moves) * factor * 2 * streamed_bytes / moved_bytes if moved_bytes else 0.0
    in_forward_s = min(forward_s, io_s * plan.staging_bytes / max(streamed_bytes, 1))
    io_in_backward_s = io_s - in_forward_s
    if plan.weights_on_gpu:
        # What is left to the step: updates of state at home in memory, and pushes of all new weights.
        rest_s = prediction.step_s * factor * _rest_share(prediction, plan, moved_bytes)
        cpu_bytes = prediction.lane_bytes.get("cpu", 0)
        # An update takes as long as in the predicted step; if the CPU updates nothing there, by the CPU's rate.
        s_per_byte = update_s / cpu_bytes if cpu_bytes else factor / rates.cpu_bytes_per_s
        update_s = streamed_bytes * s_per_byte
        leaving_bytes = sum(plan.leaving_bytes(subgroup.index) for subgroup in early_subgroups)
        if leaving_bytes:  # updates wait for these copies
            update_s = max(update_s, leaving_bytes * factor / rates.gpu.d2h.alone)
        if follows:
            return max(forward_s + backward_s, max(update_s, io_s) + rest_s)
        return forward_s + max(backward_s, update_s, io_in_backward_s) + rest_s

    # What is left to the step: updates of state at home in memory. Where the step goes on into forward (`follows`),
    # all updates and I/O lie beside the model's passes. On the same cores, times of passes and updates are added.
    at_home_s = update_s * (1 - streamed_bytes / plan.state_bytes) if plan.state_bytes else 0.0
    if apart and follows:
        return max(forward_s + backward_s, update_s, io_s)
    if apart:
        return forward_s + max(backward_s, update_s - at_home_s, io_in_backward_s) + at_home_s
    if follows:
        return max(forward_s + backward_s + update_s, io_s)
    return forward_s + max(backward_s + update_s - at_home_s, io_in_backward_s) + at_home_s


def _rest_share(prediction: Prediction, plan: Plan, moved_bytes: int) -> float:
    """Return the share of a step's time that remains if its streamed state was updated in backward.

    That is the busiest lane's time for the remaining work, over the busiest lane's time for all work. The step still
    updates state at home in memory and pushes new weights to the GPU. State that the GPU would have updated is not
    copied to it and back; instead, its new weights are pushed by the CPU.

    Args:
        prediction: Of the whole step.
        plan: What it predicts.
        moved_bytes: Bytes that the lanes of all paths move in that step.
    """
    early_subgroups = plan.updated_in_backward
    # Those that the GPU would have updated in the step, and those that the CPU would have.
    of_gpu = [subgroup for subgroup in early_subgroups if plan.updates_on_gpu(subgroup.index)]
    of_cpu = [subgroup for subgroup in early_subgroups if not plan.updates_on_gpu(subgroup.index)]
    early_bytes = sum(subgroup.state_bytes for subgroup in early_subgroups)
    gpu_bytes = sum(subgroup.state_bytes for subgroup in of_gpu)
    # By lane, the bytes that the step need not update or copy any more; "h2d" copies the new weights instead.
    spared_bytes = {
        "cpu": early_bytes - gpu_bytes,
        "gpu": gpu_bytes,
        "h2d": gpu_bytes - sum(subgroup.weight_bytes for subgroup in of_gpu),
        "d2h": gpu_bytes + sum(plan.leaving_bytes(subgroup.index) for subgroup in of_cpu),
    }
    rest_s = 0.0
    for lane, busy_s in prediction.busy_s.items():
        is_of_path = lane.startswith(("read:", "write:"))
        spared = 2 * early_bytes if is_of_path else spared_bytes.get(lane, 0)
        nbytes = moved_bytes if is_of_path else prediction.lane_bytes.get(lane, 0)
        rest_s = max(rest_s, busy_s * (1 - min(spared / max(nbytes, 1), 1.0)))
    return rest_s / max(prediction.busy_s.values()) if rest_s else 0.0


def predict(
    plan: Plan,
    rates: Rates,
    steps: int = 3,
    *,
    timeline: bool = True,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Prediction:
    """Simulate steps that update everything, back to back, and return the last.

    The first step fetches nothing, as all state is fresh; from the second on, state lies where steps leave it.

    Args:
        rates: Speed of every lane; one entry for each path of the plan.
        steps: Steps to simulate; at least 2 for a steady state. Costs about 10 us for each tile of each step,
            twice that on a path whose directions hinder each other.
        timeline: Whether the prediction has a timeline.
        report: Called with the number of simulated visits, and of all.

    Raises:
        ConfigError: If `rates` has not one entry for each path, or `steps` is less than 1.
    """
    if steps < 1:
        raise ConfigError("steps", steps, "simulate at least 1")
    shares = plan.path_shares(rates)
    rooms = [(path.available_bytes, share) for path, share in zip(plan.budgets.paths, shares, strict=True)]
    machine = Machine(plan, TileIndex(rooms, plan.slot_counts))
    executor = TimingExecutor(plan, in_step(mix_of(plan), rates))
    for number in range(1, steps + 1):
        executor.record_timeline = False
        gradients_s = _simulate_backward(plan, machine, executor)
        executor.record_timeline = timeline and number == steps
        began_s = max(executor.now_s, executor.end_device())  # work of the step before may still be on the GPU
        # The executor's sums go on from step to step: those of the last step are the differences.
        busy_before_s = executor.busy_s
        bytes_before = executor.lane_bytes
        ended_s = _simulate_step(
            plan, rates, machine, executor, number=number, steps=steps, began_s=began_s, report=report
        )
        pump(machine, executor, lambda machine: machine.in_flight == 0)  # flushes that go on after the step
    busy_s = {lane: seconds - busy_before_s[lane] for lane, seconds in executor.busy_s.items()}
    lane_bytes = {lane: nbytes - bytes_before[lane] for lane, nbytes in executor.lane_bytes.items()}
    intervals = tuple(
        interval._replace(started_s=interval.started_s - began_s, finished_s=interval.finished_s - began_s)
        for interval in executor.timeline
    )
    bound_by = max(busy_s, key=lambda lane: busy_s[lane])
    return Prediction(ended_s - began_s, busy_s, lane_bytes, bound_by, gradients_s, intervals)


def _simulate_backward(plan: Plan, machine: Machine, executor: TimingExecutor) -> float:
    """Simulate a backward that waits for buffers only, and return the seconds that it takes.

    Each subgroup's gradients fill a buffer, the last subgroup's first. Buffers become free as gradients are written
    to the paths, where the step reads them. Where gradients do not pass through buffers, nothing is done.
    """
    began_s = executor.now_s
    for number in reversed(range(len(plan.layout.subgroups))):
        owner = plan.gradients_of(number)
        if owner is not None:
            machine.handle(RequestBuffer(owner, fills=True))
            pump(machine, executor, partial(_may_fill, owner))
            machine.handle(ReleaseBuffer(owner, fills=True))
    return executor.now_s - began_s


def _simulate_step(
    plan: Plan,
    rates: Rates,
    machine: Machine,
    executor: TimingExecutor,
    *,
    number: int,
    steps: int,
    began_s: float,
    report: Callable[[int, int], None],
) -> float:
    """Run step `number` of `steps`, which begins at `began_s`; return the time of its end.

    That is when the caller's thread has been told, or when the GPU has done its updates and the copies to it,
    whichever is later.
    """
    subgroups = len(plan.layout.subgroups)

    def has_finished(machine: Machine) -> bool:
        """Report progress, and return whether all visits have run."""
        report((number - 1) * subgroups + len(machine.changed_subgroups), steps * subgroups)
        return machine.finished_sweep is not None

    order = visit_order(range(subgroups), machine.slots)
    sweep = Sweep(number, step=number, visits=update_visits(plan, order))
    executor.inject(BeginSweep(sweep), at_s=began_s)
    pump(machine, executor, has_finished)
    invariant(machine.broken is None, f"the simulated step broke: {machine.broken}")
    machine.take_finished_sweep()
    caller_goes_on_s = executor.now_s + rates.reaction_s  # the caller's thread has to be woken
    return max(caller_goes_on_s, executor.end_device())


def _may_fill(owner: ScratchOwner, machine: Machine) -> bool:
    """Return whether an owner's scratch buffer may be filled; `_simulate_backward` waits until it is so."""
    return machine.scratch[owner.kind].may_fill(owner.number)
