"""Objects in this process's memory: the reference implementation, to be read first and copied for a new backend.

It keeps every promise of :class:`ckptd.storage.Backend` except to outlive the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path

import msgspec

from ckptd.errors import AlreadyExists, NotFound, ShortRead, TooLarge
from ckptd.format.keys import KEY_PATTERN
from ckptd.limits import MIB
from ckptd.storage import Backend, Capabilities, Factory, ObjectInfo, Source, StorageOptions, check_key, check_prefix
from ckptd_backends.options import checked_options
from ckptd_backends.pool import Pool
from ckptd_backends.sources import byte_view, parts_of, source_of

PART_BYTES = MIB

stores: dict[str, dict[str, tuple[bytes, float]]] = {}
"""URL → key → bytes and time of change. One store per URL for the life of the process."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """This backend takes none."""


class MemoryBackend:
    """``memory://name``: all backends of one name share their objects."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._objects = stores.setdefault(url, {})
        self._pool = Pool(1, url)

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(put_if_absent=True, inflight_max=1, part_bytes=PART_BYTES, survives_power_loss=False)

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        check_key(key)
        source = source_of(data)
        async with self._operation():
            copy = bytearray(source.view.nbytes)
            for start, stop in parts_of(len(copy), PART_BYTES):
                await source.ready(start, stop)
                copy[start:stop] = source.view[start:stop]
            await source.complete()
            # From here on nothing is awaited, so that no other task comes between the check and the change.
            if if_absent and key in self._objects:
                raise AlreadyExists("an object is there", key=key)
            self._objects[key] = bytes(copy), time.time()
            return self._info(key, path_taken="memory")

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        check_key(key)
        async with self._operation():
            info = self._info(key)
            if info.size_bytes > limit_bytes:
                raise TooLarge(f"has {info.size_bytes} bytes, expected at most {limit_bytes}", key=key)
            return self._objects[key][0]

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        check_key(key)
        target = byte_view(out)
        async with self._operation():
            size, end = self._info(key).size_bytes, offset + len(target)
            if target and size < end:
                raise ShortRead(f"ends at byte {size}, wanted up to {end}", key=key)
            target[:] = self._objects[key][0][offset:end] if target else b""

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)
        async with self._operation():
            return self._info(key)

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        async with self._operation():
            keys = sorted(key for key in self._objects if key.startswith(prefix) and KEY_PATTERN.fullmatch(key))
        for key in keys:
            if key in self._objects:  # it may have gone since
                yield self._info(key)

    async def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        for key in wanted:
            check_key(key)
        async with self._operation():
            for key in wanted:
                self._objects.pop(key, None)

    async def aclose(self) -> None:
        await self._pool.aclose()

    @contextlib.asynccontextmanager
    async def _operation(self) -> AsyncGenerator[None]:
        async with self._pool.operation():
            await asyncio.sleep(0)  # others get a turn, as with any store
            yield

    def _info(self, key: str, path_taken: str = "") -> ObjectInfo:
        try:
            data, changed_seconds = self._objects[key]
        except KeyError:
            raise NotFound("no such object", key=key) from None
        return ObjectInfo(key, len(data), changed_seconds, path_taken=path_taken)


def open_memory(url: str, options: StorageOptions, *, state_dir: Path | None, threads_max: int | None) -> Backend:
    """Entry point for ``memory://``. Takes no options and keeps no state."""
    checked_options(NoOptions, options, url=url)
    return MemoryBackend(url)


_: Factory = open_memory
