"""How numbers, sizes and durations are read from people, and written for them: one notation everywhere."""

from __future__ import annotations

import re
from decimal import Decimal

MAX_DIGITS = 30
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(e[+-]?\d{1,3})?\s*([a-z]*)", re.ASCII | re.IGNORECASE)

LEAST_SHARE_S = 1e-3
"""Durations below this are not compared as shares: one thread that wakes up late is more."""

DAY_S = 86400.0
_YEAR_S = 365.25 * DAY_S


def read_number(text: str) -> tuple[Decimal, str] | None:
    """Return the number that a text is, exactly, and the letters behind it in lower case; None if it is none.

    Plain digits with a point or an exponent, or both: no sign, no infinity, no digits of other scripts, and no more
    than a number that means something has, so that what is computed from it takes no time.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or len(match[1]) > MAX_DIGITS:
        return None
    return Decimal(match[1] + (match[2] or "")), match[3].lower()


def format_bytes(count: float) -> str:
    """Return a size in binary units: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_count(count: int, noun: str) -> str:
    """Return how many there are: 1, "subgroup" -> "1 subgroup", 1200 -> "1,200 subgroups"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Return a duration in the unit that suits it: 0.0123 -> "12.3 ms", 150 -> "2 min 30 s", 432000 -> "5 days"."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if not seconds >= 0.9995:  # what would be written as 1e+03 of the lesser unit
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    if seconds < 7170:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds < 2 * DAY_S:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours} h {rest} min"
    return f"{seconds / DAY_S:.3g} days" if seconds < 2 * _YEAR_S else f"{seconds / _YEAR_S:.3g} years"


def format_apart(predicted_s: float, measured_s: float) -> str:
    """Return how far two durations are apart, in brackets after a blank; "" where that says nothing.

    As a part of the prediction, as a multiple of the lesser one from twice on, and not below `LEAST_SHARE_S`.
    """
    if not min(predicted_s, measured_s) >= LEAST_SHARE_S:
        return ""
    times = measured_s / predicted_s
    if 0.5 < times < 2:
        return f" ({times - 1:+.0%})"
    return f" ({times:.3g} times as long)" if times >= 2 else f" ({1 / times:.3g} times as short)"
