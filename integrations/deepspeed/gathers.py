"""Gathers new weights of ZeRO-1 and 2 while a step goes on into the next forward pass.

DeepSpeed gathers all of them at the end of its step. Here it does not, and they are gathered range by range, in the
order in which modules used them last on any rank; a module waits for the ranges that its weights lie in.

A flat tensor of weights is made of one part for each rank, which updates it. A *range* is the same run of elements in
all ranks' parts, so one collective sends what each rank has updated of it to all. Ranges are numbered through all
flat tensors. `Exchange` calls a range a bucket.
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


class GatherRange(NamedTuple):
    """A range of all ranks' parts of flat tensor number `flat`: elements `start` to `stop` of each part."""

    flat: int
    start: int
    stop: int


class Gathers:
    """Gathers weights that a step updates, in the background, and makes modules wait for those that they use.

    Made by all ranks together. A `FollowedModel` asks it to wait for a module's weights.

    Args:
        engine: Updates this rank's parts.
        pieces: The pieces that it updates.
        parts: Of each flat tensor, the parts of all ranks.
        group: The ranks.
        pace: Measures how long callers wait.

    Attributes:
        models: The models that wait.
        has_ended: Always False; a `FollowedModel` asks for it, see `offload.optim.overlap.Overlap`.
    """

    def __init__(
        self, engine: Engine, pieces: Sequence[Piece], parts: Sequence[Sequence[torch.Tensor]], group: Any, pace: Pace
    ) -> None:
        self.models: list[FollowedModel] = []
        self.has_ended = False
        self._engine = engine
        self._parts = parts
        self._pace = pace
        self._device = parts[0][0].device  # that of all weights
        # With one rank there is nothing to gather.
        self._exchange = Exchange(group, self._device) if torch.distributed.get_world_size(group) > 1 else None
        self._ranges: list[GatherRange] = []
        self._range_numbers: list[list[int]] = []  # by flat tensor, the numbers of its ranges
        for flat, rank_parts in enumerate(parts):
            part_numel = rank_parts[0].numel()  # ranks have parts of one size
            # A range of all ranks' parts together has at most `BUCKET_BYTES`, but at least an element of each.
            range_numel = max(1, BUCKET_BYTES // (len(rank_parts) * rank_parts[0].itemsize))
            ranges = [
                GatherRange(flat, start, min(start + range_numel, part_numel))
                for start in range(0, part_numel, range_numel)
            ]
            self._range_numbers.append([*range(len(self._ranges), len(self._ranges) + len(ranges))])
            self._ranges += ranges
        self._pieces_by_range: list[list[int]] = [[] for _ in self._ranges]  # numbers of this rank's pieces
        for number, piece in enumerate(pieces):
            for range_number in self._range_numbers_within(piece.flat, piece.offset, piece.numel):
                self._pieces_by_range[range_number].append(number)
        self._used: dict[int, None] = {}  # numbers of ranges, in the order of first use since the last step
        self._ranges_by_parameter: dict[torch.Tensor, tuple[int, ...]] = {}  # what `_ranges_of` has returned before
        self._gather_order: list[int] = []  # numbers of ranges, as ranks have agreed for the next step

    def hook_model(self, model: torch.nn.Module) -> None:
        """Hook the modules of a model, so that each waits for its weights before it uses them."""
        self.models.append(FollowedModel(self, model, check=False))  # without NaN in weights that are not waited for

    def _range_numbers_within(self, flat: int, start: int, numel: int) -> Iterable[int]:
        """Return the numbers of the ranges in which `numel` elements of a rank's part of flat tensor `flat` lie.

        `start` is the first of these elements in the part.
        """
        if not numel:
            return ()
        numbers = self._range_numbers[flat]
        # All ranges of a flat tensor but the last have as many elements as the first, which begins at 0.
        range_numel = self._ranges[numbers[0]].stop
        end = -(-(start + numel) // range_numel)  # rounded up
        return numbers[start // range_numel : end]

    def _ranges_of(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the numbers of the ranges that a parameter lies in, in any rank's part; none if it is not trained.

        A parameter that is trained is a view of a flat tensor, so addresses show where it lies.
        """
        ranges = self._ranges_by_parameter.get(parameter)
        if ranges is None:
            address = parameter.data_ptr()
            end = address + parameter.nbytes
            number_set: dict[int, None] = {}  # a dict, which keeps their order
            for flat, rank_parts in enumerate(self._parts):
                for part in rank_parts:
                    first = max(address, part.data_ptr())
                    nbytes = min(end, part.data_ptr() + part.nbytes) - first  # in both; at most 0 if they are apart
                    if nbytes > 0:
                        start = (first - part.data_ptr()) // part.itemsize
                        numbers = self._range_numbers_within(flat, start, nbytes // part.itemsize)
                        number_set.update(dict.fromkeys(numbers))
            self._ranges_by_parameter[parameter] = ranges = tuple(number_set)
        return ranges

    # While modules run

    def wait_for_use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that a forward pass uses some weights now, and wait for them."""
        for parameter in parameters:
            self._used.update(dict.fromkeys(self._ranges_of(parameter)))
        self.wait_for_some(parameters)

    def wait_for_some(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for some weights, if a step is still being made or gathered."""
        self._wait_for(dict.fromkeys(number for parameter in parameters for number in self._ranges_of(parameter)))

    def _wait_for(self, range_numbers: Iterable[int]) -> None:
        """Wait until ranges are gathered, or with one rank until their pieces are updated; the time is measured."""
        if self._exchange is not None:  # several ranks
            if self._exchange.is_under_way:
                with self._pace.timed_wait():
                    self._exchange.wait_for(range_numbers)  # on the host: no stream has to be ordered after it
        # One rank. On a GPU also if no step is pending: the last one may have been waited for on another stream.
        elif self._engine.is_pending or self._device.type != "cpu":
            with self._pace.timed_wait():
                pieces = (piece for number in range_numbers for piece in self._pieces_by_range[number])
                self._engine.wait_for(pieces, on_any_stream=True)

    def finish(self) -> None:
        """Wait until the last step is over, and all weights are here."""
        if self._engine.is_pending or (self._exchange is not None and self._exchange.is_under_way):
            with self._pace.timed_wait(for_all=True):
                self._engine.finish()
                if self._exchange is not None:
                    self._exchange.finish()

    # Around a step

    def agree_on_order(self) -> Mapping[int, int]:
        """Agree with all ranks on the order in which the next step's ranges are gathered. Collective.

        Ranges come in the order of their first use on any rank since the last step. No step is under way meanwhile.

        Returns:
            By number, the position of each of this rank's pieces in that order.
        """
        position_of = {range_number: position for position, range_number in enumerate(self._used)}
        # Of each range on this rank.
        positions = [position_of.get(range_number, UNUSED) for range_number in range(len(self._ranges))]
        if self._exchange is None:
            in_order = sorted((position, range_number) for range_number, position in enumerate(positions))
        else:
            in_order = self._exchange.agree_on_order(positions)
        self._gather_order = [range_number for _, range_number in in_order]
        # A piece that lies in several ranges has the position of the first: it is set last, as the order is reversed.
        return {
            piece: position
            for position, range_number in reversed([*enumerate(self._gather_order)])
            for piece in self._pieces_by_range[range_number]
        }

    def begin(self, active: Iterable[int]) -> None:
        """Start gathering the weights of a step that has begun, in the background, in the agreed order.

        Before this returns it waits for ranges whose use no hook has seen since the last step, as nobody would wait
        for them later. That goes for ranges in which the step updates a piece of this rank: one of `active`.
        """
        used, self._used = self._used, {}  # the order of use begins anew
        if self._exchange is not None:
            self._exchange.begin(self._engine, [self._bucket(number) for number in self._gather_order])
        active_pieces = {*active}
        unseen = (number for number in range(len(self._ranges)) if number not in used)
        self._wait_for([number for number in unseen if not active_pieces.isdisjoint(self._pieces_by_range[number])])

    def _bucket(self, number: int) -> Bucket:
        """Return one range as a bucket: in its exchange each rank sends its own part, and copies the others'."""
        gather_range = self._ranges[number]
        parts = [part.detach()[gather_range.start : gather_range.stop] for part in self._parts[gather_range.flat]]

        def gather(mesh: Any) -> None:
            """Exchange the range: `Exchange` calls this in the background."""
            rank = mesh.get_local_rank()
            for other, gathered in enumerate(all_gather(parts[rank], mesh)):
                if other != rank:
                    parts[other].copy_(gathered)

        return Bucket([number], self._pieces_by_range[number], gather)

    def use_parts(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Note that weights were moved: these are the parts of all ranks now."""
        self._parts, self._ranges_by_parameter = parts, {}

    def close(self) -> None:
        """Unhook the modules, which wait for nothing any more, and close the exchange."""
        for model in [*self.models]:  # a copy, as `unhook` removes the model from the list
            model.unhook()
        if self._exchange is not None:
            self._exchange.close()
