"""Steps that go on into the next forward pass: the bits of those that do not, whatever comes between."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from at_line import AtLine, at_every_line
from mirror import same_bits
from sharded import local
from simulated import OnDevice
from torch.utils.checkpoint import checkpoint
from world import SimulatedDevice

import offload
from offload.errors import ConfigError, SessionBrokenError, StepAbortedError, TierError

pytestmark = pytest.mark.not_overlapped("steps go on where the tests say so")

WIDTH, TOKENS = 32, 48


class Block(torch.nn.Module):
    """Attention whose projection is used without being called, and layers that are recomputed."""

    def __init__(self, dtype: torch.dtype, recompute: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=dtype)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)
        self._recompute = recompute

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(*3 * (self.norm(x.float()).to(x.dtype),), need_weights=False)[0]
        return x + (checkpoint(self._mlp, x, use_reentrant=False) if self._recompute else self._mlp(x))


class Model(torch.nn.Module):
    """Tied embeddings, a frozen layer, a weight of two dtypes, and one that is used before its owner is called."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(TOKENS, WIDTH, dtype=dtype)
        self.blocks = torch.nn.ModuleList(Block(dtype, number == 1) for number in range(blocks))
        self.frozen = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH, dtype=dtype))
        self.head = torch.nn.Linear(WIDTH, TOKENS, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.bias
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


def loss_of(model: Callable[..., torch.Tensor], seed: int) -> torch.Tensor:
    tokens = torch.randint(0, TOKENS, (2, 9), generator=torch.Generator().manual_seed(seed))
    if isinstance(model, torch.nn.Module):
        tokens = tokens.to(next(model.parameters()).device)
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def everything(optimizer: offload.AdamW, model: torch.nn.Module) -> list[torch.Tensor]:
    """Return all weights and state."""
    found = [tensor.clone() for tensor in model.state_dict().values()]
    for entry in optimizer.state_dict()["state"].values():
        found += [value for name, value in sorted(entry.items()) if name != "step"]
    return found


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        assert same_bits(one, other), number


def assert_all_same(found: list[list[torch.Tensor]]) -> None:
    """Check what was found in each of `MODES`."""
    assert len(found) == len(MODES)
    for other in found[1:]:
        assert_same(found[0], other)


MODES = ("off", "on", "check")
FORMATS = ["exact", "compact16", "compact8"]


def follow(optimizer: offload.AdamW, model: torch.nn.Module, mode: str) -> None:
    if mode != "off":
        optimizer.overlap_forward(model, check=mode == "check")


@pytest.fixture(name="config")
def _config(tmp_path: Path) -> Callable[..., offload.OffloadConfig]:
    folders = iter(range(100))

    def make(**settings: Any) -> offload.OffloadConfig:
        path = tmp_path / str(next(folders))
        path.mkdir()
        defaults = {"host_memory": 0, "paths": [path], "subgroup_numel": 4096}
        return offload.OffloadConfig(**{**defaults, "staging_memory": 5 * 12 * 4096, **settings})

    return make


def train(
    model: Model, optimizer: offload.AdamW, steps: int, called: torch.nn.Module | None = None, rank: int = 0
) -> list[float]:
    """Train with all that a loop may do: clip, accumulate, skip, evaluate, average weights, change the rate.

    `called` is what the model is called by, and each rank has losses of its own.
    """
    called = model if called is None else called
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    losses = []
    for step in range(steps):
        for micro in range(1 + step % 2):
            loss = loss_of(called, 10 * (step + rank * steps) + micro)
            loss.backward()
            losses.append(loss.item())
        if step % 11 == 3:  # without having asked for anything
            optimizer.zero_grad()
            continue
        if step % 7 == 6:  # as a gradient scaler does with what is not finite
            local(model.bias.grad)[:1] = float("nan")
            assert not optimizer.clip_grad_norm_(1.0).isfinite()
            optimizer.zero_grad()
            continue
        if step % 5 == 1:
            optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 6 == 2:
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, -1).item())
            model.train()
        if step % 4 == 3:
            optimizer.finish()
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.5)
    return [*losses, *(float(mean.float().sum()) for mean in average)]


def test_copies_of_hidden_weights_are_dropped_behind_those_who_read_them(
    config: Callable[..., offload.OffloadConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`step` makes them on its stream; the next forward pass, which may have another, copies from them."""
    model, device = Model(), SimulatedDevice(1 << 26)
    given_up: list[torch.Tensor] = []
    monkeypatch.setattr(device, "record_use", given_up.append)
    with OnDevice(model.parameters(), lr=1e-2, device=device, offload=config()) as optimizer:
        optimizer.overlap_forward(model, check=True)
        loss = loss_of(model, 0)
        for step in range(1, 4):
            loss.backward()
            optimizer.step()
            copies = [*optimizer._overlap.hidden_copies.values()]
            assert copies
            loss = loss_of(model, step)
            assert {id(copy) for copy in copies} <= {id(tensor) for tensor in given_up}
            optimizer.zero_grad()


def test_a_step_of_a_model_that_is_frozen_as_a_whole(config: Callable[..., offload.OffloadConfig]) -> None:
    """Where gradients would leave a GPU: nothing has state yet."""
    model, settings = Model().requires_grad_(False), config(keep_grads=False, placement="cpu")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with OnDevice(model.parameters(), lr=1e-2, device=SimulatedDevice(1 << 26), offload=settings) as optimizer:
        optimizer.overlap_forward(model)
        optimizer.step()
        optimizer.finish()
        assert all(map(torch.equal, model.parameters(), before))


class Held:
    """Updates of resident state that wait in front of the kernel, from the `first` of a step on."""

    def __init__(self, optimizer: offload.AdamW, first: int) -> None:
        self._kernel: Any = optimizer.engine._parts.kernel
        self._plain = self._kernel.submit
        self._before = first
        self._waiting: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()
        self._kernel.submit = self._submit

    def _submit(self, *update: Any) -> None:
        with self._lock:
            self._before -= 1
            if self._before < 0 and self._kernel.submit == self._submit:
                self._waiting.append(update)
            else:
                self._plain(*update)

    def go_on(self) -> None:
        with self._lock:
            self._kernel.submit = self._plain
            for update in self._waiting:
                self._plain(*update)


def chain(layers: int = 4) -> torch.nn.Sequential:
    """Return layers of one subgroup each."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False).bfloat16() for _ in range(layers)))


def in_a_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_module_waits_for_its_own_weights_only(config: Callable[..., offload.OffloadConfig]) -> None:
    model = chain()
    x = torch.randn(3, 64).bfloat16()
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config(host_memory="1GiB")) as optimizer:
        optimizer.overlap_forward(model)
        model(x).sum().backward()
        before = [layer.weight.detach().clone() for layer in model]
        held = Held(optimizer, 2)
        optimizer.step()
        assert all(layer.weight.grad is None for layer in model)
        y = model[1](model[0](x))
        assert not torch.equal(model[0].weight, before[0])
        assert not torch.equal(model[1].weight, before[1])
        assert torch.equal(model[3].weight, before[3])
        waits = in_a_thread(lambda: model[2](y))
        waits.join(0.2)
        assert waits.is_alive()
        reads = in_a_thread(model.state_dict)
        reads.join(0.2)
        assert reads.is_alive()
        held.go_on()
        waits.join(60.0)
        reads.join(60.0)
        assert not torch.equal(model[2].weight, before[2])


def test_a_gradient_that_nobody_holds_is_not_waited_for(config: Callable[..., offload.OffloadConfig]) -> None:
    """Also where it lies in memory that the engine does not own: as the caller has set it, or in the GPU's."""
    model = chain()
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config(host_memory="1GiB")) as optimizer:
        optimizer.overlap_forward(model)
        model(torch.ones(3, 64).bfloat16()).sum().backward()
        for layer in model:
            layer.weight.grad = layer.weight.grad.clone()
        held = Held(optimizer, 0)
        steps = in_a_thread(optimizer.step)
        steps.join(20.0)
        has_returned = not steps.is_alive()
        held.go_on()
        steps.join(60.0)
        assert has_returned


@pytest.mark.parametrize("overlap", ["off", "forward", "both"])
def test_no_gradient_is_left_that_could_be_set_to_zero(
    config: Callable[..., offload.OffloadConfig], overlap: str
) -> None:
    """As docs/step.md says: what the second backward pass does not reach is decayed by zeros, or has no gradient."""

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.rare = (torch.nn.Parameter(torch.ones(4096)) for _ in range(2))

        def forward(self, reaches: bool) -> torch.Tensor:
            return (self.used + self.rare).sum() if reaches else self.used.sum()

    model = Branches()
    rare = model.rare
    with offload.AdamW(model.parameters(), lr=0.1, offload=config(overlap=overlap)) as optimizer:
        if overlap != "off":
            optimizer.overlap_forward(model)
        found = []
        for reaches in (True, True, False):
            model(reaches).backward()
            optimizer.step()
            assert (rare.grad is None) == (overlap != "off")
            optimizer.zero_grad(set_to_none=False)
            optimizer.finish()
            found.append(rare.detach().clone())
        assert torch.equal(found[1], found[2]) == (overlap != "off")
        assert not torch.equal(found[0], found[1])


def test_updates_come_in_the_order_of_the_forward_pass(config: Callable[..., offload.OffloadConfig]) -> None:
    class Backwards(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self):
                x = layer(x)
            return x

    model = Backwards(*chain())
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config(host_memory="1GiB")) as optimizer:
        optimizer.overlap_forward(model)
        for _ in range(2):
            model(torch.ones(3, 64).bfloat16()).sum().backward()
            optimizer.step()
        optimizer.finish()
        places = optimizer.engine.plan.layout.places
        assert optimizer.engine._parts.machine.ended_visits == [places[n][0][0] for n in (3, 2, 1, 0)]


def test_the_next_gradient_waits_until_the_last_was_read(config: Callable[..., offload.OffloadConfig]) -> None:
    found = []
    for overlaps in (False, True):
        model = chain()
        x = torch.ones(3, 64).bfloat16()
        with offload.AdamW(model.parameters(), lr=1e-2, offload=config(host_memory="1GiB")) as optimizer:
            if overlaps:
                optimizer.overlap_forward(model)
            for layer in model:
                layer(x).sum().backward()
            if overlaps:
                held = Held(optimizer, 0)
                optimizer.step()
                # Not by way of a module: nothing but its gradient waits.
                product = (x @ model[0].weight.T).sum() * 3
                waits = in_a_thread(product.backward)
                waits.join(0.2)
                assert waits.is_alive()
                held.go_on()
                waits.join(60.0)
            else:
                product = (x @ model[0].weight.T).sum() * 3
                optimizer.step()
                optimizer.zero_grad()
                model[0].weight.grad = torch.full_like(model[0].weight, 9.0)
            optimizer.step()
            found.append(everything(optimizer, model))
    assert_same(*found)


def test_a_gradient_that_somebody_holds_is_read_before_step_returns(
    config: Callable[..., offload.OffloadConfig],
) -> None:
    found = []
    for overlaps in (False, True):
        model = chain()
        with offload.AdamW(model.parameters(), lr=1e-2, offload=config(host_memory="1GiB")) as optimizer:
            if overlaps:
                optimizer.overlap_forward(model)
            for number in range(3):
                model(torch.ones(3, 64).bfloat16()).sum().backward()
                if number == 1:  # not in its slot
                    for layer in model:
                        layer.weight.grad = layer.weight.grad.clone()
                held = [layer.weight.grad[3:] if number == 2 else layer.weight.grad for layer in model]
                optimizer.step()
                for tensor in held:
                    tensor.fill_(7.0)
                optimizer.zero_grad()
                del held, tensor
            found.append(everything(optimizer, model))
    assert_same(*found)


def test_parameters_of_no_module_are_updated_at_once(config: Callable[..., offload.OffloadConfig]) -> None:
    model, other = chain(), torch.nn.Parameter(torch.zeros(5000))
    with offload.AdamW([*model.parameters(), other], lr=1e-2, offload=config()) as optimizer:
        optimizer.overlap_forward(model, check=True)
        for number in range(3):
            (model(torch.ones(3, 64).bfloat16()).sum() + other.sum()).backward()
            optimizer.step()
            assert bool((other < -0.009 * (number + 1)).all())
            assert model[3].weight.isnan().all()


def test_a_failure_is_raised_by_the_next_module(config: Callable[..., offload.OffloadConfig]) -> None:
    model = chain(8)
    x = torch.ones(3, 64).bfloat16()
    told: list[int] = []
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config(staging_memory=3 * 12 * 4096)) as optimizer:
        optimizer.log_to(lambda values, step: told.append(step))
        optimizer.overlap_forward(model)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
        optimizer.finish()
        model(x).sum().backward()

        def read(request: Any) -> None:
            raise TierError("read", tier="file", path="here", detail="gone")

        for tier in optimizer.engine._parts.tiers:
            tier.read = read  # type: ignore[method-assign]
        optimizer.step()
        with pytest.raises(StepAbortedError, match=r"step 3 was aborted.*gone") as caught:
            model(x)
        assert caught.value.step == 3
        model(x)  # whoever was told may look at what there is
        with pytest.raises(SessionBrokenError):
            optimizer.step()
        optimizer.finish()
    assert told == [1, 2]  # no step that has failed


@pytest.mark.parametrize("asks", ["step", "close", "state_dict", "save_checkpoint", "finish", "metrics"])
def test_a_failure_is_raised_by_whatever_comes_next(
    config: Callable[..., offload.OffloadConfig], asks: str, tmp_path: Path
) -> None:
    model = chain(8)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2, offload=config(staging_memory=3 * 12 * 4096))
    optimizer.overlap_forward(model)
    model(torch.ones(3, 64).bfloat16()).sum().backward()

    def fails(*arguments: Any) -> Any:
        raise TierError("write", tier="file", path="here", detail="gone")

    optimizer.step()
    model(torch.ones(3, 64).bfloat16()).sum().backward()
    optimizer.engine._parts.views.work = fails  # type: ignore[method-assign]
    optimizer.step()
    calls: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "close": optimizer.close,
        "state_dict": optimizer.state_dict,
        "save_checkpoint": lambda: optimizer.save_checkpoint(tmp_path / "checkpoint"),
        "finish": optimizer.finish,
        "metrics": optimizer.metrics,
    }
    if asks == "metrics":
        calls["metrics"]()  # what is known; no failure is lost by it
        asks = "finish"
    with pytest.raises(StepAbortedError, match="step 2 was aborted"):
        calls[asks]()
    optimizer.close()


def test_an_optimizer_is_forgotten_while_its_step_goes_on(config: Callable[..., offload.OffloadConfig]) -> None:
    model = chain()
    optimizer = offload.AdamW(model.parameters(), lr=1e-2, offload=config())
    optimizer.overlap_forward(model)
    for _ in range(2):
        model(torch.ones(3, 64).bfloat16()).sum().backward()
        optimizer.step()
    del optimizer
    gc.collect()
    model(torch.ones(3, 64).bfloat16())
    del model
    gc.collect()


def test_what_ends_the_hooks_keeps_no_session_open(config: Callable[..., offload.OffloadConfig]) -> None:
    model = chain()
    optimizer = offload.AdamW(model.parameters(), lr=1e-2, offload=config())
    followed = optimizer.overlap_forward(model)
    for _ in range(2):
        model(torch.ones(3, 64).bfloat16()).sum().backward()
        optimizer.step()
    session = weakref.ref(optimizer.engine)
    del optimizer
    gc.collect()
    assert session() is None
    model(torch.ones(3, 64).bfloat16())
    model.state_dict()
    followed.remove()
    assert not model._forward_pre_hooks


def test_a_model_is_copied_and_pickled(config: Callable[..., offload.OffloadConfig]) -> None:
    model = chain()
    x = torch.ones(3, 64).bfloat16()
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config()) as optimizer:
        optimizer.overlap_forward(model)
        model(x).sum().backward()
        optimizer.step()
        optimizer.finish()
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
        for other in copies:
            assert torch.equal(other(x), model(x))


def test_weights_are_loaded_while_a_step_goes_on(config: Callable[..., offload.OffloadConfig]) -> None:
    model, loaded = chain(), chain().requires_grad_(False)
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config(host_memory="1GiB")) as optimizer:
        optimizer.overlap_forward(model)
        model(torch.ones(3, 64).bfloat16()).sum().backward()
        held = Held(optimizer, 1)
        optimizer.step()
        loads = in_a_thread(lambda: model.load_state_dict(loaded.state_dict()))
        loads.join(0.2)
        assert loads.is_alive()
        held.go_on()
        loads.join(60.0)
        for layer, other in zip(model, loaded, strict=True):
            assert torch.equal(layer.weight, other.weight)
        model(torch.ones(3, 64).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.finish()


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_and_blocks(config: Callable[..., offload.OffloadConfig], whole: bool) -> None:
    found = []
    for mode in MODES:
        model = Model()
        called: Any = torch.compile(model, backend="eager") if whole else model
        for block in () if whole else model.blocks:
            block.compile(backend="eager")
        with offload.AdamW(model.parameters(), lr=1e-2, offload=config()) as optimizer:
            follow(optimizer, called, mode)
            for step in range(5):
                loss_of(called, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(everything(optimizer, model))
    assert_all_same(found)


class Shortcut(torch.nn.Module):
    """Trains with the weights of a layer that is called in evaluation alone, as fused losses do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(TOKENS, WIDTH)
        self.head = torch.nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return torch.nn.functional.linear(x, self.head.weight, self.head.bias) if self.training else self.head(x)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_evaluation_calls_what_training_does_not(
    config: Callable[..., offload.OffloadConfig], is_compiled: bool
) -> None:
    """By itself, and what is compiled as one in its parts."""
    found = []
    for mode in MODES:
        model = Shortcut()
        called: Any = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
        with offload.AdamW(model.parameters(), lr=1e-2, offload=config(subgroup_numel=1024)) as optimizer:
            follow(optimizer, called, mode)
            losses = []
            for step in range(5):
                loss_of(called, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step in (1, 3):
                    model.eval()
                    with torch.no_grad():
                        losses.append(loss_of(model, -1))
                    model.train()
            found.append([*losses, *everything(optimizer, model)])
    assert_all_same(found)


@pytest.mark.parametrize("overlap", ["forward", "both"])
def test_a_setting_without_its_model_is_refused_and_loses_nothing(
    config: Callable[..., offload.OffloadConfig], overlap: str
) -> None:
    found = []
    for setting in ("off", overlap):
        model = Model()
        optimizer = offload.AdamW(model.parameters(), lr=1e-2, offload=config(overlap=setting))
        loss_of(model, 0).backward()
        if setting == overlap:
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"overlap_forward\(model\) before the first step"):
                    optimizer.step()
            assert optimizer.engine.step_number == 0
            optimizer.overlap_forward(model)
        optimizer.step()
        optimizer.zero_grad()
        losses = train(model, optimizer, 6)
        found.append([torch.tensor(losses), *everything(optimizer, model)])
        optimizer.close()
    assert_same(*found)
    with offload.AdamW(Model().parameters(), offload=config(overlap=overlap)):
        pass  # without a step nothing is asked for


def test_it_ends_when_it_is_removed(config: Callable[..., offload.OffloadConfig]) -> None:
    model = chain()
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config()) as optimizer:
        following = optimizer.overlap_forward(model, check=True)
        for number in range(4):
            model(torch.ones(3, 64).bfloat16()).sum().backward()
            optimizer.step()
            assert bool(model[3].weight.isnan().any()) == (number < 2)
            if number == 1:
                following.remove()
                assert not any(layer._forward_pre_hooks for layer in model)
        assert model[0].weight.grad is not None
    with pytest.raises(SessionBrokenError, match="closed"):
        optimizer.overlap_forward(model)
    assert not any(layer._forward_pre_hooks for layer in model)


def test_what_is_hidden_can_be_seen(config: Callable[..., offload.OffloadConfig]) -> None:
    model, told = Model(), []
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config()) as optimizer:
        optimizer.log_to(lambda values, step: told.append((step, values, optimizer.timeline())), names="*")
        optimizer.overlap_forward(model)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            assert [number for number, _, _ in told] == list(range(1, step + 1))  # of those that are over
        optimizer.finish()
        assert [number for number, _, _ in told] == [1, 2, 3, 4, 5]
        assert "the step is hidden in forward" in str(optimizer.plan)
    step_s = told[2][1]["offload/step_s"]
    assert told[2][1]["offload/hidden_s"] + told[2][1]["offload/waited_s"] >= step_s * (1 - 1e-9)  # but for rounding
    assert told[2][1]["offload/predicted_iteration_s"] > told[2][1]["offload/backward_s"] > 0
    labels = [interval.label for interval in told[2][2] if interval.lane == "caller"]
    assert {"forward", "backward"} <= set(labels)


def test_what_was_used_around_the_hooks_is_updated_at_once(config: Callable[..., offload.OffloadConfig]) -> None:
    """A model that was compiled before it was hooked runs no hooks, nor does a `forward` called by that name."""
    model = Model(blocks=1)
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config()) as optimizer:
        optimizer.overlap_forward(model, check=True)
        for seed in range(3):
            loss_of(model.forward, seed).backward()
            with torch.no_grad():
                loss_of(model, seed)  # runs them, and says nothing of training
            optimizer.step()
            assert not model.bias.isnan().any()  # the model's own
            assert model.blocks[0].up.weight.isnan().all()
        weights = {name: value.detach() for name, value in model.named_parameters()}
        loss_of(lambda tokens: torch.func.functional_call(model, weights, (tokens,)), 0)
        optimizer.finish()
        for parameter in optimizer.param_groups[0]["params"]:  # nobody has called anything since
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.finish()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_hidden_weights_show_again_whoever_has_waited(config: Callable[..., offload.OffloadConfig]) -> None:
    model, other = chain(), torch.nn.Parameter(torch.zeros(10))
    x = torch.ones(3, 64).bfloat16()
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config()) as optimizer:
        optimizer.overlap_forward(model, check=True)
        model(x).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": [other]})
        assert not model(x).isnan().any()


def test_what_has_been_updated_is_known_at_once(config: Callable[..., offload.OffloadConfig]) -> None:
    model = chain()
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config(host_memory="1GiB")) as optimizer:
        optimizer.overlap_forward(model)
        model(torch.ones(3, 64).bfloat16()).sum().backward()
        held = Held(optimizer, 1)
        optimizer.step()
        found: list[object] = []
        asks = in_a_thread(lambda: found.extend([model[0].weight in optimizer.state, optimizer.engine.step_number]))
        asks.join(0.2)
        held.go_on()
        asks.join(60.0)
        assert found == [True, 1]


@pytest.mark.slow
def test_an_interrupted_step_has_taken_all_gradients_or_none(config: Callable[..., offload.OffloadConfig]) -> None:
    """Those that it left would be accumulated to while they are read."""
    model = chain(2)
    x = torch.ones(3, 64).bfloat16()
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config(host_memory="1GiB")) as optimizer:
        optimizer.overlap_forward(model)

        def program(interrupted: AtLine) -> None:
            model(x).sum().backward()
            before = optimizer.engine.step_number
            interrupted(optimizer.step)
            has_begun = optimizer.engine.step_number > before
            assert [layer.weight.grad is None for layer in model] == [has_begun] * 2, interrupted.where
            optimizer.zero_grad()

        at_every_line(program, 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_waits_for_nothing(config: Callable[..., offload.OffloadConfig]) -> None:
    model = chain()
    x = torch.ones(3, 64).bfloat16()
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config(host_memory="1GiB")) as optimizer:
        optimizer.overlap_forward(model)
        model(x).sum().backward()
        held = Held(optimizer, 1)
        optimizer.step()
        context = torch.multiprocessing.get_context("fork")
        child = context.Process(target=lambda: model(x) is not None and optimizer.engine.wait_for([0, 1, 2, 3]))
        child.start()
        child.join(60.0)
        held.go_on()
        assert child.exitcode == 0
