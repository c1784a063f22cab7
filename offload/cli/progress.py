"""Progress of long work: a bar on a terminal; elsewhere nothing, or of a run a line every few seconds for its log.

Goes to stderr, so that stdout holds results only.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

LINE_S = 5.0
"""Seconds between lines, where lines take the place of a bar."""


class Progress:
    """Shows how far one piece of work is; closed by its owner.

    Args:
        total: How many units there will be, as far as is known.
        title: What is running.
        quiet: Show nothing.
        unit: What is counted.
        after_s: Seconds before anything is shown.
        log: Print lines where there is no terminal, as for a run whose output is kept. Else nothing is shown there.
    """

    def __init__(
        self, total: int, *, title: str, quiet: bool, unit: str = "step", after_s: float = 0.0, log: bool = False
    ) -> None:
        is_terminal = sys.stderr.isatty()
        self._title = title
        self._quiet = quiet or not (is_terminal or log)
        self._unit = unit
        self._after_s = after_s
        self._next_line_s = time.monotonic() + after_s
        self._bar: Any = None
        if is_terminal and not quiet:
            with contextlib.suppress(ImportError):  # lines will do
                from tqdm import tqdm

                self._bar = tqdm(total=total, desc=title, unit=unit, dynamic_ncols=True, delay=after_s)

    def show(self, done: int, total: int, details: str) -> None:
        """Show how many of all units are done, and details behind that."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(details, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now_s = time.monotonic()
        ends = done == total and not self._after_s  # with `after_s`, short work shows nothing, its end neither
        if now_s >= self._next_line_s or ends:
            self._next_line_s = now_s + LINE_S
            print(f"{self._title}: {self._unit} {done}/{total}, {details}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        if self._bar is not None:
            self._bar.close()
