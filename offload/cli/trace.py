"""`offload trace`: the timeline of a run's last step, for Perfetto and as a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from offload.cli.record import TIMELINE_NAME, Interval, to_json, write_text
from offload.engine.timeline import trace
from offload.errors import ConfigError


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

    step, paths, timeline = _read(Path(arguments.run))
    out = Path(arguments.out) if arguments.out else Path(arguments.run) / "trace.json"
    picture = out.with_suffix(".png")
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
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        timeline = [(str(a), str(b), float(c), float(d), int(e)) for a, b, c, d, e in found["operations"]]
        return int(found["step"]), [str(path) for path in found["paths"]], timeline
    except OSError as cause:
        allowed = f"name the folder of an `offload train` run ({TIMELINE_NAME}: {cause.strerror})"
        raise ConfigError("RUN", str(folder), allowed) from cause
    except (ValueError, TypeError, KeyError) as cause:
        raise ConfigError("RUN", str(folder), f"its {TIMELINE_NAME} is damaged: {cause!r}") from cause
