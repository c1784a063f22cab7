"""Every row of `offload.combinations`: what it is about is made, and its sentence comes; nothing else refuses any."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from net import errors
from sharded import on_ranks
from simulated import OnDevice
from test_simulated_gpu import Replayed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from world import SimulatedDevice

import offload
from offload.combinations import CONFIG, MADE, TABLE
from offload.integrations import shared
from offload.rules import MUON

Case = tuple[str, Callable[[Path], object]]

BF16 = offload.DtypeCode.BFLOAT16


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))


def config(folder: Path, **settings: Any) -> offload.OffloadConfig:
    return offload.OffloadConfig(**{"host_memory": 0, "paths": [folder], "subgroup_numel": 4096, **settings})


def adamw(folder: Path, net: torch.nn.Module | None = None, **settings: Any) -> offload.AdamW:
    return offload.AdamW((net or model()).parameters(), offload=config(folder, **settings))


def muon(net: torch.nn.Module, folder: Path, **settings: Any) -> offload.Muon:
    return offload.Muon(net.named_parameters(), offload=config(folder, **settings))


def wrapped(parameters: Any, folder: Path, **settings: Any) -> torch.optim.Optimizer:
    return offload.wrap(torch.optim.Adadelta, parameters, offload=config(folder, **settings))


def on_device(folder: Path, net: torch.nn.Module | None = None, **settings: Any) -> OnDevice:
    device, settings = SimulatedDevice(1 << 20), {"threads": 1, **settings}
    return OnDevice((net or model()).parameters(), device=device, offload=config(folder, **settings))


def engine(folder: Path, numel: int = 4096, **settings: Any) -> offload.Engine:
    parameter = offload.Parameter("w", numel, BF16, 0, 0, 4096, shape=(64, 64))
    return offload.Engine([parameter], config(folder, **settings), device=SimulatedDevice(1 << 20), rule=MUON)


def used(optimizer: Any, use: Callable[[Any], object]) -> None:
    with optimizer:
        use(optimizer)


def of(use: Callable[[Any, Any, Path], object], make: Callable[..., Any] = adamw, **settings: Any) -> Any:
    """Return what makes an optimizer of a model, and uses both."""
    return lambda folder: used(make(folder, net := model(), **settings), lambda o: use(o, net, folder))


def in_file(folder: Path) -> None:
    offload.weights_in_file(net := model(), folder)
    offload.weights_in_host_memory(net)


def pinned(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = fully_shard(model().to("meta"), offload_policy=CPUOffloadPolicy())
        offload.weights_in_file(sharded, folder)
    finally:
        dist.destroy_process_group()


def stepped(optimizer: Any, net: torch.nn.Module) -> None:
    with optimizer:
        net(torch.ones(2, 64)).sum().backward()
        optimizer.step()


def replays(folder: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(64))
    place, settings = torch.zeros(64), config(folder, keep_grads=False, gpu_memory=0)
    with OnDevice([weight], device=SimulatedDevice(1 << 20), offload=settings):
        for _ in range(2):
            Replayed.apply(weight, torch.ones(64), place).backward()


def captured(folder: Path) -> None:
    with on_device(folder) as optimizer:
        optimizer._holder.device.capturing = True  # type: ignore[attr-defined]
        optimizer.step()


def copies(folder: Path) -> None:
    """A stand-in for weights on a GPU, which `accelerator/copied_ranks.py` has."""
    net = model()
    optimizer = adamw(folder, net, overlap="backward")
    optimizer._route.needs_model_hook = True
    stepped(optimizer, net)


def clipped(folder: Path) -> None:
    with on_device(folder, keep_grads=False) as optimizer:
        shared.find_clipping_optimizer(
            [optimizer], SimpleNamespace(scaler=None), [optimizer.param_groups[0]["params"][0]], 2.0
        )


CASES: list[Case] = [
    ("WITHOUT_PATHS", lambda folder: offload.OffloadConfig(gradient_memory=0)),
    ("WITHOUT_PATHS", lambda folder: used(offload.AdamW((net := model()).parameters()), lambda o: kept(o, net))),
    ("MIRRORED_COPIES", lambda folder: offload.OffloadConfig(mirror=folder)),
    ("MIRRORED_COPIES", lambda folder: config(folder / "a", checkpoints_kept=0, mirror=folder)),
    ("NONE_KEPT", of(lambda o, _, folder: o.save_checkpoint(folder / "saved"), checkpoints_kept=0)),
    ("NONE_KEPT", of(lambda o, _, folder: o.commit_on_sigterm(folder / "saved"), checkpoints_kept=0)),
    ("UPDATES_IN_BACKWARD", lambda folder: config(folder, gradient_memory=0, overlap="backward")),
    ("UPDATES_IN_BACKWARD", lambda folder: config(folder, gradient_memory="auto", overlap="both")),
    ("BORROWED", lambda folder: config(folder, gpu_memory="borrow", overlap="forward")),
    ("BORROWED", of(lambda o, net, _: o.overlap_forward(net), on_device, gpu_memory="borrow")),
    ("BORROWED", of(lambda o, *_: o.engine.step([], pending=[], active=[]), on_device, gpu_memory="borrow")),
    ("NO_TURNS", lambda folder: config(folder, io_backend="asyncio", path_lock="on")),
    ("ENGINE_SHARDS", lambda folder: engine(folder, shard=True)),
    ("WEIGHTS_ON_CPU", lambda folder: adamw(folder, placement="gpu")),
    ("WEIGHTS_ON_CPU", lambda folder: adamw(folder, placement=0.5)),
    ("WEIGHTS_ON_CPU", lambda folder: adamw(folder, gpu_memory="1MiB")),
    ("WEIGHTS_ON_CPU", lambda folder: adamw(folder, gpu_memory="borrow")),
    ("SLOTS_ON_CPU", lambda folder: adamw(folder, keep_grads=False)),
    ("GRADIENTS_ON_PATHS", lambda folder: on_device(folder, gradient_memory=0, placement="gpu")),
    ("GRADIENTS_ON_PATHS", lambda folder: on_device(folder, gradient_memory=0, gpu_memory="borrow")),
    ("UPDATED_BY_CPU", lambda folder: engine(folder, placement="gpu")),
    ("UPDATED_BY_CPU", lambda folder: engine(folder, gpu_memory="1MiB")),
    ("TYPES_OF_ITS_OWN", lambda folder: wrapped(model().parameters(), folder, state_format="compact8")),
    ("GRADIENTS_BOUND", of(lambda o, *_: o.engine.gradients.bind(0, 4096, BF16), gradient_memory=0)),
    ("GRADIENTS_READ", of(lambda o, *_: o.engine.gradients.slot(0), gradient_memory=0)),
    ("CAPTURED", captured),
    ("GRAPHS_ACCUMULATE", replays),
    ("CLIPPED_APART", clipped),
    ("WHOLE_PARAMETERS", lambda folder: engine(folder, numel=64)),
    ("NO_MODEL", lambda folder: stepped(adamw(folder, net := model(), overlap="forward"), net)),
    ("SCRIPTED", of(lambda o, net, _: o.overlap_forward(torch.jit.script(net)))),
    ("COPIED_GRADIENTS", copies),
    ("NOT_REDUCED", of(lambda o, net, _: o.overlap_backward(net, comm_hook=print))),
    ("HOST_TAKEN", in_file),
    ("FILE_PINNED", pinned),
    ("HOST_LATE", of(lambda _, net, folder: offload.weights_in_host_memory(net))),
    ("FILE_LATE", of(lambda _, net, folder: offload.weights_in_file(net, folder))),
]


def kept(optimizer: Any, net: torch.nn.Module) -> None:
    with optimizer.activations_on_paths(net, host_memory="64MiB"):
        pass


def trainer(folder: Path) -> None:
    from transformers import Trainer

    from offload.integrations import transformers as backend

    backend.enable(config(folder))
    try:
        Trainer.train(SimpleNamespace(args=SimpleNamespace(optim="offload_adamw"), is_deepspeed_enabled=True))
    finally:
        backend.disable()


def saved_twice(folder: Path) -> None:
    from offload.integrations.transformers import saving

    trainer = torch.nn.Module()  # in the place of one that has an optimizer of ours
    callback = saving.Sigterm(trainer, find_optimizer=lambda _: object())
    callback.on_train_begin(SimpleNamespace(enable_jit_checkpoint=True), None, None)


def sharded_trainer(folder: Path) -> None:
    """A Trainer of FSDP1 whose optimizer is made."""
    from transformers import Trainer

    from offload.integrations import transformers as backend

    backend.enable(config(folder))
    plugin = SimpleNamespace(fsdp_version=1, cpu_offload=None)
    accelerator = SimpleNamespace(num_processes=1, state=SimpleNamespace(fsdp_plugin=plugin))
    args = SimpleNamespace(optim="offload_adamw")
    made = SimpleNamespace(is_fsdp_enabled=True, args=args, accelerator=accelerator, model=model())
    try:
        Trainer.create_optimizer(made)
    finally:
        backend.disable()


def accelerated(folder: Path, **accelerator: Any) -> None:
    from accelerate import Accelerator

    from offload.integrations.accelerate import enable

    with adamw(folder) as optimizer:
        enable(SimpleNamespace(distributed_type="FSDP", **accelerator), Accelerator(cpu=True).prepare(optimizer))


def gathered(folder: Path) -> None:
    plugin = SimpleNamespace(cpu_offload=CPUOffloadPolicy(), state_dict_type=StateDictType.FULL_STATE_DICT)
    accelerated(folder, is_fsdp2=True, num_processes=1, state=SimpleNamespace(fsdp_plugin=plugin))


def strategy(folder: Path) -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    from offload.integrations.lightning import OffloadCallback

    OffloadCallback().setup(SimpleNamespace(strategy=FSDPStrategy(), precision_plugin=None), None, "fit")


def written_behind(folder: Path) -> None:
    from lightning.pytorch.plugins import AsyncCheckpointIO
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from offload.integrations.lightning import OffloadCallback

    single = SingleDeviceStrategy("cpu", checkpoint_io=AsyncCheckpointIO())
    OffloadCallback().setup(SimpleNamespace(strategy=single, precision_plugin=None), None, "fit")


def averaged(folder: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from offload.integrations.lightning import OffloadCallback

    class Module(LightningModule):
        def configure_optimizers(self) -> Any:
            return adamw(folder, self, overlap="forward")

        def training_step(self, batch: Any) -> None: ...

    module = Module()
    module.layer = model()
    callbacks = [OffloadCallback(), StochasticWeightAveraging(1e-2)]
    Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=callbacks).fit(module, [0])


FRAMEWORKS: list[Case] = [
    ("BY_DEEPSPEED", accelerated),
    ("BY_DEEPSPEED", strategy),
    ("GATHERED_TO_SAVE", gathered),
    ("FSDP_TRAINER", sharded_trainer),
    ("DEEPSPEED_TRAINER", trainer),
    ("TWO_SAVES", saved_twice),
    ("WRITES_BEHIND", written_behind),
    ("AVERAGED", averaged),
]


def zero(folder: Path, others: dict[str, Any] | None = None, **settings: Any) -> Any:
    import deepspeed

    given = {"paths": [str(folder)], "host_memory": 0, **settings}
    whole = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "multi_tier_offload": given,
        **(others or {}),
    }
    return deepspeed.initialize(model=model(), config=whole)[0].optimizer


def other_layout(folder: Path) -> None:
    """Without an engine, which such a layout takes more ranks for."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    settings = {"multi_tier_offload": {}, "zero_optimization": {"stage": 3}}
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    DeepSpeedEngine._configure_optimizer(SimpleNamespace(config=settings, mpu=mpu), None, [])


IN_PLACE = {"layout": "in_place"}
APART = {"checkpoint": {"use_node_local_storage": True}}
WITH_DEEPSPEED: list[Case] = [
    ("NONE_KEPT", lambda folder: zero(folder, checkpoint=IN_PLACE, checkpoints_kept=0)),
    ("OTHER_PARALLELISM", other_layout),
    ("DEEPSPEED_KEEPS", lambda folder: zero(folder, keep_grads=False)),
    ("DEEPSPEED_DTYPE", lambda folder: zero(folder, gradient_dtype="float32")),
    ("DEEPSPEED_FORWARD", lambda folder: zero(folder).overlap_forward(model())),
    ("DEEPSPEED_MUON", lambda folder: zero(folder, {"optimizer": {"type": "Muon"}})),
    ("ZERO_1_REDUCES", lambda folder: zero(folder, overlap="backward")),
    ("SAVED_APART", lambda folder: zero(folder, APART, checkpoint=IN_PLACE)),
    ("SAVED_APART", lambda folder: zero(folder, APART, mirror="s3://bucket/copies")),
]
"""Asked for by `integrations/deepspeed_checks.py`, where DeepSpeed is imported."""
OF_MEGATRON = (
    "BUFFER",
    "GATHERS",
    "WHOLE",
    "FSDP",
    "WEIGHTS",
    "ROUNDED",
    "CHANGES",
    "MIRRORS",
    "REDUCES",
    "GRAPHS",
    "LOCAL",
)
IN_ITS_TESTS = {"IMAGES_OF_MAPPED", "SWAPPED_BY_DEEPSPEED", "VERL_CLIPS", "VERL_GENERATES"}
IN_ITS_TESTS.update(f"MEGATRON_{name}" for name in OF_MEGATRON)
"""In `test_weights_in_file.py`, `deepspeed_checks.py`, and `test_verl.py` and `test_megatron.py` of integrations."""


def fsdp1() -> torch.nn.Module:
    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"))


def sharded(kind: Any) -> list[torch.nn.Parameter]:
    mesh = init_device_mesh("cpu", (2,))
    return [torch.nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [kind]))]


def hooked(folder: Path) -> None:
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    with adamw(folder, ddp) as optimizer:
        optimizer.overlap_backward(ddp)


def reduced_by_python(folder: Path) -> None:
    ddp = DistributedDataParallel(model())
    ddp._use_python_reducer = True  # type: ignore[assignment]  # as torch._dynamo.config.optimize_ddp has it
    with adamw(folder, ddp) as optimizer:
        optimizer.overlap_backward(ddp)


def clips_alone(folder: Path) -> None:
    net = fsdp1()
    with adamw(folder, net) as optimizer:
        net(torch.ones(2, 64)).sum().backward()
        optimizer.clip_grad_norm_(1.0)


def dealt(folder: Path, use: Callable[[Any, Any], object]) -> None:
    net = fully_shard(model())
    with muon(net, folder) as optimizer:
        net(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        use(optimizer, net)


def stage(folder: Path) -> None:
    name = f"layers.{dist.get_rank()}.weight"
    offload.AdamW([(name, torch.nn.Parameter(torch.ones(64, 64)))], offload=config(folder, shard=True))


def made_alone(folder: Path, **settings: Any) -> None:
    """An optimizer that is made before there is a process group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    optimizer = adamw(folder, net := model(), **settings)
    store = f"file://{folder.parents[1]}/group-{folder.name}"  # of all ranks
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    stepped(optimizer, net)


def joined(folder: Path) -> None:
    ddp = DistributedDataParallel(model())
    with adamw(folder, ddp) as optimizer:
        optimizer.overlap_backward(ddp)
        with ddp.join(divide_by_initial_world_size=False):
            ddp(torch.ones(2, 64))


ON_RANKS: list[Case] = [
    ("REDUCED_LATER", lambda folder: adamw(folder, gradient_memory=0)),
    ("REDUCED_LATER", lambda folder: adamw(folder, keep_grads=False)),
    (
        "PIECES_ROUNDED",
        lambda folder: offload.AdamW(sharded(Shard(1)), offload=config(folder, state_format="compact8")),
    ),
    ("REPLICAS_OF_SOME", stage),
    ("SHARDED_TWICE", lambda folder: offload.AdamW(sharded(Shard(0)), offload=config(folder, shard=True))),
    ("WHOLE_PARAMETERS", lambda folder: wrapped(model().parameters(), folder, shard=True)),
    ("WHOLE_PARAMETERS", lambda folder: wrapped(sharded(Replicate()), folder)),
    ("DEALT_GRADIENTS", lambda folder: muon(fully_shard(model()), folder, gradient_memory=0)),
    ("DEALT_FORWARD", lambda folder: muon(fully_shard(model()), folder, overlap="forward")),
    ("DEALT_FORWARD", lambda folder: dealt(folder, lambda optimizer, net: optimizer.overlap_forward(net))),
    ("DEALT_STATE", lambda folder: dealt(folder, lambda optimizer, net: optimizer.state_dict())),
    ("FSDP1_BACKWARD", lambda folder: adamw(folder, fsdp1(), overlap="backward")),
    ("FSDP1_FORWARD", lambda folder: used(adamw(folder, net := fsdp1()), lambda o: o.overlap_forward(net))),
    ("FSDP1_CLIPS", clips_alone),
    (
        "FSDP1_MODEL",
        lambda folder: used(adamw(folder, net := fsdp1()), lambda o: o.save_checkpoint(folder / "c", model=net)),
    ),
    ("HOST_ALONE", lambda folder: offload.weights_in_host_memory(model())),
    ("HOOKED", hooked),
    ("COMPILED_REDUCTIONS", reduced_by_python),
    ("DIVIDED_BY_OTHERS", joined),
    ("MADE_ALONE", lambda folder: made_alone(folder, gradient_memory=0)),
    ("MADE_ALONE", lambda folder: made_alone(folder, shard=True)),
]


def pattern(advice: str) -> str:
    parts = Formatter().parse(advice)
    return "".join(re.escape(text) + ("" if word is None else ".+") for text, word, *_ in parts)


def ask(name: str, make: Callable[[Path], object], folder: Path) -> None:
    """Make a combination; its sentence comes, and, of a config or a new optimizer, before any file."""
    row, advice = TABLE[name], ""
    try:
        make(folder)
    except offload.ConfigError as error:
        advice = error.allowed
    assert re.fullmatch(pattern(row.advice), advice), name
    if row.known in (CONFIG, MADE):
        assert not [file for file in folder.rglob("*") if file.is_file()]


def ask_all(folder: Path, cases: Sequence[Case]) -> None:
    own = folder / str(dist.get_rank())
    for number, (name, make) in enumerate(cases):
        (own / str(number)).mkdir(parents=True)
        ask(name, make, own / str(number))


@on_ranks(2)
def test_what_ranks_exclude_is_refused(folder: Path) -> None:
    ask_all(folder, ON_RANKS)


@pytest.mark.parametrize(("name", "make"), CASES, ids=[name for name, _ in CASES])
def test_what_excludes_each_other_is_refused(name: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    ask(name, make, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), FRAMEWORKS, ids=[name for name, _ in FRAMEWORKS])
def test_what_frameworks_exclude_is_refused(name: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    ask(name, make, tmp_path)


def test_each_row_is_asked_for() -> None:
    asked = {name for name, _ in (*CASES, *FRAMEWORKS, *ON_RANKS, *WITH_DEEPSPEED)}
    assert not asked & IN_ITS_TESTS
    assert asked | IN_ITS_TESTS == {*TABLE}


def test_values_that_are_refused_are_those_that_pages_show() -> None:
    rows = [row for row in TABLE.values() if row.values]
    assert rows
    assert all(", ".join(f'"{value}"' for value in row.values) in row.one for row in rows)


VALUES = {
    "--overlap | leave it out: with --tokens a plan shows an iteration with the step hidden in each way",
    'placement | use "auto", "cpu", "gpu", or a share of GPU updates from 0 to 1',
    'placement | use "auto", "cpu", "gpu", a share from 0 to 1, or "stride:<k>"',
    'placement | give a stride of 1 or more, as in "stride:3"',
    "mirror | name a directory or s3://bucket/prefix, or none for no mirror",
    "mirror | name a place outside of {}, on another device",
    'subgroup_numel | use at least {} elements, as state_format "{}" of {} needs',
    "eps | with state_format compact8 it divides zeros; give one above 1e-45",
}
"""What is wrong with one value, beside what `parse_bytes` and the like say."""

PARSED = re.compile(
    r"\w+ \| (use \{\}|use true or false|"
    r"give an integer .*|give bytes .*|give it a unit.*|a small \"b\".*|write .*B\" \(powers of 1000\)|"
    r"\{\} is \{\}, and a budget is 0 or at least .*)"
)


def test_no_combination_is_refused_elsewhere() -> None:
    """What is combined are settings that rows name, and calls; no other error names one, or tells to change it."""
    words = {word for row in TABLE.values() for word in re.findall(r"`(\w+)`", f"{row.one} {row.other}")}
    calls = {"overlap_forward", "overlap_backward"}
    settings = words & {field.name for field in dataclasses.fields(offload.OffloadConfig)} - {"paths"} | calls
    named = re.compile(rf"\b({'|'.join(settings - {'shard', 'mirror', 'gradient_dtype'})}|FSDP1|DDP)\b")
    found = set()
    for package in errors.PACKAGES:
        for file in (errors.ROOT / package).rglob("*.py"):
            module = errors.Module(ast.parse(file.read_text()))
            for node in module.nodes:
                if isinstance(node, ast.Call) and errors.name_of(node.func) == "ConfigError":
                    fields, advice = (errors.texts(node.args[at], module) for at in (0, 2))
                    found |= {f"{field} | {text}" for field in fields for text in advice}
    refused = {line for line in found if {*re.split("[., ]+", line.split(" | ")[0])} & settings or named.search(line)}
    assert {line for line in refused if not PARSED.fullmatch(line)} == VALUES
