"""Gradients belong to whoever holds them: what is written to them counts, and what is kept of them stays."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
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
    return Mirror([], decoupled=True).norm([[gradient]])


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


WRITES = [write_data, write_numpy, swap, flip_sign, write_dlpack]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("write", WRITES)
def test_a_norm_is_that_of_the_gradient_that_the_update_reads(
    streaming: Any, dtype: torch.dtype, write: Callable[[torch.Tensor], None]
) -> None:
    parameter = make(dtype)
    group = {"params": [parameter], "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    mirror = Mirror([group], decoupled=True)
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
            mirror.step([[gradient]], min(1.0, 1.0 / (expected + 1e-6)))
        assert same_bits(parameter.detach(), mirror.weights[0][0])


def test_wide_gradients_are_checked_as_they_are_kept(streaming: Any) -> None:
    parameter = make(torch.bfloat16)
    with offload.AdamW([parameter], offload=streaming(gradient_dtype="float32")) as optimizer:
        backward(parameter, 0)
        before = float(optimizer.clip_grad_norm_(1e9))
        assert before == norm_of(parameter.grad)
        parameter.grad.data[-1] = 1e3
        assert float(optimizer.clip_grad_norm_(1e9)) == norm_of(parameter.grad) != before


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


@pytest.mark.parametrize("scaler", [offload.GradScaler, torch.amp.GradScaler])
def test_a_scaler_skips_what_was_made_infinite(streaming: Any, scaler: Any) -> None:
    parameter = make()
    scaler = scaler("cpu", init_scale=2.0**8)
    with offload.AdamW([parameter], offload=streaming()) as optimizer:
        before = parameter.detach().clone()
        scaler.scale((parameter * parameter).sum()).backward()
        parameter.grad.data[NUMEL - 3] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameter, before)
        assert scaler.get_scale() == 2.0**7


def test_only_what_has_changed_is_gathered_anew(streaming: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(numel)) for numel in (5, 0, 5000, 70_000)]
    with offload.AdamW(parameters, offload=streaming()) as optimizer:
        sum((parameter * parameter).sum() for parameter in parameters).backward()
        gathered: list[int] = []
        gradients = optimizer.engine._parts.gradients
        gather = gradients._gather

        def noted(position: int, *rest: Any) -> None:
            gathered.append(position)
            gather(position, *rest)

        monkeypatch.setattr(gradients, "_gather", noted)
        optimizer.clip_grad_norm_(1e9)
        assert gathered == []
        parameters[2].grad.data[4999] = 7
        optimizer.clip_grad_norm_(1e9)
        assert gathered == [2]
        optimizer.clip_grad_norm_(1e9)
        assert gathered == [2]


# What is kept

HOLDS: dict[str, Callable[[torch.Tensor], Callable[[], np.ndarray]]] = {}


def holds(make: Callable[[torch.Tensor], Callable[[], np.ndarray]]) -> Callable[[torch.Tensor], Any]:
    """Name a way to keep a gradient: from the gradient, make a function that reads what is kept."""
    HOLDS[make.__name__] = make
    return make


@holds
def the_tensor(gradient: torch.Tensor) -> Callable[[], np.ndarray]:
    return lambda: gradient.numpy().copy()


@holds
def a_slice(gradient: torch.Tensor) -> Callable[[], np.ndarray]:
    part = gradient[5:90]
    return lambda: part.numpy().copy()


@holds
def its_data(gradient: torch.Tensor) -> Callable[[], np.ndarray]:
    data = gradient.data
    return lambda: data.numpy().copy()


@holds
def a_numpy_array(gradient: torch.Tensor) -> Callable[[], np.ndarray]:
    array = gradient.numpy()[3:]
    return lambda: array.copy()


@holds
def a_memoryview(gradient: torch.Tensor) -> Callable[[], np.ndarray]:
    view = memoryview(gradient.numpy())
    return lambda: np.array(view)


@holds
def dlpack(gradient: torch.Tensor) -> Callable[[], np.ndarray]:
    tensor = torch.from_dlpack(torch.utils.dlpack.to_dlpack(gradient))
    return lambda: tensor.numpy().copy()


@holds
def an_array_of_another_library(gradient: torch.Tensor) -> Callable[[], np.ndarray]:
    array = np.from_dlpack(gradient)
    return lambda: np.array(array)


@holds
def its_storage(gradient: torch.Tensor) -> Callable[[], np.ndarray]:
    storage = gradient.untyped_storage()
    return lambda: np.array(bytearray(storage.tolist()))


@holds
def a_saved_tensor(gradient: torch.Tensor) -> Callable[[], np.ndarray]:
    leaf = torch.ones_like(gradient, requires_grad=True)
    product = (leaf * gradient).sum()

    def read() -> np.ndarray:
        (found,) = torch.autograd.grad(product, leaf, retain_graph=True)
        return found.numpy().copy()

    return read


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("reset", ["none", "optimizer", "by hand"])
def test_what_is_kept_of_a_gradient_stays(streaming: Any, hold: str, reset: str) -> None:
    parameter = make()
    with offload.AdamW([parameter], offload=streaming()) as optimizer:
        slot = optimizer.engine.gradients.slot(0).data_ptr()
        kept, copies = [], []
        for step in range(3):
            backward(parameter, step)
            kept.append(HOLDS[hold](parameter.grad))
            copies.append(kept[-1]())
            expected = norm_of(parameter.grad)
            assert float(optimizer.clip_grad_norm_(1e9)) == expected
            optimizer.step()
            if reset == "optimizer":
                optimizer.zero_grad()
            elif reset == "by hand":
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad = None
            else:
                parameter.grad = None
            for read, copied in zip(kept, copies, strict=True):
                np.testing.assert_array_equal(read(), copied)
        del kept, read
        gc.collect()  # a closure may be part of a cycle
        backward(parameter, 9)
        assert parameter.grad.data_ptr() == slot


@pytest.mark.parametrize("hold", HOLDS)
def test_what_is_kept_outlives_the_session(streaming: Any, hold: str) -> None:
    parameter = make()
    optimizer = offload.AdamW([parameter], offload=streaming())
    backward(parameter, 0)
    read = HOLDS[hold](parameter.grad)
    copied = read()
    parameter.grad = None
    optimizer.close()
    del optimizer
    gc.collect()
    np.testing.assert_array_equal(read(), copied)


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
@pytest.mark.parametrize("comes", ["arrives", "assigned", "imaginary part"])
def test_a_gradient_that_is_negated_when_it_is_read(where: str, comes: str) -> None:
    device = "cpu" if where == "host" else "late"
    parameter = torch.nn.Parameter(torch.tensor(3.0, device=device))
    settings = None if where == "host" else offload.OffloadConfig(gpu_memory=0, keep_grads=where == "gpu")
    optimizer = offload.AdamW([parameter], offload=settings)
    with optimizer:
        if comes == "arrives":
            Negated.apply(parameter).backward()
        elif comes == "assigned":
            parameter.grad = torch._neg_view(torch.tensor(1.0, device=device))
        else:
            parameter.grad = torch.tensor(1 + 1j, device=device).conj().imag
        optimizer.step()
        assert optimizer.state_for(parameter)["exp_avg"] == torch.tensor(-1.0) * (1 - 0.9)


# What is clipped


def clipped(again: bool = False) -> tuple[torch.nn.Parameter, offload.AdamW]:
    parameter = make()
    optimizer = offload.AdamW([parameter])
    backward(parameter, 1)
    optimizer.clip_grad_norm_(0.1)
    return parameter, optimizer


def test_the_gradient_of_a_group_that_is_added_after_the_clip_is_refused() -> None:
    _, optimizer = clipped()
    with optimizer:
        another = make()
        backward(another, 1)
        optimizer.add_param_group({"params": [another]})
        with pytest.raises(offload.ConfigError, match="was replaced"):
            optimizer.step()


def test_a_gradient_that_was_replaced_after_the_clip_is_refused() -> None:
    parameter, optimizer = clipped()
    with optimizer:
        parameter.grad = parameter.grad * 1
        with pytest.raises(offload.ConfigError, match="was replaced"):
            optimizer.step()


def scaled(where: str, monkeypatch: pytest.MonkeyPatch, scaler: bool = False) -> tuple[list[Any], offload.AdamW]:
    """Return two weights and their optimizer, for whose next step there is a factor."""
    parameters, settings = [make(), make()], None
    if where == "ranks":
        monkeypatch.setattr("offload.optim.ranks.world", lambda: (2, 0))
    if "gpu" in where:
        parameters = [torch.nn.Parameter(parameter.detach().to("late")) for parameter in parameters]
        settings = offload.OffloadConfig(gpu_memory=0, keep_grads="left" not in where)
    optimizer = offload.AdamW(parameters, offload=settings)
    backward(parameters[0], 1)
    backward(parameters[1], 2)
    if scaler:
        optimizer.unscale(8.0)
    else:
        optimizer.clip_grad_norm_(0.1)
    return parameters, optimizer


def replace(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    parameter.grad = gradient.clone() * 2


def replace_data(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    gradient.data = gradient.data + 1


def add_noise(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    gradient.add_(1)


def clip_values(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    torch.nn.utils.clip_grad_value_([parameter], 1e-3)


def clip_as_torch(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    torch.nn.utils.clip_grad_norm_([parameter], 1e-3)


CHANGES = [replace, replace_data, add_noise, clip_values, clip_as_torch]
PLACES = ["host", "ranks", GPU]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("scaler", [False, True])
def test_a_gradient_that_changed_when_it_had_its_factor_is_refused(
    monkeypatch: pytest.MonkeyPatch, where: str, change: Any, scaler: bool
) -> None:
    parameters, optimizer = scaled(where, monkeypatch, scaler)
    with optimizer:
        before = [parameter.detach().clone() for parameter in parameters]
        change(parameters[1].grad, parameters[1])
        with pytest.raises(offload.ConfigError, match="was replaced or changed"):
            optimizer.step()
        assert all(map(torch.equal, before, parameters))
        optimizer.zero_grad()
        backward(parameters[0], 3)
        optimizer.step()


@pytest.mark.parametrize("where", [*PLACES, LEFT])
@pytest.mark.parametrize("arrives", ["onto", "with a graph", "beside", "assigned"])
def test_more_gradient_after_the_clip_is_refused_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, where: str, arrives: str
) -> None:
    parameters, optimizer = scaled(where, monkeypatch)
    with optimizer:
        if arrives in ("beside", "assigned"):
            optimizer.zero_grad()
            backward(parameters[0], 1)
            optimizer.clip_grad_norm_(0.1)
        if arrives == "with a graph":
            (parameters[1] * 2).sum().backward(create_graph=True)
        elif arrives == "assigned":
            parameters[1].grad = torch.ones_like(parameters[1])
        else:
            backward(parameters[1], 2)
        with pytest.raises(offload.ConfigError, match=r"more gradient has arrived|was replaced"):
            optimizer.step()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("drop", ["none", "zero", "restore"])
def test_a_clip_holds_for_the_gradients_that_are_left(monkeypatch: pytest.MonkeyPatch, where: str, drop: str) -> None:
    parameters, optimizer = scaled(where, monkeypatch)
    with optimizer:
        held = [parameter.grad for parameter in parameters]
        factor = 0.1 / norm_of(torch.cat(held).cpu())
        expected = held[0].cpu() * (factor * 0.1)
        if drop == "none":
            parameters[1].grad = None
        elif drop == "zero":
            parameters[1].grad.zero_()
        else:
            for parameter, gradient in zip(parameters, held, strict=True):
                parameter.grad = None
                backward(parameter, 3)
                parameter.grad = gradient
        optimizer.step()
        assert torch.allclose(optimizer.state_for(parameters[0])["exp_avg"], expected, rtol=1e-3)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("reset", ["none", "zeros"])
def test_a_skipped_step_leaves_no_factor_behind_wherever_gradients_lie(
    monkeypatch: pytest.MonkeyPatch, where: str, reset: str
) -> None:
    parameters, optimizer = scaled(where, monkeypatch)
    with optimizer:
        for parameter in parameters:  # as model.zero_grad does
            if reset == "none":
                parameter.grad = None
            else:
                parameter.grad.zero_()
        backward(parameters[0], 3)
        optimizer.step()
        assert optimizer.state_for(parameters[0])["exp_avg"].norm() > 1


def test_a_norm_that_is_only_asked_for_leaves_gradients_to_the_caller() -> None:
    parameter = make()
    with offload.AdamW([parameter]) as optimizer:
        backward(parameter, 1)
        optimizer.clip_grad_norm_(float("inf"))
        parameter.grad = torch.full_like(parameter, 2)
        optimizer.step()
        assert torch.allclose(optimizer.state_for(parameter)["exp_avg"], torch.full((NUMEL,), 0.2))


@pytest.mark.parametrize("holds", ["to the end", "to the clip"])
def test_more_gradient_after_the_clip_is_refused_wherever_it_lies(holds: str) -> None:
    parameter = make()
    with offload.AdamW([parameter]) as optimizer:
        backward(parameter, 1)
        held = [parameter.grad]
        optimizer.step()
        optimizer.zero_grad()
        backward(parameter, 2)  # beside its slot, which is still held
        optimizer.clip_grad_norm_(0.1)
        if holds == "to the clip":
            held.clear()
        backward(parameter, 3)
        with pytest.raises(offload.ConfigError, match="after the last backward"):
            optimizer.step()


def test_a_skipped_step_leaves_no_factor_behind() -> None:
    parameter, optimizer = clipped()
    with optimizer:
        parameter.grad = None  # as model.zero_grad does
        backward(parameter, 2)
        optimizer.step()
        unclipped = optimizer.state_for(parameter)["exp_avg"]
        assert unclipped.norm() > 1


def test_a_wider_gradient_than_its_slot_is_not_narrowed() -> None:
    parameter = make(torch.bfloat16)
    with offload.AdamW([parameter], lr=1e-3) as optimizer:
        parameter.grad_dtype = None
        parameter.grad = torch.full((NUMEL,), 0.25, dtype=torch.float32)
        (parameter * 1).sum().backward()
        optimizer.step()
        assert torch.equal(optimizer.state_for(parameter)["exp_avg"], torch.full((NUMEL,), 0.125).mul(1))
