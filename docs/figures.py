"""Which measured figures the pages show: for each, the report it is read from and how it is written.

A page shows a figure only through this table, so that it is what the newest report of its kind says.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "bench" / "reports"

Report = dict[str, Any]
Find = Callable[[Report], Sequence[float]]


def dated(kind: str, ending: str) -> list[Path]:
    """Return all files of a kind, the newest last; they are called <date>-<kind>.<ending>."""
    named = re.compile(rf"\d{{4}}-\d\d-\d\d-{re.escape(kind)}\.{ending}")
    return [path for path in sorted(REPORTS.iterdir()) if named.fullmatch(path.name)]


def newest(kind: str) -> Path:
    """Return the newest report of a kind."""
    found = dated(kind, "json")
    if not found:
        raise LookupError(f"no report of {kind} in {REPORTS}")
    return found[-1]


def read(kind: str) -> Report:
    """Return what the newest report of a kind says."""
    return dict(json.loads(newest(kind).read_text()))


def link(file: Path, text: str, page: Path) -> str:
    """Return a link from a page to a report."""
    up = "../" * len(page.parent.relative_to(ROOT).parts)
    return f"[{text}]({up}bench/reports/{file.name})"


def source(kind: str, page: Path) -> str:
    """Return a link to a report, with the commit that was measured and the day."""
    file = newest(kind)
    measured = read(kind).get("environment") or {}
    day = (measured.get("date") or file.name)[:10]
    commit = measured.get("commit")
    at = f"at {commit[:7]}" if commit else "commit not recorded"
    changed = ", with uncommitted changes" if measured.get("uncommitted_changes") else ""
    return f"{link(file, kind, page)} ({day}, {at}{changed})"


@dataclass(frozen=True)
class Figure:
    """A number, or the range of several.

    Attributes:
        kinds: Reports that it is read from; of several it is the range.
        find: Reads it from one.
        form: How it is written: a format, "%" for a share in percent, "%0" for whole percent, or "times" for a ratio
            with two significant digits (three below 2).
    """

    kinds: tuple[str, ...]
    find: Find
    form: str

    def __str__(self) -> str:
        values = [value for kind in self.kinds for value in self.find(read(kind))]
        low, high = self.written(min(values)), self.written(max(values))
        unit = "%" if low.endswith("%") else ""
        return low if low == high else f"{low.removesuffix(unit)} to {high}"

    def written(self, value: float) -> str:
        """Return one value in the figure's form."""
        if self.form == "times":
            return f"{value:.2f}".rstrip("0").rstrip(".") if value < 2 else f"{value:.2g}"
        return f"{value:.{self.form[1:] or 1}%}" if self.form.startswith("%") else f"{value:{self.form}}"


def filled(text: str, figures: Iterator[Figure]) -> str:
    """Return a text in which every "{}" is the next figure."""
    return re.sub(r"\{\}", lambda _: str(next(figures)), text)


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        text: What the figures are of.
        cells: Each a text in which every "{}" is the next figure.
        figures: In the order of the cells.
    """

    text: str
    cells: tuple[str, ...]
    figures: tuple[Figure, ...]

    def line(self, page: Path | None = None) -> str:
        """Return the row, for a page with the names of its reports behind."""
        figures = iter(self.figures)
        cells = [filled(cell, figures) for cell in self.cells]
        if page is not None:
            cells.append(", ".join(link(newest(kind), kind, page) for kind in self.kinds()))
        return f"| {' | '.join((self.text, *cells))} |"

    def kinds(self) -> list[str]:
        """Return the reports that are read, each once."""
        return list(dict.fromkeys(kind for figure in self.figures for kind in figure.kinds))


def target(*names: str) -> Find:
    """Read targets by their names."""
    return lambda report: [{each["name"]: each["value"] for each in report["targets"]}[name] for name in names]


# Trainings side by side: two benchmarks run them

SIDE_BY_SIDE = ("deepspeed", "iteration")


def against(ours: str, theirs: str, exposed: bool = True) -> tuple[Figure, ...]:
    """Return the figures of two contenders: iterations, exposed step, memory."""
    name = f"{ours}, against {theirs}: "
    found = [Figure(SIDE_BY_SIDE, target(name + "iterations, times as fast"), "times")]
    if exposed:
        found.append(Figure(SIDE_BY_SIDE, target(name + "exposed step, times shorter"), "times"))
    return (*found, Figure(SIDE_BY_SIDE, target(name + "peak memory over theirs"), ".2f"))


def exposed_in_memory(report: Report) -> list[float]:
    rows = report["results"]["memory"]["128 tokens"]
    theirs, ours = rows["DeepSpeed, CPU offload"], rows["ours in DeepSpeed, all in memory"]
    return [theirs["exposed_s"] / max(1e-3, ours["exposed_s"])]


IN_MEMORY = against("ours in DeepSpeed, all in memory", "DeepSpeed, CPU offload", exposed=False)
THREE = ("{} times as fast", "{} times shorter", "{}")
TRAININGS = (
    Row(
        "DeepSpeed ZeRO-3, NVMe offload at the same memory",
        THREE,
        against("ours in DeepSpeed, memory as NVMe offload", "DeepSpeed, NVMe offload"),
    ),
    Row(
        "the same, ours hidden in forward and backward",
        THREE,
        against(
            "ours in DeepSpeed, memory as NVMe offload, hidden in forward and backward", "DeepSpeed, NVMe offload"
        ),
    ),
    Row(
        "DeepSpeed ZeRO-3, NVMe offload pipelined (its best setting here), at the same memory",
        THREE,
        against("ours in DeepSpeed, memory as NVMe offload, pipelined", "DeepSpeed, NVMe offload, pipelined"),
    ),
    Row(
        "the same, ours with no state in memory",
        THREE,
        against("ours in DeepSpeed, nothing resident", "DeepSpeed, NVMe offload, pipelined"),
    ),
    Row(
        "the same, hidden in forward and backward",
        THREE,
        against(
            "ours in DeepSpeed, nothing resident, hidden in forward and backward",
            "DeepSpeed, NVMe offload, pipelined",
        ),
    ),
    Row(
        "DeepSpeed ZeRO-3, CPU offload, ours with all state in memory",
        THREE,
        (IN_MEMORY[0], Figure(SIDE_BY_SIDE, exposed_in_memory, "times"), IN_MEMORY[1]),
    ),
    Row(
        "`torch.optim.AdamW(fused=True)` in memory, without DeepSpeed",
        ("{} times as fast", "-", "{}"),
        against("ours, all in memory", "torch AdamW, fused", exposed=False),
    ),
)


def trainings(page: Path) -> str:
    """Return the table of trainings beside the alternatives."""
    (numel,) = {read(kind)["results"]["model"]["numel"] for kind in SIDE_BY_SIDE}
    head = "2 cores, one disk; ours beside | iteration | exposed step | peak memory, ours over theirs"
    lines = [
        f"| {numel / 1e6:.0f}M parameters, {head} |",
        "|---|---|---|---|",
        *(row.line() for row in TRAININGS),
        "",
        "Ranges are of two runs: " + " and ".join(source(kind, page) for kind in SIDE_BY_SIDE) + ".",
    ]
    return "\n".join(lines)


def cost(page: Path) -> str:
    """Return what an iteration costs beside torch's fused AdamW, state on a disk included."""
    rows = read("iteration")["results"]["standalone"]["128 tokens"]
    theirs = rows["torch AdamW, fused"]
    names = {"in memory": "all in memory", "half on a disk": "half in memory", "all on a disk": "nothing resident"}
    lines = ["| state | iteration | peak memory |", "|---|---|---|"]
    for title, name in names.items():
        ours = rows[f"ours, {name}"]
        seconds, nbytes = (ours[what] / theirs[what] for what in ("iteration_s", "peak_bytes"))
        lines.append(f"| {title} | {seconds:.2f} | {nbytes:.2f} |")
    return "\n".join(
        [
            *lines,
            "",
            f"Of `torch.optim.AdamW(fused=True)`'s, 129M parameters, 2 cores, 128 tokens: {source('iteration', page)}.",
        ]
    )


def formats(page: Path) -> str:
    """Return what compact state does to a step."""
    places = "disk", "1000 MB/s"
    names = (
        f"{place}, {form}: step, times as fast as exact" for place in places for form in ("compact16", "compact8")
    )
    text = (
        'With `state_format="compact16"` state is 8 bytes a parameter, with `"compact8"` 5. A step is {} and {} times as fast on the '
        f"disk that was measured, {{}} and {{}} times on a path of 1 GB/s: {source('formats', page)}.\n"
        "[formats.md](formats.md) says what is rounded then, how, and what training makes of it."
    )
    return filled(text, iter(one("formats", *names, form="times")))


# docs/step.md


def hidden(page: Path) -> str:
    """Return what an iteration gains where its step is hidden."""
    names = (
        f"step as long as {length}, hidden in {where}: times as fast"
        for length, where in (("forward", "forward"), ("both", "backward"), ("both", "both"))
    )
    text = (
        "With a step as long as forward, an iteration is {} times as fast with `overlap_forward`; with one as long as forward "
        f'and backward, {{}} times with `overlap="backward"`, {{}} times with both: {source("overlap", page)}.'
    )
    return filled(text, iter(one("overlap", *names, form="times")))


def checked_cpu(page: Path) -> str:
    """Return what checksums take of the CPU."""
    found = read("paths")["results"]["cpu"]
    with_them, without = (found[name]["cpu_s_per_gb"] for name in ("checksums", "no checksums"))
    return (
        f"On two cores a gigabyte read or written costs {with_them:.3f} s of CPU, and {without:.3f} s without checksums: "
        f"{source('paths', page)}, `python bench/paths.py --sections cpu`."
    )


# docs/deepspeed.md


def overlapped_ranks(page: Path) -> str:
    """Return what ZeRO-3 gains on two ranks."""
    text = (
        "`python bench/overlap_ranks.py` measures what is gained: ZeRO-3 on two ranks and one disk is {} times as fast as with steps "
        f"that are waited for, with buckets of 4 million elements: {source('overlap-ranks', page)}."
    )
    return filled(text, iter(one("overlap-ranks", "zero3: the best, times as fast as steps that are waited for")))


def saved_in_place(page: Path) -> str:
    """Return by how much saves stall training, in each layout."""
    found = read("saves")["results"]
    ours, stock = (
        [row for name, row in found.items() if name.startswith(layout)] for layout in ("in_place", "stock")
    )
    iterations_s, behind, waits = (
        [row[key] for row in rows]
        for rows, key in ((ours, "iteration_s"), (stock, "stall"), ([*ours, *stock], "waits"))
    )
    return (
        f"A save in place stalls training for {max(row['stall'] for row in ours):.2f} of an iteration of {min(iterations_s):.2f} to "
        f"{max(iterations_s):.2f} s at most, one whose files are written behind it for {min(behind):.2f} to {max(behind):.2f}, and one "
        f"that waits for {min(waits):.2f} to {max(waits):.2f} (`python bench/saves.py`; 33 million parameters, one and two ranks on two "
        f"cores): {source('saves', page)}."
    )


# docs/benchmarks.md


def over_fio(checksum: str) -> Find:
    def find(report: Report) -> list[float]:
        rates = report["results"]["single"]
        return [rates[f"threads, {checksum}"] / max(rate for name, rate in rates.items() if name.startswith("fio"))]

    return find


def beyond_the_plan(report: Report) -> list[float]:
    runs = report["results"]["offload"].values()
    return [(run["used_bytes"] - run["planned_bytes"]) / (1 << 20) for run in runs]


def predicted_once(bound: str) -> Find:
    def bound_by(name: str) -> str:
        return "shared" if "shared" in name else "throttled" if "400" in name else "machine"

    def find(report: Report) -> list[float]:
        runs = report["results"]["predictions"]["configurations"].items()
        return [max(abs(run["error"]) for name, run in runs if bound_by(name) == bound)]

    return find


def configurations(report: Report) -> list[float]:
    return [len(report["results"]["predictions"]["configurations"])]


def park_over_bytes(where: str) -> Find:
    """Read what a park takes, beside its 50 ms where little is written, over the bytes at the disk's rate."""

    def find(report: Report) -> list[float]:
        found = report["results"]["phases"][where]
        aside_s = 0.0 if where.startswith("100%") else 0.05
        bytes_s = found["medians"]["moved_bytes"] / found["rates"]["write"]
        return [(found["medians"]["park_s"] - aside_s) / bytes_s]

    return find


def held_by_parked(report: Report) -> list[float]:
    return [found["medians"]["beyond_bytes"] / 2**20 for found in report["results"]["phases"].values()]


def times_serial(section: str, form: str) -> Figure:
    """Return how many times as fast as the serial loop a step is."""
    return Figure(("phases",), lambda report: [report["results"][section]["contenders"][form]["times_serial"]], ".2f")


def one(kind: str, *names: str, form: str = ".2f") -> tuple[Figure, ...]:
    """Return a figure for each target of a report."""
    return tuple(Figure((kind,), target(name), form) for name in names)


def of_memory(found: str) -> Find:
    """Read the parameters of the largest model that one contender trains in 6 GiB, in billions."""
    return lambda report: [report["results"]["contenders"][found]["numel"] / 1e9]


def beside_torch(what: str) -> Find:
    """Read what an iteration takes with all state on a disk, over torch's in memory."""

    def find(report: Report) -> list[float]:
        rows = report["results"]["standalone"]["128 tokens"]
        return [rows["ours, nothing resident"][what] / rows["torch AdamW, fused"][what]]

    return find


def killed(report: Report) -> list[float]:
    return [report["results"]["kills"]]


TORTURES = "torture", "torture-overlap", "torture-ahead", "torture-ranks", "torture-deepspeed"
FIRST = (
    Row(
        "all state on a disk, beside `torch.optim.AdamW(fused=True)` in memory",
        ("an iteration {} times as long, in {} of the memory", "`make bench`"),
        tuple(Figure(("iteration",), beside_torch(what), ".2f") for what in ("iteration_s", "peak_bytes")),
    ),
    Row(
        "beside DeepSpeed ZeRO-3 with NVMe offload, in no more memory: as it is; at its best setting",
        ("{}; {} times as fast", "`python bench/deepspeed.py`"),
        tuple(
            against(f"ours in DeepSpeed, memory as {theirs}", f"DeepSpeed, {theirs}")[0]
            for theirs in ("NVMe offload", "NVMe offload, pipelined")
        ),
    ),
    Row(
        "the largest model that trains in 6 GiB of memory: ours, DeepSpeed's NVMe offload, torch",
        ("{}, {}, {} billion parameters", "`python bench/capacity.py`"),
        tuple(
            Figure(("capacity",), of_memory(name), ".2f") for name in ("exact-gradients", "deepspeed-nvme", "torch")
        ),
    ),
    Row(
        "peak host memory, less what the plan says, at 109M parameters",
        ("{} MiB", "`python bench/memory.py`"),
        (Figure(("memory",), beyond_the_plan, ".0f"),),
    ),
    # The programs end with an error where a checkpoint is lost or mixed: their reports are that none was.
    Row(
        "checkpoints lost or mixed by `kill -9` at random moments: one process; a step behind; in backward; one of two ranks; in DeepSpeed",
        ("0 of {} each", "`python tests/faults/torture.py --kills 200`"),
        (Figure(TORTURES, killed, "d"),),
    ),
)


def first(page: Path) -> str:
    """Return the figures that decide whether one uses the engine."""
    lines = ["| figure | measured | run it | report |", "|---|---|---|---|", *(row.line(page) for row in FIRST)]
    return "\n".join([*lines, "", machines((*FIRST, *MEASURED))])


MEASURED = (
    Row(
        "the CPU's update with all around it, of what memory allows",
        ("{}",),
        one("kernel", "whole job, share of stream"),
    ),
    Row(
        "the same beside torch's fused AdamW, DeepSpeed's CPU Adam, torch's foreach",
        ("{}, {}, {} times as fast",),
        one(
            "kernel",
            *(f"whole job, times {n}" for n in ("torch fused", "DeepSpeed CPU Adam", "torch foreach")),
            form=".1f",
        ),
    ),
    Row(
        "one path, reads and writes mixed, beside fio (without and with checksums)",
        ("{} and {} times",),
        (
            Figure(("paths",), over_fio("no checksum"), ".2f"),
            Figure(("paths",), over_fio("checksum"), ".2f"),
        ),
    ),
    Row(
        "two equal paths beside one; paths of 3:2:1, of their sum (emulated rates)",
        ("{} times; {}",),
        one("paths", "two equal paths over one (emulated)", "paths of 3:2:1 over their sum (emulated)"),
    ),
    Row(
        "a step, beside its prediction just before (configurations)",
        ("within {} in {}",),
        (
            *one("planner", "the same, predicted before each step", form="%"),
            Figure(("planner",), configurations, "d"),
        ),
    ),
    Row(
        "the same, by the rates that the step itself showed",
        ("within {}",),
        one("planner", "the same, by the rates that the step itself showed", form="%"),
    ),
    Row(
        "the same, predicted once after five steps: throttled paths; shared devices; disk or CPU",
        ("within {}; {}; {}",),
        (
            Figure(("planner",), predicted_once("throttled"), "%"),
            Figure(("planner",), predicted_once("shared"), "%"),
            Figure(("planner",), predicted_once("machine"), "%0"),
        ),
    ),
    Row(
        "stall for a checkpoint, of an iteration, at 0, 50 and 100% of the state in memory (aims: 0.03, 0.05, 0.10)",
        ("{}, {}, {}",),
        one(
            "checkpoint", *(f"stall beyond the floor over an iteration, {share}% resident" for share in (0, 50, 100))
        ),
    ),
    Row(
        "ZeRO-3's stall for a save behind it, beyond the machine's own: DeepSpeed's files; in place (aim: 0.05)",
        ("{}; {}",),
        tuple(
            Figure(
                ("saves",),
                target(
                    *(
                        f"stall beyond the floor over an iteration, {layout}, {ranks}, {share}% resident"
                        for ranks in ("1 rank", "2 ranks")
                        for share in (0, 50, 100)
                    )
                ),
                ".2f",
            )
            for layout in ("stock", "in_place")
        ),
    ),
    Row(
        "parking all state from memory, over its bytes at the disk's rate; with none in memory, less 50 ms (aims: 1.1)",
        ("{}; {}",),
        (
            Figure(("phases",), park_over_bytes("100% resident"), ".2f"),
            Figure(("phases",), park_over_bytes("0% resident"), ".2f"),
        ),
    ),
    Row(
        "memory of a parked process beyond that without the optimizer",
        ("{} MiB",),
        (Figure(("phases",), held_by_parked, ".0f"),),
    ),
    Row(
        "a step beside a serial loop, exact and `compact8`: on the disk; on an emulated path that reads and writes at once",
        ("{}, {}; {}, {} times as fast",),
        tuple(times_serial(section, form) for section in ("serial", "duplex") for form in ("exact", "compact8")),
    ),
)


def sources(rows: Sequence[Row], page: Path) -> str:
    """Return what each report of some rows is of."""
    kinds = dict.fromkeys(kind for row in rows for kind in row.kinds())
    return ("Reports: " if len(kinds) > 1 else "Report: ") + ", ".join(source(kind, page) for kind in kinds) + "."


def measured(page: Path) -> str:
    """Return the table of what the engine does."""
    lines = ["| figure | measured | report |", "|---|---|---|", *(row.line(page) for row in MEASURED)]
    return "\n".join(lines)


def machines(rows: Sequence[Row]) -> str:
    """Return on which processors the reports of some rows were made."""
    made: dict[str, list[str]] = {}
    for kind in dict.fromkeys(kind for row in rows for kind in row.kinds()):
        found = read(kind).get("environment") or {}
        name = f"{found['cores']} cores of {found['cpu']}" if "cpu" in found else "processor not recorded"
        made.setdefault(name, []).append(kind)
    return "Machines: " + "; ".join(f"{name} ({', '.join(kinds)})" for name, kinds in made.items()) + "."


# docs/published.md


def errors(table: str, what: str, of: Callable[[list[float]], float]) -> Find:
    """Read one number from the errors, in percent, of the rows that a fit had not seen."""

    def find(report: Report) -> list[float]:
        rows = report["results"]["held_out"][table]
        return [of([abs(row["errors_percent"][what]) for row in rows if row["errors_percent"].get(what) is not None])]

    return find


def rms(values: list[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


def fitted_memory(of: Callable[[list[float]], float]) -> Find:
    """Read one number from the errors, in percent, of steps on kinds of memory that were fitted."""

    def find(report: Report) -> list[float]:
        rows = (row for row in report["results"]["fitted"] if row["table"] == "cxl_runs")
        return [of([abs(row["error_percent"]) for row in rows])]

    return find


def worst_of_sweep(report: Report) -> list[float]:
    tables = [name for name in report["results"]["held_out"] if name.startswith("sweep")]
    return [max(errors(table, "update_s", max)(report)[0] for table in tables)]


def speedups(paths: bool) -> Find:
    return lambda report: [
        each["speedup"] for each in report["results"]["ours"] if each["what"].startswith("paths") == paths
    ]


ITERATIONS = "iterations, each model by itself"
PATHS = "paths, each model by itself"
MEMORY = "memory, each row by itself"
PUBLISHED = (
    Row(
        "stride sweep, 28 rows: each row, each model, each stride left out in turn",
        ("RMS {}, {}, {}; worst {}%",),
        (
            *one(
                "published",
                *(f"sweep, each {each} by itself: RMS error" for each in ("row", "model", "stride")),
                form="%",
            ),
            Figure(("published",), worst_of_sweep, ".1f"),
        ),
    ),
    Row(
        "two paths and NVMe alone, 52B and 70B: each model from the other",
        ("worst {}%",),
        (Figure(("published",), errors(PATHS, "update_s", max), ".1f"),),
    ),
    Row(
        "updates at a static share of 0.8, from the stride sweep",
        ("worst {}%",),
        (Figure(("published",), errors("iterations at a static share, from the sweep", "update_s", max), ".1f"),),
    ),
    Row(
        "107 other A100 rows, 7B from 13B and back: update; iteration; the worst update",
        ("median {}%; median {}%; {}%",),
        (
            Figure(("published",), errors(ITERATIONS, "update_s", statistics.median), ".1f"),
            Figure(("published",), errors(ITERATIONS, "iter_s", statistics.median), ".1f"),
            Figure(("published",), errors(ITERATIONS, "update_s", max), ".0f"),
        ),
    ),
    Row(
        "29 runs on DDR, DDR with CXL memory, drives: step of fitted rows; of each row from the others; iteration",
        ("RMS {}%, worst {}%; RMS {}%, worst {}%; worst {}%",),
        (
            Figure(("published",), fitted_memory(rms), ".1f"),
            Figure(("published",), fitted_memory(max), ".1f"),
            Figure(("published",), errors(MEMORY, "step_s", rms), ".1f"),
            Figure(("published",), errors(MEMORY, "step_s", max), ".1f"),
            Figure(("published",), errors(MEMORY, "iteration_s", max), ".1f"),
        ),
    ),
    Row(
        "backward passes that write gradients to NVMe, 52B and 70B",
        ("worst {}%",),
        (Figure(("published",), errors(PATHS, "bwd_s", max), ".0f"),),
    ),
)
OURS = (
    Row(
        "updates on CPU and GPU: the best stride measured",
        ("{} times as fast",),
        (Figure(("published",), speedups(False), ".2f"),),
    ),
    Row("two paths: MLP-Offload", ("{} times as fast",), (Figure(("published",), speedups(True), ".2f"),)),
)


def published(page: Path) -> str:
    """Return how well published machines are predicted."""
    head = ["| update times, on nodes with 4 H100, 4 A100, or CXL memory | error of rows left out |", "|---|---|"]
    return "\n".join([*head, *(row.line() for row in PUBLISHED), "", sources(PUBLISHED, page)])


def ours_published(page: Path) -> str:
    """Return what our planner is predicted to do on published machines."""
    del page
    head = ["| our planner's step, at the same rates and staging memory, beside | predicted |", "|---|---|"]
    return "\n".join([*head, *(row.line() for row in OURS)])


def changed_part(*rows: tuple[str, str]) -> Find:
    """Read by how much a step on the simulated node is longer with parts of the engine changed."""

    def find(report: Report) -> list[float]:
        over = {(row["what"], row["updates"]): row["over"] for row in report["results"]["p"]["node"]["parts"]}
        return [over[row] for row in rows]

    return find


H100 = "predicted for an H100: "
BUSY = "updates in flight, other Python threads busy"
NODE = (
    Row(
        "step over its bound: all updates on the CPU, all on the GPU, the planner's share of both",
        ("{}, {}, {}",),
        one(
            "gpu",
            *(f"{H100}step, {who}, over its bound" for who in ("all on the CPU", "all on the GPU", "auto")),
            form=".3f",
        ),
    ),
    Row(
        "the planner's share, beside the best of all shares",
        ("{} times",),
        one("gpu", f"{H100}planner's share beside the best share", form=".3f"),
    ),
    Row(
        "the planner's step, gradients all fetched at the begin; 4 visits ahead on the stream of state",
        ("{}; {} times as long",),
        tuple(
            Figure(("gpu",), changed_part((what, "auto")), ".2f")
            for what in (
                "gradients fetched all at the begin",
                "gradients on the stream of state, 4 visits ahead",
            )
        ),
    ),
    Row(
        "all on the CPU while other Python threads hold the interpreter, with 2, 3, 4 updates in flight",
        ("{}, {}, {} times as long",),
        tuple(Figure(("gpu",), changed_part((f"{count} {BUSY}", "CPU")), ".2f") for count in (2, 3, 4)),
    ),
    Row(
        "the planner's step by rates that were measured in the CPU's caches, 2 and 3 times too fast",
        ("{}, {} times as long",),
        tuple(
            Figure(
                ("gpu",),
                changed_part((f"rates of a probe that sees no contention, the CPU's {factor} times", "auto")),
                ".2f",
            )
            for factor in (2, 3)
        ),
    ),
)


def node(page: Path) -> str:
    """Return what a step takes on a simulated node with one H100."""
    elements = read("gpu")["results"]["p"]["node"]["elements"]
    head = [f"| {elements / 1e9:.0f}B parameters, all state in host memory, one H100 | simulated |", "|---|---|"]
    return "\n".join([*head, *(row.line() for row in NODE), "", sources(NODE, page)])


def saved_by(found: dict[str, Any] | None) -> str:
    """Return what a part saves of a step, and where most."""
    if found is None:
        return "not there"
    usual, most = (f"{100 * found[key]:.1f}%" for key in ("as it is", "most"))
    return usual if usual == most else f"{usual}; {most} of a {found['of']}: {found['case']}"


def gpu_parts(page: Path) -> str:
    """Return what each part saves that the engine has for a GPU's sake, and what parts that have gone saved."""
    found = read("gpu-parts")["results"]
    models = dict.fromkeys(model for part in found["parts"].values() for model in part["saves"])
    lines = [f"| part | {' | '.join(models)} |", "|---|" + "---|" * len(models)]
    for parts, gone in ((found["parts"], ""), (found["gone"], "gone: ")):
        for part in parts.values():
            cells = " | ".join(saved_by(part["saves"].get(model)) for model in models)
            lines.append(f"| {gone}{part['what']} | {cells} |")
    return "\n".join([*lines, "", f"Report: {source('gpu-parts', page)}."])


# docs/checkpoints.md


def stalled(page: Path) -> str:
    """Return what a checkpoint costs an iteration."""
    lines = [
        "| state in memory | an iteration takes | longer by | of an iteration (aims: 0.03, 0.05, 0.10) | of that the hand-over |",
        "|---|---|---|---|---|",
    ]
    for share, found in read("checkpoint")["results"].items():
        iteration_s, stall = found["iteration_s"], found["stall"]
        lines.append(
            f"| {found['resident_bytes'] / 1e9:.1f} GB, {share} | {iteration_s:.2f} s | {stall * iteration_s:.3f} s "
            f"| {stall:.2f} | {1e3 * found['stall_parts']['handover'] * iteration_s:.1f} ms |"
        )
    none, whole = (
        {name: took_s / every["iteration_s"] for name, took_s in every["every_s"].items()}
        for every in (read("checkpoint")["results"][share]["every"] for share in ("0%", "100%"))
    )
    return "\n".join(
        [
            *lines,
            "",
            f"Report: {source('checkpoint', page)}.",
            "",
            f"A checkpoint after every iteration is affordable, too: in the same run an iteration with one took {none['offload']:.2f} of one "
            f"without where all state is on the disk, and {whole['offload']:.2f} where all of it is in memory, beside "
            f"{whole['torch.save']:.2f} with `torch.save` and {whole['torch.distributed.checkpoint.async_save']:.2f} with "
            "`torch.distributed.checkpoint.async_save` of as many bytes.",
        ]
    )


# docs/formats.md


def classes(page: Path) -> str:
    """Return what steps of torch's classes and of Muon took beside their bounds."""
    lines = [
        "| | bytes a parameter | in memory | step | of its bound | predicted, of what happened |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in read("classes")["results"].items():
        times = f"{row['own_s']:.2f} s | {row['step_s']:.2f} s"
        each, ratios = row["state_bytes_each"], f"{row['over_bound']:.2f} | {row['predicted']:.2f}"
        lines.append(f"| {name} | {each:.3g} | {times} | {ratios} |")
    return "\n".join([*lines, "", f"Report: {source('classes', page)}."])


def quality(page: Path) -> str:
    """Return how far from exact state's, and from the control's, the held-out loss of each contender is."""
    lines, report = _quality("quality", page)
    picture = "../" * len(page.parent.relative_to(ROOT).parts) + f"bench/reports/{dated('quality', 'png')[-1].name}"
    return "\n".join([*lines, "", f"![differences to exact]({picture})", "", report])


def quality_of_muon(page: Path) -> str:
    """Return the same of Muon."""
    lines, report = _quality("quality-muon", page)
    return "\n".join([*lines, "", report])


def _quality(kind: str, page: Path) -> tuple[list[str], str]:
    found = read(kind)["results"]
    sizes, pairs = found["sizes"], found["pairs"]
    text = "of the sources of Python's standard library" if sizes["data"] is None else "of a text"
    losses = " and ".join(f"{row['exact_loss']:.3f} at {beta2}" for beta2, row in found["loss"].items())
    lines = [
        f"{sizes['parameters'] / 1e6:.2f}M parameters, {sizes['layers']} layers; {sizes['steps']:,} steps of "
        f"{sizes['batch']} sequences of {sizes['seq']} bytes: {sizes['trained_tokens'] / 1e6:.2f} MB {text} "
        f"({sizes['text_bytes'] / 1e6:.1f} MB). {pairs} seeds for each beta2. The held-out loss of `exact`, in nats "
        f"a byte: {losses}. Differences are means of pairs:",
        "",
        "| beta2 | state | to `exact` | 95% interval | would have been seen | to `control` | 95% interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for beta2, rows in found["loss"].items():
        for name, row in rows["contenders"].items():
            version = found["versions"].get(name)
            shown = {"nearest": "bf16 moments, to nearest"}.get(
                name, f"{name} {version}, 8 bits" if version else name
            )
            if len(row["differences"]) < pairs:
                shown += f" ({len(row['differences'])} seeds)"
            cells = [f"{row['mean']:+.4f}", "{:+.4f} to {:+.4f}".format(*row["interval"]), f"{row['would_show']:.4f}"]
            if name != "control":
                control = rows["contenders"]["control"]["differences"]
                apart = [ours - theirs for ours, theirs in zip(row["differences"], control, strict=False)]
                # As many deviations as in the interval beside it: there are as many pairs.
                half = statistics.stdev(apart) * row["half_width"] / statistics.stdev(row["differences"])
                mean = statistics.fmean(apart)
                cells += [f"{mean:+.4f}", f"{mean - half:+.4f} to {mean + half:+.4f}"]
            lines.append(f"| {beta2} | {shown} | {' | '.join([*cells, *[''] * (5 - len(cells))])} |")
    made = ", ".join(f"{count} at {commit[:7]}" for commit, count in found["runs_made_at"].items())
    return lines, f"Report: {source(kind, page)}. Runs: {made}."


# docs/planning.md


def nodes(page: Path) -> str:
    """Return what steps are predicted to take on many nodes."""
    found = read("scaling")["results"]["nodes"]
    shared = f"and a file system of {found['shared_bytes_per_s'] / 1e9:.0f} GB/s for all"
    lines = [f"| model | ranks | nodes | in memory | each node's drive | {shared} |", "|---|---|---|---|---|---|"]
    for own, both in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        cells = [f"{row['step_s']:.3g} s, {row['bound_by'].partition(':')[0]}" for row in (own, both)]
        size = f"{own['params'] / 1e9:,.0f}B"
        lines.append(
            f"| {size} | {own['ranks']:,} | {own['nodes']} | {own['resident_share']:.0%} | {' | '.join(cells)} |"
        )
    return "\n".join([*lines, "", f"Report: {source('scaling', page)}."])


# docs/benchmarks.md: what fits


def capacity(page: Path) -> str:
    """Return the largest models that train in an amount of memory."""
    return _capacity("capacity", page)


def capacity_small(page: Path) -> str:
    """Return the same of less memory."""
    return _capacity("capacity-2gib", page)


def saved(page: Path) -> str:
    """Return how many tokens fit with saved tensors on the paths, and what iterations took."""
    found = read("activations")["results"]
    names = {"memory": "in memory", "paths": "on the path", "recompute": "computed again", "both": "both"}
    lines = ["| saved tensors | tokens | bytes of memory a token | largest by |", "|---|---|---|---|"]
    for kind, name in names.items():
        row = found["room"][kind]
        by = "memory" if row["tokens"] == row["memory_tokens"] else "the disk"
        lines.append(f"| {name} | {row['tokens']:,} | {row['row_bytes'] / row['length']:,.0f} | {by} |")
    lines += ["", "| at equal tokens | forward | both |", "|---|---|---|"]
    for kind, name in {**names, "save_on_cpu": "torch's `save_on_cpu`", "torch.save": "`torch.save`"}.items():
        if row := found["time"].get(kind):
            lines.append(f"| {name} | {row['forward_s']:.2f} s | {row['whole_s']:.2f} s |")
    return "\n".join([*lines, "", f"Report: {source('activations', page)}."])


def _capacity(kind: str, page: Path) -> str:
    report = read(kind)["results"]
    limit = report["limits"]["memory_bytes"]
    lines = [
        f"| in {limit / (1 << 30):.3g} GiB of memory | parameters | bytes a parameter, less the process | on the disk |",
        "|---|---|---|---|",
    ]
    for name, found in report["contenders"].items():
        if found.get("numel"):
            numel, parts = found["numel"], found["explained_bytes"]
            each = (found["peak_bytes"] - parts["process"]) / numel
            disk = f"{found['disk_bytes'] / 1e9:.1f} GB" if found["disk_bytes"] else ""
            lines.append(f"| {name} | {numel / 1e9:.2f}e9 | {each:.2f} | {disk} |")
        else:
            lines.append(f"| {name} | {found.get('failed') or found.get('left_out') or 'none'} | | |")
    return "\n".join([*lines, "", f"Report: {source(kind, page)}."])


def left(page: Path) -> str:
    """Return what an iteration costs whose gradients leave for the disk."""
    lines = [
        "| | of an iteration with gradients in memory | of its bound | predicted, of what happened |",
        "|---|---|---|---|",
    ]
    for name, row in read("gradients")["results"].items():
        lines.append(f"| {name} | {row['over_memory']:.2f} | {row['over_bound']:.2f} | {row['predicted']:.2f} |")
    return "\n".join([*lines, "", f"Report: {source('gradients', page)}."])


def streamed(page: Path) -> str:
    """Return what an iteration takes whose weights lie in a file, where memory has no room for them."""
    found = read("weights")["results"]
    lines = [
        "| | of an iteration with weights in memory | of its bound | least seconds by the drive, by the cores | read again |",
        "|---|---|---|---|---|",
    ]
    for name, row in found.items():
        if name.endswith("tokens"):
            least = f"{row['by_drive_s']:.2f}, {row['by_cores_s']:.2f} s"
            again = f"{row['again_bytes'] / 1e9:.1f} GB of {found['weight_bytes'] / 1e9:.1f}"
            lines.append(f"| {name} | {row['over_memory']:.2f} | {row['over_bound']:.2f} | {least} | {again} |")
    return "\n".join([*lines, "", f"Report: {source('weights', page)}."])


def large(page: Path) -> str:
    """Return what was predicted of a large model, and what happened."""
    return _large("large", page)


def largest(page: Path) -> str:
    """Return the same of a model whose weights alone are in memory."""
    return _large("large-gradients", page)


def _large(kind: str, page: Path) -> str:
    found = read(kind)["results"]
    said, was = found["predicted"], found["happened"]
    rows = [
        ("seconds of an iteration", "iteration_s", 1),
        ("peak of memory, GB", "peak_bytes", 1e9),
        ("read in a step, GB", "read_bytes", 1e9),
        ("written in a step, GB", "write_bytes", 1e9),
    ]
    steps = found["summary"]["steps"]
    head = f"{found['model']['numel'] / 1e9:.2f}e9 parameters, {found['tokens']} tokens, {steps} steps"
    lines = [f"| {head} | predicted | happened |", "|---|---|---|"]
    lines += [f"| {what} | {said[name] / unit:.3g} | {was[name] / unit:.3g} |" for what, name, unit in rows]
    return "\n".join([*lines, "", f"Report: {source(kind, page)}."])


# docs/benchmarks.md: what each mechanism is worth, and others' figures


def none_yet(kind: str) -> str:
    return f"No report yet: `make bench-all ARGS={kind}` writes one."


def worth(figure: dict[str, Any] | None) -> str:
    """Return what a mechanism brings: times, spread, in bold where it pays."""
    if figure is None:
        return ""
    text = f"{figure['times']:.2f}" + (f" ± {figure['spread']:.2f}" if figure["spread"] else "")
    return f"**{text}**" if figure["pays"] else text


def ablation(page: Path) -> str:
    """Return what each mechanism is worth."""
    if not dated("ablation", "json"):
        return none_yet("ablation")
    found = read("ablation")["results"]
    places: dict[str, None] = {}
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for each in found["comparisons"]:
        places[each["where"]] = None
        emulated = ", emulated" if each["with"].endswith(", emulated") else ""
        figures.setdefault(each["mechanism"] + emulated, {})[each["where"]] = each
    lines = [f"| mechanism | {' | '.join(places)} |", "|---|" + "---|" * len(places)]
    for mechanism, there in figures.items():
        lines.append(f"| {mechanism} | {' | '.join(worth(there.get(place)) for place in places)} |")
    lines += ["", f"| added | {' | '.join(f'{size} tokens, s' for size in found['tokens'])} | memory, MB |"]
    lines.append("|---|" + "---|" * (len(found["tokens"]) + 1))
    for name, row in found["rows"]["added"].items():
        seconds = [f"{each['iteration_s']:.3f}" for each in row["tokens"].values()]
        lines.append(f"| {name} | {' | '.join(seconds)} | {row['memory_bytes'] / 1e6:.0f} |")
    simulated = found.get("simulated", {})
    if simulated:
        lines += ["", f"| simulated, s | {' | '.join(simulated)} |", "|---|" + "---|" * len(simulated)]
        for which, title in (("deepspeed_s", "DeepSpeed's NVMe offload"), ("multipath_s", "MLP-Offload")):
            cells = [
                f"{each['published'][which]:.3g} ({each['their_schedules'][which]:.3g})"
                for each in simulated.values()
            ]
            lines.append(f"| {title}: published (its schedule, simulated) | {' | '.join(cells)} |")
        for name in (name for name in next(iter(simulated.values()))["rows"] if not name.startswith("without ")):
            cells = [f"{each['rows'][name]:.3g}" for each in simulated.values()]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Report: {source('ablation', page)}."])


def others(page: Path) -> str:
    """Return what others published, and ours on the same work."""
    if not dated("others", "json"):
        return none_yet("others")
    found = read("others")["results"]
    told = found["published"]
    lines = [
        f"| a cold step, published {told['foreground_s']} s + {told['drain_s']} s at {told['bytes_each']} bytes a parameter | foreground, s | drain, s | GB/s, of fio's |",
        "|---|---|---|---|",
    ]
    for name, row in found["cold"]["contenders"].items():
        of_fio = "" if row["of_fio"] is None else f"{row['of_fio']:.2f}"
        lines.append(f"| {name} | {row['foreground_s']:.3f} | {row['drain_s']:.3f} | {of_fio} |")
    lines += ["", "| a step in memory | ours, s | torch, a tensor at a time, s | published, s |", "|---|---|---|---|"]
    for case in ("one process", "eight processes"):
        row = found["threads"][case]
        seconds = [f"{each:.2f}" for each in row["whole_s"].values()]
        lines.append(f"| {case} | {' | '.join(seconds)} | {told[f'{case}_s']} |")
    lines += ["", "| an iteration | s | memory, MB |", "|---|---|---|"]
    for name, each in found["offloads"]["rows"].items():
        lines.append(f"| {name} | {each['iteration_s']:.3f} | {each['peak_bytes'] / 1e6:.0f} |")
    for name, each in found["offloads"]["contenders"].items():
        if each["failed"]:
            lines.append(f"| {name} | {each['failed'].splitlines()[0]} | |")
    return "\n".join([*lines, "", f"Report: {source('others', page)}."])


def megatron_core(page: Path) -> str:
    """Return what an iteration takes beside Megatron-Core's own CPU offload."""
    if not dated("megatron-core", "json"):
        return none_yet("megatron-core")
    found = read("megatron-core")["results"]
    what = f"{found['model']['numel'] / 1e6:.0f}M parameters, {found['tokens']} tokens, {found['threads']} threads"
    lines = [
        f"| {what} | iteration, s | its floor, s | step, s | MB read | MB written | memory, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        step = f"{row['step_s']:.3f}" if row["step_s"] else ""
        moved = [f"{row[f'kernel_{verb}_bytes'] / 1e6:.0f}" for verb in ("read", "write")]
        cells = [f"{row['iteration_s']:.3f}", f"{row['floor_s']:.3f}", step, *moved, f"{row['peak_bytes'] / 1e6:.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Report: {source('megatron-core', page)}."])


# docs/benchmarks.md: command, question, full run, reports

BENCHMARKS = (
    ("`offload bench`, `make bench` (`bench/iteration.py`)", "an iteration beside torch's AdamW and DeepSpeed's", "under 10 min", ("iteration",)),
    ("`python bench/deepspeed.py`", "ZeRO-3 with ours beside stock, at two batch sizes", "13 min", ("deepspeed",)),
    ("`python bench/scaling.py`", "a step by parameters, by memory, and on paper by nodes", "5 min", ("scaling",)),
    ("`python bench/kernel.py`", "the update beside torch's, DeepSpeed's, and memory's rate", "2 min", ("kernel",)),
    ("`python bench/formats.py`", "a step in each state format", "2 min", ("formats",)),
    ("`python bench/quality.py --pairs 10 --pairs-of-others 3`", "held-out loss with compact formats, paired seeds", "1 h", ("quality",)),
    ("`python bench/quality.py --optimizer muon`", "the same of Muon", "20 min", ("quality-muon",)),
    ("`python bench/classes.py`", "a step of torch's classes and of Muon, nothing resident", "6 min", ("classes",)),
    ("`python bench/overlap.py`", "steps hidden in forward, backward, both; does `auto` find the best?", "25 min", ("overlap",)),
    ("`python bench/overlap_ranks.py`", "the same on two ranks: FSDP2, DDP, ZeRO-3", "16 min", ("overlap-ranks",)),
    ("`python bench/gradients.py`", "gradients that leave for the disk", "6 min", ("gradients",)),
    ("`python bench/ablation.py`", "what each mechanism is worth, added and taken away", "1 h", ("ablation",)),
    ("`python bench/others.py`", "the work that others published times of", "8 min", ("others",)),
    ("`python bench/megatron_core.py`", "beside Megatron-Core's CPU offload", "5 min", ("megatron-core",)),
    ("`python bench/memory.py`", "does a run keep to its planned memory?", "2 min", ("memory",)),
    ("`python bench/capacity.py`", "the largest model that trains in 6 GiB", "25 min", ("capacity",)),
    ("`python bench/capacity.py --memory 2GiB --contenders deepspeed-nvme,exact,exact-gradients,compact8,compact8-gradients`", "the same in 2 GiB", "12 min", ("capacity-2gib",)),
    ("`python bench/large.py`", "3 billion parameters: predicted, happened", "10 min", ("large",)),
    ("`python bench/large.py --params 5B --steps 10 --state-format compact8 --gradient-memory 0`", "5 billion, gradients on the disk", "15 min", ("large-gradients",)),
    ("`python bench/activations.py`", "saved tensors on the disk: how much more fits, at what cost?", "25 min", ("activations",)),
    ("`python bench/weights.py`", "weights in a file, without room for them in memory", "2 min", ("weights",)),
    ("`python bench/paths.py`", "one path beside fio, several beside their sum", "10 min", ("paths",)),
    ("`python bench/lock.py`", "processes that share a path, in turns and freely", "1 min", ("lock",)),
    ("`python bench/planner.py`", "is a step what was predicted, and the plan the best?", "10 min", ("planner",)),
    ("`python bench/published.py`", "does the simulator predict what others measured?", "2 min", ("published",)),
    ("`python bench/gpu.py`", "on a GPU: bits, rates, shares, other offloaders, memory", "", ("gpu",)),
    ("`python bench/gpu_parts.py`", "what each part for a GPU saves, simulated", "3 min", ("gpu-parts",)),
    ("`python bench/phases.py`", "parking between steps; a step beside a serial loop", "9 min", ("phases",)),
    ("`python bench/checkpoint.py`", "the stall for a checkpoint, and what it writes", "5 min", ("checkpoint",)),
    ("`python bench/saves.py`", "the same inside DeepSpeed, in its files and in place", "15 min", ("saves",)),
    ("`python tests/faults/torture.py --kills 200`", "is a checkpoint lost or mixed when the process is killed?", "5 min", ("torture",)),
    ("`python tests/faults/torture.py --kills 200 --overlap`", "with steps that go on behind", "5 min", ("torture-overlap",)),
    ("`python tests/faults/torture.py --kills 200 --overlap both`", "with steps made in backward, too", "5 min", ("torture-ahead",)),
    ("`python tests/faults/torture.py --ranks 2 --kills 200`", "one of two ranks: does the other end, or say what it waits for?", "5 to 15 min", ("torture-ranks",)),
    ("`python tests/integrations/deepspeed_torture.py --kills 200`", "two ranks that save inside DeepSpeed", "10 min", ("torture-deepspeed",)),
    ("`python tests/faults/histories.py --histories 2000`", "are checkpoints whole when folders are moved, copied, linked, mounted, released?", "1 h", ()),
)  # fmt: skip
REPORTED = tuple(dict.fromkeys(kind for *_, kinds in BENCHMARKS for kind in kinds))


def benchmarks(page: Path) -> str:
    """Return the index of all benchmarks, with the newest report of each."""
    lines = ["| command | question | full run | report |", "|---|---|---|---|"]
    for command, question, minutes, kinds in BENCHMARKS:
        links = [link(newest(kind), kind, page) for kind in kinds if dated(kind, "json")]
        links += [link(drawn, "picture", page) for kind in kinds for drawn in dated(kind, "png")[-1:]]
        without = "none yet" if kinds else "exit status"
        lines.append(f"| {command} | {question} | {minutes} | {', '.join(links) or without} |")
    return "\n".join(lines)


def targets(page: Path) -> str:
    """Return every target of every newest report: measured, aimed at, why it was missed."""
    reports = {kind: read(kind).get("targets", ()) for kind in REPORTED if dated(kind, "json")}
    parts = [f"All: {counted([row for rows in reports.values() for row in rows])}."]
    for kind, rows in reports.items():
        if rows:
            lines, notes = [f"**{kind}**: {counted(rows)}. {source(kind, page)}."], list[str]()
            for named in alike([row["name"] for row in rows]):
                cells = {name: judged(kind, row, notes) for row in rows if (name := row["name"]) in named}
                lines += ["", *crossed(named, cells)]
            if notes:
                lines += ["", *(f"* {chr(ord('a') + number)}: {why}" for number, why in enumerate(notes))]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def counted(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many targets were met, missed and not measured."""
    ends = Counter("not measured" if row["value"] is None else "met" if row["met"] else "missed" for row in rows)
    return ", ".join(f"{ends[end]} {end}" for end in ("met", "missed", "not measured") if ends[end])


def judged(kind: str, row: dict[str, Any], notes: list[str]) -> str:
    """Return what a target's cell says; where it was not met, with the letters of its notes, which are added to `notes`."""
    value, aim = row["value"], f"({row['target']:.3g})"
    if value is not None and row["met"]:
        return f"{value:.3g} {aim}"
    named = f"{kind}: {row['name']}"
    why = [row["note"]] if value is None else next((why for start, *why in WHY_MISSED if named.startswith(start)), [])
    notes += [each for each in why if each not in notes]
    letters = "".join(f" {chr(ord('a') + notes.index(each))}" for each in why)
    return f"not measured {aim}{letters}" if value is None else f"{value:.3g} {aim} **missed**{letters}"


def alike(names: Sequence[str]) -> list[dict[str, tuple[str, str]]]:
    """Return the targets that one table can show, each with its row and column: what is before and after its last colon.

    A table's rows have columns in common, directly or through other rows. Targets that are alone come last, together.
    A share of the state that is resident, at the end of a name, is a column, too.
    """
    tables: list[dict[str, tuple[str, str]]] = []
    for name in names:
        parted = re.fullmatch(r"(.*)(?:: |, (?=\d+% resident$))(.*)", name)
        row, column = parted.groups() if parted else (name, "")
        joined = {name: (row, column)}
        for table in [
            each for each in tables if any(row == one or column == two != "" for one, two in each.values())
        ]:
            tables.remove(table)
            joined = table | joined
        tables.append(joined)
    single = {name: (name, "") for table in tables if len(table) == 1 for name in table}
    return [*(table for table in tables if len(table) > 1), *([single] if single else [])]


def crossed(named: dict[str, tuple[str, str]], cells: dict[str, str]) -> list[str]:
    """Return the table of some targets; what there is more of are its rows."""
    rows, columns = (list(dict.fromkeys(place[axis] for place in named.values())) for axis in (0, 1))
    placed = {place: cells[name] for name, place in named.items()}
    if len(columns) > len(rows):
        rows, columns, placed = columns, rows, {(one, two): cell for (two, one), cell in placed.items()}
    head = [f"| | {' | '.join(column or 'measured (aim)' for column in columns)} |", "|---|" + "---|" * len(columns)]
    return [*head, *(f"| {row} | {' | '.join(placed.get((row, each), '') for each in columns)} |" for row in rows)]


ADDED = (
    "copying, summing and writing gradients takes 67 and 33 ms of the cores (`exact`, `compact8`), free in the bound; backward is "
    "47 and 25 ms longer. Tried (backward and step: 395 and 263 ms): subgroups of 4M elements, 405 and 264; no checksums, 403 and 260; "
    "one update thread, 427 and 273"
)
CONTENTION = (
    "profiled in compact8 at 512 tokens: updates add 80 ms to a backward pass of 245 (their work over two cores: 64), and 21 of the step "
    "are left, for fingerprints and new weights. Tried: update threads at nice 5 and 19, 1.3 and 1.7 times as long, as backward "
    "waits for their norms; one thread, 1.05; work that is waited for first, 0.99"
)
COPIES = (
    "copying 400 MB takes 0.2 to 0.4 s of a core, most of it the page cache's, beside training that leaves none idle. Tried: the "
    "copying thread at the lowest priority; deleting old files behind. In place nothing is copied"
)
HANDED = (
    "the call takes 11 to 14 ms on one rank, 34 to 49 on two (DeepSpeed's barriers and files, ours beside them), of iterations of 0.19 to "
    "0.70 s; the rest is writing resident state beside training that leaves no core idle"
)
AT_ITS_MEMORY = (
    "DeepSpeed took 1.72 s here, 2.19 in `deepspeed` (there 3.1 times; 3.9 at 16 tokens). 0.38 s are forward and backward; its peak "
    "leaves ours 823 MB to move each way: 3 times would take 8.7 GB/s; the disk gave 3.1 to 4.9 before rounds, ours moved 4.7. Tried: "
    "hiding it, 2.9 times; memory as pipelined, where nothing is left to move, 3.9"
)
HIDDEN_IN_BOTH = (
    "DeepSpeed took 1.72 s here, 2.19 in `deepspeed` (there 4.0 times; 4.8 at 16 tokens). 0.20 s are exposed: forward is 0.07 longer, "
    "backward, whose cores updates take, 0.09, the step 0.04; 4 times leaves 0.05. Tried: `compact8` with nothing resident, 3.1; "
    "subgroups of 4M elements, on a Xeon, 1.59 s for 1.37"
)
ROOM = (
    "both keep 16-bit weights and gradients in memory: with nothing else but the process and staging, 1.58. Tried: state of half the "
    "size, the same; gradients on the disk, 2.98 and 2.94"
)
OF_CLASSES = (
    "profiled: a step takes 0.15 s of a core more than the class alone (`Rprop`: 0.58 for 0.43), free in the bound. Tried (`Rprop`, "
    "`RAdam`, `Adagrad`: 0.38, 0.29 and 0.13 s): no checksums, 0.36, 0.23 and 0.10; subgroups of a million elements, 0.44, 0.27 and "
    "0.16; memory that malloc does not give back, 0.36 for 0.36 and 0.24 for 0.24 of the first two"
)
FEW_ROUNDS = "rows of one mode differ by 4% in this report's three rounds"
TWICE = (
    "backward is measured with updates beside it, and the 0.07 s that these take of its cores are added once more. Tried: leaving "
    "that out, 1.01 of what FSDP2 took and 0.91 of what DDP did; forward and backward of steps that are waited for, 0.99 and 0.66, "
    "without DDP's exchange of rows"
)
PLACES = (
    "each has files of its own, and the disk is not alike everywhere: 537 MB in three files took 0.16, 0.16 and 0.22 s to read, by "
    "however many readers. Of fio's rate in its own files, the loop moved 1.13, ours 1.03 (`exact`) and 0.94 (`compact8`)"
)
AGAIN = (
    "at the drive's rate a layer's 25 MB take 8 ms to read, about what it takes to compute (7 ms at 128 tokens), by one thread beside "
    "products that have both cores, on which the kernel also reclaims memory. Tried: `MADV_WILLNEED`, which reads single pages, 2.2 and "
    "2.0; a thread that brings the next layer, 2.0 and 1.7; writing out whole folios behind updates: the kernel's part of a step "
    "0.3 s for 1.2"
)
DRIFT = (
    "disk and memory changed their rates between the steps that taught them and those that count; the row by a step's own "
    "rates is below"
)
FAST_MEMORY = (
    "memory gave 100 GB/s, behind which arithmetic is not hidden; an hour later, at 53 GB/s, the shares were 1.02, 0.95 and 0.89. Tried: "
    "asking for memory 256 to 8,192 bytes ahead (`--tune`): 0.87 to 0.95 of the stream in `exact`, 0.89 to 1.00 in `compact16`, 0.82 to "
    "0.86 in `compact8`"
)
COPIED = (
    "saved tensors, 0.53 GB a pass, are copied to buffers and back on the cores that compute. Tried an hour later, when this took 1.21: "
    "1 GiB of buffers, where nothing is written, 1.17; 64 MiB, 1.27"
)
WHY_MISSED = (
    ("classes: Rprop", OF_CLASSES),
    ("classes: RAdam", OF_CLASSES),
    ("classes: Adagrad", OF_CLASSES),
    ("overlap-ranks: zero3: an iteration with auto", "it had chosen both, the best", FEW_ROUNDS),
    ("overlap-ranks: ddp: the best", "1.27 in nine rounds the day before", FEW_ROUNDS),
    ("overlap-ranks: fsdp2, hidden in forward: predicted", "0.024 in nine rounds the day before", FEW_ROUNDS),
    ("overlap-ranks: fsdp2, hidden in backward: predicted", TWICE),
    ("overlap-ranks: ddp, hidden in backward: predicted", TWICE),
    (
        "overlap-ranks: ddp, hidden in forward: predicted",
        "the step's prediction has no exchange of rows: profiled, 0.21 of 0.39 s of a step that is waited for, in forward behind "
        "updates. Tried: adding all of it, 0.13 too long, as it goes on beside the disk; the seconds that the step took, 0.16 too short",
    ),
    (
        "ablation: simulated, ",
        "up to this row both move the same bytes, ours at the machine file's rate of the file system, 1.37 GB/s each way, theirs at "
        "that which fits the logs, 1.5 (`published`). Formats bring the rest, in the next rows",
    ),
    ("gradients: exact, 128 tokens: iteration", ADDED),
    ("gradients: compact8, 128 tokens: iteration", ADDED),
    (
        "overlap: 128, hidden in",
        "a step is over three times as long as backward, ten times as long as forward: what does not fit is left to the step",
    ),
    (
        "overlap: 128: iteration with auto",
        "it had chosen both, of which no row was faster: 0.298 s an iteration where both was asked for, 0.314 s where auto had chosen "
        "it, the same code in the same run, which eight pairs do not tell apart",
    ),
    ("overlap: as forward, hidden in", CONTENTION),
    ("overlap: as both, hidden in", CONTENTION),
    ("overlap: compact8, 512, hidden in", CONTENTION),
    ("overlap: compact8, 512 tokens", "the least was 1.15", CONTENTION),
    ("overlap: step as long as both", "the least allowed 1.62", CONTENTION),
    ("overlap: step as long as forward", "the least that forward, backward and updates take allowed 1.19"),
    ("others: cold step, compact8", PLACES),
    ("others: cold step, exact: foreground", PLACES),
    ("weights: 128 tokens", AGAIN),
    ("weights: 512 tokens", AGAIN),
    ("iteration: ours in DeepSpeed, memory as NVMe offload, against", AT_ITS_MEMORY),
    ("iteration: ours in DeepSpeed, memory as NVMe offload, hidden", HIDDEN_IN_BOTH),
    ("saves: stall beyond the floor over an iteration, stock", COPIES),
    ("saves: stall beyond the floor over an iteration, in_place", HANDED),
    (
        "capacity-2gib: compact8: parameters over",
        "a layer is 3% of the model: with one more, which was tried, the kernel ended it",
    ),
    ("capacity: exact: parameters, times", ROOM),
    ("capacity: compact8: parameters, times", ROOM),
    ("activations: iteration over its bound", COPIED),
    (
        "published: memory, each row by itself: worst",
        "the two runs of 40B with CXL memory alone tell where DDR ends, and differ by 20%: the other predicts each",
    ),
    (
        "published: sweep, each stride",
        "stride 2 alone tells the speed of the link: without it the fit does not know it",
    ),
    ("kernel: whole job, share", FAST_MEMORY),
    ("kernel: whole job, times torch foreach", "with all that the memory gives it would be 8.3", FAST_MEMORY),
    ("kernel: compact", FAST_MEMORY),
    (
        "large: iteration_s",
        "reads and writes took 22.3 and 22.2 s, 17.3 by the disk's rates just before, and updates beside backward 3.1 s, "
        "1.4 by themselves (`lanes` of plan and summary)",
    ),
    ("large: peak_bytes", "1.4 GB less than was predicted"),
    (
        "phases: compact8: times as fast as the serial loop, over its bound",
        "the disk never rests in a step, and moves 0.87 of what it does alone in turns around it. Tried: subgroups of a half and a "
        "quarter, 0.84 and 0.88; no checksums, 0.90; twice the staging memory, 0.84",
    ),
    ("planner: largest error", DRIFT),
    ("planner: the same, predicted before", DRIFT),
    (
        "planner: the same, by the rates",
        "one of 26, two slots on the disk: each move waits for another, and rates that change within the step do not add up. All "
        "others are within 0.05; one slot on a path of constant rate, 0.007",
    ),
)
"""Why a target was missed, by how the report and the target begin: reasons, of which several targets may share one."""
