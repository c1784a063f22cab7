"""What a folder says of the checkpoint in it, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from written import layout_of, manifest_of, write_checkpoint

from offload.checkpoint.contents import (
    is_checkpoint,
    read_commit,
    read_extra,
    read_manifests,
    read_released,
    some_of,
)
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import COMMIT_NAME, RELEASED_NAME, FileRef, encode, manifest_name, seal_released
from offload.errors import CheckpointError

MANIFESTS = [manifest_of(layout_of(), rank=rank, ranks=2) for rank in range(2)]
SECOND = manifest_name("a" * 32, 1)
OLD = ("b" * 32,)


def test_a_checkpoint_is_its_commit_and_its_manifests(tmp_path: Path) -> None:
    folder = open_folder(write_checkpoint(tmp_path / "ck", MANIFESTS))
    assert (read_commit(folder).id, read_commit(folder).ranks) == ("a" * 32, 2)
    assert read_manifests(folder) == ("a" * 32, MANIFESTS)
    assert is_checkpoint(tmp_path / "ck")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "is no checkpoint: the folder is not there, or empty"),
        ({"x": b""}, "is no checkpoint: it holds x"),
        ({f"x{n}": b"" for n in range(7)}, "it holds x0, x1, x2, x3, x4 and 2 more"),
        ({"config.json": b"", f"optimizer/{COMMIT_NAME}": b""}, "optimizer; a checkpoint is in .*/optimizer$"),
        ({manifest_name("a" * 32, 0): b""}, r"never committed \(there is no COMMIT\)"),
        ({RELEASED_NAME: seal_released(OLD, "why it was")}, "was a checkpoint until it was released: why it was"),
        ({RELEASED_NAME: b"not ours"}, "is no checkpoint: it holds RELEASED"),
        ({COMMIT_NAME: b"x"}, "COMMIT is damaged"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_commit(open_folder(tmp_path))
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "none")
    assert not is_checkpoint("s3://")


def test_what_a_folder_held_until_it_was_released(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    assert read_released(folder) == ((), "")
    (tmp_path / RELEASED_NAME).write_bytes(seal_released(OLD, "why"))
    assert read_released(folder) == (OLD, "why")
    (tmp_path / RELEASED_NAME).write_bytes(b"not ours")
    assert read_released(folder) == ((), "")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.unlink(), f"{SECOND} is missing: the checkpoint was written by 2 ranks"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), f"{SECOND} is damaged"),
        (lambda file: file.write_bytes(encode(MANIFESTS[0])), f"{SECOND} belongs to another .* it is of rank 0 of 2"),
        (
            lambda file: file.write_bytes(encode(replace(MANIFESTS[1], id="c" * 32))),
            f"{SECOND} belongs to another checkpoint: .* of the save c",
        ),
        (
            lambda file: file.write_bytes(encode(replace(MANIFESTS[1], ranks=3))),
            f"{SECOND} belongs to another checkpoint: it is of rank 1 of 3",
        ),
    ],
)
def test_manifests_that_are_not_of_one_checkpoint(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    folder = write_checkpoint(tmp_path / "ck", MANIFESTS)
    spoil(folder / SECOND)
    with pytest.raises(CheckpointError, match=words):
        read_manifests(open_folder(folder))


def test_what_else_a_caller_gave(tmp_path: Path) -> None:
    folder, content = open_folder(tmp_path), b"anything"
    assert read_extra(folder, MANIFESTS[0]) is None
    manifest = replace(MANIFESTS[0], extra=FileRef.of("x.bin", content))
    with pytest.raises(CheckpointError, match=r"x\.bin is missing"):
        read_extra(folder, manifest)
    (tmp_path / "x.bin").write_bytes(content)
    assert read_extra(folder, manifest) == content
    for wrong in (b"anythinh", b"anything else", b""):
        (tmp_path / "x.bin").write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"x\.bin is damaged"):
            read_extra(folder, manifest)


def test_the_first_few_of_some_names() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    assert [some_of(names[:n]) for n in (0, 1, 5)] == ["none", "a", "a, b, c, d, e"]
    assert some_of(names) == "a, b, c, d, e and 1 more"
