"""What `offload plan` is asked, and what comes out: a rank's plan, what it takes of its node, and an iteration."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from offload.cli.node import (
    DRIVER_BYTES,
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    Use,
    check_fits,
    gpu_room,
    reserved_bytes,
    use_of,
)
from offload.cli.shapes import Shape
from offload.errors import ConfigError, InfeasiblePlanError
from offload.formats import EXACT, STATE_FORMATS, StateSpec
from offload.rules import RULES
from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.layout import Layout
    from offload.measure import RatesFile
    from offload.plan import Budgets, Estimate, Plan, Rates
    from offload.predict import Prediction

FLOPS_PER_WEIGHT = {"forward": 2, "backward": 4}
"""For each token; backward also repeats the forward pass where activations are recomputed. Attention's own products
are left out; equation 3 of Narayanan et al. (SC '21, arXiv 2104.04473) gives their share."""

MOST_SUBGROUPS = 1 << 13
"""Of a rank: each is placed several times. Where their size is left to us, they are larger instead."""
MOST_NUMEL = 5 * 10**11
"""Parameters of a rank that are planned for: 5.5 TiB of Adam's state."""
MOST_TILES = 1 << 17
"""Of a rank, if a step is to be simulated: some ten seconds' work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be predicted; sizes in bytes, all but `params`, `exact_params` and `rates` those of one rank.

    Attributes:
        params: Parameters of the whole model.
        nodes: How many there are, of `ranks` each.
        rates: Of a node; that of the update is of parameters with such state.
        keep_grads: Whether gradients stay on the GPU, if weights lie there, until the step.
        gradient_memory: Host memory for gradients, which leave it for the paths beyond; None for all of them.
        recompute: Whether backward repeats the forward pass.
        tokens: Tokens of one rank in an iteration; None to predict the step alone.
        rule: Name of the update rule.
        state_format: How its state is stored.
        exact_params: How many of `params` have exact state all the same.
        node_memory: Host memory of the node; None if that is not known.
        gpus: Its GPUs; None likewise.
        places: Directories of the first paths, or what else the rates call them; other paths have only a number.
        path_sizes: Bytes of each path, which all ranks of a node share; empty where unknown.
        shape: The model's; None where only its size is known. Activations are counted if it and `tokens` are.
        accumulate: Micro-steps that the tokens come in.
        guessed: What is known of no rate of the format, a sentence that is among the warnings.
        warnings: What the reader should know of the rates.
        nodes_memory: What of `host_memory` each memory node has, by its number; less of the slowest where
            `host_memory` is less than all, and more of the fastest where it is more. Empty where it is of one kind.
    """

    params: int
    rates: Rates
    nodes: int = 1
    ranks: int = 1
    host_memory: int = 0
    gpu_memory: int = 0
    gpu_staging: int | None = None
    gradient_memory: int | None = None
    staging_memory: int | None = None
    path_bytes: int = 1 << 60
    subgroup_numel: int | None = None
    placement: str | float = "auto"
    weights_on_gpu: bool = False
    keep_grads: bool = False
    tokens: int | None = None
    recompute: bool = False
    rule: str = "adam"
    state_format: str = "exact"
    exact_params: int = 0
    node_memory: int | None = None
    gpus: int | None = None
    places: tuple[str, ...] = ()
    path_sizes: tuple[int | None, ...] = ()
    shape: Shape | None = None
    accumulate: int = 1
    guessed: str = ""
    warnings: tuple[str, ...] = ()
    nodes_memory: Mapping[int, int] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """What stands behind a time that rests on a rate which nobody has measured."""
        return "*" if self.guessed else ""

    def marked(self, warnings: Sequence[str]) -> list[str]:
        """Return warnings as text: what the mark stands for begins with it."""
        return [f"* {text}" if text == self.guessed else text for text in warnings]

    @property
    def gradients_leave(self) -> bool:
        """Whether gradients leave host memory for the paths."""
        nbytes = GRADIENT_BYTES * math.ceil(self.params / self.all_ranks)
        return self.gradient_memory is not None and self.gradient_memory < nbytes

    @property
    def all_ranks(self) -> int:
        """Ranks of all nodes: each has its part of the model's state."""
        return self.nodes * self.ranks

    @property
    def beside(self) -> dict[str, int]:
        """Bytes that forward and backward take where the weights lie, by what for; empty where that is not known."""
        if self.shape is None or self.tokens is None:
            return {}
        tokens = math.ceil(self.tokens / self.accumulate)
        found = {"activations": self.shape.activation_bytes(tokens, recompute=self.recompute)}
        if self.all_ranks > 1:
            found["gathered weights"] = self.shape.gathered_bytes
        if self.weights_on_gpu:
            found["driver"] = DRIVER_BYTES
            if not self.keep_grads:  # the largest gradient leaves when all of it is there
                found["gradients on their way"] = GRADIENT_BYTES * self.shape.largest_params
        return found

    @property
    def least_gpu_bytes(self) -> int:
        """Bytes of GPU memory that a rank takes whose weights lie there, wherever its state does."""
        numel = math.ceil(self.params / self.all_ranks)
        return (WEIGHT_BYTES + self.keep_grads * GRADIENT_BYTES) * numel + sum(self.beside.values())

    def path_room(self, number: int) -> int:
        """Return the bytes that a rank may use of a path."""
        size = self.path_sizes[number] if number < len(self.path_sizes) else None
        return self.path_bytes if size is None else min(self.path_bytes, size // self.ranks)

    def path_name(self, number: int) -> str:
        """Return what a path is called, by its number, as in the names of lanes, and where it is."""
        place = self.places[number] if number < len(self.places) else ""
        return f"path {number} ({place})" if place else f"path {number}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes out.

    Attributes:
        question: What was asked.
        rates: One rank's part of the node's.
        plan: Its plan.
        use: What it takes of its node.
        estimate: The plan's cost in closed form, with the bound.
        step_s: Seconds of a step: the simulator's where it was run, else the closed form's.
        prediction: The simulated step, or None.
        forward_s: Seconds of forward, or None where nothing is known of it.
        backward_s: Seconds of backward, gradients on their way out included, or None.
        overlapped_s: Seconds of an iteration whose step is hidden in "forward" (`overlap_forward`), "backward"
            (`overlap="backward"`) or "both", where it can be.
    """

    question: Question
    rates: Rates
    plan: Plan
    use: Use
    estimate: Estimate
    step_s: float
    prediction: Prediction | None
    forward_s: float | None
    backward_s: float | None
    overlapped_s: Mapping[str, float]

    @property
    def iteration_s(self) -> float:
        """Seconds of what is known of an iteration."""
        return (self.forward_s or 0.0) + (self.backward_s or 0.0) + self.step_s

    @property
    def ahead(self) -> Plan:
        """The plan of a rank whose steps are hidden in backward."""
        return _ahead(self.plan)

    @property
    def warnings(self) -> list[str]:
        """What the reader should know of the rates, and of what was left out to bound the work."""
        from offload.plan.budget import AUTO_SUBGROUP_NUMEL

        found = [*self.question.warnings]
        most = max(subgroup.numel for subgroup in self.plan.layout.subgroups)
        if self.question.subgroup_numel is None and most > max(AUTO_SUBGROUP_NUMEL):
            found.append(
                f"planned with subgroups of {most:,} elements, so that there are {MOST_SUBGROUPS:,} at most; a "
                "session chooses smaller ones, with smaller buffers"
            )
        memory_bytes, ranks = self.question.node_memory, self.question.ranks
        if memory_bytes is not None:
            left, reserved = memory_bytes - ranks * self.use.host_bytes, reserved_bytes(memory_bytes, ranks)
            if left < reserved:
                found.append(
                    f"{format_bytes(left)} of host memory are left to the system and the rest of the processes; "
                    f"{format_bytes(reserved)} are advisable: lower --host-memory"
                )
        size, taken = self.question.rates.gpu.memory_bytes, self.use.gpu_bytes
        if taken and size and taken > gpu_room(size):
            found.append(
                f"{format_bytes(size - taken)} of the GPU are left free; {format_bytes(size - gpu_room(size))} are "
                "advisable, as activations are an estimate"
            )
        if self.prediction is None:
            found.append(f"by the closed form: steps of more than {MOST_TILES:,} tiles are not simulated")
        return found


@lru_cache(maxsize=4)
def _layout(numel: int, exact_numel: int, subgroup_numel: int, state: StateSpec) -> Layout:
    """Return the layout of one rank's part of a model; advice asks about one again and again."""
    from offload.dtypes import DtypeCode
    from offload.layout import Parameter, build_layout

    parameters = [
        Parameter("model", numel - exact_numel, DtypeCode.BFLOAT16, 0),
        Parameter("kept exact", exact_numel, DtypeCode.BFLOAT16, 0, exact=True),
    ]
    return build_layout(parameters if exact_numel else parameters[:1], subgroup_numel, state=state)


def _least_subgroup_numel(numel: int) -> int:
    """Return the least size of the subgroups of a rank's part that is planned; aligned as all sizes are."""
    return math.ceil(numel / MOST_SUBGROUPS / 4096) * 4096


def _budgets(question: Question) -> tuple[Layout, Budgets]:
    """Return one rank's layout, and the bytes that each tier has for it."""
    from offload.plan import Budgets, NodeBudget, PathBudget, choose_subgroup_numel

    numel = math.ceil(question.params / question.all_ranks)
    if numel > MOST_NUMEL:
        allowed = f"each rank has {numel:,} of them, and {MOST_NUMEL:,} are the most; give more --ranks or --nodes"
        raise ConfigError("--params", question.params, allowed)
    state = StateSpec(RULES[question.rule], STATE_FORMATS[question.state_format])
    subgroup_numel = question.subgroup_numel
    if subgroup_numel is None:
        usual_numel = choose_subgroup_numel(numel, question.staging_memory, state)
        subgroup_numel = max(usual_numel, _least_subgroup_numel(numel))
    elif subgroup_numel < _least_subgroup_numel(numel):
        allowed = f"a rank has {numel:,} parameters and at most {MOST_SUBGROUPS:,} subgroups are planned; "
        raise ConfigError("subgroup_numel", subgroup_numel, f"{allowed}give {_least_subgroup_numel(numel):,} or more")
    exact_numel = math.ceil(question.exact_params / question.all_ranks)
    layout, rates = _layout(numel, exact_numel, subgroup_numel, state), question.rates
    gpu_staging_bytes = 4 * layout.max_subgroup_bytes if question.gpu_staging is None else question.gpu_staging
    nodes, left = [], question.host_memory
    for number in rates.fastest_first(question.nodes_memory):
        nodes.append(NodeBudget(number, min(left, question.nodes_memory[number])))
        left -= nodes[-1].nbytes
    if nodes:
        nodes[0] = nodes[0]._replace(nbytes=nodes[0].nbytes + left)
    return layout, Budgets(
        host_bytes=question.host_memory,
        nodes=tuple(nodes),
        staging_bytes=question.staging_memory,
        paths=tuple(PathBudget(question.path_name(n), question.path_room(n)) for n in range(len(rates.paths))),
        gradient_bytes=GRADIENT_BYTES * numel,
        gradients_kept_bytes=question.gradient_memory if question.gradients_leave else None,
        follow_rates=True,
        gpu_bytes=question.gpu_memory,
        gpu_staging_bytes=gpu_staging_bytes,
        weights_on_gpu=question.weights_on_gpu,
        gradients_on_gpu=question.weights_on_gpu and question.keep_grads,
    )


def _rates(question: Question) -> Rates:
    """Return what one rank has of the node's rates.

    Raises:
        ConfigError: There are more ranks than GPUs, and each is to have one.
    """
    from offload.plan import NO_GPU

    rates, gpus = question.rates.shared_by(question.ranks), question.gpus
    if gpus is None or question.ranks <= gpus:
        return rates
    if question.weights_on_gpu or question.gpu_memory or question.placement not in ("auto", "cpu"):
        rates.gpu.check_used(planned=True)
        allowed = f"the node has {gpus} GPUs, one for each rank; give --gpus for another node"
        raise ConfigError("--ranks", question.ranks, allowed)
    return replace(rates, gpu=NO_GPU)


def _plan(question: Question, rates: Rates) -> Plan:
    """Return one rank's plan, at its part of the rates."""
    from offload.plan import choose_plan

    layout, budgets = _budgets(question)
    plan = choose_plan(layout, budgets, rates, question.placement)
    if question.weights_on_gpu:  # gradients of what the GPU updates stay there
        on_cpu = sum(s.numel for s in layout.subgroups if not plan.updates_on_gpu(s.index))
        plan = replace(plan, budgets=replace(budgets, gradient_bytes=GRADIENT_BYTES * on_cpu))
    return plan.counting_buffers(int(question.weights_on_gpu))


def _ahead(plan: Plan) -> Plan:
    """Return a plan with updates in backward: gradients of what the GPU updates then come to host memory, too."""
    if not plan.weights_on_gpu:
        return replace(plan, budgets=replace(plan.budgets, speculates=True))
    streamed = (s for s in plan.layout.subgroups if plan.updates_on_gpu(s.index) and not plan.is_resident(s.index))
    gradient_bytes = plan.budgets.gradient_bytes + GRADIENT_BYTES * sum(subgroup.numel for subgroup in streamed)
    return replace(plan, budgets=replace(plan.budgets, speculates=True, gradient_bytes=gradient_bytes))


def use(question: Question) -> Use:
    """Return what a rank takes, whether or not there is so much; `InfeasiblePlanError` if no plan is made."""
    return use_of(_plan(question, _rates(question)), question.beside)


def ask(
    question: Question,
    *,
    simulate: bool = True,
    timeline: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Answer:
    """Plan and predict.

    Args:
        question: What is to be predicted.
        simulate: Whether to run the simulator, or be content with the closed form.
        timeline: Whether the simulated step has a timeline, also where nothing is known of forward and backward.
        report: Told how far the simulator is.

    Raises:
        ConfigError: If a value makes no sense, or there are more ranks than GPUs.
        InfeasiblePlanError: If the state does not fit, or all ranks take more than the node has.
    """
    from offload.plan import estimate
    from offload.predict import predict
    from offload.predict.predict import with_backward_s, with_forward_s

    rates = _rates(question)
    plan = _plan(question, rates)
    taken = use_of(plan, question.beside)
    check_fits(question.node_memory, question.ranks, taken, rates)
    cost = estimate(plan, rates)
    forward_s, backward_s = _forward_backward_s(question, rates, plan)
    if backward_s is not None and plan.gradient_buffers:  # gradients are written meanwhile
        each = zip(plan.shares(rates), rates.paths, strict=True)
        backward_s = max(backward_s, *(plan.left_gradient_bytes * part / path.write.alone for part, path in each))
    follows = forward_s is not None
    simulate = simulate and sum(subgroup.tile_count for subgroup in plan.layout.subgroups) <= MOST_TILES
    prediction = predict(plan, rates, steps=2, timeline=timeline or follows, report=report) if simulate else None
    step_s = prediction.step_s if prediction else cost.step_s
    overlapped_s: dict[str, float] = {}
    if prediction is not None and forward_s is not None and backward_s is not None:
        on_cpu = not question.weights_on_gpu
        overlapped_s = {"forward": backward_s + with_forward_s(prediction, forward_s, on_cpu=on_cpu)}
        if not plan.gradient_buffers:
            ahead = _ahead(plan)
            for hidden_in, follows in (("backward", False), ("both", True)):
                overlapped_s[hidden_in] = with_backward_s(
                    prediction, ahead, rates, forward_s, backward_s, follows=follows
                )
    return Answer(question, rates, plan, taken, cost, step_s, prediction, forward_s, backward_s, overlapped_s)


def _forward_backward_s(question: Question, rates: Rates, plan: Plan) -> tuple[float | None, float | None]:
    if question.tokens is None or not rates.compute_flops_per_s:
        return None, None
    unit_s = question.params * question.tokens / rates.compute_flops_per_s
    forward_s = FLOPS_PER_WEIGHT["forward"] * unit_s
    backward_s = FLOPS_PER_WEIGHT["backward"] * unit_s + (forward_s if question.recompute else 0.0)
    if question.weights_on_gpu and not question.keep_grads:
        # Gradients of what the CPU updates leave the GPU meanwhile.
        subgroups = plan.layout.subgroups
        nbytes = sum(GRADIENT_BYTES * s.numel for s in subgroups if not plan.updates_on_gpu(s.index))
        backward_s = max(backward_s, nbytes / rates.gpu.d2h.alone)
    return forward_s, backward_s


def least(question: Question) -> Use | None:
    """Return what a rank takes with the least `host_memory` that works, or None if none does."""
    from offload.plan import make_plan

    layout, _ = _budgets(question)
    ends = [0, *itertools.accumulate(layout.subgroup_bytes)]

    def planned(resident: int) -> Plan:
        return make_plan(*_budgets(replace(question, host_memory=ends[resident])))

    def works(resident: int) -> bool:
        try:
            planned(resident)
        except InfeasiblePlanError:
            return False
        return True

    few = bisect.bisect_left(range(len(ends)), True, key=works)
    if few == len(ends):
        return None
    if not question.weights_on_gpu:  # else what the GPU updates has its gradients there
        return use_of(planned(few).counting_buffers(0), question.beside)
    return use(replace(question, host_memory=ends[few]))


def in_format(question: Question, name: str, file: RatesFile, exact_params: int) -> Question:
    """Return a question about state in another format, at its rates.

    Args:
        question: About the same model.
        name: The format.
        file: The machine's rates.
        exact_params: Parameters that are kept exact where others are stored in blocks.
    """
    state_format = STATE_FORMATS[name]
    if not state_format.shares_scales:
        exact_params = 0
    numels = {state_format: question.params - exact_params} | ({EXACT: exact_params} if exact_params else {})
    guesses = file.guesses(numels)
    others = tuple(text for text in question.warnings if text != question.guessed)
    return replace(
        question,
        rates=replace(question.rates, cpu_bytes_per_s=file.cpu_rate(numels)),
        state_format=name,
        exact_params=exact_params,
        guessed=guesses,
        warnings=(*others, *filter(None, [guesses])),
    )


def unknown_words(question: Question) -> str:
    """Return what has to be given so that forward and backward are predicted, too."""
    reason = "give --tokens" if question.tokens is None else "the rates know no FLOP/s; give --flops"
    return f"forward and backward: unknown ({reason})"


def parked(answer: Answer) -> dict[str, float]:
    """Return what `park` gives back between phases of a rank's memory, and its seconds; empty without room."""
    from offload.plan import Home

    plan, rates, host = answer.plan, answer.rates, answer.use.host
    moved_bytes = plan.home_bytes[Home.HOST] + plan.home_bytes[Home.GPU] + plan.staging_bytes
    room = sum(path.available_bytes for path in plan.budgets.paths) - plan.storage_bytes
    if not rates.paths or room < moved_bytes:
        return {}
    return {
        "host_bytes": host["state"] + host["gradients"] + host["buffers and tables"],
        "gpu_bytes": answer.use.gpu.get("state", 0) + answer.use.gpu.get("staging", 0),
        "seconds": moved_bytes / sum(path.write.alone for path in rates.paths),
    }
