"""Runs trainings on the test accelerator in processes of their own, which mistakes may crash or hang.

A process takes trainings one after the other for as long as it lives; the training that ends it has been found out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import prepared

HANG_S = 60
"""A training of a second or two that has not ended by then hangs."""


class Task(NamedTuple):
    """One training: which mistake or change is planted ("" for none), which workload, which seed."""

    planted: str
    workload: str
    seed: int


class Outcome(NamedTuple):
    """What has come of one: "" if it has ended as on the CPU, else how it has not."""

    task: Task
    found: str


def outcomes(plants: str, tasks: Iterable[Task]) -> Iterator[Outcome]:
    """Run trainings.

    Args:
        plants: Name of the module whose function `plants` returns what can be planted, by name.
        tasks: Which; a generator may look at outcomes before it goes on.
    """
    process: subprocess.Popen[str] | None = None
    with tempfile.TemporaryFile("w+") as said, contextlib.ExitStack() as ends:
        ends.callback(lambda: process is not None and process.kill())
        for task in tasks:
            if process is None:
                command = [prepared.python(), "-m", "accelerator.runner", plants]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
                )
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if line:
                yield Outcome(task, json.loads(line))
                continue
            code = process.wait()
            said.seek(0)
            told = said.read()
            said.truncate(0)
            said.seek(0)
            process = None
            if "Timeout (" in told:
                yield Outcome(task, "hangs")
            elif code < 0:
                yield Outcome(task, f"crash: signal {-code}")
            else:
                raise RuntimeError(told[-2000:])
        if process is not None:
            process.communicate()
            process = None


def _serve(plants: str) -> None:
    """Run trainings that come on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    known: dict[str, Callable[[], AbstractContextManager[Any]]] = import_module(plants).plants()
    workloads = import_module("accelerator.workloads")  # now: what is planted may need to be there first
    workloads.load()

    for line in sys.stdin:
        task = Task(*json.loads(line))
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        workloads.reference(task.workload)  # what is wrong here is nobody's finding
        try:
            workloads.run(task.workload, task.seed, known[task.planted] if task.planted else None)
            found = ""
        except Exception as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    os._exit(0)  # threads of streams do not end


if __name__ == "__main__":
    _serve(sys.argv[1])
