"""How the command reads counts; for bytes, see `offload.config`."""

from __future__ import annotations

import math
import re

from offload.errors import ConfigError

_COUNT = re.compile(r"(?P<number>\d+(?:\.\d*)?(?:e\+?\d+)?)\s*(?P<suffix>[kmbgt]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def parse_count(field: str, value: str) -> int:
    """Return a positive count written as 25000000, 25e6, "25M" or "1.5B".

    Args:
        field: The option, for the message.
        value: What the user wrote.

    Raises:
        ConfigError: It is not a count, or rounds to less than one.
    """
    match = _COUNT.fullmatch(value.strip())
    number = float(match["number"]) * _FACTORS[match["suffix"].lower()] if match else math.nan
    if not (math.isfinite(number) and number >= 1):
        raise ConfigError(field, value, "give a count of at least 1, such as 25000000, 25e6, 25M or 1.5B")
    return round(number)
