"""The results of a run: a row for each step, the summary of all rows, and the comparison with a run in memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from offload import metrics
from offload.schedule.timeline import Interval
from offload.units import format_seconds

if TYPE_CHECKING:
    import torch

    from offload.pictures.report import Report

LAST_STEPS = 20
"""Steps over which the final loss is averaged: a single batch is too noisy to compare runs by."""

OPTIMIZERS = "optimizer/"
"""Prefix of the optimizer's own metrics in a row."""

_LOOP_TIMES = ("tokens_per_s", "forward_s", "backward_s", "step_s", "iteration_s")
"""What the training loop has measured, of which the summary has medians."""
_METRICS = {
    "optimizer_step_s": metrics.STEP_S,
    **{name: name for name in (metrics.PREDICTED_STEP_S, metrics.PREDICTED_ITERATION_S, metrics.WAITED_S)},
    **{name: name for name in (metrics.STATE_BYTES, metrics.RESIDENT_BYTES)},
    **{name: name for name in (metrics.RESIDENT_SHARE, metrics.STREAMED_BYTES)},
}
"""The optimizer's metrics whose medians the summary has, by their names there."""


@dataclass(slots=True)
class RunRecord:
    """All steps of one run, as far as it got.

    Attributes:
        rows: One for each step. `step`: its number, from 1; `loss`, `lr`; `norm`: of the gradients before clipping,
            NaN if nobody asked for it; `forward_s` and `backward_s`: of all micro-steps; `step_s`: clipping, the
            optimizer's step and `zero_grad`, as the training loop sees them; `iteration_s` and `tokens_per_s`: of
            all; and, behind `OPTIMIZERS`, what `optimizer.metrics()` says after the step.
        timeline: Of the last step.
        report: The optimizer's report after all steps; None if the run ended before.
        seconds: From building the model to closing the optimizer.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[Interval] = field(default_factory=list)
    report: Report | None = None
    seconds: float = 0.0

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [row["loss"] for row in self.rows]

    def report_with_steps(self, notes: Sequence[str]) -> Report | None:
        """Return `report` with notes and the last steps beside their predictions; None if `report` is None."""
        from offload.pictures.report import MOST_STEPS, Step

        if self.report is None:
            return None
        steps = []
        for row in self.rows[-MOST_STEPS:]:
            measured_s, predicted_s = (
                row.get(f"{OPTIMIZERS}{name}") for name in (metrics.STEP_S, metrics.PREDICTED_STEP_S)
            )
            if measured_s is not None:  # else the run ended before the figures of this step were noted
                steps.append(Step(row["step"], measured_s, predicted_s))
        return replace(self.report, steps=steps, notes=[*notes])

    def summary(self) -> dict[str, Any]:
        """Return what the run came to: totals, losses, and medians of what was measured in each step.

        "lanes" has the medians of each lane by its name, "path_bytes" a list of those of each path, by its number.
        Medians leave out the first step, which warms up, if there are others.
        """
        if not self.rows:
            return {"steps": 0, "seconds": self.seconds}
        warm_rows = self.rows[1:] or self.rows

        def median(name: str) -> float | None:
            """Return the median of an entry over the `warm_rows` that have it; None if none has."""
            values = [row[name] for row in warm_rows if row.get(name) is not None]
            return statistics.median(values) if values else None

        def keys_of(kind: str, ending: str) -> list[str]:
            """Return each X, once, of the last row's metrics "<kind>/X/...<ending>", such as a lane's name.

            `ending` is "" for metrics with any ending.
            """
            names = [name.removeprefix(OPTIMIZERS).split("/") for name in warm_rows[-1]]
            return list(dict.fromkeys(parts[1] for parts in names if parts[0] == kind and parts[-1].endswith(ending)))

        lanes = {lane: f"{OPTIMIZERS}lane/{lane}/" for lane in keys_of("lane", "predicted_s")}
        paths = [f"{OPTIMIZERS}path/{number}/" for number in sorted(keys_of("path", ""), key=int)]
        losses = self.losses
        last_losses = losses[-LAST_STEPS:]
        return {
            "steps": len(self.rows),
            "seconds": self.seconds,
            "first_loss": losses[0],
            "final_loss": sum(last_losses) / len(last_losses),
            "final_loss_steps": len(last_losses),
            **{name: median(name) for name in _LOOP_TIMES},
            **{name: median(OPTIMIZERS + metric) for name, metric in _METRICS.items()},
            "lanes": {
                lane: {"predicted_s": median(f"{prefix}predicted_s"), "measured_s": median(f"{prefix}busy_s")}
                for lane, prefix in lanes.items()
            },
            "path_bytes": [
                {name: median(f"{prefix}{name}") for name in ("read_bytes", "write_bytes")} for prefix in paths
            ],
        }


def progress_text(row: Mapping[str, Any]) -> str:
    """Return a step's loss and speed in words, for the progress bar."""
    seconds = ", ".join(f"{name} {format_seconds(row[f'{name}_s'])}" for name in ("forward", "backward", "step"))
    return f"loss {row['loss']:.3f}, {row['tokens_per_s']:,.0f} tokens/s, {seconds}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two runs computed the same, bit for bit.

    Attributes:
        identical: Whether nothing at all differs.
        numel: Weights compared.
        different_numel: Weights whose bits differ.
        first_different: The first parameter that has any, by name.
        losses_identical: Whether each step's loss was the same, NaN being the same as NaN.
        finite: Whether all of our losses were finite; equality means little if not.
    """

    identical: bool
    numel: int
    different_numel: int
    first_different: str | None
    losses_identical: bool
    finite: bool

    @classmethod
    def of(
        cls,
        ours: Mapping[str, torch.Tensor],
        theirs: Mapping[str, torch.Tensor],
        our_losses: Sequence[float],
        their_losses: Sequence[float],
    ) -> Comparison:
        """Compare weights, by name, and losses of two runs; weights of a name have the same dtype and shape."""
        import numpy as np
        import torch

        different = {}
        for name, weight in ours.items():
            bits = torch.int16 if weight.element_size() == 2 else torch.int32
            # Bits are compared as integers: as numbers, NaN would differ from itself and -0.0 would equal 0.0.
            different[name] = int((weight.view(bits) != theirs[name].view(bits)).sum())
        losses_identical = np.array_equal(our_losses, their_losses, equal_nan=True)
        return cls(
            identical=losses_identical and not any(different.values()),
            numel=sum(weight.numel() for weight in ours.values()),
            different_numel=sum(different.values()),
            first_different=next((name for name, numel in different.items() if numel), None),
            losses_identical=losses_identical,
            finite=all(map(math.isfinite, our_losses)),
        )

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
