"""What the ablation compares, and when a mechanism pays."""

from __future__ import annotations

import itertools

import ablation
import pytest
from _contenders import STOCK_NVME, STOCK_PIPELINED
from _contest import Outcome

from offload import OffloadConfig


def test_spread_is_of_three_interleaved_runs() -> None:
    found = ablation.brought([2.0, 2.2, 2.4, 2.0, 2.2, 2.4], [1.0] * 6)
    assert found["runs"] == pytest.approx([2.0, 2.2, 2.4])
    assert found["times"] == pytest.approx(2.2)
    assert found["spread"] == pytest.approx(0.4)
    assert found["pays"]
    assert not ablation.brought([1.2, 1.0, 1.4], [1.0] * 3)["pays"]


def test_each_row_has_one_mechanism_more_than_the_one_before() -> None:
    rows = list(ablation.LADDER.values())
    for before, after in itertools.pairwise(rows[:-1]):
        assert sum(vars(before)[name] != vars(after)[name] for name in vars(before)) == 1
    whole = ablation.LADDER[ablation.WHOLE]
    for row in ablation.WITHOUT.values():
        assert sum(vars(whole)[name] != vars(row)[name] for name in vars(whole)) == 1


def test_compared_rows_run_and_their_settings_are_taken() -> None:
    fields = {name: ablation.field_of(name, 10_000_000, False, {}) for name in ablation.DISK}
    for one in ablation.comparisons():
        assert {one.without, one.with_} <= {contender.name for contender in fields[one.where]}
    for contender in (contender for field in fields.values() for contender in field):
        ours = contender.settings.get("multi_tier_offload")
        if ours is not None:
            OffloadConfig.from_dict(ours)
    assert {STOCK_NVME, STOCK_PIPELINED} <= {contender.name for contender in fields["added"]}


def test_losses_of_a_format_have_to_agree() -> None:
    def outcome(form: str, losses: list[float]) -> Outcome:
        return Outcome("", {"multi_tier_offload": {"state_format": form}}, losses=losses)

    groups = [{"a": outcome("exact", [2.0, 1.0]), "b": outcome("compact8", [2.0])}, {"c": outcome("exact", [2.0])}]
    assert ablation.losses_agree(groups) == {"exact": 1.0, "compact8": 1.0}
    groups[1]["c"].losses[0] = 2.1
    assert ablation.losses_agree(groups)["exact"] == 0.0


def test_a_part_that_is_taken_away_costs_time_in_the_simulator() -> None:
    model = ablation.Published(800_000_000, (10_000_000,) * 20, 3, 0.02, 0.06, 1.0, 1.0, "")
    rows = {name: ablation.simulated(parts, model)(1, "off") for name, parts in list(ablation.LADDER.items())[:5]}
    one_path, kept, order, resident, two_paths = rows.values()
    assert one_path > 1.1 * kept
    # Four of 20 subgroups are in staging memory when the next step begins.
    assert kept > 1.1 * order
    assert order > 1.05 * resident > 1.05 * two_paths


def test_auto_is_beside_the_best_way_to_hide_a_step_in_the_simulator() -> None:
    model = ablation.Published(800_000_000, (10_000_000,) * 20, 3, 0.02, 0.06, 1.0, 1.0, "")
    for ways in ablation.simulated_ways(model).values():
        assert ways["auto_over_best"] <= 1.03
        assert ways["auto"] in {ways[way] for way in ablation.HIDDEN}


def test_auto_is_compared_with_the_best_way_over_all_batch_sizes() -> None:
    def outcome(*seconds: float) -> Outcome:
        iterations = [[{"tokens": size, "iteration_s": s} for size, s in zip((16, 128), seconds, strict=True)]] * 3
        return Outcome("", {}, iterations=iterations)  # type: ignore[arg-type]

    outcomes = {name: outcome(2.0, 4.0) for name in ablation.HIDDEN.values()}
    outcomes[ablation.HIDDEN["forward"]] = outcome(1.0, 4.0)
    outcomes[ablation.AUTO] = outcome(1.5, 4.0)
    assert ablation.auto_over_best(outcomes, [16, 128]) == pytest.approx(1.1)
    outcomes[ablation.AUTO].failed = "crashed"
    assert ablation.auto_over_best(outcomes, [16, 128]) is None
