"""Partitions in a file: what is brought as they are gathered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.errors import ConfigError
from offload.weights.mapping import MappedFile, ReadAheadThread
from offload.weights.partitions import Partitions


def test_layers_are_brought_as_their_tensors_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for several of a layer, and again when an update has let go of them."""
    model = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)])
    model.append(torch.nn.Linear(8, 8))  # lies elsewhere
    parts = {each: torch.arange(each.numel(), dtype=torch.bfloat16) for each in model.parameters()}
    before = {each: part.clone() for each, part in parts.items()}
    inside = [each for layer in model[:3] for each in layer.parameters()]
    partitions = Partitions(tmp_path, [parts[each].nbytes for each in inside])
    for each in inside:
        partitions.move(parts[each])
    partitions.use_layers(model, parts.__getitem__)
    assert all(torch.equal(parts[each], before[each]) for each in model.parameters())
    begin = min(parts[each].data_ptr() for each in inside)
    brought: list[int] = []

    def bring(file: MappedFile, offset: int, nbytes: int, *, to_write: bool = False) -> None:
        assert nbytes == sum(part.nbytes for part in (parts[inside[0]], parts[inside[1]]))
        brought.append(offset // nbytes)

    monkeypatch.setattr(MappedFile, "fault_in", bring)
    monkeypatch.setattr(ReadAheadThread, "read_ahead", lambda *_: None)
    assert begin == parts[inside[0]].data_ptr()
    for number, weight in ((0, "weight"), (0, "bias"), (1, "weight"), (2, "bias"), (3, "weight"), (2, "weight")):
        partitions.begin([parts[getattr(model[number], weight)]])
    assert brought == [0, 1, 2]
    partitions.begin(parts[each] for each in reversed(inside))
    partitions.note_written()
    partitions.begin(parts[each] for each in inside)
    assert brought == [0, 1, 2, 1, 0, 0, 1, 2]


def test_the_last_tensor_takes_the_file_with_it(tmp_path: Path) -> None:
    """Room is reserved, nothing has a name, and tensors outlive what has made them."""
    tensor = torch.ones(1 << 20)
    partitions = Partitions(tmp_path, [tensor.nbytes])
    partitions.move(tensor)
    assert not [*tmp_path.iterdir()]
    del partitions
    assert tensor.sum().item() == 1 << 20
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del tensor
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    with pytest.raises(ConfigError, match="path"):
        Partitions(tmp_path / "missing", [1])
