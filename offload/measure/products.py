"""How fast this processor multiplies matrices in 16 bits, and how to compute in fp32 where it is slow at that.

torch has 16-bit products for every CPU. Without instructions for them (AVX-512 BF16, AMX) some are 100 times slower
than in fp32, and an iteration in bf16 takes minutes instead of seconds. On such CPUs, `computing_in(torch.float32)`
computes each product in fp32 from 16-bit operands and rounds the result. Weights, activations and gradients stay in
16 bits; fp32 copies live as long as one product.

Non-goals: convolutions; products on a GPU, where 16 bits are fast.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.errors import ConfigError

log = logging.getLogger("offload")

SETTING = "OFFLOAD_COMPUTE"
"""Environment variable: "bf16" or "fp32" for products of bf16 weights, "auto" (or nothing) to measure which pays."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

SLOW = 1 / 8
"""16-bit products are slow if their rate is below this part of the fp32 rate. Processors have 0.005 to 0.05, or
nearly 1 and more."""

UNCLEAR = (1 / 16, 1 / 2)
"""Ratios of 16-bit rate to fp32 rate after which both are measured again.

No idle processor has a ratio between these; one whose cores are busy may: seven products in a row were seen to take
twelve times as long as a moment later.
"""

TRIES = (3, 20)
"""How often rates are measured: at least; and at most, while their ratio is unclear. The best of each rate counts."""

SIZE = 160
"""Rows and columns of the matrices that are multiplied, in fp32 and in 16 bits; 16 ms at 0.5 GFLOP/s."""

ENOUGH_S = 0.01
"""Seconds after which `measured_flops` begins no further product."""

MOST_ROUNDS = 10
"""Most products of one call of `measured_flops`."""

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True)
class ProductRates:
    """FLOP/s of matrix products on the CPU.

    Attributes:
        dtype: The 16-bit type.
        low: Rate in that type.
        fp32: Rate in fp32.
    """

    dtype: torch.dtype
    low: float
    fp32: float

    @property
    def slow(self) -> bool:
        """Whether products in fp32 are faster even with casts to it and back."""
        return self.low < SLOW * self.fp32

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"matrix products here: {name} {self.low / 1e9:.3g} GFLOP/s, float32 {self.fp32 / 1e9:.3g}"


@functools.cache
def product_rates(dtype: torch.dtype) -> ProductRates:
    """Measure small products in a 16-bit dtype and in fp32; only once a process for each dtype.

    That takes 50 to 120 ms where 16 bits are slow, and more if the processor is busy.
    """
    least_tries, most_tries = TRIES
    unclear_from, unclear_to = UNCLEAR
    low = fp32 = 0.0
    for tries in range(1, most_tries + 1):
        low = max(low, measured_flops(dtype))
        fp32 = max(fp32, measured_flops(torch.float32))
        is_unclear = unclear_from < low / fp32 < unclear_to
        if tries >= least_tries and not is_unclear:
            break
    return ProductRates(dtype, low, fp32)


def measured_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of a few small products on the CPU."""
    # Row-major times row-major, as where backward multiplies gradients by weights: where 16 bits are slow, this order
    # is the slowest.
    matrix = torch.ones(SIZE, SIZE, dtype=dtype, device="cpu")
    seconds: list[float] = []
    with torch.no_grad():
        # The first product may compile, which alone can take more than `ENOUGH_S`: so its time does not count there.
        while len(seconds) < 2 or (len(seconds) < MOST_ROUNDS and sum(seconds[1:]) < ENOUGH_S):
            began_s = time.perf_counter()
            torch.mm(matrix, matrix)
            seconds.append(time.perf_counter() - began_s)
    return 2 * SIZE**3 / min(seconds)  # each of SIZE^2 results takes SIZE multiplications and additions


@dataclass(frozen=True, slots=True)
class Compute:
    """The dtype that products of a model are computed in.

    Attributes:
        name: "bf16" or "fp32".
        why: The reason, in words.
    """

    name: str
    why: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in torch."""
        return DTYPES[self.name]

    def __str__(self) -> str:
        return f"compute: {self.name} ({self.why})"


def choose_compute(weights: str = "bf16", device: str = "cpu", environ: Mapping[str, str] = os.environ) -> Compute:
    """Return the dtype in which the products of a model should be computed.

    Args:
        weights: Type of its weights, "bf16" or "fp32".
        device: Device of its weights.
        environ: Environment variables, for `SETTING`.

    Raises:
        ConfigError: `SETTING` has an unknown value.
    """
    asked = environ.get(SETTING) or "auto"
    if asked not in ("auto", *DTYPES):
        raise ConfigError(SETTING, asked, "give bf16, fp32 or auto")
    if weights == "fp32" or not device.startswith("cpu"):
        return Compute(weights, "as the weights")
    if asked != "auto":
        return Compute(asked, f"{SETTING}={asked}")
    rates = product_rates(torch.bfloat16)
    return Compute("fp32" if rates.slow else "bf16", str(rates))


def computing_in(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context for forward and backward in which products on the CPU are computed in `dtype`.

    If that is fp32, torch's products of 16-bit matrices, also in attention, are computed in fp32 and rounded to 16
    bits; any other dtype changes nothing. It holds for the thread that enters it, which on a CPU also runs backward.
    """
    return _Widening() if dtype is torch.float32 else contextlib.nullcontext()  # type: ignore[no-untyped-call]


class _Widening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes torch's 16-bit products on the CPU in fp32: with fp32 copies of their operands, and a rounded result.

    A dispatch mode works below autograd, so tensors saved for backward stay in 16 bits.
    """

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator of torch, in fp32 if it is a product and one of its operands is a 16-bit tensor."""
        kwargs = kwargs or {}
        is_product = func in _PRODUCTS or func is _ATTENTION or func is _ATTENTION_BACKWARD
        low_dtype = next((value.dtype for value in args if _is_low(value)), None)
        if not is_product or low_dtype is None:
            return func(*args, **kwargs)
        wide_args = [_widen(value) for value in args]
        result = func(*wide_args, **{name: _widen(value) for name, value in kwargs.items()})
        if func is _ATTENTION:
            output, *sums = result  # sums of exponentials, for backward: in fp32 in any case
            return output.to(low_dtype), *sums
        if func is _ATTENTION_BACKWARD:
            return tuple(gradient.to(low_dtype) for gradient in result)
        return result.to(low_dtype)


def _widen(value: Any) -> Any:
    """Return a 16-bit tensor's copy in fp32; anything else as it is."""
    return value.float() if _is_low(value) else value


def _is_low(value: object) -> bool:
    """Return whether a value is a 16-bit tensor on the CPU."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in (torch.bfloat16, torch.float16)
        and value.device.type == "cpu"
    )


@functools.cache
def warn_of_slow_products(rates: ProductRates) -> None:
    """Log a warning that 16-bit products are slow on this processor; only once for the same rates."""
    log.warning(
        "%s: forward and backward of these weights are slow on this processor. With fp32 weights "
        "(`model.float()`, and no autocast) they are not; weights, gradients and exact state take as many "
        "bytes in all, as an fp32 weight is its own master",
        rates,
    )


def tell_once(dtypes: Iterable[torch.dtype]) -> None:
    """Warn, once a process, if a model's weights on the CPU are of a 16-bit type whose products are slow here.

    Args:
        dtypes: Types of these weights.
    """
    if warn_of_slow_products.cache_info().currsize:  # warned already, perhaps about another type
        return
    for dtype in sorted({*dtypes} & {torch.bfloat16, torch.float16}, key=str):
        rates = product_rates(dtype)
        if rates.slow:
            warn_of_slow_products(rates)
            return
