"""Two hosts with two ranks each and disks of their own: networks and mounts apart, one folder of checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import prepared
import pytest

PROGRAM = Path(__file__).with_name("hosts_run.py")
KINDS = ["ddp", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("fsdp2", "deepspeed"))]
LIMIT_S = 300


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Two network name spaces that see each other; what runs in one has mounts and a name of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, mark = folder, uuid.uuid4().hex[:6]
        self.of_host: dict[int, list[subprocess.Popen[bytes]]] = {0: [], 1: []}
        self.ends: dict[subprocess.Popen[bytes], int] = {}
        self.names = [f"hosts-{mark}-{letter}" for letter in "ab"]
        for name in ("disk", "disk-a", "disk-b"):
            (folder / name).mkdir()
        for name in self.names:
            ip("netns", "add", name)
        ends = [f"v{mark}{letter}" for letter in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(self.names, ends, strict=True)):
            ip("link", "set", end, "netns", name, "name", "eth0")
            for words in (
                f"addr add 10.11.12.{number + 1}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            ):
                ip("-n", name, *words.split())

    def close(self) -> None:
        self.kill(0, 1)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def start(self, kind: str, steps: int, *words: str, dealt: Sequence[int] = (0, 0, 1, 1)) -> None:
        """Start four ranks; `dealt` says on which host each is."""
        rendezvous = f"file://{self.folder}/rendezvous-{uuid.uuid4()}"
        for left in (*self.folder.glob("saving-*"), *self.folder.glob("said-*")):
            left.unlink()
        self.of_host = {0: [], 1: []}
        for rank, host in enumerate(dealt):
            letter = "ab"[host]
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(len(self.of_host[host])),
                "WORLD_SIZE": str(len(dealt)),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "10.11.12.1",
                "MASTER_PORT": "0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "RENDEZVOUS": rendezvous,
                "OMP_NUM_THREADS": "1",
            }
            command = [prepared.python(), "-W", "ignore", str(PROGRAM), kind, str(self.folder), str(steps), *words]
            command += [f"network={self.names[host]}", f"host={letter}"]
            end, held = os.pipe()  # nobody has the other end any more when the program is gone
            with (self.folder / f"log-{rank}").open("wb") as log:
                streams = {"stdin": held, "stdout": log, "stderr": log}
                process = subprocess.Popen(command, env={**os.environ, **variables}, **streams)
            os.close(held)
            self.of_host[host].append(process)
            self.ends[process] = end

    def wait(self) -> list[dict[str, Any]]:
        """Wait until all ranks have ended; return what they say."""
        until_s = time.monotonic() + LIMIT_S
        for process in (p for ranks in self.of_host.values() for p in ranks):
            process.wait(max(1.0, until_s - time.monotonic()))
        found = []
        for rank in range(4):
            said = self.folder / f"said-{rank}.json"
            assert said.exists(), (self.folder / f"log-{rank}").read_text()[-2000:]
            found.append(json.loads(said.read_text()))
        return found

    def kill(self, *hosts: int) -> None:
        for host in hosts:
            for process in self.of_host[host]:
                process.kill()
                process.wait()
                if process in self.ends:
                    os.read(self.ends[process], 1)
                    os.close(self.ends.pop(process))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("needs root, iproute2 and unshare")
    try:
        subprocess.run(["unshare", "-n", "-m", "-u", "true"], check=True, capture_output=True)
        found = Hosts(tmp_path)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no name spaces here: {error}")
    try:
        yield found
    finally:
        found.close()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_a_host_dies_and_all_go_on(hosts: Hosts, kind: str) -> None:
    """What was committed before is resumed from; ranks on the other host are told whose disk they would need.

    Or they go on from a mirror that both hosts see.
    """
    folder, mirror = str(hosts.folder / "run"), hosts.folder / "mirror"
    mirror.mkdir()
    has_mirror = kind != "deepspeed"  # whose tags have more than the engines mirror
    hosts.start(kind, 5)
    whole = [said["digest"] for said in hosts.wait()]
    hosts.start(kind, 3, f"save={folder}", "waits", *([f"mirror={mirror}"] if has_mirror else []))
    until_s = time.monotonic() + LIMIT_S
    while len([*hosts.folder.glob("saving-*")]) < 4:
        assert time.monotonic() < until_s, (hosts.folder / "log-0").read_text()[-2000:]
        time.sleep(0.05)
    hosts.kill(1)
    for process in hosts.of_host[0]:
        assert process.wait(LIMIT_S)  # the network says so, or the commit that waits for the others does
    hosts.start(kind, 5, f"load={folder}", dealt=(1, 1, 0, 0))
    for rank, said in enumerate(hosts.wait()):
        assert "digest" not in said
        if kind != "deepspeed" or "another rank" not in said["error"]:
            there = "host-a" if rank < 2 else "host-b"
            assert there in said["error"] or kind == "ddp", said
            assert "disk" in said["error"], said
    for source, dealt in ((folder, (0, 0, 1, 1)), *([(f"{mirror}/run", (1, 0, 1, 0))] if has_mirror else [])):
        hosts.start(kind, 5, f"load={source}", dealt=dealt)
        found = hosts.wait()
        assert [said["first"] for said in found] == [3] * 4
        assert [said["digest"] for said in found] == whole
