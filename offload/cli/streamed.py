"""Weights that are streamed to the device that computes with them: bytes that are there at once, and that move.

Weights in host memory are used on the GPU layer by layer, as FSDP2's `CPUOffloadPolicy` streams them. Each pass of a
micro-step copies all of them to the GPU, and backward copies their gradients back; embeddings and the output layer
stay on the GPU from forward to backward. Weights in a file are read by the kernel, as far as memory has no room for
them: forward and backward go in opposite orders, so the weights that were read last are still in memory, and the rest
is read from the drive. The step reads that rest once more, and writes all weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.cli.shapes import Shape
    from offload.plan import GpuRates, Rates

WEIGHT_BYTES = GRADIENT_BYTES = 2
"""Bytes of a parameter's weight, and of its gradient, in 16-bit training."""

REDUCED = 3
"""Copies on the GPU of the gradients of a layer: backward's, and the input and the output of FSDP2's reduction."""

PAGEABLE_PART = 1 / 6.56
"""Part of a link's speed that remains for memory that is not pinned, as a mapped file's. That of Soup, which streams
frozen 4-bit weights of a 32B model, on an H100 (MakazhanAlpamys/Soup, `PIN_THROUGHPUT_GAIN_REAL`); ours is not
measured."""


def window_bytes(shape: Shape) -> int:
    """Return the bytes of the weights that are on the GPU at once: two layers, and all that are in no layer."""
    return WEIGHT_BYTES * (2 * shape.layer_params + shape.rest_params)


def gradients_bytes(shape: Shape) -> int:
    """Return the bytes of gradients that are on the GPU at once: a layer's, or those in no layer if more."""
    return REDUCED * GRADIENT_BYTES * max(shape.layer_params, shape.rest_params)


@dataclass(frozen=True, slots=True)
class Passes:
    """The transfers of one rank's passes in an iteration, all micro-steps together.

    Attributes:
        numel: The rank's parameters.
        rest: How many of them are in no layer; 0 where unknown.
        accumulate: Micro-steps.
        card: The GPU that computes, and its link; None for the CPU.
        kept_bytes: Bytes of weights in a file for which memory has room; None if the weights lie in host memory.
    """

    numel: int
    rest: int
    accumulate: int
    card: GpuRates | None
    kept_bytes: int | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return WEIGHT_BYTES * self.numel

    @property
    def down_bytes(self) -> tuple[int, int]:
        """Bytes of weights that forward and backward copy to the GPU."""
        if self.card is None:
            return 0, 0
        in_layers = WEIGHT_BYTES * (self.numel - self.rest)
        return self.accumulate * self.weight_bytes, self.accumulate * in_layers

    @property
    def up_bytes(self) -> int:
        """Bytes of gradients that backward copies from the GPU."""
        return self.accumulate * GRADIENT_BYTES * self.numel if self.card is not None else 0

    @property
    def missing_bytes(self) -> int:
        """Bytes that one pass, or a step, reads from the drive."""
        return 0 if self.kept_bytes is None else max(0, self.weight_bytes - self.kept_bytes)

    @property
    def written_bytes(self) -> int:
        """Bytes that a step writes to the drive."""
        return 0 if self.kept_bytes is None else self.weight_bytes

    @property
    def link_s(self) -> tuple[float, float]:
        """Return the seconds that the link works in forward and in backward."""
        part = 1.0 if self.kept_bytes is None else PAGEABLE_PART
        (forward, backward), up = self.down_bytes, self.up_bytes
        if self.card is None:
            return 0.0, 0.0
        link = self.card.times(part)
        both = link.copying(backward, up)
        return forward / link.h2d.alone, max(backward / both.h2d.alone, up / both.d2h.alone)

    def read_s(self, rates: Rates) -> float:
        """Return the seconds that the drive reads in forward, and as many in backward."""
        if not self.missing_bytes:
            return 0.0
        return self.accumulate * self.missing_bytes / rates.paths[path_of(rates)].read.alone

    def step_s(self, rates: Rates) -> float:
        """Return the seconds that the drive needs for weights in a step."""
        if self.kept_bytes is None:
            return 0.0
        path = rates.paths[path_of(rates)]
        return self.missing_bytes / path.read.alone + self.written_bytes / path.write.alone

    def as_dict(self) -> dict[str, Any]:
        """Return this for `--json`."""
        read = self.accumulate * self.missing_bytes
        return {
            "link_bytes": {"forward": self.down_bytes[0], "backward": self.down_bytes[1], "gradients": self.up_bytes},
            "drive_bytes": {"forward": read, "backward": read, "step": self.missing_bytes + self.written_bytes},
        }

    def lines(self, rates: Rates, computed_s: tuple[float, float] | None) -> list[str]:
        """Describe each transfer, and whether it takes no longer than forward and backward compute (hidden).

        Args:
            rates: The rank's.
            computed_s: Seconds for which forward and backward compute, if known.
        """
        (forward, backward), up, lines = self.down_bytes, self.up_bytes, []

        def hidden(seconds: tuple[float, float]) -> str:
            if computed_s is None:
                return ""
            names = ("forward", "backward")
            longer = [name for name, s, compute_s in zip(names, seconds, computed_s, strict=True) if s > compute_s]
            return f"; not hidden in {' and '.join(longer)}" if longer else "; hidden"

        if self.card is not None:
            moved = f"link: {format_bytes(forward)} of weights to the GPU in forward, {format_bytes(backward)} in"
            moved += f" backward, {format_bytes(up)} of gradients from it"
            lines.append(f"{moved}{hidden(self.link_s)}")
        if self.kept_bytes is not None:
            if read := self.accumulate * self.missing_bytes:
                moved = f"{format_bytes(read)} of weights are read in forward, and in backward"
                both_s = 2 * (self.read_s(rates),)  # the drive reads as long in backward as in forward
                lines.append(f"path {path_of(rates)}: {moved}{hidden(both_s)}")
            lines.append(f"path {path_of(rates)}: a step writes {format_bytes(self.written_bytes)} of weights")
        return lines


def path_of(rates: Rates) -> int:
    """Return the number of the path for weights in a file: the one that reads fastest."""
    return max(range(len(rates.paths)), key=lambda number: rates.paths[number].read.alone)
