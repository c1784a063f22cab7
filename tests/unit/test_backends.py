"""That one module knows types of accelerators, by reading the sources and by taking `torch.cuda` away."""

from __future__ import annotations

import ast
import re
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


USED = re.compile(
    r"(?<!version)\.cuda\b|\.is_cuda\b|\b(?:from|import) torch\.cuda|from torch import .*\bcuda|'torch\.cuda'"
    r"|getattr\(torch, 'cuda'|startswith\('cuda'|(?:==|!=|\bin\b|\bcase) .*'cuda'|'cuda' (?:==|!=|in)"
)


def plain(source: str) -> str:
    """Return a source without comments and docstrings, in one style."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = 0
    return ast.unparse(tree)


def uses(source: str) -> list[str]:
    """Return the lines that use `torch.cuda`, or give it a name, or ask whether something is called so."""
    return [line for line in plain(source).splitlines() if USED.search(line)]


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "import torch as t\nt.cuda.Stream(0)",
        "api = runtime = torch.cuda",
        "from torch import cuda as c",
        "import torch.cuda as c",
        "from torch.cuda import Event, Stream",
        "getattr(torch, 'cuda').is_available()",
        "use(torch.cuda)",
        "import_module('torch.cuda')",
        "sys.modules['torch.cuda']",
        "device.type == 'cuda'",
        "device.type not in ('cpu', 'cuda')",
        "name.startswith('cuda')",
        "match kind:\n    case 'cuda':\n        pass",
        "tensor.is_cuda",
        "tensor.cuda()",
    ],
)
def test_every_use_is_seen(source: str) -> None:
    assert uses(source)


def test_names_of_devices_and_versions_are_none() -> None:
    assert not uses("torch.zeros(1, device='cuda')\ntorch.version.cuda.partition('.')\nfound = {'cuda': 1}")


def test_one_module_knows_types_of_accelerators() -> None:
    files = [path for folder in ("offload", "integrations") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 50
    assert {str(path.relative_to(ROOT)) for path in files if uses(path.read_text())} == {"offload/backends.py"}
    assert (
        len(re.findall(r"(?<!version\.)\bcuda\.\w", plain((ROOT / "offload/backends.py").read_text()))) <= MOST_USES
    )


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
