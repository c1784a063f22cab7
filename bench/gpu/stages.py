"""Stages of a first run on a CUDA machine without a package index, each at most nine minutes and with a report.

    check  facts about the machine; the GPU's kernels bit by bit; the device; sessions; compute-sanitizer
    rates  the full probe, to a rates file; then sections a, c and b of bench/gpu.py with it
    train  section d of bench/gpu.py: in memory, ours, ours in DeepSpeed, DeepSpeed's own and torchao's, at a size
           that fits; losses compared
    micro  the measurements that decide what the engine should do next (bench/gpu/micro.py)

A stage is a row of parts, the most valuable first. Each is a process of its own with a limit of its own; one that
fails, hangs or finds no time left is reported as that, and the next one begins. The report is written around every
part: a stage that is killed leaves what it had found. All stages may be repeated; `train` uses the rates file that
`rates` left in the same FOLDER, or another.

The package is built into a folder outside of the sources, named after their content, so that the next stage finds it.
A machine that is bare at each call is handed that folder back: each stage leaves it, with the kernels that Triton has
compiled, as `kept.tar.gz` in FOLDER, and takes what `--kept` names in the place of building.
This script itself imports neither torch nor the package: what is broken there is reported, too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
SIMULATED = "SIMULATED DEVICE: NO GPU WAS USED, NO FIGURE MEANS ANYTHING"
LIMIT_S = 540.0
LEAST_S = 10.0
"""A part with less time than that is not begun."""

KEPT = "kept.tar.gz"
MOST_KEPT_BYTES = 16 << 20
"""A larger archive of the build is not left: what brings files back from such machines has limits of this kind."""

TOUCHED_BYTES = 32 << 30
"""Host memory that `facts` touches: a virtual machine may be given its memory only as it is used."""

Found = dict[str, Any]


class Cut(BaseException):
    """A signal that ends the stage."""


@dataclass(frozen=True)
class Part:
    """One process of a stage.

    Attributes:
        name: What it is called in the report.
        command: Arguments; None if `missing` says why there is none.
        limit_s: Most seconds.
        read: Makes the result from the part's output; called as well when the part was cut short.
        environment: Variables of its own.
        needed: Whether the stage ends without it.
        missing: Why it cannot be run here.
    """

    name: str
    command: Sequence[str] | None
    limit_s: float
    read: Callable[[str], Found] = lambda output: {}
    environment: dict[str, str] = field(default_factory=dict)
    needed: bool = False
    missing: str = ""


class Stage:
    """A row of parts and the report about them.

    Args:
        args: The command's.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began_s = time.monotonic()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        args.folder.mkdir(parents=True, exist_ok=True)
        self.folder: Path = args.folder.resolve()
        self.prefix = f"{args.stage}-{stamp}"
        self.log = self.folder / f"{self.prefix}.log"
        self.file = self.folder / f"{self.prefix}.json"
        self.scratch = Path(tempfile.mkdtemp(prefix="offload-stage-", dir=args.scratch))
        self.pack = find_pack()
        commit, changed = provenance(self.pack)
        self.site = site_folder()
        self.variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self.site), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRITON_CACHE_DIR": str(self.site / ".triton"),
            "OFFLOAD_COMMIT": commit or "",
            "OFFLOAD_CHANGED": "\n".join(changed),
        }
        self.report: Found = {
            "stage": args.stage,
            "device": SIMULATED if args.simulated else "CUDA",
            "state": "running",
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(["bench/gpu/run.sh", *sys.argv[1:]]),
            "commit": commit,
            "uncommitted_changes": changed,
            "environment": {"system": platform.platform(), "python": platform.python_version()},
            "parts": [],
        }

    def left_s(self) -> float:
        return self.args.limit - (time.monotonic() - self.began_s)

    def save(self) -> None:
        """Write the report: whoever reads it finds one or the other, whole."""
        self.report["seconds"] = round(time.monotonic() - self.began_s, 1)
        draft = self.file.with_name(f".{self.file.name}.draft")
        draft.write_text(json.dumps(self.report, indent=2) + "\n")
        draft.replace(self.file)

    def run(self, parts: Callable[[Stage], Iterator[Part]]) -> int:
        """Run the parts; return the exit status."""
        self.save()
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in signals:
            signal.signal(number, cut)
        try:
            for part in parts(self):
                entry = self.run_part(part)
                if part.name == "environment" and entry["status"] == "ok":
                    self.report["environment"] |= entry.pop("result")
                if part.needed and entry["status"] != "ok":
                    self.report["state"] = f"ended: {part.name} {entry['status']}"
                    break
            else:
                self.report["state"] = "complete"
        except Cut as caught:
            self.report["state"] = f"cut short by {caught}"
            for entry in self.report["parts"]:
                if entry["status"] == "running":
                    entry["status"] = f"cut short by {caught}"
        finally:
            for number in signals:
                signal.signal(number, signal.SIG_IGN)
            self.save()
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.report["kept"] = keep(self.site, self.folder / KEPT)
            self.save()
        self.tell()
        statuses = {entry["status"] for entry in self.report["parts"]}
        return 0 if self.report["state"] == "complete" and statuses <= {"ok", "not run"} else 1

    def run_part(self, part: Part) -> Found:
        """Run one part and note what became of it."""
        entry: Found = {"name": part.name, "status": "running"}
        self.report["parts"].append(entry)
        most_s = part.limit_s * max(1.0, self.args.limit / LIMIT_S)
        limit_s = min(most_s, self.left_s() - 2.0)
        if part.command is None or limit_s < min(LEAST_S, part.limit_s):
            entry |= {"status": "not run", "reason": part.missing or "no time left in this stage"}
            self.save()
            return entry
        command = [argument.replace("{limit}", f"{max(1.0, limit_s - 15):.0f}") for argument in part.command]
        entry |= {"command": shlex.join(command), "limit_s": round(limit_s, 1)}
        self.save()
        print(f"{part.name} ...", flush=True)
        began_s = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"\n===== {part.name}: {entry['command']}\n".encode())
            log.flush()
            at = log.tell()
            process = subprocess.Popen(
                command,
                cwd=self.scratch,
                env={**self.variables, **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_session(process)
        entry["seconds"] = round(time.monotonic() - began_s, 1)
        with self.log.open("rb") as log:
            log.seek(at)
            output = log.read().decode(errors="replace")
        entry["status"] = "ok" if code == 0 else "cut short by its limit" if code is None else "failed"
        if code:
            entry["exit_status"] = code
        if code != 0:
            entry["output_end"] = output[-3000:]
        try:
            entry["result"] = part.read(output)
        except (ValueError, KeyError, IndexError, OSError) as error:
            entry["unreadable"] = f"{type(error).__name__}: {error}"
            if code == 0:
                entry["status"] = "failed"
        self.save()
        return entry

    def tell(self) -> None:
        """Print a line for each part."""
        if self.args.simulated:
            print(SIMULATED)
        for entry in self.report["parts"]:
            shown = entry.get("reason") or short(entry.get("result", {}))
            print(f"{entry['name']:<24} {entry['status']:<12} {entry.get('seconds', 0):>6} s  {shown}")
        print(f"{self.args.stage}: {self.report['state']}, {self.report['seconds']} s; {self.file}")


def short(result: Found) -> str:
    """Return the first few figures of a result on one line."""
    plain = {key: value for key, value in result.items() if isinstance(value, str | int | float)}
    shown = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in plain.items()]
    return ", ".join(one for one in shown if len(one) < 60 and "\n" not in one)[:200]


def cut(number: int, frame: object) -> None:
    raise Cut(signal.Signals(number).name)


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


# What is run, and of which commit it is


def find_pack() -> Path | None:
    """Return the folder that `pack.sh` filled, if it is here."""
    named = os.environ.get("OFFLOAD_PACK")
    for folder in (Path(named) if named else ROOT / "build" / "gpu-pack", ROOT.parent):
        if (folder / "SHA256SUMS").exists() and (folder / "COMMIT").exists():
            return folder
    return None


def provenance(pack: Path | None) -> tuple[str | None, list[str]]:
    """Return the commit of these sources, and the files that differ from it."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout

    if (ROOT / ".git").exists() and (commit := git("rev-parse", "HEAD").strip()):
        return commit, git("status", "--porcelain").splitlines()
    if pack is None:
        return None, []
    changed = (pack / "CHANGED").read_text().splitlines() if (pack / "CHANGED").exists() else []
    for line in (pack / "SHA256SUMS").read_text().splitlines():
        wanted, name = line.split(maxsplit=1)
        file = ROOT / name
        found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "not there"
        if found != wanted:
            changed.append(f"since it was packed: {name}")
    return (pack / "COMMIT").read_text().strip(), changed


def site_folder() -> Path:
    """Return where the package is built to: a name for what it is built from, and by which Python."""
    digest = hashlib.sha256(sys.version.encode())
    for part in ("pyproject.toml", "CMakeLists.txt", "csrc", "offload", "integrations"):
        top = ROOT / part
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    folder = os.environ.get("OFFLOAD_SITE", tempfile.gettempdir())
    return Path(folder) / f"offload-site-{os.getuid()}-{digest.hexdigest()[:16]}"


def build(pack: Path | None, site: Path) -> None:
    """Install the package and the packed wheels into a folder; what is not for this machine is left out."""
    draft = Path(f"{site}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    pip += ["--disable-pip-version-check", "--target", str(draft)]
    own = ["--no-build-isolation", f"--config-settings=build-dir={draft}.build", str(ROOT)]
    left_out = []
    try:
        subprocess.run([*pip, *own], check=True)
        wheels = sorted(map(str, (pack / "wheels").glob("*.whl"))) if pack is not None else []
        if wheels and subprocess.run([*pip, "--upgrade", *wheels], check=False).returncode:
            for wheel in wheels:
                if subprocess.run([*pip, "--upgrade", wheel], check=False).returncode:
                    left_out.append(Path(wheel).name)
        site.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another stage was first
            draft.rename(site)
    finally:
        shutil.rmtree(f"{draft}.build", ignore_errors=True)
        shutil.rmtree(draft, ignore_errors=True)
    print(json.dumps({"wheels": len(wheels) - len(left_out), "left_out": left_out}))


def keep(site: Path, archive: Path) -> str:
    """Leave the build as an archive; return what became of it. Nothing is left where nothing has been built."""
    if not site.exists():
        return "nothing was built"
    draft = archive.with_name(f".{archive.name}.draft")
    try:
        with tarfile.open(draft, "w:gz", compresslevel=6) as packed:
            packed.add(site, site.name, filter=lambda member: None if "__pycache__" in member.name else member)
        nbytes = draft.stat().st_size
        if nbytes > MOST_KEPT_BYTES:
            return f"left out: {nbytes} bytes, of {MOST_KEPT_BYTES} at most"
        draft.replace(archive)
        return f"{nbytes} bytes"
    except OSError as error:
        return f"left out: {error}"
    finally:
        draft.unlink(missing_ok=True)


def take(site: Path, archive: Path) -> str:
    """Unpack the build of an earlier stage; return what became of it. One of other sources is not taken."""
    draft = Path(f"{site}.{os.getpid()}.draft")
    try:
        with tarfile.open(archive, "r:gz") as packed:
            packed.extractall(draft, filter="data")
        if not (draft / site.name).is_dir():
            return f"{archive}: made from other sources, or by another Python"
        (draft / site.name).rename(site)
        return f"{archive}: taken"
    except (OSError, tarfile.TarError, EOFError) as error:
        return f"{archive}: {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def touched(nbytes: int) -> Found:
    """Return what memory the machine has before and after a part of it has been touched, and how long that took."""

    def total() -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    before, began_s = total(), time.monotonic()
    nbytes = min(nbytes, before // 2)
    held = []
    for _ in range(nbytes >> 30):
        held.append(mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
    seconds, after = time.monotonic() - began_s, total()
    for piece in held:
        piece.close()
    return {"bytes": len(held) << 30, "seconds": seconds, "total_before_bytes": before, "total_after_bytes": after}


def facts(scratch: Path, touch_bytes: int) -> Found:
    """Return what the machine says of itself."""
    commands = {
        "gpus": "nvidia-smi",
        "gpu links": "nvidia-smi topo -m",
        "gpu details": "nvidia-smi -q -d MEMORY,CLOCK,POWER,ECC,PCIE,PERFORMANCE",
        "pcie": "nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.gen.max,"
        "pcie.link.width.current,memory.total,memory.used,compute_mode,mig.mode.current --format=csv",
        "cpu": "lscpu",
        "numa": "numactl --hardware || ls -d /sys/devices/system/node/node*",
        "memory": "free -b; cat /proc/meminfo",
        "limits": "ulimit -a",
        "cgroup": "cat /proc/self/cgroup; for f in memory.max memory.high memory.current cpu.max pids.max; do "
        "echo $f $(cat /sys/fs/cgroup/$f 2>&1); done",
        "huge pages": "cat /sys/kernel/mm/transparent_hugepage/enabled /sys/kernel/mm/transparent_hugepage/defrag "
        "/proc/sys/vm/nr_hugepages /proc/sys/vm/overcommit_memory",
        "disks": f"df -hT {shlex.quote(str(scratch))} / /dev/shm; lsblk -o NAME,SIZE,ROTA,SCHED,TYPE,MOUNTPOINT",
        "compilers": "nvcc --version; c++ --version; ld --version | head -1; compute-sanitizer --version",
        "kernel": "uname -a; cat /proc/driver/nvidia/version",
        "packages": f"{sys.executable} -m pip list --disable-pip-version-check --format=freeze",
        "variables": "env | grep -E '^(CUDA|NVIDIA|NCCL|TORCH|PYTORCH|OMP|TRITON|DS)_' | sort",
    }
    found: Found = {}
    for name, command in commands.items():
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=15,
                check=False,
            )
            found[name] = done.stdout.rstrip()
        except (OSError, subprocess.TimeoutExpired) as error:
            found[name] = f"{error}"
    return {**found, "memory touched": touched(touch_bytes)}


def last_json(output: str) -> Found:
    """Return the last line of an output that is a JSON object."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            found: Found = json.loads(line)
            return found
    raise ValueError("no line of JSON")


STATUS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
TEST = re.compile(rf"(?:\[gw\d+\] \[ *\d+%\] ({STATUS}) )?(\S+\.py::.*?)(?: ({STATUS})\b.*)?$")
"""A line of `pytest -v`, of one process or of several."""


def tests_of(output: str) -> Found:
    """Return what pytest said of each test, also of one that did not end."""
    names: dict[str, list[str]] = {}
    for line in output.splitlines():
        found = TEST.match(line)
        if found and (status := found[1] or found[3]):
            names.setdefault(status.lower(), []).append(found[2].strip())
    counts: Found = {status: len(set(tests)) for status, tests in names.items()}
    counts["failures"] = sorted(set(names.get("failed", []) + names.get("error", [])))
    if not counts.get("passed"):
        raise ValueError("no test has passed")
    return counts


# Stages


def common(stage: Stage) -> Iterator[Part]:
    """The build, and what it is built with."""
    own = str(Path(__file__))
    packed = ["--pack", str(stage.pack)] if stage.pack else []
    archive = stage.args.kept or stage.folder / KEPT
    if not stage.site.exists() and archive.exists():
        stage.report["taken"] = take(stage.site, archive)
    if not stage.site.exists():
        command = [sys.executable, "-P", own, "build", str(stage.site), *packed]
        yield Part("build", command, 200.0, last_json, needed=True)
    simulated = ["--simulated"] if stage.args.simulated else []
    yield Part("environment", [sys.executable, "-P", own, "describe", ".", *simulated], 60.0, last_json)


def asked(part: Part, names: Sequence[str] | None) -> bool:
    """Return whether a part is to be run: all are, or those whose names begin with one of these."""
    return names is None or part.name.startswith(tuple(names))


def pytest(stage: Stage, *arguments: str, workers: int = 1) -> list[str]:
    """Return a command that runs tests, those for a GPU or those for the simulated device."""
    chosen = ["-m", "not gpu and not full" if stage.args.simulated else "gpu"]
    spread = ["-n", str(workers)] if workers > 1 and not stage.args.smoke else []
    options = [
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    return [sys.executable, "-P", "-m", "pytest", *options, *chosen, *spread, *arguments]


def check(stage: Stage) -> Iterator[Part]:
    """Is everything right?"""
    smoke, tests = stage.args.smoke, ROOT / "tests"
    touch = ["--smoke"] if smoke else []
    yield Part("facts", [sys.executable, "-P", __file__, "facts", str(stage.scratch), *touch], 90.0, last_json)
    device = pytest(stage, str(tests / "tiers" / "test_device.py"), *(["-k", "bytes or pinned"] if smoke else []))
    yield Part("device", device, 90.0, tests_of)
    kernels = [str(tests / "kernels" / f"test_{name}.py") for name in ("gpu", "compact16", "compact8_gpu")]
    workers = max(1, min(8, (os.cpu_count() or 1) // 2)) if has("xdist") else 1
    command = pytest(stage, *kernels, *(["-k", "large_and_small or cannot_read"] if smoke else []), workers=workers)
    yield Part("kernels", command, 200.0, tests_of)
    fewer = ["-k", "streams"] if smoke else []
    training = pytest(stage, str(tests / "e2e" / "test_gpu_training.py"), *fewer)
    yield Part("training", training, 120.0, tests_of)
    if stage.args.simulated:
        yield Part("sessions", None, 0.0, missing="needs a GPU")
    else:
        yield Part("sessions", pytest(stage, str(tests / "e2e" / "test_real_gpu.py")), 150.0, tests_of)
    deepspeed = str(tests / "integrations" / "test_deepspeed_gpu.py")
    yield Part("deepspeed", pytest(stage, deepspeed, *(["-k", "stage or given"] if smoke else [])), 180.0, tests_of)
    tool = shutil.which("compute-sanitizer")
    for name, chosen in (("memcheck", "one_table or large_and_small"), ("racecheck", "large_and_small")):
        missing = "" if tool and not stage.args.simulated else "there is no compute-sanitizer, or no GPU"
        # Accesses count, not what calls return: libraries ask the driver for functions that it need not have.
        whole = [str(tool), "--tool", name, "--report-api-errors", "no", "--error-exitcode", "9"]
        whole += pytest(stage, kernels, "-k", chosen)
        # Each allocation by itself, so that what lies beyond one is seen.
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        yield Part(name, None if missing else whole, 90.0, sanitized, alone, missing=missing)


def sanitized(output: str) -> Found:
    """Return what compute-sanitizer counted."""
    summary = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    if not summary:
        raise ValueError("no summary of compute-sanitizer")
    return {"errors": sum(int(number) for found in summary for number in found if number)}


def has(package: str) -> bool:
    """Return whether a package is here, without importing it."""
    from importlib.util import find_spec

    return find_spec(package) is not None


def gpu_bench(stage: Stage, file: str, *arguments: str) -> list[str]:
    """Return a command that adds to one of this stage's reports of `bench/gpu.py`."""
    rates = (stage.args.rates or stage.folder / "rates.json").resolve()
    command = [
        sys.executable,
        str(BENCH / "gpu.py"),
        "--allow-missing",
        "--json",
        str(stage.folder / f"{stage.prefix}-{file}.json"),
    ]
    command += ["--path", str(stage.scratch)] + (["--rates", str(rates)] if rates.exists() else [])
    command += ["--simulated"] if stage.args.simulated else ["--smoke"] if stage.args.smoke else []
    return [*command, *arguments]


def of_section(stage: Stage, file: str, section: str, contender: str | None = None) -> Callable[[str], Found]:
    """Return what reads a section's (or one contender's) figures from a report of `bench/gpu.py`."""

    def read(output: str) -> Found:
        document = json.loads((stage.folder / f"{stage.prefix}-{file}.json").read_text())
        found: Found = document["results"][section]
        if contender is not None:
            entry: Found = found["contenders"][contender]
            return trained(entry, found["contenders"].get("in-memory"))
        if "contenders" not in found:
            found = {key: value for key, value in found.items() if key not in ("environment", "smoke")}
        return found

    return read


def trained(entry: Found, plain: Found | None) -> Found:
    """Return a contender's figures, its losses beside those of the training in memory."""
    if "iteration_s" not in entry:
        raise ValueError(entry.get("not_run", "not run"))
    found = {key: value for key, value in entry.items() if key != "iteration_s"}
    found["median_iteration_s"] = sorted(entry["iteration_s"])[len(entry["iteration_s"]) // 2]
    if plain is not None and "losses" in plain:
        apart = [abs(a - b) for a, b in zip(entry["losses"], plain["losses"], strict=False)]
        found["largest_difference_of_loss"] = max(apart)
    return found


def rates(stage: Stage) -> Iterator[Part]:
    """How fast is everything, and what does the planner make of it?"""
    seconds = "2" if stage.args.smoke else "45"
    command = [sys.executable, "-P", "-m", "offload.cli", "probe", "--quiet", "--json", "--seconds", seconds]
    file = stage.folder / "rates.json"
    stage.args.rates = file
    command += ["--paths", str(stage.scratch), "--out", str(file)]
    yield Part("probe", command, 150.0, lambda output: json.loads(file.read_text()))
    for section, limit_s in (("a", 90.0), ("c", 200.0), ("b", 200.0)):
        command = gpu_bench(stage, "gpu", "--section", section, "--limit", "{limit}")
        yield Part(f"section {section}", command, limit_s, of_section(stage, "gpu", section))


def train(stage: Stage) -> Iterator[Part]:
    """What does an iteration take, beside no offload and beside the others?"""
    described = stage.report["environment"]
    tokens = 2 * 2048
    host_bytes = stage.args.host_bytes or int(described.get("memory_bytes", 0))
    memory = int(described.get("gpu_memory_bytes", 0)), host_bytes
    params = SMOKE_PARAMS if stage.args.smoke else stage.args.params or largest(*memory, tokens)
    stage.report["params"] = params
    sizes = ["--batch", "2", "--seq", "2048", "--iterations", "5", "--limit", "{limit}"]
    plan = [
        ("memory", "in-memory", params, 90.0),
        ("memory", "offload-host", params, 120.0),
        ("memory", "deepspeed-zero3", params, 200.0),
        ("memory", "offload-deepspeed", params, 120.0),
        ("disk", "in-memory", min(params, DISK_PARAMS), 60.0),
        ("disk", "offload-disk", min(params, DISK_PARAMS), 100.0),
        ("memory", "offload-deepspeed-half", params, 100.0),
        ("memory", "offload-deepspeed-zero2", params, 100.0),
        ("memory", "deepspeed-zero2", params, 150.0),
        ("memory", "torchao", params, 90.0),
        ("memory", "offload-deepspeed-zero1", params, 100.0),
        ("memory", "deepspeed-twinflow", params, 150.0),
        ("memory", "deepspeed-superoffload", params, 150.0),
        ("memory", "deepspeed-zenflow", params, 150.0),
    ]
    for file, name, numel, limit_s in plan:
        command = gpu_bench(stage, file, "--section", "d", "--contenders", name, "--params", f"{numel:g}", *sizes)
        label = f"{name}, {numel:.2g} parameters"
        missing = "needs a GPU" if name in ON_A_GPU and stage.args.simulated else ""
        yield Part(label, None if missing else command, limit_s, of_section(stage, file, "d", name), missing=missing)


ON_A_GPU = ("torchao", "deepspeed-twinflow", "deepspeed-superoffload", "deepspeed-zenflow")
"""Contenders that refuse anything else."""

SMOKE_PARAMS = 2e5
"""What `bench/gpu.py` trains at smoke size."""

DISK_PARAMS = 3e8
"""The training with state on disk: 24 bytes a parameter are read and written in each iteration."""

PARAMS = (3e9, 2.5e9, 2e9, 1.5e9, 1e9, 7e8, 5e8, 3e8, 2e8, 1e8, 5e7)
GPU_ITEM_BYTES = 20
"""In memory, a parameter: weight 2, gradient 2 and 4, master 4, moments 8."""

HOST_ITEM_BYTES = 22
"""What stock DeepSpeed's CPU offload takes of host memory for a parameter."""


def largest(gpu_bytes: int, host_bytes: int, tokens: int) -> float:
    """Return the largest model that trains in the GPU's memory, and with its state in the host's."""
    for params in PARAMS:
        # Without recomputation a layer keeps about 34 bytes for each token and each of its widths; a Llama of these
        # proportions has layers of width 128 times their number.
        width = (params / 12 * 128) ** (1 / 3)
        activations = 34 * tokens * width * (width / 128)
        gpu = max(GPU_ITEM_BYTES * params, (GPU_ITEM_BYTES - 4) * params + activations)
        if gpu <= 0.85 * gpu_bytes and HOST_ITEM_BYTES * params <= 0.8 * host_bytes:
            return params
    return PARAMS[-1]


def micro(stage: Stage) -> Iterator[Part]:
    """The measurements that decide open questions."""
    options = ["--simulated"] if stage.args.simulated else []
    options += ["--smoke"] if stage.args.smoke else []
    for name, limit_s in (
        ("duplex", 60.0),
        ("behind", 60.0),
        ("update", 60.0),
        ("leaving", 120.0),
        ("calls", 90.0),
        ("pinning", 150.0),
    ):
        command = [sys.executable, "-P", str(BENCH / "gpu" / "micro.py"), name, *options]
        interpreted = {"TRITON_INTERPRET": "1"} if stage.args.simulated else {}
        yield Part(name, command, limit_s, last_json, interpreted)


STAGES = {"check": check, "rates": rates, "train": train, "micro": micro}


def describe(simulated: bool) -> None:
    """Print what the machine and the packages are, with the package loaded."""
    sys.path.append(str(BENCH))
    from gpu import described  # type: ignore[attr-defined]

    print(json.dumps(described(simulated)))


def main() -> int:
    """Run a stage, or one of a stage's own helpers."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=[*STAGES, "build", "describe", "facts"], metavar="|".join(STAGES))
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where reports go")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        help="seconds of the stage (default: %(default)g); with more, its parts have more",
    )
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure (default: the temporary one)")
    parser.add_argument(
        "--rates", type=Path, metavar="FILE", help="rates file (default: FOLDER/rates.json, if there)"
    )
    parser.add_argument("--params", type=float, help="parameters of the model in train (default: what fits)")
    parser.add_argument(
        "--host-bytes",
        type=lambda text: int(float(text)),
        help="host memory that `train` chooses a model for (default: what the machine says it has; a "
        "virtual one may be given more as it uses it)",
    )
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        help="only the parts whose names begin so, such as device,kernels or deepspeed-zero3 "
        "(default: all, as long as there is time)",
    )
    parser.add_argument(
        "--kept", type=Path, metavar="FILE", help=f"an earlier stage's build (default: FOLDER/{KEPT}, if there)"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it still run?")
    parser.add_argument(
        "--simulated", action="store_true", help="a simulated device in the GPU's place, at smoke sizes"
    )
    parser.add_argument("--pack", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage == "build":
        build(args.pack, args.folder)
    elif args.stage == "describe":
        describe(args.simulated)
    elif args.stage == "facts":
        print(json.dumps(facts(args.folder, 0 if args.smoke else TOUCHED_BYTES)))
    else:
        args.smoke = args.smoke or args.simulated
        stage = Stage(args)

        def parts(stage: Stage) -> Iterator[Part]:
            yield from common(stage)
            yield from (part for part in STAGES[args.stage](stage) if asked(part, args.parts))

        return stage.run(parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
