"""`offload bench`: compares what an iteration takes, ours beside the alternatives.

The benchmark itself is `bench/iteration.py` of a source checkout, a plain script like all benchmarks. This command
runs it in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offload.errors import OffloadError


def add_parser(commands: Any) -> None:
    """Add the subcommand `bench` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "bench",
        add_help=False,
        prefix_chars="\0",  # so that nothing is an option here: all are the script's, --help included
        help="compare iteration times with torch's AdamW and DeepSpeed's offloading (in a source checkout)",
    )
    parser.add_argument("options", nargs="*")


def script(package: Path) -> Path:
    """Return where `bench/iteration.py` lies beside a package's folder.

    Raises:
        OffloadError: The package is not that of a source checkout.
    """
    root = package.parent
    if (root / "CMakeLists.txt").is_file() and (root / "bench" / "iteration.py").is_file():
        return root / "bench" / "iteration.py"
    raise OffloadError(
        f"benchmarks come with a source checkout, not with the package in {package}: clone the repository that it "
        f"was built from, or unpack its source archive, offload-{version('offload')}.tar.gz; then run `make bench`"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark's script, which gets all options unread; return the script's exit status.

    Raises:
        OffloadError: There are no benchmarks here.
    """
    file = script(Path(__file__).resolve().parent.parent)  # of the folder of the package `offload`
    command = [sys.executable, str(file), *arguments.options]
    environment = {**os.environ, "OFFLOAD_PROG": "offload bench"}  # for its usage line
    return subprocess.run(command, check=False, env=environment).returncode
