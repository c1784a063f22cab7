"""Training and generation in turns, with memory given back in between: python phases.py [FOLDER]."""

import sys
import tempfile

import psutil
import torch

import offload

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 512)).bfloat16()
config = offload.OffloadConfig(host_memory="1GiB", paths=[folder])


def generate() -> torch.Tensor:
    """Stand for what needs the memory: a server, a judge, another process."""
    with torch.no_grad():
        return model(torch.randn(64, 512).bfloat16())


with offload.AdamW(model.named_parameters(), lr=1e-3, offload=config) as optimizer:
    for phase in range(3):
        inputs = generate()  # the optimizer is parked, but for the first time
        for _ in range(4):
            loss = (model(inputs) - inputs).float().square().mean()  # the first step takes memory again
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trains = psutil.Process().memory_full_info().uss
        optimizer.park()  # wait=False goes on behind generation
        freed = trains - psutil.Process().memory_full_info().uss
        away = optimizer.metrics()["park/away_bytes"]
        print(f"phase {phase}: loss {loss.item():.3f}, {freed / 1e6:.0f} MB freed, {away / 1e6:.0f} MB on the path")
