"""How gradients get from autograd to the engine. An optimizer has one route, chosen when it is made.

A route owns the hooks, and knows who reduces gradients over ranks (the engine's caller, DDP, FSDP2) and when. Hooks
run on autograd's threads, one backward pass at a time, and keep neither a route nor a parameter alive.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

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
from offload.optim.slots import GradientSlot
from offload.optim.weights import BoundParameter, Weights, check_form

NO_PASS = -1
"""torch's number of the backward pass where none is under way."""


def choose_route(
    holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap, parameters: Iterable[torch.Tensor]
) -> Route:
    """Return the route for the device and the parameters; if settings allow for none, close the holder and raise."""
    parameters = [*parameters]
    has_gradient_memory = holder.config.gradient_memory is not None
    is_alone = world()[0] == 1 and not any(map(shards.is_dtensor, parameters))
    # If ranks reduced gradients after backward, the step would find other bits than an update in backward has read.
    can_be_final = is_alone or not any(map(is_flattened, parameters))
    try:
        check_gradients_arrive_reduced(holder.config, parameters)
        if not can_be_final:
            combinations.FSDP1_BACKWARD.check("overlap", holder.config.overlap)
    except ConfigError:
        holder.close()
        raise
    arrive_reduced = is_alone or all(map(_arrives_reduced, parameters))
    kind: type[Route]
    if has_gradient_memory:
        kind, can_be_final = DepartureRoute, False
    elif isinstance(holder.device, NoDevice):
        kind = SlotRoute if is_alone else ReducedRoute
    else:
        kind = StepRoute if holder.config.keep_grads else DepartureRoute
        holder.is_deferred = holder.config.opens_late
    route = kind(holder, weights, scaling, overlap)
    route.is_early = can_be_final and (arrive_reduced or holder.config.shard)
    route.is_deaf = any(map(shards.copies_gradients_to_host, parameters))
    return route


def check_gradients_arrive_reduced(config: OffloadConfig, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse `gradient_memory` and `keep_grads=False` if ranks reduce gradients only after our hooks have run.

    With these settings our hooks take gradients out of `.grad`, and DDP would not find them. The gradient of a
    `DTensor` over all ranks arrives reduced, as FSDP2 calls the hooks itself, or is a partial one. Frozen parameters
    are left out; call this again when they are thawed.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    has_gradient_memory = config.gradient_memory is not None
    if not config.keeps_grads and not all(map(_arrives_reduced, parameters)):
        name, value = ("gradient_memory", config.gradient_memory) if has_gradient_memory else ("keep_grads", False)
        instead = "leave it out" if has_gradient_memory else "use true"
        combinations.REDUCED_LATER.refuse(name, value, instead=instead, ranks=world()[0])


def _arrives_reduced(parameter: torch.Tensor) -> bool:
    """Return whether a gradient is reduced over all ranks when its hook runs."""
    mesh, ranks = getattr(parameter, "device_mesh", None), world()[0]
    return ranks == 1 or (mesh is not None and mesh.size() >= ranks)


class Route:
    """The base class of routes: gradients stay in `.grad`, and are bound where they lie when the step begins."""

    has_slots: ClassVar[bool] = False
    """Whether the engine provides memory for gradients."""
    widens: ClassVar[bool] = True
    """Whether autograd may accumulate in a wider dtype than the weight's."""
    is_early: bool = False
    """Whether gradients are known to arrive reduced, so that updates from them before the step can be confirmed."""
    is_deaf: bool = False
    """Whether FSDP2 copies gradients to the host, and no model has been hooked to learn when they have come."""
    announcer: Announcer | None = None
    """Is told of each gradient before the engine."""

    @property
    def arrives_early(self) -> bool:
        """Whether gradients arrive during backward with the bits that the step will find, as updates there need."""
        return self.is_early and not self.is_deaf

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        self._holder = holder
        self._overlap = overlap
        self._bound = weights.bound
        self._scaling = scaling
        self._forget_dealt_gradients = weights.forget_gradients
        self._handles: list[Any] = []
        self._frozen: dict[BoundParameter, None] = {}  # without a hook yet: torch refuses hooks of frozen parameters
        self._tensors: list[torch.Tensor] = []  # gradients that the step reads

    def attach(self, bound: BoundParameter) -> None:
        """Hook a parameter, so that each of its gradients is passed to `arrived`; a frozen one once it is thawed."""
        self._engine = self._holder.engine  # which is open by now
        self._frozen[bound] = None
        self.hook_thawed()

    def hook_thawed(self) -> None:
        """Hook attached parameters that are not frozen any more; the step binds gradients that came before."""
        for bound in [bound for bound in self._frozen if bound.parameter.requires_grad]:
            self._hook(bound)
            del self._frozen[bound]  # last: after an interrupt a second hook does no harm

    def _hook(self, bound: BoundParameter) -> None:
        if shards.copies_gradients_to_host(bound.parameter):
            return  # with a hook FSDP2 would wait for each copy to the host; `StepRoute.follow` hooks its groups
        register: Any = bound.parameter.register_post_accumulate_grad_hook
        self._handles.append(register(_ArrivalHook(self, bound)))

    def handle_arrival(self, bound: BoundParameter, builds_graph: bool = False) -> None:
        """Handle a gradient that autograd has accumulated; `builds_graph`: in a backward with `create_graph=True`."""
        gradient = bound.parameter.grad
        if gradient is None:
            return
        if self.announcer is not None:
            self.announcer.arrives(self._engine.gradients, bound.position)
        if self._overlap.models:  # the last step may still read the parameter's previous gradient
            self._overlap.wait_for([bound])
        if self._engine.broken is not None:
            return
        bound.arrivals += 1
        if self._scaling.scaled_ids:
            self._scaling.note_arrival(bound, gradient, builds_graph)
        if not bound.is_brought:  # a dealt matrix: the step sends this shard to the rank that updates it
            self._handle(bound, gradient)

    def _handle(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Do this route's part with a gradient before the step begins; here nothing."""

    def _mark_final(self, bound: BoundParameter, gradient: torch.Tensor | None = None) -> None:
        """Tell the engine that a gradient is final where it lies, unless `bind` will have to copy or reduce it.

        Args:
            bound: The parameter.
            gradient: Its gradient; None for the one in `.grad`.
        """
        parameter, gradient = bound.parameter, bound.parameter.grad if gradient is None else gradient
        if self._engine.broken is not None or gradient is None or gradient.requires_grad:
            return
        if shards.placed_as(gradient, parameter):
            rows = None if shards.is_dtensor(parameter) else bound.cut
            gradient, parameter = shards.local(gradient).detach(), shards.local(parameter)
            _check_gradient(gradient, parameter, bound)
            if _lies_as(gradient, parameter):
                self._engine.gradients.final(bound.position, shards.own(gradient, rows))

    def bind(self) -> list[BoundParameter]:
        """Tell the engine where gradients lie; return the parameters that have one."""
        self._tensors.clear()
        return [bound for bound in self._bound.values() if self._bind(bound)]

    def _bind(self, bound: BoundParameter) -> bool:
        """Tell the engine where a gradient lies, copied if its strides differ; return whether there is one."""
        pair = bound.gradient()
        if pair is None:
            return False
        gradient, parameter = pair
        rows = bound.cut
        if rows is not None and shards.is_dtensor(bound.parameter):
            rows = None  # the gradient is this rank's shard already
        _check_gradient(gradient, parameter, bound)
        self._tensors.append(gradient)
        is_gathered = self._has_norm(bound, gradient)
        if not _lies_as(gradient, parameter):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            self._tensors.append(gradient)
        dtype, address = DTYPE_CODES[gradient.dtype], shards.own(gradient, rows).data_ptr()
        self._engine.gradients.bind(bound.position, address, dtype, gathered=is_gathered)
        return True

    def _has_norm(self, bound: BoundParameter, gradient: torch.Tensor) -> bool:
        """Return whether the engine took the gradient's norm when it arrived, and nobody has written to it since."""
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
        return [gradient.detach() for gradient in self._tensors if not self._is_slot(gradient)]

    def _is_slot(self, gradient: torch.Tensor) -> bool:
        return False

    def clear_grads(self, active: Iterable[BoundParameter]) -> list[BoundParameter]:
        """Set `.grad` of parameters to None; the caller keeps the tensors that `tensors_read` returned.

        Autograd must not add to gradients that the step reads. Runs on the engine thread, so that no interrupt comes
        in between.

        Returns:
            Parameters whose gradient somebody else still holds, and so could write to.
        """
        gradients = []
        for bound in active:
            gradient, bound.parameter.grad = bound.parameter.grad, None
            if gradient is not None:
                # Not by `untyped_storage`, which makes a Python object that is one more owner of the storage.
                own = shards.local(gradient)
                storage = None if self._is_slot(own) else torch._C._storage_address(own)  # type: ignore[attr-defined]
                gradients.append((bound, weakref.ref(gradient), storage))
                del own
            del gradient
        self._tensors.clear()
        owners = Counter(storage for _, _, storage in gradients if storage is not None)  # FSDP2's gradients share one
        return [
            bound
            for bound, gradient, storage in gradients
            if not (
                bound.slot.is_free
                if storage is None
                else gradient() is None and _owners_of(storage) == owners[storage]
            )
        ]

    def note_used(self, active: Iterable[BoundParameter]) -> None:
        """Note the gradients that a step has used, so that `park` may drop them."""
        for bound in active:
            gradient = bound.parameter.grad
            bound.used_gradient = None if gradient is None else (weakref.ref(gradient), _version(gradient))

    def drop_used(self) -> None:
        """Drop gradients that a step has used; on the engine thread.

        A gradient that another thread has set since `check_used` belongs to the next step, and stays.
        """
        self.clear_grads(bound for bound in self._bound.values() if self._is_used(bound))

    def slots_in_use(self) -> list[tuple[int, int]]:
        """Return address and size of gradient slots that somebody holds, without a look at `.grad`: any thread."""
        return []

    @staticmethod
    def _is_used(bound: BoundParameter) -> bool:
        """Return whether a parameter has no gradient, or one that a step has used."""
        gradient, used = bound.parameter.grad, bound.used_gradient
        return gradient is None or (used is not None and used[0]() is gradient and used[1] == _version(gradient))

    def check_used(self) -> None:
        """Raise `ConfigError` if a parameter has a gradient that no step has used."""
        for bound in self._bound.values():
            if not self._is_used(bound):
                allowed = "call step(), or zero_grad(set_to_none=True): its memory goes, and no step has used it"
                raise ConfigError("park", f"the gradient of {bound.name}", allowed)

    def drop_departed(self) -> None:
        """Drop gradients that left `.grad` during backward; the caller keeps the tensors of `tensors_read`."""

    def forget_departed(self) -> None:
        """Forget gradients that were taken out of `.grad`, so that the next one of each parameter is the first."""
        self.drop_references()

    def drop_references(self) -> None:
        """Drop all references to gradients; called when no lane reads them any more."""
        self._tensors.clear()
        self._forget_dealt_gradients()

    def detach(self) -> None:
        """Remove the hooks of all parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._frozen.clear()


class StepRoute(Route):
    """Leaves gradients where they lie until the step begins; updates in backward read those that are final.

    When a gradient is final, so that this tells the engine:

    * in a single process, or of FSDP2's shards, which are reduced by then: when its hook runs;
    * of shards whose gradients FSDP2 copies to the host: when the copy has ended. Nothing waits for that in backward:
      after each group's reduction, and at the end of the pass, this looks which copies have ended;
    * with DDP: when its bucket has been reduced, if a communication hook tells that (`hear`); else at the end of the
      pass, when DDP has written reduced gradients to `.grad`.

    If somebody reduces gradients after that, the step finds them changed and revokes the updates.
    """

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(holder, weights, scaling, overlap)
        self._is_alone = world()[0] == 1
        self._pass = NO_PASS
        self._pass_bounds: dict[BoundParameter, None] = {}  # whose gradients of this pass are not final yet
        self._buckets: list[Buckets] = []
        self._groups: list[Any] = []  # FSDP2's groups that copy gradients to the host
        # An event after copies to the host, or None if FSDP2 has waited for them; and whose gradients are copied.
        self._copies: deque[tuple[torch.Event | None, list[BoundParameter]]] = deque()

    def hook_copied_groups(self, model: torch.nn.Module) -> bool:
        """Hook the groups of a model whose gradients FSDP2 copies to the host; return whether there are any."""
        groups = [
            g for g in shards.fsdp_groups(model) if any(map(shards.copies_gradients_to_host, shards.gathered_by(g)))
        ]
        for group in groups:
            if group not in self._groups:
                self._groups.append(group)
                self._handles.append(shards.PatchedMethod(group, "post_backward", self._after_reduction))
                self.is_deaf = False
        return bool(groups)

    def _after_reduction(self, group: Any, post_backward: Callable[..., Any], *arguments: Any) -> None:
        """Call FSDP2's reduction of a group, note which gradients it has set or added to, and handle ended copies.

        Stands in for the group's `post_backward`, which reduces its gradients and begins to copy them to the host.
        """
        bounds = [(p, bound) for p in group.fsdp_params if (bound := self._bound.get(p.sharded_param))]
        ids = [self.gradient_id(bound) for _, bound in bounds]
        post_backward(*arguments)
        event, reduced = None, list[BoundParameter]()
        for (fsdp_param, bound), old in zip(bounds, ids, strict=True):
            new = self.gradient_id(bound)
            if new is not None and (old is None or not new.is_same(old)):
                event = fsdp_param.grad_offload_event  # all are on one stream, so the last comes after all copies
                reduced.append(bound)
        if reduced:
            self._copies.append((event, reduced))
            if torch._C._current_graph_task_id() != NO_PASS:
                _when_backward_ends(self._handle_ended_copies)  # after FSDP2's callback, which waits for the events
        self._handle_ended_copies()

    @torch.no_grad()
    def _handle_ended_copies(self) -> None:
        """Handle the gradients whose copies to the host have ended, without waiting for others."""
        while self._copies and ((event := self._copies[0][0]) is None or event.query()):
            for bound in self._copies.popleft()[1]:
                self.handle_arrival(bound)

    def drop_references(self) -> None:
        """Drop all references to gradients, and copies that have not been handled."""
        super().drop_references()
        self._copies.clear()

    @property
    def listens(self) -> bool:
        """Whether reduced buckets are wanted now, for updates in backward; see `buckets.BucketListener`."""
        return self._engine.speculates

    def listen_to(self, buckets: Buckets) -> None:
        """Take gradients from DDP's buckets from now on, as soon as these have been reduced."""
        buckets.set_listener(self)
        self._buckets = [*(other for other in self._buckets if other is not buckets), buckets]
        self.is_early = True

    def _handle(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Mark a gradient final if it is reduced; else note it, and mark others final whose buckets are reduced."""
        if not self._engine.speculates:
            return
        if self._is_alone or shards.is_dtensor(bound.parameter):
            self._mark_final(bound)
            return
        number: int = torch._C._current_graph_task_id()
        if number == NO_PASS:
            return
        if number != self._pass:
            self._pass, self._pass_bounds = number, {}
            _when_backward_ends(self._queue_end_of_pass)
            for buckets in self._buckets:
                buckets.clear()
        self._pass_bounds[bound] = None
        for buckets in self._buckets:
            for parameter, reduced in buckets.take_reduced():
                of_pass = self._bound.get(parameter)
                # A parameter that no rank has used has no gradient, though DDP reduces its part of the bucket.
                if of_pass is not None and of_pass in self._pass_bounds:
                    del self._pass_bounds[of_pass]
                    self._mark_final(of_pass, reduced)

    def _queue_end_of_pass(self) -> None:
        _when_backward_ends(self._end_pass)  # after DDP's callback, which was queued after this one

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Mark the gradients of a pass final that are still left: DDP has written them to `.grad`."""
        bounds, self._pass_bounds = self._pass_bounds, {}
        for buckets in self._buckets:
            buckets.clear()
        for bound in bounds:
            self._mark_final(bound)


class ReducedRoute(StepRoute):
    """Reads gradients in host memory where ranks have reduced them, in the dtype that they are reduced in."""

    widens = False


class SlotRoute(Route):
    """Takes norms of gradients in host memory on arrival, while they are in cache, and makes `.grad` the slot."""

    has_slots = True

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(holder, weights, scaling, overlap)
        self._slot_addresses: set[int] = set()

    def attach(self, bound: BoundParameter) -> None:
        """Give a parameter a gradient slot, and hook it."""
        bound.slot = GradientSlot(self._holder.engine.gradients.slot(bound.position), bound.local)
        if bound.local.numel():
            self._slot_addresses.add(bound.slot.address)
        super().attach(bound)

    def _handle(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Let the engine copy a gradient to its slot, and set `.grad` to that; or leave the gradient to `bind`."""
        parameter, slot, engine = bound.parameter, bound.slot, self._engine
        if shards.is_dtensor(parameter):
            return  # FSDP2 adds to a gradient in the memory that its reduction has written
        _check_gradient(gradient, parameter, bound)
        if gradient.data_ptr() == slot.address and gradient.dtype == slot.dtype:
            engine.gradients.arrived(bound.position, slot.address, DTYPE_CODES[slot.dtype])
        elif gradient.requires_grad or parameter.grad_dtype not in (None, slot.dtype):
            return  # part of a graph, or accumulated in another dtype than its slot's: `step` binds it as it is
        elif gradient.dtype not in (slot.dtype, parameter.dtype):
            return  # wider than its slot, and not to be narrowed
        else:
            lent = slot.lend()
            if lent is None:
                return  # somebody still holds the last pass's gradient, which lies in the slot
            if _lies_as(gradient, parameter):
                engine.gradients.arrived(bound.position, gradient.data_ptr(), DTYPE_CODES[gradient.dtype])
            else:
                engine.gradients.take_memory()
                lent.copy_(gradient)
                engine.gradients.arrived(bound.position, slot.address, DTYPE_CODES[slot.dtype])
            parameter.grad = gradient = lent
        bound.gathered_version = gradient._version

    def slots_in_use(self) -> list[tuple[int, int]]:
        """Return address and size of gradient slots whose gradient somebody holds."""
        slots = (bound.slot for bound in self._bound.values())
        return [(slot.address, slot.nbytes) for slot in slots if not slot.is_free]

    def _is_slot(self, gradient: torch.Tensor) -> bool:
        return gradient.data_ptr() in self._slot_addresses

    def _has_norm(self, bound: BoundParameter, gradient: torch.Tensor) -> bool:
        return gradient.data_ptr() == bound.slot.address and gradient._version == bound.gathered_version


class DepartureRoute(Route):
    """Sends gradients off a GPU, or to buffers, during backward: `.grad` is None before the next gradient arrives."""

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(holder, weights, scaling, overlap)
        self.departures: dict[BoundParameter, torch.Tensor | None] = {}
        """Parameters whose gradients have left `.grad`; with the tensor if the GPU reads it and adds to it until the
        step. This only holds the memory: the engine knows which gradients there are.
        """
        self._storages: dict[BoundParameter, StorageWeakRef] = {}  # of each parameter's last gradient
        self._leaves = holder.config.gradient_memory is not None
        self._pass = NO_PASS

    def _handle(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Send a gradient off, and end the pass for the engine when autograd does."""
        if not shards.placed_as(gradient, bound.parameter):
            return  # a partial gradient of tensor parallelism, which `bind` reduces
        gradient = shards.local(gradient)
        _check_gradient(gradient, shards.local(bound.parameter), bound)
        if not gradient.requires_grad:  # else it is part of a graph, and stays until the step
            self._send_off(bound, gradient)
            number: int = torch._C._current_graph_task_id()
            if number not in (NO_PASS, self._pass):
                self._pass = number
                _when_backward_ends(self._end_backward)

    def _end_backward(self) -> None:
        if self._engine.broken is None:
            self._engine.gradients.end_backward()

    def _send_off(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Pass a gradient to the engine, which copies it off the GPU or adds it there, and set `.grad` to None."""
        parameter, engine = shards.local(bound.parameter), self._engine
        is_first = not engine.gradients.has_arrived(bound.position)  # right after interrupts, too
        if not is_first:
            self._scaling.note_addition(bound)
        storage = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
        last_storage = None if is_first else self._storages.get(bound)
        if last_storage is not None and last_storage == storage and not self._leaves:
            # A replayed CUDA graph writes each pass's gradient to the same memory, and does not wait for readers.
            where = "in the same memory as that of the pass before"
            combinations.GRAPHS_ACCUMULATE.refuse(f"gradient of {bound.name}", where)
        self._storages[bound] = storage  # a weak reference keeps allocators from using the address again
        if not _lies_as(gradient, parameter):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        if is_first:
            self.departures[bound] = gradient if engine.gradients.stays(bound.position) else None
        if self._leaves:  # `.grad` is None first: an interrupt in between must not leave it to be counted twice
            engine.gradients.announce(bound.position)
            bound.parameter.grad = None
        mark = engine.gradients.arrived(bound.position, gradient.data_ptr(), DTYPE_CODES[gradient.dtype])
        bound.parameter.grad = None
        if mark is not None:
            engine.gradients.hold(gradient, mark, elsewhere=bound.cut is not None)  # FSDP2 has streams of its own

    def _bind(self, bound: BoundParameter) -> bool:
        if not (self._leaves or self._engine.gradients.has_arrived(bound.position)):
            return super()._bind(bound)
        if bound.parameter.grad is not None:
            gradient = shards.reduced_gradient(bound.parameter.grad, bound.parameter, bound.name)
            _check_gradient(shards.local(gradient), shards.local(bound.parameter), bound)
            self._send_off(bound, shards.local(gradient).detach())
        return self._engine.gradients.has_arrived(bound.position)

    def gradient_id(self, bound: BoundParameter) -> GradientId | None:
        """Return the id of a parameter's gradient, by the number of arrivals if it has left `.grad`."""
        if not self._engine.gradients.has_arrived(bound.position):
            return super().gradient_id(bound)
        return GradientId(weakref.ref(bound.parameter), bound.arrivals, 0)

    def forget_departed(self) -> None:
        """Let the engine forget gradients that were taken out of `.grad`, and drop those that it has forgotten."""
        try:
            if self.departures:
                gradients = [gradient for gradient in self.departures.values() if gradient is not None]
                self._engine.gradients.forget(gradients)
        finally:  # after an interrupt the engine may not have forgotten them, and still reads and adds to them
            if not any(self._engine.gradients.has_arrived(bound.position) for bound in self.departures):
                self.drop_references()

    def tensors_read(self) -> list[torch.Tensor]:
        """Return the tensors that the step reads gradients from, those included that the GPU reads where they lie."""
        gradients = [gradient for gradient in self.departures.values() if gradient is not None]
        return [*super().tensors_read(), *gradients]

    def drop_departed(self) -> None:
        """Drop gradients that left `.grad` during backward, as the step has begun."""
        self._engine.gradients.forget()
        self.drop_references()

    def drop_references(self) -> None:
        """Drop all references to gradients, those that have left `.grad` included."""
        super().drop_references()
        self.departures.clear()
        self._storages.clear()


class _ArrivalHook:
    """Calls `Route.arrived` when autograd has accumulated a gradient."""

    def __init__(self, route: Route, bound: BoundParameter) -> None:
        self._route = weakref.ref(route)
        self._bound = weakref.ref(bound)

    @_disable_dynamo
    def __call__(self, parameter: torch.Tensor) -> None:
        route, bound = self._route(), self._bound()
        if route is not None and bound is not None:
            builds_graph = torch.is_grad_enabled()
            with torch.no_grad():
                route.handle_arrival(bound, builds_graph)


def _when_backward_ends(call: Callable[[], None]) -> None:
    """Queue a call for the end of the backward pass under way, after calls that were queued before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def _version(gradient: torch.Tensor) -> int:
    """Return a gradient's version; 0 for one that was made in inference mode, which has no count."""
    return 0 if gradient.is_inference() else shards.version(gradient)


def _owners_of(storage: int) -> int:
    """Return how many owners a storage has, given torch's address of it."""
    return int(torch._C._storage_Use_Count(storage))


def _lies_as(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient's elements lie in memory in the order of the parameter's, not as a negated view."""
    return gradient.stride() == parameter.stride() and not gradient.is_neg()


def _check_gradient(gradient: torch.Tensor, parameter: torch.Tensor, bound: BoundParameter) -> None:
    """Refuse a gradient that the engine cannot read: by layout, dtype, device, shape, or its weight's form."""
    name = bound.name
    check_form(bound)
    if gradient.layout != torch.strided:
        allowed = "use dense gradients (for an embedding, sparse=False)"
        raise ConfigError(f"gradient of {name}", gradient.layout, allowed)
    if gradient.dtype not in DTYPE_CODES or gradient.device != parameter.device:
        given = f"{gradient.dtype} on {gradient.device}"
        raise ConfigError(f"gradient of {name}", given, "use a floating dtype on the weight's device")
    if gradient.shape != parameter.shape:
        raise ConfigError(f"gradient of {name}", tuple(gradient.shape), f"use {tuple(parameter.shape)}")
