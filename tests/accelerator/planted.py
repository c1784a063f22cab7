"""Plants mistakes of `cuda_mistakes`, and runs the test that finds each: `python -m accelerator.planted NAME ...`.

In a process of its own, which says of each mistake how pytest has ended: a line of JSON, the name and pytest's code.
All the mistakes of one call are found on the test accelerator, or all elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerator import late, processes
from accelerator.cuda_mistakes import CUDA_MISTAKES

VARIABLE = "OFFLOAD_PLANTED"
"""Names the mistake to processes that a test starts."""

ROOT = Path(__file__).parents[2]
_KNOWN = {mistake.name: mistake for mistake in CUDA_MISTAKES}


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Plant the mistake that `VARIABLE` names, if it does."""
    name = os.environ.get(VARIABLE)
    with _KNOWN[name].plant() if name else contextlib.nullcontext():
        yield


def main(names: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.chdir(ROOT)
    if _KNOWN[names[0]].is_late:
        from offload.backends import BACKENDS, Backend

        late.load()
        BACKENDS["late"] = Backend(pin=late.pin, unpin=late.unpin)
        os.environ[processes.REPORTS] = tempfile.mkstemp()[1]  # so that tests run here
    for name in names:
        os.environ[VARIABLE] = name
        with _KNOWN[name].plant():
            code = pytest.main(["-q", "-x", *(f"-p{each}" for each in processes.PLUGINS), _KNOWN[name].found_by])
        answers.write(json.dumps([name, int(code)]) + "\n")
        answers.flush()
    os._exit(0)  # threads of streams do not end


if __name__ == "__main__":
    main(sys.argv[1:])
