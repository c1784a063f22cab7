"""Models whose gradients are what the caller says, on as many gloo processes as wanted."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 1e-2}
SHAPES = [[(7, 6), (7,)], [(1, 130), (3,), (64, 33)]]
"""Of two blocks' parameters: even and uneven over 2 and 4 ranks, and fewer rows than ranks."""


class Block(torch.nn.Module):
    """Parameters whose gradients are the tensors that it is called with."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        made = (torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes)
        self.weights = torch.nn.ParameterList(made)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        products = (
            (weight * wanted.to(weight.dtype)).sum() for weight, wanted in zip(self.weights, gradients, strict=True)
        )
        return sum(products, torch.zeros(()))


class Model(torch.nn.Module):
    """Two blocks, the same on every rank."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(shapes, dtype) for shapes in SHAPES)

    def forward(self, gradients: list[list[torch.Tensor]]) -> torch.Tensor:
        losses = (block(wanted) for block, wanted in zip(self.blocks, gradients, strict=True))
        return sum(losses, torch.zeros(()))


def exact_gradients(step: int, rank: int) -> list[list[torch.Tensor]]:
    """Return one rank's gradients: small integers, of which every order of addition gives the same sum."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [[torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes] for shapes in SHAPES]


def mean_gradients(step: int, ranks: int) -> list[torch.Tensor]:
    """Return the mean of all ranks' `exact_gradients`, which is exact for a power of two of them."""
    everyone = [[tensor for block in exact_gradients(step, rank) for tensor in block] for rank in range(ranks)]
    return [torch.stack(tensors).sum(0) / ranks for tensors in zip(*everyone, strict=True)]


def clipped(optimizer: Any, mirror: Any, gradients: list[torch.Tensor]) -> float:
    """Clip to a norm of 2, as the reference does; return the factor."""
    norm = mirror.norm(gradients)
    assert float(optimizer.clip_grad_norm_(2.0)) == norm
    return min(1.0, 2.0 / (norm + 1e-6))


def own(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a whole tensor, by torch's own account of where it is."""
    if not isinstance(parameter, DTensor):
        return whole
    (chunk,) = parameter.__create_chunk_list__()
    for dimension, (first, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dimension, min(first, whole.shape[dimension]), size)
    return whole.contiguous()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


IMPORTED = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "pytest"]
IMPORTED += ["offload.optim.optimizer"]
"""What all ranks import; every optimizer of torch imports its compiler."""


def _worker(
    rank: int, ranks: int, folder: str, name: str, scenario: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{name}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    try:
        scenario(Path(folder), *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def start(ranks: int, folder: Path, scenario: Callable[..., None], *arguments: Any) -> Any:
    """Start a scenario, a function of a folder and arguments, in as many processes; return torch's context."""
    name = f"{scenario.__name__}-{ranks}-{len(list(folder.iterdir()))}"
    multiprocessing.set_executable(prepared.python())  # of the server that all ranks are forked from
    multiprocessing.set_forkserver_preload(IMPORTED)
    arguments = (ranks, str(folder), name, scenario, arguments)
    return mp.start_processes(_worker, args=arguments, nprocs=ranks, join=False, start_method="forkserver")


def spawn(ranks: int, folder: Path, scenario: Callable[..., None], *arguments: Any) -> None:
    """Run a scenario to its end in as many processes; raise what one of them raises."""
    context = start(ranks, folder, scenario, *arguments)
    while not context.join():
        pass


class Scenario:
    """The function of a test, by its name, as whoever unpickles it finds the test there."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._module, self.__name__ = function.__module__, function.__name__

    def __call__(self, *arguments: Any) -> None:
        getattr(importlib.import_module(self._module), self.__name__).scenario(*arguments)


def on_ranks(count: int | None = None) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a scenario: it runs in so many processes, or in as many as the parameter `ranks` says."""

    def made(scenario: Callable[..., None]) -> Any:
        names = [*inspect.signature(scenario).parameters][1:]

        def test(tmp_path: Path, **given: Any) -> None:
            spawn(given.pop("ranks", count), tmp_path, Scenario(scenario), *(given[name] for name in names))

        asked = ["tmp_path", *names, *(["ranks"] if count is None else [])]
        kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked]
        test.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = scenario.__name__, scenario.__doc__, scenario.__module__
        test.scenario = scenario  # type: ignore[attr-defined]
        return pytest.mark.slow(test)

    return made
