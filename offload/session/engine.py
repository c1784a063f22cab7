"""`Engine`: one session, the owner of every lifetime, and the framework-neutral face of everything here.

A session has one engine thread, which owns machine and executor. Public methods may be called from any thread, one
at a time; they post a request to the engine thread and wait for its answer. Between requests the engine thread
finishes flushes.

Errors: a request on a session that was closed, that broke, or that belongs to another process (after a fork) raises
`SessionBrokenError`. A step that cannot be finished raises `StepAbortedError` and breaks the session; where that
shows before it is called, or after it has returned, the next request of any kind raises it, once.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from offload import waits
from offload.checkpoint.folder import open_folder
from offload.checkpoint.reader import StateSource
from offload.checkpoint.restore import Restorer
from offload.checkpoint.saves import Snapshot
from offload.config import OffloadConfig
from offload.dtypes import DtypeCode
from offload.engine.none import NoDevice
from offload.engine.timeline import ENGINE, Interval
from offload.engine.touching import bound, cores_of_rank
from offload.errors import ConfigError, OffloadError, SessionBrokenError, StepAbortedError
from offload.layout import Layout, Parameter, Segment
from offload.measure import lane_totals
from offload.plan import Home, Plan, Rates
from offload.protocols import Device, DeviceLane, Mark
from offload.rules import ADAMW, MASTER, UpdateRule, checked_step
from offload.session.ahead import Foreseen
from offload.session.behind import Behind
from offload.session.checkpoints import Checkpoints
from offload.session.ending import Ending
from offload.session.handout import Handout, copy_run, refuse_negative, refuse_uncopied, rooms_beside
from offload.session.parts import Parts
from offload.session.setup import named_shortage
from offload.session.thread import EngineThread, nothing
from offload.session.visits import Take, Visits


class Engine:
    """Optimizer state of one rank, wherever it lives, and its update.

    The engine knows parameters by position (or name), weights and gradients by memory address. Whoever binds an
    address keeps the memory alive and does not write to it during `step`.

    Args:
        parameters: Name, size, weight dtype and group of each parameter.
        config: Tiers and budgets.
        gradient_slots: Whether the engine provides memory for gradients (`gradient_slot`).
        device: The GPU that holds weights and gradients, as torch calls it or as a `Device`, which the engine closes;
            `bind_*` then take device addresses. The engine allocates the host memory that it needs. None for the CPU.
        rule: What is kept for each parameter, and how a step changes it.
        among: Which rank it is of those that may run on the same cores, from 0, and how many they are: it takes its
            share of them, by NUMA nodes. None: all nodes, and the share of threads that the launcher's variables say.

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
    ) -> None:
        self.config = config or OffloadConfig()
        if self.config.shard:
            allowed = (
                "leave it out: an engine's parameters say which pieces they are, as those of DeepSpeed's ZeRO do"
            )
            raise ConfigError("shard", True, allowed)
        with bound(cores_of_rank(*among) if among is not None else frozenset()):
            if isinstance(device, torch.device):
                from offload.engine.accelerator import AcceleratorDevice

                device = AcceleratorDevice(device)
            device = device or NoDevice()
            try:
                self._parts = parts = Parts(self.config, gradient_slots, device, rule, among and among[1])
                self._thread = thread = EngineThread(parts)
                self._visits = visits = Visits(parts, thread)
                thread.aborted = partial(_aborted, parts, visits)
                self._checkpoints = Checkpoints(parts, thread, self._visits)
                self._step_s = self._step_started_s = 0.0
                # None of these holds this object, so an engine that is forgotten is closed.
                self._ending = Ending(parts, thread)
                self._finalizer = weakref.finalize(self, self._ending.forgotten)
                try:
                    with named_shortage("the session cannot be opened"):
                        thread.open(tuple(parameters))
                except BaseException:
                    self.close()
                    raise
            except BaseException:
                device.close()
                raise

    # State of affairs

    @property
    def plan(self) -> Plan:
        """What lives where."""
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
        """How many steps the state has had; a checkpoint brings its own."""
        self._thread.wait_behind()
        return self._visits.step_number

    def step_count(self, parameter: int | str) -> int:
        """Return the number of updates that a parameter has had."""
        self._thread.wait_behind()
        return int(self._parts.tables.steps[self._position(parameter)])

    def timeline(self) -> list[Interval]:
        """Return what the lanes did in the last step and since, in the order in which it ended."""
        self._thread.wait_behind()
        self._parts.executor.take_timed()
        return [*self._visits.ended, *self._parts.executor.timeline]

    def last_timeline(self) -> list[Interval]:
        """Return what the lanes did in the last step, and since where nothing has begun ahead of the next one."""
        return [*self._visits.ended] or self.timeline()

    @property
    def speculates(self) -> bool:
        """Whether streamed subgroups are updated during backward; see `speculate`."""
        return self._thread.ahead.hyperparameters is not None

    def metrics(self) -> dict[str, float]:
        """Return the last step as a flat dict.

        Keys: `step`, `step_s`, `state_bytes`, `resident_bytes` (at home in memory, of the host or the GPU),
        `streamed_bytes`, `resident_share`; with a GPU `gpu_bytes` (resident there), `pinned_bytes` and
        `unpinned_bytes` (host memory that the GPU copies from and to, and what of it the system does not let it reach
        by itself); for each lane (`engine`, its own thread; `cpu`, `read:<path>`, `write:<path>`; with a GPU `gpu`,
        `h2d`, `d2h`) `lane/<lane>/busy_s` and `lane/<lane>/bytes`; for each path `path/<number>/read_bytes`,
        `path/<number>/write_bytes`, `path/<number>/live_bytes` (what lies there now) and
        `path/<number>/written_bytes` (since the session began, checkpoints included: what wears a drive); with
        `speculate` also `ahead/confirmed_bytes` and `ahead/revoked_bytes`: state that had been updated before the
        step began, and that the step took over, or did not.
        """
        parts, plan = self._parts, self.plan
        resident_bytes = plan.state_bytes - plan.home_bytes[Home.STREAMED]
        timeline = self.last_timeline()
        # A step returns when the GPU knows what to do; it has ended when new weights are there.
        ends_s = [i.finished_s - self._step_started_s for i in timeline if i.lane in ("gpu", "h2d")]
        found: dict[str, float] = {
            "step": self.step_number,
            "step_s": max([self._step_s, *ends_s]),
            "state_bytes": plan.state_bytes,
            "resident_bytes": resident_bytes,
            "streamed_bytes": plan.home_bytes[Home.STREAMED],
            "resident_share": resident_bytes / plan.state_bytes if plan.state_bytes else 1.0,
        }
        found |= parts.lanes.metrics()
        ahead = self._thread.ahead
        if self.speculates:
            found["ahead/confirmed_bytes"], found["ahead/revoked_bytes"] = ahead.confirmed_bytes, ahead.revoked_bytes
        totals = lane_totals(timeline)
        for lane in (ENGINE, "cpu", *parts.lanes.names):
            found[f"lane/{lane}/bytes"], found[f"lane/{lane}/busy_s"] = totals.get(lane, (0, 0.0))
        for path, live_bytes in enumerate(parts.machine.index.live_bytes()):
            for verb in ("read", "write"):
                lane = f"{verb}:{path}"
                found[f"lane/{lane}/bytes"], found[f"lane/{lane}/busy_s"] = totals.get(lane, (0, 0.0))
                found[f"path/{path}/{verb}_bytes"] = found[f"lane/{lane}/bytes"]
            found[f"path/{path}/live_bytes"] = live_bytes
            found[f"path/{path}/written_bytes"] = parts.executor.written_bytes[path]
        return found

    def _position(self, parameter: int | str) -> int:
        """Return a parameter's position from its position or name."""
        layout = self.plan.layout
        if isinstance(parameter, str):
            if parameter not in layout.index_by_name:
                raise ConfigError("parameter", parameter, "use a name that the engine was made with")
            return layout.index_by_name[parameter]
        if not 0 <= parameter < len(layout.parameters):
            raise ConfigError("parameter", parameter, f"use a position below {len(layout.parameters)}")
        return parameter

    # Memory

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Add parameters; the homes of the state that is there stay as they are.

        Raises:
            InfeasiblePlanError: If the new state does not fit; nothing has changed then.
        """
        parts, thread = self._parts, self._thread
        with thread.turn():
            before, plan = parts.plan, parts.plan_with(tuple(parameters))

            def extend() -> None:
                thread.settle()
                # A signal handler may have added others since.
                parts.adopt(plan if parts.plan is before else parts.plan_with(tuple(parameters)))

            self._checkpoints.wait_for_pending()
            thread.request(extend)

    def bind_weight(self, parameter: int | str, address: int) -> None:
        """Say where a parameter's weight lies: contiguous, in the parameter's dtype."""
        self.wait_for([parameter])
        self._parts.tables.weights[self._position(parameter)] = address

    def reload_master(self, parameter: int | str) -> None:
        """Take the master from the weight when the parameter is next updated; the moments stay."""
        self.wait_for([parameter])
        self._parts.tables.reload_master(self._position(parameter))

    def gradient_slot(self, parameter: int | str) -> torch.Tensor:
        """Return the memory for a parameter's gradient: flat, in the config's gradient dtype.

        Raises:
            ConfigError: If the engine was made without gradient slots.
        """
        return self._parts.gradients.slot(self._position(parameter))

    def gradient_arrived(self, parameter: int | str, address: int, dtype: DtypeCode) -> Mark | None:
        """Take in a parameter's gradient: gather its norm and, with slots, copy it there.

        On the CPU it is the whole gradient, whatever was accumulated. On a GPU it is that of one backward pass, to be
        added to those that arrived since the last step or `forget_gradients`.

        Args:
            parameter: Which one.
            address: Where the gradient lies; if that is its slot, nothing is copied.
            dtype: Its element type; widened where the slot is float32.

        Returns:
            On a GPU, the mark after which the gradient is not read any more. It is not reached while the gradient
            waits for others to leave with, until `end_backward` or the mark's `wait` end that. The first gradient of
            a parameter of which `keeps_gradient` is true is read, and added to, until the step has returned.
        """
        self.wait_for([parameter])
        self._thread.check_usable()
        position = self._position(parameter)
        mark = self._parts.gradients.arrived(position, address, dtype)
        self._thread.ahead.arrived(position)
        return mark

    def gradient_final(self, parameter: int | str, gradient: torch.Tensor) -> None:
        """Say that a parameter's gradient lies where the step will read it, unless more of it comes; see `speculate`.

        Args:
            parameter: Which one.
            gradient: All that this rank has of it, contiguous; kept until the next step, if it is read before.
        """
        self.wait_for([parameter])
        self._thread.check_usable()
        self._thread.ahead.arrived(self._position(parameter), gradient)

    def speculate(
        self, hyperparameters: Callable[[], Foreseen | None] | None, is_last_pass: Callable[[], bool] | None = None
    ) -> None:
        """Update streamed subgroups during backward from now on, as soon as all their gradients are there.

        What comes of it is taken over by a step that would do the same, bit for bit, and else has never been. It is
        for gradients in host memory: with weights on a GPU, those that leave it during backward (`keep_grads=False`)
        for 16-bit weights that the CPU updates; where they stay there this does nothing. An engine without gradient
        slots reads them where they are bound.

        Args:
            hyperparameters: Returns those of all groups (see `step`) as they are now, and tensors that have the
                memory of fp32 weights, and of gradients that lie in no slot, which updates read until the step; None
                where any lie elsewhere than they are bound, or nobody can tell. In place of it None: from the next
                step on none of this happens.
            is_last_pass: Returns whether the backward pass under way is the last before a step; without it, and as
                long as it says so of all, those before a step count as as many as before the last.
        """
        if not self.plan.budgets.gradients_on_gpu and self.plan.home_bytes[Home.STREAMED]:
            self._parts.lanes.wakes = hyperparameters is not None
            self._thread.ahead.is_last_pass = is_last_pass
            self._thread.ahead.hyperparameters = hyperparameters

    def drop_gradients(self) -> None:
        """Say that all gradients have been dropped since the last step: what was made from them is of no use."""
        if self._thread.is_usable and self._thread.ahead.restart():
            with self._thread.turn():
                self._thread.request(lambda: None)

    def end_backward(self) -> None:
        """Say that a backward pass has ended: gradients on a GPU that still wait for others to leave with, leave."""
        self._thread.check_usable()
        self._parts.gradients.leave()

    def keeps_gradient(self, parameter: int | str) -> bool:
        """Return whether the GPU updates some of a parameter, from the gradient where it lies."""
        return self._parts.gradients.stays(self._position(parameter))

    def has_gradient(self, parameter: int | str) -> bool:
        """Return whether a parameter's gradient has arrived on a GPU and has not been forgotten."""
        return self._parts.gradients.has_arrived(self._position(parameter))

    def settle_gradients(self) -> None:
        """Wait until gradients that have arrived on a GPU are where the step reads them: slots, or where they lie."""
        self._thread.check_usable()
        self._parts.gradients.settle()

    def hold_until_read(self, gradient: torch.Tensor, mark: Mark, *, elsewhere: bool = False) -> None:
        """Hold a gradient on a GPU until it has been read, or forgotten.

        Of more than a gibibyte that is held, the oldest is let go, and the caller's stream waits until it has been
        read.

        Args:
            gradient: Has arrived; the caller drops it, and nobody writes to it.
            mark: What `gradient_arrived` returned.
            elsewhere: Whether its memory is used again on other streams than the caller's: then the caller waits
                itself, and not its stream.
        """
        self._parts.gradients.hold(gradient, mark, elsewhere=elsewhere)

    def forget_gradients(self, dropped: Iterable[torch.Tensor] = ()) -> None:
        """Forget all gradients that arrived on a GPU: those that arrive next are the first.

        Args:
            dropped: Gradients of which `keeps_gradient` is true, and which the caller drops now.
        """
        if self._thread.is_usable:
            for gradient in dropped:  # first: once they are forgotten, an interrupt may have the caller drop them
                self._parts.lanes.device.give_up(gradient)
            self._parts.gradients.forget()  # the caller's stream comes behind whatever reads them
            # And no gradient is here; a step that goes on is waited for, a few times.
            if self._thread.ahead.restart() or self._visits.placing.due:
                with contextlib.suppress(SessionBrokenError), self._thread.turn():
                    self._thread.request(self._visits.placing.review)

    def wait_weights(self) -> None:
        """Wait until the weights on a GPU are those of the last step, whoever reads them on whatever stream."""
        self._parts.lanes.device.mark(DeviceLane.CALLER, timed=False).wait()

    def bind_gradient(self, parameter: int | str, address: int, dtype: DtypeCode, *, gathered: bool = False) -> None:
        """Say where a parameter's gradient lies for the next norm and step.

        Args:
            parameter: Which one.
            address: Its first element, at any alignment.
            dtype: Its element type.
            gathered: Whether `gradient_arrived` gathered its norm. On the CPU the norm is made anew where any bit of
                the gradient has changed since; false saves looking.
        """
        self.wait_for([parameter])
        self._parts.gradients.bind(self._position(parameter), address, dtype, gathered)

    # Work

    def gradient_norm_sq(self, parameters: Iterable[int | str]) -> float:
        """Return the squared L2 norm of the bound gradients, as `offload.kernels.reference` defines it.

        It is not finite if and only if an element is not. What was gathered on arrival is used where the gradient
        still has the fingerprint that it had then (it is read for that); the rest is made anew.
        """
        self._thread.check_usable()
        return self._parts.gradients.norm_sq([self._position(parameter) for parameter in parameters])

    def gradient_norms_sq(self, parameters: Iterable[int | str]) -> list[float]:
        """Return the squared L2 norm of each of the bound gradients; see `gradient_norm_sq`."""
        self._thread.check_usable()
        return self._parts.gradients.norms_sq([self._position(parameter) for parameter in parameters])

    def step(
        self,
        groups: Sequence[Any],
        *,
        scale: float = 1.0,
        clip: float = 1.0,
        active: Iterable[int | str] | None = None,
        behind: Sequence[torch.Tensor] | None = None,
        begun: Callable[[], None] = nothing,
    ) -> None:
        """Update state and weights of all active parameters from their bound gradients.

        With `behind` this returns when the step has begun, and it goes on behind the caller: `wait_for` waits for
        some weights; `finish`, and whatever else asks anything of the engine, for all. Until then nobody writes to
        weights or gradients.

        Args:
            groups: Hyperparameters, by group index: what the rule's `values` makes of one of torch's groups (Adam's
                are `offload.GroupScalars`).
            scale: What the gradients were multiplied by (loss scale); they are divided by it.
            clip: Factor for the unscaled gradients.
            active: Parameters that have a gradient; None for all. The others stay as they are, bit for bit.
                With `behind` they are updated in this order, but for what lies in staging memory, which is first.
            behind: Do not wait, and keep these tensors until the step is over: the memory of weights and gradients.
            begun: Called on the engine thread once the step has begun that goes on behind the caller, and before this
                returns: an interrupt comes before both or after both.

        Raises:
            StepAbortedError: If it, or a step that went on behind the caller, could not be finished; the session is
                broken.
            SessionBrokenError: If the session cannot be used.
        """
        parts, thread, visits, tables = self._parts, self._thread, self._visits, self._parts.tables
        with thread.turn():
            parameters = parts.plan.layout.parameters
            chosen = list(range(len(parameters)) if active is None else map(self._position, active))
            if not scale or not math.isfinite(scale):
                raise ConfigError("scale", scale, "give a finite number that is not 0")
            unbound = (tables.weights[chosen] == 0) | (tables.gradients[chosen] == 0)
            for number in np.flatnonzero(unbound):
                parameter = parameters[chosen[number]]
                if parameter.numel:
                    raise ConfigError("active", parameter.name, "bind its weight and its gradient before the step")
            started_s = time.monotonic()
            thread.ahead.begins(chosen)
            subgroups = tables.begin_step(groups, scale, clip, chosen)
            if behind is not None:
                places = parts.plan.layout.places
                subgroups = tuple(dict.fromkeys(subgroup for n in chosen for subgroup, _ in places[n]))

            def applied() -> None:
                tables.steps[chosen] += 1
                visits.step_number += 1
                thread.ahead.stepped(scale, clip)
                self._step_started_s, self._step_s = started_s, time.monotonic() - started_s

            follows = None if behind is None else Behind(behind, thread.aborted, begun)
            try:
                thread.request(partial(visits.begin_step, subgroups), applied, visits.learn, follows, steps=True)
            except SessionBrokenError:
                raise
            except Exception as error:
                if error is not thread.broken:
                    raise  # not the sweep's: a signal handler's
                raise thread.aborted(error) from error

    @property
    def is_behind(self) -> bool:
        """Whether a step that nobody has waited for goes on behind its caller, or has."""
        return self._thread.behind is not None

    def wait_for(self, parameters: Iterable[int | str]) -> None:
        """Wait until the weights of some parameters are those of the last step, and their gradients have been read.

        On a GPU the work that the calling thread enqueues from now on waits for them, too.

        Raises:
            StepAbortedError: The step could not be finished; the session is broken.
        """
        if not self.is_behind or os.getpid() != self._thread.pid:
            return
        subgroups = self._visits.subgroups_of(map(self._position, parameters))
        if self._thread.wait_for(subgroups):
            self._parts.lanes.lead_caller_to(subgroups)

    def finish(self) -> None:
        """Wait until a step that goes on behind its caller is over, if one does.

        Raises:
            StepAbortedError: It could not be finished; the session is broken.
        """
        self._thread.finish()

    def read_state(
        self, parameters: Iterable[int | str], *, own_masters: bool = True
    ) -> list[dict[str, torch.Tensor]]:
        """Return the rule's tensors of each parameter (Adam: master, exp_avg, exp_avg_sq), new, flat and fp32.

        More than 64 MiB lies in a file without a name, on a path or where temporary files go: pages that are not used
        take no memory. The file goes with the last tensor.

        Args:
            parameters: Which ones.
            own_masters: Whether masters that are (fp32) weights are among the tensors.

        Raises:
            InfeasiblePlanError: Neither a disk nor memory has room for that; nothing was taken.
            OffloadError: The system does not give the memory.
            TierError: A disk has failed, the one with the file included.
        """
        parts = self._parts
        with self._thread.turn():
            layout = parts.plan.layout
            positions = [self._position(parameter) for parameter in parameters]
            wanted = [
                (position, name)
                for position in dict.fromkeys(positions)
                for name in layout.rule.names
                if own_masters or name != MASTER or layout.parameters[position].dtype is not DtypeCode.FLOAT32
            ]
            numbers = {tensor: number for number, tensor in enumerate(wanted)}
            numels = [layout.parameters[position].numel for position, _ in wanted]
            rooms = rooms_beside(parts.config, parts.plan, parts.rates, parts.tiers)
            with named_shortage("state cannot be copied"):
                handout = Handout(numels, rooms)
            with contextlib.closing(handout):

                def read(position: int, start: int, views: Mapping[str, torch.Tensor]) -> None:
                    for name, values in views.items():
                        number = numbers.get((position, name))
                        if number is not None:
                            handout.write(number, start, values)

                self.visit_state(read, positions)
                found: dict[int, dict[str, torch.Tensor]] = {position: {} for position in positions}
                for (position, name), tensor in zip(wanted, handout.tensors, strict=True):
                    found[position][name] = tensor
            return [found[position] for position in positions]

    def visit_state(
        self,
        take: Callable[[int, int, Mapping[str, torch.Tensor]], None],
        parameters: Iterable[int | str] | None = None,
    ) -> None:
        """Hand out state once, run by run in the engine's order, where it lies in memory: nothing is copied.

        Args:
            take: Called with a parameter's position, the first element of the run, and flat fp32 views of its
                state that must not be written to or kept. It runs on a thread of the engine's and
                must not call the engine.
            parameters: Whose subgroups; None for all.

        Raises:
            Exception: What `take` raised first; it is not called again, and the state is unharmed.
        """
        failed: list[Exception] = []

        def visit(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
            if not failed:
                try:
                    take(segment.parameter, segment.start, views)
                except Exception as error:  # the reader's own affair
                    failed.append(error)

        with self._thread.turn():
            subgroups: Sequence[int] = range(len(self.plan.layout.subgroups))
            if parameters is not None:
                subgroups = self._visits.subgroups_of(map(self._position, parameters))
            self._visits.visit(subgroups, visit, changes=False)
        if failed:
            raise failed[0]

    def write_state(
        self,
        values: Mapping[int | str, Mapping[str, torch.Tensor]],
        steps: Mapping[int | str, int] | None = None,
        *,
        weights: bool = True,
    ) -> None:
        """Replace state: any tensor that `read_state` returns, and step counts.

        Tensors may be of any shape, strides, dtype and device: their elements are taken in row-major order, piece by
        piece, and no second copy is made of them. Where the weight is fp32 it *is* the master, and a master that is
        given is written to it; a 16-bit weight becomes the rounding of a master that is given. A tensor that is not
        given keeps its value.

        Args:
            values: By parameter and name of a tensor.
            steps: Step counts by parameter.
            weights: Whether 16-bit weights follow masters that are given; else they do with their next update.

        Raises:
            ConfigError: There is no such tensor, or it has another number of elements, is not dense and real, or is
                negative where a compact format stores roots; or a count is none.
        """
        with self._thread.turn():
            tensors_of = {self._position(parameter): tensors for parameter, tensors in values.items()}
            counts = {self._position(n): checked_step(f"step of {n}", step) for n, step in (steps or {}).items()}
            state = self.plan.layout.state
            rule = state.rule
            for position, tensors in tensors_of.items():
                parameter = self.plan.layout.parameters[position]
                for name, tensor in tensors.items():
                    what = f"{name} of {parameter.name}"
                    if name not in rule.names:
                        raise ConfigError(what, name, f"use {', '.join(rule.names)}")
                    refuse_uncopied(tensor, what)
                    if tensor.numel() != parameter.numel:
                        raise ConfigError(what, tensor.numel(), f"give {parameter.numel} elements")
                    if name in rule.roots and state.format.rounds:
                        refuse_negative(tensor, what)

            def write(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
                for name, tensor in tensors_of.get(segment.parameter, {}).items():
                    copy_run(tensor, segment.start, views[name])

            masters = {position for position, tensors in tensors_of.items() if weights and MASTER in tensors}
            self._change_state(self._visits.subgroups_of(tensors_of), write, counts, masters)

    def reset_state(self, parameters: Iterable[int | str]) -> None:
        """Make moments and step counts 0; masters and weights stay."""
        with self._thread.turn():
            chosen = {self._position(parameter) for parameter in parameters}
            names, machine = self.plan.layout.rule.state, self._parts.machine

            def reset(segment: Segment, views: Mapping[str, torch.Tensor]) -> None:
                if segment.parameter in chosen:
                    for name in names:
                        views[name].zero_()

            # What was never changed has no moments yet.
            subgroups = [number for number in self._visits.subgroups_of(chosen) if not machine.is_fresh(number)]
            self._change_state(subgroups, reset, dict.fromkeys(chosen, 0))

    def _change_state(
        self, subgroups: Sequence[int], change: Take, steps: Mapping[int, int], masters: Collection[int] = ()
    ) -> None:
        """Let `change` write to the state of every segment of some subgroups, and set step counts."""
        counts = self._parts.tables.steps

        def applied() -> None:
            for position, step in steps.items():
                counts[position] = step

        self._visits.visit(subgroups, change, changes=True, masters=masters, applied=applied)

    # Checkpoints

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        extra: bytes | None = None,
        copy: bool = False,
        on_done: Callable[[BaseException | None], None] | None = None,
        id: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        replica: bool = False,
        names: Mapping[str, str] | None = None,
        ended: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Start a checkpoint of the state as it is now; it is written while the caller goes on.

        What lies on a path stays where it is and is reserved there; what lies in memory is written, before its next
        update at the latest. Masters that are (fp32) weights are written before this returns, as their owner may
        change them. Without paths, or with `copy`, everything is written to the folder itself.

        Args:
            path: Folder of the checkpoint, or "s3://bucket/prefix"; made if it is not there.
            metadata: Anything that JSON can hold.
            extra: Anything else.
            copy: Copy everything into the folder, so that the checkpoint needs nothing else.
            on_done: Called from a thread of its own when it has ended, with the error or None.
            id: 32 hexadecimal digits, the same for all ranks; None for a new one, if there is one rank.
            rank: This rank.
            ranks: Number of ranks that save to the folder together.
            replica: Whether another rank has the same state and saves it for this rank too; it writes `extra` alone
                then.
            names: What parameters here are called there, where that is something else.
            ended: Returns ranks that are known to have ended, which nobody waits for; called from another thread.

        Raises:
            CheckpointError: The folder cannot be used, there is no room for a checkpoint, or a tier has failed, whose
                error is the cause; training may go on.
            SessionBrokenError: The session cannot be used, or broke while state was made ready to be saved.
        """
        folder, id = open_folder(path), id or uuid.uuid4().hex
        copy = copy or not self.config.paths

        def describe() -> Snapshot:
            layout, tables = self.plan.layout, self._parts.tables
            rounds = layout.state.format.rounds
            return Snapshot(
                layout=Layout((), (), layout.state) if replica else layout.renamed(names) if names else layout,
                step=self._visits.step_number,
                steps=() if replica else tuple(tables.steps.tolist()),
                metadata=metadata or {},
                extra=extra,
                id=id,
                rank=rank,
                ranks=ranks,
                copy=copy,
                seed=tables.seed if rounds else None,
                numbers=tuple(tables.numbers.tolist()) if rounds and not replica else (),
                ended=ended,
            )

        with self._thread.turn():
            if not copy and not self.config.checkpoints:
                raise ConfigError("checkpoints_kept", 0, "keep at least 1, or save with copy=True")
            self._checkpoints.save(folder, describe, on_done)

    @property
    def kept_checkpoints(self) -> tuple[str, ...]:
        """Folders of the checkpoints whose state stays on the paths, oldest first; copies are not among them.

        Where there are `OffloadConfig.checkpoints_kept` of them, the next one without `copy` displaces the oldest.
        """
        return tuple(kept.folder for kept in self._parts.saves.kept)

    def release(self, path: str | os.PathLike[str]) -> None:
        """Release a checkpoint that this session keeps: it is none from then on, and its slots are free.

        A kept checkpoint whose folder was deleted or moved is not released in its turn, as nobody can tell which;
        this says that it is gone.

        Args:
            path: The folder that it was saved to.

        Raises:
            CheckpointError: None in that folder is kept, or somebody is reading it.
        """
        with self._thread.turn():
            self._checkpoints.release(path)

    def wait_checkpoint(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint that was started last has been committed.

        Raises:
            CheckpointError: It was not; a tier's error that it failed with is the cause. Training may go on.
            TimeoutError: It has not been by then.
        """
        saves = self._parts.saves
        pending = saves.pending or saves.last
        if pending is None:
            return
        if not waits.wait_for(pending.done.wait, pending.awaited, timeout_s):
            raise TimeoutError(f"the checkpoint in {pending.folder.path} is not written after {timeout_s} s")
        if pending.error is not None:
            raise pending.error

    def load(
        self,
        checkpoint: StateSource,
        *,
        names: Mapping[str, str] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Replace all state, step counts and weights by what a checkpoint has for these parameters.

        With the same subgroups, tiles and ranks streamed state is not copied: its slots are this session's from then
        on where their session has ended and they lie on one of its paths, and are only read elsewhere.

        Args:
            checkpoint: An open one, or a file of another format; may be closed afterwards.
            names: What a parameter here is called there, where that differs.
            rank: This rank.
            ranks: Number of ranks.

        Raises:
            CheckpointError: It has not all parameters, or they have other sizes; nothing has changed then. Or part
                of it is damaged, which is found out while it is read: the session is broken then.
        """
        parts = self._parts
        with self._thread.turn():
            parameters = parts.plan.layout.parameters
            restorer = Restorer(checkpoint, parameters, names or {}, parts.views, parts.tables, parts.lanes)
            self._checkpoints.load(checkpoint, restorer, rank, ranks)

    @property
    def step_s(self) -> float:
        """Seconds that the last step took."""
        return self._step_s

    def raise_untold(self) -> None:
        """Raise what a step has failed with that went on behind its caller, unless it was raised before."""
        self._thread.raise_untold()

    def close(self) -> None:
        """Finish what is in flight, a checkpoint included, and free everything; idempotent.

        The session's files are deleted, except those that kept checkpoints refer to. Other ranks have half a minute
        to do their part of a checkpoint, and seconds if an exception is on its way. After the session has failed, or
        when another call was interrupted, this returns within seconds: what hangs is left, which is logged, and put
        away when the device answers.
        """
        self._ending.close()
        if self._ending.work is not None:  # else it was put off, for a request under way that may be interrupted
            self._finalizer.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _aborted(parts: Parts, visits: Visits, error: BaseException) -> StepAbortedError:
    """Return what to raise for a step that has failed with an error."""
    if isinstance(error, OffloadError):  # else it is a fault of ours, and where it came from counts
        error.__traceback__ = None  # the session keeps the error, which would keep its callers' frames
    aborted = StepAbortedError(visits.step_number + 1, error, parts.machine.moved, parts.saves.last_folder)
    aborted.__cause__ = error
    return aborted
