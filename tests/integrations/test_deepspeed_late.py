"""The DeepSpeed backend on the test accelerator: weights and gradients on a device whose streams dawdle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from accelerator import processes
from test_deepspeed import OTHERS, failures, start

NAME = "alone_on_an_accelerator"
SOME = ("micro_steps_by_hand", "gradients_set_by_hand_count", "pieces_know_their_place", "phases_change_nothing")
"""Checks that `make test` runs, too."""
PARTS = 4
"""Starts of all checks: one alone takes hours where others have the cores, too."""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    processes.needed()


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.full), 2])
def on_cpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Return a number of ranks, and where they have left what DeepSpeed and the engine compute on the CPU."""
    folder = tmp_path_factory.mktemp("cpu")
    assert start(request.param, folder, (NAME,)) == {NAME: "ok"}
    return request.param, folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_every_stage_has_the_bits_of_the_cpu(on_cpu: tuple[int, Path], seed: int, tmp_path: Path) -> None:
    """Losses, norms, weights and state, whatever runs late; a checkpoint goes on as what it was taken of."""
    world, expected_in = on_cpu
    assert start(world, tmp_path, (NAME,), DELAYS=str(seed)) == {NAME: "ok"}
    for rank in range(world):
        expected, found = (torch.load(folder / f"trained-{rank}.pt") for folder in (expected_in, tmp_path))
        for number, ((losses, state), (mine, own)) in enumerate(zip(expected, found, strict=True)):
            assert mine == losses, f"case {number}"
            assert own.keys() == state.keys()
            assert not [name for name, tensor in state.items() if not torch.equal(own[name], tensor)], (
                f"case {number}"
            )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_some_checks(tmp_path: Path) -> None:
    """Half of the subgroups are updated there, the others on the CPU."""
    assert start(1, tmp_path, SOME, PLACEMENT="0.5", DELAYS="1") == dict.fromkeys(SOME, "ok")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_that_ranks_gather_behind_a_step_leave_the_device_s_collectives_in_one_order(tmp_path: Path) -> None:
    """The ranks compare them at their end."""
    name = "steps_that_go_on_into_forward_change_nothing"
    assert start(2, tmp_path, (name,), PLACEMENT="0.5", DELAYS="2", STAGES="1") == {name: "ok"}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("placement", ["cpu", "0.5", "gpu"])
@pytest.mark.parametrize("world", [1, 2])
def test_all_checks(world: int, placement: str, part: int, tmp_path: Path) -> None:
    """Beside stock DeepSpeed, which is on the accelerator as well then."""
    names = OTHERS[part::PARTS]
    found = start(world, tmp_path, names, timeout_s=3000, PLACEMENT=placement, DELAYS=str(world))
    assert not failures(found), "\n".join(failures(found))
