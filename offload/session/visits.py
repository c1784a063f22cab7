"""Visits of subgroups: what a step, a reader and a writer have the engine thread do with a session's state."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from offload.engine.executor import nothing_comes
from offload.errors import OffloadError
from offload.layout import Segment
from offload.measure import HISTORY, observe, typical
from offload.plan import Rates, visit_order
from offload.schedule.machine import update_visits
from offload.schedule.operations import Reshare, Run, Stop, Sweep, Visit
from offload.schedule.timeline import Interval
from offload.session.parts import Parts
from offload.session.placing import Placing
from offload.session.thread import EngineThread

log = logging.getLogger("offload")

Take = Callable[[Segment, Mapping[str, torch.Tensor]], None]
"""Works on one segment: its state, as flat views in host memory."""


def nothing(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
    """Take nothing."""


class Visits:
    """The sweeps of one session, and what it learns from them.

    Args:
        parts: What they work on.
        thread: Runs them.
    """

    def __init__(self, parts: Parts, thread: EngineThread) -> None:
        self._parts = parts
        self._thread = thread
        self.version = 0
        """The newest version of any tile; no two of a tile have the same number."""
        self.step_number = 0
        """Steps that have ended."""
        self.placing = Placing(parts, thread)
        """Chooses again what the GPU updates."""
        self.ahead = thread.ahead
        """What is updated during backward."""
        thread.serve_ahead = self._serve_ahead
        self._sweeps = 0
        self._seen: list[Rates] = []
        self.ended: list[Interval] = []
        """What the lanes did in the last step, where that for the next one has begun; else nothing."""
        self._unlearnt: list[Interval] | None = None

    def subgroups_of(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Return the subgroups that parameters lie in."""
        places = self._parts.plan.layout.places
        return tuple(sorted({subgroup for position in positions for subgroup, _ in places[position]}))

    def wait_for(self, parameters: Iterable[int | str]) -> None:
        """Wait for a step that goes on behind its caller to have visited some parameters; see `Engine.wait_for`."""
        if self._thread.behind is None or os.getpid() != self._thread.pid:
            return
        subgroups = self.subgroups_of(map(self._parts.position, parameters))
        if self._thread.wait_for(subgroups):
            self._parts.lanes.lead_caller_to(subgroups)

    def visit(
        self,
        subgroups: Sequence[int],
        take: Take,
        *,
        changes: bool,
        masters: Collection[int] = (),
        applied: Callable[[], None] = lambda: None,
    ) -> None:
        """Have `take` work on every segment of some subgroups, and wait until it has.

        Args:
            subgroups: Which.
            take: What to do; on the engine thread.
            changes: Whether it writes to the state.
            masters: Parameters whose masters it sets; their weights follow.
            applied: Called on the engine thread when all has been done.
        """
        visitor = self.visitor(take, changes, masters)
        self._thread.request(partial(self.begin, subgroups, visitor, changes=changes), applied)

    def visitor(self, take: Take, changes: bool, masters: Collection[int] = ()) -> Callable[[Run], None]:
        """Return a visitor for which every segment of a run is taken; see `visit`."""
        parts, views, tables = self._parts, self._parts.views, self._parts.tables

        def visit(run: Run) -> None:
            with views.on_host(run) as view:
                views.make_whole(run, view)
                if changes:
                    tables.changed(run.visit.subgroup)
                for segment in parts.plan.layout.subgroups[run.visit.subgroup].segments:
                    with views.piece(run, view, segment, sets_master=segment.parameter in masters) as tensors:
                        take(segment, tensors)

        return visit

    # On the engine thread

    def begin(
        self,
        subgroups: Sequence[int],
        visitor: Callable[[Run], npt.NDArray[Any] | None],
        *,
        changes: bool,
        overwrites: bool = False,
    ) -> Sweep:
        """Return the sweep that has `visitor` work on some subgroups."""
        parts = self._parts
        visits = []
        for number in visit_order(subgroups, parts.machine.slots):
            weight_bytes = parts.plan.layout.subgroups[number].weight_bytes if parts.plan.weights_on_gpu else 0
            visits.append(Visit(number, changes, overwrites, weight_bytes=weight_bytes, fetches=weight_bytes > 0))
        return self._sweep(tuple(visits), visitor, changes)

    def begin_step(self, subgroups: Sequence[int]) -> Sweep:
        """Return the sweep that updates some subgroups as `Tables.begin_step` was told."""
        parts = self._parts
        if not parts.machine.is_ahead:  # else it has begun when that was opened
            self._begin_timeline()
        self.ended = []
        with self._breaking():
            parts.gradients.finish()  # an addition that has failed ends the step before anything is confirmed
            done = self.ahead.confirm(subgroups)
        subgroups = [number for number in subgroups if number not in done]
        if self.placing.is_near:
            self.learn()
            self.placing.review()
        parts.executor.seals_homes = parts.saves.is_expected(self.step_number + 1)
        order = visit_order(subgroups, parts.machine.slots)
        visits = update_visits(parts.plan, order, lambda n: parts.machine.is_fresh(n) or parts.tables.needs_reload(n))
        with self._breaking():
            if parts.gradients.begin_step(parts.plan, visits):
                parts.plan = parts.counting_gradients(parts.plan)

        def update(run: Run) -> npt.NDArray[Any] | None:
            parts.gradients.bring(run.visit.subgroup)
            return parts.views.update_table(run, parts.gradients.addresses)

        return self._sweep(visits, update, changes=True, coming=parts.gradients.coming, updates=True)

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Have an error break the session: the GPU has failed."""
        try:
            yield
        except OffloadError as error:
            self._parts.machine.handle(Stop(error))
            raise (self._parts.machine.broken or error) from None

    def _begin_timeline(self) -> None:
        """Begin the account of another step."""
        self._parts.executor.take_timed()
        self._unlearnt, self._parts.executor.timeline = self._parts.executor.timeline, []

    def _serve_ahead(self) -> None:
        machine = self._parts.machine
        try:
            if not machine.is_ahead and not self.ended:
                self._begin_timeline()
                self.ended = self._unlearnt or []
            self.ahead.serve(lambda visits, visitor: self._sweep(visits, visitor, True, updates=True, ahead=True))
        except OffloadError as error:  # a GPU has failed; nobody waits for this, so whoever asks next is told
            machine.handle(Stop(error))

    def _sweep(
        self,
        visits: tuple[Visit, ...],
        visitor: Callable[[Run], npt.NDArray[Any] | None],
        changes: bool,
        coming: Callable[[int], None] = nothing_comes,
        updates: bool = False,
        ahead: bool = False,
    ) -> Sweep:
        self._parts.executor.visit_with(visitor, coming, updates=updates)
        self._sweeps += 1
        self.version += changes
        return Sweep(self._sweeps, self.version, visits, ahead)

    def learn(self) -> None:
        """Take the rates from what the last step did, and let the spread of tiles follow them.

        Once a step, which need not wait for it, and goes on as before where nothing can be learnt.
        """
        parts = self._parts
        timeline, self._unlearnt = self._unlearnt, None
        if timeline is None:
            return
        try:
            if self.step_number > 1:  # the first step reads nothing, and touches memory for the first time
                seen = self._seen or [parts.rates]
                self._seen = [*seen[1 - HISTORY :], observe(parts.rates, timeline)]
                parts.rates = typical(self._seen)
                self.placing.learnt()
            shares = parts.plan.shares(parts.rates)
        except Exception as error:
            log.warning("nothing is learnt from the last step: %r", error, exc_info=error)
            return
        if parts.plan.budgets.follow_rates:
            parts.machine.handle(Reshare(shares))
