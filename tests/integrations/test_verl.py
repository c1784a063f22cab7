"""verl's FSDP engines with our optimizers: parked between phases, saved into folders, resumed exactly.

verl itself brings Ray and much more, so that most tests take a package that has its functions in short for it. Tests
of its engine are left out where it is not installed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prepared
import pytest
import torch

import offload
from offload import CheckpointError, ConfigError
from offload.integrations import verl as integration
from offload.integrations.shared import POINTER

PROGRAM = Path(__file__).with_name("verl_runs.py")
SETTINGS = {"host_memory": "64KiB", "subgroup_numel": 2048, "staging_memory": "256KiB", "threads": 1}
needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: pip install verl")
needs_park = pytest.mark.skipif(not hasattr(offload.AdamW, "park"), reason="optimizers have no park()")

FILES = {
    "__init__.py": "__version__ = '0.9.1'",
    "utils/__init__.py": "",
    "utils/fsdp_utils.py": """
def offload_fsdp_optimizer(optimizer):
    optimizer.said = "offload"

def load_fsdp_optimizer(optimizer, device_id):
    optimizer.said = f"load {device_id}"
""",
    "utils/checkpoint/__init__.py": "",
    "utils/checkpoint/fsdp_checkpoint_manager.py": """
import os, shutil, torch

class FSDPCheckpointManager:
    def __init__(self, model, optimizer=None, lr_scheduler=None, checkpoint_config=None):
        self.model, self.optimizer = model, optimizer
        self.should_save_optimizer = self.should_load_optimizer = True
        self.saved = []

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        self.model.load_state_dict(torch.load(os.path.join(local_path, "model.pt")))
        if self.should_load_optimizer:
            state_dict = torch.load(os.path.join(local_path, "optim.pt"), weights_only=False)
            if "state" not in state_dict and "param_groups" not in state_dict:
                state_dict = {**self.optimizer.state_dict(), **state_dict}
            self.optimizer.load_state_dict(state_dict)

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        if max_ckpt_to_keep and len(self.saved) >= max_ckpt_to_keep:
            shutil.rmtree(self.saved.pop(0))
        os.makedirs(local_path, exist_ok=True)
        torch.save(self.model.state_dict(), os.path.join(local_path, "model.pt"))
        if self.should_save_optimizer:
            torch.save(self.optimizer.state_dict(), os.path.join(local_path, "optim.pt"))
        self.saved.append(local_path)
""",
    "engine.py": "from verl.utils.fsdp_utils import load_fsdp_optimizer, offload_fsdp_optimizer",
}
"""What verl has of what is relied on; `engine` has imported the helpers by their names."""


def write(folder: Path, **changed: str) -> None:
    for name, content in FILES.items():
        file = folder / "verl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for old, new in changed.items():
            content = content.replace(old, new)
        file.write_text(content)


def forget() -> None:
    for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
        del sys.modules[name]


@pytest.fixture
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    forget()
    write(tmp_path / "installed")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    engine = importlib.import_module("verl.engine")
    manager = importlib.import_module("verl.utils.checkpoint.fsdp_checkpoint_manager").FSDPCheckpointManager
    yield SimpleNamespace(engine=engine, manager=manager, utils=importlib.import_module("verl.utils.fsdp_utils"))
    integration.disable()
    forget()


def trained(folder: Path, **options: Any) -> SimpleNamespace:
    """Return a model, an optimizer of ours, and what makes a step of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    folder.mkdir(exist_ok=True)
    config = {**SETTINGS, "paths": [str(folder)], **options}
    optimizer = offload.AdamW(model.parameters(), lr=1e-2, offload=config)

    def step(number: int) -> float:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@needs_park
def test_ours_are_parked_where_verl_offloads_and_others_are_left_to_it(verl: SimpleNamespace, tmp_path: Path) -> None:
    stock = {name: vars(verl.utils)[name] for name in ("offload_fsdp_optimizer", "load_fsdp_optimizer")}
    integration.enable(host_memory="16KiB")
    mine, plain = trained(tmp_path / "mine"), trained(tmp_path / "plain")
    with mine.optimizer as optimizer, plain.optimizer:
        for number in range(4):
            verl.engine.load_fsdp_optimizer(optimizer, "cpu")
            assert not optimizer.engine.is_parked
            assert mine.step(number) == plain.step(number)
            verl.engine.offload_fsdp_optimizer(optimizer)
            assert optimizer.engine.is_parked
            assert optimizer.metrics()["park/away_bytes"] > 0
        assert all(map(torch.equal, mine.model.parameters(), plain.model.parameters()))
    other = torch.optim.AdamW(mine.model.parameters())
    verl.engine.offload_fsdp_optimizer(other)
    assert other.said == "offload"
    verl.utils.load_fsdp_optimizer(other, 3)
    assert other.said == "load 3"
    integration.disable()
    for module in (verl.utils, verl.engine):
        assert {name: vars(module)[name] for name in stock} == stock


def test_checkpoints_have_a_folder_and_are_gone_on_from(verl: SimpleNamespace, tmp_path: Path) -> None:
    """State on the paths is given back with the checkpoints that verl deletes; others go on by what was saved."""
    importlib.import_module("offload.integrations.verl.enabled")
    integration.enable()
    place = [tmp_path / f"global_step_{number}" for number in range(4)]
    run = trained(tmp_path / "paths", checkpoints_kept=2)
    with run.optimizer as optimizer:
        manager = verl.manager(run.model, optimizer)
        losses = []
        for number in range(4):
            losses.append(run.step(number))
            manager.save_checkpoint(local_path=str(place[number]), max_ckpt_to_keep=2)
            assert manager.optimizer is optimizer
        assert [Path(kept).parent for kept in optimizer.engine.checkpoints.kept] == place[2:]
        losses.append(run.step(4))
    saved = torch.load(place[3] / "optim.pt", weights_only=False)
    assert saved[POINTER] == "optimizer"
    resumed = trained(tmp_path / "others")
    with resumed.optimizer as optimizer:
        verl.manager(resumed.model, optimizer).load_checkpoint(str(place[3]))
        assert resumed.step(4) == losses[4]
        assert all(map(torch.equal, run.model.parameters(), resumed.model.parameters()))

    other = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    with pytest.raises(CheckpointError, match="optimizer_impl=offload"):
        verl.manager(run.model, other).load_checkpoint(str(place[3]))


def test_a_checkpoint_of_torchs_optimizer_is_gone_on_from(verl: SimpleNamespace, tmp_path: Path) -> None:
    integration.enable()
    run = trained(tmp_path / "paths")
    with run.optimizer as optimizer:
        torch.manual_seed(1)
        other = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
        run.model(torch.randn(2, 32)).sum().backward()
        other.step()
        other.zero_grad()
        verl.manager(run.model, other).save_checkpoint(str(tmp_path / "torch"))
        verl.manager(run.model, optimizer).load_checkpoint(str(tmp_path / "torch"))
        for parameter in run.model.parameters():
            assert torch.equal(optimizer.state[parameter]["exp_avg"], other.state[parameter]["exp_avg"])


def test_gradients_that_leave_are_refused_as_verl_clips_them(verl: SimpleNamespace, tmp_path: Path) -> None:
    integration.enable()
    run = trained(tmp_path / "paths", keep_grads=False)
    with run.optimizer as optimizer, pytest.raises(ConfigError, match="verl clips gradients itself"):
        verl.manager(run.model, optimizer)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def offload_fsdp_optimizer(optimizer)", "def offload(optimizer)", "offload_fsdp_optimizer is gone"),
        ("(optimizer, device_id)", "(device_id, optimizer)", r"load_fsdp_optimizer\(device_id, optimizer\) took"),
        ("class FSDPCheckpointManager", "class Manager", "FSDPCheckpointManager"),
        ("local_path, hdfs_path=None, g", "path, hdfs_path=None, g", r"save_checkpoint\(self, path, .* took"),
        ("self.optimizer.load_state_dict", "load", "load_checkpoint does not use load_state_dict"),
    ],
)
def test_a_verl_that_has_moved_is_named(
    old: str, new: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    write(tmp_path, **{old: new, "import load_fsdp_optimizer, offload_fsdp_optimizer": "import *"})
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ConfigError, match=f"use one of 0.9.1: .*{says}"):
            integration.enable()
    finally:
        forget()


def test_a_verl_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ConfigError, match="pip install verl"):
        integration.enable()


def run(folder: Path, steps: int, *rest: str) -> list[dict[str, Any]]:
    """Return what two ranks say."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *prepared.torchrun(2), str(PROGRAM), str(folder), str(steps), *rest],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"losses')]
    return sorted(lines, key=lambda line: int(line["rank"]))


@pytest.mark.slow
@needs_verl
@needs_park
def test_verls_engine_trains_in_phases_and_resumes(tmp_path: Path) -> None:
    """In ranks of FSDP2: parked after each step, or never; saved and resumed; with the same bits."""
    whole = run(tmp_path / "whole", 6, "phases=no")
    parked = run(tmp_path / "parked", 6, "save=3", "keep=2", "external=yes")
    resumed = run(tmp_path / "parked", 6, f"resume={tmp_path / 'parked' / 'global_step_5'}")
    for rank in range(2):
        assert [is_parked for is_parked, _ in parked[rank]["parked"]] == [True] * 6
        assert all(away > 0 for _, away in parked[rank]["parked"])
        assert not any(is_parked for is_parked, _ in whole[rank]["parked"])
        for key in ("losses", "norms", "weights"):
            assert parked[rank][key] == whole[rank][key]
        assert resumed[rank]["weights"] == whole[rank]["weights"]
        assert resumed[rank]["losses"] == whole[rank]["losses"][5:]
        assert set(parked[rank]["kept"]) <= {"global_step_5", "global_step_6"}
    assert {"COMMIT"} <= set(os.listdir(tmp_path / "parked" / "global_step_6" / "optimizer"))


@pytest.mark.slow
@needs_verl
def test_verls_engine_goes_on_from_torchs_optimizer(tmp_path: Path) -> None:
    run(tmp_path / "torch", 4, "impl=torch.optim", "save=4")
    resumed = run(tmp_path / "ours", 6, f"resume={tmp_path / 'torch' / 'global_step_4'}", "phases=no")
    whole = run(tmp_path / "whole", 6, "impl=torch.optim")
    for mine, theirs in zip(resumed, whole, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"][4:], rel=1e-4)
