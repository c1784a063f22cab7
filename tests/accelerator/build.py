"""Builds the test accelerator's native module against the torch that is installed.

The module lies in `build/accelerator/` of the checkout, in a folder named by all that it is made of: sources, torch,
interpreter, compiler, flags. So it is built once, whichever process asks first; the others wait for a file lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parents[2] / "build" / "accelerator"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


class CannotBuild(Exception):
    """The module cannot be built here: what is missing, or what the compiler says."""


@cache
def library() -> Path:
    """Return the native module's path, built now if it is not there.

    Raises:
        CannotBuild: No compiler or headers, or these sources do not compile with them.
    """
    compiler = os.environ.get("CXX", "g++")
    if sys.platform != "linux" or shutil.which(compiler) is None:
        raise CannotBuild(f"the test accelerator is built by {compiler} on Linux")
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").exists():
        raise CannotBuild(f"the test accelerator needs Python.h in {python}")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    made_of = hashlib.sha256(repr((torch.__version__, sys.version, version, FLAGS, LIBRARIES)).encode())
    files = sorted(SOURCES.iterdir())
    for file in files:
        made_of.update(file.name.encode() + b"\0" + file.read_bytes())
    folder = BUILT / made_of.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    module, said = folder / "_late.so", folder / "failed"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists() and not said.exists():
            try:
                _build(compiler, python, [file for file in files if file.suffix == ".cpp"], folder, module)
            except CannotBuild as error:
                said.write_text(str(error))
        if said.exists():
            raise CannotBuild(said.read_text())
    return module


def _build(compiler: str, python: Path, sources: list[Path], folder: Path, module: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    includes = [torch_folder / "include", torch_folder / "include" / "torch" / "csrc" / "api" / "include", python]
    options = [*FLAGS, *(item for include in includes for item in ("-isystem", str(include)))]
    objects = [folder / f"{source.stem}.o" for source in sources]

    def compiled(pair: tuple[Path, Path]) -> None:
        source, target = pair
        _run([compiler, *options, "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compiled, zip(sources, objects, strict=True)))
    lib = torch_folder / "lib"
    linked = folder / "linked.so"
    libraries = [f"-l{name}" for name in LIBRARIES]
    _run([compiler, "-shared", *map(str, objects), "-o", str(linked), f"-L{lib}", *libraries, f"-Wl,-rpath,{lib}"])
    linked.rename(module)
    for file in objects:
        file.unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{shlex.join(command)}\n{done.stderr[-8000:]}")


if __name__ == "__main__":
    try:
        print(library())
    except CannotBuild as error:
        sys.exit(str(error))
