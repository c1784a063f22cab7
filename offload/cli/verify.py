"""`offload verify`: reads a checkpoint, or all that a path's stores are pinned by, and reports damage."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from offload.cli.values import parse_path
from offload.errors import CheckpointError, ConfigError


def add_parser(commands: Any) -> None:
    """Add the subcommand `verify` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "verify",
        help="read a checkpoint whole and report what is damaged",
        description="Read every tile of a checkpoint (or of all checkpoints that the stores on a path belong to), "
        "verify headers and checksums, and report damage by parameter.",
    )
    parser.add_argument("path", metavar="PATH", help='folder of a checkpoint, "s3://" too, or a path with stores')
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress; print damage only")


def run(arguments: argparse.Namespace) -> int:
    """Verify and report.

    Returns:
        The exit status: 0 if all is well, 1 if something is damaged.

    Raises:
        ConfigError: There is neither a checkpoint nor a store.
        CheckpointError: The checkpoint cannot be opened.
    """
    path = parse_path("PATH", arguments.path)
    report: list[dict[str, Any]] = [_verify(folder, quiet=arguments.quiet) for folder in _folders(path)]
    damaged = any(row["problems"] for row in report)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        for row in report:
            for problem in row["problems"]:
                print(problem)
            if not row["problems"] and not arguments.quiet:
                print(f"{row['checkpoint']}: {row['tiles']} tiles of {row['parameters']} parameters are whole")
    return 1 if damaged else 0


def _folders(path: str) -> list[str]:
    """Return the checkpoint in `path`, or those that the stores there are pinned by."""
    from offload.checkpoint.contents import read_commit
    from offload.checkpoint.folder import open_folder
    from offload.checkpoint.stores import find_stores

    try:
        read_commit(open_folder(path))
        return [path]
    except CheckpointError:
        try:
            stores = find_stores(path)
        except ConfigError:
            stores = []
        folders = sorted({pin.folder for store in stores for pin in store.pins})
        if not folders:
            raise
        return folders


def _verify(folder: str, *, quiet: bool) -> dict[str, Any]:
    from offload.checkpoint.reader import Checkpoint

    problems: list[str] = []
    tiles = parameters = 0
    try:
        with Checkpoint(folder) as checkpoint:
            parameters = len(checkpoint.names)
            whole = sum(len(manifest.tiles) for manifest in checkpoint.manifests)
            said_s = time.monotonic()
            for rank in range(len(checkpoint.manifests)):
                checkpoint.extra(rank)
            for _, _, problem in checkpoint.verify():
                tiles += 1
                if problem is not None:
                    problems.append(str(problem))
                if not quiet and time.monotonic() - said_s > 5.0:
                    said_s = time.monotonic()
                    print(f"verify {folder}: {tiles}/{whole} tiles", file=sys.stderr, flush=True)
    except CheckpointError as error:
        problems.append(str(error))
    return {"checkpoint": folder, "parameters": parameters, "tiles": tiles, "problems": problems}
