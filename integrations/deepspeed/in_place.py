"""DeepSpeed's checkpoints whose state stays where it lies: a manifest in the tag's folder, in the place of a copy.

The tag's folder has a folder `offload`, which is a checkpoint of the engines of all ranks. DeepSpeed alone would
write a file for each rank. All that this file would have besides state, and where state belongs in it, is a `Frame`,
which the rank's manifest has as `extra`: so the file can be made later. In its place there is a small file, a *stub*.
It has an `InPlace`, which refuses to be loaded as state, and names the engines' checkpoint, so that a stub is never
taken for one of another checkpoint.
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
"""Name of the folder with the engines' checkpoint, in a tag's folder."""

MASTERS = "fp32_flat_groups", "single_partition_of_fp32_groups"
OPTIMIZERS = "optimizer_state_dict", "base_optimizer_state"
"""DeepSpeed's keys, in the state of its optimizer, for masters and for the torch optimizer's state: of each pair the
first is ZeRO-3's, the second that of ZeRO-1 and 2. `OPTIMIZERS[0]` is also the key in the file for all of that."""


class InPlace:
    """What a stub has in the place of a rank's optimizer: the state stays in the engines' checkpoint.

    Args:
        id: The id of that checkpoint.

    Raises:
        CheckpointError: On any use as a dict: whoever does that cannot load the checkpoint.
    """

    def __init__(self, id: str) -> None:
        self.id = id

    def refuse(self, *ignored: object) -> NoReturn:
        """Raise `CheckpointError`, which says what to do."""
        raise CheckpointError(
            'the state of this checkpoint is not in its files ("layout": "in_place"): load it with '
            "offload.integrations.deepspeed enabled, or have it written in DeepSpeed's own "
            "layout: offload export TAG_FOLDER NEW_FOLDER --for deepspeed"
        )

    __getitem__ = __contains__ = __iter__ = refuse

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse a dict's methods, as `get`; names with an underscore, which Python itself looks up, do not exist."""
        if name.startswith("_"):
            raise AttributeError(name)
        self.refuse()


@dataclass(frozen=True)
class Frame:
    """A rank's file of DeepSpeed's, without the bytes of state.

    Attributes:
        file: Its name in the tag's folder.
        nbytes: Its size, with state.
        pieces: The byte of the file at which each state tensor of each piece begins, by names of piece and tensor.
        runs: First byte and number of bytes of each run of bytes that are not state.
        content: The bytes of these runs, one after the other.
    """

    file: str
    nbytes: int
    pieces: dict[str, dict[str, int]]
    runs: list[tuple[int, int]]
    content: bytes

    @classmethod
    def of(cls, path: str, name: str, pieces: dict[str, dict[str, int]], state: Sequence[tuple[int, int]]) -> Frame:
        """Return the frame of a file that was saved with holes for state.

        Args:
            path: Where the file is now.
            name: Its final name.
            pieces: See `Frame`.
            state: For each state tensor its first byte in the file, and the byte after its last.
        """
        runs, content = [], b""
        size, done = os.path.getsize(path), 0  # bytes of the file, and those that were looked at
        with open(path, "rb") as file:
            for first, end in [*sorted(state), (size, size)]:  # the file's end, for the run after the last tensor
                if first > done:
                    file.seek(done)
                    runs.append((done, first - done))
                    content += file.read(first - done)
                done = end
        return cls(name, size, pieces, runs, content)

    def encode(self) -> bytes:
        """Return the frame as a line of JSON, then the content."""
        head = {name: value for name, value in asdict(self).items() if name != "content"}
        return json.dumps(head).encode() + b"\n" + self.content

    @classmethod
    def decode(cls, encoded: bytes | None) -> Frame:
        """Return the frame that `encode` has made into bytes.

        Raises:
            CheckpointError: These bytes are no frame.
        """
        head, _, content = (encoded or b"").partition(b"\n")  # None: the manifest has no `extra`
        try:
            return cls(**json.loads(head), content=content)
        except (ValueError, TypeError) as cause:
            raise CheckpointError("it was not saved by DeepSpeed with offload") from cause

    def write(self, path: str) -> None:
        """Write the file to `path`, with holes where state belongs."""
        written_bytes = 0
        with open(path, "xb") as file:
            for first, nbytes in self.runs:
                file.seek(first)
                file.write(self.content[written_bytes : written_bytes + nbytes])
                written_bytes += nbytes
            file.truncate(self.nbytes)

    def without_state(self) -> dict[str, Any]:
        """Return the optimizer's part of DeepSpeed's file, as if the optimizer had state of no parameter.

        The file is made again with holes, and loaded by mapping it, so that the holes take no memory.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.write(path := os.path.join(folder, self.file))
            optimizer_part: dict[str, Any] = torch.load(path, "cpu", weights_only=False, mmap=True)[OPTIMIZERS[0]]
        # Of each pair of keys the part has one, by the stage that saved it.
        optimizer_part.update((name, []) for name in MASTERS if name in optimizer_part)
        for name in OPTIMIZERS:
            if name in optimizer_part:
                optimizer_part[name]["state"] = {}
        return optimizer_part


def write_stub(path: str, id: str) -> None:
    """Write a stub to `path`, in the place of a rank's file; `id` is that of the engines' checkpoint."""
    torch.save({OPTIMIZERS[0]: InPlace(id)}, path)


def read_stub(path: str) -> str | None:
    """Return the id of the checkpoint that a stub names; None if the file is no stub."""
    # An error shows that the file is no stub: `weights_only` refuses other classes, and runs no code of the file.
    with contextlib.suppress(Exception), torch.serialization.safe_globals([InPlace]):
        stub = torch.load(path, "cpu", weights_only=True)[OPTIMIZERS[0]]
        return stub.id if isinstance(stub, InPlace) else None
    return None
