"""What `offload plan` answers for machines and models, by hand: bytes, and bytes over rates.

A row says what state a model has, what of it lies on drives, and what its step is bound by, for how long. State that
is streamed passes its drive once each way, less what the staging slots keep; an update passes over 28 bytes of memory
for 12 of state.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from offload import cli

GB, GIB, TB = 1e9, 2**30, 1e12


class Case(NamedTuple):
    """A machine and a model.

    Attributes:
        words: Of `offload plan`.
        state: Bytes of state of a rank.
        streamed: Bytes of it that are on drives.
        lane: What bounds the step.
        step_s: Its seconds, by hand.
        rel: How far off the plan may be, by what the arithmetic leaves out.
    """

    words: str
    state: float
    streamed: float
    lane: str
    step_s: float
    rel: float = 0.03


CPU = "--host 60GB/s:64GiB --cores 16 --weights-on cpu --placement cpu"  # 60 GB/s of memory: 25.7 GB/s of state
BIG = "--host 280GB/s:1TiB --cores 64 --weights-on cpu --placement cpu"  # 120 GB/s of state
GPU = "--gpu 700GB/s:24GiB --link 20GB/s --host 280GB/s:256GiB --cores 64"  # 300 GB/s of state on the GPU

CASES = {
    # All in memory: 12 bytes a parameter, at memory over 28 bytes for each 12.
    "1e9 in memory": Case(f"--params 1e9 {CPU} --host-memory 20GiB", 12 * GB, 0, "cpu", 28 * GB / (60 * GB)),
    "8e9 on a server": Case(f"--params 8e9 {BIG} --host-memory 200GiB", 96 * GB, 0, "cpu", 8 * 28 / 280),
    # 2 cores update 21.2 GB/s of state, which is less than memory gives.
    "2 cores": Case(
        "--params 1e9 --host 280GB/s:64GiB --cores 2 --weights-on cpu --host-memory 20GiB",
        12 * GB, 0, "cpu", 12 / 21.2,
    ),
    # compact16: 8 bytes a parameter; compact8 of parameters that are all in blocks: 5 + 2/64. Their update is taken
    # to be as fast, in parameters, as that of exact state.
    "compact16": Case(
        f"--params 8e9 {BIG} --state-format compact16 --host-memory 200GiB", 64 * GB, 0, "cpu", 8 * 12 / 120,
    ),
    "compact8": Case(
        f"--params 8e9 {BIG} --state-format compact8 --host-memory 200GiB", 40.25 * GB, 0, "cpu", 8 * 12 / 120,
    ),
    # All on one drive of one bandwidth for both ways: twice the state over it, less 4 slots of 16,764,928 elements.
    "8e9 on one drive": Case(
        f"--params 8e9 {CPU} --drive 4GB/s:2TB --host-memory 0", 96 * GB, 96 * GB, "path:0",
        2 * (96 - 4 * 0.2012) / 4,
    ),
    # Reads at 6 and writes at 3 GB/s, each half as fast beside the other: reads that end leave the drive to writes.
    "reads and writes differ": Case(
        f"--params 8e9 {CPU} --drive 6GB/s,3GB/s:2TB --host-memory 0", 96 * GB, 96 * GB, "path:0",
        (96 - 4 * 0.2012) * (1 / 6 + 1 / 3),
    ),
    # Part of it resident: less to move.
    "part resident": Case(
        f"--params 8e9 {CPU} --drive 4GB/s:2TB --host-memory 25GiB", 96 * GB, 96 * GB - 25 * GIB, "path:0",
        2 * (96 - 25 * GIB / GB - 4 * 0.2012) / 4,
    ),
    # Another one of half the speed takes a third.
    "two drives that differ": Case(
        f"--params 8e9 {CPU} --drive 4GB/s:2TB 2GB/s:2TB --host-memory 0", 96 * GB, 96 * GB, "path:0",
        2 * (96 - 4 * 0.2012) / 6,
    ),
    "compact8 on one drive": Case(
        f"--params 8e9 {CPU} --drive 4GB/s:2TB --host-memory 0 --state-format compact8", 40.25 * GB, 40.25 * GB,
        "path:0", 2 * (40.25 - 4 * 0.0844) / 4,
    ),
    # Ranks share drives and memory, and the model: a node is as fast as one rank, but for further staging slots.
    "four ranks": Case(
        f"--params 8e9 {CPU} --drive 4GB/s:2TB --host-memory 0 --ranks 4", 24 * GB, 24 * GB, "path:0",
        2 * (96 - 16 * 0.2012) / 4,
    ),
    "sixteen nodes": Case(
        f"--params 128e9 {CPU} --drive 4GB/s:2TB --host-memory 0 --nodes 16", 96 * GB, 96 * GB, "path:0",
        2 * (96 - 4 * 0.2012) / 4,
    ),
    # All at home on the GPU: state over its 300 GB/s.
    "at home on the GPU": Case(
        f"--params 1e9 {GPU} --gpu-memory 14GiB --host-memory 0", 12 * GB, 0, "gpu", 12 / 300,
    ),
    # All in host memory, updated on the GPU: 12 bytes in, and 12 out beside them, over the link.
    "all through the link": Case(
        f"--params 4e9 {GPU} --gpu-memory 0 --host-memory 60GiB --placement gpu", 48 * GB, 0, "h2d", 48 / 20,
    ),
    # Updated on the CPU: 120 GB/s of state, while 2 bytes a parameter go up and, as gradients are kept, 2 come down.
    "updated on the CPU": Case(
        f"--params 4e9 {GPU} --gpu-memory 0 --host-memory 60GiB --placement cpu", 48 * GB, 0, "memory",
        4 * (28 + 2 + 2) / 280,
    ),
    "a drive behind a GPU": Case(
        f"--params 4e9 {GPU} --drive 3GB/s:2TB --gpu-memory 0 --host-memory 0", 48 * GB, 48 * GB, "path:0",
        2 * (48 - 4 * 0.2012) / 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_arithmetic_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    assert cli.main(["plan", *case.words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rank = found["rank"]
    assert rank["state_bytes"] == pytest.approx(case.state, rel=0.002)
    assert rank["streamed_bytes"] == pytest.approx(case.streamed, rel=0.005, abs=1)
    assert sum(rank[f"{home}_bytes"] for home in ("gpu", "host", "streamed")) == rank["state_bytes"]
    assert (found["bound_by"], found["step_s"]) == (case.lane, pytest.approx(case.step_s, rel=case.rel))
    assert found["bound_s"] <= found["step_s"] * 1.0001
    # What a node takes: state, weights and gradients of two bytes, whose places the words say.
    numel = found["params"] / found["nodes"] / found["ranks"]
    on_gpu = bool(rank["gpu_memory_bytes"])
    weights = (rank["gpu_memory_bytes"] if on_gpu else rank["host_memory_bytes"])["weights"]
    assert weights == pytest.approx(2 * numel, rel=0.001)
    gradients = rank["host_memory_bytes"]["gradients"] + rank["gpu_memory_bytes"].get("gradients", 0)
    assert gradients >= 0.999 * 2 * numel
