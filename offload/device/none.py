"""For sessions without a device: weights, gradients and state lie in host memory, and all work is done at once.

`NoDevice` is used instead of a `Device`, `Lanes` instead of `GpuLanes`. A session chooses once, when it is made.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from offload.device.memory import BlockPlace, DeviceMemory
from offload.device.pieces import Pieces
from offload.errors import InternalError
from offload.layout import Layout
from offload.memory.arenas import Arena
from offload.plan import NO_GPU, Budgets, GpuRates, Rates
from offload.plan.budget import NO_OFFER, Offer
from offload.protocols import Device, DeviceLane, Mark


def nothing(*work: Any, **options: Any) -> None:
    """Do nothing; stands for a method that has something to do with a device only, such as ordering its lanes."""


def never(*of: Any) -> bool:
    """Return False; stands for a method that asks what only a device can have, such as something to wait for."""
    return False


def no_bytes(*of: Any) -> int:
    """Return 0; stands for methods that ask for sizes of a device's memory."""
    return 0


def _refuse(*work: Any, **options: Any) -> Any:
    """Raise InternalError; stands for methods that put work on a device, and are never called without one."""
    raise InternalError("there is work for a device, and there is none (this is a bug in offload, please report it)")


class NoDevice:
    """A `Device` without memory and lanes: no work is ever put on it. It is its own reached `Mark`."""

    name = "none"
    reserve_bytes = 0
    node: int | None = None

    prepare_thread = prepare = release = return_borrowed = record_use = pin = unpin = follow = wait = close = nothing
    allocate = caller = copy = copy_pieces = update = gradient_blocks = sum_gradients = report = time_s = _refuse
    fingerprint_gradients = send_table = _refuse
    free_bytes = cached_bytes = no_bytes

    def mark(self, *lane: Any, timed: bool = True) -> Mark:
        """Return this device, which is its own mark."""
        return self

    mark_caller = mark

    def reached(self) -> bool:
        """Return True: all work has been done."""
        return True


class Lanes:
    """The lanes of a session's device; `GpuLanes` are those of a GPU. Without a device nothing needs an order.

    Attributes:
        cores_beside: Cores that update threads leave free for the threads that drive the device.
        pins: Whether host memory is pinned, and so allocated all at once.
        names: The lanes in timelines and metrics.
        given_up: Whether the session is being closed: memory that is being allocated is then not touched any more.
        wakes: Whether to wake the engine thread when gradients have come to host memory during backward.
        is_hidden: Whether a step goes on beside the caller's work: copies are cut, so that the caller's get a turn.
        memory: The session's memory on the device.
        bounces: Number of host buffers that gradients of a device pass through on their way to gradient buffers.
        homes: The place of each subgroup's state at home on the device.
    """

    cores_beside: ClassVar[int] = 0
    bounces: ClassVar[int] = 0
    pins: ClassVar[bool] = False
    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, device: Device) -> None:
        self.device = device
        self.memory = DeviceMemory(device)
        self.homes: dict[int, BlockPlace] = {}
        self.given_up = False
        self.wakes = self.is_hidden = False

    allocate_for = use_plan = pin = unpin = follow_caller = order_caller = order_caller_after = nothing
    wait = await_sent = will_push = take_timed = close = nothing
    report_inputs = has_table = never
    missing_bytes = usable_bytes = no_bytes
    state_address = copy_in = enqueue_update = copy_out = fetch_weights = push = await_push = _refuse

    def copy_gradient_to_host(self, address: int, nbytes: int, bounce: int) -> int:
        """Return where a gradient lies in host memory: here `address`; with a GPU `bounce`, to which it is copied."""
        return address

    def save(self, target: int, source: int, nbytes: int) -> Mark:
        """Copy to host memory, after the caller's work; return the mark after which nothing reads the source."""
        ctypes.memmove(target, source, nbytes)
        return self.device.mark(DeviceLane.CALLER)

    restore = save
    """Copy from host memory, as `save` copies to it; later work of the calling thread is ordered after the copy."""

    def borrow_slots(self) -> int | None:
        """Borrow staging slots of the device for a step; return how many. None: slots are not borrowed."""
        return None

    def offers(self, layout: Layout, home_memory: int | str) -> Offer:
        """Return what the device offers to a session.

        Args:
            layout: All state of the session.
            home_memory: Bytes that homes on the device may use, or a word of the setting `gpu_memory`.
        """
        return NO_OFFER

    def with_staging(self, budgets: Budgets, layout: Layout) -> Budgets:
        """Return budgets whose staging slots on the device fit a larger layout, as far as memory is free."""
        return budgets

    def allocate_arena(self, nbytes: int, *, inherit: bool = False, node: int | None = None) -> Arena:
        """Return host memory for work of the device; `inherit` as for `Arena`, without effect on memory for a GPU."""
        return Arena(nbytes, inherit=inherit, node=node)

    def free_arena(self, arena: Arena) -> None:
        """Free an arena that `allocate_arena` returned; no work uses it any more."""
        arena.close()

    def discard(self, arena: Arena, offset: int, nbytes: int) -> None:
        """Discard pages of an arena that is in use; with a GPU, whose arenas are pinned, do nothing."""
        arena.discard(offset, nbytes)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the device's memory, for `Engine.metrics`."""
        return {}

    def known_rates(self, rates: Rates) -> Rates | None:
        """Return rates that were measured before, as far as these lanes need them; None if some are missing."""
        return dataclasses.replace(rates, gpu=NO_GPU)

    def measure_rates(self, measure: Callable[[Any], GpuRates]) -> GpuRates:
        """Return the rates of a GPU's lanes, by calling `measure`; here none."""
        return NO_GPU

    def in_use(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return those of a sweep's tensors that lanes may still use when the sweep has ended; here none."""
        return ()

    def image(self, transfer_slot: int | None) -> int | None:
        """Return the address of a weight slot; here None: updates write the weights themselves, in host memory."""
        return None

    def send_weights(self, subgroup: int, copies: npt.NDArray[np.uint64], due_s: float) -> None:
        """Copy new weights of a subgroup to the parameters: rows of `Tables.weight_copies`; ignore `due_s`."""
        self.copy_to_device(copies.tolist())

    def copy_to_host(self, copies: Pieces) -> None:
        """Copy weights or state to host memory, after all work that may have changed them, and wait."""
        for source, target, nbytes in copies.tolist():
            ctypes.memmove(target, source, nbytes)

    def copy_to_device(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy weights or state from host memory, after all work on them, and wait: (target, source, bytes)."""
        for target, source, nbytes in copies:
            ctypes.memmove(target, source, nbytes)


NO_LANES = Lanes(NoDevice())
