"""`StateFormat`: what layout, plan, kernels and checkpoints need to know of a format; none asks for its name.

`offload.kernels.reference` defines how stored state is decoded and encoded; csrc/kernels/formats/ and
`offload.kernels.triton_kernels` do it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from offload import combinations
from offload.dtypes import DtypeCode
from offload.protocols import SECTOR_BYTES
from offload.rules import BLOCK_NUMEL, MASTER, PACKED, UpdateRule


def blocks_numel(first_index: int, numel: int, block_numel: int) -> int:
    """Return how many blocks of `block_numel` elements a run of `numel` elements lies in, in part or as a whole.

    Blocks are counted from the start of the unsharded parameter, as is `first_index`, the run's first element.
    """
    return -(-(first_index % block_numel + numel) // block_numel)


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store the elements of one state tensor.

    A tensor is a sequence of items: one for each element, or, as for scales, one for each block of elements.

    Attributes:
        name: The name in manifests.
        item_bytes: Bytes of an item.
        item_numel: Elements that an item is for.
        dtype: Torch's name for the type of the memory's elements.
        code: Number of the format in csrc/kernels/; 0 for a tensor that is stored beside another, such as scales.
        block_numel: Elements that share an item of the tensor beside it.
    """

    name: str
    item_bytes: int
    item_numel: int = 1
    dtype: str = "uint8"
    code: int = 0
    block_numel: int = 1

    @property
    def bytes_each(self) -> float:
        """Bytes of an element."""
        return self.item_bytes / self.item_numel

    @property
    def sector_numel(self) -> int:
        """The least number of elements whose items fill whole sectors.

        `SECTOR_BYTES / gcd(SECTOR_BYTES, item_bytes)` items do. That is a power of two, as the bytes of a sector are.
        """
        return SECTOR_BYTES // math.gcd(SECTOR_BYTES, self.item_bytes) * self.item_numel

    def offset(self, numel: Any) -> Any:
        """Return the byte at which the item of element number `numel`, counted from 0, begins.

        `numel` may be an array of `uint64`; then the result is one, too.
        """
        if isinstance(numel, int):
            return numel // self.item_numel * self.item_bytes
        return numel // np.uint64(self.item_numel) * np.uint64(self.item_bytes)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of `numel` elements (whole items), padded to whole sectors if elements share items."""
        nbytes: int = self.offset(numel)
        return nbytes if self.item_numel == 1 else -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES

    def run_bytes(self, first_index: int, numel: int) -> int:
        """Return the bytes of the items that a run of elements lies in; see `blocks_numel`."""
        return blocks_numel(first_index, numel, self.item_numel) * self.item_bytes


FP32 = Format("fp32", 4, dtype="float32", code=DtypeCode.FLOAT32)

BF16 = Format("bf16", 2, dtype="bfloat16", code=DtypeCode.BFLOAT16)
"""Rounded stochastically by updates (`offload.kernels.reference.rounding`), to nearest where state is set."""

FORMAT_OF_DTYPE = {
    DtypeCode.BFLOAT16: BF16,
    DtypeCode.FLOAT16: Format("fp16", 2, dtype="float16", code=DtypeCode.FLOAT16),
    DtypeCode.FLOAT32: FP32,
}
"""The format of a copy of a weight in the weight's own dtype."""


class StateTensor(NamedTuple):
    """A stored tensor: one of a rule's state, or one beside it, such as scales. Its name, and how it is stored."""

    name: str
    format: Format = FP32


MASTER_LOW, SCALES = "master_low", "scales"
"""Tensors that a format may store beside a rule's: the lower plane of masters; and scales, in which each block of
elements has one byte for each tensor of state."""


class StateFormat(ABC):
    """How the state of a parameter is stored, whatever the rule."""

    name: ClassVar[str]
    """The name in settings and in files of rates."""

    code: ClassVar[int]
    """Its number in csrc/kernels/formats.h, in manifests, and in `FORMATS`."""

    rounds: ClassVar[bool] = True
    """Whether updates round state stochastically: by a seed, and an element's index in the unsharded parameter."""

    drift: ClassVar[float] = 1e-4
    """Greatest distance of a master from one in fp32 with the same gradients, as a share of how far it has moved."""

    block_numel: ClassVar[int] = 1
    """Elements that share scales, counted from the start of the unsharded parameter; 1 where none do."""

    stores_roots: ClassVar[bool] = False
    """Whether a rule's `roots` are stored as square roots; where such a root is 0, the element's other state is 0."""

    masters: ClassVar[tuple[StateTensor, ...]] = (StateTensor(MASTER),)
    """The tensors that the master of a 16-bit weight is stored in: one, or an upper and a lower plane."""

    @abstractmethod
    def element(self, is_root: bool) -> Format:
        """Return the format of a tensor of a rule's state; `is_root` if it is one of the rule's `roots`."""

    def state(self, rule: UpdateRule) -> tuple[StateTensor, ...]:
        """Return the tensors that a rule's state is stored in, without the master's."""
        tensors = tuple(StateTensor(name, self.element(name in rule.roots)) for name in rule.state)
        words = rule.packed_words
        if not words:
            return tensors
        # Packed state has an item of `words` words for each block of `BLOCK_NUMEL` elements.
        return (*tensors, StateTensor(PACKED, Format(f"{PACKED}{words}", 4 * words, BLOCK_NUMEL, "float32")))

    def stored_as(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors in which a rule's tensor `name` is stored: its own, then any beside it."""
        return (name,)

    def check(self, rule: UpdateRule, values: Any) -> None:
        """Raise `ConfigError` if this format cannot store a rule's state.

        `values` are the hyperparameters, as `UpdateRule.values` has returned them.
        """
        if self.rounds and rule.packed_words:
            combinations.TYPES_OF_ITS_OWN.refuse("state_format", self.name, rule=rule.name)

    @property
    def shares_scales(self) -> bool:
        """Whether elements share scales; parameters that lose by it are kept exact (`offload.layout.keep_exact`)."""
        return self.block_numel > 1

    def __reduce__(self) -> str:
        """Pickle and copy a format by its name: each exists once."""
        return self.name.upper()  # the variable that holds it in the module of its class

    def __repr__(self) -> str:
        return self.name
