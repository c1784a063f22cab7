"""What a benchmark needs beside this package and torch, looked for before it starts.

A comparison that lacks what it is compared with is worth nothing, and costs as much time as a whole one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import ROOT


@dataclass(frozen=True)
class Need:
    """Something that has to be installed.

    Attributes:
        name: What it is.
        install: The command that installs it.
        there: Tells whether it is there.
    """

    name: str
    install: str
    there: Callable[[], bool]


def package(name: str) -> bool:
    """Return whether a package is installed; not by its modules: a benchmark is called `deepspeed`, too."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def compiler() -> list[str]:
    """Return the command of the C++ compiler that torch takes for native parts."""
    return shlex.split(os.environ.get("CXX", "c++"))


def program(name: str) -> bool:
    """Return whether a program is on the path, which for contenders begins beside the interpreter."""
    return (
        shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}") is not None
    )


def links_libaio() -> bool:
    """Return whether the compiler finds libaio's header and library, as DeepSpeed's aio does."""
    source = "#include <libaio.h>\nint main() { return io_submit(0, 0, nullptr); }\n"
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    with tempfile.TemporaryDirectory() as folder:
        command = [*compiler(), *flags[0], "-x", "c++", "-", "-o", f"{folder}/linked", *flags[1], "-laio"]
        try:
            return subprocess.run(command, input=source.encode(), capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def pinned() -> str:
    """Return the DeepSpeed that the Makefile installs."""
    found = re.search(r"^DEEPSPEED := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return found[1] if found else "deepspeed"


FIO = Need("fio", "apt-get install fio", lambda: shutil.which("fio") is not None)
MATPLOTLIB = Need("matplotlib", "pip install matplotlib", lambda: package("matplotlib"))
TORCHAO = Need("torchao", "pip install torchao", lambda: package("torchao"))
DEEPSPEED = Need(
    "DeepSpeed", f"DS_BUILD_OPS=0 pip install --no-build-isolation {pinned()}", lambda: package("deepspeed")
)
MEGATRON = Need("Megatron-Core", "pip install --no-deps megatron-core==0.16.1", lambda: package("megatron-core"))
NATIVE = (
    DEEPSPEED,
    Need("a C++ compiler", "apt-get install g++", lambda: program(compiler()[0])),
    Need("ninja", "pip install ninja", lambda: program("ninja")),
    Need(
        "Python's headers",
        "apt-get install python3-dev",
        lambda: Path(sysconfig.get_path("include"), "Python.h").exists(),
    ),
)
"""For parts of DeepSpeed that it compiles when they are first used."""
LIBAIO = Need("libaio's header", "apt-get install libaio-dev", links_libaio)


def require(args: argparse.Namespace, needs: Mapping[str, Sequence[Need]]) -> dict[str, str]:
    """Look for what is needed; end the benchmark if something is not there, unless it may be.

    Args:
        args: The command's.
        needs: What each contender or section needs.

    Returns:
        Which of them cannot run, and why. At smoke size nothing is looked for: what is not there is left out anyway.
        A picture that cannot be drawn is not asked for any more.

    Raises:
        SystemExit: Something is missing, and `--allow-missing` was not given.
    """
    if args.smoke:
        return {}
    wanted = {**needs, **({"the picture": [MATPLOTLIB]} if getattr(args, "picture", None) else {})}
    every = dict.fromkeys(need for some in wanted.values() for need in some)
    missing = [need for need in every if not need.there()]
    if not missing:
        return {}
    for need in missing:
        without = ", ".join(name for name, some in wanted.items() if need in some)
        print(f"{need.name} is missing, without which there is no: {without}\n    {need.install}", file=sys.stderr)
    if not args.allow_missing:
        raise SystemExit("nothing was run: install what is missing, or go on without it by --allow-missing")
    if MATPLOTLIB in missing:
        args.picture = None
    return {
        name: "not run: missing " + ", ".join(need.name for need in some if need in missing)
        for name, some in wanted.items()
        if any(need in missing for need in some)
    }
