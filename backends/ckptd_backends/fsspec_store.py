"""Every other store, through fsspec: its own schemes, or any of them as ``fsspec+<scheme>://``.

What it cannot promise, since fsspec does not:

- a conditional put: ``if_absent`` looks first and then writes, so a run must have a single writer;
- durability against power loss, and that a new object is seen only when it is complete: both are as the file system's
  own "commit" has them (for local files it moves them from ``/tmp``: use ``file://`` instead);
- puts without a copy.

Listings are never cached, and chained URLs (``cache::…``) are refused: a checkpoint must not come out of a cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from ckptd.errors import (
    AlreadyExists,
    CkptdError,
    ConfigError,
    NotFound,
    ShortRead,
    StorageError,
    TooLarge,
    meant,
)
from ckptd.format.keys import KEY_PATTERN
from ckptd.limits import MIB
from ckptd.storage import Backend, Capabilities, Factory, ObjectInfo, Source, StorageOptions, check_key, check_prefix
from ckptd_backends.fsspec_errors import mapped
from ckptd_backends.options import at_most
from ckptd_backends.pool import Pool
from ckptd_backends.sources import Part, byte_view, each_part, parts_of, source_of, stored

PART_BYTES = 4 * MIB
INFLIGHT_MAX = 4
_VISIBLE_WHEN_OPENED = {"memory"}
"""File systems whose new files are seen before they are complete; there an object is gathered, and written at once."""
EXPLICIT = "fsspec+"
OWN = ("file", "s3", "memory")
"""Schemes that other backends have."""
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
log = logging.getLogger("ckptd.storage")


class FsspecBackend:
    """Objects below one path of an fsspec file system."""

    def __init__(self, url: str, file_system: Any, base: str, threads_max: int | None = None) -> None:
        self._url = url
        self._fs = file_system
        self._base = base.rstrip("/")
        self._pool = Pool(at_most(INFLIGHT_MAX, threads_max), url)
        self._conditional = asyncio.Lock()
        self._gathers = not _VISIBLE_WHEN_OPENED.isdisjoint(_protocols(file_system))

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            put_if_absent=False, inflight_max=self._pool.threads, part_bytes=PART_BYTES, survives_power_loss=False
        )

    # Writing

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        check_key(key)
        source = source_of(data)
        # Among the tasks of this process, at least, one conditional put waits for the other.
        async with self._pool.operation(), self._conditional if if_absent else contextlib.nullcontext():
            if if_absent:
                await self._refuse_if_there(key)
            if self._gathers:
                await self._put_gathered(key, source)
            else:
                await self._put_streamed(key, source)
            return await self._pool.run(self._info, key)

    async def _refuse_if_there(self, key: str) -> None:
        try:
            await self._pool.run(self._info, key)
        except NotFound:
            return
        raise AlreadyExists("an object is there", key=key)

    async def _put_gathered(self, key: str, source: Source) -> None:
        gathered = bytearray(source.view.nbytes)
        for start, stop in parts_of(len(gathered), PART_BYTES):
            await source.ready(start, stop)
            gathered[start:stop] = source.view[start:stop]
        await source.complete()
        await self._pool.run(self._write, key, bytes(gathered))

    def _write(self, key: str, data: bytes) -> None:
        with mapped(key):
            self._fs.pipe_file(self._path(key), data)

    async def _put_streamed(self, key: str, source: Source) -> None:
        created: list[Any] = []
        try:
            await self._pool.run(self._create, key, created)
            for start, stop in parts_of(source.view.nbytes, PART_BYTES):
                await source.ready(start, stop)
                await self._pool.run(self._append, key, created[0], source.view[start:stop])
                stored(source, Part(start, stop))
            await source.complete()
            await self._pool.run(self._publish, key, created[0])
        except BaseException:
            await self._pool.run(self._discard, created)
            raise

    def _create(self, key: str, created: list[Any]) -> None:
        """Into ``created``, so that a caller that is cancelled meanwhile can still discard it."""
        path = self._path(key)
        with mapped(key):
            created.append(self._with_folder(path, lambda: self._fs.open(path, "wb", autocommit=False)))

    def _append(self, key: str, file: Any, part: memoryview) -> None:
        with mapped(key):
            while part:
                written = file.write(part)
                part = part[len(part) if written is None else written :]

    def _publish(self, key: str, file: Any) -> None:
        with mapped(key):
            file.close()
            self._with_folder(self._path(key), file.commit)

    def _with_folder(self, path: str, call: Callable[[], Any]) -> Any:
        """Some file systems want a folder first; to ask all for one could create a bucket."""
        try:
            return call()
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return call()

    @staticmethod
    def _discard(created: list[Any]) -> None:
        for file in created:
            with contextlib.suppress(Exception):  # the put has failed already, and that error is the one to see
                file.close()
            with contextlib.suppress(Exception):
                file.discard()

    async def delete(self, keys: Iterable[str]) -> None:
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            check_key(key)

        async def delete(index: int, _: Part) -> Exception | None:
            try:
                await self._pool.run(self._delete, wanted[index])
            except CkptdError as error:
                return error
            return None

        async with self._pool.operation():
            outcomes = await each_part(parts_of(len(wanted), 1), self._pool.threads, delete)
        if failures := [outcome for outcome in outcomes if outcome is not None]:
            raise ExceptionGroup(f"{len(failures)} of {len(wanted)} objects not deleted", failures)

    def _delete(self, key: str) -> None:
        with contextlib.suppress(NotFound):
            self._info(key)  # a folder of this name is no object
            with mapped(key):
                self._fs.rm_file(self._path(key))

    # Reading

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        check_key(key)
        async with self._pool.operation():
            size = (await self._pool.run(self._info, key)).size_bytes
            if size > limit_bytes:
                raise TooLarge(f"has {size} bytes, expected at most {limit_bytes}", key=key)
            return await self._pool.run(self._read, key, 0, size)

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        check_key(key)
        target = byte_view(out)

        async def read(_: int, part: Part) -> None:
            target[part.start : part.stop] = await self._pool.run(
                self._read, key, offset + part.start, offset + part.stop
            )

        async with self._pool.operation():
            size = (await self._pool.run(self._info, key)).size_bytes
            if target and size < offset + len(target):
                raise ShortRead(f"ends at byte {size}, wanted up to {offset + len(target)}", key=key)
            await each_part(parts_of(len(target), PART_BYTES), self._pool.threads, read)

    def _read(self, key: str, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        with mapped(key):
            data: bytes = self._fs.cat_file(self._path(key), start=start, end=stop)
        if len(data) != stop - start:
            raise ShortRead(f"{len(data)} bytes from {start} on, wanted up to {stop}", key=key)
        return data

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)
        async with self._pool.operation():
            return await self._pool.run(self._info, key)

    def _info(self, key: str) -> ObjectInfo:
        with mapped(key):
            found = self._fs.info(self._path(key))
        if found["type"] != "file":
            raise NotFound("no such object", key=key)
        return _object_info(key, found)

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        async with self._pool.operation():
            found = await self._pool.run(self._list, prefix)
        for info in sorted(found, key=lambda info: info.key):
            yield info

    def _list(self, prefix: str) -> list[ObjectInfo]:
        self._fs.invalidate_cache()
        try:
            with mapped(prefix):
                entries: dict[str, dict[str, Any]] = self._fs.find(self._path(prefix).rstrip("/"), detail=True)
        except NotFound:
            return []
        keys = {name.removeprefix(f"{self._base}/"): entry for name, entry in entries.items()}
        return [
            _object_info(key, entry)
            for key, entry in keys.items()
            if key.startswith(prefix) and KEY_PATTERN.fullmatch(key)
        ]

    async def aclose(self) -> None:
        await self._pool.aclose()

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"


def _protocols(file_system: Any) -> tuple[str, ...]:
    protocol: str | tuple[str, ...] = file_system.protocol
    return (protocol,) if isinstance(protocol, str) else protocol


def _object_info(key: str, found: dict[str, Any]) -> ObjectInfo:
    if not isinstance(found.get("size"), int):
        raise StorageError("the store does not tell the object's size", key=key)
    return ObjectInfo(key, found["size"], _seconds(found), path_taken="fsspec")


def _seconds(found: dict[str, Any]) -> float:
    """When the object changed. An object without a time counts as new, so that nothing is deleted for its age."""
    for name in _TIMES:
        match found.get(name):
            case datetime.datetime() as moment:
                return moment.timestamp()
            case int() | float() as seconds:
                return float(seconds)
            case _:
                continue
    return time.time()


def open_fsspec(url: str, options: StorageOptions, *, state_dir: Path | None, threads_max: int | None) -> Backend:
    """Entry point for every scheme that no other backend has. ``options`` go to the file system as they are."""
    url_to_fs: Any = importlib.import_module("fsspec.core").url_to_fs
    target = url.removeprefix(EXPLICIT)
    if "::" in target:
        raise ConfigError(f"{url}: chained URLs are refused", hint="name the store itself, without caches before it")
    _check_scheme(target)
    try:
        file_system, base = url_to_fs(target, skip_instance_cache=True, use_listings_cache=False, **options)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(f"{url}: {error}") from error
    log.warning("%s: fsspec has no conditional put; let only a single writer use this run at a time", url)
    return FsspecBackend(url, file_system, base, threads_max)


def _check_scheme(url: str) -> None:
    fsspec: Any = importlib.import_module("fsspec")
    scheme, known = url.partition("://")[0], {*fsspec.available_protocols(), *fsspec.registry}
    if scheme not in known:
        hint = f"known are {', '.join(OWN)}{meant(scheme, [*OWN, *known])}; by fsspec {', '.join(sorted(known))}"
        raise ConfigError(f"{url}: no store has the scheme {scheme}://", hint=hint)


_: Factory = open_fsspec
