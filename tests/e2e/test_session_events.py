"""A live session changes its machine by events alone: given them again, another machine decides the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recorded import Recorded, assert_replays

import offload
from offload.schedule import operations
from offload.session import parts


@pytest.mark.slow
def test_a_session_is_its_list_of_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "Machine", Recorded)
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    met: set[type] = set()
    for life in range(2):
        weights = [torch.nn.Parameter(torch.ones(20_000)) for _ in range(3)]
        config = offload.OffloadConfig(paths=paths, host_memory=60_000, staging_memory=50_000, subgroup_numel=4096)
        groups = [{"params": weights[:2]}, {"params": weights[2:]}]
        with offload.AdamW(groups[: life + 1], offload=config) as optimizer:
            machine = optimizer.engine._parts.machine
            if life:
                optimizer.load_checkpoint(tmp_path / "2")
            for number in range(3):
                if number == 1 and not life:
                    optimizer.add_param_group(groups[1])
                for weight in weights:
                    weight.grad = torch.full_like(weight, 0.1)
                optimizer.step()
                optimizer.save_checkpoint(tmp_path / str(number + 10 * life))
                optimizer.wait_checkpoint()
            optimizer.state_for(weights[0])
        assert_replays(machine)
        met |= {type(event) for event in machine.events}
    assert {operations.Extend, operations.Reshare, operations.OutcomeTold, operations.ReleaseSave} < met
    assert operations.TakeOver in met
