"""New weights of ZeRO-1 and 2 that ranks gather while a step goes on into the next forward pass.

DeepSpeed gathers all of them at the end of its step. Here that is left out, and they are gathered bucket by bucket,
in the order in which modules used them last on any rank; a module waits for the buckets that its weights lie in. A
bucket is the same range of all ranks' parts of a flat tensor, so one collective brings what each rank has updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offload import Engine
from offload.integrations.deepspeed.pieces import Piece
from offload.optim.exchange import BUCKET_BYTES, UNUSED, Bucket, Exchange, all_gather
from offload.optim.overlap import FollowedModel
from offload.optim.pace import Pace


class Place(NamedTuple):
    """A range of all ranks' parts of a flat tensor.

    Attributes:
        flat: Number of the flat tensor.
        start: First element of a part.
        stop: Element after the last.
    """

    flat: int
    start: int
    stop: int


class Gathers:
    """Has modules wait for weights that a step updates, and ranks gather, behind its callers.

    Made by all ranks together. For a `FollowedModel` it is what knows which weights are there.

    Args:
        engine: Updates this rank's parts.
        pieces: What it updates.
        parts: Of each flat tensor, the parts of all ranks.
        group: The ranks.
        pace: Is told how long callers wait.

    Attributes:
        models: The models that wait.
        has_ended: See `Overlap`.
    """

    def __init__(
        self,
        engine: Engine,
        pieces: Sequence[Piece],
        parts: Sequence[Sequence[torch.Tensor]],
        group: Any,
        pace: Pace,
    ) -> None:
        self.models: list[FollowedModel] = []
        self.has_ended = False
        self._engine = engine
        self._parts = parts
        self._pace = pace
        self._device = parts[0][0].device
        self._exchange = Exchange(group, self._device) if torch.distributed.get_world_size(group) > 1 else None
        self._places: list[Place] = []
        self._numbers: list[list[int]] = []  # of places, by flat tensor
        for flat, each in enumerate(parts):
            size = max(1, BUCKET_BYTES // (len(each) * each[0].itemsize))
            starts = range(0, each[0].numel(), size)
            self._numbers.append([*range(len(self._places), len(self._places) + len(starts))])
            self._places += [Place(flat, start, min(start + size, each[0].numel())) for start in starts]
        self._pieces_of: list[list[int]] = [[] for _ in self._places]
        for number, piece in enumerate(pieces):
            for place in self._within(piece.flat, piece.offset, piece.numel):
                self._pieces_of[place].append(number)
        self._used: dict[int, None] = {}  # places, in the order of their use since the last step
        self._places_of: dict[torch.Tensor, tuple[int, ...]] = {}
        self._agreed: list[int] = []

    def follow(self, model: torch.nn.Module) -> None:
        """Have the modules of a model wait for their weights."""
        self.models.append(FollowedModel(self, model, check=False))

    def _within(self, flat: int, start: int, numel: int) -> Iterable[int]:
        """Return the places that some elements of a rank's part lie in."""
        numbers = self._numbers[flat]
        size = self._places[numbers[0]].stop if numbers else 1
        return numbers[start // size : -(-(start + numel) // size)] if numel else ()

    def _of(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the places that a parameter lies in, whoever updates it; none for one that is not trained here."""
        found = self._places_of.get(parameter)
        if found is None:
            address, end = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
            found = ()
            for flat, each in enumerate(self._parts):
                for part in each:
                    first = max(address, part.data_ptr())
                    nbytes = min(end, part.data_ptr() + part.nbytes) - first
                    if nbytes > 0:
                        start = (first - part.data_ptr()) // part.itemsize
                        found += (*self._within(flat, start, nbytes // part.itemsize),)
            self._places_of[parameter] = found = tuple(dict.fromkeys(found))
        return found

    # While modules run

    def note_use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that a forward pass uses some weights now, and wait for them."""
        for parameter in parameters:
            self._used.update(dict.fromkeys(self._of(parameter)))
        self.wait_for_some(parameters)

    def wait_for_some(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for some weights, if there is a step that goes on."""
        self._wait_for(dict.fromkeys(place for parameter in parameters for place in self._of(parameter)))

    def _wait_for(self, places: Iterable[int]) -> None:
        if self._exchange is not None:
            if self._exchange.is_under_way:
                with self._pace.timed_wait():
                    self._exchange.wait_for(places)
        elif self._engine.is_pending or self._device.type != "cpu":
            with self._pace.timed_wait():
                numbers = (number for place in places for number in self._pieces_of[place])
                self._engine.wait_for(numbers, on_any_stream=True)

    def finish(self) -> None:
        """Wait until the last step is over, and all weights are here."""
        if self._engine.is_pending or (self._exchange is not None and self._exchange.is_under_way):
            with self._pace.timed_wait(for_all=True):
                self._engine.finish()
                if self._exchange is not None:
                    self._exchange.finish()

    # Around a step

    def agree(self) -> Mapping[int, int]:
        """Return the order of this rank's pieces in the next step; a collective. Nothing goes on."""
        own = {place: number for number, place in enumerate(self._used)}
        places = [own.get(place, UNUSED) for place in range(len(self._places))]
        found = sorted((place, number) for number, place in enumerate(places))
        self._agreed = [number for _, number in (found if self._exchange is None else self._exchange.agree(places))]
        return {
            piece: order for order, place in reversed([*enumerate(self._agreed)]) for piece in self._pieces_of[place]
        }

    def begin(self, active: Iterable[int]) -> None:
        """Have ranks gather the weights of a step that has begun; wait for those that no hook saw used.

        Args:
            active: Pieces that it updates on this rank.
        """
        used, self._used = self._used, {}
        if self._exchange is not None:
            self._exchange.begin(self._engine, [self._bucket(place) for place in self._agreed])
        active = {*active}
        self._wait_for([n for n in range(len(self._places)) if n not in used and active & {*self._pieces_of[n]}])

    def _bucket(self, number: int) -> Bucket:
        place = self._places[number]
        parts = [part.detach()[place.start : place.stop] for part in self._parts[place.flat]]

        def gather(mesh: Any) -> None:
            rank = mesh.get_local_rank()
            for other, found in enumerate(all_gather(parts[rank], mesh)):
                if other != rank:
                    parts[other].copy_(found)

        return Bucket([number], self._pieces_of[number], gather)

    def moved(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Note that weights lie elsewhere."""
        self._parts, self._places_of = parts, {}

    def close(self) -> None:
        """End: modules wait for nothing any more."""
        for model in [*self.models]:
            model.unhook()
        if self._exchange is not None:
            self._exchange.close()
