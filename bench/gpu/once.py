"""One run of nine minutes on a machine with a GPU, bare at its start and without a package index.

Parts are processes of their own, the most telling first, each with a limit of its own; one that fails, hangs or finds
no time left is reported as that, and the next one begins. The package is built meanwhile, into a folder outside of
the sources, where it is not installed; parts that need it wait for that.

OUT holds `once.json`, written again after each part so that a run that is killed leaves what it had found,
`once.log` with all output, and what `bench/gpu.py` reports. Standard output is at most 12,000 characters long.
This script itself imports neither torch nor the package: what is broken there is reported, too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench" / "gpu"
LIMIT_S = 545.0
BUILD_S = 300.0
"""What is waited for the build at most, once a part needs it."""
LEAST_S = 10.0
"""A part with less time than that, or than its own limit, is not begun."""
MOST_CHARACTERS = 12_000
SHOWN_CHARACTERS = 1_000
"""Of one part's result."""
NEEDS_CUDA = "needs CUDA"

Found = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: What it is called.
        command: Arguments.
        limit_s: Most seconds.
        decides: The question that it answers.
        read: Makes the result from its output; called as well when the part was cut short.
        environment: Variables of its own.
        torch_alone: Whether it runs without the package.
        cuda: Whether it needs a CUDA device.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    decides: str
    read: Callable[[str], Found]
    environment: dict[str, str] = field(default_factory=dict)
    torch_alone: bool = False
    cuda: bool = True


class Run:
    """The parts' processes, and the report about them.

    Args:
        args: The command's.

    Attributes:
        folder: Where reports go.
        log: All output.
        file: The report.
        scratch: A folder that is gone at the end.
        report: What `file` has.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._began_s = time.monotonic()
        self.folder: Path = args.out.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log, self.file = self.folder / "once.log", self.folder / "once.json"
        self.log.write_bytes(b"")
        self.scratch = Path(tempfile.mkdtemp(prefix="offload-once-"))
        self._site = self.scratch / "site"
        self._building: subprocess.Popen[bytes] | None = None
        self._told = 0
        self._variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self._site), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(max(2, (os.cpu_count() or 1) - 4)),  # parts are measured meanwhile
            "TRITON_CACHE_DIR": str(self.scratch / "triton"),
            "OFFLOAD_COMMIT": commit_of(args.wheels),
        }
        self.report: Found = {
            "accelerator": args.accelerator,
            "state": "running",
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(["bench/gpu/once.sh", *sys.argv[1:]]),
            "commit": self._variables["OFFLOAD_COMMIT"] or None,
            "limit_s": args.limit,
            "parts": [],
        }

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return float(self._args.limit) - (time.monotonic() - self._began_s)

    def run(self, parts: Sequence[Part]) -> int:
        """Run parts in their order; return the exit status: 0 if all that were begun went well."""
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            self._start_build()
            built = self._building is None
            for part in parts:
                if not built and not part.torch_alone:
                    built = True
                    self._await_build()
                self._run_part(part)
            self.report["state"] = "complete"
        except SystemExit:
            self.report["state"] = "cut short"
            raise
        finally:
            if self._building is not None:
                end_session(self._building)
            self._save()
            shutil.rmtree(self.scratch, ignore_errors=True)
        entries = self.report["parts"]
        failed = [entry["name"] for entry in entries if entry["status"] not in ("ok", "not run")]
        self._tell(
            f"{len(entries)} parts, {', '.join(failed) or 'none'} failed; {self.report['seconds']} s; {self.file}"
        )
        return 1 if failed else 0

    def _start_build(self) -> None:
        """Begin to install the carried wheels, and the package where it is not installed."""
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        pip += ["--no-cache-dir", "--disable-pip-version-check", "--upgrade", "--target", str(self._site)]
        commands = []
        wheels = sorted(map(str, self._args.wheels.glob("*.whl"))) if self._args.wheels else []
        # One by one: a wheel that is not for this machine keeps no other out.
        commands += [shlex.join([*pip, wheel]) for wheel in wheels]
        if importlib.util.find_spec("offload") is None:
            own = ["--no-build-isolation", f"--config-settings=build-dir={self.scratch / 'build'}", str(ROOT)]
            commands.append(shlex.join([*pip, *own]))
        if commands:
            self._building = self.start(["bash", "-c", "; ".join(commands)], self.scratch / "build.log")

    def _await_build(self) -> None:
        """Wait for the build, and note what became of it."""
        entry: Found = {"name": "build", "status": "ok"}
        self.report["parts"].append(entry)
        if self._building is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._building.wait(max(1.0, min(BUILD_S, self.left_s())))
            output = (self.scratch / "build.log").read_text(errors="replace")
            self._note("build", output)
            code = self._building.poll()
            if code != 0:
                status = "cut short by its limit" if code is None else f"failed ({code})"
                entry |= {"status": status, "output_end": output[-2000:]}
        self._finish(entry)

    def start(
        self, command: Sequence[str], output: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, its output to a file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                command,
                cwd=self.scratch,
                env=self._variables | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def _run_part(self, part: Part) -> None:
        entry: Found = {"name": part.name, "status": "running", "decides": part.decides}
        self.report["parts"].append(entry)
        most_s = part.limit_s * max(1.0, self._args.limit / LIMIT_S)
        limit_s = min(most_s, self.left_s() - 2.0)
        why = ""
        if part.cuda and self._args.accelerator != "cuda":
            why = NEEDS_CUDA
        elif not shutil.which(part.command[0]):
            why = f"there is no {part.command[0]}"
        elif limit_s < min(LEAST_S, part.limit_s):
            why = "no time left"
        if why:
            entry |= {"status": "not run", "reason": why}
            self._finish(entry)
            return
        command = [argument.replace("{limit}", f"{max(1.0, limit_s - 12):.0f}") for argument in part.command]
        entry |= {"command": shlex.join(command), "limit_s": round(limit_s, 1)}
        self._save()
        began_s, log = time.monotonic(), self.scratch / "part.log"
        process = self.start(command, log, part.environment)
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            end_session(process)
        output = log.read_text(errors="replace")
        self._note(f"{part.name}: {entry['command']}", output)
        entry["seconds"] = round(time.monotonic() - began_s, 1)
        entry["status"] = "ok" if code == 0 else "cut short by its limit" if code is None else f"failed ({code})"
        if code != 0:
            entry["output_end"] = output[-2000:]
        try:
            entry["result"] = part.read(output)
        except (ValueError, KeyError, OSError) as error:
            entry["unreadable"] = f"{type(error).__name__}: {error}"
            entry["status"] = "unreadable" if code == 0 else entry["status"]
        self._finish(entry)

    def _note(self, title: str, output: str) -> None:
        with self.log.open("a") as log:
            log.write(f"\n===== {title}\n{output}")

    def _finish(self, entry: Found) -> None:
        self._save()
        shown = entry.get("reason") or short(entry.get("result", {}))
        if entry["status"] not in ("ok", "not run"):
            shown = f"{shown} ... {entry.get('unreadable', '')} {entry.get('output_end', '')[-500:]}"
        self._tell(f"== {entry['name']}: {entry['status']}, {entry.get('seconds', 0)} s: {shown[:SHOWN_CHARACTERS]}")

    def _tell(self, line: str) -> None:
        """Print a line, or as much of it as standard output still takes."""
        line = line[: max(0, MOST_CHARACTERS - self._told - 1)]
        if line:
            print(line, flush=True)
            self._told += len(line) + 1

    def _save(self) -> None:
        """Write the report: whoever reads it finds one or the other, whole."""
        self.report["seconds"] = round(time.monotonic() - self._began_s, 1)
        draft = self.folder / ".once.json.draft"
        draft.write_text(json.dumps(self.report, indent=1) + "\n")
        draft.replace(self.file)


def short(found: Any) -> str:
    """Return a result as JSON without spaces, each number of three digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {"median", "least", "most"}:
                return rounded(value["median"])
            return {key: rounded(each) for key, each in value.items()}
        if isinstance(value, list):
            return [rounded(each) for each in value]
        return float(f"{value:.3g}") if isinstance(value, float) else value

    return json.dumps(rounded(found), separators=(",", ":"))


def end_with_parent() -> None:
    """Let a child be killed when this process ends, however that is. Runs between fork and exec."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it has started; ninja gives each compiler a group of its own."""
    for number in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(number) == process.pid:
                os.kill(number, signal.SIGKILL)
    process.wait()


def commit_of(wheels: Path | None) -> str:
    """Return the commit of these sources: git's word, or what `pack.sh` noted; empty where neither is known."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    noted = wheels / "COMMIT" if wheels else None
    return noted.read_text().strip() if noted and noted.exists() else ""


def last_json(output: str) -> Found:
    """Return the last line of an output that is a JSON object."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            found: Found = json.loads(line)
            return found
    raise ValueError("no line of JSON")


STATUS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
TEST = re.compile(rf"(\S+\.py::.*?) ({STATUS})\b")
"""A line of `pytest -v`."""


def tests_of(output: str) -> Found:
    """Return what pytest said of each test, also of one that did not end."""
    names: dict[str, list[str]] = {}
    for line in output.splitlines():
        if found := TEST.match(line):
            names.setdefault(found[2].lower(), []).append(found[1])
    counts: Found = {status: len(set(tests)) for status, tests in names.items()}
    counts["failures"] = sorted({*names.get("failed", []), *names.get("error", [])})
    if not counts.get("passed"):
        raise ValueError("no test has passed")
    return counts


def sanitized(output: str) -> Found:
    """Return what compute-sanitizer counted."""
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    if not summary:
        raise ValueError("no summary of compute-sanitizer")
    return {"errors": sum(map(int, summary))}


def section_of(file: Path, name: str) -> Callable[[str], Found]:
    """Return what reads a section's figures from the report of `bench/gpu.py`."""

    def read(output: str) -> Found:
        found = json.loads(file.read_text())["results"][name]
        return {key: value for key, value in found.items() if key not in ("environment", "smoke")}

    return read


def parts_of(out: Path, accelerator: str) -> list[Part]:
    """Return all parts, the most telling first."""
    on = ["--accelerator", accelerator]
    tests = [sys.executable, "-P", "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    tests += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-m", "gpu"]

    def micro(name: str, limit_s: float, decides: str, script: str = "micro.py", **more: Any) -> Part:
        command = [sys.executable, str(GPU / script), name, *on]
        return Part(more.pop("title", name), command, limit_s, decides, last_json, **{"cuda": False} | more)

    link = partial(micro, script="links.py", torch_alone=True)

    def section(name: str, limit_s: float, decides: str, *options: str) -> Part:
        file = out / "gpu.json"
        command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--allow-missing", "--sections", name]
        command += ["--limit", "{limit}", "--json", str(file), "--path", tempfile.gettempdir(), *options]
        title = {"b": "bits", "c": "shares", "d": "train"}[name]
        return Part(title, command, limit_s, decides, section_of(file, name))

    chosen = "(recorded and bfloat16) or homes or pinned or marks or free_their or default_device"
    sessions = [*tests, str(ROOT / "tests" / "e2e" / "test_real_gpu.py"), "-k", chosen]
    streams = partial(link, "streams", 20, cuda=True)
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    memcheck = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    memcheck += [*tests, str(ROOT / "tests" / "kernels" / "test_gpu.py"), "-k", "one_table or large_and_small"]
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each allocation by itself, so that what lies beyond one is seen
    training = ["--contenders", "in-memory,offload-host", "--params", "1.5e9", "--batch", "2", "--iterations", "4"]
    return [
        link("machine", 60, "does host memory grow as it is used?"),
        link("pinning", 60, "seconds a GiB; is registered memory pinned for a copy?"),
        link("duplex", 40, "what the link gives alone, both ways, beside products"),
        link("behind", 40, "does a small copy wait for large ones of another stream?"),
        link("host", 30, "what calls cost the host, and when a queue is full"),
        streams("streams that share a connection", title="streams of 8"),
        streams("the same with 32 connections", title="streams of 32", environment=connections),
        Part("sessions", sessions, 80, "are bits, homes, pinning and times of a session right?", tests_of),
        section("b", 70, "has the GPU's update the CPU's bits?", "--elements", "4e8"),
        micro("update", 50, "how much of the memory's bandwidth an update reaches"),
        micro("calls", 50, "what the device's calls cost the engine's thread"),
        section("c", 100, "does a step take what its bound says, for each share?", "--elements-c", "2e9"),
        micro("forward", 60, "does a step behind forward slow it down?"),
        section("d", 100, "an iteration beside one in memory", *training),
        micro("leaving", 40, "streams and priorities for gradients that leave"),
        Part("memcheck", memcheck, 70, "do kernels read beyond their memory?", sanitized, apart),
    ]


def main() -> int:
    """Run all parts, or those that are named."""
    everything = parts_of(Path(), "cuda")
    listed = "\n".join(f"  {part.name:<14} {part.limit_s:>3g} s  {part.decides}" for part in everything)
    parser = argparse.ArgumentParser(
        prog="once.sh",
        description=f"{__doc__}\nThe parts, and what each takes at most:\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = ROOT / "build" / "once"
    parser.add_argument("out", nargs="?", type=Path, default=default, help="where reports go (default: build/once)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds of the whole run (default: %(default)g)"
    )
    parser.add_argument("--wheels", type=lambda text: Path(text).resolve(), help="folder of wheels to install")
    parser.add_argument(
        "--accelerator",
        choices=["cuda", "late"],
        default="cuda",
        help="late: the test accelerator, which the CPU plays, at tiny sizes (needs the package): does all run?",
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), help="names, or how they begin (default: all)")
    args = parser.parse_args()
    chosen = [
        part
        for part in parts_of(args.out.resolve(), args.accelerator)
        if args.parts is None or part.name.startswith(tuple(args.parts))
    ]
    return Run(args).run(chosen)


if __name__ == "__main__":
    sys.exit(main())
