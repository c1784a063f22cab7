"""ZeRO-3 whose optimizer state is the engine's.

Overridden are the methods that create state, accept gradients, and update; `step()` is DeepSpeed's own. It calls
`_optimizer_step` for each of DeepSpeed's subgroups: the first call runs the engine's step over everything, in the
engine's order, and the others do nothing.

DeepSpeed has one flat tensor for each of its subgroups. A *piece* is this rank's run of one parameter in it. The
pieces are numbered; `_numbers` has their numbers by the ids of their parameters.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from offload.integrations.deepspeed.common import STEPS, OffloadedOptimizer, make_shard
from offload.integrations.deepspeed.in_place import InPlace
from offload.integrations.deepspeed.pieces import Piece
from offload.integrations.deepspeed.shard import rule_of
from offload.weights.partitions import Partitions


def wait_before_gather(
    optimizer: weakref.ref[OffloadedStage3], parameter: Any, gather: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a wrapper of a parameter's method `gather`, which gathers parameters: it first waits for their update.

    That is until the optimizer's last step has updated this rank's parts of them.
    """

    @functools.wraps(gather)
    def gather_updated(parameters: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """Gather the parameters that are given, by position or keyword, or else this one.

        They may be an iterator, which can be read only once, so `gather` is given a list of them.
        """
        # The keyword under which they are given: the two methods that are wrapped have different ones.
        names = [name for name in ("param_list", "params") if keywords.get(name) is not None]
        given = keywords[names[0]] if names else parameters
        if given is None or isinstance(given, torch.Tensor):
            listed = [parameter if given is None else given]
        else:
            listed = [*given]
        owner = optimizer()
        if owner is not None:  # else it was freed, and updates nothing
            owner.before_gather(listed)
        positional = [] if parameters is None else [listed]
        return gather(*positional, *arguments, **keywords | dict.fromkeys(names, listed))

    return gather_updated


FP32_FLAT_GROUPS = "fp32_flat_groups"


class OffloadedStage3(OffloadedOptimizer, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """DeepSpeed's ZeRO-3 optimizer over an `offload.Engine`; see `OffloadedOptimizer`."""

    persistent_parameters: list[Any]
    fp16_groups: list[Any]

    def __init__(self, *arguments: Any, weights_file: Partitions | None, **keywords: Any) -> None:
        self._weights_file = weights_file  # None if weights lie in memory; the constructor moves them to the file
        super().__init__(*arguments, **keywords)
        self._used: dict[int, None] = {}  # pieces' numbers, in the order of first use since the last step
        if self._weights_file is not None:
            self._weights_file.use_layers(self.module, lambda parameter: parameter.ds_tensor)
        if self.may_overlap_forward or self._weights_file is not None:
            # All parameters, as one that is frozen may be the first of those that are gathered together.
            for parameter in self.module.parameters():
                for name in ("all_gather", "all_gather_coalesced"):
                    if hasattr(parameter, name):
                        waiting = wait_before_gather(weakref.ref(self), parameter, getattr(parameter, name))
                        setattr(parameter, name, waiting)

    # Into the next forward pass

    @property
    def may_overlap_forward(self) -> bool:
        """Whether steps may go on into the next forward pass: with "auto", too, as modules gather their weights."""
        return self._offload_config.overlap in ("forward", "both", "auto")

    @property
    def _overlaps_forward(self) -> bool:
        """Whether the step under way goes on into the next forward pass."""
        return bool(self.may_overlap_forward and self._auto.goes_on)

    def before_gather(self, parameters: Sequence[Any]) -> None:
        """Wait until this rank's parts of some parameters are updated and in memory; note the order of their use.

        The next step updates pieces in this order.
        """
        numbers_or_none = (self._numbers.get(parameter.ds_id) for parameter in parameters)  # None: frozen
        numbers = [number for number in numbers_or_none if number is not None]
        self._used.update(dict.fromkeys(numbers))
        with self._auto.pace.timed_wait():
            self.offload.wait_for(numbers, on_any_stream=True)  # weights are gathered on a stream of their own
        if self._weights_file is not None:
            self._weights_file.begin(parameter.ds_tensor for parameter in parameters)

    def _take_use_order(self) -> Mapping[int, int] | None:
        """Return, by its number, each piece's position in the order of use since the last step; forget that order.

        None if the step does not go on into the next forward pass.
        """
        used, self._used = self._used, {}
        if not self._overlaps_forward:
            return None
        return {number: position for position, number in enumerate(used)}

    def _post_step(self, *arguments: Any, **keywords: Any) -> None:
        """End a step as DeepSpeed does, which gathers persistent parameters: small ones that each rank keeps whole.

        If the step goes on into forward, their modules gather them there, as DeepSpeed is shown none.
        """
        persistent = self.persistent_parameters
        if self._overlaps_forward:
            # They may lie in all subgroups, so that the whole step would be waited for.
            self.persistent_parameters = []
        try:
            super()._post_step(*arguments, **keywords)
        finally:
            self.persistent_parameters = persistent

    # Weights in a file

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        """Allocate, in the weights' file, the flat tensors that trained weights are moved to; move frozen weights."""
        if self._weights_file is None:
            super()._create_param_groups_fp16_flat_cpu_memory()
            return
        trained: set[Any] = set()
        for group in self.trainable_param_groups:
            trained.update(group["params"])
            numel = sum(parameter.partition_numel() for parameter in group["params"])
            self.param_groups_fp16_flat_cpu_memory.append(self._weights_file.allocate(numel, self.dtype))
        for parameter in self.module.parameters():
            # DeepSpeed itself moves the parts of trained weights. Parts that lie on a GPU stay there.
            if parameter not in trained and parameter.ds_tensor.is_cpu:
                self._weights_file.move(parameter.ds_tensor)

    # State

    def _parameters(self) -> Iterable[Any]:
        """Return all trained parameters."""
        return itertools.chain.from_iterable(self.fp16_groups)

    def _create_fp32_partitions(self) -> None:
        """Make the shard, and one-element placeholders for the flat masters that DeepSpeed would make here."""
        # DeepSpeed's own method sets this, too: the device of each subgroup's master.
        self.subgroup_to_device = dict.fromkeys(range(len(self.fp16_partitioned_groups_flat)), "cpu")
        pieces: list[Piece] = []
        self._numbers: dict[int, int] = {}  # of pieces, by their parameters' ids
        rank = torch.distributed.get_rank(self.dp_process_group)
        for flat, parameters in enumerate(self.fp16_groups):
            offset = 0
            group = self.sub_group_to_group_id[flat]
            for parameter in parameters:
                self._numbers[parameter.ds_id] = len(pieces)
                padded_numel = parameter.partition_numel()
                whole_numel = parameter.ds_numel
                start = min(rank * padded_numel, whole_numel)  # the last ranks may have padding alone
                numel = min(padded_numel, whole_numel - start)
                shape = tuple(parameter.ds_shape)
                pieces.append(Piece(self._names[parameter], flat, offset, numel, group, start, whole_numel, shape))
                offset += padded_numel
            placeholder = torch.zeros(1, dtype=torch.float32, device="cpu")
            # The id that DeepSpeed gives to its own flat masters.
            placeholder.ds_id = f"{parameters[0].ds_id}_{parameters[-1].ds_id}"  # type: ignore[attr-defined]
            placeholder.requires_grad = True
            self.fp32_partitioned_groups_flat.append(placeholder)
        self._flats = self.fp32_partitioned_groups_flat
        self.shard = make_shard(
            pieces,
            self.fp16_partitioned_groups_flat,
            self._offload_config,
            self.dp_process_group,
            self.gradient_accumulation_dtype,
            rule_of(self.optimizer),
        )
        for param_group in self.optimizer.param_groups:
            param_group["params"] = []  # as DeepSpeed's own method does

    def _setup_for_real_optimizer(self) -> None:
        """Set up as DeepSpeed does, then show the groups that `initialize_optimizer_states` has hidden meanwhile."""
        super()._setup_for_real_optimizer()
        self.fp16_groups = self._hidden_fp16_groups

    def initialize_optimizer_states(self) -> None:
        """Make no state, as the engine has it; hide DeepSpeed's groups.

        DeepSpeed next makes a gradient buffer for its groups, of which it then sees none: gradients lie in memory of
        the engine.
        """
        self._hidden_fp16_groups, self.fp16_groups = self.fp16_groups, []

    def restore_placeholders(self) -> None:
        """Make each flat master a placeholder of one element."""
        for flat in self._flats:
            flat.data = torch.zeros(1, dtype=torch.float32, device="cpu")

    def _rebind_weights(self) -> None:
        """Note where DeepSpeed has this rank's flat weights now."""
        self.shard.weights[:] = self.fp16_partitioned_groups_flat

    # Gradients

    def partition_grads(self, params_to_release: Sequence[Any], grad_partitions: Sequence[torch.Tensor]) -> None:
        """Pass reduced gradients to the shard, in the dtype that they are accumulated in."""
        for parameter, gradient in zip(params_to_release, grad_partitions, strict=True):
            number = self._numbers[parameter.ds_id]
            numel = self.shard.pieces[number].numel
            final = self._announce_arrival(number)
            if numel:  # else this rank has only padding of it
                self.shard.accumulate(number, gradient.view(-1)[:numel], final=final)
                if parameter.grad is not None and parameter.grad.device.type != "cpu":
                    # Freed below, as DeepSpeed does: its memory is not used again before this stream is done with it.
                    parameter.grad.record_stream(torch.accelerator.current_stream(parameter.grad.device))
            parameter.grad = None

    def _finalize_offload_gradient_accumulation(self) -> None:
        """Do nothing: gradients lie where the step reads them, and `_get_norm_groups` computes norms."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients and drop what has been accumulated, as DeepSpeed does; revoke updates made in backward."""
        super().zero_grad(set_to_none)
        self.shard.close_window()

    def _get_norm_groups(self) -> Any:
        """Return the norms of DeepSpeed's subgroups, computed by DeepSpeed from the engine's norms of gradients.

        DeepSpeed reads these in `norm_for_param_grads`, which this sets.
        """
        norms = self._norms()
        self.norm_for_param_grads = {
            self.get_param_id(parameter): norms[name]
            for parameters in self.fp16_groups
            for parameter in parameters
            if (name := self._names[parameter]) in norms
        }
        return super()._get_norm_groups()

    # The update

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Note the factor by which DeepSpeed unscales and clips gradients: the engine's update applies it to all.

        DeepSpeed does not return the factor, so it is given a gradient of one element, a 1, which it multiplies: that
        of the first flat master, a placeholder.
        """
        if sub_group_id == 0:  # DeepSpeed calls this for each of its subgroups, with the same factor
            probe = self._flats[0]
            probe.grad = torch.ones_like(probe)
            super().unscale_and_clip_grads(0, total_norm)
            self._gradient_factor = float(probe.grad)

    def _optimizer_step(self, sub_group_id: int) -> None:
        """Update everything at the first call: DeepSpeed calls this once for each of its subgroups."""
        if sub_group_id == 0:
            self._run_engine_step()

    def _run_engine_step(self) -> None:
        """Run the engine's step, and note that it has written weights to their file."""
        super()._run_engine_step()
        if self._weights_file is not None:
            self._weights_file.note_written()

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Point parameters into the flat weights, as DeepSpeed does after the update of a subgroup.

        DeepSpeed first copies masters to the weights. That is left out, as the engine has written weights.
        """
        self._unflatten_partitioned_parameters(sub_group_id)

    # Checkpoints

    def _rigid_state_dict(self) -> dict[str, Any]:
        """Return everything in DeepSpeed's layout."""
        with self._with_state_lent() as states:
            state_dict: dict[str, Any] = super()._rigid_state_dict()
            state_dict[FP32_FLAT_GROUPS] = [state.master for state in states]  # the flats will be placeholders again
        saved: dict[str, Any] = self._add_steps(state_dict, states)
        return saved

    def _rigid_load_state_dict(self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        """Load what `_rigid_state_dict` returned, of this class or of DeepSpeed's own; or a stub, in place."""
        load = super()._rigid_load_state_dict
        if isinstance(state_dict, InPlace):
            self._load_in_place(state_dict, load)
            return
        self._saved_steps = state_dict.get(STEPS)
        self._load_by_deepspeed(lambda: load(state_dict, load_optimizer_states), keep_steps=not load_optimizer_states)

    def _load_global_state_stage3(self, sd: Mapping[str, Any]) -> None:
        """Note step counts and groups in the file of a universal checkpoint; load its scalars as DeepSpeed does."""
        self._saved_steps = sd.get(STEPS)
        self._saved_param_groups = sd["optimizer_state_dict"]["param_groups"]
        super()._load_global_state_stage3(sd)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, *arguments: Any, **keywords: Any) -> None:
        """Load a universal checkpoint."""
        load = super().load_hp_checkpoint_state_from_checkpoint_dir_stage3
        self._load_by_deepspeed(lambda: load(*arguments, **keywords))
        # DeepSpeed gives all groups the first one's hyperparameters.
        for group, saved in zip(self.optimizer.param_groups, self._saved_param_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(self, *arguments: Any, **keywords: Any) -> None:
        """Load the weights of a universal checkpoint."""
        load = super().load_module_checkpoint_state_from_checkpoint_dir_stage3
        self._load_by_deepspeed(lambda: load(*arguments, **keywords), keep_steps=True)

    # deepspeed.utils.safe_get_* and safe_set_*

    def _number(self, parameter: Any) -> int:
        """Return the number of a parameter's piece."""
        return self._numbers[parameter.ds_id]

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        """Return a copy of a state tensor of this rank's part, and the number of its subgroup.

        DeepSpeed may change the copy, which `_write_last_read_state` then writes to the shard.
        """
        number = self._number(param)
        state = self.shard.read(number, optim_state_key or "master", param.partition_numel())
        self._last_read_state = state
        return state, self.shard.pieces[number].flat

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        """Return this rank's part of a gradient, to which DeepSpeed may write, and the number of its subgroup."""
        number = self._number(param)
        gradient = self.shard.lend_gradient(number, param.partition_numel())
        return gradient, self.shard.pieces[number].flat

    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Set the master, or a moment, of a parameter from its full value."""
        super().set_full_hp_param(value, param, optim_state_key)
        self._write_last_read_state(param, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Set this rank's part of the master, or of a moment, of a parameter."""
        super().set_local_hp_param(value, param, optim_state_key)
        self._write_last_read_state(param, optim_state_key)

    def _write_last_read_state(self, parameter: Any, key: str | None) -> None:
        """Write the state tensor that was read last to the shard, after DeepSpeed has changed it."""
        if parameter.requires_grad:
            self.shard.write(self._number(parameter), key or "master", self._last_read_state)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """Set a parameter's gradient from its full value."""
        super().set_fp32_grad_for_param(value, param)
        if param.requires_grad:
            self.shard.note_changed(self._number(param))

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """Set this rank's part of a parameter's gradient."""
        super().set_local_grad_for_param(value, param)
        if param.requires_grad:
            self.shard.note_changed(self._number(param))

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, Any], torch.Tensor], param_list: Sequence[Any]
    ) -> None:
        """Replace gradients by what a function makes of their full values."""
        for parameter in param_list:
            if parameter.requires_grad:
                full = self.get_fp32_grad_for_param(parameter)
                self.set_fp32_grad_for_param(update_func(full, parameter), parameter)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Return this rank's part of every gradient in fp32, by subgroup and position in it."""
        return {
            flat: {
                position: self.shard.lend_gradient(self._number(parameter), parameter.partition_numel()).float()
                for position, parameter in enumerate(parameters)
            }
            for flat, parameters in enumerate(self.fp16_groups)
        }
