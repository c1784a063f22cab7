"""`Engine`: one session, the owner of every lifetime, and the framework-neutral face of everything here.

A session has one engine thread, which owns machine and executor. Public methods may be called from any thread, one
at a time; they post a request to the engine thread and wait for its answer. Between requests the engine thread
finishes flushes.

Errors: a request on a session that was closed, that broke, or that belongs to another process (after a fork) raises
`SessionBrokenError`. A step that cannot be finished raises `StepAbortedError` and breaks the session.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload._native import CompletionQueue
from offload.checkpoint.adopt import manifest_in_place
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import Manifest, Piece
from offload.checkpoint.reader import Checkpoint, Range, StateSource
from offload.checkpoint.saves import Exchange, Saves, Snapshot
from offload.checkpoint.stores import leftover_bytes
from offload.config import OffloadConfig, PathConfig
from offload.engine.executor import REQUEST, Interval, LiveExecutor
from offload.engine.gpu import GpuLanes
from offload.engine.gradients import BLOCK_BYTES, PASSING, GpuGradients
from offload.engine.index import TileIndex
from offload.engine.loop import pump
from offload.engine.machine import (
    Begin,
    BeginSave,
    Machine,
    Release,
    Run,
    State,
    Sweep,
    TakeUp,
    Visit,
    update_visits,
)
from offload.engine.memory import Arena, available_bytes
from offload.engine.tables import GroupScalars, Tables
from offload.errors import (
    CheckpointError,
    ConfigError,
    InfeasiblePlanError,
    OffloadError,
    SessionBrokenError,
    StepAbortedError,
    TierError,
    invariant,
)
from offload.kernels import CpuUpdateKernel, sum_in_order
from offload.kernels.reference import round_weight
from offload.layout import (
    MAX_TILE_BYTES,
    SEGMENT_ALIGN_NUMEL,
    STATE_ITEM_BYTES,
    Layout,
    Parameter,
    Segment,
    Subgroup,
    extend_layout,
)
from offload.measure import (
    HISTORY,
    lane_totals,
    observe,
    probe_device,
    quick_probe,
    session_rates,
    tune_depth,
    typical,
)
from offload.plan import (
    Budgets,
    PathBudget,
    Plan,
    Rates,
    choose_plan,
    choose_subgroup_numel,
    make_plan,
    visit_order,
)
from offload.plan.budget import GPU_STAGING_SLOTS, WEIGHT_SLOTS
from offload.protocols import (
    NORM_BLOCK_NUMEL,
    Completion,
    Device,
    DtypeCode,
    Mark,
    SegmentFlag,
    Tier,
    TileId,
    TileRequest,
)
from offload.tiers import Turns, check_directories, free_bytes, innermost, open_tier, tier_error
from offload.tiers.file import DEFAULT_EXTENT_BYTES

log = logging.getLogger("offload")

TORCH_DTYPES = {
    DtypeCode.BFLOAT16: torch.bfloat16,
    DtypeCode.FLOAT16: torch.float16,
    DtypeCode.FLOAT32: torch.float32,
}

STATE_NAMES = ("master", "exp_avg", "exp_avg_sq")

TILES_PER_PATH = 4
LEAST_TILE_BYTES = 1 << 20
"""A subgroup is cut so that every path gets several of its tiles, but none that a disk would be slow on."""


def tensor_at(address: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a flat tensor over memory that somebody else owns and keeps alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


GPU_USE = 0.9
"""How much of a GPU's free memory is taken at most: whatever else works there needs some, too."""


class Engine:
    """Optimizer state of one rank, wherever it lives, and its update.

    The engine knows parameters by position (or name), weights and gradients by memory address. Whoever binds an
    address keeps the memory alive and does not write to it during `step`.

    Args:
        parameters: Name, size, weight dtype and group of each parameter.
        config: Tiers and budgets.
        gradient_slots: Whether the engine provides memory for gradients (`gradient_slot`).
        device: The GPU on which weights and gradients lie: what is bound are its addresses then. The engine provides
            host memory for the gradients that it needs there itself, and closes the device. None for the CPU.

    Raises:
        ConfigError: If a path cannot be used, or a GPU is to be used and none is given; raised before any file is
            touched.
        InfeasiblePlanError: If the state does not fit into the tiers.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        config: OffloadConfig | None = None,
        *,
        gradient_slots: bool = False,
        device: Device | None = None,
    ) -> None:
        self.config = config or OffloadConfig()
        try:
            self._core = _Core(tuple(parameters), self.config, gradient_slots, device)
        except BaseException:
            if device is not None:
                device.close()
            raise
        # The engine thread holds the core and never this object, so an engine that is forgotten is closed.
        self._finalizer = weakref.finalize(self, self._core.close)

    # State of affairs

    @property
    def plan(self) -> Plan:
        """What lives where."""
        return self._core.plan

    @property
    def rates(self) -> Rates:
        """Speeds of the lanes: measured beforehand or probed, and refined by every step."""
        return self._core.rates

    @property
    def broken(self) -> BaseException | None:
        """Why the session cannot be used any more, or None."""
        return self._core.broken or self._core.machine.broken

    def step_count(self, parameter: int | str) -> int:
        """Return the number of updates that a parameter has had."""
        return int(self._core.tables.steps[self._core.position(parameter)])

    def timeline(self) -> list[Interval]:
        """Return what the lanes did in the last step and since, in the order in which it ended."""
        self._core.executor.take_timed()
        return list(self._core.executor.timeline)

    def metrics(self) -> dict[str, float]:
        """Return the last step as a flat dict.

        Keys: `step`, `step_s`, `state_bytes`, `resident_bytes`, `streamed_bytes`, `resident_share`, and `gpu_bytes`
        with a GPU; for each lane (`cpu`, `read:<path>`, `write:<path>`, and `gpu`, `h2d`, `d2h` with a GPU)
        `lane/<lane>/busy_s` and `lane/<lane>/bytes`; for each path
        `path/<number>/read_bytes`, `path/<number>/write_bytes` and `path/<number>/live_bytes` (what lies there now).
        """
        return self._core.metrics()

    # Memory

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Add parameters; the homes of the state that is there stay as they are.

        Raises:
            InfeasiblePlanError: If the new state does not fit; nothing has changed then.
        """
        self._core.add(tuple(parameters))

    def bind_weight(self, parameter: int | str, address: int) -> None:
        """Say where a parameter's weight lies: contiguous, in the parameter's dtype."""
        self._core.tables.weights[self._core.position(parameter)] = address

    def reload_master(self, parameter: int | str) -> None:
        """Take the master from the weight when the parameter is next updated; the moments stay."""
        self._core.tables.reload_master(self._core.position(parameter))

    def gradient_slot(self, parameter: int | str) -> torch.Tensor:
        """Return the memory for a parameter's gradient: flat, in the config's gradient dtype.

        Raises:
            ConfigError: If the engine was made without gradient slots.
        """
        return self._core.gradient_slot(self._core.position(parameter))

    def gradient_arrived(self, parameter: int | str, address: int, dtype: DtypeCode) -> Mark | None:
        """Take in a parameter's gradient: gather its norm and, with slots, copy it there.

        On the CPU it is the whole gradient, whatever was accumulated. On a GPU it is that of one backward pass, to be
        added to those that arrived since the last step or `forget_gradients`.

        Args:
            parameter: Which one.
            address: Where the gradient lies; if that is its slot, nothing is copied.
            dtype: Its element type; widened where the slot is float32.

        Returns:
            On a GPU, the mark after which the gradient is not read any more. The first one of a parameter of which
            `keeps_gradient` is true is read, and added to, until the step has returned.
        """
        return self._core.gradient_arrived(self._core.position(parameter), address, dtype)

    def keeps_gradient(self, parameter: int | str) -> bool:
        """Return whether the GPU updates some of a parameter, from the gradient where it lies."""
        return self._core.keeps_gradient(self._core.position(parameter))

    def forget_gradients(self) -> None:
        """Forget all gradients that arrived on a GPU: those that arrive next are the first."""
        self._core.forget_gradients()

    def bind_gradient(self, parameter: int | str, address: int, dtype: DtypeCode, *, gathered: bool = False) -> None:
        """Say where a parameter's gradient lies for the next norm and step.

        Args:
            parameter: Which one.
            address: Its first element, at any alignment.
            dtype: Its element type.
            gathered: Whether `gradient_arrived` gathered its norm and it has not changed since.
        """
        self._core.bind_gradient(self._core.position(parameter), address, dtype, gathered)

    # Work

    def gradient_norm_sq(self, parameters: Iterable[int | str]) -> float:
        """Return the squared L2 norm of the bound gradients, as `offload.kernels.reference` defines it.

        It is not finite if and only if an element is not. What was gathered on arrival is used, the rest is read.
        """
        return self._core.gradient_norm_sq([self._core.position(parameter) for parameter in parameters])

    def step(
        self,
        groups: Sequence[GroupScalars],
        *,
        scale: float = 1.0,
        clip: float = 1.0,
        active: Iterable[int | str] | None = None,
    ) -> None:
        """Update state and weights of all active parameters from their bound gradients.

        Args:
            groups: Hyperparameters, by group index.
            scale: What the gradients were multiplied by (loss scale); they are divided by it.
            clip: Factor for the unscaled gradients.
            active: Parameters that have a gradient; None for all. The others stay as they are, bit for bit.

        Raises:
            StepAbortedError: If it could not be finished; the session is broken.
            SessionBrokenError: If the session cannot be used.
        """
        everything = range(len(self.plan.layout.parameters))
        chosen = everything if active is None else [self._core.position(parameter) for parameter in active]
        self._core.step(groups, scale, clip, list(chosen))

    def read_state(self, parameters: Iterable[int | str]) -> list[dict[str, torch.Tensor]]:
        """Return master, exp_avg and exp_avg_sq of each parameter as new flat fp32 CPU tensors."""
        return self._core.read_state([self._core.position(parameter) for parameter in parameters])

    def visit_state(self, take: Callable[[int, int, Mapping[str, torch.Tensor]], None]) -> None:
        """Hand out all state once, run by run in the engine's order, where it lies in memory: nothing is copied.

        Args:
            take: Called with a parameter's position, the first element of the run, and flat fp32 views of its master,
                exp_avg and exp_avg_sq that must not be written to or kept. It runs on a thread of the engine's and
                must not call the engine.

        Raises:
            Exception: What `take` raised first; it is not called again, and the state is unharmed.
        """
        self._core.visit_state(take)

    def write_state(
        self, values: Mapping[int | str, Mapping[str, torch.Tensor]], steps: Mapping[int | str, int] | None = None
    ) -> None:
        """Replace state: any of master, exp_avg and exp_avg_sq of each parameter (flat fp32), and step counts.

        Where the weight is fp32 it *is* the master, and a master that is given is written to it. A tensor that is
        not given keeps its value.
        """
        core = self._core
        core.write_state(
            {core.position(parameter): tensors for parameter, tensors in values.items()},
            {core.position(parameter): step for parameter, step in (steps or {}).items()},
        )

    # Checkpoints

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        extra: bytes | None = None,
        pieces: Sequence[Piece] | None = None,
        copy: bool = False,
        on_done: Callable[[BaseException | None], None] | None = None,
        id: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        replica: bool = False,
    ) -> None:
        """Start a checkpoint of the state as it is now; it is written while the caller goes on.

        What lies on a path stays where it is and is reserved there; what lies in memory is written, before its next
        update at the latest. Masters that are (fp32) weights are written before this returns, as their owner may
        change them. Without paths, or with `copy`, everything is written to the folder itself.

        Args:
            path: Folder of the checkpoint, or "s3://bucket/prefix"; made if it is not there.
            metadata: Anything that JSON can hold.
            extra: Anything else.
            pieces: Which part of a whole parameter each parameter here is; None where they are whole.
            copy: Copy everything into the folder, so that the checkpoint needs nothing else.
            on_done: Called from a thread of its own when it has ended, with the error or None.
            id: 32 hexadecimal digits, the same for all ranks; None for a new one, if there is one rank.
            rank: This rank.
            ranks: Number of ranks that save to the folder together.
            replica: Whether rank 0 has the same state and saves it for this rank too; it writes `extra` alone then.

        Raises:
            CheckpointError: The folder cannot be used, or the paths have no room for a checkpoint; training may
                go on.
            SessionBrokenError: The session cannot be used.
        """
        self._core.save(
            path, metadata or {}, extra, pieces, copy, on_done, id or uuid.uuid4().hex, rank, ranks, replica
        )

    def wait_checkpoint(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint that was started last has been committed.

        Raises:
            CheckpointError: It was not; training may go on.
            TimeoutError: It has not been by then.
        """
        self._core.wait_checkpoint(timeout_s)

    def load(
        self,
        checkpoint: StateSource,
        *,
        names: Mapping[str, str] | None = None,
        pieces: Sequence[Piece] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Replace all state, step counts and weights by what a checkpoint has for these parameters.

        With the same subgroups, tiles and ranks streamed state is not copied: its slots are this session's from then
        on where their session has ended and they lie on one of its paths, and are only read elsewhere.

        Args:
            checkpoint: An open one, or a file of another format; may be closed afterwards.
            names: What a parameter here is called there, where that differs.
            pieces: Which part of a whole parameter each parameter here is; None where they are whole.
            rank: This rank.
            ranks: Number of ranks.

        Raises:
            CheckpointError: It has not all parameters, or they have other sizes; nothing has changed then. Or part
                of it is damaged, which is found out while it is read: the session is broken then.
        """
        self._core.load(checkpoint, names or {}, pieces, rank, ranks)

    def close(self) -> None:
        """Finish what is in flight, a checkpoint included, and free everything; idempotent.

        The session's files are deleted, but for those that kept checkpoints refer to.
        """
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(slots=True)
class _Request:
    """Something that a caller waits for."""

    begin: Callable[[], Sweep | None]
    """Runs on the engine thread with no sweep under way; returns the sweep to run, or None if that was all."""
    applied: Callable[[], None]
    """Takes note of a sweep that has ended well; on the engine thread, where no interrupt can come between."""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """Where a visit finds what it works on, in host memory."""

    address: int
    """Of the subgroup's state."""
    weights_address: int | None
    """Of an image of its weights; None where they lie in host memory themselves."""


class _Core:
    """What the engine thread works with. Construction succeeds whole or leaves nothing behind."""

    def __init__(
        self,
        parameters: tuple[Parameter, ...],
        config: OffloadConfig,
        gradient_slots: bool,
        device: Device | None = None,
    ) -> None:
        self.config = config
        self.broken: BaseException | None = None
        self.tables = Tables()
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.RLock()
        self._next: _Request | None = None
        self._current: _Request | None = None
        self._reply = CompletionQueue()
        self._tiers: list[Tier] = []
        self._arenas: list[Arena] = []
        self._staging: Arena | None = None
        self._residents: dict[int, int] = {}
        self._saves: Saves | None = None
        self._gpu: GpuLanes | None = None
        self._gradients: GpuGradients | None = None
        self._host_gradients: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._step_gradients = self._host_gradients
        self._wide: list[torch.Tensor] = []
        self._bounce: Arena | None = None
        self._weights: Arena | None = None
        self._has_slots = gradient_slots or device is not None
        self._slots: list[torch.Tensor] = []
        self._blocks: list[npt.NDArray[np.float64]] = []
        self._gathered: list[bool] = []
        self._thread: threading.Thread | None = None
        self._kernel: CpuUpdateKernel | None = None
        self._threads = config.threads or len(os.sched_getaffinity(0))
        self._step_number = self._version = self._sweeps = 0
        self._step_s = self._step_started_s = 0.0
        paths = config.path_configs
        check_directories([path.path for path in paths])
        known = session_rates(str(config.rates), [path.path for path in paths], self._threads)
        if known is not None and device is None:
            known = dataclasses.replace(known, gpu=None)  # no lane of this session is on one
        elif known is not None and known.gpu is None:
            known = None
        if device is None:
            _refuse_gpu(config)
        numel = sum(parameter.numel for parameter in parameters)
        staging = None if config.staging_memory is None else int(config.staging_memory)
        self._subgroup_numel = config.subgroup_numel or choose_subgroup_numel(numel, staging)
        state_bytes = len(STATE_NAMES) * STATE_ITEM_BYTES * self._subgroup_numel
        striped_bytes = state_bytes // (TILES_PER_PATH * max(1, len(paths)))
        self._tile_bytes = max(LEAST_TILE_BYTES, min(MAX_TILE_BYTES, striped_bytes))
        layout = extend_layout(Layout((), ()), parameters, self._subgroup_numel, self._tile_bytes)
        budgets = self._first_budgets(layout, device)
        if known is None:
            self.plan = make_plan(layout, budgets)
        else:
            self.plan = choose_plan(layout, budgets, known, config.placement)
        log.info("%s", self.plan)
        if paths and not self.plan.has_room_for_checkpoints:
            log.warning(
                "the paths may have too little room for checkpoints: they take up to %d bytes beside the state; "
                "save_checkpoint raises then",
                self.plan.checkpoint_bytes,
            )
        available = available_bytes()
        if self.plan.host_bytes > available:
            offers = {"host memory": available}
            advice = "lower host_memory and give paths to stream from" if paths else "give paths to stream state from"
            raise InfeasiblePlanError("the plan's host memory", self.plan.host_bytes, offers, advice)
        self._queue = queue = CompletionQueue()
        try:
            store = uuid.uuid4()
            for path in paths:
                self._tiers.append(self._open_tier(path, store, path.depth))
            self._kernel = CpuUpdateKernel(queue, self._threads)
            if device is not None:
                self._gpu = GpuLanes(device, queue)
                self._gradients = GpuGradients(self._gpu, self._kernel)
            self.executor = LiveExecutor(
                self._tiers,
                self._kernel,
                queue,
                self._tier_error,
                verify=config.checksum,
                stall_s=config.stall_timeout_s,
                gpu=self._gpu,
            )
            self._adopt(self.plan, Layout((), ()))
            address = self._staging.address if self._staging else 0
            for path, tier in zip(paths, self._tiers, strict=True):
                if path.depth is None:
                    _tune_depth(tier, queue, self._staging)
            self.rates = known or quick_probe(self._kernel, self._tiers, queue, address, self.plan)
            if self._gpu is not None and known is None:
                self.rates = dataclasses.replace(self.rates, gpu=probe_device(self._gpu, self.plan))
                self.plan = choose_plan(layout, budgets, self.rates, config.placement, kept=self.plan)
                self._adopt_staging(self.plan)
                log.info("%s", self.plan)
            if self._gpu is not None:
                self.plan = self._adopt_gpu(self.plan, Layout((), ()))
            self._adopt_gradients(self.plan, Layout((), ()))
            self._seen: list[Rates] = [self.rates]
            shares = self.plan.shares(self.rates)
            limits = [(path.available_bytes, s) for path, s in zip(self.plan.budgets.paths, shares, strict=True)]
            index = TileIndex(limits, self.plan.slot_counts, self.plan.checkpoint_bytes)
            self.machine = Machine(self.plan, index, log.warning)
            self._saves = self.executor.save_source = Saves(
                queue,
                [(path.path, store) for path in paths],
                self.executor.others,
                self._residents.__getitem__,
                self._gather_tile,
                keep=config.checkpoints,
                checksum=config.checksum,
            )
        except BaseException:
            self._free()
            raise
        self._thread = threading.Thread(target=self._serve, name="offload-engine", daemon=True)
        self._thread.start()

    # Set-up

    def _open_tier(
        self, path: PathConfig, store: uuid.UUID, depth: int | None, used_bytes: int | None = None
    ) -> Tier:
        return open_tier(
            path.path,
            store,
            self._queue,
            max_bytes=path.max_bytes,
            depth=depth,
            extent_bytes=min(DEFAULT_EXTENT_BYTES, max(LEAST_TILE_BYTES, self.plan.storage_bytes)),
            checksum=self.config.checksum,
            turns=_choose_turns(self.config, path),
            io_backend=self.config.io_backend,
            used_bytes=used_bytes,
        )

    def _first_budgets(self, layout: Layout, device: Device | None) -> Budgets:
        config = self.config
        host, staging = config.host_memory, config.staging_memory
        if host is None:
            host = available_bytes() // 2 if config.paths else layout.state_bytes
        paths = []
        free_each = free_bytes([path.path for path in config.path_configs])
        for path, free in zip(config.path_configs, free_each, strict=True):
            offered = free if path.max_bytes is None else min(free, path.max_bytes)
            paths.append(PathBudget(path.path, offered, path.share or 1.0))
        invariant(not isinstance(host, str) and not isinstance(staging, str), "sizes are parsed by the config")
        gradients = self._gradient_bytes(layout.parameters, on_gpu=device is not None)
        gpu_bytes = gpu_staging_bytes = 0
        if device is not None:
            left = int(device.free_bytes() * GPU_USE)
            if config.placement != "cpu":
                gpu_staging_bytes = min(GPU_STAGING_SLOTS * max(layout.subgroup_bytes, default=0), left)
            gpu_bytes = left - gpu_staging_bytes if config.gpu_memory == "auto" else int(config.gpu_memory)
        return Budgets(
            gpu_bytes=gpu_bytes,
            gpu_staging_bytes=gpu_staging_bytes,
            weights_on_gpu=device is not None,
            host_bytes=int(host),
            staging_bytes=None if staging is None else int(staging),
            paths=tuple(paths),
            gradient_bytes=gradients,
            follow_rates=all(path.share is None for path in config.path_configs),
            checkpoints=config.checkpoints,
            checkpoints_required=bool(config.checkpoints_kept),
            leftover_bytes=leftover_bytes([path.path for path in config.path_configs]),
        )

    def _slot_dtype(self, parameter: Parameter) -> DtypeCode:
        return DtypeCode.FLOAT32 if self.config.gradient_dtype == "float32" else parameter.dtype

    def _slot_bytes(self, parameter: Parameter) -> int:
        if not self._has_slots:
            return 0
        numel = -(-parameter.numel // SEGMENT_ALIGN_NUMEL) * SEGMENT_ALIGN_NUMEL
        return numel * TORCH_DTYPES[self._slot_dtype(parameter)].itemsize

    def _gradient_bytes(self, parameters: Sequence[Parameter], *, on_gpu: bool) -> int:
        """Return the host memory for the gradients of these parameters, those that pass to be added included."""
        sizes = [self._slot_bytes(parameter) for parameter in parameters]
        return sum(sizes) + (PASSING * max(sizes, default=0) if on_gpu and not self.config.keep_grads else 0)

    def _arena(self, nbytes: int, *, inherit: bool = False) -> Arena:
        arena = Arena(nbytes, inherit=inherit) if self._gpu is None else self._gpu.arena(nbytes, inherit=inherit)
        self._arenas.append(arena)
        return arena

    def _give_back(self, arena: Arena | None) -> None:
        if arena is not None:
            self._arenas.remove(arena)
            if self._gpu is None:
                arena.close()
            else:
                self._gpu.give_back(arena)

    def _adopt(self, plan: Plan, before: Layout) -> None:
        """Allocate host memory for the state that `plan` adds to the layout `before`; nothing is in flight."""
        subgroups = plan.layout.subgroups[len(before.subgroups) :]
        added = [s for s in subgroups if plan.resident[s.index] and not plan.at_home_on_gpu(s.index)]
        if added:
            address = self._arena(sum(subgroup.state_bytes for subgroup in added)).address
            for subgroup in added:
                self._residents[subgroup.index] = address
                address += subgroup.state_bytes
        self._adopt_staging(plan)
        self.tables.extend(plan.layout)

    def _adopt_staging(self, plan: Plan) -> None:
        """Have staging slots as `plan` says; nothing is in flight."""
        if plan.staging_slots and (self._staging is None or plan.staging_bytes > self._staging.nbytes):
            staging, old = self._arena(plan.staging_bytes), self._staging
            for tier in self._tiers:  # before the old memory goes away
                tier.register_memory(staging.address, staging.nbytes)
            if old is not None:
                for subgroup_index, slot in self.machine.slots.items():
                    nbytes = plan.layout.subgroups[subgroup_index].state_bytes
                    source = self.executor.slot_address(slot)
                    ctypes.memmove(staging.address + slot * plan.slot_bytes, source, nbytes)
                self._give_back(old)
            self._staging = staging
        self.executor.bind(plan, self._staging.address if self._staging else 0)

    def _adopt_gpu(self, plan: Plan, before: Layout) -> Plan:
        """Take memory for what `plan` adds on the GPU and for it; return the plan with its gradients' bytes."""
        gpu = self._gpu
        invariant(gpu is not None, "a plan for a GPU without one")
        if gpu is None:
            return plan
        nbytes, weights, old = WEIGHT_SLOTS * plan.weight_slot_bytes, None, self._weights
        if nbytes > (old.nbytes if old is not None else 0):
            weights = self._arena(nbytes)
        try:
            gpu.adopt(plan, before, weights.address if weights is not None else 0)
        except OffloadError:
            self._give_back(weights)
            raise
        if weights is not None:
            gpu.wait()  # for what is being pushed
            self._give_back(old)
            self._weights = weights
        if plan.bounce_bytes > (self._bounce.nbytes if self._bounce is not None else 0):
            self._give_back(self._bounce)
            self._bounce = self._arena(plan.bounce_bytes)
        used = [p for number, p in enumerate(plan.layout.parameters) if self._uses_cpu(plan, number)]
        gradients = self._gradient_bytes(used, on_gpu=True)
        plan = dataclasses.replace(plan, budgets=dataclasses.replace(plan.budgets, gradient_bytes=gradients))
        self.executor.bind(plan, self._staging.address if self._staging else 0)
        return plan

    def _uses_cpu(self, plan: Plan, position: int) -> bool:
        return any(not plan.updates_on_gpu(subgroup) for subgroup, _ in plan.layout.places[position])

    def _adopt_gradients(self, plan: Plan, before: Layout) -> None:
        """Allocate memory for the gradients of the parameters that `plan` adds."""
        first = len(before.parameters)
        parameters = plan.layout.parameters[first:]
        wanted = [self._gpu is None or self._uses_cpu(plan, first + n) for n in range(len(parameters))]
        slots = sum(self._slot_bytes(parameter) for parameter, here in zip(parameters, wanted, strict=True) if here)
        # A forked child may look at .grad, so gradients are inherited as torch's own are.
        arena = self._arena(slots, inherit=self._gpu is None) if slots else None
        offset = 0
        for parameter, here in zip(parameters, wanted, strict=True):
            dtype = TORCH_DTYPES[self._slot_dtype(parameter)]
            if arena is not None and parameter.numel and here:
                self._slots.append(arena.tensor(offset, parameter.numel, dtype))
                offset += self._slot_bytes(parameter)
            else:
                self._slots.append(torch.empty(0, dtype=dtype, device="cpu"))
            self._gathered.append(False)
        counts = [-(-parameter.numel // NORM_BLOCK_NUMEL) for parameter in parameters]
        if self._gradients is None:
            self._blocks += [np.zeros(count, np.float64) for count in counts]
            return
        region = self._arena(BLOCK_BYTES * sum(counts)) if sum(counts) else None
        stays = [
            any(plan.updates_on_gpu(subgroup) for subgroup, _ in plan.layout.places[first + n])
            for n in range(len(parameters))
        ]
        self._gradients.add([p.numel for p in parameters], self._slots[first:], stays, region)
        self._blocks += [found.blocks for found in self._gradients.positions[first:]]
        slots_at = [slot.data_ptr() if slot.numel() else 0 for slot in self._slots[first:]]
        self._host_gradients = np.concatenate([self._host_gradients, np.array(slots_at, np.uint64)])

    def add(self, parameters: tuple[Parameter, ...]) -> None:
        """See `Engine.add`."""
        before = self.plan
        layout = extend_layout(before.layout, parameters, self._subgroup_numel, self._tile_bytes)
        gradients = self._gradient_bytes(layout.parameters, on_gpu=self._gpu is not None)
        budgets = dataclasses.replace(before.budgets, gradient_bytes=gradients)
        if self._gpu is not None and self.config.placement != "cpu":
            room = int(self._gpu.device.free_bytes() * GPU_USE)
            staging = max(
                budgets.gpu_staging_bytes, min(GPU_STAGING_SLOTS * max(layout.subgroup_bytes, default=0), room)
            )
            budgets = dataclasses.replace(budgets, gpu_staging_bytes=staging)
        if self.config.host_memory is None and not self.config.paths:
            budgets = dataclasses.replace(budgets, host_bytes=layout.state_bytes)

        def place(layout: Layout) -> Plan:
            if self._gpu is None:
                return make_plan(layout, budgets, kept=before)
            kept = [*before.on_gpu] or [False] * len(before.layout.subgroups)
            fresh = choose_plan(layout, budgets, self.rates, self.config.placement, kept=before)
            copied = [fresh.updates_on_gpu(subgroup) for subgroup in range(len(layout.subgroups))]
            # What is there stays where it is: memory for its gradients has been given out by that.
            return make_plan(layout, budgets, kept=before, copied=[*kept, *copied[len(kept) :]])

        try:
            plan = place(layout)
        except InfeasiblePlanError:
            # Larger slots may be the reason, as those there are in use: cut the new state to their size.
            most = before.slot_bytes // (len(STATE_NAMES) * STATE_ITEM_BYTES)
            if most >= self._subgroup_numel or not before.staging_slots:
                raise
            layout = extend_layout(before.layout, parameters, most, self._tile_bytes)
            plan = place(layout)

        def extend() -> None:
            nonlocal plan
            pump(self.machine, self.executor, lambda m: m.in_flight == 0 or m.broken is not None)
            if self.machine.broken is not None:
                raise self.machine.broken
            if plan.staging_slots and not self.machine.index.has_room(plan.slot_counts):
                # The paths have strayed from the plan, each as it was fast, and hold slots of other sizes now.
                offers = {path.name: path.available_bytes for path in plan.budgets.paths}
                raise InfeasiblePlanError("the added state", plan.storage_bytes, offers, "free space or add a path")
            if self._gpu is not None:  # which may refuse; nothing has changed then
                plan = self._adopt_gpu(plan, before.layout)
            self._adopt(plan, before.layout)
            self._adopt_gradients(plan, before.layout)
            self.machine.index.allow(plan.slot_counts)
            self.machine.extend(plan)
            self.plan = plan

        with self._lock:
            self._request(extend)

    def _tier_error(self, verb: str, completion: Completion, request: TileRequest | None, tier: Tier) -> TierError:
        """Return the error of a failed completion; it names the parameters that a tile is of, and its file."""
        error = tier_error(verb, completion, request, tier)
        if request is None:
            return error
        place = getattr(innermost(tier), "store_path", None)
        where = f" in {place}" if place is not None else ""
        return type(error)(
            error.operation,
            tier=error.tier,
            path=error.path,
            offset=error.offset,
            errno=error.errno,
            detail=f"{self.plan.layout.parameters_of(request.tile)}{where}; {error.detail}",
        )

    # The engine thread

    def _serve(self) -> None:
        try:
            self._serve_requests()
        except Exception as error:
            # Nobody waits for this thread itself: whoever waits for an answer, and whoever asks next, is told.
            self.broken = error
            self._end_save(error)
            if self._current is not None:
                self._answer(error)
            while True:
                while not self.executor.requests:
                    self.executor.wait()
                if self._take_request() is None:
                    return
                self._answer(error)

    def _serve_requests(self) -> None:
        machine, executor = self.machine, self.executor
        while True:
            pump(
                machine,
                executor,
                lambda m: m.finished is not None or m.saver.ended is not None or (m.idle and executor.requests > 0),
            )
            self._take_save()
            if machine.finished is None and not (machine.idle and executor.requests > 0):
                continue
            if machine.take_finished() is not None:
                if machine.failed or self._current is None:
                    self._answer(machine.broken)
                else:
                    self._current.applied()
                    self._answer(None)
                continue
            request = self._take_request()
            if request is None:
                return
            try:
                sweep = request.begin()
            except OffloadError as error:
                self._answer(error)
                continue
            if sweep is None:
                self._answer(None)
            else:
                machine.handle(Begin(sweep))

    def _take_save(self) -> None:
        """Take note of a save that has ended, if one has."""
        ended, self.machine.saver.ended = self.machine.saver.ended, None
        if ended is not None:
            self._end_save(ended[1])

    def _end_save(self, error: BaseException | None) -> None:
        for number in self._saves.ended(error) if self._saves is not None else ():
            self.machine.handle(Release(number))

    def _take_request(self) -> _Request | None:
        self.executor.requests -= 1
        self._current = self._next
        return self._current

    def _answer(self, error: BaseException | None) -> None:
        request, self._current = self._current, None
        invariant(request is not None, "an answer to nobody")
        if request is not None:
            request.error = error
            self._reply.post(0)

    def _request(self, begin: Callable[[], Sweep | None], applied: Callable[[], None] = lambda: None) -> None:
        """Have the engine thread do something and wait until it has ended, well or not.

        A sweep reads gradients and writes weights until it has ended, so nothing may cut the wait short: handing over
        and waiting are one native call, and what is raised in this thread meanwhile (a KeyboardInterrupt, a signal
        handler's exception) is raised after it.

        Raises:
            BaseException: What the request ended with.
        """
        self.check_usable()
        request = _Request(begin, applied)
        self._next = request
        if self._gpu is not None:
            self._gpu.follow_caller()
        try:
            self._queue.exchange(REQUEST, self._reply)
            if request.error is not None:
                raise request.error
        except BaseException:  # whatever came of it, weights may be on their way
            if self._gpu is not None:
                with contextlib.suppress(OffloadError):
                    self._gpu.lead_caller()
            raise
        if self._gpu is not None:
            self._gpu.lead_caller()

    def _sweep(
        self,
        subgroups: Sequence[int],
        visitor: Callable[[Run], npt.NDArray[Any] | None],
        *,
        changes: bool,
        overwrites: bool = False,
        is_step: bool = False,
        applied: Callable[[], None] = lambda: None,
    ) -> None:
        def begin() -> Sweep:
            return self._begin(subgroups, visitor, changes=changes, overwrites=overwrites, is_step=is_step)

        self._request(begin, applied)

    def _begin(
        self,
        subgroups: Sequence[int],
        visitor: Callable[[Run], npt.NDArray[Any] | None],
        *,
        changes: bool,
        overwrites: bool = False,
        is_step: bool = False,
    ) -> Sweep:
        if is_step:
            self._learn()
        self.executor.visit_with(visitor)
        self._sweeps += 1
        self._version += changes
        order = visit_order(subgroups, self.machine.slots)
        if is_step:
            visits = update_visits(self.plan, order)
            self._bring_gradients(visits)
        else:
            visits = tuple(Visit(subgroup, changes, overwrites) for subgroup in order)
        return Sweep(self._sweeps, self._version, visits)

    @property
    def _is_usable(self) -> bool:
        unusable = self._closed or self.broken or self.machine.broken
        return not unusable and os.getpid() == self._pid

    def check_usable(self) -> None:
        """Raise `SessionBrokenError` unless this process can use the session."""
        if os.getpid() != self._pid:
            raise SessionBrokenError("this is a forked copy of a session; only the process that made it can use it")
        if self._closed:
            raise SessionBrokenError("the session is closed; make a new optimizer to go on")
        broken = self.broken or self.machine.broken
        if broken is not None:
            self.broken = broken
            raise SessionBrokenError(f"the session broke and cannot be used any more: {broken}") from broken

    # Requests

    def position(self, parameter: int | str) -> int:
        """Return a parameter's position from its position or name."""
        layout = self.plan.layout
        if isinstance(parameter, str):
            if parameter not in layout.index_by_name:
                raise ConfigError("parameter", parameter, "use a name that the engine was made with")
            return layout.index_by_name[parameter]
        if not 0 <= parameter < len(layout.parameters):
            raise ConfigError("parameter", parameter, f"use a position below {len(layout.parameters)}")
        return parameter

    def gradient_slot(self, position: int) -> torch.Tensor:
        """See `Engine.gradient_slot`."""
        if not self._has_slots:
            raise ConfigError("gradient_slots", False, "make the engine with gradient_slots=True")
        return self._slots[position]

    def keeps_gradient(self, position: int) -> bool:
        """See `Engine.keeps_gradient`."""
        return self._gradients is not None and self._gradients.positions[position].stays

    def forget_gradients(self) -> None:
        """See `Engine.forget_gradients`."""
        if self._gradients is not None and self._is_usable:
            self._gradients.forget()

    def gradient_arrived(self, position: int, address: int, dtype: DtypeCode) -> Mark | None:
        """See `Engine.gradient_arrived`."""
        self.check_usable()
        if self._gradients is not None:
            mark = self._gradients.arrived(position, address, dtype)
            self.bind_gradient(position, self._gradients.positions[position].kept, dtype, True)
            return mark
        slot = self._slots[position]
        kept, kept_dtype = address, dtype
        if self._has_slots and slot.numel():
            kept, kept_dtype = slot.data_ptr(), self._slot_dtype(self.plan.layout.parameters[position])
        self._gather(position, address, dtype, kept, kept_dtype)
        self.bind_gradient(position, kept, kept_dtype, True)
        return None

    def _gather(self, position: int, address: int, dtype: DtypeCode, kept: int, kept_dtype: DtypeCode) -> None:
        numel = self.plan.layout.parameters[position].numel
        copies = kept != address
        invariant(self._kernel is not None, "a gradient arrived before the kernel was made")
        if self._kernel is not None and numel:
            self._kernel.gradient_blocks(
                address,
                dtype,
                numel,
                self._blocks[position].ctypes.data,
                kept if copies else 0,
                kept_dtype if copies else DtypeCode.NONE,
            )

    def _is_as_gathered(self, position: int, address: int, dtype: DtypeCode) -> bool:
        """Return whether a gradient's largest block still has the sum that was gathered.

        A gradient may be scaled in place without a trace in its version counter, as `torch.amp.GradScaler.unscale_`
        does; that changes its largest block unless all are zero.
        """
        blocks = self._blocks[position]
        if not blocks.size or self._kernel is None:
            return True
        largest = int(np.argmax(blocks))
        start = largest * NORM_BLOCK_NUMEL
        numel = min(NORM_BLOCK_NUMEL, self.plan.layout.parameters[position].numel - start)
        found = np.empty(1, np.float64)
        source = address + start * TORCH_DTYPES[dtype].itemsize
        self._kernel.gradient_blocks(source, dtype, numel, found.ctypes.data)
        return found.tobytes() == blocks[largest : largest + 1].tobytes()

    def bind_gradient(self, position: int, address: int, dtype: DtypeCode, gathered: bool) -> None:
        """See `Engine.bind_gradient`."""
        self.tables.gradients[position] = address
        self.tables.gradient_dtypes[position] = dtype
        self._gathered[position] = gathered

    def gradient_norm_sq(self, positions: Sequence[int]) -> float:
        """See `Engine.gradient_norm_sq`."""
        self.check_usable()
        total = 0.0
        if self._gradients is not None:
            for position in positions:
                if not self._gathered[position]:
                    address, dtype = self.tables.gradients[position], self.tables.gradient_dtypes[position]
                    self._gradients.gather(position, int(address), DtypeCode(dtype))
            self._gradients.settle()
            return sum(sum_in_order(self._blocks[position]) for position in positions)
        for position in positions:
            address, dtype = int(self.tables.gradients[position]), DtypeCode(self.tables.gradient_dtypes[position])
            if not (self._gathered[position] and self._is_as_gathered(position, address, dtype)):
                self._gather(position, address, dtype, address, dtype)
                self._gathered[position] = True
            total += sum_in_order(self._blocks[position])
        return total

    def _address(self, run: Run) -> int:
        if run.slot is None:
            return self._residents[run.visit.subgroup]
        return self.executor.slot_address(run.slot)

    def step(self, groups: Sequence[GroupScalars], scale: float, clip: float, active: list[int]) -> None:
        """See `Engine.step`."""
        self.check_usable()
        with self._lock:
            self.check_usable()
            if not scale or not math.isfinite(scale):
                raise ConfigError("scale", scale, "give a finite number that is not 0")
            unbound = (self.tables.weights[active] == 0) | (self.tables.gradients[active] == 0)
            for number in np.flatnonzero(unbound):
                parameter = self.plan.layout.parameters[active[number]]
                if parameter.numel:
                    raise ConfigError("active", parameter.name, "bind its weight and its gradient before the step")
            started_s = time.monotonic()
            tables = self.tables
            subgroups = tables.begin_step(groups, scale, clip, active)

            def update(run: Run) -> npt.NDArray[Any]:
                if self._gpu is None:
                    table = tables.fill(run.visit.subgroup, self._address(run), fresh=run.fresh, update=True)
                elif run.visit.gpu:
                    address = self._gpu.state_address(run)
                    table = tables.fill(run.visit.subgroup, address, fresh=run.fresh, update=True)
                else:
                    table = self._fill_for_push(self._gpu, run)
                tables.changed(run.visit.subgroup)
                return table

            def applied() -> None:
                tables.steps[active] += 1
                self._step_number += 1
                self._step_started_s = started_s
                self._step_s = time.monotonic() - started_s

            try:
                self._sweep(subgroups, update, changes=True, is_step=True, applied=applied)
            except SessionBrokenError:
                raise
            except Exception as error:
                if error is not (self.broken or self.machine.broken):
                    raise  # not the sweep's: a signal handler's
                last = self._saves.last_folder if self._saves is not None else None
                raise StepAbortedError(self._step_number + 1, error, self.machine.moved, last) from error

    def _bring_gradients(self, visits: Sequence[Visit]) -> None:
        """Let the runs of a step find their gradients: those in host memory that the CPU will use."""
        gpu, gradients = self._gpu, self._gradients
        if gpu is None or gradients is None:
            return
        gpu.forget_inputs()
        gradients.finish_additions()
        self._wide.clear()
        self._step_gradients = addresses = self._host_gradients.copy()
        for visit in visits:
            copies, marks = [], []
            for segment in self.plan.layout.subgroups[visit.subgroup].segments:
                position = segment.parameter
                if not self.tables.is_active(position) or not segment.numel:
                    continue
                mark = gradients.positions[position].mark
                if mark is not None:  # it arrived during backward
                    marks.append(mark)
                elif not visit.gpu:
                    item = TORCH_DTYPES[DtypeCode(self.tables.gradient_dtypes[position])].itemsize
                    slot = self._slots[position]
                    if item > slot.element_size() and addresses[position] == self._host_gradients[position]:
                        self._wide.append(torch.empty(slot.numel()))  # an fp32 gradient of a 16-bit weight
                        addresses[position] = self._wide[-1].data_ptr()
                    start, nbytes = segment.start * item, segment.numel * item
                    source = int(self.tables.gradients[position]) + start
                    copies.append((int(addresses[position]) + start, source, nbytes))
            gpu.bring(visit, marks, copies)

    def _fill_for_push(self, gpu: GpuLanes, run: Run) -> npt.NDArray[Any]:
        """Return the table of a run on the CPU that makes weights for the GPU."""
        subgroup = run.visit.subgroup
        image = gpu.weight_slot(subgroup)
        table = self.tables.fill(
            subgroup,
            self._address(run),
            fresh=run.fresh,
            update=True,
            weights_address=image,
            gradients=self._step_gradients,
        )
        copies = self.tables.weight_copies(subgroup, image)
        active = (table["flags"] & np.uint32(SegmentFlag.ACTIVE)) != 0
        is_master = self.plan.layout.subgroups[subgroup].dtype is DtypeCode.FLOAT32
        read = active if is_master else (table["flags"] & np.uint32(SegmentFlag.LOAD_MASTER)) != 0
        if read.any():
            gpu.fetch([(host, there, nbytes) for there, host, nbytes in copies[read].tolist()], follows=False)
        gpu.will_push(subgroup, copies[active])
        return table

    @contextlib.contextmanager
    def _on_host(self, run: Run) -> Iterator[_View]:
        """Let a visit work in host memory, wherever state and weights lie; what it changes goes back."""
        gpu, subgroup = self._gpu, run.visit.subgroup
        if gpu is None:
            yield _View(self._address(run), None)
            return
        nbytes = self.plan.layout.subgroups[subgroup].state_bytes
        at_home = self.plan.at_home_on_gpu(subgroup)
        if at_home and self._bounce is not None:
            address = self._bounce.address
            if not run.fresh and not run.visit.overwrites:
                gpu.fetch([(address, gpu.home(subgroup), nbytes)])
        else:
            address = self._address(run)
        image = gpu.weight_slot(subgroup)
        copies = self.tables.weight_copies(subgroup, image)
        gpu.fetch([(host, there, nbytes) for there, host, nbytes in copies.tolist()])
        yield _View(address, image)
        if not run.visit.changes:
            gpu.drop(subgroup)
            return
        gpu.will_push(subgroup, copies)
        gpu.push_now(subgroup)
        if at_home:
            gpu.store([(gpu.home(subgroup), address, nbytes)])

    def _make_whole(self, run: Run, view: _View) -> None:
        """Fill memory that is undefined, and masters that are to be taken from their weights, before it is read."""
        subgroup = run.visit.subgroup
        if (run.fresh or self.tables.needs_reload(subgroup)) and self._kernel is not None:
            self._kernel.run(
                self.tables.fill(
                    subgroup, view.address, fresh=run.fresh, update=False, weights_address=view.weights_address
                )
            )

    def _weight(self, subgroup: int, segment: Segment, view: _View) -> torch.Tensor:
        """Return a segment's weight in host memory."""
        dtype = self.plan.layout.subgroups[subgroup].dtype
        item = TORCH_DTYPES[dtype].itemsize
        if view.weights_address is None:
            address = int(self.tables.weights[segment.parameter]) + segment.start * item
        else:
            address = view.weights_address + segment.offset * item
        return tensor_at(address, segment.numel, TORCH_DTYPES[dtype])

    def _pieces(self, run: Run, view: _View) -> list[tuple[Segment, dict[str, torch.Tensor]]]:
        """Return each segment of a subgroup in memory with views of its state tensors."""
        subgroup = self.plan.layout.subgroups[run.visit.subgroup]
        address = view.address
        pieces = []
        for segment in subgroup.segments:
            views = {
                name: tensor_at(
                    address + number * subgroup.tensor_bytes + segment.offset * STATE_ITEM_BYTES, segment.numel
                )
                for number, name in enumerate(subgroup.tensors)
            }
            if "master" not in views:
                views["master"] = self._weight(subgroup.index, segment, view)
            pieces.append((segment, views))
        return pieces

    def _subgroups_of(self, positions: Iterable[int]) -> tuple[int, ...]:
        places = self.plan.layout.places
        return tuple(sorted({subgroup for position in positions for subgroup, _ in places[position]}))

    def read_state(self, positions: list[int]) -> list[dict[str, torch.Tensor]]:
        """See `Engine.read_state`."""
        self.check_usable()
        with self._lock:
            numels = {position: self.plan.layout.parameters[position].numel for position in positions}
            found = {
                position: {name: torch.empty(numel, device="cpu") for name in STATE_NAMES}
                for position, numel in numels.items()
            }

            def read(run: Run) -> None:
                with self._on_host(run) as view:
                    self._make_whole(run, view)
                    for segment, views in self._pieces(run, view):
                        if segment.parameter in found:
                            for name in STATE_NAMES:
                                target = found[segment.parameter][name]
                                target[segment.start : segment.start + segment.numel] = views[name]

            self._sweep(self._subgroups_of(positions), read, changes=False)
            return [found[position] for position in positions]

    def visit_state(self, take: Callable[[int, int, Mapping[str, torch.Tensor]], None]) -> None:
        """See `Engine.visit_state`."""
        self.check_usable()
        failed: list[Exception] = []

        def visit(run: Run) -> None:
            with self._on_host(run) as view:
                self._make_whole(run, view)
                for segment, views in self._pieces(run, view):
                    if failed:
                        break
                    try:
                        take(segment.parameter, segment.start, views)
                    except Exception as error:  # the reader's own affair
                        failed.append(error)

        with self._lock:
            self._sweep(range(len(self.plan.layout.subgroups)), visit, changes=False)
        if failed:
            raise failed[0]

    def write_state(self, values: Mapping[int, Mapping[str, torch.Tensor]], steps: Mapping[int, int]) -> None:
        """See `Engine.write_state`."""
        self.check_usable()
        with self._lock:
            self.check_usable()
            for position, tensors in values.items():
                parameter = self.plan.layout.parameters[position]
                for name, tensor in tensors.items():
                    if tensor.numel() != parameter.numel:
                        allowed = f"give {parameter.numel} elements"
                        raise ConfigError(f"{name} of {parameter.name}", tensor.numel(), allowed)

            def write(run: Run) -> None:
                with self._on_host(run) as view:
                    self._make_whole(run, view)
                    self.tables.changed(run.visit.subgroup)
                    for segment, views in self._pieces(run, view):
                        for name, tensor in values.get(segment.parameter, {}).items():
                            views[name].copy_(tensor.reshape(-1)[segment.start : segment.start + segment.numel])

            def applied() -> None:
                for position, step in steps.items():
                    self.tables.steps[position] = step

            self._sweep(self._subgroups_of(values), write, changes=True, applied=applied)

    # Checkpoints

    def _gather_tile(self, tile: TileId, address: int) -> None:
        """Copy a tile of state on the GPU to `address`, or the masters that a weight tile is; padding is zero."""
        subgroup = self.plan.layout.subgroups[tile.subgroup]
        gpu = self._gpu
        if gpu is not None and tile.tensor < len(subgroup.tensors):
            offset, nbytes = next((offset, nbytes) for found, offset, nbytes in subgroup.tiles if found == tile)
            gpu.fetch([(address, gpu.home(tile.subgroup) + offset, nbytes)])
            return
        first = tile.tile * subgroup.tile_numel
        nbytes = next(nbytes for found, _, nbytes in subgroup.weight_tiles if found == tile)
        last = first + nbytes // STATE_ITEM_BYTES
        ctypes.memset(address, 0, nbytes)
        for segment in subgroup.segments:
            begin, end = max(first, segment.offset), min(last, segment.offset + segment.numel)
            if begin < end:
                weight = int(self.tables.weights[segment.parameter])
                source = weight + (segment.start + begin - segment.offset) * STATE_ITEM_BYTES
                target, nbytes = address + (begin - first) * STATE_ITEM_BYTES, (end - begin) * STATE_ITEM_BYTES
                if gpu is None:
                    ctypes.memmove(target, source, nbytes)
                else:
                    gpu.fetch([(target, source, nbytes)])

    def save(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, Any],
        extra: bytes | None,
        pieces: Sequence[Piece] | None,
        copy: bool,
        on_done: Callable[[BaseException | None], None] | None,
        id: str,
        rank: int,
        ranks: int,
        replica: bool,
    ) -> None:
        """See `Engine.save`."""
        self.check_usable()
        saves = self._saves
        if saves is None:
            return
        folder = open_folder(path)
        copy = copy or not self._tiers
        if not copy and not self.config.checkpoints:
            raise ConfigError("checkpoints_kept", 0, "keep at least 1, or save with copy=True")
        with self._lock:
            if saves.pending is not None:
                log.info("waiting for the checkpoint in %s before the next", saves.pending.folder.path)
                saves.pending.done.wait()
            self.check_usable()
            layout = self.plan.layout
            saved = Layout((), ()) if replica else layout
            # State that is still to be taken from the weights is taken now, so that all of it is somewhere; what lies
            # in another session's store goes to ours, so that the checkpoint refers to no other.
            unmade = [
                subgroup.index
                for subgroup in layout.subgroups
                if (not replica and self.machine.is_fresh(subgroup.index))
                or (not replica and self.tables.needs_reload(subgroup.index))
                or any(self.machine.index.is_foreign(tile) for tile, _, _ in subgroup.tiles)
            ]
            if unmade:

                def make(run: Run) -> None:
                    with self._on_host(run) as view:
                        self._make_whole(run, view)
                        self.tables.changed(run.visit.subgroup)

                self._sweep(unmade, make, changes=True)
            wholes = pieces if pieces is not None else [Piece(0, p.numel) for p in layout.parameters]
            snapshot = Snapshot(
                layout=saved,
                step=self._step_number,
                steps=() if replica else tuple(self.tables.steps.tolist()),
                pieces=() if replica else tuple(wholes),
                metadata=metadata,
                extra=extra,
                id=id,
                rank=rank,
                ranks=ranks,
                copy=copy,
            )
            pending = saves.prepare(
                folder,
                snapshot,
                needs_buffers=any(subgroup.weight_tiles for subgroup in saved.subgroups) or self.plan.uses_gpu,
                io_backend=self.config.io_backend,
                on_done=on_done,
            )

            def begin() -> None:
                machine = self.machine
                pump(machine, self.executor, lambda m: m.broken is not None or State.BUSY not in m.states)
                saves.pending = pending
                machine.handle(BeginSave(pending.save))
                saves.records_are(machine.saver.records)
                pump(machine, self.executor, lambda m: not m.saver.weights_left or m.saver.ended is not None)
                if machine.saver.ended is not None and machine.saver.ended[1] is not None:
                    error = machine.saver.ended[1]
                    self._take_save()
                    raise error

            try:
                self._request(begin)
            finally:
                saves.forget(pending)

    def wait_checkpoint(self, timeout_s: float | None) -> None:
        """See `Engine.wait_checkpoint`."""
        saves = self._saves
        pending = (saves.pending or saves.last) if saves is not None else None
        if pending is None:
            return
        if not pending.done.wait(timeout_s):
            raise TimeoutError(f"the checkpoint in {pending.folder.path} is not written after {timeout_s} s")
        if isinstance(pending.error, CheckpointError):
            raise pending.error
        if pending.error is not None:
            raise CheckpointError(
                f"no checkpoint was written to {pending.folder.path}: {pending.error}"
            ) from pending.error

    def load(
        self,
        checkpoint: StateSource,
        names: Mapping[str, str],
        pieces: Sequence[Piece] | None,
        rank: int,
        ranks: int,
    ) -> None:
        """See `Engine.load`."""
        self.check_usable()
        parameters = self.plan.layout.parameters
        wholes = pieces if pieces is not None else [Piece(0, parameter.numel) for parameter in parameters]
        there = [names.get(parameter.name, parameter.name) for parameter in parameters]
        known = set(checkpoint.names)
        missing = [name for name in there if name not in known]
        if missing:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: it has no {', '.join(missing[:3])}"
                f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}; "
                f"it has {', '.join(checkpoint.names[:3])}, ..."
            )
        for name, piece in zip(there, wholes, strict=True):
            if checkpoint.full_numel(name) != piece.full_numel:
                raise CheckpointError(
                    f"{checkpoint.path} is of another model: {name} has {checkpoint.full_numel(name)} elements there "
                    f"and {piece.full_numel} here"
                )
        with self._lock:
            self.check_usable()

            def restore(run: Run) -> None:
                with self._on_host(run) as view:
                    self._restore(run, view, checkpoint, there, wholes)

            def applied() -> None:
                self.tables.steps[:] = [checkpoint.step_of(name) for name in there]
                self._step_number = checkpoint.step

            layout, saves = self.plan.layout, self._saves
            manifest = None
            if isinstance(checkpoint, Checkpoint):
                manifest = manifest_in_place(checkpoint, layout, there, wholes, rank, ranks)

            def begin() -> Sweep:
                pump(self.machine, self.executor, lambda m: m.in_flight == 0 or m.broken is not None)
                self._take_save()
                if self.machine.broken is not None:
                    raise self.machine.broken
                copied = [subgroup.index for subgroup in layout.subgroups]
                # Versions go on from there: no two of a tile have the same number.
                self._version = max(self._version, checkpoint.last_version)
                if manifest is not None and isinstance(checkpoint, Checkpoint):
                    copied = [number for number in copied if self.plan.resident[number]]
                    self._adopt_state(checkpoint, manifest, there, wholes, rank)
                return self._begin(copied, restore, changes=True, overwrites=True)

            try:
                self._request(begin, applied)
            except SessionBrokenError:
                raise
            except OffloadError as error:
                if error is (self.broken or self.machine.broken):
                    raise CheckpointError(
                        f"{error}. The state was partly replaced, so the session is broken: load another checkpoint "
                        "into a new optimizer"
                    ) from error
                raise
            if saves is not None and manifest is None and isinstance(checkpoint, Checkpoint):
                saves.resumed(checkpoint, rank, ranks)

    def _adopt_state(
        self, checkpoint: Checkpoint, manifest: Manifest, names: Sequence[str], pieces: Sequence[Piece], rank: int
    ) -> None:
        """Go on from a checkpoint where it lies, but for what is at home in memory; on the engine thread."""
        saves, machine, layout = self._saves, self.machine, self.plan.layout
        invariant(saves is not None, "a checkpoint is gone on from without a session")
        if saves is None:
            return
        paths = self.config.path_configs

        def install(number: int, tier: Tier) -> None:
            if self._staging is not None:
                tier.register_memory(self._staging.address, self._staging.nbytes)
            self._tiers[number].close()
            self._tiers[number] = tier

        exchange = Exchange(
            layout,
            machine.index.is_empty,
            lambda number, store, used: self._open_tier(paths[number], store, self._tiers[number].depth, used),
            install,
        )
        adopted = saves.adopt(checkpoint, manifest, machine.index, exchange, rank)
        streamed = [subgroup for subgroup in layout.subgroups if not self.plan.resident[subgroup.index]]
        tiles = [tile for subgroup in streamed for tile, _, _ in subgroup.tiles]
        machine.handle(TakeUp(adopted.limits, adopted.held, {tile: adopted.records[tile] for tile in tiles}))
        try:
            for subgroup in streamed:
                self._derive_weights(checkpoint, subgroup, names, pieces)
                self.tables.changed(subgroup.index)
        except OffloadError as error:
            self.broken = error
            raise

    def _derive_weights(
        self, checkpoint: Checkpoint, subgroup: Subgroup, names: Sequence[str], pieces: Sequence[Piece]
    ) -> None:
        """Make the weights of a subgroup from the masters that a checkpoint has."""
        gpu, number = self._gpu, subgroup.index
        view = _View(0, gpu.weight_slot(number) if gpu is not None else None)
        ranges, weights = [], []
        for segment in subgroup.segments:
            weight = self._weight(number, segment, view)
            master = weight if weight.dtype is torch.float32 else torch.empty(segment.numel)
            start = pieces[segment.parameter].start + segment.start
            ranges.append(Range(names[segment.parameter], "master", start, master.numpy()))
            weights.append((weight, master))
        try:
            checkpoint.read(ranges)
        finally:
            if gpu is not None:
                gpu.drop(number)
        for weight, master in weights:
            if weight is not master:
                weight.copy_(round_weight(master, weight.dtype))
        if gpu is not None and view.weights_address is not None:
            gpu.store(self.tables.weight_copies(number, view.weights_address).tolist())

    def _restore(
        self, run: Run, view: _View, checkpoint: StateSource, there: Sequence[str], wholes: Sequence[Piece]
    ) -> None:
        """Take a subgroup's state, and the weights that follow from it, from a checkpoint."""
        subgroup = run.visit.subgroup
        parts = self._pieces(run, view)
        checkpoint.read(
            [
                Range(
                    there[segment.parameter],
                    name,
                    wholes[segment.parameter].start + segment.start,
                    views[name].numpy(),
                )
                for segment, views in parts
                for name in STATE_NAMES
                if checkpoint.has(there[segment.parameter], name)
            ]
        )
        for segment, views in parts:
            if not checkpoint.has(there[segment.parameter], "master"):
                views["master"].copy_(self._weight(subgroup, segment, view))
        self.tables.changed(subgroup)
        if self.plan.layout.subgroups[subgroup].dtype is not DtypeCode.FLOAT32:
            for segment, views in parts:
                weight = self._weight(subgroup, segment, view)
                weight.copy_(round_weight(views["master"], weight.dtype))

    # Figures

    def _learn(self) -> None:
        """Take the rates from what the last step did, and let the spread of tiles follow them."""
        self.executor.take_timed()
        if self._step_number > 1:  # the first step reads nothing, and touches memory for the first time
            self._seen = [*self._seen[1 - HISTORY :], observe(self.rates, self.executor.timeline)]
            self.rates = typical(self._seen)
        self.executor.timeline = []
        if self.plan.budgets.follow_rates:
            self.machine.index.reshare(self.plan.shares(self.rates))

    def metrics(self) -> dict[str, float]:
        """See `Engine.metrics`."""
        plan = self.plan
        found: dict[str, float] = {
            "step": self._step_number,
            "step_s": self._step_s,
            "state_bytes": plan.state_bytes,
            "resident_bytes": plan.resident_bytes,
            "streamed_bytes": plan.streamed_bytes,
            "resident_share": plan.resident_bytes / plan.state_bytes if plan.state_bytes else 1.0,
        }
        if self._gpu is not None:
            found["gpu_bytes"] = plan.gpu_bytes
        self.executor.take_timed()
        # A step returns when the GPU knows what to do; it has ended when new weights are there.
        ends_s = [i.finished_s for i in self.executor.timeline if i.lane in ("gpu", "h2d")]
        found["step_s"] = max([self._step_s, *(end_s - self._step_started_s for end_s in ends_s)])
        totals = lane_totals(list(self.executor.timeline))
        lanes = [
            "cpu",
            *(("gpu", "h2d", "d2h") if self._gpu is not None else ()),
            *(f"{verb}:{path}" for path in range(len(self._tiers)) for verb in ("read", "write")),
        ]
        for lane in lanes:
            nbytes, busy_s = totals.get(lane, (0, 0.0))
            found[f"lane/{lane}/busy_s"] = busy_s
            found[f"lane/{lane}/bytes"] = nbytes
            if ":" in lane:
                verb, path = lane.split(":")
                found[f"path/{path}/{verb}_bytes"] = nbytes
        for number, live_bytes in enumerate(self.machine.index.live_bytes()):
            found[f"path/{number}/live_bytes"] = live_bytes
        return found

    # The end

    def close(self) -> None:
        """See `Engine.close`."""
        if os.getpid() != self._pid:  # a lock that another thread held at the fork stays held
            return
        with self._lock:
            if self._closed:
                return
            if (
                self._saves is not None
                and self._saves.pending is not None
                and not (self.broken or self.machine.broken)
            ):
                self._saves.pending.done.wait()
            self._closed = True
            if self._thread is not None:
                self._next = None
                self._queue.post(REQUEST)
                if self._thread is not threading.current_thread():  # the garbage collector may run on it
                    self._thread.join()
            self._free()

    def _keep_slots(self) -> None:
        """Tell the tiers which slots kept checkpoints refer to, so that closing leaves them."""
        held: dict[int, set[int]] = {}
        for records in self.machine.saver.held.values():
            for record in records.values():
                held.setdefault(record.location.path, set()).add(record.location.offset)
        for number, tier in enumerate(self._tiers):
            if held.get(number):
                innermost(tier).kept = frozenset(held[number])  # type: ignore[attr-defined]

    def _free(self) -> None:
        if self._saves is not None:
            self._keep_slots()
        with contextlib.ExitStack() as ends:  # in reverse, and each whatever becomes of the others
            if self._saves is not None:
                ends.callback(self._saves.close)
            for arena in self._arenas:
                ends.callback(arena.close)
            ends.callback(self._slots.clear)
            # Lanes first: they write into the arenas until they are closed.
            for tier in self._tiers:
                ends.callback(tier.close)
            if self._kernel is not None:
                ends.callback(self._kernel.close)
            if self._gradients is not None:
                ends.callback(self._gradients.close)
            if self._gpu is not None:
                ends.callback(self._gpu.close)


def _refuse_gpu(config: OffloadConfig) -> None:
    """Raise `ConfigError` if a GPU is asked for where there is none."""
    if config.gpu_memory not in ("auto", 0):
        raise ConfigError("gpu_memory", config.gpu_memory, "use 0: the weights are not on a GPU")
    if config.placement not in ("auto", "cpu", 0):
        raise ConfigError("placement", config.placement, 'use "cpu": the weights are not on a GPU')
    if not config.keep_grads:
        raise ConfigError("keep_grads", False, "use true: gradients that are not on a GPU lie in their slots anyway")


def _tune_depth(tier: Tier, queue: CompletionQueue, staging: Arena | None) -> None:
    """Find out how many requests a path should have in flight, and say it."""
    tried = tune_depth(tier, queue, staging.address, staging.nbytes) if staging is not None else {}
    seen = ", ".join(f"{rate / 1e9:.2f} GB/s with {depth}" for depth, rate in tried.items())
    log.info("path %s: %d requests of each direction in flight (%s)", tier.path, tier.depth, seen or "not tried")


def _choose_turns(config: OffloadConfig, path: PathConfig) -> Turns | None:
    """Return how to take turns on a path with other processes, or None for not at all."""
    # "auto" is off: whether turns pay depends on the device, and bench/lock.py has found none where they do.
    if config.path_lock in ("off", "auto"):
        return None
    holders = config.path_lock if isinstance(config.path_lock, int) else 1
    return Turns(path=path.lock_path, holders=holders, report_after_s=config.lock_timeout_s)
