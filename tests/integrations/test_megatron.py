"""Megatron-Core's distributed optimizer with ours below it: the bits of stock Megatron with our rule in memory.

Megatron runs on the CPU, in ranks of gloo, which `megatron_runs.py` makes it believe to be CUDA. Each number of ranks
is one start of that program for all of its cases. What refuses needs no Megatron.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from accelerator.processes import needed
from started import end, start

from offload import CheckpointError, ConfigError, DtypeCode, OffloadConfig, Parameter
from offload.checkpoint.marker import WHOLE
from offload.combinations import (
    MEGATRON_BUFFER,
    MEGATRON_CHANGES,
    MEGATRON_FSDP,
    MEGATRON_GATHERS,
    MEGATRON_GRAPHS,
    MEGATRON_LOCAL,
    MEGATRON_MIRRORS,
    MEGATRON_REDUCES,
    MEGATRON_ROUNDED,
    MEGATRON_WEIGHTS,
    MEGATRON_WHOLE,
    Row,
)
from offload.integrations import megatron as integration
from offload.integrations.megatron import in_place, switch
from offload.integrations.shared import POINTER, WatchedFolder

PROGRAM = Path(__file__).with_name("megatron_runs.py")
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install --no-deps megatron-core"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's, of what is not installed


def run(folder: Path, ranks: int, cases: list[dict[str, Any]], *device: str) -> dict[str, list[dict[str, Any]]]:
    """Return what ranks say of each case, by its name; on the CPU, or on another device."""
    lines, _ = end(start(PROGRAM, folder, json.dumps(cases), *device, ranks=ranks))
    found: dict[str, list[dict[str, Any]]] = {case["name"]: [] for case in cases}
    for line in lines:
        found[line["name"]].append(line)
    assert all(len(said) == ranks for said in found.values())
    return found


def check(found: dict[str, list[dict[str, Any]]], *, resident: bool = False, **skipped: int) -> None:
    """Check that ours is Megatron with our rule in memory, bit for bit: what it says, weights and state."""
    for name, ranks in found.items():
        for said in ranks:
            assert said["offload"] == said["memory"], name
            assert said["differing"] == [], name
            assert said["state"] > 0, name
            assert resident or said["resident"] == 0, name
            assert sum(not took for *_, took, _, _ in said["offload"]) == skipped.get(name, 0), name


@pytest.mark.slow
@needs_megatron
def test_training_is_that_of_megatron_with_our_rule(tmp_path: Path) -> None:
    """Two groups, one without decay, warmup and cosine, norms and zeros counted, in all of these."""
    cases = [
        {"name": "bf16"},
        {"name": "fp16", "fp16": True},
        {"name": "passes", "passes": 2, "steps": 5},
        {"name": "frozen", "frozen": True, "steps": 5},
        {"name": "no clipping", "clip": 0, "steps": 5},
        {"name": "loss scale", "scale": 1024, "steps": 5},
    ]
    found = run(tmp_path / "paths", 1, cases)
    check(found, fp16=2)
    names = found["bf16"][0]["names"]
    assert {"embedding.word_embeddings.weight", "decoder.layers.1.mlp.linear_fc1.bias"} <= {*names}
    assert not any(name.startswith("decoder.layers.0") for name in found["frozen"][0]["names"])


@pytest.mark.slow
@needs_megatron
def test_ranks_train_as_megatrons_with_our_rule(tmp_path: Path) -> None:
    cases = [
        {"name": "bf16"},
        {"name": "overlap", "overlap": True, "steps": 5},
        {"name": "tensor parallel", "tp": 2, "steps": 5},
        {"name": "fp16", "fp16": True, "passes": 2, "steps": 8},
    ]
    found = run(tmp_path / "paths", 2, cases)
    check(found, fp16=1)
    assert found["bf16"][0]["offload"] != found["bf16"][1]["offload"]  # each has losses of its own
    assert found["bf16"][0]["offload"][0][1:] == found["bf16"][1]["offload"][0][1:]


HIDES = {"overlap": True, "hides": True, "steps": 6}


@pytest.mark.slow
@needs_megatron
@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_in_backward_change_nothing(tmp_path: Path, ranks: int) -> None:
    """They are made there where reductions end in time, and revoked where Megatron clips."""
    cases = [
        {"name": "unclipped", "ends": True, "clip": 0},
        {"name": "below the norm", "ends": True, "clip": 100},
        {"name": "passes", "ends": True, "clip": 0, "passes": 2},
        {"name": "clipped", "ends": True, "clip": 0.1},
        {"name": "skipped", "ends": True, "clip": 0, "skipped": 4},
        {"name": "awaited", "clip": 0},
    ]
    if ranks == 1:  # what is added up, left out or too small is said by two
        cases = [case for case in cases if case["name"] in ("unclipped", "clipped")]
    found = run(tmp_path / "paths", ranks, [{**HIDES, **case} for case in cases])
    check(found)
    for name, said in found.items():
        for figures in (each["figures"] for each in said):
            assert (figures["made in backward"] > 0) == (name != "awaited"), name
            if name != "clipped":  # which leaves gradients that are 0
                assert figures["confirmed_bytes"] > 0 or name == "awaited", name
            assert (figures["revoked_bytes"] > 0) == (name in ("clipped", "skipped")), name


@pytest.mark.slow
@needs_megatron
def test_state_is_updated_where_it_lies_on_an_accelerator(tmp_path: Path) -> None:
    """With weights and Megatron's buffers there: from none of it to all, and in checkpoints of both layouts."""
    needed()
    part = {"gpu": 300_000}
    cases = [
        {"name": "none", "steps": 3},
        {"name": "part", "steps": 6, **part},
        {"name": "all", "steps": 2, "gpu": 4_000_000},
        {"name": "fp16", "fp16": True, "steps": 4, **part},
        {"name": "passes", "tp": 2, "passes": 2, "steps": 2, **part},
        {"name": "frozen", "frozen": True, "overlap": True, "steps": 2, **part},
        {"name": "hidden", **HIDES, "ends": True, "clip": 0, "steps": 3, **part},
    ]
    layouts = {"stock": {}, "place": {"layout": "in_place"}}
    for name, layout in layouts.items():
        of_it = {**part, **layout, "steps": 3, "kinds": ["offload"]}
        cases += [{"name": name, "save": str(tmp_path / name), **of_it}]
        cases += [{"name": f"resumed {name}", "load": str(tmp_path / name), "at": 3, **of_it}]
    found = run(tmp_path / "paths", 2, cases, "late")
    check({name: found[name] for name in found if "memory" in found[name][0]}, resident=True, fp16=2)
    shares = {name: found[name][0]["resident"] for name in ("none", "part", "all")}
    assert shares["none"] == 0 < shares["part"] < 1 == shares["all"]
    assert all(said["figures"]["made in backward"] > 0 for said in found["hidden"])
    for name in layouts:
        for whole, said in zip(found["part"], found[f"resumed {name}"], strict=True):
            assert (said["offload"], said["digest"]) == (whole["offload"][3:], whole["digest"]), name


@pytest.mark.slow
@needs_megatron
def test_experts_have_engines_of_their_own(tmp_path: Path) -> None:
    """In training, with updates in backward, and in checkpoints of either layout, each with a folder."""
    experts = {"experts": 2, "steps": 6}
    cases = [{"name": "plain", **experts}, {"name": "hidden", **HIDES, **experts, "ends": True, "clip": 0}]
    layouts = {
        "dp": {"sharding": "dp_reshardable"},
        "full": {"sharding": "fully_reshardable"},
        "behind": {"layout": "in_place", "behind": True},
    }
    for name, layout in layouts.items():
        of_it = {**experts, **layout, "steps": 3, "kinds": ["offload"]}
        folder = str(tmp_path / name)
        cases += [{"name": name, "save": folder, **of_it}]
        cases += [{"name": f"resumed {name}", "load": folder, "at": 3, **of_it, "behind": False}]
    found = run(tmp_path / "paths", 2, cases)
    check({name: found[name] for name in ("plain", "hidden")})
    assert all(said["figures"]["made in backward"] > 0 for said in found["hidden"])
    for name in layouts:
        for whole, saved, said in zip(found["plain"], found[name], found[f"resumed {name}"], strict=True):
            assert saved["offload"][:3] == whole["offload"][:3], name
            assert (said["offload"], said["digest"]) == (whole["offload"][3:], whole["digest"]), name
            assert saved["reads"] == (0 if layouts[name].get("layout") else 2), name
    for file in ("offload/COMMIT", "offload-1/COMMIT", WHOLE):
        assert (tmp_path / "behind" / file).is_file()


@pytest.mark.slow
@needs_megatron
def test_a_folder_in_place_is_mirrored_whole(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    case = {"name": "saved", "kinds": ["offload"], "steps": 2, "layout": "in_place", "mirror": str(mirror)}
    run(tmp_path / "paths", 2, [{**case, "save": str(tmp_path / "run" / "iter_2")}])
    (marker,) = mirror.rglob(WHOLE)
    saved = {str(file.relative_to(tmp_path / "run" / "iter_2")) for file in (tmp_path / "run").rglob("*.*")}
    assert marker.parent.name == "iter_2"
    assert {"metadata.json", "common.pt", WHOLE} <= saved
    assert {name for name in saved if not name.startswith("offload/")} <= {
        str(file.relative_to(marker.parent)) for file in marker.parent.rglob("*.*")
    }


FORMATS = {"dp": "dp_reshardable", "full": "fully_reshardable"}


@pytest.mark.slow
@needs_megatron
def test_megatrons_checkpoints_are_gone_on_from_exactly(tmp_path: Path) -> None:
    """In both formats, ours and stock's by each other; by as many ranks and by one; saved behind training."""

    def case(name: str, kind: str, loads: str = "", *, steps: int = 3, **more: Any) -> dict[str, Any]:
        at = {"load": str(tmp_path / loads), "at": 3} if loads else {}
        return {"name": name, "kinds": [kind], "steps": steps, **at, **more}

    def saved(name: str, kind: str, **more: Any) -> dict[str, Any]:
        return case(name, kind, save=str(tmp_path / name), **more)

    cases = [case("whole", "offload", steps=6)]
    for short, sharding in FORMATS.items():
        te, keep = short == "full", str(tmp_path / "kept")
        ours, theirs = f"ours {short}", f"stock {short}"
        of_it = [
            saved(ours, "offload", keep=keep, te=te),
            saved(theirs, "memory"),
            case(f"{short} ours to ours", "offload", ours, te=te),
            case(f"{short} stock to ours", "offload", theirs),
            case(f"{short} ours to stock", "memory", ours),
        ]
        cases += [{**each, "sharding": sharding} for each in of_it]
    cases += [saved("behind", "offload", behind=True), case("resumed from behind", "offload", "behind")]
    cases += [saved("in place", "offload", layout="in_place"), case("resumed in place", "offload", "in place")]
    both = {"layout": "in_place", "behind": True, "tp": 2}
    cases += [case("whole tp", "offload", steps=6, tp=2), saved("behind tp", "offload", **both)]
    cases += [case("resumed from behind tp", "offload", "behind tp", tp=2)]
    found = run(tmp_path / "paths", 2, cases)
    for name, ranks in found.items():
        for whole, said in zip(found["whole tp" if name.endswith("tp") else "whole"], ranks, strict=True):
            steps = said.get("offload") or said["memory"]
            if name.startswith(("ours", "stock", "behind", "in place")):
                assert steps == whole["offload"][: len(steps)], name
                assert len(steps) == (5 if name.startswith("behind") else 3), name
                in_place = name in ("in place", "behind tp")
                assert said.get("reads", 1) == (0 if in_place else 1), name  # all of it, once
                assert (tmp_path / name / "offload" / "COMMIT").is_file() == in_place
                assert (tmp_path / name / WHOLE).is_file() == in_place
            elif not name.startswith("whole"):
                assert (steps, said["digest"]) == (whole["offload"][3:], whole["digest"]), name
    fewer = [case("in place", "offload", "in place", steps=0, kept=str(tmp_path / "kept"))]
    fewer += [
        case(name, "offload", f"ours {name}", steps=0, sharding=sharding, kept=str(tmp_path / "kept"))
        for name, sharding in FORMATS.items()
    ]
    for (said,) in run(tmp_path / "paths", 1, fewer).values():
        assert said["differing"] == []


@pytest.mark.slow
@needs_megatron
def test_stages_train_and_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    """Micro-steps overlap; each stage has an engine of its own, and norms and skipped steps are those of both."""
    layouts, forms = ("stock", "in_place"), ("exact", "compact16", "compact8")
    ours = {"kinds": ["offload"]}
    cases: list[dict[str, Any]] = [
        {"name": "bf16", "steps": 6},
        {"name": "fp16", "fp16": True, "passes": 1, "steps": 5},
    ]
    cases += [{"name": "tied", "tied": True, "steps": 6}, {"name": "frozen", "frozen": True, "steps": 4}]
    cases += [{"name": f"tied {form}", "tied": True, "format": form, "steps": 6, **ours} for form in forms]
    for layout, (name, steps) in itertools.product(layouts, (("bf16", 3), ("frozen", 2))):
        folder, of_it = (
            str(tmp_path / f"{name} {layout}"),
            {"frozen": name == "frozen", "layout": layout, "steps": steps},
        )
        cases += [{"name": f"saved {name} {layout}", "save": folder, **of_it, **ours}]
        cases += [{"name": f"resumed {name} {layout}", "load": folder, "at": steps, **of_it, **ours}]
    found = run(tmp_path / "paths", 2, [{"pp": 2, "passes": 4, **case} for case in cases])
    for rank in range(2):
        said = {name: ranks[rank] for name, ranks in found.items()}
        for name in ("bf16", "fp16", "tied", "frozen"):
            assert said[name]["offload"] == said[name]["memory"], name
            assert said[name]["differing"] == [], name
            # The first stage has nothing to train where it is frozen.
            assert (said[name]["state"] == 0) == (name == "frozen" and rank == 0), name
            assert name == "frozen" or said[name]["resident"] == 0
        assert not all(took for *_, took, _, _ in said["fp16"]["offload"])
        assert ("embedding.word_embeddings.weight" in said["bf16"]["names"]) == (rank == 0)
        for layout, (name, steps) in itertools.product(layouts, (("bf16", 3), ("frozen", 2))):
            assert said[f"saved {name} {layout}"]["offload"] == said[name]["offload"][:steps]
            assert said[f"resumed {name} {layout}"]["offload"] == said[name]["offload"][steps:]
            assert said[f"resumed {name} {layout}"]["digest"] == said[name]["digest"]
            assert (tmp_path / f"bf16 {layout}" / "offload" / "COMMIT").is_file() == (layout == "in_place")
    for form in forms:  # Megatron adds up the gradients of both copies: they stay one weight
        (first,), (last,) = (said["tied"] for said in found[f"tied {form}"])
        assert first == last, form


def model(**changed: Any) -> tuple[SimpleNamespace, list[SimpleNamespace]]:
    """Return what Megatron's own function is given: its configuration, and a model of one weight."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=changed.pop("dtype", torch.bfloat16)))
    flags = {"use_megatron_fsdp": False, "fp8_param_gather": False}
    ddp = SimpleNamespace(**{name: changed.pop(name, value) for name, value in flags.items()})
    names = "use_distributed_optimizer", "optimizer_cpu_offload", "use_precision_aware_optimizer"
    types = dict.fromkeys(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), torch.float32)
    config = SimpleNamespace(**{**dict.fromkeys(names, True), **types, **changed})
    return config, [SimpleNamespace(ddp_config=ddp, named_parameters=lambda: iter([("module.weight", weight)]))]


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        (MEGATRON_WHOLE, {"use_distributed_optimizer": False}),
        (MEGATRON_WHOLE, {"optimizer_cpu_offload": False}),
        (MEGATRON_WHOLE, {"use_precision_aware_optimizer": False}),
        (MEGATRON_FSDP, {"use_megatron_fsdp": True}),
        (MEGATRON_WEIGHTS, {"fp8_param_gather": True}),
        (MEGATRON_WEIGHTS, {"dtype": torch.float32}),
        (MEGATRON_ROUNDED, {"exp_avg_dtype": torch.bfloat16}),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(row: Row, changed: dict[str, Any]) -> None:
    assert switch.make_checked(lambda *_, **options: options, *model(), [], tp=1) == {"tp": 1}
    with pytest.raises(ConfigError) as refused:
        switch.make_checked(pytest.fail, *model(**changed), [])
    assert row.advice in str(refused.value)


@pytest.mark.parametrize(
    ("row", "config"),
    [
        (MEGATRON_GATHERS, {"overlap": "forward"}),
        (MEGATRON_GATHERS, {"overlap": "both", "paths": ["."]}),
        (MEGATRON_BUFFER, {"keep_grads": False}),
        (MEGATRON_BUFFER, {"gradient_memory": 0, "paths": ["."]}),
        (MEGATRON_MIRRORS, {"mirror": "/", "paths": ["."]}),
    ],
)
def test_settings_that_megatron_has_no_place_for_are_refused(row: Row, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        integration.enable(config)
    assert row.advice in str(refused.value)


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        (MEGATRON_REDUCES, {"overlap_grad_reduce": False}),
        (MEGATRON_CHANGES, {"grad_scaler": object()}),
        (MEGATRON_CHANGES, {"calculate_per_token_loss": True}),
        (MEGATRON_GRAPHS, {"cuda_graph_scope": ["<CudaGraphScope.full_iteration: 1>"]}),
    ],
)
def test_updates_in_backward_that_none_would_count_are_refused(row: Row, changed: dict[str, Any]) -> None:
    """Also with fp16, whose loss scale is a scaler's."""
    found = {"overlap_grad_reduce": True, "calculate_per_token_loss": False, "grad_scaler": None, **changed}
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(**found), config=SimpleNamespace(**found))
    distributed = SimpleNamespace(optimizer=None, model_chunks=[chunk], grad_scaler=found["grad_scaler"])
    with pytest.raises(ConfigError) as refused:
        switch.open_engine(distributed, OffloadConfig(overlap="backward", paths=["."]))
    assert row.advice in str(refused.value)


def inner_of(*shards: torch.Tensor) -> integration.MegatronAdamW:
    return integration.MegatronAdamW([*shards], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


def test_budgets_are_divided_among_experts_and_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: dict[str, OffloadConfig] = {}
    monkeypatch.setattr(switch, "open_engine", lambda each, config: opened.update({each.optimizer.folder: config}))
    members = [SimpleNamespace(optimizer=inner_of(torch.zeros(numel))) for numel in (300, 100)]
    config = OffloadConfig(host_memory=40960, gpu_memory=40000, paths=["."])
    with caplog.at_level("INFO", "offload"):
        switch.init_chained(None, lambda *_: None, config, members)
    assert {name: (each.host_memory, each.gpu_memory) for name, each in opened.items()} == {
        "offload": (30720, 30000),
        "offload-1": (10240, 10000),
    }
    assert (
        "optimizer 2 of 2 has 100 of 400 parameters of this rank: host_memory 10240, gpu_memory 10000" in caplog.text
    )
    caplog.clear()
    opened.clear()
    switch.init_chained(None, lambda *_: None, config, [*members[:1], SimpleNamespace(optimizer=None)])
    assert opened == {"offload": config}
    assert not caplog.text


@pytest.mark.parametrize(("on_first", "rank", "is_told"), [(False, 1, True), (True, 0, True), (True, 1, False)])
def test_what_a_save_gathers_is_said_beforehand(
    caplog: pytest.LogCaptureFixture, on_first: bool, rank: int, is_told: bool
) -> None:
    group, buffers = SimpleNamespace(rank=lambda: rank), [SimpleNamespace(numel_unpadded=1000)] * 2
    distributed = SimpleNamespace(optimizer=inner_of(torch.zeros(4)), data_parallel_group=group, buffers=buffers)

    def told(sharding: str, is_loading: bool = False) -> str:
        caplog.clear()
        names = "distrib_optim_sharding_type", "distrib_optim_fully_reshardable_mem_efficient"
        metadata = dict(zip(names, (sharding, on_first), strict=True))
        of_model: dict[str, Any] = {}
        asked = {"model_sharded_state_dict": of_model, "is_loading": is_loading, "metadata": metadata}
        given = switch.sharded_state_dict(distributed, lambda *given: given, **asked)
        assert given == (distributed, of_model, is_loading, None, metadata)
        return caplog.text

    assert ("in this one's host memory: 24000 bytes" in told("fully_reshardable")) == is_told
    assert not told("dp_reshardable")
    assert "in this one's host memory: 24000 bytes" in told("fully_reshardable", is_loading=True)


def over_a_shard(folder: Path) -> SimpleNamespace:
    """Return what a checkpoint in place needs of Megatron's optimizer, over ours of a third of a weight."""
    weight = torch.arange(3 * 4096, dtype=torch.bfloat16)
    shard = weight[4096:8192]
    inner = inner_of(shard)
    folder.mkdir(exist_ok=True)
    parameter = Parameter("weight", 4096, DtypeCode.BFLOAT16, 0, 4096, 3 * 4096, (3, 4096))
    inner.open({weight: parameter}, OffloadConfig(paths=[str(folder)], host_memory=0, threads=1), torch.float32)
    return SimpleNamespace(
        optimizer=inner, shard=shard, weight=weight, data_parallel_group_idx=2, distributed_optimizer_instance_id=0
    )


def save_in_place(distributed: SimpleNamespace, place: Path) -> str:
    distributed.shard.decoupled_grad = torch.linspace(-1, 1, 4096)
    distributed.optimizer.step()
    id = uuid.uuid4().hex
    for each in in_place.begin_saves(str(place), {id: distributed}):
        each.result()
    return id


def load_in_place(distributed: SimpleNamespace, place: Path, id: str) -> None:
    """Load as Megatron does: it has read its own file, which has the id."""
    read = {"optimizer": [{"param_state": {POINTER: id}}]}
    assert in_place.load(lambda *_, **__: read, {}, str(place)) is read
    in_place.load_state(distributed, id)


def test_a_checkpoint_in_place_lasts_as_long_as_its_folder(tmp_path: Path) -> None:
    """No later one takes its room while Megatron keeps it: that is a copy."""
    first, second, third = (tmp_path / f"iter_000000{number}" for number in (1, 2, 3))
    distributed = over_a_shard(tmp_path / "paths")
    optimizer = distributed.optimizer
    id = save_in_place(distributed, first)
    saved = optimizer.state[distributed.shard]["master_param"].clone()
    save_in_place(distributed, second)
    assert [*optimizer.engine.checkpoints.kept] == [str(first / "offload")]
    fresh = over_a_shard(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"load the state dict by dist_checkpointing\.load"):
        in_place.load_state(fresh, id)
    with pytest.raises(CheckpointError, match="files are of several checkpoints"):
        load_in_place(fresh, second, id)
    load_in_place(fresh, first, id)
    assert torch.equal(fresh.optimizer.state[fresh.shard]["master_param"], saved)
    assert torch.equal(fresh.shard, saved.bfloat16())
    assert [each.state[each.shards[0]]["exp_avg"].any() for each in (fresh.optimizer, optimizer)] == [True, True]
    assert fresh.optimizer.state_dict()["state"][0]["step"] == 1
    fresh.optimizer.close()
    with optimizer.engine.checkpoints.open(first / "offload"):
        shutil.rmtree(first)
        save_in_place(distributed, third)  # whoever reads the one that is gone ends no training
    assert [*optimizer.engine.checkpoints.kept] == [str(first / "offload")]
    shutil.rmtree(third)
    save_in_place(distributed, third)
    assert [*optimizer.engine.checkpoints.kept] == [str(third / "offload")]
    optimizer.close()


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("again", ["iter_1", "iter_2"])
def test_a_checkpoint_in_place_that_was_renamed_keeps_its_state(tmp_path: Path, again: str, is_loaded: bool) -> None:
    """Also if it was loaded, or if another one gets its name, is deleted, and saved anew."""
    first, renamed = tmp_path / "iter_1", tmp_path / "iter_1_best"
    distributed = over_a_shard(tmp_path / "paths")
    id = save_in_place(distributed, first)
    saved = distributed.shard.clone()
    if is_loaded:
        distributed.optimizer.close()
        distributed = over_a_shard(tmp_path / "paths")
        load_in_place(distributed, first, id)
    first.rename(renamed)
    for _ in range(3):
        save_in_place(distributed, tmp_path / again)
    shutil.rmtree(tmp_path / again)
    save_in_place(distributed, tmp_path / "iter_3")
    fresh = over_a_shard(tmp_path / "other")
    load_in_place(fresh, renamed, id)
    assert torch.equal(fresh.shard, saved)
    fresh.optimizer.close()
    distributed.optimizer.close()


def test_a_folder_is_deleted_when_nothing_has_it_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the file system say nothing of that."""
    folder = tmp_path / "iter_1"
    folder.mkdir()
    watched = WatchedFolder(str(folder))
    with monkeypatch.context() as fails:
        fails.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
        assert not WatchedFolder(str(folder)).is_deleted
    with monkeypatch.context() as fails:
        fails.setattr(os, "fstat", Mock(side_effect=OSError(errno.EIO, "input/output error")))
        assert not watched.is_deleted
        fails.setattr(os, "fstat", Mock(side_effect=OSError(errno.ESTALE, "stale file handle")))
        assert watched.is_deleted
    folder.rename(tmp_path / "renamed")
    assert (watched.is_there, watched.is_deleted) == (False, False)
    (tmp_path / "renamed").rmdir()
    assert watched.is_deleted
    assert WatchedFolder(str(folder)).is_deleted


def test_a_folder_whose_checkpoint_is_under_its_name_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its release goes by the name: that would end the checkpoint."""
    folder, elsewhere = tmp_path / "iter_1", tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "COMMIT").write_bytes(b"one")
    watched = WatchedFolder(str(folder))
    with monkeypatch.context() as fails:  # as after a failover of the file server
        fails.setattr(os, "fstat", Mock(side_effect=OSError(errno.ESTALE, "stale file handle")))
        assert not watched.is_deleted
    shutil.copytree(folder, elsewhere)  # as to another disk
    shutil.rmtree(folder)
    folder.symlink_to(elsewhere)
    assert not watched.is_deleted
    with monkeypatch.context() as fails:
        fails.setattr("builtins.open", Mock(side_effect=OSError(errno.EIO, "input/output error")))
        assert not watched.is_deleted
    (folder / "COMMIT").write_bytes(b"other")
    assert watched.is_deleted
    (folder / "COMMIT").unlink()
    assert watched.is_deleted


def test_a_save_in_place_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a collective, and with no folder begun."""
    pytest.importorskip("megatron.core")
    one = over_a_shard(tmp_path / "paths")
    state = {"a": SimpleNamespace(data={POINTER: "one"}), "b": [{"c": {POINTER: "other"}}]}
    with pytest.raises(CheckpointError, match="make a state dict anew for each save"):
        in_place.save(pytest.fail, state, tmp_path / "iter_1")
    monkeypatch.setattr(in_place, "asked_states", {"one": one, "other": one})
    with pytest.raises(CheckpointError, match="two optimizers would save to one folder"):
        in_place.save(pytest.fail, state, tmp_path / "iter_1")
    monkeypatch.setattr(in_place, "asked_states", {"one": one, "other": one})
    with pytest.raises(ConfigError):
        in_place.save(pytest.fail, state, "msc://bucket/iter_1")
    assert not (tmp_path / "iter_1").exists()
    one.optimizer.close()


def test_a_folder_that_is_saved_to_again_is_whole_after_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the save before is ended when the next one is under way."""
    one, place, requests = over_a_shard(tmp_path / "paths"), tmp_path / "iter_1", []
    one.shard.decoupled_grad = torch.linspace(-1, 1, 4096)
    one.optimizer.step()
    for _ in range(2):
        id = uuid.uuid4().hex
        monkeypatch.setitem(in_place.asked_states, id, one)
        state, request = {"state": {in_place.POINTER: id}}, SimpleNamespace(finalize_fns=[list])
        requests.append(
            in_place.save(lambda *_, request=request, **__: request, state, place, async_sharded_save=True)
        )
    for request in requests:
        assert not (place / WHOLE).exists()
        for finalize in request.finalize_fns:
            finalize()
    assert (place / WHOLE).exists()
    one.optimizer.close()


def test_a_rank_that_cannot_save_keeps_no_other_one_waiting(tmp_path: Path) -> None:
    """The others' saves end as failed, and the next one goes well."""
    one = over_a_shard(tmp_path / "paths")
    ended: list[int] = []
    with patch("offload.integrations.megatron.in_place.world", lambda: (2, 0)):
        (end,) = in_place.begin_saves(str(tmp_path / "iter_1"), {uuid.uuid4().hex: one}, ended)
    ended += [0, 1]
    with pytest.raises(CheckpointError):
        end.result(timeout=60)
    open_files = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    assert str(tmp_path / "iter_1" / "offload") not in open_files
    save_in_place(one, tmp_path / "iter_2")
    one.optimizer.close()


def test_a_save_in_place_has_its_own_outcome(tmp_path: Path) -> None:
    """Not that of a later one, which has begun before Megatron asks."""
    distributed = over_a_shard(tmp_path / "paths")
    good, bad = tmp_path / "iter_1", tmp_path / "iter_2"
    (bad / "offload" / "COMMIT" / "taken").mkdir(parents=True)
    (first,) = in_place.begin_saves(str(good), {uuid.uuid4().hex: distributed})
    with contextlib.suppress(CheckpointError):  # that is how it may end at once
        in_place.begin_saves(str(bad), {uuid.uuid4().hex: distributed})
    assert first.result() is None
    bad = tmp_path / "iter_3"
    (second,) = in_place.begin_saves(str(bad), {uuid.uuid4().hex: distributed})
    shutil.rmtree(bad, ignore_errors=True)  # the save may still write there
    (third,) = in_place.begin_saves(str(tmp_path / "iter_4"), {uuid.uuid4().hex: distributed})
    assert third.result() is None
    with contextlib.suppress(CheckpointError):  # it may have been committed before its folder went
        second.result()
    distributed.optimizer.close()


def test_a_weight_that_has_left_megatrons_buffer_is_named(tmp_path: Path) -> None:
    distributed = over_a_shard(tmp_path / "paths")
    distributed.shard.decoupled_grad = torch.ones(4096)
    distributed.weight.data = distributed.weight.clone()
    with pytest.raises(ConfigError, match="leave weights in Megatron's buffer: this one was moved out"):
        distributed.optimizer.step()
    distributed.optimizer.close()


def test_state_is_read_and_set_by_megatrons_names(tmp_path: Path) -> None:
    distributed = over_a_shard(tmp_path / "paths")
    optimizer, shard = distributed.optimizer, distributed.shard
    assert [*optimizer.state[shard]] == ["master_param", "exp_avg", "exp_avg_sq"]
    for name, value in {"master_param": 2.0, "exp_avg": 0.5, "exp_avg_sq": 0.25}.items():
        optimizer.state[shard][name] = torch.full((4096,), value)
    optimizer.state[shard].update(step=torch.tensor(7.0), padding=False)
    assert optimizer.state[shard]["exp_avg_sq"].unique().item() == 0.25
    assert shard.unique().item() == 2.0
    assert optimizer.sub_optimizers[0].state_dict()["state"][0]["step"] == 7
    shard.fill_(3.0)
    optimizer.update_fp32_param_by_new_param()
    assert optimizer.state[shard]["master_param"].unique().item() == 3.0
    gradient = shard.decoupled_grad = torch.ones(4096)  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=False)
    assert not gradient.any()
    optimizer.zero_grad()
    assert shard.decoupled_grad is None  # type: ignore[attr-defined]
    optimizer.step()  # no shard has a gradient
    assert optimizer.state_dict()["state"][0]["step"] == 7
    with pytest.raises(ConfigError, match="a shard has all of its state"):
        del optimizer.state[shard]["exp_avg"]
    optimizer.close()


def test_a_megatron_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ConfigError, match="pip install --no-deps megatron-core"):
        integration.enable({})
    with pytest.raises(ConfigError, match='use "stock" or "in_place"'):
        integration.enable({}, layout="elsewhere")


@pytest.fixture
def distributed() -> Iterator[Any]:
    yield import_module("megatron.core.optimizer.distrib_optimizer")
    integration.disable()


@needs_megatron
def test_it_takes_the_place_of_both_names_until_it_is_disabled(distributed: Any) -> None:
    package = import_module("megatron.core.optimizer")
    before = [vars(package).copy(), vars(distributed).copy(), {**vars(distributed.DistributedOptimizer)}]
    integration.enable({})
    integration.enable({"threads": 1})
    assert package.HybridDeviceOptimizer is distributed.HybridDeviceOptimizer is integration.MegatronAdamW
    integration.disable()
    integration.disable()
    assert before == [vars(package), vars(distributed), {**vars(distributed.DistributedOptimizer)}]


@needs_megatron
@pytest.mark.usefixtures("distributed")
def test_a_local_checkpoint_without_state_is_refused() -> None:
    kind = import_module("megatron.core.dist_checkpointing.tensor_aware_state_dict").MCoreTensorAwareStateDict
    integration.enable({"paths": ["."]}, layout="in_place")
    with pytest.raises(ConfigError) as refused:
        kind.from_state_dict({"optimizer": {"param_state": SimpleNamespace(data={POINTER: "id"})}})
    assert MEGATRON_LOCAL.advice in str(refused.value)
    with pytest.raises(ImportError, match="nvidia_resiliency_ext"):  # Megatron's own
        kind.from_state_dict({"optimizer": {"state": torch.ones(1)}})


def _nothing(self: Any) -> None:
    """Take the place of a function that used what is relied on."""


@needs_megatron
@pytest.mark.parametrize(
    ("name", "now", "says"),
    [
        ("_copy_model_grads_to_main_grads", _nothing, "does not use main_grad, decoupled_grad"),
        ("load_state_dict", _nothing, r"load_state_dict\(self\) took \(self, state_dict\)"),
        ("_get_model_param_range_map", None, "_get_model_param_range_map is gone"),
    ],
)
def test_a_megatron_that_has_moved_is_named(
    distributed: Any, monkeypatch: pytest.MonkeyPatch, name: str, now: Callable[..., Any] | None, says: str
) -> None:
    if now is None:
        monkeypatch.delattr(distributed.DistributedOptimizer, name)
    else:
        monkeypatch.setattr(distributed.DistributedOptimizer, name, now)
    with pytest.raises(ConfigError, match=f"use one of 0.16.1: .*{says}"):
        integration.enable({})
    assert distributed.HybridDeviceOptimizer is not integration.MegatronAdamW
