"""Runs a class of torch's kind on views of state that lies elsewhere, one parameter at a time.

What the class keeps is found out on tensors without memory, over two steps, as some of it appears at the first. Every
update starts from the group as it was before the step; all have to leave it equal, and it is changed once.
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
"""Options of torch's own classes that only work where the state lies for good."""

STEPS = 2
"""In which the state is found out."""

TRIAL_SCALES = (1e-4, 1.0, 30.0, 1 / 30)
"""Of the gradients of a trial's steps: some classes do more to large ones, or to small ones."""

MOST_TRIAL_NUMEL = 1 << 16
"""Elements of the parameters, twins of the smallest ones, that a class is tried on for real."""

OWN_ATTRIBUTES = frozenset({"state", "param_groups", "defaults"})


class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has values that decide something be 1, where tensors have none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


@contextmanager
def _without_memory() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), _Numbers():  # type: ignore[no-untyped-call]
        yield


class ClassRunner:
    """See the module; a `Runner`.

    Args:
        kind: The class.
        args: What it is made with, after the parameters.
        kwargs: Likewise.
        masters: Whether 16-bit weights have fp32 masters, and the class sees those.
        widens: Whether gradients of 16-bit weights are fp32.

    Attributes:
        name: The class's.
        of_class, masters, widens: As given.

    Raises:
        ConfigError: It is no such class, or cannot be run so.
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
        self._packings: dict[tuple[Any, ...], Packing] = {}
        self._groups: dict[int, Group] = {}  # as they were first
        self._starts_with_state = self._changes_groups = False
        self._left: dict[int, tuple[Mapping[str, Any], Group]] = {}
        self._tried: set[tuple[Any, ...]] = set()

    def begin_step(self) -> None:
        """Forget what the updates of the last step have left of the groups."""
        self._left.clear()

    def _make(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        return self.of_class(groups, *self._args, **self._kwargs)

    def groups(self, params: Iterable[Any]) -> tuple[list[Group], dict[str, Any]]:
        """Return groups with all hyperparameters that the class adds, and its defaults; nothing is allocated.

        Args:
            params: What the class would be made with.

        Raises:
            ConfigError: An option cannot be had here.
        """
        given = [params] if isinstance(params, torch.Tensor | Mapping) else [*params]
        groups = [{"params": given}] if given and not isinstance(given[0], Mapping) else [*map(dict, given)]
        twins: dict[int, torch.Tensor] = {}

        def twin_of(item: Any) -> Any:
            if isinstance(item, tuple):
                return (*item[:-1], twin_of(item[-1]))
            if not isinstance(item, torch.Tensor):
                return item  # which torch refuses
            if id(item) not in twins:
                dtype = item.dtype if item.is_floating_point() else torch.float32  # of frozen ones it may be any
                twin = torch.empty(shards.local(item).shape, dtype=dtype, device="cpu")
                twins[id(item)] = twin.requires_grad_()
            return twins[id(item)]

        for group in groups:
            items = group.get("params", ())
            group["params"] = [items] if isinstance(items, torch.Tensor) else [*items]
        with _without_memory():
            twin_groups = [{**group, "params": [*map(twin_of, group["params"])]} for group in groups]
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
        found = [{**_without_parameters(own), "params": group["params"]} for own, group in pairs]
        for group in found:
            for option in NOT_HERE:
                if group.get(option):
                    raise ConfigError(option, True, f"leave it out: {self.name} runs on views of state on its way")
        return found, dict(made.defaults)

    # What is kept

    def rule_of(self, parameter: torch.Tensor, name: str, group: Mapping[str, Any], number: int) -> ClassRule:
        """Return the rule of a parameter, whose state is found out.

        Args:
            parameter: The parameter.
            name: Its name, for errors.
            group: Its group.
            number: The group's.

        Raises:
            ConfigError: The class keeps what cannot be packed.
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
        kept = ", ".join(map(str, packing.keys))  # a checkpoint with others, or in another order, is of another rule
        return ClassRule(f"{self.name}({kept})", packing.words, DTYPE_CODES[dtype], self)

    def forget(self, number: int) -> None:
        """Forget what was found out of a group that could not be added: another one may have its number."""
        self._groups.pop(number, None)
        for key in [key for key in self._packings if key[0] == number]:
            del self._packings[key]
        self._tried = {tried for tried in self._tried if tried[0] != number}

    def packing_of(self, parameter: Parameter) -> Packing:
        """Return how the state of a parameter is packed; as the layout describes it."""
        dtype = known(parameter.rule, "a parameter without a rule").master_dtype
        return self._packings[parameter.group, parameter.shape, parameter.stride, dtype]

    @property
    def keys(self) -> set[Any]:
        """The keys that any state may have."""
        return {key for packing in self._packings.values() for key in packing.keys}

    def _seen(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which the class sees gradients of weights of a type."""
        return torch.float32 if self.widens else dtype

    def _refusal(self, what: object, parameter: str = "") -> ConfigError:
        of = f", of {parameter}" if parameter else ""
        allowed = f"use a class that keeps tensors and numbers for parameters: it has {what}{of}"
        return ConfigError("wrap", self.name, allowed)

    @contextmanager
    def _errors_of(self, parameter: str) -> Iterator[None]:
        """Have what the class itself raises name it, and the parameter."""
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
        """Return the forms of what the class keeps of a parameter."""
        forms: dict[Any, Form | None] = {}
        before, own = _without_parameters(group), deepcopy(_without_parameters(group))
        with _without_memory():
            twin = torch.nn.Parameter(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))
            made = self._make([{**own, "params": [twin]}])
            for step in range(STEPS + 1):
                if step:
                    _set_grad(twin, torch.empty_strided(size, stride, dtype=self._seen(dtype), device="cpu"))
                    step_alone(made)
                if others := [key for key in made.state if key is not twin]:
                    raise self._refusal(f"{others[0]!r} of none")
                for key, value in made.state.get(twin, {}).items():
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
        """Refuse a class that does another thing here than in memory, where there are other parameters and groups.

        Twins of the smallest parameter of each type and number of dimensions, one more of the first, and one in a
        second group whose rate is half, are updated by the class in memory, and each by itself as it is here.

        Args:
            parameters: Of the group, with names; those that are not trained are left out.
            group: Their group.
            number: The group's.

        Raises:
            ConfigError: As said; or the class keeps something itself, which is no state.
        """
        smallest: dict[tuple[torch.dtype, int], tuple[str, torch.Tensor]] = {}
        for name, parameter in parameters:
            kind = torch.float32 if self.masters else parameter.dtype, parameter.dim()
            if not parameter.numel() or not parameter.requires_grad:
                continue
            if kind not in smallest or parameter.numel() < smallest[kind][1].numel():
                smallest[kind] = name, parameter
        if not smallest or (number, *smallest) in self._tried:
            return
        first, *others = [(name, _small(parameter)) for name, parameter in smallest.values()]
        values = _without_parameters(group)
        if plain_number(values.get("lr")) == 0:  # a schedule raises it, and it would hide all that is tried
            values["lr"] = values["lr"] + 0.01
        has_rate = isinstance(values.get("lr"), int | float | torch.Tensor)
        slower = {**values, "lr": values["lr"] * 0.5} if has_rate else values
        twins = [*((*twin, values) for twin in (first, *others, first)), (*first, slower)]
        for name, like, _ in twins:
            self.rule_of(like, name, group, number)
        with torch.random.fork_rng(devices=[]):
            made, wanted = self._together(twins)
            alone = copy(self)  # others may be running it
            alone._inner = made
            has_types = len({dtype for dtype, _ in smallest}) > 1
            for at, (twin, expected) in enumerate(zip(twins, wanted, strict=True)):
                if not _same(alone._alone(*twin, number, at), expected):
                    allowed = (
                        "use one that updates each parameter by itself, from its own gradient, state and group: in "
                        f"memory, beside another one or another group, it does something else to {twin[0]}"
                        f"{'; or give weights of each type a group of their own' if has_types else ''}"
                    )
                    raise ConfigError("wrap", self.name, allowed)
        self._tried.add((number, *smallest))

    def _drawn(self, like: torch.Tensor, at: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the weight of a twin, and its gradient in each step, flat."""
        generator = torch.Generator().manual_seed(at)
        dtype = torch.float32 if self.masters else like.dtype
        draws = [
            torch.empty(like.numel(), dtype=torch.float32, device="cpu").normal_(generator=generator).to(dtype)
            for _ in (None, *TRIAL_SCALES)
        ]
        scaled = [(draw * scale).to(self._seen(dtype)) for draw, scale in zip(draws[1:], TRIAL_SCALES, strict=True)]
        return draws[0], scaled

    def _together(self, twins: Sequence[_Twin]) -> tuple[torch.optim.Optimizer, list[Any]]:
        """Return the class's own optimizer of all twins, and weight, state and group of each after the steps."""
        torch.default_generator.manual_seed(0)
        drawn = [self._drawn(like, at) for at, (_, like, _) in enumerate(twins)]
        forms = [(like.size(), like.stride()) for _, like, _ in twins]
        weights = [torch.nn.Parameter(own.as_strided(*form)) for (own, _), form in zip(drawn, forms, strict=True)]
        names, slower = ", ".join(dict.fromkeys(name for name, _, _ in twins)), twins[-1][2]
        with self._errors_of(names):
            made = self._make(
                [
                    {**deepcopy(dict(twins[0][2])), "params": weights[:-1]},
                    {**deepcopy(dict(slower)), "params": weights[-1:]},
                ]
            )
            kept = {name: _copied(value) for name, value in vars(made).items() if name not in OWN_ATTRIBUTES}
            for step in range(len(TRIAL_SCALES)):
                for weight, (_, gradients), form in zip(weights, drawn, forms, strict=True):
                    _set_grad(weight, gradients[step].as_strided(*form))
                step_alone(made)
        for name, value in vars(made).items():
            if name not in OWN_ATTRIBUTES and not _same(kept.get(name), value):
                allowed = f"use one that keeps all in its state and groups: it changes its attribute {name!r}"
                raise ConfigError("wrap", self.name, allowed)
        left = [_without_parameters(group) for group in made.param_groups]
        groups = [*[left[0]] * (len(twins) - 1), left[1]]
        return made, [
            (weight.detach(), dict(made.state.get(weight, {})), group)
            for weight, group in zip(weights, groups, strict=True)
        ]

    @torch.no_grad()
    def _alone(self, name: str, like: torch.Tensor, values: Mapping[str, Any], number: int, at: int) -> Any:
        """Return weight, state and group of one twin after the steps, updated as parameters are."""
        torch.default_generator.manual_seed(0)
        own, gradients = self._drawn(like, at)
        rule = self.rule_of(like, name, values, number)
        code = DTYPE_CODES[own.dtype]
        twin = Parameter(name, own.numel(), code, number, shape=(*like.shape,), stride=like.stride(), rule=rule)
        words = torch.zeros(rule.numel_of(PACKED, own.numel()), dtype=torch.float32, device="cpu")
        for gradient in gradients:
            self._left = {}
            segment = SegmentTensors(own, (), gradient.clone(), None, SegmentFlag(0), rule.row(1, values, 1.0))
            self.update(Piece(twin, segment, words), number, values)
            values = {**values, **self.changes(number, values)}
        return own.as_strided(like.size(), like.stride()), self.packing_of(twin).load(words), values

    def kept_of_nothing(self, parameter: Parameter, count: int) -> dict[Any, Any]:
        """Return the state that the class makes of a parameter without elements in a step, with a count of steps."""
        dtype = TORCH_DTYPES[known(parameter.rule, "a parameter without a rule").master_dtype]
        twin, step = self._twin(known(parameter.shape, "a parameter without a shape"), dtype, parameter.group)
        step()
        state = dict(step.args[0].state.get(twin, {}))
        with suppress(TypeError):  # it is no count
            state |= self.packing_of(parameter).cast({"step": float(count)} if "step" in state else {})
        return state

    def trial(self, shape: tuple[int, ...], dtype: torch.dtype, group: int) -> Callable[[], None]:
        """See `Runner.trial`."""
        return self._twin(shape, torch.float32 if self.masters else dtype, group)[1]

    def _twin(self, shape: tuple[int, ...], dtype: torch.dtype, group: int) -> tuple[torch.Tensor, partial[None]]:
        """Return a tensor of a shape and type, and a step of an optimizer of the class that has it alone."""
        twin = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device="cpu"))
        _set_grad(twin, torch.ones(shape, dtype=self._seen(dtype), device="cpu"))
        return twin, partial(step_alone, self._make([{**deepcopy(self._groups.get(group, {})), "params": [twin]}]))

    # Updates

    def update(self, piece: Piece, group: int, values: Mapping[str, Any]) -> None:
        """See `ClassRule.update`.

        Raises:
            ConfigError: The class does here what it did not when it was looked at.
        """
        master, given = piece.segment.master, known(piece.segment.gradient, "an update without a gradient")
        seen, view = self._seen(master.dtype), torch.nn.Parameter(piece.shaped(master))
        if given.dtype.itemsize > seen.itemsize:
            name = piece.parameter.name
            raise ConfigError(f"gradient of {name}", given.dtype, 'wrap with gradient_dtype="float32": it is wider')
        _set_grad(view, piece.gradient(seen))
        words = known(piece.packed, "a parameter without packed state")
        left = self.run(view, piece.parameter, words, values, step_alone)
        if view.data_ptr() != master.data_ptr():
            piece.shaped(master).copy_(view)
        if not _same(self._left.setdefault(group, (values, left))[1], left):
            allowed = f"use one that changes its groups by the step alone: {piece.parameter.name} left another one"
            raise ConfigError("wrap", self.name, allowed)

    def run(
        self,
        view: torch.nn.Parameter,
        parameter: Parameter,
        words: torch.Tensor,
        values: Mapping[str, Any],
        call: Callable[[torch.optim.Optimizer], Any],
    ) -> Group:
        """Run something of the class on a view of one parameter and its state; return its group afterwards.

        Args:
            view: The parameter.
            parameter: What the layout says of it.
            words: Its packed state.
            values: Its group.
            call: What to run, given an optimizer of the class that has this parameter alone.

        Raises:
            ConfigError: The class keeps something else than when it was looked at.
        """
        packing = self.packing_of(parameter)
        state, inner = packing.load(words), self._inner
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
                packing.store(words, inner.state.get(view, {}))
            except TypeError as cause:
                allowed = f"use a class whose state keeps its form: of {parameter.name}, {cause}"
                raise ConfigError("wrap", self.name, allowed) from cause
            return _without_parameters(inner.param_groups[0])
        finally:
            self._inner.param_groups, self._inner.state = [], defaultdict(dict)

    def walk(
        self, method: str, parameter: Parameter, master: torch.Tensor, words: torch.Tensor, groups: Sequence[Group]
    ) -> None:
        """Call a method of the class for one parameter.

        Args:
            method: Its name.
            parameter: What the layout says of the parameter.
            master: Its master, flat and fp32; changed in place.
            words: Its packed state.
            groups: Hyperparameters of all groups.
        """
        own = master.to(TORCH_DTYPES[known(parameter.rule, "a parameter without a rule").master_dtype])
        piece = Piece(parameter, SegmentTensors(own, (), None, None, SegmentFlag(0), None))
        values, view = groups[parameter.group], torch.nn.Parameter(piece.shaped(own))
        left = self.run(view, parameter, words, values, methodcaller(method))
        self._left.setdefault(parameter.group, (values, left))
        piece.shaped(master).copy_(view)

    def changes(self, number: int, values: Mapping[str, Any], method: str = "step") -> Group:
        """Return what a step has changed of a group; of one that no parameter was updated of, too.

        Args:
            number: The group's.
            values: Its hyperparameters.
            method: What was called in the place of a step.
        """
        if number not in self._left and (self._changes_groups or method != "step"):
            self._inner.param_groups = [{**deepcopy(dict(values)), "params": []}]
            (step_alone if method == "step" else methodcaller(method))(self._inner)
            self._left[number] = values, _without_parameters(self._inner.param_groups[0])
            self._inner.param_groups = []
        before, left = self._left.get(number, ({}, {}))
        return {name: value for name, value in left.items() if name not in before or not _same(before[name], value)}


def _small(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a parameter's form, cut where it is large; its values are of no use."""
    most = int(MOST_TRIAL_NUMEL ** (1 / max(1, parameter.dim())))
    if parameter.numel() > MOST_TRIAL_NUMEL:
        return torch.empty([min(size, most) for size in parameter.shape], dtype=parameter.dtype, device="cpu")
    return torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="cpu")


def _set_grad(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Give a parameter a gradient, which may be wider."""
    if gradient.dtype is not parameter.dtype:
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def _without_parameters(group: Mapping[str, Any]) -> Group:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _is_fake(value: Any) -> bool:
    """Return whether a value has a tensor that was made where tensors have no memory."""
    if isinstance(value, Mapping):
        return any(map(_is_fake, value.values()))
    return isinstance(value, FakeTensor) or (isinstance(value, list | tuple) and any(map(_is_fake, value)))


def _copied(value: Any) -> Any:
    """Return a value as it is now, whatever is done to it, where it can be copied."""
    try:
        return deepcopy(value)
    except Exception:  # a lock, a module that is no value
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
