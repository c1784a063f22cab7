"""What a run leaves behind: one record a step, and the summary made of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.units import format_seconds

LAST_STEPS = 20
"""Steps over which the final loss is averaged: a single batch is too noisy to compare runs by."""

TIMELINE_NAME = "timeline.json"

Interval = tuple[str, str, float, float, int]
"""One operation of a step's timeline: lane, label, started_s, finished_s, nbytes."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, counted from 1.

    Attributes:
        norm: Norm of the gradients before clipping; NaN if nobody asked for it.
        tokens_per_s: Of the whole iteration.
        forward_s: All micro-steps' forward passes; `backward_s` likewise.
        step_s: Clipping, the optimizer's step and `zero_grad`, as the training loop sees them.
        metrics: `optimizer.metrics()` after the step.
    """

    step: int
    loss: float
    lr: float
    norm: float
    tokens_per_s: float
    forward_s: float
    backward_s: float
    step_s: float
    metrics: Mapping[str, Any]

    @property
    def iteration_s(self) -> float:
        """Forward, backward and step."""
        return self.forward_s + self.backward_s + self.step_s

    def in_short(self) -> str:
        """Return what to watch while a run goes on."""
        return (
            f"loss {self.loss:.3f}, {self.tokens_per_s:,.0f} tokens/s, forward {format_seconds(self.forward_s)}, "
            f"backward {format_seconds(self.backward_s)}, step {format_seconds(self.step_s)}"
        )

    def as_line(self) -> str:
        """Return the record as one line of JSON; the optimizer's own metrics begin with `optimizer/`."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "metrics"}
        return to_json(own | {f"optimizer/{name}": value for name, value in self.metrics.items()})


@dataclass(slots=True)
class RunRecord:
    """All steps of one run, as far as it got.

    Attributes:
        steps: In order.
        timeline: Of the last step.
        plan: The optimizer's plan, as it prints itself.
        seconds: From building the model to closing the optimizer.
    """

    steps: list[StepRecord] = field(default_factory=list)
    timeline: list[Interval] = field(default_factory=list)
    plan: str = ""
    seconds: float = 0.0

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [record.loss for record in self.steps]

    def summary(self) -> dict[str, Any]:
        """Return medians and totals; the first step is left out of the medians where there are others."""
        if not self.steps:
            return {"steps": 0, "seconds": self.seconds}
        warm = self.steps[1:] or self.steps

        def metric(name: str) -> float | None:
            values = [record.metrics[name] for record in warm if record.metrics.get(name) is not None]
            return statistics.median(values) if values else None

        losses = self.losses
        last = losses[-LAST_STEPS:]
        return {
            "steps": len(self.steps),
            "seconds": self.seconds,
            "first_loss": losses[0],
            "final_loss": sum(last) / len(last),
            "final_loss_steps": len(last),
            "tokens_per_s": statistics.median(record.tokens_per_s for record in warm),
            "forward_s": statistics.median(record.forward_s for record in warm),
            "backward_s": statistics.median(record.backward_s for record in warm),
            "step_s": statistics.median(record.step_s for record in warm),
            "optimizer_step_s": metric("step_s"),
            "predicted_step_s": metric("predicted_step_s"),
            "iteration_s": statistics.median(record.iteration_s for record in warm),
            "predicted_iteration_s": metric("predicted_iteration_s"),
            "waited_s": metric("waited_s"),
            "state_bytes": metric("state_bytes"),
            "resident_bytes": metric("resident_bytes"),
            "resident_share": metric("resident_share"),
            "streamed_bytes": metric("streamed_bytes"),
            "lanes": {
                lane: {
                    "predicted_s": metric(f"lane/{lane}/predicted_s"),
                    "measured_s": metric(f"lane/{lane}/busy_s"),
                }
                for lane in _predicted_lanes(warm[-1].metrics)
            },
            "path_bytes": [
                {"read_bytes": metric(f"path/{index}/read_bytes"), "write_bytes": metric(f"path/{index}/write_bytes")}
                for index in range(_path_count(warm[-1].metrics))
            ],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two runs computed the same, bit for bit.

    Attributes:
        numel: Weights compared.
        different_numel: Weights whose bits differ.
        first_different: The first parameter that has any, by name.
        losses_identical: Whether each step's loss was the same.
        finite: Whether all losses were finite; equality means little if not.
    """

    numel: int
    different_numel: int
    first_different: str | None
    losses_identical: bool
    finite: bool

    @property
    def identical(self) -> bool:
        """Whether nothing at all differs."""
        return self.different_numel == 0 and self.losses_identical

    def verdict(self) -> str:
        """Return the outcome in one sentence."""
        if self.identical:
            doubt = "" if self.finite else "; but the loss is not finite, so this says little"
            return (
                f"identical: all {self.numel:,} weights and every loss, bit for bit, in memory and offloaded{doubt}"
            )
        losses = "the losses are the same" if self.losses_identical else "the losses differ"
        if self.different_numel == 0:
            return f"DIFFERENT: {losses}, though all {self.numel:,} weights are the same in memory and offloaded"
        return (
            f"DIFFERENT: {self.different_numel:,} of {self.numel:,} weights differ between memory and "
            f"offloaded, first in {self.first_different}; {losses}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for the summary."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"identical": self.identical} | fields


def same_losses(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether two runs have the same losses, NaN being the same as NaN."""
    return len(ours) == len(theirs) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(ours, theirs, strict=True)
    )


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON that every parser reads: a number that is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_text(path: Path, text: str) -> None:
    """Write a small file as UTF-8, whatever the locale."""
    path.write_text(text, encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _path_count(names: Iterable[str]) -> int:
    indices = [int(name.split("/")[1]) for name in names if name.startswith("path/")]
    return max(indices, default=-1) + 1


def _predicted_lanes(names: Iterable[str]) -> list[str]:
    return [name.split("/")[1] for name in names if name.startswith("lane/") and name.endswith("/predicted_s")]
