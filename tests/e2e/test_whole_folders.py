"""What a mirror has of folders that a loop writes whole, and what it keeps where the run's folder has changed."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import prepared
import pytest
import torch

import offload
from offload import cli
from offload.checkpoint import fetch as fetches
from offload.checkpoint import marker, whole
from offload.checkpoint.contents import is_checkpoint
from offload.checkpoint.folder import open_folder
from offload.checkpoint.marker import WHOLE, Mark, Marker, mark_of
from offload.checkpoint.mirror import Mirror
from offload.optim import folders
from offload.tiers.directories import DirectoryFolder


class Loop:
    """A loop that saves whole folders to `run`, with `path` for its state and `mirror` beside it."""

    def __init__(self, folder: Path, room: str = "") -> None:
        self.run, self.path, self.mirror = (folder / name for name in ("run", "path", "mirror"))
        for place in (self.run, self.path, self.mirror):
            place.mkdir(exist_ok=True, parents=True)
        self.weight = torch.nn.Parameter(torch.ones(64, 64))
        most, _, kept = room.partition(":")
        path = {"path": str(self.path), "max_bytes": int(most)} if most else str(self.path)
        config = offload.OffloadConfig(
            host_memory=0, paths=[path], mirror=str(self.mirror), checkpoints_kept=int(kept) if kept else None
        )
        self.optimizer = offload.AdamW([("weight", self.weight)], offload=config)

    def save(self, name: str, inside: str | None = "optimizer", more: Callable[[Path], object] = bool) -> None:
        """Take a step, and write a folder of a file, of the optimizer's checkpoint, and of what `more` writes."""
        self.weight.grad = torch.ones(64, 64)
        self.optimizer.step()
        folder = self.run / name
        with self.optimizer.checkpoint_folder(folder):
            (folder / "model").write_text(name)
            if inside is not None:
                self.optimizer.save_checkpoint(folder / inside)
            more(folder)

    def fetch(self, name: str) -> Path:
        """Bring a folder from the mirror to a machine that has nothing else; return it."""
        shutil.rmtree(self.path)
        fetched = self.mirror.parent / "fetched"
        assert cli.main(["fetch", str(self.mirror), str(fetched), "--name", name, "--quiet"]) == 0
        return fetched / name

    def again(self) -> Loop:
        """Return another session's, as after a kill."""
        self.__init__(self.run.parent)  # type: ignore[misc]
        return self

    def mirrored(self) -> set[str]:
        self.optimizer.wait_mirror(60)
        return {*os.listdir(self.mirror)}


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    with made.optimizer:
        yield made


def test_a_run_that_is_moved_empties_no_mirror(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.save("step-1")
    assert loop.mirrored() == {"step-1"}
    mirror = type(loop.optimizer.engine.checkpoints._parts.saves.mirror)
    work = mirror.mirror_task

    def late(*arguments: object) -> None:
        loop.run.rename(loop.run.parent / "moved")
        work(*arguments)

    monkeypatch.setattr(mirror, "mirror_task", late)
    loop.save("step-2", None)
    assert loop.mirrored() == {"step-1", "step-2"}


def test_another_runs_folders_are_neither_replaced_nor_deleted(loop: Loop) -> None:
    """As where a bucket is the mirror of every run, and each saves to step-1, step-2 and so on."""
    loop.save("step-1")
    assert loop.mirrored() == {"step-1"}
    loop.optimizer.close()
    shutil.rmtree(loop.run)
    with loop.again().optimizer as optimizer:
        loop.save("step-1")
        with pytest.raises(offload.CheckpointError, match="step-1/optimizer holds a checkpoint of another run, of"):
            optimizer.wait_mirror(60)
        assert mark_of(f"{loop.mirror}/step-1") is Mark.WHOLE
        loop.save("step-2")
        loop.mirrored()
        shutil.rmtree(loop.run / "step-1")
        loop.save("step-3")
        assert loop.mirrored() == {"step-1", "step-2", "step-3"}
        shutil.rmtree(loop.run / "step-2")
        loop.save("step-4")
        assert loop.mirrored() == {"step-1", "step-3", "step-4"}


@pytest.mark.parametrize(("first", "second"), [("optimizer", None), (None, "optimizer"), (None, None)])
def test_another_runs_folders_without_state_are_neither_replaced_nor_deleted(
    loop: Loop, first: str | None, second: str | None
) -> None:
    """As those of a Trainer with `save_only_model`."""
    loop.save("step-1", first)
    assert loop.mirrored() == {"step-1"}
    before = {path: path.stat().st_mtime_ns for path in (loop.mirror / "step-1").rglob("*")}
    loop.optimizer.close()
    with loop.again().optimizer as optimizer:
        loop.run = loop.run.parent / "another"
        loop.save("step-1", second)
        with pytest.raises(offload.CheckpointError, match="step-1 is a folder of another run: give"):
            optimizer.wait_mirror(60)
        loop.save("step-2", second)
        loop.mirrored()
        shutil.rmtree(loop.run / "step-1")
        loop.save("step-3", second)
        assert loop.mirrored() == {"step-1", "step-2", "step-3"}
        shutil.rmtree(loop.run / "step-2")
        loop.save("step-4", second)
        assert loop.mirrored() == {"step-1", "step-3", "step-4"}
    assert {path: path.stat().st_mtime_ns for path in (loop.mirror / "step-1").rglob("*")} == before


def test_a_run_that_begins_anew_without_state_goes_on_with_its_copies(loop: Loop) -> None:
    loop.save("best", None)
    assert loop.mirrored() == {"best"}
    loop.optimizer.close()
    with loop.again().optimizer:
        loop.save("best", None, lambda folder: (folder / "more").write_text("newer"))
        loop.mirrored()
        assert (loop.mirror / "best" / "more").read_text() == "newer"


def test_a_renamed_folder_keeps_its_copy_until_it_is_deleted(loop: Loop) -> None:
    for number in range(1, 4):
        loop.save(f"step-{number}")
        assert loop.mirrored() == {f"step-{before}" for before in range(1, number + 1)}
        if number == 1:
            (loop.run / "step-1").rename(loop.run / "best")
    shutil.rmtree(loop.run / "best")
    loop.save("step-4")
    assert loop.mirrored() == {"step-2", "step-3", "step-4"}


def test_a_run_whose_disk_is_not_mounted_empties_no_mirror(loop: Loop) -> None:
    loop.save("step-1")
    assert loop.mirrored() == {"step-1"}
    loop.run.rename(loop.run.parent / "elsewhere")
    loop.run.mkdir()
    loop.save("step-2")
    assert loop.mirrored() == {"step-1", "step-2"}


@pytest.mark.parametrize("inside", ["", "optimizer", "deep/down/optimizer"])
def test_all_is_copied_wherever_the_checkpoint_is(loop: Loop, inside: str) -> None:
    def more(folder: Path) -> None:
        (folder / inside / "notes").write_text("beside the state")
        (folder / "git").mkdir()
        (folder / "git" / "COMMIT").write_text("not ours")

    loop.save("step-1", inside, more)
    assert loop.mirrored() == {"step-1"}
    loop.optimizer.close()
    folder = loop.fetch("step-1")
    assert (folder / "model").read_text() == "step-1"
    assert (folder / inside / "notes").read_text() == "beside the state"
    assert (folder / "git" / "COMMIT").read_text() == "not ours"
    with offload.AdamW([("weight", torch.nn.Parameter(torch.zeros(64, 64)))], offload={}) as optimizer:
        optimizer.load_checkpoint(folder / inside)
        (parameter,) = optimizer.param_groups[0]["params"]
        assert torch.equal(parameter, loop.weight)


def test_few_open_files_are_enough_and_sockets_are_left_out(loop: Loop) -> None:
    def more(folder: Path) -> None:
        for number in range(150):
            (folder / str(number)).write_text(str(number))
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "socket"))

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, limits[1]))
    try:
        loop.save("step-1", "optimizer", more)
        assert loop.mirrored() == {"step-1"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert {*os.listdir(loop.mirror / "step-1")} >= {str(number) for number in range(150)} | {"model", "optimizer"}
    assert not (loop.mirror / "step-1" / "socket").exists()


def test_what_cannot_be_opened_is_told_by_who_waits(loop: Loop) -> None:
    def more(folder: Path) -> None:
        (folder / "loop").symlink_to("loop")

    loop.save("step-1", "optimizer", more)
    with pytest.raises(offload.CheckpointError, match="step-1 was not mirrored"):
        loop.optimizer.wait_mirror(60)
    loop.save("step-2")
    assert loop.mirrored() == {"step-2"}


def test_a_folder_is_the_one_that_was_named_at_first(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(loop.run)
    with loop.optimizer.checkpoint_folder("step-1"):
        monkeypatch.chdir(loop.path)
    with loop.optimizer.checkpoint_folder(f"file://{loop.run}/step-2"):
        pass
    for name in ("step-1", "step-2"):
        assert mark_of(str(loop.run / name)) is Mark.WHOLE
    assert "step-2" in loop.mirrored()


def test_a_bucket_has_no_whole_folders(loop: Loop) -> None:
    with (
        pytest.raises(offload.ConfigError, match="name a directory"),
        loop.optimizer.checkpoint_folder("s3://bucket/prefix"),
    ):
        pass


@pytest.mark.parametrize("name", ["{loop.mirror}/step-1", "/step-1", "..", "../mirror/step-1"])
def test_a_name_that_leads_elsewhere_is_none(loop: Loop, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    loop.save("step-1")
    assert loop.mirrored() == {"step-1"}
    where = loop.run.parent / "fetched"
    assert cli.main(["fetch", str(loop.mirror), str(where), "--name", name.format(loop=loop)]) == 1
    assert "give the name of a folder there" in capsys.readouterr().err
    assert not where.exists()
    assert cli.main(["fetch", str(loop.mirror), str(where), "--name", "step-1/"]) == 0
    assert mark_of(str(where / "step-1")) is Mark.WHOLE


def test_what_changes_while_it_is_fetched_is_not_whole(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.save("step-1")
    loop.mirrored()
    bring = fetches.fetch_file

    def late(*arguments: Any) -> None:
        bring(*arguments)
        loop.save("step-1")
        loop.mirrored()

    monkeypatch.setattr(fetches, "fetch_file", late)
    with pytest.raises(offload.CheckpointError, match="was changed while it was copied"):
        fetches.fetch(str(loop.mirror), "step-1", str(loop.run.parent / "fetched"))
    assert mark_of(str(loop.run.parent / "fetched" / "step-1")) is Mark.BEGUN


def test_one_process_at_a_time_fetches_to_a_folder(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.save("step-1")
    loop.mirrored()
    where, bring = str(loop.run.parent / "fetched"), fetches.fetch_file

    def twice(*arguments: Any) -> None:
        with pytest.raises(offload.CheckpointError, match="another process brings something"):
            fetches.fetch(str(loop.mirror), "step-1", where)
        bring(*arguments)

    monkeypatch.setattr(fetches, "fetch_file", twice)
    fetches.fetch(str(loop.mirror), "step-1", where)
    assert mark_of(f"{where}/step-1") is Mark.WHOLE


def test_a_disk_that_fetch_fills_is_told_as_such(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    loop.save("step-1")
    loop.mirrored()
    monkeypatch.setattr(fetches.os, "posix_fallocate", full)
    with pytest.raises(offload.CheckpointError, match="model: No space left on device"):
        fetches.fetch(str(loop.mirror), "step-1", str(loop.run.parent / "fetched"))


def test_what_cannot_be_listed_is_no_part_that_may_be_missing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refused(path: Any) -> Any:
        if os.path.basename(path) == "secret":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    loop.save("step-1", "optimizer", lambda folder: (folder / "secret").mkdir())
    with pytest.raises(offload.CheckpointError, match="secret"):
        loop.optimizer.wait_mirror(60)


def test_whoever_loads_it_goes_on_with_its_mirror(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a folder of several, and of what lies beside it."""
    (loop.run / "all.ckpt").write_text("beside")
    monkeypatch.setattr(Mirror, "mirror_task", lambda self, task: None)  # as if it was killed
    folder = loop.run / "step-1" / "actor"
    folders.begin_folder(str(folder), Marker(depth=2, beside=("all.ckpt",)))
    loop.optimizer.save_checkpoint(folder / "optimizer")
    loop.optimizer.wait_checkpoint()
    (folder / "model").write_text("model")
    folders.end_folder(loop.optimizer, str(folder))
    loop.optimizer.wait_mirror(60)
    loop.optimizer.close()
    monkeypatch.undo()
    assert os.listdir(loop.mirror) == []
    again = loop.again()
    again.optimizer.load_checkpoint(folder / "optimizer")
    assert again.mirrored() == {"step-1"}
    fetched = again.fetch("step-1/actor")
    assert (fetched / "model").read_text() == "model"
    assert (fetched.parent.parent / "all.ckpt").read_text() == "beside"
    found = open_folder(fetched).read(WHOLE)
    assert found is not None
    assert msgspec.json.decode(found, type=Marker).beside == ("all.ckpt",)


def test_the_one_before_stays_until_a_new_one_is_whole(loop: Loop) -> None:
    """With room for one checkpoint, too, whose turn comes when the new folder is marked."""

    def cut(folder: Path) -> None:
        loop.optimizer.wait_checkpoint()
        raise RuntimeError(f"{folder} is cut short")

    loop.save("step-1")
    with pytest.raises(RuntimeError, match="cut short"):
        loop.save("step-2", more=cut)
    assert is_checkpoint(loop.run / "step-1" / "optimizer")
    loop.save("step-3")
    assert loop.optimizer.engine.checkpoints.kept == (str(loop.run / "step-3" / "optimizer"),)
    loop.save("step-4", more=lambda _: is_checkpoint(loop.run / "step-3" / "optimizer") or pytest.fail("released"))
    loop.optimizer.wait_mirror(60)
    loop.save("step-5")
    assert not is_checkpoint(loop.run / "step-3" / "optimizer")


def test_what_failed_gives_its_room_to_the_next(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    write = DirectoryFolder.write

    def full(self: Any, name: str, *rest: Any, **options: Any) -> None:
        if name == "model" and "step-1" in self.path:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, *rest, **options)

    monkeypatch.setattr(DirectoryFolder, "write", full)
    loop.save("step-1")
    with pytest.raises(offload.CheckpointError, match="No space"):
        loop.optimizer.wait_mirror(60)
    assert {*os.listdir(loop.mirror)} == {"step-1"}
    loop.save("step-2")
    assert loop.mirrored() == {"step-2"}


def test_a_folder_within_itself_is_refused_by_name(loop: Loop) -> None:
    with (
        pytest.raises(offload.CheckpointError, match="mark as whole"),
        loop.optimizer.checkpoint_folder(loop.run / "step-1"),
        loop.optimizer.checkpoint_folder(loop.run / "step-1"),
    ):
        pass


def test_what_ranks_of_a_mirror_tell_each_other_is_not_fetched(loop: Loop) -> None:
    """A kill between two ranks' ends leaves such files; taken for the framework's they would be mirrored again."""
    loop.save("step-1")
    loop.mirrored()
    for name in (f"mirror-{'0' * 32}-1.json", f"failed-{'0' * 32}-1"):
        (loop.mirror / "step-1" / "optimizer" / name).write_text("{}")
    fetched = loop.fetch("step-1")
    assert not [*fetched.rglob("mirror-*"), *fetched.rglob("failed-*")]
    assert (fetched / "optimizer" / "COMMIT").exists()


# What interrupts one


def test_one_that_is_cut_while_it_is_written_leaves_the_one_before(loop: Loop) -> None:
    """The commit may come after the context has ended."""

    def cut(folder: Path) -> None:
        raise KeyboardInterrupt

    loop.save("step-1")
    with pytest.raises(KeyboardInterrupt):
        loop.save("step-2", more=cut)
    loop.optimizer.wait_checkpoint()
    assert is_checkpoint(loop.run / "step-1" / "optimizer")


def test_interrupted_ones_give_their_room_to_the_next(tmp_path: Path) -> None:
    """With no more room than the plan asks for, after an exception, and after a kill."""
    program = (
        "import os, sys; sys.path[:0] = sys.argv[1].split(os.pathsep);"
        "from pathlib import Path; from test_whole_folders import Loop;"
        "loop = Loop(Path(sys.argv[2]), sys.argv[3]); loop.save('step-1'); wait = loop.optimizer.wait_checkpoint;"
        "loop.save('step-2', more=lambda folder: (wait(), os._exit(9)))"
    )
    places = os.pathsep.join(str(parent) for parent in Path(__file__).parents[:2])
    for kept in (1, 2):
        folder, room = tmp_path / str(kept), f"4096:{kept}"
        for _ in range(5):
            try:
                Loop(folder, room).optimizer.close()
            except offload.InfeasiblePlanError as error:
                room = f"{re.findall(r'needs .*?([0-9]+) bytes', str(error))[0]}:{kept}"
        given = [prepared.python(), "-c", program, places, str(folder), room]
        assert subprocess.run(given, check=False).returncode == 9
        loop = Loop(folder, room)
        with loop.optimizer as optimizer:
            optimizer.load_checkpoint(loop.run / "step-1" / "optimizer")
            for number in range(3, 9):
                if number % 3 == 0:
                    with pytest.raises(ZeroDivisionError):
                        loop.save(f"step-{number}", more=lambda folder: 1 / 0)
                else:
                    loop.save(f"step-{number}")
            assert optimizer.engine.checkpoints.kept[-1] == str(loop.run / "step-8" / "optimizer")


def test_a_folder_without_a_checkpoint_displaces_none(loop: Loop) -> None:
    loop.save("step-1")
    loop.save("export", inside=None)
    assert is_checkpoint(loop.run / "step-1" / "optimizer")


# What a load may do to the mirror: go on with a copy, and nothing else


def test_one_that_was_moved_keeps_its_state(loop: Loop) -> None:
    """It may still be wanted; a save in its old place has nothing of it."""
    loop.save("step-1")
    loop.mirrored()
    expected = loop.weight.detach().clone()
    (loop.run / "step-1").rename(loop.run / "best")
    for name in ("step-2", "step-3"):
        loop.save(name)
        loop.mirrored()
    assert not is_checkpoint(loop.run / "step-2" / "optimizer")
    loop.optimizer.close()
    with offload.AdamW([("weight", torch.nn.Parameter(torch.zeros(64, 64)))], offload={}) as optimizer:
        optimizer.load_checkpoint(loop.run / "best" / "optimizer")
        (parameter,) = optimizer.param_groups[0]["params"]
        assert torch.equal(parameter, expected)


def test_a_load_deletes_nothing_and_displaces_nothing(loop: Loop) -> None:
    loop.save("step-1")
    loop.mirrored()
    scratch = loop.run.parent / "scratch"
    for name in ("copy-1", "copy-2"):
        shutil.copytree(loop.run / "step-1", scratch / name)
        loop.optimizer.load_checkpoint(scratch / name / "optimizer")
        loop.mirrored()
        shutil.rmtree(scratch / name)
    shutil.copytree(loop.mirror / "step-1", scratch / "step-1", copy_function=shutil.copyfile)  # later times
    loop.optimizer.load_checkpoint(scratch / "step-1" / "optimizer")
    assert loop.mirrored() >= {"step-1", "copy-1"}
    assert mark_of(str(loop.mirror / "step-1")) is Mark.WHOLE
    assert fetches.find_whole(str(loop.mirror))[-1] in ("step-1", "copy-1")


def test_a_load_waits_for_nothing_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was saved last is what `fetch` brings, whenever it came to the mirror."""
    loop = Loop(tmp_path, ":3")
    for name in ("step-1", "step-2"):
        loop.save(name)
    assert sorted(loop.mirrored()) == ["step-1", "step-2"]
    shutil.rmtree(loop.mirror / "step-2")
    goes_on, mirror = threading.Event(), Mirror.mirror_task
    monkeypatch.setattr(Mirror, "mirror_task", lambda self, task: (goes_on.wait(60), mirror(self, task))[1])
    loop.save("step-3")
    loop.optimizer.load_checkpoint(loop.run / "step-2" / "optimizer")
    goes_on.set()
    assert "step-3" in loop.mirrored()
    loop.optimizer.load_checkpoint(loop.run / "step-2" / "optimizer")
    assert "step-2" in loop.mirrored()
    loop.optimizer.close()
    assert fetches.find_whole(str(loop.mirror))[-1] == "step-3"


def test_a_clock_that_was_set_back_does_not_make_a_newer_folder_the_older(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.save("step-2")
    loop.mirrored()
    loop.optimizer.close()
    monkeypatch.setattr(marker, "newest_s", [0.0])  # as in another process
    monkeypatch.setattr(marker.time, "time", lambda: 1e9)
    loop.again().optimizer.load_checkpoint(loop.run / "step-2" / "optimizer")
    loop.save("step-1")
    loop.mirrored()
    assert fetches.find_whole(str(loop.mirror)) == ["step-2", "step-1"]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b'{"depth": 0}', b'{"depth": 9000000000000000000}', b'{"beside": ["../path"]}'),
        *(b'{"beside": ["a\\u0000"]}', b'{"beside": ["\xff"]}', b'{"shared": ["/etc/hostname"]}'),
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["empty", "depth 0", "too deep", "outside", "null", "no text", "absolute", "nested"],
)
def test_a_damaged_marker_costs_a_copy(loop: Loop, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    loop.save("step-1")
    loop.mirrored()
    shutil.rmtree(loop.mirror / "step-1")
    (loop.run / "step-1" / WHOLE).write_bytes(content)
    loop.optimizer.load_checkpoint(loop.run / "step-1" / "optimizer")
    assert loop.mirrored() == set()
    assert "its marker is damaged" in caplog.text
    loop.save("step-2")
    assert "step-2" in loop.mirrored()
    shutil.copytree(loop.run / "step-1", loop.mirror / "step-0")
    assert fetches.find_whole(str(loop.mirror)) == ["step-2"]


# What is no whole copy


def test_files_that_are_not_open_are_those_of_the_save(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "MOST_OPEN", 1)
    goes_on, mirror = threading.Event(), Mirror.mirror_task
    monkeypatch.setattr(Mirror, "mirror_task", lambda self, task: (goes_on.wait(60), mirror(self, task))[1])
    loop.save("last", more=lambda folder: (folder / "z").write_text("first"))
    (loop.run / "last" / "z").write_text("other")
    goes_on.set()
    with pytest.raises(offload.CheckpointError, match="changed before"):
        loop.mirrored()


def test_a_marker_within_is_not_taken_for_one_of_the_mirrors(loop: Loop) -> None:
    loop.save("step-1/inner", inside=None)
    loop.save("step-1")
    loop.mirrored()
    assert fetches.find_whole(str(loop.mirror))[-1] == "step-1"
    assert mark_of(str(loop.mirror / "step-1" / "inner")) is Mark.NONE


def test_what_lies_beside_belongs_to_it(loop: Loop) -> None:
    folder = str(loop.run / "step-1")
    folders.begin_folder(folder, Marker(beside=("gone.ckpt",)))
    folders.end_folder(loop.optimizer, folder)
    with pytest.raises(offload.CheckpointError, match=r"gone\.ckpt"):
        loop.mirrored()


def test_a_save_into_a_whole_folder_is_told(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    loop.save("step-1", inside=None)
    loop.optimizer.save_checkpoint(loop.run / "step-1" / "optimizer")
    loop.optimizer.wait_checkpoint()
    assert "is not mirrored, as" in caplog.text
