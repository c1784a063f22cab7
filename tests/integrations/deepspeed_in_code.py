"""A program that builds its DeepSpeed configs itself, as those of RLHF do: `deepspeed_in_code.py FOLDER`.

It trains an actor whose optimizer is offloaded, keeps a critic whose optimizer is not, and evaluates a reference that
has none. Writes what it has seen to `FOLDER/seen-<rank>.json`. With `--object` it trains a second actor,
whose config has our object; with `--import` it has the one line with which the environment variable is enough.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
STEPS = 3


def written(offloaded: bool, trained: bool = True) -> dict[str, Any]:
    """Return a config with the keys that OpenRLHF and open-instruct write."""
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_param": {"device": "none"},
        "stage3_max_live_parameters": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    if trained:
        zero["offload_optimizer"] = {"device": "cpu" if offloaded else "none", "pin_memory": False}
        zero |= {"sub_group_size": "auto", "reduce_bucket_size": "auto", "reduce_scatter": True}
        zero |= {"zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_gradients": False}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "data_types": {"grad_accum_dtype": None},
        "compile": {"deepcompile": False},
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--object", help="ours, as JSON, which a second actor has in its config")
    parser.add_argument("--import", action="store_true", dest="imports")
    arguments = parser.parse_args()
    if arguments.imports:
        import offload.integrations.deepspeed  # noqa: F401
    import deepspeed
    import deepspeed.ops
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled

    def engine(config: dict[str, Any], trained: bool = True) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 51), torch.nn.Tanh(), torch.nn.Linear(51, 30))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if trained else None
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def train(found: Any) -> list[float]:
        losses = []
        for step in range(STEPS):
            x = torch.randn(2, 30, generator=torch.Generator().manual_seed(10 * step + found.global_rank)).bfloat16()
            loss = (found(x).float() - x.float()).square().mean()
            found.backward(loss)
            found.step()
            losses.append(loss.item())
        return losses

    config = written(offloaded=True)
    engines = {
        "actor": engine(config),
        "critic": engine(written(offloaded=False)),
        "reference": engine(written(offloaded=False, trained=False), trained=False),
    }
    if arguments.object:
        engines["own"] = engine({**written(offloaded=True), "multi_tier_offload": json.loads(arguments.object)})
    actor = engines["actor"].optimizer
    seen = {
        "optimizers": {name: type(found.optimizer).__name__ for name, found in engines.items()},
        "losses": {name: train(found) for name, found in engines.items() if name != "reference"},
        "config": config == written(offloaded=True),
        "paths": [path.path for path in actor.offload.config.path_configs] if hasattr(actor, "offload") else None,
        "argv": sys.argv,
        "variable": os.environ.get("OFFLOAD_DEEPSPEED_CONFIG"),
    }
    (arguments.folder / f"seen-{engines['actor'].global_rank}.json").write_text(json.dumps(seen))
    for found in engines.values():
        found.destroy()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
