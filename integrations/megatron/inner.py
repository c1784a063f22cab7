"""`MegatronAdamW`: the optimizer below Megatron-Core's `DistributedOptimizer`, over an engine.

Megatron constructs it twice: over the model's whole weights, where only its groups and defaults are used, and over
this rank's shards of them, with these defaults. The second one is opened once Megatron has made its own optimizer,
which knows the shards' names and places.

In the precision-aware mode a shard is a flat view of Megatron's buffer of 16-bit weights, and its gradient,
`decoupled_grad`, a view of the buffer in which Megatron has reduced, unscaled and clipped it. The engine reads and
writes both where they lie, and keeps masters and moments.

Not here: gradients, loss scale, gathering of weights, files of checkpoints (Megatron's).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from offload import ConfigError, DtypeCode, Engine, OffloadConfig, Parameter
from offload.optim.hiding import Announcer
from offload.optim.pace import Pace
from offload.rules import ADAMW

NAMES = {"master_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Megatron's names of the state tensors, and the rule's."""


class ShardState(MutableMapping[str, Any]):
    """A shard's entry in `MegatronAdamW.state`: Megatron reads and sets state tensors by its names for them.

    A tensor that is read is a flat fp32 copy. A tensor that is set is noted, and written to where the state lives by
    `write_set_state`. Megatron also sets `step`, which all shards have in common, and keys that are no state, which
    are ignored.
    """

    def __init__(self, owner: MegatronAdamW, number: int) -> None:
        self._owner, self._number = owner, number

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._owner.copies()[self._number][NAMES[name]]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "step":
            self._owner.set_step(value)
        elif name in NAMES:
            self._owner.set_state(self._number, NAMES[name], value)

    def __delitem__(self, name: str) -> None:
        raise ConfigError("state", name, "set it: a shard has all of its state")

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


class MegatronAdamW(torch.optim.Optimizer):
    """AdamW over shards of a `DistributedOptimizer`, with Megatron's arguments and calls of `HybridDeviceOptimizer`.

    Args:
        params: Groups of weights, or of shards.
        lr: Learning rate. It and the next three are for groups that have none of their own.
        betas: Decay rates of the two moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled decay.
        bias_correction: Only true.
        ignored: What Megatron says of its own CPU offload.

    Attributes:
        engine: Has the state, `metrics()` and `plan`; not there until `open` is called.
        folder: The name of its folder in a checkpoint of the layout "in_place".
    """

    engine: Engine
    folder = "offload"

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool = True,
        **ignored: Any,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "bias_correction": bias_correction})
        self._copies: list[dict[str, torch.Tensor]] | None = None  # of all state, by shard; None if none is current
        self._state_to_write: dict[int | str, dict[str, torch.Tensor]] = {}  # set by Megatron, by shard; not written
        self._step_to_write: int | None = None  # set by Megatron, and not written
        self._steps = 0  # how many updates were made, also on a rank without shards
        # For updates in backward. `self` is given twice: as the optimizer, and for its `read_by_updates`.
        self._announcer = Announcer(self, MegatronAdamW._values, self, Pace())

    @property
    def shards(self) -> list[torch.Tensor]:
        """All shards, in the engine's order."""
        return [shard for group in self.param_groups for shard in group["params"]]

    def open(
        self, parameters: Mapping[torch.Tensor, Parameter], config: OffloadConfig, gradient_dtype: torch.dtype
    ) -> None:
        """Open the engine.

        Args:
            parameters: By weight, which of its elements this rank's shard has; in the order of `shards`.
            config: Tiers and budgets of this rank.
            gradient_dtype: The dtype of Megatron's buffer of gradients.

        Raises:
            ConfigError: The settings cannot be used; raised before any file is touched.
            InfeasiblePlanError: The state does not fit into the tiers.
        """
        device = next((shard.device for shard in self.shards if shard.device.type != "cpu"), None)
        widens = gradient_dtype is torch.float32
        # Megatron may read the state before a first backward pass could show how much memory it leaves free on a GPU.
        config = dataclasses.replace(config.opened_early(), gradient_dtype="float32" if widens else "parameter")
        self.engine = Engine([*parameters.values()], config, device=device)
        self._numbers_and_parts = {weight: (number, part) for number, (weight, part) in enumerate(parameters.items())}
        self._bind_weights()
        self.state.update({shard: ShardState(self, number) for number, shard in enumerate(self.shards)})

    def _bind_weights(self) -> None:
        """Tell the engine at which addresses the shards lie now: Megatron moves them at times.

        Raises:
            ConfigError: A shard is no view of its weight, so that Megatron would train weights that are not updated.
        """
        self._bound_at = [shard.data_ptr() for shard in self.shards]
        for weight, (number, part) in self._numbers_and_parts.items():
            if self._bound_at[number] != weight.data_ptr() + part.start * weight.itemsize:
                raise ConfigError("megatron", part.name, "leave weights in Megatron's buffer: this one was moved out")
        for number, address in enumerate(self._bound_at):
            self.engine.bind_weight(number, address)

    def _values(self) -> list[Any]:
        """Return the present hyperparameters of the groups, as the engine's step takes them."""
        return [ADAMW.values({**ADAMW.defaults, **group}) for group in self.param_groups]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all shards that have a gradient, and wait for that: Megatron gathers the weights next.

        Raises:
            StepAbortedError: The step could not be finished; the session is broken then.
        """
        engine = self.engine_with_state_written()
        self._bind_weights()
        active = []
        for number, shard in enumerate(self.shards):
            gradient = getattr(shard, "decoupled_grad", None)  # Megatron sets the attribute before a step
            if gradient is not None:
                engine.gradients.bind(number, gradient.data_ptr(), DtypeCode.of(gradient.dtype))
                active.append(number)
        engine.step(self._values(), active=active)
        self._steps += 1
        engine.finish(on_gpu=True)  # weights may be gathered on another stream

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, or make them zeros; in Megatron's buffer, too."""
        super().zero_grad(set_to_none)
        for shard in self.shards:
            if set_to_none:
                shard.decoupled_grad = None  # type: ignore[attr-defined]
            elif getattr(shard, "decoupled_grad", None) is not None:
                shard.decoupled_grad.zero_()  # type: ignore[attr-defined]

    # Updates in backward

    def read_by_updates(self) -> list[torch.Tensor] | None:
        """Return the tensors that updates in backward read, the shards; None if one was moved since it was bound.

        The announcer asks for them; with None no update is made in this backward pass.
        """
        return self.shards if self._bound_at == [shard.data_ptr() for shard in self.shards] else None

    def announce_final(self, weights: Iterable[torch.Tensor]) -> None:
        """Tell the engine that the gradients of some weights have been reduced, so that updates may read them.

        Weights that have no shard on this rank are skipped, and all if the engine is broken: the step says why.
        """
        for weight in weights:
            if weight in self._numbers_and_parts and self.engine.broken is None:
                number, part = self._numbers_and_parts[weight]
                gradient: Any = weight.main_grad  # type: ignore[attr-defined]
                # Whether the pass is the last is not said: as many arrivals are expected as before the last step.
                self._announcer.arrives(self.engine.gradients, number)
                self.engine.gradients.final(number, gradient.view(-1)[part.start : part.start + part.numel])

    # State, as Megatron's checkpoints read and set it

    def copies(self) -> list[dict[str, torch.Tensor]]:
        """Return a copy of all state, by shard; see `Engine`'s `state.read`. It is made again once state may change.

        All state at once, as Megatron asks for one tensor after the other, and writes none before it has all. A copy
        of more than 64 MiB lies in a file without a name on a path, which is freed with the copy's last tensor.
        """
        self.write_set_state()
        if self._copies is None:
            self._copies = self.engine.state.read(range(len(self.shards)))
        return self._copies

    def set_state(self, number: int, name: str, value: torch.Tensor) -> None:
        """Note a new state tensor of a shard. `write_set_state` writes it, before anything here uses state."""
        self._state_to_write.setdefault(number, {})[name] = value

    def set_step(self, step: Any) -> None:
        """Note a new number of updates, which is the same for all shards; see `set_state`."""
        self._step_to_write = int(step)

    def write_set_state(self) -> None:
        """Write what Megatron has set to where the state lives. Weights become their rounded masters.

        It was only noted before, so that each subgroup is written once for all its tensors.

        Raises:
            ConfigError: A tensor has another number of elements than its shard.
        """
        if self._state_to_write or self._step_to_write is not None:
            step = self._step_to_write
            steps: dict[int | str, int] = {} if step is None else dict.fromkeys(range(len(self.shards)), step)
            self._bind_weights()
            self.engine.state.write(self._state_to_write, steps)
            if step is not None:
                self._steps = step
            self._state_to_write, self._step_to_write, self._copies = {}, None, None

    def engine_with_state_written(self) -> Engine:
        """Return the engine for a caller that may change its state: what was set is written, copies are forgotten."""
        self.write_set_state()
        self._copies = None
        return self.engine

    def state_dict(self) -> dict[str, Any]:
        """Return the groups and the number of updates, in the form of torch's state dicts, without tensors of state.

        Megatron reads these from `state`.
        """
        numbers = iter(range(len(self.shards)))
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]
        return {"state": {0: self._step_state()}, "param_groups": groups}  # the first shard's number is that of all

    def _step_state(self) -> dict[str, torch.Tensor]:
        """Write what was set; return the number of updates as torch's optimizers keep it."""
        self.write_set_state()
        # A stage that trains nothing counts, too: in some formats all stages load the first one's number.
        steps = max(map(self.engine.step_count, range(len(self.shards))), default=self._steps)
        return {"step": torch.tensor(float(steps), dtype=torch.float32, device="cpu")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups' hyperparameters and their number of updates; Megatron sets tensors through `state`."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name not in ("params", "step")})
            if saved.get("step") is not None:
                self.set_step(saved["step"])
        self.write_set_state()

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """One optimizer of torch's that has the number of updates alone.

        With TransformerEngine Megatron reads that number here: `HybridDeviceOptimizer`, in whose place this class
        stands, is made of such optimizers.
        """
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        optimizer = torch.optim.AdamW([weight])
        optimizer.state[weight] = self._step_state()
        return [optimizer]

    def update_fp32_param_by_new_param(self) -> None:
        """Have the next step set masters from the weights: Megatron has loaded the model without its optimizer."""
        engine = self.engine_with_state_written()
        self._bind_weights()
        for number in range(len(self.shards)):
            engine.reload_master(number)

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Write what was set: Megatron calls this when it has set all state."""
        self.write_set_state()

    def dummy_step(self) -> None:
        """Do nothing: Megatron calls this to have state made, and here it exists from the beginning."""

    def close(self) -> None:
        """Free memory and files; the weights stay. Idempotent; also done when the optimizer is garbage-collected."""
        self._numbers_and_parts.clear()  # a backward pass that goes on announces nothing more
        self.engine.close()
