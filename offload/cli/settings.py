"""The command `offload train`: its options, and what is checked of them before torch is loaded."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from offload.cli.values import add_output, add_settings, add_value, parse_count, parse_number, parse_path
from offload.errors import ConfigError

DTYPES = ("bf16", "fp32")

_EPILOG = """\
examples:
  offload train                                 a 25M-parameter model for a few minutes, state mostly on disk
  offload train --params 1B --paths /mnt/nvme0/offload /mnt/nvme1/offload --host-memory 4GiB
  offload train --save ck --save-every 20       keep a checkpoint; after a crash go on with --resume ck --save ck
  offload train --steps 20 --compare-in-memory  check that offloading does not change a single bit

Where the processor is slow at 16-bit matrix products, they are computed in fp32 from 16-bit weights;
OFFLOAD_COMPUTE=bf16 or =fp32 in the environment decides otherwise.

The run's folder holds report.html (what happened, for a browser), metrics.jsonl (a line a step), summary.json,
timeline.json (of the last step; see `offload trace`), report.json (see `offload report`), loss.png and lanes.png.
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
    _add_training(parser.add_argument_group("model"), parser.add_argument_group("training"))
    add_settings(parser.add_argument_group("offloading"), "train", defaults=True)
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare-in-memory",
        action="store_true",
        help="run the same steps again with all state in host memory; exit with 1 unless every weight and loss is "
        "identical bit for bit",
    )
    where = "new or empty folder for the results (default: runs/TIME)"
    add_value(output, "--output", parse_path, where, metavar="DIR")
    add_output(output, "print the summary as JSON on stdout, and nothing else there", "no progress and no table")


def _add_training(model: Any, training: Any) -> None:
    """Add the options of the groups "model" and "training"."""
    size = "parameters to aim for, such as 25e6 or 1.5B; picks depth and width (default: 25M)"
    add_value(model, "--params", parse_count, size, metavar="COUNT", default=25_000_000)
    add_value(model, "--layers", _count(10_000), "layers (default: picked for --params)")
    width = "hidden width, a multiple of 16 (default: picked for --params)"
    add_value(model, "--hidden", _count(1 << 20, least=16), width)
    dtype = "of the weights and gradients (default: %(default)s)"
    model.add_argument("--dtype", choices=DTYPES, default="bf16", help=dtype)
    model.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")

    add = partial(add_value, training)
    data = "text file, or folder read recursively (default: the sources of Python's standard library)"
    add("--data", parse_path, data, metavar="PATH")
    add("--seq", _count(1 << 20), "bytes a sequence (default: %(default)s)", default=128)
    add("--batch", _count(1 << 20), "sequences a micro-step (default: %(default)s)", default=8)
    add("--accumulate", _count(1 << 20), "micro-steps a step (default: %(default)s)", default=1)
    add("--steps", _count(10**9), "optimizer steps (default: %(default)s)", default=160)
    peak = "peak learning rate; warms up over a tenth of the steps (100 at most), then falls to a tenth"
    rate = partial(parse_number, least=0, most=1e6)
    add("--lr", rate, f"{peak} along a cosine (default: 1e-3)", metavar="RATE", default=1e-3)
    norm = partial(parse_number, least=0, most=1e30, what="the largest gradient norm (0: no clipping)")
    add("--clip", norm, "largest gradient norm, 0 for any (default: 1)", metavar="NORM", default=1.0)
    add(
        "--seed",
        _count(2**63 - 1, least=0),
        "of the first weights and the batches (default: %(default)s)",
        default=0,
    )


def _add_checkpoints(checkpoints: Any) -> None:
    """Add the options of the group "checkpoints"."""
    add = partial(add_value, checkpoints)
    kept = "keep a checkpoint in this folder, of the last step and of those between"
    add("--save", parse_path, kept, metavar="DIR")
    add("--save-every", _count(10**9), "steps from one checkpoint to the next (default: only the last)")
    again = "go on from the checkpoint in this folder, with the model, data, --steps and --seed as before"
    add("--resume", parse_path, f"{again}; offloading may differ", metavar="DIR")


def _count(most: int, *, least: int = 1) -> Any:
    """Return a reader of counts in this range, for `add_value`."""
    return partial(parse_count, least=least, most=most)


def run(arguments: argparse.Namespace) -> int:
    """Check the options, and train; return the exit status of `train.run`.

    Raises:
        ConfigError: Options do not go together.
    """
    if arguments.save_every is not None and arguments.save is None:
        raise ConfigError("--save-every", arguments.save_every, "say where to with --save DIR")
    if arguments.resume is not None and arguments.compare_in_memory:
        raise ConfigError("--compare-in-memory", True, "compare runs from the start: leave --resume out")
    # Loads torch, which takes seconds: --help and bad values should not wait for it.
    from offload.cli import train

    return train.run(arguments)
