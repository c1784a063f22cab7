"""Accelerate with the optimizer state on disk: accelerate launch accelerate_loop.py [FOLDER]; again, it resumes."""

import os
import sys
import tempfile

import torch
from accelerate import Accelerator

import offload
from offload.integrations.accelerate import enable

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1))
config = offload.OffloadConfig(host_memory=0, staging_memory="1MiB", paths=[folder], subgroup_numel=16384)
optimizer = offload.AdamW(model.named_parameters(), lr=1e-3, offload=config)
model, optimizer = accelerator.prepare(model, optimizer)
optimizer = enable(accelerator, optimizer)  # from now on it has the methods of ours, too
if os.path.exists(f"{folder}/checkpoint"):
    accelerator.load_state(f"{folder}/checkpoint")

for _ in range(20):
    with accelerator.accumulate(model):
        inputs = torch.randn(64, 256, device=accelerator.device)
        loss = (model(inputs) - inputs[:, :1]).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # in the update itself
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state(f"{folder}/checkpoint")  # the state stays on the path
print(f"{optimizer.metrics()['step']:.0f} steps, loss {loss.item():.3f}")
optimizer.close()
