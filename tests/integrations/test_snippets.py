"""Every block that the README and the pages in docs/ show is run, or read by what it is for.

`RUN_BY` says by which test. Python blocks that stand for themselves, and plans, are run by e2e/test_readme.py. Those
that are parts of a user's program are run here, with what they leave out (`...`) filled in.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import offload
import offload.integrations.transformers as offload_transformers
from offload import OffloadConfig, cli
from offload.integrations.deepspeed import settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = {
    f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 2}": (match[1], match[2])
    for page in PAGES
    if page.name != "api.md"  # signatures, which are generated
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
}
"""Language and text of each block, by page and line."""

HERE, README, BACK, DOORS, ELSEWHERE = (
    "integrations/test_snippets.py",
    "e2e/test_readme.py",
    "integrations/test_going_back.py",
    "integrations/test_doors.py",
    "integrations/test_weights_elsewhere.py",
)
RUN_BY = {
    r"offload (plan|machine) ": README,
    r"\.venv/bin/offload probe ": README,
    r"import torch, offload\n": "accelerator/test_weights_in_host_memory.py",
    r"import torch\nfrom (accelerate|transformers) import ": ELSEWHERE,
    r"from pathlib import Path\n\nfrom accelerate import ": ELSEWHERE,
    r"(torchrun --nproc-per-node 1|accelerate launch) ": ELSEWHERE,
    r"offload check-run ": "e2e/test_check_run.py",
    r"pip install (torch|dist/)": "wheels.py",
    r"python -m moto\.server ": "s3_server.py",
    r"pip install setuptools .*\nDS_BUILD_OPS=0 pip install ": HERE,
    r"make ": HERE,
    r"bench/gpu/(pack|once)\.sh ": "test_gpu_once.py",
    r"python bench/published\.py ": "test_bench.py",
    r'(\{|"multi_tier_offload"|"zero_optimization")': HERE,
    r"import offload.integrations.deepspeed ": HERE,
    r"torchrun --nproc-per-node 2 -m offload.integrations.deepspeed ": "integrations/test_deepspeed_launcher.py",
    r"ray job submit ": "",  # the page says that it was tried by hand
    r"import offload.integrations.transformers .*\n\n.*\ntrainer = ": HERE,
    r"from offload.integrations.(lightning|accelerate) import ": HERE,
    r"python -m verl.trainer.main_ppo ": "integrations/test_verl.py",
    r"import offload.integrations.megatron ": "integrations/test_megatron.py",
    r"torchrun \.\.\. pretrain_gpt\.py ": HERE,
    r"import offload.integrations.transformers .*\nfrom llamafactory": DOORS,
    r"(optim|optimizer): *\S*\n": DOORS,
    r"from dataclasses import dataclass\n\nfrom torchtitan": DOORS,
    r"offload export \S+ --for ": BACK,
    r"offload export checkpoints/global_step500 ": "integrations/deepspeed_checks.py",
    r"engine\.(save|load)_checkpoint\(": "integrations/deepspeed_checks.py",
    r"(arguments = TrainingArguments|class WithTorch|model, optimizer = accelerator\.prepare\(model, torch)": BACK,
    r"with offload\.AdamW\(model\.named_parameters\(\)\) as ours:": BACK,
    r"optimizer\.log_to\(": HERE,
    r"(optimizer\.overlap_forward\(|p\.data\.copy_\()": HERE,
    r"(config = offload\.OffloadConfig|optimizer = offload\.(AdamW|Muon))\(": HERE,
    r" +gradients +─": "",  # a drawing
}
"""What a block begins with, and the file of tests that has it run."""

SETTINGS = {"subgroup_numel": 4096, "staging_memory": "256KiB", "threads": 1}


def block(beginning: str) -> str:
    """Return the block that begins so."""
    (found,) = [text for _, text in SHOWN.values() if re.match(beginning, text)]
    return found


@pytest.mark.parametrize("place", SHOWN)
def test_a_block_is_run_by_a_test(place: str) -> None:
    language, text = SHOWN[place]
    if language == "python":  # run by test_readme, all of them
        return
    names = [name for beginning, name in RUN_BY.items() if re.match(beginning, text)]
    assert len(names) == 1, f"which test runs this?\n{text}"
    assert (ROOT / "tests" / names[0]).exists()


def test_what_is_said_of_blocks_is_of_blocks() -> None:
    for beginning in RUN_BY:
        assert any(re.match(beginning, text) for _, text in SHOWN.values()), beginning


@pytest.mark.parametrize("place", [place for place, (language, _) in SHOWN.items() if language == "json"])
def test_settings_are_ones_that_work(place: str) -> None:
    text = SHOWN[place][1]
    found = json.loads(text if text.startswith("{") else f"{{{text}}}")
    if not found.keys().isdisjoint(("multi_tier_offload", "zero_optimization")):
        whole = json.loads(block(r'\{\n  "train_micro'))
        assert settings.read({**whole, **found}).paths
    else:
        assert OffloadConfig.from_dict(found).paths


def test_versions_and_targets_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for _, text in SHOWN.values():
        for release in re.findall(r"(?:torch|deepspeed)==[\d.]+", text):
            assert f":= {release}\n" in makefile
        for target in re.findall(r"^make (\S+)", text, re.MULTILINE):
            assert re.search(
                rf"^(?:[\w-]+ )*{re.escape(target.replace('.venv', '$(VENV)'))}(?: [\w-]+)*:", makefile, re.M
            )
        for named in re.findall(r" (tests/\S+|bench/\S+\.py)", text):
            assert (ROOT / named).exists()


LINES = r"(optimizer\.overlap_forward|p\.data\.copy_|config = offload\.OffloadConfig|optimizer = offload\.\w+)\("


@pytest.mark.parametrize("place", [place for place, (_, text) in SHOWN.items() if re.match(LINES, text)])
def test_lines_that_open_a_section_work(place: str, tmp_path: Path) -> None:
    text = SHOWN[place][1].replace("(..., ", "(paths=[path], host_memory=0, ").replace(", ...}", ', "paths": [path]}')
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    config = OffloadConfig(paths=[tmp_path], **SETTINGS)
    known: dict[str, Any] = {"offload": offload, "torch": torch, "model": model, "config": config}
    known |= {"path": str(tmp_path), "p": model[0].weight, "other": torch.ones(64, 64)}
    if "optimizer = " not in text:
        known["optimizer"] = offload.AdamW(model.parameters(), offload=config)
    exec(text, known)
    with known.get("optimizer") or offload.AdamW(model.parameters(), offload=known["config"]) as optimizer:
        model(torch.ones(2, 64).bfloat16()).float().sum().backward()
        optimizer.step()


COMMANDS = sorted(
    {line for page in PAGES for line in re.findall(r"`(offload \w+ [^`\n]*--[^`\n]*)`", page.read_text())}
)


@pytest.mark.parametrize("line", COMMANDS)
def test_options_of_commands_in_text_exist(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, command, *words = shlex.split(line)
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    known = capsys.readouterr().out
    for option in [word for word in words if word.startswith("--")]:
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", known), option


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 32, (16, 8))]


def small() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=8, **sizes))


def filled(text: str, folder: Path, *fillings: str) -> str:
    """Return a block with its `...` filled in, in their order, and a folder that is there for its disk."""
    text = text.replace("/mnt/nvme0/offload", str(folder))
    assert text.count("...") == len(fillings)
    for filling in fillings:
        text = text.replace("...", filling, 1)
    return text


@pytest.mark.slow
def test_the_trainers_lines(tmp_path: Path) -> None:
    arguments = f"output_dir={str(tmp_path / 'run')!r}, max_steps=1, use_cpu=True, report_to=[]"
    text = filled(
        block(r"import offload.integrations.transformers .*\n\n.*\ntrainer = "),
        tmp_path,
        arguments,
        "train_dataset=rows",
    )
    given: dict[str, Any] = {
        "Trainer": Trainer,
        "TrainingArguments": TrainingArguments,
        "model": small(),
        "rows": rows(),
    }
    try:
        exec(text, given)
        with given["trainer"].optimizer.optimizer as optimizer:
            assert type(optimizer).__mro__[1] is offload.AdamW
    finally:
        offload_transformers.disable()


MACHINES = {"cpu": "--flops 1e12", "gpu": "--gpu 16GiB --flops 6e13"}


@pytest.mark.slow
@pytest.mark.parametrize("where", MACHINES)
def test_what_advise_prints_runs_without_a_warning(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a GPU all but the optimizers, as their settings are refused where there is none."""
    monkeypatch.chdir(tmp_path)
    machine = f"--host 16GiB --drive 3GB/s:1TB --tokens 256 --recompute {MACHINES[where]}"
    assert cli.main(["plan", "--model", "qwen-0.5b", *machine.split(), "--state-format", "exact", "--advise"]) == 0
    printed = capsys.readouterr().out.replace("/mnt/drive0", str(tmp_path))
    blocks = dict(re.findall(r"^(\w+)[^\n]*:\n((?:    .*\n)+)", printed, re.MULTILINE))
    python, trainer = (re.sub("^    ", "", blocks[name], flags=re.MULTILINE) for name in ("Python", "Trainer"))
    model = small()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if where == "gpu":
            exec(python.splitlines()[0], {"model": model})
            exec(trainer, given := {"TrainingArguments": TrainingArguments})
            offload_transformers.disable()
        else:
            exec(python, given := {"model": model, "offload": offload})
            model(**{name: row[None] for name, row in rows()[0].items()}).loss.backward()
            given["optimizer"].step()
            given["optimizer"].close()
            exec(trainer, given := {"TrainingArguments": TrainingArguments})
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert given["arguments"].gradient_checkpointing
    if where == "cpu":
        given["arguments"].max_steps = 1
        try:
            made = Trainer(small(), given["arguments"], train_dataset=rows())
            assert made.train().global_step == 1
            with made.optimizer.optimizer as optimizer:
                assert type(optimizer).__mro__[1] is offload.AdamW
        finally:
            offload_transformers.disable()


@pytest.mark.slow
def test_what_advise_prints_for_several_ranks_shards_all_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """All but the optimizer, as its settings are for a GPU."""
    machine = "--gpu 2x40GiB --host 128GiB --drive 3GB/s:1TB --tokens 256 --recompute --state-format exact"
    words = ["plan", "--model", "llama-2-7b", *machine.split(), "--advise", "--for", "torch"]
    assert cli.main(words) == 0
    (lines,) = re.findall(r"^Python[^\n]*:\n((?:    .*\n)+?)    optimizer = ", capsys.readouterr().out, re.MULTILINE)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        exec(re.sub("^    ", "", lines, flags=re.MULTILINE), {"model": (model := small())})
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        parts = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        assert parts == ["", "model.embed_tokens", "model.layers.0", "lm_head"]
        model(**{name: row[None] for name, row in rows()[0].items()}).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_lightnings_lines(tmp_path: Path) -> None:
    pytorch = pytest.importorskip("lightning.pytorch")

    class LightningModule(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
            self.made: list[Any] = []

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            assert isinstance(self.optimizers().optimizer, offload.AdamW)
            return self.layer(batch).square().mean()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(4, 8))

    where = f"'host_memory': 0, 'paths': [{str(tmp_path)!r}], **SETTINGS"
    options = (
        f"max_steps=2, accelerator='cpu', logger=False, enable_progress_bar=False, default_root_dir={str(tmp_path)!r}"
    )
    text = filled(block(r"from offload.integrations.lightning import "), tmp_path, where, options)
    exec(
        text,
        {"LightningModule": LightningModule, "Trainer": pytorch.Trainer, "offload": offload, "SETTINGS": SETTINGS},
    )
    assert list(tmp_path.glob("checkpoints/*.ckpt.offload-*/COMMIT"))


def test_accelerates_lines(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    given = {"accelerator": accelerate.Accelerator(cpu=True), "model": small(), "offload": offload}
    exec(filled(block(r"from offload.integrations.accelerate import "), tmp_path, "lr=1e-3"), given)
    assert given["optimizer"].metrics()["resident_share"] == 1
    given["optimizer"].close()


def test_deepspeeds_lines() -> None:
    pytest.importorskip("deepspeed")
    given: dict[str, Any] = {}
    try:
        exec(block(r"import offload.integrations.deepspeed "), given)
    finally:
        given["offload_deepspeed"].disable()


def test_the_flags_for_megatron_are_those_that_its_test_gives() -> None:
    tested = (ROOT / "tests" / "integrations" / "megatron_runs.py").read_text()
    flags = re.findall(r"--((?:use|optimizer)-[\w-]+)", block(r"torchrun \.\.\. pretrain_gpt\.py "))
    assert len(flags) == 3
    assert all(flag.replace("-", "_") in tested for flag in flags)


def test_the_lines_for_verl_are_those_that_its_test_takes() -> None:
    tested = (ROOT / "tests" / "integrations" / "verl_runs.py").read_text()
    given = re.findall(r"^ +'?([\w.]+)=", block(r"python -m verl.trainer.main_ppo "), re.MULTILINE)
    assert len(given) == 4
    assert [name for name in given if f"{name}=" not in tested] == []


def test_the_lines_for_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SummaryWriter:
        seen: dict[str, float] = {}  # noqa: RUF012

        def __init__(self, folder: str) -> None:
            pass

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen[name] = value

    monkeypatch.chdir(tmp_path)
    weight = torch.nn.Parameter(torch.ones(8))
    with offload.AdamW([weight]) as optimizer:
        weight.grad = torch.ones(8)
        optimizer.step()
        exec(block(r"optimizer\.log_to\("), {"optimizer": optimizer, "SummaryWriter": SummaryWriter})
        weight.grad = torch.ones(8)
        optimizer.step()
    assert "offload/step_s" in SummaryWriter.seen
    assert json.loads((tmp_path / "trace.json").read_text())
