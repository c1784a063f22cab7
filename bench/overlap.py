"""What overlap hides: an iteration whose step goes on in forward, or is made in backward, beside one that waits.

One model trains in one process with all state on a path. Iterations alternate: one whose step is waited for; one that
begins while the step before goes on (`overlap_forward`); one whose updates were made during backward
(`overlap="backward"`); one with both; and one in the way that `overlap="auto"` has chosen among these before, which
should be the fastest. Bounds are of the same run, from T_f and T_b, the seconds of forward and backward, U, those of
the update in memory, C, the CPU that I/O costs over the cores, I, those in which the path reads or writes, and B, the
bytes of that by I:

* forward: T_b + max(T_f + U + C, I)
* backward: T_f + max(T_b + U + C, (2 S - F) / B), S being the state and F what is moved during forward
* both: max(T_f + T_b + U + C, 2 S / B)

It is measured at each number of tokens of `--tokens`, at that at which a step takes as long as forward, and at that
at which it takes as long as forward and backward; and in `compact8` at 512 tokens, where the question is how much
longer an iteration takes than forward and backward alone. The least is these and what the cores spend on the step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _auto import NEAR, settled
from _common import computing, cores
from _harness import Option, Run, digest, main, medians, ratio, show

import offload
from offload.cli.model import VOCABULARY, build_model, choose_shape
from offload.optim.hiding import MODES, AutoOverlap
from offload.optim.overlap import FollowedModel
from offload.schedule.timeline import Interval, covered_s

OPTIONS = (
    Option("numel", 60_000_000, 300_000, "parameters"),
    Option("tokens", [128], [16]),
    Option("pairs", 30, 1),
)
COUNTED = 4
NAMES = ("forward_s", "backward_s", "step_s")

UNCLIPPED = 1e9
"""A norm that no gradient has: steps that clip are not made during backward."""

KINDS = {"forward": (True, False), "backward": (False, True), "both": (True, True)}
"""What is hidden in forward and in backward."""

COMPACT = ("compact8", 512)
"""Format and tokens of the comparison with forward and backward alone."""


class Training:
    """A model on random tokens, and its optimizer.

    Args:
        numel: Parameters wanted.
        folder: Where state goes.
        form: Format of state.
        longest: Most tokens of an iteration.
        more: Other settings.
    """

    def __init__(self, numel: int, folder: Path, form: str, longest: int, **more: Any) -> None:
        shape = choose_shape(numel)
        self.model = build_model(shape, seq=longest, dtype=torch.bfloat16, device="cpu", seed=0)
        config = offload.OffloadConfig(host_memory=0, paths=[folder], state_format=form, **more)
        self.optimizer = offload.AdamW(self.model.named_parameters(), lr=1e-4, offload=config)
        self._generator = torch.Generator().manual_seed(0)

    def _moves(self) -> list[Interval]:
        """Return what the path did in the last step."""
        return [i for i in self.optimizer.engine.last_step.timeline if i.lane.startswith(("read:", "write:"))]

    def iteration(self, tokens: int) -> dict[str, float]:
        """Train once; return the seconds of each part."""
        batch = torch.randint(0, VOCABULARY, (1, tokens), generator=self._generator)
        began_s = time.monotonic()
        with computing():
            loss = self.model(input_ids=batch, labels=batch).loss
            forward_s = time.monotonic()
            loss.backward()
        backward_s = time.monotonic()
        used_s = time.process_time()
        self.optimizer.clip_grad_norm_(UNCLIPPED)
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks = (began_s, forward_s, backward_s, time.monotonic())
        found = dict(zip(NAMES, (b - a for a, b in pairwise(marks)), strict=True))
        return {**found, "step_cpu_s": time.process_time() - used_s}

    def waited(self, tokens: int) -> dict[str, float]:
        """Train once and wait for the step; return seconds, and what the bound is made of."""
        found = self.iteration(tokens)
        metrics = self.optimizer.metrics()
        found["update_s"] = metrics["lane/cpu/busy_s"]
        found["io_s"] = covered_s(self._moves())
        found["moved_bytes"] = sum(metrics[f"path/0/{verb}_bytes"] for verb in ("read", "write"))
        found["streamed_bytes"] = metrics["streamed_bytes"]
        found["io_cpu_s"] = max(found["step_cpu_s"] / cores() - found["update_s"], 0.0)
        hidden_s = found["forward_s"] + found["update_s"] + found["io_cpu_s"]
        found["bound_s"] = found["backward_s"] + max(hidden_s, found["io_s"])
        found["whole_s"] = sum(found[name] for name in NAMES)
        return found

    def chosen(self, tokens: int) -> AutoOverlap:
        """Train until "auto" has tried all ways and keeps one; return it."""
        auto = self.optimizer._auto = AutoOverlap(self.optimizer._overlap.pace)
        following = self.optimizer.overlap_forward(self.model)
        took_s = sum(self.iteration(tokens)[name] for name in NAMES)
        for _ in range(settled(took_s / 2)):  # as some ways are faster
            self.iteration(tokens)
            self.optimizer._choose_overlap()
        self._wait_from_now_on(following, tokens)
        return auto

    def _wait_from_now_on(self, following: FollowedModel | None, tokens: int) -> None:
        if following is not None:
            following.remove()
        self.optimizer.engine.speculate(False)
        # It lets steps go on where a model is given. Predictions are made from the optimizer's own pace.
        self.optimizer._auto = AutoOverlap(self.optimizer._overlap.pace)
        self.iteration(tokens)

    def overlapped(
        self, tokens: int, forward: bool, backward: bool, auto: AutoOverlap | None = None
    ) -> dict[str, float]:
        """Train some iterations whose steps are hidden; return the figures of some of them, one behind another."""
        self.optimizer._auto = auto or self.optimizer._auto
        following = self.optimizer.overlap_forward(self.model) if forward else None
        if backward:
            self.optimizer.engine.speculate(True)
        for _ in range(3):
            self.iteration(tokens)
        # Each leaves work to the next: one alone may be faster than any number of them.
        all_began_s = time.monotonic()
        rows = [self.iteration(tokens) for _ in range(COUNTED - 1)]
        predicted_s = self.optimizer.metrics().get("predicted_iteration_s", math.nan)
        began_s = time.monotonic()
        rows.append(self.iteration(tokens))
        whole_s = (time.monotonic() - all_began_s) / COUNTED
        arrives_s = began_s + rows[-1]["forward_s"]
        found = {**medians(rows), "whole_s": whole_s}
        found["predicted"] = predicted_s / found["whole_s"]
        self.optimizer.finish()  # what follows is about this step
        found["forward_bytes"] = sum(i.nbytes for i in self._moves() if began_s < i.finished_s <= arrives_s)
        found["confirmed_bytes"] = self.optimizer.metrics().get("speculation/confirmed_bytes", math.nan)
        self._wait_from_now_on(following, tokens)
        return found

    def turn(self, tokens: int, auto: AutoOverlap) -> dict[str, dict[str, float]]:
        """Return the seconds of an iteration of each kind."""
        found = {"waits": self.waited(tokens)}
        found |= {name: self.overlapped(tokens, *how) for name, how in KINDS.items()}
        found["auto"] = self.overlapped(tokens, True, MODES[auto.mode][1], auto)
        row = found["waits"]
        hidden_s = row["update_s"] + row["io_cpu_s"]
        rate = row["moved_bytes"] / row["io_s"] if row["io_s"] else math.inf  # staging slots hold all of it
        left_bytes = 2 * row["streamed_bytes"] - found["backward"]["forward_bytes"]
        busy_s = row["backward_s"] + hidden_s
        found["backward"]["bound_s"] = row["forward_s"] + max(busy_s, left_bytes / rate)
        found["both"]["bound_s"] = max(row["forward_s"] + busy_s, 2 * row["streamed_bytes"] / rate)
        found["forward"]["bound_s"] = row["bound_s"]
        found["auto"]["bound_s"] = found.get(auto.mode, row)["bound_s"]
        return found

    def even(self, tokens: int, most: int, names: Sequence[str]) -> int:
        """Return the tokens at which a step takes as long as some parts of an iteration, at most `most`."""
        for _ in range(5):  # these do not grow in proportion
            took = [self.waited(tokens) for _ in range(4)][1:]
            step_s, other_s = (
                statistics.median(sum(row[name] for name in parts) for row in took) for parts in (["step_s"], names)
            )
            tokens = min(max(round(tokens * step_s / other_s), 8), most)
        return tokens

    def digest(self) -> str:
        return digest(self.model.parameters())


def contest(training: Training, tokens: int, rounds: int) -> dict[str, Any]:
    """Return medians over rounds."""
    for _ in range(3):  # rates, staging and the allocator settle
        training.waited(tokens)
    auto = training.chosen(tokens)
    turns = [training.turn(tokens, auto) for _ in range(rounds)]
    found: dict[str, Any] = {"chosen": auto.mode}
    for name in turns[0]:
        waits, whole, bounds = (
            [turn[kind][what] for turn in turns]
            for kind, what in (("waits", "whole_s"), (name, "whole_s"), (name, "bound_s"))
        )
        found[name] = medians([turn[name] for turn in turns]) | {
            "times_as_fast": ratio(waits, whole),
            "limit": ratio(waits, bounds),
            "over_bound": ratio(whole, bounds),
        }
    took, *ways = ([turn[name]["whole_s"] for turn in turns] for name in ("auto", "waits", *KINDS))
    found["auto_over_best"] = max(ratio(took, way) for way in ways)
    return found


def measure(run: Run) -> None:
    args, results, longest = run.args, run.results, 64 if run.smoke else 8192
    training = Training(args.numel, run.folder, "exact", longest)
    with training.optimizer:
        names = [(str(number), number) for number in args.tokens]
        names.append(("as forward", training.even(args.tokens[0], longest, NAMES[:1])))
        names.append(("as both", training.even(args.tokens[0], longest, NAMES[:2])))
        for name, number in names:
            results[name] = {"tokens": number, **contest(training, number, args.pairs)}
            row = results[name]["waits"]
            show(f"{number} tokens", row, *NAMES)
            for kind in KINDS:
                show(f"hidden in {kind}", results[name][kind], "times_as_fast", "limit", "over_bound")
            show("auto", results[name], "chosen", "auto_over_best")
    run.checksums.append(training.digest())
    form, number = COMPACT
    compact = f"{form}, {number}"
    training = Training(args.numel, run.folder, form, longest)
    with training.optimizer:
        rounds = max(1, args.pairs // 3)
        found = results[compact] = {"tokens": number, **contest(training, min(number, longest), rounds)}
    row = found["waits"]
    alone_s = row["forward_s"] + row["backward_s"]
    found["over_alone"] = {kind: found[kind]["whole_s"] / alone_s for kind in (*KINDS, "waits")}
    found["least_over_alone"] = 1 + (row["update_s"] + row["io_cpu_s"]) / alone_s
    shown = found["over_alone"] | {"least": found["least_over_alone"]}
    show(f"{compact} tokens, over forward and backward alone", shown, *shown)
    for name, row in results.items():
        for kind in KINDS:
            run.at_most(f"{name}, hidden in {kind}: iteration over its bound", row[kind]["over_bound"], 1.1)
    for name, row in results.items():
        run.at_most(f"{name}: iteration with auto over the best way", row["auto_over_best"], NEAR)
    for name, row in results.items():
        run.at_most(f"{name}: predicted iteration, off by", abs(row["forward"]["predicted"] - 1), 0.1)
    for name, row in results.items():
        for kind in ("backward", "both"):
            share = row[kind]["confirmed_bytes"] / row["waits"]["streamed_bytes"]
            run.at_least(f"{name}, hidden in {kind}: share of the state made ahead", share, 0.7)
    over = found["over_alone"]["both"]
    run.at_most(f"{compact} tokens: iteration over forward and backward alone", over, 1.2)
    for name, kind, least in (("as forward", "forward", 1.2), ("as both", "backward", 1.3), ("as both", "both", 1.4)):
        faster = results[name][kind]["times_as_fast"]
        run.at_least(f"step as long {name}, hidden in {kind}: times as fast", faster, least)


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True, device="cpu")
