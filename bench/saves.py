"""What a save inside DeepSpeed costs training: written behind it, and waited for.

ZeRO-3 on one and on two ranks, with none, half and all of the optimizer state resident, in processes of their own,
and with both layouts: DeepSpeed's files, and "in_place". Rounds of iterations that begin with `save_checkpoint`
(`"checkpoint": {"wait": false}`) alternate with rounds of as many without. The stall is what a round with a save
takes longer than those before and after it, over an iteration. What the machine cannot do beside training is a
floor that is taken off: the bytes of a save over the disk's rate (that of a save that waits, in the same run), less
the time for which plain iterations leave the disk idle; or, where that is more, the time that the cores need for a
save that waits, less what plain iterations leave idle. Bytes and times of cores are the kernel's. A round is over
when its last iteration is; the tag is whole before the next one begins.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _common import computing, kernel_io, moved, progress
from _harness import Option, Row, Run, beyond_around, column, digest, in_process, main, show
from _worker import with_deepspeed, without_native_collectives

from offload.plan import Home

MOST_STALL = 0.05
OPTIONS = (
    Option("width", 2048, 64),
    Option("layers", 8, 2),
    Option("batch", 384, 4, "rows of an iteration of one rank"),
    Option("iterations", 10, 2, "of a round"),
    Option("rounds", 4, 1, "with a save"),
    Option("layouts", ["stock", "in_place"], ["in_place"], 'of `"checkpoint"`'),
    Option("worlds", [1, 2], [1], "numbers of ranks"),
    Option("shares", [0.0, 0.5, 1.0], [0.0], "of the state that are resident"),
)


def child(request: dict[str, Any]) -> dict[str, Any]:
    """Be one rank."""
    import deepspeed

    size, share, folder = SimpleNamespace(**request), request["share"], Path(request["folder"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    without_native_collectives()
    deepspeed.init_distributed(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, verbose=False
    )
    torch.manual_seed(0)
    layers = (torch.nn.Linear(size.width, size.width) for _ in range(size.layers))
    model = torch.nn.Sequential(*layers).bfloat16()
    numel = sum(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": size.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "multi_tier_offload": {
            "host_memory": int(12.5 * numel / world * share),
            "paths": [str(folder)],
            "checkpoint": {"wait": False, "layout": request["layout"]},
        },
    }
    engine = with_deepspeed(model, config)
    rows = torch.randn(size.batch, size.width, generator=torch.Generator().manual_seed(rank)).bfloat16()
    tags = str(folder / "tags")

    def iterate() -> None:
        with computing():
            engine.backward(engine(rows).float().square().mean())
        engine.step()

    def round_of(*, saves: bool) -> dict[str, Any]:
        before, busy_s, started_s = kernel_io(), time.process_time(), time.perf_counter()
        if saves:
            engine.save_checkpoint(tags, tag="behind")
        returned_s = time.perf_counter() - started_s
        for _ in range(size.iterations):
            iterate()
        seconds = time.perf_counter() - started_s
        engine.optimizer.wait_checkpoint()
        whole_s = time.perf_counter() - started_s
        os.sync()  # what the kernel writes later belongs to this round
        torch.distributed.barrier()
        return {
            "seconds": seconds,
            "busy_s": time.process_time() - busy_s,
            "returned_s": returned_s,
            "whole_s": whole_s,
            "bytes": sum(moved(before).values()),
        }

    for _ in range(2):
        round_of(saves=True)
    waits = []
    for _ in range(2):
        before, busy_s, started_s = kernel_io(), time.process_time(), time.perf_counter()
        type(engine).save_checkpoint(engine, tags, tag="waits", save_latest=False)
        os.sync()
        seconds, busy_s = time.perf_counter() - started_s, time.process_time() - busy_s
        waits.append({"seconds": seconds, "busy_s": busy_s, "bytes": sum(moved(before).values())})
    plain, saving = [round_of(saves=False)], []
    for _ in range(size.rounds):
        saving.append(round_of(saves=True))
        plain.append(round_of(saves=False))
    checksum, plan = digest(engine.optimizer.fp16_partitioned_groups_flat), engine.optimizer.plan.plan
    engine.destroy()
    torch.distributed.destroy_process_group()
    found = {"plain": plain, "saving": saving, "waits": waits, "state_bytes": plan.state_bytes}
    return {**found, "resident_bytes": plan.home_bytes[Home.HOST], "digest": checksum}


def start(options: Row, layout: str, world: int, share: float, folder: Path) -> list[dict[str, Any]]:
    """Run the ranks; return what each has found."""
    request = {**options, "layout": layout, "share": share, "folder": str(folder)}

    def of_rank(rank: int) -> dict[str, Any]:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        variables = {name: str(value) for name, value in places.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "PYTHONWARNINGS": "ignore"}
        return dict(in_process(__file__, request, **variables))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(of_rank, range(world)))


def summary(iterations: int, layout: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all ranks together say; rounds last as long as the first rank says, which waits for the others."""
    first = ranks[0]
    plain, saving = first["plain"], first["saving"]
    iteration_s = statistics.median(one["seconds"] for one in plain) / iterations
    longer_s = beyond_around(column(saving, "seconds"), column(plain, "seconds"))

    def of_all(kind: str, what: str) -> float:
        return sum(statistics.median(one[what] for one in rank[kind]) for rank in ranks)

    waits_s = statistics.median(one["seconds"] for one in first["waits"])
    rate = of_all("waits", "bytes") / waits_s or float("inf")
    round_s, cores = iterations * iteration_s, len(os.sched_getaffinity(0))
    beyond_bytes = max(0.0, of_all("saving", "bytes") - of_all("plain", "bytes"))
    floors_s = {"disk": beyond_bytes / rate - max(0.0, round_s - of_all("plain", "bytes") / rate), "cores": 0.0}
    if layout == "stock":
        idle_s = max(0.0, round_s * cores - of_all("plain", "busy_s"))
        floors_s["cores"] = (of_all("waits", "busy_s") - idle_s) / cores
    return {
        "iteration_s": iteration_s,
        "returned_s": statistics.median(one["returned_s"] for one in saving),
        "whole_s": statistics.median(one["whole_s"] for one in saving),
        "waits_s": waits_s,
        "bytes_per_s": rate,
        "bytes_of_a_save": beyond_bytes,
        "stall": longer_s / iteration_s,
        "floors": {name: max(0.0, seconds) / iteration_s for name, seconds in floors_s.items()},
        "floor": max(0.0, *floors_s.values()) / iteration_s,
        "waits": waits_s / iteration_s,
        "state_bytes": sum(rank["state_bytes"] for rank in ranks),
        "resident_bytes": sum(rank["resident_bytes"] for rank in ranks),
        "digests": [rank["digest"] for rank in ranks],
        "ranks": ranks,
    }


def measure(run: Run) -> None:
    args = run.args
    for world in args.worlds:
        digests = []
        for share, layout in itertools.product(args.shares, args.layouts):
            where = f"{layout}, {world} rank{'s' * (world > 1)}, {share:.0%} resident"
            progress(where)
            with run.brief_place() as folder:
                ranks = start(run.options, layout, world, share, folder)
            found = run.results[where] = summary(args.iterations, layout, ranks)
            digests.append(tuple(found["digests"]))
            show(where, found, "iteration_s", "stall", "floor", "returned_s", "whole_s", "waits_s", "waits")
            beyond = max(0.0, found["stall"] - found["floor"])
            run.at_most(f"stall beyond the floor over an iteration, {where}", beyond, MOST_STALL)
        run.checksums.append(run.same("the weights differ between resident shares", digests)[0])


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True, device="cpu", child=child)
