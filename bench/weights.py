"""A spike: what it would cost to keep weights on a disk as well, and stream them by layer.

The product does not do this. Blocks of two linear layers with a residual, in bf16, lie in a file each; three slots in
memory take turns. Forward reads the blocks in order, backward in reverse and recomputes each block from its input
before it goes back through it. Reading goes on in threads while blocks compute. The same blocks in memory, recomputed
in the same way, take turns with it: outputs and gradients of inputs have to be equal bit for bit. Predicted is
max(compute, bytes over the rate of reading alone), for forward and for backward.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from _harness import Option, Run, digest, main, medians, show

SLOTS = 3
READERS = 4
OPTIONS = (
    Option("width", 2048, 64),
    Option("blocks", 8, 4),
    Option("tokens", [128, 512], [16]),
    Option("pairs", 7, 2),
)

Weights = list[torch.Tensor]


def block(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    up, down = weights
    return x + torch.nn.functional.gelu(x @ up) @ down


class InMemory:
    """All blocks in memory."""

    def __init__(self, blocks: list[Weights]) -> None:
        self._blocks = blocks

    def begin(self, order: list[int]) -> None:
        """Nothing has to come."""

    def weights(self, number: int) -> Weights:
        return self._blocks[number]


class OnDisk:
    """Blocks in files: `begin` says in which order they are needed, `weights` waits for one and asks for the next."""

    def __init__(self, folder: Path, blocks: list[Weights]) -> None:
        self._shapes = [weight.shape for weight in blocks[0]]
        self._nbytes = sum(weight.nbytes for weight in blocks[0])
        direct = getattr(os, "O_DIRECT", 0)
        self._files = []
        for number, weights in enumerate(blocks):
            file = folder / f"{number}"
            with file.open("wb") as out:
                for weight in weights:
                    out.write(weight.view(torch.uint8).numpy().tobytes())
                os.fsync(out.fileno())
            try:
                self._files.append(os.open(file, os.O_RDONLY | direct))
            except OSError:  # a file system without direct I/O
                self._files.append(os.open(file, os.O_RDONLY))
        self._slots = [mmap.mmap(-1, self._nbytes) for _ in range(SLOTS)]
        self._pool = ThreadPoolExecutor(READERS)
        self._coming: dict[int, tuple[int, list[Future[None]]]] = {}
        self._left: list[int] = []
        self._free = list(range(SLOTS))
        self._current: int | None = None

    def begin(self, order: list[int]) -> None:
        self._release()
        self._left = list(order)
        self._read_ahead()

    def weights(self, number: int) -> Weights:
        if self._current != number:
            self._release()
            self._current = number
        slot, parts = self._coming[number]
        wait(parts)
        for part in parts:
            part.result()
        self._read_ahead()
        flat = torch.frombuffer(self._slots[slot], dtype=torch.bfloat16)
        numels = [shape.numel() for shape in self._shapes]
        return [run.view(shape) for run, shape in zip(flat.split(numels), self._shapes, strict=True)]

    def close(self) -> None:
        self._pool.shutdown()
        for file in self._files:
            os.close(file)

    def _release(self) -> None:
        if self._current is not None:
            self._free.append(self._coming.pop(self._current)[0])
            self._current = None

    def _read_ahead(self) -> None:
        while self._left and self._free:
            number, slot = self._left.pop(0), self._free.pop()
            step = -(-self._nbytes // READERS // 4096) * 4096
            starts = range(0, self._nbytes, step)
            parts = [self._pool.submit(self._read, number, slot, start, step) for start in starts]
            self._coming[number] = slot, parts

    def _read(self, number: int, slot: int, start: int, step: int) -> None:
        view = memoryview(self._slots[slot])[start : min(start + step, self._nbytes)]
        done = 0
        while done < len(view):
            count = os.preadv(self._files[number], [view[done:]], start + done)
            if count == 0:
                raise RuntimeError(f"block {number} ends after {start + done:,} bytes")
            done += count


def iteration(source: InMemory | OnDisk, count: int, x: torch.Tensor) -> tuple[dict[str, float], torch.Tensor]:
    """Return seconds of forward and of backward, and output and gradient of the input, as one tensor."""
    start_s = time.perf_counter()
    source.begin(list(range(count)))
    inputs = []
    with torch.no_grad():
        for number in range(count):
            inputs.append(x)
            x = block(x, source.weights(number))
    middle_s = time.perf_counter()
    source.begin(list(reversed(range(count))))
    gradient = torch.ones_like(x)
    for number in reversed(range(count)):
        weights = [weight.detach().requires_grad_() for weight in source.weights(number)]
        given = inputs[number].detach().requires_grad_()
        gradient = torch.autograd.grad(block(given, weights), [given, *weights], gradient)[0]
    end_s = time.perf_counter()
    return {"forward_s": middle_s - start_s, "backward_s": end_s - middle_s}, torch.cat([x, gradient])


def reading_s(source: OnDisk, count: int) -> float:
    """Return the seconds that reading all blocks takes, with nothing else to do."""
    start_s = time.perf_counter()
    source.begin(list(range(count)))
    for number in range(count):
        source.weights(number)
    return time.perf_counter() - start_s


def measure(run: Run) -> None:
    args, same = run.args, True
    generator = torch.Generator().manual_seed(0)
    shapes = ((args.width, 4 * args.width), (4 * args.width, args.width))
    blocks = [
        [(torch.randn(shape, generator=generator) / 4 / args.width**0.5).bfloat16() for shape in shapes]
        for _ in range(args.blocks)
    ]
    nbytes = args.blocks * sum(weight.nbytes for weight in blocks[0])
    memory, disk = InMemory(blocks), OnDisk(run.folder, blocks)
    for tokens in args.tokens:
        x = torch.randn(tokens, args.width, generator=generator).bfloat16()
        iteration(memory, args.blocks, x)
        turns = []
        for _ in range(args.pairs):
            kept, expected = iteration(memory, args.blocks, x)
            alone_s = reading_s(disk, args.blocks)
            streamed, found = iteration(disk, args.blocks, x)
            same = same and torch.equal(expected.view(torch.int16), found.view(torch.int16))
            bound_s = sum(max(kept[part], alone_s) for part in ("forward_s", "backward_s"))
            took_s = sum(streamed.values())
            over = {"over_bound": took_s / bound_s, "over_memory": took_s / sum(kept.values())}
            turn = {f"kept_{part}": s for part, s in kept.items()} | streamed
            turns.append({**turn, **over, "reading_s": alone_s, "bound_s": bound_s})
        run.checksums.append(digest([expected]))
        row = run.results[f"{tokens} tokens"] = medians(turns)
        row["read_bytes_per_s"] = nbytes / row["reading_s"]
        show(f"{tokens} tokens", row, "over_memory", "over_bound", "read_bytes_per_s")
        run.at_most(f"{tokens} tokens: iteration over its bound", row["over_bound"], 1.1)
    disk.close()
    run.at_least("outputs and gradients with weights on the disk, bit for bit", float(same), 1.0)
    run.results |= {"weight_bytes": nbytes, "slot_bytes": SLOTS * nbytes // args.blocks}


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True, device="cpu")
