"""What overlap hides on several ranks: FSDP2, DDP and ZeRO-3, on gloo, with one disk for all.

For each kind the ranks train a model five times over in the same processes, in turns, on the same batches and with
all state on the path: with steps that are waited for, hidden in forward, in backward, in both, and with "auto", which
has tried all of these before the first turn, and should be beside the best of them. The number of tokens is that at
which a step that is waited for takes as long as forward and backward. A turn is some iterations that do not count and
some that follow each other and do, so that what a step leaves to the next iteration counts there; the slowest rank's
time is taken. All five have the same weights in the end, bit for bit, or this fails.

*simulated* is what the same predictions say of 13, 40 and 70 billion parameters on 8 ranks with an H100 each and the
drives of a published node, most of the state on these: beside max(forward and backward, bytes that are updated ahead
over rates).
"""

from __future__ import annotations

import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _auto import NEAR, settled, with_auto
from _common import computing, progress
from _harness import Option, Run, digest, main, medians, ratio, show
from _needs import DEEPSPEED
from _worker import SETTINGS, adamw_of, with_deepspeed
from torch import multiprocessing as mp

import offload
from offload.cli.machine import Machine
from offload.cli.model import VOCABULARY, build_model, choose_shape
from offload.cli.scenario import GRADIENT_BYTES, Scenario, ask
from offload.cli.shapes import Model
from offload.measure import find_rates

KINDS = ("fsdp2", "ddp", "zero3")
WAYS = ("off", "forward", "backward", "both")
OVERLAPS = (*WAYS, "auto")
MACHINE = "h100-node-nvme-pfs"
SIMULATED = ((13, 4096), (40, 4096), (40, 32_768), (70, 4096), (70, 32_768))
"""Of the simulation: billions of parameters, and tokens of a rank's batch."""
UNCLIPPED = 1e9
"""A norm that no gradient has: every step takes it."""
ZERO3 = {
    "gradient_clipping": UNCLIPPED,
    "optimizer": adamw_of(),
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        # A fraction of the model, as in models of the size that its defaults are made for.
        "reduce_bucket_size": 4_000_000,
        "stage3_prefetch_bucket_size": 4_000_000,
    },
}
SETTLING, COUNTED = 2, 3
"""Iterations of a turn."""


class Training:
    """One rank's part of a training.

    Args:
        kind: One of `KINDS`.
        overlap: Where its steps are hidden.
        numel: Parameters wanted.
        folder: Where state goes.
        longest: Most tokens of an iteration.
    """

    def __init__(self, kind: str, overlap: str, numel: int, folder: Path, longest: int) -> None:
        folder.mkdir(exist_ok=True)
        settings = {"host_memory": 0, "paths": [str(folder)], "overlap": overlap}
        self.model: Any = build_model(choose_shape(numel), seq=longest, dtype=torch.bfloat16, device="cpu", seed=0)
        self.called: Any = self.model
        self.optimizer: Any = None
        self._iterations = 0
        if kind == "zero3":
            self.called = with_deepspeed(self.model, {**ZERO3, "multi_tier_offload": settings})
            return
        if kind == "fsdp2":
            for module in self.model.modules():
                for layer in module if isinstance(module, torch.nn.ModuleList) else ():
                    torch.distributed.fsdp.fully_shard(layer)
            torch.distributed.fsdp.fully_shard(self.model)
        else:
            self.called = torch.nn.parallel.DistributedDataParallel(self.model)
        config = offload.OffloadConfig.from_dict({**settings, "shard": kind == "ddp"})
        self.optimizer = offload.AdamW(self.model.named_parameters(), **SETTINGS, offload=config)
        if kind == "ddp" and (config.overlaps_backward or overlap == "auto"):
            self.optimizer.overlap_backward(self.called)
        if config.overlaps_forward or overlap == "auto":
            self.optimizer.overlap_forward(self.called)

    def iteration(self, tokens: int) -> list[float]:
        """Train once; return the seconds of forward, backward and step."""
        self._iterations += 1
        generator = torch.Generator().manual_seed(1000 * self._iterations + dist.get_rank())
        batch = torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
        marks = [time.monotonic()]
        with computing():
            loss = self.called(input_ids=batch, labels=batch).loss
            marks.append(time.monotonic())
            if self.optimizer is None:
                self.called.backward(loss)
            else:
                loss.backward()
        marks.append(time.monotonic())
        if self.optimizer is not None:
            self.optimizer.clip_grad_norm_(UNCLIPPED)
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.called.step()
        marks.append(time.monotonic())
        return [after - before for before, after in pairwise(marks)]

    def turn(self, tokens: int) -> dict[str, float]:
        """Return the seconds of an iteration, and of its parts; with what was predicted, if it was."""
        for _ in range(SETTLING):
            self.iteration(tokens)
        dist.barrier()
        began_s = time.monotonic()
        rows = [self.iteration(tokens) for _ in range(COUNTED)]
        whole_s = torch.tensor((time.monotonic() - began_s) / COUNTED, dtype=torch.float64)
        dist.all_reduce(whole_s, op=dist.ReduceOp.MAX)
        parts = (statistics.mean(column) for column in zip(*rows, strict=True))
        found = dict(zip(("forward_s", "backward_s", "step_s"), parts, strict=True), whole_s=whole_s.item())
        if self.optimizer is not None:
            metrics = self.optimizer.metrics()
            found["predicted_s"] = metrics.get("predicted_iteration_s", float("nan"))
            confirmed_bytes = metrics.get("speculation/confirmed_bytes", 0.0)
            found["made_ahead"] = confirmed_bytes / metrics["streamed_bytes"]
        return found

    def digest(self) -> str:
        """Return a checksum of this rank's weights once all steps have ended."""
        if self.optimizer is not None:
            self.optimizer.finish()
            tensors = [getattr(p.data, "_local_tensor", p.data) for p in self.model.parameters()]
        else:
            self.called.optimizer.finish()
            tensors = [parameter.ds_tensor for parameter in self.model.parameters()]
        return digest(tensors)

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.close()
        else:
            self.called.destroy()


def even(training: Training, tokens: int, most: int) -> tuple[int, float]:
    """Return the tokens at which a step that is waited for is as long as both passes, and the seconds of all."""
    for _ in range(5):  # these do not grow in proportion
        found = training.turn(tokens)
        chosen = round(tokens * found["step_s"] / (found["forward_s"] + found["backward_s"]))
        told = torch.tensor(min(max(chosen, 8), most))
        dist.broadcast(told, 0)
        tokens = int(told.item())
    return tokens, found["whole_s"]


def train(rank: int, ranks: int, kind: str, folder: Path, sizes: dict[str, int], results: Any) -> None:
    """What each rank does for one kind; the first one puts what was found into `results`."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    os.environ |= {"LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    numel, longest = sizes["numel"], sizes["longest"]
    first = Training(kind, "off", numel, folder / "even", longest)
    tokens, took_s = even(first, sizes["tokens"], longest)
    first.close()
    trainings = {overlap: Training(kind, overlap, numel, folder / overlap, longest) for overlap in OVERLAPS}
    for each in trainings.values():  # "auto" has to have chosen, and all train as many steps
        for _ in range(settled(max(took_s / 2, sizes["shortest_s"]))):
            each.iteration(tokens)
    turns: dict[str, list[dict[str, float]]] = {overlap: [] for overlap in OVERLAPS}
    for number in range(sizes["rounds"]):
        for overlap, each in trainings.items():
            turns[overlap].append(each.turn(tokens))
        if rank == 0:
            progress(f"{kind}, round {number + 1} of {sizes['rounds']}")
    digests = {overlap: each.digest() for overlap, each in trainings.items()}
    for each in trainings.values():
        each.close()
    if rank == 0:
        found: dict[str, Any] = {"tokens": tokens, "digests": digests}
        for overlap, rows in turns.items():
            found[overlap] = medians(rows)
            waits, took = ([row["whole_s"] for row in each] for each in (turns["off"], rows))
            found[overlap]["times_as_fast"] = ratio(waits, took)
        auto, *ways = ([row["whole_s"] for row in turns[overlap]] for overlap in ("auto", *WAYS))
        found["auto_over_best"] = max(ratio(auto, way) for way in ways)
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def simulated(billions: int, tokens: int) -> dict[str, float]:
    """Return seconds of an iteration on a published node, by where its step is hidden, and the least it can take."""
    rates = find_rates(MACHINE).rates
    model = Model(params=billions * 10**9, weights_on="gpu", tokens=tokens)
    answer = ask(Scenario.of(model, Machine(rates=rates, ranks=8, gpus=8), host_memory=4 << 30))
    if answer.forward_s is None or answer.backward_s is None:
        raise RuntimeError(f"nothing is known of forward and backward on {MACHINE}")
    compute_s = answer.forward_s + answer.backward_s
    ahead = answer.plan.with_updates_in_backward(GRADIENT_BYTES)
    nbytes = sum(s.state_bytes for s in ahead.updated_in_backward)
    paths = answer.rates.paths
    rate = min(sum(path.read_bytes_per_s for path in paths), sum(path.write_bytes_per_s for path in paths))
    ways = with_auto({"off": compute_s + answer.step_s, **answer.overlapped_s})
    return {**ways, "least": max(compute_s, nbytes / rate)}


def measure(run: Run) -> None:
    args, results = run.args, run.results
    sizes = {"numel": args.numel, "tokens": args.tokens, "rounds": args.rounds, "longest": 64 if run.smoke else 4096}
    sizes["shortest_s"] = 1 if run.smoke else 0  # of an iteration: the shorter, the more "auto" has to see
    kinds = [kind for kind in args.kinds if kind not in run.missing]
    for kind in kinds:
        queue = mp.get_context("spawn").SimpleQueue()
        with run.brief_place() as folder:
            given = (args.ranks, kind, folder, sizes, queue)
            mp.start_processes(train, args=given, nprocs=args.ranks, start_method="spawn")
            found = results[kind] = queue.get()
        run.checksums.append(run.same(f"{kind}: weights differ", found["digests"].values()))
        off = found["off"]
        show(f"{kind}, {found['tokens']} tokens", off, "forward_s", "backward_s", "step_s")
        for overlap in OVERLAPS[1:]:
            show(f"hidden in {overlap}", found[overlap], "whole_s", "times_as_fast")
        best = max(found[overlap]["times_as_fast"] for overlap in WAYS[1:])
        run.at_least(f"{kind}: the best, times as fast as steps that are waited for", best, 1.25)
        run.at_most(f"{kind}: an iteration with auto over the best way", found["auto_over_best"], NEAR)
        for overlap in WAYS[1:] if "predicted_s" in off else ():
            off_by = abs(found[overlap]["predicted_s"] / found[overlap]["whole_s"] - 1)
            run.at_most(f"{kind}, hidden in {overlap}: predicted iteration, off by", off_by, 0.1)
    results["simulated"] = {}
    for billions, tokens in SIMULATED[:1] if run.smoke else SIMULATED:
        name = f"{billions}B on 8 ranks, {tokens} tokens each"
        found = results["simulated"][name] = simulated(billions, tokens)
        show(f"simulated, {MACHINE}, {name}", found, *OVERLAPS, "least", "both_over_single")
        run.at_most(f"simulated, {name}: an iteration with auto over the best way", found["auto_over_best"], NEAR)
        run.at_most(
            f"simulated, {name}, hidden in both: iteration over its bound", found["both"] / found["least"], 1.1
        )


OPTIONS = (
    Option("ranks", 2),
    Option("numel", 60_000_000, 300_000, "parameters"),
    Option("tokens", 128, 16, "of the first iteration"),
    Option("rounds", 9, 1),
    Option("kinds", [*KINDS], [KINDS[0]], more={"choices": KINDS}),
)

if __name__ == "__main__":
    main(
        __doc__,
        measure,
        options=OPTIONS,
        path=True,
        device="cpu",
        needs=lambda args: {"zero3": (DEEPSPEED,)} if "zero3" in args.kinds else {},
    )
