"""A user who may not enter the home directory that the environment names, or what others have on a shared path."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import prepared
import pytest
import torch

import offload
from offload import cli
from offload._native import CompletionQueue
from offload.checkpoint.stores import Pin, delete_free, find_stores, leftover_bytes, store_folder, write_pins
from offload.tiers import FileTier

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

SAVES = """
import os, sys
import torch
import offload
from offload.measure import full

full.UPDATE_NUMEL = 0  # as `small_probe` has it
path, checkpoint = sys.argv[1:]

def save(folder):
    parameter = torch.nn.Parameter(torch.zeros(40_000))
    config = dict(host_memory=0, paths=[path], subgroup_numel=8192)
    with offload.AdamW([("w", parameter)], offload=config) as optimizer:
        parameter.grad = torch.ones(40_000)
        optimizer.step()
        optimizer.save_checkpoint(folder)
        optimizer.wait_checkpoint()

os.environ["HOME"] = path
save(f"{path}/root")  # loads what the other user may have no right to read
os.setresgid(12345, 12345, 12345)
os.setresuid(12345, 12345, 12345)
save(checkpoint)
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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can be two users")
def test_what_another_user_has_locked_up_is_passed_over(folder: Path) -> None:
    """A rank's folder and a store of root's: beside them, one's own stores are deleted, and counted as room."""
    folder.chmod(0o777)
    stores = [uuid.UUID(int=number) for number in range(3)]
    for name in ("rank-0", f"offload-{stores[0]}", "locked"):
        (folder / name).mkdir(0o700)

    def tidy() -> None:
        """Do as a session that begins, and finds one store that no checkpoint needs, and one that has a pin."""
        os.setresgid(12345, 12345, 12345)
        os.setresuid(12345, 12345, 12345)
        for store in stores[1:]:
            tier = FileTier(folder, store, CompletionQueue())
            tier.keep(())
            tier.close()
        write_pins(store_folder(str(folder), stores[2]), [Pin("0" * 32, "/gone")])
        delete_free([str(folder)])
        assert [store.path for store in find_stores(str(folder))] == [
            str(folder / f"offload-{store}") for store in (stores[0], stores[2])
        ]
        assert leftover_bytes({str(folder): 1 << 40}).keys() == {"0" * 32}

    child = os.fork()
    if child == 0:
        status = 1
        try:
            tidy()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("small_probe")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can be two users")
def test_another_users_checkpoint_is_not_replaced_while_it_may_be_in_use(folder: Path) -> None:
    for name in ("state", "other", "ck", "locked"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    parameter = torch.nn.Parameter(torch.zeros(40_000))
    config = offload.OffloadConfig(host_memory=0, paths=[folder / "state"], subgroup_numel=8192)
    with offload.AdamW([("w", parameter)], offload=config) as optimizer:
        parameter.grad = torch.ones(40_000)
        optimizer.step()
        optimizer.save_checkpoint(folder / "ck")
        optimizer.wait_checkpoint()
        command = [prepared.python(), "-c", SAVES, str(folder / "other"), str(folder / "ck")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "ck holds a checkpoint that a process of another user or machine has saved" in done.stderr
        optimizer.load_checkpoint(folder / "ck")


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
