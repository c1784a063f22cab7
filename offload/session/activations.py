"""The activations of a session: callers write tensors' memory to tiles in forward, and read it back in backward.

A tile is filled and read in a buffer in host memory. It is written to the paths, and read back, as others need its
buffer. Callers' threads copy to buffers, and from them. The machine decides which tile has which buffer
(`offload.schedule.scratch`), on the engine thread, which callers reach through `offload.session.scratch`.

Not here: which tensors are written, and how autograd gets them back (`offload.optim.activations`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from offload import combinations, metrics
from offload.errors import ConfigError, InfeasiblePlanError, known
from offload.layout import round_up
from offload.memory.arenas import available_bytes
from offload.plan.budget import LEAST_ACTIVATION_BUFFERS, LEAST_ACTIVATION_TILE_BYTES, MOST_ACTIVATION_TILE_BYTES
from offload.protocols import Mark, ScratchOwner
from offload.schedule.operations import Discard, Extend, ReadTile, WriteTile
from offload.session.parts import SessionParts
from offload.session.scratch import BufferRequest, BufferRequests
from offload.session.thread import EngineThread

ALIGNMENT = 64
"""Of each piece in a tile, in bytes."""

LEAST_BYTES = LEAST_ACTIVATION_BUFFERS * LEAST_ACTIVATION_TILE_BYTES
"""The least host memory for activations."""


class Piece(NamedTuple):
    """A piece of one tensor's memory: `nbytes` of a tile, from an offset on."""

    tile: int
    offset: int
    nbytes: int


class Written:
    """One tensor's memory, copied to tiles. A tile is discarded once no such object has a piece in it.

    Attributes:
        pieces: Where it lies, in order; no two in one tile.
    """

    def __init__(self, buffer_requests: BufferRequests, uses: Uses) -> None:
        self.pieces: list[Piece] = []
        self._buffer_requests, self._uses = buffer_requests, uses

    def __del__(self) -> None:
        """Post that nobody will read the pieces; called by the garbage collector, on any thread and at any line."""
        self._buffer_requests.post(self._uses.remove_pieces, self.pieces)


class Uses:
    """Counts the uses of each tile: pieces that lie in it, and callers that fill or read it. On the engine thread.

    A tile is discarded when it has no use left.

    Attributes:
        figures: Bytes and seconds since no tile had a use, by the names of metrics.
    """

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        self._counts: Counter[int] = Counter()  # of each tile
        self._pieces: set[Piece] = set()  # that are counted
        self.figures: Counter[str] = Counter()

    def add_piece(self, piece: Piece) -> None:
        """Count a piece that is being written."""
        self._pieces.add(piece)
        self._counts[piece.tile] += 1
        self.figures[metrics.PACKED_BYTES] += piece.nbytes

    def remove_pieces(self, pieces: Iterable[Piece]) -> None:
        """Stop counting pieces, which nobody will read any more."""
        for piece in pieces:
            if piece in self._pieces:  # else an interrupt came before `add_piece` was posted
                self._pieces.remove(piece)
                self.remove_use(piece.tile)

    def add_use(self, tile: int, *, fills: bool) -> None:
        """Count a caller that fills or reads a tile; the first fill after all uses have ended clears the figures."""
        if fills and not self._counts:
            self.figures.clear()
        self._counts[tile] += 1

    def remove_use(self, tile: int) -> None:
        """Take a use off a tile's count; discard the tile if it was the last."""
        self._counts[tile] -= 1
        if self._counts[tile] == 0:
            del self._counts[tile]
            if self._parts.machine.broken is None:
                self._parts.machine.handle(Discard(ScratchOwner("activations", tile)))


class _TileRequest(BufferRequest):
    """A request for a tile's buffer, to fill or to read the tile.

    Attributes:
        filled_bytes: Bytes from its beginning that have been written, or are being copied to.
    """

    def __init__(self, uses: Uses, tile: int, *, fills: bool) -> None:
        super().__init__(ScratchOwner("activations", tile), fills=fills)
        self.tile, self._uses = tile, uses
        self.filled_bytes = 0

    def begin(self) -> None:
        """Count the caller as a use of the tile."""
        self._uses.add_use(self.tile, fills=self.fills)

    def end(self) -> None:
        """Take the caller off the tile's uses."""
        self._uses.remove_use(self.tile)


class Activations:
    """The activations of one session."""

    def __init__(self, parts: SessionParts, thread: EngineThread) -> None:
        self._parts = parts
        self._thread = thread
        self._buffer_requests, self._uses = thread.buffer_requests, Uses(parts)
        # On callers' threads
        self._write_lock, self._read_lock = threading.RLock(), threading.RLock()
        self._is_writing = False  # whether `write` is under way, perhaps interrupted by a signal handler
        self._open: _TileRequest | None = None  # of the tile that is being filled
        self._last_read: _TileRequest | None = None  # of a tile that is kept, as the next read may need it, too
        self._next_tile = 0
        self._in_transit: deque[tuple[Mark, Any]] = deque()  # tensors that a device still copies from, with marks
        # On the engine thread
        self._arena: Any = None  # memory of the buffers

    # Memory

    def allocate_buffers(self, nbytes: int) -> None:
        """Allocate buffers of `nbytes` in all, in place of those of another size; do nothing if they have this size.

        Raises:
            ConfigError: `nbytes` is below `LEAST_BYTES`, there are no paths, or the present buffers are in use.
            InfeasiblePlanError: The system has no such memory.
        """
        if not self._parts.plan.budgets.paths:
            combinations.WITHOUT_PATHS.refuse("paths", [], what="activations")
        if nbytes < LEAST_BYTES:
            raise ConfigError("host_memory", nbytes, f"give at least {LEAST_BYTES} bytes for buffers")
        tile_bytes = MOST_ACTIVATION_TILE_BYTES
        # A buffer has room for one tile: halve the tile until there are enough buffers.
        while tile_bytes * LEAST_ACTIVATION_BUFFERS > nbytes:
            tile_bytes //= 2
        nbytes = nbytes // tile_bytes * tile_bytes  # no part of a buffer
        if nbytes != self._parts.plan.budgets.activation_bytes:
            self.release_tiles()
            with self._write_lock, self._thread.turn():  # nobody writes tiles of another size meanwhile
                self._thread.request(partial(self._replace_buffers, nbytes, tile_bytes))

    def _replace_buffers(self, nbytes: int, tile_bytes: int) -> None:
        """Replace the buffers, while nothing lies in them; on the engine thread."""
        parts, before = self._parts, self._arena
        # `_is_writing`: a signal handler that has interrupted `write` asks for this.
        if self.are_in_use() or self._is_writing:
            advice = f"leave it at {parts.plan.budgets.activation_bytes} while tensors of an earlier pass are saved"
            raise ConfigError("host_memory", nbytes, advice)
        self._thread.settle()
        free_bytes = available_bytes() + (before.nbytes if before is not None else 0)
        if nbytes > free_bytes:
            offers = {"what is free": free_bytes}
            raise InfeasiblePlanError("host memory for activations", nbytes, offers, "lower host_memory")
        self._use_buffers_in(arena=None, tile_bytes=0)  # so that old and new memory are not there at once
        parts.memory.free_arena(before)  # which does nothing with None
        self._use_buffers_in(parts.memory.allocate_arena(nbytes), tile_bytes)
        parts.allocate()  # tiles are lent store slots only once those that steps need have room

    def _use_buffers_in(self, arena: Any, tile_bytes: int) -> None:
        """Make a plan whose buffers for activations lie in `arena` (None: no buffers), and go on with it."""
        parts, nbytes = self._parts, arena.nbytes if arena is not None else 0
        self._arena = arena
        budgets = dataclasses.replace(parts.plan.budgets, activation_bytes=nbytes, activation_tile_bytes=tile_bytes)
        plan = dataclasses.replace(parts.plan, budgets=budgets)
        if arena is not None:
            parts.memory.place_buffers("activations", arena.address, tile_bytes)
        parts.lanes.use_plan(plan)
        parts.executor.use_plan(plan)
        parts.machine.handle(Extend(plan))
        parts.plan = parts.views.plan = plan

    # On callers' threads

    def write(self, source: int, nbytes: int, tensor: Any) -> Written | None:
        """Copy a tensor's memory to tiles, to be read later; wait for buffers.

        Args:
            source: Its address, in host or device memory.
            nbytes: Its size.
            tensor: A reference that keeps the memory while a device copies from it.

        Returns:
            Where the copy lies; None if there is no room now, if the session cannot be used, or in a signal handler
            that has interrupted `write`.
        """
        if not self._thread.is_usable:
            return None
        self._thread.take_memory()
        with self._write_lock:
            if self._is_writing:  # this is a signal handler that has interrupted `write`
                return None
            self._is_writing = True
            try:
                written = self._write(source, nbytes, tensor)
            except BaseException:
                # An interrupt may have come before the open tile's buffer was asked for: the next write would wait
                # for that buffer for ever.
                self._close_tile()
                raise
            finally:
                self._is_writing = False
        if written is None:
            self._add_to_figure(metrics.KEPT_BYTES, nbytes)
        return written

    def _write(self, source: int, nbytes: int, tensor: Any) -> Written | None:
        """Do the work of `write`: copy piece by piece, first to the rest of the open tile, then to new tiles.

        If a tile gets no buffer, None is returned; the pieces before it end with `written`, which nobody has then.
        """
        written, lanes = Written(self._buffer_requests, self._uses), self._parts.lanes
        tile_bytes = self._parts.plan.budgets.activation_tile_bytes
        self._release_read_tile()  # others may have its buffer: a read that needs the tile again asks for it again
        mark: Mark | None = None
        while nbytes:
            request = self._open
            if request is None or request.filled_bytes >= tile_bytes:
                request = self._open_tile()
            self._wait_for_buffer(request)
            if request.buffer is None:
                self._close_tile()
                return None
            piece = Piece(request.tile, request.filled_bytes, min(nbytes, tile_bytes - request.filled_bytes))
            request.filled_bytes += round_up(piece.nbytes, ALIGNMENT)
            written.pieces.append(piece)
            self._buffer_requests.post(self._uses.add_piece, piece)
            address = self._parts.memory.buffer_address("activations", request.buffer) + piece.offset
            mark = request.mark = lanes.save(address, source, piece.nbytes)
            source += piece.nbytes
            nbytes -= piece.nbytes
        if mark is not None:  # of the last copy: the device makes copies in order
            self._in_transit.append((mark, tensor))
            self._drop_copied(self._parts.limits.in_transit_bytes)
        return written

    def _drop_copied(self, most_bytes: float = math.inf) -> None:
        """Drop the references to tensors that a device has copied.

        While those left have more than `most_bytes`, wait for the oldest copy.
        """
        held_bytes = sum(tensor.nbytes for _, tensor in self._in_transit)
        while self._in_transit:
            mark, tensor = self._in_transit[0]
            if held_bytes <= most_bytes and not mark.reached():
                return
            mark.wait()
            held_bytes -= tensor.nbytes
            self._in_transit.popleft()  # last: if the wait is interrupted, the tensor is still kept

    def _stop_writing(self) -> None:
        """Release the open tile, and drop the tensors in transit that devices have copied."""
        with self._write_lock:
            if not self._is_writing:  # else this is a signal handler that has interrupted `write`
                self._close_tile()
                self._drop_copied()

    def _open_tile(self) -> _TileRequest:
        """Close the open tile, and ask for a buffer for the next one; return the request."""
        self._close_tile()
        tile, self._next_tile = self._next_tile, self._next_tile + 1
        request = self._open = _TileRequest(self._uses, tile, fills=True)
        self._buffer_requests.ask(request)
        return request

    def _close_tile(self) -> None:
        """Release the open tile: it is full, or is not filled further."""
        request, self._open = self._open, None
        if request is not None:
            self._buffer_requests.release(request)

    def release_tiles(self) -> None:
        """Release all tiles that are kept in buffers for the next write or read, as none comes for now."""
        if os.getpid() != self._thread.pid:  # in a forked copy, locks that other threads held are never released
            return
        self._stop_writing()
        self._release_read_tile()
        self._buffer_requests.wake()  # `release` wakes nobody

    def _release_read_tile(self) -> None:
        """Release the tile that was read last, and kept for the next read."""
        request, self._last_read = self._last_read, None
        if request is not None:
            self._buffer_requests.release(request)

    def read(self, written: Written, target: int) -> None:
        """Copy what was written to `target`, an address in host or device memory; wait until it is in buffers.

        Work that the calling thread puts on a device from now on is ordered after the copy.

        Raises:
            TierError: A path has failed.
            SessionBrokenError: The session was closed or is broken, or another process has written the tensor.
        """
        self._thread.check_usable()
        if self._open is not None or self._in_transit:  # what the last write has left
            self._stop_writing()
        with self._read_lock:
            # The tile that the last call has kept may have the last piece. It is taken out of the attribute, as a
            # signal handler may read, too.
            last_read, self._last_read = self._last_read, None
            requests = {} if last_read is None else {last_read.tile: last_read}
            try:
                self._read(written.pieces[::-1], target + sum(piece.nbytes for piece in written.pieces), requests)
                self._release_read_tile()  # one that a signal handler has read
                self._last_read = requests.pop(written.pieces[0].tile)  # kept for the next call
            finally:
                for request in requests.values():
                    self._buffer_requests.release(request)

    def _read(self, pieces: list[Piece], end: int, requests: dict[int, _TileRequest]) -> None:
        """Copy a tensor's pieces, given in reverse order, to memory that ends at address `end`.

        Backward reads tensors in the reverse order of their writes. So pieces are copied from the last one back: the
        tile of the first piece, which may also have the end of the tensor written before, is at hand for the next
        call. While a piece is copied, the tile of the next one is asked for.

        `requests` has the present requests by tile. Those that are left in it are the caller's to release.
        """
        for number, piece in enumerate(pieces):
            for wanted in pieces[number : number + 2]:  # this one, and the next
                if wanted.tile not in requests:
                    requests[wanted.tile] = _TileRequest(self._uses, wanted.tile, fills=False)
                    self._buffer_requests.ask(requests[wanted.tile])
            request = requests[piece.tile]
            self._wait_for_buffer(request)
            if request.error is not None:
                raise request.error
            self._thread.check_usable()
            buffer = known(request.buffer, f"tile {piece.tile} has no buffer")
            address = self._parts.memory.buffer_address("activations", buffer)
            end -= piece.nbytes
            request.mark = self._parts.lanes.restore(end, address + piece.offset, piece.nbytes)
            needed_tiles = {later.tile for later in pieces[number:]}  # this piece's tile, too, which a device reads
            for tile in [tile for tile in requests if tile not in needed_tiles]:
                self._buffer_requests.release(requests.pop(tile))

    def _wait_for_buffer(self, request: _TileRequest) -> None:
        """Wait until a tile has a buffer or an error, or the session cannot be used; count the time."""
        if not request.answered.is_set():
            started_s = time.monotonic()
            self._thread.wait_for_buffer(request)
            self._add_to_figure(metrics.ACTIVATIONS_WAITED_S, time.monotonic() - started_s)

    def _add_to_figure(self, figure: str, count: float) -> None:
        """Have the engine thread add to one of `Uses.figures`."""
        self._buffer_requests.post(self._uses.figures.update, {figure: count})

    def ask_whether_in_use(self) -> bool:
        """Ask the engine thread for `are_in_use`, in the caller's turn; a parked session stays parked."""
        answers: list[bool] = []
        if self._parts.plan.activation_buffers:  # else none was written
            self._thread.request(lambda: answers.append(self.are_in_use()), needs_memory=False)
        return any(answers)

    # On the engine thread

    def are_in_use(self) -> bool:
        """Return whether anybody may still read a tensor that was written."""
        return self._buffer_requests.are_in_use("activations")

    def metrics(self) -> dict[str, float]:
        """Return bytes and seconds since no tile had a use, by the names of metrics; none without buffers."""
        plan = self._parts.plan
        if not plan.activation_buffers:
            return {}
        tile_counts, rates = self._parts.machine.scratch["activations"].moved, self._parts.rates.paths
        written_bytes = tile_counts[WriteTile] * plan.budgets.activation_tile_bytes
        read_bytes = tile_counts[ReadTile] * plan.budgets.activation_tile_bytes
        counted = metrics.PACKED_BYTES, metrics.KEPT_BYTES, metrics.ACTIVATIONS_WAITED_S
        return {
            **{name: float(self._uses.figures[name]) for name in counted},
            metrics.ACTIVATIONS_WRITTEN_BYTES: written_bytes,
            metrics.ACTIVATIONS_READ_BYTES: read_bytes,
            metrics.PREDICTED_WRITE_S: written_bytes / sum(path.write.alone for path in rates),
            metrics.PREDICTED_READ_S: read_bytes / sum(path.read.alone for path in rates),
        }
