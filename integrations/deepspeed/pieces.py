"""`Piece`: one rank's run of one parameter, as DeepSpeed cuts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """This rank's run of one parameter.

    Attributes:
        name: The parameter's name in the model.
        flat: Index of the flat tensor that it lies in.
        offset: Where the piece begins in the flat tensor, in elements.
        numel: Its number of elements; 0 where this rank has only padding.
        group: Index of the optimizer's parameter group.
        start: Where the piece begins in the parameter, in elements.
        unsharded_numel: The parameter's number of elements; 0 where the piece is all of it.
        shape: The parameter's shape.
    """

    name: str
    flat: int
    offset: int
    numel: int
    group: int
    start: int = 0
    unsharded_numel: int = 0
    shape: tuple[int, ...] | None = None
