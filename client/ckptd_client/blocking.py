"""Running the asyncio parts of the core from blocking code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in an event loop of its own, whether or not a loop runs in the calling thread."""
    loop = BlockingLoop()
    try:
        return loop.run(work)
    finally:
        loop.close()


class BlockingLoop:
    """An event loop that is kept from call to call, for what belongs to one loop. Safe to use from any thread, one call
    at a time."""

    def __init__(self) -> None:
        # With a factory, so that no thread's current loop is touched.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, whether or not a loop runs in the calling thread."""
        results: list[T] = []

        # Not as the task's result: where the runner gives Ctrl-C back to its handler, Python spells the task out, and
        # with it whatever it has returned.
        async def keep() -> None:
            results.append(await work)

        self._call(lambda: self._runner.run(keep()))
        return results[0]

    def close(self) -> None:
        """End the loop. Idempotent."""
        self._call(self._runner.close)

    def _call(self, call: Callable[[], T]) -> T:
        with self._lock:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return call()
            with ThreadPoolExecutor(1, thread_name_prefix="ckptd-blocking") as thread:
                return thread.submit(call).result()
