"""Saved tensors of a model on the test accelerator leave for the paths through pinned memory: the CPU's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload

pytestmark = [pytest.mark.late(shared=True)]

WIDTH, ROWS = 64, 256


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def data(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def trained(place: str, folder: Path, memory: str | None, steps: int = 3) -> list[torch.Tensor]:
    layers = model().to(place)
    config = offload.OffloadConfig(host_memory=0, paths=[folder], subgroup_numel=4096, checkpoints_kept=0)
    with offload.AdamW(layers.named_parameters(), lr=1e-2, offload=config) as optimizer:
        for seed in range(steps):
            x = data(seed).to(place)
            if memory is None:
                layers(x).square().mean().backward()
            else:
                with optimizer.activations_on_paths(layers, memory, least_bytes="16KiB"):
                    layers(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if memory is not None:
            figures = optimizer.metrics()
            assert figures["activations/packed_bytes"] > 0
            assert figures["activations/kept_bytes"] == 0
    return [parameter.detach().cpu() for parameter in layers.parameters()]


@pytest.mark.parametrize("memory", ["1MiB", "16MiB"])
@pytest.mark.parametrize("place", ["late", "late:1"])
def test_bits_are_those_of_tensors_that_stay(place: str, memory: str, tmp_path: Path):
    wanted = trained(place, tmp_path, None)
    found = trained(place, tmp_path, memory)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not [*tmp_path.iterdir()]
