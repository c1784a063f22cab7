"""Chooses where steps are hidden, and tells an engine what updates in backward need to know.

`AutoOverlap` serves `overlap="auto"`: it tries each mode for some steps, and keeps the one with the fastest
iterations. `Announcer` says of arriving gradients to which pass they belong, and what the step would use.

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
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from offload.config import OVERLAPS
from offload.errors import ConfigError
from offload.optim.pace import Pace
from offload.optim.shards import fsdp_groups
from offload.session.engine import Engine
from offload.session.gradients import Gradients
from offload.units import format_seconds

log = logging.getLogger("offload")


class Mode(NamedTuple):
    """Where steps are hidden.

    Attributes:
        in_forward: Whether a step goes on into the next forward pass.
        in_backward: Whether updates are made during backward, before `step` is called.
    """

    in_forward: bool
    in_backward: bool


MODES = {
    "forward": Mode(in_forward=True, in_backward=False),
    "both": Mode(in_forward=True, in_backward=True),
    "off": Mode(in_forward=False, in_backward=False),
    "backward": Mode(in_forward=False, in_backward=True),
}
"""The modes by name, in the order in which they are tried."""

TRIAL, MOST_TRIAL, TRIAL_S = 4, 16, 4.0
"""How long a mode is tried: for as many steps as take `TRIAL_S` seconds, but at least `TRIAL` and at most
`MOST_TRIAL`. The first mode is tried for at least `2 * TRIAL` steps, as memory and rates settle. A mode's first
iteration does not count, as it still waits for a step of the mode before."""

LEAST_GAIN = 0.01
"""A mode is chosen over those before it in `OVERLAPS` if it is faster by more than this share of an iteration."""

DRIFT = 0.2
"""Share by which the present mode's iterations have to change for all modes to be tried again."""

LATEST = 64
"""Most iterations of the present mode whose seconds are remembered."""

UNREADABLE = (ArithmeticError, ConfigError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of hyperparameters that cannot be read now. Not all exceptions: a signal handler may raise others."""


def hide_steps(optimizer: Any, called: Iterable[torch.nn.Module], reducing: Iterable[torch.nn.Module]) -> None:
    """Call an optimizer's `overlap_forward` and `overlap_backward` for a framework's models, as its `overlap` needs.

    Args:
        optimizer: One of this package; with "auto" models that it refuses are left out.
        called: Modules as the loop calls them, for `overlap_forward`; those without parameters of the optimizer are
            left out.
        reducing: Modules that reduce gradients, for `overlap_backward`. Left out are those that are not DDP's or
            FSDP2's, and those that it refuses, as they have a communication hook, say.

    Raises:
        ConfigError: With "forward" and "both": `overlap_forward` refuses a module.
    """
    config = optimizer.config
    is_auto = config.overlap == "auto"
    if is_auto or config.overlaps_forward:
        updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        refusals = (ConfigError,) if is_auto else ()  # "auto" does without a model that is refused
        for model in called:
            if not updated.isdisjoint(model.parameters()):
                with contextlib.suppress(*refusals):
                    optimizer.overlap_forward(model)
    if is_auto or config.overlaps_backward:
        for model in reducing:
            if isinstance(model, DistributedDataParallel) or fsdp_groups(model):
                with contextlib.suppress(ConfigError):
                    optimizer.overlap_backward(model)


def trial_steps(iteration_s: float) -> int:
    """Return for how many steps a mode is tried whose iterations take `iteration_s`."""
    return max(TRIAL, min(MOST_TRIAL, math.ceil(TRIAL_S / max(iteration_s, 1e-9))))


class AutoOverlap:
    """Chooses the mode of one optimizer: tries all modes that are possible, some steps each, and keeps the fastest.

    It looks again when the count of steps has doubled, doubled once more, and so on. If iterations have changed much
    by then (`DRIFT`), all modes are tried again.

    Args:
        pace: How long iterations take.

    Attributes:
        mode: The mode chosen, by its name in `MODES`; the first one before any choice. Steps are hidden so as far as
            that is possible.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = Pace() if pace is None else pace
        self.mode = next(iter(MODES))
        self._step_count = 0
        self._next_choice = 2 * TRIAL  # the count of steps at which a mode is chosen next
        self._latest_s: deque[float] = deque(maxlen=LATEST)  # of the present mode's iterations
        self._tried_s: dict[str, float] = {}  # of an iteration, by name of the mode that has been tried
        self._possible: list[str] = []  # modes that were possible in the last step

    @property
    def goes_on(self) -> bool:
        """Whether steps go on into the next forward pass, where that is possible."""
        return MODES[self.mode].in_forward

    def hidden_in(self, engine: Engine, *, forward: bool) -> tuple[str, ...]:
        """Return where an engine's steps are hidden now: "forward", "backward", both, or nothing.

        `forward` is whether steps can go on into the next forward pass.
        """
        places = {"forward": forward and self.goes_on, "backward": engine.speculates}
        return tuple(place for place, is_hidden_here in places.items() if is_hidden_here)

    def after_step(
        self, engine: Engine, groups: Sequence[Any], device: torch.device, *, forward: bool, backward: bool
    ) -> None:
        """Count a step, and choose a mode if it is time for that. A choice is a collective: the first rank's counts.

        The engine is told whether to update in backward. Whether steps go on into forward, others ask by `goes_on`.

        Args:
            engine: Makes the updates; a pending step goes on.
            groups: Process groups over which the choice is broadcast one after another, each from its first rank, so
                that the first rank's choice reaches all ranks. Empty if there is one rank.
            device: Where weights lie, which the groups' backends can broadcast from.
            forward: Whether steps can go on into the next forward pass; the same on all ranks.
            backward: Whether updates can be made during backward; the same on all ranks.
        """
        self._step_count += 1  # not `engine.step_number`, which would wait for the pending step
        if not math.isnan(self.pace.iteration_s):  # NaN after the first step
            self._latest_s.append(self.pace.iteration_s)
        possible = [
            name
            for name, mode in MODES.items()
            if (forward or not mode.in_forward) and (backward or not mode.in_backward)
        ]
        if self._possible and possible != self._possible:  # iterations so far may have had another mode: measure anew
            self._next_choice = max(self._next_choice, self._step_count + TRIAL)
            self._latest_s.clear()
        self._possible = possible
        if self._step_count < self._next_choice or len(possible) < 2:
            return
        # The mode in effect, with which iterations were measured: the last choice without what is impossible.
        chosen = MODES[self.mode]
        in_effect = Mode(chosen.in_forward and forward, chosen.in_backward and backward)
        name_in_effect = next(name for name in possible if MODES[name] == in_effect)
        mode_index, self._next_choice = self._agree_on_choice(possible, name_in_effect, groups, device)
        self.mode = [*MODES][mode_index]
        if self.mode != name_in_effect:
            self._latest_s.clear()
        engine.speculate(MODES[self.mode].in_backward)

    def _agree_on_choice(
        self, possible: Sequence[str], now: str, groups: Sequence[Any], device: torch.device
    ) -> tuple[int, int]:
        """Return what `_choose` returns on the first rank, to all ranks; a collective over each of `groups`."""
        is_first_rank = all(torch.distributed.get_rank(group) == 0 for group in groups)
        answer = self._choose(possible, now) if is_first_rank else (0, 0)  # overwritten by the broadcast
        sent = torch.tensor(answer, dtype=torch.int64, device=device)
        for group in groups:
            torch.distributed.broadcast(sent, group=group, group_src=0)
        mode_index, next_choice = sent.tolist()
        return mode_index, next_choice

    def _choose(self, possible: Sequence[str], now: str) -> tuple[int, int]:
        """Return the index in `MODES` of the mode to use from now on, and the count of steps to choose again at.

        The mode in effect stays until it has been tried long enough. Then another one is tried that has not been yet.
        If all possible ones have been, the fastest is used. This also notes in `_tried_s` how long iterations took;
        it is called on the first rank alone.

        Args:
            possible: Names of the modes that are possible.
            now: Name of the mode in effect: the one chosen last, without what is impossible.
        """
        names = list(MODES)
        iteration_s = statistics.median([*self._latest_s][1:])  # the first still waited for a step of the mode before
        if abs(iteration_s - self._tried_s.get(now, iteration_s)) > DRIFT * iteration_s:
            self._tried_s.clear()  # times of before do not compare any more: all modes are tried again
        was_best_before = now == self.mode and now in self._tried_s  # chosen as the fastest, and not slower since
        missing_steps = trial_steps(iteration_s) - len(self._latest_s)
        if now not in self._tried_s and missing_steps > 0:
            return names.index(now), self._step_count + missing_steps
        self._tried_s.setdefault(now, iteration_s)
        for name in possible:
            if name not in self._tried_s:
                return names.index(name), self._step_count + TRIAL
        if not was_best_before:
            now = self._fastest(possible)
        return names.index(now), 2 * self._step_count  # so it looks again ever more rarely

    def _fastest(self, possible: Sequence[str]) -> str:
        """Return the fastest of modes that have been tried, and log it.

        Of modes that are about as fast (within `LEAST_GAIN`), the first in `OVERLAPS`.
        """
        tried_s = {name: self._tried_s[name] for name in OVERLAPS if name in possible}
        least_s = min(tried_s.values())
        fastest = next(name for name, took_s in tried_s.items() if took_s * (1 - LEAST_GAIN) <= least_s)
        times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in tried_s.items())
        log.info('overlap="auto": "%s" from now on, by what an iteration has taken: %s', fastest, times)
        return fastest


class BoundWeights(Protocol):
    """Knows where weights are bound: `Weights`, or DeepSpeed's shard."""

    def read_by_updates(self) -> Sequence[torch.Tensor] | None:
        """Return tensors outside the engine's memory that updates in backward read: fp32 weights, some gradients.

        None: a weight does not lie where it is bound, so it is not known what the step will read.
        """


class Announcer:
    """Tells an engine what updates in backward need to know.

    It says of each arriving gradient whether its pass is the last before a step. As a pass begins, it says what the
    step would use if it were called then.

    Args:
        optimizer: The optimizer, which is not kept alive.
        values: Returns the hyperparameters of the optimizer's groups now, as `Engine.step` takes them.
        weights: The optimizer's weights.
        pace: Notes when the first gradient arrives.

    Attributes:
        is_last_pass: Returns whether the backward pass under way is the last before a step; None: not known.
    """

    def __init__(
        self, optimizer: Any, values: Callable[[Any], Sequence[Any]], weights: BoundWeights, pace: Pace
    ) -> None:
        self.is_last_pass: Callable[[], bool] | None = None
        self._optimizer = weakref.ref(optimizer)
        self._values = values
        self._weights = weights
        self._pace = pace

    def arrives(
        self, gradients: Gradients, position: int, *, is_last: bool | None = None, scale: float | None = None
    ) -> None:
        """Say that a gradient is about to arrive; call this before it is given to the engine.

        Args:
            gradients: The engine's.
            position: The parameter's position.
            is_last: Whether its pass is the last before the step; by default `is_last_pass` says so.
            scale: The loss scale, if it is known; else the last step's is expected.
        """
        self._pace.note_arrival()
        # Also tells the engine of the arrival, and of which pass it is.
        if not gradients.begins_pass(position, self.is_last_pass if is_last is None else is_last):
            return
        optimizer = self._optimizer()
        read_tensors = self._weights.read_by_updates()
        if optimizer is None or read_tensors is None:  # without `foresee` this pass updates nothing
            return
        try:
            groups = self._values(optimizer)
        except UNREADABLE:  # if hyperparameters are still wrong in the step, the step raises this
            return
        gradients.foresee(groups, read_tensors, scale)
