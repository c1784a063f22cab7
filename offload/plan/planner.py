"""Choosing a plan by its cost: what the GPU updates, and how far ahead state is fetched.

Homes follow from the budgets (`make_plan`): whatever fits stays in the fastest tier. What is left to choose is
searched by the closed form. Deterministic; the candidates hold all updates on the CPU and the fixed strides, so the
plan is never predicted to be slower than one of those.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from offload.errors import ConfigError, InfeasiblePlanError
from offload.layout import Layout
from offload.plan.budget import DEFAULT_STAGING_SLOTS, GPU_STAGING_SLOTS, Budgets, Home, Placement, Plan, make_plan
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
            entry for each path.
        InfeasiblePlanError: If the state does not fit, or the GPU's staging memory does not hold one subgroup that
            `placement` sends there.
    """
    _check_placement(placement)
    if len(rates.paths) != len(budgets.paths):
        raise ConfigError("rates.paths", len(rates.paths), f"give one entry for each of {len(budgets.paths)} paths")
    if budgets.gpu_bytes or budgets.weights_on_gpu or placement not in ("auto", "cpu", 0):
        rates.gpu.check_used(planned=True)
    plan = make_plan(layout, budgets, kept=kept)
    on_cpu = mix = mix_of(plan)
    placements = plan.placements
    if placement == "auto":
        placements, mix = _cheapest(plan, on_cpu, rates)
    elif placement != "cpu":
        placements = _named(plan, placement)
        most = len(plan.homes) if budgets.borrows else GPU_STAGING_SLOTS
        mix = mix_of(make_plan(layout, budgets, kept=kept, placements=placements, gpu_slots=most))
    gpu_slots = _worth_borrowing(mix, plan.shares(rates), rates) if budgets.borrows else GPU_STAGING_SLOTS
    slots = plan.staging_slots
    if budgets.staging_bytes is None and slots and kept is None:
        slots = _look_ahead(mix, plan.shares(rates), rates)
        if placement == "auto" and placements != plan.placements and slots != plan.staging_slots:
            # With more slots ahead, more may be worth its way to the GPU and back.
            placements, _ = _cheapest(plan, replace(on_cpu, slots=slots), rates)
    if slots == plan.staging_slots and placements == plan.placements:
        return plan
    try:
        return make_plan(layout, budgets, kept=kept, placements=placements, staging_slots=slots, gpu_slots=gpu_slots)
    except InfeasiblePlanError:
        if slots <= plan.staging_slots:
            raise
        # The paths have no room for so many versions in flight.
        return make_plan(layout, budgets, kept=kept, placements=placements, gpu_slots=gpu_slots)


def _worth_borrowing(mix: Mix, shares: tuple[float, ...], rates: Rates) -> int:
    """Return the fewest staging slots on the GPU, of those in `mix`, with which a step is as fast as can be."""
    counts = range(min(GPU_STAGING_SLOTS, mix.gpu_slots), mix.gpu_slots + 1)
    costs = {count: estimate_mix(replace(mix, gpu_slots=count), shares, rates).step_s for count in counts}
    return next(count for count, cost_s in costs.items() if cost_s <= (1 + WORTH_A_SLOT) * min(costs.values()))


def _look_ahead(mix: Mix, shares: tuple[float, ...], rates: Rates) -> int:
    """Return the fewest staging slots that let subgroups follow each other as fast as can be.

    More slots also keep more state between steps, but so would more `host_memory`, which the user chooses. So what is
    compared is the time for each subgroup that goes out and in.
    """
    streamed = mix.streamed[0].count + mix.streamed[1].count
    costs = {
        slots: estimate_mix(replace(mix, slots=slots), shares, rates).step_s / (streamed - slots)
        for slots in STAGING_SLOTS
        if slots < streamed
    }
    enough = (1 + WORTH_A_SLOT) * min(costs.values(), default=0.0)
    return next((slots for slots, cost_s in costs.items() if cost_s <= enough), min(STAGING_SLOTS[0], streamed))


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
    kinds = [[number for number in range(count) if plan.homes[number] is home] for home in (Home.HOST, Home.STREAMED)]
    largest = max((sizes[number] for kind in kinds for number in kind), default=0)
    slots = plan.budgets.gpu_staging_bytes // largest if largest else 0
    slots = slots if plan.budgets.borrows else min(GPU_STAGING_SLOTS, slots)
    if not slots:
        return plan.placements, mix
    shares = plan.shares(rates)
    base = replace(mix, gpu_slots=slots)
    of_kind = [[sizes[n] if n in members else 0 for n in range(count)] for members in map(frozenset, kinds)]

    def moved(parts: Sequence[tuple[int, float]]) -> Mix:
        """Return the mix with so many resident and streamed subgroups, and their bytes, on the GPU."""
        on_cpu = base.host[0].nbytes + base.streamed[0].nbytes
        left = 1 - sum(nbytes for _, nbytes in parts) / on_cpu
        return replace(
            base,
            host=_split(base.host[0], *parts[0]),
            streamed=_split(base.streamed[0], *parts[1]),
            pushed_bytes=base.pushed_bytes * left,
            brought_bytes=base.brought_bytes * left,
        )

    def cost_s(mix: Mix) -> float:
        return estimate_mix(mix, shares, rates).step_s

    def spread(counts: tuple[int, int]) -> Mix:
        totals = (base.host[0], base.streamed[0])
        parts = [(n, total.nbytes * n / total.count if n else 0) for n, total in zip(counts, totals, strict=True)]
        return moved(parts)

    @functools.cache
    def spread_cost_s(counts: tuple[int, int]) -> float:
        return cost_s(spread(counts))

    most = len(kinds[0]), len(kinds[1])
    best = min(_coarse(*most), key=spread_cost_s)
    step = max(most) // COARSE_SHARES // 2 + 1
    while step:
        near = [
            (best[0] + a * step, best[1] + b * step)
            for a, b in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (1, -1), (-1, 1))
            if 0 <= best[0] + a * step <= most[0] and 0 <= best[1] + b * step <= most[1]
        ]
        better = min(near, key=spread_cost_s)
        step = step if better != best else step // 2
        best = better
    numbers = [*_spread(kinds[0], best[0]), *_spread(kinds[1], best[1])]
    exact = [(len(part), sum(sizes[n] for n in part)) for part in (numbers[: best[0]], numbers[best[0] :])]
    choices: list[tuple[Mix, Sequence[int]]] = [(base, []), (moved(exact), numbers)]
    for k in _strides(count):
        picked = [[nbytes for nbytes in part[k - 1 :: k] if nbytes] for part in of_kind]
        choices.append((moved([(len(part), sum(part)) for part in picked]), range(k - 1, count, k)))
    found, chosen = min(choices, key=lambda choice: cost_s(choice[0]))
    if cost_s(base) <= (1 + WORTH_THE_GPU) * cost_s(found):
        return plan.placements, mix
    return _placed(plan, chosen), found


def _split(part: Part, count: int, nbytes: float) -> tuple[Part, Part]:
    return Part(part.count - count, part.nbytes - nbytes), Part(count, nbytes)


def _coarse(resident: int, streamed: int) -> Iterator[tuple[int, int]]:
    """Return how many of each to try first: nothing, and even shares of both, of either alone."""
    yield 0, 0
    for part in range(1, COARSE_SHARES + 1):
        a, b = resident * part // COARSE_SHARES, streamed * part // COARSE_SHARES
        yield from dict.fromkeys(((a, b), (a, 0), (0, b), (resident, b), (a, streamed)))


def _strides(count: int) -> list[int]:
    """Return all strides up to `EVERY_STRIDE`, and of the longer ones the first that picks so many subgroups."""
    found, k = [], 1
    while k <= count:
        found.append(k)
        k = k + 1 if k < EVERY_STRIDE else count // (count // k) + 1
    return found
