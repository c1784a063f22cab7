"""What a checkpoint costs: how long training stalls for it, and how many bytes it writes.

A model is trained with none, half and all of its optimizer state resident. Rounds of iterations with a checkpoint
alternate with rounds of as many without, so that whatever else the machine does falls on both alike. The stall is the
time of the call that starts a checkpoint, what each iteration takes longer than the same one of the rounds before and
after, and what the last update before it takes longer than that before a round without, as medians over all rounds;
its parts (hand-over, forward and backward, update, preparation) are reported. It cannot be less than what of the
resident bytes, at the rate at which they were written in this run, exceeds forward and backward: that floor is taken
off. Bytes are those written beyond what rounds without a checkpoint write, as a share of those in memory.

Then there is a checkpoint after every iteration: what an iteration takes in such rounds, over one in rounds without
between them, or over the resident bytes at the rate at which they were written, where that is more. Beside it, for
state that is in memory, stand `torch.save` with its file synced and `torch.distributed.checkpoint.async_save` after
every iteration of the same loop, of tensors as large as the state.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _common import computing, progress
from _harness import Option, Run, beyond_around, digest, main, show

import offload
from offload.plan import Home

MOST_STALL = {0.0: 0.03, 0.5: 0.05, 1.0: 0.10}
"""By the share of state in memory."""
ROUND = 4
"""Iterations of a round: more than a checkpoint takes."""

MOST_EVERY = {0.0: 1.03, 1.0: 1.10}
"""An iteration with a checkpoint after each, by the share of state in memory; see above."""

WARM_UP = 3
"""Checkpoints that are not measured: the first ones make the slots that later ones use again."""

LEAST_ROUNDS = 5
ROUNDS_S = 75.0
"""A resident share is measured for so long, or for as many rounds as its size says, whichever is less."""

OPTIONS = (
    Option("width", 2048, 512),
    Option("layers", 12, 3),
    Option("batch", 1536, 8, "rows of an iteration"),
    Option("rounds", 15, 2, "most checkpoints that are measured"),
)


@dataclass
class Round:
    """What a round took, iteration by iteration."""

    handover_s: float = 0.0
    forward_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    lanes: list[Any] = field(default_factory=list)
    first_update_s: float = 0.0
    commit_s: float = 0.0
    iterations_to_commit: int = 0

    def nbytes(self, *verbs: str) -> int:
        return sum(interval.nbytes for interval in self.lanes if interval.lane.partition(":")[0] in verbs)

    def save_bytes_per_s(self) -> float | None:
        """Return the rate at which the checkpoint was written while no update ran beside it."""
        done = [i for i in self.lanes if i.lane.startswith("save") and i.finished_s <= self.first_update_s]
        if not done:
            return None
        span_s = max(i.finished_s for i in done) - min(i.started_s for i in done)
        return sum(i.nbytes for i in done) / span_s


class Training:
    """A model whose iterations are timed."""

    def __init__(self, size: Any, share: float, folder: Path) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(size.width, size.width) for _ in range(size.layers))
        self.model = torch.nn.Sequential(*layers).bfloat16()
        self.batch = torch.randn(size.batch, size.width).bfloat16()
        self.numel = sum(parameter.numel() for parameter in self.model.parameters())
        path = folder / "path"
        path.mkdir()
        config = offload.OffloadConfig(host_memory=int(12.5 * self.numel * share), paths=[path])
        self.optimizer = offload.AdamW(self.model.parameters(), lr=1e-4, offload=config)
        self.folder = folder

    def round(self, *, saves: bool) -> Round:
        """Train for a round, with a checkpoint or without one."""
        found = Round()
        done = threading.Event()
        began_s = time.perf_counter()
        if saves:

            def on_done(error: BaseException | None) -> None:
                found.commit_s = time.perf_counter() - began_s
                done.set()

            self.optimizer.save_checkpoint(self.folder / "ck", on_done=on_done)
            found.handover_s = time.perf_counter() - began_s
        for _ in range(ROUND):
            started_s = time.perf_counter()
            with computing():
                self.model(self.batch).float().square().mean().backward()
            updated_s = time.perf_counter()
            found.lanes += self.optimizer.timeline()  # of the update before, and since
            found.first_update_s = found.first_update_s or updated_s
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.forward_s.append(updated_s - started_s)
            found.update_s.append(time.perf_counter() - updated_s)
            found.iterations_to_commit += saves and not done.is_set()
        found.lanes += self.optimizer.timeline()
        # What began before the round is the last one's, and what the last step has done was listed twice.
        found.lanes = list(dict.fromkeys(i for i in found.lanes if i.started_s >= began_s))
        if saves:
            self.optimizer.wait_checkpoint()
        return found

    def torch_save(self, state: Any) -> None:
        with open(self.folder / "torch.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def every(self, save: Callable[[], object] | None) -> float:
        """Return what an iteration takes when each has a checkpoint after it."""
        started_s = time.perf_counter()
        for _ in range(ROUND):
            with computing():
                self.model(self.batch).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if save is not None:
                save()
        return (time.perf_counter() - started_s) / ROUND

    def ways(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """Return ways of saving: ours, and others' of as many bytes in memory if the state is there.

        With each comes what waits for what it has under way.
        """
        found: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "offload": (lambda: self.optimizer.save_checkpoint(self.folder / "ck"), self.optimizer.wait_checkpoint)
        }
        plan = self.optimizer.plan.plan
        if plan.home_bytes[Home.HOST] < plan.state_bytes:
            return found
        state = {
            f"{number}": torch.ones(plan.state_bytes // 4 // 48, dtype=torch.float32, device="cpu")
            for number in range(48)
        }
        pending: list[Any] = []

        def wait_async() -> None:
            while pending:
                pending.pop().result()

        def async_save() -> None:
            wait_async()  # it takes one at a time
            writer = dcp.FileSystemWriter(self.folder / "dcp", overwrite=True)
            pending.append(dcp.async_save(state, storage_writer=writer))

        return {
            **found,
            "torch.save": (lambda: self.torch_save(state), lambda: None),
            "torch.distributed.checkpoint.async_save": (async_save, wait_async),
        }


def every_iteration(training: Training, rounds: int) -> dict[str, Any]:
    """Return what an iteration takes with a checkpoint after each, by who makes it."""
    ways = training.ways()
    plain: list[float] = [training.every(None)]
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (save, wait) in ways.items():
            taken[name].append(training.every(save))
            wait()  # the plain iterations that follow are to have nothing beside them
            plain.append(training.every(None))
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return {"iteration_s": statistics.median(plain), "every_s": medians, "plain_s": plain, "rounds_s": taken}


def measured(size: Any, share: float, folder: Path) -> dict[str, Any]:
    training = Training(size, share, folder)
    with training.optimizer as optimizer:
        plan = optimizer.plan.plan
        for _ in range(WARM_UP):
            training.round(saves=True)
        checksum = digest(training.model.parameters())  # of as many iterations whatever the share
        plain: list[Round] = [training.round(saves=False)]
        saving: list[Round] = []
        until_s = time.perf_counter() + ROUNDS_S
        while len(saving) < size.rounds and (len(saving) < LEAST_ROUNDS or time.perf_counter() < until_s):
            saving.append(training.round(saves=True))
            plain.append(training.round(saves=False))
            progress(f"  checkpoint {len(saving)} of {size.rounds}")
        progress("  a checkpoint after every iteration")
        every = every_iteration(training, min(size.rounds, LEAST_ROUNDS))
    forward_s = statistics.median(s for one in plain for s in one.forward_s)
    update_s = statistics.median(s for one in plain for s in one.update_s)
    usual_s = forward_s + update_s
    rates = [rate for one in saving if (rate := one.save_bytes_per_s())]
    rate = statistics.median(rates) if rates else None
    floor_s = max(0.0, plan.home_bytes[Home.HOST] / rate - forward_s) if rate else 0.0
    # The iteration after the commit too: it may pay for what the checkpoint has left.
    iterations = min(ROUND, max(one.iterations_to_commit for one in saving) + 1)
    # Where everything is in memory, all of it is written for each checkpoint.
    bound_s = max(every["iteration_s"], plan.home_bytes[Home.HOST] / rate if rate else 0.0)
    every["over_bound"] = every["every_s"]["offload"] / bound_s

    def longer_s(kind: str, number: int) -> float:
        """Return what an iteration of a round takes longer where a checkpoint is made."""
        return beyond_around(*([getattr(one, kind)[number] for one in rounds] for rounds in (saving, plain)))

    parts = {
        "handover": statistics.median(one.handover_s for one in saving),
        "forward_backward": sum(longer_s("forward_s", n) for n in range(iterations)),
        "update": sum(longer_s("update_s", n) for n in range(iterations)),
        # Where the next checkpoint is expected, the update before it makes checksums.
        "preparation": -longer_s("update_s", -1),
    }
    moved = [statistics.median(one.nbytes("write", "save", "copy") for one in rounds) for rounds in (saving, plain)]
    return {
        "parameters": training.numel,
        "state_bytes": plan.state_bytes,
        "resident_bytes": plan.home_bytes[Home.HOST],
        "staging_bytes": plan.staging_bytes,
        "iteration_s": usual_s,
        "forward_backward_s": forward_s,
        "save_bytes_per_s": rate,
        "commit_s": statistics.median(one.commit_s for one in saving),
        "iterations": iterations,
        "stall": sum(parts.values()) / usual_s,
        "stall_parts": {name: seconds / usual_s for name, seconds in parts.items()},
        "floor": floor_s / usual_s,
        "bytes_over_memory": (moved[0] - moved[1]) / (plan.home_bytes[Home.HOST] + plan.staging_bytes),
        "checkpoints": len(saving),
        "every": every,
        "checksum": checksum,
    }


def measure(run: Run) -> None:
    for share in (0.0, 0.5, 1.0):
        where = f"{share:.0%} resident"
        progress(where)
        with run.brief_place() as folder:
            found = run.results[f"{share:.0%}"] = measured(run.args, share, folder)
        show(where, found, "iteration_s", "stall", "floor")
        show("  of the stall", found["stall_parts"], *found["stall_parts"])
        beyond = max(0.0, found["stall"] - found["floor"])
        run.at_most(f"stall beyond the floor over an iteration, {where}", beyond, MOST_STALL[share])
        if share in MOST_EVERY:
            every = found["every"]
            times = {name: took_s / every["iteration_s"] for name, took_s in every["every_s"].items()}
            show("  a checkpoint after every iteration, of an iteration without", times, *times)
            name = f"an iteration with a checkpoint after each over its bound, {where}"
            run.at_most(name, every["over_bound"], MOST_EVERY[share])
        run.at_most(f"bytes written over bytes in memory, {where}", found["bytes_over_memory"], 1.01)
    checksums = (found["checksum"] for found in run.results.values())
    run.checksums.append(run.same("the weights differ between resident shares", checksums))


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True, device="cpu")
