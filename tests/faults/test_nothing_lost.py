"""What may be freed: a checkpoint is lost by nothing but a release that names it, whatever its folder is called."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from at_line import AtLine

import offload
from offload import cli, waits
from offload._native import CompletionQueue
from offload.checkpoint import commit, reader, saves, stores
from offload.checkpoint.contents import is_checkpoint, read_commit
from offload.checkpoint.folder import FolderLock, open_folder
from offload.checkpoint.manifest import COMMIT_NAME, manifest_name, seal
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.stores import delete_free, delete_unused, find_stores, read_pins, write_pins
from offload.tiers import FileTier
from offload.tiers import store as store_module
from offload.tiers.directories import DirectoryFolder
from offload.tiers.filesystem import (
    PINS_NAME,
    LockFile,
    hold_lock,
    open_regular,
    read_regular,
    release_lock,
    replacing,
)

HISTORIES = Path(__file__).parent / "histories.py"


class Run:
    """A session whose state all lies on paths."""

    def __init__(
        self, *paths: Path, keep: int | None = None, host_memory: int = 0, max_bytes: int | None = None
    ) -> None:
        start = torch.randn(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        self.weight = torch.nn.Parameter(start.bfloat16())
        self.optimizer = offload.AdamW(
            [("w", self.weight)],
            offload=offload.OffloadConfig(
                host_memory=host_memory,
                paths=[{"path": str(path), "share": 1, "depth": 2, "max_bytes": max_bytes} for path in paths],
                subgroup_numel=1024,
                checkpoints_kept=keep,
            ),
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.optimizer.close()

    def train(self, steps: int = 1) -> Run:
        for _ in range(steps):
            self.weight.grad = torch.full((3000,), 0.5, dtype=torch.bfloat16)
            self.optimizer.step()
        return self

    def save(self, folder: Path, *, copy: bool = False) -> None:
        self.optimizer.save_checkpoint(folder, copy=copy, extra={"step": self.optimizer.engine.step_count(0)})
        self.optimizer.wait_checkpoint()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "nvme").mkdir()
    return tmp_path / "nvme"


def steps_in(folder: Path, *paths: Path) -> int:
    """Return the number of steps that a checkpoint holds, having gone on from it."""
    with Run(*paths) as run:
        extra = run.optimizer.load_checkpoint(folder)
        run.train()
        assert run.optimizer.engine.step_count(0) == extra["step"] + 1
        return int(extra["step"])


def write(path: Path, steps: int, folder: Path, *, copy: bool = False) -> None:
    with Run(path) as run:
        run.train(steps).save(folder, copy=copy)


def test_a_pin_that_a_failed_checkpoint_has_left_keeps_no_store(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = DirectoryFolder.write

    def write(folder: DirectoryFolder, name: str, content: Any, **options: Any) -> None:
        if name == COMMIT_NAME or (name == PINS_NAME and read_pins(folder)):  # no commit, and no unpinning
            raise offload.CheckpointError("no luck")
        plain(folder, name, content, **options)

    with Run(path) as run:
        run.train()
        with monkeypatch.context() as patched:
            patched.setattr(DirectoryFolder, "write", write)
            with pytest.raises(offload.CheckpointError, match="no luck"):
                run.save(tmp_path / "folder")
        (store,) = find_stores(str(path))
        assert len(read_pins(store.folder)) == 1
        assert (store.pins, store.missing) == ((), ())


# Folders that somebody deletes, and says so -------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_checkpoint_that_was_released_before_its_folder_was_deleted(tmp_path: Path, path: Path, depth: int) -> None:
    """By whoever it was, its slots are free in the session that goes on, and no pin keeps a store."""
    run = tmp_path / "run"
    folders = [run.joinpath(*("one", "optimizer")[:depth]), run / "two"]
    with Run(path, keep=3) as first:
        for folder in folders:
            first.train().save(folder)
    assert offload.release_before_deletion(folders[0], run)
    shutil.rmtree(run / "one")
    (store,) = find_stores(str(path))
    assert not store.missing
    with Run(path, keep=3) as second:
        second.optimizer.load_checkpoint(folders[1])
        (store,) = find_stores(str(path))  # it goes on in the one that is there
        assert [pin.folder for pin in read_pins(store.folder)] == [str(folders[1])]
        second.train().save(run / "three")
        assert offload.release_before_deletion(folders[1], run)
        shutil.rmtree(folders[1])
        second.optimizer.engine.checkpoints.release_deleted()
        assert second.optimizer.engine.checkpoints.kept == (str(run / "three"),)
    assert steps_in(run / "three", path) == 3


@pytest.mark.parametrize("way", ["linked", "link in it", "copied", "moved", "elsewhere"])
def test_what_goes_with_a_folder_without_its_state_is_not_released(tmp_path: Path, path: Path, way: str) -> None:
    """Deleting a link, or a copy of names, deletes no checkpoint; nor is one gone that was moved before."""
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    folder, noted_in = run / "one" / "optimizer", run
    write(path, 2, folder)
    if way == "linked":
        (run / "one").rename(kept)
        (run / "one").symlink_to(kept)
    elif way == "link in it":
        folder.rename(kept)
        folder.symlink_to(kept)
    elif way == "copied":
        shutil.copytree(run / "one", kept)
        folder, kept = kept / "optimizer", run / "one"
        noted_in = tmp_path
    elif way == "moved":
        (run / "one").rename(kept)
    else:
        kept, noted_in = run / "one", path
    assert not offload.release_before_deletion(folder, noted_in)
    with Run(path) as run_on:
        run_on.optimizer.load_checkpoint(kept if way == "link in it" else kept / "optimizer")
        assert run_on.optimizer.engine.step_count(0) == 2


def test_a_checkpoint_that_was_moved_is_not_released_with_those_that_were_deleted(tmp_path: Path, path: Path) -> None:
    run = tmp_path / "run"
    with Run(path, keep=3) as first:
        first.train().save(run / "one")
        first.train().save(run / "two")
        assert offload.release_before_deletion(run / "two", run)
        (run / "one").rename(tmp_path / "kept")
        first.optimizer.engine.checkpoints.release_deleted()
        assert first.optimizer.engine.checkpoints.kept == (str(run / "one"),)
        first.train(3)
    assert steps_in(tmp_path / "kept", path) == 1


# What killed sessions have left ----------------------------------------------------------------------------------


def killed(path: Path, folder: Path | None = None) -> None:
    """Have a session write to a path, and to a checkpoint if a folder is given, and end without closing."""
    pid = os.fork()
    if pid == 0:
        run = Run(path).train(2)
        if folder is not None:
            run.save(folder)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_session_deletes_as_it_opens_what_ended_ones_have_left(tmp_path: Path, path: Path) -> None:
    """Before it looks for room, and no store that is used, has no lock, or may be needed by a checkpoint."""
    with Run(path) as live:
        live.train(2)
        killed(path, tmp_path / "ck")
        killed(path, tmp_path / "moved")
        (tmp_path / "moved").rename(tmp_path / "kept")
        without_lock = path / f"offload-{uuid.uuid4()}"
        without_lock.mkdir()
        (without_lock / "tiles").touch()
        stays = {store.path for store in find_stores(str(path))}
        killed(path)
        assert len(find_stores(str(path))) == len(stays) + 1
        with Run(path) as run:
            found = {store.path for store in find_stores(str(path))}
            assert len(found - stays) == 1, "only its own"
            assert stays <= found
            run.train()
        live.train(2)
    assert steps_in(tmp_path / "kept", path) == 2
    assert steps_in(tmp_path / "ck", path) == 2


LINES = (str(store_module.__file__), hold_lock.__code__, replacing.__wrapped__.__code__)  # type: ignore[attr-defined]


def come_and_go(path: Path) -> None:
    FileTier(path, uuid.uuid4(), CompletionQueue()).close()


def die_at_every_line(path: Path) -> None:
    """Have a store's session killed at each line that makes or deletes it; whatever it leaves has to go."""
    seen = set[tuple[str, ...]]()
    for nth in itertools.count():
        pid = os.fork()
        if pid == 0:
            try:
                AtLine(nth, LINES, lambda: os._exit(0))(lambda: come_and_go(path))
            finally:
                os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1:
            break
        seen |= {tuple(sorted(os.listdir(found.path))) for found in find_stores(str(path))}
        delete_free([str(path)])
        assert not find_stores(str(path)), f"killed at line {nth}"
    assert {(), ("lock",), (".tmp-store.json", "lock"), ("lock", "store.json", "tiles")} <= seen


@pytest.mark.slow
def test_a_store_whose_session_was_killed_at_any_line_that_makes_or_deletes_it_goes(path: Path) -> None:
    """From a small process, as it is forked hundreds of times."""
    program = "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]; import test_nothing_lost as test"
    folders = [os.path.dirname(__file__), str(Path(__file__).parents[1])]
    prepared.ran([prepared.python(), "-c", f"{program}; test.die_at_every_line(Path(sys.argv[1]))", path, *folders])


@contextlib.contextmanager
def deleting_leftovers(path: Path) -> Iterator[Callable[[str], bool]]:
    """Yield what has another process delete leftovers: "all", or "lock" one and then "delete" it."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        with contextlib.suppress(BaseException):
            while what := theirs.recv(100).decode():
                before = os.listdir(path)
                if what == "all":
                    delete_free([str(path)])
                else:
                    (found,) = find_stores(str(path))
                    if what == "lock":
                        lock = found.folder.acquire_lock()
                    else:
                        assert delete_unused(found.folder)
                        release_lock(lock)
                theirs.send(b"changed" if os.listdir(path) != before else b"same")
        os._exit(0)
    theirs.close()

    def ask(what: str) -> bool:
        ours.send(what.encode())
        answer = ours.recv(100)
        assert answer
        return answer == b"changed"

    try:
        yield ask
    finally:
        ours.close()
        os.waitpid(pid, 0)


def test_a_store_that_is_taken_for_a_leftover_at_any_line_that_makes_or_deletes_it(path: Path) -> None:
    """Its session makes it again."""
    changed = 0
    with deleting_leftovers(path) as ask:

        def delete() -> None:
            nonlocal changed
            changed += ask("all")

        for nth in itertools.count():
            at_line = AtLine(nth, LINES, delete)
            at_line(lambda: come_and_go(path))
            assert not os.listdir(path), at_line.where
            if not at_line.has_fired:
                break
    assert changed > 2


def test_a_new_lock_that_whoever_deletes_leftovers_has_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = LockFile.lock, iter(("lock", "delete"))

    def lock(*args: Any) -> None:
        if step := next(steps, None):
            assert ask(step) == (step == "delete")
        real(*args)

    with deleting_leftovers(path) as ask:
        monkeypatch.setattr(LockFile, "lock", lock)
        come_and_go(path)
    assert not os.listdir(path)
    assert next(steps, None) is None


@pytest.mark.parametrize("name", ["pins.json", "manifest-", "COMMIT"])
def test_a_save_that_was_killed_before_its_commit_keeps_no_store(tmp_path: Path, path: Path, name: str) -> None:
    """The checkpoint before it is whole, and is gone on from in the store where it lies."""
    folder, plain = tmp_path / "ck", os.replace

    def replacing(source: Any, target: Any) -> None:
        is_last = os.path.basename(target).startswith(name)
        if not is_last or name == "pins.json":
            plain(source, target)
        if is_last:
            os._exit(0)

    pid = os.fork()
    if pid == 0:
        try:
            with Run(path) as run:
                run.train(1).save(folder)
                os.replace = replacing
                run.train(1).save(tmp_path / "next")
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    (store,) = find_stores(str(path))
    assert [pin.folder for pin in store.pins] == [str(folder)]
    assert not store.missing
    # In the place of its folder a copy, made meanwhile, tells nothing of a checkpoint that may have moved.
    shutil.copytree(tmp_path / "next", tmp_path / "copy")
    (tmp_path / "next").rename(tmp_path / "moved")
    (tmp_path / "copy").rename(tmp_path / "next")
    (store,) = find_stores(str(path))
    assert len(store.missing) == 1
    shutil.rmtree(tmp_path / "next")
    (tmp_path / "moved").rename(tmp_path / "next")
    with Run(path, keep=1) as run:
        run.optimizer.load_checkpoint(folder)
        (own,) = find_stores(str(path))
        assert own.path == store.path
        run.train().save(tmp_path / "next")
    assert steps_in(tmp_path / "next", path) == 2


def test_a_plan_without_room_says_who_may_tell_what_ended_sessions_hold(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(path, tmp_path / "ck")
    for keep, free, more in (
        (None, 64 << 10, "stores of ended sessions take room"),
        (8, 1 << 20, "stores of a checkpoint to resume from: "),
    ):
        monkeypatch.setattr("offload.session.setup.free_bytes", lambda _, free=free: [free])
        with pytest.raises(offload.InfeasiblePlanError, match=f"{more}.*`offload gc --dry-run PATH`"):
            offload.AdamW(
                [("w", torch.nn.Parameter(torch.zeros(30000)))],
                offload={"host_memory": 0, "paths": [path], "checkpoints_kept": keep},
            )
    monkeypatch.undo()
    assert steps_in(tmp_path / "ck", path) == 2


def test_stores_that_checkpoints_of_other_runs_keep_are_no_room(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which checkpoint a session goes on from is known at its first step; room counts what that one has, no other."""
    for name in ("one", "other"):
        write(path, 1, tmp_path / name)
    with Run(path) as run:
        needed = run.optimizer.engine.plan.needed_with_checkpoints
    too_little = pytest.raises(offload.InfeasiblePlanError, match="1 checkpoint kept and one being written")
    with too_little:
        Run(path, keep=1, max_bytes=needed - 1)
    free = [needed - 1]
    monkeypatch.setattr("offload.session.setup.free_bytes", lambda _: free)
    with Run(path, keep=1) as run:
        for _ in range(2):
            with too_little:
                run.train()
    with Run(path) as run:
        assert run.optimizer.engine.plan.has_room_for_checkpoints
        run.train()  # warns
        assert not run.optimizer.engine.plan.has_room_for_checkpoints
    with Run(path, keep=1) as run:
        run.optimizer.load_checkpoint(tmp_path / "one")
        for name in ("one", "next"):
            run.train().save(tmp_path / name)


# A folder's name that means something else by now ------------------------------------------------------------------


def test_a_folder_that_was_renamed_while_its_session_goes_on(
    tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(path) as run:
        run.train(1).save(tmp_path / "ck")
        os.rename(tmp_path / "ck", tmp_path / "best")
        for _ in range(3):
            run.train(1).save(tmp_path / "ck")
        assert [r.message for r in caplog.records if "is not in" in r.message], "nobody was told"
        assert len([r for r in caplog.records if "is not in" in r.message]) == 1, "told more than once"
        run.train(3)
    assert steps_in(tmp_path / "best", path) == 1
    assert steps_in(tmp_path / "ck", path) == 4


def save_and_move(tmp_path: Path) -> tuple[Path, Path]:
    """Save two steps on two paths to `ck` beside these, and move all three to `moved`; return the paths there."""
    paths = tmp_path / "disk/a", tmp_path / "disk/b"
    for path in paths:
        path.mkdir(parents=True)
    with Run(*paths) as run:
        run.train(2).save(tmp_path / "disk/ck")
    os.rename(tmp_path / "disk", tmp_path / "moved")
    return tmp_path / "moved/a", tmp_path / "moved/b"


def test_a_path_and_its_checkpoint_that_were_moved_together(tmp_path: Path) -> None:
    first, second = save_and_move(tmp_path)
    moved = second, first  # in any order
    assert steps_in(tmp_path / "moved/ck", *moved) == 2
    for place in moved:  # its session has taken the stores over, and noted where the checkpoint is now
        (store,) = find_stores(str(place))
        assert [pin.folder for pin in store.pins] == [str(tmp_path / "moved/ck")]
        assert not store.missing


def test_a_pin_that_cannot_be_written_keeps_no_other_from_being_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = save_and_move(tmp_path)

    def note_move(id: str, folder: str, path: str, store: uuid.UUID) -> None:
        if path == str(first):
            raise offload.CheckpointError("its pins cannot be written")
        stores.note_move(id, folder, path, store)

    monkeypatch.setattr(saves, "note_move", note_move)
    with Run(first, second) as run:
        run.optimizer.load_checkpoint(tmp_path / "moved/ck")
        missing = [bool(store.missing) for path in (first, second) for store in find_stores(str(path))]
        assert missing == [True, False]  # whether a pin names the folder where the checkpoint was before


def test_a_release_that_was_cut_short_is_finished_by_the_next_commit(tmp_path: Path, path: Path) -> None:
    for folder in ("same", "other"):
        with Run(path) as run:
            run.train().save(tmp_path / "same")
            (store,) = [store for store in find_stores(str(path)) if store.used_by]
            pins = read_pins(open_folder(store.path))
        with Run(path) as run:
            run.optimizer.load_checkpoint(tmp_path / "same")
            run.train().save(tmp_path / folder)
        # As if its session had been killed before it took its pin back.
        write_pins(open_folder(store.path), [*read_pins(open_folder(store.path)), *pins])
        (found,) = [found for found in find_stores(str(path)) if found.path == store.path]
        assert not found.missing, "what was released by name is not missing"
        assert len(found.pins) == 1
        assert steps_in(tmp_path / folder, path) == 2


# Self-contained checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "of a version that did not pin copies"])
@pytest.mark.parametrize("where", ["archive", "nvme", "nvme/rank-0"])
def test_the_state_of_a_copy_is_never_a_leftover(
    tmp_path: Path, path: Path, where: str, pinned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / where
    write(path, 1, folder, copy=True)
    (store,) = (Path(store.path) for store in find_stores(str(folder)))
    if not pinned:
        (store / "pins.json").unlink()
    assert cli.main(["gc", str(folder)]) == 0
    assert "kept: needed by" in capsys.readouterr().out
    write(path, 2, tmp_path / "another")
    assert steps_in(folder, path) == 1
    shutil.copytree(folder, tmp_path / "moved")
    shutil.rmtree(folder) if where == "archive" else None
    assert cli.main(["gc", str(tmp_path / "moved")]) == 0
    assert steps_in(tmp_path / "moved", path) == 1


@pytest.mark.parametrize("inodes", ["other inodes", "equal inodes"])
@pytest.mark.parametrize("places", ["backup", "nvme backup", "nvme", "other"])
def test_a_backup_of_stores_and_checkpoint_outlives_the_release_of_the_original(
    tmp_path: Path, path: Path, places: str, inodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody names the backup's stores: they lie beside its checkpoint as the original's did.

    On another file system a copy may have the original's inodes.
    """
    if inodes == "equal inodes":
        monkeypatch.setattr(DirectoryFolder, "identity", lambda _: "13")
    (tmp_path / "other").mkdir()
    backup = tmp_path / "backup"
    write(path, 1, path / "run")
    shutil.copytree(path, backup)
    with Run(path) as run:
        run.optimizer.load_checkpoint(path / "run")
        run.train(2).save(path / "run")
        run.train(5)
    assert cli.main(["gc", str(backup)]) == 0
    (store,) = find_stores(str(backup))
    assert [pin.folder for pin in store.missing] == [str(path / "run")]
    assert steps_in(backup / "run", *(tmp_path / name for name in places.split())) == 1
    assert steps_in(backup / "run", backup) == 1
    assert [pin.folder for pin in find_stores(str(backup))[0].pins] == [str(backup / "run")]  # it is no copy any more
    assert steps_in(path / "run", path) == 3
    assert offload.release_before_deletion(backup / "run", backup)
    assert cli.main(["gc", str(backup)]) == 0
    assert not find_stores(str(backup))


def test_a_copy_on_another_volume_of_that_name_frees_nothing_of_the_original(tmp_path: Path, path: Path) -> None:
    """As containers have volumes, with one path for both; here renames mount them."""
    folder, original = tmp_path / "run", tmp_path / "original"
    write(path, 1, folder)
    folder.rename(original)
    shutil.copytree(original, folder)
    with Run(path) as run:
        run.optimizer.load_checkpoint(folder)
        for _ in range(2):
            run.train().save(folder)
    folder.rename(tmp_path / "copy")
    shutil.copytree(original, folder)
    assert not offload.release_before_deletion(folder, tmp_path)
    shutil.rmtree(folder)
    original.rename(folder)
    with Run(path) as run:
        run.optimizer.load_checkpoint(folder)
        assert run.optimizer.engine.step_count(0) == 1
        run.train().save(folder)
    assert steps_in(folder, path) == 2
    (tmp_path / "copy").rename(tmp_path / "moved")
    assert steps_in(tmp_path / "moved", path) == 3


def test_a_path_and_its_checkpoint_that_came_back_from_a_backup_are_gone_on_with_and_freed(
    tmp_path: Path, path: Path
) -> None:
    write(path, 1, path / "run")
    shutil.copytree(path, tmp_path / "backup")
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    with Run(path) as run:
        run.optimizer.load_checkpoint(path / "run")
        run.train().save(path / "run")
    assert len(find_stores(str(path))) == 1
    assert steps_in(path / "run", path) == 2


def test_a_backup_by_hard_links_does_not_change_with_the_original(tmp_path: Path, path: Path) -> None:
    backup = tmp_path / "backup"
    write(path, 1, path / "run")
    shutil.copytree(path, backup, copy_function=os.link)
    with Run(path) as run:
        run.optimizer.load_checkpoint(path / "run")
        for _ in range(3):
            run.train().save(path / "run")
    assert steps_in(path / "run", path) == 4
    shutil.rmtree(path)
    assert steps_in(backup / "run", backup) == 1
    (store,) = find_stores(str(backup))
    os.truncate(Path(store.path) / "tiles", 4096)
    with Run(backup) as run, pytest.raises(offload.CheckpointError, match="a store of this name elsewhere has other"):
        run.optimizer.load_checkpoint(backup / "run")


def test_a_run_goes_on_with_its_own_stores_though_a_backup_of_them_is_nearer(tmp_path: Path, path: Path) -> None:
    home = tmp_path / "home"
    write(path, 1, home / "run" / "ck")
    shutil.copytree(path, home / path.name)
    shutil.copytree(home / "run", home / "run.bak")
    with Run(path, home / path.name) as run:
        run.optimizer.load_checkpoint(home / "run" / "ck")
        for _ in range(2):
            run.train().save(home / "run" / "ck")
    assert steps_in(home / "run.bak" / "ck", home / path.name) == 1
    assert steps_in(home / "run" / "ck", path, home / path.name) == 3


@pytest.mark.parametrize("way", ["renamed", "to another disk"])
def test_a_store_that_was_moved_is_gone_on_with_and_freed(tmp_path: Path, path: Path, way: str) -> None:
    write(path, 1, tmp_path / "run")
    if way == "renamed":
        path.rename(tmp_path / "moved")
    else:
        shutil.copytree(path, tmp_path / "moved")
        shutil.rmtree(path)
    assert steps_in(tmp_path / "run", tmp_path / "moved") == 1
    write(tmp_path / "moved", 2, tmp_path / "run")
    assert len(find_stores(str(tmp_path / "moved"))) == 1
    assert steps_in(tmp_path / "run", tmp_path / "moved") == 2


def test_a_copy_that_was_replaced_goes(tmp_path: Path, path: Path) -> None:
    with Run(path) as run:
        for number in range(4):
            run.train().save(tmp_path / "ck", copy=number % 2 == 0)
            assert len(find_stores(str(tmp_path / "ck"))) == (number % 2 == 0)
    assert steps_in(tmp_path / "ck", path) == 4


# What a person says ------------------------------------------------------------------------------------------------


def test_what_is_missing_is_reported_and_goes_only_when_told_to(
    tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, 1, tmp_path / "ck")
    shutil.rmtree(tmp_path / "ck")
    write(path, 1, tmp_path / "ck")  # the next commit tidies up, and leaves it
    capsys.readouterr()
    assert cli.main(["gc", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"missing: its checkpoint in {tmp_path / 'ck'} was deleted, or moved and not opened since" in out
    assert "KiB" in out
    assert len(find_stores(str(path))) == 2
    assert cli.main(["gc", "--really", str(path)]) == 0
    assert len(find_stores(str(path))) == 1
    assert steps_in(tmp_path / "ck", path) == 1


def test_a_deleted_checkpoint_gives_its_room_back_when_it_is_released(tmp_path: Path, path: Path) -> None:
    with Run(path, keep=3) as run:
        sizes = []
        for number in range(8):
            run.train(2).save(tmp_path / f"ck-{number}")
            shutil.rmtree(tmp_path / f"ck-{number}")
            run.optimizer.release_checkpoint(tmp_path / f"ck-{number}")
            sizes.append(len(run.optimizer.engine._parts.machine.saver.held_records))
        assert sizes == [0] * 8
        run.train().save(tmp_path / "last")
        run.optimizer.release_checkpoint(tmp_path / "last")
        assert not is_checkpoint(tmp_path / "last")
        with pytest.raises(offload.CheckpointError, match="was a checkpoint until it was released"):
            run.optimizer.load_checkpoint(tmp_path / "last")
        with pytest.raises(offload.CheckpointError, match="is kept by this session; it keeps none"):
            run.optimizer.release_checkpoint(tmp_path / "last")
    assert not list(path.iterdir())


# Stores that are taken over ----------------------------------------------------------------------------------------


def test_a_resumed_session_does_not_take_later_state_for_its_own(tmp_path: Path, path: Path) -> None:
    """It counts on from the versions of all checkpoints in the store, also of those that are later than its own."""
    with Run(path, keep=3, host_memory=16384) as run:
        for number in range(3):
            run.train().save(tmp_path / f"ck-{number}")
    for resumed in range(3):
        with Run(path, keep=4, host_memory=16384) as run:
            run.optimizer.load_checkpoint(tmp_path / f"ck-{resumed}")
            for number in range(3):
                run.optimizer.param_groups[0]["lr"] *= 2
                run.train().save(tmp_path / f"other-{resumed}-{number}")
                state = run.optimizer.state_for(run.weight)
                with Run(host_memory=1 << 20) as other:
                    other.optimizer.load_checkpoint(tmp_path / f"other-{resumed}-{number}")
                    found = other.optimizer.state_for(other.weight)
                assert all(torch.equal(found[name], state[name]) for name in state)


def test_what_is_kept_is_named_oldest_first_also_after_a_resume(tmp_path: Path, path: Path) -> None:
    with Run(path, keep=2) as run:
        assert run.optimizer.engine.checkpoints.kept == ()
        for number in range(3):
            run.train().save(tmp_path / f"ck-{number}")
        run.optimizer.save_checkpoint(tmp_path / "copy", copy=True)
        run.optimizer.wait_checkpoint()
        kept = (str(tmp_path / "ck-1"), str(tmp_path / "ck-2"))
        assert run.optimizer.engine.checkpoints.kept == kept
    with Run(path, keep=2) as run:
        run.optimizer.load_checkpoint(tmp_path / "ck-2")
        assert run.optimizer.engine.checkpoints.kept == kept


def test_saving_over_a_newer_checkpoint_than_the_one_loaded_frees_it(tmp_path: Path, path: Path) -> None:
    """As after a kill between a checkpoint and what names it: its folder is the next one's."""
    with Run(path, keep=2) as run:
        for number in range(3):
            run.train().save(tmp_path / f"ck-{number}")
    with Run(path, keep=2) as run:
        run.optimizer.load_checkpoint(tmp_path / "ck-1")
        run.train().save(tmp_path / "ck-2")
        kept = (str(tmp_path / "ck-1"), str(tmp_path / "ck-2"))
        assert run.optimizer.engine.checkpoints.kept == kept
        assert len(run.optimizer.engine._parts.machine.saver.held_records) == 2
    (store,) = find_stores(str(path))
    assert [pin.folder for pin in store.pins] == [*kept]
    assert steps_in(tmp_path / "ck-2", path) == 3


def test_a_released_name_frees_what_is_there_and_not_what_was_moved(tmp_path: Path, path: Path) -> None:
    with Run(path) as run:
        run.train().save(tmp_path / "ck")
        os.rename(tmp_path / "ck", tmp_path / "best")
        run.train().save(tmp_path / "ck")
        run.optimizer.release_checkpoint(tmp_path / "ck")
        run.train(3).save(tmp_path / "other")
    assert steps_in(tmp_path / "best", path) == 1


def test_saves_that_failed_do_not_make_a_folder_forget(tmp_path: Path, path: Path) -> None:
    (tmp_path / "file").touch()
    with Run(path) as run:
        run.train().save(tmp_path / "ck")
        for _ in range(70):
            with pytest.raises(offload.CheckpointError):
                run.optimizer.save_checkpoint(tmp_path / "file" / "ck")
        for _ in range(3):
            run.train().save(tmp_path / "ck")
            assert len(run.optimizer.engine._parts.machine.saver.held_records) == 1


def test_the_manifest_of_another_save_to_the_folder_stays(tmp_path: Path, path: Path) -> None:
    with Run(path) as run:
        run.train().save(tmp_path / "ck")
        other = tmp_path / "ck" / f"manifest-{'f' * 32}-0.json"
        other.touch()
        run.train().save(tmp_path / "ck")
        assert other.exists()


def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = reader.read_manifests
    with Run(path) as run:
        run.train().save(tmp_path / "ck")

        def read(folder: Any) -> Any:
            monkeypatch.setattr(reader, "read_manifests", plain)
            found = plain(folder)
            run.train().save(tmp_path / "ck")
            return found

        monkeypatch.setattr(reader, "read_manifests", read)
        with pytest.raises(offload.CheckpointError, match="while it was opened"):
            Checkpoint(tmp_path / "ck")


def test_sessions_take_turns_in_one_folder(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One's release would delete the other's `COMMIT` if that were written between a look at it and the deletion."""
    looks: list[bool] = []
    plain = commit.seal_released

    def look(ids: Sequence[str], note: str) -> bytes:
        lock = FolderLock(open_folder(tmp_path / "ck"))
        looks.append(lock.acquire())
        lock.release()
        return plain(ids, note)

    monkeypatch.setattr(commit, "seal_released", look)
    with Run(path) as first, Run(path) as second:
        first.train().save(tmp_path / "ck")
        first.train().save(tmp_path / "next")
        assert looks == [False]
        lock = FolderLock(open_folder(tmp_path / "ck"))
        assert lock.acquire()
        second.train(3).optimizer.save_checkpoint(tmp_path / "ck", extra={"step": 3})
        with pytest.raises(TimeoutError):
            second.optimizer.wait_checkpoint(0.5)
        assert not is_checkpoint(tmp_path / "ck")
        lock.release()
        second.optimizer.wait_checkpoint()
    assert steps_in(tmp_path / "ck", path) == 3


@pytest.mark.parametrize("order", [[0, 1], [1, 0], []], ids=["as before", "turned", "none"])
def test_paths_that_have_changed_places_are_told_apart(tmp_path: Path, order: list[int]) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for each in paths:
        each.mkdir()
    with Run(*paths) as run:
        run.train(2).save(tmp_path / "ck")
    paths[0].rename(tmp_path / "c")
    paths[1].rename(paths[0])
    (tmp_path / "c").rename(paths[1])
    if order:
        assert steps_in(tmp_path / "ck", *(paths[number] for number in order)) == 2
    else:  # of a session with other paths
        with Checkpoint(tmp_path / "ck") as checkpoint:
            assert not any(problem for _, _, problem in checkpoint.verify())


def test_a_forked_child_does_not_hold_a_folder_s_lock(tmp_path: Path) -> None:
    """It may outlive a parent that was killed."""
    lock, other = FolderLock(open_folder(tmp_path)), FolderLock(open_folder(tmp_path))
    assert lock.acquire()
    pid = os.fork()
    if not pid:
        left = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        os._exit(any(Path(file).is_relative_to(tmp_path.resolve()) for file in left))
    assert os.waitpid(pid, 0)[1] == 0
    assert not other.acquire()
    lock.release()
    assert other.acquire()
    other.release()


def test_a_checkpoint_that_never_had_its_folder_leaves_nothing(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "RANKS_TIMEOUT_S", 0.0)
    (tmp_path / "ck").mkdir()
    lock = FolderLock(open_folder(tmp_path / "ck"))
    assert lock.acquire()
    with Run(path) as run:
        with pytest.raises(offload.CheckpointError, match="another session's checkpoint"):
            run.train().save(tmp_path / "ck")
        lock.release()
    assert not list((tmp_path / "ck").iterdir())
    assert not find_stores(str(path))


def test_what_a_checkpoint_was_given_is_not_held_when_it_has_ended(tmp_path: Path, path: Path) -> None:
    with Run(path) as run:
        run.train().save(tmp_path / "ck")
        last = run.optimizer.engine._parts.saves.last
        assert last.request.extra is None
        assert last.job is None


@pytest.mark.slow
def test_sessions_that_save_to_one_folder_at_once_leave_a_whole_checkpoint(tmp_path: Path, path: Path) -> None:
    with Run(path) as first, Run(path) as second:

        def save(run: Run, steps: int) -> None:
            for number in range(10):
                run.train(steps)
                with contextlib.suppress(offload.CheckpointError):  # the other has saved there since
                    run.save(tmp_path / ("ck" if number % 3 else f"other-{steps}"))

        threads = [threading.Thread(target=save, args=(run, 1 + n)) for n, run in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        saved = []
        for run in (first.train(), second.train()):
            with contextlib.suppress(offload.CheckpointError):
                run.save(tmp_path / "ck")
                saved.append(run.optimizer.engine.step_count(0))
    assert saved == [steps_in(tmp_path / "ck", path)]


def test_a_rank_releases_nothing_that_rank_0_still_holds(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "SETTLE_S", 0.0)
    folder = tmp_path / "ck"
    write(path, 1, folder)
    kept = commit.KeptCheckpoint(str(folder), read_commit(open_folder(folder)).id, 1, (), None)
    manifest = folder / manifest_name(kept.id, 1)
    manifest.touch()
    assert not commit.release(kept, "")
    assert manifest.exists()
    assert commit.release(replace(kept, rank=0), "")
    assert commit.release(kept, "")
    assert not manifest.exists()


# Files of others ---------------------------------------------------------------------------------------------------

STRANGER = "offload-00000000-0000-4000-8000-000000000001"
STORE_FILES = "lock", "pins.json", "store.json", "tiles"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def test_nothing_in_a_strangers_store_can_hang_or_mislead(tmp_path: Path, path: Path) -> None:
    for number, (name, make) in enumerate(itertools.product(STORE_FILES, (fifo, link, folder))):
        store = path / f"offload-{uuid.UUID(int=number)}"
        store.mkdir()
        (store / "lock").touch()
        (store / name).unlink(missing_ok=True)
        make(store / name)
        if name != "tiles":
            assert not any(leftover.is_free for leftover in find_stores(str(path))), (name, make.__name__)
    write(path, 1, tmp_path / "ck")
    assert steps_in(tmp_path / "ck", path) == 1


def test_a_link_in_the_place_of_a_store_is_not_followed(tmp_path: Path, path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    names = [*STORE_FILES, "mine"]
    for name in names:
        (victim / name).touch()
    (path / STRANGER).symlink_to(victim)
    (path / "rank-7").symlink_to(tmp_path)
    write(path, 1, tmp_path / "ck")
    assert cli.main(["gc", "--really", str(path), "--quiet"]) == 0
    assert sorted(os.listdir(victim)) == sorted(names)
    assert (path / STRANGER).is_symlink()


def test_a_session_deletes_its_own_directory_and_no_other_of_its_name(tmp_path: Path, path: Path) -> None:
    with Run(path) as run:
        run.train()
        (store,) = path.iterdir()
        os.rename(store, tmp_path / "stolen")
        victim = tmp_path / "victim"
        victim.mkdir()
        for name in ("lock", "store.json", "tiles"):
            (victim / name).touch()
        store.symlink_to(victim)
    assert sorted(os.listdir(victim)) == ["lock", "store.json", "tiles"]


@pytest.mark.parametrize("way", ["deleted", "another disk"])
def test_a_save_whose_store_is_not_at_its_path_any_more_replaces_nothing(
    tmp_path: Path, path: Path, way: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    with Run(link) as run:
        run.train().save(tmp_path / "ck", copy=True)
        if way == "deleted":
            next(path.glob("*/tiles")).unlink()
        else:
            shutil.copytree(path, tmp_path / "disk")
            link.unlink()
            link.symlink_to(tmp_path / "disk")
        with pytest.raises(offload.CheckpointError, match=r"is not the open file any more: .* copy=True"):
            run.train().save(tmp_path / "ck")
        run.train().save(tmp_path / "rescued", copy=True)
    assert steps_in(tmp_path / "ck", tmp_path) == 1
    assert steps_in(tmp_path / "rescued", tmp_path) == 3


def test_a_store_that_was_copied_by_hand_is_nobodys_leftover(tmp_path: Path, path: Path) -> None:
    with Run(path) as run:
        run.train()
        (store,) = path.iterdir()
        shutil.copytree(store, path / STRANGER)
    write(path, 1, tmp_path / "ck")
    (found,) = [found for found in find_stores(str(path)) if found.path.endswith(STRANGER)]
    assert "is not the record of this store" in found.problem


def test_files_of_others_in_a_checkpoints_folder_stay(tmp_path: Path, path: Path) -> None:
    folder = tmp_path / "ck"
    folder.mkdir()
    mine = {"RELEASED": "of mine", "manifest-notes.json": "{}", "config.json": "{}"}
    for name, content in mine.items():
        (folder / name).write_text(content)
    with Run(path) as run:
        run.train().save(folder)
        run.train().save(folder)
        run.train().save(tmp_path / "next")
        for name, content in mine.items():
            assert (folder / name).read_text() == content
        (folder / "COMMIT").write_text("the commit of my run")
        with pytest.raises(offload.CheckpointError, match="move it away, or save to another folder"):
            run.optimizer.save_checkpoint(folder)
        assert (folder / "COMMIT").read_text() == "the commit of my run"
        run.train()
    assert steps_in(tmp_path / "next", path) == 3


def test_pins_with_names_that_no_folder_can_have_keep_their_store(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = path / STRANGER
    store.mkdir()
    (store / "lock").touch()
    for name in ("\0", "\ud800", "", "x" * 5000):
        (store / "pins.json").write_bytes(seal("pins", {"pins": [["a" * 32, name]]}))
        (found,) = find_stores(str(path))
        assert not found.is_free
        assert cli.main(["gc", str(path)]) in (0, 1)
        assert ("damaged" in "".join(capsys.readouterr())) == (name in ("\0", "\ud800"))
        assert store.exists()


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    assert read_regular(tmp_path / "link", 5, follow=True) == b"12345"
    for name, follow, limit_bytes in (("file", False, 4), ("link", False, 5), ("fifo", True, 5), (".", True, 5)):
        with pytest.raises(OSError, match=r"more than 4|symbolic link|not a regular file"):
            read_regular(tmp_path / name, limit_bytes, follow=follow)
    os.close(descriptor := open_regular(tmp_path / "file"))
    assert descriptor >= 0


# All of it at random -----------------------------------------------------------------------------------------------


def run_histories(python: str, *arguments: str) -> None:
    prepared.ran([python, HISTORIES, *arguments])


@pytest.mark.slow
def test_a_few_random_histories_lose_nothing() -> None:
    run_histories(prepared.python(), "--histories", "10", "--seed", "108")


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_many_random_histories_lose_nothing() -> None:
    run_histories(sys.executable, "--histories", "2000")


@pytest.mark.slow
def test_the_histories_notice_a_loss(tmp_path: Path) -> None:
    """A checker that cannot fail would be worse than none."""
    spoilt = tmp_path / "spoilt.py"
    spoilt.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(HISTORIES.parent)!r})\n"
        "from offload.checkpoint import stores\n"
        "real = stores.standing\n"
        "def standing(pin, store):\n"
        "    found = real(pin, store)\n"
        "    return stores.Standing.RELEASED if found is stores.Standing.MISSING else found\n"
        "stores.standing = standing\n"
        "from offload.checkpoint import commit, takeover\n"
        "takeover.standing = commit.standing = standing\n"
        "import histories\n"
        "sys.exit(histories.main())\n"
    )
    command = [prepared.python(), spoilt, "--histories", "5", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
