"""`overlap="auto"`: whether updates are made during backward, by predicted iterations.

Public for those who drive an `offload.Engine` themselves, as the DeepSpeed integration does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.optim.pace import Pace
from offload.predict import Forecast
from offload.session.engine import Engine

log = logging.getLogger("offload")

LEAST_GAIN = 0.02
"""Share of an iteration that updates in backward have to save: predictions are not more exact."""

FIRST_CHOICE = 4
"""The step after which the first choice is made; the next ones are after twice as many each."""


class AutoOverlap:
    """Chooses for one optimizer, after its fourth step, its eighth, its sixteenth, and so on.

    Args:
        pace: How long forward and backward take.

    Attributes:
        forecast: What a step, and an iteration, should take.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = Pace() if pace is None else pace
        self.forecast = Forecast()
        self._steps_seen = 0

    def after_step(
        self,
        engine: Engine,
        speculate: Callable[[], None],
        groups: Sequence[Any],
        device: torch.device,
        follows: bool,
    ) -> None:
        """Switch updates during backward on or off, if this is a step after which that is chosen.

        Then it is a collective: the first rank chooses, and all ranks do what it says.

        Args:
            engine: Makes the updates. A pending step goes on in it.
            speculate: Switches them on.
            groups: Process groups by which the first rank's choice comes to all: from the first rank of each of the
                first group to that group, and so on. Empty where there is one rank.
            device: Where weights are: that of the groups' backends.
            follows: Whether steps go on into the next forward pass.
        """
        self._steps_seen += 1  # the engine's own number would wait for the step
        number = self._steps_seen
        if number < FIRST_CHOICE or number.bit_count() > 1:
            return
        is_first = all(torch.distributed.get_rank(group) == 0 for group in groups)
        told = torch.tensor([is_first and self._wins(engine, follows)], dtype=torch.uint8, device=device)
        for group in groups:
            torch.distributed.broadcast(told, group=group, group_src=0)
        wins = bool(told.item())
        if wins and not engine.speculates:
            speculate()
        elif not wins:
            engine.speculate(None)

    def _wins(self, engine: Engine, follows: bool) -> bool:
        """Return whether hiding the step in backward should win; as it is now, where nobody can tell."""
        if self.pace.typical_s is None:
            return engine.speculates
        (forward_s, backward_s), plan, rates = self.pace.typical_s, engine.plan, engine.rates
        if follows:
            waited_s = backward_s + self.forecast.with_forward_s(plan, rates, forward_s, not plan.weights_on_gpu)
        else:
            waited_s = forward_s + backward_s + self.forecast.carried_on(plan, rates).step_s
        hidden_s = self.forecast.with_backward_s(plan, rates, forward_s, backward_s, follows)
        wins = hidden_s < (1 - LEAST_GAIN) * waited_s
        text = 'overlap="auto": the step %s hidden in backward: an iteration takes %.3g s so, and else %.3g s'
        log.info(text, "is" if wins else "is not", hidden_s, waited_s)
        return wins
