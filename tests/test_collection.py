"""What is tested where torch, Triton and pytest are, and nothing optional; what is said of tests elsewhere."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import prepared
import pytest
from _pytest.terminal import _folded_skips
from accelerator.processes import told

TESTS = Path(__file__).parent
OPTIONAL = ("accelerate", "aws", "botocore", "deepspeed", "matplotlib", "moto", "safetensors", "tqdm", "transformers")
COLLECT = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # importing one of them fails from now on
import inspect, pytest
class Gpu:  # all files are imported; items are made of those that speak of a GPU only
    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector):
        return None if "gpu" in inspect.getsource(collector.getparent(pytest.Module).obj).lower() else []
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], [Gpu()]))
"""


@pytest.mark.slow
def test_tests_for_a_gpu_are_collected_without_optional_packages() -> None:
    command = [sys.executable, "-c", COLLECT, "-m", "gpu", str(TESTS)]
    done = prepared.ran(command, cwd=TESTS.parent, timeout=240)
    count = re.search(r"(\d+)/\d+ tests collected", done.stdout)
    assert count is not None, done.stdout[-1000:]
    assert int(count[1]) > 100


def test_a_skip_in_another_process_is_summed_up_as_one_here(request: pytest.FixtureRequest) -> None:
    call = pytest.CallInfo.from_call(lambda: pytest.skip("for a reason"), "call")
    here = pytest.TestReport.from_item_and_call(request.node, call)
    there = told(json.loads(json.dumps(here._to_json())))
    ((count, _, _, why),) = _folded_skips(Path(), [here, there])
    assert (count, why) == (2, "Skipped: for a reason")
