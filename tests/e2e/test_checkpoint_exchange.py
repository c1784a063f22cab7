"""State that comes from, and goes to, plain torch optimizers: safetensors and torch.distributed.checkpoint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mirror import same, states

import offload
from offload import cli
from offload.checkpoint.exchange import export_distributed
from offload.errors import CheckpointError


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 5)).to(dtype)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def ours(net: torch.nn.Module, **config: object) -> offload.AdamW:
    settings = offload.OffloadConfig(subgroup_numel=1024, **config)
    return offload.AdamW(net.named_parameters(), lr=1e-2, offload=settings)


@pytest.mark.parametrize("format", ["safetensors", "distributed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_and_in_again(tmp_path: Path, format: str, dtype: torch.dtype) -> None:
    (tmp_path / "path").mkdir()
    net = model(dtype=dtype)
    with ours(net, host_memory=0, paths=[tmp_path / "path"]) as optimizer:
        train(net, optimizer, 3)
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        before = states(optimizer, [*net.parameters()])
        train(net, optimizer, 2, first=3)
        after = states(optimizer, [*net.parameters()])
    target = tmp_path / "out" / "state"
    target.parent.mkdir()
    assert cli.main(["export", str(tmp_path / "ck"), str(target), "--format", format, "--quiet"]) == 0
    assert [entry.name for entry in target.parent.iterdir()] == ["state"]
    again = ["export", str(tmp_path / "ck"), str(target), "--format", format, "--quiet"]
    assert cli.main(again) == 2  # what is there is not replaced in silence
    other_kind = tmp_path / ("folder" if format == "safetensors" else "file")
    other_kind.mkdir() if format == "safetensors" else other_kind.touch()
    export = ["export", str(tmp_path / "ck"), str(other_kind), "--format", format, "--quiet", "--replace"]
    assert cli.main(export) == 2
    with pytest.raises(CheckpointError, match="written"):
        export_distributed(tmp_path / "ck", target / "file" if format == "safetensors" else other_kind)
    assert cli.main([*again, "--replace"]) == 0
    other = model(seed=5, dtype=dtype)
    with ours(other) as optimizer:
        optimizer.import_state(target)
        assert same(states(optimizer, [*other.parameters()]), before)
        train(other, optimizer, 2, first=3)
        assert same(states(optimizer, [*other.parameters()]), after)


@pytest.mark.parametrize("format", ["safetensors", "distributed"])
@pytest.mark.parametrize("saved", [torch.channels_last, torch.contiguous_format])
def test_weights_in_another_memory_format(tmp_path: Path, format: str, saved: torch.memory_format) -> None:
    def convolution(seed: int, memory_format: torch.memory_format) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Conv2d(30, 50, 3).to(memory_format=memory_format)  # several subgroups

    def state_of(net: torch.nn.Module, optimizer: offload.AdamW) -> list[torch.Tensor]:
        return [entry[name] for entry in map(optimizer.state.get, net.parameters()) for name in sorted(entry)]

    (tmp_path / "path").mkdir()
    net = convolution(0, saved)
    with ours(net, host_memory=0, paths=[tmp_path / "path"]) as optimizer:
        train(net, optimizer, 2)
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        before = state_of(net, optimizer)
    target = tmp_path / "state"
    assert cli.main(["export", str(tmp_path / "ck"), str(target), "--format", format, "--quiet"]) == 0
    other = convolution(1, torch.channels_last)
    with ours(other) as optimizer:
        optimizer.import_state(target)
        assert all(map(torch.equal, state_of(other, optimizer), before))
        assert all(map(torch.equal, other.parameters(), net.parameters()))  # an fp32 weight is its master


def test_a_plain_optimizer_reads_what_we_wrote(tmp_path: Path) -> None:
    net = model()
    with ours(net) as optimizer:
        train(net, optimizer, 3)
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        expected = states(optimizer, [*net.parameters()])
    cli.main(["export", str(tmp_path / "ck"), str(tmp_path / "dcp"), "--format", "distributed", "--quiet"])
    cli.main(["export", str(tmp_path / "ck"), str(tmp_path / "file"), "--quiet"])
    names = [name for name, _ in net.named_parameters()]
    state = {
        name: {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for name, p in net.named_parameters()
    }
    dcp.load({"state": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
    groups = plain.state_dict()["param_groups"]
    plain.load_state_dict({"state": dict(enumerate(state[name] for name in names)), "param_groups": groups})
    for number, parameter in enumerate(net.parameters()):
        assert torch.equal(plain.state[parameter]["exp_avg"], expected[len(names) + 3 * number + 1])
        assert torch.equal(plain.state[parameter]["exp_avg_sq"], expected[len(names) + 3 * number + 2])
        assert plain.state[parameter]["step"] == 3
    # And the file is what the format says: a header that names every tensor, and their bytes.
    content = (tmp_path / "file").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    begin, end = header["state.0.weight.exp_avg"]["data_offsets"]
    base = 8 + int.from_bytes(content[:8], "little")
    values = torch.frombuffer(bytearray(content[base + begin : base + end]), dtype=torch.float32)
    assert torch.equal(values.view(60, 40), expected[len(names) + 1])


def test_state_of_a_plain_optimizer_comes_in(tmp_path: Path) -> None:
    net = model()
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, plain, 3)
    state = {name: plain.state[parameter] for name, parameter in net.named_parameters()}
    dcp.save({"optimizer": {"state": state}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with ours(net) as optimizer:
        optimizer.import_state(tmp_path / "dcp")
        for number, parameter in enumerate(net.parameters()):
            found = optimizer.state_for(parameter)
            assert torch.equal(found["exp_avg"], plain.state[parameter]["exp_avg"])
            assert torch.equal(found["master"], parameter)
            assert optimizer.engine.step_count(number) == 3


def test_a_copy_that_finds_no_room_is_refused(
    tmp_path: Path, mounted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written to through a mapping, a page without room would end the process."""
    net = model()
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, plain, 1)
    state = {name: plain.state[parameter] for name, parameter in net.named_parameters()}
    dcp.save({"optimizer": {"state": state}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    monkeypatch.setattr(tempfile, "tempdir", str(mounted("tmpfs", "size=8k")))
    with ours(net) as optimizer:
        before = states(optimizer, [*net.parameters()])
        with pytest.raises(CheckpointError, match=r"no room for a copy of .*/dcp .*No space left on device"):
            optimizer.import_state(tmp_path / "dcp")
        assert same(states(optimizer, [*net.parameters()]), before)
        monkeypatch.undo()
        optimizer.import_state(tmp_path / "dcp")
        assert optimizer.engine.step_count(0) == 1


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    net = model()
    (tmp_path / "text").write_text("hello, this is no safetensors file")
    (tmp_path / "empty").mkdir()
    header = b'{"weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "weights").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with ours(net) as optimizer:
        for name in ("text", "empty", "weights", "missing"):
            with pytest.raises(offload.CheckpointError, match=name):
                optimizer.import_state(tmp_path / name)
        train(net, optimizer, 1)
