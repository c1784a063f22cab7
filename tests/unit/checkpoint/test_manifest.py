"""What a manifest says comes back as it was, and what it may not say is named."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from written import layout_of, manifest_of

from offload.checkpoint.manifest import (
    MAX_DEPTH,
    MAX_RELEASED,
    OWN_FILE,
    CommitRecord,
    Manifest,
    MirrorProgress,
    check_metadata,
    check_text,
    decode,
    encode,
    extra_name,
    manifest_name,
    seal,
    seal_commit,
    seal_progress,
    seal_released,
    unseal,
    unseal_commit,
    unseal_progress,
    unseal_released,
)
from offload.dtypes import DtypeCode
from offload.errors import CheckpointError
from offload.formats import COMPACT8, COMPACT16, StateSpec
from offload.layout import Parameter, build_layout, keep_exact
from offload.rules import ADAMW, LION, SGD_MOMENTUM

BF16, FP32 = DtypeCode.BFLOAT16, DtypeCode.FLOAT32

PIECE = Parameter("piece", 8, BF16, 0, 4, 24, (6, 4), (4, 1), box=((1, 4), (0, 2)))
ROWS = Parameter("rows", 8, FP32, 3, 4, 24, (6, 4), (4, 1))
LARGE = Parameter("large", 1 << 16, BF16, 0, shape=(256, 256), stride=(256, 1))


@pytest.mark.parametrize(
    "manifest",
    [
        manifest_of(layout_of()),
        manifest_of(layout_of(PIECE, ROWS), None, rank=2, ranks=3, checksums=False),
        manifest_of(layout_of(Parameter("none", 0, BF16, 0))),
        manifest_of(build_layout([], 1024)),
        manifest_of(build_layout([LARGE], 4096, state=StateSpec(LION, COMPACT16))),
        manifest_of(build_layout([LARGE], 4096, state=StateSpec(SGD_MOMENTUM, COMPACT8))),
        manifest_of(build_layout(keep_exact([LARGE, ROWS], ()), 4096, state=StateSpec(ADAMW, COMPACT8))),
        manifest_of(layout_of(), seed=7, numbers=(3, 9)),
        manifest_of(layout_of(), extra=("extra.bin", 12, 34)),
        manifest_of(layout_of(), metadata={"groups": [{"lr": 0.1, "own": [None, "ä"]}], "optimizer": "AdamW"}),
    ],
    ids=["two", "rank", "empty", "none", "lion", "sgd", "exact", "seed", "extra", "metadata"],
)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    found = decode(encode(manifest), "m")
    exact = [replace(p, exact=False) for p in manifest.layout.parameters]  # its subgroup says which format it has
    assert [*found.layout.parameters] == exact
    assert replace(found, layout=manifest.layout) == manifest
    assert found.layout.subgroups == manifest.layout.subgroups
    assert found.layout.state == manifest.layout.state
    assert found.tile_bytes == manifest.tile_bytes
    assert set(found.tiles) == set(found.tile_bytes)


def change(body: dict[str, Any], path: str, value: Any) -> None:
    *before, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in before:
        body = body[key]
    body[last] = value  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("id", "A" * 32, "id is 'AAAA"),
        ("rank", 1, "rank is 1; it must be below 1"),
        ("ranks", 0, "ranks is 0"),
        ("ranks", 1 << 17, "ranks is 131072"),
        ("step", -1, "step is -1"),
        ("checksums", 1, "checksums is 1"),
        ("stores.0.0", "x", r"stores\[0\] \('x'\).store is 'x'"),
        ("stores.0.1", "", "the path of a store is ''"),
        ("stores.0.1", "a\0b", "with a zero"),
        ("parameters.0.0", "a\0b", "with a zero"),
        ("parameters.0.0", "\ud800", "surrogates not allowed"),
        ("parameters.1.0", "a", "the number of names is 1; it must be 2"),
        ("parameters.0.1", -3, r"parameters\[0\] \('a'\).numel is -3"),
        ("parameters.0.1", 4000, "full_numel of a is 3000; it must be at least 4000"),
        ("parameters.0.2", 9, r"parameters\[0\] \('a'\).dtype is 9"),
        ("parameters.0.2", 0, "dtype of a is 0"),
        ("parameters.0.5", 1, "start of a is 1; it must be at most 0"),
        ("parameters.0.7", [3, 3], r"shape of a is \(3, 3\)"),
        ("parameters.0.8", [1], r"stride of a is \(1,\)"),
        ("parameters.0.7", [1] * 65, r"parameters\[0\] \('a'\).shape"),
        ("subgroups.1.3", 1000, r"subgroups\[1\].tile_numel is 1000"),
        ("subgroups.1.3", 1 << 30, "tile_numel of subgroup 1 is 1073741824"),
        ("subgroups.1.4.0.0", 99, "a parameter of subgroup 1 is 99; it must be below 2"),
        ("subgroups.1.4.0.3", 3, "a is not covered in order"),
        ("subgroups.1.5", 99, r"subgroups\[1\].state_format is 99"),
        ("tiles.3.1", 5, r"tiles\[3\].offset is 5"),
        ("tiles.3.0", 9, "the store of subgroup 1, tensor 0, tile 0 is 9; it must be below 1"),
        ("tiles.3.3", 1 << 32, r"tiles\[3\].checksum"),
        ("tiles", [], "the number of tiles is 0"),
        ("metadata", 3, "metadata is 3"),
        ("extra", ["../x", 1, 1], "extra is '../x'"),
        ("extra", [".", 1, 1], "extra is '.'"),
        ("extra", ["a\0", 1, 1], "with a zero"),
        ("rule", "newton", "has state of the rule 'newton', and this version"),
        ("formats", {"master": "fp7"}, "formats is {'master': 'fp7'}; it must be"),
        ("numbers", [1], "the length of numbers is 1; it must be 2"),
    ],
)
def test_a_field_that_is_wrong_is_named(path: str, value: Any, words: str) -> None:
    body = unseal("manifest", encode(manifest_of(layout_of(), seed=7, numbers=(3, 9))), "m")
    change(body, path, value)
    with pytest.raises(CheckpointError, match=rf"^m .*{words}"):
        decode(seal("manifest", body), "m")


@pytest.mark.parametrize(
    ("left_out", "found"),
    [
        ("rule", {"layout": layout_of()}),  # Adam's
        ("formats", {"layout": layout_of()}),
        ("seed", {"seed": None, "numbers": (3, 9)}),
        ("checksums", None),
        ("tiles", None),
        ("ranks", None),
    ],
)
def test_what_a_manifest_may_leave_out(left_out: str, found: dict[str, Any] | None) -> None:
    manifest = manifest_of(layout_of(), seed=7, numbers=(3, 9))
    body = unseal("manifest", encode(manifest), "m")
    del body[left_out]
    if found is None:
        with pytest.raises(CheckpointError, match=f"m is damaged: .*`{left_out}`"):
            decode(seal("manifest", body), "m")
    else:
        assert decode(seal("manifest", body), "m") == replace(manifest, **found)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda sealed: b"", "does not begin as a pins does"),
        (lambda sealed: b"[" * 100_000 + b"\n", "does not begin as a pins does"),
        (lambda sealed: sealed.replace(b"offload-pins", b"offload-x"), "is no pins: its format is 'offload-x'"),
        (lambda sealed: sealed.replace(b'"version": 1', b'"version": 2'), "has format 2, .* use a newer one"),
        (lambda sealed: sealed[:-1], "has 13 bytes where 14 are due"),
        (lambda sealed: sealed + b"x", "has 15 bytes where 14 are due"),
        (lambda sealed: sealed[:-2] + b" }", "its checksum"),
        (lambda sealed: seal("pins", [3]), r"it holds \[3\]"),  # type: ignore[arg-type]
        (lambda sealed: seal("pins", {}).replace(b"\n", b""), "does not begin|bytes"),
    ],
)
def test_a_file_is_believed_only_whole(content: Callable[[bytes], bytes], words: str) -> None:
    sealed = seal("pins", {"pins": [1, 2]})
    assert unseal("pins", sealed, "f") == {"pins": [1, 2]}
    assert json.loads(sealed.partition(b"\n")[0])["nbytes"] == 14
    with pytest.raises(CheckpointError, match=rf"^f .*{words}"):
        unseal("pins", content(sealed), "f")


def test_commits_and_releases_remember_so_many() -> None:
    ids = tuple(f"{n:032x}" for n in range(MAX_RELEASED + 3))
    assert unseal_commit(seal_commit(CommitRecord(ids[0], 3, ids)), "f") == CommitRecord(ids[0], 3, ids[:-3])
    assert unseal_released(seal_released(ids, "why"), "f") == (ids[:-3], "why")
    for content, read in ((seal("commit", {"id": "x", "ranks": 1}), unseal_commit), (b"", unseal_released)):
        with pytest.raises(CheckpointError, match=r"^f is damaged"):
            read(content, "f")


def test_what_a_mirror_writes_is_read_back() -> None:
    ids = [f"{n:032x}" for n in range(2)]
    for mirrored in (None, ids[1]):
        sealed = seal_commit(CommitRecord(ids[0], 2, (), mirrored))
        assert unseal_commit(sealed, "f").mirrored == mirrored
        assert (b"mirrored" in sealed) == (mirrored is not None)
    progress = MirrorProgress(((uuid.uuid4(), 3), (uuid.uuid4(), 0)))
    assert unseal_progress(seal_progress(progress), "f") == progress
    for stores in ([["x", 1]], [[ids[0], -1]], 3):
        with pytest.raises(CheckpointError, match=r"^f is damaged: stores"):
            unseal_progress(seal("mirror", {"stores": stores}), "f")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": [value]}
    return value


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}, {"a": [("\ud800",)]}, [nested(MAX_DEPTH // 2)]])
def test_what_could_not_be_read_back_is_not_written(value: Any) -> None:
    with pytest.raises(ValueError, match=r"surrogates|nested"):
        check_metadata(value)
    with pytest.raises(CheckpointError, match="a checkpoint cannot say this"):
        encode(manifest_of(layout_of(), metadata={"optimizer": value}))
    check_metadata(nested(MAX_DEPTH // 2))


def test_names_of_files_and_of_what_is_ours() -> None:
    id = "0f" * 16
    assert (manifest_name(id, 12), extra_name(id, 0)) == (f"manifest-{id}-12.json", f"extra-{id}-0.bin")
    assert all(OWN_FILE.fullmatch(name) for name in (manifest_name(id, 12), extra_name(id, 0)))
    assert not any(OWN_FILE.fullmatch(name) for name in ("COMMIT", f"manifest-{id}.json", f"extra-{id[1:]}-0.bin"))
    assert check_text("ä") == "ä"
