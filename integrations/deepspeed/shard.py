"""`Shard`: one rank's optimizer state, as DeepSpeed's optimizers see it.

DeepSpeed keeps a rank's part of the model as flat tensors, each a row of *pieces* (this rank's run of one parameter).
The shard gives pieces to `offload.Engine` as parameters, takes in their gradients (`gradients.py` says where they are
kept), remembers which pieces have one, and updates all of those in one step.

A *window* is the time between two steps, in which gradients arrive. It begins with the first gradient, and is closed
at the end of a step; until the next one begins, the gradients of the last window can still be read.

Invariants:
  * a piece takes part in a step if and only if a gradient has arrived since the last one;
  * the first gradient of a window replaces the last window's, later ones are added;
  * padding that DeepSpeed adds to a flat tensor has no state here and reads as zero.

Not here: reductions, gathering of weights, loss scale (DeepSpeed's).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload import ConfigError, DtypeCode, Engine, OffloadConfig, Parameter
from offload.checkpoint.torch_files import without_memory
from offload.combinations import DEEPSPEED_MUON
from offload.integrations.deepspeed.gradients import ArrivingGradients, SlotGradients, transit_bytes
from offload.integrations.deepspeed.pieces import Piece
from offload.rules import ADAMW, LION, GroupScalars, UpdateRule


@dataclass
class FlatState:
    """The state of one flat tensor in memory: fp32, padding included.

    Attributes:
        tensors: By the rule's names, the master first; shape [numel of the flat tensor] each.
        step: The largest update count of its pieces.
    """

    tensors: dict[str, torch.Tensor]
    step: int

    @property
    def master(self) -> torch.Tensor:
        """The master."""
        return self.tensors["master"]

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """The state tensors besides the master."""
        return {name: tensor for name, tensor in self.tensors.items() if name != "master"}


class Shard:
    """One rank's state and its update.

    Args:
        pieces: All of them; names are unique.
        weights: The flat tensors of weights, all on the CPU or all on `device`; the engine writes to them.
        config: Tiers and budgets of this rank.
        device: The GPU that weights are on.
        gradient_dtype: The dtype in which gradients are summed; None for that of the weights.
        among: See `offload.Engine`.
        rule: See `offload.Engine`.
        from_accelerator: Whether gradients come from an accelerator, though the weights are on the CPU.

    Attributes:
        names: Names of the state tensors, the master first.
        gradients: The gradients of the window (the time between two steps).
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        weights: Sequence[torch.Tensor],
        config: OffloadConfig,
        device: torch.device | None = None,
        gradient_dtype: torch.dtype | None = None,
        among: tuple[int, int] | None = None,
        rule: UpdateRule = ADAMW,
        from_accelerator: bool = False,
    ) -> None:
        self.names = rule.names
        self.pieces = tuple(pieces)
        self.index = {piece.name: number for number, piece in enumerate(self.pieces)}
        self.weights = list(weights)
        # Numbers of the pieces that have a gradient of the open window or, if none is open, of the last one.
        self._arrived: dict[int, None] = {}
        self._is_window_open = False
        codes = [DtypeCode.of(weight.dtype) for weight in self.weights]
        parameters = [
            Parameter(p.name, p.numel, codes[p.flat], p.group, p.start, p.unsharded_numel, p.shape)
            for p in self.pieces
        ]
        reads_later = config.gradient_memory is None  # else a gradient is read before `arrived` has returned
        in_slots = device is None and reads_later
        sums = "float32" if gradient_dtype is torch.float32 else "parameter"
        config = dataclasses.replace(config, gradient_dtype=sums)
        if not in_slots:
            # DeepSpeed needs the state before a first backward pass could show how much memory it leaves free. Not
            # `keep_grads`: gradients are given to the engine as they arrive, and DeepSpeed does not keep them.
            config = dataclasses.replace(config.opened_early(), keep_grads=False)
        dtypes = [gradient_dtype or weight.dtype for weight in weights]
        in_transit: list[int] = []  # sizes of the gradients that are copied to slots through pinned memory
        if in_slots and from_accelerator:
            in_transit = [piece.numel * dtypes[piece.flat].itemsize for piece in self.pieces]
        passing = transit_bytes(in_transit)
        self.engine = Engine(
            parameters, config, gradient_slots=in_slots, device=device, among=among, rule=rule, passing_bytes=passing
        )
        weights_device = weights[0].device if weights else torch.device("cpu")  # all are on one device
        common = self.pieces, self.engine, weights_device, dtypes
        self.gradients = SlotGradients(*common) if in_slots else ArrivingGradients(*common, reads_later=reads_later)
        self._bind_weights()

    def read_by_updates(self) -> list[torch.Tensor] | None:
        """Return the memory that updates during backward read: gradients, and fp32 weights, which are masters.

        The engine keeps these tensors alive until the step. None if weights were moved since they were bound: then
        nothing is updated in this backward pass.
        """
        if self._bound_at != [weight.data_ptr() for weight in self.weights]:
            return None
        masters = [weight.detach() for weight in self.weights if weight.dtype is torch.float32]
        return [*self.gradients.kept, *masters]

    def _bind_weights(self) -> None:
        """Tell the engine at which address each piece's weights lie now."""
        self._bound_at = [weight.data_ptr() for weight in self.weights]
        for number, piece in enumerate(self.pieces):
            weight = self.weights[piece.flat]
            self.engine.bind_weight(number, weight.data_ptr() + piece.offset * weight.dtype.itemsize)

    # Gradients

    def gradient(self, number: int, numel: int | None = None) -> torch.Tensor:
        """Return a piece's gradient, complete, to be read; its first `numel` elements if that is given."""
        gradient: torch.Tensor = self.gradients.read(number, numel, arrived=number in self._arrived)
        return gradient

    def accumulate(self, number: int, gradient: torch.Tensor, *, final: bool) -> None:
        """Accept a piece's reduced gradient: flat, on any device; `final` if no more is expected before the step."""
        self._begin_window_if_none()
        self.gradients.accept(number, gradient, first=number not in self._arrived, final=final)
        self._arrived[number] = None

    def lend_sum(self, number: int) -> torch.Tensor:
        """Return the memory in which a piece's gradients of this window are summed; the caller adds a gradient to it.

        It is zeros if none has arrived in this window.
        """
        self._begin_window_if_none()
        slot: torch.Tensor = self.gradients.lend(number, None, arrived=number in self._arrived)
        self.note_changed(number)  # already now: else another call for this piece would make the sum zeros again
        return slot

    def note_changed(self, number: int, *, gathered: bool = False) -> None:
        """Note that a piece has a gradient, or that the one it has was changed in place.

        `gathered` is whether its norm is to be taken now, as no more of it is expected before the step.
        """
        self._begin_window_if_none(number)  # the caller may have written to it before, as `lend_gradient` allows
        self._arrived[number] = None
        self.gradients.note_changed(number, gathered=gathered)

    def _begin_window_if_none(self, lent: int | None = None) -> None:
        """Begin a window if none is open: wait for a pending step, and forget the gradients of the last window.

        The gradient of the piece number `lent` is kept: a caller of `lend_gradient` may have written to it since.
        """
        if not self._is_window_open:
            self.engine.finish()  # a pending step reads the gradients that the next ones overwrite
            self.gradients.begin(lent)
            self._arrived.clear()
            self._is_window_open = True  # last: after an interrupt all of this is repeated

    def close_window(self) -> None:
        """Close the window: a step has used its gradients, or drops them. They can be read until more arrive.

        Updates in backward that no step has confirmed are revoked. With `gradient_memory` the gradients cannot be
        read any more.
        """
        self.gradients.settle()  # a copy of a dropped gradient must not end after one of the next
        self._is_window_open = False
        self.gradients.end()
        self.engine.gradients.drop()

    def lend_gradient(self, number: int, numel: int | None = None) -> torch.Tensor:
        """Return a piece's gradient to a caller that may write to it, after waiting for a pending step.

        A gradient of the open window counts as changed. A piece without a gradient in this window (or, if none is
        open, in the last one) has zeros. `numel` is how many elements, those beyond the piece being padding; None for
        the piece's own.
        """
        self.engine.finish()  # as in `_begin_window_if_none`
        arrived = number in self._arrived
        lent: torch.Tensor = self.gradients.lend(number, numel, arrived=arrived)
        if arrived and self._is_window_open:
            self.note_changed(number)  # the caller may change it, so that its gathered norm is no longer right
        return lent

    @property
    def active(self) -> list[int]:
        """Numbers of the pieces that the next step updates, in order."""
        return sorted(self._arrived) if self._is_window_open else []

    def norms(self) -> dict[str, float]:
        """Return the L2 norm of each gradient by name; not finite if and only if an element is not."""
        self.gradients.settle()
        active = self.active
        norms = zip(active, self.engine.gradients.norms_sq(active), strict=True)
        return {self.pieces[number].name: math.sqrt(norm_sq) for number, norm_sq in norms}

    def is_finite(self) -> bool:
        """Return whether all elements of all gradients are finite."""
        self.gradients.settle()
        return math.isfinite(self.engine.gradients.norm_sq(self.active))

    # Work

    def step(
        self, groups: Sequence[Any], factor: float, loss_scale: float = 1.0, order: Mapping[int, int] | None = None
    ) -> None:
        """Update every piece that has a gradient.

        Args:
            groups: Hyperparameters, by group.
            factor: An fp32 number by which gradients are multiplied first: it unscales them, and clips.
            loss_scale: The loss scale. If `factor` is 1 / `loss_scale`, nothing is clipped.
            order: By number, the position of each piece in the order in which callers wait for them, pieces without
                one first. Given an order, this returns when the step has begun; with None, when it is over.
        """
        self.gradients.settle()
        self._bind_weights()  # anew, as DeepSpeed may have moved them
        # The engine divides gradients by `scale`, then multiplies them by `clip`. Updates in backward had the loss
        # scale and 1, and are confirmed only if the step has the same. A factor that clips, too, is given as `clip`.
        is_clipped = factor != float(np.float32(1.0 / loss_scale))
        scale, clip = (1.0, factor) if is_clipped else (loss_scale, 1.0)
        if order is None:
            self.engine.step(groups, scale=scale, clip=clip, active=self.active)
            self.engine.finish(on_gpu=True)  # ZeRO-3 gathers weights on a stream that waits for no other
            return
        active = sorted(self.active, key=lambda number: order.get(number, -1))
        # What the step reads and writes while it goes on: the engine keeps it alive.
        memory = [*(weight.detach() for weight in self.weights), *self.gradients.kept]
        self.engine.step(groups, scale=scale, clip=clip, active=active, pending=memory)

    def reload_masters(self) -> None:
        """Have the next update, or save, take the masters from the weights; the moments are unchanged.

        Reads of state show these masters at once.
        """
        self._bind_weights()
        for number in range(len(self.pieces)):
            self.engine.reload_master(number)

    def forget_used_gradients(self) -> None:
        """Forget the gradients of the last window, if none is open, so that memory besides slots can be freed."""
        if not self._is_window_open:
            self.gradients.begin(None)  # as when the next window begins, which forgets them again

    # State in memory

    def read(self, number: int, name: str, numel: int) -> torch.Tensor:
        """Return a copy of a state tensor of one piece: fp32, on the CPU, padded with zeros to `numel` elements."""
        state = torch.zeros(numel, dtype=torch.float32, device="cpu")
        state[: self.pieces[number].numel] = self.engine.state.read([number])[0][name]
        return state

    def write(self, number: int, name: str, value: torch.Tensor) -> None:
        """Replace a state tensor of one piece; elements of `value` beyond the piece are padding."""
        flat = value.detach().reshape(-1)[: self.pieces[number].numel].to("cpu", torch.float32)
        # As in DeepSpeed, the weights follow with the next step.
        self.engine.state.write({number: {name: flat}}, weights=False)

    def steps(self) -> dict[str, int]:
        """Return the number of updates of each piece by name."""
        return {piece.name: self.engine.step_count(number) for number, piece in enumerate(self.pieces)}

    def _flat_states(self, tensors: Sequence[torch.Tensor]) -> list[FlatState]:
        """Return the states of flat tensors, given a list of tensors: those of the first flat tensor, then the next.

        Each flat tensor has one state tensor for each of `names`, in that order.
        """
        count = len(self.names)
        rows = (tensors[count * flat : count * (flat + 1)] for flat in range(len(self.weights)))
        states = [FlatState(dict(zip(self.names, row, strict=True)), 0) for row in rows]
        for number, piece in enumerate(self.pieces):
            states[piece.flat].step = max(states[piece.flat].step, self.engine.step_count(number))
        return states

    @property
    def _state_numels(self) -> list[int]:
        """The numbers of elements of all state tensors, in the order of `_flat_states`."""
        return [weight.numel() for weight in self.weights for _ in self.names]

    def without_memory(self) -> list[FlatState]:
        """Return placeholders for the state of all flat tensors: they take no memory, and are saved as holes."""
        return self._flat_states([*map(without_memory, self._state_numels)])

    def export(self) -> list[FlatState]:
        """Return a copy of the state of all flat tensors, zeros as padding; see `offload.Engine`'s `state.read`."""
        with contextlib.closing(copy := self.engine.state.new_copy(self._state_numels)):

            def copy_run(number: int, first: int, views: Mapping[str, torch.Tensor]) -> None:
                """Copy a run of a piece's state, from the piece's element `first` on, to its place."""
                piece = self.pieces[number]
                for tensor_number, name in enumerate(self.names):
                    # Tensors in the order of `_flat_states`.
                    copy.write(len(self.names) * piece.flat + tensor_number, piece.offset + first, views[name])

            self.engine.state.visit(copy_run)
        return self._flat_states(copy.tensors)  # closing has ended the writing; the tensors stay

    def load(self, states: Sequence[FlatState], steps: Mapping[str, int]) -> None:
        """Replace all state.

        Args:
            states: The state of each flat tensor.
            steps: Number of updates of pieces, by name; a piece that is not in it gets its flat tensor's.
        """
        values: dict[int | str, dict[str, torch.Tensor]] = {}
        counts: dict[int | str, int] = {}
        for number, piece in enumerate(self.pieces):
            state = states[piece.flat]
            values[number] = {
                tensor_name: tensor.narrow(0, piece.offset, piece.numel)
                for tensor_name, tensor in state.tensors.items()
            }
            counts[number] = steps.get(piece.name, state.step)
        self.engine.state.write(values, counts, weights=False)  # DeepSpeed loads the weights

    def load_in_place(self, checkpoint: Any, rank: int, ranks: int) -> None:
        """Go on from a checkpoint of the engine, which also sets the weights; see `Checkpoints.load`."""
        self._bind_weights()
        self.engine.checkpoints.load(checkpoint, rank=rank, ranks=ranks)
        self.engine.finish(on_gpu=True)  # other streams may read the weights next

    def close(self) -> None:
        """Free memory and files; idempotent."""
        self.engine.close()


class LionGroups(torch.optim.Optimizer):
    """A torch optimizer that has Lion's parameter groups and is never stepped.

    DeepSpeed is given it where a config names Lion, in place of DeepSpeed's own Lions, which are native code.
    """

    def __init__(self, params: Any, **params_of_config: Any) -> None:
        super().__init__(params, {**LION.defaults, **params_of_config})


def rule_of(optimizer: Any) -> UpdateRule:
    """Return the rule of an optimizer that `check_optimizer` accepts."""
    return LION if _is_lion(type(optimizer)) else ADAMW


def _is_lion(kind: type) -> bool:
    """Return whether a class is ours for Lion, or DeepSpeed's."""
    return kind is LionGroups or (
        kind.__module__.startswith("deepspeed.ops.lion") and kind.__name__ in ("DeepSpeedCPULion", "FusedLion")
    )


def group_values(optimizer: Any) -> list[Any]:
    """Return the present hyperparameters of the groups of an optimizer that `check_optimizer` accepts."""
    if rule_of(optimizer) is LION:
        return [LION.values({**LION.defaults, **group}) for group in optimizer.param_groups]
    return [
        GroupScalars(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=_is_decoupled(optimizer, group),
            maximize=bool(group.get("maximize", False)),
        )
        for group in optimizer.param_groups
    ]


def _is_decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Return whether weight decay of a group is decoupled, as in AdamW."""
    if hasattr(optimizer, "adam_w_mode"):  # DeepSpeed's
        return bool(optimizer.adam_w_mode)
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay", False))


def check_optimizer(optimizer: Any) -> None:
    """Check that a client's optimizer is an Adam or a Lion whose hyperparameters can be taken over.

    Raises:
        ConfigError: The optimizer is another one, or has unsupported hyperparameters.
    """
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if "muon" in name.lower():
        DEEPSPEED_MUON.refuse("optimizer", name)
    known = (
        kind in (torch.optim.Adam, torch.optim.AdamW)
        or _is_lion(kind)
        or (kind.__module__.startswith("deepspeed.ops.adam") and kind.__name__ in ("DeepSpeedCPUAdam", "FusedAdam"))
    )
    if not known:
        allowed = (
            'give torch.optim.AdamW or Adam, or none and an "optimizer" of type AdamW, Adam or Lion in the config'
        )
        raise ConfigError("optimizer", name, allowed)
    if not getattr(optimizer, "fp32_optimizer_states", True):
        raise ConfigError("fp32_optimizer_states", False, "use true: moments are fp32")
    for group in optimizer.param_groups:
        if group.get("amsgrad"):
            raise ConfigError("amsgrad", True, "use false: the engine keeps two moments, not three")
        if not group.get("bias_correction", True):
            raise ConfigError("bias_correction", False, "use true")
