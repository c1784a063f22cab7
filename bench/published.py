"""Other people's measurements, predicted: fitted on some rows of published tables, tried on the others.

The tables (`bench/published/`, see the README there) hold measurements of three systems on nodes that we do not have:
updates shared by CPU and GPU (Deep Optimizer States), state streamed over two storage paths (MLP-Offload), and
DeepSpeed's offloading to DDR, to DDR and CXL, and to drives. `_schedules.py` runs those systems' schedules on our
simulator; state on memory nodes is planned and predicted as that of a session. Here the few constants of each
machine (rates, bandwidths, fixed costs) are fitted by least squares on relative errors, and errors are reported of
rows that were left out of the fit: each row, each stride, each model by itself. Last, what our planner would do with
these rates.

`--evaluate DIR` predicts the rows of tables of the same names and columns (any subset) with the constants fitted on
`--fit DIR`; what they measured is used for nothing but the error.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from _common import progress
from _harness import Option, Run, main, show
from _schedules import STATE_BYTES, Drive, Node, Streamed, exact_layout, interleaved_update_s, streamed_update

from offload.dtypes import DtypeCode
from offload.errors import ConfigError, OffloadError
from offload.layout import Layout, Parameter, build_layout
from offload.plan import Budgets, GpuRates, NodeBudget, NodeRates, PathBudget, PathRates, Plan, Rates, choose_plan
from offload.predict import predict

TABLES = Path(__file__).resolve().parent / "published"
SEQUENCE = 2048
GRADIENT_TRAFFIC_BYTES = 16
"""Memory traffic of a blocking copy of an fp32 gradient to pageable memory: 4 by DMA, 4 read, 8 to write 4."""

GPU_BYTES_PER_S = {"H100": 3.35e12, "A100": 1.555e12}
"""Memory bandwidth from the data sheets (H100 SXM 80 GB, A100 40 GB), which bounds the GPU's update."""

GPU_TRAFFIC_BYTES = 28
"""A GPU update of a parameter: state read and written, gradient read and weight written in 16 bits."""


# Fitting ------------------------------------------------------------------------------------------------------------


@dataclass
class Constant:
    """A constant of a machine.

    Attributes:
        start: Where the fit starts, and what an undetermined constant stays near.
        unit: Of the value.
        meaning: What it is, physically.
        most: What it cannot exceed.
        pull: Weight of the pull towards the start: how many parts of a row's residual a factor of e away costs.
    """

    start: float
    unit: str
    meaning: str
    most: float = math.inf
    pull: float = 0.01


def fit(
    constants: Mapping[str, Constant], residuals: Callable[[dict[str, float]], Sequence[float]], rounds: int
) -> dict[str, float]:
    """Return the constants with the least sum of squared residuals (Levenberg-Marquardt on their logarithms)."""
    names = list(constants)
    home = np.log([constants[name].start for name in names])
    most = np.log([constants[name].most for name in names])
    pull = np.array([constants[name].pull for name in names])

    def all_residuals(point: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        return np.concatenate([np.asarray(residuals(values)), pull * (point - home)])

    at, damping, small = home, 0.1, 2e-3
    found = all_residuals(at)
    for _ in range(rounds):
        slopes = np.array([(found - all_residuals(at - small * unit)) / small for unit in np.eye(len(names))]).T
        normal, downhill = slopes.T @ slopes, -slopes.T @ found
        before = found @ found
        for _ in range(5):
            move = np.linalg.solve(normal + damping * np.eye(len(names)), downhill)
            tried = np.minimum(at + np.clip(move, -0.5, 0.5), most)
            result = all_residuals(tried)
            if result @ result < before:
                at, found, damping = tried, result, damping / 8
                break
            damping *= 8
        if found @ found > before * (1 - 1e-5):
            break
    return dict(zip(names, np.exp(at).tolist(), strict=True))


def rms(errors: Iterable[float]) -> float | None:
    """Return the root of the mean square; None of nothing."""
    squares = [error * error for error in errors]
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def worst(errors: Iterable[float]) -> float | None:
    """Return the largest; None of nothing."""
    return max(map(abs, errors), default=None)


# Tables -------------------------------------------------------------------------------------------------------------


@dataclass
class Tables:
    """The rows of the tables in a directory.

    Attributes:
        rows: By file name, without the suffix.
        numels: Subgroup sizes by (testbed, model); for several storage paths by ("paths", model).
    """

    rows: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    numels: dict[tuple[str, str], list[int]] = field(default_factory=dict)


COLUMNS = {
    "interleaved_update_sweep": ("testbed", "model", "subgroups_per_rank", "params_per_rank", "stride_k"),
    "interleaved_iterations": (
        *("testbed", "model_B", "num_params", "subgroups_per_rank", "tp", "dp"),
        *("micro_batch", "global_batch", "cpu_ratio", "stride_k", "approach"),
    ),
    "interleaved_subgroup_numel": ("testbed", "model", "subgroup", "numel"),
    "multipath_iterations": ("model_B", "approach", "num_params", "ranks", "subgroups_per_rank", "slots_per_path"),
    "multipath_subgroup_numel": ("model_B", "subgroup", "numel_per_rank"),
    "multipath_subgroup_waits_52B": ("iter", "rank", "subgroup", "read_wait_s", "write_wait_s"),
    "cxl_runs": ("model_b", "num_params", "ranks", "memory", "run"),
}


def read_tables(folder: Path) -> Tables:
    """Read what tables there are.

    Raises:
        ConfigError: If there is none, or one lacks a column.
    """
    tables = Tables()
    for name, needed in COLUMNS.items():
        file = folder / f"{name}.csv"
        if not file.exists():
            continue
        with file.open(newline="", encoding="utf-8") as source:
            rows = list(csv.DictReader(source))
        for column in needed:
            if rows and column not in rows[0]:
                raise ConfigError(str(file), column, f"is missing; a table has {', '.join(needed)}")
        tables.rows[name] = rows
    if not tables.rows:
        raise ConfigError("directory", str(folder), f"give one with {', '.join(f'{name}.csv' for name in COLUMNS)}")
    for row in tables.rows.get("interleaved_subgroup_numel", []):
        tables.numels.setdefault((row["testbed"], row["model"]), []).append(_count(row, "numel"))
    for row in tables.rows.get("multipath_subgroup_numel", []):
        tables.numels.setdefault(("paths", _model(row["model_B"])), []).append(_count(row, "numel_per_rank"))
    return tables


def _model(billions: str) -> str:
    try:
        return f"{float(billions.removesuffix('B')):g}B"
    except ValueError:
        raise ConfigError("model_B", billions, "give billions of parameters, as in 13") from None


def _number(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column) or ""
    try:
        value = float(text) if text.strip() else None
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise ConfigError(column, text, f"give a number, in the row {dict(row)}")
    return value


def _needed(row: Mapping[str, str], column: str) -> float:
    value = _number(row, column)
    if value is None:
        raise ConfigError(column, row.get(column), f"give a number, in the row {dict(row)}")
    return value


def _count(row: Mapping[str, str], column: str, least: int = 1) -> int:
    value = _needed(row, column)
    if value < least or value != int(value):
        raise ConfigError(column, row[column], f"give a whole number of at least {least}, in the row {dict(row)}")
    return int(value)


def subgroup_numels(known: Sequence[Tables], where: str, model: str, count: int, numel: float) -> tuple[int, ...]:
    """Return a rank's subgroup sizes: as logged for this model with so many subgroups, else equal ones."""
    for tables in known:
        for (testbed, name), numels in sorted(tables.numels.items(), key=lambda item: item[0][0] != where):
            mine = (testbed == "paths") == (where == "paths")
            if mine and name == model and len(numels) == count and abs(sum(numels) / numel - 1) < 0.1:
                return tuple(numels)
    return (round(numel / count),) * count


# Interleaved updates ------------------------------------------------------------------------------------------------

NODE = {
    "update_params_per_s": Constant(2e9, "parameters/s", "CPU update of one rank, nothing else running"),
    "blocking_params_per_s": Constant(
        5e9, "parameters/s", "new weights to 16 bits and to the GPU, by blocking calls"
    ),
    "memory_bytes_per_s": Constant(2e11, "bytes/s", "memory bandwidth that the ranks of a node share"),
    "link_bytes_per_s": Constant(4e10, "bytes/s", "copies between host and GPU, one way at a time"),
    "gpu_subgroup_s": Constant(2e-3, "s", "launches and waits of a subgroup's turn on the GPU"),
}
LINK_PEAK = {"H100": 55e9, "A100": 25e9}
"""Measured by the systems' authors, one way."""

PEAK_FLOPS_PER_S = {"H100": 9.9e14, "A100": 3.12e14}
"""In bf16, from the data sheets; no forward pass of a whole model reaches more than 0.6 of it."""

FORWARD = {
    "forward_flops_per_s": Constant(1.6e14, "FLOP/s", "forward pass"),
    "micro_step_s": Constant(0.1, "s", "... besides, for each micro-step"),
    "tensor_parallel_s": Constant(2e-2, "s", "exchange of activations, for each sample and each other rank"),
}
BACKWARD = {
    "backward_forwards": Constant(3.1, "", "backward's computation, in forward passes (recomputing activations: 3)"),
    "gradient_params_per_s": Constant(1e10, "parameters/s", "asynchronous 16-bit gradients: what is not hidden"),
    "blocking_gradient_params_per_s": Constant(1.7e9, "parameters/s", "blocking fp32 gradients"),
}
OTHER = {
    "other_s": Constant(0.2, "s", "rest of an iteration"),
    "other_sample_s": Constant(0.06, "s", "... for each sample"),
    "other_rank_s": Constant(0.06, "s", "... for each other rank"),
}


def gpu_of(testbed: str) -> str:
    """Return the GPU of a testbed's name."""
    gpu = (testbed or "").rpartition("x")[2]
    if gpu not in GPU_BYTES_PER_S:
        raise ConfigError("testbed", testbed, f"known are {', '.join(GPU_BYTES_PER_S)}, with a count ('4xH100')")
    return gpu


def ranks_of(testbed: str) -> int:
    """Return how many ranks a testbed's name says, one for each GPU."""
    gpu_of(testbed)
    count, times, _ = testbed.rpartition("x")
    if times and not (count.isdecimal() and int(count)):
        raise ConfigError("testbed", testbed, "give how many GPUs, as in '4xH100'")
    return int(count) if times else 1


def node_constants(machine: str) -> dict[str, Constant]:
    """Return the constants of a machine's updates."""
    peak = LINK_PEAK[gpu_of(machine)]
    return NODE | {
        "link_bytes_per_s": dataclasses.replace(NODE["link_bytes_per_s"], start=0.9 * peak, most=peak, pull=0.1)
    }


def node_of(machine: str, values: Mapping[str, float]) -> Node:
    """Return a machine with these constants."""
    gpu_params_per_s = GPU_BYTES_PER_S[gpu_of(machine)] / GPU_TRAFFIC_BYTES
    return Node(**{name: values[name] for name in NODE}, gpu_params_per_s=gpu_params_per_s)


simulated_update_s = functools.lru_cache(maxsize=1 << 16)(interleaved_update_s)


@dataclass(frozen=True)
class Interleaved:
    """A row of either interleaved table, understood.

    Attributes:
        table: Name of its table.
        machine: What constants it is predicted with; see `campaign`.
        model: Name of the model.
        numels: Subgroup sizes of a rank.
        stride: Of the interleaving; 0 for none.
        ranks: Ranks of the node.
        cpu_ratio: Static share of subgroups at home on the CPU.
        row: The row.
    """

    columns: ClassVar = ("fwd_s", "bwd_s", "update_s", "iter_s")
    table: str
    machine: str
    model: str
    numels: tuple[int, ...]
    stride: int
    ranks: int
    cpu_ratio: float
    row: Mapping[str, str]

    @property
    def samples(self) -> float:
        """Samples that a rank works through in an iteration."""
        return _needed(self.row, "global_batch") / _needed(self.row, "dp")

    def step_s(self, values: Mapping[str, float]) -> float:
        """Return the seconds of its update."""
        node = node_of(self.machine, values)
        return simulated_update_s(node, self.numels, self.stride, self.ranks, self.cpu_ratio)

    def rest(self, values: Mapping[str, float]) -> tuple[float, float, float] | None:
        """Return the seconds of forward, of backward and the rest of an iteration; None where not known."""
        if self.table != "interleaved_iterations" or "forward_flops_per_s" not in values:
            return None
        return forward_s(self, values)[0], backward_s(self, values), other_s(self, values)


def campaign(testbed: str, ranks: int, micro_batch: float) -> str:
    """Return the machine that a row of whole iterations is about.

    The A100 nodes were measured in two campaigns: that of the stride sweep (4 ranks, one sample each), and another
    in which 4 ranks together got two thirds of the memory bandwidth. The table does not tell them apart but by the
    micro-batch.
    """
    if testbed == "A100" and ranks == 4 and micro_batch == 1:
        return "4xA100"
    return testbed


def interleaved_rows(tables: Tables, known: Sequence[Tables]) -> list[Interleaved]:
    """Return the rows of both interleaved tables."""
    found = []
    for row in tables.rows.get("interleaved_update_sweep", []):
        testbed, model, count = row["testbed"], row["model"], _count(row, "subgroups_per_rank")
        ranks = ranks_of(testbed)
        numels = subgroup_numels(known, testbed, model, count, _needed(row, "params_per_rank"))
        stride = _count(row, "stride_k", 0)
        found.append(Interleaved("interleaved_update_sweep", testbed, model, numels, stride, ranks, 1.0, row))
    for row in tables.rows.get("interleaved_iterations", []):
        model, count = _model(row["model_B"]), _count(row, "subgroups_per_rank")
        ranks = _count(row, "tp") * _count(row, "dp")
        machine = campaign(row["testbed"], ranks, _needed(row, "micro_batch"))
        gpu_of(machine)
        # num_params is what one tensor-parallel rank holds (params_per_rank divides by tp once more).
        numels = subgroup_numels(known, machine, model, count, _needed(row, "num_params") / _needed(row, "dp"))
        # `stride_k` stands in rows that do not interleave, too.
        stride = _count(row, "stride_k", 0) if row["approach"].startswith("dos-k") else 0
        table = "interleaved_iterations"
        ratio = _needed(row, "cpu_ratio")
        found.append(Interleaved(table, machine, model, numels, stride, ranks, ratio, row))
    return found


def fit_node(machine: str, rows: Sequence[Interleaved], rounds: int) -> dict[str, float]:
    """Return the constants of a machine's updates, fitted on these rows."""

    def residuals(values: dict[str, float]) -> list[float]:
        return [row.step_s(values) / _needed(row.row, "update_s") - 1 for row in rows]

    return fit(node_constants(machine), residuals, rounds)


def forward_s(row: Interleaved, values: Mapping[str, float]) -> tuple[float, float]:
    """Return the seconds of a forward pass, and the part of them that is computation."""
    params = _needed(row.row, "num_params")
    compute_s = 2 * params * row.samples * SEQUENCE / values["forward_flops_per_s"]
    exchange_s = values["tensor_parallel_s"] * row.samples * (_needed(row.row, "tp") - 1)
    besides_s = values["micro_step_s"] * row.samples / _needed(row.row, "micro_batch")
    return compute_s + exchange_s + besides_s, compute_s + exchange_s


def backward_s(row: Interleaved, values: Mapping[str, float]) -> float:
    """Return the seconds of a backward pass, gradients to the host included."""
    params = _needed(row.row, "num_params") / _needed(row.row, "dp")
    cost_s = 1 / values["gradient_params_per_s"]
    if not row.row["approach"].startswith("dos"):
        shared_s = GRADIENT_TRAFFIC_BYTES * row.ranks / values["memory_bytes_per_s"]
        cost_s += max(1 / values["blocking_gradient_params_per_s"], shared_s)
    return values["backward_forwards"] * forward_s(row, values)[1] + params * cost_s


def other_s(row: Interleaved, values: Mapping[str, float]) -> float:
    """Return the seconds of an iteration outside forward, backward and update."""
    return values["other_s"] + values["other_sample_s"] * row.samples + values["other_rank_s"] * (row.ranks - 1)


ODD = 0.15
"""Rows of whole iterations that are further off count little: some are not what their labels say."""


def fit_iterations(machine: str, rows: Sequence[Interleaved], values: Mapping[str, float]) -> dict[str, float]:
    """Return a machine's constants with those of forward and backward, fitted on these rows of whole iterations."""
    values = dict(values)
    if not rows:
        return values

    def relative(
        predict: Callable[[Interleaved, Mapping[str, float]], float], measured: Callable[[Mapping[str, str]], float]
    ) -> Callable[[dict[str, float]], list[float]]:
        known = dict(values)

        def residuals(tried: dict[str, float]) -> list[float]:
            logs = [math.log(predict(row, known | tried) / measured(row.row)) for row in rows]
            return [ODD * math.atan(log / ODD) for log in logs]

        return residuals

    def rest_s(row: Mapping[str, str]) -> float:
        return _needed(row, "iter_s") - sum(_needed(row, f"{name}_s") for name in ("fwd", "bwd", "update"))

    peak = PEAK_FLOPS_PER_S[gpu_of(machine)]
    flops = dataclasses.replace(FORWARD["forward_flops_per_s"], start=0.5 * peak, most=0.6 * peak)
    forward = FORWARD | {"forward_flops_per_s": flops}
    values |= fit(forward, relative(lambda row, v: forward_s(row, v)[0], lambda row: _needed(row, "fwd_s")), 40)
    values |= fit(BACKWARD, relative(backward_s, lambda row: _needed(row, "bwd_s")), 40)
    values |= fit(OTHER, relative(other_s, rest_s), 40)
    return values


# Several storage paths ----------------------------------------------------------------------------------------------

RANKS_PER_NODE = 4
PATHS = {
    "nvme_read_bytes_per_s": Constant(1.2e10, "bytes/s", "NVMe of the node, reading only"),
    "nvme_write_bytes_per_s": Constant(6e9, "bytes/s", "NVMe, writing only"),
    "nvme_mixed_bytes_per_s": Constant(6e9, "bytes/s", "NVMe, reads and writes together, their sum"),
    "remote_read_bytes_per_s": Constant(5e9, "bytes/s", "network file system, reading only"),
    "remote_write_bytes_per_s": Constant(4e9, "bytes/s", "network file system, writing only"),
    "remote_mixed_bytes_per_s": Constant(3e9, "bytes/s", "network file system, their sum"),
    "cpu_params_per_s": Constant(5.6e9, "parameters/s", "CPU update of one rank"),
}
PATHS_REST = {
    "forward_params_per_s": Constant(9e10, "parameters/s", "forward pass"),
    "backward_params_per_s": Constant(2.4e10, "parameters/s", "backward pass without gradient traffic"),
    "gradient_write_bytes_per_s": Constant(7e9, "bytes/s", "fp32 gradients to NVMe in the backward pass"),
    "other_params_per_s": Constant(1e11, "parameters/s", "rest of an iteration"),
}


@dataclass(frozen=True)
class Paths:
    """A row of the table of several storage paths, understood; `multi` says which system."""

    table: ClassVar[str] = "multipath_iterations"
    columns: ClassVar = Interleaved.columns
    machine: ClassVar[str] = "storage paths of the 4xH100 nodes"
    model: str
    numels: tuple[int, ...]
    ranks: int
    multi: bool
    cached: int
    row: Mapping[str, str]

    def streamed(self, values: Mapping[str, float]) -> Streamed:
        """Return the update as one rank sees it."""
        ranks = min(self.ranks, RANKS_PER_NODE)
        nvme, remote = (
            Drive(*(values[f"{name}_{way}_bytes_per_s"] / ranks for way in ("read", "write", "mixed")))
            for name in ("nvme", "remote")
        )
        count = len(self.numels)
        cpu = values["cpu_params_per_s"]
        if not self.multi:
            return streamed_update(self.numels, [range(count)], [nvme], cpu, 0, read_scale=16 / 12)
        members = [[n for n in range(count) if n % 3], list(range(0, count, 3))]
        return streamed_update(self.numels, members, [nvme, remote], cpu, self.cached)

    def step_s(self, values: Mapping[str, float]) -> float:
        """Return the seconds of its update."""
        return self.streamed(values).update_s

    def rest(self, values: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the seconds of forward, of backward and of the rest of an iteration."""
        params = _needed(self.row, "num_params")
        backward_s = params / values["backward_params_per_s"]
        if not self.multi:
            backward_s += 4 * params / values["gradient_write_bytes_per_s"]
        return params / values["forward_params_per_s"], backward_s, params / values["other_params_per_s"]


def paths_rows(tables: Tables, known: Sequence[Tables]) -> list[Paths]:
    """Return the rows of the table of several storage paths."""
    found = []
    for row in tables.rows.get("multipath_iterations", []):
        model, count, ranks = (_model(row["model_B"]), _count(row, "subgroups_per_rank"), _count(row, "ranks"))
        numels = subgroup_numels(known, "paths", model, count, _needed(row, "num_params") / ranks)
        multi = not row["approach"].startswith("zero3")
        cached = int(_number(row, "slots_per_path") or 0) if multi else 0
        found.append(Paths(model, numels, ranks, multi, cached, row))
    return found


def mean_waits(tables: Tables) -> list[float]:
    """Return the mean wait of a rank before each subgroup of the 52B model, in the order of processing."""
    turns: dict[int, list[float]] = {}
    seen: dict[tuple[str, str], int] = {}
    for row in tables.rows.get("multipath_subgroup_waits_52B", []):
        who = (row["iter"], row["rank"])
        turn = seen[who] = seen.get(who, -1) + 1
        turns.setdefault(turn, []).append(_needed(row, "read_wait_s") + _needed(row, "write_wait_s"))
    return [sum(waits) / len(waits) for _, waits in sorted(turns.items())]


WAIT_GROUP = 6
"""Waits are compared by sums over so many subgroups: who waits for whom within is a matter of chance."""


def fit_paths(rows: Sequence[Paths], waits_s: Sequence[float], rounds: int) -> dict[str, float]:
    """Return the constants of the storage paths, fitted on updates and, where known, on waits."""
    logged = next((row for row in rows if row.multi and len(row.numels) == len(waits_s)), None)

    def sums(waits: Sequence[float]) -> list[float]:
        return [sum(waits[n : n + WAIT_GROUP]) for n in range(0, len(waits), WAIT_GROUP)]

    def residuals(values: dict[str, float]) -> list[float]:
        streamed = {id(row): row.streamed(values) for row in rows}
        found = []
        for row in rows:
            found.append(streamed[id(row)].update_s / _needed(row.row, "update_s") - 1)
            compute_s = _number(row.row, "rank_compute_s")
            if compute_s:
                found.append(0.1 * (sum(row.numels) / values["cpu_params_per_s"] / compute_s - 1))
        if logged is not None:
            ours, theirs = sums(streamed[id(logged)].waits_s), sums(waits_s)
            scale = sum(theirs) / len(theirs) * math.sqrt(len(theirs)) * 5
            found += [(a - b) / scale for a, b in zip(ours, theirs, strict=True)]
        return found

    return fit(PATHS, residuals, rounds) | fit_rest(rows, PATHS_REST)


def fit_rest(rows: Sequence[Paths | Memory], constants: Mapping[str, Constant]) -> dict[str, float]:
    """Return the constants of an iteration besides the step, fitted on these rows."""

    def residuals(tried: dict[str, float]) -> list[float]:
        found = []
        for row in rows:
            measured = [_needed(row.row, name) for name in row.columns]
            predicted = row.rest(tried)
            found += [predicted[n] / measured[n] - 1 for n in range(2)]
            found.append((predicted[2] - (measured[3] - sum(measured[:3]))) / measured[1])
        return found

    return fit(constants, residuals, 40)


# Kinds of memory ----------------------------------------------------------------------------------------------------

DDR, CXL, DRIVES = "ddr", "ddr+cxl", "nvme"
MEMORY = {
    "ddr_params_per_s": Constant(5e9, "parameters/s", "CPU update of all ranks, state in DDR"),
    "cxl_params_per_s": Constant(1.5e9, "parameters/s", "... in CXL memory"),
    "ddr_params": Constant(4e10, "parameters", "whose state finds room in DDR where there is CXL memory, too"),
    "firmware_times": Constant(1.1, "", "how many times as long an update in DDR takes after the change of firmware"),
}
DRIVE = {"drives_bytes_per_s": Constant(2.5e10, "bytes/s", "five drives, reads and writes together")}
MEMORY_REST = {
    "forward_params_per_s": Constant(1.1e10, "parameters/s", "forward pass"),
    "backward_params_per_s": Constant(4e9, "parameters/s", "backward pass without gradient traffic"),
    "gradient_params_per_s": Constant(5e9, "parameters/s", "fp32 gradients to host memory, where state lies there"),
    "other_s": Constant(0.5, "s", "rest of an iteration"),
}
SUBGROUP_NUMEL, MOST_SUBGROUPS = 10**8, 16
"""Of a rank, by the logs, and how many are simulated at most: what more change is the first and the last of them."""

NODE_PARTS = 2
"""Subgroups that state on one memory node is cut into: the engine's own costs are left out, so few are enough."""


@dataclass(frozen=True, eq=False)
class Memory:
    """A row of the table of kinds of memory, understood."""

    table: ClassVar[str] = "cxl_runs"
    columns: ClassVar = ("forward_s", "backward_s", "step_s", "iteration_s")
    machine: ClassVar[str] = "the node with CXL memory"
    model: str
    memory: str
    new_firmware: bool
    row: Mapping[str, str]

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return _count(self.row, "num_params")

    def step_s(self, values: Mapping[str, float]) -> float:
        """Return the seconds of the step."""
        ddr = values["ddr_params_per_s"] / (values["firmware_times"] if self.new_firmware else 1.0)
        if self.memory == DRIVES:
            ranks = _count(self.row, "ranks")
            return drives_update_s(self.numel // ranks, ddr / ranks, values["drives_bytes_per_s"] / ranks)
        in_ddr = self.numel if self.memory == DDR else min(self.numel, int(values["ddr_params"]))
        return nodes_update_s(in_ddr, self.numel - in_ddr, ddr, values["cxl_params_per_s"])

    def rest(self, values: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the seconds of forward, of backward and of the rest of an iteration."""
        backward_s = self.numel / values["backward_params_per_s"]
        if self.memory != DRIVES:
            backward_s += self.numel / values["gradient_params_per_s"]
        return self.numel / values["forward_params_per_s"], backward_s, values["other_s"]


@functools.lru_cache(maxsize=1 << 12)
def drives_update_s(numel: int, params_per_s: float, bytes_per_s: float) -> float:
    """Return the seconds of a rank's update with all state and fp32 gradients on drives, as DeepSpeed does it."""
    count = min(MOST_SUBGROUPS, -(-numel // SUBGROUP_NUMEL))
    drive = Drive(bytes_per_s, bytes_per_s, bytes_per_s)
    numels = (numel // count,) * count
    return streamed_update(numels, [range(count)], [drive], params_per_s, 0, read_scale=16 / 12).update_s


@functools.lru_cache(maxsize=1 << 12)
def nodes_update_s(first: int, second: int, first_params_per_s: float, second_params_per_s: float) -> float:
    """Return the seconds of a step with the state of so many parameters on two memory nodes, the first one full."""
    numels = (*_parts(first), *_parts(second))
    layout, full = exact_layout(numels), len(_parts(first))
    sizes = layout.subgroup_bytes
    nodes = NodeBudget(0, sum(sizes[:full])), NodeBudget(2, sum(sizes[full:]))
    speeds = first_params_per_s * STATE_BYTES, second_params_per_s * STATE_BYTES
    rates = Rates(
        speeds[0], nodes=tuple(NodeRates(n, each, each, each) for n, each in zip((0, 2), speeds, strict=True))
    )
    plan = choose_plan(layout, Budgets(sum(sizes), nodes=nodes), rates)
    return predict(plan, rates, steps=2, timeline=False).step_s


def _parts(numel: int) -> tuple[int, ...]:
    return (numel // NODE_PARTS,) * NODE_PARTS if numel >= NODE_PARTS else ()


def memory_rows(tables: Tables) -> list[Memory]:
    """Return the rows of the table of kinds of memory."""
    found = []
    for row in tables.rows.get("cxl_runs", []):
        if row["memory"] not in (DDR, CXL, DRIVES):
            raise ConfigError("memory", row["memory"], f"known are {DDR}, {CXL}, {DRIVES}")
        found.append(Memory(_model(row["model_b"]), row["memory"], row["run"].startswith("newbios"), row))
    return found


@functools.cache
def _fit_steps(rows: tuple[Memory, ...], rounds: int, known: tuple[tuple[str, float], ...] = ()) -> dict[str, float]:
    """Return constants fitted on steps: those of memory, or with these known those of drives."""

    def residuals(tried: dict[str, float]) -> list[float]:
        return [row.step_s(dict(known) | tried) / _needed(row.row, "step_s") - 1 for row in rows]

    return fit(DRIVE if known else MEMORY, residuals, rounds)


def fit_memory(rows: Sequence[Memory], rounds: int) -> dict[str, float]:
    """Return the constants of the kinds of memory, fitted on these rows: those of drives behind those of memory."""
    values = _fit_steps(tuple(row for row in rows if row.memory != DRIVES), rounds)
    known = tuple(values.items())
    values = values | _fit_steps(tuple(row for row in rows if row.memory == DRIVES), rounds, known)
    return values | fit_rest(rows, MEMORY_REST)


# All of it ----------------------------------------------------------------------------------------------------------


AnyRow = Interleaved | Paths | Memory
Fitted = dict[str, dict[str, float]]
"""Constants by machine."""


def rows_of(tables: Tables, known: Sequence[Tables]) -> list[AnyRow]:
    """Return the rows of all tables."""
    return [*interleaved_rows(tables, known), *paths_rows(tables, known), *memory_rows(tables)]


def sweep_of(rows: Sequence[AnyRow]) -> list[Interleaved]:
    """Return the rows of the stride sweep."""
    return [row for row in rows if isinstance(row, Interleaved) and row.table == "interleaved_update_sweep"]


def fit_machines(rows: Sequence[AnyRow], waits_s: Sequence[float], rounds: int) -> Fitted:
    """Return the constants of every machine that has rows.

    Updates shared by CPU and GPU are fitted on the machine's stride sweep where there is one: the same updates stand
    in both tables.
    """
    found: Fitted = {}
    for machine in sorted({row.machine for row in rows}):
        mine: list[Any] = [row for row in rows if row.machine == machine]
        progress(f"fitting {machine} on {len(mine)} rows")
        if isinstance(mine[0], Paths):
            found[machine] = fit_paths(mine, waits_s, rounds)
        elif isinstance(mine[0], Memory):
            found[machine] = fit_memory(mine, rounds)
        else:
            values = fit_node(machine, sweep_of(mine) or mine, rounds)
            iterations = [row for row in mine if row.table == "interleaved_iterations"]
            found[machine] = fit_iterations(machine, iterations, values)
    return found


Judged = dict[str, Any]


def judge(row: AnyRow, values: Mapping[str, float]) -> Judged:
    """Return a row with its prediction, what was measured, and the error of the update in percent."""
    forward, backward, step, whole = row.columns
    predicted, rest = {step: row.step_s(values)}, row.rest(values)
    if rest is not None:
        predicted |= {forward: rest[0], backward: rest[1], whole: sum(rest) + predicted[step]}
    measured = {name: _number(row.row, name) for name in predicted}
    errors = {name: 100 * (predicted[name] / value - 1) for name, value in measured.items() if value}
    return {
        "table": row.table,
        "row": {name: value for name, value in row.row.items() if name not in measured},
        "predicted": predicted,
        "measured": {name: value for name, value in measured.items() if value is not None},
        "errors_percent": errors,
        "error_percent": errors.get("update_s", errors.get("step_s")),
    }


def evaluate(fitted: Fitted, rows: Sequence[AnyRow]) -> list[Judged]:
    """Return every row with its prediction."""
    for row in rows:
        if row.machine not in fitted:
            known = ", ".join(fitted)
            raise ConfigError(row.table, row.machine, f"there were no rows to fit it on; there are {known}")
    return [judge(row, fitted[row.machine]) for row in rows]


def show_held_out(held: Mapping[str, Sequence[Judged]]) -> None:
    """Print the errors of each way of leaving rows out."""
    print("updates that were not fitted (rows of that kind left out, the rest fitted):")
    for name, judged in held.items():
        errors = update_errors(judged)
        print(f"  {name:<46} RMS {rms(errors):.1%}, worst {worst(errors):.1%}")
        for column in ("fwd_s", "bwd_s", "iter_s", "forward_s", "backward_s", "iteration_s"):
            others = [abs(row["errors_percent"][column]) for row in judged if column in row["errors_percent"]]
            if others:
                print(f"    {column:<6} median {statistics.median(others):.1f}%, worst {max(others):.1f}%")


def update_errors(judged: Iterable[Judged], table: str = "") -> list[float]:
    """Return the errors of updates, as parts."""
    wanted = (each for each in judged if each["table"] == table or not table)
    return [each["error_percent"] / 100 for each in wanted if each["error_percent"] is not None]


MEMORY_ROWS = "memory, each row by itself"


def held_out(rows: Sequence[AnyRow], waits_s: Sequence[float], full: Fitted, rounds: int) -> dict[str, list[Judged]]:
    """Return predictions of rows that the fit has not seen, by how they were left out."""
    found: dict[str, list[Judged]] = {}
    sweep = sweep_of(rows)

    def leave_out(name: str, rows: Sequence[AnyRow], groups: Callable[[Any], object]) -> None:
        for machine in sorted({row.machine for row in rows}):
            mine = [row for row in rows if row.machine == machine]
            for group in dict.fromkeys(groups(row) for row in mine):
                rest = [row for row in mine if groups(row) != group]
                if rest:
                    progress(f"{name}: {machine}, {group}")
                    fitted = fit_machines(rest, waits_s, rounds)
                    out = [row for row in mine if groups(row) == group]
                    found.setdefault(name, []).extend(evaluate(fitted, out))

    leave_out("sweep, each row by itself", sweep, id)
    leave_out("sweep, each stride by itself", sweep, lambda row: row.stride)
    leave_out("sweep, each model by itself", sweep, lambda row: row.model)
    # These updates stand in the sweep.
    repeated = {"4xA100"} & {row.machine for row in sweep}
    interleaved = [row for row in rows if isinstance(row, Interleaved)]
    earlier = [row for row in interleaved if row not in sweep and row.machine not in repeated]
    a100 = [row for row in earlier if row.machine == "A100"]
    leave_out("iterations, each model by itself", a100, lambda row: row.model)
    static = [row for row in earlier if row.cpu_ratio < 1]
    found["iterations at a static share, from the sweep"] = evaluate(full, static)
    leave_out("paths, each model by itself", [r for r in rows if isinstance(r, Paths)], lambda row: row.model)
    leave_out(MEMORY_ROWS, [row for row in rows if isinstance(row, Memory)], id)
    return {name: judged for name, judged in found.items() if update_errors(judged)}


def ours(fitted: Fitted, sweep: Sequence[Interleaved], paths: Sequence[Paths]) -> list[dict[str, Any]]:
    """Return what our planner's choice is predicted to take with the same rates and the same staging memory.

    Both directions of the link work at once, nothing blocks, and tiles are striped over all paths; a path's two
    directions get half each of what it moves in both. GPU staging is what one of their subgroups takes, cut in four.
    """
    found = []
    for machine, model in dict.fromkeys((row.machine, row.model) for row in sweep):
        theirs = [row for row in sweep if (row.machine, row.model) == (machine, model)]
        node, numels, ranks = node_of(machine, fitted[machine]), theirs[0].numels, theirs[0].ranks
        memory_bytes_per_s = node.memory_bytes_per_s / ranks
        link_bytes_per_s = min(node.link_bytes_per_s, memory_bytes_per_s / 2)  # both directions of it at once
        rates = Rates(
            node.update_params_per_s * STATE_BYTES,
            gpu=GpuRates(node.gpu_params_per_s * STATE_BYTES, link_bytes_per_s, link_bytes_per_s),
            memory_bytes_per_s=memory_bytes_per_s,
        )
        layout = _layout(sum(numels), max(numels) // 4)
        staging = max(numels) * STATE_BYTES
        plan = choose_plan(layout, Budgets(1 << 60, gpu_staging_bytes=staging, weights_on_gpu=True), rates)
        best = min(theirs, key=lambda row: _needed(row.row, "update_s"))
        found.append(_compared(f"{machine}, {model}", plan, rates, f"stride {best.stride}", best))
    for row in paths:
        if not row.multi:
            continue
        ranks = min(row.ranks, RANKS_PER_NODE)
        values = fitted[Paths.machine]
        each_way = [values[f"{name}_mixed_bytes_per_s"] / 2 / ranks for name in ("nvme", "remote")]
        rates = Rates(values["cpu_params_per_s"] * STATE_BYTES, tuple(PathRates(rate, rate) for rate in each_way))
        staging = 2 * row.cached * max(row.numels) * STATE_BYTES
        offers = (PathBudget("nvme", 1 << 60), PathBudget("remote", 1 << 60))
        plan = choose_plan(
            _layout(sum(row.numels), max(row.numels)), Budgets(0, staging, offers, follow_rates=True), rates
        )
        found.append(_compared(f"paths, {row.model}", plan, rates, row.row["approach"], row))
    return found


def _layout(numel: int, subgroup_numel: int) -> Layout:
    return build_layout([Parameter("parameters", numel, DtypeCode.BFLOAT16, 0)], subgroup_numel)


def _compared(what: str, plan: Plan, rates: Rates, name: str, theirs: Interleaved | Paths) -> dict[str, Any]:
    progress(f"our plan: {what}")
    prediction, best_s = predict(plan, rates), _needed(theirs.row, "update_s")
    found = {"what": what, "ours_predicted_s": prediction.step_s, "bound_by": prediction.bound_by}
    found |= {"their_best": name, "their_best_measured_s": best_s, "speedup": best_s / prediction.step_s}
    show(f"our planner with the same rates, {what}", found, *list(found)[1:])
    return found


def constants_said(fitted: Fitted) -> list[str]:
    """Return a line for each fitted constant."""
    lines = ["constants:"]
    for machine, values in fitted.items():
        others = {Paths.machine: PATHS | PATHS_REST, Memory.machine: MEMORY | DRIVE | MEMORY_REST}
        meant = others.get(machine, NODE | FORWARD | BACKWARD | OTHER)
        lines.append(f"  {machine}")
        for name, value in values.items():
            told = "" if abs(value / meant[name].start - 1) > 1e-4 else " (assumed: these rows do not tell)"
            lines.append(f"    {name:<32} {value:>10.4g} {meant[name].unit:<13} {meant[name].meaning}{told}")
    return lines


def measure(run: Run) -> None:
    """Fit, and predict."""
    rounds = 1 if run.smoke else 25
    tables = read_tables(run.args.fit)
    rows, waits_s = rows_of(tables, [tables]), mean_waits(tables)
    given = None if run.args.evaluate is None else read_tables(run.args.evaluate)
    asked = [] if given is None else rows_of(given, [given, tables])
    if run.smoke:
        rows = [row for row in rows if not isinstance(row, Interleaved) or len(row.numels) < 30]
    fitted = fit_machines(rows, waits_s, rounds)
    print(*constants_said(fitted), sep="\n")
    run.results["constants"] = fitted
    if given is not None:
        judged = evaluate(fitted, asked)
        run.results["evaluated"] = run.results["rows"] = judged
        sweep, several = (
            update_errors(judged, "interleaved_update_sweep"),
            update_errors(judged, "multipath_iterations"),
        )
        run.at_most("evaluated sweep, RMS error", rms(sweep), 0.02, "no such rows")
        run.at_most("evaluated multi-path updates, worst error", worst(several), 0.06, "no such rows")
    else:
        judged = evaluate(fitted, rows)
        run.results["fitted"] = run.results["rows"] = judged
        held = {} if run.smoke else held_out(rows, waits_s, fitted, rounds)
        run.results["held_out"] = held
        show_held_out(held)
        paths = [row for row in rows if isinstance(row, Paths)]
        run.results["ours"] = ours(fitted, sweep_of(rows), paths[:2] if run.smoke else paths)
        note = "smoke" if run.smoke else "no such rows"
        for name in ("sweep, each row by itself", "sweep, each stride by itself", "sweep, each model by itself"):
            run.at_most(f"{name}: RMS error", rms(update_errors(held.get(name, []))), 0.02, note)
        name = "paths, each model by itself"
        run.at_most(f"{name}: worst error", worst(update_errors(held.get(name, []))), 0.06, note)
        for name, each in (("memory, fitted", judged), (MEMORY_ROWS, held.get(MEMORY_ROWS, []))):
            errors = update_errors(each, "cxl_runs")
            run.at_most(f"{name}: worst error", worst(errors), 0.1, note)
            run.at_most(f"{name}: RMS error", rms(errors), 0.06, note)
    run.checksums.append(hashlib.sha256(json.dumps(run.results, sort_keys=True).encode()).hexdigest()[:16])


OPTIONS = (
    Option("fit", TABLES, help="tables to fit on", more={"type": Path, "metavar": "DIR"}),
    Option("evaluate", None, help="tables to predict, any subset of them", more={"type": Path, "metavar": "DIR"}),
)

if __name__ == "__main__":
    try:
        main(__doc__, measure, options=OPTIONS)
    except OffloadError as error:
        raise SystemExit(f"error: {error}") from None
