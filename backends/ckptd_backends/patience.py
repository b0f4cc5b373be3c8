"""Blocking calls that nobody waits for once nothing moves: those of a disk that hangs.

The kernel cannot be asked to give up a call, so its thread stays with it until the disk comes back. What is given up is
the wait, with a clear error; what the call may still use is its own until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ParamSpec, TypeVar

from ckptd.errors import NoProgress
from ckptd_backends.pool import Call, Pool

P = ParamSpec("P")
T = TypeVar("T")

BY_ITSELF_BYTES_PER_SECOND = 50_000_000
"""As slow as this a call may be that has to move many bytes by itself, such as a sync of what went through the page
cache."""
_HINT = "is the disk, or the server behind it, still there? The next save tries again"


class Calls:
    """The calls of one operation of a backend, in the threads of its pool. Never for a call that writes into memory of
    the caller's."""

    def __init__(self, pool: Pool, no_progress_seconds: float, where: str) -> None:
        """``no_progress_seconds``: how long one call may take, and how long it may wait for a thread while no other
        call ends. ``where``: for messages."""
        self._pool = pool
        self._limit_seconds = no_progress_seconds
        self._where = where
        self._hanging: set[asyncio.Future[Any]] = set()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``call`` in a thread. Raises :class:`NoProgress` where it hangs, and leaves it alone then."""
        return await self.run_long(0, call, *args, **kwargs)

    async def run_long(self, size_bytes: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for a call that may have to move so many bytes by itself."""
        made = Call(partial(call, *args, **kwargs))
        future = self._pool.submit(made)
        limit_seconds = self._limit_seconds + size_bytes / BY_ITSELF_BYTES_PER_SECOND
        try:
            await self._ended(asyncio.wrap_future(future), limit_seconds, lambda: made.began_seconds, future.cancel)
        except BaseException:
            made.forget()
            raise
        return made.outcome()

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for what makes its calls in the pool's threads itself."""
        task = asyncio.ensure_future(work)
        await self._ended(task, self._limit_seconds, lambda: None, lambda: False)
        return task.result()

    async def _ended(
        self,
        work: asyncio.Future[Any],
        limit_seconds: float,
        began: Callable[[], float | None],
        withdraw: Callable[[], bool],
    ) -> None:
        """Returns when it has ended. A caller that is cancelled waits for it too: what it reads is the caller's again
        as soon as the caller goes on."""
        submitted = time.monotonic()
        cancelled = False
        while not work.done():
            moved = began() or max(submitted, self._pool.moved_seconds)
            left_seconds = moved + limit_seconds - time.monotonic()
            if left_seconds <= 0:
                self._leave(work)
                break
            try:
                await asyncio.wait([work], timeout=left_seconds)
            except asyncio.CancelledError:
                cancelled = True
                if withdraw():
                    break
        if cancelled:
            work.add_done_callback(_look_away)
            raise asyncio.CancelledError
        if not work.done():
            raise NoProgress(f"no progress for {round(limit_seconds, 1):g} s at {self._where}", hint=_HINT)

    def _leave(self, work: asyncio.Future[Any]) -> None:
        for left in (self._hanging, self._pool.hanging):
            left.add(work)
            work.add_done_callback(left.discard)
        work.add_done_callback(_look_away)

    async def last(self, call: Callable[[], None]) -> None:
        """Once all the others have ended; where some of them hang, that is waited for in the background."""
        if self._hanging:
            later = asyncio.create_task(self._when_over(call))
            self._pool.hanging.add(later)
            later.add_done_callback(self._pool.hanging.discard)
        else:
            await self.run(call)

    async def _when_over(self, call: Callable[[], None]) -> None:
        await asyncio.wait(set(self._hanging))
        await asyncio.to_thread(call)


def _look_away(work: asyncio.Future[Any]) -> None:
    """How it ended nobody wants to know any more."""
    if not work.cancelled():
        work.exception()
