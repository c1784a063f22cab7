"""Writes files of `torch.save` without tensors' bytes first, and fills in the bytes afterwards.

So state that is larger than memory can be put into a file that `torch.load` reads, without a second file:

1. The caller makes tensors of the right shapes that take no memory (`without_memory`).
2. `save_with_holes` saves the object with them. The file is complete but for holes where tensors' bytes belong.
3. `fill` writes the bytes of the other tensors, and says where in the file each storage begins.
4. The caller writes the remaining bytes there, piece by piece.

The checksums of tensors in the zip file stay 0; torch does not read them.

Not here: the structure of what is saved. The tensors of any pickled object are found again by their storages.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE; `mmap` has no name for it before Python 3.13
_ITEM_BYTES = 4  # of an fp32 element
_PIECE_NUMEL = 8 << 20  # most elements that are copied to the host at once


def without_memory(numel: int) -> torch.Tensor:
    """Return flat fp32 zeros that take address space only, as long as nobody writes to them.

    They are a private anonymous mapping, for which the system reserves no memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    space = mmap.mmap(-1, max(numel, 1) * _ITEM_BYTES, flags=flags)
    if not numel:  # which `frombuffer` refuses
        return torch.empty(0, dtype=torch.float32, device="cpu")
    return torch.frombuffer(space, dtype=torch.float32, count=numel)


def save_with_holes(content: Any, file: Any) -> None:
    """Save as `torch.save(content, file)`, with holes for the bytes of all tensors.

    `torch.save` first pickles the content, then writes the tensors' bytes. torch's `skip_data`, which leaves holes,
    is turned on between the two, by a pickler of our own. If it were on before, it would apply to pickling, too: an
    object may call `torch.save` itself in its `__getstate__`, and what it saves there has to be whole.
    """
    with contextlib.ExitStack() as skipping:

        class Pickler(pickle.Pickler):
            """Pickles as usual, then has torch skip the tensors' bytes, which it writes next."""

            def dump(self, value: Any) -> None:
                """See `pickle.Pickler.dump`."""
                super().dump(value)
                skipping.enter_context(torch.serialization.skip_data())

        pickling = ModuleType("pickling")  # stands for `pickle`, of which torch uses only `Pickler` to save
        pickling.Pickler = Pickler  # type: ignore[attr-defined]
        torch.save(content, file, pickle_module=pickling)


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor in host memory."""
    elements: Any = flat.view(torch.uint8).numpy()
    return memoryview(elements)


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all bytes to a place in a file, given its descriptor."""
    while data:
        written = os.pwrite(file, data, offset)
        data = data[written:]
        offset += written


def write_tensor(file: int, tensor: torch.Tensor, offset: int) -> None:
    """Write a flat tensor of any device, piece by piece, to a place in a file."""
    for piece in torch.split(tensor, _PIECE_NUMEL):
        write_at(file, bytes_of(piece.cpu()), offset)
        offset += piece.nbytes


class _Storages(pickle.Pickler):
    """Collects the storages of all tensors in an object, in the order in which `torch.save` numbers them.

    It pickles the object as `torch.save` does, which numbers storages as pickling meets them; the pickle is thrown
    away.

    Attributes:
        storages: By their address; see `Places`.
    """

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL)
        self.storages: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> str | None:
        """Called by `dump` for each object: note a storage, and keep its bytes out of the pickle."""
        storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
        if not isinstance(storage, torch.UntypedStorage):
            return None
        self.storages.setdefault(storage._cdata, storage)
        return "storage"  # any name will do, as nobody reads the pickle


def _storages(pickled: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages in an object by their address; {} if the object cannot be pickled a second time."""
    pickler = _Storages()
    with contextlib.suppress(Exception):
        pickler.dump(pickled)
        return pickler.storages
    return {}


Places = dict[int, int]
"""Where storages begin in a file, in bytes, by their address (`UntypedStorage._cdata`)."""


def fill(path: str, pickled: Any, left_out: Iterable[torch.Tensor]) -> Places | None:
    """Write the bytes of the tensors in `pickled` into a file in which `torch.save` has left holes for them.

    Args:
        path: The file.
        pickled: The object that was saved in it.
        left_out: Tensors in it, each a single run of memory, that stay holes.

    Returns:
        Where each storage begins in the file; None, with nothing written, if the file does not match the object.

    Raises:
        OSError: If the file cannot be written.
    """
    storages = _storages(pickled)
    places = _find_places(path, storages)
    if places is None:
        return None
    # Holes of each storage: first byte and end, counted from the storage's start.
    holes: dict[int, list[tuple[int, int]]] = {address: [] for address in storages}
    for tensor in left_out:
        holes_of_storage = holes.get(tensor.untyped_storage()._cdata)
        if holes_of_storage is not None:  # else `pickled` does not have this tensor
            first = int(tensor.storage_offset()) * tensor.itemsize
            holes_of_storage.append((first, first + tensor.nbytes))
    with writable(path) as file:
        for address, storage in storages.items():
            # The storage's bytes, as a flat tensor over them.
            content = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
            nbytes = storage.nbytes()
            done = 0
            # Write what is before each hole; before an empty hole at the end, too, which is the rest.
            for first, end in [*sorted(holes[address]), (nbytes, nbytes)]:
                write_tensor(file, content[done:first], places[address] + done)
                done = max(done, end)  # tensors that were left out may overlap
    return places


def _find_places(path: str, storages: Mapping[int, torch.UntypedStorage]) -> Places | None:
    """Return where storages begin in a file of `torch.save`; None if the file has other storages, by their sizes.

    They are entries "data/0", "data/1" and so on of a zip file, uncompressed. Before an entry's content is its local
    header: 30 bytes, then its name and its extra field. The last four of the 30 bytes are the lengths of these two.
    """
    with zipfile.ZipFile(path) as archive, open(path, "rb") as headers:
        entries = {info.filename.rpartition("/data/")[2]: info for info in archive.infolist()}
        in_order = [entries[number] for number in map(str, range(len(entries))) if number in entries]
        if [entry.file_size for entry in in_order] != [storage.nbytes() for storage in storages.values()]:
            return None
        places = {}
        for address, entry in zip(storages, in_order, strict=True):
            headers.seek(entry.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", headers.read(4))
            places[address] = entry.header_offset + 30 + name_bytes + extra_bytes
    return places


def start_of(places: Places, tensor: torch.Tensor) -> int | None:
    """Return where a tensor begins in a file, in bytes; None if its storage is not in the file."""
    start = places.get(tensor.untyped_storage()._cdata)
    return None if start is None else start + int(tensor.storage_offset()) * tensor.itemsize


@contextlib.contextmanager
def writable(path: str) -> Iterator[int]:
    """Open a file that is there; give its descriptor."""
    file = os.open(path, os.O_WRONLY)
    try:
        yield file
    finally:
        os.close(file)
