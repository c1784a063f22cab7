"""What a GPU's copy engines make of a step, however they choose between streams."""

from __future__ import annotations

import importlib
from functools import partial

import pytest

from offload.dtypes import DtypeCode
from offload.layout import MAX_TILE_BYTES, Layout, Parameter, extend_layout
from offload.plan import Budgets, GpuRates, Plan, Rates, choose_plan, choose_subgroup_numel
from offload.plan.budget import GPU_STAGING_SLOTS, HIDDEN_PIECE_BYTES
from offload.predict import predict, timing
from offload.predict.streams import Order, Streams, Work
from offload.predict.timing import TimingExecutor
from offload.schedule.operations import Operation, RunVisit, Sweep

LINK, MEMORY, GPU = 50e9, 230e9, 1.3e12
NUMEL = 8_030_000_000 // 64 * 64
SHARE = (32 / MEMORY - 2 / LINK) / (10 / LINK + 8 / MEMORY)
"""What the GPU updates where link and memory take as long: (10 x + 2) / LINK = (32 - 8 x) / MEMORY."""
BOUND_S = NUMEL * (10 * SHARE + 2) / LINK
H100 = Rates(
    MEMORY * 12 / 28,
    gpu=GpuRates(GPU, LINK, LINK, call_s=1e-5),
    memory_bytes_per_s=MEMORY,
    reaction_s=1e-4,
    operation_s=1e-4,
)
ORDERS = pytest.mark.parametrize("order", Order)


TABLE_SHARE = 1024 * 12 // 8
"""Bytes of exact state for each byte of its update's table: 8 for each 1024 elements."""


class TableStreams(Streams[Operation | int]):
    """Tables of updates have a stream of their own; on that of state they cost nothing beside it."""

    def put(self, work: Work[Operation | int]) -> Work[Operation | int]:
        if isinstance(work.what, RunVisit) and work.follows is not None:  # the table comes behind the state
            table_bytes = work.nbytes // TABLE_SHARE
            work.follows = super().put(Work("tables", "h2d", work.what, table_bytes, work.given_s, work.follows))
        return super().put(work)


class OwnTables(TimingExecutor):
    def __init__(self, plan: Plan, rates: Rates, *, order: Order) -> None:
        super().__init__(plan, rates, order=order)
        self.streams = TableStreams(order)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """All state of 8e9 parameters in host memory, weights and gradients on the GPU."""
    parameters = [Parameter(f"p{n}", NUMEL // 64, DtypeCode.BFLOAT16, 0) for n in range(64)]
    layout = extend_layout(Layout((), ()), parameters, choose_subgroup_numel(NUMEL), MAX_TILE_BYTES)
    budgets = Budgets(
        layout.state_bytes,
        gpu_staging_bytes=GPU_STAGING_SLOTS * max(layout.subgroup_bytes),
        weights_on_gpu=True,
        gradients_on_gpu=True,
    )
    return choose_plan(layout, budgets, H100, SHARE)


def step_s(plan: Plan, monkeypatch: pytest.MonkeyPatch, kind: type[TimingExecutor], **how: object) -> float:
    module = importlib.import_module("offload.predict.predict")  # the package has a function of that name
    monkeypatch.setattr(module, "TimingExecutor", partial(kind, **how))
    return predict(plan, H100, steps=2, timeline=False).step_s


@ORDERS
@pytest.mark.parametrize("piece_bytes", [None, HIDDEN_PIECE_BYTES])
def test_a_step_keeps_to_its_bound(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, order: Order, piece_bytes: int | None
) -> None:
    assert pytest.approx(0.42, abs=0.005) == SHARE
    assert BOUND_S <= step_s(plan, monkeypatch, TimingExecutor, order=order, piece_bytes=piece_bytes) < 1.02 * BOUND_S


def test_tables_on_a_stream_of_their_own_starve(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_s(plan, monkeypatch, OwnTables, order=Order.READINESS) < 1.02 * BOUND_S
    assert step_s(plan, monkeypatch, OwnTables, order=Order.STAYS) > 1.1 * BOUND_S


class User(TimingExecutor):
    """The user copies something small each way every few milliseconds of a step.

    Attributes:
        asked: These copies, of the last step.
    """

    last: User

    def _begin(self, sweep: Sweep) -> None:
        super()._begin(sweep)
        User.last = self
        self.asked = [
            self.streams.put(Work(f"user {way}", way, -1, 1 << 10, self.now_s + 3.7e-3 * number))
            for number in range(240)
            for way in ("h2d", "d2h")
        ]


def most_waited_s(plan: Plan, monkeypatch: pytest.MonkeyPatch, **how: object) -> dict[str, float]:
    """Return how long a copy of the user's has waited at most, by direction."""
    step_s(plan, monkeypatch, User, **how)
    asked = User.last.asked
    return {way: max(work.ends_s - work.given_s for work in asked if work.engine == way) for way in ("h2d", "d2h")}


@ORDERS
def test_a_copy_of_the_user_s_waits_for_two_pieces_at_most(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, order: Order
) -> None:
    piece_s = HIDDEN_PIECE_BYTES / LINK
    for waited_s in most_waited_s(plan, monkeypatch, order=order, piece_bytes=HIDDEN_PIECE_BYTES).values():
        assert 0.9 * piece_s < waited_s < 2.05 * piece_s
    whole = most_waited_s(plan, monkeypatch, order=order)
    assert min(whole.values()) > 4 * piece_s


def test_engines_choose_between_streams() -> None:
    """By readiness the one that waits longest; else that of the last copy, while it has one that can begin."""
    for order, expected in ((Order.READINESS, "aba"), (Order.STAYS, "aab")):
        streams: Streams[Operation | int] = Streams(order)
        for name, given_s in (("a", 0.0), ("a", 0.6), ("b", 0.5)):
            streams.put(Work(name, "h2d", 0, 1, given_s))
        begun = ""
        while (found := streams.next())[1] is not None:
            begins_s, work = found
            streams.begin(work, begins_s + 1.0)
            begun += work.stream
        assert begun == expected


def test_an_engine_leaves_a_stream_between_pieces() -> None:
    for order in Order:
        streams: Streams[Operation | int] = Streams(order)
        for _ in range(3):
            streams.put(Work("a", "h2d", 0, 1, 0.0, gap_s=timing.PIECE_GAP_S))
        streams.put(Work("b", "h2d", 0, 1, 0.5))
        begun = ""
        while (found := streams.next())[1] is not None:
            begins_s, work = found
            streams.begin(work, begins_s + 1.0)
            begun += work.stream
        assert begun == "abaa"
