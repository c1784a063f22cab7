"""What a `SaveRequest` may say, and what it may not: nothing is released for a checkpoint that nobody could read."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import CheckpointError, ConfigError, OffloadConfig, SaveRequest
from offload.tiers.filesystem import replacing


def optimizer_of(model: torch.nn.Module, path: Path) -> offload.AdamW:
    config = OffloadConfig(paths=[path], host_memory=0, subgroup_numel=1024)
    return offload.AdamW(model.parameters(), lr=1e-2, offload=config)


def step(model: torch.nn.Module, optimizer: offload.AdamW) -> None:
    model(torch.ones(2, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


WRONG: list[dict[str, Any]] = [
    {"id": str(uuid.UUID(int=1))},
    {"id": "A" * 32},
    {"id": "../" + "a" * 29},
    {"id": 5},
    {"ranks": 0},
    {"ranks": "2"},
    {"rank": -1},
    {"rank": 1},
    {"rank": True, "ranks": 2},
    {"metadata": [1]},
    {"metadata": None},
    {"extra": bytearray(b"a")},
    {"extra": 3},
    {"names": [1]},
    {"names": {"a": 5}},
    {"names": {"a": "\ud800"}},
    {"copy": "yes"},
    {"on_done": 5},
    {"on_commit": None},
    {"find_ended": None},
]


def test_what_cannot_be_saved_is_refused_where_it_is_said() -> None:
    for wrong in WRONG:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SaveRequest("here", **wrong)


def test_two_parameters_of_one_name_are_refused_and_training_goes_on(tmp_path: Path) -> None:
    model = torch.nn.Linear(32, 32)
    with optimizer_of(model, tmp_path) as optimizer:
        step(model, optimizer)
        first, second = (parameter.name for parameter in optimizer.engine.plan.layout.parameters)
        with pytest.raises(ConfigError, match="names"):
            optimizer.engine.checkpoints.save(SaveRequest(tmp_path / "ck", names={first: second}))
        assert not (tmp_path / "ck" / "COMMIT").exists()
        step(model, optimizer)


def test_who_is_part_of_a_checkpoint_cannot_wait_for_it(tmp_path: Path) -> None:
    model, errors = torch.nn.Linear(32, 32), []
    with optimizer_of(model, tmp_path) as optimizer:
        step(model, optimizer)
        checkpoints = optimizer.engine.checkpoints

        def waits() -> None:
            for call in (checkpoints.wait, lambda: checkpoints.save(SaveRequest(tmp_path / "other"))):
                with pytest.raises(CheckpointError, match="on_done"):
                    call()
                errors.append(call)

        checkpoints.save(SaveRequest(tmp_path / "ck", on_commit=waits))
        checkpoints.wait()
        step(model, optimizer)
    assert len(errors) == 2


def test_two_who_write_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "out"
    (tmp_path / "out.partial").write_bytes(b"what a killed one has left" * 10)
    with replacing(path, "out.partial", is_new=True) as file:
        with pytest.raises(OSError, match="somebody else"), replacing(path, "out.partial", is_new=True):
            pass
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    with pytest.raises(FileExistsError), replacing(path, "out.partial", is_new=True) as file:
        file.write(b"other")
    assert [*tmp_path.iterdir()] == [path]


def test_a_child_that_was_forked_meanwhile_keeps_no_file_locked(tmp_path: Path) -> None:
    """As a worker of a DataLoader, begun while a checkpoint is committed."""
    path, (ready, go) = tmp_path / "out", os.pipe()
    with replacing(path, "out.partial") as file:
        child = os.fork()
        if not child:
            os.close(go)
            os.read(ready, 1)  # until the other process has written again
            os._exit(0)
        file.write(b"first")
    try:
        with replacing(path, "out") as file:
            file.write(b"second")
    finally:
        os.close(go)
        os.close(ready)
        os.waitpid(child, 0)
    assert path.read_bytes() == b"second"
