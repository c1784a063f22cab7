"""`offload export --for`: what torch's own optimizers load, of every rule, and what can go wrong."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prepared
import pytest
import torch

import offload
from offload import cli
from offload.checkpoint.manifest import seal, unseal
from offload.cli import going_back
from offload.integrations.shared import POINTER, pointer
from offload.tiers.filesystem import working_in

ROOT = Path(__file__).parents[2]
CONFIG = {"threads": 1, "subgroup_numel": 4096}
KINDS: list[tuple[Any, Any, dict[str, Any], torch.dtype]] = [
    (offload.AdamW, torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.1}, torch.float32),
    (offload.AdamW, torch.optim.AdamW, {"lr": torch.tensor(0.25)}, torch.bfloat16),
    (offload.Adam, torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}, torch.float32),
    (offload.Adagrad, torch.optim.Adagrad, {"lr_decay": 0.01}, torch.bfloat16),
    (offload.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, torch.float32),
    (offload.SGD, torch.optim.SGD, {}, torch.bfloat16),
]


def quietly(*arguments: object) -> int:
    return cli.main(["export", *map(str, arguments), "--quiet"])


def weights(count: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(5, 3 + n, 2).to(dtype)) for n in range(count)]


def step(optimizer: Any, seed: int, but: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if number not in but and parameter.requires_grad else None
    optimizer.step()


def saved(optimizer: Any, folder: Path) -> Any:
    optimizer.save_checkpoint(folder, copy=True)
    optimizer.wait_checkpoint()
    return optimizer.state_dict()


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("ours", "theirs", "options", "dtype"), KINDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_torchs_optimizer_goes_on(tmp_path: Path, ours: Any, theirs: Any, options: Any, dtype: torch.dtype) -> None:
    options = {"lr": 0.1, **options}
    with ours(weights(dtype=dtype), **options, offload=CONFIG) as optimizer:
        for seed in range(3):
            step(optimizer, seed, but=(2,))  # which has no state then
        state = saved(optimizer, tmp_path / "ck")
    assert quietly(tmp_path / "ck", "--for", "torch", tmp_path / "out.pt") == 0
    found = load(tmp_path / "out.pt")
    assert found["state"].keys() == (set() if ours is offload.SGD and "momentum" not in options else {0, 1})
    assert found["param_groups"] == [dict(group) for group in state["param_groups"]]
    whole = theirs(weights(dtype=dtype), **{**options, "lr": 9.0})
    for seed in range(3):
        step(whole, seed, but=(2,))
    for number, entry in found["state"].items():
        assert entry.keys() == whole.state_dict()["state"][number].keys()  # nothing of ours
        for name, value in entry.items():
            assert value is None or torch.equal(value, state["state"][number][name])
    first, second = (theirs(weights(dtype=dtype), **{**options, "lr": 9.0}) for _ in range(2))
    first.load_state_dict(found)
    second.load_state_dict(state)
    for optimizer in (first, second):
        step(optimizer, 3)
    for one, other in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)


def test_a_lion_is_said_to_be_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with offload.Lion(weights(dtype=torch.bfloat16), lr=0.1, offload=CONFIG) as optimizer:
        step(optimizer, 0)
        state = saved(optimizer, tmp_path / "ck")
    assert cli.main(["export", str(tmp_path / "ck"), str(tmp_path / "out.pt"), "--for", "torch"]) == 0
    said = capsys.readouterr().out
    assert "torch has no Lion" in said
    assert "without masters" in said
    found = load(tmp_path / "out.pt")
    assert [entry.keys() for entry in found["state"].values()] == [{"exp_avg"}] * 3
    assert torch.equal(found["state"][2]["exp_avg"], state["state"][2]["exp_avg"])
    assert found["param_groups"][0]["betas"] == (0.9, 0.99)


def test_groups_are_as_torch_counts_them(tmp_path: Path) -> None:
    """With frozen parameters, one that was frozen at first, an empty group, and groups that were added."""

    def make(kind: Any, **options: Any) -> Any:
        parameters = weights(6)
        for frozen in (parameters[0], parameters[2]):
            frozen.requires_grad_(False)
        groups = [{"params": parameters[:3]}, {"params": [], "lr": 0.5}, {"params": parameters[3:5]}]
        optimizer = kind(groups, lr=0.1, **options)
        step(optimizer, 0)
        parameters[2].requires_grad_()
        step(optimizer, 1)
        optimizer.add_param_group({"params": parameters[5:], "weight_decay": 0.5})
        step(optimizer, 2)
        return optimizer

    with make(offload.AdamW, offload=CONFIG) as optimizer:
        saved(optimizer, tmp_path / "ck")
    assert quietly(tmp_path / "ck", "--for", "torch", tmp_path / "out.pt") == 0
    found, expected = load(tmp_path / "out.pt"), make(torch.optim.AdamW).state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys() == {1, 2, 3, 4, 5}
    for number, entry in expected["state"].items():
        assert found["state"][number]["step"] == entry["step"]
        torch.testing.assert_close(found["state"][number]["exp_avg"], entry["exp_avg"])


def test_a_checkpoint_from_before_groups_had_members(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "goldens" / "wrapped-names.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert quietly(tmp_path / "checkpoint", "--for", "torch", tmp_path / "out.pt") == 0
    found = load(tmp_path / "out.pt")
    assert [group["params"] for group in found["param_groups"]] == [[0, 1, 2, 3]]
    assert [entry["exp_avg"].shape for entry in found["state"].values()] == [(4, 8), (4,), (1, 4), (1,)]
    assert [int(entry["step"]) for entry in found["state"].values()] == [3] * 4


@pytest.mark.slow
def test_ranks_that_shard_become_one(tmp_path: Path) -> None:
    program = Path(__file__).with_name("export_rank.py")
    command = [prepared.python(), *prepared.torchrun(2), str(program), str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    prepared.ran(command, timeout=240, env=env)
    assert quietly(tmp_path / "ck", "--for", "torch", tmp_path / "out.pt") == 0
    found, expected = load(tmp_path / "out.pt"), load(tmp_path / "state.pt")
    assert [group["params"] for group in found["param_groups"]] == [[0, 1, 2, 3]]
    assert found["state"].keys() == expected.keys() == {0, 2, 3}  # the second is frozen
    for number, entry in found["state"].items():
        assert all(torch.equal(entry[name], expected[number][name]) for name in entry)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with offload.AdamW(weights(2), lr=0.1, offload=CONFIG) as optimizer:
        step(optimizer, 0)
        saved(optimizer, tmp_path / "ck")
    return tmp_path / "ck"


def folder_of(framework: str, checkpoint: Path) -> Path:
    """Return a folder as a framework writes it, with the checkpoint in it."""
    folder = checkpoint.parent / "folder"
    folder.mkdir()
    shutil.copytree(checkpoint, folder / "state")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "weights").write_bytes(b"w" * 1000)
    torch.save({POINTER: "state"}, folder / going_back.FILES[framework])
    return folder


@pytest.mark.parametrize("framework", going_back.FILES)
def test_all_else_in_a_folder_is_copied(
    checkpoint: Path, framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(framework, checkpoint)
    if framework == "accelerate":
        shutil.copytree(checkpoint, folder / "state_1")
        torch.save({POINTER: "state_1"}, folder / "optimizer_1.bin")
        torch.save(torch.optim.AdamW(weights(1)).state_dict(), folder / "optimizer_2.bin")  # torch's own already
    assert quietly(folder, "--for", framework, tmp_path / "out") == 0
    names = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*")}
    ours = {"optimizer.bin", "optimizer_1.bin"} if framework == "accelerate" else {"optimizer.pt"}
    assert names == {"deeper", "deeper/weights"} | ours | ({"optimizer_2.bin"} if len(ours) == 2 else set())
    assert (tmp_path / "out" / "deeper" / "weights").read_bytes() == b"w" * 1000
    for name in ours:
        assert load(tmp_path / "out" / name)["state"].keys() == {0, 1}
    assert load(folder / going_back.FILES[framework]) == {POINTER: "state"}
    assert quietly(folder, "--for", "torch", tmp_path / "out.pt") == (0 if len(ours) == 1 else 2)
    said = capsys.readouterr().err
    assert said == "" or f"give the folder of one: {folder / 'state'}, {folder / 'state_1'}" in said


def change(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change what a checkpoint's manifest says."""
    (file,) = checkpoint.glob("manifest-*")
    body = unseal("manifest", file.read_bytes(), "")
    edit(body["metadata"])
    file.write_bytes(seal("manifest", body))


def test_what_cannot_be_exported_is_said(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(status: int, words: str, *arguments: object) -> None:
        before = sorted(file.name for file in tmp_path.iterdir())
        assert quietly(*arguments) == status
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
        assert sorted(file.name for file in tmp_path.iterdir()) == before

    out = tmp_path / "out"
    folder = folder_of("transformers", checkpoint)
    refused(2, "it is there already", checkpoint, "--for", "torch", folder)
    refused(2, "it is there already", folder, "--for", "transformers", checkpoint)
    refused(2, "it is in CHECKPOINT", folder, "--for", "transformers", folder / "deeper" / "out")
    refused(2, "name a path", checkpoint, "--for", "torch", "")
    refused(2, "there is no folder", checkpoint, "--for", "torch", tmp_path / "no" / "out")
    refused(2, "leave it out", checkpoint, "--for", "torch", out, "--replace")
    refused(1, "is no checkpoint", tmp_path / "no", "--for", "torch", out)
    refused(2, "give the Trainer's folder", checkpoint, "--for", "transformers", out)
    refused(2, "give the folder that accelerator.save_state", folder, "--for", "accelerate", out)
    refused(2, "give the .ckpt that", folder, "--for", "lightning", out)
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    refused(2, "give the .ckpt that", tmp_path / "text.ckpt", "--for", "lightning", out)
    torch.save({"optimizer_states": [{POINTER: "ck"}], "path": tmp_path}, tmp_path / "unsafe.ckpt")
    kind = f"{type(tmp_path).__module__}.PosixPath"
    refused(2, f"without {kind} in it; or export", tmp_path / "unsafe.ckpt", "--for", "lightning", out)
    torch.save({"optimizer_states": []}, tmp_path / "weights.ckpt")
    refused(2, "no state of one optimizer", tmp_path / "weights.ckpt", "--for", "lightning", out)
    for name in ("../ck", "..", "", 3, None, "/etc"):
        torch.save({POINTER: name}, folder / "optimizer.pt")
        refused(2, "it names no folder of state", folder, "--for", "transformers", out)
    torch.save({POINTER: "gone"}, folder / "optimizer.pt")
    refused(1, "is no checkpoint", folder, "--for", "transformers", out)
    torch.save(torch.optim.AdamW(weights()).state_dict(), folder / "optimizer.pt")
    refused(2, "resume from it as it is", folder, "--for", "transformers", out)
    torch.save({POINTER: "state"}, folder / "optimizer.pt")
    (folder / "loop").symlink_to(folder)
    refused(1, "Too many levels of symbolic links", folder, "--for", "transformers", out)
    (folder / "loop").unlink()
    (folder / "gone").symlink_to(folder / "nothing")
    refused(1, "is no file", folder, "--for", "transformers", out)
    (folder / "gone").unlink()
    os.mkfifo(folder / "fifo")
    refused(1, "is no file", folder, "--for", "transformers", out)
    for members in ([[0, 2]], [[-1]], [["0"]], [0], 7, []):
        change(checkpoint, lambda metadata, members=members: metadata.update(members=members))
        refused(1, "have no such parameters", checkpoint, "--for", "torch", out)
    change(checkpoint, lambda metadata: metadata.update(prefix="rank0."))
    refused(1, "ranks with weights of their own", checkpoint, "--for", "torch", out)
    change(checkpoint, lambda metadata: metadata.clear())
    refused(1, "is of no optimizer", checkpoint, "--for", "torch", out)


@pytest.mark.parametrize("framework", ["torch", "transformers"])
def test_what_torch_has_no_optimizer_for_says_what_can_be_done(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(optimizer: Any, name: str) -> str:
        with optimizer:
            step(optimizer, 0)
            saved(optimizer, tmp_path / name)
        folder = tmp_path / name
        if framework != "torch":
            folder = tmp_path / f"of {name}"
            folder.mkdir()
            (tmp_path / name).rename(folder / "state")
            torch.save({POINTER: "state"}, folder / "optimizer.pt")
        assert quietly(folder, "--for", framework, tmp_path / "out") == 1
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    matrix = torch.nn.Parameter(torch.ones(4, 5))
    said = refused(offload.Muon([("m", matrix), ("b", weights(1)[0])], offload=CONFIG), "muon")
    assert "has state of Muon, of which torch has no one optimizer: `offload export`, without --for" in said
    said = refused(offload.wrap(torch.optim.NAdam, [("m", matrix)], offload=CONFIG), "wrapped")
    assert "has state of torch.optim.nadam.NAdam, which alone knows its tensors: load it with offload.wrap" in said
    if framework == "torch":  # and what it says can be done
        assert quietly(tmp_path / "muon", tmp_path / "out") == 0
        with offload.wrap(torch.optim.NAdam, [("m", matrix)], offload=CONFIG) as optimizer:
            optimizer.load_checkpoint(tmp_path / "wrapped")
            torch.optim.NAdam([("m", matrix)]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("framework", "stage"), [("torch", "writing"), ("transformers", "writing"), ("transformers", "copying")]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_is_cut_short_leaves_nothing(
    checkpoint: Path, tmp_path: Path, framework: str, stage: str, error: BaseException
) -> None:
    folder = checkpoint if framework == "torch" else folder_of(framework, checkpoint)
    names = sorted(file.name for file in tmp_path.iterdir())

    def progress(doing: str, done: int, whole: int) -> None:
        assert 0 <= done <= whole
        if doing == stage:
            raise error

    with pytest.raises((KeyboardInterrupt, offload.CheckpointError)) as caught:
        going_back.export_for(framework, str(folder), str(tmp_path / "out"), progress)
    assert isinstance(error, KeyboardInterrupt) or "No space left" in str(caught.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == names


def test_state_is_written_once_to_where_torch_looks_for_it(tmp_path: Path) -> None:
    """The disk never has more than the file, which is as torch would write it but for the checksums of tensors."""
    turned = torch.nn.Parameter(torch.randn(2, 30, 40, 50).to(memory_format=torch.channels_last))
    with offload.AdamW([turned, torch.nn.Parameter(torch.empty(0, 3)), *weights()], lr=0.1, offload=CONFIG) as ours:
        step(ours, 0)
        state = saved(ours, tmp_path / "ck")["state"]
    torch.save({"weights": torch.ones(1000), "optimizer_states": [{POINTER: "ck"}]}, tmp_path / "last.ckpt")
    for framework, source in (("torch", "ck"), ("lightning", "last.ckpt")):
        out = tmp_path / f"{framework}.pt"
        before, most = set(tmp_path.rglob("*")), [0]

        def progress(doing: str, done: int, whole: int, before: set[Path] = before, most: list[int] = most) -> None:
            new = [file.stat().st_blocks * 512 for file in tmp_path.rglob("*") if file not in before]
            most[0] = max(most[0], sum(new))

        going_back.export_for(framework, str(tmp_path / source), str(out), progress)
        assert 0 < most[0] <= out.stat().st_size + (1 << 16)
        found = load(out)
        torch.save(found, theirs := io.BytesIO())
        assert theirs.tell() == out.stat().st_size
        with zipfile.ZipFile(out) as one, zipfile.ZipFile(theirs) as other:
            records = [[(i.filename, i.file_size, i.header_offset) for i in each.infolist()] for each in (one, other)]
            assert records[0] == records[1]
            assert one.read("archive/data.pkl") == other.read("archive/data.pkl")
        entries = found if framework == "torch" else found["optimizer_states"][0]
        assert entries["state"].keys() == state.keys()
        for number, entry in entries["state"].items():
            assert all(torch.equal(value, state[number][name]) for name, value in entry.items())
    assert torch.equal(found["weights"], torch.ones(1000))


@pytest.mark.parametrize("kind", ["torch", "transformers", "distributed", "safetensors"])
def test_an_export_that_was_killed_leaves_nothing_to_the_next(tmp_path: Path, kind: str) -> None:
    with offload.AdamW(weights(), lr=0.1, offload=CONFIG) as optimizer:
        step(optimizer, 0)
        saved(optimizer, tmp_path / "trainer" / "ck")
    torch.save({POINTER: "ck"}, tmp_path / "trainer" / "optimizer.pt")
    source, out = tmp_path / "trainer" / ("" if kind == "transformers" else "ck"), tmp_path / "out"
    how = ("--for", kind) if kind in ("torch", "transformers") else ("--format", kind)
    arguments = ["export", str(source), str(out), *how, "--quiet"]
    killed = (
        "import os, sys\n"
        "from offload import cli\n"
        "from offload.checkpoint.reader import Checkpoint\n"
        "Checkpoint.read = lambda *_: os.kill(os.getpid(), 9)\n"
        "cli.main(sys.argv[1:])\n"
    )
    assert subprocess.run([prepared.python(), "-c", killed, *arguments], cwd=ROOT, check=False).returncode == -9
    (left,) = (file for file in tmp_path.iterdir() if file.name != "trainer")
    assert left.name == ".out.partial"
    assert cli.main(arguments) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "trainer"]


def test_two_exports_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    with working_in(tmp_path / ".out.partial") as mine:
        (mine / "made").mkdir()
        with pytest.raises(OSError, match="somebody else"), working_in(mine):
            pass
        assert (mine / "made").is_dir()
    mine.symlink_to(tmp_path)
    with pytest.raises(OSError, match="link"), working_in(mine):
        pass


def test_a_full_disk(mounted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = mounted("tmpfs", "size=512k")
    with offload.AdamW([torch.nn.Parameter(torch.zeros(100_000))], offload=CONFIG) as optimizer:
        step(optimizer, 0)
        saved(optimizer, tmp_path / "ck")
    arguments = "torch", str(tmp_path / "ck"), str(small / "out"), lambda *progress: None
    with pytest.raises(offload.CheckpointError, match=r"512.0 KiB are free there, and the state takes 781.2 KiB"):
        going_back.export_for(*arguments)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 40))  # another takes it then
    with pytest.raises(offload.CheckpointError, match="No space left"):
        going_back.export_for(*arguments)
    assert not [*small.iterdir()]


def test_a_pointer_says_the_way_back(checkpoint: Path, tmp_path: Path) -> None:
    """In torch's own words for what is no number; none of torch's optimizers takes it."""
    words = "`offload export CHECKPOINT --for accelerate OUT`"
    with offload.AdamW([{"params": weights(1)}, {"params": weights(2)}], offload=CONFIG) as optimizer:
        torch.save(pointer(optimizer, "ck", "accelerate"), tmp_path / "file")
        found = load(tmp_path / "file")
        assert found[POINTER] == "ck"
        for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad):
            theirs = kind([{"params": weights(1)}, {"params": weights(2)}])
            with pytest.raises(ValueError, match=words):
                theirs.load_state_dict(found)
            with pytest.raises(ValueError, match="parameter groups"):
                kind(weights(1)).load_state_dict(found)
        with pytest.raises(offload.ConfigError, match=words):  # ours, that the framework was not told of
            optimizer.load_state_dict(found)
        step(optimizer, 0)
    sgd = torch.optim.SGD([{"params": weights(1)}, {"params": weights(2)}], lr=0.1)
    sgd.load_state_dict(found)
    with pytest.raises(KeyError):  # it has not read the rest
        step(sgd, 0)
    with (
        offload.SGD(weights(1), lr=0.1, offload=CONFIG) as sgd,
        offload.Muon(weights(1), offload=CONFIG) as muon,
        offload.wrap(torch.optim.AdamW, weights(1), offload=CONFIG) as wrapped,
    ):
        for optimizer in (sgd, muon, wrapped):  # of the last two there is no such way
            assert pointer(optimizer, "ck", "accelerate") == {POINTER: "ck"}


def test_json_says_what_was_written(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(checkpoint), "--for", "torch", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["optimizers"] == [{"optimizer": "AdamW", "groups": [2], "step": 1, "has_masters": False}]
    assert found["for"] == "torch"


def test_the_command_needs_no_framework(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["export", str(checkpoint), "--for", "torch", str(tmp_path / "out")]
    program = "import sys\nfor name in ('transformers', 'accelerate', 'lightning'): sys.modules[name] = None\n"
    program += f"from offload import cli\nsys.exit(cli.main({arguments!r}))"
    done = prepared.ran([prepared.python(), "-c", program])
    assert "AdamW after step 1, groups of 2 parameters" in done.stdout
