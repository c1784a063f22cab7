"""Which tests of the kernels take over a second, so that `make check` leaves them out, and which `make test`, too."""

from __future__ import annotations

import pytest
from test_update_kernel import OTHERS

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

# In Triton's interpreter. Sizes: exact state has all of these, compact16 some with all dtypes in
# `test_state_at_any_multiple_of_two`, compact8 others in `test_sizes_about_those_of_blocks_and_programs`. Alignments:
# its loads and stores are the same whatever the address; that which is left is no multiple of 16. Rules: exact state
# has each with scalars of its own; compact state every rule where new values go elsewhere, and where blocks begin.
# Flags of segments that are not active: compact8 in `test_segments_that_are_not_active`. Cuts: at 0 and beyond 2^32.
FULL = (
    "test_gpu.py::test_sizes[interpreter-12345-",
    "test_compact16.py::test_sizes[interpreter-",
    "test_compact8_gpu.py::test_sizes[interpreter8-",
    "test_compact16.py::test_every_rule[interpreter-",
    "test_compact8_gpu.py::test_every_rule[interpreter8-",
    *(f"test_compact8_gpu.py::test_flags[interpreter8-{int(flags)}-0.1" for flags in OTHERS),
    *(f"test_compact16.py::test_cuts_change_nothing[interpreter-{first}]" for first in (999, (7 << 32) - 1)),
    f"test_compact16.py::test_cuts_change_nothing[interpreter-{(1 << 63) - 3000}]",
    "test_compact16.py::test_state_at_any_multiple_of_two[interpreter-offsets1]",
    "test_compact16.py::test_state_at_any_multiple_of_two[interpreter-offsets2]",
    *(
        f"{file}::test_any_alignment[{kernel}-offsets{number}]"
        for file, kernel in (
            ("test_gpu.py", "interpreter"),
            ("test_compact16.py", "interpreter"),
            ("test_compact8_gpu.py", "interpreter8"),
        )
        for number in (1, 2, 3, 4, 5)
    ),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if f"{item.path.name}::{item.name}".startswith(FULL):
            item.add_marker(pytest.mark.full)
