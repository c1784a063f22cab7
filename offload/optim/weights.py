"""The parameters that an engine updates: one record each, and checks for weights changed from outside."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from offload import combinations
from offload.backends import ADVICE, BACKENDS
from offload.checkpoint.reader import PIECE_NUMEL
from offload.errors import CheckpointError, ConfigError, known
from offload.kernels.reference import DTYPE_CODES
from offload.kernels.stored import store_rounded
from offload.layout import Parameter
from offload.optim import shards
from offload.optim.dealt import Dealt, DealtWeight
from offload.optim.groups import Group, names
from offload.optim.holder import EngineHolder
from offload.optim.shards import Cut, Stamp
from offload.optim.slots import GradientSlot
from offload.rules import UpdateRule
from offload.session.state_copy import copy_run
from offload.weights.mapping import is_mapped

log = logging.getLogger("offload")


class Form(NamedTuple):
    """The form of a weight, for which its state is laid out.

    Attributes:
        dtype: The weight's.
        shape: Of the whole weight.
        strides: Of the whole weight, in elements.
        local_shape: Shape of this rank's elements.
        device: Where this rank's elements lie.
    """

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    local_shape: torch.Size
    device: torch.device


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class BoundParameter:
    """The record of a parameter that the engine updates.

    Attributes:
        parameter: The parameter, as in the optimizer's groups.
        position: Its index among the engine's parameters.
        name: Its name.
        form: The form of the weight for which the state was laid out.
        stamp: The weight's address and version after the last update or check, by which later changes are seen.
        cut: How the parameter is cut over ranks; None if this rank has all of it.
        arrivals: The number of gradients that autograd has accumulated.
        slot: Memory for the gradient, set by `SlotRoute`; other routes have none.
        gathered_version: Version of the gradient in the slot when its norm was gathered.
        used_gradient: The gradient that the last step has used, and its version then.
        was_different: Whether a master was loaded that rounds to another 16-bit weight than this one; False again
            once the weight is written.
        dealt_weight: For a `DTensor` that one rank updates whole: the copy on that rank.
    """

    parameter: torch.Tensor
    position: int
    name: str
    form: Form
    stamp: Stamp | None
    cut: Cut | None
    arrivals: int = 0
    slot: GradientSlot = field(init=False)
    gathered_version: int = -1
    used_gradient: tuple[weakref.ref[torch.Tensor], int] | None = None
    was_different: bool = False
    dealt_weight: DealtWeight | None = None

    @property
    def local(self) -> torch.Tensor:
        """The elements of the parameter that this rank updates, where they lie now: of a dealt `DTensor` the copy."""
        return shards.own(self.parameter, self.cut) if self.dealt_weight is None else self.dealt_weight.copy

    def gradient(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the gradient that this rank's step reads, and its weight; None if there is no gradient.

        Of a plain weight both are whole, also where this rank updates some rows only. Of a `DTensor` they are this
        rank's elements; of a dealt one the whole gradient and the copy, without rows on ranks that are not the owner.
        If the placements of `.grad` are not the weight's, it is reduced first, by a collective.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if self.dealt_weight is not None:
            return known(self.dealt_weight.gradient, "a gradient that was not sent"), self.dealt_weight.copy
        reduced = shards.reduced_gradient(gradient, self.parameter, self.name)
        if reduced is not gradient:
            self.parameter.grad = reduced  # so that it is not reduced twice
        return shards.local(reduced), shards.local(self.parameter)

    def current_stamp(self) -> Stamp:
        """Return the stamp of the weight as it is now; of a dealt one, that of this rank's shard."""
        elements = self.local if self.dealt_weight is None else shards.local(self.parameter)
        return shards.stamp(self.parameter, elements, self.stamp)


class AnotherRankFailedError(CheckpointError):
    """Another rank could not load; raised on all ranks that could, so no further exchange is needed."""


class Weights:
    """All bound parameters of one optimizer.

    Attributes:
        bound: The records by parameter, in the engine's order.
        required_device: The device that all weights must be on; None for any.
        rows_over: With `shard`, the mesh of ranks that each update some rows of every weight; else None.
        owners: By dealt weight, its owner rank: the number in `rows_over`, or for a `DTensor` in its own mesh.
        dealt: By name of a mesh's process group: the weights that are dealt to its ranks whole.
        are_in_file: Whether some weights lie in a mapped file.
    """

    def __init__(self, holder: EngineHolder) -> None:
        self.bound: dict[torch.Tensor, BoundParameter] = {}
        self.required_device: torch.device | None = None
        self.rows_over: Any = None
        self.owners: dict[torch.Tensor, int] = {}
        self.dealt: dict[str, Dealt] = {}
        self.are_in_file = False
        self._holder = holder
        self._has_noted_changes = False  # whether users' writes to weights have been logged
        self._has_differences = False  # whether some weight `was_different`, and no warning has said so

    def describe(
        self,
        groups: Sequence[Group],
        parameters: Iterable[torch.Tensor],
        kept_as: Callable[[torch.Tensor, str, int], tuple[int, UpdateRule | None]],
    ) -> tuple[Parameter, ...]:
        """Return the engine's descriptions of parameters that are to be bound; refuse those that cannot be.

        Also sets `are_in_file` if one lies in a mapped file.

        Args:
            groups: The optimizer's, for names.
            parameters: The parameters.
            kept_as: Given a parameter, its name and its group's number, returns its group in the engine, and its own
                rule or None for the optimizer's.
        """
        labels = names(groups)
        name_of = {parameter: name for parameter, name, _ in labels}
        group_of = {parameter: group for parameter, _, group in labels}
        for parameter in parameters:
            check_parameter(parameter, name_of[parameter], self.required_device)
            if is_mapped(shards.local(parameter).data_ptr()):
                self.are_in_file = True
                # Updates in backward are refused: they keep new weights in memory, where there is no room for them.
                combinations.IMAGES_OF_MAPPED.check("overlap", self._holder.config.overlap)
        shards.check_apart({parameter: name_of[parameter] for parameter in (*self.bound, *parameters)})
        descriptions = []
        for parameter in parameters:
            name = name_of[parameter]
            group, rule = kept_as(parameter, name, group_of[parameter])
            descriptions.append(self._describe(parameter, name, group, rule))
        return tuple(descriptions)

    def deal(self, mesh: Any, works: Mapping[torch.Tensor, float], names: Mapping[torch.Tensor, str]) -> None:
        """Deal weights to the ranks of a mesh: each is updated whole by one rank. A collective.

        Args:
            mesh: A mesh of one dimension: `rows_over`, or the `DTensor`s'.
            works: The weights to deal, each with the work of its update.
            names: Names of these weights; also of others.
        """
        dealt = self.dealt.setdefault(mesh.get_group().group_name, Dealt(mesh))
        self.owners.update(dealt.assign_owners(works))
        # Only `DTensor`s need copies: plain weights are whole on all ranks.
        dealt.add({weight: names[weight] for weight in works if shards.is_dtensor(weight)}, self.owners)

    def undo_deal(self, parameters: Iterable[torch.Tensor]) -> None:
        """Undo `deal` for weights that were not bound after it, as adding them to the engine failed."""
        for parameter in parameters:
            if parameter not in self.bound:
                self.owners.pop(parameter, None)
                for dealt in self.dealt.values():
                    dealt.forget(parameter)

    def is_dealt(self, parameter: torch.Tensor) -> bool:
        """Return whether a weight was dealt: one rank updates it whole."""
        return parameter in self.owners

    def _describe(self, parameter: torch.Tensor, name: str, group: int, rule: UpdateRule | None) -> Parameter:
        """Return the engine's description of the elements of a parameter that this rank updates.

        `group` is the engine's; `rule` is None for the optimizer's own.
        """
        cut = shards.cut_of(parameter, name, self.rows_over, self.owners.get(parameter))
        dealt_weight = self._dealt_weight_of(parameter)
        elements = shards.own(parameter, cut) if dealt_weight is None else dealt_weight.copy  # that this rank updates
        has_copies_in_host_memory = dealt_weight is not None and elements.device.type == "cpu"
        return Parameter(
            name,
            elements.numel(),
            DTYPE_CODES[parameter.dtype],
            group,
            start=cut.start if cut is not None else 0,
            unsharded_numel=parameter.numel(),
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            box=None if cut is None or cut.is_run else cut.box,  # `start` and `numel` describe a run
            rule=rule,
            dealt_copy_bytes=2 * elements.nbytes if has_copies_in_host_memory else 0,  # of weight and gradient
        )

    def _dealt_weight_of(self, parameter: torch.Tensor) -> DealtWeight | None:
        """Return the copy of a `DTensor` that was dealt; None for other weights."""
        return next((dealt.weights[parameter] for dealt in self.dealt.values() if parameter in dealt.weights), None)

    def bind(self, parameter: torch.Tensor, name: str) -> BoundParameter:
        """Bind the weight of the engine's next parameter; return its record, which the caller puts into `bound`."""
        dealt_weight = self._dealt_weight_of(parameter)
        bound = BoundParameter(
            parameter,
            position=len(self.bound),
            name=name,
            form=_form_of(parameter),
            stamp=None,  # set below, by the record itself
            cut=shards.cut_of(parameter, name, self.rows_over, self.owners.get(parameter)),
            dealt_weight=dealt_weight,
        )
        bound.stamp = bound.current_stamp()
        self._holder.engine.bind_weight(bound.position, bound.local.data_ptr())
        return bound

    def of(self, parameter: Any) -> BoundParameter:
        """Return a parameter's record; refuse a parameter that has none."""
        self._holder.open()  # which binds parameters, if that was deferred
        bound = self.bound.get(parameter) if isinstance(parameter, torch.Tensor) else None
        if bound is None:
            is_frozen = isinstance(parameter, torch.Tensor) and not parameter.requires_grad
            why = ": this one is frozen (requires_grad=False), and has no state" if is_frozen else ""
            advice = f"give a parameter that this optimizer updates{why}"
            raise ConfigError("parameter", type(parameter).__name__, advice)
        return bound

    def rebind_changed(self) -> None:
        """Bind weights that were moved since the last check; let the next step reload masters of those written to.

        Raises:
            ConfigError: A weight cannot be updated any more.
        """
        changed_names = []
        stamps = [(bound, bound.current_stamp()) for bound in self.bound.values()]
        changed = [(bound, stamp) for bound, stamp in stamps if stamp != bound.stamp]  # moved or written to
        if any(bound.stamp is None or stamp.address != bound.stamp.address for bound, stamp in changed):
            # Moved weights may share memory now. A stamp is None only while `bind` makes the record.
            shards.check_apart({parameter: bound.name for parameter, bound in self.bound.items()})
        for bound, stamp in changed:
            check_form(bound)
            check_parameter(bound.parameter, bound.name, self.required_device)
            if bound.dealt_weight is None:  # a dealt one is bound to its copy, which `refresh` makes anew
                self._holder.engine.bind_weight(bound.position, stamp.address)
                if self._reload_master(bound):
                    changed_names.append(bound.name)
            bound.stamp = stamp
        self._note_changes(changed_names)

    def refresh(self, *, gradients: bool) -> None:
        """Send changed dealt weights to their owners, with `gradients` also all their gradients. Collective."""
        if self.dealt:
            self._holder.check_open()  # a closed rank must not begin: others would wait, or mistake the exchange
        for dealt in self.dealt.values():
            changed = [weight.parameter for weight in dealt.refresh(gradients) if weight.is_own]
            # If one is not bound, its addition was interrupted after it had been dealt.
            bounds = [self.bound[parameter] for parameter in changed if parameter in self.bound]
            self._note_changes([bound.name for bound in bounds if self._reload_master(bound)])

    def reload_masters(self) -> None:
        """Let the next step set every element of all masters from the weights."""
        for bound in self.bound.values():
            if bound.dealt_weight is not None:
                bound.dealt_weight.note_stale()  # so that `refresh` sends the shards to its rank
            self._holder.engine.reload_master(bound.position)

    def forget_gradients(self) -> None:
        """Free the whole gradients of dealt weights, which ranks have sent to the owners."""
        for dealt in self.dealt.values():
            dealt.free_gradients()

    def free_copies(self) -> None:
        """Free the copies of dealt weights; the engine, which updates them in place, has been closed."""
        for dealt in self.dealt.values():
            for weight in dealt.weights.values():
                weight.free()

    def _reload_master(self, bound: BoundParameter) -> bool:
        """Let the next step set a master's elements from the weight's, where these are not what the master rounds to.

        Returns:
            Whether the master may lose bits by that: where the weight has changed, it becomes the 16-bit weight.
        """
        bound.was_different = False
        self._holder.engine.reload_master(bound.position, whole=False)
        # A float32 weight is its own master, and before the first update the master is made from the weight anyway.
        return bound.parameter.dtype is not torch.float32 and bool(self._holder.engine.step_count(bound.position))

    def _note_changes(self, changed_names: Sequence[str]) -> None:
        """Log, once, that weights were written to outside the optimizer."""
        if changed_names and not self._has_noted_changes:
            self._has_noted_changes = True
            # Whether a weight differs from its rounded master is found out only in the update.
            log.info(
                "%d weights (%s, ...) were written to outside the optimizer; where they are not what their masters "
                "round to, the masters become the weights; moments stay (said once)",
                len(changed_names),
                changed_names[0],
            )

    def are_where_bound(self) -> bool:
        """Return whether all weights lie where the engine knows them."""
        stamps = ((bound.current_stamp(), bound.stamp) for bound in self.bound.values())
        return all(last is not None and now.address == last.address for now, last in stamps)

    def read_by_updates(self) -> list[torch.Tensor] | None:
        """Return fp32 weights, which updates read as masters; None if a weight does not lie where it is bound."""
        if not self.are_where_bound():
            return None
        return [bound.local.detach() for bound in self.bound.values() if bound.form.dtype is torch.float32]

    def note_different(self, bounds: Iterable[BoundParameter]) -> None:
        """Note weights that were not what the loaded masters round to, as `differing` has found, for a warning."""
        for bound in bounds:
            bound.was_different = self._has_differences = True

    def warn_of_differences(self) -> None:
        """Warn, before the first update after a load, of weights that differed from the loaded masters."""
        if not self._has_differences:
            return
        self._has_differences = False
        names = [bound.name for bound in self.bound.values() if bound.was_different]
        if names:
            log.warning(
                "%d weights (%s, ...) "
                "were not those that the loaded masters belong to, and have become what the masters say; "
                "load the model's weights, too, or leave `master` out of what is loaded",
                len(names),
                names[0],
            )

    def note_written(self, bounds: Iterable[BoundParameter]) -> None:
        """Note that the engine has written to weights.

        Torch's version counters count it. New stamps keep it from looking like a user's change at the next check.
        """
        bounds = [*bounds]
        increment_version([bound.parameter for bound in bounds])
        for bound in bounds:
            bound.stamp = bound.current_stamp()
            bound.was_different = False

    @property
    def groups(self) -> list[Any]:
        """The process groups of the first mesh that weights are cut over; none if this rank has whole weights."""
        meshes = (bound.cut.mesh for bound in self.bound.values() if bound.cut is not None)
        mesh = next(meshes, None) if self.rows_over is None else self.rows_over
        return [] if mesh is None else [mesh.get_group(dimension) for dimension in range(mesh.ndim)]

    @property
    def row_sharded(self) -> list[BoundParameter]:
        """Weights that are cut over `rows_over`: each rank, or if dealt its owner, updates rows that others need."""
        return [bound for bound in self.bound.values() if bound.cut is not None and bound.cut.mesh is self.rows_over]

    @property
    def are_exchanged(self) -> bool:
        """Whether ranks exchange updated weights: these are cut by rows, or dealt."""
        return self.rows_over is not None or bool(self.dealt)

    def agree_on_load(self, error: Exception | None = None) -> None:
        """Raise this rank's error, or `AnotherRankFailedError` if only other ranks could not load. Collective.

        `error` is this rank's, or None if it could load.
        """
        answers: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(answers, None if error is None else str(error))
        failed = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
        if error is not None:
            raise error  # now that the others know
        if failed:
            raise AnotherRankFailedError(f"rank {failed[0][0]} could not load, so no rank goes on: {failed[0][1]}")

    def gather(self, note: bool | None = None) -> bool | None:
        """Exchange the weights that each rank has updated; a collective, if weights are cut by rows or dealt.

        Owners send dealt `DTensor`s back to the shards of all ranks. Of plain weights, owners broadcast dealt ones,
        and ranks gather the rows of all others.

        Args:
            note: A flag that is exchanged with them (has this rank had a SIGTERM?); None on all ranks for none.

        Returns:
            Whether any rank's note is True; None without notes, or if no rows were exchanged.
        """
        bounds = self.row_sharded
        if bounds or self.dealt:
            self._holder.engine.finish(on_gpu=True)  # as collectives read the weights on streams of their own
        for dealt in self.dealt.values():
            dealt.scatter_copies()
        for bound in self.bound.values():
            if bound.dealt_weight is not None:  # `scatter_copies` has written to its shards
                bound.stamp = bound.current_stamp()
        if not bounds:
            return None
        ranks = self.rows_over.size()
        device = bounds[0].parameter.device
        # Broadcasts the dealt ones; the others are left to `shards.gather`.
        not_dealt = shards.send([(bound.parameter, bound.cut) for bound in bounds], self.rows_over)
        if note is None:
            shards.gather(not_dealt, self.rows_over)
        else:  # the notes travel as one more weight: each rank sends one row, and gets those of the others
            notes = torch.full((ranks,), note, dtype=torch.bool, device=device)
            shards.gather([*not_dealt, notes], self.rows_over)
        for bound in bounds:
            bound.stamp = bound.current_stamp()  # so that rows of other ranks do not count as users' changes
        return None if note is None else bool(notes.any())


def differing(masters: Mapping[BoundParameter, torch.Tensor]) -> list[BoundParameter]:
    """Return the parameters whose 16-bit weights are not what their masters round to.

    `masters` have their elements in the order in which the weights' elements lie in memory.
    """
    return [bound for bound, master in masters.items() if _differs_from_rounded(bound, master)]


def _differs_from_rounded(bound: BoundParameter, master: torch.Tensor) -> bool:
    """Return whether a 16-bit weight is not what a master rounds to, bit for bit; compared piece by piece."""
    weight = bound.local.detach()
    numel = weight.numel()
    dtype = weight.dtype
    if dtype is torch.float32:
        return False
    flat = weight.as_strided((numel,), (1,))  # in the order of memory, as the master
    # Host buffers for one piece at a time: the weight may lie on a device, and all of it is never copied at once.
    values = torch.empty(min(PIECE_NUMEL, numel), dtype=torch.float32, device="cpu")
    weights_here = torch.empty(values.numel(), dtype=dtype, device="cpu")
    rounded = torch.empty(values.numel(), dtype=dtype, device="cpu")
    for start in range(0, numel, PIECE_NUMEL):
        piece = slice(numel - start)  # all of the buffers, or less for the last piece
        copy_run(flat, start, weights_here[piece])
        copy_run(master, start, values[piece])
        store_rounded(values[piece], rounded[piece])
        if not torch.equal(weights_here[piece].view(torch.int16), rounded[piece].view(torch.int16)):
            return True
    return False


def _form_of(parameter: torch.Tensor) -> Form:
    """Return the form of a parameter as it is now."""
    local = shards.local(parameter)
    return Form(parameter.dtype, parameter.shape, parameter.stride(), local.shape, local.device)


def check_form(bound: BoundParameter) -> None:
    """Refuse a weight whose form is not `bound.form` any more: an update could write to memory beside it."""
    form = _form_of(bound.parameter)
    if form != bound.form:
        text = f"{form.dtype}, shape {tuple(form.shape)}, strides {form.strides}, on {form.device}"
        advice = "make a new optimizer after changing a weight's dtype, shape, memory format or device"
        raise ConfigError(bound.name, text, advice)


def check_parameter(parameter: torch.Tensor, name: str, required: torch.device | None) -> None:
    """Verify that a weight can be updated and saved, and is on the required device if there is one."""
    shards.cut_of(parameter, name, rows_over=None)  # refuses a `DTensor` that cannot be updated
    parameter = shards.local(parameter)
    if parameter.is_inference():
        advice = "make it outside torch.inference_mode(), or clone it there: it has no version counter"
        raise ConfigError(name, "an inference tensor", advice)
    if parameter.layout != torch.strided:
        raise ConfigError(name, parameter.layout, "use dense parameters")
    if parameter.dtype not in DTYPE_CODES:
        raise ConfigError(name, parameter.dtype, "use bfloat16, float16 or float32 weights")
    if parameter.device.type not in ("cpu", *BACKENDS):
        raise ConfigError(name, parameter.device, ADVICE)
    if required is not None and parameter.device != required:
        raise ConfigError(name, parameter.device, f"have all weights on {required}, or make a new optimizer")
    if parameter.is_neg():
        raise ConfigError(name, "a negated view", "use a weight of its own (weight.resolve_neg())")
    if parameter.numel() and not shards.is_dense(parameter):
        raise ConfigError(name, f"strides {parameter.stride()}", "use a contiguous weight (weight.contiguous())")
