"""Which process did something, and whether it has ended, as far as that can be seen from here."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple


class Process(NamedTuple):
    """Identifies a process, so that processes on its machine can tell when it has ended.

    Attributes:
        machine: Identifies the running kernel and the name space of pids.
        pid: The process's number in that name space.
        start_time: When it was started: a number may be used again for another process.
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
        """Return whether the process is known to have ended; False also where that cannot be seen from here.

        Only processes of this machine can be seen. If the process of that number was started at another time, the
        number has been used again, and this process has ended.
        """
        this = Process.this()
        is_of_this_machine = this is not None and this.machine == self.machine
        if not is_of_this_machine or not self.start_time or self.pid < 1:  # nothing is known, or not a process
            return False
        try:
            os.kill(self.pid, 0)  # sends nothing, but fails if there is no such process
        except (ProcessLookupError, OverflowError):  # none has, or can have, this number
            return True
        except PermissionError:  # it is there, as another user's, of which /proc may say nothing: "" proves nothing
            return _start_time(self.pid) not in ("", self.start_time)
        return _start_time(self.pid) != self.start_time


def _start_time(pid: int) -> str:
    """Return when a process was started, in clock ticks since boot; "" if it has ended, or cannot be seen."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # "pid (name) state ...", where the name may contain brackets and spaces: so split behind the last bracket.
        _, _, behind_name = file.read().rpartition(")")
        fields = behind_name.split()  # proc(5) counts from the pid, as 1: 3 is the state, and 22 the start time
        state, start_time = fields[0], fields[19]
        return "" if state in "ZX" else start_time  # Z, X: dead, but not yet waited for
    return ""
