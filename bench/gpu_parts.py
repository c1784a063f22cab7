"""What the parts are worth that the engine has for a GPU: steps with each and without, on nodes that are not there.

Three models: 8e9 parameters of Llama's shapes on an H100 and on an RTX 4090, with all state in host memory, and 4,000
small tensors on the H100. Each is tried as it is, with calls that take longer, with copy engines that stay with a
stream, and with rates of the CPU or of the link that the planner takes for a fifth less, or a tenth more, than they
are. Steps are those of `offload.predict`, backward passes those of `_gpu_backward.py`, so nothing varies. The calls
that small tensors cost are counted on the product's own code.

What is shown is the part of a step, or of the first step, that each saves beside the smallest change that leaves it
out. A backward pass that takes longer counts, too, by its seconds over those of a step. A part is worth its code
where that is `WORTH` or more anywhere. What was found of parts that have gone since stands in `GONE`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any

from _gpu_backward import AddedAtOnce, Calls, LeavesAlways, backward_s, passing_s
from _gpu_node import NODE, budgets_of, changed, layout_of
from _harness import Row, Run, main
from _worker import gpu_share

import offload.predict.timing as timing
from offload.cli.machine import USUAL_CORES
from offload.dtypes import ITEM_BYTES
from offload.layout import Layout
from offload.limits import Limits
from offload.measure import observe, typical
from offload.memory.touching import MOST_THREADS
from offload.plan import GpuRates, PathBudget, PathRates, Plan, Rates, choose_plan
from offload.plan.budget import HIDDEN_PIECE_BYTES
from offload.plan.cost import CALLS
from offload.predict import Prediction
from offload.predict.predict import with_backward_s
from offload.predict.streams import Order, Work
from offload.schedule.operations import Operation, Sweep, Transfer
from offload.schedule.operations import RunVisit as Update
from offload.schedule.timeline import ENGINE
from offload.session.placement_review import PlacementReview

prediction = importlib.import_module("offload.predict.predict")  # the package has a function of that name

WORTH = 0.02
"""What a part has to save of a step somewhere."""

H100 = replace(NODE, gpu=GpuRates(3.35e12 * 12 / 28, 50e9, 50e9), compute_flops_per_s=0.4 * 989e12)
RTX_4090 = Rates(
    51.2e9 * 12 / 28,
    gpu=GpuRates(1008e9 * 12 / 28, 25e9, 25e9),
    memory_bytes_per_s=51.2e9,
    compute_flops_per_s=0.4 * 165.2e12,
    reaction_s=NODE.reaction_s,
    operation_s=NODE.operation_s,
)
"""With a host of two channels of DDR4-3200, as `offload machine` assumes."""

DRIVES = (PathRates(3.4e9, 3.4e9, read_alone_bytes_per_s=6.8e9, write_alone_bytes_per_s=6.8e9),) * 8
"""For parts that are about streamed state: NVMe drives of PCIe 4, each of one bandwidth for both ways. A DGX H100 has
eight."""

USUAL = Calls()
TOKENS = 8192
"""Of a backward pass."""

TOUCHED_BYTES_PER_S = 23e9
"""By one thread, in pages of 2 MiB: measured by hand on a virtual server core, 2026-11-28; down to 5e9 while that was
shared. The slower one thread is, the more others save."""

PIN_BYTES_PER_S = 511 * 2**30 / 55
"""Registering host memory that is there (docs/gpu.md)."""

MOST_STEPS = 24
"""Steps within which a placement has settled."""


@dataclass(frozen=True)
class Model:
    """What is trained, and on what.

    Attributes:
        name: Of it.
        sizes: Elements of its tensors.
        rates: Of the node.
        keep_grads: Whether the GPU has room for gradients beside 16-bit weights.
        placement: What the GPU updates: no more than there is room for the gradients of, which stay there.
    """

    name: str
    sizes: tuple[int, ...] = field(repr=False)
    rates: Rates = field(repr=False)
    keep_grads: bool
    placement: str | float = "auto"

    @cached_property
    def layout(self) -> Layout:
        """Its layout, as a session would have it."""
        return layout_of(self.sizes)

    @property
    def backward_s(self) -> float:
        """What the GPU computes in a backward pass: twice what forward takes."""
        return 4 * sum(self.sizes) * TOKENS / self.rates.compute_flops_per_s


LAYER = [4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, *3 * [14336 * 4096], 4096, 4096]
LLAMA = (128256 * 4096, *32 * LAYER, 4096, 128256 * 4096)
"""The tensors of Llama 3 8B."""
MODELS = (
    Model("8B, H100", LLAMA, H100, True),
    Model("8B, RTX 4090", LLAMA, RTX_4090, False, 0.25),
    Model("4,000 tensors, H100", (1 << 16,) * 4000, H100, True),
)


@dataclass(frozen=True)
class Case:
    """A model under one circumstance.

    Attributes:
        model: Which.
        name: Of the circumstance.
        calls: What calls of the GPU's runtime take.
        order: How copy engines choose.
        cpu, link: What the planner takes these for, over what they are.
    """

    model: Model
    name: str
    calls: Calls = USUAL
    order: Order = Order.READINESS
    cpu: float = 1.0
    link: float = 1.0

    @property
    def rates(self) -> Rates:
        """What the node does."""
        return replace(self.model.rates, gpu=replace(self.model.rates.gpu, call_s=self.calls.copy_s))

    @property
    def known(self) -> Rates:
        """What the planner takes it for."""
        rates = self.rates
        return replace(rates, cpu_bytes_per_s=self.cpu * rates.cpu_bytes_per_s, gpu=rates.gpu.times(self.link))

    def step(self, plan: Plan, **how: Any) -> float:
        return self.predicted(plan, **how).step_s

    def predicted(
        self, plan: Plan, *, first: bool = False, gathers: bool = True, kind: Any = None, **how: Any
    ) -> Prediction:
        """Return a step, or the first one."""
        made = partial(kind or CountedCalls, calls=self.calls, gathers=gathers, order=self.order, **how)
        rates = replace(self.rates, paths=DRIVES[: len(plan.budgets.paths)])
        with changed((prediction, "TimingExecutor", made)):
            found: Prediction = prediction.predict(plan, rates, steps=1 if first else 2)
        return found


@cache
def plan_of(case: Case, keep_grads: bool | None = None, streamed: float = 0.0, placement: str | float = "") -> Plan:
    """Return the plan of a session; `streamed` is the part of its state at home on drives, not in host memory."""
    model, drives = case.model, DRIVES if streamed else ()
    budgets = replace(
        budgets_of(model.layout, model.keep_grads if keep_grads is None else keep_grads),
        host_bytes=int((1 - streamed) * model.layout.state_bytes),
        paths=tuple(PathBudget(f"/nvme{number}", 1 << 50) for number in range(len(drives))),
        speculates=True,
    )
    return choose_plan(model.layout, budgets, replace(case.known, paths=drives), placement or model.placement)


passing = cache(passing_s)


class CountedCalls(timing.TimingExecutor):
    """Calls take what each takes; those for small tensors are counted on the product's own code."""

    def __init__(self, plan: Plan, rates: Rates, *, calls: Calls, gathers: bool, **how: Any) -> None:
        super().__init__(plan, rates, **how)
        self._each = calls
        self._has_engine_lane, self._call_s = True, 1.0  # `_count_calls` returns seconds
        self._passing = cache(lambda sizes: passing(plan, sizes, calls, rates, gathers))

    def _passing_s(self, subgroup: int) -> tuple[float, float]:
        segments = self._plan.layout.subgroups[subgroup]
        sizes = tuple(segment.numel * int(ITEM_BYTES[segments.dtype]) for segment in segments.segments)
        return self._passing(sizes)

    def _count_calls(self, operation: Operation) -> Any:
        each = self._each
        if isinstance(operation, Transfer) and operation.what == "weights":
            return 2 * each.event_s + self._passing_s(operation.subgroup)[operation.lane == "h2d"]
        if isinstance(operation, Transfer):
            return each.copy_s + (CALLS - 1) * each.event_s
        on_gpu = isinstance(operation, Update) and operation.visit.gpu
        return each.launch_s + (CALLS - 1) * each.event_s if on_gpu else 0

    def _fetch_gradients(self, subgroup: int, ready_s: float) -> float:
        nbytes = self._to_fetch.pop(subgroup)
        ready_s = self._engine_work(ready_s, 2 * self._each.event_s + self._passing_s(subgroup)[0])
        self._gradient_copies[subgroup] = self._copy(self.gradient_stream, "d2h", subgroup, nbytes, ready_s)
        return ready_s


# Parts --------------------------------------------------------------------------------------------------------------

Times = tuple[str, float, float, float]
"""A step or the first one; seconds of what a part changes, with it and without; and seconds of the step."""

STEP, FIRST = "step", "first step"


def of_steps(case: Case, plan: Plan, *changes: Any, **without: Any) -> Iterator[Times]:
    """Yield a step and the first one, as they are and with something changed."""
    for name, first in ((STEP, False), (FIRST, True)):
        with_s = case.step(plan, first=first)
        with changed(*changes):
            without_s = case.step(plan, first=first, **without)
        yield name, with_s, without_s, with_s


def pieces(case: Case) -> Iterator[Times]:
    """small tensors share copies; else each is copied alone"""
    yield from of_steps(case, plan_of(case), gathers=False)


class User(CountedCalls):
    """The user copies a batch in as a step begins behind forward, and a loss out in its midst.

    Attributes:
        asked: These copies, of the last step.
    """

    step_s = 0.0
    last: User

    def _begin(self, sweep: Sweep) -> None:
        super()._begin(sweep)
        User.last = self
        self.asked = [
            self.streams.put(Work(f"user {way}", way, -1, 1 << 16, self.now_s + after * self.step_s))
            for way, after in (("h2d", 0.05), ("d2h", 0.5))
        ]


def hidden_pieces(case: Case) -> Iterator[Times]:
    """copies of a hidden step are cut, the user's get in between; else whole copies; what the user waits for a
    batch and a loss counts
    """
    plan = plan_of(case)
    step_s = case.step(plan)
    waits = []
    for piece_bytes in (HIDDEN_PIECE_BYTES, None):
        with changed((User, "step_s", step_s)):
            took_s = case.step(plan, kind=User, piece_bytes=piece_bytes)
        waits.append(took_s + sum(work.ends_s - work.given_s for work in User.last.asked))
    yield STEP, *waits, step_s


def of_backward(case: Case, with_how: dict[str, Any], without_how: dict[str, Any]) -> Iterator[Times]:
    """Yield two backward passes of gradients that leave, over a step and over the first one."""
    plan = plan_of(case, keep_grads=False)
    with_s, without_s = (
        backward_s(plan, case.rates, case.calls, case.model.backward_s, **how) for how in (with_how, without_how)
    )
    for name, first in ((STEP, False), (FIRST, True)):
        yield name, with_s, without_s, case.step(plan, first=first)


def additions(case: Case) -> Iterator[Times]:
    """gradients of further passes are added in host memory behind backward; else backward waits for each buffer"""
    yield from of_backward(case, {"passes": 2}, {"passes": 2, "additions": AddedAtOnce})


def accumulations(case: Case) -> Iterator[Times]:
    """gradients of further passes are added on the GPU where they have stayed for it; else they are added in host
    memory, and brought back in the step

    What the GPU updates from host memory comes back there over the link.
    """
    plan = plan_of(case, keep_grads=False)
    back_s = gpu_share(plan) * 2 * sum(case.model.sizes) / case.rates.gpu.h2d_bytes_per_s
    for of, with_s, without_s, step_s in of_backward(case, {"passes": 2}, {"passes": 2, "kind": LeavesAlways}):
        yield of, with_s, without_s + back_s, step_s


def buckets(case: Case) -> Iterator[Times]:
    """small gradients leave together; else each leaves alone"""
    yield from of_backward(case, {}, {"limits": Limits(bucket_bytes=0)})


def ahead(case: Case) -> Iterator[Times]:
    """gradients are fetched ahead of their visits; else a visit's are fetched as it begins"""
    yield from of_steps(case, plan_of(case), (timing, "FETCHED_AHEAD", 0))


def coming(case: Case) -> Iterator[Times]:
    """gradients of streamed state are fetched as that comes; else in the order of visits

    A fifth of the state is streamed, over so many drives that the step is not bound by them.

    What is resident fills the waits, so visits of streamed state come before their turn. With a drive, or four, or
    with all state streamed, nothing is saved.
    """
    plan = plan_of(case, streamed=0.2)
    yield from of_steps(case, plan, (CountedCalls, "_fetch_with_state", lambda self, subgroup, ready_s: ready_s))


def review(case: Case) -> Iterator[Times]:
    """the placement is chosen again by what steps show; else the first choice stays

    Steps teach rates, as a session's do, and the product's review chooses by them.
    """
    plan = plan_of(case, placement="auto")
    parts: Any = SimpleNamespace(
        plan=plan,
        rates=case.known,
        config=SimpleNamespace(placement="auto"),
        machine=SimpleNamespace(is_open=False, saver=SimpleNamespace(under_way=None), broken=None),
        gradients=SimpleNamespace(have_arrived=lambda: False),
    )
    parts.use_replanned = lambda better: setattr(parts, "plan", better)
    chooses, observed = PlacementReview(parts, SimpleNamespace(settle=lambda: None)), [case.known]
    for _ in range(MOST_STEPS):
        observed = [*observed[-2:], observe(parts.rates, case.predicted(parts.plan).timeline)]
        parts.rates = typical(observed)
        chooses.note_learnt_step()
        chooses.review()
    with_s = case.step(parts.plan)
    yield STEP, with_s, case.step(plan), with_s


def touching(case: Case) -> Iterator[Times]:
    """memory is touched by many threads before it is pinned; else who pins it touches it, on one thread

    The session is opened before the first step, and counts as part of it.
    """
    plan, rates = plan_of(case), case.rates
    first_s, nbytes = case.step(plan, first=True), plan.host_bytes
    pinned_s = nbytes / PIN_BYTES_PER_S + first_s
    many = min(min(MOST_THREADS, USUAL_CORES) * TOUCHED_BYTES_PER_S, rates.memory_bytes_per_s / 2)
    with_s = nbytes / many + pinned_s
    yield FIRST, with_s, nbytes / TOUCHED_BYTES_PER_S + pinned_s, with_s


def speculation(case: Case) -> Iterator[Times]:
    """gradients that stay on the GPU are updated from in backward; else with `keep_grads=True` streamed state is
    updated in the step alone; with False the same is saved

    All state is streamed. What the engine's thread does for updates in backward it does meanwhile, too.
    """
    plan = plan_of(case, streamed=1.0)
    found = case.predicted(plan)
    found = replace(found, busy_s={lane: busy_s for lane, busy_s in found.busy_s.items() if lane != ENGINE})
    forward_s, passed_s = case.model.backward_s / 2, case.model.backward_s
    with_s = with_backward_s(found, plan, replace(case.rates, paths=DRIVES), forward_s, passed_s, follows=False)
    yield STEP, with_s, forward_s + passed_s + found.step_s, found.step_s


PARTS = (pieces, hidden_pieces, additions, accumulations, buckets, ahead, coming, review, touching, speculation)
"""Each with what it does and what is instead."""
KEEPS = (ahead, coming, speculation)
"""Those that are there only where gradients may stay on the GPU."""

GONE: Row = {
    "large": {
        "what": "a gradient of 8 MiB or more leaves at once",
        "without": "it waits for its bucket to fill, as others do; one pass, and a second one that is added",
        "saves": {each.name: {"as it is": 0.0, "most": 0.0} for each in MODELS},
    },
}
"""What was found of parts before they went, of all cases (2026-11-28)."""


def cases(smoke: bool) -> list[Case]:
    """Return all cases."""
    circumstances: dict[str, Row] = {
        "as it is": {},
        "15 us a copy, 40 us a launch": {"calls": Calls(copy_s=15e-6, launch_s=40e-6)},
        "engines stay with a stream": {"order": Order.STAYS},
        "CPU read 20% too low": {"cpu": 0.8},
        "CPU read 10% too high": {"cpu": 1.1},
        "link read 20% too low": {"link": 0.8},
        "link read 10% too high": {"link": 1.1},
    }
    if smoke:
        circumstances = {name: how for name, how in circumstances.items() if not name.endswith("high")}
    chosen = MODELS[2:] if smoke else MODELS
    return [Case(model, name, **how) for model in chosen for name, how in circumstances.items()]


def measure(run: Run) -> None:
    rows, parts = [], {}
    for part in PARTS:
        name = part.__name__.replace("_", " ")
        what, without = " ".join(str(part.__doc__).partition("\n\n")[0].split()).split("; else ")
        saves: Row = {}
        for case in cases(run.smoke):
            model = case.model.name
            if part in KEEPS and not case.model.keep_grads:
                continue
            for of, with_s, without_s, step_s in part(case):
                saved = (without_s - with_s) / step_s
                rows.append({"part": name, "model": model, "case": case.name, "of": of, "saves": saved})
                rows[-1] |= {"with_s": with_s, "without_s": without_s, "step_s": step_s}
                best = saves.setdefault(model, {"as it is": saved, "most": -math.inf})
                if saved > best["most"]:
                    best |= {"most": saved, "case": case.name, "of": of}
        for model, found in saves.items():
            most = f"most {found['most']:.1%} of a {found['of']} ({found['case']})"
            print(f"{name:<14} {model:<20} {found['as it is']:>8.1%}; {most}", flush=True)
        parts[name] = {"what": what, "without": without, "saves": saves}
        most_saved = max(found["most"] for found in saves.values())
        run.at_least(f"{what}: saves of a step, at most", most_saved, WORTH)
    run.results |= {"parts": parts, "gone": GONE, "rows": rows}
    run.checksums.append(hashlib.sha256(json.dumps([row["of"] for row in rows]).encode()).hexdigest()[:16])


if __name__ == "__main__":
    main(__doc__, measure)
