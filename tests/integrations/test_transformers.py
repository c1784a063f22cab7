"""Hugging Face's Trainer with our optimizers: like torch's, killed and resumed, with old checkpoints deleted."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import pickle
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import started
from started import end
from trainer_runs import Tokens, model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

import offload
import offload.integrations.transformers as offload_transformers
from offload import ConfigError, cli
from offload.checkpoint.marker import WHOLE, Mark, mark_of
from offload.checkpoint.stores import find_stores

PROGRAM = Path(__file__).with_name("trainer_runs.py")


start = functools.partial(started.start, PROGRAM)


def run(folder: Path, optim: str, steps: int, *rest: str, python: str = "") -> dict[str, Any]:
    """Return what a program says that one rank runs to its end."""
    (found,), _ = end(start(folder, optim, steps, *rest, python=python))
    return found


def small_arguments(folder: Path, **more: Any) -> TrainingArguments:
    """Return arguments of a short training that saves nothing by itself."""
    settings = {"optim": "offload_adamw", "save_strategy": "no", "logging_steps": 1, "max_steps": 2, **more}
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings)


@pytest.mark.slow
def test_a_trainer_trains_as_with_torchs_optimizer(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock", "adamw_torch", 6)
    ours = run(tmp_path / "ours", "offload_adamw", 6, python=sys.executable)
    assert ours["optimizer"].endswith("transformers.trainer.AdamW")
    for name in ("losses", "norms"):
        assert ours[name] == pytest.approx(stock[name], rel=1e-5)
    assert len(set(ours["losses"])) == 6
    assert not [*tmp_path.glob("ours/path/*/nothing")]
    for number in (2, 4, 6):
        folder = tmp_path / "ours" / f"checkpoint-{number}"
        assert (folder / "optimizer" / "COMMIT").exists()
        assert (folder / "optimizer.pt").stat().st_size < 4096


@pytest.mark.slow
@pytest.mark.parametrize(("optim", "kind"), [("offload_muon", "Muon"), ("wrap", "WrappedOptimizer")])
def test_optimizers_of_other_rules_are_served_alike(tmp_path: Path, optim: str, kind: str) -> None:
    """State stays on the paths, a SIGTERM saves, and training goes on exactly."""
    rest = (optim, 6, "save_total_limit=2")
    whole = run(tmp_path / "whole", *rest)
    assert whole["optimizer"].endswith(f".{kind}")
    assert len(set(whole["losses"])) == 6
    end(start(tmp_path / "ended", *rest, "term=4"), -signal.SIGTERM)
    newest = tmp_path / "ended" / "checkpoint-4"
    assert mark_of(str(newest)) is Mark.WHOLE
    (store,) = find_stores(str(tmp_path / "ended" / "path"))
    assert str(newest / "optimizer") in {pin.folder for pin in store.pins}
    assert (newest / "optimizer.pt").stat().st_size < 4096
    resumed = run(tmp_path / "ended", *rest, "resume")
    assert resumed["losses"][-2:] == whole["losses"][-2:]
    assert resumed["weights"] == whole["weights"]


def test_saved_tensors_leave_with_the_same_bits(tmp_path: Path) -> None:
    plain, leaving = (
        run(tmp_path / name, "offload_adamw", 3, *rest) for name, rest in (("a", ()), ("b", ("activations=1MiB",)))
    )
    assert [leaving[name] for name in ("losses", "norms")] == [plain[name] for name in ("losses", "norms")]


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["null", "1", pytest.param("2", marks=pytest.mark.full)])
def test_a_killed_trainer_resumes_exactly(tmp_path: Path, limit: str) -> None:
    """With checkpoints that stay on the paths, where the number of them is limited, and with copies."""
    rest = f"save_total_limit={limit}"
    whole = run(tmp_path / "whole", "offload_adamw", 8, rest)
    killed = start(tmp_path / "killed", "offload_adamw", 8, rest, "kill=7")
    end(killed, -signal.SIGKILL)
    folders = sorted(path.name for path in (tmp_path / "killed").glob("checkpoint-*"))
    kept = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert folders == kept[-json.loads(limit) if limit != "null" else 0 :]
    resumed = run(tmp_path / "killed", "offload_adamw", 8, rest, "resume")
    assert resumed["weights"] == whole["weights"]
    assert resumed["losses"][-2:] == whole["losses"][-2:]
    if limit != "null":
        there = sorted(path.name for path in (tmp_path / "killed").glob("checkpoint-*"))
        assert there == ["checkpoint-6", "checkpoint-8"][-int(limit) :]


@pytest.mark.slow
def test_resuming_again_and_again_leaves_one_store(tmp_path: Path) -> None:
    """What the Trainer deletes is released, also where a process was killed, or ended, before it saved again."""
    whole = run(tmp_path / "whole", "offload_adamw", 12, "save_total_limit=2")
    killed = start(tmp_path / "again", "offload_adamw", 12, "save_total_limit=2", "kill=7")
    end(killed, -signal.SIGKILL)
    for more in (("stop=10",), ()):
        last = run(tmp_path / "again", "offload_adamw", 12, "save_total_limit=2", "resume", *more)
        (store,) = find_stores(str(tmp_path / "again" / "path"))
        folders = {str(path / "optimizer") for path in (tmp_path / "again").glob("checkpoint-*")}
        assert {pin.folder for pin in store.pins} == folders
        assert len(folders) == 2
        assert not store.missing
    assert last["weights"] == whole["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_saves_at_a_sigterm(tmp_path: Path, ranks: int) -> None:
    """At the end of that step, by all ranks; then the process ends by the signal, and training goes on exactly."""
    launched = functools.partial(start, ranks=ranks if ranks > 1 else 0)
    trained = ("offload_adamw", 6, "save_total_limit=1")
    whole, _ = end(launched(tmp_path / "whole", *trained))
    assert [rank["rank"] for rank in whole] == [*range(ranks)]
    assert [path.name for path in (tmp_path / "whole").glob("checkpoint-*")] == ["checkpoint-6"]
    ended = launched(tmp_path / "ended", *trained, "term=5")
    end(ended, -signal.SIGTERM if ranks == 1 else 1)
    (left,) = (tmp_path / "ended").glob("*checkpoint-*")
    assert left.name == "checkpoint-5"
    assert mark_of(str(left)) is Mark.WHOLE
    resumed, _ = end(launched(tmp_path / "ended", *trained, "resume"))
    assert {rank["weights"] for rank in (*resumed, *whole)} == {whole[0]["weights"]}


@pytest.mark.slow
def test_a_save_that_was_killed_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What lasts until the new checkpoint is whole: the old one. What a kill leaves is none, for anybody."""
    whole = run(tmp_path / "whole", "offload_adamw", 6)
    folder = tmp_path / "killed"
    killed = start(folder, "offload_adamw", 6, "save_total_limit=1", "kill_saving=4")
    end(killed, -signal.SIGKILL)
    assert sorted(path.name for path in folder.glob("*checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert cli.main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}/checkpoint-4: no checkpoint, as its save was interrupted, or is under way",
        f"{folder}/checkpoint-2/optimizer: all 21 tiles are whole; 21 parameters",
    ]
    assert cli.main(["verify", str(folder / "checkpoint-4")]) == 1
    process = start(folder, "offload_adamw", 6, "save_total_limit=1", "resume")
    (last,), said = end(process)
    assert f"{folder}/incomplete-checkpoint-4 is what an interrupted save has left" in said
    assert last["weights"] == whole["weights"]
    assert sorted(path.name for path in folder.glob("*checkpoint-*")) == ["checkpoint-6", "incomplete-checkpoint-4"]


@pytest.mark.parametrize("left_by", ["a kill", "an older version"])
@pytest.mark.parametrize("given_as", ["optimizers", "optimizer_cls_and_kwargs"])
def test_a_trainer_with_a_given_optimizer_passes_over_what_a_killed_save_left(
    tmp_path: Path, left_by: str, given_as: str
) -> None:
    """As with `optim="offload_adamw"`, whether markers or a missing file show it, or the last one is named."""
    newest = tmp_path / "checkpoint-2"

    def train(resume: bool | str, steps: int) -> Trainer:
        given = model()
        args = small_arguments(tmp_path, optim="adamw_torch", save_strategy="steps", save_steps=1, max_steps=steps)
        makes = given_as == "optimizer_cls_and_kwargs"
        value = (offload.AdamW, {}) if makes else (offload.AdamW(given.named_parameters()), None)
        trainer = Trainer(model=given, args=args, train_dataset=Tokens(), **{given_as: value})
        trainer.train(resume_from_checkpoint=resume)
        trainer.optimizer.optimizer.close()
        return trainer

    try:
        offload_transformers.enable()
        train(False, 2)
        (newest / "trainer_state.json").unlink()
        if left_by == "a kill":
            program = f"from offload.checkpoint import marker; marker.mark_begun({str(newest)!r})"
            subprocess.run([sys.executable, "-c", program], check=True)
        else:
            (newest / WHOLE).unlink()
        assert train(str(newest) if given_as == "optimizers" else True, 3).state.global_step == 3
        assert (tmp_path / "incomplete-checkpoint-2").exists() == (left_by == "a kill")
    finally:
        offload_transformers.disable()


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["trainer_state.json", "optimizer/COMMIT"])
def test_what_an_interrupted_save_leaves_is_passed_over(tmp_path: Path, missing: str) -> None:
    """The Trainer takes it for its last checkpoint; going on from the one before is exact. Named, it is refused."""
    whole = run(tmp_path, "offload_adamw", 6)
    newest, before = tmp_path / "checkpoint-6", tmp_path / "checkpoint-4"

    def interrupt(folder: Path) -> None:
        (folder / "trainer_state.json").unlink()  # which is written last
        (folder / missing).unlink(missing_ok=True)

    interrupt(newest)
    process = start(tmp_path, "offload_adamw", 6, "resume")
    (last,), said = end(process)
    assert f"{newest} is not whole" in said
    assert f"{missing} is missing): training goes on from {before}" in said
    assert last["weights"] == whole["weights"]
    interrupt(before)
    process = start(tmp_path, "offload_adamw", 6, f"resume={before}")
    said = process.communicate(timeout=240)[1].splitlines()[-1]
    assert process.returncode
    for each in (f"{before} is not whole", missing, f"{newest} is: delete {before}"):
        assert each in said
    shutil.rmtree(tmp_path / "checkpoint-2")
    shutil.rmtree(newest)
    process = start(tmp_path, "offload_adamw", 6, "resume")
    assert "no other one beside it is" in process.communicate(timeout=240)[1].splitlines()[-1]
    assert process.returncode


@pytest.mark.parametrize(
    ("best_by", "stays"),
    [
        ({"metric_for_best_model": "loss"}, True),
        ({"load_best_model_at_end": True}, True),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, True),  # which sets the metric
        ({"metric_for_best_model": "loss", "save_strategy": "best"}, True),
        ({}, False),
    ],
)
def test_what_a_trainer_keeps_has_its_state(tmp_path: Path, best_by: dict[str, Any], stays: bool) -> None:
    """The best checkpoint beside the last one, too, of which the limit does not tell; also where only the state that
    was resumed names it (`{}`)."""

    class Judged(Trainer):
        def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
            return {
                **super().evaluate(*arguments, **options),
                "eval_loss": -1.0 if self.state.global_step == 2 else 1,
            }

    class Look(TrainerCallback):
        def on_save(self, *arguments: Any, **options: Any) -> None:
            kept = {*tmp_path.glob("checkpoint-*")}
            seen.append(sorted(folder.name for folder in kept))
            assert all((folder / "optimizer" / "COMMIT").exists() for folder in kept)
            (store,) = find_stores(str(tmp_path / "path"))
            is_on_paths = {pin.folder for pin in store.pins} == {str(folder / "optimizer") for folder in kept}
            assert is_on_paths or not stays

    def train(steps: int, resume: str | None, **more: Any) -> Trainer:
        args = small_arguments(tmp_path, **{**often, "max_steps": steps, **more})
        data = {"train_dataset": Tokens(), "eval_dataset": Tokens(), "callbacks": [Look()]}
        trainer = Judged(model=model(), args=args, **data)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
        trainer.optimizer.optimizer.close()
        return trainer

    (tmp_path / "path").mkdir()
    seen: list[list[str]] = []
    often = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    often["save_total_limit"] = 1
    try:
        offload_transformers.enable({"host_memory": 0, "paths": [tmp_path / "path"], "subgroup_numel": 4096})
        train(2 if not best_by else 5, None, **(best_by or {"metric_for_best_model": "loss"}))
        if not best_by:
            train(5, str(tmp_path / "checkpoint-2"))
        by_best = best_by.get("save_strategy") == "best"
        assert seen[-1] == ["checkpoint-2"] if by_best else ["checkpoint-2", "checkpoint-5"]
        train(6, str(tmp_path / "checkpoint-2"), **best_by)  # at its end the Trainer has deleted the last one
    finally:
        offload_transformers.disable()


def test_a_released_checkpoint_is_called_so(tmp_path: Path) -> None:
    """And not one whose save was interrupted."""
    (tmp_path / "path").mkdir()
    config = {"host_memory": 0, "paths": [tmp_path / "path"], "subgroup_numel": 4096, "checkpoints_kept": 2}
    saved = tmp_path / "checkpoint-1"
    try:
        offload_transformers.enable(config)
        args = small_arguments(tmp_path, save_strategy="steps", save_steps=1, max_steps=1, save_total_limit=1)
        trainer = Trainer(model=model(), args=args, train_dataset=Tokens())
        trainer.train()
        trainer.optimizer.optimizer.engine.checkpoints.release(str(saved / "optimizer"))
        trainer.optimizer.optimizer.close()
        with pytest.raises(
            offload.CheckpointError, match=r"as its state was released \(optimizer/RELEASED says why\)"
        ):
            Trainer(model=model(), args=args, train_dataset=Tokens()).train(resume_from_checkpoint=str(saved))
    finally:
        offload_transformers.disable()


@pytest.mark.slow
def test_a_checkpoint_of_torchs_is_gone_on_from(tmp_path: Path) -> None:
    end(start(tmp_path, "adamw_torch", 6, "kill=5"), -signal.SIGKILL)
    whole = run(tmp_path / "whole", "adamw_torch", 6)
    resumed = run(tmp_path, "offload_adamw", 6, "resume")
    assert resumed["losses"][-2:] == pytest.approx(whole["losses"][-2:], rel=1e-5)


@pytest.mark.slow
def test_steps_are_hidden_in_forward_and_backward(tmp_path: Path) -> None:
    """While the Trainer logs, evaluates and saves; the model that is called may be a compiled one."""
    rest = ('eval_strategy="steps"', "eval_steps=3")
    off = run(tmp_path / "off", "offload_adamw", 6, *rest)
    both = run(tmp_path / "both", "offload_adamw", 6, "overlap=both", *rest)
    compiling = ("torch_compile=true", 'torch_compile_backend="eager"')
    compiled = run(tmp_path / "compiled", "offload_adamw", 6, "overlap=both", *rest, *compiling)
    assert len(off["evaluated"]) == 2
    assert off["hidden_in"] == ""
    for other in (both, compiled):
        assert other.pop("hidden_in") == "forward and backward"
        assert other == {name: value for name, value in off.items() if name != "hidden_in"}


@pytest.mark.full
def test_two_ranks_save_and_resume_together(tmp_path: Path) -> None:
    def ranks(folder: str, *rest: str) -> subprocess.Popen[str]:
        return start(tmp_path / folder, "offload_adamw", 6, "save_total_limit=1", *rest, ranks=2)

    whole, _ = end(ranks("whole"))
    assert [rank["rank"] for rank in whole] == [0, 1]
    assert whole[0]["weights"] == whole[1]["weights"]
    assert [path.name for path in (tmp_path / "whole").glob("checkpoint-*")] == ["checkpoint-6"]
    killed = ranks("killed", "kill=5")
    end(killed, 1)
    resumed, _ = end(ranks("killed", "resume"))
    assert {rank["weights"] for rank in resumed} == {whole[0]["weights"]}


def test_names_are_known_while_it_is_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim: .*'offload_adamw'.* call .*enable\(...\) first"):
        TrainingArguments(output_dir=str(tmp_path), optim="offload_adamw", use_cpu=True)
    try:
        offload_transformers.enable()
        offload_transformers.enable({"host_memory": "1GiB"})  # the last one counts
        args = TrainingArguments(output_dir=str(tmp_path), optim="offload_lion", use_cpu=True)
        assert args.optim == "offload_lion"
        assert args.to_dict()["optim"] == "offload_lion"
        pickled = pickle.dumps(args)
        adam_or_adamw = '"offload_adam" or "offload_adamw"'
        for name, meant in (("offload_adamv", adam_or_adamw), ("Offload_Lion", '"offload_lion"')):
            with pytest.raises(ConfigError, match=rf"did you mean {meant}\?"):
                OptimizerNames(name)
        for name in ("adamw_torhc", "lbfgs"):  # nearer to one of transformers', and to none
            with pytest.raises(ValueError, match="not a valid"):
                OptimizerNames(name)
    finally:
        offload_transformers.disable()
    offload_transformers.disable()
    assert pickle.loads(pickled).optim == "offload_lion"
    with pytest.raises(ConfigError, match="first, in this process"):
        OptimizerNames("offload_lion")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["offload.integrations.transformers", "transformers.training_args"])
def test_arguments_before_enable_are_told_to_call_it(first: str) -> None:
    """Whichever was imported first; our import alone imports no transformers."""
    program = f"import sys, {first}; assert ('transformers' in sys.modules) == {first.startswith('transformers')}; "
    program += "import offload.integrations.transformers; from transformers import TrainingArguments; "
    program += "TrainingArguments(optim='offload_adamw')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert "call offload.integrations.transformers.enable(...) first" in done.stderr


def test_parameters_have_the_models_names_and_a_group_may_be_empty(tmp_path: Path) -> None:
    """As where adapters alone are trained: none of their weights is without decay."""
    model = torch.nn.Linear(4, 4)
    try:
        offload_transformers.enable()
        args = TrainingArguments(output_dir=str(tmp_path), optim="offload_adamw", use_cpu=True)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    finally:
        offload_transformers.disable()
    assert options["lr"] == args.learning_rate
    with kind([{"params": [model.weight]}, {"params": [model.bias]}], **options) as optimizer:
        assert [p.name for p in optimizer.engine.plan.layout.parameters] == ["weight", "bias"]
        extra = torch.nn.Parameter(torch.zeros(3))  # of a loss, say
        optimizer.add_param_group({"params": extra})
        assert optimizer.engine.plan.layout.parameters[-1].name == "param_groups[2].params[0]"
        with pytest.raises(TypeError, match="ordered collections"):
            optimizer.add_param_group({"params": {extra}})
    with kind([{"params": [*model.parameters()]}, {"params": []}], **options) as optimizer:
        assert len(optimizer.param_groups) == 2
        optimizer.add_param_group({"params": [extra]})
    with kind([{"params": [model.weight]}], **options) as optimizer:
        optimizer.add_param_group({"params": iter([model.bias, extra])})
        names = [parameter.name for parameter in optimizer.engine.plan.layout.parameters]
        assert names == ["weight", "bias", "param_groups[1].params[1]"]


@pytest.mark.parametrize(
    ("optim", "optim_args", "taken"),
    [
        ("offload_sgd", "momentum=0.9, nesterov=True", {"momentum": 0.9, "nesterov": True}),
        ("offload_sgd", "dampening=0.1,nesterov=no", {"dampening": 0.1, "nesterov": False}),
        ("offload_adagrad", "lr_decay=1e-3,eps=1e-8", {"lr_decay": 1e-3, "eps": 1e-8}),
        ("offload_muon", "momentum=0.8,ns_steps=4", {"momentum": 0.8, "ns_steps": 4}),
        ("offload_sgd", "momentum=0.9,lr_decay=1", "lr_decay=1.* offload_sgd takes momentum, dampening"),
        ("offload_sgd", "nesterov=2", "nesterov=2.* write a value"),
        ("offload_sgd", "momentum", "write a value"),
        ("offload_adamw", "eps=1e-6", "leave it out with offload_adamw: .*adam_epsilon"),
    ],
)
def test_optim_args_are_taken_or_refused(tmp_path: Path, optim: str, optim_args: str, taken: Any) -> None:
    """With the names and the meaning that they have for torch's optimizer; none is left out without a word."""
    model = torch.nn.Linear(4, 4)

    def choose(optim: str) -> tuple[Any, dict[str, Any]]:
        args = TrainingArguments(output_dir=str(tmp_path), optim=optim, optim_args=optim_args, use_cpu=True)
        chosen: tuple[Any, dict[str, Any]] = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return chosen

    try:
        offload_transformers.enable()
        with pytest.raises(ConfigError, match=taken) if isinstance(taken, str) else contextlib.nullcontext():
            kind, options = choose(optim)
        if isinstance(taken, str):
            return
        with kind(model.named_parameters(), **options) as optimizer:
            assert {name: optimizer.param_groups[0][name] for name in taken} == taken
        if optim != "offload_muon":  # of which transformers has none
            _, stock = choose(optim.removeprefix("offload_"))
            assert {name: value for name, value in options.items() if name != "offload"} == stock
    finally:
        offload_transformers.disable()


def test_what_was_hardly_meant_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another optimizer than ours, once; and fewer checkpoints kept than the Trainer keeps, of which none stays."""

    def said(optim: str) -> str:
        caplog.clear()
        args = TrainingArguments(output_dir=str(tmp_path), optim=optim, save_total_limit=2, use_cpu=True)
        Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(4, 4))
        return caplog.text

    try:
        offload_transformers.enable({"paths": [tmp_path]})
        assert not said("offload_adamw")
        assert 'trains with optim="sgd"' in said("sgd")
        assert not said("sgd")
        offload_transformers.enable({"paths": [tmp_path], "checkpoints_kept": 2})
        assert "with checkpoints_kept=2 each checkpoint is a copy; write 3: save_total_limit" in said("offload_adamw")
        assert 'trains with optim="sgd"' in said("sgd")
        for kept in (0, 3):
            offload_transformers.enable({"paths": [tmp_path], "checkpoints_kept": kept})
            assert not said("offload_adamw")
        args = TrainingArguments(
            output_dir=str(tmp_path), save_total_limit=2, use_cpu=True, report_to=[], max_steps=2, save_steps=1
        )
        given = model()
        with offload.AdamW(given.parameters(), offload=offload.OffloadConfig(paths=[tmp_path])) as optimizer:
            Trainer(model=given, args=args, train_dataset=Tokens(), optimizers=(optimizer, None)).train()
        assert caplog.text.count("with checkpoints_kept=1 each checkpoint is a copy") == 1
    finally:
        offload_transformers.disable()


@pytest.mark.parametrize("name", ["checkpoint-7", "no/folder/checkpoint-7", "a model", "empty"])
def test_what_a_trainer_has_not_saved_it_says_itself(tmp_path: Path, name: str) -> None:
    """A folder that is not there, or is none of a Trainer's, is no interrupted save, and not to be deleted."""
    named = tmp_path / name
    if " " in name or name == "empty":
        named.mkdir()
        (named / "notes.txt").write_text("kept")
    said = []
    for optim in ("adamw_torch", "offload_adamw"):
        try:
            offload_transformers.enable()
            args = TrainingArguments(output_dir=str(tmp_path), optim=optim, use_cpu=True, report_to=[], max_steps=1)
            with pytest.raises(ValueError, match="Can't find a valid checkpoint") as error:
                Trainer(model=model(), args=args, train_dataset=Tokens()).train(resume_from_checkpoint=str(named))
            said.append(str(error.value))
        finally:
            offload_transformers.disable()
    assert said[0] == said[1]


def test_clipping_is_by_the_optimizer_that_a_trainer_has_now(tmp_path: Path) -> None:
    """A second `train` may make another one, which the accelerator, patched for the first, has to find."""
    model = torch.nn.Linear(4, 4)
    try:
        offload_transformers.enable()
        args = TrainingArguments(output_dir=str(tmp_path), optim="offload_adamw", use_cpu=True, report_to=[])
        trainer = Trainer(model=model, args=args)
        first = trainer.create_optimizer()
        first.close()
        trainer.optimizer = None
        second = trainer.create_optimizer()
    finally:
        offload_transformers.disable()
    with second:
        model(torch.ones(2, 4)).sum().backward()
        norm = trainer.accelerator.clip_grad_norm_(model.parameters(), 0.5)
        assert second is not first
        assert second.metrics()["gradient_norm"] == norm > 0
        trainer.optimizer = torch.optim.SGD(model.parameters())
        assert trainer.accelerator.clip_grad_norm_(model.parameters(), 0.5) == pytest.approx(norm)
        assert model.weight.grad.norm() <= 0.5  # torch's own changes gradients


def test_a_callback_sees_and_changes_clipped_gradients(tmp_path: Path) -> None:
    """In `on_pre_optimizer_step`, as with torch's optimizers; without trace, too."""

    class Clamp(TrainerCallback):
        def on_pre_optimizer_step(self, *arguments: Any, **options: Any) -> None:
            for parameter in options["model"].parameters():
                parameter.grad.data.clamp_(-0.02, 0.02)

    trained = []
    for optim in ("sgd", "offload_sgd"):
        model_now = model()
        try:
            offload_transformers.enable()
            args = small_arguments(tmp_path, optim=optim, max_grad_norm=0.5, learning_rate=0.1)
            Trainer(model=model_now, args=args, train_dataset=Tokens(), callbacks=[Clamp()]).train()
        finally:
            offload_transformers.disable()
        trained.append(torch.nn.utils.parameters_to_vector(model_now.parameters()))
    torch.testing.assert_close(*trained, rtol=0, atol=1e-6)


def test_gradients_of_an_interrupted_step_are_gone(tmp_path: Path) -> None:
    """Those that have left `.grad`, too, which the model's own `zero_grad` does not find."""
    trained = []
    for memory in (None, "64KiB"):
        (tmp_path / str(memory)).mkdir()
        model_now, calls = model(), iter(range(100))

        def interrupt(gradient: torch.Tensor, calls: Any = calls) -> None:
            if next(calls) == 1:
                raise RuntimeError("interrupted")

        model_now.model.layers[0].mlp.down_proj.weight.register_hook(interrupt)
        try:
            offload_transformers.enable(
                {"host_memory": 0, "paths": [tmp_path / str(memory)], "gradient_memory": memory}
            )
            args = small_arguments(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0, seed=1)
            trainer = Trainer(model=model_now, args=args, train_dataset=Tokens())
            with pytest.raises(RuntimeError, match="interrupted"):
                trainer.train()
            trainer.train()
        finally:
            offload_transformers.disable()
        trained.append([parameter.detach() for parameter in model_now.parameters()])
    for left, right in zip(*trained, strict=True):
        assert torch.equal(left, right)


class AtSigterm(TrainerCallback):
    """Asks the process to end in its first step; also a handler of SIGTERM, which counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, number: int, frame: Any) -> None:
        self.calls += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)


def test_an_optimizer_of_a_subclass_is_served(tmp_path: Path) -> None:
    """One that `create_optimizer` makes without the Trainer's: it clips, hides steps, saves at a SIGTERM."""

    class Own(Trainer):
        def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = kind([{"params": [p]} for p in self.model.parameters()], **options)
            return self.optimizer

    (tmp_path / "path").mkdir()
    config = {"host_memory": 0, "paths": [tmp_path / "path"], "gradient_memory": "64KiB", "overlap": "forward"}
    asking = AtSigterm()
    before = signal.signal(signal.SIGTERM, asking)
    try:
        offload_transformers.enable(config, commit_on_sigterm=True)
        args = small_arguments(tmp_path, max_grad_norm=1e-3)
        trainer = Own(model=model(), args=args, train_dataset=Tokens(), callbacks=[asking])
        trainer.train()
    finally:
        offload_transformers.disable()
        assert signal.signal(signal.SIGTERM, before) is asking
    assert asking.calls == 1
    assert mark_of(str(tmp_path / "checkpoint-1")) is Mark.WHOLE
    assert min(entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry) > 0


@pytest.mark.parametrize("only", [True, False])
def test_a_save_at_a_sigterm_says_what_it_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture, only: bool) -> None:
    asking = AtSigterm()
    before = signal.signal(signal.SIGTERM, asking)
    try:
        offload_transformers.enable(commit_on_sigterm=True)
        args = small_arguments(tmp_path, save_only_model=only, max_steps=1)
        Trainer(model=model(), args=args, train_dataset=Tokens(), callbacks=[asking]).train()
    finally:
        offload_transformers.disable()
        signal.signal(signal.SIGTERM, before)
    saved = "weights alone (save_only_model): the optimizer begins anew from them" if only else "a checkpoint"
    assert f"SIGTERM: the Trainer saves {saved}" in caplog.messages
    assert (tmp_path / "checkpoint-1" / "optimizer").exists() is not only


def test_what_transformers_own_sigterm_save_deletes_is_not_missed(tmp_path: Path) -> None:
    """Its sentinel is there during the save, and neither in the mark nor in the mirror."""

    class Ask(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            managers = (getattr(each, "jit_manager", None) for each in trainer.callback_handler.callbacks)
            next(filter(None, managers)).is_checkpoint_requested = True

    for name in ("mirror", "path"):
        (tmp_path / name).mkdir()
    before = signal.getsignal(signal.SIGTERM)
    try:
        offload_transformers.enable({"paths": [tmp_path / "path"], "mirror": tmp_path / "mirror"})
        args = small_arguments(tmp_path / "run", enable_jit_checkpoint=True, save_total_limit=1)
        trainer = Trainer(model=model(), args=args, train_dataset=Tokens(), callbacks=[Ask()])
        trainer.train()
    finally:
        offload_transformers.disable()
        signal.signal(signal.SIGTERM, before)
    trainer.optimizer.optimizer.wait_mirror()
    trainer.optimizer.optimizer.close()
    assert (tmp_path / "mirror" / "checkpoint-0" / "model.safetensors").exists()
    assert not [*tmp_path.rglob("*incomplete*")]
    assert cli.main(["verify", str(tmp_path / "run")]) == 0


def test_a_training_that_an_error_ends_leaves_no_handler(tmp_path: Path) -> None:
    """While its Trainer lives, too: it would note a later Trainer's signal, and nobody would pass it on."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        offload_transformers.enable(commit_on_sigterm=True)
        trainer = Trainer(model=model(), args=small_arguments(tmp_path), train_dataset=Tokens())
        trainer.compute_loss = lambda *_, **__: 1 / 0
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        offload_transformers.disable()


def test_an_error_is_shown_though_a_sigterm_ends_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended_by: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended_by.append(number))

    def fail(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError

    try:
        offload_transformers.enable(commit_on_sigterm=True)
        trainer = Trainer(model=model(), args=small_arguments(tmp_path), train_dataset=Tokens())
        trainer.compute_loss = fail
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert ended_by == [signal.SIGTERM]
        assert "ZeroDivisionError" in caplog.text
    finally:
        offload_transformers.disable()
        signal.signal(signal.SIGTERM, before)


def test_callbacks_of_an_earlier_trainer_serve_no_other(tmp_path: Path) -> None:
    """Given to the next Trainer, as a list of them all, or pickled."""
    try:
        offload_transformers.enable(commit_on_sigterm=True)
        trainer = Trainer(model=model(), args=small_arguments(tmp_path), train_dataset=Tokens())
        trainer.train()
        callbacks = [*trainer.callback_handler.callbacks]
        assert len(pickle.loads(pickle.dumps(callbacks))) == len(callbacks)
        del trainer
        gc.collect()
        args = small_arguments(tmp_path, optim="adamw_torch")
        Trainer(model=model(), args=args, train_dataset=Tokens(), callbacks=callbacks).train()
    finally:
        offload_transformers.disable()


def test_an_optimizer_is_gone_before_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `model_init`, as a search for hyperparameters has it: two would not fit where one is planned for."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    alive: list[int] = []
    initialize = offload.AdamW.__init__

    def note(self: Any, *given: Any, **options: Any) -> None:
        alive.append(len(made))
        initialize(self, *given, **options)
        made.add(self)

    monkeypatch.setattr(offload.AdamW, "__init__", note)
    try:
        offload_transformers.enable()
        trainer = Trainer(model_init=model, args=small_arguments(tmp_path), train_dataset=Tokens())
        for _ in range(2):
            trainer.train()
    finally:
        offload_transformers.disable()
    assert alive == [0, 0]


def test_the_last_micro_step_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an epoch's last step, too, which may have fewer."""
    said: list[bool] = []
    told: list[Any] = []
    monkeypatch.setattr(offload.AdamW, "last_micro_step", lambda self, is_last: told.append(is_last))
    trained = model()
    trained.register_forward_hook(lambda *_: said.append(told[-1]()))
    try:
        offload_transformers.enable()
        args = TrainingArguments(
            output_dir=str(tmp_path),
            optim="offload_adamw",
            per_device_train_batch_size=16,
            gradient_accumulation_steps=3,
            num_train_epochs=1,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=trained, args=args, train_dataset=Tokens())
        trainer.train()
    finally:
        offload_transformers.disable()
    assert said == [False, False, True, True]


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"host_mem": 1}')
    with pytest.raises(offload.ConfigError, match="host_mem"):
        offload_transformers.enable(file)
    with pytest.raises(offload.ConfigError, match="host_mem"):
        offload_transformers.enable({"host_mem": 1})
    with pytest.raises(offload.ConfigError, match="OffloadConfig's fields"):
        offload_transformers.enable([])  # type: ignore[arg-type]
    with pytest.raises(offload.ConfigError, match="give the fields of multi_tier_offload alone"):
        offload_transformers.enable({"multi_tier_offload": {"host_memory": "1GiB"}})
    file.write_text("{")
    with pytest.raises(offload.ConfigError, match="not JSON"):
        offload_transformers.enable(file)
    with pytest.raises(offload.ConfigError, match="it cannot be read: No such file"):
        offload_transformers.enable(tmp_path / "none.json")
    with pytest.raises(offload.ConfigError, match=r"paths\[0\]: .*the directory does not exist"):
        offload_transformers.enable({"paths": [tmp_path / "none"]})
    with pytest.raises(offload.ConfigError, match=r"paths\[1\]: .*it is not a directory"):
        offload_transformers.enable({"paths": [tmp_path, file]})
    with pytest.raises(offload.ConfigError, match="first, in this process"):
        OptimizerNames("offload_adamw")


def test_another_optimizer_is_told_how_to_go_on_from_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "COMMIT").touch()
    theirs = SimpleNamespace(optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]))
    loaded: list[Any] = []
    monkeypatch.setattr(Trainer, "_load_optimizer_and_scheduler", lambda *given: loaded.append(given))
    offload_transformers.enable()
    try:
        load = Trainer.__dict__["_load_optimizer_and_scheduler"].__get__(theirs)
        with pytest.raises(offload.CheckpointError, match=r"offload export .* --for transformers OUT"):
            load(str(tmp_path))
        load(str(tmp_path / "other"))
    finally:
        offload_transformers.disable()
    assert loaded == [(theirs, str(tmp_path / "other"))]
