"""Measured speeds: what predictions are computed from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offload.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PathRates:
    """Speed of one path.

    Attributes:
        read_bytes_per_s: Bandwidth towards memory.
        write_bytes_per_s: Bandwidth towards the path.
        latency_s: Time of one operation before its first byte.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of all lanes of a session.

    Attributes:
        cpu_bytes_per_s: State bytes that the CPU updates per second, with all threads of the session.
        paths: One entry per path, in the config's order.

    Raises:
        ConfigError: If a rate is not a finite number greater than zero.
    """

    cpu_bytes_per_s: float
    paths: tuple[PathRates, ...] = ()

    def __post_init__(self) -> None:
        values = {"cpu_bytes_per_s": self.cpu_bytes_per_s}
        for index, path in enumerate(self.paths):
            values[f"paths[{index}].read_bytes_per_s"] = path.read_bytes_per_s
            values[f"paths[{index}].write_bytes_per_s"] = path.write_bytes_per_s
            if not 0 <= path.latency_s < math.inf:
                raise ConfigError(f"rates.paths[{index}].latency_s", path.latency_s, "give seconds >= 0")
        for field, value in values.items():
            if not 0 < value < math.inf:
                raise ConfigError(f"rates.{field}", value, "give a finite number greater than 0")
