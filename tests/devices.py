"""Accelerators that tests run on, by torch's names: CUDA's, with `-m gpu`, and the test accelerator."""

from __future__ import annotations

import pytest
import torch

CUDA = tuple(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda:1"))
ON_LATE = pytest.mark.late(shared=True)
LATE = tuple(pytest.param(name, marks=ON_LATE) for name in ("late", "late:1"))
LATE_FULL = tuple(pytest.param(name, marks=(ON_LATE, pytest.mark.full)) for name in ("late", "late:1"))
"""For what `test_training.py` shows in less time."""


def the_device(name: str) -> torch.device:
    """Return a device; skip the test where there is none."""
    device = torch.device(name)
    there = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if there is not None and there.type == device.type else 0
    if count <= (device.index or 0):
        pytest.skip(f"torch sees {count} devices of {device.type}")
    return device
