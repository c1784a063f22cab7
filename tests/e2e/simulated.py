"""The optimizers over a simulated GPU, with everything that the host does to memory compared with its lanes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from world import SimulatedDevice
from world.device import spans_of

import offload
from offload.checkpoint.manifest import COMMIT_NAME
from offload.dtypes import ITEM_BYTES
from offload.kernels.table import as_segment_rows
from offload.protocols import DeviceLane
from offload.rules import ADAM
from offload.tiers.directories import DirectoryFolder


class OnDevice(offload.AdamW):
    """`AdamW` whose weights, in host memory, count as lying on a device."""

    next_device: SimulatedDevice | None = None

    def __init__(self, *arguments: Any, device: SimulatedDevice, **options: Any) -> None:
        OnDevice.next_device = device
        super().__init__(*arguments, **options)

    def _find_device(self, parameters: list[torch.Tensor]) -> SimulatedDevice | None:
        return OnDevice.next_device

    def _open(self, config: offload.OffloadConfig) -> None:
        super()._open(config)
        watch(self.engine, self._holder.device)  # type: ignore[arg-type]


class OnDeviceAdam(OnDevice):
    """The same with Adam's weight decay."""

    rule, kind, torch_class = ADAM, "Adam", torch.optim.Adam


def watch(engine: offload.Engine, device: SimulatedDevice) -> None:
    """Tell the device of all that the host's lanes do to memory from now on."""
    parts = engine._parts

    def look(table: Any) -> None:
        for row in as_segment_rows(table):
            for start, end, writes in spans_of(row):
                device.host_access(start, end - start, writes=writes)

    def submit(op: int, table: Any, plain: Any = parts.kernel.submit) -> None:
        look(table)
        plain(op, table)

    def submit_sealed(op: int, table: Any, *state: Any, plain: Any = parts.kernel.submit_sealed) -> Any:
        look(table)
        return plain(op, table, *state)

    parts.kernel.submit = submit  # type: ignore[method-assign]
    parts.kernel.submit_sealed = submit_sealed  # type: ignore[method-assign]

    def add(rows: Any, dtype: Any, plain: Any = parts.kernel.add) -> None:
        for target, source, numel in rows.tolist():
            device.host_access(source, int(ITEM_BYTES[dtype]) * numel, writes=False)
            device.host_access(target, int(ITEM_BYTES[dtype]) * numel, writes=True)
        plain(rows, dtype)

    parts.kernel.add = add  # type: ignore[method-assign]
    for tier in parts.tiers:

        def read(request: Any, plain: Any = tier.read) -> None:
            device.host_access(request.address, request.nbytes, writes=True)
            plain(request)

        def write(request: Any, plain: Any = tier.write) -> None:
            device.host_access(request.address, request.nbytes, writes=False)
            plain(request)

        tier.read, tier.write = read, write  # type: ignore[method-assign]


def add_early(device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
    """Have gradients of further passes be added before their copies have come."""
    kind: Any = type(device.mark(DeviceLane.LEAVING))
    plain = kind.wait

    def wait(mark: Any) -> None:
        if threading.current_thread().name != "offload-add":
            plain(mark)

    patch.setattr(kind, "wait", wait)


def hung_commit(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Have commits of checkpoints wait: return the events that one has been reached, and that it may go on."""
    reached, go_on = threading.Event(), threading.Event()
    plain = DirectoryFolder.write

    def write(folder: DirectoryFolder, name: str, data: bytes, **options: Any) -> None:
        if name == COMMIT_NAME:
            reached.set()
            assert go_on.wait(60.0)
        plain(folder, name, data, **options)

    monkeypatch.setattr(DirectoryFolder, "write", write)
    return reached, go_on
