"""DeepSpeed's own checkpoint files, whose bytes of state go from the engine to the file without a copy in memory.

DeepSpeed pickles tensors that have the right shape and no memory behind them, under `torch.serialization.skip_data`:
that leaves the file as it should be, with holes where the state belongs. The engine then writes each run of state to
its place, in the order that suits it.

Not here: what DeepSpeed's layout is. Whatever it makes of the tensors that it is lent, views of them are found again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch.utils import _pytree

from offload.integrations.deepspeed.in_place import Frame
from offload.integrations.deepspeed.shard import STATE, FlatState, Shard

_NO_RESERVE = 0x4000  # mmap has no name for it before Python 3.13
_ITEM_BYTES = 4


def can_stream(checkpoint_engine: Any) -> bool:
    """Return whether a checkpoint engine of DeepSpeed's writes with `torch.save` to a zip file of its own."""
    return type(checkpoint_engine) is TorchCheckpointEngine and bool(checkpoint_engine.zipfile_serialization)


def without_memory(numel: int) -> torch.Tensor:
    """Return fp32 zeros that take address space only, as long as nobody writes to them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    space = mmap.mmap(-1, max(numel, 1) * _ITEM_BYTES, flags=flags)
    if not numel:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    return torch.frombuffer(space, dtype=torch.float32, count=numel)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _bytes(flat: torch.Tensor) -> memoryview:
    elements: Any = flat.numpy()
    return memoryview(elements).cast("B")


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


Starts = list[list[int | None]]
"""Where each state tensor of each flat tensor begins in a file; None for one without elements."""


def fill(path: str, pickled: Any, find: Callable[[Any], Any], lent: Sequence[FlatState]) -> Starts | None:
    """Write the bytes of all tensors but those of state into a file that was saved without them.

    Args:
        path: The file.
        pickled: What was saved, or the part of it that has all the tensors.
        find: Returns that part of what is loaded from the file.
        lent: The tensors without memory among them, one row for each flat tensor of the shard.

    Returns:
        Where state belongs; None, with nothing written, if some tensor's place in the file cannot be told.

    Raises:
        OSError: If the file cannot be written.
    """
    loaded = find(torch.load(path, map_location="meta", weights_only=False))
    offsets = [int(tensor.untyped_storage()._checkpoint_offset or 0) for tensor in _tensors(loaded)]
    tensors = list(_tensors(pickled))
    with zipfile.ZipFile(path) as archive:
        records = sum("/data/" in name for name in archive.namelist())
    place = {tensor.untyped_storage().data_ptr(): offset for tensor, offset in zip(tensors, offsets, strict=True)}
    starts = [[place.get(getattr(state, name).data_ptr()) for name in STATE] for state in lent]
    of_state = {start for row in starts for start in row}
    if len(set(offsets)) != records or (None in of_state and any(state.master.numel() for state in lent)):
        return None
    with _opened(path) as file:
        for tensor, offset in zip(tensors, offsets, strict=True):
            if offset not in of_state:
                elements = torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                _write(file, _bytes(elements.cpu()), offset)
    return starts


def frame_of(path: str, name: str, starts: Starts, shard: Shard) -> Frame:
    """Return what a file that was saved without state is otherwise.

    Args:
        path: The file.
        name: What it is called when it is whole.
        starts: Where each state tensor begins in it.
        shard: Whose pieces they are.
    """
    known = [[start or 0 for start in row] for row in starts]
    pieces = {
        piece.name: {
            name: start + piece.offset * _ITEM_BYTES for name, start in zip(STATE, known[piece.flat], strict=True)
        }
        for piece in shard.pieces
    }
    state = [
        (start, start + weight.numel() * _ITEM_BYTES)
        for row, weight in zip(known, shard.weights, strict=True)
        for start in row
        if start
    ]
    return Frame.of(path, name, pieces, state)


Take = Callable[[int, int, Mapping[str, torch.Tensor]], None]
"""Takes a run of a piece's state; see `offload.Engine`'s `state.visit`."""


def write_state(path: str, starts: Starts, shard: Shard, visit: Callable[[Take], None]) -> None:
    """Write the bytes of state.

    Args:
        path: The file.
        starts: Where each state tensor begins in it.
        shard: Whose pieces they are.
        visit: Hands out the state.

    Raises:
        OSError: If the file cannot be written; the state is unharmed.
    """
    with _opened(path) as file:

        def take(number: int, first: int, views: Mapping[str, torch.Tensor]) -> None:
            piece = shard.pieces[number]
            for name, start in zip(STATE, starts[piece.flat], strict=True):
                if start is not None:
                    offset = start + (piece.offset + first) * _ITEM_BYTES
                    _write(file, _bytes(views[name]), offset)

        visit(take)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_WRONLY)
    try:
        yield file
    finally:
        os.close(file)
