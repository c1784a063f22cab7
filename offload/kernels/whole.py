"""Updates of whole parameters (Muon, wrapped classes), in torch operations on the CPU.

For one parameter after another: the master is taken from the weight if it is due, and fresh state is zeroed; the rule
changes both in place; the new weight is made from the master. So temporary memory is that of the largest parameter.
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
    """Update a matrix by one step of torch's own Muon, on its master and momentum in fp32, and store them again.

    So the bits are those of `torch.optim.Muon` on fp32 weights, on this device and with this number of threads; its
    Newton-Schulz iteration works in bfloat16, whatever the weights' type. For the arguments of this function see
    `offload.rules.UpdateRule.update`; `group` is not needed, as `values` has all of the group's.
    """
    segment = piece.segment
    (momentum,), master = reference.state_of(segment), reference.master_of(segment)
    # The optimizer changes `master` and `momentum` in place, as the parameter and its buffer are views of them.
    view = torch.nn.Parameter(piece.shaped(master))
    view.grad = piece.gradient(torch.float32)
    muon = torch.optim.Muon([view], **values)
    muon.state[view] = {"momentum_buffer": piece.shaped(momentum)}
    step_alone(muon)
    random = reference.random_of(segment)  # to round by; None where the format does not round
    reference.store_state(segment, [momentum], random)
    reference.store_master(segment, master, random)  # nothing to do where `master` is no copy


_CPU = PlainUpdateKernel(torch.device("cpu"))

_UPDATES: dict[str, Callable[..., None]] = {MUON.name: _muon}
"""Update functions of rules that have none of their own."""


def trial(rule: UpdateRule, shape: tuple[int, ...], dtype: torch.dtype, group: int, name: str) -> Callable[[], None]:
    """Return a function that updates a made-up parameter once, to be timed.

    Args:
        rule: A rule of whole parameters: the others have no update here.
        shape: The parameter's.
        dtype: The weight's.
        group: Number of the group whose hyperparameters a class's rule uses; all others use the rule's defaults.
        name: The parameter's name, for a class's rule.
    """
    if isinstance(rule, ClassRule):
        return rule.trial(shape, dtype, group, name)
    numel = math.prod(shape)
    generator = torch.Generator().manual_seed(0)
    master, gradient = (
        torch.empty(numel, dtype=torch.float32, device="cpu").normal_(generator=generator) for _ in range(2)
    )
    state = [torch.zeros(numel, dtype=torch.float32, device="cpu") for _ in rule.state]
    weight = gradient.to(dtype)
    values = rule.values(rule.defaults)
    parameter = Parameter("", numel, DTYPE_CODES[dtype], group, shape=shape)
    scalars = rule.row(step=1, values=values, grad_scale=1.0)
    piece = Piece(parameter, SegmentTensors(master, state, gradient, weight, SegmentFlag.ACTIVE, scalars, rule))
    return partial(_UPDATES[rule.name], piece, group, values)


def _with_chained_errors(error: BaseException) -> list[BaseException]:
    """Return an error with all its causes, contexts and group members; each once, as they may refer to each other."""
    errors: list[BaseException] = []
    queue = [error]
    while queue:
        next_error = queue.pop()
        if all(next_error is not each for each in errors):  # not by `in`: a class of errors may define `==`
            errors.append(next_error)
            members = next_error.exceptions if isinstance(next_error, BaseExceptionGroup) else ()
            chained = (next_error.__cause__, next_error.__context__, *members)
            queue += [each for each in chained if each is not None]
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
        """Update the subgroup; if that fails, clear the variables in the traceback's frames."""
        try:
            self._update()
        except BaseException as error:
            # Else a logger that prints these variables may read tensors whose memory has been freed by then.
            for each in _with_chained_errors(error):
                traceback.clear_frames(each.__traceback__)
            raise

    @torch.no_grad()
    def _update(self) -> None:
        """Take masters and zero state as the rows' flags say; then update the parameters of active rows by the rule.

        The reference does the first part, since a rule of whole parameters only knows how to update.
        """
        rule = self._state.rule
        is_active = active_rows(self.table).tolist()
        update: Callable[..., None] = _UPDATES.get(rule.name, rule.update)
        for number, row in enumerate(self.table):
            gradient_dtype = int(row["gradient_dtype"]) if is_active[number] else int(DtypeCode.NONE)
            segment = _CPU.segment(row, self._state, gradient_dtype, 0, int(row["numel"]))
            packed = None
            if rule.packed_words:
                words = rule.numel_of(PACKED, int(row["numel"]))
                packed = _CPU.at(int(row[PACKED]), words, torch.float32)
                segment.scales = packed  # which the reference zeroes with the rest of fresh state
            flags = segment.flags
            segment.flags &= ~SegmentFlag.ACTIVE  # so that the reference takes the master and zeroes state, no more
            reference.update(segment)
            if is_active[number]:
                segment.flags = flags
                parameter = self._parameters[number]
                update(Piece(parameter, segment, packed), parameter.group, self._groups[parameter.group])
                if segment.weight is None:  # it is the master itself
                    continue
                if segment.master.dtype is segment.weight.dtype:  # the rule's masters are copies of the weights
                    segment.weight.copy_(segment.master)
                else:
                    store_rounded(reference.master_of(segment), segment.weight)
