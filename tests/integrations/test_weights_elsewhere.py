"""The FSDP settings of the Trainer and of Accelerate have weights wait in host memory, with the bits of the device.

Accelerate has FSDP for the accelerators that it knows, of which the test accelerator is none: here it is told so.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate.accelerator
import transformers.training_args
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from small import SETTINGS
from torch.distributed.fsdp import FSDPModule
from trainer_runs import Tokens
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import offload
import offload.integrations.transformers as offload_transformers
from offload import cli
from offload.integrations.accelerate import enable
from offload.optim import shards

pytestmark = [
    pytest.mark.late(shared=True),
    pytest.mark.slow,
    pytest.mark.not_overlapped("steps go on where the tests say so"),
    pytest.mark.not_ahead("updates are made ahead where the tests say so"),
]

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"
HOST = {"fsdp": True, "fsdp_config": {"cpu_offload": True}}
RECOMPUTES = {"fsdp": True, "fsdp_config": {"cpu_offload": True, "activation_checkpointing": True}}
SETTINGS = {**SETTINGS, "subgroup_numel": 16384}
LAUNCHED = "cpu:gloo,late:late", DistributedType.MULTI_GPU
ALONE = None, DistributedType.NO
"""What Accelerate finds where a launcher has started this process, and where none has."""


def start(patch: pytest.MonkeyPatch, is_launched: bool) -> None:
    """Begin as a process that a launcher has started as its only one, or that none has."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    patch.setenv("ACCELERATE_TORCH_DEVICE", "late:0")
    patch.delenv("ACCELERATE_USE_FSDP", raising=False)
    patch.setattr(PartialState, "_prepare_backend", lambda *_: LAUNCHED if is_launched else ALONE)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
        patch.delenv(name, raising=False)
        if is_launched:
            patch.setenv(name, str(value))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = dict(os.environ)
    dist.init_process_group(LAUNCHED[0], store=dist.HashStore(), rank=0, world_size=1)
    yield
    offload_transformers.disable()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in {*os.environ} - {*before}:
        del os.environ[name]
    os.environ.update(before)


def llama(dtype: torch.dtype = torch.bfloat16, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes, **more)).to(dtype)


def tied() -> LlamaForCausalLM:
    return llama(tie_word_embeddings=True)


def whole() -> LlamaForCausalLM:
    return llama(torch.float32)


def frozen() -> LlamaForCausalLM:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.requires_grad_(True)
    return model


def content(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Return all weights, and state of those that train; FSDP2 has some on the device after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found = [shards.local(weight).detach().cpu().clone() for weight in model.parameters()]
    for weight in model.parameters():
        if weight.requires_grad:
            found += (shards.local(each).clone() for each in optimizer.state_for(weight).values())
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], last: int = 0) -> None:
    for name in ("losses", "norms", "evaluated"):
        assert found[name][-last:] == expected[name][-last:], name
    assert all(map(torch.equal, found["content"], expected["content"]))
    assert len(found["content"]) == len(expected["content"])


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        control.should_training_stop = state.global_step == 2


def trained(
    folder: Path,
    model: LlamaForCausalLM,
    overlap: str = "off",
    stops: bool = False,
    resume: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Train in a Trainer, which saves after 2 of 4 steps; without `fsdp` in a process that nobody has launched."""
    (folder / "path").mkdir(parents=True, exist_ok=True)
    few = torch.utils.data.Subset(Tokens(), range(2))
    given: dict[str, Any] = {"optim": "offload_adamw", "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    given |= {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "max_grad_norm": 0.5, "weight_decay": 0.1}
    with pytest.MonkeyPatch.context() as patch:
        start(patch, is_launched="fsdp" in more)
        offload_transformers.enable({**SETTINGS, "paths": [folder / "path"], "overlap": overlap})
        args = TrainingArguments(output_dir=str(folder), report_to=[], disable_tqdm=True, **{**given, **more})
        data = {"train_dataset": Tokens(), "eval_dataset": few}
        trainer = Trainer(model=model, args=args, callbacks=[Stop()] if stops else None, **data)
        trainer.train(resume_from_checkpoint=resume or None)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(shards.is_dtensor(weight) is ("fsdp" in more) for weight in model.parameters())
    assert {weight.device.type for weight in model.parameters()} == {"cpu" if "fsdp" in more else "late"}
    with trainer.optimizer.optimizer as optimizer:
        return {
            "losses": [entry["loss"] for entry in history],
            "norms": [entry["grad_norm"] for entry in history],
            "evaluated": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
            "content": content(model, optimizer),
            "hidden_in": optimizer.plan.hidden_in,
        }


SOME = {
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "prediction_loss_only": True,
    "load_best_model_at_end": True,
}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


@pytest.mark.parametrize(
    ("made", "overlap", "settings", "more"),
    [
        (llama, "forward", HOST, {**SOME, "save_total_limit": 1}),
        (tied, "both", HOST, {"activation_checkpointing": True}),
        (frozen, "backward", RECOMPUTES, {}),
        (whole, "off", HOST, {"bf16": True}),
        pytest.param(llama, "auto", HOST, COMPILED, marks=pytest.mark.full),
    ],
)
def test_a_trainers_bits_are_those_of_weights_on_the_device(
    made: Callable[[], LlamaForCausalLM],
    overlap: str,
    settings: dict[str, Any],
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerate.accelerator, "is_bf16_available", lambda *_: True)
    monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda *_: True)
    found = trained(tmp_path / "host", made(), overlap, **settings, **more)
    expected = trained(tmp_path / "device", made(), **more)
    assert_same(found, expected)
    assert len(set(found["losses"])) == 4
    if overlap != "auto":
        assert found["hidden_in"] == {"both": "forward and backward", "off": ""}.get(overlap, overlap)


def test_a_trainers_checkpoint_goes_both_ways(tmp_path: Path) -> None:
    """With FSDP or without it to the other; there is nothing in the folder that only one writes."""
    expected, files = trained(tmp_path / "whole", llama()), []
    for settings, other in ((HOST, {}), ({}, HOST)):
        folder = tmp_path / f"first {len(files)}"
        trained(folder, llama(), stops=True, **settings)
        files.append({path.name for path in (folder / "checkpoint-2").iterdir()})
        assert_same(trained(folder, llama(), resume=True, **other), expected, 2)
    assert files[0] == files[1] >= {"model.safetensors", "optimizer", "optimizer.pt"}


@pytest.mark.parametrize(
    ("fsdp", "ranks", "said"),
    [
        (
            {"version": 1, "cpu_offload": True, "sync_module_states": False},
            1,
            "FSDP1, cpu_offload False, 1 processes",
        ),
        ({}, 1, "FSDP2, cpu_offload False, 1 processes"),
        ({"cpu_offload": True}, 2, "FSDP2, cpu_offload True, 2 processes"),
    ],
)
def test_what_a_trainer_cannot_do_is_named(
    fsdp: dict[str, Any], ranks: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, is_launched=True)
    offload_transformers.enable()
    monkeypatch.setattr(Accelerator, "num_processes", ranks)
    args = TrainingArguments(
        output_dir=str(tmp_path), optim="offload_adamw", fsdp=True, fsdp_config=fsdp, report_to=[]
    )
    with pytest.raises(offload.ConfigError, match=re.escape(said)) as error:
        Trainer(model=llama(), args=args, train_dataset=Tokens()).create_optimizer()
    assert 'fsdp_config={"cpu_offload": True}' in str(error.value)


def test_the_page_shows_a_trainer(tmp_path: Path) -> None:
    program, command = shown("With the Trainer")
    launch(command, program, tmp_path)
    assert (tmp_path / "out" / "checkpoint-2" / "optimizer" / "COMMIT").exists()


def test_without_a_gpu_a_trainer_can_leave_fsdp_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerates_own = PartialState._prepare_backend
    start(monkeypatch, is_launched=True)
    monkeypatch.setattr(PartialState, "_prepare_backend", accelerates_own)
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    offload_transformers.enable({**SETTINGS, "paths": [tmp_path]})
    given = {"output_dir": str(tmp_path), "optim": "offload_adamw", "max_steps": 1, "report_to": [], **HOST}
    trainer = Trainer(llama(), TrainingArguments(use_cpu=True, **given), train_dataset=Tokens())
    assert trainer.train().global_step == 1
    assert not any(map(shards.is_dtensor, trainer.model.parameters()))
    trainer.optimizer.optimizer.close()
    with pytest.raises(ValueError, match="fsdp only works in distributed training"):
        Trainer(llama(), TrainingArguments(**given), train_dataset=Tokens())


@pytest.mark.parametrize("call", ["weights_in_file", "weights_in_host_memory"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_page_shows_a_model_that_is_larger_than_memory(
    call: str, is_tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, tie_word_embeddings=is_tied, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "llama")
    program = next(text for text in shown("In a file", "##") if "init_empty_weights" in text)
    if call == "weights_in_host_memory":
        program = program.replace('in_file(model, "/mnt/nvme", ', "in_host_memory(model, ")
    exec(program.replace("/mnt/nvme", str(tmp_path)), space := {})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.bfloat16)
    if call == "weights_in_file":
        offload.weights_in_file(loaded, tmp_path)
    else:
        offload.weights_in_host_memory(loaded)
    assert not caplog.records
    found = []
    for model in (space["model"].train(), loaded.train()):
        with offload.AdamW(model.named_parameters(), lr=1e-2, offload={**SETTINGS, "paths": [tmp_path]}) as optimizer:
            tokens = Tokens()[0]["input_ids"][None]
            for _ in range(2):
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            logits = model(input_ids=tokens).logits.detach().cpu()
            found.append([logits, *model.buffers(), *content(model, optimizer)])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
    assert {weight.dtype for weight in space["model"].parameters()} == {torch.bfloat16}
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    with pytest.raises(offload.ConfigError, match=r"model\.rotary_emb\.inv_freq.*init_empty_weights"):
        exec(
            program[program.index("offload.weights") :].replace("/mnt/nvme", str(tmp_path)), {**space, "model": model}
        )


def test_what_advise_prints_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = "--gpu 16GiB --flops 6e13 --link 25GB/s --host 64GiB --drive 3GB/s:1TB --cores 16 --tokens 2048"
    asked = ["--model", "qwen-0.5b", "--weights-on", "host", "--state-format", "exact", "--advise"]
    assert cli.main(["plan", *asked, *machine.split()]) == 0
    printed = capsys.readouterr().out.replace("/mnt/drive0", str(tmp_path))
    texts = re.findall(r"^Trainer, run by torchrun --nproc-per-node 1:\n((?:    .*\n?)+)", printed, re.MULTILINE)
    text = next(text for text in texts if '"gradient_memory": 0' in text and "checkpointing=True" in text)
    monkeypatch.chdir(tmp_path)
    start(monkeypatch, is_launched=True)
    exec(re.sub("^    ", "", text, flags=re.MULTILINE), space := {"TrainingArguments": TrainingArguments})
    space["arguments"].max_steps = 1
    trainer = Trainer(model := llama(), space["arguments"], train_dataset=Tokens())
    assert trainer.train().global_step == 1
    trainer.optimizer.optimizer.close()
    assert all(map(shards.is_dtensor, model.parameters()))


def looped(way: str, folder: Path, overlap: str = "off", resume: Path | None = None, **plugin: Any) -> dict[str, Any]:
    """Train by Accelerate, which saves after 2 of 4 steps: on the device, by FSDP2, or by one line more."""
    (folder / "path").mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        start(patch, is_launched=way == "fsdp")
        fsdp = {"fsdp_version": 2, "cpu_offload": True, "auto_wrap_policy": "transformer_based_wrap", **plugin}
        given = FullyShardedDataParallelPlugin(**fsdp) if way == "fsdp" else None
        accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=given)
        model = tied()
        if way == "device":
            model.to(accelerator.device)
        if way == "line":
            offload.weights_in_host_memory(model)
        config = {**SETTINGS, "paths": [folder / "path"], "overlap": overlap}
        optimizer = offload.AdamW(model.named_parameters(), lr=1e-2, offload=config)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        optimizer = enable(accelerator, optimizer)
        if resume is not None:
            accelerator.load_state(str(resume))
        losses, norms, evaluated = [], [], []
        for step in range(int(optimizer.metrics()["step"]), 4):
            for number in (2 * step, 2 * step + 1):
                with accelerator.accumulate(model):
                    tokens = Tokens()[number]["input_ids"][None].to(accelerator.device)
                    loss = model(input_ids=tokens, labels=tokens).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
            with torch.no_grad():
                evaluated.append(model(input_ids=tokens, labels=tokens).loss.item())
            if step == 1:
                accelerator.save_state(str(folder / "saved"))
        optimizer.finish()
        with optimizer.optimizer as ours:
            assert ours.engine.plan.layout.parameters[0].name == "model.embed_tokens.weight"
            return {"losses": losses, "norms": norms, "evaluated": evaluated, "content": content(model, ours)}


@pytest.mark.parametrize(
    ("way", "overlap", "plugin"),
    [
        ("line", "forward", {}),
        ("fsdp", "both", {"activation_checkpointing": True, "cpu_ram_efficient_loading": True}),
    ],
)
def test_accelerates_bits_are_those_of_weights_on_the_device(
    way: str, overlap: str, plugin: dict[str, Any], tmp_path: Path
) -> None:
    expected = looped("device", tmp_path / "device")
    assert_same(looped(way, tmp_path / "host", overlap, **plugin), expected)
    for number, name in enumerate(("host", "device") if way == "line" else ("host",)):
        folder = tmp_path / name / "saved"
        assert (folder / "optimizer_state" / "COMMIT").exists()
        assert (folder / "optimizer.bin").stat().st_size < 4096
        assert_same(looped(way, tmp_path / f"again {number}", overlap, folder, **plugin), expected, 2)


def test_accelerate_goes_on_from_torchs_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, is_launched=True)
    found = []
    for number, kind in enumerate((torch.optim.AdamW, offload.AdamW)):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
        accelerator, model = Accelerator(fsdp_plugin=plugin), whole()
        model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=1e-2))
        if number:
            optimizer = enable(accelerator, optimizer)
            accelerator.load_state(str(tmp_path))
        for step in range(number, 2):
            tokens = Tokens()[step]["input_ids"][None].to(accelerator.device)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                accelerator.save_state(str(tmp_path))
        found.append([shards.local(weight).detach().clone() for weight in model.parameters()])
    optimizer.optimizer.close()
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*found, strict=True))


def test_the_page_shows_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the line that has Accelerate leave the model alone; and without it, where its launcher is told of FSDP."""
    program, command = shown("With Accelerate")
    line = "offload.weights_in_host_memory(model)  # before the optimizer is made\n"
    assert line in program
    start(monkeypatch, is_launched=False)
    exec(program.replace("/mnt/nvme", str(tmp_path)), space := {})
    assert all(map(shards.is_dtensor, space["model"].parameters()))
    space["optimizer"].close()
    launch(command, program.replace(line, ""), tmp_path)


LOAD = f"""import sys
sys.path.insert(0, {str(PAGE.parents[1] / "tests")!r})
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerator import late
late.load()
from offload import backends
backends.BACKENDS["late"] = backends.Backend(pin=late.pin, unpin=late.unpin)
PartialState._prepare_backend = lambda *_: ({LAUNCHED[0]!r}, DistributedType.MULTI_GPU)
"""
CHECK = """
from offload.optim import shards
assert all(shards.is_dtensor(weight) and weight.is_cpu for weight in model.parameters())
late.end_rank()
"""


def launch(command: str, program: str, folder: Path) -> None:
    """Run a program of the page as the page says, on the test accelerator."""
    (folder / "train.py").write_text(LOAD + program.replace("/mnt/nvme", str(folder)) + CHECK)
    launchers = {
        "torchrun": ("-m", "torch.distributed.run", "--standalone"),
        "accelerate launch": ("-m", "accelerate.commands.launch", "--main_process_port", "0"),
    }
    (launcher,) = [name for name in launchers if command.startswith(name)]
    words = [sys.executable, *launchers[launcher], *command.removeprefix(launcher).split()]
    where = {**os.environ, "ACCELERATE_TORCH_DEVICE": "late:0", "OMP_NUM_THREADS": "1"}
    ended = prepared.ran(words, cwd=folder, env=where)
    assert "passed" in ended.stdout


def shown(section: str, level: str = "###") -> list[str]:
    (text,) = re.findall(rf"^{level} {section}\n(.*?)^##", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found: list[str] = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return found
