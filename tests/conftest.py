"""Fixtures that several folders of tests share."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mounts
import prepared
import pytest
import torch
from hypothesis import HealthCheck, settings
from s3_server import CREDENTIALS, UNSET, FaultProxy, S3Server

# Parts of benchmarks that tests use, too; last, as one benchmark is called as the package is that it measures.
sys.path.append(str(Path(__file__).parents[1] / "bench"))

if not torch.cuda.is_available():  # read when Triton is first imported, which DeepSpeed's tests may do
    os.environ.setdefault("TRITON_INTERPRET", "1")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs; some tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ("accelerator.processes",)

# How long an example takes is the machine's affair. `make test` draws the same examples every time; `make test-full`
# looks for new ones, as a profile named on the command line is loaded after this one.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("new", derandomize=False, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)
    if prepared.FOLDER not in os.environ:  # no worker
        os.environ[prepared.FOLDER] = tempfile.mkdtemp(prefix="prepared-")
        os.environ[prepared.OWNER] = str(os.getpid())


def pytest_unconfigure(config: pytest.Config) -> None:
    if os.environ.get(prepared.OWNER) == str(os.getpid()):
        shutil.rmtree(os.environ.pop(prepared.FOLDER), ignore_errors=True)
        del os.environ[prepared.OWNER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Where its timeout's signal does not end a test, which then waits in native code or while it is torn down, its
    worker says where all threads are, and ends: the test fails by name, and others go on."""
    watch(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """pytest's own plugin has just cancelled what was watched."""
    if isinstance(node, pytest.Item):
        watch(node)


def watch(item: pytest.Item) -> None:
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(1.5 * limit_s, exit=True, file=item.config.stash[STDERR])


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Nothing that there is by now is looked at by a test's collections, of which each would take half a second."""
    if not gc.get_freeze_count():  # else tests have run already, whose leavings are to be found
        gc.collect()
        gc.freeze()


EXPECTED = pytest.StashKey[int]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    node.config.stash[EXPECTED] = len(ids)  # the same in every worker


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests have run of how many there were to run: a worker that ends early leaves some out."""
    if EXPECTED in config.stash:
        counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "skipped")}
        ran = counts["passed"] + counts["failed"]
        line = f"ran {ran:,} tests of {config.stash[EXPECTED]:,}; {counts['skipped']:,} skipped themselves"
        terminalreporter.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overlap", action="store_true", help="let every step go on behind, with all weights hidden")
    parser.addoption("--ahead", action="store_true", help="update during every backward pass what can be")


def parameters_of(optimizer: Any) -> set[torch.Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


class Everything:
    """A model of all parameters of an optimizer, whose forward pass waits for all of them."""

    model = None

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def check(self) -> bool:
        """Whether weights hold NaN meanwhile: not where the host writes to them in no order with lanes."""
        optimizer = self._optimizer()
        return optimizer is not None and getattr(optimizer._holder.device, "caller_is_host", True)

    @property
    def parameters(self) -> set[torch.Tensor]:
        optimizer = self._optimizer()
        return set() if optimizer is None else parameters_of(optimizer)

    def unhook(self) -> None:
        pass


@pytest.fixture(autouse=True)
def overlapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--overlap`, steps begin and are waited for in two calls."""
    if not request.config.getoption("--overlap"):
        return
    marker = request.node.get_closest_marker("not_overlapped")
    if marker is not None:
        pytest.skip(f"with --overlap: {marker.args[0]}")
    from offload.optim.optimizer import OffloadedOptimizer

    plain_init, plain_step = OffloadedOptimizer.__init__, OffloadedOptimizer.step

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        plain_init(self, *arguments, **options)
        self._overlap.models.append(Everything(self))

    def step(self: Any, closure: Any = None) -> Any:
        self._overlap.wait_for_use(parameters_of(self))
        try:
            loss = plain_step(self, closure)
            self.finish()
        except KeyboardInterrupt:
            self.finish()  # as the next forward pass would
            raise
        return loss

    monkeypatch.setattr(OffloadedOptimizer, "__init__", init)
    monkeypatch.setattr(OffloadedOptimizer, "step", step)


@pytest.fixture(autouse=True)
def made_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--ahead`, updates are made during every backward pass that can have them."""
    if not request.config.getoption("--ahead"):
        return
    marker = request.node.get_closest_marker("not_ahead")
    if marker is not None:
        pytest.skip(f"with --ahead: {marker.args[0]}")
    monkeypatch.setenv("AHEAD", "1")  # for checks in processes of their own
    from offload.optim.optimizer import OffloadedOptimizer

    plain_open = OffloadedOptimizer._open

    def opened(self: Any, config: Any) -> None:
        plain_open(self, config)
        if self._route.gets_final_gradients:
            self.engine.speculate(True)

    monkeypatch.setattr(OffloadedOptimizer, "_open", opened)


@pytest.fixture(scope="session", autouse=True)
def no_rates_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sessions start from a probe, whatever `offload probe` has left for this user.

    It is as short as can be, since no bit depends on what it finds; `unit/test_quick_probe.py` has whole ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("offload.measure.samples.QUICK_ROUNDS", 1)
        patch.setattr("offload.measure.trial.STEPS", 2)
        yield


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """`offload probe` updates as little as it can, not a gigabyte: what is measured is no test's affair."""
    monkeypatch.setattr("offload.measure.full.UPDATE_NUMEL", 0)


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    """One S3 server for all tests that leave it in order."""
    pytest.importorskip("moto", reason="moto is not installed")
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment with credentials for a test server and nothing of the user's."""
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def s3(s3_process: S3Server, aws: pytest.MonkeyPatch) -> S3Server:
    """The S3 server, which this process's clients use from now on."""
    aws.setenv("AWS_ENDPOINT_URL", s3_process.endpoint)
    return s3_process


@pytest.fixture
def proxy(s3: S3Server, aws: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the S3 server, which this process's clients use from now on."""
    made = FaultProxy(s3.port)
    aws.setenv("AWS_ENDPOINT_URL", made.endpoint)
    yield made
    made.close()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts small file systems: `mounted("tmpfs", "size=1m")`, `mounted("ext4", nbytes=...)`; needs root."""
    with contextlib.ExitStack() as stack:

        def mount(kind: str, *how: Any, **more: Any) -> Path:
            try:
                return stack.enter_context(mounts.mounted(kind, tmp_path, *how, **more))
            except OSError as cause:
                pytest.skip(str(cause))

        yield mount
