"""One page of what a session did: its plan, the lanes of a step, steps beside predictions, memory, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from offload.pictures.draw import Tier, lane_title, lanes_figure, steps_figure, svg, tiers_figure
from offload.pictures.page import Page
from offload.schedule.timeline import Interval
from offload.units import format_apart, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_STEPS = 100_000
MOST_ROWS = 1_000
_SHOWN_STEPS = 20
"""Of the steps, in the table: the last ones; the picture has all."""

Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Text = Annotated[str, Meta(max_length=100_000)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        number: Its number.
        measured_s: What it took.
        predicted_s: What it was to take; None where that is unknown.
    """

    number: Count
    measured_s: Seconds
    predicted_s: Seconds | None


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane in the last step.

    Attributes:
        name: Such as "read:0".
        predicted_s: Seconds that it was to work.
        measured_s: Seconds that it worked.
        nbytes: Bytes that it moved or updated.
    """

    name: Text
    predicted_s: Seconds | None
    measured_s: Seconds
    nbytes: Count


@dataclass(frozen=True, slots=True)
class Report:
    """What a page shows; as JSON, what a run's folder has for `offload report`.

    Attributes:
        title: Of the page.
        plan: The plan in words.
        tiers: What lies where.
        steps: All that are known, in their order.
        lanes: Of the last step.
        planned_bytes: Host memory that the plan names.
        peak_bytes: The most that the whole process has had, model, activations and torch included.
        checkpoints: Those that are kept.
        advice: What would make a step shorter, and by how many seconds.
        notes: What else is to be said.
    """

    title: Text
    plan: Text
    tiers: Annotated[list[Tier], Meta(max_length=MOST_ROWS)]
    steps: Annotated[list[Step], Meta(max_length=MOST_STEPS)]
    lanes: Annotated[list[Lane], Meta(max_length=MOST_ROWS)]
    planned_bytes: Count
    peak_bytes: Count
    checkpoints: Annotated[list[Text], Meta(max_length=MOST_ROWS)]
    advice: Annotated[list[tuple[Text, Seconds]], Meta(max_length=MOST_ROWS)]
    notes: Annotated[list[Text], Meta(max_length=MOST_ROWS)]


def page(report: Report, timeline: Sequence[Interval], paths: Sequence[str], *, step: int) -> str:
    """Return a report as HTML that needs no other file.

    Args:
        report: What is shown.
        timeline: The operations of a step.
        paths: What the path numbers in the lanes' names stand for.
        step: Number of that step.
    """
    found = Page(report.title)
    for note in report.notes:
        found.text(note)
    pictures = _pictures(report, timeline, paths, step)
    if pictures is None:
        found.text("Pictures need matplotlib: pip install matplotlib")
    found.heading("The plan")
    _show(found, pictures, "tiers", "what lies in each tier")
    found.lines(report.plan)
    found.heading(f"Lanes during step {step}")
    _show(found, pictures, "lanes", "what each lane did, and when")
    if report.lanes:
        found.table(("lane", "predicted", "measured", "apart", "bytes"), [_lane_row(lane) for lane in report.lanes])
    found.heading("The last steps and their predictions")
    _show(found, pictures, "steps", "what each step took, and was predicted to take")
    found.table(
        ("step", "predicted", "measured", "apart"), [_step_row(each) for each in report.steps[-_SHOWN_STEPS:]]
    )
    found.heading("Memory")
    rows = [("planned for the optimizer", format_bytes(report.planned_bytes))]
    rows.append(("peak of the whole process, with the model and its activations", format_bytes(report.peak_bytes)))
    found.table(("host memory", ""), rows)
    found.heading("Checkpoints")
    if report.checkpoints:
        found.table(("kept on the paths",), [(name,) for name in report.checkpoints])
    else:
        found.text("This session keeps none on the paths; what it was resumed from may be needed all the same.")
    found.heading("What would help")
    if report.advice:
        rows = [(what, f"-{format_seconds(saved_s)}") for what, saved_s in report.advice]
        found.table(("by the closed form", "a step"), rows)
    else:
        found.text("Nothing that is known of saves a hundredth of a step.")
    return str(found)


def _pictures(
    report: Report, timeline: Sequence[Interval], paths: Sequence[str], step: int
) -> dict[str, Figure] | None:
    """Return the pictures by name; None without matplotlib."""
    try:
        return {
            "tiers": tiers_figure(report.tiers, title="What lies where"),
            "lanes": lanes_figure(timeline, paths, title=f"Lanes during step {step}"),
            "steps": steps_figure([(each.number, each.measured_s, each.predicted_s) for each in report.steps]),
        }
    except ImportError:
        return None


def _show(found: Page, pictures: dict[str, Figure] | None, name: str, alternative: str) -> None:
    if pictures is None:
        found.text("(No picture: see above.)")
    else:
        found.picture(svg(pictures[name]), alternative)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else format_seconds(value)


def _apart(predicted_s: float | None, measured_s: float) -> str:
    return "" if not predicted_s else format_apart(predicted_s, measured_s).strip(" ()")


def _lane_row(lane: Lane) -> tuple[str, ...]:
    apart = _apart(lane.predicted_s, lane.measured_s)
    return (
        lane_title(lane.name),
        _seconds(lane.predicted_s),
        _seconds(lane.measured_s),
        apart,
        format_bytes(lane.nbytes),
    )


def _step_row(step: Step) -> tuple[str, ...]:
    apart = _apart(step.predicted_s, step.measured_s)
    return f"{step.number:,}", _seconds(step.predicted_s), _seconds(step.measured_s), apart
