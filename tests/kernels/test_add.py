"""Additions of gradients, against the reference and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DTYPES, SIZES, Placed, same_bits, values

from offload.dtypes import DtypeCode
from offload.errors import InternalError, SessionBrokenError
from offload.kernels import CpuUpdateKernel, instruction_sets, reference
from offload.kernels.reference import DTYPE_CODES


@pytest.fixture(scope="module", params=instruction_sets())
def kernel(request):
    with CpuUpdateKernel(threads=2, instruction_set=request.param) as kernel:
        yield kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "wild"])
def test_many_at_once(kernel, dtype, kind):
    """Of all sizes, in pieces that span several and in several pieces: the bits of the reference, and of torch."""
    sizes = (*SIZES, 65_536, 200_003, *SIZES)
    targets = [values(n, numel, dtype, kind) for n, numel in enumerate(sizes)]
    sources = [values(100 + n, numel, dtype, kind) for n, numel in enumerate(sizes)]
    added = [Placed(target, 2 * (n % 7)) for n, target in enumerate(targets)]
    adding = [Placed(source, 2 * (n % 5)) for n, source in enumerate(sources)]
    rows = [(to.address, of.address, numel) for to, of, numel in zip(added, adding, sizes, strict=True)]
    kernel.add(np.array(rows, np.uint64), DTYPE_CODES[dtype])
    for placed, kept, target, source in zip(added, adding, targets, sources, strict=True):
        expected = target.clone()
        reference.accumulate(expected, source)
        assert same_bits(placed.tensor(), expected)
        assert same_bits(kept.tensor(), source)
        assert same_bits(expected, target + source), "the reference is not what torch does"


def test_float_mode_of_the_caller_changes_nothing(kernel):
    added, source = Placed(torch.full((100,), 1e-41)), Placed(torch.full((100,), 2e-41))
    torch.set_flush_denormal(True)
    try:
        kernel.add(np.array([(added.address, source.address, 100)], np.uint64), DtypeCode.FLOAT32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.all(added.tensor() > 2e-41)


def test_wrong_arguments_are_refused(kernel):
    memory = np.zeros(8, np.float32)
    row = np.array([[memory.ctypes.data, 0, 4]], np.uint64)
    with pytest.raises(InternalError, match="null"):
        kernel.add(row, DtypeCode.FLOAT32)
    with pytest.raises(InternalError, match="dtype"):
        kernel.add(row, DtypeCode.NONE)
    with pytest.raises(InternalError, match="shape"):
        kernel.add(row[0], DtypeCode.FLOAT32)
    kernel.add(row[:0], DtypeCode.FLOAT32)
    with CpuUpdateKernel(threads=1) as closed:
        pass
    with pytest.raises(SessionBrokenError):
        closed.add(row, DtypeCode.FLOAT32)
