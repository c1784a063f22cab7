"""Waiting for updates during backward, which tests would otherwise meet by chance."""

from __future__ import annotations

import time

import offload


def settle(engine: offload.Engine) -> None:
    """Wait until what can be made ahead has been made: else it is a matter of luck how much of it there is."""
    engine._thread.wait_behind()  # only a step that is over says what can be made ahead of the next one
    machine, ahead = engine._parts.machine, engine._thread.ahead
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and ahead._wanted:
        able = [number for number in ahead._left if number in machine._places]  # what there is room for
        final = [number for number in able if ahead._left[number] <= 0]
        if machine.is_ahead and not ahead._final and all(machine._beside.get(number) for number in final):
            return
        time.sleep(0.001)
