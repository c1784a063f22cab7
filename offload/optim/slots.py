"""Gradient slots as `.grad`: a slot is free when the storage of the last `.grad` over it has been freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class GradientSlot:
    """Memory for a parameter's gradient, used by one `.grad` at a time.

    Each `.grad` is a tensor with a storage of its own over the slot. That storage alone keeps a *token* alive, an
    array over the slot. Everything from which the gradient can be reached keeps the storage alive: the tensor, slices
    and other views of it, NumPy arrays, DLPack capsules, tensors saved in a graph. So the slot is free when the token
    has been freed. The token also keeps the slot's memory, for gradients that outlive the session.

    Args:
        flat: The slot's memory; see `GradientStore.slot`.
        parameter: The parameter, whose shape and strides gradients get.

    Attributes:
        address: The memory's address.
        nbytes: The memory's size.
        dtype: The gradient's dtype.
        stride: The parameter's strides.
    """

    def __init__(self, flat: torch.Tensor, parameter: torch.Tensor) -> None:
        self.address = flat.data_ptr()
        self.nbytes = flat.nbytes
        self.dtype = flat.dtype
        self.stride = parameter.stride()
        self._size = parameter.size()
        self._memory = flat.view(torch.uint8).numpy()  # as bytes: NumPy has no bfloat16
        self._token: weakref.ref[Any] | None = None  # of the last gradient that was lent

    @property
    def is_free(self) -> bool:
        """Whether nothing holds the last gradient that `lend` has returned."""
        return self._token is None or self._token() is None

    def lend(self) -> torch.Tensor | None:
        """Return the slot as a gradient of the parameter's shape and strides; None while it is not free."""
        if not self.is_free:
            return None
        if not self._memory.size:  # which `torch.frombuffer` refuses
            return torch.empty_strided(self._size, self.stride, dtype=self.dtype, device="cpu")
        token = self._memory[:]  # a new array over the same memory, which the storage below keeps alive
        self._token = weakref.ref(token)
        gradient = torch.frombuffer(token, dtype=self.dtype)
        # `set_` gives the tensor itself the parameter's shape and strides. A view would have them, too, but could not
        # be detached in place.
        return gradient.set_(gradient.untyped_storage(), 0, self._size, self.stride)
