"""When taking turns on a path pays: one and two processes on one directory, with and without the lock.

Each process reads and writes tiles as a step does: as many reads as writes, several in flight, through the product's
own tier. In a round, every contender moves its bytes once; processes start together, and the throughput of a round
counts until the first of them is through, so that all of it was shared. A process's share is what it had moved by
then.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from _harness import Option, Run, digest, main, ratio, show, spawned, turns
from paths import Mixer, opened

from offload.tiers import Turns

DEPTH = 4
"""Requests of each direction in flight."""


def worker(pipe: Connection, path: str, tile_bytes: int, tiles: int, turn_bytes: int, depth: int | None) -> None:
    """Obey (locked, begin) with the times at which tiles were through, until None."""
    turns = [None, Turns(turn_bytes=turn_bytes)]
    with contextlib.ExitStack() as stack:
        mixers = [
            Mixer(*stack.enter_context(opened(path, turns=each, depth=depth)), tile_bytes, DEPTH, tiles)
            for each in turns
        ]
        pipe.send("ready")
        while (command := pipe.recv()) is not None:
            locked, begin_s = command
            time.sleep(max(0.0, begin_s - time.monotonic()))
            pipe.send(mixers[locked].run(tiles))
        arenas = [mixer.arena.tensor(0, mixer.arena.nbytes, torch.uint8) for mixer in mixers]
        pipe.send(digest(arenas))


def measure(run: Run) -> None:
    args, turn_bytes = run.args, 256 << 10 if run.smoke else run.args.turn_mib << 20
    tile_bytes, tiles, rounds = (64 << 10, 8, 2) if run.smoke else (4 << 20, 64, 9)
    names = {"1 free": (1, 0), "1 locked": (1, 1), "2 free": (2, 0), "2 locked": (2, 1)}
    results: dict[str, Any] = {name: {"bytes_per_s": [], "total_bytes_per_s": [], "ratio": []} for name in names}
    with spawned(worker, 2, str(run.folder), tile_bytes, tiles, turn_bytes, args.depth) as pipes:
        for pipe in pipes:
            pipe.recv()
        for number, name in turns(names, rounds, settling=1):
            count, locked = names[name]
            begin_s = time.monotonic() + 0.05
            for pipe in pipes[:count]:
                pipe.send((locked, begin_s))
            ends = [pipe.recv() for pipe in pipes[:count]]
            if number < 0:
                continue  # does not count: first touches of everything
            until_s = min(max(times) for times in ends)
            moved = [sum(end <= until_s for end in times) * tile_bytes for times in ends]
            total_s, total_bytes = max(max(times) for times in ends) - begin_s, sum(map(len, ends)) * tile_bytes
            results[name]["bytes_per_s"].append(sum(moved) / (until_s - begin_s))
            results[name]["total_bytes_per_s"].append(total_bytes / total_s)
            results[name]["ratio"].append(min(moved) / max(moved))
        for pipe in pipes:
            pipe.send(None)
        run.checksums += [pipe.recv() for pipe in pipes]
    print(f"{2 * tiles} tiles of {tile_bytes >> 10} KiB a process and round, half read, half written")
    for name, found in results.items():
        show(name, {each: statistics.median(values) for each, values in found.items()}, *found)

    def gain(count: int) -> float:
        locked, free = (results[f"{count} {kind}"]["total_bytes_per_s"] for kind in ("locked", "free"))
        return ratio(locked, free)

    run.results |= {"tile_bytes": tile_bytes, "tiles": 2 * tiles, "rounds": rounds, "turn_bytes": turn_bytes}
    run.results |= {"depth": args.depth, "contenders": results, "lock_gain_2": gain(2)}
    run.at_least("one process, locked / free", gain(1), 0.97)
    share = statistics.median(results["2 locked"]["ratio"])
    run.at_least("two processes, least share / largest share", share, 0.8)


OPTIONS = (
    Option("turn_mib", 64, help="bytes of a turn"),
    Option("depth", None, help="requests in flight of each direction; None for the tier's", more={"type": int}),
)

if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True)
