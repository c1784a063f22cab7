"""Made `wrapped-names.tar.gz`: a checkpoint, and its export, from before names were those of the bare module.

    python tests/goldens/wrapped_names.py FOLDER

`FOLDER/checkpoint` is of a compiled model with a layer in a `CheckpointWrapper`, after 3 steps; `FOLDER/export` its
safetensors export; `FOLDER/after.json` has the weights' bits after 2 more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import offload
from offload.checkpoint.exchange import export_safetensors

CONFIG = offload.OffloadConfig(host_memory="1MiB", state_format="compact16", seed=7, threads=1)


def model(wrapped: bool) -> torch.nn.Module:
    """Return a small model, bare or wrapped, the same for everybody."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
    if not wrapped:
        return torch.nn.Sequential(first, second).bfloat16()
    found: torch.nn.Module = torch.compile(torch.nn.Sequential(checkpoint_wrapper(first), second).bfloat16())
    return found


def train(trained: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Take steps with gradients that are the same for everybody."""
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        for parameter in trained.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()


def weights(trained: torch.nn.Module) -> list[str]:
    """Return the bits of all weights."""
    return [parameter.detach().view(torch.uint8).numpy().tobytes().hex() for parameter in trained.parameters()]


def main(folder: Path) -> None:
    trained = model(wrapped=True)
    with offload.AdamW(trained.named_parameters(), lr=1e-2, offload=CONFIG) as optimizer:
        train(trained, optimizer, 1, 3)
        optimizer.save_checkpoint(folder / "checkpoint", copy=True)
        optimizer.wait_checkpoint()
        export_safetensors(folder / "checkpoint", folder / "export")
        train(trained, optimizer, 4, 5)
    (folder / "after.json").write_text(json.dumps(weights(trained)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
