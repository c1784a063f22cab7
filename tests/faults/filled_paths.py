"""Paths that somebody else fills at random moments cost versions made ahead, and never a step.

    python tests/faults/filled_paths.py --runs 200 --results filled.jsonl

Each run trains a small model with its state on one or two small tmpfs (and, for some, gradients, activations, and
checkpoints), with its steps hidden in one way or another. A file takes what is left of them, or gives it back, before
or amid a backward pass, or before or after a step. Whatever does so, from the first step's end on: the weights are
those of a run in memory, and only checkpoints raise anything. A campaign that was cut short goes on where it was:
runs that the file of results has are not made again. Needs root, to mount.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import offload

OVERLAPS = ("off", "forward", "backward", "both")
LAYERS, WIDTH, STEPS = 12, 64, 10
MOMENTS = ("before forward", "amid backward", "before step", "after step")


@contextlib.contextmanager
def mounted(folder: Path, count: int, nbytes: int) -> Iterator[list[Path]]:
    """File systems that share this many bytes.

    Raises:
        OSError: They cannot be mounted here.
    """
    with contextlib.ExitStack() as ends:
        places = [folder / f"p{number}" for number in range(count)]
        for place in places:
            place.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes // count // 4096 * 4}k", "tmpfs", str(place)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(done.stderr.strip())
            ends.callback(subprocess.run, ["umount", str(place)], check=True)
        yield places


class Filler:
    """Whoever else writes to the paths, as a seed says."""

    def __init__(self, rng: random.Random, places: list[Path]) -> None:
        self._rng, self._places = rng, places
        moments = [(step, moment) for step in range(STEPS) for moment in MOMENTS][3:]
        self._when = {when: rng.random() < 0.75 for when in rng.sample(moments, rng.randrange(1, 6))}

    def at(self, step: int, moment: str) -> None:
        fills = self._when.get((step, moment))
        for place in self._places if fills is not None else ():
            file = place / "filler"
            if not fills:
                file.unlink(missing_ok=True)
            elif self._rng.random() < 0.8:
                with open(file, "ab", buffering=0) as opened, contextlib.suppress(OSError):
                    while True:
                        opened.write(bytes(4096))


def train(config: Mapping[str, Any], seed: int = 0, places: list[Path] | None = None) -> tuple[Any, Counter[str]]:
    """Return weights after some steps, and what has happened."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    rng, found = random.Random(seed), Counter[str]()
    filler = Filler(rng, places or [])
    saves, activations = config.get("checkpoints_kept") and rng.random() < 0.7, rng.random() < 0.3
    at = [0]
    list(model.parameters())[LAYERS // 2].register_post_accumulate_grad_hook(
        lambda parameter: filler.at(at[0], "amid backward")
    )
    folder = Path(tempfile.mkdtemp(prefix="filled-"))
    with offload.AdamW(model.named_parameters(), lr=1e-2, offload=dict(config)) as optimizer:
        if config.get("overlap") in ("forward", "both"):
            optimizer.overlap_forward(model)
        for step in range(STEPS):
            at[0] = step
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(1024, WIDTH, generator=generator)
            filler.at(step, "before forward")
            with contextlib.ExitStack() as saved:
                if places and activations:
                    saved.enter_context(optimizer.activations_on_paths(model, host_memory=1 << 20, least_bytes=4096))
                model(inputs).square().mean().backward()
            filler.at(step, "before step")
            optimizer.step()
            optimizer.zero_grad()
            filler.at(step, "after step")
            metrics = optimizer.metrics()
            found["steps with versions made ahead"] += metrics.get("speculation/confirmed_bytes", 0) > 0
            found["steps with activations on paths"] += metrics.get("activations/written_bytes", 0) > 0
            if places and saves and step % 3 == 1:
                try:
                    optimizer.save_checkpoint(folder / "ck")
                    optimizer.wait_checkpoint()
                    found["saved"] += 1
                except offload.CheckpointError:
                    found["save refused"] += 1
        optimizer.finish()
        found["filled"] = sum((place / "filler").exists() for place in places or [])
    return [parameter.detach().clone() for parameter in model.parameters()], found


@cache
def expected(state_format: str) -> list[torch.Tensor]:
    weights: list[torch.Tensor] = train({"state_format": state_format})[0]
    return weights


def run(seed: int, folder: Path) -> Counter[str]:
    """Make one run below a folder; raise what may not be."""
    rng = random.Random(-1 - seed)
    overlap, paths = OVERLAPS[seed % 4], 1 + seed // 4 % 2
    state_format = rng.choice(("exact", "exact", "compact16", "compact8"))
    kept = int(rng.random() < 0.4)
    state_bytes = LAYERS * WIDTH * WIDTH * {"exact": 12, "compact16": 8, "compact8": 6}[state_format]
    config: dict[str, Any] = {
        "host_memory": 0,
        "overlap": overlap,
        "state_format": state_format,
        "subgroup_numel": WIDTH * WIDTH,
        "staging_memory": rng.choice((2, 4, 4)) * 13 * 4096,
        "checkpoints_kept": kept,
        "io_backend": rng.choice(("auto", "threads", "asyncio")),
        "threads": 1,
    }
    if overlap in ("off", "forward") and rng.random() < 0.3:
        config["gradient_memory"] = 20_000
    # The least that is demanded is state and versions in flight, with headers, and two checkpoints of it.
    nbytes = int(state_bytes * 1.5 * (rng.choice((1.7, 2.0, 2.5, 3.0)) + 3.5 * kept)) + (1 << 18)
    with mounted(folder, paths, nbytes) as places:
        weights, found = train({**config, "paths": [str(place) for place in places]}, seed, places)
    if not all(map(torch.equal, weights, expected(state_format))):
        raise AssertionError("the weights are other ones")
    found[overlap] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--results", type=Path, help="what each run has come to, one a line; those there are not made again"
    )
    args = parser.parse_args()
    logging.getLogger("offload").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    done: dict[int, dict[str, Any]] = {}
    if args.results is not None and args.results.exists():
        lines = args.results.read_text().splitlines()
        done = {line["seed"]: line for line in map(json.loads, lines)}
    for seed in range(args.seed, args.seed + args.runs):
        if seed in done:
            continue
        with tempfile.TemporaryDirectory(prefix="filled-paths-") as folder:
            try:
                line = {"seed": seed, "found": run(seed, Path(folder))}
            except (AssertionError, offload.OffloadError) as error:
                line = {"seed": seed, "found": {}, "error": f"{type(error).__name__}: {error}"}
                print(f"seed {seed}: {line['error']}", flush=True)
        done[seed] = line
        if args.results is not None:
            with open(args.results, "a") as file:
                file.write(json.dumps(line) + "\n")
    told: Counter[str] = sum((Counter(line["found"]) for line in done.values()), Counter())
    for what, count in sorted(told.items()):
        print(f"{count:6}  {what}")
    failed = sum("error" in line for line in done.values())
    print(f"{failed} of {len(done)} runs failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
