"""What this process has open, for tests that look at all of it: earlier tests in it have left things behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading


def clear() -> None:
    """Have what nobody holds any more closed now, and not at any time while a test looks."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "offload-close":  # of a session that a collection on another thread has found
            thread.join(120.0)


def open_files() -> dict[str, str]:
    """Return what each descriptor of this process stands for."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor has gone
            found[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
    return found
