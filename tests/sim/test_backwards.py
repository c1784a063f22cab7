"""Updates during backward passes, at random: under the checker, compared with steps alone; and bugs."""

from __future__ import annotations

from collections.abc import Collection

import backwards
import planted
import pytest
import saves

from offload.schedule.index import Location, TileIndex
from offload.schedule.machine import Machine
from offload.session.speculation import Speculation
from offload.session.thread import EngineThread


@pytest.mark.slow
def test_bits_and_failures_are_those_of_steps_that_make_nothing_ahead() -> None:
    found = saves.run_seeds(backwards.run_seed, range(300))
    # Guards against a swarm that has stopped testing anything.
    assert found["done"] > 200
    assert found["broken"] > 15
    assert found["died"] > 3
    assert found["closed"] > 100
    assert found["resumed"] > 20
    assert found["confirmed"] > 500
    assert found["revoked"] > 300
    assert found["writes ahead failed"] > 100
    assert found["saved"] > 30
    assert found["let on beside a sweep"] > 3000


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(300, 20_300, 2000))
def test_large_swarm_of_backward_passes(first: int) -> None:
    saves.run_seeds(backwards.run_seed, range(first, first + 2000))


def test_a_version_that_finds_no_room_is_given_up() -> None:
    """As a path takes no more writes; the bytes of its tiles that found room are used again."""
    refused = []

    class Counting(TileIndex):
        def lend(self, nbytes: int, avoid: Collection[int] = ()) -> Location | None:
            location = super().lend(nbytes, avoid)
            if location is None:
                refused.append(nbytes)
            return location

    assert backwards.run_seed(9, Machine, Counting).how == "done"
    assert refused


@pytest.mark.slow
@pytest.mark.parametrize("wrong", planted.BACKWARDS, ids=lambda wrong: wrong.__name__)
def test_a_planted_bug_is_found(wrong: type) -> None:
    """The checker, the bits or what the caller is told give each bug away, without the machine's own checks."""
    parts = (Machine, TileIndex, EngineThread, Speculation, backwards.Session)
    kinds = [wrong if issubclass(wrong, part) else part for part in parts]
    by = planted.BACKWARDS[wrong]
    planted.assert_found(lambda seed: backwards.run_seed(seed, *kinds, self_check=False), range(2000), by)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [119, 384])
def test_a_crash_at_every_event_leaves_a_whole_checkpoint(seed: int) -> None:
    """What is left is compared byte for byte, and the session that goes on from it is like others."""
    whole = backwards.run_seed(seed, faulty=False)
    assert whole.how == "done"
    assert min(whole.counts[what] for what in ("saved", "confirmed", "revoked")) > 0
    found = [backwards.run_seed(seed, faulty=False, crash=event) for event in range(1, whole.events)]
    assert all(outcome.counts["died"] for outcome in found)
    assert sum(outcome.counts["resumed"] for outcome in found) > len(found) // 10


@pytest.mark.slow
def test_a_seed_is_a_run() -> None:
    for seed in range(20):
        first, second = backwards.run_seed(seed), backwards.run_seed(seed)
        assert (first.how, first.events, first.counts) == (second.how, second.events, second.counts)
