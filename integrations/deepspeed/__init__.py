"""DeepSpeed with optimizer state wherever `offload` keeps it: one object in the config and one line in the script.

    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
     "multi_tier_offload": {"host_memory": "64GiB", "paths": ["/mnt/nvme0/offload"]}}

    import offload.integrations.deepspeed as offload_deepspeed
    offload_deepspeed.enable()  # then deepspeed.initialize(...) as always

Without that call DeepSpeed ignores the object. `python -m offload.integrations.deepspeed train.py` makes it for a
script that cannot be edited.

ZeRO stages 1 to 3, Adam and AdamW. Besides what it has in DeepSpeed, `engine.optimizer` has `metrics()`, `plan` and
`offload` (the `offload.Engine`).
"""

from offload.integrations.deepspeed.switch import disable, enable, initialize

__all__ = ["disable", "enable", "initialize"]
