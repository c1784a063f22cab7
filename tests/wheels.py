"""Builds the wheels and tries them where nothing else is: `python tests/wheels.py`, or `make wheels`.

Makes the source archive. Builds from it, in dist/, one wheel for CPython 3.11 and one for 3.12 and later (the stable
ABI); `auditwheel` gives them the oldest manylinux tag that is true. Then installs a wheel with every interpreter that
is here into an empty virtual environment, with the pinned torch, and runs from an empty folder what a newcomer would:
a training with its state on disk, the commands, an integration whose framework is not installed.

Interpreters are python3.11 to python3.14 on PATH or of pyenv; others are named as arguments. torch comes from the
index that pip is set up for. A build of it for CUDA takes 5 GB of disk for the length of a trial; PIP_EXTRA_INDEX_URL
can name an index with builds for the CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
STABLE = "3.12"
"""The first version whose stable ABI has what nanobind needs; one wheel is for it and all later ones."""

BUILD = {
    "wheel.py-api": "cp" + STABLE.replace(".", ""),
    # The compiler's C++ library is newer than that of the systems whose C library would do.
    "cmake.define.CMAKE_MODULE_LINKER_FLAGS": "-static-libstdc++ -Wl,--exclude-libs,ALL",
}

TRAINING = """
import sys
from pathlib import Path
import torch
import offload

def weights(**settings):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).bfloat16()
    with offload.AdamW(model.parameters(), lr=1e-2, offload=settings) as optimizer:
        for _ in range(3):
            model(torch.ones(8, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        files = [file for file in Path("state").rglob("*") if file.is_file() and file.stat().st_size]
        assert bool(files) == (optimizer.metrics()["resident_share"] < 1), files
    return [weight.detach().clone() for weight in model.parameters()]

assert Path(offload.__file__).is_relative_to(sys.prefix), offload.__file__
Path("state").mkdir()
in_memory, on_disk = weights(host_memory="64MiB"), weights(host_memory=0, paths=["state"])
assert all(torch.equal(a, b) for a, b in zip(in_memory, on_disk, strict=True))
"""
WITHOUT_TRANSFORMERS = """
import offload, offload.integrations.transformers
try:
    offload.integrations.transformers.enable()
except offload.ConfigError as error:
    assert "pip install transformers" in str(error), error
else:
    raise AssertionError("transformers is not here")
"""


@dataclass
class Trial:
    """One interpreter, and what became of the wheel there."""

    version: str
    python: Path | None
    wheel: Path | None = None
    torch: str = ""
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)


def says(command: Sequence[object]) -> str:
    """What a command prints; "" where it cannot be run."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def interpreters(named: Sequence[Path]) -> dict[str, Path]:
    """The first interpreter of each version among those named, on PATH and of pyenv, that runs and has headers."""
    has = "import os, sys, sysconfig; version = '%d.%d' % sys.version_info[:2]; "
    has += "print(version if os.path.exists(sysconfig.get_path('include') + '/Python.h') else '')"
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted((folder / "bin" for folder in pyenv.glob("versions/*")), reverse=True)
    there = [*named, *(folder / f"python{version}" for version in VERSIONS for folder in folders)]
    found: dict[str, Path] = {}
    for python in there:
        version = re.search(r"python(3\.\d+)$", python.name)
        if python.exists() and (python in named or version is None or version[1] not in found):
            found.setdefault(says([python, "-c", has]), python)
    return {version: found[version] for version in VERSIONS if version in found}


def pip(python: Path, *arguments: object) -> None:
    """Run the pip of the interpreter that runs this for another one."""
    command = [sys.executable, "-m", "pip", "--python", python, *arguments]
    subprocess.run([str(part) for part in command], check=True)


def build(pythons: dict[str, Path], dist: Path, work: Path) -> tuple[Path, list[Path]]:
    """Make the source archive and from it the wheels; return both.

    The archive is what the wheels are built from, so that it is known to be whole.
    """
    code = f"import scikit_build_core.build as b; print(b.build_sdist({str(dist)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (archive,) = dist.glob("*.tar.gz")
    builders = [pythons[version] for version in VERSIONS if version < STABLE and version in pythons]
    builders += [pythons[version] for version in VERSIONS if version >= STABLE and version in pythons][:1]
    for python in builders:
        raw = work / f"raw-{python.name}"
        settings = [f"-C{name}={value}" for name, value in BUILD.items()]
        pip(python, "wheel", "--quiet", "--no-deps", "--wheel-dir", raw, *settings, archive)
        (wheel,) = raw.iterdir()
        tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        repair = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", dist, wheel]
        subprocess.run([str(part) for part in repair], check=True, env=tools, capture_output=True)
    return archive, sorted(dist.glob("*.whl"))


def contents(wheel: Path) -> list[str]:
    """What a wheel holds that it should not, or lacks."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    natives = [name for name in names if re.fullmatch(r"offload/_native\..*\.so", name)]
    wrong = [] if len(natives) == 1 else [f"native modules: {natives}"]
    sources = {"offload": "offload", "integrations": "offload/integrations"}
    for folder, installed in sources.items():
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".pyi", ".json", ".typed"):
                name = f"{installed}/{file.relative_to(ROOT / folder).as_posix()}"
                wrong += [] if name in names else [f"lacks {name}"]
    kinds = (".py", ".pyi", ".json", ".typed", ".so")
    wrong += [
        f"has {name}"
        for name in names
        if not re.match(r"offload-[^/]*\.dist-info/", name)
        and (not name.startswith("offload/") or name.startswith("offload/bench") or Path(name).suffix not in kinds)
    ]
    return wrong


def attempt(trial: Trial, torch: str, folder: Path) -> None:
    """Install a trial's wheel into an empty environment in `folder` and use it there."""
    started_s = time.monotonic()
    home, empty = folder / "environment", folder / "empty"
    empty.mkdir(parents=True)
    subprocess.run([str(trial.python), "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    pip(python, "install", "--quiet", torch, trial.wheel)
    version = "import importlib.metadata as m; print(m.version('torch'))"
    trial.torch = says([python, "-c", version])
    command = home / "bin" / "offload"
    plan = ["plan", "--params", "1e9", "--rates", "h100-node", "--host-memory", "64GiB"]
    tries: dict[str, tuple[list[object], int, str]] = {
        "training": ([python, "-c", TRAINING], 0, ""),
        "without transformers": ([python, "-c", WITHOUT_TRANSFORMERS], 0, ""),
        "help": ([command, "--help"], 0, "probe"),
        "plan": ([command, *plan], 0, ""),
        "bench": ([command, "bench"], 1, "source checkout"),
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for name, (words, status, said) in tries.items():
        line = [str(word) for word in words]
        done = subprocess.run(line, cwd=empty, env=clean, capture_output=True, text=True, check=False)
        if done.returncode != status or said not in done.stdout + done.stderr:
            print(f"{trial.version}, {name}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
            trial.failed.append(name)
    trial.seconds = time.monotonic() - started_s
    shutil.rmtree(home)


def main() -> int:
    """Build, look inside, try; the exit status is 0 if all that could be tried works."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", nargs="*", type=Path, help="further interpreters")
    parser.add_argument("--torch", required=True, help="what pip is told to install, such as torch==2.13.0")
    arguments = parser.parse_args()
    pythons = interpreters([python.absolute() for python in arguments.python])
    if not pythons:
        sys.exit(f"no interpreter of {', '.join(VERSIONS)} with headers is here")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    ok = True
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        started_s = time.monotonic()
        archive, wheels = build(pythons, dist, Path(folder))
        print(f"built in {time.monotonic() - started_s:.0f} s:", flush=True)
        for file in (archive, *wheels):
            print(f"  dist/{file.name}  {file.stat().st_size / 1e3:.0f} kB")
        for wheel in wheels:
            for wrong in contents(wheel):
                ok = False
                print(f"  {wheel.name}: {wrong}")
        trials = []
        for version in VERSIONS:
            tag = f"cp{version.replace('.', '')}-cp" if version < STABLE else "-abi3-"
            trial = Trial(version, pythons.get(version), next((w for w in wheels if tag in w.name), None))
            trials.append(trial)
            if trial.python and trial.wheel:
                print(f"trying {trial.python}", flush=True)
                try:
                    attempt(trial, arguments.torch, Path(folder) / version)
                except subprocess.CalledProcessError as error:
                    trial.failed.append(f"{Path(error.cmd[0]).name} ended with {error.returncode}")
                ok = ok and not trial.failed
    print("\n| Python | wheel | torch | trial |\n|---|---|---|---|")
    for trial in trials:
        result = ", ".join(trial.failed) if trial.failed else f"works ({trial.seconds:.0f} s)"
        if not trial.python or not trial.wheel:
            result = "no interpreter here"
        print(f"| {trial.version} | {trial.wheel.name if trial.wheel else ''} | {trial.torch} | {result} |")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
