"""`Engine`: one session, the owner of every lifetime, and the public interface of `offload/session`.

A session has one engine thread. It owns the machine (`offload.schedule`), which decides what is done next, and the
executor (`offload.engine`), which does it. Public methods may be called from any thread, one at a time; they post a
request to the engine thread and wait for its answer. Between requests the engine thread finishes flushes.

Errors: a request on a session that was closed, that broke, or that belongs to another process (after a fork) raises
`SessionBrokenError`. A step that cannot be finished raises `StepAbortedError` and breaks the session. If it fails
before `step` is called (an update in backward), or after `step` has returned, the next request of any kind raises
that, once.
"""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from offload import combinations, metrics
from offload.config import OffloadConfig
from offload.device.none import NoDevice
from offload.errors import ConfigError, SessionBrokenError
from offload.layout import Parameter
from offload.limits import Limits
from offload.measure import lane_totals
from offload.memory.touching import cores_of_rank, cpu_affinity
from offload.plan import Home, Plan, Rates
from offload.protocols import Device, DeviceLane, SegmentFlag
from offload.rules import ADAMW, UpdateRule
from offload.schedule.timeline import ENGINE, Interval
from offload.session.activations import Activations
from offload.session.checkpoints import Checkpoints
from offload.session.gradients import Gradients
from offload.session.parking import PendingPark
from offload.session.parts import SessionParts
from offload.session.setup import raising_shortages
from offload.session.shutdown import Shutdown
from offload.session.state import State
from offload.session.step import PendingStep, StepAccount
from offload.session.thread import EngineThread, nothing
from offload.session.visits import SweepRequests


class Engine:
    """Optimizer state of one rank, wherever it lives, and its update.

    The engine knows parameters by position (or name), weights and gradients by memory address. The caller that binds
    an address keeps the memory alive and does not write to it during `step`.

    Args:
        parameters: Name, size, weight dtype and group of each parameter.
        config: Tiers and budgets.
        gradient_slots: Whether the engine provides memory for gradients (`gradients.slot`).
        device: The GPU that holds weights and gradients, as torch calls it or as a `Device`, which the engine closes;
            `bind_*` then take device addresses. The engine allocates the host memory that it needs. None for the CPU.
        rule: What is kept for each parameter, and how a step changes it.
        among: This rank's number, from 0, among the ranks that may run on the same cores, and the count of these
            ranks: the rank takes its share of the cores, by NUMA nodes. None: all nodes, and as many threads as the
            launcher's variables allow each rank.
        limits: No setting: for tests, whose models are small.
        passing_bytes: Host memory of the caller's that gradients pass through on their way to slots: it is counted.

    Attributes:
        activations: Tensors saved for backward that leave memory: see `offload.session.activations.Activations`.
        checkpoints: To save and load checkpoints: see `offload.session.checkpoints.Checkpoints`.
        config: The config that the engine was made with.
        gradients: Where gradients lie, whether they have arrived, norms: see `offload.session.gradients.Gradients`.
        state: State of each parameter, to be read and written: see `offload.session.state.State`.

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
        device: Device | torch.device | None = None,
        rule: UpdateRule = ADAMW,
        among: tuple[int, int] | None = None,
        limits: Limits | None = None,
        passing_bytes: int = 0,
    ) -> None:
        self.config = config or OffloadConfig()
        if self.config.shard:
            combinations.ENGINE_SHARDS.refuse("shard", True)  # parameters say which pieces they are
        _, rank_count = among or (0, None)
        # Threads that are started within this block stay on the rank's cores.
        with cpu_affinity(cores_of_rank(*among) if among is not None else frozenset()):
            if isinstance(device, torch.device):
                # Here, as sessions without a GPU do not need it.
                from offload.device.accelerator import AcceleratorDevice

                device = AcceleratorDevice(device)
            device = device or NoDevice()
            try:
                self._parts = parts = SessionParts(
                    self.config,
                    gradient_slots=gradient_slots,
                    device=device,
                    rule=rule,
                    rank_count=rank_count,
                    limits=limits,
                    passing_bytes=passing_bytes,
                )
                self._thread = thread = EngineThread(parts)
                self._sweep_requests = sweep_requests = SweepRequests(parts, thread)
                self.checkpoints = Checkpoints(parts, thread, sweep_requests)
                self.gradients = Gradients(parts, thread, sweep_requests)
                self.state = State(parts, thread, sweep_requests)
                self.activations = Activations(parts, thread)
                # None of these refers to this object, so the garbage collector finds and closes a forgotten engine.
                self._shutdown = Shutdown(parts, thread)
                self._finalizer = weakref.finalize(self, self._shutdown.forgotten)
                try:
                    with raising_shortages("the session cannot be opened"):
                        thread.open(tuple(parameters))
                    self.speculate(self.config.overlaps_backward)
                except BaseException:
                    self.close()
                    raise
            except BaseException:
                device.close()  # `self.close` closes it only if parts were opened; closing it twice does no harm
                raise

    # State of affairs

    @property
    def plan(self) -> Plan:
        """The present plan: homes, placements and visiting order of all subgroups."""
        return self._parts.plan

    @property
    def rates(self) -> Rates:
        """Speeds of the lanes: measured beforehand or probed, and refined by every step."""
        return self._parts.rates

    @property
    def broken(self) -> BaseException | None:
        """Why the session cannot be used any more, or None."""
        return self._thread.broken

    @property
    def step_number(self) -> int:
        """How many steps the state has had; loading a checkpoint sets it to the checkpoint's."""
        self._thread.wait_pending()
        return self._thread.sweeps.step_number

    def step_count(self, parameter: int | str) -> int:
        """Return the number of updates that a parameter has had."""
        self._thread.wait_pending()
        return int(self._parts.tables.steps[self._parts.position(parameter)])

    def timeline(self) -> list[Interval]:
        """Return what the lanes did in the last step and since, in the order in which it ended."""
        self._thread.wait_pending()
        self._parts.executor.take_timed()
        last, present = self._thread.sweeps.last, self._thread.sweeps.account
        # Once the next step's account is open, `present` is that one and not `last`: its timeline goes on from there.
        return [*last.timeline, *present.timeline] if present is not last else [*last.timeline]

    @property
    def last_step(self) -> StepAccount:
        """The account of the last step that has ended."""
        sweeps = self._thread.sweeps
        # `take_timed` adds what a GPU has timed to the present account, which is the next step's once that is open.
        if sweeps.account is sweeps.last:
            self._parts.executor.take_timed()
        return sweeps.last

    @property
    def speculates(self) -> bool:
        """Whether streamed subgroups are updated during backward; see `speculate`."""
        return self._thread.speculation.is_on

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step that has ended, by name; wait for nothing.

        docs/metrics.md explains each name, from the table in `offload/metrics.py`.
        """
        parts, plan = self._parts, self.plan
        resident_bytes = plan.state_bytes - plan.home_bytes[Home.STREAMED]
        account = self.last_step
        timeline = account.work
        figures: dict[str, float] = {
            metrics.STEP: self._thread.sweeps.step_number,
            metrics.STEP_S: account.whole_s,
            metrics.STATE_BYTES: plan.state_bytes,
            metrics.RESIDENT_BYTES: resident_bytes,
            metrics.STREAMED_BYTES: plan.home_bytes[Home.STREAMED],
            metrics.RESIDENT_SHARE: resident_bytes / plan.state_bytes if plan.state_bytes else 1.0,
        }
        figures |= parts.lanes.metrics()
        for node, (meant_bytes, _, elsewhere_bytes) in parts.memory.on_nodes().items():
            figures[metrics.of(metrics.NODE_BYTES, node)] = meant_bytes
            figures[metrics.of(metrics.NODE_ELSEWHERE_BYTES, node)] = elsewhere_bytes
        figures |= parts.saves.metrics()
        figures |= self._thread.speculation.metrics()
        figures |= self._thread.parking.metrics()
        figures |= self.activations.metrics()
        figures |= parts.executor.visiting.metrics()
        return figures | self._lane_metrics(timeline)

    def _lane_metrics(self, timeline: Sequence[Interval]) -> dict[str, float]:
        """Return what each lane did in a step's timeline, and the bytes on each path, by the names of metrics."""
        parts = self._parts
        figures: dict[str, float] = {}
        totals = lane_totals(timeline)
        path_lanes = [f"{verb}:{path}" for path in range(len(self.plan.budgets.paths)) for verb in ("read", "write")]
        for lane in (ENGINE, "cpu", *parts.lanes.names, *path_lanes):
            nbytes, busy_s = totals.get(lane, (0, 0.0))
            figures[metrics.of(metrics.LANE_BYTES, lane)] = nbytes
            figures[metrics.of(metrics.LANE_BUSY_S, lane)] = busy_s
        for path, live_bytes in enumerate(parts.machine.index.live_bytes()):
            read_bytes, _ = totals.get(f"read:{path}", (0, 0.0))
            write_bytes, _ = totals.get(f"write:{path}", (0, 0.0))
            figures[metrics.of(metrics.READ_BYTES, path)] = read_bytes
            figures[metrics.of(metrics.WRITE_BYTES, path)] = write_bytes
            figures[metrics.of(metrics.LIVE_BYTES, path)] = live_bytes
            figures[metrics.of(metrics.WRITTEN_BYTES, path)] = parts.executor.written_bytes[path]
        return figures

    # Memory

    def park(
        self,
        *,
        keep_host: bool = False,
        wait: bool = True,
        accepted: Callable[[], Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        """Give memory back to the system between steps, until the next request that needs it, or `unpark`.

        State at home in memory that may not stay there is written to the paths. Then all other memory, gradient slots
        included, is given back. State on paths is not moved. No number changes.

        Args:
            keep_host: Whether state stays in host memory, up to the budget; whole subgroups, in their order.
            wait: Wait until memory has been given back, and first for a checkpoint that is being written. False:
                this goes on in the background, and ends early if the session is used.
            accepted: Called on the engine thread once parking is possible, before any memory is given back: the
                caller drops gradients in slots, or refuses by an exception. Returns address and size of gradients
                that somebody still holds, whose memory is kept. By default slots with bound gradients are kept.

        Raises:
            ConfigError: Gradients have left a GPU and no step has used them, or tensors are saved for a backward pass
                (`activations`).
            InfeasiblePlanError: The paths have no room for state that has to leave memory; nothing has changed then.
            OffloadError: Paths have failed; state that they did not take is still in memory, and training goes on.
        """
        parts, thread = self._parts, self._thread
        parks: list[PendingPark] = []  # `begin` puts its result here
        self.activations.release_tiles()  # else a tile that is kept for the next write or read would count as in use
        with thread.turn():
            if wait:
                parts.saves.wait_for_pending()

            def begin() -> None:
                """Begin the park on the engine thread, which carries it on between requests."""
                parks.append(thread.parking.begin(accepted or parts.gradients.bound_slots, keep_host=keep_host))

            if self.activations.ask_whether_in_use():
                gc.collect()  # activation checkpointing leaves cycles, which hold tensors of an interrupted pass
            thread.request(begin, needs_memory=False)
        if wait:
            parks[0].wait()

    def unpark(self) -> None:
        """Take memory again that `park` gave back; state is read back from the paths when it is used.

        Raises:
            InfeasiblePlanError: The system has no such memory now; the session stays parked.
        """
        with self._thread.turn():
            self._thread.request(nothing)  # before any request the engine thread takes memory again

    @property
    def is_parked(self) -> bool:
        """Whether memory has been given back, and none taken again."""
        return self._thread.parking.is_parked

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Add parameters; the homes of the present state stay as they are.

        Raises:
            InfeasiblePlanError: If the new state does not fit; nothing has changed then.
        """
        parts, thread = self._parts, self._thread
        with thread.turn():
            before, plan = parts.plan, parts.plan_with(tuple(parameters))

            def extend() -> None:
                """Use the plan with the added parameters, once nothing is in flight."""
                thread.settle()
                # A signal handler may have added other parameters since the plan was made.
                parts.use_plan(plan if parts.plan is before else parts.plan_with(tuple(parameters)))

            # The plan changes between saves only.
            parts.saves.wait_for_pending()
            thread.request(extend)

    def bind_weight(self, parameter: int | str, address: int) -> None:
        """Say where a parameter's weight lies: contiguous, in the parameter's dtype."""
        self._sweep_requests.wait_for([parameter])  # a pending step may still write to the present address
        self._parts.tables.weights[self._parts.position(parameter)] = address

    def reload_master(self, parameter: int | str, *, whole: bool = True) -> None:
        """Set the master from the weight when the parameter is next updated or saved; the moments stay.

        Until then `state` shows the master as it will be, and the stored one is not changed.

        Args:
            parameter: Which one.
            whole: Set all elements; else only those whose 16-bit weight is not what the master rounds to.
        """
        # Else a visit of a pending step that is still to come would take the master, and end the mark.
        self._sweep_requests.wait_for([parameter])
        flag = SegmentFlag.LOAD_MASTER if whole else SegmentFlag.MATCH_MASTER
        self._parts.tables.mark_master_due(self._parts.position(parameter), flag)

    def speculate(self, on: bool) -> None:
        """Update streamed subgroups during backward from now on, each as soon as all its gradients are there.

        With `overlap` "backward" and "both" this is on from the beginning. Such an update makes a new version of the
        subgroup. A step that would compute the same bits confirms that version; else it is revoked.

        As each pass begins, the caller says what the step would use (`gradients.foresee`;
        `offload.optim.hiding.Announcer` does it): in a pass without that nothing is updated. With weights on a GPU
        the CPU makes these updates. Gradients are copied to the host during backward (`arrived`), or stay on the GPU
        until an update is about to read them (`final`). An engine without gradient slots reads bound gradients.

        This does nothing where no state is streamed, and with `gradient_memory`, where gradients leave for the paths.

        Args:
            on: Whether to update during backward; False: no more from the next step on.
        """
        if self.plan.updates_in_backward:
            # While this is on, a GPU's lanes wake the engine thread when gradients reach host memory.
            self._parts.lanes.wakes = on
            self._thread.speculation.is_on = on

    # Work

    def step(
        self,
        groups: Sequence[Any],
        *,
        scale: float = 1.0,
        clip: float = 1.0,
        active: Iterable[int | str] | None = None,
        pending: Sequence[torch.Tensor] | None = None,
        begun: Callable[[], None] = nothing,
    ) -> None:
        """Update state and weights of all active parameters from their bound gradients.

        With `pending` this returns when the step has begun, and the step goes on in the background: `wait_for` waits
        for some weights; `finish`, and any other method but `metrics`, for the whole step. Until then nobody writes
        to weights or gradients.

        Args:
            groups: Hyperparameters, by group index: what the rule's `values` makes of one of torch's groups (Adam's
                are `offload.rules.GroupScalars`).
            scale: What the gradients were multiplied by (loss scale); they are divided by it.
            clip: Factor for the unscaled gradients.
            active: Parameters that have a gradient; None for all. All other parameters stay as they are, bit for bit.
                A pending step updates them in this order, except that subgroups in staging slots come first.
            pending: Do not wait, and keep these tensors until the step is over: the memory of weights and gradients.
            begun: Called on the engine thread once a pending step has begun, and before this returns: an interrupt
                comes either before the step begins or after this call.

        Raises:
            ConfigError: `scale` is 0 or not finite, a weight or gradient is not bound, or the step is pending and GPU
                memory is borrowed, which has to be given back before the next forward pass.
            InfeasiblePlanError: Before the first step: the paths have no room for the checkpoints that are required,
                beside what other sessions have left.
            StepAbortedError: If this step, or a pending one before it, could not be finished; the session is broken.
            SessionBrokenError: If the session cannot be used.
        """
        parts, tables, thread, requests = self._parts, self._parts.tables, self._thread, self._sweep_requests
        with thread.turn():
            parameter_count = len(parts.plan.layout.parameters)
            positions = list(range(parameter_count) if active is None else map(parts.position, active))
            if not scale or not math.isfinite(scale):
                raise ConfigError("scale", scale, "give a finite number that is not 0")
            self._check_bound(positions)
            parts.count_leftovers()  # which does something before the first step alone
            if pending is not None:
                parts.config.check_goes_on()  # refuses where GPU memory is borrowed, which forward needs
            started_s = time.monotonic()
            # What the update gets of each parameter: scalars, flags, addresses of weight and gradient.
            tables.step_rows = tables.rows(groups, scale, clip, positions, parts.gradients.bound_at())
            # A pending step keeps the order of `active`, in which forward needs the weights.
            subgroups = tables.step_rows.subgroups if pending is not None else sorted(tables.step_rows.subgroups)

            def applied() -> None:
                """Count the step, and choose what to speculate on; on the engine thread, once all are updated."""
                tables.steps[positions] += 1
                thread.sweeps.end_step(started_s)
                thread.speculation.end_step(scale, clip)

            pending_step = None if pending is None else PendingStep(pending)
            begin = partial(requests.seal_and_begin_rest, subgroups, positions)
            try:
                thread.request(
                    begin,
                    applied=applied,
                    meanwhile=requests.refine_rates,
                    pending=pending_step,
                    begun=begun,
                    seals=True,
                )
            except SessionBrokenError:
                raise
            except Exception as error:
                if error is not thread.broken:
                    raise  # a signal handler's error, not the step's
                raise thread.aborted(error) from error

    def _check_bound(self, positions: list[int]) -> None:
        """Raise `ConfigError` unless weights and gradients of some parameters are bound; empty ones need not be."""
        tables = self._parts.tables
        # Address 0: it is not bound.
        is_unbound = (tables.weights[positions] == 0) | (tables.gradients[positions] == 0)
        for number in np.flatnonzero(is_unbound):
            parameter = self._parts.plan.layout.parameters[positions[number]]
            if parameter.numel:
                raise ConfigError("active", parameter.name, "bind its weight and its gradient before the step")

    @property
    def is_pending(self) -> bool:
        """Whether there is a step that nobody has waited for to its end."""
        return self._thread.pending is not None

    def wait_for(self, parameters: Iterable[int | str], *, on_any_stream: bool = False) -> None:
        """Wait until the weights of some parameters are those of the last step, and their gradients have been read.

        On a GPU, work that the calling thread enqueues from now on is ordered after the new weights.

        Args:
            parameters: Which.
            on_any_stream: On a GPU: order it so even if the whole step was waited for, perhaps on another stream.

        Raises:
            StepAbortedError: The step could not be finished; the session is broken.
        """
        self._sweep_requests.wait_for(parameters, on_any_stream=on_any_stream)

    def finish(self, *, on_gpu: bool = False) -> None:
        """Wait until the pending step is over, if there is one.

        Args:
            on_gpu: Wait for the GPU, too: its weights can then be read on any stream.

        Raises:
            StepAbortedError: It could not be finished; the session is broken.
        """
        self._thread.finish_pending()
        if on_gpu:
            # Whoever waits for a step has its stream ordered after the new weights: by `finish_pending`, or by the
            # step's own request.
            self._parts.lanes.device.mark(DeviceLane.CALLER, timed=False).wait()

    def close(self) -> None:
        """Finish what is in flight, a checkpoint included, and free everything; idempotent.

        The session's files are deleted, except those that kept checkpoints refer to. Other ranks have half a minute
        to do their part of a checkpoint, and seconds if an exception is on its way. After the session has failed, or
        when another call was interrupted, this returns within seconds: resources that hang are logged, and freed in
        the background when the device answers.
        """
        self._shutdown.close()
        # Else closing was put off to the end of the turn under way, or this is a forked copy, which closes nothing.
        if self._shutdown.work is not None:
            self._finalizer.detach()

    def __enter__(self) -> Engine:
        """Return the engine, which the end of the block closes."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the engine."""
        self.close()
