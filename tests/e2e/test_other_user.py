"""A user who may not enter the home directory that the environment names, as in `docker run --user 12345`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import prepared
import pytest

from offload import cli

PROGRAM = """
import os, sys
import torch
import offload
from offload import cli
from offload.measure import full

full.UPDATE_NUMEL = 0  # as `small_probe` has it
state, user = sys.argv[1:]

def everything():
    parameter = torch.nn.Parameter(torch.zeros(40_000))
    with offload.AdamW([parameter], offload=dict(host_memory=0, paths=[state], subgroup_numel=8192)) as optimizer:
        parameter.grad = torch.ones(40_000)
        optimizer.step()
        optimizer.state_dict()
    try:
        planned = cli.main(["plan", "--params", "1e6"])
    except SystemExit as refused:
        planned = refused.code
    return [planned, cli.main(["probe", "--seconds", "0.05", "--quiet"])]

home = {name: os.environ.pop(name, "") for name in ("HOME", "XDG_CACHE_HOME")}
os.environ["HOME"] = state
everything()  # loads what the other user may have no right to read
print("---", file=sys.stderr, flush=True)
del os.environ["HOME"]
os.environ |= {name: folder for name, folder in home.items() if folder}
if user != "0":
    os.setresgid(int(user), int(user), int(user))
    os.setresuid(int(user), int(user), int(user))
print(everything())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may reach; pytest's are for the one who runs it."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    (made / "locked").chmod(0o700)
    shutil.rmtree(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HOME", "XDG_CACHE_HOME"])
def test_a_home_that_cannot_be_entered_is_none(folder: Path, name: str) -> None:
    state, locked = folder / "state", folder / "locked"
    state.mkdir()
    state.chmod(0o777)
    locked.mkdir()
    locked.chmod(0o700 if os.geteuid() == 0 else 0)
    environment = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    command = [prepared.python(), "-c", PROGRAM, str(state), "12345" if os.geteuid() == 0 else "0"]
    done = subprocess.run(
        command, env={**environment, name: str(locked)}, cwd=state, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[2, 0]"
    said = done.stderr.rpartition("---\n")[2]
    assert "Permission denied" not in said
    assert "give the machine" in said
    assert said.count("the rates are not kept") == 1
    locked.chmod(0o700)
    assert os.listdir(locked) == []


@pytest.mark.usefixtures("small_probe")
def test_a_user_without_a_home_writes_none_beside_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda name: name)  # as without HOME and an entry in /etc/passwd
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # "/", for whoever is not root
    assert cli.main(["probe", "--seconds", "0.05", "--quiet"]) == 0
    assert "/~/.cache/offload" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
