"""`Piece`: one rank's run of one parameter, as DeepSpeed cuts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """This rank's run of one parameter.

    Attributes:
        name: The parameter's name in the model.
        flat: Index of the flat tensor that it lies in.
        offset: Where it begins there, in elements.
        numel: Its elements; 0 where this rank has only padding.
        group: Index of the optimizer's parameter group.
        start: Where it begins in the parameter.
        unsharded_numel: The parameter's elements; 0 where the piece is all of it.
        shape: Of the parameter.
    """

    name: str
    flat: int
    offset: int
    numel: int
    group: int
    start: int = 0
    unsharded_numel: int = 0
    shape: tuple[int, ...] | None = None
