"""LLaMA-Factory with the optimizer state on disk: python llama_factory_sft.py [FOLDER]; again, it resumes."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from llamafactory.train.tuner import run_exp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import offload.integrations.transformers as offload_transformers

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
base = folder / "tiny"  # in the place of a model that has been downloaded
if not base.exists():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=256, **sizes)).save_pretrained(base)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(256)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(base)
    texts = [" ".join(map(str, row)) for row in torch.randint(2, 256, (256, 24)).tolist()]
    rows = [{"instruction": "", "input": "", "output": text} for text in texts]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')

offload_transformers.enable({"host_memory": 0, "staging_memory": "1MiB", "paths": [folder], "subgroup_numel": 8192})
run_exp(  # without arguments it reads a YAML file's name from the command line, as `llamafactory-cli train` does
    {
        "model_name_or_path": str(base),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": str(folder),
        "template": "default",
        "output_dir": str(folder / "run"),
        "optim": sys.argv[2] if len(sys.argv) > 2 else "offload_adamw",  # this and `enable` are all that differs
        "learning_rate": 1e-3,
        "max_steps": 20,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "save_steps": 10,
        "save_total_limit": 2,  # checkpoints whose state stays on the path, instead of a copy in each
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
    }
)
