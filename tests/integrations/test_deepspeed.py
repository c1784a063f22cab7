"""The DeepSpeed backend: checks in worker processes (1 and 2 ranks), and bad input."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import resource
import shlex
import subprocess
import sys
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prepared
import pytest
import torch

from offload import ConfigError, OffloadConfig

pytest.importorskip("deepspeed")

FULL = ("matrix_equals_stock", "matrix_is_near_stock_with_torch")
OLDER = ("0.17.6", "0.18.9")
SCRIPT = Path(__file__).with_name("deepspeed_checks.py")
CHECKS = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text("utf-8"), re.MULTILINE)
"""Their names; the script imports DeepSpeed, which takes seconds."""
SKIPPED = "skipped: "
"""What the result of a check begins with that cannot be done on this machine."""
OTHERS = tuple(name for name in CHECKS if name not in FULL and not name.startswith("alone"))
OF_ANY_WORLD = (
    "a_device_of_none_counts_as_the_cpu",
    "auto_does_what_the_first_rank_has_measured",
    "client_optimizers_are_taken_over",
    "gradients_on_paths_change_nothing",
    "groups_schedules_and_frozen_parameters",
    "lion_equals_its_definition",
    "micro_steps_by_hand",
    "model_variants_equal_stock",
    "phases_change_nothing",
    "saves_behind_training_are_those_that_wait",
    "state_of_another_format_makes_the_same_weights",
    "state_of_another_rule_is_refused",
    "steps_that_go_on_into_forward_change_nothing",
    "two_models_on_one_path",
    "unused_parameters_stay_as_they_are",
    "updates_during_backward_change_nothing",
    "weights_in_files_change_nothing",
    "what_a_step_did_can_be_seen_as_elsewhere",
    "what_is_frozen_after_initialize_keeps_its_state",
)
"""Checks that say with two ranks all that they say with one: `make test` runs them once."""
WITHOUT_RANKS = (
    "an_object_that_is_ignored_is_said_once",
    "compiled_models_equal_stock",
    "defaults_work_with_all_state_on_disk",
)
"""Checks of what no other rank has a part in: `make test` runs them with one."""
PARTS = {1: 2, 2: 4}  # starts of the checks by ranks, each of which may go to another core
TIMEOUT_S = 840  # for a machine that does other things as well
NOT_OLDER = ("pairs_equal_stock", "model_variants_equal_stock")
"""Checks beside which stock itself goes wrong before 0.19."""


def start(
    world: int,
    folder: Path,
    names: tuple[str, ...],
    before_exec: Callable[[], None] | None = None,
    timeout_s: float = TIMEOUT_S,
    python: str = "",
    **variables: str,
) -> dict[str, str]:
    """Run checks in `world` ranks; return what became of each.

    That is "ok", why it was skipped, or what the first rank that failed says.
    """
    ranks = []
    rendezvous = folder / f"rendezvous-{uuid.uuid4()}"  # a file: a port that is free now may not be when it is used
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # has to be there, and is not used
            "RENDEZVOUS": str(rendezvous),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        log = (folder / f"log-{rank}").open("w")
        command = [python or prepared.python(), "-W", "ignore", str(SCRIPT), str(folder), *names]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, preexec_fn=before_exec)
        )
        log.close()
    deadline_s = time.monotonic() + timeout_s
    late = ""
    try:
        for process in ranks:
            process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        late = f" within {timeout_s:.0f} s"  # the results tell how far all came
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    results: dict[str, str] = {}
    for rank in range(world):
        written = folder / f"results-{rank}.json"
        own: dict[str, str] = json.loads(written.read_text()) if written.exists() else {}
        failed = any(said != "ok" and not said.startswith(SKIPPED) for said in own.values())
        log_end = (folder / f"log-{rank}").read_text()[-2000:]
        why = ", as an earlier one failed" if failed else f" and ended with {ranks[rank].returncode}: {log_end}"
        for name in names:
            said = own.get(name, f"rank {rank} did not run it{late}{why}")
            if results.get(name, "ok") == "ok":
                results[name] = said
    return results


def failures(found: dict[str, str]) -> list[str]:
    """Return what failed checks have said, whole: what pytest shows of a dict is cut."""
    return [f"{name}: {said}" for name, said in found.items() if said != "ok" and not said.startswith(SKIPPED)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "part"), [(world, part) for world in PARTS for part in range(PARTS[world])])
def test_checks(world: int, part: int, tmp_path: Path) -> None:
    """A start takes longer than most checks, so that several are made in one."""
    names = tuple(name for name in OTHERS if name not in (OF_ANY_WORLD, WITHOUT_RANKS)[world - 1])
    found = start(world, tmp_path, names[part :: PARTS[world]])
    assert not failures(found), "\n".join(failures(found))
    if set(found.values()) != {"ok"}:
        pytest.skip("; ".join(f"{name}: {said}" for name, said in found.items() if said != "ok"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_killed_ranks_lose_no_tag_and_mix_none(kills: int, tmp_path: Path) -> None:
    script, report = SCRIPT.with_name("deepspeed_torture.py"), tmp_path / "report.json"
    python = prepared.python() if kills < 10 else sys.executable
    command = [python, "-W", "ignore", str(script), "--kills", str(kills)]
    command += ["--folder", str(tmp_path / "lives"), "--json", str(report)]
    prepared.ran(command)
    figures = json.loads(report.read_text())["results"]
    assert figures["kills"] == kills
    assert figures["loaded and compared"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["stock", pytest.param("in_place", marks=pytest.mark.full)])
def test_a_killed_trainer_that_keeps_one_checkpoint_has_one(layout: str, tmp_path: Path) -> None:
    """It deletes the older one when a save returns, so one has to be whole by then; it is gone on from exactly."""
    pytest.importorskip("accelerate")
    name, rng = "alone_trainer", random.Random(layout)
    (whole := tmp_path / "whole").mkdir()
    (killed := tmp_path / "killed").mkdir()
    assert start(1, whole, (name,), LAYOUT=layout) == {name: "ok"}
    for _ in range(3):
        found = start(1, killed, (name,), KILL_AFTER_S=str(rng.uniform(0, 0.5)), LAYOUT=layout)
        assert found[name] == "ok" or "did not run it" in found[name], found
    assert start(1, killed, (name,), LAYOUT=layout) == {name: "ok"}
    histories = [json.loads((folder / name / "history.json").read_text()) for folder in (whole, killed)]
    assert histories[0] == histories[1]
    assert len(histories[0]) == 8


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [1, 2])
def test_whole_matrix(world: int, tmp_path: Path) -> None:
    assert start(world, tmp_path, FULL, timeout_s=1800) == dict.fromkeys(FULL, "ok")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "names"), [(1, OF_ANY_WORLD), (2, WITHOUT_RANKS)])
def test_the_other_checks(world: int, names: tuple[str, ...], tmp_path: Path) -> None:
    assert start(world, tmp_path, names) == dict.fromkeys(names, "ok")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", OLDER)
def test_older_versions(version: str, tmp_path: Path) -> None:
    """The checks on an older DeepSpeed, installed beside the one that is there.

    With one rank: on two, and torch 2.13, ZeRO-3 of these does not always repeat its own bits, and ZeRO-1 of 0.18.9
    fails without us.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--target", str(tmp_path / "older"), f"deepspeed=={version}"]
    done = subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"deepspeed {version} cannot be installed here: {done.stderr[-500:]!r}")
    names = ("alone_older", *(name for name in OTHERS if name not in NOT_OLDER))
    found = start(1, tmp_path, names, timeout_s=1800, python=sys.executable, PYTHONPATH=str(tmp_path / "older"))
    assert not failures(found), "\n".join(failures(found))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_checkpoints_in_fresh_processes_and_at_another_world_size(before: int, after: int, tmp_path: Path) -> None:
    assert start(before, tmp_path, ("alone_universal_save",)) == {"alone_universal_save": "ok"}
    assert start(before, tmp_path, ("alone_resume",)) == {"alone_resume": "ok"}
    assert start(after, tmp_path, ("alone_refused",)) == {"alone_refused": "ok"}
    for folder in sorted(tmp_path.glob("stage-*")):
        # As the error says it.
        python, *command = shlex.split((folder / "refused").read_text().split("`")[1])
        assert python == "python"
        command = [prepared.python(), *command]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        prepared.ran(command, env=environment)
    assert start(after, tmp_path, ("alone_universal_load",)) == {"alone_universal_load": "ok"}


def limit_locked_memory() -> None:
    """Allow 64 KiB, for root too. Runs between fork and exec."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    if os.geteuid() == 0:
        prctl = ctypes.CDLL(None).prctl
        prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK: gone after exec


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_little_locked_memory_is_enough(tmp_path: Path) -> None:
    name = "alone_with_little_locked_memory"
    assert start(1, tmp_path, (name,), before_exec=limit_locked_memory, python=sys.executable) == {name: "ok"}


def config(**sections: Any) -> dict[str, Any]:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    return {"zero_optimization": zero, "multi_tier_offload": {}, **sections}


def ours(**keys: Any) -> dict[str, Any]:
    return config(multi_tier_offload=keys)


def saving(**keys: Any) -> dict[str, Any]:
    return ours(checkpoint=keys)


def zero(stage: int = 3, ours: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return config(zero_optimization={"stage": stage, **keys}, multi_tier_offload=ours or {})


def optimizer(**keys: Any) -> dict[str, Any]:
    return zero(offload_optimizer={"device": "cpu", **keys})


CPU = {"offload_optimizer": {"device": "cpu"}}
ON_NVME = {"offload_param": {"device": "nvme", "nvme_path": "/x"}}


@pytest.mark.parametrize(
    ("given", "names", "says"),
    [
        (config(multi_tier_offload="on"), "multi_tier_offload", "give an object"),
        (ours(hots_memory=1), "multi_tier_offload.hots_memory", "host_memory"),
        (ours(hots_memory=1), "multi_tier_offload.hots_memory", "overlap, checkpoint"),
        (ours(chekpoint={}), "multi_tier_offload.chekpoint", 'did you mean "checkpoint"?'),
        (ours(host_memory="many"), "multi_tier_offload.host_memory", "8GiB"),
        (ours(host_memory="64G"), "multi_tier_offload.host_memory", '"64GiB" (powers of'),
        (ours(paths=[3]), "multi_tier_offload.paths[0]", "give a directory"),
        (ours(overlap="ahead"), "multi_tier_offload.overlap", '"backward"'),
        (ours(gradient_dtype="float32"), "gradient_dtype", "grad_accum_dtype"),
        (zero(0), "zero_optimization.stage", "1, 2 or 3"),
        (optimizer(device="disk"), "offload_optimizer.device", '"cpu"'),
        (optimizer(device="nvme", nvme_path="/x"), "nvme_path", "multi_tier_offload.paths"),
        (optimizer(ratio=0.5), "ratio", "host_memory"),
        (optimizer(pipeline_read=True), "pipeline_read", "overlap"),
        (optimizer(super_offload=True), "super_offload", "leave it out"),
        (zero(2, **CPU, zenflow={"topk": 1}), "zenflow", "leave it out"),
        (zero(**CPU, mics_shard_size=2), "mics_shard_size", "MiCS"),
        (zero(offload_param={"device": "disk"}), "offload_param.device", '"nvme"'),
        (zero(2, **ON_NVME), "offload_param.device", "stage 3"),
        (zero(offload_param={"device": "nvme"}), "nvme_path", "give the folder"),
        (
            zero(offload_param={**ON_NVME["offload_param"], "buffer_count": 5}),
            "offload_param.buffer_count",
            "leave it out",
        ),
        (zero(**ON_NVME, ours={"overlap": "both"}), "multi_tier_offload.overlap", "weights in a file"),
        (config(torch_autocast={"enabled": True}), "torch_autocast.enabled", "bf16"),
        (config(managed_gradient_accumulation=False), "managed_gradient_accumulation", "leave it out"),
        (zero(1, {"overlap": "backward"}, **CPU), "multi_tier_offload.overlap", "overlap_comm"),
        (saving(layout="copy"), "checkpoint.layout", "stock, in_place"),
        (saving(wait="no"), "checkpoint.wait", "true or false"),
        (saving(**{"async": True}), "multi_tier_offload.checkpoint.async", "wait"),
        (saving(wiat=False), "checkpoint.wiat", 'did you mean "wait"?'),
        (ours(checkpoint=False), "multi_tier_offload.checkpoint", '"wait"'),
    ],
)
def test_bad_config_says_what_to_write(given: dict[str, Any], names: str, says: str) -> None:
    from offload.integrations.deepspeed import settings

    with pytest.raises(ConfigError) as caught:
        settings.read(given)
    assert names in str(caught.value)
    assert says in str(caught.value)


def engine_with(config: dict[str, Any]) -> Any:
    return SimpleNamespace(config=config, global_rank=0)


@pytest.mark.parametrize("key", ["multi_tier_ofload", "multi-tier-offload", "MultiTierOffload", "tier_offload"])
def test_a_mistyped_name_of_the_object_is_refused(key: str) -> None:
    from offload.integrations.deepspeed import switch

    with pytest.raises(ConfigError, match=rf'^{key}: .*did you mean "multi_tier_offload"\?'):
        switch.add_object_for_all(engine_with({"zero_optimization": {"stage": 3}, key: {"host_memory": 0}}))


@pytest.mark.parametrize(
    ("section", "config"),
    [
        ("zero_optimization", {"zero_optimization": {"stage": 3, "multi_tier_offload": {}}}),
        ("zero_optimization.offload_optimizer", optimizer(multi_tier_offload={})),
        ("optimizer.params", {"optimizer": {"type": "AdamW", "params": {"multi_tier_offload": {}}}}),
    ],
)
def test_an_object_in_a_section_is_refused(section: str, config: dict[str, Any]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    import offload.integrations.deepspeed as offload_deepspeed

    offload_deepspeed.enable()
    try:
        with pytest.raises(
            ConfigError, match=rf'^{section}\.multi_tier_offload: .* beside "{section.split(".")[0]}"'
        ):
            DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config})
    finally:
        offload_deepspeed.disable()


def test_no_key_of_deepspeed_is_taken_for_the_object() -> None:
    from deepspeed.runtime import config as sections
    from deepspeed.runtime import constants

    from offload.integrations.deepspeed import settings

    names = {value for module in (sections, constants) for value in vars(module).values() if isinstance(value, str)}
    assert {"fp16", "optimizer"} <= names
    settings.refuse_mistyped_key(dict.fromkeys(names))


@pytest.mark.parametrize(
    ("overlap", "stage", "said"),
    [
        ("off", 3, []),
        ("auto", 3, []),
        ("backward", 2, ["reduce_bucket_size"]),
        ("forward", 3, ["stage3_prefetch_bucket_size"]),
        ("forward", 2, []),
        ("both", 3, ["reduce_bucket_size", "stage3_prefetch_bucket_size"]),
    ],
)
def test_buckets_as_large_as_the_model_are_named(
    overlap: str, stage: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With DeepSpeed's default sizes a small model gains nothing, and nobody would know why."""
    from offload.integrations.deepspeed import common

    def names(size: int) -> list[str]:
        caplog.clear()
        engine = SimpleNamespace(
            module=torch.nn.Linear(4, 3),
            zero_optimization_stage=lambda: stage,
            zero_reduce_bucket_size=lambda: size,
            zero_prefetch_bucket_size=lambda: size,
        )
        common.warn_of_large_buckets(engine, OffloadConfig(host_memory=0, paths=["."], overlap=overlap))
        return [record.getMessage().split()[0] for record in caplog.records]

    assert (names(15), names(14)) == (said, [])


def test_an_engine_without_the_object_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where the backend is on, somebody has meant to use it."""
    from offload.integrations.deepspeed import switch

    switch.disable()
    for _ in range(2):
        switch.add_object_for_all(engine_with({"zero_optimization": {"stage": 3}}))
    (record,) = caplog.records
    assert "stays DeepSpeed's" in record.message
    assert "multi_tier_offload" in record.message


@pytest.mark.parametrize(
    ("name", "params", "names"),
    [
        ("lamb", {}, "optimizer.type"),
        ("Muon", {}, "optimizer.type"),
        ("OneBitAdam", {}, "optimizer.type"),
        (None, {}, "optimizer.type"),
        ("AdamW", {"amsgrad": True}, "amsgrad"),
        ("AdamW", {"bias_correction": False}, "bias_correction"),
        ("Adam", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("Adam", {"learning_rate": 1.0}, "learning_rate"),
    ],
)
def test_bad_optimizer_is_named(name: str | None, params: dict[str, Any], names: str) -> None:
    from offload.integrations.deepspeed import settings

    with pytest.raises(ConfigError, match=names):
        settings.adam_from_config(name, params)


def test_adam_of_the_config_decays_as_deepspeeds_does() -> None:
    from offload.integrations.deepspeed import settings

    assert settings.adam_from_config("Adam", {"lr": 1.0})[0]
    assert not settings.adam_from_config("Adam", {"adam_w_mode": False})[0]
    assert settings.adam_from_config("AdamW", {"adam_w_mode": False})[0]
    assert settings.adam_from_config("AdamW", {"betas": [0.8, 0.9]})[1]["betas"] == (0.8, 0.9)


def test_clients_that_cannot_be_taken_over_are_named() -> None:
    from offload.integrations.deepspeed.shard import check_optimizer

    weights = [torch.nn.Parameter(torch.zeros(2))]
    for optimizer in (
        torch.optim.SGD(weights),
        torch.optim.Adagrad(weights),
        torch.optim.AdamW(weights, amsgrad=True),
    ):
        with pytest.raises(ConfigError):
            check_optimizer(optimizer)


def test_an_old_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    from offload.integrations import deepspeed as backend

    monkeypatch.setattr(deepspeed, "__version__", "0.16.9")
    with pytest.raises(ConfigError, match=r"0\.16\.9.*0\.19\.8"):
        backend.enable()


def test_a_deepspeed_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.integrations import deepspeed as backend
    from offload.integrations.deepspeed import switch

    relied_on = {
        **switch.RELIED_ON,
        ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"): {
            "step": "closure",
            "_optimizer_step": "shard",
            "_no_such_method": "",
        },
    }
    monkeypatch.setattr(switch, "RELIED_ON", relied_on)
    with pytest.raises(ConfigError) as caught:
        backend.enable()
    assert "_optimizer_step(sub_group_id) took (shard)" in str(caught.value)
    assert "_no_such_method is gone" in str(caught.value)
    assert "step(closure)" not in str(caught.value)


def test_weights_on_nvme_are_deepspeeds_where_the_backend_has_no_part_in_them() -> None:
    """Its config is another one only while the backend is on, and if it has the object."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.partition_parameters import Init

    from offload.integrations import deepspeed as backend

    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, **ON_NVME}
    ours = config(zero_optimization=zero, train_batch_size=1)
    stock = {key: value for key, value in ours.items() if key != "multi_tier_offload"}

    def devices() -> list[tuple[str, bool]]:
        found = [DeepSpeedConfig(each).zero_config.offload_param for each in (ours, stock)]
        return [(each.device, each.pin_memory) for each in found]

    methods = DeepSpeedConfig._initialize_params, Init._validate_remote_device, Init._partition_param
    assert devices() == [("nvme", True), ("nvme", True)]
    for _ in range(2):
        backend.enable()
        backend.enable()
        try:
            assert devices() == [("cpu", False), ("nvme", True)]
        finally:
            backend.disable()
        assert devices() == [("nvme", True), ("nvme", True)]
    assert methods == (DeepSpeedConfig._initialize_params, Init._validate_remote_device, Init._partition_param)
    backend.enable({"host_memory": 0})
    try:
        assert devices() == [("cpu", False), ("cpu", False)]
        del zero["offload_optimizer"]
        assert devices() == [("cpu", False), ("nvme", True)]
    finally:
        backend.disable()


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({"has_moe_layers": True}, "MoE"),
        ({"pipeline_parallelism": True}, "PipelineModule"),
        ({"mpu": SimpleNamespace(get_model_parallel_world_size=lambda: 2)}, "mpu"),
        ({"autotp_size": lambda: 2}, "tensor_parallel.autotp_size"),
    ],
)
def test_layouts_that_cannot_be_run_are_named(attributes: dict[str, Any], names: str) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from offload.integrations import deepspeed as backend

    config = {"multi_tier_offload": {}, "zero_optimization": {"stage": 3}}
    backend.enable()
    try:
        with pytest.raises(ConfigError, match=names):
            DeepSpeedEngine._configure_optimizer(SimpleNamespace(config=config, **attributes), None, [])
    finally:
        backend.disable()


@pytest.mark.parametrize("name", ["param_list", "params", None])
def test_parameters_to_gather_may_be_an_iterator_by_any_name(name: str | None) -> None:
    from offload.integrations.deepspeed import stage3

    given, waited_for, gathered = [torch.ones(1), torch.ones(2)], list[Any](), list[Any]()

    class Owner:
        before_gather = staticmethod(waited_for.extend)

    owner = Owner()
    gather = stage3.wait_before_gather(weakref.ref(owner), torch.ones(3), lambda *a, **k: gathered.extend((a, k)))  # type: ignore[arg-type]
    gather(**{name: iter(given)}) if name else gather(iter(given))
    expected = ((), {name: given}) if name else ((given,), {})
    assert [each.numel() for each in waited_for] == [1, 2]
    assert str(gathered) == str([*expected])
