"""`OffloadedOptimizer`: a PyTorch optimizer whose state lives where the plan says, whatever its rule.

A thin client of `offload.Engine`: it knows torch's parameters, gradients and hooks, and nothing of tiers.
`EngineHolder` owns the engine and the GPU, `Weights` the parameters, a `Route` their gradients, `Scaling` the factors
of gradients (clipping, loss scale), `StateView` the state as users read and write it. None of these knows the
optimizer.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, overload

import torch
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the whole compiler at once

from offload import combinations
from offload.backends import BACKENDS
from offload.config import OffloadConfig
from offload.device.none import NoDevice
from offload.errors import ConfigError, check_text, invariant
from offload.layout import PARAMETER_NAMES, Parameter
from offload.limits import Limits
from offload.optim import ranks, shards
from offload.optim.activations import LEAST_BYTES, ActivationsOnPaths, check_model
from offload.optim.buckets import CommHook, register_hook
from offload.optim.figures import StepFigures
from offload.optim.frozen import tell_little
from offload.optim.groups import TorchOptions, check_options, names
from offload.optim.hiding import Announcer, AutoOverlap
from offload.optim.holder import EngineHolder
from offload.optim.overlap import FollowedModel
from offload.optim.preemption import Preemption
from offload.optim.routes import StepRoute, check_gradients_arrive_reduced, choose_route
from offload.optim.scaling import Scaling
from offload.optim.stateful import StatefulOptimizer
from offload.optim.weights import BoundParameter, check_parameter
from offload.protocols import Device
from offload.rules import UpdateRule, number
from offload.session.engine import Engine
from offload.session.parking import check_keep_host
from offload.session.setup import with_gradients


class OffloadedOptimizer(StepFigures, StatefulOptimizer):
    """The base class of this package's optimizers; use one of those."""

    limits = Limits()
    """Sizes and times of the session that only tests change."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        offload: OffloadConfig | Mapping[str, Any] | None,
        options: TorchOptions | None = None,
    ) -> None:
        """Make the optimizer's parts, choose the route of gradients, and open the engine, unless that is deferred.

        A collective with `shard` on several ranks, which compare their weights.

        Args:
            params: Parameters or groups, as for torch's optimizers.
            defaults: Hyperparameters of groups that do not give them.
            offload: The settings as the user gave them; None for the defaults.
            options: torch's options such as `foreach`; only checked.
        """
        check_options(self.kind, options or {})
        self._given_config = config = parse_config(offload)
        owner = weakref.proxy(self)  # so that the holder does not keep the optimizer alive
        holder = EngineHolder(config, self.rule, owner, self.limits)
        super().__init__(params, defaults, holder)  # which makes `_weights` and `_overlap`
        parameters = [*self._parameters()]

        world_size, rank = ranks.world()
        holder.config = config.for_rank(rank) if world_size > 1 else config  # with this rank's own folders on paths
        # `gradient_memory` becomes a number of bytes, or None if all gradients fit.
        pieces = (shards.local(parameter) for parameter in parameters if parameter.requires_grad)
        holder.config = with_gradients(holder.config, ((piece.numel(), piece.itemsize) for piece in pieces))
        self._weights.required_device = _device_of(parameters)
        holder.set_device(self._find_device(parameters))
        if config.shard and world_size > 1:  # each rank updates some rows of every weight
            trainable = {name: p for p, name, _ in names(self.param_groups) if p.requires_grad}
            other_rank = ranks.rank_with_other_weights(trainable)
            if other_rank is not None:
                combinations.REPLICAS_OF_SOME.refuse("shard", True, rank=rank, other=other_rank)
            # No `required_device`: no weight lies on a CPU or accelerator, so any kind of device will do.
            self._weights.rows_over = shards.mesh_of_all(getattr(self._weights.required_device, "type", "cpu"))

        self._scaling = Scaling()
        self._group_of: dict[torch.Tensor, int] = {}  # the number of each bound parameter's group
        self._members: list[list[int]] = []  # ids of all groups' parameters as they were checked last
        self._route = choose_route(holder, self._weights, self._scaling, self._overlap, parameters)
        # The announcer must not keep the optimizer alive. It refers to it weakly, and gets the function `_values` of
        # the class: the optimizer's own bound method would be a strong reference.
        self._announcer = Announcer(self, type(self)._values, self._weights, self._overlap.pace)
        self._route.announcer = self._announcer
        self._auto = AutoOverlap(self._overlap.pace)
        self._begin_figures()
        self.preemption = Preemption()
        self._training_thread = threading.get_ident()  # the thread that took the last step

        if holder.is_deferred:
            self._route.widen(parameters)  # now, for the first backward pass: `_open` would do it only after that
        else:
            self._open(holder.config)

    def _kept_as(self, parameter: torch.Tensor, name: str, group: int) -> tuple[int, UpdateRule | None]:
        """Return how the engine keeps a parameter: the number of its group there, and its rule.

        Here the engine's groups are torch's, and all parameters have the optimizer's rule, which None stands for.
        Optimizers whose parameters differ in their rules override this.

        Args:
            parameter: The parameter.
            name: Its name.
            group: The number of its group in `param_groups`.
        """
        return group, None

    def _find_device(self, parameters: list[torch.Tensor]) -> Device:
        """Return the accelerator that all weights lie on, or `NoDevice` for host memory; tests replace this."""
        torch_device = self._weights.required_device
        if torch_device is not None and torch_device.type in BACKENDS:
            # Imported here, as it imports what drives a GPU, which an optimizer on the CPU does without.
            from offload.device.accelerator import AcceleratorDevice

            return AcceleratorDevice(torch_device)
        return NoDevice()

    def _open(self, config: OffloadConfig) -> None:
        """Open the engine with all trainable parameters, and hook their gradients; see `OptimizerParts`."""
        trainable = [parameter for parameter in self._parameters() if parameter.requires_grad]
        descriptions = self._weights.describe(self.param_groups, trainable, self._kept_as)
        with torch.inference_mode(False):  # a step in inference mode may open it, and views need version counters
            self._holder.start(descriptions, config, gradient_slots=self._route.has_slots)
            # Frozen parameters, too: they may be thawed.
            self._route.widen(self._parameters())
            self._attach(trainable, descriptions)
        tell_little(self.engine.plan.state_bytes, self._parameters())  # a note in the log, if offloading saves little

    def reopen(self) -> None:
        """Begin anew with the parameters that groups have now, after a framework has replaced the earlier ones.

        Accelerate shards a model after its optimizer was made, and writes the shards into `param_groups`. Groups keep
        their hyperparameters and names, and the optimizer its hooks; calls that set something else
        (`overlap_forward`, `last_micro_step`, `log_to`, ...) have to be repeated.

        Raises:
            ConfigError: A parameter that has been updated was replaced, or a new one cannot be used.
            InfeasiblePlanError: The state does not fit into the tiers; the optimizer is closed then.
        """
        replaced = [p for p in self._parameters() if p.requires_grad and p not in self._weights.bound]
        if not replaced:  # the engine has all of them
            return
        if self._state.has_updates:
            self._check_new_parameters(replaced)
        # torch's dicts of the user's hooks, such as `_optimizer_step_pre_hooks`.
        torch_hooks = {name: value for name, value in vars(self).items() if name.endswith("_hooks")}
        self.close()
        # Not the subclass's constructor: the groups have its hyperparameters already.
        OffloadedOptimizer.__init__(self, self.param_groups, self.defaults, self._given_config)
        vars(self).update(torch_hooks)  # the constructor has replaced these dicts by empty ones

    def last_micro_step(self, is_last: bool | Callable[[], bool] | None) -> None:
        """Say whether backward passes from now on are the last before a step, for updates during backward.

        This only affects how much of a step can be made in backward. Unless False was said since the last step, as
        many passes are expected as before that step.

        Args:
            is_last: Whether they are. A function is called whenever a gradient arrives, and is kept as long as the
                optimizer. None: not known.
        """
        self._announcer.is_last_pass = is_last if is_last is None or callable(is_last) else lambda: is_last

    def _choose_overlap(self) -> None:
        """Let `AutoOverlap` count a step and, after some steps, choose where the next ones are hidden.

        Called after each step with `overlap="auto"`. Where it chooses, it is a collective.
        """
        device = self._weights.required_device or torch.device("cpu")
        # Updates in backward keep images of new weights in host memory. Weights lie in a file where memory may be too
        # small for them, so it may be too small for the images, too.
        in_backward = self._route.allows_updates_in_backward and not self._weights.are_in_file
        in_forward = bool(self._overlap.models)
        self._auto.after_step(self.engine, self._weights.groups, device, forward=in_forward, backward=in_backward)

    # Parameters

    def _parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters of all groups, frozen ones included."""
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch documents it, and offload its state, too.

        Raises:
            ConfigError: If a parameter or a hyperparameter cannot be used; nothing has changed then.
            InfeasiblePlanError: If the new state does not fit; nothing has changed then.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # torch's constructor calls this for each group, before ours has set the device.
        is_constructed = self._weights.required_device is not None
        try:
            self._check_last_group()
            if is_constructed:
                check_gradients_arrive_reduced(self._holder.config, group["params"])
            # Without an engine `_open` will add the group's parameters with all others.
            if self._holder.engine_if_open is not None:
                bound = self._weights.bound  # has some of the group's parameters, if an earlier call was interrupted
                self._add([p for p in group["params"] if p.requires_grad and p not in bound])
            if is_constructed:  # else the constructor does it for all
                self._route.widen(group["params"])
        except BaseException:  # an interrupt, too
            self.param_groups.pop()
            if is_constructed:  # else `_group_of` has not been made yet
                # The engine may have these parameters already. In no group they are never updated, and
                # `_check_groups` must not miss them in a group.
                for parameter in group["params"]:
                    self._group_of.pop(parameter, None)
            raise

    def _check_last_group(self) -> None:
        """Refuse the last group if a parameter, a name or a hyperparameter of it cannot be used."""
        group = self.param_groups[-1]
        if torch.is_inference_mode_enabled():
            advice = "make optimizers and add groups outside of it: tensors made in it have no version counter"
            raise ConfigError("params", "torch.inference_mode()", advice)
        self.rule.check(group)  # what no training should begin with; a schedule may exceed these limits later
        self._check_group(group)  # what cannot be computed, or stored in the state's format
        if len(set(group["params"])) != len(group["params"]):
            advice = "give each parameter once: it has one update a step"
            raise ConfigError("params", "a parameter twice in one group", advice)
        for parameter, name, group_number in names(self.param_groups):
            if group_number == len(self.param_groups) - 1:
                check_text("a parameter's name", name, PARAMETER_NAMES)
                if parameter.requires_grad:  # frozen ones are checked when they have a gradient
                    check_parameter(parameter, name, self._weights.required_device)

    def _add(self, parameters: list[torch.Tensor]) -> None:
        """Add parameters to the engine, and bind them.

        The engine may have them already: an earlier call that was interrupted has added them, and not bound them.
        """
        descriptions = self._weights.describe(self.param_groups, parameters, self._kept_as)
        # `bound` has the engine's parameters in the engine's order, so any that are not bound are its last.
        engine_only = self.engine.plan.layout.parameters[len(self._weights.bound) :]
        # Usually the engine has none that are not bound. If it has others than these, `_attach` raises.
        if engine_only != descriptions:
            self.engine.add(descriptions)
        self._attach(parameters, descriptions)

    def _attach(self, parameters: list[torch.Tensor], descriptions: tuple[Parameter, ...]) -> None:
        """Bind parameters, which are the engine's last ones, hook their gradients, and write their start values."""
        bound = self._weights.bound
        engine_count = len(self.engine.plan.layout.parameters)
        # `bind` numbers parameters by those that are bound, so the engine must have no others.
        is_complete = len(bound) + len(parameters) == engine_count
        invariant(is_complete, "parameters that were interrupted while they were added")
        self._route.widen(parameters)
        for parameter, description in zip(parameters, descriptions, strict=True):
            record = self._weights.bind(parameter, description.name)
            self._route.attach(record)
            bound[parameter] = record  # last: after an interrupt before this line, the parameter is added again
        self._state.write_start_values(bound[parameter] for parameter in parameters)
        group_of = {parameter: number for parameter, _, number in names(self.param_groups)}
        self._group_of.update((parameter, group_of[parameter]) for parameter in parameters)

    def _check_ranks(self) -> None:
        """Refuse settings that need to know all ranks, if a process group was made after the optimizer.

        These are `shard`, and the two settings by which gradients leave `.grad` in backward (`keep_grads=False`,
        `gradient_memory`).
        """
        world_size_then, _ = self._made_by
        world_size_now, _ = ranks.world()
        config = self._holder.config
        if world_size_now > world_size_then and (config.shard or not config.keeps_grads):
            gradient_setting = "keep_grads" if config.gradient_memory is None else "gradient_memory"
            refused_setting = gradient_setting if not config.keeps_grads else "shard"
            combinations.MADE_ALONE.refuse(refused_setting, getattr(config, refused_setting), ranks=world_size_now)

    def _check_groups(self) -> None:
        """Refuse groups from which a bound parameter was removed, or that were reordered.

        Groups may get new parameters: the step adds those that have a gradient.
        """
        members = [[*map(id, group["params"])] for group in self.param_groups]
        if members == self._members:  # as in the last step, which is the usual case
            return
        group_of = {parameter: number for parameter, _, number in names(self.param_groups)}
        for parameter, old_group in self._group_of.items():
            if group_of.get(parameter) != old_group:
                # If another parameter of the same name is in its place, this raises a more helpful error.
                self._check_new_parameters([p for p in self._parameters() if p not in self._group_of])
                advice = (
                    "it is not in the group any more that it was added to: leave parameters and the order of groups "
                    "as they are, freeze what is not to train, and add groups by add_param_group"
                )
                raise ConfigError("param_groups", self._weights.bound[parameter].name, advice)
        self._members = members

    # Gradients

    def skip_step(self) -> None:
        """Skip a step, for `offload.GradScaler`: forget gradients that have left the GPU, and end as `step` does."""
        self._route.forget_departed()
        self.preemption.after_call(self, None)  # None: ranks have yet to exchange who had a SIGTERM

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as torch documents it, also those that have left the GPU."""
        self._scaling.reset()
        self._route.forget_departed()
        if self._holder.engine_if_open is not None:
            self._holder.engine_if_open.gradients.drop()  # revokes updates that backward has made from them
        super().zero_grad(set_to_none)

    def _bind_gradients(self) -> list[BoundParameter]:
        """Tell the engine where all gradients lie; return the parameters that have one.

        Adds thawed parameters first, sends gradients of dealt weights to their owners (a collective), and refuses
        gradients that were changed after they were clipped or unscaled.
        """
        self._bind_new_parameters()
        self._route.widen(self._weights.bound)  # torch.utils.swap_tensors undoes it: load_state_dict may call that
        self._weights.refresh(gradients=True)
        active = self._route.bind_gradients()
        self._scaling.check(self._route.gradient_ids())
        return active

    def _bind_new_parameters(self) -> None:
        """Add parameters that have a gradient and were frozen when the optimizer was made.

        Also hooks bound parameters that were frozen and have been thawed.

        Raises:
            ConfigError: One cannot be updated.
        """
        self._add_new_parameters(parameter for parameter in self._parameters() if parameter.grad is not None)
        self._route.hook_thawed()

    def _add_new_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add parameters to the engine, without those that it has already; each once, however often it is given."""
        bound = self._weights.bound
        new = [parameter for parameter in dict.fromkeys(parameters) if parameter not in bound]
        if new:
            self._check_new_parameters(new)
            self._add(new)

    def _check_new_parameters(self, new: list[torch.Tensor]) -> None:
        """Refuse new parameters that cannot be added to the engine.

        That is so where ranks reduce a gradient only after our hooks have run, with settings that do not allow this;
        and where a new parameter has the name of a bound one: the model was sharded after the optimizer was made,
        which has replaced its parameters.
        """
        check_gradients_arrive_reduced(self._holder.config, new)
        new_parameters = set(new)
        bound_names = {bound.name for bound in self._weights.bound.values()}
        for parameter, name, _ in names(self.param_groups):
            if parameter in new_parameters and name in bound_names:
                advice = "make the optimizer after fully_shard, parallelize_module or prepare: it was replaced since"
                raise ConfigError("params", name, advice)

    def _bind_and_sum_squares(self) -> float:
        """Bind all gradients; return the square of their L2 norm, before clipping and with the loss scale in it.

        A collective if parameters are sharded: then the norm is that of all ranks' pieces.
        """
        active = self._bind_gradients()
        positions = [bound.position for bound in active]
        bounds = self._weights.bound.values()
        world_size, _ = ranks.world()
        # FSDP1's ranks each have a range of a flat parameter, and no `cut` says so: the norm would lack other ranks'.
        if world_size > 1 and any(ranks.is_flattened(bound.parameter) for bound in bounds):
            combinations.FSDP1_CLIPS.refuse("params", "FSDP1's")
        if all(bound.cut is None for bound in bounds):
            return self.engine.gradients.norm_sq(positions)
        norms_sq = dict(zip(active, self.engine.gradients.norms_sq(positions), strict=True))
        # All ranks take part for all parameters, also those that have no gradient on some rank.
        return shards.total((bound.cut, norms_sq.get(bound, 0.0)) for bound in bounds)

    @_disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clip the L2 norm of all gradients in the update itself.

        `.grad` is not changed: the next `step` applies the factor as it reads the gradients, and forgets it, as
        `zero_grad` does. So change gradients before this call: `step` refuses gradients that were replaced, changed
        or accumulated since. It does not see writes after this call that version counters do not count (through
        `.data`, NumPy, collectives, or `torch._foreach_*` functions of a `DTensor`).
        The norm is that of the gradients at this call: those in host memory are read once, to see whether they have
        changed since their norms were taken, so earlier writes through `.data` or NumPy count. If parameters are cut
        over ranks it is the norm of all pieces, and all ranks call this together.

        Args:
            max_norm: Largest norm.
            error_if_nonfinite: Raise instead of letting a gradient that is not finite through.

        Returns:
            The norm before clipping, a float64 tensor without dimensions. The same for every placement.

        Raises:
            RuntimeError: If the norm is not finite and `error_if_nonfinite` is set.
            ConfigError: If gradients have changed since they were clipped before.
        """
        if not number(max_norm) >= 0:
            raise ConfigError("max_norm", max_norm, "give a number >= 0")
        with self._lock:
            self._holder.open_after_backward()
            norm = self._scaling.norm_with_factors(self._bind_and_sum_squares())
            if error_if_nonfinite and not math.isfinite(norm):
                raise RuntimeError(f"the gradients' norm is {norm}, so they cannot be clipped")
            self._scaling.clip_to(max_norm, norm, self._route.gradient_ids())
            return torch.tensor(norm, dtype=torch.float64, device="cpu")

    @_disable_dynamo
    def unscale(self, scale: float) -> bool:
        """Let the next step divide gradients by `scale`, without changing `.grad`; for `offload.GradScaler`.

        Args:
            scale: What the loss was multiplied by.

        Returns:
            Whether all gradients are finite.
        """
        with self._lock:
            self._holder.open_after_backward()
            # torch's scaler lowers the scale at every overflow, at last to 0. No step can divide by that, so it
            # counts as an overflow: the step is skipped.
            if not scale:
                return False
            are_finite = math.isfinite(self._bind_and_sum_squares())
            self._scaling.unscale(scale, self._route.gradient_ids())
            return are_finite

    # Work

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        `torch.distributed.checkpoint` calls this with a rate of 0 and gradients that are all 0, so that an optimizer
        makes its state. Before the first update such a call changes nothing here, and counts as no step: `state` and
        `state_dict` show zeros from then on.

        Args:
            closure: Evaluates the model and returns the loss.

        Raises:
            StepAbortedError: If the step could not be finished; the session is broken then.
            SessionBrokenError: If the optimizer was closed or its session is broken.
        """
        loss = None if closure is None else self._loss_of(closure)
        self._training_thread = threading.get_ident()
        with self._lock:
            any_sigterm = self._step()
        self.preemption.after_call(self, any_sigterm)
        return loss

    def _loss_of(self, closure: Callable[[], float]) -> float:
        """Return the loss that a closure computes, with gradients."""
        with torch.enable_grad():
            return closure()

    def _values(self) -> list[Any]:
        """Return hyperparameters for a step, by the engine's groups."""
        return [self.rule.values(group) for group in self.param_groups]

    def _step(self) -> bool | None:
        """Take a step: check, bind gradients, update, and reset what was for this step alone.

        Returns:
            Whether any rank has noted a SIGTERM; None if ranks have not exchanged that in this step.
        """
        if self._is_asked_for_state():
            self._show_state()
            return None
        # Settings that need a hooked model are refused only here: models are hooked after the constructor.
        if not self._overlap.has_hooked_model:
            combinations.NO_MODEL.check("overlap", self.config.overlap)
        if self._route.needs_model_hook:
            combinations.COPIED_GRADIENTS.check("overlap", self.config.overlap)
        self._holder.open_after_backward()
        self._state.check()  # also binds weights that were moved
        self._check_groups()
        self._check_ranks()
        groups = self._values()
        for bound in self._weights.bound.values():
            bound.used_gradient = None  # a signal handler's `park` must not drop what this step is about to use
        active = self._bind_gradients()
        self._weights.warn_of_differences()
        self._route.warn_of_clipping()
        scale, clip = self._scaling.loss_scale, self._scaling.clip
        began_s = self._overlap.pace.begin_step()
        try:
            if "forward" in self._hidden_in:
                self._begin_step(groups, scale, clip, active)
            else:
                self._take_whole_step(groups, scale, clip, active)
        finally:  # a step that failed may have written weights and state, too
            self._state.note_change()
            self._scaling.reset()
            self._route.forget_departed()
            self._weights.note_written(active)
        self._route.note_used_gradients(active)
        self._overlap.pace.end_call(began_s)
        any_sigterm = None  # for a pending step, which exchanges rows in the background, without notes of SIGTERM
        # A pending step is reported by `_finish`.
        if not self._overlap.is_pending:
            any_sigterm = self._weights.gather(self.preemption.note)
            self._report_step()
        if self._holder.config.overlap == "auto":
            self._choose_overlap()
        return any_sigterm

    def _take_whole_step(self, groups: list[Any], scale: float, clip: float, active: list[BoundParameter]) -> None:
        """Take a step, and wait until it is over.

        After a pending step `.grad` is None. With a hooked model, "auto" may change between pending and whole steps,
        so a whole step then sets `.grad` to None, too.
        """
        positions = [bound.position for bound in active]
        self.engine.step(groups, scale=scale, clip=clip, active=positions)
        self._is_reported = False
        if self._overlap.models:
            self._route.clear_grads(active)
            self._overlap.split_by_use(())  # only to forget in which order forward has used weights

    def _begin_step(self, groups: list[Any], scale: float, clip: float, active: list[BoundParameter]) -> None:
        """Begin a step that goes on in the background; wait only for the parameters that are updated at once.

        `at_once` are the parameters that no module's hook waits for, and those whose gradient somebody else holds and
        could write to. Hooks wait for those in `later`, which are updated in the order in which forward uses them.
        """
        at_once, later = self._overlap.split_by_use(active)
        # The memory of gradients and weights that the step uses after this returns.
        kept_alive = [*self._route.tensors_read(), *(bound.parameter.detach() for bound in active)]
        exchanged = self._overlap.agree_on_exchanges(at_once, later)  # sorts `later`, too
        positions = [bound.position for bound in (*at_once, *later)]

        def clear_grads() -> None:
            """Set `.grad` to None, and add parameters whose gradient somebody holds to `at_once`.

            The engine thread calls this when the step has begun. Also notes that the step has yet to be reported.
            """
            self._is_reported = False
            at_once.extend(self._route.take_grads(active))

        try:
            kept_alive += self._overlap.bind_hidden_copies(later)
            self.engine.step(groups, scale=scale, clip=clip, active=positions, pending=kept_alive, begun=clear_grads)
        finally:
            if exchanged:  # also if this rank's step did not begin: the exchange tells other ranks that it failed
                self._overlap.begin_exchange(exchanged)
            if self.engine.is_pending:  # also after an interrupt, if the step has begun
                del kept_alive  # the engine holds these tensors itself, and lets go of them as the step ends
                self._route.drop_departed()
                self._overlap.wait_for(at_once)  # those included that `clear_grads` has added
            else:  # the step has not begun
                # `finish` waits for the exchange, if there is one, and copies weights back from hidden copies, if a
                # model checks its waits.
                self._overlap.finish()

    def _finish(self) -> None:
        """Wait until the last step is over, and report it unless it has failed; see `OptimizerParts`."""
        self._overlap.finish()
        if not self._is_reported and self.engine.broken is None:
            self._report_step()

    def _is_asked_for_state(self) -> bool:
        """Return whether torch takes this step only so that the optimizer makes its state.

        torch does that in `_init_optim_state` of torch/distributed/checkpoint/state_dict.py, with a rate of 0 and
        gradients that are all 0, before the first update. If weights are cut over ranks, the gradients of all these
        ranks count: a collective then, if the rate is 0 and nothing was updated yet.
        """
        has_rate = any(number(group["lr"]) != 0 for group in self.param_groups)
        if has_rate or self._state.has_updates:
            return False
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        are_zero = not any(bool(shards.local(gradient).any()) for gradient in gradients)
        # This rank's note is 0 if it has no gradients, 1 if all of them are 0, and infinity if one is not. So the sum
        # is finite and above 0 if there are gradients, and all of them, on all ranks, are 0.
        note = float(bool(gradients)) if are_zero else math.inf
        trainable = [(p, name) for p, name, _ in names(self.param_groups) if p.requires_grad]
        rows_over, owners = self._weights.rows_over, self._weights.owners
        cuts = [shards.cut_of(parameter, name, rows_over, owners.get(parameter)) for parameter, name in trainable]
        sum_of_notes = shards.total((cut, note) for cut in cuts) if any(cuts) else note
        return 0 < sum_of_notes < math.inf

    def _show_state(self) -> None:
        """Have `state` show zeros for parameters with a gradient from now on; update nothing.

        Called instead of a step by which torch asks for state. As after a step, factors and departed gradients are
        forgotten.
        """
        self._holder.open().gradients.end_backward()  # returns memory that backward has borrowed
        self._state.check()
        self._bind_new_parameters()
        self._state.show_as_zeros(parameter for parameter in self._parameters() if parameter.grad is not None)
        self._scaling.reset()
        self._route.forget_departed()

    # During the backward pass

    def overlap_backward(
        self, model: torch.nn.Module, *, comm_hook: CommHook | None = None, state: object = None
    ) -> None:
        """Hook a model of DDP or FSDP2, so that updates in backward begin with the first gradients it has reduced.

        Whether updates are made in backward is the setting `OffloadConfig(overlap=...)`. All results are bit for bit
        those without. Call it before the first backward pass, for a model of one of two kinds:

        * A DistributedDataParallel. Updates begin with its first reduced bucket, and not when backward ends. Without
          `shard`, "auto" learns only by this call that DDP reduces gradients. It registers a communication hook, of
          which DDP has one.
        * One that FSDP2 shards, whose weights wait in host memory for a GPU (`CPUOffloadPolicy`). "backward", "both"
          and "auto" need this, or `overlap_forward`, which does it as well. Updates begin when the first group's
          gradients have been copied to the host; backward does not wait for that. Any other model of FSDP2 needs no
          call.

        Where gradients leave `.grad` in backward no hook is needed, and a call does nothing. In one process it hooks
        models of the second kind alone.

        Args:
            model: The DistributedDataParallel, or the module that FSDP2 shards, or one with modules that it shards.
            comm_hook: A hook of yours, which reduces instead of DDP; it returns the gradient. None for DDP's mean.
            state: The first argument of `comm_hook`.

        Raises:
            ConfigError: `model` is neither, or has a hook already, or has none of this optimizer's parameters; or
                `comm_hook` is given for another model than DDP's, in one process, or where gradients leave in
                backward.
        """
        if set(self._parameters()).isdisjoint(model.parameters()):
            raise ConfigError("model", type(model).__name__, "give a model that this optimizer updates parameters of")
        route = self._route
        # Before the number of processes counts, as FSDP2 copies gradients to the host in one process, too. True for
        # each model that FSDP2 shards, also if no group was hooked: none copies gradients, or all that do had hooks.
        if isinstance(route, StepRoute) and comm_hook is None and route.hook_copied_groups(model):
            return  # FSDP2's groups, not DDP's buckets, tell when gradients are final
        world_size, _ = ranks.world()
        # No `StepRoute`: gradients leave `.grad` in backward or, in one process, arrive in slots (`SlotRoute`).
        if not isinstance(route, StepRoute) or world_size == 1:
            if comm_hook is None:
                return  # no hook is needed
            combinations.NOT_REDUCED.refuse("comm_hook", comm_hook)
        route.listen_to(register_hook(model, comm_hook, state))

    # Into the next forward pass

    def overlap_forward(self, model: torch.nn.Module, *, check: bool = False) -> FollowedModel:
        """Hook a model so that each `step` goes on into its next forward pass: modules wait for their own weights.

        `step` returns when the norm is known and the update has begun; `.grad` is None then, as the update reads the
        gradients. Parameters are updated in the order in which the last forward pass used them; no number changes.
        Calls that need state or weights, of the optimizer or of the model's state dicts, wait for the whole step;
        `finish` only waits. Three kinds of parameters are updated before `step` returns: those that no module of the
        model owns; those whose gradient somebody else still holds, or that lies in memory that torch has not
        allocated, or has shared with other processes; and those with a gradient though no module that owns them
        was called since the last step (in a model that was compiled before this call, or by
        `torch.func.functional_call`).

        A module waits when it is called: for the parameters that it owns, and those that belong to modules below it
        that have never been called. Before any other use of weights (an average of them, `F.linear(x, other.weight)`
        before `other` is called, `parameters_to_vector`, a copy of the model, `model.to`) call `finish`. A compiled
        module waits for all parameters in it: give the one that `torch.compile` returned.

        With `shard=True` a module waits for the rows of all ranks, which exchange them in the background; all ranks
        call this together. With FSDP2 each gathering of shards waits for these shards.

        Args:
            model: The module whose forward pass is called, compiled or wrapped as it is called. Give it again after
                modules were added to it.
            check: For tests: weights hold NaN from the step on until they are waited for. Takes a copy of them.

        Returns:
            An object whose `remove()` takes the hooks off.

        Raises:
            ConfigError: `model` is no module, is scripted, is sharded, or has none of this optimizer's parameters.
            SessionBrokenError: The optimizer was closed.
        """
        with self._lock:
            followed = self._overlap.hook_model(model, check, self._parameters())
            if isinstance(self._route, StepRoute):  # as `overlap_backward` does for FSDP2
                self._route.hook_copied_groups(model)
            return followed

    def activations_on_paths(
        self, model: torch.nn.Module, host_memory: int | str, *, least_bytes: int | str = LEAST_BYTES
    ) -> ActivationsOnPaths:
        """Return a context for forward and backward in which tensors that autograd saves leave memory for the paths.

        The tensors are copied to buffers. During forward these are written to the paths, those first that backward
        needs last; in backward they are read before they are needed. No number changes. Weights and buffers of the
        model stay in memory, and so do small tensors, and tensors that find no room: on the paths they get the room
        that state and planned checkpoints leave. With recomputation (`torch.utils.checkpoint`) only the inputs of
        layers leave. If a saved tensor is changed in place before backward, torch's own error is raised. Contexts may
        be nested, and backward may come after the context, several times, or with `create_graph=True`; tensors that
        backward itself saves stay in memory. `metrics` tells how many bytes have left.

        On an accelerator this opens the session, if the first step has not: no state is at home there then.

        Args:
            model: The model whose forward pass trains; compiled or wrapped as it is called.
            host_memory: Host memory of the buffers, beside the optimizer's own: bytes, or a size such as "2GiB". It
                is allocated when the context is first entered, and kept until another size is asked for.
            least_bytes: The smallest tensors that leave.

        Raises:
            ConfigError: An argument cannot be used, or (when entered) there are no paths, or another size is in use.
            InfeasiblePlanError: When entered: the system has no such memory.
            SessionBrokenError: When entered: the optimizer was closed.
        """
        check_model(model, set(self._parameters()))
        device = self._weights.required_device or torch.device("cpu")
        return ActivationsOnPaths(self._holder, device, model, host_memory, least_bytes)

    def finish(self) -> None:
        """Wait until the last step is over, if it goes on into the next forward pass (`overlap_forward`).

        Raises:
            StepAbortedError: It could not be finished; the session is broken.
        """
        with self._lock:  # acquiring the lock waits
            pass

    # Phases

    def commit_on_sigterm(
        self,
        folder: str | os.PathLike[str] | Callable[[], object] | None,
        *,
        model: torch.nn.Module | None = None,
        extra: Callable[[], Any] | None = None,
    ) -> None:
        """Commit a checkpoint when SIGTERM comes, as before a machine is taken away, and then let it end the process.

        The signal is only noted, as it may come in the middle of a change. The call of `step` that is under way, or
        the next one, commits at its end (also a step that `offload.GradScaler` skips): `save_checkpoint`,
        `wait_checkpoint`, `wait_mirror`. Then the earlier handler of SIGTERM runs, which by default ends the process.
        If the checkpoint fails, that is logged, and the earlier handler runs all the same. It runs at once for a
        second SIGTERM during the commit, and at `close` for a signal that no step has followed. Where it is that of
        another optimizer, that one commits at its next step, too; it is passed over if it has not stepped since this
        was called.

        With `torch.distributed` all ranks call this together, and all of them commit when one has had the signal.
        In every step they exchange whether one has: with the weights if `shard=True`, and else by a collective of
        one number, which is made only while this is in use. A rank that had no signal itself goes on training.

        Args:
            folder: See `save_checkpoint`; a later call replaces it, and None ends this. A function is called by all
                ranks, inside `step`, instead of `save_checkpoint`: it saves in its own way, with this optimizer's
                checkpoint among what it saves.
            model: See `save_checkpoint`.
            extra: Returns the argument `extra` of `save_checkpoint`. It is called inside `step`, by every rank, so
                before the lines of a training loop that follow `step`.

        Raises:
            ConfigError: An argument cannot be used, this is not the main thread, or native code has set a handler.
            SessionBrokenError: The optimizer was closed.
        """
        if folder is None:
            self.preemption.end()
            return
        self._holder.check_open()
        self.preemption.use(self, self.config, folder, model, extra)

    def park(self, keep_host: bool = False, *, wait: bool = True, **sizes: Any) -> None:
        """Give memory back to the system between steps, as before a phase that needs it, until `unpark` or next use.

        State at home in memory that may not stay there is written to the paths; state on paths is not moved. Then
        homes, staging slots, gradient slots and device memory are given back. Gradients that a step has used are
        dropped (`.grad` is None); the memory of those that somebody else holds is kept. Numbers, checkpoints and
        weights do not change. Ranks do not wait for each other.

        Any thread may call this. A thread that did not take the last step may call it amid a backward pass, while
        torch changes `.grad`: then `.grad` is not touched, used by a step or not, and the slots of these gradients
        stay in memory. If backward and step run on threads of their own, hold a lock of yours around `backward` to
        `zero_grad`, and around `park`.

        Args:
            keep_host: Whether state stays in host memory, up to the `host_memory` that it was planned with: state
                at home there, and as much of the GPU's as there is room for.
            wait: Wait until memory has been given back. False: this goes on in the background, and ends early if the
                optimizer is used.
            sizes: Refused: how much stays cannot be given in bytes.

        Raises:
            ConfigError: A gradient has arrived that no step has used (and this thread took the last step), or
                `keep_host` is not a bool; nothing has changed then.
            InfeasiblePlanError: The paths have no room for state that has to leave memory; nothing has changed then.
            OffloadError: Paths have failed. State of homes that they did not take is still in memory, and training
                goes on; if changed state in staging slots is not taken, the session breaks, as in a step.
            SessionBrokenError: The optimizer was closed or its session is broken.
        """
        check_keep_host(keep_host, sizes)
        is_training_thread = threading.get_ident() == self._training_thread
        # Another thread must not touch `.grad`: a backward pass may be under way.
        find_slots_in_use = self._drop_used_gradients if is_training_thread else self._route.slots_in_use
        with self._lock:
            self._holder.open().park(keep_host=keep_host, wait=wait, accepted=find_slots_in_use)

    def _drop_used_gradients(self) -> list[tuple[int, int]]:
        """Drop gradients that a step has used; on the engine thread, as a park begins.

        Returns:
            Address and bytes of each gradient slot that somebody still holds, whose memory is kept.

        Raises:
            ConfigError: There is a gradient that no step has used; none is dropped then.
        """
        self._route.check_gradients_used()
        self._scaling.reset()
        self._route.drop_used_gradients()
        return self._route.slots_in_use()

    def unpark(self) -> None:
        """Take memory again that `park` gave back; state is read back when it is used. Any use does this by itself.

        Raises:
            InfeasiblePlanError: The system has no such memory now; the optimizer stays parked, and nothing is lost.
        """
        with self._lock:
            self._holder.open().unpark()

    # Figures and the end

    @property
    def config(self) -> OffloadConfig:
        """Tiers and budgets, as they were given, but `gradient_memory` is None if all gradients fit."""
        return self._holder.config

    @property
    def keeps_grads(self) -> bool:
        """Whether gradients stay in `.grad` until the step; else `clip_grad_norm_` alone can clip them."""
        return self.config.keeps_grads

    @property
    def _engine(self) -> Engine:
        """The engine, for figures."""
        return self.engine

    @property
    def _gradient_norm(self) -> float:
        """The norm of the last `clip_grad_norm_`; else NaN."""
        return self._scaling.norm

    def _frozen_bytes(self) -> int:
        """Return the bytes of state that the next step leaves alone, as its parameters are frozen.

        A parameter that was frozen after backward has a gradient, so the next step updates it, and it does not count.
        Of a subgroup's bytes each segment has its share by number of elements.
        """
        weights = [(bound.position, bound.parameter) for bound in self._weights.bound.values()]
        frozen = {position for position, weight in weights if not weight.requires_grad and weight.grad is None}
        if not frozen:
            return 0
        return sum(
            subgroup.state_bytes * segment.numel // subgroup.numel
            for subgroup in self.engine.plan.layout.subgroups
            for segment in subgroup.segments
            if segment.parameter in frozen
        )

    @property
    def _hidden_in(self) -> tuple[str, ...]:
        """Where steps are hidden now: in "forward" (they go on into it), in "backward", in both or nowhere."""
        return self._auto.hidden_in(self.engine, forward=bool(self._overlap.models))

    def close(self) -> None:
        """Free memory and files; the weights stay. Idempotent; also done when the optimizer is forgotten.

        Raises:
            StepAbortedError: The last step, which went on in the background, could not be finished.
        """
        try:
            self._overlap.unhook()
            self._route.detach()
            self._holder.close()
            self._route.drop_references()  # only now: until the engine is closed, lanes may read these gradients
            self._weights.free_copies()  # likewise
            self._overlap.after_close()  # last, as it may raise the last step's error
        finally:  # passes on a SIGTERM that no step has followed, so it may end the process
            self.preemption.end()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _device_of(parameters: list[torch.Tensor]) -> torch.device | None:
    """Return the device that all trainable weights lie on, and refuse several.

    If all weights are frozen, or the trainable ones cannot be updated where they lie, it is the device of the first
    weight on a CPU or accelerator; None if there is no such weight.
    """
    devices = {shards.local(parameter).device for parameter in parameters if parameter.requires_grad}
    if len(devices) > 1:
        device_names = ", ".join(sorted(map(str, devices)))
        raise ConfigError("params", device_names, "have all weights on one device, or an optimizer for each")
    all_devices = (shards.local(parameter).device for parameter in parameters)
    return next((device for device in (*devices, *all_devices) if device.type in ("cpu", *BACKENDS)), None)


def parse_config(offload: OffloadConfig | Mapping[str, Any] | None) -> OffloadConfig:
    """Return the settings that a user gave; the defaults for None.

    Raises:
        ConfigError: They are no settings.
    """
    if isinstance(offload, Mapping):
        return OffloadConfig.from_dict(offload)
    if offload is not None and not isinstance(offload, OffloadConfig):
        raise ConfigError("offload", offload, "give an OffloadConfig or a mapping of its fields")
    return offload or OffloadConfig()
