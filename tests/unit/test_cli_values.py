import pytest

from offload.cli.values import parse_count
from offload.errors import ConfigError
from offload.units import format_seconds


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
    [(0, "0 µs"), (3.2e-5, "32 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (119, "119 s"), (185, "3 min 5 s")],
)
def test_a_duration_has_a_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
