"""The parameters that an engine updates: one record each, and their weights as they were left."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.graph import increment_version

from offload.backends import ADVICE, BACKENDS
from offload.errors import ConfigError
from offload.kernels.reference import DTYPE_CODES
from offload.kernels.stored import store_rounded
from offload.layout import Parameter
from offload.optim import shards
from offload.optim.groups import Group, names
from offload.optim.late import LateEngine
from offload.optim.ranks import world
from offload.optim.shards import Cut
from offload.optim.slots import GradientSlot
from offload.session.handout import PIECE_NUMEL, copy_run

log = logging.getLogger("offload")


Form = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.Size]


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Bound:
    """A parameter that the engine updates.

    Attributes:
        form: Dtype, shape and strides of the weight that the state belongs to, and the shape that this rank has.
        left: Address and version of the weight as it was left.
        cut: How it is cut over ranks; None if this rank has all of it.
        arrivals: Gradients that autograd has accumulated.
        slot: Memory for the gradient; only where gradients have slots.
        gathered: Version of the gradient in the slot when its norm was gathered.
        expected: Digest of the 16-bit weight that follows from a master that was set, until the next update.
        was_other: Whether the weight was another one before, and nobody has loaded it since.
    """

    parameter: torch.Tensor
    position: int
    name: str
    form: Form
    left: tuple[int, int]
    cut: Cut | None
    arrivals: int = 0
    slot: GradientSlot = field(init=False)
    gathered: int = -1
    expected: bytes | None = None
    was_other: bool = False

    @property
    def local(self) -> torch.Tensor:
        """The elements of the parameter that this rank has, where they are now."""
        return shards.own(self.parameter, self.cut)

    def now(self) -> tuple[int, int]:
        """Return address and version of the weight."""
        return self.local.data_ptr(), shards.version(self.parameter)


class Weights:
    """All bound parameters of one optimizer, in the engine's order.

    Attributes:
        bound: Their records, in that order.
        place: The device that all weights must be on; None for any.
        rows_over: A mesh of ranks of which each updates some rows of every weight; None where each updates all.
    """

    def __init__(self, late: LateEngine) -> None:
        self.bound: dict[torch.Tensor, Bound] = {}
        self.place: torch.device | None = None
        self.rows_over: Any = None
        self._late = late
        self._told_changed = False
        self._told_others = True

    def describe(self, groups: Sequence[Group], wanted: Iterable[torch.Tensor]) -> tuple[Parameter, ...]:
        """Return what the engine has to know of parameters that are to be bound; refuse those that cannot be."""
        known = {parameter: (name, group) for parameter, name, group in names(groups)}
        for parameter in wanted:
            check_parameter(parameter, known[parameter][0], self.place)
        _check_apart({parameter: known[parameter][0] for parameter in (*self.bound, *wanted)})
        return tuple(self._described(parameter, *known[parameter]) for parameter in wanted)

    def _described(self, parameter: torch.Tensor, name: str, group: int) -> Parameter:
        cut = shards.cut_of(parameter, name, self.rows_over)
        return Parameter(
            name,
            shards.own(parameter, cut).numel(),
            DTYPE_CODES[parameter.dtype],
            group,
            cut.start if cut is not None else 0,
            parameter.numel(),
            tuple(parameter.shape),
            tuple(parameter.stride()),
            box=None if cut is None or cut.is_run else cut.box,
        )

    def bind(self, parameter: torch.Tensor, name: str) -> Bound:
        """Tell the engine of the next parameter's weight; the record counts when it is in `bound`."""
        cut = shards.cut_of(parameter, name, self.rows_over)
        bound = Bound(parameter, len(self.bound), name, _form(parameter), (0, 0), cut)
        bound.left = bound.now()
        self._late.engine.bind_weight(bound.position, bound.left[0])
        return bound

    def of(self, parameter: Any) -> Bound:
        """Return a parameter's record; refuse what has none."""
        self._late.open()
        bound = self.bound.get(parameter) if isinstance(parameter, torch.Tensor) else None
        if bound is None:
            raise ConfigError("parameter", type(parameter).__name__, "give a parameter that this optimizer updates")
        return bound

    def check(self) -> None:
        """Notice weights that were moved or changed since they were left; refuse what cannot be updated any more."""
        changed = []
        if any(bound.local.data_ptr() != bound.left[0] for bound in self.bound.values()):
            _check_apart({parameter: bound.name for parameter, bound in self.bound.items()})
        for parameter, bound in self.bound.items():
            now = bound.now()
            if now == bound.left:
                continue
            form = _form(parameter)
            if form != bound.form:
                found = f"{form[0]}, shape {tuple(form[1])}, strides {form[2]}"
                raise ConfigError(
                    bound.name, found, "make a new optimizer after changing a weight's dtype, shape or memory format"
                )
            check_parameter(parameter, bound.name, self.place)
            self._late.engine.bind_weight(bound.position, now[0])
            bound.left = now
            # Frameworks load the optimizer first, or the weights once more: what is there has not changed then.
            if bound.expected is not None and digest(_flat(bound), parameter.dtype) == bound.expected:
                bound.was_other = False
                continue
            bound.expected = None
            self._late.engine.reload_master(bound.position)
            # What a master has beyond its weight's 16 bits is lost; a float32 weight is its own master.
            if parameter.dtype is not torch.float32 and self._late.engine.step_count(bound.position):
                changed.append(bound.name)
        if changed and not self._told_changed:
            self._told_changed = True
            log.log(
                logging.WARNING if world()[1] == 0 else logging.INFO,
                "%d weights (%s, ...) were changed outside the optimizer; their masters are read anew from them, "
                "their moments stay (said once)",
                len(changed),
                changed[0],
            )

    def are_where_bound(self) -> bool:
        """Return whether all weights lie where the engine knows them."""
        return all(bound.local.data_ptr() == bound.left[0] for bound in self.bound.values())

    def expect(self, following: Mapping[Bound, tuple[bytes, bool]]) -> None:
        """Take note of 16-bit weights that follow from masters which were set; see `followers`."""
        for bound, (expected, was_other) in following.items():
            bound.expected, bound.was_other = expected, was_other
            self._told_others = self._told_others and not was_other

    def tell_others(self) -> None:
        """Warn, before the first update after a load, of weights that were others, and were not loaded since."""
        if self._told_others:
            return
        self._told_others = True
        bounds = self.bound.values()
        others = [bound.name for bound in bounds if bound.expected is not None and bound.was_other]
        if others:
            log.warning(
                "%d weights (%s, ...) "
                "were not those that the loaded masters belong to, and have become what the masters say; "
                "load the model's weights, too, or leave `master` out of what is loaded",
                len(others),
                others[0],
            )

    def written(self, changed: Iterable[Bound]) -> None:
        """Let torch know of weights that the engine has written to, and leave them."""
        changed = [*changed]
        increment_version([bound.parameter for bound in changed])
        for bound in changed:
            bound.left = bound.now()
            bound.expected = None

    def gather(self) -> None:
        """Have all ranks exchange the rows that each has updated; a collective, if there are any."""
        cut = [bound for bound in self.bound.values() if bound.cut is not None and bound.cut.mesh is self.rows_over]
        if cut:
            self._late.engine.finish(on_gpu=True)
            shards.gather([bound.parameter for bound in cut], self.rows_over)
            for bound in cut:
                bound.left = bound.now()


def digest(values: torch.Tensor, dtype: torch.dtype) -> bytes:
    """Return a digest of what a 16-bit weight of a dtype has in memory, from values that are in that order.

    Others than of that dtype are rounded as updates round masters: NaN, too, becomes the bits that it has there.
    """
    found = hashlib.blake2b(digest_size=16)
    numel = min(PIECE_NUMEL, values.numel())
    piece = torch.empty(numel, dtype=dtype, device="cpu")
    master = None if values.dtype is dtype else torch.empty(numel, dtype=torch.float32, device="cpu")
    for start in range(0, values.numel(), PIECE_NUMEL):
        part = piece[: values.numel() - start]
        if master is None:
            copy_run(values, start, part)
        else:
            copy_run(values, start, master[: part.numel()])
            store_rounded(master[: part.numel()], part)
        found.update(part.view(torch.uint8).numpy().data)
    return found.digest()


def followers(masters: Mapping[Bound, torch.Tensor]) -> dict[Bound, tuple[bytes, bool]]:
    """Return digests of the 16-bit weights that masters make when they are set, and whether they are others now."""
    found = {}
    for bound, master in masters.items():
        dtype = bound.parameter.dtype
        if dtype is not torch.float32:
            follower = digest(master, dtype)
            found[bound] = follower, digest(_flat(bound), dtype) != follower
    return found


def _flat(bound: Bound) -> torch.Tensor:
    """Return this rank's part of a weight in the order of its memory."""
    weight = bound.local.detach()
    return weight.as_strided((weight.numel(),), (1,))


def _form(parameter: torch.Tensor) -> Form:
    return parameter.dtype, parameter.shape, parameter.stride(), shards.local(parameter).shape


def _check_apart(named: Mapping[torch.Tensor, str]) -> None:
    """Verify that weights share no memory: each has a master of its own, and they are updated in any order."""
    parameters = [shards.local(parameter) for parameter in named]
    called = [*named.values()]
    found = sorted((p.data_ptr(), p.nbytes, n) for n, p in enumerate(parameters) if p.numel())
    for (address, nbytes, number), (beyond, _, other) in pairwise(found):
        if beyond < address + nbytes:
            shared = " and ".join(called[n] for n in sorted((number, other)))
            raise ConfigError("params", f"{shared}, which share memory", "give tied weights as one parameter")


def check_parameter(parameter: torch.Tensor, name: str, place: torch.device | None) -> None:
    """Verify that a weight can be updated, and is on the one device that weights must be on, if any."""
    shards.cut_of(parameter, name, None)
    parameter = shards.local(parameter)
    if parameter.is_inference():
        allowed = "make it outside torch.inference_mode(), or clone it there: it has no version counter"
        raise ConfigError(name, "an inference tensor", allowed)
    if parameter.layout != torch.strided:
        raise ConfigError(name, parameter.layout, "use dense parameters")
    if parameter.dtype not in DTYPE_CODES:
        raise ConfigError(name, parameter.dtype, "use bfloat16, float16 or float32 weights")
    if parameter.device.type not in ("cpu", *BACKENDS):
        raise ConfigError(name, parameter.device, ADVICE)
    if place is not None and parameter.device != place:
        raise ConfigError(name, parameter.device, f"have all weights on {place}, or make a new optimizer")
    if parameter.is_neg():
        raise ConfigError(name, "a negated view", "use a weight of its own (weight.resolve_neg())")
    if parameter.numel() and not _is_dense(parameter):
        raise ConfigError(name, f"strides {parameter.stride()}", "use a contiguous weight (weight.contiguous())")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
