"""`Engine`: one session, the owner of every lifetime, and the framework-neutral face of everything here.

A session has one engine thread, which owns machine and executor. Public methods may be called from any thread, one
at a time; they post a request to the engine thread and wait for its answer. Between requests the engine thread
finishes flushes.

Errors: a request on a session that was closed, that broke, or that belongs to another process (after a fork) raises
`SessionBrokenError`. A step that cannot be finished raises `StepAbortedError` and breaks the session.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from offload.checkpoint.manifest import Piece
from offload.checkpoint.reader import StateSource
from offload.config import OffloadConfig
from offload.dtypes import DtypeCode
from offload.engine.timeline import Interval
from offload.layout import Parameter
from offload.plan import Plan, Rates
from offload.protocols import Device, Mark
from offload.rules import ADAMW, UpdateRule
from offload.session.core import Core
from offload.session.setup import named_shortage


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
        rule: What is kept for each parameter, and how a step changes it.

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
        rule: UpdateRule = ADAMW,
    ) -> None:
        self.config = config or OffloadConfig()
        try:
            self._core = Core(self.config, gradient_slots, device, rule)
            # The engine thread holds the core and never this object, so an engine that is forgotten is closed.
            self._finalizer = weakref.finalize(self, self._core.forgotten)
            try:
                with named_shortage("the session cannot be opened"):
                    self._core.open(tuple(parameters))
            except BaseException:
                self.close()
                raise
        except BaseException:
            if device is not None:
                device.close()
            raise

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

        Keys: `step`, `step_s`, `state_bytes`, `resident_bytes`, `streamed_bytes`, `resident_share`; with a GPU
        `gpu_bytes`, `pinned_bytes` and `unpinned_bytes` (host memory that the GPU copies from and to, and what of it
        the system does not let it reach by itself); for each lane (`cpu`, `read:<path>`, `write:<path>`, and `gpu`,
        `h2d`, `d2h` with a GPU) `lane/<lane>/busy_s` and `lane/<lane>/bytes`; for each path
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
        return self._core.gradients.slot(self._core.position(parameter))

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
        return self._core.gradients.stays(self._core.position(parameter))

    def forget_gradients(self) -> None:
        """Forget all gradients that arrived on a GPU: those that arrive next are the first."""
        self._core.forget_gradients()

    def bind_gradient(self, parameter: int | str, address: int, dtype: DtypeCode, *, gathered: bool = False) -> None:
        """Say where a parameter's gradient lies for the next norm and step.

        Args:
            parameter: Which one.
            address: Its first element, at any alignment.
            dtype: Its element type.
            gathered: Whether `gradient_arrived` gathered its norm. On the CPU the norm is made anew where any bit of
                the gradient has changed since; false saves looking.
        """
        self._core.gradients.bind(self._core.position(parameter), address, dtype, gathered)

    # Work

    def gradient_norm_sq(self, parameters: Iterable[int | str]) -> float:
        """Return the squared L2 norm of the bound gradients, as `offload.kernels.reference` defines it.

        It is not finite if and only if an element is not. What was gathered on arrival is used where the gradient
        still has the fingerprint that it had then (it is read for that); the rest is made anew.
        """
        return self._core.gradient_norm_sq([self._core.position(parameter) for parameter in parameters])

    def step(
        self,
        groups: Sequence[Any],
        *,
        scale: float = 1.0,
        clip: float = 1.0,
        active: Iterable[int | str] | None = None,
    ) -> None:
        """Update state and weights of all active parameters from their bound gradients.

        Args:
            groups: Hyperparameters, by group index: what the rule's `values` makes of one of torch's groups (Adam's
                are `offload.GroupScalars`).
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
        """Return the rule's tensors of each parameter (Adam: master, exp_avg, exp_avg_sq), new, flat and fp32."""
        return self._core.read_state([self._core.position(parameter) for parameter in parameters])

    def visit_state(self, take: Callable[[int, int, Mapping[str, torch.Tensor]], None]) -> None:
        """Hand out all state once, run by run in the engine's order, where it lies in memory: nothing is copied.

        Args:
            take: Called with a parameter's position, the first element of the run, and flat fp32 views of its
                state that must not be written to or kept. It runs on a thread of the engine's and
                must not call the engine.

        Raises:
            Exception: What `take` raised first; it is not called again, and the state is unharmed.
        """
        self._core.visit_state(take)

    def write_state(
        self, values: Mapping[int | str, Mapping[str, torch.Tensor]], steps: Mapping[int | str, int] | None = None
    ) -> None:
        """Replace state: any tensor that `read_state` returns (flat fp32), and step counts.

        Where the weight is fp32 it *is* the master, and a master that is given is written to it. A tensor that is
        not given keeps its value.
        """
        core = self._core
        core.write_state(
            {core.position(parameter): tensors for parameter, tensors in values.items()},
            {core.position(parameter): step for parameter, step in (steps or {}).items()},
        )

    def reset_state(self, parameters: Iterable[int | str]) -> None:
        """Make moments and step counts 0; masters and weights stay."""
        self._core.reset_state([self._core.position(parameter) for parameter in parameters])

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
            CheckpointError: The folder cannot be used, there is no room for a checkpoint, or a tier has failed, whose
                error is the cause; training may go on.
            SessionBrokenError: The session cannot be used, or broke while state was made ready to be saved.
        """
        self._core.save(
            path, metadata or {}, extra, pieces, copy, on_done, id or uuid.uuid4().hex, rank, ranks, replica
        )

    def release(self, path: str | os.PathLike[str]) -> None:
        """Release a checkpoint that this session keeps: it is none from then on, and its slots are free.

        A kept checkpoint whose folder was deleted or moved is not released in its turn, as nobody can tell which;
        this says that it is gone.

        Args:
            path: The folder that it was saved to.

        Raises:
            CheckpointError: None in that folder is kept, or somebody is reading it.
        """
        self._core.release(path)

    def wait_checkpoint(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint that was started last has been committed.

        Raises:
            CheckpointError: It was not; a tier's error that it failed with is the cause. Training may go on.
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

        The session's files are deleted, but for those that kept checkpoints refer to. Other ranks have half a minute
        to do their part of a checkpoint, and seconds if an exception is on its way. After the session has failed, or
        when another call was interrupted, this returns within seconds: what hangs is left, which is logged, and put
        away when the device answers.
        """
        self._core.close()
        self._finalizer.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
