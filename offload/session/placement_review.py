"""Choosing again which device updates each subgroup, by the rates that steps have shown.

The first choice rests on a probe. A rate is the median of `HISTORY` observations: when that many steps have been
seen, placement "auto" is chosen anew, and again ever more rarely. A review changes which device updates a subgroup,
and with that the memory for its gradients; homes and staging stay, and so does every bit of the state.

Invariants: the plan changes with nothing in flight, no checkpoint under way, and no gradient that has arrived; a
session changes it `MOST_CHANGES` times at most.
"""

from __future__ import annotations

import logging

from offload.errors import OffloadError
from offload.measure import HISTORY
from offload.plan import Plan, choose_plan, estimate
from offload.session.parts import SessionParts
from offload.session.thread import EngineThread
from offload.units import format_seconds

log = logging.getLogger("offload")

WORTH_A_CHANGE = 0.03
"""Another choice is taken where it saves more than this part of the step time."""

MOST_CHANGES = 3
"""Bounded, as two choices may each look better by the rates that are seen with the other one."""


class PlacementReview:
    """Decides when a session's placement is chosen again, and chooses it.

    `note_learnt_step` counts steps and sets `due`. `review` is called where the plan may change, and does nothing
    unless it is due.

    Attributes:
        due: Whether `review` is to choose at the next chance.
    """

    def __init__(self, parts: SessionParts, thread: EngineThread) -> None:
        self.due = False
        self._parts = parts
        self._thread = thread
        self._changes = 0  # of the plan, so far
        self._seen_steps = 0  # that have refined the rates since the last review
        # For the first review: the rates known before count as one of the `HISTORY` observations of a median.
        self._needed_steps = HISTORY - 1

    @property
    def is_near(self) -> bool:
        """Whether `review` may have something to do once one more step has refined the rates."""
        return self.due or self._is_due_after(self._seen_steps + 1)

    def _is_due_after(self, steps: int) -> bool:
        """Return whether a review is due once so many steps have been seen since the last one."""
        chooses = self._parts.config.placement == "auto"
        return chooses and steps >= self._needed_steps and self._changes < MOST_CHANGES

    def note_learnt_step(self) -> None:
        """Note that rates have been refined by one more step."""
        self._seen_steps += 1
        self.due = self.due or self._is_due_after(self._seen_steps)

    def review(self) -> None:
        """Choose again if it is due and can be; on the engine thread, between sweeps."""
        parts, machine = self._parts, self._parts.machine
        is_busy = machine.is_open or machine.saver.under_way is not None
        if not self.due or is_busy or parts.gradients.have_arrived():
            return
        self.due = False
        self._seen_steps = 0
        self._needed_steps *= 2  # the choice is reviewed ever more rarely
        plan = self._better_plan()
        if plan is None:
            return
        before = parts.plan
        try:
            self._thread.settle()
            parts.use_replanned(plan)
        except OffloadError as error:
            if machine.broken is None:  # else the session has broken: the next request raises why
                self._changes = MOST_CHANGES  # so that it is not reviewed again
                log.warning("the GPU updates what it did before, which is slower than it could be: %s", error)
            return
        self._changes += 1
        self._needed_steps = HISTORY  # until the rates are those of the new placement alone
        log.info(
            "%s: by what steps show, one takes %s, not %s",
            plan.change_from(before),
            format_seconds(estimate(plan, parts.rates).step_s),
            format_seconds(estimate(before, parts.rates).step_s),
        )

    def _better_plan(self) -> Plan | None:
        """Return a plan that is faster by more than `WORTH_A_CHANGE` at the present rates; None if there is none."""
        plan, rates = self._parts.plan, self._parts.rates
        try:
            other = choose_plan(plan.layout, plan.budgets, rates, kept=plan)
        except OffloadError as error:  # paths have less room than they had
            log.info("the GPU updates what it did before: %s", error)
            return None
        is_worth_it = estimate(plan, rates).step_s > (1 + WORTH_A_CHANGE) * estimate(other, rates).step_s
        return other if is_worth_it and other.placements != plan.placements else None
