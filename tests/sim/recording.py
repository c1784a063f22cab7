"""What the machine decides for 8,000 seeds, as digests: a change of its inside must not change what it does.

Events and operations are written down in words of their own (kind, subgroup, tile, slot, direction), so that
operations may be renamed or merged and the recording stays what it was.

Run as a script from the repository::

    python tests/sim/recording.py write                      replace the recording
    python tests/sim/recording.py print saves 1700 1800      print what is written down for these seeds
    python tests/sim/recording.py compare OTHER saves 1700   print the first difference of a hundred seeds to another
                                                             checkout, which has an environment of its own
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from callers import CHOICES
from world.driver import run_seed

from offload.schedule import operations as ops
from offload.schedule.machine import Machine

FILE = Path(__file__).with_name("recording.json")
HUNDRED = 100
SEEDS = {"sweeps": 2000, "changing": 1000, "saves": 2500, "calls": 2500}
"""How many seeds of each actor are recorded."""


PLAIN = {
    ops.AbortSave: "give up",
    ops.Extend: "extend",
    ops.MakeSlots: "cut",
    ops.PauseOpenSweep: "hold",
    ops.Stop: "stop",
    ops.StopEviction: "stay",
}
"""Events that have nothing to tell but their name."""


def place(record: Any) -> tuple[object, ...]:
    """Return where a record says that a tile lies."""
    location = record.location
    return location.path, location.offset, location.nbytes, record.step, record.checksum


def neutral_operation(operation: Any) -> tuple[object, ...]:
    """Return an operation in neutral words."""
    match operation:
        case ops.RunVisit():
            visit, transfer_slot = operation.visit, (operation.transfer_slot, None)
            slots = operation.slot, *(transfer_slot if visit.gpu else transfer_slot[::-1])
            return "run", visit.subgroup, operation.sweep, operation.fresh, *slots, *neutral_visit(visit)
        case ops.ReadTile() | ops.WriteTile():
            way, slot = "fetch" if isinstance(operation, ops.ReadTile) else "flush", operation.slot
            return "tile", way, *operation.tile, slot, operation.buffer_offset, *place(operation.record)
        case ops.CopyTile():
            return "saved tile", "fetch", *operation.tile, operation.buffer, *place(operation.record)
        case ops.SaveTile():
            source = operation.source_offset, operation.buffer, operation.gathers
            return "saved tile", "flush", *operation.tile, *source, *place(operation.record)
        case ops.Transfer(what="state"):
            return "state", operation.lane, operation.subgroup, operation.slot, operation.transfer_slot
        case ops.Transfer():
            return "weights", operation.lane, operation.subgroup, operation.transfer_slot, operation.nbytes
        case ops.AwaitPush():
            return "weights", "left", operation.subgroup, operation.transfer_slot
        case ops.FreeHome():
            return "give back", operation.subgroup
        case ops.Sync():
            return "sync", operation.path
        case ops.Commit():
            return "commit", operation.number, [(*tile, *place(r)) for tile, r in operation.records.items()]
    raise AssertionError(f"{operation} has no neutral words")


def neutral_visit(visit: Any) -> tuple[object, ...]:
    """Return a visit in neutral words."""
    flags = visit.changes, visit.overwrites, visit.gpu, visit.fetches, visit.speculative
    return visit.subgroup, *(int(flag) for flag in flags), visit.weight_bytes


def neutral_event(event: Any) -> tuple[object, ...]:
    """Return an event in neutral words."""
    match event:
        case ops.BeginSweep(sweep):
            return "begin", sweep.number, sweep.step, sweep.is_open, [neutral_visit(visit) for visit in sweep.visits]
        case ops.Done(op, record):
            return "done", op, 0 if record is None else record.checksum
        case ops.Failed(op, error):
            return "failed", op, type(error).__name__
        case ops.Admit(subgroups):
            return "admit", subgroups
        case ops.SealStep(confirmed, rest):
            return "seal", confirmed, *(() if rest is None else neutral_event(ops.BeginSweep(rest)))
        case ops.BeginSave(save):
            return "begin save", save.number, save.sink, save.empty
        case ops.OutcomeTold(ended):
            return "taken", ended.number
        case ops.LimitGpuSlots(count):
            return "lend", count
        case ops.Reshare(shares):
            return "reshare", shares
        case ops.TakeOver():
            held = [(number, len(records)) for number, records in event.held_records.items()]
            return "take up", sorted(event.stores.items()), held, [(*t, *place(r)) for t, r in event.records.items()]
        case ops.ReleaseSave(number):
            return "release", number
        case ops.Evict():
            return "leave", event.number, event.subgroups
        case ops.Allocated(ends):
            return "allocated", ends
        case _ if type(event) in PLAIN:
            return (PLAIN[type(event)],)
    raise AssertionError(f"{event} has no neutral words")


def lines_of(driver: str, seed: int) -> Iterator[str]:
    """Yield what machines are told in a seed's run, what they decide, and what they say at a sweep's end."""
    lines = [f"{driver} {seed}"]
    made = itertools.count()

    class Recorded(Machine):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            self.number = next(made)
            super().__init__(*arguments, **more)

        def handle(self, event: Any) -> None:
            lines.append(f"{self.number} <- {neutral_event(event)}")
            super().handle(event)
            if isinstance(event, ops.OutcomeTold):
                moved, ended = self.changed_subgroups, self.ended_visits
                lines.append(f"{self.number}    moved {moved}, ended {ended}, failed {self.failed}")

        def take_operations(self) -> list[Any]:
            out = super().take_operations()
            lines.extend(f"{self.number} -> {operation.op} {neutral_operation(operation)}" for operation in out)
            return out

    run_seed(CHOICES[driver], seed, Recorded)
    yield from lines


def digest(driver: str, first: int, count: int = HUNDRED) -> str:
    """Return the digest of some seeds' lines."""
    whole = hashlib.sha256()
    for seed in range(first, first + count):
        for line in lines_of(driver, seed):
            whole.update(line.encode() + b"\n")
    return whole.hexdigest()[:16]


def recorded(driver: str, first: int) -> str:
    """Return the recorded digest of the hundred seeds from `first` on."""
    return str(json.loads(FILE.read_text())[driver][first // HUNDRED])


def compare(other: Path, driver: str, first: int) -> str:
    """Return the first difference between this checkout and another in a hundred seeds, with what came before it."""
    command = [str(other / ".venv/bin/python"), "tests/sim/recording.py", "print", driver, str(first)]
    printed = subprocess.run([*command, str(first + HUNDRED)], cwd=other, check=True, capture_output=True, text=True)
    theirs = printed.stdout.splitlines()
    ours = [line for seed in range(first, first + HUNDRED) for line in lines_of(driver, seed)]
    for number, (mine, before) in enumerate(itertools.zip_longest(ours, theirs)):
        if mine != before:
            seed = next(line for line in reversed(ours[: number + 1]) if line.startswith(driver))
            story = "\n".join(ours[max(number - 10, 0) : number])
            return f"{seed}\n{story}\n! here:  {mine}\n! there: {before}"
    return "no difference"


def main(what: str, *more: str) -> None:
    """Do what the command line says."""
    if what == "write":
        found = {driver: [digest(driver, n) for n in range(0, SEEDS[driver], HUNDRED)] for driver in SEEDS}
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    elif what == "print":
        for seed in range(int(more[1]), int(more[2])):
            sys.stdout.writelines(f"{line}\n" for line in lines_of(more[0], seed))
    else:
        sys.stdout.write(compare(Path(more[0]), more[1], int(more[2])) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
