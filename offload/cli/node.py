"""What a node has, and what all ranks of a plan take of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from offload.config import parse_bytes
from offload.errors import InfeasiblePlanError
from offload.units import format_bytes, format_count

if TYPE_CHECKING:
    from offload.measure import RatesFile
    from offload.plan import Plan, Rates

WEIGHT_BYTES = GRADIENT_BYTES = 2
"""Of each parameter: 16-bit training."""

GPU = "the GPU"
"""How an error names what is short."""

SYSTEM_SHARE, LEAST_SYSTEM_BYTES = 1 / 16, 2 << 30
"""Of host memory, left to the system and its page cache."""
PROCESS_BYTES = 3 << 29
"""Of host memory, for what a rank takes beside a plan: Python, torch, the host's side of a GPU's driver."""
GPU_SHARE, LEAST_GPU_BYTES = 1 / 10, 2 << 30
"""Of a GPU's memory, left free, as `gpu_memory="auto"` leaves it."""
STREAMED_WEIGHTS = (
    "weights in host memory that a GPU computes run under FSDP2's CPUOffloadPolicy and ZeRO-3's offload_param, which "
    "is not predicted yet"
)
"""What errors say of weights that do not fit a GPU; docs/modes.md says more."""
DRIVER_BYTES = 1 << 29
"""Of GPU memory: a context and its kernels."""

STAND_IN = "/mnt/drive"
"""What a path is called that nobody has named, before its number."""

_COUNTED = re.compile(r"\b(\d{1,6}) x ", re.ASCII)


def node_of(file: RatesFile) -> tuple[int | None, int | None]:
    """Return the bytes of host memory and the number of GPUs of a machine; None for what its rates do not say."""
    nbytes, gpu = file.machine.get("memory_bytes"), file.machine.get("gpu")
    gpus = sum(int(count) for count in _COUNTED.findall(gpu)) if isinstance(gpu, str) else None
    return parse_bytes("machine.memory_bytes", nbytes) if nbytes is not None else None, gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Nodes, all alike, and their ranks.

    Attributes:
        rates: Of a node; that of the update is of the parameters with their format of state.
        nodes: How many there are.
        ranks: Of each.
        memory_bytes: Host memory of a node; None if that is not known.
        gpus: Of a node; None likewise.
        file: Where the rates are from; None if only they are known.
    """

    rates: Rates
    nodes: int = 1
    ranks: int = 1
    memory_bytes: int | None = None
    gpus: int | None = None
    file: RatesFile | None = None

    @property
    def all_ranks(self) -> int:
        """Ranks of all nodes: each has its part of the model's state."""
        return self.nodes * self.ranks

    def _path(self, number: int) -> Mapping[str, Any]:
        known = self.file.paths if self.file else ()
        return known[number] if number < len(known) else {}

    def path_words(self, number: int) -> str:
        """Return where a path is, or what else the rates call it; "" where they do not."""
        return str(self._path(number).get("path", ""))

    def path_name(self, number: int) -> str:
        """Return what a path is called, by its number, as in the names of lanes, and where it is."""
        place = self.path_words(number)
        return f"path {number} ({place})" if place else f"path {number}"

    def path_place(self, number: int) -> str:
        """Return a directory on a path; a stand-in where rates say in words what it is, or nothing."""
        place = self.path_words(number)
        return place if os.path.isabs(place) or urlsplit(place).netloc else f"{STAND_IN}{number}"

    def path_bytes(self, number: int) -> int | None:
        """Return the size of a path, which all ranks of a node share; None where unknown."""
        nbytes = self._path(number).get("bytes")
        return None if nbytes is None else parse_bytes("paths.bytes", nbytes)


@dataclass(frozen=True, slots=True)
class Use:
    """What each rank of a plan takes, by what for; the rest of the process comes on top.

    Attributes:
        host: Bytes of host memory.
        gpu: Bytes of its GPU's memory; empty without one.
    """

    host: Mapping[str, int]
    gpu: Mapping[str, int]

    @property
    def host_bytes(self) -> int:
        """Host memory of a rank."""
        return sum(self.host.values())

    @property
    def gpu_bytes(self) -> int:
        """GPU memory of a rank."""
        return sum(self.gpu.values())


def reserved_bytes(node_memory: int, ranks: int) -> int:
    """Return the host memory that a plan should leave to the system and to the rest of all ranks."""
    return max(LEAST_SYSTEM_BYTES, int(SYSTEM_SHARE * node_memory)) + ranks * PROCESS_BYTES


def gpu_room(memory_bytes: int) -> int:
    """Return what a plan should take of a GPU's memory at most: activations are an estimate, allocators fragment."""
    return max(0, memory_bytes - max(LEAST_GPU_BYTES, int(GPU_SHARE * memory_bytes)))


def use_of(plan: Plan, beside: Mapping[str, int]) -> Use:
    """Return what a rank takes whose part of the model is that of its state, as in ZeRO-3.

    Args:
        plan: Its plan.
        beside: Bytes that forward and backward take where the weights lie, by what for, as far as they are known.
    """
    from offload.plan import Home
    from offload.plan.budget import PIECE_BUFFERS

    numel = sum(parameter.numel for parameter in plan.layout.parameters)
    weights, gradients = WEIGHT_BYTES * numel, plan.budgets.gradient_bytes
    state = plan.home_bytes[Home.HOST]
    host = {"state": state, "gradients": gradients, "buffers and tables": plan.host_bytes - state - gradients}
    if not plan.weights_on_gpu:
        return Use({"weights": weights, **host, **beside}, {})
    left = 0 if plan.budgets.gradients_on_gpu else gradients  # during backward
    left = GRADIENT_BYTES * numel if plan.gradient_buffers else left
    gpu = {
        "weights": weights,
        "gradients": max(0, GRADIENT_BYTES * numel - left),  # padding may have been counted
        "state": plan.home_bytes[Home.GPU],
        "staging": plan.gpu_slots * plan.gpu_slot_bytes,
    }
    if plan.piece_buffer_bytes:
        gpu["small tensors"] = PIECE_BUFFERS * plan.piece_buffer_bytes
    return Use(host, {**gpu, **beside})


def check_fits(node_memory: int | None, ranks: int, use: Use, rates: Rates, *, leaves: bool = False) -> None:
    """Refuse a plan that takes more memory than the node has.

    Args:
        node_memory: Bytes of host memory; None if that is not known.
        ranks: How many there are.
        use: What each takes.
        rates: Of one rank; know the size of its GPU.
        leaves: Whether it has to leave the part of both that is the system's, and that is for estimates.

    Raises:
        InfeasiblePlanError: It takes more memory than there is, of the host for all ranks or of each rank's GPU.
    """
    if node_memory is not None:
        room = node_memory - reserved_bytes(node_memory, ranks) if leaves else node_memory
        if ranks * use.host_bytes > room:
            less = "lower --host-memory, or " if use.host["state"] else ""
            raise InfeasiblePlanError(
                f"the host memory of {format_count(ranks, 'rank')} (each {shares(use.host)})",
                ranks * use.host_bytes,
                {f"the node{', less the part of the system' * leaves}": room},
                f"{less}give --node-memory for another node",
            )
    if size := rates.gpu.memory_bytes:
        room = gpu_room(size) if leaves else size
        if use.gpu_bytes > room:
            less = "lower --gpu-memory, or " if use.gpu["state"] else ""
            raise InfeasiblePlanError(
                f"a rank's GPU memory ({shares(use.gpu)})",
                use.gpu_bytes,
                {f"{GPU}{', less what has to stay free' * leaves}": room},
                f"{less}use more ranks on more GPUs; {STREAMED_WEIGHTS}",
            )


def shares(parts: Mapping[str, int]) -> str:
    """Return what something is made of, as words: what is most first."""
    most_first = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in most_first if nbytes)
