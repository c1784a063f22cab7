"""Figures of `metrics()` are named by the table of `offload.metrics`, by whoever computes or reads them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from offload import metrics
from offload.integrations.shared import LOGGED
from offload.optim.figures import HEADLINES

ROOT = Path(__file__).resolve().parents[2]
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
