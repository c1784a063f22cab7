"""How a gradient gets from `.grad` to the engine: what the engine is told by each route, and what `.grad` is then."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_engine import RecordedEngine, bound_to
from torch.utils.checkpoint import checkpoint

from offload.config import OffloadConfig
from offload.dtypes import DtypeCode
from offload.errors import ConfigError
from offload.optim import ranks, routes, shards
from offload.optim.holder import EngineHolder
from offload.optim.overlap import Overlap
from offload.optim.routes import DepartureRoute, ReducedRoute, Route, SlotRoute, StepRoute, choose_route
from offload.optim.scaling import Scaling
from offload.optim.weights import BoundParameter
from offload.session.engine import Engine
from offload.session.gradients import Gradients

BF16, FP32 = DtypeCode.BFLOAT16, DtypeCode.FLOAT32
NUMEL = 100


class Routed:
    """A route of one kind for one parameter of 100 elements, and the engine behind it."""

    def __init__(
        self,
        kind: type[Route] = SlotRoute,
        shape: tuple[int, ...] = (NUMEL,),
        weight: torch.dtype = torch.float32,
        **slot: Any,
    ) -> None:
        self.engine = RecordedEngine()
        self.memory = memory = torch.zeros(NUMEL, **slot)
        self.engine.slot = lambda position: memory  # type: ignore[method-assign]
        self.parameter = torch.nn.Parameter(torch.zeros(shape, dtype=weight))
        weights = bound_to(self.engine, [self.parameter])
        self.bound: BoundParameter = weights.of(self.parameter)
        self.scaling = Scaling()
        holder: Any = self.engine
        self.route = kind(holder, weights, self.scaling, Overlap(holder, weights))
        self.route.attach(self.bound)

    def backward(self, value: float = 1.0) -> None:
        (self.parameter * value).sum().backward()


def test_the_engine_that_is_recorded_has_what_an_engine_has() -> None:
    names = {name for name in vars(RecordedEngine) if not name.startswith("_")}
    assert names - {"said"} <= {*dir(Engine), *dir(Gradients), *dir(EngineHolder)}


def test_the_first_gradient_is_read_where_it_lies_and_the_next_is_added_in_its_slot() -> None:
    routed = Routed()
    routed.backward(2.0)
    (call,) = routed.engine.said()
    assert call[:2] == ("arrived", 0)
    assert call[2] != routed.memory.data_ptr()
    assert routed.parameter.grad.data_ptr() == routed.memory.data_ptr()  # filled by the engine
    routed.backward(3.0)
    assert routed.engine.said() == [("arrived", 0, routed.memory.data_ptr(), FP32)]
    assert (routed.memory == 3).all()  # as this engine has filled nothing
    assert routed.bound.arrivals == 2
    assert routed.route.bind_gradients() == [routed.bound]
    assert routed.engine.said() == [("bind", 0, routed.memory.data_ptr(), FP32, True)]
    assert routed.route.tensors_read() == []  # the engine owns it


def test_a_gradient_that_changed_since_it_arrived_is_gathered_again() -> None:
    routed = Routed()
    routed.backward()
    routed.parameter.grad.mul_(2)
    routed.engine.said()
    routed.route.bind_gradients()
    assert routed.engine.said() == [("bind", 0, routed.memory.data_ptr(), FP32, False)]


def test_a_gradient_that_is_held_keeps_the_slot_and_the_next_lies_elsewhere() -> None:
    routed = Routed()
    routed.backward()
    held = routed.parameter.grad
    routed.parameter.grad = None
    routed.engine.said()
    routed.backward()
    assert routed.engine.said() == []
    assert routed.parameter.grad.data_ptr() != routed.memory.data_ptr()
    routed.route.bind_gradients()
    assert routed.engine.said() == [("bind", 0, routed.parameter.grad.data_ptr(), FP32, False)]
    assert [t.data_ptr() for t in routed.route.tensors_read()] == [routed.parameter.grad.data_ptr()]
    del held
    gc.collect()
    routed.parameter.grad = None
    routed.backward()
    assert routed.parameter.grad.data_ptr() == routed.memory.data_ptr()


@pytest.mark.parametrize("stride", [(20, 1), (1, 5)])
def test_a_gradient_in_another_order_is_copied_to_its_slot(stride: tuple[int, int]) -> None:
    routed = Routed(shape=(5, 20))
    routed.parameter.grad = torch.empty_strided((5, 20), stride).copy_(torch.arange(100.0).view(5, 20))
    expected = routed.parameter.grad.clone()
    address = routed.parameter.grad.data_ptr()
    routed.route.handle_arrival(routed.bound)
    in_place = stride == (20, 1)
    wanted = ("arrived", 0, address if in_place else routed.memory.data_ptr(), FP32)
    assert routed.engine.said() == [*([] if in_place else [("take_memory",)]), wanted]  # before it is copied there
    assert routed.parameter.grad.data_ptr() == routed.memory.data_ptr()
    assert in_place or torch.equal(routed.parameter.grad, expected)


@pytest.mark.parametrize(
    ("hold", "said"),
    [
        (lambda gradient: [gradient.requires_grad_()][1:], 0),  # part of a graph: the step looks at it
        (lambda gradient: gradient, 0),  # what its holder writes there counts
        (lambda gradient: None, 1),
    ],
)
def test_a_gradient_that_others_hold_stays(hold: Callable[[torch.Tensor], object], said: int) -> None:
    routed = Routed()
    routed.parameter.grad = torch.ones(NUMEL)
    address = routed.parameter.grad.data_ptr()
    held = hold(routed.parameter.grad)
    routed.route.handle_arrival(routed.bound)
    assert len(routed.engine.said()) == said
    assert (routed.parameter.grad.data_ptr() == address) == (said == 0)
    del held


def flat_memory() -> torch.Tensor:
    """Return memory of a program's, of which a gradient is a part."""
    return torch.zeros(NUMEL + 20)


GRADIENTS_OF_PROGRAMS: dict[str, Callable[[], tuple[torch.Tensor, object]]] = {
    "a view": lambda: ((memory := flat_memory())[:NUMEL], memory),
    "data of a view": lambda: ((memory := flat_memory())[:NUMEL].data, memory),
    "a detached view": lambda: ((memory := flat_memory())[:NUMEL].detach(), memory),
    "a tensor, by its data": lambda: ((gradient := torch.zeros(NUMEL)), gradient.data),
    "its storage": lambda: ((gradient := torch.zeros(NUMEL)), gradient.untyped_storage()),
    "an array made of it": lambda: ((gradient := torch.zeros(NUMEL)), gradient.numpy()),
    "an array by DLPack": lambda: ((gradient := torch.zeros(NUMEL)), np.from_dlpack(gradient)),
    "an array": lambda: (torch.from_numpy(memory := np.zeros(NUMEL, np.float32)), memory),
    "bytes": lambda: (torch.frombuffer(memory := bytearray(4 * NUMEL), dtype=torch.float32), memory),
    "memory of several processes": lambda: (torch.zeros(NUMEL).share_memory_(), None),
}
"""Gradients, by what a program keeps of their memory; and that."""


@pytest.mark.parametrize("held", GRADIENTS_OF_PROGRAMS)
def test_a_gradient_in_memory_of_a_program_stays_there(held: str) -> None:
    """What the program writes to its memory counts, as with an all-reduce over one flat buffer."""
    routed = Routed()
    routed.parameter.grad, kept = GRADIENTS_OF_PROGRAMS[held]()
    address = routed.parameter.grad.data_ptr()
    for value in (2.0, 3.0):
        routed.backward(value)
    assert (routed.engine.said(), routed.parameter.grad.data_ptr()) == ([], address)
    assert (routed.parameter.grad == 5).all()
    del kept


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight * 2,
        lambda weight: weight.square() + weight,  # a tied weight's: autograd adds in place before it hands over
        lambda weight: weight[torch.arange(NUMEL)],  # written in place as it is made
        lambda weight: weight,  # copied, as its elements share memory
        lambda weight: checkpoint(torch.square, weight + 0, use_reentrant=True),
        lambda weight: checkpoint(torch.square, weight, use_reentrant=False),
    ],
)
@pytest.mark.parametrize("before", [None, torch.zeros])
def test_a_gradient_of_autograd_is_moved_however_it_was_made(use: Callable[..., Any], before: Any) -> None:
    routed = Routed()
    routed.parameter.grad = before and before(NUMEL)  # which nobody else holds
    use(routed.parameter).sum().backward()
    assert [call[0] for call in routed.engine.said()] == ["arrived"]
    assert routed.parameter.grad.data_ptr() == routed.memory.data_ptr()


def test_a_gradient_whose_memory_only_autograd_shares_is_moved() -> None:
    """With those of weights that are joined for a product, or with a hook of the program's, or DDP's, behind ours."""
    routed, other = Routed(), torch.nn.Parameter(torch.zeros(NUMEL))
    accumulation = routed.parameter.expand_as(routed.parameter).grad_fn.next_functions[0][0]
    handle = accumulation.register_hook(lambda *_: None)
    (torch.cat([routed.parameter, other]) * 2.0).sum().backward()
    assert routed.parameter.grad.data_ptr() == routed.memory.data_ptr()
    handle.remove()


@pytest.mark.parametrize(
    ("slot", "weight", "gradient", "said"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, [BF16]),
        (torch.float32, torch.bfloat16, torch.float32, [FP32]),
        (torch.float32, torch.bfloat16, torch.bfloat16, [BF16]),  # widened by the engine
        (torch.bfloat16, torch.bfloat16, torch.float32, []),  # wider than its slot: it is not narrowed
    ],
)
def test_a_gradient_of_another_dtype(slot: Any, weight: Any, gradient: Any, said: list[Any]) -> None:
    routed = Routed(weight=weight, dtype=slot)
    routed.parameter.grad_dtype = None
    routed.parameter.grad = torch.ones(NUMEL, dtype=gradient)
    routed.route.handle_arrival(routed.bound)
    assert [dtype for *_, dtype in routed.engine.said()] == said
    assert routed.parameter.grad.dtype == (slot if said else gradient)


@pytest.mark.parametrize("kind", [SlotRoute, ReducedRoute, StepRoute])
@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (torch.ones(NUMEL).to_sparse(), "dense gradients"),
        (torch.ones(NUMEL, device="meta"), "floating dtype on the weight's device"),
        (torch.ones(NUMEL, dtype=torch.float64), "floating dtype"),
    ],
)
def test_a_gradient_that_cannot_be_read(kind: type[Route], gradient: torch.Tensor, words: str) -> None:
    routed = Routed(kind)
    object.__setattr__(routed.bound, "parameter", Held(routed.parameter, gradient))
    with pytest.raises(ConfigError, match=words):
        routed.route.bind_gradients()


@pytest.mark.parametrize("kind", [SlotRoute, DepartureRoute, StepRoute])
@pytest.mark.parametrize(
    "changed", [torch.zeros(NUMEL + 1), torch.zeros(NUMEL - 1), torch.zeros(1, NUMEL), torch.zeros(NUMEL).half()]
)
def test_a_weight_of_another_form_is_named_before_its_gradient_is_read(kind: type[Route], changed: Any) -> None:
    """The engine would read as many elements as the weight had."""
    routed = Routed(kind)
    routed.engine.speculates = True
    routed.parameter.data = changed
    with pytest.raises(ConfigError, match=r"p0: .*make a new optimizer"):
        routed.backward()
    assert routed.engine.said() == []


class Held:
    """A parameter with a gradient that torch would not let it have."""

    device_mesh = placements = None

    def __init__(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        self._parameter, self.grad = parameter, grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)


@pytest.mark.parametrize("kind", [ReducedRoute, StepRoute])
def test_a_gradient_is_bound_where_it_lies_when_the_step_begins(kind: type[Route]) -> None:
    routed = Routed(kind)
    assert routed.route.bind_gradients() == []
    assert [id for _, id in routed.route.gradient_ids()] == [None]
    routed.backward()
    assert routed.engine.said() == []
    gradient = routed.parameter.grad
    (id,) = (id for _, id in routed.route.gradient_ids())
    assert (id.tensor(), id[1:]) == (gradient, (gradient._version, gradient.data_ptr()))
    assert routed.route.bind_gradients() == [routed.bound]
    assert routed.engine.said() == [("bind", 0, gradient.data_ptr(), FP32, False)]
    assert [tensor.data_ptr() for tensor in routed.route.tensors_read()] == [gradient.data_ptr()]
    routed.route.drop_references()
    assert routed.route.tensors_read() == []


def test_a_negated_gradient_is_bound_as_a_copy() -> None:
    routed = Routed(StepRoute)
    routed.parameter.grad = torch._neg_view(torch.ones(NUMEL))
    routed.route.bind_gradients()
    copied = routed.route.tensors_read()[-1]
    assert (copied == -1).all()
    assert not copied.is_neg()
    assert routed.engine.said() == [("bind", 0, copied.data_ptr(), FP32, False)]


@pytest.mark.parametrize("kind", [SlotRoute, ReducedRoute])
@pytest.mark.parametrize("holds", ["nothing", "the tensor", "a view", "its data"])
def test_what_a_step_takes_out_of_grad_tells_whom_others_can_reach(kind: type[Route], holds: str) -> None:
    routed = Routed(kind)
    routed.backward()
    gradient = routed.parameter.grad
    held = {"the tensor": gradient, "a view": gradient[1:], "its data": gradient.data}.get(holds)
    del gradient
    routed.route.bind_gradients()
    kept = routed.route.tensors_read()
    reachable = routed.route.take_grads([routed.bound])
    assert routed.parameter.grad is None
    assert len(kept) == (kind is ReducedRoute)  # a slot is the engine's
    assert reachable == ([] if held is None else [routed.bound])


@pytest.mark.parametrize("kind", [SlotRoute, ReducedRoute])
@pytest.mark.parametrize("held", GRADIENTS_OF_PROGRAMS)
def test_a_step_tells_which_gradients_lie_in_memory_of_a_program(kind: type[Route], held: str) -> None:
    routed = Routed(kind)
    routed.parameter.grad, memory = GRADIENTS_OF_PROGRAMS[held]()
    routed.route.bind_gradients()
    kept = routed.route.tensors_read()
    assert routed.route.take_grads([routed.bound]) == [routed.bound]
    assert routed.parameter.grad is None
    del memory, kept


def test_gradients_of_ranks_are_final_when_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "world", lambda: (2, 0))
    routed = Routed(ReducedRoute)
    routed.engine.speculates = True
    seen: list[Any] = []

    def reduces_at_the_end(_: torch.Tensor) -> None:  # as DDP, whose hook comes later, and so its callback
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: seen.append(routed.engine.said()))

    routed.parameter.register_post_accumulate_grad_hook(reduces_at_the_end)
    routed.backward()
    assert seen == [[]]  # until then it is a rank's own
    assert routed.engine.said() == [("final", 0, routed.parameter.grad.data_ptr())]
    routed.engine.speculates = False
    routed.backward()
    assert routed.engine.said() == []


class Event:
    """An event of a copy to the host, which nobody here waits for."""

    def __init__(self) -> None:
        self.is_reached, self.queries = False, 0

    def query(self) -> bool:
        self.queries += 1
        return self.is_reached


class Group:
    """One of FSDP2's groups, of one parameter that waits in host memory for a GPU."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.managed = SimpleNamespace(sharded_param=parameter, grad_offload_event=None)
        self.fsdp_params = [self.managed]
        self.event: Event | None = None
        self.reduces = True

    def post_backward(self, *unused: Any) -> None:
        parameter = self.managed.sharded_param
        if self.reduces and parameter.grad is None:
            parameter.grad = torch.ones(NUMEL)
            self.managed.grad_offload_event = self.event
        elif self.reduces:
            parameter.grad.add_(1)  # behind a copy that FSDP2 has waited for


class Copied:
    """A route of parameters whose gradients FSDP2 copies to the host, each in a group of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        monkeypatch.setattr(shards, "copies_gradients_to_host", lambda parameter: True)
        monkeypatch.setattr(shards, "fsdp_groups", lambda model: self.groups)
        self.engine = RecordedEngine()
        self.engine.speculates = True
        parameters = [torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(count)]
        self.groups = [Group(parameter) for parameter in parameters]
        self.events = [Event() for _ in parameters]
        for group, event in zip(self.groups, self.events, strict=True):
            group.event = event
        weights = bound_to(self.engine, parameters)
        holder: Any = self.engine
        self.route = ReducedRoute(holder, weights, Scaling(), Overlap(holder, weights))
        for bound in weights.bound.values():
            self.route.attach(bound)
            assert not bound.parameter._post_accumulate_grad_hooks  # for which FSDP2 would wait
        self.route.needs_model_hook = True
        for _ in range(2):  # the second time changes nothing
            assert self.route.hook_copied_groups(torch.nn.Module())
        assert not self.route.needs_model_hook

    def said(self) -> list[int]:
        """Return the positions of gradients that are final since the last call."""
        return [position for _, position, _ in self.engine.said()]


def test_a_gradient_is_final_when_its_copy_to_the_host_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Copied(monkeypatch)
    (first, second), (one, two) = copied.groups, copied.events
    first.post_backward()
    assert (copied.said(), one.queries) == ([], 1)
    one.is_reached = True
    second.post_backward()
    assert (copied.said(), one.queries, two.queries) == ([0], 2, 1)
    first.reduces = False  # this pass leaves the reduction to a later one
    first.post_backward()
    assert (copied.said(), two.queries) == ([], 2)
    two.is_reached = True
    first.post_backward()
    assert copied.said() == [1]
    first.post_backward()
    assert copied.said() == []
    first.reduces, first.managed.grad_offload_event = True, None
    first.post_backward()
    assert copied.said() == [0]  # it was added to, and FSDP2 has waited
    copied.route.detach()
    assert not any("post_backward" in vars(group) for group in copied.groups)


def test_copies_that_have_not_come_are_looked_at_when_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Copied(monkeypatch)
    seen: list[Any] = []

    def fsdp_waits() -> None:
        copied.groups[1].post_backward()  # whose inputs had no gradient
        seen.append(copied.said())
        for event in copied.events:
            event.is_reached = True

    def reduce(_: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(fsdp_waits)
        copied.groups[0].post_backward()

    value = torch.zeros(1, requires_grad=True)
    value.register_hook(reduce)
    value.sum().backward()
    assert seen == [[]]
    assert copied.said() == [0, 1]


def test_copies_of_gradients_that_are_dropped_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Copied(monkeypatch)
    copied.groups[0].post_backward()
    copied.route.forget_departed()
    copied.events[0].is_reached = True
    copied.groups[1].post_backward()
    assert copied.said() == []


def test_nothing_is_heard_of_once_detached_or_broken() -> None:
    routed = Routed()
    routed.engine.broken = RuntimeError()  # type: ignore[assignment]
    routed.backward()
    assert (routed.engine.said(), routed.bound.arrivals) == ([], 0)
    routed.engine.broken = None
    routed.route.detach()
    routed.backward()
    assert (routed.engine.said(), routed.bound.arrivals) == ([], 0)


def test_what_stands_in_for_a_method_leaves_in_any_order() -> None:
    """Optimizers that share a group, or follow each other, leave nothing of theirs behind."""

    class Hears:
        def hear(self, group: Any, method: Callable[..., Any]) -> None:
            heard.append(self)
            method()

    heard: list[Hears] = []
    every = [Hears() for _ in range(3)]
    for order in itertools.permutations(range(3)):
        group = Group(torch.zeros(NUMEL))
        stand_ins = [shards.PatchedMethod(group, "post_backward", each.hear) for each in every]
        remaining = [*every[::-1]]
        for number in order:
            stand_ins[number].remove()
            remaining.remove(every[number])
            heard.clear()
            group.post_backward()
            assert heard == remaining
            assert ("post_backward" in vars(group)) is bool(remaining)


def test_a_hook_keeps_no_route_alive() -> None:
    routed = Routed()
    parameter, engine = routed.parameter, routed.engine
    del routed
    gc.collect()
    parameter.sum().backward()
    assert engine.said() == []


# Which route there is


class Gpu:
    """A device of which no more is asked than that it is one."""


GIVEN = OffloadConfig()


@pytest.mark.parametrize(
    ("device", "world", "config", "kind", "is_early"),
    [
        (None, 1, {}, SlotRoute, True),
        (None, 2, {}, ReducedRoute, False),
        (None, 2, {"shard": True}, ReducedRoute, True),
        (Gpu(), 1, {}, StepRoute, True),
        (Gpu(), 2, {}, StepRoute, False),
        (Gpu(), 1, {"keep_grads": False}, DepartureRoute, True),
        (None, 2, {"keep_grads": False}, "keep_grads: False .*2 processes", False),
        (None, 1, {"overlap": "backward"}, SlotRoute, True),
        (None, 2, {"overlap": "backward"}, ReducedRoute, False),
        (None, 2, {"overlap": "backward", "shard": True}, ReducedRoute, True),
        (Gpu(), 1, {"overlap": "backward"}, StepRoute, True),
        (Gpu(), 1, {"overlap": "backward", "keep_grads": False}, DepartureRoute, True),
        (Gpu(), 2, {"overlap": "backward"}, StepRoute, False),
        (Gpu(), 2, {"overlap": "backward", "shard": True}, StepRoute, True),
    ],
)
def test_the_route_of_a_device_and_of_ranks(
    monkeypatch: pytest.MonkeyPatch, device: Any, world: int, config: dict[str, Any], kind: Any, is_early: bool
) -> None:
    for module in (ranks, routes):
        monkeypatch.setattr(module, "world", lambda: (world, 0))
    holder: Any = RecordedEngine(dataclasses.replace(GIVEN, **config), device)
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    weights = bound_to(holder, parameters)
    if isinstance(kind, str):
        with pytest.raises(ConfigError, match=kind):
            choose_route(holder, weights, Scaling(), Overlap(holder, weights), parameters)
        assert holder.closed
        return
    route = choose_route(holder, weights, Scaling(), Overlap(holder, weights), parameters)
    assert type(route) is kind
    assert route.gets_final_gradients is is_early
    assert holder.is_deferred == (device is not None)  # for what backward leaves free
    assert not holder.closed


def test_gradients_that_no_hook_sees_are_not_updated_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ranks, routes):
        monkeypatch.setattr(module, "world", lambda: (2, 0))
    holder: Any = RecordedEngine(dataclasses.replace(GIVEN, overlap="backward"), None)
    parameter: Any = torch.nn.Parameter(torch.zeros(3))
    weights = bound_to(holder, [parameter])
    parameter._fsdp_flattened = True
    with pytest.raises(ConfigError, match=r'use "off": no hook sees gradients of FSDP1'):
        choose_route(holder, weights, Scaling(), Overlap(holder, weights), [parameter])
    assert holder.closed
