"""Trains a small model in verl's `FSDPEngine` on the CPU, in phases; run by `test_verl.py` in ranks.

    python verl_runs.py FOLDER STEPS [resume=CHECKPOINT] [save=STEP] [keep=N] [impl=MODULE] [phases=no] [external=yes]

The model and its sharding are a test's; the optimizer, the step, phases and checkpoints are made by verl. `external`
enables ours as verl's configuration of a model does. Prints one line of JSON for each rank.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

SETTINGS = {"host_memory": "64KiB", "subgroup_numel": 2048, "staging_memory": "256KiB", "threads": 1}


def play_a_device() -> None:
    """Have verl take the CPU for its accelerator."""
    platform = import_module("verl.plugin.platform")

    class Cpu(platform.platform_cuda.PlatformCUDA):  # type: ignore[misc, name-defined]
        device_name, device_module = "cpu", torch.cpu

        def is_available(self) -> bool:
            return False

        def current_device(self) -> str:
            return "cpu"

        def empty_cache(self) -> None:
            pass

    platform.platform_manager.set_platform(Cpu())


def engine_of(impl: str, folder: Path) -> Any:
    """Return an engine of verl's, initialized."""
    fsdp, config = import_module("verl.workers.engine.fsdp.transformer_impl"), import_module("verl.workers.config")

    class Engine(fsdp.FSDPEngine):  # type: ignore[misc, name-defined]
        def _build_module(self) -> torch.nn.Module:
            torch.manual_seed(0)
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
            return LlamaForCausalLM(LlamaConfig(**sizes, **heads))

        def _build_fsdp_module(self, module: Any) -> torch.nn.Module:
            for layer in module.model.layers:
                fully_shard(layer, mesh=self.device_mesh)
            fully_shard(module, mesh=self.device_mesh)
            return module

    given = {"offload": {**SETTINGS, "paths": [str(folder)]}} if impl == "offload" else None
    optimizer = config.FSDPOptimizerConfig(
        optimizer_impl=impl, lr=1e-2, weight_decay=0.1, clip_grad=0.5, override_optimizer_config=given
    )
    model = SimpleNamespace(
        use_remove_padding=False, lora_rank=0, trust_remote_code=False, get_processor=lambda: None, architectures=[]
    )
    engine = Engine(model, config.FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False), optimizer, None)
    engine.initialize()
    return engine


def main(folder: Path, steps: int, options: dict[str, str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    play_a_device()
    if options.get("external") == "yes":  # the model's `external_lib`
        import_module("verl.utils.import_utils").import_external_libs("offload.integrations.verl.enabled")
    else:
        import_module("offload.integrations.verl").enable()
    impl = options.get("impl", "offload")
    engine = engine_of(impl, folder)
    if "resume" in options:
        engine.load_checkpoint(options["resume"])
    helpers = import_module("verl.workers.engine.fsdp.transformer_impl")
    first = int(options["resume"].rpartition("_")[2]) if "resume" in options else 0
    losses, norms, parked = [], [], []
    for step in range(first, steps):
        if options.get("phases") != "no":
            helpers.load_fsdp_optimizer(engine.optimizer, "cpu")
        tokens = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine.module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(engine.optimizer_step())
        engine.optimizer_zero_grad()
        engine.lr_scheduler_step()
        losses.append(loss.item())
        if options.get("phases") != "no":
            helpers.offload_fsdp_optimizer(engine.optimizer)
        if impl == "offload":
            metrics = engine.optimizer.metrics()
            parked.append([engine.optimizer.engine.is_parked, metrics.get("park/away_bytes", 0.0)])
        if step + 1 >= int(options.get("save", steps + 1)):
            keep = int(options["keep"]) if "keep" in options else None
            engine.save_checkpoint(str(folder / f"global_step_{step + 1}"), global_step=step, max_ckpt_to_keep=keep)
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        digest.update(parameter.to_local().detach().numpy().tobytes())
    kept = engine.optimizer.engine.checkpoints.kept if impl == "offload" else []
    found = {"losses": losses, "norms": norms, "parked": parked, "weights": digest.hexdigest()}
    found |= {"kept": [str(Path(path).parent.name) for path in kept], "rank": rank}
    print(json.dumps(found), flush=True)
    dist.barrier()
    if impl == "offload":
        engine.optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), dict(option.split("=", 1) for option in sys.argv[3:]))
