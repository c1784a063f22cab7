"""Which parameters a module waits for, and in which order a step that goes on behind updates them."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from recorded_engine import RecordedEngine, bound_to

from offload.errors import ConfigError
from offload.optim.overlap import OptimizerLock, Overlap


class Model(torch.nn.Module):
    """Calls its layers in another order than it has them, and one not at all; has one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(4))
        self.last = torch.nn.Linear(4, 4)
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.attention = torch.nn.MultiheadAttention(4, 1)
        self.unused = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.first(x))
        return self.last(self.attention(x, x, x)[0])


class Followed:
    """A model whose modules are hooked, and the names of what a step would update, in its order."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.engine = model, RecordedEngine()
        self.called = {parameter: name for name, parameter in model.named_parameters()}
        self.weights = bound_to(self.engine, [*self.called])
        self.overlap = Overlap(self.engine, self.weights)  # type: ignore[arg-type]
        self.following = self.overlap.hook_model(model, False, [*self.called])

    def order(self) -> tuple[list[str], list[str]]:
        """Return what is updated at once, and what modules wait for."""
        at_once, waited_for = self.overlap.split_by_use(self.weights.bound.values())
        return [self.called[b.parameter] for b in at_once], [self.called[b.parameter] for b in waited_for]


X = torch.ones(2, 1, 4)


def test_parameters_come_in_the_order_in_which_forward_uses_them() -> None:
    followed = Followed(Model())
    everything = [*followed.called.values()]
    assert followed.order() == (everything, [])  # nothing has been called yet
    followed.model(X)
    attention = ["attention.in_proj_weight", "attention.in_proj_bias"]
    projection = ["attention.out_proj.weight", "attention.out_proj.bias"]  # which is never called itself
    last = ["last.weight", "last.bias"]
    # The first pass has the outermost wait for all below it, as nothing has been called before.
    assert followed.order() == ([], everything)
    followed.model(X)
    # From the second on a module waits for its own, and for what is below it and never called.
    used = ["own", "unused.weight", "first.weight", *attention, *projection, *last]
    assert followed.order() == ([], used)
    assert followed.order() == (everything, [])  # each step's order is that of the passes since the last


def test_what_is_called_late_is_waited_for_from_then_on() -> None:
    followed = Followed(Model())
    followed.model(X)
    followed.order()
    followed.model.unused(X)
    followed.model(X)
    at_once, waited_for = followed.order()
    assert at_once == []
    assert waited_for[:2] == ["unused.weight", "own"]
    followed.model(X)
    at_once, waited_for = followed.order()
    assert at_once == ["unused.weight"]  # no module that was called has it


def test_a_model_that_is_let_be_is_waited_for_no_more() -> None:
    followed = Followed(Model())
    followed.model(X)  # which has noted all of them
    followed.following.remove()
    followed.following.remove()
    followed.model(X)
    assert followed.order()[1] == []
    assert followed.overlap.models == []
    again = followed.overlap.hook_model(followed.model, False, [*followed.called])
    assert followed.overlap.hook_model(followed.model, False, [*followed.called]) is not again
    assert len(followed.overlap.models) == 1  # hooked anew, not twice
    followed.overlap.unhook()
    assert followed.overlap.models == []


def test_a_copy_of_a_model_waits_for_nothing() -> None:
    followed = Followed(Model())
    copy.deepcopy(followed.model)(X)
    copy.copy(followed.model.first)(X)  # which has the hooks of the module that it was made of
    assert followed.order()[1] == []


@pytest.mark.parametrize("how", ["compiled", "compiled in place"])
def test_what_is_compiled_as_one_is_called_as_one(how: str) -> None:
    inner = Model()
    if how == "compiled in place":
        inner.compile(backend="eager")
    model = torch.nn.Sequential(inner if how == "compiled in place" else torch.compile(inner, backend="eager"))
    followed = Followed(model)
    followed.following.before_forward(model[0])
    at_once, waited_for = followed.order()
    assert (at_once, len(waited_for)) == ([], len(followed.called))


@pytest.mark.parametrize(
    ("model", "check", "words"),
    [
        ([], False, "the torch.nn.Module"),
        (Model(), 1, "give True or False"),
        (Model(), False, "not a copy"),  # it has none of the optimizer's parameters
        (torch.jit.script(torch.nn.Linear(2, 2)), False, "not scripted"),
    ],
)
def test_what_cannot_be_followed(model: Any, check: Any, words: str) -> None:
    followed = Followed(Model())
    with pytest.raises(ConfigError, match=words):
        followed.overlap.hook_model(model, check, [*followed.called])
    assert len(followed.overlap.models) == 1


def test_weights_that_are_hidden_hold_nan_until_they_are_waited_for() -> None:
    followed = Followed(Model())
    followed.overlap.hook_model(followed.model, True, [*followed.called])
    first, second, *_ = bounds = [*followed.weights.bound.values()]
    before = [bound.parameter.detach().clone() for bound in bounds]
    waited: list[list[int]] = []
    followed.engine.wait_for = waited.append  # type: ignore[attr-defined]
    copies = followed.overlap.bind_hidden_copies([first, second])
    assert followed.engine.said() == [("bind_weight", n, t.data_ptr()) for n, t in enumerate(copies)]
    assert [bool(bound.parameter.isnan().all()) for bound in bounds[:3]] == [True, True, False]
    copies[0].add_(1)  # the step
    followed.overlap.wait_for([first])
    assert waited == [[0]]
    assert torch.equal(first.parameter, before[0] + 1)
    assert second.parameter.isnan().all()
    assert followed.engine.said() == [("bind_weight", 0, first.parameter.data_ptr())]
    followed.overlap.finish()
    assert torch.equal(second.parameter, before[1])


def test_a_lock_is_taken_when_what_went_before_is_over_and_given_back_if_that_fails() -> None:
    class Owner:
        error: BaseException | None = None

        def _finish(self) -> None:
            if self.error is not None:
                raise self.error
            seen.append("first")

    owner, seen = Owner(), []
    lock: Any = OptimizerLock(owner)  # type: ignore[arg-type]
    with lock, lock:
        assert seen == ["first", "first"]
    owner.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    owner.error = None
    other = threading.Thread(target=lambda: (lock.__enter__(), seen.append("other"), lock.__exit__()), daemon=True)
    other.start()
    other.join(20)
    assert seen[-1] == "other"
