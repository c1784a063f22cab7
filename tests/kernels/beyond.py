"""Runs the GPU's kernels, in Triton's interpreter, over memory that ends where nothing can be read.

A kernel that reads beyond, whatever it makes of that, ends the process: so this is one of its own.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import kernel_cases
import numpy as np
import torch
from accelerator.cuda_mistakes import named
from kernel_cases import DTYPES, Case, Placed

from offload.formats import FORMATS


class AtTheEnd(Placed):
    """A copy of a tensor's bytes, behind which a page begins that cannot be read."""

    def __init__(self, tensor: torch.Tensor, offset: int = 0, memory: Any = None) -> None:
        self.dtype, self._shape = tensor.dtype, tensor.shape
        self._nbytes = tensor.numel() * tensor.element_size()
        size = -(-(self._nbytes + 1024) // mmap.PAGESIZE) * mmap.PAGESIZE
        everything = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
        beyond = ctypes.c_void_p(everything.ctypes.data + size)
        if ctypes.CDLL(None).mprotect(beyond, ctypes.c_size_t(mmap.PAGESIZE), 0):  # PROT_NONE
            raise OSError("the page behind cannot be protected")
        self._raw = torch.from_numpy(everything[:size])
        self._raw.fill_(kernel_cases.GUARD)
        self._start = size - self._nbytes
        self.address = everything.ctypes.data + self._start
        self.put(tensor)


def main() -> None:
    kernel_cases.Placed = AtTheEnd  # before those are imported that use it
    import test_gpu

    with test_gpu.gpu_kernel("interpreter") as kernel:
        for dtype in DTYPES:
            test_gpu.test_many_gradients_are_summed_as_one_is(kernel, dtype)
            test_gpu.test_fingerprints_are_those_of_the_cpu(kernel, dtype)
            test_gpu.test_accumulation(kernel, dtype, "same", "plain")
        test_gpu.test_pieces_of_any_size_are_copied_bit_for_bit(kernel)
        for state_format in FORMATS:
            Case.state_format = state_format
            test_gpu.run_and_check(kernel, [Case.make(numel) for numel in (1, 700)])


if __name__ == "__main__":
    with named():
        main()
