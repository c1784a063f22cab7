"""A question to `offload plan` (`Scenario`: config, model, machine) and its `Answer`, which `ask` gives.

An answer is about one rank: its plan, the memory that it uses of its node, and how long an iteration takes.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from offload import combinations
from offload.cli.machine import Machine
from offload.cli.shapes import Model
from offload.cli.streamed import (
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    PerPass,
    WeightTransfers,
    gradients_bytes,
    path_of,
    reduced_gradients_bytes,
    window_bytes,
)
from offload.cli.values import settings_of
from offload.config import LEAST_BUDGET, OffloadConfig, PathConfig, Size
from offload.errors import ConfigError, InfeasiblePlanError
from offload.formats import EXACT, StateFormat
from offload.rules import RULES
from offload.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from offload.layout import Layout
    from offload.plan import Budgets, Estimate, GpuRates, Plan, Rates
    from offload.predict import Prediction

NODE_NAME = "the node"
GPU_NAME = "the GPU"
GPU_STAGING_NAME = "GPU staging"
FASTEST_PATH_NAME = "the fastest path"
"""Names in `InfeasiblePlanError.available_bytes` for what is too small; more words may follow a name there."""

BUDGET_NAMES = frozenset({"host_memory", "gpu_memory"})
"""Names there for the budgets of state that is at home in memory."""

SYSTEM_SHARE, LEAST_SYSTEM_BYTES = 1 / 16, 2 << 30
"""Share of host memory that is left to the system and its page cache, and the least that is."""
PROCESS_BYTES = 3 << 29
"""Host memory of a rank beside its plan: Python, torch, the host's side of a GPU's driver."""
GPU_SHARE, LEAST_GPU_BYTES = 1 / 10, 2 << 30
"""Share of a GPU's memory that is left free, and the least that is; `gpu_memory="auto"` leaves as much."""
STREAMED_WEIGHTS = "have weights in host memory (--weights-on host, docs/weights.md)"
DIVIDED_WEIGHTS = "divide weights and gradients among ranks, too (--stage 3)"
FEWER_TOKENS = "take tokens in more micro-steps (--accumulate)"
"""Advice of errors about what does not fit a GPU, beside more GPUs."""
SHARDED = {
    1: "state is divided among ranks, as by ZeRO-1 or DDP with shard=True, and each has all weights and gradients",
    2: "state and gradients are divided among ranks, as by ZeRO-2, and each has all weights",
    3: "state, gradients and weights are divided among ranks, as by ZeRO-3 or FSDP2 (--stage)",
}
"""By `Model.stage`, what several ranks divide among them."""
DRIVER_BYTES = 1 << 29
"""GPU memory of a context and its kernels."""

FLOPS_PER_WEIGHT = {"forward": 2, "backward": 4}
"""Floating-point operations of each weight for each token: a multiplication and an addition, in backward for each of
two gradients (of input and weight). Backward also repeats forward if activations are recomputed. Attention's own
products are left out; equation 3 of Narayanan et al. (SC '21, arXiv 2104.04473) gives their share."""

MOST_SUBGROUPS = 1 << 13
"""Most subgroups of a rank, to bound the time of planning. If no size is given, they are larger instead."""
MOST_NUMEL = 5 * 10**11
"""Most parameters of a rank: 5.5 TiB of Adam's state."""
MOST_TILES = 1 << 17
"""Most tiles of a rank whose step is simulated: some ten seconds' work."""


ADVISED = {one.name: one for one in settings_of("advised")}
"""Settings that `offload plan` may choose, by their names."""


def budget_text(nbytes: int) -> str | int:
    """Return a budget as a user would write it: "8GiB", "500MiB"; in bytes if it is no multiple of a MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The training to be predicted.

    Attributes:
        config: The config of each rank, with all the machine's paths, and sizes for `host_memory`, `gpu_memory`.
        model: The model.
        machine: The machine.
        stride: If not 0, the GPU updates every so many-th subgroup, in place of the config's `placement`.
        gpu_staging: GPU memory for staging slots; None for as many as a session takes.
    """

    config: OffloadConfig
    model: Model
    machine: Machine
    stride: int = 0
    gpu_staging: int | None = None

    @classmethod
    def of(
        cls,
        model: Model,
        machine: Machine,
        path_bytes: int = 1 << 60,
        gpu_staging: int | None = None,
        **settings: Any,
    ) -> Scenario:
        """Return the scenario of a session with these settings, on all paths of a machine.

        Args:
            model: The model.
            machine: The machine.
            path_bytes: Most bytes that each path offers to a rank.
            gpu_staging: See `Scenario`.
            settings: Fields of the config. A budget for state that is not given is 0. `placement` may also be
                "stride:<k>", which a config does not take: the GPU updates every k-th subgroup.

        Raises:
            ConfigError: A session would refuse these settings.
        """
        from offload.plan.planner import STRIDE

        paths = _path_configs(machine, path_bytes)
        if model.is_streamed:
            _check_streamed(model, machine, settings)
        usual: dict[str, Any] = {"host_memory": 0, "gpu_memory": 0, "keep_grads": False}
        placement = settings.get("placement", "auto")
        # With limited memory for gradients they leave the GPU for the paths, and the CPU updates all state.
        if model.weights_on_gpu and settings.get("gradient_memory") is not None:
            if placement not in ("auto", "cpu", 0):  # 0 is a share: the GPU updates none
                combinations.GRADIENTS_ON_PATHS.refuse("--placement", placement, least='"cpu"')
            placement = "cpu"
            settings["keep_grads"] = False
        stride = 0
        if isinstance(placement, str) and placement.startswith(STRIDE):  # "stride:<k>"
            stride = int(placement.removeprefix(STRIDE))
            placement = "auto"  # a config knows no strides
        if not model.weights_on_gpu:
            settings["keep_grads"] = True  # gradients are in slots: the setting is for weights on a GPU
        config = OffloadConfig(**{**usual, "paths": paths, **settings, "placement": placement})
        scenario = cls(config=config, model=model, machine=machine, stride=stride, gpu_staging=gpu_staging)
        return scenario._with_own_update_rate()

    def with_settings(self, **settings: Any) -> Scenario:
        """Return this with other settings of the config; a new state format changes the update rate, too."""
        changed = replace(self, config=replace(self.config, **settings))
        return changed if changed.config.format is self.config.format else changed._with_own_update_rate()

    def _with_own_update_rate(self) -> Scenario:
        """Return this with the rate at which the CPU updates state in this scenario's formats.

        Only a rates file knows rates by format: without one this is unchanged.
        """
        if self.machine.file is None:
            return self
        cpu_bytes_per_s = self.machine.file.cpu_rate(self._numels_by_format)
        return self.at_rates(replace(self.machine.rates, cpu_bytes_per_s=cpu_bytes_per_s))

    def with_weights_on(self, place: str) -> Scenario:
        """Return this with weights in another place (a value of `Model.weights_on`).

        If they leave the GPU, the CPU updates all state, and settings for weights on a GPU are as if not given.
        """
        if place == self.model.weights_on:
            return self
        model = replace(self.model, weights_on=place)
        if not self.model.weights_on_gpu:
            return replace(self, model=model)
        config = replace(self.config, keep_grads=True, placement="auto", gpu_memory=0)
        return replace(self, model=model, config=config, stride=0)

    def at_rates(self, rates: Rates) -> Scenario:
        """Return this with a machine of other rates."""
        return replace(self, machine=replace(self.machine, rates=rates))

    def with_host_memory(self, nbytes: int) -> Scenario:
        """Return this with another budget of host memory, `nbytes` in all.

        If the config has sizes for memory nodes, the fastest nodes come first and get up to their sizes: what is
        taken away is missing on the slowest, and what is added goes to the fastest.
        """
        node_bytes = self.config.node_bytes
        fastest_first = [*self.machine.rates.fastest_first(node_bytes)]
        left_bytes = nbytes
        sizes: dict[int, int] = {}
        for number in fastest_first:
            size = min(left_bytes, node_bytes[number])
            sizes[number] = size if size >= LEAST_BUDGET else 0  # a config refuses less
            left_bytes -= sizes[number]
        if fastest_first:  # else no nodes are configured, and `sizes` is empty
            sizes[fastest_first[0]] += left_bytes
        return self.with_settings(host_memory={f"node{number}": size for number, size in sizes.items()} or nbytes)

    def with_room_on_paths(self) -> Scenario:
        """Return this with endless room on its paths."""
        return self.with_settings(paths=[replace(path, max_bytes=None) for path in self.config.path_configs])

    @property
    def placement(self) -> str | float:
        """Which state that is not at home on the GPU is updated there, as `choose_plan` takes it."""
        return f"stride:{self.stride}" if self.stride else self.config.placement

    @property
    def host_memory(self) -> int:
        """Host memory for state."""
        return self.config.host_bytes or 0

    @property
    def gpu_memory(self) -> int:
        """GPU memory for state."""
        return int(self.config.gpu_memory)

    @property
    def gradient_memory(self) -> int | None:
        """Host memory for gradients; further ones are written to the paths. None for no limit."""
        return None if self.config.gradient_memory is None else int(self.config.gradient_memory)

    @property
    def exact_params(self) -> int:
        """How many parameters keep exact state in a format whose elements share scales; 0 in other formats."""
        return self.model.exact_params if self.config.format.shares_scales else 0

    def value(self, name: str) -> Any:
        """Return the value of a setting as plans use it: `placement` with a stride, `host_memory` as one size."""
        return getattr(self, name) if name in ("placement", "host_memory") else getattr(self.config, name)

    def value_to_paste(self, name: str) -> Any:
        """Return the value of a setting as a user would write it, or its default if that has the same effect."""
        value = self.value(name)
        if name == "paths":
            return [path.path for path in self.config.path_configs] or ()  # (): the default
        if name == "gradient_memory" and not self.gradients_leave:
            return None
        return budget_text(value) if isinstance(ADVISED[name].metadata["check"], Size) else value

    def can_be_given(self, name: str) -> bool:
        """Return whether a user can give a setting where this scenario's weights lie.

        Of several ranks, `keep_grads` can be given only under FSDP2: DeepSpeed decides it, and under DDP it is true.
        """
        if name == "keep_grads" and self.machine.all_ranks > 1 and self.model.stage != 3:
            return False
        return self.model.weights_on_gpu or ADVISED[name].metadata["advised"].weights_on != "gpu"

    def is_worth_trying(self, name: str) -> bool:
        """Return whether other values of a setting may make a difference where this scenario's weights lie.

        With several ranks a setting that DeepSpeed's config does not take is left alone: DeepSpeed decides it.
        """
        weights_on = "gpu" if self.model.weights_on_gpu else "cpu"
        metadata = ADVISED[name].metadata
        is_open = self.machine.all_ranks == 1 or metadata["deepspeed"] is None
        return is_open and metadata["advised"].weights_on in ("", weights_on)

    def is_valid(self, name: str, value: Any) -> bool:
        """Return whether a setting may have this value beside the other settings."""
        try:
            self.with_settings(**{name: value})
        except ConfigError:
            return False
        return True

    @property
    def implied_settings(self) -> frozenset[str]:
        """Settings whose values follow from others: with gradients on paths the CPU updates all."""
        cpu_updates_all = self.model.weights_on_gpu and self.gradient_memory is not None
        return frozenset({"placement", "gpu_memory"} if cpu_updates_all else ())

    @property
    def state_bytes(self) -> int:
        """Bytes of a rank's state."""
        layout, _ = _layout_and_budgets(self)
        return layout.state_bytes

    def __str__(self) -> str:
        """Return the settings that matter, in words."""
        rounded = " (rounded)" if self.config.format.rounds else ""
        words = [f"state {self.config.format.name}{rounded}"]
        if self.can_be_given("keep_grads"):
            words.append("keep_grads" if self.config.keep_grads else "keep_grads=False")
        if self.placement != "auto":
            words.append(f"placement {self.placement}")
        if self.gradients_leave:
            words.append(f"gradient_memory {budget_text(self.gradient_memory or 0)}")
        if self.model.recompute:
            words.append("recomputation")
        if self.model.is_streamed:
            where = "in host memory" if self.model.weights_on == "host" else "in a file"
            words.append(f"weights {where}")
        return ", ".join(words)

    @property
    def _numels_by_format(self) -> dict[StateFormat, int]:
        """Number of parameters by the format of their state."""
        numels = {self.config.format: self.model.params - self.exact_params}
        return {**numels, EXACT: self.exact_params} if self.exact_params else numels

    @property
    def guess_warning(self) -> str:
        """The warning that the update rate of a state format is only a guess; "" if it was measured."""
        return self.machine.file.guesses(self._numels_by_format) if self.machine.file else ""

    @property
    def warnings(self) -> list[str]:
        """Warnings about the rates: of a file that says where its figures are from, and about a guess."""
        file = self.machine.file
        # The file of a measured machine has no `source`; `offload probe` has told its warnings to whoever measured.
        warnings = [*file.warnings] if file is not None and file.source else []
        return [*warnings, self.guess_warning] if self.guess_warning else warnings

    @property
    def guess_mark(self) -> str:
        """The mark after times that rest on a guessed rate: "*", or "" if none does."""
        return "*" if self.guess_warning else ""

    def mark_guess_warning(self, warnings: Sequence[str]) -> list[str]:
        """Return warnings, with the mark before the one that says that a rate is guessed."""
        return [f"* {text}" if text == self.guess_warning else text for text in warnings]

    @property
    def numel(self) -> int:
        """Parameters whose state a rank has."""
        return math.ceil(self.model.params / self.machine.all_ranks)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a rank has between passes: those of its part at stage 3, else all weights'."""
        return WEIGHT_BYTES * (self.numel if self.model.stage == 3 else self.model.params)

    @property
    def whole_gradient_bytes(self) -> int:
        """Bytes of the whole model's gradients, which at stage 1 every rank has until the step; 0 at other stages."""
        return GRADIENT_BYTES * self.model.params if self.model.stage == 1 else 0

    @property
    def sharding_text(self) -> str:
        """What several ranks divide among them, in words; "" for one rank."""
        return SHARDED[self.model.stage] if self.machine.all_ranks > 1 else ""

    @property
    def gradients_leave(self) -> bool:
        """Whether host memory has too little room for all gradients, so that some are written to the paths."""
        return self.gradient_memory is not None and self.gradient_memory < GRADIENT_BYTES * self.numel

    @property
    def computes_on_gpu(self) -> bool:
        """Whether a GPU computes forward and backward."""
        return self.model.weights_on != "cpu" and bool(self.machine.rates.gpu.lanes)

    @property
    def window_bytes(self) -> int:
        """Bytes of streamed weights that are at once on the device that computes with them; 0 without a shape."""
        return window_bytes(self.model.shape) if self.model.shape is not None else 0

    @property
    def forward_backward_bytes(self) -> dict[str, int]:
        """Bytes that forward and backward take on the device that computes them, by purpose; empty if unknown.

        "gathered weights": those that are gathered from all ranks, or streamed, while they are used. "gradients on
        their way": those that leave the GPU, or that ranks reduce.
        """
        model = self.model
        if model.shape is None or model.tokens is None:
            return {}
        tokens = math.ceil(model.tokens / model.accumulate)
        nbytes = {"activations": model.shape.activation_bytes(tokens, recompute=model.recompute)}
        if model.is_streamed and self.computes_on_gpu:
            nbytes["gathered weights"] = self.window_bytes
        elif self.machine.all_ranks > 1 and model.stage == 3:
            nbytes["gathered weights"] = model.shape.gathered_bytes
        if self.computes_on_gpu:
            nbytes["driver"] = DRIVER_BYTES
            if not model.weights_on_gpu:
                nbytes["gradients on their way"] = gradients_bytes(model.shape)
            elif self.machine.all_ranks > 1:
                nbytes["gradients on their way"] = reduced_gradients_bytes(model.shape)
            elif not self.config.keep_grads:  # a gradient is copied to the host once it is whole
                nbytes["gradients on their way"] = GRADIENT_BYTES * model.shape.largest_params
        return nbytes

    def weight_transfers(self, use: MemoryUse) -> WeightTransfers | None:
        """Return the transfers of streamed weights; None if weights are not streamed.

        Args:
            use: A rank's use of memory. What it leaves of the node's memory is the page cache's, in which the kernel
                keeps weights that lie in a file.
        """
        model = self.model
        machine = self.machine
        if not model.is_streamed:
            return None
        kept_bytes = None
        if model.weights_on == "path":
            node_room = 0  # size of memory unknown: no weights beyond those in use are taken to stay there
            if machine.memory_bytes is not None:
                node_room = machine.memory_bytes - reserved_bytes(machine.memory_bytes, machine.ranks)
            # What is left to the rank; its "weights" are the window of weights in use, which memory holds as well.
            kept_bytes = max(0, node_room // machine.ranks - use.host_bytes) + use.host["weights"]
        return WeightTransfers(
            numel=self.numel,
            rest=math.ceil(model.shape.rest_params / machine.all_ranks) if model.shape is not None else 0,
            accumulate=model.accumulate,
            card=self.rank_gpu if self.computes_on_gpu else None,
            kept_bytes=kept_bytes,
        )

    @property
    def rank_gpu(self) -> GpuRates:
        """The rates of a rank's GPU beside the other ranks' (`Rates.shared_by`), also where it updates nothing."""
        return self.machine.rates.shared_by(self.machine.ranks).gpu

    @property
    def least_gpu_bytes(self) -> int:
        """Least bytes that a rank's GPU holds: with no state at home there, and all updates on the CPU."""
        nbytes = sum(self.forward_backward_bytes.values())
        if not self.model.weights_on_gpu:
            return nbytes
        # The whole model's gradients, where a rank has them, contain its own.
        kept_bytes = GRADIENT_BYTES * self.numel if self.config.keep_grads else 0
        return self.weight_bytes + max(kept_bytes, self.whole_gradient_bytes) + nbytes


def _path_configs(machine: Machine, path_bytes: int) -> list[PathConfig]:
    """Return a config for each of the machine's paths: a rank gets its share of the size, at most `path_bytes`."""
    paths = []
    for number in range(len(machine.rates.paths)):
        size = machine.path_bytes(number)
        most = path_bytes if size is None else min(path_bytes, size // machine.ranks)
        paths.append(PathConfig(path=machine.path_place(number), max_bytes=most))
    return paths


def _check_streamed(model: Model, machine: Machine, settings: Mapping[str, Any]) -> None:
    """Refuse streamed weights without a place for them, and settings by which the GPU would update state."""
    has_place = machine.rates.paths if model.weights_on == "path" else machine.rates.gpu.lanes
    if not has_place:
        needed = "a path (--drive)" if model.weights_on == "path" else "a GPU that computes them (--gpu)"
        raise ConfigError("--weights-on", model.weights_on, f"have {needed}")
    if model.stage != 3:
        advice = (
            f"leave it out for --weights-on {model.weights_on}: others keep weights whole where they are computed"
        )
        raise ConfigError("--stage", model.stage, advice)
    if settings.get("placement", 0) not in ("auto", "cpu", 0):  # 0 is a share: the GPU updates none
        combinations.WEIGHTS_ON_CPU.refuse("placement", settings["placement"], least='"cpu"')
    if settings.get("gpu_memory", 0) not in ("auto", 0):
        combinations.WEIGHTS_ON_CPU.refuse("gpu_memory", settings["gpu_memory"], least=0)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that each rank of a plan uses; the rest of the process comes on top.

    Attributes:
        host: Bytes of host memory, by purpose.
        gpu: Bytes of its GPU's memory, by purpose; empty without one.
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
    """Return the most bytes of a GPU's memory that a plan should use.

    The rest stays free, as activations are an estimate, and allocators fragment memory.
    """
    return max(0, memory_bytes - max(LEAST_GPU_BYTES, int(GPU_SHARE * memory_bytes)))


def plan_memory_use(plan: Plan, scenario: Scenario) -> MemoryUse:
    """Return the memory of host and GPU that a rank uses with a plan, by purpose.

    Weights and what forward and backward take are counted where they lie: on the GPU, or in host memory. By
    `Model.stage` a rank has all weights and gradients, or only its part.
    """
    from offload.plan import Home

    weight_bytes = scenario.weight_bytes
    if scenario.model.weights_on == "path":  # the kernel may drop the other weights from memory
        weight_bytes = min(weight_bytes, scenario.window_bytes)
    state_bytes = plan.home_bytes[Home.HOST]
    gradient_bytes = plan.budgets.gradient_bytes
    host = {
        "state": state_bytes,
        "gradients": gradient_bytes,
        "buffers and tables": plan.host_bytes - state_bytes - gradient_bytes,
    }
    forward_backward = scenario.forward_backward_bytes
    if plan.weights_on_gpu:
        return MemoryUse(host, {**_gpu_bytes_by_purpose(plan, scenario), **forward_backward})
    host = {"weights": weight_bytes, **host}
    if scenario.whole_gradient_bytes:
        host["gradients of all ranks"] = scenario.whole_gradient_bytes
    if scenario.computes_on_gpu:  # with weights that are streamed to it
        return MemoryUse(host, forward_backward)
    return MemoryUse({**host, **forward_backward}, {})


def _gpu_bytes_by_purpose(plan: Plan, scenario: Scenario) -> dict[str, int]:
    """Return the bytes of weights, gradients, state and buffers on the GPU of a rank with its weights there.

    What forward and backward take comes on top (`Scenario.forward_backward_bytes`).
    """
    from offload.plan.budget import PIECE_BUFFERS

    all_gradient_bytes = GRADIENT_BYTES * sum(parameter.numel for parameter in plan.layout.parameters)
    # Gradients that are copied to the host during backward: all, if they go through buffers to the paths; none, if
    # they wait on the GPU for the step; else those that the budget has slots for.
    if plan.gradient_buffers:
        leaving_bytes = all_gradient_bytes
    else:
        leaving_bytes = 0 if plan.budgets.gradients_on_gpu else plan.budgets.gradient_bytes
    kept_bytes = all_gradient_bytes - leaving_bytes  # may be below 0, as budgets may count padding
    nbytes = {
        "weights": scenario.weight_bytes,
        # With ZeRO stage 1 a rank has gradients of the whole model until the step: its own are among them.
        "gradients": max(0, kept_bytes, scenario.whole_gradient_bytes),
        **plan.device_bytes,
    }
    if plan.piece_buffer_bytes:
        nbytes["small tensors"] = PIECE_BUFFERS * plan.piece_buffer_bytes
    return nbytes


def check_fits(scenario: Scenario, node_memory: int | None, use: MemoryUse, *, leaves: bool = False) -> None:
    """Raise if a plan uses more memory than there is.

    Args:
        node_memory: Bytes of host memory of the node; None if unknown.
        use: The memory that each rank uses.
        leaves: Whether to keep `reserved_bytes` of the host free, and all but `gpu_room` of each GPU.

    Raises:
        InfeasiblePlanError: All ranks use more host memory, or one more GPU memory, than there is, or the path has no
            room for a file of weights.
    """
    if scenario.model.weights_on == "path":
        most = scenario.config.path_configs[path_of(scenario.machine.rates)].max_bytes
        nbytes = WEIGHT_BYTES * scenario.numel
        if most is not None and nbytes > most:
            raise InfeasiblePlanError("a rank's weights", nbytes, {FASTEST_PATH_NAME: most}, "give a larger --drive")
    if node_memory is not None:
        _check_fits_host(scenario, node_memory, use, leaves=leaves)
    if gpu_memory := scenario.machine.rates.gpu.memory_bytes:
        _check_fits_gpu(scenario, gpu_memory, use, leaves=leaves)


def _check_fits_host(scenario: Scenario, node_memory: int, use: MemoryUse, *, leaves: bool) -> None:
    """Raise if all ranks use more host memory than their node has; see `check_fits`."""
    ranks = scenario.machine.ranks
    room = node_memory - reserved_bytes(node_memory, ranks) if leaves else node_memory
    if ranks * use.host_bytes <= room:
        return
    can_stream_more = use.host["state"] and scenario.machine.rates.paths
    less = "give less of it to state (--host-memory), or " if can_stream_more else ""
    reserve = ", less the part of the system" if leaves else ""
    raise InfeasiblePlanError(
        f"the host memory of {format_count(ranks, 'rank')} (each {uses_text(use.host)})",
        ranks * use.host_bytes,
        {f"{NODE_NAME}{reserve}": room},
        f"{less}{scenario.machine.advice['memory']}",
    )


def _check_fits_gpu(scenario: Scenario, gpu_memory: int, use: MemoryUse, *, leaves: bool) -> None:
    """Raise if a rank uses more of its GPU's memory than there is; see `check_fits`."""
    room = gpu_room(gpu_memory) if leaves else gpu_memory
    if use.gpu_bytes <= room:
        return
    less = "give less of it to state (--gpu-memory), or " if use.gpu.get("state") else ""
    gpus = scenario.machine.advice["gpus"]
    reserve = ", less what has to stay free" if leaves else ""
    raise InfeasiblePlanError(
        f"a rank's GPU memory ({uses_text(use.gpu)})",
        use.gpu_bytes,
        {f"{GPU_NAME}{reserve}": room},
        f"{less}{gpus}, or {_for_one_gpu(scenario, use, room)}",
    )


def _for_one_gpu(scenario: Scenario, use: MemoryUse, room: int) -> str:
    """Return advice, beside more GPUs, for a rank that uses more than `room` bytes of its GPU's memory.

    The advice is to take tokens in so many micro-steps that activations fit. If no number of these is enough, or
    activations are unknown, it is to have fewer weights on the GPU. If no weights lie there, it is more micro-steps.
    """
    model = scenario.model
    otherwise = FEWER_TOKENS
    if use.gpu.get("weights"):
        otherwise = STREAMED_WEIGHTS if model.stage == 3 else DIVIDED_WEIGHTS
    if model.shape is None or model.tokens is None:
        return otherwise
    activation_room = room - (use.gpu_bytes - use.gpu.get("activations", 0))
    accumulate = model.accumulate
    while 2 * accumulate <= model.tokens:
        accumulate *= 2
        tokens = math.ceil(model.tokens / accumulate)
        if model.shape.activation_bytes(tokens, recompute=model.recompute) <= activation_room:
            return f"take tokens in {accumulate} micro-steps (--accumulate {accumulate})"
    return otherwise


DOES_NOT_FIT = "does not fit:"
"""How an answer about a plan that does not fit begins."""

_LACKED = {
    NODE_NAME: "host memory",
    GPU_NAME: "GPU memory",
    FASTEST_PATH_NAME: "room on the fastest drive",
    "staging_memory": "memory for staging slots",
    GPU_STAGING_NAME: "GPU memory for staging slots",
}
"""What is lacking, in words, if a name in `InfeasiblePlanError.available_bytes` begins with one of these."""

_ROOM_ON_DRIVES = "room on the drives"
"""What is lacking if the names there are those of paths."""


def lacking_bytes(error: InfeasiblePlanError) -> int:
    """Return how many bytes more a plan needed that does not fit."""
    offers = dict(error.available_bytes)
    # If anything but budgets of state is offered (paths, say), `needed_bytes` is without state at home in memory: the
    # budgets do not count.
    if any(name not in BUDGET_NAMES for name in offers):
        offers = {name: nbytes for name, nbytes in offers.items() if name not in BUDGET_NAMES}
    return error.needed_bytes - sum(offers.values())


def misfit_text(error: InfeasiblePlanError) -> str:
    """Return the short answer about a plan that does not fit: what is too small, and by how many bytes."""
    return f"{DOES_NOT_FIT} {format_bytes(lacking_bytes(error))} more {_lacked(error)} needed"


def lacks_drives(error: InfeasiblePlanError) -> bool:
    """Return whether room on the drives is what is lacking."""
    return _lacked(error) in (_ROOM_ON_DRIVES, _LACKED[FASTEST_PATH_NAME])


def _lacked(error: InfeasiblePlanError) -> str:
    """Return in words what is lacking, by the names of what the error says is there."""
    offers = error.available_bytes
    usual = "memory for state" if BUDGET_NAMES.issuperset(offers) else _ROOM_ON_DRIVES
    lacked = (words for name, words in _LACKED.items() if any(offer.startswith(name) for offer in offers))
    return next(lacked, usual)


def fits_text(answer: Answer) -> str:
    """Return the short answer about a plan that fits: "Fits", and the conditions if some sizes are unknown."""
    scenario, machine, use = answer.scenario, answer.scenario.machine, answer.use
    unknown = []
    if machine.memory_bytes is None:
        unknown.append(f"if a node has {format_bytes(machine.ranks * use.host_bytes)} of host memory")
    if use.gpu_bytes and not machine.rates.gpu.memory_bytes:
        unknown.append(f"if each GPU has {format_bytes(use.gpu_bytes)}")
    if not scenario.forward_backward_bytes:
        unknown.append("without activations, whose size is not known (give --model or --config, and --tokens)")
    return f"Fits{', ' if unknown else ''}{' and '.join(unknown)}."


def uses_text(bytes_by_purpose: Mapping[str, int]) -> str:
    """Return uses of memory in words, the largest first: "2.0 GiB state, 1.0 GiB gradients"."""
    largest_first = sorted(bytes_by_purpose.items(), key=lambda use: -use[1])
    return ", ".join(f"{format_bytes(nbytes)} {purpose}" for purpose, nbytes in largest_first if nbytes)


@dataclass(frozen=True, slots=True)
class Answer:
    """The prediction for a scenario.

    Attributes:
        scenario: The scenario.
        rates: One rank's part of the node's rates.
        plan: One rank's plan.
        use: One rank's use of memory.
        estimate: The plan's cost in closed form, with the bound.
        step_s: Seconds of a step: the simulator's if it was run, else the closed form's.
        prediction: The simulated step, or None.
        forward_s: Seconds of forward; None if unknown.
        backward_s: Seconds of backward, including copies and writes of gradients; None if unknown.
        weight_transfers: The transfers of streamed weights; None if weights are not streamed.
        overlapped_s: Seconds of an iteration whose step is hidden in "forward" (`overlap_forward`), "backward"
            (`overlap="backward"`) or "both", as far as that is possible.
    """

    scenario: Scenario
    rates: Rates
    plan: Plan
    use: MemoryUse
    estimate: Estimate
    step_s: float
    prediction: Prediction | None
    forward_s: float | None
    backward_s: float | None
    weight_transfers: WeightTransfers | None
    overlapped_s: Mapping[str, float]

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration, as far as they are known."""
        return (self.forward_s or 0.0) + (self.backward_s or 0.0) + self.step_s

    @property
    def path_bytes(self) -> int:
        """Bytes that a rank uses of the paths: state, versions in flight, and weights that lie in a file."""
        in_file = self.scenario.model.weights_on == "path"
        return self.plan.storage_bytes + (WEIGHT_BYTES * self.scenario.numel if in_file else 0)

    @property
    def checkpoint_warning(self) -> str:
        """The warning that the drives have no room for a checkpoint beside the state; "" if they have."""
        if self.plan.has_room_for_checkpoints:
            return ""
        room = format_bytes(self.scenario.machine.ranks * self.plan.needed_with_checkpoints)
        return (
            f"drives too small for a checkpoint beside the state, which takes up to {room} in all: save copies "
            "elsewhere (copy=True; a Trainer without save_total_limit)"
        )

    @property
    def figures(self) -> dict[str, Any]:
        """For `--json`: the memory that a rank uses, by purpose, and what it gives back when parked."""
        memory = {"host_memory_bytes": dict(self.use.host), "gpu_memory_bytes": dict(self.use.gpu)}
        return {**memory, "parked": park_figures(self)}

    @property
    def hiding_bytes(self) -> tuple[int, int]:
        """Further bytes of host memory, and of paths, that a rank uses if steps are hidden in backward."""
        return self.plan.extra_bytes_for_updates_in_backward(GRADIENT_BYTES)

    @property
    def warnings(self) -> list[str]:
        """Warnings: about rates, too little free memory, and what was left out to bound the work."""
        from offload.plan.budget import AUTO_SUBGROUP_NUMEL

        machine, use = self.scenario.machine, self.use
        warnings = [*self.scenario.warnings]
        largest = max(subgroup.numel for subgroup in self.plan.layout.subgroups)
        if self.scenario.config.subgroup_numel is None and largest > max(AUTO_SUBGROUP_NUMEL):
            warnings.append(
                f"planned with subgroups of {largest:,} elements, so that there are {MOST_SUBGROUPS:,} at most; a "
                "session chooses smaller ones, with smaller buffers"
            )
        if self.checkpoint_warning:
            warnings.append(self.checkpoint_warning)
        if machine.memory_bytes is not None:
            left = machine.memory_bytes - machine.ranks * use.host_bytes
            advisable = reserved_bytes(machine.memory_bytes, machine.ranks)
            if left < advisable:
                give_less = "give less of it to state (--host-memory)"
                how = give_less if self.rates.paths else f"have {machine.advice['drives']}"
                warnings.append(
                    f"{format_bytes(left)} of host memory are left to the system and the rest of the processes; "
                    f"{format_bytes(advisable)} are advisable: {how}"
                )
        gpu_memory = machine.rates.gpu.memory_bytes
        if gpu_memory and use.gpu_bytes > gpu_room(gpu_memory):
            warnings.append(
                f"{format_bytes(gpu_memory - use.gpu_bytes)} of the GPU are left free; "
                f"{format_bytes(gpu_memory - gpu_room(gpu_memory))} are advisable, as activations are an estimate"
            )
        if self.prediction is None:
            warnings.append(f"by the closed form: steps of more than {MOST_TILES:,} tiles are not simulated")
        return warnings


@lru_cache(maxsize=4)
def _layout(numel: int, exact_numel: int, subgroup_numel: int, empty: Layout) -> Layout:
    """Return the layout of one rank's part of a model, with the rule and format of the `empty` layout.

    The part is planned as one large parameter, and one of the `exact_numel` elements that are kept exact. Cached, as
    a search asks for the same layout many times.
    """
    from offload.dtypes import DtypeCode
    from offload.layout import Parameter, extend_layout

    parameters = [  # 0: of the first parameter group
        Parameter("model", numel - exact_numel, DtypeCode.BFLOAT16, 0),
        Parameter("kept exact", exact_numel, DtypeCode.BFLOAT16, 0, exact=True),
    ]
    return extend_layout(empty, parameters if exact_numel else parameters[:1], subgroup_numel)


@lru_cache(maxsize=128)
def _chosen_plan(of_layout: tuple[Any, ...], budgets: Budgets, rates: Rates, placement: str | float) -> Plan:
    """Return the fastest plan for a layout, which is given by the arguments of `_layout`.

    Cached, as a search for budgets and settings comes to most plans several times.
    """
    from offload.plan import choose_plan

    return choose_plan(_layout(*of_layout), budgets, rates, placement)


def _least_subgroup_numel(numel: int) -> int:
    """Return the least elements of a subgroup, a multiple of 4096, with which there are at most `MOST_SUBGROUPS`."""
    return math.ceil(numel / MOST_SUBGROUPS / 4096) * 4096


def _layout_and_budgets(scenario: Scenario) -> tuple[Layout, Budgets]:
    """Return one rank's layout, and the bytes that each tier has for it."""
    layout = _layout(*_layout_arguments(scenario))
    return layout, _budgets(scenario, layout)


def _layout_arguments(scenario: Scenario) -> tuple[Any, ...]:
    """Return the arguments of `_layout` for one rank's layout.

    Raises:
        ConfigError: A rank has too many parameters, or subgroups are too small, to be planned.
    """
    from offload.layout import Layout

    config, model, machine = scenario.config, scenario.model, scenario.machine
    numel = scenario.numel
    if numel > MOST_NUMEL:
        advice = f"each rank has {numel:,} of them, and {MOST_NUMEL:,} are the most; give more --ranks or --nodes"
        raise ConfigError("--params", model.params, advice)
    empty = Layout((), (), config.state_of(RULES[model.rule]))
    exact_numel = math.ceil(scenario.exact_params / machine.all_ranks)
    return numel, exact_numel, _subgroup_numel(config, numel, empty), empty


def _budgets(scenario: Scenario, layout: Layout) -> Budgets:
    """Return the bytes that each tier has for one rank's layout."""
    from offload.plan import PathBudget
    from offload.plan.budget import GPU_STAGING_SLOTS
    from offload.plan.planner import fastest_nodes_first

    config, model, machine = scenario.config, scenario.model, scenario.machine
    numel = scenario.numel
    gpu_staging = GPU_STAGING_SLOTS * layout.max_subgroup_bytes
    path_room = [1 << 60 if path.max_bytes is None else path.max_bytes for path in config.path_configs]
    if model.weights_on == "path":  # the file of weights takes room from state
        weights_path = path_of(machine.rates)
        path_room[weights_path] = max(0, path_room[weights_path] - WEIGHT_BYTES * numel)
    budgets = config.budgets(
        scenario.host_memory,
        [PathBudget(machine.path_name(number), room) for number, room in enumerate(path_room)],
        on_gpu=model.weights_on_gpu,
        gpu_bytes=scenario.gpu_memory,
        gpu_staging_bytes=gpu_staging if scenario.gpu_staging is None else scenario.gpu_staging,
        gradient_bytes=GRADIENT_BYTES * numel,
        gradients_kept_bytes=scenario.gradient_memory if scenario.gradients_leave else None,
    )
    return fastest_nodes_first(budgets, machine.rates)


def _subgroup_numel(config: OffloadConfig, numel: int, empty: Layout) -> int:
    """Return the elements of a subgroup: as given, or as a session chooses, but no more than `MOST_SUBGROUPS`.

    Args:
        numel: Elements of a rank.
        empty: See `_layout`.
    """
    from offload.plan import choose_subgroup_numel

    least_numel = _least_subgroup_numel(numel)
    if config.subgroup_numel is None:
        return max(choose_subgroup_numel(numel, config.staging_bytes, empty), least_numel)
    if config.subgroup_numel < least_numel:
        why = f"a rank has {numel:,} parameters and at most {MOST_SUBGROUPS:,} subgroups are planned; "
        raise ConfigError("subgroup_numel", config.subgroup_numel, f"{why}give {least_numel:,} or more")
    return config.subgroup_numel


def rank_rates(scenario: Scenario) -> Rates:
    """Return one rank's part of the node's rates, for plans.

    They are without a GPU if weights are streamed, as it updates nothing then, or if there are more ranks than GPUs
    and no rank needs one.

    Raises:
        ConfigError: There are more ranks than GPUs, and each is to have one.
    """
    from offload.plan import NO_GPU

    ranks, gpus = scenario.machine.ranks, scenario.machine.gpus
    rates = scenario.machine.rates.shared_by(ranks)
    if gpus is None or ranks <= gpus:  # None: unknown, so there are taken to be enough
        return replace(rates, gpu=NO_GPU) if scenario.model.is_streamed else rates
    needs_gpu = scenario.computes_on_gpu or scenario.gpu_memory or scenario.placement not in ("auto", "cpu", 0)
    if needs_gpu:
        rates.gpu.check_used(planned=True)  # raises if there is no GPU at all
        raise ConfigError(
            "--ranks", ranks, f"the node has {gpus} GPUs, one for each rank; give --gpus for another node"
        )
    return replace(rates, gpu=NO_GPU)


def _plan(scenario: Scenario, rates: Rates) -> Plan:
    """Return one rank's plan, at its part of the rates (`rank_rates`), with the memory of its gradients counted."""
    _, budgets = _layout_and_budgets(scenario)
    plan = _chosen_plan(_layout_arguments(scenario), budgets, rates, scenario.placement)
    if scenario.model.weights_on_gpu:  # host memory has gradients only of what the CPU updates
        plan = replace(plan, budgets=replace(budgets, gradient_bytes=_cpu_gradient_bytes(plan)))
    # Gradients that go from a GPU to the paths pass through one buffer more.
    return plan.with_buffer_bytes(bounces=1 if scenario.model.weights_on_gpu else 0)


def _cpu_gradient_bytes(plan: Plan) -> int:
    """Return the bytes of gradients of the subgroups that the CPU updates."""
    on_cpu = [subgroup for subgroup in plan.layout.subgroups if not plan.updates_on_gpu(subgroup.index)]
    return GRADIENT_BYTES * sum(subgroup.numel for subgroup in on_cpu)


def memory_use(scenario: Scenario) -> MemoryUse:
    """Return the memory that a rank uses, even if the node has less; `InfeasiblePlanError` if there is no plan."""
    return plan_memory_use(_plan(scenario, rank_rates(scenario)), scenario)


def ask(
    scenario: Scenario,
    *,
    simulate: bool = True,
    timeline: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Answer:
    """Make one rank's plan for a scenario, and predict an iteration with it.

    Args:
        simulate: Whether to run the simulator rather than the closed form alone.
        timeline: Whether the simulated step has a timeline even if forward and backward are unknown.
        report: Called with the visits that have been simulated, and all visits.

    Raises:
        ConfigError: If a value makes no sense, or there are more ranks than GPUs.
        InfeasiblePlanError: If the state does not fit, or all ranks take more than the node has.
    """
    from offload.plan import estimate
    from offload.predict import predict

    rates = rank_rates(scenario)
    plan = _plan(scenario, rates)
    use = plan_memory_use(plan, scenario)
    check_fits(scenario, scenario.machine.memory_bytes, use)
    cost = estimate(plan, rates)
    transfers = scenario.weight_transfers(use)
    forward_s, backward_s = _forward_backward_s(scenario, rates, plan, transfers) or (None, None)
    prediction = None
    if simulate and sum(subgroup.tile_count for subgroup in plan.layout.subgroups) <= MOST_TILES:
        needs_timeline = timeline or forward_s is not None  # hidden steps are predicted from it
        # The second step is predicted: the first fetches nothing, as all state is fresh.
        prediction = predict(plan, rates, steps=2, timeline=needs_timeline, report=report)
    step_s = prediction.step_s if prediction else cost.step_s
    weights_s = transfers.step_s(rates) if transfers else 0.0
    # The drive with the weights moves state and weights one after the other. If no state is streamed it moves weights
    # alone, beside the updates.
    step_s = step_s + weights_s if plan.storage_bytes else max(step_s, weights_s)
    answer = Answer(
        scenario=scenario,
        rates=rates,
        plan=plan,
        use=use,
        estimate=cost,
        step_s=step_s,
        prediction=prediction,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_transfers=transfers,
        overlapped_s={},
    )
    return replace(answer, overlapped_s=_overlapped_s(answer))


def _overlapped_s(answer: Answer) -> dict[str, float]:
    """Return `Answer.overlapped_s`: seconds of an iteration by where its step is hidden.

    Empty if the step was not simulated, or forward and backward are unknown. `answer` is complete but for this.
    """
    from offload.predict.predict import with_backward_s, with_forward_s

    plan, rates, prediction = answer.plan, answer.rates, answer.prediction
    forward_s, backward_s = answer.forward_s, answer.backward_s
    if prediction is None or forward_s is None or backward_s is None:
        return {}
    on_gpu = answer.scenario.computes_on_gpu
    least_s = answer.step_s
    if answer.weight_transfers and plan.storage_bytes:  # one drive reads weights for forward and moves state
        least_s += answer.weight_transfers.read_s(rates)
    with_step_s = with_forward_s(prediction, plan, forward_s, apart=on_gpu)
    overlapped_s = {"forward": backward_s + max(with_step_s, least_s)}
    model = answer.scenario.model
    # Updates in backward are all revoked if every step clips gradients; in the other two cases sessions refuse them.
    if model.clip or plan.gradient_buffers or model.weights_on == "path":
        return overlapped_s
    speculative = plan.with_updates_in_backward(GRADIENT_BYTES)
    for hidden_in, goes_on_in_forward in (("backward", False), ("both", True)):
        overlapped_s[hidden_in] = with_backward_s(
            prediction, speculative, rates, forward_s, backward_s, follows=goes_on_in_forward, apart=on_gpu
        )
    return overlapped_s


def compute_s(scenario: Scenario, rates: Rates) -> PerPass | None:
    """Return the seconds for which forward and backward compute, by `FLOPS_PER_WEIGHT`, transfers left out.

    None if tokens or FLOP/s are unknown.
    """
    if scenario.model.tokens is None or not rates.compute_flops_per_s:
        return None
    flop_s = scenario.model.params * scenario.model.tokens / rates.compute_flops_per_s  # one FLOP a weight and token
    forward_s = FLOPS_PER_WEIGHT["forward"] * flop_s
    repeated_s = forward_s if scenario.model.recompute else 0.0
    return PerPass(forward_s, FLOPS_PER_WEIGHT["backward"] * flop_s + repeated_s)


def _forward_backward_s(
    scenario: Scenario, rates: Rates, plan: Plan, transfers: WeightTransfers | None
) -> PerPass | None:
    """Return the seconds of forward and backward; None if unknown.

    A pass computes while the link and the paths transfer what it needs or makes: it takes as long as the longest of
    these.
    """
    computed = compute_s(scenario, rates)
    if computed is None:
        return None
    forward_s, backward_s = computed
    if scenario.model.weights_on_gpu and not scenario.config.keep_grads:
        # Gradients that the CPU needs are copied from the GPU during backward.
        backward_s = max(backward_s, _cpu_gradient_bytes(plan) / rates.gpu.d2h.alone)
    path_busy_s = [0.0] * len(rates.paths)  # in backward: writes of gradients, and reads of weights
    if plan.gradient_buffers:
        shares = zip(plan.path_shares(rates), rates.paths, strict=True)
        path_busy_s = [plan.path_gradient_bytes * share / path.write.alone for share, path in shares]
    if transfers is not None:
        link_s = transfers.link_s
        read_s = transfers.read_s(rates)
        forward_s = max(forward_s, link_s.forward, read_s)
        backward_s = max(backward_s, link_s.backward)
        if read_s:
            path_busy_s[path_of(rates)] += read_s
    return PerPass(forward_s, max([backward_s, *path_busy_s]))


def least_memory_use(scenario: Scenario) -> MemoryUse | None:
    """Return the memory that a rank uses with the least `host_memory` for which there is a plan.

    None if no `host_memory` is enough, however large.
    """
    from offload.plan import make_plan

    layout, _ = _layout_and_budgets(scenario)
    # The budgets to try: budget n holds exactly the state of the first n subgroups.
    budgets = [0, *itertools.accumulate(layout.subgroup_bytes)]

    def plan_with(resident: int) -> Plan:
        """Return a plan with room for the state of so many subgroups in host memory; it needs no rates."""
        return make_plan(*_layout_and_budgets(scenario.with_host_memory(budgets[resident])))

    def has_plan(resident: int) -> bool:
        """Return whether there is a plan with room for the state of so many subgroups in host memory."""
        try:
            plan_with(resident)
        except InfeasiblePlanError:
            return False
        return True

    # By bisection, as there is a plan with more if there is one with fewer.
    fewest = bisect.bisect_left(range(len(budgets)), True, key=has_plan)
    if fewest == len(budgets):
        return None
    # With weights on a GPU the gradients in host memory depend on placements, which need rates (`_plan`).
    if scenario.model.weights_on_gpu:
        return memory_use(scenario.with_host_memory(budgets[fewest]))
    return plan_memory_use(plan_with(fewest).with_buffer_bytes(bounces=0), scenario)


def missing_option_line(scenario: Scenario) -> str:
    """Return a line that says which option is missing to predict forward and backward."""
    reason = "give --tokens" if scenario.model.tokens is None else "the rates know no FLOP/s; give --flops"
    return f"forward and backward: unknown ({reason})"


def park_figures(answer: Answer) -> dict[str, float]:
    """Return what parking a rank's session gives back, and how long it takes; empty if paths have no room for state.

    Returns:
        "host_bytes" and "gpu_bytes" of memory, and "seconds" to write state to the paths.
    """
    from offload.plan import Home

    plan, host, gpu = answer.plan, answer.use.host, answer.use.gpu
    moved_bytes = plan.home_bytes[Home.HOST] + plan.home_bytes[Home.GPU] + plan.staging_bytes
    path_room = sum(path.available_bytes for path in plan.budgets.paths) - plan.storage_bytes
    if not answer.rates.paths or path_room < moved_bytes:
        return {}
    return {
        "host_bytes": host["state"] + host["gradients"] + host["buffers and tables"],
        "gpu_bytes": gpu.get("state", 0) + gpu.get("staging", 0),
        "seconds": moved_bytes / sum(path.write.alone for path in answer.rates.paths),
    }


def node_lines(answer: Answer) -> list[str]:
    """Return lines about the memory of a node and of its GPUs: what ranks use, the least that would work, parking."""
    scenario, machine, use = answer.scenario, answer.scenario.machine, answer.use
    of_node = "" if machine.memory_bytes is None else f" of the node's {format_bytes(machine.memory_bytes)}"
    used = f"{format_bytes(machine.ranks * use.host_bytes)}{of_node}"
    lines = [scenario.sharding_text] if scenario.sharding_text else []
    lines += [f"host memory: all ranks take {used}, each {uses_text(use.host)}"]
    if use.gpu_bytes:
        size = machine.rates.gpu.memory_bytes
        of_gpu = f" of {format_bytes(size)}" if size else ""
        knows_activations = bool(scenario.forward_backward_bytes)
        on_top = "" if knows_activations else "; activations come on top (known with --model and --tokens)"
        lines.append(f"GPU: {format_bytes(use.gpu_bytes)}{of_gpu}, {uses_text(use.gpu)}{on_top}")
    least = least_memory_use(scenario)
    if least is not None and least.host_bytes < use.host_bytes:
        most = max(least.host, key=lambda purpose: least.host[purpose])
        lines.append(f"it would also work, slower, with {format_bytes(least.host_bytes)} a rank, most of it {most}")
    if park := park_figures(answer):
        gpu = f" and {format_bytes(park['gpu_bytes'])} of its GPU's" if park["gpu_bytes"] else ""
        lines.append(
            f"between phases, park() gives back up to {format_bytes(park['host_bytes'])} of a rank's host memory"
            f"{gpu}, in about {format_seconds(park['seconds'])}"
        )
    return lines
