"""verl's FSDP engines with our optimizers: parked between phases, saved into folders, resumed exactly.

verl itself brings Ray and much more, so that most tests take a package that has its functions in short for it. Tests
of its engine are left out where it is not installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from started import end, start

import offload
from offload import CheckpointError, ConfigError
from offload.combinations import VERL_CLIPS, VERL_GENERATES, Row
from offload.integrations import verl as integration
from offload.integrations.shared import POINTER

PROGRAM = Path(__file__).with_name("verl_runs.py")
SETTINGS = {"host_memory": "64KiB", "subgroup_numel": 2048, "staging_memory": "256KiB", "threads": 1}
needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: pip install verl")

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
        if local_path is None:
            return
        self.model.load_state_dict(torch.load(os.path.join(local_path, "model.pt")))
        if self.should_load_optimizer:
            state_dict = torch.load(os.path.join(local_path, "optim.pt"), weights_only=False)
            if "state" not in state_dict and "param_groups" not in state_dict:
                state_dict = {**self.optimizer.state_dict(), **state_dict}
            self.optimizer.load_state_dict(state_dict)

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        if local_path is None:
            return
        if max_ckpt_to_keep and len(self.saved) >= max_ckpt_to_keep:
            shutil.rmtree(self.saved.pop(0))
        os.makedirs(local_path, exist_ok=True)
        torch.save(self.model.state_dict(), os.path.join(local_path, "model.pt"))
        if self.should_save_optimizer:
            torch.save(self.optimizer.state_dict(), os.path.join(local_path, "optim.pt"))
        self.saved.append(local_path)
""",
    "engine.py": "from verl.utils.fsdp_utils import load_fsdp_optimizer, offload_fsdp_optimizer",
    "late.py": "from verl.utils.fsdp_utils import load_fsdp_optimizer, offload_fsdp_optimizer",
}
"""What verl has of what is relied on; `engine` and `late` import the helpers by their names."""


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


def trained(folder: Path, kind: Any = offload.AdamW, **options: Any) -> SimpleNamespace:
    """Return a model, an optimizer of ours, and what makes a step of them as verl's engine does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    folder.mkdir(exist_ok=True)
    optimizer = kind(model.parameters(), lr=1e-2, offload={**SETTINGS, "paths": [str(folder)], **options})

    def backward(number: int) -> float:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        return float(loss.item())

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    def step(number: int) -> float:
        loss = backward(number)
        update()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, backward=backward, update=update)


def test_ours_are_parked_where_verl_offloads_and_others_are_left_to_it(verl: SimpleNamespace, tmp_path: Path) -> None:
    """An engine offloads once before its first step, and loads before each."""
    integration.enable(keep_host=False)
    mine, plain = trained(tmp_path / "mine"), trained(tmp_path / "plain")
    with mine.optimizer as optimizer, plain.optimizer:
        verl.engine.offload_fsdp_optimizer(optimizer)
        for number in range(4):
            assert optimizer.engine.is_parked
            verl.engine.load_fsdp_optimizer(optimizer, "cpu")
            assert not optimizer.engine.is_parked
            assert mine.step(number) == plain.step(number)
            verl.engine.offload_fsdp_optimizer(optimizer)
            assert optimizer.metrics()["park/away_bytes"] > 0
        verl.engine.load_fsdp_optimizer(plain.optimizer, "cpu")  # it was not parked
        assert all(map(torch.equal, mine.model.parameters(), plain.model.parameters()))
    other = torch.optim.AdamW(mine.model.parameters())
    verl.engine.offload_fsdp_optimizer(other)
    assert other.said == "offload"
    verl.utils.load_fsdp_optimizer(other, 3)
    assert other.said == "load 3"


def test_state_in_host_memory_stays_there_unless_it_is_said(verl: SimpleNamespace, tmp_path: Path) -> None:
    integration.enable()
    run = trained(tmp_path / "paths", host_memory="1MiB")
    with run.optimizer as optimizer:
        run.step(0)
        verl.engine.offload_fsdp_optimizer(optimizer)
        assert optimizer.engine.is_parked
        assert optimizer.metrics()["park/away_bytes"] == 0
        assert optimizer.metrics()["park/given_back_bytes"] > 0
        integration.enable(keep_host=False)
        verl.engine.offload_fsdp_optimizer(optimizer)
        assert optimizer.metrics()["park/away_bytes"] > 0


def test_an_optimizer_waits_with_gradients_that_no_step_has_used(verl: SimpleNamespace, tmp_path: Path) -> None:
    """Workers for Tinker leave training, and enter it again, between backward and the step."""
    integration.enable(keep_host=False)
    mine, plain = trained(tmp_path / "mine"), trained(tmp_path / "plain")
    with mine.optimizer as optimizer, plain.optimizer:
        for number in range(3):
            plain.step(number)
            mine.backward(number)
            verl.engine.offload_fsdp_optimizer(optimizer)
            assert not optimizer.engine.is_parked
            verl.engine.load_fsdp_optimizer(optimizer, "cpu")
            mine.update()
            verl.engine.offload_fsdp_optimizer(optimizer)
            assert optimizer.engine.is_parked
        assert all(map(torch.equal, mine.model.parameters(), plain.model.parameters()))


def test_verl_is_itself_again_afterwards(verl: SimpleNamespace) -> None:
    """Also where modules have been imported meanwhile, and whoever was enabled twice."""
    helpers = ("offload_fsdp_optimizer", "load_fsdp_optimizer")
    stock = {name: vars(verl.utils)[name] for name in helpers}
    methods = dict(vars(verl.manager))
    for keep_host in (False, True):
        integration.enable(keep_host)
    late = importlib.import_module("verl.late")
    for module in (verl.utils, verl.engine, late):
        assert all(vars(module)[name] is not stock[name] for name in helpers)
    for _ in range(2):
        integration.disable()
        for module in (verl.utils, verl.engine, late):
            assert {name: vars(module)[name] for name in helpers} == stock
        assert dict(vars(verl.manager)) == methods


@pytest.mark.parametrize(("field", "size"), [("host_memory", "much"), ("gpu_memory", -1)])
def test_a_size_that_is_none_is_refused_at_once(verl: SimpleNamespace, field: str, size: Any) -> None:
    stock = verl.engine.offload_fsdp_optimizer
    with pytest.raises(ConfigError, match=field):
        integration.enable(**{field: size})
    assert verl.engine.offload_fsdp_optimizer is stock


@pytest.mark.parametrize("kind", [offload.AdamW, offload.SGD])
def test_checkpoints_have_a_folder_and_are_gone_on_from(verl: SimpleNamespace, tmp_path: Path, kind: Any) -> None:
    """State on the paths is given back with the checkpoints that verl deletes; others go on by what was saved."""
    importlib.import_module("offload.integrations.verl.enabled")
    integration.enable(keep_host=False)
    place = [tmp_path / f"global_step_{number}" for number in range(4)]
    run = trained(tmp_path / "paths", kind, checkpoints_kept=2)
    with run.optimizer as optimizer:
        manager = verl.manager(run.model, optimizer)
        losses = []
        for number in range(4):
            losses.append(run.step(number))
            verl.engine.offload_fsdp_optimizer(optimizer)
            manager.save_checkpoint(local_path=str(place[number]), max_ckpt_to_keep=2)
            assert optimizer.engine.is_parked
            assert manager.optimizer is optimizer
        assert [Path(kept).parent for kept in optimizer.engine.checkpoints.kept] == place[2:]
        losses.append(run.step(4))
    saved = torch.load(place[3] / "optim.pt", weights_only=False)
    assert saved[POINTER] == "optimizer"
    resumed = trained(tmp_path / "others", kind)
    with resumed.optimizer as optimizer:
        verl.engine.offload_fsdp_optimizer(optimizer)  # as engines do when they are made
        verl.manager(resumed.model, optimizer).load_checkpoint(str(place[3]))
        verl.engine.offload_fsdp_optimizer(optimizer)
        assert resumed.step(4) == losses[4]
        assert all(map(torch.equal, run.model.parameters(), resumed.model.parameters()))

    other = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    manager = verl.manager(run.model, other)
    with pytest.raises(CheckpointError, match="optimizer_impl=offload"):
        manager.load_checkpoint(str(place[3]))
    assert manager.optimizer is other


def test_a_checkpoint_of_torchs_optimizer_is_gone_on_from(verl: SimpleNamespace, tmp_path: Path) -> None:
    """By ours and by torch's own, also where a folder of ours is left over beside it."""
    integration.enable()
    run = trained(tmp_path / "paths")
    with run.optimizer as optimizer:
        verl.manager(run.model, optimizer).save_checkpoint(str(tmp_path / "torch"))
        torch.manual_seed(1)
        other = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
        run.model(torch.randn(2, 32)).sum().backward()
        other.step()
        other.zero_grad()
        verl.manager(run.model, other).save_checkpoint(str(tmp_path / "torch"))
        another = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
        for loading in (optimizer, another):
            verl.manager(run.model, loading).load_checkpoint(str(tmp_path / "torch"))
            for parameter in run.model.parameters():
                assert torch.equal(loading.state[parameter]["exp_avg"], other.state[parameter]["exp_avg"])


def test_an_engine_without_an_optimizer_and_a_place_that_is_none_are_left_to_verl(verl: SimpleNamespace) -> None:
    integration.enable()
    manager = verl.manager(torch.nn.Linear(2, 2))
    manager.load_checkpoint(None)
    manager.save_checkpoint(None)
    assert manager.saved == []


@pytest.mark.parametrize(
    ("setting", "value", "row"), [("keep_grads", False, VERL_CLIPS), ("overlap", "forward", VERL_GENERATES)]
)
def test_what_verls_engine_cannot_do_is_refused_when_it_is_made(
    verl: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any, row: Row
) -> None:
    """The config is a stand-in for one with weights on a GPU."""
    integration.enable()
    run = trained(tmp_path / "paths")
    with run.optimizer as optimizer:
        monkeypatch.setattr(optimizer._holder, "config", dataclasses.replace(optimizer.config, **{setting: value}))
        with pytest.raises(ConfigError, match=re.escape(row.advice)):
            verl.manager(run.model, optimizer)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def offload_fsdp_optimizer(optimizer)", "def offload(optimizer)", "offload_fsdp_optimizer is gone"),
        ("(optimizer, device_id)", "(device_id, optimizer)", r"load_fsdp_optimizer\(device_id, optimizer\) took"),
        ("class FSDPCheckpointManager", "class Manager", "FSDPCheckpointManager"),
        ("local_path, hdfs_path=None, g", "path, hdfs_path=None, g", r"save_checkpoint\(self, path, .* took"),
        ("self.optimizer.state_dict(), os", "{}, os", "save_checkpoint does not use optimizer"),
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
    return end(start(PROGRAM, folder, steps, *rest, ranks=2, python=sys.executable))[0]


@pytest.mark.slow
@needs_verl
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_verls_engine_trains_in_phases_and_resumes(tmp_path: Path, strategy: str) -> None:
    """In ranks: parked after each step, or never; saved and resumed; with the same bits."""
    which = f"strategy={strategy}"
    whole = run(tmp_path / "whole", 6, which, "phases=no")
    parked = run(tmp_path / "parked", 6, which, "save=3", "keep=2", "keep_host=no")
    resumed = run(tmp_path / "parked", 6, which, f"resume={tmp_path / 'parked' / 'global_step_5'}")
    for rank in range(2):
        assert [is_parked for is_parked, *_ in parked[rank]["parked"]] == [True] * 6
        assert all(away > 0 for _, away, _ in parked[rank]["parked"])
        assert [(away, given > 0) for _, away, given in resumed[rank]["parked"]] == [(0, True)]
        assert not any(is_parked for is_parked, *_ in whole[rank]["parked"])
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
