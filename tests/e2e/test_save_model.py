"""What a model has beside the optimizer's state, saved and restored with it: buffers, frozen weights, others."""

from __future__ import annotations

import math
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from s3_server import BUCKET, S3Server
from sharded import local, spawn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from offload import cli
from offload.checkpoint.fetch import fetch
from offload.checkpoint.reader import Checkpoint
from offload.tiers.buckets import BucketFolder
from offload.tiers.directories import DirectoryFolder


class Counted(torch.nn.Module):
    """A module with extra state, which may be a tensor or not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return rows

    def get_extra_state(self) -> Any:
        return torch.tensor([self.calls]) if self.calls % 2 else {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"] if isinstance(state, dict) else int(state)


class Adapted(torch.nn.Module):
    """A frozen base with an adapter, as LoRA has them; buffers, tied and empty weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(16, 16).bfloat16().requires_grad_(False)
        self.turned = torch.nn.Parameter(torch.randn(16, 16).bfloat16().t(), requires_grad=False)
        self.tied = self.base.weight
        self.none = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
        self.one = torch.nn.Parameter(torch.randn(()), requires_grad=False)
        self.adapter = torch.nn.Linear(16, 16).bfloat16()
        self.norm = torch.nn.BatchNorm1d(16)
        self.counted = Counted()
        self.head = torch.nn.Linear(16, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.base(rows) + self.adapter(rows) + rows @ self.turned
        hidden = self.counted(self.norm(hidden.float()))
        return self.head(hidden).square().mean() * self.one


def everything(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: local(value.detach()).clone() for name, value in state.items() if isinstance(value, torch.Tensor)}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def optimizer_of(model: torch.nn.Module, path: Path, **settings: Any) -> offload.AdamW:
    path.mkdir(exist_ok=True)
    own = [(name, p) for name, p in model.named_parameters() if p.requires_grad and "head" not in name]
    settings = {"host_memory": 0, "paths": [path], "subgroup_numel": 1024, "threads": 1, **settings}
    return offload.AdamW(own, lr=1e-2, offload=offload.OffloadConfig(**settings))


def train(model: torch.nn.Module, optimizer: offload.AdamW, head: torch.optim.Optimizer | None, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 + step)
        model(torch.randn(8, 16).bfloat16()).backward()
        for each in (optimizer, head):
            if each is not None:
                each.step()
                each.zero_grad()


def run(model: Adapted, path: Path, **settings: Any) -> tuple[offload.AdamW, torch.optim.Optimizer]:
    return optimizer_of(model, path, **settings), torch.optim.SGD(model.head.parameters(), lr=1e-2)


def unlike() -> Adapted:
    """Return another model of that kind, whose batch norm has seen other rows."""
    model = Adapted(1)
    model(torch.ones(8, 16).bfloat16())
    return model


@pytest.mark.parametrize("wraps", [lambda model: model, torch.compile], ids=["plain", "compiled"])
@pytest.mark.parametrize(("copy", "steps"), [(False, 3), (True, 4)])
def test_a_model_comes_back_whole(tmp_path: Path, copy: bool, steps: int, wraps: Callable[[Any], Any]) -> None:
    model, other = Adapted(), unlike()
    optimizer, head = run(model, tmp_path / "path")
    with optimizer:
        train(model, optimizer, head, steps)
        optimizer.save_checkpoint(tmp_path / "ck", model=wraps(model), extra={"step": 3}, copy=copy)
        saved = everything(model)
        train(model, optimizer, head, 2)  # what it changes was copied
        optimizer.wait_checkpoint()
    places = {name: value.data_ptr() for name, value in other.state_dict().items() if name != "counted._extra_state"}
    optimizer, _ = run(other, tmp_path / "path")
    with optimizer:
        assert optimizer.load_checkpoint(tmp_path / "ck", model=other) == {"step": 3}
        assert_equal(everything(other), saved)
        assert other.counted.calls == steps
        found = other.state_dict()
        assert places == {name: found[name].data_ptr() for name in places}  # written where they are
        train(other, optimizer, torch.optim.SGD(other.head.parameters(), lr=1e-2), 2)
        assert_equal(everything(other), everything(model))
        assert optimizer.load_checkpoint(tmp_path / "ck") == {"step": 3}  # without the model


def test_a_bucket_has_it_too(s3: S3Server, tmp_path: Path) -> None:
    folder = f"s3://{BUCKET}/model-{uuid.uuid4()}/run"
    model, other = Adapted(), unlike()
    optimizer, head = run(model, tmp_path / "path")
    with optimizer:
        train(model, optimizer, head, 2)
        optimizer.save_checkpoint(folder, model=model)
        optimizer.wait_checkpoint()
    optimizer, _ = run(other, tmp_path / "path")
    with optimizer:
        assert optimizer.load_checkpoint(folder, model=other) is None
    assert_equal(everything(other), everything(model))


def test_a_mirror_has_it_too(tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    model, other = Adapted(), unlike()
    optimizer, head = run(model, tmp_path / "path", mirror=tmp_path / "mirror")
    with optimizer:
        train(model, optimizer, head, 2)
        optimizer.save_checkpoint(tmp_path / "ck", model=model)
        optimizer.wait_checkpoint()
        optimizer.wait_mirror()
    shutil.rmtree(tmp_path / "ck")
    optimizer, _ = run(other, tmp_path / "elsewhere")
    with optimizer:
        optimizer.load_checkpoint(tmp_path / "mirror" / "ck", model=other)
    assert_equal(everything(other), everything(model))


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_frozen_weights_are_mirrored_fetched_and_verified_piece_by_piece(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """They may be larger than memory."""

    def without_weights(read: Callable[[Any, str], bytes | None]) -> Callable[[Any, str], bytes | None]:
        def refuse(folder: Any, name: str) -> bytes | None:
            assert not name.startswith("model-")
            return read(folder, name)

        return refuse

    for folder in (DirectoryFolder, BucketFolder):
        monkeypatch.setattr(folder, "read", without_weights(folder.read))
    (tmp_path / "mirror").mkdir()
    mirror = str(tmp_path / "mirror") if kind == "directory" else f"s3://{BUCKET}/model-{uuid.uuid4()}"
    model, other = Adapted(), unlike()
    optimizer, head = run(model, tmp_path / "path", mirror=mirror)
    with optimizer:
        train(model, optimizer, head, 2)
        with optimizer.checkpoint_folder(tmp_path / "run" / "step-2"):
            optimizer.save_checkpoint(tmp_path / "run" / "step-2" / "optimizer", model=model)
        optimizer.wait_mirror()
    fetch(mirror, "step-2", str(tmp_path / "fetched"))
    for copied_to in (mirror, tmp_path / "fetched"):
        assert cli.main(["verify", f"{copied_to}/step-2/optimizer"]) == 0
    optimizer, _ = run(other, tmp_path / "elsewhere")
    with optimizer:
        optimizer.load_checkpoint(tmp_path / "fetched" / "step-2" / "optimizer", model=other)
    assert_equal(everything(other), everything(model))


def test_one_checkpoint_leaves_no_files_of_another(tmp_path: Path) -> None:
    model = Adapted()
    optimizer, head = run(model, tmp_path / "path", checkpoints_kept=1)
    with optimizer:
        for folder in ("ck", "ck", "other"):
            train(model, optimizer, head, 1)
            optimizer.save_checkpoint(tmp_path / folder, model=model)
            optimizer.wait_checkpoint()
            assert len([*(tmp_path / folder).glob("model-*")]) == 1
        assert [*(tmp_path / "ck").glob("model-*")] == []


def test_frozen_weights_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of one before it was written fails the checkpoint, and says what to do."""
    model, may_write = Adapted(), threading.Event()
    optimizer, head = run(model, tmp_path / "path")
    write = DirectoryFolder.write

    def late(self: DirectoryFolder, name: str, content: Any, **options: Any) -> None:
        if name.startswith("model-"):
            assert may_write.wait(60)
        write(self, name, content, **options)

    monkeypatch.setattr(DirectoryFolder, "write", late)
    with optimizer:
        train(model, optimizer, head, 1)
        monkeypatch.chdir(tmp_path)
        optimizer.save_checkpoint("ck", model=model)
        monkeypatch.chdir("/")
        with torch.no_grad():
            model.base.bias.add_(1)
        may_write.set()
        with pytest.raises(offload.CheckpointError, match=r"base\.bias.*wait_checkpoint"):
            optimizer.wait_checkpoint()
        assert not [*(tmp_path / "ck").glob("model-*")]
        optimizer.save_checkpoint(tmp_path / "ck", model=model)
        optimizer.wait_checkpoint()


def test_what_does_not_fit_is_said_before_anything_changes(tmp_path: Path) -> None:
    model = Adapted()
    optimizer, head = run(model, tmp_path / "path")
    with optimizer:
        train(model, optimizer, head, 1)
        optimizer.save_checkpoint(tmp_path / "with", model=model)
        optimizer.wait_checkpoint()
        optimizer.save_checkpoint(tmp_path / "without", extra=1, copy=True)
        optimizer.wait_checkpoint()
        with pytest.raises(offload.ConfigError, match=r"torch.nn.Module"):
            optimizer.save_checkpoint(tmp_path / "with", model=model.state_dict())  # type: ignore[arg-type]
    larger, fewer, other, wider = Adapted(2), Adapted(2), Adapted(2), Adapted(2)
    wider.norm = torch.nn.BatchNorm1d(17)
    larger.more = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    del fewer.turned
    other.base = torch.nn.Linear(16, 16).requires_grad_(False)
    other.tied = other.base.weight
    for wrong, says in (
        (wider, "norm.* of shape"),
        (larger, "lacks more"),
        (fewer, "has turned"),
        (other, "tied as bfloat16.*float32"),
    ):
        before = everything(wrong)
        optimizer = optimizer_of(wrong, tmp_path / "path")
        with optimizer:
            with pytest.raises(offload.CheckpointError, match=says):
                optimizer.load_checkpoint(tmp_path / "with", model=wrong)
            with pytest.raises(offload.CheckpointError, match="without model="):
                optimizer.load_checkpoint(tmp_path / "without", model=wrong)
        assert_equal(everything(wrong), before)


@pytest.mark.parametrize("kind", ["model", "extra"])
def test_damage_is_found(tmp_path: Path, kind: str) -> None:
    model = Adapted()
    optimizer, head = run(model, tmp_path / "path")
    with optimizer:
        train(model, optimizer, head, 1)
        optimizer.save_checkpoint(tmp_path / "ck", model=model)
        optimizer.wait_checkpoint()
        assert cli.main(["verify", str(tmp_path / "ck")]) == 0
        (file,) = (tmp_path / "ck").glob(f"{kind}-*")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(offload.CheckpointError, match="damaged"):
            optimizer.load_checkpoint(tmp_path / "ck", model=model)
        assert cli.main(["verify", str(tmp_path / "ck")]) == 1
        file.unlink()
        assert cli.main(["verify", str(tmp_path / "ck")]) == 1


def replicas(folder: Path, shard: bool) -> None:
    model = Adapted()
    replica = DistributedDataParallel(model)
    optimizer = optimizer_of(model, folder / f"path{dist.get_rank()}", shard=shard)
    with optimizer:
        train(replica, optimizer, None, 2)
        optimizer.save_checkpoint(folder / "ck", model=replica)
        optimizer.wait_checkpoint()
        assert len([*(folder / "ck").glob("model-*")]) == 1  # the first rank's is for all
        saved = everything(model)
        dist.barrier()
        with torch.no_grad():
            for value in model.state_dict().values():
                if isinstance(value, torch.Tensor) and not value.requires_grad:
                    value.zero_()
        optimizer.load_checkpoint(folder / "ck", model=replica)
        assert_equal(everything(model), saved)


def sharded(folder: Path, mesh: tuple[int, ...]) -> None:
    """A frozen base that ranks share; with two dimensions, parts of it are on several ranks."""
    names = ("replicas", "parts")[-len(mesh) :]
    over = init_device_mesh("cpu", mesh, mesh_dim_names=names)

    def made(seed: int, over: DeviceMesh = over) -> Any:
        torch.manual_seed(seed)
        base = fully_shard(torch.nn.Linear(16, 16).bfloat16().requires_grad_(False), mesh=over)
        torch.nn.init.normal_(base.weight)  # in place: the shard's own count of changes does not tell
        head = torch.nn.Linear(16, 1)
        return fully_shard(torch.nn.Sequential(base, torch.nn.BatchNorm1d(16), head).bfloat16(), mesh=over)

    model, other = made(0), made(1)
    optimizer = optimizer_of(model, folder / f"path{dist.get_rank()}")
    with optimizer:
        model(torch.randn(8, 16).bfloat16()).float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(8, 16).bfloat16())  # which leaves the root's weights whole
        optimizer.save_checkpoint(folder / "ck", model=model)
        optimizer.wait_checkpoint()
        dist.barrier()
        saved = everything(model)
    optimizer = optimizer_of(other, folder / f"path{dist.get_rank()}")
    with optimizer:
        optimizer.load_checkpoint(folder / "ck", model=other)
        assert_equal(everything(other), saved)
    if len(mesh) > 1:  # of as many ranks, two have each other's part of the base
        other = made(2, DeviceMesh("cpu", over.mesh.T, mesh_dim_names=names))
        refused = pytest.raises(offload.CheckpointError, match=r"has \[.* for this rank, which here has")
        with optimizer_of(other, folder / f"path{dist.get_rank()}") as optimizer, refused:
            optimizer.load_checkpoint(folder / "ck", model=other)


def stages(folder: Path, groups: int, saves: bool) -> None:
    """Two pipeline stages, each on half of the ranks; stage 1 has other hyperparameters, and maybe more groups."""
    ranks = dist.get_world_size()
    stage = 2 * dist.get_rank() // ranks
    torch.manual_seed(stage)
    model = torch.nn.BatchNorm1d(16)
    named = [(f"layers.{stage}.{name}", parameter) for name, parameter in model.named_parameters()]
    parts = [named[:1], named[1:]] if groups == 2 and stage == 1 else [named]
    path = folder / f"path{dist.get_rank()}"
    path.mkdir(exist_ok=True)
    settings = {"offload": {"host_memory": 0, "paths": [path], "threads": 1}}
    values = (1.0 + stage, 0.25 * (1 + stage))
    with offload.AdamW(
        [{"params": part, "lr": values[1] if saves else 0.5} for part in parts], **settings
    ) as optimizer:
        if saves:
            model.running_mean.fill_(values[0])
            optimizer.save_checkpoint(folder / "ck", model=model)
            optimizer.wait_checkpoint()
            dist.barrier()
            with Checkpoint(folder / "ck") as checkpoint:
                assert [bool(manifest.tiles) for manifest in checkpoint.manifests] == [True, False] * (ranks // 2)
        else:
            optimizer.load_checkpoint(folder / "ck", model=model)
            assert {group["lr"] for group in optimizer.param_groups} == {values[1]}
            assert float(model.running_mean[0]) == values[0]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_a_rank_gets_what_a_rank_of_its_stage_has_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, groups: int
) -> None:
    spawn(4, tmp_path, stages, groups, True)
    for ranks in (4, 2):
        spawn(ranks, tmp_path, stages, groups, False)
    both = [(f"layers.{stage}.{name}", torch.ones(16)) for stage in (0, 1) for name in ("weight", "bias")]
    named = [(name, torch.nn.Parameter(value)) for name, value in both]
    with offload.AdamW(named, lr=0.5) as optimizer:  # whose one group is of neither stage
        optimizer.load_checkpoint(tmp_path / "ck")
        assert optimizer.param_groups[0]["lr"] == 0.5
    assert "whose groups had unlike hyperparameters" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True])
def test_replicas(tmp_path: Path, shard: bool) -> None:
    spawn(2, tmp_path, replicas, shard)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_shards(tmp_path: Path, mesh: tuple[int, ...]) -> None:
    spawn(math.prod(mesh), tmp_path, sharded, mesh)
