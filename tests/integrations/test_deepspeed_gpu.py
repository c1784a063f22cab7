"""The DeepSpeed backend where weights are: given gradients must end in the same bits on a GPU as on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from test_deepspeed import start

NAME = "alone_given_gradients"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What stock DeepSpeed computes on the CPU with the reference's arithmetic."""
    folder = tmp_path_factory.mktemp("expected")
    assert start(1, folder, (NAME,), GIVEN="stock") == {NAME: "ok"}
    return torch.load(folder / "given.pt")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_stage_has_the_bits_of_the_cpu(
    accelerator: str, expected: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    if accelerator == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    variables = {"GIVEN": "ours", "DS_ACCELERATOR": accelerator}
    if accelerator == "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set")
    assert start(1, tmp_path, (NAME,), **variables) == {NAME: "ok"}
    found = torch.load(tmp_path / "given.pt")
    assert found.keys() == expected.keys()
    for case, tensors in expected.items():
        different = [name for name, tensor in tensors.items() if not torch.equal(found[case][name], tensor)]
        assert not different, f"{case}: {different}"
