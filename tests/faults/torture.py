"""Kills a training process with SIGKILL at random moments and resumes it, over and over.

    python tests/faults/torture.py --kills 200 --json FILE

Each life resumes from the last checkpoint (if there is one), with tiers, subgroups and folders of its own, verifies
every bit of weights and state against an unkilled run at that step, and trains on, saving all the time, until it is
killed: during start-up, resume, steps, checkpoints and commits. The last life is left alone and has to end where the
unkilled run ends.

    python tests/faults/torture.py --ranks 2 --kills 200 --json FILE

Each life is two processes, each with state of its own, that save together; one of them is killed. The other
one has to end, by an error that it raises or by itself, or to say within `QUIET_S` what it waits for.

With `--overlap` steps go on behind the process that is killed (`overlap_forward`), while it makes the next gradients
and until it saves; with `--overlap backward` they are made before it takes them; with `--overlap both`, both.
With `--overlap leaving` they go on behind, too, and gradients leave memory for the paths.

With `--parks` lives give memory back between steps, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from layers import Layer

import offload
from offload import waits
from offload.checkpoint import commit
from offload.checkpoint.contents import is_checkpoint, read_commit
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import decode, manifest_name
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.stores import find_stores

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from _common import environment

SIZES = (40_000, 7, 3000, 25_000)
MISMATCH = 3
BEHIND = mmap.mmap(-1, 2)
"""Not 0 while a rank of the life that goes on has a step behind it, not waited for, or one ahead that may be made."""


def make(
    rng: random.Random, paths: list[Path], rank: int = 0, *, hidden: str = ""
) -> tuple[torch.nn.ModuleList, Any]:
    generator = torch.Generator().manual_seed(rank)
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
    layers = torch.nn.ModuleList(
        Layer(torch.nn.Parameter(torch.randn(n, generator=generator).to(d)))
        for n, d in zip(SIZES, dtypes, strict=True)
    )
    config = offload.OffloadConfig(
        host_memory=rng.choice((0, 0, 300_000, 10**9)),
        paths=rng.choice((paths[:1], paths[1:], paths)),
        subgroup_numel=rng.choice((1024, 1024, 4096)),
        checkpoints_kept=rng.choice((1, 1, 2)),
        threads=1,
        overlap="backward" if hidden in ("backward", "both") else "off",
        gradient_memory=rng.choice((0, 60_000)) if hidden == "leaving" else None,
    )
    named = [(f"rank {rank}, {number}", parameter) for number, parameter in enumerate(layers.parameters())]
    optimizer = offload.AdamW(named, lr=1e-2, offload=config)
    if hidden in ("forward", "both", "leaving"):
        optimizer.overlap_forward(layers)
    return layers, optimizer


def update(layers: torch.nn.ModuleList, optimizer: Any, step: int, pause_s: float = 0.0, rank: int = 0) -> None:
    """Train one step, and rest between backward and step."""
    generator = torch.Generator().manual_seed(step)
    for number, layer in enumerate(layers):
        if (step + number) % 3:
            gradient = torch.randn(layer.weight.shape, generator=generator).add_(layer())
            (layer.weight * gradient.to(layer.weight.dtype)).sum().backward()
            del gradient  # what somebody holds is read before `step` returns
    if pause_s:
        BEHIND[rank] = any(layer.weight.grad is not None for layer in layers)
        time.sleep(pause_s)
    BEHIND[rank] = 0
    optimizer.clip_grad_norm_(1.0 if step % 5 == 0 else 1e6)
    optimizer.step()
    BEHIND[rank] = optimizer.engine.is_pending
    optimizer.zero_grad()


def fingerprint(layers: torch.nn.ModuleList, optimizer: Any) -> int:
    checksum = 0
    parameters = [*layers.parameters()]
    for parameter in parameters:
        for tensor in (parameter.detach(), *optimizer.state_for(parameter).values()):
            checksum = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    counts = [optimizer.engine.step_count(number) for number in range(len(parameters))]
    return zlib.crc32(repr(counts).encode(), checksum)


def reference(steps: int, rank: int = 0) -> list[int]:
    """Return the fingerprint before each step of an unkilled run, and after the last."""
    layers, optimizer = make(random.Random(0), [Path(tempfile.gettempdir())] * 1, rank)
    found = [fingerprint(layers, optimizer)]
    for step in range(steps):
        update(layers, optimizer, step)
        found.append(fingerprint(layers, optimizer))
    optimizer.close()
    return found


def folders(root: Path) -> list[Path]:
    return [root / "even", root / "odd"]


def newest(root: Path) -> tuple[int, Path] | None:
    """Return step and folder of the newest committed checkpoint.

    Of several ranks, one that was killed may have been about to release an older checkpoint that another one has
    released already: what is left of it is older than one that is whole.
    """
    found, parts = [], []
    for path in folders(root):
        if is_checkpoint(path):
            try:
                with Checkpoint(path) as checkpoint:
                    found.append((checkpoint.manifests[0].step, path))
            except offload.CheckpointError as error:
                content = (path / manifest_name(read_commit(open_folder(path)).id, 0)).read_bytes()
                parts.append((decode(content, str(path)).step, path, error))
    whole = max(found, default=None)
    for step, path, error in parts:
        assert step < (whole or (0,))[0], f"{path} of step {step}, the newest is {whole}: {error}"
    return whole


PEER_LOST = 5
BEGINS = "begins"
"""What a rank says when gloo has connected it, which takes minutes where the other one has been killed before."""
QUIET_S = 3.0
"""Stands for `offload.waits.QUIET_S`, and a tenth of it."""
RANKS_TIMEOUT_S = 6.0
"""Stands for `offload.checkpoint.commit.RANKS_TIMEOUT_S`: what `wait_checkpoint` waits for a rank that is dead."""
COLLECTIVE_S = 20.0
"""How long gloo waits for a peer: where that has just been killed in its start-up, nobody else tells."""


def live(
    root: Path, seed: int, rank: int, ranks: int, expected: list[int], until: int, hidden: str, parks: bool
) -> None:
    """One rank's part of a life; ends by itself only after `until` steps, or when another rank has gone."""
    torch.set_num_threads(1)
    rng, together, step = random.Random(seed), torch.distributed, 0

    def compare() -> None:
        if fingerprint(layers, optimizer) != expected[step]:
            print(f"life {seed}: rank {rank} is at step {step} with other bits", file=sys.stderr)
            os._exit(MISMATCH)

    if ranks > 1:
        logging.basicConfig(filename=root / f"log-{rank}", filemode="w", format="%(created)f %(message)s", force=True)
        waits.QUIET_S, commit.RANKS_TIMEOUT_S = QUIET_S, RANKS_TIMEOUT_S
    try:
        if ranks > 1:
            together.init_process_group(
                "gloo",
                init_method=f"file://{root}/rendezvous-{seed}",
                rank=rank,
                world_size=ranks,
                timeout=datetime.timedelta(seconds=COLLECTIVE_S),
            )
            logging.warning(BEGINS)
        layers, optimizer = make(rng, [root / "p0", root / "p1"], rank, hidden=hidden)
        with optimizer:
            latest = newest(root)
            if latest is not None:
                step = optimizer.load_checkpoint(latest[1])["step"]
                (root / "resumed").write_text(str(step))
                if any(kept.save_number is not None for kept in optimizer.engine._parts.saves.kept):
                    (root / "adopted").touch()
            compare()
            if ranks > 1:
                together.barrier()
            (root / "trains").touch()
            alternate = rng.random() < 0.5
            while step < until:
                pause_s = rng.choice((0.0, 0.02, 0.1)) if hidden not in ("", "forward") else 0.0
                update(layers, optimizer, step, pause_s, rank)
                step += 1
                if hidden in ("forward", "both", "leaving"):
                    time.sleep(rng.choice((0.0, 0.01, 0.05)))  # something else to do while the step goes on
                if ranks > 1:
                    together.all_reduce(torch.ones(1))
                if rng.random() < 0.6:
                    folder = folders(root)[step % 2 if alternate else 0]
                    BEHIND[rank] = 0
                    optimizer.save_checkpoint(folder, extra={"step": step}, copy=rng.random() < 0.2)
                    if rng.random() < 0.3:
                        optimizer.wait_checkpoint()
                if parks and rng.random() < 0.4:
                    optimizer.park(rng.choice((False, False, True)), wait=rng.random() < 0.5)
            compare()
    except (RuntimeError, offload.CheckpointError) as error:  # gloo's, or that of a commit that waited in vain
        if ranks == 1:
            raise
        logging.warning("ends: %r", error)
        os._exit(PEER_LOST)
    os._exit(0)


def silence(log: Path, since_s: float, until_s: float) -> float:
    """Return how long a survivor was silent after a time: until it said something, or ended."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    stamps = [(float(line.split()[0]), line) for line in lines if line[:1].isdigit()]
    begun_s = next((at for at, line in stamps if line.endswith(BEGINS)), until_s)
    since_s = max(since_s, begun_s)
    return min((at for at, _ in stamps if at > since_s), default=until_s) - since_s


def has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def begin(ranks: int, live: Callable[[int], None], what: str) -> list[int]:
    """Begin a life of so many ranks, each of which ends by itself; return their processes."""
    children = []
    for rank in range(ranks):
        child = os.fork()  # everything is loaded already, and no thread of ours runs
        if child == 0:
            try:
                live(rank)
            except BaseException as error:
                print(f"{what}, rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(4)
        children.append(child)
    return children


def codes_of(children: list[int]) -> list[int]:
    """Return how processes have ended, when they have."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def torture(kills: int, seed: int, steps: int, hidden: str, parks: bool, ranks: int) -> dict[str, Any]:
    """Kill one rank of each of `kills` lives; return figures.

    Raises:
        AssertionError: A life resumed with wrong bits, failed in another way, or was silent for too long.
    """
    torch.set_num_threads(1)
    rng = random.Random(seed)
    root = Path(tempfile.mkdtemp(prefix="torture-"))
    for name in ("p0", "p1"):
        (root / name).mkdir()
    print(f"{steps} steps that nobody kills, for their bits", flush=True)
    expected = [reference(steps, rank) for rank in range(ranks)]
    figures: Counter[str] = Counter()
    longest_s = slowest_s = 0.0
    started_s = time.monotonic()
    try:
        for life in range(kills + 1):
            last = life == kills
            for name in ("resumed", "adopted", "trains"):
                (root / name).unlink(missing_ok=True)
            latest = newest(root)
            step = latest[0] if latest else 0
            until = min(step + 20, steps) if last else steps
            BEHIND[:] = bytes(len(BEHIND))

            def one(rank: int, number: int = seed * 100_003 + life, until: int = until) -> None:
                live(root, number, rank, ranks, expected[rank], until, hidden, parks)

            children = begin(ranks, one, f"life {life}")
            victim, killed_s = rng.randrange(ranks), time.time()
            if not last:
                if rng.random() < 0.8:  # else at any time from the start on
                    while not (root / "trains").exists() and not any(map(has_ended, children)):
                        time.sleep(0.01)
                time.sleep(rng.choice((0.2, 1.0, 2.0, 3.0)) * rng.random())
                killed_s = time.time()
                os.kill(children[victim], signal.SIGKILL)
            codes = codes_of(children)
            if last:
                assert not any(codes), f"the last life ended with {codes}"
            else:
                assert codes[victim] in (-signal.SIGKILL, 0), f"life {life} (seed {seed}) ended with {codes}"
                for rank in {*range(ranks)} - {victim}:
                    assert codes[rank] in (0, PEER_LOST), f"life {life} (seed {seed}) ended with {codes}"
                    silence_s = silence(root / f"log-{rank}", killed_s, time.time())
                    longest_s, slowest_s = max(longest_s, silence_s), max(slowest_s, time.time() - killed_s)
                    assert silence_s < COLLECTIVE_S + QUIET_S, f"life {life}: silent for {silence_s:.1f} s"
            after = newest(root)
            assert after is not None or latest is None, "a committed checkpoint is gone"
            assert after is None or after[0] >= step, "the last checkpoint is older than it was"
            was_killed = codes[victim] != 0  # the others had come to the last step
            figures["kills"] += was_killed
            figures[f"kills of rank {victim}"] += was_killed
            figures["with a step not waited for"] += was_killed and BEHIND[victim]
            figures["resumed"] += (root / "resumed").exists()
            figures["went on in the same store"] += (root / "adopted").exists()
            figures["with progress"] += after is not None and after[0] > step
            if life % 10 == 9:
                print(f"{life + 1} lives, at step {after[0] if after else 0}", flush=True)
        places = [root / "p0", root / "p1", *(folder for folder in folders(root) if folder.is_dir())]
        left = [store for path in places for store in find_stores(str(path))]
        figures["final step"] = after[0] if after else 0
        figures["stores left"] = len(left)
        figures["bytes left"] = sum(store.nbytes for store in left)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {
        **figures,
        "longest silence of a survivor, s": round(longest_s, 1),
        "longest time from a kill to the survivor's end, s": round(slowest_s, 1),
        "seconds": round(time.monotonic() - started_s, 1),
    }


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what all campaigns are told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def report(campaign: Callable[[], dict[str, Any]], file: Path | None) -> None:
    """Print what comes of a campaign, and write it to a file."""
    described = environment()
    text = json.dumps({"environment": described, "results": campaign()}, indent=2)
    print(text)
    if file is not None:
        file.write_text(text + "\n")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--steps", type=int, default=12000, help="a life that comes this far ends by itself")
    parser.add_argument(
        "--overlap",
        nargs="?",
        default="",
        const="forward",
        choices=("forward", "backward", "both", "leaving"),
        help="hide steps; leaving: behind, with gradients on the paths",
    )
    parser.add_argument("--parks", action="store_true", help="give memory back between steps")
    told = parser.parse_args()
    report(lambda: torture(told.kills, told.seed, told.steps, told.overlap, told.parks, told.ranks), told.json)


if __name__ == "__main__":
    main()
