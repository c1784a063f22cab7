"""How gradients get from autograd to the engine. An optimizer has one route, chosen when it is made.

A route owns the hooks of parameters, and knows who reduces gradients over ranks (the engine's caller, DDP, FSDP2) and
when. Hooks run on autograd's threads, one backward pass at a time, and keep neither a route nor a parameter alive.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef

from offload import combinations
from offload.config import OffloadConfig
from offload.device.none import NoDevice
from offload.errors import ConfigError
from offload.kernels.reference import DTYPE_CODES
from offload.optim import shards
from offload.optim.buckets import Buckets
from offload.optim.hiding import Announcer
from offload.optim.holder import EngineHolder
from offload.optim.overlap import Overlap
from offload.optim.ranks import is_flattened, world
from offload.optim.scaling import GradientId, Scaling
from offload.optim.shards import Cut
from offload.optim.slots import GradientSlot
from offload.optim.weights import BoundParameter, Weights, check_form

log = logging.getLogger("offload")

_attached: weakref.WeakSet[Route] = weakref.WeakSet()
"""Routes of optimizers that have not been closed, to find several that have one parameter."""

NO_PASS = -1
"""What torch returns as the number of the backward pass (`_current_graph_task_id`) while none is under way."""


def choose_route(
    holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap, parameters: Iterable[torch.Tensor]
) -> Route:
    """Return the route for the device and the parameters; set `holder.is_deferred` where the engine opens late.

    Without an accelerator gradients arrive in slots (`SlotRoute`); if ranks reduce them, they stay where they are
    reduced (`ReducedRoute`). On an accelerator they stay until the step (`StepRoute`), or leave in backward
    (`DepartureRoute`). With `gradient_memory` they leave in backward on any device.

    Raises:
        ConfigError: The settings allow for no route; the holder is closed then.
    """
    parameters = [*parameters]
    config = holder.config
    needs_no_reduction = _is_single_process() and not any(map(shards.is_dtensor, parameters))
    # FSDP1's ranks reduce gradients without our hooks seeing it: updates in backward could read other bits than the
    # step finds.
    is_reduced_unseen = not needs_no_reduction and any(map(is_flattened, parameters))
    try:
        check_gradients_arrive_reduced(config, parameters)
        if is_reduced_unseen:
            combinations.FSDP1_BACKWARD.check("overlap", config.overlap)
    except ConfigError:
        holder.close()
        raise
    kind: type[Route]
    if config.gradient_memory is not None:
        kind = DepartureRoute  # not deferred: the gradients of the first pass leave, too
    elif isinstance(holder.device, NoDevice):
        kind = SlotRoute if needs_no_reduction else ReducedRoute
    else:
        kind = StepRoute if config.keep_grads else DepartureRoute
        holder.is_deferred = config.opens_late
    route = kind(holder, weights, scaling, overlap)
    # `shard` requires gradients that are alike on all ranks, as DDP reduces them. Without it a model's hook has to
    # say that DDP does (`listen_to`).
    are_reduced = needs_no_reduction or all(map(_arrives_reduced, parameters)) or config.shard
    # With `gradient_memory` gradients leave for the paths, and no update in backward reads them.
    can_be_final = config.gradient_memory is None and not is_reduced_unseen
    route.gets_final_gradients = can_be_final and are_reduced
    # FSDP2 goes on copying such gradients to the host after their hooks; a model's hook tells when they have come.
    route.needs_model_hook = any(map(shards.copies_gradients_to_host, parameters))
    return route


def _is_single_process() -> bool:
    """Return whether there are no other ranks."""
    world_size, _ = world()
    return world_size == 1


def check_gradients_arrive_reduced(config: OffloadConfig, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse `gradient_memory` and `keep_grads=False` if ranks reduce gradients only after our hooks have run.

    With these settings our hooks take gradients out of `.grad`, where DDP would look for them afterwards. The
    gradient of a `DTensor` over all ranks arrives reduced, as FSDP2 calls the hooks itself, or is a partial one.
    Frozen parameters are left out: call this again when they are thawed.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if config.keeps_grads or all(map(_arrives_reduced, trainable)):
        return
    world_size, _ = world()
    if config.gradient_memory is not None:
        combinations.REDUCED_LATER.refuse(
            "gradient_memory", config.gradient_memory, instead="leave it out", ranks=world_size
        )
    combinations.REDUCED_LATER.refuse("keep_grads", False, instead="use true", ranks=world_size)


def _arrives_reduced(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's gradient is reduced over all ranks when its hook runs.

    It is if there is one rank, or if the parameter is a `DTensor` over all ranks (`device_mesh` is a `DTensor`'s).
    """
    world_size, _ = world()
    mesh = getattr(parameter, "device_mesh", None)
    is_over_all_ranks = mesh is not None and mesh.size() >= world_size
    return world_size == 1 or is_over_all_ranks


class _ClearedGradient(NamedTuple):
    """A note of a gradient that was taken out of `.grad`; it keeps neither the tensor nor its memory alive."""

    bound: BoundParameter
    tensor: weakref.ref[torch.Tensor]
    storage: int | None  # torch's address of the tensor's storage; None if the gradient lies in its slot

    def is_held(self, held_storages: Container[int]) -> bool:
        """Return whether somebody else still holds the gradient, as a tensor or by a view of its memory.

        `held_storages` are torch's addresses of storages that somebody holds by views. For a gradient in its slot
        they are not needed: the slot knows whether anything holds its memory.
        """
        if self.storage is None:
            return not self.bound.slot.is_free
        return self.tensor() is not None or self.storage in held_storages


class Route:
    """The base class of routes: gradients stay in `.grad`, and are bound where they lie when the step begins."""

    has_slots: ClassVar[bool] = False
    """Whether the engine provides memory for gradients."""
    allows_wider_gradients: ClassVar[bool] = True
    """Whether autograd may accumulate in a wider dtype than the weight's."""
    gets_final_gradients: bool = False
    """Whether gradients are known to be final and reduced in backward, so that updates from them can be confirmed."""
    needs_model_hook: bool = False
    """Whether FSDP2 copies gradients to the host, and no model has been hooked to learn when they have come."""
    announcer: Announcer | None = None
    """Tells the engine to which pass a gradient belongs; the route calls it before it passes on the gradient."""

    @property
    def allows_updates_in_backward(self) -> bool:
        """Whether gradients arrive during backward with the bits that the step will find, as updates there need."""
        return self.gets_final_gradients and not self.needs_model_hook

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        self._holder = holder
        self._overlap = overlap
        self._bound = weights.bound
        self._scaling = scaling
        self._free_dealt_gradients = weights.forget_gradients  # frees whole gradients of dealt weights
        self._handles: list[Any] = []  # of hooks, to remove them
        # Attached parameters that have no hook yet: torch refuses hooks of frozen ones. (A dict, for its order.)
        self._unhooked: dict[BoundParameter, None] = {}
        self._read_tensors: list[torch.Tensor] = []  # gradients that the step reads
        self._widened: dict[torch.Tensor, None] = {}  # parameters that get gradients in float32, as settings say
        _attached.add(self)

    def widen(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have autograd accumulate gradients in float32, if `gradient_dtype` says so and the route allows it."""
        if self._holder.config.gradient_dtype != "float32" or not self.allows_wider_gradients:
            return
        for parameter in parameters:
            # FSDP2 has a setting of its own for this, and parameters that cannot be updated are left alone.
            if parameter.dtype in DTYPE_CODES and not shards.is_dtensor(parameter):
                self._widened[parameter] = None
                if parameter.grad_dtype is not torch.float32:
                    _set_grad_dtype(parameter, torch.float32)

    def attach(self, bound: BoundParameter) -> None:
        """Hook a parameter, so that `handle_arrival` gets each gradient; a frozen parameter is hooked once thawed."""
        self._engine = self._holder.engine  # which is open by now
        self._unhooked[bound] = None
        self.hook_thawed()

    def hook_thawed(self) -> None:
        """Hook attached parameters that have been thawed.

        A gradient that came before its parameter was hooked lies in `.grad`, where `bind_gradients` finds it.
        """
        for bound in [bound for bound in self._unhooked if bound.parameter.requires_grad]:
            self._hook(bound)
            del self._unhooked[bound]  # last: after an interrupt a second hook does no harm

    def _hook(self, bound: BoundParameter) -> None:
        """Have autograd call `handle_arrival` for each gradient of a parameter.

        Parameters whose gradients FSDP2 copies to the host get no hook: with one, FSDP2 would wait for each copy.
        `StepRoute.hook_copied_groups` hooks their groups instead.
        """
        if shards.copies_gradients_to_host(bound.parameter):
            return
        register: Any = bound.parameter.register_post_accumulate_grad_hook
        self._handles.append(register(_ArrivalHook(self, bound)))

    def warn_of_clipping(self) -> None:
        """Warn if torch's `clip_grad_norm_` would find no gradients; here it finds them in `.grad`."""

    def handle_arrival(self, bound: BoundParameter, builds_graph: bool = False) -> None:
        """Handle a gradient that autograd has accumulated in `.grad`; after a broken step do nothing.

        Args:
            bound: The parameter.
            builds_graph: Whether it arrives in a backward with `create_graph=True`.
        """
        gradient = bound.parameter.grad
        if gradient is None:  # an earlier hook has taken it, perhaps another optimizer's
            self._refuse_taken(bound)
            return
        if self.announcer is not None:
            self.announcer.arrives(self._engine.gradients, bound.position)
        if self._overlap.models:  # the last step may still read the parameter's previous gradient
            self._overlap.wait_for([bound])
        if self._engine.broken is not None:
            return
        bound.arrivals += 1
        if self._scaling.scaled_ids:  # clipped or unscaled already, which more gradient would make wrong
            self._scaling.note_arrival(bound, gradient, builds_graph)
        if bound.dealt_weight is None:  # else the step sends its shard to the owner rank
            self._handle_gradient(bound, gradient)

    def _refuse_taken(self, bound: BoundParameter) -> None:
        """Raise if another optimizer has the gradient that this hook was to handle.

        Called if `.grad` is None in the hook. If another optimizer has the same parameter, and its gradients leave
        `.grad` in backward, its hook has taken the gradient. If nobody has taken it so, there is nothing to refuse.
        """
        other_routes = (other for other in _attached if other is not self)
        if self._engine.broken is None and any(other.has_departed(bound.parameter) for other in other_routes):
            advice = (
                "close the earlier optimizer of this parameter: its settings let gradients leave .grad in backward "
                "(a traceback that is kept, as notebooks do, may hold it)"
            )
            raise ConfigError(f"gradient of {bound.name}", "gone to another optimizer", advice)

    def has_departed(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter's gradient has been taken out of `.grad` in backward, since the last step."""
        return False

    def _handle_gradient(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Do this route's part with a gradient when it arrives: routes send it, copy it or mark it; here nothing."""

    def _mark_final(self, bound: BoundParameter, gradient: torch.Tensor | None = None) -> None:
        """Tell the engine that a gradient is final where it lies, so that updates in backward may read it.

        Does nothing for a gradient that updates in backward cannot read in its place: one that is part of a graph, or
        that `bind_gradients` has to copy or reduce first.

        Args:
            bound: The parameter.
            gradient: Its gradient; None for the one in `.grad`.
        """
        if gradient is None:
            gradient = bound.parameter.grad
        if self._engine.broken is not None or gradient is None or gradient.requires_grad:
            return
        if not shards.placed_as(gradient, bound.parameter):
            return
        local_gradient = shards.local(gradient).detach()
        local_weight = shards.local(bound.parameter)
        _check_gradient(local_gradient, local_weight, bound)
        if _lies_as(local_gradient, local_weight):
            rank_elements = shards.own(local_gradient, _cut_of_gradient(bound))
            self._engine.gradients.final(bound.position, rank_elements)

    def bind_gradients(self) -> list[BoundParameter]:
        """Tell the engine where gradients lie, and note the tensors; return the parameters that have a gradient.

        A collective if a gradient's placements are not its weight's, as with tensor parallelism.
        """
        self._read_tensors.clear()
        return [bound for bound in self._bound.values() if self._bind_gradient(bound)]

    def _bind_gradient(self, bound: BoundParameter) -> bool:
        """Tell the engine where a gradient lies, copied if its strides differ; return whether there is one."""
        pair = bound.gradient()
        if pair is None:
            return False
        gradient, weight = pair
        _check_gradient(gradient, weight, bound)
        self._read_tensors.append(gradient)
        has_norm = self._has_norm_of_arrival(bound, gradient)  # asked of the gradient itself, before it is copied
        if not _lies_as(gradient, weight):
            gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
            self._read_tensors.append(gradient)
        address = shards.own(gradient, _cut_of_gradient(bound)).data_ptr()
        self._engine.gradients.bind(bound.position, address, DTYPE_CODES[gradient.dtype], gathered=has_norm)
        return True

    def _has_norm_of_arrival(self, bound: BoundParameter, gradient: torch.Tensor) -> bool:
        """Return whether the engine took the gradient's norm when it arrived, and nobody has written to it since.

        Here no norm is taken on arrival; `SlotRoute` overrides this.
        """
        return False

    def gradient_id(self, bound: BoundParameter) -> GradientId | None:
        """Return the id of a parameter's gradient; None if it has none."""
        gradient = bound.parameter.grad
        if gradient is None:
            return None
        return GradientId(weakref.ref(gradient), shards.version(gradient), shards.local(gradient).data_ptr())

    def gradient_ids(self) -> Iterator[tuple[BoundParameter, GradientId | None]]:
        """Yield all parameters, each with the id of its gradient."""
        return ((bound, self.gradient_id(bound)) for bound in self._bound.values())

    def tensors_read(self) -> list[torch.Tensor]:
        """Return the tensors that the step reads gradients from, except those in the engine's own memory."""
        return [gradient.detach() for gradient in self._read_tensors if not self._is_slot(gradient)]

    def _is_slot(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in a gradient slot, which is the engine's memory."""
        return False

    def clear_grads(self, active: Iterable[BoundParameter]) -> None:
        """Set `.grad` of parameters to None, and drop the step's references to these gradients."""
        for bound in active:
            bound.parameter.grad = None
        self._read_tensors.clear()

    def take_grads(self, active: Iterable[BoundParameter]) -> list[BoundParameter]:
        """Set `.grad` of parameters to None: autograd must not add to gradients that the step reads.

        Runs on the engine thread, so that no interrupt comes in between. The caller keeps the tensors that
        `tensors_read` has returned, one for each gradient outside the engine's memory. So a gradient's storage is
        alive here, and has one owner for each gradient in it; more owners are views that somebody else holds.

        Returns:
            Parameters whose gradient somebody else still holds, and so could write to.
        """
        cleared: list[_ClearedGradient] = []
        for bound in active:
            gradient = bound.parameter.grad
            bound.parameter.grad = None
            if gradient is not None:
                cleared.append(self._cleared_gradient(bound, gradient))
            del gradient  # else this variable would count as somebody who holds it
        self._read_tensors.clear()
        # How many tensors over each storage the caller keeps: several, where FSDP2's gradients of a group share one.
        kept_by_step = Counter(each.storage for each in cleared if each.storage is not None)
        # Memory that torch has not allocated may have owners that torch does not count: it is taken as held.
        # (Owners are counted first, as `_is_of_torch` makes one more.)
        held_storages = {
            storage
            for storage, kept in kept_by_step.items()
            if _owner_count(storage) != kept or not _is_of_torch(storage)
        }
        return [each.bound for each in cleared if each.is_held(held_storages)]

    def _cleared_gradient(self, bound: BoundParameter, gradient: torch.Tensor) -> _ClearedGradient:
        """Return a note of a gradient that was in `.grad`."""
        local_gradient = shards.local(gradient)
        if self._is_slot(local_gradient):
            return _ClearedGradient(bound, weakref.ref(gradient), storage=None)
        return _ClearedGradient(bound, weakref.ref(gradient), _storage_address(local_gradient))

    def note_used_gradients(self, active: Iterable[BoundParameter]) -> None:
        """Note the gradients that a step has used, so that `park` may drop them."""
        for bound in active:
            gradient = bound.parameter.grad
            bound.used_gradient = None if gradient is None else (weakref.ref(gradient), _version(gradient))

    def drop_used_gradients(self) -> None:
        """Drop gradients that a step has used; on the engine thread.

        A gradient that another thread has set since `check_gradients_used` belongs to the next step, and stays.
        """
        self.clear_grads(bound for bound in self._bound.values() if not self._has_unused_gradient(bound))

    def slots_in_use(self) -> list[tuple[int, int]]:
        """Return address and size of each gradient slot whose gradient somebody holds.

        Does not look at `.grad`, so any thread may call this.
        """
        return []

    @staticmethod
    def _has_unused_gradient(bound: BoundParameter) -> bool:
        """Return whether a parameter has a gradient that was set or changed since the last step has used one."""
        gradient = bound.parameter.grad
        if gradient is None:
            return False
        if bound.used_gradient is None:
            return True
        used_gradient, used_version = bound.used_gradient
        return used_gradient() is not gradient or used_version != _version(gradient)

    def check_gradients_used(self) -> None:
        """Raise `ConfigError` if a gradient waits for its step: `park` would give back the gradient's memory."""
        for bound in self._bound.values():
            if self._has_unused_gradient(bound):
                advice = "call step(), or zero_grad(set_to_none=True): its memory goes, and no step has used it"
                raise ConfigError("park", f"the gradient of {bound.name}", advice)

    def drop_departed(self) -> None:
        """Drop gradients that left `.grad` during backward, once a step has begun; here there are none.

        The caller keeps the tensors of `tensors_read`.
        """

    def forget_departed(self) -> None:
        """Forget gradients that were taken out of `.grad`, so that the next one of each parameter is the first."""
        self.drop_references()

    def drop_references(self) -> None:
        """Drop all references to gradients; called when no lane reads them any more, or the caller keeps them."""
        self._read_tensors.clear()
        self._free_dealt_gradients()

    def detach(self) -> None:
        """Remove the hooks of all parameters, and undo `widen` for those that no other optimizer has widened."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unhooked.clear()
        _attached.discard(self)
        for parameter in self._widened:
            # Somebody has undone `widen` if this is torch's default, the parameter's dtype, or None, for any dtype.
            is_as_torch = parameter.grad_dtype in (None, parameter.dtype)
            if not is_as_torch and not any(parameter in other._widened for other in _attached):
                _set_grad_dtype(parameter, parameter.dtype)
        self._widened.clear()


class _HostCopy(NamedTuple):
    """Copies of one FSDP2 group's gradients to host memory."""

    end: torch.Event | None  # after the copies; None if FSDP2 has waited for them
    bounds: list[BoundParameter]  # whose gradients are copied

    def has_ended(self) -> bool:
        """Return whether the gradients lie in host memory."""
        return self.end is None or self.end.query()


class StepRoute(Route):
    """Leaves gradients where they lie until the step begins; updates in backward read those that are final.

    When the route tells the engine that a gradient is final depends on who reduces it:

    * Nobody, in a single process, or FSDP2, before hooks run: when the gradient's hook runs.
    * FSDP2, which then copies the gradient to the host: when the copy has ended. Nothing waits for that in backward:
      after each group's reduction, and at the end of the pass, the route looks which copies have ended.
    * DDP: when the gradient's bucket has been reduced, if a communication hook tells that (`listen_to`). Else at the
      end of the pass, when DDP has written reduced gradients to `.grad`.

    If somebody reduces gradients after that, the step finds them changed and revokes the updates.
    """

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(holder, weights, scaling, overlap)
        self._is_single_process = _is_single_process()
        self._pass_number = NO_PASS
        self._not_final: dict[BoundParameter, None] = {}  # parameters whose gradients of this pass are not final yet
        self._buckets: list[Buckets] = []
        self._hooked_groups: list[Any] = []  # FSDP2's groups that copy gradients to the host
        self._host_copies: deque[_HostCopy] = deque()  # not handled yet, oldest first

    def hook_copied_groups(self, model: torch.nn.Module) -> bool:
        """Hook those FSDP2 groups of a model whose gradients are copied to the host, each once.

        If there is such a group, updates in backward are allowed from then on.

        Returns:
            Whether FSDP2 shards the model.
        """
        groups = shards.fsdp_groups(model)
        for group in groups:
            copies = any(map(shards.copies_gradients_to_host, shards.gathered_by(group)))
            if copies and group not in self._hooked_groups:
                self._hooked_groups.append(group)
                self._handles.append(shards.PatchedMethod(group, "post_backward", self._after_reduction))
                self.needs_model_hook = False
        return bool(groups)

    def _after_reduction(self, group: Any, post_backward: Callable[..., Any], *arguments: Any) -> None:
        """Let FSDP2 reduce a group's gradients, and note the copies to the host that it begins then.

        Replaces the group's `post_backward`, which does both, and calls it. Also handles the gradients of earlier
        groups whose copies have ended meanwhile.
        """
        candidates = [
            (each, self._bound[each.sharded_param]) for each in group.fsdp_params if each.sharded_param in self._bound
        ]
        # FSDP2 does not say which parameters of the group had a gradient in this pass. They are those whose `.grad`
        # it changes.
        old_ids = [self.gradient_id(bound) for _, bound in candidates]
        post_backward(*arguments)
        last_event = None  # all copies are on one stream, so the last event comes after all of them
        reduced: list[BoundParameter] = []
        for (fsdp_param, bound), old_id in zip(candidates, old_ids, strict=True):
            new_id = self.gradient_id(bound)
            if new_id is not None and (old_id is None or not new_id.is_same(old_id)):
                last_event = fsdp_param.grad_offload_event
                reduced.append(bound)
        if reduced:
            self._host_copies.append(_HostCopy(last_event, reduced))
            if _current_pass() != NO_PASS:  # autograd queues calls only during a pass
                _when_backward_ends(self._handle_ended_copies)  # after FSDP2's callback, which waits for the events
        self._handle_ended_copies()  # of earlier groups

    @torch.no_grad()
    def _handle_ended_copies(self) -> None:
        """Handle the gradients whose copies to the host have ended, without waiting for others."""
        while self._host_copies and self._host_copies[0].has_ended():
            for bound in self._host_copies.popleft().bounds:
                self.handle_arrival(bound)

    def drop_references(self) -> None:
        """Drop all references to gradients, and copies that have not been handled."""
        super().drop_references()
        self._host_copies.clear()

    @property
    def listens(self) -> bool:
        """Whether reduced buckets are wanted now, for updates in backward; see `buckets.BucketListener`."""
        return self._engine.speculates

    def listen_to(self, buckets: Buckets) -> None:
        """Take gradients from DDP's buckets from now on, as soon as these have been reduced.

        It is known by this that DDP reduces gradients, so updates in backward are allowed from now on.
        """
        buckets.set_listener(self)
        others = [other for other in self._buckets if other is not buckets]
        self._buckets = [*others, buckets]
        self.gets_final_gradients = True  # the buckets tell when

    def _handle_gradient(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Mark a gradient final if it is reduced by now; else note it, to mark it when DDP has reduced it.

        With DDP this also looks which buckets have been reduced since the last gradient came.
        """
        if not self._engine.speculates:  # no update before the step would read it
            return
        # FSDP2's shards are reduced when they arrive; those that it copies to the host arrive after their copy.
        if self._is_single_process or shards.is_dtensor(bound.parameter):
            self._mark_final(bound)
            return
        pass_number = _current_pass()
        if pass_number == NO_PASS:
            return  # outside backward no call can be queued that would mark it final
        if pass_number != self._pass_number:
            self._begin_pass(pass_number)
        self._not_final[bound] = None
        self._mark_reduced_final()

    def _begin_pass(self, pass_number: int) -> None:
        """Forget gradients and buckets of the pass before, and have autograd call `_end_pass`."""
        self._pass_number = pass_number
        self._not_final = {}
        _when_backward_ends(self._queue_end_of_pass)
        for buckets in self._buckets:
            buckets.clear()

    def _mark_reduced_final(self) -> None:
        """Mark gradients of this pass final whose buckets DDP has reduced since the last call."""
        for buckets in self._buckets:
            for parameter, gradient in buckets.take_reduced():
                bound = self._bound.get(parameter)  # None if this optimizer does not update the parameter
                # A parameter that no rank has used has no gradient, though DDP reduces its part of the bucket.
                if bound is not None and bound in self._not_final:
                    del self._not_final[bound]
                    self._mark_final(bound, gradient)

    def _queue_end_of_pass(self) -> None:
        """Have autograd call `_end_pass` after DDP's callback, which writes reduced gradients to `.grad`.

        Autograd calls in the order of queueing, and DDP queues its callback after `_begin_pass` has queued this one.
        So this one runs first, and queues `_end_pass` behind DDP's.
        """
        _when_backward_ends(self._end_pass)

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Mark the gradients of a pass final that no reduced bucket has shown: DDP has written them to `.grad`."""
        bounds = self._not_final
        self._not_final = {}
        for buckets in self._buckets:
            buckets.clear()
        for bound in bounds:
            self._mark_final(bound)


class ReducedRoute(StepRoute):
    """A `StepRoute` for weights in host memory whose gradients ranks reduce, or that are `DTensor`s.

    Gradients keep the dtype that they are reduced in, so autograd does not accumulate in a wider one.
    """

    allows_wider_gradients = False


class SlotRoute(Route):
    """Moves each gradient in host memory to its gradient slot as it arrives; `.grad` is the slot from then on.

    In the same pass over memory the engine sums the squares for the norm, while the gradient is in cache.
    """

    has_slots = True

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(holder, weights, scaling, overlap)
        self._slot_addresses: set[int] = set()  # by which `_is_slot` knows gradients that lie in slots
        _references_alone()  # counts by a backward pass of its own, so not first within a hook; cached from now on
        self._is_held = False  # whether somebody beside `.grad` holds the gradient that is arriving

    def attach(self, bound: BoundParameter) -> None:
        """Give a parameter a gradient slot, and hook it."""
        bound.slot = GradientSlot(self._holder.engine.gradients.slot(bound.position), bound.local)
        if bound.local.numel():  # an empty slot has no address of its own
            self._slot_addresses.add(bound.slot.address)
        super().attach(bound)

    def handle_arrival(self, bound: BoundParameter, builds_graph: bool = False) -> None:
        """Note whether the program holds the gradient; then see `Route.handle_arrival`."""
        # References are counted before anything else, while no variable of ours holds the gradient.
        self._is_held = _references_to_gradient(bound.parameter) > _references_alone()
        super().handle_arrival(bound, builds_graph)

    def _handle_gradient(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Let the engine take a gradient's norm, and move the gradient to its slot, unless it lies there already.

        The first pass's gradient is moved; further passes accumulate in the slot, as it is `.grad` by then. A
        gradient that may not lie in the slot stays where it is, and `bind_gradients` finds it there.
        """
        if shards.is_dtensor(bound.parameter):
            return  # FSDP2 adds to a gradient in the memory that its reduction has written
        _check_gradient(gradient, bound.parameter, bound)
        slot = bound.slot
        if gradient.data_ptr() == slot.address and gradient.dtype == slot.dtype:
            self._engine.gradients.arrived(bound.position, slot.address, DTYPE_CODES[slot.dtype])
            bound.gathered_version = gradient._version  # of which the engine has taken the norm
        elif self._may_lie_in_slot(bound, gradient):
            self._move_to_slot(bound, gradient)

    def _may_lie_in_slot(self, bound: BoundParameter, gradient: torch.Tensor) -> bool:
        """Return whether a gradient that lies elsewhere may be moved to its slot.

        A gradient stays where it is if the program holds it, or if it lies in the program's memory: what the program
        writes there has to count in the step, as with torch. A gradient of version 0, to which nobody has written
        since it was made, was made by this pass in memory of autograd's. Of any other one the storage's owners are
        looked at.
        """
        weight, slot = bound.parameter, bound.slot
        is_part_of_graph = gradient.requires_grad
        # The slot becomes `.grad`, to which later passes add: torch has to take its dtype there. None: it takes any.
        accumulates_in_slot_dtype = weight.grad_dtype in (None, slot.dtype)
        is_not_narrowed = gradient.dtype in (slot.dtype, weight.dtype)  # the slot's is the weight's, or float32
        is_of_program = self._is_held or gradient._is_view()  # a view may be of anybody's tensor
        if not is_of_program and _version(gradient):
            storage = _storage_address(gradient)
            is_of_program = _owner_count(storage) > 1 or not _is_of_torch(storage)
        return not is_of_program and not is_part_of_graph and accumulates_in_slot_dtype and is_not_narrowed

    def _move_to_slot(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Have a gradient copied to its slot, and set `.grad` to the slot, unless the slot is not free.

        It is not free while somebody still holds the last pass's gradient, which lies in it.
        """
        in_slot = bound.slot.lend()
        if in_slot is None:
            return
        gradients = self._engine.gradients
        if _lies_as(gradient, bound.parameter):  # the engine copies memory to memory, in one pass with the norm
            gradients.arrived(bound.position, gradient.data_ptr(), DTYPE_CODES[gradient.dtype])
        else:  # torch has to change the order of elements, or their signs in a negated view
            gradients.take_memory()  # the slot's memory may have been given back while parked
            in_slot.copy_(gradient)
            gradients.arrived(bound.position, bound.slot.address, DTYPE_CODES[bound.slot.dtype])
        bound.parameter.grad = in_slot
        bound.gathered_version = in_slot._version

    def slots_in_use(self) -> list[tuple[int, int]]:
        """Return address and size of each gradient slot whose gradient somebody holds."""
        slots = (bound.slot for bound in self._bound.values())
        return [(slot.address, slot.nbytes) for slot in slots if not slot.is_free]

    def _is_slot(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in a gradient slot."""
        return gradient.data_ptr() in self._slot_addresses

    def _has_norm_of_arrival(self, bound: BoundParameter, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in its slot, and nobody has written to it since its norm was taken."""
        return gradient.data_ptr() == bound.slot.address and gradient._version == bound.gathered_version


class DepartureRoute(Route):
    """Sends each gradient off as it arrives in backward, and sets its `.grad` to None at once.

    The engine copies it off the GPU, or to buffers (`gradient_memory`). A gradient that the GPU's updates read stays
    in GPU memory, held by `departures`.
    """

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(holder, weights, scaling, overlap)
        self.departures: dict[BoundParameter, torch.Tensor | None] = {}
        """Parameters whose gradients have left `.grad` since the last step. Each has its tensor if the gradient stays
        on the GPU, which adds to it, and reads it in the step; else None. This keeps memory alive; the engine has the
        account of which gradients there are.
        """
        self._storages: dict[BoundParameter, StorageWeakRef] = {}  # of each parameter's last gradient
        self._leave_for_buffers = holder.config.gradient_memory is not None
        self._pass_number = NO_PASS  # of the last pass whose end autograd was asked to tell
        self._has_warned = False  # of clipping

    def warn_of_clipping(self) -> None:
        """Warn, in the first step, unless the caller has clipped by `OffloadedOptimizer.clip_grad_norm_`.

        torch's `clip_grad_norm_` would find no gradient, and return 0 without a word.
        """
        if not (self._has_warned or self._scaling.has_clipped):
            log.warning(
                "gradients leave .grad as they arrive, so torch.nn.utils.clip_grad_norm_ would find none and clip "
                "nothing: if this loop clips, call optimizer.clip_grad_norm_ instead"
            )
        self._has_warned = True

    def has_departed(self, parameter: torch.Tensor) -> bool:
        """See `Route.has_departed`."""
        return self._bound.get(parameter) in self.departures

    def _handle_gradient(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Send a gradient off, and have the engine told when autograd ends this pass."""
        if not shards.placed_as(gradient, bound.parameter):
            return  # a partial gradient of tensor parallelism, which `bind_gradients` reduces
        local_gradient = shards.local(gradient)
        _check_gradient(local_gradient, shards.local(bound.parameter), bound)
        if local_gradient.requires_grad:
            return  # part of a graph: it stays until the step
        self._send_off(bound, local_gradient)
        pass_number = _current_pass()
        if pass_number not in (NO_PASS, self._pass_number):  # once a pass; autograd queues calls only during one
            self._pass_number = pass_number
            _when_backward_ends(self._end_backward)

    def _end_backward(self) -> None:
        """Tell the engine that a pass has ended; autograd calls this."""
        if self._engine.broken is None:
            self._engine.gradients.end_backward()

    def _send_off(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Pass a gradient to the engine, which copies it off the GPU or adds it there, and set `.grad` to None.

        Also notes it: in `departures`, with its storage, and, if it is added to one that was clipped, for `Scaling`.
        """
        weight = shards.local(bound.parameter)
        gradients = self._engine.gradients
        # The engine is asked, and not `departures`, as its count is right even after an interrupt of an earlier call.
        is_first = not gradients.has_arrived(bound.position)
        if not is_first:  # the engine adds it to an earlier one, which may have been clipped
            self._scaling.note_addition(bound)
        self._note_storage(bound, gradient, is_first)
        if not _lies_as(gradient, weight):
            gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
        if is_first:
            self.departures[bound] = gradient if gradients.stays(bound.position) else None
        if self._leave_for_buffers:
            gradients.announce(bound.position)
            bound.parameter.grad = None  # before `arrived`: an interrupt in between must not have it counted twice
        mark = gradients.arrived(bound.position, gradient.data_ptr(), DTYPE_CODES[gradient.dtype])
        bound.parameter.grad = None
        if mark is not None:  # the GPU reads the gradient until the mark: its memory must not be used again before
            # On this route only a `DTensor` is cut. FSDP2 uses its gradient's memory again on streams of its own.
            has_other_streams = bound.cut is not None
            gradients.hold(gradient, mark, elsewhere=has_other_streams)

    def _note_storage(self, bound: BoundParameter, gradient: torch.Tensor, is_first: bool) -> None:
        """Note a gradient's storage; refuse a storage that the last pass's gradient had, too.

        The GPU may still read that gradient. A replayed CUDA graph writes several passes' gradients to one storage,
        and does not wait for readers. Where gradients leave for buffers this does no harm: the copy has ended.

        Args:
            bound: The parameter.
            gradient: Its gradient.
            is_first: No pass since the last step has brought the parameter a gradient.
        """
        storage = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
        last_storage = None if is_first else self._storages.get(bound)
        if last_storage is not None and last_storage == storage and not self._leave_for_buffers:
            where = "in the same memory as that of the pass before"
            combinations.GRAPHS_ACCUMULATE.refuse(f"gradient of {bound.name}", where)
        # The weak reference lets the gradient's memory go. It keeps the storage's own small object, by whose address
        # storages are compared: no later one gets that address.
        self._storages[bound] = storage

    def _bind_gradient(self, bound: BoundParameter) -> bool:
        """Bind a gradient where it lies, or send it off; return whether there is one.

        It is sent off if all go to buffers, or if one has departed before: the engine adds what is in `.grad` to it.
        """
        has_departed = self._engine.gradients.has_arrived(bound.position)
        if not (self._leave_for_buffers or has_departed):
            return super()._bind_gradient(bound)
        if bound.parameter.grad is not None:
            gradient = shards.local(shards.reduced_gradient(bound.parameter.grad, bound.parameter, bound.name))
            _check_gradient(gradient, shards.local(bound.parameter), bound)
            self._send_off(bound, gradient.detach())
        return self._engine.gradients.has_arrived(bound.position)

    def gradient_id(self, bound: BoundParameter) -> GradientId | None:
        """Return the id of a parameter's gradient, by the number of arrivals if it has left `.grad`."""
        if not self._engine.gradients.has_arrived(bound.position):
            return super().gradient_id(bound)
        return GradientId(weakref.ref(bound.parameter), bound.arrivals, 0)

    def forget_departed(self) -> None:
        """Let the engine forget gradients that have left `.grad`; then drop the references to them."""
        try:
            if self.departures:
                self._engine.gradients.forget(self._departed_on_gpu())
        finally:  # after an interrupt the engine may not have forgotten them, and still reads and adds to them
            if not any(self._engine.gradients.has_arrived(bound.position) for bound in self.departures):
                self.drop_references()

    def _departed_on_gpu(self) -> list[torch.Tensor]:
        """Return departed gradients that the GPU reads where they lie."""
        return [gradient for gradient in self.departures.values() if gradient is not None]

    def tensors_read(self) -> list[torch.Tensor]:
        """Return the tensors that the step reads gradients from, those included that the GPU reads where they lie."""
        return [*super().tensors_read(), *self._departed_on_gpu()]

    def drop_departed(self) -> None:
        """Drop gradients that left `.grad` during backward, as the step has begun."""
        if self.departures:  # else no parameter may be attached yet, as where all are frozen
            self._engine.gradients.forget()  # names no tensors: the pending step keeps those that it reads
        self.drop_references()

    def drop_references(self) -> None:
        """Drop all references to gradients, those that have left `.grad` included."""
        super().drop_references()
        self.departures.clear()
        self._storages.clear()


class _ArrivalHook:
    """Calls `Route.handle_arrival` when autograd has accumulated a gradient of one parameter."""

    def __init__(self, route: Route, bound: BoundParameter) -> None:
        self._route = weakref.ref(route)
        self._bound = weakref.ref(bound)

    @_disable_dynamo
    def __call__(self, parameter: torch.Tensor) -> None:
        """Have the route handle the gradient, unless optimizer or parameter are gone; autograd calls this."""
        route, bound = self._route(), self._bound()
        if route is not None and bound is not None:
            builds_graph = torch.is_grad_enabled()  # autograd enables it in hooks only with `create_graph=True`
            with torch.no_grad():
                route.handle_arrival(bound, builds_graph)


def _set_grad_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Set the dtype of a parameter's gradients, and convert a gradient that is in `.grad`.

    torch lets the dtype be set only while `.grad` is None.
    """
    gradient = parameter.grad
    parameter.grad = None
    parameter.grad_dtype = dtype
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def _current_pass() -> int:
    """Return torch's number of the backward pass under way, or `NO_PASS`."""
    return int(torch._C._current_graph_task_id())


def _when_backward_ends(call: Callable[[], None]) -> None:
    """Queue a call for the end of the backward pass under way, after calls that were queued before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def _version(gradient: torch.Tensor) -> int:
    """Return a gradient's version; 0 for one that was made in inference mode, which has no version counter."""
    return 0 if gradient.is_inference() else shards.version(gradient)


def _storage_address(tensor: torch.Tensor) -> int:
    """Return torch's address of a tensor's storage: of the C++ object, not of the memory.

    `untyped_storage` would tell it, too, but makes a Python object that is one more owner of the storage.
    """
    return int(torch._C._storage_address(tensor))  # type: ignore[attr-defined]


def _owner_count(storage: int) -> int:
    """Return how many owners a storage has, given torch's address of it."""
    return int(torch._C._storage_Use_Count(storage))


def _is_of_torch(storage: int) -> bool:
    """Return whether torch has allocated a storage's memory, for this process alone.

    Else its memory may have owners that torch does not count: a NumPy array, another process.

    Args:
        storage: torch's address of it. A tensor over it must be alive. This makes one more owner of the storage, so
            count owners before.
    """
    wrapper = torch.UntypedStorage._new_with_weak_ptr(storage)
    # Memory of NumPy arrays, of buffers and from DLPack is not resizable. On other devices `is_shared` says nothing.
    return bool(wrapper.resizable()) and not (wrapper.device.type == "cpu" and wrapper.is_shared())


def _references_to_gradient(parameter: torch.Tensor) -> int:
    """Return how many references there are to a parameter's gradient, of Python and of C++.

    The counting itself holds some, so the number means something only beside that of `_references_alone`.
    """
    gradient = parameter.grad
    return 0 if gradient is None else sys.getrefcount(gradient) + int(gradient._use_count())  # type: ignore[attr-defined]


@functools.cache
def _references_alone() -> int:
    """Return `_references_to_gradient` for a gradient that autograd has just made, and that `.grad` alone holds.

    Counted once, in a hook of a backward pass through one parameter.
    """
    counts: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        parameter: Any = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
        parameter.register_post_accumulate_grad_hook(lambda p: counts.append(_references_to_gradient(p)))
        parameter.sum().backward()
    return counts[0]


def _cut_of_gradient(bound: BoundParameter) -> Cut | None:
    """Return the cut that takes this rank's elements out of a local gradient; None if it has no others.

    With `shard` the gradient of a plain tensor is whole on every rank. A `DTensor`'s local gradient is this rank's
    shard already.
    """
    return None if shards.is_dtensor(bound.parameter) else bound.cut


def _lies_as(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient's elements lie in memory in the order of the parameter's, not as a negated view."""
    return gradient.stride() == parameter.stride() and not gradient.is_neg()


def _check_gradient(gradient: torch.Tensor, weight: torch.Tensor, bound: BoundParameter) -> None:
    """Refuse a gradient that the engine cannot read: by layout, dtype, device, shape, or its weight's form."""
    check_form(bound)
    field = f"gradient of {bound.name}"
    if gradient.layout != torch.strided:
        raise ConfigError(field, gradient.layout, "use dense gradients (for an embedding, sparse=False)")
    if gradient.dtype not in DTYPE_CODES or gradient.device != weight.device:
        given = f"{gradient.dtype} on {gradient.device}"
        raise ConfigError(field, given, "use a floating dtype on the weight's device")
    if gradient.shape != weight.shape:
        raise ConfigError(field, tuple(gradient.shape), f"use {tuple(weight.shape)}")
