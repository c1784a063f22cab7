"""Segment tables: the arguments of a subgroup's update, made from addresses, step counts and flags of parameters.

A table has one row for each segment (`offload.protocols.SEGMENT_DTYPE`). It is filled when the subgroup is visited:
only then the memory of a streamed subgroup is known. What a step says of each parameter (`StepRows`) is known before.

A master is *due* if its parameter's next update has to take it from the weight, which the user has written to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.kernels import rounding_keys
from offload.kernels.table import active_rows, segment_table
from offload.layout import Layout, Segment
from offload.protocols import MAX_SCALARS, SegmentFlag
from offload.rules import UpdateRule
from offload.schedule.operations import RunVisit

GradientsAt = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]] | None
"""Address and element type of each parameter's gradient; None for the bound gradients."""

Parameters = npt.NDArray[np.bool_]
"""A set of parameters, as a mask over all of them."""

Apart = tuple[int, npt.NDArray[np.uint64]]
"""For a speculative update, which must not change weights: the address of an image for the new ones, and two sums for
each segment, to which the update adds the fingerprints of the segment's gradient and of its fp32 weight.
"""


class _Columns(NamedTuple):
    """What stays the same in all tables of a subgroup: an element for each segment, as its `Segment` says."""

    parameter: npt.NDArray[np.uint64]
    start: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.uint64]
    numel: npt.NDArray[np.uint64]
    first_index: npt.NDArray[np.uint64]
    """Of its first element in the whole parameter, of which this rank may have a piece."""


def _segment_flags(rule: UpdateRule, group: Any, update: int) -> int:
    """Return the flags of an active parameter's segments in its `update`-th update (from 1).

    ZERO_STATE is among them where the rule forgets its old state in that update.
    """
    decoupled = SegmentFlag.DECOUPLED_DECAY if rule.decoupled(group) else 0
    zeroed = SegmentFlag.ZERO_STATE if rule.forgets(update, group) else 0
    return int(SegmentFlag.ACTIVE | decoupled | zeroed)


def number_of(name: str) -> int:
    """Return a parameter's number in keys of stochastic rounding: equal on all ranks, as it depends on the name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # manifests have 62 bits


@dataclass(frozen=True, slots=True)
class StepRows:
    """The scalars, flags and addresses of each parameter in one step, expected or real; made by `Tables.rows`.

    The arrays are copies: binding or counting later does not change them.
    """

    subgroups: tuple[int, ...]
    """Subgroups with an active segment, in the order of the active parameters."""
    scalars: npt.NDArray[np.float32]
    """A row for each parameter, as `rule.row` returns it."""
    flags: npt.NDArray[np.uint32]
    """`SegmentFlag`; 0 for idle parameters."""
    rounding_keys: npt.NDArray[np.uint64]
    """A key for each parameter's rounding in this update; 0 where no state is rounded."""
    weights: npt.NDArray[np.uint64]
    """Address of each weight."""
    gradients: npt.NDArray[np.uint64]
    """Address of each gradient, for the CPU; the store of gradients changes it when it moves one."""
    gradient_dtypes: npt.NDArray[np.int32]
    """Their element types."""
    groups: Sequence[Any] = ()
    """Hyperparameters, by group index, for rules whose updates take more than scalars."""


class Tables:
    """Addresses, step counts and flags of all parameters, and the segment tables made from them."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        """Seed of stochastic rounding; restoring a checkpoint replaces it."""
        self.numbers: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Number of each parameter, for stochastic rounding; restoring a checkpoint replaces them, too."""
        self.weights: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Address of each parameter's weight."""
        self.gradients: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Address of each parameter's gradient."""
        self.gradient_dtypes: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        """Element type of each parameter's gradient."""
        self.steps: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Number of updates that each parameter has had."""
        self.step_rows: StepRows
        """The rows of the step that was begun last."""
        self._columns: list[_Columns] = []  # by subgroup
        self._due: list[npt.NDArray[np.uint32]] = []
        """By subgroup and segment: how its next update takes the master from the weight (`TAKES_MASTER`); else 0."""
        self._layout = Layout((), ())

    def extend(self, layout: Layout) -> None:
        """Go on with a larger layout: make entries for the parameters and subgroups it adds; the others stay."""
        added = len(layout.parameters) - len(self.steps)
        self.weights = np.concatenate([self.weights, np.zeros(added, np.uint64)])
        self.gradients = np.concatenate([self.gradients, np.zeros(added, np.uint64)])
        self.gradient_dtypes = np.concatenate([self.gradient_dtypes, np.zeros(added, np.int32)])
        self.steps = np.concatenate([self.steps, np.zeros(added, np.int64)])
        numbers = [number_of(parameter.name) for parameter in layout.parameters[len(self.numbers) :]]
        self.numbers = np.concatenate([self.numbers, np.array(numbers, np.uint64)])
        starts = np.array([parameter.start for parameter in layout.parameters], np.uint64)
        for subgroup in layout.subgroups[len(self._columns) :]:
            rows = np.array([(s.parameter, s.start, s.offset, s.numel) for s in subgroup.segments], np.uint64)
            parameter, start, offset, numel = rows.T
            self._columns.append(_Columns(parameter, start, offset, numel, starts[parameter] + start))
            self._due.append(np.zeros(len(subgroup.segments), np.uint32))
        self._layout = layout

    def mark_master_due(self, parameter: int, how: SegmentFlag) -> None:
        """Mark a parameter's master as due: its next update reads it from the weight, which the user has written to.

        An fp32 weight is its own master: the mark only tells checkpoints that a saved version is outdated
        (`is_rewritten`).

        Args:
            how: LOAD_MASTER takes all elements; MATCH_MASTER only those that the old master does not round to, and
                has no effect where LOAD_MASTER is due.
        """
        for subgroup, position in self._layout.places[parameter]:
            self._due[subgroup][position] |= how

    def rows(
        self,
        groups: Sequence[Any],
        scale: float,
        clip: float,
        active: Sequence[int],
        gradients: GradientsAt = None,
        weights: npt.NDArray[np.uint64] | None = None,
    ) -> StepRows:
        """Return the rows of a step.

        Args:
            groups: Hyperparameters, by group index.
            scale: Factor that the gradients were multiplied by (a loss scale).
            clip: Factor to multiply the unscaled gradients by.
            active: The parameters that the step updates.
            gradients: Where the CPU reads gradients; None for where they are bound.
            weights: Address of each weight; None for where they are bound.

        Raises:
            ConfigError: If a group's hyperparameters cannot be used.
        """
        layout, factor = self._layout, clip / scale
        # Rules may have different numbers of scalars beside `grad_scale` and `decay`: rows are padded to the widest.
        width = 2 + MAX_SCALARS if layout.has_rules else len(layout.state.rule.scalars._fields)
        # Rows that many parameters have in common are computed once; the first one is that of idle parameters.
        scalars, flags = [(0.0,) * width], [0]
        row_numbers: dict[tuple[Any, ...], int] = {}  # by group, number of the update and rule
        row_of = np.zeros(len(self.steps), np.int64)  # by parameter
        subgroups: dict[int, int] = {}  # used as an ordered set: the values say nothing
        updates = self.steps + 1
        update_counts = updates.tolist()
        for number in active:
            parameter, update = layout.parameters[number], update_counts[number]
            key = parameter.group, update, parameter.rule
            if key not in row_numbers:
                row_numbers[key] = len(flags)
                group, rule = groups[parameter.group], parameter.rule or layout.state.rule
                flags.append(_segment_flags(rule, group, update))
                row = layout.state_of(parameter).row(update, group, factor)
                scalars.append((*row, *(0.0,) * (width - len(row))))
            row_of[number] = row_numbers[key]
            subgroups.update(layout.places[number])
        keys = np.zeros_like(self.numbers)
        if layout.state.format.rounds:
            keys = rounding_keys(self.seed, self.numbers, updates)
        addresses, dtypes = gradients or (self.gradients.copy(), self.gradient_dtypes.copy())
        return StepRows(
            subgroups=tuple(subgroups),
            scalars=np.array(scalars, np.float32)[row_of],
            flags=np.array(flags, np.uint32)[row_of],
            rounding_keys=keys,
            weights=self.weights.copy() if weights is None else weights,
            gradients=addresses,
            gradient_dtypes=dtypes,
            groups=groups,
        )

    def make_table(
        self,
        run: RunVisit,
        address: int,
        rows: StepRows,
        *,
        weights_address: int | None = None,
        gradients_address: int | None = None,
        apart: Apart | None = None,
        due_parameters: Parameters | None = None,
    ) -> npt.NDArray[Any]:
        """Return the table of a run: rows of `SEGMENT_DTYPE`, one for each of the subgroup's segments.

        Args:
            run: The run.
            address: Address of its state in memory.
            rows: Of the step; without active parameters the kernel only fills undefined state and takes masters.
            weights_address: Address of an image of the subgroup's weights, padding included, to use in their place;
                None for the weights themselves. Ignored for a speculative update of 16-bit weights, which reads none.
            gradients_address: Address of an image of its gradients, padding included; None for those in `rows`.
            apart: For a speculative update: where it writes new weights, and notes what it has read; see `Apart`. No
                master is taken from its weight then. fp32 weights on a GPU are copied to that image before: give its
                address as `weights_address`, too.
            due_parameters: The parameters whose masters are taken from their weights, if they are due; None for those
                that the step updates. A fresh run takes all masters.
        """
        subgroup = self._layout.subgroups[run.visit.subgroup]
        columns = self._columns[subgroup.index]
        parameter, is_fp32 = columns.parameter, subgroup.dtype is DtypeCode.FLOAT32
        if apart is not None and not is_fp32:
            weights_address = apart[0]  # its image: no update reads the old weights, which may lie on a GPU
        addresses: dict[str, Any] = {
            tensor.name: np.uint64(address + subgroup.offsets[tensor.name]) + tensor.format.offset(columns.offset)
            for tensor in subgroup.tensors
        }
        addresses |= self._input_addresses(run, rows, weights_address, gradients_address)
        if apart is not None:
            image, sums = apart
            new = "new_master" if is_fp32 else "new_weight"
            addresses[new] = np.uint64(image) + columns.offset * ITEM_BYTES[subgroup.dtype]
            # The address of each segment's row of `sums`, to which the update adds fingerprints:
            addresses["read"] = sums.ctypes.data + sums.strides[0] * np.arange(len(sums))
        flags = rows.flags[parameter]  # a copy, as an array is the index: what follows does not change `rows`
        if run.fresh:
            flags |= np.uint32(SegmentFlag.ZERO_STATE)
        if apart is None and not is_fp32:  # else none is taken: see `apart`; an fp32 weight is its master
            flags |= self._masters_to_take(run, rows.flags != 0 if due_parameters is None else due_parameters)
        return segment_table(
            subgroup.state,
            columns.numel,
            addresses,
            weight_dtype=subgroup.dtype,
            gradient_dtype=rows.gradient_dtypes[parameter],
            flags=flags,
            # Without what `rows` pads them with where rules differ:
            scalars=rows.scalars[parameter].T[: len(subgroup.state.rule.scalars._fields)],
            rounding_key=rows.rounding_keys[parameter],
            first_index=columns.first_index,
        )

    def _input_addresses(
        self, run: RunVisit, rows: StepRows, weights_address: int | None, gradients_address: int | None
    ) -> dict[str, Any]:
        """Return the addresses of each segment's "weight" and "gradient"; arguments as of `make_table`.

        In a parameter's own memory a segment lies at its start in the parameter, in an image of the subgroup at its
        offset in the subgroup.
        """
        columns = self._columns[run.visit.subgroup]
        parameter, start, offset = columns.parameter, columns.start, columns.offset
        weight_bytes = ITEM_BYTES[self._layout.subgroups[run.visit.subgroup].dtype]
        gradient_bytes = ITEM_BYTES[rows.gradient_dtypes[parameter]]
        if weights_address is None:
            weights = rows.weights[parameter] + start * weight_bytes
        else:
            weights = np.uint64(weights_address) + offset * weight_bytes
        if gradients_address is None:
            bound = self.gradients if run.visit.gpu else rows.gradients  # a GPU reads them where they are bound
            gradients = bound[parameter] + start * gradient_bytes
        else:
            gradients = np.uint64(gradients_address) + offset * gradient_bytes
        return {"weight": weights, "gradient": gradients}

    def _masters_to_take(self, run: RunVisit, due_parameters: Parameters) -> npt.NDArray[np.uint32]:
        """Return, for each segment, the flags that take its master from its weight; 0 where it is not taken.

        Taken are those that are due, of `due_parameters`; of a fresh run all.
        """
        subgroup = run.visit.subgroup
        flags: npt.NDArray[np.uint32] = self._due[subgroup] * due_parameters[self._columns[subgroup].parameter]
        return flags | np.uint32(SegmentFlag.LOAD_MASTER) if run.fresh else flags

    def updates_alike(self, subgroup: int, expected: StepRows, step_rows: StepRows) -> bool:
        """Return whether a step updates a subgroup as the expected step does, bit for bit, if gradients are the same.

        So their rows have to be equal, and no master may be due. Addresses of gradients may differ: DDP copies them
        from its buckets to where the step reads them.
        """
        parameter = self._columns[subgroup].parameter
        active = parameter[step_rows.flags[parameter] != 0]  # gradients of others are not read

        def inputs(rows: StepRows) -> list[bytes]:
            """Return all that a step says of the subgroup but its gradients."""
            columns = rows.scalars, rows.flags, rows.rounding_keys, rows.weights
            return [*(column[parameter].tobytes() for column in columns), rows.gradient_dtypes[active].tobytes()]

        if self.is_due(subgroup, step_rows.flags != 0):  # a speculative update takes no master from its weight
            return False
        return inputs(expected) == inputs(step_rows)

    def read_by(
        self, subgroup: int, table: npt.NDArray[Any], step_rows: StepRows
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return where a step would read gradients and fp32 weights, to compare them with what an update has read.

        The user may have written to them since that update, which was made in backward.

        Args:
            table: Of the update, whose rows are equal to the step's.
            step_rows: The step's rows.

        Returns:
            Three arrays with a row for each segment: its parameter; the addresses of its gradient and of its fp32
            weight (two columns); and their sizes in bytes (two columns), which are 0 for what the update does not
            read.
        """
        parameter, start = self._columns[subgroup].parameter, self._columns[subgroup].start
        is_fp32 = self._layout.subgroups[subgroup].dtype is DtypeCode.FLOAT32
        numel = np.where(active_rows(table), table["numel"], np.uint64(0))
        gradient_bytes = numel * ITEM_BYTES[table["gradient_dtype"]]
        weight_bytes = numel * np.uint64(4 * is_fp32)  # 0 for 16-bit weights, which it does not read
        sizes = np.stack([gradient_bytes, weight_bytes], axis=1)
        gradients = step_rows.gradients[parameter] + start * ITEM_BYTES[step_rows.gradient_dtypes[parameter]]
        masters = step_rows.weights[parameter] + start * np.uint64(4)
        return parameter, np.stack([gradients, masters], axis=1), sizes.astype(np.uint64)

    def weight_copies(
        self,
        subgroup: int,
        weights_address: int,
        chosen: npt.NDArray[np.bool_] | None = None,
        weights: npt.NDArray[np.uint64] | None = None,
    ) -> npt.NDArray[np.uint64]:
        """Return copies between a subgroup's bound weights and an image of them.

        Args:
            weights_address: Address of the image.
            chosen: For each segment, whether to include it; None for all.
            weights: Address of each parameter's weight; None for where they are bound now.

        Returns:
            Rows of (address of the weight, address in the image, bytes); none for weights that are not bound.
        """
        columns = self._columns[subgroup]
        item_bytes = ITEM_BYTES[self._layout.subgroups[subgroup].dtype]
        bound = (self.weights if weights is None else weights)[columns.parameter]
        weight_addresses = bound + columns.start * item_bytes
        image_addresses = np.uint64(weights_address) + columns.offset * item_bytes
        rows: npt.NDArray[np.uint64] = np.stack(
            (weight_addresses, image_addresses, columns.numel * item_bytes), axis=1
        )
        is_bound = bound != 0
        return rows[np.flatnonzero(is_bound if chosen is None else is_bound & chosen)]

    def note_masters_current(self, subgroup: int, parameters: Parameters | None = None) -> None:
        """Note that a subgroup's masters are due no longer: they were taken from their weights, or replaced.

        Args:
            parameters: The parameters whose masters these are; None for all.
        """
        self._due[subgroup][self._segments_of(subgroup, parameters)] = 0

    def _segments_of(self, subgroup: int, parameters: Parameters | None) -> Any:
        """Return an index that chooses a subgroup's segments of these parameters; all if None."""
        return slice(None) if parameters is None else parameters[self._columns[subgroup].parameter]

    def is_due(self, subgroup: int, parameters: Parameters | None = None) -> bool:
        """Return whether a master of a subgroup (of one of these parameters) has to be taken from its weight.

        An fp32 weight is its own master.
        """
        if self._layout.subgroups[subgroup].dtype is DtypeCode.FLOAT32:
            return False
        return bool(self._due[subgroup][self._segments_of(subgroup, parameters)].any())

    def is_rewritten(self, subgroup: int) -> bool:
        """Return whether a weight of this subgroup was written to after its master was last taken from it.

        That is what `mark_master_due` was told. Unlike `is_due` this is also true of fp32 weights, which are their
        own masters: a saved version may then have other bytes.
        """
        return bool(self._due[subgroup].any())

    def how_due(self, subgroup: int, segment: Segment) -> SegmentFlag:
        """Return how a segment's master has to be taken from its weight.

        No flag if the master is current, or is the weight itself.
        """
        if self._layout.subgroups[subgroup].dtype is DtypeCode.FLOAT32:
            return SegmentFlag(0)
        position = dict(self._layout.places[segment.parameter])[subgroup]
        return SegmentFlag(int(self._due[subgroup][position]))
