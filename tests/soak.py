"""One training that does for hours whatever random programs do, and whether memory, threads and files stay as few.

    python tests/soak.py --folder DIR --seconds 7200 [--seed 1]

The actions are those of `programs`, drawn one after another, beside the plain loop that says what weights and state
have to be. Every `EVERY` actions settings are the plainest, all state is compared, and what the process has is noted
in DIR/soak.json: its memory, its descriptors and threads, the files and bytes of paths, checkpoints and mirror. A
later call goes on from the last checkpoint, in a new process. Folders of older checkpoints are deleted, as by a user.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import leftovers
import programs
import psutil

import offload

EVERY = 200
"""How many actions lie between two looks."""
LEFT = {"add"}
"""What is not done: a model that grows needs more."""
ONCE = 5
"""The first looks, which may find less than later ones: caches fill."""


def make_actions(seed: int, settings: dict[str, Any], count: int) -> list[tuple[str, Any]]:
    """Draw what is done between two looks: iterations, and all else among them."""
    rng = random.Random(seed)
    kinds = [what for what in programs.OTHERS if what not in LEFT]
    actions: list[tuple[str, Any]] = []
    while len(actions) < count:
        what = rng.choice(kinds) if rng.random() < 0.5 else "step"
        if what == "step":
            actions.append(("pass", programs.make_value(rng, "pass", settings)))
        if what == "lose":
            actions.append(("save", (False, False)))
        actions.append((what, programs.make_value(rng, what, settings)))
    return actions


def delete_older(session: programs.Session) -> None:
    """Delete what was saved before the last checkpoint, as a user would."""
    kept = session.saved.more["folder"].name
    for folder in (session.folder, session.folder / "mirror"):
        for each in folder.glob("save*"):
            if each.name != kept:
                offload.release_before_deletion(each, folder)
                shutil.rmtree(each)


def look(session: programs.Session) -> dict[str, float]:
    """Return what the process and its files take, when nothing goes on."""
    leftovers.clear()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    memory = process.memory_info()
    files = [file for file in session.folder.rglob("*") if file.is_file()]
    return {
        "memory": memory.rss - memory.shared,  # of its own: other processes share, or do not, the pages of libraries
        "descriptors": process.num_fds(),
        "threads": threading.active_count(),
        "native threads": process.num_threads(),
        "files": len(files),
        "bytes": sum(file.stat().st_blocks * 512 for file in files),
    }


def growth(looks: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the most of each count in the first third of looks, but for the first few, and in the last."""
    looks = looks[ONCE:]
    third = len(looks) // 3
    if not third:
        return {}
    first, last = looks[:third], looks[-third:]
    return {name: (max(e[name] for e in first), max(e[name] for e in last)) for name in looks[0] if name != "at_s"}


def soak(folder: Path, seed: int, seconds: float, every: int = EVERY) -> list[dict[str, float]]:
    """Train for so long, at least until the first look; return what was seen.

    Raises:
        AssertionError: Weights or state differ from the loop's.
    """
    notes = folder / "soak.json"
    parts = json.loads(notes.read_text()) if notes.exists() else []
    looks: list[dict[str, float]] = []
    parts.append(looks)
    # In `programs`, programs that are killed note what they save: a later process goes on from that.
    settings = programs.make_program(seed).settings | {"small": None, "body": "float32", "scaler": None}
    settings["kinds"] = settings["kinds"][:2]
    (folder / "of").mkdir(parents=True, exist_ok=True)
    began, number = time.monotonic(), sum(map(len, parts))
    session = programs.Session(programs.Program(seed, settings, [], kills=True), folder / "of", None)
    plainest = programs.SESSION | {"host_memory": 0}
    while not looks or time.monotonic() - began < seconds:
        number += 1
        session.live(make_actions(seed * 1_000_003 + number, session.fixed, every))
        session.live([("drop", "optimizer"), ("save", (False, True)), ("resume", (plainest, (0, 0.0), "before"))])
        iterate: list[tuple[str, Any]] = [("pass", (number, [*range(9)], "plain", False)), ("step", (None, "ours"))]
        session.live([*iterate, ("save", (False, True))])
        delete_older(session)
        looks.append(look(session) | {"at_s": round(time.monotonic() - began)})
        notes.write_text(json.dumps(parts))
    session.close()
    return looks


def main() -> int:
    """Train, and print what has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.getLogger("offload").setLevel(logging.ERROR)
    looks = soak(arguments.folder, arguments.seed, arguments.seconds)
    print(f"{len(looks)} times {EVERY} actions, all as the loop")
    for name, (first, last) in growth(looks).items():
        print(f"{name}: at most {first:,.0f} in the first third, {last:,.0f} in the last")
    return 0


if __name__ == "__main__":
    sys.exit(main())
