"""Steps that go on into the next forward pass: each module waits for its own weights only.

`Overlap` knows which modules are hooked, in which order they were called, and what waits for whom. It does not know
how a step is taken (`offload.optim.optimizer`) or run (`offload.session`).

A module waits for the parameters that it owns, and for those of modules below it that are never called themselves,
as `torch.nn.MultiheadAttention` uses the weights of its projection. Which are called is learnt from the first forward
pass, before which no step goes on behind it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo

from offload.errors import ConfigError, OffloadError
from offload.optim import ranks, shards
from offload.optim.late import LateEngine
from offload.optim.pace import Pace
from offload.optim.weights import Bound, Weights


class Overlap:
    """What goes on behind the caller of one optimizer's `step`.

    Args:
        late: The engine.
        weights: The parameters.

    Attributes:
        following: The models whose forward passes wait for weights.
        has_followed: Whether there has been one.
        pace: How long forward and backward take, and the caller waits.
    """

    def __init__(self, late: LateEngine, weights: Weights) -> None:
        self.following: list[Following] = []
        self.has_followed = False
        self.pace = Pace()
        self._late = late
        self._weights = weights
        self._bound = weights.bound
        self._used: dict[torch.Tensor, bool] = {}
        self._hidden: dict[Bound, torch.Tensor] = {}

    @property
    def is_pending(self) -> bool:
        """Whether there is a step that nobody has waited for to its end."""
        return self._late.opened is not None and self._late.opened.is_pending

    def follow(self, model: torch.nn.Module, check: bool, known: Iterable[torch.Tensor]) -> Following:
        """Hook a model of some `known` parameters; once more to hook what has been added to it."""
        if not isinstance(model, torch.nn.Module):
            raise ConfigError("model", type(model).__name__, "give the torch.nn.Module whose forward pass trains")
        if not isinstance(check, bool):
            raise ConfigError("check", check, "give True or False")
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise ConfigError("model", "with a ScriptModule", "give a model that is not scripted: that runs no hooks")
        if set(known).isdisjoint(model.parameters()):
            allowed = "give a model that this optimizer updates parameters of, not a copy"
            raise ConfigError("model", type(model).__name__, allowed)
        sharded = next((p for p in model.parameters() if shards.is_sharded(p) or ranks.is_flattened(p)), None)
        if sharded is not None or self._weights.rows_over is not None:
            what = "shard=True" if sharded is None else type(sharded).__name__
            raise ConfigError(
                "model", what, "have whole weights on each rank: shards are gathered before a module's turn"
            )
        self._late.check_open()
        self.finish()
        for other in [other for other in self.following if other.model is model]:
            other.remove()
        following = Following(self, model, check)
        self.following.append(following)
        self.has_followed = True
        return following

    def used(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take note that a forward pass needs some weights now, and wait for them."""
        trains = torch.is_grad_enabled()
        for parameter in parameters:
            self._used[parameter] = trains or self._used.get(parameter, False)
        if self.is_pending or self._hidden:
            self.wait_for([bound for parameter in parameters if (bound := self._bound.get(parameter)) is not None])

    def arrived(self, bound: Bound) -> None:
        """Take note that a gradient has arrived, and wait until the one before has been read."""
        self.pace.arrived()
        if self.following:
            self.wait_for([bound])

    def in_order(self, active: Iterable[Bound]) -> tuple[list[Bound], list[Bound]]:
        """Return the parameters to update: first those that no hook waits for, then the others in order.

        The order is that in which forward passes since the last step used them. What has a gradient without having
        been used there, with gradients enabled, was used around the hooks (by a compiled model that was compiled
        before it was hooked, a `forward` that was called by that name), and may be again.
        """
        owned = {parameter for following in self.following for parameter in following.parameters}
        trained = [parameter for parameter, trains in self._used.items() if trains and parameter in owned]
        place = {parameter: number for number, parameter in enumerate(trained)}
        self._used = {}
        waited_for = [bound for bound in active if bound.parameter in place]
        at_once = [bound for bound in active if bound.parameter not in place]
        return at_once, sorted(waited_for, key=lambda bound: place[bound.parameter])

    # Around a step

    def hide(self, waiting: Iterable[Bound]) -> list[torch.Tensor]:
        """Have a step update copies of weights, and fill these with NaN until somebody waits for them.

        Returns:
            The copies.
        """
        if any(following.check for following in self.following):
            for bound in waiting:
                self._hidden[bound] = copy = bound.parameter.detach().clone()
                self._late.engine.bind_weight(bound.position, copy.data_ptr())
                bound.parameter.data.fill_(float("nan"))
        return [*self._hidden.values()]

    def wait_for(self, waiting: Iterable[Bound]) -> None:
        """Wait until some weights are those of the last step, and their gradients have been read."""
        waiting = [*waiting]
        if not waiting or self._late.opened is None:
            return
        try:
            with self.pace.waits():
                self._late.opened.wait_for([bound.position for bound in waiting])
        except OffloadError:
            self._show([*self._hidden])
            raise
        self._show(waiting)

    def finish(self) -> None:
        """Wait until the step is over that goes on behind its caller, if one does."""
        try:
            if self.is_pending:
                with self.pace.waits(for_all=True):
                    self._late.engine.finish()
        finally:
            self._show([*self._hidden])

    def _show(self, waiting: Iterable[Bound], closed: bool = False) -> None:
        for bound in waiting:
            copy = self._hidden.get(bound)
            if copy is not None:
                bound.parameter.data.copy_(copy)
                self._late.device.give_up(copy)  # `step` may have made it on another stream
                if not closed:
                    self._late.engine.bind_weight(bound.position, bound.parameter.data_ptr())
                self._hidden.pop(bound, None)  # another thread may have been as quick

    def unhook(self) -> None:
        """Let all models be."""
        for following in [*self.following]:
            following.unhook()

    def closed(self) -> None:
        """The engine has been closed: show what was hidden, and raise what nobody was told of."""
        self._show([*self._hidden], closed=True)
        if self._late.opened is not None:
            self._late.opened.finish()


class Turn:
    """The lock of one optimizer; whoever has it finds no step going on behind its caller.

    Attributes:
        first: Waits for such a step.
    """

    def __init__(self) -> None:
        self.first: Callable[[], None] = lambda: None
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self.first()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


class Following:
    """A model whose modules wait for their weights; returned by `overlap_forward`.

    Attributes:
        model: Which.
        check: Whether weights that wait hold NaN.
        parameters: Those that a hook waits for.
    """

    def __init__(self, overlap: Overlap, model: torch.nn.Module, check: bool) -> None:
        self.model = model
        self.check = check
        self._overlap = overlap
        self._own: dict[torch.nn.Module, tuple[torch.Tensor, ...]] = {}
        self._below: dict[torch.nn.Module, tuple[torch.nn.Module, ...]] = {}
        self._compiled: set[torch.nn.Module] = set()
        self._called: set[torch.nn.Module] = set()
        self._needs: dict[torch.nn.Module, tuple[torch.Tensor, ...]] = {}
        self._handles: list[Any] = []
        self._walk(model)
        self.parameters = {parameter for own in self._own.values() for parameter in own}
        for module in self._own:
            hook = _Hook(self, module, Following.entered, module in self._compiled)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        untyped: Any
        for untyped in model.modules():
            hook = _Hook(self, untyped, Following.finish)
            self._handles.append(untyped.register_state_dict_pre_hook(hook))
            self._handles.append(untyped.register_load_state_dict_pre_hook(hook))

    def remove(self) -> None:
        """Wait for the step that goes on, and let the model be; idempotent."""
        try:
            self._overlap.finish()
        finally:
            self.unhook()

    def unhook(self) -> None:
        """Let the model be."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self in self._overlap.following:
            self._overlap.following.remove(self)

    def _walk(self, module: torch.nn.Module, is_within: bool = False) -> None:
        """Find all modules, each with what is below it; what is compiled as one is called as one, or by its parts."""
        if module in self._own:
            return
        if is_within:
            self._compiled.add(module)
        is_compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        own = module.parameters() if is_compiled else module._parameters.values()
        self._own[module] = tuple(parameter for parameter in own if parameter is not None)
        self._below[module] = () if is_compiled else tuple(module.children())
        for child in module.children():
            self._walk(child, is_compiled or is_within)

    def entered(self, module: torch.nn.Module) -> None:
        """Have a module wait that is called; one that only evaluation calls, by itself, is no less used by others."""
        if module not in self._called and torch.is_grad_enabled():
            self._called.add(module)
            self._needs.clear()
        needs = self._needs.get(module)  # another thread may empty it at any time
        if needs is None:
            needs = self._needs[module] = tuple(dict.fromkeys(self._needed(module)))
        self._overlap.used(needs)

    def _needed(self, module: torch.nn.Module) -> Iterator[torch.Tensor]:
        """Yield what a module owns, and what is owned below it by those that have never been called."""
        yield from self._own[module]
        for child in self._below[module]:
            if child not in self._called:
                yield from self._needed(child)

    def finish(self, module: torch.nn.Module) -> None:
        """Wait until the step is over that goes on."""
        self._overlap.finish()


class _Hook:
    """Has a module of a followed model wait. A copy of the model, or another process, waits for nothing."""

    def __init__(
        self,
        following: Following,
        module: torch.nn.Module,
        then: Callable[[Following, torch.nn.Module], None],
        is_within: bool = False,
    ) -> None:
        self._is_within = is_within  # a compiled module, which has waited when it runs this one
        self._following = weakref.ref(following)
        self._module = weakref.ref(module)
        self._then = then
        self._pid = os.getpid()

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> None:
        if not (self._is_within and torch.compiler.is_compiling()):
            self._call(module)

    @_disable_dynamo
    def _call(self, module: torch.nn.Module) -> None:
        following, mine = self._following(), self._module()
        if following is not None and mine is module and os.getpid() == self._pid:
            self._then(following, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _Nothing:
    """What a hook is in a copy of its module."""

    def __call__(self, *arguments: Any) -> None:
        pass
