"""Sessions start from measured rates where there are some, and learn from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.formats import COMPACT8, COMPACT16, EXACT, FORMATS, StateFormat
from offload.measure import RatesFile, default_rates_file, load_rates, save_rates
from offload.measure.observe import HISTORY
from offload.measure.rates_file import machine_facts, versions
from offload.plan import NO_GPU, GpuRates, PathRates, Rates, estimate
from offload.predict import predict
from offload.tiers import parse_place

GB = 1e9
Configure = Callable[..., offload.OffloadConfig]


def measured(path: Path) -> RatesFile:
    return RatesFile(
        rates=Rates(30 * GB, (PathRates(4 * GB, 2 * GB, 1e-4, 1.5),), GpuRates(9 * GB, GB, GB), 90 * GB),
        cpu_bytes_per_s={EXACT: {1: 10 * GB, 2: 18 * GB}, COMPACT8: {1: 2 * GB}},
        machine=machine_facts(),
        versions=versions(),
        paths=(parse_place(str(path)).facts(),),
    )


def make(config: offload.OffloadConfig) -> offload.AdamW:
    return offload.AdamW([torch.nn.Parameter(torch.zeros(400_000, dtype=torch.bfloat16))], offload=config)


def test_a_session_starts_from_a_file_and_learns(tmp_path: Path, streaming: Configure) -> None:
    file = tmp_path / "rates.json"
    save_rates(file, measured(tmp_path))
    with make(streaming(rates=file, threads=1, subgroup_numel=1 << 16)) as optimizer:
        rates = optimizer.engine.rates
        assert rates.paths == measured(tmp_path).rates.paths
        assert rates.cpu_bytes_per_s == 10 * GB
        assert rates.gpu == NO_GPU  # nothing of this session runs there
        # As the fifth step begins three have been looked at; before that, the file's rates are one of the last three.
        for _ in range(2 + HISTORY):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(400_000, dtype=torch.bfloat16)
            optimizer.step()
        learnt = optimizer.engine.rates
        # What is learnt of the CPU depends on what ran beside it (tests/unit/test_learnt_rates.py).
        assert learnt.paths[0].read_bytes_per_s != rates.paths[0].read_bytes_per_s
        assert learnt.paths[0].latency_s <= rates.paths[0].latency_s  # steps that moved much bound it
        assert learnt.reaction_s > 0


@pytest.mark.parametrize("state_format", FORMATS, ids=str)
def test_a_step_is_predicted_by_the_rates_of_its_formats(
    state_format: StateFormat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In memory, where the update is all that a step does; small parameters are exact beside compact8."""
    caplog.set_level("INFO", "offload")
    file, name = tmp_path / "rates.json", state_format.name
    save_rates(file, measured(tmp_path))
    big, small = (torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((600, 1000), (200_000,)))
    settings = offload.OffloadConfig(state_format=name, rates=file, threads=1)
    with offload.AdamW([("big", big), ("small", small)], offload=settings) as optimizer:
        plan, rates = optimizer.engine.plan, optimizer.engine.rates
        shown = str(optimizer.plan)
    seconds = {
        EXACT: 12 * 800_000 / (10 * GB),
        COMPACT16: 12 * 800_000 / (10 * GB),  # no rate: as many parameters a second as exact
        COMPACT8: 12 * 200_000 / (10 * GB) + (5 + 2 / 64) * 600_000 / (2 * GB),
    }[state_format]
    prediction = predict(plan, rates)
    assert prediction.busy_s["cpu"] == pytest.approx(seconds, rel=0.02)  # what is stored is padded to sectors
    assert estimate(plan, rates).lane_s["cpu"] == pytest.approx(seconds, rel=0.02)
    assert prediction.step_s == pytest.approx(seconds, rel=0.1)
    assert ("no rates of the update of compact16 state" in caplog.text) == (state_format is COMPACT16)
    assert (f"  {name} " in shown) == (state_format is not EXACT)


def test_auto_takes_this_machine_s_file(
    tmp_path: Path, streaming: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "offload")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with make(streaming()) as optimizer:
        assert optimizer.engine.rates.paths != measured(tmp_path).rates.paths
    assert "rates from a short probe" in caplog.text
    save_rates(default_rates_file(), measured(tmp_path))
    caplog.clear()
    with make(streaming()) as optimizer:
        assert optimizer.engine.rates.paths == measured(tmp_path).rates.paths
    assert caplog.text.count(f"rates from {default_rates_file()}") == 1


def test_a_named_file_must_fit(tmp_path: Path, streaming: Configure) -> None:
    file, other = tmp_path / "rates.json", {"path": "/x", "file_system": "y", "device": "z"}
    save_rates(file, dataclasses.replace(measured(tmp_path), paths=(other,)))
    with pytest.raises(offload.ConfigError, match=r"no rates for .*only for /x") as caught:
        make(streaming(rates=str(file)))
    assert str(file) in str(caught.value)
    assert [found.name for found in tmp_path.iterdir()] == ["rates.json"]  # no store was opened


@pytest.mark.parametrize("rates", ["", 3, None, True])
def test_what_is_no_file_at_all(rates: Any) -> None:
    with pytest.raises(offload.ConfigError, match=r'rates: .* "auto" or name a file'):
        offload.OffloadConfig(rates=rates)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probe")
def test_what_the_command_writes_is_what_a_session_reads(tmp_path: Path, streaming: Configure) -> None:
    from offload import cli

    file = tmp_path / "rates.json"
    arguments = ["--paths", str(tmp_path), "--out", str(file), "--seconds", "0.3", "--quiet"]
    assert cli.main(["probe", *arguments]) == 0
    with make(streaming(rates=file, threads=1)) as optimizer:
        assert optimizer.engine.rates == load_rates(file).for_session([str(tmp_path)], 1, {EXACT: 1})
        assert "bound by" in str(optimizer.plan)
