"""Waiting for updates during backward, which tests would otherwise meet by chance."""

from __future__ import annotations

import time

import offload
from offload.protocols import WAKE

LONG_S = 120.0


def settle(engine: offload.Engine) -> int:
    """Wait until all speculative versions have been made: else it is a matter of luck how much of it there is.

    Returns:
        How many there are.
    """
    engine._thread.wait_pending()  # only a step that is over says what is opened for the next one
    machine, speculation = engine._parts.machine, engine._thread.speculation
    until_s = time.monotonic() + LONG_S
    while speculation._is_armed:
        has_counted = not speculation.arrivals
        missing = dict(speculation._missing_gradients)
        final = [n for n, count in missing.items() if count <= 0 and n in machine.staging.priorities]
        if engine.is_parked and has_counted and not machine.in_flight:
            break  # and stays so until somebody needs its memory
        if machine.broken is not None or (machine.is_paused and machine.is_open and not machine.in_flight):
            break  # no more is made
        versions = machine.speculative_versions
        if has_counted and machine.is_open and not machine.in_flight and all(number in versions for number in final):
            break
        assert time.monotonic() < until_s, "a speculative version is not made"
        engine._parts.queue.post(WAKE)  # gradients of which no subgroup is made are counted with others
        time.sleep(0.001)
    return len(machine.speculative_versions)
