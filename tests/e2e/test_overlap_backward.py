"""Updates during the backward pass: the bits of steps that make none, whatever happens before the step."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from at_line import AtLine
from settling import settle
from test_overlap_forward import Model, assert_same, everything, loss_of

import offload
from offload.errors import ConfigError, InfeasiblePlanError
from offload.optim import hiding
from offload.optim.hiding import Announcer
from offload.optim.pace import Pace
from offload.protocols import SECTOR_BYTES
from offload.session import speculation

pytestmark = pytest.mark.not_overlapped("steps go on where the tests say so")

LOOSE, TIGHT = 1e9, 1e-2


class Training:
    """A model of which everything streams, and its optimizer."""

    def __init__(self, folder: Path, overlap: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.model = Model(dtype)
        options = {"subgroup_numel": 4096, "threads": 1, "checkpoints_kept": 1, "paths": [folder], **options}
        config = offload.OffloadConfig(host_memory=0, overlap=overlap, **options)
        self.optimizer = offload.AdamW(self.model.named_parameters(), lr=1e-2, weight_decay=0.1, offload=config)
        self.counts: Counter[str] = Counter()
        self.seed = 0
        self.follow = False

    def backward(self) -> None:
        self.seed += 1
        loss_of(self.model, self.seed).backward()
        if self.seed % 2:  # else what comes next may be seen by updates that are still to come
            self.settle()

    def settle(self) -> None:
        settle(self.optimizer.engine)

    def step(self) -> None:
        self.settle()
        self.optimizer.step()
        self.count()

    def count(self) -> None:
        account = self.optimizer.engine._thread.speculation
        self.counts["confirmed"] += account.confirmed_bytes
        self.counts["revoked"] += account.revoked_bytes


def plain(training: Any, rng: Any = None) -> None:
    training.backward()
    training.optimizer.clip_grad_norm_(LOOSE)


def clipped(training: Any, rng: Any = None) -> None:
    training.backward()
    training.optimizer.clip_grad_norm_(TIGHT)


def torch_clips_nothing(training: Training, rng: random.Random) -> None:
    training.backward()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), LOOSE)


def accumulated(training: Training, rng: random.Random) -> None:
    training.backward()
    training.backward()


def signs_flipped_everywhere(training: Training, rng: random.Random) -> None:
    training.backward()
    training.settle()
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.neg_()


def another_rate(training: Training, rng: random.Random) -> None:
    training.backward()
    for group in training.optimizer.param_groups:
        group["lr"] = rng.choice([1e-2, 2e-3])


def weights_written(training: Training, rng: random.Random) -> None:
    training.backward()
    parameter = rng.choice([*training.model.parameters()])
    with torch.no_grad():
        parameter.mul_(0.5)


def fp32_weights_written_past_counters(training: Training, rng: random.Random) -> None:
    training.backward()
    parameter = rng.choice([*training.model.parameters()])
    if parameter.dtype is torch.float32:
        parameter.data.mul_(0.5)


def dropped(training: Training, rng: random.Random) -> None:
    training.backward()
    training.optimizer.zero_grad()
    training.backward()


def dropped_behind_its_back(training: Any, rng: Any = None) -> None:
    training.backward()
    training.model.zero_grad()
    training.backward()


def state_read(training: Any, rng: Any = None) -> None:
    training.backward()
    training.optimizer.state_dict()


def saved(training: Training, rng: random.Random) -> None:
    training.backward()
    training.optimizer.save_checkpoint(training.folder / f"checkpoint-{training.seed}")


KINDS = [clipped, accumulated, another_rate, weights_written, dropped, dropped_behind_its_back, state_read, saved]


def run(
    training: Training, steps: int, seed: int, kinds: list[Callable[..., None]], share: float = 0.4
) -> list[torch.Tensor]:
    """Train, a share of the steps not plainly; return all weights and state."""
    rng = random.Random(seed)
    with training.optimizer:
        if training.follow:
            training.optimizer.overlap_forward(training.model)
        for _ in range(steps):
            kind = rng.choice(kinds) if rng.random() < share else plain
            kind(training, random.Random(rng.random()))
            training.counts[kind.__name__] += 1
            training.step()
            training.optimizer.zero_grad()
        training.optimizer.wait_checkpoint()
        return everything(training.optimizer, training.model)


@pytest.mark.parametrize("kind", [plain, torch_clips_nothing], ids=lambda kind: kind.__name__)
def test_all_is_confirmed_where_nothing_changes(tmp_path: Path, kind: Callable[..., None]) -> None:
    training = Training(tmp_path / "backward", "backward")
    run(training, 12, 0, [kind], share=1)
    streamed_bytes = training.optimizer.plan.plan.state_bytes
    # All but the first step, which finds no state on storage and ahead of which nobody knows what comes.
    assert training.counts["confirmed"] == 11 * streamed_bytes
    assert training.counts["revoked"] == 0


def test_always_clipping_makes_nothing_ahead(tmp_path: Path) -> None:
    training = Training(tmp_path / "backward", "backward")
    run(training, 12, 0, [clipped], share=1)
    assert training.counts["confirmed"] == training.counts["revoked"] == 0


def test_steps_that_always_revoke_are_tried_ever_more_rarely(tmp_path: Path) -> None:
    training = Training(tmp_path / "backward", "backward")
    tried = []
    with training.optimizer:
        for number in range(80):
            signs_flipped_everywhere(training, random.Random(number))
            before = training.counts["revoked"]
            training.step()
            training.optimizer.zero_grad()
            if training.counts["revoked"] > before:
                tried.append(number)
    assert training.counts["confirmed"] == 0
    assert 4 <= len(tried) <= 7
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps == sorted(gaps)


class Barrier(torch.autograd.Function):
    """The identity, whose backward calls something first."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.call()
        return gradient, None


def clamp(parameter: torch.Tensor) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


def test_a_hook_that_comes_later(tmp_path: Path) -> None:
    found = []
    for overlap in ("off", "backward"):
        training = Training(tmp_path / overlap, overlap)
        for parameter in training.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(clamp)
        found.append(run(training, 10, 0, [plain]))
    assert_same(*found)


def test_bytes_written_grow_with_the_share_that_is_revoked(tmp_path: Path) -> None:
    """Nobody can write less than what is updated, and what is revoked was written for nothing."""
    written, steps, bad = [], 30, 6
    for revoked in (0, bad):
        training = Training(tmp_path / str(revoked), "backward")
        with training.optimizer as optimizer:
            for number in range(steps):
                kind = signs_flipped_everywhere if revoked and number % (steps // bad) == 4 else plain
                kind(training, random.Random(number))
                training.step()
                optimizer.zero_grad()
            written.append(optimizer.metrics()["path/0/written_bytes"])
        streamed_bytes = optimizer.plan.plan.state_bytes
    assert written[0] <= 1.01 * steps * streamed_bytes
    assert written[1] <= 1.01 * (1 + bad / steps) * steps * streamed_bytes
    assert training.counts["revoked"] > 0


def test_no_room_for_versions_beside(tmp_path: Path) -> None:
    """With room for the plan alone, some versions are made ahead or none, and no step fails."""
    found = []
    for overlap in ("off", "backward"):
        probe = Training(tmp_path / f"probe-{overlap}", "off")
        with probe.optimizer as optimizer:
            plan = optimizer.plan.plan
        limit = {"path": str(tmp_path / overlap), "max_bytes": plan.storage_bytes + plan.checkpoint_bytes}
        training = Training(tmp_path / overlap, overlap, paths=[limit])
        found.append(run(training, 16, 3, [plain, clipped, saved, state_read]))
    assert_same(*found)


def test_the_room_that_a_plan_names_is_enough_and_less_is_not(tmp_path: Path) -> None:
    probe = Training(tmp_path / "probe", "backward")
    with probe.optimizer as optimizer:
        plan = optimizer.plan.plan
        assert plan.has_room_to_speculate
    needed = plan.storage_bytes + plan.checkpoint_bytes + plan.speculative_storage_bytes
    confirmed = []
    for name, short in (("enough", 0), ("short", max(plan.slot_counts) + SECTOR_BYTES)):
        limit = {"path": str(tmp_path / name), "max_bytes": needed - short}
        training = Training(tmp_path / name, "backward", paths=[limit])
        assert training.optimizer.plan.plan.has_room_to_speculate == (not short)
        run(training, 8, 3, [plain])
        confirmed.append(training.counts["confirmed"])
    assert confirmed[0] == 7 * plan.state_bytes > confirmed[1] > 0


def test_memory_for_new_weights_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.session.speculation.available_bytes", lambda: 0)
    training = Training(tmp_path / "backward", "backward")
    run(training, 6, 0, [plain])
    assert training.counts["confirmed"] == 0


def test_memory_for_some_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subgroups whose gradients arrive first are made ahead, and the others by the step."""
    found, made = [], []
    for overlap in ("off", "backward"):
        training = Training(tmp_path / overlap, overlap)
        plan = training.optimizer.plan.plan
        half = sum(s.weight_bytes for s in plan.updated_in_backward) // 2
        monkeypatch.setattr("offload.session.speculation.available_bytes", partial(int, half))
        found.append(run(training, 30, 4, KINDS))
        made.append(training.counts["confirmed"])
    assert_same(*found)
    assert made[1] > 0
    training = Training(tmp_path / "plain", "backward")
    run(training, 12, 0, [plain])
    share = training.counts["confirmed"] / (11 * plan.state_bytes)
    assert 0.3 < share <= 0.5


def test_memory_for_new_weights_is_part_of_the_plan_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Training(tmp_path / "probe", "backward").optimizer as optimizer:
        plan = optimizer.plan.plan
    monkeypatch.setattr("offload.session.parts.available_bytes", lambda: plan.host_bytes - 1)
    with pytest.raises(InfeasiblePlanError, match='overlap="auto"'):
        Training(tmp_path / "backward", "backward")
    run(Training(tmp_path / "auto", "auto"), 2, 0, [plain])
    monkeypatch.setattr("offload.session.parts.available_bytes", lambda: plan.host_bytes - plan.image_bytes - 1)
    with pytest.raises(InfeasiblePlanError, match="lower subgroup_numel, or free some"):
        Training(tmp_path / "less", "backward")


@pytest.mark.late(shared=True)
def test_an_overlap_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        offload.OffloadConfig(overlap="sideways")


def same_bits_for(
    tmp_path: Path, backward: Callable[[Training, int], None], dtype: torch.dtype = torch.bfloat16
) -> Counter[str]:
    """Train twelve steps, each after `backward`, with updates ahead and without; return what was counted."""
    found = []
    for overlap in ("off", "backward"):
        training = Training(tmp_path / overlap, overlap, dtype)
        with training.optimizer as optimizer:
            for step in range(12):
                backward(training, step)
                training.step()
                optimizer.zero_grad()
            found.append(everything(optimizer, training.model))
    assert_same(*found)
    return training.counts


def test_what_is_hidden_can_be_seen(tmp_path: Path) -> None:
    training = Training(tmp_path / "backward", "backward")
    with training.optimizer as optimizer:
        for _ in range(6):
            plain(training, random.Random(0))
            training.step()
            found, timeline = optimizer.metrics(), optimizer.timeline()
            assert not any(math.isnan(i.started_s) or math.isnan(i.finished_s) for i in timeline)
            optimizer.zero_grad()
        assert "the step is hidden in backward" in str(optimizer.plan)
    assert found["speculation/confirmed_bytes"] == found["lane/cpu/bytes"] == found["state_bytes"]
    assert found["speculation/revoked_bytes"] == 0
    assert found["path/0/write_bytes"] > 0
    assert found["forward_s"] > 0
    assert found["backward_s"] > 0
    assert found["hidden_s"] >= 0
    assert found["predicted_iteration_s"] > found["forward_s"]
    assert {"caller", "cpu", "read:0", "write:0"} <= {interval.lane for interval in timeline}


ARRIVALS = str(hiding.__file__), str(speculation.__file__)
"""What runs on the caller's thread when a gradient arrives, for updates in backward."""


@pytest.mark.parametrize("file", ARRIVALS, ids=["hiding", "speculation"])
def test_signal_handlers_may_ask_for_anything_while_a_gradient_arrives(tmp_path: Path, file: str) -> None:
    found = []
    for overlap in ("off", "backward"):
        training = Training(tmp_path / overlap, overlap, torch.float32)
        save = partial(training.optimizer.save_checkpoint, training.folder / "saved")
        asks = [training.optimizer.state_dict, training.optimizer.metrics, save]
        with training.optimizer as optimizer:
            for step in range(60):
                with AtLine(5 * step, (file,), asks[step % 3]) as handler:
                    training.backward()
                training.step()
                optimizer.zero_grad()
            assert not handler.has_fired  # every 5th line has been met, and there are no others
            found.append(everything(optimizer, training.model))
    assert_same(*found)
    assert training.counts["confirmed"] > 0


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("file", ARRIVALS, ids=["hiding", "speculation"])
def test_passes_that_are_interrupted_as_gradients_arrive(tmp_path: Path, file: str) -> None:
    """At lines that grow from step to step; then gradients are dropped, with or without a word, and made again."""

    def backward(training: Training, step: int) -> None:
        training.seed += 1
        at_line = AtLine(5 * step, (file,), interrupt)
        with contextlib.suppress(KeyboardInterrupt), at_line:
            loss_of(training.model, training.seed).backward()
        (training.optimizer if step % 2 else training.model).zero_grad()
        training.backward()

    assert same_bits_for(tmp_path, backward, torch.float32)["confirmed"] > 0


@pytest.mark.parametrize("file", ARRIVALS, ids=["hiding", "speculation"])
def test_a_first_gradient_whose_arrival_is_interrupted(tmp_path: Path, file: str) -> None:
    for nth in range(8):
        training = Training(tmp_path / str(nth), "backward")
        with training.optimizer as optimizer:
            with pytest.raises(KeyboardInterrupt), AtLine(nth, (file,), interrupt) as at_line:
                training.backward()
            for _ in range(3):
                optimizer.zero_grad()
                training.backward()
                training.step()
        assert training.counts["confirmed"] > 0, at_line.where


SECONDS = {"forward": 2.5, "forward and backward": 2.0, "": 3.0, "backward": 4.0}
"""Of iterations, by where steps are hidden; where they are not, it is twice that from the ninth step on."""


def feed(patched: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Have "auto" believe that iterations take what `seconds` returns."""
    patched.setattr(Pace, "iteration_s", property(lambda _: seconds(), lambda *_: None), raising=False)


def run_as_fed(
    training: Training, monkeypatch: pytest.MonkeyPatch, check: Callable[[Any, int, bool], None] | None = None
) -> tuple[list[torch.Tensor], list[bool]]:
    """Train 28 steps, whose iterations are said to take `SECONDS`.

    Returns:
        All weights and state, and after each step whether updates are made during backward.
    """
    speculates = [False]
    with training.optimizer as optimizer:
        if training.follow:
            optimizer.overlap_forward(training.model)

        def seconds() -> float:
            hidden_in = optimizer.plan.hidden_in
            return SECONDS[hidden_in] * (1 + (not hidden_in and len(speculates) > 8))

        feed(monkeypatch, seconds)
        for step in range(1, 29):
            plain(training, random.Random(0))
            training.step()
            assert not training.follow or all(p.grad is None for p in training.model.parameters())
            optimizer.zero_grad()
            speculates.append(optimizer.engine.speculates)
            if check is not None:
                check(optimizer, step, speculates[-2])
        return everything(optimizer, training.model), speculates[1:]


def auto_changes(follows: bool) -> list[int]:
    """Return the steps after which "auto", fed so, begins or ends to have updates made during backward.

    Without forward it tries that from step 8 on, leaves it at 12, and tries it again at 24, as steps that are not
    hidden take twice as long by then. Else it tries "both", "off" and "backward" in turn, and goes back to "both".
    """
    return [8, 12, 16] if follows else [8, 12, 24]


def changes(speculates: list[bool]) -> list[int]:
    """Return the steps after which it was another answer than before."""
    return [number for number, (one, two) in enumerate(pairwise(speculates), 2) if one != two]


@pytest.mark.parametrize("follows", [False, True])
def test_auto_does_what_times_say(
    tmp_path: Path, follows: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it tries, and takes up again: all bits are those of "off"."""
    caplog.set_level("INFO", "offload")

    arenas: list[tuple[int, bool]] = []
    hidden_in: dict[str, None] = {}

    def check(optimizer: Any, step: int, has_speculated: bool) -> None:
        hidden_in[optimizer.plan.hidden_in] = None
        if step > 8 and step % 4:  # when it is chosen a step may still go on
            optimizer.finish()
            # Memory for new weights is there as long as some are made, and freed by the first step without.
            arenas.append((len(optimizer.engine._parts.memory.arenas), has_speculated))
        if not has_speculated and step % 4:  # nothing is opened for nobody
            optimizer.finish()
            assert not optimizer.engine._parts.machine.is_open
            assert not optimizer.engine._thread.speculation.count_and_is_due()

    found = []
    for overlap in ("off", "auto"):
        training = Training(tmp_path / overlap, overlap)
        training.follow = follows
        state, speculates = run_as_fed(training, monkeypatch, check if overlap == "auto" else None)
        found.append(state)
        if overlap == "off":
            assert not any(speculates)
        else:
            assert (changes(speculates), speculates[-1]) == (auto_changes(follows), True)
            assert training.counts["confirmed"] > 0
    assert {count - has_images for count, has_images in arenas} == {min(count for count, _ in arenas)}
    assert_same(*found)
    ways = {"forward", "forward and backward", "", "backward"} if follows else {"", "backward"}
    assert hidden_in.keys() == ways
    assert f'"{"both" if follows else "off"}" from now on, by what an iteration has taken' in caplog.text


@pytest.mark.parametrize("settings", [{}, {"gradient_memory": 0}], ids=["stay", "leave"])
def test_auto_leaves_no_gradient_and_no_weight_unwaited_for_in_any_way(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever never calls `zero_grad`, as forward leaves nothing to drop, has the bits of those who do."""
    found, hidden_in = [], set()
    for overlap in ("off", "auto"):
        training = Training(tmp_path / overlap, overlap, **settings)
        with training.optimizer as optimizer:
            if overlap == "auto":
                optimizer.overlap_forward(training.model, check=True)
                feed(monkeypatch, lambda optimizer=optimizer: SECONDS[optimizer.plan.hidden_in])  # type: ignore[misc]
            for _ in range(22):
                training.backward()
                training.backward()
                training.step()
                hidden_in.add(optimizer.plan.hidden_in)
                if overlap == "off":
                    optimizer.zero_grad()
            found.append(everything(optimizer, training.model))
    assert_same(*found)
    assert hidden_in == {"", "forward"} | ({"backward", "forward and backward"} if not settings else set())


def test_passes_before_a_step_are_as_many_as_the_caller_says(tmp_path: Path) -> None:
    """However many there are; without a word, only those of steps that have as many as the last are known."""
    found, last = [], [False]
    for overlap, told in (("off", None), ("backward", None), ("backward", lambda: last[0])):
        training = Training(tmp_path / f"{overlap}{told is not None}", overlap)
        with training.optimizer as optimizer:
            optimizer.last_micro_step(told)
            for passes in (2, 3, 2, 4, 3, 2, 4):
                for number in range(passes):
                    last[0] = number == passes - 1
                    training.backward()
                training.step()
                optimizer.zero_grad()
                if told is not None and optimizer.engine.step_number > 1:
                    assert optimizer.metrics()["speculation/confirmed_bytes"] == optimizer.engine.plan.state_bytes
            found.append(everything(optimizer, training.model))
        assert (training.counts["revoked"] > 0) == (overlap == "backward" and told is None)
    assert_same(*found[:2])
    assert_same(*found[1:])


@pytest.mark.parametrize("overlap", ["backward", "off"])
def test_the_plan_counts_new_weights(tmp_path: Path, overlap: str) -> None:
    training = Training(tmp_path / "run", overlap)
    with training.optimizer as optimizer:
        plan, numel = optimizer.engine.plan, sum(p.numel() for p in training.model.parameters())
        assert ("where they are made during backward" in str(plan)) == (overlap == "backward")
        assert 2 * numel * (overlap == "backward") <= plan.image_bytes <= 2.2 * numel * (overlap == "backward")
        for _ in range(3):
            training.backward()
            training.step()
            optimizer.zero_grad()
        sizes = [arena.nbytes for arena in optimizer.engine._parts.memory.arenas]
        assert overlap == "off" or any(0.9 * plan.image_bytes <= nbytes <= plan.image_bytes for nbytes in sizes)


@pytest.mark.late(shared=True)
def test_auto_is_off_where_backward_is_refused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16, device="late"))]
    settings = offload.OffloadConfig(overlap="auto", placement="cpu")
    with offload.AdamW(parameters, offload=settings) as optimizer:
        for _ in range(5):
            parameters[0].grad = torch.ones_like(parameters[0])
            optimizer.step()
        assert not optimizer.engine.speculates


def test_state_of_parameters_that_have_had_no_gradient(tmp_path: Path) -> None:
    """Added, and made by a checkpoint, after updates ahead of a step were chosen without them."""
    training = Training(tmp_path / "run", "backward")
    with training.optimizer as optimizer:
        for _ in range(4):
            training.backward()
            training.step()
            optimizer.zero_grad()
        optimizer.add_param_group({"params": [("added", torch.nn.Parameter(torch.ones(5000)))]})
        optimizer.save_checkpoint(tmp_path / "saved")
        optimizer.wait_checkpoint()
        machine = optimizer.engine._parts.machine
        until_s = time.monotonic() + 20
        while not machine.is_open and time.monotonic() < until_s:
            time.sleep(0.001)
        assert machine.is_open
        optimizer.state_dict()
        training.backward()
        training.step()


def test_hyperparameters_that_are_there_for_the_step_only(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", "backward")
    with training.optimizer as optimizer:
        for step in range(6):
            groups = optimizer.param_groups[:]
            rate = groups[0]["lr"]
            if step % 2:
                optimizer.param_groups.clear()
            else:
                groups[0]["lr"] = None
            training.backward()
            optimizer.param_groups[:] = groups
            groups[0]["lr"] = rate
            training.step()
            optimizer.zero_grad()
    assert training.counts["confirmed"] == 0


@pytest.mark.parametrize("fails", [False, True])
def test_hyperparameters_are_read_as_a_pass_begins(tmp_path: Path, fails: bool) -> None:
    """Once, and on the caller's thread, whatever else is asked for before the step; which asks itself."""
    training, asked = Training(tmp_path / "run", "backward"), []

    def values(optimizer: torch.optim.Optimizer) -> list[Any]:
        asked.append(threading.current_thread())
        if fails:
            raise ValueError("no schedule")
        return []

    with training.optimizer as optimizer:
        for _ in range(4):
            training.backward()
            training.step()
            optimizer.zero_grad()
        confirmed_bytes = training.counts["confirmed"]
        optimizer._route.announcer = Announcer(optimizer, values, optimizer._weights, Pace())
        for passes in (1, 2):
            training.backward()
            training.settle()
            optimizer.state_dict()
            assert asked == passes * [threading.current_thread()]
        training.step()
        assert optimizer.engine.step_number == 5
    assert training.counts["confirmed"] == confirmed_bytes > 0


def test_the_last_pass_says_with_which_hyperparameters_a_step_is_foreseen(tmp_path: Path) -> None:
    """Whatever an earlier one has said, of which all gradients have arrived."""
    training = Training(tmp_path / "run", "backward")
    with training.optimizer as optimizer:
        for _ in range(4):
            for rate in (1.0, 1e-2):
                optimizer.param_groups[0]["lr"] = rate
                training.backward()
            training.step()
            optimizer.zero_grad()
        assert training.counts["confirmed"] == 3 * optimizer.engine.plan.state_bytes


@pytest.mark.parametrize("reads", [False, True])
def test_passes_without_steps_write_what_one_step_would(tmp_path: Path, reads: bool) -> None:
    """Gradients that are looked at and dropped, or state that is read time and again before a step."""
    training = Training(tmp_path / "run", "backward")
    with training.optimizer as optimizer:
        for _ in range(5):
            training.backward()
            training.step()
            optimizer.zero_grad()
        before_bytes = optimizer.metrics()["path/0/written_bytes"]
        for _ in range(10):
            if not reads or optimizer.param_groups[0]["params"][0].grad is None:
                training.backward()
            training.settle()
            optimizer.state_dict() if reads else optimizer.zero_grad()
        written_bytes = optimizer.metrics()["path/0/written_bytes"] - before_bytes
        assert 0 < written_bytes < 3.5 * optimizer.engine.plan.state_bytes  # staging slots are flushed, too
        training.backward()
        training.step()
        assert optimizer.metrics()["speculation/revoked_bytes"] > 0


class Owner:
    """Keeps an optimizer that it has told what it knows of passes."""

    def __init__(self, folder: Path) -> None:
        self.training = Training(folder, "backward")
        self.training.optimizer.last_micro_step(self.is_last)

    def is_last(self) -> bool:
        return True


def test_a_forgotten_optimizer_ends_whatever_it_was_told_of_passes(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "run")
    owner.training.backward()
    owner.training.step()
    optimizer = weakref.ref(owner.training.optimizer)
    del owner
    gc.collect()
    assert optimizer() is None
