"""What the machine decides is what it decided when the recording was made (see `recording.py`)."""

from __future__ import annotations

import pytest
import recording

QUICK = [(driver, 0) for driver in recording.SEEDS]
REST = [(driver, first) for driver, count in recording.SEEDS.items() for first in range(100, count, 100)]


def assert_as_recorded(driver: str, first: int) -> None:
    found = recording.digest(driver, first)
    assert found == recording.recorded(driver, first), (
        f"`python tests/sim/recording.py compare OTHER {driver} {first}` prints the first difference from another "
        "checkout; `write` replaces the recording, if the change is meant"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("driver", "first"), QUICK)
def test_the_machine_decides_as_recorded(driver: str, first: int) -> None:
    assert_as_recorded(driver, first)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("driver", "first"), REST)
def test_the_machine_decides_as_recorded_for_all_seeds(driver: str, first: int) -> None:
    assert_as_recorded(driver, first)


def test_a_change_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording.Machine, "take_operations", lambda machine: [])
    with pytest.raises(Exception, match="waits"):
        list(recording.lines_of("saves", 0))
