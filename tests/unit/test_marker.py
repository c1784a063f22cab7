"""Markers of folders that frameworks write to: what they say, and what becomes of a save that was interrupted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offload.checkpoint import marker
from offload.checkpoint.folder import open_folder
from offload.checkpoint.marker import (
    BEGUN,
    DAMAGED,
    WHOLE,
    Mark,
    Marker,
    mark_begun,
    mark_in,
    mark_of,
    mark_whole,
    set_aside,
)
from offload.checkpoint.whole import FolderCopy, WholeFolder
from offload.errors import OffloadError

NAMES = re.compile(r"checkpoint-\d+")
BEGIN = "import sys; from offload.checkpoint.marker import mark_begun; [*map(mark_begun, sys.argv[1:])]"


def begun_by_another(*folders: Path) -> None:
    """Have a process begin a save there, and end."""
    subprocess.run([sys.executable, "-c", BEGIN, *map(str, folders)], check=True)


def test_a_folder_says_of_itself_whether_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    assert mark_of(str(folder)) is Mark.NONE
    for _ in range(2):  # a folder may be saved to again
        mark_begun(str(folder))
        assert mark_of(str(folder)) is Mark.BEGUN
        (folder / "deep").mkdir(exist_ok=True)
        (folder / "deep" / "weights").write_bytes(b"1")
        if not (folder / "pipe").exists():
            os.mkfifo(folder / "pipe")
            (folder / "nowhere").symlink_to("gone")
        mark_whole(str(folder))
        assert mark_of(str(folder)) is Mark.WHOLE
    assert {*os.listdir(folder)} == {"deep", "nowhere", WHOLE, "pipe"}
    with pytest.raises(OffloadError, match="somebody else has deleted, moved or marked it"):
        mark_whole(str(folder))


def test_all_is_durable_before_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_begun(str(tmp_path))
    (tmp_path / "weights").write_bytes(b"1")
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(f"{os.readlink(f'/proc/self/fd/{descriptor}')} {mark_of(str(tmp_path)).name}")
        sync(descriptor)

    monkeypatch.setattr(marker.os, "fsync", noted)
    mark_whole(str(tmp_path))
    assert {f"{tmp_path}/weights BEGUN", f"{tmp_path} BEGUN"} < {*synced}
    assert synced[-1] == f"{tmp_path} WHOLE"


def test_what_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError):
        mark_begun(str(tmp_path / "file"))


def test_a_mirrors_marker_that_names_files_elsewhere_lets_none_be_deleted(tmp_path: Path) -> None:
    run, mirror, another = tmp_path / "run", tmp_path / "mirror", tmp_path / "another"
    (run / "checkpoint-1").mkdir(parents=True)
    (mirror / "checkpoint-1").mkdir(parents=True)
    (run / "checkpoint-1" / "weights").write_bytes(b"1")
    another.write_bytes(b"1")
    planted = Marker(files={"checkpoint-1/../../another": (1, 1)})
    (mirror / "checkpoint-1" / WHOLE).write_bytes(planted.encode())
    assert mark_in(open_folder(mirror / "checkpoint-1")) == (Mark.WHOLE, DAMAGED)
    copy = FolderCopy(WholeFolder(str(run), "checkpoint-1"), str(mirror))
    copy.begin()
    copy.close()
    assert another.exists()


def test_only_what_nobody_can_end_is_set_aside(tmp_path: Path) -> None:
    begun_by_another(*(tmp_path / name for name in ("checkpoint-1", "checkpoint-2", "other", "checkpoint-3")))
    mark_whole(str(tmp_path / "checkpoint-3"))
    mark_begun(str(tmp_path / "checkpoint-4"))  # by this process, which is there
    for name in ("checkpoint-5", "incomplete-checkpoint-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").touch()
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / BEGUN).write_text("nobody's")
    renamed = set_aside(str(tmp_path), NAMES)
    assert [os.path.basename(name) for name in renamed] == ["incomplete-checkpoint-1", "incomplete-checkpoint-2.1"]
    left = sorted(set(os.listdir(tmp_path)) - {*map(os.path.basename, renamed)})
    assert left == [*(f"checkpoint-{n}" for n in (3, 4, 5, 6)), "incomplete-checkpoint-2", "other"]
    assert set_aside(str(tmp_path), NAMES) == []
    assert set_aside(str(tmp_path / "gone"), NAMES) == []


def test_any_number_of_processes_may_set_aside(tmp_path: Path) -> None:
    folders = [tmp_path / f"checkpoint-{n}" for n in range(20)]
    begun_by_another(*folders)
    program = (
        "import re, sys; from offload.checkpoint.marker import set_aside; "
        "print(*set_aside(sys.argv[1], re.compile(r'checkpoint-[0-9]+')))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = [name for process in processes for name in process.communicate()[0].split()]
    assert not any(process.returncode for process in processes)
    assert sorted(found) == sorted(str(tmp_path / f"incomplete-checkpoint-{n}") for n in range(20))
