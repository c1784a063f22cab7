"""The order in which a sweep visits subgroups."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def visit_order(wanted: Sequence[int], cached: Collection[int]) -> tuple[int, ...]:
    """Return `wanted` with the subgroups that already lie in staging memory first.

    What one sweep leaves in staging memory is then the next one's first need, so each step reads (and writes) the
    streamed state less the staging memory, which is the least possible (the cache-reusing order of MLP-Offload,
    SC '25, arXiv 2509.02480, which alternates the direction to the same end).
    """
    first = [subgroup for subgroup in wanted if subgroup in cached]
    return (*first, *(subgroup for subgroup in wanted if subgroup not in cached))
