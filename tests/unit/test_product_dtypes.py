"""What products are computed in: the decision from plain rates, and what computing in fp32 leaves in 16 bits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

import offload
from offload.cli.model import Shape, build_model
from offload.errors import ConfigError
from offload.measure import products
from offload.measure.products import SETTING, ProductRates, choose_compute, computing_in

SLOW = ProductRates(torch.bfloat16, 0.5e9, 115e9)
FAST = ProductRates(torch.bfloat16, 150e9, 115e9)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""What torch calls those of matrices."""


@pytest.mark.parametrize(
    ("low", "fp32", "slow"),
    [(0.5e9, 115e9, True), (5e9, 115e9, True), (14e9, 115e9, True), (15e9, 115e9, False), (200e9, 100e9, False)],
)
def test_slow_is_a_matter_of_two_rates(low: float, fp32: float, slow: bool) -> None:
    assert ProductRates(torch.bfloat16, low, fp32).slow is slow


def test_what_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = SLOW
    monkeypatch.setattr(products, "product_rates", lambda dtype: rates)
    assert choose_compute(environ={}).dtype is torch.float32
    assert (
        str(choose_compute(environ={})) == "compute: fp32 (matrix products here: bfloat16 0.5 GFLOP/s, float32 115)"
    )
    assert choose_compute(environ={SETTING: "bf16"}).name == "bf16"
    assert choose_compute(device="cuda:1", environ={SETTING: "fp32"}).name == "bf16"
    rates = FAST
    assert choose_compute(environ={SETTING: "auto"}).name == "bf16"
    assert choose_compute(environ={SETTING: "fp32"}).name == "fp32"
    assert choose_compute("fp32", environ={SETTING: "bf16"}).name == "fp32"
    with pytest.raises(ConfigError, match=r"OFFLOAD_COMPUTE.*give bf16, fp32 or auto"):
        choose_compute(environ={SETTING: "fp16"})


def test_two_products_are_measured_once_a_process() -> None:
    products.product_rates.cache_clear()
    found = products.product_rates(torch.bfloat16)
    assert found.low > 0
    assert found.fp32 > 0
    assert products.product_rates(torch.bfloat16) is found


def test_a_slow_start_is_no_slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product compiles for long, and the second is disturbed."""
    durations = iter([0.030, 0.004])
    now_s = 0.0

    def read() -> Iterator[float]:
        nonlocal now_s
        while True:
            yield now_s
            now_s += next(durations, 0.00004)
            yield now_s

    clock = read()
    products.product_rates.cache_clear()
    monkeypatch.setattr(products.time, "perf_counter", lambda: next(clock))
    rates = products.product_rates(torch.float32)
    products.product_rates.cache_clear()
    assert rates.low == pytest.approx(2 * products.SIZE**3 / 0.00004)


def test_a_processor_whose_cores_others_have_taken_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever took bf16 for fast here would wait a hundred times as long."""
    taken = [(1.8e9, 5.5e9)] * 5  # as it was seen on a processor that makes 70e9 in fp32
    rates = iter([rate for pair in (*taken, (2e9, 70e9), (1e9, 1e9)) for rate in pair])
    monkeypatch.setattr(products, "measured_flops", lambda dtype: next(rates))
    products.product_rates.cache_clear()
    found = products.product_rates(torch.bfloat16)
    assert (found.low, found.fp32, found.slow) == (2e9, 70e9, True)
    rates = iter([3e9, 9e9] * products.TRIES[1])
    products.product_rates.cache_clear()
    assert not products.product_rates(torch.bfloat16).slow, "measured as it is at last"
    rates = iter([90e9, 100e9, 5e9, 100e9, 100e9, 90e9])
    products.product_rates.cache_clear()
    assert not products.product_rates(torch.bfloat16).slow
    products.product_rates.cache_clear()


def passes(model: Any, compute: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Return the loss, the gradients, and what was kept for backward."""
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    model.zero_grad()
    tokens = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    with computing_in(compute), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()], kept


def test_a_model_keeps_its_16_bits() -> None:
    model = build_model(Shape(2, 64), seq=24, dtype=torch.bfloat16, device="cpu", seed=0)
    multiplied: set[torch.dtype] = set()

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        """Sees what the mode above it asks for."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in PRODUCTS or "attention" in func.overloadpacket.__name__:
                multiplied.update(each.dtype for each in args if isinstance(each, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with Seen():
        loss, gradients, kept = passes(model, torch.float32)
    assert multiplied == {torch.float32}
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    wide = [tensor for tensor in kept if tensor.dtype == torch.float32]
    weights = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2}
    assert not {tuple(tensor.shape) for tensor in wide} & (weights | {shape[::-1] for shape in weights})
    exact, exact_gradients, _ = passes(model.float(), torch.float32)
    assert abs(float(loss - exact)) < 0.01 * float(exact)
    for low, gradient in zip(gradients, exact_gradients, strict=True):
        assert torch.dist(low.float(), gradient) < 0.05 * gradient.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_the_rounded_one_of_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in ((7, 65), (33, 65), (33,))
    )
    up = torch.randn(7, 33, generator=generator).to(dtype)
    with computing_in(torch.float32):
        y = linear(x, w, b)
        y.backward(up)
    assert y.dtype == dtype
    assert torch.equal(y, linear(x.float(), w.float(), b.float()).to(dtype))
    assert torch.equal(x.grad, (up.float() @ w.float()).to(dtype))
    assert torch.equal(w.grad, (up.float().T @ x.float()).to(dtype))


def test_attention_and_what_is_wide_already() -> None:
    q, k, v = (torch.randn(1, 2, 9, 16).bfloat16().requires_grad_() for _ in range(3))
    with computing_in(torch.float32):
        found = scaled_dot_product_attention(q, k, v, is_causal=True)
        found.float().sum().backward()
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    assert found.dtype == q.grad.dtype == v.grad.dtype == torch.bfloat16
    with computing_in(torch.bfloat16):
        assert torch.mm(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "rates", "told"), [("bf16", SLOW, 1), ("bf16", FAST, 0), ("fp32", SLOW, 0)])
def test_users_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: str, rates: ProductRates, told: int
) -> None:
    monkeypatch.setattr(products, "product_rates", lambda dtype: rates)
    products.warn_of_slow_products.cache_clear()
    with (
        caplog.at_level(logging.WARNING, "offload"),
        offload.AdamW([torch.nn.Parameter(torch.ones(100, dtype=products.DTYPES[dtype]))]) as optimizer,
    ):
        str(optimizer.plan)
        assert "slow on this processor" not in caplog.text
        for _ in range(2):
            optimizer.explain()
    found = [record.getMessage() for record in caplog.records if "slow on this processor" in record.getMessage()]
    assert len(found) == told
    assert all("model.float()" in message for message in found)
