"""Accelerate with our optimizers: killed and resumed, with old checkpoints deleted; what a prepared one can do."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import DistributedType
from small import SETTINGS
from started import end, start

import offload
from offload.checkpoint.marker import Mark, mark_begun, mark_of
from offload.integrations.accelerate import enable

PROGRAM = Path(__file__).with_name("accelerate_runs.py")


def run(folder: Path, steps: int, *rest: str, ranks: int = 0, python: str = "") -> list[dict[str, Any]] | None:
    """Return what each rank says, None if it was killed."""
    process = start(PROGRAM, folder, steps, *rest, ranks=ranks, python=python)
    if any(option.startswith("kill") for option in rest):
        end(process, 1 if ranks else -signal.SIGKILL)
        return None
    return end(process)[0]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.parent.parent.name for path in (folder / "checkpoints").glob("*/optimizer_state/COMMIT"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rest", "left", "kept"),
    [
        (["limit=2", "kept=3"], [2, 3], [2, 3]),
        (["kept=1"], [0, 1, 2, 3], [0]),
        pytest.param(["limit=1", "kept=0"], [3], [], marks=pytest.mark.full),
    ],
    ids=["in-place", "unlimited", "copies"],
)
def test_a_killed_loop_resumes_exactly(tmp_path: Path, rest: list[str], left: list[int], kept: list[int]) -> None:
    whole = run(tmp_path / "whole", 8, *rest)
    assert whole is not None
    assert whole[0]["kept"] == [f"checkpoint_{number}" for number in kept]
    assert checkpoints(tmp_path / "whole") == [f"checkpoint_{number}" for number in left]
    run(tmp_path / "killed", 8, "kill=7", *rest)
    resumed = run(tmp_path / "killed", 8, "resume", *rest)
    assert resumed is not None
    for name in ("losses", "norms"):
        assert resumed[0][name] == whole[0][name][-2:]
    for name in ("weights", "lr"):
        assert resumed[0][name] == whole[0][name]
    assert checkpoints(tmp_path / "killed") == checkpoints(tmp_path / "whole")


@pytest.mark.slow
def test_steps_are_hidden_in_forward_and_backward(tmp_path: Path) -> None:
    off = run(tmp_path / "off", 6, python=sys.executable)
    both = run(tmp_path / "both", 6, "overlap=both")
    assert off is not None
    assert both is not None
    assert both[0].pop("hidden_in") == "forward and backward"
    assert off[0].pop("hidden_in") == ""
    assert both == off


@pytest.mark.slow
def test_a_save_that_was_killed_is_set_aside(tmp_path: Path) -> None:
    """The last checkpoint is the one before, and the next one can have the number of the other."""
    whole = run(tmp_path / "whole", 8)
    run(tmp_path / "killed", 8, "kill_saving=2")
    folder = tmp_path / "killed" / "checkpoints" / "checkpoint_2"
    assert mark_of(str(folder)) is Mark.BEGUN
    resumed = run(tmp_path / "killed", 8, "resume")
    assert whole is not None
    assert resumed is not None
    assert resumed[0]["losses"] == whole[0]["losses"][4:]
    assert resumed[0]["weights"] == whole[0]["weights"]
    assert (tmp_path / "killed" / "incomplete-checkpoint_2" / "model.safetensors").exists()
    assert mark_of(str(folder)) is Mark.WHOLE


@pytest.mark.slow
def test_two_ranks_save_and_resume_together(tmp_path: Path) -> None:
    rest = ["limit=1", "kept=2"]
    whole = run(tmp_path / "whole", 6, *rest, ranks=2)
    run(tmp_path / "killed", 6, "kill=5", *rest, ranks=2)
    resumed = run(tmp_path / "killed", 6, "resume", *rest, ranks=2)
    assert whole is not None
    assert resumed is not None
    assert len(whole) == len(resumed) == 2
    assert {rank["weights"] for rank in resumed} == {whole[0]["weights"]}
    assert checkpoints(tmp_path / "killed") == ["checkpoint_2"]


# In this process


@pytest.fixture
def optimizer(tmp_path: Path) -> Iterator[offload.AdamW]:
    """Of `model()`, trained for a step."""
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 4096)), torch.nn.Parameter(torch.ones(8))]
    with offload.AdamW(parameters, lr=0.1, offload={**SETTINGS, "paths": [tmp_path]}) as made:
        yield made


def set_gradients(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    parameters: list[torch.nn.Parameter] = optimizer.param_groups[0]["params"]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def test_a_prepared_optimizer_has_what_ours_has(optimizer: offload.AdamW, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer)
    assert not hasattr(prepared, "metrics")
    assert enable(accelerator, prepared) is prepared
    assert enable(accelerator, prepared) is prepared  # changes nothing
    parameters = set_gradients(optimizer)
    norm = accelerator.clip_grad_norm_(parameters, 0.5)
    assert norm == pytest.approx(4104**0.5)
    assert parameters[1].grad is not None
    assert parameters[1].grad.tolist() == [1.0] * 8  # it is done in the update
    prepared.step()
    assert prepared.metrics()["gradient_norm"] == norm
    assert str(prepared.plan) == str(optimizer.plan)
    assert str(prepared.explain()) == str(optimizer.explain())
    assert prepared.state_for(parameters[1])["exp_avg"].shape == (8,)
    prepared.save_checkpoint(tmp_path / "own")
    prepared.wait_checkpoint()
    prepared.load_checkpoint(tmp_path / "own")
    assert prepared.state_dict().keys() == {"state", "param_groups"}
    with pytest.raises(AttributeError, match="nothing"):
        prepared.nothing()


@pytest.mark.not_overlapped("steps go on where the test says so")
def test_each_optimizer_is_given_its_own_models(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    models = [torch.nn.Linear(4, 4) for _ in range(3)]
    config, pair = {**SETTINGS, "paths": [tmp_path]}, [*models[0].parameters(), *models[1].parameters()]
    first = offload.AdamW(pair, offload={**config, "overlap": "forward"})
    second = offload.AdamW(models[2].parameters(), offload={**config, "overlap": "auto"})
    prepared = accelerator.prepare(*models, first, second)
    with first, second:
        for optimizer in prepared[3:]:
            enable(accelerator, optimizer)
            assert optimizer.plan.hidden_in == "forward"
        found = [{followed.model for followed in ours._overlap.models} for ours in (first, second)]
        assert found == [{*models[:2]}, {models[2]}]


def test_a_model_that_cannot_be_waited_for_is_told_where_forward_was_asked_for(tmp_path: Path) -> None:
    scripted = torch.jit.script(torch.nn.Linear(4, 4))
    for overlap, says in (("forward", "ScriptModule"), ("auto", "")):
        accelerator = Accelerator(cpu=True)
        config = {**SETTINGS, "paths": [tmp_path], "overlap": overlap}
        with offload.AdamW(scripted.parameters(), offload=config) as ours:
            accelerator.prepare(scripted)
            optimizer = accelerator.prepare(ours)
            with pytest.raises(offload.ConfigError, match=says) if says else contextlib.nullcontext():
                enable(accelerator, optimizer)
            assert ours.plan.hidden_in == ""


def test_a_part_of_the_parameters_is_clipped_alone(optimizer: offload.AdamW) -> None:
    accelerator = Accelerator(cpu=True)
    enable(accelerator, accelerator.prepare(optimizer))
    parameters = set_gradients(optimizer)
    assert accelerator.clip_grad_norm_(parameters[1:], 0.5) == pytest.approx(8**0.5)
    assert float(parameters[1].grad.norm()) == pytest.approx(0.5)  # type: ignore[union-attr]
    assert float(parameters[0].grad.norm()) == pytest.approx(64)  # type: ignore[union-attr]
    accelerator.clip_grad_value_(parameters[0], 0.25)
    assert float(parameters[0].grad.max()) == 0.25  # type: ignore[union-attr]


def test_gradients_that_leave_are_clipped_all_together(
    optimizer: offload.AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else finds them; the config is a stand-in for one with weights on a GPU."""
    accelerator = Accelerator(cpu=True)
    enable(accelerator, accelerator.prepare(optimizer))
    parameters = set_gradients(optimizer)
    monkeypatch.setattr(optimizer._holder, "config", dataclasses.replace(optimizer.config, keep_grads=False))
    for given, norm_type in ((parameters[1:], 2), (parameters, 1)):
        with pytest.raises(offload.ConfigError, match="keep_grads"):
            accelerator.clip_grad_norm_(given, 0.5, norm_type)
    with pytest.raises(offload.ConfigError, match="keep_grads"):
        accelerator.clip_grad_value_(parameters[1:], 0.5)
    accelerator.clip_grad_norm_(parameters, 0.5)
    others = torch.nn.Parameter(torch.ones(3))
    others.grad = torch.ones(3)
    accelerator.clip_grad_norm_([others], 0.5)
    accelerator.clip_grad_value_([others], 0.25)
    assert float(others.grad.max()) == 0.25


def test_one_of_two_optimizers_clips(optimizer: offload.AdamW) -> None:
    accelerator = Accelerator(cpu=True)
    enable(accelerator, accelerator.prepare(optimizer))
    with offload.AdamW([torch.nn.Parameter(torch.ones(5000))]) as other:
        enable(accelerator, accelerator.prepare(other))
        for frozen in optimizer.param_groups[0]["params"]:  # as in a step of the other one
            frozen.requires_grad_(False)
        norm = accelerator.clip_grad_norm_(set_gradients(other), 0.5)
        other.step()
        assert other.metrics()["gradient_norm"] == norm == pytest.approx(5000**0.5)


def test_other_optimizers_are_left_alone(optimizer: offload.AdamW, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    stock = accelerator.prepare(torch.optim.AdamW([torch.nn.Parameter(torch.ones(8))]))
    prepared = enable(accelerator, accelerator.prepare(optimizer))
    set_gradients(optimizer)
    others = set_gradients(stock)
    accelerator.clip_grad_norm_(others, 0.5)
    assert others[0].grad is not None
    assert float(others[0].grad.norm()) == pytest.approx(0.5)
    both = [*set_gradients(optimizer), *set_gradients(stock)]
    accelerator.clip_grad_norm_(both, 0.5)  # the norm of both is torch's to take
    assert float(both[0].grad.norm()) < 0.5  # type: ignore[union-attr]
    stock.step()
    prepared.step()
    accelerator.save_state(str(tmp_path / "saved"))
    assert torch.load(tmp_path / "saved" / "optimizer.bin")["state"].keys() == {0}
    assert torch.load(tmp_path / "saved" / "optimizer_1.bin")["offload_checkpoint"] == "optimizer_state"
    expected = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
    set_gradients(optimizer)
    prepared.step()
    accelerator.load_state(str(tmp_path / "saved"))
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], expected))


@pytest.mark.parametrize("closes", [True, False])
def test_an_accelerator_that_was_freed_has_another_optimizer(tmp_path: Path, closes: bool) -> None:
    """The one before is freed, and is in no checkpoint."""
    accelerator, config = Accelerator(cpu=True), {**SETTINGS, "paths": [tmp_path], "checkpoints_kept": 2}
    for number in range(2):
        optimizer = offload.AdamW([torch.nn.Parameter(torch.ones(5000))], offload=config)
        prepared = enable(accelerator, accelerator.prepare(optimizer))
        norm = accelerator.clip_grad_norm_(set_gradients(optimizer), 0.5)
        prepared.step()
        assert prepared.metrics()["gradient_norm"] == norm
        accelerator.save_state(str(tmp_path / f"{number}"))
        expected = optimizer.param_groups[0]["params"][0].detach().clone()
        set_gradients(optimizer)
        prepared.step()
        accelerator.load_state(str(tmp_path / f"{number}"))
        assert torch.equal(optimizer.param_groups[0]["params"][0], expected)
        if closes:
            prepared.close()
        freed = weakref.ref(optimizer)
        del optimizer
        (prepared,) = accelerator.free_memory(prepared)
        assert freed() is None
        accelerator.save_state(str(tmp_path / "none"))
        assert not (tmp_path / "none" / "optimizer.bin").exists()
    assert sorted(path.name for path in tmp_path.glob("1/*optimizer*")) == ["optimizer.bin", "optimizer_state"]


def test_a_save_that_fails_leaves_state_dict_as_it_was(optimizer: offload.AdamW, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = enable(accelerator, accelerator.prepare(optimizer))
    set_gradients(optimizer)
    prepared.step()

    class Fails:
        def state_dict(self) -> dict[str, Any]:
            raise OSError("no space")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    accelerator.register_for_checkpointing(Fails())
    with pytest.raises(OSError, match="no space"):
        accelerator.save_state(str(tmp_path / "saved"))
    assert len(prepared.state_dict()["state"]) == 2


@pytest.mark.parametrize("kind", ["Muon", "wrap"])
def test_optimizers_of_other_rules_are_served_alike(tmp_path: Path, kind: str) -> None:
    """Muon, and a class of torch's that is wrapped: state stays on the paths, and loads."""
    config = {**SETTINGS, "paths": [tmp_path], "checkpoints_kept": 2}
    moments = []
    for step in (1, 0):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 4096).reshape(64, 64))
        wraps = kind == "wrap"
        made = offload.wrap(torch.optim.SGD, [parameter], momentum=0.9, offload=config) if wraps else None
        accelerator = Accelerator(cpu=True)
        prepared = enable(accelerator, accelerator.prepare(made or offload.Muon([parameter], offload=config)))
        if step:
            set_gradients(prepared.optimizer)
            prepared.step()
            accelerator.save_state(str(tmp_path / "ck"))
        else:
            accelerator.load_state(str(tmp_path / "ck"))
        moments.append(prepared.state_for(parameter)["momentum_buffer"])
        prepared.close()
    assert torch.equal(*moments)
    assert moments[0].any()
    assert (tmp_path / "ck" / "optimizer_state" / "COMMIT").exists()


def test_a_save_that_was_interrupted_is_not_loaded(optimizer: offload.AdamW, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = enable(accelerator, accelerator.prepare(optimizer))
    accelerator.save_state(str(tmp_path / "ck"))
    accelerator.load_state(str(tmp_path / "ck"))
    mark_begun(str(tmp_path / "ck"))
    with pytest.raises(offload.CheckpointError, match="is not whole, as its save was interrupted"):
        accelerator.load_state(str(tmp_path / "ck"))
    prepared.close()


def test_a_save_under_fsdp_is_marked_before_its_model_is_written(
    optimizer: offload.AdamW, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP's models are written, and read, before Accelerate calls hooks."""
    accelerator, folder = Accelerator(cpu=True), tmp_path / "ck"
    _, prepared = accelerator.prepare(torch.nn.Linear(2, 2), optimizer)
    prepared = enable(accelerator, prepared)
    marks = []

    def write(plugin: Any, accelerator: Any, model: Any, folder: str, index: int) -> None:
        marks.append(mark_of(folder))
        raise OSError("no space")

    monkeypatch.setattr("accelerate.accelerator.save_fsdp_model", write)
    monkeypatch.setattr("accelerate.accelerator.load_fsdp_model", write)
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(accelerator.state, "fsdp_plugin", None, raising=False)
    with pytest.raises(OSError, match="no space"):
        accelerator.save_state(str(folder))
    with pytest.raises(offload.CheckpointError, match="is not whole, as its save was interrupted"):
        accelerator.load_state(str(folder))
    assert marks == [Mark.BEGUN]
    prepared.close()


def test_each_of_two_optimizers_under_fsdp_has_its_own_pointer(
    optimizer: offload.AdamW, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, folder = Accelerator(cpu=True), tmp_path / "ck"
    for name in ("save_fsdp_model", "load_fsdp_model"):
        monkeypatch.setattr(f"accelerate.accelerator.{name}", lambda *given, **options: None)
    monkeypatch.setattr(accelerator.state, "fsdp_plugin", None, raising=False)
    with offload.AdamW([torch.nn.Parameter(torch.ones(5000))]) as other:
        prepared = []
        for steps, each in enumerate((optimizer, other), start=1):
            accelerator.prepare(torch.nn.Linear(2, 2))
            prepared.append(enable(accelerator, accelerator.prepare(each)))
            for _ in range(steps):
                set_gradients(each)
                each.step()
        monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.FSDP)
        accelerator.save_state(str(folder))
        set_gradients(other)
        other.step()
        accelerator.load_state(str(folder))
        assert [each.optimizer.engine.step_count(0) for each in prepared] == [1, 2]
        for each in prepared:
            each.close()


def test_a_checkpoint_of_torchs_is_gone_on_from(optimizer: offload.AdamW, tmp_path: Path) -> None:
    stock = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in optimizer.param_groups[0]["params"]])
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    set_gradients(stock)
    first.prepare(stock).step()
    first.save_state(str(tmp_path / "saved"))
    prepared = enable(second, second.prepare(optimizer))
    second.load_state(str(tmp_path / "saved"))
    moment = stock.state[stock.param_groups[0]["params"][1]]["exp_avg"]
    assert torch.equal(prepared.state_for(optimizer.param_groups[0]["params"][1])["exp_avg"], moment)


def test_what_cannot_be_used_is_named(optimizer: offload.AdamW) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(offload.ConfigError, match=r"accelerator\.prepare"):
        enable(accelerator, optimizer)
    stock = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
    with pytest.raises(offload.ConfigError, match="SGD"):
        enable(accelerator, stock)
    with pytest.raises(offload.ConfigError, match="FSDP"):
        enable(SimpleNamespace(distributed_type="FSDP"), accelerator.prepare(optimizer))


def test_the_last_micro_step_is_known(optimizer: offload.AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(offload.AdamW, "last_micro_step", lambda self, is_last: told.append(is_last))
    GradientState._reset_state()  # all accelerators of a process share it, and the first one's number of steps
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Linear(8, 8)
    _, prepared = accelerator.prepare(model, optimizer)
    enable(accelerator, prepared)
    said = []
    for _ in range(6):
        with accelerator.accumulate(model):
            said.append(told[-1]())
    assert said == [False, False, True] * 2
