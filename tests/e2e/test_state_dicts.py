"""State dicts: where a large one lies, what it takes, and that loading makes no copy of it."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from awkward import Model, everything, same
from limited import limit, limited
from mirror import same_bits

import offload
from offload.memory import arenas as memory
from offload.session import state_copy
from offload.tiers.filesystem import file_system

PROGRAM = Path(__file__).with_name("state_dict_memory.py")
MIB = 1 << 20


AllLarge = limited(offload.AdamW, large_copy_bytes=0)
"""Hands out all state in files, however small it is."""


def mapped_files() -> list[str]:
    """Return the deleted files that this process has mapped, and where they were."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split(maxsplit=5)[5] for line in lines if line.endswith(" (deleted)") and "/offload-" not in line}
    return sorted(name for name in found if not name.startswith(("/dev/", "/memfd", "/SYSV", "/[")))


def on_disk(folder: Path) -> bool:
    return file_system(folder) not in ("tmpfs", "ramfs")


TIERS: dict[str, dict[str, Any]] = {
    "memory": {},
    "disk": {"host_memory": 0},
    "both": {"host_memory": 30_000},
    "compact16": {"host_memory": 0, "state_format": "compact16"},
    "compact8": {"host_memory": 0, "state_format": "compact8", "exact_names": []},
    "gpu": {"gpu_memory": "1MB"},
    "through the gpu": {"gpu_memory": 0, "placement": "gpu", "host_memory": 0},
}


ON_LATE = pytest.mark.late(shared=True)


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Model], Any]:
    """Return a function that makes an optimizer over a model, with its state on one tier."""
    settings = TIERS[request.param]

    def made(model: Model) -> Any:
        paths = [tempfile.mkdtemp(dir=tmp_path)] if "host_memory" in settings else []
        config = offload.OffloadConfig(subgroup_numel=4096, paths=paths, **settings)
        if "gpu" in request.param:
            model.to("late")
        return offload.AdamW(model.groups(), lr=1e-2, offload=config)

    return made


def file_of(saved: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    with tempfile.NamedTemporaryFile() as file:
        file.write(buffer.getvalue())
        file.flush()
        return torch.load(file.name, **options)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        pytest.param(name, dtype, marks=[ON_LATE] if "gpu" in name else [])
        for name, dtype in zip(TIERS, itertools.cycle([torch.float32, torch.bfloat16]), strict=False)
    ],
    indirect=["make"],
)
def test_a_large_state_dict_is_what_a_small_one_is(make: Callable[[Model], Any], dtype: torch.dtype) -> None:
    model = Model(dtype)
    with make(model) as optimizer:
        model.train_with(optimizer, 1, 2)
        small = optimizer.state_dict()
        limit(optimizer.engine, large_copy_bytes=0)
        large = optimizer.state_dict()
        assert large["param_groups"] == small["param_groups"]
        assert large["state"].keys() == small["state"].keys() == set(range(6))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, entry in large["state"].items():
            wanted = optimizer.state_for(parameters[number])
            # An fp32 weight is its own master, and no copy of it is kept in the state.
            assert ("master" in entry) == (dtype != torch.float32)
            assert entry.keys() == small["state"][number].keys()
            for name, tensor in entry.items():
                assert same_bits(tensor, small["state"][number][name])
                assert tensor.stride() == small["state"][number][name].stride()
                assert tensor.untyped_storage().nbytes() == tensor.nbytes  # its own: `torch.save` writes no more
                assert name == "step" or same_bits(tensor, wanted[name])
        weights, before = copy.deepcopy(model.state_dict()), everything(model, optimizer)
        model.train_with(optimizer, 3)
        after = everything(model, optimizer)
        loads = [
            large,
            copy.deepcopy(large),
            file_of(large),
            file_of(large, mmap=True),
            pickle.loads(pickle.dumps(large)),
        ]
    for saved in loads:  # its optimizer is closed
        again = Model(dtype, seed=5)
        again.load_state_dict(weights)
        with make(again) as optimizer:
            optimizer.load_state_dict(saved)
            assert same(everything(again, optimizer), before)
            again.train_with(optimizer, 3)
            assert same(everything(again, optimizer), after)


def test_a_file_has_no_name_and_goes_with_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on_disk(tmp_path):
        pytest.skip("temporary files are in memory here")
    (path := tmp_path / "path").mkdir()
    (other := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    model, there = Model(torch.bfloat16), mapped_files()

    def new() -> set[str]:
        gc.collect()
        return {name.rpartition("/")[0] for name in set(mapped_files()).difference(there)}

    config = {"host_memory": 0, "paths": [path], "subgroup_numel": 1024}
    optimizer = AllLarge(model.groups(), offload=config)
    model.train_with(optimizer, 1)
    stores = list(path.iterdir())
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert new() == {str(path)}
    assert list(path.iterdir()) == stores
    first["state"][0]["exp_avg"].fill_(7.0)  # the caller's own
    assert not (second["state"][0]["exp_avg"] == 7.0).any()
    assert not (optimizer.state_for(model.embed)["exp_avg"] == 7.0).any()
    kept = first["state"][0]["exp_avg"]
    optimizer.close()
    del first, second, optimizer
    assert new() == {str(path)}
    assert (kept == 7.0).all()
    assert not list(path.iterdir())
    del kept
    assert not new()
    with AllLarge(model.groups()) as optimizer:  # no paths: where temporary files go
        model.train_with(optimizer, 1)
        entry = optimizer.state_for(model.embed)
        assert new() == {str(other)}
        assert not list(other.iterdir())
        del entry
    assert not new()


def test_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path("/dev/shm")
    if not shared.exists() or on_disk(shared) or not os.access(shared, os.W_OK) or not on_disk(tmp_path):
        pytest.skip("no tmpfs and disk here")
    there = mapped_files()
    with tempfile.TemporaryDirectory(dir=shared) as path:
        model, config = Model(torch.bfloat16), {"host_memory": 0, "paths": [path], "subgroup_numel": 1024}
        with AllLarge(model.groups(), offload=config) as optimizer:
            model.train_with(optimizer, 1)
            for folder, found in ((str(tmp_path), 1), (path, 0)):
                monkeypatch.setattr(tempfile, "tempdir", folder)
                saved = optimizer.state_dict()
                new = set(mapped_files()).difference(there)
                assert len(new) == found
                assert all(name.startswith(folder) for name in new)
                del saved, new
                gc.collect()


def limit_memory(monkeypatch: pytest.MonkeyPatch, folder: Path, nbytes: int) -> None:
    """Have this process's control group say how much memory is left."""
    monkeypatch.setattr(memory, "CGROUP", folder)
    (folder / "memory.max").write_text(str(nbytes))
    (folder / "memory.current").write_text("0")


def test_what_has_no_room_is_refused_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(torch.bfloat16)
    (path := tmp_path / "path").mkdir()
    needed = 12 * sum(-(-parameter.numel() // 16) * 16 for parameter in model.trained())
    config = {"host_memory": 0, "paths": [{"path": path, "max_bytes": "600KB"}], "subgroup_numel": 1024}
    with offload.AdamW(model.groups(), lr=1e-2, offload=config) as optimizer:
        model.train_with(optimizer, 1)
        before, there = everything(model, optimizer), mapped_files()
        optimizer.state_dict()  # it fits into memory, so far
        # A path with a limit, and a place for temporary files that has none left.
        limit(optimizer.engine, large_copy_bytes=4096)
        monkeypatch.setattr(state_copy, "room_bytes", lambda status: needed - 1)
        limit_memory(monkeypatch, tmp_path, needed)
        for use in (optimizer.state_dict, optimizer.state.items):
            with pytest.raises(offload.InfeasiblePlanError, match="host memory") as refused:
                use()
            assert refused.value.needed_bytes == needed
            assert refused.value.available_bytes["host memory"] == needed - 4096
            assert refused.value.available_bytes[tempfile.gettempdir()] == needed - 1
            assert refused.value.available_bytes[str(path)] < needed
            assert "TMPDIR" in str(refused.value)
            assert "save_checkpoint" in str(refused.value)
        assert mapped_files() == there
        limit_memory(monkeypatch, tmp_path, needed + 4096)
        assert len(optimizer.state_dict()["state"]) == 6
        assert mapped_files() == there
        assert same(everything(model, optimizer), before)
        model.train_with(optimizer, 2)


def test_a_disk_that_fails_meanwhile_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = Model(torch.bfloat16), Model(torch.bfloat16)
    config = {"host_memory": 0, "paths": [tmp_path], "subgroup_numel": 1024}
    with AllLarge(model.groups(), offload=config) as optimizer, AllLarge(twin.groups()) as other:
        for each, its in ((model, optimizer), (twin, other)):
            each.train_with(its, 1)
        there, write, count = mapped_files(), os.pwrite, itertools.count()

        def fail(*arguments: Any) -> int:
            if next(count) == 5:
                raise OSError(28, "No space left on device")
            return write(arguments[0], arguments[1][:1000], arguments[2])  # and short, every time

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            with pytest.raises(offload.TierFullError, match="copy of the state"):
                optimizer.state_dict()
            gc.collect()
            assert mapped_files() == there
            saved = optimizer.state_dict()
        for number, entry in other.state_dict()["state"].items():
            assert all(same_bits(tensor, saved["state"][number][name]) for name, tensor in entry.items())
        for each, its in ((model, optimizer), (twin, other)):
            each.train_with(its, 2)
        assert same(everything(model, optimizer), everything(twin, other))


KILLED = """
import os, signal, sys, torch, offload
from dataclasses import replace
class AllLarge(offload.AdamW):
    limits = replace(offload.AdamW.limits, large_copy_bytes=0)
parameter = torch.nn.Parameter(torch.zeros(100_000))
optimizer = AllLarge([parameter], offload={"host_memory": 0, "paths": [sys.argv[1]]})
parameter.grad = torch.ones(100_000)
optimizer.step()
one = optimizer.state_dict()
write = os.pwrite
def kill(*arguments):
    write(*arguments)
    print("killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwrite = kill
optimizer.state_dict()
"""


def test_a_kill_leaves_no_file(tmp_path: Path) -> None:
    for name in ("path", "tmp"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    command = [prepared.python(), "-c", KILLED, str(tmp_path / "path")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "killed\n"
    assert [entry.name[:8] for entry in (tmp_path / "path").iterdir()] == ["offload-"]
    assert not list((tmp_path / "tmp").iterdir())


def test_runs_are_copied_from_any_strides() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((24,), (4, 6), (3, 2, 4), (2, 3, 2, 2), (5, 1, 3), ()):
        numel = int(torch.Size(shape).numel())
        for order in itertools.permutations(range(len(shape))):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                source = torch.randn(numel, generator=generator).to(dtype).view(shape).permute(order)
                flat = source.reshape(-1).float()
                for start, end in itertools.combinations(range(numel + 1), 2):
                    out = torch.full((end - start,), float("nan"))
                    state_copy.copy_run(source, start, out)
                    assert torch.equal(out, flat[start:end])
    apart = torch.arange(60.0).view(6, 10)[::2, 1:8:3].expand(2, 3, 3)
    out = torch.empty(11)
    state_copy.copy_run(apart, 4, out)
    assert torch.equal(out, apart.reshape(-1)[4:15])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_other_strides_and_dtypes_is_loaded(streaming: Any, dtype: torch.dtype) -> None:
    model, again = Model(dtype), Model(dtype)
    config = streaming(subgroup_numel=1024)
    with offload.AdamW(model.groups(), lr=1e-2, offload=config) as optimizer:
        model.train_with(optimizer, 1)
        saved, before = optimizer.state_dict(), everything(model, optimizer)
        again.load_state_dict(model.state_dict())
    for entry in saved["state"].values():
        for name, tensor in entry.items():
            entry[name] = tensor.contiguous().double() if tensor.dim() != 2 else tensor.t().contiguous().t()
    with offload.AdamW(again.groups(), offload=config) as optimizer:
        optimizer.load_state_dict(saved)
        assert same(everything(again, optimizer), before)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensor: tensor.to_sparse(),
        lambda tensor: tensor.to("meta"),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor[:-1],
        lambda tensor: tensor.to(torch.complex64),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(streaming: Any, spoil: Callable[[torch.Tensor], Any]) -> None:
    with refused(streaming, "exp_avg_sq") as saved:
        last = max(saved["state"])
        number = next(n for n, entry in saved["state"].items() if entry["exp_avg"].dim() == 1)
        saved["state"][number]["exp_avg_sq"] = spoil(saved["state"][number]["exp_avg_sq"])
        assert last > 0


@contextlib.contextmanager
def refused(streaming: Any, match: str) -> Iterator[dict[str, Any]]:
    """Give a state dict to be spoiled; loading it has to fail, and to change nothing."""
    model = Model(torch.float32)
    with offload.AdamW(model.groups(), offload=streaming()) as optimizer:
        model.train_with(optimizer, 1)
        saved = optimizer.state_dict()
        model.train_with(optimizer, 2)
        before = everything(model, optimizer)
        yield saved
        with pytest.raises(offload.ConfigError, match=match):
            optimizer.load_state_dict(saved)
        assert same(everything(model, optimizer), before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_childs_copy_is_its_own(streaming: Any, tmp_path: Path) -> None:
    """It may save, and write to, what its parent goes on with."""
    model = Model(torch.bfloat16)
    with AllLarge(model.groups(), offload=streaming()) as optimizer:
        model.train_with(optimizer, 1)
        moments = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
    before, context = [moment.clone() for moment in moments], multiprocessing.get_context("fork")
    changed = context.Event()

    def child() -> None:
        changed.wait(60)
        torch.save(moments, tmp_path / "seen")
        for moment in moments:
            moment.fill_(8)
        torch.save(moments, tmp_path / "written")

    process = context.Process(target=child)
    process.start()
    for moment in moments:
        moment.fill_(7)
    changed.set()
    process.join(60)
    assert process.exitcode == 0
    assert all(map(same_bits, torch.load(tmp_path / "seen"), before))
    assert all(bool((moment == 8).all()) for moment in torch.load(tmp_path / "written"))
    assert all(bool((moment == 7).all()) for moment in moments)


def test_they_leave_what_is_promised(
    mounted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training and checkpoints have room on a disk that is small, and where temporary files go, too."""
    small = mounted("ext4", nbytes=6 << 20, made=("-m", "0", "-b", "4096", "-O", "^has_journal"))
    monkeypatch.setattr(tempfile, "tempdir", str(small))
    (path := small / "path").mkdir()
    parameter = torch.nn.Parameter(torch.zeros(50_000, dtype=torch.bfloat16))
    config = {"host_memory": 0, "paths": [path], "subgroup_numel": 4096, "checkpoints_kept": 1}
    with limited(offload.AdamW, large_copy_bytes=0)([parameter], offload=config) as optimizer:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        saved = [optimizer.state_dict()["state"][0] for _ in range(12)]
        lines = Path("/proc/self/maps").read_text().splitlines()
        # The others are in memory.
        assert 0 < sum(str(small) in line and "(deleted)" in line for line in lines) < 12
        for step in range(4):
            optimizer.step()
            optimizer.save_checkpoint(tmp_path / f"ck{step}")
            optimizer.wait_checkpoint()
        assert all(torch.equal(entry["exp_avg"], saved[0]["exp_avg"]) for entry in saved)
        assert (saved[0]["exp_avg"] > 0).all()
    del saved
    gc.collect()


@pytest.mark.slow
def test_saving_and_loading_take_little_memory(tmp_path: Path) -> None:
    """At most 256 MiB above training for 100 million parameters; here in proportion."""
    if not on_disk(tmp_path):
        pytest.skip("temporary files are in memory here")
    numel = 16 * 10**6
    command = [sys.executable, str(PROGRAM), str(tmp_path), "bfloat16", str(numel)]
    # What is freed goes back at once; else the allocator keeps what it likes of the program's own gradients.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = prepared.ran(command, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("state") > offload.AdamW.limits.large_copy_bytes
    limit = found.pop("training") + 256 * MIB * numel // 10**8
    for phase, nbytes in found.items():
        assert nbytes <= limit, f"{phase}: {nbytes} bytes of {limit}"
