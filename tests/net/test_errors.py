"""The texts of all errors are those that are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from net import errors
from net.recordings import check, recorded

EXAMPLE = """
class OffloadError(Exception): ...
class LostError(OffloadError):
    def __init__(self, what):
        super().__init__(f"{what} is lost")
ADVICE = "look again"
def need(found, name, what="a thing"):
    advice = f"{name}: {ADVICE}" if found else "give up"
    if not found:
        raise LostError(f"there is no {name}, {what}; {advice}")
def use(x):
    need(x, "key", "of brass")
    need(x, f"door {x}")
    return OffloadError("one", 2, three="four")
"""


@pytest.mark.slow
def test_texts_of_errors_are_as_recorded() -> None:
    check("errors", recorded(errors.FILE), errors.observe())


def test_texts_are_followed_through_names_and_calls(tmp_path: Path) -> None:
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload" / "example.py").write_text(EXAMPLE)
    assert errors.observe(root=tmp_path).splitlines() == [
        "LostError says: {} is lost",
        "LostError: there is no door {}, a thing; door {}: look again",
        "LostError: there is no door {}, a thing; give up",
        "LostError: there is no key, of brass; give up",
        "LostError: there is no key, of brass; key: look again",
        "OffloadError: one | {} | three=four",
    ]


@pytest.mark.parametrize("package", errors.PACKAGES)
def test_every_package_makes_errors(package: str) -> None:
    assert list((errors.ROOT / package).rglob("*.py"))
