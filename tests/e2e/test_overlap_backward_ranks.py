"""Updates during the backward pass of several ranks: FSDP2 and DDP, on gloo processes.

And the matrix of what hides a step there: bits beside those of "off", over 60 steps of all kinds.
"""

from __future__ import annotations

import copy
import gc
import io
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mirror import same_bits
from settling import LONG_S, settle
from sharded import local, on_ranks, spawn
from test_overlap_backward import (
    LOOSE,
    SECONDS,
    Barrier,
    auto_changes,
    changes,
    clipped,
    dropped_behind_its_back,
    feed,
    plain,
    state_read,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.errors import ConfigError
from offload.optim.buckets import register_hook
from offload.optim.hiding import hide_steps

pytestmark = pytest.mark.not_overlapped("steps go on where the tests say so")

FORMS = [
    ("exact", torch.float32),
    ("compact16", torch.bfloat16),
    ("compact8", torch.bfloat16),
]


def network(dtype: torch.dtype) -> torch.nn.Module:
    """Return layers of which ranks have even parts, uneven ones, and none."""
    torch.manual_seed(0)
    sizes = ((64, 128), (128, 64), (64, 48), (48, 1))
    layers = (layer for first, last in sizes for layer in (torch.nn.Linear(first, last), torch.nn.Tanh()))
    return torch.nn.Sequential(*layers).to(dtype)


class Ranks:
    """What one rank trains: a model of which everything streams, and its optimizer."""

    def __init__(self, folder: Path, kind: str, overlap: str, form: str, dtype: torch.dtype, **more: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.model = network(dtype)
        self.dtype = dtype
        self.counts: Counter[str] = Counter()
        self.seed = 0
        self.is_alike = "whole" in kind or "hsdp" in kind  # on all ranks
        options: dict[str, Any] = {"state_format": form, "subgroup_numel": 4096, "threads": 1, **more}
        self.device = "late" if "copied" in kind else "cpu"
        if "fsdp2" in kind:
            ranks = dist.get_world_size()
            shape, policy = (ranks, 1) if "hsdp" in kind else (ranks,), {}
            if "copied" in kind:  # to host memory, where the weights are
                policy["offload_policy"] = CPUOffloadPolicy(pin_memory="pageable" not in kind)
            mesh = init_device_mesh(self.device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            # It never has a gradient, and lies beside others that have.
            self.model[0].register_parameter("unused", torch.nn.Parameter(torch.ones(10, dtype=dtype)))
            for layer in self.model:
                fully_shard(layer, mesh=mesh, **policy)
            self.called: torch.nn.Module = fully_shard(self.model, mesh=mesh, **policy)
        else:
            self.called = DistributedDataParallel(
                self.model, bucket_cap_mb=0.005, gradient_as_bucket_view="views" in kind
            )
            options["shard"] = "whole" not in kind
        config = offload.OffloadConfig(host_memory=0, overlap=overlap, paths=[folder], **options)
        self.optimizer = offload.AdamW(self.model.named_parameters(), lr=1e-2, weight_decay=0.1, offload=config)
        if ("buckets" in kind or "copied" in kind) and (config.overlaps_backward or overlap == "auto"):
            self.optimizer.overlap_backward(self.called)
        if config.overlaps_forward:
            self.optimizer.overlap_forward(self.called)

    def backward(self) -> None:
        self.seed += 1
        generator = torch.Generator().manual_seed(100 * self.seed + dist.get_rank())
        data = torch.randn(3, 64, generator=generator, device="cpu").to(self.device, self.dtype)
        self.called(data).pow(2).mean().backward()

    def settle(self) -> None:
        settle(self.optimizer.engine)

    def gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None and local(p.grad).numel()]

    def everything(self) -> list[torch.Tensor]:
        self.optimizer.finish()
        found = [local(parameter.detach()).clone() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            found += (local(tensor).clone() for tensor in self.optimizer.state_for(parameter).values())
        return found


def accumulated(training: Ranks) -> None:
    training.backward()
    training.settle()
    training.backward()


def reduced_once(training: Ranks) -> None:
    sharded: Any = training.called
    if isinstance(sharded, DistributedDataParallel):
        with sharded.no_sync():
            training.backward()
            training.settle()
    else:
        sharded.set_requires_gradient_sync(False)
        training.backward()
        sharded.set_requires_gradient_sync(True)
    training.backward()


def kept(training: Ranks) -> None:
    """Two passes of which FSDP2 is told that the first is not the last, and to leave weights gathered after it."""
    sharded = [module for module in training.called.modules() if isinstance(module, FSDPModule)]
    for last in (False, True):
        for module in sharded:
            module.set_is_last_backward(last)
            module.set_reshard_after_backward(last)
        training.backward()


def dropped(training: Ranks) -> None:
    training.backward()
    training.settle()
    training.optimizer.zero_grad()
    training.backward()


def not_finite(training: Ranks) -> None:
    training.backward()
    training.settle()
    if training.is_alike or dist.get_rank() == dist.get_world_size() - 1:
        training.gradients()[0].data.fill_(float("nan"))
    if not torch.isfinite(training.optimizer.clip_grad_norm_(1.0)):
        training.counts["skipped"] += 1
        training.optimizer.zero_grad()


def written_by_one_rank(training: Ranks) -> None:
    """What one rank alone has changed of its own share, and so revokes."""
    training.backward()
    training.settle()
    if dist.get_rank() == training.seed % 2:
        for gradient in training.gradients():
            gradient.data.neg_()


def replaced_by_one_rank(training: Ranks) -> None:
    training.backward()
    parameter = training.model[0].weight
    if dist.get_rank() == training.seed % 2:
        training.settle()
        parameter.grad = parameter.grad.clone()


ODD = [
    clipped,
    accumulated,
    reduced_once,
    kept,
    dropped,
    dropped_behind_its_back,
    not_finite,
    written_by_one_rank,
    replaced_by_one_rank,
    state_read,
]


def run(training: Ranks, kinds: list[Callable[[Ranks], None]]) -> list[torch.Tensor]:
    """Train, a step of each kind; return this rank's weights and state."""
    with training.optimizer as optimizer:
        before = plain
        for kind in kinds:
            ahead = optimizer.engine._thread.speculation
            foreseen = kind is before is plain and ahead._is_armed
            kind(training)
            training.settle()
            optimizer.step()
            training.counts["hidden"] += optimizer._overlap.is_pending
            if kind is not not_finite:
                optimizer.zero_grad()
            if optimizer.engine.speculates:
                training.counts["confirmed"] += ahead.confirmed_bytes
                training.counts["revoked"] += ahead.revoked_bytes
                training.counts[f"revoked by {kind.__name__}"] += ahead.revoked_bytes
                if foreseen and not ahead.revoked_bytes:
                    training.counts["foreseen"] += 1
                    assert ahead.confirmed_bytes >= 0.9 * optimizer.metrics()["streamed_bytes"] > 0
            before = kind
        return training.everything()


def beside_off(folder: Path, kind: str, overlaps: Sequence[str], forms: Sequence[int], steps: int = 0) -> None:
    """All bits are those of "off" over steps whose kinds come one after the other and, up to `steps`, by chance."""
    rng = random.Random(0)
    kinds = [plain, plain]
    for odd in ODD:
        kinds += [odd, plain, plain, plain]
    while len(kinds) < steps:
        kinds += [rng.choice(ODD), plain, plain]
    for form, dtype in (FORMS[number] for number in forms):
        expected: list[torch.Tensor] = []
        for overlap in ("off", *overlaps):
            training = Ranks(folder / f"{overlap}-{form}", kind, overlap, form, dtype)
            found = run(training, kinds)
            for left, right in zip(expected or found, found, strict=True):
                assert same_bits(left, right), (overlap, form)
            expected = found
            check_counts(training.counts, overlap, kind)


def check_counts(counts: Counter[str], overlap: str, kind: str) -> None:
    """Check that steps were hidden, and skipped, and that some of what was made ahead was revoked."""
    assert counts["skipped"] > 0
    if overlap in ("forward", "both"):
        assert counts["hidden"] > 0
    if overlap in ("backward", "both"):
        assert counts["confirmed"] > 0
        assert counts["revoked"] > 0
    if overlap == "backward":
        assert counts["foreseen"] > 5
        assert counts["confirmed"] > counts["revoked"]
        for odd in (clipped, accumulated, dropped, not_finite):
            assert counts[f"revoked by {odd.__name__}"] > 0
        assert everywhere(counts["revoked by written_by_one_rank"]) > 0


def everywhere(number: float) -> float:
    """Return the sum of all ranks' numbers."""
    found = torch.tensor(number)
    dist.all_reduce(found)
    return float(found)


KINDS = ["fsdp2", "ddp", "ddp views", "ddp buckets", "ddp buckets views", "ddp whole", "ddp whole buckets"]
QUICK = [("fsdp2", 2), ("ddp buckets", 2), ("ddp whole buckets", 2)]
CELLS = [
    *(pytest.param(*cell, id="-".join(map(str, cell))) for cell in QUICK),
    *(
        pytest.param(*cell, marks=pytest.mark.full, id="-".join(map(str, cell)))
        for cell in [*((kind, 2) for kind in KINDS), ("fsdp2", 1)]
        if cell not in QUICK
    ),
]
"""Kinds and numbers of ranks, of which `make test` has some: the others differ in what DDP does."""


OVERLAPS = "backward", "forward", "both"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *((kind, 2) for kind in KINDS),
        ("ddp buckets views", 3),
        *((kind, 1) for kind in KINDS if "buckets" not in kind),
    ],
)
def test_bits_are_those_of_steps_without(tmp_path: Path, kind: str, ranks: int, overlap: str) -> None:
    spawn(ranks, tmp_path, beside_off, kind, [overlap], range(len(FORMS)), 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "overlap", "form"),
    [
        ("fsdp2", 2, "both", 2),
        ("ddp buckets views", 3, "backward", 1),
        ("ddp", 2, "both", 0),
        ("ddp whole buckets", 2, "both", 2),
    ],
)
def test_some_bits_are_those_of_steps_without(tmp_path: Path, kind: str, ranks: int, overlap: str, form: int) -> None:
    spawn(ranks, tmp_path, beside_off, kind, [overlap], [form])


def torch_clips(training: Ranks) -> None:
    training.backward()
    training.settle()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), LOOSE)


@pytest.mark.parametrize(("kind", "ranks"), CELLS)
@on_ranks()
def test_all_is_confirmed_where_nothing_changes(folder: Path, kind: str) -> None:
    for each in (plain, torch_clips):
        training = Ranks(folder / each.__name__, kind, "backward", "exact", torch.bfloat16)
        with training.optimizer as optimizer:
            for step in range(6):
                each(training)
                training.settle()
                optimizer.step()
                optimizer.zero_grad()
                found = optimizer.metrics()
                # All but the first step, which finds no state on storage and ahead of which nobody knows what comes.
                assert found["speculation/confirmed_bytes"] == (found["streamed_bytes"] if step else 0)
                assert found["speculation/revoked_bytes"] == 0
            assert "the step is hidden in backward" in str(optimizer.plan)
            training.backward()
            training.settle()
            memory = [StorageWeakRef(gradient.untyped_storage()) for gradient in training.gradients()]
            for parameter in training.model.parameters():
                parameter.grad = None
            if kind in ("fsdp2", "ddp", "ddp whole"):  # others have buckets, which stay
                assert not any(each.expired() for each in memory)  # updates read it
                optimizer.zero_grad()
                assert all(each.expired() for each in memory)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(("kind", "ranks"), [cell for cell in CELLS if "whole" not in cell.values[0]])
@on_ranks()
def test_auto_does_what_the_first_rank_has_measured(folder: Path, kind: str, follows: bool) -> None:
    """Rank 0 is fed times as in `run_as_fed`, and rank 1 the contrary."""
    found = []
    for overlap in ("off", "auto"):
        training = Ranks(folder / overlap, kind, overlap, "compact16", torch.bfloat16)
        speculates, goes_on = [], []
        with training.optimizer as optimizer, pytest.MonkeyPatch.context() as patched:
            if follows:
                optimizer.overlap_forward(training.called)

            def seconds(optimizer: Any = optimizer, speculates: list[bool] = speculates) -> float:
                hidden_in = optimizer.plan.hidden_in
                found_s = SECONDS[hidden_in] * (1 + (not hidden_in and len(speculates) >= 8))
                return found_s if dist.get_rank() == 0 else 1 / found_s

            feed(patched, seconds)
            for step in range(1, 29):
                (clipped if step % 5 == 0 else plain)(training)
                training.settle()
                optimizer.step()
                optimizer.zero_grad()
                speculates.append(optimizer.engine.speculates)
                goes_on.append("forward" in optimizer.plan.hidden_in)
                training.counts["confirmed"] += optimizer.metrics().get("speculation/confirmed_bytes", 0)
            found.append(training.everything())
        if overlap == "auto":
            assert changes(speculates) == auto_changes(follows)
            assert changes(goes_on) == ([12, 20] if follows else [])
            assert training.counts["confirmed"] > 0
        else:
            assert not any(speculates)
    for left, right in zip(*found, strict=True):
        assert same_bits(left, right)


def halved(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations that are strings
    """A user's communication hook."""
    state.append(bucket.index())
    reduced = dist.all_reduce(bucket.buffer().mul_(0.5), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0].mul_(0.5))


def trained(
    folder: Path,
    hears: bool,
    *,
    own: bool = False,
    joins: bool = False,
    branches: bool = False,
    keeps: bool = False,
    whole: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], Ranks]:
    """Train under DDP of some options, with its buckets heard or not."""
    kind = "ddp whole" if whole else "ddp"
    training = Ranks(folder / str(hears), kind, "backward" if hears else "off", "exact", torch.bfloat16)
    if branches:  # of which ranks use others, and in some steps nobody uses any
        training.model.branches = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3)).to(torch.bfloat16)
        training.optimizer.add_param_group({"params": [*training.model.branches.named_parameters("branch")]})
    layers, state = [*training.model.children()][:8], []
    called = DistributedDataParallel(Branching(layers, training.model, branches), bucket_cap_mb=0.005, **options)
    if hears:
        training.optimizer.overlap_backward(called, comm_hook=halved if own else None, state=state)
    elif own:
        called.register_comm_hook(state, halved)
    with training.optimizer as optimizer, Join([called], enable=joins):
        for step in range(9):
            for micro in range(1 + (step % 3 == 2)):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
                called(torch.randn(3, 64, generator=generator).bfloat16(), step).pow(2).mean().backward()
                training.settle()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps)
            training.counts["confirmed"] += optimizer.metrics().get("speculation/confirmed_bytes", 0)
        found = training.everything()
    assert bool(state) == own
    return found, training


class Branching(torch.nn.Module):
    """Layers one after the other, and before them a branch of a rank's own, if there are branches."""

    def __init__(self, layers: list[torch.nn.Module], owner: torch.nn.Module, branches: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)
        self.branches = owner.branches if branches else None

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        if self.branches is not None and step % 4:
            x = x + self.branches[(step + dist.get_rank()) % 2](x)
        return self.layers(x)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradients are kept": {"keeps": True, "gradient_as_bucket_view": True},
    "views of branches that are not always used": {
        "branches": True,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "keeps": True,
    },
    "branches that are not always used": {"branches": True, "find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "a hook of the user's": {"own": True},
    "a hook of the user's, and views": {"own": True, "gradient_as_bucket_view": True},
    "in join": {"joins": True},
    "state that is whole on each rank": {"whole": True},
    "branches and a hook of the user's, state that is whole on each rank": {
        "branches": True,
        "find_unused_parameters": True,
        "own": True,
        "whole": True,
    },
}


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.full)])
@on_ranks()
def test_buckets_have_the_bits_of_ddp_alone(folder: Path) -> None:
    for number, (name, how) in enumerate(WAYS.items()):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        (expected, _), (found, training) = (trained(place, hears, **how) for hears in (False, True))
        for left, right in zip(expected, found, strict=True):
            assert same_bits(left, right), name
        assert training.counts["confirmed"] > 0, name


@on_ranks(2)
def test_updates_begin_with_the_first_bucket(folder: Path) -> None:
    training = Ranks(folder / "run", "ddp buckets", "backward", "exact", torch.bfloat16, subgroup_numel=1024)
    made: list[int] = []
    with training.optimizer as optimizer:
        for _ in range(3):
            plain(training)
            training.settle()
            optimizer.step()
            optimizer.zero_grad()
        machine, buckets = optimizer.engine._parts.machine, register_hook(training.called, None, None)

        def wait(until: Callable[[], Any]) -> None:
            until_s = time.monotonic() + LONG_S
            while not until():
                assert time.monotonic() < until_s
                time.sleep(0.001)

        def reduced() -> None:
            wait(lambda: buckets.reductions and all(each.future.done() for each in buckets.reductions))

        def updated() -> None:
            wait(lambda: machine.speculative_versions)
            made.append(len(machine.speculative_versions))

        calls = {2: reduced, 0: updated}  # before the gradients of these layers are there

        def pass_through(call: Callable[[], None], layer: torch.nn.Module, given: Any, output: torch.Tensor) -> Any:
            return Barrier.apply(output, call)

        handles = [training.model[n].register_forward_hook(partial(pass_through, call)) for n, call in calls.items()]
        plain(training)
        assert made[0] > 0
        for handle in handles:
            handle.remove()
        training.settle()
        optimizer.step()
        found = optimizer.metrics()
        assert found["speculation/confirmed_bytes"] == found["streamed_bytes"]


@on_ranks(2)
def test_models_without_buckets_for_us_are_refused(folder: Path) -> None:
    first = Ranks(folder / "first", "ddp buckets", "backward", "exact", torch.bfloat16)
    with first.optimizer as optimizer:
        with pytest.raises(ConfigError, match="DistributedDataParallel that wraps"):
            optimizer.overlap_backward(first.model)
        with pytest.raises(ConfigError, match="parameters of"):
            optimizer.overlap_backward(DistributedDataParallel(torch.nn.Linear(3, 3)))
        hide_steps(optimizer, (), [first.called])  # an integration gives it again
        hooked = DistributedDataParallel(first.model)
        hooked.register_comm_hook([], halved)
        with pytest.raises(ConfigError, match="communication hook"):
            optimizer.overlap_backward(hooked)
        hide_steps(optimizer, (), [hooked])  # an integration leaves it
        builtin = DistributedDataParallel(first.model)
        builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        with pytest.raises(ConfigError, match="communication hook"):
            optimizer.overlap_backward(builtin)
    sharded = fully_shard(network(torch.bfloat16))
    with offload.AdamW(sharded.named_parameters(), offload={"paths": [folder]}) as optimizer:
        optimizer.overlap_backward(sharded)  # FSDP2's needs no hook here
    # Another optimizer of the same model hears what the first one heard, and the hook keeps none.
    (folder / "second").mkdir(exist_ok=True)
    config = offload.OffloadConfig(host_memory=0, overlap="backward", paths=[folder / "second"], shard=True)
    second = offload.AdamW(first.model.named_parameters(), offload=config)
    second.overlap_backward(first.called)
    first.optimizer = second
    with second:
        for step in range(3):
            plain(first)
            first.settle()
            second.step()
            second.zero_grad()
            found = second.metrics()
            assert found["speculation/confirmed_bytes"] == (found["streamed_bytes"] if step else 0)
    kept = weakref.ref(second)
    del first.optimizer, second
    gc.collect()
    assert kept() is None
    first.backward()


@on_ranks(2)
def test_gradients_that_are_reduced_by_hand_have_the_bits_of_steps_without(folder: Path) -> None:
    """Nobody but the user reduces gradients, after backward; of one layer FSDP2 does."""
    found = []
    for overlap in ("off", "backward", "both"):
        (folder / overlap).mkdir(exist_ok=True)
        model = network(torch.bfloat16)
        model[0] = fully_shard(model[0])
        config = offload.OffloadConfig(
            host_memory=0, paths=[folder / overlap], overlap=overlap, subgroup_numel=1024, threads=1
        )
        confirmed_bytes = revoked_bytes = 0.0
        with offload.AdamW(model.named_parameters(), lr=1e-2, offload=config) as optimizer:
            if overlap == "both":
                optimizer.overlap_forward(model)
            for step in range(12):
                generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
                model(torch.randn(3, 64, generator=generator).bfloat16()).pow(2).mean().backward()
                settle(optimizer.engine)
                for parameter in model[1:].parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
                optimizer.finish()
                confirmed_bytes += optimizer.metrics().get("speculation/confirmed_bytes", 0)
                revoked_bytes += optimizer.metrics().get("speculation/revoked_bytes", 0)
            found.append([local(parameter.detach()).clone() for parameter in model.parameters()])
        if overlap != "off":
            assert confirmed_bytes > 0  # of the layer
            assert revoked_bytes > 0
    for others in found[1:]:
        assert all(map(same_bits, found[0], others))


@on_ranks(1)
def test_one_process_has_no_buckets(folder: Path) -> None:
    with offload.AdamW(network(torch.bfloat16).parameters(), offload={"host_memory": 0, "paths": [folder]}) as alone:
        model = torch.nn.Sequential()
        model.weight = alone.param_groups[0]["params"][0]
        with pytest.raises(ConfigError, match="DDP on several ranks"):
            alone.overlap_backward(model, comm_hook=print)
    found = []
    for is_told in (False, True):
        torch.manual_seed(1)
        ddp = DistributedDataParallel(torch.nn.Linear(96, 96))
        config = {"host_memory": 0, "paths": [folder], "subgroup_numel": 1024, "overlap": "backward"}
        with offload.AdamW(ddp.parameters(), offload=config) as optimizer:
            if is_told:
                optimizer.overlap_backward(ddp)
            for step in range(3):
                ddp(torch.full((2, 96), 1.0 + step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([parameter.detach().clone() for parameter in ddp.parameters()])
    assert all(map(same_bits, *found))


@on_ranks(1)
def test_a_copy_of_a_model_with_buckets_computes(folder: Path) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    register_hook(ddp, None, None)
    buffer = io.BytesIO()
    torch.save(ddp, buffer)
    buffer.seek(0)
    inputs = torch.ones(2, 8)
    for other in (copy.deepcopy(ddp), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(inputs), ddp(inputs))
