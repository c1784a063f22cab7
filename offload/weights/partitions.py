"""Partitions of weights in files: what a framework leaves each rank of its weights, to be gathered when it is used.

The framework keeps its tensors, which are given other memory: a mapped file (`offload.weights.mapping`). It says when
it is about to gather some, and what is gathered next is brought meanwhile.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

import torch
from torch import nn

from offload.units import format_bytes
from offload.weights.layers import own_parameters, units
from offload.weights.mapping import PAGE_BYTES, Layers, MappedFile, joined, up

log = logging.getLogger("offload")

FIRST_BYTES, LARGEST_BYTES = 16 << 20, 1 << 30
"""Of files that come one after another, while nobody knows how many tensors do; each has twice the size of the last."""


def room_for(sizes: Iterable[int]) -> int:
    """Return the bytes that tensors of these sizes take in a file."""
    return sum(map(up, sizes))


class Partitions:
    """Tensors of one file, one after another.

    Args:
        folder: An existing folder on the drive.
        nbytes: `room_for` them.

    Raises:
        ConfigError: The folder cannot be used.
        TierFullError: There is no room.
    """

    def __init__(self, folder: str | os.PathLike[str], nbytes: int) -> None:
        self._file = MappedFile(folder, up(max(nbytes, 1), PAGE_BYTES))
        self._used = 0
        self._numbers: dict[int, int] = {}
        """Of the layer that a tensor is in, by the tensor's address."""
        self._layers, self._last = Layers(self._file, []), -1

    def has_room(self, nbytes: int) -> bool:
        """Return whether a tensor of that size still fits."""
        return self._used + nbytes <= self._file.nbytes

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat tensor, of zeros."""
        offset = self._used
        self._used += up(numel * dtype.itemsize)
        return self._file.tensor(offset, numel, dtype)

    @torch.no_grad()
    def move(self, tensor: torch.Tensor) -> None:
        """Have a flat tensor lie here; it is the same object."""
        offset, place = self._used, self.take(tensor.numel(), tensor.dtype)
        tensor.data = place.copy_(tensor)
        self._file.let_go(offset, tensor.nbytes, was_written=True)

    def follow(self, model: nn.Module, part_of: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Bring tensors by layers of a model from now on: what is used together, in the order of the passes.

        Args:
            model: Whose they are.
            part_of: Returns a parameter's, which may lie elsewhere.
        """
        ranges: list[list[tuple[int, int]]] = []
        for number, modules in enumerate(units(model)):
            parts = (part_of(each) for module in modules for each in own_parameters(module).values())
            places = {part.data_ptr(): part.nbytes for part in parts if self._has(part)}
            ranges.append(joined((address - self._file.address, nbytes) for address, nbytes in places.items()))
            self._numbers.update(dict.fromkeys(places, number))
        self._layers = Layers(self._file, ranges)
        self._file.let_go(0, self._file.nbytes, was_written=True)
        said = format_bytes(self._used), self._file.folder, len(self._numbers), len(ranges)
        log.info("%s of partitions lie in a file in %s: %d, used in %d layers", *said)

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Bring the layers of tensors that are about to be read, and begin with what came after them last time.

        Raises:
            TierError: See `MappedFile.bring`.
        """
        for tensor in tensors:
            number = self._numbers.get(tensor.data_ptr(), self._last)
            if number != self._last:
                self._layers.begin(number)
                self._last = number

    def note_written(self) -> None:
        """Note that an update has had all written, and let go of them."""
        self._last = -1

    def _has(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and 0 < tensor.numel() and 0 <= tensor.data_ptr() - self._file.address < self._used


class GrowingPartitions:
    """Files for tensors that come one after another; a file goes with the last tensor that lies there.

    Args:
        open_file: Returns a new file with so much room, or raises.
    """

    def __init__(self, open_file: Callable[[int], Partitions]) -> None:
        self._open_file, self._next_bytes = open_file, FIRST_BYTES
        self._last: Partitions | None = None

    def move(self, tensor: torch.Tensor) -> None:
        """Have a flat tensor lie in a file; see `Partitions.move`."""
        if self._last is None or not self._last.has_room(tensor.nbytes):
            self._last = None
            self._last = self._open_file(max(self._next_bytes, tensor.nbytes))
            self._next_bytes = min(2 * self._next_bytes, LARGEST_BYTES)
        self._last.move(tensor)

    def close(self) -> None:
        """Take no more into the last file, which tensors may leave."""
        self._last = None
