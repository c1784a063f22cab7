"""Trainings whose weights wait in host memory for the test accelerator (`CPUOffloadPolicy` of FSDP2), by torchrun.

copied_ranks.py FOLDER [[SCENARIO,ARGUMENT...],...]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mirror import same_bits
from test_overlap_backward_ranks import Ranks, beside_off, plain

import offload
from accelerator import late
from accelerator.ranks import begin, serve
from offload.optim import hiding, shards

COPIED = "fsdp2 copied"


def made(folder: Path, overlap: str = "backward") -> Ranks:
    return Ranks(folder, COPIED, overlap, "exact", torch.bfloat16)


def bits(folder: Path, kind: str, overlap: str, form: int, steps: int) -> None:
    """All bits are those of "off", and of plain steps 0.9 of the bytes are confirmed."""
    late.delays(0, 100, seed=dist.get_rank())
    beside_off(folder, kind, [overlap], [form], steps)


def arrivals(training: Ranks) -> int:
    return sum(bound.arrivals for bound in training.optimizer._weights.bound.values())


def before_the_end(training: Ranks, act: Callable[[], None]) -> None:
    """Have the next backward pass act when FSDP2 has reduced all groups but the first, and has waited for nothing."""
    states = training.called._get_fsdp_state()._state_ctx.all_states
    end = states[0]._root_post_backward_final_callback

    def acting() -> None:
        for state in states:
            del state._root_post_backward_final_callback
        act()
        end()

    for state in states:  # the one whose output comes first has it called
        state._root_post_backward_final_callback = acting


def looks(folder: Path) -> None:
    """What has not come is not waited for, and not read; what has come is read before backward ends."""
    training = made(folder / "looks")
    with training.optimizer as optimizer:
        for _ in range(3):
            plain(training)
            training.settle()
            optimizer.step()
            optimizer.zero_grad()
        stream = training.called._get_fsdp_state()._comm_ctx.reduce_scatter_stream
        seen: list[Any] = []
        before = arrivals(training)

        def look_and_release() -> None:
            seen.append((arrivals(training) - before, late.is_waited_for(stream)))
            late.release(stream)

        before_the_end(training, look_and_release)
        late.hold(stream)
        training.backward()
        assert seen == [(0, False)]
        in_a_pass = arrivals(training) - before
        assert in_a_pass == sum(parameter.grad is not None for parameter in training.model.parameters()) > 6
        training.settle()
        optimizer.step()
        optimizer.zero_grad()
        found = optimizer.metrics()
        assert found["speculation/confirmed_bytes"] == found["streamed_bytes"]
        # What was reduced before the third layer's weights are asked for has come by then.
        before = arrivals(training)
        training.model[2].register_full_backward_hook(lambda *_: stream.synchronize())
        before_the_end(training, lambda: seen.append(arrivals(training) - before))
        training.backward()
        assert 0 < seen[1] < in_a_pass
        assert arrivals(training) - before == in_a_pass
        optimizer.overlap_backward(training.called)  # as often as one likes
        training.optimizer.overlap_forward(training.called).remove()
        before = arrivals(training)
        training.backward()
        assert arrivals(training) - before == in_a_pass


def models(folder: Path) -> None:
    """A model has to be given, once; a step that was refused for that has changed nothing."""
    found = []
    for overlap in ("off", "backward", "both"):
        training = made(folder / overlap, overlap)
        groups = [group for group in shards.fsdp_groups(training.called) if group.fsdp_params]
        assert all(("post_backward" in vars(group)) is (overlap != "off") for group in groups)
        training.optimizer.close()
        assert not any("post_backward" in vars(group) for group in groups)
        config = {"host_memory": 0, "paths": [folder / overlap], "subgroup_numel": 4096, "overlap": overlap}
        training.optimizer = offload.AdamW(training.model.named_parameters(), lr=1e-2, offload=config)
        with training.optimizer as optimizer:
            if overlap == "both":
                optimizer.overlap_forward(training.called)  # which is enough
            for step in range(3):
                training.backward()
                if overlap == "backward" and not step:
                    with pytest.raises(offload.ConfigError, match=r"overlap_backward\(model\) before the first step"):
                        optimizer.step()
                    with pytest.raises(offload.ConfigError, match=r"leave it out|DistributedDataParallel"):
                        optimizer.overlap_backward(training.called, comm_hook=print)
                    optimizer.overlap_backward(training.called)
                optimizer.step()
                optimizer.zero_grad()
            found.append(training.everything())
    for others in found[1:]:
        assert all(map(same_bits, found[0], others))


def chosen(folder: Path) -> None:
    """Where a model has been given "auto" tries backward behind the eighth step; it does not without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hiding, "MOST_TRIAL", hiding.TRIAL)  # however short iterations are
        for gives in (True, False):
            training = made(folder / str(gives), "auto" if gives else "off")
            if not gives:
                training.optimizer.close()
                config = {"host_memory": 0, "paths": [folder / str(gives)], "overlap": "auto"}
                training.optimizer = offload.AdamW(training.model.named_parameters(), lr=1e-2, offload=config)
            with training.optimizer as optimizer:
                for _ in range(9):
                    plain(training)
                    optimizer.step()
                    optimizer.zero_grad()
                assert optimizer.engine.speculates is gives
                assert (optimizer._overlap.pace.typical_s is not None) is gives


def raised(folder: Path) -> None:
    """A backward pass that raises leaves nothing that a later step reads."""

    class Mine(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Mine

    found = []
    for overlap in ("off", "backward"):
        training = made(folder / overlap, overlap)
        with training.optimizer as optimizer:
            for step in range(8):
                if step == 4:
                    handle = training.model[2].register_full_backward_hook(fail)
                    with pytest.raises(Mine):
                        training.backward()
                    handle.remove()
                    training.called.reset_iter_state()
                    optimizer.zero_grad()
                plain(training)
                training.settle()
                optimizer.step()
                optimizer.zero_grad()
            if overlap != "off":
                metrics = optimizer.metrics()
                assert metrics["speculation/confirmed_bytes"] == metrics["streamed_bytes"]
            found.append(training.everything())
    assert all(map(same_bits, *found))


if __name__ == "__main__":
    begin()
    torch.set_num_threads(1)
    serve({"bits": bits, "looks": looks, "models": models, "chosen": chosen, "raised": raised})
