"""Waiting for updates during backward, which tests would otherwise meet by chance."""

from __future__ import annotations

import time

import offload

LONG_S = 120.0


def settle(engine: offload.Engine) -> None:
    """Wait until what can be made ahead has been made: else it is a matter of luck how much of it there is."""
    engine._thread.wait_pending()  # only a step that is over says what can be made ahead of the next one
    machine, speculation = engine._parts.machine, engine._thread.speculation
    until_s = time.monotonic() + LONG_S
    while speculation._is_armed:
        able = [
            number for number in [*speculation._missing_gradients] if number in machine.staging.priorities
        ]  # what there is room for
        final = [number for number in able if speculation._missing_gradients[number] <= 0]
        if machine.broken is not None or (machine._is_on_hold and machine.is_open and not machine.in_flight):
            return  # no more is made
        if (
            machine.is_open
            and not machine.in_flight
            and all(number in machine.speculative_versions for number in final)
        ):
            return
        assert time.monotonic() < until_s, "what can be made ahead is not made"
        time.sleep(0.001)
