"""Python programs in processes that have imported large packages already: `python()` is used as `sys.executable` is.

Importing torch takes 3 seconds of a core, Lightning or Transformers' Trainer 10, and most programs that tests start
compute for less than one. So the first test that asks for it starts a server for the whole run, which imports these
packages, has one thread, and forks for each program. What stands in for the interpreter sends it arguments,
environment, folder and the files that it was given, and ends as the program ends; killing it kills the program.
Programs have that stand-in as their `sys.executable`, so launchers start ranks with it, too, and so does
`multiprocessing` what it spawns. The server has not imported `offload`.

What differs from a fresh interpreter: the hash seed is the same in all programs, the stand-in's process id is not the
program's, what the server has imported is there even where a program forgets to import it, and is not taken apart at
the end, which would take many times as long as the fork. So programs that do what users' do are started by
`sys.executable` in one test at least, too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:  # stand-ins import little, as many of them are started
    import subprocess
    from collections.abc import Collection, Mapping, Sequence
    from types import TracebackType
    from typing import Any, NoReturn

FOLDER, OWNER = "PREPARED_FOLDER", "PREPARED_OWNER"
"""Variables of pytest's first process: where the server's socket is, and the process that it lives as long as."""
PACKAGES = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "accelerate", "transformers.trainer")
PACKAGES += ("transformers.models.llama.modeling_llama", "deepspeed", "lightning.pytorch", "hypothesis", "pytest")
PACKAGES += ("deepspeed.runtime.zero.muon.muon_optimizer",)  # every engine imports it, and torch's compiler with it
READ_EARLY = ("OMP_", "MKL_", "OPENBLAS_", "LD_", "TRITON_", "PYTHON")
"""How variables begin that are read when packages are imported or an interpreter starts; CUDA is not there."""
ANY = ("PYTHONPATH", "PYTHONWARNINGS", "OMP_WAIT_POLICY")
"""Those whose values may differ from the server's: path and warnings are changed, and of one thread none waits."""
FORCED = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
TRACKER = "from multiprocessing.resource_tracker import"
"""How the code begins that tracks `multiprocessing`'s resources."""
MOST_FILES = 250
"""That can be sent at once."""


def read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in environment if name.startswith(READ_EARLY) and name not in ANY}


def ran(command: Sequence[str | Path], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which has to be a good one; return what it has said."""
    import subprocess

    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-20000:]
    return done


def torchrun(ranks: int) -> tuple[str, ...]:
    """Return what an interpreter is given before a program that so many ranks run.

    The launcher holds the port at which they meet: one that a test finds free may be taken when they use it.
    """
    return "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)


def python() -> str:
    """Return the path of what runs Python programs in prepared processes.

    That is the interpreter itself where there is a CUDA device, which no fork can use after its parent has.
    """
    import fcntl
    import subprocess

    import torch

    if torch.cuda.is_available() or FOLDER not in os.environ:
        return sys.executable
    folder = Path(os.environ[FOLDER])
    stand_in = folder / "bin" / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stand_in.exists():
            environment = {**os.environ, **FORCED}
            with socket.socket(socket.AF_UNIX) as listener, (folder / "log").open("w") as log:
                listener.bind(str(folder / "socket"))
                listener.listen(64)
                arguments = [sys.executable, __file__, str(listener.fileno()), os.environ[OWNER], str(stand_in)]
                streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": log}
                subprocess.Popen(arguments, env=environment, pass_fds=[listener.fileno()], **streams)
            lines = [f"#!{sys.executable} -IS", "import sys", f"sys.path.append({str(Path(__file__).parent)!r})"]
            lines += ["import prepared", f"prepared.stand_in({str(folder)!r}, {sys.executable!r}, "]
            stand_in.parent.mkdir()
            for command in Path(sys.executable).parent.iterdir():  # programs look for others beside their interpreter
                if not command.name.startswith("python"):
                    (stand_in.parent / command.name).symlink_to(command)
            written = folder / "written"
            written.write_text("\n".join(lines) + f"{read_early(environment)!r})\n")
            written.chmod(0o755)
            written.rename(stand_in)
    return str(stand_in)


def split(arguments: list[str]) -> tuple[set[str], list[str]] | None:
    """Return options, and the program with its arguments; None if it is for an interpreter alone.

    That is what tracks `multiprocessing`'s resources, too: it imports nothing large, and outlives whoever starts it.
    """
    options, rest = set(), [*arguments]
    while rest and (rest[0] in ("-u", "-B") or rest[:2] == ["-W", "ignore"]):  # -B: as the server was started
        options.add(rest[0])
        del rest[: 2 if rest[0] == "-W" else 1]
    known = bool(rest) and (not rest[0].startswith("-") or (rest[0] in ("-m", "-c") and len(rest) > 1))
    return (options, rest) if known and not rest[-1].startswith(TRACKER) else None


def inherited() -> list[int]:
    """Return the files that this process was started with, by number; 0, 1 and 2 are among them.

    `multiprocessing` hands over more than these, under their numbers.
    """
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            if os.get_inheritable(number):  # what Python opens itself is not
                found.append(number)
        except OSError:  # of the listing
            pass
    return found


def stand_in(folder: str, interpreter: str, early: dict[str, str]) -> NoReturn:
    """Run a program as an interpreter does, in a process that the server makes."""
    arguments = sys.argv[1:]
    if split(arguments) is None or read_early(os.environ) != early:
        os.execv(interpreter, [interpreter, *arguments])
    files = inherited()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{folder}/socket")
        variables = [name + b"=" + value for name, value in os.environb.items()]
        numbers, count = " ".join(map(str, files)).encode(), str(len(arguments)).encode()
        request = b"\0".join([numbers, os.getcwdb(), count, *map(os.fsencode, arguments), *variables])
        socket.send_fds(server, [len(request).to_bytes(8, "big")], files)
        server.sendall(request)
        answer = server.recv(4)
    if len(answer) < 4:
        sys.exit(f"the prepared process is gone: {folder}/log")
    status = int.from_bytes(answer, "big")
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def serve(listener: socket.socket, owner: int) -> bytes:
    """Fork for each request until the owner has ended; return in the fork, with what has been asked for."""
    import contextlib
    import fcntl
    import select

    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    owners = os.pidfd_open(owner)
    waiting.register(owners, select.POLLIN)
    while True:
        if any(number == owners for number, _ in waiting.poll()):
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    listener.close()
    os.close(owners)
    size, files, *_ = socket.recv_fds(connection, 8, MOST_FILES)
    with connection.makefile("rb") as stream:
        request = stream.read(int.from_bytes(size, "big"))
    program = os.fork()
    if program:
        watch(connection, program, files)
    connection.close()
    numbers = [int(number) for number in request.partition(b"\0")[0].split()]
    for place, file in enumerate(files):  # out of the way of these numbers
        files[place] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, numbers[-1] + 1)
        os.close(file)
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    return request


def watch(connection: socket.socket, program: int, files: list[int]) -> NoReturn:
    """Say how a program has ended; kill it if nobody waits for it any more."""
    import select

    for file in files:
        os.close(file)
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    waiting.register(os.pidfd_open(program), select.POLLIN)
    if any(number == connection.fileno() for number, _ in waiting.poll()):
        os.kill(program, signal.SIGKILL)
    status = os.waitpid(program, 0)[1]
    try:
        connection.sendall(status.to_bytes(4, "big"))
    finally:
        os._exit(0)


def say_what_ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As an interpreter does, which is none of a program's frames."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def leave_alone(names: Collection[str]) -> None:
    """Have no package taken apart that was there before the program: that touches, and so copies, all its memory.

    Called last of what Python does at exit. The program's own modules and native libraries end as ever.
    """
    import ctypes

    kept = {name: sys.modules.pop(name, None) for name in names}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def run(request: bytes, stand_in: str) -> None:
    """Do what an interpreter does between its start and its end."""
    import multiprocessing
    import runpy
    import types
    import warnings

    _, cwd, count, *rest = map(os.fsdecode, request.split(b"\0"))
    os.chdir(cwd)
    found = split(rest[: int(count)])
    assert found is not None
    options, sys.argv = found
    os.environ.clear()
    os.environ.update(each.split("=", 1) for each in rest[int(count) :])
    sys.executable = stand_in
    multiprocessing.set_executable(stand_in)
    sys.excepthook = say_what_ended
    filters = os.environ.get("PYTHONWARNINGS", "").split(",") + ["ignore"] * ("-W" in options)
    warnings._processoptions(filter(None, filters))  # type: ignore[attr-defined]
    if "-u" in options:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    kind = sys.argv.pop(0) if sys.argv[0] in ("-m", "-c") else ""
    first = {"-m": cwd, "-c": ""}.get(kind, os.path.dirname(os.path.abspath(sys.argv[0])))
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if kind == "-m":
        runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = os.path.abspath(sys.argv[0])
        exec(compile(Path(sys.argv[0]).read_bytes(), main.__file__, "exec"), main.__dict__)


if __name__ == "__main__":
    import atexit
    import contextlib
    import ctypes
    import gc
    import importlib

    for package in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads cannot be forked"
    standard = {*sys.stdlib_module_names, "__main__"}
    atexit.register(leave_alone, [name for name in sys.modules if name.partition(".")[0] not in standard])
    ctypes.CDLL(None).on_exit(ctypes.CDLL(None)._exit, None)  # before what these packages have asked for
    gc.collect()
    gc.freeze()  # nothing of this is looked at, and so copied, by a program's collections
    run(serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])), sys.argv[3])
