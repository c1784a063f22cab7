"""What a caller wants saved: one value, from the call to the commit."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any


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
