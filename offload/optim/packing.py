"""The state that a wrapped optimizer class keeps of one parameter, packed into one run of memory.

The first 8 bytes have two bits for each key of the state: one of the marks below. After them each number takes 8
bytes, and each tensor lies in its own dtype, a large one at a multiple of 64 bytes. If all bytes are 0, there is no
state yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.optim import shards
from offload.rules import BLOCK_NUMEL, plain_number

FLAG_BYTES = 8
MOST_KEYS = FLAG_BYTES * 8 // 2
SMALL_BYTES, LARGE_BYTES = 8, 64
"""Alignment of small and of large values; a value of more than `LARGE_BYTES` is large."""

VALUE, NONE, UNSIGNED = 1, 2, 3
"""Marks of a key: there is a value; the value is None; it is an integer of 2^63 or more, packed minus 2^64."""

NUMBERS: dict[type, torch.dtype] = {bool: torch.int64, int: torch.int64, float: torch.float64}
"""The types of plain numbers, and the dtypes that they are packed as."""

INTEGERS = range(-(1 << 63), 1 << 64)
"""The integers that can be packed."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a value of a state: a plain number's type (`number`), or a tensor's dtype, sizes and strides."""

    number: type | None
    dtype: torch.dtype
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: Any) -> Form | None:
        """Return the form of a value; None for None.

        Raises:
            TypeError: The value cannot be packed; the message says what it is.
        """
        if value is None:
            return None
        if type(value) is int and value not in INTEGERS:
            raise TypeError("an integer of more than 64 bits")
        if type(value) in NUMBERS:
            return cls(type(value), NUMBERS[type(value)])
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"a {type(value).__name__}")
        if value.layout != torch.strided or not shards.is_dense(value):
            raise TypeError("a tensor that is not dense")
        return cls(None, value.dtype, tuple(value.shape), tuple(value.stride()))

    @property
    def nbytes(self) -> int:
        """Bytes of a value's elements."""
        return math.prod(self.size) * self.dtype.itemsize

    def cast(self, value: Any) -> Any:
        """Return a value converted to this form: floats of tensors may be rounded, all else stays the same number.

        A value of another kind or shape is returned as it is; `Packing.check` refuses it.

        Raises:
            TypeError: The number would change.
        """
        plain = plain_number(value)
        try:
            if self.number is not None:
                converted = value if plain is None else self.number(plain)
                if plain is None or converted == plain or (converted != converted and plain != plain):
                    return converted
            else:
                is_tensor = isinstance(value, torch.Tensor)
                given = value.detach().cpu() if is_tensor else torch.from_numpy(np.array(value))
                if tuple(given.shape) != self.size:
                    return given
                converted = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu").copy_(given)
                if converted.dtype is given.dtype or (converted.is_floating_point() and given.is_floating_point()):
                    return converted
                if torch.equal(converted.to(given.dtype), given):
                    return converted
        except (ValueError, OverflowError, RuntimeError) as cause:
            raise TypeError(f"no {self}: {cause}") from cause
        raise TypeError(f"no {self}: {value if plain is None else plain}")

    def __str__(self) -> str:
        return self.number.__name__ if self.number else f"{self.dtype} {self.size}".replace("torch.", "")


class Packing:
    """How the state of a parameter is packed: a place for each key.

    Args:
        forms: The form of each key's value; None if only None was seen.
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
        packed_words = -(-end // (4 * max(1, -(-numel // BLOCK_NUMEL))))
        # Rounded up so that few different numbers occur: parameters with different ones never share a subgroup.
        whole, rest = divmod(packed_words, BLOCK_NUMEL)
        self.words = BLOCK_NUMEL * whole + (1 << (rest - 1).bit_length() if rest else 0)

    @property
    def keys(self) -> Iterable[Any]:
        """The keys that a state may have."""
        return self._places.keys()

    def cast(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a state, as from a state dict, with its values converted to the forms that are packed.

        Raises:
            TypeError: A value would change; the message names it.
        """
        converted = dict(state)
        for key in converted.keys() & self._places.keys():
            form = self._places[key][0]
            if form is not None and converted[key] is not None:
                try:
                    converted[key] = form.cast(converted[key])
                except TypeError as cause:
                    raise TypeError(f"{key!r} is {cause}") from cause
        return converted

    def load(self, packed_words: torch.Tensor) -> dict[Any, Any]:
        """Return the state packed in flat `words`: tensors are views of these, numbers are copies."""
        flags, state = self._flags(packed_words) if packed_words.numel() else 0, {}
        for bit, (key, (form, start)) in enumerate(self._places.items()):
            mark = flags >> 2 * bit & 3
            if mark in (VALUE, UNSIGNED) and form is not None:
                value = self._at(packed_words, form, start)
                state[key] = value if form.number is None else form.number(value.item())
                if mark == UNSIGNED:
                    state[key] += 1 << 64
            elif mark:
                state[key] = None
        return state

    def check(self, state: Mapping[Any, Any]) -> None:
        """Raise `TypeError`, which names the value, if a state has other keys or forms than are packed."""
        for key, value in state.items():
            if key not in self._places:
                raise TypeError(f"{key!r} is new")
            form = self._places[key][0]
            try:
                form_now = Form.of(value)
            except TypeError as cause:
                raise TypeError(f"{key!r} is {cause}") from cause
            if form_now not in (None, form):
                raise TypeError(f"{key!r} was {form or 'None'} and is {form_now}")

    def store(self, packed_words: torch.Tensor, state: Mapping[Any, Any]) -> None:
        """Pack a state into `words`; tensors that lie in their place already are not copied.

        Raises:
            TypeError: See `check`; nothing has been written then.
        """
        self.check(state)
        if not packed_words.numel():  # of a parameter without elements
            return
        flags, own = 0, range(packed_words.data_ptr(), packed_words.data_ptr() + packed_words.nbytes)
        targets = {key: self._at(packed_words, form, start) for key, (form, start) in self._places.items() if form}

        def in_anothers_place(key: Any, value: Any) -> bool:
            is_packed = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in own
            return is_packed and not (key in targets and value.data_ptr() == targets[key].data_ptr())

        # A value in another key's place is copied before that place is written.
        state = {key: value.clone() if in_anothers_place(key, value) else value for key, value in state.items()}
        for bit, (key, (form, _)) in enumerate(self._places.items()):
            if key not in state:
                continue
            value, mark = state[key], VALUE
            if value is None or form is None:
                mark = NONE
            elif form.number is not None:
                mark = UNSIGNED if form.number is int and value >= 1 << 63 else VALUE
                targets[key].fill_(value - (1 << 64) if mark == UNSIGNED else value)
            elif value.data_ptr() != targets[key].data_ptr():
                targets[key].copy_(value)
            flags |= mark << 2 * bit
        self._bytes(packed_words)[:FLAG_BYTES].view(torch.int64).fill_(flags - (1 << 64) if flags >> 63 else flags)

    def _flags(self, packed_words: torch.Tensor) -> int:
        return int(self._bytes(packed_words)[:FLAG_BYTES].view(torch.int64).item()) & ((1 << 64) - 1)

    def _at(self, packed_words: torch.Tensor, form: Form, start: int) -> torch.Tensor:
        """Return a tensor over a place in `words`, with a storage of its own: `torch.save` saves whole storages."""
        memory = torch.from_numpy(self._bytes(packed_words).numpy()[start : start + form.nbytes])
        return memory.view(form.dtype).as_strided(form.size, form.stride)

    @staticmethod
    def _bytes(packed_words: torch.Tensor) -> torch.Tensor:
        return packed_words.view(torch.uint8)
