"""Bounded parallelism for reading: tasks that never outlive their caller, nor touch its memory after it went on."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


async def each(items: Iterable[T], width: int, work: Callable[[T], Awaitable[R]]) -> list[R]:
    """``work(item)`` for each item, at most ``width`` at once; the results in order of the items.

    The first failure cancels the others, waits for them, and is raised itself.
    """
    gate = asyncio.Semaphore(width)

    async def one(item: T) -> R:
        try:
            return await work(item)
        finally:
            gate.release()

    tasks: list[asyncio.Task[R]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                await gate.acquire()
                tasks.append(group.create_task(one(item)))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def ahead(items: Iterable[T], width: int, work: Callable[[T], Awaitable[R]]) -> AsyncGenerator[R]:
    """``work(item)`` for each item, in order of the items; up to ``width`` are under way or wait to be taken.

    To be closed, best by ``contextlib.aclosing``: that cancels what is under way, and waits for it.
    """
    under_way: deque[asyncio.Task[R]] = deque()

    async def one(item: T) -> R:
        return await work(item)

    try:
        for item in items:
            under_way.append(asyncio.create_task(one(item)))
            if len(under_way) >= width:
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def in_thread(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """``call`` in a thread of the loop. A cancelled caller still waits for it, as it may be reading the caller's
    memory."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # once is enough; it is raised below
                await asyncio.wait([task])
        raise
