"""Signal handlers that ask a session for something while it is asked for something."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import offload
from offload.session.checkpoints import Checkpoints
from offload.session.thread import EngineThread


def make(path: Path) -> tuple[torch.nn.Parameter, offload.AdamW]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5000).bfloat16())
    config = offload.OffloadConfig(host_memory=0, paths=[path], subgroup_numel=2048, checkpoints_kept=3)
    return parameter, offload.AdamW([parameter], lr=1e-2, offload=config)


def at_line(code: CodeType, number: int, handler: Any) -> Any:
    """Return a trace function that calls a handler before the n-th line of a function runs, once."""
    left = [number]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                handler()
        return trace

    return trace


@pytest.mark.parametrize("line", range(1, 9))
@pytest.mark.parametrize("asked", [EngineThread.request, EngineThread._exchange, Checkpoints.save])
def test_a_signal_handler_saves_at_any_line_of_a_request(tmp_path: Path, asked: Any, line: int) -> None:
    parameter, optimizer = make(tmp_path)
    saved = []

    def handler() -> None:
        sys.settrace(None)
        optimizer.save_checkpoint(tmp_path / "handler")
        saved.append(True)

    with optimizer:
        parameter.grad = torch.ones(5000).bfloat16()
        optimizer.step()
        sys.settrace(at_line(asked.__code__, line, handler))
        try:
            optimizer.save_checkpoint(tmp_path / "asked")
        finally:
            sys.settrace(None)
        optimizer.wait_checkpoint()
        expected = optimizer.state_for(parameter)["exp_avg"]
    for folder in ["asked", "handler"][: 1 + len(saved)]:
        _, resumed = make(tmp_path)
        with resumed:
            resumed.load_checkpoint(tmp_path / folder)
            found = resumed.state_for(resumed.param_groups[0]["params"][0])
            assert torch.equal(found["exp_avg"], expected)
