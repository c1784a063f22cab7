"""The state that a wrapped optimizer class keeps of one parameter, packed into one run of memory.

The first 8 bytes have two bits for each key of the state, in the order of places: one of the marks below, or 0 if the
state has no such key. After them each number takes 8 bytes, and each tensor lies in its own dtype, a large one at a
multiple of 64 bytes. So if all bytes are 0, there is no state yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.layout import ceil_div
from offload.optim import shards
from offload.rules import BLOCK_NUMEL, plain_number

FLAG_BYTES = 8
MARK_BITS = 2
MOST_KEYS = FLAG_BYTES * 8 // MARK_BITS
SMALL_BYTES = 8
LARGE_BYTES = 64
"""Alignment of small and of large values; a value of more than `LARGE_BYTES` is large."""

VALUE = 1
NONE = 2
UNSIGNED = 3
"""Marks of a key: there is a value; the value is None; it is an integer of 2^63 or more, packed minus 2^64."""

NUMBERS: dict[type, torch.dtype] = {bool: torch.int64, int: torch.int64, float: torch.float64}
"""The types of plain numbers, and the dtypes that they are packed as."""

INTEGERS = range(-(1 << 63), 1 << 64)
"""The integers that can be packed."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a value of a state: of a plain number, or of a tensor.

    Attributes:
        number: The type of a plain number; None for a tensor.
        dtype: The tensor's; for a number the dtype that it is packed as.
        size: The tensor's sizes.
        stride: The tensor's strides, in elements.
    """

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
        return cls(number=None, dtype=value.dtype, size=tuple(value.shape), stride=tuple(value.stride()))

    @property
    def nbytes(self) -> int:
        """Bytes of a value's elements."""
        return math.prod(self.size) * self.dtype.itemsize

    def cast(self, value: Any) -> Any:
        """Return a value, as from a state dict, converted to this form.

        Elements of floating-point tensors may be rounded. All other numbers stay the same, whatever their type. A
        value of another kind or shape is returned without conversion to this form; `Packing.check` refuses it.

        Raises:
            TypeError: The number would change.
        """
        plain = plain_number(value)  # None if the value is no number, and no tensor or array of one element
        try:
            if self.number is not None:
                converted = value if plain is None else self.number(plain)
                if plain is None or converted == plain:  # else the number would change: see the end
                    return converted
                if converted != converted and plain != plain:  # both are NaN
                    return converted
            else:
                given = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
                if tuple(given.shape) != self.size:  # `Packing.check` refuses it
                    return given
                converted = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu").copy_(given)
                may_round = converted.is_floating_point() and given.is_floating_point()
                # Else, as from int64 to int32, the conversion back has to give the same elements.
                if converted.dtype is given.dtype or may_round or torch.equal(converted.to(given.dtype), given):
                    return converted
        except (ValueError, OverflowError, RuntimeError) as cause:
            raise TypeError(f"no {self}: {cause}") from cause
        raise TypeError(f"no {self}: {value if plain is None else plain}")

    def __str__(self) -> str:
        """Return the form for error messages: `int`, or `float32 (2, 3)`."""
        return self.number.__name__ if self.number else f"{self.dtype} {self.size}".replace("torch.", "")


class _Place(NamedTuple):
    """Where a key's value is packed: its form, and where it starts, in bytes from the beginning of the packed state.

    `form` is None for a key whose only value in trials was None; then it has no bytes.
    """

    form: Form | None
    start: int


class Packing:
    """How the state of a parameter is packed: a place for each key.

    Args:
        forms: The form of each key's value; None if only None was seen.
        numel: Elements of the parameter.

    Attributes:
        words: How many words of 4 bytes the packed state takes for each block of `BLOCK_NUMEL` elements of the
            parameter, rounded up so that few different numbers occur.

    Raises:
        TypeError: There are too many keys.
    """

    def __init__(self, forms: Mapping[Any, Form | None], numel: int) -> None:
        if len(forms) > MOST_KEYS:
            raise TypeError(f"{len(forms)} values, and {MOST_KEYS} are possible")
        self._places: dict[Any, _Place] = {}  # by key
        end = FLAG_BYTES
        sizes = {key: 0 if form is None else form.nbytes for key, form in forms.items()}
        # Small values first, so that alignment wastes little; else in the class's order, as sorting is stable.
        for key in sorted(sizes, key=lambda key: sizes[key] > LARGE_BYTES):
            align = LARGE_BYTES if sizes[key] > LARGE_BYTES else SMALL_BYTES
            start = ceil_div(end, align) * align
            self._places[key] = _Place(forms[key], start)
            end = start + sizes[key]
        blocks = max(1, ceil_div(numel, BLOCK_NUMEL))
        self.words = _rounded_words(ceil_div(end, 4 * blocks))

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
        for key in converted.keys() & self._places.keys():  # `store` refuses all other keys
            form = self._places[key].form
            if form is not None and converted[key] is not None:
                try:
                    converted[key] = form.cast(converted[key])
                except TypeError as cause:
                    raise TypeError(f"{key!r} is {cause}") from cause
        return converted

    def load(self, packed_words: torch.Tensor) -> dict[Any, Any]:
        """Return the state that is packed in `packed_words`: tensors are views of these words, numbers are copies."""
        # A parameter without elements has no words.
        marks = self._read_marks(packed_words) if packed_words.numel() else 0
        state: dict[Any, Any] = {}
        for number, (key, (form, start)) in enumerate(self._places.items()):
            mark = (marks >> MARK_BITS * number) & ((1 << MARK_BITS) - 1)
            if mark in (VALUE, UNSIGNED) and form is not None:
                value = self._view_of_place(packed_words, form, start)
                state[key] = value if form.number is None else form.number(value.item())
                if mark == UNSIGNED:
                    state[key] += 1 << 64
            elif mark:  # `NONE`; without a mark the state has no such key
                state[key] = None
        return state

    def check(self, state: Mapping[Any, Any]) -> None:
        """Raise `TypeError`, which names the value, if a state has other keys or forms than are packed."""
        for key, value in state.items():
            if key not in self._places:
                raise TypeError(f"{key!r} is new")
            form = self._places[key].form
            try:
                form_now = Form.of(value)
            except TypeError as cause:
                raise TypeError(f"{key!r} is {cause}") from cause
            if form_now not in (None, form):
                raise TypeError(f"{key!r} was {form or 'None'} and is {form_now}")

    def store(self, packed_words: torch.Tensor, state: Mapping[Any, Any]) -> None:
        """Pack a state into `packed_words`; tensors that lie in their place already are not copied.

        Raises:
            TypeError: The state has other keys or forms than are packed; nothing has been written then.
        """
        self.check(state)
        if not packed_words.numel():  # of a parameter without elements
            return
        own_addresses = range(packed_words.data_ptr(), packed_words.data_ptr() + packed_words.nbytes)
        places = self._places.items()
        targets = {key: self._view_of_place(packed_words, form, start) for key, (form, start) in places if form}

        def is_in_place_of_another(key: Any, value: Any) -> bool:
            """Return whether a value lies in these words, but not in its key's place, as after a class swaps two."""
            # A tensor that `load` has returned has a storage of its own, which begins within the words.
            if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() not in own_addresses:
                return False
            return key not in targets or value.data_ptr() != targets[key].data_ptr()

        # A value in another key's place is copied before that place is written.
        state = {key: value.clone() if is_in_place_of_another(key, value) else value for key, value in state.items()}
        marks = 0
        for number, (key, (form, _)) in enumerate(places):
            if key in state:
                marks |= _store_value(state[key], form, targets.get(key)) << MARK_BITS * number
        as_signed = marks - (1 << 64) if marks >> 63 else marks  # the same 64 bits, as torch has them
        self._as_bytes(packed_words)[:FLAG_BYTES].view(torch.int64).fill_(as_signed)

    def _read_marks(self, packed_words: torch.Tensor) -> int:
        """Return the marks of all keys, `MARK_BITS` for each, as an unsigned number."""
        return int(self._as_bytes(packed_words)[:FLAG_BYTES].view(torch.int64).item()) & ((1 << 64) - 1)

    def _view_of_place(self, packed_words: torch.Tensor, form: Form, start: int) -> torch.Tensor:
        """Return a view of a place as a tensor of its form.

        Its storage is that place alone, made through NumPy, as `torch.save` saves a view's whole storage.
        """
        memory = torch.from_numpy(self._as_bytes(packed_words).numpy()[start : start + form.nbytes])
        return memory.view(form.dtype).as_strided(form.size, form.stride)

    @staticmethod
    def _as_bytes(packed_words: torch.Tensor) -> torch.Tensor:
        return packed_words.view(torch.uint8)


def _store_value(value: Any, form: Form | None, place: torch.Tensor | None) -> int:
    """Write a value to its place, unless it lies there already; return the value's mark.

    `form` and `place` are None for a key of which only None was seen; then `value` is None, too.
    """
    if value is None or form is None or place is None:
        return NONE
    if form.number is not None:
        is_unsigned = form.number is int and value >= 1 << 63
        place.fill_(value - (1 << 64) if is_unsigned else value)
        return UNSIGNED if is_unsigned else VALUE
    if value.data_ptr() != place.data_ptr():
        place.copy_(value)
    return VALUE


def _rounded_words(words: int) -> int:
    """Round a number of words per block up, so that few different numbers occur.

    Parameters with different numbers never share a subgroup. A multiple of `BLOCK_NUMEL` (a whole number of words for
    each element) stays; what is beyond it is rounded up to a power of two.
    """
    whole, rest = divmod(words, BLOCK_NUMEL)
    rounded_rest = 1 << (rest - 1).bit_length() if rest else 0
    return BLOCK_NUMEL * whole + rounded_rest
