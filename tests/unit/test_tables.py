"""What a step tells the updates of its subgroups: the expected step and the real one are made and compared alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from offload.dtypes import DtypeCode
from offload.engine.tables import Tables
from offload.formats import COMPACT8, StateSpec
from offload.kernels.table import active_rows
from offload.layout import Parameter, build_layout
from offload.protocols import SegmentFlag
from offload.rules import ADAMW
from offload.schedule.operations import RunVisit, Visit

GROUPS = [ADAMW.values(ADAMW.defaults), ADAMW.values(ADAMW.defaults)]
ACTIVE = [3, 0, 1]
"""All but number 2, which lies in one subgroup with number 0."""


def make_tables() -> Tables:
    """Return tables of two subgroups, one for each group: numbers 0 and 2, of 16 bits, and numbers 1 and 3, of 32."""
    dtypes = DtypeCode.BFLOAT16, DtypeCode.FLOAT32
    parameters = [Parameter(f"p{n}", 4096, dtypes[n % 2], n % 2) for n in range(4)]
    tables = Tables(seed=1)
    tables.extend(build_layout(parameters, 1 << 20, state=StateSpec(ADAMW, COMPACT8)))
    tables.weights[:] = [1 << 20, 2 << 20, 3 << 20, 4 << 20]
    tables.gradients[:] = [5 << 20, 6 << 20, 7 << 20, 8 << 20]
    tables.gradient_dtypes[:] = DtypeCode.BFLOAT16
    return tables


def changed(name: str, position: int, value: int) -> Callable[[Tables], None]:
    def change(tables: Tables) -> None:
        getattr(tables, name)[position] = value

    return change


@pytest.mark.parametrize(
    ("change", "agreeing"),
    [
        (lambda tables: None, [True, True]),
        (changed("weights", 1, 1 << 30), [True, False]),
        (changed("gradients", 1, 1 << 30), [True, True]),  # what lies there is compared
        (changed("gradient_dtypes", 0, DtypeCode.FLOAT32), [False, True]),
        (changed("gradients", 2, 1 << 30), [True, True]),  # not read
        (changed("gradient_dtypes", 2, DtypeCode.FLOAT32), [True, True]),
        (changed("numbers", 0, 5), [False, True]),  # which rounding knows
        (changed("steps", 3, 5), [True, False]),
        (lambda tables: tables.mark_master_due(0, SegmentFlag.LOAD_MASTER), [False, True]),
        (lambda tables: tables.mark_master_due(0, SegmentFlag.MATCH_MASTER), [False, True]),
        (lambda tables: tables.mark_master_due(2, SegmentFlag.LOAD_MASTER), [True, True]),  # not updated
        (lambda tables: tables.mark_master_due(1, SegmentFlag.LOAD_MASTER), [True, True]),  # its weight is its master
    ],
)
def test_steps_agree_about_a_subgroup_unless_its_update_would_differ(
    change: Callable[[Tables], None], agreeing: list[bool]
) -> None:
    tables = make_tables()
    expected = tables.rows(GROUPS, 2.0, 1.0, ACTIVE)
    change(tables)
    begun = tables.rows(GROUPS, 2.0, 1.0, ACTIVE)
    assert [tables.updates_alike(subgroup, expected, begun) for subgroup in range(2)] == agreeing


def test_gradients_are_compared_where_the_step_reads_them() -> None:
    tables = make_tables()
    expected = tables.rows(GROUPS, 2.0, 1.0, ACTIVE)
    table = tables.make_table(RunVisit(0, 0, Visit(1), 0, fresh=False), 1 << 33, expected)
    assert table["gradient"].tolist() == [6 << 20, 8 << 20]
    tables.gradients[1] = 1 << 30
    positions, addresses, sizes = tables.read_by(1, table, tables.rows(GROUPS, 2.0, 1.0, ACTIVE))
    assert positions.tolist() == [1, 3]
    assert addresses.tolist() == [[1 << 30, int(table["master"][0])], [8 << 20, int(table["master"][1])]]
    assert sizes.tolist() == 2 * [[2 * 4096, 4 * 4096]]


def test_steps_agree_about_what_they_are_told_alike() -> None:
    tables = make_tables()

    def agreeing(*told: Any) -> list[bool]:
        return [tables.updates_alike(n, expected, tables.rows(*told)) for n in range(2)]

    expected = tables.rows(GROUPS, 2.0, 1.0, ACTIVE)
    assert agreeing(GROUPS, 2.0, 0.5, ACTIVE) == agreeing(GROUPS, 1.0, 1.0, ACTIVE) == [False, False]
    assert agreeing(GROUPS, 1.0, 0.5, ACTIVE) == agreeing(GROUPS, 2.0, 1.0, ACTIVE[::-1]) == [True, True]
    assert agreeing(GROUPS, 2.0, 1.0, [3, 0]) == [True, False]
    assert agreeing(GROUPS, 2.0, 1.0, range(4)) == [False, True]
    other = [GROUPS[0], ADAMW.values({**ADAMW.defaults, "lr": 0.5})]
    assert agreeing(other, 2.0, 1.0, ACTIVE) == [True, False]


def test_what_is_no_number_agrees_with_itself() -> None:
    tables = make_tables()
    expected, begun = (tables.rows(GROUPS, 1.0, float("nan"), ACTIVE) for _ in range(2))
    assert np.isnan(expected.scalars).any()
    assert tables.updates_alike(0, expected, begun)


def test_rows_stay_what_they_were_told() -> None:
    tables = make_tables()
    rows = tables.rows(GROUPS, 1.0, 1.0, ACTIVE)
    assert rows.subgroups == (1, 0)
    before = tables.make_table(RunVisit(0, 0, Visit(0), 0, fresh=False), 1 << 33, rows)
    tables.weights[:] = tables.gradients[:] = 1 << 40
    tables.gradient_dtypes[:] = DtypeCode.FLOAT32
    tables.steps += 1
    after = tables.make_table(RunVisit(0, 0, Visit(0), 0, fresh=False), 1 << 33, rows)
    assert after.tobytes() == before.tobytes()
    assert active_rows(after).tolist() == [True, False]


def test_a_gpu_reads_gradients_where_they_are_bound_and_the_cpu_where_it_is_told() -> None:
    tables = make_tables()
    slots = np.full(4, 1 << 35, np.uint64), np.full(4, DtypeCode.BFLOAT16, np.int32)
    rows = tables.rows(GROUPS, 1.0, 1.0, ACTIVE, slots)
    for gpu, gradients in ((True, [5 << 20, 7 << 20]), (False, [1 << 35] * 2)):
        table = tables.make_table(RunVisit(0, 0, Visit(0, gpu=gpu), 0, fresh=False), 1 << 33, rows)
        assert table["gradient"].tolist() == gradients


@pytest.mark.parametrize(("subgroup", "name"), [(0, "new_weight"), (1, "new_master")])
def test_a_speculative_version_goes_to_its_image(subgroup: int, name: str) -> None:
    tables = make_tables()
    for position in range(4):
        tables.mark_master_due(position, SegmentFlag.LOAD_MASTER)
    rows, sums = tables.rows(GROUPS, 1.0, 1.0, ACTIVE), np.zeros((2, 2), np.uint64)
    run = RunVisit(0, 0, Visit(subgroup, speculative=True), 0, fresh=False)
    table = tables.make_table(run, 1 << 33, rows, apart=(1 << 36, sums))
    nbytes = 4096 * (2, 4)[subgroup]
    assert table[name].tolist() == [1 << 36, (1 << 36) + nbytes]
    assert table["read"].tolist() == [sums.ctypes.data, sums.ctypes.data + 16]
    assert not (table["flags"] & SegmentFlag.LOAD_MASTER).any()
