"""`offload.Muon`: torch's own bits over an fp32 twin, whole matrices on their owners, AdamW for all else."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mirror import same_bits
from sharded import spawn
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.errors import CheckpointError, ConfigError
from offload.rules import MUON

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
ADAMW = {"lr": 0.002, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 6


class Model(torch.nn.Module):
    """Part of a language model: an embedding, matrices of several shapes, a convolution, a norm, an output layer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 32)
        self.up, self.down = torch.nn.Linear(32, 96), torch.nn.Linear(96, 32)
        self.narrow = torch.nn.Linear(32, 5, bias=False)
        self.conv, self.norm = torch.nn.Conv1d(32, 32, 3, padding=1), torch.nn.LayerNorm(32)
        self.lm_head = torch.nn.Linear(32, 50, bias=False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(x)))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.lm_head(self.norm(x)).float().logsumexp(-1).mean() + self.narrow(x).float().square().mean()


MATRICES = ("up.weight", "down.weight", "narrow.weight")
"""What Muon updates of it."""


class Twin:
    """The model in fp32 and in memory: torch's Muon for matrices, `offload.AdamW` for all else."""

    def __init__(self, model: Model) -> None:
        self.model = copy.deepcopy(model).float()
        named = dict(self.model.named_parameters())
        self.muon = torch.optim.Muon([named[name] for name in MATRICES], **SETTINGS)
        self.adamw = offload.AdamW([p for name, p in named.items() if name not in MATRICES], **ADAMW)

    def step(self, gradients: Any) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.float()
        self.muon.step()
        self.adamw.step()

    def assert_same(self, model: Model) -> None:
        for (name, ours), theirs in zip(model.named_parameters(), self.model.parameters(), strict=True):
            assert same_bits(ours.detach(), theirs.detach().to(ours.dtype)), name


def tokens(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(100 * step + rank))


def streamed(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "state").mkdir(exist_ok=True)
    return {"host_memory": 0, "paths": [str(folder / "state")], "subgroup_numel": 4096, **more}


def muon(model: Model, config: dict[str, Any], **more: Any) -> offload.Muon:
    return offload.Muon(model.named_parameters(), **SETTINGS, adamw_lr_ratio=0.1, offload=config, **more)


def train(model: torch.nn.Module, optimizer: Any, steps: range, passes: int = 1, twin: Twin | None = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        for number in range(passes):
            (model(tokens(step, number)) / passes).backward()
        if twin is not None:
            twin.step([p.grad for p in model.parameters()])
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("passes", [1, 4])
def test_bits_are_those_of_torchs_over_an_fp32_twin(dtype: torch.dtype, passes: int, tmp_path: Path) -> None:
    model = Model(dtype)
    twin = Twin(model)
    with muon(model, streamed(tmp_path)) as optimizer:
        train(model, optimizer, range(STEPS), passes, twin)
        twin.assert_same(model)
        assert optimizer.metrics()["resident_bytes"] == 0
        numel = sum(p.numel() for name, p in model.named_parameters() if name in MATRICES)
        subgroups = [s for s in optimizer.engine.plan.layout.subgroups if s.state.rule.is_whole]
        assert sum(segment.numel for s in subgroups for segment in s.segments) == numel
        state = optimizer.state_for(model.up.weight)
        named = dict(twin.model.named_parameters())
        assert same_bits(state["momentum_buffer"], twin.muon.state[named["up.weight"]]["momentum_buffer"])
        assert optimizer.state_for(model.embed.weight).keys() == {"master", "exp_avg", "exp_avg_sq"}


def test_groups_say_who_updates_them(tmp_path: Path) -> None:
    model = Model()
    twin = Twin(model)
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in MATRICES]},
        {"params": [p for n, p in named.items() if n not in MATRICES], "use_muon": False, "lr": 0.002},
    ]
    with offload.Muon(groups, **SETTINGS, adamw_lr_ratio=7.0, offload=streamed(tmp_path)) as optimizer:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n) for o in (twin.muon, twin.adamw)]
        for step in range(STEPS):
            train(model, optimizer, range(step, step + 1), twin=twin)
            for each in (schedule, *schedules):
                each.step()
        twin.assert_same(model)


@pytest.mark.parametrize("form", ["exact", "compact16", "compact8"])
def test_a_resumed_run_goes_on_exactly(form: str, tmp_path: Path) -> None:
    """In place, and into another size of subgroups; in every format, whose rounding goes on too."""
    model = Model(torch.bfloat16)
    with muon(model, streamed(tmp_path, state_format=form)) as optimizer:
        train(model, optimizer, range(3))
        for name, is_copy in (("copy", True), ("saved", False)):
            optimizer.save_checkpoint(tmp_path / name, copy=is_copy)
            optimizer.wait_checkpoint()
        train(model, optimizer, range(3, STEPS))
        wanted = [p.detach().clone() for p in model.parameters()]
    for name, config in (("copy", {"subgroup_numel": 1 << 20, "state_format": form}), ("saved", None)):
        again = Model(torch.bfloat16)
        torch.nn.init.zeros_(again.up.weight)
        with muon(again, config or streamed(tmp_path, state_format=form)) as optimizer:
            optimizer.load_checkpoint(tmp_path / name)
            train(again, optimizer, range(3, STEPS))
            assert all(map(same_bits, wanted, (p.detach() for p in again.parameters())))


@pytest.mark.parametrize(("form", "each"), [("exact", 8), ("compact16", 6), ("compact8", 3 + 1 + 1 / 64)])
def test_state_takes_the_bytes_that_it_says(form: str, each: float) -> None:
    parameters = [("w", torch.nn.Parameter(torch.zeros(512, 512, dtype=torch.bfloat16)))]
    with offload.Muon(parameters, offload={"state_format": form}) as optimizer:
        assert optimizer.metrics()["state_bytes"] / (1 << 18) == pytest.approx(each, abs=0.01)


@pytest.mark.parametrize("form", ["compact16", "compact8"])
def test_compact_state_trains_as_well(form: str, tmp_path: Path) -> None:
    """Far steps go the same way; and bits depend on neither subgroups nor tiers."""
    models = Model(torch.bfloat16), Model(torch.bfloat16), Model(torch.bfloat16)
    configs: list[dict[str, Any]] = [{}, {"state_format": form}, streamed(tmp_path, state_format=form)]
    for model, config in zip(models, configs, strict=True):
        with muon(model, config) as optimizer:
            train(model, optimizer, range(40))
    exact, ours, elsewhere = ([p.detach() for p in model.parameters()] for model in models)
    assert all(map(same_bits, ours, elsewhere))
    start = Model(torch.bfloat16)
    for a, b, first in zip(exact, ours, start.parameters(), strict=True):
        way, apart = (a - first).float().norm(), (a - b).float().norm()
        assert apart <= 0.5 * way + 1e-3


def test_state_dicts_go_round_and_torchs_own_comes_in(tmp_path: Path) -> None:
    model = Model()
    twin = Twin(model)
    with muon(model, streamed(tmp_path)) as optimizer:
        train(model, optimizer, range(3), twin=twin)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, range(3, 5))
        wanted = [p.detach().clone() for p in model.parameters()]
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.model.parameters(), strict=True):
                p.copy_(q)
        train(model, optimizer, range(3, 5))
        assert all(map(same_bits, wanted, (p.detach() for p in model.parameters())))
        with pytest.raises(ConfigError, match=r"exp_avg.*another rule"):
            optimizer.state[model.up.weight] = optimizer.state[model.embed.weight]
    matrices = [dict(twin.model.named_parameters())[name] for name in MATRICES]
    with offload.Muon(matrices, **SETTINGS) as optimizer:
        optimizer.load_state_dict(twin.muon.state_dict())
        found = optimizer.state_for(matrices[0])["momentum_buffer"]
        assert same_bits(found, twin.muon.state[matrices[0]]["momentum_buffer"])


@pytest.mark.parametrize(
    "shapes", [{"a": (4, 4), "b": (0,)}, {"b": (0,), "a": (4, 4)}, {"embed": (0, 4), "a": (4, 4)}]
)
@pytest.mark.parametrize("is_copy", [True, False])
def test_what_has_no_elements_loads_whoever_would_update_it(shapes: Any, is_copy: bool, tmp_path: Path) -> None:
    """It has no segment, and so a manifest names no rule for it."""
    from offload.checkpoint.exchange import export_safetensors

    def parameters() -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]

    kinds = {"muon": offload.Muon, "adamw": offload.AdamW, "wrapped": partial(offload.wrap, torch.optim.NAdam)}
    for name, kind in kinds.items():
        folder, given = tmp_path / name, parameters()
        folder.mkdir()
        with kind(given, offload=streamed(folder)) as optimizer:
            for _, weight in given:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
            optimizer.save_checkpoint(folder / "saved", copy=is_copy)
            optimizer.wait_checkpoint()
            wanted = optimizer.state_dict()
            if name != "wrapped":
                export_safetensors(folder / "saved", folder / "file")
        with kind(parameters(), offload=streamed(folder) if not is_copy else {}) as optimizer:
            optimizer.load_checkpoint(folder / "saved")
            assert str(optimizer.state_dict()) == str(wanted)
            if (folder / "file").exists():
                optimizer.import_state(folder / "file")
                assert str(optimizer.state_dict()) == str(wanted)


def test_state_is_exported_by_name(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    from offload.checkpoint.exchange import export_safetensors

    model = Model()
    with muon(model, {}) as optimizer:
        train(model, optimizer, range(2))
        optimizer.save_checkpoint(tmp_path / "saved", copy=True)
        optimizer.wait_checkpoint()
        wanted = optimizer.state_for(model.up.weight)["momentum_buffer"]
    export_safetensors(tmp_path / "saved", tmp_path / "file")
    found = safetensors.load_file(tmp_path / "file")
    assert same_bits(found["state.up.weight.momentum_buffer"], wanted)
    assert "state.up.weight.exp_avg" not in found
    assert "state.embed.weight.exp_avg_sq" in found
    with muon(Model(), {}) as optimizer:
        optimizer.import_state(tmp_path / "file")
        again = dict(zip(dict(model.named_parameters()), optimizer.param_groups[0]["params"], strict=True))
        assert same_bits(optimizer.state_for(again["up.weight"])["momentum_buffer"], wanted)
    with offload.AdamW(Model().named_parameters()) as optimizer, pytest.raises(CheckpointError, match="is of Muon"):
        optimizer.load_checkpoint(tmp_path / "saved")


def test_a_prediction_counts_newton_schulz() -> None:
    """A wide matrix takes more operations a byte than a vector: no kernel's rate says that."""
    matrix = [("w", torch.nn.Parameter(torch.zeros(512, 512)))]
    with offload.Muon(matrix) as optimizer, offload.AdamW([torch.nn.Parameter(torch.zeros(512, 512))]) as other:
        assert optimizer.engine.rates.cpu_bytes_per_s < other.engine.rates.cpu_bytes_per_s / 4


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ns_steps": 100}, "ns_steps"),
        ({"ns_steps": 2.5}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        ({"adjust_lr_fn": "best"}, "adjust_lr_fn"),
        ({"momentum": -1}, "momentum"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"adamw_lr_ratio": float("nan")}, "adamw_lr_ratio"),
        ({"offload": {"placement": "gpu"}}, "placement"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        offload.Muon([("w", torch.nn.Parameter(torch.zeros(4, 4)))], **settings)


def on_ranks(folder: Path, dtype: torch.dtype, first: int, overlap: str) -> None:
    """Train `first` to 6 on the mean of two passes: those of ranks, where there are two."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = Model(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7) if first else None
    config = streamed(folder, shard=True, overlap=overlap)
    with muon(model, config) as optimizer:
        parallel = DistributedDataParallel(model) if ranks > 1 else model
        if overlap == "forward":
            optimizer.overlap_forward(parallel)
        if first:
            optimizer.load_checkpoint(folder / "saved")
        mine = [p.numel for p in optimizer.engine.plan.layout.parameters if p.name in MATRICES]
        whole = [p.numel() for name, p in model.named_parameters() if name in MATRICES]
        assert ranks == 1 or (
            0 < sum(mine) < sum(whole) and all(n in (0, w) for n, w in zip(mine, whole, strict=True))
        )
        for step in range(first, STEPS):
            optimizer.zero_grad()
            if ranks > 1:
                parallel(tokens(step, dist.get_rank())).backward()
            else:
                (sum(model(tokens(step, rank)) for rank in range(2)) / 2).backward()
            optimizer.step()
            if step == 2 and not first:
                optimizer.save_checkpoint(folder / "saved")
                optimizer.wait_checkpoint()
        optimizer.finish()
        if ranks > 1:
            with pytest.raises(ConfigError, match="save_checkpoint instead"):
                optimizer.state_dict()
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save([p.detach() for p in model.parameters()], folder / f"weights-{ranks}-{first}")
    elif ranks > 1:
        torch.save([p.detach() for p in model.parameters()], folder / f"weights-other-{first}")


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_matrices_are_dealt_to_ranks_and_others_resume(overlap: str, tmp_path: Path) -> None:
    """Two ranks have the same weights; one goes on from what two have saved, with sums in another order."""
    spawn(2, tmp_path, on_ranks, torch.float32, 0, overlap)
    on_ranks(tmp_path, torch.float32, 3, "off")
    spawn(2, tmp_path, on_ranks, torch.float32, 3, overlap)
    found = {path.name: torch.load(path) for path in tmp_path.glob("weights-*")}
    for name in ("weights-other-0", "weights-2-3", "weights-other-3"):
        assert all(map(same_bits, found["weights-2-0"], found[name])), name
    for one, other in zip(found["weights-2-0"], found["weights-1-3"], strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("config", [{"overlap": "both"}, {"gradient_memory": 0}])
def test_hidden_steps_gradients_that_leave_and_parks_change_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    models = Model(torch.bfloat16), Model(torch.bfloat16)
    for model, settings in zip(models, ({}, streamed(tmp_path, **config) | {"subgroup_numel": 1024}), strict=True):
        with muon(model, settings) as optimizer:
            if "overlap" in settings:
                optimizer.overlap_forward(model, check=True)
            train(model, optimizer, range(4))
            if settings:  # without paths nothing may leave memory
                optimizer.park()
            train(model, optimizer, range(4, 6))
            optimizer.finish()
    assert all(map(same_bits, *([p.detach() for p in model.parameters()] for model in models)))


def test_names_of_a_group_that_could_not_be_added_are_forgotten() -> None:
    matrix = torch.nn.Parameter(torch.randn(64, 64))
    with offload.Muon([("a.weight", matrix)], offload={"host_memory": "64MiB"}) as optimizer:
        large = torch.nn.Parameter(torch.zeros(8192, 8192))
        with pytest.raises(offload.InfeasiblePlanError):
            optimizer.add_param_group({"params": [("b.weight", large)]})
        optimizer.add_param_group({"params": [("embed_tokens.weight", torch.nn.Parameter(torch.randn(128, 64)))]})
        rules = [parameter.rule for parameter in optimizer.engine.plan.layout.parameters]
        assert rules[0] is MUON
        assert rules[1] is not MUON
