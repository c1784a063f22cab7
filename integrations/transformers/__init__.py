"""Hugging Face's `Trainer`, and TRL's on top of it, with optimizer state wherever `offload` keeps it.

    import offload.integrations.transformers as offload_transformers
    offload_transformers.enable({"host_memory": "64GiB", "paths": ["/mnt/nvme0/offload"]})
    Trainer(model=model, args=TrainingArguments(optim="offload_adamw", ...), ...).train()

From then on a `Trainer` clips in the update itself, saves `checkpoint-N/optimizer/` instead of all state in one
`optimizer.pt`, and resumes from it exactly. That goes for an optimizer that was given as `optimizers=`, too.
"""

from offload.integrations.transformers.trainer import disable, enable, watch

__all__ = ["disable", "enable"]

watch()
