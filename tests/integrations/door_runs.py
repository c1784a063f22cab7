"""Runs an example of docs/examples/ and kills it in the middle, or lets it end; run by `doors.py`.

    python door_runs.py EXAMPLE KILL FOLDER [OPTIMIZER]

KILL is the step of our optimizer that the process does not outlive; 0 is none. torchtitan wants an accelerator, and
is given the CPU for one.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask
from torch.optim.optimizer import register_optimizer_step_post_hook

import offload


def dense(q: Any, k: Any, v: Any, *, block_mask: Any, scale: float | None, enable_gqa: bool, **rest: Any) -> Any:
    """Compute what torch's FlexAttention does, which has no backward pass on the CPU."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    scores = {"attn_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **scores), None


def summing(original: Any) -> Any:
    """Have FSDP reduce by sums alone, as gloo knows no others."""

    def set_gradient_divide_factor(module: Any, factor: float) -> None:
        original(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    return set_gradient_divide_factor


def play_a_device() -> None:
    """Have torchtitan take the CPU for its accelerator."""
    utils = import_module("torchtitan.tools.utils")  # before the others, which import these names from it
    answers = {
        "device_count": 8,
        "current_device": 0,
        "get_device_name": "CPU",
        "get_device_properties": SimpleNamespace(total_memory=1 << 30),
        "memory_stats": {},
        **dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize")),
    }
    module = SimpleNamespace(**{name: lambda *_, answer=answer: answer for name, answer in answers.items()})
    utils.device_type, utils.device_module = "cpu", module
    import_module("torchtitan.models.common.attention").FlexAttention._compiled_flex_attn = dense
    FSDPModule.set_gradient_divide_factor = summing(FSDPModule.set_gradient_divide_factor)  # type: ignore[method-assign]
    if not hasattr(torch.distributed, "set_timeout"):  # of torch 2.14, which torchtitan 0.3 is written for
        torch.distributed.set_timeout = lambda *arguments: None  # type: ignore[attr-defined]


def main(example: str, kill: str, *arguments: str) -> None:
    taken = iter(range(1, int(kill) + 1))

    def after(optimizer: Any, *rest: Any) -> None:
        if isinstance(optimizer, offload.AdamW) and next(taken, 0) == int(kill):
            os.kill(os.getpid(), signal.SIGKILL)

    if "torchtitan" in example:
        play_a_device()
    if int(kill):
        register_optimizer_step_post_hook(after)
    sys.argv = [example, *arguments]
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
