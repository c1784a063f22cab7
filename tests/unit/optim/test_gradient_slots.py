"""A gradient slot is free when nobody can reach what was lent, however they keep it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offload.optim.slots import GradientSlot


def a_saved_tensor(gradient: torch.Tensor) -> Callable[[], Any]:
    leaf = torch.ones_like(gradient, requires_grad=True)
    product = (leaf * gradient).sum()
    return lambda: torch.autograd.grad(product, leaf, retain_graph=True)[0].numpy()


HOLDS: dict[str, Callable[[torch.Tensor], Callable[[], Any]]] = {
    "the tensor": lambda gradient: gradient.numpy,
    "a slice": lambda gradient: gradient[5:90].numpy,
    "its data": lambda gradient: gradient.data.numpy,
    "a numpy array": lambda gradient: gradient.numpy()[3:].copy,
    "a memoryview": lambda gradient: memoryview(gradient.numpy()).tolist,
    "dlpack": lambda gradient: torch.from_dlpack(torch.utils.dlpack.to_dlpack(gradient)).numpy,
    "an array of another library": lambda gradient: np.from_dlpack(gradient).copy,
    "its storage": lambda gradient: gradient.untyped_storage().tolist,
    "a saved tensor": a_saved_tensor,
}


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """They look at nothing that is there before these tests."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("hold", HOLDS)
def test_a_slot_is_free_once_nobody_holds_its_gradient(hold: str) -> None:
    flat, read = torch.zeros(100), None
    slot = GradientSlot(flat, torch.empty(100))
    for value in (7, 8):
        del read
        gc.collect()
        assert slot.is_free
        gradient = slot.lend()
        assert gradient is not None
        gradient.fill_(value)
        assert gradient.data_ptr() == slot.address == flat.data_ptr()
        assert (flat == value).all()
        read = HOLDS[hold](gradient)
        seen = np.array(read(), copy=True)
        del gradient
        gc.collect()
        assert not slot.is_free
        assert slot.lend() is None
    del slot, flat  # what was lent has the memory beyond the session, too
    gc.collect()
    np.testing.assert_array_equal(np.array(read()), seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("like", [torch.empty(6, 4), torch.empty(4, 6).t(), torch.empty(()), torch.empty(2, 0)])
def test_a_gradient_has_the_parameter_s_form_and_the_slot_s_dtype(like: torch.Tensor, dtype: torch.dtype) -> None:
    slot = GradientSlot(torch.zeros(like.numel(), dtype=dtype), like)
    gradient = slot.lend()
    assert gradient is not None
    assert (gradient.shape, gradient.stride()) == (like.shape, like.stride())
    assert gradient.dtype == dtype
    assert slot.is_free == (like.numel() == 0)  # there is nothing to hold
