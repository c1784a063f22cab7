"""`wrap`: any optimizer class of torch's kind with offloaded state; its bits are the class's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from offload import combinations
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.layout import Parameter
from offload.optim import ranks, shards
from offload.optim.groups import Group, names
from offload.optim.optimizer import OffloadedOptimizer, parse_config
from offload.optim.runner import NOT_HERE, ClassRunner
from offload.optim.state import Entry, StateView, in_memory_order
from offload.optim.weights import BoundParameter, check_parameter
from offload.rules import MASTER, MOST_STEPS, PACKED, ClassRule, number

WALKS = ("train", "eval")
"""Methods of schedule-free optimizers that change every weight by its state."""


class PackedState(StateView):
    """State of a wrapped class, with the keys, types and shapes that the class uses; `parts` as for `StateView`."""

    def __init__(self, runner: ClassRunner, *parts: Any) -> None:
        super().__init__(*parts)
        self.runner = runner

    def _has_master(self, bound: BoundParameter) -> bool:
        """Return whether a parameter has a master beside its weight, which only `wrap(masters=True)` keeps."""
        return self.runner.masters and super()._has_master(bound)

    def _layout_of(self, bound: BoundParameter) -> Parameter:
        """Return a parameter as the engine's layout describes it."""
        return self._layout.parameters[bound.position]

    def _entry(self, bound: BoundParameter, state: Mapping[str, torch.Tensor], own_masters: bool) -> dict[str, Any]:
        """Return a parameter's entry of `state`, unpacked, as the class itself would keep it.

        It has a master, too, if there is one beside the weight. With `own_masters` a weight that is its own master is
        one as well.
        """
        parameter = self._layout_of(bound)
        entry = self.runner.packing_of(parameter).load(state[PACKED])
        count = self._holder.engine.step_count(bound.position)
        if not parameter.numel and count:  # without elements nothing is stored: the class makes its state again
            entry = self.runner.state_of_empty(parameter, count)
        # The class itself may keep a value by the name of the master; then the entry shows that one.
        if (self._has_master(bound) or own_masters) and MASTER not in entry:
            entry[MASTER] = shards.in_form(state[MASTER], bound.parameter, bound.cut)
        return entry

    def _has_state(self, parameter: torch.Tensor, start_values: Mapping[torch.Tensor, Any]) -> bool:
        """Return whether a parameter has state: not if the class keeps nothing of it, as plain SGD does."""
        if not super()._has_state(parameter, start_values):
            return False
        bound = self._weights.bound[parameter]
        return bool(self.runner.packing_of(self._layout_of(bound)).keys)

    def shown(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return an entry of `read` as `state_for` shows it: all of it, as "step" is the class's own here."""
        return dict(entry)

    def assign(self, parameter: torch.Tensor, name: str, value: Any) -> Any:
        """Replace an item of a parameter's state; return a copy of the new value."""
        with self._lock:
            (entry,) = self.read([parameter])
            self[parameter] = {**entry, name: value}
            return self.read([parameter])[0][name]

    def checked_entry(self, what: str, entry: Mapping[str, Any], bound: BoundParameter) -> Entry:
        """Check an entry of one parameter's state that a user gives; return its tensors for the engine, and its step.

        The tensors are the packed state, with values converted to the class's types, and a master if there is one in
        the entry and beside the weight. `what` names the entry, for errors.
        """
        entry = dict(entry) if isinstance(entry, Mapping) else {}
        packing = self.runner.packing_of(self._layout_of(bound))
        word_count = self._layout.numel_of(bound.position, PACKED)
        packed = torch.zeros(word_count, dtype=torch.float32, device="cpu")
        # The engine's master, unless the class itself keeps a value of that name.
        master = None if MASTER in packing.keys else entry.pop(MASTER, None)
        try:
            packing.store(packed, packing.cast(entry))
        except TypeError as cause:
            advice = f"it must be state of {self.runner.name} for {bound.name}"
            raise ConfigError(what, str(cause), advice) from cause
        tensors = {PACKED: packed}
        if master is not None and self._has_master(bound):
            tensors[MASTER] = in_memory_order(f"{what}.{MASTER}", master, bound)
        if not entry:
            return tensors, 0  # nothing, or a master alone
        step = number(entry.get("step"))  # the class's own; if that is no count, 1 says that there were updates
        return tensors, int(step) if 1 <= step <= MOST_STEPS else 1

    def is_of_parameter(self, entry: object) -> bool:
        """Return whether an entry of a state dict looks like a parameter's state."""
        return isinstance(entry, Mapping) and not self.runner.keys.isdisjoint(entry)


class WrappedOptimizer(OffloadedOptimizer):
    """An optimizer with offloaded state whose updates are made by another class; see `wrap`."""

    _ignored = ("params", "param_names", *NOT_HERE)
    _state: PackedState

    def __init__(self, params: Iterable[Any], runner: ClassRunner, config: OffloadConfig) -> None:
        self._runner = runner
        self.kind = runner.name
        groups, defaults = runner.complete_groups(params)
        largest_numel = 0
        # Replaced by the largest parameter's rule, which sizes subgroups; stays if there is no parameter to update.
        self.rule = ClassRule(runner.name, packed_words=1)
        # `_open` tries the class, too, but may be deferred until the first step: refusals are to come from here.
        for at, group in enumerate(groups):
            # The group's trainable parameters with their names, made up of group and index where none are given.
            named = [
                item if isinstance(item, tuple) else (f"param_groups[{at}].params[{n}]", item)
                for n, item in enumerate(group["params"])
            ]
            named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
            runner.note_parameters(named, at, have_names=any(isinstance(item, tuple) for item in group["params"]))
            for name, parameter in named:
                self._check(parameter, name)
                if parameter.numel() > largest_numel:
                    largest_numel = parameter.numel()
                    self.rule = runner.rule_of(parameter, name, group, at)
            runner.check_alone(named, group, at)
        super().__init__(groups, defaults, config)

    def _view_of_state(self) -> PackedState:
        return PackedState(self._runner, self._holder, self._weights, self.rule, self._lock, self)

    def _check(self, parameter: torch.Tensor, name: str) -> None:
        """Refuse a `DTensor`, as the class updates whole parameters, and what no optimizer here can update."""
        if shards.is_dtensor(parameter):
            combinations.WHOLE_PARAMETERS.refuse(name, "a DTensor", rule=self.kind)
        check_parameter(parameter, name, required=None)  # on any device

    def _open(self, config: OffloadConfig) -> None:
        """Try the class on its groups, then open the engine; refuse `shard` on several ranks."""
        if config.shard and ranks.world()[0] > 1:
            combinations.WHOLE_PARAMETERS.refuse("shard", True, rule=self.kind)
        self._try_new_groups()
        super()._open(config)

    def _kept_as(self, parameter: torch.Tensor, name: str, group: int) -> tuple[int, ClassRule]:
        """Return the engine's group of a parameter, and its rule; refuse parameters that cannot be used."""
        self._check(parameter, name)
        return group, self._runner.rule_of(parameter, name, self.param_groups[group], group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `OffloadedOptimizer.add_param_group`."""
        self.finish()  # the end of a pending step writes to the groups that it began with
        try:
            super().add_param_group(param_group)
        except BaseException:
            self._runner.forget_group(len(self.param_groups))  # its number, as the group is not there any more
            raise

    def _add(self, parameters: list[torch.Tensor]) -> None:
        """Try the class on new groups, then add and bind parameters."""
        self._try_new_groups()
        super()._add(parameters)

    def _try_new_groups(self) -> None:
        """Try the class on groups, and on kinds of parameters, that are new since it was tried last."""
        named = names(self.param_groups)
        for at, group in enumerate(self.param_groups):
            own = [(name, parameter) for parameter, name, number in named if number == at]
            self._runner.note_parameters(own, at, have_names=bool(group.get("param_names")))
            self._runner.check_alone(own, group, at)

    def _check_saved_group(self, group: Group) -> None:
        """Check a group of a state dict: with another `amsgrad` the class would keep other state."""
        super()._check_saved_group(group)
        own_values = [each["amsgrad"] for each in self.param_groups if "amsgrad" in each]
        if own_values and group.get("amsgrad", own_values[0]) not in own_values:
            value = group["amsgrad"]
            raise ConfigError("state_dict amsgrad", value, f"make the optimizer with amsgrad={value}")

    # Steps

    def _is_asked_for_state(self) -> bool:
        """Return False: a step by which torch asks for state is taken as any other, as a class makes state in it."""
        return False

    def _loss_of(self, closure: Callable[[], float]) -> float:
        """Return the loss that a closure computes; refuse one if the class calls it again, or after its update."""
        if not self._runner.calls_closure_first:
            advice = f"compute gradients before it: {self.kind} calls a closure again, or after its update"
            raise ConfigError("step", "with a closure", advice)
        return super()._loss_of(closure)

    def _step(self) -> bool | None:
        """Take a step, in which the runner notes how updates change groups."""
        self._runner.begin_step()
        return super()._step()

    def _begin_step(self, groups: list[Any], scale: float, clip: float, active: list[BoundParameter]) -> None:
        """Begin a step that goes on in the background.

        If the class changes its groups in a step, wait for one update in each group, which tells how, and change the
        optimizer's groups accordingly: the caller may read them once `step` has returned.
        """
        if not self._runner.changes_groups:
            super()._begin_step(groups, scale, clip, active)
            return
        layout = self.engine.plan.layout
        first_updates: dict[int, BoundParameter] = {}
        for bound in active:
            if bound.local.numel():  # the class is not called for a parameter without elements
                first_updates.setdefault(layout.parameters[bound.position].group, bound)
        for at, values in enumerate(groups):
            # No update of such a group will tell. So the runner calls its optimizer of the class with the group
            # alone, and keeps the result. Now, before the step's updates use that optimizer.
            if at not in first_updates:
                self._runner.group_changes_after(at, values)
        super()._begin_step(groups, scale, clip, active)
        self._overlap.wait_for(first_updates.values())
        self._change_groups()

    def _change_groups(self) -> None:
        """Change hyperparameters in groups as the class did in the last step's updates; once for each step.

        A value that the caller has set since then stays.
        """
        for at, group in enumerate(self.param_groups):
            group.update(self._runner.group_changes_after(at, self.rule.values(group)))
            self._runner.note_group_changed(at)

    def _report_step(self) -> None:
        """Change groups as the step's updates have (see `_change_groups`), then report the step."""
        self._change_groups()
        self._runner.end_step()
        super()._report_step()

    def __getattr__(self, name: str) -> Any:
        """Return a method for `train` or `eval` if the class has one; called for attributes that are not found."""
        if name in WALKS and callable(getattr(self._runner.of_class, name, None)):
            return partial(self._call_on_all, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @torch.no_grad()
    def _call_on_all(self, name: str) -> None:
        """Call a method in `WALKS` of the class on every parameter, whose weight and state it changes."""
        runner = self._runner
        with self._lock:
            groups = self._values()
            self._holder.open()
            self._state.check()
            layout = self.engine.plan.layout
            bounds = self._weights.bound.values()
            runner.begin_step()  # the method, too, may read parameters' attributes and change groups

            def walk(position: int, views: Mapping[str, torch.Tensor]) -> None:
                """Call the method on one parameter, with views of its state."""
                runner.walk(name, layout.parameters[position], views[MASTER], views[PACKED], groups)

            self.engine.state.change(walk, masters=True)  # weights become their rounded masters
            self._weights.note_written(bounds)
            self._state.note_change()
            for at, group in enumerate(self.param_groups):
                group.update(runner.group_changes_after(at, groups[at], name))
            runner.end_step()


def wrap(
    kind: type[torch.optim.Optimizer],
    params: Iterable[Any],
    *args: Any,
    offload: OffloadConfig | Mapping[str, Any] | None = None,
    masters: bool = False,
    **kwargs: Any,
) -> WrappedOptimizer:
    """Return an optimizer with offloaded state whose updates are made by a class of `torch.optim`'s, or of your own.

    Each update of a parameter runs the class on views of its weight, gradient and state, on the CPU, so all results
    have the class's own bits. Groups, schedulers, hooks and `state_dict` are as with the class itself. Parameters are
    not cut, so a subgroup is at least as large as the largest parameter.

    Args:
        kind: A class that keeps tensors and numbers for each parameter in `state`, and updates each by itself.
        params: As for the class.
        args: Further arguments of the class.
        offload: Where state may live; None for host memory.
        masters: Keep fp32 masters of 16-bit weights: the class updates the masters, with gradients in fp32, and
            weights are their roundings. By default the class updates the weights, with the state it keeps for these.
        kwargs: Keyword arguments of the class.

    Raises:
        ConfigError: The class cannot be run in this way, or an argument or parameter cannot be used; raised before
            any file is touched.
        InfeasiblePlanError: If the state does not fit into the tiers.
    """
    config = parse_config(offload)
    runner = ClassRunner(kind, args, kwargs, masters=masters, widens=config.gradient_dtype == "float32")
    return WrappedOptimizer(params, runner, config)
