"""What a step costs in each format of state, all of it on a path: the disk, and one throttled to 1 GB/s each way.

One session of each format over the same parameters and gradients; they step in turn, another one first in each round,
and what is reported is the median of the ratios of rounds. Staging holds a quarter of the elements in each format.
`predicted` is what the session's model said before each step, over what the step took.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _common import Target, arguments, environment, progress, report
from paths import Throttles

import offload
from offload.formats import EXACT_ADAMW, STATE_FORMATS
from offload.predict import predict
from offload.rules import GroupScalars
from offload.session import setup
from offload.units import format_seconds

FORMATS = [*STATE_FORMATS]
GROUP = GroupScalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
TARGETS = {"disk": {"compact16": 1.35, "compact8": 1.9}, "1000 MB/s": {"compact16": 1.45, "compact8": 2.25}}
BYTES = {"compact16": 8.0, "compact8": 5.125}


def contest(folder: Path, pace: float, numel: int, subgroups: int, rounds: int) -> tuple[dict[str, Any], str]:
    """Step sessions of all formats in turn; return what was found and a digest of all weights."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).bfloat16()
    gradient = torch.randn(numel, generator=generator).bfloat16()
    parameter = offload.Parameter("p", numel, offload.DtypeCode.BFLOAT16, 0, shape=(numel // 1024, 1024))
    throttles = Throttles(folder, [pace] * len(FORMATS))
    times: dict[str, list[float]] = {form: [] for form in FORMATS}
    predicted: dict[str, list[float]] = {form: [] for form in FORMATS}
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(setup, "open_tier", throttles.open))
        engines, weights = {}, {form: start.clone() for form in FORMATS}
        for form, path in zip(FORMATS, throttles.rates, strict=True):
            item = EXACT_ADAMW.stored_in(STATE_FORMATS[form]).item_bytes
            config = offload.OffloadConfig(
                host_memory=0,
                paths=[path],
                state_format=form,
                subgroup_numel=numel // subgroups,
                staging_memory=int(1.01 * item * numel / 4),
            )
            engine = engines[form] = stack.enter_context(contextlib.closing(offload.Engine([parameter], config)))
            engine.bind_weight(0, weights[form].data_ptr())
            engine.gradients.bind(0, gradient.data_ptr(), offload.DtypeCode.BFLOAT16)
        for number in range(rounds + 3):
            first = number % len(FORMATS)
            for form in (*FORMATS[first:], *FORMATS[:first]):
                said = predict(engines[form].plan, engines[form].rates).step_s
                engines[form].step([GROUP])
                if number >= 3:  # rates and staging have settled
                    times[form].append(engines[form].metrics()["step_s"])
                    predicted[form].append(said)
            progress(f"{pace:g} MB/s: round {number + 1}/{rounds + 3}")
        digest = hashlib.sha256()
        for form in FORMATS:
            metrics = engines[form].metrics()
            moved = metrics["path/0/read_bytes"] + metrics["path/0/write_bytes"]
            found[form] = {
                "step_s": statistics.median(times[form]),
                "times_exact": statistics.median(a / b for a, b in zip(times["exact"], times[form], strict=True)),
                "predicted": statistics.median(p / t for p, t in zip(predicted[form], times[form], strict=True)),
                "state_bytes_each": metrics["state_bytes"] / numel,
                "moved_bytes_each": moved / numel,
            }
            digest.update(weights[form].view(torch.int16).numpy().tobytes())
    return found, digest.hexdigest()


def main() -> None:
    parser = arguments(__doc__, path=True)
    parser.add_argument("--numel", type=int, default=1 << 26, help="parameters")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    numel, subgroups, rounds = (1 << 19, 4, 2) if args.smoke else (args.numel, 16, args.rounds)
    described = environment()
    results: dict[str, Any] = {}
    digests = set()
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        for name, pace in (("disk", math.inf), ("1000 MB/s", 1000.0)):
            results[name], digest = contest(Path(folder), pace, numel, subgroups, rounds)
            digests.add(digest)
            for form, row in results[name].items():
                print(
                    f"{name}, {form}: {format_seconds(row['step_s'])}, {row['times_exact']:.2f} times as fast as "
                    f"exact, predicted {row['predicted']:.2f} of it, {row['state_bytes_each']:.3f} bytes a parameter"
                )
    if len(digests) != 1:
        raise SystemExit("the weights depend on the path")
    targets = [
        Target.at_least(f"{name}, {form}: step, times as fast as exact", results[name][form]["times_exact"], wanted)
        for name, forms in TARGETS.items()
        for form, wanted in forms.items()
    ]
    targets += [
        Target.at_most(f"{form}: bytes of state a parameter", results["disk"][form]["state_bytes_each"], wanted)
        for form, wanted in BYTES.items()
    ]
    report(args, described, results, digests.pop()[:16], targets)


if __name__ == "__main__":
    main()
