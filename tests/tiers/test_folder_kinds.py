"""Folders of small files, of a directory and of a bucket: files are copied into them from open ones."""

from __future__ import annotations

import os
import random
import uuid
from pathlib import Path

import pytest
from s3_server import BUCKET

import offload
from offload.checkpoint.folder import open_folder
from offload.tiers.common import FILE_PIECE_BYTES, FileBytes
from offload.tiers.objects import S3Client


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "place")
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/place-{uuid.uuid4()}"


@pytest.mark.parametrize("nbytes", [0, 1, 8 * FILE_PIECE_BYTES + 3])
def test_an_open_file_is_copied(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """In parts, and though its name has gone meanwhile."""
    for name in ("multipart_bytes", "part_bytes"):
        monkeypatch.setitem(S3Client.__init__.__kwdefaults__, name, 5 << 20)
    content = random.Random(nbytes).randbytes(nbytes)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        (tmp_path / "file").unlink()
        folder = open_folder(f"{place}/in/it")
        folder.prepare()
        folder.write("copy", FileBytes(file.fileno(), nbytes))
    whole = memoryview(bytearray(nbytes))
    folder.read_into("copy", [whole] if nbytes else [])
    assert whole == content
    assert open_folder(place).walk() == [("in/it/copy", nbytes)]


def test_a_file_that_became_shorter_is_not_copied(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    folder = open_folder(place)
    folder.prepare()
    with (tmp_path / "file").open("rb") as file:
        os.truncate(tmp_path / "file", 3)
        with pytest.raises(offload.CheckpointError, match="shorter"):
            folder.write("copy", FileBytes(file.fileno(), 4))
    assert folder.walk() == []


def test_a_folder_goes_with_all_in_it(place: str) -> None:
    inner, beside = open_folder(f"{place}/in/it"), open_folder(f"{place}/beside")
    for folder in (inner, beside):
        folder.prepare()
        folder.write("file.json", b"{}")
    for _ in range(2):
        open_folder(f"{place}/in").remove_tree()
    assert open_folder(place).walk() == [("beside/file.json", 2)]


def test_a_link_is_not_followed_to_delete(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(offload.CheckpointError, match="delete"):
        open_folder(tmp_path / "link").remove_tree()
    assert (tmp_path / "real" / "file").exists()
