"""litgpt's finetuning with the optimizer state on disk: python litgpt_finetune.py [FOLDER]; again, it resumes."""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from litgpt import GPT, Config
from litgpt.__main__ import main
from tokenizers import Tokenizer, models, pre_tokenizers

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
base = folder / "tiny"
if not base.exists():  # in the place of what `litgpt download` brings
    base.mkdir()
    torch.manual_seed(0)
    config = Config(name="tiny", block_size=64, padded_vocab_size=256, n_layer=2, n_head=4, n_embd=64)
    torch.save(GPT(config).state_dict(), base / "lit_model.pth")
    (base / "model_config.yaml").write_text(yaml.dump(asdict(config)))
    words = Tokenizer(models.WordLevel({str(number): number for number in range(256)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(base / "tokenizer.json"))
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "1"}')
    texts = [" ".join(map(str, row)) for row in torch.randint(2, 256, (256, 24)).tolist()]
    (folder / "rows.json").write_text(json.dumps([{"instruction": "", "output": text} for text in texts]))

settings = {"host_memory": 0, "staging_memory": "1MiB", "paths": [str(folder)], "subgroup_numel": 8192}
optimizer = {"class_path": "offload.AdamW", "init_args": {"lr": 1e-3, "offload": settings}}
if len(sys.argv) > 2:
    optimizer = {"class_path": sys.argv[2], "init_args": {"lr": 1e-3}}
arguments = {
    "checkpoint_dir": str(base),
    "out_dir": str(folder / "run"),
    "resume": "auto",
    "precision": "32-true",
    "data": {
        "class_path": "litgpt.data.JSON",
        "init_args": {"json_path": str(folder / "rows.json"), "val_split_fraction": 0.1, "num_workers": 0},
    },
    "train": {"epochs": 1, "max_steps": 20, "save_interval": 10, "lr_warmup_steps": 2, "global_batch_size": 4},
    "eval": {"max_new_tokens": 1},
    "optimizer": optimizer,
}
(folder / "run.yaml").write_text(yaml.dump(arguments))
sys.argv = ["litgpt", "finetune_full", "--config", str(folder / "run.yaml")]
main()
