"""`offload fetch`: brings a checkpoint with all of its files back from a mirror."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from typing import Any

from offload.cli.progress import Progress
from offload.cli.values import add_output, add_value, parse_path, tell
from offload.errors import CheckpointError
from offload.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add the subcommand `fetch` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "fetch",
        help="bring a trainer's whole checkpoint back from a mirror",
        description="Copy a checkpoint with all of its files from a mirror (OffloadConfig.mirror) into a run's "
        "folder, from which the framework resumes as from its own. One that is not whole there is no checkpoint.",
    )
    add_value(parser, "MIRROR", parse_path, 'directory or "s3://bucket/prefix" that was given as the mirror')
    add_value(parser, "FOLDER", parse_path, "the run's folder, made if it is not there")
    parser.add_argument("--name", metavar="NAME", help="which checkpoint of the mirror; the last one is the default")
    add_output(parser, "print the outcome as JSON", "print nothing")


def _describe_plain(mirror: str) -> str:
    """Return advice, for an error, to load the engine's checkpoints in a mirror where they lie; "" if there are none.

    Left out are those in a trainer's folder whose copy was cut short: the trainer's own files may be missing there.
    """
    from offload.checkpoint.contents import is_checkpoint, some_of
    from offload.checkpoint.folder import open_folder
    from offload.checkpoint.manifest import COMMIT_NAME
    from offload.checkpoint.marker import BEGUN

    ends = f"/{COMMIT_NAME}"
    names = [name for name, _ in open_folder(mirror).walk()]
    cut_short = [name.removesuffix(BEGUN) for name in names if name.endswith(f"/{BEGUN}")]  # "trainer's folder/"
    with_commit = [
        name.removesuffix(ends) for name in names if name.endswith(ends) and not name.startswith((*cut_short,))
    ]
    loadable = [folder for folder in [*(f"{mirror}/{name}" for name in with_commit), mirror] if is_checkpoint(folder)]
    return f"; load what is there from there, by optimizer.load_checkpoint: {some_of(loadable)}" if loadable else ""


def run(arguments: argparse.Namespace) -> int:
    """Copy a checkpoint from the mirror, and say what was copied.

    Raises:
        CheckpointError: Nothing is whole there, or it cannot be copied.
    """
    from offload.checkpoint.fetch import fetch, find_whole
    from offload.checkpoint.folder import open_folder

    mirror = arguments.mirror.rstrip("/")
    if not open_folder(mirror).walk():
        raise CheckpointError(f"{mirror} is not there, or empty")
    names = [arguments.name] if arguments.name else find_whole(mirror)
    if not names:
        raise CheckpointError(f"{mirror} has no whole folder of a trainer{_describe_plain(mirror)}")
    name = names[-1]  # without --name the one that became whole last
    nbytes = 0
    with closing(Progress(1, title="fetch", quiet=arguments.quiet, unit="B", after_s=5.0)) as progress:

        def show(done: int, total: int) -> None:
            """Show the bytes that are copied, and note them for the outcome."""
            nonlocal nbytes
            nbytes = done
            progress.show(done, total, name)

        fetch(mirror, name, arguments.folder, show)
    target = os.path.join(arguments.folder, name)
    tell(arguments, {"checkpoint": target, "bytes": nbytes}, f"{target}: {format_bytes(nbytes)}")
    return 0
