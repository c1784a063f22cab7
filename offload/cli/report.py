"""The table at the end of a run, and its two pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.record import LAST_STEPS
from offload.cli.values import in_columns
from offload.schedule.timeline import Interval, covered_s, lane_order, tracks
from offload.units import format_apart, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LANE_COLOURS = {
    "cpu": "#4c78a8",
    "gpu": "#b279a2",
    "read": "#54a24b",
    "write": "#e4853a",
    "h2d": "#72b7b2",
    "d2h": "#9d755d",
}
_LANE_TITLES = {"cpu": "CPU update", "gpu": "GPU update", "h2d": "host to GPU", "d2h": "GPU to host"}
_SHADES = (0.55, 0.95)
_TEXT_COLOURS = ("black", "white")
_LIGHT = "#bbbbbb"


def table(summary: Mapping[str, Any]) -> str:
    """Return what a run came to, as aligned lines of text."""
    rows = list(_rows(summary)) if summary["steps"] else []
    if summary["verdict"]:
        rows.append(("comparison", summary["verdict"]))
    if summary["steps"]:
        rows.append(("results", summary["output"]))
    return in_columns(rows)


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def seconds(name: str) -> str:
        return "unknown" if summary[name] is None else format_seconds(summary[name])

    yield "steps", f"{summary['steps']} in {seconds('seconds')}"
    first, final, entropy = summary["first_loss"], summary["final_loss"], summary["text"]["byte_entropy"]
    last = f"{final:.3f} over the last {summary['final_loss_steps']} steps"
    yield "loss", f"{first:.3f} at first, {last}; single bytes alone {entropy:.3f}"
    yield "throughput", f"{summary['tokens_per_s']:,.0f} tokens/s (median)"
    yield "forward", f"{seconds('forward_s')} (median)"
    yield "backward", f"{seconds('backward_s')} (median)"
    yield "step", f"{seconds('step_s')} (median; clipping and zero_grad included)"
    what, predicted, measured = "the step alone", "predicted_step_s", "optimizer_step_s"
    if summary["predicted_iteration_s"]:  # the step is hidden in forward or backward
        yield "waited", f"{seconds('waited_s')} for the step, in it and after it (median)"
        what, predicted, measured = "an iteration", "predicted_iteration_s", "iteration_s"
    if summary[predicted] and summary[measured]:
        apart = format_apart(summary[predicted], summary[measured])
        yield "prediction", f"{seconds(predicted)} for {what}, measured {seconds(measured)}{apart}"
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
    """Yield each lane's predicted and measured seconds (medians), and which are furthest apart."""
    apart_s = {}
    for lane in sorted(lanes, key=lane_order):
        predicted, measured = lanes[lane]["predicted_s"], lanes[lane]["measured_s"]
        if predicted is not None and measured is not None and (predicted or measured):
            apart_s[lane] = measured - predicted
            apart = format_apart(predicted, measured)
            yield (
                _lane_title(lane),
                f"{format_seconds(predicted)} predicted, {format_seconds(measured)} measured{apart}",
            )
    if apart_s:
        furthest = max(apart_s, key=lambda lane: abs(apart_s[lane]))
        how = "longer" if apart_s[furthest] > 0 else "shorter"
        yield "furthest off", f"{_lane_title(furthest)}, {format_seconds(abs(apart_s[furthest]))} {how}"


def draw_losses(path: Path, losses: Sequence[float], byte_entropy: float) -> None:
    """Draw the loss over the steps, raw and averaged, beside what needs no context."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(8.0, 4.5)
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=_LIGHT, linewidth=1, label="each step")
    means = [sum(part) / len(part) for part in (losses[max(0, end - LAST_STEPS) : end] for end in steps)]
    axes.plot(steps, means, color=_LANE_COLOURS["cpu"], linewidth=2, label=f"mean of the last {LAST_STEPS} steps")
    axes.axhline(byte_entropy, color="#666666", linestyle=":", linewidth=1.2, label="entropy of single bytes")
    axes.set_title("Training loss", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats a byte)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)


def draw_lanes(path: Path, timeline: Sequence[Interval], paths: Sequence[str], *, step: int) -> None:
    """Draw one step: a row a lane, a bar an operation, overlapping operations of a lane below each other.

    Args:
        path: The picture's file.
        timeline: The step's operations, as `optimizer.timeline()` gives them.
        paths: What the path numbers in the lanes' names stand for.
        step: Number of the step, for the title.
    """
    lanes = sorted({interval.lane for interval in timeline}, key=lane_order)
    figure, axes = new_figure(10.0, 1.9 + 0.62 * max(1, len(lanes)) + 0.2 * len(paths))
    start_s = min((interval.started_s for interval in timeline), default=0.0)
    span_s = max((interval.finished_s for interval in timeline), default=0.0) - start_s or 1e-6
    unit, factor = ("s", 1.0) if span_s >= 10 else ("ms", 1e3) if span_s >= 10e-3 else ("µs", 1e6)
    in_row = axes.get_yaxis_transform()  # x: a share of the width; y: a lane's row
    for row, lane in enumerate(lanes):
        intervals = sorted((interval for interval in timeline if interval.lane == lane), key=lambda item: item[2:4])
        _draw_lane(axes, row, intervals, start_s=start_s, span_s=span_s, factor=factor)
        axes.text(1.01, row, _lane_figures(intervals, span_s), transform=in_row, va="center", fontsize=8)
    axes.set_yticks(range(len(lanes)), [_lane_title(lane) for lane in lanes], parse_math=False)
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    axes.set_xlim(0, span_s * factor * 1.01)
    axes.set_xlabel(f"time since the step's first operation ({unit})")
    axes.set_title(f"Lanes during step {step}", loc="left")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    if not timeline:
        axes.text(0.5, 0.5, "no operations", transform=axes.transAxes, ha="center", va="center")
    names = (f"path {index}: {name if len(name) <= 110 else '…' + name[-109:]}" for index, name in enumerate(paths))
    figure.supxlabel("\n".join(names), fontsize=8, color="#555555", x=0.01, ha="left", parse_math=False)
    figure.savefig(path, dpi=140)


def _draw_lane(
    axes: Axes, row: int, intervals: Sequence[Interval], *, start_s: float, span_s: float, factor: float
) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    used = tracks(intervals)
    depth = max(used, default=0) + 1
    height = 0.76 / depth
    colour = _LANE_COLOURS.get(intervals[0].lane.split(":")[0], "#888888")
    bars = []
    for number, ((_, label, began_s, ended_s, *_), track) in enumerate(zip(intervals, used, strict=True)):
        left, right = (began_s - start_s) * factor, (ended_s - start_s) * factor
        top = row - 0.38 + height * track
        bars.append([(left, top), (right, top), (right, top + height), (left, top + height)])
        # About 105 characters of this size fit across.
        if depth == 1 and 0 < len(label) < 105 * (ended_s - began_s) / span_s:
            style: Any = {"ha": "center", "va": "center", "fontsize": 7, "parse_math": False}
            axes.text((left + right) / 2, top + height / 2, label, color=_TEXT_COLOURS[number % 2], **style)
    # Two shades in turn, so that operations that follow each other without a gap can be told apart. All in one, as
    # each bar of its own takes a millisecond.
    shades = [to_rgba(colour, _SHADES[number % 2]) for number in range(min(2, len(bars)))]
    axes.add_collection(PolyCollection(bars, facecolors=shades, linewidths=0))


def _lane_figures(intervals: Sequence[Interval], span_s: float) -> str:
    """Return a lane's bytes, its rate while busy, and the share of the step that it was busy for."""
    busy_s, nbytes = covered_s(intervals), sum(interval.nbytes for interval in intervals)
    moved = f"{format_bytes(nbytes)} at {format_bytes(nbytes / busy_s)}/s\n" if nbytes and busy_s else ""
    return f"{moved}busy {busy_s / span_s:.0%}"


def _lane_title(lane: str) -> str:
    kind, _, index = lane.partition(":")
    return f"{kind} path {index}" if index else _LANE_TITLES.get(lane, lane)


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of so many inches, and its axes."""
    # Not pyplot: it would keep figures in a global list and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
