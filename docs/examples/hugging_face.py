"""Hugging Face's Trainer with the optimizer state on disk: python hugging_face.py [FOLDER]; again, it resumes."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import offload.integrations.transformers as offload_transformers

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
offload_transformers.enable({"host_memory": 0, "staging_memory": "1MiB", "paths": [folder], "subgroup_numel": 8192})

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (256, 32))]

arguments = TrainingArguments(
    output_dir=f"{folder}/run",
    optim="offload_adamw",
    learning_rate=1e-3,
    max_steps=20,
    per_device_train_batch_size=8,
    logging_steps=5,
    save_steps=10,
    save_total_limit=2,  # checkpoints whose state stays on the path, instead of a copy in each
    report_to=[],
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
print(trainer.optimizer.optimizer.plan)
