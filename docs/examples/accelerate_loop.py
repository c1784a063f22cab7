"""Accelerate with the optimizer state on disk: accelerate launch accelerate_loop.py [FOLDER], or plain python."""

import sys
import tempfile

import torch
from accelerate import Accelerator

import offload

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1))
config = offload.OffloadConfig(host_memory=0, staging_memory="1MiB", paths=[folder], subgroup_numel=16384)
optimizer = offload.AdamW(model.named_parameters(), lr=1e-3, offload=config)
model, wrapped = accelerator.prepare(model, optimizer)

for _ in range(20):
    with accelerator.accumulate(model):
        inputs = torch.randn(64, 256, device=accelerator.device)
        loss = (model(inputs) - inputs[:, :1]).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            optimizer.clip_grad_norm_(1.0)  # ours has it, the wrapper has not
        wrapped.step()
        wrapped.zero_grad()
optimizer.save_checkpoint(f"{folder}/checkpoint")  # in place of save_state, which would take all state into memory
optimizer.wait_checkpoint()
print(f"{optimizer.metrics()['step']:.0f} steps, loss {loss.item():.3f}")
optimizer.close()
