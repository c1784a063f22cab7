"""Random histories of checkpoints: saved, resumed, moved, renamed, copied, linked, mounted, released, killed.

    python tests/faults/histories.py --histories 2000 [--seed 0]

Each history is a small world of directories. Processes come one after the other: each trains a little, saves, and
moves things about between its saves, and some are killed at a random change of the file system. After each operation
every checkpoint that nobody has released must be whole and hold what was saved, wherever its folder is by then.

The oracle goes by the documentation: before an operation it notes which checkpoints that may release (the one in the
folder that is saved to, and the oldest of those that the session keeps), and all others have to be there afterwards.
Exit status 1 and the history if one was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch

import offload
from offload.checkpoint.contents import read_commit, read_manifests
from offload.checkpoint.folder import open_folder
from offload.checkpoint.reader import Checkpoint, Range
from offload.checkpoint.stores import find_stores, read_pins, remove, store_folder

NUMEL = 2500
PROCESSES = 4
CHANGES = ("replace", "unlink", "rmdir", "fsync")


class World:
    """The directories of one history, and what is known of its checkpoints; kept in a file, for the next process."""

    def __init__(self, root: Path, mounts: bool) -> None:
        self.root = root
        self.mounts = mounts
        self.paths = ["p0", "p1"]
        self.values: dict[str, int] = {}
        """What each checkpoint that was committed holds, by its id."""
        self.released: list[str] = []
        self.intended: int | None = None
        """What the save under way would hold."""
        self.log: list[str] = []

    @classmethod
    def make(cls, root: Path, mounts: bool) -> World:
        world = cls(root, mounts)
        for name in ("p0", "p1", "runs/1", "runs/2", "hosts/1", "hosts/2", "ck", "mnt"):
            (root / name).mkdir(parents=True)
        (root / "latest").symlink_to("runs/1")
        world.store()
        return world

    @classmethod
    def read(cls, root: Path) -> World:
        fields = json.loads((root / "world.json").read_text())
        world = cls(root, fields.pop("mounts"))
        vars(world).update(fields)
        return world

    def store(self) -> None:
        fields = {name: value for name, value in vars(self).items() if name != "root"}
        (self.root / "world.tmp").write_text(json.dumps(fields))
        os.rename(self.root / "world.tmp", self.root / "world.json")

    def folders(self) -> list[Path]:
        """Return all folders with a `COMMIT`, each once."""
        found = []
        for directory, names, files in os.walk(self.root):
            names[:] = sorted(n for n in names if not n.startswith("offload-"))
            if "COMMIT" in files and not Path(directory).is_relative_to(self.root / "mnt"):
                found.append(Path(directory))
        return found

    def places(self) -> list[str]:
        return [str(self.root / name) for name in self.paths]

    def names(self) -> list[str]:
        """Return names of folders that may be saved to."""
        names = ["ck/a", "ck/b", "latest/ck", "runs/1/ck", "runs/2/ck", self.paths[0], f"{self.paths[1]}/rank-0"]
        return [*names, "mnt/ck"] if self.mounts else names

    def check(self) -> None:
        """Make sure that everything that was not released is there; take note of what was committed in between."""
        for folder in self.folders():
            id = read_commit(open_folder(folder)).id
            if id in self.released:
                continue
            with Checkpoint(folder, paths=self.places()) as checkpoint:
                for _, tile, problem in checkpoint.verify():
                    if problem is not None:
                        raise AssertionError(f"{folder.relative_to(self.root)} has lost {tile}: {problem}")
                master = torch.empty(NUMEL, dtype=torch.float32, device="cpu")
                checkpoint.read([Range("w", "master", 0, master)])
            value = zlib.crc32(master.numpy().tobytes())
            if id not in self.values and self.intended is not None:
                self.values[id] = self.intended
            if self.values.get(id) != value:
                raise AssertionError(f"{folder.relative_to(self.root)} holds {value}, and not what was saved")


class Session:
    """An optimizer, and which checkpoints it keeps by the book."""

    def __init__(self, world: World, rng: random.Random, resumes: bool) -> None:
        self.world, self.keep = world, rng.choice((1, 1, 2, 3))
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        weight = torch.nn.Parameter(torch.randn(NUMEL, generator=generator, dtype=torch.float32).bfloat16())
        self.weight = weight
        self.kept: list[tuple[str, Path]] = []
        # A store that was moved is found on the session's own paths.
        chosen = world.paths if resumes else rng.choice((world.paths, world.paths[:1], world.paths[1:]))
        self.optimizer = offload.AdamW(
            [("w", weight)],
            offload=offload.OffloadConfig(
                host_memory=rng.choice((0, 0, 16384)),
                paths=[{"path": str(world.root / name), "depth": 2} for name in chosen],
                subgroup_numel=1024,
                threads=1,
                checkpoints_kept=self.keep,
            ),
        )

    def train(self) -> None:
        self.weight.grad = torch.full((NUMEL,), 0.5, dtype=torch.bfloat16, device="cpu")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resume(self, folder: Path) -> None:
        """Load a checkpoint; if it is where it was written, or was moved, it is kept from then on."""
        id, manifests = read_manifests(open_folder(folder))
        kept: dict[str, tuple[int, Path]] = {}
        taken = True
        for ref in manifests[0].stores:
            path = ref.path
            if path is None:
                taken = False
                continue
            for place in (path, *self.world.places(), *(f"{place}/rank-0" for place in self.world.places())):
                if not os.path.isdir(f"{place}/offload-{ref.store}"):
                    continue
                for pin in read_pins(store_folder(place, ref.store)):
                    with contextlib.suppress(offload.CheckpointError):
                        other = read_commit(open_folder(pin.folder)).id
                        step = read_manifests(open_folder(pin.folder))[1][0].step
                        if pin.id == other == id and not os.path.samefile(pin.folder, folder):
                            taken = False  # a copy: the original keeps what it has
                        elif pin.id == other and step <= manifests[0].step:
                            kept[other] = step, Path(pin.folder).resolve()
                break
        self.optimizer.load_checkpoint(folder)
        if taken:
            older = sorted((step, id, place) for id, (step, place) in kept.items())
            self.kept += [(other, place) for _, other, place in older if other != id]
            self.kept = [entry for entry in self.kept if entry[0] != id] + [(id, folder.resolve())]

    def save(self, name: str, copy: bool) -> None:
        """Save, after noting which checkpoints this may release."""
        world = self.world
        folder = (world.root / name).resolve()
        released = [*world.released]
        with contextlib.suppress(offload.CheckpointError):
            world.released.append(read_commit(open_folder(folder)).id)
        if not copy:
            surplus = [entry for entry in self.kept if entry[1] == folder]
            others = [entry for entry in self.kept if entry[1] != folder]
            surplus += others[: max(0, len(others) + 1 - self.keep)]
            for id, place in surplus:
                with contextlib.suppress(offload.CheckpointError):
                    if read_commit(open_folder(place)).id == id:
                        world.released.append(id)
        world.intended = zlib.crc32(self.optimizer.state_for(self.weight)["master"].numpy().tobytes())
        world.store()
        try:
            self.optimizer.save_checkpoint(world.root / name, copy=copy)
        except offload.CheckpointError as refusal:
            if "somebody has moved there" not in str(refusal):
                raise
            world.released, world.intended = released, None
            world.store()
            return
        self.optimizer.wait_checkpoint()
        id = read_commit(open_folder(folder)).id
        world.values[id] = world.intended
        world.intended = None
        if not copy:
            self.kept = [entry for entry in self.kept if entry[0] not in world.released] + [(id, folder)]
        world.store()


def kill_at(changes: int) -> None:
    """Have this process killed at its n-th change of the file system."""
    left = changes

    def watch(change: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **options)

        return run

    for name in CHANGES:
        setattr(os, name, watch(getattr(os, name)))


def move_about(world: World, rng: random.Random, used: list[str]) -> str:
    """Do something to folders that the library is not told of; return what."""
    root = world.root
    folders = [f for f in world.folders() if f.name not in (*world.paths, "rank-0")]
    what = rng.choice(("rename", "rename", "copy", "swap", "link", "mount", "delete", "path"))
    number = len(world.log)
    if what in ("rename", "copy", "delete") and folders:
        folder = rng.choice(folders)
        if what == "rename":
            os.rename(folder, root / f"moved-{number}")
        elif what == "copy":
            shutil.copytree(folder, root / f"copied-{number}", symlinks=True)
        else:
            (folder / "COMMIT").unlink()  # first: this process may be killed on the way
            shutil.rmtree(folder)
        return f"{what} {folder.relative_to(root)}"
    if what == "swap" and len(folders) > 1:
        one, other = rng.sample(folders, 2)
        if not (one.is_relative_to(other) or other.is_relative_to(one)):
            os.rename(one, root / "swapped")
            os.rename(other, one)
            os.rename(root / "swapped", other)
            return f"swap {one.relative_to(root)} {other.relative_to(root)}"
    if what == "link":
        (root / "latest").unlink()
        (root / "latest").symlink_to(rng.choice(("runs/1", "runs/2")))
        return f"latest -> {os.readlink(root / 'latest')}"
    if what == "mount" and world.mounts:
        unmount(root)
        host = rng.choice(("hosts/1", "hosts/2"))
        subprocess.run(["mount", "--bind", root / host, root / "mnt"], check=True)
        return f"mnt is {host}"
    if what == "path" and not used:
        position = rng.randrange(2)
        old, new = world.paths[position], f"p{position}-{number}"
        os.rename(root / old, root / new)
        if rng.random() < 0.5:
            (root / old).symlink_to(new)
        world.paths[position] = new
        return f"{old} is {new} now"
    return "nothing"


def unmount(root: Path) -> None:
    # A mount of a directory on its own file system looks like any directory, so this asks until nothing is left.
    while subprocess.run(["umount", "--lazy", root / "mnt"], capture_output=True).returncode == 0:
        pass


def live(root: Path, seed: int) -> None:
    """One process of a history."""
    rng = random.Random(seed)
    world = World.read(root)

    def say(what: str) -> None:
        world.log.append(what)
        world.store()

    world.check()
    for _ in range(rng.randrange(3)):
        say(move_about(world, rng, []))
        world.check()
    for place in world.places():
        if rng.random() < 0.3:
            say(f"gc {place}")
            for leftover in find_stores(place):
                if leftover.is_free:
                    remove(leftover)
            world.check()
    for folder in world.folders():
        if rng.random() < 0.1:
            say(f"gc {folder}")
            for leftover in find_stores(str(folder)):
                if leftover.is_free:
                    remove(leftover)
            world.check()
    folders = [f for f in world.folders() if read_commit(open_folder(f)).id not in world.released]
    resumes = bool(folders) and rng.random() < 0.5
    session = Session(world, rng, resumes)
    if resumes:
        folder = rng.choice(folders)
        say(f"open, keeping {session.keep}; resume {folder.relative_to(root)}")
        session.resume(folder)
    else:
        say(f"open, keeping {session.keep}")
    if rng.random() < 0.4:
        say("to be killed")
        kill_at(rng.randrange(1, 60))
    for _ in range(rng.randrange(1, 5)):
        session.train()
        if rng.random() < 0.4:
            say(move_about(world, rng, world.paths))
            world.check()
        name, copy = rng.choice(world.names()), rng.random() < 0.3
        say(f"save {name}{', copied' if copy else ''}")
        session.save(name, copy)
        world.check()
    say("close")
    session.optimizer.close()
    world.check()


def run_history(seed: int, mounts: bool) -> str | None:
    """Run one history; return what was lost, with the history, or None."""
    root = Path(tempfile.mkdtemp(prefix="offload-histories-")).resolve()
    try:
        World.make(root, mounts)
        for number in range(PROCESSES):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    live(root, seed * PROCESSES + number)
                    status = 0
                except BaseException:
                    (root / "lost").write_text(traceback.format_exc())
                finally:
                    os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status not in (0, -signal.SIGKILL):
                why = (root / "lost").read_text() if (root / "lost").exists() else f"status {status}"
                return f"history {seed}:\n  " + "\n  ".join(World.read(root).log) + f"\n{why}"
        return None
    finally:
        if mounts:
            unmount(root)
        shutil.rmtree(root)


def prepare() -> None:
    """Have all modules loaded and no thread started, as the processes of histories are forked from this one."""
    torch.set_num_threads(1)
    logging.getLogger("offload").setLevel(logging.ERROR)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))])
    _ = offload.AdamW, offload.OffloadConfig  # which are imported when they are first asked for


def can_mount() -> bool:
    """Return whether directories can be mounted elsewhere here."""
    with tempfile.TemporaryDirectory() as root:
        one, other = Path(root, "one"), Path(root, "other")
        one.mkdir()
        other.mkdir()
        try:
            done = subprocess.run(["mount", "--bind", one, other], capture_output=True).returncode == 0
        except OSError:
            return False
        if done:
            subprocess.run(["umount", other], check=True)
        return done


def main() -> int:
    """Run histories; return 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    arguments = parser.parse_args()
    prepare()
    mounts = can_mount()
    print(f"{arguments.histories} histories, {'with' if mounts else 'without'} mounts", flush=True)
    lost, last_s = 0, time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.histories):
        found = run_history(seed, mounts)
        if found is not None:
            lost += 1
            print(found, flush=True)
        if time.monotonic() - last_s > 10:
            last_s = time.monotonic()
            print(f"{seed + 1 - arguments.seed} done, {lost} with a loss", flush=True)
    print(f"{arguments.histories} histories, {lost} with a loss")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
