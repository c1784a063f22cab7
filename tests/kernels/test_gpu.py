"""The GPU's kernels: the suite of the CPU's, and what is theirs alone.

In Triton's interpreter where there is no GPU, compiled on a real one with `-m gpu`; and in plain torch operations, as
on accelerators without Triton. Tests that are imported here are collected here too, and get this module's `kernel`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from devices import CUDA, LATE_FULL, the_device
from kernel_cases import DTYPES, SIZES, Case, Placed, norm_sq, same_bits, values
from test_gradient_blocks import (  # noqa: F401
    test_a_block_is_not_finite_exactly_if_an_element_is_not,
    test_a_copy_onto_itself_is_no_copy,
    test_anything_anywhere,
    test_wrong_arguments_are_refused,
)
from test_gradient_blocks import test_sizes as test_sizes_of_gradients  # noqa: F401
from test_update_kernel import (  # noqa: F401
    OTHERS,
    UPDATES,
    run_and_check,
    test_any_alignment,
    test_any_table,
    test_every_rule,
    test_every_sixteen_bit_gradient_and_weight,
    test_flags,
    test_masters_beside_weights_that_are_no_plain_numbers,
    test_masters_stay_where_the_weight_is_their_rounding,
    test_old_values_stay_where_new_ones_go_elsewhere,
    test_rounding_of_the_weight,
    test_sizes,
    test_subnormals_survive,
    test_unread_fields_may_be_null,
    test_untouched_without_flags,
    test_wrong_tables_are_refused,
)

from offload.dtypes import DtypeCode
from offload.errors import ConfigError, InternalError
from offload.formats import FORMATS
from offload.kernels import CpuUpdateKernel, GpuUpdateKernel, blocks_numel, plain, reference
from offload.kernels.device import DeviceKernel
from offload.kernels.gpu import BLOCK_NUMEL, COPY_BLOCK_BYTES
from offload.kernels.reference import DTYPE_CODES
from offload.protocols import NORM_BLOCK_NUMEL
from offload.rules import ADAMW, segment_dtype

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Synchronous:
    """A kernel under the names that the CPU's has, waiting for every call."""

    def __init__(self, kernel: DeviceKernel) -> None:
        self.kernel = kernel

    def run(self, table: np.ndarray) -> None:
        self.kernel.update(self.kernel.send(table))
        self._wait()

    def gradient_blocks(self, *arguments: int, accumulate: bool = False) -> None:
        self.kernel.gather(*arguments, accumulate=accumulate)
        self._wait()

    def sum_rows(self, dtype: DtypeCode, rows: np.ndarray) -> None:
        self.kernel.sum_rows(dtype, rows)
        self._wait()

    def fingerprint_rows(self, dtype: DtypeCode, rows: np.ndarray) -> None:
        self.kernel.fingerprint_rows(dtype, rows)
        self._wait()

    def copy_pieces(self, pieces: np.ndarray) -> None:
        self.kernel.copy_pieces(pieces)
        self._wait()

    def _wait(self) -> None:
        if self.kernel.device.type != "cpu":
            torch.accelerator.synchronize(self.kernel.device)


def remember_what_is_replaced(patch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter two to three times faster, by keeping it from looking again for what it replaces.

    It looks through Triton's whole language at every launch, and whenever a kernel calls another function.
    """
    interpreter, core = import_module("triton.runtime.interpreter"), import_module("triton.language.core")

    @cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def replace(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            if not core.is_builtin(member := getattr(package, name)):
                break  # all have been replaced
            interpreter._patch_attr(package, name, member, builder, scope)

    patch.setattr(interpreter, "_patch_builtin", replace)


@contextlib.contextmanager
def gpu_kernel(kind: str) -> Iterator[Synchronous]:
    """Lend a kernel and have `Placed` tensors lie on its device.

    Args:
        kind: "torch", for plain operations on the CPU, or "late", on the test accelerator; "cuda", for a GPU; else
            Triton's interpreter.
    """
    is_plain = kind in ("torch", "late")
    if not is_plain and INTERPRETED is (kind == "cuda"):
        pytest.skip("TRITON_INTERPRET says otherwise")
    device = f"{the_device(kind)}:0" if kind in ("cuda", "late") else "cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Placed, "device", device)
        patch.setattr(Placed, "unaligned", False)
        if kind.startswith("interpreter"):
            remember_what_is_replaced(patch)
        yield Synchronous(plain.PlainUpdateKernel(torch.device(device)) if is_plain else GpuUpdateKernel(device))


@pytest.fixture(scope="module", params=["interpreter", "torch", LATE_FULL[0], CUDA[0]])
def kernel(request):
    with gpu_kernel(request.param) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def large_sizes(kernel):
    """None in the interpreter, which runs one program after the other: four blocks show what fifty would."""
    return () if kernel.kernel.device.type == "cpu" else (65_536, 65_537, 200_003)


def test_one_table_of_everything(kernel):
    """Large segments among many tiny ones, some of them inactive, in every combination of dtypes and alignments."""
    flags = [*UPDATES, *OTHERS]
    cases = [
        Case.make(
            i % 23,
            seed=i,
            flags=flags[i % len(flags)],
            kind="wild" if i % 3 else "plain",
            gradient_dtype=DTYPES[i % 3],
            weight_dtype=(*DTYPES[:2], None)[i // 3 % 3],
            offsets=(4 * (i % 2), 0, 4 * (i % 5), 2 * (i % 7), 2 * (i % 3)),
        )
        for i in range(300)
    ]
    for numel in (BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 5 * BLOCK_NUMEL):
        cases.insert(numel % 200, Case.make(numel, seed=numel, offsets=(4, 4, 4, 2, 2)))
        cases.insert(numel % 100, Case.make(numel, seed=numel, gradient_dtype=torch.float32))
    run_and_check(kernel, cases)


@pytest.mark.parametrize("slot_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "wild"])
def test_accumulation(kernel, dtype, slot_dtype, kind):
    """Three micro-steps into one slot: the same bits as torch's own additions, and the norm of what is there."""
    wanted_dtype = torch.float32 if slot_dtype == "float32" else dtype
    for numel in (*SIZES, 3 * NORM_BLOCK_NUMEL):
        gradients = [values(10 * numel + i, numel, dtype, kind) for i in range(3)]
        slot = Placed(torch.zeros(numel, dtype=wanted_dtype), 8 * (numel % 5))
        expected = gradients[0].to(wanted_dtype, copy=True)
        for number, gradient in enumerate(gradients):
            if number:
                reference.accumulate(expected, gradient)
            source = Placed(gradient, 4 * (numel % 3))
            found = accumulated(kernel, source, numel, slot, add=number > 0)
            kept = slot.tensor()
            assert same_bits(kept, expected)
            sums = reference.gradient_blocks(kept)
            finite = np.isfinite(sums)
            assert np.array_equal(finite, np.isfinite(found))
            assert np.array_equal(found[finite], sums[finite])
            assert same_bits(source.tensor(), gradient)
        assert norm_sq([found[finite]]) == reference.norm_sq([sums[finite]])
        if kind == "plain":
            torchs = gradients[0].to(wanted_dtype, copy=True)
            for gradient in gradients[1:]:
                torchs += gradient
            assert same_bits(kept, torchs), "the reference is not what torch does"


def accumulated(kernel, source: Placed, numel: int, slot: Placed, *, add: bool) -> np.ndarray:
    blocks = torch.zeros(blocks_numel(numel), dtype=torch.float64, device=Placed.device)
    kernel.gradient_blocks(
        source.address,
        DTYPE_CODES[source.dtype],
        numel,
        blocks.data_ptr(),
        slot.address,
        DTYPE_CODES[slot.dtype],
        accumulate=add,
    )
    return blocks.cpu().numpy()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_every_sixteen_bit_value_accumulates(kernel, dtype, wide):
    gradient = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    start = values(7, 2**16, torch.float32 if wide else dtype, "wild")
    slot = Placed(start)
    accumulated(kernel, Placed(gradient), gradient.numel(), slot, add=True)
    reference.accumulate(start, gradient)
    assert same_bits(slot.tensor(), start)


def test_large_and_small_gradients_in_many_calls(kernel):
    """Block sums land side by side, as a session keeps them for all parameters."""
    sizes = [1, 5000, NORM_BLOCK_NUMEL, 3]
    starts = np.cumsum([0, *map(blocks_numel, sizes)])
    blocks = torch.full((int(starts[-1]),), -7.0, dtype=torch.float64, device=Placed.device)
    gradients = [values(n, n, torch.float16, "plain") for n in sizes]
    placed = [Placed(gradient) for gradient in gradients]
    for source, start in zip(placed, starts, strict=False):
        numel = source.tensor().numel()
        kernel.gradient_blocks(source.address, DtypeCode.FLOAT16, numel, blocks.data_ptr() + 8 * int(start))
    expected = np.concatenate([reference.gradient_blocks(gradient) for gradient in gradients])
    assert np.array_equal(blocks.cpu().numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_gradients_are_summed_as_one_is(kernel, dtype):
    sizes = [1, NORM_BLOCK_NUMEL, 5, 0, NORM_BLOCK_NUMEL + 1, 700]
    gradients = [values(n, n, dtype, "wild" if n == 700 else "plain") for n in sizes]
    placed = [Placed(gradient, 4 * (n % 5)) for n, gradient in enumerate(gradients)]
    counts = [blocks_numel(n) for n in sizes]
    sums = torch.full((sum(counts) + 1,), -7.0, dtype=torch.float64, device=Placed.device)
    starts = np.cumsum([0, *counts])
    rows = [(p.address, n, sums.data_ptr() + 8 * int(at)) for p, n, at in zip(placed, sizes, starts, strict=False)]
    kernel.sum_rows(DTYPE_CODES[dtype], np.array(rows, np.uint64))
    expected = np.concatenate([*(reference.gradient_blocks(gradient) for gradient in gradients), [-7.0]])
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(sums.cpu().numpy()), finite)
    assert np.array_equal(sums.cpu().numpy()[finite], expected[finite])
    for row, message in (((0, 4, 64), "address 0"), ((65, 4, 64), "not aligned"), ((64, 4, 68), "not aligned")):
        with pytest.raises(InternalError, match=message):
            kernel.sum_rows(DTYPE_CODES[dtype], np.array([row], np.uint64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprints_are_those_of_the_cpu(kernel, dtype):
    """The parts of all blocks, added; whatever a gradient's length and alignment, and NaNs with their payloads."""
    sizes = [1, 2, NORM_BLOCK_NUMEL, 5, 0, 3 * NORM_BLOCK_NUMEL + 3, NORM_BLOCK_NUMEL - 1, 700]
    gradients = [values(n, n, dtype, "wild" if n % 5 == 0 else "plain") for n in sizes]
    placed = [Placed(gradient, gradient.itemsize * (n % 5)) for n, gradient in enumerate(gradients)]
    counts = [blocks_numel(n) for n in sizes]
    parts = torch.full((sum(counts) + 1,), -7, dtype=torch.int64, device=Placed.device)
    starts = np.cumsum([0, *counts])
    rows = [(p.address, n, parts.data_ptr() + 8 * int(at)) for p, n, at in zip(placed, sizes, starts, strict=False)]
    kernel.fingerprint_rows(DTYPE_CODES[dtype], np.array(rows, np.uint64))
    found = parts.cpu().numpy().view(np.uint64)
    assert parts[-1] == -7
    sums = [int(found[first:end].sum(dtype=np.uint64)) for first, end in itertools.pairwise(starts)]
    assert sums == [reference.fingerprint(gradient) for gradient in gradients]
    addresses = np.array([gradient.data_ptr() for gradient in gradients], np.uint64)
    nbytes = np.array([gradient.nbytes for gradient in gradients], np.uint64)
    with CpuUpdateKernel(threads=1) as on_cpu:
        chosen = nbytes > 0
        assert sums == np.where(chosen, on_cpu.fingerprints(np.where(chosen, addresses, 8), nbytes), 0).tolist()


def test_pieces_of_any_size_are_copied_bit_for_bit(kernel):
    """Aligned or not, NaNs with their payloads included, and nothing beside them."""
    sizes = [0, 2, 16, 30, 4096, 4112, COPY_BLOCK_BYTES + 2, 3 * COPY_BLOCK_BYTES]
    sources, targets, rows = [], [], []
    for number, (nbytes, offset) in enumerate(itertools.product(sizes, (0, 2))):
        drawn = values(number, nbytes // 2, torch.bfloat16, "wild")
        sources.append(Placed(drawn, offset))
        targets.append(Placed(torch.zeros_like(drawn), 2 * (number % 3)))
        rows.append((targets[-1].address, sources[-1].address, nbytes))
    kernel.copy_pieces(np.array(rows, np.uint64))
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source.tensor().view(torch.int16), target.tensor().view(torch.int16))
    kernel.copy_pieces(np.zeros((0, 3), np.uint64))
    for row, message in (((64, 128, 3), "16-bit words"), ((65, 128, 2), "16-bit words"), ((0, 128, 2), "address 0")):
        with pytest.raises(InternalError, match=message):
            kernel.copy_pieces(np.array([row], np.uint64))


@pytest.mark.parametrize("state_format", FORMATS, ids=str)
def test_pieces_that_torch_works_on_change_nothing(monkeypatch, state_format):
    """Cut where blocks begin, of which a segment may have a part first."""
    monkeypatch.setattr(plain, "PIECE_NUMEL", NORM_BLOCK_NUMEL)
    monkeypatch.setattr(Case, "state_format", state_format)
    with gpu_kernel("torch") as kernel:
        for number, first_index in enumerate((0, 37, (1 << 32) - 5000)):
            cases = [
                Case.make(3 * NORM_BLOCK_NUMEL + 5, seed=number, first_index=first_index, weight_dtype=weight)
                for weight in (torch.bfloat16, None)
            ]
            run_and_check(kernel, cases)
        gradient = values(1, 3 * NORM_BLOCK_NUMEL + 5, torch.float16, "plain")
        slot, expected = Placed(gradient), gradient.clone()
        reference.accumulate(expected, gradient)
        sums = accumulated(kernel, Placed(gradient), gradient.numel(), slot, add=True)
        assert same_bits(slot.tensor(), expected)
        assert np.array_equal(sums, reference.gradient_blocks(expected))


def test_what_a_gpu_cannot_read_is_refused(kernel):
    case = Case.make(10)
    row = case.row()
    row["gradient"] += 1
    with pytest.raises(InternalError, match="gradient is not aligned"):
        kernel.run(row)
    with pytest.raises(InternalError, match="dtype"):
        kernel.run(np.zeros(4, np.float32))
    with pytest.raises(InternalError, match="contiguous"):
        kernel.run(np.zeros(4, segment_dtype(ADAMW))[::2])
    gradient = Placed(values(0, 10, torch.float32, "plain"))
    blocks = torch.zeros(1, dtype=torch.float64, device=Placed.device)
    for source, slot, add, message in (
        (gradient.address + 2, 0, False, "source is not aligned"),
        (gradient.address, gradient.address + 62, False, "destination is not aligned"),
        (gradient.address, 0, True, "a slot of its own"),
        (gradient.address, gradient.address, True, "a slot of its own"),
    ):
        slot_dtype = DtypeCode.FLOAT32 if slot else DtypeCode.NONE
        with pytest.raises(InternalError, match=message):
            kernel.gradient_blocks(source, DtypeCode.FLOAT32, 10, blocks.data_ptr(), slot, slot_dtype, accumulate=add)
    assert same_bits(gradient.tensor(), values(0, 10, torch.float32, "plain"))
    assert not blocks.any()


def test_wrong_devices_are_refused():
    with pytest.raises(ConfigError, match=r"CUDA \(or ROCm\) device; docs/architecture.md says"):
        GpuUpdateKernel("meta")
    with pytest.raises(ConfigError, match=r"torch sees \d+ such devices"):
        GpuUpdateKernel(f"cuda:{torch.cuda.device_count()}")
    if not INTERPRETED:
        with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
            GpuUpdateKernel("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device, or TRITON_INTERPRET is set")
def test_work_is_on_the_current_stream():
    """Behind what the stream is busy with, and done when an event recorded after it is."""
    kernel = GpuUpdateKernel()
    stream = torch.cuda.Stream()
    cases = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Placed, "device", "cuda")
        for numel, flags in itertools.product((10, 100_000), UPDATES):
            cases.append(Case.make(numel, seed=numel, flags=flags))
            row = Case.make(numel, seed=numel, flags=flags).row()
            kernel.update(kernel.send(row))  # compiles, which takes longer than the sleep
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            for case in cases:
                kernel.update(kernel.send(case.row()))
            done = torch.cuda.Event()
            done.record()
        assert not done.query(), "the update did not wait for its stream"
        done.synchronize()
        for case in cases:
            case.check()
