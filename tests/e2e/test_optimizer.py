"""`offload.AdamW` behaves as torch documents an optimizer, wherever its state lives."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import Mirror, same_bits

import offload
from offload.schedule.staging import Phase


def make_model(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.Tanh(), torch.nn.Linear(70, 30))
    return model.to(dtype)


def backward(model: torch.nn.Module, seed: int, scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(16, 40).to(dtype)
    loss = model(inputs).float().square().mean() * scale
    loss.backward()
    return loss.detach()


def test_a_subgroup_without_gradients_is_not_fetched(streaming: Any) -> None:
    parameters = [torch.nn.Parameter(torch.randn(1024).bfloat16()) for _ in range(8)]
    with offload.AdamW(parameters, offload=streaming(staging_memory=12 * 1024)) as optimizer:
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        optimizer.zero_grad()
        for parameter in parameters[:2]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.metrics()["lane/cpu/bytes"] == 2 * 12 * 1024
        assert optimizer.metrics()["path/0/read_bytes"] <= 2 * 12 * 1024


def test_a_step_returns_when_all_is_updated_and_leaves_nothing_to_move(streaming: Any) -> None:
    subgroups, slots, numel = 12, 5, 4096
    weight = torch.nn.Parameter(torch.zeros(subgroups * numel).bfloat16())
    config = streaming(subgroup_numel=numel, staging_memory=slots * 12 * numel)
    with offload.AdamW([weight], offload=config) as optimizer:
        machine = optimizer.engine._parts.machine
        for step in range(4):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            assert machine.in_flight == 0
            assert machine.phases.count(Phase.DIRTY) == slots  # the next step's first
            assert machine.phases.count(Phase.ABSENT) == subgroups - slots
            least = (subgroups - slots) * 12 * numel
            metrics = optimizer.metrics()
            assert metrics["path/0/read_bytes"] == (least if step else 0)  # the first finds no state
            assert metrics["path/0/write_bytes"] == least


def test_frozen_shared_empty_and_strided_parameters(streaming: Any) -> None:
    frozen = torch.nn.Parameter(torch.ones(50), requires_grad=False)
    empty = torch.nn.Parameter(torch.zeros(0))
    strided = torch.nn.Parameter(torch.randn(30, 50).t())
    scalar = torch.nn.Parameter(torch.tensor(2.0))
    mirror = Mirror([strided, scalar], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    with offload.AdamW([frozen, empty, strided, scalar], lr=1e-2, offload=streaming()) as optimizer:
        for _ in range(2):
            (strided.sum() * scalar + empty.sum() + (strided * strided).sum()).backward()
            gradients = [strided.grad.clone(), scalar.grad.clone()]
            optimizer.step()
            optimizer.zero_grad()
            mirror.step(gradients)
        assert same_bits(strided.detach(), mirror.weights[0])
        assert same_bits(scalar.detach(), mirror.weights[1])
        assert same_bits(optimizer.state_for(strided)["exp_avg"], mirror.moments[0][0])
        frozen.requires_grad_(True)  # unfrozen later: it joins
        frozen.grad = torch.ones(50)
        optimizer.step()
        assert float(frozen.detach()[0]) < 1.0
    with pytest.raises(ValueError, match="more than one parameter group"):
        offload.AdamW([{"params": [scalar]}, {"params": [scalar]}])


def test_autograd_notices_that_weights_changed(streaming: Any) -> None:
    parameter = torch.nn.Parameter(torch.randn(100))
    with offload.AdamW([parameter], offload=streaming()) as optimizer:
        loss = (parameter * parameter).sum()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("when", ["pre", "post"])
def test_state_is_written_in_the_hooks_of_a_state_dict(streaming: Any, when: str) -> None:
    model = make_model()
    with offload.AdamW(model.parameters(), offload=streaming()) as optimizer:
        backward(model, 1)
        optimizer.step()
        ones = torch.ones_like(model[0].weight)

        def write(*_: Any) -> None:
            optimizer.state[model[0].weight]["exp_avg"] = ones

        register: Any = getattr(optimizer, f"register_state_dict_{when}_hook")
        register(write)
        saved = optimizer.state_dict()
        assert torch.equal(optimizer.state_for(model[0].weight)["exp_avg"], ones)
        assert torch.equal(saved["state"][0]["exp_avg"], ones) == (when == "pre")
        assert type(saved["state"][0]) is dict


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    model = make_model()
    config = offload.OffloadConfig(host_memory=0, paths=[tmp_path], subgroup_numel=1024)
    optimizer = offload.AdamW(model.parameters(), offload=config)
    backward(model, 0)
    optimizer.step()
    assert len(list(tmp_path.iterdir())) == 2
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_use_after_close_and_in_a_forked_child(streaming: Any, tmp_path: Path) -> None:
    model = make_model()
    optimizer = offload.AdamW(model.parameters(), offload=streaming())
    backward(model, 0)
    optimizer.step()

    def child(results: Any) -> None:
        try:
            optimizer.step()
        except offload.SessionBrokenError as error:
            results.put(str(error))
        optimizer.close()

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=child, args=(results,))
    process.start()
    assert "forked" in results.get(timeout=60)
    process.join()
    assert list(tmp_path.iterdir())  # the child closed its copy only
    optimizer.step()
    optimizer.close()
    optimizer.close()
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(offload.SessionBrokenError, match="closed"):
            use()
    assert not list(tmp_path.iterdir())


def test_a_path_in_memory_is_told(
    streaming: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offload.tiers.directories.file_system", lambda _: "tmpfs")
    model = make_model()
    with offload.AdamW(model.parameters(), offload=streaming()) as optimizer:
        backward(model, 0)
        optimizer.step()
    assert [text for text in caplog.messages if "lies in memory, which the plan does not count" in text]


@pytest.mark.parametrize("use", ["wait_checkpoint", "wait_mirror", "load_checkpoint"])
def test_a_forked_child_does_not_wait_for_a_save_of_its_parent(streaming: Any, tmp_path: Path, use: str) -> None:
    model = make_model()
    with offload.AdamW(model.named_parameters(), offload=streaming()) as optimizer:
        backward(model, 0)
        optimizer.step()
        optimizer.save_checkpoint(tmp_path / "run")
        optimizer.wait_checkpoint()
        optimizer.save_checkpoint(tmp_path / "run")
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(30)
                with pytest.raises(offload.SessionBrokenError, match="forked copy"):
                    getattr(optimizer, use)(*[tmp_path / "run"] * (use == "load_checkpoint"))
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_gradient_with_a_graph_keeps_it(streaming: Any) -> None:
    parameter = torch.nn.Parameter(torch.randn(100))
    with offload.AdamW([parameter], offload=streaming()):
        (parameter**3).sum().backward(create_graph=True)
        penalty = parameter.grad.square().sum()
        parameter.grad = None
        penalty.backward()
        expected = 36 * parameter.detach() ** 3
        assert torch.allclose(parameter.grad, expected, rtol=1e-4)


@pytest.mark.parametrize("changes", [{"amsgrad": True}, {"decoupled_weight_decay": False}])
def test_load_state_dict_refuses_settings_it_cannot_honour(streaming: Any, changes: dict[str, Any]) -> None:
    model = make_model()
    with offload.AdamW(model.parameters(), offload=streaming()) as optimizer:
        backward(model, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        bad = {**saved, "param_groups": [{**saved["param_groups"][0], **changes}]}
        with pytest.raises(offload.ConfigError):
            optimizer.load_state_dict(bad)
        for broken in (
            {},
            {**saved, "state": [1]},
            {**saved, "state": {0: {"step": "x"}}},
            {**saved, "state": {0: 3}},
        ):
            with pytest.raises(offload.ConfigError):
                optimizer.load_state_dict(broken)
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (offload.AdamW, {"amsgrad": True}),
        (offload.AdamW, {"decoupled_weight_decay": False}),
        (offload.Adam, {"decoupled_weight_decay": True}),
    ],
)
def test_groups_of_torchs_optimizers_are_not_taken_for_others(kind: Any, changes: dict[str, Any]) -> None:
    group = {"params": [torch.nn.Parameter(torch.ones(100))], **changes}
    with pytest.raises(offload.ConfigError, match=next(iter(changes))):
        kind([group])
    with kind([torch.nn.Parameter(torch.ones(100))]) as optimizer:
        with pytest.raises(offload.ConfigError, match=next(iter(changes))):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1


def test_copies_are_refused(streaming: Any, tmp_path: Path) -> None:
    with offload.AdamW(make_model().parameters(), offload=streaming()) as optimizer:
        with pytest.raises(offload.ConfigError, match="state_dict"):
            copy.deepcopy(optimizer)
        with pytest.raises(offload.ConfigError, match="state_dict"):
            torch.save(optimizer, tmp_path / "optimizer.pt")


def test_a_forked_child_may_look_at_gradients(streaming: Any) -> None:
    model = make_model()
    with offload.AdamW(model.parameters(), offload=streaming()):
        backward(model, 0)
        expected = float(model[0].weight.grad[0, 0])
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        process = context.Process(target=lambda: results.put(float(model[0].weight.grad[0, 0])))
        process.start()
        assert results.get(timeout=60) == expected
        process.join()


def test_close_gives_parameters_back_as_they_were(streaming: Any) -> None:
    model = make_model()
    offload.AdamW(model.parameters(), offload=streaming(gradient_dtype="float32")).close()
    plain = torch.optim.AdamW(model.parameters())
    backward(model, 0)
    assert model[0].weight.grad.dtype == torch.bfloat16
    plain.step()


def test_it_begins_anew_where_a_framework_has_replaced_its_parameters(tmp_path: Path) -> None:
    """Groups, schedule and hooks stay; state is of the new weights, which may have another dtype."""

    def small() -> torch.nn.Linear:
        torch.manual_seed(0)
        return torch.nn.Linear(64, 64)

    def trained(is_replaced: bool) -> list[torch.Tensor]:
        calls: list[Any] = []
        made, model = small().bfloat16() if is_replaced else small(), small()
        config = {"host_memory": 0, "paths": [tmp_path], "subgroup_numel": 1024}
        groups = [{"params": [pair], "lr": 0.1} for pair in (made if is_replaced else model).named_parameters()]
        with offload.AdamW(groups, weight_decay=0.5, offload=config) as optimizer:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
            for group, weight in zip(optimizer.param_groups, model.parameters(), strict=True):
                group["params"] = [weight]
            engine = optimizer.engine
            optimizer.reopen()
            assert (optimizer.engine is engine) is not is_replaced
            assert [p.name for p in optimizer.engine.plan.layout.parameters] == ["weight", "bias"]
            for _ in range(2):
                model(torch.ones(2, 64)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            assert len(calls) == 2
            optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(64, 64))]
            with pytest.raises(offload.ConfigError, match=r"'weight' .*it was replaced since"):
                optimizer.reopen()
            return [weight.detach() for weight in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))
