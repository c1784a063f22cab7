"""`offload verify`: reads one checkpoint, or all in a run's folder or of a path's stores, and reports damage."""

from __future__ import annotations

import argparse
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

from offload.cli.progress import Progress
from offload.cli.values import add_output, add_value, parse_path, to_json
from offload.errors import CheckpointError, ConfigError

WHOLE = "{checkpoint}: all {tiles} tiles are whole; {parameters} parameters"
AS_NOTED = "{checkpoint}: {files} files are there, with the sizes that were noted when it was saved; none was read"
INTERRUPTED = "{checkpoint}: no checkpoint, as its save was interrupted, or is under way"

DEPTH = 3
"""How deep below a run's folder checkpoints are looked for."""


def add_parser(commands: Any) -> None:
    """Add the subcommand `verify` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "verify",
        help="read a checkpoint whole and report what is damaged",
        description="Read every tile of a checkpoint (or of all in a run's folder, or of all that the stores on a "
        "path belong to), verify headers and checksums, and report damage by parameter. Files of a trainer's own "
        "are not read, but missing ones, and other sizes, are told; where its save was interrupted, that is said.",
    )
    what = 'folder of a checkpoint, "s3://" too, or of a trainer\'s run; or a path with stores'
    add_value(parser, "PATH", parse_path, what)
    add_output(parser, "print the outcome as JSON", "no progress; print damage only")


def run(arguments: argparse.Namespace) -> int:
    """Verify and report.

    Returns:
        The exit status: 0 if all is well, 1 if something is damaged, or nothing is whole.

    Raises:
        ConfigError: There is neither a checkpoint nor a store.
        CheckpointError: The checkpoint cannot be opened.
    """
    report = [_verify(folder, quiet=arguments.quiet) for folder in _checkpoints_of(arguments.path)]
    problems = [problem for row in report for problem in row["problems"]]
    whole = [row for row in report if not row["problems"] and "interrupted" not in row]
    lines = problems + [INTERRUPTED.format_map(row) for row in report if "interrupted" in row]
    if not arguments.quiet:
        lines += [(AS_NOTED if "files" in row else WHOLE).format_map(row) for row in whole]
    if arguments.json:
        print(to_json(report, indent=2))
    elif lines:
        print("\n".join(lines))
    return 1 if problems or not whole else 0


def _checkpoints_of(path: str) -> list[str]:
    """Return the folders to verify: `path` itself if it is a checkpoint, else those that have to do with it.

    These are the checkpoints that are named by pins of stores on the path, and the folders of `_checkpoints_below`.

    Raises:
        CheckpointError: There are none; says why `path` itself is no checkpoint.
    """
    from offload.checkpoint.contents import read_commit
    from offload.checkpoint.folder import open_folder
    from offload.checkpoint.stores import find_stores

    try:
        read_commit(open_folder(path))
        return [path]
    except CheckpointError:
        try:
            stores = find_stores(path)
        except ConfigError:  # no directory that can be read, or no bucket that can be used
            stores = []
        pinned = {pin.folder for store in stores for pin in store.pins}
        folders = [*sorted(pinned), *(folder for folder in _checkpoints_below(path) if folder not in pinned)]
        if not folders:
            raise  # why `path` itself is no checkpoint
        return folders


def _checkpoints_below(path: str) -> list[str]:
    """Return the folders to verify in a run's folder, at most `DEPTH` below it.

    A folder is one of them if it has a checkpoint of the engine (a `COMMIT`). A framework's folder also is one if its
    save has not ended, if files are missing or of another size than was noted, or if the engine has nothing in it or
    below it, so that the framework's files are all there is. Nothing is looked for below a folder that is one.
    """
    from offload.checkpoint.folder import open_folder
    from offload.checkpoint.manifest import COMMIT_NAME, OWN
    from offload.checkpoint.marker import Mark, mark_in
    from offload.checkpoint.whole import find_changed

    folders = []
    for folder, names, files in os.walk(path):
        opened = open_folder(folder)
        mark, marker = mark_in(opened)
        is_listed = mark is Mark.BEGUN or COMMIT_NAME in files
        is_listed = is_listed or (mark is Mark.WHOLE and bool(find_changed(opened, marker)))
        # A marker that names files is that of a framework's folder. If the engine has files in it or below, which
        # `OWN` matches by their names, the checkpoint there is listed in its place, if it has a `COMMIT`.
        if marker.files and not is_listed:
            is_listed = not any(OWN.fullmatch(name) for _, _, below in os.walk(folder) for name in below)
        if is_listed:
            folders.append(folder)
        is_deepest = len(Path(folder).relative_to(path).parts) == DEPTH
        # In place: this is how os.walk learns which folders to enter, and in which order.
        names[:] = [] if is_listed or is_deepest else sorted(names, key=_natural_order_key)
    return folders


def _natural_order_key(name: str) -> list[tuple[int, str]]:
    """Return the key that sorts names by the size of the numbers in them: step_9 before step_10."""
    # Each part is a pair, so that numbers and text can be compared; text comes before numbers.
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _verify(folder: str, *, quiet: bool) -> dict[str, Any]:
    """Read a checkpoint whole, and return a row for `--json`.

    Returns:
        "checkpoint" is the folder, "parameters" and "tiles" are counts of what was read, "problems" are texts about
        damage. "interrupted" is there if the save was interrupted, or is under way: nothing is read then. "files",
        their number, is there for a framework's folder in which no checkpoint of the engine can be read: its files
        are not read either, but their sizes are compared with those noted in its marker.
    """
    from offload.checkpoint.contents import is_checkpoint
    from offload.checkpoint.folder import open_folder
    from offload.checkpoint.manifest import COMMIT_NAME, MODEL_KEY
    from offload.checkpoint.marker import Mark, mark_in, marked_around
    from offload.checkpoint.reader import Checkpoint
    from offload.checkpoint.whole import find_changed
    from offload.optim.model import SavedRest

    problems: list[str] = []
    tiles = parameters = 0
    marked_folder, mark = marked_around(folder)
    if mark is Mark.BEGUN:
        return {"checkpoint": folder, "parameters": 0, "tiles": 0, "problems": [], "interrupted": True}
    try:
        if mark is Mark.WHOLE:
            marked = open_folder(marked_folder)
            _, marker = mark_in(marked)
            problems += find_changed(marked, marker)
            # If the marker is in a folder above, that one is the framework's, and `folder` is the engine's checkpoint
            # in it. If `folder` itself has the marker, it may have the framework's files alone.
            has_checkpoint = marked_folder != folder or marked.read(COMMIT_NAME) is not None
            # Without a checkpoint that can be read, files' sizes are all there is to verify.
            if not has_checkpoint or (problems and not is_checkpoint(folder)):
                row = {"checkpoint": folder, "parameters": 0, "tiles": 0, "problems": problems}
                return {**row, "files": len(marker.files)}
        with Checkpoint(folder) as checkpoint:
            parameters = len(checkpoint.names)
            total = sum(len(manifest.tiles) for manifest in checkpoint.manifests)
            for rank, manifest in enumerate(checkpoint.manifests):
                extra = checkpoint.extra(rank)  # raises if its file is missing or damaged
                if manifest.metadata.get(MODEL_KEY):  # weights and buffers that no optimizer has were saved, too
                    SavedRest.read(checkpoint.path, checkpoint.id, rank, extra or b"").verify()
            with closing(Progress(total, title="verify", quiet=quiet, unit="tile", after_s=5.0)) as progress:
                for _, _, problem in checkpoint.verify():
                    tiles += 1
                    if problem is not None:
                        problems.append(str(problem))
                    progress.show(tiles, total, folder)
    except CheckpointError as error:
        problems.append(str(error))
    return {"checkpoint": folder, "parameters": parameters, "tiles": tiles, "problems": problems}
