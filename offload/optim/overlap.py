"""Steps that go on into the next forward pass: each module waits for its own weights only.

`Overlap` knows which modules are hooked, in which order they were called, and for which weights they wait. It does
not know how a step is taken (`offload.optim.optimizer`) or run (`offload.session`).

A module waits for the parameters that it owns, and for those of modules below it that are never called themselves,
as `torch.nn.MultiheadAttention` uses the weights of its projection. The first forward pass shows which modules are
called; no step goes on into that one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo

from offload import combinations
from offload.errors import ConfigError, OffloadError, known
from offload.optim import ranks, shards
from offload.optim.exchange import BUCKET_BYTES, UNUSED, Bucket, Exchange
from offload.optim.holder import EngineHolder, OptimizerParts
from offload.optim.pace import Pace
from offload.optim.weights import BoundParameter, Weights


class Overlap:
    """Lets one optimizer's step go on after `step` has returned: modules wait for their weights.

    Attributes:
        models: The models whose forward passes wait for weights.
        has_hooked_model: Whether there has been such a model, now or before.
        pace: How long forward and backward take, and how long the caller waits.
        hidden_copies: If a model checks its waits, copies of the weights that have not been waited for yet. The step
            updates the copies, while the weights themselves hold NaN. Else empty.
        has_ended: Whether somebody has waited for the whole last step. On an accelerator only that caller's stream
            has waited for weights then, and other streams have yet to.
        exchange: Exchanges rows over ranks while a step goes on, if each rank updates some rows of every weight; else
            None.
    """

    def __init__(self, holder: EngineHolder, weights: Weights) -> None:
        self.models: list[FollowedModel] = []
        self.has_hooked_model = False
        self.pace = Pace()
        self.exchange: Exchange | None = None
        self.has_ended = False
        self._holder = holder
        self._weights = weights
        self._bound = weights.bound
        # The weights that forward has used since the last step, in the order of first use, each with whether any use
        # was with gradients enabled.
        self._use_order: dict[torch.Tensor, bool] = {}
        self.hidden_copies: dict[BoundParameter, torch.Tensor] = {}

    @property
    def is_pending(self) -> bool:
        """Whether there is a step, or its exchange of rows, that nobody has waited for to its end."""
        if self.exchange is not None and self.exchange.is_under_way:
            return True
        return self._holder.engine_if_open is not None and self._holder.engine_if_open.is_pending

    def hook_model(self, model: torch.nn.Module, check: bool, parameters: Iterable[torch.Tensor]) -> FollowedModel:
        """Hook a model, once the last step is over; a further call for the same model hooks modules added since.

        Makes `exchange` if weights are cut by rows: a collective then.

        Args:
            model: The model.
            check: See `FollowedModel`.
            parameters: The optimizer's, of which the model must have some.
        """
        self._check_model(model, check, parameters)
        self._holder.check_open()
        self.finish()
        rows_over = self._weights.rows_over
        if rows_over is not None and self.exchange is None:
            device = known(self._weights.required_device, "weights are cut by rows, and lie nowhere")
            self.exchange = Exchange(rows_over.get_group(), device)
        for other in [other for other in self.models if other.model is model]:
            other.remove()  # the new hooks replace its own
        followed = FollowedModel(self, model, check)
        self.models.append(followed)
        self.has_hooked_model = True
        return followed

    def _check_model(self, model: torch.nn.Module, check: bool, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse a model whose modules cannot wait for their weights."""
        if not isinstance(model, torch.nn.Module):
            raise ConfigError("model", type(model).__name__, "give the torch.nn.Module whose forward pass trains")
        if not isinstance(check, bool):
            raise ConfigError("check", check, "give True or False")
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            combinations.SCRIPTED.refuse("model", "with a ScriptModule")
        if set(parameters).isdisjoint(model.parameters()):
            advice = "give a model that this optimizer updates parameters of, not a copy"
            raise ConfigError("model", type(model).__name__, advice)
        self._holder.config.check_goes_on()  # refuses where GPU memory is borrowed: forward needs it back
        for parameter in model.parameters():
            if ranks.is_flattened(parameter):
                combinations.FSDP1_FORWARD.refuse("model", type(parameter).__name__)
            if shards.is_dtensor(parameter) and self._weights.is_dealt(parameter):
                combinations.DEALT_FORWARD.refuse("model", "with sharded matrices that were dealt to ranks")

    def wait_for_use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that a forward pass uses some weights now, and wait for them."""
        trains = torch.is_grad_enabled()
        for parameter in parameters:
            self._use_order[parameter] = trains or self._use_order.get(parameter, False)
        self.wait_for_some(parameters)

    def wait_for_some(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for some weights, if there is a step that goes on."""
        # While there are hidden copies, weights hold NaN, even if the step is over.
        if self.is_pending or self.hidden_copies:
            self.wait_for([self._bound[parameter] for parameter in parameters if parameter in self._bound])

    def agree_on_exchanges(self, at_once: list[BoundParameter], later: list[BoundParameter]) -> list[BoundParameter]:
        """Return the weights whose rows ranks exchange after this step's updates, in an order agreed by all ranks.

        Also sorts `later` by that order. A collective if weights are cut by rows; else nothing is exchanged.

        Args:
            at_once: Parameters that the step waits for.
            later: Parameters that modules wait for, in the order in which forward uses them on this rank.
        """
        if self.exchange is None:
            return []
        row_sharded = self._weights.row_sharded
        # Each weight's place in this rank's order; ranks agree on the first place that it has on any rank.
        own_places = {bound: 1 + place for place, bound in enumerate(later)}
        own_places |= dict.fromkeys(at_once, 0)  # first, as `step` waits for these
        agreed = self.exchange.agree_on_order([own_places.get(bound, UNUSED) for bound in row_sharded])
        exchanged = [row_sharded[number] for first_place, number in agreed if first_place != UNUSED]
        agreed_places = {bound: place for place, bound in enumerate(exchanged)}
        later.sort(key=lambda bound: agreed_places.get(bound, -1))  # weights that are not exchanged come first
        return exchanged

    def split_by_use(self, active: Iterable[BoundParameter]) -> tuple[list[BoundParameter], list[BoundParameter]]:
        """Split the parameters to update by whether a hook will wait for them; forget the order of use.

        No hook is relied on for a parameter that has a gradient though no hook has seen it used with gradients
        enabled. It was used around the hooks (in a model compiled before it was hooked, or by a call of `forward`
        itself), and may be again.

        Returns:
            Parameters that no hook waits for; and the others, in the order in which forward passes have first used
            them since the last step.
        """
        hooked = {parameter for model in self.models for parameter in model.parameters}
        used = [parameter for parameter, trains in self._use_order.items() if trains and parameter in hooked]
        place_in_use = {parameter: place for place, parameter in enumerate(used)}
        self._use_order = {}
        at_once = [bound for bound in active if bound.parameter not in place_in_use]
        later = [bound for bound in active if bound.parameter in place_in_use]
        return at_once, sorted(later, key=lambda bound: place_in_use[bound.parameter])

    # Around a step

    def begin_exchange(self, bounds: list[BoundParameter]) -> None:
        """Begin to exchange weights in the background, while the step goes on.

        `bounds` is what `agree_on_exchanges` has returned, at least one weight. They are exchanged in this order, in
        buckets of at least `BUCKET_BYTES`, but for the last.
        """
        if self.exchange is None:  # each rank updates all of its weights
            return
        buckets: list[list[BoundParameter]] = [[]]
        last_bucket_bytes = 0
        for bound in bounds:
            if last_bucket_bytes >= BUCKET_BYTES:
                buckets.append([])
                last_bucket_bytes = 0
            buckets[-1].append(bound)
            last_bucket_bytes += bound.parameter.nbytes
        self.exchange.begin(self._holder.engine, [self._make_bucket(bucket) for bucket in buckets])

    def _make_bucket(self, bounds: list[BoundParameter]) -> Bucket:
        """Return weights as a bucket: dealt ones are broadcast, rows of the others gathered."""
        # By `.data`: writes must not count in the parameters' versions, which show what users change.
        weights = [self.hidden_copies.get(bound, bound.parameter.data) for bound in bounds]

        def gather(mesh: Any) -> None:
            """Exchange the weights; a collective, on the exchange's thread."""
            cuts = (bound.cut for bound in bounds)
            in_rows = shards.send(zip(weights, cuts, strict=True), mesh)
            shards.gather(in_rows, mesh)

        return Bucket(bounds, [bound.position for bound in bounds], gather)

    def bind_hidden_copies(self, bounds: Iterable[BoundParameter]) -> list[torch.Tensor]:
        """If a model checks its waits: have the step update copies of weights, and fill the weights with NaN.

        So a use of weights that nobody has waited for shows. `wait_for` and `finish` copy the new values into the
        weights. Called as each pending step begins, so this also resets `has_ended`.

        Args:
            bounds: All weights that the step updates and that a module waits for.

        Returns:
            The copies; none if no model checks. The caller keeps them alive until the step is over: after a failed
            wait `hidden_copies` has them no more, and lanes may still write to them.
        """
        self.has_ended = False
        if any(model.check for model in self.models):
            for bound in bounds:
                weight = shards.local(bound.parameter)
                copy = weight.detach().clone()
                self.hidden_copies[bound] = copy
                is_shard = weight is not bound.parameter  # a `DTensor`'s, of which this rank updates all
                rank_elements = copy if is_shard else shards.own(copy, bound.cut)
                self._holder.engine.bind_weight(bound.position, rank_elements.data_ptr())
                weight.data.fill_(float("nan"))
        return [*self.hidden_copies.values()]

    def wait_for(self, bounds: Iterable[BoundParameter]) -> None:
        """Wait until the last step has updated some weights, and has read their gradients.

        If a model checks its waits, the new values are then copied to these weights, which held NaN.
        """
        bounds = [*bounds]
        if not bounds or self._holder.engine_if_open is None:  # there is no step before the engine is opened
            return
        try:
            with self.pace.timed_wait():
                self._holder.engine_if_open.wait_for([bound.position for bound in bounds])
                if self.exchange is not None:
                    self.exchange.wait_for(bounds)
        except OffloadError:
            self._copy_from_hidden([*self.hidden_copies])  # so that a failed step leaves no NaN in weights
            raise
        self._copy_from_hidden(bounds)

    def finish(self) -> None:
        """Wait until the last step is over, if it goes on after `step` has returned."""
        try:
            if self.is_pending:
                self.has_ended = True
                with self.pace.timed_wait(for_all=True):
                    self._holder.engine.finish()
                    if self.exchange is not None:
                        self.exchange.finish()
        finally:  # a failed step, too, leaves no NaN in weights
            self._copy_from_hidden([*self.hidden_copies])

    def _copy_from_hidden(self, bounds: Iterable[BoundParameter], is_closed: bool = False) -> None:
        """Copy updated weights from their hidden copies into the parameters, and have the engine bind these again.

        `is_closed`: the engine has been closed, and binds nothing.
        """
        for bound in bounds:
            copy = self.hidden_copies.get(bound)
            if copy is not None:
                shards.local(bound.parameter).data.copy_(copy)
                self._holder.device.record_use(copy)  # `step` may have made it on another stream
                if not is_closed:
                    self._holder.engine.bind_weight(bound.position, bound.local.data_ptr())
                self.hidden_copies.pop(bound, None)  # another thread may have removed it meanwhile

    def unhook(self) -> None:
        """Remove the hooks of all models, without waiting."""
        for model in [*self.models]:
            model.unhook()

    def after_close(self) -> None:
        """Finish what `close` of the engine leaves: end the exchange, and copy weights from their hidden copies.

        Raises:
            StepAbortedError: The last step failed in the background, and nobody has been told.
        """
        if self.exchange is not None:
            self.exchange.close()
        self._copy_from_hidden([*self.hidden_copies], is_closed=True)
        if self._holder.engine_if_open is not None:
            self._holder.engine_if_open.finish()


class OptimizerLock:
    """The lock of one optimizer; whoever acquires it also waits until the last step is over.

    It does not keep the optimizer alive.
    """

    def __init__(self, owner: OptimizerParts) -> None:
        self._owner: OptimizerParts = weakref.proxy(owner)  # the optimizer
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Acquire the lock, and wait until the last step is over; if that raises, release the lock."""
        self._lock.acquire()
        try:
            self._owner._finish()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *exception: object) -> None:
        """Release the lock."""
        self._lock.release()


class WeightWaiter(Protocol):
    """What a `FollowedModel` calls to wait for weights: an `Overlap`, or an integration's own.

    Attributes:
        models: The models whose modules wait.
        has_ended: Whether somebody has waited for the whole last step, perhaps on another stream.
    """

    models: list[FollowedModel]
    has_ended: bool

    def wait_for_use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that a forward pass uses some weights now, and wait for them."""

    def wait_for_some(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for some weights, if there is a step that goes on."""

    def finish(self) -> None:
        """Wait until the last step is over."""


class FollowedModel:
    """A model whose modules wait for their weights; returned by `overlap_forward`. It does not keep the optimizer.

    Attributes:
        model: The model.
        check: Whether weights hold NaN until a module has waited for them.
        parameters: The parameters that a hook waits for.
    """

    def __init__(self, overlap: WeightWaiter, model: torch.nn.Module, check: bool) -> None:
        self.model = model
        self.check = check
        self._overlap = weakref.ref(overlap)
        self._parameters_of: dict[torch.nn.Module, tuple[torch.Tensor, ...]] = {}  # that each module owns
        self._children_of: dict[torch.nn.Module, tuple[torch.nn.Module, ...]] = {}
        self._compiled_parts: set[torch.nn.Module] = set()  # modules inside compiled ones
        self._called_modules: set[torch.nn.Module] = set()  # that forward passes with gradients have called
        # The parameters that each module waits for; emptied when they may have changed.
        self._awaited: dict[torch.nn.Module, tuple[torch.Tensor, ...]] = {}
        self._handles: list[Any] = []  # of hooks, to remove them
        self._note_modules(model)
        self.parameters = {parameter for owned in self._parameters_of.values() for parameter in owned}
        for module in self._parameters_of:
            hook = _Hook(self, module, is_compiled_part=module in self._compiled_parts)
            # `prepend`: before hooks of the user's, which may use the module's weights.
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        self._handles += [shards.PatchedMethod(group, "unshard", self.unshard) for group in shards.fsdp_groups(model)]
        each: Any
        for each in model.modules():  # whose state dicts wait for the whole step
            hook = _Hook(self, each, for_all=True)
            self._handles.append(each.register_state_dict_pre_hook(hook))
            self._handles.append(each.register_load_state_dict_pre_hook(hook))

    def remove(self) -> None:
        """Wait until the last step is over, and remove the hooks; idempotent."""
        try:
            self.finish(self.model)
        finally:
            self.unhook()

    def unhook(self) -> None:
        """Remove the hooks without waiting."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        overlap = self._overlap()
        if overlap is not None and self in overlap.models:
            overlap.models.remove(self)

    def _note_modules(self, module: torch.nn.Module, is_part: bool = False) -> None:
        """Note a module and all below it, with their parameters and children.

        A compiled module counts as one without children that owns all parameters in it. Modules in it (`is_part`) are
        noted, too, as they may be called by themselves.
        """
        if module in self._parameters_of:
            return  # it is part of several modules, and was noted as that of another one
        if is_part:
            self._compiled_parts.add(module)
        # By `torch.compile(module)`, whose result has `_orig_mod`, or in place by `module.compile()`.
        is_compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        owned = module.parameters() if is_compiled else module._parameters.values()
        self._parameters_of[module] = tuple(parameter for parameter in owned if parameter is not None)
        self._children_of[module] = () if is_compiled else tuple(module.children())
        for child in module.children():
            self._note_modules(child, is_compiled or is_part)

    def before_forward(self, module: torch.nn.Module) -> None:
        """Wait for the weights that a module is about to use; a forward pre-hook."""
        # A call without gradients does not count: a module that only evaluation calls may be bypassed in training.
        if module not in self._called_modules and torch.is_grad_enabled():
            self._called_modules.add(module)
            self._awaited.clear()  # modules above it need not wait for its parameters any more
        awaited = self._awaited.get(module)  # another thread may clear `_awaited` at any time
        if awaited is None:
            awaited = tuple(dict.fromkeys(self._parameters_used_by(module)))
            self._awaited[module] = awaited
        overlap = self._overlap()
        if overlap is not None:
            overlap.wait_for_use(awaited)

    def unshard(self, group: Any, unshard: Callable[[bool], Any], async_op: bool = False) -> Any:
        """Wait for a group's shards, then let FSDP2 gather them; replaces the group's `unshard`, and calls it.

        If the group is gathered already, there is nothing to wait for.
        """
        if not group.is_unsharded:
            self.before_unshard(group, async_op)
        return unshard(async_op)

    def before_unshard(self, group: Any, async_op: bool) -> None:
        """Wait for the shards that FSDP2 is about to gather, on the caller's stream and on FSDP2's for gathering.

        `async_op` is as for the group's `unshard`, and decides which stream FSDP2 uses.
        """
        overlap = self._overlap()
        if overlap is None:  # the optimizer is gone
            return
        parameters = shards.gathered_by(group)
        if group.device.type != "cpu":
            stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
            # Usually the wait is made with FSDP2's stream as the current one. But once somebody has waited for the
            # whole step, perhaps only the caller's stream is behind it; and if waits are checked, the caller's stream
            # copies weights from their hidden copies. In both cases FSDP2's stream waits for the caller's.
            if overlap.has_ended or self.check:
                overlap.wait_for_some(parameters)
                stream.wait_stream(group.device_handle.current_stream())
            else:
                with group.device_handle.stream(stream):
                    overlap.wait_for_some(parameters)
        # Wait on the caller's stream, too. Each gathering is also noted as a use of the weights, but for backward's:
        # updates go by the order of use in forward.
        is_for_backward = group._training_state.name == "PRE_BACKWARD"
        if is_for_backward:
            overlap.wait_for_some(parameters)
        else:
            overlap.wait_for_use(parameters)

    def _parameters_used_by(self, module: torch.nn.Module) -> Iterator[torch.Tensor]:
        """Yield the parameters of a module, and of modules below it that have never been called themselves.

        A module that is never called has no hook that could wait: its parent uses its parameters directly.
        """
        yield from self._parameters_of[module]
        for child in self._children_of[module]:
            if child not in self._called_modules:
                yield from self._parameters_used_by(child)

    def finish(self, module: torch.nn.Module) -> None:
        """Wait until the last step is over; called by hooks of a module's `state_dict` and `load_state_dict`.

        `module` is not looked at: any module's state dict waits for all weights.
        """
        overlap = self._overlap()
        if overlap is not None:
            overlap.finish()


class _Hook:
    """A module's hook, which waits for weights; in a copy of the model, or in another process, it does nothing.

    Args:
        for_all: Whether to wait for the whole step, and not only for the weights that the module is about to use.
        is_compiled_part: Whether the module is inside a compiled one, which waits for all modules in it.
    """

    def __init__(
        self,
        followed: FollowedModel,
        module: torch.nn.Module,
        *,
        for_all: bool = False,
        is_compiled_part: bool = False,
    ) -> None:
        self._is_compiled_part = is_compiled_part
        self._followed = weakref.ref(followed)
        self._module = weakref.ref(module)
        self._for_all = for_all
        self._pid = os.getpid()

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> None:
        """Wait, unless a compiled module that contains this one is being traced.

        Then the compiled module has waited for all parameters in it, and a call here would break the graph, which
        costs time.
        """
        if not (self._is_compiled_part and torch.compiler.is_compiling()):
            self._wait(module)

    @_disable_dynamo
    def _wait(self, module: torch.nn.Module) -> None:
        """Wait for the whole step or for the module's weights; torch.compile does not look into this."""
        followed = self._followed()
        is_copy = self._module() is not module or os.getpid() != self._pid
        if followed is None or is_copy:
            return
        if self._for_all:
            followed.finish(module)
        else:
            followed.before_forward(module)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copied or pickled module have a hook that does nothing."""
        return _Nothing, ()


class _Nothing:
    """Stands for a `_Hook` in a copy of its module, and does nothing."""

    def __call__(self, *arguments: Any) -> None:
        """Do nothing, as the copy's weights are not those that a step updates."""
