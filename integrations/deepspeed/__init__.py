"""DeepSpeed with optimizer state wherever `offload` keeps it: one object in the config, and a launcher.

    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
     "multi_tier_offload": {"host_memory": "64GiB", "paths": ["/mnt/nvme0/offload"]}}

    python -m offload.integrations.deepspeed train.py ARGUMENT...

The launcher needs no line in the script; `deepspeed --module offload.integrations.deepspeed train.py` and torchrun's
`-m` do the same. `--config FILE` before the script has the object for a script that writes its config itself. Or a
script makes the call in place of the launcher:

    import offload.integrations.deepspeed as offload_deepspeed
    offload_deepspeed.enable()  # then deepspeed.initialize(...) as always

Without either, DeepSpeed ignores the object; where this package is imported, that is said. With the environment
variable `OFFLOAD_DEEPSPEED_CONFIG`, which names a file of the object, the import makes the call.

ZeRO 1 to 3; Adam, AdamW and Lion. Besides what it has in DeepSpeed, `engine.optimizer` has `offload` (the
`offload.Engine`), and says what it does as `offload.AdamW` does: `plan`, `metrics()`, `explain()`, `report()`, ...
"""

import os

from offload.integrations.deepspeed.settings import VARIABLE
from offload.integrations.deepspeed.switch import disable, enable, enable_at_import, initialize, watch

__all__ = ["disable", "enable", "enable_at_import", "initialize"]

if os.environ.get(VARIABLE):
    enable_at_import()
else:
    watch()
