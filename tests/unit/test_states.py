"""Tables of states in the docstrings of `offload/schedule`, held against what the code does.

A row is "state | event | next state". Slots, scratch and visits are driven: they make all rows, and no others. Phases
of subgroups are compared with the arrows that `Staging.set_phase` allows.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from test_machine import make, make_gpu, step

from offload.errors import InternalError
from offload.plan.budget import ScratchBuffers
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule import index, runs, scratch, staging
from offload.schedule.index import Location, TileIndex, TileRecord
from offload.schedule.issued import Issued
from offload.schedule.machine import Machine
from offload.schedule.operations import Done, Operation, ReadTile, RunVisit, Transfer
from offload.schedule.scratch import Scratch, ScratchEntry
from offload.schedule.staging import ARROWS

Row = tuple[str, str, str]
TILE = TileId(0, 0, 0)
WHOLE = 2 * SECTOR_BYTES


def rows(module: ModuleType) -> set[Row]:
    """Return the rows of the table in a module's docstring, one for each of the alternatives that "or" joins."""
    written = re.findall(r"^    (\S.*?) *\| (.*?) *\| (.*)$", module.__doc__ or "", re.MULTILINE)
    found = [row for cells in written for row in itertools.product(*(cell.split(" or ") for cell in cells))]
    assert found
    assert len(set(found)) == len(found)
    return set(found)


# A slot of a store


def claimed() -> tuple[TileIndex, Location]:
    stores = TileIndex([(1 << 20, 1.0)], {SECTOR_BYTES: 4})
    location = stores.claim(SECTOR_BYTES)
    assert location is not None
    return stores, location


def commit_next(stores: TileIndex, location: Location) -> None:
    """Commit the tile's next version, in another slot."""
    if stores.get(TILE) is None or stores.get(TILE).location != location:
        raise InternalError("the slot is not live")
    other = stores.claim(SECTOR_BYTES)
    assert other is not None
    stores.commit(TILE, TileRecord(other, 2))


EVENTS: dict[str, Callable[[TileIndex, Location], Any]] = {
    "claim": lambda stores, location: claim_again(stores, location),
    "commit": lambda stores, location: stores.commit(TILE, TileRecord(location, 1)),
    "commit of the tile's next version": commit_next,
    "abandon": lambda stores, location: stores.abandon(location),
    "abandon_unwritable": lambda stores, location: stores.abandon_unwritable(location, is_full=False),
    "hold": lambda stores, location: stores.hold(location),
    "unhold": lambda stores, location: stores.unhold(TILE, location),
    "make_newest": lambda stores, location: stores.make_newest(TILE, TileRecord(location, 1)),
    "free_discarded": lambda stores, location: stores.free_discarded(TILE),
}
WAYS = {
    "free": ("abandon",),
    "claimed": (),
    "lost": ("abandon_unwritable",),
    "live": ("commit",),
    "held": ("hold",),
    "live and held": ("commit", "hold"),
}
"""The events that bring a claimed slot into each state."""


def claim_again(stores: TileIndex, location: Location) -> None:
    if stores.claim(SECTOR_BYTES) != location:
        raise InternalError("another slot is claimed")


def slot_state(stores: TileIndex, location: Location) -> str:
    record = stores.get(TILE)
    is_live = record is not None and record.location == location
    is_held = stores.is_held(location)
    if is_live or is_held:
        return " and ".join(["live"] * is_live + ["held"] * is_held)
    elsewhere = WHOLE * (record is not None)
    if stores.live_bytes()[0] > elsewhere:
        return "claimed"
    return "free" if stores.claim(SECTOR_BYTES) == location else "lost"


def test_slots_of_stores_go_through_their_states_and_no_others() -> None:
    found = set()
    for state, way in WAYS.items():
        for event, apply in EVENTS.items():
            stores, location = claimed()
            for before in way:
                EVENTS[before](stores, location)
            stores.check()
            try:
                apply(stores, location)
                stores.check()
            except (InternalError, KeyError):
                continue
            found.add((state, event, slot_state(stores, location)))
    assert found == rows(index)


# A subgroup


def test_subgroups_go_through_the_phases_of_the_table() -> None:
    assert {(before, after) for before, _, after in rows(staging)} == {
        (before.name, after.name) for before, arrows in ARROWS.items() for after in arrows
    }


# An owner's scratch


def scratch_state(held: ScratchEntry | None) -> str:
    if held is None:
        return "nothing"
    if held.is_discarded:
        return "discarded"
    if held.unread or held.unwritten:
        return "being read" if held.unread else "being written"
    if held.is_newest:
        return "newest"
    if held.is_stored:
        return "stored" if held.buffer is None else "clean"
    return "waiting"


def drive(seed: int, kind: Any) -> set[Row]:
    """Return the rows that random callers and lanes make."""
    draw, issued, taken = random.Random(seed), Issued(), set()
    planned = kind == "gradients"
    count = draw.choice((2, 3))
    buffers = ScratchBuffers(count, count if planned else count - 1, draw.choice((0, 1)), 1, is_planned=planned)
    owners = range(4)
    tiles = {n: tuple((TileId(0, 9, 2 * n + i), i * SECTOR_BYTES, SECTOR_BYTES) for i in (0, 1)) for n in owners}
    if not planned:
        tiles = {n: parts[:1] for n, parts in tiles.items()}
    plan: Any = SimpleNamespace(scratch={kind: buffers}, scratch_tiles=lambda owner: tiles[owner.number])
    room = draw.choice((3, 64)) if not planned else 64
    stores = TileIndex([(room * WHOLE, 1.0)], {SECTOR_BYTES: 8} if planned else {})
    machine = Scratch(kind, plan, stores, issued)
    flying: list[Operation] = []
    readers: dict[int, int] = dict.fromkeys(owners, 0)

    def states() -> dict[int, str]:
        held = held_of(machine)
        return {owner: scratch_state(held.get(owner)) for owner in owners}

    def event(name: str, owner: int | None, act: Callable[..., object], *arguments: Any, **named: Any) -> None:
        before = states()
        act(*arguments, **named)
        for other, state in states().items():
            if state != before[other]:
                assert owner is None or owner == other
                taken.add((before[other], name, state))

    for _ in range(200):
        owner, before = draw.choice(owners), states()
        end = draw.choice(flying) if flying and draw.random() < 0.25 else None
        if end is not None:
            flying.remove(end)
            issued.end(end.op)
            name = "read" if isinstance(end, ReadTile) else "written"
            if not planned and draw.random() < 0.3:
                failed = "read has failed" if name == "read" else "no path takes it"
                event(failed, end.owner.number, machine.transfer_failed, end, OSError())
            else:
                event(name, end.owner.number, machine.transfer_ended, end, None)
        elif draw.random() < 0.3:
            # Gradients are added to; a tile of activations is filled once.
            if not readers[owner] and not machine.gets_no_buffer(owner) and (planned or before[owner] == "nothing"):
                event("request to fill", owner, machine.request, owner, fills=True)
        elif draw.random() < 0.4:
            event("release", owner, machine.release, owner, fills=True)
        elif draw.random() < 0.5:
            if before[owner] not in ("nothing", "discarded", "waiting") and not machine.is_filling(owner):
                readers[owner] += 1
                event("request to read", owner, machine.request, owner, fills=False)
        else:
            for _ in range(readers[owner]):
                event("release", owner, machine.release, owner, fills=False)
            readers[owner] = 0
            if draw.random() < 0.5:
                event("discard", owner, machine.discard, owner)
        event("advance", None, machine.advance)
        flying += issued.take()
        machine.check(issued.in_flight.values())
    return taken


def held_of(machine: Scratch) -> dict[int, ScratchEntry]:
    """Return what is known of each owner that has any data, whatever the attribute is called."""
    known = [
        x
        for x in vars(machine).values()
        if isinstance(x, dict) and {ScratchEntry} == {type(held) for held in x.values()}
    ]
    return known[0] if known else {}


def test_scratch_goes_through_its_states_and_no_others() -> None:
    made = {row for seed in range(60) for kind in ("gradients", "activations") for row in drive(seed, kind)}
    assert made == rows(scratch)


# A visit


def visit_state(machine: Machine, number: int, flying: list[Operation]) -> str:
    subgroup = machine.staging.subgroups[number]
    if subgroup.visit is not None:
        return "waiting"
    if any(isinstance(o, RunVisit) and o.visit.subgroup == number for o in flying):
        return "running"
    copies = [o for o in flying if isinstance(o, Transfer) and o.subgroup == number]
    if subgroup.begun_visit is not None:
        return "copying" if copies else "copied"
    if any(o.what == "weights" for o in copies):
        return "pushing"
    return "ended"


NAMES = {
    "ReadTile": "its state is read",
    "Transfer fetch": "its copy ends",
    "RunVisit": "its run ends",
    "Transfer flush": "its copy out ends",
    "AwaitPush": "its copy out ends",
}
"""The events of a subgroup's own operations; the last ones are of its visit in the step before, too."""


def visits(machine: Machine, steps: int, draw: random.Random) -> set[Row]:
    """Return the rows that the visits of some steps make, operations ending in any order."""
    taken, numbers, flying = set(), range(len(machine.phases)), list[Operation]()

    def event(name: str, number: int | None, event: Any) -> None:
        before = [visit_state(machine, n, flying) for n in numbers]
        if isinstance(event, Done):
            flying[:] = [o for o in flying if o.op != event.op]
        machine.handle(event)
        machine.check()
        flying.extend(machine.take_operations())
        for n in numbers:
            after = visit_state(machine, n, flying)
            if after != before[n]:
                taken.add((before[n], name if number in (n, None) else "another visit frees what it needs", after))

    for number in range(1, steps + 1):
        event("begin", None, step(machine, number))
        while machine.finished_sweep is None:
            end = draw.choice(flying)
            about: Any = end.visit if isinstance(end, RunVisit) else getattr(end, "tile", end)
            kind = " ".join((type(end).__name__, getattr(end, "way", ""))).strip()
            event(NAMES.get(kind, kind), about.subgroup, Done(end.op))
        machine.take_finished_sweep()
    return taken


def test_visits_go_through_their_states_and_no_others() -> None:
    made: set[Row] = set()
    for seed in range(40):
        draw = random.Random(seed)
        made |= visits(make(5, 2, resident=1), 3, draw)
        made |= visits(
            make_gpu(
                [bool(draw.getrandbits(1)) for _ in range(5)],
                resident=draw.choice((0, 2)),
                gpu_slots=draw.choice((1, 5)),
                slots=draw.choice((1, 5)),
            ),
            3,
            draw,
        )
    for row in sorted(made):
        print(row)
    assert made == rows(runs)
