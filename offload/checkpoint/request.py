"""What a caller wants saved: one value, from the call to the commit."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from offload.checkpoint.manifest import ID, MAX_RANKS
from offload.config import check_int
from offload.errors import ConfigError, check_text

FLAGS = ("copy", "mirrored", "replica")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checkpoint that a caller wants: made once, and handed on whole.

    Attributes:
        path: Folder of the checkpoint, or "s3://bucket/prefix"; made if it is not there.
        metadata: Anything that JSON can hold.
        extra: Other bytes to save, or a function that returns them, called from another thread once all state is
            durable.
        copy: Copy everything into the folder, so that the checkpoint needs nothing else.
        mirrored: Copy the checkpoint to `OffloadConfig.mirror`, unless it is a `copy`.
        on_commit: Called from another thread once the checkpoint is committed, before older ones are released for it;
            none is released if it raises.
        on_done: Called from a thread of its own when the save has ended, with the error or None.
        id: 32 hexadecimal digits, the same for all ranks; a new one if left out, for one rank.
        rank: This rank.
        ranks: Number of ranks that save to the folder together.
        replica: Whether another rank has the same state and saves it for this one, which then writes `extra` alone.
        names: Names of parameters in the checkpoint, by their names here, where these differ.
        find_ended: Returns ranks that are known to have ended, to stop waiting for them; called from another thread.

    Raises:
        ConfigError: A value cannot be saved or done.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extra: bytes | Callable[[], bytes] | None = None
    copy: bool = False
    mirrored: bool = True
    on_commit: Callable[[], object] = tuple  # does nothing
    on_done: Callable[[BaseException | None], None] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    rank: int = 0
    ranks: int = 1
    replica: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    find_ended: Callable[[], Collection[int]] = tuple  # returns none

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that cannot be saved."""
        checks = (  # field, whether it is right, what to do if not
            ("metadata", isinstance(self.metadata, Mapping), "use a dict of what JSON can hold"),
            ("extra", self.extra is None or isinstance(self.extra, bytes) or callable(self.extra), "use bytes"),
            *((name, isinstance(getattr(self, name), bool), "use true or false") for name in FLAGS),
            *((name, callable(getattr(self, name)), "use a function") for name in ("on_commit", "find_ended")),
            ("on_done", self.on_done is None or callable(self.on_done), "use a function"),
            ("id", isinstance(self.id, str) and re.fullmatch(ID, self.id), "use 32 digits of 0-9 and a-f"),
            ("names", isinstance(self.names, Mapping), "use a dict of names"),
        )
        for name, is_right, advice in checks:
            if not is_right:
                raise ConfigError(name, getattr(self, name), advice)
        check_int("ranks", self.ranks, 1, MAX_RANKS)
        check_int("rank", self.rank, 0, self.ranks - 1)
        for own_name, saved_name in self.names.items():
            if not (isinstance(own_name, str) and isinstance(saved_name, str)):
                raise ConfigError("names", {own_name: saved_name}, "use names of parameters, which are text")
            check_text("names", saved_name, "use names that are UTF-8")
