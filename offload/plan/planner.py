"""Choosing a plan by its cost: what the GPU updates, and how far ahead state is fetched; and the order of visits.

Homes follow from the budgets (`make_plan`): whatever fits stays in the fastest tier. What is left to choose is
searched by the closed form, with how many homes lie on each memory node, where there are several. Deterministic; the
candidates hold all updates on the CPU, the fixed strides, and all nodes filled, the fastest first: the plan is never
predicted to be slower than one of those.
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
from offload.plan.cost import Mix, Part, estimate_mix, mix_of
from offload.plan.rates import Rates

STAGING_SLOTS = (DEFAULT_STAGING_SLOTS, 6, 8, 12)
"""How many staging slots are tried where the budget leaves it open."""

WORTH_A_SLOT = 0.01
"""More staging slots are taken where they save at least this part of the time. Those on the GPU, too, where they are
borrowed: what is borrowed comes back to forward only when the last copies from there have ended."""

WORTH_THE_GPU = 0.0005
"""Updates leave the CPU where they save at least this part of the time."""

COARSE_SHARES = 16
"""Shares of GPU updates that are tried at first; then finer ones about the best."""

COARSE_DEALS = 4
"""Shares of each memory node that are tried at first, each with as many shares of GPU updates."""

WORTH_A_DEAL = 0.01
"""Part of the time that leaving memory of a node unused has to save."""

EVERY_STRIDE = 64

STRIDE = "stride:"
"""How a placement names the fixed stride of Deep Optimizer States (Middleware '24, arXiv 2410.21316): "stride:3"
updates subgroups 2, 5, 8, ... on the GPU."""


def choose_plan(
    layout: Layout, budgets: Budgets, rates: Rates, placement: str | float = "auto", *, kept: Plan | None = None
) -> Plan:
    """Return the plan with the shortest predicted step.

    Args:
        layout: What is to be placed.
        budgets: What each tier offers.
        rates: Speed of every lane; one entry for each path.
        placement: What the GPU updates of the state that is not at home there: "auto" for whatever is fastest, "cpu"
            for nothing, "gpu" for all, a share from 0 to 1, or "stride:<k>" for every k-th subgroup.
        kept: A plan for the first subgroups of `layout`, whose homes stay as they are.

    Raises:
        ConfigError: If `placement` is none of these, or needs a GPU whose rates are missing, or `rates` has not one
            entry for each path, or none for a memory node.
        InfeasiblePlanError: If the state does not fit, or the GPU's staging memory does not hold one subgroup that
            `placement` sends there.
    """
    _check_placement(placement)
    if len(rates.paths) != len(budgets.paths):
        raise ConfigError("rates.paths", len(rates.paths), f"give one entry for each of {len(budgets.paths)} paths")
    if budgets.gpu_bytes or budgets.weights_on_gpu or placement not in ("auto", "cpu", 0):
        rates.gpu.check_used(planned=True)
    budgets = in_order(budgets, rates)
    deal = budgets.nodes if kept is not None else _dealt(layout, budgets, rates, placement)
    try:
        return _placing(layout, budgets, rates, placement, kept, deal)
    except InfeasiblePlanError:
        if deal is budgets.nodes:
            raise
        return _placing(layout, budgets, rates, placement, kept, budgets.nodes)  # the paths have no room for more


def extend_plan(before: Plan, layout: Layout, budgets: Budgets, rates: Rates, placement: str | float) -> Plan:
    """Return a plan like `choose_plan`'s for a layout with more subgroups, where those of the plan before stay.

    They are also updated where they were: memory for their gradients has been given out by that.
    """
    fresh = choose_plan(layout, budgets, rates, placement, kept=before)
    placements = (*before.placements, *fresh.placements[len(before.placements) :])
    gpu_slots = max(GPU_STAGING_SLOTS, before.gpu_slots, fresh.gpu_slots)
    return make_plan(layout, budgets, kept=before, placements=placements, gpu_slots=gpu_slots)


def in_order(budgets: Budgets, rates: Rates) -> Budgets:
    """Return budgets with memory nodes in the order of their rates.

    Raises:
        ConfigError: If one has no rates.
    """
    known = dict(budgets.nodes)
    nodes = tuple(NodeBudget(node, known[node]) for node in rates.fastest_first(known))
    return replace(budgets, nodes=nodes) if nodes else budgets


def _dealt(layout: Layout, budgets: Budgets, rates: Rates, placement: str | float) -> Sequence[NodeBudget]:
    """Return what to use of each memory node, as the closed form sees it: none that costs more than streaming does.

    All of every node, the fastest first, unless a step is shorter with less of one. Subgroups are taken as equally
    large. Where a placement names what the GPU updates, nothing is searched.
    """
    nodes = budgets.nodes
    if len(nodes) < 2 or not (budgets.paths or budgets.gpu_staging_bytes) or placement not in ("auto", "cpu", 0):
        return nodes  # without either all state has to lie there, and the CPU updates it
    filled = make_plan(layout, budgets)
    base, shares, largest = mix_of(filled), filled.shares(rates), max(layout.max_subgroup_bytes, 1)
    count, nbytes = base.host[0].count + base.streamed[0].count, base.host[0].nbytes + base.streamed[0].nbytes
    gpu_slots = min(GPU_STAGING_SLOTS, budgets.gpu_staging_bytes // largest) if placement == "auto" else 0
    tiles = sum(subgroup.tile_count for subgroup in layout.subgroups) / max(len(layout.subgroups), 1)

    def part(few: int) -> tuple[Part, Part]:
        return Part(few, nbytes * few / max(count, 1)), Part()

    @functools.cache
    def cost_s(counts: tuple[int, ...]) -> float:
        streamed = count - sum(counts)
        slots = count_staging_slots(budgets, largest, streamed)
        if streamed < 0 or (streamed and not (budgets.paths and slots)):
            return math.inf
        here = dict(zip((node.node for node in nodes), map(part, counts), strict=True))
        mix = replace(base, host=part(sum(counts)), streamed=part(streamed), nodes=here, tiles=tiles)
        mix = replace(mix, slots=slots, gpu_slots=gpu_slots)
        tried = _coarse((*counts, streamed), COARSE_DEALS if gpu_slots else 0)
        return min(estimate_mix(_spread_to_gpu(mix, each), shares, rates).step_s for each in tried)

    most = [min(count, node.nbytes // largest) for node in nodes]
    full = tuple(min(few, max(0, count - sum(most[:n]))) for n, few in enumerate(most))  # as `make_plan` fills them
    best = _descended(min((full, *_coarse(most, COARSE_DEALS)), key=cost_s), most, COARSE_DEALS, cost_s)
    if cost_s(full) <= (1 + WORTH_A_DEAL) * cost_s(best):
        return nodes
    return [node._replace(nbytes=few * largest) for node, few in zip(nodes, best, strict=True)]


def _placing(
    layout: Layout,
    budgets: Budgets,
    rates: Rates,
    placement: str | float,
    kept: Plan | None,
    deal: Sequence[NodeBudget],
) -> Plan:
    """Return the plan with the shortest predicted step that uses so much of each memory node."""
    planned = functools.partial(make_plan, layout, budgets, kept=kept, deal=deal)
    plan = planned()
    on_cpu = mix = mix_of(plan)
    placements = plan.placements
    if placement == "auto":
        placements, mix = _cheapest(plan, on_cpu, rates)
    elif placement != "cpu":
        placements = _named(plan, placement)
        mix = mix_of(planned(placements=placements, gpu_slots=budgets.most_gpu_slots))
    gpu_slots = _slots_that_pay(mix, plan.shares(rates), rates)
    slots = plan.staging_slots
    if budgets.staging_bytes is None and slots and kept is None:
        slots = _look_ahead(mix, plan.shares(rates), rates, slots)
        if placement == "auto" and placements != plan.placements and slots != plan.staging_slots:
            # With more slots ahead, more may be worth its way to the GPU and back.
            placements, _ = _cheapest(plan, replace(on_cpu, slots=slots), rates)
    if slots == plan.staging_slots and placements == plan.placements:
        return plan
    try:
        return planned(placements=placements, staging_slots=slots, gpu_slots=gpu_slots)
    except InfeasiblePlanError:
        if slots <= plan.staging_slots:
            raise
        # The paths have no room for so many versions in flight.
        return planned(placements=placements, gpu_slots=gpu_slots)


def _slots_that_pay(mix: Mix, shares: tuple[float, ...], rates: Rates) -> int:
    """Return the fewest staging slots on the GPU, of those in `mix`, with which a step is as fast as can be."""
    counts = range(min(GPU_STAGING_SLOTS, mix.gpu_slots), mix.gpu_slots + 1)
    costs = {count: estimate_mix(replace(mix, gpu_slots=count), shares, rates).step_s for count in counts}
    return next(count for count, cost_s in costs.items() if cost_s <= (1 + WORTH_A_SLOT) * min(costs.values()))


def _look_ahead(mix: Mix, shares: tuple[float, ...], rates: Rates, usual: int) -> int:
    """Return the fewest staging slots that let subgroups follow each other as fast as can be.

    More slots also keep more state between steps, but so would more `host_memory`, which the user chooses. So what is
    compared is the time for each subgroup that goes out and in. Where all of it fits `usual` slots, it is that.
    """
    streamed = mix.streamed[0].count + mix.streamed[1].count
    costs = {
        slots: estimate_mix(replace(mix, slots=slots), shares, rates).step_s / (streamed - slots)
        for slots in STAGING_SLOTS
        if slots < streamed
    }
    enough = (1 + WORTH_A_SLOT) * min(costs.values(), default=0.0)
    return next((slots for slots, cost_s in costs.items() if cost_s <= enough), usual)


def _named(plan: Plan, placement: str | float) -> tuple[Placement, ...]:
    """Return what updates each subgroup by a placement that names it."""
    count = len(plan.homes)
    if isinstance(placement, str) and placement != "gpu":
        k = int(placement.removeprefix(STRIDE))
        return _placed(plan, range(k - 1, count, k))
    share = 1.0 if isinstance(placement, str) else placement
    open_to = [number for number in range(count) if not plan.at_home_on_gpu(number)]
    return _placed(plan, _spread(open_to, round(share * len(open_to))))


def _check_placement(placement: str | float) -> None:
    if isinstance(placement, str) and placement.startswith(STRIDE):
        k = placement.removeprefix(STRIDE)
        if not k.isdecimal() or not int(k):
            raise ConfigError("placement", placement, 'give a stride of 1 or more, as in "stride:3"')
        return
    is_share = isinstance(placement, int | float) and not isinstance(placement, bool) and 0 <= placement <= 1
    if not is_share and placement not in ("auto", "cpu", "gpu"):
        raise ConfigError("placement", placement, 'use "auto", "cpu", "gpu", a share from 0 to 1, or "stride:<k>"')


def _placed(plan: Plan, numbers: Iterable[int]) -> tuple[Placement, ...]:
    """Return a plan's placements, with the GPU for some more subgroups."""
    placements = [*plan.placements]
    for number in numbers:
        placements[number] = Placement.GPU
    return tuple(placements)


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """Return `count` of `numbers`, as evenly spread as can be."""
    total = len(numbers)
    return [number for i, number in enumerate(numbers) if (i + 1) * count // total > i * count // total]


def _cheapest(plan: Plan, mix: Mix, rates: Rates) -> tuple[tuple[Placement, ...], Mix]:
    """Return what should update each subgroup, as the closed form sees it, and the mix that this makes of a plan."""
    sizes, count = plan.layout.subgroup_bytes, len(plan.homes)
    places = list(zip(plan.homes, plan.nodes or (None,) * count, strict=True))
    hosts = [(Home.HOST, node) for node in (mix.nodes or [None])]
    kinds = [[n for n in range(count) if places[n] == kind] for kind in (*hosts, (Home.STREAMED, None))]
    largest = max((sizes[number] for kind in kinds for number in kind), default=0)
    slots = min(plan.budgets.most_gpu_slots, plan.budgets.gpu_staging_bytes // largest) if largest else 0
    if not slots:
        return plan.placements, mix
    shares = plan.shares(rates)
    base = replace(mix, gpu_slots=slots)
    of_kind = [[sizes[n] if n in members else 0 for n in range(count)] for members in map(frozenset, kinds)]

    def cost_s(mix: Mix) -> float:
        return estimate_mix(mix, shares, rates).step_s

    @functools.cache
    def spread_cost_s(counts: tuple[int, ...]) -> float:
        return cost_s(_spread_to_gpu(base, counts))

    most = [len(kind) for kind in kinds]
    best = _descended(min(_coarse(most, COARSE_SHARES), key=spread_cost_s), most, COARSE_SHARES, spread_cost_s)
    chosen_of = [_spread(kind, few) for kind, few in zip(kinds, best, strict=True)]
    numbers = [number for chosen in chosen_of for number in chosen]
    exact = [(len(chosen), sum(sizes[n] for n in chosen)) for chosen in chosen_of]
    choices: list[tuple[Mix, Sequence[int]]] = [(base, []), (_to_gpu(base, exact), numbers)]
    for k in _strides(count):
        picked = [[nbytes for nbytes in part[k - 1 :: k] if nbytes] for part in of_kind]
        choices.append((_to_gpu(base, [(len(part), sum(part)) for part in picked]), range(k - 1, count, k)))
    found, chosen = min(choices, key=lambda choice: cost_s(choice[0]))
    if cost_s(base) <= (1 + WORTH_THE_GPU) * cost_s(found):
        return plan.placements, mix
    return _placed(plan, chosen), found


def _to_gpu(base: Mix, parts: Sequence[tuple[int, float]]) -> Mix:
    """Return a mix whose GPU updates so much of what the CPU did: counts and bytes, by node, of streamed last."""
    on_cpu = base.host[0].nbytes + base.streamed[0].nbytes
    left = 1 - sum(nbytes for _, nbytes in parts) / on_cpu
    *host, streamed = parts
    nodes = {node: _split(here[0], *part) for (node, here), part in zip(base.nodes.items(), host, strict=False)}
    return replace(
        base,
        host=_split(base.host[0], *map(sum, zip(*host, strict=True))),
        streamed=_split(base.streamed[0], *streamed),
        nodes=nodes,
        pushed_bytes=base.pushed_bytes * left,
        brought_bytes=base.brought_bytes * left,
    )


def _spread_to_gpu(base: Mix, counts: Sequence[int]) -> Mix:
    """Return a mix with so many subgroups of each kind on the GPU, taken as equally large."""
    homes = [here[0] for here in base.nodes.values()] or [base.host[0]]
    totals = (*homes, base.streamed[0])
    return _to_gpu(base, [(n, t.nbytes * n / t.count if n else 0) for n, t in zip(counts, totals, strict=True)])


def _split(part: Part, count: int, nbytes: float) -> tuple[Part, Part]:
    return Part(part.count - count, part.nbytes - nbytes), Part(count, nbytes)


def _coarse(most: Sequence[int], shares: int) -> Iterator[tuple[int, ...]]:
    """Return how many of each kind to try first: nothing, even shares of all, of one alone, beside all of one."""
    yield (0,) * len(most)
    for part in range(1, shares + 1):
        some = tuple(count * part // shares for count in most)
        alone = [tuple(n * (i == k) for i, n in enumerate(some)) for k in range(len(most))]
        beside = [tuple(most[i] if i == k else n for i, n in enumerate(some)) for k in range(len(most))]
        yield from dict.fromkeys((some, *alone, *beside))


def _descended(
    best: tuple[int, ...], most: Sequence[int], shares: int, cost_s: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """Return how many of each kind cost least near the best of `_coarse`: one more or less, or of another kind."""
    kinds = range(len(most))
    moves = [{}, *({k: by} for k in kinds for by in (-1, 1))]
    moves += [{a: by, b: -by} for a, b in itertools.combinations(kinds, 2) for by in (1, -1)]
    step = max(most) // shares // 2 + 1
    while step:
        tried = [tuple(n + step * move.get(k, 0) for k, n in enumerate(best)) for move in moves]
        near = [counts for counts in tried if all(0 <= n <= m for n, m in zip(counts, most, strict=True))]
        better = min(near, key=cost_s)
        step = step if better != best else step // 2
        best = better
    return best


def _strides(count: int) -> list[int]:
    """Return all strides up to `EVERY_STRIDE`, and of the longer ones the first that picks so many subgroups."""
    found, k = [], 1
    while k <= count:
        found.append(k)
        k = k + 1 if k < EVERY_STRIDE else count // (count // k) + 1
    return found


def visit_order(wanted: Sequence[int], cached: Collection[int]) -> tuple[int, ...]:
    """Return `wanted` with the subgroups that already lie in staging memory first.

    What one sweep leaves in staging memory is then the next one's first need, so each step reads (and writes) the
    streamed state less the staging memory, which is the least possible (the cache-reusing order of MLP-Offload,
    SC '25, arXiv 2509.02480, which alternates the direction to the same end).
    """
    first = [subgroup for subgroup in wanted if subgroup in cached]
    return (*first, *(subgroup for subgroup in wanted if subgroup not in cached))
