"""Without `host_memory`, whatever trains with 0 of it trains, and no error advises to lower what nobody gave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.formats import COMPACT8, EXACT
from offload.measure import RatesFile, save_rates
from offload.measure.rates_file import machine_facts, versions
from offload.memory import arenas
from offload.plan import Home, PathRates, Rates
from offload.tiers import parse_place

MIB = 1 << 20

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "images": {"overlap": "backward"},
    "compact8": {"state_format": "compact8"},
    "few gradients": {"gradient_memory": 0},
    "gradients by what is left": {"gradient_memory": "auto"},
    "little staging": {"staging_memory": "2MiB"},
}


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have this process's control group say how much memory is left."""
    group = tmp_path / "group"
    group.mkdir()
    monkeypatch.setattr(arenas, "CGROUP", group)

    def limit(nbytes: int) -> None:
        (group / "memory.max").write_text(str(nbytes))
        (group / "memory.current").write_text("0")

    return limit


def measured(path: Path) -> RatesFile:
    return RatesFile(
        rates=Rates(30e9, (PathRates(4e9, 2e9, 1e-4, 1.5),), memory_bytes_per_s=90e9),
        cpu_bytes_per_s={EXACT: {1: 10e9}, COMPACT8: {1: 2e9}},
        machine=machine_facts(),
        versions=versions(),
        paths=(parse_place(str(path)).facts(),),
    )


def weights(count: int = 8) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((512, 256), 0.5, dtype=torch.bfloat16)) for _ in range(count)]


def make(tmp_path: Path, count: int = 8, **config: Any) -> offload.AdamW:
    (path := tmp_path / "path").mkdir(exist_ok=True)
    return offload.AdamW(weights(count), offload={"paths": [path], "subgroup_numel": 1 << 16, **config})


def step(optimizer: offload.AdamW) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    ("settings", "knows_rates"),
    [*((settings, False) for settings in SETTINGS.values()), ({}, True), (SETTINGS["compact8"], True)],
    ids=[*SETTINGS, "plain, rates", "compact8, rates"],
)
def test_whatever_trains_without_homes_trains_without_a_setting(
    tmp_path: Path, limited: Callable[[int], None], settings: dict[str, Any], knows_rates: bool
) -> None:
    (tmp_path / "path").mkdir()
    if knows_rates:
        save_rates(tmp_path / "rates.json", measured(tmp_path / "path"))
        settings = {**settings, "rates": tmp_path / "rates.json", "threads": 1}
    limited(1 << 40)
    with make(tmp_path, host_memory=0, **settings) as optimizer:
        least = optimizer.plan.plan
    with make(tmp_path, **settings) as optimizer:
        assert optimizer.plan.plan.home_bytes[Home.HOST] == least.state_bytes
    homes = []
    for beside in (-1, 0, 4096, 5 * MIB, least.host_bytes, 3 * least.host_bytes):
        available = least.host_bytes + beside
        limited(available)
        if beside < 0:
            for given in ({}, {"host_memory": 0}):
                with pytest.raises(offload.InfeasiblePlanError) as refused:
                    make(tmp_path, **settings, **given)
                assert "lower host_memory" not in str(refused.value)
                assert "give paths" not in str(refused.value)
            continue
        with make(tmp_path, host_memory=0, **settings) as optimizer:
            assert optimizer.plan.plan.host_bytes <= available
        with make(tmp_path, **settings) as optimizer:
            plan = optimizer.plan.plan
            home = plan.home_bytes[Home.HOST]
            assert home <= available // 2
            assert plan.host_bytes <= max(least.host_bytes, available - available // 2)
            homes.append(home)
            step(optimizer)
    assert homes[:2] == [0, 0]
    assert homes == sorted(homes)
    assert homes[-1] > 0


def test_what_is_added_stays_within_what_is_left(tmp_path: Path, limited: Callable[[int], None]) -> None:
    limited(1 << 40)
    with make(tmp_path, 1) as optimizer:
        first = optimizer.plan.plan
        assert first.home_bytes[Home.HOST] == first.state_bytes
        step(optimizer)
        limited(4 * MIB)
        optimizer.add_param_group({"params": weights(20)})
        plan = optimizer.plan.plan
        assert first.state_bytes <= plan.home_bytes[Home.HOST] < plan.state_bytes
        step(optimizer)


def test_advice_names_what_was_given(tmp_path: Path, limited: Callable[[int], None]) -> None:
    limited(MIB)
    wanted = {
        "lower host_memory or subgroup_numel, or give gradient_memory=0": {"host_memory": "8MiB"},
        "lower subgroup_numel, or give gradient_memory=0": {},
        "lower staging_memory or subgroup_numel, or give": {"staging_memory": "2MiB", "host_memory": 0},
        "lower gradient_memory or subgroup_numel, or free some": {"gradient_memory": "1MiB"},
        "lower subgroup_numel, or free some": {"gradient_memory": 0},
    }
    for words, config in wanted.items():
        with pytest.raises(offload.InfeasiblePlanError, match=words):
            make(tmp_path, **config)
    with pytest.raises(
        offload.InfeasiblePlanError, match=r"there is host memory: .*; give paths to stream state from"
    ):
        offload.AdamW(weights(), offload={"subgroup_numel": 1 << 16})
