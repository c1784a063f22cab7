"""A shard's gradients between their reduction and the step: where they lie, and when callers wait for them.

Their memory is the engine's, so its plan counts it. There are two ways.

* `SlotGradients`, for weights in host memory: a gradient is summed in the engine's gradient slot, in host memory;
  gradients from a GPU are copied there.
* `ArrivingGradients`, for weights on a GPU, or with `gradient_memory`: each gradient is given to the engine, which
  adds it. With weights on a GPU the sums are in host memory for what the CPU updates, and on the GPU for the rest;
  with `gradient_memory` they are in a few buffers, and on the paths.

A *window* is the time between two steps, in which gradients arrive. A gradient is *lent* to a caller that may write
to it: of `SlotGradients` usually the slot itself, else a tensor, which then replaces what the engine has.

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
"""A larger gradient on a GPU is read where it lies, and backward waits for that: a copy of it may not fit."""

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
        """Tensors that updates read gradients from, besides the engine's memory."""
        return [*self._lent_gradients.values()]

    def begin(self, kept: int | None) -> None:
        """Begin a window: forget all gradients, except that of the piece `kept` if it was lent before."""
        self._lent_gradients = {
            number: gradient for number, gradient in self._lent_gradients.items() if number == kept
        }

    def accept(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """Accept a reduced gradient of a piece, flat: the first of its window, or one to be added.

        Args:
            number: The piece.
            gradient: On any device.
            first: Whether it replaces the gradient of the window before.
            final: Whether no more is expected, so that its norm can be computed while it is in cache.
        """
        if first:
            self._lent_gradients.pop(number, None)  # of the window before
        if number in self._lent_gradients:  # it was lent in this window, so that it is what the step reads
            lent = self._lent_gradients[number]
            lent[: gradient.numel()].add_(gradient.to(lent.device, lent.dtype))
            self.note_changed(number)
        else:
            self._hand_over(number, gradient, first=first, final=final)

    def _hand_over(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """Copy a gradient to its slot, or add it to what is there; see `accept`."""
        self._engine.gradients.take_memory()  # which parking may have given back
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
        """Tell the engine where a piece's gradient lies, and that it has changed.

        If it is `gathered`, nothing more being expected, its norm is taken now, by `arrived`; else `bind` notes where
        it lies, and the norm is taken before the step, as it is of a gradient that is lent.
        """
        gradients = self._engine.gradients
        lent = self._lent_gradients.get(number)
        gradient = gradients.slot(number) if lent is None else lent
        announce = gradients.arrived if gathered and lent is None else gradients.bind
        announce(number, gradient.data_ptr(), DtypeCode.of(gradient.dtype))

    def _read_unless_lent(self, number: int, *, arrived: bool) -> torch.Tensor | None:
        """Return a gradient that is not lent, complete; zeros (in the subclass None) if there is none.

        `arrived` is whether the piece has a gradient of this window.
        """
        self.settle()
        slot = self._engine.gradients.slot(number)
        # Without one, a gradient of an earlier window may be in the slot. It is looked at first, as writing to a slot
        # whose memory parking has given back, and which reads as zeros, would allocate the memory again.
        if not arrived and slot.view(torch.uint8).any():
            slot.zero_()
        return slot

    def read(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """Return a piece's gradient, complete, wherever it lies; zeros if there is none.

        Args:
            number: The piece.
            numel: How many elements, those beyond the piece being zeros; None for the piece's own.
            arrived: Whether the piece has a gradient of this window.
        """
        piece = self._pieces[number]
        lent = self._lent_gradients.get(number)
        gradient = self._read_unless_lent(number, arrived=arrived) if lent is None else lent
        wanted_numel = piece.numel if numel is None else numel
        if gradient is None or gradient.numel() < wanted_numel:
            padded = torch.zeros(wanted_numel, dtype=self._dtypes[piece.flat], device=self._place)
            if gradient is not None:
                padded[: gradient.numel()] = gradient
            gradient = padded
        return gradient[:wanted_numel]  # a view, of the slot usually

    def lend(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """Return a piece's gradient, for a caller who writes there and then calls `note_changed`.

        It is the engine's slot, if others may add there. Else, or for more elements than the slot has, it is a tensor
        that replaces what the engine has until the next window.

        Args:
            number: The piece.
            numel: How many elements, those beyond the piece being padding; None for the piece's own.
            arrived: Whether the piece has a gradient of this window; if not, zeros are lent.
        """
        if not arrived:
            self._lent_gradients.pop(number, None)  # of an earlier window
        piece_numel = self._pieces[number].numel
        wanted_numel = piece_numel if numel is None else numel
        lent = self._lent_gradients.get(number)
        if lent is None and self.adds_in_slots and wanted_numel <= piece_numel:
            self._engine.gradients.take_memory()  # which parking may have given back
            return self.read(number, wanted_numel, arrived=arrived)
        if lent is None or lent.numel() < wanted_numel:
            lent = self.read(number, max(piece_numel, wanted_numel), arrived=arrived).to(self._place)
            self._lent_gradients[number] = lent
        return lent[:wanted_numel]

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
        """By number of a piece that the GPU updates, its first gradient: the engine adds later ones to it, and reads
        it in the step."""

    @property
    def kept(self) -> list[torch.Tensor]:
        """Tensors that updates read gradients from, besides the engine's memory."""
        return [*self._first_gradients.values(), *self._lent_gradients.values()]

    def begin(self, kept: int | None) -> None:
        """Begin a window; see `SlotGradients.begin`. The engine forgets the gradients that it was given before."""
        lent = [gradient for number, gradient in self._lent_gradients.items() if number != kept]
        self._engine.gradients.forget((*self._first_gradients.values(), *lent))
        self._first_gradients.clear()  # not before the engine has let go of them
        super().begin(kept)

    def _hand_over(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """Give a gradient to the engine, usually a copy, as DeepSpeed reuses the gradient's memory.

        With `gradient_memory` it is given as it is, as the engine reads it at once; so is one that is too large for a
        copy, and this waits until it has been read.
        """
        own = gradient.to(self._place, self._dtypes[self._pieces[number].flat])  # the same tensor if nothing differs
        stays = first and self._engine.gradients.stays(number)  # the step reads it where it lies
        if own is gradient and self._reads_later and (stays or own.nbytes <= COPIED_BYTES):
            own = own.clone()
        if stays:
            self._first_gradients[number] = own
        mark = self._engine.gradients.arrived(number, own.data_ptr(), DtypeCode.of(own.dtype))
        if mark is None or stays:  # it has been read; or it is kept until the next window
            return
        if own is gradient:
            mark.wait()
        else:
            self._engine.gradients.hold(own, mark)  # until it has been read

    def _read_unless_lent(self, number: int, *, arrived: bool) -> torch.Tensor | None:
        """Return a gradient that is not lent, complete; None if there is none, or a step has used it."""
        if not arrived or not self._engine.gradients.has_arrived(number):
            return None
        self._engine.gradients.settle()
        first = self._first_gradients.get(number)
        return self._engine.gradients.slot(number) if first is None else first

    def end(self) -> None:
        """Note that the window has ended; with `gradient_memory` the engine forgets gradients now.

        They may be on paths, where they would keep room.
        """
        if not self._reads_later:
            self._engine.gradients.forget()


def transit_bytes(sizes: Sequence[int]) -> int:
    """Return the most pinned memory that `Transfers` take for gradients of these sizes in bytes."""
    return min(sum(sizes), IN_TRANSIT_BYTES + max(sizes, default=0))  # a copy over the limit starts before others end


class Transfers:
    """Copies in the background, from the accelerator that DeepSpeed runs on to host memory that is not pinned.

    Each goes to pinned memory first, and is copied on from there by a later `wait` or, beyond the limit, `start`: a
    direct copy would make its caller wait.

    Invariant: `wait` is called before the target of a copy is read or written. On the accelerator the stream that was
    current orders the copy with other work.

    Attributes:
        under_way: Of each copy the event after it, its pinned memory, and its target; the oldest first.
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
