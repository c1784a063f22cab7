"""How commands read what they are given, and print: counts, numbers, names of files (sizes: `offload.config`)."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn

from offload.config import (
    MAX_THREADS,
    Count,
    OffloadConfig,
    OneOf,
    Size,
    check_bool,
    check_paths,
    check_rates,
    check_threads,
    parse_bytes,
    parse_host_memory,
)
from offload.errors import ConfigError, check_text
from offload.units import DAY_S, format_seconds, read_number

_COUNT_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}

MAX_COUNT = 10**15
"""Nothing that is counted here is more: parameters, tokens."""
MAX_RANKS = 10**6
MAX_FILE_BYTES = 16 << 20
"""Most bytes of a JSON file that is read: a hundred times what any has. Parsed, it takes twenty times as much."""

MOST_S = 100 * DAY_S
"""Longest duration that can be given."""

MAX_SHOWN = 2000
"""Most characters of an error's line."""

_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255  # Linux's PATH_MAX, which counts a zero, and NAME_MAX


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like every other error of the command."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # argparse takes what this matches as a value. By its own pattern -64GiB would be an unknown option. As a
        # value it gets to its reader, whose error says what is allowed.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        """Print an error about the command line as one line, and end the process with status 2."""
        self.exit(2, f"{self.prog}: {one_line(message)} (see `{self.prog} --help`)\n")


class _ReadAction(argparse.Action):
    """Reads the text of an option or argument by a function, whose `ConfigError` ends parsing as it is.

    argparse's own way, a `type`, would catch the error, which is a `ValueError`, and print a text of its own.
    """

    def __init__(self, *, reads: Callable[[str, str], Any], **rest: Any) -> None:
        super().__init__(**rest)
        self._reads = reads

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        """Read and note the value, or the list of values, of this option or argument; argparse calls this."""
        name = self.option_strings[0] if self.option_strings else str(self.metavar)  # an argument has no such strings
        if isinstance(values, list):
            earlier = getattr(namespace, self.dest) or ()  # the option may be given several times
            result: Any = [*earlier, *(self._reads(name, value) for value in values)]
        else:
            result = self._reads(name, values)
        setattr(namespace, self.dest, result)


def add_value(options: Any, name: str, reads: Callable[[str, str], Any], help: str, **more: Any) -> None:
    """Declare an option ("--steps"), or a positional argument ("PATH"), with the function that reads its value.

    Args:
        options: A parser, or a group of one.
        name: The option with its dashes, or the positional argument in capitals.
        reads: Returns the value from the option's name and the text that was given, such as `parse_path`; raises
            `ConfigError`. What `--help` calls the value depends on this function, too.
        help: What it is, for `--help`.
        more: Further arguments of `add_argument`. With `nargs="+"` the values are a list.
    """
    metavar = "N"
    if reads in (parse_bytes, parse_memory):
        metavar = "SIZE"
    elif reads in (parse_path, parse_output):
        metavar = "FILE"
    if name.isupper():
        metavar = name
        name = name.lower()
    options.add_argument(name, action=_ReadAction, reads=reads, help=help, **{"metavar": metavar, **more})


def add_settings(options: Any, command: str, *, defaults: bool = False, **readers: Callable[[str, str], Any]) -> None:
    """Declare an option for each setting of `OffloadConfig` that a command takes, as its declaration says.

    Args:
        options: A parser, or a group of one.
        command: "plan" or "train"; the metadata of a setting has under this key how the command takes it (a `Flag`).
        defaults: Whether an option that is not given has the setting's default; else it is None.
        readers: By the setting's name, the function that reads its value, where the option takes more than the
            setting does.
    """
    for field in settings_of(command):
        option = option_of(field.name)
        flag, check = field.metadata[command], field.metadata["check"]
        shared = {"help": flag.help, "default": field.default if defaults else None}
        if isinstance(check, OneOf):
            options.add_argument(option, choices=check.choices, **shared)
        elif check is check_bool:
            options.add_argument(option, action=argparse.BooleanOptionalAction, **shared)
        else:
            if flag.metavar:
                shared["metavar"] = flag.metavar
            if check is check_paths:
                shared["nargs"] = "+"
            add_value(options, option, readers.get(field.name) or _parser_for(check), **shared)


def _parser_for(check: Any) -> Callable[[str, str], Any]:
    """Return the function that reads a setting's value from the command line, by the setting's check."""
    if isinstance(check, Size):
        return parse_bytes
    if isinstance(check, Count):
        return partial(parse_count, least=check.least, most=min(check.most, MAX_COUNT))
    readers: dict[Any, Callable[[str, str], Any]] = {
        check_paths: parse_path,
        check_rates: parse_path,
        check_threads: partial(parse_count, most=MAX_THREADS),
        parse_host_memory: parse_memory,
    }
    return readers[check]


def settings_of(command: str) -> list[Field[Any]]:
    """Return the settings of `OffloadConfig` that a command takes."""
    return [field for field in fields(OffloadConfig) if field.metadata[command] is not None]


def given_settings(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Return the settings that a command was given, by their names."""
    values = {field.name: getattr(arguments, field.name) for field in settings_of(command)}
    return {name: value for name, value in values.items() if value is not None}


def option_of(setting: str) -> str:
    """Return the option of a setting."""
    return f"--{setting.replace('_', '-')}"


def in_options(text: str, command: str) -> str:
    """Return an error's text with a command's options in place of the names of settings: --host-memory."""
    names = "|".join(field.name for field in settings_of(command))
    return re.sub(rf"\b({names})\b", lambda found: option_of(found[0]), text)


@contextmanager
def naming_options(command: str) -> Iterator[None]:
    """Let a `ConfigError` of this block name the command's option (--host-memory) where it names a setting."""
    try:
        yield
    except ConfigError as error:
        if not any(field.name == error.field for field in settings_of(command)):
            raise
        # The same error under another name, so it has the cause that the first one had.
        raise ConfigError(option_of(error.field), error.value, error.allowed) from error.__cause__


def add_output(parser: argparse.ArgumentParser, json: str, quiet: str | None = None) -> None:
    """Declare `--json`, and `--quiet` if its help is given; see `tell`."""
    parser.add_argument("--json", action="store_true", help=json)
    if quiet is not None:
        parser.add_argument("--quiet", action="store_true", help=quiet)


def tell(arguments: argparse.Namespace, outcome: Any, text: str) -> None:
    """Print a command's outcome: as JSON with `--json`, else in words, or not at all with `--quiet`."""
    if arguments.json:
        print(to_json(outcome, indent=2))
    elif not getattr(arguments, "quiet", False):
        print(text)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON that every parser reads: a number that is not finite becomes null."""
    return json.dumps(_without_infinities(value), indent=indent, allow_nan=False)


def _without_infinities(value: Any) -> Any:
    """Return a value for JSON with None in place of numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _without_infinities(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return value


def in_columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Return rows as lines of text, each column as wide as its widest cell; all rows have as many cells.

    Args:
        rows: The cells.
        right: Numbers of the columns whose cells stand at their right edge.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        """Return a row as a line, its cells padded to the widths of their columns."""
        padded = []
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            padded.append(cell.rjust(width) if number in right else cell.ljust(width))
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, rows))


def one_line(error: object) -> str:
    """Return an error's text as one line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def parse_count(field: str, value: str, *, least: int = 1, most: int = MAX_COUNT, why: str = "") -> int:
    """Return a count written as 25000000, 25e6, "25M" or "1.5B", rounded; `why` says where the limits come from.

    Raises:
        ConfigError: It is not a count, or out of range.
    """
    digits_and_unit = read_number(value)
    number = None
    if digits_and_unit is not None:
        digits, unit = digits_and_unit
        number = digits * _COUNT_FACTORS[unit] if unit in _COUNT_FACTORS else None
    # Checked before it is made an integer: 1e999 would have a thousand digits.
    if number is None or not least <= number <= most:
        examples = ", such as 25e6, 25M or 1.5B" if most >= MAX_COUNT else ""
        raise ConfigError(field, value, f"{why}give a count from {least:,} to {_count_text(most)}{examples}")
    return round(number)


def parse_number(field: str, value: str, *, least: float, most: float, what: str = "a number") -> float:
    """Return a number such as 0.5 or 1e-3, without a unit; the error says "give `what` from `least` to `most`".

    Raises:
        ConfigError: It is not a number, or out of range.
    """
    number_and_unit = read_number(value)
    if number_and_unit is None or number_and_unit[1] or not Decimal(least) <= number_and_unit[0] <= Decimal(most):
        raise ConfigError(field, value, f"give {what} from {least:g} to {most:g}")
    return float(number_and_unit[0])


_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


def parse_seconds(field: str, value: str) -> float:
    """Return a duration such as 10s, 500ms or 2min.

    Raises:
        ConfigError: It is none, or out of range.
    """
    # A text that is no number, or has no unit of `_SECONDS`, counts as 0 seconds, which are refused below.
    number, unit = read_number(value) or (0, "")
    seconds = float(number) * _SECONDS.get(unit, 0.0)
    if not 1e-6 <= seconds <= MOST_S:
        raise ConfigError(field, value, f"give a duration up to {format_seconds(MOST_S)}, such as 10s, 500ms or 2min")
    return seconds


def parse_memory(field: str, value: str) -> int | dict[str, int]:
    """Return a size of host memory, or those of memory nodes: node0=200GiB,node2=400GiB.

    Raises:
        ConfigError: It is neither, or names a node twice.
    """
    if "=" not in value:
        return parse_bytes(field, value)
    named: dict[str, str] = {}
    for part in value.split(","):
        name, equals, size = part.partition("=")
        if not equals or name.strip() in named:
            raise ConfigError(field, value, "give each memory node one size: node0=200GiB,node2=400GiB")
        named[name.strip()] = size
    return parse_host_memory(field, named)


def parse_path(field: str, value: str) -> str:
    """Return the name of a file or folder, or an "s3://" one, with `~` written out.

    Raises:
        ConfigError: No system has such a name.
    """
    name = os.path.expanduser(value)
    check_text(field, name)
    name_bytes = [len(os.fsencode(part)) for part in name.split("/")]
    path_bytes = sum(name_bytes) + len(name_bytes) - 1
    if not name or path_bytes > _MAX_PATH_BYTES or max(name_bytes) > _MAX_NAME_BYTES:
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
        return read_json(file, MAX_FILE_BYTES, follow=True)  # the file may be a link, as the user has named it
    except OSError as cause:
        raise ConfigError(field, file, f"it cannot be read: {cause.strerror or cause}") from cause
    except ValueError as cause:
        raise ConfigError(field, file, f"it is not JSON: {cause}") from cause


def _count_text(count: int) -> str:
    """Return a count for an error's text: with all digits below ten million, else in short, such as 1e+15."""
    return f"{count:,}" if count < 10**7 else f"{count:.3g}"
