"""Kills ranks that save inside DeepSpeed at random moments, and goes on from what `latest` names.

    python tests/integrations/deepspeed_torture.py --kills 200 --json FILE

Each life loads the tag that `latest` names into new processes, compares every bit of weights, masters and moments
with what they were when it was saved, and the model's file with the model. Tags that were begun after that one are
refused, or whole. Then it trains, and saves after every step, behind training or not, until one of the processes is
killed, or all are. One that is left has to end, by an error that it raises, or to say what it waits for. Lives take
turns over both layouts and ZeRO 1, 2 and 3 in two ranks, and some of these in one. What has been done is in
`--folder`: with the same one, a campaign that was interrupted goes on.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from deepspeed_checks import wide
from deepspeed_runs import Case, deepspeed, state_of, train, training
from small import digest

import offload
from offload.integrations.deepspeed import behind, stream

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))
from torture import BEGINS, COLLECTIVE_S, MISMATCH, PEER_LOST, begin, codes_of, has_ended, options, report, silence

Way = tuple[str, int, int]
"""Layout, stage and number of ranks."""
WAYS = [("stock", 1, 1), ("in_place", 3, 1)]
WAYS += [(layout, stage, 2) for layout in ("stock", "in_place") for stage in (1, 2, 3)]
MOST_SILENT_S = 30.0
LAST_S = 5.0
"""Stands for `behind.LAST_S`: what the end of a rank waits for one that is dead."""


def write_slowly(write_state: Callable[..., None], *given: Any) -> None:
    """Stands for `stream.write_state`: kills come while files have holes where state belongs."""
    time.sleep(0.1)
    write_state(*given)


def live(root: Path, rank: int, way: Way, seed: int, steps: int) -> None:
    """One rank's part of a life; ends by itself only after `steps` steps, or when the other one has gone."""
    layout, stage, ranks = way
    torch.set_num_threads(1)
    logging.basicConfig(filename=root / f"log-{rank}", filemode="w", format="%(created)f %(message)s", force=True)
    logging.getLogger("offload").setLevel(logging.INFO)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    behind.LAST_S, rng = LAST_S, random.Random(seed)
    saving = {"wait": rng.random() < 0.3, "layout": layout}
    settings = {"checkpoint": saving, "checkpoints_kept": rng.choice((1, 1, 2))}
    stream.write_state = partial(write_slowly, stream.write_state)
    memory = {"host_memory": rng.choice((0, 0, 10**6)), "subgroup_numel": 4096}
    case = Case(stage, offload={"paths": [str(root)], **settings, **memory})
    try:
        deepspeed.init_distributed(
            "gloo",
            timeout=timedelta(seconds=COLLECTIVE_S),
            init_method=f"file://{root}/rendezvous",
            rank=rank,
            world_size=ranks,
            verbose=False,
        )
        with training(case, model=wide(100_000)) as engine:
            logging.warning(BEGINS)  # gloo has connected all, which takes minutes where one is killed before
            (root / "begins").touch()
            first = 0
            begun = sorted((t.name for t in tags(root) if int(t.name) > newest(root)), key=int, reverse=True)
            for tag in [*begun, *([None] if newest(root) else [])]:
                try:
                    path, client = engine.load_checkpoint(str(root / "tags"), tag=tag)
                except offload.CheckpointError as error:
                    if tag is None:
                        raise
                    logging.warning("refused: %s", error)
                    continue
                first = client["step"]
                if client["digest"] != digest(state_of(engine).values()) or str(first) != Path(path).parent.name:
                    logging.critical("%s is not what was saved", path)
                    os._exit(MISMATCH)
                break
            if first and stage < 3:
                saved = torch.load(path, weights_only=False)["module"]
                if any(not torch.equal(saved[name], t) for name, t in engine.module.state_dict().items()):
                    logging.critical("the model's file of %s has other weights", path)
                    os._exit(MISMATCH)
            (root / "trains").touch()
            for step in range(first, first + steps):
                train(engine, case, step, 1)
                client = {"step": step + 1, "digest": digest(state_of(engine).values())}
                engine.save_checkpoint(str(root / "tags"), tag=f"{step + 1}", client_state=client)
                if rng.random() < 0.2:
                    engine.optimizer.wait_checkpoint()
    except (RuntimeError, offload.OffloadError) as error:  # gloo's, or that of a commit that waited in vain
        logging.warning("ends: %r", error)
        os._exit(PEER_LOST)
    os._exit(0)


def newest(root: Path) -> int:
    latest = root / "tags" / "latest"
    return int(latest.read_text()) if latest.exists() else 0


def tags(root: Path) -> list[Path]:
    return [path for path in (root / "tags").glob("*") if path.name.isdecimal()]


def life(root: Path, way: Way, seed: int, *, kills: bool) -> dict[str, Any]:
    """Have one life, and kill a rank of it or all; return figures.

    Raises:
        AssertionError: It has loaded other bits, has lost a tag, has failed in another way, or was silent.
    """
    rng, before, (layout, stage, ranks) = random.Random(seed), newest(root), way
    for name in ("begins", "trains", "rendezvous"):
        (root / name).unlink(missing_ok=True)
    steps = 1_000_000 if kills else 3
    children = begin(ranks, lambda rank: live(root, rank, way, seed, steps), f"{way}, life {seed}")
    victims, killed_s = rng.choice([{0}] if ranks == 1 else [{0}, {1}, {0}, {1}, {0, 1}]), time.time()
    if kills:
        comes, writes = root / rng.choice(("begins", *9 * ["trains"])), rng.random() < 0.8
        while not comes.exists() and not any(map(has_ended, children)):
            time.sleep(0.01)
        time.sleep(rng.choice((0.5, 2.0)) * rng.random())
        if writes and comes.name == "trains":  # while a tag is
            there = len(tags(root))
            while len(tags(root)) == there and not any(map(has_ended, children)):
                time.sleep(0.001)
            time.sleep(0.2 * rng.random())
        killed_s = time.time()
        for victim in victims:
            os.kill(children[victim], signal.SIGKILL)
    codes = codes_of(children)
    logs = [(root / f"log-{rank}").read_text(errors="replace")[-2000:] for rank in range(ranks)]
    expected = [-signal.SIGKILL if rank in victims else PEER_LOST for rank in range(ranks)]
    assert codes == (expected if kills else [0] * ranks), f"{codes}: {logs}"
    left = {*range(ranks)} - victims if kills else ()
    silent_s = sum(silence(root / f"log-{rank}", killed_s, time.time()) for rank in left)
    assert silent_s < MOST_SILENT_S, f"silent for {silent_s:.1f} s: {logs}"
    after = newest(root)
    assert after >= before, f"latest named {before}, and names {after} now"
    under_way = any(int(tag.name) > after for tag in tags(root))
    for tag in tags(root):
        if int(tag.name) < after:
            shutil.rmtree(tag)
    return {
        "kills": int(kills),
        f"kills of {victims} in {ranks}": int(kills),
        f"kills with {layout}, ZeRO-{stage}": int(kills),
        "with a tag under way": int(under_way and kills),
        "loaded and compared": int(before > 0 and (root / "trains").exists()),
        "with progress": int(after > before),
        "silent_s": silent_s,
    }


def torture(folder: Path, kills: int, seed: int = 0, ways: list[Way] = WAYS) -> dict[str, Any]:
    """Have lives until so many ranks have been killed, and a last one of each way; return figures."""
    torch.set_num_threads(1)
    ours = ("offload.integrations.deepspeed.stage3", "offload.integrations.deepspeed.stage12")
    for name in ("torch._inductor.compile_fx", "deepspeed.runtime.zero.muon.original_muon", *ours):
        import_module(name)  # else each life would
    done = folder / "report.json"
    lives = json.loads(done.read_text()) if done.exists() else []
    for number in range(len(lives), kills + len(ways)):
        way = ways[number % len(ways)]
        root = folder / "{}-{}-{}".format(*way)
        root.mkdir(parents=True, exist_ok=True)
        lives.append(life(root, way, seed * 100_003 + number, kills=number < kills))
        done.write_text(json.dumps(lives))
        print(f"life {number}, {way}: at step {newest(root)}", flush=True)
    figures: Counter[str] = Counter()
    for found in lives:
        figures.update({name: count for name, count in found.items() if name != "silent_s"})
    return {**figures, "longest silence of a survivor, s": round(max(found["silent_s"] for found in lives), 1)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="where files go, and stay (default: a temporary one)")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torture-") as own:
        report(lambda: torture(told.folder or Path(own), told.kills, told.seed), told.json)


if __name__ == "__main__":
    main()
