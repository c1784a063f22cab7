"""The factors that the next step applies to gradients: of clipping, and of the loss scale.

In torch they are in the gradients; here the step applies them. So nobody can tell of a gradient that was changed in
between whether they are meant for what it is now, and the step refuses it.
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
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm before it divides."""


class Note(NamedTuple):
    """What tells a parameter's gradient from others.

    One that has left the GPU has the parameter in its place, and the number of arrivals for a version.
    """

    of: weakref.ref[torch.Tensor]
    version: int
    address: int

    def is_same(self, other: Note) -> bool:
        """Return whether nothing tells two notes of one parameter's gradient apart."""
        return self.of() is other.of() and self[1:] == other[1:]


Notes = Iterable[tuple[BoundParameter, Note | None]]
"""All bound parameters, and what their gradients are, if they have one."""


class Scaling:
    """Factors, and the gradients that they are for.

    Attributes:
        clip: Factor of clipping.
        loss_scale: What gradients were multiplied by.
        norm: Of the gradients when they were clipped last.
        noted: The gradients that the factors are for.
    """

    def __init__(self) -> None:
        self.norm = math.nan
        self._arrivals: dict[BoundParameter, int] = {}
        self.forget()

    def forget(self) -> None:
        """Forget the factors."""
        self.clip = self.loss_scale = 1.0
        self.noted: dict[BoundParameter, Note] = {}
        self._accumulated_onto_noted = False

    def _note(self, notes: Notes) -> None:
        """Take note of the gradients as they are: from now on the step has a factor for them."""
        found = [*notes]
        self._arrivals = {bound: bound.arrivals for bound, _ in found}
        self.noted = {bound: note for bound, note in found if note is not None}

    def clip_to(self, max_norm: float, norm: float, notes: Notes) -> None:
        """Clip gradients that have some norm, as `unscaled` returns it."""
        self.norm = norm
        factor = self.clip
        if not norm <= max_norm:  # a norm that is NaN makes the factor NaN, as torch's does
            factor *= min(1.0, float(max_norm) / (norm + CLIP_EPS)) if not math.isnan(norm) else math.nan
        if factor != 1 or self.loss_scale != 1 or max_norm < math.inf:  # else it asks for the norm alone
            self._note(notes)
        self.clip = factor  # now, as an interrupt at any line leaves no factor for other gradients

    def unscaled(self, norm_sq: float) -> float:
        """Return the norm of the gradients with their factors, from the squared norm without."""
        return math.sqrt(norm_sq) / abs(self.loss_scale) * self.clip

    def unscale(self, scale: float, notes: Notes) -> None:
        """Divide gradients by a scale."""
        self._note(notes)
        self.loss_scale = scale

    def arrived(self, bound: BoundParameter, gradient: torch.Tensor, builds_graph: bool) -> None:
        """Hear of a gradient that autograd has accumulated.

        Accumulated onto what was clipped, unless somebody changed (zeroed, say) the gradient in between. One that a
        graph is built with is another tensor each time, so nobody can tell.
        """
        noted = self.noted.get(bound)
        if noted is not None:
            onto = noted.of() is gradient and shards.version(gradient) == noted.version + 1
            self._accumulated_onto_noted |= onto or builds_graph or gradient.requires_grad

    def added(self, bound: BoundParameter) -> None:
        """Hear of a gradient that is added to one that has left the GPU."""
        self._accumulated_onto_noted |= bound in self.noted

    def check(self, notes: Notes) -> None:
        """Forget factors whose gradients are gone (the step was skipped, say); refuse those for others, too."""
        if not self.noted:
            return
        kept, fresh, changed = False, self._accumulated_onto_noted, None
        for bound, found in notes:
            gradient = bound.parameter.grad
            if found is None:
                continue
            if bound in self.noted and found.is_same(self.noted[bound]):
                kept = True
            elif bound.arrivals != self._arrivals.get(bound, 0):
                fresh = True
            elif math.isnan(self.clip) or gradient is None or bool(shards.local(gradient).any()):  # zeros stay zeros
                changed = bound
        if fresh and (kept or self._accumulated_onto_noted):
            raise ConfigError(
                "clip_grad_norm_",
                self.clip,
                "clip, and unscale, after the last backward pass of a step: more gradient has arrived; if that step "
                "was skipped, call optimizer.zero_grad()",
            )
        if changed is not None and not fresh:
            raise ConfigError(
                "clip_grad_norm_",
                self.clip,
                f".grad of {changed.name} was replaced or changed after clip_grad_norm_ or unscale_, which "
                "leave it to the step to scale it. Change gradients before, or use torch.nn.utils.clip_grad_norm_ "
                "and torch.amp.GradScaler, which scale .grad; if that step was skipped, call optimizer.zero_grad()",
            )
        if not kept:
            self.forget()
