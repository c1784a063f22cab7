"""`optimizer.state`: a dict of dicts as torch's own optimizers have it, over state that lives elsewhere.

Reading gives copies. An assignment is written to where the state lives. A change in place would change only the copy,
so it is detected by the copy's version counter, and refused when the optimizer is next used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch

from offload.errors import ConfigError
from offload.layout import Layout
from offload.optim import shards
from offload.optim.holder import EngineHolder, OptimizerParts
from offload.optim.overlap import OptimizerLock
from offload.optim.weights import BoundParameter, Weights, differing
from offload.rules import MASTER, NAMED, UpdateRule, checked_step
from offload.session.state_copy import refuse_uncopyable

Entry = tuple[dict[str, torch.Tensor], int | None]
"""One parameter's state, ready to be written: tensors by name, whose row-major order is that of the weight's memory,
and the step count; None keeps the count."""


class _WatchedTensor(NamedTuple):
    """A tensor of a copy of state that was given to a user, and its version at that time.

    The witness is a detached alias of the tensor: it shares the version counter, which shows changes even when the
    tensor is gone, and none of the memory.
    """

    tensor: weakref.ref[torch.Tensor]
    witness: torch.Tensor
    given_version: int
    name: str
    parameter: weakref.ref[torch.Tensor]  # whose state it is

    @property
    def has_changed(self) -> bool:
        """Whether the tensor was changed in place since it was given."""
        return self.witness._version != self.given_version


class Copies:
    """Watches copies of state that users hold, to detect changes in place."""

    def __init__(self) -> None:
        self._watched: list[_WatchedTensor] = []  # two for a `DTensor`: the wrapper and its local tensor

    def watch(self, copy: torch.Tensor, name: str, parameter: torch.Tensor) -> None:
        """Note a copy of a parameter's state as it is now."""
        for tensor in shards.counting_tensors(copy):
            witness = tensor.detach()
            shards.free_memory(witness)  # of the witness alone: the copy keeps its own
            of_parameter = weakref.ref(parameter)
            self._watched.append(_WatchedTensor(weakref.ref(tensor), witness, witness._version, name, of_parameter))

    def is_as_watched(self, copy: torch.Tensor) -> bool:
        """Return whether a copy, with all its parts, is watched and has not changed since."""
        return all(
            any(watched.tensor() is tensor and not watched.has_changed for watched in self._watched)
            for tensor in shards.counting_tensors(copy)
        )

    def unwatch(self, copy: torch.Tensor) -> None:
        """Stop watching a copy."""
        ids = [id(tensor) for tensor in shards.counting_tensors(copy)]
        self._watched = [watched for watched in self._watched if id(watched.tensor()) not in ids]

    def unwatch_of(self, parameters: Iterable[torch.Tensor]) -> None:
        """Stop watching the copies of some parameters' state."""
        ids = {id(parameter) for parameter in parameters}
        self._watched = [watched for watched in self._watched if id(watched.parameter()) not in ids]

    def unwatch_all(self) -> None:
        """Stop watching all copies."""
        self._watched = []

    def check_unchanged(self) -> None:
        """Refuse copies that were changed in place; stop watching those that nobody holds any more.

        Raises:
            ConfigError: A copy was changed in place; raised once, as no copy is watched after that.
        """
        changed_names = [watched.name for watched in self._watched if watched.has_changed]
        if changed_names:
            self.unwatch_all()
            more = f" and {len(changed_names) - 1} more" if len(changed_names) > 1 else ""
            raise ConfigError(
                "state",
                f"{changed_names[0]}{more}, changed in place",
                "what optimizer.state gives are copies: assign instead (state[p][name] = tensor), or use reset_state "
                "or load_state_dict; state_for gives copies to work on",
            )
        self._watched = [watched for watched in self._watched if watched.tensor() is not None]


class StateEntry(dict[str, torch.Tensor]):
    """A copy of one parameter's state; an assignment to an item is written to where the state lives."""

    def __init__(self, state: StateView, parameter: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(values)
        self._state = state
        self._parameter = parameter
        self._seen_changes = state.changes  # as `values` have just been read
        for name, copy in values.items():
            if isinstance(copy, torch.Tensor):  # wrapped classes may keep plain numbers
                state.copies.watch(copy, name, parameter)

    def _is_unchanged(self, name: str, value: object) -> bool:
        """Return whether assigning a value would change nothing, so that nothing need be written.

        The value equals the item that was read, perhaps on another device; the item was not changed since, and no
        state anywhere has changed.
        """
        copy = self.get(name)
        return (
            isinstance(value, torch.Tensor)
            and copy is not None
            and self._seen_changes == self._state.changes
            and self._state.copies.is_as_watched(copy)
            and (value.dtype, value.shape) == (copy.dtype, copy.shape)
            and shards.placed_as(value, copy)
            and torch.equal(shards.content(value), shards.content(copy))
        )

    def __setitem__(self, name: str, value: Any) -> None:
        """Write the step count, `master` or a moment to where the state lives.

        Raises:
            ConfigError: It is none of these, or not of the parameter's shape.
        """
        if self._is_unchanged(name, value):
            return
        state = self._state
        if isinstance(self.get(name), torch.Tensor):
            # `state[p][name] *= 2` changes the old copy in place, and then assigns it here. So stop watching the copy
            # first, or `StateView.check` would refuse the change.
            state.copies.unwatch(self[name])
        copy = state.assign(self._parameter, name, value)
        super().__setitem__(name, copy)
        if isinstance(copy, torch.Tensor):
            state.copies.watch(copy, name, self._parameter)
        self._seen_changes = state.changes  # the write has counted as a change, and this entry has it

    def update(self, *others: Any, **values: Any) -> None:
        """Assign several items."""
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __ior__(self, other: Any) -> StateEntry:  # type: ignore[override,misc]
        """Assign several items; the dict's own would write to the copy alone."""
        self.update(other)
        return self

    def clear(self) -> None:
        """Reset the parameter's state; see `StatefulOptimizer.reset_state`."""
        self._state.reset([self._parameter])
        super().clear()

    def _refuse_removal(self, *arguments: Any) -> NoReturn:
        """Refuse to remove an item; in the place of the dict's methods that would remove or add one."""
        raise ConfigError("state", "a missing item", "use reset_state: an updated parameter has all of its state")

    __delitem__ = pop = popitem = setdefault = _refuse_removal

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copied or pickled entry be a plain dict."""
        return dict, (dict(self),)


class StateView(MutableMapping[Any, Any]):
    """State of all parameters that have been updated, read at each access from where it lives.

    Attributes:
        copies: Watches the copies that users hold.
        changes: How many times any state has changed.
        others: Entries that users have added under keys of their own.
    """

    def __init__(
        self, holder: EngineHolder, weights: Weights, rule: UpdateRule, lock: OptimizerLock, owner: OptimizerParts
    ) -> None:
        self.copies = Copies()
        self.changes = 0
        self.others: dict[Any, Any] = {}
        self._shown_as_zeros: set[torch.Tensor] = set()  # never updated, and in `state` all the same
        # Parameters that state dicts contain for their master alone, though their step count is 0.
        self._only_masters: set[torch.Tensor] = set()
        self._holder = holder
        self._weights = weights
        self._rule = rule
        self._lock = lock
        self._owner = weakref.ref(owner)
        self._owner_name = type(owner).__name__

    def check(self) -> None:
        """Take account of what users have done since the last check.

        Refuses copies of state that were changed in place. Binds weights that were moved, and marks the masters of
        weights that were written to as due.
        """
        self.copies.check_unchanged()
        self._weights.rebind_changed()

    @property
    def has_updates(self) -> bool:
        """Whether any parameter has been updated."""
        engine = self._holder.engine_if_open
        return engine is not None and any(engine.step_count(each.position) for each in self._weights.bound.values())

    def show_as_zeros(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have `state` include bound parameters that were never updated, with zeros and a step count of 0."""
        self._shown_as_zeros.update(parameters)

    def note_change(self) -> None:
        """Note that all state may have changed: a step was taken, or state was loaded or reset.

        From now on no parameter is shown with zeros only because torch has asked for its state (`show_as_zeros`).
        """
        self.changes += 1
        self._shown_as_zeros.clear()

    def _start_values(self) -> Mapping[torch.Tensor, Mapping[str, float]]:
        """Return the values that state starts from, for parameters where they are not 0."""
        owner = self._owner()
        return {} if owner is None else owner._start_values()

    def write_start_values(self, bounds: Iterable[BoundParameter]) -> None:
        """Write the values that state starts from, where they are not 0."""
        start_values = self._start_values()
        # By position and name: each value as a tensor of the state's size, which takes no memory, as it is expanded.
        tensors: dict[int | str, dict[str, torch.Tensor]] = {
            bound.position: {
                name: torch.tensor(value, dtype=torch.float32, device="cpu").expand(bound.local.numel())
                for name, value in start_values[bound.parameter].items()
            }
            for bound in bounds
            if bound.parameter in start_values
        }
        if tensors:
            self._holder.engine.state.write(tensors)

    def read(self, parameters: Iterable[torch.Tensor], *, own_masters: bool = False) -> list[dict[str, Any]]:
        """Return copies of bound parameters' entries, in their order: the step count, and tensors by name.

        An fp32 weight, which is its own master, is an entry's "master" only with `own_masters`. First does what
        `check` does.
        """
        with self._lock, torch.inference_mode(False):  # else the copies would have no version counters
            self.check()
            bounds = [self._weights.bound[parameter] for parameter in parameters]
            positions = [bound.position for bound in bounds]
            # Without parameters no engine is opened, if that was deferred.
            states = self._holder.engine.state.read(positions, own_masters=own_masters) if bounds else []
            return [self._entry(bound, state, own_masters) for bound, state in zip(bounds, states, strict=True)]

    def _entry(self, bound: BoundParameter, state: Mapping[str, torch.Tensor], own_masters: bool) -> dict[str, Any]:
        """Return a parameter's entry for users, made from the flat tensors that the engine has read."""
        names = [name for name in (*self.rule_of(bound).state, MASTER) if name in state]
        tensors = {name: shards.in_form(state[name], bound.parameter, bound.cut) for name in names}
        return {"step": _step_tensor(self._holder.engine.step_count(bound.position)), **tensors}

    def _has_master(self, bound: BoundParameter) -> bool:
        """Return whether a parameter has a master beside its weight: an fp32 weight is its own."""
        return bound.parameter.dtype is not torch.float32

    def rule_of(self, bound: BoundParameter) -> UpdateRule:
        """Return the rule of a parameter."""
        return self._layout.state_of(self._layout.parameters[bound.position]).rule

    def shown(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return an entry of `read` as `state_for` returns it: master first, no step count."""
        return {
            MASTER: entry[MASTER],
            **{name: value for name, value in entry.items() if name not in (MASTER, "step")},
        }

    def assign(self, parameter: torch.Tensor, name: str, value: Any) -> torch.Tensor:
        """Write a new step count, or a new state tensor, to the engine; return a copy of the new value."""
        bound = self._weights.of(parameter)
        names = self.rule_of(bound).names
        with self._lock:
            self._weights.rebind_changed()
            if name == "step":
                step = checked_step("state.step", value)
                self._write({bound: ({}, step)})
                return _step_tensor(step)
            if name not in names:
                raise ConfigError("state", name, f"assign step, {', '.join(names)}")
            values = in_memory_order(f"state {name}", value, bound)
            weight = bound.local
            # The entry's new copy, which shares no memory with the user's tensor.
            copy = torch.empty_strided(weight.size(), weight.stride(), dtype=torch.float32, device="cpu")
            copy.copy_(shards.rank_elements_of(f"state {name}", value.detach(), bound.cut))
            self._write({bound: ({name: values}, None)})
            flat_copy = copy.as_strided((weight.numel(),), (1,))
            return shards.in_form(flat_copy, parameter, bound.cut)

    def checked_entry(self, what: str, entry: Mapping[str, Any], bound: BoundParameter) -> Entry:
        """Check one parameter's whole state that a user gives, and return it ready to be written.

        The master may be missing. So may the step count, if other implementations of the rule have none (SGD's, say):
        it is 1 then.

        Args:
            what: What the entry is, for errors.
            entry: The state as the user gives it.
            bound: The parameter.

        Raises:
            ConfigError: A tensor or the step count is missing or cannot be used, or the state is of another rule.
        """
        entry = entry if isinstance(entry, Mapping) else {}  # of which the missing tensors are refused below
        rule = self.rule_of(bound)
        names_of_rules = {name for each_rule in NAMED.values() for name in each_rule.state}
        other_names = names_of_rules.difference(rule.names)
        # A name with the value None does not count: torch's SGD has it for a momentum buffer that it has not made.
        foreign_names = sorted(name for name in other_names.intersection(entry) if entry[name] is not None)
        if foreign_names:
            own_name = rule.names[1]  # a tensor that shows the rule: [0] is the master, which all rules have
            raise ConfigError(what, ", ".join(foreign_names), f"it is of another rule: here there is {own_name}")
        step = checked_step(f"{what}.step", entry.get("step", rule.missing_step))
        given_names = [name for name in rule.names if name != MASTER or not _is_missing(entry.get(name))]
        return {name: in_memory_order(f"{what}.{name}", entry.get(name), bound) for name in given_names}, step

    def replace_all(self, entries: Mapping[BoundParameter, Entry]) -> None:
        """Replace the state of all parameters; those without an entry are reset."""
        engine = self._holder.engine
        positions_to_reset = [bound.position for bound in self._weights.bound.values() if bound not in entries]
        with self._lock:
            self.copies.unwatch_all()  # changes in place of copies are not refused: the refusal advises to load state
            self._weights.rebind_changed()
            self.note_change()
            self._only_masters.clear()
            self._replace(entries)
            for position in positions_to_reset:
                engine.reload_master(position)  # from the weight, as for new parameters: `reset` keeps masters
            if positions_to_reset:
                engine.state.reset(positions_to_reset)

    def reset(self, parameters: Iterable[torch.Tensor] | None) -> None:
        """Forget moments and step counts, of all parameters if None; see `StatefulOptimizer.reset_state`."""
        with self._lock:
            if self._holder.engine_if_open is None and parameters is None:
                return  # nothing has been updated; parameters that are given are looked up, to refuse other models'
            to_reset = self._weights.bound if parameters is None else parameters
            bounds = [self._weights.of(parameter) for parameter in to_reset]
            # Changes in place of these copies are not refused: the refusal advises a reset.
            self.copies.unwatch_of(bound.parameter for bound in bounds)
            self._weights.rebind_changed()
            self.note_change()
            with_state = {*self.with_state()}  # before their step counts become 0
            self._only_masters.update(  # state dicts keep these masters, which are more exact than the weights
                bound.parameter for bound in bounds if bound.parameter in with_state and self._has_master(bound)
            )
            self._holder.engine.state.reset([bound.position for bound in bounds])
            self.write_start_values(bounds)  # the engine zeroed all moments, and some rules start from other values

    def note_loaded(self, bounds: Iterable[BoundParameter]) -> None:
        """Note that a checkpoint has replaced all state.

        `bounds` are the parameters that it has no state of: they begin anew, from their start values. Of others that
        were saved without an update, state dicts contain the master, if there is one beside the weight.
        """
        without_saved_state = {*bounds}
        engine = self._holder.engine
        self._only_masters = {
            bound.parameter
            for bound in self._weights.bound.values()
            if bound not in without_saved_state and self._has_master(bound) and not engine.step_count(bound.position)
        }
        self.write_start_values(without_saved_state)

    def _replace(self, entries: Mapping[BoundParameter, Entry]) -> None:
        """Write whole entries; where an entry has no master, the next step takes the master from the weight."""
        self._write(entries)
        for bound, (tensors, _) in entries.items():
            if MASTER in tensors:
                self._only_masters.add(bound.parameter)  # the master counts even if the step count is 0
            else:
                self._holder.engine.reload_master(bound.position)

    def _write(self, entries: Mapping[BoundParameter, Entry]) -> None:
        """Write tensors and step counts to the engine.

        Weights become the roundings of masters that are written. Where they are cut by rows or dealt, ranks exchange
        them then, a collective.
        """
        self.changes += 1
        masters = {bound: tensors[MASTER] for bound, (tensors, _) in entries.items() if MASTER in tensors}
        if masters:
            # `gather` below sends all weights, so users' changes of other weights have to reach their ranks first.
            self._weights.refresh(gradients=False)
        different = differing(masters)  # before the engine sets the weights to the rounded masters
        self._holder.engine.state.write(
            {bound.position: tensors for bound, (tensors, _) in entries.items() if tensors},
            {bound.position: step for bound, (_, step) in entries.items() if step is not None},
        )
        self._weights.note_written(masters)
        self._weights.note_different(different)  # after `note_written`, which forgets earlier differences
        if masters:  # else no weight has changed
            self._weights.gather()

    def __contains__(self, parameter: object) -> bool:
        """Return whether a parameter has state, or there is an entry under a key that is no tensor."""
        if not isinstance(parameter, torch.Tensor):
            return parameter in self.others
        return parameter in self._weights.bound and self._has_state(parameter, self._start_values())

    def _has_state(self, parameter: torch.Tensor, start_values: Mapping[torch.Tensor, Any]) -> bool:
        """Return whether `state` has a bound parameter; `start_values` is what `_start_values` returns."""
        return (
            parameter in self._shown_as_zeros
            or parameter in start_values
            or self._holder.engine.step_count(self._weights.bound[parameter].position) > 0
        )

    def with_state(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that `state` has: updated, shown as zeros, or with start values that are not 0."""
        start_values = self._start_values()
        # Of a list, as a caller may have parameters added, say by a step, while it iterates.
        return (parameter for parameter in [*self._weights.bound] if self._has_state(parameter, start_values))

    def in_state_dict(self) -> list[torch.Tensor]:
        """Return the parameters that a state dict has: with state, or after `reset` with a master alone."""
        included = {*self.with_state()} | self._only_masters
        return [parameter for parameter in self._weights.bound if parameter in included]

    def is_of_parameter(self, entry: object) -> bool:
        """Return whether an entry of a state dict looks like a parameter's state: has a name that a rule uses."""
        all_rules = [self._rule, *(parameter.rule for parameter in self._layout.parameters)]
        names = {"step", *(name for rule in {*all_rules} if rule is not None for name in rule.names)}
        return isinstance(entry, Mapping) and not names.isdisjoint(entry)

    @property
    def _layout(self) -> Layout:
        """The engine's layout; an empty one before the engine is opened."""
        engine = self._holder.engine_if_open
        return Layout((), ()) if engine is None else engine.plan.layout

    def _entries(self, parameters: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Read the state of parameters; return entries whose items can be assigned."""
        pairs = zip(parameters, self.read(parameters), strict=True)
        return [StateEntry(self, parameter, entry) for parameter, entry in pairs]

    def __getitem__(self, parameter: Any) -> Any:
        """Return a copy of a parameter's state; for a key that is no tensor, the entry itself, made if missing."""
        if not isinstance(parameter, torch.Tensor):
            return self.others.setdefault(parameter, {})  # torch's is a defaultdict
        if parameter not in self:
            raise KeyError(parameter)
        return self._entries([parameter])[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield the parameters that have state, and then all other keys."""
        return chain(self.with_state(), [*self.others])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: the state is not in this object."""
        raise ConfigError("optimizer", self._owner_name, "copy or save optimizer.state_dict() instead")

    def items(self) -> Any:
        """Return all (parameter, state) pairs; all state is read in one sweep over all tiers."""
        parameters = [*self.with_state()]
        return {**dict(zip(parameters, self._entries(parameters), strict=True)), **self.others}.items()

    def __setitem__(self, parameter: Any, entry: Any) -> None:
        """Replace a parameter's state, as `load_state_dict` does; an empty mapping resets it.

        A key that is no tensor is stored in `others`.

        Raises:
            ConfigError: The entry is not a parameter's whole state.
        """
        if not isinstance(parameter, torch.Tensor):
            self.others[parameter] = entry
            return
        if not isinstance(entry, Mapping):
            *names, last = "step", *self._rule.names[1:]  # without the master, which may be missing
            raise ConfigError("state", type(entry).__name__, f"assign a mapping of {', '.join(names)} and {last}")
        if is_empty(entry):
            self.reset([parameter])
            return
        bound = self._weights.of(parameter)
        whole_entry = self.checked_entry("state", entry, bound)
        with self._lock:
            self._weights.rebind_changed()
            self._replace({bound: whole_entry})

    def __delitem__(self, parameter: Any) -> None:
        """Reset a parameter's state; delete an entry under a key that is no tensor."""
        if parameter not in self:
            raise KeyError(parameter)
        if not isinstance(parameter, torch.Tensor):
            del self.others[parameter]
            return
        self.reset([parameter])

    def clear(self) -> None:
        """Reset the state of all parameters, and delete entries under other keys."""
        self.reset(None)
        self.others.clear()

    def get(self, parameter: Any, default: Any = None) -> Any:
        """Return the entry of a key, or `default`; this adds no entry, as `[]` does for a key that is no tensor."""
        if parameter not in self:
            return default
        return self[parameter]

    def pop(self, parameter: Any, *default: Any) -> Any:
        """Return and delete the entry of a key, or return `default`; a parameter's state is reset."""
        if parameter not in self and default:
            return default[0]
        if parameter not in self:
            raise KeyError(parameter)
        entry = self[parameter]
        del self[parameter]
        return entry

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        """Return the entry of a key, after adding `default` if there is none; not for parameters.

        Raises:
            KeyError: A parameter has not been updated.
        """
        return self[parameter] if isinstance(parameter, torch.Tensor) else self.others.setdefault(parameter, default)


def is_empty(entry: object) -> bool:
    """Return whether an entry is that of a parameter that was never updated.

    It is empty, or each value is None, as torch's SGD has it without a momentum buffer.
    """
    return isinstance(entry, Mapping) and all(value is None for value in entry.values())


def _is_missing(value: object) -> bool:
    """Return whether a value is missing: None, or an empty mapping, as torch.distributed.checkpoint has it."""
    return value is None or (isinstance(value, Mapping) and not value)


def _step_tensor(step: int) -> torch.Tensor:
    """Return a step count as torch's optimizers have it."""
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def in_memory_order(what: str, tensor: object, bound: BoundParameter) -> torch.Tensor:
    """Return this rank's elements of a user's tensor, with its dimensions in the order of the weight's memory.

    State is written in row-major order, and lies in the order of its weight's memory. So the dimensions are permuted
    such that row-major order is the weight's: that of the weight's largest stride first. No element is copied.

    Args:
        what: What the tensor is, for errors.
        tensor: What the user gave; anything but a tensor of the parameter's shape is refused.
        bound: The parameter.
    """
    parameter = bound.parameter
    if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape:
        given = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(what, given, f"it must be a tensor of {tuple(parameter.shape)}")
    rank_elements = shards.rank_elements_of(what, tensor.detach(), bound.cut)
    refuse_uncopyable(rank_elements, what)
    strides = bound.local.stride()
    axes_by_stride = sorted(range(rank_elements.dim()), key=lambda axis: -strides[axis])
    return rank_elements.permute(axes_by_stride)
