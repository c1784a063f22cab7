"""Wrong numbers that users of other offloading optimizers have reported: each recipe here is wrong, and we are not.

`docs/wrong-numbers.md` has the reports, and the test of each. A recipe is ours: the few lines that a report is about,
or `Recipe` with one method changed. No code of others runs here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import same_bits
from simulated import OnDevice
from test_checkpoint_ranks import WHOLE, joined, shards
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from world import SimulatedDevice

import offload
from offload.checkpoint.reader import Checkpoint

LR, NUMEL = 1e-2, 5000
ROUNDING = 1e-5
"""Our AdamW and torch's round in other orders: how far apart they may be, as a part of how far weights have moved."""
WRONG = 1e-2
"""A recipe that is further than this from torch's is wrong, and not rounded."""


class Recipe:
    """The loop that most offloading optimizers are: fp32 copies in host memory, torch's optimizer over them, and what
    is copied to and fro. As it stands it is right.
    """

    def __init__(self, *parameters: torch.nn.Parameter, lr: float = LR, **settings: Any) -> None:
        self.parameters = parameters
        self.masters = [parameter.detach().float().clone() for parameter in parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=lr, **settings)

    def take_gradients(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def step(self) -> None:
        self.take_gradients()
        self.inner.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
            parameter.grad = None


def weight(
    dtype: torch.dtype = torch.float32, seed: int = 0, shape: tuple[int, ...] = (NUMEL,)
) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def drawn(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 + seed)).to(parameter.dtype)


def backward(parameter: torch.Tensor, seed: int) -> None:
    torch.autograd.backward([parameter], [drawn(parameter, seed)])


def ours(parameter: torch.nn.Parameter, config: offload.OffloadConfig, **settings: Any) -> offload.AdamW:
    return offload.AdamW([("weight", parameter)], **{"lr": LR, "offload": config, **settings})


def train(optimizer: Any, parameter: torch.nn.Parameter, steps: range) -> None:
    for step in steps:
        backward(parameter, step)
        optimizer.step()
        parameter.grad = None


def distance(left: torch.Tensor, right: torch.Tensor, start: torch.Tensor) -> float:
    """Return how far two weights are apart, as a part of how far one has moved."""
    left, right, start = (tensor.detach().double() for tensor in (left, right, start))
    return float((left - right).norm() / (right - start).norm())


# Resuming


def test_weights_that_are_loaded_after_the_optimizer_was_made_are_trained(streaming: Any) -> None:
    """Copies made with the optimizer are older than the weights that are loaded then, and overwrite them."""
    loaded = weight(torch.bfloat16, seed=1).detach()

    def started(make: Callable[[torch.nn.Parameter], Any]) -> torch.nn.Parameter:
        parameter = weight(torch.bfloat16)
        optimizer = make(parameter)
        with torch.no_grad():
            parameter.copy_(loaded)
        train(optimizer, parameter, range(1))
        return parameter

    stale, kept = started(Recipe), started(lambda parameter: ours(parameter, streaming()))
    assert (stale - loaded).abs().mean() > 0.5
    right = torch.nn.Parameter(loaded.clone())
    with ours(right, streaming()) as optimizer:
        train(optimizer, right, range(1))
    assert same_bits(kept.detach(), right.detach())
    assert 0 < float((kept.detach() - loaded).abs().max()) < 0.1


LOST = {
    "the step count": WRONG,
    "the moments": WRONG,
    "the settings": WRONG,
    "the masters": 0.0,
    "the precision of moments": 0.0,
}
"""What recipes leave behind in a checkpoint, and how wrong the next steps are at least."""


@pytest.mark.parametrize("lost", LOST)
def test_a_resume_brings_back(lost: str, streaming: Any, tmp_path: Path) -> None:
    def made(parameter: torch.nn.Parameter) -> Recipe:
        return Recipe(parameter, betas=(0.8, 0.95))

    straight, parameter = weight(torch.bfloat16), weight(torch.bfloat16)
    right, recipe = made(straight), made(parameter)
    for each, of in ((right, straight), (recipe, parameter)):
        train(each, of, range(4))
        each.inner.param_groups[0]["lr"] = LR / 4
    start = right.masters[0].clone()
    resumed = made(parameter)  # whose weights are those of the checkpoint
    entry, (master,) = recipe.inner.state[recipe.masters[0]], resumed.masters
    if lost != "the masters":
        master.copy_(recipe.masters[0])
    if lost != "the moments":
        own = {name: value.clone() for name, value in entry.items()}
        own["step"] = torch.tensor(0.0) if lost == "the step count" else own["step"]
        if lost == "the precision of moments":  # cast to the weight's type, as torch's load_state_dict does
            own |= {name: own[name].bfloat16().float() for name in ("exp_avg", "exp_avg_sq")}
        resumed.inner.state[master] = own
    if lost != "the settings":
        resumed.inner.param_groups[0]["lr"] = LR / 4
    train(right, straight, range(4, 6))
    train(resumed, parameter, range(4, 6))
    assert distance(master, right.masters[0], start) > LOST[lost]

    straight, parameter = weight(torch.bfloat16), weight(torch.bfloat16)
    with ours(straight, streaming(), betas=(0.8, 0.95)) as optimizer:
        train(optimizer, straight, range(4))
        optimizer.param_groups[0]["lr"] = LR / 4
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        train(optimizer, straight, range(4, 6))
        expected = optimizer.state_for(straight)
    with ours(parameter, streaming()) as optimizer:
        optimizer.load_checkpoint(tmp_path / "ck")
        assert optimizer.param_groups[0]["lr"] == LR / 4
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
        train(optimizer, parameter, range(4, 6))
        assert all(map(same_bits, optimizer.state_for(parameter).values(), expected.values()))
    assert same_bits(parameter.detach(), straight.detach())


def test_shards_are_not_taken_for_the_whole(tmp_path: Path) -> None:
    """State that does not say which piece it is has one name on all ranks, and one of them is loaded by all."""
    cuts = [0, 3333, WHOLE]
    ranks = shards(cuts)
    for rank in ranks:
        rank.step()
    saved: dict[str, torch.Tensor] = {}
    for rank in ranks:
        saved["weight.exp_avg"] = rank.state()[2]
    assert not torch.equal(saved["weight.exp_avg"][:3333], ranks[0].state()[2])  # what the first rank loads

    id = uuid.uuid4().hex
    for number, rank in enumerate(ranks):
        rank.engine.checkpoints.save(offload.SaveRequest(tmp_path / "ck", id=id, rank=number, ranks=2))
    for rank in ranks:
        rank.engine.checkpoints.wait(60)
        rank.step()
    resumed = shards([0, WHOLE])
    with Checkpoint(tmp_path / "ck") as checkpoint:
        resumed[0].engine.checkpoints.load(checkpoint)
    resumed[0].step()
    assert all(map(same_bits, joined(resumed), joined(ranks)))
    for rank in (*ranks, *resumed):
        rank.engine.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_asking_for_state_changes_no_update(streaming: Any) -> None:
    """State that is made by a step of rate 0 without gradients has counted a step."""

    def stepped(asks: bool, kind: str) -> torch.Tensor:
        parameter = weight()
        module = torch.nn.Module()
        module.weight = parameter
        if kind == "ours":
            optimizer: Any = ours(parameter, streaming())
            if asks:
                get_optimizer_state_dict(module, optimizer)
        else:
            optimizer = Recipe(parameter)
            if asks:
                parameter.grad, optimizer.inner.param_groups[0]["lr"] = torch.zeros_like(parameter), 0.0
                optimizer.step()
                optimizer.inner.param_groups[0]["lr"] = LR
        train(optimizer, parameter, range(1))
        return parameter.detach()

    asked, right = stepped(True, "recipe"), stepped(False, "recipe")
    assert distance(asked, right, weight()) > WRONG
    assert same_bits(stepped(True, "ours"), stepped(False, "ours"))


# Gradients


@pytest.mark.parametrize("kept", ["first", "last"])
@pytest.mark.parametrize("gradients", [{}, {"gradient_memory": 0}], ids=["in memory", "on paths"])
def test_all_micro_steps_count(kept: str, gradients: dict[str, Any], streaming: Any) -> None:
    """The buffer that gradients are sent to is filled by one micro-step alone: the first, or the last."""

    class OfOneMicroStep(Recipe):
        def take_gradients(self) -> None:
            (self.masters[0].grad,) = sent

    start, passes, sent = weight(), range(3), [torch.zeros(NUMEL)]
    right, wrong, offloaded = (weight() for _ in range(3))
    recipe, broken = Recipe(right), OfOneMicroStep(wrong)
    with ours(offloaded, streaming(**gradients)) as optimizer:
        for step in range(2):
            for number in passes:
                seed = 10 * step + number
                for parameter in (right, offloaded):
                    backward(parameter, seed)
                if number == (0 if kept == "first" else passes[-1]):
                    sent[0].copy_(drawn(wrong, seed))
            for each in (recipe, broken, optimizer):
                each.step()
            offloaded.grad = None
    assert distance(wrong, right, start) > WRONG
    assert distance(offloaded, right, start) < ROUNDING


def test_a_parameter_without_a_gradient_is_left_alone(streaming: Any) -> None:
    """A copy keeps the gradient of the step before, as nobody takes it away, and is updated by it again."""

    class KeepsGradients(Recipe):
        def take_gradients(self) -> None:
            if self.parameters[0].grad is not None:
                super().take_gradients()

    parameter = weight()
    recipe = KeepsGradients(parameter)
    train(recipe, parameter, range(1))
    before = parameter.detach().clone()
    recipe.step()
    assert not torch.equal(parameter, before)

    parameter = weight()
    with ours(parameter, streaming()) as optimizer:
        train(optimizer, parameter, range(1))
        before, state = parameter.detach().clone(), optimizer.state_for(parameter)
        optimizer.step()
        assert same_bits(parameter.detach(), before)
        assert all(map(same_bits, optimizer.state_for(parameter).values(), state.values()))


def test_clipping_goes_by_gradients_as_they_are(streaming: Any) -> None:
    """The norm was taken when gradients were sent, and they have been changed since."""
    parameter = weight()
    with ours(parameter, streaming()) as optimizer:
        backward(parameter, 0)
        norm_when_sent = float(parameter.grad.norm())
        parameter.grad.mul_(0.01)
        right = float(parameter.grad.double().norm())
        norm = float(optimizer.clip_grad_norm_(1.0))
    assert min(1.0, 1 / norm_when_sent) < 0.05 < right < 1  # clips what needs no clipping
    assert norm == pytest.approx(right, rel=1e-6)


class Later:
    """A device's queue: what is put there is done when somebody waits."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []

    def put(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def wait(self) -> None:
        for work in self._work:
            work()
        self._work.clear()


def test_a_norm_is_of_gradients_that_have_come(tmp_path: Path) -> None:
    """The host reads what a copy from the device has not written yet: the gradient of the step before, or zeros."""
    queue, host = Later(), torch.zeros(NUMEL)
    gradients = [drawn(host, seed) * (seed + 1) for seed in range(2)]
    norms = []
    for gradient in gradients:
        queue.put(lambda gradient=gradient: host.copy_(gradient))
        norms.append(float(host.norm()))
        queue.wait()
    assert norms == [0.0, float(gradients[0].norm())]

    parameter = weight()
    config = {"host_memory": 0, "gpu_memory": 0, "paths": [tmp_path], "subgroup_numel": 1024, "keep_grads": False}
    with OnDevice([parameter], lr=LR, device=SimulatedDevice(lazy=True), offload=config) as optimizer:
        for gradient in gradients:
            torch.autograd.backward([parameter], [gradient.clone()])
            norm = float(optimizer.clip_grad_norm_(1.0))
            assert norm == pytest.approx(float(gradient.double().norm()), rel=1e-6)
            optimizer.step()


@pytest.mark.not_overlapped("the test says where")
def test_forward_uses_weights_that_have_come(streaming: Any) -> None:
    """New weights are copied to the device behind the host, and the next forward pass does not wait for them."""

    class CopiesBehind(Recipe):
        queue = Later()

        @torch.no_grad()
        def step(self) -> None:
            self.take_gradients()
            self.inner.step()
            self.queue.put(lambda: self.parameters[0].data.copy_(self.masters[0]))

    def losses(optimizer: Any, layer: torch.nn.Linear, behind: Callable[[], None] = lambda: None) -> list[float]:
        found = []
        for step in range(4):
            x = torch.randn(8, 50, generator=torch.Generator().manual_seed(step))
            loss = (layer(x) - x).square().mean()
            behind()
            loss.backward()
            optimizer.step()
            layer.weight.grad = None
            found.append(loss.item())
        return found

    def layer() -> torch.nn.Linear:
        torch.manual_seed(0)
        return torch.nn.Linear(50, 50, bias=False)

    first, second, third, fourth = (layer() for _ in range(4))
    right = losses(Recipe(first.weight), first)
    late = losses(CopiesBehind(second.weight), second, CopiesBehind.queue.wait)
    assert late[0] == right[0]
    assert late[1:] != pytest.approx(right[1:], rel=1e-3)

    with ours(third.weight, streaming()) as optimizer:
        plain = losses(optimizer, third)
    with ours(fourth.weight, streaming(overlap="forward")) as optimizer:
        optimizer.overlap_forward(fourth, check=True)
        assert losses(optimizer, fourth) == plain
    assert plain == pytest.approx(right, rel=1e-4)


def test_micro_steps_are_one_update(streaming: Any) -> None:
    """Momentum advances with each micro-step, so accumulation is another optimizer."""

    def momentum(updates: list[list[torch.Tensor]]) -> torch.Tensor:
        average, moved = torch.zeros(NUMEL), torch.zeros(NUMEL)
        for gradients in updates:
            for gradient in gradients:
                average = 0.9 * average + gradient
            moved -= LR * average
        return moved

    generator = torch.Generator().manual_seed(0)
    parts = [[torch.randint(-4, 5, (NUMEL,), generator=generator).float() for _ in range(4)] for _ in range(3)]
    sums = [[torch.stack(each).sum(0)] for each in parts]
    assert distance(momentum(parts), momentum(sums), torch.zeros(NUMEL)) > WRONG

    found = []
    for updates in (parts, sums):
        parameter = weight()
        with offload.SGD([parameter], lr=LR, momentum=0.9, offload=streaming()) as optimizer:
            for gradients in updates:
                for gradient in gradients:
                    torch.autograd.backward([parameter], [gradient.clone()])
                optimizer.step()
                parameter.grad = None
        found.append(parameter.detach())
    assert same_bits(*found)


@pytest.mark.not_overlapped("the test says where")
def test_what_was_updated_too_early_is_taken_back_exactly(streaming: Any) -> None:
    """An update made before the norm was known is undone by its formula backwards, which rounds."""
    start, gradient, beta = weight().detach(), drawn(weight(), 0), 0.9
    moment = 0.1 * drawn(weight(), 1)
    back = (beta * moment + (1 - beta) * gradient - (1 - beta) * gradient) / beta
    assert 0 < float((back - moment).abs().max()) < 1e-6

    found = []
    for overlap in ("off", "backward"):
        parameter = torch.nn.Parameter(start.clone())
        with ours(parameter, streaming(overlap=overlap, threads=1)) as optimizer:
            for step in range(4):
                backward(parameter, step)
                optimizer.clip_grad_norm_(1.0 if step % 2 else 1e9)
                optimizer.step()
                parameter.grad = None
            found.append([parameter.detach(), *optimizer.state_for(parameter).values()])
    assert all(map(same_bits, *found))


def test_a_schedule_reaches_the_update(streaming: Any) -> None:
    """An inner optimizer has settings of its own, and the schedule changes those of the outer one."""

    class OfOwnGroups(Recipe):
        def __init__(self, parameter: torch.nn.Parameter) -> None:
            super().__init__(parameter)
            self.param_groups = [{"params": [parameter], "lr": LR}]

    frozen, offloaded = weight(), weight()
    recipe = OfOwnGroups(frozen)
    with ours(offloaded, streaming()) as optimizer:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 2))
        for step in range(3):
            recipe.param_groups[0]["lr"] = LR * float(step < 2)
            before = frozen.detach().clone(), offloaded.detach().clone()
            for parameter in (frozen, offloaded):
                backward(parameter, step)
            for each in (recipe, optimizer, schedule):
                each.step()
            offloaded.grad = None
    assert not torch.equal(frozen, before[0])
    assert same_bits(offloaded.detach(), before[1])


# Precision


def test_small_steps_move_16_bit_weights(streaming: Any) -> None:
    """An optimizer over bf16 weights has no masters: a step below half of a weight's last bit changes nothing."""
    lr, steps = 1e-4, 30
    parameter, offloaded = (torch.nn.Parameter(torch.ones(NUMEL, dtype=torch.bfloat16)) for _ in range(2))
    plain = torch.optim.AdamW([parameter], lr=lr, weight_decay=0.0)
    with ours(offloaded, streaming(), lr=lr, weight_decay=0.0) as optimizer:
        for _ in range(steps):
            for each in (parameter, offloaded):
                each.grad = torch.ones_like(each)
            plain.step()
            optimizer.step()
        master = optimizer.state_for(offloaded)["master"]
    assert torch.equal(parameter, torch.ones_like(parameter))
    torch.testing.assert_close(master, torch.full((NUMEL,), 1 - steps * lr))
    assert same_bits(offloaded.detach(), master.bfloat16())
    assert not torch.equal(offloaded, parameter)


def test_weights_decay(streaming: Any) -> None:
    """Decay in bf16 multiplies by what rounds to 1."""
    lr, decay, steps = 1e-3, 0.1, 20
    weights = torch.ones(NUMEL, dtype=torch.bfloat16)
    offloaded = torch.nn.Parameter(weights.clone())
    with ours(offloaded, streaming(), lr=lr, weight_decay=decay) as optimizer:
        for _ in range(steps):
            weights.mul_(1 - lr * decay)
            offloaded.grad = torch.zeros_like(offloaded)
            optimizer.step()
        master = optimizer.state_for(offloaded)["master"]
    assert torch.equal(weights, torch.ones_like(weights))
    torch.testing.assert_close(master, torch.full((NUMEL,), (1 - lr * decay) ** steps))


def test_16_bit_moments_decay() -> None:
    """Rounded to nearest, exp_avg_sq stays what it is where a step takes less than half of its last bit."""
    steps, beta2 = 300, 0.999
    moment = torch.full((NUMEL,), 0.5, dtype=torch.bfloat16)
    for _ in range(steps):
        moment.mul_(beta2)
    assert torch.equal(moment, torch.full_like(moment, 0.5))

    parameter = weight(torch.bfloat16)
    with ours(parameter, offload.OffloadConfig(state_format="compact16"), betas=(0.9, beta2)) as optimizer:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        before = optimizer.state_for(parameter)["exp_avg_sq"].mean()
        for _ in range(steps):
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        after = optimizer.state_for(parameter)["exp_avg_sq"].mean()
    assert float(after / before) == pytest.approx(beta2**steps, rel=0.02)


def test_masters_are_kept_whole(streaming: Any, tmp_path: Path) -> None:
    """A bf16 weight and 16 bits more are not a master if the weight was rounded to nearest even: ties are lost."""
    bits = torch.randint(0x3000_0000, 0x4000_0000, (NUMEL,), generator=torch.Generator().manual_seed(0))
    bits[::2] = bits[::2] // 0x20000 * 0x20000 + 0x8000  # halfway between an even bf16 and the next
    masters = bits.int().view(torch.float32)
    upper, rest = masters.bfloat16().view(torch.int16), masters.view(torch.int16)[::2]
    upper = upper - (rest < 0).short()  # undoes the rounding
    again = torch.stack([rest, upper], -1).view(torch.float32).squeeze(-1)
    lost = again != masters
    assert lost[::2].all()
    assert not lost[1::2].any()

    parameter = torch.nn.Parameter(masters.bfloat16())
    with ours(parameter, streaming()) as optimizer:
        optimizer.state[parameter] = {"step": 1, "master": masters, **dict.fromkeys(MOMENTS, torch.zeros(NUMEL))}
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
    with ours(parameter, streaming()) as optimizer:
        optimizer.load_checkpoint(tmp_path / "ck")
        assert same_bits(optimizer.state_for(parameter)["master"], masters)
    assert same_bits(parameter.detach(), masters.bfloat16())


MOMENTS = "exp_avg", "exp_avg_sq"


def test_what_has_no_gradient_does_not_move() -> None:
    """A first moment of 8 bits that cannot be 0 is divided by the root of a second one that is."""
    steps, eps, still = 20, 1e-8, torch.arange(4096) % 8 == 0
    gradient = drawn(torch.zeros(4096), 0).masked_fill(still, 0.0)
    low, high = float(gradient.min()), float(gradient.max())
    code = (gradient - low).mul(255 / (high - low)).round()
    moment = code * ((high - low) / 255) + low
    moved = LR * steps * moment / (gradient.square().sqrt() + eps)
    assert float(moved[still].abs().min()) > 1

    start, parameter = (weight(shape=(64, 64)) for _ in range(2))
    with ours(parameter, offload.OffloadConfig(state_format="compact8"), weight_decay=0.0) as optimizer:
        for step in range(steps):
            parameter.grad = drawn(torch.zeros(4096), step).masked_fill(still, 0.0).view(64, 64)
            optimizer.step()
        assert "compact8" in str(optimizer.plan)
    stays = (parameter == start).flatten()
    assert stays[still].all()
    assert not stays[~still].any()
