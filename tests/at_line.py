"""Something that happens at the n-th line of a call, and programs to which it happens at every line."""

from __future__ import annotations

import contextlib
import dis
import functools
import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import offload

PACKAGE = os.path.dirname(offload.__file__)


@functools.cache
def _exception_entries(code: CodeType) -> list[Any]:
    """Return which instructions of some code are handled where they raise; asked at each line."""
    return dis.Bytecode(code).exception_entries


class AtLine:
    """Does something once, at the n-th line that this thread runs of some code.

    An interrupt comes at no line of `with`, to which its block returns: no signal comes between the end of that and
    what gives a lock back, which would be another thread's for good. Nor at a line that CPython 3.13 leaves out of
    the block's table of exceptions, as where a comprehension begins: what is raised there passes `__exit__` by.

    Args:
        nth: From 0 on.
        within: Code, by the beginnings of its files' names, or functions' code.
        act: What is called there, as a signal's handler may be; None to raise `KeyboardInterrupt`.
    """

    def __init__(
        self, nth: int, within: tuple[str | CodeType, ...] = (PACKAGE,), act: Callable[[], Any] | None = None
    ) -> None:
        self.left, self.act = nth, act
        self.where = ""
        self._files = tuple(each for each in within if isinstance(each, str))
        self._codes = [each for each in within if not isinstance(each, str)]

    @property
    def has_fired(self) -> bool:
        return self.left < 0

    def __enter__(self) -> AtLine:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Return what a call returns, None if it was interrupted."""
        with contextlib.suppress(KeyboardInterrupt), self:
            return call()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        return self._line if code.co_filename.startswith(self._files) or code in self._codes else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self.has_fired and not (self.act is None and self._passes_exit_by(frame)):
            self.left -= 1
            if self.has_fired:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                if self.act is None:
                    raise KeyboardInterrupt
                self.act()
        return self._line

    @staticmethod
    def _passes_exit_by(frame: FrameType) -> bool:
        """Return whether what is raised at a line may leave a `with` block without its end."""
        if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return True
        if sys.version_info < (3, 13):
            return False
        at, entries = frame.f_lasti, _exception_entries(frame.f_code)
        is_handled = any(entry.start <= at < entry.end for entry in entries)
        return not is_handled and any(e.start <= at for e in entries) and any(at < e.end for e in entries)


def at_every_line(
    program: Callable[[AtLine], object], stride: int = 1, within: tuple[str | CodeType, ...] = (PACKAGE,)
) -> set[str]:
    """Run a program again and again, each time with an interrupt for the call that it makes, until that gets through.

    Args:
        program: Makes its call by what it is given, and looks at what has come of it.
        stride: At every such line; a prime, so that no loop is always met at the same line.
        within: See `AtLine`.

    Returns:
        The files at whose lines it was interrupted.
    """
    files, nth = set(), 0
    while True:
        interrupt = AtLine(nth, within)
        program(interrupt)
        if not interrupt.has_fired:
            return files
        files.add(interrupt.where.rpartition(":")[0])
        nth += stride
