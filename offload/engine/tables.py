"""Segment tables: what a kernel is told about each subgroup, from what is known about each parameter.

One row per segment, filled by columns when the subgroup's turn comes, since the memory of a streamed subgroup is
known only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.kernels.reference import scalars
from offload.layout import STATE_ITEM_BYTES, Layout
from offload.protocols import SEGMENT_DTYPE, SegmentFlag

"""Bytes of an element by `DtypeCode`."""

SCALAR_FIELDS = (
    "grad_scale",
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "inv_bias2_sqrt",
    "eps",
    "step_size",
    "decay",
)


@dataclass(frozen=True, slots=True)
class GroupScalars:
    """Hyperparameters of one group for one step; see `offload.kernels.reference.scalars`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True
    maximize: bool = False


class Tables:
    """Addresses, step counts and flags of all parameters, and the segment tables made from them."""

    def __init__(self) -> None:
        self.weights: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Address of each parameter's weight."""
        self.gradients: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Address of each parameter's gradient."""
        self.gradient_dtypes: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.steps: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Number of updates that each parameter has had."""
        self._scalars: npt.NDArray[np.float32] = np.zeros((0, len(SCALAR_FIELDS)), np.float32)
        self._flags: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._templates: list[npt.NDArray[Any]] = []
        self._columns: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]] = []
        self._reload: list[npt.NDArray[np.bool_]] = []
        self._layout = Layout((), ())

    def extend(self, layout: Layout) -> None:
        """Make room for what `layout` adds; what is there stays."""
        added = len(layout.parameters) - len(self.steps)
        self.weights = np.concatenate([self.weights, np.zeros(added, np.uint64)])
        self.gradients = np.concatenate([self.gradients, np.zeros(added, np.uint64)])
        self.gradient_dtypes = np.concatenate([self.gradient_dtypes, np.zeros(added, np.int32)])
        self.steps = np.concatenate([self.steps, np.zeros(added, np.int64)])
        for subgroup in layout.subgroups[len(self._templates) :]:
            template = np.zeros(len(subgroup.segments), SEGMENT_DTYPE)
            template["numel"] = [segment.numel for segment in subgroup.segments]
            if subgroup.dtype is not DtypeCode.FLOAT32:
                template["weight_dtype"] = int(subgroup.dtype)
            self._templates.append(template)
            self._columns.append(
                (
                    np.array([segment.parameter for segment in subgroup.segments], np.int64),
                    np.array([segment.start for segment in subgroup.segments], np.uint64),
                    np.array([segment.offset for segment in subgroup.segments], np.uint64),
                )
            )
            self._reload.append(np.zeros(len(subgroup.segments), bool))
        self._layout = layout

    def reload_master(self, parameter: int) -> None:
        """Take the master from the weight when the parameter's subgroups are next changed."""
        for subgroup, position in self._layout.places[parameter]:
            self._reload[subgroup][position] = True

    def begin_step(
        self, groups: Sequence[GroupScalars], scale: float, clip: float, active: Sequence[int]
    ) -> tuple[int, ...]:
        """Prepare the scalars of one update; return the subgroups that have an active segment, in order."""
        count = len(self.steps)
        self._flags = np.zeros(count, np.uint32)
        self._scalars = np.zeros((count, len(SCALAR_FIELDS)), np.float32)
        known: dict[tuple[int, int], tuple[npt.NDArray[np.float32], int]] = {}
        wanted = np.zeros(len(self._templates), bool)
        for parameter in active:
            group = self._layout.parameters[parameter].group
            key = (group, int(self.steps[parameter]) + 1)
            if key not in known:
                values = groups[group]
                row = scalars(
                    key[1],
                    lr=values.lr,
                    betas=(values.beta1, values.beta2),
                    eps=values.eps,
                    weight_decay=values.weight_decay,
                    decoupled=values.decoupled,
                    grad_scale=clip / scale,
                    maximize=values.maximize,
                )
                flags = int(SegmentFlag.ACTIVE) | (int(SegmentFlag.DECOUPLED_DECAY) if values.decoupled else 0)
                known[key] = np.array([getattr(row, name) for name in SCALAR_FIELDS], np.float32), flags
            self._scalars[parameter], self._flags[parameter] = known[key]
            for subgroup, _ in self._layout.places[parameter]:
                wanted[subgroup] = True
        return tuple(np.flatnonzero(wanted).tolist())

    def is_active(self, parameter: int) -> bool:
        """Return whether a parameter is updated in the step that was begun last."""
        return bool(self._flags[parameter])

    def fill(
        self,
        subgroup: int,
        address: int,
        *,
        fresh: bool,
        update: bool,
        weights_address: int | None = None,
        gradients: npt.NDArray[np.uint64] | None = None,
    ) -> npt.NDArray[Any]:
        """Return the table of one subgroup.

        Args:
            subgroup: Which one.
            address: Where its state lies in memory.
            fresh: Whether that memory is undefined, so that all segments start from the weight and zeros.
            update: Whether active segments are updated; otherwise the state is only made whole.
            weights_address: Where an image of the subgroup's weights lies, padding included, that takes their place;
                None for the weights themselves.
            gradients: Address of each parameter's gradient in place of `gradients`.
        """
        layout = self._layout.subgroups[subgroup]
        table = self._templates[subgroup].copy()
        parameter, start, offset = self._columns[subgroup]
        item = np.uint64(STATE_ITEM_BYTES)
        for number, name in enumerate(layout.tensors):
            table[name] = np.uint64(address + number * layout.tensor_bytes) + offset * item
        if weights_address is None:
            weights = self.weights[parameter] + start * ITEM_BYTES[int(layout.dtype)]
        else:
            weights = np.uint64(weights_address) + offset * ITEM_BYTES[int(layout.dtype)]
        flags = self._flags[parameter] if update else np.zeros(len(parameter), np.uint32)
        if fresh:
            flags |= np.uint32(SegmentFlag.ZERO_MOMENTS)
        if layout.dtype is DtypeCode.FLOAT32:
            table["master"] = weights
        else:
            table["weight"] = weights
            reload = np.ones(len(parameter), bool) if fresh else self._reload[subgroup]
            flags |= np.where(reload, np.uint32(SegmentFlag.LOAD_MASTER), np.uint32(0))
        if update:
            dtypes = self.gradient_dtypes[parameter]
            table["gradient"] = (self.gradients if gradients is None else gradients)[parameter] + start * ITEM_BYTES[
                dtypes
            ]
            table["gradient_dtype"] = dtypes
            for column, name in enumerate(SCALAR_FIELDS):
                table[name] = self._scalars[parameter, column]
        table["flags"] = flags
        return table

    def weight_copies(self, subgroup: int, image_address: int) -> npt.NDArray[np.uint64]:
        """Return (address of the weight, address in an image of the subgroup's weights, bytes) of each segment."""
        layout = self._layout.subgroups[subgroup]
        parameter, start, offset = self._columns[subgroup]
        item = ITEM_BYTES[int(layout.dtype)]
        numel = self._templates[subgroup]["numel"]
        columns = (self.weights[parameter] + start * item, np.uint64(image_address) + offset * item, numel * item)
        return np.stack(columns, axis=1)

    def changed(self, subgroup: int) -> None:
        """The state of a subgroup was made whole and is kept: masters that were to be reloaded have been."""
        self._reload[subgroup][:] = False

    def needs_reload(self, subgroup: int) -> bool:
        """Return whether a master of this subgroup is to be taken from its weight."""
        return bool(self._reload[subgroup].any())
