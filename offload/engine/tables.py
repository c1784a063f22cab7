"""Segment tables: what a kernel is told about each subgroup, from what is known about each parameter.

One row per segment, filled by columns when the subgroup's turn comes, since the memory of a streamed subgroup is
known only then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.kernels import rounding_keys
from offload.kernels.table import active_rows, checked, segment_table
from offload.layout import Layout, Subgroup
from offload.protocols import SegmentFlag


def number_of(name: str) -> int:
    """Return what stochastic rounding knows a parameter by: the same on all ranks, whatever order they come in."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # manifests have 62 bits


def _new_weights(layout: Subgroup) -> str:
    """Return the field of a table that says where new weights go."""
    return "new_master" if layout.dtype is DtypeCode.FLOAT32 else "new_weight"


class Tables:
    """Addresses, step counts and flags of all parameters, and the segment tables made from them."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        """Of stochastic rounding; a checkpoint brings its own."""
        self.numbers: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Number of each parameter, for stochastic rounding; likewise."""
        self.weights: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Address of each parameter's weight."""
        self.gradients: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Address of each parameter's gradient."""
        self.gradient_dtypes: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.steps: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Number of updates that each parameter has had."""
        self._starts: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # of pieces, in the unsharded parameters
        self._scalars: npt.NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._flags: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._expected_rows = self._scalars, self._flags  # of the step that is expected
        self._expected_weights = self.weights  # ... as they lay when it was
        self._columns: list[tuple[npt.NDArray[np.uint64], ...]] = []
        self._reload: list[npt.NDArray[np.bool_]] = []
        self._layout = Layout((), ())

    def extend(self, layout: Layout) -> None:
        """Make room for what `layout` adds; what is there stays."""
        added = len(layout.parameters) - len(self.steps)
        self.weights = np.concatenate([self.weights, np.zeros(added, np.uint64)])
        self.gradients = np.concatenate([self.gradients, np.zeros(added, np.uint64)])
        self.gradient_dtypes = np.concatenate([self.gradient_dtypes, np.zeros(added, np.int32)])
        self.steps = np.concatenate([self.steps, np.zeros(added, np.int64)])
        numbers = [number_of(parameter.name) for parameter in layout.parameters[len(self.numbers) :]]
        self.numbers = np.concatenate([self.numbers, np.array(numbers, np.uint64)])
        self._starts = np.array([parameter.start for parameter in layout.parameters], np.uint64)
        for subgroup in layout.subgroups[len(self._columns) :]:
            rows = [(s.parameter, s.start, s.offset, s.numel) for s in subgroup.segments]
            self._columns.append(tuple(np.array(rows, np.uint64).T))
            self._reload.append(np.zeros(len(subgroup.segments), bool))
        self._layout = layout

    def reload_master(self, parameter: int) -> None:
        """Take the master from the weight when the parameter's subgroups are next changed."""
        for subgroup, position in self._layout.places[parameter]:
            self._reload[subgroup][position] = True

    def begin_step(self, groups: Sequence[Any], scale: float, clip: float, active: Sequence[int]) -> tuple[int, ...]:
        """Prepare the scalars of one update; return the subgroups that have an active segment, in order.

        Raises:
            ConfigError: If a group's hyperparameters cannot be used; nothing has changed then.
        """
        self._scalars, self._flags, has_active = self._rows(groups, clip / scale, active)
        return tuple(np.flatnonzero(has_active).tolist())

    def expect_step(
        self, groups: Sequence[Any], scale: float, active: Sequence[int], weights: npt.NDArray[np.uint64]
    ) -> None:
        """Prepare the scalars of the expected update, without clipping, of weights at these addresses."""
        self._expected_rows = self._rows(groups, 1.0 / scale, active)[:2]
        self._expected_weights = weights

    def _rows(
        self, groups: Sequence[Any], factor: float, active: Sequence[int]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Return scalars and flags of each parameter, and which subgroups have an active segment."""
        count, state = len(self.steps), self._layout.state
        rule = state.rule
        all_flags = np.zeros(count, np.uint32)
        scalars = np.zeros((count, len(rule.scalars._fields)), np.float32)
        rows: dict[tuple[int, int], tuple[Any, int]] = {}
        has_active = np.zeros(len(self._columns), bool)
        for parameter in active:
            group = self._layout.parameters[parameter].group
            key = (group, int(self.steps[parameter]) + 1)
            if key not in rows:
                decoupled = SegmentFlag.DECOUPLED_DECAY if rule.decoupled(groups[group]) else 0
                zeroed = SegmentFlag.ZERO_STATE if rule.forgets(key[1], groups[group]) else 0
                flags = int(SegmentFlag.ACTIVE | decoupled | zeroed)
                rows[key] = state.row(key[1], groups[group], factor), flags
            scalars[parameter], all_flags[parameter] = rows[key]
            for subgroup, _ in self._layout.places[parameter]:
                has_active[subgroup] = True
        return scalars, all_flags, has_active

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
        weights: npt.NDArray[np.uint64] | None = None,
        gradients: npt.NDArray[np.uint64] | None = None,
        gradient_dtypes: npt.NDArray[np.int32] | None = None,
        rows: tuple[npt.NDArray[np.float32], npt.NDArray[np.uint32]] | None = None,
    ) -> npt.NDArray[Any]:
        """Return the table of one subgroup.

        Args:
            subgroup: The subgroup.
            address: Address of its state in memory.
            fresh: Whether that memory is undefined, so that all segments start from the weight and zeros.
            update: Whether active segments are updated; otherwise the state is only made whole.
            weights_address: Address of an image of the subgroup's weights, padding included, to use in their place;
                None for the weights themselves.
            weights: Address of each parameter's weight in place of `weights`.
            gradients: Address of each parameter's gradient in place of `gradients`.
            gradient_dtypes: Their element types in place of `gradient_dtypes`.
            rows: Scalars and flags of each parameter in place of those of the step that was begun last.
        """
        step_scalars, step_flags = rows or (self._scalars, self._flags)
        layout = self._layout.subgroups[subgroup]
        parameter, start, offset, numel = self._columns[subgroup]
        addresses: dict[str, Any] = {
            tensor.name: np.uint64(address + layout.offsets[tensor.name]) + tensor.format.offset(offset)
            for tensor in layout.tensors
        }
        item = ITEM_BYTES[layout.dtype]
        if weights_address is None:
            addresses["weight"] = (self.weights if weights is None else weights)[parameter] + start * item
        else:
            addresses["weight"] = np.uint64(weights_address) + offset * item
        flags = step_flags[parameter] if update else np.zeros(len(parameter), np.uint32)
        if fresh:
            flags |= np.uint32(SegmentFlag.ZERO_STATE)
        if layout.dtype is not DtypeCode.FLOAT32:
            reload = np.ones(len(parameter), bool) if fresh else self._reload[subgroup]
            flags |= np.where(reload, np.uint32(SegmentFlag.LOAD_MASTER), np.uint32(0))
        dtypes: Any = DtypeCode.NONE
        scalars = None
        rounding: dict[str, Any] = {}
        if layout.state.format.rounds:
            rounding["first_index"] = self._starts[parameter] + start
            if update:
                updates = self.steps[parameter] + 1
                rounding["rounding_key"] = rounding_keys(self.seed, self.numbers[parameter], updates)
        if update:
            dtypes = (self.gradient_dtypes if gradient_dtypes is None else gradient_dtypes)[parameter]
            scalars = step_scalars[parameter].T
            gradient_starts = (self.gradients if gradients is None else gradients)[parameter]
            addresses["gradient"] = gradient_starts + start * ITEM_BYTES[dtypes]
        return segment_table(
            layout.state,
            numel,
            addresses,
            weight_dtype=layout.dtype,
            gradient_dtype=dtypes,
            flags=flags,
            scalars=scalars,
            **rounding,
        )

    def fill_speculative(
        self,
        subgroup: int,
        address: int,
        image_address: int,
        slots: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]],
        sums: npt.NDArray[np.uint64],
        *,
        on_gpu: bool,
    ) -> npt.NDArray[Any]:
        """Return the table of a subgroup for the expected update.

        Masters are not reloaded from their weights; if one is to be, the step's table differs, and revokes this one.

        Args:
            subgroup: The subgroup.
            address: Address of its state in memory.
            image_address: Address of memory for an image of its new weights.
            slots: Address and element type of each parameter's gradient slot: bound addresses may be gone.
            sums: Two for each segment, to which the fingerprints of its gradient and its fp32 weight are added.
            on_gpu: Whether the weights lie on a GPU: 16-bit ones, which are not read.
        """
        table = self.fill(
            subgroup,
            address,
            fresh=False,
            update=True,
            weights_address=image_address if on_gpu else None,
            weights=self._expected_weights,
            gradients=slots[0],
            gradient_dtypes=slots[1],
            rows=self._expected_rows,
        )
        table["flags"] &= ~np.uint32(SegmentFlag.LOAD_MASTER)
        layout, offset = self._layout.subgroups[subgroup], self._columns[subgroup][2]
        if not on_gpu:
            table[_new_weights(layout)] = np.uint64(image_address) + offset * ITEM_BYTES[layout.dtype]
        table["read"] = sums.ctypes.data + sums.strides[0] * np.arange(len(sums))
        return table

    def matches_speculative(
        self,
        subgroup: int,
        address: int,
        speculative: npt.NDArray[Any],
        gradients: npt.NDArray[np.uint64],
        image_address: int | None,
    ) -> bool:
        """Return whether the last step begun would update a subgroup just as a table of `fill_speculative` does.

        Args:
            subgroup: The subgroup.
            address: Address of its state in memory.
            speculative: The table of `fill_speculative`.
            gradients: Address of each parameter's gradient in that step.
            image_address: Address of an image of its weights; None for weights in host memory.
        """
        layout = self._layout.subgroups[subgroup]
        expected = checked(speculative).copy()  # of the whole row: by a rule's names, fields in between would be lost
        expected["read"] = 0
        expected[_new_weights(layout)] = 0
        table = self.fill(
            subgroup, address, fresh=False, update=True, weights_address=image_address, gradients=gradients
        )
        idle = ~active_rows(expected)  # their gradients are not read, wherever they lie
        for name in ("gradient", "gradient_dtype"):
            expected[name][idle] = table[name][idle]
        return table.tobytes() == expected.tobytes()

    def read_by(
        self, subgroup: int, table: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return addresses and sizes of gradients and fp32 weights that an update reads, and others may write to.

        Returns:
            One row for each segment: its gradient, its fp32 weight; sizes are 0 if the update does not read them.
        """
        is_fp32 = self._layout.subgroups[subgroup].dtype is DtypeCode.FLOAT32
        numel = np.where(active_rows(table), table["numel"], np.uint64(0))
        sizes = np.stack([numel * ITEM_BYTES[table["gradient_dtype"]], numel * np.uint64(4 * is_fp32)], axis=1)
        return np.stack([table["gradient"], table["master"]], axis=1), sizes.astype(np.uint64)

    def weight_copies(
        self, subgroup: int, image_address: int, chosen: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.uint64]:
        """Return copies between a subgroup's bound weights and an image of them.

        Args:
            subgroup: The subgroup.
            image_address: Address of the image.
            chosen: For each segment, whether to include it; None for all.

        Returns:
            Rows of (address of the weight, address in the image, bytes).
        """
        parameter, start, offset, numel = self._columns[subgroup]
        item = ITEM_BYTES[self._layout.subgroups[subgroup].dtype]
        columns = (self.weights[parameter] + start * item, np.uint64(image_address) + offset * item, numel * item)
        rows: npt.NDArray[np.uint64] = np.stack(columns, axis=1)
        bound = self.weights[parameter] != 0
        return rows[np.flatnonzero(bound if chosen is None else bound & chosen)]

    def changed(self, subgroup: int) -> None:
        """Note that a subgroup's masters have been reloaded from their weights: its changed state is kept."""
        self._reload[subgroup][:] = False

    def needs_reload(self, subgroup: int) -> bool:
        """Return whether a master of this subgroup is to be taken from its weight."""
        return bool(self._reload[subgroup].any())
