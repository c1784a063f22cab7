import re
from pathlib import Path

import pytest

import offload
from offload.cli.values import (
    Parser,
    add_output,
    add_value,
    parse_count,
    parse_number,
    parse_output,
    parse_path,
    tell,
)
from offload.config import parse_budget, parse_bytes
from offload.errors import ConfigError
from offload.units import format_apart, format_seconds


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("25000000", 25_000_000),
        ("25e6", 25_000_000),
        ("25M", 25_000_000),
        ("25m", 25_000_000),
        ("1.5B", 1_500_000_000),
        ("1.5G", 1_500_000_000),
        ("2T", 2 * 10**12),
        ("200k", 200_000),
        (" 7 K ", 7_000),
        ("1.0015k", 1_002),
        ("1", 1),
    ],
)
def test_a_count_is_read_as_people_write_it(written: str, count: int) -> None:
    assert parse_count("--params", written) == count


@pytest.mark.parametrize(
    "written", ["", "x", "M", "-5", "0", "0.2", "25MB", "25 million", "1e999", "nan", "1e-3", "0x10"]
)
def test_what_is_not_a_count_is_refused_by_name(written: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_count("--params", written)
    assert caught.value.field == "--params"
    assert caught.value.value == written


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (3.2e-5, "32 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (119, "119 s"),
        (185, "3 min 5 s"),
        (0.9999, "1 s"),
        (8000, "2 h 13 min"),
        (1e6, "11.6 days"),
        (1e30, "3.17e+22 years"),
    ],
)
def test_a_duration_has_a_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("predicted_s", "measured_s", "text"),
    [
        (0.1, 0.11, " (+10%)"),
        (0.1, 0.06, " (-40%)"),
        (0.1, 4.0, " (40 times as long)"),
        (4.0, 0.1, " (40 times as short)"),
        (253e-6, 63e-3, ""),
        (63e-3, 253e-6, ""),
        (0.0, 1.0, ""),
        (float("nan"), 1.0, ""),
        (1.0, float("nan"), ""),
    ],
)
def test_how_far_durations_are_apart_is_said_where_it_means_something(
    predicted_s: float, measured_s: float, text: str
) -> None:
    assert format_apart(predicted_s, measured_s) == text


def test_seconds_are_written_in_one_place() -> None:
    by_hand = re.compile(r"\{[^{}]*:[^{}]*[fge]\} ?(?:s|ms|us|µs|seconds|milliseconds)\b")
    assert by_hand.search('f"took {seconds:.3g} s"')
    package = Path(offload.__file__).parent
    for file in package.rglob("*.py"):
        if file != package / "units.py":
            assert not by_hand.search(file.read_text()), file


def test_integers_are_exact_and_ranges_are_held() -> None:
    assert parse_count("--seed", "9223372036854775807", least=0, most=2**63 - 1) == 2**63 - 1
    assert parse_bytes("x", "4611686018427387905B") == 2**62 + 1
    assert parse_number("--lr", "1e-3", least=0, most=1) == 1e-3
    for text in ("1.0000001", "-0", "1_0", "\u0661", "nan", "inf", "1e-9999", "0.5k"):
        with pytest.raises(ConfigError, match="--lr"):
            parse_number("--lr", text, least=0, most=1)
    for text in ("\uff11GiB", "1\u212aiB", "1e300GiB", "9" * 31):
        with pytest.raises(ConfigError, match="field"):
            parse_bytes("field", text)


@pytest.mark.parametrize(("value", "nbytes"), [(0, 0), ("0", 0), (4096, 4096), ("4KiB", 4096), ("64GiB", 64 << 30)])
def test_a_budget_is_nothing_or_a_page_at_least(value: int | str, nbytes: int) -> None:
    assert parse_budget("host_memory", value) == nbytes


@pytest.mark.parametrize("name", ["host_memory", "gpu_memory", "gradient_memory", "staging_memory", "max_bytes"])
@pytest.mark.parametrize("value", [1, 64, 4095, "64B"])
def test_a_budget_without_its_unit_is_refused(tmp_path: Path, name: str, value: int | str) -> None:
    place = {"path": tmp_path, **({name: value} if name == "max_bytes" else {})}
    settings = {} if name == "max_bytes" else {name: value}
    with pytest.raises(ConfigError, match=rf"{name}: .* write \"\d+GiB\" if that is meant"):
        offload.OffloadConfig(paths=[place], **settings)


def test_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_path("--data", "~/x") == f"{tmp_path}/x"
    assert parse_path("--paths", "s3://bucket/~x") == "s3://bucket/~x"
    assert offload.OffloadConfig(paths=["~/x"], rates="~/r").path_configs[0].path == f"{tmp_path}/x"
    for name in ("", "a" * 256, "a/" * 2048, "\udcff"):
        with pytest.raises(ConfigError, match="--data"):
            parse_path("--data", name)
    with pytest.raises(ConfigError, match="new, or may be replaced"):
        parse_output("--out", str(tmp_path))


def test_values_are_read_where_they_are_declared(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    add_value(parser, "PATH", parse_path, "where", nargs="+")
    add_value(parser, "--host-memory", parse_bytes, "how much", default=0)
    add_value(parser, "--also", parse_path, "where else", nargs="+", default=[])
    add_output(parser, "as JSON", "nothing")
    given = parser.parse_args(["a", "b", "--host", "4KiB", "--also", "c", "d", "--also", "e"])
    assert (given.path, given.host_memory, given.also) == (["a", "b"], 4096, ["c", "d", "e"])
    assert parser.parse_args(["a"]).also == []
    for arguments, name in (
        (["a", "--host", "much"], "--host-memory"),
        (["a", ""], "PATH"),
        (["a", "--also", ""], "--also"),
    ):
        with pytest.raises(ConfigError) as caught:
            parser.parse_args(arguments)
        assert caught.value.field == name
    assert "--host-memory SIZE" in parser.format_help()
    for options, said in (([], "words\n"), (["--quiet"], ""), (["--json", "--quiet"], "[\n  1\n]\n")):
        tell(parser.parse_args(["a", *options]), [1], "words")
        assert capsys.readouterr().out == said
