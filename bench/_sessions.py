"""Sessions over emulated paths, on made-up weights and gradients, as several benchmarks measure them."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from _harness import digest
from _throttled import ThrottledTier

from offload import Engine, OffloadConfig
from offload._native import CompletionQueue
from offload.dtypes import DtypeCode
from offload.formats import EXACT_ADAMW, FP32, STATE_FORMATS
from offload.layout import Parameter
from offload.plan import Rates
from offload.predict import predict
from offload.protocols import Tier
from offload.rules import GroupScalars
from offload.session import parts, setup
from offload.tiers import open_tier

MB = 1_000_000
MIB = 1 << 20

GROUP = GroupScalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
WARM_UP = 5
"""Steps before the first that counts: one that finds fresh state, three that are learnt from, and one at whose end
the last of those has been."""


class Pace(NamedTuple):
    """A device to emulate.

    Attributes:
        read: MB/s of reads alone.
        write: MB/s of writes alone.
        at_once: See `ThrottledTier`.
    """

    read: float
    write: float
    at_once: int = 0

    def __str__(self) -> str:
        if self.read == math.inf:
            return "disk"
        each_way = f"{self.read:.0f}" if self.read == self.write else f"{self.read:.0f}/{self.write:.0f}"
        return f"{each_way} shared by {self.at_once}" if self.at_once else each_way


class Throttles:
    """Opens paths behind a `ThrottledTier` of the pace that each was given (or MB/s each way); an infinite one as it
    is."""

    def __init__(self, folder: Path, paces: Sequence[float | Pace]) -> None:
        self.tiers: dict[str, ThrottledTier] = {}
        self.rates: dict[str, Pace] = {}
        for number, pace in enumerate(paces):
            path = folder / f"path-{number}-{uuid.uuid4().hex[:8]}"
            path.mkdir()
            self.rates[str(path)] = pace if isinstance(pace, Pace) else Pace(pace, pace)

    def open(self, path: str, store: uuid.UUID, queue: CompletionQueue, **settings: Any) -> Tier:
        read, write, at_once = self.rates[path]
        if math.isinf(read):
            return open_tier(path, store, queue, **settings)
        inner_queue = CompletionQueue()
        inner = open_tier(path, store, inner_queue, **settings)
        rates = {"read_bytes_per_s": read * MB, "write_bytes_per_s": write * MB}
        tier = ThrottledTier(inner, inner_queue, queue, **rates, at_once=at_once)
        self.tiers[path] = tier
        return tier

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Have sessions that are made meanwhile open their paths here."""
        with mock.patch.object(setup, "open_tier", self.open):
            yield


DISK = Pace(math.inf, math.inf)
"""The path that is not throttled."""


@dataclass(frozen=True)
class Configuration:
    """What a session is given.

    Attributes:
        resident: Subgroups at home in host memory, as a part of all.
        paths: What each path reaches; `DISK` for the disk itself.
        slots: Staging slots.
        threads: Threads of the update.
        shares: How tiles are spread over the paths; empty for by their rates.
    """

    resident: float
    paths: tuple[Pace, ...] = (DISK,)
    slots: int = 4
    threads: int = 2
    shares: tuple[float, ...] = ()

    def __str__(self) -> str:
        if self.resident == 1:
            return f"all resident, {self.threads} threads"
        paths = "+".join(map(str, self.paths))
        split = ":".join(f"{share:g}" for share in self.shares)
        split = f" split {split}" if split else ""
        return f"{self.resident:.0%} resident, {paths}{split}, {self.slots} slots, {self.threads} threads"


class Model:
    """Weights and gradients that all sessions use: as each session updates them from the start, in the same number
    of steps, they are the same after each one's last.

    Args:
        subgroups: How many.
        each: Elements of each.
    """

    def __init__(self, subgroups: int, each: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.subgroups, self.each = subgroups, each
        self.numel = subgroups * each
        self.start = torch.randn(self.numel, generator=generator).bfloat16()
        self.weight = self.start.clone()
        self.gradient = torch.randn(self.numel, generator=generator).bfloat16()
        self.parameters = [Parameter(f"p{number}", each, DtypeCode.BFLOAT16, 0) for number in range(subgroups)]
        self.subgroup_bytes = 3 * FP32.item_bytes * each

    def digest(self) -> str:
        return digest([self.weight])


class Session:
    """An engine over throttled paths that starts from given rates, as one does that starts from a file, or from what
    it measures itself."""

    def __init__(self, folder: Path, model: Model, configuration: Configuration, rates: Rates | None = None) -> None:
        self.configuration = configuration
        self.model = model
        self.throttles = Throttles(folder, list(configuration.paths))
        paths: list[dict[str, Any]] = [{"path": path} for path in self.throttles.rates]
        for path, share in zip(paths, configuration.shares, strict=False):
            path["share"] = share
        config = OffloadConfig(
            host_memory=round(configuration.resident * model.subgroups) * model.subgroup_bytes,
            paths=paths,
            staging_memory=configuration.slots * model.subgroup_bytes,
            subgroup_numel=model.each,
            threads=configuration.threads,
        )
        given = mock.patch.object(parts, "session_rates", return_value=rates) if rates else contextlib.nullcontext()
        with self.throttles.opening(), given:
            self.engine = Engine(model.parameters, config)
        for number in range(model.subgroups):
            offset = 2 * number * model.each
            self.engine.bind_weight(number, model.weight.data_ptr() + offset)
            self.engine.gradients.bind(number, model.gradient.data_ptr() + offset, DtypeCode.BFLOAT16)

    def step(self) -> float:
        """Take one step; return its seconds."""
        self.engine.step([GROUP])
        return self.engine.metrics()["step_s"]

    def waited_s(self) -> float:
        """Take one step; return the seconds of the call."""
        started_s = time.perf_counter()
        self.engine.step([GROUP])
        return time.perf_counter() - started_s

    @property
    def least_bytes(self) -> int:
        """Bytes that a step has to move each way: what is left in staging is what the next one starts with."""
        subgroups, configuration = self.model.subgroups, self.configuration
        moves = subgroups - round(configuration.resident * subgroups) - configuration.slots
        return max(0, moves) * self.model.subgroup_bytes

    def predict(self) -> float:
        """Return the seconds that a step should take by what the session knows now."""
        return predict(self.engine.plan, self.engine.rates).step_s

    def warm_up(self) -> str:
        """Take all steps up to the first that counts; return the digest of the weights."""
        self.model.weight.copy_(self.model.start)
        for _ in range(WARM_UP):
            self.engine.step([GROUP])
        return self.model.digest()


@contextlib.contextmanager
def sessions(
    folder: Path,
    model: Model,
    rates: Callable[[Configuration], Rates | None],
    configurations: Sequence[Configuration],
) -> Iterator[list[Session]]:
    """Open a session of each configuration."""
    with contextlib.ExitStack() as stack:
        opened = []
        for configuration in configurations:
            opened.append(Session(folder, model, configuration, rates(configuration)))
            stack.callback(opened[-1].engine.close)
        yield opened


def quarter_staged(form: str, path: str, weight: torch.Tensor, gradient: torch.Tensor, subgroups: int) -> Engine:
    """Return an engine whose state in a format is all on a path; staging holds a quarter of the elements."""
    numel = weight.numel()
    item_bytes = EXACT_ADAMW.stored_in(STATE_FORMATS[form]).item_bytes
    config = OffloadConfig(
        host_memory=0,
        paths=[path],
        state_format=form,
        subgroup_numel=numel // subgroups,
        staging_memory=int(1.01 * item_bytes * numel / 4),
    )
    shape = numel // 1024, 1024
    engine = Engine([Parameter("p", numel, DtypeCode.BFLOAT16, 0, shape=shape)], config)
    engine.bind_weight(0, weight.data_ptr())
    engine.gradients.bind(0, gradient.data_ptr(), DtypeCode.BFLOAT16)
    return engine
