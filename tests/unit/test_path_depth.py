"""Choosing how many requests a path has in flight."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from memory_tier import MemoryTier

import offload
from offload._native import CompletionQueue
from offload.errors import ConfigError
from offload.measure import choose_depth, tune_depth
from offload.measure.depth import DEPTHS, TILE_BYTES, TILES, goes_on_rising
from offload.memory.arenas import Arena
from offload.tiers import StoreOptions, open_tier
from offload.tiers.asyncfile import supports_direct

ENOUGH = 2 * TILES * TILE_BYTES[0]


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({1: 5.0}, 1),
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}, 16),
        ({1: 1.0, 2: 1.0, 4: 1.0}, 1),
        ({1: 0.969, 2: 1.0}, 2),
        ({1: 0.97, 2: 1.0}, 1),
        ({1: 9.0, 2: 2.0, 4: 9.1}, 1),
        ({4: 3.0, 1: 1.0, 2: 2.95}, 2),
    ],
)
def test_the_smallest_that_is_nearly_the_best(rates: dict[int, float], chosen: int) -> None:
    assert choose_depth(rates) == chosen


def test_deeper_is_tried_while_it_may_gain() -> None:
    assert goes_on_rising({})
    assert goes_on_rising({1: 1.0, 2: 1.0})
    assert not goes_on_rising({1: 1.0, 2: 1.0, 4: 1.02})
    assert goes_on_rising({1: 1.0, 2: 2.0, 4: 2.0})
    assert not goes_on_rising({1: 1.0, 2: 2.0, 4: 2.0, 8: 2.0})


def tuned(seconds: Callable[[int], float], nbytes: int = ENOUGH) -> tuple[MemoryTier, dict[int, float]]:
    """Tune a tier on which everything takes `seconds(depth)`."""
    queue = CompletionQueue()
    tier = MemoryTier(uuid.uuid4(), queue)
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += seconds(tier.depth)
        return now_s

    arena = Arena(nbytes)
    tier.set_depth(7)
    rates = tune_depth(tier, queue, arena.address, arena.nbytes, clock)
    assert queue.wait(0.0) == []
    return tier, rates


def test_a_path_works_with_what_was_best() -> None:
    tier, rates = tuned(lambda depth: 1e-3 / min(depth, 8))
    assert (tier.depth, list(rates)) == (8, list(DEPTHS))
    assert rates[8] == pytest.approx(4 * rates[2])
    assert rates[2] == pytest.approx(ENOUGH / 0.5e-3)
    tier, rates = tuned(lambda depth: 1e-3 * depth)
    assert (tier.depth, list(rates)) == (2, [2, 4, 8])


@pytest.mark.parametrize("before_s", [0.5, 0.001])
def test_a_path_that_is_too_slow_is_left_alone(before_s: float) -> None:
    # Found out while it is filled, or when depths are tried.
    tier, rates = tuned(lambda depth: before_s if depth == 7 else 0.4)
    assert (tier.depth, rates) == (7, {})


def test_too_little_memory_or_room_says_nothing(tmp_path: Path) -> None:
    tier, rates = tuned(lambda depth: 1e-3, ENOUGH - 1)
    assert (tier.depth, rates) == (7, {})
    queue, arena = CompletionQueue(), Arena(ENOUGH)
    for options in (StoreOptions(depth=3, max_bytes=ENOUGH), StoreOptions(depth=3, io_backend="asyncio")):
        path = open_tier(str(tmp_path), uuid.uuid4(), queue, options=options)
        assert tune_depth(path, queue, arena.address, arena.nbytes) == {}
        assert path.depth == 3
        path.close()


def test_a_real_path_is_tuned_once_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    milliseconds = itertools.count()  # by this clock no path is too slow to be tuned
    monkeypatch.setattr(tune_depth, "__defaults__", (lambda: next(milliseconds) / 1000,))
    found = []
    for number, depth in enumerate((None, 1, 5)):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(1 << 20))
        folder = tmp_path / str(number)
        folder.mkdir()
        config = offload.OffloadConfig(
            host_memory=0,
            paths=[{"path": str(folder), "depth": depth}],
            subgroup_numel=1 << 17,
            staging_memory=6 * 12 << 17,  # enough for tiles that tell
        )
        caplog.clear()
        with caplog.at_level(logging.INFO, "offload"), offload.AdamW([weight], lr=1e-2, offload=config) as optimizer:
            for _ in range(3):
                weight.grad = torch.randn(1 << 20)
                optimizer.step()
        assert caplog.text.count("requests of each direction") == (depth is None)
        assert caplog.text.count("GB/s with 2") == (depth is None and supports_direct(str(folder)))
        found.append(weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("depth", [0, 65, -1, 1.0, True, "4"])
def test_depths_that_make_no_sense(tmp_path: Path, depth: object) -> None:
    with pytest.raises(ConfigError, match=r"paths\[0\]\.depth.*from 1 to 64"):
        offload.OffloadConfig(paths=[{"path": str(tmp_path), "depth": depth}])
