"""Choosing a plan by its predicted step: what the GPU updates, and how many staging slots there are; order of visits.

Homes follow from the budgets (`make_plan`): state is in the fastest tier with room. The rest is searched with the
closed-form cost (`offload.plan.cost`); if there are several memory nodes, so is the number of homes on each.
Deterministic. Candidates include all updates on the CPU, the fixed strides, and all nodes filled with the fastest
first: the plan is never predicted to be slower than one of these.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from offload.errors import ConfigError, InfeasiblePlanError
from offload.layout import Layout
from offload.plan.budget import (
    DEFAULT_STAGING_SLOTS,
    GPU_STAGING_SLOTS,
    Budgets,
    Home,
    NodeBudget,
    Placement,
    Plan,
    count_staging_slots,
    make_plan,
)
from offload.plan.cost import ByDevice, Mix, SubgroupSum, estimate_mix, mix_of
from offload.plan.rates import Rates

STAGING_SLOTS = (DEFAULT_STAGING_SLOTS, 6, 8, 12)
"""Numbers of staging slots that are tried if the budget has no `staging_bytes`."""

WORTH_A_SLOT = 0.01
"""Part of the time that more staging slots have to save; also those on the GPU, if they are borrowed: forward gets
that memory back only when the last copies from it have ended."""

WORTH_THE_GPU = 0.0005
"""Part of the time that updates on the GPU have to save."""

COARSE_SHARES = 16
"""Number of shares of GPU updates in the first search; then finer ones near the best are tried."""

COARSE_NODE_SHARES = 4
"""Number of shares of each memory node in the first search, each with as many shares of GPU updates."""

WORTH_UNUSED_BYTES = 0.01
"""Part of the time that leaving memory of a node unused has to save."""

EVERY_STRIDE = 64
"""All strides up to this one are tried."""

STRIDE = "stride:"
"""Prefix of the placement with the fixed stride of Deep Optimizer States (Middleware '24, arXiv 2410.21316):
"stride:3" updates subgroups 2, 5, 8, ... on the GPU."""


def choose_plan(
    layout: Layout, budgets: Budgets, rates: Rates, placement: str | float = "auto", *, kept: Plan | None = None
) -> Plan:
    """Return the plan with the shortest predicted step.

    Args:
        layout: What is to be placed.
        budgets: What each tier offers.
        rates: Speed of every lane; one entry for each path.
        placement: Which subgroups that are not at home on the GPU are updated there: "auto" for the fastest choice,
            "cpu" for none, "gpu" for all, a share from 0 to 1, or "stride:<k>" for every k-th one.
        kept: A plan for the first subgroups of `layout`, whose homes stay as they are.

    Raises:
        ConfigError: If `placement` is none of these, or needs a GPU whose rates are missing, or `rates` lacks a path
            or a memory node.
        InfeasiblePlanError: If the state does not fit, or the GPU's staging memory does not hold one subgroup that
            `placement` has updated there.
    """
    _check_placement(placement)
    if len(rates.paths) != len(budgets.paths):
        raise ConfigError("rates.paths", len(rates.paths), f"give one entry for each of {len(budgets.paths)} paths")
    if budgets.gpu_bytes or budgets.weights_on_gpu or placement not in ("auto", "cpu", 0):
        rates.gpu.check_used(planned=True)
    budgets = fastest_nodes_first(budgets, rates)
    node_bytes = budgets.nodes if kept is not None else _choose_node_bytes(layout, budgets, rates, placement)
    try:
        return _plan_with_node_bytes(layout, budgets, rates, placement, kept, node_bytes)
    except InfeasiblePlanError:
        if node_bytes is budgets.nodes:
            raise
        # With so little of the nodes, more is streamed than fits the paths: use all their memory instead.
        return _plan_with_node_bytes(layout, budgets, rates, placement, kept, budgets.nodes)


def extend_plan(before: Plan, layout: Layout, budgets: Budgets, rates: Rates, placement: str | float) -> Plan:
    """Return a plan like `choose_plan`'s for a layout with more subgroups: the others keep homes and placements.

    Their placements must stay, since memory for gradients was given out by them.
    """
    fresh = choose_plan(layout, budgets, rates, placement, kept=before)  # may place the others anew
    placements = (*before.placements, *fresh.placements[len(before.placements) :])
    gpu_slots = max(GPU_STAGING_SLOTS, before.gpu_slots, fresh.gpu_slots)
    return make_plan(layout, budgets, kept=before, placements=placements, gpu_slots=gpu_slots)


def fastest_nodes_first(budgets: Budgets, rates: Rates) -> Budgets:
    """Return budgets with memory nodes sorted by their rates, the fastest first.

    Raises:
        ConfigError: If one has no rates.
    """
    known = dict(budgets.nodes)
    nodes = tuple(NodeBudget(node, known[node]) for node in rates.fastest_first(known))
    return replace(budgets, nodes=nodes) if nodes else budgets


def _choose_node_bytes(
    layout: Layout, budgets: Budgets, rates: Rates, placement: str | float
) -> Sequence[NodeBudget]:
    """Return how many bytes to use of each memory node: all, unless less of one makes the predicted step shorter.

    A step may be shorter if some state is streamed, or updated on the GPU, rather than updated in slow memory. The
    number of homes on each node is searched: the best of a coarse grid, then descent from there. There is no search
    if a placement says which subgroups the GPU updates.
    """
    nodes = budgets.nodes
    has_choice = len(nodes) > 1 and bool(budgets.paths or budgets.gpu_staging_bytes)
    if not has_choice or placement not in ("auto", "cpu", 0):
        return nodes  # without paths and GPU staging, all state has to be at home there
    mean = _MeanSubgroups(layout, budgets, rates, searches_gpu=placement == "auto")
    cost_s = functools.cache(mean.step_s)
    most = [min(mean.count, node.nbytes // mean.slot_bytes) for node in nodes]  # homes that each node has room for
    # As `make_plan` fills the nodes, the fastest first.
    full = tuple(min(room, max(0, mean.count - sum(most[:n]))) for n, room in enumerate(most))
    coarse = min((full, *_coarse_counts(most, COARSE_NODE_SHARES)), key=cost_s)
    best = _descend(coarse, most, COARSE_NODE_SHARES, cost_s)
    if cost_s(full) <= (1 + WORTH_UNUSED_BYTES) * cost_s(best):  # too little is saved to leave memory unused
        return nodes
    return [node._replace(nbytes=homes * mean.slot_bytes) for node, homes in zip(nodes, best, strict=True)]


class _MeanSubgroups:
    """Predicts steps for any number of homes on each memory node, with subgroups taken as equally large.

    Attributes:
        count: Subgroups that are not at home on the GPU.
        slot_bytes: State of the largest subgroup.
    """

    def __init__(self, layout: Layout, budgets: Budgets, rates: Rates, *, searches_gpu: bool) -> None:
        filled = make_plan(layout, budgets)
        base = mix_of(filled)  # all updates are on the CPU, but for homes on the GPU
        self.count = base.host.on_cpu.count + base.streamed.on_cpu.count
        self.slot_bytes = max(layout.max_subgroup_bytes, 1)
        self._state_bytes = base.host.on_cpu.nbytes + base.streamed.on_cpu.nbytes
        self._budgets = budgets
        self._rates = rates
        self._path_shares = filled.path_shares(rates)
        gpu_slots = min(GPU_STAGING_SLOTS, budgets.gpu_staging_bytes // self.slot_bytes) if searches_gpu else 0
        self._gpu_shares = COARSE_NODE_SHARES if gpu_slots else 0
        mean_tiles = sum(subgroup.tile_count for subgroup in layout.subgroups) / max(len(layout.subgroups), 1)
        # `mix_of` counts the tiles of what is streamed in `filled`; any subgroup may be streamed here.
        self._base = replace(base, mean_tiles=mean_tiles, gpu_slots=gpu_slots)

    def step_s(self, homes: tuple[int, ...]) -> float:
        """Return the seconds of a step with so many homes on each node, and the best coarse share of GPU updates.

        Infinite if that is more homes than subgroups, or leaves some to be streamed without paths or staging slots.
        """
        budgets = self._budgets
        streamed = self.count - sum(homes)
        slots = count_staging_slots(budgets, self.slot_bytes, streamed)
        if streamed < 0 or (streamed and not (budgets.paths and slots)):
            return math.inf
        mix = replace(
            self._base,
            host=self._on_cpu(sum(homes)),
            streamed=self._on_cpu(streamed),
            nodes={node.node: self._on_cpu(count) for node, count in zip(budgets.nodes, homes, strict=True)},
            staging_slots=slots,
        )
        gpu_counts = _coarse_counts((*homes, streamed), self._gpu_shares)
        mixes = (_spread_to_gpu(mix, counts) for counts in gpu_counts)
        return min(estimate_mix(mix, self._path_shares, self._rates).step_s for mix in mixes)

    def _on_cpu(self, count: int) -> ByDevice:
        """Return so many mean subgroups, all updated on the CPU."""
        return ByDevice(SubgroupSum(count, self._state_bytes * count / max(self.count, 1)), SubgroupSum())


def _plan_with_node_bytes(
    layout: Layout,
    budgets: Budgets,
    rates: Rates,
    placement: str | float,
    kept: Plan | None,
    node_bytes: Sequence[NodeBudget],
) -> Plan:
    """Return the plan with the shortest predicted step that uses so many bytes of each memory node.

    Placements are chosen first, then the numbers of staging slots that suit them.
    """
    make = functools.partial(make_plan, layout, budgets, kept=kept, node_bytes=node_bytes)
    plan = make()
    on_cpu = mix_of(plan)
    mix = on_cpu
    placements = plan.placements
    if placement == "auto":
        placements, mix = _cheapest_placements(plan, on_cpu, rates)
    elif placement != "cpu":
        placements = _placements_of(plan, placement)
        # With the most slots, of which the fewest that do are chosen next.
        mix = mix_of(make(placements=placements, gpu_slots=budgets.most_gpu_slots))
    gpu_slots = _fewest_gpu_slots(mix, plan.path_shares(rates), rates)
    slots = plan.staging_slots
    if budgets.staging_bytes is None and slots and kept is None:  # a session with a plan has made its slots
        slots = _fewest_staging_slots(mix, plan.path_shares(rates), rates, slots)
        if placement == "auto" and placements != plan.placements and slots != plan.staging_slots:
            # With more slots, updates of more subgroups may be faster on the GPU, copies included.
            placements, _ = _cheapest_placements(plan, replace(on_cpu, staging_slots=slots), rates)
    if slots == plan.staging_slots and placements == plan.placements:
        return plan
    try:
        return make(placements=placements, staging_slots=slots, gpu_slots=gpu_slots)
    except InfeasiblePlanError:
        if slots <= plan.staging_slots:  # fewer would not help
            raise
        # The paths have no room for the versions in flight of so many slots.
        return make(placements=placements, gpu_slots=gpu_slots)


def _fewest_gpu_slots(mix: Mix, shares: tuple[float, ...], rates: Rates) -> int:
    """Return the fewest staging slots on the GPU with which a step is at most `WORTH_A_SLOT` slower than with any."""
    counts = range(min(GPU_STAGING_SLOTS, mix.gpu_slots), mix.gpu_slots + 1)  # more only where they are borrowed
    costs = {count: estimate_mix(replace(mix, gpu_slots=count), shares, rates).step_s for count in counts}
    return next(count for count, cost_s in costs.items() if cost_s <= (1 + WORTH_A_SLOT) * min(costs.values()))


def _fewest_staging_slots(mix: Mix, shares: tuple[float, ...], rates: Rates, usual: int) -> int:
    """Return the fewest of `STAGING_SLOTS` with nearly the best throughput; `usual` if each holds all streamed state.

    State in slots stays there between steps, so a step moves `streamed - slots` subgroups out and in. More slots keep
    more state in memory, as more `host_memory` would, which is the user's choice. So slots are compared by the time
    for each subgroup that moves, step_s / (streamed - slots).
    """
    streamed = mix.streamed.on_cpu.count + mix.streamed.on_gpu.count
    costs = {
        slots: estimate_mix(replace(mix, staging_slots=slots), shares, rates).step_s / (streamed - slots)
        for slots in STAGING_SLOTS
        if slots < streamed
    }
    enough = (1 + WORTH_A_SLOT) * min(costs.values(), default=0.0)
    return next((slots for slots, cost_s in costs.items() if cost_s <= enough), usual)


def _placements_of(plan: Plan, placement: str | float) -> tuple[Placement, ...]:
    """Return the device of each subgroup's update by a stride, a share, or "gpu"."""
    count = len(plan.homes)
    if isinstance(placement, str) and placement != "gpu":
        stride = int(placement.removeprefix(STRIDE))
        return _with_gpu(plan, range(stride - 1, count, stride))
    share = 1.0 if isinstance(placement, str) else placement  # a string is "gpu" here
    elsewhere = [number for number in range(count) if not plan.at_home_on_gpu(number)]
    return _with_gpu(plan, _spread(elsewhere, round(share * len(elsewhere))))


def _check_placement(placement: str | float) -> None:
    """Raise `ConfigError` unless a placement is one that `choose_plan` knows."""
    if isinstance(placement, str) and placement.startswith(STRIDE):
        stride = placement.removeprefix(STRIDE)
        if not stride.isdecimal() or not int(stride):
            raise ConfigError("placement", placement, 'give a stride of 1 or more, as in "stride:3"')
        return
    is_share = isinstance(placement, int | float) and not isinstance(placement, bool) and 0 <= placement <= 1
    if not is_share and placement not in ("auto", "cpu", "gpu"):
        raise ConfigError("placement", placement, 'use "auto", "cpu", "gpu", a share from 0 to 1, or "stride:<k>"')


def _with_gpu(plan: Plan, numbers: Iterable[int]) -> tuple[Placement, ...]:
    """Return a plan's placements, with the GPU for these subgroups, too."""
    placements = [*plan.placements]
    for number in numbers:
        placements[number] = Placement.GPU
    return tuple(placements)


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """Return `count` of `numbers`, as evenly spread as can be: those at which floor(i * count / total) grows.

    That is 0 for i = 0 and `count` for i = total, and grows by at most 1 at a time.
    """
    total = len(numbers)
    return [number for i, number in enumerate(numbers) if (i + 1) * count // total > i * count // total]


def _cheapest_placements(plan: Plan, mix: Mix, rates: Rates) -> tuple[tuple[Placement, ...], Mix]:
    """Return the placements with the shortest predicted step, and the mix that they make of the plan's.

    Tried are all updates on the CPU, fixed strides, and counts of each kind (see `_subgroups_by_kind`), whose
    subgroups are as evenly spread as can be.
    """
    sizes = plan.layout.subgroup_bytes
    kinds = _subgroups_by_kind(plan, mix)
    largest = max((sizes[number] for kind in kinds for number in kind), default=0)
    slots = min(plan.budgets.most_gpu_slots, plan.budgets.gpu_staging_bytes // largest) if largest else 0
    if not slots:  # the CPU updates nothing that the GPU could, or the GPU has no room for one subgroup
        return plan.placements, mix
    shares = plan.path_shares(rates)
    base = replace(mix, gpu_slots=slots)

    def mix_with(chosen: Sequence[Sequence[int]]) -> Mix:
        """Return the mix whose GPU updates these subgroups of each kind, with their real sizes."""
        return _moved_to_gpu(base, [SubgroupSum(len(some), sum(sizes[n] for n in some)) for some in chosen])

    best_counts = _best_counts(base, [len(kind) for kind in kinds], shares, rates)
    spread = [_spread(kind, count) for kind, count in zip(kinds, best_counts, strict=True)]
    # What the GPU may update, with the mix that it makes:
    choices: list[tuple[Mix, Sequence[int]]] = [(base, []), (mix_with(spread), [*itertools.chain(*spread)])]
    members = [frozenset(kind) for kind in kinds]
    for stride in _strides(len(plan.homes)):
        picked = range(stride - 1, len(plan.homes), stride)
        choices.append((mix_with([[n for n in picked if n in kind] for kind in members]), picked))
    seconds = [estimate_mix(each, shares, rates).step_s for each, _ in choices]
    least_s = min(seconds)
    if seconds[0] <= (1 + WORTH_THE_GPU) * least_s:  # with all on the CPU it is hardly longer
        return plan.placements, mix
    best_mix, chosen = choices[seconds.index(least_s)]
    return _with_gpu(plan, chosen), best_mix


def _best_counts(base: Mix, most: Sequence[int], shares: tuple[float, ...], rates: Rates) -> tuple[int, ...]:
    """Return how many subgroups of each kind the GPU should update: the best of a coarse grid, then descent."""

    @functools.cache
    def cost_s(counts: tuple[int, ...]) -> float:
        return estimate_mix(_spread_to_gpu(base, counts), shares, rates).step_s

    coarse = min(_coarse_counts(most, COARSE_SHARES), key=cost_s)
    return _descend(coarse, most, COARSE_SHARES, cost_s)


def _subgroups_by_kind(plan: Plan, mix: Mix) -> list[list[int]]:
    """Return the subgroups at home in host memory (of each memory node, if there are several), then streamed ones."""
    nodes = plan.nodes or (None,) * len(plan.homes)
    homes = list(zip(plan.homes, nodes, strict=True))
    kinds = [*((Home.HOST, node) for node in (mix.nodes or [None])), (Home.STREAMED, None)]
    return [[number for number, home in enumerate(homes) if home == kind] for kind in kinds]


def _moved_to_gpu(base: Mix, parts: Sequence[SubgroupSum]) -> Mix:
    """Return a mix whose GPU updates these parts of what the CPU updates in `base`.

    Args:
        base: All that is not at home on the GPU is updated by the CPU.
        parts: Of the homes on each memory node, in the order of `base.nodes`; of streamed state last.
    """
    cpu_bytes = base.host.on_cpu.nbytes + base.streamed.on_cpu.nbytes
    left = 1 - sum(part.nbytes for part in parts) / cpu_bytes  # the part of its bytes that the CPU still updates
    *host, streamed = parts
    of_nodes = zip(base.nodes.items(), host, strict=False)  # `base.nodes` is empty if there is only one
    return replace(
        base,
        host=_split(base.host, SubgroupSum(sum(part.count for part in host), sum(part.nbytes for part in host))),
        streamed=_split(base.streamed, streamed),
        nodes={node: _split(whole, part) for (node, whole), part in of_nodes},
        pushed_bytes=base.pushed_bytes * left,
        fetched_gradient_bytes=base.fetched_gradient_bytes * left,
    )


def _spread_to_gpu(base: Mix, counts: Sequence[int]) -> Mix:
    """Return a mix whose GPU updates so many subgroups of each kind, taken as equally large."""
    kinds = [*(base.nodes.values() or [base.host]), base.streamed]
    totals = [kind.on_cpu for kind in kinds]
    return _moved_to_gpu(
        base, [SubgroupSum(n, t.nbytes * n / t.count if n else 0) for n, t in zip(counts, totals, strict=True)]
    )


def _split(whole: ByDevice, part: SubgroupSum) -> ByDevice:
    """Return what the CPU updates in `whole`, divided: `part` for the GPU, the rest for the CPU."""
    on_cpu = whole.on_cpu
    return ByDevice(SubgroupSum(on_cpu.count - part.count, on_cpu.nbytes - part.nbytes), part)


def _coarse_counts(most: Sequence[int], shares: int) -> Iterator[tuple[int, ...]]:
    """Yield counts of each kind to try first: none, and for each share three sorts of counts.

    The share of all kinds; the share of one kind, and none of the others; all of one kind, and the share of the
    others.
    """
    yield (0,) * len(most)
    kinds = range(len(most))
    for part in range(1, shares + 1):
        some = tuple(count * part // shares for count in most)
        one_alone = [tuple(some[i] if i == kind else 0 for i in kinds) for kind in kinds]
        one_whole = [tuple(most[i] if i == kind else some[i] for i in kinds) for kind in kinds]
        yield from dict.fromkeys((some, *one_alone, *one_whole))  # each once


def _descend(
    best: tuple[int, ...], most: Sequence[int], shares: int, cost_s: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """Descend from `best` to the cheapest counts near it: a pattern search with steps that are halved down to 1.

    A move changes one kind's count by a step, or moves a step from one kind to another. Steps begin at half the
    distance of `_coarse_counts`.
    """
    kinds = range(len(most))
    # Signs of the changes, by kind. The first move stays: `min` prefers it to others that are no cheaper.
    moves = [{}, *({kind: sign} for kind in kinds for sign in (-1, 1))]
    moves += [{a: sign, b: -sign} for a, b in itertools.combinations(kinds, 2) for sign in (1, -1)]
    step = max(most) // shares // 2 + 1
    while step:
        moved = [tuple(n + step * move.get(kind, 0) for kind, n in enumerate(best)) for move in moves]
        possible = [counts for counts in moved if all(0 <= n <= m for n, m in zip(counts, most, strict=True))]
        cheapest = min(possible, key=cost_s)
        if cheapest == best:
            step //= 2
        best = cheapest
    return best


def _strides(count: int) -> list[int]:
    """Return all strides up to `EVERY_STRIDE`; of longer ones that pick equally many subgroups, only the first.

    Stride k picks m = count // k; the last stride that picks m is count // m.
    """
    strides = []
    stride = 1
    while stride <= count:
        strides.append(stride)
        last_alike = stride if stride < EVERY_STRIDE else count // (count // stride)
        stride = last_alike + 1
    return strides


def visit_order(wanted: Sequence[int], cached: Collection[int]) -> tuple[int, ...]:
    """Return `wanted` with the subgroups that are in staging memory first.

    The next sweep then begins with the subgroups that this one leaves in staging memory. So each step reads (and
    writes) the streamed state less the staging memory, which is the least possible (the cache-reusing order of
    MLP-Offload, SC '25, arXiv 2509.02480, which alternates the direction to the same end).
    """
    first = [subgroup for subgroup in wanted if subgroup in cached]
    others = [subgroup for subgroup in wanted if subgroup not in cached]
    return (*first, *others)
