"""How the programs here die when `folder_kills.py` wants it, and what they note for it; otherwise nothing happens.

The environment says in `DYING`, as JSON, `log`: the file for notes, one in JSON a line; `slow_s`: what the mirror
pauses after each file and batch, and a quarter of it inside files, which are copied in small pieces; and on the rank
that is to die `signal`, and so many `steps` and seconds (`delay_s`) after which that comes.
"""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.checkpoint import mirror, whole
from offload.tiers import common

VARIABLE = "DYING"
WISH: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
LATE_STEPS = 2
"""Steps that are begun at most between the one that is named and the signal."""


class Ends:
    """Ends a process before its modules go, which `prepared` takes from its finalizers, and from threads of ours."""

    code: int | None = None

    def __init__(self) -> None:
        self.before, sys.excepthook = sys.excepthook, self
        atexit.register(self.end)

    def __call__(self, *what: Any) -> None:
        self.code = 1
        self.before(*what)

    def end(self) -> None:
        weakref.finalize._exitfunc()
        sys.stderr.flush()
        if self.code is not None:
            os._exit(self.code)


class _State:
    done, is_first = 0, True
    came = threading.Event()
    timer: threading.Timer | None = None


def note(**what: Any) -> None:
    with open(WISH["log"], "ab", buffering=0) as file:
        file.write(json.dumps(what).encode() + b"\n")


def step(done: int) -> None:
    """Take note that a step begins, with so many done."""
    if not WISH:
        return
    if _State.is_first:
        note(first=done)
    _State.done, _State.is_first = done, False
    if "signal" in WISH and done >= WISH["steps"] and _State.timer is None:
        _State.timer = threading.Timer(WISH["delay_s"], _die)
        _State.timer.daemon = True
        _State.timer.start()
    if "signal" in WISH and done >= WISH["steps"] + LATE_STEPS:
        _State.came.wait(30)


def _die() -> None:
    note(signal=WISH["signal"], done=_State.done)
    os.kill(os.getpid(), signal.Signals[WISH["signal"]])
    _State.came.set()


def end(metrics: Mapping[str, float]) -> None:
    """Take note of the end of training, with the mirror waited for."""
    if WISH:
        note(mirrored_bytes=metrics.get("mirrored_bytes", 0))


def _noted(
    copy: Callable[[Any], Iterator[int]], about: Callable[[Any], tuple[str, str, int]]
) -> Callable[[Any], Iterator[int]]:
    def noted(self: Any) -> Iterator[int]:
        name, key, total = about(self)
        for nbytes in copy(self):
            note(copied=nbytes, name=name, key=key, total=total)
            yield nbytes
            time.sleep(WISH["slow_s"])

    return noted


def _about_files(copy: whole.FolderCopy) -> tuple[str, str, int]:
    states = sorted((name, file.state) for name, file in copy.files.items())
    name = copy.whole.name
    return name, f"{name} {hashlib.sha256(repr(states).encode()).hexdigest()}", sum(size for _, (size, _) in states)


def _about_part(copy: mirror.RankPartCopy) -> tuple[str, str, int]:
    request = copy.part.request
    return str(request.path), f"{request.id} {request.rank}", sum(copy.manifest.tile_bytes.values())


def _begin() -> None:
    faulthandler.register(signal.SIGUSR1)
    note(pid=os.getpid())
    mirror.BATCH_BYTES = common.FILE_PIECE_BYTES = 16 << 10
    whole.FolderCopy.copy = _noted(whole.FolderCopy.copy, _about_files)
    mirror.RankPartCopy.copy = _noted(mirror.RankPartCopy.copy, _about_part)
    pieces = common.FileBytes.__iter__

    def slow(self: Any) -> Iterator[memoryview]:
        for piece in pieces(self):
            yield piece
            time.sleep(WISH["slow_s"] / 4)

    common.FileBytes.__iter__ = slow


if WISH:
    Ends()
    Path(WISH["log"]).parent.mkdir(parents=True, exist_ok=True)
    _begin()
