"""A safetensors file as state to resume from: what is read of it, and what is refused before anything is."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.checkpoint.exchange import READ_NUMEL, SafetensorsSource
from offload.checkpoint.reader import Range
from offload.errors import CheckpointError
from offload.rules import ADAMW, LION, SGD_MOMENTUM

AVG, SQ = [1.0, -2.0, 3.5, 4.0, 5.0, 6.0], [0.0, 1.0, 2.0, 3.0, 4.0, 1.0 + 2**-20]


def write(path: Path, tensors: dict[str, Any], about: Any = None, **entries: Any) -> Path:
    """Write tensors as safetensors has them; `entries` replace fields of each entry that has them."""
    header: dict[str, Any] = {} if about is None else {"__metadata__": about}
    content = b""
    for name, values in tensors.items():
        tensor = torch.tensor(values, dtype=torch.float32)
        data = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        place = [len(content), len(content) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": place}
        content += data
    for name, changed in entries.items():
        header[f"state.{name}"] = {**header[f"state.{name}"], **changed}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


ADAM = {
    "state.a.exp_avg": [AVG[:3], AVG[3:]],
    "state.a.exp_avg_sq": [SQ[:3], SQ[3:]],
    "state.a.step": 3.0,
    "state.b.c.exp_avg": [],
    "state.b.c.exp_avg_sq": [],
    "state.b.c.step": 7.0,
    "other": [1.0],
}


def test_what_a_file_holds(tmp_path: Path) -> None:
    about = {"offload": json.dumps({"step": 9, "metadata": {"optimizer": "AdamW"}}), "format": "pt"}
    source = SafetensorsSource(write(tmp_path / "f", ADAM, about))
    assert (source.rule_of("a"), source.names, source.step) == (ADAMW, ["a", "b.c"], 9)
    assert source.metadata == {"optimizer": "AdamW"}
    assert [source.full_numel(name) for name in source.names] == [6, 0]
    assert [source.step_of(name) for name in source.names] == [3, 7]
    assert source.shape_of("a") == ((2, 3), (3, 1))
    assert [source.has("a", tensor) for tensor in ("exp_avg", "exp_avg_sq", "master")] == [True, True, False]
    assert source.tensors["other"] == (1,)
    assert source.mapped("state.a.exp_avg").tolist() == AVG
    assert (source.rounding, source.last_version) == (None, 0)
    assert SafetensorsSource(write(tmp_path / "g", ADAM)).step == 7  # the greatest, where nobody says


@pytest.mark.parametrize(
    ("names", "rule", "steps"),
    [
        (["exp_avg", "exp_avg_sq"], None, None),  # Adam's has counts
        (["exp_avg"], LION, [1]),
        (["momentum_buffer"], SGD_MOMENTUM, [1]),
    ],
)
def test_whose_state_it_is_and_counts_that_are_missing(
    tmp_path: Path, names: list[str], rule: Any, steps: list[int] | None
) -> None:
    path = write(tmp_path / "f", {f"state.a.{name}": AVG for name in names})
    if rule is None:
        with pytest.raises(CheckpointError, match=r"f: state\.a\.step is missing"):
            SafetensorsSource(path)
        return
    source = SafetensorsSource(path)
    assert (source.rule_of("a"), [source.step_of("a")]) == (rule, steps)


@pytest.mark.parametrize(
    ("start", "dtype"),
    [(0, torch.float32), (2, torch.float32), (1, torch.bfloat16), (5, torch.float32), (6, torch.float32)],
)
def test_ranges_are_rounded_to_where_they_go(tmp_path: Path, start: int, dtype: torch.dtype) -> None:
    source = SafetensorsSource(write(tmp_path / "f", ADAM))
    out = torch.full((min(3, 6 - start),), -1.0, dtype=dtype)
    again = torch.full_like(out, -1)
    source.read([Range("a", "exp_avg_sq", start, out), Range("a", "exp_avg", start, again)])
    assert torch.equal(out, torch.tensor(SQ[start : start + 3]).to(dtype))
    assert torch.equal(again, torch.tensor(AVG[start : start + 3]).to(dtype))


def test_a_range_of_more_than_one_buffer(tmp_path: Path) -> None:
    values = torch.arange(READ_NUMEL + 7.0)
    source = SafetensorsSource(write(tmp_path / "f", {"state.a.exp_avg": values.tolist()}))
    out = torch.zeros(READ_NUMEL + 4)
    source.read([Range("a", "exp_avg", 2, out)])
    assert torch.equal(out, values[2 : READ_NUMEL + 6])


@pytest.mark.parametrize(
    ("tensor", "tensors", "words"),
    [
        ("master", ADAM, r"state\.a\.master is missing"),
        ("exp_avg_sq", {**ADAM, "state.a.exp_avg_sq": [[0.0, 1.0, -1.0], [0.0, 0.0, 0.0]]}, "negative elements"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, tensor: str, tensors: dict[str, Any], words: str) -> None:
    source = SafetensorsSource(write(tmp_path / "f", tensors))
    with pytest.raises(CheckpointError, match=words):
        source.read([Range("a", tensor, 0, torch.zeros(6))])


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    source = SafetensorsSource(write(tmp_path / "f", ADAM))
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-60])
    with pytest.raises(CheckpointError, match="cannot be read: it ends too early"):
        source.read([Range("a", "exp_avg_sq", 0, torch.zeros(6))])


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": [1 << 62, 4], "data_offsets": [0, 0]},
        {"shape": [10**400]},
        {"shape": [-3, -1]},
        {"shape": [3.0]},
        {"shape": [1] * 1000},
        {"shape": [5]},
        {"shape": 3},
        {"dtype": "BF16"},
        {"data_offsets": [0, 10**400]},
        {"data_offsets": ["0", "12"]},
        {"data_offsets": [0]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [1000, 1024]},
    ],
    ids=lambda changed: str(changed)[:40],
)
def test_tensors_that_make_no_sense(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = write(tmp_path / "f", ADAM, **{"a.exp_avg": changed})
    with pytest.raises(CheckpointError, match=r"f( is damaged)?: .*"):
        SafetensorsSource(path)


@pytest.mark.parametrize(
    ("tensors", "about", "words"),
    [
        *(
            ({"state.b.c.step": step}, None, r": state\.b\.c\.step")
            for step in (math.nan, math.inf, -1.0, 0.5, 2.0**62)
        ),
        ({"state.\ud800.exp_avg": AVG}, None, ""),  # a name that nobody can write
        ({}, {"offload": "[]"}, ""),
        ({}, {"offload": "[" * 100_000}, ""),
        ({}, {"offload": '{"step": "x"}'}, ""),
        ({}, {"offload": '{"step": -1}'}, ""),
        ({}, {"offload": '{"metadata": []}'}, ""),
        ({}, {"offload": '{"metadata": {"optimizer": "\\ud800"}}'}, ""),
        ({}, {"offload": 3}, ""),
        ({}, [], ""),
    ],
    ids=lambda given: ascii(given)[:40],
)
def test_what_a_file_says_that_makes_no_sense(
    tmp_path: Path, tensors: dict[str, Any], about: Any, words: str
) -> None:
    with pytest.raises(CheckpointError, match=f"f is damaged{words}"):
        SafetensorsSource(write(tmp_path / "f", {**ADAM, **tensors}, about))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "its header is too long"),
        (b"hello, this is no safetensors file", "its header is too long"),
        (struct.pack("<Q", 4) + b"{{{{", "cannot be read as safetensors"),
        (struct.pack("<Q", 2) + b"[]", "f is damaged"),
        (struct.pack("<Q", 2) + b"{}", r"holds no optimizer state: there is no state\.<parameter>\.exp_avg"),
    ],
)
def test_what_is_no_file_of_state(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        SafetensorsSource(tmp_path / "f")
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsSource(tmp_path / "none")
