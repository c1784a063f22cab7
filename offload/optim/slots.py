"""Gradient slots as `.grad`: the life of a storage, not a count, tells whether somebody may still use a slot."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class GradientSlot:
    """Memory for a parameter's gradient, lent to one `.grad` at a time.

    Each `.grad` is a tensor with a storage of its own over the slot. That storage alone holds a token.
    Whoever can reach the gradient holds the storage: the tensor, slices and other views of it, NumPy arrays, DLPack
    capsules, tensors saved in a graph. So the slot is free when the token is gone. The token also keeps the slot's
    memory, for gradients that outlive the session.

    Args:
        flat: The slot's memory; see `GradientStore.slot`.

    Attributes:
        address: Address of the memory.
        nbytes: Its size.
        dtype: Dtype of the gradient.
        stride: Strides of the parameter.
    """

    def __init__(self, flat: torch.Tensor, parameter: torch.Tensor) -> None:
        self.address = flat.data_ptr()
        self.nbytes = flat.nbytes
        self.dtype = flat.dtype
        self.stride = parameter.stride()
        self._size = parameter.size()
        self._memory = flat.view(torch.uint8).numpy()
        self._token: weakref.ref[Any] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody holds the gradient that was lent last."""
        return self._token is None or self._token() is None

    def lend(self) -> torch.Tensor | None:
        """Return the slot as a gradient of the parameter's shape and strides; None while it is not free."""
        if not self.is_free:
            return None
        if not self._memory.size:
            return torch.empty_strided(self._size, self.stride, dtype=self.dtype, device="cpu")
        token = self._memory[:]
        self._token = weakref.ref(token)
        return torch.frombuffer(token, dtype=self.dtype).as_strided(self._size, self.stride)
