"""`offload probe`: measures this machine and writes its rates file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.progress import Progress
from offload.cli.values import parse_number, parse_output, parse_path, to_json
from offload.errors import ConfigError
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
    parser.add_argument(
        "--paths", metavar="DIR", nargs="+", action="extend", default=[], help="paths to measure, beside each update"
    )
    parser.add_argument("--out", metavar="FILE", help="rates file to write (default: this machine's, below ~/.cache)")
    parser.add_argument(
        "--seconds", metavar="S", default="20", help="about how long to measure (default: %(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the file's content on stdout, and nothing else there"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no table")


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the file, print what was found.

    Returns:
        The exit status.

    Raises:
        OffloadError: A value cannot be used, a path failed, or the file cannot be written.
    """
    seconds = parse_number("--seconds", arguments.seconds, least=0.01, most=DAY_S, what="seconds,")
    paths = [parse_path("--paths", path) for path in arguments.paths]
    out = None if arguments.out is None else parse_output("--out", arguments.out)
    # Loads native code and numpy: bad values should not wait for it.
    from offload.measure import default_rates_file, full_probe, save_rates

    file = Path(out) if out is not None else default_rates_file()
    _check_writable(file, makes_folder=out is None)
    progress = Progress(1, title="probe", quiet=arguments.quiet, unit="run")
    try:
        found = full_probe(paths, seconds=seconds, report=progress.show)
    finally:
        progress.close()
    save_rates(file, found)
    if arguments.json:
        print(to_json(found.to_dict(), indent=2))
    elif not arguments.quiet:
        print(describe(found))
        print(f"written to {file}")
    for warning in found.warnings:
        print(f"offload probe: warning: {warning}", file=sys.stderr)
    return 0


def _check_writable(file: Path, *, makes_folder: bool) -> None:
    """Refuse a file that could not be written when all is measured."""
    folder = file.parent
    while makes_folder and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("--out", str(file), "name a file in a folder that is there and can be written")


def describe(found: RatesFile) -> str:
    """Return what was measured as lines of text."""
    machine = found.machine
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])} of memory, "
        f"{machine['gpu'] or 'no GPU'}"
    ]
    lines += [f"path {number}: {facts['path']} ({facts['io']})" for number, facts in enumerate(found.paths)]
    lines += _table(found.measurements)
    lines.append(f"host memory gives {format_bytes(found.rates.memory_bytes_per_s)}/s")
    for number, path in enumerate(found.rates.paths):
        lines.append(f"path {number} takes {path.memory_cost:.2g} bytes of that from updates for each byte moved")
    for lane, (_, cost) in found.rates.gpu.lanes.items():
        if lane == "h2d":  # and the other way as much
            lines.append(f"GPU copies take {cost:.2g} bytes of that for each byte moved")
    return "\n".join(lines)


def _table(measurements: Mapping[str, Measurement]) -> list[str]:
    width = max(len(name) for name in measurements)
    return [
        f"  {name:<{width}}  {_value(each):>12}  {each.runs} runs, {each.spread:.0%} apart"
        for name, each in measurements.items()
    ]


def _value(measurement: Measurement) -> str:
    if measurement.unit == "bytes/s":
        return f"{format_bytes(measurement.median)}/s"
    return format_seconds(measurement.median) if measurement.unit == "s" else f"{measurement.median:.0%}"
