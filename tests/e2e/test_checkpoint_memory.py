"""Host memory stays within the plan while checkpoints are written and loaded, and afterwards."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import prepared
import pytest

PROGRAM = Path(__file__).with_name("checkpoint_memory.py")
NOISE_BYTES = 4 << 20
"""What interpreter, torch and allocator take besides: a sixth of a subgroup's state there."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "streamed": ("bfloat16", {"host_memory": 0, "io_backend": "threads"}),
    "partly resident": ("bfloat16", {"host_memory": "50MB", "io_backend": "threads"}),
    "masters are weights": ("float32", {"host_memory": 0, "io_backend": "asyncio"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_keep_to_the_plan(kind: str, tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not tell peaks")
    dtype, settings = KINDS[kind]
    command = [
        sys.executable,
        str(PROGRAM),
        str(tmp_path),
        dtype,
        json.dumps({**settings, "staging_memory": "50MiB"}),
    ]
    # What is freed goes back at once; else the allocator keeps what it likes of the program's own gradients.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = prepared.ran(command, env=environment)
    for which, session in json.loads(done.stdout.splitlines()[-1]).items():
        phases = session["phases"]
        # Gradients of a weight each are gone with their step here; the plan counts them all.
        between = phases["steps"]["after"] if "steps" in phases else session["plan"]
        for phase, used in phases.items():
            most = min(session["plan"], between + session["buffers"])
            assert used["peak"] <= most + NOISE_BYTES, f"{which}, {phase}: {used['peak']} bytes of {most}"
            assert used["after"] <= between + NOISE_BYTES, f"{which}: {phase} keeps memory"
