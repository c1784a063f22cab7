"""The DeepSpeed backend where weights are: given gradients must end in the same bits on a GPU as on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from test_deepspeed import start

NAME = "alone_given_gradients"


CUDA = [pytest.param(f"cuda, {placement}", marks=pytest.mark.gpu) for placement in ("auto", "cpu", "0.5", "gpu")]


@pytest.fixture(scope="module", params=["cpu", *CUDA])
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    accelerator, _, placement = request.param.partition(", ")
    if accelerator == "cuda" and (os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()):
        pytest.skip("torch sees no CUDA device, or TRITON_INTERPRET is set")
    return {"DS_ACCELERATOR": accelerator, **({"PLACEMENT": placement} if placement else {})}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_has_the_bits_of_the_cpu(variables: dict[str, str], tmp_path: Path) -> None:
    """Against what stock DeepSpeed computes on the CPU with the reference's arithmetic."""
    wanted, mine = tmp_path / "stock", tmp_path / "ours"
    for folder, given in ((wanted, {"GIVEN": "stock"}), (mine, {"GIVEN": "ours", **variables})):
        folder.mkdir()
        assert start(1, folder, (NAME,), **given) == {NAME: "ok"}
    expected, found = torch.load(wanted / "given.pt"), torch.load(mine / "given.pt")
    assert found.keys() == expected.keys()
    for case, tensors in expected.items():
        different = [name for name, tensor in tensors.items() if not torch.equal(found[case][name], tensor)]
        assert not different, f"{case}: {different}"
