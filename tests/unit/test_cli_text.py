import math
import os
from pathlib import Path

import pytest
import torch

from offload.cli import text as text_module
from offload.cli.text import Text, draw_windows, load_text
from offload.errors import ConfigError


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
