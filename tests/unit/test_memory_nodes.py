"""Memory nodes: named in a config, bound before the first touch, verified, and said where that is not so."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_memory import resident_pages

import offload
from offload.device import host as host_memory
from offload.device.host import HostMemory
from offload.device.none import NO_LANES
from offload.errors import ConfigError, InfeasiblePlanError, OffloadError
from offload.memory import nodes
from offload.memory.arenas import Arena

MIB = 1 << 20

pytestmark = pytest.mark.skipif(nodes.memory_nodes()[:1] != [0], reason="the kernel tells of no node0")


@pytest.fixture(autouse=True)
def _untold() -> Iterator[None]:
    nodes.told.clear()
    yield
    nodes.told.clear()


def refuse(monkeypatch: pytest.MonkeyPatch, *, code: int) -> list[int]:
    """Refuse binding, and telling where pages lie; return which was asked for."""
    asked = []

    def refused(which: int, *arguments: object) -> int:
        asked.append(which)
        return code

    monkeypatch.setattr(nodes, "system_call", refused)
    return asked


def train(config: offload.OffloadConfig, steps: int = 2) -> tuple[torch.Tensor, dict[str, float], str, str]:
    """Return weights, metrics, plan and explanation after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512, dtype=torch.bfloat16)
    with offload.AdamW(model.parameters(), offload=config) as optimizer:
        for _ in range(steps):
            model(torch.ones(4, 512, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().clone(), optimizer.metrics(), str(optimizer.plan), str(optimizer.explain())


# The config


@pytest.mark.parametrize(
    ("value", "field", "allowed"),
    [
        ({}, "host_memory", "one for each memory node"),
        ({"node": 1 << 30}, "host_memory", "name memory nodes as in"),
        ({"node00": 1 << 30}, "host_memory", "name memory nodes as in"),
        ({"Node0": 1 << 30}, "host_memory", "name memory nodes as in"),
        ({"node1024": 1 << 30}, "host_memory", "name memory nodes as in"),
        ({"node٣": 1 << 30}, "host_memory", "name memory nodes as in"),
        ({0: 1 << 30}, "host_memory", "name memory nodes as in"),
        ({"node0": -1}, "host_memory.node0", "an integer >= 0"),
        ({"node0": "much"}, "host_memory.node0", "an integer >= 0"),
        ({"node0": "8"}, "host_memory.node0", "give it a unit"),
        ({"node0": None}, "host_memory.node0", "an integer >= 0"),
        ({"node0": {"node1": 1}}, "host_memory.node0", "an integer >= 0"),
        ({"node0": 1 << 62, "node1": 1 << 62}, "host_memory", "in all at most"),
        ([("node0", 1)], "host_memory", "an integer >= 0"),
    ],
)
def test_what_names_no_nodes_is_refused(value: Any, field: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed) as caught:
        offload.OffloadConfig(host_memory=value)
    assert caught.value.field == field


def test_a_config_of_nodes_is_read_back() -> None:
    config = offload.OffloadConfig(host_memory={"node2": "2GiB", "node0": 0})
    assert config.node_bytes == {2: 2 << 30, 0: 0}
    assert config.host_bytes == 2 << 30
    assert offload.OffloadConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert offload.OffloadConfig(host_memory={"node0": 0}).host_bytes == 0
    assert offload.OffloadConfig(host_memory="1GiB").node_bytes == {}
    assert offload.OffloadConfig(host_memory="1GiB").host_bytes == 1 << 30
    assert offload.OffloadConfig().host_bytes is None


@pytest.mark.parametrize("value", [{"node0": "1GiB", "node700": "1GiB"}, {"node700": 0}])
def test_nodes_that_do_not_exist_are_refused_by_name(value: dict[str, Any], tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(8))
    config = offload.OffloadConfig(host_memory=value, paths=[tmp_path])
    with pytest.raises(ConfigError, match=r"'node700' cannot be used; there is memory on node0"):
        offload.AdamW([parameter], offload=config)
    assert [*tmp_path.iterdir()] == []


def test_a_kernel_without_nodes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "STATUS", tmp_path / "status")
    assert nodes.memory_nodes() == []
    with pytest.raises(ConfigError, match="give one size"):
        nodes.check_nodes("host_memory", [0])


# Binding, on this machine


@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MIB + 1])
def test_memory_is_bound_before_the_first_touch(nbytes: int) -> None:
    arena = Arena(nbytes, node=0)
    assert nodes.node_bytes_of(arena.address, nbytes) == {}
    assert resident_pages(arena.address, arena.nbytes) == 0
    arena.touch()
    pages = -(-nbytes // 4096)
    assert nodes.node_bytes_of(arena.address, nbytes) == {0: nbytes}
    assert resident_pages(arena.address, arena.nbytes) == pages
    policy = Path("/proc/self/numa_maps")
    if policy.exists():
        assert "bind:0" in policy.read_text()
    arena.discard()
    assert nodes.node_bytes_of(arena.address, nbytes) == {}
    arena.close()


def test_a_node_that_is_not_there_cannot_be_bound_to() -> None:
    with pytest.raises(OffloadError, match="cannot be bound to node700"):
        Arena(4096, node=700)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_where_binding_is_refused_threads_of_the_node_touch_first(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, code=code)
    bound = []
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cpus: bound.append(frozenset(cpus)))
    first, second = Arena(3 * MIB, node=0), Arena(4096, node=0)
    assert resident_pages(first.address, first.nbytes) == 3 * MIB // 4096  # now, as later anybody may touch it
    assert resident_pages(second.address, second.nbytes) == 1
    assert set(bound) == {frozenset(os.sched_getaffinity(0))}
    assert nodes.node_bytes_of(first.address, first.nbytes) == {}
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2  # once that it is not bound, once that nobody knows
    assert "refuses mbind" in told[0]
    assert os.strerror(code) in told[0]
    bound.clear()
    first.discard()
    first.touch_part(0, 4096)  # as when it is taken again
    assert frozenset(os.sched_getaffinity(0)) in bound


def test_an_unknown_processor_has_no_such_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    arena = Arena(4096, node=0)
    assert resident_pages(arena.address, arena.nbytes) == 1


def test_memory_that_lies_elsewhere_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(NO_LANES)
    memory.allocate_arena(4096)
    assert memory.on_nodes() == {}  # of one kind
    memory.buffer_node = 0
    memory.allocate_arena(2 * MIB)
    monkeypatch.setattr(host_memory, "node_bytes_of", lambda address, nbytes: {0: nbytes // 2, 3: nbytes // 4})
    assert memory.on_nodes() == {0: (2 * MIB, MIB, MIB // 2)}
    memory.close()


# A session on this machine


def test_a_session_binds_to_the_node_and_keeps_its_bits() -> None:
    plain, _, _, _ = train(offload.OffloadConfig(host_memory="64MiB"))
    bound, metrics, plan, explanation = train(offload.OffloadConfig(host_memory={"node0": "64MiB"}))
    assert torch.equal(plain, bound)
    state_bytes = (512 * 512 + 512) * 12
    assert metrics["node/0/bytes"] >= state_bytes
    assert metrics["node/0/elsewhere_bytes"] == 0
    assert "of that on node0, of 64.0 MiB" in plan
    for text in (plan, explanation):
        assert "node0" in text
        assert "on other nodes" not in text


def test_streamed_state_passes_through_the_node(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"paths": [tmp_path], "subgroup_numel": 1 << 15, "staging_memory": "2MiB"}
    plain, _, _, _ = train(offload.OffloadConfig(host_memory="1MiB", **settings))
    bound, metrics, _, _ = train(offload.OffloadConfig(host_memory={"node0": "1MiB"}, **settings))
    assert torch.equal(plain, bound)
    assert metrics["node/0/bytes"] >= 2 * MIB


def test_what_lies_elsewhere_is_in_plan_and_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "node_bytes_of", lambda address, nbytes: {0: nbytes - 4096, 1: 4096})
    _, metrics, plan, explanation = train(offload.OffloadConfig(host_memory={"node0": "64MiB"}))
    assert metrics["node/0/elsewhere_bytes"] >= 4096
    for text in (plan, explanation):
        assert "lie on other nodes" in text


def test_a_session_goes_on_where_binding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, _, _ = train(offload.OffloadConfig(host_memory="64MiB"))
    refuse(monkeypatch, code=errno.EPERM)
    bound, metrics, _, _ = train(offload.OffloadConfig(host_memory={"node0": "64MiB"}))
    assert torch.equal(plain, bound)
    assert metrics["node/0/elsewhere_bytes"] == 0  # as nobody knows


def test_parked_memory_comes_back_to_the_node(tmp_path: Path) -> None:
    model = torch.nn.Linear(512, 512, dtype=torch.bfloat16)
    config = offload.OffloadConfig(host_memory={"node0": "64MiB"}, paths=[tmp_path])
    with offload.AdamW(model.parameters(), offload=config) as optimizer:

        def step() -> None:
            model(torch.ones(4, 512, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        optimizer.park()
        (_, parked_bytes, _) = optimizer.engine._parts.memory.on_nodes()[0]
        assert parked_bytes < 512 * 512 * 12
        step()
        (meant_bytes, here_bytes, elsewhere_bytes) = optimizer.engine._parts.memory.on_nodes()[0]
        assert here_bytes > meant_bytes // 2
        assert elsewhere_bytes == 0


def test_a_node_with_too_little_free_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "free_bytes", lambda number: MIB)
    with pytest.raises(InfeasiblePlanError, match=r"memory on node0 needs .* what is free on node0"):
        train(offload.OffloadConfig(host_memory={"node0": "64MiB"}))


def test_free_memory_counts_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node3").mkdir()
    text = "Node 3 MemTotal: 100 kB\nNode 3 MemFree: 10 kB\nNode 3 Inactive(file): 20 kB\nNode 3 Mlocked: 7 kB\n"
    (tmp_path / "node3" / "meminfo").write_text(text)
    monkeypatch.setattr(nodes.touching, "NODES", tmp_path)
    assert nodes.free_bytes(3) == 30 << 10
    assert nodes.free_bytes(4) == 0


def test_updates_run_on_the_cpus_of_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    for number, text in ((0, str(cpus[0])), (1, "" if len(cpus) < 2 else str(cpus[1])), (2, "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    monkeypatch.setattr(nodes.touching, "NODES", tmp_path)
    near = frozenset({cpus[0]}) if len(cpus) > 1 else frozenset()
    assert nodes.cpus_near([0]) == nodes.cpus_near([0, 2]) == near
    assert nodes.cpus_near([2]) == nodes.cpus_near([]) == frozenset()  # none there: from anywhere
    monkeypatch.setattr(nodes.touching, "NODES", tmp_path / "none")
    assert nodes.cpus_near([0]) == frozenset()


def test_where_asks_for_a_part_of_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MOST_ASKED", 4)
    arena = Arena(64 << 10, node=0)
    arena.numpy(0, 32 << 10, np.uint8)[:] = 1
    assert nodes.node_bytes_of(arena.address, 64 << 10) == {0: 32 << 10}
