"""Paths are parsed in one place: `offload.tiers.parse_place`, and what it calls."""

from __future__ import annotations

import ast
import os
import uuid
from collections import Counter
from pathlib import Path

import pytest
from test_import_contract import sources

from offload import ConfigError
from offload.checkpoint.folder import open_folder
from offload.tiers import parse_place

ASKING = {
    "compile",
    "count",
    "endswith",
    "find",
    "fullmatch",
    "index",
    "match",
    "partition",
    "removeprefix",
    "rpartition",
    "search",
    "split",
    "startswith",
}
"""Functions that look for something in a text."""

PARSERS = {"offload.tiers", "offload.tiers.directories", "offload.tiers.objects"}
"""What may ask once: which kind a path is of, and each kind for what comes after its scheme."""


def is_scheme(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "://" in node.value


def questions(source: str) -> int:
    """Return how often a module looks for a scheme in a text."""
    asked = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            asked += name in ASKING and any(is_scheme(part) for each in node.args for part in ast.walk(each))
        elif isinstance(node, ast.Compare):
            asked += is_scheme(node.left) or any(map(is_scheme, node.comparators))
    return asked


def test_nobody_but_the_parsers_asks_which_kind_a_path_is_of():
    asked = Counter({module: questions(source) for module, source in sources()})
    assert +asked == dict.fromkeys(PARSERS, 1)


@pytest.mark.parametrize(
    "source",
    [
        'if path.startswith("s3://"): pass',
        'found = path.startswith(("s3://", "file://"))',
        'name = path.removeprefix("file://")',
        'scheme, _, rest = path.partition("://")',
        'name = path if "://" in path else expanded',
        'known = path[:5] == "s3://"',
        'import re\nscheme = re.match("s3://", path)',
    ],
)
def test_a_question_is_seen(source: str):
    assert questions(source) == 1


def test_what_is_no_question_is_none():
    assert not questions('raise ConfigError("path", path, "name a directory or s3://bucket/prefix")')
    assert not questions('"""A directory, or s3://bucket/prefix."""\nurl = f"s3://{bucket}/x"')


def test_what_a_path_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = uuid.uuid4()
    for path, name in (("here", f"{tmp_path}/here"), (f"file://{tmp_path}/x", f"{tmp_path}/x"), ("a/b://c", None)):
        place = parse_place(path)
        assert place.has_locks
        assert place.name == (name or os.path.abspath(path))
        assert place.store(store).label == f"{path.removeprefix('file://')}/offload-{store}"
    bucket = parse_place("s3://bucket/run/")
    assert (bucket.path, bucket.name, bucket.has_locks, bucket.lock_path) == ("s3://bucket/run/",) * 2 + (False, None)
    assert bucket.search(store, [str(tmp_path)]) == []


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3:///run", "S3://bucket/run"])
def test_what_is_no_path_is_refused_by_its_name(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^given: .*s3://bucket/prefix") as caught:
        parse_place(path, "given")
    assert path in str(caught.value)


@pytest.mark.parametrize(("text", "scheme"), [("s3://bucket/run", "s3"), ("file:///run", "file")])
def test_a_path_of_pathlib_that_has_lost_a_slash_is_no_directory(text: str, scheme: str) -> None:
    path = os.fspath(Path(text))
    with pytest.raises(ConfigError, match=rf"^given: .*a pathlib\.Path cannot hold {scheme}://: give text"):
        parse_place(path, "given")
    with pytest.raises(ConfigError, match="give text"):
        open_folder(Path(text))
    assert parse_place(f"./{path}").name == os.path.abspath(path)


def test_the_stores_of_a_directory(tmp_path: Path) -> None:
    """Stores of ranks are among them, links and other names are none; what was moved is found by its name."""
    stores = [uuid.UUID(int=number) for number in range(3)]
    for number, store in enumerate(stores):
        (tmp_path / "path" / f"rank-{number}" / f"offload-{store}").mkdir(parents=True)
    root = tmp_path / "path"
    (root / f"offload-{stores[0]}").mkdir()
    (root / "offload-none").mkdir()
    (root / f"offload-{stores[1]}").symlink_to(root / "rank-1")
    place = parse_place(str(root))
    own = [f"{root}/offload-{stores[0]}"]
    assert [store.label for store in place.stores(ranks=False)] == own
    ranked = [f"{root}/rank-{number}/offload-{store}" for number, store in enumerate(stores)]
    assert [store.label for store in place.stores()] == own + ranked
    assert place.search(stores[2], [f"{root}/rank-0", "s3://bucket/run"]) == [f"{root}/rank-2"]
    assert place.search(stores[0], [str(root), str(root)]) == [str(root), f"{root}/rank-0"]
