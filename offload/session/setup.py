"""What a session starts from: its budgets and stores, from the user's config; and errors for want of resources."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator

import torch

from offload import combinations
from offload._native import CompletionQueue
from offload.config import OffloadConfig, PathConfig
from offload.device.none import Lanes
from offload.errors import OffloadError
from offload.layout import Layout
from offload.memory.arenas import available_bytes
from offload.plan import Budgets, Home, PathBudget, Plan
from offload.protocols import Tier
from offload.tiers import StoreOptions, Turns, free_bytes, open_tier
from offload.tiers.common import DEFAULT_EXTENT_BYTES

log = logging.getLogger("offload")

BESIDE_BYTES = 2 << 30
"""Host memory that is kept free of state, for forward and backward, if `host_memory` is not set; half of what is
available where that is less."""

LEAST_TILE_BYTES = 1 << 20
"""The smallest tiles that a subgroup is cut into so that every path gets several: smaller ones are slow on a disk."""


def default_threads(lanes: Lanes, rank_count: int | None = None) -> int:
    """Return how many threads update if `threads` is not set: this process's cores, divided among local ranks.

    With a GPU it is fewer, as some cores are left to the threads that drive the GPU (`Lanes.cores_beside`).

    Args:
        lanes: The session's.
        rank_count: How many ranks share the cores; None for the number that their launcher says.
    """
    cores = len(os.sched_getaffinity(0)) // (rank_count or _local_rank_count())
    return max(1, cores - lanes.cores_beside)


LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables in which launchers say how many ranks run on this node: torchrun, DeepSpeed's, Open MPI's, MPICH's."""


def _local_rank_count() -> int:
    """Return how many ranks of torch.distributed share this node, by what their launcher says; else 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        values = [os.environ.get(name, "") for name in LOCAL_RANKS]
        counts = [int(value) for value in values if value.isdecimal()]
        return max(1, counts[0]) if counts else 1
    return 1


def first_budgets(config: OffloadConfig, layout: Layout, lanes: Lanes, gradient_bytes: int) -> Budgets:
    """Return the bytes of each tier that a session's first plan may use.

    If `host_memory` is not set, state gets half of this rank's part of what is available; all that it needs if there
    are no paths, as it has no other place then.

    Args:
        config: The user's.
        layout: All state of the session.
        lanes: Those of the device that the weights are on.
        gradient_bytes: Host memory that gradients take.
    """
    host_bytes = config.host_bytes
    if host_bytes is None:
        host_bytes = available_bytes() // 2 // _local_rank_count() if config.paths else layout.state_bytes
    paths = []
    free_bytes_of_paths = free_bytes([path.path for path in config.path_configs])
    for path, path_free_bytes in zip(config.path_configs, free_bytes_of_paths, strict=True):
        offered_bytes = path_free_bytes if path.max_bytes is None else min(path_free_bytes, path.max_bytes)
        paths.append(PathBudget(path.path, offered_bytes, path.share or 1.0))  # 1.0 where the user has set none
    return config.budgets(
        host_bytes,
        paths,
        **lanes.offers(layout, config.gpu_memory),
        gradient_bytes=gradient_bytes,
        gradients_kept_bytes=gradient_budget(config),
    )


def plan_to_fit(
    config: OffloadConfig,
    budgets: Budgets,
    make_plan: Callable[[Budgets], Plan],
    free_host_bytes: int,
    before: Plan | None = None,
) -> Plan:
    """Return a plan; if `host_memory` is not set, state takes only host memory that the rest of the plan leaves.

    The rest is buffers, gradients and `BESIDE_BYTES` for forward and backward. `first_budgets` does not subtract it
    from the half that it gives to state. Here it comes first, so that a model that trains with `host_memory=0` also
    trains without a setting.

    Args:
        config: The user's.
        budgets: What a plan may use, with `host_bytes` as `first_budgets` has chosen it.
        make_plan: Makes a plan from budgets.
        free_host_bytes: Host memory that all ranks of this node may still take.
        before: The plan that this session has so far: state at home in host memory stays there.
    """
    plan = make_plan(budgets)
    if config.host_memory is not None or not config.paths:  # without paths state has no other place to go to
        return plan
    usable_bytes = free_host_bytes // _local_rank_count()
    usable_bytes -= min(BESIDE_BYTES, usable_bytes // 2)
    kept_bytes = 0
    if before is not None:
        usable_bytes += before.host_bytes  # which this session has taken already, and keeps
        kept_bytes = before.home_bytes[Home.HOST]
    while True:  # a plan with less state at home may need more buffers, which leave less again
        state_bytes = plan.home_bytes[Home.HOST]
        most_bytes = max(kept_bytes, usable_bytes - (plan.host_bytes - state_bytes))
        if state_bytes <= most_bytes:
            return plan
        plan = make_plan(dataclasses.replace(budgets, host_bytes=most_bytes))


def less_memory_advice(config: OffloadConfig, plan: Plan, available: int) -> str:
    """Return advice for a plan that needs more than the `available` bytes of host memory: which settings to lower."""
    if not config.paths:
        return "give paths to stream state from"
    if plan.fits_but_for_backward(available):
        return 'use overlap="auto", which takes for new weights what is left'
    memory_by_setting = {  # what each setting takes now; 0 or None where lowering it would free nothing
        "host_memory": plan.home_bytes[Home.HOST],
        "gradient_memory": plan.gradient_buffers and config.gradient_memory,
        "staging_memory": config.staging_memory and plan.staging_bytes,
        "subgroup_numel": config.subgroup_numel,
    }
    lowered = [name for name, value in memory_by_setting.items() if value and value != "auto"]
    advice = [f"lower {' or '.join(lowered)}"] if lowered else []
    in_backward = combinations.UPDATES_IN_BACKWARD.names(config.overlap)  # which excludes `gradient_memory`
    if config.gradient_memory is None and not in_backward and plan.budgets.gradient_bytes:
        advice.append("give gradient_memory=0, with which gradients leave for the paths")
    return ", or ".join([*advice, "free some"])


def gradient_budget(config: OffloadConfig) -> int | None:
    """Return how many bytes of gradients may stay in host memory; None for all.

    "auto" is half of what state at home leaves of this rank's part of available memory: the other half is for
    activations. If `host_memory` is not set, state at home counts as half of that part.
    """
    if config.gradient_memory != "auto":
        return None if config.gradient_memory is None else int(config.gradient_memory)
    usable_bytes = available_bytes() // _local_rank_count()
    state_bytes = usable_bytes // 2 if config.host_bytes is None else config.host_bytes
    return max(0, usable_bytes - state_bytes) // 2


def with_gradients(config: OffloadConfig, sizes: Iterable[tuple[int, int]]) -> OffloadConfig:
    """Return the config with `gradient_memory` in bytes, also where it was "auto".

    It is None in the returned config if it was not set, or if all gradients fit into these bytes. `sizes` has a pair
    for each parameter: the elements of its gradient, and the bytes of an element.
    """
    budget_bytes = gradient_budget(config)
    if budget_bytes is None:
        return config
    are_widened = config.gradient_dtype == "float32"
    needed_bytes = sum(numel * (4 if are_widened else item_bytes) for numel, item_bytes in sizes)
    return dataclasses.replace(config, gradient_memory=None if budget_bytes >= needed_bytes else budget_bytes)


def open_path(
    config: OffloadConfig,
    path: PathConfig,
    store: uuid.UUID,
    queue: CompletionQueue,
    state_bytes: int,
    depth: int | None,
    used_bytes: int | None = None,
) -> Tier:
    """Open a store on a path.

    Args:
        config: The user's.
        path: Where.
        store: The store's uuid: a new one, or that of another session's store to take over.
        queue: The queue that the store reports to.
        state_bytes: How much state there is on all paths.
        depth: Requests in flight; None for the tier's own choice.
        used_bytes: How much of a store that is taken over is in use; None for a new one.
    """
    return open_tier(
        path.path,
        store,
        queue,
        options=StoreOptions(
            max_bytes=path.max_bytes,
            depth=depth,
            extent_bytes=min(DEFAULT_EXTENT_BYTES, max(LEAST_TILE_BYTES, state_bytes)),  # by which the store grows
            turns=choose_turns(config, path),
            io_backend=config.io_backend,
            used_bytes=used_bytes,
        ),
    )


def choose_turns(config: OffloadConfig, path: PathConfig) -> Turns | None:
    """Return how to take turns on a path with other processes; None if turns are not taken."""
    # "auto" is off: whether turns pay depends on the device, and bench/lock.py has found none where they do.
    if config.path_lock in ("off", "auto"):
        return None
    holders = config.path_lock if isinstance(config.path_lock, int) else 1  # "on": one at a time
    return Turns(path=path.lock_path, holders=holders, report_after_s=config.lock_timeout_s)


@contextlib.contextmanager
def raising_shortages(doing: str) -> Iterator[None]:
    """Within this block, raise errors for want of memory, threads or files as `OffloadError`.

    Python, torch and native code raise them as four classes. `doing` begins the message: what could not be done.
    """
    try:
        yield
    except OffloadError:
        raise
    except MemoryError as cause:
        raise OffloadError(f"{doing}: there is no more memory ({cause or 'MemoryError'})") from cause
    except RuntimeError as cause:
        text = str(cause)
        if "allocate memory" in text:  # torch's
            raise OffloadError(f"{doing}: there is no more memory ({text.splitlines()[0]})") from cause
        # Two texts for want of threads: Python's, and the system's for native code.
        if "start new thread" not in text and os.strerror(errno.EAGAIN) not in text:
            raise
        raise OffloadError(
            f"{doing}: the system starts no more threads ({text}): a limit on processes (ulimit -u, a container's "
            "pids) or on memory (ulimit -v) has been reached; raise it, or lower `threads`"
        ) from cause
    except OSError as cause:
        if cause.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
            raise
        raise OffloadError(f"{doing}: the system gives no more: {cause.strerror}") from cause
