"""Random training programs whose file system fills up and is freed again, over and over.

    python tests/faults/full_disk.py --programs 300 --seed 0

A program steps, saves in place and with `copy=True`, waits or does not, loads, closes and opens again, while somebody
else takes and frees the room of a small tmpfs or ext4 that holds its path, its checkpoints, or both. Only errors that
are promised may come; weights and state are those of an undisturbed run at the same step after each of them; and what
was a checkpoint stays one until the next has been committed. Needs root, to mount.

With `--overlap` steps go on behind the program (`overlap_forward`), and whatever it does next is told of an error.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from layers import Layer

import offload
from offload.checkpoint.manifest import COMMIT_NAME

SIZES = (30_000, 7, 3000, 20_000)
DTYPES = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
SMALL_BYTES = 6 << 20
ACTIONS = 40
KINDS = ("tmpfs", "ext4")


@contextlib.contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """A small file system of its own.

    Raises:
        OSError: It cannot be mounted here.
    """
    place, image = folder / "small", folder / "image"
    place.mkdir()
    commands = [["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(place)]]
    if kind == "ext4":
        image.touch()
        os.truncate(image, SMALL_BYTES)
        make = ["mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-O", "^has_journal", str(image)]
        commands = [make, ["mount", "-t", "ext4", "-o", "loop", str(image), str(place)]]
    for command in commands:
        if shutil.which(command[0]) is None:
            raise OSError(f"no {command[0]}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fresh() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(n, generator=generator, dtype=torch.float32, device="cpu").to(d))
        for n, d in zip(SIZES, DTYPES, strict=True)
    ]


def update(layers: Iterable[torch.nn.Module], optimizer: Any, number: int) -> None:
    """Take step `number`, which has the same gradients whoever takes it."""
    generator = torch.Generator().manual_seed(number)
    for layer in layers:
        seen = layer()
        drawn = torch.randn(seen.shape, generator=generator, dtype=torch.float32, device="cpu")
        layer.weight.grad = drawn.add_(seen).to(layer.weight.dtype)
        del drawn  # what somebody holds is read before `step` returns
    optimizer.step()


def state_of(parameters: list[torch.nn.Parameter], optimizer: Any) -> list[torch.Tensor]:
    return [tensor.clone() for p in parameters for _, tensor in sorted(optimizer.state_for(p).items())]


def undisturbed() -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return weights and state after each number of steps, from a run in memory."""
    parameters = fresh()
    layers = [Layer(parameter) for parameter in parameters]
    found = []
    with offload.AdamW(parameters, lr=1e-2, offload={}) as optimizer:
        for number in range(ACTIONS + 1):
            if number:
                update(layers, optimizer, number)
            found.append(([p.detach().clone() for p in parameters], state_of(parameters, optimizer)))
    return found


class Program:
    """One random program.

    Args:
        seed: Decides everything.
        small: The file system that fills up.
        large: A folder elsewhere.
        expected: What `undisturbed` returned.
        overlaps: Whether steps go on behind.
        parks: How often it parks, beside 2 loads.

    Attributes:
        told: How often each promised error came, and each action.
    """

    def __init__(self, seed: int, small: Path, large: Path, expected: Any, overlaps: bool, parks: int = 0) -> None:
        rng = self.rng = random.Random(seed)
        self.overlaps, self.parks = overlaps, parks
        self.expected = expected
        self.small = small
        self.told: Counter[str] = Counter()
        self.filler = small / "filler"
        # Something of the program lies on the small file system.
        where = rng.choice(((small, large, large), (large, small, large), (large, large, small), (small,) * 3))
        self.paths = [where[0] / "path"] if rng.random() < 0.7 else [where[0] / "path", large / "other"]
        self.folders = {False: where[1] / "ck", True: where[2] / "copy"}
        for path in self.paths:
            path.mkdir()
        self.settings = {
            "paths": self.paths,
            "host_memory": rng.choice((0, 0, 200_000)),
            "subgroup_numel": rng.choice((4096, 16384)),
            "io_backend": rng.choice(("threads", "asyncio")),
            "threads": 1,
        }
        self.good: dict[bool, set[int]] = {False: set(), True: set()}
        """The step that each folder's checkpoint is of: one of these; none, if there is none."""
        self.pending: tuple[bool, int] | None = None
        self.optimizer: Any = None
        self.at = 0

    def run(self) -> Counter[str]:
        try:
            for _ in range(ACTIONS):
                self.act()
            self.free()
            self.reopen()
            self.check()
        finally:
            if self.optimizer is not None:
                self.optimizer.close()
        return self.told

    def act(self) -> None:
        if self.optimizer is None:
            self.reopen()
            return
        actions = {
            self.step: 8,
            lambda: self.save(copy=False): 3,
            lambda: self.save(copy=True): 3,
            self.wait: 2,
            self.fill: 5,
            self.free: 2,
            self.load: 2,
            self.reopen: 1,
            self.check: 2,
            self.park: self.parks,
        }
        try:
            self.rng.choices(list(actions), list(actions.values()))[0]()
            if not self.overlaps or self.rng.random() < 0.3:
                self.check_weights()
        except offload.StepAbortedError as error:
            require(self.overlaps, "a step is told of that nobody waited for")
            self.broke("step behind", error, offload.TierError)

    # Actions

    def fill(self) -> None:
        self.free()
        left = self.rng.choice((0, 0, 4096, 40_000, 300_000, 1 << 20))
        with open(self.filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while (room := os.statvfs(self.small)).f_bavail * room.f_frsize > left:
                file.write(bytes(4096))

    def free(self) -> None:
        self.filler.unlink(missing_ok=True)

    def step(self) -> None:
        if self.at == ACTIONS:
            return
        try:
            update(self.layers, self.optimizer, self.at + 1)
        except (offload.StepAbortedError, offload.SessionBrokenError) as error:
            require(self.parks or isinstance(error, offload.StepAbortedError), "nothing breaks between steps")
            self.broke("step", error, offload.TierError)
        else:
            self.at += 1
            self.told["step"] += 1

    def save(self, *, copy: bool) -> None:
        self.wait()
        if self.optimizer is None:
            return
        self.told["save"] += 1
        self.pending = copy, self.at
        try:
            self.optimizer.save_checkpoint(self.folders[copy], copy=copy)
        except offload.CheckpointError as error:
            self.pending = None
            self.told[f"save refused: {type(error.__cause__).__name__}"] += 1
        except offload.SessionBrokenError as error:
            self.pending = None
            self.broke("save", error, offload.TierError)
        else:
            if self.rng.random() < 0.5:
                self.wait()

    def wait(self) -> None:
        if self.pending is None:
            return
        (copy, step), self.pending = self.pending, None
        try:
            self.optimizer.wait_checkpoint()
        except offload.CheckpointError as error:
            self.told[f"not written: {type(error.__cause__).__name__}"] += 1
        else:
            self.good[copy] = {step}

    def park(self) -> None:
        try:
            self.optimizer.park(self.rng.choice((False, True)), wait=self.rng.random() < 0.7)
        except offload.InfeasiblePlanError:
            self.told["park refused"] += 1
        except (offload.TierError, offload.SessionBrokenError) as error:
            if self.optimizer.engine.broken is not None:
                self.broke("park", error, offload.TierError)
            else:
                self.told[f"not parked: {type(error).__name__}"] += 1
        else:
            self.told["park"] += 1

    def load(self) -> None:
        self.wait()
        found = [copy for copy in (False, True) if self.good[copy]]
        if not found or self.optimizer is None:
            return
        copy = self.rng.choice(found)
        try:
            self.optimizer.load_checkpoint(self.folders[copy])
        except offload.CheckpointError as error:
            # Reading takes no room, but what was staged is flushed to make some, and that may find none.
            self.broke("load", error, offload.TierError)
            return
        self.told["load"] += 1
        at = self.steps_done()
        require(at in self.good[copy], f"loaded step {at} of {self.good[copy]}")
        self.at, self.good[copy] = at, {at}
        self.check()

    def reopen(self) -> None:
        if self.optimizer is not None:
            if self.rng.random() < 0.5:
                self.wait()
            self.give_up()
        try:
            parameters = fresh()
            self.optimizer = offload.AdamW(parameters, lr=1e-2, offload=self.settings)
        except (offload.PlanError, offload.TierError) as error:
            self.told[f"not opened: {type(error).__name__}"] += 1
            self.free()
            return
        self.parameters, self.at = parameters, 0
        self.layers = torch.nn.ModuleList(map(Layer, parameters))
        if self.overlaps:
            self.optimizer.overlap_forward(self.layers)
        self.told["open"] += 1
        for copy, folder in self.folders.items():
            require(is_checkpoint(folder) or not self.good[copy], f"the checkpoint in {folder} is gone")
        if self.rng.random() < 0.8:
            self.load()

    # What has to hold

    def give_up(self) -> None:
        """Close the session; a checkpoint that was still being written may or may not be there."""
        if self.pending is not None:
            copy, step = self.pending
            self.good[copy].add(step)
            self.pending = None
        optimizer, self.optimizer = self.optimizer, None
        try:
            optimizer.close()
        except offload.StepAbortedError:
            require(self.overlaps, "a step is told of that nobody waited for")
            self.told["told when it was closed"] += 1
        for copy, folder in self.folders.items():
            if not is_checkpoint(folder):
                self.good[copy].clear()

    def broke(self, what: str, error: BaseException, cause: type) -> None:
        """Require that an error that ends the session says why, and end it."""
        causes = []
        inner: BaseException | None = error
        while inner is not None:
            causes.append(inner)
            inner = inner.__cause__
        require(any(isinstance(one, cause) for one in causes), f"{what}: {causes!r}")
        self.told[f"{what} broke: {type(error).__name__}"] += 1
        copies = [copy for copy, folder in self.folders.items() if self.good[copy] and not is_checkpoint(folder)]
        require(not copies, f"the checkpoints of {copies} are gone")
        self.give_up()

    def steps_done(self) -> int:
        return int(self.optimizer.metrics()["step"])

    def check_weights(self) -> None:
        if self.optimizer is None:
            return
        self.optimizer.finish()
        same = zip(self.parameters, self.expected[self.at][0], strict=True)
        require(all(torch.equal(a, b) for a, b in same), f"weights are not those of step {self.at}")

    def check(self) -> None:
        if self.optimizer is None:
            return
        try:
            found = state_of(self.parameters, self.optimizer)
        except (offload.TierError, offload.SessionBrokenError) as error:
            self.broke("state_for", error, offload.TierError)
            return
        same = zip(found, self.expected[self.at][1], strict=True)
        require(all(torch.equal(a, b) for a, b in same), f"state is not that of step {self.at}")


def is_checkpoint(folder: Path) -> bool:
    return (folder / COMMIT_NAME).exists()


def require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def run(seed: int, kind: str, folder: Path, expected: Any, overlaps: bool = False, parks: int = 0) -> Counter[str]:
    """Run one program on a file system of its own below `folder`; raise what was not promised."""
    with mounted(kind, folder) as small:
        large = folder / "large"
        large.mkdir()
        return Program(seed, small, large, expected, overlaps, parks).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overlap", action="store_true", help="have steps go on behind the program")
    parser.add_argument("--parks", type=int, default=0, help="how often programs park, beside 2 loads")
    args = parser.parse_args()
    logging.getLogger("offload").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    expected, told, failed = undisturbed(), Counter[str](), 0
    for seed in range(args.seed, args.seed + args.programs):
        with tempfile.TemporaryDirectory(prefix="full-disk-") as folder:
            try:
                told += run(seed, KINDS[seed % 2], Path(folder), expected, args.overlap, args.parks)
            except (AssertionError, offload.OffloadError) as error:
                failed += 1
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    for what, count in sorted(told.items()):
        print(f"{count:6}  {what}")
    print(f"{failed} of {args.programs} programs failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
