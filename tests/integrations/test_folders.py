"""A mirror copies what frameworks and loops write, whole: opened, changed, deleted, interrupted, and fetched."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import folder_kills
import pytest
import torch
from s3_server import BUCKET, S3Server
from started import end, start

import offload
from offload import cli
from offload.checkpoint import fetch as fetches
from offload.checkpoint import whole
from offload.checkpoint.contents import is_checkpoint
from offload.checkpoint.fetch import find_whole
from offload.checkpoint.marker import Mark, Marker, mark_begun, mark_of, set_aside
from offload.checkpoint.mirror import Mirror, Task
from offload.checkpoint.whole import BESIDE, FolderCopy, WholeFolder
from offload.optim import folders
from offload.optim.folders import begin_folder, end_folder
from offload.tiers.common import FileBytes
from offload.tiers.directories import DirectoryFolder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with one of a framework's, and two files beside it, and an empty mirror."""
    (tmp_path / "mirror").mkdir()
    folder = tmp_path / "run" / "step-1"
    (folder / "inside").mkdir(parents=True)
    for name in ("a", "b", "inside/c"):
        (folder / name).write_bytes(name.encode() * 1000)
    (tmp_path / "run" / "step-1.ckpt").write_text("all but the optimizer")
    (tmp_path / "run" / "latest").write_text("step-1")
    return tmp_path / "run"


def opened(run: Path, name: str = "step-1", mirror: Path | None = None) -> FolderCopy:
    beside = [f"{name}.ckpt"] if (run / f"{name}.ckpt").exists() else []
    whole = WholeFolder(str(run), name, "", Marker(beside=tuple(beside), shared=("latest",)))
    return FolderCopy(whole, str(mirror or run.parent / "mirror"))


def contents(folder: Path) -> dict[str, bytes]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {
        name: (folder / name).read_bytes() for name in names if not name.rpartition("/")[2].startswith("offload-")
    }


def fetch(mirror: Path | str, folder: Path, *rest: str) -> int:
    return cli.main(["fetch", str(mirror), str(folder), "--quiet", *rest])


def test_what_is_deleted_while_it_is_copied_is_copied(run: Path) -> None:
    expected, copy = contents(run), opened(run)
    assert copy.begin()
    for _ in copy.copy():
        shutil.rmtree(run, ignore_errors=True)
    copy.commit()
    assert fetch(run.parent / "mirror", run.parent / "fetched") == 0
    assert contents(run.parent / "fetched") == expected
    assert mark_of(str(run.parent / "fetched" / "step-1")) is Mark.WHOLE


def test_an_interrupted_copy_goes_on(run: Path) -> None:
    """What is durable is not copied again, but for what has other content now; and once it is whole, nothing is."""
    first = opened(run)
    assert first.begin()
    copied = list(islice(first.copy(), 2))
    first.close()
    (run / "step-1" / "b").write_bytes(b"other")
    second = opened(run)
    assert second.begin()
    again = list(second.copy())
    second.commit()
    sizes = [len(content) for content in contents(run).values()]
    assert len(copied) + len(again) == len(sizes) + 1  # `b`
    third = opened(run)
    assert not third.begin()
    third.close()


def test_what_was_fetched_is_not_copied_to_its_mirror_again(run: Path) -> None:
    copy = opened(run)
    copy.begin()
    list(copy.copy())
    copy.commit()
    elsewhere = run.parent / "elsewhere"
    assert fetch(run.parent / "mirror", elsewhere) == 0
    (elsewhere / "latest").write_text("step-1")  # as the framework does
    assert not opened(elsewhere).begin()


def test_one_that_is_not_whole_replaces_nothing_of_one_that_is(run: Path) -> None:
    """Also of the files that all of them share."""
    copy = opened(run)
    copy.begin()
    list(copy.copy())
    copy.commit()
    expected = contents(run)
    shutil.copytree(run / "step-1", run / "step-2")
    (run / "latest").write_text("step-2")
    newer = opened(run, "step-2")
    newer.begin()
    list(newer.copy())
    assert find_whole(str(run.parent / "mirror")) == ["step-1"]
    assert fetch(run.parent / "mirror", run.parent / "fetched") == 0
    assert contents(run.parent / "fetched") == expected


def test_what_others_write_over_is_copied_as_it_was(run: Path) -> None:
    copy = opened(run)
    (run / "latest").write_text("step-2")
    copy.begin()
    list(copy.copy())
    copy.commit()
    assert fetch(run.parent / "mirror", run.parent / "fetched") == 0
    assert (run.parent / "fetched" / "latest").read_text() == "step-1"


def test_what_others_write_over_is_noted_as_it_was_copied(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside so many files that most are not open."""
    stat = os.stat

    def late(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) == str(run / "latest"):
            (run / "latest").write_text("step-1000")
        return stat(path, *rest, **options)

    monkeypatch.setattr(whole, "MOST_OPEN", 1)
    monkeypatch.setattr(os, "stat", late)
    copy = opened(run)
    assert (copy.files["latest"].content, copy.files["latest"].state[0]) == (b"step-1", 6)
    copy.close()


def test_fetch_refuses_what_is_not_whole_and_what_it_would_replace(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror, target = run.parent / "mirror", run.parent / "fetched"
    assert fetch(mirror, target) == 1
    assert f"{mirror} is not there, or empty" in capsys.readouterr().err
    copy = opened(run)
    copy.begin()
    list(copy.copy())
    assert fetch(mirror, target) == 1
    assert "no whole folder of a trainer" in capsys.readouterr().err
    assert fetch(mirror, target, "--name", "step-1") == 1
    assert "not whole" in capsys.readouterr().err
    assert fetch(mirror, target, "--name", "step-3") == 1
    assert f"step-3 is not in {mirror}: whole there are none" in capsys.readouterr().err
    assert not target.exists()
    copy.commit()
    for there in ("step-1/a", "latest", "step-1.ckpt"):
        (target / there).parent.mkdir(parents=True, exist_ok=True)
        (target / there).write_text("mine")
        before = contents(target)
        assert fetch(mirror, target) == 1
        assert "is there already" in capsys.readouterr().err
        assert contents(target) == before
        shutil.rmtree(target)
    assert fetch(mirror, target) == 0


@pytest.mark.parametrize("missing", ["step-1/inside/c", f"step-1/{BESIDE}/latest"])
def test_a_copy_of_a_mirror_that_lacks_files_is_not_whole(
    run: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted rsync of a mirror may have brought the marker, and not all files, or not all of one."""
    copy = opened(run)
    copy.begin()
    list(copy.copy())
    copy.commit()
    mirror, target = run.parent / "mirror", run.parent / "fetched"
    for is_short in (True, False):
        os.truncate(mirror / missing, 1) if is_short else (mirror / missing).unlink()
        assert fetch(mirror, target) == 1
        assert f"step-1 is not whole: {mirror / missing} is" in capsys.readouterr().err
        assert not target.exists()


def test_a_save_that_was_killed_before_it_wrote_anything_leaves_no_checkpoint(tmp_path: Path) -> None:
    """The marker itself is written under another name at first."""
    unfinished = f".tmp-{'0' * 32}"
    for name in ("checkpoint_1", "checkpoint_2", "checkpoint_3"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint_1/somebody's", f"checkpoint_1/{unfinished}", f"checkpoint_3/{unfinished}"):
        (tmp_path / name).touch()
    assert set_aside(str(tmp_path), re.compile(r"checkpoint_\d+")) == []
    assert os.listdir(tmp_path) == ["checkpoint_1"]
    assert {*os.listdir(tmp_path / "checkpoint_1")} == {"somebody's", unfinished}


# With an optimizer


class Loop:
    """A loop of one's own, with a mirror."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root, self.mirror = root, root / "mirror"
        for name in ("path", "mirror", "run"):
            (root / name).mkdir(exist_ok=True)
        torch.manual_seed(0)
        self.model = torch.nn.Linear(64, 64)
        config = {"host_memory": 0, "paths": [root / "path"], "subgroup_numel": 1024, "mirror": str(self.mirror)}
        config |= {"checkpoints_kept": 2, "threads": 1, **settings}
        self.optimizer = offload.AdamW(self.model.named_parameters(), lr=1e-2, offload=config)

    def train(self) -> None:
        self.model(torch.ones(2, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, name: str) -> Path:
        folder = self.root / "run" / name
        self.train()
        with self.optimizer.checkpoint_folder(folder):
            torch.save(self.model.state_dict(), folder / "model.pt")
            self.optimizer.save_checkpoint(folder / "optimizer")
        return folder

    def delete(self, folder: Path) -> None:
        self.optimizer.engine.checkpoints.release(str(folder / "optimizer"), after_mirror=True)
        shutil.rmtree(folder)

    @property
    def whole(self) -> list[str]:
        return find_whole(str(self.mirror))


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    found = Loop(tmp_path)
    yield found
    found.optimizer.close()


def test_verify_says_which_files_of_a_framework_are_not_those_of_the_save(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = loop.save("step-1")
    for name in ("added", ".tmp-5"):
        (folder / name).touch()
    loop.optimizer.wait_mirror(60)
    for place in (folder.parent, loop.mirror):
        assert cli.main(["verify", str(place)]) == 0
        capsys.readouterr()
        (place / "step-1" / "model.pt").write_bytes(b"short")
        assert cli.main(["verify", str(place)]) == 1
        assert f"{place}/step-1/model.pt is of 5 bytes, not of" in capsys.readouterr().out
        for name in ("model.pt", "optimizer/COMMIT"):
            (place / "step-1" / name).unlink()
        assert cli.main(["verify", str(place)]) == 1
        assert capsys.readouterr().out == f"{place}/step-1/model.pt is missing\n"


def test_verify_looks_at_a_folder_whose_state_is_all_in_the_frameworks_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in DeepSpeed's tags; a folder that has lost the engine's commit is none of these."""
    for step in ("tag-1", "tag-2"):
        begin_folder(str(tmp_path / step))
        for name in ("model.pt", "state.pt"):
            (tmp_path / step / name).write_text(name)
        folders.mark_folder(str(tmp_path / step))
    (tmp_path / "tag-1" / f"manifest-{'0' * 32}-0.json").touch()
    for place in (tmp_path, tmp_path / "tag-2"):
        assert cli.main(["verify", str(place)]) == 0
        words = "tag-2: 2 files are there, with the sizes that were noted when it was saved; none was read\n"
        assert capsys.readouterr().out == f"{tmp_path}/{words}"
    (tmp_path / "tag-2" / "state.pt").unlink()
    assert cli.main(["verify", str(tmp_path / "tag-2")]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/tag-2/state.pt is missing\n"
    assert cli.main(["verify", str(tmp_path / "tag-1")]) == 1


def test_a_fetch_that_was_cut_short_goes_on(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever file; what is there is not copied again, and nobody else's file is replaced."""
    folder = loop.root / "run" / "step-1"
    begin_folder(str(folder), Marker(beside=("step-1.ckpt",), shared=("latest",)))
    for name in ("step-1/a", "step-1/b", "step-1.ckpt", "latest"):
        (folder.parent / name).write_text(name)
    loop.optimizer.save_checkpoint(folder / "optimizer")
    loop.optimizer.wait_checkpoint()
    end_folder(loop.optimizer, str(folder))
    loop.optimizer.wait_mirror(60)
    bring, copied, commit = fetches.fetch_file, list[str](), fetches.RankPartCopy.commit

    def cut_short(source: Any, *rest: Any) -> None:
        if len(copied) == max(count, 0):
            raise KeyboardInterrupt
        bring(source, *rest)
        copied.append(os.path.basename(source))

    for count in range(-1, 4):  # -1: before the checkpoint is committed
        target = loop.root / f"fetched-{count}"
        copied.clear()
        monkeypatch.setattr(fetches, "fetch_file", cut_short)
        monkeypatch.setattr(fetches.RankPartCopy, "commit", cut_short if count < 0 else commit)
        with pytest.raises(KeyboardInterrupt):
            fetches.fetch(str(loop.mirror), "step-1", str(target))
        monkeypatch.setattr(fetches.RankPartCopy, "commit", commit)
        monkeypatch.setattr(fetches, "fetch_file", lambda *given: (bring(*given), copied.append(given[0])))
        if not (target / "latest").exists():
            (target / "latest").write_text("mine")
            with pytest.raises(offload.CheckpointError, match="latest is there already"):
                fetches.fetch(str(loop.mirror), "step-1", str(target))
            (target / "latest").unlink()
        fetches.fetch(str(loop.mirror), "step-1", str(target))
        assert len(copied) == 4
        assert mark_of(str(target / "step-1")) is Mark.WHOLE
        assert is_checkpoint(target / "step-1" / "optimizer")
        expected = {name: content for name, content in contents(folder.parent).items() if "/optimizer/" not in name}
        assert contents(target).items() >= expected.items()


@pytest.mark.parametrize("name", ["two\nlines", "\r\n", "Umlaut ü", "no text \udcff", " ", "~", "offload-beside\n"])
def test_files_may_be_called_anything(loop: Loop, name: str) -> None:
    with loop.optimizer.checkpoint_folder(loop.root / "run" / "step-1"):
        loop.optimizer.save_checkpoint(loop.root / "run" / "step-1" / "optimizer")
        (loop.root / "run" / "step-1" / name).mkdir()
        (loop.root / "run" / "step-1" / name / name).write_text("content")
    loop.optimizer.wait_mirror(60)
    assert cli.main(["verify", str(loop.root / "run")]) == 0
    assert fetch(loop.mirror, loop.root / "fetched") == 0
    assert (loop.root / "fetched" / "step-1" / name / name).read_text() == "content"


def test_a_file_that_is_changed_while_it_is_copied_ends_that_mirror(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = FileBytes.__iter__

    def changing(self: FileBytes) -> Iterator[memoryview]:
        yield from pieces(self)
        with (loop.root / "run" / "step-1" / "model.pt").open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(FileBytes, "__iter__", changing)
    loop.save("step-1")
    with pytest.raises(offload.CheckpointError, match="changed while it was copied"):
        loop.optimizer.wait_mirror()
    assert "step-1 was not mirrored" in caplog.text
    assert loop.whole == []
    assert mark_of(str(loop.mirror / "step-1")) is Mark.BEGUN
    monkeypatch.undo()
    loop.save("step-2")
    loop.optimizer.wait_mirror()
    assert loop.whole == ["step-2"]


def test_deletions_are_followed_once_a_newer_one_is_whole(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loop.save("step-1")
    loop.optimizer.wait_mirror()
    loop.delete(first)
    assert loop.whole == ["step-1"]
    write, deleted = DirectoryFolder.write, []

    def deleting(self: Any, name: str, *rest: Any, **options: Any) -> None:
        write(self, name, *rest, **options)
        if name == "model.pt" and not deleted:  # of the second one, in the mirror
            deleted.append(loop.whole)
            loop.delete(loop.root / "run" / "step-2")

    second = loop.root / "run" / "step-2"
    monkeypatch.setattr(DirectoryFolder, "write", deleting)
    loop.save("step-2")
    loop.optimizer.wait_mirror()
    assert deleted == [["step-1"]]
    assert not second.exists()
    assert loop.whole == ["step-2"]  # although it is deleted: there is no newer one
    assert not (loop.mirror / "step-1").exists()
    loop.save("step-3")
    loop.optimizer.wait_mirror()
    assert loop.whole == ["step-3"]
    assert sorted(os.listdir(loop.mirror)) == ["step-3"]


def test_a_whole_one_is_not_copied_again_at_a_resume(loop: Loop) -> None:
    folder = loop.save("step-1")
    loop.optimizer.wait_mirror()
    loop.optimizer.close()
    before = {path: path.stat().st_mtime_ns for path in loop.mirror.rglob("*") if path.is_file()}
    loop.__init__(loop.root)  # type: ignore[misc]
    loop.optimizer.load_checkpoint(folder / "optimizer")
    loop.optimizer.wait_mirror()
    assert loop.optimizer.metrics()["mirrored_bytes"] == 0
    assert {path: path.stat().st_mtime_ns for path in loop.mirror.rglob("*") if path.is_file()} == before


def test_what_is_loaded_from_the_mirror_is_not_mirrored_into_it(loop: Loop) -> None:
    loop.save("step-1")
    loop.optimizer.wait_mirror()
    loop.optimizer.close()
    there = sorted(loop.mirror.rglob("*"))
    loop.__init__(loop.root)  # type: ignore[misc]
    loop.optimizer.load_checkpoint(loop.mirror / "step-1" / "optimizer")
    loop.optimizer.wait_mirror()
    assert loop.optimizer.metrics()["mirrored_bytes"] == 0
    assert sorted(loop.mirror.rglob("*")) == there


def test_what_rank_0_has_not_released_leaves_when_it_has(loop: Loop) -> None:
    """It may be mirroring it still; the others neither wait for that nor fail."""
    folder = loop.save("step-1")
    loop.optimizer.wait_mirror()
    saves = loop.optimizer.engine.checkpoints._parts.saves
    (kept,) = saves.kept
    saves.kept[:] = [replace(kept, rank=1)]
    loop.optimizer.engine.checkpoints.release(str(folder / "optimizer"), after_mirror=True)
    assert saves.kept == []
    loop.save("step-2")
    assert saves.has_awaiting_mirror
    assert is_checkpoint(folder / "optimizer")
    shutil.rmtree(folder)  # as rank 0 does
    loop.save("step-3")
    assert not saves.has_awaiting_mirror


def test_other_ranks_mirror_what_rank_0_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a newer one is there by the time in which they hear of it; what it has passed over they do."""
    begun, mirrored = {"second"}, []
    mirror = Mirror(str(tmp_path), [], verify=True, io_backend="auto")
    monkeypatch.setattr(mirror, "mirror_task", lambda task: (mirrored.append(task.id), begun.add("fourth")))

    def task(name: str) -> Task:
        part = SimpleNamespace(request=SimpleNamespace(id=name, rank=1), has_begun=lambda: name in begun)
        return Task(name, part)  # type: ignore[arg-type]

    monkeypatch.setattr(mirror._thread, "start", lambda: None)
    for name in ("first", "second", "third", "fourth"):
        mirror.queue_task(task(name))
    monkeypatch.undo()
    monkeypatch.setattr(mirror, "mirror_task", lambda task: (mirrored.append(task.id), begun.add("fourth")))
    mirror._thread.start()
    mirror.wait(30)
    mirror.close(0, 5)
    assert mirrored == ["second", "fourth"]


def test_a_lone_rank_takes_no_mark_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_begun(str(tmp_path / "one"))
    folders.mark_folder(str(tmp_path / "one"))

    def alone(note: bool) -> bool:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(folders, "any_rank", alone)
    with pytest.raises(RuntimeError, match="closed"):
        folders.begin_folder(str(tmp_path / "one"))
    assert mark_of(str(tmp_path / "one")) is Mark.WHOLE


# With frameworks


@pytest.mark.slow
@pytest.mark.parametrize("name", folder_kills.DOORS)
def test_a_run_that_is_ended_goes_on_from_its_folder_and_from_its_mirror(tmp_path: Path, name: str) -> None:
    """By a SIGTERM and by a kill; `folder_kills.py` does so many times, with two ranks everywhere."""
    package = {"trainer": "transformers", "in_place": "deepspeed", "dcp": "torch"}.get(name, name)
    pytest.importorskip(package)
    figures = folder_kills.run_seed(name, 3, tmp_path, {}, 2 if name == "dcp" else 1)
    assert (figures["SIGTERM"], figures["SIGKILL"]) == (1, 1)
    assert figures["fetched and gone on with"] >= 1


@pytest.mark.slow
def test_a_trainers_checkpoint_comes_back_from_a_bucket(tmp_path: Path, s3: S3Server) -> None:
    pytest.importorskip("transformers")
    mirror = f"s3://{BUCKET}/{tmp_path.name}"

    def trained(folder: str, *rest: str) -> dict[str, Any]:
        program = Path(__file__).with_name("trainer_runs.py")
        (found,), _ = end(start(program, tmp_path / folder, "offload_adamw", 6, *rest))
        return found

    whole = trained("whole")
    trained("run", "stop=4", f"mirror={mirror}", "save_total_limit=1")
    assert find_whole(mirror) == ["checkpoint-4"]
    assert fetch(mirror, tmp_path / "fetched") == 0
    assert contents(tmp_path / "fetched" / "checkpoint-4").keys() >= {"model.safetensors", "optimizer/COMMIT"}
    resumed = trained("fetched", "resume")
    assert resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]


@pytest.mark.parametrize(("tag", "name"), [(None, "global_step7"), (0, "0"), (3, "3"), ("a/b", "a/b")])
def test_a_deepspeed_tag_is_called_as_deepspeed_calls_it(tmp_path: Path, tag: Any, name: str) -> None:
    tags = pytest.importorskip("offload.integrations.deepspeed.tags", exc_type=Exception)
    saved, mirrored = [], []
    writer = type("Writer", (), {"commit": lambda self, info: True})()

    def save(folder: str, tag: str) -> None:
        saved.append(tag)
        writer.commit(SimpleNamespace(save_dir=folder, tag=tag))

    engine = SimpleNamespace(
        use_node_local_storage=lambda: False,
        global_steps=7,
        checkpoint_engine=writer,
        save_checkpoint=save,
        load_checkpoint=lambda *given: (str(tmp_path / name / "model_states.pt"), {}),
    )

    def mirror(folder: str, *rest: int, **more: bool) -> None:
        mirrored.append(WholeFolder.at(folder).name)

    checkpoints = SimpleNamespace(mirror_folder=mirror)
    shard = SimpleNamespace(engine=SimpleNamespace(checkpoints=checkpoints, config=SimpleNamespace(mirror="mirror")))
    optimizer = SimpleNamespace(check_is_loaded=bool, wait_checkpoint=bool, is_saved_behind=False, shard=shard)
    tags.mark_tags_when_whole(optimizer, engine)
    engine.save_checkpoint(str(tmp_path), tag)
    assert mark_of(str(tmp_path / name)) is Mark.WHOLE
    engine.load_checkpoint(str(tmp_path), tag)
    assert saved == [name]
    assert mirrored == [name, name]


def test_a_file_is_set_aside_though_another_rank_deletes_the_folder_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of DeepSpeed share it, and each deletes it if it is empty: also just after another one has made it."""
    behind = pytest.importorskip("offload.integrations.deepspeed.behind", exc_type=Exception)
    file, make = tmp_path / "rank-0.pt", os.makedirs
    left = 3

    def make_late(path: str, exist_ok: bool) -> None:
        nonlocal left
        left -= 1
        make(path, exist_ok=exist_ok)
        if left:
            behind.discard_partial(str(tmp_path / "rank-1.pt"))

    monkeypatch.setattr(os, "makedirs", make_late)
    file.write_text("old")
    behind.set_aside(str(file), is_kept=True)
    assert Path(f"{behind.partial_of(str(file))}{behind.ASIDE}").read_text() == "old"
    file.write_text("old")
    behind.set_aside(str(file), is_kept=False)
    assert not list(tmp_path.iterdir())
    assert left == -1
