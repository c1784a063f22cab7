"""DeepSpeed's view of the device "late": what it asks of an accelerator is asked of torch.

DeepSpeed has no name for this one. So it is imported for the CPU (`DS_ACCELERATOR=cpu`), and told by `use` before it
initializes anything.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from accelerator import late


def use(seed: int) -> None:
    """Have DeepSpeed, and offload, run on the device from now on; the seed is of its streams' delays."""
    late.load()
    late.delays(0, 300, seed)
    late.tell_offload()
    set_accelerator(Late())


def _on_device(dtype: torch.dtype) -> Any:
    return property(lambda accelerator: functools.partial(torch.tensor, dtype=dtype, device="late"))


def _asked(name: str) -> Any:
    """Return what `torch.late` has by a name; what it has not (ranges, graphs, builds) is as on the CPU."""

    def found(accelerator: DeepSpeedAccelerator) -> Any:
        module = torch.get_device_module("late")
        return getattr(module, name) if hasattr(module, name) else getattr(CPU_Accelerator(), name)

    return property(found)


_Asked: Any = type(
    "_Asked", (DeepSpeedAccelerator,), {name: _asked(name) for name in DeepSpeedAccelerator.__abstractmethods__}
)


class Late(_Asked):
    """DeepSpeed's accelerator: what its class for CUDA does, without a compiler, graphs, or kernels of its own."""

    # What it is: asynchronous, so that DeepSpeed orders its streams by itself

    def is_synchronized_device(self) -> bool:
        return False

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def communication_backend_name(self) -> str:
        return "late"

    def get_compile_backend(self) -> str:
        return "eager"

    # Devices

    def device_name(self, device_index: int | None = None) -> str:
        return "late" if device_index is None else f"late:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(
            "late", torch.accelerator.current_device_index() if device_index is None else device_index
        )

    def current_device_name(self) -> str:
        return str(self.device())

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.get_device_module("late").default_generators[device_index]

    # Memory

    memory_cached, max_memory_cached = _asked("memory_reserved"), _asked("max_memory_reserved")
    reset_max_memory_allocated = reset_max_memory_cached = _asked("reset_peak_memory_stats")

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(self.device(device_index))[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(self.device(device_index))[0]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "late"

    # Tensors

    BFloat16Tensor = _on_device(torch.bfloat16)
    ByteTensor = _on_device(torch.uint8)
    DoubleTensor = _on_device(torch.float64)
    FloatTensor = _on_device(torch.float32)
    HalfTensor = _on_device(torch.float16)
    IntTensor = _on_device(torch.int32)
    LongTensor = _on_device(torch.int64)

    # No kernel is built for it

    def get_op_builder(self, class_name: str) -> Any:
        from deepspeed.ops.op_builder.cpu import NotImplementedBuilder

        return NotImplementedBuilder

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()
