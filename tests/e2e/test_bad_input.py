"""Bad input is an error that names the field, what was found and what to do; before any file is touched."""

from __future__ import annotations

import errno
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.config import PathConfig


def make(parameters: Any = None, **settings: Any) -> None:
    if parameters is None:
        parameters = [torch.nn.Parameter(torch.zeros(5000).bfloat16())]
    offload.AdamW(parameters, offload=offload.OffloadConfig(**settings)).close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host_memory": -1}, "host_memory"),
        ({"host_memory": "8 gigs"}, "8 gigs"),
        ({"host_memory": 64}, 'write "64GiB" if that is meant'),
        ({"host_memory": True}, "host_memory"),
        ({"subgroup_numel": 0}, "subgroup_numel"),
        ({"subgroup_numel": 1.5}, "subgroup_numel"),
        ({"threads": 0}, "threads"),
        ({"paths": "/tmp"}, "list of directories"),
        ({"paths": [{"dir": "/tmp"}]}, "directory"),
        ({"paths": [{"path": "/tmp", "size": 3}]}, "size"),
        ({"paths": [{"path": "/tmp", "share": 0}]}, "share"),
        ({"paths": [3]}, "paths"),
        ({"gradient_dtype": "half"}, "gradient_dtype"),
        ({"gradient_memory": -1, "paths": ["/tmp"]}, "gradient_memory"),
        ({"gradient_memory": "a lot", "paths": ["/tmp"]}, "gradient_memory"),
        ({"placement": "tpu"}, "placement"),
        ({"placement": 1.5}, "placement"),
        ({"placement": True}, "placement"),
        ({"gpu_memory": "1 gig"}, "gpu_memory"),
        ({"io_backend": "magic"}, "io_backend"),
        ({"keep_grads": "no"}, "keep_grads"),
        ({"checkpoints_kept": -1}, "checkpoints_kept"),
        ({"checksum": "yes"}, "checksum"),
        ({"shard": 2}, "shard: 2 .* true or false"),
    ],
)
def test_config_errors_name_the_field(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(offload.ConfigError, match=words):
        offload.OffloadConfig(**settings)


def test_unknown_keys() -> None:
    with pytest.raises(offload.ConfigError, match=r"hostmemory.*host_memory"):
        offload.OffloadConfig.from_dict({"hostmemory": 1})
    with pytest.raises(offload.ConfigError, match="hostmemory"):
        offload.AdamW([torch.nn.Parameter(torch.zeros(1))], offload={"hostmemory": 1})
    with pytest.raises(offload.ConfigError, match="OffloadConfig"):
        offload.AdamW([torch.nn.Parameter(torch.zeros(1))], offload=3)  # type: ignore[arg-type]
    with pytest.raises(offload.ConfigError, match=r'OffloadConfig\.path: .*did you mean "paths"\? known are'):
        offload.OffloadConfig(path="/mnt/nvme0")  # type: ignore[call-arg]
    with pytest.raises(offload.ConfigError, match=r'paths\[0\]\.max_byte: 1 .*did you mean "max_bytes"\?'):
        offload.OffloadConfig(paths=[{"path": "/mnt/nvme0", "max_byte": 1}])


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    for paths, words in [
        ([tmp_path / "absent"], "does not exist"),
        ([tmp_path / "file"], "not a directory"),
        ([tmp_path / "one", tmp_path / "one"], "same place"),
        ([tmp_path / "one", tmp_path / "link"], "same place"),
        (["s3://bucket/run", "s3://bucket/run/"], "same place"),
        (["s3://"], "s3://bucket/prefix"),
        (["ftp://host/run"], "s3://bucket/prefix"),
    ]:
        with pytest.raises(offload.ConfigError, match=words) as caught:
            make(host_memory=0, paths=paths)
        assert "paths[" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "one"]
    assert not list((tmp_path / "one").iterdir())


def test_a_read_only_file_system(mounted: Callable[..., Path]) -> None:
    with pytest.raises(offload.ConfigError, match="cannot be written"):
        make(host_memory=0, paths=[mounted("tmpfs", "ro,size=1m")])


def test_two_paths_on_one_device_work_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    make(host_memory=0, paths=[tmp_path / "one", tmp_path / "two"])
    assert "one device" in caplog.text
    device = os.stat(tmp_path).st_dev
    assert f"{os.major(device)}:{os.minor(device)}" in caplog.text


def test_state_that_fits_nowhere(tmp_path: Path) -> None:
    with pytest.raises(offload.InfeasiblePlanError, match="paths") as caught:
        make(host_memory=5000)
    assert caught.value.needed_bytes >= 5000 * 12
    assert caught.value.available_bytes == {"host_memory": 5000}
    with pytest.raises(offload.InfeasiblePlanError, match="add a path"):
        make(host_memory=0, paths=[{"path": tmp_path, "max_bytes": "50KB"}])
    with pytest.raises(offload.InfeasiblePlanError, match="staging"):
        make(host_memory=0, paths=[tmp_path], staging_memory=4096, subgroup_numel=4096)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "counts", "words"),
    [
        ({"exp_av": torch.zeros(64)}, None, "use master, exp_avg, exp_avg_sq"),
        ({"exp_avg": [0.0] * 64}, None, "dense tensor"),
        ({"exp_avg": torch.zeros(64).to_sparse()}, None, "dense tensor"),
        ({"exp_avg": torch.zeros(64).to(torch.complex64)}, None, "dense tensor"),
        ({"exp_avg": torch.zeros(63)}, None, "64 elements"),
        ({"exp_avg": torch.empty(64, device="meta")}, None, "dense tensor"),
        ({}, torch.empty((), device="meta"), "number of updates"),
        ({}, -5, "number of updates"),
        ({}, 2.7, "number of updates"),
        ({}, 1e30, "number of updates"),
        ({}, float("nan"), "number of updates"),
    ],
)
def test_state_that_cannot_be_written_breaks_nothing(values: dict[str, Any], counts: Any, words: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(64))
    with offload.AdamW([parameter]) as optimizer:
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            with pytest.raises(offload.ConfigError, match=words):
                optimizer.engine.state.write({0: values}, None if counts is None else {0: counts})
        assert optimizer.engine.step_count(0) == 2


def test_a_bad_group_is_not_added() -> None:
    good = torch.nn.Parameter(torch.zeros(3))
    with offload.AdamW([good]) as optimizer:
        with pytest.raises(offload.ConfigError):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]})
        with pytest.raises(offload.ConfigError):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))], "lr": -1})
        assert len(optimizer.param_groups) == 1
        good.grad = torch.ones(3)
        optimizer.step()


def test_gradients_that_cannot_be_used() -> None:
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    with offload.AdamW(embedding.parameters()) as optimizer:
        with pytest.raises(offload.ConfigError, match="sparse"):
            embedding(torch.tensor([1])).sum().backward()
        embedding.zero_grad()
        before = embedding.weight.detach().clone()
        optimizer.step()
        assert torch.equal(embedding.weight, before)


class Unshown:
    def __repr__(self) -> str:
        raise ValueError("nobody can say what this is")


NINES = "9" * 400
SIZES = [NINES, f"{NINES}.5GiB", "9" * 5000, "9PiB" * 2, 10**30, 10**400, 10**5000, Unshown()]
NUMBERS = [1 << 64, 10**30, 10**400, 10**5000, -(10**5000), Unshown()]
OF_A_PATH = [10**400, 10**5000, float("inf"), float("nan"), Unshown()]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((field, SIZES) for field in ("host_memory", "staging_memory", "gpu_memory")),
        *((field, NUMBERS) for field in ("subgroup_numel", "threads", "checkpoints_kept", "placement")),
        *((field, NUMBERS) for field in ("path_lock", "stall_timeout_s")),
        *((field, OF_A_PATH) for field in ("max_bytes", "share", "depth")),
    ],
)
def test_values_that_are_too_large_are_named_in_short(tmp_path: Path, field: str, values: list[Any]) -> None:
    for value in values:
        makes: list[Callable[[], object]] = [lambda value=value: offload.OffloadConfig(**{field: value})]
        name = field
        if values is OF_A_PATH:
            given, name = {"path": str(tmp_path), field: value}, rf"paths\[0\]\.{field}"
            makes = [
                lambda given=given: offload.OffloadConfig(paths=[given]),
                lambda given=given: offload.OffloadConfig(paths=[PathConfig(**given)]),
            ]
        for make_config in makes:
            with pytest.raises(offload.ConfigError, match=f"^{name}: ") as caught:
                make_config()
            assert len(str(caught.value)) < 1000


def test_shares_of_any_ratio_can_be_added_up(tmp_path: Path) -> None:
    shares = [1e99, 1e99, 1e-300]
    paths = [{"path": tmp_path / str(number), "share": share} for number, share in enumerate(shares)]
    for path in paths:
        path["path"].mkdir()
    make(host_memory=0, paths=paths)


@pytest.mark.parametrize("name", ["\udcff", "\ud800", "a\0b"], ids=["bytes", "half", "zero"])  # noqa: PT014
def test_names_that_are_not_utf8(tmp_path: Path, name: str) -> None:
    path = f"{tmp_path}/{name}"
    if name == "\udcff":
        os.mkdir(os.fsencode(path))
        with pytest.raises(offload.ConfigError, match=r"lock_path.*UTF-8"):
            offload.OffloadConfig(paths=[{"path": tmp_path, "lock_path": path}])
    for paths in ([path], [{"path": path}]):
        with pytest.raises(offload.ConfigError, match="UTF-8"):
            offload.OffloadConfig(paths=paths)
    with offload.AdamW([torch.nn.Parameter(torch.zeros(3))]) as optimizer:
        if name != "\udcff":
            for use in (optimizer.save_checkpoint, optimizer.load_checkpoint):
                with pytest.raises(offload.ConfigError, match="path"):
                    use(path)
        with pytest.raises(offload.ConfigError, match="path"):
            optimizer.save_checkpoint("")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("can't start new thread"), "no more threads"),
        (RuntimeError(os.strerror(errno.EAGAIN)), "no more threads"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"), "no more memory"),
        (MemoryError(), "no more memory"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
    ],
)
def test_what_runs_out_as_a_session_opens_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise error

    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        with pytest.raises(offload.OffloadError, match=words) as caught:
            make(host_memory=0, paths=[tmp_path], io_backend="threads")
    assert caught.value.__cause__ is error
    assert not list(tmp_path.iterdir())


def test_a_commit_without_a_thread_costs_the_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    plain = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "offload-commit":
            raise RuntimeError("can't start new thread")
        plain(self)

    with offload.AdamW([parameter]) as optimizer:
        with monkeypatch.context() as refusing:
            refusing.setattr(threading.Thread, "start", refuse)
            optimizer.save_checkpoint(tmp_path / "ck")
            with pytest.raises(offload.CheckpointError, match="start new thread"):
                optimizer.wait_checkpoint()
        parameter.grad = torch.ones(3)
        optimizer.step()
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()


def test_asyncio_without_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that could not be made is forgotten without a word on stderr."""
    ignored: list[Any] = []

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as refusing:
        refusing.setattr(sys, "unraisablehook", ignored.append)
        refusing.setattr(socket, "socketpair", refuse)
        with pytest.raises(offload.OffloadError, match="EMFILE"):
            make(host_memory=0, paths=[tmp_path], io_backend="asyncio")
        gc.collect()
    assert not ignored
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "folder", "fifo", "large", "deep", "numbers", "threads"])
def test_files_of_rates_that_are_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_text(" " * (5 << 20))
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "numbers").write_text(f'{{"format": 1, "rates": {{"cpu_bytes_per_s": {"9" * 400}, "paths": []}}}}')
    (tmp_path / "threads").write_text(f'{{"format": 1, "rates": {{"cpu_bytes_per_s": {{"{"9" * 5000}": 1}}}}}}')
    with pytest.raises(offload.ConfigError, match="rates"):
        make(rates=tmp_path / name)


def test_parameters_that_were_replaced() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    with offload.AdamW([first]) as optimizer:
        optimizer.param_groups[0]["params"] = [second]
        second.grad = torch.ones_like(second)
        with pytest.raises(offload.ConfigError, match="make the optimizer after fully_shard"):
            optimizer.step()
