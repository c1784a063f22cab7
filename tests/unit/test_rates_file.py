"""Files of rates: what is written is read back, and what does not fit says why."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from offload.dtypes import DtypeCode
from offload.errors import ConfigError, OffloadError
from offload.formats import COMPACT8, COMPACT16, EXACT
from offload.layout import Parameter, build_layout
from offload.measure import Measurement, RatesFile, default_rates_file, load_rates, save_rates, session_rates
from offload.measure.rates_file import machine_facts, versions
from offload.plan import Budgets, GpuRates, PathBudget, PathRates, Rates, make_plan
from offload.predict import predict
from offload.tiers import parse_place

GB = 1e9

ALL_EXACT = {EXACT: 1}
"""What a session has: a parameter of each of these formats' state."""

BY_THREADS = {1: 10 * GB, 2: 18 * GB, 4: 30 * GB}


def made(*paths: Path, **changes: Any) -> RatesFile:
    """Return a file about this machine, each path half as fast as the one before."""
    rates = Rates(
        30 * GB,
        tuple(PathRates(4 * GB / 2**n, 2 * GB / 2**n, 1e-4, 1.5) for n in range(len(paths))),
        GpuRates(900 * GB, 50 * GB, 45 * GB, 80 << 30, 1.2),
        90 * GB,
    )
    known: dict[str, Any] = {
        "rates": rates,
        "cpu_bytes_per_s": {EXACT: BY_THREADS, COMPACT8: {4: 6 * GB}},
        "machine": machine_facts(),
        "versions": versions(),
        "paths": tuple(parse_place(str(path)).facts() for path in paths),
        "measurements": {"update/1 thread": Measurement(10 * GB, 0.05, 7, "bytes/s")},
        "warnings": ("a warning",),
        "created": "2026-01-31T12:00:00Z",
    }
    return RatesFile(**{**known, **changes})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = made(tmp_path)
    save_rates(tmp_path / "new" / "rates.json", written)
    file = str(tmp_path / "new" / "rates.json")
    assert load_rates(file) == dataclasses.replace(written, file=file)
    values = json.loads(Path(file).read_text())
    assert values["format"] == 2
    known = {"exact": {"1": 10 * GB, "2": 18 * GB, "4": 30 * GB}, "compact8": {"4": 6 * GB}}
    assert values["rates"]["cpu_bytes_per_s"] == known
    assert values["paths"][0]["path"] == str(tmp_path)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rates.json"]


def test_plain_rates_are_enough_to_predict_with() -> None:
    rates = Rates(20 * GB, (PathRates(3 * GB, 2 * GB),))
    found = RatesFile.from_dict({"format": 1, "rates": rates.to_dict(), "source": "a data sheet"})
    assert found.rates == rates
    assert found.cpu_rate(ALL_EXACT, 3) == 20 * GB
    by_format = rates.to_dict() | {"cpu_bytes_per_s": {"compact16": 9 * GB, "exact": {"2": 20 * GB}}}
    found = RatesFile.from_dict({"format": 2, "rates": by_format})
    assert found.rates == rates
    assert found.cpu_rate({COMPACT16: 7}, 100) == 9 * GB
    assert RatesFile.from_dict(found.to_dict()) == found


def test_a_file_of_before_says_nothing_of_the_engine_or_of_transfers_side_by_side(tmp_path: Path) -> None:
    """It predicts what it did: nothing is taken for an operation, and a path serves one transfer after the other."""
    values = made(tmp_path).to_dict()
    for name in ("reaction_s", "operation_s", "begin_s"):
        del values["rates"][name]
    del values["rates"]["paths"][0]["at_once"]
    found = RatesFile.from_dict(values).rates
    assert (found.reaction_s, found.operation_s, found.begin_s) == (0.0, 0.0, 0.0)
    assert found.paths[0].at_once == 1
    layout = build_layout([Parameter("p", 20 << 16, DtypeCode.BFLOAT16, 0)], 1 << 16)
    plan = make_plan(layout, Budgets(0, 2 * layout.max_subgroup_bytes, (PathBudget("path", 1 << 40),)))
    size, path = layout.max_subgroup_bytes, found.paths[0]
    # Two slots, and an update that hardly counts: writes, one after the other, are as long as the step.
    tiles = len(layout.subgroups[0].tiles)
    write_s, read_s = (tiles * path.latency_s + size / rate.alone for rate in (path.write, path.read))
    prediction = predict(plan, dataclasses.replace(found, cpu_bytes_per_s=1e18, memory_bytes_per_s=math.inf))
    assert prediction.step_s == pytest.approx(18 * write_s + read_s, rel=1e-3)
    assert "engine" not in prediction.busy_s


def test_each_format_of_state_has_its_rate() -> None:
    found = made()
    assert found.cpu_rate({COMPACT8: 5}, 4) == 6 * GB
    assert found.cpu_rate({COMPACT8: 5}, 2) == 3 * GB
    # A parameter of each: 12 bytes at 30 GB/s, and 5 bytes and two for a block of 64 at 6 GB/s.
    both = found.cpu_rate({EXACT: 1, COMPACT8: 1})
    assert both == pytest.approx((12 + 5 + 2 / 64) / (12 / 30 + (5 + 2 / 64) / 6) * GB)
    assert found.guesses({EXACT: 1, COMPACT8: 1}) == ""


def test_a_format_that_was_not_measured_is_as_fast_as_exact_state_in_parameters() -> None:
    found = made()
    assert found.cpu_rate({COMPACT16: 5}, 2) == pytest.approx(18 * GB * 8 / 12)
    assert found.guesses({COMPACT16: 5, EXACT: 1}).startswith(
        "there are no rates of the update of compact16 state: taken as fast, in parameters, as that of exact state"
    )
    assert found.guesses({COMPACT16: 0, EXACT: 1}) == ""


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    save_rates(tmp_path / "rates.json", made())
    before = (tmp_path / "rates.json").read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        save_rates(tmp_path / "rates.json", made(machine={"cpu": math.nan}))
    (tmp_path / "folder").mkdir()
    with pytest.raises(OffloadError, match="folder cannot be written"):
        save_rates(tmp_path / "folder", made())
    with pytest.raises(OffloadError, match="cannot be written"):
        save_rates(tmp_path / "rates.json" / "below", made())
    assert (tmp_path / "rates.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "rates.json"]


def test_rates_that_were_measured_with_io_uring_are_those_of_threads(tmp_path: Path) -> None:
    facts = parse_place(str(tmp_path)).facts()
    save_rates(tmp_path / "old.json", made(tmp_path, paths=({**facts, "io": "io_uring"},)))
    save_rates(tmp_path / "new.json", made(tmp_path, paths=({**facts, "io": "threads"},)))
    old, new = (load_rates(str(tmp_path / f"{name}.json")) for name in ("old", "new"))
    assert old.paths[0]["io"] == "io_uring"
    assert old.misfit() == ""
    assert old.for_session([str(tmp_path)], 4, ALL_EXACT) == new.for_session([str(tmp_path)], 4, ALL_EXACT)


def test_threads_in_between_are_interpolated() -> None:
    found = made()
    assert [found.cpu_rate(ALL_EXACT, count) / GB for count in (1, 2, 3, 4, 9)] == pytest.approx([10, 18, 24, 30, 30])
    assert made(cpu_bytes_per_s={EXACT: {4: 30 * GB}}).cpu_rate(ALL_EXACT, 1) == pytest.approx(7.5 * GB)


def test_a_session_gets_its_own_paths_and_threads(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    other = Path("/proc")  # another file system, with other rates
    found = made(other, tmp_path)
    rates = found.for_session([str(tmp_path / "below")], 2, ALL_EXACT)
    assert rates.paths == found.rates.paths[1:]
    assert rates.cpu_bytes_per_s == pytest.approx(18 * GB)
    assert rates.memory_bytes_per_s == found.rates.memory_bytes_per_s
    assert found.for_session([str(tmp_path), str(other)], 4, ALL_EXACT).paths == found.rates.paths[::-1]


def test_a_path_that_was_not_measured_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rates for /proc") as caught:
        made(tmp_path).for_session(["/proc"], 1, ALL_EXACT)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ConfigError, match="only for no path"):
        made().for_session([str(tmp_path)], 1, ALL_EXACT)


def test_buckets_are_known_by_name_and_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one:9000")
    one = parse_place("s3://bucket/prefix").facts()
    assert one["device"] == parse_place("s3://bucket/other").facts()["device"]
    assert one["device"] != parse_place("s3://other/prefix").facts()["device"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://two:9000")
    assert one["device"] != parse_place("s3://bucket/prefix").facts()["device"]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("machine", "cpu", "another"),
        ("machine", "cores", 1000),
        ("machine", "memory_bytes", 1 << 20),
        ("machine", "gpu", "a GPU"),
        ("machine", "kernel", "1.2.13"),
        ("versions", "offload", "0.0.1"),
        ("versions", "torch", "1.0"),
    ],
)
def test_what_differs_from_this_machine_is_named(section: str, name: str, value: object) -> None:
    here = {"machine": machine_facts(), "versions": versions()}[section]
    found = made(**{section: {**here, name: value}}, file="node.json")
    with pytest.raises(ConfigError, match=rf"node\.json.*{section}\.{name} is .*{value}") as caught:
        found.for_session([], 1, ALL_EXACT)
    assert repr(here[name]) in str(caught.value)
    assert "offload probe" in str(caught.value)
    missing = {key: each for key, each in here.items() if key != name}
    if here[name] is not None:
        assert f"{section}.{name} is None" in made(**{section: missing}).misfit()


def test_the_kernel_may_keep_a_little_more_memory_for_itself() -> None:
    facts = machine_facts()
    facts["memory_bytes"] = int(facts["memory_bytes"] * 1.02)
    assert made(machine=facts).misfit() == ""


def broken(*keys: str | int, value: object) -> dict[str, Any]:
    """Return a file's content with one value replaced."""
    content: Any = json.loads(json.dumps(made(Path("/proc")).to_dict()))
    part = content
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    found: dict[str, Any] = content
    return found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ("{}", "format is None"),
        ('{"format": 3}', "format is 3 and this version reads 1 and 2"),
        ('{"format": 1}', "has no rates"),
        ('{"format": 1, "rates": 7}', "has no rates"),
        ('{"format": 1, "rates": {}}', r"rates\.cpu_bytes_per_s.*missing"),
        (broken("rates", "cpu_bytes_per_s", value={}), r"rates\.cpu_bytes_per_s"),
        (broken("rates", "cpu_bytes_per_s", value=None), r"rates\.cpu_bytes_per_s.*missing"),
        (broken("rates", "cpu_bytes_per_s", "exact", value={}), r"rates\.cpu_bytes_per_s"),
        (broken("rates", "cpu_bytes_per_s", value={"compact8": 1.0}), r"cpu_bytes_per_s\.exact.*missing"),
        (broken("rates", "cpu_bytes_per_s", "fp8", value=1.0), "fp8.*exact, compact16, compact8"),
        (broken("rates", "cpu_bytes_per_s", "compact8", value=-1.0), r"cpu_bytes_per_s: -1\.0 "),
        (broken("rates", "cpu_bytes_per_s", value={"two": 1.0}), "two.*number of threads"),
        (broken("rates", "cpu_bytes_per_s", value={"0": 1.0}), "number of threads"),
        (broken("rates", "cpu_bytes_per_s", "exact", "1", value=0), r"cpu_bytes_per_s: 0 .*greater than 0"),
        (
            broken("rates", "cpu_bytes_per_s", "exact", "1", value=1e-300),
            r"cpu_bytes_per_s: 1e-300 .*from 1e-09 to 1e\+24",
        ),
        (broken("rates", "cpu_bytes_per_s", "exact", "1", value=10**400), r"cpu_bytes_per_s: 1000"),
        (broken("rates", "cpu_bytes_per_s", "exact", "1", value=-5.0), r"cpu_bytes_per_s: -5\.0 "),
        (broken("rates", "cpu_bytes_per_s", "exact", "1", value=math.nan), "cpu_bytes_per_s: nan "),
        (broken("rates", "cpu_bytes_per_s", "exact", "1", value="fast"), "cpu_bytes_per_s: 'fast' "),
        (broken("rates", "memory_bytes_per_s", value=-1), "memory_bytes_per_s: -1 "),
        (broken("rates", "paths", 0, "read_bytes_per_s", value=0), r"rates\.paths\[0\]\.read_bytes_per_s: 0 "),
        (broken("rates", "paths", 0, "latency_s", value=math.inf), r"paths\[0\]\.latency_s: inf "),
        (broken("rates", "paths", 0, value={"read_bytes_per_s": 1}), r"write_bytes_per_s.*missing"),
        (broken("rates", "paths", 0, value=3), r"rates\.paths\[0\]: 3 "),
        (broken("rates", "gpu", "h2d_bytes_per_s", value=None), r"rates\.gpu\.h2d_bytes_per_s: None "),
        (broken("rates", "speed", value=1), r"rates\.speed: 1 .*unknown"),
        (broken("paths", value=[]), ""),
        (broken("paths", value=[{}, {}]), "paths: 2 .*1 paths"),
        (broken("paths", value="x"), "list of objects"),
        (broken("machine", value=[]), "machine"),
        (broken("measurements", value={"x": {"median": 1}}), r"measurements\.x"),
        (broken("warnings", value=[1]), "warnings"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: str | dict[str, Any], words: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    if not words:  # rates without names of paths are fine for predictions
        assert load_rates(file).paths == ()
        return
    with pytest.raises(ConfigError, match=words) as caught:
        load_rates(file)
    assert str(file) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.*No such file.*offload probe"):
        load_rates(tmp_path / "absent")
    with pytest.raises(ConfigError, match="directory"):
        load_rates(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not JSON"):
        load_rates(tmp_path / "bytes")


def test_auto_takes_this_machine_s_file_only_if_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level("INFO", "offload")
    assert session_rates("auto", [str(tmp_path)], 1, ALL_EXACT) is None
    file = default_rates_file()
    assert file.parent == tmp_path / "cache" / "offload"
    save_rates(file, made(tmp_path))
    assert session_rates("auto", [str(tmp_path)], 2, ALL_EXACT) == made(tmp_path).for_session(
        [str(tmp_path)], 2, ALL_EXACT
    )
    assert str(file) in caplog.text
    assert session_rates("auto", ["/proc"], 2, ALL_EXACT) is None
    assert "no rates for /proc" in caplog.text
    file.write_text("{")
    assert session_rates("auto", [], 1, ALL_EXACT) is None
    with pytest.raises(ConfigError, match="not JSON"):
        session_rates(str(file), [], 1, ALL_EXACT)


def test_machines_that_share_a_home_have_a_file_each(monkeypatch: pytest.MonkeyPatch) -> None:
    before = default_rates_file()
    facts = {**machine_facts(), "cpu": "another"}
    monkeypatch.setattr("offload.measure.rates_file.machine_facts", lambda: facts)
    assert default_rates_file() != before
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_rates_file().parent == Path("/home/somebody/.cache/offload")


def test_a_link_without_rates_of_one_direction_alone_has_the_same() -> None:
    """As files of earlier versions; nothing in a plan changes by that."""
    gpu = {"update_bytes_per_s": 900 * GB, "h2d_bytes_per_s": 25 * GB, "d2h_bytes_per_s": 24 * GB}
    found = Rates.from_dict({"cpu_bytes_per_s": 1 * GB, "gpu": gpu}).gpu
    assert (found.h2d, found.d2h) == ((25 * GB, 25 * GB), (24 * GB, 24 * GB))
    assert found.copying(1e9, 2e9) is found
    known = GpuRates(900 * GB, 25 * GB, 24 * GB, h2d_alone_bytes_per_s=50 * GB, d2h_alone_bytes_per_s=48 * GB)
    assert Rates.from_dict(Rates(1 * GB, gpu=known).to_dict()).gpu == known
