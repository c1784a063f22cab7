"""Update kernels: the definition (`reference`) and what runs it fast on the CPU and on a GPU."""

from offload.kernels.cpu import (
    CpuUpdateKernel,
    StreamVariant,
    blocks_numel,
    instruction_sets,
    norm_sq,
    norm_sq_at,
    sum_in_order,
)
from offload.kernels.gpu import GpuUpdateKernel
from offload.kernels.reference import Scalars, rounding_keys, scalars

__all__ = [
    "CpuUpdateKernel",
    "GpuUpdateKernel",
    "Scalars",
    "StreamVariant",
    "blocks_numel",
    "instruction_sets",
    "norm_sq",
    "norm_sq_at",
    "rounding_keys",
    "scalars",
    "sum_in_order",
]
