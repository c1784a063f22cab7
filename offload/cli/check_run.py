"""`offload check-run`: a few steps of a training beside the same in memory, and beside torch's own optimizer."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from signal import SIG_DFL, SIGHUP, SIGTERM, getsignal, signal
from typing import Any

import msgspec

from offload.cli.progress import Progress
from offload.cli.values import add_output, add_value, parse_count, parse_path, read_values, tell
from offload.config import OffloadConfig, parse_bytes
from offload.errors import ConfigError, OffloadError
from offload.units import format_bytes

SEEN, TENSOR, MADE = "seen", "tensor-{}.pt", "made"
"""Files of a run: what was seen, the tensors that were asked for, and which folders were made on paths."""
STEPS, LEAST_STEPS = 5, 2
"""Steps of a run where `--steps` is not given: so many; and at least so many, if the script takes no more."""
MOST_OBJECTS = 100_000
"""Most objects of a script in which its own tensors are searched for."""
MOST_SHOWN = 8
"""Most of the script's own differing tensors that are compared by element; the rest is only named."""
DRIFT_A_STEP = 2.0**-22
"""How far a master may be from torch's for each step, in parts of its norm, beside its format's `drift` (four
roundings of fp32)."""
REPEATABLE = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables of a run where the user has not set them, read when Python and CUDA's matrix library start."""

ON_CPU: dict[str, Any] = {"gpu_memory": 0, "placement": "cpu", "keep_grads": True}
"""What settings for weights on a GPU mean where there is none."""

KINDS = {"as it is": False, "in memory": True}
"""The two runs that are compared: their names, and `Request.reference`."""

_EPILOG = """\
examples:
  offload check-run train.py --layers 2 --batch 1   five steps of your script, on a model that is cut down
  offload check-run --host-memory 0 train.py        with all state on its paths, as most of a larger model's would be
  offload check-run offload.json                    settings (OffloadConfig's fields, in JSON) under `offload train`

The script runs as it is, and again with state in memory and nothing hidden: gradients and weights of each step, and
state and the script's own tensors (an EMA, a loss) after the last, must have the same bits. Torch's own optimizer,
given the gradients of the second run over fp32 masters, rounds otherwise: a master may be apart by 1/10,000 of how
far it has moved (more where the state's format rounds), and four roundings a step. If anything differs, both run
again, to tell a script that differs from itself.
State lies in folders of its own on the script's paths, checkpoints in a temporary one; all are removed. What else the
script writes it writes each time. Exit status: 0 the same, 1 something differs, 2 bad input.
"""
_MODEL = ["--params", "1M", "--seq", "32", "--batch", "2", "--subgroup-numel", "32k", "--quiet"]
_MODEL_HOST_MEMORY = 3 << 20  # a quarter of its state
_TAIL_CHARACTERS = 4000


class Request(msgspec.Struct):
    """One run: of a script (None: `offload train`) with its arguments.

    Settings and host memory take the place of the script's, if given. `dump`: steps and names of tensors to keep.
    A script that ends after fewer steps, but `least_steps`, runs again for as many as it has taken.
    `on_cpu`: `ON_CPU` takes the place of what the settings say of a GPU, and no CUDA device is seen.
    """

    script: str | None
    arguments: list[str]
    config: Any
    host_memory: int | None
    reference: bool
    steps: int
    least_steps: int
    dump: list[tuple[int, str]] = []
    on_cpu: bool = False


class Seen(msgspec.Struct):
    """What a run showed.

    Attributes:
        steps: How many were taken.
        tensors: In order: step, name, and a digest of the bits.
        own: The same of the script's own tensors, as the last step ends.
        is_whole: Whether these are all that the script has.
        beside: Of each step and parameter: its master's distance from torch's, and the room for that.
        metrics: Of the optimizer, after the last step.
        clips_nothing: Whether, in a rehearsal, torch's `clip_grad_norm_` was called that finds no gradients on a GPU.
        imports_deepspeed: Whether the script had imported DeepSpeed when it ended.
    """

    steps: int = 0
    tensors: list[tuple[int, str, str]] = []
    own: dict[str, str] = {}
    is_whole: bool = True
    beside: list[tuple[int, str, float, float]] = []
    metrics: dict[str, float] = {}
    clips_nothing: bool = False
    imports_deepspeed: bool = False


def add_parser(commands: Any) -> None:
    """Add the subcommand `check-run` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "check-run",
        help="run a few steps of your script beside the same in memory, and torch's; say what differs first",
        description="Run a few steps of a training as it is, and again in memory beside torch's own optimizer; say "
        "which tensor differs first, and by how much.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = f"of each run (default: {STEPS}, or as many as the script takes, {LEAST_STEPS} at least)"
    add_value(parser, "--steps", partial(parse_count, most=10**6), steps)
    memory = "for state, in place of the script's setting (with a file: a quarter of the state)"
    add_value(parser, "--host-memory", parse_bytes, memory)
    cpu = "rehearse settings for a GPU on the CPU: no GPU is seen, and what they say of one is left out"
    parser.add_argument("--on-cpu", action="store_true", help=cpu)
    add_output(parser, "print the outcome as JSON", "no progress; print differences only")
    what = "a Python script, or a .json file of settings"
    add_value(parser, "SCRIPT", parse_path, what, metavar="SCRIPT_OR_CONFIG")
    given = "of the script, or of `offload train`"
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help=given)


def run(arguments: argparse.Namespace) -> int:
    """Run the script as often as it takes, compare, and say what was found.

    Returns:
        The exit status: 0 if all is the same, 1 if something differs.

    Raises:
        ConfigError: There is no such script, the settings cannot be used, or it takes fewer steps.
        OffloadError: The script failed, or has no optimizer of this package.
    """
    script = arguments.script
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("WORLD_SIZE", os.environ["WORLD_SIZE"], "check one process, without a launcher")
    if not os.path.isfile(script):
        raise ConfigError("SCRIPT_OR_CONFIG", script, "there is no such file")
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="offload-check-run-") as folder:
        request = _request_of(arguments, folder)
        with closing(Progress(2, title="check-run", quiet=arguments.quiet, unit="run", log=True)) as progress:
            outcome = _compare(request, Path(folder), progress)
    state = format_bytes(outcome["metrics"].get("state_bytes", 0))
    streamed = format_bytes(outcome["metrics"].get("streamed_bytes", 0))
    ended = " (all that it takes)" if request.steps < (arguments.steps or STEPS) else ""
    about = f"{request.steps} steps of {script}{ended}: {streamed} of {state} of state went through paths in a step"
    if arguments.on_cpu:
        outcome["found"].append(f"on the CPU: {', '.join(ON_CPU)} of the settings were left out")
    text = "\n".join([about, *outcome["found"]])
    if outcome["different"] and arguments.quiet and not arguments.json:
        print(text)  # --quiet prints differences only, and `tell` then nothing
    tell(arguments, {"script": script, "steps": request.steps, **outcome}, text)
    return int(outcome["different"])


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM, and the SIGHUP of a terminal that is closed, end this block as an exception: nothing is left."""

    def end(number: int, _frame: Any) -> None:
        """Handle the signal."""
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # no other sets handlers
    handled = [number for number in (SIGTERM, SIGHUP) if is_main and getsignal(number) is SIG_DFL]
    for number in handled:
        signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal(number, SIG_DFL)


def _request_of(arguments: argparse.Namespace, folder: str) -> Request:
    """Return the run as it is: of the script, or of `offload train` with the settings of a file."""
    request = Request(
        script=arguments.script,
        arguments=arguments.arguments,
        config=None,
        host_memory=arguments.host_memory,
        reference=False,
        steps=arguments.steps or STEPS,
        least_steps=arguments.steps or LEAST_STEPS,
        on_cpu=arguments.on_cpu,
    )
    if arguments.script.endswith(".json"):
        request.config = read_values("SCRIPT_OR_CONFIG", arguments.script)
        overlap = OffloadConfig.from_dict(request.config, "SCRIPT_OR_CONFIG").overlap
        options = ["--steps", str(request.steps), "--overlap", overlap, "--output", f"{folder}/output"]
        request.script = None
        request.arguments = ["train", *_MODEL, *options, *request.arguments]
        if request.host_memory is None:
            request.host_memory = _MODEL_HOST_MEMORY
    return request


def _compare(request: Request, folder: Path, progress: Progress) -> dict[str, Any]:
    """Run what is asked for, twice or four times; return what was found, in words and figures."""
    seen = _run_both(request, folder, progress, first=0, total=2)
    as_it_is, in_memory = seen
    first = _first_difference(as_it_is, in_memory)
    own = _own_differences(as_it_is, in_memory)
    # NaN is too far, too.
    too_far = [(step, name, apart, room) for step, name, apart, room in in_memory.beside if not apart <= room]
    is_apart = first is not None or bool(own) or bool(too_far)
    found = [
        f"as it is and in memory: the same bits in {len(as_it_is.tensors)} gradients, weights and tensors of state"
    ]
    if not own:
        found[0] += f", and {len(as_it_is.own)} tensors of the script's own"
    if not as_it_is.is_whole:
        found.append(f"the script has more tensors: those of the nearest {MOST_OBJECTS:,} objects are compared")
    if is_apart:
        request.dump = [*([first] if first else []), *((request.steps, name) for name in own[:MOST_SHOWN])]
        again = _run_both(request, folder, progress, first=2, total=4)
        difference, further = _difference_lines(folder, first, own, seen, again)
        found[0] = difference or found[0]
        found += further
    share = max((apart / room for _, _, apart, room in in_memory.beside if room), default=None)
    if too_far:
        step, name, apart, room = too_far[0]
        where = f"the master of {name} in step {step}: {apart:.3g} apart, {room:.3g} allowed"
        found.append(f"torch's optimizer DIFFERS, first in {where}")
    elif share is not None:
        found.append(f"torch's optimizer: no master is further apart than {share:.2g} of what is allowed")
    else:
        found.append("torch has no such optimizer to compare with")
    if as_it_is.clips_nothing:
        found.append(
            "torch's clip_grad_norm_ DIFFERS on a GPU: with keep_grads=False gradients have left it by then, and it "
            "clips nothing. Call optimizer.clip_grad_norm_"
        )
    is_different = is_apart or as_it_is.clips_nothing
    return {"different": is_different, "found": found, "share_of_allowed": share, "metrics": as_it_is.metrics}


def _run_both(request: Request, folder: Path, progress: Progress, *, first: int, total: int) -> list[Seen]:
    """Run the script as it is and in memory, in folders numbered from `first` (of `total`); return what was seen."""
    seen = []
    for number, (name, reference) in enumerate(KINDS.items(), first):
        progress.show(number, total, name)
        run_folder = folder / f"{number}"
        run_folder.mkdir()
        seen.append(_run(msgspec.structs.replace(request, reference=reference), run_folder, name))
        request.steps = seen[-1].steps
        shutil.rmtree(folder / "output", ignore_errors=True)  # of `offload train`, which wants a new folder
    return seen


def _difference_lines(
    folder: Path, first: tuple[int, str] | None, own: list[str], seen: list[Seen], again: list[Seen]
) -> tuple[str | None, list[str]]:
    """Return the line about `first` (step and name of the first tensor that differs), if any, and further lines.

    `own` names the script's own tensors that differ. `seen` and `again` have two runs of each kind; what differs
    between these two says nothing of offloading. `folder` has the folders of the runs, with tensors.
    """
    pairs = {kind: (once, twice) for kind, once, twice in zip(KINDS, seen, again, strict=True)}
    unlike = {kind: _first_difference(once, twice) for kind, (once, twice) in pairs.items()}
    changing = {name for name in own for once, twice in pairs.values() if once.own.get(name) != twice.own.get(name)}
    difference = None
    if first is not None:
        apart = "" if any(unlike.values()) else _distance(folder, 0)
        difference = f"as it is and in memory DIFFER, first in {first[1]} in step {first[0]}{apart}"
    lines = []
    numbers_before = 0 if first is None else 1  # of `Request.dump`, in which `first` comes first
    for number, name in enumerate(own[:MOST_SHOWN], numbers_before):
        apart = ", and so it does between two runs of one kind" if name in changing else _distance(folder, number)
        lines.append(f"the script's {name} DIFFERS at the end{apart}")
    if own[MOST_SHOWN:]:
        lines.append(f"and so do {', '.join(own[MOST_SHOWN:])}")
    if changing:
        lines.append("what differs between two runs of one kind (no seed? a time?) says nothing of offloading")
    elif own and first is None:
        lines.append("a weight that is read between step() and its module's next use needs optimizer.finish() first")
    for kind, tensor in unlike.items():
        if tensor is not None:
            why = "the script is not deterministic (seeds? the order of data?), so this says nothing of offloading"
            lines.append(f"two runs {kind} differ, first in {tensor[1]} in step {tensor[0]}: {why}")
    return difference, lines


def _run(request: Request, folder: Path, name: str) -> Seen:
    """Run a script in a process of its own; remove the folders that it has made on paths; return what was seen."""
    (folder / "request").write_bytes(msgspec.msgpack.encode(request))
    environment = {**REPEATABLE, **os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if request.on_cpu else {})}
    command = [sys.executable, "-m", "offload.cli.checked", str(folder / "request")]
    try:
        with (folder / "printed").open("wb") as printed:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=environment, check=False
            )
    finally:
        for made in (folder / MADE).read_text().splitlines() if (folder / MADE).exists() else ():
            shutil.rmtree(made, ignore_errors=True)
    seen = Seen()
    if (folder / SEEN).exists():
        seen = msgspec.msgpack.decode((folder / SEEN).read_bytes(), type=Seen)
    hint = "; DeepSpeed's trainings, which it imports, cannot be checked" if seen.imports_deepspeed else ""
    if done.returncode:
        print((folder / "printed").read_text(errors="replace")[-_TAIL_CHARACTERS:], end="", file=sys.stderr)
        failed = f"run {name}, it failed after {seen.steps} steps (status {done.returncode}): see above{hint}"
        raise OffloadError(failed)
    if not seen.steps:
        raise OffloadError(f"run {name}, it ended, and no optimizer of this package had taken a step{hint}")
    if request.least_steps <= seen.steps < request.steps:  # the tensors of its last step were not recorded
        return _run(msgspec.structs.replace(request, steps=seen.steps), folder, name)
    if seen.steps < request.steps:
        raise ConfigError("--steps", request.steps, f"the script ended after {seen.steps}: give no more")
    return seen


def _first_difference(left: Seen, right: Seen) -> tuple[int, str] | None:
    """Return step and name of the first tensor with other bits; None if none has.

    Left out is what one run alone has: a gradient that the other has let go of.
    """
    theirs = {(step, name): digest for step, name, digest in right.tensors}
    for step, name, digest in left.tensors:
        if theirs.get((step, name), digest) != digest:
            return step, name
    return None


def _own_differences(left: Seen, right: Seen) -> list[str]:
    """Return the names of the script's own tensors that both runs have, but with other bits."""
    return [name for name, digest in left.own.items() if right.own.get(name, digest) != digest]


def _distance(folder: Path, number: int) -> str:
    """Return in words how far a tensor, by its number in `Request.dump`, is apart in the two runs that kept it."""
    import torch

    second_runs = ("2", "3")  # folders of `_run_both`: as it is, and in memory
    ours, theirs = (torch.load(folder / run / TENSOR.format(number), weights_only=True) for run in second_runs)
    if ours.shape != theirs.shape:
        return f": it is {' by '.join(map(str, ours.shape))}, and in memory {' by '.join(map(str, theirs.shape))}"
    ours, theirs = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (ours, theirs))
    ours, theirs = (tensor.double().reshape(-1) for tensor in (ours, theirs))
    different = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    first = int(different.int().argmax())
    apart = float((ours - theirs).abs().nan_to_num(torch.inf).masked_fill(~different, 0.0).max())
    return (
        f": {int(different.sum()):,} of {len(ours):,} elements, by up to {apart:.3g} (the largest is "
        f"{float(theirs.abs().max()):.3g}); element {first} is {float(ours[first])!r}, and in memory "
        f"{float(theirs[first])!r}"
    )
