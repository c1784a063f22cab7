"""How numbers, sizes and durations are read from people, and written for them: one notation everywhere."""

from __future__ import annotations

import re
from decimal import Decimal

MAX_DIGITS = 30
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(e[+-]?\d{1,3})?\s*([a-z]*)", re.ASCII | re.IGNORECASE)

LEAST_SHARE_S = 1e-3
"""Durations below this are not compared: one thread that wakes up late makes a greater difference."""

DAY_S = 86400.0
_YEAR_S = 365.25 * DAY_S


def read_number(text: str) -> tuple[Decimal, str] | None:
    """Return the exact number and the unit, in lower case, of a text such as "1.5 GiB": (Decimal("1.5"), "gib").

    The unit may be any letters, or "". The result is None if the text is anything else than a number and letters.

    A number is digits, with a point or an exponent if need be: no sign, no infinity, no digits of other scripts, and
    no more than `MAX_DIGITS` digits and three of an exponent, so that computing with it takes no time.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or len(match[1]) > MAX_DIGITS:
        return None
    return Decimal(match[1] + (match[2] or "")), match[3].lower()


def format_bytes(count: float) -> str:
    """Return a size in binary units: 1536 -> "1.5 KiB"."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def format_count(count: int, noun: str) -> str:
    """Return how many there are: 1, "subgroup" -> "1 subgroup", 1200 -> "1,200 subgroups"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Return a duration in the unit that suits it: 0.0123 -> "12.3 ms", 150 -> "2 min 30 s", 432000 -> "5 days"."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    # A limit is where a rounded number becomes too large for its unit: 999.5 ms would be written as "1e+03 ms", and
    # 119.5 s and 119.5 min (7170 s) are rounded to 120.
    if not seconds >= 0.9995:  # written so that NaN is here, too
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    if seconds < 7170:
        minutes, left_seconds = divmod(round(seconds), 60)
        return f"{minutes} min {left_seconds} s"
    if seconds < 2 * DAY_S:
        hours, left_minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {left_minutes} min"
    return f"{seconds / DAY_S:.3g} days" if seconds < 2 * _YEAR_S else f"{seconds / _YEAR_S:.3g} years"


def format_apart(predicted_s: float, measured_s: float) -> str:
    """Return by how much a measured duration differs from its prediction, as " (+12%)" or " (3 times as long)".

    The text is a percentage below a factor of two, and the factor from there on. It is "" if one of the durations is
    below `LEAST_SHARE_S`, or NaN.
    """
    are_comparable = predicted_s >= LEAST_SHARE_S and measured_s >= LEAST_SHARE_S  # false of NaN
    if not are_comparable:
        return ""
    ratio = measured_s / predicted_s
    if 0.5 < ratio < 2:
        return f" ({ratio - 1:+.0%})"
    return f" ({ratio:.3g} times as long)" if ratio >= 2 else f" ({1 / ratio:.3g} times as short)"
