"""`offload machine`: a machine described in words, as rates and as a rates file; `offload plan` takes the same words.

"Words" are the command's options: --gpu rtx-4090, --host 64GiB. What they leave open is assumed, and each assumption
is told: a described machine has the rates that its data sheets promise, a measured one (`offload probe`) those that
it keeps.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from offload.cli.probe import gpu_of
from offload.cli.values import add_output, add_value, parse_count, parse_output, tell
from offload.config import MAX_THREADS, parse_bytes
from offload.errors import MISSING, ConfigError
from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.measure import RatesFile
    from offload.plan import GpuRates, Rates

GB = 10**9
WORDS = ("gpu", "link", "host", "drive", "cores")
"""The options that describe a machine."""
MOST_GPUS, MOST_DRIVES = 64, 64

LINK_FRACTION, FLOPS_FRACTION = 0.7, 0.4
"""Fractions of what data sheets promise that are reached; `_SOURCES` says where they are from."""
CORE_BYTES_PER_S = 10.6e9
USUAL_MEMORY_BYTES_PER_S = 51.2e9
USUAL_GPU_BYTES_PER_S = 360e9
USUAL_CORES = 8
PCIE_BYTES_PER_S = {3: 15.75e9, 4: 31.5e9, 5: 63e9}  # each way over 16 lanes, by generation
USUAL_PCIE = 4
CALL_S, OPERATION_S = 10e-6, 100e-6
"""Seconds of `GpuRates.call_s` and `Rates.operation_s`, assumed of every described machine."""

STAND_IN = "/mnt/drive"
"""Name of a path that nobody has named, before its number."""

_SOURCES = {
    "link": "70% of what PCIe x16 moves each way: DeepSpeed's copies reach 70% on nodes with A100 and 67% with H100, "
    "fitted by bench/published.py on Deep Optimizer States (Middleware '24, arXiv 2410.21316)",
    "flops": "40% of the data sheet's dense 16-bit products with sums in fp32: Llama 3 405B reached 38% to 43% "
    "(arXiv 2407.21783, table 4)",
    "update": "memory bandwidth: an update of 12 bytes of state moves 28, so this is an upper bound",
    "cores": "10.6e9 bytes of state a second and core (bench/reports, kernel: 2 server cores, bound by memory), and "
    "no more than the host's memory moves",
    "call": "about what is published of single calls: cudaMemcpyAsync 5 to 7 us (DualPath, arXiv 2602.21548, section "
    "5.2), a launch of a compiled Triton kernel 9 us (GB200, vllm-project/vllm#34838)",
    "operation": "CPU time of our engine's thread on a virtual server core: 0.08 to 0.2 ms for an operation",
}
"""Where assumed figures are from: texts for the "source" of a rates file."""


@dataclass(frozen=True, slots=True)
class Card:
    """What the data sheet of a GPU says.

    Attributes:
        name: As its maker writes it.
        memory_bytes: Size of its memory.
        bytes_per_s: Bandwidth of that.
        flops_per_s: Dense 16-bit products with sums in fp32.
        pcie: Generation of its 16 PCIe lanes.
        source: Where that stands.
    """

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    pcie: int
    source: str


_GIB = 1 << 30
CARDS = {
    "rtx-3080": Card("RTX 3080", 10 * _GIB, 760e9, 59.5e12, 4, "NVIDIA Ampere GA102 white paper, quoted by reviews"),
    "rtx-3090": Card("RTX 3090", 24 * _GIB, 936e9, 71e12, 4, "NVIDIA Ampere GA102 white paper, quoted by reviews"),
    "rtx-4070": Card("RTX 4070", 12 * _GIB, 504e9, 58.2e12, 4, "NVIDIA's figures, quoted by club386.com"),
    "rtx-4080": Card("RTX 4080", 16 * _GIB, 717e9, 97.5e12, 4, "NVIDIA's figures, quoted by holynerdvana.com"),
    "rtx-4090": Card("RTX 4090", 24 * _GIB, 1008e9, 165.2e12, 4, "NVIDIA Ada white paper, quoted by waredb.com"),
    "rtx-5090": Card("RTX 5090", 32 * _GIB, 1792e9, 209.5e12, 5, "NVIDIA Blackwell white paper, quoted by reviews"),
    "a40": Card("A40", 48 * _GIB, 696e9, 149.7e12, 4, "NVIDIA A40 data sheet, copied by ecer.com"),
    "a6000": Card("RTX A6000", 48 * _GIB, 768e9, 154.8e12, 4, "NVIDIA RTX A6000 data sheet, quoted by llmperf.net"),
    "l40s": Card("L40S", 48 * _GIB, 864e9, 362.05e12, 4, "NVIDIA L40S data sheet, copied by mullet.se"),
    "a100-40": Card("A100 40GB", 40 * GB, 1555e9, 312e12, 4, "NVIDIA A100 data sheet, quoted by glennklockwood.com"),
    "a100-80": Card("A100 80GB", 80 * GB, 2039e9, 312e12, 4, "NVIDIA A100 data sheet, quoted by glennklockwood.com"),
    "h100": Card("H100 SXM", 80 * GB, 3350e9, 989e12, 5, "NVIDIA H100 data sheet, copied by hpctech.co.jp"),
    "h200": Card("H200 SXM", 141 * GB, 4800e9, 989e12, 5, "NVIDIA H200 data sheet, quoted by aiwiki.ai"),
}
"""GPUs that `--gpu` knows by name. Sizes are those that the driver offers at most.

Products are dense, with sums in fp32: for the RTX 3090 half of 142e12 with sums in fp16, for the RTX 5090 and 4080 a
quarter of 838e12 and 390e12 that are sparse with sums in fp16, for the H100 and H200 half of the 1979e12 that are
sparse. Of the RTX 3080 and 4070 they are twice what is quoted of products in fp32 (29.8e12, 29.1e12), as of the RTX
3090 and 4090.
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a host or a GPU, as words give it.

    Attributes:
        nbytes: Its size.
        bytes_per_s: Its bandwidth; None where it was not given.
    """

    nbytes: int
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one kind: a known card, or memory alone."""

    count: int
    card: Card | None
    memory: Memory


@dataclass(frozen=True, slots=True)
class Drive:
    """A drive: what it reads and writes a second while it does nothing else, and its size."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    nbytes: int


def add_machine_options(options: Any) -> None:
    """Declare the options that describe a machine."""
    cards = ", ".join(CARDS)
    gpu = f'memory of its GPU, as "24GiB", "1TB/s:24GiB" with its bandwidth, or a card: {cards}; several as "8xh100"'
    add_value(options, "--gpu", _parse_gpus, gpu, metavar="GPU")
    add_value(options, "--link", parse_speed, "what the link to each GPU moves, each way: 25GB/s", metavar="SPEED")
    host = 'host memory, as "64GiB", or "80GB/s:64GiB" with its bandwidth'
    add_value(options, "--host", _parse_memory, host, metavar="[SPEED:]SIZE")
    drive = "drives for state: 3.5GB/s:2TB for each; 7GB/s,5GB/s:2TB for one that reads and writes at other speeds"
    add_value(options, "--drive", _parse_drive, drive, metavar="SPEED[,SPEED]:SIZE", nargs="+", default=[])
    add_value(options, "--cores", _parse_cores, f"CPU cores (default: {USUAL_CORES})")


def is_described(arguments: argparse.Namespace) -> bool:
    """Return whether any option that describes a machine (`WORDS`) is given."""
    return any(getattr(arguments, word) not in (None, []) for word in WORDS)


def parse_speed(field: str, value: str) -> float:
    """Return the bytes a second of a speed such as "3.5GB/s".

    Raises:
        ConfigError: It is none.
    """
    advice = 'give bytes a second, such as "3.5GB/s" (a network\'s 25 Gb/s are "3.125GB/s")'
    size, slash, unit = value.strip().rpartition("/")
    if not slash or unit.lower() != "s":
        raise ConfigError(field, value, advice)
    try:
        speed = parse_bytes(field, size)
    except ConfigError as error:
        raise ConfigError(field, value, advice) from error
    if not speed:
        raise ConfigError(field, value, "give more than 0 bytes a second")
    return float(speed)


def _parse_size(field: str, value: str) -> int:
    """Return the bytes of a size that is not 0."""
    size = parse_bytes(field, value)
    if not size:
        raise ConfigError(field, value, "give more than 0 bytes")
    return size


def _check_order(field: str, value: str) -> None:
    """Refuse "SIZE:SPEED", which is to be written as "SPEED:SIZE"; only a speed has a slash, as in "80GB/s"."""
    size, colon, speed = value.partition(":")
    if colon and "/" in speed and "/" not in size:
        raise ConfigError(
            field, value, f'put the speed before the size, SPEED:SIZE: "{speed.strip()}:{size.strip()}"'
        )


def _parse_memory(field: str, value: str) -> Memory:
    """Return what "64GiB" or "80GB/s:64GiB" says."""
    _check_order(field, value)
    speed, colon, size = value.rpartition(":")
    return Memory(_parse_size(field, size), parse_speed(field, speed) if colon else None)


def _parse_gpus(field: str, value: str) -> Gpus:
    """Return what "8xh100", "24GiB" or "1TB/s:24GiB" says: a card that is known by name, or a size of memory.

    Names are compared without spaces, dashes and the maker's name. The error about an unknown name suggests a card
    whose name is similar.
    """
    counted = re.fullmatch(r"\s*(\d{1,9})\s*x\s*(.*)", value, re.ASCII | re.IGNORECASE)
    count = parse_count(field, counted[1], most=MOST_GPUS) if counted else 1
    name = (counted[2] if counted else value).strip()
    plain = re.sub(r"nvidia|geforce|[\s_-]+", "", name.lower())  # "NVIDIA GeForce RTX 4090": rtx4090
    cards = {known.replace("-", ""): known for known in CARDS}
    if plain in cards:
        card = CARDS[cards[plain]]
        return Gpus(count, card=card, memory=Memory(card.memory_bytes, card.bytes_per_s))
    similar = [cards[known] for known in difflib.get_close_matches(plain, cards, n=1, cutoff=0.7)]
    if re.match(r"[\d.]", name):  # a size, or a card's name that begins with a digit
        try:
            return Gpus(count, card=None, memory=_parse_memory(field, name))
        except ConfigError:
            if not similar:
                raise
    guess = f"did you mean {similar[0]}? " if similar else ""
    assumes = 'its bandwidth is then assumed ("1TB/s:24GiB" says it), and its FLOP/s are unknown (--flops)'
    advice = f'{guess}name a card ({", ".join(CARDS)}) or its memory, such as "24GiB": {assumes}'
    raise ConfigError(field, value, advice)


def _parse_drive(field: str, value: str) -> Drive:
    """Return what "3.5GB/s:2TB" or "7GB/s,5GB/s:2TB" says."""
    _check_order(field, value)
    speeds, colon, size = value.rpartition(":")
    if not colon:
        raise ConfigError(field, value, 'give its speed and size, such as "3.5GB/s:2TB"')
    read, comma, write = speeds.partition(",")
    read_bytes_per_s = parse_speed(field, read)
    write_bytes_per_s = parse_speed(field, write) if comma else read_bytes_per_s
    return Drive(read_bytes_per_s, write_bytes_per_s, _parse_size(field, size))


def _parse_cores(field: str, value: str) -> int:
    """Return a number of CPU cores."""
    return parse_count(field, value, most=MAX_THREADS)


def described(arguments: argparse.Namespace) -> RatesFile:
    """Return the rates file of a machine that the options of `add_machine_options` describe.

    What they leave open is assumed: `warnings` says what, and `source` where each figure is from.

    Raises:
        ConfigError: --host is missing, for which nothing is assumed, or options do not go together.
    """
    from offload.formats import EXACT
    from offload.measure import RatesFile
    from offload.plan import NO_GPU, PathRates, Rates
    from offload.plan.rates import UPDATE_MEMORY_COST

    host, gpus, drives = arguments.host, arguments.gpu, arguments.drive
    if host is None:
        raise ConfigError("--host", MISSING, 'say how much host memory there is, such as "64GiB"')
    if arguments.link is not None and gpus is None:
        raise ConfigError("--link", f"{format_bytes(arguments.link)}/s", "describe the GPU, too: --gpu 24GiB")
    if len(drives) > MOST_DRIVES:
        raise ConfigError("--drive", len(drives), f"give {MOST_DRIVES} at most")
    notes = _Notes(source={}, assumed=[])
    cores = arguments.cores
    if cores is None:
        cores = USUAL_CORES
        notes.assumed.append(f"{USUAL_CORES} cores (--cores)")
    memory_bytes_per_s = notes.given_or_usual(
        "memory_bytes_per_s",
        host.bytes_per_s,
        USUAL_MEMORY_BYTES_PER_S,
        why="assumed: two channels of DDR4-3200",
        text=f"{USUAL_MEMORY_BYTES_PER_S / GB:g} GB/s of host memory (--host 80GB/s:64GiB)",
    )
    notes.source["cpu_bytes_per_s"] = _SOURCES["cores"]
    notes.source["operation_s"] = _SOURCES["operation"]
    gpu = NO_GPU
    flops_per_s = 0.0
    gpu_name = None
    if gpus is not None:
        gpu = _gpu_rates(gpus, arguments.link, notes)
        has_flops = getattr(arguments, "flops", None) is not None  # an option of `plan` alone
        flops_per_s = _flops_per_s(gpus.card, notes, is_given=has_flops)
        # `_gpu_count_of` reads the count from this text.
        gpu_name = f"{gpus.count} x {gpus.card.name if gpus.card else format_bytes(gpus.memory.nbytes)}"
    # Assumed of all drives: both ways share one bandwidth. While both go on, each has half of its speed alone.
    half = "half of what it does alone: one bandwidth for both ways"
    for number, way in itertools.product(range(len(drives)), ("read", "write")):
        notes.source[f"paths[{number}].{way}_bytes_per_s"] = half
        notes.source[f"paths[{number}].{way}_alone_bytes_per_s"] = "given"
    rates = Rates(
        # `UPDATE_MEMORY_COST`: bytes that an update moves in memory for each byte of state.
        cpu_bytes_per_s=min(cores * CORE_BYTES_PER_S, memory_bytes_per_s / UPDATE_MEMORY_COST),
        paths=tuple(
            PathRates(
                read_bytes_per_s=drive.read_bytes_per_s / 2,
                write_bytes_per_s=drive.write_bytes_per_s / 2,
                read_alone_bytes_per_s=drive.read_bytes_per_s,
                write_alone_bytes_per_s=drive.write_bytes_per_s,
            )
            for drive in drives
        ),
        gpu=gpu,
        memory_bytes_per_s=memory_bytes_per_s,
        compute_flops_per_s=flops_per_s,
        operation_s=OPERATION_S,
    )
    return RatesFile(
        rates=rates,
        cpu_bytes_per_s={EXACT: {0: rates.cpu_bytes_per_s}},  # 0: for no known number of threads
        machine={"cpu": f"{cores} cores", "cores": cores, "memory_bytes": host.nbytes, "gpu": gpu_name},
        paths=tuple({"path": f"{STAND_IN}{number}", "bytes": drive.nbytes} for number, drive in enumerate(drives)),
        warnings=(f"a machine in words; assumed: {'; '.join(notes.assumed)}",) if notes.assumed else (),
        source=notes.source,
    )


@dataclass(frozen=True, slots=True)
class _Notes:
    """Notes on the figures of a described machine, added to as its rates are made.

    Attributes:
        source: Where each figure is from, by its name in `Rates`, such as "gpu.h2d_bytes_per_s".
        assumed: What was assumed, each with the option that would say it.
    """

    source: dict[str, str]
    assumed: list[str]

    def given_or_usual(self, name: str, given: float | None, usual: float, *, why: str, text: str) -> float:
        """Return a speed that was given, or else the usual one, and note where it is from.

        Args:
            name: The figure's name in `source`.
            given: Bytes a second; None if nothing was given.
            usual: What is assumed then.
            why: Where the usual speed is from, for `source`.
            text: The assumption in words, for `assumed`.
        """
        if given is not None:
            self.source[name] = f"given: {format_bytes(given)}/s"
            return given
        self.source[name] = why
        self.assumed.append(text)
        return usual


def _gpu_rates(gpus: Gpus, link: float | None, notes: _Notes) -> GpuRates:
    """Return the rates of a described GPU, and note where they are from. `link`: bytes a second each way, or None."""
    from offload.plan import GpuRates
    from offload.plan.rates import UPDATE_MEMORY_COST

    memory_source = gpus.card.source if gpus.card else "given"
    gpu_bytes_per_s = gpus.memory.bytes_per_s
    if gpu_bytes_per_s is None:
        gpu_bytes_per_s = USUAL_GPU_BYTES_PER_S
        notes.assumed.append(f"{USUAL_GPU_BYTES_PER_S / GB:g} GB/s of GPU memory (--gpu 1TB/s:24GiB)")
        memory_source = "assumed: as an RTX 3060 has"
    pcie = gpus.card.pcie if gpus.card else USUAL_PCIE
    usual_link = LINK_FRACTION * PCIE_BYTES_PER_S[pcie]
    text = f"a link of {usual_link / GB:.3g} GB/s each way (--link)"
    link = notes.given_or_usual("gpu.h2d_bytes_per_s", link, usual_link, why=_SOURCES["link"], text=text)
    notes.source["gpu.d2h_bytes_per_s"] = notes.source["gpu.h2d_bytes_per_s"]  # one speed is given for both ways
    notes.source["gpu.update_bytes_per_s"] = f"{memory_source}; {_SOURCES['update']}"
    notes.source["gpu.call_s"] = _SOURCES["call"]
    notes.source["gpu.memory_bytes"] = gpus.card.source if gpus.card else "given"
    return GpuRates(
        update_bytes_per_s=gpu_bytes_per_s / UPDATE_MEMORY_COST,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        memory_bytes=gpus.memory.nbytes,
        call_s=CALL_S,
    )


def _flops_per_s(card: Card | None, notes: _Notes, *, is_given: bool) -> float:
    """Return the FLOP/s that forward and backward reach on a card, 0 if it is unknown; note where they are from."""
    if card is None:
        return 0.0
    flops_per_s = FLOPS_FRACTION * card.flops_per_s
    notes.source["compute_flops_per_s"] = f"{card.source}; {_SOURCES['flops']}"
    if not is_given:  # else --flops takes its place, and nothing is assumed
        notes.assumed.append(f"{flops_per_s / 1e12:.3g} TFLOP/s of each GPU in forward and backward (--flops)")
    return flops_per_s


_EPILOG = """\
examples:
  offload machine --gpu rtx-4090 --host 64GiB --drive 7GB/s,5GB/s:2TB --cores 16 --out desktop.json
  offload machine --gpu 24GiB --link 25GB/s --host 60GB/s:64GiB --cores 16
  offload plan --model llama-8b --rates desktop.json

`offload plan` takes the same words, without a file. The file's "source" says where each figure is from; figures may
be changed there. `offload probe` measures the machine that it runs on.
"""


_COUNTED = re.compile(r"\b(\d{1,6}) x ", re.ASCII)  # "4 x A100 40GB"


def _memory_bytes_of(file: RatesFile) -> int | None:
    """Return the bytes of a machine's host memory; None if its rates do not say."""
    nbytes = file.machine.get("memory_bytes")
    return None if nbytes is None else parse_bytes("machine.memory_bytes", nbytes)


def _gpu_count_of(file: RatesFile) -> int | None:
    """Return the number of a machine's GPUs; None if its rates do not say."""
    gpu = file.machine.get("gpu")  # in words, "4 x A100 40GB", of several kinds with commas between
    return sum(int(count) for count in _COUNTED.findall(gpu)) if isinstance(gpu, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Nodes, all alike, and their ranks.

    Attributes:
        rates: The rates of a node. In a `Scenario` the CPU's rate is that for the formats of the model's state.
        nodes: Number of nodes.
        ranks: Number of ranks on each node.
        memory_bytes: Host memory of a node; None if that is not known.
        gpus: Number of GPUs of a node; None if that is not known.
        file: The rates file that the rates are from; None if only they are known.
        in_words: Whether the command's options describe it, so that advice names these options.
    """

    rates: Rates
    nodes: int = 1
    ranks: int = 1
    memory_bytes: int | None = None
    gpus: int | None = None
    file: RatesFile | None = None
    in_words: bool = False

    @property
    def all_ranks(self) -> int:
        """Ranks of all nodes: each has its part of the model's state."""
        return self.nodes * self.ranks

    @property
    def advice(self) -> Mapping[str, str]:
        """What `offload plan` says to somebody who lacks memory, GPUs or drives: the change, and the option for it.

        Of drives it is the noun alone: "without" or "have" stands before it.
        """
        if self.in_words:
            return {
                "memory": "have more host memory (--host)",
                "gpus": "use more GPUs, with a rank for each (--gpu 2x...)",
                "drives": "a drive for state (--drive)",
            }
        return {
            "memory": "have more host memory (--node-memory says how much a node has)",
            "gpus": "use more GPUs, with a rank for each (--ranks; --gpus says how many a node has)",
            "drives": "a path for state (other --rates)",
        }

    def _path(self, number: int) -> Mapping[str, Any]:
        """Return what the rates file says about a path; empty if nothing."""
        known = self.file.paths if self.file else ()
        return known[number] if number < len(known) else {}

    def path_label(self, number: int) -> str:
        """Return what the rates call a path: where it is, or words such as "NVMe of the node"; "" for nothing."""
        return str(self._path(number).get("path", ""))

    def path_name(self, number: int) -> str:
        """Return a path's name for people: "path 0", with its label if there is one. Lanes have the same number."""
        place = self.path_label(number)
        return f"path {number} ({place})" if place else f"path {number}"

    def path_place(self, number: int) -> str:
        """Return the directory or bucket of a path, to be pasted into settings.

        Where the rates name neither ("NVMe of the node", or nothing) it is a stand-in, such as "/mnt/drive0".
        """
        place = self.path_label(number)
        return place if os.path.isabs(place) or urlsplit(place).netloc else f"{STAND_IN}{number}"

    def path_bytes(self, number: int) -> int | None:
        """Return the size of a path, which all ranks of a node share; None where unknown."""
        nbytes = self._path(number).get("bytes")
        return None if nbytes is None else parse_bytes("paths.bytes", nbytes)


def machine_of(arguments: argparse.Namespace) -> Machine:
    """Return the machine that `offload plan` is asked about: its rates, overruled by further options.

    Raises:
        ConfigError: The machine cannot be found, or the options do not fit it.
    """
    from offload.plan import NO_GPU

    file = _file_of(arguments)
    rates = file.rates
    memory_bytes = _memory_bytes_of(file)
    if arguments.node_memory is not None:
        memory_bytes = arguments.node_memory
    gpus = _gpu_count_of(file) if arguments.gpus is None else arguments.gpus
    if arguments.gpus == 0 and rates.gpu.weights_on == "gpu":
        rates = replace(rates, gpu=NO_GPU, compute_flops_per_s=0.0)  # these FLOP/s are the GPU's
    if arguments.flops is not None:
        rates = replace(rates, compute_flops_per_s=arguments.flops)
    shared_paths = [text.partition("=")[0].strip() for text in arguments.shared_path]
    if len(set(shared_paths)) < len(shared_paths):
        raise ConfigError("--shared-path", ", ".join(shared_paths), "give each path once")
    for text in arguments.shared_path:
        rates = with_shared_path(rates, text, arguments.nodes)
    if arguments.path_count is not None:
        rates = _first_paths(rates, "--path-count", arguments.path_count)
    usual_ranks = gpus if gpus and is_described(arguments) else 1  # of a machine in words, one for each GPU
    return Machine(
        rates=rates,
        nodes=arguments.nodes,
        ranks=arguments.ranks or usual_ranks,
        memory_bytes=memory_bytes,
        gpus=gpus,
        file=file,
        in_words=is_described(arguments),
    )


def _file_of(arguments: argparse.Namespace) -> RatesFile:
    """Return the rates file of the machine: described in words, given by --rates, or of this machine if measured.

    Refuses the command line if there is none of these.
    """
    from offload.measure import default_rates_file, find_rates, has_default_rates, load_rates

    if is_described(arguments):
        if arguments.rates is not None:
            words = ", ".join(f"--{word}" for word in WORDS)
            raise ConfigError("--rates", arguments.rates, f"describe the machine in words ({words}) or give a file")
        return described(arguments)
    if arguments.rates is not None:
        return find_rates(arguments.rates)
    if not has_default_rates():
        arguments.refuse(
            "give the machine: in words (--host 64GiB --gpu 24GiB --drive 3.5GB/s:2TB --cores 16), by --rates FILE, "
            "or measure this one with `offload probe`"
        )
    return load_rates(default_rates_file())


def _first_paths(rates: Rates, field: str, value: str) -> Rates:
    """Return rates with the first paths alone, as many as `value` says; `field` is the option that said it."""
    known = len(rates.paths)
    count = parse_count(field, value, least=0, most=known, why=f"the rates know {known} paths: ")
    return replace(rates, paths=rates.paths[:count])


def with_shared_path(rates: Rates, text: str, nodes: int) -> Rates:
    """Return a node's rates where a path is one file system for all nodes, so that the node gets a share of it.

    Args:
        rates: What a node reaches by itself.
        text: As `--shared-path` takes it.
        nodes: How many use it, all alike.
    """
    name, equals, size = text.partition("=")
    why = f"the rates know {len(rates.paths)} paths, from 0: "
    number = parse_count("--shared-path", name, least=0, most=len(rates.paths) - 1, why=why)
    path = rates.paths[number]
    # Without a size: the file system moves for all nodes what one node was measured to reach.
    total = parse_bytes("--shared-path", size) if equals else path.each_way_bytes_per_s
    if not total:
        raise ConfigError("--shared-path", text, "give more than 0 bytes a second")
    # The factor of the path's rates: a node gets no more than it reaches by itself.
    share = min(1.0, total / nodes / path.each_way_bytes_per_s)
    paths = [*rates.paths]
    paths[number] = path.scaled(share)
    return replace(rates, paths=tuple(paths))


# The command


def add_parser(commands: Any) -> None:
    """Add the subcommand `machine` to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "machine",
        help="write the rates file of a machine that is described in words",
        description="Write the rates file of a machine that is described in words, for `offload plan --rates`.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_machine_options(parser)
    add_value(parser, "--out", parse_output, "rates file to write (default: none, the rates are only shown)")
    add_output(parser, "print the file's content on stdout, and nothing else there", "print nothing")


def run(arguments: argparse.Namespace) -> int:
    """Describe the machine, and write its file if one is named.

    Raises:
        OffloadError: A word cannot be used, or the file cannot be written.
    """
    if not is_described(arguments):
        arguments.refuse("describe a machine: --host 64GiB --gpu 24GiB --drive 3.5GB/s:2TB --cores 16")
    rates_file = described(arguments)
    lines = [describe(rates_file)]
    if arguments.out is not None:
        from offload.measure import save_rates

        save_rates(arguments.out, rates_file)
        lines.append(f"written to {arguments.out}")
    tell(arguments, rates_file.to_dict(), "\n".join(lines))
    return 0


def describe(found: RatesFile) -> str:
    """Return what is known of a described machine as lines of text: each figure with its source, then assumptions."""
    rates, machine = found.rates, found.machine
    lines = [f"{machine['cpu']}, {format_bytes(machine['memory_bytes'])} of memory, {gpu_of(machine)}"]
    lines += [f"  {name}: {value:.3g}  ({found.source[name]})" for name, value in _figures(rates.to_dict()).items()]
    return "\n".join([*lines, *found.warnings])


def _figures(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return all figures in nested `values` by their names in `source`, such as "paths[0].read_bytes_per_s".

    Zeros, which say nothing, are left out. `prefix` begins the names: that of the object which `values` is.
    """
    figures: dict[str, float] = {}
    for name, value in values.items():
        if name in ("memory_cost", "at_once"):  # 1, whatever the machine, and without a source
            continue
        if isinstance(value, Mapping):
            figures |= _figures(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                figures |= _figures(item, f"{prefix}{name}[{number}].")
        elif value:
            figures[f"{prefix}{name}"] = value
    return figures
