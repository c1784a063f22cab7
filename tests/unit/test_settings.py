"""A setting is declared once: where a new one has been forgotten is named, and all that take settings ask.

Figures of `metrics()` are named by the table of `offload.metrics`, by whoever computes or reads them.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import offload
from offload import metrics
from offload.cli import main, values
from offload.config import Count, Flag, OffloadConfig, PathConfig, setting
from offload.integrations.deepspeed import settings as deepspeed
from offload.integrations.shared import LOGGED
from offload.optim.figures import HEADLINES

ROOT = Path(__file__).resolve().parents[2]
DECLARED = {"check", "meaning", "plan", "train", "advised", "deepspeed", "alike"}
BEFORE = (
    "staging_memory",
    "subgroup_numel",
    "gradient_dtype",
    "checksum",
    "checkpoints_kept",
    "path_lock",
    "stall_timeout_s",
    "lock_timeout_s",
    "rates",
)
"""Settings of before CHANGELOG.md was begun, which need not be in it."""


def forgotten(config: type) -> list[str]:
    """Return where settings of a class are missing, in words, each with its setting."""
    page, changes = ((ROOT / name).read_text() for name in ("docs/configuration.md", "CHANGELOG.md"))
    tests = [file.read_text() for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    try:
        deepspeed.check({"no such key": 0})
    except offload.ConfigError as error:
        keys = error.allowed
    found = []
    for field in dataclasses.fields(config):
        name, word = field.name, re.compile(rf"\b{field.name}\b")
        if field.metadata.keys() != DECLARED:
            found.append(f"{name}: declare it by `setting` of offload/config.py")
            continue
        if f"| `{name}` |" not in page:
            found.append(f"{name}: docs/configuration.md has no row of it: python docs/generate.py")
        if not any(word.search(text) for text in tests):
            found.append(f"{name}: no test names it")
        if config is not PathConfig:
            if name not in BEFORE and not word.search(changes):
                found.append(f"{name}: CHANGELOG.md does not name it")
            if not word.search(keys):
                found.append(f"{name}: DeepSpeed's object does not know it")
        for command in ("plan", "train"):
            if field.metadata[command] is not None and field not in values.settings_of(command):
                found.append(f"{name}: `offload {command}` has no option for it")
    return found


def test_no_setting_is_forgotten_anywhere() -> None:
    assert forgotten(OffloadConfig) + forgotten(PathConfig) == []


def grown(**declared: Any) -> type:
    """Return a config with one setting more."""
    flags: dict[str, Any] = {"plan": Flag("how bright"), "train": None}
    added = setting(1, Count(1), "How bright it is.", **{**flags, **declared})
    return dataclasses.make_dataclass(
        "Grown", [("brightness", int, added)], bases=(OffloadConfig,), frozen=True, kw_only=True
    )


def test_each_place_in_which_a_setting_is_forgotten_is_named() -> None:
    found = forgotten(grown())
    assert {text.partition(": ")[0] for text in found} == {"brightness"}
    for place in ("docs/configuration.md", "no test", "CHANGELOG.md", "DeepSpeed's object", "`offload plan`"):
        assert any(place in text for text in found), place
    bare = dataclasses.make_dataclass("Bare", [("brightness", int, 1)], bases=(OffloadConfig,), frozen=True)
    assert forgotten(bare) == ["brightness: declare it by `setting` of offload/config.py"]
    with pytest.raises(TypeError, match=r"'plan' and 'train'"):  # whether a command takes it has to be said
        setting(1, Count(1), "How bright it is.")


def test_what_is_declared_is_there_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option of the command, the check, the text of the page."""
    config = grown()
    monkeypatch.setattr(values, "OffloadConfig", config)
    assert not any("`offload plan`" in text for text in forgotten(config))
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert re.search(r"--brightness N\s+how bright", capsys.readouterr().out)
    assert main(["plan", "--params", "1e9", "--host", "64GiB", "--brightness", "0"]) == 2
    assert "--brightness" in capsys.readouterr().err
    with pytest.raises(offload.ConfigError, match=r"brightness: 0 cannot be used; give an integer >= 1"):
        config(brightness=0)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    assert "| `brightness` | `1` | How bright it is. |" in importlib.import_module("generate").table(config)


def test_a_class_says_what_its_settings_mean() -> None:
    for config in (OffloadConfig, PathConfig):
        said = " ".join((config.__doc__ or "").split())
        assert all(f"{each.name}: {each.metadata['meaning']}" in said for each in dataclasses.fields(config))


ALONE = {name for name in metrics.TABLE if "/" in name}
"""Names that are those of metrics and of nothing else."""


def test_figures_of_lanes_paths_and_nodes_are_told_apart() -> None:
    assert metrics.of(metrics.LANE_BUSY_S, "read:0") == "lane/read:0/busy_s"
    assert metrics.which(metrics.LANE_BUSY_S, "lane/read:0/busy_s") == "read:0"
    assert metrics.which(metrics.LANE_BUSY_S, "lane/read:0/bytes") is None
    assert metrics.which(metrics.NODE_BYTES, "node/2/elsewhere_bytes") is None
    assert metrics.which(metrics.STEP, "step") is None


def test_whoever_logs_some_by_default_names_them_as_they_are() -> None:
    assert {*HEADLINES, *LOGGED} <= metrics.TABLE.keys()


def test_nobody_else_writes_out_their_names() -> None:
    """Of names that have a part, as others are words of other things, too."""
    first = "|".join(sorted({name.partition("/")[0] for name in ALONE}))
    named = re.compile(rf"({first})/(\{{\}}|\w+)/?\w*_(s|bytes)|({first})/\w*(bytes|seconds|_s)")
    found = []
    for file in (ROOT / "offload").rglob("*.py"):
        if file.name == "metrics.py":
            continue
        tree = ast.parse(file.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            if named.fullmatch(text):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {text}")
    assert found == []
