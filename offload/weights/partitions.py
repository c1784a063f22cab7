"""Partitions in a file. A partition is a rank's part of a weight that a framework gathers for its use (ZeRO-3).

The framework keeps its tensor objects; their memory is moved to a mapped file (`offload.weights.mapping`). When it is
about to gather some, it calls `Partitions.begin`, which reads their layer, and the layer expected next ahead.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from offload.units import format_bytes
from offload.weights.layers import own_parameters, units
from offload.weights.mapping import PAGE_BYTES, LayerReadAhead, MappedFile, joined, up

log = logging.getLogger("offload")


class Partitions:
    """Flat tensors in one file, one after another; the file is freed with the last tensor.

    Args:
        folder: An existing folder on the drive.
        sizes: Bytes of each tensor.

    Raises:
        ConfigError: The folder cannot be used.
        TierFullError: There is no room.
    """

    def __init__(self, folder: str | os.PathLike[str], sizes: Iterable[int]) -> None:
        # At least a page, as an empty file cannot be mapped.
        self._file = MappedFile(folder, up(max(sum(map(up, sizes)), 1), PAGE_BYTES))
        self._used = 0  # bytes of the file that have been allocated, from its beginning
        self._layers = LayerReadAhead(self._file, [])  # no layers until `use_layers`
        self._last = -1  # the layer that was used last; -1 for none
        self._numbers: dict[int, int] = {}
        """Number of the layer that a tensor is in, by the tensor's address."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat tensor in the file, of zeros, as the file is new; `sizes` have left room for it."""
        offset = self._used
        self._used += up(numel * dtype.itemsize)
        return self._file.tensor(offset, numel, dtype)

    @torch.no_grad()
    def move(self, tensor: torch.Tensor) -> None:
        """Move a tensor's memory to the file; it stays the same object."""
        offset = self._used
        place = self.allocate(tensor.numel(), tensor.dtype)
        tensor.data = place.copy_(tensor)
        self._file.advise_unneeded(offset, tensor.nbytes, was_written=True)

    @staticmethod
    def trim_heap() -> None:
        """Give the old memory of moved tensors back to the system; glibc may keep all of it as free blocks."""
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it; others may not
        if malloc_trim is not None:
            malloc_trim(0)

    def use_layers(self, model: nn.Module, part_of: Callable[[Any], torch.Tensor]) -> None:
        """Read tensors by the model's layers from now on: `begin` reads a whole layer, and the next one ahead.

        Args:
            model: The model whose partitions lie here.
            part_of: Returns a parameter's partition, which may also lie elsewhere.
        """
        ranges: list[list[tuple[int, int]]] = []
        for number, modules in enumerate(units(model)):
            parts = (part_of(each) for module in modules for each in own_parameters(module).values())
            places = {part.data_ptr(): part.nbytes for part in parts if self._has(part)}
            ranges.append(joined((address - self._file.address, nbytes) for address, nbytes in places.items()))
            self._numbers.update(dict.fromkeys(places, number))
        self._layers = LayerReadAhead(self._file, ranges)
        self._file.advise_unneeded(0, self._file.nbytes, was_written=True)  # all of it, until layers are read
        said = format_bytes(self._used), os.fspath(self._file.folder), len(self._numbers), len(ranges)
        log.info("%s of partitions lie in a file in %s: %d, used in %d layers", *said)

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until the layers of these tensors, to be read now, are in memory; read ahead the layer expected next.

        Raises:
            TierError: A layer cannot be read.
        """
        for tensor in tensors:
            number = self._numbers.get(tensor.data_ptr(), self._last)  # one that lies elsewhere needs no layer
            if number != self._last:
                self._layers.begin(number)
                self._last = number

    def note_written(self) -> None:
        """Note that an update has let go of all layers, so that the last one is read again at its next use."""
        self._last = -1

    def _has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the file."""
        return tensor.is_cpu and tensor.numel() > 0 and self._file.holds(tensor.data_ptr())
