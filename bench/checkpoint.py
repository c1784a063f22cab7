"""What a checkpoint costs: how long training stalls for it, and how many bytes it writes.

A model is trained with none, half and all of its optimizer state resident. Every few iterations a checkpoint is
started. Its stall is the time that the call takes, and what the iterations until its commit take longer than the
median of those without one. It cannot be less than what of the resident bytes, at the rate at which they were
written, exceeds forward and backward: that floor is taken off. Bytes are those written beyond what steps write
anyway, as a share of the state. `torch.save` of the same state's `state_dict()` stands beside it, file synced.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _common import Target, arguments, environment, progress, report

import offload

MOST_STALL = 0.05


def written_bytes(timeline: list[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for interval in timeline:
        found[interval.lane.partition(":")[0]] += interval.nbytes
    return found


def save_rate(timeline: list[Any]) -> float:
    """Return bytes a second at which a checkpoint was written, from its first tile to its last."""
    saves = [interval for interval in timeline if interval.lane.startswith("save")]
    if not saves:
        return 0.0
    span_s = max(i.finished_s for i in saves) - min(i.started_s for i in saves)
    return sum(i.nbytes for i in saves) / span_s if span_s else 0.0


def measure(width: int, layers: int, batch: int, share: float, rounds: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).bfloat16()
    numel = sum(parameter.numel() for parameter in model.parameters())
    path = folder / "path"
    path.mkdir()
    config = offload.OffloadConfig(host_memory=int(12.5 * numel * share), paths=[path])
    plain: list[tuple[float, float]] = []  # seconds of iterations without a checkpoint, and of their step
    stalls: list[float] = []
    floors: list[float] = []
    handovers: list[float] = []
    extra_bytes: list[int] = []
    with offload.AdamW(model.parameters(), lr=1e-4, offload=config) as optimizer:
        plan = optimizer.plan.plan

        def iterate(number: int) -> tuple[float, float, Counter[str], list[Any]]:
            torch.manual_seed(number)
            started_s = time.perf_counter()
            model(torch.randn(batch, width).bfloat16()).float().square().mean().backward()
            before = list(optimizer.timeline())  # of the step before, and since
            stepped_s = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            ended_s = time.perf_counter()
            return ended_s - started_s, ended_s - stepped_s, written_bytes(before), before

        number = 0
        for _ in range(3):
            iterate(number)
            number += 1
        usual: Counter[str] = Counter()
        for turn in range(rounds):
            for _ in range(3):
                iteration_s, step_s, usual, _ = iterate(number)
                plain.append((iteration_s, step_s))
                number += 1
            done = threading.Event()
            started_s = time.perf_counter()
            optimizer.save_checkpoint(folder / "ck", on_done=lambda error, done=done: done.set())
            handovers.append(time.perf_counter() - started_s)
            seconds, moved, lanes = [], 0, []
            while True:
                iteration_s, step_s, written, timeline = iterate(number)
                number += 1
                seconds.append(iteration_s)
                moved += written["write"] + written["save"] - usual["write"]
                lanes += timeline
                if done.is_set():
                    break
            optimizer.wait_checkpoint()
            usual_s = statistics.median(whole for whole, _ in plain)
            forward_backward_s = statistics.median(whole - step for whole, step in plain)
            stalls.append((handovers[-1] + sum(seconds) - len(seconds) * usual_s) / usual_s)
            rate = save_rate(lanes)
            floors.append(max(0.0, plan.resident_bytes / rate - forward_backward_s) / usual_s if rate else 0.0)
            extra_bytes.append(moved)
            progress(f"  checkpoint {turn + 1}: stall {stalls[-1]:.2f}, floor {floors[-1]:.2f} of an iteration")
        while number < rounds * 10:  # the same work, whenever checkpoints were through
            iterate(number)
            number += 1
        state = optimizer.state_dict()
        started_s = time.perf_counter()
        with open(folder / "torch.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        torch_save_s = time.perf_counter() - started_s
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().view(torch.int16).numpy().tobytes())
        usual_s = statistics.median(whole for whole, _ in plain)
        return {
            "parameters": numel,
            "state_bytes": plan.state_bytes,
            "resident_bytes": plan.resident_bytes,
            "staging_bytes": plan.staging_bytes,
            "iteration_s": usual_s,
            "forward_backward_s": statistics.median(whole - step for whole, step in plain),
            "handover_s": statistics.median(handovers),
            "stall": statistics.median(stalls),
            "floor": statistics.median(floors),
            "stalls": stalls,
            "floors": floors,
            "bytes_over_state": statistics.median(extra_bytes) / plan.state_bytes,
            "bytes_over_memory": statistics.median(extra_bytes) / (plan.resident_bytes + plan.staging_bytes),
            "torch_save": torch_save_s / usual_s,
            "checksum": digest.hexdigest()[:16],
        }


def main() -> None:
    args = arguments(__doc__, path=True).parse_args()
    described = environment()
    width, layers, batch, rounds = (512, 3, 8, 1) if args.smoke else (2048, 12, 512, 3)
    results: dict[str, Any] = {}
    targets = []
    for share in (0.0, 0.5, 1.0):
        progress(f"resident share {share:.0%}")
        with tempfile.TemporaryDirectory(dir=args.path) as folder:
            found = measure(width, layers, batch, share, rounds, Path(folder))
        results[f"{share:.0%}"] = found
        beyond = max(0.0, found["stall"] - found["floor"])
        print(
            f"{share:.0%} resident: stall {found['stall']:.3f} of an iteration ({found['floor']:.3f} unavoidable, "
            f"hand-over {found['handover_s'] * 1e3:.1f} ms), {found['bytes_over_state']:.3f} of the state written; "
            f"torch.save takes {found['torch_save']:.2f} iterations"
        )
        where = f"{share:.0%} resident"
        targets.append(Target.at_most(f"stall beyond the floor over an iteration, {where}", beyond, MOST_STALL))
        over = found["bytes_over_memory"]
        targets.append(Target.at_most(f"bytes written over bytes in memory, {where}", over, 1.01))
    if len({found["checksum"] for found in results.values()}) != 1:
        raise SystemExit(f"the weights differ between resident shares: {results}")
    report(args, described, results, results["0%"]["checksum"], targets)


if __name__ == "__main__":
    main()
