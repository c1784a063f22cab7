"""Every exception class of this package can be copied, pickled and raised in another process."""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, get_type_hints

import prepared
import pytest
import torch

from offload.errors import CheckpointError, ConfigError, OffloadError, StepAbortedError, TierError, TravellingError
from offload.schedule.operations import ReadTile

REPOSITORY = Path(__file__).parents[2]

SAMPLES: dict[Any, Any] = {
    object: ["found", 3],
    str: "text",
    str | None: "some text",
    int: 7,
    int | None: 5,
    bool: True,
    dict[str, int]: {"host": 3},
    BaseException: OSError(28, "No space left on device"),
    Sequence[int]: (2, 3),
    ReadTile: "an operation",
}
"""What constructors are called with, by the annotation of an argument: one that is missing here fails the tests."""


def modules_with_errors() -> list[str]:
    """Return the modules that have an exception class, by their source: not all modules can be imported."""
    folders = {"offload": REPOSITORY / "offload", "offload.integrations": REPOSITORY / "integrations"}
    classes = [
        (".".join([prefix, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"), node)
        for prefix, folder in folders.items()
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    known = {n for n, found in vars(builtins).items() if isinstance(found, type) and issubclass(found, BaseException)}
    bases = [(m, n.name, {ast.unparse(b).split("[")[0].split(".")[-1] for b in n.bases}) for m, n in classes]
    count = 0
    while count < len(known):  # a base may come after what is derived from it
        count = len(known)
        known |= {name for _, name, of in bases if known & of}
    return sorted({module for module, _, of in bases if known & of})


def below(kind: type) -> set[type]:
    return {kind}.union(*(below(child) for child in kind.__subclasses__()))


MODULES = modules_with_errors()
for name in MODULES:
    importlib.import_module(name)
CLASSES = sorted((found for found in below(BaseException) if found.__module__ in MODULES), key=lambda c: c.__name__)


def sample(kind: type[BaseException]) -> BaseException:
    """Return an error of a class with a value for each argument, with notes and a cause."""
    code = getattr(kind.__init__, "__code__", None)  # else the builtin one, which takes whatever it is given
    hints = {} if code is None else get_type_hints(kind.__init__, vars(importlib.import_module(kind.__module__)))
    hints.pop("return", None)
    by_position = hints if code is None else code.co_varnames[1 : code.co_argcount]
    arguments = [SAMPLES[hints[name]] for name in by_position]
    named = {name: SAMPLES[hint] for name, hint in hints.items() if name not in by_position}
    found = kind(*arguments, **named) if hints else kind("what happened")
    found.add_note("a note")
    found.__cause__ = TierError("read", tier="file", path="/mnt", errno=5)
    return found


def look(value: object) -> object:
    """Return what two errors that are equal have in common."""
    if isinstance(value, BaseException):
        cause = look(value.__cause__) if isinstance(value, TravellingError) else None
        seen = {name: look(found) for name, found in vars(value).items()}
        return type(value), str(value), look(value.args), seen, cause
    return tuple(look(item) for item in value) if isinstance(value, tuple) else value


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle{protocol}": lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "python_pickle": lambda error: pickle._loads(pickle._dumps(error)),  # type: ignore[attr-defined]
}


def raise_it(number: int) -> None:
    raise sample(CLASSES[number])


def test_all_are_found() -> None:
    assert {"offload.errors", "offload.tiers.objects"} <= set(MODULES)
    assert {found.__name__ for found in CLASSES} >= {"ConfigError", "TierClosedError", "ObjectMissingError"}


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_are_copied(kind: type[BaseException]) -> None:
    error = sample(kind)
    for way, copied in COPIES.items():
        there = copied(error)
        assert look(there) == look(error), way
        assert there is not error, way
        if isinstance(error, TravellingError):
            assert there.__suppress_context__, way


@pytest.mark.slow
def test_errors_come_back_from_other_processes() -> None:
    context = multiprocessing.get_context("spawn")
    context.set_executable(prepared.python())
    numbers = [n for n, kind in enumerate(CLASSES) if issubclass(kind, Exception)]  # others end a process
    with context.Pool(1) as pool, ProcessPoolExecutor(1, context) as executor:
        jobs = [pool.apply_async(raise_it, (number,)) for number in numbers]
        futures = [executor.submit(raise_it, number) for number in numbers]
        for number, job, future in zip(numbers, jobs, futures, strict=True):
            for wait in (job.get, future.result):
                with pytest.raises(CLASSES[number]) as raised:
                    wait(200)
                assert look(raised.value)[:-1] == look(sample(CLASSES[number]))[:-1]  # type: ignore[index]
                assert type(raised.value.__cause__).__name__ in ("RemoteTraceback", "_RemoteTraceback")


class NeedsTwo(Exception):
    """As other packages have them: it can be pickled, and not be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def test_what_cannot_be_pickled_goes_as_text() -> None:
    error = ConfigError("field", lambda: None, "give another")
    error.other = [1]  # type: ignore[attr-defined]
    there = pickle.loads(pickle.dumps(error))
    assert str(there) == str(error)
    assert (there.field, there.other) == ("field", [1])
    assert there.value == repr(error.value)
    assert copy.copy(error).value is copy.deepcopy(error).value is error.value


@pytest.mark.parametrize("way", ["pickle0", "pickle5", "deepcopy"])
@pytest.mark.parametrize("cause", [NeedsTwo("this", "that"), ValueError(lambda: None)])
def test_a_cause_that_cannot_travel(cause: BaseException, way: str) -> None:
    error = StepAbortedError(3, cause, [1], "/checkpoint")
    error.__cause__ = cause
    there = COPIES[way](error)
    assert str(there) == str(error)
    assert (there.step, there.moved, there.checkpoint) == (3, (1,), "/checkpoint")
    assert there.cause is there.__cause__
    assert isinstance(there.cause, BaseException)
    assert repr(cause) in str(there.cause) or str(cause) == str(there.cause)
    assert pickle.loads(pickle.dumps(there)).step == 3  # once more


def test_arguments_that_cannot_be_pickled() -> None:
    error = OffloadError("what happened", lambda: None)
    there = pickle.loads(pickle.dumps(error))
    assert there.args == ("what happened", repr(error.args[1]))


def test_errors_that_name_each_other() -> None:
    for way, copied in COPIES.items():
        first, second = CheckpointError("first"), StepAbortedError(1, OSError(), [])
        first.__cause__, second.cause = second, first
        there = copied(first)
        assert there.__cause__.cause is (first if way == "copy" else there), way
        theirs = OSError("of others")
        theirs.owner = second  # type: ignore[attr-defined]
        second.cause = theirs
        assert str(copied(second)) == str(second), way


def test_a_value_that_cannot_be_copied() -> None:
    """A tensor inside of a graph can be pickled, and not be copied by `deepcopy`."""
    weight = torch.ones(2, requires_grad=True)
    error = ConfigError("lr", weight * 2, "give a number")
    assert str(copy.deepcopy(error)) == str(error)
    assert torch.equal(pickle.loads(pickle.dumps(error)).value, error.value)
