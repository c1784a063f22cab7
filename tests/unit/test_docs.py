"""The pages in docs/ say what the code says."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.specifiers import SpecifierSet

import offload

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def source() -> str:
    """Return all code that may print something, its strings joined over lines."""
    files = [file for place in ("offload", "integrations") for file in sorted((ROOT / place).rglob("*.py"))]
    files.append(Path(torch.amp.grad_scaler.__file__))
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))


def anchors(page: Path) -> set[str]:
    """Return what the headings of a page are linked to by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generate")


PREDICTED = ("README", "planning")
"""Pages for which plans of every machine are searched, which takes half a minute."""
IN_FULL = pytest.param(True, marks=[pytest.mark.slow, pytest.mark.full])


@pytest.mark.parametrize("predicted", [False, IN_FULL])
def test_generated_pages_and_parts_are_what_is_generated(generate: ModuleType, predicted: bool) -> None:
    names = {page.stem for page in (*generate.PAGES, *generate.PARTS)}
    assert names > {*PREDICTED}
    pages = [[*generate.expected(name).items()] for name in sorted(names) if (name in PREDICTED) is predicted]
    assert {len(made) for made in pages} == {1}
    changed = {page.name for made in pages for page, text in made if page.read_text() != text}
    if sys.version_info[:2] != (3, 11):
        changed.discard("api.md")  # other versions write annotations in other ways
    assert not changed, "run make docs"


@pytest.mark.slow
def test_the_readme_s_first_and_last_machine_are_as_they_are_planned(
    generate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines, page = generate.machines, ROOT / "README.md"
    monkeypatch.setattr(machines, "MACHINES", (machines.MACHINES[0], machines.MACHINES[-1]))
    assert not {*machines.fitting(page).splitlines()} - {*page.read_text().splitlines()}


def test_a_figure_is_that_of_the_newest_report_of_its_kind(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = generate.figures
    monkeypatch.setattr(figures, "REPORTS", tmp_path)

    def report(name: str, value: float, **measured: object) -> None:
        document = {"environment": measured, "targets": [{"name": "speed", "value": value}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))

    report("2026-01-01-paths", 9.0, commit="0123456789", date="2026-01-01T00:00:00Z")
    report("2026-01-02-paths", 2.66, commit="abcdef0123", date="2026-01-02T00:00:00Z", uncommitted_changes=True)
    report("2026-01-03-other-paths", 5.0)
    page = generate.DOCS / "page.md"
    one = figures.Figure(("paths",), figures.target("speed"), "times")
    assert str(one) == "2.7"
    linked = "[paths](../bench/reports/2026-01-02-paths.json)"
    assert figures.Row("fast", ("{} times",), (one,)).line(page) == f"| fast | 2.7 times | {linked} |"
    assert figures.source("paths", page) == f"{linked} (2026-01-02, at abcdef0, with uncommitted changes)"
    assert figures.source("other-paths", page).endswith("(2026-01-03, commit not recorded)")
    assert str(figures.Figure(("other-paths", "paths"), figures.target("speed"), "times")) == "2.7 to 5"
    with pytest.raises(LookupError, match="no report of kernel"):
        figures.newest("kernel")


def test_parts_that_a_page_has_lost_are_missed(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PARTS", {ROOT / "LICENSE": {"versions": generate.versions}})
    with pytest.raises(LookupError, match="LICENSE has no part versions"):
        generate.expected()


def test_versions_that_tests_run_with_are_allowed(generate: ModuleType) -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    for package, name in generate.FRAMEWORKS.items():
        (shown,) = re.findall(rf"^\| {name} \| [^|]* \| ([\d.]+) \|$", page, re.MULTILINE)
        assert SpecifierSet(generate.allowed()[package]).contains(shown), package
        with contextlib.suppress(PackageNotFoundError):
            assert SpecifierSet(generate.allowed()[package]).contains(version(package)), package


@pytest.mark.parametrize(
    ("doc", "shown"),
    [
        ("Do it.", "Do it."),
        (
            "Do it.\n\nArgs:\n    a: One\n        more.\n    **b: Two.",
            "Do it.\n\n*Args*\n\n* `a`: One\n  more.\n* `**b`: Two.",
        ),
        ("Ask.\n\nReturns:\n    This: that\n    and more.", "Ask.\n\n*Returns*\n\nThis: that\nand more."),
        ("Show.\n\n        code: kept\n\n    Done.", "Show.\n\n    code: kept\n\nDone."),
    ],
)
def test_docstrings_become_markdown(generate: ModuleType, doc: str, shown: str) -> None:
    assert generate.reference.markdown(doc) == shown


def test_every_public_name_is_in_the_reference(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = generate.reference.page()
    assert [name for name in offload.__all__ if name not in page] == []
    monkeypatch.setattr(offload, "__all__", [*offload.__all__, "brand_new"])
    with pytest.raises(LookupError, match="brand_new"):
        generate.reference.page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_messages_that_are_explained_exist() -> None:
    said = source()
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 20
    pattern = re.compile(r"\{[^{}]*\}")
    missing = [h for h in headings if h not in said and h not in pattern.sub("", said)]
    assert not missing


def test_wrong_numbers_and_their_tests_are_the_same() -> None:
    """A test that has cases is named with the case that a report is about."""
    file = (ROOT / "tests" / "e2e" / "test_wrong_numbers.py").read_text()
    shown = re.findall(
        r"\| `(test_\w+)(?:\[(.*?)\])?` \|$", (ROOT / "docs" / "wrong-numbers.md").read_text(), re.MULTILINE
    )
    assert {name for name, _ in shown} == set(re.findall(r"^def (test_\w+)", file, re.MULTILINE))
    assert not [case for _, case in shown if f'"{case}"' not in file and case]
