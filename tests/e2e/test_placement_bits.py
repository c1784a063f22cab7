"""N steps through the engine equal N steps of the reference bit for bit, whatever the placement."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mirror import Mirror

import offload

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

SHAPES = st.one_of(
    st.tuples(st.integers(0, 6000)),
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.just(()),
)

GROUPS = st.lists(
    st.fixed_dictionaries(
        {
            "shapes": st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=5),
            "lr": st.sampled_from([1e-3, 0.1, 3e-4]),
            "betas": st.sampled_from([(0.9, 0.95), (0.0, 0.999), (0.8, 0.5)]),
            "eps": st.sampled_from([1e-8, 1e-3]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "maximize": st.booleans(),
        }
    ),
    min_size=1,
    max_size=3,
)


def make_groups(specs: list[dict[str, Any]], generator: torch.Generator) -> list[dict[str, Any]]:
    groups = []
    for spec in specs:
        parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in spec["shapes"]
        ]
        groups.append({"params": parameters, **{key: spec[key] for key in spec if key != "shapes"}})
    return groups


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    specs=GROUPS,
    decoupled=st.booleans(),
    subgroup_numel=st.sampled_from([1024, 2048, 5000, 1 << 20]),
    budget=st.floats(0, 1),
    staging_slots=st.integers(1, 5),
    path_count=st.integers(1, 4),
    threads=st.integers(1, 3),
    checksum=st.booleans(),
    io_backend=st.sampled_from(["auto", "threads", "asyncio"]),
    depth=st.sampled_from([None, 1, 2, 5]),
    fixed_shares=st.booleans(),
    clip=st.booleans(),
    seed=st.integers(0, 1 << 30),
    steps=st.integers(1, 4),
)
def test_engine_equals_reference_bit_for_bit(
    specs: list[dict[str, Any]],
    decoupled: bool,
    subgroup_numel: int,
    budget: float,
    staging_slots: int,
    path_count: int,
    threads: int,
    checksum: bool,
    io_backend: str,
    depth: int | None,
    fixed_shares: bool,
    clip: bool,
    seed: int,
    steps: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = make_groups(specs, generator)
    mirror = Mirror(groups, decoupled=decoupled)
    numel = sum(p.numel() for group in groups for p in group["params"])
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number in range(path_count):
            share = number + 1 if fixed_shares else None
            paths.append({"path": str(Path(folder) / str(number)), "share": share, "depth": depth})
            Path(paths[-1]["path"]).mkdir()
        config = offload.OffloadConfig(
            host_memory=int(12 * numel * budget),
            paths=paths,
            staging_memory=12 * subgroup_numel * staging_slots,
            subgroup_numel=subgroup_numel,
            threads=threads,
            checksum=checksum,
            io_backend=io_backend,
        )
        kind = offload.AdamW if decoupled else offload.Adam
        with kind(groups, offload=config) as optimizer:
            for _ in range(steps):
                gradients = []
                for group in groups:
                    row = []
                    for parameter in group["params"]:
                        absent = torch.rand((), generator=generator) < 0.2
                        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                        parameter.grad = None if absent else gradient.clone()
                        row.append(None if absent else gradient)
                    gradients.append(row)
                factor = 1.0
                if clip:
                    norm = float(optimizer.clip_grad_norm_(0.5))
                    assert norm == mirror.norm(gradients)
                    factor = min(1.0, 0.5 / (norm + 1e-6))
                optimizer.step()
                mirror.step(gradients, factor)
            mirror.assert_same(optimizer, groups)
        assert [list(Path(path["path"]).iterdir()) for path in paths] == [[]] * path_count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_stays_near_torch_over_200_steps(tmp_path: Path, dtype: torch.dtype) -> None:
    """Against torch's AdamW on fp32 masters: after 200 steps within 1e-5 of the weights' scale (last bits)."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(5000, generator=generator).to(dtype)
    ours = torch.nn.Parameter(start.clone())
    theirs = torch.nn.Parameter(start.float())
    settings_ = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    config = offload.OffloadConfig(host_memory=0, paths=[tmp_path], subgroup_numel=1024)
    torch_optimizer = torch.optim.AdamW([theirs], **settings_)
    with offload.AdamW([ours], **settings_, offload=config) as optimizer:
        for _ in range(200):
            gradient = torch.randn(5000, generator=generator).to(dtype)
            ours.grad, theirs.grad = gradient.clone(), gradient.float()
            optimizer.step()
            torch_optimizer.step()
        master = optimizer.state_for(ours)["master"]
    assert torch.allclose(master, theirs.detach(), rtol=1e-5, atol=1e-5)
