"""`StateSpec`: an update rule and a format, which together describe the state of a parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from offload.dtypes import DtypeCode
from offload.formats.exact import EXACT
from offload.formats.format import FORMAT_OF_DTYPE, StateFormat, StateTensor
from offload.rules import ADAMW, MASTER, UpdateRule


@dataclass(frozen=True)
class StateSpec:
    """What state a parameter has, and how it is stored.

    Attributes:
        rule: Which state is kept, and how an update changes it.
        format: How the state is stored.
    """

    rule: UpdateRule
    format: StateFormat

    def stored_in(self, state_format: StateFormat) -> StateSpec:
        """Return the same state in a format."""
        return self if state_format is self.format else replace(self, format=state_format)

    def row(self, step: int, values: Any, grad_scale: float) -> Any:
        """Return the rule's `row`, after the format's check.

        Raises:
            ConfigError: If hyperparameters cannot be used, by the rule or by the format.
        """
        self.format.check(self.rule, values)
        return self.rule.row(step, values, grad_scale)

    @cached_property
    def beside(self) -> tuple[StateTensor, ...]:
        """The tensors that all state but the master is stored in."""
        return self.format.state(self.rule)

    @cached_property
    def stored(self) -> tuple[StateTensor, ...]:
        """The tensors that all state of a 16-bit weight is stored in, those of the master first."""
        masters = self.format.masters
        if self.rule.master_dtype is not DtypeCode.FLOAT32:  # such masters are copies of the weights, not encoded
            masters = (StateTensor(MASTER, FORMAT_OF_DTYPE[self.rule.master_dtype]),)
        return (*masters, *self.beside)

    @property
    def item_bytes(self) -> float:
        """Bytes of state of an element of a 16-bit weight, without padding; may be a fraction, as with scales."""
        return sum(tensor.format.bytes_each for tensor in self.stored)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of state that so many elements of a 16-bit weight take, padding included."""
        return sum(tensor.format.nbytes(numel) for tensor in self.stored)

    def fitting_numel(self, nbytes: int) -> int:
        """Return the greatest number of elements, a multiple of `sector_numel`, whose state fits into `nbytes`."""
        unit = self.sector_numel
        numel = int(nbytes / self.item_bytes) // unit * unit
        while self.nbytes(numel) > nbytes:  # because of padding, which `item_bytes` leaves out
            numel -= unit
        return numel

    @property
    def sector_numel(self) -> int:
        """The least number of elements that fill whole sectors of every tensor that has an item for each element.

        Tensors with an item for each block, such as scales, are padded instead.
        """
        # All are powers of two, so the greatest is a multiple of each.
        return max(tensor.format.sector_numel for tensor in self.stored if tensor.format.item_numel == 1)

    @property
    def tile_unit(self) -> int:
        """The least number of elements that fill whole sectors of every tensor, scales and packed state included.

        A power of two. Where a subgroup has several tiles, a tile has a multiple of it, as no tile is padded but the
        last.
        """
        return max(tensor.format.sector_numel for tensor in self.stored)

    @property
    def memory_cost(self) -> float:
        """Bytes of memory traffic of an update for each byte of state; gradient and weight have 16 bits."""
        # An element's state is read and written, its gradient is read, and its weight is written.
        state_bytes, gradient_bytes, weight_bytes = 2 * self.item_bytes, 2, 2
        return (state_bytes + gradient_bytes + weight_bytes) / self.item_bytes


EXACT_ADAMW = StateSpec(ADAMW, EXACT)
"""The default in plans and measurements."""
