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
    # A GPU is used if state or weights lie there, or if the placement is "gpu", a stride or a share above 0.
    if budgets.gpu_bytes or budgets.weights_on_gpu or placement not in ("auto", "cpu", 0):
        rates.gpu.check_used(planned=True)
    budgets = fastest_nodes_first(budgets, rates)
    # With `kept`, how much of each node to use is not searched again: homes lie there already.
    node_bytes = budgets.nodes if kept is not None else _choose_node_bytes(layout, budgets, rates, placement)
    try:
        return _plan_with_node_bytes(layout, budgets, rates, placement, kept, node_bytes)
    except InfeasiblePlanError:
        if node_bytes is budgets.nodes:
            raise
        # With so little of the nodes, more is streamed than fits the paths: use all their memory instead.
        return _plan_with_node_bytes(layout, budgets, rates, placement, kept, budgets.nodes)


def extend_plan(before: Plan, layout: Layout, budgets: Budgets, rates: Rates, placement: str | float) -> Plan:
    """Return a plan like `choose_plan`'s for a layout that adds subgroups to those of the plan `before`.

    Subgroups of `before` keep their homes and placements. The placements must stay, since memory for gradients was
    given out by them.
    """
    # This plan may have other placements for the subgroups of `before`.
    chosen_plan = choose_plan(layout, budgets, rates, placement, kept=before)
    placements = (*before.placements, *chosen_plan.placements[len(before.placements) :])
    gpu_slots = max(GPU_STAGING_SLOTS, before.gpu_slots, chosen_plan.gpu_slots)
    return make_plan(layout, budgets, kept=before, placements=placements, gpu_slots=gpu_slots)


def fastest_nodes_first(budgets: Budgets, rates: Rates) -> Budgets:
    """Return budgets with memory nodes sorted by their rates, the fastest first.

    Raises:
        ConfigError: If one has no rates.
    """
    node_bytes = dict(budgets.nodes)
    nodes = tuple(NodeBudget(node, node_bytes[node]) for node in rates.fastest_first(node_bytes))
    return replace(budgets, nodes=nodes) if nodes else budgets


def _choose_node_bytes(
    layout: Layout, budgets: Budgets, rates: Rates, placement: str | float
) -> Sequence[NodeBudget]:
    """Return how many bytes to use of each memory node: all, unless less of one makes the predicted step shorter.

    Less may be faster since state without a home there is streamed, or updated on the GPU, rather than updated by the
    CPU in slow memory. The number of homes on each node is searched: the best of a coarse grid, then descent from
    there. There is no search if a placement says which subgroups the GPU updates.
    """
    nodes = budgets.nodes
    has_choice = len(nodes) > 1 and bool(budgets.paths or budgets.gpu_staging_bytes)
    if not has_choice or placement not in ("auto", "cpu", 0):
        return nodes  # one node at most, or no other place to keep or update state, or a fixed placement
    mean = _MeanSubgroups(layout, budgets, rates, searches_gpu=placement == "auto")
    if not mean.count:
        return nodes  # all state is at home on the GPU
    cost_s = functools.cache(mean.step_s)
    most = [min(mean.count, node.nbytes // mean.slot_bytes) for node in nodes]  # homes that each node has room for
    # Homes as `make_plan` fills the nodes, the fastest first: each node gets what the faster ones have no room for.
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
        self._gpu_shares = COARSE_NODE_SHARES if gpu_slots else 0  # 0: no updates on the GPU are tried
        mean_tiles = sum(subgroup.tile_count for subgroup in layout.subgroups) / max(len(layout.subgroups), 1)
        # `mix_of` counts the tiles of what is streamed in `filled`; any subgroup may be streamed here.
        self._base = replace(base, mean_tiles=mean_tiles, gpu_slots=gpu_slots)

    def step_s(self, homes: tuple[int, ...]) -> float:
        """Return the seconds of a step with `homes[n]` homes on the n-th node, and the best coarse share on the GPU.

        Infinite if there are more homes than subgroups, or if subgroups would be streamed without paths or staging
        slots.
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
        """Return `count` mean subgroups, all updated on the CPU."""
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
        # A mix with as many slots on the GPU as there may be; `_fewest_gpu_slots` chooses how many suffice.
        mix = mix_of(make(placements=placements, gpu_slots=budgets.most_gpu_slots))
    gpu_slots = _fewest_gpu_slots(mix, plan.path_shares(rates), rates)
    slots = plan.staging_slots
    if budgets.staging_bytes is None and slots and kept is None:  # with `kept`, a session has made its slots already
        slots = _fewest_staging_slots(mix, plan.path_shares(rates), rates, slots)
        if placement == "auto" and placements != plan.placements and slots != plan.staging_slots:
            # With more slots, updates of more subgroups may be faster on the GPU, copies included.
            placements, _ = _cheapest_placements(plan, replace(on_cpu, staging_slots=slots), rates)
    if slots == plan.staging_slots and placements == plan.placements:
        return plan  # it has no slots on the GPU, and needs none: the GPU updates only what is at home there
    try:
        return make(placements=placements, staging_slots=slots, gpu_slots=gpu_slots)
    except InfeasiblePlanError:
        if slots <= plan.staging_slots:  # fewer would not help
            raise
        # The paths have no room for the versions in flight of so many slots.
        return make(placements=placements, gpu_slots=gpu_slots)


def _fewest_gpu_slots(mix: Mix, shares: tuple[float, ...], rates: Rates) -> int:
    """Return the fewest staging slots on the GPU that make a step at most `WORTH_A_SLOT` slower than the best number.

    Tried are `GPU_STAGING_SLOTS` (or all of the mix's, if fewer) and, where slots are borrowed, the larger numbers.
    """
    counts = range(min(GPU_STAGING_SLOTS, mix.gpu_slots), mix.gpu_slots + 1)
    costs = {count: estimate_mix(replace(mix, gpu_slots=count), shares, rates).step_s for count in counts}
    return next(count for count, cost_s in costs.items() if cost_s <= (1 + WORTH_A_SLOT) * min(costs.values()))


def _fewest_staging_slots(mix: Mix, shares: tuple[float, ...], rates: Rates, usual: int) -> int:
    """Return the fewest of `STAGING_SLOTS` with nearly the best throughput.

    If the fewest of these hold all streamed state, so that none moves, `usual` is returned.

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
    """Return the device of each subgroup's update, for a placement that is a stride, a share, or "gpu"."""
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
    """Return `count` of `numbers`, as evenly spread as can be.

    `numbers[i]` is chosen if floor(i * count / total) grows from i to i + 1. That goes from 0 for i = 0 to `count`
    for i = total, and grows by at most 1 at a time: so `count` numbers are chosen.
    """
    total = len(numbers)
    return [number for i, number in enumerate(numbers) if (i + 1) * count // total > i * count // total]


def _cheapest_placements(plan: Plan, mix: Mix, rates: Rates) -> tuple[tuple[Placement, ...], Mix]:
    """Return the placements with the shortest predicted step, and the mix of the plan with these placements.

    Tried are all updates on the CPU, fixed strides, and counts of each kind (see `_subgroups_by_kind`), whose
    subgroups are as evenly spread as can be.

    Args:
        plan: A plan in which the GPU updates only what is at home there.
        mix: The plan's mix, perhaps with another number of staging slots.
        rates: Speed of every lane.
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
        """Return the mix whose GPU updates the subgroups `chosen` of each kind, with their real sizes."""
        return _moved_to_gpu(base, [SubgroupSum(len(some), sum(sizes[n] for n in some)) for some in chosen])

    best_counts = _best_counts(base, [len(kind) for kind in kinds], shares, rates)
    spread = [_spread(kind, count) for kind, count in zip(kinds, best_counts, strict=True)]
    # The choices, each as a mix and the numbers of the subgroups that the GPU updates in it; first, none.
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
    """Return how many subgroups of each kind the GPU should update: the best of a coarse grid, then descent.

    Args:
        base: The mix with all these updates on the CPU.
        most: Number of subgroups of each kind.
        shares: The part of all tiles on each path.
        rates: Speed of every lane.
    """

    @functools.cache
    def cost_s(counts: tuple[int, ...]) -> float:
        return estimate_mix(_spread_to_gpu(base, counts), shares, rates).step_s

    coarse = min(_coarse_counts(most, COARSE_SHARES), key=cost_s)
    return _descend(coarse, most, COARSE_SHARES, cost_s)


def _subgroups_by_kind(plan: Plan, mix: Mix) -> list[list[int]]:
    """Return the numbers of the subgroups of each kind that may be updated on the CPU or the GPU.

    A kind is all those at home in host memory (on one memory node, if there are several). The last kind is all
    streamed ones.
    """
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
    cpu_share = 1 - sum(part.nbytes for part in parts) / cpu_bytes  # of its bytes, the CPU still updates this share
    *host, streamed = parts
    nodes_and_parts = zip(base.nodes.items(), host, strict=False)  # `base.nodes` is empty if there is only one
    return replace(
        base,
        host=_split(base.host, SubgroupSum(sum(part.count for part in host), sum(part.nbytes for part in host))),
        streamed=_split(base.streamed, streamed),
        nodes={node: _split(whole, part) for (node, whole), part in nodes_and_parts},
        pushed_bytes=base.pushed_bytes * cpu_share,
        fetched_gradient_bytes=base.fetched_gradient_bytes * cpu_share,
    )


def _spread_to_gpu(base: Mix, counts: Sequence[int]) -> Mix:
    """Return a mix whose GPU updates `counts[k]` subgroups of kind k; those of a kind are taken as equally large.

    Kinds are those of `_subgroups_by_kind`. In `base`, the CPU updates them all.
    """
    kinds = [*(base.nodes.values() or [base.host]), base.streamed]
    totals = [kind.on_cpu for kind in kinds]
    return _moved_to_gpu(
        base, [SubgroupSum(n, t.nbytes * n / t.count if n else 0) for n, t in zip(counts, totals, strict=True)]
    )


def _split(whole: ByDevice, part: SubgroupSum) -> ByDevice:
    """Divide what the CPU updates in `whole`: the GPU gets `part` of it, and the CPU keeps the rest."""
    on_cpu = whole.on_cpu
    return ByDevice(SubgroupSum(on_cpu.count - part.count, on_cpu.nbytes - part.nbytes), part)


def _coarse_counts(most: Sequence[int], shares: int) -> Iterator[tuple[int, ...]]:
    """Yield the counts of each kind to try first: none of any kind, and for each share three sorts of counts.

    These are the share of all kinds; the share of one kind, and none of the others; all of one kind, and the share of
    the others.

    Args:
        most: The greatest count of each kind.
        shares: How many shares to try: 1 / `shares`, 2 / `shares`, and so on, up to 1.
    """
    yield (0,) * len(most)
    kinds = range(len(most))
    for part in range(1, shares + 1):
        of_share = tuple(count * part // shares for count in most)
        one_alone = [tuple(of_share[i] if i == kind else 0 for i in kinds) for kind in kinds]
        one_whole = [tuple(most[i] if i == kind else of_share[i] for i in kinds) for kind in kinds]
        yield from dict.fromkeys((of_share, *one_alone, *one_whole))  # each once


def _descend(
    best: tuple[int, ...], most: Sequence[int], shares: int, cost_s: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """Descend from `best` to the cheapest counts near it: a pattern search with steps that are halved down to 1.

    A move changes one kind's count by a step, or moves a step from one kind to another. Steps begin at half the
    distance of `_coarse_counts`. They are halved when no move is cheaper than to stay.

    Args:
        best: The counts to begin with, by kind.
        most: The greatest count of each kind.
        shares: Number of shares by which `_coarse_counts` has made `best`.
        cost_s: Seconds of a step with some counts.
    """
    kinds = range(len(most))
    # Each move has the signs of its changes, by kind. The first, {}, changes nothing: `min` prefers it to equals.
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
    """Return the strides to try for `count` subgroups: all up to `EVERY_STRIDE`, and some longer ones.

    Of longer strides that pick equally many subgroups, only the first is tried. Stride k picks m = count // k
    subgroups, and the last stride that picks m is count // m.
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
