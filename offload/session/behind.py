"""A sweep that goes on behind whoever began it: what of it is over, and what has gone wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from offload import waits


class Behind:
    """A sweep that its caller does not wait for.

    The engine thread says which visits have ended; any thread waits for those that it needs. A wait may be
    interrupted: the sweep goes on.

    Args:
        kept: Memory that the sweep reads and writes: kept as long as it may.
        aborted: Makes the error to raise from what the sweep failed with.
        begun: Called on the engine thread when the sweep has begun, before its caller goes on.
        latch: Makes what is waited for; another one in simulation, where a wait is what drives the engine.
    """

    def __init__(
        self,
        kept: Sequence[torch.Tensor],
        aborted: Callable[[BaseException], BaseException],
        begun: Callable[[], None],
        latch: Callable[[], waits.Latch] = waits.Latch,
    ) -> None:
        self.kept = kept
        self._aborted = aborted
        self._begun: Callable[[], None] | None = begun
        self._latch = latch
        self._visits: Mapping[int, waits.Latch] = MappingProxyType({})
        self._over = latch()
        self.error: BaseException | None = None
        """What the sweep failed with, once it is over."""

    @property
    def is_over(self) -> bool:
        """Whether the sweep has ended, well or not: nothing reads gradients or writes weights any more."""
        return self._over.is_set()

    # On the engine thread

    def begin(self, subgroups: Iterable[int]) -> None:
        """Take note of what the sweep visits; its caller waits for that."""
        self._visits = {subgroup: self._latch() for subgroup in subgroups}
        begun, self._begun = self._begun, None  # which may hold the optimizer
        if begun is not None:
            begun()

    def ended(self, subgroups: Iterable[int]) -> None:
        """Let on who waits for some visits, which have ended."""
        for subgroup in subgroups:
            self._visits[subgroup].set()

    def end(self, error: BaseException | None) -> None:
        """Let on everybody: the sweep is over."""
        self.error = None if error is None else self._aborted(error)
        self._over.set()
        for latch in self._visits.values():
            if not latch.is_set():
                latch.set()

    # On any thread

    def wait_for(self, subgroups: Iterable[int]) -> None:
        """Wait until the visits of some subgroups have ended, or the sweep has failed."""
        for subgroup in subgroups:
            latch = self._visits.get(subgroup)
            if latch is not None and not latch.is_set():
                waits.wait_for(latch.wait, lambda: "")  # the executor says what for

    def wait(self) -> None:
        """Wait until the sweep is over."""
        if not self.is_over:
            waits.wait_for(self._over.wait, lambda: "")
