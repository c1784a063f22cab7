"""One page of what a session did: its plan, the lanes of a step, steps beside predictions, memory, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from offload.pictures.draw import Tier, lane_title, lanes_figure, steps_figure, svg, tiers_figure
from offload.pictures.page import Page
from offload.schedule.timeline import Interval
from offload.units import format_apart, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_NAME, TIMELINE_NAME, PAGE_NAME = "report.json", "timeline.json", "report.html"
"""Files in a run's folder: a `Report` as JSON, the operations of the last step, and the page that shows both."""

MOST_STEPS = 100_000
MOST_ROWS = 1_000
_SHOWN_STEPS = 20
"""How many steps, the last ones, the table has; the picture shows all."""

Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Text = Annotated[str, Meta(max_length=100_000)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        number: Its number.
        measured_s: Seconds that it took.
        predicted_s: Seconds that it was predicted to take; None where that is unknown.
    """

    number: Count
    measured_s: Seconds
    predicted_s: Seconds | None


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane in the last step.

    Attributes:
        name: Such as "read:0".
        predicted_s: Seconds that it was predicted to be busy; None where that is unknown.
        measured_s: Seconds that it was busy.
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
        plan: The plan in words.
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
    html_page = Page(report.title)
    for note in report.notes:
        html_page.text(note)
    pictures = _pictures(report, timeline, paths, step)
    if pictures is None:
        html_page.text("Pictures need matplotlib: pip install matplotlib")
    html_page.heading("The plan")
    _add_picture(html_page, pictures, "tiers", "what lies in each tier")
    html_page.lines(report.plan)
    html_page.heading(f"Lanes during step {step}")
    _add_picture(html_page, pictures, "lanes", "what each lane did, and when")
    if report.lanes:
        html_page.table(
            ("lane", "predicted", "measured", "apart", "bytes"), [_lane_row(lane) for lane in report.lanes]
        )
    html_page.heading("The last steps and their predictions")
    _add_picture(html_page, pictures, "steps", "what each step took, and was predicted to take")
    html_page.table(
        ("step", "predicted", "measured", "apart"), [_step_row(each) for each in report.steps[-_SHOWN_STEPS:]]
    )
    html_page.heading("Memory")
    rows = [("planned for the optimizer", format_bytes(report.planned_bytes))]
    rows.append(("peak of the whole process, with the model and its activations", format_bytes(report.peak_bytes)))
    html_page.table(("host memory", ""), rows)
    html_page.heading("Checkpoints")
    if report.checkpoints:
        html_page.table(("kept on the paths",), [(name,) for name in report.checkpoints])
    else:
        html_page.text("This session keeps none on the paths; what it was resumed from may be needed all the same.")
    html_page.heading("What would help")
    if report.advice:
        rows = [(what, f"-{format_seconds(saved_s)}") for what, saved_s in report.advice]
        html_page.table(("by the closed form", "a step"), rows)
    else:
        html_page.text("Nothing that is known of saves a hundredth of a step.")
    return str(html_page)


def write_run(
    folder: str | os.PathLike[str], report: Report, timeline: Sequence[Interval], paths: Sequence[str], *, step: int
) -> None:
    """Write a report's page into a run's folder, and what `offload report` and `offload trace` read; see `page`."""
    write_timeline(folder, timeline, paths, step=step)
    (Path(folder) / REPORT_NAME).write_bytes(msgspec.json.encode(report))
    (Path(folder) / PAGE_NAME).write_text(page(report, timeline, paths, step=step), encoding="utf-8")


def write_timeline(
    folder: str | os.PathLike[str], timeline: Sequence[Interval], paths: Sequence[str], *, step: int
) -> None:
    """Write the operations of a step into a run's folder, for `offload trace`."""
    operations = [(each.lane, each.label, each.started_s, each.finished_s, each.nbytes) for each in timeline]
    content = msgspec.json.encode({"step": step, "paths": [*paths], "operations": operations})
    (Path(folder) / TIMELINE_NAME).write_bytes(content + b"\n")


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


def _add_picture(html_page: Page, pictures: dict[str, Figure] | None, name: str, alternative: str) -> None:
    """Add a picture to the page, or words in its place without matplotlib."""
    if pictures is None:
        html_page.text("(No picture: see above.)")  # where `page` has said that matplotlib is missing
    else:
        html_page.picture(svg(pictures[name]), alternative)


def _seconds_text(value: float | None) -> str:
    """Return seconds in words, or "unknown"."""
    return "unknown" if value is None else format_seconds(value)


def _apart_text(predicted_s: float | None, measured_s: float) -> str:
    """Return, in words, how far a measurement is from its prediction; "" if that is unknown (None), or 0."""
    # `format_apart` puts its text in brackets, for a sentence.
    return "" if not predicted_s else format_apart(predicted_s, measured_s).strip(" ()")


def _lane_row(lane: Lane) -> tuple[str, ...]:
    """Return a row of the table of lanes: name, predicted, measured, how far apart, bytes."""
    predicted, measured = _seconds_text(lane.predicted_s), _seconds_text(lane.measured_s)
    apart = _apart_text(lane.predicted_s, lane.measured_s)
    return lane_title(lane.name), predicted, measured, apart, format_bytes(lane.nbytes)


def _step_row(step: Step) -> tuple[str, ...]:
    """Return a row of the table of steps: number, predicted, measured, how far apart."""
    apart = _apart_text(step.predicted_s, step.measured_s)
    return f"{step.number:,}", _seconds_text(step.predicted_s), _seconds_text(step.measured_s), apart
