"""How the command reads what it is given: counts, numbers, names of files. For sizes, see `offload.config`."""

from __future__ import annotations

import argparse
import os
from decimal import Decimal
from typing import Any, NoReturn

from offload.config import check_text
from offload.errors import ConfigError
from offload.units import read_number

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}

MAX_COUNT = 10**15
"""Nothing that is counted here is more: parameters, tokens."""
MAX_RANKS = 10**6
MAX_FILE_BYTES = 16 << 20
"""Of files that are JSON; a hundred times what any has. Parsed, they take twenty times as much."""

MAX_SHOWN = 2000
"""Most characters of an error's line."""

_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255  # Linux's PATH_MAX, which counts a zero, and NAME_MAX


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like every other error of the command."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        self.exit(2, f"{self.prog}: {one_line(message)} (see `{self.prog} --help`)\n")


def one_line(error: object) -> str:
    """Return an error's text as one line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def parse_count(field: str, value: str, *, least: int = 1, most: int = MAX_COUNT, why: str = "") -> int:
    """Return a count written as 25000000, 25e6, "25M" or "1.5B", rounded.

    Args:
        field: The option, for the message.
        value: What the user wrote.
        least: What it has to be at least.
        most: What it may be at most.
        why: Where these come from, for the message.

    Raises:
        ConfigError: It is not a count, or out of range.
    """
    found = read_number(value)
    number = found[0] * _FACTORS[found[1]] if found is not None and found[1] in _FACTORS else None
    # An integer only when it is known to be one of few digits.
    if number is None or not least <= number <= most:
        like = ", such as 25e6, 25M or 1.5B" if most >= MAX_COUNT else ""
        raise ConfigError(field, value, f"{why}give a count from {least:,} to {_short(most)}{like}")
    return round(number)


def parse_number(field: str, value: str, *, least: float, most: float, what: str = "a number") -> float:
    """Return a number such as 0.5 or 1e-3.

    Args:
        field: The option, for the message.
        value: What the user wrote.
        least: What it has to be at least.
        most: What it may be at most.
        what: What is to be given.

    Raises:
        ConfigError: It is not a number, or out of range.
    """
    found = read_number(value)
    if found is None or found[1] or not Decimal(least) <= found[0] <= Decimal(most):
        raise ConfigError(field, value, f"give {what} from {least:g} to {most:g}")
    return float(found[0])


def parse_path(field: str, value: str) -> str:
    """Return the name of a file or folder, or an "s3://" one, with `~` written out.

    Raises:
        ConfigError: No system has such a name.
    """
    name = os.path.expanduser(value)
    check_text(field, name)
    parts = [len(os.fsencode(part)) for part in name.split("/")]
    if not name or sum(parts) + len(parts) - 1 > _MAX_PATH_BYTES or max(parts) > _MAX_NAME_BYTES:
        allowed = f"name a path of 1 to {_MAX_PATH_BYTES} bytes, each part at most {_MAX_NAME_BYTES}"
        raise ConfigError(field, value, allowed)
    return name


def parse_output(field: str, value: str) -> str:
    """Return the name of a file that is to be written; see `parse_path`.

    Raises:
        ConfigError: Also if something else than a file has that name: a device may take what is written, or wait.
    """
    name = parse_path(field, value)
    if os.path.lexists(name) and not os.path.isfile(name):
        raise ConfigError(field, value, "name a file that is new, or may be replaced")
    return name


def read_values(field: str, file: str) -> Any:
    """Return what a file of JSON says.

    Raises:
        ConfigError: It cannot be read, is too large, or not JSON.
    """
    from offload.tiers.filesystem import read_json  # loads native code, which not every call needs

    try:
        return read_json(file, MAX_FILE_BYTES, follow=True)
    except OSError as cause:
        raise ConfigError(field, file, f"it cannot be read: {cause.strerror or cause}") from cause
    except ValueError as cause:
        raise ConfigError(field, file, f"it is not JSON: {cause}") from cause


def _short(count: int) -> str:
    return f"{count:,}" if count < 10**7 else f"{count:.3g}"
