"""`offload plan`: predicts an iteration for a model, a machine and budgets; what bounds it, and what would help."""

from __future__ import annotations

import argparse
import bisect
import contextlib
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.machine import WORDS, add_words, described, is_described
from offload.cli.node import (
    DRIVER_BYTES,
    GPU,
    GRADIENT_BYTES,
    STREAMED_WEIGHTS,
    WEIGHT_BYTES,
    Use,
    check_fits,
    gpu_room,
    node_of,
    reserved_bytes,
    shares,
    use_of,
)
from offload.cli.progress import Progress
from offload.cli.shapes import MODELS, Shape, parse_model
from offload.cli.values import (
    MAX_RANKS,
    add_output,
    add_value,
    parse_count,
    parse_memory,
    parse_number,
    parse_output,
    parse_path,
    parse_seconds,
    read_values,
    tell,
)
from offload.config import EXACT_NAMES, OffloadConfig, parse_bytes
from offload.errors import ConfigError, InfeasiblePlanError, OffloadError, PlanError
from offload.formats import EXACT, STATE_FORMATS, StateSpec
from offload.rules import RULES
from offload.units import DAY_S, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from offload.cli.advise import Choices
    from offload.layout import Layout
    from offload.measure import RatesFile
    from offload.pictures.draw import Tier
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
MOST_LAYERS, MOST_MODULES = 1_000, 70_000
"""Of a model that a configuration describes, modules and parameters together; each takes a tenth of a millisecond."""

MOST_DRAWN = 50_000
"""Operations of a step that is drawn."""

WORTH_SWITCHING = 0.02
"""Part of a rank's least host memory below which one switch more is not worth it."""

HELP_HOST = 0.25
"""Part by which host memory is raised to see what that would bring."""

_EPILOG = """\
examples:
  offload plan --model llama-8b --gpu rtx-4090 --host 64GiB --drive 7GB/s,5GB/s:2TB --cores 16 --tokens 2048
  offload plan --model llama-8b --gpu rtx-4090 --link 25GB/s --host 64GiB --drive 3.5GB/s:2TB --tokens 2048 --advise
  offload plan --params 13e9 --ranks 4 --rates h100-node --host-memory 40GiB
  offload plan --config config.json --rates node.json --host-memory 64GiB --gpu-memory 10GiB --tokens 8192 \\
      --flops 400e12

A machine is described in words, or by --rates; without either it is this one, as `offload probe` measured it. --rates
takes a file that `offload probe` or `offload machine` wrote, or the name of a machine that ships with the package:
  a100-node            4 x A100 40GB, 476.8 GiB of memory, no paths
  h100-node            4 x H100 80GB, 465.7 GiB of memory, no paths
  h100-node-nvme-pfs   4 x H100 80GB, 465.7 GiB of memory, NVMe of the node and network file system
Its rates are those of a node; --ranks processes share its CPU, its memory and its paths, and have a GPU each. Weights
and gradients of two bytes are counted with the state, each rank's part of them, as in ZeRO-3.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand `plan` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "plan",
        help="predict an iteration: where state lives, how long a step takes, what bounds it",
        description="Predict an iteration for a model size, rates and budgets, and say where time and memory go.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_mutually_exclusive_group()
    add_value(model, "--params", parse_count, "parameters of the model: 70e9, 70B")
    add_value(model, "--config", parse_path, "a Hugging Face config.json, or the directory it lies in")
    add_value(model, "--model", parse_model, f"a well-known model: {', '.join(MODELS)}", metavar="NAME")
    parser.add_argument("--rule", choices=tuple(RULES), default="adam", help="update rule (default: %(default)s)")
    form = "how state is stored (default: exact)"
    parser.add_argument("--state-format", choices=tuple(STATE_FORMATS), help=form)
    add_words(parser.add_argument_group("the machine, in words"))
    add_value(parser, "--rates", parse_path, "rates file, or the name of a known machine")
    add_value(parser, "--ranks", _parse_ranks, "processes that share the node (default: 1; one for each of --gpu)")
    add_value(parser, "--nodes", _parse_ranks, "such nodes, which share the model (default: 1)", default=1)
    parser.add_argument(
        "--shared-path",
        metavar="N[=SIZE]",
        action="append",
        default=[],
        help="path N (from 0) is one file system for all nodes, which moves SIZE a second each way in all (default: "
        "what the rates say of it); other paths are each node's own",
    )
    _add_budgets(parser.add_argument_group("budgets of each rank"))
    parser.add_argument(
        "--weights-on",
        choices=("cpu", "gpu"),
        help="where they lie, and are computed (default: gpu, if there is one)",
    )
    parser.add_argument(
        "--keep-grads",
        action=argparse.BooleanOptionalAction,
        help="gradients on the GPU stay until the step, as OffloadConfig(keep_grads=...) says; with --no-keep-grads, "
        "and under ZeRO, they leave during backward (default: they stay with one rank)",
    )
    node = parser.add_argument_group("each node, where it is another than that of the rates")
    add_value(node, "--node-memory", parse_bytes, "host memory that all ranks have together")
    gpus = partial(parse_count, least=0, most=MAX_RANKS)
    add_value(node, "--gpus", gpus, "number of GPUs; 0: the CPU computes, as --flops says")
    work = parser.add_argument_group("the rest of the iteration")
    add_value(work, "--tokens", parse_count, "tokens of each rank in an iteration: predicts forward and backward")
    reads = partial(parse_number, least=1, most=1e24, what="operations a second")
    add_value(work, "--flops", reads, "FLOP/s they reach (default: that of the rates)", metavar="F")
    work.add_argument("--recompute", action="store_true", help="activations are recomputed in backward")
    add_value(work, "--accumulate", parse_count, "micro-steps that the tokens come in (default: 1)", default=1)
    search = parser.add_argument_group("search, of what is not given")
    add_value(search, "--target", parse_seconds, "find the cheapest setting whose iteration takes no longer: 10s")
    search.add_argument("--advise", action="store_true", help="show the three best settings, and their config")
    wear = parser.add_argument_group("wear of the drives")
    add_value(wear, "--endurance", parse_bytes, "bytes that each drive may be written, by its data sheet")
    reads = partial(parse_number, least=1e-3, most=1e9)
    add_value(wear, "--steps-per-day", reads, "(default: one iteration after the other)")
    add_value(parser, "--picture", parse_output, "where the plan's picture goes: tiers and lanes, as .png or .html")
    add_output(parser, "print everything as JSON on stdout, and nothing else there")


def _add_budgets(sizes: Any) -> None:
    add = partial(add_value, sizes)
    host = "for state at home there (default: what the node can spare, if that is known); of each memory node of the "
    add("--host-memory", parse_memory, f"{host}rates as node0=200GiB,node2=400GiB")
    add("--gpu-memory", parse_bytes, "for state at home on the GPU (default: what activations leave, if known)")
    add("--gpu-staging", parse_bytes, "GPU memory through which other state is updated (default: 4 subgroups)")
    leave = "for gradients; beyond it they leave for the paths during backward (default: for all of them)"
    add("--gradient-memory", parse_bytes, leave)
    add("--staging-memory", parse_bytes, "that streamed state passes through (default: chosen)")
    sizes.add_argument("--path-count", metavar="N", help="use only the first N paths of the rates (default: all)")
    add("--path-bytes", parse_bytes, "what each path offers to a rank (default: no limit)", default=1 << 60)
    add("--subgroup-numel", parse_count, "most elements of a subgroup (default: chosen)")
    where = 'updates on the GPU: "auto", "cpu", "gpu", a share, or "stride:<k>" (default: auto)'
    add("--placement", _parse_placement, where, metavar="P", default="auto")


def _parse_ranks(field: str, value: str) -> int:
    return parse_count(field, value, most=MAX_RANKS)


def _parse_placement(field: str, value: str) -> str | float:
    if value in ("auto", "cpu", "gpu"):
        return value
    if value.startswith("stride:"):
        return f"stride:{parse_count(field, value.removeprefix('stride:'))}"
    return parse_number(field, value, least=0, most=1, what='"auto", "cpu", "gpu", "stride:<k>", or a share')


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


# What would help


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


def advice(answer: Answer) -> list[tuple[str, float]]:
    """Return what would make the iteration shorter, and by how many seconds, most first; by the closed form."""
    now_s = answer.estimate.step_s
    found = []
    for what, question in _changes(answer):
        try:
            saved_s = now_s - ask(question, simulate=False).step_s
        except (ConfigError, InfeasiblePlanError):  # there is no such memory, or no GPU
            continue
        if saved_s > 0.01 * now_s:
            found.append((what, saved_s))
    if answer.overlapped_s:
        from offload.cli.advise import Setting

        setting = Setting.of(answer)
        if setting.overlap != "off":
            found.append((f'overlap="{setting.overlap}"', answer.iteration_s - setting.iteration_s))
    return sorted(found, key=lambda item: -item[1])


def _changes(answer: Answer) -> Iterator[tuple[str, Question]]:
    from offload.plan import Home

    question, rates, use = answer.question, answer.question.rates, answer.use
    memory, ranks = question.node_memory or 1 << 60, question.ranks
    host_room = (memory - reserved_bytes(memory, ranks)) // ranks - use.host_bytes
    if rates.paths:
        best = max(rates.paths, key=lambda path: path.each_way_bytes_per_s)
        what = "a second path like this one" if len(rates.paths) == 1 else "one more path like the fastest"
        yield what, replace(question, rates=replace(rates, paths=(*rates.paths, best)))
    streamed_bytes = answer.plan.home_bytes[Home.STREAMED]
    more = min(streamed_bytes, max(1 << 30, int(HELP_HOST * answer.plan.state_bytes)), host_room)
    if more > 0:
        yield f"host budget +{format_bytes(more)} a rank", replace(question, host_memory=question.host_memory + more)
    gpu = rates.gpu
    if answer.plan.home_bytes[Home.GPU] < answer.plan.state_bytes:
        more = min(answer.plan.state_bytes, 10 << 30, gpu_room(gpu.memory_bytes or 1 << 60) - use.gpu_bytes)
        if more > 0:
            yield f"GPU budget +{format_bytes(more)} a rank", replace(question, gpu_memory=question.gpu_memory + more)
        faster = gpu.times(2)
        yield "a link to the GPU twice as fast", replace(question, rates=replace(rates, gpu=faster))
    cpu = replace(rates, cpu_bytes_per_s=2 * rates.cpu_bytes_per_s, memory_bytes_per_s=2 * rates.memory_bytes_per_s)
    yield "CPU and memory twice as fast", replace(question, rates=cpu)


def _picture(answer: Answer, text: str, file: str) -> None:
    from offload.pictures.draw import LANES_TITLE, draw_plan, lanes_figure, svg, tiers_figure
    from offload.pictures.page import Page

    question = answer.question
    tiers = _tiers(answer)
    timeline = answer.prediction.timeline if answer.prediction else ()
    if len(timeline) > MOST_DRAWN:
        timeline = ()
    names = [place or "unknown" for place in question.places[: len(answer.rates.paths)]]
    title = f"{question.params:,} parameters, predicted"
    try:
        if not file.lower().endswith(".html"):
            draw_plan(file, title, tiers, timeline, names)
            return
        page = Page(title)
        page.picture(svg(tiers_figure(tiers, title="What lies where")), "what lies where")
        if timeline:
            page.picture(svg(lanes_figure(timeline, names, title=LANES_TITLE)), "what each lane does during a step")
        page.lines(text)
        Path(file).write_text(str(page), encoding="utf-8")
    except ImportError as cause:
        raise OffloadError("the picture needs matplotlib: pip install matplotlib") from cause
    except OSError as cause:
        raise ConfigError("--picture", file, f"the picture cannot be written there: {cause}") from cause


def _tiers(answer: Answer) -> list[Tier]:
    """Return what lies in each tier: on one GPU, in host memory of all ranks of a node, on each path."""
    from offload.pictures.draw import Tier

    question, plan, ranks = answer.question, answer.plan, answer.question.ranks
    host = {name: ranks * nbytes for name, nbytes in answer.use.host.items()}
    found = [Tier("host memory", host, question.node_memory)]
    if answer.use.gpu_bytes:
        name, size = "each GPU" if ranks > 1 else "GPU", question.rates.gpu.memory_bytes or None
        found.insert(0, Tier(name, dict(answer.use.gpu), size))
    for number, share in enumerate(plan.shares(answer.rates) if plan.storage_bytes else ()):
        size = question.path_sizes[number] if number < len(question.path_sizes) else None
        stored = {"state": int(ranks * share * plan.storage_bytes)}
        found.append(Tier(question.path_name(number), stored, size))
    return found


# The command

_AS_GIVEN = (
    *("nodes", "gpu_staging", "gradient_memory", "staging_memory", "path_bytes", "subgroup_numel"),
    *("placement", "tokens", "accumulate", "recompute", "rule"),
)
"""Fields of a `Question` that are options."""


def run(arguments: argparse.Namespace) -> int:
    """Predict and print.

    Returns:
        The exit status.

    Raises:
        OffloadError: A value cannot be used, or the state does not fit.
    """
    if arguments.params is None and arguments.config is None and arguments.model is None:
        arguments.refuse("give a model, by --model NAME, --params N or --config FILE")
    options = {"--target": arguments.target, "--advise": arguments.advise}
    searches = [name for name, value in options.items() if value not in (None, False)]
    if len(searches) > 1:
        arguments.refuse(f"give {searches[0]} or {searches[1]}, not both")
    if arguments.picture is not None and not arguments.picture.lower().endswith((".png", ".svg", ".html")):
        raise ConfigError("--picture", arguments.picture, "name a file that ends in .png, .svg or .html")
    if arguments.picture is not None and searches:
        raise ConfigError("--picture", arguments.picture, f"a picture is drawn of one plan: leave {searches[0]} out")
    question, choices = _question(arguments)
    collects = gc.isenabled()
    gc.disable()  # millions of small objects and no cycles: looking for some takes a sixth of the time
    try:
        if searches:
            _search(arguments, question, choices)
        else:
            _predict(arguments, question, choices)
    finally:
        if collects:
            gc.enable()
    return 0


def _search(arguments: argparse.Namespace, question: Question, choices: Choices) -> None:
    from offload.cli import advise

    with contextlib.closing(progress_of(arguments, "setting")) as progress:
        if arguments.advise:
            found = advise.best(question, choices, progress.show)
        else:
            found = [advise.cheapest(question, choices, arguments.target, progress.show)]
    outcome = {"params": question.params, "settings": [advise.as_dict(setting) for setting in found]}
    notes = "".join(f"\n{text}" for text in question.warnings if text != question.guessed)
    tell(arguments, outcome, f"{advise.describe(found)}{notes}")


def progress_of(arguments: argparse.Namespace, unit: str) -> Progress:
    """Return the bar of a search or a simulation; where there is no terminal, a line every half a minute."""
    return Progress(0, title="plan", quiet=arguments.json, unit=unit, after_s=1.0, line_s=30.0)


def _predict(arguments: argparse.Namespace, question: Question, choices: Choices) -> None:
    from offload.cli import advise

    settled = choices.settle(question)
    draws = arguments.picture is not None
    with contextlib.closing(progress_of(arguments, "visit")) as progress:
        try:
            answer = ask(settled, timeline=draws, report=lambda done, total: progress.show(done, total, "simulated"))
        except InfeasiblePlanError as error:
            least_text = "" if GPU in error.available_bytes else f"; {_say_least(settled, choices)}"
            switches = advise.what_fits(settled, choices)
            fits = f"; it fits with {switches}" if switches else ""
            raise PlanError(f"{error}{least_text}{fits}") from error
        wear = _wear(answer, arguments.endurance, arguments.steps_per_day)
        found = advice(answer)
    text = "" if arguments.json and not draws else _describe(answer, wear, found)
    tell(arguments, _as_dict(answer, wear, found), text)
    if draws:
        _picture(answer, text, arguments.picture)


def _say_least(question: Question, choices: Choices) -> str:
    """Return the least host memory that a rank takes, with whatever of the switches takes less."""
    from offload.cli.advise import switches

    memory_bytes = question.node_memory
    each = [(taken, other) for other in choices.variants(question) if (taken := least(other)) is not None]
    if not each:
        return "no host_memory would be enough"
    enough = (1 + WORTH_SWITCHING) * min(taken.host_bytes for taken, _ in each)
    fewest, leanest = next((taken, other) for taken, other in each if taken.host_bytes <= enough)
    why = "" if question.rates.paths else "these rates have no paths (--rates, --drive), so "
    how = " and ".join(switches(question, replace(leanest, host_memory=question.host_memory), choices))
    words = f"{why}at the least a rank takes {format_bytes(fewest.host_bytes)} of host memory ({shares(fewest.host)})"
    words += f", with {how}" if how else ""
    if memory_bytes is not None and question.ranks * fewest.host_bytes > memory_bytes:
        words += f", more than the {format_bytes(memory_bytes / question.ranks)} that this node has for each"
    return words


def _machine(arguments: argparse.Namespace) -> RatesFile:
    """Return the rates of the machine that is asked about: described, named, or this one."""
    from offload.measure import default_rates_file, find_rates, has_default_rates, load_rates

    if is_described(arguments):
        if arguments.rates is not None:
            words = ", ".join(f"--{word}" for word in WORDS)
            raise ConfigError("--rates", arguments.rates, f"describe the machine in words ({words}) or give a file")
        return described(arguments)
    if arguments.rates is not None:
        return find_rates(arguments.rates)
    if not has_default_rates():
        arguments.refuse(
            "give the machine: in words (--host 64GiB --gpu 24GiB --drive 3.5GB/s:2TB --cores 16), by --rates FILE, "
            "or measure this one with `offload probe`"
        )
    return load_rates(default_rates_file())


def _question(arguments: argparse.Namespace) -> tuple[Question, Choices]:
    """Return what is asked, and what is left open."""
    from offload.cli.advise import Choices
    from offload.plan import NO_GPU

    file = _machine(arguments)
    rates, (node_memory, gpus) = file.rates, node_of(file)
    if arguments.gpus == 0 and rates.gpu.weights_on == "gpu":
        rates = replace(rates, gpu=NO_GPU, compute_flops_per_s=0.0)  # which are the GPU's
    if arguments.weights_on == "cpu" and rates.gpu.weights_on == "gpu":
        allowed = f"{STREAMED_WEIGHTS}; for training on the CPU leave --gpu out, or give --gpus 0, and its --flops"
        raise ConfigError("--weights-on", "cpu", allowed)
    gpus = gpus if arguments.gpus is None else arguments.gpus
    if arguments.flops is not None:
        rates = replace(rates, compute_flops_per_s=arguments.flops)
    named = [text.partition("=")[0].strip() for text in arguments.shared_path]
    if len(set(named)) < len(named):
        raise ConfigError("--shared-path", ", ".join(named), "give each path once")
    for text in arguments.shared_path:
        rates = with_shared_path(rates, text, arguments.nodes)
    if arguments.path_count is not None:
        rates = _first_paths(rates, "--path-count", arguments.path_count)
    shape: Shape | None = None
    if arguments.params is not None:
        params, exact_params = arguments.params, 0
    elif arguments.model is not None:
        shape = MODELS[arguments.model]
        params, exact_params = shape.params, shape.exact_params
    else:
        params, exact_params, shape = _params_of(arguments.config)
    ranks = arguments.ranks or (gpus if gpus and is_described(arguments) else 1)
    on_gpu = (arguments.weights_on or rates.gpu.weights_on) == "gpu"
    alone = arguments.nodes * ranks == 1
    if on_gpu and arguments.gradient_memory is not None:  # the CPU updates all then
        if arguments.placement not in ("auto", "cpu", 0):
            raise ConfigError("--placement", arguments.placement, 'use "cpu" with --gradient-memory')
        arguments.placement, arguments.gpu_memory, arguments.keep_grads = "cpu", arguments.gpu_memory or 0, False
    keep_grads = alone if arguments.keep_grads is None else arguments.keep_grads
    sizes = [facts.get("bytes") for facts in file.paths]
    memory = OffloadConfig(host_memory=arguments.host_memory).node_bytes
    known_nodes = [f"node{each.node}" for each in rates.nodes]
    for name in (f"node{number}" for number in memory):
        if name not in known_nodes:
            allowed = f"the rates have {', '.join(known_nodes) or 'no memory nodes'}; `offload probe` measures them"
            raise ConfigError("--host-memory", name, allowed)
    question = Question(
        params=params,
        rates=rates,
        ranks=ranks,
        weights_on_gpu=on_gpu,
        keep_grads=keep_grads,
        shape=shape,
        node_memory=node_memory if arguments.node_memory is None else arguments.node_memory,
        gpus=gpus,
        places=tuple(str(facts.get("path", "")) for facts in file.paths),
        path_sizes=tuple(None if size is None else parse_bytes("paths.bytes", size) for size in sizes),
        warnings=file.warnings if file.source else (),
        host_memory=sum(memory.values()) if memory else arguments.host_memory or 0,
        nodes_memory=memory,
        gpu_memory=arguments.gpu_memory or 0,
        **{name: getattr(arguments, name) for name in _AS_GIVEN},
    )
    form = arguments.state_format
    choices = Choices(
        file,
        exact_params,
        placement=arguments.placement == "auto",
        host_memory=arguments.host_memory is None,
        gpu_memory=arguments.gpu_memory is None,
        state_formats=tuple(STATE_FORMATS) if form is None else (form,),
        keep_grads=(True, False) if on_gpu and alone and arguments.keep_grads is None else (keep_grads,),
        recompute=(False, True) if question.beside and not question.recompute else (question.recompute,),
        gradient_memory=(
            (None, 0)
            if question.gradient_memory is None and rates.paths and not on_gpu
            else (question.gradient_memory,)
        ),
    )
    return in_format(question, form or "exact", file, exact_params), choices


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


def _first_paths(rates: Rates, field: str, value: str) -> Rates:
    known = len(rates.paths)
    count = parse_count(field, value, least=0, most=known, why=f"the rates know {known} paths: ")
    return replace(rates, paths=rates.paths[:count])


def with_shared_path(rates: Rates, text: str, nodes: int) -> Rates:
    """Return a node's rates where a path is one file system for all nodes.

    Args:
        rates: What a node reaches by itself.
        text: As `--shared-path` takes it.
        nodes: How many use it, all alike.
    """
    name, equals, size = text.partition("=")
    why = f"the rates know {len(rates.paths)} paths, from 0: "
    number = parse_count("--shared-path", name, least=0, most=len(rates.paths) - 1, why=why)
    path = rates.paths[number]
    total = parse_bytes("--shared-path", size) if equals else path.each_way_bytes_per_s
    if not total:
        raise ConfigError("--shared-path", text, "give more than 0 bytes a second")
    part = min(1.0, total / nodes / path.each_way_bytes_per_s)
    paths = [*rates.paths]
    paths[number] = path.part(part)
    return replace(rates, paths=tuple(paths))


def _params_of(file: str) -> tuple[int, int, Shape | None]:
    """Return the parameters of the model that a Hugging Face configuration describes, without making it.

    Returns:
        How many, how many of them are kept exact where others are stored in blocks, and the model's shape if it is of
        the Llama family.
    """
    from offload.dtypes import DtypeCode
    from offload.layout import Parameter, keep_exact

    values = read_values("--config", os.path.join(file, "config.json") if os.path.isdir(file) else file)
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError("--config", file, 'it has no "model_type", so it is not a Hugging Face configuration')
    try:
        import torch
        import transformers
    except ImportError as cause:
        raise OffloadError("reading a config.json needs transformers: pip install transformers") from cause
    try:
        # Code that a configuration names is not asked for, nor whether it may run.
        config = transformers.AutoConfig.for_model(**{name: values[name] for name in values if name != "auto_map"})
        if not 0 <= (layers := getattr(config, "num_hidden_layers", 0)) <= MOST_LAYERS:
            raise ValueError(f"it has {layers} layers, and {MOST_LAYERS:,} are the most")
        with torch.device("meta"), _at_most(MOST_MODULES):
            from_config: Any = transformers.AutoModelForCausalLM.from_config
            model = from_config(config)
    except Exception as cause:  # whatever a model's code makes of values that it was not written for
        allowed = f"transformers {transformers.__version__} makes no model of it: {cause!r}"
        raise ConfigError("--config", file, allowed) from cause
    parameters = keep_exact(
        [
            Parameter(name, parameter.numel(), DtypeCode.BFLOAT16, 0, shape=tuple(parameter.shape))
            for name, parameter in model.named_parameters()
        ],
        EXACT_NAMES,
    )
    params = sum(p.numel for p in parameters)
    return params, sum(p.numel for p in parameters if p.exact), _shape_of(config, params)


def _shape_of(config: Any, params: int) -> Shape | None:
    """Return the shape of a model that has as many parameters as its configuration's shape has; else None."""
    try:
        heads = config.num_attention_heads
        width = (getattr(config, "head_dim", None) or config.hidden_size // heads) * config.num_key_value_heads
        known = (config.hidden_size, config.num_hidden_layers, config.intermediate_size, width, config.vocab_size)
    except (AttributeError, TypeError, ZeroDivisionError):
        return None
    shapes = [Shape(*known, tied=bool(config.tie_word_embeddings), biased=biased) for biased in (False, True)]
    return next((shape for shape in shapes if shape.params == params), None)


@contextlib.contextmanager
def _at_most(count: int) -> Iterator[None]:
    """Have torch refuse to make more modules and parameters than that."""
    from torch.nn.modules import module

    numbers = itertools.count(1)

    def counts(parent: object, name: str, child: object) -> None:
        if next(numbers) > count:
            raise ValueError(f"it has more than {count:,} modules and parameters")

    hooks = [
        module.register_module_module_registration_hook(counts),
        module.register_module_parameter_registration_hook(counts),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _wear(answer: Answer, endurance: int | None, steps_per_day: float | None) -> list[dict[str, float]]:
    """Return what a node writes to each path per step and, where its endurance is known, the days that it lasts."""
    if steps_per_day is None:
        steps_per_day = DAY_S / answer.iteration_s if answer.iteration_s else 0.0
    found = []
    lanes = answer.prediction.lane_bytes if answer.prediction else {}
    for number, share in enumerate(answer.plan.shares(answer.rates)):
        gradients = round(share * answer.plan.left_gradient_bytes)  # in backward
        written = answer.question.ranks * (lanes.get(f"write:{number}", 0) + gradients)
        row: dict[str, float] = {"written_bytes_per_step": written, "steps_per_day": steps_per_day}
        if endurance is not None and written and steps_per_day:
            row["days"] = endurance / (written * steps_per_day)
        found.append(row)
    return found


def _share_on_gpu(plan: Plan) -> float:
    nbytes = sum(size for n, size in enumerate(plan.layout.subgroup_bytes) if plan.updates_on_gpu(n))
    return nbytes / plan.state_bytes


def _as_dict(
    answer: Answer, wear: Sequence[Mapping[str, float]], found: Sequence[tuple[str, float]]
) -> dict[str, Any]:
    from offload.cli.advise import config_of
    from offload.plan import Home

    plan, cost, prediction = answer.plan, answer.estimate, answer.prediction
    return {
        "params": answer.question.params,
        "nodes": answer.question.nodes,
        "ranks": answer.question.ranks,
        "rank": {
            "state_bytes": plan.state_bytes,
            "formats": {name: {"params": n, "bytes": nbytes} for name, (n, nbytes) in plan.formats.items()},
            "gpu_bytes": plan.home_bytes[Home.GPU],
            "host_bytes": plan.home_bytes[Home.HOST],
            "node_bytes": {f"node{number}": nbytes for number, nbytes in plan.node_bytes.items()},
            "streamed_bytes": plan.home_bytes[Home.STREAMED],
            "staging_slots": plan.staging_slots,
            "staging_bytes": plan.staging_bytes,
            "gpu_staging_bytes": plan.gpu_slots * plan.gpu_slot_bytes,
            "gradient_bytes": plan.budgets.gradient_bytes,
            "path_shares": list(plan.shares(answer.rates)) if plan.home_bytes[Home.STREAMED] else [],
            "gpu_update_share": _share_on_gpu(plan),
            "host_memory_bytes": dict(answer.use.host),
            "gpu_memory_bytes": dict(answer.use.gpu),
        },
        "node": {
            "memory_bytes": answer.question.node_memory,
            "gpus": answer.question.gpus,
            "used_bytes": answer.question.ranks * answer.use.host_bytes,
        },
        "forward_s": answer.forward_s,
        "backward_s": answer.backward_s,
        "step_s": answer.step_s,
        "iteration_s": answer.iteration_s,
        "hidden_iteration_s": dict(answer.overlapped_s),
        "speculation": {
            "memory_bytes": answer.ahead.host_bytes - plan.host_bytes,
            "storage_bytes": answer.ahead.speculative_storage_bytes,
        },
        "closed_form_step_s": cost.step_s,
        "bound_s": cost.bound_s,
        "bound_by": cost.bound_by,
        "lanes": {
            lane: {"busy_s": prediction.busy_s[lane], "bytes": nbytes}
            for lane, nbytes in prediction.lane_bytes.items()
        }
        if prediction
        else {},
        "paths": [{"name": answer.question.path_name(number), **row} for number, row in enumerate(wear)],
        "config": config_of(answer),
        "parked": parked(answer),
        "activations_on_paths": activations_on_paths(answer),
        "warnings": list(answer.warnings),
        "advice": [{"change": what, "saved_s": saved_s} for what, saved_s in found],
    }


def _describe(answer: Answer, wear: Sequence[Mapping[str, float]], found: Sequence[tuple[str, float]]) -> str:
    plan, cost, ranks, nodes = answer.plan, answer.estimate, answer.question.ranks, answer.question.nodes
    by_all = "all ranks of a node" if nodes > 1 else "all ranks"
    on_ranks = f"{format_count(ranks, 'rank')}{f' on each of {nodes:,} nodes' if nodes > 1 else ''}"
    lines = [f"{answer.question.params:,} parameters on {on_ranks}; each rank has:", str(plan)]
    mark = answer.question.mark
    lines += ["", *_node_lines(answer), *answer.question.marked(answer.warnings), ""]
    if answer.forward_s is None:
        lines.append(unknown_words(answer.question))
    else:
        lines.append(
            f"forward {format_seconds(answer.forward_s)}, backward {format_seconds(answer.backward_s or 0.0)}"
        )
    gap = answer.step_s / cost.bound_s - 1 if cost.bound_s else 0.0
    lines.append(
        f"step {format_seconds(answer.step_s)}{mark}; {cost.bound_by} alone needs {format_seconds(cost.bound_s)} "
        f"(the step takes {f'{gap:.1%}' if gap >= 0.0005 else 'nothing'} more)"
    )
    if answer.forward_s is not None:
        line = f"iteration {format_seconds(answer.iteration_s)}{mark}"
        if answer.overlapped_s:
            hidden = ", ".join(f"in {where} {format_seconds(s)}{mark}" for where, s in answer.overlapped_s.items())
            line += f"; with the step hidden {hidden}"
        lines.append(line)
    lines += _activation_lines(answer)
    if "backward" in answer.overlapped_s:
        memory = format_bytes(answer.ahead.host_bytes - plan.host_bytes)
        storage = format_bytes(answer.ahead.speculative_storage_bytes)
        lines.append(f"hidden in backward, a step takes {memory} more of a rank's memory and {storage} of its paths")
    if answer.prediction is not None:
        lines += str(answer.prediction).splitlines()[1:]
    for number, row in enumerate(wear):
        if row["written_bytes_per_step"]:
            name = answer.question.path_name(number)
            written = f"{name} is written {format_bytes(row['written_bytes_per_step'])} a step by {by_all}"
            days = f"; {row['days']:,.0f} days until its endurance is used up" if "days" in row else ""
            lines.append(f"{written}, {row['steps_per_day']:,.0f} steps a day{days}")
    if found:
        lines += ["", "what would help (by the closed form):"]
        lines += [f"  {what}: -{format_seconds(saved_s)}" for what, saved_s in found]
    return "\n".join(lines)


def unknown_words(question: Question) -> str:
    """Return what has to be given so that forward and backward are predicted, too."""
    reason = "give --tokens" if question.tokens is None else "the rates know no FLOP/s; give --flops"
    return f"forward and backward: unknown ({reason})"


def _node_lines(answer: Answer) -> list[str]:
    """Return what all ranks take of their node, and the least that they could."""
    question, use = answer.question, answer.use
    memory_bytes = question.node_memory
    of_node = "" if memory_bytes is None else f" of the node's {format_bytes(memory_bytes)}"
    taken = f"{format_bytes(question.ranks * use.host_bytes)}{of_node}"
    lines = [f"host memory: all ranks take {taken}, each {shares(use.host)}"]
    if use.gpu_bytes:
        size = question.rates.gpu.memory_bytes
        of_gpu = f" of {format_bytes(size)}" if size else ""
        on_top = "" if question.beside else "; activations come on top (known with --model and --tokens)"
        lines.append(f"GPU: {format_bytes(use.gpu_bytes)}{of_gpu}, {shares(use.gpu)}{on_top}")
    fewest = least(question)
    if fewest is not None and fewest.host_bytes < use.host_bytes:
        most = max(fewest.host, key=lambda what: fewest.host[what])
        lines.append(f"it would also work, slower, with {format_bytes(fewest.host_bytes)} a rank, most of it {most}")
    if given := parked(answer):
        gpu = f" and {format_bytes(given['gpu_bytes'])} of its GPU's" if given["gpu_bytes"] else ""
        lines.append(
            f"between phases, park() gives back up to {format_bytes(given['host_bytes'])} of a rank's host memory"
            f"{gpu}, in about {format_seconds(given['seconds'])}"
        )
    return lines


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


def activations_on_paths(answer: Answer) -> dict[str, Any]:
    """Return the seconds that an iteration takes longer if activations leave for the paths, are recomputed, or both.

    Also what is the least of these, as "advice", and the bytes that leave; empty where not all of that is known.
    """
    question, paths = answer.question, answer.rates.paths
    forward_s, backward_s = answer.forward_s, answer.backward_s
    if question.shape is None or question.tokens is None or not paths or forward_s is None or backward_s is None:
        return {}
    tokens, again_s = math.ceil(question.tokens / question.accumulate), 0.0 if question.recompute else forward_s
    write, read = sum(path.write.alone for path in paths), sum(path.read.alone for path in paths)
    forward_s, backward_s = forward_s / question.accumulate, backward_s / question.accumulate

    def longer_s(nbytes: int, more_s: float) -> float:
        waits_s = max(0.0, nbytes / write - forward_s) + max(0.0, nbytes / read - backward_s - more_s)
        return question.accumulate * waits_s

    whole, inputs = (question.shape.activation_bytes(tokens, recompute=again) for again in (question.recompute, True))
    found = {"paths_s": longer_s(whole, 0.0)}
    if not question.recompute:
        found |= {"recompute_s": again_s, "both_s": again_s + longer_s(inputs, again_s / question.accumulate)}
    return {"bytes": whole, **found, "advice": min(found, key=found.__getitem__).removesuffix("_s")}


def _activation_lines(answer: Answer) -> list[str]:
    """Return what it takes that activations leave for the paths, beside recomputation."""
    found = activations_on_paths(answer)
    if not found:
        return []
    texts = {"paths": "on the paths", "recompute": "recomputed", "both": "both"}
    costs = [f"{text} +{format_seconds(found[f'{way}_s'])}" for way, text in texts.items() if f"{way}_s" in found]
    line = f"activations ({format_bytes(found['bytes'])}): {', '.join(costs)} an iteration"
    if found["advice"] != "paths":
        line += "; the paths are too slow to take all behind forward: recompute, and take both where memory is short"
    return [line]
