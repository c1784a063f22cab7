"""What `overlap_forward` hides: an iteration whose step goes on into the next forward pass, beside one that waits.

One model trains in one process with all state on a path. Pairs of iterations alternate: one whose step is waited for,
and one that begins while the step before goes on. The bound of the second is T_b + max(T_f + U + C, I), all of the
same run: T_f and T_b the seconds of forward and backward, U those of the update in memory, C the CPU that I/O costs
over the cores, I those in which the path reads or writes.

It is measured at each number of tokens of `--tokens`, and at that at which a step takes as long as forward.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _common import Target, arguments, cores, environment, progress, report

import offload
from offload.cli.model import VOCABULARY, build_model, choose_shape

NAMES = ("forward_s", "backward_s", "step_s")


def covered_s(optimizer: Any) -> float:
    """Return the seconds of the last step in which a path read or wrote."""
    busy = sorted((i.started_s, i.finished_s) for i in optimizer.timeline() if i.lane.startswith(("read:", "write:")))
    total_s = until_s = 0.0
    for started_s, finished_s in busy:
        total_s += max(finished_s - max(started_s, until_s), 0.0)
        until_s = max(until_s, finished_s)
    return total_s


class Training:
    """A model on random tokens, and its optimizer.

    Args:
        numel: Parameters wanted.
        folder: Where state goes.
        form: Format of state.
        longest: Most tokens of an iteration.
    """

    def __init__(self, numel: int, folder: Path, form: str, longest: int) -> None:
        shape = choose_shape(numel)
        self.model = build_model(shape, seq=longest, dtype=torch.bfloat16, device="cpu", seed=0)
        config = offload.OffloadConfig(host_memory=0, paths=[folder], state_format=form)
        self.optimizer = offload.AdamW(self.model.parameters(), lr=1e-4, offload=config)
        self._generator = torch.Generator().manual_seed(0)

    def iteration(self, tokens: int) -> dict[str, float]:
        """Train once; return the seconds of each part."""
        batch = torch.randint(0, VOCABULARY, (1, tokens), generator=self._generator)
        began_s = time.monotonic()
        loss = self.model(input_ids=batch, labels=batch).loss
        forward_s = time.monotonic()
        loss.backward()
        backward_s = time.monotonic()
        used_s = time.process_time()
        self.optimizer.clip_grad_norm_(1.0)
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
        found["io_s"] = covered_s(self.optimizer)
        found["io_cpu_s"] = max(found["step_cpu_s"] / cores() - found["update_s"], 0.0)
        hidden_s = found["forward_s"] + found["update_s"] + found["io_cpu_s"]
        found["bound_s"] = found["backward_s"] + max(hidden_s, found["io_s"])
        found["whole_s"] = sum(found[name] for name in NAMES)
        return found

    def pair(self, tokens: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of an iteration that waits for its step, and of one into whose forward one goes on."""
        waited = self.waited(tokens)
        following = self.optimizer.overlap_forward(self.model)
        self.iteration(tokens)
        self.iteration(tokens)
        predicted_s = self.optimizer.metrics().get("predicted_iteration_s", math.nan)
        self.iteration(tokens)
        going_on = self.iteration(tokens)
        going_on["whole_s"] = sum(going_on[name] for name in NAMES)
        going_on["predicted"] = predicted_s / going_on["whole_s"]
        following.remove()
        return waited, going_on

    def even(self, tokens: int, most: int) -> int:
        """Return the tokens at which a step takes as long as forward, looked for from `tokens`, at most `most`."""
        for _ in range(5):  # seconds of forward do not grow in proportion
            took = [self.waited(tokens) for _ in range(4)][1:]
            step_s, forward_s = (statistics.median(row[name] for row in took) for name in ("step_s", "forward_s"))
            tokens = min(max(round(tokens * step_s / forward_s), 8), most)
        return tokens

    def digest(self) -> str:
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(parameter.detach().view(torch.int16).numpy().tobytes())
        return found.hexdigest()[:16]


def contest(training: Training, tokens: int, pairs: int) -> dict[str, Any]:
    """Return medians over pairs."""
    for _ in range(3):  # rates, staging and the allocator settle
        training.waited(tokens)
    waited, going_on = zip(*(training.pair(tokens) for _ in range(pairs)), strict=True)
    rows = {"waits": waited, "goes_on": going_on}
    found: dict[str, Any] = {
        name: {key: statistics.median(row[key] for row in of) for key in of[0]} for name, of in rows.items()
    }
    both = list(zip(waited, going_on, strict=True))
    found["times_as_fast"] = statistics.median(a["whole_s"] / b["whole_s"] for a, b in both)
    found["predicted"] = found["goes_on"]["predicted"]
    found["over_bound"] = statistics.median(b["whole_s"] / a["bound_s"] for a, b in both)
    found["limit"] = statistics.median(a["whole_s"] / a["bound_s"] for a in waited)
    found["hidden"] = statistics.median((a["whole_s"] - b["whole_s"]) / a["step_s"] for a, b in both)
    return found


def main() -> None:
    parser = arguments(__doc__, path=True)
    parser.add_argument("--numel", type=int, default=60_000_000, help="parameters")
    parser.add_argument("--tokens", type=int, nargs="*", default=[128])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--format", default="exact", help="of state")
    args = parser.parse_args()
    numel, pairs, tokens = (300_000, 2, [16]) if args.smoke else (args.numel, args.pairs, args.tokens)
    described = environment()
    results: dict[str, Any] = {}
    longest = 64 if args.smoke else 8192
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        training = Training(numel, Path(folder), args.format, longest)
        with training.optimizer:
            names = [*((str(number), number) for number in tokens), ("even", training.even(tokens[0], longest))]
            for name, number in names:
                results[name] = {"tokens": number, **contest(training, number, pairs)}
                row = results[name]
                print(
                    f"{number} tokens: forward {row['waits']['forward_s']:.2f} s, "
                    f"backward {row['waits']['backward_s']:.2f} s, step {row['waits']['step_s']:.2f} s; going on "
                    f"{row['times_as_fast']:.3f} times as fast (at most {row['limit']:.3f}), "
                    f"{row['over_bound']:.3f} of the bound, "
                    f"{row['hidden']:.0%} of the step hidden"
                )
                progress(f"{number} tokens")
        digest = training.digest()
    rows = results.items()
    targets = [Target.at_most(f"{name}: iteration over its bound", row["over_bound"], 1.1) for name, row in rows]
    targets += [
        Target.at_most(f"{name}: predicted iteration, off by", abs(row["predicted"] - 1), 0.1) for name, row in rows
    ]
    targets.append(Target.at_least("step as long as forward: times as fast", results["even"]["times_as_fast"], 1.2))
    report(args, described, results, digest, targets)


if __name__ == "__main__":
    main()
