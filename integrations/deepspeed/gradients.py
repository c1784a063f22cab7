"""Where a shard's gradients lie between their reduction and the step, and who waits for them.

Memory for them is the engine's, so its plan counts it. `SlotGradients`: in its gradient slots in host memory, where
they are summed; gradients that come from a GPU are copied there. `ArrivingGradients`: each is given to the engine,
which adds it: with weights on a GPU in host memory for what the CPU updates, and on the GPU for the rest; with
`gradient_memory` in a few buffers, and on the paths.

Invariants:
  * what is handed out is complete: all copies and sums that it depends on have ended;
  * DeepSpeed uses the memory of a reduced gradient again once it has been taken, on the stream that was current then.
    So the engine of weights on a GPU is given a copy, made on that stream, to be read whenever that suits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch

from offload import DtypeCode, Engine
from offload.integrations.deepspeed.pieces import Piece

COPIED_BYTES = 1 << 30
"""A gradient on a GPU that is larger is read where it lies, and backward waits for that: a copy of it may not fit."""

IN_TRANSIT_BYTES = 256 << 20
"""Pinned memory for gradients on their way to slots: beyond it the oldest is waited for. One alone may be larger."""


class SlotGradients:
    """In the engine's gradient slots: gradients of weights in host memory.

    Args:
        pieces: All of them.
        engine: The shard's.
        place: Where the weights are.
        dtypes: In which gradients are summed, for each flat tensor of weights.
    """

    adds_in_slots: ClassVar[bool] = True
    """Whether somebody who has gradients in host memory may add them in the engine's."""

    def __init__(
        self, pieces: Sequence[Piece], engine: Engine, place: torch.device, dtypes: Sequence[torch.dtype]
    ) -> None:
        self._pieces = pieces
        self._engine = engine
        self._place = place
        self._dtypes = dtypes
        self._transfers = Transfers()
        self._lent: dict[int, torch.Tensor] = {}
        """Gradients outside of slots that somebody may have written to, and padding behind them: these count."""

    @property
    def kept(self) -> list[torch.Tensor]:
        """Memory that updates read gradients from, and that is not the engine's."""
        return [*self._lent.values()]

    def begin(self, kept: int | None) -> None:
        """A new window begins: forget all gradients but that of the piece `kept`, which was lent before."""
        self._lent = {number: gradient for number, gradient in self._lent.items() if number == kept}

    def take(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """Take in a reduced gradient of a piece, flat: the first of its window, or one to be added.

        Args:
            number: Which piece.
            gradient: On any device.
            first: Whether it replaces what is there.
            final: Whether no more is expected, so that its norm can be gathered while it is in cache.
        """
        if first:
            self._lent.pop(number, None)
        if number in self._lent:
            lent = self._lent[number]
            lent[: gradient.numel()].add_(gradient.to(lent.device, lent.dtype))
            self.touch(number)
        else:
            self._give(number, gradient, first=first, final=final)

    def _give(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """Bring a gradient to the engine's memory; see `take`."""
        self._engine.gradients.take_memory()
        slot, far = self._engine.gradients.slot(number)[: gradient.numel()], gradient.device.type != "cpu"
        if far:
            if not first:  # a sum on the CPU would be slow
                self._transfers.wait()  # what is there may have come on another stream
                gradient = slot.to(gradient.device, copy=True).add_(gradient.to(slot.dtype))
            self._transfers.start(slot, gradient)
        elif first:
            slot.copy_(gradient)
        else:
            slot.add_(gradient.to(slot.dtype))
        self.touch(number, gathered=final and not far)  # a norm is gathered from what has arrived

    def touch(self, number: int, *, gathered: bool = False) -> None:
        """Note that a piece's gradient lies here, and may have been changed; gather its norm if it lies in a slot."""
        gradients, lent = self._engine.gradients, self._lent.get(number)
        found = gradients.slot(number) if lent is None else lent
        take_in = gradients.arrived if gathered and lent is None else gradients.bind
        take_in(number, found.data_ptr(), DtypeCode.of(found.dtype))

    def _found(self, number: int, *, arrived: bool) -> torch.Tensor | None:
        """Return a gradient that is not lent, complete; None or zeros if there is none."""
        self.settle()
        slot = self._engine.gradients.slot(number)
        if not arrived and slot.view(torch.uint8).any():  # memory that was given back is zeros, and stays away
            slot.zero_()  # it was that of an earlier window
        return slot

    def read(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """Return a piece's gradient, complete, wherever it is; zeros beyond the piece, and where there is none."""
        piece = self._pieces[number]
        found = self._lent[number] if number in self._lent else self._found(number, arrived=arrived)
        wanted = piece.numel if numel is None else numel
        if found is None or found.numel() < wanted:
            whole = torch.zeros(wanted, dtype=self._dtypes[piece.flat], device=self._place)
            if found is not None:
                whole[: found.numel()] = found
            found = whole
        return found[:wanted]

    def lend(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """Return a piece's gradient, zeros if none has `arrived`, to someone who writes to it and then touches it."""
        if not arrived:
            self._lent.pop(number, None)
        own = self._pieces[number].numel
        wanted = own if numel is None else numel
        if number not in self._lent and wanted <= own and self.adds_in_slots:
            self._engine.gradients.take_memory()
            return self.read(number, wanted, arrived=arrived)
        if number not in self._lent or self._lent[number].numel() < wanted:
            self._lent[number] = self.read(number, max(own, wanted), arrived=arrived).to(self._place)
        return self._lent[number][:wanted]

    def settle(self) -> None:
        """Wait for all copies to host memory."""
        self._transfers.wait()

    def end(self) -> None:
        """The window has ended, with a step or without."""


class ArrivingGradients(SlotGradients):
    """Where the engine has them, which adds those of several passes: of weights on a GPU, or with `gradient_memory`.

    Args:
        parts: Those of `SlotGradients`.
        reads_later: Whether the engine reads gradients after they have been given to it, as those on a GPU.
    """

    adds_in_slots = False

    def __init__(self, *parts: Any, reads_later: bool) -> None:
        super().__init__(*parts)
        self._reads_later = reads_later
        self._kept: dict[int, torch.Tensor] = {}
        """First gradients of pieces that the GPU updates: it reads them there, and adds to them, until the step."""

    @property
    def kept(self) -> list[torch.Tensor]:
        """See `SlotGradients.kept`."""
        return [*self._kept.values(), *self._lent.values()]

    def begin(self, kept: int | None) -> None:
        """See `SlotGradients.begin`."""
        lent = [gradient for number, gradient in self._lent.items() if number != kept]
        self._engine.gradients.forget((*self._kept.values(), *lent))
        self._kept.clear()  # not before: the engine reads them, and adds to them
        super().begin(kept)

    def _give(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        given, gradient = gradient, gradient.to(self._place, self._dtypes[self._pieces[number].flat])
        stays = first and self._engine.gradients.stays(number)
        if gradient is given and self._reads_later and (stays or gradient.nbytes <= COPIED_BYTES):
            gradient = gradient.clone()
        if stays:
            self._kept[number] = gradient
        mark = self._engine.gradients.arrived(number, gradient.data_ptr(), DtypeCode.of(gradient.dtype))
        if mark is None or stays:
            return
        if gradient is given:
            mark.wait()
        else:
            self._engine.gradients.hold(gradient, mark)

    def _found(self, number: int, *, arrived: bool) -> torch.Tensor | None:
        if not arrived or not self._engine.gradients.has_arrived(number):  # a step has used it
            return None
        self._engine.gradients.settle()
        return self._kept[number] if number in self._kept else self._engine.gradients.slot(number)

    def end(self) -> None:
        """See `SlotGradients.end`; in host memory they are dropped at once, as they may lie on paths."""
        if not self._reads_later:
            self._engine.gradients.forget()


def transit_bytes(sizes: Sequence[int]) -> int:
    """Return the most pinned memory that `Transfers` of gradients take, whose sizes in bytes are given."""
    return min(
        sum(sizes), IN_TRANSIT_BYTES + max(sizes, default=0)
    )  # the one that goes beyond is there before others go


class Transfers:
    """Copies from the accelerator that DeepSpeed runs on to host memory, which may still be under way.

    They pass through pinned memory: a copy to any other would have its caller wait.

    Invariant: whoever reads or writes host memory that a copy was started to has waited since. The stream that was
    current orders the copy with that device's own work.

    Attributes:
        under_way: The event behind each copy, the pinned memory that it is to, and where that goes; the oldest first.
    """

    def __init__(self) -> None:
        self.under_way: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        self._nbytes = 0

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy to host memory of what is far."""
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        stream = accelerator.current_stream(source.device)
        pinned = torch.empty(source.numel(), dtype=target.dtype, device="cpu", pin_memory=True)
        pinned.copy_(source, non_blocking=True)
        # It may have been allocated on another stream, and be let go before the copy ends.
        source.record_stream(stream)
        mark = accelerator.Event(blocking=True)
        mark.record(stream)
        self.under_way.append((mark, pinned, target))
        self._nbytes += pinned.nbytes
        while self._nbytes > IN_TRANSIT_BYTES and len(self.under_way) > 1:
            self._end_oldest()

    def _end_oldest(self) -> None:
        mark, pinned, target = self.under_way[0]
        mark.synchronize()
        target.copy_(pinned)
        self.under_way.popleft()  # last: what is interrupted before is done anew
        self._nbytes -= pinned.nbytes

    def wait(self) -> None:
        """Return when all copies that have been started have ended."""
        while self.under_way:
            self._end_oldest()
