"""What a step of torch's optimizer classes and of Muon costs with nothing resident, beside the class in memory.

The same fp32 weights and gradients, made twice: the class updates one set in memory, and the same class, wrapped, the
other, with all state on a path and subgroups of the default size. They step in turn; medians of rounds. Its bound is
the larger of what the class itself took in that round, and what the step reads and writes over the path's rate both
ways at once. `predicted` is what the session's model said before a step, over what the step took.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from _common import progress
from _harness import Option, Row, Run, digest, main, medians, show
from torch import optim

import offload
from offload.predict import predict

CLASSES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adagrad": (optim.Adagrad, {}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "ASGD": (optim.ASGD, {}),
    "Rprop": (optim.Rprop, {}),
    "Adafactor": (optim.Adafactor, {}),
    "Adam, amsgrad": (optim.Adam, {"amsgrad": True}),
    "AdamW": (optim.AdamW, {}),
}
MUON = "Muon"
WARM = 3
OPTIONS = (
    Option("count", 64, 3, "matrices"),
    Option("width", 1024, 32, "their rows and columns"),
    Option("rounds", 9, 1),
)


def contest(name: str, folder: Path, count: int, width: int, rounds: int) -> dict[str, Any]:
    """Step a class in memory and on a path in turn; return what was found."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(width, width, generator=generator) for _ in range(count)]
    own, ours = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    for one, other in zip(own, ours, strict=True):
        one.grad = torch.randn(width, width, generator=generator)
        other.grad = one.grad.clone()
    named = [(f"layer{number}.weight", weight) for number, weight in enumerate(ours)]
    places = {"host_memory": 0, "paths": [folder], "checkpoints_kept": 0}
    beside: Any
    optimizer: Any
    if name == MUON:
        beside, optimizer = optim.Muon(own, lr=1e-2), offload.Muon(named, lr=1e-2, offload=places)
    else:
        kind, settings = CLASSES[name]
        beside, optimizer = kind(own, **settings), offload.wrap(kind, named, **settings, offload=places)
    found: list[Row] = []
    with optimizer:
        for number in range(rounds + WARM):
            progress(f"{name} {number + 1}/{rounds + WARM}")
            began_s = time.perf_counter()
            beside.step()
            own_s = time.perf_counter() - began_s
            said_s = predict(optimizer.engine.plan, optimizer.engine.rates).step_s
            began_s = time.perf_counter()
            optimizer.step()
            step_s = time.perf_counter() - began_s
            if number < WARM:  # rates have settled by then
                continue
            metrics, rates = optimizer.metrics(), optimizer.engine.rates.paths[0]
            read, written = metrics["path/0/read_bytes"], metrics["path/0/write_bytes"]
            bound_s = max(own_s, (read + written) / 2 / rates.each_way_bytes_per_s)
            row = {"own_s": own_s, "step_s": step_s, "bound_s": bound_s}
            found.append(row | {"over_bound": step_s / bound_s, "predicted": said_s / step_s})
        same = all(map(torch.equal, own, ours))
        state_bytes = optimizer.metrics()["state_bytes"] / sum(weight.numel() for weight in ours)
    return {**medians(found), "same": same, "digest": digest(ours), "state_bytes_each": state_bytes}


def measure(run: Run) -> None:
    args, results = run.args, run.results
    for name in (*CLASSES, MUON):
        row = results[name] = contest(name, run.place(), args.count, args.width, args.rounds)
        show(name, row, "step_s", "over_bound", "own_s", "predicted")
        run.at_most(f"{name}: step over its bound", row["over_bound"], 1.2)
        run.checksums.append(row["digest"])
    if not all(row["same"] for row in results.values()):
        raise SystemExit("weights are not those of the class in memory")
    run.at_most(f"{MUON}: distance of a step's prediction", abs(1 - results[MUON]["predicted"]), 0.10)


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True)
