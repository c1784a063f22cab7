"""The DeepSpeed backend where weights are: given gradients must end in the same bits on a GPU as on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from test_deepspeed import start

NAME = "alone_given_gradients"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and (os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()):
        pytest.skip("torch sees no CUDA device, or TRITON_INTERPRET is set")
    return str(request.param)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_has_the_bits_of_the_cpu(accelerator: str, tmp_path: Path) -> None:
    """Against what stock DeepSpeed computes on the CPU with the reference's arithmetic."""
    wanted, mine = tmp_path / "stock", tmp_path / "ours"
    for folder, variables in ((wanted, {"GIVEN": "stock"}), (mine, {"GIVEN": "ours", "DS_ACCELERATOR": accelerator})):
        folder.mkdir()
        assert start(1, folder, (NAME,), **variables) == {NAME: "ok"}
    expected, found = torch.load(wanted / "given.pt"), torch.load(mine / "given.pt")
    assert found.keys() == expected.keys()
    for case, tensors in expected.items():
        different = [name for name, tensor in tensors.items() if not torch.equal(found[case][name], tensor)]
        assert not different, f"{case}: {different}"
