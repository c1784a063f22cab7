"""Checks of the DeepSpeed backend that run inside worker processes: many in one start, each in every rank.

Run by `test_deepspeed.py` as `python deepspeed_checks.py FOLDER CHECK...` with RANK and WORLD_SIZE set; writes what
became of each check to `FOLDER/results-<rank>.json`. With PLACEMENT set, so much is updated on an accelerator. With
DELAYS set, to a seed, that is the test accelerator, whose streams dawdle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import functools
import gc
import hashlib
import importlib
import inspect
import io
import itertools
import json
import logging
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.utils as utils
import pytest
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_runs import (
    ADAM,
    Case,
    Deep,
    Given,
    Net,
    Reference,
    assert_equals_stock,
    assert_same,
    assert_same_runs,
    get_accelerator,
    micro_batch,
    offload_deepspeed,
    state_of,
    train,
    trained,
    training,
)
from mounts import mounted

import offload
from offload import CheckpointError, ConfigError, SaveRequest
from offload.checkpoint import commit
from offload.checkpoint.marker import WHOLE, Mark, mark_of
from offload.integrations.deepspeed import behind, gathers, stream, weights
from offload.integrations.deepspeed.behind import SavesBehind
from offload.integrations.deepspeed.common import OffloadedOptimizer
from offload.memory import touching
from offload.optim.pace import Pace
from offload.protocols import LANES
from offload.session.checkpoints import Checkpoints
from offload.weights.mapping import MappedFile

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
CHECKS: dict[str, Callable[[Path], None]] = {}
SKIPPED = "skipped: "
"""What the result of a check begins with that cannot be done on this machine; all ranks must agree."""


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register a check; it gets a folder that all ranks share and that is empty."""
    CHECKS[function.__name__] = function
    return function


def paths(folder: Path, is_placed: bool = True) -> dict[str, Any]:
    """Return settings that keep all state in files below `folder`, and, if that is asked for, where it is updated."""
    found: dict[str, Any] = {"host_memory": 0, "paths": [str(folder)]}
    placement = os.environ.get("PLACEMENT", "auto")
    if is_placed and placement != "auto":  # a word that the Hugging Face Trainer wants to replace
        found["placement"] = float(placement) if placement[0].isdigit() else placement
    return found


def below(folder: Path, *names: object) -> Path:
    """Return a folder of its own in a folder, which any rank makes."""
    own = folder / "-".join(map(str, names))
    own.mkdir(exist_ok=True)
    return own


MATRIX = list(itertools.product((1, 2, 3), ("bf16", "fp16", "fp32"), (1, 3), (0.0, 0.3)))
"""All of stage, dtype, micro-steps, clipping."""
PAIRWISE = [(3, "bf16", 3, 0.3), (3, "fp16", 1, 0.0), (3, "fp32", 3, 0.0), (2, "bf16", 1, 0.0), (2, "fp16", 3, 0.3)]
PAIRWISE += [(2, "fp32", 1, 0.3), (1, "bf16", 3, 0.0), (1, "fp16", 1, 0.3), (1, "fp32", 3, 0.3)]
"""Each pair of values of two of them at least once."""


def matrix(folder: Path, cases: list[tuple[int, str, int, float]], steps: int) -> None:
    for case in cases:
        assert_equals_stock(Case(*case, steps=steps, offload=paths(folder)))


@check
def pairs_equal_stock(folder: Path) -> None:
    matrix(folder, PAIRWISE, 8)


@check
def matrix_equals_stock(folder: Path) -> None:
    matrix(folder, MATRIX, 50)


NEAR = {"bf16": (5e-3, 1e-3), "fp16": (2e-3, 2e-3), "fp32": (2e-6, 2e-5)}
"""How far losses (relative) and masters (absolute; they are of the order of 0.1) may be from stock's in 50 steps when
its optimizer is torch's AdamW: the last bits of Adam's arithmetic, and what 16-bit weights make of them."""


@check
def matrix_is_near_stock_with_torch(folder: Path) -> None:
    """The whole matrix beside stock CPU offload with `torch.optim.AdamW`; prints how far each is from it."""
    for stage, dtype, accumulation, clip in MATRIX:
        case = Case(stage, dtype, accumulation, clip, steps=50, offload=paths(folder))
        with training(case, ours=False, optimizer=lambda given: torch.optim.AdamW(given, **ADAM)) as engine:
            expected = trained(engine, case)
        with training(case) as engine:
            found = trained(engine, case)
        losses = max(abs(mine[0] / theirs[0] - 1) for mine, theirs in zip(found[0], expected[0], strict=True))
        names = [name for name in found[1] if name.endswith("master")]
        masters = max(float((found[1][name] - expected[1][name]).abs().max()) for name in names)
        print(f"near: {stage} {dtype} {accumulation} {clip}: losses {losses:.2g}, masters {masters:.2g}", flush=True)
        assert losses <= NEAR[dtype][0], f"{stage, dtype, accumulation, clip}: losses {losses}"
        assert masters <= NEAR[dtype][1], f"{stage, dtype, accumulation, clip}: masters {masters}"


@check
def alone_older(folder: Path) -> None:
    """What DeepSpeed before 0.19 computes as it does now: its ZeRO-1 and 2 lose gradients between micro-steps."""
    matrix(folder, [case for case in MATRIX if case[0] == 3 or case[2] == 1], 6)


@check
def lion_equals_its_definition(folder: Path) -> None:
    """Beside stock with the reference's Lion; and from a checkpoint of DeepSpeed's, streamed and in memory."""
    lion, moments = {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.1}, ["exp_avg"]
    for stage, dtype in ((1, "fp32"), (2, "bf16"), (3, "bf16")):
        case = Case(stage, dtype, offload=paths(folder))
        ours = dataclasses.replace(case, config={"optimizer": {"type": "Lion", "params": lion}})
        with training(case, ours=False, optimizer=lambda given: Reference(given, "lion", **lion)) as engine:
            expected = trained(engine, case, moments=moments)
        with training(ours) as engine:
            assert_same_runs(expected, trained(engine, ours, moments=moments))
            engine.save_checkpoint(str(folder / f"ck-{stage}"), "tag")
            further = trained(engine, ours, 6, 2, moments)
        with training(ours) as engine:
            engine.load_checkpoint(str(folder / f"ck-{stage}"), "tag")
            assert_same_runs(further, trained(engine, ours, 6, 2, moments))
    for name, why in (("Muon", "Muon updates whole matrices"), ("LAMB", "runs no other optimizer")):
        wrong = Case(config={"optimizer": {"type": name, "params": {"lr": 1e-3}}})
        with pytest.raises(ConfigError, match=why), training(wrong):
            pass


@check
def state_of_another_rule_is_refused(folder: Path) -> None:
    """With the layout "stock", too, whose files are DeepSpeed's; the weights alone can be loaded."""
    adam, lion = ("adam", "exp_avg, exp_avg_sq"), ("lion", "exp_avg")
    for stage, (saved, own) in itertools.product((2, 3), ((adam, lion), (lion, adam))):
        tag = f"{saved[0]}-{stage}"
        cases = [
            Case(stage, offload=paths(folder), config={"optimizer": {"type": rule, "params": {"lr": 1e-3}}})
            for rule, _ in (saved, own)
        ]
        with training(cases[0]) as engine:
            train(engine, cases[0], 0, 2)
            engine.save_checkpoint(str(folder), tag=tag)
            weights = state_of(engine, ())
        with training(cases[1]) as engine:
            before = state_of(engine, ())
            words = f"has state of another rule ({saved[1]}), and this optimizer's is '{own[0]}' ({own[1]})"
            with pytest.raises(CheckpointError, match=re.escape(words)):
                engine.load_checkpoint(str(folder), tag=tag)
            assert_same(state_of(engine, ()), before)
            engine.load_checkpoint(str(folder), tag=tag, load_optimizer_states=False)
            found = state_of(engine, ())
            assert_same(found, {name: weight for name, weight in weights.items() if name.endswith(" weight")})
            train(engine, cases[1], 0, 1)


@check
def state_of_another_model_is_refused(folder: Path) -> None:
    """Under ZeRO-3, whose model files have no weights: before anything is loaded, and not by torch as it copies."""
    case = Case(3, offload=paths(folder))
    with training(case) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(str(folder), tag="tag")
    for other in (
        {"net": {"branch": True}},
        {"freeze": "body"},
        {"zero": {"sub_group_size": 999}},
    ):
        with training(dataclasses.replace(case, **other)) as engine:
            before = state_of(engine)
            with pytest.raises(CheckpointError, match=r"nothing was loaded\. It is of another model"):
                engine.load_checkpoint(str(folder), tag="tag")
            assert_same(state_of(engine), before)


@contextlib.contextmanager
def noting_pending_steps() -> Iterator[list[bool]]:
    """Yield a list to which each step of ours adds whether it goes on when it returns."""
    pending: list[bool] = []
    original = OffloadedOptimizer.step

    def step(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        pending.append(self.offload.is_pending)

    with unittest.mock.patch.object(OffloadedOptimizer, "step", step):
        yield pending


@check
def gradients_on_paths_change_nothing(folder: Path) -> None:
    """Gradients that leave host memory as they are reduced: the bits of those that stay, and of stock."""
    leaving = {**paths(folder, is_placed=False), "gradient_memory": 0}  # the CPU updates then
    assert_equals_stock(Case(3, "bf16", 2, 0.3, steps=6, offload=leaving))
    for stage, dtype, accumulation in ((3, "bf16", 2), (3, "fp32", 1), (2, "fp16", 2), (1, "bf16", 1)):
        seen = []
        for settings in (paths(folder), leaving, {**leaving, "overlap": "forward"}):
            case = Case(stage, dtype, accumulation, 0.3, steps=4, offload=settings)
            with noting_pending_steps() as pending, training(case, model=Deep()) as engine:
                seen.append(trained(engine, case))
                assert any(pending) == ("overlap" in settings), f"{stage, dtype}: {pending}"
                plan = engine.optimizer.offload.plan
                assert (0 < plan.gradient_buffers < len(plan.layout.subgroups)) == ("gradient_memory" in settings)
        assert_same_runs(*seen)


@check
def phases_change_nothing(folder: Path) -> None:
    """All state in memory, half of it, none of it; and `offload_states` and `reload_states` between steps, of all and
    of some kinds of state: the same bits."""
    chosen = (None, [Kind.optim_states], [Kind.lp_params], [Kind.contiguous_grad_buffer, Kind.hp_params])
    for stage in (1, 2, 3):
        seen = []
        for number, host in enumerate((0, "30KiB", "1GiB")):
            overlap = "forward" if stage == 3 and number == 0 and "PLACEMENT" not in os.environ else "off"
            own = below(folder, stage, number)
            offload = {"host_memory": host, "paths": [str(own)], "overlap": overlap}
            case = Case(stage, "bf16", 2, steps=1, offload=offload)
            with training(case) as engine:
                losses = []
                for step in range(5):
                    losses += train(engine, case, step)
                    if number < 2 and step < 4 and not is_older():  # which refuses
                        include = chosen[step]
                        engine.offload_states(include=include, pin_memory=step % 2 == 0, non_blocking=step == 1)
                        if step == 3:
                            assert engine.optimizer.offload.is_parked
                            engine.optimizer.offload.park()  # what had been left in host memory leaves, too
                            assert engine.optimizer.metrics()["park/away_bytes"] > 0 or not number
                        engine.reload_states()
                        assert not engine.optimizer.offload.is_parked
                seen.append((losses, state_of(engine)))
                share = engine.optimizer.metrics()["resident_share"]
                assert (share == 0, 0 < share < 1, share == 1)[number], f"{share} resident with {host}"
                assert engine.optimizer.offload.plan.staging_slots or number == 2
            torch.distributed.barrier()
            assert not list(own.rglob("offload-*")), "the store is still there"
        assert_same_runs(*seen)


@check
def overflows_are_skipped_as_stock_does(folder: Path) -> None:
    for stage in (1, 2, 3):
        seen = assert_equals_stock(Case(stage, "fp16", 2, steps=24, scale=64.0, offload=paths(folder)))
        skipped, scales = seen[-1][4], [step[3] for step in seen]
        assert 0 < skipped < 24, f"{skipped} steps were skipped"
        assert any(later > before for before, later in itertools.pairwise(scales)), "the scale never grew"


def two_groups(model: Any) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim == 1]
    return [
        {"params": matrices, "lr": 3e-3, "weight_decay": 0.1},
        {"params": vectors, "lr": 1e-2, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


@check
def groups_schedules_and_frozen_parameters(folder: Path) -> None:
    """Each step uses the rate that is in its group then, whatever changes it."""
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 8}}
    schedule["params"]["warmup_max_lr"] = [3e-3, 1e-2]
    schedule["params"]["warmup_min_lr"] = [0, 0]
    for stage in (2, 3):
        for freeze in ("", "body.0"):
            more = {"groups": two_groups, "freeze": freeze, "config": {"scheduler": schedule}}
            seen = assert_equals_stock(Case(stage, steps=8, offload=paths(folder), **more))
            rates = [tuple(step[2]) for step in seen]
            assert len(set(rates)) > 5, f"rates: {rates}"
            assert all(first != second for first, second in rates[1:6]), f"rates: {rates}"


@check
def client_optimizers_are_taken_over(folder: Path) -> None:
    """torch's AdamW and Adam, objects or callables, keep their hyperparameters; stock agrees to a tolerance."""
    makers = [
        lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.2),
        lambda parameters: torch.optim.Adam(parameters, lr=5e-3, weight_decay=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=5e-3, maximize=True),
    ]
    for stage, maker in zip((2, 3, 2), makers, strict=True):
        # fp32, so that one last bit of a master cannot turn into one of a 16-bit weight.
        case = Case(stage, "fp32", steps=10, offload=paths(folder))
        seen = []
        for ours in (False, True):
            with training(case, ours=ours, optimizer=maker) as engine:
                seen.append(trained(engine, case))
        (expected, before), (found, after) = seen
        for mine, theirs in zip(found, expected, strict=True):
            assert abs(mine[0] - theirs[0]) <= 2e-6 * abs(theirs[0])
        for name, tensor in after.items():
            torch.testing.assert_close(tensor, before[name], rtol=2e-4, atol=2e-6)
    case = Case(3, offload=paths(folder))
    with training(case, optimizer=lambda parameters: lambda given: torch.optim.AdamW(given)) as engine:
        train(engine, case, steps=1)


@check
def user_scheduler_sets_the_rate_of_each_step(folder: Path) -> None:
    seen, case = [], Case(3, offload=paths(folder))
    for kind in (Reference, torch.optim.AdamW):
        made = []

        def maker(parameters: Any, kind: Any = kind, made: list[Any] = made) -> Any:
            made.append(kind(parameters, lr=4e-3))
            made[0].param_groups[0]["weight_decay"] = 0.0
            return made[0]

        with training(case, ours=kind is torch.optim.AdamW, optimizer=maker) as engine:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(made[0], 0.5)
            losses = []
            for step in range(5):
                losses += train(engine, case, step, 1)
                scheduler.step()
            seen.append((losses, state_of(engine)))
    assert_same_runs(*seen)


@check
def unused_parameters_stay_as_they_are(folder: Path) -> None:
    """A parameter without a gradient is neither decayed nor moved by the last one (stock does both)."""
    for stage in (1, 2, 3):
        for accumulation in (1, 2):
            case = Case(stage, "bf16", accumulation, net={"branch": True}, offload=paths(folder))
            with training(case) as engine:
                train(engine, case, 0, 1)
                before = state_of(engine)
                train(engine, case, 1, 1)  # an odd step: the branch is not used
                after = state_of(engine)
                assert after["branch.weight exp_avg"].any()
                for name, tensor in before.items():
                    if tensor.any():
                        assert torch.equal(tensor, after[name]) == name.startswith("branch"), f"{stage} {name}"
                train(engine, case, 2, 1)
                assert not torch.equal(after["branch.weight master"], state_of(engine)["branch.weight master"])
                counts = engine.optimizer.shard.steps()  # of what lies on this rank
                assert counts.get("branch.weight", 2) == 2
                assert counts.get("body.0.weight", 3) == 3


ALL_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}


@check
def model_variants_equal_stock(folder: Path) -> None:
    """Recomputed activations, weights offloaded to the CPU, no sharing of weights, fp32 accumulation, no clipping."""
    cases = [
        Case(3, net={"recompute": True}, accumulation=2),
        Case(2, net={"recompute": True}),
        Case(3, zero={"offload_param": {"device": "cpu"}}, dtype="fp16"),
        Case(3, net={"tied": False}, zero={"stage3_param_persistence_threshold": 0}),
        *(Case(stage, accumulation=3, config={"data_types": {"grad_accum_dtype": "fp32"}}) for stage in (1, 2, 3)),
        Case(2, accumulation=3, config=ALL_FP32),
        Case(1, config=ALL_FP32, zero={"reduce_scatter": False}),
        Case(3, accumulation=3, config=ALL_FP32),
        Case(2, zero={"overlap_comm": True}),
        Case(3, zero={"reduce_scatter": False, "contiguous_gradients": True, "overlap_comm": True}),
        Case(3, zero={"sub_group_size": 1e9, "reduce_bucket_size": 1e6}),
    ]
    for case in cases:
        is_placed = "offload_param" not in case.zero  # else weights are not on the accelerator
        assert_equals_stock(dataclasses.replace(case, offload=paths(folder, is_placed)))


@check
def pieces_know_their_place(folder: Path) -> None:
    """The ranks' pieces of a parameter are all of it, and each has the weights that its place says."""
    for stage in (1, 2, 3):
        with training(Case(stage, offload=paths(folder))) as engine:
            weights = dict(engine.module.named_parameters())
            with deepspeed.zero.GatheredParameters(list(weights.values()), enabled=stage == 3):
                wholes = {name: weight.detach().reshape(-1).clone() for name, weight in weights.items()}
            shard = engine.optimizer.shard
            assert engine.optimizer.offload.plan.weights_on_gpu == ("PLACEMENT" in os.environ)
            found = []
            for number, parameter in enumerate(shard.engine.plan.layout.parameters):
                piece, start, stop = shard.pieces[number], parameter.start, parameter.start + parameter.numel
                weight = shard.weights[piece.flat][piece.offset : piece.offset + piece.numel]
                assert torch.equal(weight, wholes[parameter.name][start:stop]), f"{stage} {parameter.name}"
                assert parameter.unsharded_numel == wholes[parameter.name].numel()
                found.append((parameter.name, start, stop))
            everyone: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, found)
            ends = dict.fromkeys(wholes, 0)
            for name, start, stop in sorted(piece for pieces in everyone for piece in pieces):
                assert start == ends[name]
                ends[name] = stop
            assert ends == {name: whole.numel() for name, whole in wholes.items()}


@check
def zero_init_equals_stock(folder: Path) -> None:
    case = Case(3, offload=paths(folder))

    def model() -> Any:
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path={**case.ds_config(), "train_batch_size": None}):
            return Net()

    assert_equals_stock(case, model=model)


@check
def utilities_read_and_write_state(folder: Path) -> None:
    """deepspeed.utils.safe_get_* and safe_set_*; of local parts padding is nobody's business."""
    as_written = ("full_fp32_param", "full_optimizer_state")  # by stock, too

    def multiply(what: str, weight: Any, factor: float, *key: str) -> Any:
        """Write a multiple of what is read; return what was."""
        read, write = (getattr(utils, f"safe_{verb}_{what}") for verb in ("get", "set"))
        before = read(weight, *key)
        write(weight, before * factor, *key)
        assert what not in as_written or torch.equal(read(weight, *key), before * factor), what
        return before

    def act(engine: Any) -> Any:
        train(engine, case, 0, 2)
        weight, other = (engine.module.body[number].weight for number in range(2))
        multiply("full_fp32_param", weight, 1.25)
        multiply("full_optimizer_state", weight, 2, "exp_avg_sq")
        engine.backward(engine(micro_batch(engine, 7, 0)))
        gradient = multiply("full_grad", weight, 0.5)
        if case.stage == 3:
            multiply("local_fp32_param", weight, 0.5)
            multiply("local_optimizer_state", weight, 0.5, "exp_avg")
            multiply("local_grad", other, 2)
        engine.step()
        return gradient.float().tolist()

    for stage in (1, 2, 3):
        case = Case(stage, "bf16", clip=0.0, offload=paths(folder), config={"data_types": {}})
        assert_equals_stock(case, act)


@check
def micro_steps_by_hand(folder: Path) -> None:
    """Boundaries that the user sets, and steps that are thrown away."""

    def bounded(engine: Any) -> None:
        for step, micro in itertools.product(range(3), range(4)):
            engine.set_gradient_accumulation_boundary(micro == 3)
            engine.backward(engine(micro_batch(engine, step, micro)))
            engine.step()

    def unsynced(engine: Any) -> None:
        for step in range(3):
            with engine.no_sync():
                engine.backward(engine(micro_batch(engine, step, 0)))
            engine.backward(engine(micro_batch(engine, step, 1)))
            engine.step()

    assert_equals_stock(Case(3, offload=paths(folder)), bounded)
    assert_equals_stock(Case(1, offload=paths(folder)), unsynced)


@check
def metrics_reach_deepspeeds_monitor(folder: Path) -> None:
    """Its monitor gets our figures, its timers ours steps, and ranks share the cores."""
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    config = {"csv_monitor": monitor, "wall_clock_breakdown": True}
    for stage in (2, 3):
        case = Case(stage, offload={**paths(folder), "threads": None}, config=config)
        with training(case) as engine:
            train(engine, case, 0, 2)
            world = torch.distributed.get_world_size()
            threads = len(os.sched_getaffinity(0)) // world - 2 * (engine.device.type != "cpu")
            assert engine.optimizer.offload._parts.kernel.threads == max(1, threads)
            assert engine.optimizer.metrics()["step"] == 2
            assert "subgroups" in str(engine.optimizer.plan)
            timer = engine.timers.get_timers()["optimizer_step"]
            assert timer.mean() >= 0
    if torch.distributed.get_rank() == 0:
        written = list(folder.rglob("Train_Offload_step_s.csv"))
        assert written, sorted(folder.rglob("*.csv"))
        assert float(written[0].read_text().split()[-1].split(",")[-1]) > 0


@check
def what_a_step_did_can_be_seen_as_elsewhere(folder: Path) -> None:
    """Figures, explanations, reports and traces, by each rank alone, in every stage and wherever steps are hidden."""
    from offload.cli.__main__ import main as offload_main

    (lines,) = re.findall(r"^```\n(engine\.save_checkpoint.*?)^```$", PAGE.read_text(), re.M | re.S)
    for stage, overlap in ((1, "off"), (2, "both"), (3, "both")):
        place, logged = below(folder, stage, overlap), []
        case = Case(stage, clip=0.1, offload={**paths(place), "overlap": overlap})
        lines_here = lines.replace('"checkpoints"', repr(f"{place}/saved")).replace("run/rank-", f"{place}/run-")
        with training(case) as engine:
            optimizer = engine.optimizer
            optimizer.log_to(lambda values, step, logged=logged: logged.append((step, values)), prefix="", names="*")
            train(engine, case, 0, 4)
            optimizer.finish()
            assert [step for step, _ in logged] == [1, 2, 3, 4]
            figures = logged[-1][1]
            assert figures["gradient_norm"] == float(engine.get_global_grad_norm())
            assert figures["predicted_step_s"] > 0
            hidden_in = "forward and backward" if overlap == "both" else ""
            assert optimizer.plan.hidden_in == hidden_in
            assert ("predicted_iteration_s" in figures) == bool(hidden_in)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(lines_here.replace("every=100", ""), {"engine": engine})
                train(engine, case, 4, 1)
                optimizer.finish()
            assert "write:0" in said.getvalue()
            assert "offload/step_s" in said.getvalue()
            run = place / f"run-{engine.global_rank}"
            (run / "report.html").unlink()
            with contextlib.redirect_stdout(io.StringIO()) as said:
                assert offload_main(["report", str(run)]) == offload_main(["trace", str(run)]) == 0
            assert "of step 4" in said.getvalue()
            assert "write:0" in (run / "report.html").read_text()
            optimizer.write_trace(run / "own.json")
            lane = "gpu" if os.environ.get("PLACEMENT") == "gpu" else "cpu"
            for trace in ("trace.json", "own.json"):
                assert f'"{lane}"' in (run / trace).read_text()


@check
def its_start_is_in_deepspeeds_log(folder: Path) -> None:
    """Once, on rank 0, with its plan, which has room for checkpoints on the paths only if the layout keeps any."""
    for layout in "stock", "in_place":
        case = Case(3, offload={**paths(folder), "checkpoint": {"layout": layout}})
        with unittest.mock.patch.object(utils.logger, "log") as log, training(case):
            pass
        lines = [call.args[1] for call in log.call_args_list if "offload keeps" in call.args[1]]
        assert len(lines) == (torch.distributed.get_rank() == 0)
        assert all(re.search(r"\(OffloadedStage3\), on this rank:\n(.*\n)+? +host memory ", line) for line in lines)
        assert all(("1 checkpoint kept" in line) == (layout == "in_place") for line in lines)


@check
def ranks_stay_on_their_numa_node(folder: Path) -> None:
    """With a list of two nodes, each rank's update threads stay on one; with one rank nothing is bound."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    cores = sorted(os.sched_getaffinity(0))
    halves = [cores[: len(cores) // 2], cores[len(cores) // 2 :]]
    if not halves[0]:
        pytest.skip("one core")
    for number, half in enumerate(halves):
        (folder / f"node{number}").mkdir(exist_ok=True)
        (folder / f"node{number}" / "cpulist").write_text(",".join(map(str, half)) + "\n")
    torch.distributed.barrier()
    with unittest.mock.patch.object(touching, "NODES", folder):
        before = {int(task.name) for task in Path("/proc/self/task").iterdir()}
        with training(Case(3, offload=paths(folder))) as engine:
            train(engine, Case(3), 0, 1)
            made = {int(task.name) for task in Path("/proc/self/task").iterdir()} - before
            seen = set()
            for task in made:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    seen.add(tuple(sorted(os.sched_getaffinity(task))))
            assert tuple(cores if world == 1 else halves[rank]) in seen, f"{seen}"
        assert sorted(os.sched_getaffinity(0)) == cores


def in_file(folder: Path, **more: Any) -> dict[str, Any]:
    """Return `zero_optimization`'s keys for weights in a file in a folder."""
    return {"offload_param": {"device": "nvme", "nvme_path": str(folder)}, **more}


GATHERS = {"stage3_gather_16bit_weights_on_model_save": True}
IN_MEMORY = {"offload_param": {"device": "cpu"}}


def files_of(tensors: Iterable[torch.Tensor], folder: Path) -> list[str]:
    """Return the files in a folder that tensors lie in; they have no names."""
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    places = [([int(end, 16) for end in row[0].split("-")], row[-1]) for row in maps]
    found = [name for each in tensors for (begin, end), name in places if begin <= each.data_ptr() < end]
    return [name for name in found if name.startswith(str(folder)) and name.endswith("(deleted)")]


def parts_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return this rank's parts of weights, but for those that ZeRO-3 leaves on an accelerator."""
    return [each.ds_tensor for each in model.parameters() if each.ds_tensor.is_cpu]  # type: ignore[attr-defined]


@contextlib.contextmanager
def backend_on() -> Iterator[None]:
    offload_deepspeed.enable()
    try:
        yield
    finally:
        offload_deepspeed.disable()


ALL_LEAVE = unittest.mock.patch.object(weights, "LEAST_BYTES", 1)
"""Small partitions of weights leave memory, too."""


def made_by_zero_init(case: Case) -> Any:
    """Return what a case trains, made under `zero.Init`."""
    config = {**case.ds_config(), "multi_tier_offload": case.offload}
    with ALL_LEAVE, backend_on(), deepspeed.zero.Init(config_dict_or_path=config):
        return case.model()


@check
def weights_in_files_change_nothing(folder: Path) -> None:
    """All bits are those of weights in memory: trained, frozen and persistent ones, also those of `zero.Init`."""
    cases: list[tuple[Case, bool]] = [
        (Case(3, "bf16", 2, net={"recompute": True, "branch": True}), True),
        (Case(3, "fp16", groups=two_groups, config=ALL_FP32), False),
        (Case(3, "fp32", freeze="body.0", zero={"stage3_param_persistence_threshold": 0}), True),
        (Case(3, "bf16", freeze="body.1", offload={"overlap": "forward", "gradient_memory": 0}), False),
    ]
    for given, is_made_there in cases:
        seen = []
        for place in (IN_MEMORY, in_file(folder)):
            offload = {**paths(folder, is_placed=False), **given.offload}  # weights are not on the accelerator
            case = dataclasses.replace(given, zero={**given.zero, **place}, offload=offload)
            model = None
            if is_made_there:
                model = made_by_zero_init(case)
                parts = parts_of(model)
                assert len(files_of(parts, folder)) == (len(parts) if place is not IN_MEMORY else 0)
            with training(case, model=model) as engine:
                parts = [*parts_of(engine.module), *engine.optimizer.fp16_partitioned_groups_flat]
                seen.append(trained(engine, case))
                there = files_of(parts, folder)
                assert (len(there), len({*there})) == ((len(parts), 1) if place is not IN_MEMORY else (0, 0))
                assert engine.optimizer.may_update_during_backward == (place is IN_MEMORY)
            del engine, model, parts
        assert not files_of([], folder)
        assert_same_runs(*seen)


@check
def weights_in_files_are_saved_as_any(folder: Path) -> None:
    """Checkpoints go both ways between weights in files and in memory, whole and weights alone."""
    found = []
    settings = {**paths(folder, is_placed=False), "overlap": "forward"}
    zeros = [{**place, **GATHERS} for place in (IN_MEMORY, in_file(folder))]
    cases = [Case(3, freeze="body.1", zero=zero, offload=settings) for zero in zeros]
    for number, case in enumerate(cases):
        with training(case) as engine:
            train(engine, case, 0, 3)
            engine.save_checkpoint(str(folder), tag=str(number))
            engine.save_16bit_model(str(folder), f"{number}.bin")
            found.append(trained(engine, case, 3, 3))
    models = [torch.load(folder / f"{number}.bin") for number in (0, 1)]
    assert_same(models[0], models[1])
    assert_same_runs(*found)
    for number, case in enumerate(reversed(cases)):
        with training(case) as engine:
            train(engine, case, 0, 1)  # state that must go
            engine.load_checkpoint(str(folder), tag=str(number))
            assert_same_runs(found[0], trained(engine, case, 3, 3))
            alone = {"load_module_only": True, "load_optimizer_states": False}
            engine.load_checkpoint(str(folder), tag=str(number), **alone)
            state, saved = state_of(engine), {f"{name} weight": each for name, each in models[number].items()}
            assert_same(state, {name: saved[name] for name in saved.keys() & state})  # of tied ones one is there


@check
def weights_that_have_no_file_are_refused_before_anything_changes(folder: Path) -> None:
    """Where one rank's drive is full or its folder missing, all ranks raise; so do they where a drive fails later."""
    rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    refused = pytest.raises(offload.TierFullError if rank == last else offload.SessionBrokenError)
    reserve = os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if rank == last:
            raise OSError(errno.ENOSPC, "full")
        reserve(descriptor, offset, nbytes)

    case = Case(3, zero=in_file(folder), offload=paths(folder, is_placed=False))
    before, model = case.model().to(torch.bfloat16), case.model()
    with unittest.mock.patch("os.posix_fallocate", full):
        with refused, training(case, model=model):
            pass
        with refused:
            made_by_zero_init(case)
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    assert_same({k: v.to("cpu") for k, v in model.state_dict().items()}, before.state_dict())
    missing = dataclasses.replace(case, zero=in_file(folder / "missing"))
    with pytest.raises(ConfigError, match=r"^zero_optimization\.offload_param\.nvme_path: "), training(missing):
        pass
    swapped = case.model()
    swapped.embed.weight.nvme_swapper = object()  # type: ignore[attr-defined]  # as `zero.Init` leaves it
    with pytest.raises(ConfigError, match="switch the backend on before it"), training(case, model=swapped):
        pass
    with training(case) as engine:
        train(engine, case, 0, 1)
        failed = offload.TierError("read", tier="file", path=str(folder))
        with unittest.mock.patch.object(MappedFile, "fault_in", side_effect=failed), pytest.raises(offload.TierError):
            engine(micro_batch(engine, 0, 0))


@check
def weights_of_an_engine_without_an_optimizer_lie_in_files(folder: Path) -> None:
    """Also those that were in memory before; the backend has no part in it otherwise."""
    found = []
    for place in (IN_MEMORY, in_file(folder)):
        case = Case(3, zero=place, offload=paths(folder))
        config = {**case.ds_config(), "multi_tier_offload": case.offload}
        with ALL_LEAVE:
            engine, *_ = offload_deepspeed.initialize(model=case.model(), config=config)
        parts = parts_of(engine.module)
        assert len(files_of(parts, folder)) == (0 if place is IN_MEMORY else len(parts))
        found.append(engine(micro_batch(engine, 0, 0)).item())
        engine.destroy()
    assert found[0] == found[1]


@check
def checkpoints_go_both_ways(folder: Path) -> None:
    """Resume is exact; checkpoints go from stock to ours and back; the weights alone can be loaded too."""
    dtypes = ("bf16", "fp32") if torch.distributed.get_world_size() == 1 else ("fp32", "bf16")
    for stage, dtype in zip((2, 3), dtypes, strict=True):
        # A step still goes on when it is saved.
        overlap = "forward" if stage == 3 and "PLACEMENT" not in os.environ else "off"
        case = Case(stage, dtype, 2, offload={**paths(folder), "overlap": overlap}, net={"branch": True})
        # All parameters are used in even steps, so stock's one step count is right for them.
        plain = dataclasses.replace(case, net={})
        seen, tag, back = {}, f"{stage}-{dtype}", f"{stage}-{dtype}-back"
        for ours, each in ((False, plain), (True, case)):
            with training(each, ours=ours) as engine:
                train(engine, each, 0, 3)
                engine.save_checkpoint(str(folder), tag=f"{tag}-{ours}")
                seen[ours] = trained(engine, each, 3, 3)
        with training(case) as engine:
            train(engine, case, 0, 1)  # state that must go
            engine.load_checkpoint(str(folder), tag=f"{tag}-True")
            assert_same_runs(seen[True], trained(engine, case, 3, 3))
        with training(plain) as engine:
            engine.load_checkpoint(str(folder), tag=f"{tag}-False")
            assert_same_runs(seen[False], trained(engine, plain, 3, 3))
            engine.save_checkpoint(str(folder), tag=back)
            expected = trained(engine, plain, 6, 2)
        with training(plain, ours=False) as engine:
            engine.load_checkpoint(str(folder), tag=back)
            found = trained(engine, plain, 6, 2)
            assert found[0] == expected[0]
            assert_same(found[1], expected[1])
        with training(plain) as engine:
            engine.load_checkpoint(str(folder), tag=back, load_module_only=True, load_optimizer_states=False)
            state = state_of(engine)
            for name in ("embed.weight", "body.0.weight"):
                assert torch.equal(state[f"{name} weight"].float(), state[f"{name} master"])
                assert not state[f"{name} exp_avg"].any()
                saved = get_fp32_state_dict_from_zero_checkpoint(str(folder), back)[name]
                saved = saved.to(state[f"{name} weight"].dtype)  # rounded to what the model has
                assert torch.equal(state[f"{name} weight"], saved), f"{back}: {name} is not what was saved"
            train(engine, plain, 0, 1)


def save_at_once(engine: Any, place: Path, tag: str = "waits", **more: Any) -> None:
    """Save as DeepSpeed does by itself, and leave `latest` alone."""
    type(engine).save_checkpoint(engine, str(place), tag=tag, save_latest=False, **more)


def wait_for_all(engine: Any) -> None:
    """Wait until what all ranks save behind training is whole."""
    engine.optimizer.wait_checkpoint()
    torch.distributed.barrier()


def assert_same_files(found: Path, expected: Path, *more: str) -> None:
    """Check that a tag has the files of another one, byte for byte, and some more."""
    names = sorted(file.name for file in expected.iterdir())
    assert sorted([*names, *more]) == sorted(file.name for file in found.iterdir())
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def load_latest(engine: Any, place: Path, tag: str) -> None:
    """Load what `latest` names, which is this tag."""
    assert engine.load_checkpoint(str(place))[0].startswith(str(place / tag))


@contextlib.contextmanager
def written_after(wait: Callable[[], object]) -> Iterator[None]:
    """Have whoever writes state to a tag's files wait before."""
    write_state = stream.write_state

    def late(*given: Any) -> None:
        wait()
        write_state(*given)

    with unittest.mock.patch.object(stream, "write_state", late):
        yield


def on_first_rank(act: Callable[[], object]) -> None:
    """Have the first rank do something, when all have come here, and before any goes on."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        act()
    torch.distributed.barrier()


@check
def saves_behind_training_are_those_that_wait(folder: Path) -> None:
    """Byte for byte, while training goes on; `latest` follows when all is whole; what is loaded goes on exactly."""
    for stage, dtype, format in (
        (1, "bf16", "exact"),
        (2, "fp32", "exact"),
        (3, "bf16", "compact8"),
        (3, "fp16", "exact"),
    ):
        settings = {**paths(folder), "state_format": format, "subgroup_numel": 4096, "checkpoint": {"wait": False}}
        case = Case(stage, dtype, 2, offload=settings, net={"branch": True})
        place = folder / f"{stage}-{dtype}"
        with training(case) as engine:
            train(engine, case, 0, 3)
            engine.save_checkpoint(str(place), tag="behind", client_state={"epoch": 3})
            save_at_once(engine, place, client_state={"epoch": 3})
            whole = trained(engine, case, 3, 3)
            wait_for_all(engine)
            assert (place / "latest").read_text() == "behind"
            assert_same_files(place / "behind", place / "waits", WHOLE)
            engine.save_checkpoint(str(place), tag="again")  # and loaded at once
            load_latest(engine, place, "again")
            assert_same(state_of(engine), whole[1])
            assert not (place / ".offload-behind").exists()
        with training(case) as engine:
            _, client = engine.load_checkpoint(str(place), tag="waits")
            assert client["epoch"] == 3
            assert_same_runs(whole, trained(engine, case, 3, 3))


def model_file(engine: Any, place: Path, tag: str) -> Path:
    return Path(engine._get_ckpt_name(str(place), tag))


def assert_same_model(engine: Any, place: Path, tag: str) -> None:
    """Check that a tag has the model's file of one that was waited for, byte for byte."""
    assert model_file(engine, place, tag).read_bytes() == model_file(engine, place, "waits").read_bytes()


@check
def weights_that_masters_give_are_written_behind(folder: Path) -> None:
    """By all ranks, byte for byte, whatever training has made of them since; all else is there before."""
    for stage, dtype, layout, format in (
        (1, "bf16", "stock", "exact"),
        (1, "fp16", "in_place", "exact"),
        (2, "fp32", "stock", "exact"),
        (2, "bf16", "in_place", "compact8"),
    ):
        place, goes_on = below(folder, stage, dtype), threading.Event()
        saving = {"checkpoint": {"wait": False, "layout": layout}, "checkpoints_kept": 2}
        settings = {"state_format": format, "subgroup_numel": 4096, **saving}
        case = Case(stage, dtype, groups=two_groups, offload={**paths(place), **settings})
        model = wide(150_000) if format != "exact" else case.model()
        model.body[1].requires_grad_(False)
        with training(case, model=model) as engine, written_after(goes_on.wait):
            engine.module.register_buffer("buffer", torch.arange(5.0))
            train(engine, case, 0, 3)
            client = {"own": torch.arange(3), "view": engine.module.head.weight[1:2].detach()}
            goes_on.set()
            save_at_once(engine, place, client_state=client)
            goes_on.clear()
            engine.save_checkpoint(str(place), tag="behind", client_state=client)
            file = model_file(engine, place, "behind")
            saved = torch.load(behind.partial_of(str(file)), weights_only=False)
            module = engine.module.state_dict()
            for name in ("body.1.weight", "body.1.bias", "buffer"):
                assert torch.equal(saved["module"][name], module[name]), name
            for name in ("embed.weight", "head.weight", "body.0.weight"):
                assert not saved["module"][name].any(), f"{name} is there when the save returns"
            assert torch.equal(saved["own"], client["own"])
            assert not file.exists()
            whole = state_of(engine)
            engine.module.body[0].weight.data.zero_()  # as one who swaps weights does: they are saved by then
            train(engine, case, 3, 1)
            goes_on.set()
            wait_for_all(engine)
            assert_same_model(engine, place, "behind")
            assert not [*place.glob(f"*/{behind.PARTIAL}")]
            load_latest(engine, place, "behind")
            assert_same(state_of(engine), whole)
            on_first_rank(lambda file=file, place=place: file.rename(place / "away"))
            with pytest.raises((AssertionError, OSError, offload.OffloadError)):  # not taken for whole without it
                engine.load_checkpoint(str(place), tag="behind")


@check
def weights_that_masters_do_not_give_are_written_before_a_save_returns(folder: Path) -> None:
    """Whoever has set them, or their masters, since the last step; a change that nobody could see fails the save."""
    goes_on = threading.Event()

    def counted(engine: Any) -> None:
        with torch.no_grad():
            engine.module.body[0].weight[0, 3] = 5.0

    def uncounted(engine: Any) -> None:
        engine.module.embed.weight.data.mul_(0.5)

    def elsewhere(engine: Any) -> None:
        engine.module.body[0].bias.data = torch.full_like(engine.module.body[0].bias, 3.0)

    def master(engine: Any) -> None:
        weight = engine.module.body[0].weight
        safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25))

    for layout in ("stock", "in_place"):
        place = below(folder, layout)
        goes_on.set()
        case = Case(2, offload={**paths(place), "checkpoint": {"wait": False, "layout": layout}})
        with training(case) as engine, written_after(goes_on.wait):
            for step, change in enumerate((counted, uncounted, elsewhere, master)):
                train(engine, case, step, 1)
                change(engine)
                tag = change.__name__
                save_at_once(engine, place)
                goes_on.clear()
                engine.save_checkpoint(str(place), tag=tag)
                if change is elsewhere:
                    engine.optimizer._update_model_bit16_weights(0)
                else:
                    engine.module.embed.weight.data.zero_()
                goes_on.set()
                wait_for_all(engine)
                assert_same_model(engine, place, tag)
                torch.distributed.barrier()
            train(engine, case, 4, 1)
            engine.module.body[0].weight.data.view(-1)[7] += 1.0
            with pytest.raises(offload.OffloadError):
                save_and_wait(engine, place, "fails")
            torch.distributed.barrier()
            assert (place / "latest").read_text() == "master"
            assert not model_file(engine, place, "fails").exists()
            save_at_once(engine, place)
            save_and_wait(engine, place, "whole")
            assert_same_model(engine, place, "whole")
            load_latest(engine, place, "whole")


@check
def ranks_that_share_no_folder_save_as_ever(folder: Path) -> None:
    """Rank 0 writes all weights before a save returns: those who cannot see its file write none, to nobody's."""
    for local in (False, True):
        place = folder / f"{local}-{torch.distributed.get_rank()}"
        config = {"checkpoint": {"use_node_local_storage": local}}
        case = Case(1, offload={**paths(folder), "checkpoint": {"wait": False}}, config=config)
        with training(case) as engine:
            train(engine, case, 0, 2)
            save_at_once(engine, place)
            engine.save_checkpoint(str(place), tag="behind")
            train(engine, case, 2, 1)
            wait_for_all(engine)
            is_one = torch.distributed.get_world_size() == 1 and not local  # else nobody has seen the whole
            assert_same_files(place / "behind", place / "waits", *([WHOLE] if is_one else []))


@check
def what_is_frozen_after_initialize_keeps_its_state(folder: Path) -> None:
    """And what is frozen before it has no room in DeepSpeed's optimizer, so that a tag with its state is refused."""
    for stage, layout in ((2, "in_place"), (3, "in_place"), (3, "stock")):
        place = below(folder, stage, layout)
        case = Case(stage, "fp32", offload={**paths(place), "checkpoint": {"layout": layout}})
        with training(case) as engine:
            train(engine, case, 0, 2)
            engine.module.body[0].requires_grad_(False)
            train(engine, case, 2, 2)
            save_and_wait(engine, place, "tag")
            whole = state_of(engine)
        for freezes in ("load", "save"):
            with training(case) as engine:
                engine.module.body[0].requires_grad_(freezes == "save")
                engine.load_checkpoint(str(place), tag="tag")
                assert_same(state_of(engine), whole)
        said = "body.0.weight.*, which no parameter group has: freeze it after" if layout == "in_place" else ""
        frozen = dataclasses.replace(case, freeze="body.0")
        with training(frozen) as engine, pytest.raises(Exception, match=said or None):
            engine.load_checkpoint(str(place), tag="tag")


@check
def saves_in_place_copy_nothing_and_go_on(folder: Path) -> None:
    """State stays on the paths; it is loaded by tag or `latest`, in the same session and others, and exported."""
    from offload.cli.__main__ import main as offload_main

    def export_here(place: Path) -> None:
        """Export the tag, as the page says; what cannot be exported says why, and leaves nothing."""

        def fails(tag: str, out: str) -> int:
            return offload_main(["export", str(place / tag), str(place / out), "--for", "deepspeed"])

        with contextlib.redirect_stdout(io.StringIO()) as said:
            command = shlex.split(export.replace("global_step500", "here").replace("checkpoints", str(place)))
            assert (command[0], offload_main(command[1:])) == ("offload", 0)
        assert f"engine.load_checkpoint({str(place)!r}, tag='exported')" in said.getvalue()
        assert_same_files(place / "exported", place / "stock")
        for tag, out, words in (
            ("here", "exported", "it is there already"),
            ("stock", "other", "DeepSpeed's own layout already"),
            ("none", "other", "give the folder of a tag"),
        ):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                assert fails(tag, out) == 2
            assert words in said.getvalue()
        (place / "here" / state_files[0]).rename(place / "away")
        assert fails("here", "other") == 1
        shutil.copy(place / "stock" / state_files[0], place / "here")
        assert fails("here", "other") == 1
        (place / "away").rename(place / "here" / state_files[0])
        assert not (place / "other").exists()

    export, load = re.findall(r"^```(?:sh)?\n(.*)\n```$", PAGE.read_text().partition("### Going back")[2], re.M)
    for stage, dtype, format, wait in (
        (1, "bf16", "exact", True),
        (2, "fp32", "exact", False),
        (3, "bf16", "compact8", False),
        (3, "fp16", "exact", True),
    ):
        saving = {"layout": "in_place", "wait": wait}
        settings = {"subgroup_numel": 4096, "checkpoints_kept": 2, "state_format": format, "checkpoint": saving}
        place = below(folder, stage, dtype)
        case = Case(stage, dtype, 2, offload={**paths(place), **settings}, net={"branch": True})
        with training(case) as engine:
            train(engine, case, 0, 3)
            engine.save_checkpoint(str(place), tag="here", client_state={"epoch": 3})
            if wait:
                torch.distributed.barrier()
                assert (place / "latest").read_text() == "here"
            save_at_once(engine, place, "stock", client_state={"epoch": 3})
            whole = trained(engine, case, 3, 3)
            engine.optimizer.wait_checkpoint()
            load_latest(engine, place, "here")
            assert_same_runs(whole, trained(engine, case, 3, 3))
            files = sorted(file.name for file in (place / "stock").iterdir())
            assert sorted(file.name for file in (place / "here").iterdir()) == sorted([*files, "offload", WHOLE])
            state_files = [name for name in files if "optim_states" in name]
            for name in state_files:
                assert (place / "here" / name).stat().st_size < 4096
            with pytest.raises(CheckpointError, match="--for deepspeed"):
                get_fp32_state_dict_from_zero_checkpoint(str(place), "here")
            on_first_rank(lambda place=place: export_here(place))
        plain = dataclasses.replace(case, zero={"offload_optimizer": {"device": "none"}})
        with training(plain, ours=False) as engine:
            path, client = eval(load.replace("checkpoints", str(place)), {"engine": engine})
            assert path.startswith(str(place / "exported"))
            assert client["epoch"] == 3
        with training(case) as engine:
            _, client = engine.load_checkpoint(str(place), tag="here")
            assert client["epoch"] == 3
            assert_same_runs(whole, trained(engine, case, 3, 3))
            for tag in ("next", "last"):
                engine.save_checkpoint(str(place), tag=tag)
            wait_for_all(engine)
            with pytest.raises(CheckpointError, match="checkpoints_kept"):
                engine.load_checkpoint(str(place), tag="here")
        with training(case) as engine:
            engine.load_checkpoint(str(place))
            assert_same(state_of(engine), whole[1])


def save_and_wait(engine: Any, place: Path, tag: str, **more: Any) -> None:
    engine.save_checkpoint(str(place), tag=tag, **more)
    engine.optimizer.wait_checkpoint()


@check
def saves_behind_leave_what_latest_names(folder: Path) -> None:
    """What a session keeps goes when `latest` names the tag; another save of its engine waits for that."""

    def fails() -> None:
        raise OSError(errno.ENOSPC, "no room")

    rank = torch.distributed.get_rank()
    case = Case(3, offload={**paths(folder), "checkpoint": {"layout": "in_place"}})
    with training(case) as engine:
        train(engine, case, 0, 1)
        engine.save_checkpoint(str(folder), tag="here")
        state = state_of(engine)
    case = Case(3, offload={**paths(folder), "checkpoint": {"wait": False}})
    with training(case) as engine:
        engine.load_checkpoint(str(folder))
        train(engine, case, 1, 1)
        with written_after(fails), pytest.raises(offload.OffloadError):
            save_and_wait(engine, folder, "fails")
    with training(case) as engine:
        load_latest(engine, folder, "here")
        assert_same(state_of(engine), state)
        with written_after(lambda: time.sleep(0.5)):
            engine.save_checkpoint(str(folder), tag="next")
            train(engine, case, 1, 1)
            engine.optimizer.offload.checkpoints.save(SaveRequest(folder / f"own-{rank}"))
            engine.optimizer.offload.checkpoints.wait()
        train(engine, case, 2, 1)
        load_latest(engine, folder, "next")
        assert_same(state_of(engine), state)
        assert engine.optimizer.offload.checkpoints.kept == (str(folder / f"own-{rank}"),)


@check
def models_are_saved_behind_beside_each_other(folder: Path) -> None:
    """To one folder, named from a directory that the program then leaves."""
    for layout in ("stock", "in_place"):
        case = Case(3, offload={**paths(folder), "checkpoint": {"layout": layout, "wait": False}})
        with training(case) as one, training(case) as other, written_after(lambda: time.sleep(0.5)):
            with contextlib.chdir(folder):
                for steps, engine in enumerate((one, other), 1):
                    train(engine, case, 0, steps)
                    engine.save_checkpoint(f"{layout}-tags", tag=f"behind-{steps}")
            for steps, engine in enumerate((one, other), 1):
                state = state_of(engine)
                train(engine, case, steps, 1)
                engine.optimizer.wait_checkpoint()
                engine.load_checkpoint(str(folder / f"{layout}-tags"), tag=f"behind-{steps}")
                assert_same(state_of(engine), state)


@check
def an_interrupted_save_is_given_up_before_it_raises(folder: Path) -> None:
    """Also where the engine has its part already: nothing writes to the tag's files when it is saved again."""
    save = Checkpoints.save

    def is_interrupted(*given: Any, **named: Any) -> None:
        save(*given, **named)
        raise KeyboardInterrupt

    def is_not_reached(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    def until_given_up() -> None:
        while not engine.optimizer.behind.pending.is_given_up:
            time.sleep(0.01)

    for stage, layout in ((3, "stock"), (3, "in_place"), (2, "in_place")):
        case = Case(stage, offload={**paths(folder), "checkpoint": {"layout": layout, "wait": False}})
        place = folder / f"{layout}-{stage}"
        with training(case) as engine:
            for step, instead in enumerate((is_interrupted, is_not_reached)):
                train(engine, case, step, 1)
                with (
                    written_after(until_given_up),
                    unittest.mock.patch.object(Checkpoints, "save", instead),
                    pytest.raises(KeyboardInterrupt),
                ):
                    engine.save_checkpoint(str(place), tag="tag")
                state = state_of(engine)
                engine.save_checkpoint(str(place), tag="tag")
                train(engine, case, step + 1, 1)
                load_latest(engine, place, "tag")
                assert_same(state_of(engine), state)


@check
def what_a_killed_save_leaves_is_refused(folder: Path) -> None:
    """Of a new tag and of one that is saved again, which `latest` names: as the folder is while state is written."""
    rank, write_state = torch.distributed.get_rank(), stream.write_state
    for stage in (2, 3):
        case, place = Case(stage, offload=paths(folder)), folder / f"{stage}"
        with training(case) as engine:
            train(engine, case, 0, 1)
            for step, tag in enumerate(("again", "again", "new"), 1):
                left = folder / f"left-{stage}-{step}"

                def write_and_copy(*given: Any, left: Path = left, place: Path = place) -> None:
                    assert not [*place.rglob("*.aside")], "the disk has to have room for two"
                    if rank == 0:
                        shutil.copytree(place, left)
                    torch.distributed.barrier()
                    write_state(*given)

                with unittest.mock.patch.object(stream, "write_state", write_and_copy):
                    engine.save_checkpoint(str(place), tag=tag)
                state = state_of(engine)
                train(engine, case, step, 1)
                others = state_of(engine)
                for asked in (tag, None) if step == 2 else (tag,):
                    with pytest.raises(CheckpointError, match="is not whole, as its save was interrupted"):
                        engine.load_checkpoint(str(left), tag=asked)
                if step > 1:  # files that are there, as another rank's may be
                    shutil.copytree(place / tag, left / tag, dirs_exist_ok=True) if rank == 0 else None
                    torch.distributed.barrier()
                    with pytest.raises(CheckpointError, match="is not whole, as its save was interrupted"):
                        engine.load_checkpoint(str(left), tag=tag)
                assert_same(state_of(engine), others)
                load_latest(engine, place, tag)
                assert_same(state_of(engine), state)


class SavesItself:
    """Has a tensor, which its own `torch.save`, or pickle, makes into bytes."""

    def __init__(self, values: torch.Tensor, *, by_torch: bool) -> None:
        self.values, self.by_torch = values, by_torch

    def __getstate__(self) -> Any:
        if not self.by_torch:
            return pickle.dumps(self.values)
        torch.save(self.values, file := io.BytesIO())
        return file.getvalue()

    def __setstate__(self, content: bytes) -> None:
        try:
            self.values = pickle.loads(content)
        except pickle.UnpicklingError:
            self.values = torch.load(io.BytesIO(content), weights_only=True)


@check
def a_program_s_own_objects_are_saved_whole(folder: Path) -> None:
    """Holes are for tensors of the file, not for what is pickled in between."""
    given = torch.arange(5.0)
    for stage, wait in itertools.product((2, 3), (True, False)):
        case = Case(stage, offload={**paths(folder), "checkpoint": {"wait": wait}})
        with training(case) as engine:
            train(engine, case, 0, 1)
            client = {f"{by_torch}": SavesItself(given, by_torch=by_torch) for by_torch in (True, False)}
            place = folder / f"{stage}-{wait}"
            save_and_wait(engine, place, "tag", client_state={**client, "plain": given})
            found = engine.load_checkpoint(str(place), tag="tag")[1]
            assert torch.equal(found["plain"], given)
            for name in client:
                assert torch.equal(found[name].values, given), (stage, wait, name)


@check
def what_killed_saves_have_left_in_a_tag_goes_with_the_next(folder: Path) -> None:
    """What ranks had begun that are fewer now, too: `ds_to_universal` would read it."""
    case = Case(2, offload=paths(folder))
    with training(case) as engine:
        train(engine, case, 0, 1)
        left = folder / "tags" / "tag" / behind.PARTIAL / "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt"
        on_first_rank(lambda: left.parent.mkdir(parents=True) or left.write_bytes(b"half"))
        engine.save_checkpoint(str(folder / "tags"), tag="tag")
        assert not left.parent.exists()
        load_latest(engine, folder / "tags", "tag")


@check
def a_save_without_weights_in_memory_is_refused_before_it_begins(folder: Path) -> None:
    for stage in (2, 3):
        case, place = Case(stage, offload=paths(folder)), folder / f"{stage}"
        with training(case) as engine:
            train(engine, case, 0, 1)
            engine.save_checkpoint(str(place), tag="tag")
            state = state_of(engine)
            if is_older():  # which has none under ZeRO-2, or refuses
                return
            engine.offload_states()
            with pytest.raises(CheckpointError, match="call reload_states"):
                engine.save_checkpoint(str(place), tag="tag")
            engine.reload_states()
            load_latest(engine, place, "tag")
            assert_same(state_of(engine), state)
            with pytest.raises(ValueError, match="save_dir"):
                engine.save_checkpoint("", tag="tag")


@check
def weights_alone_are_those_of_the_tag(folder: Path) -> None:
    """Under ZeRO-3, whose weights DeepSpeed reads by `latest`, another tag's; and an empty `latest` is told."""
    case = Case(3, offload=paths(folder))
    with training(case) as engine:
        kept = []
        for tag in ("first", "second"):
            train(engine, case, len(kept), 1)
            engine.save_checkpoint(str(folder), tag=tag)
            kept.append({name: weight for name, weight in state_of(engine, ()).items() if name.endswith(" weight")})
        engine.load_checkpoint(str(folder), tag="first", load_optimizer_states=False)
        found = {name: weight for name, weight in state_of(engine, ()).items() if name.endswith(" weight")}
        assert_same(found, kept[0])
        on_first_rank(lambda: (folder / "latest").write_text(""))
        with pytest.raises(CheckpointError, match=r"latest is empty.* whole ones are first, second$"):
            engine.load_checkpoint(str(folder))


class LateWriter(CheckpointEngine):
    """Writes when the engine commits, as DeepSpeed's decoupled writers do at the end of later micro-steps."""

    def __init__(self) -> None:
        self.queue: list[tuple[Any, str]] = []
        self.info: Any = None

    def create(self, info: Any) -> None:
        self.info = info

    def save(self, state_dict: Any, path: str) -> None:
        self.queue.append((state_dict, path))

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        for state_dict, path in self.queue:
            torch.save(state_dict, path)
        self.queue.clear()
        self.info = None
        return True

    def get_commit_info(self) -> Any:
        return self.info

    def is_decoupled(self) -> bool:
        return True

    def cleanup(self) -> None:
        pass


@check
def a_tag_is_whole_when_a_late_writer_has_committed_it(folder: Path) -> None:
    for stage in (2, 3):
        case, place = Case(stage, offload=paths(folder)), folder / f"{stage}"
        with training(case) as engine:
            train(engine, case, 0, 1)
            engine.checkpoint_engine = LateWriter()
            engine.save_checkpoint(str(place), tag="tag")
            assert mark_of(str(place / "tag")) is Mark.BEGUN
            train(engine, case, 1, 1)
            assert mark_of(str(place / "tag")) is Mark.WHOLE
            load_latest(engine, place, "tag")


@check
def an_interrupted_save_leaves_nothing_lent(folder: Path) -> None:
    """DeepSpeed is lent tensors without memory for a save; a Ctrl-C while they are taken back changes nothing."""
    for stage in (1, 3):
        case = Case(stage, offload=paths(folder))
        with training(case) as engine:
            train(engine, case, 0, 1)
            engine.save_checkpoint(str(folder), tag=f"{stage}")
            state = state_of(engine)
            whole = trained(engine, case, 1, 2)
        for trains in (False, True):
            with training(case) as engine:
                train(engine, case, 0, 1)
                cls, lasts = type(engine.optimizer), iter([True, True])

                def interrupted(optimizer: Any, restore: Any = cls.restore_placeholders, lasts: Any = lasts) -> None:
                    if next(lasts, False):
                        raise KeyboardInterrupt
                    restore(optimizer)

                with (
                    unittest.mock.patch.object(cls, "restore_placeholders", interrupted),
                    pytest.raises(KeyboardInterrupt),
                ):
                    engine.save_checkpoint(str(folder), tag="interrupted")
                if trains:
                    assert_same_runs(whole, trained(engine, case, 1, 2))
                engine.load_checkpoint(str(folder), tag=f"{stage}")
                assert_same(state_of(engine), state)
                assert train(engine, case, 1, 2) == whole[0]


def digest(engine: Any) -> dict[str, str]:
    """Return what tells an engine's weights and state from others."""
    return {name: hashlib.sha256(t.float().numpy().tobytes()).hexdigest() for name, t in state_of(engine).items()}


@check
def exports_hold_the_masters(folder: Path) -> None:
    """zero_to_fp32 and save_16bit_model."""
    for stage in (1, 2, 3):
        case = Case(stage, offload=paths(folder), zero=GATHERS if stage == 3 else {})
        with training(case) as engine:
            train(engine, case)
            state = state_of(engine)
            engine.save_checkpoint(str(folder), tag=f"export-{stage}")
            engine.save_16bit_model(str(folder), f"weights-{stage}.bin")
        torch.distributed.barrier()
        exported = get_fp32_state_dict_from_zero_checkpoint(str(folder), f"export-{stage}")
        weights = torch.load(folder / f"weights-{stage}.bin")
        for name in ("embed.weight", "body.0.weight", "body.1.bias"):
            assert torch.equal(exported[name], state[f"{name} master"])
            assert torch.equal(weights[name].cpu(), state[f"{name} weight"])


def wide(numel: int) -> Any:
    """Return a model whose two large matrices have `numel` elements each."""
    torch.manual_seed(0)
    net = Net()
    net.body = torch.nn.ModuleList([torch.nn.Linear(30, numel // 30), torch.nn.Linear(numel // 30, 30)])
    return net


@check
def gradients_set_by_hand_count(folder: Path) -> None:
    """A gradient that safe_set_full_grad changes anywhere is in the norm and in the overflow check."""
    for stage in (1, 2, 3):
        case = Case(stage, "fp16", clip=0.0, offload={**paths(folder), "subgroup_numel": 1 << 18})
        with training(case, model=wide(150_000)) as engine:
            parameters = [p for p in engine.module.parameters() if p.requires_grad]
            matrix = dict(engine.module.named_parameters())["body.0.weight"]
            engine.optimizer.loss_scaler.cur_scale = 256.0
            for step in range(3):
                engine.backward(engine(micro_batch(engine, step, 0)))
                gradient = utils.safe_get_full_grad(matrix)
                gradient.view(-1)[5000:5010] += 1.0 if step < 2 else float("inf")  # a block that was not the largest
                utils.safe_set_full_grad(matrix, gradient)
                squares = sum(utils.safe_get_full_grad(p).double().square().sum() for p in parameters)
                expected = float(squares.sqrt()) / engine.optimizer.loss_scaler.cur_scale
                engine.step()
                assert engine.skipped_steps == (step == 2)
                if step < 2:
                    assert abs(float(engine.get_global_grad_norm()) - expected) < 1e-5 * expected, f"stage {stage}"


@check
def defaults_work_with_all_state_on_disk(folder: Path) -> None:
    """Nothing but a directory is given (stock's default buffers fail an assertion with both pipelines on)."""
    case = Case(3, accumulation=2, zero={"sub_group_size": 10_000}, offload={**paths(folder), "subgroup_numel": None})
    assert_equals_stock(case, model=lambda: wide(60_000))


@check
def two_models_on_one_path(folder: Path) -> None:
    """Two engines in one process, stepped in turns, do not touch each other's state (stock's overwrite it)."""
    for stage in (2, 3):
        cases = Case(stage, "bf16", 1, offload=paths(folder)), Case(stage, "fp32", 2, offload=paths(folder))
        alone = []
        for case in cases:
            with training(case) as engine:
                alone.append(trained(engine, case, 0, 4))
        with training(cases[0]) as one, training(cases[1]) as other:
            together: list[list[Any]] = [[], []]
            for step, number in itertools.product(range(4), range(2)):
                together[number] += train((one, other)[number], cases[number], step, 1)
            torch.distributed.barrier()
            assert len(list(folder.rglob("offload-*/"))) == 2 * torch.distributed.get_world_size()
            for engine, seen, expected in zip((one, other), together, alone, strict=True):
                assert_same_runs(expected, (seen, state_of(engine)))
        torch.distributed.barrier()


@check
def compiled_models_equal_stock(folder: Path) -> None:
    """engine.compile: traced by torch.compile, run without a compiler."""

    def act(engine: Any) -> Any:
        engine.compile(backend="eager")
        assert engine.is_compiled
        return train(engine, case)

    for stage in (2, 3):
        case = Case(stage, steps=3, offload=paths(folder))
        assert_equals_stock(case, act)


@check
def saving_takes_no_memory_for_state(folder: Path) -> None:
    """A checkpoint of state that lies in memory needs a small part of what the state takes."""
    from checkpoint_memory import status_bytes

    numel = 4_000_000
    for stage in (2, 3):
        offload = {"host_memory": "1GiB", "subgroup_numel": 1 << 19}
        case = Case(stage, offload=offload, zero={"sub_group_size": 1e9, "reduce_bucket_size": 1e7})
        with training(case, model=wide(numel)) as engine:
            train(engine, case, 0, 1)
            state_bytes = 2 * numel * 12 / torch.distributed.get_world_size()
            engine.save_checkpoint(str(folder / "first"), tag=f"first-{stage}")  # what is imported, and so on
            before = status_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
            engine.save_checkpoint(str(folder / "second"), tag=f"second-{stage}")
            more = status_bytes("VmHWM") - before
            print(f"saving: stage {stage}: {more} bytes more for {state_bytes:.0f} of state", flush=True)
            # The weights of the module, in 16 bits, are gathered and saved by DeepSpeed.
            assert more < state_bytes / 4, f"stage {stage}: {more} bytes for {state_bytes} of state"
            file = engine._get_zero_ckpt_name(str(folder / "second"), f"second-{stage}")
            assert Path(file).stat().st_size > state_bytes
            assert Path(file).stat().st_blocks * 512 > 0.9 * state_bytes, "there are holes where state should be"


@check
def a_full_disk_costs_the_checkpoint_and_not_the_training(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        places: list[Any] = [None]
        if torch.distributed.get_rank() == 0:
            with contextlib.suppress(OSError):
                places = [stack.enter_context(mounted("tmpfs", folder, "size=2m", lazy=True))]
        torch.distributed.broadcast_object_list(places)
        (place,) = places
        if place is None:
            pytest.skip("only root can mount a small file system")
        is_alone = torch.distributed.get_world_size() == 1
        for stage, waits in ((2, is_alone), (3, not is_alone)):
            settings = {**paths(folder), "subgroup_numel": 1 << 16, "checkpoint": {"wait": waits}}
            case = Case(stage, offload=settings)
            seen = []
            for saves in (False, True):
                with training(case, model=wide(150_000)) as engine:
                    losses = train(engine, case, 0, 2)
                    if saves:
                        if not waits:
                            engine.save_checkpoint(str(place / str(stage)))
                            losses += train(engine, case, 2, 1)
                        # torch.save knows only RuntimeError for it; another rank's is SessionBrokenError.
                        with pytest.raises((OSError, RuntimeError, offload.OffloadError)):
                            engine.save_checkpoint(str(place / str(stage)))
                        torch.distributed.barrier()
                        assert not list(place.rglob("latest"))
                        torch.distributed.barrier()  # else another rank looks into folders that go
                        shutil.rmtree(place / str(stage), ignore_errors=True)
                    losses += train(engine, case, len(losses), 4 - len(losses))
                    seen.append((losses, state_of(engine)))
                    if saves:
                        engine.save_checkpoint(str(folder / "room"), tag=f"{stage}")
            assert_same_runs(*seen)


@check
def alone_with_little_locked_memory(folder: Path) -> None:
    """Stock's NVMe offload aborts the process here, without an exception."""
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == 64 << 10
    effective = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
    assert not int(effective, 16) >> 14 & 1, "the limit does not count for this process"
    for stage in (2, 3):
        assert_equals_stock(Case(stage, offload=paths(folder)))


@check
def a_failed_step_fails_on_every_rank(folder: Path) -> None:
    case = Case(3, offload=paths(folder))
    with training(case) as engine:
        train(engine, case, 0, 1)
        engine.backward(engine(micro_batch(engine, 1, 0)))
        if torch.distributed.get_rank() == 0:
            engine.optimizer.offload.close()
        with pytest.raises(offload.SessionBrokenError):
            engine.step()


@check
def what_one_rank_alone_cannot_write_of_a_tag_is_told_on_every_rank(folder: Path) -> None:
    """Within seconds, whether that is its model, its manifest, the commit or `latest`; the next save is whole."""

    def fails(*given: Any) -> None:
        time.sleep(0.2)  # others wait by then
        raise CheckpointError("no room")

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ways = (
        (2, "stock", True, "model", 0),
        (3, "stock", True, "model", 0),
        (2, "stock", True, "latest", 0),
        (3, "stock", True, "latest", 0),
        (3, "in_place", True, "pin", world - 1),
        (3, "in_place", False, "seal_commit", 0),
        (3, "in_place", False, "latest", 0),
        (2, "in_place", False, "write_state", world - 1),
        (2, "in_place", False, "write_state", 0),
        (1, "stock", False, "write_state", world - 1),
        (3, "stock", False, "latest", 0),
    )
    for stage, layout, wait, name, failing in dict.fromkeys(ways):  # one rank alone is both the first and the last
        case = Case(stage, offload={**paths(folder), "checkpoint": {"layout": layout, "wait": wait}})
        latest = folder / f"{stage}-{layout}-{wait}-{name}-{failing}" / "latest"
        with training(case) as engine, pytest.MonkeyPatch.context() as patch:
            train(engine, case, 0, 1)
            files = {"latest": latest, "model": model_file(engine, latest.parent, "fails")}
            if name in files:  # a folder is where the file should be
                on_first_rank(functools.partial(files[name].mkdir, parents=True))
            elif rank == failing:
                patch.setattr(stream if name == "write_state" else commit, name, fails)
            torch.distributed.barrier()
            started_s = time.monotonic()
            # Of the model's file DeepSpeed's own error is raised on that rank.
            with pytest.raises((OSError, RuntimeError) if name == "model" and rank == 0 else offload.OffloadError):
                save_and_wait(engine, latest.parent, "fails")
            assert time.monotonic() - started_s < commit.RANKS_TIMEOUT_S / 10
            patch.undo()
            if name in files:
                on_first_rank(files[name].rmdir)
            torch.distributed.barrier()
            assert not latest.exists()
            train(engine, case, 1, 1)
            state = state_of(engine)
            engine.save_checkpoint(str(latest.parent), tag="whole")
            load_latest(engine, latest.parent, "whole")
            assert_same(state_of(engine), state)


@check
def what_a_tag_lacks_is_said_before_anything_is_loaded(folder: Path) -> None:
    """On every rank, in the place of assertions and of errors that come when the model has been loaded."""
    for stage, layout in itertools.product((2, 3), ("stock", "in_place")):
        place = below(folder, stage, layout)
        case = Case(stage, offload={**paths(folder), "checkpoint": {"layout": layout}, "checkpoints_kept": 2})
        with training(case) as engine:
            for tag in ("first", "second"):
                train(engine, case, 0, 1)
                engine.save_checkpoint(str(place), tag=tag)
            state = state_of(engine)

            file, elsewhere = Path(engine._get_zero_ckpt_name(str(place), "second")), place / "elsewhere"
            on_first_rank(file.with_name(file.name.replace("rank_0", "rank_7")).touch)  # of more ranks before
            for moved, words in (
                (file, f"{file.name} is not there; nothing was loaded.* beside it: first$"),
                (place / "second", r"second is not there; nothing was loaded.* beside it: elsewhere, first$"),
            ):
                on_first_rank(functools.partial(moved.rename, elsewhere))
                is_told = engine.global_rank == 0 or moved.name == "second"
                with pytest.raises(offload.OffloadError, match=words if is_told else "another rank"):
                    engine.load_checkpoint(str(place))  # what `latest` names
                on_first_rank(functools.partial(elsewhere.rename, moved))
                assert_same(state_of(engine), state)
            train(engine, case, 1, 1)
            load_latest(engine, place, "second")
            assert_same(state_of(engine), state)
        other = dataclasses.replace(case, stage=5 - stage)
        with training(other) as engine:
            saved, own = ("3", "2") if stage == 3 else ("1 or 2", "3")
            with pytest.raises(CheckpointError, match=f"saved by ZeRO-{saved}, .* cannot load it into ZeRO-{own}"):
                engine.load_checkpoint(str(place), tag="first")


UNTESTED = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "OffloadedStage3"


def made(case: Case, more: dict[str, Any], module: Any = deepspeed) -> str:
    """Return which optimizer an engine gets, from `initialize` of DeepSpeed or of ours."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = module.initialize(model=model, optimizer=optimizer, config={**case.ds_config(), **more})
    engine.destroy()
    return type(engine.optimizer).__name__


@check
def what_excludes_each_other_is_refused(folder: Path) -> None:
    from test_combinations import WITH_DEEPSPEED, ask_all

    with backend_on():
        ask_all(folder, WITH_DEEPSPEED)


@check
def an_object_that_is_ignored_is_said_once(folder: Path) -> None:
    """And without an object nothing changes, whether the backend is on or not."""
    original = inspect.unwrap(DeepSpeedEngine._configure_optimizer)  # the import watches
    offload_deepspeed.disable()
    assert DeepSpeedEngine._configure_optimizer is original
    offload_deepspeed.watch()
    offload_deepspeed.watch()
    case, ours = Case(3, config=UNTESTED), {"multi_tier_offload": paths(folder)}

    def said(**ours: Any) -> tuple[str, int]:
        with unittest.mock.patch.object(logging.getLogger("offload"), "warning") as warning:
            name = made(case, ours)
        return name, sum("ignores" in call.args[0] for call in warning.call_args_list)

    speaks = torch.distributed.get_rank() == 0
    assert said() == (STOCK, 0)  # a config without the object is none of our business
    assert said(**ours) == (STOCK, speaks)
    assert said(**ours) == (STOCK, 0)
    offload_deepspeed.enable()
    offload_deepspeed.enable()
    assert said() == (STOCK, 0)
    assert said(**ours) == (OURS, 0)
    offload_deepspeed.disable()
    offload_deepspeed.disable()
    assert DeepSpeedEngine._configure_optimizer is original
    assert said(**ours) == (STOCK, 0)  # somebody has said that he does not want it
    offload_deepspeed.watch()
    assert made(case, ours, offload_deepspeed) == OURS
    assert said(**ours) == (STOCK, speaks)  # the call was for that engine alone
    offload_deepspeed.disable()
    assert DeepSpeedEngine._configure_optimizer is original


def trainer(folder: Path, ours: dict[str, Any], callback: Any, **arguments: Any) -> Any:
    """Return transformers' Trainer of a small Llama with our object, and a DeepSpeed config full of "auto"."""
    from trainer_runs import Tokens, model
    from transformers import Trainer, TrainingArguments

    offload_deepspeed.enable()
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    schedule = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "multi_tier_offload": {**paths(folder), **ours},
    }
    chosen = TrainingArguments(
        output_dir=str(folder / "out"),
        deepspeed=config,
        logging_steps=1,
        warmup_steps=2,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    return Trainer(model=model(), args=chosen, train_dataset=Tokens(), callbacks=[callback])


@check
def alone_trainer(folder: Path) -> None:
    """Under the Trainer with `save_total_limit=1`: go on from a whole checkpoint until somebody kills this."""
    from transformers import TrainerCallback

    def begin(*_: Any) -> None:
        raise AssertionError("the Trainer deletes older checkpoints when a save returns: it waits all the same")

    class Kill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == first + 1 and "KILL_AFTER_S" in os.environ:
                threading.Timer(float(os.environ["KILL_AFTER_S"]), os.kill, (os.getpid(), signal.SIGKILL)).start()

    if os.environ["LAYOUT"] == "stock":  # in place it begins, and is waited for
        SavesBehind.begin = begin  # type: ignore[method-assign]
    out, steps = folder / "out", 8
    # One that a kill has cut short has no `latest` of DeepSpeed's, or lacks what the Trainer writes last.
    whole = [f for f in out.glob("checkpoint-*") if (f / "latest").exists() and (f / "trainer_state.json").exists()]
    newest = max(whole, key=lambda place: int(place.name.partition("-")[2]), default=None)
    first = int(newest.name.partition("-")[2]) if newest is not None else 0
    for other in out.glob("checkpoint-*"):
        if other != newest:
            shutil.rmtree(other)
    if (out / "went").exists():
        assert newest is not None, sorted(map(str, out.rglob("*")))
    # The Trainer's own files come after the state: until then the checkpoint before has to have its state.
    ours = {"checkpoint": {"wait": False, "layout": os.environ["LAYOUT"]}, "checkpoints_kept": 2}
    saving = {"save_steps": 1, "save_total_limit": 1}
    made = trainer(folder, ours, Kill(), max_steps=steps, gradient_accumulation_steps=2, **saving)
    if first:
        print(f"goes on from {first}", flush=True)
        (out / "went").touch()
    if first < steps:
        made.train(resume_from_checkpoint=str(newest) if newest is not None else None)
        assert type(made.deepspeed.optimizer).__name__ == OURS
    said = json.loads((out / f"checkpoint-{steps}" / "trainer_state.json").read_text())["log_history"]
    history = {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in said if "loss" in entry}
    (folder / "history.json").write_text(json.dumps(history))


def universal(folder: Path, **config: Any) -> Iterator[tuple[Any, Case, Path, Path]]:
    """Yield an engine of each of two stages, its case, the folder of its tags, and a file of what this rank knows."""
    rank = torch.distributed.get_rank()
    for stage in (2, 3):
        case = Case(stage, groups=two_groups, offload=paths(folder), config=config)
        with training(case) as engine:
            yield engine, case, folder.parent / f"stage-{stage}", folder.parent / f"state-{stage}-{rank}.pt"


@check
def alone_universal_save(folder: Path) -> None:
    """Leave checkpoints, and what they hold, for `alone_universal_load` at another world size."""
    for engine, case, saved, known in universal(folder):
        train(engine, case)
        engine.save_checkpoint(str(saved), tag="native")
        torch.save((state_of(engine), trained(engine, case, case.steps, 3)), known)


@check
def alone_resume(folder: Path) -> None:
    """Go on from the checkpoint in a fresh process of the same world: exact."""
    for engine, case, saved, known in universal(folder):
        losses, state = torch.load(known)[1]
        engine.load_checkpoint(str(saved), tag="native")
        found = train(engine, case, case.steps, 3)
        assert [step[:4] for step in found] == [step[:4] for step in losses]
        assert_same(state_of(engine), state)


@check
def alone_refused(folder: Path) -> None:
    """Of another number of ranks: the error says what to do, and training goes on."""
    for engine, case, saved, _ in universal(folder):
        before = state_of(engine)
        with pytest.raises(CheckpointError, match="universal") as refused:
            engine.load_checkpoint(str(saved), tag="native")
        assert_same(state_of(engine), before)
        if torch.distributed.get_rank() == 0:
            (saved / "refused").write_text(str(refused.value))
        train(engine, case, 0, 1)


@check
def alone_universal_load(folder: Path) -> None:
    for engine, case, saved, known in universal(folder, checkpoint={"load_universal": True}):
        engine.load_checkpoint(str(saved), tag="native_universal")
        assert_same(state_of(engine), torch.load(known.with_name(f"state-{case.stage}-0.pt"))[0])
        groups = engine.optimizer.param_groups
        assert [group["betas"] for group in groups] == [(0.9, 0.999), (0.8, 0.99)], f"{groups}"
        assert [group["lr"] for group in groups] == [3e-3, 1e-2]
        assert set(engine.optimizer.shard.steps().values()) <= {case.steps, 0}
        assert case.steps in engine.optimizer.shard.steps().values()
        train(engine, case, case.steps, 1)


@check
def state_of_another_format_makes_the_same_weights(folder: Path) -> None:
    """And a step at rate 0 leaves them as they are."""
    for stage, dtype in ((1, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp16")):
        tag = f"{stage}-{dtype}"
        case = Case(stage, dtype, offload=paths(folder))
        with training(case) as engine:
            train(engine, case, 0, 4)
            engine.save_checkpoint(str(folder), tag=tag)
            expected = state_of(engine)
        compact = {**paths(folder), "state_format": "compact8", "exact_names": [], "subgroup_numel": 4096}
        with training(dataclasses.replace(case, offload=compact)) as engine:
            engine.load_checkpoint(str(folder), tag=tag)
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.0
            before = state_of(engine)
            train(engine, case, 4, 1)
            after = state_of(engine)
        weights = [name for name in expected if name.endswith(" weight")]
        assert not [name for name in weights if not torch.equal(before[name], expected[name])], tag
        kept = [name for name in before if name.endswith((" weight", " master"))]
        assert not [name for name in kept if not torch.equal(after[name], before[name])], tag


@check
def a_device_of_none_counts_as_the_cpu(folder: Path) -> None:
    """And is said once; the bits are those of "cpu", which are stock's."""
    logger = logging.getLogger("offload")
    for stage, none in ((1, {"device": "none"}), (2, {}), (3, None)):
        seen = []
        for given in ({"device": "cpu"}, none):
            case = Case(stage, steps=2, offload=paths(folder), zero={"offload_optimizer": given})
            with unittest.mock.patch.object(logger, "warning") as warning, training(case) as engine:
                seen.append(trained(engine, case))
                rank = engine.global_rank
            lines = [call.args[0] for call in warning.call_args_list if "counts as" in call.args[0]]
            assert len(lines) == (rank == 0 and given != {"device": "cpu"}), lines
        assert_same_runs(*seen)


AHEAD = "plain plain plain plain clipped plain plain plain nan plain plain written plain plain rate plain plain"
"""What happens in each step; after all but plain ones some steps may have nothing ahead."""


def is_older() -> bool:
    """Whether this is a DeepSpeed before 0.19."""
    return tuple(int(part) for part in deepspeed.__version__.split(".")[:2]) < (0, 19)


def skips_nan(stage: int, dtype: str) -> bool:
    """Whether a step that finds NaN is skipped; else all weights are NaN from then on, and equal to nothing."""
    return dtype == "fp16" or (not is_older() and (stage == 3 or dtype == "bf16"))


def train_as_ahead_says(case: Any, kinds: str = AHEAD) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Train as `kinds` says.

    Returns:
        What can be seen of each step, the share of streamed state that it confirmed and revoked, and the last state.
    """
    from settling import settle

    seen, shares = [], []
    factors = {"clipped": 1e3, "nan": float("nan") if skips_nan(case.stage, case.dtype) else 1.0}
    with training(case, model=Deep()) as engine:
        group = engine.optimizer.param_groups[0]
        for step, kind in enumerate(kinds.split()):
            factor = factors.get(kind, 1.0)
            for micro in range(case.accumulation):
                engine.backward(engine(micro_batch(engine, step, micro)) * factor)
                if micro == case.accumulation - 1:
                    settle(engine.optimizer.offload)
                    if kind == "written":
                        weight = engine.module.layers[2].weight
                        safe_set_full_grad(weight, safe_get_full_grad(weight) * 0.5)
                    group["lr"] = 2e-3 if kind == "rate" else 3e-3
                engine.step()
            norm, scale = float(engine.get_global_grad_norm()), float(getattr(engine.optimizer, "loss_scale", 1.0))
            seen.append((kind, norm, scale, engine.skipped_steps))
            metrics = engine.optimizer.metrics()
            ahead = [metrics.get(f"speculation/{what}_bytes", 0) for what in ("confirmed", "revoked")]
            shares.append([number / metrics["streamed_bytes"] for number in ahead])
        return seen, shares, state_of(engine)


def hidden(
    folder: Path, overlap: str, stage: int, dtype: str, accumulation: int, format: str, zero: dict[str, Any]
) -> Case:
    """Return a training with many small pieces.

    Below ZeRO-3 the loss scale of fp16 grows before the NaN comes, and nothing has been made ahead of that step.
    """
    offload = {**paths(folder), "subgroup_numel": 4096, "state_format": format, "overlap": overlap}
    small = {"sub_group_size": 20_000, "reduce_bucket_size": 10_000, **zero}
    scaling = {
        "enabled": True,
        "initial_scale_power": 8,
        "loss_scale_window": 8 if stage == 3 else 6,
        "hysteresis": 1,
    }
    config = {"fp16": scaling} if dtype == "fp16" else {}
    return Case(stage, dtype, accumulation, clip=1.0, zero=small, offload=offload, config=config)


@check
def updates_during_backward_change_nothing(folder: Path) -> None:
    """All bits are those of `overlap="off"`; what is made ahead is confirmed unless something has come between."""
    cases = [
        (3, "bf16", 1, "exact", {}),
        (3, "fp16", 2, "compact16", {}),
        (3, "fp32", 1, "compact8", {}),
        (2, "bf16", 2, "compact8", {}),
        (2, "fp32", 1, "exact", {}),
        (1, "fp16", 2, "exact", {"overlap_comm": True}),
    ]
    for stage, dtype, *others in cases:
        case = stage, dtype, *others
        found = {each: train_as_ahead_says(hidden(folder, each, *case)) for each in ("off", "backward")}
        seen, shares, state = found["backward"]
        label = f"{case}: {[*zip(seen, shares, strict=True)]}"
        assert seen == found["off"][0], f"{label}, not {found['off'][0]}"
        assert_same(state, found["off"][2])
        assert seen[-1][3] == skips_nan(stage, dtype), label
        assert all((norm > 1) == (kind == "clipped") for kind, norm, _, _ in seen if kind != "nan"), label
        confirmed_often, last_scale = 0, seen[0][2]
        for number, ((kind, _, scale, _), (confirmed, revoked)) in enumerate(zip(seen, shares, strict=True)):
            same_scale, last_scale = scale == last_scale, last_scale if kind == "nan" else scale
            if kind == "plain" and same_scale and (confirmed + revoked or number in (2, 3)):
                assert confirmed >= 0.9, f"step {number} of {label}"
                confirmed_often += 1
            assert kind not in ("clipped", "rate") or not confirmed, f"step {number} of {label}"
        assert confirmed_often >= 6, label
        assert shares[AHEAD.split().index("clipped")][1] >= 0.9, label
        if stage == 3:  # what was made ahead of a step that was skipped
            assert shares[AHEAD.split().index("nan") + 1][1] >= 0.9 * skips_nan(stage, dtype), label
        assert sum(revoked for _, revoked in shares) >= 2, label


@check
def auto_does_what_the_first_rank_has_measured(folder: Path) -> None:
    """All bits are those of `overlap="off"`, whatever it tries: below ZeRO-3 that is not forward."""
    if os.environ.get("PLACEMENT", "cpu") != "cpu":
        pytest.skip("what an accelerator updates is updated in the step")
    is_first = torch.distributed.get_rank() == 0
    seen_s: list[float] = []

    def iteration_s(pace: Pace) -> float:
        """Say that steps 9 to 12 take a tenth of the others; rank 1 says the contrary."""
        seen_s.append(1.0 if (8 <= len(seen_s) < 12) == is_first else 10.0)
        return seen_s[-1]

    measured = property(iteration_s, lambda *_: None)
    with unittest.mock.patch.object(Pace, "iteration_s", measured, create=True):
        for stage, more in ((3, {}), (2, {}), (1, {"overlap_comm": True}), (1, {})):
            found = {}
            for overlap in ("off", "auto"):
                seen_s.clear()
                case = hidden(folder, overlap, stage, "bf16", 1, "exact", more)
                found[overlap] = train_as_ahead_says(case, AHEAD + 7 * " plain")
            seen, shares, state = found["auto"]
            assert seen == found["off"][0], seen
            assert_same(state, found["off"][2])
            made = [number for number, share in enumerate(shares) if any(share)]
            assert bool(made) == (stage > 1 or bool(more)), shares
            left = range(12, 16) if stage == 3 else ()  # as "off" is tried then
            assert all(number >= 8 and number not in left for number in made), shares


@check
def steps_that_go_on_into_forward_change_nothing(folder: Path) -> None:
    """All bits are those of `overlap="off"`, and steps do go on when they return."""
    cases: list[tuple[int, str, int, str, dict[str, Any]]] = [
        (3, "bf16", 1, "exact", {"stage3_param_persistence_threshold": 0}),
        (3, "bf16", 2, "compact16", {}),  # all parameters are persistent
        (3, "fp16", 1, "compact8", {"stage3_param_persistence_threshold": 0, "overlap_comm": True}),
        (3, "fp32", 1, "exact", {"stage3_max_live_parameters": 10_000, "stage3_prefetch_bucket_size": 10_000}),
        (2, "fp16", 2, "compact8", {}),
        (1, "bf16", 1, "exact", {"overlap_comm": True}),
    ]
    with noting_pending_steps() as pending, unittest.mock.patch.object(gathers, "BUCKET_BYTES", 20_000):
        for number, (stage, dtype, accumulation, state_format, zero) in enumerate(cases):
            overlaps = ("off", "forward") if number % 2 and "DELAYS" not in os.environ else ("off", "both")
            if "DELAYS" in os.environ and (stage, state_format) in ((3, "compact16"), (3, "compact8")):
                continue  # a device that dawdles takes minutes
            if str(stage) not in os.environ.get("STAGES", "123"):
                continue
            found = {}
            for overlap in overlaps:
                pending.clear()
                case = hidden(folder, overlap, stage, dtype, accumulation, state_format, zero)
                found[overlap] = train_as_ahead_says(case)
                assert any(pending) == (overlap != "off"), (overlap, pending)
            label = f"{stage, dtype, accumulation, state_format, overlap}"
            assert found[overlap][0] == found["off"][0], f"{label}: {found[overlap][0]}, not {found['off'][0]}"
            assert_same(found[overlap][2], found["off"][2])
            assert (sum(confirmed for confirmed, _ in found[overlap][1]) > 1) == (overlap == "both"), label


@check
def alone_given_gradients(folder: Path) -> None:
    """Train a model whose gradients are given, ours or stock by GIVEN; leave weights and state beside the folder."""
    ours = os.environ["GIVEN"] == "ours"
    wide = {"data_types": {"grad_accum_dtype": "fp32"}}
    found = {}
    for stage, accumulation, config in itertools.product((1, 2, 3), (1, 2), ({}, wide)):
        zero = {"sub_group_size": 200_000, "reduce_bucket_size": 400_000}
        tiers = {**paths(folder), "host_memory": "4MiB", "subgroup_numel": 1 << 16}
        case = Case(stage, "bf16", accumulation, clip=0.0, config=dict(config), zero=zero, offload=tiers)
        with training(case, ours=ours, model=Given()) as engine:
            for step in range(3 * accumulation):
                engine.backward(engine(step))
                engine.step()
            label = f"stage {stage}, {accumulation} micro-steps, {'fp32' if config else 'bf16'} sums"
            found[label] = state_of(engine)
    torch.save(found, folder.parent / "given.pt")


ON_LATE = (
    # stage, dtype, micro-steps, clipping, placement, more of `zero_optimization`
    (1, "bf16", 2, 0.3, "0.5", {}),
    (2, "fp16", 1, 0.3, "cpu", {"overlap_comm": True}),
    (2, "bf16", 3, 0.0, "gpu", {}),
    # Weights are gathered on a stream that waits for no other; those that are whole on all ranks would have it wait.
    (3, "bf16", 2, 0.3, "0.5", {"overlap_comm": True, "stage3_param_persistence_threshold": 0}),
    (3, "fp16", 3, 0.3, "cpu", {"overlap_comm": False}),
    (3, "fp32", 1, 0.0, "gpu", {}),
    (3, "bf16", 2, 0.3, "auto", {"offload_param": {"device": "cpu"}}),  # gradients leave for weights in host memory
    (3, "bf16", 2, 0.3, "auto", {"offload_param": {"device": "nvme"}}),  # in a file; gradients leave for the paths
)


@check
def alone_on_an_accelerator(folder: Path) -> None:
    """Train on what is there; leave all that can be seen, which is the same on each kind of device."""
    found, is_late = [], "DELAYS" in os.environ
    for number, (stage, dtype, accumulation, clip, placement, zero) in enumerate(ON_LATE):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        os.environ["PLACEMENT"] = placement if is_late else "auto"
        case = Case(stage, dtype, accumulation, clip, steps=3, zero=zero, offload=paths(own))
        if zero.get("offload_param") == {"device": "nvme"}:
            case.zero, case.offload["gradient_memory"] = in_file(own), 0
        with training(case) as engine, contextlib.ExitStack() as stack:
            assert engine.optimizer.offload.plan.weights_on_gpu == (is_late and "offload_param" not in zero)
            if engine.optimizer.offload.plan.weights_on_gpu and number % 2:
                # Lanes of ours run only while the accelerator has nothing else to do, or somebody waits for them.
                from accelerator import late

                device = engine.optimizer.offload._parts.lanes.device
                for stream in map(device.stream, LANES):
                    late.last(stream)
                    stack.callback(late.last, stream, False)  # torch gives them to others
            seen = train(engine, case)
            engine.save_checkpoint(str(own), tag="saved")
            seen += train(engine, case, 3, 2)
            state = state_of(engine)
        with training(case) as engine:
            engine.load_checkpoint(str(own), tag="saved")
            assert [each[:4] for each in train(engine, case, 3, 2)] == [each[:4] for each in seen[3:]]
            again = state_of(engine)
        assert not [name for name, tensor in state.items() if not torch.equal(again[name], tensor)]
        found.append((seen, state))
    torch.save(found, folder.parent / f"trained-{torch.distributed.get_rank()}.pt")


def run(folder: Path, names: list[str]) -> None:
    """Run checks in order; what hangs ends by the collectives' timeout."""
    utils.numa.get_numa_cores = functools.cache(utils.numa.get_numa_cores)  # every engine starts a program that tells
    with contextlib.suppress(ImportError):  # every engine imports it, and torch's compiler with it
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    gc.collect()
    gc.freeze()  # every engine of ZeRO-3 collects twice, a third of a second each with all that is imported
    if "DELAYS" in os.environ:
        from accelerator import zero

        zero.use(int(os.environ["DELAYS"]))
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    backend = "gloo" if get_accelerator().device_name() == "cpu" else get_accelerator().communication_backend_name()
    if int(os.environ.get("DELAYS", "1")) % 2 == 0:  # then ranks agree on the CPU, and no stream is waited for
        backend = f"cpu:gloo,late:{backend}"
    deepspeed.init_distributed(
        backend,
        timeout=timedelta(seconds=240),
        init_method=f"file://{os.environ['RENDEZVOUS']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        verbose=False,
    )
    results: dict[str, str] = {}
    failed = False
    for name in names:
        own = folder / name
        own.mkdir(exist_ok=True)
        started_s = time.monotonic()
        try:
            CHECKS[name](own)
            results[name] = "ok"
            print(f"{name}: {time.monotonic() - started_s:.1f} s", flush=True)
        except pytest.skip.Exception as reason:
            results[name] = f"{SKIPPED}{reason}"
        except Exception:
            results[name] = traceback.format_exc()
            failed = True
        (folder / f"results-{rank}.json").write_text(json.dumps(results))
        gc.collect()
        gc.freeze()  # what it has imported
        if failed and torch.distributed.get_world_size() > 1:
            break  # ranks may be out of step
    if "DELAYS" in os.environ and not failed:
        from accelerator import one_order

        one_order.check()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    faulthandler.enable()  # a crash says where
    run(Path(sys.argv[1]), sys.argv[2:])
