"""`python -m offload.integrations.deepspeed train.py ARGUMENT...`: the backend for scripts that cannot be edited.

    deepspeed --module offload.integrations.deepspeed train.py ARGUMENT...
    torchrun --nproc_per_node 8 -m offload.integrations.deepspeed train.py ARGUMENT...

`-m package.train` runs a module. The program sees what it would see without us: it is `__main__`, with its arguments,
its directory first on the path, its exit status and its tracebacks. DeepSpeed is imported when it does that.

`--config offload.json` before the script names a file of our object, for programs that write their DeepSpeed config
themselves. It sets the environment variable `OFFLOAD_DEEPSPEED_CONFIG`, which may be set in its place.

Not here: processes that the program starts anew (`multiprocessing` with "spawn"). They are programs of their own:
with the variable set, each has to import `offload.integrations.deepspeed` and no more.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from offload import ConfigError
from offload.integrations.deepspeed import settings
from offload.integrations.deepspeed.switch import enable_at_import

NAME = "offload.integrations.deepspeed"
USAGE = f"usage: python -m {NAME} [--config FILE] {{SCRIPT | -m MODULE}} [ARGUMENT...]"
OUR_FILES = (__file__, runpy.run_module.__code__.co_filename)


def _hide_our_frames() -> None:
    """Have the traceback of an uncaught error begin in the program, not in this launcher."""
    show = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """Show an error without the frames of this file and of `runpy` that its traceback begins with."""
        while trace is not None and trace.tb_frame.f_code.co_filename in OUR_FILES:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook


def _set_config(file: str) -> None:
    """Have this program and those that it starts use the object in a file; exit if it cannot be used."""
    try:
        settings.load(file)
    except ConfigError as error:
        print(f"{NAME}: {file}: {error}", file=sys.stderr)
        sys.exit(2)
    os.environ[settings.VARIABLE] = os.path.abspath(file)


def _run_script(path: str) -> None:
    """Run a script as Python would: as `__main__`, with its directory first on the path."""
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(path)
    try:
        with io.open_code(module.__file__) as file:
            source = file.read()
    except OSError as error:
        print(f"{NAME}: can't open file {module.__file__!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    if not sys.flags.safe_path:  # with `python -P` no directory is put on the path
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.modules["__main__"] = module
    _hide_our_frames()
    # `dont_inherit`: else this file's imports from `__future__` would hold for the script, too.
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)


def _run_module(name: str) -> None:
    """Run a module as `python -m` would."""
    try:
        exists = find_spec(name) is not None
    except ModuleNotFoundError as error:
        # `find_spec` imports the module's package. If that is there, and imports a module that is missing, the error
        # names that module, and goes on to the caller. Else it names the package, which is missing or is none.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        exists = False
    if not exists:
        print(f"{NAME}: No module named {name}", file=sys.stderr)
        sys.exit(1)  # Python's status for that; 2 is its status for a script that is not there
    _hide_our_frames()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module with the backend on.

    Args:
        arguments: What follows the launcher's name on the command line: options, the program's name, its arguments.

    Raises:
        SystemExit: It cannot be found (one line says so), or it exits.
    """
    remaining = list(arguments)
    rank_options = []
    # Launchers put their option first. The program gets it as the first of its own arguments, as it would without us.
    while remaining and remaining[0].startswith(("--local_rank=", "--local-rank=")):
        rank_options.append(remaining.pop(0))
    file = os.environ.get(settings.VARIABLE) or None  # empty counts as not set
    if remaining[:1] == ["--config"] and len(remaining) > 1:
        file = remaining[1]
        del remaining[:2]
    elif remaining and remaining[0].startswith("--config="):
        file = remaining.pop(0).partition("=")[2]
    run: Callable[[str], None] = _run_script
    if remaining[:1] == ["-m"]:
        run = _run_module
        del remaining[0]
    if not remaining or remaining[0].startswith("-"):
        asks_for_help = remaining[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if asks_for_help else sys.stderr)
        sys.exit(0 if asks_for_help else 2)
    sys.argv = [remaining[0], *rank_options, *remaining[1:]]
    if file is not None:
        _set_config(file)
    enable_at_import()
    run(remaining[0])


if __name__ == "__main__":
    main(sys.argv[1:])
