"""`AdamW` and `Adam`: PyTorch optimizers whose state lives where the plan says.

A thin client of `offload.Engine`: it knows torch's parameters, gradients and hooks, and nothing of tiers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import numbers
import os
import tempfile
import threading
import uuid
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from itertools import chain, pairwise
from typing import Any, ClassVar, NamedTuple, overload

import numpy as np
import torch
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from offload.checkpoint.exchange import SafetensorsSource, import_distributed
from offload.checkpoint.manifest import Piece
from offload.checkpoint.reader import Checkpoint, StateSource
from offload.config import OffloadConfig
from offload.engine.tables import GroupScalars
from offload.engine.timeline import Interval
from offload.errors import CheckpointError, ConfigError, invariant
from offload.kernels.reference import DTYPE_CODES
from offload.layout import STATE_NAMES, Parameter
from offload.optim.slots import GradientSlot
from offload.optim.state import Copies, StateView
from offload.protocols import Device, DeviceLane, Mark
from offload.session.engine import Engine
from offload.sim import Explanation, Forecast, PlanReport, compare

log = logging.getLogger("offload")


NOT_SAVED = ("param_names", "amsgrad", "foreach", "fused", "capturable", "differentiable")
NOT_LOADED = ("params", *NOT_SAVED)
"""Entries of a saved group that say nothing about this optimizer."""

DIGEST_NUMEL = 1024
"""Elements at the beginning of each weight by which ranks find out whether they have the same."""

HYPERPARAMETER_DEPTH = 4
"""How deeply a hyperparameter may be nested to be kept in a checkpoint."""

MAX_IN_TRANSIT_BYTES = 1 << 30
"""Gradients on a GPU that are held while they leave it; for more of them, backward waits on the GPU."""

CLIP_EPS = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm before it divides."""


class _Scaled(NamedTuple):
    """A gradient that the next step has a factor for, as it was when that was found.

    Attributes:
        of: The tensor.
        version: Its version.
        address: Where it lies.
    """

    of: weakref.ref[torch.Tensor]
    version: int
    address: int

    def is_same(self, other: _Scaled) -> bool:
        """Return whether nothing tells two notes of one parameter's gradient apart."""
        return self.of() is other.of() and self[1:] == other[1:]


class OffloadedAdam(torch.optim.Optimizer):
    """What `AdamW` and `Adam` share; use one of these."""

    decoupled: ClassVar[bool]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        amsgrad: bool = False,
        offload: OffloadConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self._engine: Engine | None = None
        self._device: Device | None = None
        self._place: torch.device | None = None
        self._unopened: Any = None
        self._closed = False
        self._departed: dict[int, torch.Tensor | None] = {}
        self._departed_from: dict[int, StorageWeakRef] = {}
        self._in_transit: deque[tuple[Mark, torch.Tensor]] = deque()
        self._in_transit_bytes = 0
        self._loss_scale = 1.0
        self._positions: dict[torch.Tensor, int] = {}
        self._slots: list[GradientSlot] = []
        self._gradient_seen: list[int] = []
        self._weight_seen: list[tuple[int, int]] = []
        self._forms: list[tuple[torch.Size, tuple[int, ...]]] = []
        self._handles: list[Any] = []
        self._lock = threading.RLock()
        self._arrivals: list[int] = []
        self._clip = 1.0
        self._scaled: dict[int, _Scaled] = {}
        self._arrivals_then: list[int] = []
        self._accumulated_onto_scaled = False
        self._norm = math.nan
        self._kept: list[torch.Tensor] = []
        self._told_changed = False
        self._copies = Copies()
        self._changes = 0
        self._forecast = Forecast()
        if amsgrad:
            raise ConfigError("amsgrad", amsgrad, "use false: the engine keeps two moments, not three")
        if isinstance(offload, Mapping):
            offload = OffloadConfig.from_dict(offload)
        if offload is not None and not isinstance(offload, OffloadConfig):
            raise ConfigError("offload", offload, "give an OffloadConfig or a mapping of its fields")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)
        self._world, rank = _world()
        config = offload or OffloadConfig()
        self._config = config.for_rank(rank) if self._world > 1 else config
        self._place = self.param_groups[0]["params"][0].device if self.param_groups[0]["params"] else None
        self._device = self._find_device([p for group in self.param_groups for p in group["params"]])
        if self._device is None or config.gpu_memory != "auto":
            self._open(self._config)
        elif not config.keep_grads and self._world > 1:
            self._device.close()
            raise _cannot_leave(self._world)
        else:
            self._unopened = weakref.finalize(self, self._device.close)
            self._widen_gradients(chain.from_iterable(group["params"] for group in self.param_groups))

    def _open_after_backward(self) -> None:
        """Open the engine, if it was left until now: it is known now what backward leaves free."""
        if self._device is not None and not self._closed:
            self._device.mark(
                DeviceLane.CALLER, timed=False
            )  # before anything changes: refused while a CUDA graph is captured
        if self._engine is None and self._device is not None and not self._closed:
            self._open(self._config)

    def _find_device(self, parameters: list[torch.Tensor]) -> Device | None:
        """Return the GPU that all weights lie on; None for the CPU."""
        devices = {parameter.device for parameter in parameters}
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise ConfigError("params", found, "have all weights on one device, or an optimizer for each")
        if devices and next(iter(devices)).type == "cuda":
            from offload.engine.cuda import CudaDevice

            return CudaDevice(next(iter(devices)))
        return None

    def _open(self, config: OffloadConfig) -> None:
        if not config.keep_grads and self._world > 1:
            if self._device is not None:
                self._device.close()
            raise _cannot_leave(self._world)
        wanted = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        slots = self._world == 1 and self._device is None
        described = self._describe(wanted)
        if self._unopened is not None:
            self._unopened.detach()
        self._closed = True  # if this fails, the device has been closed
        with torch.inference_mode(False):  # the first step may be taken in it, and views need version counters
            self._engine = Engine(described, config, gradient_slots=slots, device=self._device)
            self._closed = False
            # Frozen ones, too: torch takes no other dtype for a gradient that is there.
            self._widen_gradients(chain.from_iterable(group["params"] for group in self.param_groups))
            self._attach(wanted)

    # Parameters

    @property
    def engine(self) -> Engine:
        """The engine under this optimizer."""
        if self._engine is None:
            if self._device is None or self._closed:
                raise ConfigError("optimizer", "not open", "use it between its constructor and close()")
            # Before the first backward pass nobody knows what it will leave free.
            log.info("no state is at home on the GPU, as it is asked for before the first step")
            self._open(dataclasses.replace(self._config, gpu_memory=0))
        invariant(self._engine is not None, "an optimizer without an engine")
        return self._engine  # type: ignore[return-value]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch documents it; its state joins what is offloaded.

        Raises:
            ConfigError: If a parameter or a hyperparameter cannot be used; nothing has changed then.
            InfeasiblePlanError: If the new state does not fit; nothing has changed then.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if torch.is_inference_mode_enabled():
                allowed = "make optimizers and add groups outside of it: tensors made in it have no version counter"
                raise ConfigError("params", "torch.inference_mode()", allowed)
            _check_hyperparameters(group)
            if len(set(group["params"])) != len(group["params"]):
                raise ConfigError("params", "a parameter twice in one group", "give each parameter once")
            names = group.get("param_names") or [
                f"param_groups[{len(self.param_groups) - 1}].params[{n}]" for n in range(len(group["params"]))
            ]
            for name, parameter in zip(names, group["params"], strict=True):
                _check_parameter(parameter, str(name), self._place)
            if self._engine is not None:
                self._add([parameter for parameter in group["params"] if parameter.requires_grad])
            if self._place is not None:  # else the constructor does it for all
                self._widen_gradients(group["params"])
        except BaseException:
            self.param_groups.pop()
            raise

    def _widen_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let autograd accumulate in float32, if that is wanted."""
        if self._config.gradient_dtype == "float32" and (self._world == 1 or self._device is not None):
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad_dtype = torch.float32

    def _name(self, parameter: torch.Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for position, candidate in enumerate(group["params"]):
                if candidate is parameter:
                    names = group.get("param_names")
                    return str(names[position]) if names else f"param_groups[{number}].params[{position}]"
        return "parameter"

    def _describe(self, wanted: list[torch.Tensor]) -> list[Parameter]:
        groups: dict[torch.Tensor, tuple[int, str]] = {}
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for position, parameter in enumerate(group["params"]):
                name = str(names[position]) if names else f"param_groups[{number}].params[{position}]"
                groups[parameter] = number, name
        for parameter in wanted:
            _check_parameter(parameter, groups[parameter][1], self._place)
        self._check_apart([*self._positions, *wanted])
        return [Parameter(groups[p][1], p.numel(), DTYPE_CODES[p.dtype], groups[p][0]) for p in wanted]

    def _check_apart(self, parameters: Sequence[torch.Tensor]) -> None:
        """Verify that weights share no memory: each has a master of its own, and they are updated in any order."""
        found = sorted((p.data_ptr(), p.nbytes, n) for n, p in enumerate(parameters) if p.numel())
        for (address, nbytes, number), (beyond, _, other) in pairwise(found):
            if beyond < address + nbytes:
                names = " and ".join(self._name(parameters[n]) for n in sorted((number, other)))
                raise ConfigError("params", f"{names}, which share memory", "give tied weights as one parameter")

    def _add(self, wanted: list[torch.Tensor]) -> None:
        described = tuple(self._describe(wanted))
        # What the engine has and we do not is left of an addition that was interrupted.
        if self.engine.plan.layout.parameters[len(self._positions) :] != described:
            self.engine.add(described)
        self._attach(wanted)

    def _attach(self, wanted: list[torch.Tensor]) -> None:
        owner = weakref.ref(self)
        there = len(self.engine.plan.layout.parameters)
        invariant(
            len(self._positions) + len(wanted) == there, "parameters that were interrupted while they were added"
        )
        self._widen_gradients(wanted)
        for parameter in wanted:
            position = len(self._positions)
            self._positions[parameter] = position
            self._weight_seen.append((parameter.data_ptr(), parameter._version))
            self._forms.append((parameter.shape, parameter.stride()))
            self._gradient_seen.append(-1)
            self._arrivals.append(0)
            self.engine.bind_weight(position, parameter.data_ptr())
            if self._device is None and self._world == 1:
                self._slots.append(GradientSlot(self.engine.gradient_slot(position), parameter))
            self._handles.append(_on_arrival(parameter, _ArrivalHook(owner, position)))

    # Gradients

    def _arrived(self, parameter: torch.Tensor, position: int, *, builds_graph: bool = False) -> None:
        """A gradient has been accumulated: gather its norm while it is in cache, and keep it in its slot."""
        gradient = parameter.grad
        if gradient is None or self.engine.broken is not None:
            return
        leaves = self._device is not None and not self._config.keep_grads
        if leaves or self._slots:
            _check_gradient(gradient, parameter, self._name)
        self._arrivals[position] += 1
        scaled = self._scaled.get(position)
        if scaled is not None:
            # Accumulated onto what was clipped, unless somebody changed (zeroed, say) the gradient in between. One
            # that a graph is built with is another tensor each time, so nobody can tell.
            onto = scaled.of() is gradient and gradient._version == scaled.version + 1
            self._accumulated_onto_scaled |= onto or builds_graph or gradient.requires_grad
        if leaves:
            self._depart(parameter, position, gradient)
            return
        if not self._slots:
            return
        slot = self._slots[position]
        if gradient.data_ptr() == slot.address and gradient.dtype == slot.dtype:
            self.engine.gradient_arrived(position, slot.address, DTYPE_CODES[slot.dtype])
        elif gradient.requires_grad or parameter.grad_dtype not in (None, slot.dtype):
            return  # part of a graph, or of a weight that is not what it was: `step` looks at it
        elif gradient.dtype not in (slot.dtype, parameter.dtype):
            return  # wider than its slot: it is not narrowed
        elif not slot.is_free:
            return  # somebody still holds the last pass's gradient, which lies in the slot
        else:
            lent = slot.lend()
            if _lies_as(gradient, parameter):
                self.engine.gradient_arrived(position, gradient.data_ptr(), DTYPE_CODES[gradient.dtype])
            else:
                lent.copy_(gradient)
                self.engine.gradient_arrived(position, slot.address, DTYPE_CODES[slot.dtype])
            parameter.grad = gradient = lent
        self._gradient_seen[position] = gradient._version

    def _depart(self, parameter: torch.Tensor, position: int, gradient: torch.Tensor) -> None:
        """Let a gradient leave the GPU, or at least `.grad`."""
        if gradient.requires_grad:
            return  # part of a graph: it stays until the step
        if position in self._scaled and position in self._departed:
            self._accumulated_onto_scaled = True
        storage = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
        before = self._departed_from.get(position)
        if before is not None and before == storage:
            # Written to meanwhile, in no order with what has read it or will: a replayed graph has one place for it.
            raise ConfigError(
                f"gradient of {self._name(parameter)}",
                "in the same memory as that of the pass before",
                "with CUDA graphs, take one backward pass a step, or keep_grads=True",
            )
        self._departed_from[position] = storage  # which allocators do not use again as long as this is here
        if not _lies_as(gradient, parameter):
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        mark = self.engine.gradient_arrived(position, gradient.data_ptr(), DTYPE_CODES[gradient.dtype])
        parameter.grad = None
        while self._in_transit and self._in_transit[0][0].reached():
            self._in_transit_bytes -= self._in_transit.popleft()[1].nbytes
        if mark is not None:
            self._in_transit.append((mark, gradient))  # its memory is free when the copy has been made
            self._in_transit_bytes += gradient.nbytes
        while self._in_transit_bytes > MAX_IN_TRANSIT_BYTES and self._device is not None:
            first, oldest = self._in_transit.popleft()
            self._in_transit_bytes -= oldest.nbytes
            self._device.follow(DeviceLane.CALLER, first)  # whatever backward does next, with that memory too
            self._device.give_up(oldest)
        if position not in self._departed:
            self._departed[position] = gradient if self.engine.keeps_gradient(position) else None

    def forget_departed(self) -> None:
        """Forget gradients that have left the GPU: those that arrive next are the first; for `offload.GradScaler`."""
        if self._departed and self._device is not None:
            self.engine.forget_gradients()  # the caller's stream comes behind whatever reads them
            for gradient in (*self._departed.values(), *(gradient for _, gradient in self._in_transit)):
                if gradient is not None:
                    self._device.give_up(gradient)
            self._departed.clear()
        self._departed_from.clear()
        self._in_transit.clear()
        self._in_transit_bytes = 0

    def _bind_gradients(self) -> list[int]:
        """Tell the engine where gradients lie; return the positions of the parameters that have one."""
        active = []
        bind = self.engine.bind_gradient
        self._kept.clear()
        late = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and p not in self._positions and p.requires_grad
        ]
        if late:  # frozen when the optimizer was made, and not any more
            self._add(late)
        reduced = _world()[0] > 1  # collectives leave no trace in a tensor's version
        for parameter, position in self._positions.items():
            gradient = parameter.grad
            if gradient is not None and position in self._departed:
                self._depart(parameter, position, gradient.detach())
                gradient = None
            if gradient is None:
                if position in self._departed:
                    active.append(position)
                continue
            _check_gradient(gradient, parameter, self._name)
            self._kept.append(gradient)
            gathered = (
                not reduced
                and self._world == 1
                and self._device is None
                and gradient.data_ptr() == self._slots[position].address
                and gradient._version == self._gradient_seen[position]
            )
            if not _lies_as(gradient, parameter):
                gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
                self._kept.append(gradient)
            bind(position, gradient.data_ptr(), DTYPE_CODES[gradient.dtype], gathered=gathered)
            active.append(position)
        self._check_clip()
        return active

    def _check_clip(self) -> None:
        """Forget factors whose gradients are gone (the step was skipped, say).

        In torch they are in the gradients; here the step applies them. So nobody can tell of a gradient that was
        changed in between whether they are meant for what it is now.

        Raises:
            ConfigError: If some gradients are those that the factors are for, or have been, and others are not.
        """
        if not self._scaled:
            return
        kept, fresh, changed = False, self._accumulated_onto_scaled, None
        for parameter, position in self._positions.items():
            found = self._as_it_is(parameter, position)
            if found is None:
                continue
            if position in self._scaled and found.is_same(self._scaled[position]):
                kept = True
            elif self._arrivals[position] != self._arrivals_then[position]:
                fresh = True
            elif math.isnan(self._clip) or parameter.grad is None or bool(parameter.grad.any()):  # zeros stay zeros
                changed = parameter
        if fresh and (kept or self._accumulated_onto_scaled):
            raise ConfigError(
                "clip_grad_norm_",
                self._clip,
                "clip, and unscale, after the last backward pass of a step: more gradient has arrived; if that step "
                "was skipped, call optimizer.zero_grad()",
            )
        if changed is not None and not fresh:
            raise ConfigError(
                "clip_grad_norm_",
                self._clip,
                f".grad of {self._name(changed)} was replaced or changed after clip_grad_norm_ or unscale_, which "
                "leave it to the step to scale it. Change gradients before, or use torch.nn.utils.clip_grad_norm_ "
                "and torch.amp.GradScaler, which scale .grad; if that step was skipped, call optimizer.zero_grad()",
            )
        if not kept:
            self._forget_clip()

    def _as_it_is(self, parameter: torch.Tensor, position: int) -> _Scaled | None:
        """Return what tells a parameter's gradient from others; the parameter stands for one that has left."""
        if position in self._departed:
            return _Scaled(weakref.ref(parameter), self._arrivals[position], 0)
        gradient = parameter.grad
        return (
            _Scaled(weakref.ref(gradient), gradient._version, gradient.data_ptr()) if gradient is not None else None
        )

    def _note_scaled(self) -> None:
        """Take note of the gradients as they are: from now on the step has a factor for them."""
        found = {position: self._as_it_is(parameter, position) for parameter, position in self._positions.items()}
        self._arrivals_then = [*self._arrivals]
        self._scaled = {position: gradient for position, gradient in found.items() if gradient is not None}

    def _forget_clip(self) -> None:
        self._clip = self._loss_scale = 1.0
        self._scaled = {}
        self._accumulated_onto_scaled = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clip the L2 norm of all gradients in the update itself.

        `.grad` is left as it is; the factor is applied when `step` reads it, and forgotten by `zero_grad`. So
        gradients are changed before this is called: `step` refuses those that were replaced, changed or accumulated
        since. Of writes past version counters (through `.data`, NumPy, or collectives) only those before are seen.
        The norm is that of the gradients as they are at this call: those in host memory are read once, to see whether
        they have changed since their norms were gathered. So writes through `.data` or NumPy are noticed.

        Args:
            max_norm: Largest norm.
            error_if_nonfinite: Raise instead of letting a gradient that is not finite through.

        Returns:
            The norm before clipping, a float64 tensor without dimensions. The same for every placement.

        Raises:
            RuntimeError: If the norm is not finite and `error_if_nonfinite` is set.
            ConfigError: If gradients have changed since they were clipped before.
        """
        if not _number(max_norm) >= 0:
            raise ConfigError("max_norm", max_norm, "give a number >= 0")
        with self._lock:
            self._open_after_backward()
            active = self._bind_gradients()
            norm = math.sqrt(self.engine.gradient_norm_sq(active)) / abs(self._loss_scale) * self._clip
            if error_if_nonfinite and not math.isfinite(norm):
                raise RuntimeError(f"the gradients' norm is {norm}, so they cannot be clipped")
            self._norm = norm
            factor = self._clip
            if not norm <= max_norm:  # a norm that is NaN makes the factor NaN, as torch's does
                factor *= min(1.0, float(max_norm) / (norm + CLIP_EPS)) if not math.isnan(norm) else math.nan
            if factor != 1 or self._loss_scale != 1 or max_norm < math.inf:  # else it asks for the norm alone
                self._note_scaled()
            self._clip = factor  # now, as an interrupt at any line leaves no factor for other gradients
            return torch.tensor(norm, dtype=torch.float64, device="cpu")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as torch documents it; those that have left, too."""
        self._forget_clip()
        self.forget_departed()
        super().zero_grad(set_to_none)

    # Work

    def _check_weights(self) -> None:
        """Notice weights that were moved or changed since we left them."""
        changed = []
        if any(p.data_ptr() != seen for p, (seen, _) in zip(self._positions, self._weight_seen, strict=True)):
            self._check_apart([*self._positions])
        for parameter, position in self._positions.items():
            address, version = parameter.data_ptr(), parameter._version
            if (address, version) == self._weight_seen[position]:
                continue
            known = self.engine.plan.layout.parameters[position]
            form = parameter.shape, parameter.stride()
            if DTYPE_CODES.get(parameter.dtype) is not known.dtype or form != self._forms[position]:
                found = f"{parameter.dtype}, shape {tuple(form[0])}, strides {form[1]}"
                raise ConfigError(
                    known.name, found, "make a new optimizer after changing a weight's dtype, shape or memory format"
                )
            _check_parameter(parameter, known.name, self._place)
            self.engine.bind_weight(position, address)
            self.engine.reload_master(position)
            self._weight_seen[position] = address, version
            changed.append(known.name)
        if changed and not self._told_changed:
            self._told_changed = True
            log.warning(
                "%d weights (%s, ...) were changed outside the optimizer; their masters are read anew from them, "
                "their moments stay (said once)",
                len(changed),
                changed[0],
            )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: Evaluates the model and returns the loss.

        Raises:
            StepAbortedError: If the step could not be finished; the session is broken then.
            SessionBrokenError: If the optimizer was closed or its session is broken.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            self._step()
        return loss

    def _step(self) -> None:
        self._open_after_backward()
        self._copies.check()
        self._check_weights()
        for group in self.param_groups:
            _check_hyperparameters(group)
        active = self._bind_gradients()
        groups = [
            GroupScalars(
                lr=_number(group["lr"]),
                beta1=_number(group["betas"][0]),
                beta2=_number(group["betas"][1]),
                eps=_number(group["eps"]),
                weight_decay=_number(group["weight_decay"]),
                decoupled=self.decoupled,
                maximize=bool(group["maximize"]),
            )
            for group in self.param_groups
        ]
        try:
            self.engine.step(groups, scale=self._loss_scale, clip=self._clip, active=active)
        finally:
            self._changes += 1
            self._forget_clip()
            self.forget_departed()
            self._kept.clear()
            wanted = set(active)
            updated = [parameter for parameter, position in self._positions.items() if position in wanted]
            increment_version(updated)
            for parameter in updated:
                self._weight_seen[self._positions[parameter]] = parameter.data_ptr(), parameter._version

    def unscale(self, scale: float) -> bool:
        """Have the next step divide gradients by `scale`, and leave them as they are; for `offload.GradScaler`.

        Args:
            scale: What the loss was multiplied by.

        Returns:
            Whether all gradients are finite.
        """
        with self._lock:
            self._open_after_backward()
            finite = math.isfinite(self.engine.gradient_norm_sq(self._bind_gradients()))
            self._note_scaled()
            self._loss_scale = scale
            return finite

    def refresh_masters(self) -> None:
        """Read all masters anew from the weights; for writes that torch's version counter does not see."""
        for position in self._positions.values():
            self.engine.reload_master(position)

    # State

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[torch.Tensor, dict[str, torch.Tensor]]:
        """State of all parameters that have been updated, as torch's optimizers have it; read when asked for.

        What is read is a copy. An assignment (`state[p] = ...`, `state[p]["exp_avg"] = ...`) is written to where the
        state lives. `state = {}`, `state.clear()`, `state[p] = {}` and `del state[p]` are `reset_state`. After a
        change of a copy in place (`state[p]["exp_avg"].zero_()`) the next step, save, or look at the state raises
        `ConfigError`; writes that torch's version counter does not see (through `.data` or numpy) are not noticed.
        `state_for` and `state_dict` give copies that are the caller's.
        """
        return StateView(self)

    @state.setter
    def state(self, value: Any) -> None:
        if isinstance(value, StateView) or value or not isinstance(value, Mapping):
            raise ConfigError("state", type(value).__name__, "use load_state_dict to replace state")
        self.reset_state()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state and all hyperparameters in torch's own layout; `master` beside the moments."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self._lock:
            parameters = chain.from_iterable(group["params"] for group in self.param_groups)
            numbers = {parameter: number for number, parameter in enumerate(parameters)}
            groups = [
                {name: value for name, value in group.items() if name != "params"}
                | {"params": [numbers[parameter] for parameter in group["params"]]}
                for group in self.param_groups
            ]
            state = {numbers[parameter]: entry for parameter, entry in StateView(self, plain=True).items()}
        state_dict: dict[str, Any] = {"state": state, "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        return state_dict

    def _read(self, parameters: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        positions = [self._positions[parameter] for parameter in parameters]
        found = []
        with self._lock, torch.inference_mode(False):
            self._copies.check()
            self._check_weights()
            states = self.engine.read_state(positions) if positions else []
            for parameter, position, state in zip(parameters, positions, states, strict=True):
                entry = {
                    "step": torch.tensor(float(self.engine.step_count(position)), dtype=torch.float32, device="cpu")
                }
                for name in ("exp_avg", "exp_avg_sq", "master"):
                    entry[name] = state[name].as_strided(parameter.size(), parameter.stride())
                found.append(entry)
        return found

    def state_for(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter's `master`, `exp_avg` and `exp_avg_sq` as new fp32 CPU tensors, wherever they live.

        Raises:
            ConfigError: If the parameter has no state here.
        """
        self._position_of(parameter)
        entry = self._read([parameter])[0]
        return {name: entry[name] for name in STATE_NAMES}

    def _position_of(self, parameter: torch.Tensor) -> int:
        known = len(self.engine.plan.layout.parameters)  # opens the engine, if that was left until now
        position = self._positions.get(parameter, known) if isinstance(parameter, torch.Tensor) else known
        if position >= known:
            raise ConfigError("parameter", type(parameter).__name__, "give a parameter that this optimizer updates")
        return position

    def reset_state(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Forget moments and step counts, as if the parameters had never been updated; weights stay.

        Training goes on as with a new optimizer, bit for bit. There is one difference with 16-bit weights: masters
        stay, too, which are more exact than the weights that a new optimizer would take them from.

        Args:
            parameters: Which ones; None for all.

        Raises:
            ConfigError: One has no state here; nothing has changed then.
        """
        with self._lock:
            self._copies.forget()
            if self._engine is None and parameters is None:
                return  # nothing has been updated
            wanted = [*self._positions] if parameters is None else list(parameters)
            positions = [self._position_of(parameter) for parameter in wanted]
            self._check_weights()
            self._changes += 1
            self.engine.reset_state(positions)

    def _assign(self, parameter: torch.Tensor, name: str, value: Any) -> torch.Tensor:
        """Replace a parameter's step count or one of its state tensors; return what is there now."""
        position = self._position_of(parameter)
        with self._lock:
            self._check_weights()
            if name == "step":
                step = _checked_step("state", value)
                self._write({}, {position: step})
                return torch.tensor(float(step), dtype=torch.float32, device="cpu")
            if name not in STATE_NAMES:
                raise ConfigError("state", name, f"assign step, {', '.join(STATE_NAMES)}")
            flat = _checked_tensor(f"state {name}", value, parameter)
            self._write({position: {name: flat}}, {})
            return flat.as_strided(parameter.size(), parameter.stride())

    def _replace(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
        """Replace all of a parameter's state."""
        position = self._position_of(parameter)
        tensors, step = _checked_state("state", entry, parameter)
        with self._lock:
            self._check_weights()
            self._write({position: tensors}, {position: step}, reloads=True)

    def _write(
        self,
        values: Mapping[int | str, dict[str, torch.Tensor]],
        steps: Mapping[int | str, int],
        reloads: bool = False,
    ) -> None:
        """Write state, by position; masters that are not given are taken from the weights with `reloads`."""
        for given, tensors in values.items():
            if reloads and "master" not in tensors:
                self.engine.reload_master(given)
        self._changes += 1
        self.engine.write_state(values, steps)
        for parameter, position in self._positions.items():
            if "master" in values.get(position, {}) and parameter.dtype == torch.float32:
                increment_version(parameter)
            self._weight_seen[position] = parameter.data_ptr(), parameter._version

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, of this class or of torch's own Adam and AdamW.

        State is never cast down. A missing master is taken from the weight, so load the model's weights first.

        Raises:
            ConfigError: If groups, parameters or shapes do not match; nothing has changed then.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        saved_groups = self._check_saved_groups(state_dict)
        by_id = dict(
            zip(
                chain.from_iterable(group["params"] for group in saved_groups),
                chain.from_iterable(group["params"] for group in self.param_groups),
                strict=True,
            )
        )
        values: dict[int | str, dict[str, torch.Tensor]] = {}
        steps: dict[int | str, int] = {}
        engine = self.engine  # opens it, if that was left until now
        for key, entry in state_dict["state"].items():
            parameter = by_id.get(key)
            position = self._positions.get(parameter) if parameter is not None else None
            if parameter is None or position is None:
                raise ConfigError(
                    "state_dict", key, "it has state for a parameter that this optimizer does not update"
                )
            values[position], steps[position] = _checked_state(f"state_dict {key}", entry, parameter)
        # The state dict says of the others that they were never updated.
        others = [position for position in self._positions.values() if position not in values]
        with self._lock:
            self._copies.forget()
            self._check_weights()
            for position in others:
                if engine.step_count(position):
                    engine.reload_master(position)
            self._write(values, steps, reloads=True)
            if others:
                engine.reset_state(others)
            for group, saved in zip(self.param_groups, saved_groups, strict=True):
                group.update({name: deepcopy(saved[name]) for name in saved if name not in NOT_LOADED})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # Checkpoints

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Any = None,
        copy: bool = False,
        on_done: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        """Start a checkpoint of the state as it is now; it is written while training goes on.

        State that lies on a path stays there: its place is reserved for the checkpoint. State in memory is written
        during the next forward and backward, and before its next update at the latest. With `copy`, or without
        paths, everything is copied into the folder, which then needs nothing else. Masters that are (fp32) weights
        are written before this returns.

        The last `OffloadConfig.checkpoints_kept` checkpoints without `copy` are kept; an older one stops being one
        when a newer has been committed. With `torch.distributed`, all ranks call this together.

        Args:
            path: Folder, or "s3://bucket/prefix"; made if it is not there. One that holds a checkpoint holds that
                one until the new one has been committed.
            extra: Whatever else the loop needs to go on: random states, position in the data, a gradient scaler's
                `state_dict()`, buffers, frozen parameters. Anything that `torch.save` takes, taken as it is now.
            copy: Make the checkpoint self-contained.
            on_done: Called from a thread of its own when it has ended, with the error or None.

        Raises:
            CheckpointError: The folder cannot be used, there is no room for a checkpoint, or a tier has failed, whose
                `TierError` is the `__cause__`; training may go on. What goes wrong later is logged, and raised by
                `wait_checkpoint`.
            SessionBrokenError: The session cannot be used, or broke while state was made ready to be saved.
        """
        content = None
        if extra is not None:
            buffer = io.BytesIO()
            torch.save(extra, buffer)
            content = buffer.getvalue()
        with self._lock:
            self._copies.check()
            self._check_weights()
            world, rank = _world()
            id, replica = self._agree_on_save(world, rank)
            self.engine.save(
                path,
                metadata={"optimizer": "AdamW" if self.decoupled else "Adam", "groups": self._saved_groups()},
                extra=content,
                pieces=[
                    Piece(0, parameter.numel(), tuple(parameter.shape), tuple(parameter.stride()))
                    for parameter in self._positions
                ],
                copy=copy,
                on_done=on_done,
                id=id,
                rank=rank,
                ranks=world,
                replica=replica,
            )

    def _agree_on_save(self, world: int, rank: int) -> tuple[str, bool]:
        """Return the save's id, and whether rank 0 saves this rank's state too, since all have the same.

        Raises:
            CheckpointError: Ranks have other weights under the same names; raised on all of them.
        """
        id = uuid.uuid4().hex
        if world == 1:
            return id, False
        beginnings = {}
        for parameter, named in zip(self._positions, self.engine.plan.layout.parameters, strict=True):
            beginning = parameter.detach().as_strided((parameter.numel(),), (1,))[:DIGEST_NUMEL].cpu()
            beginnings[named.name] = zlib.crc32(beginning.view(torch.uint8).numpy().tobytes())
        found: list[Any] = [None] * world
        torch.distributed.all_gather_object(found, (id, beginnings))
        first: dict[str, tuple[int, int]] = {}
        for number, (_, theirs) in enumerate(found):
            for name, digest in theirs.items():
                if first.setdefault(name, (number, digest))[1] != digest:
                    raise CheckpointError(
                        f"ranks {first[name][0]} and {number} have different weights that are both called {name}: "
                        "give every weight a name of its own, or save with `Engine.save` and its pieces"
                    )
        return found[0][0], rank > 0 and all(theirs == found[0][1] for _, theirs in found)

    def wait_checkpoint(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint that was started last has been committed.

        Raises:
            CheckpointError: It was not; a `TierError` that it failed with is the `__cause__`. Training may go on.
            TimeoutError: It has not been by then.
        """
        self.engine.wait_checkpoint(timeout_s)

    def release_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Release a checkpoint that is kept: it is none from then on, and its slots are free.

        Older checkpoints than `OffloadConfig.checkpoints_kept` are released by themselves, but not those whose folder
        was moved or deleted: nobody can tell which. Call this before or after deleting the folder of a checkpoint
        that is still kept. With `torch.distributed`, all ranks call it together.

        Args:
            path: The folder that it was saved to.

        Raises:
            CheckpointError: None in that folder is kept by this optimizer, or somebody is reading it.
        """
        self.engine.release(path)

    @torch.no_grad()
    def load_checkpoint(
        self, path: str | os.PathLike[str], *, hyperparameters: bool = True, weights_only: bool = True
    ) -> Any:
        """Go on from a checkpoint: state, step counts, hyperparameters, and the weights, derived from their masters.

        Tiers, budgets, subgroups, paths and ranks may be others than when it was written. With the same subgroups,
        tiles and ranks nothing is copied: state that is not at home in memory stays in its slots. Parameters are
        told by their names, so either give names (`model.named_parameters()`) or the same parameters in the same
        order.

        Args:
            path: Its folder.
            hyperparameters: Take the groups' hyperparameters from it, too.
            weights_only: See `torch.load`; False for an `extra` of arbitrary objects, which may run code.

        Returns:
            What was given as `extra` (by the rank of this number, or by rank 0); None if nothing was.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged or of another model. Nothing has changed then,
                unless damage was found while the state was read, which breaks the session. State that stays where it
                lies is read, and verified, when it is next used.
        """
        config = self.engine.config
        places = [place.path for place in config.path_configs]
        with self._lock, Checkpoint(path, verify=config.checksum, paths=places) as checkpoint:
            rank = _world()[1]
            rank = rank if rank < len(checkpoint.manifests) else 0
            groups = self._checked_groups(checkpoint.manifests[rank].metadata, checkpoint.path)
            content = checkpoint.extra(rank)
            extra = None
            if content is not None:
                try:
                    extra = torch.load(io.BytesIO(content), weights_only=weights_only)
                except Exception as cause:
                    raise CheckpointError(
                        f"what was given as extra to {checkpoint.path} cannot be read: {cause}. If you trust the "
                        "file, pass weights_only=False"
                    ) from cause
            self._check_forms(checkpoint)
            self._check_weights()
            self._load(checkpoint, groups if hyperparameters else None)
        return extra

    @torch.no_grad()
    def import_state(self, path: str | os.PathLike[str], *, hyperparameters: bool = True) -> None:
        """Go on from optimizer state of another format, streamed: safetensors, or `torch.distributed.checkpoint`.

        Parameters are told by their names. A master that is missing is taken from the weight, so load the model's
        weights first; where it is there, the weight is derived from it.

        Args:
            path: A file, as `offload.checkpoint.exchange.export_safetensors` writes them, or the folder of a
                distributed checkpoint, for which a file as large as the state is made meanwhile where temporary
                files go (`TMPDIR`).
            hyperparameters: Take the groups' hyperparameters from it, too, where it has them.

        Raises:
            CheckpointError: It cannot be read, or is of another model.
        """
        with self._lock, contextlib.ExitStack() as ends:
            if os.path.isdir(path):
                scratch = ends.enter_context(tempfile.TemporaryDirectory())
                source = import_distributed(path, os.path.join(scratch, "state"))
            else:
                source = SafetensorsSource(path)
            groups = self._checked_groups(source.metadata, source.path) if source.metadata else None
            self._check_forms(source)
            self._check_weights()
            self._load(source, groups if hyperparameters else None)

    def _load(self, source: StateSource, groups: list[dict[str, Any]] | None) -> None:
        world, rank = _world()
        self._copies.forget()
        self._changes += 1
        self.engine.load(source, rank=rank, ranks=world)
        for parameter, position in self._positions.items():
            increment_version(parameter)
            self._weight_seen[position] = parameter.data_ptr(), parameter._version
        for group, restored in zip(self.param_groups, groups or [{}] * len(self.param_groups), strict=True):
            for name, value in restored.items():
                if isinstance(value, torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value

    def _saved_groups(self) -> list[dict[str, Any]]:
        """Return the groups' hyperparameters as JSON takes them."""
        return [
            {
                name: {"tensor": float(value)} if isinstance(value, torch.Tensor) else _plain(value)
                for name, value in group.items()
                if name not in NOT_LOADED and _is_plain(value)
            }
            for group in self.param_groups
        ]

    def _checked_groups(self, metadata: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
        """Return the hyperparameters to be set from what `_saved_groups` returned, or from what claims to be that."""
        groups = metadata.get("groups")
        kind = "AdamW" if self.decoupled else "Adam"
        if metadata.get("optimizer") != kind:
            raise CheckpointError(f"{path} is of {metadata.get('optimizer')}, and this is {kind}")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointError(f"{path} is damaged: its groups are {str(groups)[:60]}")
        if len(groups) != len(self.param_groups):
            raise CheckpointError(
                f"{path} is of another model: it has {len(groups)} parameter groups, and there are "
                f"{len(self.param_groups)} here"
            )
        restored = []
        for group, saved in zip(self.param_groups, groups, strict=True):
            try:
                restored.append({n: _restored(n, v, group.get(n)) for n, v in saved.items() if n not in NOT_SAVED})
                _check_hyperparameters(restored[-1])
            except ConfigError as cause:
                raise CheckpointError(f"{path} is damaged: {cause}") from cause
        return restored

    def _check_forms(self, checkpoint: StateSource) -> None:
        """Verify that parameters lie in memory in the order in which their state was saved."""
        names = [parameter.name for parameter in self.engine.plan.layout.parameters]
        for name, (shape, stride) in zip(names, self._forms, strict=True):
            known = checkpoint.shape_of(name) if name in checkpoint.names else None
            if known is not None and known != (tuple(shape), tuple(stride)):
                raise CheckpointError(
                    f"{checkpoint.path} is of another model: {name} has shape {known[0]} and strides {known[1]} "
                    f"there and {tuple(shape)} and {tuple(stride)} here"
                )

    def _check_saved_groups(self, state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if not isinstance(state_dict.get("state"), Mapping) or not isinstance(state_dict.get("param_groups"), list):
            raise ConfigError(
                "state_dict", sorted(state_dict), 'it needs a mapping "state" and a list "param_groups"'
            )
        groups: list[Mapping[str, Any]] = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group.get("params", ())) for group in groups]
        if sizes != saved_sizes:
            raise ConfigError("state_dict", saved_sizes, f"its groups must have {sizes} parameters")
        for group in groups:
            _check_hyperparameters(group)
            if group.get("amsgrad"):
                raise ConfigError("state_dict amsgrad", True, "the engine keeps two moments, not three")
            if group.get("decoupled_weight_decay", self.decoupled) != self.decoupled:
                kind = "Adam" if self.decoupled else "AdamW"
                raise ConfigError("state_dict", f"of {kind}", f"load it into offload.{kind}")
        return groups

    # Figures and the end

    @property
    def plan(self) -> PlanReport:
        """What lives where, how long a step should take, what bounds it, and how long the last one took."""
        return PlanReport(self.engine.plan, self.explain(), int(self.engine.metrics().get("unpinned_bytes", 0)))

    def explain(self) -> Explanation:
        """Return predicted and measured seconds of the last step, lane by lane; print it."""
        return compare(self._forecast.simulated(self.engine.plan, self.engine.rates), self.engine.metrics())

    def metrics(self) -> dict[str, float]:
        """Return the last step as a flat dict: `Engine.metrics` and what was expected of it.

        Beside each `lane/<lane>/busy_s` there is `lane/<lane>/predicted_s`; beside `step_s`, `predicted_step_s`; and
        `gradient_norm`, that of the last `clip_grad_norm_`. Predictions are those that were due before the step.
        """
        prediction = self._forecast.carried_on(self.engine.plan, self.engine.rates)
        lanes = {f"lane/{lane}/predicted_s": busy_s for lane, busy_s in prediction.busy_s.items()}
        predicted = {**lanes, "predicted_step_s": prediction.step_s}
        return {**self.engine.metrics(), **predicted, "gradient_norm": self._norm}

    def timeline(self) -> list[Interval]:
        """Return what every lane did in the last step and since: (lane, label, started_s, finished_s, nbytes)."""
        return self.engine.timeline()

    def close(self) -> None:
        """Free memory and files; the weights stay. Idempotent; also done when the optimizer is forgotten."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
            if parameter.grad_dtype not in (None, parameter.dtype):
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
        self._closed = True
        if self._unopened is not None:
            self._unopened.detach()
        if self._engine is not None:
            self._engine.close()
        elif self._device is not None:
            self._device.close()
        for held in (self._departed, self._departed_from, self._in_transit, self._kept):  # the lanes have ended
            held.clear()

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("optimizer", type(self).__name__, "copy or save optimizer.state_dict() instead")

    def __enter__(self) -> OffloadedAdam:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AdamW(OffloadedAdam):
    """AdamW with offloaded state: decoupled weight decay (Loshchilov and Hutter, ICLR 2019), as torch's.

    Args:
        params: Parameters, groups of parameters, or named parameters, as for `torch.optim.AdamW`. Weights are bf16,
            fp16 or fp32, dense, all on the CPU or all on one CUDA (or ROCm) device.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled decay.
        maximize: Maximize instead of minimize.
        amsgrad: Not supported; only False.
        offload: Where state may live; None for host memory.

    Raises:
        ConfigError: If an argument or parameter cannot be used; raised before any file is touched.
        InfeasiblePlanError: If the state does not fit into the tiers.
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        amsgrad: bool = False,
        offload: OffloadConfig | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, amsgrad=amsgrad, offload=offload)


class Adam(OffloadedAdam):
    """Adam with offloaded state (Kingma and Ba, ICLR 2015); weight decay is an L2 term of the gradient, as torch's.

    Arguments and errors are those of `AdamW`; `weight_decay` is 0 by default.
    """

    decoupled = False


def _cannot_leave(world: int) -> ConfigError:
    return ConfigError("keep_grads", False, f"use true: {world} processes reduce gradients after they have arrived")


def _is_plain(value: object, depth: int = HYPERPARAMETER_DEPTH) -> bool:
    """Return whether JSON (with a mark for tensors of one element) keeps a value."""
    if isinstance(value, tuple | list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, torch.Tensor | np.ndarray | np.number):
        return not math.isnan(_number(value))
    return value is None or isinstance(value, bool | int | float | str | np.bool_)


def _plain(value: Any) -> Any:
    """Return a value of which `_is_plain` is true as JSON takes it."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def _restored(name: str, saved: Any, now: Any) -> Any:
    """Return a saved hyperparameter in the kind that the group has it in.

    Raises:
        ConfigError: It is nothing that was saved by `_saved_groups`.
    """
    value = saved["tensor"] if isinstance(saved, dict) and saved.keys() == {"tensor"} else saved
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "params" or not _is_plain(value) or (value is not saved and not is_number):
        raise ConfigError(name, saved, "no checkpoint has such a hyperparameter")
    if not isinstance(now, torch.Tensor):
        return tuple(value) if isinstance(now, tuple) and isinstance(value, list) else value
    if not is_number or now.numel() != 1:
        raise ConfigError(name, saved, f"it is a tensor of shape {tuple(now.shape)} here")
    try:
        return torch.full_like(now, value, requires_grad=False)
    except (RuntimeError, OverflowError) as cause:
        raise ConfigError(name, saved, str(cause)) from cause


def _on_arrival(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    register: Any = parameter.register_post_accumulate_grad_hook
    return register(hook)


class _ArrivalHook:
    """Runs when autograd has accumulated a gradient; does not keep the optimizer alive."""

    def __init__(self, owner: weakref.ref[OffloadedAdam], position: int) -> None:
        self._owner = owner
        self._position = position

    def __call__(self, parameter: torch.Tensor) -> None:
        optimizer = self._owner()
        if optimizer is not None:
            builds_graph = torch.is_grad_enabled()
            with torch.no_grad():
                optimizer._arrived(parameter, self._position, builds_graph=builds_graph)


def _world() -> tuple[int, int]:
    """Return (world size, rank); (1, 0) without torch.distributed."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    return 1, 0


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _lies_as(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient's memory holds its elements, in the order of the parameter's."""
    return gradient.stride() == parameter.stride() and not gradient.is_neg()


def _check_parameter(parameter: torch.Tensor, name: str, place: torch.device | None = None) -> None:
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor import DTensor

        if isinstance(parameter, DTensor):
            raise ConfigError(name, "DTensor", "use plain tensors; sharded parameters are not supported yet")
    if parameter.is_inference():
        allowed = "make it outside torch.inference_mode(), or clone it there: it has no version counter"
        raise ConfigError(name, "an inference tensor", allowed)
    if parameter.layout != torch.strided:
        raise ConfigError(name, parameter.layout, "use dense parameters")
    if parameter.dtype not in DTYPE_CODES:
        raise ConfigError(name, parameter.dtype, "use bfloat16, float16 or float32 weights")
    if parameter.device.type not in ("cpu", "cuda"):
        raise ConfigError(name, parameter.device, "keep weights on the CPU or on a CUDA (or ROCm) device")
    if place is not None and parameter.device != place:
        raise ConfigError(name, parameter.device, f"have all weights on {place}, or make a new optimizer")
    if parameter.is_neg():
        raise ConfigError(name, "a negated view", "use a weight of its own (weight.resolve_neg())")
    if parameter.numel() and not _is_dense(parameter):
        raise ConfigError(name, f"strides {parameter.stride()}", "use a contiguous weight (weight.contiguous())")


def _check_gradient(gradient: torch.Tensor, parameter: torch.Tensor, name: Callable[[torch.Tensor], str]) -> None:
    if gradient.layout != torch.strided:
        allowed = "use dense gradients (for an embedding, sparse=False)"
        raise ConfigError(f"gradient of {name(parameter)}", gradient.layout, allowed)
    if gradient.dtype not in DTYPE_CODES or gradient.device != parameter.device:
        found = f"{gradient.dtype} on {gradient.device}"
        raise ConfigError(f"gradient of {name(parameter)}", found, "use a floating dtype on the weight's device")
    if gradient.shape != parameter.shape:
        raise ConfigError(f"gradient of {name(parameter)}", tuple(gradient.shape), f"use {tuple(parameter.shape)}")


def _checked_state(
    what: str, entry: Mapping[str, Any], parameter: torch.Tensor
) -> tuple[dict[str, torch.Tensor], int]:
    """Return one parameter's state tensors, flat and in the order of its memory, and its step count."""
    step = _checked_step(what, entry.get("step") if isinstance(entry, Mapping) else None)
    return {
        name: _checked_tensor(f"{what}.{name}", entry.get(name), parameter)
        for name in STATE_NAMES
        if name != "master" or entry.get(name) is not None
    }, step


def _checked_step(what: str, value: object) -> int:
    step = _number(value)
    if not (math.isfinite(step) and step >= 0 and step == int(step)):
        raise ConfigError(f"{what}.step", step, "give the number of updates that the parameter has had")
    return int(step)


def _checked_tensor(what: str, tensor: object, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape:
        found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(what, found, f"it must be a tensor of {tuple(parameter.shape)}")
    copy = torch.empty_strided(parameter.size(), parameter.stride(), dtype=torch.float32, device="cpu")
    return copy.copy_(tensor.detach()).as_strided((parameter.numel(),), (1,))


def _number(value: Any) -> float:
    """Return a number, or a tensor or an array of one, as a float; NaN for anything else."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.item() if math.prod(value.shape) == 1 else None
    try:
        return float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _check_hyperparameters(group: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= _number(group.get(name)) < math.inf:
            raise ConfigError(name, group.get(name), "give a finite number >= 0")
    betas = group.get("betas")
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(0 <= _number(beta) < 1 for beta in betas or ()):
        raise ConfigError("betas", betas, "give two numbers from 0 (included) to 1 (not included)")
    if not isinstance(group.get("maximize", False), bool | int | np.bool_):
        raise ConfigError("maximize", group["maximize"], "use true or false")
