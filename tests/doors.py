"""torchtitan, LLaMA-Factory, litgpt and a newer Megatron-Core, for real: `python tests/doors.py [DOOR ...]`.

Makes an environment for each below --folder (a temporary one), with the newest release that was tried, the pinned
torch and a wheel of this checkout, and then trains the example of docs/examples/ there: with the framework's own
optimizer in memory; with ours and its state on disk; with ours, killed at step 15; and resumed from what it had saved
at step 10. Prints the losses, and fails unless ours are those of the framework's own optimizer (`Door.near`), and
those after the resume the same as without the kill. Takes 2 GB of disk and some minutes for each.

Of a release (`RELEASES`) tests of ours run in such an environment; `--python FILE` names one that is there already.
It wants a newer Python: that of `--interpreter`, else one that is on the path or that pyenv has. Where there is none,
that is said, and the release is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS, SAVED, KILLED = 20, 10, 15


def of_litgpt(folder: Path, said: str) -> dict[int, float]:
    found = {}
    for file in sorted(folder.rglob("metrics.csv"), key=os.path.getmtime):  # a resumed run has another one
        rows = csv.DictReader(file.read_text().splitlines())
        found.update({int(row["iter"]): float(row["loss"]) for row in rows if row.get("loss")})
    return found


def of_llama_factory(folder: Path, said: str) -> dict[int, float]:
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def of_torchtitan(folder: Path, said: str) -> dict[int, float]:
    lines = re.findall(r"step: +(\d+) +loss: +([\d.]+)", re.sub(r"\x1b\[[\d;]*m", "", said))
    return {int(step): float(loss) for step, loss in lines}


@dataclass(frozen=True)
class Door:
    """A framework.

    Attributes:
        package: What is imported.
        alone: What is installed without what it asks for: that would bring another torch, or a page for browsers.
        packages: What is installed with what it asks for.
        example: Of docs/examples/.
        own: What the example takes for the framework's own optimizer.
        losses: Reads losses by step from an example's folder and what it has printed.
        ranks: How many processes torchrun starts; 0 is none, and no torchrun.
        environment: Variables of its processes.
        stand_ins: Modules that are imported and not needed, and have no build that fits.
        near: How far apart losses of its own optimizer and of ours may be, as a part; weights differ in last bits.
    """

    package: str
    alone: tuple[str, ...]
    packages: tuple[str, ...]
    example: str
    own: str
    losses: Callable[[Path, str], dict[int, float]]
    ranks: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    stand_ins: tuple[str, ...] = ()
    near: float = 1e-5


DOORS = {
    "litgpt": Door(
        "litgpt", (), ("litgpt==0.5.13", "requests"), "litgpt_finetune.py", "torch.optim.AdamW", of_litgpt
    ),
    "llama-factory": Door(
        "llamafactory",
        ("llamafactory==0.9.5",),
        (
            *("transformers==5.6.0", "accelerate==1.11.0", "peft==0.18.1", "trl==0.24.0", "datasets==4.0.0"),
            *("omegaconf", "fire"),
        ),
        "llama_factory_sft.py",
        "adamw_torch",
        of_llama_factory,
        stand_ins=("torchaudio",),  # whose builds in the index are for CUDA
    ),
    "torchtitan": Door(
        "torchtitan",
        ("torchtitan==0.3.0", "torchdata==0.11.0", "torch_checkpointing==0.1.1", "spmd_types==0.2.3"),
        ("tyro", "einops", "datasets>=3.6,<4.8", "tokenizers", "pillow", "tensorboard", "triton==3.7.1"),
        "torchtitan_train.py",
        "AdamW",
        of_torchtitan,
        ranks=2,
        environment={"TORCH_COMPILE_DISABLE": "1"},
        near=2e-4,  # forward takes weights that are rounded to bf16, which makes more of it
    ),
}


@dataclass(frozen=True)
class Release:
    """A framework's release that the environment here cannot have.

    Attributes:
        alone: What is installed without what it asks for, as in `Door`.
        packages: What is installed with what it asks for, for the tests, too.
        stand_ins: As in `Door`.
        python: The oldest Python that it runs with.
        tests: Those that it has to pass.
    """

    alone: tuple[str, ...]
    packages: tuple[str, ...]
    python: tuple[int, int]
    tests: tuple[str, ...]
    stand_ins: tuple[str, ...] = ()


RELEASES = {
    "megatron-core": Release(
        ("megatron-core==0.19.2",),
        ("einops", "packaging", "pytest", "pytest-timeout", "hypothesis", "expecttest"),
        (3, 12),
        ("tests/integrations/test_megatron.py", "tests/integrations/test_megatron_kills.py"),
    ),
}


def interpreters() -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield Pythons that there are, with their versions: this one, those on the path, pyenv's."""
    on_path = (shutil.which(f"python3.{minor}") for minor in range(sys.version_info.minor, 30))
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [sys.executable, *filter(None, on_path), *map(str, sorted(pyenv.glob("versions/*/bin/python3")))]
    for python in dict.fromkeys(found):
        command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:  # what pyenv puts on the path fails for versions that are not chosen
            major, minor = map(int, done.stdout.split())
            yield python, (major, minor)


def newer(least: tuple[int, int]) -> str | None:
    """Return a Python that is as new, the oldest of those there are; None if there is none."""
    found = [(version, python) for python, version in interpreters() if version >= least]
    return min(found)[1] if found else None


def check_release(name: str, python: str) -> None:
    """Run the tests of a release.

    Raises:
        AssertionError: One has failed, or was left out.
    """
    # -P: the package that is installed is meant, not the folder of its sources.
    command = [python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *RELEASES[name].tests]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    last = done.stdout.splitlines()[-1:]
    if done.returncode or "skipped" in str(last):
        raise AssertionError(f"{name} ended with {done.returncode}\n{done.stdout[-8000:]}")
    print(f"{name}: {', '.join(RELEASES[name].alone)}: {last[0]}", flush=True)


def run(door: Door, python: str, folder: Path, optimizer: Sequence[str] = (), kill: int = 0) -> dict[int, float]:
    """Train in a folder, which another run may have left; return the losses that this run has seen, by step."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(door.ranks)] if door.ranks else []
    )
    program = [str(ROOT / "tests" / "integrations" / "door_runs.py"), str(ROOT / "docs" / "examples" / door.example)]
    offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(
        [python, *launcher, *program, str(kill), str(folder), *optimizer],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **offline, **door.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=280,
    )
    if (done.returncode == 0) != (kill == 0):
        raise AssertionError(f"{door.example} ended with {done.returncode}\n{done.stdout}")
    return {} if kill else door.losses(folder, done.stdout)


def check(door: Door, python: str, folder: Path) -> list[tuple[int, float, float, float | None]]:
    """Train, kill, resume; return for each step the loss of the framework's own optimizer, of ours, and resumed.

    Raises:
        AssertionError: They are not what they have to be, or a run has failed.
    """
    own, whole = run(door, python, folder / "own", [door.own]), run(door, python, folder / "whole")
    run(door, python, folder / "killed", kill=KILLED)
    stores = [path.name for path in (folder / "killed").rglob("offload-*") if path.is_dir()]
    assert stores, "a killed process leaves its state where it lies"
    resumed = run(door, python, folder / "killed")
    rows = [(step, own[step], whole[step], resumed.get(step)) for step in range(1, STEPS + 1)]
    for step, theirs, ours, again in rows:
        assert abs(ours - theirs) <= door.near * theirs, (step, theirs, ours)
        assert again == ours if step > SAVED else again in (None, ours), (step, ours, again)
    return rows


def make(door: Door | Release, folder: Path, torch: str, ours: str, interpreter: str = sys.executable) -> str:
    """Make an environment, and return its interpreter; `ours` is what pip installs of this project."""
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, torch, "setuptools"], check=True)
    subprocess.run([*install, ours, *door.packages], check=True)
    if door.alone:
        subprocess.run([*install, "--no-deps", *door.alone], check=True)
    site = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True
    )
    for name in door.stand_ins:
        (Path(site.stdout.strip()) / f"{name}.py").touch()
    return python


def main() -> None:
    names = [*DOORS, *RELEASES]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("door", nargs="*", choices=[*names, []], help="all of them, if none is named")
    parser.add_argument("--folder", type=Path, help="where environments are made, and stay")
    parser.add_argument("--wheel", default=str(ROOT), help="a wheel of this checkout that is there already")
    parser.add_argument("--python", help="an environment that is there already")
    parser.add_argument("--interpreter", help="the Python of environments of releases")
    makefile = (ROOT / "Makefile").read_text()
    arguments = parser.parse_args()
    (torch,) = re.findall(r"^TORCH := (.*)$", makefile, re.MULTILINE)
    for name in arguments.door or names:
        interpreter: str | None = sys.executable
        if name in RELEASES:
            interpreter = arguments.interpreter or arguments.python or newer(RELEASES[name].python)
        if interpreter is None:
            least = ".".join(map(str, RELEASES[name].python))
            print(f"{name}: not run: it needs Python {least} or later, and none is here (--interpreter names one)")
            continue
        with tempfile.TemporaryDirectory(prefix="door-") as temporary:
            folder = Path(temporary)
            python = arguments.python or make(
                DOORS.get(name) or RELEASES[name],
                (arguments.folder or folder) / name,
                torch,
                arguments.wheel,
                interpreter,
            )
            if name in RELEASES:
                check_release(name, python)
                continue
            rows = check(DOORS[name], python, folder / "runs")
        print(
            f"{name}\n| step | its own, in memory | ours, on disk | killed at {KILLED}, resumed |\n|---|---|---|---|"
        )
        for step, theirs, ours, again in rows:
            print(f"| {step} | {theirs:.6f} | {ours:.6f} | {'' if again is None else f'{again:.6f}'} |", flush=True)


if __name__ == "__main__":
    main()
