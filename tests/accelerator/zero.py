"""DeepSpeed's view of the device "late": what it asks of an accelerator is asked of torch.

DeepSpeed has no name for this one. So it is imported for the CPU (`DS_ACCELERATOR=cpu`), and told by `use` before it
initializes anything.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

from accelerator import late


def use(seed: int, most_us: int = 300) -> None:
    """Have DeepSpeed, and offload, run on the device from now on.

    Args:
        seed: Of the streams' delays.
        most_us: The longest of them, before each task.
    """
    late.load()
    late.delays(0, most_us, seed)
    late.tell_offload()
    set_accelerator(Late())


def _on_device(dtype: torch.dtype) -> Any:
    return property(lambda accelerator: functools.partial(torch.tensor, dtype=dtype, device="late"))


def _asked(name: str) -> Any:
    """Return what `torch.late` has by a name, once it is there."""
    return property(lambda accelerator: getattr(torch.get_device_module("late"), name))


class Late(DeepSpeedAccelerator):  # type: ignore[misc]
    """DeepSpeed's accelerator: what its class for CUDA does, without a compiler, graphs, or kernels of its own."""

    def __init__(self) -> None:
        self._name = "late"
        self._communication_backend_name = "late"
        self._compile_backend = "eager"

    # What it is: asynchronous, so that DeepSpeed orders its streams by itself

    def is_synchronized_device(self) -> bool:
        return False

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_available(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return False

    def is_bf16_supported(self) -> bool:
        return True

    is_fp16_supported = is_bf16_supported

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def communication_backend_name(self) -> str:
        return "late"

    # Devices

    def device_name(self, device_index: int | None = None) -> str:
        return "late" if device_index is None else f"late:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(
            "late", torch.accelerator.current_device_index() if device_index is None else device_index
        )

    def current_device_name(self) -> str:
        return str(self.device())

    set_device = _asked("set_device")
    current_device = _asked("current_device")
    device_count = _asked("device_count")
    synchronize = _asked("synchronize")
    Stream = _asked("Stream")
    Event = _asked("Event")
    stream = _asked("stream")
    current_stream = _asked("current_stream")
    default_stream = _asked("default_stream")

    def random(self) -> Any:
        return torch.random

    def default_generator(self, device_index: int) -> torch.Generator:
        generators: tuple[torch.Generator, ...] = torch.get_device_module("late").default_generators
        return generators[device_index]

    set_rng_state = _asked("set_rng_state")
    get_rng_state = _asked("get_rng_state")
    manual_seed = _asked("manual_seed")
    manual_seed_all = _asked("manual_seed_all")
    initial_seed = _asked("initial_seed")

    # Memory

    empty_cache = _asked("empty_cache")
    memory_stats = _asked("memory_stats")
    memory_allocated = _asked("memory_allocated")
    memory_reserved = memory_cached = _asked("memory_reserved")
    max_memory_allocated = _asked("max_memory_allocated")
    max_memory_reserved = max_memory_cached = _asked("max_memory_reserved")
    reset_peak_memory_stats = _asked("reset_peak_memory_stats")
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(self.device(device_index))[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(self.device(device_index))[0]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "late"

    # Nothing to do

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None: ...

    def range_pop(self, domain: Any = None) -> None: ...

    def lazy_call(self, callback: Any) -> Any:
        return callback()

    def create_graph(self) -> None: ...

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None: ...

    # Tensors

    BFloat16Tensor = _on_device(torch.bfloat16)
    ByteTensor = _on_device(torch.uint8)
    DoubleTensor = _on_device(torch.float64)
    FloatTensor = _on_device(torch.float32)
    HalfTensor = _on_device(torch.float16)
    IntTensor = _on_device(torch.int32)
    LongTensor = _on_device(torch.int64)

    # No kernel is built for it

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder.cpu"

    def get_op_builder(self, class_name: str) -> Any:
        from deepspeed.ops.op_builder.cpu import NotImplementedBuilder

        return NotImplementedBuilder

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        return []

    def visible_devices_envs(self) -> list[str]:
        return []

    def set_visible_devices_envs(self, current_env: Any, local_accelerator_ids: Any) -> None: ...

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend
