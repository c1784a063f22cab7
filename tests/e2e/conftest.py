from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offload


@pytest.fixture
def streaming(tmp_path: Path) -> Any:
    """Return a function that makes a config with everything on disk (and settings of the caller's)."""

    def make(**settings: Any) -> offload.OffloadConfig:
        defaults: dict[str, Any] = {"host_memory": 0, "paths": [tmp_path], "subgroup_numel": 1024}
        return offload.OffloadConfig(**{**defaults, **settings})

    return make
