"""Which tests of the kernels take over a second: `make check` leaves them out."""

from __future__ import annotations

import pytest

# Faster ones of test_gpu.py show the same: `test_one_table_of_everything` all alignments and kinds of segments, sizes
# from 4095 on several blocks, `test_every_sixteen_bit_value_accumulates` every 16-bit value, and ties between two.
SLOW = (
    "test_any_table[",
    "test_finite_gradients_make_finite_state[",
    "test_masters_at_every_tie_and_at_both_ends[",
    "test_wild_updates_of_every_kind[",
    # In Triton's interpreter, and in no other kernel.
    "test_accumulation[interpreter-wild-dtype0",
    "test_accumulation[interpreter-wild-dtype1",
    "test_any_alignment[interpreter",
    "test_every_rule[interpreter-",
    "test_every_sixteen_bit_gradient_and_weight[interpreter",
    "test_rounding_of_the_weight[interpreter",
    "test_state_at_any_multiple_of_two[interpreter",
    "test_sizes[interpreter-12345",
    # Those of test_compact8_gpu.py, which has tests of its own.
    "test_every_rule[interpreter8",
    "test_flags[interpreter8",
    "test_sizes[interpreter8",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
