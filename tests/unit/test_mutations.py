"""Mistakes are made where they should be, tests find them, and they are put right again."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from mutations import ROOT, Copy, Source, drawn

TEXT = '''
class Door:
    """Has 1 lock."""

    limit: int = 3

    def __repr__(self) -> str:
        return f"door {self.limit + 1}"

    def open(self, keys: Annotated[int, 1] = 2) -> bool:
        """Open it with 1 key."""
        invariant(self.shut, f"{keys + 1}")
        self.turns: Annotated[int, 1] = keys
        log.info("%d", 1)
        while keys and not self.stuck:
            if (keys) is not (self.key):
                break
            self.turns += keys - 7
            turn(slowly=True)
        raise ValueError(f"{keys - 1}", 1)
'''

MISTAKES = [
    ("self.turns: Annotated[int, 1] = keys", "pass"),
    ("while keys and not self.stuck:", "while not (keys and not self.stuck):"),
    ("while keys and not self.stuck:", "while keys or not self.stuck:"),
    ("while keys and not self.stuck:", "while keys and self.stuck:"),
    ("if (keys) is not (self.key):", "if (keys) is (self.key):"),
    ("break", "continue"),
    ("self.turns += keys - 7", "pass"),
    ("self.turns += keys - 7", "self.turns += keys + 7"),
    ("self.turns += keys - 7", "self.turns += keys - 8"),
    ("turn(slowly=True)", "pass"),
    ("turn(slowly=True)", "turn(slowly=False)"),
]


def test_mistakes_are_made_in_code_alone() -> None:
    mutations = Source("door.py", TEXT).mutations()
    assert sorted(mutation.described(TEXT)[1:] for mutation in mutations) == sorted(MISTAKES)


def test_a_seed_draws_the_same_mistakes() -> None:
    first = list(islice(drawn(35, ["offload/session/*"]), 20))
    assert first == list(islice(drawn(35, ["offload/session/*"]), 20))
    assert len({mutation for mutation, _ in first}) == 20
    assert all(mutation.file.startswith("offload/session/") for mutation, _ in first)


@pytest.mark.slow
def test_a_mistake_is_found_and_put_right(tmp_path: Path) -> None:
    copy, file, tests = Copy(tmp_path), "offload/session/door.py", "tests/unit/test_door.py"
    door = copy.tree / file
    door.write_text("def is_open(turns):\n    return turns > 1\n")
    check = "from offload.session.door import is_open\n\n\ndef test_turns():\n    assert not is_open(1)\n"
    (copy.tree / tests).write_text(check)
    assert copy.failing([tests]) is None
    before = door.read_bytes(), door.stat().st_mtime_ns
    wrong, _ = Source(file, door.read_text()).mutations()
    with suppress(KeyboardInterrupt), copy.mistaken(wrong):
        assert "turns >= 1" in door.read_text()
        assert copy.failing([tests]) == f"{tests}::test_turns"
        raise KeyboardInterrupt
    assert (door.read_bytes(), door.stat().st_mtime_ns) == before
    assert not (ROOT / file).exists()
