"""Sessions on two memory nodes, the first of which plays both: the same bits, and what lies elsewhere is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import OnDevice
from world import SimulatedDevice

import offload
from offload.memory import nodes
from offload.plan import NodeRates
from offload.session import parts

KIB = 1 << 10

pytestmark = pytest.mark.skipif(nodes.memory_nodes()[:1] != [0], reason="the kernel tells of no node0")


@pytest.fixture(autouse=True)
def _two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    call = nodes.system_call

    def on_the_first(which: int, *arguments: Any) -> int:
        if which == 0 and arguments[3][0] == 2:  # the mask of node1
            arguments[3][0] = 1
        return call(which, *arguments)

    def rates(kernel: object, queue: object, numbers: Sequence[int], *rest: object) -> tuple[NodeRates, ...]:
        return tuple(NodeRates(number, (60e9, 20e9)[number], 1e11, 1e11, 5e10) for number in numbers)

    monkeypatch.setattr(nodes, "system_call", on_the_first)
    monkeypatch.setattr(nodes, "memory_nodes", lambda: [0, 1])
    monkeypatch.setattr(nodes, "free_bytes", lambda number: 1 << 32)
    monkeypatch.setattr(parts, "probe_nodes", rates)


def train(kind: Any, **settings: Any) -> tuple[list[torch.Tensor], Any, dict[str, float], str]:
    """Return weights, plan, metrics and explanation after some steps, and parameters that come later."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(64, 256).to(torch.bfloat16)) for _ in range(5)]
    added = torch.nn.Parameter(torch.randn(64, 256).to(torch.bfloat16))
    config = offload.OffloadConfig(subgroup_numel=1 << 14, threads=1, rates="auto", **settings)
    with kind(weights, offload=config) as optimizer:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [added]})
            for parameter in [*weights, *([added] if step >= 2 else [])]:
                torch.autograd.backward([parameter], [torch.randn(64, 256).to(torch.bfloat16)])
            optimizer.step()
            optimizer.zero_grad()
        plan, metrics, explanation = optimizer.engine.plan, optimizer.metrics(), str(optimizer.explain())
    return [weight.detach().clone() for weight in [*weights, added]], plan, metrics, explanation


def on_gpu(weights: Any, **options: Any) -> OnDevice:
    return OnDevice(weights, device=SimulatedDevice(1 << 24), **options)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (offload.AdamW, {}),
        (on_gpu, {"gpu_memory": 0, "placement": "gpu"}),
        (on_gpu, {"gpu_memory": 0, "placement": "auto", "keep_grads": False}),
    ],
)
def test_state_on_two_nodes_has_the_same_bits(kind: Any, more: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"node1": 450 * KIB, "node0": 450 * KIB}  # two subgroups each; the others stream
    plain, _, _, _ = train(kind, host_memory=900 * KIB, paths=[tmp_path], **more)
    dealt, plan, metrics, explanation = train(kind, host_memory=sizes, paths=[tmp_path], **more)
    assert all(torch.equal(a, b) for a, b in zip(plain, dealt, strict=True))
    assert plan.buffer_node == 0
    assert plan.nodes.count(0) == 2
    assert plan.nodes.count(1) <= 2
    assert metrics["node/0/elsewhere_bytes"] == 0
    if plan.nodes.count(1):
        assert metrics["node/1/bytes"] == metrics["node/1/elsewhere_bytes"] >= 192 * KIB
        assert "lie on other nodes" in explanation


def test_all_state_in_memory_fills_the_fastest_node_first() -> None:
    _, plan, metrics, explanation = train(offload.AdamW, host_memory={"node0": 450 * KIB, "node1": "1MiB"})
    assert plan.nodes == (0, 0, 1, 1, 1, 1)
    assert metrics["node/1/elsewhere_bytes"] == 4 * 192 * KIB
    assert "768.0 KiB of host memory bound there, of which 768.0 KiB lie on other nodes" in explanation
