"""Tensors in a file of the safetensors format, read by its header: eight bytes of its size, JSON, and the data."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from operator import index
from typing import Any, NamedTuple

import torch

from offload.errors import ConfigError

DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}

MOST_HEADER_BYTES = 100_000_000
"""What the format allows."""


class Entry(NamedTuple):
    """A tensor in a file, and where it lies there."""

    begin: int
    end: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def entries_in(path: str | os.PathLike[str]) -> list[Entry]:
    """Return the tensors of a file, in its order, by its header alone.

    Raises:
        ConfigError: It is no such file, is cut short, or has a dtype that is not known.
        OSError: It cannot be opened.
    """
    shown = os.fspath(path)
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        start = 8 + header_bytes
        try:
            if not 2 <= header_bytes <= min(MOST_HEADER_BYTES, nbytes - 8):
                raise ValueError("no header")
            header = json.loads(file.read(header_bytes))
            entries = sorted(_entry(start, name, each) for name, each in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError("safetensors", shown, f"give a safetensors file of plain tensors: {error}") from error
    for begin, end, name, dtype, shape in entries:
        size = math.prod(shape) * dtype.itemsize
        if end - begin != size or not start <= begin <= end <= nbytes or min(shape, default=0) < 0:
            raise ConfigError("safetensors", shown, f"give a whole file: {name} ends beyond it, or has another size")
    return entries


def tensors_in(path: str | os.PathLike[str], entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each; it is read when the tensor is, and valid as long as that.

    Args:
        path: The file.
        entries: What `entries_in` has found there.
    """
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for begin, end, name, dtype, shape in entries:
        if begin < end:
            count = math.prod(shape)
            yield name, torch.frombuffer(content, dtype=dtype, count=count, offset=begin).view(shape)
        else:
            yield name, torch.empty(shape, dtype=dtype, device="cpu")


def _entry(start: int, name: str, described: Any) -> Entry:
    begin, end = map(index, described["data_offsets"])
    return Entry(start + begin, start + end, name, DTYPES[described["dtype"]], tuple(map(index, described["shape"])))
