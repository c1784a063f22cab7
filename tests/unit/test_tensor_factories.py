"""Every tensor that is made here says its dtype and its device, so that torch's defaults change nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("offload", "integrations")

# What `torch.set_default_device` moves (torch/utils/_device.py) or `torch.set_default_dtype` widens. `*_like`,
# `new_*` and `from_numpy` take both from their argument; `frombuffer` is always on the CPU and demands a dtype.
FACTORIES = {
    "arange",
    "as_tensor",
    "asarray",
    "complex",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_coo_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}
NEVER = {"Tensor", "FloatTensor", "get_default_dtype", "get_default_device"}


def wrong_calls(source: str) -> list[str]:
    """Return the calls of a module that leave dtype or device to torch's defaults."""
    tree = ast.parse(source)
    aliases = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = None
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "torch":
            name = node.func.attr
        elif isinstance(node.func, ast.Name):
            name = aliases.get(node.func.id)
        missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
        if name in NEVER or (name in FACTORIES and missing):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_tensors_are_made_with_dtype_and_device() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 50
    wrong = [f"{path.relative_to(ROOT)} {call}" for path in files for call in wrong_calls(path.read_text())]
    assert not wrong, "give dtype= and device=:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.zeros(3)",
        "import torch\ntorch.empty(3, dtype=torch.float32)",
        "import torch\ntorch.tensor(3.0, device='cpu')",
        "import torch\ntorch.Tensor(3)",
        "from torch import ones as f\nf(3)",
    ],
)
def test_what_is_left_to_the_defaults_is_seen(source: str) -> None:
    assert wrong_calls(source)


def test_what_names_both_is_let_pass() -> None:
    assert not wrong_calls("import torch\ntorch.zeros(3, dtype=torch.int8, device='cpu')\ntorch.zeros_like(x)")
