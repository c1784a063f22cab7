"""torchtitan with the optimizer state on disk: torchrun torchtitan_train.py FOLDER; again, it resumes."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

import offload

folder, optimizer = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "offload.AdamW"


class Optimizers(OptimizersContainer):
    """torchtitan's list of optimizers is closed: this adds those of offload."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str):
        found = getattr(offload, name.removeprefix("offload."), None) if name.startswith("offload.") else None
        return found or OptimizersContainer._resolve_optimizer_factory(name)


def tiny() -> Trainer.Config:
    config = llama3_debugmodel()
    settings = {"host_memory": 0, "staging_memory": "16MiB", "paths": [str(folder)], "subgroup_numel": 1 << 19}
    config.optimizer = Optimizers.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name=optimizer, optimizer_kwargs={"lr": 1e-3})],
        optimizer_factory_kwargs_by_name={"offload.AdamW": {"offload": settings}},
        implementation="for-loop",
    )
    config.dump_folder, config.parallelism.spmd_backend = str(folder / "run"), "partial_dtensor"  # as torch 2.13 can
    config.hf_assets_path, config.dataloader.dataset_path = str(folder), str(folder / "rows")
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, 20
    config.debug.seed, config.checkpoint.enable, config.validator.enable = 0, True, False
    return config


if os.environ["RANK"] == "0" and not (folder / "rows").exists():  # in the place of what has been downloaded
    torch.manual_seed(0)
    (folder / "rows").mkdir()
    words = Tokenizer(models.WordLevel({str(number): number for number in range(2048)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    rows = [{"text": " ".join(map(str, row))} for row in torch.randint(2, 2048, (256, 64)).tolist()]
    (folder / "rows" / "rows.json").write_text(json.dumps(rows))
init_logger()
trainer = tiny().build()
trainer.train()
trainer.close()
