"""A limit on operations at once and on bytes per second, so that checkpoints leave training its network and disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from ckptd.limits import KIB, MIB
from ckptd.pace import Pace
from ckptd.storage import Backend, ObjectInfo, Source
from ckptd_backends.sources import Part, byte_view, parts_of, source_of, stored
from ckptd_backends.wrappers.base import Wrapper

GRANULE_SECONDS = 0.25
"""How much of the rate goes out, or comes in, in one go."""
GRANULE_BYTES_MIN = 64 * KIB
GRANULE_BYTES_MAX = 16 * MIB


class _Paced:
    """A source whose parts are ready only when they are paid for too."""

    def __init__(self, inner: Source, pace: Pace) -> None:
        self._inner = inner
        self._pace = pace

    @property
    def view(self) -> memoryview:
        return self._inner.view

    async def ready(self, start: int, stop: int) -> None:
        await self._pace.pay(stop - start)
        await self._inner.ready(start, stop)

    async def complete(self) -> None:
        await self._inner.complete()

    def stored(self, start: int, stop: int) -> None:
        stored(self._inner, Part(start, stop))


class Limited(Wrapper):
    """At most ``operations_max`` operations at once; what is written pays ``up``, and what is read ``down``, which
    others may pay too.

    ``None`` is no limit. Uploads are paced part by part, so one part is the largest burst: choose the backend's
    ``part_bytes`` accordingly. Downloads are cut into granules of a quarter of a second.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        operations_max: int | None = None,
        up: Pace | None = None,
        down: Pace | None = None,
    ) -> None:
        super().__init__(inner)
        self._gate = asyncio.Semaphore(operations_max) if operations_max else contextlib.nullcontext()
        self._up = up
        self._down = down

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        paced = _Paced(source_of(data), self._up) if self._up else data
        async with self._gate:
            return await self.inner.put(key, paced, if_absent=if_absent)

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        async with self._gate:
            data = await self.inner.get(key, limit_bytes=limit_bytes)
            if self._down:
                await self._down.pay(len(data))  # only now is it known how many they are
            return data

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        async with self._gate:
            if not self._down or not out.nbytes:
                await self.inner.read_into(key, out, offset=offset)
                return
            target = byte_view(out)
            granule = int(self._down.bytes_per_second * GRANULE_SECONDS)
            for start, stop in parts_of(len(target), min(max(granule, GRANULE_BYTES_MIN), GRANULE_BYTES_MAX)):
                await self._down.pay(stop - start)
                await self.inner.read_into(key, target[start:stop], offset=offset + start)

    async def head(self, key: str) -> ObjectInfo:
        async with self._gate:
            return await self.inner.head(key)

    async def delete(self, keys: Iterable[str]) -> None:
        async with self._gate:
            await self.inner.delete(keys)


_: type[Backend] = Limited
