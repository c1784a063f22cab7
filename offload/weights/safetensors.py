"""Tensors in a file of the safetensors format, read by its header: eight bytes of its size, JSON, and the data."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from offload.errors import ConfigError
from offload.optim import shards
from offload.weights.mapping import MappedFile

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


def tensors_in(path: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each, in the file's order; it is read when the tensor is, and valid as long as that.

    Raises:
        ConfigError: It is no such file, is cut short, or has a dtype that is not known.
        OSError: It cannot be opened.
    """
    shown = os.fspath(path)
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        try:
            if not 2 <= header_bytes <= min(MOST_HEADER_BYTES, nbytes - 8):
                raise ValueError("no header")
            header = json.loads(file.read(header_bytes))
            entries = sorted(
                (*each["data_offsets"], name, DTYPES[each["dtype"]], tuple(each["shape"]))
                for name, each in header.items()
                if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("safetensors", shown, f"give a safetensors file of plain tensors: {error}") from error
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + header_bytes
    for begin, end, name, dtype, shape in entries:
        numel = torch.Size(shape).numel()
        if end - begin != numel * dtype.itemsize or not 0 <= begin <= end <= nbytes - start:
            raise ConfigError("safetensors", shown, f"give a whole file: {name} ends beyond it, or has another size")
        if numel:
            yield name, torch.frombuffer(content, dtype=dtype, count=numel, offset=start + begin).view(shape)
        else:
            yield name, torch.empty(shape, dtype=dtype, device="cpu")


def read_into(model: nn.Module, files: Iterable[str | os.PathLike[str]], file: MappedFile | None = None) -> None:
    """Read tensors of files into a model, one after another; of what is sharded this rank's part.

    Args:
        model: The model; its own tensors have these names.
        files: Such files.
        file: Where its weights lie, as far as they do: each is written there behind being read.

    Raises:
        ConfigError: See `tensors_in`, or a file has what the model has not; what came before has been read.
        OSError: See `tensors_in`.
    """
    targets = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for each in files:
        for name, tensor in tensors_in(each):
            target = targets.get(name)
            if target is None or target.shape != tensor.shape:
                found = "no such tensor" if target is None else f"shape {tuple(target.shape)}"
                what = f"{name}, shape {tuple(tensor.shape)}, in {os.fspath(each)}"
                raise ConfigError("safetensors", what, f"give files of this model, which has {found}")
            if shards.is_sharded(target):
                tensor = tensor[tuple(slice(first, first + size) for first, size in shards.box_of(target))]
            mine = shards.local(target.detach())
            mine.copy_(tensor)
            if file is not None and 0 <= (offset := mine.data_ptr() - file.address) < file.nbytes:
                file.let_go(offset, mine.nbytes, was_written=True)
