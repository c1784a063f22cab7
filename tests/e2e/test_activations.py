"""Saved tensors that leave memory for the paths: the bits of those that stay, torch's rules, and nothing left."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_tier import MemoryTier
from mirror import same
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import ConfigError, OffloadConfig, SessionBrokenError, TierError

WIDTH = 128
ROWS = 256
SMALL = "1MiB"
TILE = 64 << 10
"""Buffers: sixteen of 64 KiB."""


def model(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)))


def optimizer_of(layers: nn.Module, folder: Any, **settings: Any) -> offload.AdamW:
    places = folder if isinstance(folder, list) else [folder]
    chosen = {"host_memory": 0, "paths": places, "subgroup_numel": 8192, "checkpoints_kept": 0, **settings}
    return offload.AdamW(layers.named_parameters(), lr=1e-2, offload=OffloadConfig(**chosen))


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def on_paths(optimizer: offload.AdamW, layers: nn.Module, memory: int | str = SMALL) -> Any:
    return optimizer.activations_on_paths(layers, memory, least_bytes="16KiB")


def packed_bytes(optimizer: offload.AdamW) -> float:
    """Return what has been written, when the engine has heard of all."""
    optimizer.unpark()
    return optimizer.metrics()["activations/packed_bytes"]


def trains(layers: nn.Module) -> None:
    layers(data()).square().mean().backward()


def gradients(layers: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    return found


def test_saved_tensors_leave_and_come_back(tmp_path: Path):
    layers = model()
    trains(layers)
    expected = gradients(layers)
    with optimizer_of(layers, tmp_path) as optimizer:
        assert "activations/packed_bytes" not in optimizer.metrics()
        with on_paths(optimizer, layers):
            loss = layers(data()).square().mean()
            assert packed_bytes(optimizer) == 17 * ROWS * WIDTH * 4  # each once, whoever saves it
            loss.backward()
        assert same(gradients(layers), expected)
        metrics = optimizer.metrics()
        assert 0 < metrics["activations/read_bytes"] <= metrics["activations/written_bytes"]
        assert metrics["activations/kept_bytes"] == 0
        assert metrics["activations/predicted_write_s"] > 0
        text = str(optimizer.plan)
        assert "activations, 16 buffers of 64.0 KiB" in text
        assert "activations at most" in text
        assert optimizer.plan.plan.budgets.activation_bytes == 1 << 20
    assert not os.listdir(tmp_path)


def test_what_fits_the_buffers_does_not_touch_the_path(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer:
        with on_paths(optimizer, layers, "64MiB"):
            trains(layers)
        metrics = optimizer.metrics()
        assert metrics["activations/packed_bytes"] > 0
        assert metrics["activations/written_bytes"] == metrics["activations/read_bytes"] == 0


def test_weights_their_views_and_buffers_stay(tmp_path: Path):
    layers = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH))
    layers.register_buffer("scale", torch.ones(WIDTH, 300))
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        x = torch.randn(2, WIDTH)
        loss = (layers(x) @ layers.scale).sum() + (layers[0].weight.detach().t() * layers[1].weight).sum()
        assert packed_bytes(optimizer) == 0
        loss.backward()


def test_with_checkpoints_only_inputs_leave(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        x = data().requires_grad_()
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        assert packed_bytes(optimizer) == 8 * ROWS * WIDTH * 4
        x.sum().backward()


def test_a_saved_tensor_that_is_changed_is_torchs_error(tmp_path: Path):
    layers = model(2)

    def changed(rows: int) -> str:
        y = layers(torch.randn(rows, WIDTH)).exp()
        loss = y.sum()
        y.add_(1)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        return re.sub(", which is output 0 of [^,]*,| Hint.*", "", str(caught.value))  # torch's words change

    expected = [changed(ROWS), changed(1)]
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        assert [changed(ROWS), changed(1)] == expected  # one that has left, and one that stays
    assert "is at version 1; expected version 0" in expected[0]


def test_a_change_through_an_alias_that_counts_alone_is_another_content(tmp_path: Path):
    """`.data` counts its own changes: equal numbers do not mean equal content."""
    layers = model(2)
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        x = data().requires_grad_()
        (first,) = torch.autograd.grad((x * x).sum(), x, retain_graph=True)
        loss = (x * x).sum()
        other = x.data
        other.mul_(2)
        again = x.data.requires_grad_()
        second = (again * again).sum()
        loss.backward()
        second.backward()
        assert torch.equal(again.grad, 2 * again.detach())
        assert torch.equal(first, again.detach())


def test_views_share_what_has_left_once(tmp_path: Path):
    layers = model(1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        q, k, v = y[:, ::2], y[:, 1::2], y.t()
        return (q * k).sum() + (v * v).sum() + y.exp().sum()

    x = data().requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(x), x)
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        loss = loss_of(x)
        assert packed_bytes(optimizer) == 2 * x.nbytes  # y, and what exp has made of it
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_tensors_without_elements_stay(tmp_path: Path):
    """Also views of what has left, and where the smallest are to leave."""
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    layers = nn.ParameterList([weight])
    with optimizer_of(layers, tmp_path) as optimizer, optimizer.activations_on_paths(layers, SMALL, least_bytes=0):
        x = data() * weight[0]
        loss = x.square().sum() + x[:0].square().sum() + (torch.empty(0, WIDTH) * weight[0]).square().sum()
        assert packed_bytes(optimizer) == 2 * ROWS * WIDTH * 4  # `data()` and `x`
        loss.backward()
        assert torch.equal(weight.grad[0], 2 * data().square().sum(0))


def test_a_small_view_of_something_large_stays(tmp_path: Path):
    layers = model(1)
    dataset = torch.randn(100 * ROWS, WIDTH)
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        loss = layers(dataset[:ROWS]).sum()
        assert packed_bytes(optimizer) == ROWS * WIDTH * 4  # what GELU saves
        loss.backward()


def test_a_full_path_keeps_tensors_in_memory(tmp_path: Path):
    layers = model()
    trains(layers)
    expected = gradients(layers)
    with optimizer_of(layers, tmp_path) as optimizer:
        room = optimizer.plan.plan.storage_bytes
    place = [{"path": tmp_path, "max_bytes": room + (300 << 10)}]
    with optimizer_of(layers, place) as optimizer:
        for _ in range(2):
            with on_paths(optimizer, layers):
                trains(layers)
            assert same(gradients(layers), expected)
            metrics = optimizer.metrics()
            assert metrics["activations/kept_bytes"] > 0
            assert 0 < metrics["activations/written_bytes"] <= 300 << 10
        trains(layers)
        optimizer.step()


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> list[MemoryTier]:
    """Have sessions write to memory; what fails there is up to a test."""
    made: list[MemoryTier] = []

    class Failing(MemoryTier):
        fails = ""

        def _read(self, request: Any) -> tuple[int, int]:
            return (5, 0) if self.fails == "read" and request.tile.tensor > 1000 else super()._read(request)

        def write(self, request: Any) -> None:
            if self.fails == "write" and request.tile.tensor > 1000:
                self._queue.post(request.op, 28, request.offset)
            else:
                super().write(request)

    def open_tier(config: Any, path: Any, store: Any, queue: Any, *_: Any) -> MemoryTier:
        made.append(Failing(store, queue, path=path.path))
        return made[-1]

    monkeypatch.setattr("offload.session.parts.open_path", open_tier)
    return made


def test_writes_that_fail_keep_tensors_in_memory(tiers: list[Any], tmp_path: Path):
    layers = model()
    trains(layers)
    expected = gradients(layers)
    with optimizer_of(layers, tmp_path) as optimizer:
        tiers[0].fails = "write"
        with on_paths(optimizer, layers):
            trains(layers)
        assert same(gradients(layers), expected)
        assert optimizer.metrics()["activations/kept_bytes"] > 0
        trains(layers)
        optimizer.step()  # for state the path is as good as before


def test_what_cannot_be_read_fails_that_pass_alone(tiers: list[Any], tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer:
        with on_paths(optimizer, layers):
            loss = layers(data()).square().mean()
            tiers[0].fails = "read"
            with pytest.raises(TierError, match="activations"):
                loss.backward(retain_graph=True)
            tiers[0].fails = ""
            layers.zero_grad()
            loss.backward()
        left = gradients(layers)
        trains(layers)
        assert same(gradients(layers), left)


def test_damage_is_seen(tiers: list[Any], tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        loss = layers(data()).square().mean()
        for _ in range(1000):  # some writes are still on their way
            if optimizer.metrics()["activations/written_bytes"]:
                break
        for record in tiers[0].slots.values():
            record[5000] ^= 1
        with pytest.raises(TierError, match="checksum"):
            loss.backward()


def test_the_session_may_be_closed_within(tmp_path: Path):
    layers = model()
    optimizer = optimizer_of(layers, tmp_path)
    with on_paths(optimizer, layers):
        loss = layers(data()).square().mean()
        optimizer.close()
        assert not os.listdir(tmp_path)
        with pytest.raises(SessionBrokenError, match="closed"):
            loss.backward()
        layers.zero_grad()
        trains(layers)  # its tensors stay in memory
    with pytest.raises(SessionBrokenError):
        on_paths(optimizer, layers).__enter__()


def test_park_waits_for_nobodys_backward(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer:
        with on_paths(optimizer, layers):
            loss = layers(data()).square().mean()
        with pytest.raises(ConfigError, match="activations"):
            optimizer.park()
        loss.backward()
        optimizer.step()
        del loss
        optimizer.zero_grad()
        optimizer.park()
        trains(layers)
        expected = gradients(layers)
        optimizer.zero_grad()
        optimizer.park()
        with on_paths(optimizer, layers):  # takes memory again
            trains(layers)
        assert same(gradients(layers), expected)


def test_bad_input_is_refused(tmp_path: Path):
    layers = model(1)
    with optimizer_of(layers, tmp_path) as optimizer:
        bad = [*((size, 1, "host_memory") for size in (-1, "lots", True, 0, 1000)), ("1MiB", -1, "least_bytes")]
        for memory, least, field in (*bad, ("1MiB", "none", "least_bytes")):
            with pytest.raises(ConfigError) as caught:
                optimizer.activations_on_paths(layers, memory, least_bytes=least).__enter__()
            assert caught.value.field == field
        with pytest.raises(offload.InfeasiblePlanError, match="host memory for activations"):
            on_paths(optimizer, layers, "100TiB").__enter__()
        for other in (None, nn.Linear(2, 2)):
            with pytest.raises(ConfigError, match="model"):
                on_paths(optimizer, other)
        with on_paths(optimizer, layers):
            loss = layers(data()).sum()
            with pytest.raises(ConfigError, match="an earlier pass"):
                on_paths(optimizer, layers, "2MiB").__enter__()
            loss.backward()
        optimizer.step()


def test_forward_in_several_threads(tmp_path: Path):
    layers = model()
    trains(layers)
    expected = gradients(layers)
    with optimizer_of(layers, tmp_path) as optimizer:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                with on_paths(optimizer, layers):
                    inputs = [*layers.parameters()]
                    for _ in range(3):
                        found = torch.autograd.grad(layers(data()).square().mean(), inputs)
                        assert same([*found], expected)
            except BaseException as error:
                errors.append(error)

        with on_paths(optimizer, layers):  # the buffers stay
            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not errors


def test_a_forked_process_has_no_part_in_it(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        loss = layers(data()).square().mean()
        child = os.fork()
        if not child:
            try:
                loss.backward()
            except SessionBrokenError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loss.backward()


def test_the_second_pass_writes_early_what_will_not_stay(tmp_path: Path):
    layers = model(12)
    with optimizer_of(layers, tmp_path) as optimizer:
        for _ in range(3):
            with on_paths(optimizer, layers):
                loss = layers(data()).square().mean()
                tiles = packed_bytes(optimizer) // TILE
                leaving = (tiles - optimizer.plan.plan.staying_activations) * TILE
                # Backward would make some useless that still wait for the path.
                while optimizer.metrics()["activations/written_bytes"] < leaving:
                    time.sleep(0.001)
                loss.backward()
            layers.zero_grad()
            # What stays is the same, whenever the rest goes.
            assert optimizer.metrics()["activations/written_bytes"] == leaving


def test_nothing_is_left_when_forward_raises(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer:
        with contextlib.suppress(ValueError), on_paths(optimizer, layers):
            layers(data())
            raise ValueError("here")
        gc.collect()
        optimizer.park()


def test_compiled_models(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    layers = model(4)
    compiled = torch.compile(layers, backend="aot_eager")
    trains(compiled)
    expected = gradients(layers)
    with optimizer_of(layers, tmp_path) as optimizer, caplog.at_level(logging.WARNING):
        for _ in range(2):
            with on_paths(optimizer, compiled):
                trains(compiled)
            assert same(gradients(layers), expected)
        assert packed_bytes(optimizer) > 0


def test_transforms_of_functions(tmp_path: Path):
    layers = model(2)

    def work() -> list[torch.Tensor]:
        several = torch.vmap(layers)(data())
        several.square().mean().backward()
        return [*torch.func.jvp(layers, (data(),), (data(1),)), *gradients(layers)]

    expected = work()
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        assert same(work(), expected)
        with pytest.raises(RuntimeError, match="saved tensor hooks"):  # torch's own words
            torch.func.grad(lambda x: layers(x).sum())(data())


@pytest.mark.parametrize("reads", [False, True], ids=["forward", "backward"])
def test_an_interrupt_before_a_tile_is_asked_for_changes_nothing(
    reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        trains(layers)
        expected = gradients(layers)
        optimizer.zero_grad()
        wants = optimizer.engine.activations._buffer_requests
        ask, left = wants.ask, [1]

        def interrupted(asked: Any) -> None:
            if asked.fills is not reads and left:
                left.pop()
                raise KeyboardInterrupt
            ask(asked)

        monkeypatch.setattr(wants, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trains(layers)
        optimizer.zero_grad()
        trains(layers)
        assert same(gradients(layers), expected)
        optimizer.zero_grad()
        gc.collect()
        optimizer.park()  # nothing is of use any more


def test_a_sparse_buffer_of_the_model_stays(tmp_path: Path):
    layers = model()
    layers.register_buffer("adjacent", torch.eye(8).to_sparse())
    with optimizer_of(layers, tmp_path) as optimizer, on_paths(optimizer, layers):
        trains(layers)
        assert packed_bytes(optimizer) > 0
