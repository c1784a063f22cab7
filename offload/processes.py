"""Which process did something, and whether it has ended, as far as that can be seen from here."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple


class Process(NamedTuple):
    """Identifies a process, so that processes on its machine can tell when it has ended.

    Attributes:
        machine: The running kernel, and the name space of its pids.
        pid: Its number there.
        start_time: When it was started: numbers are used again.
    """

    machine: str
    pid: int
    start_time: str

    @classmethod
    def this(cls) -> Process | None:
        """Return this process; None where the kernel does not say."""
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            return None
        return cls(machine, os.getpid(), _start_time(os.getpid()))

    def has_ended(self) -> bool:
        """Return whether this process is known to have ended: it was of this machine, and is not there any more."""
        this = Process.this()
        if this is None or this.machine != self.machine or not self.start_time or self.pid < 1:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:  # another user's, of which /proc may say nothing
            return _start_time(self.pid) not in ("", self.start_time)
        return _start_time(self.pid) != self.start_time


def _start_time(pid: int) -> str:
    """Return when a process was started; "" if it has ended, or cannot be seen."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        state, *others = file.read().rpartition(")")[2].split()
        return "" if state in "ZX" else others[18]
    return ""
