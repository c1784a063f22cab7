"""Two pipeline stages of Megatron-Core with ours below each: the bits of stock Megatron with our rule in memory."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import prepared
import pytest

PROGRAM = Path(__file__).with_name("megatron_stages.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def test_stages_train_and_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    """Micro-steps overlap; each stage has an engine of its own, and norms and skipped steps are those of both."""

    def case(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "passes": 4, **more}

    cases = [case("bf16", steps=6), case("fp16", fp16=True, steps=5) | {"passes": 1}]
    forms = ("exact", "compact16", "compact8")
    cases += [case(f"tied {form}", tied=True, format=form, steps=6, kinds=["offload"]) for form in forms]
    cases += [case("tied", tied=True, steps=6), case("frozen", frozen=True, steps=4)]
    for layout in ("stock", "in_place"):
        empty = {"frozen": True, "kinds": ["offload"], "layout": layout, "steps": 2}
        folder = str(tmp_path / f"frozen {layout}")
        cases += [case(f"saved frozen {layout}", save=folder, **empty)]
        cases += [case(f"resumed frozen {layout}", load=folder, at=2, **empty)]
        folder, ours = str(tmp_path / layout), {"kinds": ["offload"], "layout": layout, "steps": 3}
        cases += [case(f"saved {layout}", save=folder, **ours), case(f"resumed {layout}", load=folder, at=3, **ours)]
    command = [prepared.python(), "-W", "ignore", *prepared.torchrun(2), str(PROGRAM), str(tmp_path / "paths")]
    (tmp_path / "paths").mkdir()
    done = prepared.ran([*command, json.dumps(cases)], timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name')]
    for rank in range(2):
        found = {line["name"]: line for line in lines if line["rank"] == rank}
        whole = found["bf16"]
        for name in ("bf16", "fp16"):
            assert found[name]["offload"] == found[name]["memory"], name
            assert found[name]["differing"] == [], name
            assert found[name]["state"] > 0
            assert found[name]["resident"] == 0
        assert not all(took for *_, took, _, _ in found["fp16"]["offload"])
        assert ("embedding.word_embeddings.weight" in whole["names"]) == (rank == 0)
        for layout in ("stock", "in_place"):
            assert found[f"saved {layout}"]["offload"] == whole["offload"][:3]
            assert found[f"resumed {layout}"]["offload"] == whole["offload"][3:]
            assert found[f"resumed {layout}"]["digest"] == whole["digest"]
            assert (tmp_path / layout / "offload" / "COMMIT").is_file() == (layout == "in_place")
        for name in ("tied", "frozen"):  # the first stage has nothing to train where it is frozen
            assert found[name]["offload"] == found[name]["memory"], name
            assert found[name]["differing"] == [], name
        assert (found["frozen"]["state"] == 0) == (rank == 0)
        for layout in ("stock", "in_place"):
            assert found[f"saved frozen {layout}"]["offload"] == found["frozen"]["offload"][:2]
            assert found[f"resumed frozen {layout}"]["offload"] == found["frozen"]["offload"][2:]
            assert found[f"resumed frozen {layout}"]["digest"] == found["frozen"]["digest"]
    for form in forms:  # Megatron adds up the gradients of both copies: they stay one weight
        (first,), (last,) = [line["tied"] for line in lines if line["name"] == f"tied {form}"]
        assert first == last, form
