"""Weights that lie elsewhere than where they are computed: what of them is there at once, and what moves in a pass.

In host memory they are computed on the GPU layer by layer, as FSDP2's `CPUOffloadPolicy` streams them: each pass of a
micro-step brings all of them, backward takes their gradients away, and embeddings and the output layer stay from
forward to backward. In a file, the kernel reads what memory has no room for: passes go to and fro, so what was read
last is still there, and the rest comes from the drive. The step reads that once more, and writes all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.cli.shapes import Shape
    from offload.plan import GpuRates, Rates

WEIGHT_BYTES = GRADIENT_BYTES = 2
"""Of each parameter: 16-bit training."""

REDUCED = 3
"""Times that gradients of what is computed together lie on the GPU: backward's, what FSDP2 reduces, and into what."""

PAGEABLE_PART = 1 / 6.56
"""Of a link's speed, for memory that is not pinned, as a mapped file's: what Soup, which streams frozen 4-bit weights
of a 32B model, loses on an H100 (MakazhanAlpamys/Soup, `PIN_THROUGHPUT_GAIN_REAL`); nobody has measured ours."""


def window_bytes(shape: Shape) -> int:
    """Return the weights that are on the GPU at once: two layers, and what no layer has."""
    return WEIGHT_BYTES * (2 * shape.layer_params + shape.rest_params)


def gradients_bytes(shape: Shape) -> int:
    """Return the gradients that are on the GPU at once, of the layer or the rest, whichever is more."""
    return REDUCED * GRADIENT_BYTES * max(shape.layer_params, shape.rest_params)


@dataclass(frozen=True, slots=True)
class Passes:
    """What the passes of one rank's iteration move, all micro-steps together.

    Attributes:
        numel: Its parameters.
        rest: How many of them no layer has; 0 where that is not known.
        accumulate: Micro-steps.
        card: The GPU that computes, and its link; None for the CPU.
        kept_bytes: What memory keeps of weights in a file; None if they lie in host memory.
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
        """Bytes that forward and backward bring to the GPU."""
        if self.card is None:
            return 0, 0
        whole, layers = self.weight_bytes, WEIGHT_BYTES * (self.numel - self.rest)
        return self.accumulate * whole, self.accumulate * layers

    @property
    def up_bytes(self) -> int:
        """Bytes of gradients that backward takes from it."""
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
        """Return the seconds by which the drive makes a step longer."""
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
        """Return in words what moves, and what of it is hidden.

        Args:
            rates: Of the rank.
            computed_s: Seconds that forward and backward compute, if that is known.
        """
        (forward, backward), up, found = self.down_bytes, self.up_bytes, []

        def hidden(seconds: tuple[float, float]) -> str:
            if computed_s is None:
                return ""
            names = ("forward", "backward")
            seen = [name for name, s, of in zip(names, seconds, computed_s, strict=True) if s > of]
            return f"; not hidden in {' and '.join(seen)}" if seen else "; hidden"

        if self.card is not None:
            moved = f"link: {format_bytes(forward)} of weights to the GPU in forward, {format_bytes(backward)} in"
            moved += f" backward, {format_bytes(up)} of gradients from it"
            found.append(f"{moved}{hidden(self.link_s)}")
        if self.kept_bytes is not None:
            if read := self.accumulate * self.missing_bytes:
                moved = f"{format_bytes(read)} of weights are read in forward, and in backward"
                found.append(f"path {path_of(rates)}: {moved}{hidden(2 * (self.read_s(rates),))}")
            found.append(f"path {path_of(rates)}: a step writes {format_bytes(self.written_bytes)} of weights")
        return found


def path_of(rates: Rates) -> int:
    """Return which path weights in a file lie on: the one that reads fastest."""
    return max(range(len(rates.paths)), key=lambda number: rates.paths[number].read.alone)
