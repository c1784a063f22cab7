"""Updates in backward: engines are told which gradients Megatron-Core has reduced.

Megatron reduces gradients by groups of buckets. Once a group's reduction has ended, its gradients are *announced* to
the engines as final. Whether it has ended is asked whenever another reduction begins; when backward is over, Megatron
itself waits for it. Gradients may be changed in place afterwards, by clipping or by sums over tensor-parallel ranks
or stages of a pipeline: the step finds that, as it compares bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from offload.integrations.megatron.inner import MegatronAdamW

listeners: weakref.WeakSet[MegatronAdamW] = weakref.WeakSet()
"""The optimizers whose engines update in backward."""

_groups_reducing: list[Any] = []
"""Groups of buckets whose reduction has begun, and that have not been announced."""


def start_grad_sync(group: Any, original: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Replaces `_ParamAndGradBucketGroup.start_grad_sync`: start a reduction, then announce those that have ended."""
    original(group, *arguments, **options)
    if listeners and group not in _groups_reducing:  # it is there still if an error has ended the pass before
        _groups_reducing.append(group)
    for reduced in [*filter(_has_ended, _groups_reducing)]:  # a copy, as `_announce_group` removes them
        _announce_group(reduced)


def finish_grad_sync(group: Any, original: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Replaces `_ParamAndGradBucketGroup.finish_grad_sync`, which waits for the reduction: announce the group."""
    original(group, *arguments, **options)
    if group in _groups_reducing:
        _announce_group(group)


def _has_ended(group: Any) -> bool:
    """Return whether a group's reduction is known to have ended, without waiting.

    False if its handle has no list of works to ask: then `finish_grad_sync` announces the group.
    """
    works = getattr(group.grad_reduce_handle, "works", ())
    return bool(works) and all(work.is_completed() for work in works)


def _announce_group(group: Any) -> None:
    """Tell engines that the gradients of a group of buckets are final, and forget the group."""
    _groups_reducing.remove(group)
    for listener in listeners:
        listener.announce_final([weight for bucket in group.buckets for weight in bucket.params_list])
