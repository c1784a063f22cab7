"""That one module knows types of accelerators, by reading the sources and by taking `torch.cuda` away."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import prepared
import pytest
import torch

import offload
from offload import backends
from offload.kernels import gpu
from offload.kernels.plain import PlainUpdateKernel

ROOT = Path(__file__).parents[2]
MOST_USES = 8

ALONE = """
import importlib, pkgutil, sys, types
import torch

class Refusing(types.ModuleType):
    def __getattr__(self, name):
        if sys._getframe(1).f_globals["__name__"].startswith("offload"):
            raise RuntimeError(f"torch.cuda.{name} was used")
        return getattr(real, name)

real, torch.cuda = torch.cuda, Refusing("torch.cuda")
sys.modules["torch.cuda"] = torch.cuda
import offload
imported = 0
for module in pkgutil.walk_packages(offload.__path__, "offload."):
    if module.name not in ("offload.__main__", "offload.integrations.verl.enabled"):  # which act when imported
        try:
            importlib.import_module(module.name)
            imported += 1
        except ImportError as error:  # of somebody else's package
            if error.name is None or error.name.startswith("offload"):
                raise
assert imported > 50
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).bfloat16()
x, scaler = torch.randn(8, 64).bfloat16(), offload.GradScaler("cpu", init_scale=4.0)
config = offload.OffloadConfig(paths=[sys.argv[1]], host_memory=0)
with offload.AdamW(model.named_parameters(), lr=1e-2, offload=config) as optimizer:
    losses = []
    for _ in range(5):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.save_checkpoint(sys.argv[1] + "/saved")
assert losses[-1] < losses[0]
try:
    offload.backends.BACKENDS["cuda"].captures()
except RuntimeError as error:
    print(error)
"""


def uses(source: str) -> list[str]:
    """Return where a module uses `torch.cuda`, by whatever name, or looks whether something is called so."""
    tree = ast.parse(source)
    torches, cudas = {"torch"}, set()
    found: list[ast.AST] = []

    def is_cuda(node: ast.AST | None) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id in torches
        if isinstance(node, ast.Call) and len(node.args) > 1:
            named = isinstance(node.args[1], ast.Constant) and node.args[1].value == "cuda"
            return named and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        return isinstance(node, ast.Name) and node.id in cudas

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torches |= {alias.asname for alias in node.names if alias.name == "torch" and alias.asname}
            found += [node for alias in node.names if alias.name.startswith("torch.cuda")]
            cudas |= {alias.asname for alias in node.names if alias.name == "torch.cuda" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            cudas |= {
                alias.asname or "cuda" for alias in node.names if (node.module, alias.name) == ("torch", "cuda")
            }
            found += [node for _ in node.names if node.module.startswith("torch.cuda")]
    for node in ast.walk(tree):  # in the order of the sources, so that an alias comes before its uses
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_cuda(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            cudas |= {target.id for target in targets if isinstance(target, ast.Name)}
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    aliased = {id(node.value) for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign))}
    for node in ast.walk(tree):
        if (
            (isinstance(node, ast.Attribute) and (is_cuda(node.value) or node.attr == "is_cuda"))
            or (
                is_cuda(node)
                and id(node) not in inside | aliased
                and not isinstance(getattr(node, "ctx", None), ast.Store)
            )
            or (isinstance(node, ast.Constant) and node.value == "torch.cuda")
        ):
            found.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_tensor = node.func.attr == "cuda" and not is_cuda(node.func)
            if of_tensor or (node.func.attr == "startswith" and any(map(_says_cuda, node.args))):
                found.append(node)
        elif isinstance(node, (ast.Compare, ast.match_case)) and any(map(_says_cuda, ast.walk(node))):
            found.append(node)
    return [ast.unparse(node) for node in found]


def _says_cuda(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cuda"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.cuda.synchronize()", 1),
        ("import torch as t\nt.cuda.Stream(t.cuda.current_device())", 2),
        ("cuda: Any = torch.cuda\ncuda.Event()\ncuda.Stream()", 2),
        ("from torch import cuda as c\nc.is_available()", 1),
        ("import torch.cuda", 1),
        ("import torch.cuda as c\nc.is_available()", 2),
        ("from torch.cuda import Event, Stream", 2),
        ("getattr(torch, 'cuda').is_available()", 1),
        ("use(torch.cuda)", 1),
        ("import_module('torch.cuda')", 1),
        ("sys.modules['torch.cuda']", 1),
        ("device.type == 'cuda'", 1),
        ("device.type not in ('cpu', 'cuda')", 1),
        ("name.startswith('cuda')", 1),
        ("match kind:\n    case 'cuda':\n        pass", 1),
        ("tensor.is_cuda", 1),
        ("tensor.cuda()", 1),
        ("torch.zeros(1, device='cuda')\ntorch.version.cuda.partition('.')\n{'cuda': 1}\ndevice.type == 'cpu'", 0),
    ],
)
def test_every_use_is_seen(source: str, count: int) -> None:
    assert len(uses(source)) == count, uses(source)


def test_one_module_knows_types_of_accelerators() -> None:
    files = [path for folder in ("offload", "integrations") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 50
    found = {str(path.relative_to(ROOT)): uses(path.read_text()) for path in files}
    assert {path for path, used in found.items() if used} == {"offload/backends.py"}
    assert len(found["offload/backends.py"]) <= MOST_USES


@pytest.mark.slow
def test_without_any_module_of_cuda(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(tmp_path)]
    done = prepared.ran(command)
    assert done.stdout.splitlines()[-1] == "torch.cuda.is_current_stream_capturing was used"


def test_an_accelerator_without_a_row_is_refused() -> None:
    for kind in ("xpu:0", "mps:0"):
        parameter = offload.Parameter("weight", 8, offload.DtypeCode.FLOAT32, 0)
        with pytest.raises(
            offload.ConfigError, match=r"CUDA \(or ROCm\) device; docs/architecture.md says what other"
        ):
            offload.Engine([parameter], device=torch.device(kind))
    elsewhere = torch.nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(offload.ConfigError, match=r"param.*meta.*CUDA \(or ROCm\) device"):
        offload.AdamW([elsewhere])


def test_where_no_kernel_is_compiled_torch_s_operations_update_and_say_once_that_they_are_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = backends.Backend(pin=lambda address, nbytes: None, unpin=lambda address: None)
    monkeypatch.setattr(gpu, "accelerator", lambda device: (torch.device("meta"), row))  # as of no other test
    for _ in range(2):
        assert isinstance(gpu.device_kernel(), PlainUpdateKernel)
    assert ["many times slower" in record.message for record in caplog.records] == [True]


def test_what_torch_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    for chosen, message in ((None, "torch sees no accelerator"), ("cuda", "torch sees 0 such devices")):
        with pytest.raises(offload.ConfigError, match=message):
            backends.accelerator(chosen)
