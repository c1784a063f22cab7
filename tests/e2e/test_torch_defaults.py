"""torch's default dtype and default device are the user's own: weights and state do not depend on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import same_bits

import offload

DEFAULTS = [torch.bfloat16, "meta"]
SHAPES = ((100, 7), (2100,), ())


@contextlib.contextmanager
def defaults(default: torch.dtype | str | None) -> Iterator[None]:
    """Have torch make tensors of that dtype, or on that device, where nobody says otherwise."""
    if isinstance(default, str):
        with torch.device(default):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(default or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(s, generator=generator, dtype=torch.float32, device="cpu") for s in SHAPES]
    return [tensor.to(dtype) for tensor in drawn]


def weights(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(tensor) for tensor in draw(0, dtype)]


def step(optimizer: Any, parameters: list[torch.nn.Parameter], seed: int, dtype: torch.dtype) -> None:
    for parameter, gradient in zip(parameters, draw(seed, dtype), strict=True):
        parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient.to(parameter.device)
    optimizer.clip_grad_norm_(10.0)
    optimizer.step()
    optimizer.zero_grad()


def seen(optimizer: Any, parameters: list[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return weights and state, in every way in which it is handed out."""
    found = {}
    for number, parameter in enumerate(parameters):
        entries = {
            "state_for": optimizer.state_for(parameter),
            "state": optimizer.state[parameter],
            "state_dict": optimizer.state_dict()["state"][number],
        }
        found[f"{number}.weight"] = parameter.detach().clone()
        found |= {f"{number}.{how}.{name}": t for how, entry in entries.items() for name, t in entry.items()}
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


def run(default: torch.dtype | str | None, dtype: torch.dtype, folder: Path, **settings: Any) -> list[Any]:
    """Do all that an optimizer can; return what it left after each."""
    parameters, after = weights(dtype), []
    paths = [folder / "path"] if settings.get("host_memory") == 0 else []
    for path in paths:
        path.mkdir(parents=True)
    config = offload.OffloadConfig(paths=paths, subgroup_numel=1024, **settings)
    with offload.AdamW(parameters, lr=1e-2, offload=config) as optimizer:
        with defaults(default):
            step(optimizer, parameters, 1, dtype)
            step(optimizer, parameters, 2, dtype)
        saved, left = optimizer.state_dict(), [parameter.detach().clone() for parameter in parameters]
        after.append(seen(optimizer, parameters))
        with defaults(default):
            after.append(seen(optimizer, parameters))
            step(optimizer, parameters, 3, dtype)
            with torch.no_grad():
                for parameter, weight in zip(parameters, left, strict=True):
                    parameter.copy_(weight)
            optimizer.load_state_dict(saved)
            after.append(seen(optimizer, parameters))
            optimizer.load_state_dict(optimizer.state_dict())
            after.append(seen(optimizer, parameters))
            for name, copy in (("there", False), ("copy", True)):
                optimizer.save_checkpoint(folder / name, copy=copy, extra={"seed": draw(9, torch.float32)[0]})
                optimizer.wait_checkpoint()
                step(optimizer, parameters, 4, dtype)
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.zero_()
                extra = optimizer.load_checkpoint(folder / name)
                assert same_bits(extra["seed"], draw(9, torch.float32)[0])
                after.append(seen(optimizer, parameters))
            with offload.AdamW(late := weights(dtype), offload=config) as other:
                other.load_checkpoint(folder / "there")
                after.append(seen(other, late))
            step(optimizer, parameters, 5, dtype)
        after.append(seen(optimizer, parameters))
    return after


@pytest.mark.parametrize(
    ("dtype", "settings"), [(torch.float32, {}), (torch.bfloat16, {"host_memory": 0})], ids=["memory", "disk"]
)
@pytest.mark.parametrize("default", DEFAULTS, ids=str)
def test_the_defaults_change_nothing(
    tmp_path: Path, default: torch.dtype | str, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    usual = run(None, dtype, tmp_path / "usual", **settings)
    other = run(default, dtype, tmp_path / "other", **settings)
    for before, now in zip(usual, other, strict=True):
        assert same(before, now)
    for each in other:
        assert all(
            tensor.dtype == torch.float32 and tensor.device.type == "cpu"
            for name, tensor in each.items()
            if not name.endswith("weight")
        )
    states = [{name: t for name, t in each.items() if not name.endswith("weight")} for each in other]
    assert all(same(states[0], again) for again in states[1:4])


@pytest.mark.late(shared=True)
@pytest.mark.parametrize(
    ("gradient_dtype", "settings"),
    [("parameter", {}), ("float32", {"gpu_memory": 0, "placement": "cpu"}), ("parameter", {"placement": "gpu"})],
)
@pytest.mark.parametrize("default", DEFAULTS, ids=str)
def test_the_defaults_change_nothing_beside_a_gpu(
    tmp_path: Path, default: torch.dtype | str, gradient_dtype: str, settings: dict[str, Any]
) -> None:
    def trained(default: torch.dtype | str | None, folder: Path) -> dict[str, torch.Tensor]:
        parameters = [torch.nn.Parameter(weight.detach().to("late")) for weight in weights(torch.bfloat16)]
        config = offload.OffloadConfig(subgroup_numel=1024, gradient_dtype=gradient_dtype, **settings)
        with offload.AdamW(parameters, lr=1e-2, offload=config) as optimizer, defaults(default):
            for number in range(3):
                # An fp32 gradient of a 16-bit weight is wider than its slot, unless slots are fp32.
                step(optimizer, parameters, number, torch.float32 if number else torch.bfloat16)
            optimizer.save_checkpoint(folder, copy=True)
            optimizer.wait_checkpoint()
            step(optimizer, parameters, 3, torch.float32)
            optimizer.load_checkpoint(folder)
            optimizer.load_state_dict(optimizer.state_dict())
            step(optimizer, parameters, 4, torch.float32)
            return seen(optimizer, parameters)

    assert same(trained(None, tmp_path / "usual"), trained(default, tmp_path / "other"))
