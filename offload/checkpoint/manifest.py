"""What a checkpoint's files say: one manifest for each rank, and the `COMMIT` that makes them a checkpoint.

A file is one line of JSON that says what it is and how to verify the rest (`{"format", "kind", "crc32c", "nbytes"}`)
and a body of JSON. A body is believed only if its checksum is right, and then every field of it is still checked: a
manifest may have been made by hand, or by a version with a bug.

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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from offload.dtypes import DtypeCode
from offload.errors import CheckpointError, OffloadError
from offload.layout import Layout, Parameter, Segment, Subgroup, check_layout, stored_tensors
from offload.protocols import SECTOR_BYTES, TileId
from offload.rules import ADAMW, MASTER, RULES, UpdateRule
from offload.tiers.remote import crc32c_of

FORMAT = 1
COMMIT_NAME = "COMMIT"
RELEASED_NAME = "RELEASED"
MAX_RANKS = 1 << 16
MAX_RELEASED = 64
"""Checkpoints that a folder remembers to have held; the pins of older ones are long gone, or for `offload gc`."""
MAX_DIMENSIONS = 64
MAX_DEPTH = 32
"""How deeply a caller's metadata may be nested: everybody who goes through it does so recursively."""

OWN_FILE = re.compile(r"manifest-[0-9a-f]{32}-\d+\.json|extra-[0-9a-f]{32}-\d+\.bin")
"""Files in a checkpoint's folder that are ours to delete."""

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StoreRef:
    """A store that a checkpoint refers to.

    Attributes:
        store: Its uuid.
        path: The directory or "s3://" prefix that it lies in; None for the checkpoint's own folder.
    """

    store: uuid.UUID
    path: str | None


@dataclass(frozen=True, slots=True)
class TileRef:
    """Where one tile lies: `offset` in the store of that number, and what its header must say."""

    store: int
    offset: int
    step: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Which part of a whole parameter a rank has.

    Attributes:
        start: First element, in the order of the parameter's memory.
        full_numel: Elements of the whole parameter.
        shape: Of the whole parameter; None if nobody said.
        stride: Likewise.
    """

    start: int
    full_numel: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Manifest:
    """One rank's part of a checkpoint.

    Attributes:
        id: The save's.
        rank: Whose part it is.
        ranks: How many there are.
        step: Number of the step after which it was taken.
        layout: Parameters and subgroups.
        steps: Updates that each parameter has had.
        pieces: Which part of each parameter this is.
        stores: What `tiles` refer to.
        tiles: Every tile of the layout, those of `weight_tiles` included.
        checksums: Whether the tiles carry checksums.
        metadata: What the caller gave: hyperparameters and such, as JSON.
        extra: Name, size and checksum of the file with what else the caller gave.
    """

    id: str
    rank: int
    ranks: int
    step: int
    layout: Layout
    steps: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stores: tuple[StoreRef, ...]
    tiles: Mapping[TileId, TileRef]
    checksums: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extra: tuple[str, int, int] | None = None

    @cached_property
    def tile_bytes(self) -> dict[TileId, int]:
        """Payload bytes of every tile."""
        return {tile: nbytes for subgroup in self.layout.subgroups for tile, _, nbytes in all_tiles(subgroup)}

    def parameters_of(self, tile: TileId) -> str:
        """See `Layout.parameters_of`."""
        return self.layout.parameters_of(tile)


def all_tiles(subgroup: Subgroup) -> tuple[tuple[TileId, int, int], ...]:
    """Return the tiles that a checkpoint has of a subgroup, as (id, offset, bytes)."""
    return subgroup.tiles + subgroup.weight_tiles


def manifest_name(id: str, rank: int) -> str:
    """Return the name of a rank's manifest."""
    return f"manifest-{id}-{rank}.json"


def extra_name(id: str, rank: int) -> str:
    """Return the name of the file for what else a rank's caller gave."""
    return f"extra-{id}-{rank}.bin"


# Files ----------------------------------------------------------------------------------------------------------


def seal(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return a file's content: the body under a line that says how to verify it."""
    content = json.dumps(body, separators=(",", ":"), allow_nan=True).encode()
    head = {"format": f"offload-{kind}", "version": FORMAT, "crc32c": crc32c_of(content), "nbytes": len(content)}
    return json.dumps(head).encode() + b"\n" + content


def unseal(kind: str, content: bytes, where: str) -> dict[str, Any]:
    """Return the body of a file that `seal` made.

    Raises:
        CheckpointError: It is damaged, of another kind, or of a newer format; names `where`.
    """
    line, separator, body = content.partition(b"\n")
    try:
        head = json.loads(line)
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(f"{where} is damaged: it does not begin as a {kind} does") from cause
    if not isinstance(head, dict) or head.get("format") != f"offload-{kind}":
        raise CheckpointError(f"{where} is no {kind}: its format is {_short(head)}")
    version = head.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{where} is damaged: version is {version!r}")
    if version > FORMAT:
        raise CheckpointError(
            f"{where} has format {version}, and this version of offload reads up to {FORMAT}: use a newer one"
        )
    if not separator or head.get("nbytes") != len(body) or isinstance(head.get("nbytes"), bool):
        raise CheckpointError(
            f"{where} is damaged: it has {len(body)} bytes where {_short(head.get('nbytes'))} are due"
        )
    if head.get("crc32c") != crc32c_of(body) or isinstance(head.get("crc32c"), bool):
        raise CheckpointError(f"{where} is damaged: its checksum is not the one it was written with")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(f"{where} is damaged: {cause}") from cause
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} is damaged: it holds {_short(found)}")
    return found


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 60


def _short(value: object) -> str:
    text = _REPR.repr(value)  # of any depth
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What `COMMIT` says.

    Attributes:
        id: Of the checkpoint that the folder holds.
        ranks: How many ranks wrote it.
        replaced: Ids of checkpoints that the folder held before, and that this one has replaced, newest first.
    """

    id: str
    ranks: int
    replaced: tuple[str, ...] = ()


def check_text(value: str) -> str:
    """Return a string that can be shown, written, and used as a name.

    Raises:
        ValueError: It holds halves of surrogate pairs, which JSON can say and UTF-8 cannot, or a zero.
    """
    if "\0" in value:
        raise ValueError("text with a zero in it")
    value.encode()
    return value


def check_metadata(value: object) -> None:
    """Check that a caller's metadata can be written, read back and gone through.

    Raises:
        ValueError: It is nested too deeply, or has text in it that is not Unicode.
    """
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"metadata is nested more than {MAX_DEPTH} deep")
        if isinstance(item, str):
            item.encode()
        elif isinstance(item, Mapping):
            todo += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list | tuple):
            todo += [(inner, depth + 1) for inner in item]


def seal_commit(commit: CommitRecord) -> bytes:
    """Return the content of `COMMIT`."""
    return seal("commit", {"id": commit.id, "ranks": commit.ranks, "replaced": list(commit.replaced[:MAX_RELEASED])})


def unseal_commit(content: bytes, where: str) -> CommitRecord:
    """Return what a `COMMIT` says.

    Raises:
        CheckpointError: It is damaged.
    """
    body = unseal("commit", content, where)
    fields = _Fields(body, where)
    replaced = fields.ids("replaced") if "replaced" in body else ()
    return CommitRecord(fields.id("id"), fields.integer("ranks", 1, MAX_RANKS), replaced)


def seal_released(ids: Sequence[str], note: str) -> bytes:
    """Return the content of `RELEASED`: which checkpoints the folder held, and why it does not any more."""
    return seal("released", {"ids": list(ids[:MAX_RELEASED]), "note": note})


def unseal_released(content: bytes, where: str) -> tuple[tuple[str, ...], str]:
    """Return the ids and the note of a `RELEASED`.

    Raises:
        CheckpointError: It is damaged, or not ours.
    """
    fields = _Fields(unseal("released", content, where), where)
    return fields.ids("ids"), str(fields.value("note"))


def encode(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file.

    Raises:
        CheckpointError: Nobody could read it back.
    """
    layout = manifest.layout
    try:
        check_metadata(manifest.metadata)
        for parameter in layout.parameters:
            check_text(parameter.name)
    except ValueError as cause:
        raise CheckpointError(f"a checkpoint cannot say this: {cause}") from cause
    return seal(
        "manifest",
        {
            "id": manifest.id,
            "rank": manifest.rank,
            "ranks": manifest.ranks,
            "step": manifest.step,
            "checksums": manifest.checksums,
            "stores": [[ref.store.hex, ref.path] for ref in manifest.stores],
            "parameters": [
                [
                    p.name,
                    p.numel,
                    int(p.dtype),
                    p.group,
                    step,
                    piece.start,
                    piece.full_numel,
                    piece.shape,
                    piece.stride,
                ]
                for p, step, piece in zip(layout.parameters, manifest.steps, manifest.pieces, strict=True)
            ],
            "rule": layout.rule.name,
            "formats": {tensor.name: tensor.format.name for tensor in (MASTER, *layout.rule.state)},
            "subgroups": [
                [
                    s.group,
                    int(s.dtype),
                    s.numel,
                    s.tile_numel,
                    [[g.parameter, g.start, g.offset, g.numel] for g in s.segments],
                ]
                for s in layout.subgroups
            ],
            "tiles": [
                [ref.store, ref.offset, ref.step, ref.checksum]
                for subgroup in layout.subgroups
                for ref in (manifest.tiles[tile] for tile, _, _ in all_tiles(subgroup))
            ],
            "metadata": manifest.metadata,
            "extra": manifest.extra,
        },
    )


class _Fields:
    """Checked access to the fields of a body."""

    def __init__(self, body: Mapping[str, Any], where: str) -> None:
        self._body = body
        self._where = where

    def wrong(self, name: str, value: object, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self._where} is damaged: {name} is {_short(value)}; {allowed}")

    def value(self, name: str, default: Any = None) -> Any:
        if name not in self._body:
            if default is not None:
                return default
            raise CheckpointError(f"{self._where} is damaged: it has no {name}")
        return self._body[name]

    def check_integer(self, name: str, value: object, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"it must be an integer from {least} to {most}")
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        return self.check_integer(name, self.value(name), least, most)

    def check_rows(self, name: str, value: object, width: int | None = None) -> list[Any]:
        if not isinstance(value, list) or (
            width is not None and not all(isinstance(row, list) and len(row) == width for row in value)
        ):
            raise self.wrong(name, value, "it must be a list" + (f" of rows of {width}" if width else ""))
        return value

    def rows(self, name: str, width: int) -> list[Any]:
        return self.check_rows(name, self.value(name), width)

    def id(self, name: str) -> str:
        return self.check_id(name, self.value(name))

    def ids(self, name: str) -> tuple[str, ...]:
        return tuple(self.check_id(name, value) for value in self.check_rows(name, self.value(name)))

    def check_id(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not _ID.fullmatch(value):
            raise self.wrong(name, value, "it must be 32 hexadecimal digits")
        return value


_MOST = (1 << 62) - 1


def decode(content: bytes, where: str) -> Manifest:
    """Return a manifest from its file's content.

    Raises:
        CheckpointError: It is damaged or of a newer format; names `where` and the field.
    """
    body = unseal("manifest", content, where)
    fields = _Fields(body, where)
    try:
        return _decode(fields)
    except CheckpointError:
        raise
    except (OffloadError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as cause:
        raise CheckpointError(f"{where} is damaged: {str(cause).partition(' (this is a bug')[0]}") from cause


def _decode(fields: _Fields) -> Manifest:
    ranks = fields.integer("ranks", 1, MAX_RANKS)
    parameters, steps, pieces = [], [], []
    for name, numel, dtype, group, step, start, full_numel, shape, stride in fields.rows("parameters", 9):
        if not isinstance(name, str):
            raise fields.wrong("the name of a parameter", name, "it must be a string")
        check_text(name)
        numel = fields.check_integer(f"numel of {name}", numel, 0, _MOST)
        full_numel = fields.check_integer(f"full_numel of {name}", full_numel, numel, _MOST)
        parameters.append(
            Parameter(
                name,
                numel,
                DtypeCode(fields.check_integer(f"dtype of {name}", dtype, 1, 3)),
                fields.check_integer(f"group of {name}", group, 0, _MOST),
            )
        )
        steps.append(fields.check_integer(f"step of {name}", step, 0, _MOST))
        start = fields.check_integer(f"start of {name}", start, 0, full_numel - numel)
        whole = _dimensions(fields, f"shape of {name}", shape)
        if whole is not None and math.prod(whole) != full_numel:
            raise fields.wrong(f"shape of {name}", shape, f"it must have {full_numel} elements")
        strides = _dimensions(fields, f"stride of {name}", stride)
        if strides is not None and (whole is None or len(strides) != len(whole)):
            raise fields.wrong(f"stride of {name}", stride, "it must have as many dimensions as the shape")
        pieces.append(Piece(start, full_numel, whole, strides))
    rule = _rule(fields)
    layout = Layout(tuple(parameters), tuple(_subgroups(fields, parameters, rule)), rule)
    # Before anything goes through the tiles one by one: there may be absurdly many.
    tensors = len(rule.names)
    count = sum(-(-subgroup.numel // subgroup.tile_numel) * tensors for subgroup in layout.subgroups)
    if len(fields.rows("tiles", 4)) != count:
        raise fields.wrong("the number of tiles", len(fields.value("tiles")), f"the layout has {count}")
    if len(layout.index_by_name) != len(parameters):
        raise fields.wrong("parameters", len(parameters), "two have the same name")
    check_layout(layout)
    stores = []
    for store, path in fields.rows("stores", 2):
        if not isinstance(store, str) or not _ID.fullmatch(store):
            raise fields.wrong("a store", store, "it must be 32 hexadecimal digits")
        if path is not None and not (isinstance(path, str) and check_text(path)):
            raise fields.wrong("the path of a store", path, "it must be a directory or s3://bucket/prefix")
        stores.append(StoreRef(uuid.UUID(store), path))
    checksums = fields.value("checksums")
    if not isinstance(checksums, bool):
        raise fields.wrong("checksums", checksums, "it must be true or false")
    metadata = fields.value("metadata")
    if not isinstance(metadata, dict):
        raise fields.wrong("metadata", metadata, "it must be an object")
    check_metadata(metadata)
    return Manifest(
        id=fields.id("id"),
        rank=fields.integer("rank", 0, ranks - 1),
        ranks=ranks,
        step=fields.integer("step", 0, _MOST),
        layout=layout,
        steps=tuple(steps),
        pieces=tuple(pieces),
        stores=tuple(stores),
        tiles=_tiles(fields, layout, len(stores)),
        checksums=checksums,
        metadata=metadata,
        extra=_extra(fields),
    )


def _dimensions(fields: _Fields, name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    sizes = fields.check_rows(name, value)
    if len(sizes) > MAX_DIMENSIONS:
        raise fields.wrong(name, value, f"it must have at most {MAX_DIMENSIONS} dimensions")
    return tuple(fields.check_integer(name, size, 0, _MOST) for size in sizes)


def _rule(fields: _Fields) -> UpdateRule:
    name = fields.value("rule", ADAMW.name)  # older manifests name none, as there was one
    if not isinstance(name, str) or name not in RULES:
        raise fields.wrong("rule", name, f"this version of offload knows {', '.join(RULES)}")
    rule = RULES[name]
    formats = {tensor.name: tensor.format.name for tensor in (MASTER, *rule.state)}
    if fields.value("formats", formats) != formats:
        raise fields.wrong("formats", fields.value("formats"), f"this version of offload reads {formats}")
    return rule


def _subgroups(fields: _Fields, parameters: Sequence[Parameter], rule: UpdateRule) -> list[Subgroup]:
    found = []
    for index, (group, dtype, numel, tile_numel, rows) in enumerate(fields.rows("subgroups", 5)):
        what = f"subgroup {index}"
        numel = fields.check_integer(f"numel of {what}", numel, 1, _MOST)
        tile_numel = fields.check_integer(f"tile_numel of {what}", tile_numel, SECTOR_BYTES // 4, numel)
        if tile_numel % (SECTOR_BYTES // 4):
            raise fields.wrong(f"tile_numel of {what}", tile_numel, "it must be whole sectors")
        segments = []
        for parameter, start, offset, length in fields.check_rows(f"segments of {what}", rows, 4):
            segments.append(
                Segment(
                    fields.check_integer(f"a parameter of {what}", parameter, 0, len(parameters) - 1),
                    fields.check_integer(f"a start in {what}", start, 0, _MOST),
                    fields.check_integer(f"an offset in {what}", offset, 0, numel),
                    fields.check_integer(f"a length in {what}", length, 1, numel),
                )
            )
        weight_dtype = DtypeCode(fields.check_integer(f"dtype of {what}", dtype, 1, 3))
        found.append(
            Subgroup(
                index,
                fields.check_integer(f"group of {what}", group, 0, _MOST),
                weight_dtype,
                stored_tensors(rule, weight_dtype),
                numel,
                tuple(segments),
                tile_numel,
            )
        )
    return found


def _tiles(fields: _Fields, layout: Layout, stores: int) -> dict[TileId, TileRef]:
    names = [tile for subgroup in layout.subgroups for tile, _, _ in all_tiles(subgroup)]
    found = {}
    for tile, (store, offset, step, checksum) in zip(names, fields.value("tiles"), strict=True):
        what = f"of subgroup {tile.subgroup}, tensor {tile.tensor}, tile {tile.tile}"
        offset = fields.check_integer(f"the offset {what}", offset, 0, _MOST)
        if offset % SECTOR_BYTES:
            raise fields.wrong(f"the offset {what}", offset, f"it must be a multiple of {SECTOR_BYTES}")
        found[tile] = TileRef(
            fields.check_integer(f"the store {what}", store, 0, stores - 1),
            offset,
            fields.check_integer(f"the step {what}", step, 0, _MOST),
            fields.check_integer(f"the checksum {what}", checksum, 0, (1 << 32) - 1),
        )
    return found


def _extra(fields: _Fields) -> tuple[str, int, int] | None:
    value = fields.value("extra")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[0], str):
        raise fields.wrong("extra", value, "it must be a name, a size and a checksum")
    if "/" in check_text(value[0]) or value[0] in ("", ".", ".."):
        raise fields.wrong("extra", value[0], "it must be the name of a file in the checkpoint's folder")
    return (
        value[0],
        fields.check_integer("the size of extra", value[1], 0, _MOST),
        fields.check_integer("the checksum of extra", value[2], 0, (1 << 32) - 1),
    )
