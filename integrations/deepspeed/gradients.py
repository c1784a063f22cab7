"""Where a shard's gradients lie between their reduction and the step, and who waits for them.

`HostGradients`: in flat buffers in host memory, which DeepSpeed or a stage makes; gradients that come from a GPU are
copied there. `EngineGradients`: where the engine wants them: with weights on a GPU in host memory for what the CPU
updates, and on the GPU for the rest; with `gradient_memory` in a few buffers, and on the paths.

Invariants:
  * what is handed out is complete: all copies and sums that it depends on have ended;
  * DeepSpeed uses the memory of a reduced gradient again once it has been taken, on the stream that was current then.
    So the engine of weights on a GPU is given a copy, made on that stream, to be read whenever that suits.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from offload import DtypeCode, Engine
from offload.integrations.deepspeed.pieces import Piece

COPIED_BYTES = 1 << 30
"""A gradient on a GPU that is larger is read where it lies, and backward waits for that: a copy of it may not fit."""


class HostGradients:
    """In flat buffers on the CPU.

    Args:
        pieces: All of them.
        engine: Is told of gradients.

    Attributes:
        buffers: One for each flat tensor of weights; set by whoever made the shard.
    """

    def __init__(self, pieces: Sequence[Piece], engine: Engine) -> None:
        self.transfers = Transfers()
        self.buffers: list[torch.Tensor] = []
        self._pieces = pieces
        self._engine = engine

    @property
    def kept(self) -> list[torch.Tensor]:
        """Memory that updates read gradients from, and that is not the engine's."""
        return self.buffers

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Return whether gradients that lie with a tensor have to be copied."""
        return bool(self.transfers.is_far(tensor))

    def _slot(self, number: int, numel: int | None = None) -> torch.Tensor:
        """Return where a piece's gradient lies, to which copies may still be under way."""
        piece = self._pieces[number]
        slot: torch.Tensor = self.buffers[piece.flat].narrow(0, piece.offset, piece.numel if numel is None else numel)
        return slot

    def begin(self, kept: int | None) -> None:
        """A new window begins: what is here is of the one before."""

    def take(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """Take in a reduced gradient of a piece, flat: the first of its window, or one to be added.

        Args:
            number: Which piece.
            gradient: On any device.
            first: Whether it replaces what is there.
            final: Whether no more is expected, so that its norm can be gathered while it is in cache.
        """
        slot, far = self._slot(number, gradient.numel()), self.is_far(gradient)
        if far:
            if not first:  # a sum on the CPU would be slow
                self.transfers.wait()  # what is there may have come on another stream
                gradient = slot.to(gradient.device, copy=True).add_(gradient.to(slot.dtype))
            self.transfers.start(slot, gradient)
        elif first:
            slot.copy_(gradient)
        else:
            slot.add_(gradient.to(slot.dtype))
        self.touch(number, gathered=final and not far)  # a norm is gathered from what has arrived

    def touch(self, number: int, *, gathered: bool = False) -> None:
        """Note that a piece's gradient lies here, and may have been changed."""
        slot = self._slot(number)
        if gathered:
            self._engine.gradients.arrived(number, slot.data_ptr(), DtypeCode.of(slot.dtype))
        else:
            self._engine.gradients.bind(number, slot.data_ptr(), DtypeCode.of(slot.dtype))

    def read(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """Return a piece's gradient, complete."""
        self.settle()
        return self._slot(number, numel)

    def lend(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """Return a piece's gradient, zeros if none has `arrived`, to someone who writes to it and then touches it."""
        slot = self.read(number, numel, arrived=arrived)
        return slot if arrived else slot.zero_()  # it was that of an earlier step

    def settle(self) -> None:
        """Wait for all copies."""
        self.transfers.wait()

    def end(self) -> None:
        """The window has ended, with a step or without."""


class EngineGradients:
    """Where the engine has them.

    Args:
        pieces: All of them.
        engine: Of weights on a GPU, or with `gradient_memory`.
        place: Where the weights are.
        dtypes: In which gradients are summed, for each flat tensor of weights.
        reads_later: Whether the engine reads gradients after they have been given to it, as those on a GPU.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        engine: Engine,
        place: torch.device,
        dtypes: Sequence[torch.dtype],
        *,
        reads_later: bool,
    ) -> None:
        self._pieces = pieces
        self._engine = engine
        self._place = place
        self._reads_later = reads_later
        self._dtypes = dtypes
        self._kept: dict[int, torch.Tensor] = {}
        """First gradients of pieces that the GPU updates: it reads them there, and adds to them, until the step."""
        self._lent: dict[int, torch.Tensor] = {}
        """Gradients on the GPU that somebody may have written to, and padding behind them."""

    @property
    def kept(self) -> list[torch.Tensor]:
        """See `HostGradients.kept`."""
        return [*self._kept.values(), *self._lent.values()]

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Return True: no gradient is added to where the engine has it."""
        return True

    def begin(self, kept: int | None) -> None:
        """A new window begins: forget all gradients but that of the piece `kept`, which was lent before."""
        lent = [gradient for number, gradient in self._lent.items() if number != kept]
        self._engine.gradients.forget((*self._kept.values(), *lent))
        self._kept.clear()  # not before: the engine reads them, and adds to them
        self._lent = {number: gradient for number, gradient in self._lent.items() if number == kept}

    def take(self, number: int, gradient: torch.Tensor, *, first: bool, final: bool) -> None:
        """See `HostGradients.take`."""
        given, gradient = gradient, gradient.to(self._dtypes[self._pieces[number].flat])
        if first:
            self._lent.pop(number, None)
        elif number in self._lent:
            self._lent[number][: gradient.numel()].add_(gradient)
            self.touch(number)
            return
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

    def touch(self, number: int, *, gathered: bool = False) -> None:
        """See `HostGradients.touch`: it is what was lent that counts from now on."""
        lent = self._lent[number]
        self._engine.gradients.bind(number, lent.data_ptr(), DtypeCode.of(lent.dtype))

    def read(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """See `HostGradients.read`; on the GPU or in host memory, wherever it is."""
        piece = self._pieces[number]
        found = self._lent.get(number)
        if found is None and arrived and self._engine.gradients.has_arrived(number):  # else a step has used it
            self._engine.gradients.settle()
            found = self._kept[number] if number in self._kept else self._engine.gradients.slot(number)
        wanted = piece.numel if numel is None else numel
        if found is None or found.numel() < wanted:
            whole = torch.zeros(wanted, dtype=self._dtypes[piece.flat], device=self._place)
            if found is not None:
                whole[: found.numel()] = found
            found = whole
        return found[:wanted]

    def lend(self, number: int, numel: int | None, *, arrived: bool) -> torch.Tensor:
        """See `HostGradients.lend`."""
        if not arrived:
            self._lent.pop(number, None)
        own = self._pieces[number].numel
        wanted = own if numel is None else numel
        found = self.read(number, max(own, wanted), arrived=arrived)
        if number not in self._lent or self._lent[number].numel() < wanted:
            self._lent[number] = found.to(self._place)
        return self._lent[number][:wanted]

    def settle(self) -> None:
        """Nothing: lanes of the GPU are ordered among themselves."""

    def end(self) -> None:
        """See `HostGradients.end`; in host memory they are dropped at once, as they may lie on paths."""
        if not self._reads_later:
            self._engine.gradients.forget()


class Transfers:
    """Copies between the host and the accelerator that DeepSpeed runs on, which may still be under way.

    Invariant: whoever reads or writes host memory that a copy was started from or to has waited since. The stream
    that was current orders the copy with that device's own work.
    """

    def __init__(self) -> None:
        self._marks: dict[Any, Any] = {}  # an event behind the newest copy of each stream

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is where the host cannot read it."""
        return tensor.device.type != "cpu"

    def buffer(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros on the host, as many as a tensor has elements, for copies between the two.

        Args:
            like: The tensor.
            dtype: Of the zeros; by default that of the tensor.
        """
        return torch.zeros(like.numel(), dtype=dtype or like.dtype, device="cpu", pin_memory=self.is_far(like))

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy. One of the two is on the host, the other is far."""
        far = source if self.is_far(source) else target
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        stream = accelerator.current_stream(far.device)
        target.copy_(source, non_blocking=True)
        far.record_stream(stream)  # it may have been allocated on another stream, and be let go before the copy ends
        mark = self._marks.get(stream)
        if mark is None:
            mark = self._marks[stream] = accelerator.Event(blocking=True)
        mark.record(stream)

    def wait(self) -> None:
        """Return when all copies that have been started have ended."""
        for mark in self._marks.values():
            mark.synchronize()
        self._marks.clear()
