"""What an update rule says of itself. Layout, plan, measurement and checkpoints ask it; none knows a rule by name.

Each rule has arithmetic in csrc/kernels/rules/, a block in `offload.kernels.triton_kernels`, and a definition in
`offload.kernels.reference`; all three compute what the master moves by, from a scaled gradient and the rule's state.
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
"""Step counts beyond this are not told apart in float64, in which the factors of a step are computed."""

MOST_ITEMS = 64
"""Items of a hyperparameter that is neither a list nor a tuple; what has more is no hyperparameter."""

BETAS = "give a sequence of two numbers from 0 (included) to 1 (not included)"

BLOCK_NUMEL = 64
"""Elements whose packed state is one item: no segment begins within a block."""

MASTER = "master"
"""The copy of a 16-bit weight, which every rule has; an fp32 weight *is* its master."""

PACKED = "packed"
"""All that a class of torch's own kind keeps of a parameter, one tensor or number behind the other."""


class UpdateRule(ABC):
    """Which state a parameter has, which hyperparameters a group has, and what a step's segments are told."""

    name: str
    """In manifests: state of one rule is not read as another's."""

    code: ClassVar[int] = 0
    """Number of the rule in csrc/kernels/rules.h; one of whole parameters has no kernel, and none."""

    state: ClassVar[tuple[str, ...]]
    """The tensors beside the master, each of which starts from zeros; at most `protocols.MAX_STATES`."""

    roots: ClassVar[tuple[str, ...]] = ()
    """Those that are never negative and enter updates by their square roots, which a format may store instead."""

    scalars: ClassVar[Any]
    """A named tuple of what an update needs beside tensors, each number one of float32's.

    It begins with `grad_scale`, which the gradient is multiplied by, and `decay`; up to `protocols.MAX_SCALARS` of
    the rule's own follow.
    """

    cut: ClassVar[Literal["anywhere", "whole_parameter"]] = "anywhere"
    """Where a parameter may be cut. What is updated whole is updated by `offload.kernels.whole`, in torch operations:
    by the CPU, and never before its step is sealed."""

    packed_words: int = 0
    """Words of `PACKED`, 4 bytes each, for each block of `BLOCK_NUMEL` elements; 0 where a rule has no such state."""

    master_dtype: DtypeCode = DtypeCode.FLOAT32
    """What masters are kept in: fp32, or the weight's own type, of which they are copies then."""

    scratch_item_bytes: ClassVar[int] = 0
    """Bytes that the update of a parameter takes meanwhile, beside state, for each of its elements."""

    defaults: ClassVar[Mapping[str, Any]]
    """A group's hyperparameters, by torch's names, as they are where nobody says otherwise."""

    missing_step: ClassVar[int | None] = None
    """The step count of state that has none, where other implementations of the rule keep none."""

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
            piece: An `offload.kernels.whole.Piece`: master and state are changed in place.
            group: Number of its group.
            values: What `values` returned.
        """
        raise NotImplementedError

    def work(self, shape: Sequence[int]) -> float:
        """Return the operations of one whole parameter's update, by which ranks share them; here its elements."""
        return float(math.prod(shape))

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that no training begins with.

        A schedule may go beyond them later: `values` and `row` refuse what cannot be computed.

        Raises:
            ConfigError: As said.
        """
        self.values(group)

    def decoupled(self, values: Any) -> bool:
        """Return whether `decay` multiplies the master; else it is the factor of an L2 term of the gradient."""
        return False

    def forgets(self, step: int, values: Any) -> bool:
        """Return whether an update starts from zeros, whatever the state holds (which may not be finite)."""
        return False

    def added_to_roots(self, values: Any) -> float | None:
        """Return what is added to roots before they divide, of what `values` returned; None where none do."""
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
        """Return the elements, of 4 bytes in memory, of one of `names`, for a parameter of so many."""
        return -(-numel // BLOCK_NUMEL) * self.packed_words if name == PACKED else numel


class WholeScalars(NamedTuple):
    """What the update of a whole parameter needs beside tensors and hyperparameters."""

    grad_scale: float
    decay: float


class WholeRule(UpdateRule):
    """A rule whose parameters are not cut; its hyperparameters go to the update as they are."""

    scalars = WholeScalars
    cut: ClassVar[Literal["anywhere", "whole_parameter"]] = "whole_parameter"

    def row(self, step: int, values: Any, grad_scale: float) -> WholeScalars:
        return WholeScalars(grad_scale, 0.0)


@cache
def segment_dtype(rule: UpdateRule) -> np.dtype[Any]:
    """Return `SEGMENT_DTYPE` with the names that a rule has for its state and scalars."""
    fields = {name: field[:2] for name, field in (SEGMENT_DTYPE.fields or {}).items()}
    (_, states), (_, scalars) = fields.pop("state"), fields.pop("scalars")
    if rule.packed_words:
        fields[PACKED] = fields.pop("scales")
    for number, name in enumerate(rule.state):
        fields[name] = np.dtype(np.uint64), states + 8 * number
    for number, name in enumerate(rule.scalars._fields[2:]):
        fields[name] = np.dtype(np.float32), scalars + 4 * number
    names = sorted(fields, key=lambda name: fields[name][1])
    formats, offsets = zip(*(fields[name] for name in names), strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": SEGMENT_DTYPE.itemsize})


def rounded(values: Iterable[float]) -> Iterator[float]:
    """Return numbers rounded to float32, once; beyond it is infinity, which the update then shows."""
    with np.errstate(over="ignore"):
        yield from [float(np.float32(value)) for value in values]


def plain_number(value: Any) -> Any:
    """Return a number, or that of a tensor or an array of one, exactly; None for anything else."""
    try:
        if hasattr(value, "shape") and hasattr(value, "item"):
            value = value.item() if math.prod(value.shape) == 1 else None
    except RuntimeError:  # a tensor without values
        return None
    return value if isinstance(value, numbers.Real) else None


def number(value: Any) -> float:
    """Return a number, or a tensor or an array of one, as a float; NaN for anything else."""
    found = plain_number(value)
    try:
        return math.nan if found is None else float(found)
    except OverflowError:
        return math.inf if found > 0 else -math.inf


def checked_step(what: str, value: Any) -> int:
    """Return how many updates a parameter has had.

    Raises:
        ConfigError: It is no such number; names `what`.
    """
    step = number(value)
    if not (0 <= step <= MOST_STEPS and step == int(step)):
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
    found = [number(group.get(name)) for name in names]
    for name, value in zip(names, found, strict=True):
        if not 0 <= value < math.inf:
            raise ConfigError(name, group.get(name), "give a finite number >= 0")
    return found


def items(value: Any) -> list[Any] | None:
    """Return the items of what can be counted and indexed; None for anything else, and for more than a few items."""
    if isinstance(value, tuple | list):
        return [*value]
    try:
        return [value[n] for n in range(len(value))] if len(value) <= MOST_ITEMS else None
    except (TypeError, LookupError):  # a number, a mapping of names, a tensor without dimensions
        return None


def decay_rates(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return a group's `betas`: any sequence of two numbers; the first may have been driven beyond 1 by a schedule.

    Raises:
        ConfigError: If they are something else.
    """
    betas = group.get("betas")
    pair = [number(beta) for beta in items(betas) or ()]
    if len(pair) != 2 or not math.isfinite(pair[0]) or not 0 <= pair[1] < 1:
        raise ConfigError("betas", betas, BETAS)
    return pair[0], pair[1]


def check_decay_rates(group: Mapping[str, Any]) -> None:
    """Refuse `betas` outside of [0, 1)."""
    if not all(0 <= beta < 1 for beta in decay_rates(group)):
        raise ConfigError("betas", group["betas"], BETAS)
