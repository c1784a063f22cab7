"""Ends trainings of two ranks at random moments, by SIGTERM and by SIGKILL; goes on from their folders and mirrors.

    python tests/integrations/folder_kills.py --out FILE [--doors NAMES] [--count N] [--seed N] [--keep FOLDER]

A seed is one run of a door, saved every second step with two checkpoints kept, and with a mirror that is slow. It is
ended twice, once by each signal, at random; each time a copy of the mirror is all that another machine has, which
fetches what is whole, and trains to the end; and so does the run itself at last. All have to go on from the newest
whole checkpoint, and to end with exactly the weights and losses of a run that nobody disturbs. After a SIGTERM the
run's folder and the mirror have to have the step in which it came. Nothing that was durable in a mirror may be copied
there again. Outcomes are in the file as they come; called again with it, seeds that went well are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import prepared
import torch
from torch.distributed import TCPStore

from offload import CheckpointError, cli
from offload.checkpoint.fetch import find_whole
from offload.checkpoint.marker import BEGUN, WHOLE
from offload.checkpoint.reader import Checkpoint

HERE = Path(__file__).resolve().parent
STEPS = 12
LONGEST_S = 240.0
"""Seconds after which what runs is killed, which is a failure."""


@dataclass
class Door:
    """How a framework is used.

    Attributes:
        program: The worker.
        options: Its arguments behind folder and steps.
        before: Those between folder and steps.
        resume: What makes it go on; `{}` for a checkpoint.
        folder: Where in the run's folder checkpoints are.
        heard: Number of ranks where a SIGTERM comes.
        slow_s: What its mirror pauses: so much that it is under way when a step ends, and ends before the run.
    """

    program: str
    options: Sequence[str]
    before: Sequence[str] = ()
    resume: str = "resume"
    folder: str = "."
    heard: int = 2
    slow_s: float = 0.01

    def arguments(self, run: Path, mirror: Path | None, newest: str, ranks: int) -> list[str]:
        given = [str(HERE / self.program), str(run), *self.before, str(STEPS), *self.options]
        given += [f"mirror={mirror}"] if mirror is not None else []
        given += [self.resume.format(run / self.folder / newest)] if newest else []
        return [each.format(ranks=ranks) if each == "ranks={ranks}" else each for each in given]


DOORS = {
    "trainer": Door("trainer_runs.py", ["save_total_limit=2"], ["offload_adamw"]),
    "accelerate": Door("accelerate_runs.py", ["limit=2"], folder="checkpoints"),
    "lightning": Door(
        "lightning_runs.py",
        ["ranks={ranks}", "save.save_top_k=2", 'save.monitor="step"', 'save.mode="max"'],
        ["offload"],
        "resume={}",
        "run",
        heard=1,  # Lightning's handler has ranks meet wherever one of them is interrupted
    ),
    "deepspeed": Door("deepspeed_runs.py", [], folder="tags", slow_s=0.04),
    "in_place": Door(
        "deepspeed_runs.py", ['checkpoint={"layout": "in_place", "wait": false}'], folder="tags", slow_s=0.02
    ),
    "dcp": Door("dcp_runs.py", [], resume="resume={}", folder="steps"),
}


@dataclass
class Session:
    """What the ranks of one start have said.

    Attributes:
        codes: How they have ended.
        said: Their results.
        notes: Of `dying.py`, by rank.
        errors: What they have written to their logs.
    """

    codes: list[int] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    notes: list[list[dict[str, Any]]] = field(default_factory=list)
    errors: str = ""

    def find(self, name: str) -> list[Any]:
        return [note[name] for notes in self.notes for note in notes if name in note]


SeedRun = Callable[[str, int, Path, dict[Any, Session]], Counter[str]]
"""Runs a seed of a door in a folder, with undisturbed runs, and returns what was met."""


def environment(store: TCPStore, rank: int, ranks: int) -> dict[str, str]:
    """Return what a launcher says to a rank, which finds the others by the store."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    places |= {"MASTER_PORT": store.port, "TORCHELASTIC_RESTART_COUNT": 0}
    named = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "kills", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**os.environ, "OMP_NUM_THREADS": "1", **named, **{name: str(value) for name, value in places.items()}}


def start(
    arguments: Sequence[str],
    notes: Path,
    ranks: int,
    slow_s: float,
    dies: dict[str, Any] | None = None,
    rank: int | None = 0,
) -> Session:
    """Run a program in ranks until all have ended; once one has died, the others get a SIGTERM, and are killed.

    Args:
        arguments: The program's, and its path before them.
        notes: A folder for notes, which is made.
        ranks: How many.
        slow_s: What a mirror pauses.
        dies: When a rank is to die, as `dying.py` reads it; None if none is.
        rank: Which one; None for all of them.
    """
    notes.mkdir(parents=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children, session = [], Session()
    for number in range(ranks):
        wish = {"log": str(notes / f"{number}.json"), "slow_s": slow_s}
        wish |= (dies or {}) if rank in (number, None) else {}
        variables = {**environment(store, number, ranks), "DYING": json.dumps(wish)}
        with (notes / f"{number}.out").open("wb") as out, (notes / f"{number}.err").open("wb") as err:
            command = [prepared.python(), "-W", "ignore", *arguments]
            children.append(subprocess.Popen(command, env=variables, stdout=out, stderr=err))

    def tell(what: signal.Signals) -> None:
        for number, child in enumerate(children):
            if child.poll() is None and (said := _read(notes / f"{number}.json")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(said[0]["pid"], what)

    until_s, told_s = time.monotonic() + LONGEST_S, 0.0
    while any(child.poll() is None for child in children):
        has_ended = [child.returncode for child in children if child.returncode is not None]
        if told_s == 0 and (any(has_ended) or (has_ended and dies)):
            told_s = time.monotonic()
            tell(signal.SIGTERM)
        if time.monotonic() > min(until_s, told_s + 2 if told_s else until_s):
            if told_s == 0:
                tell(signal.SIGUSR1)  # to say where it is
                time.sleep(1)
            for child in children:
                child.kill()
        time.sleep(0.02)
    session.codes = [child.returncode for child in children]
    session.notes = [_read(notes / f"{number}.json") for number in range(ranks)]
    for number in range(ranks):
        session.errors += (notes / f"{number}.err").read_text(errors="replace")
        lines = (notes / f"{number}.out").read_text().splitlines()
        session.said += [json.loads(line) for line in lines if line.startswith('{"')]
    return session


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def step_of(folder: Path) -> int:
    """Return the step after which a checkpoint was saved; -1 if neither its name nor its state says that."""
    named = re.search(r"(?:checkpoint-|step=|global_step|step-)(\d+)", folder.name)
    if named is not None:
        return int(named[1])
    for commit in folder.rglob("COMMIT"):
        with contextlib.suppress(CheckpointError), Checkpoint(commit.parent) as checkpoint:
            return int(checkpoint.manifests[0].step)
    return -1


def whole_in(folder: Path) -> dict[str, int]:
    """Return the folders that are whole, with their steps.

    A framework deletes old ones file by file, and one that is half deleted may say that it is whole: it is none here.
    """
    found = [path.parent for path in folder.glob(f"*/{WHOLE}") if not (path.parent / BEGUN).exists()]
    return {path.name: step for path in found if (step := step_of(path)) >= 0}


def newest(whole: dict[str, int]) -> str:
    """Return the name of the last one: of Lightning's, whose folders lie beside files, that of the file."""
    return max(whole, key=lambda name: (whole[name], name), default="").partition(".offload-")[0]


def undisturbed(door: Door, root: Path, ranks: int) -> Session:
    """Return what a run says that nobody disturbs."""
    notes = root / f"undisturbed-{ranks}"
    (notes / "run").mkdir(parents=True)
    session = start(door.arguments(notes / "run", None, "", ranks), notes / "notes", ranks, door.slow_s)
    assert session.codes == [0] * ranks, f"the undisturbed run ends by {session.codes}: {session.errors[-3000:]}"
    shutil.rmtree(notes)
    return session


class Run:
    """One run of a door, with its mirror, and what has been copied there."""

    def __init__(self, door: Door, root: Path, ranks: int, whole: Session) -> None:
        self.door, self.root, self.ranks, self.whole = door, root, ranks, whole
        self.run, self.mirror = root / "run", root / "mirror"
        self.run.mkdir(parents=True)
        self.mirror.mkdir()
        self.copied: Counter[str] = Counter()
        self.starts = 0
        self.figures: Counter[str] = Counter()

    @property
    def folder(self) -> Path:
        return self.run / self.door.folder

    def session(self, dies: dict[str, Any] | None = None, rank: int = 0) -> Session:
        """Start the run, or go on with it; it has to begin with the newest whole checkpoint."""
        there = whole_in(self.folder)
        # A kill may come between the mark of the first tag of all, and `latest`, without which DeepSpeed loads none.
        has_no_latest = self.door.folder == "tags" and not (self.folder / "latest").exists()
        expected = 0 if has_no_latest else self._latest(there, self.folder)
        self.starts += 1
        place = self.root / f"start-{self.starts}"
        arguments = self.door.arguments(self.run, self.mirror, newest(there), self.ranks)
        session = start(arguments, place, self.ranks, self.door.slow_s, dies, rank)
        self._check_first(session, there, expected)
        self._count(session, self.copied)
        return session

    def _latest(self, there: dict[str, int], folder: Path) -> int:
        """Return the step to go on from: for DeepSpeed that of `latest`, which it writes when a tag is whole."""
        if not (folder / "latest").exists():
            return max(there.values(), default=0)
        tag = (folder / "latest").read_text()
        assert tag in there, f"latest names {tag}, and {there} are whole"
        return there[tag]

    def _check_first(self, session: Session, there: dict[str, int], expected: int) -> None:
        first = set(session.find("first"))
        assert first <= {expected}, f"it began with {first}, and {there} are whole: {session.errors[-3000:]}"

    def _count(self, session: Session, copied: Counter[str]) -> None:
        for notes in session.notes:
            ours = [note for note in notes if "copied" in note]
            for note in ours:
                copied[note["key"]] += note["copied"]
                assert copied[note["key"]] <= note["total"], f"{note['name']} was copied twice"
            counted = [note["mirrored_bytes"] for note in notes if "mirrored_bytes" in note]
            total = sum(note["copied"] for note in ours)
            assert counted in ([], [total]), f"metrics have {counted} bytes mirrored, and {total} were"
        self.figures["files and batches copied"] += len(session.find("copied"))

    def die(self, name: str, steps: int, delay_s: float, rank: int) -> None:
        """Have a rank end by a signal, and look at what is left."""
        before = whole_in(self.mirror)
        session = self.session({"signal": name, "steps": steps, "delay_s": delay_s}, rank)
        assert session.find("signal"), f"no signal was sent: {session.codes} {session.errors[-3000:]}"
        (done,) = session.find("done")
        here, there = whole_in(self.folder), whole_in(self.mirror)
        last, mirrored = (max(found.values(), default=0) for found in (here, there))
        begun = sorted(path.parent.name for path in self.mirror.glob(f"*/{BEGUN}"))
        self.figures[f"{name}: with a copy under way"] += bool(begun)
        if name == "SIGTERM":
            expected = (done + 1, done + 2)
            durable = self._latest(here, self.folder)
            assert durable == last in expected, f"it came in step {done + 1}: {here}, {session.errors[-4000:]}"
            assert mirrored == last, f"the mirror has {there}, and not {last}: {session.errors[-3000:]}"
        assert mirrored >= max(before.values(), default=0), f"the mirror had {before}, and has {there}"

    def elsewhere(self, number: int) -> None:
        """Go on on a machine that has nothing but the mirror."""
        world = self.root / f"elsewhere-{number}"
        shutil.copytree(self.mirror, world / "mirror")
        there = whole_in(world / "mirror")
        run = world / "run"
        target = run / self.door.folder
        with (world / "said").open("w") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = cli.main(["fetch", str(world / "mirror"), str(target)])
        if not there:
            assert status == 1, "something that is not whole was fetched"
            self.figures["nothing whole yet"] += 1
            return
        assert status == 0, f"it was not fetched: {(world / 'said').read_text()}"
        name = find_whole(str(world / "mirror"))[-1]
        assert there[name] == max(there.values()), f"{name} is taken for the last of {there}"
        assert whole_in(target) == {name: there[name]}, f"{whole_in(target)} was fetched of {there}"
        arguments = self.door.arguments(run, world / "mirror", newest(whole_in(target)), self.ranks)
        session = start(arguments, world / "notes", self.ranks, self.door.slow_s)
        self._check_first(session, {name: there[name]}, there[name])
        self._check_end(session, there[name])
        again = {note for note in session.find("name") if name == Path(note).name or f"/{name}/" in f"{note}/"}
        assert not again, f"what was fetched is copied to its mirror again: {again}"
        self._count(session, Counter())
        self.figures["fetched and gone on with"] += 1
        shutil.rmtree(world)

    def end(self) -> None:
        """Go on to the end in the run's own folder."""
        first = self._latest(whole_in(self.folder), self.folder)
        self._check_end(self.session(), first)
        here, mirrored = whole_in(self.folder), whole_in(self.mirror)
        assert max(mirrored.values()) == max(here.values()), f"the mirror has {mirrored}, and the run {here}"
        self.figures["left in the mirror"] += len(mirrored.keys() - here.keys())

    def _check_end(self, session: Session, first: int) -> None:
        assert session.codes == [0] * self.ranks, f"it ended by {session.codes}: {session.errors[-5000:]}"
        assert len(session.said) == self.ranks, "a rank says nothing"
        for name in ("weights", "losses"):
            expected = [rank[name] for rank in self.whole.said]
            found = [rank[name] for rank in session.said]
            if name == "losses":
                expected = [losses[first - STEPS :] if first < STEPS else [] for losses in expected]
                found = [losses[first - STEPS :] if first < STEPS else [] for losses in found]
                assert all(len(losses) == STEPS - first for losses in found), "it has taken other steps"
            order = [sorted(map(str, values)) for values in (expected, found)]
            assert order[0] == order[1], f"other {name} from step {first} on"


def run_seed(
    name: str, seed: int, root: Path, wholes: dict[tuple[str, int], Session], most_ranks: int = 2
) -> Counter[str]:
    """Have one run of a door end twice, and go on.

    Args:
        name: Of the door.
        seed: Of what is random.
        root: An empty folder.
        wholes: Undisturbed runs, by door and ranks; more are added.
        most_ranks: Number of ranks, where the door does not need fewer.

    Raises:
        AssertionError: Something is not as it has to be.
    """
    door, rng = DOORS[name], random.Random(f"{name} {seed}")
    ways = ["SIGTERM", "SIGKILL"]
    rng.shuffle(ways)
    lives = [(most_ranks, ways)]
    if door.heard < most_ranks:
        lives = [(door.heard if way == "SIGTERM" else most_ranks, [way]) for way in ways]
    figures: Counter[str] = Counter()
    for ranks, deaths in lives:
        if (name, ranks) not in wholes:
            wholes[name, ranks] = undisturbed(door, root, ranks)
        run = Run(door, root / f"{ranks}-ranks", ranks, wholes[name, ranks])
        first = 3
        for number, way in enumerate(deaths):
            steps = rng.randint(first, first + 2) if len(deaths) > 1 else rng.randint(3, 8)
            run.die(way, steps, rng.random() * rng.choice((0.05, 0.3)), rng.randrange(ranks))
            run.elsewhere(number)
            run.figures[way] += 1
            first = min(max(whole_in(run.folder).values(), default=0) + 1, STEPS - 5)
        run.end()
        figures += run.figures
    return figures


def run_seeds(about: str | None, names: Sequence[str], run: SeedRun) -> int:
    """Run seeds as a command line says, each by name, and keep what became of them; return an exit status.

    Args:
        about: What `--help` says.
        names: What there is to run.
        run: Runs a seed of a name in an empty folder, with undisturbed runs that are there already.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--doors", default=",".join(names))
    parser.add_argument("--count", type=int, default=10, help="seeds of each door")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--keep", type=Path, help="where folders of seeds that failed stay")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so long")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    outcomes = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    failed, wholes = 0, dict[Any, Session]()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        os.environ.setdefault(prepared.FOLDER, f"{folder}/prepared")
        os.environ.setdefault(prepared.OWNER, str(os.getpid()))
        Path(os.environ[prepared.FOLDER]).mkdir(exist_ok=True)
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            for name in arguments.doors.split(","):
                is_late = time.monotonic() - began_s > arguments.seconds
                if is_late or outcomes.get(f"{name} {seed}", {}).get("is_well"):
                    continue
                root = Path(folder) / f"{name}-{seed}"
                root.mkdir()
                try:
                    outcome: dict[str, Any] = {"is_well": True, **run(name, seed, root, wholes)}
                except Exception as failure:
                    said = str(failure) if isinstance(failure, AssertionError) else traceback.format_exc()
                    outcome = {"is_well": False, "failure": said}
                    failed += 1
                    print(f"again: {sys.argv[0]} --out FILE --doors {name} --seed {seed} --count 1\n{said}")
                    if arguments.keep is not None:
                        shutil.copytree(root, arguments.keep / root.name, symlinks=True, dirs_exist_ok=True)
                shutil.rmtree(root)
                outcomes[f"{name} {seed}"] = outcome
                arguments.out.write_text(json.dumps(outcomes, indent=1))
                print(f"{name} {seed}: {outcome if outcome['is_well'] else 'failed'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_seeds(__doc__, [*DOORS], run_seed))
