"""The core of a session: what its engine thread works with, and the requests that it answers.

`Engine` (offload/session/engine.py) is its face, and says what each request means.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload import waits
from offload._native import CompletionQueue
from offload.checkpoint.adopt import manifest_in_place
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import Manifest, Piece
from offload.checkpoint.reader import Checkpoint, StateSource
from offload.checkpoint.restore import Restorer
from offload.checkpoint.saves import Exchange, Saves, Snapshot, save_error
from offload.checkpoint.stores import leftover_bytes, released_before
from offload.config import OffloadConfig
from offload.dtypes import DtypeCode
from offload.engine.executor import INTERRUPT, REQUEST, LiveExecutor, visit_nothing
from offload.engine.gpu import GpuLanes
from offload.engine.gradients import Gradients, GradientSlots
from offload.engine.host import HostMemory
from offload.engine.index import TileIndex
from offload.engine.loop import pump
from offload.engine.machine import Machine, Phase, update_visits
from offload.engine.memory import available_bytes
from offload.engine.operations import Begin, BeginSave, Extend, Release, Reshare, Run, Stop, Sweep, TakeUp, Visit
from offload.engine.tables import Tables
from offload.engine.views import StateViews
from offload.errors import (
    CheckpointError,
    ConfigError,
    InfeasiblePlanError,
    InternalError,
    OffloadError,
    SessionBrokenError,
    StepAbortedError,
    TierError,
    invariant,
)
from offload.kernels import CpuUpdateKernel
from offload.layout import (
    MAX_TILE_BYTES,
    Layout,
    Parameter,
    Segment,
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
    Plan,
    Rates,
    choose_plan,
    choose_subgroup_numel,
    make_plan,
    visit_order,
)
from offload.protocols import Completion, Device, Mark, Tier, TileRequest
from offload.rules import ADAMW, UpdateRule
from offload.session.setup import (
    LEAST_TILE_BYTES,
    default_threads,
    first_budgets,
    gpu_staging_bytes,
    named_error,
    open_path,
    refuse_gpu,
    usable_bytes,
)
from offload.tiers import check_directories, innermost

log = logging.getLogger("offload")

TILES_PER_PATH = 4

CLOSE_S = 30.0
"""How long `close` waits for other ranks to write their part of a checkpoint. Where theirs may take longer,
`wait_checkpoint` waits before."""

UNWIND_S = 30.0
"""How long `close` waits for devices with an exception on its way, which nobody sees before."""


@dataclass(slots=True)
class _Request:
    """Something that a caller waits for."""

    begin: Callable[[], Sweep | None]
    """Runs on the engine thread with no sweep under way; returns the sweep to run, or None if that was all."""
    applied: Callable[[], None]
    """Takes note of a sweep that has ended well; on the engine thread, where no interrupt can come between."""
    error: BaseException | None = None


class Core:
    """What the engine thread works with.

    Made in two steps, so that whoever makes it can `close` it whatever comes in between: a new one holds nothing, and
    `open` makes the session.
    """

    def __init__(
        self, config: OffloadConfig, gradient_slots: bool, device: Device | None = None, rule: UpdateRule = ADAMW
    ) -> None:
        self.config = config
        self._rule = rule
        self.broken: BaseException | None = None
        self.tables = Tables()
        self._pid = os.getpid()
        self._closed = self._freed = self._serving = self._told_broken = self._told_left = False
        self._gives_up = False  # a close was interrupted: the next one waits for nothing that may never come
        self._starting = threading.Lock()
        self._requesting: int | None = None
        self._close_wanted = False
        self._stop = waits.Aside(self._stop_thread, "offload-stop")
        self._opening: waits.Aside | None = None
        self._end: waits.Aside | None = None
        self._closing: list[tuple[Tier, waits.Aside]] = []
        self._lock = threading.RLock()
        self._ends = contextlib.ExitStack()  # runs in reverse, and each whatever becomes of the others
        self._next: _Request | None = None
        self._current: _Request | None = None
        self._reply = CompletionQueue()
        self._tiers: list[Tier] = []
        self._saves: Saves | None = None
        self._queue = CompletionQueue()
        self._gpu = GpuLanes(device, self._queue) if device is not None else None
        self._memory = HostMemory(self._gpu)
        self._gradient_slots = GradientSlots(
            dtype=DtypeCode.FLOAT32 if config.gradient_dtype == "float32" else None,
            wanted=gradient_slots or device is not None,
            passing=device is not None and not config.keep_grads,
        )
        self._thread: threading.Thread | None = None
        self._threads = config.threads or default_threads(device)
        self._step_number = self._version = self._sweeps = 0
        self._step_s = self._step_started_s = 0.0

    def open(self, parameters: tuple[Parameter, ...]) -> None:
        """Make the session; whoever gets an error closes the core."""
        # Aside, so that no interrupt comes between what is made and taking note of it.
        self._opening = waits.Aside(partial(self._on_device, partial(self._open, parameters)), "offload-open")
        self._opening.start()
        waits.wait_for(self._opening.wait, lambda: "the paths to be opened and probed")
        if self._opening.error is not None:
            raise self._opening.error

    def _open(self, parameters: tuple[Parameter, ...]) -> None:
        config, queue, memory = self.config, self._queue, self._memory
        device = self._gpu.device if self._gpu is not None else None
        paths = config.path_configs
        check_directories([path.path for path in paths])
        known = session_rates(str(config.rates), [path.path for path in paths], self._threads)
        if known is not None and device is None:
            known = dataclasses.replace(known, gpu=None)  # no lane of this session is on one
        elif known is not None and known.gpu is None:
            known = None
        if device is None:
            refuse_gpu(config)
        numel = sum(parameter.numel for parameter in parameters)
        staging = None if config.staging_memory is None else int(config.staging_memory)
        self._subgroup_numel = config.subgroup_numel or choose_subgroup_numel(numel, staging, self._rule)
        state_bytes = self._rule.item_bytes * self._subgroup_numel
        striped_bytes = state_bytes // (TILES_PER_PATH * max(1, len(paths)))
        self._tile_bytes = max(LEAST_TILE_BYTES, min(MAX_TILE_BYTES, striped_bytes))
        layout = extend_layout(Layout((), (), self._rule), parameters, self._subgroup_numel, self._tile_bytes)
        gradient_bytes = self._gradient_slots.total_bytes(parameters)
        leftover = leftover_bytes([path.path for path in paths])
        budgets = first_budgets(config, layout, device, gradient_bytes, leftover)
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
        # Lanes end first: they write into memory until they are closed.
        self._ends.callback(memory.close)
        self._ends.callback(self._close_tiers)
        store = uuid.uuid4()
        for number, path in enumerate(paths):
            self._tiers.append(self._open_tier(number, store, path.depth))
        self._kernel = kernel = CpuUpdateKernel(queue, self._threads)
        self._ends.callback(kernel.close)
        self.gradients = Gradients(self._gradient_slots, self.tables, kernel, memory, self._gpu)
        self._ends.callback(self.gradients.close)
        if self._gpu is not None:
            self._ends.callback(self._gpu.close)
        self.executor = LiveExecutor(
            self._tiers,
            kernel,
            queue,
            self._tier_error,
            verify=config.checksum,
            stall_s=config.stall_timeout_s,
            gpu=self._gpu,
        )
        memory.adopt_homes(self.plan, Layout((), ()))
        self._adopt_staging(self.plan, {})
        self.tables.extend(self.plan.layout)
        for path, tier in zip(paths, self._tiers, strict=True):
            if path.depth is None:
                _tune_depth(tier, queue, *memory.staging)
        self.rates = known or quick_probe(kernel, self._tiers, queue, memory.staging[0], self.plan)
        if self._gpu is not None and known is None:
            self.rates = dataclasses.replace(self.rates, gpu=probe_device(self._gpu, self.plan))
            self.plan = choose_plan(layout, budgets, self.rates, config.placement, kept=self.plan)
            log.info("%s", self.plan)
            self._adopt_staging(self.plan, {})
        if self._gpu is not None:
            self.plan = self._adopt_gpu(self._gpu, self.plan, Layout((), ()))
            self._gpu.bind(self.plan)
        self.gradients.adopt(self.plan, Layout((), ()))
        self._views = StateViews(self.plan, self.tables, kernel, memory, self.executor.slot_address, self._gpu)
        self._seen: list[Rates] = [self.rates]
        shares = self.plan.shares(self.rates)
        limits = [(path.available_bytes, s) for path, s in zip(self.plan.budgets.paths, shares, strict=True)]
        index = TileIndex(limits, self.plan.slot_counts, self.plan.checkpoint_bytes)
        self.machine = Machine(self.plan, index, log.warning, self._say_broken)
        self._saves = self.executor.save_source = Saves(
            queue,
            [(path.path, store) for path in paths],
            self.executor.others,
            memory.home,
            self._views.gather_tile,
            lambda: (memory.checkpoint_buffers(self.plan)[0], self.plan.largest_tile_bytes),
            keep=config.checkpoints,
            checksum=config.checksum,
        )
        self._thread = threading.Thread(target=self._serve, name="offload-engine", daemon=True)
        self._thread.start()

    # Set-up

    def _open_tier(self, number: int, store: uuid.UUID, depth: int | None, used_bytes: int | None = None) -> Tier:
        path = self.config.path_configs[number]
        return open_path(self.config, path, store, self._queue, self.plan.storage_bytes, depth, used_bytes)

    def _tier_error(self, verb: str, completion: Completion, request: TileRequest | None, tier: Tier) -> TierError:
        return named_error(self.plan.layout, verb, completion, request, tier)

    def _adopt_staging(self, plan: Plan, held: Mapping[int, int]) -> None:
        """Have staging slots as `plan` says, with what the slots in use, by subgroup, hold."""
        self._memory.adopt_staging(plan, held, self._tiers)
        self.executor.bind(plan, self._memory.staging[0])

    def _adopt_gpu(self, gpu: GpuLanes, plan: Plan, before: Layout) -> Plan:
        """Take memory for what `plan` adds on the GPU and for it; return the plan with its gradients' bytes."""
        slots = self._gradient_slots
        layout = plan.layout
        gpu.device.prepare(layout.rule.name, {(slots.dtype_of(found), found.dtype) for found in layout.parameters})
        self._memory.adopt_gpu(gpu, plan, before)
        return self._counting_gradients(plan)

    def _counting_gradients(self, plan: Plan) -> Plan:
        """Return a plan with the bytes that its gradients take, with weights on a GPU."""
        budgets = dataclasses.replace(plan.budgets, gradient_bytes=self.gradients.used_bytes(plan))
        return dataclasses.replace(plan, budgets=budgets)

    def add(self, parameters: tuple[Parameter, ...]) -> None:
        """See `Engine.add`."""
        before = self.plan
        layout = extend_layout(before.layout, parameters, self._subgroup_numel, self._tile_bytes)
        gradients = self._gradient_slots.total_bytes(layout.parameters)
        budgets = dataclasses.replace(before.budgets, gradient_bytes=gradients)
        if self._gpu is not None and self.config.placement != "cpu":
            staging = max(budgets.gpu_staging_bytes, gpu_staging_bytes(layout, usable_bytes(self._gpu.device)))
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
            most = before.slot_bytes // before.layout.rule.item_bytes
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
            # Each of these may find no memory; what went before it is not used then.
            if self._gpu is not None:
                plan = self._adopt_gpu(self._gpu, plan, before.layout)
            self._memory.adopt_homes(plan, before.layout)
            self.gradients.adopt(plan, before.layout)
            self._adopt_staging(plan, self.machine.slots)
            if self._gpu is not None:
                self._gpu.bind(plan)
            self.tables.extend(plan.layout)
            self.machine.handle(Extend(plan))
            self.plan = self._views.plan = plan

        with self._lock:
            self._wait_for_save()
            self._request(extend)

    # The engine thread

    def _serve(self) -> None:
        with self._starting:
            if self._closed:
                return
            self._serving = True
        try:
            if self._gpu is not None:
                self._gpu.device.adopt_thread()
            self._serve_requests()
        except Exception as error:
            # Nobody waits for this thread itself: whoever waits for an answer, and whoever asks next, is told.
            self.broken = error
            self._say_broken(error)
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
            if self._take_request() is None:
                self._finish()
                return
            self._begin_request()

    def _begin_request(self) -> None:
        request = self._current
        invariant(request is not None, "a request from nobody")
        if request is None:
            return
        try:
            sweep = request.begin()
        except OffloadError as error:
            self._take_save()  # that which a session that broke was committing
            self._answer(error)
            return
        if sweep is None:
            self._answer(None)
        else:
            self.machine.handle(Begin(sweep))

    def _finish(self) -> None:
        """Finish what is in flight as the session is closed; a device that does not answer breaks it, as ever."""
        saves = self._saves
        if saves is not None and saves.pending is not None:  # whoever closes does not wait for it
            where, self._told_broken = saves.pending.folder.path, True
            self.machine.handle(Stop(CheckpointError(f"the session was closed before {where} was committed")))
            self._take_save()
        pump(self.machine, self.executor, lambda m: m.in_flight == 0 or m.broken is not None)

    def _say_broken(self, error: BaseException) -> None:
        """Log what has broken the session, once, when it happens: whoever is told may be held up for long."""
        if not self._told_broken:
            log.error("the session has broken and cannot be used any more: %s", error)
        self._told_broken = True

    def _take_save(self) -> None:
        """Take note of a save that has ended, if one has."""
        ended = self.machine.take_saved()
        if ended is not None:
            self._end_save(ended[1])

    def _end_save(self, error: BaseException | None) -> None:
        self._drop_checkpoint_buffers()
        broke = self.broken is not None or self.machine.broken is not None
        for number in self._saves.ended(error, broke=broke) if self._saves is not None else ():
            self.machine.handle(Release(number))

    def _drop_checkpoint_buffers(self) -> None:
        """Give back what a checkpoint has passed through; on the engine thread.

        A session that has broken keeps it until its lanes have ended: they may still write there.
        """
        if not (self.broken or self.machine.broken):
            self._memory.drop_checkpoint_buffers()

    def _take_request(self) -> _Request | None:
        self.executor.requests -= 1
        self._current = self._next
        return self._current

    def _answer(self, error: BaseException | None) -> None:
        request, self._current = self._current, None
        invariant(request is not None, "an answer to nobody")
        # What a request has read, or reads from, is its caller's: nothing here holds on to it.
        self._next = None
        self.executor.visit_with(visit_nothing)
        if request is not None:
            request.error = error
            self._reply.post(0)

    def _request(self, begin: Callable[[], Sweep | None], applied: Callable[[], None] = lambda: None) -> None:
        """Have the engine thread do something and wait until it has ended, well or not.

        A sweep reads gradients and writes weights until it has ended, so nothing may cut the wait short: handing over
        and waiting are one native call, and what is raised in this thread meanwhile (a KeyboardInterrupt, a signal
        handler's exception) is raised after it. While no lane gives a sign of life for long, that also ends the
        sweep, and breaks the session.

        Raises:
            BaseException: What the request ended with.
        """
        request = _Request(begin, applied)
        try:
            self._requesting = threading.get_ident()  # from here on a signal handler's close waits for the answer
            self.check_usable()
            self._exchange(request)
        finally:
            self._requesting = None
            if self._close_wanted:
                self.close()

    def _exchange(self, request: _Request) -> None:
        self._next = request
        if self._gpu is not None:
            self._gpu.follow_caller()
        try:
            self._queue.exchange(REQUEST, self._reply, waits.QUIET_S, INTERRUPT)
            if request.error is not None:
                raise request.error
        except BaseException:  # whatever came of it, weights may be on their way
            if self._gpu is not None:
                with contextlib.suppress(OffloadError):
                    self._gpu.lead_caller()
            raise
        if self._gpu is not None:
            self._gpu.lead_caller()

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
            try:
                if self.gradients.bring(self.plan, visits):
                    self.plan = self._counting_gradients(self.plan)
            except OffloadError as error:  # the GPU has failed
                self.machine.handle(Stop(error))
                raise (self.machine.broken or error) from None
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

    def gradient_arrived(self, position: int, address: int, dtype: DtypeCode) -> Mark | None:
        """See `Engine.gradient_arrived`."""
        self.check_usable()
        return self.gradients.arrived(position, address, dtype)

    def forget_gradients(self) -> None:
        """See `Engine.forget_gradients`."""
        if self._is_usable:
            self.gradients.forget()

    def gradient_norm_sq(self, positions: Sequence[int]) -> float:
        """See `Engine.gradient_norm_sq`."""
        self.check_usable()
        return self.gradients.norm_sq(positions)

    def step(self, groups: Sequence[Any], scale: float, clip: float, active: list[int]) -> None:
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
            subgroups = self.tables.begin_step(groups, scale, clip, active)

            def update(run: Run) -> npt.NDArray[Any]:
                return self._views.update_table(run, self.gradients.addresses)

            def applied() -> None:
                self.tables.steps[active] += 1
                self._step_number += 1
                self._step_started_s = started_s
                self._step_s = time.monotonic() - started_s

            try:
                self._request(partial(self._begin, subgroups, update, changes=True, is_step=True), applied)
            except SessionBrokenError:
                raise
            except Exception as error:
                if error is not (self.broken or self.machine.broken):
                    raise  # not the sweep's: a signal handler's
                last = self._saves.last_folder if self._saves is not None else None
                raise StepAbortedError(self._step_number + 1, error, self.machine.moved, last) from error

    def _subgroups_of(self, positions: Iterable[int]) -> tuple[int, ...]:
        places = self.plan.layout.places
        return tuple(sorted({subgroup for position in positions for subgroup, _ in places[position]}))

    def read_state(self, positions: list[int]) -> list[dict[str, torch.Tensor]]:
        """See `Engine.read_state`."""
        self.check_usable()
        with self._lock:
            layout = self.plan.layout
            names, numels = layout.rule.names, {position: layout.parameters[position].numel for position in positions}
            found = {
                position: {name: torch.empty(numel, dtype=torch.float32, device="cpu") for name in names}
                for position, numel in numels.items()
            }

            def read(run: Run) -> None:
                with self._views.on_host(run) as view:
                    self._views.make_whole(run, view)
                    for segment, views in self._views.pieces(run, view):
                        if segment.parameter in found:
                            for name in names:
                                target = found[segment.parameter][name]
                                target[segment.start : segment.start + segment.numel] = views[name]

            self._request(partial(self._begin, self._subgroups_of(positions), read, changes=False))
            return [found[position] for position in positions]

    def visit_state(self, take: Callable[[int, int, Mapping[str, torch.Tensor]], None]) -> None:
        """See `Engine.visit_state`."""
        self.check_usable()
        failed: list[Exception] = []

        def visit(run: Run) -> None:
            with self._views.on_host(run) as view:
                self._views.make_whole(run, view)
                for segment, views in self._views.pieces(run, view):
                    if failed:
                        break
                    try:
                        take(segment.parameter, segment.start, views)
                    except Exception as error:  # the reader's own affair
                        failed.append(error)

        with self._lock:
            self._request(partial(self._begin, range(len(self.plan.layout.subgroups)), visit, changes=False))
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

            def write(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
                for name, tensor in values.get(segment.parameter, {}).items():
                    views[name].copy_(tensor.reshape(-1)[segment.start : segment.start + segment.numel])

            self._change_state(self._subgroups_of(values), write, steps)

    def reset_state(self, positions: list[int]) -> None:
        """See `Engine.reset_state`."""
        self.check_usable()
        chosen = set(positions)
        with self._lock:

            def reset(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
                if segment.parameter in chosen:
                    for tensor in self.plan.layout.rule.state:
                        views[tensor.name].zero_()

            # What was never changed has no moments yet.
            subgroups = [number for number in self._subgroups_of(positions) if not self.machine.is_fresh(number)]
            self._change_state(subgroups, reset, dict.fromkeys(positions, 0))

    def _change_state(
        self,
        subgroups: Sequence[int],
        change: Callable[[Segment, Mapping[str, torch.Tensor]], None],
        steps: Mapping[int, int],
    ) -> None:
        """Let `change` write to the state of every segment of some subgroups, and set step counts."""

        def visit(run: Run) -> None:
            with self._views.on_host(run) as view:
                self._views.make_whole(run, view)
                self.tables.changed(run.visit.subgroup)
                for segment, views in self._views.pieces(run, view):
                    change(segment, views)

        def applied() -> None:
            for position, step in steps.items():
                self.tables.steps[position] = step

        self._request(partial(self._begin, subgroups, visit, changes=True), applied)

    # Checkpoints

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
            self._wait_for_save()
            self.check_usable()
            saves.begin(id, ranks)
            layout = self.plan.layout
            saved = Layout((), (), layout.rule) if replica else layout
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
                    with self._views.on_host(run) as view:
                        self._views.make_whole(run, view)
                        self.tables.changed(run.visit.subgroup)

                self._request_save(folder.path, partial(self._begin, unmade, make, changes=True))
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
            if rank == 0:
                released_before(folder)  # a COMMIT there that is not ours is not replaced
            folder.prepare()
            needs_buffers = any(subgroup.weight_tiles for subgroup in saved.subgroups) or self.plan.uses_gpu

            def begin() -> None:
                machine = self.machine
                pump(machine, self.executor, lambda m: m.broken is not None or Phase.BUSY not in m.phases)
                if machine.broken is not None:
                    raise machine.broken
                try:
                    pending = saves.open(
                        folder,
                        snapshot,
                        needs_buffers=needs_buffers,
                        io_backend=self.config.io_backend,
                        on_done=on_done,
                    )
                except OffloadError:
                    raise
                except Exception as cause:  # nothing has begun, so it is not the session's end
                    raise CheckpointError(f"no checkpoint can be opened in {folder.path}: {cause!r}") from cause
                machine.handle(BeginSave(pending.save))
                pump(machine, self.executor, lambda m: not m.saver.weights_left or m.saver.ended is not None)
                if machine.saver.ended is not None and machine.saver.ended[1] is not None:
                    error = machine.saver.ended[1]
                    self._take_save()
                    raise error

            self._request_save(folder.path, begin)

    def _request_save(self, folder: str, begin: Callable[[], Sweep | None]) -> None:
        """Have the engine thread do a part of a save; tell its failure from the session's.

        Raises:
            CheckpointError: The save has failed.
            SessionBrokenError: The session has.
        """
        try:
            self._request(begin)
        except (ConfigError, InternalError):
            raise
        except OffloadError as error:
            self.check_usable()
            failed = save_error(folder, error)
            raise failed from failed.__cause__

    def release(self, path: str | os.PathLike[str]) -> None:
        """See `Engine.release`."""
        self.check_usable()
        saves = self._saves
        if saves is None:
            return
        folder = open_folder(path).path

        def begin() -> None:
            for number in saves.release(folder):
                self.machine.handle(Release(number))

        with self._lock:
            self._wait_for_save()
            self._request(begin)

    def _wait_for_save(self) -> None:
        """Wait for the checkpoint that is being written; on the caller's thread, where a Ctrl-C is a way out."""
        pending = self._saves.pending if self._saves is not None else None
        if pending is not None and not pending.done.is_set():
            log.info("waiting for the checkpoint in %s first", pending.folder.path)
            waits.wait_for(pending.done.wait, pending.awaited)

    def wait_checkpoint(self, timeout_s: float | None) -> None:
        """See `Engine.wait_checkpoint`."""
        saves = self._saves
        pending = (saves.pending or saves.last) if saves is not None else None
        if pending is None:
            return
        if not waits.wait_for(pending.done.wait, pending.awaited, timeout_s):
            raise TimeoutError(f"the checkpoint in {pending.folder.path} is not written after {timeout_s} s")
        if pending.error is not None:
            raise pending.error

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
        layout, saves = self.plan.layout, self._saves
        restorer = Restorer(checkpoint, layout.parameters, names, pieces, self._views, self.tables, self._gpu)
        with self._lock:
            self._wait_for_save()
            self.check_usable()

            def applied() -> None:
                restorer.take_steps()
                self._step_number = checkpoint.step
                checkpoint.lend(0, 0)
                self._drop_checkpoint_buffers()

            manifest = None
            if isinstance(checkpoint, Checkpoint):
                manifest = manifest_in_place(checkpoint, layout, restorer.names, restorer.pieces, rank, ranks)

            def begin() -> Sweep:
                pump(self.machine, self.executor, lambda m: m.in_flight == 0 or m.broken is not None)
                self._take_save()
                if self.machine.broken is not None:
                    raise self.machine.broken
                copied = [subgroup.index for subgroup in layout.subgroups]
                buffers = self._memory.checkpoint_buffers(self.plan)  # which may fail, as long as nothing has changed
                # Versions go on from there: no two of a tile have the same number.
                self._version = max(self._version, checkpoint.last_version)
                if manifest is not None and isinstance(checkpoint, Checkpoint):
                    copied = [number for number in copied if self.plan.resident[number]]
                    self._adopt_state(checkpoint, manifest, restorer, rank)
                checkpoint.lend(*buffers)
                return self._begin(copied, restorer.restore, changes=True, overwrites=True)

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
                # On the engine thread, where no interrupt comes between a lock and taking note of it.
                self._request(partial(saves.resumed, checkpoint, rank, ranks))

    def _adopt_state(self, checkpoint: Checkpoint, manifest: Manifest, restorer: Restorer, rank: int) -> None:
        """Go on from a checkpoint where it lies, but for what is at home in memory; on the engine thread."""
        saves, machine, layout = self._saves, self.machine, self.plan.layout
        invariant(saves is not None, "a checkpoint is gone on from without a session")
        if saves is None:
            return

        def install(number: int, tier: Tier) -> None:
            staging, nbytes = self._memory.staging
            if nbytes:
                tier.register_memory(staging, nbytes)
            self._tiers[number].close()
            self._tiers[number] = tier

        exchange = Exchange(
            layout,
            machine.index.is_empty,
            lambda number, store, used: self._open_tier(number, store, self._tiers[number].depth, used),
            install,
        )
        adopted = saves.adopt(checkpoint, manifest, machine.index, exchange, rank)
        # Others that lie there may be of later steps, which this session now takes another way.
        held = (record.step for records in adopted.held.values() for record in records.values())
        self._version = max(self._version, *held, 0)
        streamed = [subgroup for subgroup in layout.subgroups if not self.plan.resident[subgroup.index]]
        tiles = [tile for subgroup in streamed for tile, _, _ in subgroup.tiles]
        machine.handle(TakeUp(adopted.limits, adopted.held, {tile: adopted.records[tile] for tile in tiles}))
        # No slot is in use, and nothing is started that reads into one before this request has ended.
        checkpoint.lend(*self._memory.staging)
        try:
            for subgroup in streamed:
                restorer.derive_weights(subgroup)
        except OffloadError as error:
            self.broken = error
            self._say_broken(error)
            raise

    # Figures

    def _learn(self) -> None:
        """Take the rates from what the last step did, and let the spread of tiles follow them."""
        self.executor.take_timed()
        if self._step_number > 1:  # the first step reads nothing, and touches memory for the first time
            self._seen = [*self._seen[1 - HISTORY :], observe(self.rates, self.executor.timeline)]
            self.rates = typical(self._seen)
        self.executor.timeline = []
        if self.plan.budgets.follow_rates:
            self.machine.handle(Reshare(self.plan.shares(self.rates)))

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
            found["pinned_bytes"] = self._gpu.pinned.pinned_bytes
            found["unpinned_bytes"] = self._gpu.pinned.unpinned_bytes
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
        """See `Engine.close`; if it is interrupted, another call goes on with it.

        Called by a signal handler that interrupts a request of this session, it takes effect when that has ended.

        What may hang runs on a thread of its own (`_end_all`), which holds all that lanes still use: lanes end before
        the memory that they work on goes, however long that takes, and this call waits for that no longer than makes
        sense. A device that answers after all lets that thread finish.
        """
        if os.getpid() != self._pid:  # a lock that another thread held at the fork stays held
            return
        if self._requesting == threading.get_ident():  # in a signal handler: nobody would answer the request
            self._close_wanted = True
            return
        with self._lock:
            if self._freed:
                return
            try:
                self._close()
            except BaseException:
                self._gives_up = True
                raise

    def _close(self) -> None:
        self._finish_save()
        self._closed = True
        if self._end is None or (self._end.done and self._end.error is not None):
            self._stop = waits.Aside(self._stop_thread, "offload-stop")
            self._end = waits.Aside(partial(self._on_device, partial(self._end_all, self._stop)), "offload-end")
        self._end.start()
        settle_s = 0.0 if self._told_left else waits.SETTLE_S
        is_raising = sys.exception() is not None
        patience_s = UNWIND_S if is_raising else None
        waits.wait_for(self._stop.wait, self._unstopped, settle_s if self._is_given_up else patience_s)
        patience_s = UNWIND_S if is_raising else self.config.stall_timeout_s
        waits.wait_for(self._end.wait, self._left, settle_s if self._is_given_up else patience_s)
        if self._end.done and self._end.error is not None:
            raise self._end.error
        if not self._end.done and not self._told_left:
            self._told_left = True
            log.error(
                "the session is closed, but this does not end: %s; it stays as it is until it does", self._left()
            )

    @property
    def _is_given_up(self) -> bool:
        machine = getattr(self, "machine", None)  # none if the session was never whole
        return self._gives_up or self.broken is not None or (machine is not None and machine.broken is not None)

    def _unstopped(self) -> str:
        """Return what keeps the engine thread, unless the executor says it."""
        machine = getattr(self, "machine", None)
        return "" if machine is not None and machine.in_flight else "the engine thread to end"

    def _left(self) -> str:
        """Return what is there as long as the session's end has not come."""
        memory = f"{sum(arena.nbytes for arena in self._memory.arenas)} bytes of host memory"
        if not self._stop.done:
            return f"the engine thread (with all paths, and {memory})"
        open_tiers = [tier for tier, ending in self._closing if not ending.done]
        places = ", ".join(str(getattr(innermost(tier), "store_path", tier.path)) for tier in open_tiers)
        return f"requests to {places} (with their threads and open files, and {memory})" if places else memory

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, but for other ranks only so long; see `commit`."""
        pending = self._saves.pending if self._saves is not None else None
        if pending is None or self._is_given_up:
            return
        pending.wait_for_ranks(waits.SETTLE_S if sys.exception() is not None else CLOSE_S)
        waits.wait_for(pending.done.wait, pending.awaited)

    def _stop_thread(self) -> None:
        """End the engine thread, once it has begun if it does."""
        if self._opening is not None and self._opening.forestall():
            self._opening.wait()
        with self._starting:  # a thread that comes to serve later does not
            serves = self._serving
        if serves and self._thread is not None:
            self._next = None
            self._queue.post(REQUEST)
            self._thread.join()

    def _end_all(self, stop: waits.Aside) -> None:
        """End the engine thread, then free everything; on a thread of its own."""
        stop.start()
        stop.wait()
        if stop.error is not None:
            raise stop.error
        self._free()

    def forgotten(self) -> None:
        """Close what nobody has any more."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            # The garbage collector runs on any thread; one of the session's own would wait for itself.
            threading.Thread(target=self._close_elsewhere, name="offload-close").start()

    def _close_elsewhere(self) -> None:
        self._on_device(self.close)

    def _on_device(self, work: Callable[[], None]) -> None:
        """Do what a thread of ours is for, as one that works for the session's GPU."""
        if self._gpu is not None:
            with contextlib.suppress(OffloadError):  # a device that has failed is closed, too
                self._gpu.device.adopt_thread()
        work()

    def _keep_slots(self) -> None:
        """Tell the tiers which slots kept checkpoints refer to, so that closing leaves them."""
        held: dict[int, set[int]] = {}
        named = self._saves.named if self._saves is not None else {}
        for records in [*self.machine.saver.held.values(), named]:
            for record in records.values():
                held.setdefault(record.location.path, set()).add(record.location.offset)
        for number, tier in enumerate(self._tiers):
            if held.get(number):
                innermost(tier).kept = frozenset(held[number])  # type: ignore[attr-defined]

    def _close_tiers(self) -> None:
        """Close them side by side: one whose device hangs keeps no other open."""
        others = self.executor.others if hasattr(self, "executor") else {}
        self._closing = [
            (tier, waits.Aside(tier.close, "offload-close")) for tier in (*self._tiers, *others.values())
        ]
        others.clear()
        for _, ending in self._closing:
            ending.start()
        for _, ending in self._closing:
            ending.wait()
        errors = [ending.error for _, ending in self._closing if ending.error is not None]
        if errors:
            raise errors[0]

    def _free(self) -> None:
        try:
            with contextlib.ExitStack() as ends:
                if self._saves is not None:
                    ends.callback(self._saves.close)
                ends.callback(self._ends.close)
                if self._saves is not None:
                    self._keep_slots()
        finally:
            self._freed = True


def _tune_depth(tier: Tier, queue: CompletionQueue, address: int, nbytes: int) -> None:
    """Find out how many requests a path should have in flight, and say it."""
    tried = tune_depth(tier, queue, address, nbytes) if nbytes else {}
    seen = ", ".join(f"{rate / 1e9:.2f} GB/s with {depth}" for depth, rate in tried.items())
    log.info("path %s: %d requests of each direction in flight (%s)", tier.path, tier.depth, seen or "not tried")
