"""How a benchmark is declared and run: options, sizes, sections and targets, from the command line to the report.

A script has sections: functions that are given a `Run`, do so much work as its options and size say, note their
targets in it and return what the report has of them. `main` does all around them. A script that measures in processes
of its own has a `child`, which `in_process` starts and hands a request.

A contender is a function of no arguments that does one round of work. Rounds are interleaved and begin with
another contender each time, so that whatever else the machine does falls on all alike; figures are medians,
and a comparison is the median of ratios taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _common import Kept, end_with_parent, environment, kernel_io, moved, progress
from _needs import Need, require

from offload.cli.values import Parser
from offload.errors import ConfigError
from offload.units import format_seconds

Row = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """An option of one benchmark.

    Attributes:
        name: In `Run.args`, where it has underscores.
        full: Its default, of the type that is wanted; a list takes several.
        smoke: Its value in a tiny run, whatever was asked for; None for as it is.
        help: What it is.
        read: Makes a value of the option's name and its text.
        more: Other arguments of `add_argument`.
    """

    name: str
    full: Any
    smoke: Any = None
    help: str = ""
    read: Callable[[str, str], Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Let a parser know it."""
        first = self.full[0] if isinstance(self.full, list) else self.full
        how: dict[str, Any] = {"default": self.full, "help": f"{self.help} (default: %(default)s)".strip()}
        if isinstance(self.full, bool):
            how = {"action": "store_true", "help": self.help}
        elif first is not None and self.read is None:
            how["type"] = type(first)
        if isinstance(self.full, list):
            how["nargs"] = "*"
        parser.add_argument(f"--{self.name.replace('_', '-')}", **how | dict(self.more))

    def settle(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Put its value into `args`: that of a tiny run, or what its text is read as."""
        if args.smoke and self.smoke is not None:
            setattr(args, self.name, self.smoke)
        text = getattr(args, self.name)
        if self.read is not None and isinstance(text, str):
            try:
                setattr(args, self.name, self.read(f"--{self.name}", text))
            except ConfigError as error:
                parser.error(str(error))


def names_among(known: Iterable[str]) -> Callable[[str, str], list[str]]:
    """Return what reads an option's text as some of these names, which are separated by commas."""
    every = list(known)

    def read(option: str, text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in every:
                raise ConfigError(option, name, f"there are {', '.join(every)}")
        return names

    return read


@dataclass
class Run:
    """A run of a benchmark: what it is told, and what it has found so far.

    Attributes:
        args: The command's options.
        described: Of the machine, the versions and the commit; see `environment`.
        options: The values of the benchmark's own options.
        missing: What cannot run, and why.
        kept: What a run that was stopped has found.
        folder: On the disk to measure; of the section alone, and deleted behind it.
        results: Of the report.
        targets: Of the report.
        checksums: Of what was computed.
        failed: What makes the command fail, although there is a report.
    """

    args: argparse.Namespace
    described: Row
    options: Row
    missing: dict[str, str]
    kept: Kept
    folder: Path = Path()
    results: Row = field(default_factory=dict)
    targets: list[Row] = field(default_factory=list)
    checksums: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def smoke(self) -> bool:
        """Whether it is a tiny one."""
        return bool(self.args.smoke)

    def at_least(self, name: str, value: float | None, target: float, note: str = "") -> None:
        """Note a promise that a value is `target` or more; None if it was not measured (`note` says why)."""
        self._promise(name, value, target, None if value is None else value >= target, note)

    def at_most(self, name: str, value: float | None, target: float, note: str = "") -> None:
        """Note a promise that a value is `target` or less."""
        self._promise(name, value, target, None if value is None else value <= target, note)

    def _promise(self, name: str, value: float | None, target: float, met: bool | None, note: str) -> None:
        self.targets.append({"name": name, "value": value, "target": target, "met": met, "note": note})

    def same(self, what: str, digests: Iterable[Any]) -> Any:
        """Return what all digests are.

        Raises:
            SystemExit: They are not all the same.
        """
        found = set(digests)
        if len(found) != 1:
            raise SystemExit(f"{what}: {found}")
        return found.pop()

    def place(self, name: str = "") -> Path:
        """Return a new folder in this one."""
        return Path(tempfile.mkdtemp(prefix=name, dir=self.folder))

    @contextlib.contextmanager
    def brief_place(self) -> Iterator[Path]:
        """Yield a new folder in this one, deleted behind it: for much that nobody needs any more."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            yield Path(folder)


Section = Callable[[Run], Any]


def main(
    question: str | None,
    measure: Section | None = None,
    *,
    sections: Mapping[str, Section] | Sequence[str] = (),
    options: Sequence[Option] = (),
    device: str | None = None,
    path: bool = False,
    picture: Callable[[Path, Row], None] | None = None,
    runs: bool = False,
    needs: Callable[[argparse.Namespace], Mapping[str, Sequence[Need]]] = lambda args: {},
    child: Callable[[Any], Any] | None = None,
) -> None:
    """Run a benchmark from the command line.

    Args:
        question: What it asks: the script's docstring.
        measure: What it does, if that is not by sections.
        sections: What it does, by name; each can be run alone. Names alone, where `measure` does all that are chosen.
        options: Its own: among them how much is done.
        device: Where a model is trained, if one is.
        path: Whether it writes to a disk, so that the user may choose which.
        picture: Draws the results to a file.
        runs: Whether it can go on where a run was stopped.
        needs: What contenders or sections need, by what the command says.
        child: What its processes do; gets the request of `in_process` and returns the answer.
    """
    if child is not None and sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
        return
    parser, names = _parser(question, path, picture is not None, runs), ",".join(sections)
    chooses = Option("sections", names, help="which to run", read=names_among(sections), more={"metavar": "NAMES"})
    every = (*options, *([chooses] if sections else []))
    for option in every:
        option.add(parser)
    args = parser.parse_args()
    for option in every:
        option.settle(args, parser)
    missing = require(args, needs(args))
    described = environment(device=device)
    chosen = {option.name: getattr(args, option.name) for option in options}
    kept = Kept(getattr(args, "runs", None), described["commit"], described.get("compute"), args.smoke, chosen)
    run = Run(args, described, chosen, missing, kept)
    # That all paths lie on one device is why they are throttled.
    logging.getLogger("offload").addFilter(lambda record: "on one device" not in record.getMessage())
    for name in args.sections if measure is None else ("",):
        if name:
            print(f"{name}:")
            progress(name)
        with tempfile.TemporaryDirectory(dir=getattr(args, "path", None)) as folder:
            run.folder = Path(folder)
            if measure is not None:
                measure(run)
            else:
                run.results[name] = sections[name](run)
    if picture is not None and args.picture:
        picture(args.picture, run.results)
    checksum = "-".join(run.checksums) or "none of the chosen sections computes"
    _report(run, checksum)
    if run.failed:
        raise SystemExit(f"failed: {', '.join(run.failed)}")


def _parser(question: str | None, path: bool, picture: bool, runs: bool) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has; see `main`."""
    program = os.environ.get("OFFLOAD_PROG")  # how a command that runs this script is called
    parser = Parser(prog=program, description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, seconds: does it still run?")
    what = "go on without what is not installed to compare with"
    parser.add_argument("--allow-missing", action="store_true", help=what)
    files = {"json": "write the report there"}
    if path:
        what = "directory on the disk to measure (default: the temporary folder)"
        parser.add_argument("--path", type=Path, metavar="DIRECTORY", help=what)
    if picture:
        files["picture"] = "draw the results there"
    if runs:
        files["runs"] = "keep there what each part has found; go on from what is there of the same commit and sizes"
    for name, what in files.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=what)
    return parser


def _report(run: Run, checksum: str) -> None:
    """Print the targets, which mean nothing at smoke size, and write the JSON if it was asked for.

    The checksum is of what was computed, so that nobody makes it faster by computing something else.
    """
    progress("")
    for target in run.targets:
        if target["value"] is None:
            print(f"{target['name']}: not measured ({target['note']})")
        else:
            verdict = "met" if target["met"] else "MISSED"
            print(f"{target['name']}: {target['value']:.3f}, target {target['target']:g}: {verdict}")
    print(f"checksum {checksum}")
    if run.args.json:
        document = {"environment": run.described, "smoke": run.smoke, "results": run.results}
        document |= {"checksum": checksum, "targets": run.targets}
        # Whoever reads it finds the old content or the new one, whenever this process ends.
        draft = run.args.json.with_name(f".{run.args.json.name}.draft")
        draft.write_text(json.dumps(document, indent=2) + "\n")
        draft.replace(run.args.json)


def show(what: str, row: Mapping[str, Any], *names: str) -> None:
    """Print some figures of a row, each with its name, as the unit at that name's end is written."""

    def written(name: str) -> str:
        value = row[name]
        if name.endswith("bytes_per_s"):
            return f"{value / 1e9:.2f} GB/s"
        if name.endswith("_per_s"):
            return f"{value:.3g}"
        if name.endswith("_s"):
            return format_seconds(value)
        if name.endswith("_bytes"):
            return f"{value / 1e6:,.0f} MB"
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    print(f"  {what}: {', '.join(f'{name} {written(name)}' for name in names)}", flush=True)


def in_process(script: str, request: Any, **variables: str) -> Any:
    """Return what a script's `child` answers to a request, in a process of its own.

    Raises:
        SystemExit: It failed; with the end of what it said.
    """
    command = [sys.executable, script, "--child", json.dumps(request)]
    environ = {**os.environ, **variables}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=end_with_parent, env=environ
    )
    if done.returncode:
        raise SystemExit(f"{request} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def spawned(work: Callable[..., None], count: int, *given: Any) -> Iterator[list[Connection]]:
    """Start processes that do `work(pipe, *given)`; yield the other ends of their pipes, and wait for their ends."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=work, args=(theirs, *given)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        yield pipes
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(60)


# Rounds and what is made of them


def turns(contenders: Iterable[Any], rounds: int, settling: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield contenders in turns, another one first in each round, with the number of the round.

    Args:
        contenders: Anything.
        rounds: That count; numbers from 0 on.
        settling: That come before these; numbers below 0.
    """
    every = list(contenders)
    for number in range(-settling, rounds):
        first = number % len(every)
        for each in (*every[first:], *every[:first]):
            yield number, each
        progress(f"round {number + 1}/{rounds}")


def rows_of_rounds(
    contenders: Mapping[Any, Callable[[], object]], rounds: int, settling: int = 1
) -> dict[Any, list[Row]]:
    """Return a row for each contender and round that counts: its "seconds", what it moved on disks, what it returns.

    Args:
        contenders: Each does one round of work, and may return a dict of figures.
        rounds: That count.
        settling: That come before these.
    """
    rows: dict[Any, list[Row]] = {name: [] for name in contenders}
    for number, name in turns(contenders, rounds, settling):
        before, started_s = kernel_io(), time.perf_counter()
        found = contenders[name]()
        row: Row = {"seconds": time.perf_counter() - started_s, **moved(before)}
        if number >= 0:
            rows[name].append(row | (found if isinstance(found, dict) else {}))
    return rows


def interleaved(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return each contender's seconds, round by round, after one round that does not count."""
    rows = rows_of_rounds(contenders, rounds)
    return {name: [row["seconds"] for row in each] for name, each in rows.items()}


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure of some rows."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def column(rows: Iterable[Mapping[str, float]], name: str) -> list[float]:
    """Return one figure of all rows."""
    return [row[name] for row in rows]


def ratio(over: Iterable[float], under: Iterable[float]) -> float:
    """Return the median of the ratios of two series, taken within a round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def beyond_around(ones: Sequence[float], around: Sequence[float]) -> float:
    """Return the median of figures, each less the mean of those before and after it, of which there is one more."""
    triples = zip(ones, around[:-1], around[1:], strict=True)
    return statistics.median(one - (before + after) / 2 for one, before, after in triples)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return what tells the values of some tensors from others."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]
