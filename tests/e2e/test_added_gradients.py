"""Gradients of further passes, added in host memory beside backward: the same bits, and backward does not wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from at_line import AtLine, at_every_line
from mirror import same, states
from simulated import OnDevice, add_early
from test_lifetime import threads_end
from test_small_tensors import Counting, vectors
from world import HazardError, SimulatedDevice

import offload
from offload import waits
from offload.gradients import additions
from offload.gradients.additions import BUFFERS, Additions, buffer_bytes
from offload.gradients.gpu import GpuGradients

SHAPES = ((70, 40), (3000,), (17,), (150, 100))
LONG_S = 60.0


def weights(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(parameters: list[torch.nn.Parameter], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) * 10.0**seed for p in parameters]


def accumulate(parameters: list[torch.nn.Parameter], passes: int, first: int = 0) -> None:
    for number in range(first, first + passes):
        torch.autograd.backward(parameters, gradients(parameters, number))


def config(folder: Path, **changes: Any) -> offload.OffloadConfig:
    chosen = {"host_memory": 60_000, "gpu_memory": 0, "paths": [folder], "subgroup_numel": 4096, "placement": "cpu"}
    return offload.OffloadConfig(**{**chosen, "threads": 1, "keep_grads": False, **changes})


def expected(passes: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    parameters = weights(dtype)
    with offload.AdamW(parameters) as optimizer:
        accumulate(parameters, passes)
        optimizer.step()
        return states(optimizer, parameters)


def of(optimizer: offload.AdamW) -> Additions:
    store = optimizer.engine._parts.gradients
    assert isinstance(store, GpuGradients)
    return store.additions


@pytest.fixture(params=[True, False], ids=["lazy", "threads"])
def device(request: pytest.FixtureRequest) -> SimulatedDevice:
    return SimulatedDevice(lazy=request.param, delay_s=0.0 if request.param else 2e-4)


class Held:
    """Keeps additions from being made until it is let go, and counts what waits for buffers meanwhile."""

    def __init__(self, optimizer: Any, patch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        self.waiting, self.go = threading.Event(), threading.Event()
        self.skips = False
        """Whether those are not waited for, until additions are let go."""
        kernel = optimizer.engine._parts.kernel
        self.plain, self.plain_wait = kernel.add, waits.wait_for
        kernel.add = self.add
        patch.setattr(waits, "wait_for", self.wait)

    def add(self, *rows: Any) -> None:
        assert self.go.wait(LONG_S)
        self.plain(*rows)

    def wait(self, arrived: Callable[[float], object], what: Callable[[], str], *timeout_s: Any) -> bool:
        if "to be added in host memory" in what():
            self.waits += 1
            self.waiting.set()
            if self.skips and not self.go.is_set():
                return True
        return self.plain_wait(arrived, what, *timeout_s)


def test_backward_waits_only_where_all_buffers_are_taken(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of four passes, each of which takes one buffer; the fifth finds none."""
    parameters = weights()[:1]
    monkeypatch.setattr(additions, "BUFFERS", BUFFERS)
    monkeypatch.setattr(additions, "buffer_bytes", lambda slots_bytes: 8192)
    with OnDevice(parameters, device=device, offload=config(tmp_path)) as optimizer:
        held = Held(optimizer, monkeypatch)
        accumulate(parameters, 1 + BUFFERS)
        assert held.waits == 0
        last = threading.Thread(target=accumulate, args=(parameters, 1, 1 + BUFFERS))
        last.start()
        assert held.waiting.wait(LONG_S)
        assert last.is_alive()
        held.go.set()
        last.join()
        assert held.waits == 1
        optimizer.step()
        twins = weights()[:1]
        with offload.AdamW(twins) as twin:
            accumulate(twins, 2 + BUFFERS)
            twin.step()
            assert same(states(optimizer, parameters), states(twin, twins))


def test_what_a_further_pass_asks_of_the_device(tmp_path: Path) -> None:
    """For each gradient, on which lane backward runs; all else for all of them together."""
    seen = []
    for count in (100, 400):
        device, parameters = Counting(), vectors(count, 128)
        settings = config(tmp_path, host_memory="10MB", subgroup_numel=1 << 16, paths=[])
        with OnDevice(parameters, device=device, offload=settings) as optimizer:
            accumulate(parameters, 1)
            device.asked.clear()
            accumulate(parameters, 1)
            optimizer.engine.gradients.settle()
            assert device.asked.pop("caller") == len(parameters)
            seen.append(device.asked.total())
    assert max(seen) < 50  # some for each buffer


def _taken_again(optimizer: Any, patch: pytest.MonkeyPatch) -> None:
    held = Held(optimizer, patch)
    held.skips = True
    what = of(optimizer)

    def let_go(plain: Callable[[], None]) -> None:
        held.go.set()
        plain()

    for name in ("finish", "wait_and_clear_error"):
        patch.setattr(what, name, partial(let_go, getattr(what, name)))


class Exchanging(SimpleQueue):  # type: ignore[type-arg]
    """Two passes of one parameter; at their end, as nobody waits for the first before."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def put(self, item: Any, *how: Any) -> None:
        self.kept.append(item)
        if len(self.kept) % 2 == 0 or item is None:
            while self.kept:
                super().put(self.kept.pop())


BUGS: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "added before they have been copied": lambda optimizer, patch: add_early(
        optimizer.engine._parts.lanes.device, patch
    ),
    "a buffer is taken again before it has been added": _taken_again,
}


@pytest.mark.not_ahead("whoever waits for gradients to make updates from knows of copies, too")
@pytest.mark.parametrize("bug", [*BUGS, "two passes are exchanged"])
def test_what_is_added_too_early_or_out_of_order_is_found(
    tmp_path: Path, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(additions, "buffer_bytes", lambda slots_bytes: 1 << 16)
    passes = 3 if "exchanged" in bug else 2 + BUFFERS
    parameters = weights()
    if "exchanged" in bug:
        monkeypatch.setattr(additions, "SimpleQueue", Exchanging)
    optimizer = OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=config(tmp_path))
    if bug in BUGS:
        BUGS[bug](optimizer, monkeypatch)
    try:
        accumulate(parameters, passes)
        optimizer.step()
        found = states(optimizer, parameters)
        seen = "other bits" if not same(found, expected(passes)) else "nothing"
    except offload.OffloadError as error:
        caused = [error, error.__cause__, error.__context__]
        seen = "a hazard" if any(isinstance(cause, HazardError) for cause in caused) else str(error)
    finally:
        monkeypatch.undo()
        with contextlib.suppress(offload.OffloadError):
            optimizer.close()
    assert seen == ("other bits" if "exchanged" in bug else "a hazard")


def test_an_addition_that_fails_is_told_until_gradients_are_forgotten(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = weights()
    with OnDevice(parameters, device=device, offload=config(tmp_path)) as optimizer:
        with monkeypatch.context() as patch:

            def fail(*rows: Any) -> None:
                raise offload.OffloadError("it cannot be added")

            patch.setattr(optimizer.engine._parts.kernel, "add", fail)
            accumulate(parameters, 2)
            for ask in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.engine.gradients.settle):
                with pytest.raises(offload.OffloadError, match="it cannot be added"):
                    ask()
        optimizer.zero_grad()
        accumulate(parameters, 2)
        optimizer.step()
        assert same(states(optimizer, parameters), expected(2))


@pytest.mark.parametrize(("lazy", "fail_at"), [(True, 2), (False, 4), (True, 6)])
def test_a_device_that_fails_hangs_nothing(tmp_path: Path, lazy: bool, fail_at: int) -> None:
    parameters = weights()
    before = threading.active_count()
    device = SimulatedDevice(lazy=lazy)
    optimizer = OnDevice(parameters, device=device, offload=config(tmp_path))
    device.fail_at = device.done + fail_at

    def train() -> None:
        accumulate(parameters, 9)
        optimizer.clip_grad_norm_(1.0)

    with pytest.raises(offload.OffloadError, match="has failed"):
        train()
    optimizer.close()
    assert threads_end(before)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [17, pytest.param(7, marks=pytest.mark.full)])
def test_an_interrupt_at_any_line_neither_loses_nor_doubles_an_addition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """While a bucket leaves, and while it is added."""
    monkeypatch.setattr(additions, "MOST_BUFFER_BYTES", 4096)
    parameters, wanted = weights(), expected(2)[: len(SHAPES)]
    begin = [p.detach().clone() for p in parameters]

    def program(interrupted: AtLine) -> None:
        for parameter, value in zip(parameters, begin, strict=True):
            parameter.data.copy_(value)
        with OnDevice(parameters, device=SimulatedDevice(), offload=config(tmp_path)) as optimizer:
            accumulate(parameters, 1)
            for parameter, gradient in zip(parameters, gradients(parameters, 1), strict=True):
                parameter.grad = gradient
                optimizer._route.handle_arrival(optimizer._weights.bound[parameter])
            interrupted(optimizer.engine.gradients.settle)
            if interrupted.has_fired:
                optimizer.engine.gradients.settle()
            optimizer.step()
            assert same([p.detach() for p in parameters], wanted), interrupted.where

    at_every_line(program, stride)


def test_the_plan_counts_the_buffers(tmp_path: Path) -> None:
    assert BUFFERS * buffer_bytes(1000) == BUFFERS * 4096
    assert BUFFERS * buffer_bytes(1 << 20) == 1 << 20
    assert BUFFERS * buffer_bytes(1 << 40) == 128 << 20
    assert buffer_bytes(0) == 0
    parameters = weights()
    with OnDevice(parameters, device=SimulatedDevice(), offload=config(tmp_path)) as optimizer:
        accumulate(parameters, 2)
        slots = optimizer.engine._parts.gradients
        used, taken = slots.used_bytes(optimizer.engine.plan), sum(found.slot.nbytes for found in slots.records)
        assert taken + BUFFERS * buffer_bytes(taken) <= used <= (taken + 4096) + BUFFERS * buffer_bytes(taken + 4096)
        assert of(optimizer).arena.nbytes <= used - taken  # type: ignore[union-attr]


def test_gradients_are_let_go_although_a_review_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has forgotten them by then, and reads what comes next as the first."""
    parameters = [torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))]
    settings = offload.OffloadConfig(placement="gpu", keep_grads=False)
    with OnDevice(parameters, device=SimulatedDevice(), offload=settings) as optimizer:
        for _ in range(2):
            torch.autograd.backward(parameters, [torch.ones_like(parameter) for parameter in parameters])
            optimizer.step()
            optimizer.zero_grad()
        torch.autograd.backward(parameters, [torch.ones_like(parameter) for parameter in parameters])

        def interrupted(begin: object) -> None:
            raise KeyboardInterrupt

        thread = optimizer.engine._thread
        optimizer.engine._sweep_requests.placement_review.due = True
        with monkeypatch.context() as patch:
            patch.setattr(thread, "request", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.zero_grad()
        optimizer.engine._sweep_requests.placement_review.due = False
        assert not optimizer._route.departures
        assert not optimizer.engine._parts.gradients.in_transit  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("placement", ["cpu", "gpu"])
def test_an_interrupt_drops_no_gradient_that_is_still_read(placement: str, stride: int) -> None:
    """Whatever it came between, gradients that arrive after the next `zero_grad` are the first ones.

    At every third line in `make test`.
    """
    settings = offload.OffloadConfig(placement=placement, keep_grads=False, gpu_memory=0, threads=1)
    wanted = expected_after_zero_grad()

    def program(interrupted: AtLine) -> None:
        parameters = weights()
        device = SimulatedDevice(lazy=True)
        with OnDevice(parameters, device=device, offload=settings) as optimizer:
            accumulate(parameters, 1)
            optimizer.step()
            accumulate(parameters, 2, first=1)
            interrupted(optimizer.zero_grad)
            optimizer.zero_grad()
            accumulate(parameters, 2, first=1)
            optimizer.step()
            found = states(optimizer, parameters)
        assert same(found, wanted), interrupted.where

    at_every_line(program, stride)


def expected_after_zero_grad() -> list[torch.Tensor]:
    parameters = weights()
    with offload.AdamW(parameters) as optimizer:
        for passes, first in ((1, 0), (2, 1)):
            accumulate(parameters, passes, first)
            optimizer.step()
            optimizer.zero_grad()
        return states(optimizer, parameters)
