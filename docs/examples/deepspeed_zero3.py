"""DeepSpeed's ZeRO-3 with the optimizer state on disk: torchrun --nproc_per_node 2 deepspeed_zero3.py [FOLDER]."""

import sys
import tempfile

import deepspeed
import torch

import offload.integrations.deepspeed as offload_deepspeed

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
offload_deepspeed.enable()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "multi_tier_offload": {"host_memory": 0, "staging_memory": "1MiB", "paths": [folder], "subgroup_numel": 16384},
}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(10):
    inputs = torch.randn(8, 256, dtype=torch.bfloat16, device=engine.device)
    loss = (engine(inputs) - inputs[:, :1]).float().square().mean()
    engine.backward(loss)
    engine.step()
print(f"loss {loss.item():.3f}")
print(engine.optimizer.plan)
