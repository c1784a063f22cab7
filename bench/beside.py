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

import shutil
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _common import ROOT, progress
from _contest import ContenderError, Talker
from _harness import Option, Run, main, turns

import offload._native

WORK = ("kernel", "step", "step in memory", "iteration", "checkpoint", "overlap")
EARLIER = "2ecbaa5"
MOST = 1.02
WARM_UP = 1
LONGEST_S = 3600.0
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


def compare(products: dict[str, Path], work: str, scale: str, pairs: int, disk: Path) -> dict[str, Any]:
    """Return what both took for a work."""
    program = Path(__file__).with_name("_beside.py")
    seconds: dict[str, list[float]] = {name: [] for name in products}
    with ExitStack() as stack:
        sides = {}
        for name, product in products.items():
            (disk / name).mkdir()
            command = [program, product, work, scale, disk / name]
            sides[name] = Talker(command, disk / f"{name}.log", disk / name)
            stack.callback(sides[name].close)
        try:
            for number, name in turns(sides, pairs, settling=WARM_UP):
                took_s = sides[name].ask({}, LONGEST_S)["seconds"]
                if number >= 0:
                    seconds[name].append(took_s)
            ends = {}
            for name, side in sides.items():
                side.hang_up()
                ends[name] = side.answer(LONGEST_S)
        except ContenderError as error:
            logs = "\n".join(f"{name}: {side.output()}" for name, side in sides.items())
            raise SystemExit(f"{work}: {error}\n{logs}") from None
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


def measure(run: Run) -> None:
    args, results = run.args, run.results
    scale, pairs = ("smoke", 1) if run.smoke else ("whole", args.pairs)
    # At smoke size it stands beside itself, as compiling takes minutes.
    theirs = "this state" if run.smoke else args.commit
    results |= {"earlier": theirs, "pairs": pairs}
    products = {}
    for name in ("earlier", "now"):
        place = run.place(name)
        products[name] = place / "product"
        if name == "now" or run.smoke:
            assemble(ROOT, Path(offload._native.__file__), products[name])
        else:
            progress(f"compiling {args.commit}")
            take(args.commit, place)
    for work in args.work:
        runs: list[dict[str, Any]] = []
        results[work] = runs
        while not runs or (len(runs) < TRIES and not run.smoke and lost(runs)):
            with run.brief_place() as folder:
                runs.append(compare(products, work, scale, pairs, folder))
            low, high = runs[-1]["quartiles"]
            print(
                f"{work}: time {runs[-1]['ratio']:.3f} of {theirs}'s ({low:.3f} to {high:.3f}), peak memory "
                f"{runs[-1]['peak_ratio']:.3f}",
                flush=True,
            )
        for key, title in RATIOS.items():
            run.at_most(f"{work}: {title} over {theirs}'s", min(one[key] for one in runs), MOST)
        run.checksums.append(runs[0]["checksum"])


OPTIONS = (
    Option("commit", EARLIER, help="the earlier state"),
    Option("pairs", 15),
    Option("work", [*WORK], ["kernel", "overlap"], more={"choices": WORK}),
)

if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True)
