"""Progress of a run: a bar on a terminal, a plain line every few seconds elsewhere, nothing when quiet.

Goes to stderr, so that stdout holds results only.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.cli.record import StepRecord

_SECONDS_PER_LINE = 5.0


class Progress:
    """Shows the steps of one run; closed by its owner.

    Args:
        steps: How many there will be.
        title: What is running.
        quiet: Show nothing.
    """

    def __init__(self, steps: int, *, title: str, quiet: bool) -> None:
        from tqdm import tqdm

        self._steps = steps
        self._title = title
        self._quiet = quiet
        self._next_line_s = time.monotonic()
        terminal = sys.stderr.isatty()
        self._bar = tqdm(total=steps, desc=title, unit="step", dynamic_ncols=True) if terminal and not quiet else None

    def show(self, record: StepRecord) -> None:
        """Show that a step is done."""
        if self._quiet:
            return
        details = (
            f"loss {record.loss:.3f}, {record.tokens_per_s:,.0f} tokens/s, forward {record.forward_s * 1e3:.0f} ms, "
            f"backward {record.backward_s * 1e3:.0f} ms, step {record.step_s * 1e3:.0f} ms"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(details, refresh=False)
            self._bar.update()
            return
        now_s = time.monotonic()
        if now_s >= self._next_line_s or record.step == self._steps:
            self._next_line_s = now_s + _SECONDS_PER_LINE
            print(f"{self._title}: step {record.step}/{self._steps}, {details}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        if self._bar is not None:
            self._bar.close()
