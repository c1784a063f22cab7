"""Recordings: files beside the tests that say how the package behaved, and how they are compared.

A part is a function that observes, and the name of its file in `recorded/`. `check` compares; `write` writes anew and
returns what differs. `python -m net.record` writes parts from the command line.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"

ANEW = "If the change is wanted: cd tests && python -m net.record {}"


def digest(data: bytes) -> str:
    """Return a short name of bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def as_text(observed: Any) -> str:
    """Return what was observed as it stands in its file: text as it is, anything else as JSON, a leaf a line."""
    if isinstance(observed, str):
        return observed
    return json.dumps(observed, indent=1, ensure_ascii=False) + "\n"


def recorded(file: str) -> Any:
    """Return what a file says; nothing where there is none yet."""
    path = FOLDER / file
    if not path.exists():
        return {} if path.suffix == ".json" else ""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else text


def differences(before: Any, after: Any) -> str:
    """Return the lines that are gone and those that are new, or nothing."""
    lines = difflib.unified_diff(
        as_text(before).splitlines(), as_text(after).splitlines(), "recorded", "now", lineterm="", n=1
    )
    return "\n".join(lines)


def check(part: str, before: Any, after: Any) -> None:
    """Fail with what differs, and how to record it."""
    found = differences(before, after)
    if found:
        raise AssertionError(f"{part} is not as recorded.\n{found}\n{ANEW.format(part)}")


def write(file: str, observed: Any) -> str:
    """Write a recording and return what differs from the one before."""
    found = differences(recorded(file), observed)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / file).write_text(as_text(observed), encoding="utf-8")
    return found
