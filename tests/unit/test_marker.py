"""Markers of folders that frameworks write to: what they say, and what becomes of a save that was interrupted."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from offload.checkpoint import marker
from offload.checkpoint.folder import open_folder
from offload.checkpoint.marker import (
    BEGUN,
    DAMAGED,
    LOCK,
    WHOLE,
    Mark,
    Marker,
    mark_begun,
    mark_in,
    mark_of,
    mark_whole,
    set_aside,
    unmark,
)
from offload.checkpoint.whole import FolderCopy, WholeFolder
from offload.errors import OffloadError
from offload.tiers.filesystem import LockFile

NAMES = re.compile(r"checkpoint-\d+")
BEGIN = "import sys; from offload.checkpoint.marker import mark_begun; [*map(mark_begun, sys.argv[1:])]"


def begun_by_another(*folders: Path) -> None:
    """Have a process begin a save there, and end."""
    subprocess.run([sys.executable, "-c", BEGIN, *map(str, folders)], check=True)


def move_to_another_machine(folder: Path, **changes: bool) -> None:
    """Have the marker of a begun save say that its process runs, or ran, where nobody here can see it."""
    mark, found = mark_in(open_folder(folder))
    assert mark is Mark.BEGUN
    assert found.process is not None
    process = found.process._replace(machine="another")
    (folder / BEGUN).write_bytes(msgspec.structs.replace(found, process=process, **changes).encode())


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
    assert not any(LOCK in name for name in synced)  # closing it ends its lock on some file systems


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
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / LOCK).touch()  # which a kill before the marker leaves
    renamed = set_aside(str(tmp_path), NAMES)
    assert [os.path.basename(name) for name in renamed] == ["incomplete-checkpoint-1", "incomplete-checkpoint-2.1"]
    left = sorted(set(os.listdir(tmp_path)) - {*map(os.path.basename, renamed)})
    assert left == [*(f"checkpoint-{n}" for n in (3, 4, 5, 6)), "incomplete-checkpoint-2", "other"]
    assert set_aside(str(tmp_path), NAMES) == []
    assert set_aside(str(tmp_path / "gone"), NAMES) == []


def test_a_save_that_was_killed_on_another_machine_is_set_aside(tmp_path: Path) -> None:
    """Also one of a container that is gone, or before a reboot: of its process nothing is known, but of its lock."""
    folder = tmp_path / "checkpoint-1"
    command = [sys.executable, "-c", f"{BEGIN}; print(flush=True); input()", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdout is not None
        saver.stdout.readline()
        move_to_another_machine(folder)
        assert set_aside(str(tmp_path), NAMES) == []
        saver.communicate("\n")
    assert set_aside(str(tmp_path), NAMES) == [str(tmp_path / "incomplete-checkpoint-1")]


def test_without_a_lock_nothing_is_known_of_a_save_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for number, are_refused in enumerate((True, False)):
        folder = tmp_path / f"checkpoint-{number}"
        with monkeypatch.context() as patch:
            if are_refused:
                patch.setattr(LockFile, "lock", refuses)
            mark_begun(str(folder))
        changes = {} if are_refused else {"locked": False}  # as in markers of older versions
        move_to_another_machine(folder, **changes)
        assert (folder / LOCK).exists() != are_refused
        assert set_aside(str(tmp_path), NAMES) == []
        mark_whole(str(folder))
        assert os.listdir(folder) == [WHOLE]


def test_a_folder_is_locked_as_long_as_its_save_lasts(tmp_path: Path) -> None:
    """Also one whose save has failed, which is begun again; or was deleted before that."""
    folder = tmp_path / "checkpoint-1"

    def is_interrupted() -> bool:
        """Return whether the save has been interrupted, as another machine sees it."""
        move_to_another_machine(folder)
        program = "import sys; from offload.checkpoint import marker; print(marker.is_interrupted(sys.argv[1]))"
        command = [sys.executable, "-c", program, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"

    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        mark_begun(str(folder))
        assert not is_interrupted()
    shutil.rmtree(folder)
    mark_begun(str(folder))
    assert not is_interrupted()
    mark_whole(str(folder))
    assert len(os.listdir("/proc/self/fd")) == open_before
    mark_begun(str(folder))
    unmark(str(folder))
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert os.listdir(folder) == []


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
