"""`offload probe`: measures this machine and writes its rates file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.progress import Progress
from offload.cli.values import add_output, add_value, in_columns, parse_number, parse_output, parse_path, tell
from offload.errors import ConfigError, OffloadError
from offload.units import DAY_S, format_bytes, format_seconds

if TYPE_CHECKING:
    from offload.measure import Measurement, RatesFile

_EPILOG = """\
examples:
  offload probe                                          CPU and memory (and the GPU, where torch sees one)
  offload probe --paths /mnt/nvme0/offload /mnt/nvme1    and two paths, which sessions then use at these rates
  offload probe --paths /mnt/nvme0 --out node.json       for `rates="node.json"`, or `offload plan --rates node.json`

Paths are directories that exist, or s3://bucket/prefix. Measure all that a session will use at once: the file is
replaced. Sessions use it by themselves as long as CPU, cores, memory, GPU, kernel and versions are the same.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand `probe` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "probe",
        help="measure this machine and write its rates file",
        description="Measure every rate that plans and predictions are computed from, and write them to a file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = "directories to measure, one on each drive, while state is updated beside (default: no drive is measured)"
    add_value(parser, "--paths", parse_path, where, metavar="DIR", nargs="+", default=[])
    add_value(parser, "--out", parse_output, "rates file to write (default: this machine's, below ~/.cache)")
    seconds = partial(parse_number, least=0.01, most=DAY_S, what="seconds,")  # "give seconds, from 0.01 to 86400"
    add_value(parser, "--seconds", seconds, "about how long to measure (default: 20)", metavar="S", default=20.0)
    add_output(parser, "print the file's content on stdout, and nothing else there", "no progress and no table")


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the file, print what was found.

    A file that the user names has to be written. Where this machine's own file cannot be, rates are only shown.

    Raises:
        OffloadError: A value cannot be used, a path failed, or the file cannot be written.
    """
    # Loads native code and numpy: bad values should not wait for it.
    from offload.measure import default_rates_file, full_probe, save_rates

    is_named = arguments.out is not None
    file = Path(arguments.out) if is_named else default_rates_file()
    is_kept = _can_write(file, makes_folder=not is_named)
    if is_named and not is_kept:
        raise ConfigError("--out", str(file), "name a file in a folder that is there and can be written")
    if not is_kept:
        _say_unkept(f"{file} cannot be written")
    with closing(Progress(1, title="probe", quiet=arguments.quiet, unit="run")) as progress:
        found = full_probe(arguments.paths, seconds=arguments.seconds, report=progress.show)
    try:
        if is_kept:
            save_rates(file, found)
    except OffloadError as error:
        if is_named:
            raise
        is_kept = False
        _say_unkept(str(error))
    tell(arguments, found.to_dict(), describe(found) + (f"\nwritten to {file}" if is_kept else ""))
    for warning in found.warnings:
        print(f"offload probe: warning: {warning}", file=sys.stderr)
    return 0


def _can_write(file: Path, *, makes_folder: bool) -> bool:
    """Return whether a file can probably be written, which is asked before measuring takes its time.

    Its folder has to be there; with `makes_folder` one of the folders above it is enough, as the others are made.
    """
    folder = file.parent
    while makes_folder and not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return not os.path.isdir(file) and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def _say_unkept(why: str) -> None:
    """Warn that the rates are only shown, as this machine's own file cannot be written (in a container, say)."""
    print(f"offload probe: warning: {why}: the rates are not kept; --out FILE keeps them", file=sys.stderr)


def gpu_of(machine: Mapping[str, Any]) -> str:
    """Return the name of a machine's GPU, or "no GPU"; `machine` is that of a rates file."""
    name = machine["gpu"]
    return "no GPU" if name in (None, "") else str(name)


def describe(found: RatesFile) -> str:
    """Return what was measured as lines of text."""
    machine = found.machine
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])} of memory, "
        f"{gpu_of(machine)}"
    ]
    lines += [f"path {number}: {facts['path']} ({facts['io']})" for number, facts in enumerate(found.paths)]
    rows = [
        (f"  {name}", _median_text(each), f"{each.runs} runs, {each.spread:.0%} apart")
        for name, each in found.measurements.items()
    ]
    lines.append(in_columns(rows, right=[1]))
    lines.append(f"host memory gives {format_bytes(found.rates.memory_bytes_per_s)}/s")
    for node in found.rates.nodes:
        by_use = {"update": node.update_bytes_per_s, "reads": node.read_bytes_per_s}
        by_use |= {"writes": node.write_bytes_per_s, "GPU": node.link_bytes_per_s}
        rates = ", ".join(f"{use} {format_bytes(rate)}/s" for use, rate in by_use.items() if rate)
        lines.append(f"  memory node{node.node}: {rates}")
    for number, path in enumerate(found.rates.paths):
        lines.append(f"path {number} takes {path.memory_cost:.2g} bytes of that from updates for each byte moved")
    for lane, (_bytes_per_s, memory_cost) in found.rates.gpu.lanes.items():
        if lane == "h2d":  # copies the other way take as much
            lines.append(f"GPU copies take {memory_cost:.2g} bytes of that for each byte moved")
    return "\n".join(lines)


def _median_text(measurement: Measurement) -> str:
    """Return the median of a measurement in its unit."""
    if measurement.unit == "bytes/s":
        return f"{format_bytes(measurement.median)}/s"
    return format_seconds(measurement.median) if measurement.unit == "s" else f"{measurement.median:.0%}"
