"""Runs tests that are marked `late` in processes of their own, on the test accelerator.

A process that has the device "late" is another: it has an accelerator, and threads that none may fork. So pytest's
processes never load it. A test with the mark is run by a second pytest, in a process forked from the one that has
imported torch (`prepared`); the device is loaded before its module is imported, and the second pytest's reports are
the test's. Fixtures, parameters and skips work as elsewhere; each test starts with a device that nobody has used.

Where the accelerator cannot be built such tests are skipped; with the variable OFFLOAD_NO_SKIPS they fail.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prepared
import pytest

from accelerator import build, late

REPORTS, NO_SKIPS = "LATE_REPORTS", "OFFLOAD_NO_SKIPS"
"""Variables: the file that a test's own process writes its reports to; whether a test that cannot run has failed."""
PASSED_ON = ("--overlap", "--ahead", "--hypothesis-profile")
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin", "no:cacheprovider")
"""All that a test's own pytest loads: importing others that happen to be installed takes half of its time."""


def pytest_configure(config: pytest.Config) -> None:
    if REPORTS in os.environ:
        late.load()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if REPORTS in os.environ:
        with Path(os.environ[REPORTS]).open("a") as file:
            file.write(json.dumps(report._to_json()) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if item.get_closest_marker("late") is None or REPORTS in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports: list[pytest.TestReport] = []
    ended = pytest.CallInfo.from_call(lambda: reports.extend(_run(item)), "call", reraise=(pytest.exit.Exception,))
    if ended.excinfo is not None:
        reports = [pytest.TestReport.from_item_and_call(item, ended)]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run(item: pytest.Item) -> Iterator[pytest.TestReport]:
    """Yield the reports of a test's setup, call and teardown; raise what stands for them where it has died."""
    config = item.config
    config.hook.pytest_timeout_cancel_timer(item=item)  # its own process has one
    try:
        build.library()
    except build.CannotBuild as error:
        end = pytest.fail if NO_SKIPS in os.environ else pytest.skip
        end(f"no test accelerator: {error}")
    folder = config._tmp_path_factory.mktemp("late", numbered=True)  # type: ignore[attr-defined]
    reports = folder / "reports"
    command = [prepared.python(), "-m", "pytest", item.nodeid, "-q"]
    command += [word for plugin in PLUGINS for word in ("-p", plugin)]
    command += [f"--rootdir={config.rootpath}", f"--basetemp={folder / 'tmp'}"]
    for option in PASSED_ON:
        value = config.getoption(option, None)
        if value:
            command.append(option if value is True else f"{option}={value}")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(
        command,
        cwd=config.rootpath,
        env={**variables, REPORTS: str(reports), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=1.2 * _limit_s(item),
        check=False,
    )
    said = [json.loads(line) for line in reports.read_text().splitlines()] if reports.exists() else []
    if not said or said[-1]["when"] != "teardown":
        pytest.fail(f"its process ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}", pytrace=False)
    for each in said:
        yield pytest.TestReport._from_json(each)


def _limit_s(item: pytest.Item) -> float:
    marker: Any = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))
