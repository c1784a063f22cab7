"""What `torch.save` makes of state dicts: every optimizer's goes round, and a tensor takes its own bytes alone."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from limited import limit
from test_wrap import CLASSES, Averaging, Odd, assert_same, draw, streamed, weights

import offload

OVERHEAD = 2048
"""Bytes of a saved file that are no tensor's, for each of its tensors."""

OURS = offload.AdamW, offload.Adam, offload.Lion, offload.Adagrad, offload.SGD, offload.Muon


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def check_saved(optimizer: Any, again: Any) -> None:
    """Save, load, and load into another optimizer: the same bits, and no tensor with others' bytes."""
    state_dict = optimizer.state_dict()
    assert state_dict["state"]
    tensors = [v for entry in state_dict["state"].values() for v in entry.values() if isinstance(v, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.nbytes}
    assert len(storages) == len([tensor for tensor in tensors if tensor.nbytes])
    for tensor in tensors:
        assert len(saved(tensor)) <= tensor.nbytes + OVERHEAD
        assert copy.deepcopy(tensor).untyped_storage().nbytes() == tensor.nbytes
    content = saved(state_dict)
    assert len(content) <= sum(tensor.nbytes for tensor in tensors) + OVERHEAD * (1 + len(tensors))
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert_same(loaded, state_dict)
    again.load_state_dict(loaded)
    assert_same(again.state_dict(), state_dict)
    for tensor in tensors:
        tensor.zero_()  # the caller's own
    assert_same(optimizer.state_dict(), loaded)


@pytest.mark.parametrize("name", [*CLASSES, "odd", "averaging"])
def test_state_of_every_class(name: str) -> None:
    kind, settings = {**CLASSES, "odd": (Odd, {}), "averaging": (Averaging, {})}[name]
    for dtype, masters in ((torch.float32, False), (torch.float16, False), (torch.bfloat16, True)):
        ours, others = weights(dtype), weights(dtype)
        with (
            offload.wrap(kind, ours, **copy.deepcopy(settings), masters=masters) as optimizer,
            offload.wrap(kind, others, **copy.deepcopy(settings), masters=masters) as again,
        ):
            for step in range(1, 4):
                draw(ours, step)
                optimizer.step()
            if optimizer.state_dict()["state"]:  # plain SGD keeps none
                check_saved(optimizer, again)


@pytest.mark.parametrize("form", ["exact", "compact16", "compact8"])
@pytest.mark.parametrize("kind", OURS)
def test_state_of_our_own(kind: Any, form: str, tmp_path: Path) -> None:
    """In memory and in a file. Compact state is fp32 there, and may be rounded anew where it is loaded."""
    ours, others = ([*weights(torch.bfloat16), *weights(seed=1)] for _ in range(2))
    config = streamed(tmp_path, state_format=form)
    settings = {"momentum": 0.9} if kind is offload.SGD else {}
    with (
        kind(ours, lr=1e-2, **settings, offload=config) as optimizer,
        kind(others, lr=1e-2, **settings, offload={"state_format": form}) as again,
    ):
        for large_copy_bytes in (1 << 30, 0):
            for step in range(1, 4):
                draw(ours, step)
                optimizer.step()
            for each in (optimizer, again):
                each.state_dict()
                limit(each.engine, large_copy_bytes=large_copy_bytes)
            if form == "exact":
                check_saved(optimizer, again)
                continue
            state_dict = optimizer.state_dict()
            loaded = torch.load(io.BytesIO(saved(state_dict)), weights_only=True)
            assert_same(loaded, state_dict)
            again.load_state_dict(loaded)
            for entry in state_dict["state"].values():
                for tensor in entry.values():
                    assert len(saved(tensor)) <= tensor.nbytes + OVERHEAD


def test_state_of_a_class_that_lies_in_a_file(tmp_path: Path) -> None:
    ours, others = weights(torch.bfloat16), weights(torch.bfloat16)
    with (
        offload.wrap(torch.optim.AdamW, ours, offload=streamed(tmp_path)) as optimizer,
        offload.wrap(torch.optim.AdamW, others) as again,
    ):
        draw(ours, 1)
        optimizer.step()
        limit(optimizer.engine, large_copy_bytes=0)
        check_saved(optimizer, again)
        one = optimizer.state[ours[0]]["exp_avg"]
        assert len(saved(one)) <= one.nbytes + OVERHEAD


def test_state_that_is_kept_for_later_is_not_the_optimizer_s() -> None:
    """One key of one parameter outlives the state dict, and the optimizer."""
    ours = weights(torch.bfloat16)
    with offload.wrap(torch.optim.AdamW, ours) as optimizer:
        draw(ours, 1)
        optimizer.step()
        kept = optimizer.state_dict()["state"][0]["exp_avg"]
        wanted = kept.clone()
        draw(ours, 2)
        optimizer.step()
    assert torch.equal(kept, wanted)
    assert torch.load(io.BytesIO(saved(kept)), weights_only=True).equal(wanted)
