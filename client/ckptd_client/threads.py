"""Work over much memory, shared among the processors: a restore is all that a rank does meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS_MAX = 4
"""More gain little: a few fill the memory's bandwidth."""


def shared_out(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``work(item)`` for each, in some threads where it lets go of the interpreter; the results in order. Raises the
    first failure, once nothing runs any more."""
    threads = min(len(items), THREADS_MAX, len(os.sched_getaffinity(0)))
    if threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="ckptd-restore") as pool:
        return list(pool.map(work, items))
