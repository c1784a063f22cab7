"""Visits of subgroups: how a step, a reader and a writer work on a session's state, on the engine thread."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from offload.errors import OffloadError
from offload.layout import Segment
from offload.measure import HISTORY, as_on_fastest, observe, typical
from offload.plan import Rates, visit_order
from offload.schedule.operations import LimitGpuSlots, Reshare, RunVisit, Stop, Sweep, Visit
from offload.schedule.runs import update_visits
from offload.session.parts import SessionParts
from offload.session.placement_review import PlacementReview
from offload.session.thread import EngineThread

log = logging.getLogger("offload")

SegmentWork = Callable[[Segment, Mapping[str, torch.Tensor]], None]
"""Works on one segment: its state, as flat views in host memory."""


def nothing(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
    """Do nothing with a segment: the work of a sweep whose visitor only makes state whole, before a save."""


class SweepRequests:
    """Requests for sweeps of one session, and the rates that it learns from steps."""

    def __init__(self, parts: SessionParts, thread: EngineThread) -> None:
        self._parts = parts
        self._thread = thread
        self.placement_review = PlacementReview(parts, thread)
        """Chooses again what the GPU updates."""
        self._observed: list[Rates] = []  # the latest, of which the session's rates are typical

    def subgroups_of(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Return the subgroups that parameters lie in."""
        places = self._parts.plan.layout.places
        return tuple(sorted({subgroup for position in positions for subgroup, _ in places[position]}))

    def wait_for(self, parameters: Iterable[int | str], *, on_any_stream: bool = False) -> None:
        """Wait until a pending step has updated some parameters; order the caller's stream after their new weights.

        In a forked copy of the session there is nothing to wait for.

        Args:
            on_any_stream: Order the caller's stream after the new weights even if no step is pending any more.
        """
        if os.getpid() != self._thread.pid or (self._thread.pending is None and not on_any_stream):
            return
        subgroups = self.subgroups_of(map(self._parts.position, parameters))
        if self._thread.wait_for(subgroups) or on_any_stream:
            self._parts.lanes.order_caller_after(subgroups)

    def sweep_segments(
        self,
        subgroups: Sequence[int],
        work: SegmentWork,
        *,
        changes: bool,
        masters: Collection[int] = (),
        sets_weights: bool = True,
        applied: Callable[[], None] = lambda: None,
    ) -> None:
        """Do `work` on every segment of some subgroups, on the engine thread, and wait until all is done.

        Args:
            changes: Whether the work writes to the state.
            masters: Parameters whose masters the work sets, or needs as their weights are now.
            sets_weights: Whether 16-bit weights are set to the rounding of these masters.
            applied: Called on the engine thread when all has been done.
        """
        visitor = self.make_visitor(work, changes=changes, masters=masters, sets_weights=sets_weights)
        begin = partial(self._thread.sweeps.begin, subgroups, visitor, changes=changes)
        self._thread.request(begin, applied=applied)

    def make_visitor(
        self, work: SegmentWork, changes: bool, masters: Collection[int] = (), *, sets_weights: bool = True
    ) -> Callable[[RunVisit], None]:
        """Return a visitor that makes a subgroup's state whole, then does `work` on each of its segments.

        State is whole once fresh state is filled, and the chosen masters (`masters`) that are due are taken from
        their weights. The arguments are those of `sweep_segments`, just above.
        """
        parts, views, tables = self._parts, self._parts.views, self._parts.tables
        is_master_chosen = np.zeros(len(tables.steps), bool)  # by parameter
        is_master_chosen[[*masters]] = True

        def work_on_segments(run: RunVisit) -> None:
            """Do the work on all segments of the visited subgroup."""
            with views.on_host(run) as view:
                views.make_whole(run, view, is_master_chosen)
                if changes:  # a visit that only reads has taken no master, except of fresh state, which stays fresh
                    # None: of a fresh subgroup all masters have been taken.
                    tables.note_masters_current(run.visit.subgroup, None if run.fresh else is_master_chosen)
                for segment in parts.plan.layout.subgroups[run.visit.subgroup].segments:
                    sets_master = sets_weights and bool(is_master_chosen[segment.parameter])
                    with views.piece(run, view, segment, sets_master=sets_master) as tensors:
                        # A reader gets masters that are due as their next update will take them from the weight,
                        # perhaps in several pieces: see `Engine.reload_master`.
                        pieces = [(segment, tensors)] if changes else views.shown(run, view, segment, tensors)
                        for piece, piece_tensors in pieces:
                            work(piece, piece_tensors)

        return work_on_segments

    # On the engine thread

    def seal_and_begin_rest(self, subgroups: Sequence[int], active: Sequence[int]) -> Sweep:
        """Seal a step: confirm or revoke the updates made in backward; begin and return the sweep of all others.

        Args:
            subgroups: Those that the step updates, in order, as `Tables.step_rows` says.
            active: Positions of the parameters with a gradient.
        """
        parts, speculation, sweeps = self._parts, self._thread.speculation, self._thread.sweeps
        speculation.begin_step(active)
        sweeps.open_account()
        with self._failures_break_session():
            parts.allocate()  # store slots, and their room, for the step's flushes
            parts.gradients.finish()  # an addition that has failed ends the step before anything is confirmed
            confirmed = speculation.choose_confirmed(subgroups)
            # Usually rates are refined while the step goes on. A review needs them before the step's sweep begins.
            if self.placement_review.is_near:
                self.refine_rates()
                self.placement_review.review()
            visits = self._visits_of([number for number in subgroups if number not in confirmed])
            if parts.gradients.begin_step(parts.plan, visits):  # gradients take more memory now: the plan counts it
                parts.plan = parts.with_gradient_bytes(parts.plan)
        # Checksums of state that stays in memory are made only where a save is expected to use them.
        parts.executor.seals_homes = parts.saves.is_expected(sweeps.step_number + 1)

        def update(run: RunVisit) -> Any:
            """Return the kernel's table for a run, once its gradients are where the update reads them."""
            parts.gradients.fetch_for_visit(run.visit.subgroup)
            return parts.views.work(run, parts.tables.step_rows)

        rest = sweeps.number_sweep(visits, update, parts.gradients.coming, updates=True)
        speculation.seal(confirmed, rest)
        return rest

    def _visits_of(self, subgroups: Sequence[int]) -> tuple[Visit, ...]:
        """Borrow GPU slots for a step, as many as there is memory for, and return the step's visits in order."""
        parts, machine, tables = self._parts, self._parts.machine, self._parts.tables
        slots = parts.lanes.borrow_slots()
        if slots is not None:  # else all of the plan's are there
            machine.handle(LimitGpuSlots(slots))
        plan = parts.plan.unborrowed if slots == 0 else parts.plan  # without memory for them the CPU updates
        order = visit_order(subgroups, machine.live_slots)
        active = tables.step_rows.flags != 0
        return update_visits(plan, order, reloads=lambda n: machine.is_fresh(n) or tables.is_due(n, active))

    @contextlib.contextmanager
    def _failures_break_session(self) -> Iterator[None]:
        """Break the session if an error is raised within this, as the GPU has failed; raise what broke it."""
        try:
            yield
        except OffloadError as error:
            self._parts.machine.handle(Stop(error))
            raise (self._parts.machine.broken or error) from None  # `broken` may be an earlier error

    def refine_rates(self) -> None:
        """Refine the rates by the last step's timeline, and spread tiles over the paths by these rates.

        Called once a step, while the step goes on. If it fails, that is logged, and rates stay.
        """
        parts = self._parts
        sweeps = self._thread.sweeps
        account = sweeps.take_last_account()
        if account is None:
            return
        try:
            # The first step shows no rates: it reads nothing, and touches memory for the first time.
            if sweeps.step_number > 1:
                observed = self._observed or [parts.rates]  # at first what was known or probed counts as one
                timeline = as_on_fastest(account.work, parts.plan, parts.rates)
                # The last `HISTORY - 1` observations, and this one.
                self._observed = [*observed[1 - HISTORY :], observe(parts.rates, timeline)]
                parts.rates = typical(self._observed)
                self.placement_review.note_learnt_step()
            shares = parts.plan.path_shares(parts.rates)
        except Exception as error:
            log.warning("nothing is learnt from the last step: %r", error, exc_info=error)
            return
        if parts.plan.budgets.follow_rates:  # else the user has set the paths' shares
            parts.machine.handle(Reshare(shares))
