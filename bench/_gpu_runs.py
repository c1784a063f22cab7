"""The contenders of `bench/gpu.py`'s training section: each in a process of its own, on the same model and batches.

A contender is started with `python _gpu_runs.py NAME SPECIFICATION` and prints one line of JSON. What keeps one from
running, a package that is missing or memory that is not there, is its answer too.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _common  # first of all, so that `deepspeed` is the package, not the benchmark of that name
import torch
from _worker import SETTINGS, alone, memory

from offload.units import format_seconds

PEERS = ("torchao", "deepspeed-zero3", "deepspeed-zero2", "deepspeed-twinflow", "deepspeed-superoffload")


class NotRun(Exception):
    """A contender that cannot run here; the message says why."""


@dataclass(frozen=True)
class Specification:
    """What all contenders do.

    Attributes:
        params: Parameters of the model, about.
        batch, seq: Sequences of an iteration, and their tokens.
        warm_up, iterations: Iterations before the first that counts, and those that do.
        device: Where torch has the weights: "cuda" or "cpu".
        folder: Where state on disk goes.
        rates: A rates file for ours, or "auto".
        clip: The norm that gradients are clipped to.
    """

    params: float
    batch: int
    seq: int
    warm_up: int
    iterations: int
    device: str
    folder: str
    rates: str = "auto"
    clip: float = 1.0


@dataclass
class Contender:
    """What differs between contenders: how a loss becomes gradients, and gradients new weights.

    Attributes:
        model: What computes the loss.
        backward: Takes the loss.
        step: Updates the weights and forgets the gradients.
        close: At the end.
        details: What it says of itself, once it has run.
    """

    model: Any
    backward: Callable[[torch.Tensor], None]
    step: Callable[[], None]
    close: Callable[[], None] = lambda: None
    details: Callable[[], dict[str, float]] = dict


def in_memory(model: Any, spec: Specification) -> Contender:
    weights = list(model.parameters())
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, fused=True, **SETTINGS)

    @torch.no_grad()
    def step() -> None:
        for master, weight in zip(masters, weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, spec.clip)
        optimizer.step()
        for master, weight in zip(masters, weights, strict=True):
            weight.copy_(master)
            master.grad = None

    return Contender(model, torch.Tensor.backward, step)


def offloaded(model: Any, spec: Specification, **config: Any) -> Contender:
    import offload

    config["rates"], _ = fitting_rates(spec.rates, config.get("paths", ()))
    if spec.device != "cpu":
        config |= {"keep_grads": False, "gpu_memory": 0}  # all state lies where the contender says
    try:
        optimizer = offload.AdamW(model.parameters(), offload=offload.OffloadConfig(**config), **SETTINGS)
    except offload.ConfigError as error:
        raise NotRun(f"offload.AdamW: {error}") from error

    def step() -> None:
        optimizer.clip_grad_norm_(spec.clip)
        optimizer.step()
        optimizer.zero_grad()

    def details() -> dict[str, float]:
        plan = optimizer.plan.plan
        return told(optimizer.metrics(), plan) | {"planned_host_bytes": plan.host_bytes}

    return Contender(model, torch.Tensor.backward, step, optimizer.close, details)


def fitting_rates(file: str, paths: Sequence[str] = ()) -> tuple[str, str]:
    """Return a rates file as `OffloadConfig.rates` takes it, or "auto" where it does not fit, with the reason."""
    from offload import ConfigError
    from offload.formats import EXACT
    from offload.measure.rates_file import session_rates

    if file == "auto":
        return file, ""
    try:
        session_rates(file, [str(path) for path in paths], _common.cores(), {EXACT: 1})
    except ConfigError as error:
        return "auto", str(error)
    return file, ""


def told(metrics: dict[str, float], plan: Any) -> dict[str, float]:
    """Return what ours say of their steps."""
    names = ("step_s", "predicted_step_s", "resident_share")
    return {name: metrics[name] for name in names if name in metrics} | {"gpu_share": gpu_share(plan)}


def gpu_share(plan: Any) -> float:
    """Return the share of a plan's elements that the GPU updates."""
    subgroups = plan.layout.subgroups
    total = sum(subgroup.numel for subgroup in subgroups)
    return sum(s.numel for s in subgroups if plan.updates_on_gpu(s.index)) / total if total else 0.0


def torchao(model: Any, spec: Specification) -> Contender:
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError as error:
        raise NotRun(f"torchao: {error}") from error
    if spec.device == "cpu":
        raise NotRun("torchao: its CPUOffloadOptimizer needs a GPU")
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **SETTINGS)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Contender(model, torch.Tensor.backward, step)


def deepspeed(
    model: Any,
    spec: Specification,
    *,
    stage: int = 3,
    ours: dict[str, Any] | None = None,
    zenflow: dict[str, Any] | None = None,
    **kind: Any,
) -> Contender:
    """Train under DeepSpeed.

    Args:
        model: What is trained.
        spec: What all contenders do.
        stage: Of ZeRO.
        ours: What our backend's object in the config says besides its rates; None for stock.
        zenflow: DeepSpeed's object of that name.
        kind: What `offload_optimizer` says besides.
    """
    if spec.device == "cpu":
        raise NotRun("deepspeed: compared on a GPU only, where its offload is meant to run")
    alone()
    try:
        import deepspeed as package
    except ImportError as error:
        raise NotRun(f"deepspeed: {error}") from error
    settings: dict[str, Any] = {
        "train_batch_size": spec.batch,
        "train_micro_batch_size_per_gpu": spec.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": spec.clip,
        "optimizer": {"type": "AdamW", "params": {**SETTINGS, "betas": list(SETTINGS["betas"])}},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, **kind},
            **({"zenflow": zenflow} if zenflow else {}),
        },
        "steps_per_print": 10**9,
    }
    if ours is not None:
        from offload.integrations.deepspeed import enable

        settings["multi_tier_offload"] = {"rates": fitting_rates(spec.rates)[0], **ours}
        enable()
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def details() -> dict[str, float]:
        return {} if ours is None else told(engine.optimizer.metrics(), engine.optimizer.plan)

    return Contender(engine, engine.backward, engine.step, engine.destroy, details)


MAKERS: dict[str, Callable[[Any, Specification], Contender]] = {
    # torch.optim.AdamW(fused=True) on fp32 masters, weights cast from them.
    "in-memory": in_memory,
    "offload-host": offloaded,
    "offload-disk": lambda model, spec: offloaded(
        model, spec, host_memory=0, paths=[tempfile.mkdtemp(dir=spec.folder)]
    ),
    # The planner's share of updates on the GPU, but for "half".
    "offload-deepspeed": lambda model, spec: deepspeed(model, spec, ours={}),
    "offload-deepspeed-half": lambda model, spec: deepspeed(model, spec, ours={"placement": 0.5}),
    "offload-deepspeed-zero2": lambda model, spec: deepspeed(model, spec, stage=2, ours={}),
    "offload-deepspeed-zero1": lambda model, spec: deepspeed(model, spec, stage=1, ours={}),
    # Its masters are the bf16 weights and its moments are bf16; it does not clip.
    "torchao": torchao,
    "deepspeed-zero3": deepspeed,
    "deepspeed-zero2": lambda model, spec: deepspeed(model, spec, stage=2),
    "deepspeed-twinflow": lambda model, spec: deepspeed(model, spec, ratio=0.5),
    "deepspeed-superoffload": lambda model, spec: deepspeed(model, spec, super_offload=True),
    # What its documentation begins with: all but the largest gradients are applied every fourth step. Compared with
    # nobody.
    "deepspeed-zenflow": lambda model, spec: deepspeed(
        model, spec, stage=2, zenflow={"topk_ratio": 0.1, "update_interval": 4, "overlap_step": True}
    ),
}


CONTENDERS = tuple(MAKERS)


def train(name: str, spec: Specification) -> dict[str, Any]:
    """Run one contender; return losses, times, memory and a digest of the weights."""
    from offload.cli.model import build_model, choose_shape
    from offload.cli.text import VOCABULARY

    shape = choose_shape(int(spec.params))
    model = build_model(shape, seq=spec.seq, dtype=torch.bfloat16, device=spec.device, seed=0)
    numel = sum(parameter.numel() for parameter in model.parameters())
    weights = dict(model.named_parameters())
    if spec.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    contender = MAKERS[name](model, spec)
    losses, ends_s = [], []
    for number in range(spec.warm_up + spec.iterations):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (spec.batch, spec.seq), generator=generator).to(spec.device)
        loss = contender.model(input_ids=tokens, labels=tokens).loss
        contender.backward(loss)
        contender.step()
        losses.append(float(loss.detach()))  # waits for all that the next forward pass would wait for
        if number + 1 >= spec.warm_up:
            ends_s.append(time.perf_counter())
    found: dict[str, Any] = {
        "parameters": numel,
        "losses": losses,
        "iteration_s": [after - before for before, after in itertools.pairwise(ends_s)],
        "peak_gpu_bytes": 0 if spec.device == "cpu" else torch.cuda.max_memory_allocated(),
        "peak_gpu_reserved_bytes": 0 if spec.device == "cpu" else torch.cuda.max_memory_reserved(),
        "peak_host_bytes": memory()["peak_bytes"],
        "details": contender.details(),
    }
    if "deepspeed" not in name:  # ZeRO-3 leaves no weights in the model between steps
        found["weights"] = digest(weights.values())
    contender.close()
    return found


@torch.no_grad()
def digest(tensors: Any) -> str:
    """Return a checksum of 16-bit tensors, made where they lie."""
    total = 0
    for number, tensor in enumerate(tensors):
        for first in range(0, tensor.numel(), 1 << 24):
            bits = tensor.reshape(-1)[first : first + (1 << 24)].view(torch.int16).to(torch.int64)
            place = torch.arange(first, first + bits.numel(), device=bits.device)
            total = (31 * total + number + int((bits * (2 * place + 1)).sum())) % (1 << 64)
    return f"{total:016x}"


def run_contender(name: str, spec: Specification, limit_s: float) -> dict[str, Any]:
    """Run a contender in a process of its own; what it cannot do is under "not_run"."""
    command = [sys.executable, str(Path(__file__).resolve()), name, json.dumps(asdict(spec))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            env=environment,
            preexec_fn=_common.end_with_parent,
        )
    except subprocess.TimeoutExpired:
        return {"not_run": f"not done after {format_seconds(limit_s)}"}
    if done.returncode:
        said = done.stderr.strip().splitlines()
        reason = f"failed with status {done.returncode}: {said[-1] if said else 'without a word'}"
        return {"not_run": reason, "log": done.stderr[-4000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def iteration_s(found: dict[str, Any]) -> float:
    """Return the median iteration of a run."""
    return statistics.median(found["iteration_s"])


def main() -> None:
    """Be one contender."""
    name, spec = sys.argv[1], Specification(**json.loads(sys.argv[2]))
    try:
        found = train(name, spec)
    except NotRun as error:
        found = {"not_run": str(error)}
    except torch.OutOfMemoryError as error:
        gc.collect()
        found = {"not_run": f"does not fit: {str(error).splitlines()[0]}"}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
