"""What the programs here share that train a small model under a framework.

It imports nothing large: processes that Megatron starts to write a checkpoint import it, too.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import signal
from collections.abc import Iterable
from typing import Any

SETTINGS = {"host_memory": 0, "subgroup_numel": 4096, "staging_memory": "256KiB", "threads": 1}


def options(arguments: Iterable[str]) -> dict[str, Any]:
    """Return what the end of a command line says: `name=value`, which is JSON or text, or `name`, which is True."""
    found: dict[str, Any] = {}
    for name, is_said, value in (each.partition("=") for each in arguments):
        try:
            found[name] = json.loads(value) if is_said else True
        except ValueError:
            found[name] = value
    return found


def digest(tensors: Iterable[Any]) -> str:
    """Return what tells tensors' bits, in their order, from others; of a DTensor those of this rank's part."""
    import torch

    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def say(**found: Any) -> None:
    """Print a line of JSON, at once: ranks share what they write to."""
    os.write(1, f"\n{json.dumps(found)}\n".encode())


def end_rank() -> None:
    """End a program that may be one of several ranks.

    As its model goes, and with it DDP's process group, torch joins gloo's threads without giving up the interpreter's
    lock; rarely, one of them waits for that lock to drop a tensor.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        atexit._run_exitfuncs()
        os._exit(0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
