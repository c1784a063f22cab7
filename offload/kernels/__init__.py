"""Update kernels: the definition (`reference`) and what runs it fast on the CPU and on a GPU."""

from offload.kernels.cpu import CpuUpdateKernel, StreamVariant, blocks_numel, instruction_sets, norm_sq_at
from offload.kernels.gpu import GpuUpdateKernel
from offload.kernels.reference import rounding_keys

__all__ = [
    "CpuUpdateKernel",
    "GpuUpdateKernel",
    "StreamVariant",
    "blocks_numel",
    "instruction_sets",
    "norm_sq_at",
    "rounding_keys",
]
