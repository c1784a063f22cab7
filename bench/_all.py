"""Runs every benchmark at full size, one after another, and keeps their reports: `make bench-all`.

What there is to run is the table of docs/benchmarks.md (`docs/figures.py`), as far as it has reports. A report goes
to `bench/reports/DATE-NAME.json` where its benchmark ends well, with its picture. Benchmarks that have a report of
this state of the product are skipped, so that a run that was stopped goes on where it was: the state is the last
commit that changed the product's code (`PRODUCT`), whatever has changed in reports, pages or benchmarks since.
Outputs, and what long benchmarks have found so far, are in `build/bench-all/COMMIT/`. A benchmark that fails does not
end the run; all that failed are named in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import ROOT, end_with_parent

sys.path.insert(0, str(ROOT / "docs"))

import figures

PRODUCT = ("offload", "csrc", "integrations", "tests/world/device.py")
"""All that a figure can depend on; the last is the device of simulated nodes."""
HAS_MANY = ("quality", "capacity")
"""What takes up to an hour each on a slow machine, and so comes last."""


@dataclass(frozen=True)
class Benchmark:
    """One row of the table.

    Attributes:
        name: Of its report.
        script: Below the repository's root.
        options: What the table gives it.
        minutes: How long it takes, as the table says.
    """

    name: str
    script: str
    options: tuple[str, ...]
    minutes: str


def benchmarks() -> list[Benchmark]:
    """Return what has a report, in the order of the table, what takes longest last."""
    found = []
    for command, _, minutes, kinds in figures.BENCHMARKS:
        told = re.search(r"((?:bench|tests)/\S+\.py)([^`]*)`", command)
        if told and kinds:
            found.append(Benchmark(kinds[0], told[1], tuple(shlex.split(told[2])), minutes))
    return sorted(found, key=lambda each: each.name in HAS_MANY)


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return what git says; nothing where it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def state(commit: str = "HEAD", root: Path = ROOT) -> str:
    """Return the last commit before and with this one that changed the product's code; "" if there is none."""
    return git("log", "-1", "--format=%H", commit, "--", *PRODUCT, root=root)


def is_of(report: Path, wanted: str, root: Path = ROOT) -> bool:
    """Return whether a report is a full one of a state of the product's code."""
    try:
        document = json.loads(report.read_text())
    except ValueError:
        return False
    measured = document.get("environment") or {}
    whole = not document.get("smoke") and not measured.get("uncommitted_changes")
    return bool(whole and measured.get("commit") and state(measured["commit"], root) == wanted)


def options_of(script: str) -> str:
    """Return what a benchmark says of its options."""
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout


def run(benchmark: Benchmark, kept: Path, given: argparse.Namespace) -> str:
    """Run a benchmark; keep its report if it ends well, and return why not if it does not."""
    drafts = kept / benchmark.name
    shutil.rmtree(drafts, ignore_errors=True)
    drafts.mkdir(parents=True)
    name = f"{time.strftime('%Y-%m-%d', time.gmtime())}-{benchmark.name}"
    known = options_of(benchmark.script)
    command = [sys.executable, benchmark.script, *benchmark.options, "--json", str(drafts / f"{name}.json")]
    offered: dict[str, Callable[[], str | None]] = {
        "--picture": lambda: str(drafts / f"{name}.png"),
        "--runs": lambda: str(kept / f"{benchmark.name}.runs"),
        "--path": lambda: given.path,
        "--allow-missing": lambda: "" if given.allow_missing else None,
    }
    for option, value in offered.items():
        if re.search(rf"(^|\s|\[){option}\b", known) and (found := value()) is not None:
            command += [option, *([found] if found else [])]
    log = kept / f"{benchmark.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
        )
        try:
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    if code or not (drafts / f"{name}.json").exists():
        last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        return f"exit status {code}, {shown(log)} ends with:\n{last}"
    for file in sorted(drafts.iterdir(), key=lambda file: file.suffix == ".json"):  # the report when all is there
        shutil.move(file, figures.REPORTS / file.name)
    return ""


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {each.name: each for each in benchmarks()}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to run (default: all): {', '.join(known)}")
    parser.add_argument("--path", help="directory on the disk to measure (default: the temporary folder)")
    parser.add_argument("--allow-missing", action="store_true", help="go on without what is not installed")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in known]
    if unknown:
        parser.error(f"{unknown[0]!r} is no report; there are {', '.join(known)}")
    if args.path is not None and not os.path.isdir(args.path):
        parser.error(f"--path {args.path!r} is no directory")
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/reports"):
        print(
            "there are changes that are not committed: reports would name a commit that they are not of", flush=True
        )
        return 1
    wanted = state()
    figures.REPORTS.mkdir(parents=True, exist_ok=True)
    kept = ROOT / "build" / "bench-all" / (wanted[:12] or "unknown")
    kept.mkdir(parents=True, exist_ok=True)
    chosen = [known[name] for name in args.names] or list(known.values())
    failed: dict[str, str] = {}
    for number, benchmark in enumerate(chosen, 1):
        said = f"[{number}/{len(chosen)}] {benchmark.name}"
        there = [file for file in figures.REPORTS.glob(f"????-??-??-{benchmark.name}.json") if is_of(file, wanted)]
        if there:
            print(f"{said}: {shown(there[-1])} is of this state, skipped", flush=True)
            continue
        takes, busy = benchmark.minutes or "no time known", f"load {os.getloadavg()[0]:.1f}"
        print(f"{said}: {takes}, {busy}, output in {shown(kept)}/{benchmark.name}.log", flush=True)
        started_s = time.monotonic()
        why = run(benchmark, kept, args)
        took = f"{(time.monotonic() - started_s) / 60:.1f} min"
        print(f"{said}: {'FAILED' if why else 'done'} after {took}{why and f': {why}'}", flush=True)
        if why:
            failed[benchmark.name] = why.splitlines()[0]
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    print("`make docs` takes the figures into the pages; the same command tries again what failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from here")
