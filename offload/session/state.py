"""The state of a session's parameters, read and changed from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from offload.dtypes import DtypeCode
from offload.errors import ConfigError
from offload.layout import Segment
from offload.rules import MASTER, checked_step
from offload.session.parts import SessionParts
from offload.session.setup import raising_shortages
from offload.session.state_copy import StateCopy, copy_run, free_bytes_beside, refuse_negative, refuse_uncopyable
from offload.session.thread import EngineThread
from offload.session.visits import SegmentWork, SweepRequests


class State:
    """The tensors that the rule keeps of each parameter, wherever they live."""

    def __init__(self, parts: SessionParts, thread: EngineThread, sweep_requests: SweepRequests) -> None:
        self._parts = parts
        self._thread = thread
        self._sweep_requests = sweep_requests

    def read(self, parameters: Iterable[int | str], *, own_masters: bool = True) -> list[dict[str, torch.Tensor]]:
        """Return the rule's tensors of each parameter (Adam: master, exp_avg, exp_avg_sq), new, flat and fp32.

        More than 64 MiB lies in a file without a name, on a path or in the directory for temporary files: pages that
        are not used take no memory. The file is deleted with the last tensor.

        Args:
            parameters: Which ones.
            own_masters: Whether masters that are (fp32) weights are among the tensors.

        Raises:
            InfeasiblePlanError: Neither a disk nor memory has room for that; nothing was allocated.
            OffloadError: The system does not give the memory.
            TierError: A disk has failed, the one with the file included.
        """
        parts = self._parts
        with self._thread.turn():
            layout = parts.plan.layout
            positions = [self._parts.position(parameter) for parameter in parameters]
            # (position, name) of each tensor to be copied. A parameter that is asked for twice is copied once.
            tensors = [
                (position, name)
                for position in dict.fromkeys(positions)
                for name in layout.state_of(layout.parameters[position]).rule.names
                if own_masters or name != MASTER or layout.parameters[position].dtype is not DtypeCode.FLOAT32
            ]
            number_in_copy = {tensor: number for number, tensor in enumerate(tensors)}
            numels = [layout.numel_of(position, name) for position, name in tensors]
            copy = self.new_copy(numels)
            with contextlib.closing(copy):

                def copy_run_of_state(position: int, start: int, views: Mapping[str, torch.Tensor]) -> None:
                    """Copy one run of elements, of the tensors that the caller has asked for."""
                    for name, values in views.items():
                        number = number_in_copy.get((position, name))
                        if number is not None:
                            copy.write(number, start, values)

                self.visit(copy_run_of_state, positions)
                states: dict[int, dict[str, torch.Tensor]] = {position: {} for position in positions}
                for (position, name), tensor in zip(tensors, copy.tensors, strict=True):
                    states[position][name] = tensor
            return [states[position] for position in positions]

    def new_copy(self, numels: Sequence[int]) -> StateCopy:
        """Return new fp32 tensors of zeros for a copy of state.

        Fill them with `StateCopy.write` as `visit` hands state out; call `StateCopy.close` after the last write.
        Large copies lie in a file, as those of `read` do.

        Args:
            numels: Elements of each tensor.
        """
        parts = self._parts
        with self._thread.turn(), raising_shortages("state cannot be copied"):
            free_bytes_by_directory = free_bytes_beside(parts.config, parts.plan, parts.rates, parts.tiers)
            return StateCopy(numels, free_bytes_by_directory, parts.limits.large_copy_bytes)

    def visit(
        self,
        take: Callable[[int, int, Mapping[str, torch.Tensor]], None],
        parameters: Iterable[int | str] | None = None,
    ) -> None:
        """Hand out state once, run by run in the engine's order, while its subgroup is in host memory.

        There is no copy of all state: fp32 state in host memory is viewed where it lies; other state (a compact
        format's, a GPU's) is converted or copied for the time of the call.

        Args:
            take: Called with a parameter's position, the first element of the run, and flat fp32 views of its
                state that must not be written to or kept. It runs on a thread of the engine's and
                must not call the engine.
            parameters: Parameters whose subgroups are visited; None for all.

        Raises:
            Exception: What `take` raised first; it is not called again, and the state is unharmed.
        """
        errors: list[Exception] = []

        def hand_out(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
            """Call `take`, on the engine thread; keep its error, which would break the session if raised there."""
            if not errors:
                try:
                    take(segment.parameter, segment.start, views)
                except Exception as error:
                    errors.append(error)

        with self._thread.turn():
            subgroups: Sequence[int] = range(len(self._parts.plan.layout.subgroups))
            if parameters is not None:
                subgroups = self._sweep_requests.subgroups_of(map(self._parts.position, parameters))
            self._sweep_requests.sweep_segments(subgroups, hand_out, changes=False)
        if errors:
            raise errors[0]

    def write(
        self,
        values: Mapping[int | str, Mapping[str, torch.Tensor]],
        steps: Mapping[int | str, int] | None = None,
        *,
        weights: bool = True,
    ) -> None:
        """Replace state: any tensor that `read` returns, and step counts.

        Tensors may be of any shape, strides, dtype and device: their elements are read in row-major order, piece by
        piece, and no second copy is made of them. Where the weight is fp32 it *is* the master, and a master that is
        given is written to it; a 16-bit weight becomes the rounding of a master that is given. A tensor that is not
        given keeps its value.

        Args:
            values: By parameter and name of a tensor.
            steps: Step counts by parameter; all others stay.
            weights: Whether 16-bit weights are set to masters that are given now; else with their next update.

        Raises:
            ConfigError: There is no such tensor, or it has another number of elements, is not dense and real, or is
                negative where a compact format stores roots; or a step count is no count.
        """
        parts = self._parts
        with self._thread.turn():
            tensors_of = {parts.position(parameter): tensors for parameter, tensors in values.items()}
            counts = {parts.position(n): checked_step(f"step of {n}", step) for n, step in (steps or {}).items()}
            for position, tensors in tensors_of.items():
                self._check_tensors(position, tensors)

            def write(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
                """Copy the given values of one segment to its state."""
                for name, tensor in tensors_of.get(segment.parameter, {}).items():
                    copy_run(tensor, segment.start, views[name])

            masters = {position for position, tensors in tensors_of.items() if MASTER in tensors}
            subgroups = self._sweep_requests.subgroups_of(tensors_of)
            self._change(subgroups, write, steps=counts, masters=masters, sets_weights=weights)

    def _check_tensors(self, position: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise `ConfigError` unless these are tensors of a parameter's state, by name, that can be stored.

        They have to be dense and real, with the state's number of elements, and not negative where a format that
        rounds stores their square roots.
        """
        layout = self._parts.plan.layout
        parameter = layout.parameters[position]
        state = layout.state_of(parameter)
        for name, tensor in tensors.items():
            what = f"{name} of {parameter.name}"
            if name not in state.rule.names:
                raise ConfigError(what, name, f"use {', '.join(state.rule.names)}")
            refuse_uncopyable(tensor, what)
            numel = layout.numel_of(position, name)
            if tensor.numel() != numel:
                raise ConfigError(what, tensor.numel(), f"give {numel} elements")
            if name in state.rule.roots and state.format.rounds:
                refuse_negative(tensor, what)

    def change(self, work: Callable[[int, Mapping[str, torch.Tensor]], None], *, masters: bool) -> None:
        """Call a function that changes state where it lies in memory, run by run in the engine's order.

        Args:
            work: Called with a parameter's position and flat views of its state, as `visit`'s; it may write to them.
            masters: Whether it changes masters: 16-bit weights are set to their rounding then.
        """
        with self._thread.turn():
            layout = self._parts.plan.layout
            changed_masters = range(len(layout.parameters)) if masters else ()
            subgroups = range(len(layout.subgroups))

            def change(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
                """Let `work` change one segment."""
                work(segment.parameter, views)

            self._change(subgroups, change, steps={}, masters=changed_masters)

    def reset(self, parameters: Iterable[int | str]) -> None:
        """Set moments and step counts to 0; masters and weights stay."""
        with self._thread.turn():
            positions = {self._parts.position(parameter) for parameter in parameters}

            def zero_moments(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
                """Zero all state of one segment but its master."""
                if segment.parameter in positions:
                    for name in views.keys() - {MASTER}:
                        views[name].zero_()

            # Subgroups that were never updated have no moments yet.
            is_fresh = self._parts.machine.is_fresh
            subgroups = [number for number in self._sweep_requests.subgroups_of(positions) if not is_fresh(number)]
            self._change(subgroups, zero_moments, steps=dict.fromkeys(positions, 0))

    def _change(
        self,
        subgroups: Sequence[int],
        change: SegmentWork,
        steps: Mapping[int, int],
        masters: Collection[int] = (),
        *,
        sets_weights: bool = True,
    ) -> None:
        """Let `change` write to all segments of some subgroups, then set step counts.

        Args:
            subgroups: Which.
            change: Called on the engine thread with each segment.
            steps: Step counts to be set, by parameter.
            masters: Parameters whose masters `change` sets.
            sets_weights: Whether 16-bit weights are set to the rounding of these masters.
        """
        counts = self._parts.tables.steps

        def set_counts() -> None:
            """Set the step counts; on the engine thread, once the whole sweep has ended well."""
            for position, step in steps.items():
                counts[position] = step

        self._sweep_requests.sweep_segments(
            subgroups, change, changes=True, masters=masters, sets_weights=sets_weights, applied=set_counts
        )
