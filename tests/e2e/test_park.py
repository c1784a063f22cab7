"""Memory given back between steps: bits, what moves, and what may come in between.

Where parks do not belong, twice, amid all else, and on what fails: one clear error, and nothing lost.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
import torch.distributed as dist
from at_line import AtLine, at_every_line
from faulty import Fault, FaultKind, FaultyTier, faulty_paths
from programs import in_a_thread
from sharded import Model, exact_gradients, local, on_ranks
from simulated import OnDevice
from test_interrupts import STRIDES
from test_signal_handlers import handled
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from world import SimulatedDevice

import offload
from offload.device.host import HostMemory
from offload.protocols import Device
from offload.session import parking
from offload.units import format_seconds

NUMELS = (3000, 1024, 5, 7000)


def parameters(dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    kinds = itertools.cycle(dtypes)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(next(kinds))) for n in NUMELS]


def train(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    loss = sum((w.float() * torch.randn(w.shape, generator=generator)).sum() for w in weights)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Pair:
    """An optimizer that parks, and its twin that never does."""

    def __init__(self, folder: Path, device: bool = False, **settings: Any) -> None:
        self.folder = folder
        self.optimizers: list[Any] = []
        self.weights: list[list[torch.nn.Parameter]] = []
        for name in ("parks", "never"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            config = offload.OffloadConfig(
                paths=[str(folder / name)], **{"subgroup_numel": 1024, "threads": 1, **settings}
            )
            weights = parameters()
            more = {"device": SimulatedDevice(1 << 24, seed=1, lazy=False, pins=True)} if device else {}
            kind = OnDevice if device else offload.AdamW
            self.optimizers.append(kind(weights, lr=0.1, offload=config, **more))
            self.weights.append(weights)
        self.steps = 0

    @property
    def parking(self) -> Any:
        return self.optimizers[0]

    def train(self) -> None:
        self.steps += 1
        for optimizer, weights in zip(self.optimizers, self.weights, strict=True):
            train(optimizer, weights, self.steps)

    def check(self) -> None:
        for number, (weight, other) in enumerate(zip(*self.weights, strict=True)):
            assert torch.equal(weight, other), f"weight {number}"
            mine, others = (o.state_for(w) for o, w in zip(self.optimizers, (weight, other), strict=True))
            assert all(torch.equal(mine[key], others[key]) for key in others), f"state {number}"

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "streamed": {"host_memory": 0, "staging_memory": 3 * 12 * 1024 * 4},
    "half": {"host_memory": 60_000, "staging_memory": 3 * 12 * 1024 * 4},
    "resident": {"host_memory": "1GiB"},
    "compact8": {"host_memory": 30_000, "state_format": "compact8", "subgroup_numel": 4096},
    "GPU homes": {"device": True, "host_memory": 0, "gpu_memory": 80_000, "placement": 0.5},
    "GPU and host homes": {"device": True, "host_memory": 50_000, "gpu_memory": 40_000, "placement": "gpu"},
    "all on the GPU": {"device": True, "host_memory": 0, "gpu_memory": "4MiB", "placement": "gpu"},
    "gradients leave the GPU": {"device": True, "host_memory": 60_000, "gpu_memory": 0, "keep_grads": False},
}


@pytest.fixture(params=["half", "compact8", "GPU and host homes"])
def placed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, **SETTINGS[request.param])
    yield made
    made.close()


def written_bytes(optimizer: Any) -> float:
    return optimizer.metrics()["path/0/written_bytes"]


def test_only_what_has_changed_in_staging_slots_moves_where_nothing_is_resident(tmp_path: Path) -> None:
    pair = Pair(tmp_path, **SETTINGS["streamed"])
    pair.train()
    pair.train()
    parking = pair.parking
    before, slots = written_bytes(parking), parking.plan.plan.staging_slots
    parking.park()
    moved = written_bytes(parking) - before
    assert 0 < moved <= slots * 12 * 1024
    assert moved == parking.metrics()["park/moved_bytes"]
    parking.park()
    assert written_bytes(parking) - before == moved, "a second park moves nothing"
    totals = []
    for optimizer, weights in zip(pair.optimizers, pair.weights, strict=True):
        begun = written_bytes(optimizer)
        for step in range(3, 6):
            train(optimizer, weights, step)
        totals.append(written_bytes(optimizer) - begun)
    assert totals[0] <= totals[1] + slots * 12 * 1024, "ordinary steps write more than they did"
    pair.close()


def test_a_checkpoint_of_a_parked_session_is_whole(placed: Pair, tmp_path: Path) -> None:
    placed.train()
    placed.parking.park()
    for name, copy in (("kept", False), ("copied", True)):
        placed.parking.save_checkpoint(tmp_path / name, copy=copy)
        placed.parking.wait_checkpoint()
        assert placed.parking.engine.is_parked, "a save takes memory"
    placed.train()
    placed.parking.park()
    for name in ("kept", "copied"):
        placed.parking.load_checkpoint(tmp_path / name)
        placed.parking.park()
    placed.optimizers[1].zero_grad()
    train(placed.parking, placed.weights[0], 2)
    placed.check()


def test_a_park_from_another_thread_while_steps_go_on(pair: Pair) -> None:
    done, errors = threading.Event(), []

    def park() -> None:
        while not done.is_set():
            try:
                pair.parking.park(wait=False)
            except offload.ConfigError:  # a gradient is there
                continue
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=park)
    thread.start()
    try:
        for step in range(2, 12):
            pair.steps = step
            generator = torch.Generator().manual_seed(step)
            for optimizer, weights in zip(pair.optimizers, pair.weights, strict=True):
                for weight in weights:
                    weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
                generator.manual_seed(step)
                optimizer.step()
    finally:
        done.set()
        thread.join()
    assert not errors
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.check()


@pytest.mark.parametrize("is_used", [True, False])
def test_another_threads_park_leaves_gradients_as_they_are(pair: Pair, is_used: bool) -> None:
    """It may come amid a backward pass, while torch changes `.grad`, which two threads may not touch."""
    for weights in pair.weights:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
    for optimizer in pair.optimizers if is_used else ():
        optimizer.step()
    before = [weight.grad for weight in pair.weights[0]]
    assert None not in before
    in_a_thread(pair.parking.park)
    assert pair.parking.engine.is_parked
    assert all(weight.grad is gradient for weight, gradient in zip(pair.weights[0], before, strict=True))
    for optimizer in pair.optimizers:
        optimizer.step()
    pair.check()


@pytest.mark.parametrize("place", ["first", "last", "between"])
@pytest.mark.parametrize("zeroes", [True, False])
def test_another_threads_park_amid_a_backward_pass_changes_no_bit(tmp_path: Path, place: str, zeroes: bool) -> None:
    """Before the first gradient of the pass, between two, and after the last: in their hooks."""
    ends = []
    for parks in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
        (folder := tmp_path / str(parks)).mkdir()
        config = {"paths": [folder], "host_memory": 100_000, "subgroup_numel": 2048}
        with offload.AdamW(model.parameters(), lr=1e-2, offload=config) as optimizer:
            seen = 0

            def park(gradient: torch.Tensor, parks: bool = parks, optimizer: Any = optimizer) -> None:
                nonlocal seen
                seen += 1
                if parks and seen % 3:
                    in_a_thread(lambda: optimizer.park(wait=seen % 2 == 0))

            weight = list(model.parameters())[{"first": -1, "between": 2, "last": 0}[place]]
            if place == "first":
                weight.register_hook(park)
            else:
                weight.register_post_accumulate_grad_hook(park)
            for step in range(8):
                model(torch.full((2, 64), float(step % 3))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad() if zeroes else torch._foreach_zero_([p.grad for p in model.parameters()])
            ends.append([p.detach().clone() for p in model.parameters()])
            assert seen == 8
    assert all(map(torch.equal, *ends))


STORM = """
import sys, threading, torch, offload
torch.set_num_threads(1)
weights = [torch.nn.Parameter(torch.randn(50)) for _ in range(40)]
optimizer = offload.AdamW(weights, offload={"paths": [sys.argv[1]], "host_memory": 4096})
done = threading.Event()

def storm():
    while not done.is_set():
        optimizer.park(wait=False)

thread = threading.Thread(target=storm)
thread.start()
for _ in range(60):
    sum((weight * weight).sum() for weight in weights).backward()
    optimizer.step()
    optimizer.zero_grad()
done.set()
thread.join()
optimizer.close()
"""


@pytest.mark.slow
def test_parks_beside_backward_passes_of_another_thread_end_no_process(tmp_path: Path) -> None:
    prepared.ran([prepared.python(), "-c", STORM, str(tmp_path)])


def test_a_gradient_that_arrives_while_memory_is_given_back_stays(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at gradients and their end, another thread may set one: it belongs to the next step."""
    route, weight = pair.parking._route, pair.weights[0][0]
    check, gradient = route.check_gradients_used, torch.ones_like(weight)

    def look() -> None:
        check()
        weight.grad = gradient

    monkeypatch.setattr(route, "check_gradients_used", look)
    pair.parking.park()
    assert weight.grad is gradient
    assert all(other.grad is None for other in pair.weights[0][1:])


def test_what_is_said_of_a_park(placed: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """How long memory and state take to come back: in the log, in metrics, and in the plan while memory is gone."""
    optimizer = placed.parking
    placed.train()
    assert not [name for name in optimizer.metrics() if name.startswith("park/")]
    with caplog.at_level("INFO", logger="offload"):
        optimizer.park()
    seconds = optimizer.metrics()["park/predicted_back_s"]
    assert seconds > 0
    assert f"back in about {format_seconds(seconds)}" in caplog.text
    assert f"given back, back in about {format_seconds(seconds)}" in str(optimizer.plan)
    optimizer.unpark()
    assert "given back" not in str(optimizer.plan)
    assert optimizer.metrics()["park/predicted_back_s"] == seconds


ON_DEVICE = {name: settings for name, settings in SETTINGS.items() if settings.get("device")}


def half(folder: Path, **settings: Any) -> Pair:
    return Pair(folder, **{**SETTINGS["half"], **settings})


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    with contextlib.closing(half(tmp_path)) as made:
        made.train()
        yield made


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> list[FaultyTier]:
    """Return the tiers of paths, in the order in which they are opened."""
    return faulty_paths(monkeypatch)


# Bad input


def test_a_size_is_refused_in_a_sentence_that_names_both_ways(pair: Pair) -> None:
    values = (0, 1, "1GiB", None, 0.5, {"node0": "1MiB"})
    for name, value in itertools.product(("keep_host", "host_memory", "gpu_memory"), values):
        with pytest.raises(offload.ConfigError, match=rf"^{name}: .*park\(\), .*park\(keep_host=True\)"):
            pair.parking.park(**{name: value})
        assert not pair.parking.engine.is_parked
    pair.train()
    pair.check()


def used_twice(weight: torch.nn.Parameter, optimizer: Any) -> None:
    weight.sum().backward()
    optimizer.step()
    weight.sum().backward()


def zeroed(weight: torch.nn.Parameter, optimizer: Any) -> None:
    """A step with it would decay the weight, and one without it would not."""
    weight.sum().backward()
    optimizer.zero_grad(set_to_none=False)


def of_a_graph(weight: torch.nn.Parameter, optimizer: Any) -> None:
    weight.float().pow(2).sum().backward(create_graph=True)


def by_hand(weight: torch.nn.Parameter, optimizer: Any) -> None:
    weight.grad = torch.ones_like(weight)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("make", [used_twice, zeroed, of_a_graph, by_hand])
@pytest.mark.parametrize("wait", [True, False])
def test_a_gradient_that_no_step_has_used_is_refused_by_name(
    tmp_path: Path, make: Callable[[torch.nn.Parameter, Any], None], wait: bool
) -> None:
    with contextlib.closing(half(tmp_path)) as pair:
        pair.train()
        for optimizer, weights in zip(pair.optimizers, pair.weights, strict=True):
            make(weights[2], optimizer)
        text = r"the gradient of param_groups\[0\].params\[2\].*call step\(\), or zero_grad\(set_to_none=True\)"
        with pytest.raises(offload.ConfigError, match=text):
            pair.parking.park(wait=wait)
        assert not pair.parking.engine.is_parked
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.parking.park(wait=wait)
        pair.train()
        pair.check()


def test_hooks_and_closures_are_told_of_gradients_that_are_there(pair: Pair) -> None:
    optimizer, weight, told = pair.parking, pair.weights[0][0], []

    def park(*_: object) -> None:
        try:
            optimizer.park()
        except offload.ConfigError as error:
            told.append(str(error))

    def closure() -> float:
        park()  # before there is one
        loss = weight.float().sum()
        loss.backward()
        park()
        return float(loss)

    hook = weight.register_post_accumulate_grad_hook(park)
    optimizer.step(closure)
    hook.remove()
    assert len(told) == 2
    optimizer.zero_grad()
    assert optimizer.step(lambda: 0.0) == 0.0


def test_a_gradient_that_somebody_holds_keeps_its_memory(pair: Pair) -> None:
    weight = pair.weights[0][3]
    (weight.float() * 3).sum().backward()
    held = weight.grad[100:]
    pair.parking.step()
    pair.parking.park()
    assert weight.grad is None
    assert bool((held == 3).all())
    pair.parking.unpark()
    assert bool((held == 3).all())
    (weight.float() * 5).sum().backward()
    assert bool((held == 3).all())
    assert bool((weight.grad == 5).all())


def test_a_fork_and_a_closed_optimizer_are_refused(pair: Pair) -> None:
    pair.parking.park()
    child = os.fork()
    if child == 0:
        try:
            assert all(weight.grad is None for weight in pair.weights[0])
            pair.parking.engine._parts.queue = None  # which another thread may have had locked: it would stay so
            with pytest.raises(offload.SessionBrokenError, match="forked copy"):
                pair.parking.park()
            with pytest.raises(offload.SessionBrokenError, match="forked copy"):
                pair.parking.unpark()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pair.train()
    pair.check()
    pair.parking.park(wait=False)
    pair.close()
    for call in (pair.parking.park, pair.parking.unpark):
        with pytest.raises(offload.SessionBrokenError, match="closed"):
            call()


def test_what_has_no_room_is_refused_before_anything_moves(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    for paths in ([], [{"path": tmp_path / "small", "max_bytes": "100KB"}]):
        weights = parameters()
        with offload.AdamW(weights, offload=offload.OffloadConfig(host_memory="1GiB", paths=paths)) as optimizer:
            optimizer.park()  # nothing is there yet
            train(optimizer, weights, 0)
            with pytest.raises(offload.InfeasiblePlanError, match=r"let .* stay: park\(keep_host=True\)"):
                optimizer.park()
            assert not optimizer.engine.is_parked
            assert optimizer.metrics()["park/away_bytes"] == 0
            optimizer.park(keep_host=True)
            assert optimizer.engine.is_parked
            train(optimizer, weights, 1)


# What moves, and who waits


def test_a_hundred_parks_leave_stores_and_descriptors_as_they_are(pair: Pair) -> None:
    def used() -> tuple[int, int]:
        files = (pair.folder / "parks").rglob("*")
        return len(os.listdir("/proc/self/fd")), sum(file.stat().st_size for file in files if file.is_file())

    pair.parking.park()
    pair.train()
    before = used()
    for number in range(100):
        pair.parking.park(bool(number % 2), wait=number % 3 > 0)
        pair.train()
    assert used() == before
    pair.check()


def test_a_park_behind_its_caller_ends_early_where_the_optimizer_is_used(
    tmp_path: Path, tiers: list[FaultyTier]
) -> None:
    with contextlib.closing(half(tmp_path)) as pair:
        pair.train()
        tiers[0].plant(Fault("write", FaultKind.DELAY))
        pair.parking.park(wait=False)
        assert not pair.parking.engine.is_parked
        while not (held := tiers[0].held()):
            pass
        tiers[0].release(*held)
        pair.train()
        assert not pair.parking.engine.is_parked
        pair.check()


@pytest.mark.parametrize("wait", [True, False])
def test_nothing_says_parked_before_memory_is_gone(pair: Pair, wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said, plain = [], HostMemory.discard_pages

    def discard_pages(memory: HostMemory, *given: Any) -> int:
        nbytes = plain(memory, *given)
        said.append(pair.parking.engine.is_parked)
        return nbytes

    monkeypatch.setattr(HostMemory, "discard_pages", discard_pages)
    pair.parking.park(wait=wait)
    pair.parking.park()
    assert said[0] is False
    assert pair.parking.engine.is_parked


# Failures


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("nth", [1, 7])
def test_state_that_no_path_takes_stays_in_memory(
    tmp_path: Path, tiers: list[FaultyTier], code: int, nth: int
) -> None:
    with contextlib.closing(Pair(tmp_path, **SETTINGS["resident"])) as pair:
        pair.train()
        tiers[0].plant(Fault("write", FaultKind.ERROR, nth, errno=code))
        with pytest.raises(offload.TierError, match=errno.errorcode[code]):
            pair.parking.park()
        assert not pair.parking.engine.is_parked
        pair.train()
        pair.parking.park()
        pair.train()
        pair.check()


def test_where_there_is_no_memory_the_session_stays_parked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.parking.park()
    calls = [
        pair.parking.unpark,
        lambda: pair.parking.state_for(pair.weights[0][0]),
        lambda: pair.weights[0][0].sum().backward(),
        pair.parking.step,
    ]
    with monkeypatch.context() as patch:
        patch.setattr(parking, "available_bytes", lambda: 1000)
        for call in calls:
            with pytest.raises(offload.InfeasiblePlanError, match=r"memory of a parked session .* nothing is lost"):
                call()
            assert pair.parking.engine.is_parked
        pair.parking.zero_grad()
    pair.train()
    pair.check()


@pytest.mark.parametrize(("name", "keep_host"), list(zip(ON_DEVICE, itertools.cycle([False, True]), strict=False)))
def test_where_the_gpu_has_no_memory_the_session_stays_parked(
    name: str, keep_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Pair(tmp_path, **ON_DEVICE[name])) as pair:
        pair.train()
        kind: type[Device] = type(pair.parking.engine._parts.lanes.device)
        plain, left, fails = kind.allocate, 0, True

        def allocate(device: Any, nbytes: int, caller: None = None) -> int:
            nonlocal left
            left -= 1
            if not left:
                raise offload.OffloadError("the GPU has no room")
            return plain(device, nbytes)

        nth = 1
        while fails:
            pair.parking.park(keep_host)
            with monkeypatch.context() as patch:
                patch.setattr(kind, "allocate", allocate)
                left = nth
                fails = False
                try:
                    pair.parking.unpark()
                except offload.OffloadError:
                    fails = True
            assert pair.parking.engine.is_parked == fails
            pair.train()
            pair.check()
            nth += 1


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_second_park_takes_what_the_first_has_left(name: str, tmp_path: Path) -> None:
    with contextlib.closing(Pair(tmp_path, **ON_DEVICE[name])) as pair:
        for first, second in itertools.product([False, True], repeat=2):
            pair.train()
            pair.parking.park(first)
            pair.parking.park(second)
            figures = pair.parking.metrics()
            if not second:
                assert figures["park/away_bytes"] == figures["resident_bytes"]
            pair.train()
            pair.check()


# Interrupts and handlers


@pytest.mark.slow
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("what", ["park", "behind", "unpark"])
def test_a_ctrl_c_at_any_line_leaves_a_session_that_goes_on(tmp_path: Path, what: str, stride: int) -> None:
    with contextlib.closing(half(tmp_path)) as pair:
        calls = {
            "park": pair.parking.park,
            "behind": lambda: pair.parking.park(wait=False),
            "unpark": pair.parking.unpark,
        }

        def program(interrupted: AtLine) -> None:
            pair.train()
            if what == "unpark":
                pair.parking.park()
            interrupted(calls[what])

        at_every_line(program, stride)
        pair.train()
        pair.check()


def test_a_signal_handler_in_a_step_parks_before_it_or_after_it(pair: Pair) -> None:
    """The step uses gradients that a step has used: a park before it leaves it none, and one amid it is refused."""
    parks: list[bool] = []

    def park() -> None:
        with contextlib.suppress(offload.ConfigError):
            pair.parking.park()
            parks.append(True)

    for line in itertools.count(1):
        parks.clear()
        for optimizer, weights in zip(pair.optimizers, pair.weights, strict=True):
            sum((weight.float() * 3).sum() for weight in weights).backward()
            optimizer.step()
        before = pair.weights[0][0].detach().clone()
        with handled(offload.Engine.step, line, park) as handler:
            pair.parking.step()
        has_stepped = not torch.equal(before, pair.weights[0][0])
        assert parks or has_stepped, handler.where
        if has_stepped:
            pair.optimizers[1].step()
        pair.optimizers[1].zero_grad()
        pair.parking.zero_grad()
        pair.train()
        pair.check()
        if not handler.has_fired:
            break
    assert line > 5


# Beside everything else


@pytest.mark.parametrize("shard", [True, False], ids=["DDP", "FSDP2"])
@on_ranks(2)
def test_ranks_do_not_wait_for_one_that_parks(folder: Path, shard: bool) -> None:
    """Ranks do not wait for each other: one parks, and the step of both goes on."""
    rank, found = dist.get_rank(), []
    for parks in (True, False):
        model = Model()
        parallel: torch.nn.Module = DistributedDataParallel(model) if shard else fully_shard(model)
        place = folder / f"{parks}"
        place.mkdir(exist_ok=True)
        config = offload.OffloadConfig(paths=[place], host_memory=4096 * 6, subgroup_numel=1024, shard=shard)
        with offload.AdamW(model.named_parameters(), lr=0.01, offload=config) as optimizer:
            for step in range(6):
                parallel(exact_gradients(step, rank)).backward()
                if parks and step == 3:
                    with pytest.raises(offload.ConfigError, match="the gradient of blocks"):
                        optimizer.park()
                optimizer.step()
                if parks and (rank + step) % 2:
                    optimizer.park(wait=step > 2)
                optimizer.zero_grad()
            found.append([local(parameter.detach()).clone() for parameter in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
