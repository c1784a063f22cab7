"""`offload gc`: deletes what sessions that were killed have left behind."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from offload.cli.values import add_output, add_value, parse_path, tell
from offload.errors import ConfigError
from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.checkpoint.stores import Leftover


def add_parser(commands: Any) -> None:
    """Add the subcommand `gc` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "gc",
        help="delete stores that killed sessions have left on a path",
        description="Delete stores (offload-<uuid>) that no process uses and no checkpoint needs. What checkpoints "
        "refer to stays, as does what a missing checkpoint may refer to, and everything else there. A bucket does "
        "not tell whether a process uses a store: there one is deleted if its session has noted its end, if its "
        "process was of this machine and is gone, or if --store names it.",
    )
    where = "directory or s3://bucket/prefix that was given as a path to train with"
    add_value(parser, "PATH", parse_path, where, nargs="+")
    parser.add_argument(
        "--store",
        action="append",
        metavar="UUID",
        help="look at this store alone (several times: at these); in a bucket this says that its session has ended",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument(
        "--really",
        action="store_true",
        help="also delete stores of missing checkpoints: these are not in the folder they were written to, and "
        "nothing there says that they were released. They were deleted by hand, never committed, or moved, or "
        "another folder is mounted there; a checkpoint that is still somewhere is lost by this",
    )
    add_output(parser, "print the outcome as JSON", "print nothing")


def run(arguments: argparse.Namespace) -> int:
    """Look at every store on the paths, delete what may go, say so.

    Returns:
        The exit status: 0, or 1 if a store that may go could not be deleted.

    Raises:
        ConfigError: A path is not a directory, or a bucket that can be used; or there is no such store.
    """
    from offload.checkpoint.stores import find_stores, remove

    leftovers = [(path, store) for path in arguments.path for store in find_stores(path)]
    if arguments.store is not None:
        # On its path a store is called "offload-<uuid>".
        uuids = [store.path.rpartition("/offload-")[2] for _, store in leftovers]
        for uuid in arguments.store:
            if uuid not in uuids:
                advice = f"name a store that is there: {', '.join(uuids) or 'there is none'}"
                raise ConfigError("--store", uuid, advice)
        leftovers = [pair for pair, uuid in zip(leftovers, uuids, strict=True) if uuid in arguments.store]
    rows = []
    lines = []
    failed = False
    for path, store in leftovers:
        verdict = _why_kept(store, arguments)
        if verdict is None and arguments.dry_run:
            verdict = "would be deleted"
        elif verdict is None:
            # A bucket may not tell whether a store's session has ended: by --store the user says that it has.
            is_removed = remove(store, missing=arguments.really, ended=arguments.store is not None)
            failed = failed or not is_removed
            verdict = "deleted"
            if not is_removed:
                verdict = "kept: it cannot be deleted, or has no lock file; delete it by hand if nobody uses it"
        rows.append({"path": path, "store": store.path, "bytes": store.nbytes, "verdict": verdict})
        lines.append(f"{store.path}  {format_bytes(store.nbytes)}  {verdict}")
    tell(arguments, rows, "\n".join(lines) or "no stores there")
    return 1 if failed else 0


def _why_kept(store: Leftover, arguments: argparse.Namespace) -> str | None:
    """Return why a store is not to be deleted; None if it is."""
    if store.problem:
        return f"kept: {store.problem}"
    if store.used_by is not None:
        return f"kept: process {store.used_by or '?'} uses it"  # 0 where its pid is unknown
    if store.being_read:
        return "kept: somebody reads it"
    if store.pins:
        return f"kept: needed by {', '.join(pin.folder for pin in store.pins)}"
    if store.missing and not arguments.really:
        return (
            f"missing: its checkpoint in {', '.join(pin.folder for pin in store.missing)} was deleted, or moved and "
            "not opened since, or this store was copied or moved; if it is gone for good, --really deletes this"
        )
    if store.opened_by and arguments.store is None:
        return f"kept: {store.opened_by} has opened it and may use it; if it does not, --store deletes it"
    return None
