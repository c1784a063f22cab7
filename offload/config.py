"""`OffloadConfig`: what a user may say, parsed and validated before a file is touched."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from decimal import Decimal
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from offload import combinations
from offload.errors import ConfigError, check_text
from offload.formats import STATE_FORMATS, StateFormat, StateSpec
from offload.protocols import MAX_DEPTH, MAX_NODES
from offload.rules import UpdateRule
from offload.units import format_count, read_number

if TYPE_CHECKING:
    from offload.plan import Budgets, PathBudget

T = TypeVar("T")

# Bytes of each unit of a size, by its name in lower case: "kb" is 1000, "kib" 1024.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

LEAST_WITHOUT_UNIT = 1 << 20
"""Least size that may be given as text without a unit: the unit of a smaller one has been left out, as in "64"."""
LEAST_BUDGET = 1 << 12
"""Fewest bytes of a budget that is not 0: a page of memory. The unit of a smaller integer has been left out, too."""

MAX_BYTES = (1 << 63) - 1
MAX_INTEGER = (1 << 62) - 1
MAX_SHARE = 1e100
EXACT_NAMES = ("*embed*", "*lm_head*", "*output_layer*", "*wte*", "*wpe*")
"""Usual names of embeddings and output layers, whose state "compact8" keeps exact by default.

Few rows of these have a gradient in a step, and each row is a token's own.
"""

MAX_THREADS = 1024
BORROW = "borrow"
"""The value of `gpu_memory` that uses a GPU's memory between backward and forward alone."""
OVERLAPS = ("off", "forward", "backward", "both", "auto")
MAX_HOLDERS = 1 << 16
"""Most processes that may use a path at a time; see `OffloadConfig.path_lock`."""


_BITS = re.compile(r"[KMGT]i?b\s*$", re.ASCII)
"""The end of a text that means bits, as of networks: "8Gb". "8gb" and "8GB" are bytes."""


_SIZE_ADVICE = 'give bytes as an integer >= 0, or a string such as "8GiB" or "500MB"'


def parse_bytes(field: str, value: object) -> int:
    """Return a size in bytes from an integer or a string such as "8GiB" or "500MB".

    Raises:
        ConfigError: If it is not a size, or a string that seems to lack its unit; names `field`.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(field, value, _SIZE_ADVICE)
    size: Decimal | int = _parse_size(field, value) if isinstance(value, str) else value
    if not 0 <= size <= MAX_BYTES:
        raise ConfigError(field, value, _SIZE_ADVICE)
    return int(size)


def _parse_size(field: str, text: str) -> Decimal:
    """Return the bytes that a text such as "8GiB" stands for, however many; see `parse_bytes`.

    Refuses texts whose unit is not clear: bits ("8Gb"), half a unit ("8G", "8Gi"), and small numbers without one.
    """
    number_and_unit = read_number(text)
    if number_and_unit is None:
        raise ConfigError(field, text, _SIZE_ADVICE)
    number, unit = number_and_unit
    if _BITS.search(text):
        raise ConfigError(field, text, f'a small "b" behind a large letter means bits; {_SIZE_ADVICE}')
    if unit and f"{unit}b" in _UNITS:  # "64G" is 64 GB to some programs, and 64 GiB to others
        amount = text.strip().rstrip("iI")  # "64G", to which the rest of a unit is added
        raise ConfigError(field, text, f'write "{amount}iB" (powers of 1024) or "{amount}B" (powers of 1000)')
    if unit not in _UNITS:
        raise ConfigError(field, text, _SIZE_ADVICE)
    size = number * _UNITS[unit]
    if not unit and 0 < size < LEAST_WITHOUT_UNIT:
        amount = text.strip()
        raise ConfigError(field, text, f'give it a unit, such as "{amount}GiB"')
    return size


def parse_budget(field: str, value: object) -> int:
    """Return the bytes of a budget: a size (see `parse_bytes`) that is 0 or at least `LEAST_BUDGET`.

    Raises:
        ConfigError: If it is neither; names `field`.
    """
    nbytes = parse_bytes(field, value)
    if 0 < nbytes < LEAST_BUDGET:
        why = f"{nbytes} is {format_count(nbytes, 'byte')}, and a budget is 0 or at least {LEAST_BUDGET:,}"
        raise ConfigError(field, value, f'{why}; write "{nbytes}GiB" if that is meant')
    return nbytes


_NODE = re.compile(r"node(0|[1-9]\d{0,3})", re.ASCII)


def parse_host_memory(field: str, value: object) -> int | dict[str, int]:
    """Return a size in bytes, or a size for each memory node by its name, such as {"node0": 1 << 30}.

    Args:
        field: The name for errors.
        value: A size, or a mapping of "node<number>", as Linux numbers NUMA nodes, to sizes.

    Raises:
        ConfigError: If it is neither; names `field`.
    """
    if not isinstance(value, Mapping):
        return parse_budget(field, value)
    for name in value:
        match = _NODE.fullmatch(name) if isinstance(name, str) else None
        if match is None or int(match[1]) >= MAX_NODES:
            raise ConfigError(field, name, 'name memory nodes as in {"node0": "200GiB", "node2": "400GiB"}')
    if not value:
        raise ConfigError(field, value, 'give a size, or one for each memory node: {"node0": "200GiB"}')
    nbytes_by_node = {str(name): parse_budget(f"{field}.{name}", size) for name, size in value.items()}
    if sum(nbytes_by_node.values()) > MAX_BYTES:
        raise ConfigError(field, value, f"give {MAX_BYTES:,} bytes in all at most")
    return nbytes_by_node


# How one value is checked. An object of these classes is a `Check`: called with a setting's name and its value, it
# returns the value to keep.


class Size:
    """The check of a budget in bytes, which may also be one of `words` ("auto")."""

    def __init__(self, *words: str) -> None:
        self.choices = words

    def __call__(self, field: str, value: Any) -> int | str:
        return str(value) if value in self.choices else parse_budget(field, value)


class Count:
    """The check of an integer from `least` to `most`."""

    def __init__(self, least: int, most: int = MAX_INTEGER) -> None:
        self.least, self.most = least, most

    def __call__(self, field: str, value: Any) -> Any:
        check_int(field, value, self.least, self.most)
        return value


class OneOf:
    """The check of a word, one of `words`.

    Args:
        words: What errors tell users to give.
        earlier: Words of earlier versions, which are taken, too, but not named in errors.
        number: The check of integers; None where only words may be given.
    """

    def __init__(self, *words: str, earlier: Sequence[str] = (), number: Count | None = None) -> None:
        self.choices, self._earlier, self._number = words, earlier, number

    def __call__(self, field: str, value: Any) -> Any:
        if self._number is not None and isinstance(value, int):
            return self._number(field, value)
        if not isinstance(value, str) or value not in (*self.choices, *self._earlier):
            raise ConfigError(field, value, "use " + " or ".join(f'"{word}"' for word in self.choices))
        return value


def check_int(field: str, value: object, least: int, most: int = MAX_INTEGER) -> None:
    """Refuse a value that is not an integer from `least` to `most`.

    Raises:
        ConfigError: It is not; names `field`.
    """
    is_right = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    if not is_right:
        bounds = f">= {least}" if most == MAX_INTEGER else f"from {least} to {most}"
        raise ConfigError(field, value, f"give an integer {bounds}")


# Checks of single settings: each returns the value to keep, or raises a `ConfigError` that names `field`.


def check_bool(field: str, value: Any) -> bool:
    """Refuse what is not true or false."""
    if not isinstance(value, bool):
        raise ConfigError(field, value, "use true or false")
    return value


def check_seconds(field: str, value: Any) -> Any:
    """Refuse what is not a duration greater than 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ConfigError(field, value, "give seconds, greater than 0")
    return value


def check_threads(field: str, value: Any) -> Any:
    """Refuse what is not a possible number of threads."""
    check_int(field, value, 1)
    if value > MAX_THREADS:
        raise ConfigError(field, value, f"use at most {MAX_THREADS}, and no more than there are CPUs")
    return value


def check_placement(field: str, value: Any) -> Any:
    """Refuse what is neither "auto", "cpu" or "gpu" nor the share of updates on the GPU, from 0 to 1."""
    is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    if not is_share and value not in ("auto", "cpu", "gpu"):
        raise ConfigError(field, value, 'use "auto", "cpu", "gpu", or a share of GPU updates from 0 to 1')
    return value


def check_mirror(field: str, value: Any) -> str:
    """Return a directory's name or "s3://bucket/prefix" with `~` replaced; refuse what can be neither."""
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str) or not name:
        raise ConfigError(field, value, "name a directory or s3://bucket/prefix, or none for no mirror")
    check_text(field, name)
    return os.path.expanduser(name)


def check_rates(field: str, value: Any) -> str:
    """Return "auto" or a file's name with `~` replaced; refuse what cannot be a name."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(field, value, 'use "auto" or name a file that `offload probe` wrote')
    return os.path.expanduser(os.fspath(value))


def check_patterns(field: str, value: Any) -> tuple[str, ...]:
    """Return a list of patterns as a tuple; refuse what is no list of strings."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(field, value, 'give a list of patterns like "*embed*"')
    return tuple(value)


def check_paths(field: str, value: Any) -> tuple[PathConfig, ...]:
    """Return a list of paths, parsed; refuse one path alone: its string would be taken as a list of letters."""
    if isinstance(value, str | os.PathLike | Mapping) or not isinstance(value, Sequence):
        raise ConfigError(field, value, "give a list of directories")
    return tuple(PathConfig.parse(f"{field}[{number}]", path) for number, path in enumerate(value))


def check_place(field: str, value: Any) -> str:
    """Return the name of a directory or a bucket's prefix with `~` replaced; refuse what cannot be one."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise ConfigError(field, path, "give a directory")
    check_text(field, path)
    return os.path.expanduser(path)


def check_share(field: str, value: Any) -> float:
    """Return a path's weight as a float; refuse what is not a number greater than 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_SHARE:
        raise ConfigError(field, value, "give a number greater than 0, or none to follow measured rates")
    return float(value)


def check_folder(field: str, value: Any) -> str:
    """Return the name of a directory; refuse one that does not exist."""
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str) or not os.path.isdir(name):
        raise ConfigError(field, name, "name a directory that exists, or none for `path`")
    check_text(field, name)
    return name


# How a setting is declared

Check = Callable[[str, Any], Any]
"""Called with a setting's name and the value that was given; returns the value to keep, or raises `ConfigError`."""


class Flag(NamedTuple):
    """The option by which a command takes a setting; it has the setting's name, with dashes.

    Attributes:
        help: The text of `--help`.
        metavar: What `--help` calls the value; "" for a name that follows from the check.
    """

    help: str
    metavar: str = ""


class Tried(NamedTuple):
    """How `offload plan` chooses a setting that the user has not given; it prints a config with what it has chosen.

    Attributes:
        values: Values that are tried, first the one that asks least of the user. Empty where the value is computed.
        why: What values beyond the first do, in words that follow the setting's option in the advice.
        weights_on: "cpu" or "gpu" if the setting is tried only where weights lie there; "" for always.
        asks: How much more each value asks of the user than the one before, on a scale that all settings share. A
            value that changes results asks most.
    """

    values: tuple[Any, ...] = ()
    why: str = ""
    weights_on: str = ""
    asks: int = 1


def setting_metadata(
    check: Check,
    meaning: str,
    *,
    plan: Flag | None,
    train: Flag | None,
    advised: Tried | None = None,
    deepspeed: combinations.Row | None = None,
    alike: bool = False,
) -> dict[str, Any]:
    """Return the metadata of a setting's field: all that is known of the setting but its name, type and default.

    It is read by `__post_init__`, docs/generate.py, the commands (`offload.cli.values.add_settings`), and DeepSpeed's
    object. Where the default is None, None is accepted unchecked.

    Args:
        check: Checks a value by itself; combinations of settings are refused by rows of `offload.combinations`.
        meaning: What users are told of the setting.
        plan: How `offload plan` takes it; None if it does not, as its predictions do not depend on the setting.
        train: How `offload train` takes it; None if it does not.
        advised: What `offload plan` may choose for it; None if that is left to the user.
        deepspeed: The row that refuses it as a key of DeepSpeed's object; None if it is such a key.
        alike: Whether sessions that are compared need the same value: bits, or the cut of work, depend on it.
    """
    return {
        "check": check,
        "meaning": " ".join(meaning.split()),
        "plan": plan,
        "train": train,
        "advised": advised,
        "deepspeed": deepspeed,
        "alike": alike,
    }


NO_OPTION: dict[str, Any] = {"plan": None, "train": None}
"""Arguments for a setting that no command takes."""


def setting(default: T, check: Check, meaning: str, **taken: Any) -> T:
    """Return the dataclass field of a setting that has a default.

    `check`, `meaning` and `taken`, which has all keyword arguments, are those of `setting_metadata`.
    """
    # What `field` returns is a `Field`; for type checkers it has the type of its default, as in any dataclass.
    declared: T = field(default=default, metadata=setting_metadata(check, meaning, **taken))
    return declared


def _checked_value(setting: Field[Any], name: str, value: Any) -> Any:
    """Return the value to keep for a setting: what its check returns, or None unchecked where that is its default.

    Args:
        setting: The setting's field.
        name: What errors call the setting.
        value: What was given.
    """
    is_default_none = value is None and setting.default is None
    return None if is_default_none else setting.metadata["check"](name, value)


def _with_settings(cls: type[T]) -> type[T]:
    """Decorate a dataclass of settings: complete its docstring, and let its constructor refuse unknown settings.

    The docstring gets a section "Attributes" of the settings' meanings, which are declared once, in their metadata.
    """
    init, settings = cls.__init__, fields(cls)  # type: ignore[arg-type]
    # Indented as Google's sections are in a class's docstring.
    fill = functools.partial(textwrap.fill, width=118, initial_indent=8 * " ", subsequent_indent=12 * " ")
    lines = [fill(f"{each.name}: {each.metadata['meaning']}") for each in settings]
    cls.__doc__ = "\n".join([(cls.__doc__ or "").rstrip(), "", "    Attributes:", *lines, "    "])

    @functools.wraps(init)
    def checked_init(self: T, **values: Any) -> None:
        """Refuse unknown settings by a `ConfigError`, which names the nearest, in place of Python's TypeError."""
        _check_keys(cls.__name__, values, [each.name for each in settings])
        init(self, **values)

    cls.__init__ = checked_init  # type: ignore[assignment]
    return cls


def _check_keys(field: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `ConfigError` for a key of `values` that is not among the `known` ones; the error names a similar one."""
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            nearest = f'did you mean "{near[0]}"? ' if near else ""
            raise ConfigError(f"{field}.{key}", values[key], f"unknown key; {nearest}known are {', '.join(known)}")


@_with_settings
@dataclass(frozen=True, slots=True, kw_only=True)
class PathConfig:
    """One place in a storage tier."""

    path: str = field(
        metadata=setting_metadata(
            check_place,
            """A directory that exists and can be written (`~`: your home), or "s3://bucket/prefix": endpoint, region
            and credentials from the AWS_* variables (AWS_ENDPOINT_URL for a server that is not AWS) or a profile.""",
            **NO_OPTION,
        )
    )
    max_bytes: int | None = setting(
        None,
        Size(),
        """Most bytes the session may occupy there; None for all that is free.""",
        **NO_OPTION,
    )
    share: float | None = setting(
        None,
        check_share,
        """Weight of this path when tiles are spread over several; only the ratio to the others matters (1 where
        others have one and this has not). None for all: in proportion to measured bandwidth.""",
        **NO_OPTION,
    )
    lock_path: str | None = setting(
        None,
        check_folder,
        """Directory that processes take turns on when they use this path (see `OffloadConfig.path_lock`). None:
        `path`. Name one for several paths that lie on one device, or for subdirectories of one path.""",
        **NO_OPTION,
    )
    depth: int | None = setting(
        None,
        Count(1, MAX_DEPTH),
        """Requests of each direction in flight; None: a few are tried when the session opens.""",
        **NO_OPTION,
    )

    @classmethod
    def parse(cls, field: str, value: object) -> PathConfig:
        """Return a path from a string or a mapping with `path` and any of the other fields.

        Raises:
            ConfigError: If a key is unknown or a value is not usable.
        """
        by_name = {one.name: one for one in fields(cls)}
        if isinstance(value, cls):
            value = {name: getattr(value, name) for name in by_name}
        if isinstance(value, str | os.PathLike):
            value = {"path": os.fspath(value)}
        if not isinstance(value, Mapping) or "path" not in value:
            raise ConfigError(
                field, value, 'give a directory, "s3://bucket/prefix", or {"path": ..., "max_bytes": ...}'
            )
        _check_keys(field, value, [*by_name])
        values = {name: _checked_value(one, f"{field}.{name}", value.get(name)) for name, one in by_name.items()}
        return cls(**values)


@_with_settings
@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Where optimizer state may live and how much of each tier it may use.

    Sizes are integers (bytes) or strings such as "8GiB", and 0 or at least 4 KiB. Values are checked on construction.
    """

    host_memory: int | str | Mapping[str, int | str] | None = setting(
        None,
        parse_host_memory,
        """Bytes of host memory for state at home there. None: all of the state without `paths`, otherwise up to half
        of the memory that is available (its part of that, where a launcher has started several ranks on the node),
        and no more than buffers and gradients leave of all of it beside 2 GiB, or half where that is less, for
        forward and backward: all state streams where there is no more. Where host memory is of several kinds
        (sockets, CXL cards), a size for each memory node, by Linux's numbers: {"node0": "200GiB", "node2": "400GiB"}.
        Homes then lie where the step is shortest, and all other memory of the session on the fastest of these nodes;
        memory is bound there.""",
        plan=Flag(
            "host memory of each rank for optimizer state (default: what the node can spare, if that is known); of "
            "each memory node of the rates as node0=200GiB,node2=400GiB"
        ),
        train=Flag("budget for state that stays in host memory, such as 8GiB (default: a quarter of the state)"),
        advised=Tried(),
    )
    gpu_memory: int | str = setting(
        "auto",
        Size("auto", BORROW),
        """Bytes of GPU memory for state at home there, where weights lie on a GPU. "auto": what is free after the
        first backward pass; nothing if the state is asked for before that. "borrow": no state is at home there, and
        what the step needs of it (staging slots, as many as pay of those that the first backward pass leaves room
        for) is taken when backward has ended, and given back to torch before the next forward pass; so "borrow" and
        `overlap` "forward" exclude each other. More than 0 is refused where weights lie on the CPU.""",
        plan=Flag("GPU memory for optimizer state (default: what activations leave, if known)"),
        train=None,
        advised=Tried(weights_on="gpu"),
    )
    gradient_memory: int | str | None = setting(
        None,
        Size("auto"),
        """Bytes of host memory for gradients. None: for all of them. What does not fit leaves for the paths as it
        arrives, and comes back in the step; "auto": as much as stays in memory as `host_memory` and what is available
        leave. Whether all fit is decided when an optimizer is made. Where they do not, `.grad` is None after backward
        for every parameter, and `optimizer.clip_grad_norm_` and `offload.GradScaler` take the place of torch's own;
        to drop gradients without a step, call `optimizer.zero_grad()`. A few buffers come on top, named in the plan.
        Excludes `overlap` "backward" and "both"; with weights on a GPU the CPU updates all.""",
        plan=Flag("host memory for gradients; others leave for the paths during backward (default: for all of them)"),
        train=Flag("host memory for gradients; others leave for the paths (default: for all of them)"),
        advised=Tried((None, 0), "gradients leave for the paths during backward", "cpu", 2),
    )
    paths: Sequence[str | os.PathLike[str] | Mapping[str, Any] | PathConfig] = setting(
        (),
        check_paths,
        """Directories or "s3://bucket/prefix" for the state that does not fit; each a string or `{"path": ...,
        "max_bytes": ..., "share": ...}`. Tiles are spread in proportion to the bandwidth that the paths are seen to
        have, step by step, unless a `share` is given.""",
        plan=None,
        train=Flag("directories for state beyond memory, one on each disk (default: OUTPUT/state)", "DIR"),
        advised=Tried(),
    )
    staging_memory: int | str | None = setting(
        None,
        Size(),
        """Bytes of host memory through which streamed state passes. None: four subgroups, or more where rates from a
        file say that they pay.""",
        plan=Flag("host memory through which state from the paths passes (default: chosen)"),
        train=Flag("host memory for state on its way to and from the paths (default: the engine's choice)"),
    )
    subgroup_numel: int | None = setting(
        None,
        Count(1024),
        """Most elements of a subgroup. None: chosen from the model's size.""",
        plan=Flag("most parameters of a subgroup, of which each is moved and updated as one (default: chosen)"),
        train=Flag("most parameters of a subgroup (default: the engine's choice)", "COUNT"),
        alike=True,
    )
    threads: int | None = setting(
        None,
        check_threads,
        """CPU threads of the update. None: as many as this process may use (its part of them, as for `host_memory`),
        and two less with weights on a GPU.""",
        plan=None,
        train=Flag("CPU threads of model and updates (default: one a core)"),
        alike=True,
    )
    gradient_dtype: str = setting(
        "parameter",
        OneOf("parameter", "float32"),
        """"parameter" (gradients in the weight's dtype) or "float32". Those that DDP, FSDP or `shard` reduce for the
        CPU are in the weight's dtype anyway. A gradient that is there already, in a buffer of yours, is copied.""",
        **NO_OPTION,
        deepspeed=combinations.DEEPSPEED_DTYPE,
        alike=True,
    )
    keep_grads: bool = setting(
        True,
        check_bool,
        """Whether gradients on a GPU stay in `.grad` until the step. If not, they leave during backward, and
        `optimizer.clip_grad_norm_` and `offload.GradScaler` take the place of torch's own; to drop them without a
        step, call `optimizer.zero_grad()`, as `model.zero_grad()` does not find them. Refused where weights lie on
        the CPU.""",
        plan=Flag(
            "whether gradients stay on the GPU until the step; if not, they leave during backward, which takes less "
            "of its memory (default: they stay with one rank, and leave with several, as under ZeRO)"
        ),
        train=None,
        deepspeed=combinations.DEEPSPEED_KEEPS,
        advised=Tried((True, False), "gradients leave the GPU during backward", "gpu", 4),
    )
    checksum: bool = setting(
        True,
        check_bool,
        """Whether tiles on storage carry a checksum that is verified on every read.""",
        **NO_OPTION,
    )
    checkpoints_kept: int | None = setting(
        None,
        Count(0),
        """How many checkpoints' slots stay reserved on the paths. The plan makes sure that there is room for them and
        for the next one. None: 1, or as there is room: without it, saving raises.""",
        **NO_OPTION,
    )
    mirror: str | None = setting(
        None,
        check_mirror,
        """A directory that exists, or "s3://bucket/prefix", that gets a copy of each committed checkpoint behind
        training: a self-contained one, in a folder of the same name. The plan makes room for one more checkpoint on
        the paths, which is kept while it is copied. Where several are committed meanwhile, the newest is next.
        Checkpoints that are copies anyway are not mirrored.""",
        **NO_OPTION,
    )
    io_backend: str = setting(
        "auto",
        OneOf("auto", "threads", "asyncio", earlier=("io_uring",)),
        """How directories are read and written: "threads", "asyncio" (through aiofiles), or "auto": threads, and
        asyncio on network file systems without O_DIRECT. "io_uring", of earlier versions, is "threads".""",
        **NO_OPTION,
    )
    path_lock: str | int = setting(
        "auto",
        OneOf("auto", "on", "off", number=Count(1, MAX_HOLDERS)),
        """Whether processes of this node take turns on a path: "on" (one at a time), a number (so many at a time, the
        same in all processes), "off", or "auto": off, as long as no device is known on which turns pay (bench/lock.py
        measures yours). The lock is among the processes that see the same /dev/shm; object stores and asyncio take no
        turns.""",
        **NO_OPTION,
    )
    stall_timeout_s: float = setting(
        300.0,
        check_seconds,
        """Seconds without an answer from any device, with something asked for, after which the session gives up on
        them.""",
        **NO_OPTION,
    )
    lock_timeout_s: float = setting(
        30.0,
        check_seconds,
        """Seconds of waiting for a turn after which a warning names the process that has it.""",
        **NO_OPTION,
    )
    placement: str | float = setting(
        "auto",
        check_placement,
        """The device that runs updates where weights lie on a GPU: "auto" for whatever the model finds fastest,
        chosen again by what the first steps show, "cpu", "gpu", or the GPU's share from 0 to 1. State at home on the
        GPU is updated there anyway. Where weights lie on the CPU, "auto" and "cpu" are all there is.""",
        plan=Flag(
            'where state is updated: "cpu", "gpu", the share of it on the GPU (0.5), "stride:<k>" for every k-th '
            'subgroup there, or "auto", whatever is fastest (default: auto)',
            "P",
        ),
        train=None,
        advised=Tried(),
    )
    rates: str | os.PathLike[str] = setting(  # noqa: RUF009
        "auto",
        check_rates,
        """Where the first rates come from; every step refines them. "auto": this machine's file, which `offload
        probe` writes, if there is one that fits and has all paths, else a short probe (about half a second; it passes
        over as much memory as the session takes, up to 512 MiB or three times the last-level caches, and at most an
        eighth of what is free). Or such a file, which must fit.""",
        plan=None,
        train=Flag("what `offload probe` wrote (default: this machine's file if it fits, else a short probe)"),
    )
    state_format: str = setting(
        "exact",
        OneOf(*STATE_FORMATS),
        """How state is stored, everywhere: "exact" (fp32); "compact16": the master in fp32, the tensors beside it in
        bf16; or "compact8": the upper 24 bits of the master, and 8-bit codes that share scales in blocks of 64. Both
        are rounded stochastically. With Adam and 16-bit weights they take 8 and 5.03 bytes a parameter and not 12.
        The same seed gives the same bits on every placement.""",
        plan=Flag("how state is stored: in fp32, or rounded to 16 or 8 bits, docs/formats.md (default: exact)"),
        train=Flag("how state is stored: in fp32, or rounded to 16 or 8 bits, docs/formats.md (default: exact)"),
        advised=Tried(tuple(STATE_FORMATS), "which rounds state", asks=100),
        alike=True,
    )
    exact_names: Sequence[str] = setting(
        EXACT_NAMES,
        check_patterns,
        """Patterns (as in a shell) of names of parameters that "compact8" keeps exact, as it does all with fewer than
        two dimensions or 4,096 elements. By default those of embeddings and of the output layer.""",
        **NO_OPTION,
        alike=True,
    )
    seed: int = setting(
        0,
        Count(0),
        """What stochastic rounding depends on, beside each parameter's number, update and element; the same on all
        ranks. A checkpoint brings its own, unless all its state is exact.""",
        **NO_OPTION,
        alike=True,
    )
    shard: bool = setting(
        False,
        check_bool,
        """Whether each rank of `torch.distributed` keeps and updates state of its rows of every weight alone, where
        gradients are reduced on all, as under DDP; ranks exchange new weights in `step()`. Weights and gradients stay
        whole on every rank. For the optimizers of this package with plain tensors.""",
        **NO_OPTION,
        alike=True,
    )
    overlap: str = setting(
        "off",
        OneOf(*OVERLAPS),
        """Where a step is hidden: "off", "forward" (in the next forward pass), "backward", "both", or "auto" (each is
        tried, and the fastest kept). The numbers are the same; [step.md](step.md#where-a-step-is-hidden) says what
        each takes, and where it works.""",
        plan=None,
        train=Flag(
            "hide the optimizer's step in the next forward pass, in backward, in both, or wherever that should pay "
            "(default: off); the numbers are the same"
        ),
        advised=Tried(),
    )

    def __post_init__(self) -> None:
        """Check each setting and keep what its check returns; then refuse combinations."""
        for one in fields(self):  # set by `object`: this class is frozen
            object.__setattr__(self, one.name, _checked_value(one, one.name, getattr(self, one.name)))
        if self.gradient_memory is not None:
            if not self.paths:
                combinations.WITHOUT_PATHS.refuse("gradient_memory", self.gradient_memory, what="gradients")
            combinations.UPDATES_IN_BACKWARD.check("overlap", self.overlap)
        if self.overlaps_forward:
            self.check_goes_on()
        if self.io_backend == "asyncio" and self.path_lock not in ("auto", "off"):
            combinations.NO_TURNS.refuse("path_lock", self.path_lock)
        if self.mirror is not None:
            if not self.paths or not self.checkpoints:
                combinations.MIRRORED_COPIES.refuse("mirror", self.mirror)
            self._check_mirror_outside_of_paths(self.mirror)

    def _check_mirror_outside_of_paths(self, mirror: str) -> None:
        """Raise `ConfigError` if the mirror lies within a path: a copy there would be lost with its checkpoint."""
        from offload.tiers import parse_place  # as in `for_rank`

        parts = parse_place(mirror, "mirror").parts()
        for path in self.path_configs:
            path_parts = parse_place(path.path).parts()
            if parts[: len(path_parts)] == path_parts:
                raise ConfigError("mirror", mirror, f"name a place outside of {path.path}, on another device")

    @property
    def node_bytes(self) -> dict[int, int]:
        """Bytes of host memory for state on each memory node, by its number; empty where none is named."""
        nbytes_by_name = self.host_memory if isinstance(self.host_memory, dict) else {}
        return {int(name.removeprefix("node")): nbytes for name, nbytes in nbytes_by_name.items()}

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory for state, on all nodes together; None where `host_memory` is not set."""
        return sum(self.node_bytes.values()) if self.node_bytes else self.host_memory  # type: ignore[return-value]

    @property
    def staging_bytes(self) -> int | None:
        """Bytes of host memory for staging slots; None where `staging_memory` is not set."""
        return None if self.staging_memory is None else int(self.staging_memory)

    @property
    def format(self) -> StateFormat:
        """What `state_format` names."""
        return STATE_FORMATS[self.state_format]

    def state_of(self, rule: UpdateRule) -> StateSpec:
        """Return what state a rule's parameters have, and how it is stored."""
        return StateSpec(rule, self.format)

    @property
    def borrows(self) -> bool:
        """Whether GPU memory is borrowed: used from the end of backward to the next forward pass only."""
        return self.gpu_memory == BORROW

    def check_dealt(self) -> None:
        """Check the settings for an optimizer with dealt matrices, whose gradients go to other ranks, not to paths.

        Raises:
            ConfigError: `gradient_memory` is set.
        """
        if self.gradient_memory is not None:
            combinations.DEALT_GRADIENTS.refuse("gradient_memory", self.gradient_memory)

    @property
    def keeps_grads(self) -> bool:
        """Whether gradients stay in `.grad` until the step; else they leave during backward."""
        return self.keep_grads and self.gradient_memory is None

    @property
    def opens_late(self) -> bool:
        """Whether a session with weights on a GPU is deferred: the first backward pass shows what is free there."""
        return self.gpu_memory == "auto" or self.borrows

    def opened_early(self) -> OffloadConfig:
        """Return this config for a session that opens before the first backward pass.

        `gpu_memory` "auto" is then 0: no state is at home on the GPU, as it is not known yet what the GPU has free.
        """
        return dataclasses.replace(self, gpu_memory=0) if self.gpu_memory == "auto" else self

    def updated_by_cpu(self, row: combinations.Row | None = None, **words: object) -> OffloadConfig:
        """Return this config for a session in which the CPU updates all state, and none is at home on a GPU.

        Args:
            row: The row of `combinations` by which settings that ask for the GPU are refused; None to overrule them.
            words: See `Row.refuse`.

        Raises:
            ConfigError: A setting says otherwise.
        """
        if row is not None and self.placement not in ("auto", "cpu", 0):  # 0: the GPU's share
            row.refuse("placement", self.placement, least='"cpu"', **words)
        if row is not None and self.gpu_memory not in ("auto", 0):  # "borrow", too
            row.refuse("gpu_memory", self.gpu_memory, least=0, **words)
        return dataclasses.replace(self, placement="cpu", gpu_memory=0)

    def check_goes_on(self) -> None:
        """Check that a step may go on during the next forward pass.

        Raises:
            ConfigError: GPU memory is borrowed, which is returned before forward.
        """
        if self.borrows:
            combinations.BORROWED.refuse("gpu_memory", self.gpu_memory)

    @property
    def overlaps_forward(self) -> bool:
        """Whether `overlap` asks for steps that are hidden in the next forward pass; not for "auto", which tries."""
        return self.overlap in ("forward", "both")

    @property
    def overlaps_backward(self) -> bool:
        """Whether `overlap` asks for steps that are hidden in backward; not for "auto", which tries."""
        return self.overlap in ("backward", "both")

    @property
    def checkpoints(self) -> int:
        """How many checkpoints are kept on the paths: `checkpoints_kept`, or 1 where that is not set."""
        return 1 if self.checkpoints_kept is None else self.checkpoints_kept

    @property
    def path_configs(self) -> tuple[PathConfig, ...]:
        """The paths as `PathConfig`s, into which the constructor has parsed whatever was given."""
        return tuple(path for path in self.paths if isinstance(path, PathConfig))

    def budgets(
        self,
        host_bytes: int,
        paths: Sequence[PathBudget],
        *,
        on_gpu: bool,
        gpu_bytes: int,
        gpu_staging_bytes: int,
        gradient_bytes: int,
        gradients_kept_bytes: int | None,
    ) -> Budgets:
        """Return the memory and room that a plan may use.

        The arguments are sizes that depend on the machine and the model; all else follows from the settings.

        Args:
            host_bytes: Host memory that `host_memory` comes to.
            paths: What each of `paths` offers.
            on_gpu: Whether the weights lie on a GPU.
            gpu_bytes: GPU memory that `gpu_memory` comes to.
            gpu_staging_bytes: GPU memory for staging slots.
            gradient_bytes: Host memory of gradient slots or buffers.
            gradients_kept_bytes: Host memory that `gradient_memory` comes to; None if all gradients have slots.
        """
        from offload.plan import Budgets, NodeBudget  # here, as most users of a config do not need them

        return Budgets(
            gpu_bytes=gpu_bytes,
            gpu_staging_bytes=gpu_staging_bytes,
            borrows=self.borrows,
            weights_on_gpu=on_gpu,
            gradients_on_gpu=on_gpu and self.keep_grads,
            host_bytes=host_bytes,
            staging_bytes=self.staging_bytes,
            paths=tuple(paths),
            gradient_bytes=gradient_bytes,
            gradients_kept_bytes=gradients_kept_bytes,
            gradient_item_bytes=4 if self.gradient_dtype == "float32" else 0,  # 0: as large as the weight's
            speculates=self.overlaps_backward,
            follow_rates=all(path.share is None for path in self.path_configs),
            checkpoints=self.checkpoints,
            checkpoints_required=bool(self.checkpoints_kept),  # None requires none: one is kept if there is room
            mirrors=self.mirror is not None,
            nodes=tuple(starmap(NodeBudget, self.node_bytes.items())),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], name: str = "offload") -> OffloadConfig:
        """Return a config from the same names as the fields, as read from JSON.

        Args:
            values: The fields.
            name: What errors call the whole.

        Raises:
            ConfigError: If a key is unknown or a value is not usable.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(name, values, "give an object of OffloadConfig's fields")
        _check_keys(name, values, [one.name for one in fields(cls)])
        return cls(**values)

    def in_memory(self, **settings: Any) -> OffloadConfig:
        """Return a config that gives the same bits as this one, with all state in host memory and no hidden steps.

        Settings on which bits, or the cut of work, depend are kept; all others have their defaults.

        Args:
            settings: Further settings of the new config.
        """
        alike = {one.name: getattr(self, one.name) for one in fields(self) if one.metadata["alike"]}
        return OffloadConfig(**alike, **settings)

    def check_paths(self) -> None:
        """Verify that this machine has the paths, and that they can be written; touches nothing.

        Raises:
            ConfigError: One is not there or cannot be written.
        """
        from offload.tiers import parse_place  # as in `for_rank`

        for number, path in enumerate(self.path_configs):
            parse_place(path.path, f"paths[{number}]").check(f"paths[{number}]")

    def for_rank(self, rank: int) -> OffloadConfig:
        """Return this config with a directory (or prefix) of the rank's own on every path, made if need be.

        So the place of a store shows whose it is. The lock of a path stays the same for all ranks, which take turns.

        Raises:
            ConfigError: If a path is not there or cannot be written.
        """
        from offload.tiers import parse_place  # loads native code, which not every config needs

        paths = []
        for number, path in enumerate(self.path_configs):
            field = f"paths[{number}]"
            place = parse_place(path.path, field)
            rank_place = place.for_rank(rank, field)
            lock_path = path.lock_path or place.lock_path  # not the rank's: turns are taken among ranks
            paths.append(dataclasses.replace(path, path=rank_place.path, lock_path=lock_path))
        return dataclasses.replace(self, paths=paths)

    def for_part(self, part: int, whole: int) -> OffloadConfig:
        """Return this config for one of several engines in a process, which share its budgets.

        The engine gets the part `part / whole` of `host_memory`, of `gpu_memory` and of each path's `max_bytes`: at
        least `LEAST_BUDGET`, but 0 of a budget of 0, or if it has no state. All else holds for each engine alone.

        Args:
            part: Elements of this engine's parameters.
            whole: Elements of all engines' parameters.
        """

        def part_of(budget: Any) -> Any:
            """Return this engine's part of a size, or of each node's; words and None stay."""
            if isinstance(budget, dict):
                return {node: part_of(nbytes) for node, nbytes in budget.items()}
            if not isinstance(budget, int):
                return budget
            return max(LEAST_BUDGET, budget * part // max(whole, 1)) if budget and part else 0

        paths = [dataclasses.replace(path, max_bytes=part_of(path.max_bytes)) for path in self.path_configs]
        budgets = {name: part_of(getattr(self, name)) for name in ("host_memory", "gpu_memory")}
        return dataclasses.replace(self, paths=paths, **budgets)
