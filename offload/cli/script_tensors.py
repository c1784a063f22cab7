"""The tensors of a script: what the globals of its modules and the locals of its open functions lead to."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

import offload
from offload.cli.check_run import MOST_OBJECTS
from offload.optim.optimizer import OffloadedOptimizer

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_FOREIGN = ("offload", *sys.stdlib_module_names)
"""Packages whose objects are not looked into."""
_PARTS_OF_MODULES = ("_parameters", "_buffers", "_modules")


def script_tensors(script: str, frame: FrameType | None) -> tuple[dict[str, torch.Tensor], bool]:
    """Return each tensor that a script has, by the shortest name that leads to it; and whether these are all.

    Modules below the script's folder are its own, too, if they are not installed. At most `MOST_OBJECTS` are looked
    at, the nearest first.

    Args:
        script: Its file.
        frame: The innermost function that is running; the script's among its callers are looked into.
    """
    is_own = _own_files(script)
    modules = {name: m for name, m in [*sys.modules.items()] if is_own(getattr(m, "__file__", None))}
    roots = [("" if name == "__main__" else f"{name}.", "", vars(module)) for name, module in modules.items()]
    while frame is not None:
        if is_own(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            roots.append(("", f" in {frame.f_code.co_name}()", frame.f_locals))
        frame = frame.f_back
    waiting = deque(
        (f"{before}{name}", after, value) for before, after, names in roots for name, value in [*names.items()]
    )
    found: dict[str, torch.Tensor] = {}
    seen: dict[int, Any] = {}  # which keeps the objects, so that no two have one id
    while waiting and len(seen) < MOST_OBJECTS:
        name, after, value = waiting.popleft()
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and not value.is_meta:
                found.setdefault(f"{name}{after}", value)
        else:
            waiting.extend((f"{name}{part}", after, child) for part, child in _parts(value, modules))
    return found, not waiting


def _own_files(script: str) -> Callable[[str | None], bool]:
    """Return a function that says of a file whether it is the script, or a module beside it."""
    path = Path(script).resolve()
    others = [Path(place) for place in (sys.prefix, sys.base_prefix, Path(offload.__file__).parent)]

    def is_own(file: str | None) -> bool:
        if file is None:
            return False
        own = Path(file).resolve()
        installed = "site-packages" in own.parts or any(own.is_relative_to(other) for other in others)
        return own == path or (own.is_relative_to(path.parent) and not installed)

    return is_own


def _parts(value: Any, modules: dict[str, ModuleType]) -> Iterator[tuple[str, Any]]:
    """Yield what an object is made of, each with what stands behind the object's name."""
    if isinstance(value, dict):
        for number, (key, child) in enumerate([*value.items()]):  # torch's optimizers have tensors as keys
            yield f"[{key!r}]" if isinstance(key, _PLAIN) else f"[{number}]", child
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{number}]", child) for number, child in enumerate([*value]))
    elif isinstance(value, (FunctionType, type)):
        if value.__module__ in modules:
            yield from ((f".{name}", child) for name, child in [*vars(value).items()])
            with contextlib.suppress(ValueError):  # of a variable that has no value yet
                for name, cell in zip(*_closure(value), strict=True):
                    yield f".{name}", cell.cell_contents
    elif not isinstance(value, (ModuleType, OffloadedOptimizer)) and (
        isinstance(value, SimpleNamespace) or type(value).__module__.partition(".")[0] not in _FOREIGN
    ):
        for name, child in [*getattr(value, "__dict__", {}).items()]:
            inner = name in _PARTS_OF_MODULES and isinstance(value, torch.nn.Module)
            yield from ((f".{part}", each) for part, each in ([*child.items()] if inner else [(name, child)]))


def _closure(value: FunctionType | type) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    return (value.__code__.co_freevars, value.__closure__ or ()) if isinstance(value, FunctionType) else ((), ())
