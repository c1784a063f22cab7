"""A shard's gradients between their reduction and the step: where they lie, and when callers wait for them.

Their memory is the engine's, so its plan counts it. `SlotGradients` lie in the engine's gradient slots in host
memory, where they are summed; gradients from a GPU are copied there. `ArrivingGradients` are each given to the
engine, which adds them: with weights on a GPU in host memory for what the CPU updates, and on the GPU for the rest;
with `gradient_memory` in a few buffers, and on the paths.

Invariants:
  * a gradient that is returned is complete: all copies and sums that it depends on have ended;
  * DeepSpeed reuses the memory of a reduced gradient once `accept` has returned, on the stream that was current then.
    So the engine of weights on a GPU is given a copy, made on that stream, which it may read later.
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
    """Gradients of weights in host memory, which lie in the engine's gradient slots.

    Args:
        pieces: All pieces of the shard.
        place: The device of the weights.
        dtypes: The dtype in which gradients are summed, for each flat tensor of weights.
    """

    adds_in_slots: ClassVar[bool] = True
    """Whether others may add gradients in host memory to the engine's slots: not if the engine adds them itself."""

    def __init__(
        self, pieces: Sequence[Piece], engine: Engine, place: torch.device, dtypes: Sequence[torch.dtype]
    ) -> None:
        self._pieces = pieces
        self._engine = engine
        self._place = place
        self._dtypes = dtypes
        self._transfers = Transfers()
        self._lent_gradients: dict[int, torch.Tensor] = {}
        """Gradients, with padding, that callers may have written to; they replace what is in the slots."""

    @property
    def kept(self) -> list[torch.Tensor]:
        """Memory besides the engine's that updates read gradients from."""
        return [*self._lent_gradients.values()]

    def begin(self, kept: int | None) -> None:
        """Begin a window: forget all gradients, except that of the piece `kept` if it was lent before."""
        self._lent_gradients = {
            number: gradient for number, gradient in self._lent_gradients.items() if number == kept
        }

    def accept(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """Take in a reduced gradient of a piece, flat: the first of its window, or one to be added.

        Args:
            number: The piece.
            gradient: On any device.
            first: Whether it replaces the gradient of the window before.
            final: Whether no more is expected, so that its norm can be computed while it is in cache.
        """
        if first:
            self._lent_gradients.pop(number, None)
        if number in self._lent_gradients:
            lent = self._lent_gradients[number]
            lent[: gradient.numel()].add_(gradient.to(lent.device, lent.dtype))
            self.note_changed(number)
        else:
            self._hand_over(number, gradient, first=first, final=final)

    def _hand_over(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """Copy a gradient to the engine's memory, or add it there; see `accept`."""
        self._engine.gradients.take_memory()
        slot = self._engine.gradients.slot(number)[: gradient.numel()]
        is_on_accelerator = gradient.device.type != "cpu"
        if is_on_accelerator:
            if not first:  # add there, as a sum on the CPU would be slow
                self._transfers.wait()  # the slot's copy may be under way on another stream
                gradient = slot.to(gradient.device, copy=True).add_(gradient.to(slot.dtype))
            self._transfers.start(slot, gradient)
        elif first:
            slot.copy_(gradient)
        else:
            slot.add_(gradient.to(slot.dtype))
        self.note_changed(number, gathered=final and not is_on_accelerator)  # no norm of what is still being copied

    def note_changed(self, number: int, *, gathered: bool = False) -> None:
        """Tell the engine where a piece's gradient lies, and that it has changed; if `gathered`, take its norm."""
        gradients = self._engine.gradients
        lent = self._lent_gradients.get(number)
        gradient = gradients.slot(number) if lent is None else lent
        announce = gradients.arrived if gathered and lent is None else gradients.bind
        announce(number, gradient.data_ptr(), DtypeCode.of(gradient.dtype))

    def _read_unless_lent(self, number: int, *, arrived: bool) -> torch.Tensor | None:
        """Return a gradient that is not lent, complete; zeros (in the subclass None) if there is none."""
        self.settle()
        slot = self._engine.gradients.slot(number)
        # A slot whose memory was given back reads as zeros; writing to it would take the memory again.
        if not arrived and slot.view(torch.uint8).any():
            slot.zero_()  # it has a gradient of an earlier window
        return slot

    def read(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """Return a piece's gradient, complete, wherever it lies; zeros beyond the piece, and if it has none."""
        piece = self._pieces[number]
        lent = self._lent_gradients.get(number)
        gradient = self._read_unless_lent(number, arrived=arrived) if lent is None else lent
        wanted = piece.numel if numel is None else numel
        if gradient is None or gradient.numel() < wanted:
            whole = torch.zeros(wanted, dtype=self._dtypes[piece.flat], device=self._place)
            if gradient is not None:
                whole[: gradient.numel()] = gradient
            gradient = whole
        return gradient[:wanted]

    def lend(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """Return a piece's gradient, for a caller who writes there and then calls `note_changed`.

        It is the engine's slot, if others may add there. Else, or for more elements than the slot has, it is a tensor
        that replaces the slot's gradient until the next window.

        Args:
            number: The piece.
            numel: How many elements, those beyond the piece being padding; None for the piece's own.
            arrived: Whether the piece has a gradient of this window; if not, zeros are lent.
        """
        if not arrived:
            self._lent_gradients.pop(number, None)  # of an earlier window
        piece_numel = self._pieces[number].numel
        wanted = piece_numel if numel is None else numel
        lent = self._lent_gradients.get(number)
        if lent is None and self.adds_in_slots and wanted <= piece_numel:
            self._engine.gradients.take_memory()  # which parking may have given back
            return self.read(number, wanted, arrived=arrived)
        if lent is None or lent.numel() < wanted:
            lent = self.read(number, max(piece_numel, wanted), arrived=arrived).to(self._place)
            self._lent_gradients[number] = lent
        return lent[:wanted]

    def settle(self) -> None:
        """Wait for all copies to host memory."""
        self._transfers.wait()

    def end(self) -> None:
        """Note that the window has ended, with a step or without."""


class ArrivingGradients(SlotGradients):
    """Gradients that the engine keeps and adds itself: of weights on a GPU, or with `gradient_memory`.

    Args:
        parts: The arguments of `SlotGradients`.
        reads_later: Whether the engine may read a gradient after the call that gives it, as with weights on a GPU.
    """

    adds_in_slots = False

    def __init__(self, *parts: Any, reads_later: bool) -> None:
        super().__init__(*parts)
        self._reads_later = reads_later
        self._first_gradients: dict[int, torch.Tensor] = {}
        """By piece that the GPU updates, its first gradient: the engine adds to it, and reads it in the step."""

    @property
    def kept(self) -> list[torch.Tensor]:
        """Memory besides the engine's that updates read gradients from."""
        return [*self._first_gradients.values(), *self._lent_gradients.values()]

    def begin(self, kept: int | None) -> None:
        """Begin a window; see `SlotGradients.begin`. The engine forgets gradients that it has not read."""
        lent = [gradient for number, gradient in self._lent_gradients.items() if number != kept]
        self._engine.gradients.forget((*self._first_gradients.values(), *lent))
        self._first_gradients.clear()  # not before the engine has let go of them
        super().begin(kept)

    def _hand_over(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """Give a gradient to the engine: a copy if DeepSpeed will reuse its memory; else wait until it is read."""
        own = gradient.to(self._place, self._dtypes[self._pieces[number].flat])  # the same one if nothing differs
        stays = first and self._engine.gradients.stays(number)
        if own is gradient and self._reads_later and (stays or own.nbytes <= COPIED_BYTES):
            own = own.clone()
        if stays:
            self._first_gradients[number] = own
        mark = self._engine.gradients.arrived(number, own.data_ptr(), DtypeCode.of(own.dtype))
        if mark is None or stays:
            return
        if own is gradient:
            mark.wait()
        else:
            self._engine.gradients.hold(own, mark)

    def _read_unless_lent(self, number: int, *, arrived: bool) -> torch.Tensor | None:
        """Return a gradient that the engine has; None if there is none."""
        if not arrived or not self._engine.gradients.has_arrived(number):  # a step has used it
            return None
        self._engine.gradients.settle()
        first = self._first_gradients.get(number)
        return self._engine.gradients.slot(number) if first is None else first

    def end(self) -> None:
        """Note that the window has ended; with `gradient_memory`, drop gradients now, as they may be on paths."""
        if not self._reads_later:
            self._engine.gradients.forget()


def transit_bytes(sizes: Sequence[int]) -> int:
    """Return the most pinned memory that `Transfers` take for gradients of these sizes in bytes."""
    return min(sum(sizes), IN_TRANSIT_BYTES + max(sizes, default=0))  # a copy over the limit starts before others end


class Transfers:
    """Copies to host memory, by way of pinned memory, from the accelerator that DeepSpeed runs on.

    They go on in the background; a copy to memory that is not pinned would make its caller wait.

    Invariant: `wait` is called before host memory that a copy was started to is read or written. The stream that was
    current orders the copy with that device's own work.

    Attributes:
        under_way: Of each copy the event after it, its pinned memory, and the target of that; the oldest first.
    """

    def __init__(self) -> None:
        self.under_way: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        self._nbytes = 0  # pinned memory under way

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy of a tensor on the accelerator to host memory."""
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        stream = accelerator.current_stream(source.device)
        pinned = torch.empty(source.numel(), dtype=target.dtype, device="cpu", pin_memory=True)
        pinned.copy_(source, non_blocking=True)
        # The source may have been allocated on another stream, and be freed before the copy ends.
        source.record_stream(stream)
        mark = accelerator.Event(blocking=True)
        mark.record(stream)
        self.under_way.append((mark, pinned, target))
        self._nbytes += pinned.nbytes
        while self._nbytes > IN_TRANSIT_BYTES and len(self.under_way) > 1:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Wait for the oldest copy to pinned memory, and copy it to its target."""
        mark, pinned, target = self.under_way[0]
        mark.synchronize()
        target.copy_(pinned)
        self.under_way.popleft()  # last: after an interrupt this is repeated
        self._nbytes -= pinned.nbytes

    def wait(self) -> None:
        """Wait until all copies that were started have ended."""
        while self.under_way:
            self._end_oldest()
