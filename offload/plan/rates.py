"""Measured speeds: what predictions are computed from. Pure; files of rates belong to `offload.measure`.

Lanes that run at the same time share the bandwidth of the host's memory, `Rates.memory_bytes_per_s`. A lane that
moves `b` bytes a second takes `b * memory_cost` of it. Copies by DMA are not slowed down; the CPU's update gets what
they leave (`Rates.cpu_speed`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from offload.errors import MISSING, ConfigError
from offload.formats import EXACT, EXACT_ADAMW, StateFormat
from offload.protocols import MAX_NODES

UPDATE_MEMORY_COST = EXACT_ADAMW.memory_cost
"""Bytes of memory traffic for each state byte of Adam's update of exact state. Other rules move up to 8% more,
other formats up to 20%."""

LEAST_CPU_SPEED = 0.1
"""Part of its rate that an update keeps whatever runs beside it."""


def cpu_speed(cpu_bytes_per_s: float, memory_bytes_per_s: float, beside_bytes_per_s: float) -> float:
    """Return the part of its own rate that an update keeps beside other memory traffic.

    That is the memory bandwidth left to it, over what it takes at its full rate; at least `LEAST_CPU_SPEED`.

    Args:
        cpu_bytes_per_s: State bytes that it updates a second with nothing beside it.
        memory_bytes_per_s: Bandwidth of the host's memory.
        beside_bytes_per_s: Memory traffic of the other lanes.
    """
    left_bytes_per_s = memory_bytes_per_s - beside_bytes_per_s
    return min(1.0, max(LEAST_CPU_SPEED, left_bytes_per_s / (cpu_bytes_per_s * UPDATE_MEMORY_COST)))


def mean_rate(bytes_per_s: Mapping[StateFormat, float], numels: Mapping[StateFormat, int]) -> float:
    """Return the bytes a second that the CPU updates of state in several formats: all bytes over all seconds.

    Args:
        bytes_per_s: The rate of each format; a missing one updates as many elements a second as `EXACT`.
        numels: Number of elements in each format, one at least.
    """
    item_bytes = {form: EXACT_ADAMW.stored_in(form).item_bytes for form in numels}
    nbytes = {form: numel * item_bytes[form] for form, numel in numels.items()}
    exact_numel_per_s = bytes_per_s[EXACT] / EXACT_ADAMW.item_bytes
    seconds = sum(nbytes[form] / bytes_per_s.get(form, exact_numel_per_s * item_bytes[form]) for form in numels)
    return sum(nbytes.values()) / seconds


class Slowness(NamedTuple):
    """How many times as long a byte of state on a memory node takes as on the fastest node.

    Attributes:
        update: For its update on the CPU.
        copy: For its copies to the GPU and back.
    """

    update: float
    copy: float


class Direction(NamedTuple):
    """Bytes per second of one direction of a path, or of a GPU's link.

    Attributes:
        beside: While the other direction is in use, too.
        alone: While the other is not in use; at least `beside`.
    """

    beside: float
    alone: float

    @property
    def is_hindered(self) -> bool:
        """Whether it is slower while the other direction is in use."""
        return self.alone > self.beside

    @property
    def rate_share_beside(self) -> float:
        """The part of the rate `alone` that remains while the other direction is in use."""
        return self.beside / self.alone


@dataclass(frozen=True, slots=True)
class PathRates:
    """Speed of one path.

    Most devices have one bandwidth for both directions, so that each is slower beside the other. Directions do not
    hinder each other where the rate that each has alone is not known, or is no more than the rate beside the other.

    Attributes:
        read_bytes_per_s: Bandwidth towards memory, while something is written.
        write_bytes_per_s: Bandwidth towards the path, while something is read.
        latency_s: Time of one operation before its first byte.
        memory_cost: Bytes of memory bandwidth that updates lose for each byte moved (1 for plain DMA, more with
            checksums or copies).
        read_alone_bytes_per_s: Bandwidth towards memory while nothing is written; 0 where unknown.
        write_alone_bytes_per_s: Bandwidth towards the path while nothing is read; 0 where unknown.
        at_once: Transfers of one direction that share its bandwidth and end together; further ones wait. 1 for a
            device that serves one after the other. What a transfer takes of the device's time is the same either way.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0
    memory_cost: float = 1.0
    read_alone_bytes_per_s: float = 0.0
    write_alone_bytes_per_s: float = 0.0
    at_once: float = 1.0

    @property
    def read(self) -> Direction:
        """The rates of reads."""
        return Direction(self.read_bytes_per_s, max(self.read_bytes_per_s, self.read_alone_bytes_per_s))

    @property
    def write(self) -> Direction:
        """The rates of writes."""
        return Direction(self.write_bytes_per_s, max(self.write_bytes_per_s, self.write_alone_bytes_per_s))

    @property
    def is_half_duplex(self) -> bool:
        """Whether a direction is slower beside the other."""
        return self.read.is_hindered or self.write.is_hindered

    @property
    def each_way_bytes_per_s(self) -> float:
        """Bytes a second each way, on average, if as many bytes are read as are written.

        For one byte each way, the faster direction (`first`) ends after 1 / first.beside seconds. By then the slower
        one (`last`) has moved last.beside / first.beside of its byte; it moves the rest alone, at last.alone. The
        result is one byte over the sum of both times.
        """
        first, last = sorted((self.read, self.write), key=lambda direction: -direction.beside)
        if last.beside == first.beside or not last.is_hindered:
            return last.beside
        return 1 / (1 / first.beside + (1 - last.beside / first.beside) / last.alone)

    def scaled(self, share: float) -> PathRates:
        """Return the rates of a user who gets this share of the path's bandwidth."""
        return dataclasses.replace(
            self,
            read_bytes_per_s=share * self.read_bytes_per_s,
            write_bytes_per_s=share * self.write_bytes_per_s,
            read_alone_bytes_per_s=share * self.read_alone_bytes_per_s,
            write_alone_bytes_per_s=share * self.write_alone_bytes_per_s,
        )


@dataclass(frozen=True, slots=True)
class NodeRates:
    """Speed of one memory node, for this session's cores and the GPU.

    Attributes:
        node: Its number.
        update_bytes_per_s: State bytes in its memory that the CPU updates per second.
        read_bytes_per_s: Bytes that the cores read from it per second.
        write_bytes_per_s: Bytes that the cores write to it per second.
        link_bytes_per_s: Bytes that a GPU copies per second from it, or to it if that is less; 0 where unknown.
    """

    node: int
    update_bytes_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Speed of one GPU and of its link.

    Each direction of most links is slower beside the other. Directions do not hinder each other where the rate that
    each has alone is not known, or is no more than the rate beside the other.

    Attributes:
        update_bytes_per_s: State bytes that the GPU updates per second, in its own memory.
        h2d_bytes_per_s: Bandwidth from pinned host memory, while something is copied to it.
        d2h_bytes_per_s: Bandwidth to pinned host memory, while something is copied from it.
        memory_bytes: Size of its memory; 0 where unknown.
        memory_cost: Bytes of host memory bandwidth that updates lose for each byte copied.
        call_s: What the engine's thread takes for one call of the GPU's runtime: a copy, a kernel, an event.
        h2d_alone_bytes_per_s: Bandwidth from pinned host memory while nothing is copied to it; 0 where unknown.
        d2h_alone_bytes_per_s: Bandwidth to pinned host memory while nothing is copied from it; 0 where unknown.
    """

    update_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    memory_bytes: int = 0
    memory_cost: float = 1.0
    call_s: float = 0.0
    h2d_alone_bytes_per_s: float = 0.0
    d2h_alone_bytes_per_s: float = 0.0

    weights_on: ClassVar[str] = "gpu"  # where a model's weights lie if nobody says it

    @property
    def h2d(self) -> Direction:
        """The rates of copies to the GPU."""
        return Direction(self.h2d_bytes_per_s, max(self.h2d_bytes_per_s, self.h2d_alone_bytes_per_s))

    @property
    def d2h(self) -> Direction:
        """The rates of copies from the GPU."""
        return Direction(self.d2h_bytes_per_s, max(self.d2h_bytes_per_s, self.d2h_alone_bytes_per_s))

    def copying(self, h2d_bytes: float, d2h_bytes: float) -> GpuRates:
        """Return rates with the mean rate of each direction of the link, for copies that begin together.

        Both directions work beside each other for `both_s`, until one of them has moved its bytes. The other moves
        the rest alone. In the rates returned, each direction has its mean rate all the time.

        Args:
            h2d_bytes: Bytes that are copied to the GPU.
            d2h_bytes: Bytes that are copied from it.
        """
        if not (self.h2d.is_hindered or self.d2h.is_hindered):
            return self
        both_s = min(h2d_bytes / self.h2d.beside, d2h_bytes / self.d2h.beside)

        def mean_rate(direction: Direction, nbytes: float) -> float:
            """Return the bytes a second of a direction over all of its time."""
            rest_bytes = max(0.0, nbytes - both_s * direction.beside)
            return nbytes / (both_s + rest_bytes / direction.alone) if nbytes else direction.alone

        h2d = mean_rate(self.h2d, h2d_bytes)
        d2h = mean_rate(self.d2h, d2h_bytes)
        # 0: unknown. Without rates alone, directions do not hinder each other.
        return self.reaching({"h2d": h2d, "d2h": d2h, "h2d_alone": 0.0, "d2h_alone": 0.0})

    def times(self, factor: float) -> GpuRates:
        """Return the rates with a link that is `factor` times as fast."""
        names = ("h2d", "d2h", "h2d_alone", "d2h_alone")
        return self.reaching({name: factor * getattr(self, f"{name}_bytes_per_s") for name in names})

    @property
    def lanes(self) -> Mapping[str, tuple[float, float]]:
        """For each of the GPU's lanes, its bytes a second and the bytes of host memory traffic for each byte.

        The rate of a direction of the link is that beside the other one.
        """
        cost = self.memory_cost
        return {
            "gpu": (self.update_bytes_per_s, 0.0),
            "h2d": (self.h2d_bytes_per_s, cost),
            "d2h": (self.d2h_bytes_per_s, cost),
        }

    def reaching(self, bytes_per_s: Mapping[str, float]) -> GpuRates:
        """Return a copy of these rates in which some are replaced.

        Args:
            bytes_per_s: The new rates, by lane: "gpu", "h2d", "d2h"; "h2d_alone" and "d2h_alone" are those of a
                direction of the link while the other is not in use.
        """
        fields: Any = {
            "update_bytes_per_s" if lane == "gpu" else f"{lane}_bytes_per_s": rate
            for lane, rate in bytes_per_s.items()
        }
        return dataclasses.replace(self, **fields)

    def check_used(self, *, planned: bool) -> None:
        """Do nothing, as there is a GPU; `NO_GPU` raises `ConfigError` for a plan that uses one.

        Args:
            planned: Whether the plan is still to be made.
        """


class _NoGpu(GpuRates):
    """No GPU: without lanes, and so slow that no plan chooses it."""

    __slots__ = ()
    weights_on = "cpu"
    lanes: Mapping[str, tuple[float, float]] = {}

    def check_used(self, *, planned: bool) -> None:
        """Raise `ConfigError`, as there is no GPU."""
        uses = "is to use" if planned else "uses"
        raise ConfigError("rates.gpu", MISSING, f"the plan {uses} a GPU: describe or measure it")


_LEAST, _MOST = 1e-9, 1e24  # of a rate: far beyond any machine; times of bytes over rates stay finite

NO_GPU: GpuRates = _NoGpu(_LEAST, _LEAST, _LEAST, memory_cost=0.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of all lanes of a session.

    Attributes:
        cpu_bytes_per_s: State bytes that the CPU updates per second, with all threads of the session and nothing else
            running, in the formats that its state has (`mean_rate`), and on the fastest of `nodes`.
        paths: One entry per path, in the config's order.
        gpu: The GPU and its link; `NO_GPU` without one.
        memory_bytes_per_s: Host memory bandwidth of this session, reads and writes together; infinite where unknown,
            so that nothing slows anything down.
        compute_flops_per_s: What forward and backward reach, for predictions of whole iterations; 0 where unknown.
        reaction_s: What the engine takes from the end of an operation until a lane that is idle has taken up the one
            that follows from it: threads that wake up, and its own work. Where a lane has more to do, that is hidden.
            Other Python threads that hold the interpreter make it longer, by up to the 5 ms of CPython's switch
            interval.
        operation_s: What the engine's one thread takes to start an operation, to take in its end and to learn from
            it, calls of the GPU's runtime (`GpuRates.call_s`) not counted. The thread does one after the other, so
            this bounds how many operations there are in a second.
        begin_s: What the engine's thread takes, beside a step's operations, to begin it.
        nodes: Memory nodes. Their rates are used beside each other alone (`slowness`): a step teaches what the
            fastest one gives, and the proportions stay.

    Raises:
        ConfigError: If a rate is not a finite number greater than zero.
    """

    cpu_bytes_per_s: float
    paths: tuple[PathRates, ...] = ()
    gpu: GpuRates = NO_GPU
    memory_bytes_per_s: float = math.inf
    compute_flops_per_s: float = 0.0
    reaction_s: float = 0.0
    operation_s: float = 0.0
    begin_s: float = 0.0
    nodes: tuple[NodeRates, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a rate that is not usable, and for a memory node that is given twice."""
        parts: list[tuple[str, Any]] = [("", self), ("gpu.", self.gpu)]  # the prefix of a part's fields, the part
        parts += [(f"paths[{number}].", path) for number, path in enumerate(self.paths)]
        parts += [(f"nodes[{number}].", node) for number, node in enumerate(self.nodes)]
        for prefix, part in parts:
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if field.name not in ("paths", "gpu", "nodes"):  # these hold the other parts
                    _check(f"rates.{prefix}{field.name}", field.name, value)
        numbers = [node.node for node in self.nodes]
        if len(set(numbers)) < len(numbers):
            raise ConfigError("rates.nodes", numbers, "give each memory node once")

    def cpu_speed(self, beside_bytes_per_s: float) -> float:
        """Return the part of its rate alone that the CPU's update keeps beside other lanes.

        Args:
            beside_bytes_per_s: Memory traffic of the other lanes: the sum of rate times `memory_cost`.
        """
        return cpu_speed(self.cpu_bytes_per_s, self.memory_bytes_per_s, beside_bytes_per_s)

    def fastest_first(self, numbers: Iterable[int]) -> list[int]:
        """Return the numbers of these memory nodes, the fastest node first.

        Nodes are compared by the rate of updates, then by the sum of what reads and writes reach.

        Raises:
            ConfigError: A node has no rates; names it.
        """
        wanted = sorted(numbers)  # equally fast nodes stay in this order
        if len(wanted) < 2:  # no rates are needed
            return wanted
        rates_of = {rates.node: rates for rates in self.nodes}
        for number in wanted:
            if number not in rates_of:
                have = ", ".join(f"node{other}" for other in rates_of) or "no node"
                raise ConfigError("host_memory", f"node{number}", f"the rates have {have}; run `offload probe`")

        def speed(number: int) -> tuple[float, float]:
            rates = rates_of[number]
            return rates.update_bytes_per_s, rates.read_bytes_per_s + rates.write_bytes_per_s

        return sorted(wanted, key=speed, reverse=True)

    def slowness(self, among: Iterable[int]) -> dict[int, Slowness]:
        """Return how many times as long a byte takes on each of these nodes as on the fastest; by node.

        Nodes without rates are left out. A copy to the GPU or back is no faster than the GPU's link: a node that
        keeps up with the link counts as the fastest. A node copies no faster than cores read and write there, nor
        than its `link_bytes_per_s` if that is known.
        """
        numbers = set(among)
        nodes = [rates for rates in self.nodes if rates.node in numbers]
        if not nodes:
            return {}
        fastest_update = max(rates.update_bytes_per_s for rates in nodes)
        copies = {
            rates.node: min(rates.link_bytes_per_s or math.inf, rates.read_bytes_per_s, rates.write_bytes_per_s)
            for rates in nodes
        }
        gpu_link = min(self.gpu.h2d_bytes_per_s, self.gpu.d2h_bytes_per_s) if self.gpu.lanes else math.inf
        fastest_copy = min(max(copies.values()), gpu_link)
        return {
            rates.node: Slowness(
                update=fastest_update / rates.update_bytes_per_s,
                copy=max(1.0, fastest_copy / copies[rates.node]),  # below 1: the node is faster than the link
            )
            for rates in nodes
        }

    def shared_by(self, ranks: int) -> Rates:
        """Return the rates that one rank has if `ranks` of them share the machine; each has its own GPU and link.

        CPU, memory and paths are divided evenly. Memory traffic of a rank's link, both directions together, is
        limited to the rank's part of memory bandwidth.
        """
        paths = tuple(path.scaled(1 / ranks) for path in self.paths)
        cpu = self.cpu_bytes_per_s / ranks
        memory = self.memory_bytes_per_s / ranks
        gpu = self.gpu
        if gpu.memory_cost:  # else there is no GPU, or its copies take no memory bandwidth
            h2d, d2h = gpu.h2d_bytes_per_s, gpu.d2h_bytes_per_s
            # At its full rates, the link takes memory_cost * (h2d + d2h) bytes a second of memory bandwidth.
            share = min(1.0, memory / (gpu.memory_cost * (h2d + d2h)))
            most = memory / gpu.memory_cost  # of one direction, alone
            alone = {
                "h2d_alone": min(most, gpu.h2d_alone_bytes_per_s),
                "d2h_alone": min(most, gpu.d2h_alone_bytes_per_s),
            }
            gpu = gpu.reaching({"h2d": share * h2d, "d2h": share * d2h} | alone)
        return dataclasses.replace(self, cpu_bytes_per_s=cpu, memory_bytes_per_s=memory, paths=paths, gpu=gpu)

    def to_dict(self) -> dict[str, Any]:
        """Return all rates for JSON, without those that are infinite or absent."""
        # The values that say "absent"; those of other fields are never left out.
        absent = {"gpu": NO_GPU, "memory_bytes_per_s": math.inf, "nodes": ()}
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if getattr(self, name) != absent.get(name)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rates:
        """Return rates from the result of `to_dict`.

        Raises:
            ConfigError: If a rate is missing, unknown, or not a usable number; names it.
        """
        top = dict(_checked_fields("rates", cls, values))
        for name, kind in (("paths", PathRates), ("nodes", NodeRates)):
            listed = top.get(name, ())
            if isinstance(listed, str | Mapping) or not hasattr(listed, "__iter__"):
                # Without its plural s: "path", "node".
                raise ConfigError(f"rates.{name}", listed, f"give a list with an object for each {name[:-1]}")
            top[name] = tuple(
                kind(**_checked_fields(f"rates.{name}[{n}]", kind, part)) for n, part in enumerate(listed)
            )
        gpu = top.get("gpu")
        top["gpu"] = NO_GPU if gpu is None else GpuRates(**_checked_fields("rates.gpu", GpuRates, gpu))
        return cls(**top)


_MAY_BE_ZERO = (
    "latency_s",
    "memory_cost",
    "read_alone_bytes_per_s",
    "write_alone_bytes_per_s",
    "h2d_alone_bytes_per_s",
    "d2h_alone_bytes_per_s",
    "memory_bytes",
    "compute_flops_per_s",
    "reaction_s",
    "operation_s",
    "begin_s",
    "call_s",
    "link_bytes_per_s",
)


def _check(name: str, field: str, value: object) -> None:
    """Raise `ConfigError` unless the value of a field is usable.

    Most fields have to be finite and greater than 0; those in `_MAY_BE_ZERO` may be 0. A memory bandwidth may be
    infinite, which says that it is unknown.

    Args:
        name: What the message calls the field, with what it belongs to: "rates.paths[0].latency_s".
        field: The field's name alone.
        value: Its value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(name, value, "give a number")
    if field == "node":
        if not (isinstance(value, int) and 0 <= value < MAX_NODES):
            raise ConfigError(name, value, f"give the number of a memory node, below {MAX_NODES}")
    elif field in _MAY_BE_ZERO:
        if not 0 <= value <= _MOST:
            raise ConfigError(name, value, f"give a finite number from 0 to {_MOST:g}")
    elif not _LEAST <= value <= _MOST and not (field == "memory_bytes_per_s" and value == math.inf):
        raise ConfigError(name, value, f"give a finite number greater than 0, from {_LEAST:g} to {_MOST:g}")


def _checked_fields(name: str, kind: type[Any], values: object) -> Mapping[str, Any]:
    """Return `values`, which a dataclass is to be made of; raise `ConfigError` if a field is unknown or missing.

    `name` is what messages call them, as in "rates.gpu". The values themselves are checked later, by `_check`.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(name, values, "give an object with rates by name")
    fields = dataclasses.fields(kind)
    names = [field.name for field in fields]
    for key in values:
        if key not in names:
            raise ConfigError(f"{name}.{key}", values[key], f"unknown; known are {', '.join(names)}")
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ConfigError(f"{name}.{field.name}", MISSING, "measure it")
    return values
