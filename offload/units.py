"""How sizes and durations are written for people."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Return a size in binary units: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_count(count: int, noun: str) -> str:
    """Return how many there are: 1, "subgroup" -> "1 subgroup", 1200 -> "1,200 subgroups"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Return a duration in the unit that suits it: 0.0123 -> "12.3 ms", 150 -> "2 min 30 s"."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
