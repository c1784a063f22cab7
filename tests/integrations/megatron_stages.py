"""Trains cases of `megatron_runs.py` with the model in two pipeline stages; run by `test_megatron_stages.py`.

    python megatron_stages.py FOLDER CASES

A step has as many micro-steps as `passes` says, in Megatron's schedule of stages (1F1B). The processes that Megatron
starts to write a checkpoint import this module, and so it imports nothing large.
"""

from __future__ import annotations

import functools
import json
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_runs

STAGES = 2


class Stages(megatron_runs.Training):
    """A stage of the model, Megatron's optimizer of it, and a schedule."""

    def __init__(self, case: megatron_runs.Case, kind: str, folder: Path) -> None:
        parallel = import_module("megatron.core.parallel_state")
        transformer, gpts = import_module("megatron.core.transformer"), import_module("megatron.core.models.gpt")
        made = gpts.GPTModel

        def stage(*given: Any, **named: Any) -> Any:
            ends = {
                "pre_process": parallel.is_pipeline_first_stage(),
                "post_process": parallel.is_pipeline_last_stage(),
            }
            return made(*given, **named, **ends)

        with ExitStack() as patched:
            cut = {"pipeline_model_parallel_size": STAGES}
            for owner, name in ((parallel, "initialize_model_parallel"), (transformer, "TransformerConfig")):
                patched.enter_context(mock.patch.object(owner, name, functools.partial(getattr(owner, name), **cut)))
            patched.enter_context(mock.patch.object(gpts, "GPTModel", stage))
            super().__init__(case, kind, folder)
        config = self.model.config
        config.finalize_model_grads_func, config.no_sync_func = self.finalize, self.model.no_sync
        config.grad_scale_func = self.optimizer.scale_loss

    def step(self, number: int) -> None:
        import torch

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        mask, places = torch.ones(1, 1, 32, 32).tril() < 0.5, torch.arange(32).expand(4, 32)

        def forward(windows: Any, model: Any) -> Any:
            tokens = next(windows)
            found = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
            return found, lambda output: (output.float().mean(), {"loss": output.float().mean().item()})

        seeds = (torch.Generator().manual_seed(1000 * number + 10 * each) for each in range(self.case.passes))
        windows = [torch.randint(0, 128, (4, 33), generator=seed) for seed in seeds]
        losses = import_module("megatron.core.pipeline_parallel").get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(windows),
            model=[self.model],
            num_microbatches=self.case.passes,
            seq_length=32,
            micro_batch_size=4,
            forward_only=False,
        )
        took, norm, zeros = self.optimizer.step()
        if took:
            self.schedule.step(increment=1)
        self.said.append([*(each["loss"] for each in losses), took, None if norm is None else float(norm), zeros])


if __name__ == "__main__":
    megatron_runs.Training = Stages  # type: ignore[misc]
    megatron_runs.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
