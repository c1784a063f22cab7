"""`offload export`: writes a checkpoint's state in a format that others read."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from offload.cli.progress import Progress
from offload.cli.values import add_output, add_value, parse_output, parse_path, tell
from offload.errors import ConfigError
from offload.units import format_seconds

if TYPE_CHECKING:
    from offload.cli.going_back import Outcome

FORMATS = ("safetensors", "distributed")
FRAMEWORKS = ("torch", "transformers", "lightning", "accelerate", "deepspeed")


def add_parser(commands: Any) -> None:
    """Add the subcommand `export` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's optimizer state for others: safetensors, torch's own optimizers, trainers",
        description="Write the optimizer state of a checkpoint in fp32, streamed: by parameter name, which "
        "`optimizer.import_state` reads back; or, with --for, as torch's own optimizer loads it in a framework.",
    )
    made = "a Trainer's checkpoint-N, Lightning's .ckpt, Accelerate's folder, the folder of DeepSpeed's tag"
    what = f"folder of a checkpoint; with --for what the framework has written: {made}"
    add_value(parser, "CHECKPOINT", parse_path, what)
    folders = "a new folder (distributed, transformers, accelerate; deepspeed, best beside the other tags)"
    add_value(parser, "OUT", parse_path, f"what to write: a file (safetensors, torch, lightning) or {folders}")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="one file of tensors by parameter name, or a folder of torch.distributed.checkpoint (default: "
        "%(default)s)",
    )
    kinds.add_argument(
        "--for",
        dest="framework",
        choices=FRAMEWORKS,
        help="write what torch's own optimizer goes on from: a state dict, or a copy of the framework's checkpoint "
        "with torch's state in it. Masters of 16-bit weights are left out, as torch's optimizers have none, but for "
        'deepspeed: what it has saved "in_place" becomes files of its own layout',
    )
    parser.add_argument("--replace", action="store_true", help="replace a file that is there")
    add_output(parser, "print the outcome as JSON", "no progress")


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint's state as the options say, and print what was written.

    Raises:
        ConfigError: The target is there already, or the checkpoint is not the framework's.
        CheckpointError: The checkpoint cannot be read, or the target not written.
    """
    from offload.checkpoint.exchange import export_distributed, export_safetensors
    from offload.cli.going_back import export_for

    checkpoint, target, framework = arguments.checkpoint, arguments.out, arguments.framework
    outcomes: list[Outcome] = []
    started_s = time.monotonic()
    with closing(Progress(0, title="export", quiet=arguments.quiet, unit="MiB", after_s=5.0)) as progress:

        def show(doing: str, done_bytes: int, total_bytes: int) -> None:
            """Show the MiB that are written or copied."""
            progress.show(done_bytes >> 20, total_bytes >> 20, doing)

        if framework is not None:
            if arguments.replace:
                raise ConfigError("--replace", True, "leave it out: with --for nothing is replaced")
            outcomes = export_for(framework, checkpoint, target, show)
        else:
            _check_target(target, makes_folder=arguments.format == "distributed", replace=arguments.replace)
            if arguments.format == "distributed":
                export_distributed(checkpoint, target)
            else:
                export_safetensors(checkpoint, target, partial(show, "writing"))
    seconds = time.monotonic() - started_s
    about: dict[str, Any] = {"format": arguments.format}
    if framework is not None:
        about = {"for": framework, "optimizers": [asdict(outcome) for outcome in outcomes]}
    lines = [f"wrote {target} in {format_seconds(seconds)}", *map(_outcome_text, outcomes)]
    if framework == "deepspeed":  # which looks for a tag's name in a file beside it, and this tag is not the latest
        folder, tag = os.path.split(os.path.abspath(target))
        lines.append(f"load it with engine.load_checkpoint({folder!r}, tag={tag!r})")
    tell(arguments, {"target": target, **about, "seconds": seconds}, "\n".join(lines))
    return 0


def _check_target(target: str, *, makes_folder: bool, replace: bool) -> None:
    """Refuse a target of the wrong kind, or one that is there and not to be replaced."""
    if os.path.lexists(target) and os.path.isdir(target) != makes_folder:
        raise ConfigError("OUT", target, f"it is {'no' if makes_folder else 'a'} folder; name another")
    if not makes_folder:
        parse_output("OUT", target)  # refuses what is there and is no file, such as a device
    is_free = not os.path.lexists(target) or (makes_folder and not os.listdir(target))  # an empty folder will do
    if not is_free and not replace:
        raise ConfigError("OUT", target, "it is there already; give --replace to have it replaced")


def _outcome_text(outcome: Outcome) -> str:
    """Return in words what was written of an optimizer."""
    sizes = " + ".join(map(str, outcome.groups))
    text = f"{outcome.optimizer} after step {outcome.step}, groups of {sizes} parameters"
    if outcome.optimizer == "Lion":
        text += "; torch has no Lion: it is for one whose state is exp_avg"
    if outcome.has_masters:
        text += "; without masters, which torch's optimizers do not have: 16-bit weights are their rounding"
    return text
