"""Signal handlers that ask a session for something while it is asked for something."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from at_line import AtLine

import offload
from offload.checkpoint.reader import Checkpoint, Range
from offload.dtypes import DtypeCode
from offload.session.checkpoints import Checkpoints
from offload.session.engine import Engine
from offload.session.thread import EngineThread


def make(path: Path) -> tuple[torch.nn.Parameter, offload.AdamW]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5000).bfloat16())
    config = offload.OffloadConfig(host_memory=0, paths=[path], subgroup_numel=2048, checkpoints_kept=3)
    return parameter, offload.AdamW([parameter], lr=1e-2, offload=config)


def handled(asked: Any, line: int, handler: Callable[[], None]) -> AtLine:
    """Call a handler before the n-th line of a function runs, once, as a signal might."""
    return AtLine(line - 1, (asked.__code__,), handler)


@pytest.mark.parametrize("asked", [EngineThread.request, EngineThread._exchange, Checkpoints.save])
def test_a_signal_handler_saves_at_any_line_of_a_request(tmp_path: Path, asked: Any) -> None:
    parameter, optimizer = make(tmp_path)
    other, resumed = make(tmp_path)
    saved = []

    def handler() -> None:
        optimizer.save_checkpoint(tmp_path / "handler")
        saved.append(True)

    with optimizer, resumed:
        for line in range(1, 9):
            saved.clear()
            parameter.grad = torch.ones(5000).bfloat16()
            optimizer.step()
            with handled(asked, line, handler) as at_line:
                optimizer.save_checkpoint(tmp_path / "asked")
            optimizer.wait_checkpoint()
            expected = optimizer.state_for(parameter)["exp_avg"]
            for folder in ["asked", "handler"][: 1 + len(saved)]:
                resumed.load_checkpoint(tmp_path / folder)
                assert torch.equal(resumed.state_for(other)["exp_avg"], expected), (folder, at_line.where)


@pytest.mark.parametrize("asked", [EngineThread._exchange, Checkpoints.save])
def test_a_signal_handler_steps_and_adds_while_a_checkpoint_begins(tmp_path: Path, asked: Any) -> None:
    """The checkpoint is of before or of after: step counts and state agree, and the new group has both or neither."""
    for line in range(1, 15):
        parameter, optimizer = make(tmp_path)
        added = torch.nn.Parameter(torch.ones(3000).bfloat16())

        def step(parameter: torch.nn.Parameter = parameter, optimizer: offload.AdamW = optimizer) -> None:
            parameter.grad = torch.ones(5000).bfloat16()
            optimizer.step()

        def handler(step: Any = step, optimizer: Any = optimizer, added: Any = added) -> None:
            step()
            optimizer.add_param_group({"params": [added]})

        with optimizer:
            step()
            with handled(asked, line, handler) as at_line:
                optimizer.save_checkpoint(tmp_path / "checkpoint")
            optimizer.wait_checkpoint()
        with Checkpoint(tmp_path / "checkpoint") as checkpoint:
            name, *others = checkpoint.names
            found = torch.empty(5000)
            checkpoint.read([Range(name, "exp_avg", 0, found)])
            wanted = 0.1 if checkpoint.step_of(name) == 1 else 0.19
            assert found.unique().tolist() == pytest.approx([wanted]), at_line.where
            assert checkpoint.step_of(name) == checkpoint.step, at_line.where
            for other in others:
                checkpoint.read([Range(other, "exp_avg", 0, torch.empty(3000))])
                assert checkpoint.step_of(other) == 0, at_line.where


@pytest.mark.parametrize("asked", [EngineThread.request, EngineThread._exchange, Engine.add])
def test_a_signal_handler_adds_while_others_are_added(tmp_path: Path, asked: Any) -> None:
    config = offload.OffloadConfig(host_memory=0, paths=[tmp_path], subgroup_numel=2048)
    with offload.Engine([offload.Parameter("first", 5000, DtypeCode.BFLOAT16, 0)], config) as engine:
        wanted = ["first"]
        for line in range(1, 9):

            def add(name: str) -> None:
                engine.add([offload.Parameter(name, 3000, DtypeCode.BFLOAT16, 0)])
                wanted.append(name)

            with handled(asked, line, partial(add, f"handler {line}")) as at_line:
                add(f"asked {line}")
            there = {parameter.name: parameter.numel for parameter in engine.plan.layout.parameters}
            assert there == {name: 5000 if name == "first" else 3000 for name in wanted}, at_line.where


def test_a_close_in_a_handler_that_asks_comes_after_what_it_has_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler looks at the state, and while it does another one closes the session."""
    parameter, optimizer = make(tmp_path)
    seen = []

    def look() -> None:
        seen.append(optimizer.state_for(parameter)["exp_avg"])
        assert not optimizer.engine._shutdown.freed

    handlers, plain = iter([look, optimizer.close]), EngineThread.check_usable

    def check(thread: EngineThread) -> None:
        plain(thread)
        if thread.is_in_turn:
            next(handlers, lambda: None)()

    parameter.grad = torch.ones(5000).bfloat16()
    monkeypatch.setattr(EngineThread, "check_usable", check)
    optimizer.step()
    assert optimizer.engine._shutdown.freed
    assert len(seen) == 1
    with pytest.raises(offload.SessionBrokenError, match="closed"):
        optimizer.step()
