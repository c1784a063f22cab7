"""Trainings side by side: one process per contender, driven round by round, and what is reported of them.

Every contender trains the same model from the same seed on the same batches with the same hyperparameters. A group
of them is alive at the same time; in a round each runs a few iterations of every batch size, one contender after
another, beginning with another one each time. Ratios are taken within rounds; figures are medians over them.

The *exposed* step is what an iteration would save if the optimizer were free: iteration minus the median forward and
backward of the group's contender that has no optimizer. (Not minus the contender's own backward: work that a
contender does for its optimizer while gradients arrive counts as its optimizer's.)

A contender that crashes, does not answer in time or whose losses stray is reported as such, with the end of its
output, and the others go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import re
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _common import ROOT, end_with_parent, progress

from offload.cli.model import Shape
from offload.units import format_seconds

PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For all contenders: idle threads of torch's pool sleep. Spinning, they take the cores from whatever else runs (on a
busy machine forward and backward then take five times as long), and gain nothing measurable here."""

STATE_BYTES = 12
"""Of fp32 masters and moments, a parameter."""

SPREAD = 0.15
"""A spread of the baseline's iterations (half the distance of the quartiles, over the median) beyond this means that
the machine was doing something else."""

STRAY = 0.05
"""Losses further apart than this, relatively, mean that a contender computes something else."""


@dataclass(frozen=True)
class Contender:
    """What runs in one process.

    Attributes:
        name: In tables; unique within a group.
        kind: One of `_worker.KINDS`, "bounds" or "aio".
        settings: What its optimizer or DeepSpeed is given. Each "{path}", at any depth, becomes a directory of its
            own.
        equal_to: For ours: the contender of the group whose peak memory decides how much state is resident.
        left_out: Why it does not run; "" if it does.
    """

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    equal_to: str = ""
    left_out: str = ""


class ContenderError(Exception):
    """A contender crashed or did not answer in time."""


class ShortError(ContenderError):
    """A contender found no memory for something."""


class Worker:
    """A contender's process: it is asked in lines of JSON on standard input, and answers so on standard output.

    Args:
        contender: What it is.
        common: What all contenders are told: shape, ....
        folder: Where it runs, its directories are made and its log goes.
        prepare: Called in its process before anything else.
    """

    def __init__(
        self,
        contender: Contender,
        common: Mapping[str, Any],
        folder: Path,
        prepare: Callable[[], None] = end_with_parent,
    ) -> None:
        self.contender = contender
        self._counter = 0
        self._folder = folder
        self.log = folder / (re.sub(r"\W+", "-", contender.name) + ".log")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / "_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=contender_environment(),
            cwd=folder,
            preexec_fn=prepare,
        )
        self._rest = b""
        self.send({**common, "kind": contender.kind, "settings": self._placed(contender.settings)})

    def send(self, message: Any) -> None:
        """Ask for something."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ContenderError(self._died()) from None

    def answer(self, timeout_s: float) -> Any:
        """Wait for the answer.

        Raises:
            ContenderError: It died, or said nothing for `timeout_s`.
            ShortError: It found no memory for something.
        """
        assert self.process.stdout is not None
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self.process.stdout], [], [], left_s)[0]:
                raise ContenderError(f"hangs: no answer within {format_seconds(timeout_s)}")
            found = os.read(self.process.stdout.fileno(), 1 << 16)
            if not found:
                raise ContenderError(self._died())
            self._rest += found
        line, self._rest = self._rest.split(b"\n", 1)
        found = json.loads(line)
        if isinstance(found, dict) and "short_of" in found:
            raise ShortError(found["short_of"])
        return found

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Ask for something and wait for the answer."""
        self.send(message)
        return self.answer(timeout_s)

    def _died(self) -> str:
        code = self.process.wait(10)
        return f"crashed: exit status {code}" if code >= 0 else f"crashed: signal {-code}"

    def output(self) -> str:
        """Return the end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def close(self, timeout_s: float = 20.0) -> None:
        """End the process, by force if need be."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _placed(self, value: Any) -> Any:
        if isinstance(value, str) and "{path}" in value:
            self._counter += 1
            place = self._folder / f"{self.log.stem}-{self._counter}"
            place.mkdir()
            return value.replace("{path}", str(place))
        if isinstance(value, Mapping):
            return {key: self._placed(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._placed(item) for item in value]
        return value


def contender_environment() -> dict[str, str]:
    """Return the variables of a contender's process; programs are looked for beside the interpreter first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **native_cache(), **PATIENT, "PATH": path}


def native_cache() -> dict[str, str]:
    """Return the variables that make DeepSpeed keep what it compiles, outside of the repository."""
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "offload-bench" / f"deepspeed-{version('deepspeed')}-torch-{version('torch')}"
        folder.mkdir(parents=True, exist_ok=True)
        return {"TORCH_EXTENSIONS_DIR": str(folder)}
    return {}


@dataclass
class Outcome:
    """What became of one contender.

    Attributes:
        name: Its name.
        settings: What it was given.
        failed: Why there are no (more) figures; "" if there are.
        output: The end of what it printed, if it failed.
        iterations: For each round, those that count, as the contender reports them.
        losses: One a step, all rounds and batch sizes.
        set_up_s: Until it could train.
        start_bytes: Most resident memory until then.
        peak_bytes: Most resident memory ever.
        pinned_bytes: Host memory that is locked or pinned, at the end.
        resident_bytes: Resident memory at the end of each round that counts.
    """

    name: str
    settings: Any
    failed: str = ""
    output: str = ""
    iterations: list[list[dict[str, Any]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    set_up_s: float = 0.0
    start_bytes: int = 0
    peak_bytes: int = 0
    pinned_bytes: int = 0
    resident_bytes: list[int] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        """Whether there are figures, and nothing is wrong with them."""
        return bool(self.iterations) and not self.failed

    def values(self, name: str, tokens: int) -> list[float]:
        """Return one figure, a median for each round."""
        found = []
        for iterations in self.iterations:
            some = [i[name] for i in iterations if i["tokens"] == tokens and i.get(name) is not None]
            if some:
                found.append(statistics.median(some))
        return found

    def median(self, name: str, tokens: int) -> float | None:
        """Return one figure's median over the rounds."""
        values = self.values(name, tokens)
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Schedule:
    """What a round is, and how many there are.

    Attributes:
        parts: (tokens, iterations) for each batch size; the first iteration of each does not count.
        rounds: Most rounds that count.
        least: Rounds that count, whatever the time.
        seconds: When this has passed since the group began, no further round begins.
        settling: Rounds before these, which do not count; each contender makes them when it is set up.
        timeout_s: Within which a contender must answer.
    """

    parts: tuple[tuple[int, int], ...]
    rounds: int
    least: int
    seconds: float
    settling: int = 1
    timeout_s: float = 180.0


BASELINE = "forward and backward alone"
BOUNDS = "bounds"


def run_group(
    contenders: Sequence[Contender],
    schedule: Schedule,
    common: Mapping[str, Any],
    folder: Path,
    say: Callable[[str], None] = print,
    missing: Mapping[str, str] | None = None,
) -> tuple[dict[str, Outcome], list[dict[str, float]]]:
    """Run contenders against each other.

    Args:
        contenders: Who.
        schedule: How often.
        common: What all are told; see `common_of`.
        folder: Where they run.
        say: Told of what fails.
        missing: Contenders that cannot run, and why.

    Returns:
        What became of each, by name, and the hardware's speed in each round.
    """
    started_s = time.monotonic()
    contenders = [replace(c, left_out=(missing or {}).get(c.name, c.left_out)) for c in contenders]
    outcomes = {c.name: Outcome(c.name, dict(c.settings), c.left_out) for c in contenders}
    workers: dict[str, Worker] = {}
    bounds = Worker(Contender(BOUNDS, BOUNDS, {"path": "{path}", "smoke": common["smoke"]}), common, folder)

    def fail(name: str, error: ContenderError) -> None:
        outcomes[name].failed = str(error)
        worker = workers.pop(name)
        outcomes[name].output = worker.output()
        worker.close(0.0)
        say(f"{name}: {error}\n{outcomes[name].output}")

    def launch(chosen: Sequence[Contender]) -> None:
        for contender in chosen:
            progress(f"setting up: {contender.name}")
            workers[contender.name] = Worker(contender, common, folder)
            try:  # one after another: their memory peaks while they start
                found = workers[contender.name].answer(schedule.timeout_s)
            except ContenderError as error:
                fail(contender.name, error)
                continue
            outcome = outcomes[contender.name]
            outcome.set_up_s, outcome.start_bytes = found["set_up_s"], found["peak_bytes"]
            for number in range(1 - schedule.settling, 1):
                if contender.name in workers:
                    one_round(contender.name, number)

    def one_round(name: str, number: int) -> None:
        parts = []
        step = (number + schedule.settling - 1) * sum(count for _, count in schedule.parts)
        for tokens, count in schedule.parts:
            parts.append([tokens, step, count])
            step += count
        try:
            found = workers[name].ask({"run": parts}, schedule.timeout_s)
        except ContenderError as error:
            fail(name, error)
            return
        outcome = outcomes[name]
        outcome.peak_bytes, outcome.pinned_bytes = found["peak_bytes"], found["pinned_bytes"]
        outcome.losses += [iteration["loss"] for iteration in found["iterations"]]
        if number > 0:
            outcome.iterations.append([i for i in found["iterations"] if i["number"] > 0])
            outcome.resident_bytes.append(found["resident_bytes"])

    speeds: list[dict[str, float]] = []
    try:
        bounds.answer(schedule.timeout_s)
        launch([c for c in contenders if not c.left_out and not c.equal_to])
        for contender in contenders:
            if contender.equal_to and not contender.left_out:
                limited = limit_memory(contender, outcomes, common["numel"])
                if limited is None:
                    outcomes[contender.name].failed = f"not run: {contender.equal_to} did not"
                    continue
                outcomes[contender.name].settings = limited.settings
                launch([limited])
        round_s = 0.0
        for number in range(1, schedule.rounds + 1):
            if number > schedule.least and time.monotonic() + round_s > started_s + schedule.seconds:
                break
            round_started_s = time.monotonic()
            names = list(workers)
            if not names:
                break
            speeds.append(bounds.ask({}, schedule.timeout_s))
            for name in random.Random(number).sample(names, len(names)):  # no one always behind the same one
                progress(f"round {number}: {name}")
                one_round(name, number)
            round_s = max(round_s, time.monotonic() - round_started_s)
    finally:
        for worker in [*workers.values(), bounds]:
            worker.close()
    check_losses(outcomes)
    return outcomes, speeds


def limit_memory(contender: Contender, outcomes: Mapping[str, Outcome], numel: int) -> Contender | None:
    """Return a contender of ours with as much resident state as another's peak memory leaves room for.

    What ours takes beside resident state is known from the one of the group that is set up alike and has none.
    """
    theirs = outcomes[contender.equal_to]
    bare = next(o for o in outcomes.values() if o.settings == contender.settings and o.name != contender.name)
    if theirs.failed or not theirs.peak_bytes or not bare.peak_bytes:
        return None
    # Peaks of two runs of the same thing mostly differ by a few MiB; where it is a hundred, no margin helps.
    allowed = min(theirs.peak_bytes - bare.peak_bytes - (16 << 20), round(1.05 * STATE_BYTES * numel))
    return replace(contender, settings=with_host_memory(contender.settings, max(0, allowed)))


def with_host_memory(settings: Mapping[str, Any], host_memory: int) -> dict[str, Any]:
    if "multi_tier_offload" in settings:
        return {**settings, "multi_tier_offload": {**settings["multi_tier_offload"], "host_memory": host_memory}}
    return {**settings, "host_memory": host_memory}


def check_losses(outcomes: Mapping[str, Outcome]) -> None:
    """Mark contenders whose losses are not finite, or not those of the others."""
    trained = [o for o in outcomes.values() if o.losses and o.name != BASELINE]
    if len(trained) < 2:
        return
    length = min(len(o.losses) for o in trained)
    finite = [[o.losses[step] for o in trained if math.isfinite(o.losses[step])] for step in range(length)]
    usual = [statistics.median(losses) if losses else math.nan for losses in finite]
    for outcome in trained:
        stray = [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(outcome.losses, usual, strict=False)]
        worst = max(range(length), key=lambda step: math.inf if math.isnan(stray[step]) else stray[step])
        if not stray[worst] <= STRAY and not outcome.failed:
            outcome.failed = (
                f"diverges: its loss is {outcome.losses[worst]:.4f} in step {worst}, the median {usual[worst]:.4f}"
            )


# Figures


def exposed(outcome: Outcome, baseline: Outcome, tokens: int) -> list[float]:
    """Return, for each round, what an iteration would save if the optimizer were free."""
    alone = baseline.median("iteration_s", tokens)
    if alone is None or outcome is baseline:
        return []
    return [iteration - alone for iteration in outcome.values("iteration_s", tokens)]


def times_faster(ours: Outcome, theirs: Outcome, tokens: int) -> float | None:
    """Return how many times as long their iterations are: the median of the rounds' ratios."""
    pairs = zip(theirs.values("iteration_s", tokens), ours.values("iteration_s", tokens), strict=False)
    ratios = [a / b for a, b in pairs]
    return statistics.median(ratios) if ratios else None


def times_shorter(ours: Outcome, theirs: Outcome, baseline: Outcome, tokens: int) -> float | None:
    """Return how many times as long their exposed step is; of ours at least a millisecond counts."""
    mine, other = exposed(ours, baseline, tokens), exposed(theirs, baseline, tokens)
    if not mine or not other:
        return None
    return statistics.median(other) / max(1e-3, statistics.median(mine))


def best(outcomes: Mapping[str, Outcome], names: Sequence[str], tokens: int) -> Outcome | None:
    """Return the fastest of some contenders that ran, or None."""
    ran = [outcomes[name] for name in names if name in outcomes and outcomes[name].ran]
    return min(ran, key=lambda outcome: outcome.median("iteration_s", tokens) or 0.0, default=None)


def spread(values: Sequence[float]) -> float:
    """Return half the distance of the quartiles over the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def bound_s(outcome: Outcome, speeds: Sequence[Mapping[str, float]], tokens: int, numel: int) -> float | None:
    """Return the seconds that a step cannot be shorter than: its bytes at the speeds measured in the same rounds."""
    if not speeds:
        return None
    disk = statistics.median(speed["disk_bytes_per_s"] for speed in speeds)
    memory = statistics.median(speed["memory_bytes_per_s"] for speed in speeds)
    moved = sum(outcome.median(f"kernel_{verb}_bytes", tokens) or 0.0 for verb in ("read", "write"))
    return max(moved / disk, 28 * numel / memory)


MEDIANS = (
    *("iteration_s", "forward_s", "backward_s", "step_s", "predicted_step_s", "engine_step_s"),
    *("kernel_read_bytes", "kernel_write_bytes", "resident_share"),
)
"""Of what contenders report, what a row has."""


def row(
    outcome: Outcome, baseline: Outcome, speeds: Sequence[Mapping[str, float]], tokens: int, numel: int
) -> dict[str, Any]:
    """Return a contender's figures for one batch size."""
    out = exposed(outcome, baseline, tokens)
    bound = bound_s(outcome, speeds, tokens, numel)
    found: dict[str, Any] = {name: outcome.median(name, tokens) for name in MEDIANS}
    found |= {name: getattr(outcome, name) for name in ("peak_bytes", "pinned_bytes", "start_bytes")}
    found["iteration_spread"] = spread(outcome.values("iteration_s", tokens))
    found["exposed_s"] = statistics.median(out) if out else None
    found["tokens_per_s"] = tokens / found["iteration_s"] if found["iteration_s"] else None
    counted = [i["path_bytes"] for r in outcome.iterations for i in r if i["tokens"] == tokens and "path_bytes" in i]
    found["path_bytes"] = [statistics.median(column) for column in zip(*counted, strict=True)] if counted else []
    found["peak_bytes_per_parameter"] = outcome.peak_bytes / numel
    found["bound_s"] = bound
    # What is exposed is a difference of two noisy times; it is not less than the call of the step itself.
    longest = max(found["exposed_s"] or 0.0, found["step_s"] or 0.0)
    found["share_of_bound"] = None if bound is None or not longest else bound / longest
    return found


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("iteration", "iteration_s", "{:.3f}"),
    ("±", "iteration_spread", "{:.0%}"),
    ("forward", "forward_s", "{:.3f}"),
    ("backward", "backward_s", "{:.3f}"),
    ("step", "step_s", "{:.3f}"),
    ("exposed", "exposed_s", "{:.3f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("MB read", "kernel_read_bytes", "MB"),
    ("MB written", "kernel_write_bytes", "MB"),
    ("resident", "resident_share", "{:.0%}"),
    ("peak MB", "peak_bytes", "MB"),
    ("pinned MB", "pinned_bytes", "MB"),
    ("bytes/parameter", "peak_bytes_per_parameter", "{:.1f}"),
    ("of bound", "share_of_bound", "{:.0%}"),
    ("predicted step", "predicted_step_s", "{:.3f}"),
    ("engine's step", "engine_step_s", "{:.3f}"),
)


def markdown(rows: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str]) -> str:
    """Return a table of contenders; seconds where nothing else is said."""
    columns = [c for c in COLUMNS if any(r.get(c[1]) is not None for r in rows.values())]
    lines = ["| contender | " + " | ".join(title for title, _, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    for name, found in rows.items():
        cells = []
        for _, key, form in columns:
            value = found.get(key)
            if value is None:
                cells.append("")
            else:
                cells.append(f"{value / 1e6:.0f}" if form == "MB" else form.format(value))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [f"| {name} | {why} |" + " |" * (len(columns) - 1) for name, why in failed.items()]
    return "\n".join(lines)


def picture(file: Path, tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Draw every table: a bar per contender, cut into forward, backward and step, its exposed part marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {title: rows for title, rows in tables.items() if rows}
    heights = [1 + len(rows) for rows in drawn.values()]
    figure, all_axes = pyplot.subplots(
        len(drawn),
        1,
        figsize=(9, 0.34 * sum(heights) + 0.8),
        layout="constrained",
        squeeze=False,
        height_ratios=heights,
    )
    for axes, (title, rows) in zip(all_axes[:, 0], drawn.items(), strict=True):
        names = list(rows)
        left = [0.0] * len(names)
        parts = (
            ("forward_s", "#9ecae1", "forward"),
            ("backward_s", "#4c78a8", "backward"),
            ("step_s", "#e4853a", "step"),
        )
        for key, colour, label in parts:
            widths = [rows[name][key] or 0.0 for name in names]
            axes.barh(names, widths, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("seconds an iteration")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0, 0].legend(frameon=False, fontsize=8, ncols=3)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def common_of(shape: Shape, seq: int, smoke: bool) -> dict[str, Any]:
    """Return what all contenders are told."""
    sized = {"layers": shape.layers, "hidden": shape.hidden}
    return {"shape": sized, "numel": shape.numel, "seq": seq, "smoke": smoke}


def sum_of_losses(outcomes: Iterable[Outcome]) -> str:
    """Return a digest of the first losses of contenders."""
    losses = json.dumps([[outcome.name, outcome.losses[:4]] for outcome in outcomes])
    return hashlib.sha256(losses.encode()).hexdigest()[:16]
