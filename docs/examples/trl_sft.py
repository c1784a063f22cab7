"""TRL's SFTTrainer with the optimizer state on disk: python trl_sft.py [FOLDER]; again, it resumes."""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import offload.integrations.transformers as offload_transformers

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
offload_transformers.enable({"host_memory": 0, "staging_memory": "1MiB", "paths": [folder], "subgroup_numel": 8192})

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
words = Tokenizer(WordLevel({str(number): number for number in range(256)}, unk_token="0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")

arguments = SFTConfig(
    output_dir=f"{folder}/run",
    optim="offload_adamw",
    learning_rate=1e-2,
    max_steps=20,
    per_device_train_batch_size=8,
    logging_steps=5,
    save_steps=10,
    save_total_limit=2,  # checkpoints whose state stays on the path, instead of a copy in each
    bf16=torch.cuda.is_available(),
    report_to=[],
)
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"input_ids": torch.randint(2, 16, (256, 32)).tolist()}),
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
print(trainer.optimizer.optimizer.plan)
