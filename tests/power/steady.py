"""An event loop on which everything happens in an order that only the seed decides: no threads, and no clock but its
own, which jumps to the next timer when there is nothing else to do."""

from __future__ import annotations

import asyncio
import random
import secrets
import selectors
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

from ckptd import jitter

T = TypeVar("T")


class InPlace(ThreadPoolExecutor):
    """Runs each call at once, where it is submitted."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class _JumpingSelector(selectors.SelectSelector):
    """Nothing ever comes from outside, so what would be waited for is only time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now_seconds += timeout
        assert ready or timeout is not None, "nothing is left that could go on"
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.set_default_executor(InPlace(1))
        self.set_exception_handler(_ignore)

    def time(self) -> float:
        return self._jumping.now_seconds

    async def shutdown_default_executor(self, *_: object) -> None:
        """There are no threads to wait for."""


def _ignore(loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
    """Tasks of a process that is dead have nobody to tell how they ended."""


def run_steadily(work: Coroutine[Any, Any, T], source: random.Random) -> T:
    """Run to the end; whatever the code draws at random comes from ``source``."""

    def token_hex(count: int | None = None) -> str:
        return source.randbytes(count or 32).hex()

    def uuid4() -> uuid.UUID:
        return uuid.UUID(bytes=source.randbytes(16), version=4)

    with (
        mock.patch.object(jitter, "_numbers", source),
        mock.patch.object(secrets, "token_hex", token_hex),
        mock.patch.object(uuid, "uuid4", uuid4),
        asyncio.Runner(loop_factory=_Loop) as runner,
        mock.patch.object(time, "monotonic", runner.get_loop().time),
    ):
        return runner.run(work)
