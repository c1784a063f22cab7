"""Kills Megatron-Core trainings of two ranks at random moments of their saves, and goes on from what is whole.

    python tests/integrations/megatron_kills.py --out FILE [--doors NAMES] [--count N] [--seed N] [--keep FOLDER]

A seed is one run in one of our layouts (`stock` in Megatron's format `dp_reshardable`), with weights cut over ranks
or not. It saves after random steps, behind training or not, and keeps all checkpoints or two. One rank or both are
killed while they save; what a rank has forked to write ends with it or goes on. The run then goes on from the
newest checkpoint that has Megatron's mark, is killed again, and trains to its end at last. What was saved has to
stay, and weights, state and losses have to be those of a run that nobody disturbs. Outcomes are in the file as they
come; called again with it, seeds that went well are left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import folder_kills
import torch
from folder_kills import Session
from megatron_saving import whole_in

PROGRAM = Path(__file__).with_name("megatron_saving.py")
LAYOUTS = ("in_place", "stock")
RANKS, STEPS, KILLS = 2, 30, 5
NEXT_STEPS = 5
"""Behind the newest checkpoint, in which a run saves and is killed."""


class Run:
    """One run, which is killed and goes on.

    Attributes:
        figures: What was met.
        took_s: The longest save so far, in seconds.
    """

    def __init__(self, root: Path, whole: Session | None, rng: random.Random, **case: Any) -> None:
        self.root, self.whole, self.rng, self.case = root, whole, rng, case
        self.folder, self.starts = root / "run", 0
        self.figures: Counter[str] = Counter()
        self.took_s = 0.5
        self._dead: list[int] = []

    @property
    def there(self) -> dict[int, Path]:
        return whole_in(self.folder / "checkpoints")

    def session(self, saves: dict[int, bool], dies: dict[str, Any] | None = None, rank: int | None = 0) -> Session:
        """Start the run, or go on with it."""
        there = self.there
        at = max(there, default=0)
        plan = {**self.case, "saves": saves, "keep": self.rng.choice((0, 2)), "load": str(there[at]) if at else ""}
        (self.folder / "paths").mkdir(parents=True, exist_ok=True)
        self.starts += 1
        arguments = [str(PROGRAM), str(self.folder), str(STEPS), json.dumps(plan)]
        session = folder_kills.start(arguments, self.root / f"start-{self.starts}", RANKS, 0.0, dies, rank)
        first = set(session.find("first"))
        assert first <= {at}, f"it began with {first}, and {[*there]} are whole: {session.errors[-3000:]}"
        self.took_s = max([self.took_s, *session.find("took_s")])
        return session

    def die(self) -> None:
        """Have one rank or both killed while they save."""
        at = max(self.there, default=0)
        drawn = self.rng.sample(range(at + 1, at + 1 + NEXT_STEPS), 3)
        saves = {step: self.rng.random() < 0.5 for step in sorted(drawn)}
        dies_at = self.rng.choice([*saves])
        delay_s, rank = self.rng.random() * 1.2 * self.took_s, self.rng.choice((0, 1, None))
        session = self.session(saves, {"signal": "SIGKILL", "steps": dies_at, "delay_s": delay_s}, rank)
        assert session.find("signal"), f"no signal was sent: {session.codes} {session.errors[-3000:]}"
        self._dead += session.find("pid")
        if self.rng.random() < 0.5:
            self.end_forks()
        there, saved = max(self.there, default=0), max(session.find("saved"), default=0)
        assert there >= max(at, saved), f"{at} was whole, {saved} was saved, and {there} is the newest"
        begun = (self.folder / "checkpoints" / f"iter_{dies_at:07}").exists()
        self.figures["killed with a save begun and not whole"] += begun and there < dies_at
        self.figures["killed with it whole"] += there >= dies_at
        self.figures["killed behind training" if saves[dies_at] else "killed in a save that is waited for"] += 1
        self.figures["both killed" if rank is None else "one killed"] += 1

    def end_forks(self) -> None:
        """End what dead ranks have forked: writers, and the process with Megatron's queue, which never ends."""
        for pid in self._dead:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
                self.figures["forks left"] += 1
        self._dead.clear()

    def end(self) -> Session:
        """Train to the end; weights, state and losses have to be those of the undisturbed run."""
        at = max(self.there, default=0)
        drawn = [step for step in range(at + 1, STEPS) if self.whole is not None and self.rng.random() < 0.2]
        last = {step: self.rng.random() < 0.5 for step in drawn}
        session = self.session(last)
        assert session.codes == [0] * RANKS, f"it ended by {session.codes}: {session.errors[-5000:]}"
        assert {*last} <= {*session.find("saved")}, f"of the saves {last} only {session.find('saved')} have ended"
        if self.whole is not None:
            for said, expected in zip(by_rank(session), by_rank(self.whole), strict=True):
                assert said["losses"] == expected["losses"][at:], f"other losses from step {at} on"
                assert said["weights"] == expected["weights"], f"other weights or state, from step {at} on"
        return session


def by_rank(session: Session) -> list[dict[str, Any]]:
    return sorted(session.said, key=lambda said: int(said["rank"]))


def run_seed(name: str, seed: int, root: Path, wholes: dict[Any, Session], kills: int = KILLS) -> Counter[str]:
    """Kill one run several times, and have it end.

    Args:
        name: The layout.
        seed: Of what is random.
        root: An empty folder.
        wholes: Undisturbed runs, by the number of ranks that weights are cut over; more are added.
        kills: How many.

    Raises:
        AssertionError: Something is not as it has to be.
    """
    rng = random.Random(f"{name} {seed}")
    cut = rng.choice((1, RANKS))
    if cut not in wholes:
        wholes[cut] = Run(root / f"undisturbed-{cut}", None, random.Random(0), tp=cut).end()
    run = Run(root / "killed", wholes[cut], rng, tp=cut, layout=name)
    try:
        for _ in range(kills):
            run.die()
        run.end()
    finally:
        run.end_forks()
    run.figures["kills"] = kills
    return run.figures


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(folder_kills.run_seeds(__doc__, LAYOUTS, run_seed))
