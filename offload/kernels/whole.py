"""Updates of whole parameters, in torch operations on the CPU.

The state is made whole first; then the rule changes master and state of each parameter in place, one parameter at a
time, so that what an update takes meanwhile is that of the largest one; then the new weight is made of the master.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from offload.dtypes import DtypeCode
from offload.formats import StateSpec
from offload.kernels import reference
from offload.kernels.plain import PlainUpdateKernel
from offload.kernels.reference import SegmentTensors
from offload.kernels.stored import store_rounded
from offload.kernels.table import active_rows
from offload.layout import Parameter
from offload.protocols import SegmentFlag
from offload.rules import PACKED

_CPU = PlainUpdateKernel(torch.device("cpu"))


@dataclass(slots=True)
class Piece:
    """One parameter in an update.

    Attributes:
        parameter: What the layout says of it.
        segment: Its state as it is stored, its gradient and its weight, all flat.
        packed: Its packed state, flat words of 4 bytes; None where its rule has none.
    """

    parameter: Parameter
    segment: SegmentTensors
    packed: torch.Tensor | None = None

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return elements that lie in the order of the parameter's memory as a tensor of its form."""
        shape, stride = self.parameter.shape, self.parameter.stride
        if shape is None:
            return flat
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride)

    def gradient(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient times its factor, in a type; a factor of 1 changes nothing."""
        gradient, factor = self.segment.gradient, self.segment.scalars.grad_scale
        if gradient is None:
            raise ValueError("an active segment needs a gradient")
        if factor != 1:
            gradient = gradient.to(torch.float32) * factor
        return self.shaped(gradient.to(dtype))


class WholeUpdate:
    """The update of a subgroup by a rule of whole parameters; called once, on any thread.

    Args:
        table: As for a kernel.
        state: What the rule is, and how state is stored.
        parameters: Of each row; none where state is only made whole.
        groups: Hyperparameters by group.

    Attributes:
        table: As given.
    """

    def __init__(
        self,
        table: npt.NDArray[Any],
        state: StateSpec,
        parameters: Sequence[Parameter] = (),
        groups: Sequence[Any] = (),
    ) -> None:
        self.table = table
        self._state = state
        self._parameters = parameters
        self._groups = groups

    @torch.no_grad()
    def __call__(self) -> None:
        """Update."""
        rule, active = self._state.rule, active_rows(self.table).tolist()
        for number, row in enumerate(self.table):
            gradient = int(row["gradient_dtype"]) if active[number] else int(DtypeCode.NONE)
            segment = _CPU.segment(row, self._state, gradient, 0, int(row["numel"]))
            packed = None
            if rule.packed_words:
                words = rule.numel_of(PACKED, int(row["numel"]))
                packed = segment.scales = _CPU.at(int(row[PACKED]), words, torch.float32)
            flags, segment.flags = segment.flags, segment.flags & ~SegmentFlag.ACTIVE
            reference.update(segment)
            if active[number]:
                segment.flags = flags
                parameter = self._parameters[number]
                rule.update(Piece(parameter, segment, packed), parameter.group, self._groups[parameter.group])
                if segment.weight is None:
                    continue
                if segment.master.dtype is segment.weight.dtype:
                    segment.weight.copy_(segment.master)
                else:
                    store_rounded(reference.master_of(segment), segment.weight)
