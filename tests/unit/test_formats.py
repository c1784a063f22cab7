"""A format of state is known by name in few files: CONTRIBUTING.md lists them, and all others ask it."""

from __future__ import annotations

import ast
import copy
import pickle
import re

import pytest
from test_import_contract import ROOT, parsed, sources

from offload.formats import FORMATS, STATE_FORMATS, StateFormat

MOST_FILES = 8
EXAMPLE, NUMBERS = "compact8", "minifloat"
"""The format whose files CONTRIBUTING.md lists, and what the file that defines its numbers is called."""

SOURCES = {".py", ".pyi", ".h", ".cpp", ".txt"}


def naming(*words: str) -> set[str]:
    """Return the files of the product that have one of these words, in their name or their text."""
    named = re.compile("|".join(words), re.IGNORECASE)
    files = (path for folder in ("offload", "csrc", "integrations") for path in (ROOT / folder).rglob("*"))
    return {
        str(path.relative_to(ROOT))
        for path in files
        if path.suffix in SOURCES and (named.search(path.name) or named.search(path.read_text()))
    }


def listed() -> set[str]:
    """Return the files that CONTRIBUTING.md has under "A state format" in the points of its list."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("\n## A state format\n")[2].partition("\n## ")[0]
    points = re.findall(r"^\d\. (.*?)(?=^\d\. |^$)", section, re.MULTILINE | re.DOTALL)
    return {path for point in points for path in re.findall(r"`((?:offload|csrc|integrations)/[\w/.]+)`", point)}


def test_a_format_is_named_in_the_files_that_are_listed() -> None:
    assert naming(EXAMPLE, NUMBERS) == listed()
    assert len(listed()) <= MOST_FILES


@pytest.mark.parametrize("state_format", [found for found in FORMATS if found.rounds], ids=str)
def test_every_other_format_is_named_in_no_others(state_format: StateFormat) -> None:
    """But for the one of fp32, which is what the others are compared with: "exact" is a word of English."""
    assert naming(state_format.name) <= {path.replace(EXAMPLE, state_format.name) for path in listed()}


def questions(source: str) -> int:
    """Return how often a module asks which format something is."""
    constants = {found.name.upper() for found in FORMATS}
    asked = 0
    for node in ast.walk(parsed(source)):
        compared: list[ast.expr] = []
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.In | ast.NotIn):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        for part in compared:
            name = getattr(part, "attr", getattr(part, "id", ""))
            asked += name in constants or (isinstance(part, ast.Constant) and part.value in STATE_FORMATS)
    return asked


def test_nobody_asks_which_format_it_is() -> None:
    """But the kernel in Triton, in which all formats are branches of one function."""
    asked = {module for module, source in sources() if questions(source)}
    assert asked == {"offload.kernels.triton_kernels"}


@pytest.mark.parametrize(
    "source",
    [
        "planes = subgroup.state.format is COMPACT8",
        "if formats.EXACT is not state_format: pass",
        'small = config.state_format == "compact16"',
        "match state_format:\n    case formats.COMPACT16: pass",
    ],
)
def test_a_question_is_seen(source: str) -> None:
    assert questions(source) == 1


def test_what_is_no_question_is_none() -> None:
    assert not questions('rates = {EXACT: 1.0}\nmissing = EXACT not in rates\nname = "compact8"')


def test_codes_are_places_and_native_code_has_the_same() -> None:
    assert [found.code for found in FORMATS] == [*range(len(FORMATS))]
    cases = re.findall(r"case (\d+):\s+return work\((\w+)\(\)\);", (ROOT / "csrc/kernels/formats.h").read_text())
    assert [(int(code), name.lower()) for code, name in cases[: len(FORMATS)]] == [
        (found.code, found.name) for found in FORMATS
    ]


@pytest.mark.parametrize("state_format", FORMATS, ids=repr)
def test_there_is_one_of_each_format_in_copies_of_what_holds_it(state_format: StateFormat) -> None:
    held = {"format": state_format}
    for other in (pickle.loads(pickle.dumps(held)), copy.deepcopy(held), copy.copy(held)):
        assert other["format"] is state_format
