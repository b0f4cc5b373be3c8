"""Counts and logs what a backend is asked to do."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Generator, Iterable
from dataclasses import dataclass

from ckptd.errors import first_line
from ckptd.storage import Backend, ObjectInfo, Source
from ckptd_backends.sources import source_of
from ckptd_backends.wrappers.base import Wrapper

log = logging.getLogger("ckptd.storage")


@dataclass(slots=True)
class OperationCount:
    """Sums over all calls of one operation since the start."""

    calls: int = 0
    failures: int = 0
    size_bytes: int = 0
    """Of the calls that succeeded."""
    seconds: float = 0.0


class Traced(Wrapper):
    """Keeps :attr:`counts` and logs every operation at debug level. Errors pass through unchanged."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.counts: dict[str, OperationCount] = defaultdict(OperationCount)
        """``put``, ``get``, ``read_into``, ``head``, ``scan``, ``delete`` → count; scans count the objects' sizes as
        none."""

    @contextlib.contextmanager
    def _traced(self, operation: str, name: str, size: int = 0) -> Generator[OperationCount]:
        count = self.counts[operation]
        count.calls += 1
        began = time.monotonic()
        try:
            yield count
        except BaseException as error:
            count.failures += 1
            log.debug("%s %s failed: %s", operation, name, first_line(error))
            raise
        else:
            count.size_bytes += size
            log.debug("%s %s done in %.3f s", operation, name, time.monotonic() - began)
        finally:
            count.seconds += time.monotonic() - began

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        with self._traced("put", key, source_of(data).view.nbytes):
            return await self.inner.put(key, data, if_absent=if_absent)

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        with self._traced("get", key) as count:
            data = await self.inner.get(key, limit_bytes=limit_bytes)
            count.size_bytes += len(data)
            return data

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        with self._traced("read_into", key, out.nbytes):
            await self.inner.read_into(key, out, offset=offset)

    async def head(self, key: str) -> ObjectInfo:
        with self._traced("head", key):
            return await self.inner.head(key)

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        with self._traced("scan", prefix):
            async for info in self.inner.scan(prefix):
                yield info

    async def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        with self._traced("delete", f"{len(wanted)} objects"):
            await self.inner.delete(wanted)


_: type[Backend] = Traced
