"""`python -m offload.integrations.deepspeed train.py ARGUMENT...`: the backend for scripts that cannot be edited.

    deepspeed --module offload.integrations.deepspeed train.py ARGUMENT...
    torchrun --nproc_per_node 8 -m offload.integrations.deepspeed train.py ARGUMENT...

`-m package.train` runs a module. The program sees what it would see without us: it is `__main__`, with its arguments,
its directory first on the path, its exit status and its tracebacks. DeepSpeed is imported when it does that.

Not here: processes that the program starts anew (`multiprocessing` with "spawn"). They are programs of their own.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from offload.integrations.deepspeed.switch import enable

NAME = "offload.integrations.deepspeed"
USAGE = f"usage: python -m {NAME} SCRIPT [ARGUMENT...]\n       python -m {NAME} -m MODULE [ARGUMENT...]"
OUR_FILES = (__file__, runpy.run_module.__code__.co_filename)


class _EnableAtImport(MetaPathFinder):
    """Switches the backend on when DeepSpeed has been imported, so that what a script sets before still counts."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "deepspeed":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((s for finder in others if (s := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                enable()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _hide_our_frames() -> None:
    """Let tracebacks begin where the program does."""
    show = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in OUR_FILES:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook


def _run_script(path: str) -> None:
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(path)
    try:
        with io.open_code(module.__file__) as file:
            source = file.read()
    except OSError as error:
        print(f"{NAME}: can't open file {module.__file__!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.modules["__main__"] = module
    _hide_our_frames()
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)


def _run_module(name: str) -> None:
    try:
        found = find_spec(name) is not None
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        found = False
    if not found:
        print(f"{NAME}: No module named {name}", file=sys.stderr)
        sys.exit(1)
    _hide_our_frames()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module with the backend on.

    Args:
        arguments: Its name and its own arguments, as on the command line.

    Raises:
        SystemExit: It cannot be found (one line says so), or it exits.
    """
    rest = list(arguments)
    ranks = []
    while rest and rest[0].startswith(("--local_rank=", "--local-rank=")):  # launchers put theirs first
        ranks.append(rest.pop(0))
    run: Callable[[str], None] = _run_script
    if rest[:1] == ["-m"]:
        run = _run_module
        del rest[0]
    if not rest or rest[0].startswith("-"):
        wanted = rest[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if wanted else sys.stderr)
        sys.exit(0 if wanted else 2)
    sys.argv = [rest[0], *ranks, *rest[1:]]
    if "deepspeed" in sys.modules:  # a site's own start-up file may do that
        enable()
    sys.meta_path.insert(0, _EnableAtImport())
    run(rest[0])


if __name__ == "__main__":
    main(sys.argv[1:])
