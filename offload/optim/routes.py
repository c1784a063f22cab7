"""How gradients get from autograd to the engine. An optimizer has one route, chosen when it is made.

A route owns the hooks, and knows who reduces gradients and when. Hooks run on autograd's threads, one backward pass
at a time, and keep neither a route nor a parameter alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef

from offload.device.none import NoDevice
from offload.errors import ConfigError
from offload.kernels.reference import DTYPE_CODES
from offload.optim import shards
from offload.optim.late import LateEngine
from offload.optim.overlap import Overlap
from offload.optim.ranks import world
from offload.optim.scaling import Note, Scaling
from offload.optim.slots import GradientSlot
from offload.optim.weights import Bound, Weights

NO_PASS = -1
"""What torch calls the backward pass outside of any."""


def choose_route(
    late: LateEngine, weights: Weights, scaling: Scaling, overlap: Overlap, parameters: Iterable[torch.Tensor]
) -> Route:
    """Return the route for the device and the parameters; refuse, and close, what would leave unreduced."""
    parameters = [*parameters]
    if not late.config.keep_grads:
        try:
            check_reduced(parameters)
        except ConfigError:
            late.close()
            raise
    is_alone = world()[0] == 1 and not any(map(shards.is_sharded, parameters))
    arrive = is_alone or late.config.shard or all(_arrives_reduced(p) and _is_heard(p) for p in parameters)
    kind: type[Route]
    if isinstance(late.device, NoDevice):
        kind, come = Slots if is_alone else Reduced, arrive
    else:
        kind, come = (AtStep, False) if late.config.keep_grads else (Departing, is_alone)
        late.waits = late.config.gpu_memory == "auto"  # for backward, which shows what is free there
    if late.config.overlaps_backward and not come:
        allowed = (
            'use "off": gradients have to come to host memory, of one process, or where weights are there, too, '
            "of FSDP2 or of DDP with shard=True"
        )
        if kind is AtStep:
            allowed = "set keep_grads=False, so that gradients leave the GPU during backward"
        late.close()
        raise ConfigError("overlap", late.config.overlap, allowed)
    route = kind(late, weights, scaling, overlap)
    route.is_early = is_alone and kind is not AtStep
    return route


def check_reduced(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parameters whose gradients ranks reduce only after the hooks that hear of them have run.

    Those of a `DTensor` over all ranks arrive reduced, as FSDP2 calls these hooks itself, or say that they are not.
    """
    if not all(map(_arrives_reduced, parameters)):
        allowed = f"use true: {world()[0]} processes reduce gradients after they have arrived, but for those of FSDP2"
        raise ConfigError("keep_grads", False, allowed)


def _arrives_reduced(parameter: torch.Tensor) -> bool:
    mesh, ranks = getattr(parameter, "device_mesh", None), world()[0]
    return ranks == 1 or (mesh is not None and mesh.size() >= ranks)


def _is_heard(parameter: torch.Tensor) -> bool:
    """Return whether a hook hears of gradients where they stay: not of those that FSDP2 copies from a GPU."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is None or mesh.device_type == shards.local(parameter).device.type


class Route:
    """What routes share: gradients stay in `.grad`, and are bound where they lie when the step begins."""

    has_slots: ClassVar[bool] = False
    """Whether the engine provides memory for gradients."""
    widens: ClassVar[bool] = True
    """Whether autograd may accumulate in a wider dtype than the weight's."""
    is_early: bool = False
    """Whether gradients come to host memory during backward, of one process."""

    def __init__(self, late: LateEngine, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        self._late = late
        self._overlap = overlap
        self._bound = weights.bound
        self._scaling = scaling
        self._handles: list[Any] = []
        self._held: list[torch.Tensor] = []

    def attach(self, bound: Bound) -> None:
        """Hear of a parameter's gradients from now on."""
        self._engine = self._late.engine  # which is open now
        if not _is_heard(bound.parameter):
            return  # FSDP2 has the copy to the host wait for any hook; a gradient that changes is noticed without one
        register: Any = bound.parameter.register_post_accumulate_grad_hook
        self._handles.append(register(_ArrivalHook(self, bound)))

    def arrived(self, bound: Bound, builds_graph: bool = False) -> None:
        """Take in a gradient that has been accumulated; `builds_graph` if backward makes a graph of it."""
        gradient = bound.parameter.grad
        if gradient is None:
            return
        self._overlap.arrived(bound)
        if self._engine.broken is not None:
            return
        bound.arrivals += 1
        if self._scaling.noted:
            self._scaling.arrived(bound, gradient, builds_graph)
        self._take(bound, gradient)

    def _take(self, bound: Bound, gradient: torch.Tensor) -> None:
        """Do what there is to be done with a gradient before the step."""

    def bind(self) -> list[Bound]:
        """Tell the engine where gradients lie; return the parameters that have one."""
        self._held.clear()
        return [bound for bound in self._bound.values() if self._bind(bound)]

    def _bind(self, bound: Bound) -> bool:
        parameter, gradient = bound.parameter, bound.parameter.grad
        if gradient is None:
            return False
        gradient = shards.reduced(gradient, parameter, bound.name)
        if gradient is not parameter.grad:
            parameter.grad = gradient  # once, whoever asks for it next
        rows = None if shards.is_sharded(parameter) else bound.cut  # else the gradient is that of the piece
        gradient, parameter = shards.local(gradient), shards.local(parameter)
        _check_gradient(gradient, parameter, bound.name)
        self._held.append(gradient)
        gathered = self._is_gathered(bound, gradient)
        if not _lies_as(gradient, parameter):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            self._held.append(gradient)
        dtype, address = DTYPE_CODES[gradient.dtype], shards.own(gradient, rows).data_ptr()
        self._engine.gradients.bind(bound.position, address, dtype, gathered=gathered)
        return True

    def _is_gathered(self, bound: Bound, gradient: torch.Tensor) -> bool:
        return False  # when it arrived

    def note(self, bound: Bound) -> Note | None:
        """Return what tells a parameter's gradient from others; None if it has none."""
        gradient = bound.parameter.grad
        if gradient is None:
            return None
        return Note(weakref.ref(gradient), shards.version(gradient), shards.local(gradient).data_ptr())

    def notes(self) -> Iterator[tuple[Bound, Note | None]]:
        """Yield all parameters, and what tells their gradients from others."""
        return ((bound, self.note(bound)) for bound in self._bound.values())

    def read(self) -> list[torch.Tensor]:
        """Return the memory that the step reads gradients from, as far as the engine does not own it."""
        return [gradient.detach() for gradient in self._held if not self._is_slot(gradient)]

    def _is_slot(self, gradient: torch.Tensor) -> bool:
        return False

    def take(self, active: Iterable[Bound]) -> list[Bound]:
        """Take gradients that a step reads out of `.grad`; somebody keeps what `read` returned.

        On the engine thread, where no interrupt comes between: what is read must not be accumulated to.

        Returns:
            Parameters whose gradient somebody else can reach, and so write to.
        """
        taken = []
        for bound in active:
            gradient, bound.parameter.grad = bound.parameter.grad, None
            if gradient is not None:
                # Not `untyped_storage`, whose Python object would be one more owner from then on.
                storage = None if self._is_slot(gradient) else torch._C._storage_address(gradient)  # type: ignore[attr-defined]
                taken.append((bound, weakref.ref(gradient), storage))
            del gradient
        self._held.clear()
        return [
            bound
            for bound, gradient, storage in taken
            if not (bound.slot.is_free if storage is None else gradient() is None and _has_one_owner(storage))
        ]

    def taken(self) -> None:
        """Forget gradients that `take` does not find in `.grad`; somebody keeps what `read` returned."""

    def forget(self) -> None:
        """Forget gradients that are not in `.grad` any more."""
        self.release()

    def release(self) -> None:
        """Let go of all gradients: nobody reads them any more."""
        self._held.clear()

    def detach(self) -> None:
        """Hear of no more gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class AtStep(Route):
    """From a GPU, when the step begins."""


class Reduced(Route):
    """From host memory, where ranks have left them, in the dtype that they are in, when the step begins.

    A shard is final when its hook runs: FSDP2 has reduced it. DDP writes what it has reduced to `.grad` in a callback
    at the end of a backward pass.
    """

    widens = False

    def __init__(self, late: LateEngine, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(late, weights, scaling, overlap)
        self._pass = NO_PASS
        self._of_pass: list[Bound] = []

    def _take(self, bound: Bound, gradient: torch.Tensor) -> None:
        if not self._engine.speculates:
            return
        if shards.is_sharded(bound.parameter):
            self._say_final(bound)
            return
        number: int = torch._C._current_graph_task_id()
        if number == NO_PASS:
            return
        if number != self._pass:
            self._pass, self._of_pass = number, []
            _when_backward_ends(self._backward_ends)
        self._of_pass.append(bound)

    def _backward_ends(self) -> None:
        _when_backward_ends(self._backward_ended)  # behind DDP's, which was queued behind this one

    @torch.no_grad()
    def _backward_ended(self) -> None:
        bounds, self._of_pass = self._of_pass, []
        for bound in bounds:
            self._say_final(bound)

    def _say_final(self, bound: Bound) -> None:
        """Have a gradient read where it lies, unless the step will copy it."""
        parameter, gradient = bound.parameter, bound.parameter.grad
        if self._engine.broken is not None or gradient is None or gradient.requires_grad:
            return
        if shards.placed_as(gradient, parameter):
            rows = None if shards.is_sharded(parameter) else bound.cut
            gradient, parameter = shards.local(gradient).detach(), shards.local(parameter)
            _check_gradient(gradient, parameter, bound.name)
            if _lies_as(gradient, parameter):
                self._engine.gradients.final(bound.position, shards.own(gradient, rows))


class Slots(Route):
    """In host memory: on arrival norms are gathered, while the gradient is in cache, and `.grad` becomes a slot."""

    has_slots = True

    def __init__(self, late: LateEngine, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(late, weights, scaling, overlap)
        self._slots_at: set[int] = set()

    def attach(self, bound: Bound) -> None:
        """See `Route.attach`."""
        bound.slot = GradientSlot(self._late.engine.gradients.slot(bound.position), bound.local)
        if bound.local.numel():
            self._slots_at.add(bound.slot.address)
        super().attach(bound)

    def _take(self, bound: Bound, gradient: torch.Tensor) -> None:
        parameter, slot, engine = bound.parameter, bound.slot, self._engine
        if shards.is_sharded(parameter):
            return  # FSDP2 keeps a gradient where its reduction has left it, and adds to it there
        _check_gradient(gradient, parameter, bound.name)
        if gradient.data_ptr() == slot.address and gradient.dtype == slot.dtype:
            engine.gradients.arrived(bound.position, slot.address, DTYPE_CODES[slot.dtype])
        elif gradient.requires_grad or parameter.grad_dtype not in (None, slot.dtype):
            return  # part of a graph, or of a weight that is not what it was: `step` looks at it
        elif gradient.dtype not in (slot.dtype, parameter.dtype):
            return  # wider than its slot: it is not narrowed
        elif not slot.is_free:
            return  # somebody still holds the last pass's gradient, which lies in the slot
        else:
            lent = slot.lend()
            if _lies_as(gradient, parameter):
                engine.gradients.arrived(bound.position, gradient.data_ptr(), DTYPE_CODES[gradient.dtype])
            else:
                lent.copy_(gradient)
                engine.gradients.arrived(bound.position, slot.address, DTYPE_CODES[slot.dtype])
            parameter.grad = gradient = lent
        bound.gathered = gradient._version

    def _is_slot(self, gradient: torch.Tensor) -> bool:
        return gradient.data_ptr() in self._slots_at

    def _is_gathered(self, bound: Bound, gradient: torch.Tensor) -> bool:
        return gradient.data_ptr() == bound.slot.address and gradient._version == bound.gathered


class Departing(Route):
    """From a GPU during backward: `.grad` is None again before the next parameter's gradient arrives."""

    def __init__(self, late: LateEngine, weights: Weights, scaling: Scaling, overlap: Overlap) -> None:
        super().__init__(late, weights, scaling, overlap)
        self._left: dict[Bound, torch.Tensor | None] = {}
        """Parameters whose gradients have left `.grad`, and those that the GPU reads and adds to until the step.

        It holds memory; which gradients there are, the engine knows.
        """
        self._left_from: dict[Bound, StorageWeakRef] = {}
        self._pass = NO_PASS

    def _take(self, bound: Bound, gradient: torch.Tensor) -> None:
        if not shards.placed_as(gradient, bound.parameter):
            return  # tensor parallelism has it reduced when somebody asks for it, as the step does
        gradient = shards.local(gradient)
        _check_gradient(gradient, shards.local(bound.parameter), bound.name)
        if not gradient.requires_grad:  # else it is part of a graph, and stays until the step
            self._depart(bound, gradient)
            number: int = torch._C._current_graph_task_id()
            if number not in (NO_PASS, self._pass):
                self._pass = number
                _when_backward_ends(self._end_backward)

    def _end_backward(self) -> None:
        if self._engine.broken is None:
            self._engine.gradients.end_backward()

    def _depart(self, bound: Bound, gradient: torch.Tensor) -> None:
        """Let a gradient leave the GPU, or at least `.grad`."""
        parameter, engine = shards.local(bound.parameter), self._engine
        is_first = not engine.gradients.has_arrived(bound.position)  # which no interrupt makes untrue
        if not is_first:
            self._scaling.added(bound)
        storage = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
        before = None if is_first else self._left_from.get(bound)
        if before is not None and before == storage:
            # Written to meanwhile, in no order with what has read it or will: a replayed graph has one place for it.
            raise ConfigError(
                f"gradient of {bound.name}",
                "in the same memory as that of the pass before",
                "with CUDA graphs, take one backward pass a step, or keep_grads=True",
            )
        self._left_from[bound] = storage  # which allocators do not use again as long as this is here
        if not _lies_as(gradient, parameter):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        if is_first:
            self._left[bound] = gradient if engine.gradients.stays(bound.position) else None
        mark = engine.gradients.arrived(bound.position, gradient.data_ptr(), DTYPE_CODES[gradient.dtype])
        bound.parameter.grad = None
        if mark is not None:
            engine.gradients.hold(gradient, mark, elsewhere=bound.cut is not None)  # FSDP2 has streams of its own

    def _bind(self, bound: Bound) -> bool:
        if not self._engine.gradients.has_arrived(bound.position):
            return super()._bind(bound)
        if bound.parameter.grad is not None:
            gradient = shards.reduced(bound.parameter.grad, bound.parameter, bound.name)
            self._depart(bound, shards.local(gradient).detach())
        return True

    def note(self, bound: Bound) -> Note | None:
        """See `Route.note`."""
        if not self._engine.gradients.has_arrived(bound.position):
            return super().note(bound)
        return Note(weakref.ref(bound.parameter), bound.arrivals, 0)

    def forget(self) -> None:
        """See `Route.forget`."""
        try:
            if self._left:
                kept = [gradient for gradient in self._left.values() if gradient is not None]
                self._engine.gradients.forget(kept)
        finally:  # it may be interrupted, having forgotten them; else they are read, and added to
            if not any(self._engine.gradients.has_arrived(bound.position) for bound in self._left):
                self.release()

    def read(self) -> list[torch.Tensor]:
        """See `Route.read`."""
        left = [gradient for gradient in self._left.values() if gradient is not None]
        return [*super().read(), *left]

    def taken(self) -> None:
        """See `Route.taken`."""
        self._engine.gradients.forget()
        self.release()

    def release(self) -> None:
        """See `Route.release`."""
        super().release()
        self._left.clear()
        self._left_from.clear()


class _ArrivalHook:
    """Runs when autograd has accumulated a gradient."""

    def __init__(self, route: Route, bound: Bound) -> None:
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
    """Have autograd call something at the end of the backward pass under way, behind what it was told before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def _has_one_owner(storage: int) -> bool:
    """Return whether one tensor alone has a storage, given torch's address of it."""
    count: int = torch._C._storage_Use_Count(storage)
    return count == 1


def _lies_as(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient's memory holds its elements, in the order of the parameter's."""
    return gradient.stride() == parameter.stride() and not gradient.is_neg()


def _check_gradient(gradient: torch.Tensor, parameter: torch.Tensor, name: str) -> None:
    """Verify that a gradient can be read as that of a weight."""
    if gradient.layout != torch.strided:
        allowed = "use dense gradients (for an embedding, sparse=False)"
        raise ConfigError(f"gradient of {name}", gradient.layout, allowed)
    if gradient.dtype not in DTYPE_CODES or gradient.device != parameter.device:
        found = f"{gradient.dtype} on {gradient.device}"
        raise ConfigError(f"gradient of {name}", found, "use a floating dtype on the weight's device")
    if gradient.shape != parameter.shape:
        raise ConfigError(f"gradient of {name}", tuple(gradient.shape), f"use {tuple(parameter.shape)}")
