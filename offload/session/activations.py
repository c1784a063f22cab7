"""The activations of a session: what callers write to tiles in forward, and read from them in backward.

Callers' threads copy to buffers, and from them; which tile has which buffer is decided by the machine
(`offload.schedule.buffers`), on the engine thread. A caller posts what it does, and waits for a buffer alone:
posts are taken up between events, whatever sweep is under way.

Not here: which tensors leave, and what belongs to them (`offload.optim.activations`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

from offload import combinations, metrics, waits
from offload.errors import ConfigError, InfeasiblePlanError, known
from offload.memory.arenas import available_bytes
from offload.plan.budget import (
    LEAST_ACTIVATION_BUFFERS,
    LEAST_ACTIVATION_TILE_BYTES,
    MOST_ACTIVATION_TILE_BYTES,
)
from offload.protocols import WAKE, Mark
from offload.schedule.operations import Discard, Extend, Pack, Packed, ReadTile, Unpack, Unpacked, WriteTile
from offload.session.parts import SessionParts

ALIGNMENT = 64
"""Of what lies beside each other in a tile."""

LEAST_BYTES = LEAST_ACTIVATION_BUFFERS * LEAST_ACTIVATION_TILE_BYTES
"""The least host memory for activations."""


class Piece(NamedTuple):
    """Where a part of what was written lies: so many bytes of a tile, from an offset on."""

    tile: int
    offset: int
    nbytes: int


class Written:
    """What a caller has written; whoever forgets it gives up its place.

    Attributes:
        pieces: Where it lies, in order; no two in one tile.
    """

    def __init__(self, activations: Activations) -> None:
        self.pieces: list[Piece] = []
        self._posts = activations.posts

    def __del__(self) -> None:  # by the garbage collector, on any thread and at any line
        self._posts.append(("forgotten", self.pieces))


class _Asked:
    """What a caller has asked for: that a tile have a buffer, to be written to or (`reads`) read.

    Attributes:
        filled: Bytes of a tile to be written to that are given out.
        address: Of the buffer, once `answered`; None where there is none.
        error: Why it cannot be read.
        mark: After the last copy that a device makes to the buffer, or from it.
        begun: Whether the engine has heard of it; an interrupt may come before it is asked.
    """

    def __init__(self, tile: int, *, reads: bool) -> None:
        self.tile, self.reads = tile, reads
        self.begun = False
        self.filled = 0
        self.address: int | None = None
        self.error: Exception | None = None
        self.mark: Mark | None = None
        self.answered = waits.Latch()

    def answer(self, address: int | None, error: Exception | None = None) -> None:
        self.address, self.error = address, error
        self.answered.set()


class Turns(Protocol):
    """The session's engine thread, which makes this: see `EngineThread`."""

    pid: int

    @property
    def is_usable(self) -> bool:
        """See `EngineThread`."""

    def check_usable(self) -> None:
        """See `EngineThread`."""

    def turn(self) -> AbstractContextManager[None]:
        """See `EngineThread`."""

    def request(self, begin: Callable[[], None], *, needs_memory: bool = True) -> None:
        """See `EngineThread`."""

    def take_memory(self) -> None:
        """See `EngineThread`."""

    def settle(self) -> None:
        """See `EngineThread`."""


class Activations:
    """The activations of one session.

    Args:
        parts: The session's.
        thread: Its engine thread.

    Attributes:
        posts: What callers have done that the engine has not heard of.
    """

    def __init__(self, parts: SessionParts, thread: Turns) -> None:
        self._parts = parts
        self._thread = thread
        self.posts: deque[tuple[str, Any]] = deque()
        # On callers' threads
        self._writing, self._reading = threading.RLock(), threading.RLock()
        self._is_writing = False
        self._open: _Asked | None = None  # the tile that is written to
        self._last_read: _Asked | None = None  # a tile that stays for now, as what is read next may lie there, too
        self._next_tile = 0
        self._in_transit: deque[tuple[Mark, Any]] = deque()  # tensors that a device still copies from
        # On the engine thread
        self._arena: Any = None
        self._awaited: list[_Asked] = []
        self._behind: list[tuple[Packed | Unpacked, Mark]] = []  # what is to be done when a device has copied
        self._uses: Counter[int] = Counter()  # of each tile: by `Written`, and by who has asked for it
        self._counted: set[Piece] = set()  # those that are in `_uses`
        self._figures: Counter[str] = Counter()  # since no tile was of use

    # Memory

    def take(self, nbytes: int) -> None:
        """Have buffers of so many bytes in all.

        Raises:
            ConfigError: It is less than `LEAST_BYTES`, there are no paths, or other buffers are in use.
            InfeasiblePlanError: The system has no such memory.
        """
        if not self._parts.plan.budgets.paths:
            combinations.WITHOUT_PATHS.refuse("paths", [], what="activations")
        if nbytes < LEAST_BYTES:
            raise ConfigError("host_memory", nbytes, f"give at least {LEAST_BYTES} bytes for buffers")
        tile_bytes = MOST_ACTIVATION_TILE_BYTES
        while tile_bytes * LEAST_ACTIVATION_BUFFERS > nbytes:
            tile_bytes //= 2
        nbytes = nbytes // tile_bytes * tile_bytes
        if nbytes != self._parts.plan.budgets.activation_bytes:
            self.rest()
            with self._writing, self._thread.turn():  # nobody writes tiles of another size meanwhile
                self._thread.request(partial(self._adopt, nbytes, tile_bytes))

    def _adopt(self, nbytes: int, tile_bytes: int) -> None:
        """Take memory for buffers in the place of those there are; on the engine thread."""
        parts, before = self._parts, self._arena
        if self.are_alive() or self._is_writing:
            allowed = f"leave it at {parts.plan.budgets.activation_bytes} while tensors of an earlier pass are saved"
            raise ConfigError("host_memory", nbytes, allowed)
        self._thread.settle()
        available = available_bytes() + (before.nbytes if before is not None else 0)
        if nbytes > available:
            offers = {"what is free": available}
            raise InfeasiblePlanError("host memory for activations", nbytes, offers, "lower host_memory")
        self._use(None, 0)
        parts.memory.give_back(before)
        self._use(parts.memory.arena(nbytes), tile_bytes)
        parts.allocate()

    def _use(self, arena: Any, tile_bytes: int) -> None:
        parts, nbytes = self._parts, arena.nbytes if arena is not None else 0
        self._arena = arena
        budgets = dataclasses.replace(parts.plan.budgets, activation_bytes=nbytes, activation_tile_bytes=tile_bytes)
        plan = dataclasses.replace(parts.plan, budgets=budgets)
        if arena is not None:
            parts.memory.place_buffers("activations", arena.address, tile_bytes)
        parts.lanes.bind(plan)
        parts.executor.bind(plan)
        parts.machine.handle(Extend(plan))
        parts.plan = parts.views.plan = plan

    # On callers' threads

    def write(self, source: int, nbytes: int, tensor: Any) -> Written | None:
        """Copy what is to be read later to tiles; wait for a buffer.

        Args:
            source: Address, of host or device memory.
            nbytes: How much.
            tensor: Keeps that memory while a device copies from it.

        Returns:
            Where it lies; None if there is no room now, or the session cannot be used.
        """
        if not self._thread.is_usable:
            return None
        self._thread.take_memory()
        with self._writing:
            if self._is_writing:  # a signal handler has interrupted it
                return None
            self._is_writing = True
            try:
                written = self._write(source, nbytes, tensor)
            except BaseException:
                self._close_tile()  # else whoever comes next waits for what may never have been asked for
                raise
            finally:
                self._is_writing = False
        if written is None:
            self.posts.append((metrics.KEPT_BYTES, nbytes))
        return written

    def _write(self, source: int, nbytes: int, tensor: Any) -> Written | None:
        written, lanes = Written(self), self._parts.lanes
        tile_bytes = self._parts.plan.budgets.activation_tile_bytes
        self._leave_read()
        while nbytes:
            asked = self._open
            if asked is None or asked.filled >= tile_bytes:
                self._close_tile()
                tile, self._next_tile = self._next_tile, self._next_tile + 1
                asked = self._open = _Asked(tile, reads=False)
                self._ask(asked)
            self._await(asked)
            if asked.address is None:
                self._close_tile()
                return None
            piece = Piece(asked.tile, asked.filled, min(nbytes, tile_bytes - asked.filled))
            asked.filled += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
            written.pieces.append(piece)
            self.posts.append(("used", piece))
            asked.mark = lanes.save(asked.address + piece.offset, source, piece.nbytes)
            source, nbytes = source + piece.nbytes, nbytes - piece.nbytes
        if lanes.on_gpu and asked is not None and asked.mark is not None:
            self._in_transit.append((asked.mark, tensor))
            self._let_go(self._parts.limits.in_transit_bytes)
        return written

    def _let_go(self, most_bytes: float = math.inf) -> None:
        """Let go of tensors that a device has copied; have it copy those beyond so many bytes first."""
        in_transit, held_bytes = self._in_transit, sum(tensor.nbytes for _, tensor in self._in_transit)
        while in_transit and (held_bytes > most_bytes or in_transit[0][0].reached()):
            in_transit[0][0].wait()
            held_bytes -= in_transit.popleft()[1].nbytes

    def _stop_writing(self) -> None:
        with self._writing:
            if not self._is_writing:  # else a signal handler has interrupted that
                self._close_tile()
                self._let_go()

    def _close_tile(self) -> None:
        """Say that the open tile holds all that it will."""
        asked, self._open = self._open, None
        if asked is not None:
            self.posts.append(("packed", asked))

    def rest(self) -> None:
        """Say that no tile is written to or read for now."""
        if os.getpid() != self._thread.pid:  # what another thread had locked stays so in a forked copy
            return
        self._stop_writing()
        self._leave_read()
        self._parts.queue.post(WAKE)

    def _leave_read(self) -> None:
        asked, self._last_read = self._last_read, None
        if asked is not None:
            self.posts.append(("unpacked", asked))

    def read(self, written: Written, target: int) -> None:
        """Copy what was written to host or device memory; wait until it is in a buffer.

        Work that the calling thread puts on a device from now on comes behind the copy.

        Raises:
            TierError: It cannot be read.
            SessionBrokenError: The session was closed or is broken, or another process has written it.
        """
        self._thread.check_usable()
        if self._open is not None or self._in_transit:
            self._stop_writing()
        with self._reading:
            asked, self._last_read = self._last_read, None
            mine = {} if asked is None else {asked.tile: asked}
            try:
                self._read(written.pieces[::-1], target, mine)
                self._leave_read()  # of a signal handler
                self._last_read = mine.pop(written.pieces[0].tile)
            finally:
                self.posts.extend(("unpacked", asked) for asked in mine.values())

    def _read(self, pieces: list[Piece], target: int, mine: dict[int, _Asked]) -> None:
        """Read pieces, last ones first as backward goes; `mine` are the tiles that stay meanwhile."""
        target += sum(piece.nbytes for piece in pieces)
        for number, piece in enumerate(pieces):
            for wanted in pieces[number : number + 2]:  # the next one comes meanwhile
                if wanted.tile not in mine:
                    mine[wanted.tile] = _Asked(wanted.tile, reads=True)
                    self._ask(mine[wanted.tile])
            asked = mine[piece.tile]
            self._await(asked)
            if asked.error is not None:
                raise asked.error
            self._thread.check_usable()
            address = known(asked.address, f"tile {piece.tile} has no buffer")
            target -= piece.nbytes
            asked.mark = self._parts.lanes.restore(target, address + piece.offset, piece.nbytes)
            for tile in [tile for tile in mine if tile not in (p.tile for p in pieces[number:])]:
                self.posts.append(("unpacked", mine.pop(tile)))

    def _ask(self, asked: _Asked) -> None:
        self.posts.append(("asked", asked))
        self._parts.queue.post(WAKE)

    def _await(self, asked: _Asked) -> None:
        """Wait until the engine has answered, or will not."""
        if asked.answered.is_set():
            return
        started_s, thread = time.monotonic(), self._thread

        def arrived(pause_s: float) -> bool:
            return asked.answered.wait(min(pause_s, waits.SLICE_S)) or not thread.is_usable

        waits.wait_for(arrived, lambda: "")  # the engine thread says what for
        self.posts.append((metrics.ACTIVATIONS_WAITED_S, time.monotonic() - started_s))

    def are_in_use(self) -> bool:
        """Return whether anything that was written is of use; in the caller's turn."""
        found: list[bool] = []
        if self._parts.plan.activation_buffers:
            self._thread.request(lambda: found.append(self.are_alive()), needs_memory=False)
        return any(found)

    # On the engine thread

    def is_due(self) -> bool:
        """Return whether `serve` has something to do."""
        return bool(self.posts) or any(map(self._is_answerable, self._awaited)) or self._has_copied()

    def _has_copied(self) -> bool:
        return any(mark.reached() for _, mark in self._behind)

    def are_alive(self) -> bool:
        """Return whether anything that was written is of use."""
        self._take_posts()
        return bool(self._uses)

    def serve(self) -> None:
        """Take note of what callers have done, and answer them."""
        machine = self._parts.machine
        self._take_posts()
        self._parts.executor.submit(machine.take_operations())
        book = machine.activations
        for asked in [asked for asked in self._awaited if self._is_answerable(asked)]:
            self._awaited.remove(asked)
            error = machine.broken if isinstance(machine.broken, Exception) else book.errors.get(asked.tile)
            there = error is None and (book.are_there(asked.tile) if asked.reads else book.is_filling(asked.tile))
            address = self._parts.memory.buffer_address("activations", book.buffer_of(asked.tile)) if there else None
            asked.answer(address, error)

    def _is_answerable(self, asked: _Asked) -> bool:
        machine, tile = self._parts.machine, asked.tile
        book = machine.activations
        if machine.broken is not None:
            return True
        if asked.reads:
            return book.are_there(tile) or tile in book.errors
        return book.is_filling(tile) or book.finds_none(tile)

    def _take_posts(self) -> None:
        behind, self._behind = self._behind, []
        for event, mark in behind:
            self._after(event, mark)
        while self.posts:
            what, value = self.posts.popleft()
            if what == "asked":
                self._begin(value)
            elif what == "used":
                self._counted.add(value)
                self._uses[value.tile] += 1
                self._figures[metrics.PACKED_BYTES] += value.nbytes
            elif what == "forgotten":
                for piece in value:
                    if piece in self._counted:  # else an interrupt has come before it was
                        self._counted.remove(piece)
                        self._release(piece.tile)
            elif what in ("packed", "unpacked"):
                if not value.begun:
                    continue
                if value in self._awaited:  # an interrupt has ended the wait
                    self._awaited.remove(value)
                event = Packed(value.tile) if what == "packed" else Unpacked(value.tile)
                self._after(event, value.mark)
                if self._behind and self._behind[-1][0] is event:
                    self._parts.lanes.device.report(value.mark, self._parts.queue, WAKE)
            else:
                self._figures[what] += value

    def _begin(self, asked: _Asked) -> None:
        machine = self._parts.machine
        if not asked.reads and not self._uses:
            self._figures.clear()
        self._uses[asked.tile] += 1
        asked.begun = True
        if machine.broken is None:
            machine.handle(Unpack(asked.tile) if asked.reads else Pack(asked.tile))
        self._awaited.append(asked)

    def _after(self, event: Packed | Unpacked, mark: Mark | None) -> None:
        """Have the machine know of something when a device has copied."""
        if mark is not None and not mark.reached():
            self._behind.append((event, mark))
            return
        if self._parts.machine.broken is None:
            self._parts.machine.handle(event)
        self._release(event.tile)

    def _release(self, tile: int) -> None:
        self._uses[tile] -= 1
        if not self._uses[tile]:
            del self._uses[tile]
            if self._parts.machine.broken is None:
                self._parts.machine.handle(Discard(tile))

    def metrics(self) -> dict[str, float]:
        """Return what has been done since nothing was of use, by the names of metrics; none before `take`."""
        plan = self._parts.plan
        if not plan.activation_buffers:
            return {}
        moved, rates = self._parts.machine.activations.moved, self._parts.rates.paths
        written_bytes = moved[WriteTile] * plan.budgets.activation_tile_bytes
        read_bytes = moved[ReadTile] * plan.budgets.activation_tile_bytes
        counted = metrics.PACKED_BYTES, metrics.KEPT_BYTES, metrics.ACTIVATIONS_WAITED_S
        return {
            **{name: float(self._figures[name]) for name in counted},
            metrics.ACTIVATIONS_WRITTEN_BYTES: written_bytes,
            metrics.ACTIVATIONS_READ_BYTES: read_bytes,
            metrics.PREDICTED_WRITE_S: written_bytes / sum(path.write.alone for path in rates),
            metrics.PREDICTED_READ_S: read_bytes / sum(path.read.alone for path in rates),
        }
