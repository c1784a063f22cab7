"""What torch's own optimizers take: options that change nothing, NumPy's numbers, a compiled training step."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offload

KINDS = (offload.AdamW, offload.Adam, offload.Lion, offload.Adagrad, offload.SGD)


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(dtype)


def streamed(path: Path) -> offload.OffloadConfig:
    return offload.OffloadConfig(host_memory=0, paths=[path], subgroup_numel=1024, threads=1)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_change_nothing_are_taken_and_others_named(kind: Any) -> None:
    for options in (
        {"fused": True},
        {"foreach": False, "fused": None},
        {"capturable": False, "differentiable": False},
    ):
        kind(model().parameters(), **options).close()
    for name in ("capturable", "differentiable"):
        with pytest.raises(offload.ConfigError, match=name):
            kind(model().parameters(), **{name: True})
    with pytest.raises(TypeError, match=rf"{kind.__name__}.*'fuzed'"):
        kind(model().parameters(), fuzed=True)


def test_numbers_may_be_numpys(tmp_path: Path) -> None:
    weights = []
    for number in (float, np.float64, lambda x: np.array(x), lambda x: torch.tensor(x, dtype=torch.float64)):
        trained = model()
        beta = np.float64 if number is np.float64 else float
        optimizer = offload.AdamW(
            trained.parameters(),
            lr=number(0.1),
            betas=(beta(0.9), beta(0.95)),
            eps=beta(1e-8),
            weight_decay=beta(0.1),
        )
        with optimizer:
            trained(batch(0)).sum().backward()
            optimizer.clip_grad_norm_(number(1.0))
            optimizer.step()
            optimizer.save_checkpoint(tmp_path / str(len(weights)))
            optimizer.wait_checkpoint()
            optimizer.load_checkpoint(tmp_path / str(len(weights)))
        weights.append([parameter.detach().clone() for parameter in trained.parameters()])
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_training_step_may_be_compiled(tmp_path: Path, backend: str) -> None:
    plain, compiled = model(), model()
    finals = []
    for trained, wrap in ((plain, lambda step: step), (compiled, torch.compile(backend=backend))):
        optimizer = offload.AdamW(trained.parameters(), lr=0.01, offload=streamed(tmp_path))

        def step(inputs: torch.Tensor, trained: Any = trained, optimizer: Any = optimizer) -> torch.Tensor:
            loss = trained(inputs).square().mean()
            loss.backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        with optimizer:
            run = wrap(step)
            losses = [run(batch(number)).item() for number in range(4)]
        finals.append((losses, [parameter.detach().clone() for parameter in trained.parameters()]))
    assert finals[0][0] == pytest.approx(finals[1][0], rel=1e-6)
    for a, b in zip(finals[0][1], finals[1][1], strict=True):
        torch.testing.assert_close(a, b)
    assert finals[0][0][0] != finals[0][0][-1]


@pytest.mark.parametrize(
    ("dtype", "stepped", "warned"),
    [(torch.float32, True, False), (torch.bfloat16, False, False), (torch.bfloat16, True, True)],
)
def test_changed_weights_are_warned_of_where_something_is_lost(
    dtype: torch.dtype, stepped: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The usual way to resume loads weights before anything was trained, which is no reason for a warning."""
    trained = model(dtype)
    with offload.AdamW(trained.parameters()) as optimizer:
        if stepped:
            trained(batch(0).to(dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.load_state_dict(copy.deepcopy(trained.state_dict()))
        trained(batch(1).to(dtype)).sum().backward()
        optimizer.step()
        for parameter in trained.parameters():
            state = optimizer.state_for(parameter)
            assert torch.equal(state["master"].to(dtype), parameter.detach())
    told = [record for record in caplog.records if "changed outside" in record.getMessage()]
    assert [record.levelno for record in told] == ([logging.WARNING] if warned else [])
