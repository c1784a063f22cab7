"""Every error that this package raises on purpose.

OffloadError                 each can be pickled, copied, and raised in another process
├── ConfigError              your input: names the field, the value and what is allowed
├── PlanError
│   └── InfeasiblePlanError  does not fit: needed and available bytes, per tier
├── TierError                a device failed: tier, path, operation, offset, errno
│   ├── TierFullError        no room left on a path
│   ├── CorruptRecordError   what was read is not what was written
│   └── TierClosedError      used after close
├── CheckpointError          a checkpoint could not be written or read
├── StepAbortedError         a step could not be finished: step, cause, subgroups that had moved
├── SessionBrokenError       the session is closed or broken; what to do instead
└── InternalError            our bug, please report
"""

from __future__ import annotations

import copy
import errno as _errno
import pickle
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeVar, cast

from offload.units import format_bytes, format_count

T = TypeVar("T")

MAX_SHOWN = 300
"""Most characters of a value that an error repeats."""


class TravellingError(Exception):
    """An error that can be copied, pickled, and raised in another process, whatever its constructor takes.

    Its message, attributes, notes and `__cause__` go with it; what cannot be pickled goes as text.
    """

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Return how pickle and copy make the error again: `_make_blank`, its argument, and what is set afterwards.

        `Exception`'s own way calls the constructor with `args`, the message alone: many constructors need other
        arguments.
        """
        carried: dict[int, _Carried] = {}  # by the values' ids

        def carry(value: object) -> object:
            """Return what is pickled for an attribute: a `_Carried`, or the value if that is a `TravellingError`."""
            if isinstance(value, TravellingError):
                return value  # pickled in place, so that errors may refer to each other
            return carried.setdefault(id(value), _Carried(value))  # what several attributes share stays one

        # The message is in `args`; notes are in `vars`.
        values = {**vars(self), "args": self.args, "__cause__": self.__cause__}
        values["__suppress_context__"] = self.__suppress_context__  # last, as setting `__cause__` changes it
        return _make_blank, (type(self),), {name: carry(value) for name, value in values.items()}

    def __setstate__(self, state: Mapping[str, Any] | None) -> None:
        """Set the attributes that `__reduce_ex__` has returned, by name; pickle and copy call this."""
        for name, value in (state or {}).items():
            setattr(self, name, value.value if isinstance(value, _Carried) else value)


def _make_blank(error_class: type[TravellingError]) -> TravellingError:
    """Return a new error without attributes; its constructor is not called, as the arguments for it are not known."""
    return error_class.__new__(error_class)


class _Carried:
    """One value of an error's attributes, pickled apart from the others: if that fails, only it becomes text."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Carried:
        """Copy the value, or share it if it cannot be copied."""
        try:
            return _Carried(copy.deepcopy(self.value, memo))
        except Exception:
            return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return `_unpack_carried` and its argument: the pickled value, or its pickled text if pickle refuses it."""
        try:
            packed = pickle.dumps(self.value)
            pickle.loads(packed)  # a try: exceptions of other packages can often be pickled but not unpickled
        except Exception:
            packed = pickle.dumps(_textual(self.value))
        return _unpack_carried, (packed,)


def _textual(value: object) -> object:
    """Return the text of a value that pickle refuses; of an exception, an `OffloadError` with that text."""
    if isinstance(value, BaseException):
        return OffloadError(_shown(value))
    if type(value) is tuple:  # `args`, say, must stay a tuple; a message in it stays as it is
        return tuple(item if isinstance(item, str) else _textual(item) for item in value)
    return _shown(value)


def _unpack_carried(packed: bytes) -> _Carried:
    """Return what `_Carried.__reduce__` has packed."""
    return _Carried(pickle.loads(packed))


class OffloadError(TravellingError):
    """Base of all errors raised on purpose by this package."""


class _Missing(Enum):
    MISSING = "nothing was given"


MISSING: Final = _Missing.MISSING
"""The value of a `ConfigError` if nothing was given. Not None: the message would show a None that nobody wrote."""


class ConfigError(OffloadError, ValueError):
    """Your input cannot be used.

    Args:
        field: Name of the setting or argument.
        value: What was found; `MISSING` where nothing was given.
        allowed: What would be accepted, or what to do.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        wrong = " is missing" if value is MISSING else f": {_shown(value)} cannot be used"
        super().__init__(f"{field}{wrong}; {allowed}")


def _shown(value: object) -> str:
    """Return the text of any value for messages, cut if it is long."""
    try:
        text = repr(value)
    except Exception:  # an integer of very many digits, say
        return f"what was given ({type(value).__name__})"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class PlanError(OffloadError):
    """No plan could be made."""


class InfeasiblePlanError(PlanError):
    """The state does not fit into the tiers together.

    Args:
        what: What was being placed.
        needed_bytes: Bytes that have to be placed.
        available_bytes: Bytes that each tier or path offers, by name.
        advice: What to change.
    """

    def __init__(self, what: str, needed_bytes: int, available_bytes: dict[str, int], advice: str) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = dict(available_bytes)
        self.advice = advice
        offers = ", ".join(f"{name}: {_exactly(count)}" for name, count in available_bytes.items()) or "nothing"
        super().__init__(f"{what} needs {_exactly(needed_bytes)} but there is {offers}; {advice}")


def _exactly(nbytes: int) -> str:
    """Return a size both rounded and in bytes."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


class TierError(OffloadError):
    """A tier could not do what it was asked.

    Args:
        operation: "read", "write", "open", "reserve", "sync", ...
        tier: Name of the tier ("file", "memory", ...).
        path: The path concerned, as the user wrote it.
        offset: Byte offset in the store, where there is one.
        errno: The system's error number, where there is one.
        detail: What else is known, such as the tile's name.
    """

    def __init__(
        self,
        operation: str,
        *,
        tier: str,
        path: str,
        offset: int | None = None,
        errno: int | None = None,
        detail: str = "",
    ) -> None:
        self.operation = operation
        self.tier = tier
        self.path = path
        self.offset = offset
        self.errno = errno
        self.detail = detail
        where = f" at byte {offset}" if offset is not None else ""
        code = f": {_errno.errorcode.get(errno, errno)}" if errno is not None else ""
        more = f" ({detail})" if detail else ""
        super().__init__(f"{operation} failed on {tier} path {path}{where}{code}{more}")


class TierFullError(TierError):
    """No room is left on a path."""


class CorruptRecordError(TierError):
    """A record that was read is not the one that was written; nothing of it was used."""


class TierClosedError(TierError):
    """The tier was used after it had been closed."""


class CheckpointError(OffloadError):
    """A checkpoint could not be written or read."""


class StepAbortedError(OffloadError):
    """A step could not be finished, so the session is broken.

    Args:
        step: Number of the step.
        cause: The error that stopped it.
        moved: Indices of the subgroups whose update had already finished.
        checkpoint: Folder of the last checkpoint that this session has committed or loaded, if there is one.
    """

    def __init__(self, step: int, cause: BaseException, moved: Sequence[int], checkpoint: str | None = None) -> None:
        self.step = step
        self.cause = cause
        self.moved = tuple(moved)
        self.checkpoint = checkpoint
        happened = (
            f"{format_count(len(self.moved), 'subgroup')} had been updated {list(self.moved)}, so weights and state "
            "belong to no step"
            if self.moved
            else "Nothing had been updated"
        )
        super().__init__(
            f"step {step} was aborted: {cause}. {happened}; resume from {checkpoint or 'the last checkpoint'}"
        )


class SessionBrokenError(OffloadError):
    """The session cannot be used any more: it was closed, it broke, or it belongs to another process."""


class InternalError(OffloadError):
    """Something that cannot happen has happened: a bug in this package, please report it."""


def invariant(condition: object, message: str) -> None:
    """Raise `InternalError` with `message` unless `condition` holds; unlike `assert` also under `python -O`."""
    if not condition:
        raise InternalError(f"{message} (this is a bug in offload, please report it)")


def check_text(field: str, value: str, allowed: str = "use a path whose name is UTF-8") -> None:
    """Refuse text that native code and checkpoints cannot take: it has no UTF-8 form, or contains a zero character.

    Raises:
        ConfigError: It is such a text; names `field`, and says what is `allowed`.
    """
    try:
        value.encode()
        is_utf8 = True
    except UnicodeEncodeError:
        is_utf8 = False
    if not is_utf8 or "\0" in value:
        raise ConfigError(field, value, allowed)


def known(value: T | None, message: str) -> T:
    """Return `value`, for type checkers that cannot tell that it is never None here.

    Raises:
        InternalError: It is None; the error has `message`.
    """
    invariant(value is not None, message)
    return cast(T, value)
