"""No command line hangs, fills the memory, or ends in a traceback; `tests/hostile.py` draws them."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import hostile
import prepared
import pytest

CALLS, SEEDS, PROCESSES = 500, (1, 2, 3, 4), 14


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "files").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return hostile.make_files(tmp_path / "files")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*SEEDS[:1], *(pytest.param(seed, marks=pytest.mark.full) for seed in SEEDS[1:])])
def test_every_call_ends_soon_with_a_word_or_an_answer(places: list[str], seed: int) -> None:
    wrong = []
    for arguments, variables in itertools.islice(hostile.calls(seed, places), CALLS):
        outcome = hostile.run(arguments, variables)
        if faults := outcome.faults():
            wrong.append((faults, [word[:100] for word in arguments], variables, outcome.errors[-1000:]))
    assert not wrong, f"{len(wrong)} calls, the first: {wrong[0]}"


@pytest.mark.slow
def test_processes_keep_to_limits_that_the_system_sets(places: list[str]) -> None:
    """Those of `offload bench`, which starts a process of its own, among them."""
    program = f"import sys; sys.path.append({str(Path(hostile.__file__).parent)!r}); import hostile; "
    program += "sys.exit(hostile.limited())"
    drawn = itertools.islice(hostile.calls(len(SEEDS) + 1, places), PROCESSES - len(BENCHES) - 1)
    for arguments, variables in [*drawn, *((["bench", *options], {}) for options in BENCHES), (PLAIN, {})]:
        environment = {**os.environ, **variables}
        done = subprocess.run(
            [prepared.python(), "-c", program, *arguments],
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=300,
            check=False,
        )
        outcome = hostile.Outcome(arguments, done.returncode, done.stdout, done.stderr, 0.0, 0)
        assert not outcome.faults(), (outcome.faults(), [word[:100] for word in arguments], done.stderr[-1000:])
    assert done.returncode == 0, "the plain one is answered"


PLAIN = ["plan", "--params", "1e6", "--rates", "h100-node-nvme-pfs"]
"""Not hostile, so that limits under which nothing is answered show."""
BENCHES = (["--tokens", "nan"], ["--params", "1e18"], ["--rounds", hostile.NINES], ["--minutes", "inf"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--params", "1e18"], "--params: '1e18' cannot be used; give a count from 1 to 1e+15"),
        (["--params", "1e9", "--tokens", "1e300"], "--tokens: '1e300'"),
        (["--params", "1e9", "--tokens", "100", "--flops", "1e-300"], "--flops: '1e-300'"),
        (["--params", "1e9", "--tokens", "\u0663"], "--tokens"),
        (["--params", "4e11", "--subgroup-numel", "1024"], "48,828,416 or more"),
        (["--params", "1e13"], "give more --ranks or --nodes"),
        (
            ["--config", "/dev/zero"],
            "'/dev/zero' cannot be used; it cannot be read: it is not a regular file",
        ),
        (["--config", "brackets"], "nested too deeply"),
        (["--config", "latin"], "not JSON"),
        (["--config", "sparse"], "more than 16777216 bytes"),
        (["--config", "x" * 5000], "--config: 'xxx"),
        (["--config", "deep"], "makes no model"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_hung_or_raised(
    places: list[str], arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path("..", "files"))
    outcome = hostile.run(["plan", *arguments, "--rates", "h100-node-nvme-pfs"], {})
    assert outcome.status == 2
    assert not outcome.faults()
    assert says in outcome.errors


@pytest.mark.parametrize("command", ["gc", "verify"])
def test_a_path_of_5000_characters(command: str, places: list[str]) -> None:
    outcome = hostile.run([command, "x" * 5000], {})
    assert outcome.status == 2
    assert "at most 255" in outcome.errors


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [["4e11"], ["1e15", "--nodes", "2500"]])
def test_the_largest_plans_are_made(sizes: list[str]) -> None:
    roomy = ["--node-memory", "8000000TiB", "--gpus", "0", "--path-bytes", "8000PiB"]
    outcome = hostile.run(["plan", "--params", *sizes, "--rates", "h100-node-nvme-pfs", *roomy], {})
    assert (outcome.status, outcome.faults()) == (0, [])
    assert "by the closed form" in outcome.said
    assert "8,192 at most" in outcome.said


def test_devices_and_pipes_are_not_written_to(places: list[str]) -> None:
    for target in ("../files/fifo", "/dev/null", "/dev/full", "../files/to-zero"):
        for arguments in (["trace", "../files/in-run", "--out", target], ["probe", "--out", target]):
            outcome = hostile.run(arguments, {})
            assert outcome.status == 2
            assert "name a file that is new" in outcome.errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["plan", "--rates", "h100-node"],
            "offload plan: give a model, by --model NAME, --params N or --config FILE",
        ),
        (["plan"], "--model NAME, --params N or --config FILE (see `offload plan --help`)"),
        (
            ["plan", "--params", "1e9"],
            "--drive 3.5GB/s:2TB --cores 16), by --rates FILE, or measure this",
        ),
        (["machine"], "offload machine: describe a machine: --host 64GiB"),
        (["plan", "--params", "1e9", "--rates", "h100-node", "--what"], "(see `offload plan --help`)"),
        (["gc"], "(see `offload gc --help`)"),
        (["plan", "--params", "8B", "--host", "-64GiB"], "--host: '-64GiB' cannot be used; give bytes as an integer"),
        (["plan", "--params", "8B", "--host", "64Gb"], "--host: '64Gb' cannot be used; a small \"b\" behind a large"),
        (["machine", "--host", "64GiB", "--link", "25Gb/s"], '(a network\'s 25 Gb/s are "3.125GB/s")'),
        (["--what"], "(see `offload --help`)"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_errors_name_the_help_of_the_command(
    places: list[str], arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)  # no rates of this machine
    outcome = hostile.run(arguments, {})
    assert outcome.status == 2
    assert says in outcome.errors
    assert not outcome.faults()


def test_a_tilde_is_the_home(places: list[str], tmp_path: Path) -> None:
    (tmp_path / "home" / "model.json").write_text('{"model_type": 7}')
    outcome = hostile.run(["plan", "--config", "~/model.json", "--rates", "h100-node"], {})
    assert f"'{tmp_path}/home/model.json' cannot be used; it has no" in outcome.errors
