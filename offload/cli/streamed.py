"""Weights that are streamed to the device that computes with them: bytes that are there at once, and that move.

Weights in host memory are used on the GPU layer by layer, as FSDP2's `CPUOffloadPolicy` streams them. Each pass of a
micro-step copies all of them to the GPU, and backward copies their gradients back; embeddings and the output layer
stay on the GPU from forward to backward. Weights in a file are read by the kernel, as far as memory has no room for
them: forward and backward go in opposite orders, so the weights that were read last are still in memory, and the rest
is read from the drive. The step reads that rest once more, and writes all weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.cli.shapes import Shape
    from offload.plan import GpuRates, Rates

WEIGHT_BYTES = GRADIENT_BYTES = 2
"""Bytes of a parameter's weight, and of its gradient, in 16-bit training."""

GRADIENT_COPIES = 3
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
    return GRADIENT_COPIES * GRADIENT_BYTES * max(shape.layer_params, shape.rest_params)


def reduced_gradients_bytes(shape: Shape) -> int:
    """Return the bytes of gradients that are on the GPU at once while ranks reduce them.

    Ranks reduce the gradients of a layer, or of a tensor in no layer, at a time. The larger of these counts twice:
    what backward made, and the copy that is reduced. A layer's gradients come on top: in FSDP2 those that backward
    makes meanwhile, in ZeRO a bucket of that size.
    """
    return GRADIENT_BYTES * (2 * max(shape.layer_params, shape.largest_params) + shape.layer_params)


class PerPass(NamedTuple):
    """Seconds (or bytes) of all forward passes of an iteration, and of all backward passes."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class WeightTransfers:
    """The transfers of one rank's streamed weights in an iteration, all micro-steps together.

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
    def _has_gpu(self) -> bool:
        """Whether weights are copied to a GPU in each pass."""
        return self.card is not None

    @property
    def to_gpu_bytes(self) -> PerPass:
        """Bytes of weights that forward and backward copy to the GPU."""
        if not self._has_gpu:
            return PerPass(0, 0)
        in_layers = WEIGHT_BYTES * (self.numel - self.rest)  # the rest stays on the GPU from forward to backward
        return PerPass(forward=self.accumulate * self.weight_bytes, backward=self.accumulate * in_layers)

    @property
    def from_gpu_bytes(self) -> int:
        """Bytes of gradients that backward copies from the GPU."""
        return self.accumulate * GRADIENT_BYTES * self.numel if self._has_gpu else 0

    @property
    def missing_bytes(self) -> int:
        """Bytes of weights for which memory has no room: each pass, and each step, reads them from the drive."""
        return 0 if self.kept_bytes is None else max(0, self.weight_bytes - self.kept_bytes)

    @property
    def written_bytes(self) -> int:
        """Bytes that a step writes to the drive: all weights, if they lie in a file."""
        return 0 if self.kept_bytes is None else self.weight_bytes

    @property
    def link_s(self) -> PerPass:
        """Seconds that the link to the GPU works in forward and in backward."""
        if self.card is None:
            return PerPass(0.0, 0.0)
        to_gpu = self.to_gpu_bytes
        is_pinned = self.kept_bytes is None  # weights in host memory are pinned; those of a mapped file are not
        link = self.card.times(1.0 if is_pinned else PAGEABLE_PART)
        # Backward copies weights to the GPU while gradients leave it; each direction slows the other. `copying`
        # returns the mean rate of each for these bytes, in which that is counted: `alone` and `beside` are the same.
        both_ways = link.copying(to_gpu.backward, self.from_gpu_bytes)
        weights_s = to_gpu.backward / both_ways.h2d.alone
        gradients_s = self.from_gpu_bytes / both_ways.d2h.alone
        return PerPass(forward=to_gpu.forward / link.h2d.alone, backward=max(weights_s, gradients_s))

    def read_s(self, rates: Rates) -> float:
        """Return the seconds for which the drive reads weights in forward; in backward they are as many."""
        if not self.missing_bytes:
            return 0.0
        return self.accumulate * self.missing_bytes / rates.paths[path_of(rates)].read.alone

    def step_s(self, rates: Rates) -> float:
        """Return the seconds for which the drive reads and writes weights in a step; 0 if they lie in host memory."""
        if self.kept_bytes is None:
            return 0.0
        path = rates.paths[path_of(rates)]
        return self.missing_bytes / path.read.alone + self.written_bytes / path.write.alone

    def as_dict(self) -> dict[str, Any]:
        """Return this for `--json`."""
        to_gpu = self.to_gpu_bytes
        read = self.accumulate * self.missing_bytes
        return {
            "link_bytes": {"forward": to_gpu.forward, "backward": to_gpu.backward, "gradients": self.from_gpu_bytes},
            "drive_bytes": {"forward": read, "backward": read, "step": self.missing_bytes + self.written_bytes},
        }

    def lines(self, rates: Rates, computed_s: PerPass | None) -> list[str]:
        """Describe each transfer, and whether it takes no longer than forward and backward compute (hidden).

        Args:
            rates: The rank's.
            computed_s: Seconds for which forward and backward compute, if known.
        """
        lines = []
        if self._has_gpu:
            to_gpu = self.to_gpu_bytes
            moved = (
                f"link: {format_bytes(to_gpu.forward)} of weights to the GPU in forward, "
                f"{format_bytes(to_gpu.backward)} in backward, "
                f"{format_bytes(self.from_gpu_bytes)} of gradients from it"
            )
            lines.append(f"{moved}{_hidden_text(self.link_s, computed_s)}")
        if self.kept_bytes is not None:
            if read := self.accumulate * self.missing_bytes:
                moved = f"{format_bytes(read)} of weights are read in forward, and in backward"
                read_s = PerPass(forward=self.read_s(rates), backward=self.read_s(rates))
                lines.append(f"path {path_of(rates)}: {moved}{_hidden_text(read_s, computed_s)}")
            lines.append(f"path {path_of(rates)}: a step writes {format_bytes(self.written_bytes)} of weights")
        return lines


def _hidden_text(transfer_s: PerPass, computed_s: PerPass | None) -> str:
    """Return words to append to a transfer: whether the passes hide it, or which of them compute for less time.

    "" if it is not known how long they compute.
    """
    if computed_s is None:
        return ""
    longer = [name for name in PerPass._fields if getattr(transfer_s, name) > getattr(computed_s, name)]
    return f"; not hidden in {' and '.join(longer)}" if longer else "; hidden"


def path_of(rates: Rates) -> int:
    """Return the number of the path for weights in a file: the one that reads fastest."""
    return max(range(len(rates.paths)), key=lambda number: rates.paths[number].read.alone)
