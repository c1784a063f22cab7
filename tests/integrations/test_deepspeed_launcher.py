"""`python -m offload.integrations.deepspeed`: the script runs as it would without us, and its state is offloaded."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepared
import pytest

pytest.importorskip("deepspeed")

LAUNCHER = ("-m", "offload.integrations.deepspeed")
SCRIPT = Path(__file__).with_name("deepspeed_script.py")
PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
VARIABLE = "OFFLOAD_DEEPSPEED_CONFIG"
OFFLOADED, STOCK = "OffloadedStage3", "DeepSpeedZeroOptimizer_Stage3"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "steps_per_print": 10**9,
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}

ENDS_IN_FRAMES = ("raise", "interrupt")
"""Ends that show frames: those of a prepared process are there as well."""

PROGRAM = """
import json, os, sys
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals()]))

def fail(how):
    if how == "raise":
        raise ValueError("as asked")
    if how == "interrupt":
        raise KeyboardInterrupt
    sys.exit("a message" if how == "message" else 7)

if sys.argv[-1] != "end":
    fail(sys.argv[-1])
"""


def python(*arguments: str, cwd: Path, fresh: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable if fresh else prepared.python(), "-W", "ignore", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=840)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "exit", "message", "raise", "interrupt"])
def test_a_script_runs_as_plain_python_runs_it(how: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "program.py").write_text(PROGRAM)
    plain, ours = (
        python(*launcher, "scripts/program.py", "--flag", how, cwd=tmp_path, fresh=how in ENDS_IN_FRAMES)
        for launcher in ((), LAUNCHER)
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert how == "end" or ours.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_module_runs_as_plain_python_runs_it(how: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "program.py").write_text(PROGRAM)
    plain, ours = (
        python(*launcher, "-m", "package.program", how, cwd=tmp_path, fresh=how in ENDS_IN_FRAMES)
        for launcher in ((), LAUNCHER)
    )
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert "runpy" not in ours.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("nothing.py",), 2, "nothing.py"),
        (("-m", "no.such.module"), 1, "No module named no.such.module"),
        ((), 2, "usage"),
        (("--flag", "program.py"), 2, "usage"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(
    arguments: tuple[str, ...], status: int, says: str, tmp_path: Path
) -> None:
    done = python(*LAUNCHER, *arguments, cwd=tmp_path)
    assert done.returncode == status
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def trained(folder: Path, name: str, *arguments: str, ranks: int = 2, status: int = 0) -> list[dict[str, Any]]:
    """Run the training script in ranks; return what each of them wrote."""
    offload = {"host_memory": 0, "paths": [str(folder)], "subgroup_numel": 1024, "threads": 1}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "multi_tier_offload": offload}))
    script = [argument.format(script=SCRIPT) for argument in arguments]
    extra = [str(folder / name), str(folder / "config.json")]
    place = script.index(str(SCRIPT) if str(SCRIPT) in script else SCRIPT.stem) + 1
    command = [*script[:place], *extra, *script[place:]]
    program = (*prepared.torchrun(ranks), *command)
    done = python(*program, cwd=folder, fresh=name == "fresh", PYTHONPATH=str(SCRIPT.parent))
    assert bool(done.returncode) == bool(status), done.stderr[-3000:]
    assert not status or f"exitcode  : {status}" in done.stderr, done.stderr[-3000:]
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_that_cannot_be_edited_is_offloaded(tmp_path: Path) -> None:
    """Without the call or the launcher the object is ignored; with either of them losses are the same."""
    (stock,) = trained(tmp_path, "stock", "{script}", ranks=1)
    assert stock["optimizers"] == {"actor": STOCK}
    assert stock["said"] == []  # nothing of ours is there to say it
    forgot = trained(tmp_path, "forgot", "{script}", "--import")
    for rank, found in enumerate(forgot):
        assert found["optimizers"] == {"actor": STOCK}
        assert [text.count("multi_tier_offload, which DeepSpeed ignores") for text in found["said"]] == [1] * (
            not rank
        )
    edited = trained(tmp_path, "edited", "{script}", "--enable")
    launched = trained(tmp_path, "launched", *LAUNCHER, "{script}")
    assert [rank["losses"] for rank in launched] == [rank["losses"] for rank in edited]
    for rank in (*edited, *launched):
        assert (rank["optimizers"], rank["resident"]) == ({"actor": OFFLOADED}, 0)
        assert not any("ignores" in text for text in rank["said"])
    assert launched[0]["argv"] == [str(SCRIPT), str(tmp_path / "launched"), str(tmp_path / "config.json")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deepspeeds_launcher_puts_its_rank_before_the_program(tmp_path: Path) -> None:
    """It reaches the program, whose exit status reaches whoever waits for it."""
    arguments = (*LAUNCHER, "--local_rank=0", "-m", SCRIPT.stem)
    (found,) = trained(tmp_path, "fresh", *arguments, ranks=1, status=7)
    assert not found["early"]  # the launcher itself imports nothing that reads the environment
    assert found["local_rank"] == 0
    assert found["argv"][1] == "--local_rank=0"
    assert found["optimizers"] == {"actor": OFFLOADED}


def recipe(language: str) -> str:
    """Return a block of the page's section on programs that build their config in code."""
    section = PAGE.read_text().partition("### Programs that build their config in code")[2]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found
    return found[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_config_that_is_built_in_code_gets_the_object(tmp_path: Path) -> None:
    """As the page says, in ranks: where the optimizer is offloaded, with the bits of a config that has the object."""
    given = {**json.loads(recipe("json")), "paths": [str(tmp_path)], "host_memory": 0, "subgroup_numel": 1024}
    own = {**given, "subgroup_numel": 2048}
    (tmp_path / "offload.json").write_text(json.dumps(given))
    launcher, *command = shlex.split(recipe("sh"))
    assert (launcher, command.pop()) == ("torchrun", "ARGUMENTS")
    command[command.index("train.py")] = str(SCRIPT)
    ranks = int(command[command.index("--nproc-per-node") + 1])
    command += [str(tmp_path / "seen"), "--object", json.dumps(own)]
    done = python("-m", "torch.distributed.run", "--standalone", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = ""
    for rank in range(ranks):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        optimizers = seen["optimizers"]
        assert (optimizers["actor"], optimizers["own"], optimizers["critic"]) == (OFFLOADED, OFFLOADED, STOCK)
        assert "Offloaded" not in optimizers["reference"]
        assert seen["losses"]["actor"] == seen["losses"]["own"]
        assert seen["paths"] == [str(tmp_path / f"rank-{rank}")]
        assert seen["config"], "the program's own dictionary has changed"
        assert seen["argv"] == [str(SCRIPT), *command[-3:]]
        assert seen["variable"] == str(tmp_path / "offload.json")
        said += "\n".join(seen["said"])
    assert said.count("has its own multi_tier_offload, which is used") == 1
    assert said.count("an optimizer stays DeepSpeed's") == 1


@pytest.mark.slow
def test_with_the_variable_an_import_is_enough(tmp_path: Path) -> None:
    """Whatever has started the program; without the import nothing is known of it."""
    (tmp_path / "offload.json").write_text(json.dumps({"host_memory": 0, "paths": [str(tmp_path)]}))
    for extra, expected in (((), STOCK), (("--import",), OFFLOADED)):
        command = (*prepared.torchrun(1), str(SCRIPT), str(tmp_path / "seen"), *extra)
        done = python(*command, cwd=tmp_path, **{VARIABLE: "offload.json"})
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads((tmp_path / "seen-0.json").read_text())["optimizers"]["actor"] == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "it cannot be read: No such file or directory"),
        ("{", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        ("[]", "give an object"),
        ('{"host_memroy": 1}', 'did you mean "host_memory"?'),
        ('{"host_memory": "many"}', "host_memory"),
        ('{"keep_grads": true}', "DeepSpeed decides"),
        ('{"overlap": "ahead"}', 'use "off" or "forward"'),
        ('{"multi_tier_offload": {"host_memory": 1}}', "give the fields of multi_tier_offload alone"),
    ],
)
@pytest.mark.parametrize("how", ["option", "one word", "variable"])
def test_a_file_that_cannot_be_used_is_said_in_a_line_before_the_program_runs(
    content: str | bytes | None,
    says: str,
    how: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from offload.integrations.deepspeed.__main__ import main

    file, program = tmp_path / "offload.json", tmp_path / "program.py"
    program.write_text("raise AssertionError('it runs')")
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = {"option": ["--config", str(file)], "one word": [f"--config={file}"], "variable": []}[how]
    monkeypatch.setattr(sys, "argv", sys.argv)
    if how == "variable":
        monkeypatch.setenv(VARIABLE, str(file))
    else:
        monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["--local_rank=0", *given, str(program)])
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert (len(shown.err.splitlines()), shown.out) == (1, "")
    assert str(file) in shown.err
    assert says in shown.err


def test_what_was_given_in_code_comes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import offload.integrations.deepspeed as offload_deepspeed
    from offload import ConfigError
    from offload.integrations.deepspeed import switch

    file = tmp_path / "offload.json"
    file.write_text('{"threads": 2}')
    monkeypatch.setenv(VARIABLE, str(file))
    try:
        offload_deepspeed.enable({"threads": 1})
        offload_deepspeed.enable()
        assert switch.object_for_all == {"threads": 1}
        with pytest.raises(ConfigError, match="thredas"):
            offload_deepspeed.enable({"thredas": 1})
        assert switch.object_for_all == {"threads": 1}
        offload_deepspeed.disable()
        offload_deepspeed.enable()
        assert switch.object_for_all == {"threads": 2}
    finally:
        offload_deepspeed.disable()
    assert switch.object_for_all is None
