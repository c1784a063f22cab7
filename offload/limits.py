"""`Limits`: what a session is made with and nobody sets."""

from __future__ import annotations

from dataclasses import dataclass

from offload import waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes and times from which on a session does another thing; the same for all sessions but those of tests.

    Attributes:
        bucket_bytes: Of a bucket of gradients that leaves a GPU: the link takes a millisecond or two for it.
        bucket_count: Gradients of a bucket that leaves.
        in_transit_bytes: Of gradients that are held until they are read; beyond that, backward waits on the GPU.
        large_copy_bytes: State that is handed out at once lies in a file if it is larger.
        settle_s: How long what has been given up may take to end in good order.
        close_s: How long `close` waits for other ranks' parts of a checkpoint, and for the mirror; who needs more
            waits before it.
        unwind_s: How long `close` waits for devices with an exception on its way, which nobody sees before.
    """

    bucket_bytes: int = 64 << 20
    bucket_count: int = 4096
    in_transit_bytes: int = 1 << 30
    large_copy_bytes: int = 64 << 20
    settle_s: float = waits.SETTLE_S
    close_s: float = 30.0
    unwind_s: float = 30.0
