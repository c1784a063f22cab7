"""Runs tests that are marked `late` in processes of their own, on the test accelerator.

A process that has the device "late" is another: it has an accelerator, and threads that none may fork. So pytest's
processes never load it. A test with the mark is run by a second pytest, in a process forked from the one that has
imported torch (`prepared`); the device is loaded before its module is imported, and the second pytest's reports are
the test's. Fixtures, parameters and skips work as elsewhere; each test starts with a device that nobody has used.

Tests that are marked `late(shared=True)` run one after the other in one process, which the product runs in, too: its
table of backends has the device. Its streams take times that a test's name says. A test that fails ends that process,
and the next one gets another.

Where the accelerator cannot be built such tests are skipped; with the variable OFFLOAD_NO_SKIPS they fail.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import socket
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from skips import cannot_run

from accelerator import build, late

HERE = "LATE_HERE"
"""Variable of a process that has the device: the socket at which it is told of tests, and tells of them; or ""."""
MOST_US = 100
"""Most that a task waits before it begins, in a shared process."""
PASSED_ON = ("--overlap", "--ahead", "--hypothesis-profile")
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin", "no:cacheprovider")
"""All that a test's own pytest loads: importing others that happen to be installed takes half of its time."""


def pytest_configure(config: pytest.Config) -> None:
    if HERE in os.environ:
        late.load()
    if os.environ.get(HERE):
        late.tell_offload()


def pytest_unconfigure(config: pytest.Config) -> None:
    global _shared
    if _shared is not None:
        _shared.end()
        _shared = None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if os.environ.get(HERE):
        _said.append(report._to_json())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    marker = item.get_closest_marker("late")
    if marker is None or HERE in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports: list[pytest.TestReport] = []
    shared = marker.kwargs.get("shared", False)
    ended = pytest.CallInfo.from_call(
        lambda: reports.extend(_run(item, shared)), "call", reraise=(pytest.exit.Exception,)
    )
    if ended.excinfo is not None:
        reports = [pytest.TestReport.from_item_and_call(item, ended)]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)  # what the test before has left for this one
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run(item: pytest.Item, shared: bool) -> Iterator[pytest.TestReport]:
    """Yield the reports of a test's setup, call and teardown; raise what stands for them where it has died."""
    global _shared
    _prepare(item)
    process = _shared if shared and _shared is not None else _Process(item, shared)
    if shared:
        _shared = None
    said = process.run(item, shared)
    if shared and not any(report["outcome"] == "failed" for report in said):
        _shared = process
    else:
        process.end()
    yield from map(told, said)


def told(said: dict[str, Any]) -> pytest.TestReport:
    """Return the report that another process has written as JSON, in which where and why it skipped became a list."""
    report = pytest.TestReport._from_json(said)
    if isinstance(report.longrepr, list):
        report.longrepr = tuple(report.longrepr)
    return report


def _prepare(item: pytest.Item) -> None:
    """Build the device, or say that it cannot be; another process looks at the test's time, and building is none."""
    item.config.hook.pytest_timeout_cancel_timer(item=item)
    faulthandler.cancel_dump_traceback_later()
    needed()


def needed() -> None:
    """Build the device for a test, which cannot run where it cannot be built."""
    try:
        build.library()
    except build.CannotBuild as error:
        cannot_run(f"no test accelerator: {error}")


def _limit_s(item: pytest.Item) -> float:
    marker: Any = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


@pytest.fixture(autouse=HERE in os.environ)
def nothing_stays_registered() -> Iterator[None]:
    """Memory that is freed while it is registered fails those that get its addresses, much later."""
    before = late.registered()
    yield
    gc.collect()
    left = sorted({*late.registered()}.difference(before))
    assert not left, f"memory is still registered at {[hex(address) for address in left]}"


# -- A process with the device: where it is asked for


class _Process:
    """A process that has the device and runs tests as it is told.

    Args:
        item: The first of these.
        shared: Whether there are others.
    """

    def __init__(self, item: pytest.Item, shared: bool) -> None:
        folder: Path = item.config._tmp_path_factory.mktemp("late", numbered=True)
        self._log = (folder / "log").open("w+")
        command = [prepared.python(), "-m", "pytest", str(item.path) if shared else item.nodeid, "-q"]
        command += [word for plugin in PLUGINS for word in ("-p", plugin)]
        command += [f"--rootdir={item.config.rootpath}", f"--basetemp={folder / 'tmp'}"]
        for option in PASSED_ON:
            value = item.config.getoption(option, None)
            if value:
                command.append(option if value is True else f"{option}={value}")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{short}/socket")  # whose name has to be short
            listener.listen(1)
            self._process = subprocess.Popen(
                command,
                cwd=item.config.rootpath,
                env={**variables, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", HERE: f"{short}/socket"},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
            listener.settimeout(1)
            while True:
                try:
                    connection, _ = listener.accept()
                    break
                except TimeoutError:
                    if self._process.poll() is not None:
                        pytest.fail(self._how_it_ended(), pytrace=False)
        self._stream = connection.makefile("rw")
        self._connection = connection

    def run(self, item: pytest.Item, shared: bool) -> list[Any]:
        """Run a test and return its reports."""
        self._connection.settimeout(1.6 * _limit_s(item))  # it ends itself before
        try:
            self._stream.write(json.dumps([str(item.path), item.nodeid, shared]) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError as error:
            line = ""
            self._log.write(f"{error}\n")
        if not line:
            self.end()
            pytest.fail(self._how_it_ended(), pytrace=False)
        said: list[Any] = json.loads(line)
        return said

    def end(self) -> None:
        self._stream.close()
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _how_it_ended(self) -> str:
        self._log.seek(0)
        return f"its process ended with {self._process.wait()}\n{self._log.read()[-8000:]}"


_shared: _Process | None = None


# -- ... and where they run


_said: list[Any] = []


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not os.environ.get(HERE):
        return None
    items = {item.nodeid: item for item in session.items}
    collected = {str(item.path) for item in session.items}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[HERE])
        stream = connection.makefile("rw")
        for line in stream:
            path, nodeid, shared = json.loads(line)
            if path not in collected:
                collected.add(path)
                items.update((item.nodeid, item) for item in session.perform_collect([path]))
            late.delays(0, MOST_US * shared, zlib.crc32(nodeid.encode()))
            session.config.hook.pytest_runtest_protocol(item=items[nodeid], nextitem=None)
            if shared:
                _forget()
            stream.write(json.dumps(_said) + "\n")
            stream.flush()
            _said.clear()
    return True


def _forget() -> None:
    """Have nothing of a test's device be left for the next one."""
    late.delays()
    late.forget_errors()
    for index in range(torch.accelerator.device_count()):
        late.dawdle(torch.get_device_module("late").default_stream(index), False)
        torch.accelerator.synchronize(index)
