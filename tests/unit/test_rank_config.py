"""`OffloadConfig.for_rank`: what ranks that are given one config keep apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload import ConfigError, OffloadConfig


def test_each_rank_has_a_directory_of_its_own_and_shares_the_lock(tmp_path: Path) -> None:
    config = OffloadConfig(host_memory="1GiB", paths=[{"path": str(tmp_path), "max_bytes": "1GB"}])
    for rank in (0, 1, 1):
        (path,) = config.for_rank(rank).path_configs
        assert path.path == str(tmp_path / f"rank-{rank}")
        assert Path(path.path).is_dir()
        assert path.lock_path == str(tmp_path)
        assert path.max_bytes == 10**9
    assert config.for_rank(1).host_memory == 2**30


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
