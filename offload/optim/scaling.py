"""The factors that the next step applies to gradients: of clipping, and of the loss scale.

torch multiplies the gradients by these factors; here the step applies them. If a gradient is changed in between, it
cannot be known whether the factors are meant for its new value, so the step refuses it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from offload.errors import ConfigError
from offload.optim import shards
from offload.optim.weights import BoundParameter

CLIP_EPS = 1e-6
"""`torch.nn.utils.clip_grad_norm_` adds this to the norm before it divides by it."""


class GradientId(NamedTuple):
    """Identifies a parameter's gradient and its content, so that a replaced or changed one is recognised.

    Attributes:
        tensor: The gradient; if it has departed from `.grad`, the parameter.
        version: The gradient's version; if it has departed, the parameter's number of arrivals.
        address: Where this rank's elements of the gradient lie; 0 if it has departed.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int
    address: int

    def is_same(self, other: GradientId) -> bool:
        """Return whether another id of the same parameter's gradient is equal: the gradient is as it was."""
        is_same_place = (self.version, self.address) == (other.version, other.address)
        return self.tensor() is other.tensor() and is_same_place


GradientIds = Iterable[tuple[BoundParameter, GradientId | None]]
"""All bound parameters, each with the id of its gradient, if it has one."""


class Scaling:
    """The factors for the next step, and the gradients that they are for.

    Attributes:
        clip: Factor of clipping; gradients are multiplied by it.
        loss_scale: The scale of the loss; gradients are divided by it.
        norm: Norm of the gradients when they were clipped last.
        scaled_ids: Ids of the gradients that the factors are for.
        has_clipped: Whether the caller has ever clipped.
    """

    has_clipped = False

    def __init__(self) -> None:
        self.norm = math.nan  # before any clipping; `reset` keeps it
        self._arrivals_then: dict[BoundParameter, int] = {}  # numbers of arrivals when the factors were set
        self.reset()

    def reset(self) -> None:
        """Forget the factors."""
        self.clip = self.loss_scale = 1.0
        self.scaled_ids: dict[BoundParameter, GradientId] = {}
        self._has_accumulated = False  # whether more was added to a gradient that the factors are for

    def _note_gradients(self, ids: GradientIds) -> None:
        """Note the gradients as they are: the factors are for them."""
        pairs = [*ids]
        self._arrivals_then = {bound: bound.arrivals for bound, _ in pairs}
        self.scaled_ids = {bound: id for bound, id in pairs if id is not None}

    def clip_to(self, max_norm: float, norm: float, ids: GradientIds) -> None:
        """Set the factor that clips gradients to `max_norm`, as `torch.nn.utils.clip_grad_norm_` would.

        `norm` is what `norm_with_factors` has returned: the present norm, with the factor of any clipping before.
        """
        self.norm = norm
        self.has_clipped = True
        factor = self.clip  # of clipping before, which `norm` includes
        if math.isnan(norm):
            factor = math.nan  # as torch's
        elif norm > max_norm:
            factor *= min(1.0, float(max_norm) / (norm + CLIP_EPS))  # torch's formula
        if factor != 1 or self.loss_scale != 1 or max_norm < math.inf:  # else the caller wants the norm alone
            self._note_gradients(ids)
        self.clip = factor  # last: an interrupt before this line leaves no factor for other gradients

    def norm_with_factors(self, norm_sq: float) -> float:
        """Return the norm of the gradients with the factors applied; `norm_sq` is the squared norm without them."""
        return math.sqrt(norm_sq) / abs(self.loss_scale) * self.clip  # a loss scale may be negative

    def unscale(self, scale: float, ids: GradientIds) -> None:
        """Let the step divide gradients by `scale`."""
        self._note_gradients(ids)
        self.loss_scale = scale

    def note_arrival(self, bound: BoundParameter, gradient: torch.Tensor, builds_graph: bool) -> None:
        """Note that autograd has accumulated a gradient, perhaps onto one that the factors are for.

        It is onto that one if the tensor is the same, and its version has grown by this one addition. If it has grown
        by more, somebody has changed (zeroed, say) the gradient in between. If backward builds a graph, the gradient
        is a new tensor each time: nobody can know then, so it counts as accumulated.
        """
        id = self.scaled_ids.get(bound)
        if id is None:
            return
        changes = shards.version(gradient) - id.version
        # FSDP2's gradients of one group are views of one tensor, and share its version counter.
        is_one_addition = changes > 0 if shards.is_dtensor(gradient) else changes == 1
        is_accumulated = id.tensor() is gradient and is_one_addition
        self._has_accumulated |= is_accumulated or builds_graph or gradient.requires_grad

    def note_addition(self, bound: BoundParameter) -> None:
        """Note that a gradient is added to one that has departed from `.grad`."""
        self._has_accumulated |= bound in self.scaled_ids

    def check(self, ids: GradientIds) -> None:
        """Before a step: refuse gradients that were changed or added to since the factors were set.

        Gradients that are as they were may pass. So may new ones alone: they are of the next step, as the one that
        the factors were for was skipped. If no gradient is as it was, the factors are forgotten.

        Raises:
            ConfigError: Autograd has added to these gradients or made others beside them, or somebody else has
                replaced or changed one.
        """
        if not self.scaled_ids:
            return
        has_same = False  # whether a gradient that the factors are for is still as it was
        has_new = self._has_accumulated  # whether autograd has added to a gradient, or made one, since
        changed_bound = None  # a parameter whose gradient somebody else has replaced or changed
        for bound, id in ids:
            if id is None:
                continue
            if bound in self.scaled_ids and id.is_same(self.scaled_ids[bound]):
                has_same = True
            elif bound.arrivals != self._arrivals_then.get(bound, 0):  # 0 for a parameter that was bound since
                has_new = True
            elif self._factors_matter_for(bound.parameter.grad):
                changed_bound = bound
        if has_new and (has_same or self._has_accumulated):
            raise ConfigError(
                "clip_grad_norm_",
                self.clip,
                "clip, and unscale, after the last backward pass of a step: more gradient has arrived; if that step "
                "was skipped, call optimizer.zero_grad()",
            )
        if changed_bound is not None and not has_new:
            raise ConfigError(
                "clip_grad_norm_",
                self.clip,
                f".grad of {changed_bound.name} was replaced or changed after clip_grad_norm_ or unscale_, which "
                "leave it to the step to scale it. Change gradients before, or use torch.nn.utils.clip_grad_norm_ "
                "and torch.amp.GradScaler, which scale .grad; if that step was skipped, call optimizer.zero_grad()",
            )
        if not has_same:
            self.reset()

    def _factors_matter_for(self, gradient: torch.Tensor | None) -> bool:
        """Return whether the factors would change a gradient: zeros stay zeros, unless the factor is NaN.

        They may change one that has departed from `.grad` (None), as its elements are not known here.
        """
        return math.isnan(self.clip) or gradient is None or bool(shards.local(gradient).any())
