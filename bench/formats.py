"""What a step costs in each format of state, all of it on a path: the disk, and one throttled to 1 GB/s each way.

One session of each format over the same parameters and gradients; they step in turn, another one first in each round,
and what is reported is the median of the ratios of rounds. Staging holds a quarter of the elements in each format.
`predicted` is what the session's model said before each step, over what the step took.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _harness import Option, Row, Run, column, digest, main, medians, ratio, rows_of_rounds, show
from _sessions import GROUP, Throttles, quarter_staged

from offload import Engine
from offload.formats import STATE_FORMATS
from offload.predict import predict

FORMATS = [*STATE_FORMATS]
OPTIONS = (Option("numel", 1 << 26, 1 << 19, "parameters"), Option("rounds", 30, 2))
TARGETS = {"disk": {"compact16": 1.35, "compact8": 1.9}, "1000 MB/s": {"compact16": 1.45, "compact8": 2.25}}
BYTES = {"compact16": 8.0, "compact8": 5.125}


def contest(folder: Path, pace: float, numel: int, subgroups: int, rounds: int) -> tuple[dict[str, Any], str]:
    """Step sessions of all formats in turn; return what was found and a digest of all weights."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).bfloat16()
    gradient = torch.randn(numel, generator=generator).bfloat16()
    throttles = Throttles(folder, [pace] * len(FORMATS))
    with contextlib.ExitStack() as stack:
        stack.enter_context(throttles.opening())
        engines, weights = {}, {form: start.clone() for form in FORMATS}
        for form, path in zip(FORMATS, throttles.rates, strict=True):
            opened = quarter_staged(form, path, weights[form], gradient, subgroups)
            engines[form] = stack.enter_context(contextlib.closing(opened))

        def step(engine: Engine) -> Row:
            said_s = predict(engine.plan, engine.rates).step_s
            engine.step([GROUP])
            metrics = engine.metrics()
            step_s, state_bytes = metrics["step_s"], metrics["state_bytes"]
            return {"step_s": step_s, "predicted": said_s / step_s, "state_bytes_each": state_bytes / numel}

        steps = {form: partial(step, engine) for form, engine in engines.items()}
        rows = rows_of_rounds(steps, rounds, settling=3)  # rates and staging have settled by then
    found = {form: medians(each) for form, each in rows.items()}
    for form, each in rows.items():
        found[form]["times_exact"] = ratio(column(rows["exact"], "step_s"), column(each, "step_s"))
    return found, digest(weights.values())


def measure(run: Run) -> None:
    args, results, digests = run.args, run.results, []
    for name, pace in (("disk", math.inf), ("1000 MB/s", 1000.0)):
        results[name], found = contest(run.folder, pace, args.numel, 4 if run.smoke else 16, args.rounds)
        digests.append(found)
        for form, row in results[name].items():
            show(f"{name}, {form}", row, "step_s", "times_exact", "predicted", "state_bytes_each")
        for form, wanted in TARGETS[name].items():
            times = results[name][form]["times_exact"]
            run.at_least(f"{name}, {form}: step, times as fast as exact", times, wanted)
    for form, wanted in BYTES.items():
        run.at_most(f"{form}: bytes of state a parameter", results["disk"][form]["state_bytes_each"], wanted)
    run.checksums.append(run.same("the weights depend on the path", digests))


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True)
