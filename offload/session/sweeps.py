"""The sweeps of a session as they begin: their numbers and versions, who works in them, and the accounts of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from offload.engine.executor import Coming, Visitor, nothing_comes
from offload.plan import visit_order
from offload.schedule.operations import BeginSweep, Sweep, Visit
from offload.session.parts import SessionParts
from offload.session.step import StepAccount

RECENT_STEPS = 100
"""How many steps' seconds are kept."""


class Sweeps:
    """The sweeps of one session; all methods belong to the engine thread."""

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        self.version = 0
        """The number of the newest version of any tile; no two versions of a tile have the same number."""
        self.step_number = 0
        """Steps that the state has had, those before a checkpoint that was loaded included."""
        self.last = StepAccount()
        """The account of the last step that has ended."""
        self.account = self.last
        """The account of the open step; where no step is open, that of the last one."""
        self._unlearnt: StepAccount | None = None  # the account that `take_last_account` returns next, once
        self._sweep_count = 0

    def begin(self, subgroups: Sequence[int], visitor: Visitor, *, changes: bool, overwrites: bool = False) -> Sweep:
        """Have the machine begin a sweep in which `visitor` works on some subgroups, and return it.

        Args:
            changes: Whether the visitor changes state, which gets a new version then.
            overwrites: Whether it replaces all state of these subgroups, so that no state is fetched.
        """
        parts = self._parts
        visits = []
        for number in visit_order(subgroups, parts.machine.slots):
            weight_bytes = parts.plan.passing_bytes(number)
            # A visitor may read weights, so those on a device are fetched.
            visits.append(Visit(number, changes, overwrites, weight_bytes=weight_bytes, fetches=weight_bytes > 0))
        sweep = self.number_sweep(tuple(visits), visitor, changes=changes)
        parts.machine.handle(BeginSweep(sweep))
        return sweep

    def make_open(self, visits: tuple[Visit, ...], visitor: Visitor) -> Sweep:
        """Return an open sweep for the next step, to which visits are admitted; `visitor` makes their tables."""
        self.open_account()
        return self.number_sweep(visits, visitor, updates=True, is_open=True)

    def number_sweep(
        self,
        visits: tuple[Visit, ...],
        visitor: Visitor,
        coming: Coming = nothing_comes,
        *,
        changes: bool = True,
        updates: bool = False,
        is_open: bool = False,
    ) -> Sweep:
        """Number the next sweep, have the executor call `visitor` in it, and return it.

        Args:
            visits: Of the sweep, in order.
            visitor: Called at the start of each run.
            coming: Called with each subgroup that starts to be fetched.
            changes: Whether visits change state, which gets a new version then.
            updates: Whether the visitor only returns tables for the kernel, which updates.
            is_open: Whether it is an open sweep.
        """
        self._parts.executor.set_visitor(visitor, coming, updates=updates)
        self._sweep_count += 1
        self.version += 1 if changes else 0
        return Sweep(self._sweep_count, self.version, visits, is_open)

    def open_account(self) -> None:
        """Open the account of the next step unless it is open: what lanes do from now on counts for it.

        `take_last_account` can then return the last step's account, once.
        """
        if self.account is self.last:
            self._parts.executor.take_timed()  # what a device has timed by now belongs to the last step
            # Number and seconds of the last step; nothing before the session's first.
            last_step = ((self.step_number, self.last.whole_s),) if self.last.step_s else ()
            earlier_steps = (*self.last.earlier_steps, *last_step)[-RECENT_STEPS:]
            self._unlearnt, self.account = self.last, StepAccount(earlier_steps=earlier_steps)
            self._parts.executor.timeline = self.account.timeline

    def close_account(self) -> None:
        """Let the last step's account count nothing that is begun from now on: a request that is no step has come.

        This sets the account's `until_s`, at the first such request. If the next step's account is open, do nothing.
        """
        if self.account is self.last and self.last.until_s == math.inf:
            self.last.until_s = self._parts.executor.end_engine_interval()

    def end_step(self, started_s: float) -> None:
        """Close the account of the step under way, which has ended well."""
        account = self.account
        account.started_s, account.step_s = started_s, time.monotonic() - started_s
        self.step_number += 1
        self.last = account

    def take_last_account(self) -> StepAccount | None:
        """Return the account of the step before the open one, once; None if it has been returned."""
        account, self._unlearnt = self._unlearnt, None
        return account
