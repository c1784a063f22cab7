"""Rates of a GPU and its link, where torch sees one; everything on streams of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offload.kernels import GpuUpdateKernel
from offload.kernels.table import trial_bytes, trial_table
from offload.rules import ADAMW

COPY_BYTES = 64 << 20
COPIES = 8
COPIES_BESIDE = 128
UPDATE_NUMEL = 1 << 26


def gpu_probe(update: Callable[[], float]) -> GpuProbe | None:
    """Return a probe of the current CUDA device, or None where torch has none.

    Args:
        update: Runs the CPU's update for a while and returns its rate.
    """
    import torch

    return GpuProbe(update) if torch.cuda.is_available() else None


class GpuProbe:
    """Copies between pinned host memory and the GPU, each way alone and both at once, and updates on it.

    The update is the engine's own, with 16-bit gradients and weights.

    Attributes:
        memory_bytes: Size of the GPU's memory.
    """

    def __init__(self, update: Callable[[], float]) -> None:
        import torch

        self._torch: Any = torch
        self._update = update
        self.memory_bytes = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        self._streams: dict[str, Any] = {way: self._torch.cuda.Stream() for way in ("h2d", "d2h")}
        self._pairs: dict[str, tuple[Any, Any]] = {}
        for way in self._streams:
            host = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
            self._pairs[way] = (device, host) if way == "h2d" else (host, device)
        free_bytes, _ = torch.cuda.mem_get_info()
        self._numel = min(UPDATE_NUMEL, free_bytes // 64) // 1024 * 1024
        self._kernel = GpuUpdateKernel()
        self._memory = torch.zeros(self._numel * trial_bytes(ADAMW), dtype=torch.uint8, device="cuda")
        self._table = trial_table(ADAMW, self._memory.data_ptr(), self._numel)
        self._kernel.update(self._table)  # compiles

    def samples(self) -> Iterator[tuple[str, Callable[[], Mapping[str, float]]]]:
        """Return what to measure once a round."""
        yield "copies to the GPU", lambda: {"gpu/h2d alone": self._copied(["h2d"])["h2d"]}
        yield "copies from the GPU", lambda: {"gpu/d2h alone": self._copied(["d2h"])["d2h"]}
        yield (
            "copies both ways",
            lambda: {f"gpu/{way}": rate for way, rate in self._copied(["h2d", "d2h"]).items()},
        )
        yield "copies beside the update", self._beside
        yield "update on the GPU", lambda: {"gpu/update": self._updated()}

    def _start(self, ways: list[str], copies: int) -> dict[str, tuple[Any, Any]]:
        """Start copies on one stream for each way; return the events around them."""
        self._torch.cuda.synchronize()
        events = {way: self._events() for way in ways}
        for way in ways:
            self._streams[way].record_event(events[way][0])
        for _ in range(copies):
            for way in ways:
                target, source = self._pairs[way]
                with self._torch.cuda.stream(self._streams[way]):
                    target.copy_(source, non_blocking=True)
        for way in ways:
            self._streams[way].record_event(events[way][1])
        return events

    def _events(self) -> tuple[Any, Any]:
        event = self._torch.cuda.Event
        return event(enable_timing=True), event(enable_timing=True)

    def _rates(self, events: Mapping[str, tuple[Any, Any]], copies: int) -> dict[str, float]:
        self._torch.cuda.synchronize()
        return {way: copies * COPY_BYTES * 1e3 / begun.elapsed_time(ended) for way, (begun, ended) in events.items()}

    def _copied(self, ways: list[str]) -> dict[str, float]:
        return self._rates(self._start(ways, COPIES), COPIES)

    def _beside(self) -> dict[str, float]:
        """Return what copies both ways reach beside the CPU's update, and what they leave of it."""
        alone = self._update()
        events = self._start(["h2d", "d2h"], COPIES_BESIDE)
        beside = [self._update()]
        while not any(ended.query() for _, ended in events.values()):
            beside.append(self._update())
        rates = self._rates(events, COPIES_BESIDE)
        # The copies ended somewhere in the last run.
        speed = statistics.mean(beside[:-1] or beside) / alone
        return {f"gpu/{way} beside cpu": rate for way, rate in rates.items()} | {"gpu/speed of cpu": speed}

    def _updated(self) -> float:
        """Return the state bytes that an update on the GPU works through a second."""
        begun, ended = self._events()
        self._torch.cuda.synchronize()
        begun.record()
        for _ in range(COPIES):
            self._kernel.update(self._table)
        ended.record()
        self._torch.cuda.synchronize()
        return COPIES * self._numel * ADAMW.item_bytes * 1e3 / float(begun.elapsed_time(ended))
