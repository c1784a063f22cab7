"""Small trainings under DeepSpeed, with our backend and without it, for checks that run inside worker processes.

Stock DeepSpeed is given an optimizer that computes what `loop.py` says, so everything else being equal (reductions,
norms, clipping, loss scale, schedules) the two agree bit for bit.

    python deepspeed_runs.py FOLDER STEPS [resume] [mirror=DIR] [checkpoint=JSON]

As a program it trains one in ranks, saves every second step, keeps two tags, and prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dying
import torch
from small import digest, options, say

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import offload.integrations.deepspeed as offload_deepspeed

sys.path += [str(Path(__file__).parents[1] / name) for name in ("", "e2e")]
from loop import RULES, updated

# DeepSpeed would compile its shared-memory collectives at first use.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
get_accelerator().is_fp16_supported = lambda: True
deepspeed.utils.logger.setLevel("ERROR")


class Reference(torch.optim.Optimizer):
    """The updates that `loop.updated` defines, as an optimizer for stock DeepSpeed."""

    def __init__(self, params: Any, rule: str = "adamw", **settings: Any) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
        self.rule = rule
        super().__init__(params, {**defaults, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for master in (p for p in group["params"] if p.grad is not None):
                state, names = self.state[master], RULES[self.rule][1]
                if not state:
                    state.update(step=0, **{name: torch.zeros_like(master) for name in names})
                state["step"] = int(state["step"]) + 1
                kept = master.data, *(state[name] for name in names)
                after = updated(self.rule, group, state["step"], master.grad, *kept).values()
                for tensor, new in zip(kept, after, strict=True):
                    tensor.copy_(new)


class Net(torch.nn.Module):
    """Linear layers of odd sizes, an embedding that is tied to the last of them, and what a case asks for.

    Args:
        recompute: Recompute activations in backward.
        branch: Have a layer that is used in even steps only.
        tied: Tie the embedding to the head.
    """

    def __init__(self, *, recompute: bool = False, branch: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = torch.nn.Embedding(37, 30)
        self.body = torch.nn.ModuleList([torch.nn.Linear(30, 51), torch.nn.Linear(51, 30)])
        self.branch = torch.nn.Linear(30, 30) if branch else None
        self.head = torch.nn.Linear(30, 37, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self.body[1](torch.tanh(self.body[0](x))) + x

    def forward(self, tokens: torch.Tensor, step: int = 0) -> torch.Tensor:
        x = self.embed(tokens)
        run = self._run
        x = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if self.recompute else run(x)
        if self.branch is not None and step % 2 == 0:
            x = x + self.branch(x)
        return torch.nn.functional.cross_entropy(self.head(x).float().view(-1, 37), tokens.roll(1, -1).view(-1))

    def batch(self, draws: torch.Generator) -> torch.Tensor:
        return torch.randint(0, 37, (2, 9), generator=draws)


class Given(torch.nn.Module):
    """Weights whose gradients are drawn from the step's number alone: exact on every device."""

    SIZES = ((700, 400), (300_000,), (17,), (250, 1000), (4096,))

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList(torch.randn(size, generator=draws) for size in self.SIZES)

    def forward(self, step: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(1000 + step)
        total = torch.zeros((), device=self.weights[0].device)
        for weight, size in zip(self.weights, self.SIZES, strict=True):
            given = torch.randn(size, generator=draws).to(weight.device, weight.dtype)
            total = total + (weight * given).float().sum()
        return total


class Deep(torch.nn.Module):
    """Layers whose gradients come one after the other, and no piece of which begins amid a block of 64 elements."""

    WIDTH = 96

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(5)])

    def forward(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()

    def batch(self, draws: torch.Generator) -> torch.Tensor:
        return torch.randn((4, self.WIDTH), generator=draws).to(self.layers[0].weight.dtype)


@dataclass
class Case:
    """One training.

    Attributes:
        stage: ZeRO stage.
        dtype: "bf16", "fp16" or "fp32".
        accumulation: Micro-steps of a step.
        clip: Largest norm; 0 for none.
        steps: Number of steps.
        offload: Our object of the config.
        config: More of the config, merged at the top.
        zero: More of `zero_optimization`.
        net: Arguments of `Net`.
        groups: Makes parameter groups from a model; None for one group.
        freeze: Makes a parameter frozen by name.
        scale: What the loss is multiplied by (to provoke overflows).
    """

    stage: int = 3
    dtype: str = "bf16"
    accumulation: int = 1
    clip: float = 0.3
    steps: int = 6
    offload: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    net: dict[str, Any] = field(default_factory=dict)
    groups: Callable[[torch.nn.Module], list[dict[str, Any]]] | None = None
    freeze: str = ""
    scale: float = 1.0

    def ds_config(self) -> dict[str, Any]:
        """Return the DeepSpeed config without optimizer or our object."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "steps_per_print": 10**9,
            "zero_optimization": {
                "stage": self.stage,
                "offload_optimizer": {"device": "cpu"},
                "sub_group_size": 2000,
                "reduce_bucket_size": 4000,
                "stage3_param_persistence_threshold": 64,
                **self.zero,
            },
        }
        if self.dtype == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}
        elif self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        return {**config, **self.config}

    def model(self) -> Net:
        """Return the model, the same on every rank."""
        torch.manual_seed(0)
        net = Net(**self.net)
        for name, parameter in net.named_parameters():
            if self.freeze and name.startswith(self.freeze):
                parameter.requires_grad_(False)
        return net


ADAM = {"lr": 3e-3, "weight_decay": 0.1}


@contextlib.contextmanager
def training(case: Case, *, ours: bool = True, optimizer: Any = None, model: Any = None) -> Iterator[Any]:
    """Yield a DeepSpeed engine for a case.

    Args:
        case: What to train.
        ours: Whether state is offloaded; otherwise it is stock DeepSpeed with the reference's arithmetic.
        optimizer: Makes a client's optimizer from the trainable parameters (or groups); None for the config's.
        model: What to train instead of the case's.
    """
    config = case.ds_config()
    model = case.model() if model is None else model
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if case.groups is not None:
        parameters = case.groups(model)
    client = None
    if optimizer is not None and ours:
        client = optimizer(parameters)
    elif ours:
        config.setdefault("optimizer", {"type": "AdamW", "params": dict(ADAM)})
    else:
        client = Reference(parameters, **ADAM) if optimizer is None else optimizer(parameters)
        config["zero_force_ds_cpu_optimizer"] = False
        config["zero_allow_untested_optimizer"] = True
    if ours:
        config["multi_tier_offload"] = {"host_memory": 0, "subgroup_numel": 1024, "threads": 1, **case.offload}
    engine, *_ = offload_deepspeed.initialize(
        model=model, model_parameters=parameters if client is None else None, optimizer=client, config=config
    )
    try:
        yield engine
    finally:
        engine.destroy()


def micro_batch(engine: Any, step: int, micro: int) -> torch.Tensor:
    """Return what the model is given, which depends on step, micro-step and rank only."""
    drawn = engine.module.batch(torch.Generator().manual_seed(1000 * step + 10 * micro + engine.global_rank))
    if engine.device.type == "cpu":
        return drawn
    return drawn.pin_memory().to(engine.device, non_blocking=True)  # else the host would wait for the accelerator


def train(engine: Any, case: Case, first: int = 0, steps: int | None = None) -> list[tuple[Any, ...]]:
    """Train and return (loss, norm, rates, loss scale, skipped steps) of each step."""
    seen = []
    for step in range(first, first + (case.steps if steps is None else steps)):
        for micro in range(case.accumulation):
            loss = engine(micro_batch(engine, step, micro), step) * case.scale
            engine.backward(loss)
            engine.step()
        norm = engine.get_global_grad_norm()
        scale = getattr(engine.optimizer, "loss_scale", 1.0)
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        norm = float(norm if norm is not None else 0)
        seen.append((loss.detach(), norm, rates, float(scale), engine.skipped_steps))
    return [(loss.item(), *others) for loss, *others in seen]  # not before: nothing is to wait for an accelerator


MOMENTS = ("exp_avg", "exp_avg_sq")


def state_of(engine: Any, moments: Sequence[str] = MOMENTS) -> dict[str, torch.Tensor]:
    """Return weights, masters and moments by name, on the CPU; the same on every rank."""
    found: dict[str, torch.Tensor] = {}
    # Stock ZeRO-1 and 2 do not find the moments of a second parameter group.
    stock = "Offloaded" not in type(engine.optimizer).__name__
    if not stock:
        engine.optimizer.finish()
    readable = not (stock and engine.zero_optimization_stage() < 3 and len(engine.optimizer.param_groups) > 1)
    for name, parameter in engine.module.named_parameters():
        gathered = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(gathered):
            found[f"{name} weight"] = parameter.detach().to("cpu", copy=True)
        if parameter.requires_grad:
            found[f"{name} master"] = safe_get_full_fp32_param(parameter).to("cpu", copy=True)
            for key in moments if readable else ():
                found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).to("cpu", copy=True)
    return found


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Check that states are equal to the last bit."""
    assert mine.keys() >= theirs.keys()
    different = [name for name in theirs if not torch.equal(mine[name], theirs[name])]
    assert not different, f"different: {different}"


Seen = tuple[list[Any], dict[str, torch.Tensor]]
"""What can be seen of each step, and the last state."""


def trained(
    engine: Any, case: Case, first: int = 0, steps: int | None = None, moments: Sequence[str] = MOMENTS
) -> Seen:
    """Train; see `train` and `state_of`."""
    return train(engine, case, first, steps), state_of(engine, moments)


def assert_same_runs(expected: Seen, *others: Seen) -> None:
    """Check that trainings have gone the same way, to the last bit."""
    for steps, state in others:
        for step, (mine, theirs) in enumerate(zip(steps, expected[0], strict=True)):
            assert mine == theirs, f"step {step}: {mine} is not {theirs}"
        assert_same(state, expected[1])


def assert_equals_stock(
    case: Case, act: Callable[[Any], Any] | None = None, model: Callable[[], Any] | None = None
) -> list[Any]:
    """Do the same with and without us; everything that can be seen must be the same.

    Args:
        case: What to train.
        act: Does it, and returns what is to be compared beside the state; None to train.
        model: Makes what to train instead of the case's.
    """
    seen: list[Seen] = []
    try:
        for ours in (False, True):
            with training(case, ours=ours, model=model and model()) as engine:
                steps = train(engine, case) if act is None else act(engine)
                seen.append((steps or [], state_of(engine)))
        assert_same_runs(*seen)
    except Exception as error:
        error.add_note(f"of {case}")
        raise
    return seen[1][0]


def main(folder: Path, steps: int, told: dict[str, Any]) -> None:
    path, tags = folder / "path", folder / "tags"
    path.mkdir(exist_ok=True, parents=True)
    settings = {"commit_on_sigterm": str(tags), **told.get("checkpoint", {})}
    config = {"paths": [str(path)], "mirror": told.get("mirror"), "checkpoint": settings}
    case = Case(2, offload=config)
    deepspeed.init_distributed("gloo", verbose=False)
    with training(case) as engine:
        if "resume" in told:
            engine.load_checkpoint(str(tags))
        found = []
        for step in range(engine.global_steps, steps):
            dying.step(step)
            found += train(engine, case, step, 1)
            if step % 2 == 1:
                engine.save_checkpoint(str(tags))
                delete_old(tags, engine.global_rank)
        weights = state_of(engine)
        engine.optimizer.wait_checkpoint()
        engine.optimizer.shard.engine.checkpoints.wait_mirror()
        dying.end(engine.optimizer.metrics())
    say(losses=[(loss, norm) for loss, norm, *_ in found], weights=digest(map(weights.get, sorted(weights))))
    torch.distributed.destroy_process_group()


def delete_old(tags: Path, rank: int) -> None:
    """Delete what is older than the tag that `latest` names and the one before that."""
    if rank == 0 and (tags / "latest").exists():
        last = int((tags / "latest").read_text().removeprefix("global_step"))
        numbers = sorted(int(path.name.removeprefix("global_step")) for path in tags.glob("global_step*"))
        for number in [number for number in numbers if number < last][:-1]:
            shutil.rmtree(tags / f"global_step{number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), options(sys.argv[3:]))
