"""Tests of the native module with sanitizers built into it: `python tests/sanitize.py address`, or `thread`.

`make sanitize` runs both. Each builds the module in build/sanitize/KIND, in a virtual environment of its own that
borrows the packages of the interpreter that runs this file, so that the installed module stays as it is.

A run passes if its tests pass and no sanitizer reported anything. Reports go to files, so that a report from a child
process counts even where no test looks at how the child ended. Before the tests, three planted mistakes have to be
reported: an address with too few bytes behind it, one that is not aligned, two updates of the same state at once.
After them, blocks that the module allocated and nothing points at any more are a report too; to look for them the
process needs to be allowed to trace its own threads.

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

LITTLE_ROOM = "tests/tiers/test_file_tier.py::test_a_system_without_threads_to_spare"

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
case = Case.make(1000)
kernels = [CpuUpdateKernel(CompletionQueue(), 1, instruction_set="scalar") for _ in range(2)]
for _ in range(100):  # one may have ended before the other begins
    for kernel in kernels:
        kernel.submit(0, case.row())
for kernel in kernels:
    kernel.close()
"""

PYTEST = """
import ctypes, sys, pytest
code = pytest.main(sys.argv[1:])
ctypes.CDLL(None).__lsan_do_recoverable_leak_check()
sys.exit(code)
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
    """Arguments of pytest."""
    left_out: str
    """What `tests` leaves out, and why."""
    prefix: list[str] = field(default_factory=list)
    pytest: list[str] = field(default_factory=lambda: ["-m", "pytest"])


KINDS = {
    "address": Kind(
        # The C++ library too: the sanitizer looks for its functions when the process starts.
        libraries=["libasan.so", "libstdc++.so.6"],
        options={
            # Leaks are looked for once, after the tests: a report as each child ends would change its exit status.
            # Not stacks after a return: where GCC moves frames away for that, it aligns them to 32 bytes even if they
            # hold 64-byte vectors (its bug 110027), and AVX-512 code faults.
            "ASAN_OPTIONS": "detect_leaks=1:leak_check_at_exit=0:detect_stack_use_after_return=0:handle_abort=2:"
            "log_path={log}",
            # This one writes to standard error: its log_path sets the other one's, whose function is found first.
            # It ends by an abort, as the C++ library's assertions do, which the other one reports with a stack.
            "UBSAN_OPTIONS": "abort_on_error=1:log_path={log}",
            # Python's small objects as blocks of the C library's, which the sanitizer guards.
            "PYTHONMALLOC": "malloc",
        },
        controls={"heap-buffer-overflow": OVERRUN, "misaligned address": MISALIGNED},
        tests=["tests/kernels", "tests/tiers", "--ignore-glob=*test_gpu*.py", f"--deselect={LITTLE_ROOM}"],
        left_out="test_gpu.py and test_gpu_code.py, which run no native code; "
        f"{LITTLE_ROOM}, as the sanitizer needs address space; all but tests/kernels and tests/tiers",
        pytest=["-c", PYTEST],
    ),
    "thread": Kind(
        libraries=["libtsan.so"],
        options={
            # Some tests fork from processes with threads, and their children start threads.
            "TSAN_OPTIONS": "die_after_fork=0:second_deadlock_stack=1:log_path={log}",
        },
        controls={"data race": RACE},
        tests=[
            "tests/kernels/test_update_pool.py",
            "tests/kernels/test_update_kernel.py::test_threads_change_nothing",
            "tests/kernels/test_gradient_blocks.py::test_threads_change_nothing",
            "tests/kernels/test_add.py",
            "tests/tiers/test_io_backends.py",
            "tests/tiers/test_file_tier.py",
            "tests/e2e/test_optimizer.py",
            "tests/e2e/test_checkpoint.py",
            "tests/e2e/test_lifetime.py",
        ],
        left_out="numbers, which one thread computes as well as many; tiers without native threads; longer sessions",
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
    own = {"LD_PRELOAD": preload, "PYTHONPATH": str(ROOT / "tests" / "kernels")}
    # torch's pool of threads is not instrumented, so that its work looks unordered; and it spins while it waits.
    return {**os.environ, **options, **own, "OMP_NUM_THREADS": "1"}


def reports(log: Path) -> dict[Path, str]:
    """What was reported, by file; of leaks, those of the module: the interpreter and torch lose blocks too."""
    found = {}
    for path in sorted(log.parent.glob(log.name + ".*")):
        text = path.read_text(errors="replace")
        if "ERROR: LeakSanitizer" in text:
            leaks = (part for part in text.split("\n\n") if " leak of " in part)
            text = "\n\n".join(part for part in leaks if "/csrc/" in part or "_native." in part)
        if text:
            found[path] = text
    return found


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
        found = "".join(reports(log).values())
        if not found or name not in found + done.stderr or done.returncode == 0:
            print(done.stdout, done.stderr, found, sep="\n")
            say(f"a planted mistake was not reported: {name}")
            return 1
        for path in reports(log):
            path.unlink()
    say(f"reported, as they should be: {', '.join(kind.controls)}")

    if not arguments.pytest:
        say(f"left out: {kind.left_out}")
    log = logs / "report"
    command = [*kind.prefix, python, *kind.pytest, "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    # What native code writes to standard error is seen at once, and not lost if it ends the process.
    command += ["--capture=sys", "-o", "timeout=900", "-m", "not full and not gpu", *(arguments.pytest or kind.tests)]
    done = subprocess.run(command, env=environment(kind, log), cwd=ROOT)
    found = reports(log)
    for text in found.values():
        print(text, flush=True)
    said = f"{len(found)} processes reported, to {logs}" if found else "no reports"
    say(f"{said}; pytest ended with {done.returncode}")
    return 1 if found else done.returncode


if __name__ == "__main__":
    sys.exit(main())
