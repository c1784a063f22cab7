"""Gradients belong to whoever holds them: what is written to them counts, and what is kept of them stays."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mirror import Mirror, same_bits

import offload

NUMEL = 20_000


def make(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(NUMEL, dtype=torch.float32).to(dtype))


def backward(parameter: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
    factors.view(-1)[0] = 50  # in the block with the largest sum, which no write touches
    (parameter * factors.to(parameter)).sum().backward()


def norm_of(gradient: torch.Tensor) -> float:
    return Mirror([]).norm([gradient])


# What is written past version counters


def write_data(gradient: torch.Tensor) -> None:
    gradient.data[9000:] = 0


def write_numpy(gradient: torch.Tensor) -> None:
    whole = gradient.data.view(torch.int16 if gradient.element_size() == 2 else torch.int32).numpy()
    whole[-1] ^= 1


def swap(gradient: torch.Tensor) -> None:
    at = gradient.data
    at[[7, NUMEL - 1]] = at[[NUMEL - 1, 7]]


def flip_sign(gradient: torch.Tensor) -> None:
    gradient.data[NUMEL // 2].neg_()


def write_dlpack(gradient: torch.Tensor) -> None:
    torch.from_dlpack(gradient.detach())[12_345] = 3


WRITES = [
    (write_data, torch.bfloat16),
    (write_numpy, torch.bfloat16),
    (write_numpy, torch.float32),
    (swap, torch.float16),
    (flip_sign, torch.bfloat16),
    (write_dlpack, torch.float32),
]


@pytest.mark.parametrize(("write", "dtype"), WRITES)
def test_a_norm_is_that_of_the_gradient_that_the_update_reads(
    streaming: Any, write: Callable[[torch.Tensor], None], dtype: torch.dtype
) -> None:
    parameter = make(dtype)
    mirror = Mirror([parameter], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    with offload.AdamW([parameter], lr=1e-2, offload=streaming(subgroup_numel=8192)) as optimizer:
        for step in range(3):
            backward(parameter, step)
            if step:
                backward(parameter, step + 10)  # accumulated
            optimizer.clip_grad_norm_(1e9)
            write(parameter.grad)
            expected = norm_of(parameter.grad)
            assert float(optimizer.clip_grad_norm_(1.0)) == expected
            gradient = parameter.grad.clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
            mirror.step([gradient], min(1.0, 1.0 / (expected + 1e-6)))
        assert same_bits(parameter.detach(), mirror.weights[0])


def test_wide_gradients_are_checked_as_they_are_kept(streaming: Any) -> None:
    parameter = make(torch.bfloat16)
    with offload.AdamW([parameter], offload=streaming(gradient_dtype="float32")) as optimizer:
        backward(parameter, 0)
        before = float(optimizer.clip_grad_norm_(1e9))
        assert before == norm_of(parameter.grad)
        parameter.grad.data[-1] = 1e3
        assert float(optimizer.clip_grad_norm_(1e9)) == norm_of(parameter.grad) != before


def summed(parameter: torch.Tensor, passes: int = 300) -> float:
    """Return what gradients of 1 sum to: 256 in bfloat16, whatever comes after that."""
    for _ in range(passes):
        parameter.sum().backward()
    return parameter.grad.max().item()


@pytest.mark.parametrize("made", ["made", "added", "wrapped"])
def test_a_gradient_that_is_there_already_becomes_a_wide_one(streaming: Any, made: str) -> None:
    parameter, config = make(torch.bfloat16), streaming(gradient_dtype="float32", subgroup_numel=8192)
    parameter.sum().backward()
    first = [make(torch.bfloat16)] if made == "added" else [parameter]
    kind = partial(offload.wrap, torch.optim.SGD) if made == "wrapped" else offload.AdamW
    with kind(first, lr=1e-2, offload=config) as optimizer:
        if made == "added":
            optimizer.add_param_group({"params": [parameter]})
        assert summed(parameter, 299) == 300
        optimizer.step()
        optimizer.zero_grad()
        assert summed(parameter) == 300
    assert parameter.grad_dtype is torch.bfloat16


def test_gradients_stay_wide_until_the_last_optimizer_that_widened_them_is_closed(streaming: Any) -> None:
    parameter, other = make(torch.bfloat16), make(torch.bfloat16)
    other.grad_dtype = torch.float32  # a setting of the program's own
    first = offload.AdamW([parameter], offload=streaming(gradient_dtype="float32"))
    second = offload.AdamW([parameter], offload=streaming(gradient_dtype="float32"))
    third = offload.AdamW([parameter, other], offload=streaming())
    first.close()
    third.close()
    assert summed(parameter) == 300
    assert other.grad_dtype is torch.float32
    second.close()
    assert parameter.grad_dtype is torch.bfloat16


def test_gradients_of_swapped_parameters_become_wide_again(streaming: Any) -> None:
    parameter = make(torch.bfloat16)
    with offload.AdamW([parameter], lr=0.0, offload=streaming(gradient_dtype="float32")) as optimizer:
        torch.utils.swap_tensors(parameter, make(torch.bfloat16))
        summed(parameter, 1)
        optimizer.step()
        optimizer.zero_grad()
        assert summed(parameter) == 300


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen_however_it_came(streaming: Any, bad: float) -> None:
    parameter = make()
    with offload.AdamW([parameter], offload=streaming()) as optimizer:
        backward(parameter, 0)
        assert optimizer.unscale(1.0)
        parameter.grad.data[NUMEL - 1] = bad
        assert not optimizer.unscale(1.0)
        parameter.grad.numpy()[NUMEL - 1] = 0
        assert optimizer.unscale(1.0)


def test_only_what_has_changed_is_gathered_anew(streaming: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(numel)) for numel in (5, 0, 5000, 70_000)]
    with offload.AdamW(parameters, offload=streaming()) as optimizer:
        sum((parameter * parameter).sum() for parameter in parameters).backward()
        gathered: list[int] = []
        gradients = optimizer.engine._parts.gradients
        gather = gradients._sum_and_copy

        def noted(position: int, *rest: Any, **target: Any) -> None:
            gathered.append(position)
            gather(position, *rest, **target)

        monkeypatch.setattr(gradients, "_sum_and_copy", noted)
        optimizer.clip_grad_norm_(1e9)
        assert gathered == []
        parameters[2].grad.data[4999] = 7
        optimizer.clip_grad_norm_(1e9)
        assert gathered == [2]
        optimizer.clip_grad_norm_(1e9)
        assert gathered == [2]


# What is kept


@pytest.mark.parametrize("reset", ["none", "optimizer"])
def test_what_is_kept_of_a_gradient_stays(streaming: Any, reset: str) -> None:
    parameter = make()
    with offload.AdamW([parameter], offload=streaming()) as optimizer:
        slot = optimizer.engine.gradients.slot(0).data_ptr()
        kept, copies = [], []
        for step in range(3):
            backward(parameter, step)
            kept.append(parameter.grad.numpy()[3:])
            copies.append(kept[-1].copy())
            expected = norm_of(parameter.grad)
            assert float(optimizer.clip_grad_norm_(1e9)) == expected
            optimizer.step()
            if reset == "optimizer":
                optimizer.zero_grad()
            else:
                parameter.grad = None
            for array, copied in zip(kept, copies, strict=True):
                np.testing.assert_array_equal(array, copied)
        del kept, array
        backward(parameter, 9)
        assert parameter.grad.data_ptr() == slot


def test_what_is_kept_outlives_the_session(streaming: Any) -> None:
    parameter = make()
    optimizer = offload.AdamW([parameter], offload=streaming())
    backward(parameter, 0)
    array = parameter.grad.numpy()[3:]
    copied = array.copy()
    parameter.grad = None
    optimizer.close()
    del optimizer
    gc.collect()
    np.testing.assert_array_equal(array, copied)


def test_gradients_nobody_keeps_lie_in_their_slots(streaming: Any) -> None:
    parameters = [make(), torch.nn.Parameter(torch.randn(30, 50).t()), torch.nn.Parameter(torch.tensor(2.0))]
    with offload.AdamW(parameters, offload=streaming()) as optimizer:
        slots = [optimizer.engine.gradients.slot(n).data_ptr() for n in range(3)]
        for step in range(4):
            for parameter in parameters:
                backward(parameter, step)
                backward(parameter, step + 7)
            assert [p.grad.data_ptr() for p in parameters] == slots
            assert [p.grad.stride() for p in parameters] == [p.stride() for p in parameters]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def test_a_model_with_gradients_is_copied_and_saved(streaming: Any) -> None:
    model = torch.nn.Linear(30, 20)
    with offload.AdamW(model.parameters(), offload=streaming()):
        model(torch.ones(3, 30)).sum().backward()
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save([parameter.grad for parameter in model.parameters()], file)
        file.seek(0)
        for parameter, other, saved in zip(model.parameters(), twin.parameters(), torch.load(file), strict=True):
            assert torch.equal(parameter.grad, saved)
            assert other.grad is None or torch.equal(parameter.grad, other.grad)
            assert other.grad is None or other.grad.data_ptr() != parameter.grad.data_ptr()
        with pytest.raises(RuntimeError, match="resiz"):
            model.weight.grad.untyped_storage().resize_(1 << 20)


class Negated(torch.autograd.Function):
    """A function whose gradient is negated when it is read."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return -weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(gradient.clone())


GPU, LEFT = (pytest.param(name, marks=pytest.mark.late(shared=True)) for name in ("gpu", "gpu, left"))


@pytest.mark.parametrize("where", ["host", GPU, LEFT])
@pytest.mark.parametrize("comes", ["arrives", "imaginary part"])
def test_a_gradient_that_is_negated_when_it_is_read(where: str, comes: str) -> None:
    device = "cpu" if where == "host" else "late"
    parameter = torch.nn.Parameter(torch.tensor(3.0, device=device))
    settings = None if where == "host" else offload.OffloadConfig(gpu_memory=0, keep_grads=where == "gpu")
    optimizer = offload.AdamW([parameter], offload=settings)
    with optimizer:
        if comes == "arrives":
            Negated.apply(parameter).backward()
        else:
            parameter.grad = torch.tensor(1 + 1j, device=device).conj().imag
        optimizer.step()
        assert optimizer.state_for(parameter)["exp_avg"] == torch.tensor(-1.0) * (1 - 0.9)


# What is clipped: `unit/optim/test_scaling.py` has what may happen; here it is wherever gradients lie


@pytest.fixture(params=["host", "ranks", GPU, LEFT])
def clipped(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Any], offload.AdamW]]:
    """Two weights and their optimizer, whose gradients have been clipped."""
    parameters, settings = [make(), make()], None
    if request.param == "ranks":
        monkeypatch.setattr("offload.optim.ranks.world", lambda: (2, 0))
    if "gpu" in request.param:
        parameters = [torch.nn.Parameter(parameter.detach().to("late")) for parameter in parameters]
        settings = offload.OffloadConfig(gpu_memory=0, keep_grads="left" not in request.param)
    with offload.AdamW(parameters, offload=settings) as optimizer:
        backward(parameters[0], 1)
        backward(parameters[1], 2)
        optimizer.clip_grad_norm_(0.1)
        yield parameters, optimizer


PLACES = pytest.mark.parametrize("clipped", ["host", "ranks", GPU], indirect=True)
"""Where gradients stay in `.grad`."""


@PLACES
def test_a_gradient_that_changed_when_it_had_its_factor_is_refused(clipped: Any) -> None:
    parameters, optimizer = clipped
    before = [parameter.detach().clone() for parameter in parameters]
    torch.nn.utils.clip_grad_norm_([parameters[1]], 1e-3)
    with pytest.raises(offload.ConfigError, match="was replaced or changed"):
        optimizer.step()
    assert all(map(torch.equal, before, parameters))
    optimizer.zero_grad()
    backward(parameters[0], 3)
    optimizer.step()


@pytest.mark.parametrize("arrives", ["onto", "assigned"])
def test_more_gradient_after_the_clip_is_refused_wherever_it_comes_from(clipped: Any, arrives: str) -> None:
    parameters, optimizer = clipped
    if arrives == "assigned":
        optimizer.zero_grad()
        backward(parameters[0], 1)
        optimizer.clip_grad_norm_(0.1)
        parameters[1].grad = torch.ones_like(parameters[1])
    else:
        backward(parameters[1], 2)
    with pytest.raises(offload.ConfigError, match=r"more gradient has arrived|was replaced"):
        optimizer.step()


@PLACES
@pytest.mark.parametrize("drop", ["none", "restore"])
def test_a_clip_holds_for_the_gradients_that_are_left(clipped: Any, drop: str) -> None:
    parameters, optimizer = clipped
    held = [parameter.grad for parameter in parameters]
    factor = 0.1 / norm_of(torch.cat(held).cpu())
    expected = held[0].cpu() * (factor * 0.1)
    if drop == "none":
        parameters[1].grad = None
    else:
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = None
            backward(parameter, 3)
            parameter.grad = gradient
    optimizer.step()
    assert torch.allclose(optimizer.state_for(parameters[0])["exp_avg"], expected, rtol=1e-3)


@PLACES
@pytest.mark.parametrize("reset", ["none", "zeros"])
def test_a_skipped_step_leaves_no_factor_behind_wherever_gradients_lie(clipped: Any, reset: str) -> None:
    parameters, optimizer = clipped
    for parameter in parameters:  # as model.zero_grad does
        if reset == "none":
            parameter.grad = None
        else:
            parameter.grad.zero_()
    backward(parameters[0], 3)
    optimizer.step()
    assert optimizer.state_for(parameters[0])["exp_avg"].norm() > 1
