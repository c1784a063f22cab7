"""How gradients get from autograd to the engine. An optimizer has one route, chosen when it is made.

A route owns the hooks, and knows who reduces gradients and when. Hooks run on autograd's threads, one backward pass
at a time, and keep neither a route nor a parameter alive.
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
    """Return the route for the device and the parameters; close the holder if its settings allow for none."""
    parameters = [*parameters]
    leaves = holder.config.gradient_memory is not None
    is_alone = world()[0] == 1 and not any(map(shards.is_sharded, parameters))
    # Where ranks reduce gradients after backward, the step finds other bits than an update has read.
    can_be_final = is_alone or not any(map(is_flattened, parameters))
    try:
        check_reduced(holder.config, parameters)
        if not can_be_final:
            combinations.FSDP1_BACKWARD.check("overlap", holder.config.overlap)
    except ConfigError:
        holder.close()
        raise
    arrive_reduced = is_alone or all(map(_arrives_reduced, parameters))
    kind: type[Route]
    if leaves:
        kind, can_be_final = DepartureRoute, False
    elif isinstance(holder.device, NoDevice):
        kind = SlotRoute if is_alone else ReducedRoute
    else:
        kind = StepRoute if holder.config.keep_grads else DepartureRoute
        holder.is_deferred = holder.config.opens_late
    route = kind(holder, weights, scaling, overlap)
    route.is_early = can_be_final and (arrive_reduced or holder.config.shard)
    route.is_deaf = any(map(shards.is_copied, parameters))
    return route


def check_reduced(config: OffloadConfig, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parameters whose gradients ranks reduce only after their hooks have run, where gradients leave in them.

    The gradient of a `DTensor` over all ranks arrives reduced, as FSDP2 calls the hooks itself, or as a partial one.
    Frozen ones have none; this is asked again when they are thawed.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    leaves = config.gradient_memory is not None
    if not config.keeps_grads and not all(map(_arrives_reduced, parameters)):
        name, value = ("gradient_memory", config.gradient_memory) if leaves else ("keep_grads", False)
        instead = "leave it out" if leaves else "use true"
        combinations.REDUCED_LATER.refuse(name, value, instead=instead, ranks=world()[0])


def _arrives_reduced(parameter: torch.Tensor) -> bool:
    mesh, ranks = getattr(parameter, "device_mesh", None), world()[0]
    return ranks == 1 or (mesh is not None and mesh.size() >= ranks)


class Route:
    """The base class of routes: gradients stay in `.grad`, and are bound where they lie when the step begins."""

    has_slots: ClassVar[bool] = False
    """Whether the engine provides memory for gradients."""
    widens: ClassVar[bool] = True
    """Whether autograd may accumulate in a wider dtype than the weight's."""
    is_early: bool = False
    """Whether gradients are known to come reduced, so that what is made of them before the step is of use."""
    is_deaf: bool = False
    """Whether gradients are copied to the host by FSDP2, and no model has been given that says when."""
    announcer: Announcer | None = None
    """Is told of each gradient before the engine."""

    @property
    def arrives_early(self) -> bool:
        """Whether gradients come during backward as the step will find them, which is of use to updates there."""
        return self.is_early and not self.is_deaf

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        self._holder = holder
        self._overlap = overlap
        self._bound = weights.bound
        self._scaling = scaling
        self._forget_brought = weights.forget_gradients
        self._handles: list[Any] = []
        self._frozen: dict[BoundParameter, None] = {}  # which torch does not let be hooked
        self._tensors: list[torch.Tensor] = []  # that the step reads

    def attach(self, bound: BoundParameter) -> None:
        """Hook a parameter: each of its gradients is given to `arrived` from now on; see `hook_thawed`."""
        self._engine = self._holder.engine  # which is open now
        self._frozen[bound] = None
        self.hook_thawed()

    def hook_thawed(self) -> None:
        """Hook parameters that were frozen when they were attached; the step finds gradients from before."""
        for bound in [bound for bound in self._frozen if bound.parameter.requires_grad]:
            self._hook(bound)
            del self._frozen[bound]  # last: to be hooked twice, after an interrupt, does no harm

    def _hook(self, bound: BoundParameter) -> None:
        if shards.is_copied(bound.parameter):
            return  # FSDP2 would wait for each copy to the host if there were a hook: its groups say when it has come
        register: Any = bound.parameter.register_post_accumulate_grad_hook
        self._handles.append(register(_ArrivalHook(self, bound)))

    def arrived(self, bound: BoundParameter, builds_graph: bool = False) -> None:
        """Handle a gradient that has been accumulated; `builds_graph` says whether backward makes a graph of it."""
        gradient = bound.parameter.grad
        if gradient is None:
            return
        if self.announcer is not None:
            self.announcer.arrives(self._engine.gradients, bound.position)
        if self._overlap.models:  # the last step may still read the parameter's previous one
            self._overlap.wait_for([bound])
        if self._engine.broken is not None:
            return
        bound.arrivals += 1
        if self._scaling.scaled_ids:
            self._scaling.arrived(bound, gradient, builds_graph)
        if not bound.is_brought:  # else its rank needs all shards of it
            self._handle(bound, gradient)

    def _handle(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Do what this route does with a gradient before the step begins."""

    def _mark_final(self, bound: BoundParameter, gradient: torch.Tensor | None = None) -> None:
        """Tell the engine that a gradient is final where it lies, unless the step will copy it.

        Args:
            bound: The parameter.
            gradient: Its gradient; None for the one in `.grad`.
        """
        parameter, gradient = bound.parameter, bound.parameter.grad if gradient is None else gradient
        if self._engine.broken is not None or gradient is None or gradient.requires_grad:
            return
        if shards.placed_as(gradient, parameter):
            rows = None if shards.is_sharded(parameter) else bound.cut
            gradient, parameter = shards.local(gradient).detach(), shards.local(parameter)
            _check_gradient(gradient, parameter, bound)
            if _lies_as(gradient, parameter):
                self._engine.gradients.final(bound.position, shards.own(gradient, rows))

    def bind(self) -> list[BoundParameter]:
        """Tell the engine where gradients lie; return the parameters that have one."""
        self._tensors.clear()
        return [bound for bound in self._bound.values() if self._bind(bound)]

    def _bind(self, bound: BoundParameter) -> bool:
        found = bound.gradient()
        if found is None:
            return False
        gradient, parameter = found
        rows = bound.cut
        if rows is not None and shards.is_sharded(bound.parameter):
            rows = None  # the gradient is cut, too
        _check_gradient(gradient, parameter, bound)
        self._tensors.append(gradient)
        is_gathered = self._is_gathered(bound, gradient)
        if not _lies_as(gradient, parameter):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            self._tensors.append(gradient)
        dtype, address = DTYPE_CODES[gradient.dtype], shards.own(gradient, rows).data_ptr()
        self._engine.gradients.bind(bound.position, address, dtype, gathered=is_gathered)
        return True

    def _is_gathered(self, bound: BoundParameter, gradient: torch.Tensor) -> bool:
        """Return whether the gradient's norm was gathered when it arrived."""
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

        Runs on the engine thread, where no interrupt comes in between: autograd must not add to what the step reads.

        Returns:
            Parameters whose gradient somebody else can still reach, and so write to.
        """
        gradients = []
        for bound in active:
            gradient, bound.parameter.grad = bound.parameter.grad, None
            if gradient is not None:
                # Not `untyped_storage`, whose Python object would be one more owner from then on.
                own = shards.local(gradient)
                storage = None if self._is_slot(own) else torch._C._storage_address(own)  # type: ignore[attr-defined]
                gradients.append((bound, weakref.ref(gradient), storage))
                del own
            del gradient
        self._tensors.clear()
        owners = Counter(storage for _, _, storage in gradients if storage is not None)  # FSDP2 cuts one for a group
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
        """Note the gradients that a step has used."""
        for bound in active:
            gradient = bound.parameter.grad
            bound.used_gradient = None if gradient is None else (weakref.ref(gradient), _version(gradient))

    def drop_used(self) -> None:
        """Drop gradients that a step has used, on the engine thread.

        One that another thread has set since `check_used` belongs to the next step, and stays.
        """
        self.clear_grads(bound for bound in self._bound.values() if self._is_used(bound))

    def held_slots(self) -> list[tuple[int, int]]:
        """Return address and size of slots that somebody holds; `.grad` is not looked at, which torch may change."""
        return []

    @staticmethod
    def _is_used(bound: BoundParameter) -> bool:
        """Whether no gradient is there but one that a step has used."""
        gradient, used = bound.parameter.grad, bound.used_gradient
        return gradient is None or (used is not None and used[0]() is gradient and used[1] == _version(gradient))

    def check_used(self) -> None:
        """Refuse gradients that no step has used.

        Raises:
            ConfigError: There is one; names its parameter.
        """
        for bound in self._bound.values():
            if not self._is_used(bound):
                allowed = "call step(), or zero_grad(set_to_none=True): its memory goes, and no step has used it"
                raise ConfigError("park", f"the gradient of {bound.name}", allowed)

    def drop_departed(self) -> None:
        """Drop gradients that left `.grad` during backward; the caller keeps the tensors of `tensors_read`."""

    def forget(self) -> None:
        """Forget gradients that are not in `.grad` any more, so that the next ones are the first."""
        self.release()

    def release(self) -> None:
        """Let go of all tensors: no lane reads them any more."""
        self._tensors.clear()
        self._forget_brought()

    def detach(self) -> None:
        """Remove the hooks of all parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._frozen.clear()


class StepRoute(Route):
    """Leaves gradients where they lie until the step begins; updates in backward read those that are final.

    The gradient of a shard is final when its hook runs: FSDP2 has reduced it. So is that of the only process. DDP
    writes reduced gradients to `.grad` in a callback at the end of a backward pass; before, they lie in its buckets,
    of which it tells those who ask. Where others reduce them after that, the step finds them changed. Where FSDP2
    copies a shard's gradient to the host it is final when the copy has come: nobody waits for it here, but after each
    group's reduction, and at the end of the pass, this looks which copies have.
    """

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(holder, weights, scaling, overlap)
        self._is_alone = world()[0] == 1
        self._pass = NO_PASS
        self._pass_bounds: dict[BoundParameter, None] = {}  # whose gradients have arrived in it, and are not final
        self._buckets: list[Buckets] = []
        self._groups: list[Any] = []  # of FSDP2, that copy gradients to the host
        # An event behind copies to the host, or None where FSDP2 has waited for them; and whose gradients they bring.
        self._copies: deque[tuple[torch.Event | None, list[BoundParameter]]] = deque()

    def follow(self, model: torch.nn.Module) -> bool:
        """Take gradients that FSDP2 copies to the host, as soon as they are there; return whether it copies some."""
        groups = [each for each in shards.unsharders(model) if any(map(shards.is_copied, shards.gathered_by(each)))]
        for group in groups:
            if group not in self._groups:
                self._groups.append(group)
                self._handles.append(shards.StandIn(group, "post_backward", self._reduce))
                self.is_deaf = False
        return bool(groups)

    def _reduce(self, group: Any, post_backward: Callable[..., Any], *arguments: Any) -> None:
        """Have FSDP2 reduce a group, and note the gradients that this has set, or added to."""
        bounds = [(each, bound) for each in group.fsdp_params if (bound := self._bound.get(each.sharded_param))]
        ids = [self.gradient_id(bound) for _, bound in bounds]
        post_backward(*arguments)
        event, reduced = None, list[BoundParameter]()
        for (managed, bound), old in zip(bounds, ids, strict=True):
            new = self.gradient_id(bound)
            if new is not None and (old is None or not new.is_same(old)):
                event = managed.grad_offload_event  # the last one's is behind all, on one stream
                reduced.append(bound)
        if reduced:
            self._copies.append((event, reduced))
            if torch._C._current_graph_task_id() != NO_PASS:
                _when_backward_ends(self._take_copies)  # behind FSDP2's callback, which waits for the events
        self._take_copies()

    @torch.no_grad()
    def _take_copies(self) -> None:
        """Handle the gradients whose copies have come, without waiting for others."""
        while self._copies and ((event := self._copies[0][0]) is None or event.query()):
            for bound in self._copies.popleft()[1]:
                self.arrived(bound)

    def release(self) -> None:
        """See `Route.release`."""
        super().release()
        self._copies.clear()

    @property
    def listens(self) -> bool:
        """See `buckets.Listener`."""
        return self._engine.speculates

    def hear(self, buckets: Buckets) -> None:
        """Take gradients from buckets of DDP, as soon as these have been reduced."""
        buckets.tell(self)
        self._buckets = [*(other for other in self._buckets if other is not buckets), buckets]
        self.is_early = True

    def _handle(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        if not self._engine.speculates:
            return
        if self._is_alone or shards.is_sharded(bound.parameter):
            self._mark_final(bound)
            return
        number: int = torch._C._current_graph_task_id()
        if number == NO_PASS:
            return
        if number != self._pass:
            self._pass, self._pass_bounds = number, {}
            _when_backward_ends(self._queue_end_of_pass)
            for buckets in self._buckets:
                buckets.forget()
        self._pass_bounds[bound] = None
        for buckets in self._buckets:
            for parameter, reduced in buckets.take_reduced():
                of_pass = self._bound.get(parameter)
                # One that this rank did not use may be used by none, and have no gradient then.
                if of_pass is not None and of_pass in self._pass_bounds:
                    del self._pass_bounds[of_pass]
                    self._mark_final(of_pass, reduced)

    def _queue_end_of_pass(self) -> None:
        _when_backward_ends(self._end_pass)  # behind DDP's callback, which was queued behind this one

    @torch.no_grad()
    def _end_pass(self) -> None:
        bounds, self._pass_bounds = self._pass_bounds, {}
        for buckets in self._buckets:
            buckets.forget()
        for bound in bounds:
            self._mark_final(bound)


class ReducedRoute(StepRoute):
    """Reads gradients from host memory when the step begins: where ranks have reduced them, and in their dtype."""

    widens = False


class SlotRoute(Route):
    """Gathers norms of gradients in host memory on arrival, while they are in cache; `.grad` becomes a slot."""

    has_slots = True

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(holder, weights, scaling, overlap)
        self._slot_addresses: set[int] = set()

    def attach(self, bound: BoundParameter) -> None:
        """See `Route.attach`."""
        bound.slot = GradientSlot(self._holder.engine.gradients.slot(bound.position), bound.local)
        if bound.local.numel():
            self._slot_addresses.add(bound.slot.address)
        super().attach(bound)

    def _handle(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        parameter, slot, engine = bound.parameter, bound.slot, self._engine
        if shards.is_sharded(parameter):
            return  # FSDP2 keeps a gradient where its reduction has left it, and adds to it there
        _check_gradient(gradient, parameter, bound)
        if gradient.data_ptr() == slot.address and gradient.dtype == slot.dtype:
            engine.gradients.arrived(bound.position, slot.address, DTYPE_CODES[slot.dtype])
        elif gradient.requires_grad or parameter.grad_dtype not in (None, slot.dtype):
            return  # part of a graph, or accumulated in another dtype than its slot's: `step` looks at it
        elif gradient.dtype not in (slot.dtype, parameter.dtype):
            return  # wider than its slot: it is not narrowed
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

    def held_slots(self) -> list[tuple[int, int]]:
        """See `Route.held_slots`."""
        slots = (bound.slot for bound in self._bound.values())
        return [(slot.address, slot.nbytes) for slot in slots if not slot.is_free]

    def _is_slot(self, gradient: torch.Tensor) -> bool:
        return gradient.data_ptr() in self._slot_addresses

    def _is_gathered(self, bound: BoundParameter, gradient: torch.Tensor) -> bool:
        return gradient.data_ptr() == bound.slot.address and gradient._version == bound.gathered_version


class DepartureRoute(Route):
    """Sends gradients off a GPU, or to buffers, during backward: `.grad` is None before the next gradient arrives."""

    def __init__(self, holder: EngineHolder, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(holder, weights, scaling, overlap)
        self.departures: dict[BoundParameter, torch.Tensor | None] = {}
        """Parameters whose gradients have left `.grad`; with the tensor if the GPU reads it and adds to it until the
        step. This only holds the memory: the engine knows which gradients there are.
        """
        self._storages: dict[BoundParameter, StorageWeakRef] = {}
        self._leaves = holder.config.gradient_memory is not None
        self._pass = NO_PASS

    def _handle(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        if not shards.placed_as(gradient, bound.parameter):
            return  # tensor parallelism reduces it when the step asks for it
        gradient = shards.local(gradient)
        _check_gradient(gradient, shards.local(bound.parameter), bound)
        if not gradient.requires_grad:  # else it is part of a graph, and stays until the step
            self._depart(bound, gradient)
            number: int = torch._C._current_graph_task_id()
            if number not in (NO_PASS, self._pass):
                self._pass = number
                _when_backward_ends(self._end_backward)

    def _end_backward(self) -> None:
        if self._engine.broken is None:
            self._engine.gradients.end_backward()

    def _depart(self, bound: BoundParameter, gradient: torch.Tensor) -> None:
        """Have a gradient leave the GPU, or at least `.grad`."""
        parameter, engine = shards.local(bound.parameter), self._engine
        is_first = not engine.gradients.has_arrived(bound.position)  # an interrupt does not change that
        if not is_first:
            self._scaling.added(bound)
        storage = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
        last_storage = None if is_first else self._storages.get(bound)
        if last_storage is not None and last_storage == storage and not self._leaves:
            # A replayed CUDA graph always writes to one memory, and waits for nobody who still reads it.
            where = "in the same memory as that of the pass before"
            combinations.GRAPHS_ACCUMULATE.refuse(f"gradient of {bound.name}", where)
        self._storages[bound] = storage  # a weak reference keeps allocators from using the address again
        if not _lies_as(gradient, parameter):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        if is_first:
            self.departures[bound] = gradient if engine.gradients.stays(bound.position) else None
        if self._leaves:  # else an interrupt in between would have it counted, and be counted again
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
            self._depart(bound, shards.local(gradient).detach())
        return self._engine.gradients.has_arrived(bound.position)

    def gradient_id(self, bound: BoundParameter) -> GradientId | None:
        """See `Route.gradient_id`."""
        if not self._engine.gradients.has_arrived(bound.position):
            return super().gradient_id(bound)
        return GradientId(weakref.ref(bound.parameter), bound.arrivals, 0)

    def forget(self) -> None:
        """See `Route.forget`."""
        try:
            if self.departures:
                gradients = [gradient for gradient in self.departures.values() if gradient is not None]
                self._engine.gradients.forget(gradients)
        finally:  # an interrupt may come before the engine has forgotten them, and still reads and adds to them
            if not any(self._engine.gradients.has_arrived(bound.position) for bound in self.departures):
                self.release()

    def tensors_read(self) -> list[torch.Tensor]:
        """See `Route.tensors_read`."""
        gradients = [gradient for gradient in self.departures.values() if gradient is not None]
        return [*super().tensors_read(), *gradients]

    def drop_departed(self) -> None:
        """See `Route.drop_departed`."""
        self._engine.gradients.forget()
        self.release()

    def release(self) -> None:
        """See `Route.release`."""
        super().release()
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
                route.arrived(bound, builds_graph)


def _when_backward_ends(call: Callable[[], None]) -> None:
    """Have autograd call a function at the end of the backward pass under way, behind earlier ones."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def _version(gradient: torch.Tensor) -> int:
    """Return a gradient's version; 0 for one that was made in inference mode, which has no count."""
    return 0 if gradient.is_inference() else shards.version(gradient)


def _owners_of(storage: int) -> int:
    """Return how many tensors have a storage, given torch's address of it."""
    return int(torch._C._storage_Use_Count(storage))


def _lies_as(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient's memory holds its elements, in the order of the parameter's."""
    return gradient.stride() == parameter.stride() and not gradient.is_neg()


def _check_gradient(gradient: torch.Tensor, parameter: torch.Tensor, bound: BoundParameter) -> None:
    """Verify that the engine can read a gradient: its layout, dtype, device and shape, and those of its weight."""
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
