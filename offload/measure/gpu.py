"""Rates of a GPU and its link, through the lanes and the device that a session uses."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from offload._native import CompletionQueue
from offload.backends import BACKENDS
from offload.device.lanes import GpuLanes
from offload.formats import EXACT_ADAMW, StateSpec
from offload.kernels.table import trial_bytes, trial_table
from offload.measure.samples import Sample
from offload.protocols import DeviceLane, Mark

COPY_BYTES = 64 << 20
"""Most bytes of one copy."""
COPIES = 8
"""Most copies, or updates, of a run."""
LONGEST_RUN_S = 1.5
"""Most seconds of a run of `COPIES` copies. A quarter of it, for copies beside the CPU's update, is longer than one
run of that update."""

GATE_COPIES = 1
MOST_GATE_COPIES = 32
"""Number of copies that hold work back until all of it is enqueued: at first, and at most."""

COPIES_BESIDE = 128
"""Most copies of a run beside the CPU's update."""
MOST_BESIDE = 64
"""Most runs of the CPU's update beside these copies."""
UPDATE_NUMEL = 1 << 26
"""Most elements of an update on the GPU."""

H2D, D2H, UPDATE = DeviceLane.H2D, DeviceLane.D2H, DeviceLane.UPDATE
GATE = DeviceLane.LEAVING
"""The lane of the gate: nothing that is measured is on it."""


@contextlib.contextmanager
def gpu_probe(update: Callable[[], float]) -> Iterator[list[GpuProbe]]:
    """Open a probe of the current accelerator for the time of this context, and let it warm up.

    Args:
        update: See `GpuProbe`.

    Yields:
        A list of the probe; an empty list if there is no accelerator that offload uses.
    """
    import torch

    with contextlib.ExitStack() as ends:
        probes = []
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and accelerator.type in BACKENDS:
            from offload.device.accelerator import AcceleratorDevice

            device = AcceleratorDevice()
            lanes = GpuLanes(device, CompletionQueue())
            ends.callback(lanes.close)
            # Of at most a quarter of the free memory, as an element takes 16 bytes; whole sectors of 1024 elements.
            numel = min(UPDATE_NUMEL, device.free_bytes() // 64) // 1024 * 1024
            probe = GpuProbe(lanes, EXACT_ADAMW, numel, update=update)
            ends.callback(probe.close)
            probe.memory_bytes = device.memory_bytes
            probe.warm_up()
            probes.append(probe)
        yield probes


class GpuProbe:
    """Measures copies between pinned host memory and a GPU, and updates there.

    In `rates`, the measured work waits on the device for a *gate*: copies on another lane, which go on while the host
    enqueues that work. Without the gate the time of the host's calls would be measured where they take longer than
    the work. If the gate has ended before all work was enqueued, the run is repeated with twice as many copies in
    the gate, up to `MOST_GATE_COPIES`.

    Gradients and weights of the update have 16 bits.

    Args:
        lanes: The device's, with nothing on them.
        state: Format of the state that is updated.
        numel: Elements of an update.
        run_s: Most seconds of a run of several copies or updates; a quarter of that beside the CPU's update. The time
            that a run takes determines how many copies or updates the next run of its kind has.
        update: Runs the CPU's update for a while and returns its rate; None to leave out copies beside it.
        node: The memory node of the host's side of copies; None for any.
        copy_bytes: Most bytes of one copy; twice as many are allocated in host memory.

    Attributes:
        memory_bytes: Size of the GPU's memory, where that is known.
        copy_bytes: Size of one copy.

    Raises:
        OffloadError: If the device fails or has no memory for it.
    """

    def __init__(
        self,
        lanes: GpuLanes,
        state: StateSpec,
        numel: int,
        run_s: float = LONGEST_RUN_S,
        update: Callable[[], float] | None = None,
        node: int | None = None,
        copy_bytes: int = COPY_BYTES,
    ) -> None:
        self.memory_bytes = 0
        self.lanes = lanes
        self._run_s = run_s
        self._update = update
        self._repeats: dict[tuple[object, ...], int] = {}  # copies or updates of the next run, by kind of run
        self._gate_copies = GATE_COPIES
        nbytes = numel * trial_bytes(state)
        self.copy_bytes = size = min(nbytes // 2, copy_bytes)
        # Bytes that one copy, or one update, counts for.
        self._bytes = {H2D: size, D2H: size, UPDATE: int(numel * state.item_bytes)}
        self._ends = contextlib.ExitStack()  # what frees the memory
        # Device memory for the tensors of an update, which copies of both directions use as well.
        memory = lanes.device.allocate(nbytes)
        self._ends.callback(lanes.device.release, memory)
        try:
            arena = lanes.allocate_arena(2 * size, node=node)
            self._ends.callback(lanes.free_arena, arena)
            # Device memory is undefined until here. The arena's is 0: copy its first bytes over all of the device's.
            zeros = ((memory + at, arena.address, min(size, nbytes - at)) for at in range(0, nbytes, size))
            lanes.copy_to_device([*zeros])
        except BaseException:  # the caller has no probe to close
            self.close()
            raise
        host = arena.address
        self._work: dict[DeviceLane, Callable[[], None]] = {  # each enqueues one copy or update
            H2D: partial(lanes.copy, H2D, memory, host, size),
            D2H: partial(lanes.copy, D2H, host + size, memory + size, size),
            UPDATE: self._update_device,
            GATE: partial(lanes.copy, GATE, host + size, memory + size, size),
        }
        self._table = trial_table(state, memory, numel)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples to take: of copies to and from the GPU, and of updates there."""
        yield "copies to the GPU", partial(self.rates, H2D, suffix=" alone")
        yield "copies from the GPU", partial(self.rates, D2H, suffix=" alone")
        yield "copies both ways", partial(self.rates, H2D, D2H)
        if self._update is not None:
            yield "copies beside the update", partial(self.beside, self._update)
        yield "update on the GPU", partial(self.rates, UPDATE)

    def warm_up(self) -> None:
        """Take all samples twice: the first may compile or touch memory, and determines the length of the second."""
        for _, sample in 2 * [*self.samples()]:
            sample()

    def rates(self, *lanes: DeviceLane, suffix: str = "") -> dict[str, float]:
        """Measure lanes that work at the same time, in one run.

        Args:
            lanes: The lanes.
            suffix: What is added to the names of the rates, such as " alone".

        Returns:
            The bytes a second that each lane copied, or of whose state it updated, by name: "gpu/h2d alone".
        """
        while True:
            gate = self.gate(lanes)
            marks = self._enqueue_run(lanes, suffix)
            opened_early = gate.reached()  # before all was enqueued: the host's calls were timed, too
            rates = self._finish_run(marks, suffix, self._run_s, most=COPIES)
            if not opened_early or self._gate_copies >= MOST_GATE_COPIES:
                return rates
            self._gate_copies *= 2

    def _update_device(self) -> None:
        """Enqueue an update on the device; its table is sent before."""
        self.lanes.device.update(self.lanes.device.send_table(self._table))

    def close(self) -> None:
        """Free all memory."""
        self._ends.close()

    def gate(self, lanes: Sequence[DeviceLane]) -> Mark:
        """Enqueue the gate's copies, let lanes wait for them on the device, and return the mark after them."""
        for _ in range(self._gate_copies):
            self._work[GATE]()
        gate = self.lanes.device.mark(GATE, timed=False)
        for lane in lanes:
            self.lanes.device.follow(lane, gate)
        return gate

    def _enqueue_run(self, lanes: Sequence[DeviceLane], suffix: str) -> dict[DeviceLane, tuple[Mark, Mark]]:
        """Enqueue a run of copies or updates on each lane; return, by lane, the marks before and after its run."""
        device = self.lanes.device
        began = {lane: device.mark(lane) for lane in lanes}
        for _ in range(self._repeats.get((*lanes, suffix), 1)):
            for lane in lanes:
                self._work[lane]()
        return {lane: (began[lane], device.mark(lane)) for lane in lanes}

    def _finish_run(
        self, marks: Mapping[DeviceLane, tuple[Mark, Mark]], suffix: str, run_s: float, most: int
    ) -> dict[str, float]:
        """Wait for a run, return its rates, and determine the size of the next run of its kind.

        Args:
            marks: What `_enqueue_run` has returned.
            suffix: What is added to the names of the rates; with the lanes, it is the run's kind.
            run_s: Seconds that the next run should take.
            most: Most copies or updates of the next run.
        """
        kind = (*marks, suffix)
        repeats = self._repeats.get(kind, 1)
        rates = {}
        longest_s = 1e-9
        for lane, (began, ended) in marks.items():
            ended.wait()
            seconds = max(ended.time_s() - began.time_s(), 1e-9)
            rates[f"gpu/{lane.name.lower()}{suffix}"] = repeats * self._bytes[lane] / seconds
            longest_s = max(longest_s, seconds)
        self._repeats[kind] = max(1, min(most, int(repeats * run_s / longest_s)))
        return rates

    def beside(self, update: Callable[[], float]) -> dict[str, float]:
        """Measure copies both ways beside the CPU's update.

        Args:
            update: See `GpuProbe`.

        Returns:
            The copies' rates, and "gpu/speed of cpu": the part of its rate alone that the CPU's update keeps.
        """
        suffix = " beside cpu"
        alone_rate = update()
        marks = self._enqueue_run([H2D, D2H], suffix)
        update_rates = [update()]
        while len(update_rates) < MOST_BESIDE and not any(ended.reached() for _, ended in marks.values()):
            update_rates.append(update())
        rates = self._finish_run(marks, suffix, self._run_s / 4, most=COPIES_BESIDE)
        # The last run of the update is left out, unless it is the only one: copies may have ended during it.
        beside_rate = statistics.mean(update_rates[:-1] or update_rates)
        return rates | {"gpu/speed of cpu": beside_rate / alone_rate}
