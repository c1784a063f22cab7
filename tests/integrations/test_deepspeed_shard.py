"""`Shard` and its copies from and to another device, which end as late as they may."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from offload import GroupScalars, OffloadConfig
from offload.integrations.deepspeed import shard as shard_module
from offload.integrations.deepspeed.shard import Piece, Shard
from offload.integrations.deepspeed.transfers import Transfers
from offload.sim import LateTransfers

PIECES = (Piece("a", 0, 0, 5, 0), Piece("b", 0, 5, 3, 0))
GROUPS = [GroupScalars(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=True, maximize=False)]
GRADIENT = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])


def make(dtype: torch.dtype = torch.bfloat16, transfers: type[Any] = Transfers) -> tuple[Shard, torch.Tensor]:
    weights = torch.linspace(-1, 1, 8).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "Transfers", transfers)
        shard = Shard(PIECES, [weights], OffloadConfig(host_memory="1MiB", threads=1))
    shard.gradients = [torch.zeros(8, dtype=dtype)]
    return shard, weights


@pytest.fixture
def late() -> Iterator[Shard]:
    shard, _ = make(transfers=LateTransfers)
    yield shard
    shard.close()


def stepped(shard: Shard) -> Any:
    shard.step(GROUPS, 1.0)
    return shard.weights[0].tolist(), shard.read(0, "exp_avg", 5).tolist()


READERS: dict[str, Callable[[Shard], Any]] = {
    "gradient": lambda shard: shard.gradient(0).tolist(),
    "lend_gradient": lambda shard: shard.lend_gradient(0).tolist(),
    "sum_of": lambda shard: shard.sum_of(0).tolist(),
    "norms": lambda shard: shard.norms(),
    "step": stepped,
}


@pytest.mark.parametrize("arrivals", [1, 3])
@pytest.mark.parametrize("reader", READERS)
def test_readers_wait_for_gradients(reader: str, arrivals: int, late: Shard) -> None:
    near, _ = make()
    found = []
    for shard in (near, late):
        for _ in range(arrivals):
            shard.accumulate(0, GRADIENT.bfloat16(), final=False)
        found.append(READERS[reader](shard))
    near.close()
    assert found[1] == found[0]
    if reader == "norms":
        assert found[1] == {"a": pytest.approx(arrivals * math.sqrt(55))}


def test_an_overflow_that_is_on_its_way_is_seen(late: Shard) -> None:
    late.accumulate(0, torch.full((5,), math.inf), final=True)
    assert not late.is_finite()


def test_what_is_thrown_away_does_not_arrive_later(late: Shard) -> None:
    late.accumulate(0, GRADIENT, final=True)
    late.close_window()
    late.gradients[0].fill_(7)
    assert late.gradient(0).tolist() == [7] * 5


def test_the_source_may_change_when_the_copy_has_been_started(late: Shard) -> None:
    gradient = GRADIENT.clone()
    late.accumulate(0, gradient, final=True)
    gradient.zero_()
    assert late.gradient(0).tolist() == GRADIENT.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_another_device(dtype: torch.dtype) -> None:
    """They are there after a wait; those of a parameter without a gradient stay as somebody else has made them."""
    near, expected = make(dtype)
    late, weights = make(dtype, LateTransfers)
    before = weights.clone()
    if dtype == torch.bfloat16:  # in fp32 the host has the masters
        expected[5:] = weights[5:] = 9.0
    for shard in (near, late):
        shard.accumulate(0, GRADIENT.to(dtype), final=True)
        shard.step(GROUPS, 1.0)
        shard.push_weights(0)
    assert torch.equal(weights[:5], before[:5])
    late.transfers.wait()
    assert not torch.equal(weights[:5], before[:5])
    assert torch.equal(weights, expected)
    near.close()
    late.close()


def test_reductions_in_fp32_are_added_to_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device they go to zeros there, which are then accumulated on the host; on the CPU to our own buffer."""
    pytest.importorskip("deepspeed")
    from offload.integrations.deepspeed.stage12 import OffloadedStage12

    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    for device in ("cpu", "meta"):
        optimizer = object.__new__(OffloadedStage12)
        optimizer.shard, _ = make(torch.float32)
        optimizer.dtype, optimizer.gradient_accumulation_dtype = torch.bfloat16, torch.float32
        optimizer.real_dp_process_group, optimizer.params_in_partition = [None], [[]]
        optimizer.parallel_partitioned_bit16_groups = [[torch.empty(8, dtype=torch.bfloat16, device=device)]]
        optimizer._numbers, optimizer._sums = {11: 0}, {}
        target = optimizer._get_compact_grad_partition_slice(0, 0, 11, 5)
        assert target is not None
        assert (target.device.type, target.dtype, target.numel()) == (device, torch.float32, 5)
        assert optimizer._get_compact_grad_partition_slice(0, 1, 11, 5) is None
        optimizer.shard.close()


@pytest.mark.gpu
def test_copies_of_a_gpu_are_waited_for() -> None:
    transfers = Transfers()
    source = torch.zeros(1 << 24, device="cuda")
    target = transfers.buffer(source)
    torch.cuda.synchronize()
    for value in (1.0, 2.0):
        torch.cuda._sleep(100_000_000)  # else it might have ended anyway
        source.fill_(value)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            transfers.start(target, source)
        transfers.wait()
        assert bool((target == value).all())
