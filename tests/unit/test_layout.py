"""Parameters to subgroups to tiles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.dtypes import DtypeCode
from offload.engine.tables import Tables
from offload.errors import ConfigError, InternalError
from offload.formats import COMPACT8, COMPACT16, EXACT, EXACT_ADAMW, StateSpec
from offload.layout import (
    SECTOR_NUMEL,
    Layout,
    Parameter,
    Segment,
    build_layout,
    check_layout,
    check_subgroup_numel,
    extend_layout,
    keep_exact,
)
from offload.protocols import SECTOR_BYTES, TileId
from offload.rules import ADAMW, MUON

DTYPES = [DtypeCode.BFLOAT16, DtypeCode.FLOAT16, DtypeCode.FLOAT32]

parameter_lists = st.lists(
    st.tuples(st.integers(0, 20_000), st.sampled_from(DTYPES), st.integers(0, 3)), max_size=12
).map(lambda rows: [Parameter(f"p{i}", *row) for i, row in enumerate(rows)])


def test_a_piece_knows_its_place_in_the_unsharded_parameter() -> None:
    whole = Parameter("p", 10, DtypeCode.BFLOAT16, 0)
    assert (whole.start, whole.unsharded_numel) == (0, 10)
    assert Parameter("p", 0, DtypeCode.BFLOAT16, 0, 10, 10).unsharded_numel == 10
    for start, unsharded_numel in ((1, 10), (-1, 20), (11, 20), (0, 9), (1, 0)):
        with pytest.raises(ConfigError, match="start of p"):
            Parameter("p", 10, DtypeCode.BFLOAT16, 0, start, unsharded_numel)


def test_one_small_parameter():
    layout = build_layout([Parameter("p", 1, DtypeCode.BFLOAT16, 0)], 1 << 20)
    (subgroup,) = layout.subgroups
    assert subgroup.numel == SECTOR_NUMEL
    assert subgroup.segments == (Segment(0, 0, 0, 1),)
    assert subgroup.names == ("master", "exp_avg", "exp_avg_sq")
    assert subgroup.state_bytes == layout.state_bytes == layout.max_subgroup_bytes == 3 * SECTOR_BYTES
    assert [tile for tile, _, _ in subgroup.tiles] == [TileId(0, tensor, 0) for tensor in range(3)]


def test_fp32_weight_is_its_master():
    layout = build_layout([Parameter("p", 1, DtypeCode.FLOAT32, 0)], 1 << 20)
    assert layout.subgroups[0].names == ("exp_avg", "exp_avg_sq")
    assert layout.state_bytes == 2 * SECTOR_BYTES


def test_equal_subgroups_rather_than_a_short_last_one():
    layout = build_layout([Parameter("p", 9 * 1024, DtypeCode.BFLOAT16, 0)], 8 * 1024)
    assert [subgroup.numel for subgroup in layout.subgroups] == [5 * 1024, 4 * 1024]


def test_frozen_and_empty_parameters_have_no_segments():
    layout = build_layout([Parameter("p", 0, DtypeCode.BFLOAT16, 0)], 1024)
    assert layout.subgroups == ()
    assert layout.places == ((),)
    assert layout.state_bytes == layout.max_subgroup_bytes == 0


def test_input_that_cannot_be_used():
    twice = [Parameter("p", 1, DtypeCode.BFLOAT16, 0), Parameter("p", 1, DtypeCode.BFLOAT16, 0)]
    with pytest.raises(ConfigError, match="'p'"):
        build_layout(twice, 1024)
    with pytest.raises(ConfigError, match="subgroup_numel: 1023"):
        build_layout([], 1023)
    assert check_subgroup_numel(2047) == 1024
    for form, rule, least in ((COMPACT16, ADAMW, 2048), (COMPACT8, MUON, 4096)):
        told = rf'1024.*at least {least} elements, as state_format "{form.name}" of {rule.name} needs'
        with pytest.raises(ConfigError, match=told):
            check_subgroup_numel(1024, StateSpec(rule, form))
    layout = build_layout(twice[:1], 1024)
    with pytest.raises(ConfigError, match="'p'"):
        extend_layout(layout, twice[:1], 1024)


@settings(max_examples=150)
@given(parameter_lists, st.integers(1024, 9000), st.sampled_from([1, 4096, 10_000, 1 << 20]))
def test_layout_covers_every_element_once(parameters, subgroup_numel, tile_bytes):
    layout = build_layout(parameters, subgroup_numel, tile_bytes)
    check_layout(layout)
    seen = [bytearray(parameter.numel) for parameter in parameters]
    for subgroup in layout.subgroups:
        assert subgroup.numel <= subgroup_numel
        assert subgroup.segments, "a subgroup of nothing"
        used = bytearray(subgroup.numel)
        for segment in subgroup.segments:
            parameter = parameters[segment.parameter]
            assert (parameter.group, parameter.dtype) == (subgroup.group, subgroup.dtype)
            assert segment.numel > 0
            seen[segment.parameter][segment.start : segment.start + segment.numel] = b"\1" * segment.numel
            assert not any(used[segment.offset : segment.offset + segment.numel])
            used[segment.offset : segment.offset + segment.numel] = b"\1" * segment.numel
        assert len(used) == subgroup.numel
    assert all(all(elements) for elements in seen)
    for index, places in enumerate(layout.places):
        found = [layout.subgroups[subgroup].segments[position] for subgroup, position in places]
        assert [segment.parameter for segment in found] == [index] * len(found)
        assert sum(segment.numel for segment in found) == parameters[index].numel
    assert layout.index_by_name == {parameter.name: i for i, parameter in enumerate(parameters)}


@settings(max_examples=150)
@given(parameter_lists, st.integers(1024, 9000), st.sampled_from([1, 4096, 10_000, 1 << 20]))
def test_tiles_cut_each_tensor_into_aligned_pieces(parameters, subgroup_numel, tile_bytes):
    for subgroup in build_layout(parameters, subgroup_numel, tile_bytes).subgroups:
        at = 0
        for tile, offset, nbytes in subgroup.tiles:
            assert tile.subgroup == subgroup.index
            assert offset == at, "tiles leave a gap or overlap"
            assert 0 < nbytes <= max(-(-tile_bytes // SECTOR_BYTES) * SECTOR_BYTES, SECTOR_BYTES)
            assert nbytes % SECTOR_BYTES == 0
            assert tile.tensor == offset // (subgroup.numel * 4), "a tile crosses tensors"
            at += nbytes
        assert at == subgroup.state_bytes
        assert len({tile for tile, _, _ in subgroup.tiles}) == len(subgroup.tiles)


@settings(max_examples=60)
@given(parameter_lists, parameter_lists, st.integers(1024, 9000), st.integers(1024, 9000))
def test_extending_keeps_what_was_there(parameters, added, subgroup_numel, other_numel):
    layout = build_layout(parameters, subgroup_numel)
    added = [dataclasses.replace(parameter, name="more " + parameter.name) for parameter in added]
    longer = extend_layout(layout, added, other_numel)
    check_layout(longer)
    assert longer.subgroups[: len(layout.subgroups)] == layout.subgroups
    assert longer.parameters == (*parameters, *added)
    assert longer.places[: len(parameters)] == layout.places
    assert extend_layout(layout, [], other_numel) == layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: dataclasses.replace(s, index=3), "numbered"),
        (lambda s: dataclasses.replace(s, numel=1025), "whole sectors"),
        (lambda s: dataclasses.replace(s, group=9), "another group"),
        (lambda s: dataclasses.replace(s, dtype=DtypeCode.FLOAT32), "another dtype"),
        (lambda s: dataclasses.replace(s, segments=s.segments[:1]), "elements covered"),
        (lambda s: dataclasses.replace(s, segments=s.segments[::-1]), "not covered in order|overlap"),
        (lambda s: dataclasses.replace(s, segments=(Segment(0, 0, 3, 100), *s.segments[1:])), "unaligned segment"),
    ],
)
def test_check_finds_what_is_wrong(change, message):
    parameters = [Parameter("a", 100, DtypeCode.BFLOAT16, 0), Parameter("b", 100, DtypeCode.BFLOAT16, 0)]
    layout = build_layout(parameters, 1024)
    with pytest.raises(InternalError, match=message):
        check_layout(Layout(layout.parameters, (change(layout.subgroups[0]),)))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"numel": -10}, "numel of w"),
        ({"start": 1.5}, "start of w"),
        ({"start": 5}, "unsharded_numel"),
        ({"start": 11, "unsharded_numel": 20}, "start of w"),
        ({"unsharded_numel": 20, "shape": (3,)}, "shape of w"),
        ({"shape": (2, 5), "stride": (1,)}, "stride of w"),
        ({"stride": (1,)}, "stride of w"),
    ],
)
def test_a_place_that_no_checkpoint_could_name_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Parameter(**{"name": "w", "numel": 10, "dtype": DtypeCode.BFLOAT16, "group": 0, **fields})


def test_a_weight_that_is_not_bound_is_not_copied() -> None:
    layout = build_layout([Parameter("p", 4096, DtypeCode.BFLOAT16, 0)], 1024)
    tables = Tables()
    tables.extend(layout)
    assert [tables.weight_copies(subgroup, 1 << 20).tolist() for subgroup in range(4)] == [[]] * 4
    tables.weights[0] = 1 << 30
    assert [tables.weight_copies(subgroup, 1 << 20)[0, 0] - (1 << 30) for subgroup in range(4)] == [
        0,
        2048,
        4096,
        6144,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_exact_takes_no_larger_slots(dtype: DtypeCode) -> None:
    """A subgroup of exact state has fewer elements, so that staging memory is cut into slots of one size."""
    state = EXACT_ADAMW.stored_in(COMPACT8)
    parameters = [
        Parameter("matrix", 1 << 20, dtype, 0),
        Parameter("embedding", 1 << 20, dtype, 0, exact=True),
    ]
    for subgroup_numel in (4096, 1 << 14, 100_000):
        layout = build_layout(parameters, subgroup_numel, state=state)
        most = subgroup_numel * state.item_bytes + SECTOR_BYTES  # of scales, padded
        assert layout.max_subgroup_bytes <= most
        assert {subgroup.state.format for subgroup in layout.subgroups} == {EXACT, COMPACT8}


def test_a_parameter_that_was_made_exact_stays_so() -> None:
    made = [Parameter(f"p{exact}", 8192, DtypeCode.BFLOAT16, 0, exact=exact) for exact in (True, False)]
    assert [parameter.exact for parameter in keep_exact(made, [])] == [True, False]


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    ends=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=4, max_size=4),
    part=st.tuples(st.integers(0, 2000), st.integers(0, 2000)),
)
def test_a_box_of_a_parameter_is_where_numpy_has_it(
    shape: list[int], ends: list[tuple[int, int]], part: tuple[int, int]
) -> None:
    box = []
    for size, (one, other) in zip(shape, ends, strict=False):
        first, last = sorted((one % size, other % size))
        box.append((first, last + 1 - first))
    whole = np.arange(math.prod(shape)).reshape(shape)
    piece = whole[tuple(slice(first, first + size) for first, size in box)].ravel()
    parameter = Parameter(
        "p", piece.size, DtypeCode.FLOAT32, 0, int(piece[0]), whole.size, tuple(shape), box=tuple(box)
    )
    start, stop = sorted(number % (piece.size + 1) for number in part)
    found = [index for first, count in parameter.runs(start, stop - start) for index in range(first, first + count)]
    assert found == piece[start:stop].tolist()
    places = {int(index): place for place, index in enumerate(piece)}
    for index in range(whole.size):
        where = parameter.locate(index)
        assert (where is None) == (index not in places)
        if where is not None:
            place, count = where
            assert place == places[index]
            assert piece[place : place + count].tolist() == list(range(index, index + count))
            assert count >= 1


@pytest.mark.parametrize(
    ("box", "start"), [(((0, 2),), 0), (((0, 2), (1, 3)), 0), (((0, 3), (2, 2)), 2), (((0, 2), (1, 2)), 2)]
)
def test_a_box_that_is_not_in_the_parameter_is_refused(box: tuple[tuple[int, int], ...], start: int) -> None:
    Parameter("p", 4, DtypeCode.FLOAT32, 0, 1, 12, (3, 4), box=((0, 2), (1, 2)))
    with pytest.raises(ConfigError, match="box of p"):
        Parameter("p", 4, DtypeCode.FLOAT32, 0, start, 12, (3, 4), box=box)
