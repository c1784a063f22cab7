"""Writes recordings anew, and says what differs: `cd tests && python -m net.record [PART ...]`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from net import bits, calls, errors, files
from net.recordings import write

PARTS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "bits": (bits.FILE, bits.observe),
    "calls": (calls.FILE, calls.observe),
    "errors": (errors.FILE, errors.observe),
    "files": (files.FILE, files.observe),
}


def main() -> None:
    """Write the parts that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"one of {', '.join(PARTS)}; all without")
    parts = parser.parse_args().parts
    for part in parts or PARTS:
        if part not in PARTS:
            parser.error(f"there is no part {part}: name one of {', '.join(PARTS)}")
    for part in parts or PARTS:
        file, observe = PARTS[part]
        with tempfile.TemporaryDirectory() as folder:
            found = write(file, observe(Path(folder)))
        print(f"{part}: {found or 'as recorded'}")


if __name__ == "__main__":
    main()
