"""One step asks of a device what is recorded, whatever times the device takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from net import calls
from net.recordings import check, recorded

pytestmark = [
    pytest.mark.not_overlapped("steps go on where the tests say so"),
    pytest.mark.not_ahead("updates are made during backward where the tests say so"),
]

RECORDED = recorded(calls.FILE)


@pytest.mark.parametrize("config", calls.CONFIGS)
@pytest.mark.parametrize("times", calls.TIMES[:2], ids=("lazy", "at once"))
def test_a_step_asks_of_a_device_what_is_recorded(config: str, times: dict[str, Any], tmp_path: Path) -> None:
    check("calls", {config: RECORDED[config]}, {config: calls.count(config, tmp_path, **times)})


def test_every_recorded_configuration_is_there() -> None:
    assert RECORDED.keys() == calls.CONFIGS.keys()
