"""What random programs of buffers have in common: `fills` of gradients, `saved` of activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from world import Disorder, Fault

from offload.plan import Plan, Rates


@dataclass
class Program:
    """One program.

    Attributes:
        plan: The session's.
        rates: Of its lanes.
        disorder: In which order lanes end.
        faults: What fails.
        actions: What the caller does, as each kind of program has it.
    """

    plan: Plan
    rates: Rates
    disorder: Disorder
    faults: tuple[Fault, ...]
    actions: list[Any]


def run_seeds(
    make: Callable[[int], Program], run: Callable[[Program], Counter[str]], seeds: range
) -> tuple[Counter[str], list[Program]]:
    """Run the programs of some seeds; return what was counted, and the programs."""
    found, programs = Counter[str](), list[Program]()
    for seed in seeds:
        program = make(seed)
        programs.append(program)
        try:
            found += run(program)
        except Exception as error:
            error.add_note(f"seed {seed}: {program.disorder}, faults {program.faults}")
            raise
    return found, programs
