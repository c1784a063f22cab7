"""The time of a step in closed form: cheap enough to search plans with.

Each lane's bytes over its rate, and the pipeline's filling and draining. `offload.predict.predict` runs the step
instead; a test bounds how far the two are apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.plan.budget import Home, Placement, Plan
from offload.plan.rates import LEAST_CPU_SPEED, UPDATE_MEMORY_COST, Rates

BISECTIONS = 7

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
        lane_s: For each lane its bytes over its rate, its operations' latencies included (of a path's directions,
            the rate alone); for "path:<n>", where its directions hinder each other, what both take at once; for
            "memory", the traffic of all lanes over the host's bandwidth; for "engine", where its costs are known,
            the work of the engine's thread. No order of the same operations can be faster than the longest.
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


@dataclass(frozen=True, slots=True)
class Mix:
    """What matters of a plan: how many subgroups, and how many bytes, of each kind.

    Attributes:
        streamed: Parts of the streamed state, (updated on the CPU, updated on the GPU).
        host: Parts of the state at home in host memory, likewise.
        gpu: State at home on the GPU.
        pushed_bytes: New weights of what the CPU updates, pushed to the GPU.
        fetched_gradient_bytes: Gradients of what the CPU updates, and fp32 weights, fetched from the GPU in the step.
        slots: Staging slots in host memory.
        gpu_slots: Staging slots on the GPU.
        left_bytes: Gradients that are read from the paths in the step.
        tiles: Tiles of a mean streamed subgroup.
        segments: Segments of a mean subgroup.
        nodes: Parts of what `host` has, likewise, by the memory node of their homes; empty where that is of one kind.
    """

    streamed: tuple[SubgroupSum, SubgroupSum]
    host: tuple[SubgroupSum, SubgroupSum]
    gpu: SubgroupSum
    pushed_bytes: float
    fetched_gradient_bytes: float
    slots: int
    gpu_slots: int
    left_bytes: float
    tiles: float
    segments: float
    nodes: Mapping[int, tuple[SubgroupSum, SubgroupSum]] = field(default_factory=dict)


def mix_of(plan: Plan) -> Mix:
    """Return what `estimate` needs to know of a plan."""
    subgroups = plan.layout.subgroups

    def part(home: Home | int, placement: Placement, homes: Sequence[Home | int | None] = plan.homes) -> SubgroupSum:
        kinds = zip(homes, plan.placements, subgroups, strict=True)
        sizes = [s.state_bytes for where, device, s in kinds if where == home and device == placement]
        return SubgroupSum(len(sizes), sum(sizes))

    (_, gpu), host, streamed = ((part(home, Placement.CPU), part(home, Placement.GPU)) for home in Home)
    on_cpu = [number for number in range(len(subgroups)) if not plan.updates_on_gpu(number)]
    pushed_bytes, brought_bytes = sum(map(plan.passing_bytes, on_cpu)), sum(map(plan.leaving_bytes, on_cpu))
    tiles = sum(s.tile_count for s in subgroups if not plan.is_resident(s.index))
    mean_tiles = tiles / max(plan.homes.count(Home.STREAMED), 1)
    segments = sum(len(s.segments) for s in subgroups) / max(len(subgroups), 1)
    slots = plan.staging_slots, plan.gpu_slots
    left_bytes = plan.path_gradient_bytes
    nodes = {n: (part(n, Placement.CPU, plan.nodes), part(n, Placement.GPU, plan.nodes)) for n in plan.node_bytes}
    return Mix(streamed, host, gpu, pushed_bytes, brought_bytes, *slots, left_bytes, mean_tiles, segments, nodes)


def in_step(mix: Mix, rates: Rates) -> Rates:
    """Return rates by which the link to the GPU works in a step: each direction beside the other, or alone."""
    copied = mix.streamed[1].nbytes + mix.host[1].nbytes
    gpu = rates.gpu.copying(copied + mix.pushed_bytes, copied + mix.fetched_gradient_bytes)
    return rates if gpu is rates.gpu else replace(rates, gpu=gpu)


def estimate(plan: Plan, rates: Rates) -> Estimate:
    """Return the cost of a steady-state step of a plan, by `estimate_mix`."""
    return estimate_mix(mix_of(plan), plan.path_shares(rates), rates)


def estimate_mix(mix: Mix, shares: tuple[float, ...], rates: Rates) -> Estimate:
    """Return the cost of a steady-state step.

    With S streamed subgroups and A staging slots, M = S - A subgroups go out and as many come in. A mean subgroup
    takes u seconds to update (on the GPU: copies included), w to flush, r to fetch. A slot goes through update,
    flush and fetch in turn, the engine reacting in between, so subgroups come back every max(r, w, what each device
    and link needs for one, (u + w + r + reactions) / A) seconds, after the first has gone all the way; the last one
    is then updated. A path of one bandwidth for both directions needs r + w for one; a slot waits for w and r as they
    are alone: with few slots, directions seldom meet. On a path that serves several transfers at once, as many slots
    are flushed, and fetched, together: they come back one update after the other, and the first has waited for nearly
    all. Resident subgroups fill the waits of the CPU; while they last, one that comes back has to wait its turn. What
    passes through the GPU's own slots is a pipeline of the same form.

    Updates on the CPU slow down while other lanes use the host's memory: how much follows from the part of the step
    in which those are busy, which is found by bisection.

    Args:
        mix: What is updated where.
        shares: The part of all tiles on each path.
        rates: Speed of every lane.
    """
    slower_bytes = -mix.host[0].nbytes
    mix, rates = _on_fastest(mix, rates), in_step(mix, rates)
    slower_bytes += mix.host[0].nbytes
    lanes = _lanes(mix, shares, rates)
    costs = {
        **{f"{verb}:{n}": path.memory_cost for n, path in enumerate(rates.paths) for verb in ("read", "write")},
        **{lane: cost for lane, (_, cost) in rates.gpu.lanes.items()},
    }
    traffic = {lane: (lanes[lane][0] * cost, lanes[lane][1]) for lane, cost in costs.items()}
    # While the CPU still works, the last copies out are not behind the step.
    copied = mix.streamed[1].nbytes + mix.host[1].nbytes + mix.fetched_gradient_bytes
    traffic["d2h"] = copied * rates.gpu.memory_cost, copied / rates.gpu.d2h_bytes_per_s
    beside = _beside(traffic)
    step_s, span_s = _step_s(mix, shares, rates, lanes, 1.0)
    if _mean_speed(rates, beside, span_s) < 1:
        # The slower the updates, the longer the step, and the thinner the other traffic: one speed fits.
        slow, fast = LEAST_CPU_SPEED, 1.0
        for _ in range(BISECTIONS):
            speed = (slow + fast) / 2
            step_s, span_s = _step_s(mix, shares, rates, lanes, speed)
            slow, fast = (speed, fast) if _mean_speed(rates, beside, span_s) > speed else (slow, speed)
    lane_s = {lane: seconds for lane, (_, seconds) in lanes.items()}
    if rates.memory_bytes_per_s != math.inf:
        moved_bytes = sum(lanes[lane][0] * cost for lane, cost in costs.items())
        updated_bytes = lanes["cpu"][0] - slower_bytes
        lane_s["memory"] = (updated_bytes * UPDATE_MEMORY_COST + moved_bytes) / rates.memory_bytes_per_s
        step_s = max(step_s, lane_s["memory"])
    if rates.operation_s or rates.begin_s or rates.gpu.call_s:
        lane_s["engine"] = rates.begin_s + _engine_s(mix, rates)
        step_s = max(step_s, lane_s["engine"])
    return Estimate(step_s, lane_s)


def slower(plan: Plan, rates: Rates) -> dict[tuple[str, int], float]:
    """Return how many times as long as on the fastest memory node work on homes takes, by lane and subgroup."""
    slowness = rates.slowness(plan.node_bytes)
    found: dict[tuple[str, int], float] = {}
    for number, node in enumerate(plan.nodes):
        if node in slowness:
            update, copy = slowness[node]
            found |= {("cpu", number): update, ("h2d", number): copy, ("d2h", number): copy}
    return found


def _on_fastest(mix: Mix, rates: Rates) -> Mix:
    """Return a mix of so many bytes on the fastest memory node as take the time of those that lie on slower ones."""
    slowness, host = rates.slowness(mix.nodes), list(mix.host)
    for node, parts in mix.nodes.items():
        for n, (part, times) in enumerate(zip(parts, slowness.get(node, (1.0, 1.0)), strict=True)):
            host[n] = SubgroupSum(host[n].count, host[n].nbytes + part.nbytes * (times - 1))
    return replace(mix, host=(host[0], host[1])) if mix.nodes else mix


def _beside(traffic: Mapping[str, tuple[float, float]]) -> list[tuple[float, float]]:
    """Return memory traffic in bytes, and busy seconds, of all reads, of all writes and of each way of the link."""
    groups = [[each for lane, each in traffic.items() if lane.startswith(v)] for v in ("read", "write", "h2d", "d2h")]
    busy = [[(nbytes, busy_s) for nbytes, busy_s in group if busy_s] for group in groups]
    return [(sum(nbytes for nbytes, _ in group), max(busy_s for _, busy_s in group)) for group in busy if group]


def _mean_speed(rates: Rates, beside: Sequence[tuple[float, float]], span_s: float) -> float:
    """Return the mean part of its rate that the CPU keeps while other lanes come and go, each for itself.

    Args:
        rates: Speed of every lane.
        beside: Their bytes of memory traffic and the seconds in which they are busy.
        span_s: The time that all this takes.
    """
    states = [(1.0, 0.0)]  # probability and traffic per second
    for nbytes, busy_s in beside if span_s else ():
        active = min(1.0, busy_s / span_s)
        demand, rest = nbytes / (active * span_s), 1 - active
        states = [state for p, d in states for state in ((p * rest, d), (p * active, d + demand)) if state[0] > 0]
    return sum(p * rates.cpu_speed(d) for p, d in states)


def _engine_s(mix: Mix, rates: Rates) -> float:
    """Return what the engine's thread does in a step, which is one thing after the other."""
    on_cpu, copied = (mix.streamed[n].count + mix.host[n].count for n in (0, 1))
    moved, _ = _moved(mix)
    operations = on_cpu * (3 if mix.pushed_bytes else 1) + 3 * copied + mix.gpu.count + 2 * moved * mix.tiles
    passing = (mix.pushed_bytes > 0) + (mix.fetched_gradient_bytes > 0)
    calls = CALLS * (3 * copied + mix.gpu.count) + passing * on_cpu * (PASSING_CALLS + mix.segments)
    return operations * rates.operation_s + calls * rates.gpu.call_s


def _moved(mix: Mix) -> tuple[int, float]:
    """Return how many subgroups a step flushes and fetches, and the bytes of a mean one."""
    count = mix.streamed[0].count + mix.streamed[1].count
    nbytes = mix.streamed[0].nbytes + mix.streamed[1].nbytes
    return max(count - mix.slots, 0), nbytes / count if count else 0.0


def _lanes(mix: Mix, shares: tuple[float, ...], rates: Rates) -> dict[str, tuple[float, float]]:
    """Return each lane's bytes and seconds."""
    on_cpu = mix.streamed[0].nbytes + mix.host[0].nbytes
    copied = mix.streamed[1].nbytes + mix.host[1].nbytes
    lanes = {"cpu": (float(on_cpu), on_cpu / rates.cpu_bytes_per_s)}
    # The last ones are copied out behind the step.
    count = mix.streamed[1].count + mix.host[1].count
    outward = copied * max(0, count - mix.gpu_slots) / max(count, 1) + mix.fetched_gradient_bytes
    on_gpu = {"gpu": copied + mix.gpu.nbytes, "h2d": copied + mix.pushed_bytes, "d2h": outward}
    lanes |= {lane: (on_gpu[lane], on_gpu[lane] / rate) for lane, (rate, _) in rates.gpu.lanes.items()}
    moved, mean_bytes = _moved(mix)
    for number, (share, path) in enumerate(zip(shares, rates.paths, strict=True)):
        nbytes, latency_s = moved * mean_bytes * share, moved * mix.tiles * share * path.latency_s
        left_bytes = mix.left_bytes * share
        left_s = left_bytes / path.read.alone
        lanes[f"read:{number}"] = nbytes + left_bytes, latency_s + nbytes / path.read.alone + left_s
        lanes[f"write:{number}"] = nbytes, latency_s + nbytes / path.write.alone
        if path.is_half_duplex:
            both_s = latency_s + nbytes / path.each_way_bytes_per_s + left_s
            lanes[f"path:{number}"] = 2 * nbytes + left_bytes, both_s
    return lanes


def _step_s(
    mix: Mix, shares: tuple[float, ...], rates: Rates, lanes: dict[str, tuple[float, float]], speed: float
) -> tuple[float, float]:
    """Return the seconds of a step, and of the part of it in which state is on its way.

    Args:
        speed: Part of its own rate that the CPU's update keeps meanwhile.
    """
    gpu, cpu_s_per_byte = rates.gpu, 1 / (rates.cpu_bytes_per_s * speed)
    in_s, up_s, out_s = 1 / gpu.h2d_bytes_per_s, 1 / gpu.update_bytes_per_s, 1 / gpu.d2h_bytes_per_s
    on_cpu = mix.streamed[0].count + mix.host[0].count
    push_s = mix.pushed_bytes / on_cpu * in_s if on_cpu else 0.0
    bring_s = mix.fetched_gradient_bytes / on_cpu * out_s if on_cpu else 0.0
    gpu_s = _gpu_s(mix, in_s, up_s, out_s, push_s, bring_s, rates.reaction_s)
    moved, mean_bytes = _moved(mix)
    pipeline_s = last_s = 0.0
    if moved:
        streamed = mix.streamed[0].count + mix.streamed[1].count
        read_s = max(lanes[f"read:{number}"][1] for number in range(len(shares))) / moved
        write_s = max(lanes[f"write:{number}"][1] for number in range(len(shares))) / moved
        path_s = max(seconds for lane, (_, seconds) in lanes.items() if lane.startswith(PATH_LANES)) / moved
        on_gpu = mix.streamed[1].count / streamed
        update_s = mean_bytes * cpu_s_per_byte
        chain_s = mean_bytes * (in_s + up_s + out_s)
        last_s = max((on_gpu < 1) * (update_s + push_s), (on_gpu > 0) * mean_bytes * (in_s + up_s))
        # The engine's thread starts tile after tile, and the first is on its way meanwhile.
        starts_s, tiles = rates.operation_s, max(mix.tiles, 1.0)
        engine_s = 3 * rates.reaction_s + starts_s
        engine_s += sum(max(starts_s, tiles * starts_s - s * (1 - 1 / tiles)) for s in (write_s, read_s))
        away_s = write_s + read_s + engine_s
        worked_s = (1 - on_gpu) * update_s + on_gpu * chain_s
        work_s = max((1 - on_gpu) * update_s, on_gpu * mean_bytes * max(up_s, in_s, out_s))
        round_s, together = worked_s + away_s, 1.0
        for number, (share, path) in enumerate(zip(shares, rates.paths, strict=True)):
            so_many = max(1.0, min(path.at_once / max(mix.tiles * share, 1.0), mix.slots, moved))
            moved_s = (lanes[f"read:{number}"][1] + lanes[f"write:{number}"][1]) / moved
            so_s = worked_s + so_many * moved_s - 2 * (so_many - 1) * work_s + engine_s
            if so_s > round_s:
                round_s, together = so_s, so_many
        every_s = max(
            path_s,
            work_s,
            on_gpu * (chain_s + rates.reaction_s) / max(mix.gpu_slots, 1),
            round_s / mix.slots,
        )
        # While resident subgroups last, one that comes back finds the device at work on one and others handed over.
        copy_s = mean_bytes * max((1 / rate for rate, _ in rates.gpu.lanes.values()), default=0.0)
        behind = (
            (1 - on_gpu, (math.ceil(away_s / update_s) + 1) * update_s - away_s, update_s, mix.host[0].nbytes),
            (on_gpu, mix.gpu_slots * copy_s, copy_s, mix.host[1].nbytes),
        )
        hindrance_s = 0.0
        for part, wait_s, each_s, resident_bytes in behind:
            hindered_s = max(every_s, (round_s + part * wait_s) / mix.slots)
            spare_s = hindered_s - part * each_s
            if part and spare_s > 0:
                lasts = resident_bytes / mean_bytes * each_s / spare_s
                hindrance_s += min(moved, int(lasts)) * (hindered_s - every_s)
        pipeline_s = round_s + (moved - together) * every_s + (together - 1) * work_s + hindrance_s
    elif mix.left_bytes:
        pipeline_s = max(seconds for lane, (_, seconds) in lanes.items() if lane.startswith("read"))
    # What the CPU has not done by then, it does at its full speed.
    span_s = max(pipeline_s, gpu_s)
    cpu_s = lanes["cpu"][0] * cpu_s_per_byte
    if cpu_s > span_s:
        cpu_s = span_s + (cpu_s - span_s) * speed
    ends_s = max(bring_s + cpu_s + push_s, pipeline_s + last_s, gpu_s)
    return ends_s + 2 * rates.reaction_s + rates.begin_s, span_s


def _gpu_s(
    mix: Mix, in_s: float, up_s: float, out_s: float, push_s: float, bring_s: float, reaction_s: float
) -> float:
    """Return when the last update on the GPU has ended, and the last copy to it.

    What passes through its slots is copied in, updated and copied out, all of that enqueued at once; the last copies
    out end behind the step.
    """
    count = mix.host[1].count + mix.streamed[1].count
    total_s = mix.gpu.nbytes * up_s
    pushes_s, brings_s = (each_s * (mix.host[0].count + mix.streamed[0].count) for each_s in (push_s, bring_s))
    if not count:
        return max(total_s, pushes_s, brings_s)
    mean_bytes = (mix.host[1].nbytes + mix.streamed[1].nbytes) / count
    in_s, up_s, out_s = mean_bytes * in_s, mean_bytes * up_s, mean_bytes * out_s
    again = max(0, count - mix.gpu_slots)  # that have to wait for a slot
    turns, rest = divmod(count - 1, mix.gpu_slots)
    return max(
        count * in_s + pushes_s + up_s,
        in_s + count * up_s + total_s,
        (again > 0) * (in_s + up_s + again * out_s + brings_s) + in_s + up_s,
        turns * (in_s + up_s + out_s + reaction_s) + rest * max(in_s, up_s) + in_s + up_s,
    )
