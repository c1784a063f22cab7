"""ZeRO-1 and ZeRO-2 whose optimizer state is the engine's.

DeepSpeed has one flat tensor for each parameter group here and builds it in its constructor, so the masters that it
makes are freed right after. From then on the flat "fp32" tensor is this rank's part of the weights themselves, so
that the copies that `step()` makes from it to the weights change nothing.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import set_full_hp_grad

from offload.integrations.deepspeed.common import STEPS, OffloadedOptimizer, make_shard
from offload.integrations.deepspeed.gathers import Gathers
from offload.integrations.deepspeed.in_place import InPlace
from offload.integrations.deepspeed.pieces import Piece
from offload.integrations.deepspeed.shard import FlatState, rule_of

COPIED_AND_GATHERED = (
    "single_partition_of_fp32_groups",
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "parallel_partitioned_bit16_groups",
    "bit16_groups_flat",
)
"""Attributes that DeepSpeed's step copies new weights from, and gathers: lists with one entry per flat tensor."""

SAMPLES = 8
"""Elements of each weight, less one, that are compared to notice a change that torch's version does not count."""


class OffloadedStage12(OffloadedOptimizer, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """DeepSpeed's ZeRO-1 and ZeRO-2 optimizer over an `offload.Engine`; see `OffloadedOptimizer`."""

    _sampled_indexes: list[torch.Tensor] | None = None
    _noted_weights: tuple[list[tuple[int, int]], list[torch.Tensor]] = [], []
    _gathers: Gathers | None = None
    _gathers_later = False

    # Into the next forward pass

    def hook_model(self, model: torch.nn.Module) -> None:
        """Hook a model's modules to wait for their weights, if steps may go on into its forward pass. Collective."""
        if self.can_go_on:
            parts, pace = self.parallel_partitioned_bit16_groups, self._auto.pace
            self._gathers = Gathers(self.offload, self.shard.pieces, parts, self.dp_process_group, pace)
            self._gathers.hook_model(model)

    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """Make DeepSpeed's step; if it may go on into forward, without its gathers: `Gathers` gathers new weights."""
        if self._gathers is None:
            return super().step(*arguments, **keywords)
        self.finish()
        self._end_lending()
        # DeepSpeed copies new weights from masters, which are the weights themselves here, and gathers them: its
        # lists hold empty tensors meanwhile, so that it does neither.
        kept = {name: getattr(self, name) for name in COPIED_AND_GATHERED}
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        parts, empty = self.parallel_partitioned_bit16_groups, [nothing for _ in self._flats]
        stand_ins: tuple[list[Any], ...] = (empty, empty, [[nothing for _ in ranks] for ranks in parts], [])
        try:
            self.__dict__.update(zip(COPIED_AND_GATHERED, stand_ins, strict=True))
            self._gathers_later = True
            return super().step(*arguments, **keywords)
        finally:
            self._gathers_later = False
            self.__dict__.update(kept)

    def _update_model_bit16_weights(self, group_index: int) -> None:
        if not self._gathers_later:  # else the weights lie where the engine has written them
            super()._update_model_bit16_weights(group_index)

    def _update_all(self) -> None:
        active = self.shard.active
        super()._update_all()
        if self._gathers is not None:
            self._gathers.begin(active)

    def _use_order(self) -> Mapping[int, int] | None:
        return None if self._gathers is None else self._gathers.agree_on_order()

    def finish(self) -> None:
        """Wait until the last step is over, and its weights have been gathered."""
        super().finish()
        if self._gathers is not None:
            self._gathers.finish()

    def destroy(self) -> None:
        """Free memory and files, and unhook the model's modules."""
        super().destroy()
        if self._gathers is not None:
            self._gathers.close()

    # State

    def _all_parameters(self) -> Iterable[Any]:
        return itertools.chain.from_iterable(self.bit16_groups)

    def initialize_optimizer_states(self) -> None:
        """Make the shard, in place of moments and fp32 gradients."""
        pieces: list[Piece] = []
        self._numbers: dict[int, int] = {}
        for flat, parameters in enumerate(self.params_in_partition):
            for parameter in parameters:
                identity = self.get_param_id(parameter)
                _, start, offset, numel = self.grad_position[identity]
                self._numbers[identity] = len(pieces)
                whole, shape = parameter.numel(), tuple(parameter.shape)
                pieces.append(Piece(self._names[parameter], flat, offset, numel, flat, start, whole, shape))
        weights = self._own_weights()
        self._flats = self.single_partition_of_fp32_groups
        # DeepSpeed's masters are freed before the engine takes its memory.
        for flat in self._flats:
            flat.data = torch.empty(0, dtype=torch.float32, device="cpu")
        buffers = self.param_buffer_of_bit16_for_cpu_offload_groups
        buffers.clear()
        dtype = self.gradient_accumulation_dtype
        rule = rule_of(self.optimizer)
        self.shard = make_shard(pieces, weights, self._offload_config, self.dp_process_group, dtype, rule)
        buffers.extend(self.shard.weights)
        self._sums: dict[int, torch.Tensor] = {}
        self.restore_placeholders()

    def _own_weights(self) -> list[torch.Tensor]:
        """Return this rank's part of each flat tensor of weights."""
        return [
            partitions[torch.distributed.get_rank(group)]
            for partitions, group in zip(
                self.parallel_partitioned_bit16_groups, self.real_dp_process_group, strict=True
            )
        ]

    def _release_weights(self) -> None:
        super()._release_weights()
        self.param_buffer_of_bit16_for_cpu_offload_groups.clear()
        for flat in self._flats:
            flat.data = torch.empty(0, dtype=torch.float32, device="cpu")

    def _rebind_weights(self) -> None:
        self.shard.weights[:] = self._own_weights()
        self.param_buffer_of_bit16_for_cpu_offload_groups[:] = self.shard.weights
        if self._gathers is not None:
            self._gathers.moved(self.parallel_partitioned_bit16_groups)
        self.restore_placeholders()

    @property
    def flat_weights(self) -> Sequence[torch.Tensor]:
        """All weights, of which this rank has a copy."""
        flats: Sequence[torch.Tensor] = self.bit16_groups_flat
        return flats

    def note_weights(self) -> None:
        """Note that weights equal their rounded masters: their addresses, torch's versions, and some elements."""
        if self._gathers is None:  # else a step may still be writing them
            self._noted_weights = self._observe_weights()

    def rounded_weights(self) -> Sequence[torch.Tensor]:
        """Return all trained weights if they are unchanged since the last `note_weights`; else none."""
        places_and_counts, samples = self._observe_weights()
        is_unchanged = places_and_counts == self._noted_weights[0] and all(
            map(torch.equal, samples, self._noted_weights[1])
        )
        return [weight.data for weights in self.bit16_groups for weight in weights] if is_unchanged else ()

    def _observe_weights(self) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
        """Return address and version of each weight, and evenly spread elements of each, by flat tensor."""
        places_and_counts = [
            (weight.data_ptr(), weight._version) for weights in self.bit16_groups for weight in weights
        ]
        if self._sampled_indexes is None:
            self._sampled_indexes = [
                torch.tensor(
                    [
                        (weight.data_ptr() - flat.data_ptr()) // flat.itemsize
                        + number * (weight.numel() - 1) // SAMPLES
                        for weight in weights
                        if weight.numel()
                        for number in range(SAMPLES + 1)
                    ],
                    dtype=torch.int64,
                    device=flat.device,
                )
                for flat, weights in zip(self.flat_weights, self.bit16_groups, strict=True)
            ]
        return places_and_counts, [
            flat[index] for flat, index in zip(self.flat_weights, self._sampled_indexes, strict=True)
        ]

    def restore_placeholders(self) -> None:
        """Let each flat "master" be this rank's part of the weights, and each group have it as its parameter."""
        for flat, weight, group in zip(self._flats, self.shard.weights, self.optimizer.param_groups, strict=True):
            flat.data = weight
            group["params"] = [flat]
        if self._lent is not None:
            self._link_all_hp_params()

    def _lend_state(self, states: list[FlatState]) -> None:
        super()._lend_state(states)
        super()._link_all_hp_params()
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()

    def _get_offload_gradient_dict(self) -> None:
        for flat, parameters in enumerate(self.params_in_partition):
            self.offload_gradient_dict[flat] = [
                self.shard.gradient(self._numbers[self.get_param_id(parameter)]) for parameter in parameters
            ]

    # Gradients

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Return whether DeepSpeed (since 0.19) adds reductions in fp32 to what the next method returns."""
        uses_buffer = getattr(super(), "_use_compact_grad_partition_buffer", None)
        return uses_buffer is not None and bool(uses_buffer(group_idx))

    def _get_compact_grad_partition_slice(
        self, group_idx: int, partition_id: int, param_id: int, num_elements: int
    ) -> torch.Tensor | None:
        """Return what a reduction in fp32 is added to: the gradient's slot, or zeros that are added to it later.

        None for a part of another rank, and where DeepSpeed does not reduce in this way.
        """
        is_own = partition_id == torch.distributed.get_rank(group=self.real_dp_process_group[group_idx])
        if not is_own or not self._use_compact_grad_partition_buffer(group_idx):
            return None
        target: torch.Tensor
        weight = self.parallel_partitioned_bit16_groups[group_idx][partition_id]
        if not self.shard.gradients.adds_in_slots or weight.device.type != "cpu":
            if param_id not in self._sums:
                dtype = self.gradient_accumulation_dtype
                self._sums[param_id] = torch.zeros(int(num_elements), dtype=dtype, device=weight.device)
            target = self._sums[param_id]
        else:
            target = self.shard.sum_of(self._numbers[param_id])
        return target

    def copy_grads_in_partition(self, param: Any, *group: Any) -> None:
        """Pass a reduced gradient to the shard, in the dtype that it is accumulated in."""
        identity = self.get_param_id(param)
        final = self._note_arrival(self._numbers[identity])
        flat, source, _, numel = self.grad_position[identity]
        if not self._use_compact_grad_partition_buffer(flat):
            gradient = self.get_param_gradient_attribute(param).view(-1).narrow(0, source, numel)
            self.shard.accumulate(self._numbers[identity], gradient, final=final)
        elif identity in self._sums:
            self.shard.accumulate(self._numbers[identity], self._sums.pop(identity), final=final)
        else:  # it was added to its slot already
            self.shard.touch(self._numbers[identity], gathered=final)
        self.clear_grad_attribute(param)

    def scaled_global_norm(self, norm_type: int = 2) -> Any:
        """Return the norm of all gradients of all ranks."""
        norms = self._norms()
        self.norm_for_param_grads = {
            identity: norms[name]
            for identity, number in self._numbers.items()
            if (name := self.shard.pieces[number].name) in norms
        }
        return super().scaled_global_norm(norm_type)

    # The update

    def unscale_and_clip_grads(self, grad_groups_flat: Any, total_norm: Any) -> None:
        """Let DeepSpeed compute its factor, on one element; the update applies it."""
        probe = torch.ones(1, dtype=torch.float32, device="cpu")
        super().unscale_and_clip_grads([probe], total_norm)
        self._gradient_factor = float(probe)

    def _optimizer_step(self, group_no: int) -> None:
        if group_no == 0:
            self._update_all()

    def update_lp_params(self) -> None:
        """Set all weights to their rounded masters."""
        with self._in_memory():
            super().update_lp_params()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything in DeepSpeed's layout."""
        with self._in_memory() as states:
            state: dict[str, Any] = super().state_dict()
            key = "single_partition_of_fp32_groups"
            state[key] = [master.detach() for master in state[key]]
        saved: dict[str, Any] = self._add_steps(state, states)
        return saved

    def _load_global_state(self, sd: Mapping[str, Any]) -> None:
        self._saved_steps = sd.get(STEPS)
        super()._load_global_state(sd)

    def load_state_dict(
        self, state_dict_list: Any, load_optimizer_states: bool = True, *arguments: Any, **keywords: Any
    ) -> None:
        """Load what `state_dict` returned, of this class or of DeepSpeed's own, or a universal checkpoint."""
        load = super().load_state_dict
        rank = torch.distributed.get_rank(group=self.dp_process_group)
        if state_dict_list is not None and isinstance(state_dict_list[rank], InPlace):
            # DeepSpeed indexes this list by its rank; it loads in place only with optimizer states, hence True.
            self._load_in_place(
                state_dict_list[rank], lambda rest: load([rest] * (rank + 1), True, *arguments, **keywords)
            )
            return
        self._load_with(
            lambda: load(state_dict_list, load_optimizer_states, *arguments, **keywords),
            keep_steps=not load_optimizer_states,
        )

    # deepspeed.utils.safe_get_* and safe_set_*

    def _link_all_hp_params(self) -> None:
        """Let `safe_get_*` and `safe_set_*` read and write the shard, after DeepSpeed has made its own links."""
        if not self.shard.weights:  # DeepSpeed has just moved them, and reads their flat tensors next
            self._rebind_weights()
        super()._link_all_hp_params()
        for parameters in self.params_in_partition:
            for parameter in parameters:
                if parameter._hp_mapping is None:
                    continue
                number = self._numbers[self.get_param_id(parameter)]
                mapping = parameter._hp_mapping
                mapping.get_hp_fragment = self._reader(number)
                mapping.get_lp_grad_fragment = self._gradient_reader(number)
                parameter.set_full_hp_param = types.MethodType(self._writer(number), parameter)
                parameter.set_full_hp_grad = types.MethodType(self._gradient_writer(number), parameter)

    def _reader(self, number: int) -> Callable[..., torch.Tensor]:
        def get_hp_fragment(optim_state_key: str | None = None) -> torch.Tensor:
            numel = self.shard.pieces[number].numel
            state: torch.Tensor = self.shard.read(number, optim_state_key or "master", numel)
            return state

        return get_hp_fragment

    def _gradient_reader(self, number: int) -> Callable[[int], torch.Tensor]:
        def get_lp_grad_fragment(index_in_param_group: int) -> torch.Tensor:
            gradient: torch.Tensor = self.shard.lend_gradient(number)
            return gradient

        return get_lp_grad_fragment

    def _writer(self, number: int) -> Callable[..., None]:
        def set_full_hp_param(parameter: Any, value: torch.Tensor, optim_state_key: str | None = None) -> None:
            address = parameter._hp_mapping.lp_fragment_address
            fragment = value.reshape(-1).narrow(0, address.start, address.numel)
            self._noted_weights = [], []  # the weight no longer equals the master, until the next step
            self.shard.write(number, optim_state_key or "master", fragment)

        return set_full_hp_param

    def _gradient_writer(self, number: int) -> Callable[..., None]:
        def write(parameter: Any, value: torch.Tensor) -> None:
            set_full_hp_grad(parameter, value)
            self.shard.touch(number)

        return write
