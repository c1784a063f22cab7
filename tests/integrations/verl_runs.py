"""Trains a small model in verl's `FSDPEngine` on the CPU, in phases; run by `test_verl.py` in ranks.

    python verl_runs.py FOLDER STEPS [OPTION=VALUE ...]

Options: `resume`, a checkpoint; `save`, the first step to be saved; `keep`, how many checkpoints verl keeps; `impl`,
the module of the optimizer; `strategy`, verl's; `phases=no`; `keep_host=no`, nothing of ours stays in host memory
while it is parked.

The model and its sharding are a test's; the configuration, the optimizer, the step and checkpoints are verl's. Its
engines call the helpers for phases where they move to a GPU and back, which is done in their place here. Prints one
line of JSON for each rank.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from small import SETTINGS, digest, say
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM

OURS = {**SETTINGS, "host_memory": "64KiB", "subgroup_numel": 2048}


def play_a_device(strategy: str) -> None:
    """Have verl take the CPU for its accelerator."""
    platform = import_module("verl.plugin.platform")

    class Cpu(platform.platform_cuda.PlatformCUDA):  # type: ignore[misc, name-defined]
        device_name, device_module = "cpu", torch.cpu

        def is_available(self) -> bool:
            return False

        def current_device(self) -> int | str:
            return 0 if strategy == "fsdp" else "cpu"  # which verl puts behind "cpu:", or takes for a device

        def empty_cache(self) -> None:
            pass

    platform.platform_manager.set_platform(Cpu())


def configured(impl: str, strategy: str, folder: Path, phases: bool) -> list[Any]:
    """Return verl's own configuration of an actor's engine and optimizer, with the lines of docs/frameworks.md."""
    hydra, utils = import_module("hydra"), import_module("verl.utils.config")
    lines = [
        f"actor_rollout_ref.actor.strategy={strategy}",
        "actor_rollout_ref.model.external_lib=offload.integrations.verl.enabled",
        f"actor_rollout_ref.actor.fsdp_config.optimizer_offload={phases}",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        f"actor_rollout_ref.actor.optim.optimizer_impl={impl}",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.optim.clip_grad=0.5",
    ]
    if impl == "offload":
        text = json.dumps({"offload": {**OURS, "paths": [str(folder)]}}).replace('"', "")
        lines.append(f"actor_rollout_ref.actor.optim.override_optimizer_config={text}")
    place = Path(str(import_module("verl").__file__)).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(place), version_base=None):
        found = hydra.compose("ppo_trainer", lines).actor_rollout_ref
    import_module("verl.utils.import_utils").import_external_libs(found.model.external_lib)
    return [utils.omega_conf_to_dataclass(part) for part in (found.actor.fsdp_config, found.actor.optim)]


def engine_of(impl: str, strategy: str, folder: Path, phases: bool) -> Any:
    """Return an engine of verl's, initialized."""
    engine_config, optimizer = configured(impl, strategy, folder, phases)
    fsdp = import_module("verl.workers.engine.fsdp.transformer_impl")

    class Engine(fsdp.FSDPEngine):  # type: ignore[misc, name-defined]
        def _build_module(self) -> torch.nn.Module:
            torch.manual_seed(0)
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
            return LlamaForCausalLM(LlamaConfig(**sizes, **heads))

        def _build_fsdp_module(self, module: Any) -> torch.nn.Module:
            if strategy == "fsdp":
                policy = ModuleWrapPolicy([type(module.model.layers[0])])
                whole = self.engine_config.use_orig_params
                return FullyShardedDataParallel(
                    module, auto_wrap_policy=policy, use_orig_params=whole, device_id=torch.device("cpu")
                )
            for layer in module.model.layers:
                fully_shard(layer, mesh=self.device_mesh)
            fully_shard(module, mesh=self.device_mesh)
            return module

    model = SimpleNamespace(
        use_remove_padding=False, lora_rank=0, trust_remote_code=False, get_processor=lambda: None, architectures=[]
    )
    engine = Engine(model, engine_config, optimizer, None)
    engine.initialize()
    return engine


def main(folder: Path, steps: int, options: dict[str, str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    strategy, impl = options.get("strategy", "fsdp2"), options.get("impl", "offload")
    has_phases = options.get("phases") != "no"
    play_a_device(strategy)
    engine = engine_of(impl, strategy, folder, has_phases)
    if options.get("keep_host") == "no":
        import_module("offload.integrations.verl").enable(keep_host=False)
    if "resume" in options:
        engine.load_checkpoint(options["resume"])
    helpers = import_module("verl.workers.engine.fsdp.transformer_impl")
    first = int(options["resume"].rpartition("_")[2]) if "resume" in options else 0
    losses, norms, parked = [], [], []
    for step in range(first, steps):
        if has_phases:
            helpers.load_fsdp_optimizer(engine.optimizer, "cpu")
        tokens = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine.module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(engine.optimizer_step())
        engine.optimizer_zero_grad()
        engine.lr_scheduler_step()
        losses.append(loss.item())
        if has_phases:
            helpers.offload_fsdp_optimizer(engine.optimizer)
        if impl == "offload":
            metrics = engine.optimizer.metrics()
            away = [metrics.get(f"park/{name}", 0.0) for name in ("away_bytes", "given_back_bytes")]
            parked.append([engine.optimizer.engine.is_parked, *away])
        if step + 1 >= int(options.get("save", steps + 1)):
            keep = int(options["keep"]) if "keep" in options else None
            engine.save_checkpoint(str(folder / f"global_step_{step + 1}"), global_step=step, max_ckpt_to_keep=keep)
    there = engine.optimizer.engine.checkpoints.kept if impl == "offload" else []
    kept, weights = [Path(path).parent.name for path in there], digest(engine.module.parameters())
    say(losses=losses, norms=norms, parked=parked, weights=weights, kept=kept, rank=rank)
    dist.barrier()
    if impl == "offload":
        engine.optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), dict(option.split("=", 1) for option in sys.argv[3:]))
