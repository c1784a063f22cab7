"""Runs an optimizer class of torch's kind on views of packed state, one parameter at a time; for `wrap`.

Which state the class keeps is found out by two steps on fake tensors (without memory), as some state appears only in
the first step. Every update starts from the group (hyperparameters) as it was before the step. A class may change its
group in a step; then all parameters' updates must leave it equal, and the change is made once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from offload.checkpoint.manifest import check_text
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
_Twin = tuple[str, torch.Tensor, Mapping[str, Any]]  # name, form and group

REFUSED = {
    torch.optim.LBFGS: "it calls the model, and looks at all parameters at once",
    torch.optim.SparseAdam: "its gradients are sparse",
}
NOT_HERE = ("fused", "capturable", "differentiable")
"""Options of torch's own classes that need state which stays at its address."""

STEPS = 2
"""Steps on fake tensors in which the state is found out."""

TRIAL_SCALES = (1e-4, 1.0, 30.0, 1 / 30)
"""Scales of gradients in a trial's steps: some classes treat large or small ones differently."""

MOST_TRIAL_NUMEL = 1 << 16
"""Most elements of a parameter in a trial with real tensors."""

OWN_ATTRIBUTES = frozenset({"state", "param_groups", "defaults"})


class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets fake tensors be read as numbers, which control flow of a class may do: each reads as 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


@contextmanager
def _without_memory() -> Iterator[None]:
    """Make tensors in this block fake: they have forms, and no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Numbers():  # type: ignore[no-untyped-call]
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
        self.of_class, self._args, self._kwargs = kind, args, dict(kwargs)
        self.masters, self.widens = masters, widens
        self._packings: dict[tuple[Any, ...], Packing] = {}  # by group's number, size, stride, dtype of the master
        self._groups: dict[int, Group] = {}  # as they were at first, by number
        self._starts_with_state = self._changes_groups = False  # what the class does: in its constructor; in a step
        self._groups_after: dict[int, tuple[Mapping[str, Any], Group]] = {}  # before and after this step, by number
        self._tried_forms: set[tuple[Any, ...]] = set()  # group's number and kinds of parameters in a trial

    def begin_step(self) -> None:
        """Forget the groups as the last step's updates have left them."""
        self._groups_after.clear()

    def _make(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Make an optimizer of the class."""
        return self.of_class(groups, *self._args, **self._kwargs)

    def groups(self, params: Iterable[Any]) -> tuple[list[Group], dict[str, Any]]:
        """Return groups with all hyperparameters that the class adds, and its defaults; nothing is allocated.

        The class is made with *twins*: tensors of the parameters' shapes, without memory.

        Args:
            params: The parameters or groups, as for the class.

        Raises:
            ConfigError: An option cannot be used here, or the class has tensors outside of its state.
        """
        given = [params] if isinstance(params, torch.Tensor | Mapping) else [*params]
        groups = [{"params": given}] if given and not isinstance(given[0], Mapping) else [*map(dict, given)]
        trials: dict[int, torch.Tensor] = {}

        def trial_tensor_of(item: Any) -> Any:
            if isinstance(item, tuple):
                return (*item[:-1], trial_tensor_of(item[-1]))
            if not isinstance(item, torch.Tensor):
                return item  # torch will refuse it
            if id(item) not in trials:
                dtype = item.dtype if item.is_floating_point() else torch.float32  # frozen ones may be integers
                trial_tensor = torch.empty(shards.local(item).shape, dtype=dtype, device="cpu")
                trials[id(item)] = trial_tensor.requires_grad_()
            return trials[id(item)]

        for group in groups:
            items = group.get("params", ())
            group["params"] = [items] if isinstance(items, torch.Tensor) else [*items]
        with _without_memory():
            twin_groups = [{**group, "params": [*map(trial_tensor_of, group["params"])]} for group in groups]
            self._inner = made = self._make(twin_groups)
        own = {name: value for name, value in vars(made).items() if name not in OWN_ATTRIBUTES}
        for place, values in (
            ("an attribute", own),
            *(("a group", _without_parameters(g)) for g in made.param_groups),
        ):
            for name, value in values.items():
                if _is_fake(value):
                    raise self._refusal(f"a tensor of its own, {name!r}, as {place}")
        self._starts_with_state = bool(made.state)
        pairs = zip(made.param_groups, groups, strict=True)
        full_groups = [{**_without_parameters(own), "params": group["params"]} for own, group in pairs]
        for group in full_groups:
            for option in NOT_HERE:
                if group.get(option):
                    raise ConfigError(option, True, f"leave it out: {self.name} runs on views of state on its way")
        return full_groups, dict(made.defaults)

    # What is kept

    def rule_of(self, parameter: torch.Tensor, name: str, group: Mapping[str, Any], number: int) -> ClassRule:
        """Return the rule of a parameter in a group, after finding out which state the class keeps of its form.

        Raises:
            ConfigError: The class keeps a value that cannot be packed; names the parameter.
        """
        dtype = torch.float32 if self.masters else parameter.dtype
        self._groups.setdefault(number, deepcopy(_without_parameters(group)))
        form = tuple(parameter.shape), tuple(parameter.stride())
        key = number, *form, DTYPE_CODES[dtype]
        if key not in self._packings:
            with self._errors_of(name):
                forms = self._forms(*form, dtype, group, name)
            if self.masters and MASTER in forms:
                raise self._refusal(f"{MASTER!r} of its own, beside those of masters=True", name)
            try:
                self._packings[key] = Packing(forms, parameter.numel())
            except TypeError as cause:
                raise self._refusal(cause, name) from cause
        packing = self._packings[key]
        keys = ", ".join(map(str, packing.keys))  # in the rule's name: other keys, or another order, are another rule
        return ClassRule(f"{self.name}({keys})", packing.words, DTYPE_CODES[dtype], self)

    def forget_group(self, number: int) -> None:
        """Forget a group that could not be added, as another one may get its number."""
        self._groups.pop(number, None)
        for key in [key for key in self._packings if key[0] == number]:
            del self._packings[key]
        self._tried_forms = {tried for tried in self._tried_forms if tried[0] != number}

    def packing_of(self, parameter: Parameter) -> Packing:
        """Return how the state of a parameter of the layout is packed."""
        dtype = known(parameter.rule, "a parameter without a rule").master_dtype
        return self._packings[parameter.group, parameter.shape, parameter.stride, dtype]

    @property
    def keys(self) -> set[Any]:
        """The keys that any state may have."""
        return {key for packing in self._packings.values() for key in packing.keys}

    def _gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the gradients that the class gets for weights of a dtype."""
        return torch.float32 if self.widens else dtype

    def _refusal(self, what: object, parameter: str = "") -> ConfigError:
        of = f", of {parameter}" if parameter else ""
        allowed = f"use a class that keeps tensors and numbers for parameters: it has {what}{of}"
        return ConfigError("wrap", self.name, allowed)

    @contextmanager
    def _errors_of(self, parameter: str) -> Iterator[None]:
        """Raise errors of the class within this as a `ConfigError` that names the class and the parameter."""
        try:
            yield
        except OffloadError:
            raise
        except Exception as cause:
            allowed = f"use a class that can update {parameter}: it raised {type(cause).__name__}: {cause}"
            raise ConfigError("wrap", self.name, allowed) from cause

    def _forms(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, group: Mapping[str, Any], name: str
    ) -> dict[Any, Form | None]:
        """Return the forms of the state that the class keeps of a parameter, by key, after `STEPS` fake steps.

        Also notes whether the class changes its group in a step.
        """
        forms: dict[Any, Form | None] = {}
        before, own = _without_parameters(group), deepcopy(_without_parameters(group))
        with _without_memory():
            trial_tensor = torch.nn.Parameter(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))
            made = self._make([{**own, "params": [trial_tensor]}])
            for step in range(STEPS + 1):
                if step:
                    _set_grad(
                        trial_tensor,
                        torch.empty_strided(size, stride, dtype=self._gradient_dtype(dtype), device="cpu"),
                    )
                    step_alone(made)
                if others := [key for key in made.state if key is not trial_tensor]:
                    raise self._refusal(f"{others[0]!r} of none")
                for key, value in made.state.get(trial_tensor, {}).items():
                    try:
                        form = Form.of(value)
                        if not is_plain(key) or isinstance(key, torch.Tensor):
                            raise TypeError("a key that is neither text nor number")
                        check_text(str(key))
                    except (TypeError, ValueError) as cause:
                        raise self._refusal(f"{key!r}, {cause}", name) from cause
                    if forms.get(key) not in (None, form) and form is not None:
                        raise self._refusal(f"{key!r}, which was {forms[key]} and is {form} a step later", name)
                    forms[key] = form or forms.get(key)
            after = _without_parameters(made.param_groups[0])
            changed = [name for name in after if name not in before or not _same(before[name], after[name])]
            self._changes_groups |= bool(changed) or before.keys() != after.keys()
            if lost := [name for name in changed if not is_plain(after[name])]:
                raise self._refusal(f"{lost[0]!r} in its groups, which changes, and no checkpoint could hold")
        return forms

    # Trials

    def check_alone(
        self, parameters: Iterable[tuple[str, torch.Tensor]], group: Mapping[str, Any], number: int
    ) -> None:
        """Refuse a class whose update of a parameter depends on other parameters or groups, as here it runs alone.

        A trial with real tensors: twins of the smallest parameter of each dtype and number of dimensions, one more of
        the first, and one in a second group with half the rate. One optimizer of the class updates them together, and
        this runner each by itself. The results have to be equal.

        Raises:
            ConfigError: The results differ; or the class keeps something in attributes of its own.
        """
        smallest: dict[tuple[torch.dtype, int], tuple[str, torch.Tensor]] = {}
        for name, parameter in parameters:
            kind = torch.float32 if self.masters else parameter.dtype, parameter.dim()
            if not parameter.numel() or not parameter.requires_grad:
                continue
            if kind not in smallest or parameter.numel() < smallest[kind][1].numel():
                smallest[kind] = name, parameter
        if not smallest or (number, *smallest) in self._tried_forms:
            return
        first, *others = [(name, _small(parameter)) for name, parameter in smallest.values()]
        values = _without_parameters(group)
        if plain_number(values.get("lr")) == 0:  # a schedule will raise it; with 0 all results would be equal
            values["lr"] = values["lr"] + 0.01
        has_rate = isinstance(values.get("lr"), int | float | torch.Tensor)
        slower = {**values, "lr": values["lr"] * 0.5} if has_rate else values
        trials = [*((*trial_tensor, values) for trial_tensor in (first, *others, first)), (*first, slower)]
        for name, like, _ in trials:
            self.rule_of(like, name, group, number)
        with torch.random.fork_rng(devices=[]):
            made, wanted = self._step_together(trials)
            alone = copy(self)  # another thread may be using `self._inner`
            alone._inner = made
            has_types = len({dtype for dtype, _ in smallest}) > 1
            for at, (trial_tensor, expected) in enumerate(zip(trials, wanted, strict=True)):
                if not _same(alone._step_alone(*trial_tensor, number, at), expected):
                    allowed = (
                        "use one that updates each parameter by itself, from its own gradient, state and group: in "
                        f"memory, beside another one or another group, it does something else to {trial_tensor[0]}"
                        f"{'; or give weights of each type a group of their own' if has_types else ''}"
                    )
                    raise ConfigError("wrap", self.name, allowed)
        self._tried_forms.add((number, *smallest))

    def _random_values(self, like: torch.Tensor, at: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return random values for twin number `at`: its weight, and its gradient in each step, flat."""
        generator = torch.Generator().manual_seed(at)
        dtype = torch.float32 if self.masters else like.dtype
        draws = [
            torch.empty(like.numel(), dtype=torch.float32, device="cpu").normal_(generator=generator).to(dtype)
            for _ in (None, *TRIAL_SCALES)
        ]
        scaled = [
            (draw * scale).to(self._gradient_dtype(dtype))
            for draw, scale in zip(draws[1:], TRIAL_SCALES, strict=True)
        ]
        return draws[0], scaled

    def _step_together(self, trials: Sequence[_Twin]) -> tuple[torch.optim.Optimizer, list[Any]]:
        """Update all twins by one optimizer of the class; return it, and each twin's weight, state and group."""
        torch.default_generator.manual_seed(0)
        drawn = [self._random_values(like, at) for at, (_, like, _) in enumerate(trials)]
        forms = [(like.size(), like.stride()) for _, like, _ in trials]
        weights = [torch.nn.Parameter(flat.as_strided(*form)) for (flat, _), form in zip(drawn, forms, strict=True)]
        names, slower = ", ".join(dict.fromkeys(name for name, _, _ in trials)), trials[-1][2]
        with self._errors_of(names):
            made = self._make(
                [
                    {**deepcopy(dict(trials[0][2])), "params": weights[:-1]},
                    {**deepcopy(dict(slower)), "params": weights[-1:]},
                ]
            )
            before = {name: _copied(value) for name, value in vars(made).items() if name not in OWN_ATTRIBUTES}
            for step in range(len(TRIAL_SCALES)):
                for weight, (_, gradients), form in zip(weights, drawn, forms, strict=True):
                    _set_grad(weight, gradients[step].as_strided(*form))
                step_alone(made)
        for name, value in vars(made).items():
            if name not in OWN_ATTRIBUTES and not _same(before.get(name), value):
                allowed = f"use one that keeps all in its state and groups: it changes its attribute {name!r}"
                raise ConfigError("wrap", self.name, allowed)
        after = [_without_parameters(group) for group in made.param_groups]
        groups = [*[after[0]] * (len(trials) - 1), after[1]]
        return made, [
            (weight.detach(), dict(made.state.get(weight, {})), group)
            for weight, group in zip(weights, groups, strict=True)
        ]

    @torch.no_grad()
    def _step_alone(self, name: str, like: torch.Tensor, values: Mapping[str, Any], number: int, at: int) -> Any:
        """Update one twin by `update`, as the engine's parameters are; return its weight, state and group."""
        torch.default_generator.manual_seed(0)
        own, gradients = self._random_values(like, at)
        rule = self.rule_of(like, name, values, number)
        code = DTYPE_CODES[own.dtype]
        trial_tensor = Parameter(
            name, own.numel(), code, number, shape=(*like.shape,), stride=like.stride(), rule=rule
        )
        packed_words = torch.zeros(rule.numel_of(PACKED, own.numel()), dtype=torch.float32, device="cpu")
        for gradient in gradients:
            self._groups_after = {}
            segment = SegmentTensors(own, (), gradient.clone(), None, SegmentFlag(0), rule.row(1, values, 1.0))
            self.update(Piece(trial_tensor, segment, packed_words), number, values)
            values = {**values, **self.group_changes_after(number, values)}
        return own.as_strided(like.size(), like.stride()), self.packing_of(trial_tensor).load(packed_words), values

    def state_of_empty(self, parameter: Parameter, count: int) -> dict[Any, Any]:
        """Return the state that the class makes in a step of a parameter without elements, with this step count."""
        dtype = TORCH_DTYPES[known(parameter.rule, "a parameter without a rule").master_dtype]
        trial_tensor, step = self._trial_tensor(
            known(parameter.shape, "a parameter without a shape"), dtype, parameter.group
        )
        step()
        state = dict(step.args[0].state.get(trial_tensor, {}))
        with suppress(TypeError):  # the class's "step" is no count
            state |= self.packing_of(parameter).cast({"step": float(count)} if "step" in state else {})
        return state

    def trial(self, shape: tuple[int, ...], dtype: torch.dtype, group: int) -> Callable[[], None]:
        """Return a function that makes one update of a new tensor, to be timed; see `Runner.trial`."""
        return self._trial_tensor(shape, torch.float32 if self.masters else dtype, group)[1]

    def _trial_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, group: int
    ) -> tuple[torch.Tensor, partial[None]]:
        """Return a tensor of a shape and dtype, and a call that steps an optimizer of the class with it alone."""
        trial_tensor = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device="cpu"))
        _set_grad(trial_tensor, torch.ones(shape, dtype=self._gradient_dtype(dtype), device="cpu"))
        return trial_tensor, partial(
            step_alone, self._make([{**deepcopy(self._groups.get(group, {})), "params": [trial_tensor]}])
        )

    # Updates

    def update(self, piece: Piece, group: int, values: Mapping[str, Any]) -> None:
        """Run a step of the class on one parameter, in place; `values` are its group's before the step.

        Raises:
            ConfigError: The class keeps other state than was found out, or leaves the group unlike other parameters.
        """
        master, given = piece.segment.master, known(piece.segment.gradient, "an update without a gradient")
        seen, view = self._gradient_dtype(master.dtype), torch.nn.Parameter(piece.shaped(master))
        if given.dtype.itemsize > seen.itemsize:
            name = piece.parameter.name
            raise ConfigError(f"gradient of {name}", given.dtype, 'wrap with gradient_dtype="float32": it is wider')
        _set_grad(view, piece.gradient(seen))
        packed_words = known(piece.packed, "a parameter without packed state")
        after = self.step_packed(view, piece.parameter, packed_words, values, step_alone)
        if view.data_ptr() != master.data_ptr():  # the class has replaced the parameter's memory
            piece.shaped(master).copy_(view)
        if not _same(self._groups_after.setdefault(group, (values, after))[1], after):
            allowed = f"use one that changes its groups by the step alone: {piece.parameter.name} left another one"
            raise ConfigError("wrap", self.name, allowed)

    def step_packed(
        self,
        view: torch.nn.Parameter,
        parameter: Parameter,
        packed_words: torch.Tensor,
        values: Mapping[str, Any],
        call: Callable[[torch.optim.Optimizer], Any],
    ) -> Group:
        """Call a method of the class on a view of one parameter and its packed state; return its group afterwards.

        `call` is given an optimizer of the class that has this parameter alone, in a group of `values`.

        Raises:
            ConfigError: The class keeps other state than was found out.
        """
        packing = self.packing_of(parameter)
        state, inner = packing.load(packed_words), self._inner
        group = {**deepcopy(dict(values)), "params": [view]}
        if not state and self._starts_with_state:
            with self._errors_of(parameter.name):
                inner = self._make([group])
        else:
            inner.param_groups = [group]
            inner.state = defaultdict(dict, {view: state} if state else {})
        try:
            with self._errors_of(parameter.name):
                call(inner)
            if others := [key for key in inner.state if key is not view]:
                allowed = (
                    f"use one that keeps state of parameters alone: beside {parameter.name} it has {others[0]!r}"
                )
                raise ConfigError("wrap", self.name, allowed)
            try:
                packing.store(packed_words, inner.state.get(view, {}))
            except TypeError as cause:
                allowed = f"use a class whose state keeps its form: of {parameter.name}, {cause}"
                raise ConfigError("wrap", self.name, allowed) from cause
            return _without_parameters(inner.param_groups[0])
        finally:
            self._inner.param_groups, self._inner.state = [], defaultdict(dict)

    def walk(
        self,
        method: str,
        parameter: Parameter,
        master: torch.Tensor,
        packed_words: torch.Tensor,
        groups: Sequence[Group],
    ) -> None:
        """Call a method such as `train` for one parameter; its master and packed state change in place."""
        weight = master.to(TORCH_DTYPES[known(parameter.rule, "a parameter without a rule").master_dtype])
        piece = Piece(parameter, SegmentTensors(weight, (), None, None, SegmentFlag(0), None))
        values, view = groups[parameter.group], torch.nn.Parameter(piece.shaped(weight))
        after = self.step_packed(view, parameter, packed_words, values, methodcaller(method))
        self._groups_after.setdefault(parameter.group, (values, after))
        piece.shaped(master).copy_(view)

    def group_changes_after(self, number: int, values: Mapping[str, Any], method: str = "step") -> Group:
        """Return the hyperparameters of a group that a step, or another method, has changed.

        `values` are those before. If no parameter of the group was updated, the class is called without any.
        """
        if number not in self._groups_after and (self._changes_groups or method != "step"):
            self._inner.param_groups = [{**deepcopy(dict(values)), "params": []}]
            (step_alone if method == "step" else methodcaller(method))(self._inner)
            self._groups_after[number] = values, _without_parameters(self._inner.param_groups[0])
            self._inner.param_groups = []
        before, after = self._groups_after.get(number, ({}, {}))
        return {name: value for name, value in after.items() if name not in before or not _same(before[name], value)}


def _small(parameter: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor of a parameter's form, smaller if that is large."""
    most = int(MOST_TRIAL_NUMEL ** (1 / max(1, parameter.dim())))
    if parameter.numel() > MOST_TRIAL_NUMEL:
        return torch.empty([min(size, most) for size in parameter.shape], dtype=parameter.dtype, device="cpu")
    return torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="cpu")


def _set_grad(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Set a parameter's gradient, whose dtype may be wider than the parameter's."""
    if gradient.dtype is not parameter.dtype:
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def _without_parameters(group: Mapping[str, Any]) -> Group:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _is_fake(value: Any) -> bool:
    """Return whether a value is or contains a fake tensor, made in `_without_memory`."""
    if isinstance(value, Mapping):
        return any(map(_is_fake, value.values()))
    return isinstance(value, FakeTensor) or (isinstance(value, list | tuple) and any(map(_is_fake, value)))


def _copied(value: Any) -> Any:
    """Return a deep copy of a value, or the value itself if it cannot be copied."""
    try:
        return deepcopy(value)
    except Exception:  # of a lock, say
        return value


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, bit for bit where they are numbers or tensors."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        if not alike or torch.equal(one, other):
            return alike
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return one is other or bool(one == other) or (one != one and other != other)
    except Exception:
        return False
