"""Whoever trains little beside frozen weights is told once that there is little to offload."""

from __future__ import annotations

import pytest
import torch

import offload
from offload.optim import frozen


def weights(frozen_numel: int) -> list[torch.nn.Parameter]:
    base = torch.nn.Parameter(torch.ones(frozen_numel, dtype=torch.bfloat16), requires_grad=False)
    return [base, torch.nn.Parameter(torch.ones(1024, dtype=torch.bfloat16))]


@pytest.mark.parametrize(("frozen_numel", "is_told"), [(1 << 20, True), (24 * 1024, False), (0, False)])
def test_little_state_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, frozen_numel: int, is_told: bool
) -> None:
    monkeypatch.setattr(frozen, "is_told", False)
    caplog.set_level("INFO", "offload")
    for _ in range(2):
        with offload.AdamW(weights(frozen_numel), offload={}):
            pass
    said = [record for record in caplog.records if "little to offload" in record.getMessage()]
    assert len(said) == is_told
    for record in said:
        assert record.levelname == "INFO"
        assert "12.0 KiB of optimizer state beside 2.0 MiB of frozen weights" in record.getMessage()


def test_a_base_of_quantised_weights_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frozen, "is_told", False)
    caplog.set_level("INFO", "offload")
    base = torch.nn.Parameter(torch.ones(1 << 20, dtype=torch.uint8), requires_grad=False)
    frozen.tell_little(0, [base])  # what does not train at all has no state
    assert not caplog.records
    frozen.tell_little(1024, [base])
    assert "1.0 MiB of frozen weights" in caplog.text
