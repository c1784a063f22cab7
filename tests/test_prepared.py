"""What stands in for the interpreter does what the interpreter does."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import prepared
import pytest

SAYS = """
import json, os, sys, threading
print(json.dumps([__name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("SAID"), sys.stdin.read()]))
print("loaded" if "torch" in sys.modules else "nothing is loaded", file=sys.stderr)
if sys.argv[-1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
threading.Thread(target=lambda: print("at the end", flush=True)).start()
if sys.argv[-1] == "raise":
    raise ValueError("as asked")
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture(scope="module")
def python() -> str:
    found = prepared.python()
    if found == sys.executable:
        pytest.skip("there is a CUDA device")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", ["0", "3", "raise", "kill"])
@pytest.mark.parametrize("kind", ["file", "module", "code"])
def test_a_program_sees_and_says_what_it_does_elsewhere(kind: str, end: str, python: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SAYS)
    start = {"file": ["program.py"], "module": ["-m", "program"], "code": ["-c", SAYS]}[kind]
    variables = {**os.environ, **prepared.FORCED, "SAID": "a=b\nc"}
    ends = [
        subprocess.run(
            [executable, "-W", "ignore", *start, "--flag", end],
            cwd=tmp_path,
            env=variables,
            input="given",
            capture_output=True,
            text=True,
            check=False,
        )
        for executable in (sys.executable, python)
    ]
    assert ends[0].returncode == ends[1].returncode
    assert ends[0].stdout == ends[1].stdout
    assert ends[0].stderr.splitlines()[:1] == ["nothing is loaded"]
    assert ends[1].stderr.splitlines()[:1] == ["loaded"]
    said = [end.stderr.splitlines()[1:] for end in ends]
    if kind == "code" and sys.version_info >= (3, 13):  # its tracebacks have lines of `-c`, which was another
        said = [[line for line in lines if not line.startswith("    ")] for lines in said]
    assert said[0] == said[1]


SPAWNS = """
import multiprocessing, os, sys

def work(pipe, queue):
    queue.put(["torch" in sys.modules, __name__, os.environ["SAID"]])
    pipe.send(pipe.recv() + 1)
    sys.exit(5)

if __name__ == "__main__":
    for way in ("spawn", "forkserver"):
        context = multiprocessing.get_context(way)
        ours, theirs = context.Pipe()
        queue = context.Queue()
        process = context.Process(target=work, args=(theirs, queue))
        process.start()
        theirs.close()
        ours.send(1)
        print(queue.get(), ours.recv())
        process.join()
        print(process.exitcode)
"""


@pytest.mark.slow
def test_what_a_program_spawns_is_prepared_and_has_its_files(python: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SPAWNS)
    command = [python, "program.py"]
    environment = {**os.environ, **prepared.FORCED, "SAID": "this"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == 2 * ["[True, '__mp_main__', 'this'] 2", "5"]


@pytest.mark.slow
def test_a_program_dies_with_what_stands_in_for_it(python: str, tmp_path: Path) -> None:
    code = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    environment = {**os.environ, **prepared.FORCED}
    with subprocess.Popen([python, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        program = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        assert process.stdout.read() == ""  # nobody has it open
    assert select.select([program], [], [], 60.0)[0]  # it has ended
    os.close(program)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"OMP_NUM_THREADS": "2"}, {"PYTHONHASHSEED": "7"}])
def test_what_has_been_read_already_needs_an_interpreter(python: str, variables: dict[str, str]) -> None:
    code = "import json, os, sys; print(json.dumps([hash('a'), 'torch' in sys.modules]))"
    environment = {**os.environ, **prepared.FORCED, **variables}
    out = subprocess.run([python, "-c", code], env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert json.loads(out)[1] is False
