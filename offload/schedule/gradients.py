"""Gradient buffers: which gradients are in memory, which on the paths, and which are on their way. Pure.

Where host memory is not to hold all gradients, they pass through a few buffers (`offload.schedule.buffers`), each as
large as the gradients of the largest subgroup. What came last is still there when the step begins, and what comes
last is what a step needs first. Gradients are gone when their subgroup's visit has run.

An invariant: but for `SPARE_BUFFERS` of the plan, and unless there is a buffer for every subgroup, buffers may hold
what lies nowhere else: so a visit's gradients find a buffer, whichever visits wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from offload.errors import invariant
from offload.plan.budget import Plan
from offload.protocols import TileId
from offload.schedule.buffers import Buffers
from offload.schedule.index import TileIndex
from offload.schedule.operations import Operation


class GradientBuffers(Buffers):
    """The gradient buffers of one session; owners are subgroups.

    Args:
        plan: How many there are, and how gradients are cut.
        index: Slots of the stores.
        new_op: Returns the id of the next operation.
        issue: Starts an operation.
        full: Called with a tile that no path has room for.
    """

    what = "gradients"

    def __init__(
        self,
        plan: Plan,
        index: TileIndex,
        new_op: Callable[[], int],
        issue: Callable[[Operation], None],
        full: Callable[[TileId], None],
    ) -> None:
        super().__init__(index, new_op, issue)
        self._full = full
        # Subgroups whose gradients are to be read for their visits: those with streamed state, which has a staging
        # slot meanwhile, come first.
        self._streamed: deque[int] = deque()
        self._resident: deque[int] = deque()
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Take in a plan, with nothing on its way."""
        self._plan, self._is_due = plan, True
        count = plan.gradient_buffers
        invariant(count >= len(self._owners), "a plan takes gradient buffers away")
        self._owners.extend([None] * (count - len(self._owners)))

    def _tiles(self, owner: int) -> Sequence[tuple[TileId, int, int]]:
        return self._plan.gradient_tiles[owner]

    def _lines(self) -> Sequence[deque[int]]:
        return self._streamed, self._resident

    # Filling

    def fill(self, subgroup: int) -> None:
        """Have a buffer made ready for gradients of a subgroup; see `is_filling`."""
        self._filling, self._is_due = {subgroup: None}, True
        if subgroup in self._held:
            self._held[subgroup] = self._held.pop(subgroup)  # the last to have been filled

    def stop_filling(self) -> None:
        """Take in that the caller writes nothing more."""
        self._filling, self._is_due = {}, True

    def drop(self) -> None:
        """Forget all gradients."""
        self._filling = {}
        for subgroup in [*self._held, *self._stored]:
            self.used(subgroup)

    # Visits

    def come(self, subgroup: int) -> None:
        """Have the gradients of a visit come to a buffer, if they are not there: its state is there, or comes."""
        self._is_due = True
        if subgroup in self._held:
            self._held[subgroup].is_wanted = True
        else:
            invariant(subgroup in self._stored, f"a visit of {subgroup} reads gradients that are not there")
            line = self._resident if self._plan.is_resident(subgroup) else self._streamed
            if subgroup not in line:
                line.append(subgroup)

    def forget_waiting(self) -> None:
        """Have no visit wait: the sweep has ended."""
        self._is_due = True
        self._streamed.clear()
        self._resident.clear()
        for held in self._held.values():
            held.is_wanted = False

    # Decisions

    def _make_room(self) -> None:
        """Write what was filled first, until no more lies in buffers alone than may; visits rid others of it soon."""
        alone = [n for n, held in self._held.items() if held.is_newest and not (held.is_wanted or held.unwritten)]
        count = len(alone)
        for subgroup in alone:
            if count <= self._plan.staying_gradients:
                return
            if subgroup not in self._filling:
                count -= 1
                tile = self._leave(subgroup)
                if tile is not None:
                    self._full(tile)
                    return
