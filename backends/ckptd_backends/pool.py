"""Blocking calls in a bounded number of threads, which never outlive whoever waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from ckptd.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """At most ``threads`` blocking calls at once; the threads start when they are needed.

    A caller that is cancelled still waits for its call: what the call reads and writes is the caller's again as soon
    as the caller goes on.
    """

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self.moved_seconds = time.monotonic()
        """When a call last ended, on the monotonic clock."""
        self.hanging: set[asyncio.Future[Any]] = set()
        """Calls that nobody waits for any more, and what is to follow on them; see :mod:`ckptd_backends.patience`."""
        self._operations = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def operation(self) -> AsyncGenerator[None]:
        """Around one operation of the backend; :meth:`aclose` waits for it."""
        if self._closed:
            raise UsageError(f"{self._name} is closed")
        self._operations += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._operations -= 1
            if not self._operations:
                self._idle.set()

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The threads, for libraries that make their own calls in them."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix=self._name)
        return self._executor

    def submit(self, call: Call[T]) -> Future[None]:
        """``call`` in a thread, soon."""
        future = self.executor.submit(call)
        future.add_done_callback(self._moved)
        return future

    def _moved(self, _: object) -> None:
        self.moved_seconds = time.monotonic()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``call`` in a thread."""
        return await self._run(None, Call(partial(call, *args, **kwargs)))

    async def run_stoppable(
        self, stop: Callable[[], None], call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``call`` in a thread; ``stop`` makes it end early and is called where the caller is cancelled."""
        return await self._run(stop, Call(partial(call, *args, **kwargs)))

    async def _run(self, stop: Callable[[], None] | None, call: Call[T]) -> T:
        future = self.submit(call)
        waiter = asyncio.wrap_future(future)
        try:
            await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if future.cancel():
                call.forget()
            elif stop is not None:
                stop()
            while not waiter.done():
                with contextlib.suppress(asyncio.CancelledError):  # once is enough; it is raised below
                    await asyncio.wait([waiter])
            call.forget()
            raise
        return call.outcome()

    async def aclose(self) -> None:
        """Wait for the operations in flight, then end the threads, but for those that hang. Idempotent; later
        operations are refused."""
        self._closed = True
        await self._idle.wait()
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown, wait=not self.hanging)


class Call(Generic[T]):
    """A call that lets go of its arguments, its result and its error as soon as they are passed on.

    Threads, futures and event loops hold on to what they ran, and to how it ended, for a moment longer. The arguments
    are memory that the caller wants back, and an error leads to them through its traceback.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self.began_seconds: float | None = None
        """In its thread, on the monotonic clock."""
        self._calls = [call]
        self._results: list[T] = []
        self._errors: list[BaseException] = []

    def __call__(self) -> None:
        self.began_seconds = time.monotonic()
        try:
            self._results.append(self._calls.pop()())
        except BaseException as error:
            self._errors.append(error)

    def outcome(self) -> T:
        """To be called once, when the call has ended."""
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()

    def forget(self) -> None:
        """Nobody wants the outcome, or the call will not even be made."""
        self._calls.clear()
        self._results.clear()
        self._errors.clear()
