"""DeepSpeed's own checkpoint files, into which the engine's state is written without a copy of it in memory.

DeepSpeed writes its files with *holes*, unwritten ranges of bytes, where the state belongs; see
`offload.checkpoint.torch_files`. The engine then writes each run of state to its place, in the order that suits it.
Weights that equal their rounded masters are written in the same way, to the model's file.

A shard's *pieces*, each this rank's run of one parameter, lie one after the other in *flat tensors*. State has one
flat tensor of fp32 for each state tensor and each flat tensor of weights.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from offload.checkpoint.torch_files import (
    Places,
    bytes_of,
    save_with_holes,
    start_of,
    writable,
    write_at,
    write_tensor,
)
from offload.integrations.deepspeed.in_place import Frame
from offload.integrations.deepspeed.shard import FlatState, Shard

_ITEM_BYTES = 4  # of an fp32 element

WEIGHT = "weight"
"""What a checkpoint's `visit` calls masters that are rounded to the weights' type."""

MOST_TRIALS = 100
"""How often, at most, a rank makes a folder that other ranks delete."""

COLUMNS = 4093
"""Number of sums in a digest: a prime, so that exchanging two rows of a weight changes the sums."""


def can_stream(checkpoint_engine: Any) -> bool:
    """Return whether a checkpoint engine of DeepSpeed's writes with `torch.save` to a zip file of its own."""
    # No subclass: it may write in another way.
    return type(checkpoint_engine) is TorchCheckpointEngine and bool(checkpoint_engine.zipfile_serialization)


@contextlib.contextmanager
def writing_holes(checkpoint_engine: Any) -> Iterator[list[Any]]:
    """While this context lasts, have a checkpoint engine write files with holes for tensors; yield what it saves.

    That is a list of the objects, one for each file. The caller then writes each tensor to its hole, so that no copy
    of all of them is made in memory.
    """
    saved: list[Any] = []

    def save(state_dict: Any, path: str) -> None:
        """Replaces the checkpoint engine's `save`."""
        saved.append(state_dict)
        in_its_folder(path, lambda: save_with_holes(state_dict, path))

    checkpoint_engine.save = save
    try:
        yield saved
    finally:
        del checkpoint_engine.save  # the class's method shows again


def in_its_folder(path: str, work: Callable[[], None]) -> None:
    """Make the folder of the file `path`, and do the work that puts the file there.

    Ranks share the folder, and each deletes it when it is empty. If another rank does so before the work has put the
    file there, both are repeated.
    """
    for trials_left in reversed(range(MOST_TRIALS)):
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return work()
        except FileNotFoundError:
            if not trials_left:
                raise


Starts = Mapping[str, Sequence[int | None]]
"""By a state tensor's name, or `WEIGHT`: first byte in a file, for each flat tensor; None for an empty one."""


def starts_of(places: Places, placeholders: Sequence[FlatState]) -> Starts | None:
    """Return where state belongs in a file; None if that is unknown, as a placeholder of state is not in the file.

    Args:
        places: What `fill` has returned for the file.
        placeholders: What was saved in the place of state, for each flat tensor of the shard.
    """
    starts: dict[str, list[int | None]] = {name: [] for name in (placeholders[0].tensors if placeholders else ())}
    for name, flat_starts in starts.items():
        for tensor in (state.tensors[name] for state in placeholders):
            start = start_of(places, tensor)
            if start is None and tensor.numel():  # an empty tensor has no start
                return None
            flat_starts.append(start)
    return starts


def frame_of(path: str, name: str, starts: Starts, shard: Shard) -> Frame:
    """Return the frame of a rank's file, which is at `path` and has holes for state; `name` is its final name."""
    # First byte of each state tensor of each piece, by names.
    starts_by_piece = {
        piece.name: {
            # A flat tensor without a start is empty, so that any start will do.
            state_name: (flat_starts[piece.flat] or 0) + piece.offset * _ITEM_BYTES
            for state_name, flat_starts in starts.items()
        }
        for piece in shard.pieces
    }
    # First byte of each flat tensor of state, which has as many elements as that of weights; the byte after its last.
    state_bounds = [
        (start, start + weight.numel() * _ITEM_BYTES)
        for flat_starts in starts.values()
        for start, weight in zip(flat_starts, shard.weights, strict=True)
        if start is not None
    ]
    return Frame.of(path, name, starts_by_piece, state_bounds)


Take = Callable[[int, int, Mapping[str, torch.Tensor]], None]
"""A function that is called with a run of a piece's state: the piece's number, the run's first element in it, and the
run of each state tensor by name; see `offload.Engine`'s `state.visit`."""


def write_state(files: Mapping[str, Starts], shard: Shard, visit: Callable[[Take, Sequence[str]], None]) -> None:
    """Write state, and rounded weights, into the holes of files.

    Args:
        files: By a file's path, where tensors belong in it.
        visit: Is given a function and names of tensors; it calls the function with each run of these. See `Take`.

    Raises:
        OSError: If a file cannot be written; the state is unharmed.
    """
    with contextlib.ExitStack() as opened:
        # For each tensor that a file has holes for: the open file, the tensor's name, its starts by flat tensor.
        targets = [
            (opened.enter_context(writable(path)), name, files[path][name]) for path in files for name in files[path]
        ]

        def take(number: int, first: int, views: Mapping[str, torch.Tensor]) -> None:
            """Write a run of a piece's state to each file that has its tensor."""
            piece = shard.pieces[number]
            for file, name, starts in targets:
                if (start := starts[piece.flat]) is not None:
                    write_at(file, bytes_of(views[name]), start + (piece.offset + first) * views[name].itemsize)

        visit(take, [name for _, name, _ in targets])


@dataclass
class SharedModel:
    """A model's file into which each rank writes its rounded masters as weights.

    Attributes:
        path: Its path when it is whole.
        starts: The byte at which this rank's part of each flat tensor of weights begins, None for one that the file
            does not have; empty if the file has all weights already.
        digests: Digests of these parts of the weights, made when the save began.
    """

    path: str
    starts: Sequence[int | None]
    digests: Sequence[torch.Tensor] = ()

    def is_written(self, path: str, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether this rank's part in a file equals, by its digests, the weights as the save began.

        Args:
            path: The file's path.
            weights: This rank's part of each flat tensor of weights, of which only the size is used.
        """
        with open(path, "rb") as file:
            for start, weight, saved in zip(self.starts, weights, self.digests, strict=True):
                if start is not None:
                    file.seek(start)
                    sizes = (
                        min(_DIGEST_BYTES, weight.nbytes - done) for done in range(0, weight.nbytes, _DIGEST_BYTES)
                    )
                    chunks = (torch.frombuffer(bytearray(file.read(nbytes)), dtype=torch.int32) for nbytes in sizes)
                    if not torch.equal(_sums_by_column(chunks, "cpu"), saved):
                        return False
        return True


def write_weights(path: str, starts: Sequence[int | None], weights: Sequence[torch.Tensor]) -> None:
    """Write flat tensors of weights, as they are now, to their holes in a file; `starts` has their first bytes there.

    Raises:
        OSError: If the file cannot be written.
    """
    with writable(path) as file:
        for start, weight in zip(starts, weights, strict=True):
            if start is not None:
                write_tensor(file, weight, start)


_DIGEST_BYTES = COLUMNS * 4 * 1024
"""Bytes that are summed at a time: 1024 rows of `COLUMNS` words of 4 bytes."""


def digest(flat: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor's digest: `COLUMNS` sums of its words, which differ almost surely if any bit differs."""
    return _sums_by_column(torch.split(flat.view(torch.int32), _DIGEST_BYTES // 4), flat.device).cpu()


def _sums_by_column(chunks: Iterable[torch.Tensor], device: Any) -> torch.Tensor:
    """Return sums by column of 32-bit words, each chunk taken as rows of `COLUMNS` words; sums wrap around.

    The last row of a chunk may be shorter.
    """
    sums = torch.zeros(COLUMNS, dtype=torch.int32, device=device)
    for words in chunks:
        rows = words[: words.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
        last_words = words[rows.numel() :]
        sums += rows.sum(0, dtype=torch.int32)
        sums[: last_words.numel()] += last_words
    return sums
