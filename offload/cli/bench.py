"""`offload bench`: compares what an iteration takes, ours beside the alternatives.

The benchmark itself is `bench/iteration.py`, a plain script like all benchmarks; this finds it and runs it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from offload.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add the subcommand `bench` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "bench",
        add_help=False,
        prefix_chars="\0",  # options are the script's, --help included
        help="compare iteration times with torch's AdamW and DeepSpeed's offloading",
    )
    parser.add_argument("options", nargs="*")


def script() -> Path:
    """Return where `bench/iteration.py` lies: in the checkout, or installed with the package.

    Raises:
        ConfigError: It is in neither place.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "bench", package / "bench"):
        if (folder / "iteration.py").exists():
            return folder / "iteration.py"
    raise ConfigError(
        "bench/iteration.py", "not found", f"install offload with its benchmarks, or run it beside {package}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark with the options as they are.

    Returns:
        Its exit status.

    Raises:
        ConfigError: The benchmark is not installed.
    """
    return subprocess.run([sys.executable, str(script()), *arguments.options], check=False).returncode
