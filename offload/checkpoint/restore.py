"""Copies state from a checkpoint into a session, and derives the weights from it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from offload.checkpoint.reader import Range, StateSource
from offload.device.none import Lanes
from offload.engine.tables import Tables
from offload.engine.views import StateViews, View
from offload.errors import CheckpointError
from offload.layout import Parameter, Segment, Subgroup
from offload.rules import MASTER, PACKED
from offload.schedule.operations import RunVisit


class Restorer:
    """Copies the state of a session's parameters from a checkpoint; on the engine thread, except for its constructor.

    Args:
        source: The checkpoint.
        parameters: The session's parameters, by position.
        names: Their names in the checkpoint, by their names here, where these differ.
        views: The session's state.
        tables: Addresses of its weights.
        lanes: Lanes of the device that the weights are on.
        anew: Names of parameters of the session that begin anew where the checkpoint lacks them.

    Attributes:
        saved_names: Each parameter's name in the checkpoint, by position.
        anew: Positions of parameters that begin anew.

    Raises:
        CheckpointError: Parameters that are not in `anew` are missing, or have other sizes or another rule's state.
    """

    def __init__(
        self,
        source: StateSource,
        parameters: Sequence[Parameter],
        names: Mapping[str, str],
        views: StateViews,
        tables: Tables,
        lanes: Lanes,
        anew: Collection[str] = (),
    ) -> None:
        self.saved_names = [names.get(parameter.name, parameter.name) for parameter in parameters]
        self._parameters = parameters
        self._source = source
        self._views = views
        self._tables = tables
        self._lanes = lanes
        in_checkpoint = set(source.names)
        # Positions of parameters that the checkpoint lacks: either they begin anew, or they are missing.
        unsaved = [number for number, name in enumerate(self.saved_names) if name not in in_checkpoint]
        self.anew = frozenset(number for number in unsaved if parameters[number].name in anew)
        missing = [self.saved_names[number] for number in unsaved if number not in self.anew]
        if missing:
            raise CheckpointError(f"{source.path} is of another model: {self._describe_missing(missing)}")
        for number, parameter in enumerate(parameters):
            if number not in self.anew:
                self._check_saved(self.saved_names[number], parameter)

    def _describe_missing(self, missing: Sequence[str]) -> str:
        """Return, in words, which parameters the checkpoint lacks, and a hint where the names are of another kind."""

        def has_positions(names: Sequence[str]) -> bool:
            """Return whether there are names such as "param_groups[0]...", of parameters that were given no name."""
            return any(name.startswith("param_groups[") for name in names)

        in_checkpoint = self._source.names
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        hint = ""
        if has_positions(self.saved_names) != has_positions(in_checkpoint):
            hint = "; one was made from parameters(), the other from named_parameters()"
        return f"it has no {', '.join(missing[:3])}{more}; it has {', '.join(in_checkpoint[:3])}, ...{hint}"

    def _check_saved(self, name: str, parameter: Parameter) -> None:
        """Raise `CheckpointError` unless a parameter is saved, as `name`, with the same size and rule."""
        source = self._source
        saved_rule = source.rule_of(name)
        rule = self._views.plan.layout.state_of(parameter).rule
        # The checkpoint knows no rule of a parameter without elements.
        if source.full_numel(name) and not source.keeps(name, rule):
            size = " with state of another size" if saved_rule.name == rule.name else ""
            raise CheckpointError(
                f"{source.path} has state of the rule {saved_rule.name!r}, and this optimizer's is "
                f"{rule.name!r}{size} ({name})"
            )
        if source.full_numel(name) != parameter.unsharded_numel:
            raise CheckpointError(
                f"{source.path} is of another model: {name} has {source.full_numel(name)} elements there "
                f"and {parameter.unsharded_numel} here"
            )

    def restore_step_counts(self) -> None:
        """Copy each parameter's step count; and its number in stochastic rounding, with the seed.

        Where the checkpoint lacks seed and numbers, the session keeps its own. A parameter that begins anew has taken
        0 steps.
        """
        tables = self._tables
        for position, name in enumerate(self.saved_names):
            tables.steps[position] = 0 if position in self.anew else self._source.step_of(name)
        rounding = self._source.rounding
        if rounding is not None:
            tables.seed, saved_numbers = rounding
            for position, name in enumerate(self.saved_names):
                tables.numbers[position] = saved_numbers.get(name, tables.numbers[position])

    def restore(self, run: RunVisit) -> None:
        """Copy a visited subgroup's state, and derive its weights from it: the visitor of a sweep that restores."""
        subgroup = self._views.plan.layout.subgroups[run.visit.subgroup]
        with self._views.on_host(run) as view, contextlib.ExitStack() as exits:
            # `piece` gives a segment's state, by tensor, as fp32 views. When its context ends, the state is stored in
            # its format and, with `sets_master`, the weight is rounded from the master.
            views_by_segment = [
                (segment, exits.enter_context(self._views.piece(run, view, segment, sets_master=True)))
                for segment in subgroup.segments
            ]
            self._read_segments(subgroup.index, views_by_segment, view)

    def _read_segments(
        self, subgroup: int, views_by_segment: Sequence[tuple[Segment, Mapping[str, torch.Tensor]]], view: View
    ) -> None:
        """Read the saved state of all segments of a subgroup, in one call, so that each tile is read once.

        State that is not saved is filled in: masters from the weights, other state with zeros where it begins anew.
        The subgroup's masters then count as due no longer, so no update takes them from the weights.
        """
        self._source.read(
            [
                item
                for segment, views in views_by_segment
                for name in views
                if self._is_saved(segment, name)
                for item in self._ranges(segment, name, views[name])
            ]
        )
        for segment, views in views_by_segment:
            if segment.parameter in self.anew:
                for name in views.keys() - {MASTER}:
                    views[name].zero_()
            if not self._is_saved(segment, MASTER):
                views[MASTER].copy_(self._views.weight(subgroup, segment, view))
        self._tables.note_masters_current(subgroup)

    def _is_saved(self, segment: Segment, name: str) -> bool:
        """Return whether the checkpoint has a state tensor of a segment."""
        return segment.parameter not in self.anew and self._source.has(self.saved_names[segment.parameter], name)

    def _ranges(self, segment: Segment, name: str, out: torch.Tensor) -> Iterator[Range]:
        """Yield the ranges of a saved state tensor that make up a segment; together they fill `out`.

        There are several where the session has a piece that is no single run of the unsharded parameter.
        """
        saved_name = self.saved_names[segment.parameter]
        if name == PACKED:  # a segment has a whole parameter then
            yield Range(saved_name, name, 0, out)
            return
        done = 0
        for start, numel in self._parameters[segment.parameter].runs(segment.start, segment.numel):
            yield Range(saved_name, name, start, out[done : done + numel])
            done += numel

    def derive_weights(self, subgroup: Subgroup) -> None:
        """Read a subgroup's saved masters as its weights, rounded to their dtype; its state stays in the checkpoint.

        Weights on a GPU are read to a weight slot and copied from there, others are read where they lie. The masters
        in the checkpoint then count as due no longer, so no update takes them from the weights.
        """
        number = subgroup.index
        # There is no state in memory (address 0). With nothing in flight any weight slot is free, so use the first.
        view = View(address=0, weights_address=self._lanes.image(0))
        self._source.read(
            [
                item
                for segment in subgroup.segments
                for item in self._ranges(segment, MASTER, self._views.weight(number, segment, view))
            ]
        )
        if view.weights_address is not None:  # the weights are on a GPU
            self._lanes.copy_to_device(self._tables.weight_copies(number, view.weights_address).tolist())
        self._tables.note_masters_current(number)
