"""The command around the engine: what it prints, writes and returns, with a stand-in for the optimizer."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import cli
from offload.errors import ConfigError, InternalError, TierFullError
from offload.pictures.report import Report
from offload.schedule.timeline import Interval


class _AdamW(torch.optim.AdamW):
    """In-memory optimizer with the face of `offload.AdamW`; keeps what it was made with for the tests to see."""

    made: list["_AdamW"]
    on_step: Callable[["_AdamW"], None]
    engine, plan = None, "the plan"

    def __init__(self, params: Any, *, offload: Any, **arguments: Any) -> None:
        super().__init__(params, **arguments)
        self.config = offload
        self.closed = False
        self.steps = 0
        self.rates: list[float] = []
        self.made.append(self)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        return torch.nn.utils.clip_grad_norm_(weights, max_norm)

    def step(self, closure: Any = None) -> None:
        self.rates.append(self.param_groups[0]["lr"])
        super().step()
        self.steps += 1
        type(self).on_step(self)

    def metrics(self) -> dict[str, float]:
        moved = {f"path/{index}/{what}": 5 for index in range(len(self.config.paths)) for what in ("read_bytes",)}
        return {"step": self.steps, "step_s": 0.2, "predicted_step_s": 0.1, "gradient_norm": 1.5} | moved

    def timeline(self) -> list[Interval]:
        return [Interval("cpu", "update 0", 0.0, 0.1, 100)]

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> "_AdamW":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the engine for every test here."""
    monkeypatch.setattr(_AdamW, "made", [], raising=False)
    monkeypatch.setattr(_AdamW, "on_step", staticmethod(lambda optimizer: None), raising=False)
    monkeypatch.setattr(offload, "AdamW", _AdamW, raising=False)
    from offload.config import OffloadConfig

    monkeypatch.setattr(offload, "OffloadConfig", OffloadConfig, raising=False)

    def report_of(engine: Any, metrics: Any, told: str) -> Report:
        return Report("run", told, [], [], [], 0, 0, [], [], [])

    monkeypatch.setattr("offload.cli.train.report_of", report_of)


class Train:
    """Runs tiny trainings, into a folder `run`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.made, self._patch = folder / "run", _AdamW.made, monkeypatch
        self._text = folder / "text.txt"
        self._text.write_text("the quick brown fox jumps over the lazy dog\n" * 20, encoding="utf-8")

    def __call__(self, *extra: str) -> int:
        size = ["--layers", "1", "--hidden", "16", "--seq", "8", "--batch", "2", "--steps", "3"]
        return cli.main(["train", *size, "--data", str(self._text), "--output", str(self.run), *extra])

    def on_step(self, act: Callable[[_AdamW], None]) -> None:
        self._patch.setattr(_AdamW, "on_step", staticmethod(act))

    def lines(self, name: str = "run") -> list[dict[str, Any]]:
        text = (self.run.parent / name / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))
        return found


@pytest.fixture
def train(standin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    return Train(tmp_path, monkeypatch)


def test_a_run_leaves_its_files_and_prints_plan_and_table(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    printed = capsys.readouterr()
    assert "the plan" in printed.out
    assert "2 times as long" in printed.out
    assert "step 3/3" in printed.err
    names = {"metrics.jsonl", "summary.json", "loss.png", "lanes.png", "timeline.json", "report.json", "report.html"}
    assert {path.name for path in train.run.iterdir()} == names
    page = (train.run / "report.html").read_text(encoding="utf-8")
    assert "3 steps in" in page
    assert "<td>3</td><td>100 ms</td><td>200 ms</td><td>2 times as long</td>" in page
    lines = train.lines()
    assert [line["step"] for line in lines] == [line["optimizer/step"] for line in lines] == [1, 2, 3]
    assert [line["norm"] for line in lines] == [1.5] * 3
    assert all(line["iteration_s"] > line["forward_s"] > 0 for line in lines)
    summary = train.summary()
    assert summary["paths"] == [{"path": str(train.run / "state"), "read_bytes": 5, "write_bytes": None}]


def test_most_state_is_streamed_unless_told_otherwise(train: Train) -> None:
    assert train() == 0
    optimizer = train.made[0]
    numel = sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
    assert optimizer.config.host_memory == numel * 12 // 4
    assert [path.path for path in optimizer.config.paths] == [str(train.run / "state")]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.closed


def test_options_reach_the_engine(train: Train, tmp_path: Path) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    options = ["--host-memory", "1MiB", "--staging-memory", "4096B", "--subgroup-numel", "2k", "--threads", "1"]
    options += ["--rates", "node.json"]
    assert train("--paths", paths[0], paths[1], *options) == 0
    config = train.made[0].config
    assert [path.path for path in config.paths] == paths
    assert config.rates == "node.json"
    given = config.host_memory, config.staging_memory, config.subgroup_numel, config.threads
    assert given == (2**20, 4096, 2000, 1)
    assert not (train.run / "state").exists()


def test_the_rate_warms_up_and_falls(train: Train) -> None:
    assert train("--steps", "20", "--lr", "0.5") == 0
    rates = train.made[0].rates
    assert rates[:2] == [0.25, 0.5]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0.05 < rates[-1] < 0.06


def test_accumulation_equals_one_large_batch_in_tokens(train: Train) -> None:
    assert train("--accumulate", "3", "--clip", "0", "--dtype", "fp32") == 0
    assert all(line["norm"] == 1.5 for line in train.lines())


def test_json_is_all_there_is_on_stdout(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["steps"] == 3
    assert "the plan" in printed.err


def test_quiet_says_nothing(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--quiet") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses(train: Train, tmp_path: Path) -> None:
    def losses(seed: str, name: str) -> list[float]:
        torch.rand(3)
        assert train("--quiet", "--seed", seed, "--output", str(tmp_path / name)) == 0
        return [line["loss"] for line in train.lines(name)]

    assert losses("1", "a") == losses("1", "b")
    assert losses("1", "c") != losses("2", "d")


def test_a_comparison_of_equals_succeeds(train: Train) -> None:
    assert train("--quiet", "--compare-in-memory") == 0
    summary = train.summary()
    assert summary["comparison"]["identical"] is True
    assert summary["in_memory"]["steps"] == 3
    offloaded, in_memory = train.made
    assert offloaded.config.paths
    assert not in_memory.config.paths
    assert in_memory.config.host_memory is None


def test_one_flipped_bit_fails_a_comparison(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    def flip(optimizer: _AdamW) -> None:
        if optimizer.config.paths and optimizer.steps == 3:
            weight = optimizer.param_groups[1]["params"][0]
            with torch.no_grad():
                weight.view(torch.int16)[0] ^= 1

    train.on_step(flip)
    assert train("--quiet", "--compare-in-memory") == 1
    assert "DIFFERENT: 1 of" in capsys.readouterr().err
    comparison = train.summary()["comparison"]
    assert comparison["different_numel"] == 1
    assert comparison["losses_identical"] is True
    assert "norm" in comparison["first_different"]


def test_an_interrupt_closes_the_optimizer_and_keeps_what_there_is(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(optimizer: _AdamW) -> None:
        if optimizer.steps == 2:
            raise KeyboardInterrupt

    train.on_step(interrupt)
    assert train("--quiet", "--compare-in-memory") == 130
    assert "interrupted after 1 step;" in capsys.readouterr().err
    assert train.made[0].closed
    assert len(train.made) == 1
    assert len(train.lines()) == 1
    summary = train.summary()
    assert summary["interrupted"] is True
    assert summary["comparison"] is None
    assert (train.run / "lanes.png").exists()


def test_a_failing_device_is_one_line_and_keeps_what_there_is(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(optimizer: _AdamW) -> None:
        if optimizer.steps == 3:
            raise TierFullError("write", tier="file", path="/p")

    train.on_step(fail)
    assert train("--quiet") == 1
    assert capsys.readouterr().err == "offload train: write failed on file path /p\n"
    assert train.made[0].closed
    summary = train.summary()
    assert summary["steps"] == 2
    assert "write failed" in summary["error"]


def test_a_bug_of_ours_keeps_its_traceback(train: Train) -> None:
    def fail(optimizer: _AdamW) -> None:
        raise InternalError("impossible")

    train.on_step(fail)
    with pytest.raises(InternalError, match="impossible"):
        train("--quiet")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "few"], "--steps: 'few' cannot be used"),
        (["--batch", "1000000", "--seq", "1000000"], "--params"),
        (["--seq", "0"], "--seq: '0' cannot be used"),
        (["--batch", "-1"], "--batch: '-1'"),
        (["--accumulate", "0"], "--accumulate: '0'"),
        (["--steps", "0"], "--steps: '0'"),
        (["--threads", "0"], "--threads: '0'"),
        (["--lr", "nan"], "--lr: 'nan'"),
        (["--clip", "-1"], "--clip: '-1'"),
        (["--seed", "-1"], "--seed: '-1'"),
        (["--hidden", "20"], "--hidden: 20"),
        (["--layers", "0"], "--layers: '0'"),
        (["--host-memory", "much"], "--host-memory: 'much'"),
        (["--subgroup-numel", "12"], "--subgroup-numel: '12'"),
        (["--data", "/there/is/no/such/folder"], "--data: '/there/is/no/such/folder'"),
        (["--seq", "5000"], "--data"),
        (["--device", "abacus"], "--device: 'abacus'"),
        (["--device", "meta"], "--device: 'meta'"),
        (["--device", "cuda:99"], "--device: 'cuda:99'"),
        (["--output", os.sep], "--output: '/'"),
        (["--output", "/dev/null/x"], "--output: '/dev/null/x'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_leaves_nothing(
    train: Train, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*options) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("offload train: " + says)
    assert printed.err.count("\n") == 1
    assert not train.run.exists()


def test_a_run_that_fails_leaves_no_folder(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own nor those above it that it has made; one that was there stays, empty or not."""

    def fail(**settings: object) -> None:
        raise ConfigError("rates", "x", "name another")

    monkeypatch.setattr(offload, "OffloadConfig", fail)
    (tmp_path / "mine").mkdir()
    for made in ("new/runs/one", "mine/one"):
        assert train("--output", str(tmp_path / made)) == 2
    assert not (tmp_path / "new").exists()
    assert [*(tmp_path / "mine").iterdir()] == []


@pytest.mark.parametrize("options", [["--dtype", "int4"], ["--what"]])
def test_a_misspelt_option_is_one_line(train: Train, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train(*options)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_extra_is_named_with_its_command(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert train() == 1
    assert capsys.readouterr().err == "offload train: matplotlib not installed; run: pip install matplotlib\n"


def test_an_old_run_is_not_overwritten(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--quiet") == 0
    assert train("--quiet") == 2
    assert "new or empty" in capsys.readouterr().err


def test_the_default_output_is_a_new_folder_each_time(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "--layers", "1", "--hidden", "16", "--seq", "8", "--batch", "1", "--steps", "1"]
    for _ in range(2):
        assert cli.main([*arguments, "--quiet", "--data", str(tmp_path / "text.txt")]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_settings_of_the_process_are_as_before_afterwards(train: Train) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    assert train("--quiet", "--threads", "1") == 0
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in [
        (["--version"], "offload 0."),
        (["--help"], "train"),
        (["train", "--help"], "default: 25M"),
    ]:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        assert says in capsys.readouterr().out
    assert cli.main([]) == 2


def test_nothing_is_left_where_there_is_no_checkpoint_to_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--resume", str(tmp_path / "nowhere")]) == 2
    assert "there is no checkpoint in this folder" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_package_runs_as_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "offload.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert (done.returncode, done.stdout) == (0, capsys.readouterr().out)
