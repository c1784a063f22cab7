"""The table at the end of a run, and `offload report`: a page of what it did."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from offload.cli.values import add_output, add_value, in_columns, parse_output, parse_path, read_values, tell
from offload.errors import ConfigError
from offload.pictures.draw import lane_title
from offload.pictures.report import PAGE_NAME, REPORT_NAME
from offload.schedule.timeline import lane_order
from offload.units import format_apart, format_bytes, format_seconds


def add_parser(commands: Any) -> None:
    """Add the subcommand `report` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "report",
        help="write a page of what a run did: plan, lanes, steps and their predictions, memory",
        description="Write a page of HTML, which needs no other file, of what a run did: the plan, what each lane "
        "did in the last step, steps beside their predictions, memory beside the plan, checkpoints, and what would "
        "help. A run is what `offload train` or `optimizer.report(FOLDER)` wrote.",
    )
    add_value(parser, "RUN", parse_path, f"the run's folder, which holds {REPORT_NAME}")
    add_value(parser, "--out", parse_output, f"the page (default: RUN/{PAGE_NAME})")
    add_output(parser, "print what was written as JSON", "print nothing")


def run(arguments: argparse.Namespace) -> int:
    """Read what a run left, and write its page.

    Raises:
        ConfigError: There is no such run, or the page cannot be written.
    """
    from offload.cli.trace import WRITERS, read_timeline
    from offload.pictures.report import Report, page

    folder = Path(arguments.run)
    file = folder / REPORT_NAME
    if not os.path.lexists(file):
        raise ConfigError("RUN", str(folder), f"name a run's folder, with a {REPORT_NAME}: {WRITERS}")
    try:
        report = msgspec.convert(read_values("RUN", str(file)), Report)
    except (ValueError, msgspec.ValidationError) as cause:
        raise ConfigError("RUN", str(folder), f"its {REPORT_NAME} is damaged: {cause}") from cause
    step, paths, timeline = read_timeline(folder)
    # The default is checked, too: something that is no file may have that name.
    out = Path(arguments.out or parse_output("--out", str(folder / PAGE_NAME)))
    try:
        out.write_text(page(report, timeline, paths, step=step), encoding="utf-8")
    except OSError as cause:
        raise ConfigError("--out", str(out), f"it cannot be written: {cause.strerror}") from cause
    tell(arguments, {"page": str(out)}, f"{out}: open it in a browser")
    return 0


def table(summary: Mapping[str, Any]) -> str:
    """Return the summary of a run of `offload train` (its summary.json) as aligned lines of text; see `_rows`."""
    rows = list(_rows(summary)) if summary["steps"] else []
    if summary["verdict"]:
        rows.append(("comparison", summary["verdict"]))
    if summary["steps"]:
        rows.append(("results", summary["output"]))
    return in_columns(rows)


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the table's rows about a run that has taken a step, each a title and a text."""

    def seconds(name: str) -> str:
        """Return a duration of the summary in words."""
        return "unknown" if summary[name] is None else format_seconds(summary[name])

    yield "steps", f"{summary['steps']} in {seconds('seconds')}"
    last = f"{summary['final_loss']:.3f} over the last {summary['final_loss_steps']} steps"
    entropy = summary["text"]["byte_entropy"]
    yield "loss", f"{summary['first_loss']:.3f} at first, {last}; single bytes alone {entropy:.3f}"
    yield "throughput", f"{summary['tokens_per_s']:,.0f} tokens/s (median)"
    yield "forward", f"{seconds('forward_s')} (median)"
    yield "backward", f"{seconds('backward_s')} (median)"
    yield "step", f"{seconds('step_s')} (median; clipping and zero_grad included)"
    # Compared with its prediction is the step, or the whole iteration if the step is hidden in forward or backward.
    subject, predicted_name, measured_name = ("the step alone", "predicted_step_s", "optimizer_step_s")
    if summary["predicted_iteration_s"]:  # the step is hidden
        yield "waited", f"{seconds('waited_s')} for the step, in it and after it (median)"
        subject, predicted_name, measured_name = ("an iteration", "predicted_iteration_s", "iteration_s")
    if summary[predicted_name] and summary[measured_name]:
        apart = format_apart(summary[predicted_name], summary[measured_name])
        yield "prediction", f"{seconds(predicted_name)} for {subject}, measured {seconds(measured_name)}{apart}"
    yield from _lane_rows(summary["lanes"])
    if summary["state_bytes"]:
        state, streamed = format_bytes(summary["state_bytes"]), format_bytes(summary["streamed_bytes"])
        yield "state", f"{state}, {summary['resident_share']:.0%} resident in memory, {streamed} streamed"
    for index, path in enumerate(summary["paths"]):
        read, written = (format_bytes(path[way] or 0) for way in ("read_bytes", "write_bytes"))
        yield f"path {index}", f"{read} read, {written} written a step; {path['path']}"
    if summary["in_memory"]:
        yield "in memory", f"step {format_seconds(summary['in_memory']['step_s'])} (median), same loop"


def _lane_rows(lanes: Mapping[str, Mapping[str, float | None]]) -> Iterator[tuple[str, str]]:
    """Yield a row for each lane that had work: predicted and measured seconds; and one for the lane furthest off.

    `lanes` has for each lane's name the medians "predicted_s" and "measured_s"; None where they are unknown.
    """
    apart_s = {}
    for lane in sorted(lanes, key=lane_order):
        predicted, measured = lanes[lane]["predicted_s"], lanes[lane]["measured_s"]
        if predicted is not None and measured is not None and (predicted or measured):  # it had work
            apart_s[lane] = measured - predicted
            apart = format_apart(predicted, measured)
            yield (
                lane_title(lane),
                f"{format_seconds(predicted)} predicted, {format_seconds(measured)} measured{apart}",
            )
    if apart_s:
        furthest = max(apart_s, key=lambda lane: abs(apart_s[lane]))
        how = "longer" if apart_s[furthest] > 0 else "shorter"
        yield "furthest off", f"{lane_title(furthest)}, {format_seconds(abs(apart_s[furthest]))} {how}"
