"""Progress of long work: a bar on a terminal; elsewhere nothing or, for a log, a line every few seconds.

All goes to stderr, so that stdout holds results only.
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
        """Show that `done` of `total` units are done, followed by `details`.

        May be called for every unit: a line is printed at most every `LINE_S` seconds, and for the last unit.
        """
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(details, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now_s = time.monotonic()
        # The last unit's line does not wait, unless `after_s` is to keep short work from showing anything at all.
        is_last_line = done == total and not self._after_s
        if now_s >= self._next_line_s or is_last_line:
            self._next_line_s = now_s + LINE_S
            print(f"{self._title}: {self._unit} {done}/{total}, {details}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        if self._bar is not None:
            self._bar.close()
