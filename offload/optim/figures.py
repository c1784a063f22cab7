"""`StepFigures`: metrics, predictions, timelines and reports of steps, for torch's optimizers and DeepSpeed's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from offload import metrics
from offload.errors import ConfigError
from offload.measure.products import tell_once
from offload.optim.hiding import AutoOverlap
from offload.predict import Explanation, Forecast, PlanReport, compare
from offload.schedule.timeline import ENGINE, Interval, covered_s, trace
from offload.session.engine import Engine

HEADLINES = (
    *(metrics.STEP_S, metrics.PREDICTED_STEP_S, metrics.HIDDEN_S, metrics.RESIDENT_SHARE),
    metrics.GRADIENT_NORM,
)
"""The metrics that `log_to` writes by default."""


class StepFigures:
    """A mixin of optimizers, which call `_begin_figures` when made, and `_report_step` when a step is over."""

    _auto: AutoOverlap
    _is_reported = True  # whether the last step's time and metrics have been given to forecast and writers

    def _begin_figures(self) -> None:
        """Begin without a prediction, and without writers."""
        self._forecast = Forecast()
        self._writers: list[tuple[int, Callable[[Mapping[str, float], int], None]]] = []

    @property
    def _engine(self) -> Engine:
        """The engine under this optimizer."""
        raise NotImplementedError

    @property
    def _gradient_norm(self) -> float:
        """The norm of the last step's gradients; NaN if it is not known."""
        raise NotImplementedError

    @property
    def _hidden_in(self) -> tuple[str, ...]:
        """Where steps are hidden now: "forward" (they go on into it), "backward", both, or nothing."""
        raise NotImplementedError

    def _parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters of all groups."""
        raise NotImplementedError

    def _frozen_bytes(self) -> int:
        """Return the bytes of state of frozen parameters, as far as they are known."""
        return 0

    @property
    def plan(self) -> PlanReport:
        """A report: what lives where, how long a step should take, what bounds it, how long the last one took."""
        explanation = self._explanation()
        iteration = None
        pace_s = self._auto.pace.typical_s
        if pace_s is not None and self._hidden_in:
            forward_s, backward_s = pace_s
            iteration = (forward_s, backward_s, self._iteration_s(forward_s, backward_s))
        figures = self._engine.metrics()
        parked = None
        # The engine may be parked without figures of that: for a moment, or if an error ended its first park.
        if self._engine.is_parked and metrics.GIVEN_BACK_BYTES in figures:
            parked = int(figures[metrics.GIVEN_BACK_BYTES]), figures[metrics.PREDICTED_BACK_S]
        plan = self._engine.plan
        return PlanReport(
            plan,
            explanation,
            unpinned_bytes=int(figures.get(metrics.UNPINNED_BYTES, 0)),
            iteration=iteration,
            hidden_in=" and ".join(self._hidden_in),
            parked=parked,
            borrowing=self._forecast.borrowing_s(plan, self._engine.rates),
            borrowed_bytes=int(figures.get(metrics.BORROWED_BYTES, 0)),
            frozen_bytes=self._frozen_bytes(),
        )

    def _iteration_s(self, forward_s: float, backward_s: float) -> float:
        """Return the predicted seconds of an iteration, with the step hidden where `_hidden_in` says.

        `forward_s` and `backward_s` are the seconds that forward and backward take by themselves.
        """
        plan, rates = self._engine.plan, self._engine.rates
        hidden_in = self._hidden_in
        if "backward" in hidden_in:
            goes_on_in_forward = "forward" in hidden_in
            return self._forecast.with_backward_s(plan, rates, forward_s, backward_s, follows=goes_on_in_forward)
        forward_and_step_s = self._forecast.with_forward_s(plan, rates, forward_s)
        return backward_s + forward_and_step_s

    def explain(self) -> Explanation:
        """Return predicted and measured seconds of the last step, lane by lane, which `print` shows.

        Warns, once a process, if weights on the CPU have a dtype with which forward and backward are slow there.
        """
        tell_once(weight.dtype for weight in self._parameters() if weight.device.type == "cpu")
        return self._explanation()

    def _explanation(self) -> Explanation:
        """Simulate a step; return predicted seconds beside the measured ones of the last step."""
        return compare(self._forecast.simulated(self._engine.plan, self._engine.rates), self._engine.metrics())

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step by name: those of `Engine.metrics`, and predictions.

        docs/metrics.md explains each name. Predictions are those made before the step.
        """
        prediction = self._forecast.carried_on(self._engine.plan, self._engine.rates)
        figures = self._engine.metrics()
        figures |= {metrics.of(metrics.LANE_PREDICTED_S, lane): busy_s for lane, busy_s in prediction.busy_s.items()}
        figures[metrics.PREDICTED_STEP_S] = prediction.step_s
        if self._engine.plan.gradient_buffers:
            figures[metrics.PREDICTED_GRADIENTS_S] = prediction.gradients_s
        figures |= {metrics.GRADIENT_NORM: self._gradient_norm, metrics.HIDDEN_S: 0.0}
        if self._auto.pace.typical_s is not None and self._hidden_in:
            figures |= self._hidden_figures(figures[metrics.STEP_S], *self._auto.pace.typical_s)
        return figures

    def _hidden_figures(self, step_s: float, forward_s: float, backward_s: float) -> dict[str, float]:
        """Return the metrics that only a hidden step has.

        Its hidden seconds are those in which lanes worked for it, less those in which the caller waited.

        Args:
            step_s: Seconds of the last step.
            forward_s: Typical seconds of forward.
            backward_s: Typical seconds of backward.
        """
        waited_s = self._auto.pace.waited_s
        # Without the engine thread, which is shown like a lane and is none.
        busy = (interval for interval in self._engine.last_step.work if interval.lane != ENGINE)
        # `step_s` lacks the updates that were made in backward; the timeline has them.
        worked_s = max(step_s, covered_s(busy))
        return {
            metrics.FORWARD_S: forward_s,
            metrics.BACKWARD_S: backward_s,
            metrics.WAITED_S: waited_s,
            metrics.HIDDEN_S: max(worked_s - waited_s, 0.0),
            metrics.PREDICTED_ITERATION_S: self._iteration_s(forward_s, backward_s),
        }

    def timeline(self) -> list[Interval]:
        """Return what every lane did in the last step and since: (lane, label, started_s, finished_s, nbytes).

        If the step is hidden in forward or backward, lane "caller" has forward, backward and waits.
        """
        pace = self._auto.pace
        intervals = self._engine.timeline()
        if "backward" in self._hidden_in:
            intervals += pace.last_intervals  # the step began in the backward pass before it
        if self._hidden_in:
            intervals += pace.intervals
        return intervals

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what every lane did in the last step and since, for Perfetto (ui.perfetto.dev) or chrome://tracing.

        Args:
            path: The file; an existing one is replaced.
        """
        paths = [place.path for place in self._engine.config.path_configs]
        document = trace(self.timeline(), paths, step=self._engine.step_number)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a report as one HTML file that needs no other file.

        It shows the plan, what each lane did in the last step, that step beside its prediction, the last hundred
        steps, memory beside the plan, checkpoints, and what would make a step shorter. Pictures need matplotlib;
        without it there are tables alone.

        Args:
            path: The file; an existing one is replaced. A folder, or a name without a suffix, of which one is made:
                `report.html` in it, beside what `offload report` and `offload trace` read.
        """
        from offload.optim.reporting import report_of
        from offload.pictures.report import page, write_run

        paths = [place.path for place in self._engine.config.path_configs]
        timeline, step = self.timeline(), self._engine.step_number
        report = report_of(self._engine, self.metrics(), self.plan)
        if os.path.isdir(path) or not os.path.splitext(path)[1]:
            os.makedirs(path, exist_ok=True)
            write_run(path, report, timeline, paths, step=step)
            return
        text = page(report, timeline, paths, step=step)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def log_to(
        self, writer: Any, *, every: int = 1, prefix: str = "offload/", names: str | Iterable[str] = HEADLINES
    ) -> None:
        """Log `metrics` after each step from now on; an error of the writer is raised by `step`, after the update.

        Args:
            writer: TensorBoard's `SummaryWriter` (anything with `add_scalar(name, value, step)`), a W&B run (anything
                with `log(values, step=step)`), or a function of values and step.
            every: Steps between two entries.
            prefix: Before each name.
            names: Which of `metrics`: names, or patterns of `fnmatch` such as "path/*"; "*" for all. Those that a
                step does not have are left out. By default five: the step's time, its predicted time, how much of it
                was hidden, the share of the state that is resident, and the norm of the gradients.

        Raises:
            ConfigError: `writer` is none of these, `every` is no count of steps, or `names` are no names.
        """
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError("every", every, "log every step, or less often")
        add_scalar, log = getattr(writer, "add_scalar", None), getattr(writer, "log", None)
        if not any(map(callable, (add_scalar, log, writer))):
            raise ConfigError("writer", type(writer).__name__, "give a SummaryWriter, a W&B run, or a function")

        if isinstance(names, str):
            names = (names,)
        patterns = tuple(names) if isinstance(names, Iterable) else ()
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError("names", names, 'give names of metrics, or "*" for all')

        def write(figures: Mapping[str, float], step: int) -> None:
            """Give the metrics whose names match to the writer; called after each step that is due."""
            matching = (name for name in figures if any(fnmatchcase(name, pattern) for pattern in patterns))
            values = {f"{prefix}{name}": figures[name] for name in matching}
            if callable(add_scalar):
                for name, value in values.items():
                    add_scalar(name, value, step)
            elif callable(log):
                log(values, step=step)
            else:
                writer(values, step)

        self._writers.append((every, write))

    def _report_step(self) -> None:
        """Give the last step's time to the forecast, and its metrics to the writers that are due."""
        self._is_reported = True  # first: if a writer raises, the step is not reported a second time
        self._forecast.watch(self._engine.plan, self._engine.rates, self._engine.last_step.step_s)
        step = self._engine.step_number
        due_writers = [write for every, write in self._writers if step % every == 0]
        figures = self.metrics() if due_writers else {}
        for write in due_writers:
            write(figures, step)
