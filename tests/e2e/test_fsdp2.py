"""FSDP2: state of local shards, norms over all ranks, checkpoints by piece, on gloo processes."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from mirror import Mirror, same, same_bits
from sharded import SETTINGS, Model, clipped, exact_gradients, local, mean_gradients, on_ranks, own, spawn, start
from tensor_files import saved_as_safetensors
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef

import offload
from offload.checkpoint import commit
from offload.checkpoint.reader import Checkpoint
from offload.weights.mapping import is_mapped


def config(folder: Path, **settings: object) -> offload.OffloadConfig:
    (folder / "state").mkdir(exist_ok=True)
    found = {"host_memory": 0, "paths": [folder / "state"], "subgroup_numel": 1024, "threads": 1, **settings}
    return offload.OffloadConfig(**found)


def sharded_model(dtype: torch.dtype = torch.bfloat16, **settings: object) -> Model:
    model = Model(dtype)
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def assert_equals_whole(optimizer: offload.AdamW, model: torch.nn.Module, mirror: Mirror) -> None:
    """Check weights and state of this rank's pieces against the whole, bit for bit."""
    for parameter in model.parameters():
        for name, found in optimizer.state_for(parameter).items():
            assert isinstance(found, DTensor), name
            assert (found.device_mesh, found.placements) == (parameter.device_mesh, parameter.placements)
            assert found.dtype == torch.float32
            assert found.shape == parameter.shape
    mirror.assert_same(optimizer, model.parameters())


def exact(folder: Path, **settings: object) -> None:
    """Train with gradients of which every order of addition is exact, beside the whole model in memory."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mirror = Mirror(Model().parameters(), **SETTINGS)
    model = sharded_model()
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder, **settings))
    for step in range(5):
        if step == 3:  # two passes, reduced once
            model.set_requires_gradient_sync(False)
            model(exact_gradients(10 + step, rank)).backward()
            model.set_requires_gradient_sync(True)
        model(exact_gradients(step, rank)).backward()
        gradients = mean_gradients(step, ranks)
        if step == 3:
            both = zip(gradients, mean_gradients(10 + step, ranks), strict=True)
            gradients = [left + right for left, right in both]
        clip = clipped(optimizer, mirror, gradients) if step % 2 else 1.0
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        mirror.step(gradients, clip)
    assert_equals_whole(optimizer, model, mirror)
    optimizer.close()


@on_ranks(2)
def test_shards_have_the_bits_of_the_whole_wherever_gradients_lie(folder: Path) -> None:
    exact(folder)
    exact(folder, gradient_memory=0)


SAVED_RANKS = 4


def train(optimizer: offload.AdamW, model: torch.nn.Module, steps: range) -> None:
    """Train with the mean gradients that `SAVED_RANKS` ranks would have, whatever the number of ranks."""
    for step in steps:
        gradients = iter(mean_gradients(step, SAVED_RANKS))
        model([[next(gradients) for _ in block.weights] for block in model.blocks]).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_mirror(dtype: torch.dtype, steps: int) -> Mirror:
    mirror = Mirror(Model(dtype).parameters(), **SETTINGS)
    for step in range(steps):
        mirror.step(mean_gradients(step, SAVED_RANKS))
    return mirror


def save(folder: Path, dtype: torch.dtype, copy: bool) -> None:
    model = sharded_model(dtype)
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    train(optimizer, model, range(3))
    optimizer.save_checkpoint(folder / "ck", extra={"rank": dist.get_rank()}, copy=copy)
    train(optimizer, model, range(3, 5))
    optimizer.wait_checkpoint()
    assert_equals_whole(optimizer, model, trained_mirror(dtype, 5))
    optimizer.close()


def resume(folder: Path, dtype: torch.dtype) -> None:
    model = sharded_model(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    optimizer = offload.AdamW(model.named_parameters(), **{**SETTINGS, "lr": 1.0}, offload=config(folder))
    extra = optimizer.load_checkpoint(folder / "ck")
    assert extra == {"rank": dist.get_rank()}
    assert_equals_whole(optimizer, model, trained_mirror(dtype, 3))
    train(optimizer, model, range(3, 5))
    assert_equals_whole(optimizer, model, trained_mirror(dtype, 5))
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "copy", "others"),
    [(torch.bfloat16, False, (4, 2, 1)), (torch.float32, True, (2,))],
    ids=["in-place", "copy-fp32"],
)
def test_four_ranks_save_and_others_resume(
    tmp_path: Path, dtype: torch.dtype, copy: bool, others: tuple[int, ...]
) -> None:
    spawn(SAVED_RANKS, tmp_path, save, dtype, copy)
    for ranks in others:
        spawn(ranks, tmp_path, resume, dtype)
    model = Model(dtype)  # not sharded at all
    with offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(tmp_path)) as optimizer:
        assert optimizer.load_checkpoint(tmp_path / "ck") == {"rank": 0}
        train(optimizer, model, range(3, 5))
        trained_mirror(dtype, 5).assert_same(optimizer, model.parameters())


class Net(torch.nn.Module):
    """Two linear layers about a norm, with fewer outputs than ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(30)
        self.up = torch.nn.Linear(30, 70)
        self.down = torch.nn.Linear(70, 2)
        self.to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.tanh(self.up(self.norm(inputs))))
        return found


def made(kind: str) -> tuple[torch.nn.Module, torch.dtype]:
    """Return a sharded model and the dtype of its inputs."""
    ranks = dist.get_world_size()
    net = Net(torch.bfloat16 if kind == "bf16" else torch.float32)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(net, mesh=mesh), torch.float32
    if kind == "two meshes":
        flat = init_device_mesh("cpu", (ranks,))
        grid = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net.up, mesh=grid)
        return fully_shard(net, mesh=flat), torch.float32
    if kind == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return fully_shard(net, mp_policy=policy), torch.float32
    if kind == "cpu offload":
        return fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False)), torch.float32
    if kind in ("tp", "fsdp tp"):
        shape = (ranks,) if kind == "tp" else (ranks // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        plan = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(),
        }
        parallelize_module(net, mesh["tp"], plan)
        assert net.down.weight.placements == (Shard(1),)
        assert net.norm.weight.placements == (Replicate(),)
        return net if kind == "tp" else fully_shard(net, mesh=mesh["dp"]), torch.float32
    return fully_shard(net), torch.bfloat16 if kind == "bf16" else torch.float32


def emptied(kind: str) -> torch.nn.Module:
    """Return such a model whose weights are all 0."""
    model, _ = made(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def whole_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a gradient, reduced if it was not."""
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    return gradient.redistribute(placements=parameter.placements).to_local().clone()


def torch_norm(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Return what torch's `clip_grad_norm_` returns, which takes parameters of one mesh at a time."""
    meshes = list(dict.fromkeys(parameter.device_mesh for parameter in parameters))
    norms = []
    for mesh in meshes:
        norm = torch.nn.utils.clip_grad_norm_([p for p in parameters if p.device_mesh == mesh], math.inf)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def real(folder: Path, kind: str) -> None:
    """Train on data; compare with the reference's update of the same reduced pieces, and norms with torch's."""
    rank = dist.get_rank()
    model, dtype = made(kind)
    parameters = list(model.parameters())
    mirror = Mirror([local(p.detach()) for p in parameters], **SETTINGS)
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    for step in range(4):
        torch.manual_seed(step if kind == "tp" else 100 * step + rank // (2 if kind == "fsdp tp" else 1))
        for _ in range(2):
            model(torch.randn(8, 30).to(dtype)).float().square().mean().backward()
        gradients = [whole_gradient(parameter) for parameter in parameters]
        expected = torch_norm(parameters)
        norm = float(optimizer.clip_grad_norm_(0.05))
        rounded = torch.tensor(norm).to(expected.dtype)
        near = [rounded, *(torch.nextafter(rounded, torch.tensor(end).to(rounded)) for end in (0.0, math.inf))]
        assert expected in near, (step, kind, norm, float(expected), [float(n) for n in near])
        everyone: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, norm)
        assert set(everyone) == {norm}
        optimizer.step()
        optimizer.zero_grad()
        mirror.step(gradients, min(1.0, 0.05 / (norm + 1e-6)))
    for parameter, weight, master, moments in zip(
        parameters, mirror.weights, mirror.masters, mirror.moments, strict=True
    ):
        found = [parameter.detach(), *optimizer.state_for(parameter).values()]
        assert {(each.device_mesh, each.placements) for each in found} == {
            (parameter.device_mesh, parameter.placements)
        }
        assert same([local(each) for each in found], [weight, master, *moments])
    optimizer.save_checkpoint(folder / "ck")
    wholes = {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}
    states = {
        name: {key: tensor.full_tensor() for key, tensor in optimizer.state_for(parameter).items()}
        for name, parameter in model.named_parameters()
    }
    optimizer.wait_checkpoint()
    optimizer.close()
    model = emptied(kind)
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    optimizer.load_checkpoint(folder / "ck")
    for name, parameter in model.named_parameters():
        assert same_bits(parameter.detach().full_tensor(), wholes[name])
        for key, tensor in optimizer.state_for(parameter).items():
            assert same_bits(tensor.full_tensor(), states[name][key])
    optimizer.close()
    if rank == 0:
        torch.save((wholes, states), folder / "wholes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *(("fp32", 1), ("bf16", 2), ("mixed", 4), ("cpu offload", 2)),
        *(("hsdp", 4), ("two meshes", 4), ("tp", 2), ("fsdp tp", 4)),
    ],
)
def test_shards_are_updated_as_the_reference_does(tmp_path: Path, kind: str, ranks: int) -> None:
    spawn(ranks, tmp_path, real, kind)
    wholes, states = torch.load(tmp_path / "wholes")
    model = Net(torch.bfloat16 if kind == "bf16" else torch.float32)
    with offload.AdamW(model.named_parameters(), **SETTINGS) as optimizer:
        optimizer.load_checkpoint(tmp_path / "ck")
        for name, parameter in model.named_parameters():
            assert same_bits(parameter.detach(), wholes[name])
            for key, tensor in optimizer.state_for(parameter).items():
                assert same_bits(tensor, states[name][key])


MUON = {"lr": 1e-2, "weight_decay": 1e-2, "adjust_lr_fn": "match_rms_adamw"}
MATRICES = {"up.weight", "down.weight"}


def muon_twin(model: torch.nn.Module) -> Net:
    """Return the whole model on each rank."""
    twin = Net(next(model.parameters()).dtype)
    with torch.no_grad():
        for mine, parameter in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(parameter.full_tensor())
    return twin


def assert_is_of(model: torch.nn.Module, twin: torch.nn.Module) -> None:
    for (name, parameter), whole in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert same_bits(local(parameter.detach()), own(parameter, whole.detach())), name


def muon_step(model: torch.nn.Module, optimizer: offload.Muon, twin: Net, beside: offload.Muon, clips: bool) -> None:
    """Take a step with the same gradients, and a norm that one process adds up in another order."""
    for parameter, whole in zip(model.parameters(), twin.parameters(), strict=True):
        grad = parameter.grad
        whole.grad = None if grad is None else grad.redistribute(placements=parameter.placements).full_tensor()
    if clips:
        norm = float(optimizer.clip_grad_norm_(0.05))
        known, beside._scaling.norm_with_factors = beside._scaling.norm_with_factors, lambda _: norm
        beside.clip_grad_norm_(0.05)
        beside._scaling.norm_with_factors = known
    optimizer.step()
    beside.step()
    assert_is_of(model, twin)
    optimizer.zero_grad()
    beside.zero_grad()


def muon(folder: Path, kind: str) -> None:
    """Train by Muon beside one process that has all of it; save, and resume."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, dtype = made(kind)
    twin = muon_twin(model)
    beside = offload.Muon(twin.named_parameters(), **MUON)
    optimizer = offload.Muon(model.named_parameters(), **MUON, offload=config(folder))
    layout = optimizer.engine.plan.layout.parameters
    pieces = {parameter.name: parameter.numel for parameter in layout if parameter.name in MATRICES}
    wholes = {name: parameter.numel() for name, parameter in model.named_parameters() if name in MATRICES}
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, pieces)
    assert all(pieces[name] in (0, wholes[name]) for name in MATRICES)
    assert all(sum(each[name] for each in everyone) == wholes[name] for name in MATRICES)

    def backward(step: int) -> None:
        torch.manual_seed(step if kind == "tp" else 100 * step + rank // (2 if kind == "fsdp tp" else 1))
        for _ in range(2):
            model(torch.randn(8, 30).to(dtype)).float().square().mean().backward()

    for step in range(5):
        backward(step)
        if step == 1:
            model.up.weight.grad = None
        if step == 2:  # somebody changes weights on one side of the norm, and on the other
            with torch.no_grad():
                for each in (model, twin):
                    each.down.weight.mul_(0.5)
        muon_step(model, optimizer, twin, beside, clips=step % 2 == 0)
    with torch.no_grad():
        for each in (model, twin):
            each.up.weight.add_(0.25)
    optimizer.save_checkpoint(folder / "ck")  # with what was changed since the step
    optimizer.wait_checkpoint()
    optimizer.close()
    if rank == 0:
        torch.save(twin.state_dict(), folder / "twin")
    model, optimizer = muon_resumed(folder, kind)
    backward(7)
    muon_step(model, optimizer, twin, beside, clips=True)
    optimizer.close()
    beside.close()


def muon_resumed(folder: Path, kind: str) -> tuple[torch.nn.Module, offload.Muon]:
    """Load what ranks have saved, and what one process has of it."""
    dist.barrier()
    model = emptied(kind)
    optimizer = offload.Muon(model.named_parameters(), **MUON, offload=config(folder))
    optimizer.load_checkpoint(folder / "ck")
    twin = Net(next(model.parameters()).dtype)
    twin.load_state_dict(torch.load(folder / "twin"))
    assert_is_of(model, twin)
    return model, optimizer


def muon_goes_on(folder: Path, kind: str) -> None:
    """Go on beside one process that has loaded what other ranks have saved."""
    model, optimizer = muon_resumed(folder, kind)
    twin = Net(next(model.parameters()).dtype)
    with offload.Muon(twin.named_parameters(), **MUON) as beside:
        beside.load_checkpoint(folder / "ck")
        torch.manual_seed(dist.get_rank())
        model(torch.randn(8, 30).to(twin.up.weight.dtype)).float().square().mean().backward()
        muon_step(model, optimizer, twin, beside, clips=True)
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("bf16", 2), ("fp32", 3), ("mixed", 2), ("hsdp", 4), ("two meshes", 4), ("tp", 2), ("fsdp tp", 4)],
)
def test_muon_has_whole_matrices_of_shards(tmp_path: Path, kind: str, ranks: int) -> None:
    spawn(ranks, tmp_path, muon, kind)
    for others in {"bf16": (1, 3), "fp32": (2,)}.get(kind, ()):
        spawn(others, tmp_path, muon_goes_on, kind)


def muon_pair(folder: Path, dtype: torch.dtype, **settings: Any) -> tuple[Any, Any, Net, Any]:
    """Return a sharded model, its optimizer, and one process's; a step has been taken."""
    model = fully_shard(Net(dtype))
    twin = muon_twin(model)
    beside = offload.Muon(twin.named_parameters(), **MUON)
    optimizer = offload.Muon(model.named_parameters(), **MUON, offload=config(folder, **settings))
    muon_backward(model, 0)
    muon_step(model, optimizer, twin, beside, clips=False)
    return model, optimizer, twin, beside


def muon_backward(model: torch.nn.Module, step: int) -> None:
    torch.manual_seed(10 * step + dist.get_rank())
    model(torch.randn(8, 30).to(next(model.parameters()).dtype)).float().square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_muon_sees_what_changes_between_ranks_meetings(folder: Path, dtype: torch.dtype) -> None:
    """What writes past version counters, or comes between clipping and a step, is seen as by every optimizer."""
    model, optimizer, twin, beside = muon_pair(folder, dtype)
    if dtype is torch.float32:
        torch._foreach_mul_([local(p.detach()) for p in model.parameters()], 0.5)
    else:
        model.up.weight._local_tensor.data.mul_(0.5)
        twin.up.weight.data.mul_(0.5)
        for each in (optimizer, beside):
            each.refresh_masters()
    if dtype is torch.float32:
        torch._foreach_mul_([p.detach() for p in twin.parameters()], 0.5)
    muon_backward(model, 1)
    muon_step(model, optimizer, twin, beside, clips=True)
    muon_backward(model, 2)
    before = float(optimizer.clip_grad_norm_(math.inf))
    torch._foreach_mul_([local(p.grad) for p in model.parameters()], 2.0)
    assert float(optimizer.clip_grad_norm_(math.inf)) == pytest.approx(2 * before)
    muon_step(model, optimizer, twin, beside, clips=False)
    muon_backward(model, 3)
    optimizer.clip_grad_norm_(0.01)
    muon_backward(model, 4)
    with pytest.raises(offload.ConfigError, match="more gradient has arrived"):
        optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for each in (model, twin):
            each.up.weight.fill_(7)
    for each, of in ((model, optimizer), (twin, beside)):
        value = torch.full((2,), 0.5)
        place = each.down.bias
        of.state[place]["master"] = (
            distribute_tensor(value, place.device_mesh, place.placements) if each is model else value
        )
    assert_is_of(model, twin)  # also what was changed before
    muon_backward(model, 5)
    with torch.inference_mode():
        optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    beside.close()


@on_ranks(2)
def test_muon_is_refused_on_all_ranks(folder: Path) -> None:
    """What cannot be is refused on all ranks, and nobody waits for the others."""
    rank = dist.get_rank()
    model, optimizer, _, _ = muon_pair(folder, torch.float32)
    muon_backward(model, 1)
    if rank:
        model.up.weight.grad = None
    with pytest.raises(offload.ConfigError, match=r"gradient of up\.weight.*not alike on all ranks"):
        optimizer.step()
    optimizer.zero_grad()
    grown = torch.nn.Parameter(torch.ones(6, 6))
    sharded = torch.nn.Parameter(distribute_tensor(grown.detach(), model.up.weight.device_mesh, [Shard(0)]), False)
    optimizer.add_param_group({"params": [("grown", sharded)]})
    sharded.requires_grad_()
    if rank:
        sharded.grad = torch.ones_like(sharded)
    with pytest.raises(offload.ConfigError, match=r"gradient of grown.*not on all ranks"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    with pytest.raises(offload.SessionBrokenError):
        optimizer.step()
    # Only the owner has no room for a matrix; no rank goes on.
    vector = torch.nn.Parameter(torch.ones(8))
    optimizer = offload.Muon([("vector", vector)], offload={"host_memory": 200_000})
    large = torch.nn.Parameter(distribute_tensor(torch.ones(400, 400), model.up.weight.device_mesh, [Shard(0)]))
    with pytest.raises((offload.ConfigError, offload.InfeasiblePlanError), match="needs"):
        optimizer.add_param_group({"params": [("large", large)]})
    vector.grad = torch.ones(8)
    with pytest.raises(offload.SessionBrokenError):
        optimizer.step()


def die(*arguments: object, **keywords: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def killed(folder: Path, victim: int, moment: str) -> None:
    """A rank is killed at some moment of a step or a save; the other has to hear of it, and leave what it heard."""
    model = sharded_model()
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    train(optimizer, model, range(3))
    optimizer.save_checkpoint(folder / "ck")
    optimizer.wait_checkpoint()
    dist.barrier()
    if dist.get_rank() == victim:
        parameter = next(model.parameters())
        if moment == "backward":
            parameter.register_post_accumulate_grad_hook(die)
        elif moment == "step":
            optimizer.engine.step = die
        elif moment == "save":
            optimizer.engine.checkpoints.save = die
        else:
            commit.CommitJob.run = die
    heard: BaseException | None = None
    try:
        with optimizer:
            for step in range(3, 5):
                model(exact_gradients(step, dist.get_rank())).backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                optimizer.save_checkpoint(folder / "ck")
                optimizer.wait_checkpoint()
    except Exception as error:
        heard = error
    (folder / "heard").write_text(f"{type(heard).__name__}: {heard}")
    os._exit(0)  # without the barrier of an orderly end, for which nobody is left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "moment"), [(1, "backward"), (1, "step"), (1, "save"), (0, "save"), (1, "commit"), (0, "commit")]
)
def test_a_killed_rank_is_heard_of_and_nothing_is_half_committed(tmp_path: Path, victim: int, moment: str) -> None:
    context = start(2, tmp_path, killed, victim, moment)
    for process in context.processes:
        process.join(120)
    assert context.processes[victim].exitcode == -signal.SIGKILL
    assert context.processes[1 - victim].exitcode == 0
    said = f"CheckpointError: {tmp_path / 'ck'} was not committed: rank {victim} has ended"
    assert (tmp_path / "heard").read_text().startswith(said if moment in ("save", "commit") else "RuntimeError")
    model = Model()
    with offload.AdamW(model.named_parameters(), **SETTINGS) as optimizer:
        optimizer.load_checkpoint(tmp_path / "ck")
        trained_mirror(torch.bfloat16, 3).assert_same(optimizer, model.parameters())


def formats(folder: Path, state_format: str) -> None:
    """What is rounded by an element's place in the whole has the same bits however it is cut."""
    model = sharded_model()
    optimizer = offload.AdamW(
        model.named_parameters(), **SETTINGS, offload=config(folder, state_format=state_format, subgroup_numel=4096)
    )
    train(optimizer, model, range(4))
    found = [parameter.detach().full_tensor() for parameter in model.parameters()]
    for parameter in model.parameters():
        found += [tensor.full_tensor() for tensor in optimizer.state_for(parameter).values()]
    optimizer.close()
    if dist.get_rank() == 0:
        torch.save(found, folder / "found")


@pytest.mark.slow
def test_rounding_follows_places_in_the_whole(tmp_path: Path) -> None:
    spawn(4, tmp_path, formats, "compact16")
    model = Model()
    settings = config(tmp_path, state_format="compact16", subgroup_numel=4096)
    with offload.AdamW(model.named_parameters(), **SETTINGS, offload=settings) as optimizer:
        train(optimizer, model, range(4))
        found = [parameter.detach() for parameter in model.parameters()]
        for parameter in model.parameters():
            found += optimizer.state_for(parameter).values()
    for left, right in zip(torch.load(tmp_path / "found"), found, strict=True):
        assert same_bits(left, right)


@on_ranks(4)
def test_replicas_are_saved_once(folder: Path) -> None:
    """Ranks that have the same pieces save them once; each keeps its `extra`."""
    model, _ = made("hsdp")
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    model(torch.ones(4, 30)).square().mean().backward()
    optimizer.step()
    optimizer.save_checkpoint(folder / "ck", extra=dist.get_rank())
    optimizer.wait_checkpoint()
    dist.barrier()
    with Checkpoint(folder / "ck") as checkpoint:
        assert [len(manifest.tiles) > 0 for manifest in checkpoint.manifests] == [True, True, False, False]
    assert optimizer.load_checkpoint(folder / "ck") == dist.get_rank()
    optimizer.close()


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name(folder: Path) -> None:
    net = Net(torch.float32)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(offload.ConfigError, match=r"state_format: 'compact16' .* piece of down.weight"):
        offload.AdamW(net.named_parameters(), offload=config(folder, state_format="compact16", subgroup_numel=2048))
    partial = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    with pytest.raises(offload.ConfigError, match="not partial"):
        offload.AdamW([partial])
    other = DeviceMesh("cpu", [1 - dist.get_rank()])
    with pytest.raises(offload.ConfigError, match="of which this is none"):
        offload.AdamW([torch.nn.Parameter(DTensor.from_local(torch.ones(3), other, [Replicate()]))])
    plain = torch.nn.Parameter(torch.ones(4, 3))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    with offload.AdamW([plain, sharded]) as optimizer:
        state = {"step": 1, "exp_avg": sharded.detach(), "exp_avg_sq": sharded.detach()}
        with pytest.raises(offload.ConfigError, match="a DTensor of"):
            optimizer.state[plain] = state
        sharded.grad = torch.ones_like(sharded).redistribute(placements=[Replicate()])
        optimizer.step()
        assert sharded.grad.placements == (Shard(0),)
        turned = torch.ones(3, 4).T
        sharded.grad = distribute_tensor(turned, mesh, [Shard(0)])
        optimizer.step()
        on_its_way = all_reduce(torch.ones(2, 3), "sum", mesh)
        assert isinstance(on_its_way, AsyncCollectiveTensor)
        sharded.grad = DTensor.from_local(on_its_way, mesh, [Shard(0)])
        assert float(optimizer.clip_grad_norm_(math.inf)) == math.sqrt(12 * 2**2)
        optimizer.step()
        assert optimizer.engine.step_count(1) == 3


@pytest.mark.parametrize("kind", [offload.AdamW, offload.Muon])
@on_ranks(2)
def test_a_step_counts_on_all_ranks_or_on_none(folder: Path, kind: type[offload.AdamW]) -> None:
    """At a rate of 0, as warm-up begins with, the gradients of one rank alone may all be 0."""
    model = sharded_model()  # some weights have elements on rank 0 alone
    optimizer = kind(model.named_parameters(), lr=0.0, offload=config(folder))
    for value, steps in ((0.0, 0), (float(dist.get_rank() == 0), 1), (0.0, 2)):  # the first counts nowhere
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        assert {optimizer.engine.step_count(name) for name, _ in model.named_parameters()} == {steps}
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_state_goes_in_and_out(folder: Path, dtype: torch.dtype) -> None:
    """State in and out, as `DTensor`s, as whole tensors and as torch's own; copies that were changed are noticed."""
    model = sharded_model(dtype)
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    train(optimizer, model, range(2))
    parameters = list(model.parameters())
    saved = optimizer.state_dict()
    whole = {
        number: {name: value.full_tensor() if name != "step" else value for name, value in entry.items()}
        for number, entry in saved["state"].items()
    }
    for given in (saved, {**saved, "state": whole}):
        optimizer.reset_state()
        optimizer.load_state_dict(given)
        for number, parameter in enumerate(parameters):
            for name, tensor in optimizer.state_for(parameter).items():
                wanted = saved["state"][number].get(name, parameter.detach())  # an fp32 weight is its master
                assert same_bits(local(tensor), local(wanted))
    plain = torch.optim.AdamW(parameters, **SETTINGS)
    plain.load_state_dict(saved)
    optimizer.load_state_dict(plain.state_dict())
    for number, parameter in enumerate(parameters):
        found = optimizer.state_for(parameter)["exp_avg"]
        assert same_bits(local(found), local(saved["state"][number]["exp_avg"]).to(dtype).float())
    for change in (lambda tensor: tensor.zero_(), lambda tensor: tensor.to_local().zero_()):
        entry = optimizer.state[parameters[0]]
        change(entry["exp_avg"])
        with pytest.raises(offload.ConfigError, match="changed in place"):
            optimizer.step()
    entry = optimizer.state[parameters[0]]
    memory = StorageWeakRef(local(entry["exp_avg"]).untyped_storage())
    entry["exp_avg"] = entry["exp_avg"] * 2
    del entry
    assert memory.expired()
    with pytest.raises(offload.ConfigError, match=r"a DTensor of \(Replicate"):
        optimizer.state[parameters[0]]["exp_avg"] = whole_copy(parameters[0])
    with torch.no_grad():
        parameters[0].mul_(2)  # the wrapper's counter counts it
    local(parameters[1]).zero_()  # the local tensor's counter does
    optimizer.step()
    for parameter in parameters[:2]:
        assert same_bits(local(optimizer.state_for(parameter)["master"]).to(dtype), local(parameter.detach()))
    optimizer.close()


def whole_copy(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.detach().float().redistribute(placements=[Replicate()])


@on_ranks(4)
def test_weights_that_move_and_gradients_that_are_not_finite(folder: Path) -> None:
    """FSDP2 takes new memory for weights with padding when they are loaded before the first pass."""
    expected = sharded_model()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(2)
    model = sharded_model()
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    addresses = [local(parameter).data_ptr() for parameter in model.parameters()]
    for parameter in model.parameters():  # as a module's conversion leaves them: without the padding
        parameter._local_tensor = local(parameter).clone()
    model.load_state_dict(expected.state_dict())
    assert [local(parameter).data_ptr() for parameter in model.parameters()] != addresses
    mirror = Mirror([p.full_tensor() for p in expected.parameters()], **SETTINGS)
    for step in range(2):
        train(optimizer, model, range(step, step + 1))
        mirror.step(mean_gradients(step, SAVED_RANKS))
    assert_equals_whole(optimizer, model, mirror)
    model(exact_gradients(0, 0)).backward()
    if dist.get_rank() == 1:  # which all ranks hear of
        next(model.parameters()).grad._local_tensor[0] = math.inf
    weights = [local(parameter.detach()).clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="the gradients' norm is inf"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    scaler = offload.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert same_bits(local(parameter.detach()), weight)
    optimizer.close()


class Deep(torch.nn.Module):
    """Layers of rows that two ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = torch.nn.Embedding(11, 24)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(4))
        self.norm = torch.nn.LayerNorm(24)
        self.norm.bias.requires_grad_(False)
        self.head = torch.nn.Linear(24, 11, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) * self.scale.sum()
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.head(self.norm(x))


def deep(dtype: torch.dtype, folder: Path | None, device: str = "cpu", **files: Any) -> Any:
    with torch.device(device):
        model = Deep().to(dtype)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    if folder is not None:
        offload.weights_in_file(model, folder, **files)
    return model


def trained_deep(model: Any, folder: Path, steps: range, resume: str = "", **settings: Any) -> list[float]:
    """Train with evaluation between steps; each step's loss. Its state is saved behind the last step."""
    losses = []
    with offload.AdamW(
        model.named_parameters(), **SETTINGS, offload=config(folder, checkpoints_kept=3, **settings)
    ) as optimizer:
        if settings.get("overlap") in ("forward", "auto"):
            optimizer.overlap_forward(model)
        if resume:
            optimizer.load_checkpoint(folder / resume, model=model)
        for step in steps:
            tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(step))
            loss = torch.nn.functional.cross_entropy(model(tokens).float().view(-1, 11), tokens.view(-1))
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [loss.item(), model(tokens).float().sum().item()]
        optimizer.save_checkpoint(folder / f"ck{steps.stop}", model=model)
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_shards_lie_in_a_file(folder: Path) -> None:
    """Bits are those of shards in memory, and a checkpoint goes on from one to the other."""
    every = [
        (torch.float32, {}),
        (torch.bfloat16, {"overlap": "forward", "gradient_memory": 0}),
        (torch.bfloat16, {"state_format": "compact8", "subgroup_numel": 4096, "overlap": "auto"}),
    ]
    for number, (dtype, settings) in enumerate(every):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        models = [deep(dtype, None), deep(dtype, place), deep(dtype, place)]
        assert all(is_mapped(local(weight).data_ptr()) for weight in models[1].parameters() if local(weight).numel())
        in_memory = trained_deep(models[0], place, range(4), **settings)
        assert trained_deep(models[1], place, range(4), **settings) == in_memory
        for one, other in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
            assert same_bits(local(one), local(other))
        more = trained_deep(models[0], place, range(4, 6), "ck4", **settings)
        assert trained_deep(models[2], place, range(4, 6), "ck4", **settings) == more
        assert all(is_mapped(local(weight).data_ptr()) for weight in models[2].parameters() if local(weight).numel())


@on_ranks(2)
def test_shards_in_a_file_are_made_there_and_may_not_leave(folder: Path) -> None:
    whole = Deep()
    saved_as_safetensors(
        {name: whole.state_dict()[name].clone() for name in ("words.weight", "norm.weight", "scale")}, folder / "a"
    )
    saved_as_safetensors(
        {f"layers.{n}.weight": layer.weight.clone() for n, layer in enumerate(whole.layers)}, folder / "b"
    )
    model = deep(torch.float32, folder, "meta", safetensors=[folder / "a", folder / "b"])
    assert not any(local(each).is_meta for each in (*model.parameters(), *model.buffers()))
    assert model.head.weight is model.words.weight
    for name, weight in model.named_parameters():
        assert is_mapped(local(weight).data_ptr()) or not local(weight).numel()
        if "bias" not in name:
            assert same_bits(local(weight), own(weight, whole.state_dict()[name]))
    assert not model.norm.bias.requires_grad
    tokens = torch.zeros(1, 2, dtype=torch.long)
    model(tokens).sum().backward()
    model.to(torch.bfloat16)
    with pytest.raises(offload.ConfigError, match=r"words.weight.*bfloat16, on cpu.*has left its file"):
        model(tokens)
    offload.weights_in_file(fully_shard(Deep(), offload_policy=CPUOffloadPolicy(pin_memory=False)), folder)
    with pytest.raises(offload.ConfigError, match=r"layers.*leave it out"):
        offload.weights_in_file(deep(torch.float32, None), folder, layers=[])
    partly = Deep()
    fully_shard(partly.layers[0])
    with pytest.raises(offload.ConfigError, match=r"words.weight.*have fully_shard take every weight"):
        offload.weights_in_file(partly, folder)
    with pytest.raises(offload.ConfigError, match=r"updates during backward"):
        offload.AdamW(deep(torch.float32, folder).named_parameters(), offload=config(folder, overlap="backward"))
