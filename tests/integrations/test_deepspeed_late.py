"""The DeepSpeed backend on the test accelerator: weights and gradients on a device whose streams dawdle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from accelerator import build
from test_deepspeed import start

NAME = "alone_on_an_accelerator"


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        build.library()
    except build.CannotBuild as error:
        pytest.skip(f"no test accelerator: {error}")


@pytest.fixture(scope="module", params=[1, 2])
def on_cpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Return a number of ranks, and where they have left what DeepSpeed and the engine compute on the CPU."""
    folder = tmp_path_factory.mktemp("cpu")
    assert start(request.param, folder, (NAME,)) == {NAME: "ok"}
    return request.param, folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_every_stage_has_the_bits_of_the_cpu(on_cpu: tuple[int, Path], seed: int, tmp_path: Path) -> None:
    """Losses, norms, weights and state, whatever runs late; a checkpoint goes on as what it was taken of."""
    world, expected_in = on_cpu
    assert start(world, tmp_path, (NAME,), DELAYS=str(seed)) == {NAME: "ok"}
    for rank in range(world):
        expected, found = (torch.load(folder / f"trained-{rank}.pt") for folder in (expected_in, tmp_path))
        for number, ((losses, state), (mine, own)) in enumerate(zip(expected, found, strict=True)):
            assert mine == losses, f"case {number}"
            assert own.keys() == state.keys()
            assert not [name for name, tensor in state.items() if not torch.equal(own[name], tensor)], f"case {number}"
