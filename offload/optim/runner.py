"""Runs an optimizer class of torch's kind on views of packed state, one parameter at a time; for `wrap`.

Which state the class keeps is found out by two steps on fake tensors (without memory), as some state appears only in
the first step. A class may change its group (hyperparameters) in a step, as one with a schedule of its own does. As
each parameter is updated alone, each update starts from the group as it was before the step; all updates have to
leave the group alike, and the change is made once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.checkpoint.manifest import check_text
from offload.dtypes import DtypeCode
from offload.errors import ConfigError, OffloadError, known
from offload.kernels.pieces import Piece, step_alone
from offload.kernels.reference import DTYPE_CODES, TORCH_DTYPES, SegmentTensors
from offload.layout import Parameter
from offload.optim import shards
from offload.optim.groups import is_plain
from offload.optim.packing import Form, Packing
from offload.protocols import SegmentFlag
from offload.rules import MASTER, PACKED, ClassRule, plain_number

Group = dict[str, Any]
"""A parameter group as torch has it, or its hyperparameters alone."""


class _Trial(NamedTuple):
    """A small parameter on which the class is tried: its name, a tensor of its form, and its group."""

    name: str
    like: torch.Tensor
    group: Mapping[str, Any]


class _PackingKey(NamedTuple):
    """What decides how a parameter's state is packed: parameters with the same key share a packing.

    Attributes:
        name: Of a parameter on which the user has set attributes, as the class may look at them; "" for all others.
        group: The number of its group.
        shape, stride: Its shape and strides.
        master_dtype: The dtype in which the class updates it.
    """

    name: str
    group: int
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    master_dtype: DtypeCode


REFUSED = {
    torch.optim.LBFGS: "it calls the model, and looks at all parameters at once",
    torch.optim.SparseAdam: "its gradients are sparse",
}
"""Classes that cannot be run one parameter at a time, and why."""

NOT_HERE = ("fused", "capturable", "differentiable")
"""Options of torch's own classes that need state which stays at its address."""

STEPS = 2
"""Steps on fake tensors in which the state is found out."""

TRIAL_SCALES = (1e-4, 1.0, 30.0, 1 / 30)
"""Scales of gradients in a trial's steps: some classes treat large or small ones differently."""

MOST_TRIAL_NUMEL = 1 << 16
"""Most elements of a parameter in a trial with real tensors."""

OWN_ATTRIBUTES = frozenset({"state", "param_groups", "defaults"})
"""Attributes of any optimizer that are handled here; a class must not keep state in others."""


LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""The operations by which `torch.tensor` makes a tensor of the numbers that it is given."""


class _ReadsAsOne(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes fake tensors read as the number 1: a class may read one, for an `if`, and fake tensors have no values.

    Operations on real tensors alone are computed, and read as what they are: a rate may be given as a real tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; return 1 in the tensor's type where a fake tensor is read. torch calls this."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        is_new = func in LIFTS  # the class makes a tensor of numbers, which is to be fake
        # An operation on real tensors alone is computed outside the fake mode, unless it would change one of them: a
        # trial changes nothing real.
        if tensors and not is_new and not func._schema.is_mutable and not any(map(_is_fake, tensors)):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:  # what a fake tensor raises when its value is read
            dtype = args[0].dtype
            if dtype is torch.bool:
                return True
            return 1.0 if dtype.is_floating_point else 1


@contextmanager
def _without_memory() -> Iterator[None]:
    """Make tensors that are made in a `with` block fake: they have dtypes, shapes and strides, and no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True), _ReadsAsOne():  # type: ignore[no-untyped-call]
        yield


class ClassRunner:
    """Runs one optimizer class on packed state, for `ClassRule`, whose `Runner` it is.

    Args:
        kind: The class.
        args: The class's arguments after the parameters.
        kwargs: Its keyword arguments.
        masters: Whether 16-bit weights have fp32 masters, which the class then updates.
        widens: Whether gradients of 16-bit weights are fp32.

    Attributes:
        name: The class's.
        of_class, masters, widens: As given.
        calls_closure_first: Whether the class calls a closure once, before its update, or never.
        changes_groups: Whether the class changes its groups in a step.

    Raises:
        ConfigError: It is no optimizer class, or cannot be run in this way.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        masters: bool,
        widens: bool,
    ) -> None:
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError("wrap", kind, "give a class of torch.optim.Optimizer, and its arguments after it")
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        for refused, why in REFUSED.items():
            if issubclass(kind, refused):
                raise ConfigError("wrap", self.name, f"use another class: {why}")
        self.of_class = kind
        self._args = args
        self._kwargs = dict(kwargs)
        self.masters = masters
        self.widens = widens
        self._packings: dict[_PackingKey, Packing] = {}  # as `rule_of` has found them
        self._groups: dict[int, Group] = {}  # as they were at first, by number
        # Each parameter's group, and its own `__dict__`, by name: the class may look at attributes.
        self._attributes: dict[str, tuple[int, dict[str, Any]]] = {}
        self._attributes_in_step: dict[str, dict[str, Any]] | None = None  # copies, while a step is under way
        self._is_trial = False
        self._with_attributes: set[str] = set()  # names of parameters that had attributes when they were noted
        self._with_names: set[int] = set()  # numbers of groups whose parameters were given names
        self._starts_with_state = False  # whether the class makes state in its constructor
        self.calls_closure_first = True
        self.changes_groups = False
        self._groups_after: dict[int, tuple[Mapping[str, Any], Group]] = {}  # before and after this step, by number
        self._tried_forms: set[tuple[Any, ...]] = set()  # of `check_alone`: a group's number and kinds of parameters

    def begin_step(self) -> None:
        """Note parameters' attributes for this step, and forget the groups as the last step has left them."""
        self._attributes_in_step = {name: dict(own) for name, (_, own) in self._attributes.items() if own}
        self._groups_after.clear()

    def end_step(self) -> None:
        """Forget the attributes that were noted for a step: some hold memory."""
        self._attributes_in_step = None

    def _make_optimizer(self, params: Sequence[Any]) -> torch.optim.Optimizer:
        """Return a new optimizer of the class for parameters or groups, with the arguments that the user gave."""
        return self.of_class(params, *self._args, **self._kwargs)

    def complete_groups(self, params: Iterable[Any]) -> tuple[list[Group], dict[str, Any]]:
        """Complete groups by the hyperparameters that the class adds, by making an optimizer of the class.

        It is made with trial tensors, of the parameters' shapes and without memory, so nothing is allocated. This
        runner keeps it: updates lend it one parameter's view and state after another.

        Args:
            params: The parameters or groups, as for the class.

        Returns:
            The groups, with the user's parameters and all hyperparameters; and the class's defaults.

        Raises:
            ConfigError: An option cannot be used here, or the class has tensors outside of its state, or makes groups
                of its own.
        """
        # As in torch: one parameter or group, or several of a kind; a parameter may be a pair of name and tensor.
        entries = [params] if isinstance(params, torch.Tensor | Mapping) else [*params]
        are_groups = not entries or isinstance(entries[0], Mapping)  # no entries stay none, which torch refuses
        groups = [*map(dict, entries)] if are_groups else [{"params": entries}]
        for group in groups:
            items = group.get("params", ())
            group["params"] = [items] if isinstance(items, torch.Tensor) else [*items]
        trial_tensors: dict[int, torch.Tensor] = {}  # by id of the parameter
        with _without_memory():
            trial_groups = [
                {**group, "params": [_trial_tensor_of(item, trial_tensors) for item in group["params"]]}
                for group in groups
            ]
            # Groups or parameters, as the user gave them: the class may tell the two apart.
            optimizer = self._make_optimizer(trial_groups if are_groups else trial_groups[0]["params"])
        self._check_same_groups(optimizer, trial_groups)
        self._inner = optimizer  # `step_packed` lends it one parameter after another
        self._check_own_tensors(optimizer)
        self._starts_with_state = bool(optimizer.state)
        pairs = zip(optimizer.param_groups, groups, strict=True)
        full_groups = [{**_without_parameters(own), "params": group["params"]} for own, group in pairs]
        for group in full_groups:
            for option in NOT_HERE:
                if group.get(option):
                    raise ConfigError(option, True, f"leave it out: {self.name} runs on views of state on its way")
        return full_groups, dict(optimizer.defaults)

    def _check_same_groups(self, optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
        """Refuse a class that regroups its parameters: its groups have to have those of `groups`, in their order."""
        # The tensor of each item, which may be a pair of name and tensor.
        ids = [{id(item[-1] if isinstance(item, tuple) else item) for item in group["params"]} for group in groups]
        if [{*map(id, group["params"])} for group in optimizer.param_groups] != ids:
            advice = (
                "use one that keeps its groups, and give it those that this one makes: of "
                f"{len(groups)} it has made {len(optimizer.param_groups)}, with other parameters"
            )
            raise ConfigError("wrap", self.name, advice)

    def _check_own_tensors(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a class that has tensors in attributes or groups: only its state is stored."""
        attributes = _other_attributes(optimizer)
        values_by_place = [("an attribute", attributes)]
        values_by_place += [("a group", _without_parameters(group)) for group in optimizer.param_groups]
        for place, values in values_by_place:
            for name, value in values.items():
                if _is_fake(value):
                    raise self._refusal(f"a tensor of its own, {name!r}, as {place}")

    # What is kept

    def rule_of(self, parameter: torch.Tensor, name: str, group: Mapping[str, Any], number: int) -> ClassRule:
        """Return the rule of a parameter in group `number`.

        Which state the class keeps is found out by a trial on fake tensors, once for each shape, dtype and group. The
        trial also notes whether the class changes groups. The first call for a group notes its hyperparameters.

        Raises:
            ConfigError: The class keeps a value that cannot be packed; names the parameter.
        """
        dtype = torch.float32 if self.masters else parameter.dtype
        self._groups.setdefault(number, deepcopy(_without_parameters(group)))
        shape, stride = tuple(parameter.shape), tuple(parameter.stride())
        key = _PackingKey(self._name_in_key(name), number, shape, stride, DTYPE_CODES[dtype])
        if key not in self._packings:
            self._packings[key] = self._find_packing(parameter, dtype, group, name, number)
        packing = self._packings[key]
        keys = ", ".join(map(str, packing.keys))  # in the rule's name: other keys, or another order, are another rule
        return ClassRule(f"{self.name}({keys})", packing.words, DTYPE_CODES[dtype], self)

    def _find_packing(
        self, parameter: torch.Tensor, dtype: torch.dtype, group: Mapping[str, Any], name: str, number: int
    ) -> Packing:
        """Try the class on a fake tensor like a parameter; return how the state that it keeps is packed."""
        with self._raising_config_error(name):
            forms = self._find_forms(tuple(parameter.shape), tuple(parameter.stride()), dtype, group, name, number)
        if self.masters and MASTER in forms:
            raise self._refusal(f"{MASTER!r} of its own, beside those of masters=True", name)
        try:
            return Packing(forms, parameter.numel())
        except TypeError as cause:  # too many values
            raise self._refusal(cause, name) from cause

    def note_parameters(
        self, parameters: Iterable[tuple[str, torch.Tensor]], number: int, *, have_names: bool
    ) -> None:
        """Note the parameters of group `number`, and whether the user has named them.

        A class may look at attributes that the user has set on a parameter, and at its group's "param_names".
        """
        for name, parameter in parameters:
            # Decided when a parameter is first noted: with another key its packing would not be found later.
            if name not in self._attributes and vars(parameter):
                self._with_attributes.add(name)
            self._attributes[name] = number, vars(parameter)
        if have_names:
            self._with_names.add(number)

    def _as_parameter(self, tensor: torch.Tensor, name: str, *, is_trial: bool = True) -> torch.nn.Parameter:
        """Return a tensor as a parameter, with the attributes that the user has set on the parameter of this name.

        In an update the class gets the user's own values; in a trial copies of lists, tensors and the like, which the
        class may change in place.
        """
        parameter = torch.nn.Parameter(tensor)
        if self._attributes_in_step is not None:
            own = self._attributes_in_step.get(name, {})
        else:
            _, own = self._attributes.get(name, (0, {}))
        _set_attributes(parameter, own, _copied if is_trial or self._is_trial else None)
        return parameter

    def _group_of(
        self, parameters: Sequence[torch.Tensor], names: list[str], values: Mapping[str, Any], number: int
    ) -> Group:
        """Return a new group of these parameters, with copies of the hyperparameters `values`.

        It has the parameters' `names` if the user has named the parameters of group `number`.
        """
        named = {"param_names": names} if number in self._with_names else {}
        return {**deepcopy(dict(values)), "params": [*parameters], **named}

    def forget_group(self, number: int) -> None:
        """Forget a group that could not be added, as another one may get its number."""
        self._groups.pop(number, None)
        self._with_names.discard(number)
        for name in [name for name, (group, _) in self._attributes.items() if group == number]:
            del self._attributes[name]
            self._with_attributes.discard(name)
        for key in [key for key in self._packings if key.group == number]:
            del self._packings[key]
        self._tried_forms = {tried for tried in self._tried_forms if tried[0] != number}

    def packing_of(self, parameter: Parameter) -> Packing:
        """Return how the state of a parameter of the layout is packed."""
        dtype = known(parameter.rule, "a parameter without a rule").master_dtype
        name = self._name_in_key(parameter.name)
        return self._packings[_PackingKey(name, parameter.group, parameter.shape, parameter.stride, dtype)]

    def _name_in_key(self, name: str) -> str:
        """Return the name that a parameter has in `_PackingKey`."""
        return name if name in self._with_attributes else ""

    @property
    def keys(self) -> set[Any]:
        """All keys that the state of some parameter may have."""
        return {key for packing in self._packings.values() for key in packing.keys}

    def _gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the gradients that the class gets for weights of a dtype."""
        return torch.float32 if self.widens else dtype

    def _refusal(self, what: object, parameter: str = "") -> ConfigError:
        """Return an error for a class that keeps something else than tensors and numbers for its parameters."""
        of = f", of {parameter}" if parameter else ""
        advice = f"use a class that keeps tensors and numbers for parameters: it has {what}{of}"
        return ConfigError("wrap", self.name, advice)

    @contextmanager
    def _raising_config_error(self, parameter: str) -> Iterator[None]:
        """Turn errors of the class in a `with` block into a `ConfigError` that names the class and the parameter."""
        try:
            yield
        except OffloadError:
            raise
        except Exception as cause:
            advice = f"use a class that can update {parameter}: it raised {type(cause).__name__}: {cause}"
            raise ConfigError("wrap", self.name, advice) from cause

    def _find_forms(
        self,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        group: Mapping[str, Any],
        name: str,
        number: int,
    ) -> dict[Any, Form | None]:
        """Return the form of each value that the class keeps of a parameter, by key, after `STEPS` fake steps.

        A value that was None after each step has no form: None. Also notes whether the class changes its group in a
        step.

        Args:
            size: The parameter's shape.
            stride: Its strides.
            dtype: The dtype in which the class updates it.
            group: Its group's hyperparameters.
            name: Its name.
            number: Its group's number.
        """
        forms: dict[Any, Form | None] = {}
        before = _without_parameters(group)
        # Copied outside of the fake mode, so that a rate that is a real tensor stays one; its parameter is set below.
        own_group = self._group_of([], [name], before, number)
        with _without_memory():
            trial_tensor = self._as_parameter(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), name)
            own_group["params"] = [trial_tensor]
            optimizer = self._make_optimizer([own_group])
            for step in range(STEPS + 1):
                if step:  # state is looked at before the first step, too: some classes make it in their constructor
                    gradient_dtype = self._gradient_dtype(dtype)
                    gradient = torch.empty_strided(size, stride, dtype=gradient_dtype, device="cpu")
                    _set_grad(trial_tensor, gradient)
                    step_alone(optimizer)
                # torch allows other keys than parameters in `state`; their values would be stored nowhere.
                if stray := [key for key in optimizer.state if key is not trial_tensor]:
                    raise self._refusal(f"{stray[0]!r} of none")
                for key, value in optimizer.state.get(trial_tensor, {}).items():
                    form = self._form_of(key, value, name)
                    # A form must not become another one. None is no form: a value may come, or go, in a later step.
                    if forms.get(key) not in (None, form) and form is not None:
                        raise self._refusal(f"{key!r}, which was {forms[key]} and is {form} a step later", name)
                    forms[key] = form or forms.get(key)  # None as long as only None was seen
            self._note_changes_of_group(before, _without_parameters(optimizer.param_groups[0]))
        return forms

    def _form_of(self, key: Any, value: Any, parameter: str) -> Form | None:
        """Return the form of a value that the class keeps; refuse what cannot be packed or named in a checkpoint."""
        try:
            form = Form.of(value)
            if not is_plain(key) or isinstance(key, torch.Tensor):  # `is_plain` takes tensors of one element, too
                raise TypeError("a key that is neither text nor number")
            check_text(str(key))
        except (TypeError, ValueError) as cause:
            raise self._refusal(f"{key!r}, {cause}", parameter) from cause
        return form

    def _note_changes_of_group(self, before: Group, after: Group) -> None:
        """Note whether the class changes its group in a step; refuse changes that no checkpoint could hold."""
        changed = _changed_names(before, after)
        # (A name that the class has removed is not among `changed`.)
        self.changes_groups |= bool(changed) or before.keys() != after.keys()
        if not_plain := [name for name in changed if not is_plain(after[name])]:
            raise self._refusal(f"{not_plain[0]!r} in its groups, which changes, and no checkpoint could hold")

    # Trials

    def check_alone(
        self, parameters: Iterable[tuple[str, torch.Tensor]], group: Mapping[str, Any], number: int
    ) -> None:
        """Refuse a class whose update of a parameter depends on other parameters or groups, as here it runs alone.

        The class is tried on small real tensors. They are like the smallest parameter of each *kind* (dtype and
        number of dimensions) of group `number`; one more is like a parameter of the first kind; and so is the last,
        which is in a second group with half the rate. One optimizer of the class updates all of them together, and
        this runner updates each by itself. The results have to be equal.

        Args:
            parameters: The group's parameters, each after its name.
            group: Its hyperparameters.
            number: Its number.

        Raises:
            ConfigError: The results differ; or the class keeps something in attributes of its own.
        """
        parameters = [*parameters]
        smallest = self._smallest_by_kind(parameters)
        if not smallest or (number, *smallest) in self._tried_forms:  # nothing is updated, or this was tried before
            return
        first_kind, *_ = smallest
        # Up to two more parameters of the first kind.
        others = [named for named in parameters if named[0] != smallest[first_kind][0]]
        more = [named for named in others if first_kind in self._smallest_by_kind([named])][:2]
        # If there are not two, the first one takes their place; unless the user has named the group's parameters, as
        # real names never stand twice in a group.
        if number not in self._with_names:
            more += [smallest[first_kind]] * (2 - len(more))
        trials = _trials_of([*smallest.values()], more, _without_parameters(group))
        # Find out how their state is packed, and whether groups change: `_step_alone` runs on a copy of this runner,
        # and what only the copy notes is lost.
        for trial in trials:
            self.rule_of(trial.like, trial.name, group, number)
        with torch.random.fork_rng(devices=[]):  # the trial seeds the CPU's generator, which is restored afterwards
            optimizer, results = self._step_together(trials, number)
            alone = copy(self)  # another thread may be using `self._inner`
            alone._inner = optimizer
            alone._is_trial = True
            has_types = len({dtype for dtype, _ in smallest}) > 1
            for at, (trial, expected) in enumerate(zip(trials, results, strict=True)):
                if not _are_equal(alone._step_alone(trial, number, at), expected):
                    advice = (
                        "use one that updates each parameter by itself, from its own gradient, state and group: in "
                        f"memory, beside another one or another group, it does something else to {trial.name}"
                        f"{'; or give weights of each type a group of their own' if has_types else ''}"
                    )
                    raise ConfigError("wrap", self.name, advice)
            self._try_closure(trials[0], number)
        self._tried_forms.add((number, *smallest))

    def _try_closure(self, trial: _Trial, number: int) -> None:
        """Note whether the class calls a closure as it is called here, once and before the update; or never."""
        dtype = torch.float32 if self.masters else trial.like.dtype
        trial_tensor, optimizer = self._trial_optimizer(tuple(trial.like.shape), dtype, number, trial.name)
        before = trial_tensor.detach().clone()
        calls: list[bool] = []  # for each call: whether it came before the update, so that the tensor was as before

        @torch.no_grad()
        def closure() -> torch.Tensor:
            """Note a call; return a loss."""
            calls.append(torch.equal(trial_tensor, before))
            return torch.ones((), dtype=torch.float32, device="cpu")

        with suppress(Exception):  # a class whose step takes no closure raises, and has called none
            step_alone(optimizer, closure)
        self.calls_closure_first &= calls in ([], [True])

    def _smallest_by_kind(
        self, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[tuple[torch.dtype, int], tuple[str, torch.Tensor]]:
        """Return the smallest parameter of each kind, after its name; without frozen and empty ones.

        The kind is the dtype in which the class updates a parameter, and its number of dimensions.
        """
        smallest: dict[tuple[torch.dtype, int], tuple[str, torch.Tensor]] = {}
        for name, parameter in parameters:
            kind = torch.float32 if self.masters else parameter.dtype, parameter.dim()
            if not parameter.numel() or not parameter.requires_grad:
                continue
            if kind not in smallest or parameter.numel() < smallest[kind][1].numel():
                smallest[kind] = name, parameter
        return smallest

    def _random_values(self, like: torch.Tensor, at: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return random values for trial number `at`: its weight, and its gradient in each step, all flat.

        They are the same at each call, so that a trial can be repeated.
        """
        generator = torch.Generator().manual_seed(at)
        dtype = torch.float32 if self.masters else like.dtype

        def draw() -> torch.Tensor:
            """Return new random values in the weight's dtype."""
            flat = torch.empty(like.numel(), dtype=torch.float32, device="cpu")
            return flat.normal_(generator=generator).to(dtype)

        weight = draw()
        gradients = [(draw() * scale).to(self._gradient_dtype(dtype)) for scale in TRIAL_SCALES]
        return weight, gradients

    def _step_together(self, trials: Sequence[_Trial], number: int) -> tuple[torch.optim.Optimizer, list[Any]]:
        """Update the weights of all trials, of group `number`, by one optimizer of the class, in several steps.

        The last trial has a group of its own.

        Returns:
            The optimizer; and for each trial what `_step_alone` is to return: weight, state and group afterwards.

        Raises:
            ConfigError: The class drops `.grad` in a step, or changes its own attributes.
        """
        torch.default_generator.manual_seed(0)  # as in `_step_alone`: the class may draw random numbers
        drawn = [self._random_values(trial.like, at) for at, trial in enumerate(trials)]
        forms = [(trial.like.size(), trial.like.stride()) for trial in trials]
        names = [trial.name for trial in trials]
        weights = [
            self._as_parameter(flat.as_strided(*form), name)
            for (flat, _), form, name in zip(drawn, forms, names, strict=True)
        ]
        with self._raising_config_error(", ".join(dict.fromkeys(names))):
            first_group = self._group_of(weights[:-1], names[:-1], trials[0].group, number)
            slower_group = self._group_of(weights[-1:], names[-1:], trials[-1].group, number)
            optimizer = self._make_optimizer([first_group, slower_group])
            before = {name: _deep_copy(value) for name, value in _other_attributes(optimizer).items()}
            for step in range(len(TRIAL_SCALES)):
                for weight, (_, gradients), form in zip(weights, drawn, forms, strict=True):
                    _set_grad(weight, gradients[step].as_strided(*form))
                step_alone(optimizer)
                # In real updates the class is given a view of the weight. It would drop the view's gradient alone,
                # and the model would keep its own.
                if any(weight.grad is None for weight in weights):
                    advice = "use one that leaves .grad to the loop, which calls zero_grad: it drops them in its step"
                    raise ConfigError("wrap", self.name, advice)
        for name, value in _other_attributes(optimizer).items():  # these would not be offloaded, nor saved
            if not _are_equal(before.get(name), value):
                advice = f"use one that keeps all in its state and groups: it changes its attribute {name!r}"
                raise ConfigError("wrap", self.name, advice)
        first_after, slower_after = (_without_parameters(group) for group in optimizer.param_groups)
        groups = [first_after] * (len(trials) - 1) + [slower_after]
        return optimizer, [
            (weight.detach(), dict(optimizer.state.get(weight, {})), group)
            for weight, group in zip(weights, groups, strict=True)
        ]

    @torch.no_grad()
    def _step_alone(self, trial: _Trial, number: int, at: int) -> Any:
        """Update one trial's weight as the engine would, by `update` on packed state, in several steps.

        Args:
            trial: The trial.
            number: The group's number.
            at: The trial's number, which decides its random values.

        Returns:
            Weight, state and group afterwards, to be compared with those of `_step_together`.
        """
        torch.default_generator.manual_seed(0)  # as in `_step_together`
        name, like, values = trial
        weight, gradients = self._random_values(like, at)
        rule = self.rule_of(like, name, values, number)
        code = DTYPE_CODES[weight.dtype]
        parameter = Parameter(
            name, weight.numel(), code, number, shape=(*like.shape,), stride=like.stride(), rule=rule
        )
        # All 0: there is no state yet.
        packed_words = torch.zeros(rule.numel_of(PACKED, weight.numel()), dtype=torch.float32, device="cpu")
        for gradient in gradients:
            self._groups_after = {}  # a new dict: this runner is a shallow copy, and the original has the old one
            scalars = rule.row(1, values, grad_scale=1.0)  # a class's rule looks at no step number, so 1 each time
            segment = SegmentTensors(
                weight, state=(), gradient=gradient.clone(), weight=None, flags=SegmentFlag(0), scalars=scalars
            )
            self.update(Piece(parameter, segment, packed_words), number, values)
            values = {**values, **self.group_changes_after(number, values)}
        state = self.packing_of(parameter).load(packed_words)
        return weight.as_strided(like.size(), like.stride()), state, values

    def state_of_empty(self, parameter: Parameter, count: int) -> dict[Any, Any]:
        """Return the state of a parameter without elements, after `count` updates.

        Nothing is stored of such a parameter, so the class makes its state anew, in a step of a trial tensor. The
        state's "step", if that is a number, then becomes `count`.
        """
        dtype = TORCH_DTYPES[known(parameter.rule, "a parameter without a rule").master_dtype]
        shape = known(parameter.shape, "a parameter without a shape")
        trial_tensor, optimizer = self._trial_optimizer(shape, dtype, parameter.group, parameter.name)
        step_alone(optimizer)
        state = dict(optimizer.state.get(trial_tensor, {}))
        if "step" in state:
            with suppress(TypeError):  # it is no count, and stays as the class has made it
                state |= self.packing_of(parameter).cast({"step": float(count)})
        return state

    def trial(self, shape: tuple[int, ...], dtype: torch.dtype, group: int, name: str) -> Callable[[], None]:
        """Return a function that makes one update of a new tensor of this shape and dtype, to be timed."""
        _, optimizer = self._trial_optimizer(shape, torch.float32 if self.masters else dtype, group, name)
        return partial(step_alone, optimizer)

    def _trial_optimizer(
        self, shape: tuple[int, ...], dtype: torch.dtype, group: int, name: str
    ) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        """Return a new tensor with a gradient, and an optimizer of the class that has this tensor alone.

        The tensor's group has the hyperparameters that group `group` had at first; if no parameter of that group was
        seen, those of the class.
        """
        trial_tensor = self._as_parameter(torch.ones(shape, dtype=dtype, device="cpu"), name)
        _set_grad(trial_tensor, torch.ones(shape, dtype=self._gradient_dtype(dtype), device="cpu"))
        own_group = self._group_of([trial_tensor], [name], self._groups.get(group, {}), group)
        return trial_tensor, self._make_optimizer([own_group])

    # Updates

    def update(self, piece: Piece, group: int, values: Mapping[str, Any]) -> None:
        """Run a step of the class on one parameter, whose weight and packed state change in place.

        Args:
            piece: The parameter's tensors.
            group: The number of its group.
            values: The group's hyperparameters before the step.

        Raises:
            ConfigError: The gradient is too wide, the class keeps other state than was found out, or it leaves the
                group unlike its first parameter in this step did.
        """
        master = piece.segment.master
        grad = known(piece.segment.gradient, "an update without a gradient")
        gradient_dtype = self._gradient_dtype(master.dtype)
        if grad.dtype.itemsize > gradient_dtype.itemsize:
            name = piece.parameter.name
            raise ConfigError(f"gradient of {name}", grad.dtype, 'wrap with gradient_dtype="float32": it is wider')
        view = self._as_parameter(piece.shaped(master), piece.parameter.name, is_trial=False)
        _set_grad(view, piece.gradient(gradient_dtype))
        packed_words = known(piece.packed, "a parameter without packed state")
        after = self.step_packed(view, piece.parameter, packed_words, values, step_alone)
        if view.data_ptr() != master.data_ptr():  # the class has replaced the parameter's memory
            piece.shaped(master).copy_(view)
        # The group's first update in a step decides what becomes of the group; see `group_changes_after`.
        _, after_first = self._groups_after.setdefault(group, (values, after))
        if not _are_equal(after_first, after):
            advice = f"use one that changes its groups by the step alone: {piece.parameter.name} left another one"
            raise ConfigError("wrap", self.name, advice)

    def step_packed(
        self,
        view: torch.nn.Parameter,
        parameter: Parameter,
        packed_words: torch.Tensor,
        values: Mapping[str, Any],
        call: Callable[[torch.optim.Optimizer], Any],
    ) -> Group:
        """Call a method of the class on one parameter: unpack its state, call, and pack the state again.

        Args:
            view: The parameter as the class sees it, in its shape and strides; changed in place.
            parameter: Its description in the layout.
            packed_words: Its packed state, changed in place.
            values: Its group's hyperparameters.
            call: Calls the method. It is given an optimizer of the class that has this parameter alone, in a group of
                `values`.

        Returns:
            The group's hyperparameters afterwards.

        Raises:
            ConfigError: The class keeps other state than was found out.
        """
        packing = self.packing_of(parameter)
        state = packing.load(packed_words)
        group = self._group_of([view], [parameter.name], values, parameter.group)
        inner = self._inner
        if not state and self._starts_with_state:  # the first state is made by the constructor, so call that
            with self._raising_config_error(parameter.name):
                inner = self._make_optimizer([group])
        else:  # without state the class makes it in the step
            inner.param_groups = [group]
            inner.state = defaultdict(dict, {view: state} if state else {})
        try:
            with self._raising_config_error(parameter.name):
                call(inner)
            if stray := [key for key in inner.state if key is not view]:
                advice = f"use one that keeps state of parameters alone: beside {parameter.name} it has {stray[0]!r}"
                raise ConfigError("wrap", self.name, advice)
            try:
                packing.store(packed_words, inner.state.get(view, {}))
            except TypeError as cause:
                advice = f"use a class whose state keeps its form: of {parameter.name}, {cause}"
                raise ConfigError("wrap", self.name, advice) from cause
            return _without_parameters(inner.param_groups[0])
        finally:  # hold no view of memory that the engine uses for other state
            self._inner.param_groups = []
            self._inner.state = defaultdict(dict)

    def walk(
        self,
        method: str,
        parameter: Parameter,
        master: torch.Tensor,
        packed_words: torch.Tensor,
        groups: Sequence[Group],
    ) -> None:
        """Call a method of the class such as `train` for one parameter, which changes its weight and state.

        Args:
            method: The method's name.
            parameter: The parameter's description in the layout.
            master: Its fp32 master, flat; changed in place.
            packed_words: Its packed state; changed in place.
            groups: Hyperparameters of all groups.
        """
        # The class gets the parameter in the dtype in which it updates it: without `masters` that of the weight.
        weight = master.to(TORCH_DTYPES[known(parameter.rule, "a parameter without a rule").master_dtype])
        segment = SegmentTensors(weight, state=(), gradient=None, weight=None, flags=SegmentFlag(0), scalars=None)
        piece = Piece(parameter, segment)
        values = groups[parameter.group]
        view = self._as_parameter(piece.shaped(weight), parameter.name, is_trial=False)
        after = self.step_packed(view, parameter, packed_words, values, methodcaller(method))
        self._groups_after.setdefault(parameter.group, (values, after))  # the first parameter decides, as in `update`
        piece.shaped(master).copy_(view)

    def group_changes_after(self, number: int, values: Mapping[str, Any], method: str = "step") -> Group:
        """Return the hyperparameters of a group that the class has changed in this step, with their new values.

        The first update of the group has shown what the class changes. If no parameter of the group was updated, the
        method is called here with the group without parameters: the class may change groups in every step. A step of
        a class that changes no groups (`changes_groups`) is not called so, as it would show nothing.

        Args:
            number: The group's number.
            values: Its hyperparameters now. Those that are not as before the step are left out of the result: the
                caller has set them since.
            method: The method that was called instead of `step`, such as `train`.
        """
        if number not in self._groups_after and (self.changes_groups or method != "step"):
            self._inner.param_groups = [self._group_of([], [], values, number)]
            call = step_alone if method == "step" else methodcaller(method)
            call(self._inner)
            self._groups_after[number] = values, _without_parameters(self._inner.param_groups[0])
            self._inner.param_groups = []
        before, after = self._groups_after.get(number, ({}, {}))
        set_by_caller = _changed_names(before, values)
        return {name: deepcopy(after[name]) for name in _changed_names(before, after) if name not in set_by_caller}

    def note_group_changed(self, number: int) -> None:
        """Note that the caller has made the changes of `group_changes_after`: in this step it then returns none."""
        if number in self._groups_after:
            _, after = self._groups_after[number]
            self._groups_after[number] = after, after


def _trials_of(
    parameters: Sequence[tuple[str, torch.Tensor]], more: Sequence[tuple[str, torch.Tensor]], values: Group
) -> list[_Trial]:
    """Return the trials of `check_alone`, the last of which is for a second group, with half the rate.

    Args:
        parameters: One parameter of each kind, after its name: there is a trial like each.
        more: Up to two more of the first one's kind. There is a trial like the first of them. The last trial is like
            the second; without a second, like the first of `parameters`.
        values: The group's hyperparameters; changed here if the rate is 0.
    """
    first, *others = [(name, _small_tensor_like(parameter)) for name, parameter in parameters]
    again = [(name, _small_tensor_like(parameter)) for name, parameter in more]
    last = again[1] if len(again) > 1 else first
    if plain_number(values.get("lr")) == 0:  # a schedule will raise it; with 0 all results would be equal
        values["lr"] = values["lr"] + 0.01
    has_rate = isinstance(values.get("lr"), int | float | torch.Tensor)
    slower = {**values, "lr": values["lr"] * 0.5} if has_rate else values
    return [*(_Trial(*named, values) for named in (first, *others, *again[:1])), _Trial(*last, slower)]


def _other_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer beside its state, groups and defaults."""
    return {name: value for name, value in vars(optimizer).items() if name not in OWN_ATTRIBUTES}


def _trial_tensor_of(item: Any, trial_tensors: dict[int, torch.Tensor]) -> Any:
    """Return a trial tensor for an item of a group: a parameter, or a tuple of its name and the parameter.

    For a tuple it is a tuple with the same name. A parameter has one trial tensor, however often it occurs.

    Args:
        item: The item.
        trial_tensors: The trial tensors made so far, by id of the parameter; a new one is added.
    """
    if isinstance(item, tuple):
        return (*item[:-1], _trial_tensor_of(item[-1], trial_tensors))
    if not isinstance(item, torch.Tensor):
        return item  # torch will refuse it
    if id(item) not in trial_tensors:
        dtype = item.dtype if item.is_floating_point() else torch.float32  # frozen ones may be integers
        trial_tensor = torch.empty(shards.local(item).shape, dtype=dtype, device="cpu").requires_grad_()
        _set_attributes(trial_tensor, vars(item))
        trial_tensors[id(item)] = trial_tensor
    return trial_tensors[id(item)]


def _small_tensor_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor of a parameter's shape and strides.

    If the parameter has more than `MOST_TRIAL_NUMEL` elements, the tensor is smaller, and contiguous.
    """
    # The root of degree `dim`: with this size in each dimension there are at most `MOST_TRIAL_NUMEL` elements.
    most_per_dimension = int(MOST_TRIAL_NUMEL ** (1 / max(1, parameter.dim())))
    if parameter.numel() > MOST_TRIAL_NUMEL:
        size = [min(size, most_per_dimension) for size in parameter.shape]
        return torch.empty(size, dtype=parameter.dtype, device="cpu")
    return torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="cpu")


def _set_attributes(
    tensor: torch.Tensor, attributes: Mapping[str, Any], copied: Callable[[Any], Any] | None = None
) -> None:
    """Set attributes of a tensor, but for those that it has already, as fake tensors have some of their own.

    `copied` copies a value before it is set; None: the value itself is set.
    """
    for name, value in attributes.items():
        vars(tensor).setdefault(name, value if copied is None else copied(value))


def _copied(value: Any) -> Any:
    """Return a copy of a value that a class may change in place: a list, dict or set, or a small tensor.

    Other values, and large tensors, are returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() <= MOST_TRIAL_NUMEL else value
    return copy(value) if isinstance(value, list | dict | set) else value


def _set_grad(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Set a parameter's gradient, whose dtype may be wider than the parameter's."""
    if gradient.dtype is not parameter.dtype:
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def _without_parameters(group: Mapping[str, Any]) -> Group:
    """Return the hyperparameters of a group."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the hyperparameters that are new or changed in a group."""
    return [name for name in after if name not in before or not _are_equal(before[name], after[name])]


def _is_fake(value: Any) -> bool:
    """Return whether a value is or contains a fake tensor, as made in `_without_memory`."""
    if isinstance(value, Mapping):
        return any(map(_is_fake, value.values()))
    return isinstance(value, FakeTensor) or (isinstance(value, list | tuple) and any(map(_is_fake, value)))


def _deep_copy(value: Any) -> Any:
    """Return a deep copy of a value, or the value itself if it cannot be copied."""
    try:
        return deepcopy(value)
    except Exception:  # of a lock, say
        return value


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; in numbers and tensors NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        are_both_nan = (one != one) & (other != other)
        return torch.equal(one, other) or bool(((one == other) | are_both_nan).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    try:
        return one is other or bool(one == other) or (one != one and other != other)
    except Exception:  # such objects cannot be compared
        return False
