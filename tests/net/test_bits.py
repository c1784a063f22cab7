"""Short trainings end with the recorded bits, whatever the placement, the overlap and the instruction set."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from net import bits, seams
from net.recordings import check, recorded

pytestmark = [
    pytest.mark.not_overlapped("steps go on where the tests say so"),
    pytest.mark.not_ahead("updates are made during backward where the tests say so"),
]

RECORDED = recorded(bits.FILE)


@pytest.mark.parametrize("training", bits.TRAININGS)
def test_a_training_ends_with_the_recorded_bits(training: str, tmp_path: Path) -> None:
    check("bits", RECORDED[bits.content(training)], bits.train(training, tmp_path))


@pytest.mark.slow
def test_trainings_end_with_the_recorded_bits_with_avx2_alone(tmp_path: Path) -> None:
    """One for each rule; kernels promise the same bits on every instruction set."""
    if "avx2" not in seams.instruction_sets():
        pytest.skip("this CPU has no AVX2")
    last_of_rule = {training.split()[0]: training for training in bits.TRAININGS if "device" not in training}
    for rule, training in last_of_rule.items():
        with seams.only("avx2") as used:
            found = bits.train(training, tmp_path / rule)
        assert set(used) == {"avx2"}
        check("bits", RECORDED[bits.content(training)], found)


def test_every_recorded_training_is_there_and_no_other() -> None:
    assert RECORDED.keys() == {bits.content(training) for training in bits.TRAININGS}
    assert len(set(bits.TRAININGS)) == 40


def test_every_two_of_a_rule_a_format_dtypes_a_place_and_an_overlap_are_together() -> None:
    rows = [(*what.split(), place, overlap) for what, place, overlap in (t.split(" | ") for t in bits.TRAININGS)]
    formats = ("exact", "compact16", "compact8")
    kinds = (bits.RULES, formats, bits.DTYPES, bits.PLACES, ("off", "forward", "backward", "both"))
    refused = {("host", "backward"), ("host", "both"), ("device gpu", "backward"), ("device gpu", "both")}
    for one, other in combinations(range(len(kinds)), 2):
        there = {(row[one], row[other]) for row in rows}
        missing = {(a, b) for a in kinds[one] for b in kinds[other]} - there - refused
        assert not missing
