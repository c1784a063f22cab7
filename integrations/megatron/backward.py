"""Updates in backward: which gradients Megatron-Core has reduced, as engines are told.

A group of buckets is final when its reduction has ended: that is asked whenever another one begins, and Megatron
waits for it when backward is over. What is done to gradients afterwards, in place, is found by the step, which
compares bytes: clipping, sums over tensor-parallel ranks, or over stages of a pipeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from offload.integrations.megatron.inner import MegatronAdamW

listeners: weakref.WeakSet[MegatronAdamW] = weakref.WeakSet()
"""Whose engines update in backward."""

_reducing: list[Any] = []
"""Groups of buckets whose reduction has begun, and that nobody has been told of."""


def start_grad_sync(group: Any, original: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Stand in for `_ParamAndGradBucketGroup.start_grad_sync`: tell of what has been reduced meanwhile."""
    original(group, *arguments, **options)
    if listeners and group not in _reducing:
        _reducing.append(group)
    for each in [each for each in _reducing if _has_ended(each)]:
        _tell(each)


def finish_grad_sync(group: Any, original: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Stand in for `_ParamAndGradBucketGroup.finish_grad_sync`: tell of what had not been reduced by then."""
    original(group, *arguments, **options)
    if group in _reducing:
        _tell(group)


def _has_ended(group: Any) -> bool:
    """Return whether a reduction is known to have ended: its works can be asked, in the place of waiting for them."""
    works = getattr(group.grad_reduce_handle, "works", ())
    return bool(works) and all(work.is_completed() for work in works)


def _tell(group: Any) -> None:
    _reducing.remove(group)
    for listener in listeners:
        listener.announce_final([weight for bucket in group.buckets for weight in bucket.params_list])
