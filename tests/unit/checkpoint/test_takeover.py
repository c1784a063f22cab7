"""Which checkpoints are gone on from where they lie, and which slots of a store they leave free."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from written import STORE, layout_of, manifest_of, write_checkpoint

from offload.checkpoint.manifest import CommitRecord, StoreRef, TileRef
from offload.checkpoint.stores import Pin, store_folder, write_pins
from offload.checkpoint.takeover import manifest_in_place, pinned_in, records_in, relocated, used_bytes
from offload.dtypes import DtypeCode
from offload.layout import Parameter
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule.index import Location, TileRecord

BF16 = DtypeCode.BFLOAT16
LAYOUT = layout_of()
NAMES = ["a", "b"]
EMPTY = layout_of(Parameter("none", 0, BF16, 0))
NONE = replace(EMPTY, parameters=(), subgroups=())


def opened(*manifests: Any, path: str = "/ck") -> Any:
    """Return what an opened checkpoint says of itself."""
    return SimpleNamespace(path=path, id=manifests[0].id, manifests=manifests)


@pytest.mark.parametrize(
    ("manifests", "rank", "ranks", "found"),
    [
        ([manifest_of(LAYOUT)], 0, 1, 0),
        ([manifest_of(LAYOUT)], 1, 2, 0),  # one rank has saved for all
        ([manifest_of(LAYOUT), manifest_of(NONE)], 1, 2, 0),  # and the other was its replica
        ([manifest_of(LAYOUT), manifest_of(LAYOUT)], 1, 2, 1),
        ([manifest_of(LAYOUT), manifest_of(LAYOUT)], 0, 3, None),
        ([manifest_of(LAYOUT, None)], 0, 1, None),  # a copy, which its owner may move
        ([manifest_of(layout_of(subgroup_numel=2048))], 0, 1, None),
        ([manifest_of(layout_of(replace(LAYOUT.parameters[0], name="x"), LAYOUT.parameters[1]))], 0, 1, None),
    ],
    ids=["one", "for all", "replica", "own", "other ranks", "copy", "other subgroups", "other names"],
)
def test_a_checkpoint_is_gone_on_from_if_it_is_cut_as_the_session_is(
    manifests: list[Any], rank: int, ranks: int, found: int | None
) -> None:
    manifest = manifest_in_place(opened(*manifests), LAYOUT, NAMES, rank, ranks)
    assert manifest is (None if found is None else manifests[found])


@pytest.mark.parametrize(
    "here",
    [
        Parameter("p", 8, BF16, 0, 8, 24),  # another piece
        Parameter("p", 8, BF16, 0, 0, 32),  # of another whole
        Parameter("p", 8, BF16, 0, 0, 24, (6, 4), (4, 1), box=((0, 4), (0, 2))),
    ],
)
def test_pieces_are_gone_on_from_by_the_same_rank_alone(here: Parameter) -> None:
    there = Parameter("p", 8, BF16, 0, 0, 24)
    manifest = manifest_of(layout_of(there))
    assert manifest_in_place(opened(manifest), layout_of(there), ["p"], 0, 1) is manifest
    assert manifest_in_place(opened(manifest), layout_of(here), ["p"], 0, 1) is None


def test_names_are_those_of_the_checkpoint() -> None:
    session = layout_of(*(replace(p, name=f"_orig_mod.{p.name}") for p in LAYOUT.parameters))
    manifest = manifest_of(LAYOUT)
    assert manifest_in_place(opened(manifest), session, NAMES, 0, 1) is manifest
    assert manifest_in_place(opened(manifest), session, [p.name for p in session.parameters], 0, 1) is None


def test_tiles_by_the_numbers_of_paths() -> None:
    first, second, other = TileId(0, 0, 0), TileId(0, 1, 0), uuid.UUID(int=8)
    tiles = {**manifest_of(LAYOUT).tiles, second: TileRef(1, 512, 4, 9)}
    stores = (StoreRef(STORE, "/p"), StoreRef(other, "/q"), StoreRef(other, None))
    manifest = manifest_of(LAYOUT, stores=stores, tiles=tiles)
    nbytes = manifest.tile_bytes
    assert records_in(manifest, {("/q", other): 3}) == {second: TileRecord(Location(3, 512, nbytes[second]), 4, 9)}
    found = records_in(manifest, {("/p", STORE): 2, ("/q", other): 3})
    assert set(found) == set(manifest.tiles)
    assert found[first] == TileRecord(Location(2, 0, nbytes[first]), 1, 100)
    assert records_in(manifest, {("/q", STORE): 0, ("/p", other): 1}) == {}


def test_a_store_is_found_on_a_path_that_is_called_something_else(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "p")
    link, path, gone = str(tmp_path / "link"), str(tmp_path / "p"), str(tmp_path / "gone")
    other = uuid.UUID(int=8)
    stores = tuple(StoreRef(store, where) for where in (link, path, gone, None) for store in (STORE, other))
    found = relocated(manifest_of(LAYOUT, stores=stores), path, STORE)
    assert [ref.path for ref in found.stores] == [path, link, path, path, gone, gone, None, None]
    assert [ref.store for ref in found.stores] == [STORE, other] * 4


# Which slots of a store are free


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "p" / f"offload-{STORE}").mkdir(parents=True)
    return tmp_path / "p"


MINE, OLDER = "a" * 32, "b" * 32


def pins(path: Path, *named: tuple[str, str]) -> None:
    write_pins(store_folder(str(path), STORE), [Pin(*pin) for pin in named])


def asked(path: Path, checkpoint: Any) -> Any:
    found = pinned_in(str(path), STORE, 3, checkpoint, LAYOUT)
    return None if found is None else [(one.id, one.folder, one.step, len(one.records)) for one in found]


def test_what_checkpoints_name_in_a_store(tmp_path: Path, path: Path) -> None:
    mine = manifest_of(LAYOUT, str(path), id=MINE)
    older = manifest_of(LAYOUT, str(path), id=OLDER, step=2)
    folder = write_checkpoint(tmp_path / "older", [older])
    tiles = len(mine.tiles)
    pins(path, (MINE, "/ck"), (OLDER, str(folder)))
    assert asked(path, opened(mine)) == [(MINE, "/ck", 5, tiles), (OLDER, str(folder), 2, tiles)]
    found = pinned_in(str(path), STORE, 3, opened(mine), LAYOUT)
    assert found is not None
    assert {record.location.path for one in found for record in one.records.values()} == {3}
    last = max(mine.tiles.values(), key=lambda ref: ref.offset)
    nbytes = max(n for tile, n in mine.tile_bytes.items() if mine.tiles[tile].offset == last.offset)
    assert used_bytes(found) == last.offset + nbytes + SECTOR_BYTES


@pytest.mark.parametrize(
    ("case", "known"),
    [
        ("all are there", True),
        ("a checkpoint is missing", False),
        ("it was released", True),
        ("it is of another layout", False),
        ("it names nothing here", False),
        ("it is damaged", False),
        ("its folder holds another", False),
        ("this one has no pin", False),
        ("pins are damaged", False),
    ],
)
def test_slots_are_free_only_if_all_that_is_pinned_is_known(
    tmp_path: Path, path: Path, case: str, known: bool
) -> None:
    mine = manifest_of(LAYOUT, str(path), id=MINE)
    older = manifest_of(LAYOUT, str(path), id=OLDER)
    if case == "it is of another layout":
        older = manifest_of(layout_of(subgroup_numel=2048), str(path), id=OLDER)
    if case == "it names nothing here":
        older = manifest_of(LAYOUT, str(tmp_path), id=OLDER)
    if case == "its folder holds another":
        older = manifest_of(LAYOUT, str(path), id="c" * 32)
    commit = CommitRecord("c" * 32, 1, (OLDER,)) if case == "it was released" else None
    folder = write_checkpoint(tmp_path / "older", [older], commit)
    if case == "it is damaged":
        next(folder.glob("manifest-*")).write_bytes(b"")
    if case == "a checkpoint is missing":
        folder = tmp_path / "none"
    pins(path, *([] if case == "this one has no pin" else [(MINE, "/ck")]), (OLDER, str(folder)))
    if case == "pins are damaged":
        next((path / f"offload-{STORE}").iterdir()).write_bytes(b"")
    assert (asked(path, opened(mine)) is not None) is known
