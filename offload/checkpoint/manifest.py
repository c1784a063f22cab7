"""The files of a checkpoint: one manifest for each rank, and the `COMMIT` that makes them a checkpoint.

A file is one line of JSON that says what it is and how to verify the rest (`_Head`), then a body of JSON. Every field
of a body is checked even if the checksum is right: a manifest may have been made by hand, or by a version with a
bug.

Names: `manifest-<id>-<rank>.json`, `extra-<id>-<rank>.bin`, `COMMIT`. The id is new for every save, so that a folder
may be saved to again: until its `COMMIT` is replaced, it holds the checkpoint from before.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from offload.dtypes import DtypeCode
from offload.errors import CheckpointError, OffloadError
from offload.formats import FORMATS, StateSpec
from offload.layout import Layout, Parameter, Segment, Subgroup, ceil_div, check_layout
from offload.protocols import SECTOR_BYTES, TileId, TileRequest
from offload.rules import ADAMW, NAMED, UpdateRule, described
from offload.schedule.index import Location, TileRecord
from offload.tiers.common import digest_of

FORMAT = 1
COMMIT_NAME = "COMMIT"
RELEASED_NAME = "RELEASED"
MAX_RANKS = 1 << 16
MAX_RELEASED = 64
"""Most ids of earlier checkpoints in a `COMMIT` or `RELEASED`, which tell that their pins may be deleted.

The oldest are left out: their pins have been deleted long ago, or by `offload gc`.
"""
MAX_DIMENSIONS = 64
MAX_PACKED_WORDS = 1 << 24
MAX_DEPTH = 32
"""Deepest nesting of a caller's metadata: all functions that read it are recursive."""

ID = "[0-9a-f]{32}"
"""Pattern of the id of a save."""

OWN_FILE = re.compile(rf"manifest-{ID}-\d+\.json|(extra|model)-{ID}-\d+\.bin")
"""Names of the files in a checkpoint's folder that this package may delete."""

FAILURE = re.compile(rf"failed-{ID}-\d+")
"""Names of the files by which a rank says that its part of a save, or of the mirror's copy, has failed."""

_MIRROR_FILE = rf"mirror-{ID}-\d+\.json|{FAILURE.pattern}"
OWN = re.compile(
    rf"({OWN_FILE.pattern}|{COMMIT_NAME}|{RELEASED_NAME}|{_MIRROR_FILE}|offload-[0-9a-f-]{{36}})(/.*)?", re.DOTALL
)
"""Names of all files and stores that this package writes in a checkpoint's folder, and of what lies in a store.

A framework may have files of its own in the same folder.
"""

Count = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
Size = Annotated[int, Meta(ge=1, le=(1 << 62) - 1)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Checksum = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Id = Annotated[str, Meta(pattern=rf"\A{ID}\Z")]
Dimensions = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]


class Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A row of a manifest's table; columns with a default may be missing, as in older files."""


Place = tuple[str, uuid.UUID]
"""A path and the store on it; a session's stores on all its paths have one name."""


class StoreRef(Row, frozen=True):
    """A store that a checkpoint refers to.

    Attributes:
        store: Its uuid.
        path: The directory or "s3://" prefix that it lies in; None for the checkpoint's own folder.
    """

    store: uuid.UUID
    path: str | None


class TileRef(Row, frozen=True):
    """Where one tile lies, and what its header in the store says.

    Attributes:
        store: Number of its store in `Manifest.stores`.
        offset: Of its store slot, in bytes.
        step: Its version, as in its header.
        checksum: Of its payload, as in its header.
    """

    store: Count
    offset: Annotated[Count, Meta(multiple_of=SECTOR_BYTES)]
    step: Count
    checksum: Checksum

    @classmethod
    def of(cls, store: int, record: TileRecord) -> TileRef:
        """Return a manifest's entry for a record in a session's index, given the number of its store."""
        return cls(store, record.location.offset, record.step, record.checksum)

    def record(self, path: int, nbytes: int) -> TileRecord:
        """Return this tile's record in a session's index, given the path number of its store."""
        return TileRecord(Location(path, self.offset, nbytes), self.step, self.checksum)


class FileRef(NamedTuple):
    """A file in the checkpoint's folder, with size and checksum of its content."""

    name: str
    nbytes: Count
    checksum: Checksum

    @classmethod
    def of(cls, name: str, content: bytes) -> FileRef:
        """Return the reference to a file with this content."""
        return cls(name, len(content), digest_of(content))


@dataclass(frozen=True)
class Manifest:
    """One rank's part of a checkpoint.

    Attributes:
        id: The save's id.
        rank: The rank whose part it is.
        ranks: The number of ranks.
        step: Number of the step after which the checkpoint was taken.
        layout: Parameters and subgroups.
        steps: Updates that each parameter has had.
        checksums: Whether the tiles carry checksums.
        stores: The stores that `tiles` refer to.
        tiles: Every tile of the layout, those of `weight_tiles` included; none before they are durable.
        metadata: The caller's hyperparameters and such, as JSON.
        extra: The file with the caller's own bytes.
        seed: Seed of stochastic rounding; None where nothing was rounded so.
        numbers: Number of each parameter in stochastic rounding.
        host: Name of the machine that has written it, for messages.
        run: Names the training: sessions that go on from each other's checkpoints write the same. "" in older files.
    """

    id: str
    rank: int
    ranks: int
    step: int
    layout: Layout
    steps: tuple[int, ...]
    checksums: bool
    stores: tuple[StoreRef, ...] = ()
    tiles: Mapping[TileId, TileRef] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extra: FileRef | None = None
    seed: int | None = None
    numbers: tuple[int, ...] = ()
    host: str = ""
    run: str = ""

    @property
    def stores_elsewhere(self) -> tuple[Place, ...]:
        """The stores but for one in the checkpoint's own folder."""
        return tuple((ref.path, ref.store) for ref in self.stores if ref.path is not None)

    @cached_property
    def tile_bytes(self) -> dict[TileId, int]:
        """Payload bytes of every tile."""
        return {tile: nbytes for subgroup in self.layout.subgroups for tile, _, nbytes in all_tiles(subgroup)}

    def request(self, tile: TileId, address: int, *, verify: bool = True) -> TileRequest:
        """Return the request to read a tile into memory at `address`; its `op` is 0, which the caller replaces.

        With another offset it is the request to write the tile, unchanged, to another store.

        Args:
            tile: The tile.
            address: Address of the memory.
            verify: Whether the payload is verified, if the checkpoint has checksums.
        """
        ref = self.tiles[tile]
        verifies = verify and self.checksums
        expected = ref.checksum if verifies else None
        nbytes = self.tile_bytes[tile]
        return TileRequest(0, tile, ref.step, ref.offset, address, nbytes, checksum=expected, verify=verifies)

    def parameters_of(self, tile: TileId) -> str:
        """Return in words, for messages, which parameters a tile has elements of."""
        return self.layout.parameters_of(tile)


def all_tiles(subgroup: Subgroup) -> tuple[tuple[TileId, int, int], ...]:
    """Return the tiles that a checkpoint has of a subgroup, as (id, offset, bytes)."""
    return subgroup.tiles + subgroup.weight_tiles


def manifest_name(id: str, rank: int) -> str:
    """Return the name of a rank's manifest."""
    return f"manifest-{id}-{rank}.json"


def extra_name(id: str, rank: int) -> str:
    """Return the name of the file with the `extra` of a rank's caller."""
    return f"extra-{id}-{rank}.bin"


def model_name(id: str, rank: int) -> str:
    """Return the name of the file with a rank's weights that no optimizer changes."""
    return f"model-{id}-{rank}.bin"


def failure_name(id: str, rank: int) -> str:
    """Return the name of the file that says that a rank has failed."""
    return f"failed-{id}-{rank}"


MODEL_KEY = "offload.model"
"""Key in a manifest's metadata: whether there is a `model_name` file, and what of the model is in `extra`."""


def names_of(id: str, rank: int) -> tuple[str, ...]:
    """Return the names of all files of a rank's part of a checkpoint, the manifest first."""
    return manifest_name(id, rank), extra_name(id, rank), model_name(id, rank)


# Files ----------------------------------------------------------------------------------------------------------


def seal(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return a file's content: the body under a line that says how to verify it."""
    content = json.dumps(body, separators=(",", ":"), allow_nan=True).encode()
    head = {"format": f"offload-{kind}", "version": FORMAT, "crc32c": digest_of(content), "nbytes": len(content)}
    return json.dumps(head).encode() + b"\n" + content


class _Head(msgspec.Struct):
    """The first line of a file."""

    format: str
    version: Size
    nbytes: Count | None = None  # a newer format may do without
    crc32c: Checksum | None = None


def unseal(kind: str, content: bytes, where: str) -> dict[str, Any]:
    """Return the body of a file that `seal` made.

    Raises:
        CheckpointError: The file is damaged, of another kind, or of a newer format; names `where`.
    """
    line, separator, body = content.partition(b"\n")
    try:
        head = msgspec.convert(json.loads(line), _Head)
    except (ValueError, RecursionError, msgspec.ValidationError) as cause:
        raise CheckpointError(f"{where} is damaged: it does not begin as a {kind} does") from cause
    if head.format != f"offload-{kind}":
        raise CheckpointError(f"{where} is no {kind}: its format is {_short(head.format)}")
    if head.version > FORMAT:
        raise CheckpointError(
            f"{where} has format {head.version}, and this version of offload reads up to {FORMAT}: use a newer one"
        )
    if not separator or head.nbytes != len(body):
        raise CheckpointError(f"{where} is damaged: it has {len(body)} bytes where {head.nbytes} are due")
    if head.crc32c != digest_of(body):
        raise CheckpointError(f"{where} is damaged: its checksum is not the one it was written with")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(f"{where} is damaged: {cause}") from cause
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where} is damaged: it holds {_short(fields)}")
    return fields


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 60


def _short(value: object) -> str:
    """Return a value in at most 60 characters, for messages."""
    text = _REPR.repr(value)  # bounded: a damaged file may have any depth
    return text if len(text) <= 60 else f"{text[:57]}..."


class CommitRecord(msgspec.Struct, frozen=True):
    """The content of `COMMIT`.

    Attributes:
        id: Id of the checkpoint that the folder holds.
        ranks: The number of ranks that wrote it.
        replaced: Ids of checkpoints that the folder held before, and that this one has replaced, newest first.
        mirrored: Id of the checkpoint that rank 0 was mirroring, for the other ranks; None for none. See `mirror`.
    """

    id: Id
    ranks: Ranks
    replaced: tuple[Id, ...] = ()
    mirrored: Id | None = None


class _Released(msgspec.Struct):
    """The content of `RELEASED`."""

    ids: tuple[Id, ...]
    note: str


class MirrorProgress(msgspec.Struct, frozen=True):
    """How far one rank's part of a checkpoint has been mirrored.

    Attributes:
        stores: Stores in the mirror's folder, each with the number of tiles that are durable in it, in their order.
    """

    stores: tuple[tuple[uuid.UUID, Count], ...] = ()


def check_text(value: str) -> str:
    """Return a string unchanged if it can be shown, written, and used as a name.

    Raises:
        ValueError: The string has a null character, or halves of surrogate pairs, which JSON allows and UTF-8 does
            not.
    """
    if "\0" in value:
        raise ValueError("text with a zero in it")
    value.encode()  # raises for half of a pair: UnicodeEncodeError is a ValueError
    return value


def check_metadata(value: object) -> None:
    """Check that a caller's metadata can be written, read back and walked through recursively.

    Raises:
        ValueError: The metadata is nested too deeply, or has text in it that is not Unicode.
    """
    todo = [(value, 0)]  # values with their depth; no recursion here, as they may be nested to any depth
    while todo:
        item, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"metadata is nested more than {MAX_DEPTH} deep")
        if isinstance(item, str):
            item.encode()  # raises a ValueError if it is not Unicode
        elif isinstance(item, Mapping):
            todo += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list | tuple):
            todo += [(inner, depth + 1) for inner in item]


def seal_commit(commit: CommitRecord) -> bytes:
    """Return the content of `COMMIT`."""
    body = {"id": commit.id, "ranks": commit.ranks, "replaced": list(commit.replaced[:MAX_RELEASED])}
    return seal("commit", body | ({"mirrored": commit.mirrored} if commit.mirrored else {}))


def unseal_commit(content: bytes, where: str) -> CommitRecord:
    """Return a `COMMIT` from its file's content.

    Raises:
        CheckpointError: It is damaged.
    """
    return _parse("commit", CommitRecord, content, where)


def seal_released(ids: Sequence[str], note: str) -> bytes:
    """Return the content of `RELEASED`: ids of the checkpoints that the folder held, and why they were released."""
    return seal("released", {"ids": list(ids[:MAX_RELEASED]), "note": note})


def unseal_released(content: bytes, where: str) -> tuple[tuple[str, ...], str]:
    """Return the ids and the note of a `RELEASED`.

    Raises:
        CheckpointError: The file is damaged, or was not written by this package.
    """
    released = _parse("released", _Released, content, where)
    return released.ids, released.note


def seal_progress(progress: MirrorProgress) -> bytes:
    """Return the content of a mirror's file that says how far it is."""
    return seal("mirror", {"stores": [[store.hex, count] for store, count in progress.stores]})


def unseal_progress(content: bytes, where: str) -> MirrorProgress:
    """Return how far a mirror is, from its file's content.

    Raises:
        CheckpointError: It is damaged.
    """
    return _parse("mirror", MirrorProgress, content, where)


def encode(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file, with the fields and tables of `_Body`.

    Raises:
        CheckpointError: The manifest could not be read back, because of its metadata.
    """
    layout = manifest.layout
    # Whether the file has a table of rules. Without one, all subgroups have the rule that "rule" names. A wrapped
    # class's rule always needs the table, which has the rule's size and dtype, too.
    has_rules = layout.has_rules or layout.rule.packed_words > 0
    # The layout's own rule first, where `_decode_state` looks for it.
    rules = [*dict.fromkeys([layout.rule, *(subgroup.state.rule for subgroup in layout.subgroups)])]
    try:
        check_metadata(manifest.metadata)
    except ValueError as cause:
        raise CheckpointError(f"a checkpoint cannot say this: {cause}") from cause
    body: dict[str, Any] = {
        "id": manifest.id,
        "rank": manifest.rank,
        "ranks": manifest.ranks,
        "step": manifest.step,
        "checksums": manifest.checksums,
        "stores": [[ref.store.hex, ref.path] for ref in manifest.stores],
        "parameters": [_parameter_row(*row) for row in zip(layout.parameters, manifest.steps, strict=True)],
        "subgroups": [_subgroup_row(subgroup, rules if has_rules else ()) for subgroup in layout.subgroups],
        # In the layout's order, which `tile_bytes` has: the file does not name tiles.
        "tiles": [msgspec.structs.astuple(manifest.tiles[tile]) for tile in manifest.tile_bytes],
        "metadata": manifest.metadata,
        "extra": manifest.extra,
        "rule": layout.rule.name,
        "formats": _formats(layout.state),
    }
    if has_rules:
        body["rules"] = [[rule.name, rule.packed_words, rule.master_dtype] for rule in rules]
    if manifest.host:
        body["host"] = manifest.host
    if manifest.run:
        body["run"] = manifest.run
    if manifest.seed is not None:
        body |= {"seed": manifest.seed, "numbers": manifest.numbers}
    return seal("manifest", body)


def _parameter_row(p: Parameter, step: int) -> list[Any]:
    """Return the columns of `_Parameter`; no `box` where there is none, as in older files."""
    row = [p.name, p.numel, int(p.dtype), p.group, step, p.start, p.unsharded_numel, p.shape, p.stride]
    return row if p.box is None else [*row, p.box]


def _subgroup_row(s: Subgroup, rules: Sequence[UpdateRule]) -> list[Any]:
    """Return the columns of `_Subgroup`; no `rule` where the manifest has no table of rules, as in older files."""
    segments = [astuple(segment) for segment in s.segments]
    row = [s.group, int(s.dtype), s.numel, s.tile_numel, segments, s.state.format.code]
    return [*row, rules.index(s.state.rule)] if rules else row


def _formats(state: StateSpec) -> dict[str, str]:
    """Return the name of each stored tensor's format, by the tensor's name."""
    return {tensor.name: tensor.format.name for tensor in state.stored}


# The tables of a manifest; errors name these columns. For most see the attributes of `Parameter` and `Subgroup`.


class _Parameter(Row, frozen=True):
    name: str
    numel: Count
    dtype: DtypeCode
    group: Count
    step: Count
    start: Count
    full_numel: Count
    shape: Dimensions | None
    stride: Dimensions | None
    box: tuple[tuple[Count, Size], ...] | None = None


class _Subgroup(Row, frozen=True):
    group: Count
    dtype: DtypeCode
    numel: Size
    tile_numel: Annotated[Size, Meta(multiple_of=SECTOR_BYTES // 4)]
    segments: tuple[tuple[Count, Count, Count, Size], ...]
    state_format: Annotated[int, Meta(ge=0, lt=len(FORMATS))] | None = None
    rule: Count | None = None


class _Rule(Row, frozen=True):
    name: str
    packed_words: Annotated[int, Meta(ge=0, le=MAX_PACKED_WORDS)]
    master_dtype: DtypeCode


class _Body(msgspec.Struct):
    """The body of a manifest's file, as JSON has it; see `Manifest` for its fields."""

    id: Id
    rank: Count
    ranks: Ranks
    step: Count
    checksums: bool
    stores: tuple[StoreRef, ...]
    parameters: tuple[_Parameter, ...]
    subgroups: tuple[_Subgroup, ...]
    tiles: tuple[TileRef, ...]
    metadata: dict[str, Any]
    extra: FileRef | None
    rule: str = ADAMW.name  # older manifests have none
    formats: dict[str, str] | None = None
    rules: tuple[_Rule, ...] = ()  # of subgroups, by number; none where all have one
    seed: Count | None = None
    numbers: tuple[Count, ...] = ()
    host: str = ""  # older manifests have none
    run: str = ""  # as before


_ROWS: dict[str, type[Row]] = {
    "stores": StoreRef,
    "parameters": _Parameter,
    "subgroups": _Subgroup,
    "tiles": TileRef,
    "rules": _Rule,
}

Parsed = TypeVar("Parsed")


def _parse(kind: str, form: type[Parsed], content: bytes, where: str) -> Parsed:
    """Return the body of a file that `seal` made, checked field by field, as a `form`; errors name `where`."""
    body = unseal(kind, content, where)
    try:
        return msgspec.convert(body, form)
    except (msgspec.ValidationError, ValueError, RecursionError) as cause:
        raise CheckpointError(f"{where} is damaged: {_explain(str(cause), body)}") from cause


def _explain(error: str, value: Any) -> str:
    """Return msgspec's error about a body with the names of tables and columns in place of their numbers.

    "... - at `$.parameters[3][1]`" becomes "parameters[3] ('w').numel is -1; ...", given w's row.

    Args:
        error: msgspec's error.
        value: The body; as the loop goes along the error's path, what is there.
    """
    wrong, _, path = error.partition(" - at `$.")
    name = ""
    # Keys of the path by depth: 0 the field, 1 the number of a row, 2 the number of its column, then what is deeper.
    for depth, key in enumerate(re.findall(r"\w+", path)):
        if depth == 0:
            name = key
            value = value[key]
            continue
        value = value[int(key)]
        if depth == 2:
            table, _, _ = name.partition("[")
            name += f".{_ROWS[table].__struct_fields__[int(key)]}"
        else:
            name += f"[{key}]"
        if depth == 1 and isinstance(value, list) and value and isinstance(value[0], str):  # a row with a name
            name += f" ({_short(value[0])})"
    wrong = wrong[:1].lower() + wrong[1:]
    return f"{name} is {_short(value)}; {wrong}" if name else wrong


def decode(content: bytes, where: str) -> Manifest:
    """Return a manifest from its file's content.

    Raises:
        CheckpointError: The file is damaged or of a newer format; names `where` and the field.
    """
    body = _parse("manifest", _Body, content, where)
    if not body.rules and body.rule not in NAMED:  # `_decode` checks the rules of a table
        allowed = f"this version of offload knows {', '.join(NAMED)}: use a newer one"
        raise CheckpointError(f"{where} has state of the rule {_short(body.rule)}, and {allowed}")
    try:
        return _decode(body)
    except (OffloadError, ValueError, LookupError, ArithmeticError, RecursionError) as cause:
        # `check_layout` takes a wrong layout for a bug, but here the file is wrong.
        raise CheckpointError(f"{where} is damaged: {str(cause).partition(' (this is a bug')[0]}") from cause


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise `ValueError` about a field unless a condition holds."""
    if not holds:
        raise ValueError(f"{name} is {_short(value)}; it must be {allowed}")


def _check_fields(body: _Body) -> None:
    """Raise `ValueError` unless numbers in a manifest fit the sizes, and rows of tables, that they refer to."""
    _require(body.rank < body.ranks, "rank", body.rank, f"below {body.ranks}")
    for p in body.parameters:
        check_text(p.name)
        _require(p.dtype != DtypeCode.NONE, f"dtype of {p.name}", int(p.dtype), "the number of an element type")
        _require(p.numel <= p.full_numel, f"full_numel of {p.name}", p.full_numel, f"at least {p.numel}")
        last_start = p.full_numel - p.numel
        _require(p.start <= last_start, f"start of {p.name}", p.start, f"at most {last_start}")
        is_whole = p.shape is None or math.prod(p.shape) == p.full_numel
        _require(is_whole, f"shape of {p.name}", p.shape, f"of {p.full_numel} elements")
        matches = p.stride is None or (p.shape is not None and len(p.stride) == len(p.shape))
        _require(matches, f"stride of {p.name}", p.stride, "of as many dimensions as the shape")
    for index, s in enumerate(body.subgroups):
        is_there = s.rule is None or s.rule < len(body.rules)
        _require(is_there, f"the rule of subgroup {index}", s.rule, f"below {len(body.rules)}")
        _require(s.tile_numel <= s.numel, f"tile_numel of subgroup {index}", s.tile_numel, f"at most {s.numel}")
        for parameter, *_ in s.segments:
            is_there = parameter < len(body.parameters)
            _require(is_there, f"a parameter of subgroup {index}", parameter, f"below {len(body.parameters)}")


def _tiles_by_id(body: _Body, layout: Layout) -> dict[TileId, TileRef]:
    """Return a manifest's tiles by id; the file lists them in the layout's order."""
    tiles = {}
    ids = (tile for subgroup in layout.subgroups for tile, _, _ in all_tiles(subgroup))
    for tile, ref in zip(ids, body.tiles, strict=True):
        is_there = ref.store < len(body.stores)
        name = f"the store of subgroup {tile.subgroup}, tensor {tile.tensor}, tile {tile.tile}"
        _require(is_there, name, ref.store, f"below {len(body.stores)}")
        tiles[tile] = ref
    return tiles


def _decode_state(body: _Body, rules: Sequence[UpdateRule]) -> StateSpec:
    """Return how the layout's state is kept: its first rule, and its state format.

    The format is found by the names of its tensors' formats. Older manifests have no such names: their state has the
    first format.

    Raises:
        ValueError: This version has no format with these names.
    """
    readable = [StateSpec(rules[0] if rules else NAMED[body.rule], state_format) for state_format in FORMATS]
    state = next((state for state in readable if body.formats in (None, _formats(state))), None)
    if state is None:
        allowed = " or ".join(str(_formats(state)) for state in readable)
        raise ValueError(f"formats is {_short(body.formats)}; it must be {allowed} in this version")
    return state


def _decode_subgroup(index: int, row: _Subgroup, rules: Sequence[UpdateRule], state: StateSpec) -> Subgroup:
    """Return a subgroup from its row, which may name another rule and state format than the layout's `state` has."""
    segments = tuple(Segment(*segment) for segment in row.segments)
    if row.rule is not None:
        state = StateSpec(rules[row.rule], state.format)
    if row.state_format is not None:
        state = state.stored_in(FORMATS[row.state_format])
    return Subgroup(index, row.group, row.dtype, state, row.numel, segments, row.tile_numel)


def _decode_layout(body: _Body, rules: Sequence[UpdateRule], state: StateSpec) -> Layout:
    """Return the layout that a manifest describes; `check_layout` has to verify it."""
    # Rows of parameters name no rule: a parameter has that of the subgroups with its segments.
    rule_by_parameter: dict[int, UpdateRule] = {}
    for row in body.subgroups:
        if row.rule is not None:
            rule_by_parameter |= {parameter: rules[row.rule] for parameter, *_ in row.segments}
    rules_of_parameters = [rule_by_parameter.get(number) for number in range(len(body.parameters))]
    parameters = tuple(
        Parameter(p.name, p.numel, p.dtype, p.group, p.start, p.full_numel, p.shape, p.stride, box=p.box, rule=rule)
        for p, rule in zip(body.parameters, rules_of_parameters, strict=True)
    )
    subgroups = (_decode_subgroup(index, row, rules, state) for index, row in enumerate(body.subgroups))
    return Layout(parameters, tuple(subgroups), state)


def _decode(body: _Body) -> Manifest:
    """Check a body's fields against each other, and return the manifest that they make; `decode` names the file."""
    _check_fields(body)
    rules = [described(NAMED, check_text(row.name), row.packed_words, row.master_dtype) for row in body.rules]
    state = _decode_state(body, rules)
    parameter_count, number_count = len(body.parameters), len(body.numbers)
    one_each = f"{parameter_count}, one for each parameter"
    has_all = body.seed is None or number_count == parameter_count
    _require(has_all, "the length of numbers", number_count, one_each)
    layout = _decode_layout(body, rules, state)
    # Compared by number first: a wrong layout may have absurdly many tiles, which `check_layout` lists one by one.
    count = sum(ceil_div(subgroup.numel, subgroup.tile_numel) * len(subgroup.kept) for subgroup in layout.subgroups)
    _require(len(body.tiles) == count, "the number of tiles", len(body.tiles), f"{count}, as the layout has")
    name_count = len(layout.index_by_name)  # fewer than parameters if two have the same name
    _require(name_count == parameter_count, "the number of names", name_count, one_each)
    check_layout(layout)
    for store in body.stores:
        is_path = store.path is None or check_text(store.path) != ""
        _require(is_path, "the path of a store", store.path, "a directory or s3://bucket/prefix")
    check_metadata(body.metadata)
    if body.extra is not None:
        name = check_text(body.extra.name)
        is_name = "/" not in name and name not in ("", ".", "..")
        _require(is_name, "extra", name, "a file in the checkpoint's folder")
    return Manifest(
        id=body.id,
        rank=body.rank,
        ranks=body.ranks,
        step=body.step,
        layout=layout,
        steps=tuple(p.step for p in body.parameters),
        stores=body.stores,
        tiles=_tiles_by_id(body, layout),
        checksums=body.checksums,
        metadata=body.metadata,
        extra=body.extra,
        host=body.host,
        run=check_text(body.run),
        seed=body.seed,
        numbers=body.numbers,
    )
