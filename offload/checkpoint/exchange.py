"""Exports and imports checkpoints: safetensors, and `torch.distributed.checkpoint`.

Both ways are streamed: memory stays bounded by a few pieces, whatever the size of the state. Each parameter becomes
`state.<name>.exp_avg`, `.exp_avg_sq` and `.master` (fp32, in the parameter's shape) and `state.<name>.step`, the
names that `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` gives plain optimizers' state; `master`
is ours, and is taken from the weight if it is missing on import. Other rules have their own names for the moments; a
missing step count is 1 where the rule says so (`UpdateRule.missing_step`).

The format of a file is https://github.com/huggingface/safetensors: 8 bytes of header length, in little-endian order,
a JSON header, then the tensors' bytes in row-major order.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.checkpoint.manifest import check_metadata, check_text
from offload.checkpoint.reader import Checkpoint, Range
from offload.errors import CheckpointError
from offload.kernels.stored import store_rounded
from offload.memory.arenas import Arena
from offload.rules import NAMED, PACKED, UpdateRule
from offload.tiers.filesystem import replacing, working_in

PIECE_NUMEL = 4 << 20
"""Most elements that are written at once."""

READ_NUMEL = 1 << 16
"""Most elements that are read from a file at once."""

MAX_HEADER_BYTES = 100 << 20
_ITEM = np.dtype("<f4")
"""An element of a file: fp32, little-endian."""

Progress = Callable[[int, int], None]
"""Called with the bytes written so far, and all bytes."""


def export_safetensors(
    checkpoint: str | os.PathLike[str], target: str | os.PathLike[str], progress: Progress = lambda done, whole: None
) -> None:
    """Write a checkpoint's state as one safetensors file, which gets its name once it is complete.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the file not written.
    """
    path = Path(target)
    with Checkpoint(checkpoint) as opened:
        tensors_by_name = kept_tensors(opened, masters=True)
        # The header comes first in the file, so all shapes are collected before any state is read.
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensors in tensors_by_name.items():
            shapes |= {f"state.{name}.{tensor}": shape_of(opened, name) for tensor in tensors}
            shapes[f"state.{name}.step"] = ()
        header, nbytes = _header(shapes, {"__metadata__": {"format": "pt", "offload": json.dumps(_describe(opened))}})
        try:
            with replacing(path, f".{path.name}.partial") as file:
                file.write(header)
                done_bytes = 0
                for name, tensors in tensors_by_name.items():
                    for tensor in tensors:
                        for piece_bytes in in_rows(opened, name, tensor):
                            file.write(piece_bytes)
                            done_bytes += piece_bytes.nbytes
                            progress(done_bytes, nbytes)
                    done_bytes += file.write(np.array(opened.step_of(name), _ITEM).tobytes())
                    progress(done_bytes, nbytes)
        except OSError as cause:
            raise CheckpointError(f"cannot write {path}: {cause.strerror or cause}") from cause


def _header(shapes: Mapping[str, tuple[int, ...]], about: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the header of a file of fp32 tensors, and the bytes of all tensors together.

    Args:
        shapes: Shapes by key, in the order in which the tensors lie in the file.
        about: Entries about the file itself, which come first in the header.
    """
    header = dict(about)
    end = 0  # offsets count from the end of the header
    for key, shape in shapes.items():
        start = end
        end += math.prod(shape) * _ITEM.itemsize
        header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # so that tensors begin at multiples of 8
    return len(content).to_bytes(8, "little") + content, end


def kept_tensors(opened: Checkpoint, *, masters: bool) -> dict[str, tuple[str, ...]]:
    """Return the names of each parameter's state tensors, with `masters` or without.

    Raises:
        CheckpointError: State is packed: only the wrapped optimizer class knows which tensors it has.
    """
    first = 0 if masters else 1  # a rule's names begin with the master
    tensors_by_name = {name: opened.rule_of(name).names[first:] for name in opened.names}
    for name, tensors in tensors_by_name.items():
        if PACKED in tensors:
            kind = opened.rule_of(name).name
            raise CheckpointError(f"{opened.path} has state of {kind}: load it there, and save state_dict() instead")
    return tensors_by_name


def _describe(opened: Checkpoint) -> dict[str, Any]:
    """Return what an exported file says of its checkpoint beside the tensors: step and metadata."""
    return {"step": opened.step, "metadata": opened.metadata}


def shape_of(opened: Checkpoint, name: str) -> tuple[int, ...]:
    """Return a parameter's shape; one dimension where its writer gave none."""
    shape_and_stride = opened.shape_of(name)
    if shape_and_stride is None:
        return (opened.full_numel(name),)
    shape, _ = shape_and_stride
    return shape


def in_rows(opened: Checkpoint, name: str, tensor: str) -> Iterator[memoryview]:
    """Yield a state tensor's bytes in row-major order, in pieces of at most `PIECE_NUMEL` elements.

    Each piece is overwritten when the next is asked for. A tensor that has another order in memory is read whole, as
    a piece of its rows would lie all over it.
    """
    numel = opened.full_numel(name)
    shape_and_stride = opened.shape_of(name)
    if shape_and_stride is not None:
        no_memory = torch.empty_strided(*shape_and_stride, dtype=torch.float32, device="meta")  # only to ask torch
        if not no_memory.is_contiguous():
            whole = torch.empty(numel, dtype=torch.float32, device="cpu")
            opened.read([Range(name, tensor, 0, whole)])
            yield _bytes_of(whole.as_strided(*shape_and_stride).contiguous())
            return
    with contextlib.closing(Arena(PIECE_NUMEL * _ITEM.itemsize)) as arena:  # malloc would keep the memory
        for start in range(0, numel, PIECE_NUMEL):
            piece = arena.tensor(0, min(PIECE_NUMEL, numel - start), torch.float32)
            opened.read([Range(name, tensor, start, piece)])
            yield _bytes_of(piece)


class SafetensorsSource:
    """A safetensors file to load state from; see `offload.checkpoint.reader.StateSource`.

    Raises:
        CheckpointError: The file is no safetensors file, is damaged, or holds no optimizer state.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.last_version = 0  # a file has no tiles, so no versions
        self._strides: Mapping[str, tuple[int, ...]] = {}
        self._entries: dict[str, tuple[tuple[int, ...], int]] = {}
        """Shape of each tensor in the file, and where its bytes begin."""
        try:
            size = os.path.getsize(self.path)
            with open(self.path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > min(size - 8, MAX_HEADER_BYTES):
                    raise CheckpointError(f"{self.path} is damaged, or no safetensors file: its header is too long")
                header = json.loads(file.read(length))
        except (OSError, ValueError, RecursionError) as cause:
            raise CheckpointError(f"{self.path} cannot be read as safetensors: {cause}") from cause
        try:
            about = self._read_header(header, 8 + length, size)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
            raise CheckpointError(f"{self.path} is damaged: {cause!r}") from cause
        self._rules = self._find_rules()
        self.names = [*self._rules]
        counts = [self.step_of(name) for name in self.names]  # raises before anything is loaded if one is wrong
        self.step = about.get("step", max(counts))  # a file of another writer does not give it
        if type(self.step) is not int or not 0 <= self.step < 1 << 62:
            raise CheckpointError(f"{self.path} is damaged: step is {str(self.step)[:60]}")
        self.metadata: dict[str, Any] = about.get("metadata", {})

    def _read_header(self, header: Any, base: int, size: int) -> dict[str, Any]:
        """Check a file's header and note its tensors in `_entries`; return what `_describe` has written.

        `base` is where tensors begin in the file, and `size` the bytes of the file.
        """
        about: dict[str, Any] = {}
        for name, entry in header.items():
            if name == "__metadata__":  # the format's own entry, of texts; "offload" is ours
                about = json.loads(entry.get("offload", "{}"))
                continue
            start, stop = entry["data_offsets"]
            shape = tuple(entry["shape"])
            sizes = [start, stop, *shape]
            # By `type`: JSON's true and false are instances of int, too.
            if not all(type(count) is int and 0 <= count < 1 << 62 for count in sizes) or len(sizes) > 64:
                raise CheckpointError(f"{self.path} is damaged: the sizes of {check_text(name)} are no sizes")
            if entry["dtype"] != "F32" or stop - start != math.prod(shape) * 4 or stop > size - base:
                raise CheckpointError(f"{self.path}: {check_text(name)} is not fp32, or does not lie in the file")
            self._entries[check_text(name)] = shape, base + start
        if not isinstance(about, dict) or not isinstance(about.get("metadata", {}), dict):
            raise CheckpointError(f"{self.path} is damaged: what it says of itself is no object")
        check_metadata(about)
        return about

    def _find_rules(self) -> dict[str, UpdateRule]:
        """Return the rule of each parameter, told by the names of its tensors: a file does not name rules.

        Of the rules whose state tensors are all there, it is the one with most: Lion's `exp_avg` is there where
        AdamW's `exp_avg` and `exp_avg_sq` are. Parameters that have no rule's state are left out.
        """
        tensors_by_name: dict[str, set[str]] = {}
        for key in self._entries:  # such as "state.layers.0.weight.exp_avg"
            name, _, tensor = key.removeprefix("state.").rpartition(".")
            if key.startswith("state."):
                tensors_by_name.setdefault(name, set()).add(tensor)
        rules = {}
        for name, tensor_names in tensors_by_name.items():
            candidates = [rule for rule in NAMED.values() if tensor_names.issuperset(rule.state)]
            if candidates:
                rules[name] = max(candidates, key=lambda rule: len(rule.state))
        if not rules:
            names = " or ".join(dict.fromkeys(rule.state[0] for rule in NAMED.values()))
            raise CheckpointError(
                f"{self.path} holds no optimizer state: there is no state.<parameter>.{names} in it"
            )
        return rules

    def full_numel(self, name: str) -> int:
        """Return the number of elements of a parameter."""
        return int(np.prod(self._shape_of_state(name), dtype=np.int64))

    def use_strides(self, strides: Mapping[str, tuple[int, ...]]) -> None:
        """Set parameters' strides, by name: `read` gives state in that order of memory. The file is row-major."""
        self._strides = strides

    def shape_of(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides of a parameter: the strides of `use_strides`, else row-major ones."""
        shape = self._shape_of_state(name)
        row_major = tuple(torch.empty(shape, dtype=torch.float32, device="meta").stride())
        strides = self._strides.get(name, row_major)
        # `use_strides` has those of the session's weights; the file's tensor may have another number of dimensions.
        return shape, strides if len(strides) == len(shape) else row_major

    def _shape_of_state(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter's first state tensor, which is the parameter's."""
        shape, _ = self._entries[f"state.{name}.{self._rules[name].state[0]}"]
        return shape

    def rule_of(self, name: str) -> UpdateRule:
        """Return the rule whose state a parameter has, as `_find_rules` tells it by the tensors' names."""
        return self._rules[name]

    def keeps(self, name: str, rule: UpdateRule) -> bool:
        """Return whether a parameter has the state of a rule; rules with tensors of the same names count as one."""
        return self._rules[name].state == rule.state

    @property
    def rounding(self) -> None:
        """None: a file of tensors says nothing of stochastic rounding."""
        return None

    def step_of(self, name: str) -> int:
        """Return the number of updates that a parameter has had."""
        key = f"state.{name}.step"
        if key not in self._entries:
            missing_step = self._rules[name].missing_step
            if missing_step is not None:
                return missing_step
            raise CheckpointError(f"{self.path}: {key} is missing")
        _, start = self._entries[key]
        with open(self.path, "rb") as file:
            step = float(np.frombuffer(os.pread(file.fileno(), 4, start), _ITEM)[0])
        if not 0 <= step < 1 << 62 or step != int(step):
            raise CheckpointError(f"{self.path} is damaged: {key} is {step}")
        return int(step)

    def has(self, name: str, tensor: str) -> bool:
        """Return whether a state tensor is there."""
        return f"state.{name}.{tensor}" in self._entries

    def mapped(self, key: str) -> npt.NDArray[np.float32]:
        """Return a flat array over the mapped file; its pages are read when they are used."""
        shape, start = self._entries[key]
        nbytes = int(np.prod(shape, dtype=np.int64)) * _ITEM.itemsize
        return self._memory[start : start + nbytes].view(_ITEM)

    @cached_property
    def _memory(self) -> npt.NDArray[np.uint8]:
        """The whole file, mapped once: a process may have 65,530 mappings."""
        return np.memmap(self.path, np.uint8, mode="c")  # torch wants to be allowed to write

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in the file."""
        return {key: shape for key, (shape, _) in self._entries.items()}

    def read(self, ranges: Sequence[Range]) -> None:
        """Read ranges of state tensors, `READ_NUMEL` elements at a time, rounded to the dtype of their `out`.

        The file is not read through its mapping, whose pages would count as this process's memory.
        """
        buffer = torch.empty(READ_NUMEL, dtype=torch.float32, device="cpu")
        try:
            with open(self.path, "rb", buffering=0) as file:
                for item in ranges:
                    key = f"state.{item.name}.{item.tensor}"
                    if key not in self._entries:
                        raise CheckpointError(f"{self.path}: {key} is missing")
                    _, begin = self._entries[key]
                    is_never_negative = item.tensor in self._rules[item.name].roots
                    in_order = self._read_in_order(file, item, begin)  # None: the range is one run of the file
                    file.seek(begin + item.start * _ITEM.itemsize)
                    for start in range(0, item.out.numel(), READ_NUMEL):
                        out = item.out[start : start + READ_NUMEL]
                        values = buffer[: out.numel()]
                        if in_order is None:
                            _fill(file, values)
                        else:
                            values.copy_(in_order[start : start + READ_NUMEL])
                        if is_never_negative and bool((values < 0).any()):
                            raise CheckpointError(f"{self.path} is damaged: {key} has negative elements")
                        store_rounded(values, out)
        except (OSError, EOFError) as cause:
            raise CheckpointError(f"{self.path} cannot be read: {cause}") from cause

    def _read_in_order(self, file: io.FileIO, item: Range, begin: int) -> torch.Tensor | None:
        """Return a range's elements in the parameter's order of memory; None if that is row-major, as the file is.

        In another order the range's elements may lie anywhere in the file, so the whole tensor is read. `begin` is
        where the tensor's bytes begin in the file.
        """
        shape, strides = self.shape_of(item.name)
        in_order = torch.empty_strided(shape, strides, dtype=torch.float32, device="meta")
        if in_order.is_contiguous():
            return None
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        file.seek(begin)
        _fill(file, whole)
        # `copy_` goes by index, so it puts elements in the order of the strides; `as_strided` reads memory flat.
        flat = torch.empty_like(in_order, device="cpu").copy_(whole).as_strided((whole.numel(),), (1,))
        return flat[item.start : item.start + item.out.numel()]

    def use_read_buffer(self, address: int, nbytes: int) -> None:
        """Ignore lent memory: the buffer of this source is small."""


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the memory of a tensor that is contiguous."""
    return memoryview(values.view(-1).numpy().view(np.uint8).data)


def _fill(file: io.FileIO, values: torch.Tensor) -> None:
    """Fill a contiguous tensor with a file's bytes from its current position on."""
    unread = _bytes_of(values)
    while unread:
        count = file.readinto(unread)
        if not count:
            raise EOFError("it ends too early")
        unread = unread[count:]


def export_distributed(checkpoint: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write a checkpoint's state as a `torch.distributed.checkpoint` folder.

    The state goes to a temporary safetensors file beside the folder first. torch saves tensors, not streams, and
    tensors over that file, mapped, take no memory of their own.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the folder not written.
    """
    dcp = importlib.import_module("torch.distributed.checkpoint")

    folder = Path(target)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The name is cut, as a file system limits its length.
        with working_in(folder.with_name(f".{folder.name[:100]}.partial")) as scratch:
            file = scratch / "state.safetensors"
            export_safetensors(checkpoint, file)
            source = SafetensorsSource(file)
            # Tensors over the mapped file: pages come and go as torch writes them.
            state = {
                key: torch.from_numpy(source.mapped(key)).reshape(shape) for key, shape in source.tensors.items()
            }
            with _silencing_single_process():
                dcp.save(state, checkpoint_id=folder, no_dist=True)
    except (OSError, dcp.api.CheckpointException) as cause:
        raise CheckpointError(f"{folder} cannot be written: {cause}") from cause


@contextlib.contextmanager
def _silencing_single_process() -> Iterator[None]:
    """Silence torch's warning that there is only one process: that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def import_distributed(path: str | os.PathLike[str], scratch: str | os.PathLike[str]) -> SafetensorsSource:
    """Copy the optimizer state of a `torch.distributed.checkpoint` folder to a safetensors file; return its source.

    Args:
        path: The folder; state lies under `state.<parameter>.exp_avg` and so on, under any prefix.
        scratch: File to be made, as large as the state.

    Raises:
        CheckpointError: The path is no such folder, or holds no optimizer state, or there is no room for the file.
    """
    dcp = importlib.import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as cause:  # torch unpickles the metadata, which may raise anything
        raise CheckpointError(f"{os.fspath(path)} cannot be read as a distributed checkpoint: {cause}") from cause
    shapes: dict[str, tuple[int, ...]] = {}
    keys_in_folder: dict[str, str] = {}
    for key, entry in entries.items():
        # Keys are such as "optim.state.layers.0.weight.exp_avg"; the prefix may be empty, so a dot goes before it.
        _, separator, state_name = f".{key}".partition(".state.")
        if separator and isinstance(entry, TensorStorageMetadata):
            shapes[f"state.{state_name}"] = tuple(entry.size)
            keys_in_folder[f"state.{state_name}"] = key
    header, nbytes = _header(shapes, {})
    _make_file(scratch, header, nbytes, copy_of=path)
    if nbytes:  # else there is nothing to load
        # `dcp.load` fills the tensors that it is given. Here they are views of the mapped file.
        memory = np.memmap(scratch, np.uint8, mode="r+")
        state: dict[str, Any] = {}
        end = len(header)
        for name, shape in shapes.items():
            start = end
            end += math.prod(shape) * _ITEM.itemsize
            state[keys_in_folder[name]] = torch.from_numpy(memory[start:end].view(_ITEM)).reshape(shape)
        with _silencing_single_process():
            dcp.load(state, checkpoint_id=path, no_dist=True)
        memory.flush()
    return SafetensorsSource(scratch)


def _make_file(path: str | os.PathLike[str], header: bytes, nbytes: int, *, copy_of: str | os.PathLike[str]) -> None:
    """Make a file of a header and room for `nbytes`; `CheckpointError`, naming `copy_of`, if there is no room."""
    with open(path, "wb") as file:
        file.write(header)
        try:  # a page without room would end the process, by SIGBUS
            os.posix_fallocate(file.fileno(), 0, len(header) + nbytes)
        except OSError as cause:
            text = f"no room for a copy of {os.fspath(copy_of)} beside {os.fspath(path)}"
            raise CheckpointError(f"{text} ({len(header) + nbytes} bytes): {cause.strerror}") from cause
