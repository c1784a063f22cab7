"""`offload plan`: predicts an iteration for a model, a machine and budgets; what bounds it, and what would help."""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli import advise
from offload.cli.machine import add_machine_options, is_described, machine_of
from offload.cli.progress import Progress
from offload.cli.scenario import (
    FASTEST_PATH_NAME,
    GPU_NAME,
    GPU_STAGING_NAME,
    Answer,
    Scenario,
    ask,
    compute_s,
    fits_text,
    least_memory_use,
    misfit_text,
    missing_option_line,
    node_lines,
    uses_text,
)
from offload.cli.shapes import MODELS, model_of, parse_model
from offload.cli.streamed import path_of
from offload.cli.values import (
    MAX_RANKS,
    add_output,
    add_settings,
    add_value,
    given_settings,
    in_options,
    naming_options,
    parse_count,
    parse_number,
    parse_output,
    parse_path,
    parse_seconds,
    tell,
)
from offload.config import parse_bytes
from offload.errors import ConfigError, InfeasiblePlanError, OffloadError, PlanError
from offload.rules import RULES
from offload.units import DAY_S, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from offload.pictures.draw import Tier
    from offload.plan import Plan, Rates

MOST_DRAWN = 50_000
"""Most operations of a step whose lanes are drawn."""

WORTH_SWITCHING = 0.02
"""Fraction of a rank's least host memory that one more switch has to save to be named."""

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
and gradients of two bytes are counted with the state, each rank's part of them, as in ZeRO-3, or as --stage says.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand `plan` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "plan",
        help="say whether a model's training fits a machine, how long an iteration takes, and what bounds it",
        description="Say whether the training of a model fits a machine, where its bytes lie, how long an iteration "
        "takes and\nwhat bounds it. Nothing is trained, and the machine need not be there.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about_model = parser.add_argument_group("the model, by one of the first three")
    model = about_model.add_mutually_exclusive_group()
    add_value(model, "--params", parse_count, "parameters of the model: 70e9, 70B")
    add_value(model, "--config", parse_path, "a Hugging Face config.json, or the directory it lies in")
    add_value(model, "--model", parse_model, f"a well-known model: {', '.join(MODELS)}", metavar="NAME")
    about_model.add_argument(
        "--rule",
        choices=tuple(RULES),
        default="adam",
        help="the optimizer's update rule; adam stands for AdamW, too (default: %(default)s)",
    )
    words = parser.add_argument_group("the machine, in words (--host at least)")
    add_machine_options(words)
    machine = parser.add_argument_group("the machine, by a file; ranks and nodes")
    rates = "instead of words: a file that `offload probe` or `offload machine` wrote, or a name (see below)"
    add_value(machine, "--rates", parse_path, rates)
    add_value(machine, "--ranks", _parse_ranks, "processes that share a node (default: 1; one for each of --gpu)")
    add_value(machine, "--nodes", _parse_ranks, "nodes like this one, which share the model (default: 1)", default=1)
    machine.add_argument(
        "--stage",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="what ranks divide among them: 1, state alone (ZeRO-1, DDP with shard=True); 2, gradients, too "
        "(ZeRO-2); 3, weights, too (ZeRO-3, FSDP2) (default: %(default)s)",
    )
    machine.add_argument(
        "--shared-path",
        metavar="N[=SIZE]",
        action="append",
        default=[],
        help="path N (from 0) is one file system for all nodes, which moves SIZE a second each way in all (default: "
        "what the rates say of it); other paths are each node's own",
    )
    add_settings(parser.add_argument_group("settings of each rank's session"), "plan", placement=_parse_placement)
    offers = parser.add_argument_group("what else a rank has")
    add_value(
        offers,
        "--gpu-staging",
        parse_bytes,
        "GPU memory through which state that is at home elsewhere passes to be updated there (default: 4 subgroups)",
    )
    offers.add_argument("--path-count", metavar="N", help="use only the first N paths (drives) (default: all)")
    path_bytes = "most bytes of each path (drive) for a rank (default: all of it)"
    add_value(offers, "--path-bytes", parse_bytes, path_bytes, default=1 << 60)
    offers.add_argument(
        "--weights-on",
        choices=("cpu", "gpu", "host", "path"),
        help="where weights lie: gpu; host, in host memory, computed on the GPU; path, in a file on a drive; cpu, "
        "where the CPU computes (default: gpu, if there is one)",
    )
    node = parser.add_argument_group("each node, where it has other memory or GPUs than its rates say")
    add_value(node, "--node-memory", parse_bytes, "host memory of a node, which its ranks share")
    gpus = partial(parse_count, least=0, most=MAX_RANKS)
    add_value(node, "--gpus", gpus, "number of a node's GPUs; 0: the CPU computes, as --flops says")
    work = parser.add_argument_group("the rest of the iteration")
    tokens = "tokens of each rank in an iteration, rows times length: what forward and backward take depends on them"
    add_value(work, "--tokens", parse_count, tokens)
    parse_flops = partial(parse_number, least=1, most=1e24, what="operations a second")
    flops = "FLOP/s that forward and backward reach (default: by the machine)"
    add_value(work, "--flops", parse_flops, flops, metavar="F")
    work.add_argument(
        "--recompute",
        action="store_true",
        help="activations are recomputed in backward (gradient checkpointing): less memory, more to compute",
    )
    add_value(work, "--accumulate", parse_count, "micro-steps that the tokens come in (default: 1)", default=1)
    clips = "every step clips gradients: the step is hidden in forward alone, as updates in backward would not count"
    work.add_argument("--clip", action="store_true", help=clips)
    work.add_argument("--overlap", help=argparse.SUPPRESS)  # `_check_options` says what to do without
    search = parser.add_argument_group("search for settings that are not given")
    target = "show the cheapest setting whose iteration takes no longer, such as 10s, and its lines to paste"
    add_value(search, "--target", parse_seconds, target, metavar="TIME")
    search.add_argument(
        "--advise",
        action="store_true",
        help="show the best settings that fit, three at most (one with exact state first), and the lines to paste",
    )
    search.add_argument(
        "--for",
        dest="framework",
        choices=tuple(advise.FRAMEWORKS),
        help="show these lines alone: torch, a loop of your own (Accelerate, and Lightning of one rank, too); json, "
        "a file of settings; deepspeed; transformers, its Trainer, with several ranks by DeepSpeed (default: all)",
    )
    wear = parser.add_argument_group("wear of the drives")
    add_value(wear, "--endurance", parse_bytes, "bytes that each drive may be written, by its data sheet (TBW)")
    parse_steps = partial(parse_number, least=1e-3, most=1e9)
    add_value(wear, "--steps-per-day", parse_steps, "optimizer steps a day (default: one iteration after the other)")
    picture = "draw the plan, memory and what happens when, to this .png, .svg or .html file"
    add_value(parser, "--picture", parse_output, picture)
    add_output(parser, "print everything as JSON on stdout, and nothing else there")


def _parse_ranks(field: str, value: str) -> int:
    """Return the value of `--ranks` or `--nodes`."""
    return parse_count(field, value, most=MAX_RANKS)


def _parse_placement(field: str, value: str) -> str | float:
    """Return the value of `--placement`, which takes a stride, too, unlike the setting."""
    if value in ("auto", "cpu", "gpu"):
        return value
    if value.startswith("stride:"):
        return f"stride:{parse_count(field, value.removeprefix('stride:'))}"
    return parse_number(field, value, least=0, most=1, what='"auto", "cpu", "gpu", "stride:<k>", or a share')


def _draw_picture(answer: Answer, text: str, file: str) -> None:
    """Draw a plan's tiers and lanes to a file; an .html page has the printed text, too."""
    from offload.pictures.draw import LANES_TITLE, draw_plan, lanes_figure, svg, tiers_figure
    from offload.pictures.page import Page

    scenario = answer.scenario
    tiers = _drawn_tiers(answer)
    timeline = answer.prediction.timeline if answer.prediction else ()
    if len(timeline) > MOST_DRAWN:
        timeline = ()  # tiers alone are drawn then
    paths = [scenario.machine.path_label(number) or "unknown" for number in range(len(answer.rates.paths))]
    title = f"{scenario.model.params:,} parameters, predicted"
    try:
        if not file.lower().endswith(".html"):
            draw_plan(file, title, tiers, timeline, paths)
            return
        page = Page(title)
        page.picture(svg(tiers_figure(tiers, title="What lies where")), "what lies where")
        if timeline:
            page.picture(svg(lanes_figure(timeline, paths, title=LANES_TITLE)), "what each lane does during a step")
        page.lines(text)
        Path(file).write_text(str(page), encoding="utf-8")
    except ImportError as cause:
        raise OffloadError("the picture needs matplotlib: pip install matplotlib") from cause
    except OSError as cause:
        raise ConfigError("--picture", file, f"the picture cannot be written there: {cause}") from cause


def _drawn_tiers(answer: Answer) -> list[Tier]:
    """Return what to draw of each tier, by purpose, beside the tier's size.

    The GPU is one rank's; host memory and paths are those of a node, with what all its ranks have there.
    """
    from offload.pictures.draw import Tier

    plan, machine = answer.plan, answer.scenario.machine
    ranks = machine.ranks
    tiers = []
    if answer.use.gpu_bytes:
        gpu_name = "each GPU" if ranks > 1 else "GPU"
        # Rates have 0 for a size that is unknown.
        tiers.append(Tier(gpu_name, dict(answer.use.gpu), machine.rates.gpu.memory_bytes or None))
    host = {purpose: ranks * nbytes for purpose, nbytes in answer.use.host.items()}
    tiers.append(Tier("host memory", host, machine.memory_bytes))
    if plan.storage_bytes:
        for number, share in enumerate(plan.path_shares(answer.rates)):
            stored = {"state": int(ranks * share * plan.storage_bytes)}
            tiers.append(Tier(machine.path_name(number), stored, machine.path_bytes(number)))
    return tiers


# The command


def run(arguments: argparse.Namespace) -> int:
    """Predict an iteration, or search for settings, as the options say, and print the outcome.

    Raises:
        OffloadError: A value cannot be used, or the state does not fit.
    """
    searches = _check_options(arguments)
    was_collecting = gc.isenabled()
    gc.disable()  # millions of small objects without cycles: collections take a sixth of the time
    try:
        with naming_options("plan"):
            scenario, choices = _scenario_from_options(arguments)
            if searches:
                _search(arguments, scenario, choices)
            else:
                _predict(arguments, scenario, choices)
    finally:
        if was_collecting:
            gc.enable()
    return 0


def _check_options(arguments: argparse.Namespace) -> bool:
    """Refuse options that do not go together; return whether settings are to be searched (--advise, --target)."""
    if arguments.params is None and arguments.config is None and arguments.model is None:
        arguments.refuse("give a model, by --model NAME, --params N or --config FILE")
    search_options = {"--target": arguments.target, "--advise": arguments.advise}
    searches = [name for name, value in search_options.items() if value not in (None, False)]
    if len(searches) > 1:
        arguments.refuse(f"give {searches[0]} or {searches[1]}, not both: each prints lines to paste")
    if arguments.framework is not None and not searches:
        arguments.refuse("--for says which of the lines that --advise or --target print are shown: give one of these")
    if arguments.overlap is not None:
        advice = "leave it out: with --tokens a plan shows an iteration with the step hidden in each way"
        raise ConfigError("--overlap", arguments.overlap, advice)
    if arguments.picture is not None and not arguments.picture.lower().endswith((".png", ".svg", ".html")):
        raise ConfigError("--picture", arguments.picture, "name a file that ends in .png, .svg or .html")
    if arguments.picture is not None and searches:
        raise ConfigError("--picture", arguments.picture, f"a picture is drawn of one plan: leave {searches[0]} out")
    return bool(searches)


def _scenario_from_options(arguments: argparse.Namespace) -> tuple[Scenario, advise.Choices]:
    """Return the scenario of the command's options, and the choices that they leave open."""
    machine = machine_of(arguments)
    settings = given_settings(arguments, "plan")
    _check_places(arguments, machine.rates)
    model = model_of(arguments, weights_on=arguments.weights_on or machine.rates.gpu.weights_on)
    # Several ranks are planned as in ZeRO, where gradients leave the GPU during backward.
    usual = {"keep_grads": machine.all_ranks == 1}
    scenario = Scenario.of(
        model,
        machine,
        path_bytes=arguments.path_bytes,
        gpu_staging=arguments.gpu_staging,
        **{**usual, **settings},
    )
    return scenario, advise.Choices.of(scenario, settings, arguments.weights_on, arguments.framework)


def _check_places(arguments: argparse.Namespace, rates: Rates) -> None:
    """Refuse weights on the CPU of a machine with a GPU, and memory nodes that the rates do not know."""
    if arguments.weights_on == "cpu" and rates.gpu.weights_on == "gpu":
        advice = (
            "give host for weights in host memory that the GPU computes; for training on the CPU leave --gpu out, or "
            "give --gpus 0, and its --flops"
        )
        raise ConfigError("--weights-on", "cpu", advice)
    known_nodes = [f"node{node.node}" for node in rates.nodes]
    for name in arguments.host_memory if isinstance(arguments.host_memory, dict) else ():
        if name not in known_nodes:
            advice = f"the rates have {', '.join(known_nodes) or 'no memory nodes'}; `offload probe` measures them"
            if is_described(arguments):
                advice = "a machine in words has no memory nodes: give one size, such as 2GiB"
            raise ConfigError("--host-memory", name, advice)


def _search(arguments: argparse.Namespace, scenario: Scenario, choices: advise.Choices) -> None:
    """Find the best settings, or the cheapest that meets `--target`, and print them."""
    with contextlib.closing(progress_of(arguments, "setting")) as progress:
        if arguments.advise:
            settings = advise.best_settings(scenario, choices, progress.show)
        else:
            settings = [advise.cheapest_setting(scenario, choices, arguments.target, progress.show)]
    outcome = {"params": scenario.model.params, "settings": [advise.as_dict(setting) for setting in settings]}
    # Not the guess about the scenario's own format: `describe` says what is guessed of each setting's.
    notes = "".join(f"\n{text}" for text in scenario.warnings if text != scenario.guess_warning)
    # `best_settings` shows a setting with exact state if one fits. So if none is shown, although all formats were
    # tried, exact state does not fit.
    is_left_open = arguments.advise and "state_format" not in choices.given
    without_exact = "exact state does not fit here" if is_left_open else ""
    tell(arguments, outcome, f"{advise.describe(settings, arguments.framework, without_exact)}{notes}")


def progress_of(arguments: argparse.Namespace, unit: str) -> Progress:
    """Return the progress bar of a search or a simulation, of which the total is not known yet."""
    return Progress(0, title="plan", quiet=arguments.json, unit=unit, after_s=1.0)


def _predict(arguments: argparse.Namespace, scenario: Scenario, choices: advise.Choices) -> None:
    """Predict an iteration with the scenario, print it, and draw it if asked; say what would fit if it does not."""
    planned = choices.fix_budgets(scenario)
    draws = arguments.picture is not None
    with contextlib.closing(progress_of(arguments, "visit")) as progress:
        try:
            answer = ask(planned, timeline=draws, report=lambda done, total: progress.show(done, total, "simulated"))
        except InfeasiblePlanError as error:
            raise PlanError(_misfit(error, planned, choices)) from error
        wear = _path_wear(answer, arguments.endurance, arguments.steps_per_day)
        advice = advise.advice(answer)
    text = "" if arguments.json and not draws else _describe(answer, wear, advice)  # for stdout, and an .html page
    tell(arguments, _as_dict(answer, wear, advice), text)
    if draws:
        _draw_picture(answer, text, arguments.picture)


def _misfit(error: InfeasiblePlanError, scenario: Scenario, choices: advise.Choices) -> str:
    """Return what to say of a plan that does not fit.

    That is how much is lacking, the switches with which it would fit, and what needs how many bytes. The least host
    memory that would do is said as well, unless a GPU, or the drive for a file of weights, is what is too small.
    """
    switches, fits = advise.fitting_switches_text(scenario, choices)
    details = str(error)
    if switches and not fits and GPU_NAME in error.available_bytes:
        # `switches` is about the settings that lack least, with advice of its own. These settings may contain what
        # the advice of `error` says, such as weights in host memory.
        details = details.removesuffix(f"; {error.advice}")
    texts = [misfit_text(error), switches, in_options(details, "plan")]
    if not {GPU_NAME, GPU_STAGING_NAME, FASTEST_PATH_NAME} & {*error.available_bytes}:
        texts.append(_least_memory_text(scenario, choices))
    return "; ".join(filter(None, texts))


def _least_memory_text(scenario: Scenario, choices: advise.Choices) -> str:
    """Return in words the least host memory that a rank can do with, and the switches for that.

    A switch has to save at least `WORTH_SWITCHING` of that memory to be named.
    """
    machine = scenario.machine
    uses = [(least_memory_use(variant), variant) for variant in choices.variants(scenario)]
    planned = [(use, variant) for use, variant in uses if use is not None]
    if not planned:
        return "no memory for state (--host-memory) would be enough"
    # Of the variants with about the least memory take the first, which asks least of the user.
    near_least = (1 + WORTH_SWITCHING) * min(use.host_bytes for use, _ in planned)
    least, leanest = next((use, variant) for use, variant in planned if use.host_bytes <= near_least)
    why = "" if machine.rates.paths else f"without {machine.advice['drives']} "
    text = f"{why}at the least a rank takes {format_bytes(least.host_bytes)} of host memory ({uses_text(least.host)})"
    if switches := advise.switch_texts(scenario, leanest, choices):
        text += f", with {' and '.join(switches)}"
    if machine.memory_bytes is not None and machine.ranks * least.host_bytes > machine.memory_bytes:
        text += f", more than the {format_bytes(machine.memory_bytes / machine.ranks)} that this node has for each"
    return text


def _path_wear(answer: Answer, endurance: int | None, steps_per_day: float | None) -> list[dict[str, float]]:
    """Return for each path how much a step wears it.

    Args:
        answer: The plan and its prediction.
        endurance: Bytes that can be written to a path in all; None if that is unknown.
        steps_per_day: Steps a day; None if one iteration follows the other.

    Returns:
        A row for each path: "written_bytes_per_step" by all ranks of a node (of state, gradients and weights),
        "steps_per_day" (0 if unknown), and "days" that the endurance lasts, if it and steps a day are known and
        anything is written.
    """
    if steps_per_day is None:
        steps_per_day = DAY_S / answer.iteration_s if answer.iteration_s else 0.0
    rows = []
    for number, share in enumerate(answer.plan.path_shares(answer.rates)):
        if answer.prediction is not None:
            state_bytes = answer.prediction.lane_bytes.get(f"write:{number}", 0)
        else:  # not simulated
            state_bytes = round(share * answer.plan.moved_bytes)
        rank_bytes = state_bytes + round(share * answer.plan.path_gradient_bytes)
        if answer.weight_transfers is not None and number == path_of(answer.rates):
            rank_bytes += answer.weight_transfers.written_bytes
        written = answer.scenario.machine.ranks * rank_bytes
        row: dict[str, float] = {"written_bytes_per_step": written, "steps_per_day": steps_per_day}
        if endurance is not None and written and steps_per_day:
            row["days"] = endurance / (written * steps_per_day)
        rows.append(row)
    return rows


def _gpu_fraction(plan: Plan) -> float:
    """Return the fraction of the state that the GPU updates."""
    nbytes = sum(size for number, size in enumerate(plan.layout.subgroup_bytes) if plan.updates_on_gpu(number))
    return nbytes / plan.state_bytes


def _as_dict(
    answer: Answer, wear: Sequence[Mapping[str, float]], advice: Sequence[tuple[str, float]]
) -> dict[str, Any]:
    """Return an answer for `--json`; `wear` is its `_path_wear`, `advice` its `advise.advice`."""
    from offload.plan import Home

    plan, cost, prediction, machine = answer.plan, answer.estimate, answer.prediction, answer.scenario.machine
    figures = answer.figures
    hiding_memory_bytes, hiding_storage_bytes = answer.hiding_bytes
    return {
        "params": answer.scenario.model.params,
        "nodes": machine.nodes,
        "ranks": machine.ranks,
        "rank": {
            "state_bytes": plan.state_bytes,
            "formats": {
                name: {"params": numel, "bytes": nbytes} for name, (numel, nbytes) in plan.layout.formats.items()
            },
            "gpu_bytes": plan.home_bytes[Home.GPU],
            "host_bytes": plan.home_bytes[Home.HOST],
            "node_bytes": {f"node{number}": nbytes for number, nbytes in plan.node_bytes.items()},
            "streamed_bytes": plan.home_bytes[Home.STREAMED],
            "staging_slots": plan.staging_slots,
            "staging_bytes": plan.staging_bytes,
            "gpu_staging_bytes": plan.gpu_staging_bytes,
            "gradient_bytes": plan.budgets.gradient_bytes,
            "path_shares": list(plan.path_shares(answer.rates)) if plan.home_bytes[Home.STREAMED] else [],
            "gpu_update_share": _gpu_fraction(plan),
            "host_memory_bytes": figures["host_memory_bytes"],
            "gpu_memory_bytes": figures["gpu_memory_bytes"],
        },
        "node": {
            "memory_bytes": machine.memory_bytes,
            "gpus": machine.gpus,
            "used_bytes": machine.ranks * answer.use.host_bytes,
        },
        "forward_s": answer.forward_s,
        "backward_s": answer.backward_s,
        "step_s": answer.step_s,
        "iteration_s": answer.iteration_s,
        "hidden_iteration_s": dict(answer.overlapped_s),
        "speculation": {"memory_bytes": hiding_memory_bytes, "storage_bytes": hiding_storage_bytes},
        "closed_form_step_s": cost.step_s,
        "bound_s": cost.bound_s,
        "bound_by": cost.bound_by,
        "lanes": {
            lane: {"busy_s": prediction.busy_s[lane], "bytes": nbytes}
            for lane, nbytes in prediction.lane_bytes.items()
        }
        if prediction
        else {},
        "paths": [{"name": machine.path_name(number), **row} for number, row in enumerate(wear)],
        "config": advise.config_of(answer),
        "parked": figures["parked"],
        "activations_on_paths": activations_on_paths(answer),
        "weights": {
            "on": answer.scenario.model.weights_on,
            **(answer.weight_transfers.as_dict() if answer.weight_transfers is not None else {}),
        },
        "warnings": list(answer.warnings),
        "advice": [{"change": what, "saved_s": saved_s} for what, saved_s in advice],
    }


def _describe(answer: Answer, wear: Sequence[Mapping[str, float]], advice: Sequence[tuple[str, float]]) -> str:
    """Return an answer as text; `wear` is its `_path_wear`, `advice` its `advise.advice`."""
    machine = answer.scenario.machine
    on_nodes = f" on each of {machine.nodes:,} nodes" if machine.nodes > 1 else ""
    on_ranks = f"{format_count(machine.ranks, 'rank')}{on_nodes}"
    lines = [fits_text(answer), f"{answer.scenario.model.params:,} parameters on {on_ranks}; each rank has:"]
    lines.append(str(answer.plan))
    lines += ["", *node_lines(answer), *answer.scenario.mark_guess_warning(answer.warnings), ""]
    lines += _time_lines(answer)
    lines += _activation_lines(answer)
    if "backward" in answer.overlapped_s:
        memory, storage = map(format_bytes, answer.hiding_bytes)
        lines.append(f"hidden in backward, a step takes {memory} more of a rank's memory and {storage} of its paths")
    if answer.prediction is not None:
        lines += str(answer.prediction).splitlines()[1:]  # without the step's seconds, which are said above
    by_all = "all ranks of a node" if machine.nodes > 1 else "all ranks"
    for number, row in enumerate(wear):
        if row["written_bytes_per_step"]:
            name = machine.path_name(number)
            written = f"{name} is written {format_bytes(row['written_bytes_per_step'])} a step by {by_all}"
            days = f"; {row['days']:,.0f} days until its endurance is used up" if "days" in row else ""
            lines.append(f"{written}, {row['steps_per_day']:,.0f} steps a day{days}")
    if advice:
        lines += ["", "what would help (by the closed form):"]
        lines += [f"  {what}: -{format_seconds(saved_s)}" for what, saved_s in advice]
    return "\n".join(lines)


def _time_lines(answer: Answer) -> list[str]:
    """Return lines about the seconds of forward, backward, step and iteration."""
    mark = answer.scenario.guess_mark
    cost = answer.estimate
    lines = []
    if answer.forward_s is None:
        lines.append(missing_option_line(answer.scenario))
    else:
        backward = format_seconds(answer.backward_s or 0.0)  # known if forward is; `or` is for type checkers
        lines.append(f"forward {format_seconds(answer.forward_s)}, backward {backward}")
    if answer.weight_transfers is not None:
        lines += answer.weight_transfers.lines(answer.rates, compute_s(answer.scenario, answer.rates))
    gap = answer.step_s / cost.bound_s - 1 if cost.bound_s else 0.0
    more = f"{gap:.1%}" if gap >= 0.0005 else "nothing"  # not 0.0%
    lines.append(
        f"step {format_seconds(answer.step_s)}{mark}; {cost.bound_by} alone needs {format_seconds(cost.bound_s)} "
        f"(the step takes {more} more)"
    )
    if answer.forward_s is not None:
        line = f"iteration {format_seconds(answer.iteration_s)}{mark}"
        if answer.overlapped_s:
            hidden = ", ".join(f"in {where} {format_seconds(s)}{mark}" for where, s in answer.overlapped_s.items())
            line += f"; with the step hidden {hidden}"
        lines.append(line)
    return lines


def activations_on_paths(answer: Answer) -> dict[str, Any]:
    """Return by how many seconds an iteration gets longer if activations do not stay in memory.

    There are three ways: they go to the paths, they are recomputed, or both: recomputed from the inputs of layers,
    which go to the paths. Forward hides writes, and backward hides reads: what takes longer is waited for.

    Returns:
        The seconds of each way as "paths_s", "recompute_s" and "both_s", the first alone if the model recomputes
        anyway; the way with the least as "advice"; and the bytes that the way "paths" writes in a micro-step as
        "bytes". Empty if too little is known.
    """
    model, paths = answer.scenario.model, answer.rates.paths
    if model.shape is None or model.tokens is None or not paths:
        return {}
    if answer.forward_s is None or answer.backward_s is None:
        return {}
    forward_s = answer.forward_s / model.accumulate  # of a micro-step, as what follows
    backward_s = answer.backward_s / model.accumulate
    # Rates "alone": activations are only written in forward, and only read in backward.
    write_bytes_per_s = sum(path.write.alone for path in paths)
    read_bytes_per_s = sum(path.read.alone for path in paths)

    def waited_s(nbytes: int, recompute_s: float) -> float:
        """Return the seconds for which an iteration waits for the paths.

        `nbytes` are written and read in each micro-step, and backward is `recompute_s` longer.
        """
        writes_s = max(0.0, nbytes / write_bytes_per_s - forward_s)
        reads_s = max(0.0, nbytes / read_bytes_per_s - backward_s - recompute_s)
        return model.accumulate * (writes_s + reads_s)

    tokens = math.ceil(model.tokens / model.accumulate)
    nbytes = model.shape.activation_bytes(tokens, recompute=model.recompute)
    ways = {"paths_s": waited_s(nbytes, 0.0)}  # if the model recomputes, `backward_s` has the seconds of that
    if not model.recompute:
        recompute_s = answer.forward_s  # of all micro-steps: backward repeats forward
        inputs_bytes = model.shape.activation_bytes(tokens, recompute=True)
        ways["recompute_s"] = recompute_s
        ways["both_s"] = recompute_s + waited_s(inputs_bytes, recompute_s / model.accumulate)
    return {"bytes": nbytes, **ways, "advice": min(ways, key=ways.__getitem__).removesuffix("_s")}


def _activation_lines(answer: Answer) -> list[str]:
    """Return a line about the cost of writing activations to the paths, compared with recomputation."""
    figures = activations_on_paths(answer)
    if not figures:
        return []
    texts = {"paths": "on the paths", "recompute": "recomputed", "both": "both"}
    costs = [f"{text} +{format_seconds(figures[f'{way}_s'])}" for way, text in texts.items() if f"{way}_s" in figures]
    line = f"activations ({format_bytes(figures['bytes'])} a micro-step): {', '.join(costs)} an iteration"
    if figures["advice"] != "paths":
        line += "; the paths are too slow to take all behind forward: recompute, and take both where memory is short"
    return [line]
