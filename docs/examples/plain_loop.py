"""A training loop with the optimizer state on disk: python plain_loop.py [FOLDER]."""

import sys
import tempfile

import torch

import offload

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1)).bfloat16()
config = offload.OffloadConfig(host_memory=0, staging_memory="1MiB", paths=[folder], subgroup_numel=16384)

with offload.AdamW(model.named_parameters(), lr=1e-3, offload=config) as optimizer:
    print(optimizer.plan)  # what lives where, and what a step should take
    for step in range(20):
        inputs = torch.randn(64, 256).bfloat16()
        loss = (model(inputs) - inputs[:, :1]).float().square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            optimizer.save_checkpoint(f"{folder}/checkpoint", extra={"step": step})
            metrics = optimizer.metrics()
            print(f"step {step + 1}: loss {loss.item():.3f}, {metrics['path/0/written_bytes'] / 1e6:.1f} MB written")
    optimizer.wait_checkpoint()
    optimizer.write_trace(f"{folder}/trace.json")  # open it at ui.perfetto.dev
    print("resumes after step", optimizer.load_checkpoint(f"{folder}/checkpoint")["step"] + 1)
