"""A question to `offload plan` (`Scenario`) and its `Answer`: a rank's plan, its use of the node, an iteration."""

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
from offload.cli.streamed import GRADIENT_BYTES, WEIGHT_BYTES, Passes, gradients_bytes, path_of, window_bytes
from offload.cli.values import settings_of
from offload.config import OffloadConfig, PathConfig, Size
from offload.errors import ConfigError, InfeasiblePlanError
from offload.formats import EXACT, StateFormat
from offload.rules import RULES
from offload.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from offload.layout import Layout
    from offload.plan import Budgets, Estimate, GpuRates, Plan, Rates
    from offload.predict import Prediction

GPU = "the GPU"
FASTEST = "the fastest path"
"""Names, in errors, of what is too small."""

SYSTEM_SHARE, LEAST_SYSTEM_BYTES = 1 / 16, 2 << 30
"""Part, and least bytes, of host memory left to the system and its page cache."""
PROCESS_BYTES = 3 << 29
"""Host memory of a rank beside its plan: Python, torch, the host's side of a GPU's driver."""
GPU_SHARE, LEAST_GPU_BYTES = 1 / 10, 2 << 30
"""Part, and least bytes, of a GPU's memory left free, as `gpu_memory="auto"` leaves it."""
STREAMED_WEIGHTS = "use more ranks on more GPUs, or have weights in host memory (--weights-on host; docs/weights.md)"
FEWER_TOKENS = "take tokens in more micro-steps (--accumulate), or use more ranks on more GPUs"
"""Advice of errors about what does not fit a GPU."""
DRIVER_BYTES = 1 << 29
"""GPU memory of a context and its kernels."""

FLOPS_PER_WEIGHT = {"forward": 2, "backward": 4}
"""FLOPs of a weight for each token: a multiplication and an addition, in backward for two gradients. Backward also
repeats forward if activations are recomputed. Attention's own products are left out; equation 3 of Narayanan et al.
(SC '21, arXiv 2104.04473) gives their share."""

MOST_SUBGROUPS = 1 << 13
"""Most subgroups of a rank, to bound the time of planning. If no size is given, they are larger instead."""
MOST_NUMEL = 5 * 10**11
"""Most parameters of a rank: 5.5 TiB of Adam's state."""
MOST_TILES = 1 << 17
"""Most tiles of a rank whose step is simulated: some ten seconds' work."""


ADVISED = {one.name: one for one in settings_of("advised")}
"""Settings that `offload plan` may choose, by their names."""


def budget_text(nbytes: int) -> str | int:
    """Return a budget as a user would write it: "8GiB"."""
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
            path_bytes: Most bytes that each path offers to a rank.
            gpu_staging: See `Scenario`.
            settings: Fields of the config; without a budget, no memory is for state. `placement` may be "stride:<k>".

        Raises:
            ConfigError: A session would refuse these settings.
        """
        from offload.plan.planner import STRIDE

        paths = []
        for number in range(len(machine.rates.paths)):
            size = machine.path_bytes(number)
            most = path_bytes if size is None else min(path_bytes, size // machine.ranks)
            paths.append(PathConfig(path=machine.path_place(number), max_bytes=most))
        if model.is_streamed:
            has_place = machine.rates.paths if model.weights_on == "path" else machine.rates.gpu.lanes
            if not has_place:
                needed = "a path (--drive)" if model.weights_on == "path" else "a GPU that computes them (--gpu)"
                raise ConfigError("--weights-on", model.weights_on, f"have {needed}")
            for name, by_cpu in (("placement", ("auto", "cpu", 0)), ("gpu_memory", ("auto", 0))):
                if settings.get(name, 0) not in by_cpu:
                    least = '"cpu"' if name == "placement" else 0
                    combinations.WEIGHTS_ON_CPU.refuse(name, settings[name], least=least)
        usual: dict[str, Any] = {"host_memory": 0, "gpu_memory": 0, "checkpoints_kept": 0, "keep_grads": False}
        placement = settings.get("placement", "auto")
        if model.weights_on_gpu and settings.get("gradient_memory") is not None:  # the CPU updates all then
            if placement not in ("auto", "cpu", 0):
                combinations.GRADIENTS_ON_PATHS.refuse("--placement", placement, least='"cpu"')
            placement, settings["keep_grads"] = "cpu", False
        strides = isinstance(placement, str) and placement.startswith(STRIDE)
        stride = int(placement.removeprefix(STRIDE)) if strides else 0
        if not model.weights_on_gpu:
            settings["keep_grads"] = True  # in slots: the setting is of a GPU
        config = OffloadConfig(**{**usual, "paths": paths, **settings, "placement": "auto" if strides else placement})
        return cls(
            config=config, model=model, machine=machine, stride=stride, gpu_staging=gpu_staging
        )._at_its_rates()

    def given(self, **settings: Any) -> Scenario:
        """Return this with other settings of the config, at the rates of its format of state."""
        changed = replace(self, config=replace(self.config, **settings))
        return changed if changed.config.format is self.config.format else changed._at_its_rates()

    def _at_its_rates(self) -> Scenario:
        """Return this with the rate of the update of its own format of state."""
        if self.machine.file is None:
            return self
        cpu_bytes_per_s = self.machine.file.cpu_rate(self._numels)
        return self.at_rates(replace(self.machine.rates, cpu_bytes_per_s=cpu_bytes_per_s))

    def lying(self, weights_on: str) -> Scenario:
        """Return this with weights elsewhere; see `Model`."""
        if weights_on == self.model.weights_on:
            return self
        model = replace(self.model, weights_on=weights_on)
        if not self.model.weights_on_gpu:
            return replace(self, model=model)
        config = replace(self.config, keep_grads=True, placement="auto", gpu_memory=0)  # the CPU updates all
        return replace(self, model=model, config=config, stride=0)

    def at_rates(self, rates: Rates) -> Scenario:
        """Return this with a machine of other rates."""
        return replace(self, machine=replace(self.machine, rates=rates))

    def with_host_memory(self, nbytes: int) -> Scenario:
        """Return this with other host memory: less on the slowest of its memory nodes, or more on the fastest."""
        named, left = self.config.node_bytes, nbytes
        sizes: dict[str, int] = {}
        for number in self.machine.rates.fastest_first(named):
            sizes[f"node{number}"] = min(left, named[number])
            left -= sizes[f"node{number}"]
        for fastest in [*sizes][:1]:
            sizes[fastest] += left
        return self.given(host_memory=sizes or nbytes)

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
        """How many parameters have exact state in any case."""
        return self.model.exact_params if self.config.format.shares_scales else 0

    def value(self, name: str) -> Any:
        """Return the value of a setting, as a plan is made with it."""
        return getattr(self, name) if name in ("placement", "host_memory") else getattr(self.config, name)

    def pasted(self, name: str) -> Any:
        """Return the value of a setting as a user would write it, or its default if that has the same effect."""
        value = self.value(name)
        if name == "paths":
            return [path.path for path in self.config.path_configs] or ()
        if name == "gradient_memory" and not self.gradients_leave:
            return None
        return budget_text(value) if isinstance(ADVISED[name].metadata["check"], Size) else value

    def takes(self, name: str) -> bool:
        """Return whether a user can give a setting here; with several ranks only one that DeepSpeed has a key for."""
        said = ADVISED[name].metadata
        has_place = said["advised"].weights_on != "gpu" or self.model.weights_on_gpu
        return has_place and (self.machine.all_ranks == 1 or said["deepspeed"] is None)

    def tries(self, name: str) -> bool:
        """Return whether other values of a setting may make a difference."""
        where = "gpu" if self.model.weights_on_gpu else "cpu"
        return self.takes(name) and ADVISED[name].metadata["advised"].weights_on in ("", where)

    def admits(self, name: str, value: Any) -> bool:
        """Return whether the other settings allow a value of a setting."""
        try:
            self.given(**{name: value})
        except ConfigError:
            return False
        return True

    @property
    def decided(self) -> frozenset[str]:
        """Settings whose values follow from others: with gradients on paths the CPU updates all."""
        follows = self.model.weights_on_gpu and self.gradient_memory is not None
        return frozenset({"placement", "gpu_memory"} if follows else ())

    @property
    def state_bytes(self) -> int:
        """Bytes of a rank's state."""
        return _budgets(self)[0].state_bytes

    def __str__(self) -> str:
        """Return the settings that matter, in words."""
        words = [f"state {self.config.format.name}{' (rounded)' * self.config.format.rounds}"]
        if self.model.weights_on_gpu:
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
    def _numels(self) -> dict[StateFormat, int]:
        exact = {EXACT: self.exact_params} if self.exact_params else {}
        return {self.config.format: self.model.params - self.exact_params} | exact

    @property
    def guessed(self) -> str:
        """The warning that the rate of the format is only a guess; "" if it was measured."""
        return self.machine.file.guesses(self._numels) if self.machine.file else ""

    @property
    def warnings(self) -> list[str]:
        """Warnings about the rates."""
        file = self.machine.file
        return [*(file.warnings if file and file.source else ()), *filter(None, [self.guessed])]

    @property
    def mark(self) -> str:
        """The mark after times that rest on a guessed rate: "*", or "" if none does."""
        return "*" if self.guessed else ""

    def marked(self, warnings: Sequence[str]) -> list[str]:
        """Return warnings as text; the one about a guessed rate begins with the mark."""
        return [f"* {text}" if text == self.guessed else text for text in warnings]

    @property
    def numel(self) -> int:
        """Parameters whose state a rank has."""
        return math.ceil(self.model.params / self.machine.all_ranks)

    @property
    def gradients_leave(self) -> bool:
        """Whether some gradients are written to the paths."""
        return self.gradient_memory is not None and self.gradient_memory < GRADIENT_BYTES * self.numel

    @property
    def computes_on_gpu(self) -> bool:
        """Whether a GPU computes forward and backward."""
        return self.model.weights_on != "cpu" and bool(self.machine.rates.gpu.lanes)

    @property
    def window_bytes(self) -> int:
        """Bytes of streamed weights that are at once on the device that computes with them."""
        return window_bytes(self.model.shape) if self.model.shape is not None else 0

    @property
    def beside(self) -> dict[str, int]:
        """Bytes that forward and backward take on their device, by purpose; empty if unknown."""
        model = self.model
        if model.shape is None or model.tokens is None:
            return {}
        tokens = math.ceil(model.tokens / model.accumulate)
        uses = {"activations": model.shape.activation_bytes(tokens, recompute=model.recompute)}
        if model.is_streamed and self.computes_on_gpu:
            uses["gathered weights"] = self.window_bytes
        elif self.machine.all_ranks > 1:
            uses["gathered weights"] = model.shape.gathered_bytes
        if self.computes_on_gpu:
            uses["driver"] = DRIVER_BYTES
            if not model.weights_on_gpu:
                uses["gradients on their way"] = gradients_bytes(model.shape)
            elif not self.config.keep_grads:  # a gradient is copied to the host when it is whole
                uses["gradients on their way"] = GRADIENT_BYTES * model.shape.largest_params
        return uses

    def passes(self, use: Use) -> Passes | None:
        """Return the transfers of streamed weights; None if weights are not streamed.

        Args:
            use: A rank's use of memory. In the rest of the node's memory the kernel keeps weights of a file.
        """
        model, machine, kept = self.model, self.machine, None
        if not model.is_streamed:
            return None
        if model.weights_on == "path":
            left = 0
            if machine.memory_bytes is not None:
                left = machine.memory_bytes - reserved_bytes(machine.memory_bytes, machine.ranks)
            kept = max(0, left // machine.ranks - use.host_bytes) + use.host["weights"]
        rest = math.ceil(model.shape.rest_params / machine.all_ranks) if model.shape is not None else 0
        return Passes(self.numel, rest, model.accumulate, self.card if self.computes_on_gpu else None, kept)

    @property
    def card(self) -> GpuRates:
        """A rank's GPU and its part of the links, also where it updates nothing."""
        return self.machine.rates.shared_by(self.machine.ranks).gpu

    @property
    def least_gpu_bytes(self) -> int:
        """Bytes of GPU memory that a rank takes whose weights are computed there, wherever its state lies."""
        if not self.model.weights_on_gpu:
            return sum(self.beside.values())
        return (WEIGHT_BYTES + self.config.keep_grads * GRADIENT_BYTES) * self.numel + sum(self.beside.values())


@dataclass(frozen=True, slots=True)
class Use:
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
    """Return the most bytes of a GPU's memory to use: activations are estimated, and allocators fragment memory."""
    return max(0, memory_bytes - max(LEAST_GPU_BYTES, int(GPU_SHARE * memory_bytes)))


def use_of(plan: Plan, scenario: Scenario) -> Use:
    """Return the memory that a rank uses; its part of weights and gradients is that of its state, as in ZeRO-3."""
    from offload.plan import Home
    from offload.plan.budget import PIECE_BUFFERS

    numel, beside = sum(parameter.numel for parameter in plan.layout.parameters), scenario.beside
    weights, gradients = WEIGHT_BYTES * numel, plan.budgets.gradient_bytes
    state = plan.home_bytes[Home.HOST]
    host = {"state": state, "gradients": gradients, "buffers and tables": plan.host_bytes - state - gradients}
    if scenario.model.weights_on == "path":
        weights = min(weights, scenario.window_bytes)
    if not plan.weights_on_gpu:
        host = {"weights": weights, **host}
        return Use(host, beside) if scenario.computes_on_gpu else Use({**host, **beside}, {})
    leaving = 0 if plan.budgets.gradients_on_gpu else gradients  # copied to the host during backward
    leaving = GRADIENT_BYTES * numel if plan.gradient_buffers else leaving
    gpu = {
        "weights": weights,
        "gradients": max(0, GRADIENT_BYTES * numel - leaving),  # padding may have been counted
        **plan.device_bytes,
    }
    if plan.piece_buffer_bytes:
        gpu["small tensors"] = PIECE_BUFFERS * plan.piece_buffer_bytes
    return Use(host, {**gpu, **beside})


def check_fits(scenario: Scenario, node_memory: int | None, use: Use, *, leaves: bool = False) -> None:
    """Raise if a plan uses more memory than the node has.

    Args:
        node_memory: Bytes of host memory; None if unknown.
        use: The memory that each rank uses.
        leaves: Whether to keep `reserved_bytes` of the host free, and all but `gpu_room` of each GPU.

    Raises:
        InfeasiblePlanError: All ranks use more host memory, or one more GPU memory, than there is, or the path has no
            room for a file of weights.
    """
    ranks, rates = scenario.machine.ranks, scenario.machine.rates
    if scenario.model.weights_on == "path":
        most, nbytes = scenario.config.path_configs[path_of(rates)].max_bytes, WEIGHT_BYTES * scenario.numel
        if most is not None and nbytes > most:
            raise InfeasiblePlanError("a rank's weights", nbytes, {FASTEST: most}, "give a larger --drive")
    if node_memory is not None:
        room = node_memory - reserved_bytes(node_memory, ranks) if leaves else node_memory
        if ranks * use.host_bytes > room:
            less = "lower --host-memory, or " if use.host["state"] and rates.paths else ""
            raise InfeasiblePlanError(
                f"the host memory of {format_count(ranks, 'rank')} (each {shares(use.host)})",
                ranks * use.host_bytes,
                {f"the node{', less the part of the system' * leaves}": room},
                f"{less}give --node-memory for another node",
            )
    if size := rates.gpu.memory_bytes:
        room = gpu_room(size) if leaves else size
        if use.gpu_bytes > room:
            less = "lower --gpu-memory, or " if use.gpu.get("state") else ""
            raise InfeasiblePlanError(
                f"a rank's GPU memory ({shares(use.gpu)})",
                use.gpu_bytes,
                {f"{GPU}{', less what has to stay free' * leaves}": room},
                f"{less}{STREAMED_WEIGHTS if use.gpu.get('weights') else FEWER_TOKENS}",
            )


def shares(parts: Mapping[str, int]) -> str:
    """Return the parts of a sum of bytes in words, the largest first."""
    most_first = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in most_first if nbytes)


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
        passes: The transfers of streamed weights; None if weights are not streamed.
        overlapped_s: Seconds of an iteration whose step is hidden in "forward" (`overlap_forward`), "backward"
            (`overlap="backward"`) or "both", as far as that is possible.
    """

    scenario: Scenario
    rates: Rates
    plan: Plan
    use: Use
    estimate: Estimate
    step_s: float
    prediction: Prediction | None
    forward_s: float | None
    backward_s: float | None
    passes: Passes | None
    overlapped_s: Mapping[str, float]

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration, as far as they are known."""
        return (self.forward_s or 0.0) + (self.backward_s or 0.0) + self.step_s

    @property
    def figures(self) -> dict[str, Any]:
        """The memory that a rank uses, and that it gives back between phases, for `--json`."""
        return {
            "host_memory_bytes": dict(self.use.host),
            "gpu_memory_bytes": dict(self.use.gpu),
            "parked": parked(self),
        }

    @property
    def hiding_bytes(self) -> tuple[int, int]:
        """Further bytes of host memory, and of paths, that a rank uses if steps are hidden in backward."""
        return self.plan.extra_bytes_for_updates_in_backward(GRADIENT_BYTES)

    @property
    def warnings(self) -> list[str]:
        """Warnings: about rates, too little free memory, and what was left out to bound the work."""
        from offload.plan.budget import AUTO_SUBGROUP_NUMEL

        warnings = [*self.scenario.warnings]
        most = max(subgroup.numel for subgroup in self.plan.layout.subgroups)
        if self.scenario.config.subgroup_numel is None and most > max(AUTO_SUBGROUP_NUMEL):
            warnings.append(
                f"planned with subgroups of {most:,} elements, so that there are {MOST_SUBGROUPS:,} at most; a "
                "session chooses smaller ones, with smaller buffers"
            )
        memory_bytes, ranks = self.scenario.machine.memory_bytes, self.scenario.machine.ranks
        if memory_bytes is not None:
            left, reserved = memory_bytes - ranks * self.use.host_bytes, reserved_bytes(memory_bytes, ranks)
            if left < reserved:
                how = "lower --host-memory" if self.rates.paths else "give paths that state streams from (--drive)"
                warnings.append(
                    f"{format_bytes(left)} of host memory are left to the system and the rest of the processes; "
                    f"{format_bytes(reserved)} are advisable: {how}"
                )
        size, taken = self.scenario.machine.rates.gpu.memory_bytes, self.use.gpu_bytes
        if taken and size and taken > gpu_room(size):
            warnings.append(
                f"{format_bytes(size - taken)} of the GPU are left free; {format_bytes(size - gpu_room(size))} are "
                "advisable, as activations are an estimate"
            )
        if self.prediction is None:
            warnings.append(f"by the closed form: steps of more than {MOST_TILES:,} tiles are not simulated")
        return warnings


@lru_cache(maxsize=4)
def _layout(numel: int, exact_numel: int, subgroup_numel: int, empty: Layout) -> Layout:
    """Return the layout of one rank's part of a model; cached, as advice asks for the same one many times."""
    from offload.dtypes import DtypeCode
    from offload.layout import Parameter, extend_layout

    parameters = [
        Parameter("model", numel - exact_numel, DtypeCode.BFLOAT16, 0),
        Parameter("kept exact", exact_numel, DtypeCode.BFLOAT16, 0, exact=True),
    ]
    return extend_layout(empty, parameters if exact_numel else parameters[:1], subgroup_numel)


def _least_subgroup_numel(numel: int) -> int:
    """Return the least elements of a subgroup, aligned, with which there are at most `MOST_SUBGROUPS`."""
    return math.ceil(numel / MOST_SUBGROUPS / 4096) * 4096


def _budgets(scenario: Scenario) -> tuple[Layout, Budgets]:
    """Return one rank's layout, and the bytes that each tier has for it."""
    from offload.layout import Layout
    from offload.plan import PathBudget, choose_subgroup_numel
    from offload.plan.budget import GPU_STAGING_SLOTS
    from offload.plan.planner import fastest_nodes_first

    config, model, machine, numel = scenario.config, scenario.model, scenario.machine, scenario.numel
    if numel > MOST_NUMEL:
        allowed = f"each rank has {numel:,} of them, and {MOST_NUMEL:,} are the most; give more --ranks or --nodes"
        raise ConfigError("--params", model.params, allowed)
    empty = Layout((), (), config.state_of(RULES[model.rule]))
    subgroup_numel, least_numel = config.subgroup_numel, _least_subgroup_numel(numel)
    if subgroup_numel is None:
        subgroup_numel = max(choose_subgroup_numel(numel, config.staging_bytes, empty), least_numel)
    elif subgroup_numel < least_numel:
        allowed = f"a rank has {numel:,} parameters and at most {MOST_SUBGROUPS:,} subgroups are planned; "
        raise ConfigError("subgroup_numel", subgroup_numel, f"{allowed}give {least_numel:,} or more")
    layout = _layout(numel, math.ceil(scenario.exact_params / machine.all_ranks), subgroup_numel, empty)
    gpu_staging = GPU_STAGING_SLOTS * layout.max_subgroup_bytes
    rooms = [1 << 60 if path.max_bytes is None else path.max_bytes for path in config.path_configs]
    if model.weights_on == "path":
        rooms[path_of(machine.rates)] = max(0, rooms[path_of(machine.rates)] - WEIGHT_BYTES * numel)
    budgets = config.budgets(
        scenario.host_memory,
        [PathBudget(machine.path_name(n), room) for n, room in enumerate(rooms)],
        on_gpu=model.weights_on_gpu,
        gpu_bytes=scenario.gpu_memory,
        gpu_staging_bytes=gpu_staging if scenario.gpu_staging is None else scenario.gpu_staging,
        gradient_bytes=GRADIENT_BYTES * numel,
        gradients_kept_bytes=scenario.gradient_memory if scenario.gradients_leave else None,
    )
    return layout, fastest_nodes_first(budgets, machine.rates)


def rank_rates(scenario: Scenario) -> Rates:
    """Return one rank's part of the node's rates; without a GPU if weights are streamed, as it updates nothing then.

    Raises:
        ConfigError: There are more ranks than GPUs, and each is to have one.
    """
    from offload.plan import NO_GPU

    rates, gpus = scenario.machine.rates.shared_by(scenario.machine.ranks), scenario.machine.gpus
    if gpus is None or scenario.machine.ranks <= gpus:
        return replace(rates, gpu=NO_GPU) if scenario.model.is_streamed else rates
    if scenario.computes_on_gpu or scenario.gpu_memory or scenario.placement not in ("auto", "cpu"):
        rates.gpu.check_used(planned=True)
        allowed = f"the node has {gpus} GPUs, one for each rank; give --gpus for another node"
        raise ConfigError("--ranks", scenario.machine.ranks, allowed)
    return replace(rates, gpu=NO_GPU)


def _plan(scenario: Scenario, rates: Rates) -> Plan:
    """Return one rank's plan, at its part of the rates."""
    from offload.plan import choose_plan

    layout, budgets = _budgets(scenario)
    plan = choose_plan(layout, budgets, rates, scenario.placement)
    if scenario.model.weights_on_gpu:  # gradients of what the GPU updates stay there
        on_cpu = sum(s.numel for s in layout.subgroups if not plan.updates_on_gpu(s.index))
        plan = replace(plan, budgets=replace(budgets, gradient_bytes=GRADIENT_BYTES * on_cpu))
    return plan.with_buffer_bytes(int(scenario.model.weights_on_gpu))


def use(scenario: Scenario) -> Use:
    """Return the memory that a rank uses, even if the node has less; `InfeasiblePlanError` if there is no plan."""
    return use_of(_plan(scenario, rank_rates(scenario)), scenario)


def ask(
    scenario: Scenario,
    *,
    simulate: bool = True,
    timeline: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Answer:
    """Plan and predict.

    Args:
        simulate: Whether to run the simulator rather than the closed form alone.
        timeline: Whether the simulated step has a timeline even if forward and backward are unknown.

    Raises:
        ConfigError: If a value makes no sense, or there are more ranks than GPUs.
        InfeasiblePlanError: If the state does not fit, or all ranks take more than the node has.
    """
    from offload.plan import estimate
    from offload.predict import predict
    from offload.predict.predict import with_backward_s, with_forward_s

    rates = rank_rates(scenario)
    plan = _plan(scenario, rates)
    taken = use_of(plan, scenario)
    check_fits(scenario, scenario.machine.memory_bytes, taken)
    cost = estimate(plan, rates)
    passes = scenario.passes(taken)
    forward_s, backward_s = _forward_backward_s(scenario, rates, plan, passes)
    follows = forward_s is not None
    simulate = simulate and sum(subgroup.tile_count for subgroup in plan.layout.subgroups) <= MOST_TILES
    prediction = predict(plan, rates, steps=2, timeline=timeline or follows, report=report) if simulate else None
    step_s, of_weights_s = prediction.step_s if prediction else cost.step_s, passes.step_s(rates) if passes else 0.0
    # The drive with the weights moves state and weights one after the other; if no state is streamed, only weights.
    step_s = step_s + of_weights_s if plan.storage_bytes else max(step_s, of_weights_s)
    overlapped_s: dict[str, float] = {}
    if prediction is not None and forward_s is not None and backward_s is not None:
        apart = scenario.computes_on_gpu
        least_s = step_s + passes.read_s(rates) if passes and plan.storage_bytes else step_s  # of one drive
        overlapped_s = {
            "forward": backward_s + max(with_forward_s(prediction, plan, forward_s, apart=apart), least_s)
        }
        if not plan.gradient_buffers and scenario.model.weights_on != "path":  # which is refused
            ahead = plan.with_updates_in_backward(GRADIENT_BYTES)
            for hidden_in, follows in (("backward", False), ("both", True)):
                overlapped_s[hidden_in] = with_backward_s(
                    prediction, ahead, rates, forward_s, backward_s, follows=follows, apart=apart
                )
    return Answer(scenario, rates, plan, taken, cost, step_s, prediction, forward_s, backward_s, passes, overlapped_s)


def computed_s(scenario: Scenario, rates: Rates) -> tuple[float, float] | None:
    """Return the seconds that forward and backward compute."""
    if scenario.model.tokens is None or not rates.compute_flops_per_s:
        return None
    unit_s = scenario.model.params * scenario.model.tokens / rates.compute_flops_per_s
    forward_s = FLOPS_PER_WEIGHT["forward"] * unit_s
    return forward_s, FLOPS_PER_WEIGHT["backward"] * unit_s + (forward_s if scenario.model.recompute else 0.0)


def _forward_backward_s(
    scenario: Scenario, rates: Rates, plan: Plan, passes: Passes | None
) -> tuple[float | None, float | None]:
    """Return the seconds of forward and backward, each with the transfers that it waits for."""
    computed = computed_s(scenario, rates)
    if computed is None:
        return None, None
    forward_s, backward_s = computed
    if scenario.model.weights_on_gpu and not scenario.config.keep_grads:
        # Gradients that the CPU needs are copied from the GPU during backward.
        subgroups = plan.layout.subgroups
        nbytes = sum(GRADIENT_BYTES * s.numel for s in subgroups if not plan.updates_on_gpu(s.index))
        backward_s = max(backward_s, nbytes / rates.gpu.d2h.alone)
    written_s = [0.0] * len(rates.paths)
    if plan.gradient_buffers:
        each = zip(plan.path_shares(rates), rates.paths, strict=True)
        written_s = [plan.path_gradient_bytes * part / path.write.alone for part, path in each]
    if passes is not None:
        links_s, read_s = passes.link_s, passes.read_s(rates)
        forward_s, backward_s = max(forward_s, links_s[0], read_s), max(backward_s, links_s[1])
        if read_s:
            written_s[path_of(rates)] += read_s
    return forward_s, max(backward_s, *written_s, 0.0)


def least(scenario: Scenario) -> Use | None:
    """Return the memory that a rank uses with the least `host_memory` with which there is a plan; None if none is."""
    from offload.plan import make_plan

    layout, _ = _budgets(scenario)
    ends = [0, *itertools.accumulate(layout.subgroup_bytes)]

    def planned(resident: int) -> Plan:
        return make_plan(*_budgets(scenario.with_host_memory(ends[resident])))

    def works(resident: int) -> bool:
        try:
            planned(resident)
        except InfeasiblePlanError:
            return False
        return True

    few = bisect.bisect_left(range(len(ends)), True, key=works)
    if few == len(ends):
        return None
    if not scenario.model.weights_on_gpu:  # else what the GPU updates has its gradients there
        return use_of(planned(few).with_buffer_bytes(0), scenario)
    return use(scenario.with_host_memory(ends[few]))


def missing_option_line(scenario: Scenario) -> str:
    """Return a line that says which option is missing to predict forward and backward."""
    reason = "give --tokens" if scenario.model.tokens is None else "the rates know no FLOP/s; give --flops"
    return f"forward and backward: unknown ({reason})"


def parked(answer: Answer) -> dict[str, float]:
    """Return the bytes of a rank's memory that `park` gives back, and its seconds; empty if paths have no room."""
    from offload.plan import Home

    plan, rates, host = answer.plan, answer.rates, answer.use.host
    moved_bytes = plan.home_bytes[Home.HOST] + plan.home_bytes[Home.GPU] + plan.staging_bytes
    room = sum(path.available_bytes for path in plan.budgets.paths) - plan.storage_bytes
    if not rates.paths or room < moved_bytes:
        return {}
    return {
        "host_bytes": host["state"] + host["gradients"] + host["buffers and tables"],
        "gpu_bytes": answer.use.gpu.get("state", 0) + answer.use.gpu.get("staging", 0),
        "seconds": moved_bytes / sum(path.write.alone for path in rates.paths),
    }


def node_lines(answer: Answer) -> list[str]:
    """Return lines about the memory that all ranks use of their node, and the least that would work."""
    scenario, machine, use = answer.scenario, answer.scenario.machine, answer.use
    memory_bytes = machine.memory_bytes
    of_node = "" if memory_bytes is None else f" of the node's {format_bytes(memory_bytes)}"
    taken = f"{format_bytes(machine.ranks * use.host_bytes)}{of_node}"
    lines = [f"host memory: all ranks take {taken}, each {shares(use.host)}"]
    if use.gpu_bytes:
        size = machine.rates.gpu.memory_bytes
        of_gpu = f" of {format_bytes(size)}" if size else ""
        on_top = "" if scenario.beside else "; activations come on top (known with --model and --tokens)"
        lines.append(f"GPU: {format_bytes(use.gpu_bytes)}{of_gpu}, {shares(use.gpu)}{on_top}")
    fewest = least(scenario)
    if fewest is not None and fewest.host_bytes < use.host_bytes:
        most = max(fewest.host, key=lambda what: fewest.host[what])
        lines.append(f"it would also work, slower, with {format_bytes(fewest.host_bytes)} a rank, most of it {most}")
    if given := parked(answer):
        gpu = f" and {format_bytes(given['gpu_bytes'])} of its GPU's" if given["gpu_bytes"] else ""
        lines.append(
            f"between phases, park() gives back up to {format_bytes(given['host_bytes'])} of a rank's host memory"
            f"{gpu}, in about {format_seconds(given['seconds'])}"
        )
    return lines
