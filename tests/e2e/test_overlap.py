"""What of a step's traffic lies in the step, and what is left of it afterwards."""

from __future__ import annotations

from pathlib import Path

import torch

import offload
from offload.schedule.staging import Phase


def test_a_step_returns_when_all_is_updated_and_leaves_nothing_to_move(tmp_path: Path) -> None:
    subgroups, slots, numel = 12, 5, 4096
    weight = torch.nn.Parameter(torch.zeros(subgroups * numel).bfloat16())
    config = offload.OffloadConfig(
        host_memory=0, paths=[tmp_path], subgroup_numel=numel, staging_memory=slots * 12 * numel
    )
    with offload.AdamW([weight], offload=config) as optimizer:
        machine = optimizer.engine._parts.machine
        for step in range(4):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            assert machine.in_flight == 0
            assert machine.phases.count(Phase.DIRTY) == slots  # the next step's first
            assert machine.phases.count(Phase.ABSENT) == subgroups - slots
            least = (subgroups - slots) * 12 * numel
            metrics = optimizer.metrics()
            assert metrics["path/0/read_bytes"] == (least if step else 0)  # the first finds no state
            assert metrics["path/0/write_bytes"] == least
