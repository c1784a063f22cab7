"""What `offload train` trains: a model of some size, on text."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from offload.cli import text as text_module
from offload.cli.model import Shape, build_model, choose_shape, parameter_groups
from offload.cli.text import Text, draw_windows, load_text
from offload.errors import ConfigError


@pytest.mark.parametrize(
    "target", [200_000, 1_000_000, 25_000_000, 125_000_000, 10**9, 7 * 10**9, 70 * 10**9, 10**12]
)
def test_the_shape_has_the_size_asked_for_and_sensible_proportions(target: int) -> None:
    shape = choose_shape(target)
    assert shape.numel == pytest.approx(target, rel=0.12)
    assert 30 <= shape.hidden / shape.layers <= 500
    head_numel = shape.hidden // shape.heads
    assert head_numel * shape.heads == shape.hidden
    assert head_numel % 2 == 0  # Rotary embeddings turn pairs.


def test_fixed_depth_or_width_is_kept() -> None:
    assert choose_shape(25_000_000, layers=2).layers == 2
    assert choose_shape(25_000_000, layers=2).numel == pytest.approx(25_000_000, rel=0.12)
    assert choose_shape(25_000_000, hidden=256).hidden == 256
    assert choose_shape(25_000_000, hidden=256).numel == pytest.approx(25_000_000, rel=0.12)
    assert choose_shape(25_000_000, layers=1, hidden=32) == Shape(1, 32)


@pytest.mark.parametrize(
    ("target", "fixed", "field"),
    [
        (25_000_000, {"layers": 0}, "--layers"),
        (25_000_000, {"hidden": 0}, "--hidden"),
        (25_000_000, {"hidden": 40}, "--hidden"),
        (10, {}, "--params"),
        (10**9, {"hidden": 16}, "--params"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(target: int, fixed: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_shape(target, **fixed)
    assert caught.value.field == field


@pytest.mark.parametrize("shape", [Shape(1, 32), Shape(3, 144), Shape(2, 256)])
@pytest.mark.slow
def test_the_size_is_that_of_the_model(shape: Shape) -> None:
    model = build_model(shape, seq=16, dtype=torch.float32, device="cpu", seed=0)
    assert shape.numel == sum(parameter.numel() for parameter in model.parameters())


def test_weights_depend_on_the_seed_only() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        torch.rand(7)
        model = build_model(Shape(1, 32), seq=16, dtype=torch.bfloat16, device="cpu", seed=seed)
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(1), weights(2), strict=True))
    assert {weight.dtype for weight in weights(1)} == {torch.bfloat16}


def test_a_model_is_never_there_in_a_larger_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter is made in fp32 and cast. (Its draws may be others than in fp32: torch 2.11's are.)"""
    made = set()
    register = torch.nn.Module.register_parameter

    def look(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        made.add(None if parameter is None else parameter.dtype)
        register(module, name, parameter)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", look)
    found = build_model(Shape(2, 32), seq=16, dtype=torch.bfloat16, device="cpu", seed=0)
    assert torch.bfloat16 in made
    assert torch.float32 not in made
    assert torch.get_default_dtype() == torch.float32
    assert {weight.dtype for weight in found.parameters()} == {torch.bfloat16}


def test_rotary_frequencies_keep_their_precision() -> None:
    model = build_model(Shape(1, 32), seq=16, dtype=torch.bfloat16, device="cpu", seed=0)
    assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {torch.float32}


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build_model(Shape(2, 32), seq=16, dtype=torch.float32, device="cpu", seed=0)
    matrices, vectors = parameter_groups(model, weight_decay=0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() == 2 for parameter in matrices["params"])
    assert all(parameter.dim() == 1 for parameter in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


# Text


def _bytes(text: Text) -> bytes:
    return bytes(text.values.tolist())


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("héllo", encoding="utf-8")
    text = load_text(str(file), min_bytes=1)
    assert _bytes(text) == "héllo\n".encode()
    assert text.files == 1


def test_a_folder_is_read_recursively_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.md", "a/z.txt", "a/deeper/y.rst", "A.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name + "\n", encoding="utf-8")
    text = load_text(str(tmp_path), min_bytes=1)
    assert _bytes(text) == b"A.txt\nb.md\na/z.txt\na/deeper/y.rst\n"
    assert text.files == 4


def test_binary_hidden_empty_and_linked_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text\n", encoding="utf-8")
    (tmp_path / "zeros.bin").write_bytes(b"abc\0def")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("hidden", encoding="utf-8")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden", encoding="utf-8")
    (tmp_path / "link.txt").symlink_to(tmp_path / "text.txt")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(tmp_path / "pipe")  # Opening it would block.
    text = load_text(str(tmp_path), min_bytes=1)
    assert _bytes(text) == b"text\n"


def test_a_character_may_straddle_the_part_that_is_looked_at(tmp_path: Path) -> None:
    content = b"a" * 8191 + "é".encode() + b"b\n"
    (tmp_path / "a.txt").write_bytes(content)
    assert _bytes(load_text(str(tmp_path), min_bytes=1)) == content


def test_reading_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "TEXT_MAX_BYTES", 10)
    for name in "abc":
        (tmp_path / name).write_text(name * 6 + "\n", encoding="utf-8")
    text = load_text(str(tmp_path), min_bytes=1)
    assert _bytes(text) == b"aaaaaa\nbbb\n"
    assert text.files == 2


@pytest.mark.slow
def test_the_default_is_the_standard_library_the_same_every_time() -> None:
    text = load_text(None, min_bytes=1_000_000)
    assert torch.equal(text.values, load_text(None, min_bytes=1).values)
    assert b"import collections" in _bytes(text)
    assert "standard library" in text.source
    # Python source uses fewer than 256 byte values, unevenly.
    assert 2.5 < text.byte_entropy() < 4.0


@pytest.mark.parametrize("kind", ["missing", "empty folder", "only binary", "binary file", "too short"])
def test_bad_input_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path
    if kind == "missing":
        path = tmp_path / "nowhere"
    elif kind in ("only binary", "binary file"):
        (tmp_path / "binary").write_bytes(b"\0" * 100)
        path = tmp_path / "binary" if kind == "binary file" else tmp_path
    elif kind == "too short":
        (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    with pytest.raises(ConfigError, match="--data") as caught:
        load_text(str(path), min_bytes=100)
    assert caught.value.value == str(path)


def test_byte_entropy_of_an_even_mixture_is_the_logarithm_of_its_size() -> None:
    assert Text("", 1, torch.arange(16, dtype=torch.uint8)).byte_entropy() == pytest.approx(math.log(16))
    assert Text("", 1, torch.zeros(16, dtype=torch.uint8)).byte_entropy() == 0


def test_windows_depend_on_their_generator_only() -> None:
    values = torch.randint(256, (1000,), dtype=torch.uint8)

    def draw(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        torch.rand(5)  # The global generator's state does not matter.
        return [draw_windows(values, generator, batch=3, seq=10) for _ in range(4)]

    first = draw(1)
    assert all(windows.shape == (3, 11) and windows.dtype == torch.int64 for windows in first)
    assert all(torch.equal(a, b) for a, b in zip(first, draw(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, draw(2), strict=True))


def test_the_shortest_text_has_one_window() -> None:
    values = torch.arange(11, dtype=torch.uint8)
    assert draw_windows(values, torch.Generator(), batch=2, seq=10).tolist() == [list(range(11))] * 2
