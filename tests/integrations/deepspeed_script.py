"""A training script for DeepSpeed as somebody may have it who cannot edit it: `deepspeed_script.py CONFIG RESULTS`.

Writes what it has seen to `RESULTS-<rank>.json`. `--enable` is the line that it would have if it could be edited.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from importlib import import_module

os.environ["DS_ACCELERATOR"] = "cpu"  # too late once DeepSpeed has been imported


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("results")
    parser.add_argument("--enable", action="store_true")
    parser.add_argument("--forget", action="store_true", help="import the package, and do not make the call")
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    early = "deepspeed" in sys.modules
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offload").addHandler(handler)
    if arguments.forget:
        import_module("offload.integrations.deepspeed")
    if arguments.enable:
        import offload.integrations.deepspeed as offload_deepspeed

        offload_deepspeed.enable()
    import deepspeed
    import deepspeed.ops
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 51), torch.nn.Tanh(), torch.nn.Linear(51, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=arguments.config)
    losses = []
    for step in range(4):
        x = torch.randn(2, 30, generator=torch.Generator().manual_seed(10 * step + engine.global_rank)).bfloat16()
        loss = (engine(x).float() - x.float()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    seen = {
        "losses": losses,
        "optimizer": type(engine.optimizer).__name__,
        "resident": engine.optimizer.metrics()["resident_share"] if hasattr(engine.optimizer, "metrics") else None,
        "argv": sys.argv,
        "early": early,
        "said": said,
        "local_rank": arguments.local_rank,
    }
    with open(f"{arguments.results}-{engine.global_rank}.json", "w") as file:
        json.dump(seen, file)
    engine.destroy()
    torch.distributed.destroy_process_group()
    return 0 if arguments.local_rank is None else 7


if __name__ == "__main__":
    sys.exit(main())
