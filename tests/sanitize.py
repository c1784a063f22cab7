"""Tests of the native module with sanitizers built into it: `python tests/sanitize.py address`, or `thread`.

`make sanitize` runs both. Each builds the module in build/sanitize/KIND, in a virtual environment of its own that
borrows the packages of the interpreter that runs this file, so that the installed module stays as it is.

A run passes if its tests pass and no sanitizer reported anything. Reports go to files, so that a report from a child
process counts even where no test looks at how the child ended. Before the tests, three planted mistakes have to be
reported: an address with too few bytes behind it, one that is not aligned, two updates of the same state at once.

Not seen: the inside of an arena (one mapping of many slots: what runs over a slot's end but not over the arena's);
masked and non-temporal accesses of the AVX kernels, which the compiler does not instrument (the scalar kernel is
instrumented throughout); torch and the interpreter, except where they call the C library.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

OVERRUN = """
import ctypes
from offload import _native
memory = ctypes.create_string_buffer(100)
_native.crc32c_portable(ctypes.addressof(memory), 101)
"""
MISALIGNED = """
import ctypes
from offload import _native
memory = ctypes.create_string_buffer(100)
_native.sum_in_order(ctypes.addressof(memory) + 1, 2)
"""
RACE = """
from kernel_cases import Case
from offload._native import CompletionQueue
from offload.kernels import CpuUpdateKernel
row = Case.make(1000).row()
kernels = [CpuUpdateKernel(CompletionQueue(), 1, instruction_set="scalar") for _ in range(2)]
for kernel in kernels:
    kernel.submit(0, row)
for kernel in kernels:
    kernel.close()
"""


@dataclass
class Kind:
    """What one build runs."""

    libraries: list[str]
    """Runtimes that have to be in the process before the interpreter; the module's own come too late."""
    options: dict[str, str]
    """Environment; `{log}` stands for where reports go."""
    controls: dict[str, str]
    """What a report has to say, and a program that has to be reported."""
    tests: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    """Tests below `tests` that are not run, and why."""
    prefix: list[str] = field(default_factory=list)


KINDS = {
    "address": Kind(
        # The C++ library too: the sanitizer looks for its functions when the process starts.
        libraries=["libasan.so", "libstdc++.so.6"],
        options={
            # Leaks are not looked for: at exit the interpreter and torch still hold thousands of blocks, and what the
            # module's objects own hangs on theirs. tests/e2e/test_lifetime.py counts threads, files and memory.
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:handle_abort=2:log_path={log}",
            # Its messages go to standard error: its log_path sets the other runtime's, whose function is found first.
            # It ends by an abort, as the C++ library's assertions do, which the other reports with a stack.
            "UBSAN_OPTIONS": "abort_on_error=1:log_path={log}",
            # Python's small objects as blocks of the C library's, which the sanitizer guards.
            "PYTHONMALLOC": "malloc",
        },
        controls={"heap-buffer-overflow": OVERRUN, "misaligned address": MISALIGNED},
        tests=["tests/kernels", "tests/tiers"],
        left_out={
            "tests/kernels/test_gpu.py": "no native code: Triton's interpreter",
            "tests/kernels/test_gpu_code.py": "no native code: Triton's compiler",
        },
    ),
    "thread": Kind(
        libraries=["libtsan.so"],
        options={
            # torch's pool of threads is not instrumented, so that its work looks unordered.
            "OMP_NUM_THREADS": "1",
            # Some tests fork from processes with threads, and their children start threads.
            "TSAN_OPTIONS": "die_after_fork=0:second_deadlock_stack=1:log_path={log}",
        },
        controls={"data race": RACE},
        tests=[
            "tests/kernels/test_update_pool.py",
            "tests/tiers/test_io_backends.py",
            "tests/tiers/test_path_lock.py",
            "tests/tiers/test_file_tier.py",
            "tests/tiers/test_shared_lanes.py",
            "tests/e2e/test_optimizer.py",
            "tests/e2e/test_overlap.py",
            "tests/e2e/test_checkpoint.py",
            "tests/e2e/test_lifetime.py",
        ],
        # The sanitizer's map of the address space has no room for what a kernel may randomize.
        prefix=["setarch", "-R"],
    ),
}


def build(kind: str, folder: Path) -> Path:
    """Make the environment, or bring it up to date; return its interpreter."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "venv", symlinks=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    borrowed = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    # Such folders are searched, but the .pth files in them are not followed: one leads to the installed module.
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    config = {
        "build-dir": str(folder / "cmake"),
        "cmake.define.OFFLOAD_SANITIZE": kind,
        "cmake.build-type": "RelWithDebInfo",
        "install.strip": "false",
    }
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", *(f"-C{name}={value}" for name, value in config.items()), "--editable", ROOT]
    subprocess.run(command, check=True)
    return python


def library(name: str) -> str:
    """Where the compiler has a shared library."""
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"{compiler} has no {name}; the sanitizers come with g++")
    return path


def environment(kind: Kind, log: Path) -> dict[str, str]:
    """The environment of whatever loads the instrumented module; its reports go to files that begin with `log`."""
    options = {name: value.format(log=log) for name, value in kind.options.items()}
    preload = " ".join(library(name) for name in kind.libraries)
    return {**os.environ, **options, "LD_PRELOAD": preload, "PYTHONPATH": str(ROOT / "tests" / "kernels")}


def reports(log: Path) -> list[Path]:
    return sorted(log.parent.glob(log.name + ".*"))


def main() -> int:
    """Build, see that the sanitizer reports, run the tests; the exit status is 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("pytest", nargs="*", help="what to run in place of the chosen tests (after --)")
    arguments = parser.parse_args()
    kind = KINDS[arguments.kind]
    folder = ROOT / "build" / "sanitize" / arguments.kind
    logs = folder / "reports"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)

    started_s = time.monotonic()

    def say(text: str) -> None:
        print(f"sanitize {arguments.kind} [{time.monotonic() - started_s:.0f} s]: {text}", flush=True)

    say("building")
    python = build(arguments.kind, folder)
    for name, program in kind.controls.items():
        log = logs / "control"
        done = subprocess.run(
            [*kind.prefix, python, "-c", program],
            env=environment(kind, log),
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        found = "".join(path.read_text() for path in reports(log))
        if not found or name not in found + done.stderr or done.returncode == 0:
            print(done.stdout, done.stderr, found, sep="\n")
            say(f"a planted mistake was not reported: {name}")
            return 1
        for path in reports(log):
            path.unlink()
    say(f"reported, as they should be: {', '.join(kind.controls)}")

    for name, why in kind.left_out.items():
        say(f"left out: {name} ({why})")
    log = logs / "report"
    tests = arguments.pytest or kind.tests + [f"--ignore={name}" for name in kind.left_out]
    command = [*kind.prefix, python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    # What native code writes to standard error is seen at once, and not lost if it ends the process.
    command += ["--capture=sys", "-o", "timeout=900", "-m", "not full and not gpu", *tests]
    done = subprocess.run(command, env=environment(kind, log), cwd=ROOT)
    found = reports(log)
    for path in found:
        print(path.read_text(errors="replace"), flush=True)
    say(f"{len(found)} reports in {logs}" if found else f"no reports; pytest ended with {done.returncode}")
    return 1 if found else done.returncode


if __name__ == "__main__":
    sys.exit(main())
