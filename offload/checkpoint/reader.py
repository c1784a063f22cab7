"""Reads a checkpoint by parameter name and range of elements, however many ranks have written it.

Before any state is read, the checkpoint is found by its `COMMIT`, every rank's manifest is read and checked against
the others, and the stores that the manifests name are opened. State is then read tile by tile, through a bounded
number of buffers: in memory that the caller lends, or in memory of their own. Every tile's header and checksum are
verified, and errors name parameter and file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from offload import waits
from offload._native import CompletionQueue
from offload.checkpoint.contents import read_commit, read_extra, read_manifest, read_manifests, some_of
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import StoreRef
from offload.checkpoint.stores import folders_above, is_pinned_in, is_same
from offload.engine.executor import STALL_S
from offload.engine.flights import Flights
from offload.engine.views import tensor_at
from offload.errors import CheckpointError, TierError, invariant
from offload.formats import Format
from offload.kernels.stored import Stored, stored_dtype, stored_in
from offload.layout import Parameter, Subgroup, ceil_div
from offload.memory.arenas import Arena
from offload.protocols import SECTOR_BYTES, Completion, Tier, TileId, TileRequest
from offload.rules import MASTER, PACKED, UpdateRule
from offload.tiers import parse_place, tier_error
from offload.units import format_seconds

log = logging.getLogger("offload")

BUFFERS = 12
"""Most tiles in memory at once: those being read, and those that the next range may need again."""

PIECE_NUMEL = 1 << 20
"""Elements that are handed out at a time."""

_NO_STORE = (
    "no such store is there: it was deleted, or another disk is mounted. If it lies elsewhere now, add that "
    "directory to `paths`. Else load the copy that a mirror has; `offload fetch MIRROR FOLDER` brings a trainer's "
    "checkpoint back from one"
)

WEIGHT = "weight"
"""What `Checkpoint.visit` calls masters that are rounded to their weights' type."""


@dataclass(frozen=True, slots=True)
class SavedPiece:
    """A piece of a parameter that one rank has saved.

    Attributes:
        rank: The rank.
        parameter: Position of the parameter in the rank's manifest.
        start: First element in the whole parameter.
    """

    rank: int
    parameter: int
    start: int


@dataclass(frozen=True, slots=True)
class Range:
    """Elements of one state tensor of one parameter, and the tensor to read them into.

    Attributes:
        name: The parameter's name.
        tensor: The state tensor's name, one of its rule's `names`.
        start: First element in the whole parameter, in the order of its memory.
        out: Flat tensor in host memory to read into, rounded to its dtype; its size is the number of elements. Of
            packed state it is all words of the parameter, which are read as they are.
    """

    name: str
    tensor: str
    start: int
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class _ElementRun:
    """Elements of one parameter that lie in one subgroup, and the tensor to read them into."""

    subgroup: Subgroup
    offset: int  # of the first element, in the subgroup
    first_index: int  # of the first element, in the whole parameter
    numel: int
    out: torch.Tensor


class _TilePart(NamedTuple):
    """The part of a run of elements that lies in one tile.

    An item is what the format stores as one unit: for an element, or for a block of `item_numel` elements.

    Attributes:
        tile: The tile.
        source_bytes: Where the part lies in the tile, in bytes.
        items: Which items of the run it is, counted from the run's first.
    """

    tile: TileId
    source_bytes: slice
    items: slice

    def bytes_of_run(self, form: Format) -> slice:
        """Return which of the run's stored bytes the part is, where the run has `form`."""
        return slice(self.items.start * form.item_bytes, self.items.stop * form.item_bytes)


def _tile_parts(run: _ElementRun, form: Format, number: int) -> Iterator[_TilePart]:
    """Yield the parts, tile by tile, of a run of elements of stored tensor `number`, which has format `form`."""
    # Items of the subgroup's stored tensor: the next one and the end of the run, then how many a tile has.
    item = run.offset // form.item_numel
    stop = ceil_div(run.offset + run.numel, form.item_numel)
    tile_items = ceil_div(run.subgroup.tile_numel, form.item_numel)
    done = 0  # items of the run that have been yielded
    while item < stop:
        tile, skipped = divmod(item, tile_items)  # the tile's number, and its items before this one
        count = min(stop - item, tile_items - skipped)
        source_bytes = slice(skipped * form.item_bytes, (skipped + count) * form.item_bytes)
        yield _TilePart(TileId(run.subgroup.index, number, tile), source_bytes, slice(done, done + count))
        item += count
        done += count


_TileKey = tuple[int, TileId]
"""A tile of a checkpoint: the rank that has saved it, and its id in that rank's manifest."""

_Uses = OrderedDict[_TileKey, list[Callable[[torch.Tensor], None]]]
"""For each tile, functions that copy from it, a tensor of bytes, while it is in a buffer."""


def _copy_bytes(source: slice, out: torch.Tensor, tile: torch.Tensor) -> None:
    """Copy bytes of a tile, as they are, to `out`."""
    out.copy_(tile[source])


def _copy_decoded(source: slice, form: Format, out: torch.Tensor, tile: torch.Tensor) -> None:
    """Decode bytes of a tile to `out`, rounded to its dtype."""
    Stored(form, tile[source].view(stored_dtype(form))).read(out)


class _Flight(NamedTuple):
    """A tile that is being read into a buffer, or written from it."""

    key: _TileKey
    buffer: int
    request: TileRequest
    tier: Tier

    def __str__(self) -> str:
        """Return what messages call this operation."""
        return f"{self.tier.name} path {self.tier.path} to read at byte {self.request.offset}"


class StateSource(Protocol):
    """A source from which state can be loaded: a checkpoint, or a file of another format."""

    @property
    def path(self) -> str:
        """Its folder or file."""

    @property
    def names(self) -> list[str]:
        """Names of all parameters."""

    def rule_of(self, name: str) -> UpdateRule:
        """Return the rule whose state a parameter has."""

    def keeps(self, name: str, rule: UpdateRule) -> bool:
        """Return whether a parameter has the state of a rule."""

    @property
    def rounding(self) -> tuple[int, Mapping[str, int]] | None:
        """Seed of stochastic rounding, and the number of each parameter; None where nothing was rounded so."""

    @property
    def step(self) -> int:
        """Number of the step after which the state was saved."""

    @property
    def last_version(self) -> int:
        """The newest version of any tile."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The `metadata` of the `SaveRequest`."""

    def full_numel(self, name: str) -> int:
        """Return the number of elements of a whole parameter."""

    def step_of(self, name: str) -> int:
        """Return the number of updates that a parameter has had."""

    def shape_of(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return shape and strides of a whole parameter, if its writer gave them."""

    def has(self, name: str, tensor: str) -> bool:
        """Return whether a state tensor is there; a missing master is taken from the weight."""

    def read(self, ranges: Sequence[Range]) -> None:
        """Read ranges of state tensors."""

    def use_read_buffer(self, address: int, nbytes: int) -> None:
        """Read through this memory from now on; through memory of its own if `nbytes` is 0."""


class Checkpoint:
    """An opened checkpoint; a context manager.

    Args:
        path: Its folder, or "s3://" prefix.
        verify: Verify payload checksums.
        paths: Where to look for a store that is not on the path that the checkpoint names: the path may have been
            moved, or have another name now.
        whole: Raise if stores of any rank are missing. Else `require` checks those of one rank: a host may not see
            the stores of others.
        part: Open one rank's part of one save alone, whatever `COMMIT` says: the save's id, the rank, and the number
            of ranks. Then `manifests` has that rank's alone, and only its tiles can be read. None for all ranks.
        buffers: Most tiles in memory at once.

    Attributes:
        id: The save's id.
        manifests: One for each rank that wrote the checkpoint, in order.
        queue: The queue that the stores report to; see `copy`.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged or of a newer format, or one of its stores is missing.
        ConfigError: A bucket cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        paths: Sequence[str] = (),
        whole: bool = True,
        part: tuple[str, int, int] | None = None,
        buffers: int = BUFFERS,
    ) -> None:
        self._folder = open_folder(path)
        self.path = self._folder.path
        self._verify = verify
        self._needs_all_stores = whole
        self._tiers: dict[tuple[str, str], Tier] = {}  # by path and store
        # By saved path and store: why a store of the same name on another path is not read in its place.
        self._misfits: dict[tuple[str | None, str], CheckpointError] = {}
        self.queue = CompletionQueue()
        self._most_buffers = buffers
        self._arena: Arena | None = None  # of the buffers, if these are not in lent memory
        self._lent_memory = (0, 0)  # address and size; see `use_read_buffer`
        # Address of the first buffer, their number (0: not made yet), and size of each; set by `_make_buffers`.
        self._buffers_address = self._buffer_count = self._buffer_bytes = 0
        # The buffer that each tile in memory is in, least recently used first.
        self._cache: OrderedDict[_TileKey, int] = OrderedDict()
        if part is None:
            self.id, self.manifests = read_manifests(self._folder)
        else:
            self.id, self.manifests = part[0], [read_manifest(self._folder, *part)]
        self._parts = self._find_parts()
        # A request that is still in flight between two reads is stuck, and may write into its buffer at any time.
        self._flights = Flights[_Flight](self.queue, STALL_S)
        # On a thread of its own, so that no interrupt comes between what is opened and taking note of it.
        self._opening = waits.BackgroundWork(lambda: self._open_stores(paths), "offload-open")
        self._closing = waits.BackgroundWork(self._close, "offload-close")
        try:
            self._opening.do(lambda: f"the stores of {self.path} to be opened")
            # An opened store that has locks is marked as being read, which keeps it. Before that the checkpoint may
            # have been replaced or released, so its files are read once more.
            if part is not None:
                read_manifest(self._folder, *part)
            elif read_commit(self._folder).id != self.id:
                raise CheckpointError(f"{self.path} was replaced while it was opened: open it anew")
        except BaseException:
            self.close()
            raise

    # Contents

    def keeps(self, name: str, rule: UpdateRule) -> bool:
        """Return whether a parameter has the state of a rule of this name; packed state has to have its size, too."""
        saved = self.rule_of(name)
        return saved.name == rule.name and (not saved.packed_words or saved == rule)

    def rule_of(self, name: str) -> UpdateRule:
        """Return the rule whose state a parameter has."""
        parts = self._parts[name]
        # From a piece with elements: one without elements is in no subgroup, which would name the rule.
        with_elements = (part for part in parts if self._piece(part).numel)
        saved = next(with_elements, parts[0])
        return self.manifests[saved.rank].layout.state_of(self._piece(saved)).rule

    @property
    def names(self) -> list[str]:
        """Names of all parameters, in the order of the ranks' layouts."""
        return list(self._parts)

    def names_of(self, rank: int, ranks: int) -> list[str] | None:
        """Return the names of the parameters that were saved for a rank of `ranks`, by itself or by rank 0 for all.

        For one rank that is all parameters, however many ranks have saved. None if `ranks` is another number than
        that of the ranks that have saved: nothing tells then which parameters a rank needs.
        """
        if ranks == 1:
            return self.names
        if len(self.manifests) != ranks:
            return None
        rank_0_saved_all = not any(manifest.layout.parameters for manifest in self.manifests[1:])
        return list(self.manifests[0 if rank_0_saved_all else rank].layout.index_by_name)

    def rank_with(self, names: Iterable[str], rank: int) -> int:
        """Return the rank that has saved the greatest number of the parameters in `names`.

        If several ranks have as many, it is `rank` if that is one of them, else the first of them. So it is `rank` if
        no rank has any.
        """
        wanted = set(names)
        counts = [len(wanted.intersection(manifest.layout.index_by_name)) for manifest in self.manifests]
        most = max(counts)
        return rank if counts[rank] == most else counts.index(most)

    def parts(self, name: str) -> list[SavedPiece]:
        """Return the saved pieces of a parameter, those of ranks whose stores are missing last, else by start.

        A piece that several ranks have saved is there several times.
        """
        return self._parts[name]

    def _piece(self, part: SavedPiece) -> Parameter:
        """Return a saved piece as the manifest of the saving rank describes it."""
        return self.manifests[part.rank].layout.parameters[part.parameter]

    def full_numel(self, name: str) -> int:
        """Return the number of elements of a whole parameter, on which all its pieces agree (`_find_parts`)."""
        return self._piece(self._parts[name][0]).unsharded_numel

    def step_of(self, name: str) -> int:
        """Return the number of updates that a parameter has had, on which all its pieces agree (`_find_parts`)."""
        part = self._parts[name][0]
        return self.manifests[part.rank].steps[part.parameter]

    @property
    def step(self) -> int:
        """Number of the step after which the state was saved; the greatest, if ranks have taken different numbers."""
        return max(manifest.step for manifest in self.manifests)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The `metadata` of the first rank."""
        return self.manifests[0].metadata

    def has(self, name: str, tensor: str) -> bool:
        """Return whether a state tensor is there; a saved parameter has all tensors of its rule."""
        return name in self._parts and tensor in self.rule_of(name).names

    def shape_of(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return shape and strides of a whole parameter, if its writer gave them."""
        piece = self._piece(self._parts[name][0])  # all pieces agree, see `_find_parts`
        return None if piece.shape is None or piece.stride is None else (piece.shape, piece.stride)

    @property
    def rounding(self) -> tuple[int, Mapping[str, int]] | None:
        """The first rank's seed of stochastic rounding, and all numbers; logs a warning if ranks had other seeds."""
        numbers: dict[str, int] = {}
        for manifest in self.manifests:
            if manifest.seed is None:
                return None
            numbers |= dict(zip(manifest.layout.index_by_name, manifest.numbers, strict=True))
        seeds = [manifest.seed for manifest in self.manifests]
        if len(set(seeds)) > 1:
            log.warning(
                "%s was saved by ranks with different seeds (%s); all go on with %d, so state is rounded as no run "
                "without this break would: give every rank the same OffloadConfig.seed",
                self.path,
                ", ".join(map(str, seeds)),
                seeds[0],
            )
        return self.manifests[0].seed or 0, numbers  # none is None here; `or 0` says so to type checkers

    @property
    def last_version(self) -> int:
        """The newest version of any tile."""
        return max((ref.step for manifest in self.manifests for ref in manifest.tiles.values()), default=0)

    def extra(self, number: int) -> bytes | None:
        """Return the `extra` that the caller of a rank gave, by the number of its manifest; None if it gave none.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        return read_extra(self._folder, self.manifests[number])

    # Reading

    def read(self, ranges: Sequence[Range]) -> None:
        """Read ranges, tile by tile, through at most as many buffers as the checkpoint was opened with.

        Each tile is read once, and copied or decoded to all ranges that need it. A state tensor that is stored as
        several (planes; codes and scales) is collected first, and decoded when all tiles have been read.

        If the lent memory is too small for a tile, one buffer of the checkpoint's own is used.

        Raises:
            CheckpointError: A tile is damaged or cannot be read, or the checkpoint has not all of a range.
        """
        uses: _Uses = OrderedDict()
        # `_add_uses` notes in `uses` what to copy from each tile, and returns what to do after all tiles.
        decode_collected = [
            self._add_uses(uses, rank, item.tensor, run) for item in ranges for rank, run in self._element_runs(item)
        ]
        for key, buffer in self._tiles(uses):
            rank, id = key
            tile = tensor_at(self._address(buffer), self.manifests[rank].tile_bytes[id], torch.uint8)
            for use in uses[key]:
                use(tile)
        for decode in decode_collected:
            decode()

    def read_pieces(
        self,
        pieces: Sequence[Parameter],
        take: Callable[[int, int, Mapping[str, torch.Tensor]], None],
        names: Sequence[str] | None = None,
    ) -> None:
        """Read the state of pieces of parameters, and pass it to `take`, at most `PIECE_NUMEL` elements at a time.

        Args:
            pieces: What to read.
            take: Called with the number of a piece, the first element in it, and fp32 views by state tensor. The
                views are overwritten after the call.
            names: State tensors to read; all but packed ones if left out. "weight" is the master, rounded to the
                piece's type.

        Raises:
            CheckpointError: As `read`.
        """
        buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        for number, piece in enumerate(pieces):
            rule = self.rule_of(piece.name)
            weight_dtype: torch.dtype = getattr(torch, piece.dtype.name.lower())
            wanted = (MASTER, *rule.state) if names is None else names
            # Buffers are shared by all pieces: one for each state tensor's name and dtype.
            keys = [(name, weight_dtype if name == WEIGHT else torch.float32) for name in wanted]
            for name, dtype in keys:
                if (name, dtype) not in buffers:
                    buffers[name, dtype] = torch.empty(PIECE_NUMEL, dtype=dtype, device="cpu")
            for first in range(0, piece.numel, PIECE_NUMEL):
                views = {name: buffers[name, dtype][: piece.numel - first] for name, dtype in keys}
                tensors = [(MASTER if name == WEIGHT else name, view) for name, view in views.items()]
                self.read([Range(piece.name, name, piece.start + first, view) for name, view in tensors])
                take(number, first, views)

    def _add_uses(self, uses: _Uses, rank: int, name: str, run: _ElementRun) -> Callable[[], None]:
        """Note in `uses`, for each tile that holds a part of a run of state tensor `name`, how to copy from the tile.

        Returns:
            A function to call once all tiles have been read. It decodes a state tensor that is stored as several: a
            master's planes, or codes and their scales. For any other it does nothing: each tile is decoded when read.
        """
        subgroup = run.subgroup
        numbers = {tensor.name: number for number, tensor in enumerate(subgroup.kept)}
        # Numbers of the stored tensors that `name` consists of, by their names.
        stored_numbers = {each: numbers[each] for each in subgroup.state.format.stored_as(name) if each in numbers}
        if len(stored_numbers) > 1:
            return self._add_uses_of_several(uses, rank, name, run, stored_numbers)
        number = numbers[name]
        form = subgroup.kept[number].format
        for part in _tile_parts(run, form, number):
            if form.item_numel == 1:
                copy = partial(_copy_decoded, part.source_bytes, form, run.out[part.items])
            else:  # packed state: an item is a block, which is copied as it is
                copy = partial(_copy_bytes, part.source_bytes, run.out.view(torch.uint8)[part.bytes_of_run(form)])
            uses.setdefault((rank, part.tile), []).append(copy)
        return lambda: None

    def _add_uses_of_several(
        self, uses: _Uses, rank: int, name: str, run: _ElementRun, numbers: Mapping[str, int]
    ) -> Callable[[], None]:
        """Do as `_add_uses` for a state tensor that is stored as several, given the numbers of these by name.

        Their bytes are copied from the tiles to memory of their own. The returned function decodes them from there.
        """
        subgroup = run.subgroup
        stored = {}  # the run's part of each stored tensor, by name
        for stored_name, number in numbers.items():
            form = subgroup.kept[number].format
            parts = list(_tile_parts(run, form, number))
            stored_bytes = torch.empty(parts[-1].items.stop * form.item_bytes, dtype=torch.uint8, device="cpu")
            for part in parts:
                copy = partial(_copy_bytes, part.source_bytes, stored_bytes[part.bytes_of_run(form)])
                uses.setdefault((rank, part.tile), []).append(copy)
            stored[stored_name] = stored_bytes.view(stored_dtype(form))
        return lambda: stored_in(subgroup.state, name, stored, run.first_index).read(run.out)

    def use_read_buffer(self, address: int, nbytes: int) -> None:
        """Read through this memory from now on; through memory of its own if `nbytes` is 0."""
        self._lent_memory = address, nbytes
        self._drop_buffers()

    def verify(self) -> Iterator[tuple[int, TileId, CheckpointError | None]]:
        """Read all tiles once; yield rank, tile, and the error if the tile is damaged."""
        for rank, manifest in enumerate(self.manifests):
            for tile in manifest.tile_bytes:
                problem: CheckpointError | None = None
                try:
                    self._read_tile((rank, tile))
                except CheckpointError as error:
                    problem = error
                yield rank, tile, problem

    def copy(self, tiles: Sequence[tuple[TileId, int]], sink: Tier) -> None:
        """Copy tiles of the first manifest, unchanged, to another store; they are durable when this returns.

        Args:
            tiles: The tiles, each with its offset in the other store, in bytes.
            sink: The other store: a new one that reports to `queue`, with nothing else in flight.

        Raises:
            CheckpointError: A tile is damaged or cannot be read.
            TierError: The sink has failed.
        """
        last_written = self._move_tiles(tiles, sink)
        if not self._flights.out:  # else a device has stalled
            # One operation, the sync. `Flights` names it by the last write in messages.
            to_sync = [last_written] if last_written is not None else []
            syncs = self._flights.run(lambda: to_sync.pop() if to_sync else None, lambda op, _: sink.sync(op))
            with contextlib.closing(syncs) as arrivals:
                for completion, _ in arrivals:
                    if completion.error:
                        raise tier_error("sync", completion, None, sink)
        if self._flights.out:
            what = self._flights.oldest()
            raise CheckpointError(f"{self.path} is not copied: no answer for {format_seconds(STALL_S)} from {what}")

    def _move_tiles(self, tiles: Sequence[tuple[TileId, int]], sink: Tier) -> _Flight | None:
        """Read tiles and write them to a sink, until all is done or a device stalls; return the last write.

        Reads and writes overlap. A buffer is free again once its tile has been written.
        """
        self._make_buffers()
        self._cache.clear()  # all buffers are used for these tiles
        to_read = deque(tiles)
        free = [*range(self._buffer_count)]
        offsets = dict(tiles)
        to_write: list[_Flight] = []
        last_written: _Flight | None = None

        def next_flight() -> _Flight | None:
            """Return a tile to write, so that its buffer becomes free, or else one to read."""
            if to_write:
                return to_write.pop()
            if not (to_read and free):
                return None
            tile, _ = to_read.popleft()
            return self._read_flight((0, tile), free.pop())

        def start(op: int, flight: _Flight) -> None:
            """Start a read or write; `op` is what its completion reports."""
            move = flight.tier.write if flight.tier is sink else flight.tier.read
            move(flight.request._replace(op=op))

        with contextlib.closing(self._flights.run(next_flight, start)) as arrivals:
            for completion, flight in arrivals:
                if flight.tier is sink:
                    if completion.error:
                        raise tier_error("write", completion, flight.request, sink)
                    free.append(flight.buffer)
                    last_written = flight
                else:
                    if completion.error:
                        self._raise_damage(flight, completion)
                    _, tile = flight.key
                    request = self.manifests[0].request(tile, flight.request.address)
                    to_write.append(flight._replace(request=request._replace(offset=offsets[tile]), tier=sink))
        return last_written

    def close(self) -> None:
        """Close the stores; idempotent. If a device hangs, its stores are closed when it answers, or never."""
        self._closing.start()
        # A device that has not answered so far may never do so.
        timeout_s = waits.SETTLE_S if self._flights.out else None
        waits.wait_for(self._closing.wait, lambda: f"the stores of {self.path} to be closed", timeout_s)
        error = self._closing.error
        self._closing.error = None  # so that it is raised once
        if error is not None:
            raise error

    def _close(self) -> None:
        """Close the stores, on a thread of its own, once opening them has ended or cannot begin any more."""
        if not self._opening.forestall():
            self._opening.wait()
        # All are closed even if one raises. The buffers go last (callbacks run last first): a read may write to them
        # until its store is closed.
        with contextlib.ExitStack() as ends:
            ends.callback(self._drop_buffers)
            for tier in self._tiers.values():
                ends.callback(tier.close)
        self._tiers = {}

    def __del__(self) -> None:
        """Close the stores, which an interrupt may have left open before the caller could note this checkpoint."""
        closing = getattr(self, "_closing", None)  # None if the constructor raised before it was set
        if closing is not None:
            closing.start()

    def __enter__(self) -> Checkpoint:
        """Return the opened checkpoint."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the stores."""
        self.close()

    # Stores

    def store_path(self, rank: int, store: int) -> str:
        """Return the path that a store, by its number in a rank's manifest, lies on: a directory or a prefix."""
        path = self.manifests[rank].stores[store].path
        return self.path if path is None else path

    def _tier(self, rank: int, store: int) -> Tier:
        """Return the tier of a store of a rank's manifest, opened if it is not yet."""
        ref = self.manifests[rank].stores[store]
        path = self.store_path(rank, store)
        key = path, ref.store.hex
        if key not in self._tiers:
            try:
                self._tiers[key] = parse_place(path).open_existing(ref.store, self.queue)
            except TierError as cause:
                host = self.manifests[rank].host  # "" in older manifests
                where = f"{path} on {host}, of rank {rank}" if host not in ("", socket.gethostname()) else path
                what = f"{self.path} names the store offload-{ref.store} in {where}, which cannot be opened here"
                why = f"{cause}" if cause.errno != errno.ENOENT else _NO_STORE
                misfit = self._misfits.get(key)
                if misfit and cause.errno == errno.ENOENT:
                    why = f"no such store is there, and a store of this name elsewhere has other state: {misfit}"
                raise CheckpointError(f"{what}: {why}") from cause
        return self._tiers[key]

    def _locate_stores(self, rank: int, paths: Sequence[str]) -> None:
        """Change a rank's manifest to name the paths where its stores are now: stores and paths may have moved.

        If another path has a store of the same name, `_find_store` decides by the stores' content. It tries the path
        that the checkpoint names first if the store there has a pin of this checkpoint in this folder. Else this
        folder is a copy, and copies of the store are tried first, as the original store may have gone on since. Paths
        of the checkpoint's other stores are tried last: as all stores of a session have one name, these have a store
        of this name, too.
        """
        places = [parse_place(path) for path in paths]
        saved_paths = [ref.path for ref in self.manifests[rank].stores if ref.path is not None]
        candidates = [*(place.name for place in places), *saved_paths]
        for number, ref in enumerate(self.manifests[rank].stores):
            if ref.path is None:  # it lies in the checkpoint's own folder
                continue
            named_paths = [ref.path] if os.path.isdir(f"{ref.path}/offload-{ref.store}") else []  # at most one
            found_paths = [*parse_place(ref.path).search(ref.store, candidates), *self._stores_beside(ref)]
            other_paths = [path for path in found_paths if not is_same(path, ref.path)]
            # Paths may have been exchanged, as by disks that are mounted in another order.
            exchanged = [path for path in other_paths if any(is_same(path, saved) for saved in saved_paths)]
            copies = [path for path in other_paths if path not in exchanged]
            is_original = bool(named_paths) and is_pinned_in(self.path, self.id, ref.path, ref.store)
            if other_paths:
                first_paths = [*named_paths, *copies] if is_original else [*copies, *named_paths]
                self._find_store(rank, number, [*first_paths, *exchanged])
            path = self.store_path(rank, number)
            for place in places:  # so that the manifest calls the path as the caller does
                if is_same(place.path, path):
                    self._set_store_path(rank, number, place.name)

    def _stores_beside(self, ref: StoreRef) -> list[str]:
        """Return paths near the checkpoint that have a store: it may have been copied together with the checkpoint.

        They are looked for in the two folders above the checkpoint: in these folders themselves, and under the last
        one or two names of the store's saved path, such as "rank-1" and "nvme/rank-1".
        """
        *_, second_last, last = ("", *os.path.normpath(ref.path or "").split("/"))  # "": a path may have one name
        names = ("", last, f"{second_last}/{last}")
        places = [os.path.join(above, name) for above in folders_above(self.path) for name in names]
        return [place for place in places if os.path.isdir(f"{place}/offload-{ref.store}")]

    def _find_store(self, rank: int, number: int, candidates: Sequence[str]) -> None:
        """Have a rank's manifest name the first of `candidates` that has a store; if none has it, the saved path.

        All stores of a session have one name, so whether a path has the right one is found by reading a tile: the
        newest, as a copy of the store from before the checkpoint lacks that.

        Args:
            rank: The rank.
            number: Number of the store in the rank's manifest.
            candidates: Paths that have a store of this name.
        """
        store, saved_path = self.manifests[rank].stores[number].store, self.manifests[rank].stores[number].path
        tiles = [tile for tile, ref in self.manifests[rank].tiles.items() if ref.store == number]
        tile = max(tiles, key=lambda tile: self.manifests[rank].tiles[tile].step, default=None)
        try:
            for candidate in candidates:
                self._set_store_path(rank, number, candidate)
                try:
                    if tile is not None:  # else no tile tells which is right, and the first one will do
                        self._read_tile((rank, tile))
                    return
                except CheckpointError as error:
                    self._misfits.setdefault((saved_path, store.hex), error)
            self._set_store_path(rank, number, saved_path)
        finally:
            self._drop_buffers()  # their memory is not kept until state is read

    def _set_store_path(self, rank: int, number: int, path: str | None) -> None:
        """Change the path of a store in a rank's manifest."""
        stores = list(self.manifests[rank].stores)
        stores[number] = StoreRef(stores[number].store, path)
        self.manifests[rank] = replace(self.manifests[rank], stores=tuple(stores))

    def _open_stores(self, paths: Sequence[str]) -> None:
        """Locate and open the stores of all ranks.

        A store that cannot be opened raises only if all are needed (`whole`). Else its rank's pieces go last in
        `_parts`, so that state that several ranks have is read from one whose stores are there.
        """
        for rank in range(len(self.manifests)):
            self._locate_stores(rank, paths)
        absent = set()
        for rank in range(len(self.manifests)):
            try:
                self.require(rank)
            except CheckpointError:
                if self._needs_all_stores:
                    raise
                absent.add(rank)
        for parts in self._parts.values():
            parts.sort(key=lambda part: (part.rank in absent, part.start, part.rank))

    def require(self, rank: int) -> None:
        """Open the stores of a rank.

        Raises:
            CheckpointError: One cannot be opened; names it.
        """
        for number in sorted({ref.store for ref in self.manifests[rank].tiles.values()}):
            self._tier(rank, number)

    def ranks_with(self, pieces: Iterable[Parameter]) -> set[int]:
        """Return the ranks from whose parts of the checkpoint the state of these pieces would be read."""
        ranks = set()
        for piece in pieces:
            for start, numel in piece.runs(0, piece.numel):
                no_memory = torch.empty(numel, dtype=torch.float32, device="meta")  # as nothing is read
                # "" for any state tensor: all of a parameter's lie in the same pieces.
                ranks |= {rank for rank, _ in self._element_runs(Range(piece.name, "", start, no_memory))}
        return ranks

    # Ranges to tiles

    def _find_parts(self) -> dict[str, list[SavedPiece]]:
        """Return the pieces of each parameter that ranks have saved; raise if ranks disagree about a parameter."""
        all_parts: dict[str, list[SavedPiece]] = {}
        for rank, manifest in enumerate(self.manifests):
            for position, piece in enumerate(manifest.layout.parameters):
                all_parts.setdefault(piece.name, []).append(SavedPiece(rank, position, piece.start))
        for name, parts in all_parts.items():
            facts = set()  # what all pieces have to say alike
            for part in parts:
                piece = self._piece(part)
                steps = self.manifests[part.rank].steps[part.parameter]
                facts.add((piece.unsharded_numel, piece.shape, piece.stride, steps))
            if len(facts) > 1:
                raise CheckpointError(
                    f"{self.path} is damaged: its ranks disagree about {name}: {sorted(map(str, facts))}"
                )
            parts.sort(key=lambda part: (part.start, part.rank))
        return all_parts

    def _element_runs(self, item: Range) -> Iterator[tuple[int, _ElementRun]]:
        """Yield the runs that make up a range, each with the rank that has saved it.

        Pieces of several ranks may have the same elements; one of them is read. Packed state is read whole, from the
        first piece.

        Raises:
            CheckpointError: No piece has some of the elements, or the parameter is unknown.
        """
        if item.name not in self._parts:
            raise CheckpointError(f"{self.path} has no parameter {item.name}; it has {some_of(self.names)}")
        parts = self._parts[item.name]
        if item.tensor == PACKED:  # `out` has all words of the parameter, whatever its number of elements
            whole = parts[0]
            for run in self._element_runs_of(whole, 0, item.out, self._piece(whole).numel):
                yield whole.rank, run
            return
        done, numel = 0, item.out.numel()
        number = missed = 0  # the piece to try, and how many in a row did not have the next element
        while done < numel and missed < len(parts):
            part = parts[number]
            located = self._piece(part).locate(item.start + done)
            if located is None:  # try the next piece, which mostly has the elements that follow
                number = (number + 1) % len(parts)
                missed += 1
                continue
            start, available = located
            count = min(available, numel - done)
            for run in self._element_runs_of(part, start, item.out[done : done + count], count):
                yield part.rank, run
            done += count
            missed = 0
        if done < numel:
            missing = item.start + done
            raise CheckpointError(f"{self.path} has not all of {item.name}: elements from {missing} on are missing")

    def _element_runs_of(self, part: SavedPiece, start: int, out: torch.Tensor, numel: int) -> Iterator[_ElementRun]:
        """Yield the runs of `numel` elements of a saved piece, from its element `start` on, subgroup by subgroup."""
        layout = self.manifests[part.rank].layout
        for subgroup_index, position in layout.places[part.parameter]:
            subgroup = layout.subgroups[subgroup_index]
            segment = subgroup.segments[position]
            first = max(start, segment.start)
            end = min(start + numel, segment.start + segment.numel)
            if first < end:
                offset = segment.offset + first - segment.start
                # All of `out` where one segment has all elements: for packed state the size of `out`, in words, is
                # not `numel`, and a slice by elements would be wrong.
                target = out if end - first == numel else out[first - start : end - start]
                yield _ElementRun(subgroup, offset, part.start + first, end - first, target)

    # Tiles

    def _address(self, buffer: int) -> int:
        """Return the address of a buffer by its number."""
        invariant(buffer < self._buffer_count, "a tile without a buffer")
        return self._buffers_address + buffer * self._buffer_bytes

    def _make_buffers(self) -> None:
        """Divide memory into buffers, each for the largest tile; nothing if there are buffers already.

        The memory is what the caller has lent. If that is too small for one tile, it is new memory for one buffer; if
        none was lent, new memory for all buffers.
        """
        if self._buffer_count:
            return
        most = max((nbytes for manifest in self.manifests for nbytes in manifest.tile_bytes.values()), default=0)
        self._buffer_bytes = max(most, SECTOR_BYTES)  # not 0 where there are no tiles
        address, nbytes = self._lent_memory
        count = min(self._most_buffers, nbytes // self._buffer_bytes)
        if count == 0:
            count = 1 if nbytes else self._most_buffers  # one if too little was lent
            self._arena = Arena(count * self._buffer_bytes)
            address = self._arena.address
        self._buffers_address = address
        self._buffer_count = count

    def _drop_buffers(self) -> None:
        """Give up the buffers and what is in them; the next read makes new ones."""
        arena = self._arena
        self._arena = None
        self._buffer_count = 0
        self._cache.clear()
        if arena is not None:
            arena.close()

    def _read_tile(self, key: _TileKey) -> None:
        """Read a tile, to see whether that raises."""
        for _ in self._tiles([key]):
            pass

    def _tiles(self, keys: Iterable[_TileKey]) -> Iterator[tuple[_TileKey, int]]:
        """Read tiles; yield each with the number of its buffer.

        The buffer is sure to have the tile only until the next one is asked for. Tiles that are in buffers already
        come first, the others as their reads end.
        """
        self._make_buffers()
        todo = []
        for key in keys:
            if key in self._cache:
                self._cache.move_to_end(key)
                yield key, self._cache[key]
            else:
                todo.append(key)
        if self._flights.out:  # a stuck read may still write into its buffer
            raise CheckpointError(f"{self.path} cannot be read any more: open it anew")
        todo.reverse()  # `next_flight` takes the last
        free = [buffer for buffer in range(self._buffer_count) if buffer not in self._cache.values()]

        def next_flight() -> _Flight | None:
            """Return the next tile to read, to a free buffer or the least recently used tile's; None for none now."""
            if not todo or not (free or self._cache):
                return None
            buffer = free.pop() if free else self._cache.popitem(last=False)[1]
            return self._read_flight(todo.pop(), buffer)

        def start(op: int, flight: _Flight) -> None:
            """Start a read; `op` is what its completion reports."""
            flight.tier.read(flight.request._replace(op=op))

        with contextlib.closing(self._flights.run(next_flight, start)) as arrivals:
            for completion, flight in arrivals:
                if completion.error:
                    self._raise_damage(flight, completion)
                self._cache[flight.key] = flight.buffer
                yield flight.key, flight.buffer
        if self._flights.out:
            what = self._flights.oldest()
            raise CheckpointError(f"{self.path} cannot be read: no answer for {format_seconds(STALL_S)} from {what}")

    def _read_flight(self, key: _TileKey, buffer: int) -> _Flight:
        """Return the read of a tile to a buffer; the tile's store is opened if it is not yet."""
        rank, tile = key
        manifest = self.manifests[rank]
        tier = self._tier(rank, manifest.tiles[tile].store)
        return _Flight(key, buffer, manifest.request(tile, self._address(buffer), verify=self._verify), tier)

    def _raise_damage(self, flight: _Flight, completion: Completion) -> NoReturn:
        """Raise the error for a tile that cannot be read, which names its parameters and its store."""
        rank, tile = flight.key
        manifest = self.manifests[rank]
        number = manifest.tiles[tile].store
        where = os.path.join(self.store_path(rank, number), f"offload-{manifest.stores[number].store}")
        cause = tier_error("read", completion, flight.request, flight.tier)
        raise CheckpointError(
            f"{self.path}: {manifest.parameters_of(tile)} cannot be read from {where}: {cause}"
        ) from None
