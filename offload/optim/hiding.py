"""How steps are hidden: where, with "auto" by what iterations have taken; what updates in backward are told.

Public for integrations, and for those who drive an `offload.Engine` themselves, as the DeepSpeed integration does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from offload.config import OVERLAPS
from offload.errors import ConfigError
from offload.optim.pace import Pace
from offload.optim.shards import unsharders
from offload.session.engine import Engine
from offload.session.gradients import Gradients
from offload.units import format_seconds

log = logging.getLogger("offload")

MODES = {"forward": (True, False), "both": (True, True), "off": (False, False), "backward": (False, True)}
"""Whether a step goes on in forward, and whether updates are made during backward; in the order in which modes are
tried."""

TRIAL, MOST_TRIAL, TRIAL_S = 4, 16, 4.0
"""Steps for which a mode is tried, and at most where they are too short to be as many seconds; at least twice as many
for the first, as memory and rates settle. The first iteration does not count: the mode before reaches into it."""

LEAST_GAIN = 0.01
"""Share of an iteration that a mode has to save beside one that stands before it in `OVERLAPS`."""

DRIFT = 0.2
"""Share by which the iterations of a mode have to change for all to be tried again."""

LATEST = 64
"""Iterations that are remembered."""

UNREADABLE = (ArithmeticError, ConfigError, LookupError, RuntimeError, TypeError, ValueError)
"""What hyperparameters raise that cannot be read now. Not all exceptions: a signal handler may raise others."""


def hide_steps(optimizer: Any, called: Iterable[torch.nn.Module], reducing: Iterable[torch.nn.Module]) -> None:
    """Give an optimizer the models by which steps are hidden where its `overlap` says.

    Args:
        optimizer: One of this package; with "auto" it is not given models that it refuses.
        called: Modules as they are called, into whose next forward pass steps may go on; those without parameters of
            the optimizer are left out.
        reducing: Modules of which those that are DDP's or FSDP2's say which gradients they have reduced, for updates
            in backward; one that has a communication hook, say, is left out.

    Raises:
        ConfigError: A module that is called cannot be given, with "forward" and "both".
    """
    config, is_auto = optimizer.config, optimizer.config.overlap == "auto"
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    left_out = (ConfigError,) if is_auto else ()
    for model in called if is_auto or config.overlaps_forward else ():
        if not updated.isdisjoint(model.parameters()):
            with contextlib.suppress(*left_out):
                optimizer.overlap_forward(model)
    for model in reducing if is_auto or config.overlaps_backward else ():
        if isinstance(model, DistributedDataParallel) or unsharders(model):
            with contextlib.suppress(ConfigError):
                optimizer.overlap_backward(model)


def trial_steps(iteration_s: float) -> int:
    """Return for how many steps a mode is tried in which an iteration takes so many seconds."""
    return max(TRIAL, min(MOST_TRIAL, math.ceil(TRIAL_S / max(iteration_s, 1e-9))))


class AutoOverlap:
    """Chooses for one optimizer: tries all modes that are possible, some steps each, and keeps the fastest.

    Looks again after twice as many steps, four times as many, and so on. If iterations have changed much by then, all
    are tried again.

    Args:
        pace: How long iterations take.

    Attributes:
        mode: Where steps are hidden as far as that is possible: one of `MODES`, the first before any has been chosen.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = Pace() if pace is None else pace
        self.mode = next(iter(MODES))
        self._seen, self._next = 0, 2 * TRIAL  # steps, and those after which it is chosen
        self._latest_s: deque[float] = deque(maxlen=LATEST)
        self._tried_s: dict[str, float] = {}
        self._possible: list[str] = []

    @property
    def goes_on(self) -> bool:
        """Whether steps go on into the next forward pass, where that is possible."""
        return MODES[self.mode][0]

    def hidden_in(self, engine: Engine, *, forward: bool) -> tuple[str, ...]:
        """Return where steps of an engine are hidden now: in "forward", where they can go on there, in "backward"."""
        return ("forward",) * (forward and self.goes_on) + ("backward",) * engine.speculates

    def after_step(
        self,
        engine: Engine,
        groups: Sequence[Any],
        device: torch.device,
        *,
        forward: bool,
        backward: bool,
    ) -> None:
        """Choose a mode, if this is a step after which that is done.

        Then it is a collective: the first rank chooses, and all ranks do what it says.

        Args:
            engine: Makes the updates. A pending step goes on in it.
            groups: Process groups by which the first rank's choice comes to all: from the first rank of each of the
                first group to that group, and so on. Empty where there is one rank.
            device: Where weights are: that of the groups' backends.
            forward: Whether steps can go on into the next forward pass; the same on all ranks.
            backward: Whether updates can be made during backward; the same on all ranks.
        """
        self._seen += 1  # the engine's own number would wait for the step
        if not math.isnan(took_s := self.pace.iteration_s):
            self._latest_s.append(took_s)
        possible = [name for name, hides in MODES.items() if hides[0] <= forward and hides[1] <= backward]
        if self._possible not in ([], possible):  # iterations so far were others
            self._next = max(self._next, self._seen + TRIAL)
            self._latest_s.clear()
        self._possible = possible
        if self._seen < self._next or len(possible) < 2:
            return
        now_in_forward, now_in_backward = MODES[self.mode]
        hides = now_in_forward and forward, now_in_backward and backward
        now = next(name for name in possible if MODES[name] == hides)
        is_first = all(torch.distributed.get_rank(group) == 0 for group in groups)
        told = torch.tensor(self._choose(possible, now) if is_first else (0, 0), dtype=torch.int64, device=device)
        for group in groups:
            torch.distributed.broadcast(told, group=group, group_src=0)
        number, self._next = told.tolist()
        before, self.mode = self.mode, [*MODES][number]
        if self.mode != before:
            self._latest_s.clear()
        engine.speculate(MODES[self.mode][1])

    def _choose(self, possible: Sequence[str], now: str) -> tuple[int, int]:
        """Return the number of the mode to use from now on, and the step after which it is chosen again."""
        names, took_s = list(MODES), statistics.median([*self._latest_s][1:])
        if abs(took_s - self._tried_s.get(now, took_s)) > DRIFT * took_s:
            self._tried_s.clear()
        is_looked_at_again = now == self.mode and now in self._tried_s
        if now not in self._tried_s and (more := trial_steps(took_s) - len(self._latest_s)) > 0:
            return names.index(now), self._seen + more
        self._tried_s.setdefault(now, took_s)
        for name in possible:
            if name not in self._tried_s:
                return names.index(name), self._seen + TRIAL
        if not is_looked_at_again:
            tried_s = {name: self._tried_s[name] for name in OVERLAPS if name in possible}
            now = next(name for name in tried_s if tried_s[name] * (1 - LEAST_GAIN) <= min(tried_s.values()))
            found = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in tried_s.items())
            log.info('overlap="auto": "%s" from now on, by what an iteration has taken: %s', now, found)
        return names.index(now), 2 * self._seen


class BoundWeights(Protocol):
    """Knows where weights are bound: `Weights`, or DeepSpeed's shard."""

    def read_by_updates(self) -> Sequence[torch.Tensor] | None:
        """Return what updates in backward read that is not the engine's: fp32 weights, and gradients in no slot.

        None: a weight is not where it is bound, so nobody can tell what the step will read.
        """


class Announcer:
    """Says of each gradient that arrives of which pass it is, and as a pass begins, what the step would do then.

    Args:
        optimizer: Has the groups whose hyperparameters count; it is not kept alive.
        values: Returns what `Engine.step` is told of an optimizer's groups now.
        weights: Its weights.
        pace: Is told that gradients arrive.

    Attributes:
        is_last_pass: Returns whether the backward pass under way is the last before a step; None where nobody knows.
    """

    def __init__(
        self,
        optimizer: Any,
        values: Callable[[Any], Sequence[Any]],
        weights: BoundWeights,
        pace: Pace,
    ) -> None:
        self.is_last_pass: Callable[[], bool] | None = None
        self._optimizer = weakref.ref(optimizer)
        self._values = values
        self._weights = weights
        self._pace = pace

    def arrives(
        self, gradients: Gradients, position: int, *, is_last: bool | None = None, scale: float | None = None
    ) -> None:
        """Say that a gradient is about to be given to an engine; call this first.

        Args:
            gradients: Those of the engine.
            position: Of the gradient's parameter.
            is_last: Whether its pass is the last before the step; by default `is_last_pass` says so.
            scale: Of the loss, where it is known; else the last step's is expected.
        """
        self._pace.arrived()
        if not gradients.begins_pass(position, self.is_last_pass if is_last is None else is_last):
            return
        optimizer, kept = self._optimizer(), self._weights.read_by_updates()
        if optimizer is None or kept is None:
            return
        try:
            groups = self._values(optimizer)
        except UNREADABLE:  # the caller may mend them before the step, which raises it else
            return
        gradients.foresee(groups, kept, scale)
