"""DDP's buckets of gradients: a communication hook that notes which buckets have been reduced.

A DDP model with a communication hook leaves to the hook the sum over ranks, and the division by their number. To get
the same bits as without a hook, this one divides as DDP's reducer would (`mark_variable_ready_dense` in
torch/csrc/distributed/c10d/reducer.cpp). It multiplies gradients by 1/world. Only gradients that lay in the bucket
before the pass are divided by world: with `gradient_as_bucket_view`, those that accumulate.

DDP keeps a hook for good. The hook keeps no optimizer alive, and goes on reducing without one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from offload import combinations
from offload.errors import ConfigError

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""What `DistributedDataParallel.register_comm_hook` takes: a function of a state and a bucket."""


class _Place(NamedTuple):
    """Where a gradient lies in a bucket."""

    parameter: torch.Tensor
    first: int  # element of the bucket
    shape: torch.Size


class Reduction(NamedTuple):
    """A bucket that is being reduced.

    Attributes:
        future: The bucket's reduced values, once they are there.
        places: The bucket's gradients.
        events: On an accelerator, an event after the reduction, recorded when the future is done.
    """

    future: torch.futures.Future[torch.Tensor]
    places: list[_Place]
    events: list[torch.Event]

    def has_ended(self) -> bool:
        """Return whether anybody may read the values, on any stream."""
        return self.future.done() and all(event.query() for event in self.events)


class BucketListener(Protocol):
    """Takes gradients from reduced buckets by `Buckets.take_reduced`: a `StepRoute`."""

    @property
    def listens(self) -> bool:
        """Whether buckets that are reduced now are to be noted."""


class Buckets:
    """The buckets of one DDP model: the state of its hook.

    Args:
        model: The DDP model. Its parameters get hooks that note where gradients lie, if that may matter for bits.
        hook: The user's own hook, which reduces instead of DDP; None for the mean.
        state: The first argument of the user's hook.

    Attributes:
        reductions: Buckets that `take_reduced` has not yielded yet, in their order.
    """

    def __init__(self, model: DistributedDataParallel, hook: CommHook | None, state: object) -> None:
        self._listener: weakref.ReferenceType[BucketListener] | None = None  # None until `set_listener`
        self.hook, self.state = hook, state
        self._model = weakref.ref(model)
        self._group = model.process_group
        self.reductions: deque[Reduction] = deque()
        # Address of the storage in which each gradient lay before DDP put it into a bucket, by id of the parameter.
        # It says whether to divide or to multiply (see the module). Empty if that cannot matter: gradients never lie
        # in buckets, or the number of ranks is a power of two, with which both have the same bits.
        self._storages: dict[int, int] = {}
        ranks = self._group.size()
        is_power_of_two = ranks & (ranks - 1) == 0
        if model.gradient_as_bucket_view and not is_power_of_two:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    register(partial(_note_storage, self._storages))

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy of the model, pickled or deep, have None in place of these buckets: they are of one model."""
        return _return_nothing, ()

    def is_of(self, model: torch.nn.Module) -> bool:
        """Return whether these are the buckets of a model."""
        return self._model() is model

    def set_listener(self, listener: BucketListener) -> None:
        """Set the listener for which reduced buckets are noted from now on; it is not kept alive."""
        self._listener = weakref.ref(listener)

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Start to reduce a bucket, note it if the listener listens, and return the future; DDP calls this hook."""
        buffer = bucket.buffer()
        bucket_begin = buffer.storage_offset()
        # The bucket's gradients are views of `buffer`.
        places = [
            _Place(parameter, gradient.storage_offset() - bucket_begin, gradient.shape)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        if self.hook is not None:
            future = self.hook(self.state, bucket)
        else:
            self._divide_by_ranks(buffer, bucket.parameters(), bucket.gradients() if self._storages else [])
            reduction = torch.distributed.all_reduce(buffer, group=self._group, async_op=True)
            future = reduction.get_future().then(_only_value)
        listener = self._listener() if self._listener is not None else None
        if listener is not None and listener.listens:
            events: list[torch.Event] = []
            if buffer.device.type != "cpu":
                future = future.then(partial(_record_event, events))
            self.reductions.append(Reduction(future, places, events))
        return future

    def _divide_by_ranks(
        self, buffer: torch.Tensor, parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        """Divide this rank's gradients by the number of ranks, with the bits of DDP's reducer.

        Gradients that lay in the bucket before this pass are divided. All others are multiplied by the inverse.

        Args:
            buffer: The bucket.
            parameters: The parameters whose gradients lie in it.
            gradients: Views of it, one for each parameter; not needed, and perhaps empty, while `_storages` is empty.
        """
        ranks = self._group.size()
        storage = _storage_address(buffer)
        lay_in_bucket = [self._storages.get(id(parameter)) == storage for parameter in parameters]
        if not any(lay_in_bucket):
            buffer.mul_(1 / ranks)
        else:
            for gradient, lay_here in zip(gradients, lay_in_bucket, strict=True):
                if lay_here:
                    gradient.div_(ranks)
                else:
                    gradient.mul_(1 / ranks)
        # By now DDP has put all gradients into the bucket. If the next pass does not use a parameter, its gradient
        # stays there, and `_note_storage` is not called for it.
        if self._storages:
            self._storages |= {id(parameter): storage for parameter in parameters}

    def take_reduced(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parameters of buckets that have been reduced since the last call, each with its gradient.

        Buckets come in their order: one that has not been reduced yet holds up those after it.
        """
        while self.reductions and self.reductions[0].has_ended():
            reduced = self.reductions.popleft()
            flat = reduced.future.value().view(-1)
            for parameter, first, shape in reduced.places:
                yield parameter, flat[first : first + shape.numel()].view(shape)

    def clear(self) -> None:
        """Forget all noted buckets, as another backward pass begins, or this one has ended."""
        self.reductions.clear()


def register_hook(model: torch.nn.Module, hook: CommHook | None, state: object) -> Buckets:
    """Register the hook of `Buckets` with a DDP model, unless it is registered already; return the model's buckets.

    `hook` and `state` are as for `Buckets`. In buckets that are registered already they replace those given before,
    unless `hook` is None. Also hook the model's forward, to refuse a mean over fewer ranks (`_check_division`).

    Raises:
        ConfigError: It is no DDP model, or has another hook.
    """
    if not isinstance(model, DistributedDataParallel):
        advice = "give the DistributedDataParallel that wraps the model"
        raise ConfigError("model", type(model).__name__, advice)
    if getattr(model, "_use_python_reducer", False):
        combinations.COMPILED_REDUCTIONS.refuse("model", "compiled with its reductions")
    for _, registered in getattr(model, "_comm_hooks", ()):
        # A copy of a model by `copy.copy` lists the hooks of its original, whose buckets are not the copy's.
        if isinstance(registered, Buckets) and registered.is_of(model):
            if hook is not None:
                registered.hook, registered.state = hook, state
            return registered
    buckets = Buckets(model, hook, state)
    try:
        if getattr(model, "_comm_hooks", ()):  # torch refuses a second hook only after it has listed it
            raise RuntimeError("it has a hook")  # as torch raises: caught below
        model.register_comm_hook(buckets, _reduce)
    except RuntimeError:
        combinations.HOOKED.refuse("model", "DistributedDataParallel")
    model.register_forward_pre_hook(_check_division)
    return buckets


def _check_division(model: Any, inputs: object) -> None:
    """Refuse DDP's `join` with `divide_by_initial_world_size=False`; a hook before each forward of the DDP model.

    That asks for a mean over the ranks that still have data. With a communication hook DDP's reducer leaves the
    division to the hook, and does not say how many ranks those are. A user's own hook may know.

    A function, not a method of `Buckets`, as copies of the model have this hook, too.
    """
    divides_by_all = getattr(model, "_divide_by_initial_world_size", True)  # `join` sets it; before, there is none
    if model._join_config.enable and not divides_by_all:
        for _, buckets in getattr(model, "_comm_hooks", ()):
            if isinstance(buckets, Buckets) and buckets.hook is None:
                combinations.DIVIDED_BY_OTHERS.refuse("divide_by_initial_world_size", False)


def _reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, and finds strings
    """Call `Buckets.reduce`; `state` is the `Buckets`. The function that is registered with DDP."""
    return state.reduce(bucket)


def _only_value(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    """Return the one tensor that was reduced."""
    return reduced.value()[0]


def _record_event(events: list[torch.Event], reduced: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    """Return a bucket's reduced values, and add an event after the reduction to `events`.

    torch calls this with a stream as the current one that follows the reduction. The event is needed as the future
    may be done before the device is.
    """
    value = reduced.value()
    events.append(torch.accelerator.current_stream(value.device).record_event())
    return value


def _note_storage(storages: dict[int, int], parameter: torch.Tensor) -> None:
    """Note where a gradient that has been accumulated lies; autograd calls this."""
    if parameter.grad is not None:
        storages[id(parameter)] = _storage_address(parameter.grad)


def _storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which identifies the storage as long as it lives."""
    return tensor.untyped_storage().data_ptr()


def _return_nothing() -> None:
    """Return None, which stands for `Buckets` in a copy of their model."""
