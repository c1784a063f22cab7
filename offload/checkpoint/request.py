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
        extra: Anything else, or what makes it once all state is durable; called from another thread.
        copy: Copy everything into the folder, so that the checkpoint needs nothing else.
        mirrored: Have `OffloadConfig.mirror` get it, unless it is a copy.
        on_commit: Called from another thread once there is a checkpoint, before others are released for it; all stay
            where it raises.
        on_done: Called from a thread of its own when it has ended, with the error or None.
        id: 32 hexadecimal digits, the same for all ranks; a new one if left out, for one rank.
        rank: This rank.
        ranks: Number of ranks that save to the folder together.
        replica: Whether another rank has the same state and saves it for this rank too; it writes `extra` alone
            then.
        names: What parameters here are called there, where that is something else.
        find_ended: Returns ranks that are known to have ended, which nobody waits for; called from another thread.

    Raises:
        ConfigError: A value cannot be saved or done.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extra: bytes | Callable[[], bytes] | None = None
    copy: bool = False
    mirrored: bool = True
    on_commit: Callable[[], object] = tuple
    on_done: Callable[[BaseException | None], None] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    rank: int = 0
    ranks: int = 1
    replica: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    find_ended: Callable[[], Collection[int]] = tuple

    def __post_init__(self) -> None:
        asked = (
            ("metadata", isinstance(self.metadata, Mapping), "use a dict of what JSON can hold"),
            ("extra", self.extra is None or isinstance(self.extra, bytes) or callable(self.extra), "use bytes"),
            *((name, isinstance(getattr(self, name), bool), "use true or false") for name in FLAGS),
            *((name, callable(getattr(self, name)), "use a function") for name in ("on_commit", "find_ended")),
            ("on_done", self.on_done is None or callable(self.on_done), "use a function"),
            ("id", isinstance(self.id, str) and re.fullmatch(ID, self.id), "use 32 digits of 0-9 and a-f"),
            ("names", isinstance(self.names, Mapping), "use a dict of names"),
        )
        for name, is_right, allowed in asked:
            if not is_right:
                raise ConfigError(name, getattr(self, name), allowed)
        check_int("ranks", self.ranks, 1, MAX_RANKS)
        check_int("rank", self.rank, 0, self.ranks - 1)
        for here, there in self.names.items():
            if not (isinstance(here, str) and isinstance(there, str)):
                raise ConfigError("names", {here: there}, "use names of parameters, which are text")
            check_text("names", there, "use names that are UTF-8")
