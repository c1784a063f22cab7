"""DeepSpeed's checkpoints whose state stays where it lies: a manifest in the tag's folder, in the place of a copy.

The folder `offload` in a tag's is a checkpoint of the engines of all ranks. What else a rank's file of DeepSpeed's
has, and where state belongs in it, is the `extra` of its manifest, a `Frame`. A small file with DeepSpeed's name for
it says so to whoever loads it; it names the checkpoint, so that it never goes with another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch

from offload import CheckpointError

FOLDER = "offload"
"""The folder in a tag's."""

MASTERS = "fp32_flat_groups", "single_partition_of_fp32_groups"
OPTIMIZERS = "optimizer_state_dict", "base_optimizer_state"
"""What DeepSpeed calls masters, and the torch optimizer's part, in what it saves; of ZeRO-3, and of ZeRO-1 and 2."""


class InPlace:
    """Stands for a rank's optimizer in DeepSpeed's file.

    Args:
        id: The engine's checkpoint.

    Raises:
        CheckpointError: Whenever somebody looks into it who cannot load it.
    """

    def __init__(self, id: str) -> None:
        self.id = id

    def refuse(self, *ignored: object) -> NoReturn:
        """Say what to do."""
        raise CheckpointError(
            'the state of this checkpoint is not in its files ("layout": "in_place"): load it with '
            "offload.integrations.deepspeed enabled, or have it written in DeepSpeed's own "
            "layout: offload export TAG_FOLDER NEW_FOLDER --for deepspeed"
        )

    __getitem__ = __contains__ = __iter__ = refuse

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what a dict has; what Python asks for itself is not there."""
        if name.startswith("_"):
            raise AttributeError(name)
        self.refuse()


@dataclass(frozen=True)
class Frame:
    """One rank's file of DeepSpeed's, without the bytes of state.

    Attributes:
        file: Its name in the tag's folder.
        nbytes: Its size.
        pieces: Where each state tensor of each piece of a parameter begins in the file, by name.
        runs: Where bytes begin that are not state, and how many.
        content: These.
    """

    file: str
    nbytes: int
    pieces: dict[str, dict[str, int]]
    runs: list[tuple[int, int]]
    content: bytes

    @classmethod
    def of(cls, path: str, name: str, pieces: dict[str, dict[str, int]], state: Sequence[tuple[int, int]]) -> Frame:
        """Read one from a file that was saved without state.

        Args:
            path: The file.
            name: What it is called when it is whole.
            pieces: Where state of them belongs.
            state: First byte of each state tensor, and the byte after its last.
        """
        runs, content, done, size = [], b"", 0, os.path.getsize(path)
        with open(path, "rb") as file:
            for first, last in [*sorted(state), (size, size)]:
                if first > done:
                    file.seek(done)
                    runs.append((done, first - done))
                    content += file.read(first - done)
                done = last
        return cls(name, size, pieces, runs, content)

    def encode(self) -> bytes:
        """Return it as a line of JSON, then the content."""
        head = {name: value for name, value in asdict(self).items() if name != "content"}
        return json.dumps(head).encode() + b"\n" + self.content

    @classmethod
    def decode(cls, encoded: bytes | None) -> Frame:
        """Return what was encoded.

        Raises:
            CheckpointError: It is none.
        """
        head, _, content = (encoded or b"").partition(b"\n")
        try:
            return cls(**json.loads(head), content=content)
        except (ValueError, TypeError) as cause:
            raise CheckpointError("it was not saved by DeepSpeed with offload") from cause

    def write(self, path: str) -> None:
        """Write the file, with holes where state belongs."""
        done = 0
        with open(path, "xb") as file:
            for first, nbytes in self.runs:
                file.seek(first)
                file.write(self.content[done : done + nbytes])
                done += nbytes
            file.truncate(self.nbytes)

    def without_state(self) -> dict[str, Any]:
        """Return the optimizer's part of what DeepSpeed saves, as if it had no parameters' state to save."""
        with tempfile.TemporaryDirectory() as folder:
            self.write(path := os.path.join(folder, self.file))
            found: dict[str, Any] = torch.load(path, "cpu", weights_only=False, mmap=True)[OPTIMIZERS[0]]
        found.update((name, []) for name in MASTERS if name in found)
        for name in OPTIMIZERS:
            if name in found:
                found[name]["state"] = {}
        return found


def write_stub(path: str, id: str) -> None:
    """Write the file that has DeepSpeed's name."""
    torch.save({OPTIMIZERS[0]: InPlace(id)}, path)


def read_stub(path: str) -> str | None:
    """Return the id of the checkpoint that a file names; None if it names none."""
    with contextlib.suppress(Exception), torch.serialization.safe_globals([InPlace]):
        found = torch.load(path, "cpu", weights_only=True)[OPTIMIZERS[0]]
        return found.id if isinstance(found, InPlace) else None
    return None
