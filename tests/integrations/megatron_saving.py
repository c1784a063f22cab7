"""Trains the tiny GPT of `megatron_runs.py` with all state on a path, and saves; run in ranks by `megatron_kills.py`.

    python megatron_saving.py FOLDER STEPS PLAN

PLAN is JSON: `saves`, by the steps that are done then, each behind training or waited for; `keep`, how many
checkpoints are left there, 0 for all; `load`, the one to go on from; and fields of `megatron_runs.Case`. Checkpoints
are FOLDER/checkpoints/iter_0000004, as Megatron-LM's, which also finalizes what was saved behind training in each
step. The processes that Megatron starts to write a checkpoint import this module, and so it imports nothing large.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_runs import Case, Training, play_cuda
from small import digest, say

MARK = "metadata.json"
"""Megatron's, in a checkpoint that is whole."""


def whole_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints that are whole, by the steps that they have."""
    return {int(mark.parent.name.removeprefix("iter_")): mark.parent for mark in folder.glob(f"iter_*/{MARK}")}


class Saving(Training):
    """A training that saves to a folder for each save, behind it or not, and notes it when that is whole."""

    def __init__(self, case: Case, folder: Path, keep: int) -> None:
        super().__init__(case, "offload", folder / "paths")
        self.folder, self.keep = folder / "checkpoints", keep

    def begin(self, done: int, behind: bool) -> None:
        """Save what so many steps have made."""
        import torch

        began_s, note = time.monotonic(), import_module("dying").note

        def saved() -> None:
            note(saved=done, took_s=time.monotonic() - began_s)
            there = whole_in(self.folder)
            if self.keep and os.environ["RANK"] == "0":
                for old in sorted(there)[: -self.keep]:
                    shutil.rmtree(there[old])

        torch.distributed.barrier()
        self.begin_save(str(self.folder / f"iter_{done:07}"), behind, saved)


def main(folder: Path, steps: int, plan: dict[str, Any]) -> None:
    import torch

    dying = import_module("dying")
    os.setpgid(0, 0)  # what Megatron forks to write is of this group, whatever becomes of this process
    saves, keep, at = plan.pop("saves"), plan.pop("keep"), 0
    if plan.get("load"):
        at = int(Path(plan["load"]).name.removeprefix("iter_"))
    play_cuda()
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    training = Saving(Case("saving", at=at, **plan), folder, keep)
    if at:
        training.load(plan["load"])
    for number in range(at, steps):
        training.queue.maybe_finalize_async_calls(blocking=False)
        dying.step(number)
        if str(number) in saves:
            training.begin(number, saves[str(number)])
        training.step(number)
    training.queue.maybe_finalize_async_calls(blocking=True)
    state = training.state()
    weights = [*state], digest(state.values())
    say(rank=torch.distributed.get_rank(), weights=weights, losses=training.said)
    training.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
