"""Parameters -> shard -> subgroups -> tiles: where each element of the state belongs. Pure.

Invariants:
  * a subgroup holds parameters of one group, one weight dtype and one format of state, in order;
  * every segment starts at a multiple of `SEGMENT_ALIGN_NUMEL` elements in its subgroup and in its parameter, so
    vector loads of state and weight stay aligned. An exception, in formats whose elements share scales in blocks: a
    piece of a parameter may begin within a block. Its first segment then starts as far behind such a multiple as the
    piece begins behind the start of the block. So blocks are aligned, and no two segments share one;
  * a subgroup's tensors are whole sectors, whatever format they are in; its tiles cut each tensor into equal aligned
    pieces (the last may be shorter);
  * a parameter's segments cover it once, in order. Frozen or empty parameters have none.

Not here: which tier anything lives in (`offload.plan`) or where in memory or on disk (`offload.engine`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from offload import combinations
from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.errors import ConfigError, check_text, invariant
from offload.formats import EXACT, EXACT_ADAMW, FP32, StateFormat, StateSpec, StateTensor
from offload.protocols import ACTIVATIONS, SECTOR_BYTES, TileId
from offload.rules import MASTER, UpdateRule

SECTOR_NUMEL = FP32.sector_numel
SEGMENT_ALIGN_NUMEL = 64
PACKED_ALIGN_NUMEL = 1024
"""Segments with packed state begin at multiples of this many elements.

Each block of elements has some words in the packed tensor; with this alignment the words of a segment begin at a
multiple of 64 bytes, however many words a block has.
"""

LEAST_COMPACT_NUMEL = 4096
"""Elements of a parameter below which sharing scales saves nothing worth its noise."""

MAX_TILE_BYTES = 8 << 20
"""Most bytes of a tile by default.

Large enough that a disk reaches its bandwidth at depth 2, small enough to spread over several paths.
"""


WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What `torch.compile`, FSDP1 and activation checkpointing call the module that they wrap."""


def _unwrapped(name: str) -> str:
    """Return a parameter's name without the `WRAPPERS` among its modules."""
    *modules, last = name.split(".")
    return ".".join([*(module for module in modules if module not in WRAPPERS), last])


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Return for each parameter's name, perhaps that in a wrapped module, its name in the bare module.

    `WRAPPERS` are left out wherever they stand. DDP's `module.` is left out if every name begins with it. Where two
    names would become one, both stay as they are.
    """
    bare_of = {name: _unwrapped(name) for name in names}
    count = Counter(bare_of.values())
    bare_of = {name: bare if count[bare] == 1 else name for name, bare in bare_of.items()}
    # Again and again: modules may be wrapped several times.
    while bare_of and all(bare.startswith("module.") for bare in bare_of.values()):
        bare_of = {name: bare.removeprefix("module.") for name, bare in bare_of.items()}
    return bare_of


def matching_names(names: Iterable[str], there: Collection[str]) -> dict[str, str]:
    """Match parameters with those of a checkpoint, in which a wrapped module may have given them other names.

    A parameter whose own name is in the checkpoint has that one. Otherwise both names are compared without `WRAPPERS`
    and DDP's `module.`. A parameter is left out if none matches, or if several do.

    Args:
        names: The parameters' own names.
        there: The names in the checkpoint.

    Returns:
        The name in the checkpoint, by the parameter's own name.
    """

    def core(name: str) -> str:
        """Return a name without what wrappers add."""
        name = _unwrapped(name)
        while name.startswith("module."):
            name = name.removeprefix("module.")
        return name

    known = set(there)
    names = [*names]
    matches = {name: name for name in names if name in known}
    # Names that have no equal on the other side, by their core: those of the parameters, and of the checkpoint.
    own_by_core: dict[str, list[str]] = {}
    for name in names:
        if name not in known:
            own_by_core.setdefault(core(name), []).append(name)
    there_by_core: dict[str, list[str]] = {}
    for name in known.difference(matches):  # so far, `matches` has equal names only
        there_by_core.setdefault(core(name), []).append(name)
    for key, own_names in own_by_core.items():
        if len(own_names) == 1 and len(there_by_core.get(key, ())) == 1:
            matches[own_names[0]] = there_by_core[key][0]
    return matches


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


PARAMETER_NAMES = "give a name of Unicode text, without a zero: checkpoints have it"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter (or one rank's piece of it), as the layout sees it.

    Attributes:
        name: Unique name, used in errors and to address its state.
        numel: Number of elements; 0 is allowed.
        dtype: Element type of the weight.
        group: Index of its hyperparameter group.
        start: Where a piece begins in the unsharded parameter, in elements, in the order of its memory.
        unsharded_numel: Elements of the unsharded parameter. 0 may be given for a parameter that is whole.
        shape: Of the unsharded parameter; None where it is not known.
        stride: Of the unsharded parameter, for each dimension of `shape`; None where it is not known.
        exact: Whether its state is stored in fp32 in a session of another format.
        rule: What is kept for it, and how it is updated; None for the layout's rule.
        box: For a piece that is cut along several dimensions, or not along the first, and so is no single run of the
            unsharded parameter: its first index and its size in each dimension. The elements of the piece lie in
            memory in row-major order, as those of the unsharded parameter do. None for a piece that is one run.
        dealt_copy_bytes: Host memory of copies of the whole weight and its gradient, on the owner rank of a dealt
            weight.

    Raises:
        ConfigError: The name cannot be saved, or the unsharded parameter has no such piece.
    """

    name: str
    numel: int
    dtype: DtypeCode
    group: int
    start: int = 0
    unsharded_numel: int = 0
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    exact: bool = False
    box: tuple[tuple[int, int], ...] | None = None
    rule: UpdateRule | None = None
    dealt_copy_bytes: int = 0

    def __post_init__(self) -> None:
        """Set `unsharded_numel` of a whole parameter, and raise `ConfigError` as the class says."""
        check_text("a parameter's name", self.name, PARAMETER_NAMES)
        is_whole = not self.start and not self.unsharded_numel  # nobody said that it is a piece
        if is_whole:
            object.__setattr__(self, "unsharded_numel", self.numel)  # the class is frozen
        whole = self.unsharded_numel
        for field in ("numel", "start", "unsharded_numel"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{field} of {self.name}", value, "give an integer >= 0")
        if self.start + self.numel > whole:
            allowed = f"give a place that holds its {self.numel} elements, and the unsharded_numel (here {whole})"
            raise ConfigError(f"start of {self.name}", self.start, allowed)
        if self.shape is not None and math.prod(self.shape) != whole:
            raise ConfigError(f"shape of {self.name}", self.shape, f"give one of {whole} elements")
        if self.stride is not None and (self.shape is None or len(self.stride) != len(self.shape)):
            raise ConfigError(f"stride of {self.name}", self.stride, f"give one for each dimension of {self.shape}")
        if self.box is not None and not self._has_box(self.box):
            raise ConfigError(f"box of {self.name}", self.box, f"give {self.numel} elements within {self.shape}")

    def _has_box(self, box: tuple[tuple[int, int], ...]) -> bool:
        """Return whether a box lies within the shape, has `numel` elements, and begins at element `start`."""
        shape = self.shape or ()
        if len(box) != len(shape):
            return False
        sides = zip(box, shape, strict=True)
        is_within = all(first >= 0 and size > 0 and first + size <= whole for (first, size), whole in sides)
        numel = math.prod(size for _, size in box)
        # The box's first element, counted in the unsharded parameter.
        start = sum(first * step for (first, _), step in zip(box, row_major(shape), strict=True))
        return is_within and numel == self.numel and start == self.start

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of the unsharded parameter that make up consecutive elements of the piece.

        Args:
            start: First of these elements, counted in the piece.
            numel: How many there are.

        Yields:
            First element in the unsharded parameter, and number of elements.
        """
        if self.box is None:  # the piece is one run
            yield self.start + start, numel
            return
        while numel:
            # In each dimension, element `start` of the box has the coordinate `remainder // inner`, by the box's
            # stride `inner`. In the unsharded parameter it lies as many strides `step` behind the box's first.
            index, remainder = self.start, start
            for inner, step in zip(self._inner, row_major(self.shape or ()), strict=True):
                index += remainder // inner * step
                remainder %= inner
            count = min(numel, self._run_numel - start % self._run_numel)  # up to the end of the run
            yield index, count
            start += count
            numel -= count

    def locate(self, index: int) -> tuple[int, int] | None:
        """Return where an element of the unsharded parameter lies in the piece; the reverse of `runs`.

        Args:
            index: The element, counted in the unsharded parameter.

        Returns:
            The element, counted in the piece, and how many elements the run has from there on. None if the piece does
            not have the element.
        """
        if self.box is None:
            position = index - self.start
            return (position, self.numel - position) if 0 <= position < self.numel else None
        position = 0
        for (first, size), inner, step in zip(self.box, self._inner, row_major(self.shape or ()), strict=True):
            coordinate, index = divmod(index, step)  # `step` is the unsharded parameter's stride, `inner` the box's
            if not first <= coordinate < first + size:
                return None
            position += (coordinate - first) * inner
        return position, self._run_numel - position % self._run_numel

    @property
    def _inner(self) -> tuple[int, ...]:
        """The box's strides: how far apart in the piece two neighbours are, in each dimension; () without a box."""
        return row_major([size for _, size in self.box or ()])

    @property
    def _run_numel(self) -> int:
        """Elements of each run of the unsharded parameter that the box is made of.

        A run goes over the last dimensions that the box has as a whole, and the box's part of the dimension before.
        """
        numel = 1
        for (_, size), whole in zip(reversed(self.box or ()), reversed(self.shape or ()), strict=True):
            numel *= size
            if size != whole:
                break
        return numel


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's run inside a subgroup; all in elements.

    Attributes:
        parameter: Index of the parameter in the layout.
        start: Where the run begins in the parameter.
        offset: Where the run begins in each of the subgroup's state tensors.
        numel: Length of the run.
    """

    parameter: int
    start: int
    offset: int
    numel: int


class PlacedTile(NamedTuple):
    """A tile with its place, in bytes.

    Attributes:
        id: Names the tile.
        offset: Where it begins, in the subgroup's state; of tiles of weights and gradients, see the methods that
            return them.
        nbytes: Its size.
    """

    id: TileId
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Subgroup:
    """A contiguous run of a shard's elements: the unit of placement and update.

    Attributes:
        index: Position in the layout.
        group: The hyperparameter group of all its segments.
        dtype: The weight dtype of all its segments.
        state: What its state is, and how it is stored.
        numel: Elements of each of its state tensors, padding included; a multiple of `SECTOR_NUMEL`.
        segments: Its parameters' runs, in order.
        tile_numel: Elements of each tile of a state tensor but its last, which may have fewer.
    """

    index: int
    group: int
    dtype: DtypeCode
    state: StateSpec
    numel: int
    segments: tuple[Segment, ...]
    tile_numel: int

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Its state tensors. Without a master where weights are fp32: such a weight *is* its master."""
        return self.state.beside if self.dtype is DtypeCode.FLOAT32 else self.state.stored

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of its state tensors."""
        return tuple(tensor.name for tensor in self.tensors)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each tensor in the subgroup's state, by name; the tensors follow each other."""
        ends = accumulate(tensor.format.nbytes(self.numel) for tensor in self.tensors)
        return dict(zip(self.names, (0, *ends), strict=False))  # the last end begins nothing

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all state tensors, padding included."""
        return sum(tensor.format.nbytes(self.numel) for tensor in self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in their own dtype, padding included."""
        return self.numel * int(ITEM_BYTES[self.dtype])

    @cached_property
    def tile_sizes(self) -> tuple[tuple[int, int], ...]:
        """The payload sizes in bytes that its tiles have, each with the number of such tiles."""
        return self._sizes(self.tensors)

    @cached_property
    def weight_tile_sizes(self) -> tuple[tuple[int, int], ...]:
        """The payload sizes in bytes that its `weight_tiles` have, each with the number of such tiles."""
        return self._sizes(self._weight_tensors)

    @property
    def _weight_tensors(self) -> tuple[StateTensor, ...]:
        """The master of fp32 weights, which is the weight and so not among `tensors`; () for other dtypes."""
        return (StateTensor(MASTER),) if self.dtype is DtypeCode.FLOAT32 else ()

    def _sizes(self, tensors: Sequence[StateTensor]) -> tuple[tuple[int, int], ...]:
        """Return the sizes in bytes of the tiles of these tensors, each with the number of tiles that have it."""
        whole_tiles, rest_numel = divmod(self.numel, self.tile_numel)
        counts: Counter[int] = Counter()
        for tensor in tensors:
            counts[tensor.format.nbytes(self.tile_numel)] += whole_tiles
            counts[tensor.format.nbytes(rest_numel)] += 1  # 0 bytes if nothing is left
        return tuple((nbytes, count) for nbytes, count in counts.items() if nbytes and count)

    @property
    def tile_count(self) -> int:
        """Number of its tiles."""
        return ceil_div(self.numel, self.tile_numel) * len(self.tensors)

    @cached_property
    def tiles(self) -> tuple[PlacedTile, ...]:
        """Every tile of its state."""
        return tuple(
            tile
            for number, tensor in enumerate(self.tensors)
            for tile in self._tiles_of(number, tensor, self.offsets[tensor.name])
        )

    def _tiles_of(self, number: int, tensor: StateTensor, offset: int) -> Iterator[PlacedTile]:
        """Yield the tiles of a tensor that is numbered `number` and begins at byte `offset`."""
        stored = tensor.format
        for tile, start in enumerate(range(0, self.numel, self.tile_numel)):
            nbytes = stored.nbytes(min(self.tile_numel, self.numel - start))
            yield PlacedTile(TileId(self.index, number, tile), offset + stored.offset(start), nbytes)

    @cached_property
    def weight_tiles(self) -> tuple[PlacedTile, ...]:
        """Tiles of fp32 weights, by which checkpoints name the masters that are no state tensor; () for other dtypes.

        They are cut and numbered as if the weights were one more state tensor; offsets are in that tensor.
        """
        return tuple(tile for tensor in self._weight_tensors for tile in self._tiles_of(len(self.tensors), tensor, 0))

    def gradient_tiles(self, item_bytes: int) -> tuple[PlacedTile, ...]:
        """Return tiles of its gradients, numbered as one more tensor; offsets are in the gradients' own memory.

        They are as large as its largest tile of state, so that store slots of one size serve both.

        Args:
            item_bytes: Bytes of a gradient's element.
        """
        # Made once for each argument. The class is frozen, but the dict of `_gradient_tiles` is not.
        if item_bytes not in self._gradient_tiles:
            nbytes = round_up(self.numel * item_bytes, SECTOR_BYTES)
            tile_bytes = max(size for size, _ in self.tile_sizes)
            number = len(self.kept)
            self._gradient_tiles[item_bytes] = tuple(
                PlacedTile(TileId(self.index, number, tile), offset, min(tile_bytes, nbytes - offset))
                for tile, offset in enumerate(range(0, nbytes, tile_bytes))
            )
        return self._gradient_tiles[item_bytes]

    @cached_property
    def _gradient_tiles(self) -> dict[int, tuple[PlacedTile, ...]]:
        """What `gradient_tiles` has returned, by its argument: all plans of a layout ask for the same."""
        return {}

    @cached_property
    def kept(self) -> tuple[StateTensor, ...]:
        """The tensors that checkpoints keep of it: `tensors`, and fp32 weights; `TileId.tensor` counts them so."""
        return self.tensors + self._weight_tensors


def numels_by_format(parameters: Sequence[Parameter], state_format: StateFormat) -> dict[StateFormat, int]:
    """Return how many elements have their state in each format, in a session of `state_format`.

    Parameters that are `exact` have theirs in `EXACT`. Formats without elements are left out.
    """
    numel = sum(parameter.numel for parameter in parameters)
    exact_numel = sum(parameter.numel for parameter in parameters if parameter.exact)
    numels = Counter({state_format: numel - exact_numel})
    numels[EXACT] += exact_numel  # adds up if `state_format` is EXACT, too
    return {form: count for form, count in numels.items() if count > 0}


@dataclass(frozen=True)
class Layout:
    """All parameters of one rank and the subgroups that hold their state.

    Attributes:
        parameters: In the caller's order; segments name them by their index.
        subgroups: In order of their indices.
        state: The rule and the state format of parameters that have none of their own (`state_of`).
    """

    parameters: tuple[Parameter, ...]
    subgroups: tuple[Subgroup, ...]
    state: StateSpec = EXACT_ADAMW

    def renamed(self, names: Mapping[str, str]) -> Layout:
        """Return this layout with other names for its parameters.

        Args:
            names: New names, by the old ones. A parameter that is not among them keeps its name.
        """
        parameters = (
            replace(parameter, name=names.get(parameter.name, parameter.name)) for parameter in self.parameters
        )
        return replace(self, parameters=tuple(parameters))

    @property
    def rule(self) -> UpdateRule:
        """What is kept for each parameter, and how an update changes it."""
        return self.state.rule

    @property
    def device_state(self) -> StateSpec:
        """The rule and state format for which a device's kernels are made ready.

        For a rule of whole parameters it is AdamW's: such a rule is updated by the CPU, and needs no kernel there.
        """
        return EXACT_ADAMW.stored_in(self.state.format) if self.rule.is_whole else self.state

    def numel_of(self, parameter: int, name: str) -> int:
        """Return the elements of one tensor of a parameter's state: the parameter's number, or words of packed state.

        Args:
            parameter: Index of the parameter.
            name: The tensor's name.
        """
        described = self.parameters[parameter]
        return self.state_of(described).rule.numel_of(name, described.numel)

    @cached_property
    def has_rules(self) -> bool:
        """Whether a parameter has a rule of its own."""
        return any(parameter.rule is not None for parameter in self.parameters)

    def begins_within_block(self, subgroup: Subgroup) -> bool:
        """Return whether a parameter's piece in a subgroup begins within a block of elements that share scales."""
        return any(_missing_in_block(self.parameters[s.parameter], subgroup.state) for s in subgroup.segments)

    def state_of(self, parameter: Parameter) -> StateSpec:
        """Return a parameter's rule and state format: `state`'s, unless it has a rule of its own or is `exact`."""
        state = self.state if parameter.rule is None else StateSpec(parameter.rule, self.state.format)
        return state.stored_in(EXACT) if parameter.exact else state

    @property
    def formats(self) -> dict[str, tuple[int, int]]:
        """For each state format, by name: the elements whose state is stored in it, and the bytes of that state."""
        numbers = {}
        for form in sorted({subgroup.state.format for subgroup in self.subgroups}, key=lambda form: form.code):
            subgroups = [subgroup for subgroup in self.subgroups if subgroup.state.format is form]
            numel = sum(segment.numel for subgroup in subgroups for segment in subgroup.segments)
            nbytes = sum(subgroup.state_bytes for subgroup in subgroups)
            numbers[form.name] = numel, nbytes
        return numbers

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each parameter, where its segments are, in order: (index of the subgroup, index in its `segments`)."""
        places: list[list[tuple[int, int]]] = [[] for _ in self.parameters]
        for subgroup in self.subgroups:
            for position, segment in enumerate(subgroup.segments):
                places[segment.parameter].append((subgroup.index, position))
        return tuple(map(tuple, places))

    def parameters_of(self, tile: TileId) -> str:
        """Return what a tile holds, for messages: "exp_avg of a.weight, b.weight, c.weight and 2 more"."""
        if tile.tensor == ACTIVATIONS:
            return "activations"
        subgroup = self.subgroups[tile.subgroup]
        # The tile has no elements of the subgroup but those from `first` to `end`.
        if tile.tensor < len(subgroup.kept):
            tensor = subgroup.kept[tile.tensor].name
            first = tile.tile * subgroup.tile_numel
            end = first + subgroup.tile_numel
        else:
            # Tiles of gradients are cut in another way: name all parameters.
            tensor = "gradients"
            first = 0
            end = subgroup.numel
        names = [
            self.parameters[segment.parameter].name
            for segment in subgroup.segments
            if segment.offset < end and segment.offset + segment.numel > first
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{tensor} of {', '.join(names[:3]) or 'no parameter'}{more}"

    @cached_property
    def index_by_name(self) -> dict[str, int]:
        """Position of each parameter by name."""
        return {parameter.name: index for index, parameter in enumerate(self.parameters)}

    @cached_property
    def subgroup_bytes(self) -> tuple[int, ...]:
        """Bytes of each subgroup's state, padding included."""
        return tuple(subgroup.state_bytes for subgroup in self.subgroups)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all state, padding included."""
        return sum(self.subgroup_bytes)

    @cached_property
    def max_subgroup_bytes(self) -> int:
        """State bytes of the largest subgroup; 0 without any."""
        return max(self.subgroup_bytes, default=0)


def keep_exact(parameters: Iterable[Parameter], patterns: Sequence[str]) -> tuple[Parameter, ...]:
    """Return parameters with `exact` set for those whose state should not be stored in blocks that share scales.

    Args:
        parameters: Of a session whose state format shares scales.
        patterns: Patterns of names of parameters that are kept exact; see `named_like`.
    """
    parameters = [*parameters]
    named = named_like((parameter.name for parameter in parameters), patterns)

    def is_exact(parameter: Parameter) -> bool:
        """Return whether to keep a parameter exact: it is small, a vector or a scalar, or the user asks for it."""
        is_small = parameter.unsharded_numel < LEAST_COMPACT_NUMEL
        is_vector = parameter.shape is not None and len(parameter.shape) < 2
        return parameter.exact or is_small or is_vector or parameter.name in named

    return tuple(replace(parameter, exact=is_exact(parameter)) for parameter in parameters)


def named_like(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that match one of some patterns of a shell ("*embed*").

    A name is tried as it is given, and as it is in the bare module (`bare_names`).
    """
    return {
        name
        for name, bare in bare_names(names).items()
        if any(fnmatchcase(name, pattern) or fnmatchcase(bare, pattern) for pattern in patterns)
    }


def _missing_in_block(parameter: Parameter, state: StateSpec) -> int:
    """Return how many elements of its first block lie before a parameter's piece; 0 if it begins with a block.

    Blocks of elements that share scales are counted from the start of the unsharded parameter. In formats without
    scales a block is one element, so the result is 0.
    """
    return parameter.start % state.format.block_numel


def ceil_div(value: int, unit: int) -> int:
    """Return the quotient of two integers, rounded up: how many units hold a value."""
    return -(-value // unit)


def round_up(value: int, unit: int) -> int:
    """Return the least multiple of `unit` that is not less than `value`."""
    return ceil_div(value, unit) * unit


def check_subgroup_numel(subgroup_numel: int, state: StateSpec = EXACT_ADAMW) -> int:
    """Return a subgroup's size in elements, rounded down to a multiple of `StateSpec.sector_numel`.

    Raises:
        ConfigError: If it is less than that.
    """
    unit = state.sector_numel
    if subgroup_numel < unit:
        allowed = f'use at least {unit} elements, as state_format "{state.format.name}" of {state.rule.name} needs'
        raise ConfigError("subgroup_numel", subgroup_numel, allowed)
    return subgroup_numel // unit * unit


def build_layout(
    parameters: Iterable[Parameter],
    subgroup_numel: int,
    max_tile_bytes: int = MAX_TILE_BYTES,
    state: StateSpec = EXACT_ADAMW,
) -> Layout:
    """Cut parameters into subgroups of at most `subgroup_numel` elements each.

    All parameters with the same group, dtype, rule and format are cut together, into subgroups of nearly equal size:
    a short last one would disturb the pipeline. Where an element's state takes more bytes than in `state`, as that of
    exact parameters beside a compact format, a subgroup has fewer elements.

    Parameters of a rule that updates them as a whole are not cut. One that has more elements than a subgroup may have
    gets a larger subgroup of its own.

    Args:
        parameters: All parameters with state, in the caller's order; names are unique.
        subgroup_numel: Most elements a subgroup may have; rounded down to whole sectors.
        max_tile_bytes: Most bytes a tile may have; rounded up to whole sectors.
        state: What is kept for each parameter, and how.

    Raises:
        ConfigError: If `subgroup_numel` is smaller than a sector or two parameters share a name.
    """
    return extend_layout(Layout((), (), state), parameters, subgroup_numel, max_tile_bytes)


def extend_layout(
    layout: Layout, added: Iterable[Parameter], subgroup_numel: int, max_tile_bytes: int = MAX_TILE_BYTES
) -> Layout:
    """Return `layout` with more parameters, cut as in `build_layout`; its subgroups stay, and new ones follow."""
    subgroup_numel = check_subgroup_numel(subgroup_numel, layout.state)
    added = tuple(added)
    parameters = layout.parameters + added
    _check_names(parameters)
    subgroups = list(layout.subgroups)
    for (group, dtype, state), members in _indices_by_kind(layout, added).items():
        # All tensors are cut at the same elements, so the one with the largest elements limits a tile.
        widest = max(tensor.format.bytes_each for tensor in state.stored)
        most_tile_numel = int(round_up(max_tile_bytes, SECTOR_BYTES) / widest)
        # Staging slots have one size in bytes, so a subgroup of a format with larger elements has fewer of them.
        limit = int(subgroup_numel * min(1.0, layout.state.item_bytes / state.item_bytes))
        # All members have the same state, and with that the same rule: the first stands for them.
        if parameters[members[0]].rule is not None:
            # A rule of its own may have so many bytes for an element that less than a sector would be left.
            limit = max(limit, state.sector_numel)
        for segments in _cut(members, parameters, check_subgroup_numel(limit, state), state):
            last = segments[-1]
            numel = round_up(last.offset + last.numel, state.sector_numel)
            tile_count = ceil_div(numel, most_tile_numel)  # as few as possible, of equal size but for the last
            tile_numel = min(numel, round_up(ceil_div(numel, tile_count), state.tile_unit))
            subgroups.append(Subgroup(len(subgroups), group, dtype, state, numel, tuple(segments), tile_numel))
    result = replace(layout, parameters=parameters, subgroups=tuple(subgroups))
    check_layout(result)
    return result


def _check_names(parameters: Sequence[Parameter]) -> None:
    """Raise `ConfigError` if two parameters share a name."""
    names = [parameter.name for parameter in parameters]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError("parameters", twice, "give each parameter a name of its own")


def _indices_by_kind(layout: Layout, added: Sequence[Parameter]) -> dict[tuple[int, DtypeCode, StateSpec], list[int]]:
    """Sort added parameters by what all parameters of a subgroup have in common: group, weight dtype and state.

    Args:
        layout: The layout that they are added to.
        added: The parameters.

    Returns:
        The indices that they get in the layout, by (group, dtype, state). Parameters without elements are left out.

    Raises:
        ConfigError: A piece that is no single run has a state format that rounds.
    """
    indices: dict[tuple[int, DtypeCode, StateSpec], list[int]] = {}
    for index, parameter in enumerate(added, start=len(layout.parameters)):
        if parameter.numel == 0:
            continue
        state = layout.state_of(parameter)
        if parameter.box is not None and state.format.rounds:
            # Rounding and blocks follow the order of the unsharded parameter, in which such a piece is no run.
            combinations.PIECES_ROUNDED.refuse("state_format", state.format.name, name=parameter.name)
        indices.setdefault((parameter.group, parameter.dtype, state), []).append(index)
    return indices


def _cut(
    members: Sequence[int], parameters: Sequence[Parameter], limit: int, state: StateSpec
) -> list[list[Segment]]:
    """Distribute parameters over subgroups of nearly equal size; a parameter may be cut, into segments of several.

    Parameters of a rule that updates them as a whole are not cut: see `_cut_between`.

    Args:
        members: Indices of the parameters that the subgroups hold.
        parameters: All parameters of the layout.
        limit: Most elements of a subgroup; whole sectors.
        state: That of the members.

    Returns:
        The segments of each subgroup.
    """
    if state.rule.is_whole:
        return _cut_between(members, parameters, limit, state)
    # A piece that begins within a block starts as far behind an aligned element, so that blocks are aligned.
    missing = {index: _missing_in_block(parameters[index], state) for index in members}
    total = sum(round_up(missing[index] + parameters[index].numel, SEGMENT_ALIGN_NUMEL) for index in members)
    count = ceil_div(total, limit)
    size = min(limit, round_up(ceil_div(total, count), state.sector_numel))
    segments: list[list[Segment]] = [[]]  # of each subgroup so far; the last one is being filled
    used = 0  # elements of that one; aligned, as `size` is, so that below `size` there is room for a segment
    for index in members:
        start = 0
        while start < parameters[index].numel:  # one segment; more if it fills a subgroup
            if used == size:
                segments.append([])
                used = 0
            offset = used if start else used + missing[index]  # only its first segment begins within a block
            numel = min(parameters[index].numel - start, size - offset)
            segments[-1].append(Segment(index, start, offset, numel))
            start += numel
            used = round_up(offset + numel, SEGMENT_ALIGN_NUMEL)
    return segments


def _cut_between(
    members: Sequence[int], parameters: Sequence[Parameter], limit: int, state: StateSpec
) -> list[list[Segment]]:
    """Distribute parameters, whose rule updates them as a whole, over subgroups without cutting them.

    A subgroup has at most `limit` elements, or one larger parameter. Arguments and result are those of `_cut`.

    Raises:
        ConfigError: A parameter is only a piece of one.
    """
    # An element has another number of bytes in packed state, where the segment is to be aligned all the same.
    align = PACKED_ALIGN_NUMEL if state.rule.packed_words else SEGMENT_ALIGN_NUMEL
    segments: list[list[Segment]] = []  # of each subgroup so far
    used = 0  # elements of the last one, aligned
    for index in members:
        parameter = parameters[index]
        if parameter.numel != parameter.unsharded_numel:
            part = f"{parameter.numel} of the {parameter.unsharded_numel} elements of {parameter.name}"
            combinations.WHOLE_PARAMETERS.refuse("params", part, rule=state.rule.name)
        if not segments or used + parameter.numel > limit:  # the first one; or it does not fit behind the others
            segments.append([])
            used = 0
        segments[-1].append(Segment(index, 0, used, parameter.numel))
        used = round_up(used + parameter.numel, align)
    return segments


def check_layout(layout: Layout) -> None:
    """Verify the invariants that the module states.

    Raises:
        InternalError: If one does not hold.
    """
    covered = [0] * len(layout.parameters)  # elements of each parameter that the segments so far have
    for index, subgroup in enumerate(layout.subgroups):
        invariant(subgroup.index == index, f"subgroup {index} is numbered {subgroup.index}")
        state = subgroup.state
        # With several tiles, all but the last one are whole sectors of every tensor; one tile alone may be padded.
        unit = state.tile_unit if subgroup.tile_numel < subgroup.numel else state.sector_numel
        invariant(subgroup.numel % state.sector_numel == 0, f"subgroup {index} is not whole sectors")
        invariant(subgroup.tile_numel % unit == 0, f"tiles of subgroup {index} are not whole sectors")
        end = 0  # of the segment before, in elements of the subgroup
        for segment in subgroup.segments:
            parameter = layout.parameters[segment.parameter]
            invariant(parameter.group == subgroup.group, f"{parameter.name} is in a subgroup of another group")
            invariant(parameter.dtype == subgroup.dtype, f"{parameter.name} is in a subgroup of another dtype")
            missing = _missing_in_block(parameter, state)
            # A parameter's first segment begins within a block if its piece does. Then the start of the block is what
            # has to be aligned, and behind the segment before.
            block_offset = segment.offset if segment.start else segment.offset - missing
            invariant(block_offset >= end, f"segments overlap in subgroup {index}")
            is_aligned = block_offset % SEGMENT_ALIGN_NUMEL == 0
            invariant(is_aligned, f"unaligned segment in subgroup {index}")
            is_cut_aligned = not segment.start or (missing + segment.start) % SEGMENT_ALIGN_NUMEL == 0
            invariant(is_cut_aligned, f"unaligned cut of {parameter.name}")
            invariant(segment.start == covered[segment.parameter], f"{parameter.name} is not covered in order")
            covered[segment.parameter] += segment.numel
            end = segment.offset + segment.numel
        invariant(end <= subgroup.numel, f"a segment leaves subgroup {index}")
        invariant(
            sum(tile.nbytes for tile in subgroup.tiles) == subgroup.state_bytes,
            f"tiles do not cover subgroup {index}",
        )
    for parameter, numel in zip(layout.parameters, covered, strict=True):
        invariant(numel == parameter.numel, f"{parameter.name}: {numel} of {parameter.numel} elements covered")
