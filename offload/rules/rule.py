"""`UpdateRule`: what layout, plan, measurement and checkpoints need to know of a rule; none asks for its name.

Each rule has arithmetic in csrc/kernels/rules/, a block in `offload.kernels.triton_kernels`, and a definition in
`offload.kernels.reference`; all three compute the master's change from a scaled gradient and the rule's state. Rules
of whole parameters have none of these: `offload.kernels.whole` updates by torch's operations.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from offload.dtypes import DtypeCode
from offload.errors import ConfigError
from offload.protocols import SEGMENT_DTYPE

MOST_STEPS = 2**53
"""Largest step count: float64, in which the factors of a step are computed, has no larger odd numbers."""

MOST_ITEMS = 64
"""Most items of a hyperparameter that is a sequence but neither a list nor a tuple."""

BETAS = "give a sequence of two numbers from 0 (included) to 1 (not included)"

BLOCK_NUMEL = 64
"""Elements of a block, whose packed state is one item: no segment begins within a block."""

MASTER = "master"
"""The copy of a 16-bit weight, which every rule has; an fp32 weight *is* its master."""

PACKED = "packed"
"""All state that a `torch.optim` class keeps of a parameter: its tensors and numbers, one after the other."""


class UpdateRule(ABC):
    """Which state a parameter has, which hyperparameters a group has, and which scalars a step computes from them."""

    name: str
    """The name in manifests: state of one rule is not read as another's."""

    code: ClassVar[int] = 0
    """Number of the rule in csrc/kernels/rules.h; 0 for rules of whole parameters, which have no kernel there."""

    state: ClassVar[tuple[str, ...]]
    """The tensors beside the master, each of which starts from zeros; at most `protocols.MAX_STATES`."""

    roots: ClassVar[tuple[str, ...]] = ()
    """State tensors that are never negative and are used by their square roots, which a format may store instead."""

    scalars: ClassVar[Any]
    """A named tuple of the float32 numbers that an update needs beside tensors.

    It begins with `grad_scale`, which the gradient is multiplied by, and `decay`; up to `protocols.MAX_SCALARS` of
    the rule's own follow.
    """

    cut: ClassVar[Literal["anywhere", "whole_parameter"]] = "anywhere"
    """Where a parameter may be cut. Whole parameters are updated by `offload.kernels.whole`, with torch operations:
    on the CPU, and never before their step is sealed."""

    packed_words: int = 0
    """Words of `PACKED`, 4 bytes each, for each block of `BLOCK_NUMEL` elements; 0 if a rule has no packed state."""

    master_dtype: DtypeCode = DtypeCode.FLOAT32
    """The type of masters: fp32, or the weight's own type, so that they are copies of it."""

    scratch_item_bytes: ClassVar[int] = 0
    """Bytes of temporary memory that the update of a parameter takes for each of its elements."""

    defaults: ClassVar[Mapping[str, Any]]
    """Default hyperparameters of a group, by torch's names."""

    missing_step: ClassVar[int | None] = None
    """The step count to assume on import of state without one, as other implementations of the rule write."""

    @abstractmethod
    def values(self, group: Mapping[str, Any]) -> Any:
        """Return a group's hyperparameters for `row`.

        Args:
            group: One of `param_groups`; numbers may be tensors or arrays of one element.

        Raises:
            ConfigError: If one cannot be used.
        """

    @abstractmethod
    def row(self, step: int, values: Any, grad_scale: float) -> Any:
        """Return the `scalars` of one parameter's update.

        Args:
            step: Number of this update of the parameter, counted from 1.
            values: What `values` returned.
            grad_scale: Clipping factor over loss scale.
        """

    def update(self, piece: Any, group: int, values: Any) -> None:
        """Update one whole parameter, with torch's operations; for rules of whole parameters alone.

        Args:
            piece: An `offload.kernels.pieces.Piece`: what is stored for it, its master and state, is changed.
            group: Number of its group.
            values: What `values` returned.
        """
        raise NotImplementedError

    def work(self, shape: Sequence[int]) -> float:
        """Return the cost of one whole parameter's update, in a unit of the rule's own; here its number of elements.

        Whole parameters are dealt to ranks by their cost.
        """
        return float(math.prod(shape))

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for hyperparameters that no training should begin with.

        A schedule may exceed these limits later: `values` and `row` refuse only what cannot be computed.
        """
        self.values(group)

    def decoupled(self, values: Any) -> bool:
        """Return whether `decay` of `row` multiplies the master, as in AdamW.

        Else, as here, `decay` times the master is added to the gradient: an L2 term.
        """
        return False

    def forgets(self, step: int, values: Any) -> bool:
        """Return whether an update takes zeros for the old state (beside the master); here it never does.

        A rule says so where the old state has no part in the new one: multiplied by 0, a state that is not finite
        would make NaN.
        """
        return False

    def added_to_roots(self, values: Any) -> float | None:
        """Return the number (eps) that an update adds to square roots of state before it divides by them.

        None if it divides by no such roots, as here.
        """
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, the master first."""
        return (MASTER, *self.state, *((PACKED,) if self.packed_words else ()))

    @property
    def is_whole(self) -> bool:
        """Whether parameters are not cut."""
        return self.cut == "whole_parameter"

    def numel_of(self, name: str, numel: int) -> int:
        """Return the number of elements, of 4 bytes each, of the tensor `name` of a parameter of `numel` elements.

        Of packed state that is its words, of all others `numel`.
        """
        if name != PACKED:
            return numel
        blocks = -(-numel // BLOCK_NUMEL)
        return blocks * self.packed_words


class WholeScalars(NamedTuple):
    """What the update of a whole parameter needs beside tensors and hyperparameters."""

    grad_scale: float
    decay: float


class WholeRule(UpdateRule):
    """A rule whose parameters are not cut; its update is given the hyperparameters themselves."""

    scalars = WholeScalars
    cut: ClassVar[Literal["anywhere", "whole_parameter"]] = "whole_parameter"

    def row(self, step: int, values: Any, grad_scale: float) -> WholeScalars:
        """See `UpdateRule.row`; the rule itself decays, so `decay` is 0."""
        return WholeScalars(grad_scale, 0.0)


def segment_dtype(rule: UpdateRule) -> np.dtype[Any]:
    """Return the dtype of a row of `SEGMENT_DTYPE` in which a rule's state tensors and scalars have fields by name.

    The bytes of a row are the same: the fields `state` and `scalars` are divided, and of a rule with packed state the
    field `scales` is called `PACKED`.
    """
    return _segment_dtype(bool(rule.packed_words), (*rule.state,), rule.scalars)


@cache
def _segment_dtype(is_packed: bool, state: tuple[str, ...], scalars: Any) -> np.dtype[Any]:
    """Do the work of `segment_dtype` for a rule with this `state` and `scalars`, whose state may be packed.

    The rule itself is no argument, as the cache keeps arguments alive for good. A `ClassRule` refers to its runner,
    and so to a wrapped optimizer and to attributes of its parameters.
    """
    # Each field's dtype and offset in a row; at the end they are put in the order of their offsets again. (`or {}` is
    # for type checkers: a dtype without fields has None. After the offset numpy may give a title, which is left out.)
    fields = {name: (dtype, offset) for name, (dtype, offset, *_) in (SEGMENT_DTYPE.fields or {}).items()}
    _, state_offset = fields.pop("state")
    _, scalars_offset = fields.pop("scalars")
    if is_packed:  # its address takes the place of that of scales: no format with scales stores packed state
        fields[PACKED] = fields.pop("scales")
    for number, name in enumerate(state):
        fields[name] = np.dtype(np.uint64), state_offset + 8 * number  # an address
    _, _, *own_scalars = scalars._fields  # `grad_scale` and `decay`, which all rules have, are fields already
    for number, name in enumerate(own_scalars):
        fields[name] = np.dtype(np.float32), scalars_offset + 4 * number
    by_offset = sorted(fields.items(), key=lambda field: field[1][1])
    names = [name for name, _ in by_offset]
    formats, offsets = zip(*(field for _, field in by_offset), strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": SEGMENT_DTYPE.itemsize})


def rounded(values: Iterable[float]) -> Iterator[float]:
    """Yield numbers rounded to float32; a number beyond its range becomes infinity, which shows in the update."""
    with np.errstate(over="ignore"):
        yield from [float(np.float32(value)) for value in values]


def plain_number(value: Any) -> Any:
    """Return a number, or the one element of a tensor or an array, without rounding; None for anything else."""
    try:
        is_tensor_or_array = hasattr(value, "shape") and hasattr(value, "item")
        if is_tensor_or_array:
            value = value.item() if math.prod(value.shape) == 1 else None
    except RuntimeError:  # a tensor without values
        return None
    return value if isinstance(value, numbers.Real) else None


def number(value: Any) -> float:
    """Return a number, or the one element of a tensor or an array, as a float; NaN for anything else."""
    plain = plain_number(value)
    try:
        return math.nan if plain is None else float(plain)
    except OverflowError:  # an integer beyond float64
        return math.inf if plain > 0 else -math.inf


def checked_step(what: str, value: Any) -> int:
    """Return a value as a step count.

    Raises:
        ConfigError: The value is no step count; names `what`.
    """
    step = number(value)
    if not (0 <= step <= MOST_STEPS and step == int(step)):  # NaN, for what is no number, fails the comparisons
        raise ConfigError(what, step, "give the number of updates that the parameter has had")
    return int(step)


def flag(group: Mapping[str, Any], name: str) -> bool:
    """Return a hyperparameter that is true or false; false where it is missing.

    Raises:
        ConfigError: If it is neither.
    """
    value = group.get(name, False)
    if not isinstance(value, bool | int | np.bool_):
        raise ConfigError(name, value, "use true or false")
    return bool(value)


def not_negative(group: Mapping[str, Any], *names: str) -> list[float]:
    """Return hyperparameters that have to be finite and not negative.

    Raises:
        ConfigError: If one is not.
    """
    numbers_given = [number(group.get(name)) for name in names]
    for name, value in zip(names, numbers_given, strict=True):
        if not 0 <= value < math.inf:  # NaN, for what is missing or no number, too
            raise ConfigError(name, group.get(name), "give a finite number >= 0")
    return numbers_given


def items(value: Any) -> list[Any] | None:
    """Return the items of a sequence; None for anything else, and for more than `MOST_ITEMS` of an unknown type."""
    if isinstance(value, tuple | list):
        return [*value]
    try:
        return [value[index] for index in range(len(value))] if len(value) <= MOST_ITEMS else None
    except (TypeError, LookupError):  # a number, a mapping of names, a tensor without dimensions
        return None


def decay_rates(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return a group's `betas`: any sequence of two numbers; the first may have been driven beyond 1 by a schedule.

    Raises:
        ConfigError: If they are something else.
    """
    betas = group.get("betas")
    pair = [number(beta) for beta in items(betas) or ()]  # empty, and refused below, if they are no sequence
    if len(pair) != 2 or not math.isfinite(pair[0]) or not 0 <= pair[1] < 1:
        raise ConfigError("betas", betas, BETAS)
    return pair[0], pair[1]


def check_decay_rates(group: Mapping[str, Any]) -> None:
    """Refuse `betas` outside of [0, 1)."""
    if not all(0 <= beta < 1 for beta in decay_rates(group)):
        raise ConfigError("betas", group["betas"], BETAS)
