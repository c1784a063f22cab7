"""What ranks that are given one config keep apart (`OffloadConfig.for_rank`), and what each takes of its node."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload import ConfigError, OffloadConfig
from offload.config import LEAST_BUDGET
from offload.device.none import NO_LANES
from offload.layout import build_layout
from offload.session import setup


def test_each_rank_has_a_directory_of_its_own_and_shares_the_lock(tmp_path: Path) -> None:
    config = OffloadConfig(host_memory="1GiB", paths=[{"path": str(tmp_path), "max_bytes": "1GB"}])
    for rank in (0, 1, 1):
        (path,) = config.for_rank(rank).path_configs
        assert path.path == str(tmp_path / f"rank-{rank}")
        assert Path(path.path).is_dir()
        assert path.lock_path == str(tmp_path)
        assert path.max_bytes == 10**9
    assert config.for_rank(1).host_memory == 2**30


def test_engines_of_one_process_divide_its_budgets() -> None:
    paths = [{"path": "s3://bucket", "max_bytes": 40000}, "s3://other"]
    config = OffloadConfig(
        host_memory={"node0": 20000, "node1": 30000}, gpu_memory="auto", staging_memory=9999, paths=paths
    )
    part = config.for_part(1, 4)
    assert (part.host_memory, part.gpu_memory, part.staging_memory) == ({"node0": 5000, "node1": 7500}, "auto", 9999)
    assert [path.max_bytes for path in part.path_configs] == [10000, None]
    assert config.for_part(4, 4) == config
    assert OffloadConfig().for_part(1, 3) == OffloadConfig()
    assert OffloadConfig(host_memory=7000).for_part(0, 0).host_memory == 0
    assert OffloadConfig(host_memory=7000).for_part(1, 10**6).host_memory == LEAST_BUDGET


def test_prefixes_of_a_bucket_are_cut_by_rank() -> None:
    config = OffloadConfig(paths=[{"path": "s3://bucket/run/", "share": 3}, "s3://bucket"])
    made = config.for_rank(2).path_configs
    assert [path.path for path in made] == ["s3://bucket/run/rank-2", "s3://bucket/rank-2"]
    assert made[0].share == 3


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"paths\[0\].*the directory does not exist; create it first"):
        OffloadConfig(paths=[str(tmp_path / "none")]).for_rank(0)
    (tmp_path / "rank-0").write_text("in the way")
    with pytest.raises(ConfigError, match=r"paths\[0\].*cannot be written"):
        OffloadConfig(paths=[str(tmp_path)]).for_rank(0)


def test_errors_call_a_config_what_its_owner_does() -> None:
    with pytest.raises(ConfigError, match=r"^state\.hots_memory"):
        OffloadConfig.from_dict({"hots_memory": 1}, "state")


@pytest.mark.parametrize("launcher", setup.LOCAL_RANKS)
@pytest.mark.parametrize(("is_initialized", "said", "sharing"), [(True, "4", 4), (True, None, 1), (False, "4", 1)])
def test_ranks_of_a_node_divide_cores_and_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_initialized: bool,
    said: str | None,
    sharing: int,
    launcher: str,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(setup, "available_bytes", lambda: 80000)
    monkeypatch.setattr(setup.os, "sched_getaffinity", lambda pid: set(range(8)))
    for name in setup.LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(launcher, said)
    layout = build_layout([], 1024)
    assert setup.default_threads(NO_LANES) == 8 // sharing
    paths = [str(tmp_path)]
    assert setup.first_budgets(OffloadConfig(paths=paths), layout, NO_LANES, 0).host_bytes == 40000 // sharing
    given = OffloadConfig(paths=paths, host_memory=30000)
    assert setup.first_budgets(given, layout, NO_LANES, 0).host_bytes == 30000
