"""Tests that need a process that has done nothing yet: with CUDA, much is decided by what a process does first."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a module returns in a fresh interpreter, or raise what it raises there."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
