"""The gradients of a session's parameters: a caller says here where they lie, and when they have arrived."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from offload.dtypes import DtypeCode
from offload.errors import SessionBrokenError
from offload.protocols import Mark
from offload.session.parts import SessionParts
from offload.session.thread import EngineThread, nothing
from offload.session.visits import SweepRequests


class Gradients:
    """Where gradients lie, when they have arrived, and their norms."""

    def __init__(self, parts: SessionParts, thread: EngineThread, sweep_requests: SweepRequests) -> None:
        self._parts = parts
        self._thread = thread
        self._sweep_requests = sweep_requests

    def begins_pass(self, parameter: int | str, is_last: bool | Callable[[], bool] | None = None) -> bool:
        """Say that a gradient is about to arrive, and of which pass; return whether to call `foresee` before it does.

        Args:
            parameter: Whose gradient it is.
            is_last: Whether its pass is the last before a step, or a function that says so, which is called only if
                updates are made in backward. Where passes that are not the last are said to be so, gradients are
                final in the last pass. Else, or if it is None, a gradient is final at its n-th arrival, n being the
                number of its arrivals before the last step.

        Returns:
            Whether updates are made in backward and a pass begins with this gradient.
        """
        speculation = self._thread.speculation
        if not speculation.is_on:
            return False
        is_last_pass = bool(is_last()) if callable(is_last) else is_last
        return speculation.announce_arrival(self._parts.position(parameter), is_last_pass)

    def foresee(self, groups: Sequence[Any], kept: Sequence[torch.Tensor], scale: float | None = None) -> None:
        """Say, as a pass begins, what the step would use now. In a pass without this call nothing is updated.

        Args:
            groups: Hyperparameters of all groups; see `Engine.step`.
            kept: Tensors with the memory of fp32 weights, and of gradients that lie in no slot, which updates read
                until the step.
            scale: What the loss is multiplied by; None for the last step's.
        """
        self._thread.speculation.foresee(groups, kept, scale)

    def announce(self, parameter: int | str) -> None:
        """Say that the caller is about to take a gradient out of `.grad`, and then calls `arrived` with it.

        With `gradient_memory`, if an interrupt comes between the two, the pass counts as incomplete; else this does
        nothing. See `PathGradients.announce`.
        """
        self._parts.gradients.announce(self._parts.position(parameter))

    def slot(self, parameter: int | str) -> torch.Tensor:
        """Return the memory for a parameter's gradient: flat, in the config's gradient dtype.

        Raises:
            ConfigError: If the engine was made without gradient slots.
        """
        return self._parts.gradients.slot(self._parts.position(parameter))

    def arrived(self, parameter: int | str, address: int, dtype: DtypeCode) -> Mark | None:
        """Say that a parameter's gradient has arrived: its norm is taken and, with slots, it is copied to its slot.

        On the CPU it is the whole gradient, with all that was accumulated. On a GPU, and with `gradient_memory`, it
        is one backward pass's, to be added to those that arrived since the last step or `forget`.

        Args:
            parameter: Which one.
            address: Where the gradient lies; if that is its slot, nothing is copied.
            dtype: Its element type; widened where the slot is float32.

        Returns:
            On a GPU, the mark after which the gradient is not read any more. Small gradients are copied to the host
            together: the mark of one that waits for more of them is reached only after `end_backward`, or the mark's
            `wait`, has them copied. The first gradient of a parameter for which `stays` is true is read, and added
            to, until the step has returned.
        """
        if self._thread.pending is not None:  # it may still read the parameter's last gradient
            self._sweep_requests.wait_for([parameter])
        self._thread.check_usable()
        self.take_memory()
        position = self._parts.position(parameter)
        mark = self._parts.gradients.arrived(position, address, dtype)
        self._thread.speculation.note_arrival(position)
        return mark

    def take_memory(self) -> None:
        """Take memory again that `Engine.park` has given back, or is about to; call it before writing to a slot."""
        self._thread.take_memory()

    def final(self, parameter: int | str, gradient: torch.Tensor) -> None:
        """Say that a parameter's gradient lies where the step will read it, unless a further pass adds to it.

        An update during backward may then use it (see `Engine.speculate`). A gradient on an accelerator is copied to
        its slot when an update is about to read it.

        Args:
            parameter: Which one.
            gradient: All that this rank has of it, contiguous; kept until the next step, if it is read before. On an
                accelerator it is complete once the caller's stream has done its present work.
        """
        # A pending step may still read the parameter's last gradient.
        self._sweep_requests.wait_for([parameter])
        self._thread.check_usable()
        position = self._parts.position(parameter)
        final_gradient = self._parts.gradients.final(position, gradient)
        if final_gradient is not None:  # else no update before the step can read it
            self._thread.speculation.note_arrival(position, final_gradient)

    def end_backward(self) -> None:
        """Say that a backward pass has ended: small gradients that wait on a GPU to be copied together are copied."""
        self._thread.check_usable()
        self._parts.gradients.send_bucket()
        self._parts.gradients.return_borrowed()  # a forward pass may follow, which needs the memory

    def drop(self) -> None:
        """Say that all gradients since the last step have been dropped: revoke updates that were made from them."""
        if self._thread.is_usable and self._thread.speculation.drop_arrivals():
            with self._thread.turn():
                self._thread.request(nothing)  # any request but a step's revokes them

    def forget(self, dropped: Iterable[torch.Tensor] = ()) -> None:
        """Forget all gradients that arrived on a GPU, or in buffers: the next one to arrive is the first again.

        Args:
            dropped: Gradients for which `stays` is true, and which the caller drops now.
        """
        if self._thread.is_usable:
            for gradient in dropped:  # before `forget`, after which an interrupt may let the caller drop them
                self._parts.lanes.device.record_use(gradient)
            self._parts.gradients.forget()  # orders the caller's stream after work that reads them
            # A request revokes updates that were made from dropped gradients. As no gradient is here now, placements
            # can be reviewed, too, at the price of a wait for the pending step. Of a session that was closed or has
            # broken meanwhile nothing has to be revoked.
            if self._thread.speculation.drop_arrivals() or self._sweep_requests.placement_review.due:
                with contextlib.suppress(SessionBrokenError), self._thread.turn():
                    self._thread.request(self._sweep_requests.placement_review.review)

    def stays(self, parameter: int | str) -> bool:
        """Return whether the GPU updates some of a parameter, so that its gradient is read where it lies."""
        return self._parts.gradients.stays(self._parts.position(parameter))

    def has_arrived(self, parameter: int | str) -> bool:
        """Return whether a parameter's gradient has arrived on a GPU, or in buffers, and has not been forgotten."""
        return self._parts.gradients.has_arrived(self._parts.position(parameter))

    def settle(self) -> None:
        """Wait until gradients that have arrived on a GPU are where the step reads them: slots, or where they lie."""
        self._thread.check_usable()
        self._parts.gradients.settle()

    def hold(self, gradient: torch.Tensor, mark: Mark, *, elsewhere: bool = False) -> None:
        """Keep a gradient on a GPU alive until it has been read, or forgotten.

        If more than a gibibyte is kept, the oldest are freed, once the caller's stream has waited for their reads.

        Args:
            gradient: Has arrived; the caller drops it, and nobody writes to it.
            mark: What `arrived` returned.
            elsewhere: Whether its memory is used again on other streams than the caller's: then the caller waits,
                instead of its stream.
        """
        self._parts.gradients.keep_until_read(gradient, mark, elsewhere=elsewhere)

    def bind(self, parameter: int | str, address: int, dtype: DtypeCode, *, gathered: bool = False) -> None:
        """Say where a parameter's gradient lies, for the next norm and step to read.

        If a step is pending, wait first until it has updated the parameter.

        Args:
            parameter: Which one.
            address: Its first element, at any alignment.
            dtype: Its element type.
            gathered: Whether `arrived` took its norm. False: the norm is taken when it is asked for. On a GPU False
                also forgets the parameter's gradients that have arrived, as this one takes their place. On the CPU
                True may be given even if the gradient has changed since: its norm is then taken anew, after a
                comparison, which False saves.
        """
        self._sweep_requests.wait_for([parameter])  # a pending step may still read the gradient that is bound now
        self._parts.gradients.bind(self._parts.position(parameter), address, dtype, gathered)

    def norm_sq(self, parameters: Iterable[int | str]) -> float:
        """Return the squared L2 norm of the bound gradients, as `offload.kernels.reference` defines it.

        The result is not finite if and only if an element is not. Norms that were taken on arrival are used where the
        gradient still has the fingerprint that it had then (it is read for that); others are taken anew.
        """
        self._thread.check_usable()
        self.take_memory()  # norms are summed in memory that `park` gives back
        return self._parts.gradients.norm_sq([self._parts.position(parameter) for parameter in parameters])

    def norms_sq(self, parameters: Iterable[int | str]) -> list[float]:
        """Return the squared L2 norm of each of the bound gradients; see `norm_sq`."""
        self._thread.check_usable()
        self.take_memory()  # norms are summed in memory that `park` gives back
        return self._parts.gradients.norms_sq([self._parts.position(parameter) for parameter in parameters])
