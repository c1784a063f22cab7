"""`Limits`: sizes and times of a session that are no settings; only tests change them."""

from __future__ import annotations

from dataclasses import dataclass

from offload import waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes and times beyond which a session acts differently; the same for all sessions but those of tests.

    Attributes:
        bucket_bytes: A bucket of gradients leaves a GPU at the latest when it has that many bytes, which take the
            link a millisecond or two.
        bucket_count: Or when it has that many gradients, if that comes first.
        in_transit_bytes: Most bytes of gradients, and likewise of saved tensors, that the caller has dropped and
            lanes of a GPU still read. With more, the oldest are waited for: of gradients by the stream of backward
            alone, or for FSDP2 by the thread; of saved tensors by the thread of forward.
        large_copy_bytes: A copy of state that is handed out as a whole lies in a file if it has more bytes, and a
            disk has room for them.
        settle_s: How long threads and operations that are given up may take to end in good order.
        close_s: How long `close` waits for other ranks' parts of a checkpoint, and for the mirror. A caller that
            needs more waits for them before `close`.
        unwind_s: How long `close` waits for its thread and for devices while an exception is on its way: nobody sees
            that one before `close` has ended.
    """

    bucket_bytes: int = 64 << 20
    bucket_count: int = 4096
    in_transit_bytes: int = 1 << 30
    large_copy_bytes: int = 64 << 20
    settle_s: float = waits.SETTLE_S
    close_s: float = 30.0
    unwind_s: float = 30.0
