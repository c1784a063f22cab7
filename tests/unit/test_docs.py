"""The pages in docs/ say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

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


def test_the_configuration_page_is_generated() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.TARGET.read_text() == generate.page(), "run python docs/generate.py"


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
