"""`offload export`: writes a checkpoint's state in a format that others read."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from offload.cli.values import parse_output, parse_path
from offload.errors import ConfigError
from offload.units import format_seconds

if TYPE_CHECKING:
    from offload.cli.going_back import Outcome

FORMATS = ("safetensors", "distributed")
FRAMEWORKS = ("torch", "transformers", "lightning", "accelerate")


def add_parser(commands: Any) -> None:
    """Add the subcommand `export` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's optimizer state for others: safetensors, torch's own optimizers, trainers",
        description="Write the optimizer state of a checkpoint in fp32, streamed: by parameter name, which "
        "`optimizer.import_state` reads back; or, with --for, as torch's own optimizer loads it in a framework.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder of a checkpoint; with --for what the framework has written: a Trainer's checkpoint-N, "
        "Lightning's .ckpt, Accelerate's folder",
    )
    parser.add_argument(
        "target",
        metavar="OUT",
        help="what to write: a file (safetensors, torch, lightning) or a new folder (distributed, transformers, "
        "accelerate)",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="(default: %(default)s)")
    kinds.add_argument(
        "--for",
        dest="framework",
        choices=FRAMEWORKS,
        help="write what torch's own optimizer goes on from: a state dict, or a copy of the framework's checkpoint "
        "with torch's state in it. Masters of 16-bit weights are left out, as torch's optimizers have none",
    )
    parser.add_argument("--replace", action="store_true", help="replace a file that is there")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(arguments: argparse.Namespace) -> int:
    """Export.

    Returns:
        The exit status: 0.

    Raises:
        ConfigError: The target is there already, or the checkpoint is not the framework's.
        CheckpointError: The checkpoint cannot be read, or the target not written.
    """
    if arguments.framework is not None:
        return _run_for(arguments)
    from offload.checkpoint.exchange import export_distributed, export_safetensors

    checkpoint, target = parse_path("CHECKPOINT", arguments.checkpoint), parse_path("OUT", arguments.target)
    makes_folder = arguments.format == "distributed"
    if os.path.lexists(target) and os.path.isdir(target) != makes_folder:
        raise ConfigError("OUT", target, f"it is {'no' if makes_folder else 'a'} folder; name another")
    if not makes_folder:
        parse_output("OUT", target)
    is_free = not os.path.lexists(target) or (makes_folder and not os.listdir(target))
    if not is_free and not arguments.replace:
        raise ConfigError("OUT", target, "it is there already; give --replace to have it replaced")
    started_s, progress = time.monotonic(), _Progress(arguments.quiet)
    if makes_folder:
        export_distributed(checkpoint, target)
    else:
        export_safetensors(checkpoint, target, partial(progress, "writing"))
    seconds = time.monotonic() - started_s
    if arguments.json:
        print(json.dumps({"target": target, "format": arguments.format, "seconds": seconds}))
    elif not arguments.quiet:
        print(f"wrote {target} in {format_seconds(seconds)}")
    return 0


def _run_for(arguments: argparse.Namespace) -> int:
    from offload.cli.going_back import export_for

    if arguments.replace:
        raise ConfigError("--replace", True, "leave it out: with --for nothing is replaced")
    checkpoint, target = parse_path("CHECKPOINT", arguments.checkpoint), parse_path("OUT", arguments.target)
    started_s = time.monotonic()
    outcomes = export_for(arguments.framework, checkpoint, target, _Progress(arguments.quiet))
    seconds = time.monotonic() - started_s
    if arguments.json:
        about = {"target": target, "for": arguments.framework, "seconds": seconds}
        print(json.dumps({**about, "optimizers": [asdict(outcome) for outcome in outcomes]}))
    elif not arguments.quiet:
        print(f"wrote {target} in {format_seconds(seconds)}")
        for outcome in outcomes:
            print(_described(outcome))
    return 0


def _described(outcome: Outcome) -> str:
    sizes = " + ".join(map(str, outcome.groups))
    said = f"{outcome.optimizer} after step {outcome.step}, groups of {sizes} parameters"
    if outcome.optimizer == "Lion":
        said += "; torch has no Lion: it is for one whose state is exp_avg"
    if outcome.has_masters:
        said += "; without masters, which torch's optimizers do not have: 16-bit weights are their rounding"
    return said


class _Progress:
    """Says every few seconds how far it is."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._said_s = time.monotonic()

    def __call__(self, doing: str, done: int, whole: int) -> None:
        if not self._quiet and time.monotonic() - self._said_s > 5.0:
            self._said_s = time.monotonic()
            print(f"export: {doing} {done / max(whole, 1):.0%}", file=sys.stderr, flush=True)
