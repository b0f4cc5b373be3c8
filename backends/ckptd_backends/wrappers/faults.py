"""For tests: a store that fails when it is told to, and one that takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal

from ckptd.errors import Unavailable
from ckptd.storage import Backend, ObjectInfo, Source
from ckptd_backends.wrappers.base import Wrapper


class Faulty(Wrapper):
    """Raises ``error`` at the ``fail_at``-th put or delete, counted from 1: before it took effect, or after (the answer
    that got lost). Only once, so that a retry may succeed.

    To visit every point of failure, raise ``fail_at`` until a run ends with ``calls < fail_at``.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        fail_at: int,
        when: Literal["before", "after"] = "before",
        error: Exception | None = None,
    ) -> None:
        super().__init__(inner)
        self.fail_at = fail_at
        self.when = when
        self.error = error or Unavailable(f"injected fault {when} call {fail_at}")
        self.calls = 0

    def _next_fails(self) -> bool:
        self.calls += 1
        if self.calls != self.fail_at:
            return False
        if self.when == "before":
            raise self.error
        return True

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        fails = self._next_fails()
        info = await self.inner.put(key, data, if_absent=if_absent)
        if fails:
            raise self.error
        return info

    async def delete(self, keys: Iterable[str]) -> None:
        fails = self._next_fails()
        await self.inner.delete(keys)
        if fails:
            raise self.error


class Slow(Wrapper):
    """Waits ``delay_seconds`` before each request goes on."""

    def __init__(self, inner: Backend, *, delay_seconds: float) -> None:
        super().__init__(inner)
        self.delay_seconds = delay_seconds

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        await asyncio.sleep(self.delay_seconds)
        return await self.inner.put(key, data, if_absent=if_absent)

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        await asyncio.sleep(self.delay_seconds)
        return await self.inner.get(key, limit_bytes=limit_bytes)

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        await asyncio.sleep(self.delay_seconds)
        await self.inner.read_into(key, out, offset=offset)

    async def head(self, key: str) -> ObjectInfo:
        await asyncio.sleep(self.delay_seconds)
        return await self.inner.head(key)

    async def delete(self, keys: Iterable[str]) -> None:
        await asyncio.sleep(self.delay_seconds)
        await self.inner.delete(keys)


_: tuple[type[Backend], ...] = (Faulty, Slow)
