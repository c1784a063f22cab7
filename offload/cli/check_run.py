"""`offload check-run`: a few steps of a training beside the same in memory, and beside torch's own optimizer."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from offload.cli.progress import Progress
from offload.cli.values import add_output, add_value, parse_count, parse_path, read_values, tell
from offload.config import OffloadConfig, parse_bytes
from offload.errors import ConfigError, OffloadError
from offload.units import format_bytes

SEEN, TENSOR, MADE = "seen", "tensor-{}.pt", "made"
"""Files of a run: what was seen, the tensors that were asked for, and which folders were made on paths."""
MOST_OBJECTS = 100_000
"""So many objects of a script's are looked at for its own tensors."""
MOST_SHOWN = 8
"""So many of the script's own tensors that differ are compared by element; the rest is named."""
DRIFT_A_STEP = 2.0**-22
"""And how far for each step, as a part of its norm, beside its format's `drift`: four roundings of fp32."""
REPEATABLE = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables of a run where the user has not set them, read when Python and CUDA's matrix library start."""

ON_CPU: dict[str, Any] = {"gpu_memory": 0, "placement": "cpu", "keep_grads": True}
"""What settings for weights on a GPU mean where there is none."""

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
    `on_cpu`: `ON_CPU` takes the place of what the settings say of a GPU, and no CUDA device is seen.
    """

    script: str | None
    arguments: list[str]
    config: Any
    host_memory: int | None
    reference: bool
    steps: int
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
    """

    steps: int = 0
    tensors: list[tuple[int, str, str]] = []
    own: dict[str, str] = {}
    is_whole: bool = True
    beside: list[tuple[int, str, float, float]] = []
    metrics: dict[str, float] = {}


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
    add_value(parser, "--steps", partial(parse_count, most=10**6), "of each run (default: %(default)s)", default=5)
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
    script, steps = arguments.script, arguments.steps
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("WORLD_SIZE", os.environ["WORLD_SIZE"], "check one process, without a launcher")
    if not os.path.isfile(script):
        raise ConfigError("SCRIPT_OR_CONFIG", script, "there is no such file")
    with tempfile.TemporaryDirectory(prefix="offload-check-run-") as folder:
        memory, on_cpu = arguments.host_memory, arguments.on_cpu
        request = Request(script, arguments.arguments, None, memory, False, steps, on_cpu=on_cpu)
        if script.endswith(".json"):
            request.config = read_values("SCRIPT_OR_CONFIG", script)
            overlap = OffloadConfig.from_dict(request.config, "SCRIPT_OR_CONFIG").overlap
            output = ["--steps", str(steps), "--overlap", overlap, "--output", f"{folder}/output"]
            request.script, request.arguments = None, ["train", *_MODEL, *output, *request.arguments]
            if request.host_memory is None:
                request.host_memory = _MODEL_HOST_MEMORY
        with closing(Progress(2, title="check-run", quiet=arguments.quiet, unit="run", log=True)) as progress:
            outcome = _compare(request, Path(folder), progress)
    state, streamed = (format_bytes(outcome["metrics"].get(f"{kind}_bytes", 0)) for kind in ("state", "streamed"))
    about = f"{steps} steps of {script}: {streamed} of {state} of state went through paths in a step"
    if on_cpu:
        outcome["found"].append(f"on the CPU: {', '.join(ON_CPU)} of the settings were left out")
    text = "\n".join([about, *outcome["found"]])
    if outcome["different"] and arguments.quiet and not arguments.json:
        print(text)
    tell(arguments, {"script": script, "steps": steps, **outcome}, text)
    return int(outcome["different"])


def _compare(request: Request, folder: Path, progress: Progress) -> dict[str, Any]:
    """Run what is asked for, twice or four times; return what was found, in words and figures."""
    kinds = {"as it is": False, "in memory": True}

    def both(first: int, total: int) -> list[Seen]:
        seen = []
        for number, (name, reference) in enumerate(kinds.items(), first):
            progress.show(number, total, name)
            own = folder / f"{number}"
            own.mkdir()
            seen.append(_run(msgspec.structs.replace(request, reference=reference), own, name))
            shutil.rmtree(folder / "output", ignore_errors=True)
        return seen

    seen = both(0, 2)
    first, own = _first_difference(*seen), _own_differences(*seen)
    beyond = next((row for row in seen[1].beside if not row[2] <= row[3]), None)
    same = f"{len(seen[0].tensors)} gradients, weights and tensors of state"
    found = [f"as it is and in memory: the same bits in {same}"]
    if not own:
        found[0] += f", and {len(seen[0].own)} tensors of the script's own"
    if not seen[0].is_whole:
        found.append(f"the script has more tensors: those of the nearest {MOST_OBJECTS:,} objects are compared")
    if first is not None or own or beyond is not None:
        request.dump = [*([first] if first else []), *((request.steps, name) for name in own[:MOST_SHOWN])]
        again = both(2, 4)
        unlike = {name: _first_difference(*pair) for name, *pair in zip(kinds, seen, again, strict=True)}
        changing = {
            n for n in own for pair in zip(seen, again, strict=True) if len({one.own.get(n) for one in pair}) > 1
        }
        if first is not None:
            apart = "" if any(unlike.values()) else _distance(folder, 0)
            found[0] = f"as it is and in memory DIFFER, first in {first[1]} in step {first[0]}{apart}"
        for number, name in enumerate(own[:MOST_SHOWN], first is not None):
            apart = ", and so it does between two runs of one kind" if name in changing else _distance(folder, number)
            found.append(f"the script's {name} DIFFERS at the end{apart}")
        if own[MOST_SHOWN:]:
            found.append(f"and so do {', '.join(own[MOST_SHOWN:])}")
        if changing:
            found.append("what differs between two runs of one kind (no seed? a time?) says nothing of offloading")
        elif own and first is None:
            found.append(
                "a weight that is read between step() and its module's next use needs optimizer.finish() first"
            )
        for name, tensor in unlike.items():
            if tensor is not None:
                why = (
                    "the script is not deterministic (seeds? the order of data?), so this says nothing of offloading"
                )
                found.append(f"two runs {name} differ, first in {tensor[1]} in step {tensor[0]}: {why}")
    share = max((apart / room for _, _, apart, room in seen[1].beside if room), default=None)
    if beyond is not None:
        where = "the master of {1} in step {0}: {2:.3g} apart, {3:.3g} allowed".format(*beyond)
        found.append(f"torch's optimizer DIFFERS, first in {where}")
    elif share is not None:
        found.append(f"torch's optimizer: no master is further apart than {share:.2g} of what is allowed")
    else:
        found.append("torch has no such optimizer to compare with")
    different = first is not None or bool(own) or beyond is not None
    return {"different": different, "found": found, "share_of_allowed": share, "metrics": seen[0].metrics}


def _run(request: Request, folder: Path, name: str) -> Seen:
    """Run a script in a process of its own; return what was seen."""
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
    if done.returncode:
        print((folder / "printed").read_text(errors="replace")[-_TAIL_CHARACTERS:], end="", file=sys.stderr)
        raise OffloadError(f"run {name}, it failed after {seen.steps} steps (status {done.returncode}): see above")
    if not seen.steps:
        raise OffloadError(f"run {name}, it ended, and no optimizer of this package had taken a step")
    if seen.steps < request.steps:
        raise ConfigError("--steps", request.steps, f"the script ended after {seen.steps}: give no more")
    return seen


def _first_difference(left: Seen, right: Seen) -> tuple[int, str] | None:
    """Return step and name of the first tensor with other bits; gradients that one has let go of are left out."""
    theirs = {(step, name): digest for step, name, digest in right.tensors}
    for step, name, digest in left.tensors:
        if theirs.get((step, name), digest) != digest:
            return step, name
    return None


def _own_differences(left: Seen, right: Seen) -> list[str]:
    """Return the names of the script's own tensors that both have, with other bits."""
    return [name for name, digest in left.own.items() if right.own.get(name, digest) != digest]


def _distance(folder: Path, number: int) -> str:
    """Return how far a tensor is apart in the two runs that kept it, in words."""
    import torch

    kept = [torch.load(folder / run / TENSOR.format(number), weights_only=True) for run in ("2", "3")]
    if kept[0].shape != kept[1].shape:
        return f": it is {' by '.join(map(str, kept[0].shape))}, and in memory {' by '.join(map(str, kept[1].shape))}"
    parts = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in kept)
    ours, theirs = (tensor.double().reshape(-1) for tensor in parts)
    different = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    at = int(different.int().argmax())
    apart = float((ours - theirs).abs().nan_to_num(torch.inf).max())
    return (
        f": {int(different.sum()):,} of {len(ours):,} elements, by up to {apart:.3g} (the largest is "
        f"{float(theirs.abs().max()):.3g}); element {at} is {float(ours[at])!r}, and in memory {float(theirs[at])!r}"
    )
