"""Command lines that nobody would write by hand, drawn from a seed, and the bounds that each has to keep.

Run by hand for more than the tests have: `python tests/hostile.py --calls 20000 --seed 7 --report FILE`. It goes on
behind what the report has of that seed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

CPU_S = 30.0
"""What a call may compute: a bound on wall time would be one on what else runs."""
MOST_BYTES = 1 << 30
"""By which a call may add to the memory of its process."""
LINES = 3

NINES = "9" * 23
WORDS = """
0 1 7 -0 -0.0 -1 +1 0.5 1e3 1e-300 1e300 1e999 1e-999 1e99999999999 nan -nan inf -inf infinity 1_000 1__0 0x10 1e e5
. 1. .5 1..5 1,5 4GiB 7k 7K 1KiB 9PiB -4GiB 1e30GiB 1e15 1e13 1e18 1e30 None true [] {} $(id) %s%n % {0} auto
stride:0 gpu cpu 0=1GB 1= = 0=0 0=1e300GB
24GiB 25GB/s 0GB/s /s : 3GB/s:2TB 1B/s:1B 8EB/s:8EB 3GB/s,1B/s:2TB 64xh100 9x 8x24GiB 10s 1e-6s
"""
NUMBERS = [
    *WORDS.split(),
    *("", NINES, "9" * 5000, "1 000", "8 GiB", "a" * 5000, "stride:" + "9" * 5000, "9" * 400 + "=1GB"),
    # Digits of other scripts, halves of letters, what terminals take for commands.
    *("\u0663", "\uff11\uff12", "\xb2", "\xbd", "\u0660=1GB", "stride:\u0663"),
    *("\n", "1\n2", "\t", "\x1b[31m", "\udcff"),
]
JSON = {
    "empty": b"",
    "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "latin": b'{"model_type": "\xff"}',
    "zeros": b"\0" * 4096,
    "list": b"[]",
    "null": b"null",
    "number": b"9" * 5000,
    "nan": b"NaN",
    "text": b'"text"',
    "surrogate": b'{"model_type": "\\ud800", "format": "\\ud800"}',
    "half": b'{"format": 1, "rates": {"cpu_bytes_per_s"',
    "type": b'{"model_type": 7}',
    "strange": b'{"model_type": "no such"}',
    "bare": b'{"model_type": "llama"}',
    "deep": b'{"model_type": "llama", "num_hidden_layers": 1000000000}',
    "wide": b'{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 100000000000000000000000}',
    "negative": b'{"model_type": "llama", "hidden_size": -5, "num_attention_heads": 0}',
    "odd": b'{"model_type": "gpt2", "n_layer": "three", "n_embd": null}',
    "code": b'{"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "x.Y"}}',
    "rates": b'{"format": 2, "rates": {"cpu_bytes_per_s": 1e11, "memory_bytes_per_s": 3e11}}',
    "slow": b'{"format": 2, "rates": {"cpu_bytes_per_s": 1e-9, "paths": [{"read_bytes_per_s": 1e24, '
    b'"write_bytes_per_s": 1e-9}]}}',
    "infinite": b'{"format": 2, "rates": {"cpu_bytes_per_s": Infinity}}',
    "digits": b'{"format": 2, "rates": {"cpu_bytes_per_s": ' + b"9" * 4000 + b"}}",
    "memory": b'{"format": 2, "machine": {"memory_bytes": '
    + b"9" * 4000
    + b', "gpu": "'
    + b"9" * 5000
    + b' x T"}, "rates": '
    b'{"cpu_bytes_per_s": 1e11}}',
    "paths": b'{"format": 2, "rates": {"cpu_bytes_per_s": 1e11, "paths": ['
    + b",".join([b'{"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}'] * 20_000)
    + b"]}}",
    "late": b'{"format": 2, "rates": {"cpu_bytes_per_s": 1e11, "reaction_s": 1e24, "operation_s": 1e24, "paths": '
    b'[{"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9, "latency_s": 1e24}]}}',
    "run": b'{"step": 1, "paths": ["/a$b$"], "operations": [["cpu", "$\\\\x$", 0.0, 1.0, 5], ["x$y", "", 0, 0, 0]]}',
    "overlapping": b'{"step": 1, "paths": [], "operations": ['
    + b",".join([b'["cpu", "", 0, 1, 0]'] * 40_000)
    + b"]}",
    "endless": b'{"step": 1, "paths": [], "operations": [' + b",".join([b'["cpu", "", 0, 1, 0]'] * 400_000) + b"]}",
    "lanes": b'{"step": 1, "paths": [], "operations": ['
    + b",".join(b'["l%d", "", 0, 1, 0]' % n for n in range(9_000))
    + b"]}",
    "times": b'{"step": 1, "paths": [], "operations": [["cpu", "", -1e308, 1e308, 0], ["x", "", NaN, Infinity, 0]]}',
    "backwards": b'{"step": 1e400, "paths": [7], "operations": [["cpu", "a", 3, 1, -5]]}',
}

NAMES = (
    *(f"{name}.json" for name in ["config", "timeline", "report", "manifest-0", "pins", "store"]),
    "COMMIT",
    "RELEASED",
)


@dataclass(frozen=True)
class Outcome:
    """What came of one call."""

    arguments: list[str]
    status: int
    said: str
    errors: str
    cpu_s: float
    nbytes: int

    def faults(self) -> list[str]:
        """Return what it did wrong."""
        found = []
        if self.status not in (0, 1, 2):
            found.append(f"status {self.status}")
        if "Traceback" in self.errors:
            found.append("a traceback")
        said = [line for line in self.errors.splitlines() if "warning" not in line.lower()]
        if self.status and not (1 - bool(self.said) <= len(said) <= LINES):
            found.append(f"{len(said)} lines of error")
        if self.cpu_s > CPU_S:
            found.append(f"{self.cpu_s:.1f} CPU seconds")
        if self.nbytes > MOST_BYTES:
            found.append(f"{self.nbytes >> 20} MiB")
        return found


def make_files(folder: Path) -> list[str]:
    """Make files and folders that no command should stumble over; return them and some that are not there."""
    found = []
    for name, content in JSON.items():
        (folder / name).write_bytes(content)
        found.append(str(folder / name))
        nest = folder / f"in-{name}"
        nest.mkdir()
        for file in NAMES:
            (nest / file).hardlink_to(folder / name)
        found.append(str(nest))
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "to-zero").symlink_to("/dev/zero")
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    for kind, target in (
        ("fifo", None),
        ("zero", "/dev/zero"),
        ("loop", "config.json"),
        ("big", str(folder / "sparse")),
    ):
        nest = folder / f"in-{kind}"
        nest.mkdir()
        for file in NAMES:
            if target is None:
                os.mkfifo(nest / file)
            else:
                (nest / file).symlink_to(target)
        found.append(str(nest))
    store = folder / "stores" / "offload-00000000-0000-0000-0000-000000000000"
    store.mkdir(parents=True)
    for file in ("pins.json", "store.json", "data"):
        os.mkfifo(store / file)
    found += [str(folder / name) for name in ("fifo", "loop", "to-zero", "sparse", "stores", "missing", "missing/x")]
    found += [
        "/dev/zero",
        "/dev/null",
        "/dev/full",
        "/",
        ".",
        "",
        "~",
        "~nobody-at-all/x",
        "//",
        "-",
        str(folder),
        "🦙",
    ]
    found += ["a" * 300, "/" + "a/" * 2500, "x" * 5000, "\0", "a\nb", "\udcff"]
    found += ["s3://", "s3://no bucket/x", "ftp://host/x", "file:///dev/zero"]
    return found


PLACES = ("PATH", "DIR", "FILE", "CHECKPOINT", "OUT", "RUN")
"""Words of the help for what is a place; all else that has a value is drawn from `NUMBERS`."""
MODELS = (["--params", "1e6"], ["--params", "1e6"], ["--model", "qwen-0.5b"])
MACHINES = (
    *(["--rates", name] for name in ("h100-node-nvme-pfs", "h100-node", "a100-node")),
    ["--host", "64GiB", "--gpu", "24GiB", "--drive", "3GB/s:2TB", "--cores", "8"],
)
NEVER_BEGUN: dict[str, tuple[list[str], ...]] = {
    # Never one that would begin: a run of any size is no hostile call.
    "train": (["--data", "/nowhere"], ["--params", "1e15"], ["--device", "abacus"], ["--resume", "/nowhere"]),
    "probe": (["--seconds", "0"], ["--out", "/dev/null/x"], ["--paths", "/nowhere"], ["--seconds=-0.0"]),
    "gc": (["--dry-run"],),
}
"""What ends the command before it does anything, whatever else is given."""
COMMANDS = ("plan", "machine", "train", "probe", "verify", "gc", "export", "trace", "report")


def options(random_: random.Random, places: list[str]) -> dict[str, Callable[[], list[str]]]:
    """Return what draws the arguments of each command, from the options that its parser has."""
    from offload.cli import _parser

    parsers: Any = next(action for action in _parser()._actions if action.dest == "command").choices

    def value(action: argparse.Action) -> str:
        return random_.choice(places if action.metavar in PLACES else NUMBERS)

    def drawn(command: str) -> list[str]:
        actions = [action for action in parsers[command]._actions if action.dest != "help"]
        valued = [action for action in actions if action.option_strings and action.nargs != 0]
        words = []
        if command in ("plan", "machine") and random_.random() < 0.7:  # so that many are answered
            words += random_.choice(MACHINES) if command == "plan" else ["--host", "64GiB"]
            words += random_.choice(MODELS) if command == "plan" else []
        for action in actions:
            if not action.option_strings:
                words += [value(action) for _ in range(random_.randint(1, 3) if action.nargs == "+" else 1)]
            elif action.nargs == 0 and random_.random() < 0.2:
                words.append(action.option_strings[-1])
        for action in random_.sample(valued, random_.randint(0, min(3, len(valued)))):
            pair = [action.option_strings[-1], value(action)]
            # Half of them in one word: only so a value that begins with a dash is one.
            words += ["=".join(pair)] if random_.random() < 0.5 else pair
        return words + random_.choice(NEVER_BEGUN.get(command, ([],)))

    def nothing() -> list[str]:
        others = [*NUMBERS, *places, "--version", "-h", "--", "plan --help"]
        return random_.choices(others, k=random_.randint(0, 3))

    return {**{command: partial(drawn, command) for command in COMMANDS}, "": nothing}


ENVIRONMENT = ("COLUMNS", "HOME", "XDG_CACHE_HOME", "AWS_ENDPOINT_URL", "AWS_PROFILE", "LANG", "TERM")


def surroundings(random_: random.Random, places: list[str]) -> dict[str, str]:
    """Return variables of the environment that say nonsense; mostly none."""
    names = [name for name in ENVIRONMENT if random_.random() < 0.03]
    return {name: random_.choice([*NUMBERS, *places]).replace("\0", "") for name in names}


def calls(seed: int, places: list[str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield command lines and variables for ever: the same ones for the same seed and places."""
    random_ = random.Random(seed)
    commands = options(random_, places)
    weights = {"plan": 10, "": 1}
    names = [name for name in commands for _ in range(weights.get(name, 3))]
    while True:
        name = random_.choice(names)
        words = [*([name] if name else []), *commands[name]()]
        if random_.random() < 0.05:
            words.insert(
                random_.randint(0, len(words)), random_.choice(("--what", "--params", "-x", "--json", "\n", "--=1"))
            )
        # What is written goes nowhere but into the working folder, and no checkpoint is replaced.
        yield [word for word in words if "\0" not in word], surroundings(random_, places)


class Overrun(BaseException):
    """A call computes for longer than it may; nothing catches it by mistake."""


def run(arguments: list[str], variables: dict[str, str]) -> Outcome:
    """Run one call in this process, under a limit of CPU time."""
    from offload import cli

    def stop(number: int, frame: object) -> None:
        raise Overrun

    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGVTALRM, stop)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present from here on
    started_s, had_bytes = time.process_time(), _status_bytes("VmRSS")
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S + 1)
    # A call that waits for ever computes nothing: this is no measure, only an end.
    waits = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 10 * CPU_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.dict(os.environ, variables):
            status = cli.main(arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except Overrun:
        status = 124
    except Exception as error:
        import traceback

        status, _ = 70, err.write(f"Traceback: {error!r}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        signal.signal(signal.SIGALRM, waits)
    cpu_s = time.process_time() - started_s
    return Outcome(arguments, status, out.getvalue(), err.getvalue(), cpu_s, _status_bytes("VmHWM") - had_bytes)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def limited() -> int:
    """Run the command line of this process as the command does, under limits of the system."""
    from offload import cli

    # What it may map to write to, beyond what its interpreter and torch have by now.
    most = _status_bytes("VmData") + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    most_s = int(time.process_time() + CPU_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    return cli.main()


def main() -> int:
    """Run a campaign; a report has a line for each call that did wrong, and how far it got."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, required=True)
    wanted = parser.parse_args()
    import tempfile

    report = wanted.report.resolve()
    found = json.loads(report.read_text()) if report.exists() else {}
    mine = found.setdefault(str(wanted.seed), {"done": 0, "faults": [], "cpu_s": 0.0, "longest_s": 0.0})
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        (work := Path(folder, "work")).mkdir()
        places = make_files(Path(folder))
        os.chdir(work)
        for number, (arguments, variables) in zip(range(wanted.calls), calls(wanted.seed, places), strict=False):
            if number < mine["done"]:
                continue
            outcome = run(arguments, variables)
            mine["done"] = number + 1
            mine["cpu_s"] += outcome.cpu_s
            mine["longest_s"] = max(mine["longest_s"], outcome.cpu_s)
            if faults := outcome.faults():
                mine["faults"].append([[word[:80] for word in arguments], faults, outcome.errors[-600:]])
                print(number, [word[:80] for word in arguments], faults, outcome.errors[-900:], flush=True)
            if mine["done"] % 100 == 0 or mine["done"] == wanted.calls:
                report.write_text(json.dumps(found, indent=1))
        os.chdir("/")
    figures = f"{mine['cpu_s']:.0f} CPU s, {mine['longest_s']:.1f} the longest"
    print(f"{mine['done']} calls, {len(mine['faults'])} did wrong, {figures}")
    return 1 if mine["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
