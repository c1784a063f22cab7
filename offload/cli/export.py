"""`offload export`: writes a checkpoint's state in a format that others read."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from offload.cli.values import parse_output, parse_path
from offload.errors import ConfigError
from offload.units import format_seconds

FORMATS = ("safetensors", "distributed")


def add_parser(commands: Any) -> None:
    """Add the subcommand `export` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's optimizer state as safetensors or torch.distributed.checkpoint",
        description="Write the optimizer state of a checkpoint, in fp32 and by parameter name, streamed. "
        "`optimizer.import_state` reads it back.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a checkpoint")
    parser.add_argument("target", metavar="TARGET", help="file (safetensors) or new folder (distributed) to write")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="(default: %(default)s)")
    parser.add_argument("--replace", action="store_true", help="replace a file that is there")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(arguments: argparse.Namespace) -> int:
    """Export.

    Returns:
        The exit status: 0.

    Raises:
        ConfigError: The target is there already.
        CheckpointError: The checkpoint cannot be read, or the target not written.
    """
    from offload.checkpoint.exchange import export_distributed, export_safetensors

    checkpoint, target = parse_path("CHECKPOINT", arguments.checkpoint), parse_path("TARGET", arguments.target)
    makes_folder = arguments.format == "distributed"
    if os.path.lexists(target) and os.path.isdir(target) != makes_folder:
        raise ConfigError("TARGET", target, f"it is {'no' if makes_folder else 'a'} folder; name another")
    if not makes_folder:
        parse_output("TARGET", target)
    is_free = not os.path.lexists(target) or (makes_folder and not os.listdir(target))
    if not is_free and not arguments.replace:
        raise ConfigError("TARGET", target, "it is there already; give --replace to have it replaced")
    started_s = said_s = time.monotonic()

    def progress(done: int, whole: int) -> None:
        nonlocal said_s
        if not arguments.quiet and time.monotonic() - said_s > 5.0:
            said_s = time.monotonic()
            print(f"export: {done / whole:.0%}", file=sys.stderr, flush=True)

    if makes_folder:
        export_distributed(checkpoint, target)
    else:
        export_safetensors(checkpoint, target, progress)
    seconds = time.monotonic() - started_s
    if arguments.json:
        print(json.dumps({"target": target, "format": arguments.format, "seconds": seconds}))
    elif not arguments.quiet:
        print(f"wrote {target} in {format_seconds(seconds)}")
    return 0
