"""What a class of torch's kind keeps of a parameter, in one run of memory: found out, packed, and unpacked in place.

The first 8 bytes are two bits for each key: whether there is a value, and whether it is None. A number follows in 8
bytes, a tensor in its own type, a large one at a multiple of 64 bytes. All of it 0: the class keeps nothing yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.optim.weights import is_dense
from offload.rules import BLOCK_NUMEL, number

FLAG_BYTES = 8
MOST_KEYS = FLAG_BYTES * 8 // 2
SMALL_BYTES, LARGE_BYTES = 8, 64
"""What small and large values are aligned to; what has more bytes than `LARGE_BYTES` is large."""

NUMBERS: dict[type, torch.dtype] = {bool: torch.int64, int: torch.int64, float: torch.float64}
"""The types of plain numbers, and what they are packed as."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a value: of a plain number its type, of a tensor its element type, sizes and strides."""

    number: type | None
    dtype: torch.dtype
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: Any) -> Form | None:
        """Return the form of a value; None for None.

        Raises:
            TypeError: It cannot be packed; says what it is.
        """
        if value is None:
            return None
        if type(value) in NUMBERS:
            return cls(type(value), NUMBERS[type(value)])
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"a {type(value).__name__}")
        if value.layout != torch.strided or not is_dense(value):
            raise TypeError("a tensor that is not dense")
        return cls(None, value.dtype, tuple(value.shape), tuple(value.stride()))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.size) * self.dtype.itemsize

    def __str__(self) -> str:
        return self.number.__name__ if self.number else f"{self.dtype} {self.size}".replace("torch.", "")


class Packing:
    """How the state of a parameter is packed.

    Args:
        forms: Of each key; None where only None was seen.
        numel: Elements of the parameter.

    Attributes:
        words: Words of 4 bytes for each block of `BLOCK_NUMEL` of the parameter's elements.

    Raises:
        TypeError: There are too many keys.
    """

    def __init__(self, forms: Mapping[Any, Form | None], numel: int) -> None:
        if len(forms) > MOST_KEYS:
            raise TypeError(f"{len(forms)} values, and {MOST_KEYS} are possible")
        self._places: dict[Any, tuple[Form | None, int]] = {}
        end = FLAG_BYTES
        sizes = {key: 0 if form is None else form.nbytes for key, form in forms.items()}
        for key in sorted(sizes, key=lambda key: sizes[key] > LARGE_BYTES):
            form, nbytes = forms[key], sizes[key]
            align = LARGE_BYTES if nbytes > LARGE_BYTES else SMALL_BYTES
            end = -(-end // align) * align
            self._places[key] = form, end
            end += nbytes
        words = -(-end // (4 * max(1, -(-numel // BLOCK_NUMEL))))
        # Rounded up, so that parameters of many sizes have few: each number of words makes subgroups of its own.
        whole, rest = divmod(words, BLOCK_NUMEL)
        self.words = BLOCK_NUMEL * whole + (1 << (rest - 1).bit_length() if rest else 0)

    @property
    def keys(self) -> Iterable[Any]:
        """The keys that there may be."""
        return self._places.keys()

    def cast(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a state with values of the forms that are packed, where they can be: as from a state dict."""
        found = dict(state)
        for key in found.keys() & self._places.keys():
            form, value = self._places[key][0], found[key]
            if form is None or value is None or (math.isnan(number(value)) and form.number is not None):
                continue
            if form.number is not None:
                found[key] = form.number(number(value))
            elif not isinstance(value, torch.Tensor):
                found[key] = torch.tensor(value, dtype=form.dtype, device="cpu")
            elif tuple(value.shape) == form.size:
                target = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="cpu")
                found[key] = target.copy_(value.detach())
        return found

    def load(self, words: torch.Tensor) -> dict[Any, Any]:
        """Return what is packed: tensors in place, plain numbers; flat words as `ClassRule` has them."""
        flags, found = self._flags(words) if words.numel() else 0, {}
        for bit, (key, (form, start)) in enumerate(self._places.items()):
            state = flags >> 2 * bit & 3
            if state == 1 and form is not None:
                value = self._at(words, form, start)
                found[key] = value if form.number is None else form.number(value.item())
            elif state:
                found[key] = None
        return found

    def store(self, words: torch.Tensor, state: Mapping[Any, Any]) -> None:
        """Pack a state; tensors that lie in place already are left alone.

        Raises:
            TypeError: A value is not of the form that was found out; names it.
        """
        if not words.numel():  # of a parameter without elements
            return
        flags, own = 0, words.untyped_storage().data_ptr()
        targets = {key: self._at(words, form, start) for key, (form, start) in self._places.items() if form}

        def in_anothers_place(key: Any, value: Any) -> bool:
            is_packed = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == own
            return is_packed and not (key in targets and value.data_ptr() == targets[key].data_ptr())

        # Read before anything is written there.
        state = {key: value.clone() if in_anothers_place(key, value) else value for key, value in state.items()}
        for bit, (key, (form, _)) in enumerate(self._places.items()):
            if key not in state:
                continue
            value = state[key]
            if value is None:
                flags |= 2 << 2 * bit
                continue
            if form is None or (Form.of(value) != form and not form.number):
                raise TypeError(f"{key!r} was {form or 'None'} and is {Form.of(value)}")
            target = targets[key]
            if form.number is not None:
                if type(value) is not form.number:
                    raise TypeError(f"{key!r} was a {form} and is a {type(value).__name__}")
                target.fill_(form.number(value))
            elif value.data_ptr() != target.data_ptr():
                target.copy_(value)
            flags |= 1 << 2 * bit
        if unknown := [key for key in state if key not in self._places]:
            raise TypeError(f"{unknown[0]!r} is new")
        self._bytes(words)[:FLAG_BYTES].view(torch.int64).fill_(flags - (1 << 64) if flags >> 63 else flags)

    def _flags(self, words: torch.Tensor) -> int:
        return int(self._bytes(words)[:FLAG_BYTES].view(torch.int64).item()) & ((1 << 64) - 1)

    def _at(self, words: torch.Tensor, form: Form, start: int) -> torch.Tensor:
        return self._bytes(words)[start : start + form.nbytes].view(form.dtype).as_strided(form.size, form.stride)

    @staticmethod
    def _bytes(words: torch.Tensor) -> torch.Tensor:
        return words.view(torch.uint8)
