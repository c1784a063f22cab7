"""Bytes to train on: any text file or folder, as one tensor of byte values.

The same files give the same tensor in the same order on every run. No tokenizer: the vocabulary is the 256
byte values, so any text works and nothing is downloaded.
"""

from __future__ import annotations

import codecs
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from offload.errors import ConfigError
from offload.tiers.filesystem import open_regular

VOCABULARY = 256
TEXT_MAX_BYTES = 1 << 28
"""No more than this is read: the text is held in memory, and training sees a sample of it anyway."""

_SNIFFED_BYTES = 8192
"""First bytes of a file that are looked at to tell whether it is text."""
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
"""Folders in the standard library's folder that are left out: installed packages, tests, compiled files."""


@dataclass(frozen=True, slots=True)
class Text:
    """What is trained on.

    Attributes:
        source: Where it came from, for people.
        files: Number of files.
        values: Byte values, uint8, on the CPU.
    """

    source: str
    files: int
    values: torch.Tensor

    def byte_entropy(self) -> float:
        """Return the entropy of single bytes in nats: the loss of a model that ignores all context."""
        counts = torch.bincount(self.values, minlength=VOCABULARY)
        shares: list[float] = [count / len(self.values) for count in counts.tolist() if count]
        return -math.fsum(share * math.log(share) for share in shares)


def draw_windows(values: torch.Tensor, generator: torch.Generator, *, batch: int, seq: int) -> torch.Tensor:
    """Return random windows of a text, int64 of shape (batch, seq + 1).

    The first `seq` columns are the model's input, the last `seq` its targets: each byte is to predict the next.
    The generator draws nothing else, so that other uses of random numbers do not change the windows.
    """
    starts = torch.randint(len(values) - seq, (batch,), generator=generator, dtype=torch.int64, device="cpu")
    return values.unfold(0, seq + 1, 1)[starts].long()  # `unfold` gives a view of all windows: only these are copied


def load_text(data: str | None, *, min_bytes: int) -> Text:
    """Read the text to train on.

    Args:
        data: A text file, or a folder whose text files are read recursively (names and folders that begin with
            a dot, links and binary files are left out); the sources of Python's standard library if None.
        min_bytes: How much is needed at least.

    Raises:
        ConfigError: There is nothing there, it cannot be read, it is not text, or it is too short.
    """
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        inside = (path for path in _files_below(root) if _NOT_STDLIB.isdisjoint(path.relative_to(root).parts))
        text = _read(f"Python's standard library ({root})", (path for path in inside if path.suffix == ".py"))
    elif os.path.isfile(data):
        text = _read(data, [Path(data)])
        if not text.files:
            raise ConfigError("--data", data, "it cannot be read as text; give a text file or a folder of them")
    elif os.path.isdir(data):
        text = _read(data, _files_below(Path(data)))
    else:
        raise ConfigError("--data", data, "there is no such file or folder")
    if not text.files:
        raise ConfigError("--data", data, "there is no readable text file in this folder")
    if len(text.values) < min_bytes:
        lacking = f"it has {len(text.values)} bytes of text and at least {min_bytes} are needed"
        raise ConfigError("--data", data or text.source, f"{lacking}; give more text or a shorter --seq")
    return text


def _files_below(root: Path) -> Iterator[Path]:
    """Yield the files of a folder, those of a folder before those of its sub-folders, sorted by name.

    Left out are links, and files and folders whose names begin with a dot.
    """
    for folder, subfolders, names in os.walk(root):
        # In place: this is how os.walk learns which folders to enter, and in which order.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _read(source: str, paths: Iterable[Path]) -> Text:
    """Read text files one after the other, up to `TEXT_MAX_BYTES`, as one tensor of bytes."""
    content = bytearray()
    files = 0
    for path in paths:
        if len(content) >= TEXT_MAX_BYTES:
            break
        if piece := _read_if_text(path, TEXT_MAX_BYTES - len(content)):
            content += piece
            content += b"" if piece.endswith(b"\n") else b"\n"
            files += 1
    # torch.frombuffer refuses an empty buffer.
    values = (
        torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return Text(source, files, values)


def _read_if_text(path: Path, max_bytes: int) -> bytes:
    """Return the first `max_bytes` of a file, or no bytes if it cannot be read or does not begin like UTF-8 text."""
    try:
        # Links are followed: only the user can have named one, as `_files_below` yields none. No more bytes are read
        # than the file's size says: some of the system's files have the size 0 and never end.
        with open(path, "rb", opener=partial(open_regular, follow=True)) as file:
            nbytes = min(max_bytes, os.fstat(file.fileno()).st_size)
            head = file.read(min(_SNIFFED_BYTES, nbytes))
            # Incremental: the head may end in the middle of a character.
            codecs.getincrementaldecoder("utf-8")().decode(head)
            return b"" if b"\0" in head else head + file.read(nbytes - len(head))
    except (OSError, UnicodeDecodeError):
        return b""
