"""Reads files of the safetensors format: eight bytes with the header's size, a header in JSON, and the data."""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from operator import index
from typing import Any, NamedTuple

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

log = logging.getLogger("offload")

MOST_HEADER_BYTES = 100_000_000
"""Largest header that the format allows."""


class Entry(NamedTuple):
    """A tensor of a file. Its bytes are those from `begin` to before `end`, counted from the file's beginning."""

    begin: int
    end: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


Files = list[tuple[str | os.PathLike[str], list[Entry]]]
"""Files, each with its tensors."""


def entries_in(path: str | os.PathLike[str]) -> list[Entry]:
    """Return the tensors of a file, in the order of their data, by reading its header alone.

    Raises:
        ConfigError: It is no safetensors file, is cut short, or has an unknown dtype.
        OSError: It cannot be opened.
    """
    shown = os.fspath(path)
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        start = 8 + header_bytes
        try:
            if not 2 <= header_bytes <= min(MOST_HEADER_BYTES, nbytes - 8):  # JSON's shortest object is "{}"
                raise ValueError("no header")
            header = json.loads(file.read(header_bytes))
            entries = sorted(
                _parse_entry(start, name, each) for name, each in header.items() if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError("safetensors", shown, f"give a safetensors file of plain tensors: {error}") from error
    for begin, end, name, dtype, shape in entries:
        has_right_size = end - begin == math.prod(shape) * dtype.itemsize and min(shape, default=0) >= 0
        is_in_file = start <= begin <= end <= nbytes
        if not has_right_size or not is_in_file:
            raise ConfigError("safetensors", shown, f"give a whole file: {name} ends beyond it, or has another size")
    return entries


def tensors_in(path: str | os.PathLike[str], entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a file, given its `entries_in`.

    The tensors lie in a mapping of the file, so each is read from the drive as it is used. Writes to one do not reach
    the file.
    """
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for begin, end, name, dtype, shape in entries:
        if begin < end:
            count = math.prod(shape)
            yield name, torch.frombuffer(content, dtype=dtype, count=count, offset=begin).view(shape)
        else:  # `frombuffer` makes no empty tensor
            yield name, torch.empty(shape, dtype=dtype, device="cpu")


def checked(model: nn.Module, files: Iterable[str | os.PathLike[str]]) -> Files:
    """Return the entries of files, after checking that they fit the model; nothing but headers is read.

    The model has to have each tensor, in the same shape. Warn of the model's tensors on the meta device that no file
    has, and of those that have another dtype in the files.

    Raises:
        ConfigError: A file is no whole safetensors file, or has a tensor that the model lacks; or a buffer on the
            meta device is in no file and not persistent, so that no state dict has it, either.
        OSError: A file cannot be opened.
    """
    if isinstance(files, str | os.PathLike):
        raise ConfigError("safetensors", files, "give a list of files")
    targets = _tensors_by_name(model)
    contents = [(file, entries_in(file)) for file in files]
    for file, entries in contents:
        for entry in entries:
            target = targets.get(entry.name)
            if target is None or target.shape != entry.shape:
                has = "no such tensor" if target is None else f"shape {tuple(target.shape)}"
                what = f"{entry.name}, shape {entry.shape}, in {os.fspath(file)}"
                raise ConfigError("safetensors", what, f"give files of this model, which has {has}")
    all_entries = [entry for _, entries in contents for entry in entries]
    filled = {targets[entry.name] for entry in all_entries}  # the model's tensors that the files have values for
    tensors = (*model.named_parameters(), *model.named_buffers())
    missing = {name: tensor for name, tensor in tensors if tensor.is_meta and tensor.numel() and tensor not in filled}
    of_state_dict = {*model.parameters(), *_persistent_buffers(model)}
    # These buffers would be zeros: no file has values for them, and no state dict that is loaded later.
    if lost := [name for name, tensor in missing.items() if tensor not in of_state_dict]:
        advice = (
            "compute them before the call, or have parameters alone on the meta device, as accelerate's "
            "init_empty_weights() makes a model: they are not persistent, so no state dict and none of the files has "
            "their values"
        )
        raise ConfigError("buffers on the meta device", lost, advice)
    if contents and missing:  # without any files the caller fills the model by other means
        first = next(iter(missing))
        log.warning("%d weights and buffers are in none of the safetensors files, and zero: %s", len(missing), first)
    if other := [entry for entry in all_entries if entry.dtype != targets[entry.name].dtype]:
        name, dtype = other[0].name, other[0].dtype
        log.warning(
            "%d tensors have another dtype in the safetensors files, and are converted: %s from %s to %s",
            *(len(other), name, dtype, targets[name].dtype),
        )
    return contents


def read_into(model: nn.Module, files: Files, file: MappedFile | None = None) -> None:
    """Copy tensors of files to a model's tensors of the same names, one after another.

    Of a sharded tensor this rank's shard gets its part. dtypes are converted.

    Args:
        model: The model.
        files: What `checked` has returned.
        file: The mapped file that the model's weights may lie in. Each such weight is let go of once it was written,
            so that memory need not have room for all.
    """
    targets = _tensors_by_name(model)
    for path, entries in files:
        for name, tensor in tensors_in(path, entries):
            target = targets[name]
            if shards.is_dtensor(target):  # this rank's part
                tensor = tensor[tuple(slice(first, first + size) for first, size in shards.box_of(target))]
            elements = shards.local(target.detach())
            elements.copy_(tensor)
            if file is not None and file.holds(elements.data_ptr()):
                file.advise_unneeded(elements.data_ptr() - file.address, elements.nbytes, was_written=True)


def _tensors_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's weights and buffers by name; a tied one by all its names."""
    buffers = model.named_buffers(remove_duplicate=False)
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(buffers)}


def _persistent_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers that a model's state dict has."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _parse_entry(start: int, name: str, described: Any) -> Entry:
    """Return what a header says of a tensor; raises if `described` has not the parts that the format demands.

    `start` is where the file's data begins, in bytes: the header counts from there.
    """
    begin, end = map(index, described["data_offsets"])  # `index` raises for all but integers
    return Entry(start + begin, start + end, name, DTYPES[described["dtype"]], tuple(map(index, described["shape"])))
