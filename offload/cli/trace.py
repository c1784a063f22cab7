"""`offload trace`: the timeline of a run's last step, for Perfetto and as a picture."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from offload.cli.values import add_output, add_value, parse_output, parse_path, read_values, tell, to_json
from offload.config import MAX_INTEGER
from offload.errors import ConfigError
from offload.pictures.report import TIMELINE_NAME
from offload.schedule.timeline import Interval, trace
from offload.units import DAY_S

WRITERS = "`offload train` writes it, and `optimizer.report(FOLDER)`"

MOST_OPERATIONS = 50_000
"""Most operations of a timeline that is read and drawn."""
MOST_LANES = 100
MOST_S = 1e10
"""Largest time on a monotonic clock: three centuries."""

_Name = Annotated[str, msgspec.Meta(max_length=4096)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]


class _Timeline(msgspec.Struct):
    """The file `TIMELINE_NAME` in a run's folder, as `write_timeline` writes it.

    Attributes:
        step: Number of the run's last step.
        paths: Where each path is, by its number.
        operations: What the lanes did in that step: the first five fields of each `Interval`.
    """

    step: _Count
    paths: Annotated[list[_Name], msgspec.Meta(max_length=MOST_LANES)]
    operations: Annotated[list[tuple[_Name, _Name, float, float, _Count]], msgspec.Meta(max_length=MOST_OPERATIONS)]


def add_parser(commands: Any) -> None:
    """Add the subcommand `trace` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "trace",
        help="write what every lane did during a step, for Perfetto and as a picture",
        description="Write the timeline of the last step of a run as a trace that Perfetto (ui.perfetto.dev) and "
        "chrome://tracing open, and as a picture beside it. A run is what `offload train` or "
        "`optimizer.report(FOLDER)` wrote.",
    )
    add_value(parser, "RUN", parse_path, f"the run's folder, which holds {TIMELINE_NAME}")
    add_value(parser, "--out", parse_output, "the trace; its picture gets the same name (default: RUN/trace.json)")
    add_output(parser, "print what was written as JSON", "print nothing")


def run(arguments: argparse.Namespace) -> int:
    """Read a run's timeline and write both files.

    Raises:
        ConfigError: There is no such run, or a file cannot be written.
    """
    from offload.pictures.draw import draw_lanes

    folder = Path(arguments.run)
    # The default is checked, too: something that is no file may have that name.
    out = Path(arguments.out or parse_output("--out", str(folder / "trace.json")))
    step, paths, timeline = read_timeline(folder)
    picture = Path(parse_output("--out", str(out.with_suffix(".png"))))
    if picture == out:
        raise ConfigError(
            "--out", str(out), "name the trace, such as trace.json: its picture gets that name with .png"
        )
    try:
        out.write_text(to_json(trace(timeline, paths, step=step)) + "\n", encoding="utf-8")
        draw_lanes(picture, timeline, paths, step=step)
    except OSError as cause:
        raise ConfigError("--out", str(out), f"it cannot be written: {cause.strerror}") from cause
    outcome = {"trace": str(out), "picture": str(picture), "operations": len(timeline)}
    text = f"{len(timeline)} operations of step {step}: {out} (open it at ui.perfetto.dev) and {picture}"
    tell(arguments, outcome, text)
    return 0


def read_timeline(folder: Path) -> tuple[int, list[str], list[Interval]]:
    """Return a run's last step: its number, where each path is, and its operations.

    Raises:
        ConfigError: There is no such run, or its file is damaged.
    """
    file = folder / TIMELINE_NAME
    if not os.path.lexists(file):
        raise ConfigError("RUN", str(folder), f"name a run's folder, with a {TIMELINE_NAME}: {WRITERS}")
    values = read_values("RUN", str(file))
    try:
        content = msgspec.convert(values, _Timeline)
        for lane, _, began_s, ended_s, _ in content.operations:
            if not 0 <= ended_s - began_s < DAY_S or abs(began_s) > MOST_S:
                raise ValueError(f"an operation of {lane} from {began_s} to {ended_s} s")
        if (lanes := len({operation[0] for operation in content.operations})) > MOST_LANES:
            raise ValueError(f"operations on {lanes:,} lanes, and {MOST_LANES} are the most")
    except (ValueError, msgspec.ValidationError) as cause:
        raise ConfigError("RUN", str(folder), f"its {TIMELINE_NAME} is damaged: {cause}") from cause
    return content.step, content.paths, [Interval(*operation) for operation in content.operations]
