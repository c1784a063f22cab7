"""How long updates of whole parameters take: no kernel makes them, so what kernels reach says nothing of them.

A small twin of each parameter is updated, and its time taken times the operations of the parameter over the twin's.
The first steps then show more (`offload.measure.observe`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from offload.kernels.reference import TORCH_DTYPES
from offload.kernels.whole import trial
from offload.layout import Layout, Parameter
from offload.plan import Rates
from offload.rules import UpdateRule

MOST_SIDE, MOST_NUMEL = 512, 1 << 18
"""Of a twin's dimensions, where it is a matrix; of all its elements."""

ROUNDS = 3
"""The best counts; the first one touches memory."""


def with_whole_parameters(rates: Rates, layout: Layout) -> Rates:
    """Return rates whose CPU needs for the state of a layout what kernels and updates of whole parameters do."""
    subgroups = layout.subgroups
    whole = [subgroup for subgroup in subgroups if subgroup.state.rule.is_whole]
    if not whole:
        return rates
    cut_bytes = sum(subgroup.state_bytes for subgroup in subgroups if not subgroup.state.rule.is_whole)
    seconds, known = cut_bytes / rates.cpu_bytes_per_s, dict[tuple[object, ...], float]()
    for subgroup in whole:
        for segment in subgroup.segments:
            parameter = layout.parameters[segment.parameter]
            key = subgroup.state.rule, parameter.shape, parameter.dtype
            if key not in known:
                known[key] = _seconds(subgroup.state.rule, parameter)
            seconds += known[key]
    return replace(rates, cpu_bytes_per_s=layout.state_bytes / seconds)


def _seconds(rule: UpdateRule, parameter: Parameter) -> float:
    """Return the seconds of a parameter's update."""
    shape = parameter.shape or (parameter.numel,)
    twin = _smaller(shape)
    update = trial(rule, twin, TORCH_DTYPES[parameter.dtype], parameter.group)
    return _best_s(update) * rule.work(shape) / rule.work(twin)


def _smaller(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 2:
        return tuple(min(size, MOST_SIDE) for size in shape)
    rest = math.prod(shape[1:])
    return (max(1, min(shape[0], MOST_NUMEL // max(rest, 1))), *shape[1:]) if shape else shape


def _best_s(update: Callable[[], None]) -> float:
    taken = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        update()
        taken.append(time.perf_counter() - began_s)
    return min(taken)
