"""Megatron-Core's distributed optimizer with its state wherever `offload` keeps it: one call before it is made.

    import offload.integrations.megatron as offload_megatron

    offload_megatron.enable({"host_memory": "64GiB", "paths": ["/mnt/nvme0/offload"]})   # OffloadConfig's fields
    pretrain(...)   # with --optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer

`MegatronAdamW` takes the place of Megatron's own CPU offload under `DistributedOptimizer`. Reduction of gradients,
loss scale, clipping, schedules and the gathering of weights stay Megatron's, as do its checkpoints.
"""

from offload.integrations.megatron.inner import MegatronAdamW
from offload.integrations.megatron.switch import disable, enable, inner_optimizers

__all__ = ["MegatronAdamW", "disable", "enable", "inner_optimizers"]
