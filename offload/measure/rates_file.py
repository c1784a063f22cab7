"""Files of rates: what was measured, on which machine, with which versions.

JSON, one object:

    {"format": 1, "created": "2026-01-31T12:00:00Z",
     "machine": {"cpu", "cores", "memory_bytes", "gpu", "kernel"},
     "versions": {"offload", "torch"},
     "rates": what `Rates.to_dict` gives, but "cpu_bytes_per_s" may be an object of rates by number of threads,
     "paths": [{"path", "file_system", "device", ...}, ...], in the order of rates.paths,
     "measurements": {name: {"median", "spread", "runs", "unit"}},
     "warnings": [...]}

Only "format" and "rates" are needed to predict with; to be used by a session, a file has to say what machine,
versions and paths it is about, and to fit. Other entries (such as "source") are for people.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from offload.errors import ConfigError, OffloadError
from offload.plan import Rates
from offload.tiers import file_system
from offload.tiers.places import read_regular, replacing

FORMAT = 1

MAX_FILE_BYTES = 4 << 20

MACHINES = Path(__file__).parent / "machines"
"""Rates of well-known machines, from published figures; each file names its sources."""

SAME_MEMORY = 0.05
"""How far the memory of a machine may seem to differ: kernels keep more or less of it for themselves."""

_log = logging.getLogger("offload")

_ADVICE = "run `offload probe` to measure again"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured value.

    Attributes:
        median: Over all runs.
        spread: Interquartile range (of few runs, the whole range) as a part of the median.
        runs: How many runs.
        unit: Of the median.
    """

    median: float
    spread: float
    runs: int
    unit: str


@dataclass(frozen=True, kw_only=True)
class RatesFile:
    """What a file of rates says.

    Attributes:
        rates: All lanes, with as many threads as were measured.
        cpu_bytes_per_s: Rate of the update by number of threads; empty where only one rate is known.
        machine: What `machine_facts` said where it was measured.
        versions: Likewise of `versions`.
        paths: What `path_facts` said of each path, in the order of `rates.paths`.
        measurements: Everything that was measured, by name.
        warnings: What the reader should know.
        created: When, in UTC.
        file: Where it was read from, for messages.
    """

    rates: Rates
    cpu_bytes_per_s: Mapping[int, float] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    paths: tuple[Mapping[str, Any], ...] = ()
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    created: str = ""
    file: str = ""

    def cpu_rate(self, threads: int) -> float:
        """Return the rate of the update with so many threads, interpolated where that was not measured.

        Below the least number measured it is taken as proportional, above the most as that of the most.
        """
        known = sorted(self.cpu_bytes_per_s.items())
        if not known:
            return self.rates.cpu_bytes_per_s
        below, rate = 0, 0.0
        for count, next_rate in known:
            if count >= threads:
                return rate + (next_rate - rate) * (threads - below) / (count - below)
            below, rate = count, next_rate
        return rate

    def misfit(self) -> str:
        """Return in what this file differs from the machine and the versions here; "" if it fits."""
        differences = []
        for what, known, here in (
            ("machine", self.machine, machine_facts()),
            ("versions", self.versions, versions()),
        ):
            for name, value in here.items():
                found = known.get(name)
                same = found == value
                if isinstance(value, int) and name == "memory_bytes" and isinstance(found, int):
                    same = math.isclose(found, value, rel_tol=SAME_MEMORY)
                if not same:
                    differences.append(f"{what}.{name} is {found!r} there and {value!r} here")
        return "; ".join(differences)

    def for_session(self, paths: Sequence[str], threads: int) -> Rates:
        """Return the rates of a session on this machine.

        Args:
            paths: Its paths, each of which was measured, or lies on a device of which another directory was.
            threads: Threads of its update.

        Raises:
            ConfigError: If the file is about another machine or other versions (names what differs), or does not
                have a path.
        """
        misfit = self.misfit()
        if misfit:
            raise ConfigError("rates", self.file, f"it was measured elsewhere: {misfit}; {_ADVICE}")
        places = [_place(facts) for facts in self.paths]
        rated = []
        for path in paths:
            place = _place(path_facts(path))
            if place not in places:
                known = [f"{facts.get('path')} ({_place(facts)})" for facts in self.paths]
                allowed = f"it has no rates for {path} ({place}), only for {', '.join(known) or 'no path'}; {_ADVICE}"
                raise ConfigError("rates", self.file, allowed)
            rated.append(self.rates.paths[places.index(place)])
        return dataclasses.replace(self.rates, cpu_bytes_per_s=self.cpu_rate(threads), paths=tuple(rated))

    def to_dict(self) -> dict[str, Any]:
        """Return the file's content."""
        rates = self.rates.to_dict()
        if self.cpu_bytes_per_s:
            rates["cpu_bytes_per_s"] = {str(count): rate for count, rate in sorted(self.cpu_bytes_per_s.items())}
        return {
            "format": FORMAT,
            "created": self.created,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "rates": rates,
            "paths": [dict(facts) for facts in self.paths],
            "measurements": {name: dataclasses.asdict(each) for name, each in self.measurements.items()},
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, values: object, file: str = "rates") -> RatesFile:
        """Return what a file says from its parsed JSON.

        Args:
            values: The JSON's value.
            file: Its name, for messages.

        Raises:
            ConfigError: If something is missing or unusable; names it.
        """
        if not isinstance(values, Mapping):
            raise ConfigError("rates", file, f"it is not an object with rates; {_ADVICE}")
        if values.get("format") != FORMAT:
            allowed = f"its format is {values.get('format')!r} and this version reads {FORMAT}; {_ADVICE}"
            raise ConfigError("rates", file, allowed)
        rates = values.get("rates")
        if not isinstance(rates, Mapping):
            raise ConfigError("rates", file, f"it has no rates; {_ADVICE}")
        by_threads = rates.get("cpu_bytes_per_s")
        cpu: dict[int, float] = {}
        try:
            if isinstance(by_threads, Mapping):
                cpu = _by_threads(by_threads)
                rates = {**rates, "cpu_bytes_per_s": cpu[max(cpu)]}
            checked = Rates.from_dict(rates)
            paths = _listed(values, "paths", Mapping)
            if paths and len(paths) != len(checked.paths):
                raise ConfigError("paths", len(paths), f"name the {len(checked.paths)} paths of rates.paths")
            return cls(
                rates=checked,
                cpu_bytes_per_s=cpu,
                machine=_object(values, "machine"),
                versions=_object(values, "versions"),
                paths=tuple(paths),
                measurements=_measurements(_object(values, "measurements")),
                warnings=tuple(_listed(values, "warnings", str)),
                created=str(values.get("created", "")),
                file=file,
            )
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.field}", error.value, error.allowed) from error


def _by_threads(values: Mapping[str, Any]) -> dict[int, float]:
    cpu = {}
    for count, rate in values.items():
        if not (isinstance(count, str) and count.isdecimal() and len(count) < 10 and int(count) > 0):
            raise ConfigError("rates.cpu_bytes_per_s", count, "give rates by number of threads, at least 1")
        # As strict as `Rates` is, in its words.
        cpu[int(count)] = dataclasses.replace(Rates(1.0), cpu_bytes_per_s=rate).cpu_bytes_per_s
    if not cpu:
        raise ConfigError("rates.cpu_bytes_per_s", {}, "give the rate for one number of threads at least")
    return cpu


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(name, found, "give an object")
    return found


def _listed(values: Mapping[str, Any], name: str, kind: type[Any]) -> list[Any]:
    found = values.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise ConfigError(name, found, "give a list of strings" if kind is str else "give a list of objects")
    return found


def _measurements(values: Mapping[str, Any]) -> dict[str, Measurement]:
    found = {}
    for name, each in values.items():
        try:
            found[name] = Measurement(**each)
        except TypeError:
            raise ConfigError(f"measurements.{name}", each, "give median, spread, runs and unit") from None
    return found


# Where files are, and what is in them


def default_rates_file() -> Path:
    """Return where this machine's rates are kept: machines that share a home directory have a file each."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    facts = machine_facts()
    key = hashlib.sha256(json.dumps([facts["cpu"], facts["cores"], facts["gpu"]]).encode()).hexdigest()[:12]
    return Path(cache) / "offload" / f"rates-{key}.json"


def save_rates(file: str | os.PathLike[str], found: RatesFile) -> None:
    """Write a file of rates, whole or not at all; its directory is made if need be.

    Raises:
        OffloadError: If it cannot be written.
    """
    path = Path(file)
    text = json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, f".{path.name}-{uuid.uuid4().hex}") as out:
            out.write(text.encode())
    except OSError as cause:
        raise OffloadError(f"{path} cannot be written: {cause.strerror or cause}") from cause


def load_rates(file: str | os.PathLike[str]) -> RatesFile:
    """Read a file of rates; whether it fits this machine is not asked yet.

    Raises:
        ConfigError: If there is none, or it is not one; names what is wrong.
    """
    name = os.fspath(file)
    try:
        values = json.loads(read_regular(name, MAX_FILE_BYTES, follow=True))
    except OSError as cause:
        raise ConfigError("rates", name, f"it cannot be read ({cause.strerror}); {_ADVICE}") from cause
    except (ValueError, RecursionError) as cause:  # not text, not JSON
        raise ConfigError("rates", name, f"it is not JSON ({cause}); {_ADVICE}") from cause
    return RatesFile.from_dict(values, name)


def find_rates(name: str | os.PathLike[str]) -> RatesFile:
    """Return the rates in a file, or those of a machine that ships with the package, by its name.

    Raises:
        ConfigError: If there is neither, or the file is not usable; names the machines.
    """
    known = {file.stem: file for file in sorted(MACHINES.glob("*.json"))}
    wanted = os.fspath(name)
    if not os.path.exists(wanted) and not os.path.dirname(wanted) and not wanted.endswith(".json"):
        if wanted not in known:
            raise ConfigError("rates", wanted, f"name a file, or one of {', '.join(known)}; {_ADVICE}")
        return load_rates(known[wanted])
    return load_rates(wanted)


def session_rates(wanted: str, paths: Sequence[str], threads: int) -> Rates | None:
    """Return the rates that a session starts from, or None if they are to be probed; says which in the log.

    Args:
        wanted: "auto" for this machine's file if it fits, or a file.
        paths: The session's paths.
        threads: Threads of its update.

    Raises:
        ConfigError: If a file was named and cannot be used.
    """
    file = default_rates_file() if wanted == "auto" else Path(wanted)
    if wanted == "auto" and not file.exists():
        _log.info("rates from a short probe; `offload probe` measures them better")
        return None
    try:
        found = load_rates(file)
        rates = found.for_session(paths, threads)
    except ConfigError as error:
        if wanted != "auto":
            raise
        _log.info("rates from a short probe: %s", error)
        return None
    _log.info("rates from %s, measured %s", file, found.created or "at an unknown time")
    return rates


# What rates depend on


def machine_facts() -> dict[str, Any]:
    """Return what tells this machine's rates from another's; `cores` are those that this process may use."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": _gpu_model(),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Return the versions that rates depend on."""
    return {name: importlib.metadata.version(name) for name in ("offload", "torch")}


def path_facts(path: str) -> dict[str, str]:
    """Return what tells a path's rates from another's: the file system's type and the device it lies on.

    Directories of one file system have the same. A bucket is known by its name and its endpoint.

    Raises:
        ConfigError: If there is no such directory.
    """
    scheme, separator, rest = path.partition("://")
    if separator and scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
        return {"path": path, "file_system": "s3", "device": f"{rest.partition('/')[0]} at {endpoint}"}
    directory = os.path.realpath(rest if separator else path)
    try:
        # File systems without an id of their own (network mounts, mostly) are known by what is mounted.
        number = os.statvfs(directory).f_fsid
        device = f"{number:016x}" if number else _mount_source(directory)
        return {"path": directory, "file_system": file_system(directory), "device": device}
    except OSError as cause:
        raise ConfigError("paths", path, f"it cannot be used: {cause.strerror}") from cause


def _place(facts: Mapping[str, Any]) -> str:
    """Return what two paths have in common that are equally fast."""
    return f"{facts.get('file_system')} on {facts.get('device')}"


def _mount_source(directory: str) -> str:
    mounts = {mount.mountpoint: mount.device for mount in psutil.disk_partitions(all=True)}
    place = Path(directory)
    while str(place) not in mounts and place != place.parent:
        place = place.parent
    return str(mounts.get(str(place), ""))


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu_model() -> str | None:
    """Return the GPUs that the driver knows, or None; asks no CUDA, which a later fork would not survive."""
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            lines = file.read_text(encoding="utf-8").splitlines()
            found += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return ", ".join(f"{found.count(name)} x {name}" for name in dict.fromkeys(found)) or None
