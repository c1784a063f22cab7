"""An engine that notes what an optimizer tells it: the calls by value, and no thread or state behind them."""

from __future__ import annotations

from typing import Any

import torch

from offload.config import OffloadConfig
from offload.device.none import NoDevice
from offload.optim.weights import Weights


class RecordedEngine:
    """Stands for an `Engine`, its `gradients`, and the `EngineHolder` around them."""

    broken = None
    is_pending = False
    speculates = False

    def __init__(self, config: OffloadConfig | None = None, device: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.steps = 0
        self.engine = self.engine_if_open = self.gradients = self
        self.config = config or OffloadConfig()
        self.device = device or NoDevice()
        self.is_deferred = False
        self.closed = False

    def slot(self, position: int) -> torch.Tensor:
        return torch.full((100,), float("nan"))

    def arrived(self, position: int, address: int, dtype: Any) -> None:
        self.calls.append(("arrived", position, address, dtype))

    def bind(self, position: int, address: int, dtype: Any, *, gathered: bool) -> None:
        self.calls.append(("bind", position, address, dtype, gathered))

    def take_memory(self) -> None:
        self.calls.append(("take_memory",))

    def final(self, position: int, gradient: torch.Tensor) -> None:
        self.calls.append(("final", position, gradient.data_ptr()))

    def bind_weight(self, position: int, address: int) -> None:
        self.calls.append(("bind_weight", position, address))

    def reload_master(self, position: int, *, whole: bool = True) -> None:
        self.calls.append(("reload_master" if whole else "match_master", position))

    def step_count(self, position: int) -> int:
        return self.steps

    def open(self) -> RecordedEngine:
        return self

    def check_open(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def said(self) -> list[tuple[Any, ...]]:
        """Return what has been told since the last time."""
        found, self.calls = self.calls, []
        return found


def bound_to(engine: RecordedEngine, parameters: list[torch.nn.Parameter]) -> Weights:
    """Return weights of which the engine has been told."""
    weights: Any = Weights(engine)  # type: ignore[arg-type]
    for number, parameter in enumerate(parameters):
        weights.bound[parameter] = weights.bind(parameter, f"p{number}")
    engine.said()
    return weights
