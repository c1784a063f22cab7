"""What it costs that gradients leave for the disk: an iteration with none in memory beside one with all.

Two models alike train in one process, with all state on a path, in turns: gradients of one stay in memory, those of
the other leave as they arrive (`gradient_memory=0`). Norms are taken in every step. The bound of an iteration is of
the same round: T_f + max(T_b, W / r) + max(U + C, (S + W) / r), from the seconds of forward, backward, the update U
and the CPU C that I/O costs, with gradients in memory; W is what leaves in backward, and comes back in the step, S
what is moved of state, and r the bytes a second that the path reaches in steps. Predicted is the plan's: backward, or
the writing of gradients, and the step.
"""

from __future__ import annotations

import statistics
from typing import Any

from _harness import Option, Run, main, medians, show
from overlap import NAMES, Training

OPTIONS = (
    Option("numel", 60_000_000, 1_200_000, "parameters"),
    Option("tokens", [128, 1024], [16]),
    Option("pairs", 15, 2),
)
KINDS: dict[str, int | None] = {"memory": None, "paths": 0}


class Leaving(Training):
    """A model of which some gradients leave."""

    def waited(self, tokens: int) -> dict[str, float]:
        predicted = self.optimizer.metrics()
        found = super().waited(tokens)
        moves = (i for i in self._moves() if i.label.startswith("gradients of"))
        found["gradient_bytes"] = float(sum(i.nbytes for i in moves))
        found["predicted_step_s"] = predicted["predicted_step_s"]
        found["predicted_gradients_s"] = predicted.get("predicted_gradients_s", 0.0)
        return found


def bound_s(memory: dict[str, float], paths: dict[str, float]) -> float:
    """Return the least seconds of an iteration whose gradients leave."""
    rate = memory["moved_bytes"] / memory["io_s"]
    left_s = paths["gradient_bytes"] / 2 / rate
    step_s = max(memory["update_s"] + memory["io_cpu_s"], memory["io_s"] + left_s)
    return memory["forward_s"] + max(memory["backward_s"], left_s) + step_s


def predicted_s(memory: dict[str, float], paths: dict[str, float]) -> float:
    backward_s = max(memory["backward_s"], paths["predicted_gradients_s"])
    return memory["forward_s"] + backward_s + paths["predicted_step_s"]


def contest(trainings: dict[str, Leaving], tokens: int, rounds: int) -> dict[str, Any]:
    """Return medians over rounds."""
    for _ in range(3):  # rates, staging and the allocator settle
        for training in trainings.values():
            training.waited(tokens)
    turns = [{name: training.waited(tokens) for name, training in trainings.items()} for _ in range(rounds)]
    found: dict[str, Any] = {name: medians([turn[name] for turn in turns]) for name in KINDS}
    pairs = [(turn["memory"], turn["paths"]) for turn in turns]
    found["over_memory"] = statistics.median(paths["whole_s"] / memory["whole_s"] for memory, paths in pairs)
    found["over_bound"] = statistics.median(paths["whole_s"] / bound_s(memory, paths) for memory, paths in pairs)
    found["predicted"] = statistics.median(predicted_s(memory, paths) / paths["whole_s"] for memory, paths in pairs)
    return found


def measure(run: Run) -> None:
    args, same = run.args, True
    for form in ("exact", "compact8"):
        trainings = {
            name: Leaving(args.numel, run.place(name), form, max(args.tokens), gradient_memory=memory)
            for name, memory in KINDS.items()
        }
        for number in args.tokens:
            name = f"{form}, {number} tokens"
            row = run.results[name] = contest(trainings, number, args.pairs)
            show(name, row | row["paths"], *NAMES, "over_memory", "over_bound", "predicted")
        digests = {training.digest() for training in trainings.values()}
        same = same and len(digests) == 1
        run.checksums.append(min(digests))
        for training in trainings.values():
            training.optimizer.close()
    for name, row in run.results.items():
        run.at_most(f"{name}: iteration over its bound", row["over_bound"], 1.1)
    for name, row in run.results.items():
        run.at_most(f"{name}: predicted iteration, off by", abs(row["predicted"] - 1), 0.1)
    run.at_least("weights with gradients in memory and on the path, bit for bit", float(same), 1.0)


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True, device="cpu")
