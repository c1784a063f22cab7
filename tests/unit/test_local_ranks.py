"""What ranks of one node take by default."""

from __future__ import annotations

import pytest
import torch

from offload import OffloadConfig
from offload.device.none import NO_LANES
from offload.layout import build_layout
from offload.session import setup


@pytest.mark.parametrize("launcher", setup.LOCAL_RANKS)
@pytest.mark.parametrize(("is_initialized", "said", "sharing"), [(True, "4", 4), (True, None, 1), (False, "4", 1)])
def test_ranks_of_a_node_divide_cores_and_memory(
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
    is_initialized: bool,
    said: str | None,
    sharing: int,
    launcher: str,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(setup, "available_bytes", lambda: 800)
    monkeypatch.setattr(setup.os, "sched_getaffinity", lambda pid: set(range(8)))
    for name in setup.LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(launcher, said)
    layout = build_layout([], 1024)
    assert setup.default_threads(NO_LANES) == 8 // sharing
    paths = [str(tmp_path)]
    assert setup.first_budgets(OffloadConfig(paths=paths), layout, NO_LANES, 0, 0).host_bytes == 400 // sharing
    given = OffloadConfig(paths=paths, host_memory=300)
    assert setup.first_budgets(given, layout, NO_LANES, 0, 0).host_bytes == 300
