"""A Ctrl-C at every line of a constructor, a load, a save and a close: nothing stays behind, and the next try works.

Not by timing: see `at_line.py`.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from at_line import AtLine, at_every_line

import offload
from offload.session.thread import EngineThread
from offload.tiers.filesystem import read_regular

LONG_S = 60.0
STRIDE = 13
"""Of `make test`; a prime, so that no loop is always met at the same line."""


class Rest:
    """The descriptors, threads and stores that there are while there is no session.

    Threads that are there now are not counted: the last one of a session may outlive its `close` by a little.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._others = {*threading.enumerate()}
        self.before = self.left()

    def left(self) -> tuple[int, int, int]:
        """Return how many descriptors, further threads and stores there are."""
        threads = {*threading.enumerate()} - self._others
        return len(os.listdir("/proc/self/fd")), len(threads), len(list(self._path.iterdir()))

    def comes(self) -> bool:
        """Return whether everything that is being put away is, some time."""
        deadline_s = time.monotonic() + LONG_S
        while self.left() != self.before and time.monotonic() < deadline_s:
            gc.collect()
            time.sleep(0.001)
        return self.left() == self.before


def make(path: Path, backend: str) -> offload.AdamW:
    parameter = torch.nn.Parameter(torch.ones(3000).bfloat16())
    config = offload.OffloadConfig(
        host_memory=0, paths=[path], subgroup_numel=1024, threads=1, io_backend=backend, staging_memory=50_000
    )
    return offload.AdamW([parameter], offload=config)


def rest_of(path: Path, backend: str) -> Rest:
    """Return what there is behind a first session."""
    make(path, backend).close()
    gc.collect()
    return Rest(path)


def step(optimizer: offload.AdamW) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


EVERY = pytest.param(1, marks=[pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1800)])
STRIDES = [pytest.param(STRIDE, marks=[pytest.mark.slow]), EVERY]
THIRD = [pytest.param(3, marks=[pytest.mark.slow]), EVERY]
"""Of what is short."""
LONG = [pytest.param(47, marks=[pytest.mark.slow]), EVERY]
"""Of what opens several sessions for each interrupt."""
BACKENDS = pytest.mark.parametrize("backend", ["threads", "asyncio"])
LOST = r"(?s)Exception ignored in. <function Checkpoint\.__del__.*KeyboardInterrupt"
"""What is said of an interrupt that comes while a checkpoint is dropped: Python swallows it, and the call goes on."""


@pytest.mark.parametrize("stride", STRIDES)
@BACKENDS
def test_a_constructor(tmp_path: Path, backend: str, stride: int) -> None:
    rest = rest_of(tmp_path, backend)

    def program(interrupted: AtLine) -> None:
        optimizer = interrupted(lambda: make(tmp_path, backend))
        if optimizer is not None:
            optimizer.close()
        del optimizer
        assert rest.comes(), (interrupted.where, rest.left(), rest.before)

    at_every_line(program, stride)


@pytest.mark.parametrize("stride", STRIDES)
@BACKENDS
def test_a_close(tmp_path: Path, backend: str, stride: int) -> None:
    rest = rest_of(tmp_path, backend)

    def program(interrupted: AtLine) -> None:
        optimizer = make(tmp_path, backend)
        step(optimizer)
        interrupted(optimizer.close)
        optimizer.close()
        del optimizer
        assert rest.comes(), (interrupted.where, rest.left(), rest.before)

    at_every_line(program, stride)


@pytest.mark.slow
@pytest.mark.parametrize("closes", [False, True], ids=["", "with a handler that closes"])
def test_a_request_leaves_a_session_that_can_be_closed(
    tmp_path: Path, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the lines of the methods that hand a request over."""
    rest = rest_of(tmp_path, "threads")
    plain = EngineThread.check_usable

    def program(interrupted: AtLine) -> None:
        optimizer = make(tmp_path, "threads")

        def check(thread: EngineThread, optimizer: offload.AdamW = optimizer) -> None:
            plain(thread)
            if thread.is_in_turn:
                optimizer.close()

        with monkeypatch.context() as patch:
            if closes:
                patch.setattr(EngineThread, "check_usable", check)
            interrupted(partial(step, optimizer))
        if not closes:
            optimizer.close()
        del optimizer, check
        assert rest.comes(), (interrupted.where, rest.left(), rest.before)

    at_every_line(program, within=(EngineThread.request.__code__, EngineThread._exchange.__code__))


@pytest.mark.filterwarnings(f"ignore:{LOST}:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", LONG)
@pytest.mark.parametrize("copy", [False, True])
def test_a_load_and_a_save(tmp_path: Path, stride: int, copy: bool) -> None:
    path, folder = tmp_path / "path", tmp_path / "checkpoint"
    path.mkdir()
    with make(path, "threads") as optimizer:
        step(optimizer)
        optimizer.save_checkpoint(folder, copy=copy)
        optimizer.wait_checkpoint()
    gc.collect()
    rest = Rest(path)

    def load(interrupted: AtLine) -> None:
        optimizer = make(path, "threads")
        interrupted(partial(optimizer.load_checkpoint, folder))
        if optimizer.engine.broken is None:
            optimizer.load_checkpoint(folder)
            step(optimizer)
        optimizer.close()
        del optimizer
        assert rest.comes(), (interrupted.where, rest.left(), rest.before)

    def save(interrupted: AtLine) -> None:
        with make(path, "threads") as optimizer:
            step(optimizer)
            interrupted(partial(optimizer.save_checkpoint, tmp_path / "other", copy=copy))
            step(optimizer)
            optimizer.save_checkpoint(tmp_path / "another", copy=True)
            optimizer.wait_checkpoint()

    at_every_line(load, stride)
    at_every_line(save, stride)


@pytest.mark.parametrize("stride", THIRD)
@pytest.mark.parametrize("waits", [True, False])
def test_a_park_and_what_ends_it(tmp_path: Path, waits: bool, stride: int) -> None:
    """The next step has the bits of one without parks."""
    twin = torch.nn.Parameter(torch.ones(3000).bfloat16())
    never = offload.AdamW([twin], offload=offload.OffloadConfig(subgroup_numel=1024, threads=1))
    config = offload.OffloadConfig(paths=[tmp_path], subgroup_numel=1024, threads=1, host_memory="1GiB")
    parameter = torch.nn.Parameter(torch.ones(3000).bfloat16())
    parks = offload.AdamW([parameter], offload=config)

    def program(interrupted: AtLine) -> None:
        for optimizer in (never, parks):
            step(optimizer)
        interrupted(lambda: (parks.park(wait=waits), parks.unpark()))
        assert torch.equal(parameter, twin), interrupted.where

    at_every_line(program, stride)
    state, expected = parks.state_for(parameter), never.state_for(twin)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    parks.close()
    never.close()


def test_a_file_that_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    rest = Rest(tmp_path)

    def program(interrupted: AtLine) -> None:
        assert interrupted(lambda: read_regular(file, 7)) == (None if interrupted.has_fired else b"content")
        assert rest.left() == rest.before, interrupted.where

    at_every_line(program)


@pytest.mark.parametrize("stride", STRIDES)
def test_an_added_group(stride: int) -> None:
    """Whatever of it there is already, it can be added again, and is updated."""

    def program(interrupted: AtLine) -> None:
        first, second = (torch.nn.Parameter(torch.ones(10)) for _ in range(2))
        with offload.AdamW([first], offload=offload.OffloadConfig(threads=1)) as optimizer:
            interrupted(partial(optimizer.add_param_group, {"params": [second]}))
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [second]})
            (first + second).sum().backward()
            optimizer.step()
            assert len(optimizer.state) == 2, interrupted.where
            assert first.equal(second), interrupted.where

    at_every_line(program, stride)


@pytest.mark.parametrize("stride", THIRD)
@pytest.mark.parametrize("unscales", [False, True])
def test_a_clip(tmp_path: Path, unscales: bool, stride: int) -> None:
    """Whatever it leaves is no factor for gradients that it has not seen."""
    parameter = torch.nn.Parameter(torch.ones(3000))
    with offload.AdamW([parameter]) as optimizer:

        def program(interrupted: AtLine) -> None:
            (parameter * 8).sum().backward()
            interrupted(partial(optimizer.unscale, 4.0) if unscales else partial(optimizer.clip_grad_norm_, 0.5))
            parameter.grad = None
            (parameter * 2).sum().backward()
            optimizer.reset_state()
            optimizer.step()
            assert torch.allclose(optimizer.state_for(parameter)["exp_avg"], torch.full((3000,), 0.2))
            parameter.grad = None

        at_every_line(program, stride)
