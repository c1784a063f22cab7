"""Faults as data: what goes wrong in a simulated run, and when.

A fault names an operation by its kind and number (the first read is read 0), a path, a lane or a moment. It says
what the world does, never how the engine should take it. `random_faults` draws some from a seed.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["read", "write", "run", "copy", "sync", "commit"]
"""Kinds of operations; "copy" is whatever goes between host memory and a GPU. A checkpoint's transfers count as reads
and writes."""


class SimulatedCrash(Exception):
    """The simulated process has died; raised out of `SimExecutor.wait`.

    Not an `OffloadError`: nothing in the product may handle it.
    """


@dataclass(frozen=True, slots=True)
class FailOperation:
    """Operation number `number` of a kind fails with `errno` (a run: with a kernel's failure).

    Without one, it is a transfer that has moved only half its bytes.
    """

    kind: Kind
    number: int
    errno: int | None = errno.EIO


@dataclass(frozen=True, slots=True)
class StuckOperation:
    """An operation never reports back; what comes after it on its lane does."""

    kind: Kind
    number: int


@dataclass(frozen=True, slots=True)
class CorruptPayload:
    """Write number `number` reports success, but one bit of its payload flips on the medium; needs data."""

    number: int


@dataclass(frozen=True, slots=True)
class MisdirectedWrite:
    """Write number `number` reports success, but lands in another slot of its store; needs data."""

    number: int


@dataclass(frozen=True, slots=True)
class PathFull:
    """Every write that starts on a path at or after `from_s` fails with ENOSPC."""

    path: int
    from_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlowLane:
    """What starts on a lane ("cpu", "read:0", "write:1", ...) at or after `from_s` takes `factor` times as long."""

    lane: str
    from_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Crash:
    """The process dies in place of reporting event number `event`; unsynced writes may be lost."""

    event: int


Fault = FailOperation | StuckOperation | CorruptPayload | MisdirectedWrite | PathFull | SlowLane | Crash


_FAILING: dict[int, Kind] = {0: "read", 1: "write", 2: "run", 7: "copy"}


def random_faults(seed: int, *, paths: int, operations: int) -> tuple[Fault, ...]:
    """Return one to three faults, aimed among so many operations of each kind and a second of virtual time."""
    rng = random.Random(seed)
    return tuple(_random_fault(rng, paths, max(operations, 1)) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def _random_fault(rng: random.Random, paths: int, operations: int) -> Fault:
    number = rng.randrange(operations)
    transfer: Literal["read", "write"] = rng.choice(("read", "write"))
    lanes = ["cpu", *(f"{verb}:{path}" for verb in ("read", "write") for path in range(paths))]
    match rng.randrange(10):
        case 0 | 1 | 2 | 7 as kind:
            return FailOperation(_FAILING[kind], number)
        case 3:
            return FailOperation(transfer, number, None)
        case 4:
            return StuckOperation(rng.choice(("read", "write", "run")), number)
        case 5:
            return CorruptPayload(number)
        case 6:
            return MisdirectedWrite(number)
        case 8 if paths:
            return PathFull(rng.randrange(paths), rng.random())
        case _:
            return SlowLane(rng.choice(lanes), rng.random(), rng.choice((3.0, 30.0, 1000.0)))
