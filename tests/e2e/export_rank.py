"""One of several ranks that save sharded state; run by `test_export_for.py`: export_rank.py FOLDER."""

from __future__ import annotations

import sys

import torch

import offload

folder = sys.argv[1]
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 1)).bfloat16()
model[0].bias.requires_grad_(False)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
config = {"shard": True, "threads": 1}
with offload.AdamW(wrapped.named_parameters(), lr=0.1, offload=config) as optimizer:
    for _ in range(3):
        wrapped(torch.ones(2, 7).bfloat16()).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save_checkpoint(f"{folder}/ck", copy=True)
    optimizer.wait_checkpoint()
    entries = optimizer.state_dict()["state"]
    state = {
        n: {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in e.items()} for n, e in entries.items()
    }
    if torch.distributed.get_rank() == 0:
        torch.save(state, f"{folder}/state.pt")
torch.distributed.destroy_process_group()
