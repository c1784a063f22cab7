"""ZeRO-1 and ZeRO-2 whose optimizer state is the engine's.

DeepSpeed has one flat tensor of weights for each parameter group; each rank updates its part of it, and has a copy of
the rest. DeepSpeed's constructor makes a flat fp32 master of that part, which is freed right after. From then on its
"master" is this rank's part of the weights itself, so that the copies that `step()` makes from it to the weights
change nothing.

A *piece* is this rank's run of one parameter. The pieces are numbered; `_numbers` has their numbers by the ids that
DeepSpeed gives to parameters.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import set_full_hp_grad

from offload.integrations.deepspeed.common import STEPS, OffloadedOptimizer, make_shard
from offload.integrations.deepspeed.gathers import Gathers
from offload.integrations.deepspeed.in_place import InPlace
from offload.integrations.deepspeed.pieces import Piece
from offload.integrations.deepspeed.shard import FlatState, rule_of

SAMPLES = 8
"""Of each weight so many elements, and one more, are compared: torch's version counters miss some changes."""


class WeightsFingerprint(NamedTuple):
    """Shows whether weights have changed: address and torch's version of each, and sample elements of all."""

    places_and_versions: Sequence[tuple[int, int]] = ()
    samples: Sequence[torch.Tensor] = ()


class OffloadedStage12(OffloadedOptimizer, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """DeepSpeed's ZeRO-1 and ZeRO-2 optimizer over an `offload.Engine`; see `OffloadedOptimizer`."""

    _sampled_indexes: list[torch.Tensor] | None = None  # in each flat tensor of weights; None before the first use
    _noted_fingerprint = WeightsFingerprint()  # as it was when weights were rounded masters; empty if unknown
    _gathers: Gathers | None = None
    _skips_copy_and_gather = False  # whether DeepSpeed's step is under way, without its copy and gather of weights

    # Into the next forward pass

    def hook_model(self, model: torch.nn.Module) -> None:
        """Hook a model's modules to wait for their weights, if steps may go on into its forward pass. Collective."""
        if self.may_overlap_forward:
            parts, pace = self.parallel_partitioned_bit16_groups, self._auto.pace
            self._gathers = Gathers(self.offload, self.shard.pieces, parts, self.dp_process_group, pace)
            self._gathers.hook_model(model)

    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """Make DeepSpeed's step; if it may go on into forward, without DeepSpeed's copy and gather of new weights.

        `Gathers` then gathers them during the next forward pass.
        """
        if self._gathers is None:
            return super().step(*arguments, **keywords)
        self.finish()
        self._end_lending()  # here, as it reads the lists that are replaced below
        # DeepSpeed copies new weights from masters, through buffers, and gathers all flat tensors. Meanwhile its
        # lists have empty tensors to copy, and no flat tensor to gather, so that it does neither.
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        empty_masters = [nothing for _ in self._flats]
        empty_parts = [[nothing for _ in parts] for parts in self.parallel_partitioned_bit16_groups]
        stand_ins: dict[str, list[Any]] = {
            "single_partition_of_fp32_groups": empty_masters,
            "param_buffer_of_bit16_for_cpu_offload_groups": empty_masters,
            "parallel_partitioned_bit16_groups": empty_parts,
            "bit16_groups_flat": [],
        }
        kept = {name: getattr(self, name) for name in stand_ins}
        try:
            self.__dict__.update(stand_ins)
            self._skips_copy_and_gather = True
            return super().step(*arguments, **keywords)
        finally:
            self._skips_copy_and_gather = False
            self.__dict__.update(kept)

    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Point parameters into the flat weights, as DeepSpeed does; not in a `step` that goes on into forward.

        There they already point to these weights, which the engine writes in place.
        """
        if not self._skips_copy_and_gather:
            super()._update_model_bit16_weights(group_index)

    def _run_engine_step(self) -> None:
        """Run the engine's step, then start gathering what it updates."""
        active = self.shard.active
        super()._run_engine_step()
        if self._gathers is not None:
            self._gathers.begin(active)

    def _take_use_order(self) -> Mapping[int, int] | None:
        """Return, by its number, each piece's position in the order that all ranks agree on. Collective.

        None if steps do not go on into forward.
        """
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

    def _parameters(self) -> Iterable[Any]:
        """Return all trained parameters."""
        return itertools.chain.from_iterable(self.bit16_groups)

    def initialize_optimizer_states(self) -> None:
        """Make the shard. DeepSpeed would make moments and fp32 gradients here."""
        pieces: list[Piece] = []
        self._numbers: dict[int, int] = {}
        for flat, parameters in enumerate(self.params_in_partition):
            for parameter in parameters:
                identity = self.get_param_id(parameter)
                # Group, first element in the parameter, place in this rank's part of the flat tensor, and size.
                _, start, offset, numel = self.grad_position[identity]
                self._numbers[identity] = len(pieces)
                whole, shape = parameter.numel(), tuple(parameter.shape)
                # `flat` is the number of the parameter group, too.
                pieces.append(Piece(self._names[parameter], flat, offset, numel, flat, start, whole, shape))
        weights = self._own_weights()
        self._flats = self.single_partition_of_fp32_groups
        # Free DeepSpeed's masters before the engine allocates its memory.
        for flat in self._flats:
            flat.data = torch.empty(0, dtype=torch.float32, device="cpu")
        buffers = self.param_buffer_of_bit16_for_cpu_offload_groups
        # DeepSpeed copies masters to weights through these buffers. They become the weights themselves below.
        buffers.clear()
        dtype = self.gradient_accumulation_dtype
        rule = rule_of(self.optimizer)
        self.shard = make_shard(pieces, weights, self._offload_config, self.dp_process_group, dtype, rule)
        buffers.extend(self.shard.weights)
        self._sums_by_parameter: dict[int, torch.Tensor] = {}  # of gradients that DeepSpeed reduces in fp32
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
        """Drop all references to this rank's part of the weights, which also stands for masters and buffers.

        A flat "master" stays as a tensor of no elements.
        """
        super()._release_weights()
        self.param_buffer_of_bit16_for_cpu_offload_groups.clear()
        for flat in self._flats:
            flat.data = torch.empty(0, dtype=torch.float32, device="cpu")

    def _rebind_weights(self) -> None:
        """Note where this rank's parts of the weights are now, wherever there is a reference to one."""
        self.shard.weights[:] = self._own_weights()
        self.param_buffer_of_bit16_for_cpu_offload_groups[:] = self.shard.weights
        if self._gathers is not None:
            self._gathers.use_parts(self.parallel_partitioned_bit16_groups)
        self.restore_placeholders()

    @property
    def flat_weights(self) -> Sequence[torch.Tensor]:
        """The flat tensors of all weights: this rank has a copy of other ranks' parts, too."""
        flats: Sequence[torch.Tensor] = self.bit16_groups_flat
        return flats

    def note_weights_are_rounded_masters(self) -> None:
        """Note, by their fingerprint, that the weights equal their rounded masters now; see `unchanged_weights`."""
        if self._gathers is None:  # else a step may still be writing them
            self._noted_fingerprint = self._fingerprint_weights()

    def unchanged_weights(self) -> Sequence[torch.Tensor]:
        """Return all trained weights if none has changed since `note_weights_are_rounded_masters`; else none."""
        now, noted = self._fingerprint_weights(), self._noted_fingerprint
        has_same_versions = now.places_and_versions == noted.places_and_versions
        if not has_same_versions or not all(map(torch.equal, now.samples, noted.samples)):
            return ()
        return [weight.data for weights in self.bit16_groups for weight in weights]

    def _fingerprint_weights(self) -> WeightsFingerprint:
        """Return the fingerprint of the weights as they are now.

        Its samples are `SAMPLES` + 1 elements of each weight, evenly spread from the first one to the last. Where
        these lie in the flat tensors is computed once, and kept.
        """
        places_and_versions = [
            (weight.data_ptr(), weight._version) for weights in self.bit16_groups for weight in weights
        ]
        if self._sampled_indexes is None:
            # For each flat tensor: a weight's first element in it, plus an even step from sample to sample.
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
        samples = [flat[index] for flat, index in zip(self.flat_weights, self._sampled_indexes, strict=True)]
        return WeightsFingerprint(places_and_versions, samples)

    def restore_placeholders(self) -> None:
        """Make each flat "master" this rank's part of the weights again, and the one parameter of its group."""
        for flat, weight, group in zip(self._flats, self.shard.weights, self.optimizer.param_groups, strict=True):
            flat.data = weight
            group["params"] = [flat]
        if self._lent is not None:  # `_lend_state` has linked parameters to lent tensors
            self._link_all_hp_params()

    def _lend_state(self, states: list[FlatState]) -> None:
        """Lend state, and let DeepSpeed link parameters to it: its checkpoints go by these links."""
        super()._lend_state(states)
        super()._link_all_hp_params()
        self._hp_optimizer_states_linked = False  # else DeepSpeed links no moments if it has done so before
        self._lazy_init_hp_params_optimizer_state()

    def _get_offload_gradient_dict(self) -> None:
        """Fill `offload_gradient_dict`, in which DeepSpeed's `safe_get_full_grad` finds gradients, by flat tensor."""
        for flat, parameters in enumerate(self.params_in_partition):
            self.offload_gradient_dict[flat] = [
                self.shard.gradient(self._numbers[self.get_param_id(parameter)]) for parameter in parameters
            ]

    # Gradients

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Return whether DeepSpeed (since 0.19) adds reduced fp32 gradients to what the next method returns."""
        uses_buffer = getattr(super(), "_use_compact_grad_partition_buffer", None)  # None before 0.19
        return uses_buffer is not None and bool(uses_buffer(group_idx))

    def _get_compact_grad_partition_slice(
        self, group_idx: int, partition_id: int, param_id: int, num_elements: int
    ) -> torch.Tensor | None:
        """Return the memory to which DeepSpeed adds a gradient that it has reduced in fp32.

        That is the gradient's slot, if the weights are in host memory and gradients have slots there; else a sum on
        the weights' device, which `copy_grads_in_partition` gives to the shard. None for another rank's part, and
        where DeepSpeed does not reduce in this way.
        """
        is_own = partition_id == torch.distributed.get_rank(group=self.real_dp_process_group[group_idx])
        if not is_own or not self._use_compact_grad_partition_buffer(group_idx):
            return None
        weight = self.parallel_partitioned_bit16_groups[group_idx][partition_id]
        if self.shard.gradients.adds_in_slots and weight.device.type == "cpu":
            slot: torch.Tensor = self.shard.lend_sum(self._numbers[param_id])
            return slot
        if param_id not in self._sums_by_parameter:
            dtype = self.gradient_accumulation_dtype
            self._sums_by_parameter[param_id] = torch.zeros(int(num_elements), dtype=dtype, device=weight.device)
        return self._sums_by_parameter[param_id]

    def copy_grads_in_partition(self, param: Any, *group: Any) -> None:
        """Pass a reduced gradient to the shard, in the dtype that it is accumulated in."""
        identity = self.get_param_id(param)
        number = self._numbers[identity]
        final = self._announce_arrival(number)
        flat, start, _, numel = self.grad_position[identity]
        if not self._use_compact_grad_partition_buffer(flat):
            gradient = self.get_param_gradient_attribute(param).view(-1).narrow(0, start, numel)
            self.shard.accumulate(number, gradient, final=final)
        elif identity in self._sums_by_parameter:
            self.shard.accumulate(number, self._sums_by_parameter.pop(identity), final=final)
        else:  # it was added to its slot already
            self.shard.note_changed(number, gathered=final)
        self.clear_grad_attribute(param)

    def scaled_global_norm(self, norm_type: int = 2) -> Any:
        """Return the norm of all gradients of all ranks. Collective.

        DeepSpeed combines the norms in `norm_for_param_grads`, which this sets.
        """
        norms = self._norms()
        self.norm_for_param_grads = {
            identity: norms[name]
            for identity, number in self._numbers.items()
            if (name := self.shard.pieces[number].name) in norms
        }
        return super().scaled_global_norm(norm_type)

    # The update

    def unscale_and_clip_grads(self, grad_groups_flat: Any, total_norm: Any) -> None:
        """Note the factor by which DeepSpeed unscales and clips gradients: the engine's update applies it to all.

        DeepSpeed does not return the factor, so it is given a gradient of one element, a 1, which it multiplies.
        """
        probe = torch.ones(1, dtype=torch.float32, device="cpu")
        super().unscale_and_clip_grads([probe], total_norm)
        self._gradient_factor = float(probe)

    def _optimizer_step(self, group_no: int) -> None:
        """Update all groups at the first call: DeepSpeed calls this once for each group."""
        if group_no == 0:
            self._run_engine_step()

    def update_lp_params(self) -> None:
        """Set all weights to their rounded masters."""
        with self._with_state_lent():
            super().update_lp_params()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything in DeepSpeed's layout."""
        with self._with_state_lent() as states:
            state: dict[str, Any] = super().state_dict()
            key = "single_partition_of_fp32_groups"
            state[key] = [master.detach() for master in state[key]]  # views of masters that require a gradient
        saved: dict[str, Any] = self._add_steps(state, states)
        return saved

    def _load_global_state(self, sd: Mapping[str, Any]) -> None:
        """Note the step counts in a file; then load the loss scale and such values, as DeepSpeed does."""
        self._saved_steps = sd.get(STEPS)
        super()._load_global_state(sd)

    def load_state_dict(
        self, state_dict_list: Any, load_optimizer_states: bool = True, *arguments: Any, **keywords: Any
    ) -> None:
        """Load what `state_dict` returned, of this class or of DeepSpeed's own, or a universal checkpoint."""
        load = super().load_state_dict
        rank = torch.distributed.get_rank(group=self.dp_process_group)
        if state_dict_list is not None and isinstance(state_dict_list[rank], InPlace):
            # DeepSpeed takes its rank's item from the list. A stub is loaded only with optimizer states, hence True.
            self._load_in_place(
                state_dict_list[rank], lambda rest: load([rest] * (rank + 1), True, *arguments, **keywords)
            )
            return
        self._load_by_deepspeed(
            lambda: load(state_dict_list, load_optimizer_states, *arguments, **keywords),
            keep_steps=not load_optimizer_states,
        )

    # deepspeed.utils.safe_get_* and safe_set_*

    def _link_all_hp_params(self) -> None:
        """Make `safe_get_*` and `safe_set_*` read and write the shard, after DeepSpeed has made its own links."""
        if not self.shard.weights:  # DeepSpeed has just moved them, and reads their flat tensors next
            self._rebind_weights()
        super()._link_all_hp_params()
        for parameters in self.params_in_partition:
            for parameter in parameters:
                if parameter._hp_mapping is None:  # DeepSpeed has found no element of it in this rank's part
                    continue
                number = self._numbers[self.get_param_id(parameter)]
                mapping = parameter._hp_mapping
                mapping.get_hp_fragment = self._make_reader(number)
                mapping.get_lp_grad_fragment = self._make_gradient_reader(number)
                parameter.set_full_hp_param = types.MethodType(self._make_writer(number), parameter)
                parameter.set_full_hp_grad = types.MethodType(self._make_gradient_writer(number), parameter)

    def _make_reader(self, number: int) -> Callable[..., torch.Tensor]:
        """Return a function that reads a piece's master or moment: it replaces a method of DeepSpeed's mapping."""

        def get_hp_fragment(optim_state_key: str | None = None) -> torch.Tensor:
            numel = self.shard.pieces[number].numel
            state: torch.Tensor = self.shard.read(number, optim_state_key or "master", numel)
            return state

        return get_hp_fragment

    def _make_gradient_reader(self, number: int) -> Callable[[int], torch.Tensor]:
        """Return a function that returns a piece's gradient: it replaces a method of DeepSpeed's mapping."""

        def get_lp_grad_fragment(index_in_param_group: int) -> torch.Tensor:
            gradient: torch.Tensor = self.shard.lend_gradient(number)
            return gradient

        return get_lp_grad_fragment

    def _make_writer(self, number: int) -> Callable[..., None]:
        """Return a parameter's method that sets a piece's master or moment from the full value of the parameter."""

        def set_full_hp_param(parameter: Any, value: torch.Tensor, optim_state_key: str | None = None) -> None:
            # Where this rank's run of the parameter begins in it, and its number of elements.
            address = parameter._hp_mapping.lp_fragment_address
            fragment = value.reshape(-1).narrow(0, address.start, address.numel)
            # If a master is set, its weight differs from it until the next step. Setting a moment, which changes no
            # master, is not told apart.
            self._noted_fingerprint = WeightsFingerprint()
            self.shard.write(number, optim_state_key or "master", fragment)

        return set_full_hp_param

    def _make_gradient_writer(self, number: int) -> Callable[..., None]:
        """Return a parameter's method that sets a piece's gradient as DeepSpeed does, and tells the shard."""

        def write(parameter: Any, value: torch.Tensor) -> None:
            set_full_hp_grad(parameter, value)  # writes to what `get_lp_grad_fragment` lends
            self.shard.note_changed(number)

        return write
