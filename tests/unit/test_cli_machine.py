"""Words for a machine and the rates that they stand for (`offload machine`); files of well-known machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from offload import cli
from offload.cli.machine import CARDS, CORE_BYTES_PER_S, Machine
from offload.cli.scenario import Scenario, ask
from offload.cli.shapes import Model
from offload.config import parse_bytes
from offload.dtypes import DtypeCode
from offload.layout import Parameter, build_layout
from offload.measure import load_rates
from offload.measure.rates_file import MACHINES
from offload.plan import Budgets, PathBudget, choose_plan, estimate

GB, GIB = 10**9, 1 << 30
DESKTOP = ["--gpu", "1TB/s:24GiB", "--link", "25GB/s", "--host", "60GB/s:64GiB", "--drive", "7GB/s,5GB/s:2TB"]


def written(tmp_path: Path, *words: str) -> dict:
    file = tmp_path / "machine.json"
    assert cli.main(["machine", *words, "--out", str(file), "--quiet"]) == 0
    return json.loads(file.read_text())


def test_words_are_rates(tmp_path: Path) -> None:
    found = written(tmp_path, *DESKTOP, "--cores", "16")
    rates = found["rates"]
    assert found["machine"] == {"cpu": "16 cores", "cores": 16, "memory_bytes": 64 * GIB, "gpu": "1 x 24.0 GiB"}
    assert rates["cpu_bytes_per_s"] == {
        "exact": pytest.approx(60e9 * 12 / 28)
    }  # by memory: 12 bytes of state move 28
    assert rates["gpu"]["update_bytes_per_s"] == pytest.approx(1e12 * 12 / 28)
    assert rates["gpu"]["h2d_bytes_per_s"] == rates["gpu"]["d2h_bytes_per_s"] == 25e9
    assert rates["gpu"]["memory_bytes"] == 24 * GIB
    (path,) = rates["paths"]
    assert (path["read_alone_bytes_per_s"], path["write_alone_bytes_per_s"]) == (7e9, 5e9)
    assert (path["read_bytes_per_s"], path["write_bytes_per_s"]) == (3.5e9, 2.5e9)
    assert found["paths"] == [{"path": "/mnt/drive0", "bytes": 2 * 10**12}]
    assert not found["warnings"]  # nothing was assumed


def test_few_cores_are_slower_than_memory(tmp_path: Path) -> None:
    found = written(tmp_path, *DESKTOP, "--cores", "2")
    assert found["rates"]["cpu_bytes_per_s"] == {"exact": 2 * CORE_BYTES_PER_S}


def test_every_figure_has_a_source_and_every_guess_is_told(tmp_path: Path) -> None:
    found = written(tmp_path, "--gpu", "24GiB", "--host", "64GiB")
    given = {name for name, value in found["rates"].items() if value and not isinstance(value, dict | list | tuple)}
    given |= {f"gpu.{name}" for name, value in found["rates"]["gpu"].items() if value and name != "memory_cost"}
    assert given | {"cpu_bytes_per_s"} == set(found["source"])
    (warning,) = found["warnings"]
    for words in ("--cores", "--host 80GB/s:64GiB", "--gpu 1TB/s:24GiB", "--link"):
        assert words in warning


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_what_its_data_sheet_says(tmp_path: Path, name: str) -> None:
    card = CARDS[name]
    assert card.source
    found = written(tmp_path, "--gpu", f"2x{name.upper().replace('-', ' ')}", "--host", "64GiB")
    assert found["machine"]["gpu"] == f"2 x {card.name}"
    rates = load_rates(tmp_path / "machine.json").rates
    assert rates.gpu.memory_bytes == card.memory_bytes
    assert rates.gpu.h2d_bytes_per_s == pytest.approx(0.7 * {4: 31.5e9, 5: 63e9}[card.pcie])
    assert rates.compute_flops_per_s == pytest.approx(0.4 * card.flops_per_s)


def test_a_file_says_what_the_words_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, *DESKTOP, "--cores", "16")
    model = ["plan", "--model", "qwen-0.5b", "--json"]
    assert cli.main([*model, *DESKTOP, "--cores", "16"]) == 0
    by_words = json.loads(capsys.readouterr().out)
    assert cli.main([*model, "--rates", str(tmp_path / "machine.json")]) == 0
    assert json.loads(capsys.readouterr().out) == by_words


def test_what_is_known_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["machine", "--gpu", "rtx-4090", "--host", "64GiB"]) == 0
    printed = capsys.readouterr().out
    assert "1 x RTX 4090" in printed
    assert "NVIDIA Ada white paper" in printed


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "rtx_4090"])
def test_a_card_may_be_written_otherwise(tmp_path: Path, name: str) -> None:
    assert written(tmp_path, "--gpu", name, "--host", "64GiB")["machine"]["gpu"] == "1 x RTX 4090"


@pytest.mark.parametrize("size", ["100GB", "40GiB", "3090GiB"])
def test_a_size_is_no_card(tmp_path: Path, size: str) -> None:
    found = written(tmp_path, "--gpu", size, "--host", "64GiB")
    assert found["rates"]["gpu"]["memory_bytes"] == parse_bytes("", size)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "24"], "24GiB"),
        (["--gpu", "fast"], "rtx-4090"),
        (["--gpu", "fast"], "its FLOP/s are unknown"),
        (["--gpu", "4090"], "did you mean rtx-4090?"),
        (["--gpu", "rtx-4090-ti"], "did you mean rtx-4090?"),
        (["--gpu", "a100"], "did you mean a100-80?"),
        (["--gpu", "0x24GiB"], "from 1 to 64"),
        (["--gpu", "24GiB:1TB/s"], "--gpu"),
        (["--link", "25"], '"3.5GB/s"'),
        (["--link", "25GB"], '"3.5GB/s"'),
        (["--link", "0GB/s"], "more than 0 bytes a second"),
        (["--link", "25GB/s"], "describe the GPU"),
        (["--host", "0GiB"], "more than 0 bytes"),
        (["--host=-64GiB"], "--host"),
        (["--drive", "2TB"], '"3.5GB/s:2TB"'),
        (["--drive", "3GB/s:0B"], "more than 0 bytes"),
        (["--drive", "3GB/s,:2TB"], "--drive"),
        (["--drive", *["3GB/s:2TB"] * 65], "64 at most"),
        (["--cores", "0"], "from 1 to"),
        (["--gpu", "24GiB"], "--host is missing; say how much host memory"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_words_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    host = [] if "--host" in words[0] or "how much" in message else ["--host", "64GiB"]
    assert cli.main(["machine", *host, *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_a_machine_is_described_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--params", "1e9", "--host", "64GiB", "--rates", "h100-node"]) == 2
    assert "or give a file" in capsys.readouterr().err


# Well-known machines

KNOWN = sorted(MACHINES.glob("*.json"))


def figures(values: Any, name: str = "") -> Iterator[str]:
    """Yield the name of every number, as in "gpu.h2d_bytes_per_s" or "paths[0].read_bytes_per_s"."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from figures(value, f"{name}.{key}" if name else key)
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from figures(value, f"{name}[{number}]")
    else:
        yield name


def test_there_are_machines() -> None:
    assert {"h100-node", "a100-node"} <= {file.stem for file in KNOWN}


@pytest.mark.parametrize("file", KNOWN, ids=lambda file: file.stem)
def test_every_figure_of_a_known_machine_has_a_source(file: Path) -> None:
    values = json.loads(file.read_text())
    assert set(figures(values["rates"])) == set(values["source"])
    assert all(text.strip() for text in values["source"].values())


@pytest.mark.parametrize("file", KNOWN, ids=lambda file: file.stem)
def test_a_plan_can_be_made_from_them(file: Path) -> None:
    rates = load_rates(file).rates.shared_by(4)
    layout = build_layout([Parameter("p", 10**9, DtypeCode.BFLOAT16, 0)], 10**8)
    offers = tuple(PathBudget(f"path {number}", 1 << 40) for number in range(len(rates.paths)))
    host_bytes = 0 if offers else 1 << 40
    budgets = Budgets(host_bytes, None, offers, gpu_staging_bytes=4 << 30, weights_on_gpu=True)
    cost = estimate(choose_plan(layout, budgets, rates), rates)
    assert 0 < cost.bound_s <= cost.step_s < 60


@pytest.mark.parametrize("file", KNOWN, ids=lambda file: file.stem)
@pytest.mark.parametrize("placement", ["auto", "cpu", "gpu", 0.5])
def test_four_ranks_on_one_node_are_predicted_as_planned(file: Path, placement: str | float) -> None:
    rates = load_rates(file).rates
    params = 7 * 10**9
    host_memory = 0 if rates.paths else 12 * params
    model, machine = Model(params=params, weights_on="gpu"), Machine(rates=rates, ranks=4)
    answer = ask(Scenario.of(model, machine, host_memory=host_memory, placement=placement))
    assert answer.estimate.step_s == pytest.approx(answer.step_s, rel=0.06)
