"""Files of rates: what was measured, on which machine, with which versions.

JSON, one object:

    {"format": 2, "created": "2026-01-31T12:00:00Z",
     "machine": {"cpu", "cores", "memory_bytes", "gpu", "kernel"},
     "versions": {"offload", "torch"},
     "rates": what `Rates.to_dict` gives; only "cpu_bytes_per_s" may have one of three forms: a rate, an object of
         rates by number of threads, or an object of either by the format of the state,
     "paths": [{"path", "file_system", "device", ...}, ...], in the order of rates.paths,
     "measurements": {name: {"median", "spread", "runs", "unit"}},
     "warnings": [...]}

Only "format" and "rates" are needed to predict with. To be used by a session, a file has to name the machine,
versions and paths that it was measured with, and these have to fit. Files of machines that are described and not
measured, as in `MACHINES`, have two entries more: "source" says where figures are from, by their names in "rates";
a path has "bytes", its size. Other entries are for people. Format 1 had rates of the update of exact state only.
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

from offload.errors import MISSING, ConfigError, OffloadError
from offload.formats import EXACT, STATE_FORMATS, StateFormat
from offload.plan import Rates
from offload.plan.rates import mean_rate
from offload.tiers import parse_place
from offload.tiers.filesystem import read_json, replacing

FORMAT = 2
"""The format of files that are written."""
READABLE = (1, 2)
"""Formats of files that are read."""

MAX_FILE_BYTES = 4 << 20
"""Most bytes of a file that is read."""

MACHINES = Path(__file__).parent / "machines"
"""Rates of well-known machines, from published figures; each file names its sources."""

SAME_MEMORY = 0.05
"""Part by which the memory of the same machine may differ: kernels reserve more or less of it."""

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
    """The content of a file of rates.

    Attributes:
        rates: Rates of all lanes. The CPU's is that of exact state, with the most threads that were measured.
        cpu_bytes_per_s: Rate of the update by the format of the state, then by number of threads; the number is 0 if
            it is not known.
        machine: `machine_facts` of the machine that was measured.
        versions: `versions` at that time.
        paths: `Place.facts` of each path, in the order of `rates.paths`.
        measurements: Everything that was measured, by name.
        warnings: Warnings for the reader.
        created: Time of the measurement, in UTC.
        source: Where figures are from, by name, if they were not measured.
        file: Name of the file that was read, for messages.
    """

    rates: Rates
    cpu_bytes_per_s: Mapping[StateFormat, Mapping[int, float]]
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    paths: tuple[Mapping[str, Any], ...] = ()
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    created: str = ""
    source: Mapping[str, str] = field(default_factory=dict)
    file: str = ""

    def cpu_rate(self, numels: Mapping[StateFormat, int], threads: int | None = None) -> float:
        """Return the CPU's rate for a session whose state is in several formats; see `mean_rate`.

        Args:
            numels: Number of elements in each format.
            threads: Threads of the update; None for the most that were measured. Between measured numbers the rate is
                interpolated; below the least it is proportional to the threads, and above the most it is constant.
        """
        rates = {form: _with_threads(known, threads) for form, known in self.cpu_bytes_per_s.items()}
        return mean_rate(rates, numels)

    def guesses(self, numels: Mapping[StateFormat, int]) -> str:
        """Return a sentence about the formats whose rate `cpu_rate` only guesses, as the file has none; or "".

        Args:
            numels: Number of elements in each format.
        """
        names = [form.name for form, numel in numels.items() if numel and form not in self.cpu_bytes_per_s]
        if not names:
            return ""
        what = f"there are no rates of the update of {' and '.join(names)} state"
        # Figures with a source were not measured on this machine, but are a data sheet's, say: no advice to measure.
        advice = "" if self.source else f"; {_ADVICE}"
        return f"{what}: taken as fast, in parameters, as that of exact state{advice}"

    def misfit(self) -> str:
        """Return how the machine and versions of this file differ from the present ones, in words; "" if they fit."""
        there = {f"machine.{name}": value for name, value in self.machine.items()}
        there |= {f"versions.{name}": value for name, value in self.versions.items()}
        here = {f"machine.{name}": value for name, value in machine_facts().items()}
        here |= {f"versions.{name}": value for name, value in versions().items()}
        differences = []
        for name, value in here.items():
            measured = there.get(name)
            is_same = measured == value
            # Memory is compared with a tolerance, as kernels reserve more or less of it; if the file has a number.
            if name == "machine.memory_bytes" and isinstance(value, int) and isinstance(measured, int):
                is_same = math.isclose(measured, value, rel_tol=SAME_MEMORY)
            if not is_same:
                differences.append(f"{name} is {measured!r} there and {value!r} here")
        return "; ".join(differences)

    def for_session(self, paths: Sequence[str], threads: int, numels: Mapping[StateFormat, int]) -> Rates:
        """Return the rates of a session on this machine.

        Args:
            paths: Its paths; each was measured, or is on the device of one that was.
            threads: Threads of its update.
            numels: Number of elements with state in each format.

        Raises:
            ConfigError: If the file is about another machine or other versions (names what differs), or has no rates
                for one of the paths.
        """
        misfit = self.misfit()
        if misfit:
            raise ConfigError("rates", self.file, f"it was measured elsewhere: {misfit}; {_ADVICE}")
        keys = [_place_key(facts) for facts in self.paths]
        rates = []  # of the session's paths
        for path in paths:
            key = _place_key(parse_place(path).facts())
            if key not in keys:
                known = [f"{facts.get('path')} ({_place_key(facts)})" for facts in self.paths]
                allowed = f"it has no rates for {path} ({key}), only for {', '.join(known) or 'no path'}; {_ADVICE}"
                raise ConfigError("rates", self.file, allowed)
            rates.append(self.rates.paths[keys.index(key)])
        return dataclasses.replace(self.rates, cpu_bytes_per_s=self.cpu_rate(numels, threads), paths=tuple(rates))

    def to_dict(self) -> dict[str, Any]:
        """Return the file's content, to be written as JSON."""
        rates = self.rates.to_dict()
        # For each format a rate alone if the number of threads is not known (0), else rates by that number.
        rates["cpu_bytes_per_s"] = {
            form.name: known[0] if 0 in known else {str(count): known[count] for count in sorted(known)}
            for form, known in self.cpu_bytes_per_s.items()
        }
        return {
            "format": FORMAT,
            "created": self.created,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "rates": rates,
            "paths": [dict(facts) for facts in self.paths],
            "measurements": {name: dataclasses.asdict(each) for name, each in self.measurements.items()},
            "warnings": list(self.warnings),
            **({"source": dict(self.source)} if self.source else {}),
        }

    @classmethod
    def from_dict(cls, values: object, file: str = "rates") -> RatesFile:
        """Return the content of a file from its parsed JSON.

        Args:
            values: The JSON's value.
            file: Its name, for messages.

        Raises:
            ConfigError: If something is missing or unusable; names it.
        """
        if not isinstance(values, Mapping):
            raise ConfigError("rates", file, f"it is not an object with rates; {_ADVICE}")
        if values.get("format") not in READABLE:
            allowed = f"its format is {values.get('format')!r} and this version reads 1 and {FORMAT}; {_ADVICE}"
            raise ConfigError("rates", file, allowed)
        rates = values.get("rates")
        if not isinstance(rates, Mapping):
            raise ConfigError("rates", file, f"it has no rates; {_ADVICE}")
        try:
            cpu = _parse_by_format(rates.get("cpu_bytes_per_s"))
            checked = Rates.from_dict({**rates, "cpu_bytes_per_s": _with_threads(cpu[EXACT], None)})
            paths = _listed(values, "paths", Mapping)
            if paths and len(paths) != len(checked.paths):
                raise ConfigError("paths", len(paths), f"name the {len(checked.paths)} paths of rates.paths")
            return cls(
                rates=checked,
                cpu_bytes_per_s=cpu,
                machine=_object(values, "machine"),
                versions=_object(values, "versions"),
                paths=tuple(paths),
                measurements=_parse_measurements(_object(values, "measurements")),
                warnings=tuple(_listed(values, "warnings", str)),
                created=str(values.get("created", "")),
                source=_parse_source(values.get("source")),
                file=file,
            )
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.field}", error.value, error.allowed) from error


def _with_threads(known: Mapping[int, float], threads: int | None) -> float:
    """Return the rate with a number of threads, from the rates that are known by number of threads.

    It is interpolated between known numbers. None is for the greatest known number.
    """
    last_count, last_rate = 0, 0.0  # 0 threads have rate 0: below the least number the rate is proportional
    for count, rate in sorted(known.items()):
        if threads is not None and count >= threads:
            return last_rate + (rate - last_rate) * (threads - last_count) / (count - last_count)
        last_count, last_rate = count, rate
    return last_rate  # more threads than were measured are no faster


def _parse_by_format(values: Any) -> dict[StateFormat, dict[int, float]]:
    """Return rates of the update by format, then by number of threads, from "cpu_bytes_per_s" of a file.

    The entry has one of three forms; see the module. A rate alone is returned under 0 threads.

    Raises:
        ConfigError: The entry is missing, is not usable, or has no rate of exact state.
    """
    if values is None:
        raise ConfigError("rates.cpu_bytes_per_s", MISSING, "measure it")
    has_formats = isinstance(values, Mapping) and any(name in values for name in STATE_FORMATS)
    by_format = {}
    for name, known in values.items() if has_formats else [("exact", values)]:  # else all values are of exact state
        if name not in STATE_FORMATS:
            raise ConfigError("rates.cpu_bytes_per_s", name, f"give rates by format: {', '.join(STATE_FORMATS)}")
        by_format[STATE_FORMATS[name]] = (
            _parse_by_threads(known) if isinstance(known, Mapping) else {0: _check_rate(known)}
        )
    if EXACT not in by_format:
        raise ConfigError("rates.cpu_bytes_per_s.exact", MISSING, "measure it")
    return by_format


def _parse_by_threads(values: Mapping[str, Any]) -> dict[int, float]:
    """Return rates by number of threads from an object of a file, {"8": rate}; `ConfigError` if it is not usable."""
    rates = {}
    for count, rate in values.items():
        if not (isinstance(count, str) and count.isdecimal() and len(count) < 10 and int(count) > 0):
            allowed = f"give rates by number of threads, at least 1, or by format: {', '.join(STATE_FORMATS)}"
            raise ConfigError("rates.cpu_bytes_per_s", count, allowed)
        rates[int(count)] = _check_rate(rate)
    if not rates:
        raise ConfigError("rates.cpu_bytes_per_s", {}, "give the rate for one number of threads at least")
    return rates


def _check_rate(value: Any) -> float:
    """Return a rate; raise the `ConfigError` of `Rates` if it is not usable."""
    # `replace` calls the constructor, which checks the value; a rate of 1 only stands in until then.
    return dataclasses.replace(Rates(1.0), cpu_bytes_per_s=value).cpu_bytes_per_s


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the entry `name` of a file, {} if there is none; raise `ConfigError` if it is not an object."""
    entry = values.get(name, {})
    if not isinstance(entry, Mapping):
        raise ConfigError(name, entry, "give an object")
    return entry


def _listed(values: Mapping[str, Any], name: str, kind: type[Any]) -> list[Any]:
    """Return the entry `name` of a file, [] if there is none; raise `ConfigError` if it is not a list of `kind`."""
    entry = values.get(name, [])
    if not isinstance(entry, list) or not all(isinstance(item, kind) for item in entry):
        raise ConfigError(name, entry, "give a list of strings" if kind is str else "give a list of objects")
    return entry


def _parse_source(entry: object) -> Mapping[str, str]:
    """Return where figures are from; {} if the entry is no object: then it is free text for people."""
    return {str(name): str(text) for name, text in entry.items()} if isinstance(entry, Mapping) else {}


def _parse_measurements(values: Mapping[str, Any]) -> dict[str, Measurement]:
    """Return measurements by name, from the value in a file."""
    measurements = {}
    for name, fields in values.items():
        try:
            measurements[name] = Measurement(**fields)
        except TypeError:
            raise ConfigError(f"measurements.{name}", fields, "give median, spread, runs and unit") from None
    return measurements


# Finding, reading and writing files


def default_rates_file() -> Path:
    """Return the file of this machine's rates, in the user's cache directory.

    Its name depends on CPU and GPU: machines that share a home directory have different files. For a user without a
    home directory it is a name below "/", where no file is.
    """
    # Without a home directory `expanduser` returns "~", which becomes "/~", not a name below the working directory.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("/", os.path.expanduser("~"), ".cache")
    facts = machine_facts()
    key = hashlib.sha256(json.dumps([facts["cpu"], facts["cores"], facts["gpu"]]).encode()).hexdigest()[:12]
    return Path(cache) / "offload" / f"rates-{key}.json"


def has_default_rates() -> bool:
    """Return whether `default_rates_file` exists and may be read; False, too, if the home may not be entered."""
    return os.access(default_rates_file(), os.R_OK)


def save_rates(file: str | os.PathLike[str], found: RatesFile) -> None:
    """Write a file of rates, whole or not at all, and make its directory if there is none.

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
    """Read a file of rates, without asking whether it fits this machine.

    Raises:
        ConfigError: If there is none, or it is not usable; names what is wrong.
    """
    name = os.fspath(file)
    try:
        values = read_json(name, MAX_FILE_BYTES, follow=True)
    except OSError as cause:
        raise ConfigError("rates", name, f"it cannot be read ({cause.strerror}); {_ADVICE}") from cause
    except ValueError as cause:
        raise ConfigError("rates", name, f"it is not JSON ({cause}); {_ADVICE}") from cause
    return RatesFile.from_dict(values, name)


def find_rates(name: str | os.PathLike[str]) -> RatesFile:
    """Return the rates in a file, or those of a well-known machine (`MACHINES`).

    Args:
        name: The file's name, or the machine's.

    Raises:
        ConfigError: If there is neither (names the machines), or the file is not usable.
    """
    known = {file.stem: file for file in sorted(MACHINES.glob("*.json"))}
    wanted = os.fspath(name)
    is_file = os.path.exists(wanted) or os.path.dirname(wanted) or wanted.endswith(".json")  # there, or meant as one
    if not is_file:
        if wanted not in known:
            raise ConfigError("rates", wanted, f"name a file, or one of {', '.join(known)}; {_ADVICE}")
        return load_rates(known[wanted])
    return load_rates(wanted)


def session_rates(wanted: str, paths: Sequence[str], threads: int, numels: Mapping[StateFormat, int]) -> Rates | None:
    """Return the rates in a file that a session starts from, or None if it has to probe; log which it is.

    Args:
        wanted: "auto" for this machine's file if it fits, or a file.
        paths: The session's paths.
        threads: Threads of its update.
        numels: Number of elements with state in each format.

    Raises:
        ConfigError: If a file was named and cannot be used.
    """
    file = default_rates_file() if wanted == "auto" else Path(wanted)
    if wanted == "auto" and not has_default_rates():
        _log.info("rates from a short probe; `offload probe` measures them better")
        return None
    try:
        content = load_rates(file)
        rates = content.for_session(paths, threads, numels)
    except ConfigError as error:
        if wanted != "auto":
            raise
        _log.info("rates from a short probe: %s", error)
        return None
    _log.info("rates from %s, measured %s", file, content.created or "at an unknown time")
    if guesses := content.guesses(numels):
        _log.info("%s: %s", file, guesses)
    return rates


# Facts that rates depend on


def machine_facts() -> dict[str, Any]:
    """Return the facts of this machine on which rates depend; `cores` are those that this process may use."""
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


def _place_key(facts: Mapping[str, Any]) -> str:
    """Return the type of a path's file system and its device, as text: paths alike in both have the same rates."""
    return f"{facts.get('file_system')} on {facts.get('device')}"


def _cpu_model() -> str:
    """Return the processor's name as Linux knows it; what Python says of it if that cannot be read."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu_model() -> str | None:
    """Return the machine's GPUs as NVIDIA's driver names them, "8 x NVIDIA H100"; None without any.

    CUDA is not asked: a process that has started it cannot use it after a fork.
    """
    models = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            lines = file.read_text(encoding="utf-8").splitlines()
            models += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return ", ".join(f"{models.count(name)} x {name}" for name in dict.fromkeys(models)) or None
