"""Pictures of plans, steps and losses, by matplotlib, which is imported only when one is drawn.

Lanes and tiers each have a function `..._into`, which draws them into given axes; one `..._height`, which returns
the inches that they take; and one `..._figure`, which returns them as a figure of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from offload.schedule.timeline import Interval, covered_s, lane_order, tracks
from offload.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_LANE_COLOURS = {
    "cpu": "#4c78a8",
    "gpu": "#b279a2",
    "read": "#54a24b",
    "write": "#e4853a",
    "h2d": "#72b7b2",
    "d2h": "#9d755d",
}
LANE_TITLES = {"cpu": "CPU update", "gpu": "GPU update", "h2d": "host to GPU", "d2h": "GPU to host"}
_PART_COLOURS = ("#4c78a8", "#e4853a", "#54a24b", "#b279a2", "#72b7b2", "#9d755d", "#eeca3b", "#bab0ac")
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]

MOST_NAME = 40
"""Characters of a name beside a bar."""

MOST_SHAPES = 300
"""Most bars of a lane that a vector picture has as shapes; if a lane has more, its bars become an image of pixels."""

LANES_TITLE = "Lanes during a step, predicted"
_SHADES = (0.55, 0.95)  # opacities of a lane's bars, which take turns
_TEXT_COLOURS = ("black", "white")  # of the text on bars of each opacity
_LIGHT = "#bbbbbb"


def draw_losses(path: Path, losses: Sequence[float], byte_entropy: float, mean_of: int) -> None:
    """Draw the loss of each step, its running mean, and for comparison the loss of a model that ignores all context.

    Args:
        path: The picture's file.
        losses: Of each step, the first one first; nats a byte.
        byte_entropy: The loss of a model that knows only how frequent each byte is, in nats.
        mean_of: Steps, the latest ones, over which the mean is taken.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(8.0, 4.5)
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=_LIGHT, linewidth=1, label="each step")
    windows = [losses[max(0, end - mean_of) : end] for end in steps]
    means = [sum(window) / len(window) for window in windows]
    axes.plot(steps, means, color=_LANE_COLOURS["cpu"], linewidth=2, label=f"mean of the last {mean_of} steps")
    axes.axhline(byte_entropy, color="#666666", linestyle=":", linewidth=1.2, label="entropy of single bytes")
    axes.set_title("Training loss", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats a byte)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)


def draw_lanes(path: Path, timeline: Sequence[Interval], paths: Sequence[str], *, step: int) -> None:
    """Draw one step: a row for each lane, a bar for each operation, bars that overlap in time below each other.

    Args:
        path: The picture's file.
        timeline: The step's operations, as `optimizer.timeline()` gives them.
        paths: What the path numbers in the lanes' names stand for.
        step: Number of the step, for the title.
    """
    lanes_figure(timeline, paths, title=f"Lanes during step {step}").savefig(path, dpi=140)


def lanes_figure(timeline: Sequence[Interval], paths: Sequence[str], *, title: str) -> Figure:
    """Return the picture of a step; see `draw_lanes`."""
    figure, axes = new_figure(10.0, lanes_height(timeline, paths))
    lanes_into(figure, axes, timeline, paths, title=title)
    return figure


def lanes_height(timeline: Sequence[Interval], paths: Sequence[str]) -> float:
    """Return the height in inches of a picture of a step's lanes: title and axis, rows of lanes, lines of paths."""
    return 1.9 + 0.62 * max(1, len({interval.lane for interval in timeline})) + 0.2 * len(paths)


def lanes_into(
    figure: Figure | SubFigure, axes: Axes, timeline: Sequence[Interval], paths: Sequence[str], *, title: str
) -> None:
    """Draw a step's lanes into `axes`, and write the name of each path below them, on `figure`; see `draw_lanes`."""
    lanes = sorted({interval.lane for interval in timeline}, key=lane_order)
    start_s = min((interval.started_s for interval in timeline), default=0.0)
    end_s = max((interval.finished_s for interval in timeline), default=0.0)
    span_s = end_s - start_s or 1e-6  # not 0: it is divided by
    unit, per_s = ("s", 1.0)  # the unit of the time axis, and how many of it a second has
    if span_s < 10:
        unit, per_s = ("ms", 1e3) if span_s >= 10e-3 else ("µs", 1e6)
    in_row = axes.get_yaxis_transform()  # x: a share of the width; y: a lane's row
    for row, lane in enumerate(lanes):
        intervals = [interval for interval in timeline if interval.lane == lane]
        intervals.sort(key=lambda interval: (interval.started_s, interval.finished_s))
        _draw_lane(axes, row, intervals, start_s=start_s, span_s=span_s, per_s=per_s)
        axes.text(1.01, row, _lane_figures(intervals, span_s), transform=in_row, va="center", fontsize=8)
    # `parse_math=False`, here and below: a name may have a "$", which matplotlib would take for a formula's begin.
    axes.set_yticks(range(len(lanes)), [_shortened(lane_title(lane)) for lane in lanes], parse_math=False)
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)  # rows from the top down; room for one if there is none
    axes.set_xlim(0, span_s * per_s * 1.01)
    axes.set_xlabel(f"time since the step's first operation ({unit})")
    axes.set_title(title, loc="left", parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    if not timeline:
        axes.text(0.5, 0.5, "no operations", transform=axes.transAxes, ha="center", va="center")
    # Of a long name the end is shown, which tells paths apart.
    names = (f"path {index}: {name if len(name) <= 110 else '…' + name[-109:]}" for index, name in enumerate(paths))
    figure.supxlabel("\n".join(names), fontsize=8, color="#555555", x=0.01, ha="left", parse_math=False)


def _draw_lane(
    axes: Axes, row: int, intervals: Sequence[Interval], *, start_s: float, span_s: float, per_s: float
) -> None:
    """Draw the bars of a lane's operations; bars that overlap in time lie below each other.

    Args:
        axes: Where to draw.
        row: The lane's row: in the axes' coordinates its middle, as rows are 1 high.
        intervals: The operations, in the order of their starts.
        start_s: When the step's first operation started.
        span_s: Seconds from there to the end of the step's last operation.
        per_s: Units of the time axis in a second.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    rows_in_lane = tracks(intervals)  # by operation; operations that overlap in time have different ones
    depth = max(rows_in_lane, default=0) + 1
    height = 0.76 / depth  # of a bar; all bars take 0.76 of the lane's 1, from 0.38 above its middle to 0.38 below
    colour = _LANE_COLOURS.get(intervals[0].lane.split(":")[0], "#888888")
    bars = []
    for number, (interval, row_in_lane) in enumerate(zip(intervals, rows_in_lane, strict=True)):
        left, right = (interval.started_s - start_s) * per_s, (interval.finished_s - start_s) * per_s
        top = row - 0.38 + height * row_in_lane
        bars.append([(left, top), (right, top), (right, top + height), (left, top + height)])
        # Characters of the label's size that fit into this bar: about 105 fit across the whole axes. In a lane whose
        # bars lie below each other they are too low for a label.
        room = 105 * (interval.finished_s - interval.started_s) / span_s
        if depth == 1 and 0 < len(interval.label) < room:
            style: Any = {"ha": "center", "va": "center", "fontsize": 7, "parse_math": False}
            middle = (left + right) / 2
            axes.text(middle, top + height / 2, interval.label, color=_TEXT_COLOURS[number % 2], **style)
    # Two shades in turn, which matplotlib repeats, tell operations apart that follow each other without a gap. All
    # bars are one collection, as each would take a millisecond by itself.
    shades = [to_rgba(colour, _SHADES[number % 2]) for number in range(min(2, len(bars)))]
    drawn = PolyCollection(bars, facecolors=shades, linewidths=0)
    drawn.set_rasterized(len(bars) > MOST_SHAPES)
    axes.add_collection(drawn)


def _lane_figures(intervals: Sequence[Interval], span_s: float) -> str:
    """Return a lane's bytes, its rate while busy, and the share of the step that it was busy for."""
    busy_s = covered_s(intervals)
    nbytes = sum(interval.nbytes for interval in intervals)
    moved = f"{format_bytes(nbytes)} at {format_bytes(nbytes / busy_s)}/s\n" if nbytes and busy_s else ""
    return f"{moved}busy {busy_s / span_s:.0%}"


def lane_title(lane: str) -> str:
    """Return what a lane is called in pictures and tables: "read path 0" for "read:0", "CPU update" for "cpu"."""
    kind, _, index = lane.partition(":")
    return f"{kind} path {index}" if index else LANE_TITLES.get(lane, lane)


@dataclass(frozen=True, slots=True)
class Tier:
    """What a tier holds.

    Attributes:
        name: What it is called.
        parts: Bytes that lie in it, by the name of what they are for.
        nbytes: How many bytes it has room for; None where that is unknown.
    """

    name: str
    parts: Annotated[dict[str, Bytes], Meta(max_length=100)]
    nbytes: Bytes | None


def tiers_figure(tiers: Sequence[Tier], *, title: str) -> Figure:
    """Return a picture of what lies in each tier."""
    figure, axes = new_figure(10.0, tiers_height(tiers))
    tiers_into(axes, tiers, title=title)
    return figure


def tiers_height(tiers: Sequence[Tier]) -> float:
    """Return the height in inches of a picture of so many tiers."""
    return 1.6 + 0.7 * len(tiers)


def tiers_into(axes: Axes, tiers: Sequence[Tier], *, title: str) -> None:
    """Draw a bar for each tier, divided by what lies in it; if its size is known, what is free is left empty."""
    # Parts with the same name have the same colour in all tiers.
    names = list(dict.fromkeys(name for tier in tiers for name, nbytes in tier.parts.items() if nbytes))
    colours = {name: _PART_COLOURS[number % len(_PART_COLOURS)] for number, name in enumerate(names)}
    labelled: set[str] = set()
    in_row = axes.get_yaxis_transform()  # x: a share of the width; y: a tier's row
    for row, tier in enumerate(tiers):
        used = sum(tier.parts.values())
        # The whole width: the tier's size, what is used if that is more, and never 0, as it is divided by.
        bar_bytes = max(used, tier.nbytes or used, 1)
        left = 0.0
        for name, nbytes in tier.parts.items():
            if nbytes:
                label = None if name in labelled else _shortened(name)  # once in the legend
                labelled.add(name)
                axes.barh(row, nbytes / bar_bytes, left=left, color=colours[name], height=0.6, label=label)
                left += nbytes / bar_bytes
        if tier.nbytes:  # a frame around the whole width
            axes.barh(row, 1.0, color="none", edgecolor="#888888", height=0.6)
        of_size = f" of {format_bytes(tier.nbytes)}" if tier.nbytes else ""
        axes.text(1.01, row, f"{format_bytes(used)}{of_size}", transform=in_row, va="center", fontsize=8)
    axes.set_yticks(range(len(tiers)), [_shortened(tier.name) for tier in tiers], parse_math=False)
    axes.set_ylim(max(1, len(tiers)) - 0.5, -0.5)  # rows from the top down; room for one if there is none
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda share, position: f"{share:.0%}")
    axes.set_title(title, loc="left", parse_math=False)
    axes.tick_params(axis="y", length=0)
    if labelled:
        axes.legend(
            frameon=False, fontsize=8, ncols=min(5, len(labelled)), loc="upper left", bbox_to_anchor=(0, -0.12)
        )


def steps_figure(steps: Sequence[tuple[int, float, float | None]]) -> Figure:
    """Return a picture of how long steps took, and of how long they were predicted to take.

    Args:
        steps: For each step its number, the seconds measured, and the seconds predicted, None if unknown.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(10.0, 3.2)
    numbers = [number for number, _, _ in steps]
    marks: dict[str, Any] = {"marker": "."} if len(steps) < 100 else {}  # marks of more steps would run together
    measured = [measured_s for _, measured_s, _ in steps]
    axes.plot(numbers, measured, color=_LANE_COLOURS["cpu"], label="measured", **marks)
    predicted = [(number, predicted_s) for number, _, predicted_s in steps if predicted_s is not None]
    if predicted:
        marks = {"linestyle": "--", "marker": ".", "label": "predicted"}  # one step alone has no line, but a mark
        axes.plot(*zip(*predicted, strict=True), color=_LANE_COLOURS["write"], **marks)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return figure


def _shortened(name: str) -> str:
    """Return a name short enough for a place beside a bar: a long one without its beginning.

    Of a path the end tells most.
    """
    return name if len(name) <= MOST_NAME else f"…{name[1 - MOST_NAME :]}"


def draw_plan(
    file: str, title: str, tiers: Sequence[Tier], timeline: Sequence[Interval], paths: Sequence[str]
) -> None:
    """Draw a plan into one file: what lies where, and below it the lanes of a step.

    Args:
        file: The picture's file; its ending says the format.
        title: Of the whole.
        tiers: What lies where.
        timeline: A step's operations; none to draw the tiers alone.
        paths: What the path numbers in the lanes' names stand for.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [tiers_height(tiers)]
    if timeline:
        heights.append(lanes_height(timeline, paths))
    figure = Figure(figsize=(10.0, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)  # attaches itself to the figure, see `new_figure`
    # Rows with one part each. Without `squeeze=False` a single row would be no array.
    parts = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)
    tiers_into(_axes(parts[0][0]), tiers, title=title)
    if timeline:
        lanes_into(parts[1][0], _axes(parts[1][0]), timeline, paths, title=LANES_TITLE)
    figure.savefig(file, dpi=140)


def svg(figure: Figure) -> str:
    """Return a picture as an `<svg>` element for a page of HTML; its text stays text, instead of outlines of letters.

    It has no date. What matplotlib writes before the element, the declarations of an XML file, is left out.
    """
    import matplotlib as mpl

    out = StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", dpi=140, metadata={"Date": None})
    document = out.getvalue()
    return document[document.index("<svg") :]


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a new figure of `width` by `height` inches, and its axes."""
    # Not pyplot: it would keep figures in a global list and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # attaches itself to the figure, whose `savefig` uses it
    return figure, _axes(figure)


def _axes(figure: Figure | SubFigure) -> Axes:
    """Add axes without a frame above and at the right to a figure; return them."""
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return axes
