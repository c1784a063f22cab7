"""`offload trace`: the timeline of a run's last step, for Perfetto and as a picture."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from offload.cli.record import TIMELINE_NAME, Interval, to_json, write_text
from offload.cli.values import parse_output, parse_path, read_values
from offload.config import MAX_INTEGER
from offload.engine.timeline import trace
from offload.errors import ConfigError
from offload.units import DAY_S

MOST_OPERATIONS = 50_000
"""Of a timeline that is drawn."""
MOST_LANES = 100
MOST_S = 1e10
"""Of a monotonic clock: three centuries."""

_Name = Annotated[str, msgspec.Meta(max_length=4096)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]


class _Timeline(msgspec.Struct):
    """What `offload train` leaves of its last step."""

    step: _Count
    paths: Annotated[list[_Name], msgspec.Meta(max_length=MOST_LANES)]
    operations: Annotated[list[tuple[_Name, _Name, float, float, _Count]], msgspec.Meta(max_length=MOST_OPERATIONS)]


def add_parser(commands: Any) -> None:
    """Add the subcommand `trace` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "trace",
        help="write what every lane did during a step, for Perfetto and as a picture",
        description="Write the timeline of the last step of an `offload train` run as a trace that Perfetto "
        "(ui.perfetto.dev) and chrome://tracing open, and as a picture beside it.",
    )
    parser.add_argument("run", metavar="RUN", help=f"the run's folder, which holds {TIMELINE_NAME}")
    parser.add_argument(
        "--out", metavar="FILE", help="the trace; its picture gets the same name (default: RUN/trace.json)"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing")


def run(arguments: argparse.Namespace) -> int:
    """Read a run's timeline and write both files.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: There is no such run, or a file cannot be written.
    """
    from offload.cli.report import draw_lanes

    folder = Path(parse_path("RUN", arguments.run))
    out = Path(parse_output("--out", str(folder / "trace.json") if arguments.out is None else arguments.out))
    step, paths, timeline = _read(folder)
    picture = Path(parse_output("--out", str(out.with_suffix(".png"))))
    if picture == out:
        raise ConfigError(
            "--out", str(out), "name the trace, such as trace.json: its picture gets that name with .png"
        )
    try:
        write_text(out, to_json(trace(timeline, paths, step=step)) + "\n")
        draw_lanes(picture, timeline, paths, step=step)
    except OSError as cause:
        raise ConfigError("--out", str(out), f"it cannot be written: {cause.strerror}") from cause
    if arguments.json:
        print(json.dumps({"trace": str(out), "picture": str(picture), "operations": len(timeline)}))
    elif not arguments.quiet:
        print(f"{len(timeline)} operations of step {step}: {out} (open it at ui.perfetto.dev) and {picture}")
    return 0


def _read(folder: Path) -> tuple[int, list[str], list[Interval]]:
    file = folder / TIMELINE_NAME
    if not os.path.lexists(file):
        raise ConfigError("RUN", str(folder), f"name the folder of an `offload train` run, with a {TIMELINE_NAME}")
    values = read_values("RUN", str(file))
    try:
        found = msgspec.convert(values, _Timeline)
        for lane, _, began_s, ended_s, _ in found.operations:
            if not 0 <= ended_s - began_s < DAY_S or abs(began_s) > MOST_S:
                raise ValueError(f"an operation of {lane} from {began_s} to {ended_s} s")
        if (lanes := len({operation[0] for operation in found.operations})) > MOST_LANES:
            raise ValueError(f"operations on {lanes:,} lanes, and {MOST_LANES} are the most")
    except (ValueError, msgspec.ValidationError) as cause:
        raise ConfigError("RUN", str(folder), f"its {TIMELINE_NAME} is damaged: {cause}") from cause
    return found.step, found.paths, found.operations
