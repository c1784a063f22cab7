"""A GPT of Megatron-Core's and its distributed optimizer: stock with its own CPU offload, or with ours below it.

Megatron runs on the CPU, in one rank of gloo, as in the tests (`play_cuda` there). What it takes for the memory of a
device is host memory, as is what it offloads to; what it copies between the two is copied within host memory.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from importlib import import_module
from typing import Any

import torch
from _common import ROOT, cores
from _worker import CLIP, SEED, SETTINGS, Plain, alone
from torch.overrides import TorchFunctionMode

from offload.cli.model import Shape
from offload.cli.text import VOCABULARY

WORDS = -(-(VOCABULARY + 1) // 128) * 128
"""Rows of the embedding, as Megatron pads them."""


def numel(shape: Shape, tokens: int) -> int:
    """Return the parameters of the GPT of a shape, whose positions have weights."""
    width = shape.hidden
    return shape.layers * (12 * width * width + 13 * width) + (WORDS + tokens + 2) * width


def build(request: dict[str, Any]) -> Any:
    """Return the GPT, in bf16; this process is Megatron's only rank from now on."""
    sys.path.append(str(ROOT / "tests" / "integrations"))
    import_module("megatron_runs").play_cuda()
    alone()
    torch.set_num_threads(cores())
    torch.distributed.init_process_group("gloo")
    core = "megatron.core"
    import_module(f"{core}.parallel_state").initialize_model_parallel()
    shape, tokens = Shape(**request["shape"]), request["seq"]
    torch.manual_seed(SEED)
    fused = "masked_softmax", "bias_activation", "bias_dropout", "gradient_accumulation"
    config = import_module(f"{core}.transformer").TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **{f"{name}_fusion": False for name in fused},
    )
    layers = import_module(f"{core}.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    gpt = import_module(f"{core}.models.gpt").GPTModel(
        config, layers, WORDS, tokens, share_embeddings_and_output_weights=True
    )
    assert sum(weight.numel() for weight in gpt.parameters()) == numel(shape, tokens)
    return gpt.bfloat16()


class Stream(torch.cpu.Stream):
    """Where all is done at once: also what is waited for."""

    def record_event(self) -> Any:
        return torch.cpu.Event()


class OnDevice(TorchFunctionMode):
    """Has weights say that they are on a device, as their copies do not; host memory is not pinned."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self._weights = {*map(id, weights)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return id(args[0]) in self._weights
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))


def play_copies() -> None:
    """Have Megatron's CPU offload, which leaves alone what is on no device, copy within host memory."""
    torch.cuda.current_stream = lambda *_: Stream()  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, misc]
    hybrid = import_module("megatron.core.optimizer.cpu_offloading.hybrid_optimizer").HybridDeviceOptimizer
    divide = hybrid._get_sub_optimizer_param_groups

    def on_device(self: Any, fraction: float) -> Any:
        with OnDevice([weight for group in self.param_groups for weight in group["params"]]):
            return divide(self, fraction)

    hybrid._get_sub_optimizer_param_groups = on_device


class Megatron(Plain):
    """Megatron's loop of one rank: its gradients in a buffer of fp32, its distributed, precision-aware optimizer.

    Settings are {"offload": ...} for ours below Megatron's, with that config, and {"offload": None} for Megatron's
    own CPU offload of all state, by torch's fused AdamW. Without any there is no update in Megatron's step, which
    takes the norm of gradients and gathers weights.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        settings, core = request["settings"], "megatron.core"
        distributed = import_module(f"{core}.distributed")
        ddp = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = distributed.DistributedDataParallel(request["model"].config, ddp, request["model"])
        self.finalize = distributed.finalize_model_grads
        self.has_optimizer = "offload" in settings
        self.door = import_module("offload.integrations.megatron")
        tokens = request["seq"]
        self.places = torch.arange(tokens).expand(1, tokens)
        self.mask = torch.ones(1, 1, tokens, tokens).tril() < 0.5
        if settings.get("offload") is None:
            play_copies()
        else:
            self.door.enable(settings["offload"])
        optimizers = import_module(f"{core}.optimizer")
        betas = SETTINGS["betas"]
        config = optimizers.OptimizerConfig(
            optimizer="adam",
            lr=SETTINGS["lr"],
            weight_decay=SETTINGS["weight_decay"],
            adam_beta1=betas[0],
            adam_beta2=betas[1],
            adam_eps=SETTINGS["eps"],
            clip_grad=CLIP,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=True,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            pin_cpu_grads=False,
            pin_cpu_params=False,
        )
        self.optimizer = optimizers.get_megatron_optimizer(config, [self.model])
        gc.collect()  # Megatron makes its offload twice, and the first one has references in a circle
        for inner in self.door.inner_optimizers(self.optimizer):
            self.engine = inner.engine
        if not self.has_optimizer:
            (distributed,) = self.optimizer.chained_optimizers
            distributed.optimizer.step = lambda: None

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        self.model.zero_grad_buffer()
        loss: torch.Tensor = self.model(window[:, :-1], self.places, self.mask, labels=window[:, 1:])
        return loss.float().mean()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.finalize([self.model])

    def step(self) -> None:
        took, _, _ = self.optimizer.step()
        assert took
        self.optimizer.zero_grad()

    def close(self) -> None:
        for inner in self.door.inner_optimizers(self.optimizer):
            inner.close()
        self.door.disable()
        torch.distributed.destroy_process_group()
