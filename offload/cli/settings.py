"""The options of `offload train`: their defaults, their help, and what is checked before anything starts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offload.cli.values import MAX_COUNT, parse_count, parse_number, parse_path
from offload.config import MAX_THREADS, parse_bytes
from offload.errors import ConfigError
from offload.formats import STATE_FORMATS

DTYPES = ("bf16", "fp32")
OVERLAPS = ("off", "forward", "backward", "both", "auto")

_READERS: dict[Callable[[str, str], Any], tuple[str, ...]] = {
    parse_bytes: ("host_memory", "staging_memory"),
    parse_path: ("data", "save", "resume", "output", "rates"),
}
_COUNTS = {
    "params": (1, MAX_COUNT),
    "layers": (1, 10_000),
    "hidden": (16, 1 << 20),
    "seq": (1, 1 << 20),
    "batch": (1, 1 << 20),
    "accumulate": (1, 1 << 20),
    "steps": (1, 10**9),
    "save_every": (1, 10**9),
    "threads": (1, MAX_THREADS),
    "subgroup_numel": (1024, MAX_COUNT),
    "seed": (0, 2**63 - 1),
}
"""Least and most of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What `offload train` was asked to do; see the help of each option. Sizes are in bytes."""

    params: int
    layers: int | None
    hidden: int | None
    seq: int
    batch: int
    accumulate: int
    steps: int
    lr: float
    clip: float
    data: str | None
    host_memory: int | None
    staging_memory: int | None
    paths: tuple[str, ...]
    subgroup_numel: int | None
    threads: int | None
    rates: str
    state_format: str
    overlap: str
    device: str
    dtype: str
    seed: int
    compare_in_memory: bool
    save: str | None
    save_every: int | None
    resume: str | None
    output: str | None
    quiet: bool
    json: bool

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> TrainSettings:
        """Return checked settings.

        Raises:
            ConfigError: A value is out of range or cannot be read.
        """
        values = vars(arguments) | {"paths": tuple(arguments.paths or ())}
        for read, names in _READERS.items():
            for name in names:
                if values[name] is not None:
                    values[name] = read(f"--{name.replace('_', '-')}", values[name])
        for name, (least, most) in _COUNTS.items():
            if values[name] is not None:
                values[name] = parse_count(f"--{name.replace('_', '-')}", values[name], least=least, most=most)
        values["lr"] = parse_number("--lr", arguments.lr, least=0, most=1e6)
        clips = "the largest gradient norm (0: no clipping)"
        values["clip"] = parse_number("--clip", arguments.clip, least=0, most=1e30, what=clips)
        values["paths"] = tuple(parse_path("--paths", path) for path in values["paths"])
        if arguments.save_every is not None and arguments.save is None:
            raise ConfigError("--save-every", arguments.save_every, "say where to with --save DIR")
        if arguments.resume is not None and arguments.compare_in_memory:
            raise ConfigError("--compare-in-memory", True, "compare runs from the start: leave --resume out")
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, counted from 0: a short linear warm-up, then a cosine down to a tenth."""
        warmup = min(100, max(1, self.steps // 10))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        share = (step - warmup) / max(1, self.steps - warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


_EPILOG = """\
examples:
  offload train                                 a 25M-parameter model for a few minutes, state mostly on disk
  offload train --params 1B --paths /mnt/nvme0/offload /mnt/nvme1/offload --host-memory 4GiB
  offload train --save ck --save-every 20       keep a checkpoint; after a crash go on with --resume ck --save ck
  offload train --steps 20 --compare-in-memory  check that offloading does not change a single bit

Where the processor is slow at 16-bit matrix products, they are computed in fp32 from 16-bit weights;
OFFLOAD_COMPUTE=bf16 or =fp32 in the environment decides otherwise.

The run's folder holds metrics.jsonl (a line a step), summary.json, timeline.json (of the last step; see `offload
trace`), loss.png and lanes.png.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand `train` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "train",
        help="train a language model on any text through the whole engine",
        description="Train a decoder-only language model, byte by byte, on any text file or folder, with its "
        "optimizer state offloaded.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--params",
        metavar="COUNT",
        default="25M",
        help="parameters to aim for, such as 25e6 or 1.5B; picks depth and width (default: %(default)s)",
    )
    model.add_argument("--layers", metavar="N", help="layers (default: picked for --params)")
    model.add_argument("--hidden", metavar="N", help="hidden width, a multiple of 16 (default: picked for --params)")
    model.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of the weights and gradients (default: %(default)s)"
    )
    model.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")

    training = parser.add_argument_group("training")
    training.add_argument(
        "--data",
        metavar="PATH",
        help="text file, or folder read recursively (default: the sources of Python's standard library)",
    )
    training.add_argument("--seq", metavar="N", default="128", help="bytes a sequence (default: %(default)s)")
    training.add_argument("--batch", metavar="N", default="8", help="sequences a micro-step (default: %(default)s)")
    training.add_argument("--accumulate", metavar="N", default="1", help="micro-steps a step (default: %(default)s)")
    training.add_argument("--steps", metavar="N", default="160", help="(default: %(default)s)")
    training.add_argument(
        "--lr",
        metavar="RATE",
        default="1e-3",
        help="peak learning rate; warms up over a tenth of the steps (100 at most), then falls to a tenth "
        "along a cosine (default: %(default)s)",
    )
    training.add_argument(
        "--clip",
        metavar="NORM",
        default="1",
        help="largest gradient norm, 0 for any (default: %(default)s)",
    )
    training.add_argument("--seed", metavar="N", default="0", help="of weights and batches (default: %(default)s)")

    offloading = parser.add_argument_group("offloading")
    offloading.add_argument(
        "--paths",
        metavar="DIR",
        nargs="+",
        action="extend",
        help="where streamed state is stored, one for each disk (default: OUTPUT/state)",
    )
    offloading.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="budget for state that stays in host memory, such as 8GiB (default: a quarter of the state)",
    )
    offloading.add_argument(
        "--staging-memory", metavar="SIZE", help="buffers for state on its way (default: the engine's choice)"
    )
    offloading.add_argument(
        "--subgroup-numel", metavar="COUNT", help="parameters a subgroup (default: the engine's choice)"
    )
    offloading.add_argument("--threads", metavar="N", help="CPU threads of model and updates (default: one a core)")
    offloading.add_argument(
        "--state-format",
        choices=tuple(STATE_FORMATS),
        default="exact",
        help="how state is stored (default: exact)",
    )
    offloading.add_argument(
        "--overlap",
        choices=OVERLAPS,
        default="off",
        help="hide the optimizer's step in the next forward pass, in backward, in both, or in backward where that "
        "should pay (default: off); the numbers are the same",
    )
    offloading.add_argument(
        "--rates",
        metavar="FILE",
        default="auto",
        help="what `offload probe` wrote (default: this machine's file if it fits, else a short probe)",
    )

    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument(
        "--save", metavar="DIR", help="keep a checkpoint in this folder, of the last step and of those between"
    )
    checkpoints.add_argument(
        "--save-every", metavar="N", help="steps from one checkpoint to the next (default: only the last)"
    )
    checkpoints.add_argument(
        "--resume",
        metavar="DIR",
        help="go on from the checkpoint in this folder; give the same model, data, --steps and --seed as before, "
        "and any other offloading",
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare-in-memory",
        action="store_true",
        help="run the same steps again with all state in host memory; exit with 1 unless every weight and loss is "
        "identical bit for bit",
    )
    output.add_argument("--output", metavar="DIR", help="new or empty folder for the results (default: runs/TIME)")
    output.add_argument(
        "--json", action="store_true", help="print the summary as JSON on stdout, and nothing else there"
    )
    output.add_argument("--quiet", action="store_true", help="no progress and no table")
