"""A master is given up element by element: only where the weight is no longer what it rounds to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mirror import same, same_bits
from sharded import on_ranks
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.engine import views
from offload.kernels.reference import matched

SHAPES = [(70, 64), (3000,), (129, 33)]
STEPS = 4

Parameters = list[torch.nn.Parameter]


def parameters_of(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Parameters:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [torch.nn.Parameter(tensor.to(device)) for tensor in drawn]


def named(parameters: Parameters) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]


def gradients(parameters: Parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = drawn.to(parameter.device)


# Ways to write to weights and put them back, to the bit


def sharpness_aware(parameters: Parameters) -> None:
    old = [parameter.clone() for parameter in parameters]
    for parameter, kept in zip(parameters, old, strict=True):
        parameter.add_(1)
        parameter.copy_(kept)


def average_swapped_in(parameters: Parameters) -> None:
    for parameter in parameters:
        kept = parameter.data
        parameter.data = kept.clone().mul_(0.999)
        parameter.data = kept.clone()


def copied(parameters: Parameters) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.clone()


def merged(parameters: Parameters) -> None:
    """As an adapter whose delta is a power of two, far below the weights' last bit or as large as they."""
    for parameter in parameters:
        kept = parameter.clone()
        parameter.add_(torch.full_like(parameter, 2.0**-30)).sub_(torch.full_like(parameter, 2.0**-30))
        parameter.copy_(torch.where(parameter == kept, parameter, kept))


def loaded(parameters: Parameters) -> None:
    module = torch.nn.ParameterList(parameters)
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()})


def between_looks(parameters: Parameters, look: Callable[[], Any]) -> None:
    kept = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.mul_(1.5)
    look()
    for parameter, tensor in zip(parameters, kept, strict=True):
        parameter.copy_(tensor)
    look()


WAYS: dict[str, Callable[[Parameters], None]] = {
    "a step of SAM": sharpness_aware,
    "an average swapped in": average_swapped_in,
    "a copy": copied,
    "a merge": merged,
    "loaded once more": loaded,
}

MADE: dict[str, Callable[..., Any]] = {
    **{
        f"{kind.__name__}, {state_format}": lambda params, config, kind=kind, form=state_format: kind(
            params, lr=1e-3, offload={**config, "state_format": form, "exact_names": []}
        )
        for kind, state_format in ((offload.AdamW, "exact"), (offload.Muon, "exact"), (offload.Muon, "compact8"))
        if kind is not offload.Muon or hasattr(torch.optim, "Muon")
    },
    "wrapped, masters": lambda params, config: offload.wrap(
        torch.optim.RMSprop, params, lr=1e-3, masters=True, offload=config
    ),
    "wrapped": lambda params, config: offload.wrap(torch.optim.RMSprop, params, lr=1e-3, offload=config),
}


def run(made: Callable[..., Any], config: dict[str, Any], dtype: torch.dtype, touch: Callable[..., Any]) -> list[Any]:
    parameters = parameters_of(dtype)
    with made(named(parameters), config) as optimizer:
        for step in range(STEPS):
            gradients(parameters, step)
            with torch.no_grad():
                touch(parameters, optimizer)
            optimizer.step()
        states = [tensor for p in parameters for tensor in optimizer.state_for(p).values()]
        return [*states, *(parameter.detach().clone() for parameter in parameters)]


def everywhere(parameters: Parameters, optimizer: Any) -> None:
    for way in WAYS.values():
        way(parameters)
    between_looks(parameters, optimizer.state_dict)
    between_looks(parameters, lambda: [optimizer.state_for(parameter) for parameter in parameters])


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize(
    ("dtype", "streamed"), [(torch.float16, False), (torch.bfloat16, True)], ids=["memory", "paths"]
)
def test_what_is_written_and_put_back_changes_nothing(
    made: Callable[..., Any], dtype: torch.dtype, streamed: bool, tmp_path: Path
) -> None:
    """Of the other rules and formats `test_programs` says it."""
    config = {"host_memory": 0, "paths": [tmp_path], "staging_memory": "1MiB"} if streamed else {}
    config |= {"subgroup_numel": 8192, "threads": 1}
    assert same(run(made, config, dtype, everywhere), run(made, config, dtype, lambda *given: None))


@pytest.mark.parametrize(
    ("form", "dtype", "piece"),
    [("exact", torch.bfloat16, 100), ("compact16", torch.float16, 1 << 20), ("compact8", torch.bfloat16, 1 << 20)],
)
def test_what_is_changed_counts_where_it_is(
    form: str, dtype: torch.dtype, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look shows what an update begins with, piece by piece, and settles nothing; a save settles it."""
    monkeypatch.setattr(views, "PIECE_NUMEL", piece)
    parameters = parameters_of(dtype)
    config = {"state_format": form, "exact_names": [], "host_memory": 0, "paths": [tmp_path / "state"]}
    (tmp_path / "state").mkdir()
    with offload.AdamW(named(parameters), lr=1e-3, offload=config) as optimizer, torch.no_grad():
        for step in range(STEPS):
            gradients(parameters, step)
            optimizer.step()
        before = [optimizer.state_for(parameter)["master"] for parameter in parameters]
        assert all((b != p.float()).float().mean() > 0.5 for b, p in zip(before, parameters, strict=True))
        kept = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter[::3] = 0.3
        expected = [matched(b, p.detach()) for b, p in zip(before, parameters, strict=True)]
        for _ in range(2):
            assert same([optimizer.state_for(parameter)["master"] for parameter in parameters], expected)
            read = optimizer.state_dict()["state"]
            assert same([read[number]["master"] for number in range(3)], expected)
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
        assert same([optimizer.state_for(parameter)["master"] for parameter in parameters], before)
        for parameter in parameters:
            parameter[::3] = 0.3
        optimizer.save_checkpoint(tmp_path / "saved", copy=True)
        optimizer.wait_checkpoint()
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
        settled = [matched(e, old) for e, old in zip(expected, kept, strict=True)]
        assert same([optimizer.state_for(parameter)["master"] for parameter in parameters], settled)
        others = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
        with offload.AdamW(named(others), offload={"state_format": form, "exact_names": []}) as loaded_into:
            loaded_into.load_checkpoint(tmp_path / "saved")
            assert same([loaded_into.state_for(parameter)["master"] for parameter in others], expected)


@pytest.mark.parametrize("form", ["exact", "compact8"])
def test_masters_that_a_reset_leaves_are_in_state_dicts(form: str) -> None:
    found = []
    for transfer_slot in (False, True):
        parameters = parameters_of()
        config = {"state_format": form, "exact_names": []}
        with offload.AdamW(named(parameters), lr=1e-3, offload=config) as optimizer:
            for step in range(STEPS):
                gradients(parameters, step)
                optimizer.step()
            optimizer.reset_state(parameters[:2])
            assert [*optimizer.state] == parameters[2:]
            state = optimizer.state_dict()
            assert [float(state["state"][number]["step"]) for number in range(3)] == [0, 0, STEPS]
            if transfer_slot:
                parameters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
                with offload.AdamW(named(parameters), lr=1e-3, offload=config) as other:
                    other.load_state_dict(state)
                    other.load_state_dict(other.state_dict())
                    found.append(gone_on(other, parameters))
            else:
                found.append(gone_on(optimizer, parameters))
            twin = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
            plain = torch.optim.AdamW(named(twin), lr=1e-3)
            plain.load_state_dict(state)
            gradients(twin, 0)
            plain.step()
            assert [float(plain.state[parameter]["step"]) for parameter in twin] == [1, 1, STEPS + 1]
            optimizer.load_state_dict({**state, "state": {2: state["state"][2]}})  # the others begin anew
            for number, parameter in enumerate(parameters[:2] if not transfer_slot else []):
                assert same_bits(optimizer.state_for(parameter)["master"], parameter.detach().float()), number
    assert same(*found)


def gone_on(optimizer: Any, parameters: Parameters) -> list[torch.Tensor]:
    gradients(parameters, 77)
    optimizer.step()
    return [tensor for parameter in parameters for tensor in optimizer.state_for(parameter).values()]


# Ranks


@on_ranks(2)
def test_ranks_with_one_state_settle_it_together(folder: Path) -> None:
    """One rank saves for both amid an evaluation of averaged weights: both go on with the same masters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 70, bias=False).bfloat16()
    parallel = DistributedDataParallel(model)
    config = offload.OffloadConfig(host_memory=0, paths=[folder], threads=1)
    with offload.AdamW(parallel.named_parameters(), lr=1e-3, offload=config) as optimizer:
        for step in range(3):
            parallel(torch.randn(4, 64).bfloat16() + step).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.mul_(0.75)
            optimizer.save_checkpoint(folder / "saved")
            optimizer.wait_checkpoint()
            model.weight.copy_(kept)
        mine = optimizer.state_for(model.weight)["master"]
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert same_bits(both[0], both[1])


@pytest.mark.parametrize("shard", [True, False], ids=["ddp", "fsdp2"])
@on_ranks(2)
def test_shards_that_are_written_and_put_back(folder: Path, shard: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    found = []
    for touched in (False, True):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(64, 70), torch.nn.Tanh(), torch.nn.Linear(70, 9)).bfloat16()
        model = DistributedDataParallel(model) if shard else fully_shard(model)
        with offload.AdamW(model.parameters(), lr=1e-3, offload={"shard": shard, "threads": 1}) as optimizer:
            for step in range(3):
                torch.manual_seed(step)
                model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
                if touched:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            kept = parameter.clone()
                            parameter.add_(1)
                            optimizer.state_for(parameter)
                            parameter.copy_(kept)
                optimizer.step()
                optimizer.zero_grad()
            states = [optimizer.state_for(parameter)["master"] for parameter in model.parameters()]
            found.append([getattr(state, "_local_tensor", state) for state in states])
    assert same(*found)
