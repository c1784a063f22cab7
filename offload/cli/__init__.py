"""The `offload` command: one subcommand a module, imported only when it runs.

Exit status: 0 done, 1 failed (or a comparison found a difference), 2 bad input, 130 interrupted, 141 the reader of
stdout is gone (128 and the signal's number, as shells have it).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from offload.cli import bench, check_run, export, fetch, gc, machine, plan, probe, report, settings, trace, verify
from offload.cli.values import Parser, one_line
from offload.errors import ConfigError, InternalError, OffloadError, PlanError

_COMMANDS = {
    "plan": plan,
    "train": settings,
    "check-run": check_run,
    "probe": probe,
    "machine": machine,
    "verify": verify,
    "fetch": fetch,
    "export": export,
    "gc": gc,
    "trace": trace,
    "report": report,
    "bench": bench,
}
"""The module of each subcommand: its `add_parser` declares the options, its `run` returns the exit status."""


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with a parser of its own for each subcommand.

    Parsed arguments have `refuse`, the `error` function of the subcommand's parser: its message names the subcommand.
    """
    parser = Parser(
        prog="offload",
        description="Trains models whose optimizer state does not fit in memory, without changing the numbers.",
        epilog="Begin with `offload plan --help`: does it fit, and which lines go into your script? `offload COMMAND "
        "--help` says what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"offload {version('offload')}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for module in _COMMANDS.values():
        module.add_parser(commands)
    for command in commands.choices.values():
        command.set_defaults(refuse=command.error)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; those of the process if None.

    Returns:
        The exit status.
    """
    parser = _parser()
    # argparse fills this object as it parses. If reading a value raises, it has the subcommand's name by then, which
    # the error message needs; None if parsing has not come so far.
    arguments = argparse.Namespace(command=None)
    # Idle threads of torch's pool spin by default, which starves the engine's own threads (and whatever else
    # runs here) of cores: forward and backward take twice as long beside one busy thread. Sleeping costs nothing
    # measurable at the size of these operations. Read once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _, unknown = parser.parse_known_args(argv, arguments)
        # Unknown options are refused by the subcommand's parser, whose `--help` lists the known ones. Without a
        # subcommand there is no `refuse`.
        if unknown:
            getattr(arguments, "refuse", parser.error)(f"unrecognized arguments: {' '.join(unknown)}")
        if arguments.command is None:
            parser.print_help()
            return 2
        return int(_COMMANDS[arguments.command].run(arguments))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit would fail, too
        return 141
    except KeyboardInterrupt:
        print("offload: interrupted", file=sys.stderr)
        return 130
    except InternalError:
        raise  # Our bug: the traceback is what a report needs.
    except OSError as error:  # of a path that the system does not let us look at
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)!r}: "
        print(f"offload {arguments.command}: {one_line(where + (error.strerror or str(error)))}", file=sys.stderr)
        return 1
    except OffloadError as error:
        print(f"offload {arguments.command}: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | PlanError) else 1
