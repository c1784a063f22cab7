"""Updates of whole parameters (Muon, wrapped classes), in torch operations on the CPU.

For one parameter after another: masters and state that are still due from the weights are made; the rule changes
master and state in place; the new weight is made from the master. So temporary memory is that of the largest
parameter.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from offload.dtypes import DtypeCode
from offload.kernels import reference
from offload.kernels.pieces import Piece, step_alone
from offload.kernels.plain import PlainUpdateKernel
from offload.kernels.reference import DTYPE_CODES, SegmentTensors
from offload.kernels.stored import store_rounded
from offload.kernels.table import active_rows
from offload.layout import Parameter, Subgroup
from offload.protocols import SegmentFlag
from offload.rules import MUON, PACKED, ClassRule, UpdateRule


@torch.no_grad()
def _muon(piece: Piece, group: int, values: Mapping[str, Any]) -> None:
    """Update a matrix by torch's own Muon, run on views of the state, which may be stored in any format.

    So the bits are those of `torch.optim.Muon` on fp32 weights, on this device and with this number of threads; its
    Newton-Schulz iteration works in bfloat16, whatever the weights' type. See `offload.rules.UpdateRule.update`.
    """
    segment = piece.segment
    (momentum,), master = reference.state_of(segment), reference.master_of(segment)
    view = torch.nn.Parameter(piece.shaped(master))
    view.grad = piece.gradient(torch.float32)
    muon = torch.optim.Muon([view], **values)
    muon.state[view] = {"momentum_buffer": piece.shaped(momentum)}
    step_alone(muon)
    random = reference.random_of(segment)
    reference.store_state(segment, [momentum], random)
    reference.store_master(segment, master, random)


_CPU = PlainUpdateKernel(torch.device("cpu"))

_UPDATES: dict[str, Callable[..., None]] = {MUON.name: _muon}
"""Update functions of rules that have none of their own."""


def trial(rule: UpdateRule, shape: tuple[int, ...], dtype: torch.dtype, group: int) -> Callable[[], None]:
    """Return a call that updates a parameter of a shape and dtype, of a group, to be timed."""
    if isinstance(rule, ClassRule):
        return rule.trial(shape, dtype, group)
    numel = math.prod(shape)
    generator = torch.Generator().manual_seed(0)
    master, gradient = (
        torch.empty(numel, dtype=torch.float32, device="cpu").normal_(generator=generator) for _ in range(2)
    )
    state, weight = [torch.zeros(numel, dtype=torch.float32, device="cpu") for _ in rule.state], gradient.to(dtype)
    values, parameter = rule.values(rule.defaults), Parameter("", numel, DTYPE_CODES[dtype], group, shape=shape)
    row = rule.row(1, values, 1.0)
    piece = Piece(parameter, SegmentTensors(master, state, gradient, weight, SegmentFlag.ACTIVE, row, rule))
    return partial(_UPDATES[rule.name], piece, group, values)


def _chained(error: BaseException) -> list[BaseException]:
    """Return an error with all its causes, contexts and group members, each once, as these may form a circle."""
    errors, waiting = list[BaseException](), [error]
    while waiting:
        failed = waiting.pop()
        if all(failed is not each for each in errors):
            errors.append(failed)
            more = failed.exceptions if isinstance(failed, BaseExceptionGroup) else ()
            waiting += [each for each in (failed.__cause__, failed.__context__, *more) if each is not None]
    return errors


class WholeUpdate:
    """The update of a subgroup by a rule of whole parameters; called once, on any thread.

    Args:
        table: The segment table, as for a kernel.
        subgroup: The subgroup, which knows the rule and how state is stored.
        parameters: The parameter of each row; none if state is only made from weights.
        groups: Hyperparameters by group.
    """

    def __init__(
        self,
        table: npt.NDArray[Any],
        subgroup: Subgroup,
        parameters: Sequence[Parameter] = (),
        groups: Sequence[Any] = (),
    ) -> None:
        self.table = table
        self._state = subgroup.state
        self._parameters = parameters
        self._groups = groups

    def __call__(self) -> None:
        """Update the subgroup."""
        try:
            self._update()
        except BaseException as error:
            # A logger that prints the variables of a traceback's frames may do so when their memory has been freed.
            for failed in _chained(error):
                traceback.clear_frames(failed.__traceback__)
            raise

    @torch.no_grad()
    def _update(self) -> None:
        """Update each row's parameter by the rule; rows that are not active only get master and state made."""
        rule, active = self._state.rule, active_rows(self.table).tolist()
        update: Callable[..., None] = _UPDATES.get(rule.name, rule.update)
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
                update(Piece(parameter, segment, packed), parameter.group, self._groups[parameter.group])
                if segment.weight is None:
                    continue
                if segment.master.dtype is segment.weight.dtype:
                    segment.weight.copy_(segment.master)
                else:
                    store_rounded(reference.master_of(segment), segment.weight)
