"""One step of a session: the account of its work, and how far it is, for a step whose caller does not wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from offload import waits
from offload.schedule.timeline import Interval


@dataclass(slots=True)
class StepAccount:
    """What lanes have done for one step: from when its account was opened until the next one's is.

    Attributes:
        timeline: What the lanes did, in the order in which it ended; it grows until the next step is opened.
        until_s: When a request that is no step came after this step, on the monotonic clock; `inf` if none has. What
            lanes do for that request is in `timeline`, but not in `work`.
        started_s: When the step was asked for (`time.monotonic`).
        step_s: Seconds from then on until it was over.
        earlier_steps: Number and seconds of the last hundred steps before it, in this session.
    """

    timeline: list[Interval] = field(default_factory=list)
    until_s: float = math.inf
    started_s: float = 0.0
    step_s: float = 0.0
    earlier_steps: tuple[tuple[int, float], ...] = ()

    @property
    def work(self) -> list[Interval]:
        """The intervals of the timeline that were due before `until_s`: the step's own, and its flushes.

        Flushes may end later. An interval of which it is not noted when it was due counts from its start.
        """
        return [i for i in self.timeline if (i.started_s if i.due_s is None else i.due_s) < self.until_s]

    @property
    def whole_s(self) -> float:
        """Seconds from the request until all of the step was done, on the GPU, too.

        `step_s` ends when the last work is queued on the GPU, which then goes on.
        """
        gpu_ends_s = [i.finished_s - self.started_s for i in self.work if i.lane in ("gpu", "h2d")]
        return max([self.step_s, *gpu_ends_s])


class PendingStep:
    """A step whose caller does not wait for its end: whoever needs a weight waits for the visits of its subgroups.

    The engine thread reports which visits have ended. A wait may be interrupted: the step goes on.

    Args:
        kept_tensors: Memory that the step reads and writes: kept until it is over.
        latch: Makes a latch; in simulation one whose wait drives the engine.

    Attributes:
        error: What the step failed with, once it is over.
    """

    def __init__(self, kept_tensors: Sequence[torch.Tensor], latch: Callable[[], waits.Latch] = waits.Latch) -> None:
        self.kept_tensors = kept_tensors
        self.error: BaseException | None = None
        self._latch = latch
        self._visit_ends: Mapping[int, waits.Latch] = MappingProxyType({})  # by subgroup
        self._over = latch()

    @property
    def is_over(self) -> bool:
        """Whether the step has ended, well or not: nothing reads gradients or writes weights any more."""
        return self._over.is_set()

    # On the engine thread

    def begin(self, subgroups: Iterable[int]) -> None:
        """Note the subgroups whose visits callers may have to wait for; the step's caller goes on after that."""
        self._visit_ends = {subgroup: self._latch() for subgroup in subgroups}

    def note_visited(self, subgroups: Iterable[int]) -> None:
        """Wake callers that wait for the visits of some subgroups, as these have ended."""
        for subgroup in subgroups:
            self._visit_ends[subgroup].set()

    def end(self, error: BaseException | None) -> None:
        """Wake everybody: the step is over."""
        self.error = error
        self._over.set()
        for latch in self._visit_ends.values():
            if not latch.is_set():  # a latch is set only once
                latch.set()

    # On any thread

    def wait_for(self, subgroups: Iterable[int]) -> None:
        """Wait until the visits of some subgroups have ended, or the step has failed."""
        for subgroup in subgroups:
            latch = self._visit_ends.get(subgroup)
            if latch is not None and not latch.is_set():
                waits.wait_for(latch.wait, lambda: "")  # the executor logs what is waited for

    def wait(self) -> None:
        """Wait until the step is over."""
        if not self.is_over:
            waits.wait_for(self._over.wait, lambda: "")
