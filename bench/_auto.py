"""`overlap="auto"` in benchmarks: when it has chosen, and what it does where the seconds of iterations are known."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

import torch

from offload.optim.hiding import MODES, TRIAL, AutoOverlap, trial_steps

NEAR = 1.03
"""What an iteration with "auto" may take, over the least of all modes."""


def settled(iteration_s: float) -> int:
    """Return the iterations after which every mode has been tried and one is kept, for as many again at least."""
    return max(2 * TRIAL, trial_steps(iteration_s)) + (len(MODES) - 1) * trial_steps(iteration_s)


def chosen(seconds: Mapping[str, float]) -> str:
    """Return the mode that "auto" keeps where iterations take so many seconds in each."""
    auto, engine = AutoOverlap(), mock.Mock(speculates=False)
    for _ in range(settled(min(seconds.values()))):
        auto.pace.iteration_s = seconds[auto.mode]
        auto.after_step(engine, [], torch.device("cpu"), forward=True, backward=True)
    return auto.mode


def with_auto(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of an iteration in each mode, those with "auto", and what is asked of them.

    Returns:
        Also `auto_over_best`, and `both_over_single`: how many times as fast the better of forward and backward is
        made by both.
    """
    best_s, single_s = min(seconds.values()), min(seconds["forward"], seconds["backward"])
    found = {**seconds, "auto": seconds[chosen(seconds)]}
    return {**found, "auto_over_best": found["auto"] / best_s, "both_over_single": single_s / seconds["both"]}
