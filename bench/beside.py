"""This state of the product beside an earlier one: is anything slower, or larger, than it was?

An earlier commit is taken out of the repository and compiled; then both do the same work (`_beside.py`), each in a
process of its own, in turns, and what counts is the median over the pairs of turns of the new one's seconds over the
earlier one's, and the new one's peak memory over the other's:

    kernel          the update in memory
    step            a step with nothing resident
    step in memory  a step with everything resident
    iteration       forward, backward and step, half resident
    checkpoint      the same with a checkpoint after each
    overlap         an iteration with nothing resident, its step hidden in backward and in the next forward

Both have to give the same weights, bit for bit. Turns of the same thing differ by some percent: what is beyond the
aim is done again, and the lesser ratio counts, as a loss that does not repeat is none.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import ROOT, Target, arguments, end_with_parent, environment, progress, report
from _contest import PATIENT

import offload._native

WORK = ("kernel", "step", "step in memory", "iteration", "checkpoint", "overlap")
EARLIER = "2ecbaa5"
MOST = 1.02
WARM_UP = 1
TRIES = 2
RATIOS = {"ratio": "time", "peak_ratio": "peak memory"}


def commanded(*command: str | Path) -> None:
    """Run a command; end with what it said if it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout)[-2000:]}")


def take(commit: str, folder: Path) -> None:
    """Write the package of a commit to a folder, compiled."""
    source, build = folder / "source", folder / "build"
    source.mkdir()
    commanded("git", "-C", ROOT, "archive", "--output", folder / "source.tar", commit)
    commanded("tar", "-xf", folder / "source.tar", "-C", source)
    cmake = Path(sys.executable).with_name("cmake")
    done = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
    )
    commanded(
        cmake, "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", f"-Dnanobind_DIR={done.stdout.strip()}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )  # fmt: skip
    commanded(cmake, "--build", build, "--parallel")
    (native,) = build.glob("_native*.so")
    assemble(source, native, folder / "product")


def assemble(source: Path, native: Path, product: Path) -> None:
    """Lay out a package as an installed one."""
    shutil.copytree(source / "offload", product / "offload", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(source / "integrations", product / "offload" / "integrations")
    shutil.copy(native, product / "offload")


class Side:
    """One of both, at one work.

    Args:
        product: Its package.
        work: What it does.
        scale: "smoke" or "whole".
        disk: A folder of its own.
    """

    def __init__(self, product: Path, work: str, scale: str, disk: Path) -> None:
        self.log = disk.with_suffix(".log")
        disk.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_beside.py")), str(product), work, scale, str(disk)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env={**os.environ, **PATIENT},
            cwd=disk,
            preexec_fn=end_with_parent,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{shlex.join(map(str, self.process.args))} failed:\n{self.log.read_text()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def turn(self) -> float:
        """Return the seconds of a turn."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return float(self.answer()["seconds"])

    def end(self) -> dict[str, Any]:
        """Return its peak memory, and a digest of what it computed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        found = self.answer()
        self.process.wait()
        return found


def compare(products: dict[str, Path], work: str, scale: str, pairs: int, disk: Path) -> dict[str, Any]:
    """Return what both took for a work."""
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        sides = {name: Side(product, work, scale, Path(folder, name)) for name, product in products.items()}
        try:
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(WARM_UP + pairs):
                for name in sorted(sides, reverse=bool(number % 2)):
                    took_s = sides[name].turn()
                    if number >= WARM_UP:
                        seconds[name].append(took_s)
                progress(f"{work}: pair {number + 1 - WARM_UP} of {pairs}")
            ends = {name: side.end() for name, side in sides.items()}
        finally:
            for side in sides.values():
                side.process.kill()
                side.process.wait()
    if len({end["checksum"] for end in ends.values()}) != 1:
        raise SystemExit(f"{work}: the weights differ: {ends}")
    ratios = sorted(now / earlier for now, earlier in zip(seconds["now"], seconds["earlier"], strict=True))
    return {
        "seconds": seconds,
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "peak_bytes": {name: end["peak_bytes"] for name, end in ends.items()},
        "peak_ratio": ends["now"]["peak_bytes"] / ends["earlier"]["peak_bytes"],
        "checksum": ends["now"]["checksum"],
    }


def lost(runs: list[dict[str, Any]]) -> bool:
    """Return whether something was beyond the aim in each run."""
    return any(all(run[key] > MOST for run in runs) for key in RATIOS)


def main() -> None:
    parser = arguments(__doc__, path=True)
    parser.add_argument("--commit", default=EARLIER, help=f"the earlier state (default: {EARLIER})")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--work", nargs="*", choices=WORK)
    args = parser.parse_args()
    described = environment()
    scale, pairs = ("smoke", 1) if args.smoke else ("whole", args.pairs)
    works = args.work or (["kernel", "overlap"] if args.smoke else WORK)
    # At smoke size it stands beside itself, as compiling takes minutes.
    theirs = "this state" if args.smoke else args.commit
    results: dict[str, Any] = {"earlier": theirs, "pairs": pairs}
    targets = []
    with tempfile.TemporaryDirectory() as folder:
        products = {}
        for name in ("earlier", "now"):
            place = Path(folder, name)
            place.mkdir()
            products[name] = place / "product"
            if name == "now" or args.smoke:
                assemble(ROOT, Path(offload._native.__file__), products[name])
            else:
                progress(f"compiling {args.commit}")
                take(args.commit, place)
        for work in works:
            runs: list[dict[str, Any]] = []
            results[work] = runs
            while not runs or (len(runs) < TRIES and not args.smoke and lost(runs)):
                runs.append(compare(products, work, scale, pairs, Path(args.path or folder)))
                low, high = runs[-1]["quartiles"]
                print(
                    f"{work}: time {runs[-1]['ratio']:.3f} of {theirs}'s ({low:.3f} to {high:.3f}), peak memory "
                    f"{runs[-1]['peak_ratio']:.3f}",
                    flush=True,
                )
            targets += [
                Target.at_most(f"{work}: {title} over {theirs}'s", min(run[key] for run in runs), MOST)
                for key, title in RATIOS.items()
            ]
    report(args, described, results, " ".join(results[work][0]["checksum"] for work in works), targets)


if __name__ == "__main__":
    main()
