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
"""Names of a run's files: `Seen`, the tensors of `Request.dump` by number, and the folders it has made on paths."""
STEPS, LEAST_STEPS = 5, 2
"""Steps of a run without `--steps`, and the fewest that a script has to take if it ends before."""
MOST_OBJECTS = 100_000
"""Most objects of a script in which its own tensors are searched for."""
MOST_SHOWN = 8
"""Most of the script's own differing tensors that are compared by element; the rest is only named."""
DRIFT_A_STEP = 2.0**-22
"""Distance from torch's master that a step may add, as a part of the master's norm: four roundings of fp32, each
2**-24. What the state's format may add (`StateFormat.drift`) comes on top."""
REPEATABLE = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment variables of a run, unless the user has set them. They have to be there when Python and CUDA's matrix
library start: without them two runs of one script may differ."""

ON_CPU: dict[str, Any] = {"gpu_memory": 0, "placement": "cpu", "keep_grads": True}
"""Settings of a rehearsal (`--on-cpu`), in place of those that need weights on a GPU."""

KINDS = {"as it is": False, "in memory": True}
"""The two runs that are compared: their names for people, and their `Request.reference`."""

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
"""Options of `offload train`, which runs where a file of settings is given instead of a script."""
_MODEL_HOST_MEMORY = 3 << 20  # about a quarter of that model's state
_TAIL_CHARACTERS = 4000
"""Last characters of a failed script's output that are shown."""


class Request(msgspec.Struct):
    """What the process of one run is to do.

    Attributes:
        script: File of the script; None for `offload train`.
        arguments: Of the script, or of the `offload` command.
        config: Settings in place of the script's own, as `OffloadConfig` takes them; None to leave those.
        host_memory: Bytes of host memory in place of the setting's; None to leave that.
        reference: Whether all state is in memory and no step hidden, as in the run to compare with.
        steps: Steps after which the run ends.
        least_steps: Fewest steps. A script that ends after these, before `steps`, runs again with fewer `steps`.
        dump: Step and name of tensors to write to files, in the order of the files' numbers.
        on_cpu: Whether `ON_CPU` takes the place of what the settings say of a GPU, and no CUDA device is seen.
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
    """What was recorded of a run.

    Attributes:
        steps: Number of steps that were taken.
        tensors: For each weight, gradient and tensor of state, in the order in which they were recorded: step, name,
            and a digest of its bits.
        own: Digests of the script's own tensors when the last step ends, by name.
        is_whole: Whether `own` has all tensors of the script; else the search for them has reached its limit.
        beside: Step, name of a parameter, distance of its master from that of torch's optimizer, and the greatest
            distance that is allowed.
        metrics: Metrics of the optimizer after the last step.
        clips_nothing: Whether a rehearsal has called torch's `clip_grad_norm_` where gradients would have left a GPU
            by then, so that it would clip nothing there.
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
    """Run the script twice, or four times if something differs; compare the runs, and say what was found.

    Returns:
        The exit status: 0 if all is the same, 1 if something differs.

    Raises:
        ConfigError: There is no such script, it ends after too few steps, or the settings cannot be used.
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
    # `_compare` has lowered `request.steps` if the script takes fewer.
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
    """Let SIGTERM, and SIGHUP of a closed terminal, raise `SystemExit` in this block, so that it removes its folders.

    By default these signals would end the process at once. A signal that somebody else handles is left alone.
    """

    def end(number: int, _frame: Any) -> None:
        """Handle the signal."""
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # Python lets no other thread set handlers
    handled = [number for number in (SIGTERM, SIGHUP) if is_main and getsignal(number) is SIG_DFL]
    for number in handled:
        signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal(number, SIG_DFL)


def _request_of(arguments: argparse.Namespace, folder: str) -> Request:
    """Return the request for the run "as it is": of the script, or of `offload train` with a file's settings."""
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
        # `overlap` is given as an option, too: by it `offload train` hooks its model to hide steps in forward.
        overlap = OffloadConfig.from_dict(request.config, "SCRIPT_OR_CONFIG").overlap
        options = ["--steps", str(request.steps), "--overlap", overlap, "--output", f"{folder}/output"]
        request.script = None
        # The user's own arguments come last, as the last one of several takes effect.
        request.arguments = ["train", *_MODEL, *options, *request.arguments]
        if request.host_memory is None:
            request.host_memory = _MODEL_HOST_MEMORY
    return request


def _compare(request: Request, folder: Path, progress: Progress) -> dict[str, Any]:
    """Run the script as it is and in memory, and compare the runs; `folder` gets a folder for each.

    If a tensor differs, or a master is too far from torch's, both run again. The second runs write the first tensor
    that differs, and those of the script's own, to files, which are compared element by element. They also show
    whether a script differs from itself: whether two runs of one kind differ.

    `request` changes: its `steps` become those that the script has taken, which may be fewer, and `dump` what the
    second runs write.

    Returns:
        "different", whether anything differs; "found", lines of text; "share_of_allowed", the greatest distance of a
        master from torch's as a share of what is allowed, None without any; "metrics" of the run as it is.
    """
    first_runs = _run_both(request, folder, progress, first=0, total=2)
    as_it_is, in_memory = first_runs
    first = _first_difference(as_it_is, in_memory)  # step and name of the first tensor that differs
    own_names = _own_differences(as_it_is, in_memory)  # the script's own tensors that differ
    # Not `apart > room`, which is false of NaN: that is too far, too.
    too_far = [(step, name, apart, room) for step, name, apart, room in in_memory.beside if not apart <= room]
    is_apart = first is not None or bool(own_names) or bool(too_far)
    findings = [
        f"as it is and in memory: the same bits in {len(as_it_is.tensors)} gradients, weights and tensors of state"
    ]
    if not own_names:
        findings[0] += f", and {len(as_it_is.own)} tensors of the script's own"
    if not as_it_is.is_whole:
        findings.append(f"the script has more tensors: those of the nearest {MOST_OBJECTS:,} objects are compared")
    if is_apart:
        request.dump = [*([first] if first else []), *((request.steps, name) for name in own_names[:MOST_SHOWN])]
        second_runs = _run_both(request, folder, progress, first=2, total=4)
        difference, further = _difference_lines(folder, first, own_names, first_runs, second_runs)
        findings[0] = difference or findings[0]
        findings += further
    share = max((apart / room for _, _, apart, room in in_memory.beside if room), default=None)
    if too_far:
        step, name, apart, room = too_far[0]
        where = f"the master of {name} in step {step}: {apart:.3g} apart, {room:.3g} allowed"
        findings.append(f"torch's optimizer DIFFERS, first in {where}")
    elif share is not None:
        findings.append(f"torch's optimizer: no master is further apart than {share:.2g} of what is allowed")
    else:
        findings.append("torch has no such optimizer to compare with")
    if as_it_is.clips_nothing:
        findings.append(
            "torch's clip_grad_norm_ DIFFERS on a GPU: with keep_grads=False gradients have left it by then, and it "
            "clips nothing. Call optimizer.clip_grad_norm_"
        )
    is_different = is_apart or as_it_is.clips_nothing
    return {"different": is_different, "found": findings, "share_of_allowed": share, "metrics": as_it_is.metrics}


def _run_both(request: Request, folder: Path, progress: Progress, *, first: int, total: int) -> list[Seen]:
    """Run the script as it is, then in memory; return what was recorded of both.

    Args:
        request: The run as it is. Afterwards its `steps` are those that the script has taken, which may be fewer.
        folder: Gets a folder for each run, named by the run's number.
        first: Number of the first of the two runs.
        total: Number of all runs, for `progress`.
    """
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
    """Say what differs between a run as it is and one in memory.

    Each of the two was run twice: what differs between two runs of one kind says nothing of offloading.

    Args:
        folder: Has the folders of the runs; those of the second runs have the tensors of `Request.dump`.
        first: Step and name of the first tensor that differs; None if only others do.
        own: Names of the script's own tensors that differ.
        seen: The first runs: as it is, and in memory.
        again: The second runs, likewise.

    Returns:
        The line about `first`, None without one; and further lines.
    """
    pairs = {kind: (once, twice) for kind, once, twice in zip(KINDS, seen, again, strict=True)}
    # By kind, the first tensor that differs between its two runs; by name, the script's own tensors that do.
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
    elif own and first is None:  # only tensors that the script itself computes differ: the likely reason
        lines.append("a weight that is read between step() and its module's next use needs optimizer.finish() first")
    for kind, tensor in unlike.items():
        if tensor is not None:
            why = "the script is not deterministic (seeds? the order of data?), so this says nothing of offloading"
            lines.append(f"two runs {kind} differ, first in {tensor[1]} in step {tensor[0]}: {why}")
    return difference, lines


def _run(request: Request, folder: Path, name: str) -> Seen:
    """Run the script in a process of its own, and return what that has recorded (`offload.cli.checked`).

    Folders that it has made on paths are removed. A script that ends by itself too early for its last tensors to be
    recorded runs once more, for as many steps as it has taken.

    Args:
        folder: A folder for the run's files.
        name: What errors call the run: one of `KINDS`.
    """
    (folder / "request").write_bytes(msgspec.msgpack.encode(request))
    environment = {**REPEATABLE, **os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if request.on_cpu else {})}
    command = [sys.executable, "-m", "offload.cli.checked", str(folder / "request")]
    try:
        with (folder / "printed").open("wb") as printed:
            process = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=environment, check=False
            )
    finally:
        for path_folder in (folder / MADE).read_text().splitlines() if (folder / MADE).exists() else ():
            shutil.rmtree(path_folder, ignore_errors=True)
    seen = Seen()
    if (folder / SEEN).exists():
        seen = msgspec.msgpack.decode((folder / SEEN).read_bytes(), type=Seen)
    hint = "; DeepSpeed's trainings, which it imports, cannot be checked" if seen.imports_deepspeed else ""
    if process.returncode:
        print((folder / "printed").read_text(errors="replace")[-_TAIL_CHARACTERS:], end="", file=sys.stderr)
        failed = f"run {name}, it failed after {seen.steps} steps (status {process.returncode}): see above{hint}"
        raise OffloadError(failed)
    if not seen.steps:
        raise OffloadError(f"run {name}, it ended, and no optimizer of this package had taken a step{hint}")
    if request.least_steps <= seen.steps < request.steps:  # the tensors of its last step were not recorded
        return _run(msgspec.structs.replace(request, steps=seen.steps), folder, name)
    if seen.steps < request.steps:
        raise ConfigError("--steps", request.steps, f"the script ended after {seen.steps}: give no more")
    return seen


def _first_difference(left: Seen, right: Seen) -> tuple[int, str] | None:
    """Return step and name of the first tensor whose bits differ between two runs; None if there is none.

    A tensor that only one run has is passed over, such as a gradient that the other run has freed before it was read.
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
    """Return in words how a tensor differs between the second runs as it is and in memory, which wrote it to files.

    `folder` has the folders of the runs; `number` is the tensor's in `Request.dump`.
    """
    import torch

    second_runs = ("2", "3")  # folders of `_run_both`: as it is, and in memory
    ours, theirs = (torch.load(folder / run / TENSOR.format(number), weights_only=True) for run in second_runs)
    if ours.shape != theirs.shape:
        return f": it is {' by '.join(map(str, ours.shape))}, and in memory {' by '.join(map(str, theirs.shape))}"
    ours, theirs = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (ours, theirs))
    ours, theirs = (tensor.double().reshape(-1) for tensor in (ours, theirs))
    different = (ours != theirs) & ~(ours.isnan() & theirs.isnan())  # NaN in both is no difference
    first = int(different.int().argmax())  # the first element that is true
    # A difference that is NaN, as with NaN in one tensor alone, counts as infinite.
    apart = float((ours - theirs).abs().nan_to_num(torch.inf).masked_fill(~different, 0.0).max())
    return (
        f": {int(different.sum()):,} of {len(ours):,} elements, by up to {apart:.3g} (the largest is "
        f"{float(theirs.abs().max()):.3g}); element {first} is {float(ours[first])!r}, and in memory "
        f"{float(theirs[first])!r}"
    )
