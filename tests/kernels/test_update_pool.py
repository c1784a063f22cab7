"""Submitted updates: completions, lifetimes, threads and processes."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest
from kernel_cases import Case, table_of

from offload._native import CompletionQueue
from offload.errors import SessionBrokenError
from offload.kernels import CpuUpdateKernel
from offload.protocols import Completion
from offload.rules import ADAMW, segment_dtype


def take(queue: CompletionQueue, count: int) -> list[Completion]:
    taken: list[Completion] = []
    while len(taken) < count:
        arrived = queue.wait(60.0)
        assert arrived, "a completion is missing"
        taken += [Completion(*record) for record in arrived]
    return taken


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_update_completes_once(threads):
    queue = CompletionQueue()
    jobs = {
        op: [Case.make(numel, seed=op + i) for i, numel in enumerate(sizes)]
        for op, sizes in enumerate(
            [(), (1,), (0, 0), (150_000,), (3,) * 50, (70_000, 1, 70_000), (65_536,)], start=100
        )
    }
    before = time.monotonic()
    with CpuUpdateKernel(queue, threads) as kernel:
        for op, cases in jobs.items():
            table = table_of(cases) if cases else np.zeros(0, segment_dtype(ADAMW))
            kernel.submit(op, table)
            table[:] = 0  # it was copied
        completions = take(queue, len(jobs))
        assert queue.wait(0.0) == []
    assert sorted(c.op for c in completions) == list(jobs)
    for completion in completions:
        assert completion.error == 0
        assert before <= completion.started_s <= completion.finished_s <= time.monotonic()
        for case in jobs[completion.op]:
            case.check()


def test_close_finishes_what_is_in_flight():
    queue = CompletionQueue()
    cases = [Case.make(300_000, seed=i) for i in range(4)]
    kernel = CpuUpdateKernel(queue, 2)
    for op, case in enumerate(cases):
        kernel.submit(op, case.row())
    kernel.close()
    assert sorted(record[0] for record in queue.wait(0.0)) == [0, 1, 2, 3]
    for case in cases:
        case.check()
    with pytest.raises(SessionBrokenError):
        kernel.submit(9, cases[0].row())


def test_a_dropped_kernel_finishes_too():
    queue = CompletionQueue()
    case = Case.make(300_000)
    kernel = CpuUpdateKernel(queue, 2)
    kernel.submit(7, case.row())
    del kernel
    gc.collect()
    assert [record[0] for record in queue.wait(0.0)] == [7]
    case.check()


def test_synchronous_and_submitted_updates_share_the_workers():
    queue = CompletionQueue()
    submitted = [Case.make(100_000, seed=i) for i in range(5)]
    ran = [Case.make(140_000, seed=100 + i) for i in range(6)]
    with CpuUpdateKernel(queue, 2) as kernel:

        def run(mine: list[Case]) -> None:
            for case in mine:
                kernel.run(case.row())

        runners = [threading.Thread(target=run, args=(ran[i::2],)) for i in range(2)]
        for runner in runners:
            runner.start()
        for op, case in enumerate(submitted):
            kernel.submit(op, case.row())
        for runner in runners:
            runner.join()
        take(queue, len(submitted))
    for case in submitted + ran:
        case.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_and_can_leave():
    """Its copy has no workers: using it must say so and closing it must not wait for them."""
    case = Case.make(10)
    row = case.row()
    kernel = CpuUpdateKernel(CompletionQueue(), 2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kernel.run(row)
        except SessionBrokenError:
            kernel.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kernel.run(row)
    kernel.close()
    case.check()
