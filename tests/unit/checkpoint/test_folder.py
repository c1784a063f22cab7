"""A checkpoint's folder: what can be its name, and who may commit there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload.checkpoint.folder import FolderLock, is_name, open_folder
from offload.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("a", True), ("", True), ("ä/b", True), ("\udcff", True), ("a\0b", False), ("\ud800", False), (3, False)],
    ids=repr,
)
def test_what_can_be_a_name(text: Any, is_one: bool) -> None:
    assert is_name(text) is is_one


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", "s3://", "ftp://host/x"], ids=repr)
def test_what_is_no_folder(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^path: "):
        open_folder(path)


def test_a_directory_by_each_of_its_names(tmp_path: Path) -> None:
    for name in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        folder = open_folder(name)
        folder.write("x", b"y")
        assert (tmp_path / "x").read_bytes() == b"y"
        assert folder.has_locks
        (tmp_path / "x").unlink()


def test_one_at_a_time_has_the_lock(tmp_path: Path) -> None:
    first, second = (FolderLock(open_folder(tmp_path)) for _ in range(2))
    assert first.acquire()
    assert first.acquire()  # which it has
    assert not second.acquire()
    first.release()
    first.release()
    assert second.acquire()
    assert not first.acquire()
    second.release()


def test_the_lock_is_that_of_the_directory_that_is_there_now(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    path.mkdir()
    first, second = (FolderLock(open_folder(path)) for _ in range(2))
    assert first.acquire()
    path.rename(tmp_path / "moved")
    path.mkdir()
    assert second.acquire()  # of another directory
    assert not first.acquire()
    second.release()
    assert first.acquire()
    first.release()


def test_where_there_are_no_locks_everybody_has_it(tmp_path: Path) -> None:
    gone = FolderLock(open_folder(tmp_path / "none"))
    assert gone.acquire()
    gone.release()
    remote: Any = SimpleNamespace(path=str(tmp_path), has_locks=False)
    assert FolderLock(remote).acquire()
    assert FolderLock(remote).acquire()
