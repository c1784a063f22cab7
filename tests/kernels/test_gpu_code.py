"""What the GPU's kernels are compiled to, read without a GPU: nothing may round otherwise than the reference."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepared
import pytest

from offload.formats import COMPACT8
from offload.kernels import gpu
from offload.rules import ADAGRAD, ADAMW, LION, RULES, SGD_MOMENTUM

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).with_name("compile_kernels.py")

# All that may touch a floating-point value: correctly rounded, exact, or a comparison.
ROUNDED = {"add.rn", "sub.rn", "mul.rn", "div.rn", "sqrt.rn", "cvt.rn.f16", "cvt.rn.f16x2"}
EXACT = {
    "cvt.f32",
    "cvt.f64",
    "setp.nan",
    "setp.eq",
    "setp.neu",
    "setp.gt",
    "setp.lt",
    "setp.ge",
    "selp",
    "mov",
    "neg",
    "abs",
}
FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}

# Per element and by rule. All have g*scale, p*decay; g+decayed; p-change. Adam: m*beta1, g*(1-beta1), v*beta2, g*g,
# *(1-beta2), root*inv_bias2_sqrt, quotient*step_size; m's and v's sums, +eps; one quotient; one root. So the others.
OPERATIONS = ("mul.rn.f32", "add.rn.f32", "sub.rn.f32", "div.rn.f32", "sqrt.rn.f32")
UPDATE = {
    ADAMW.code: (9, 4, 1, 1, 1),
    LION.code: (7, 3, 1, 0, 0),
    ADAGRAD.code: (4, 3, 1, 1, 1),
    SGD_MOMENTUM.code: (7, 3, 1, 0, 0),
}

# What COMPACT8 adds for each tensor of state: two products to read a code, one product and one sum to make one; for
# roots, the square of what is read. (The root of what is stored is the one that the update takes.)
SIGNED, ROOT = (3, 1, 0, 0, 0), (4, 1, 0, 0, 0)


def operations_of(constants: dict[str, Any]) -> list[int]:
    """Return how many of `OPERATIONS` an element takes."""
    (rule,) = [rule for rule in RULES.values() if rule.code == constants["RULE"]]
    rows = [UPDATE[rule.code]]
    if constants["STATE_FORMAT"] == COMPACT8.code:
        rows += [ROOT if name in rule.roots else SIGNED for name in rule.state]
    return [sum(column) for column in zip(*rows, strict=True)]


OLDEST = Path(sys.prefix) / "oldest-triton"
"""Where `make test` puts the oldest Triton that pyproject.toml admits."""

COMPILED = Path(__file__).parents[2] / "build" / "triton"
"""Triton's own cache: what it holds is found by sources, options and version, so that nothing is compiled twice."""

OLDEST_VERSION = re.compile(r"3\.6\.")

TARGETS = [
    pytest.param((80, None), marks=pytest.mark.full, id="80"),
    pytest.param((90, None), id="90"),
    pytest.param((100, None), marks=pytest.mark.full, id="100"),
    pytest.param((80, OLDEST), marks=pytest.mark.full, id="80-oldest"),
    pytest.param((90, OLDEST), id="90-oldest"),
]


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return kernels(*request.param)


def kernels(capability: int, folder: Path | None, **variables: str) -> list[dict[str, Any]]:
    """Return what each kernel is compiled to, by this environment's Triton or by the one in a folder."""
    options = {
        "update": gpu.UPDATE_OPTIONS,
        "gather": gpu.GATHER_OPTIONS,
        "sum_rows": gpu.GATHER_OPTIONS,
        "fingerprint_rows": gpu.GATHER_OPTIONS,
        "copy_pieces": gpu.COPY_OPTIONS,
    }
    environment = dict(os.environ, TRITON_CACHE_DIR=str(COMPILED), **variables)
    environment.pop("TRITON_INTERPRET", None)
    if folder is not None:
        if not folder.is_dir():
            pytest.skip(f"there is no {folder.name} in this environment: `make .venv/.oldest-triton`")
        environment["PYTHONPATH"] = str(folder)
    command = [sys.executable, str(SCRIPT), str(capability), json.dumps(options)]
    done = prepared.ran(command, env=environment)
    version, *lines = done.stdout.splitlines()
    assert folder is None or OLDEST_VERSION.match(version), version
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_sums_of_squares_are_not_fused(compiled: list[dict[str, Any]]) -> None:
    lines = [line for line in compiled if line["kernel"] == "sum_rows"]
    assert len(lines) == 3
    for line in lines:
        assert line["ptx"].get("mul.rn.f64", 0) > 0
        assert not [name for name in line["ptx"] if "fma" in name]


@pytest.mark.slow
def test_nothing_asserts_that_no_integer_overflows() -> None:
    """Under TRITON_DEBUG=1 that would end the process's use of the device: hashes do."""
    lines = kernels(90, None, TRITON_DEBUG="1")
    assert {line["kernel"] for line in lines if not line["changed"]} == {
        "update",
        "gather",
        "sum_rows",
        "fingerprint_rows",
        "copy_pieces",
    }
    for line in lines:
        assert (line["asserts"] > 0) is bool(line["changed"]), line["kernel"]


def wrongly_rounded(ptx: dict[str, int]) -> set[str]:
    """Return the operations on floating-point values that are neither correctly rounded nor exact."""
    floats = {name for name in ptx if FLOATS & set(name.split(".")[1:])}
    return {name for name in floats if name.rsplit(".", 1)[0] not in ROUNDED | EXACT}


def counted(ptx: dict[str, int]) -> dict[str, int]:
    """Return how often each of `OPERATIONS` is there; a pair counts twice."""
    return {name: ptx.get(name, 0) + 2 * ptx.get(f"{name}x2", 0) for name in OPERATIONS}


def fused(counts: dict[str, int], sass: dict[str, int]) -> bool:
    """Return whether ptxas has fused a product and a sum: there are fewer of both, or pairs of both in one.

    What it makes of a quotient and a root is its own affair; there may be one product more, a pair's unused half.
    """
    products = sass.get("FMUL", 0) + 2 * sass.get("FMUL2", 0)
    sums = sass.get("FADD", 0) + 2 * sass.get("FADD2", 0)
    few = products < counts["mul.rn.f32"] or sums < counts["add.rn.f32"] + counts["sub.rn.f32"]
    return bool(sass) and (few or "FFMA2" in sass)


@pytest.mark.slow
def test_every_operation_is_rounded_as_the_reference_rounds_it(compiled):
    ours = [line for line in compiled if not line["changed"]]
    assert len(ours) > 15
    for line in ours:
        ptx, sass = line["ptx"], line["sass"]
        assert not wrongly_rounded(ptx), line["constants"]
        assert not [name for name in ptx if any(part in name for part in ("fma", "ftz", "approx", "full"))]
        if line["kernel"] == "update":
            counts = counted(ptx)
            elements = counts["sub.rn.f32"]
            assert (elements > 0) is (line["constants"]["GRADIENT"] != 0)
            wanted = operations_of(line["constants"])
            assert counts == {name: each * elements for name, each in zip(OPERATIONS, wanted, strict=True)}
            assert not fused(counts, sass), line["constants"]
        elif line["kernel"].startswith("gather"):
            assert ptx["mul.rn.f64"] > 0
            assert not sass or (sass["DMUL"], sass.get("DFMA", 0)) == (ptx["mul.rn.f64"], 0)


@pytest.mark.slow
def test_fusion_would_be_seen(compiled):
    controls = [line for line in compiled if line["changed"]]
    assert {line["kernel"] for line in controls} == {"update", "gather"}
    for line in controls:
        assert wrongly_rounded(line["ptx"]) or any("fma" in name for name in line["ptx"])


@pytest.mark.full
def test_the_oldest_triton_fuses_on_blackwell():
    """CUDA 12.9's ptxas makes one operation of `mul.rn.f32x2` and `add.rn.f32x2`, whatever it is told: other bits."""
    lines = [line for line in kernels(100, OLDEST) if line["kernel"] == "update" and not line["changed"]]
    assert any(fused(counted(line["ptx"]), line["sass"]) for line in lines)
    assert not any("fma" in name for line in lines for name in line["ptx"])


@pytest.mark.slow
def test_aligned_tensors_are_read_and_written_four_elements_at_a_time(compiled):
    for line in compiled:
        if line["kernel"] == "update" and line["constants"]["GRADIENT"] != 0:
            wide, ptx = line["constants"]["ALIGNED"], line["ptx"]
            in_planes = line["constants"]["STATE_FORMAT"] == COMPACT8.code and line["constants"]["WEIGHT"]
            widest = "st.global.v2.b32" if in_planes else "st.global.v4.b32"  # four of 16 bits, where none has 32
            assert (ptx.get(widest, 0) > 0) is wide, line["constants"]


@pytest.mark.slow
def test_pieces_are_copied_as_wide_as_memory_allows_and_never_as_numbers(compiled):
    (line,) = [line for line in compiled if line["kernel"] == "copy_pieces"]
    assert line["ptx"]["ld.global.v4.b32"] > 0
    assert line["ptx"]["st.global.v4.b32"] > 0
    assert not [name for name in line["ptx"] if FLOATS & set(name.split(".")[1:])]


@pytest.mark.slow
def test_addresses_of_any_alignment_use_one_compiled_kernel():
    """Block sums lie at multiples of 8, by luck of 16: another kernel for those would be compiled during backward."""
    program = (
        "from offload.kernels.triton_kernels import copy_pieces, fingerprint_rows, gather, sum_rows, update\n"
        "print(sorted({p.name for k in (copy_pieces, fingerprint_rows, gather, sum_rows, update) for p in k.params"
        " if not (p.do_not_specialize or p.is_constexpr)}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    # Tensors, each at a multiple of 16: `test_what_is_launched_has_been_compiled` shows that.
    assert done.stdout.strip() == "['pieces', 'table']"
