"""Small file systems, for tests that root runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def mounted(
    kind: str, folder: Path, options: str = "defaults", nbytes: int = 0, made: Sequence[str] = (), lazy: bool = False
) -> Iterator[Path]:
    """A file system of its own, below a folder.

    Args:
        kind: As `mount -t` has it.
        folder: Where it, and the file that it lies in, are made.
        options: Of `mount -o`.
        nbytes: Size of the file that it lies in; 0 for what lies in memory.
        made: Options of mkfs.
        lazy: Whether something may have a file open at the end.

    Raises:
        OSError: It cannot be mounted here.
    """
    place = Path(tempfile.mkdtemp(prefix="mount-", dir=folder))
    device, commands = kind, []
    if nbytes:
        device, options = f"{place}.image", f"loop,{options}"
        Path(device).touch()
        os.truncate(device, nbytes)
        commands.append([f"mkfs.{kind}", "-q", *made, device])
    for command in (*commands, ["mount", "-t", kind, "-o", options, device, str(place)]):
        if os.geteuid() != 0 or shutil.which(command[0]) is None:
            raise OSError(f"no {command[0]} here")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", *(["--lazy"] if lazy else []), str(place)], check=True)
