"""FSDP2, every rank with its shards' state on a path: torchrun --nproc_per_node 2 fsdp2.py [FOLDER]."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import offload

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
folder = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
dist.broadcast_object_list(folder)

torch.manual_seed(0)  # the same weights on all ranks, of which each keeps its rows
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1)).to(device)
fully_shard(model[0])
fully_shard(model)
config = offload.OffloadConfig(host_memory=0, staging_memory="1MiB", paths=folder, subgroup_numel=16384)
optimizer = offload.AdamW(model.named_parameters(), lr=1e-3, offload=config)

torch.manual_seed(rank)  # other data on each
for _ in range(10):
    inputs = torch.randn(64, 256, device=device)
    loss = (model(inputs) - inputs[:, :1]).square().mean()
    loss.backward()
    norm = optimizer.clip_grad_norm_(1.0)  # of all ranks' gradients
    optimizer.step()
    optimizer.zero_grad()
optimizer.save_checkpoint(f"{folder[0]}/checkpoint")  # all ranks together; any number of them may load it
optimizer.wait_checkpoint()
optimizer.close()
print(f"rank {rank}: loss {loss.item():.3f}, norm {norm:.3f}")
dist.destroy_process_group()
