"""DeepSpeed with optimizer state wherever `offload` keeps it: one object in the config and one line in the script.

    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
     "multi_tier_offload": {"host_memory": "64GiB", "paths": ["/mnt/nvme0/offload"]}}

    import offload.integrations.deepspeed as offload_deepspeed
    offload_deepspeed.enable()  # then deepspeed.initialize(...) as always

Without that call DeepSpeed ignores the object. `python -m offload.integrations.deepspeed train.py` makes it for a
script that cannot be edited; `--config FILE` before the script has the object for one that writes its config itself.
With the environment variable `OFFLOAD_DEEPSPEED_CONFIG`, which names such a file, this import makes the call.

ZeRO 1 to 3; Adam, AdamW and Lion. Besides what it has in DeepSpeed, `engine.optimizer` has `metrics()`, `plan` and
`offload` (the `offload.Engine`).
"""

import os

from offload.integrations.deepspeed.settings import VARIABLE
from offload.integrations.deepspeed.switch import disable, enable, enable_at_import, initialize

__all__ = ["disable", "enable", "enable_at_import", "initialize"]

if os.environ.get(VARIABLE):
    enable_at_import()
