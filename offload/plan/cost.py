"""The time of a step in closed form: cheap enough to search plans with.

Each lane's bytes over its rate, and the pipeline's filling and draining. `offload.predict.predict` runs the step
instead; a test bounds how far the two are apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from offload.plan.budget import Home, Placement, Plan
from offload.plan.rates import LEAST_CPU_SPEED, UPDATE_MEMORY_COST, PathRates, Rates, Slowness

BISECTIONS = 7
"""Halvings of the range in which the CPU's speed is sought: it is found to 0.7% of the speed alone."""

PATH_LANES = "read", "write", "path"
"""What the lanes of paths, and paths whose directions share them, begin with."""

CALLS = 5
"""Calls of the GPU's runtime for a copy of state or an update there: itself, two waits, an event on each side."""

PASSING_CALLS = 2
"""Calls for the gradients or new weights of a subgroup, besides a copy for each of its segments: the events."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step costs, in closed form.

    Attributes:
        step_s: Seconds of a steady-state step that updates everything, filling and draining included.
        lane_s: For each lane its bytes over its rate, its operations' latencies included; for a path's directions,
            over the rate that each has alone. Three more entries are made where they apply. "path:<n>": what both
            directions of a path take at once, if they hinder each other. "memory": the traffic of all lanes over the
            host's bandwidth. "engine": the work of the engine's thread, if its costs are known. No order of the same
            operations can be faster than the longest of all these.
    """

    step_s: float
    lane_s: dict[str, float]

    @property
    def bound_s(self) -> float:
        """The lower bound: the longest lane."""
        return max(self.lane_s.values())

    @property
    def bound_by(self) -> str:
        """The lane that sets it."""
        return max(self.lane_s, key=lambda lane: self.lane_s[lane])


@dataclass(frozen=True, slots=True)
class SubgroupSum:
    """Subgroups with one kind of home and one placement: how many, and the bytes of their state."""

    count: int = 0
    nbytes: float = 0


class ByDevice(NamedTuple):
    """Subgroups of one kind of home, by the device that updates them."""

    on_cpu: SubgroupSum
    on_gpu: SubgroupSum


class LaneWork(NamedTuple):
    """What one lane does in a step: its bytes (moved, updated, or of memory traffic that it causes), its seconds."""

    nbytes: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Mix:
    """What matters of a plan.

    Attributes:
        streamed: Streamed subgroups.
        host: Those at home in host memory.
        gpu: Those at home on the GPU, which updates them.
        pushed_bytes: New weights of what the CPU updates, pushed to the GPU.
        fetched_gradient_bytes: Gradients of what the CPU updates, and fp32 weights, fetched from the GPU in the step.
        staging_slots: Staging slots in host memory.
        gpu_slots: Staging slots on the GPU.
        path_gradient_bytes: Gradients that are read from the paths in the step.
        mean_tiles: Tiles of a mean streamed subgroup.
        mean_segments: Segments of a mean subgroup.
        nodes: What `host` has, by the memory node of the homes; empty where there is only one node.
    """

    streamed: ByDevice
    host: ByDevice
    gpu: SubgroupSum
    pushed_bytes: float
    fetched_gradient_bytes: float
    staging_slots: int
    gpu_slots: int
    path_gradient_bytes: float
    mean_tiles: float
    mean_segments: float
    nodes: Mapping[int, ByDevice] = field(default_factory=dict)

    @property
    def count_on_cpu(self) -> int:
        """Number of subgroups that the CPU updates."""
        return self.streamed.on_cpu.count + self.host.on_cpu.count

    @property
    def copied_count(self) -> int:
        """Number of subgroups that pass through the GPU's staging slots: updated there, at home elsewhere."""
        return self.streamed.on_gpu.count + self.host.on_gpu.count

    @property
    def copied_bytes(self) -> float:
        """Bytes of state that is copied to the GPU, updated there, and copied back."""
        return self.streamed.on_gpu.nbytes + self.host.on_gpu.nbytes

    @property
    def moved_count(self) -> int:
        """Number of streamed subgroups that a step flushes and fetches: all but those that stay in staging slots."""
        return max(self.streamed.on_cpu.count + self.streamed.on_gpu.count - self.staging_slots, 0)

    @property
    def mean_streamed_bytes(self) -> float:
        """Bytes of state of a mean streamed subgroup."""
        count = self.streamed.on_cpu.count + self.streamed.on_gpu.count
        return (self.streamed.on_cpu.nbytes + self.streamed.on_gpu.nbytes) / count if count else 0.0


def mix_of(plan: Plan) -> Mix:
    """Sum up a plan for `estimate_mix`."""
    subgroups = plan.layout.subgroups

    def sum_of(homes: Sequence[Home | int | None], home: Home | int, placement: Placement) -> SubgroupSum:
        """Add up the subgroups with one home that one device updates.

        `homes` has an entry for each subgroup: `plan.homes`, or `plan.nodes` to add up those of one memory node.
        """
        kinds = zip(homes, plan.placements, subgroups, strict=True)
        sizes = [s.state_bytes for where, device, s in kinds if where == home and device == placement]
        return SubgroupSum(len(sizes), sum(sizes))

    def by_device(homes: Sequence[Home | int | None], home: Home | int) -> ByDevice:
        """Add up the subgroups of one home (or memory node), by the device that updates them."""
        return ByDevice(sum_of(homes, home, Placement.CPU), sum_of(homes, home, Placement.GPU))

    updated_on_cpu = [number for number in range(len(subgroups)) if not plan.updates_on_gpu(number)]
    streamed_tiles = sum(s.tile_count for s in subgroups if not plan.is_resident(s.index))
    segments = sum(len(s.segments) for s in subgroups)
    return Mix(
        streamed=by_device(plan.homes, Home.STREAMED),
        host=by_device(plan.homes, Home.HOST),
        gpu=sum_of(plan.homes, Home.GPU, Placement.GPU),
        pushed_bytes=sum(map(plan.passing_bytes, updated_on_cpu)),
        fetched_gradient_bytes=sum(map(plan.leaving_bytes, updated_on_cpu)),
        staging_slots=plan.staging_slots,
        gpu_slots=plan.gpu_slots,
        path_gradient_bytes=plan.path_gradient_bytes,
        mean_tiles=streamed_tiles / max(plan.homes.count(Home.STREAMED), 1),
        mean_segments=segments / max(len(subgroups), 1),
        nodes={node: by_device(plan.nodes, node) for node in plan.node_bytes},
    )


def in_step(mix: Mix, rates: Rates) -> Rates:
    """Return rates whose link to the GPU has, in each direction, its mean rate over a step.

    The directions have different amounts to copy. Both run beside each other until one has ended; then the other goes
    on alone, and faster.
    """
    to_gpu_bytes = mix.copied_bytes + mix.pushed_bytes
    gpu = rates.gpu.copying(to_gpu_bytes, mix.copied_bytes + mix.fetched_gradient_bytes)
    return rates if gpu is rates.gpu else replace(rates, gpu=gpu)


def estimate(plan: Plan, rates: Rates) -> Estimate:
    """Return the cost of a steady-state step of a plan, by `estimate_mix`."""
    return estimate_mix(mix_of(plan), plan.path_shares(rates), rates)


def estimate_mix(mix: Mix, shares: tuple[float, ...], rates: Rates) -> Estimate:
    """Return the cost of a steady-state step.

    Streamed state is a pipeline. With S streamed subgroups and A staging slots, M = S - A subgroups go out and as
    many come in. A mean subgroup takes u seconds to update (on the GPU: copies included), w to flush, r to fetch. A
    slot goes through update, flush and fetch in turn, and the engine reacts in between. So the first subgroup comes
    back after u + w + r + reactions, and the others every max(r, w, what each device and link needs for one,
    (u + w + r + reactions) / A) seconds. The last one is then updated.

    What differs from that:
      * A path of one bandwidth for both directions needs r + w for one subgroup. But a slot waits for w and r as they
        are alone: with few slots, directions seldom meet.
      * On a path that serves several transfers at once, as many slots are flushed, and fetched, together: they come
        back one update after the other, and the first has waited for nearly all.
      * Resident subgroups fill the waits of the CPU. While they last, a streamed one that comes back has to wait for
        its turn.
      * What passes through the GPU's own slots is a pipeline of the same form.
      * Updates on the CPU slow down while other lanes use the host's memory. How much follows from the part of the
        step in which those are busy, and is found by bisection.

    Args:
        mix: What is updated where.
        shares: The part of all tiles on each path.
        rates: Speed of every lane.
    """
    real_mix = mix
    mix = _on_fastest(real_mix, rates)  # its bytes over the rates are the seconds of the real ones
    rates = in_step(real_mix, rates)
    lanes = _lane_work(mix, shares, rates)
    memory_costs = {
        **{f"{verb}:{n}": path.memory_cost for n, path in enumerate(rates.paths) for verb in ("read", "write")},
        **{lane: cost for lane, (_, cost) in rates.gpu.lanes.items()},
    }
    traffic = {lane: LaneWork(lanes[lane].nbytes * cost, lanes[lane].busy_s) for lane, cost in memory_costs.items()}
    # `_lane_work` leaves out the last copies from the GPU, which go on behind the step. While the CPU still works,
    # they are not behind it: they take memory bandwidth from the CPU like all others. (Without a GPU there are none.)
    outward = mix.copied_bytes + mix.fetched_gradient_bytes
    traffic["d2h"] = LaneWork(outward * rates.gpu.memory_cost, outward / rates.gpu.d2h_bytes_per_s)
    step_s = _slowed_step_s(mix, shares, rates, lanes, _traffic_by_direction(traffic))
    lane_s = {lane: work.busy_s for lane, work in lanes.items()}
    if rates.memory_bytes_per_s != math.inf:
        moved_bytes = sum(lanes[lane].nbytes * cost for lane, cost in memory_costs.items())
        # State on slower nodes is counted as more bytes by `_on_fastest`; the memory moves only the real ones.
        slower_bytes = mix.host.on_cpu.nbytes - real_mix.host.on_cpu.nbytes
        updated_bytes = lanes["cpu"].nbytes - slower_bytes
        lane_s["memory"] = (updated_bytes * UPDATE_MEMORY_COST + moved_bytes) / rates.memory_bytes_per_s
        step_s = max(step_s, lane_s["memory"])
    if rates.operation_s or rates.begin_s or rates.gpu.call_s:
        lane_s["engine"] = rates.begin_s + _engine_s(mix, rates)
        step_s = max(step_s, lane_s["engine"])
    return Estimate(step_s, lane_s)


def _slowed_step_s(
    mix: Mix, shares: tuple[float, ...], rates: Rates, lanes: Mapping[str, LaneWork], traffic: Sequence[LaneWork]
) -> float:
    """Return the seconds of a step whose CPU is slowed down by the other lanes' memory traffic.

    The traffic is spread over the part of the step in which state is on its way (`span_s`). The slower the CPU, the
    longer that part, and the thinner the traffic, which slows the CPU less: one speed fits. Bisection finds it.

    Args:
        mix: What is updated where.
        shares: The part of all tiles on each path.
        rates: Speed of every lane.
        lanes: What each lane does.
        traffic: The memory traffic of these lanes, as `_traffic_by_direction` returns it.
    """
    step_s, span_s = _step_s(mix, shares, rates, lanes, speed=1.0)
    if _mean_speed(rates, traffic, span_s) >= 1:
        return step_s  # nothing slows the CPU down
    slow, fast = LEAST_CPU_SPEED, 1.0
    for _ in range(BISECTIONS):
        speed = (slow + fast) / 2
        step_s, span_s = _step_s(mix, shares, rates, lanes, speed=speed)
        if _mean_speed(rates, traffic, span_s) > speed:
            slow = speed
        else:
            fast = speed
    return step_s


def slower(plan: Plan, rates: Rates) -> dict[tuple[str, int], float]:
    """Return, by lane and subgroup, how many times as long work on the subgroup's home takes as on the fastest node.

    Only homes on a memory node that has rates are in it, so it is empty if there is only one node.
    """
    slowness = rates.slowness(plan.node_bytes)
    factors: dict[tuple[str, int], float] = {}
    for number, node in enumerate(plan.nodes):
        if node in slowness:
            of_node = slowness[node]
            factors |= {("cpu", number): of_node.update}
            factors |= {("h2d", number): of_node.copy, ("d2h", number): of_node.copy}
    return factors


def _on_fastest(mix: Mix, rates: Rates) -> Mix:
    """Return a mix that takes as long with all homes on the fastest memory node as `mix` takes where its state lies.

    State on a slower node counts as more bytes: times the node's slowness, of updates for what the CPU updates and of
    copies for what the GPU updates.
    """
    if not mix.nodes:
        return mix
    slowness = rates.slowness(mix.nodes)
    on_cpu, on_gpu = mix.host  # all nodes' state, at its real size; each node adds what it counts for beyond that
    for node, part in mix.nodes.items():
        of_node = slowness.get(node, Slowness(update=1.0, copy=1.0))  # one without rates counts as the fastest
        on_cpu = SubgroupSum(on_cpu.count, on_cpu.nbytes + part.on_cpu.nbytes * (of_node.update - 1))
        on_gpu = SubgroupSum(on_gpu.count, on_gpu.nbytes + part.on_gpu.nbytes * (of_node.copy - 1))
    return replace(mix, host=ByDevice(on_cpu, on_gpu))


def _traffic_by_direction(traffic: Mapping[str, LaneWork]) -> list[LaneWork]:
    """Return the memory traffic of all reads, of all writes, and of each direction of the link.

    All reads count as one lane, which is busy for as long as the busiest of them; so do all writes. Lanes that are
    never busy are left out.
    """
    groups = [
        [work for lane, work in traffic.items() if lane.startswith(kind) and work.busy_s]
        for kind in ("read", "write", "h2d", "d2h")
    ]
    return [
        LaneWork(sum(work.nbytes for work in group), max(work.busy_s for work in group)) for group in groups if group
    ]


def _mean_speed(rates: Rates, traffic: Sequence[LaneWork], span_s: float) -> float:
    """Return the mean part of its rate that the CPU keeps beside the other lanes' memory traffic.

    Each lane is taken as busy for a part of the time, independently of the others. So each combination of busy lanes
    has a probability, and a traffic per second. The mean is over all combinations.

    Args:
        rates: Speed of every lane.
        traffic: For each lane its bytes of memory traffic, and the seconds, more than 0, in which it is busy.
        span_s: The seconds over which this work is spread.
    """
    combinations = [(1.0, 0.0)]  # probability and traffic per second; at first of the one without any lane
    for nbytes, busy_s in traffic if span_s else ():  # without a span, no lane has anything to do
        busy_part = min(1.0, busy_s / span_s)
        idle_part = 1 - busy_part
        added_demand = nbytes / (busy_part * span_s)
        # Each combination so far becomes two: with this lane idle, and with it busy.
        with_lane = (
            pair
            for probability, demand in combinations
            for pair in ((probability * idle_part, demand), (probability * busy_part, demand + added_demand))
        )
        combinations = [(probability, demand) for probability, demand in with_lane if probability > 0]
    return sum(probability * rates.cpu_speed(demand) for probability, demand in combinations)


def _engine_s(mix: Mix, rates: Rates) -> float:
    """Return the seconds that the engine's thread works in a step: it does one thing after the other.

    Operations, of `rates.operation_s` each:
      * a subgroup updated on the CPU: the update; with weights on a GPU also a push and its awaiting;
      * a subgroup copied to the GPU: two copies and an update; one at home there: an update;
      * a tile that moves: a read and a write.

    Calls of the GPU's runtime, of `rates.gpu.call_s` each, come on top:
      * a copy of state, or an update on the GPU: `CALLS`;
      * a subgroup updated on the CPU: `PASSING_CALLS`, and a copy for each segment, in each direction in which
        weights or gradients pass.
    """
    on_cpu, copied = mix.count_on_cpu, mix.copied_count
    moved = mix.moved_count
    operations_each = 3 if mix.pushed_bytes else 1
    operations = on_cpu * operations_each + 3 * copied + mix.gpu.count + 2 * moved * mix.mean_tiles
    passing = (mix.pushed_bytes > 0) + (mix.fetched_gradient_bytes > 0)  # directions: weights out, gradients in
    calls = CALLS * (3 * copied + mix.gpu.count) + passing * on_cpu * (PASSING_CALLS + mix.mean_segments)
    return operations * rates.operation_s + calls * rates.gpu.call_s


def _lane_work(mix: Mix, shares: tuple[float, ...], rates: Rates) -> dict[str, LaneWork]:
    """Return what each lane does, by name."""
    cpu_bytes = mix.streamed.on_cpu.nbytes + mix.host.on_cpu.nbytes
    lanes = {"cpu": LaneWork(float(cpu_bytes), cpu_bytes / rates.cpu_bytes_per_s)}
    # When the step ends, the last `gpu_slots` subgroups are still on the GPU: their copies out are behind the step.
    count = mix.copied_count
    copied_out = mix.copied_bytes * max(0, count - mix.gpu_slots) / max(count, 1)
    bytes_of = {
        "gpu": mix.copied_bytes + mix.gpu.nbytes,
        "h2d": mix.copied_bytes + mix.pushed_bytes,
        "d2h": copied_out + mix.fetched_gradient_bytes,
    }
    lanes |= {lane: LaneWork(bytes_of[lane], bytes_of[lane] / rate) for lane, (rate, _) in rates.gpu.lanes.items()}
    for number, (share, path) in enumerate(zip(shares, rates.paths, strict=True)):
        lanes |= _path_work(mix, number, share, path)
    return lanes


def _path_work(mix: Mix, number: int, share: float, path: PathRates) -> dict[str, LaneWork]:
    """Return what the lanes of path `number` do in a step; the path has this share of all tiles.

    Reads and writes count at the rates that each has alone, so these are lower bounds. If they hinder each other, a
    lane "path:<n>" has the time of both at once.
    """
    moved = mix.moved_count
    state_bytes = moved * mix.mean_streamed_bytes * share
    latency_s = moved * mix.mean_tiles * share * path.latency_s
    gradient_bytes = mix.path_gradient_bytes * share
    gradients_s = gradient_bytes / path.read.alone
    read_s = latency_s + state_bytes / path.read.alone + gradients_s
    write_s = latency_s + state_bytes / path.write.alone
    lanes = {
        f"read:{number}": LaneWork(state_bytes + gradient_bytes, read_s),
        f"write:{number}": LaneWork(state_bytes, write_s),
    }
    if path.is_half_duplex:
        both_s = latency_s + state_bytes / path.each_way_bytes_per_s + gradients_s
        lanes[f"path:{number}"] = LaneWork(2 * state_bytes + gradient_bytes, both_s)
    return lanes


class _GpuSeconds(NamedTuple):
    """Seconds that the GPU's lanes take to copy state in, update it and copy it out; of a byte or of a subgroup."""

    in_s: float
    update_s: float
    out_s: float

    @property
    def chain_s(self) -> float:
        """Seconds of all three, one after the other."""
        return self.in_s + self.update_s + self.out_s

    def times(self, nbytes: float) -> _GpuSeconds:
        """Return the seconds of so many bytes."""
        return _GpuSeconds(nbytes * self.in_s, nbytes * self.update_s, nbytes * self.out_s)


def _step_s(
    mix: Mix, shares: tuple[float, ...], rates: Rates, lanes: Mapping[str, LaneWork], speed: float
) -> tuple[float, float]:
    """Return the seconds of a step, and of the part of it in which state is on its way (`span_s`).

    Three chains of work run beside each other, and the longest one ends the step: all updates of the CPU; streamed
    state through the staging slots (`_pipeline_s`); and the GPU (`_gpu_s`).

    Args:
        mix: What is updated where.
        shares: The part of all tiles on each path.
        rates: Speed of every lane.
        lanes: What each lane does.
        speed: Part of its own rate that the CPU's update keeps while state is on its way.
    """
    gpu = rates.gpu
    per_byte = _GpuSeconds(1 / gpu.h2d_bytes_per_s, 1 / gpu.update_bytes_per_s, 1 / gpu.d2h_bytes_per_s)
    cpu_s_per_byte = 1 / (rates.cpu_bytes_per_s * speed)
    on_cpu = mix.count_on_cpu
    push_s = mix.pushed_bytes / on_cpu * per_byte.in_s if on_cpu else 0.0  # of one subgroup's weights
    fetch_s = mix.fetched_gradient_bytes / on_cpu * per_byte.out_s if on_cpu else 0.0  # of one subgroup's gradients
    gpu_s = _gpu_s(mix, per_byte, push_s, fetch_s, rates.reaction_s)
    pipeline_s = last_s = 0.0
    moved = mix.moved_count
    if moved:
        turn = _turn(mix, rates, lanes, per_byte, cpu_s_per_byte)
        pipeline_s = _pipeline_s(mix, shares, rates, lanes, turn)
        # The last one is fetched, and then updated.
        last_on_cpu_s = turn.update_s + push_s if turn.gpu_part < 1 else 0.0
        last_on_gpu_s = mix.mean_streamed_bytes * (per_byte.in_s + per_byte.update_s) if turn.gpu_part > 0 else 0.0
        last_s = max(last_on_cpu_s, last_on_gpu_s)
    elif mix.path_gradient_bytes:  # no state is read, but gradients are
        pipeline_s = max(work.busy_s for lane, work in lanes.items() if lane.startswith("read"))
    span_s = max(pipeline_s, gpu_s)
    cpu_s = lanes["cpu"].nbytes * cpu_s_per_byte
    if cpu_s > span_s:  # the CPU does the rest at its full speed, as no other lane works any more
        cpu_s = span_s + (cpu_s - span_s) * speed
    # The CPU begins with the first gradients, and the weights of its last update are pushed behind it.
    ends_s = max(fetch_s + cpu_s + push_s, pipeline_s + last_s, gpu_s)
    # Reactions: of the engine to the step's request, and of the caller to its end.
    return ends_s + 2 * rates.reaction_s + rates.begin_s, span_s


@dataclass(frozen=True, slots=True)
class _Turn:
    """Seconds of the turn of a mean streamed subgroup: it is updated and flushed, and another is fetched to its slot.

    Attributes:
        gpu_part: The part of streamed subgroups that the GPU updates.
        update_s: An update on the CPU.
        chain_s: A copy to the GPU, an update there and a copy back.
        busiest_s: What the busiest of CPU, GPU and the link's directions needs for one subgroup, on average over
            those that the CPU and those that the GPU updates.
        read_s: Its reads, on the path where these take longest.
        write_s: Its writes, on the path where these take longest.
        engine_s: What the engine adds: its reactions, and its thread's starts of operations.
    """

    gpu_part: float
    update_s: float
    chain_s: float
    busiest_s: float
    read_s: float
    write_s: float
    engine_s: float

    @property
    def worked_s(self) -> float:
        """The mean time of its update, on the CPU or on the GPU with the copies."""
        return (1 - self.gpu_part) * self.update_s + self.gpu_part * self.chain_s

    @property
    def away_s(self) -> float:
        """The time from the end of an update in a slot until that slot's next subgroup has been fetched."""
        return self.write_s + self.read_s + self.engine_s


def _turn(
    mix: Mix, rates: Rates, lanes: Mapping[str, LaneWork], per_byte: _GpuSeconds, cpu_s_per_byte: float
) -> _Turn:
    """Return what the turn of a mean streamed subgroup takes. A step must move at least one.

    Args:
        mix: What is updated where.
        rates: Speed of every lane.
        lanes: What each lane does.
        per_byte: Seconds that the GPU's lanes take for a byte of state.
        cpu_s_per_byte: Seconds that the CPU's update takes for a byte of state.
    """
    moved = mix.moved_count
    paths = range(len(rates.paths))
    read_s = max(lanes[f"read:{number}"].busy_s for number in paths) / moved
    write_s = max(lanes[f"write:{number}"].busy_s for number in paths) / moved
    gpu_part = mix.streamed.on_gpu.count / (mix.streamed.on_cpu.count + mix.streamed.on_gpu.count)
    update_s = mix.mean_streamed_bytes * cpu_s_per_byte
    busiest_s = max((1 - gpu_part) * update_s, gpu_part * mix.mean_streamed_bytes * max(per_byte))
    # Three reactions (to the ends of update, flush and fetch), and the start of the update. Flush and fetch start
    # n = `tiles` operations each, s = `start_s` apart, while earlier ones are on their way; all take io_s. They end
    # io_s after the first start (at s), or io_s / n after the last start (at n s), whichever is later. What exceeds
    # io_s is added: max(s, n s + io_s / n - io_s).
    tiles = max(mix.mean_tiles, 1.0)
    start_s = rates.operation_s  # of one operation
    engine_s = 3 * rates.reaction_s + start_s
    engine_s += sum(max(start_s, tiles * start_s - io_s * (1 - 1 / tiles)) for io_s in (write_s, read_s))
    return _Turn(gpu_part, update_s, mix.mean_streamed_bytes * per_byte.chain_s, busiest_s, read_s, write_s, engine_s)


def _pipeline_s(
    mix: Mix, shares: tuple[float, ...], rates: Rates, lanes: Mapping[str, LaneWork], turn: _Turn
) -> float:
    """Return the seconds from a step's begin until its last streamed subgroup has been fetched.

    The first one comes back after a whole round, and the others every `every_s` after it. Those that move together
    with the first come back as fast as they are updated. `estimate_mix` has the model.
    """
    moved = mix.moved_count
    round_s, together = _round(mix, shares, rates, lanes, turn)
    # What the busiest path needs for one subgroup, and how long one passes through a slot on the GPU, on average.
    path_s = max(work.busy_s for lane, work in lanes.items() if lane.startswith(PATH_LANES)) / moved
    gpu_round_s = turn.gpu_part * (turn.chain_s + rates.reaction_s)
    every_s = max(path_s, turn.busiest_s, gpu_round_s / max(mix.gpu_slots, 1), round_s / mix.staging_slots)
    hindrance_s = _hindrance_s(mix, rates, turn, round_s, every_s)
    return round_s + (moved - together) * every_s + (together - 1) * turn.busiest_s + hindrance_s


def _round(
    mix: Mix, shares: tuple[float, ...], rates: Rates, lanes: Mapping[str, LaneWork], turn: _Turn
) -> tuple[float, float]:
    """Return the seconds until a slot is updated again, and how many subgroups move together meanwhile.

    Usually that is the time of an update, and the time that the slot is away. But a path that serves n subgroups at
    once takes n times as long for each of them. From that is subtracted the time in which the n - 1 others are still
    being updated (at the begin), or are updated again already (at the end): (n - 1) `busiest_s` each. The longest of
    all these counts.
    """
    moved = mix.moved_count
    round_s, together = turn.worked_s + turn.away_s, 1.0
    for number, (share, path) in enumerate(zip(shares, rates.paths, strict=True)):
        tiles = max(mix.mean_tiles * share, 1.0)  # of a mean subgroup, on this path
        count = max(1.0, min(path.at_once / tiles, mix.staging_slots, moved))  # subgroups that it serves at once
        io_s = (lanes[f"read:{number}"].busy_s + lanes[f"write:{number}"].busy_s) / moved
        shared_s = turn.worked_s + count * io_s - 2 * (count - 1) * turn.busiest_s + turn.engine_s
        if shared_s > round_s:
            round_s, together = shared_s, count
    return round_s, together


def _hindrance_s(mix: Mix, rates: Rates, turn: _Turn, round_s: float, every_s: float) -> float:
    """Return the seconds by which updates of resident subgroups delay the streamed ones, summed over a step.

    A streamed subgroup that comes back finds its device at work on a resident one, with others handed over already,
    and waits for these. On the CPU it waits for the update under way and the one behind it; on the GPU for as many
    copies as there are slots. This lasts until all resident subgroups are updated.

    Args:
        mix: What is updated where.
        rates: Speed of every lane.
        turn: The turn of a mean streamed subgroup.
        round_s: Seconds until a slot is updated again, without waits.
        every_s: Seconds from one streamed subgroup that comes back to the next, without waits.
    """
    moved = mix.moved_count

    def of_device(part: float, wait_s: float, each_s: float, resident_bytes: float) -> float:
        """Return the delay by one device, which updates `part` of the streamed subgroups, each for `each_s`.

        A streamed one that comes back waits for `wait_s`, as long as any of `resident_bytes` are left.
        """
        # As `every_s`, with the waits. In between, the device has `spare_s` for resident subgroups.
        hindered_s = max(every_s, (round_s + part * wait_s) / mix.staging_slots)
        spare_s = hindered_s - part * each_s
        if not part or spare_s <= 0:  # it updates no streamed ones, or has no time for resident ones
            return 0.0
        # Turns until no resident subgroup is left: the seconds of their updates over those spared in each turn.
        turns = int(resident_bytes / mix.mean_streamed_bytes * each_s / spare_s)
        return min(moved, turns) * (hindered_s - every_s)

    # From when a slot goes away until the CPU is free for its next subgroup: whole updates, up to the end of the one
    # that is under way at the slot's return, and then of the one handed over.
    free_s = (math.ceil(turn.away_s / turn.update_s) + 1) * turn.update_s
    on_cpu_s = of_device(
        part=1 - turn.gpu_part,
        wait_s=free_s - turn.away_s,
        each_s=turn.update_s,
        resident_bytes=mix.host.on_cpu.nbytes,
    )
    # Of one subgroup on the slowest of the GPU's lanes; 0 without a GPU.
    copy_s = mix.mean_streamed_bytes * max((1 / rate for rate, _ in rates.gpu.lanes.values()), default=0.0)
    on_gpu_s = of_device(
        part=turn.gpu_part, wait_s=mix.gpu_slots * copy_s, each_s=copy_s, resident_bytes=mix.host.on_gpu.nbytes
    )
    return on_cpu_s + on_gpu_s


def _gpu_s(mix: Mix, per_byte: _GpuSeconds, push_s: float, fetch_s: float, reaction_s: float) -> float:
    """Return the seconds until the last update on the GPU and the last copy to it have ended.

    What passes through the GPU's slots is copied in, updated and copied out, all of that enqueued at once. The last
    copies out end behind the step. The longest of four bounds counts: copies in, with an update behind the last;
    updates, behind the first copy in; copies out, for those that wait for a slot; and the slots, each of which takes
    one subgroup after the other.

    Args:
        mix: What is updated where.
        per_byte: Seconds that the GPU's lanes take for a byte of state.
        push_s: Seconds to push one subgroup's weights to the GPU.
        fetch_s: Seconds to fetch one subgroup's gradients from it.
        reaction_s: Seconds that the engine takes to react, before a slot takes its next subgroup.
    """
    at_home_s = mix.gpu.nbytes * per_byte.update_s
    pushes_s = push_s * mix.count_on_cpu
    fetches_s = fetch_s * mix.count_on_cpu
    count = mix.copied_count
    if not count:
        return max(at_home_s, pushes_s, fetches_s)
    each = per_byte.times(mix.copied_bytes / count)
    first_s = each.in_s + each.update_s
    waiting = max(0, count - mix.gpu_slots)  # number of those that have to wait for a slot
    copies_out_s = first_s + waiting * each.out_s + fetches_s if waiting else 0.0
    # All but the last subgroup: whole rounds of all slots, and the others, which come one after the other.
    rounds, others = divmod(count - 1, mix.gpu_slots)
    slots_s = rounds * (each.chain_s + reaction_s) + others * max(each.in_s, each.update_s)
    return max(
        count * each.in_s + pushes_s + each.update_s,
        each.in_s + count * each.update_s + at_home_s,
        # Behind the copies out, and behind the slots' work, the last subgroup is copied in and updated.
        copies_out_s + each.in_s + each.update_s,
        slots_s + each.in_s + each.update_s,
    )
