"""What one step, with its backward pass, asks of a device: calls of `Device`'s methods, by lane.

The device is simulated. Calls that differ from run to run, with the times that things take, are named in `TIMED` and
not counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import offload
from net import bits, seams

FILE = "calls.json"

HOME = {"gpu_memory": bits.STATE_BYTES * 2, "placement": "gpu"}
NOWHERE = {"host_memory": 0, "gpu_memory": 0}
HOST = {"host_memory": bits.STATE_BYTES * 2, "gpu_memory": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "streamed, cpu": {**NOWHERE, "placement": "cpu"},
    "streamed, cpu, gradients leave": {**NOWHERE, "placement": "cpu", "keep_grads": False},
    "streamed, gpu": {**NOWHERE, "placement": "gpu"},
    "streamed, gpu, gradients leave": {**NOWHERE, "placement": "gpu", "keep_grads": False},
    "streamed, half": {**NOWHERE, "placement": 0.5},
    "streamed, half, gradients leave": {**NOWHERE, "placement": 0.5, "keep_grads": False},
    "at home on the device": HOME,
    "at home on the device, gradients leave": {**HOME, "keep_grads": False},
    "at home in memory, cpu": {**HOST, "placement": "cpu"},
    "at home in memory, gpu": {**HOST, "placement": "gpu"},
    "at home in memory, gpu, compact8": {**HOST, "placement": "gpu", "state_format": "compact8"},
    "streamed, half, forward": {**NOWHERE, "placement": 0.5, "overlap": "forward"},
    "streamed, cpu, backward": {**NOWHERE, "placement": "cpu", "keep_grads": False, "overlap": "backward"},
    "streamed, half, both": {**NOWHERE, "placement": 0.5, "keep_grads": False, "overlap": "both"},
}

TIMED = {
    "report": "streamed|home",  # asked for where a mark has not been reached yet
    "follow h2d": "half",  # a fetch waits for the slot's last user, which depends on what has ended first
}
"""Calls that depend on times, and in which configurations: where one of these words is in their names."""

TIMES: tuple[dict[str, Any], ...] = ({"lazy": True}, {}, {"delay_s": 1e-4, "seed": 1}, {"delay_s": 1e-3, "seed": 2})
"""Devices that work only when somebody waits, at once, or later."""

WARM = 3
"""Steps before the one that counts."""


def count(config: str, folder: Path, **device: Any) -> dict[str, int]:
    """Return how often each method is called, by lane, in one step.

    Args:
        config: Which of `CONFIGS`.
        folder: Where its path is made.
        device: How the simulated device is.
    """
    options = {"subgroup_numel": bits.SUBGROUP_NUMEL, "threads": 1, "seed": 11, **CONFIGS[config]}
    overlap = options.pop("overlap", "off")
    folder.mkdir(parents=True, exist_ok=True)
    on_backward = overlap in ("backward", "both")
    settings = offload.OffloadConfig(
        paths=[folder], checkpoints_kept=0, overlap="backward" if on_backward else "off", **options
    )
    made = seams.CountedDevice(1 << 26, **device)
    model = bits.Model(bits.DTYPES["bf16"])
    kind, hyperparameters = bits.RULES["adamw"]
    with seams.on_device(kind, made)(model.groups(), offload=settings, **hyperparameters) as optimizer:
        if overlap in ("forward", "both"):
            optimizer.overlap_forward(model)
        for step in range(WARM + 1):
            optimizer.finish()
            seams.settle(optimizer)
            made.calls.clear()
            model(bits.given(10 * step)).backward()
            seams.settle(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        left_out = [name for name, words in TIMED.items() if any(word in config for word in words.split("|"))]
        return {name: number for name, number in sorted(made.calls.items()) if name not in left_out}


def observe(folder: Path) -> dict[str, Any]:
    """Return the counts of each configuration, which have to be the same whatever times the device takes."""
    found: dict[str, Any] = {}
    for config in CONFIGS:
        for number, times in enumerate(TIMES):
            counts = count(config, folder / config / str(number), **times)
            if found.setdefault(config, counts) != counts:
                raise AssertionError(
                    f"{config}: counts differ from run to run; name them in TIMED: {found}, {counts}"
                )
    return found
