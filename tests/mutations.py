"""Makes small random mistakes in the product, and says which share of them the tests find.

`cd tests && ../.venv/bin/python -m mutations --seed 35 --count 200` compares tests before and after a rewrite. A seed
draws the same mistakes as long as the sources are the same, and a smaller count draws the first of them. A mistake is
found if a test fails or does not end. Mistakes that change nothing are drawn like all others.

Mistakes are made in functions of `FILES`, in a file as often as it has lines. They spare texts, types, log calls,
`__repr__`, and no `invariant` is left out. Tests run on a copy of the tree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import importlib.util
import io
import itertools
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
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("offload/schedule/*.py", "offload/session/*.py")
LEFT_OUT = (".*", "__pycache__", "runs", "shared")


def within(file: str, *tests: str) -> tuple[str, ...]:
    """Return some tests of a file."""
    return tuple(f"tests/{file}::test_{test}" for test in tests)


def without(file: str, *tests: str) -> tuple[str, ...]:
    """Return a file's tests, but for those that take long."""
    return (f"tests/{file}", *(f"--deselect={test}" for test in within(file, *tests)))


MACHINE = (
    "tests/unit/test_machine.py",
    "tests/unit/test_slot_index.py",
    "tests/sim/test_replay.py",
    *within(
        "sim/test_driver.py",
        "what_comes_out_is_right_whatever_happens[sweeps-0]",
        "a_crash_at_every_event_leaves_a_whole_checkpoint[1.0]",
        "a_seed_is_a_run[calls]",
        "a_crash_at_every_event_of_backward_passes[116]",
    ),
    "tests/sim/test_recording.py",
)
SESSION = (
    *without(
        "faults/test_session_faults.py",
        "ctrl_c_leaves_whole_state",
        "a_killed_process_disturbs_nobody",
        "a_failed_write_goes_to_another_path",
        "a_bit_that_flips_on_a_path_is_found_before_it_is_used",
        "damage_done_by_a_write_is_never_used",
    ),
    *within("test_programs.py", *(f"programs[{seed}]" for seed in range(40, 60))),
    *within(
        "e2e/test_overlap_backward.py",
        "what_is_hidden_can_be_seen",
        "memory_for_new_weights_is_part_of_the_plan_where_it_is_asked_for",
        "memory_for_new_weights_that_is_not_there",
    ),
    *within(
        "e2e/test_overlap_forward.py",
        "a_gradient_that_somebody_holds_is_read_before_step_returns",
        "hidden_weights_show_again_whoever_has_waited",
        "copies_of_hidden_weights_are_dropped_behind_those_who_read_them",
        "what_has_been_updated_is_known_at_once",
        "weights_are_loaded_while_a_step_goes_on",
        "an_optimizer_is_forgotten_while_its_step_goes_on",
        "a_failure_is_raised_by_whatever_comes_next",
    ),
    *without(
        "e2e/test_checkpoint.py",
        "resuming_copies_nothing_and_goes_on_in_the_same_stores",
        "updates_make_checksums_of_what_stays_in_memory_where_a_save_is_expected",
        "a_resume_elsewhere_reads_the_checkpoint_where_it_lies_until_it_saves",
    ),
    *without("e2e/test_placement_auto.py", "bits_do_not_depend_on_when_and_how_often_placement_changes"),
    "tests/e2e/test_metrics_and_traces.py",
    "tests/e2e/test_lifetime.py",
    *without(
        "e2e/test_optimizer_state.py",
        "usual_ways_to_reset_moments",
        "a_change_in_place_is_refused_once",
        "inference_mode_changes_nothing",
    ),
    *within(
        "e2e/test_gradients.py",
        "a_clip_holds_for_the_gradients_that_are_left",
        "only_what_has_changed_is_gathered_anew",
        "gradients_nobody_keeps_lie_in_their_slots",
    ),
    *within("e2e/test_state_dicts.py", "runs_are_copied_from_any_strides"),
    *within("e2e/test_one_state.py", "what_is_changed_after_a_load_counts"),
    *within("e2e/test_signal_handlers.py", "a_close_in_a_handler_that_asks_comes_after_what_it_has_interrupted"),
)
STAGES = {"offload/schedule/*": (*MACHINE, *SESSION), "*": SESSION}
"""The tests of a file, those of the first pattern that it matches; what is cheap runs first."""
TEST_S = 60
"""A test that takes longer hangs, on a busy machine, too."""
NAMED = re.compile(r"^(?:FAILED |ERROR )?(tests/\S+\.py(?:::.+?)?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|- ).*)?$", re.M)

PAIRS = {"<": "<=", ">": ">=", "==": "!=", "is": "is not", "in": "not in", "and": "or", "+": "-"}
PAIRS |= {"break": "continue", "True": "False"}
OTHER = PAIRS | {other: word for word, other in PAIRS.items()}


@dataclass(frozen=True)
class Mutation:
    """One mistake: what stands from `start` to `end` in a file becomes `text`."""

    file: str
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        """Return a file's content with the mistake."""
        return source[: self.start] + self.text + source[self.end :]

    def described(self, source: str) -> tuple[str, str, str]:
        """Return where the mistake is, and its lines before and after."""
        first, last = source.rfind("\n", 0, self.start) + 1, source.index("\n", self.end)
        before, after = source[first:last], source[first : self.start] + self.text + source[self.end : last]
        return f"{self.file}:{source[:first].count(chr(10)) + 1}", " ".join(before.split()), " ".join(after.split())


class Source:
    """A file, and the mistakes that can be made in it."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text
        self._lines = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        kinds = (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING)
        self._words = [(self._lines[t.start[0] - 1] + t.start[1], t.string) for t in tokens if t.type in kinds]

    def mutations(self) -> list[Mutation]:
        """Return all mistakes, in the order in which they stand in the file."""
        functions = [f for f in ast.walk(ast.parse(self._text)) if isinstance(f, ast.FunctionDef)]
        parts = (part for function in functions if function.name != "__repr__" for part in function.body)
        found = {mutation for part in parts for mutation in self._of(part)}
        return sorted(found, key=lambda mutation: (mutation.start, mutation.end, mutation.text))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        def at(line: int, nbytes: int) -> int:
            start, end = self._lines[line - 1 : line + 1]
            return start + len(self._text[start:end].encode()[:nbytes].decode())

        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def _between(self, left: ast.expr, right: ast.expr) -> Iterator[Mutation]:
        """Yield the exchange of the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        words = [word for word in self._words if start <= word[0] < end and word[1] not in "()"]
        operator = " ".join(text for _, text in words)
        if operator in OTHER:
            yield Mutation(self._file, words[0][0], words[-1][0] + len(words[-1][1]), OTHER[operator])

    def _of(self, node: ast.AST) -> Iterator[Mutation]:
        """Yield the mistakes in a part of a function."""
        children = list(ast.iter_child_nodes(node))
        text: str | None = None  # instead of the whole node
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.Raise() | ast.JoinedStr():
                return  # functions in here are found by themselves
            case ast.Call(ast.Attribute(ast.Name("log"))):
                return
            case ast.Call(ast.Name("invariant" | "known")):
                children = node.args[:1]
            case ast.Call():
                for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                    if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                        yield Mutation(self._file, *self._span(value), OTHER[str(value.value)])
            case ast.Compare():
                for left, right in itertools.pairwise([node.left, *node.comparators]):
                    yield from self._between(left, right)
            case ast.BoolOp():
                for left, right in itertools.pairwise(node.values):
                    yield from self._between(left, right)
            case ast.BinOp():
                yield from self._between(node.left, node.right)
            case ast.UnaryOp(ast.Not()):
                start = self._span(node)[0]
                yield Mutation(self._file, start, next(word[0] for word in self._words if word[0] > start), "")
            case ast.Constant(int(number)) if not isinstance(number, bool):
                text = str(1 - number if number in (0, 1) else number + 1)
            case ast.Break() | ast.Continue():
                text = OTHER[type(node).__name__.lower()]
            case ast.Expr(ast.Call(called)) if not re.match(r"(invariant|log\.\w+)$", ast.unparse(called)):
                text = "pass"
            case ast.AugAssign():
                text = "pass"
            case ast.Assign(targets=[target]) if is_attribute(target):
                text = "pass"
            case ast.AnnAssign(target=target):
                children = [child for child in children if child is not node.annotation]
                text = "pass" if node.value is not None and is_attribute(target) else None
        if text is not None:
            yield Mutation(self._file, *self._span(node), text)
        for test in (*getattr(node, "ifs", ()), getattr(node, "test", None)):
            if test is not None and not isinstance(test, ast.Compare | ast.UnaryOp):  # which are turned round already
                start, end = self._span(test)
                yield Mutation(self._file, start, end, f"not ({self._text[start:end]})")
        for child in children:
            yield from self._of(child)


def is_attribute(target: ast.expr) -> bool:
    """Return whether what is assigned to is an attribute, several, or items of one."""
    if isinstance(target, ast.Tuple):
        return all(map(is_attribute, target.elts))
    return isinstance(target, ast.Attribute) or (isinstance(target, ast.Subscript) and is_attribute(target.value))


def drawn(seed: int, globs: Sequence[str] = ("*",)) -> Iterator[tuple[Mutation, str]]:
    """Yield the mistakes that a seed draws, each once, with the content of its file."""
    paths = {path.relative_to(ROOT).as_posix(): path for pattern in FILES for path in sorted(ROOT.glob(pattern))}
    texts = {file: path.read_text() for file, path in paths.items() if any(fnmatch.fnmatch(file, g) for g in globs)}
    left = {file: Source(file, text).mutations() for file, text in texts.items()}
    dice = random.Random(seed)
    while files := [file for file, mutations in left.items() if mutations]:
        file = dice.choices(files, [texts[file].count("\n") for file in files])[0]
        yield left[file].pop(dice.randrange(len(left[file]))), texts[file]


class Copy:
    """A copy of the tree, whose tests import the package from there.

    Args:
        folder: Where it is made. It belongs to the caller.
    """

    def __init__(self, folder: Path) -> None:
        self.tree, self._temporary = folder / "tree", folder / "tmp"
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        shutil.copy2(importlib.util.find_spec("offload._native").origin, self.tree / "offload")
        (self.tree / "offload/integrations").symlink_to("../integrations")
        # The finder of an editable install comes before PYTHONPATH.
        finders = "[f for f in sys.meta_path if not type(f).__module__.startswith('_editable_')]"
        (self.tree / "sitecustomize.py").write_text(f"import sys\nsys.meta_path[:] = {finders}\n")
        self._environment = {**os.environ, "PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1"}
        self._environment["TMPDIR"] = str(self._temporary)
        command = [sys.executable, "-c", "import offload; print(offload.__file__)"]
        found = subprocess.run(command, cwd=folder, env=self._environment, check=True, capture_output=True, text=True)
        if not Path(found.stdout.strip()).is_relative_to(self.tree):
            raise RuntimeError(f"tests would import {found.stdout.strip()}, not what is in {self.tree}")

    @contextlib.contextmanager
    def mistaken(self, mutation: Mutation) -> Iterator[None]:
        """Have a mistake in the copy as long as the context lasts; bytecode from before and after stays valid."""
        path = self.tree / mutation.file
        source, times = path.read_bytes(), path.stat()
        self._environment["PYTHONDONTWRITEBYTECODE"] = "1"
        try:
            path.write_text(mutation.applied(source.decode()))
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            del self._environment["PYTHONDONTWRITEBYTECODE"]

    def failing(self, tests: Sequence[str], limit_s: float | None = None) -> str | None:
        """Run tests until one fails, or until a limit; return the last one that ran, or None if all pass."""
        command = [sys.executable, "-m", "pytest", "-xv", "-p", "no:cacheprovider", "-m", "not full and not gpu"]
        if limit_s is not None:  # else something may have to be built first
            command += ["-o", f"timeout={TEST_S}"]
        command += tests
        self._temporary.mkdir()
        with tempfile.TemporaryFile("w+") as output:
            ways = {"cwd": self.tree, "env": self._environment, "stdout": output, "stderr": output}
            process = subprocess.Popen(command, start_new_session=True, **ways)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(limit_s)
            finally:
                with contextlib.suppress(ProcessLookupError):  # all have ended
                    os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
                shutil.rmtree(self._temporary, ignore_errors=True)
            output.seek(0)
            said = output.read()
        if code == 0:
            return None
        hangs = code == -signal.SIGKILL or re.search(r"^(E +Failed: )?Timeout[ (]", said, re.MULTILINE)
        return (NAMED.findall(said) or ["no test has begun"])[-1] + (" hangs" if hangs else "")


def main() -> None:
    """Make the mistakes that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further mistake after these")
    parser.add_argument("--files", nargs="+", default=["*"], metavar="GLOB", help=f"of {' and '.join(FILES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there, as it goes")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    limits: dict[str, float] = {}
    done: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder:
        copy = Copy(Path(folder).resolve())
        for pattern, tests in STAGES.items():
            begun = time.monotonic()
            if failing := copy.failing(tests):
                sys.exit(f"{failing} fails without a mistake")
            limits[pattern] = 60 + 3 * (time.monotonic() - begun)
            print(f"{pattern}: {time.monotonic() - begun:.0f} s without a mistake", flush=True)
        end = time.monotonic() + 60 * asked.minutes
        for mutation, source in itertools.islice(drawn(asked.seed, asked.files), asked.count):
            if (begun := time.monotonic()) > end:
                break
            stage = next(pattern for pattern in STAGES if fnmatch.fnmatch(mutation.file, pattern))
            with copy.mistaken(mutation):
                failing = copy.failing(STAGES[stage], limits[stage])
            place, before, after = mutation.described(source)
            took_s = round(time.monotonic() - begun, 1)
            done.append({"place": place, "before": before, "after": after, "found_by": failing, "took_s": took_s})
            print(f"{place}: {before} -> {after}\n    {failing or 'SURVIVED'} ({took_s} s)", flush=True)
            if asked.json:
                asked.json.write_text(json.dumps({"seed": asked.seed, "mutations": done}, indent=1) + "\n")
    found = sum(mutation["found_by"] is not None for mutation in done)
    print(f"{found} of {len(done)} found ({found / max(len(done), 1):.1%})")


if __name__ == "__main__":
    main()
