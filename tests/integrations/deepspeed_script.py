"""A training script for DeepSpeed as somebody may have it who cannot edit it: `deepspeed_script.py RESULTS [CONFIG]`.

Without a file CONFIG it builds its configs itself, as those of RLHF do: it trains an actor whose optimizer is
offloaded, keeps a critic whose optimizer is not, and evaluates a reference that has none. Writes what it has seen to
`RESULTS-<rank>.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from importlib import import_module
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # too late once DeepSpeed has been imported


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
    parser.add_argument("results")
    parser.add_argument("config", nargs="?")
    parser.add_argument("--import", action="store_true", dest="imports", help="the package, and do not make the call")
    parser.add_argument(
        "--enable", action="store_true", help="make the call that it would have if it could be edited"
    )
    parser.add_argument("--object", help="ours, as JSON, which a second actor has in its config")
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    early = "deepspeed" in sys.modules
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offload").addHandler(handler)
    if arguments.imports or arguments.enable:
        backend = import_module("offload.integrations.deepspeed")
        if arguments.enable:
            backend.enable()
    import deepspeed
    import deepspeed.ops
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled

    def engine(config: str | dict[str, Any], trained: bool = True) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 51), torch.nn.Tanh(), torch.nn.Linear(51, 30))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if trained else None
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def train(found: Any) -> list[float]:
        losses = []
        for step in range(4):
            x = torch.randn(2, 30, generator=torch.Generator().manual_seed(10 * step + found.global_rank)).bfloat16()
            loss = (found(x).float() - x.float()).square().mean()
            found.backward(loss)
            found.step()
            losses.append(loss.item())
        return losses

    config = written(offloaded=True)
    engines = {"actor": engine(arguments.config or config)}
    if arguments.config is None:
        engines["critic"] = engine(written(offloaded=False))
        engines["reference"] = engine(written(offloaded=False, trained=False), trained=False)
    if arguments.object:
        engines["own"] = engine({**written(offloaded=True), "multi_tier_offload": json.loads(arguments.object)})
    actor = engines["actor"].optimizer
    is_ours = hasattr(actor, "offload")
    seen = {
        "optimizers": {name: type(found.optimizer).__name__ for name, found in engines.items()},
        "losses": {name: train(found) for name, found in engines.items() if name != "reference"},
        "config": config == written(offloaded=True),
        "paths": [path.path for path in actor.offload.config.path_configs] if is_ours else None,
        "resident": actor.metrics()["resident_share"] if is_ours else None,
        "argv": sys.argv,
        "early": early,
        "said": said,
        "local_rank": arguments.local_rank,
        "variable": os.environ.get("OFFLOAD_DEEPSPEED_CONFIG"),
    }
    with open(f"{arguments.results}-{engines['actor'].global_rank}.json", "w") as file:
        json.dump(seen, file)
    for found in engines.values():
        found.destroy()
    torch.distributed.destroy_process_group()
    return 0 if arguments.local_rank is None else 7


if __name__ == "__main__":
    sys.exit(main())
