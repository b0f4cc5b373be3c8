"""A local or mounted POSIX file system: each object is a file, and acknowledged means synced.

Write: temporary file beside the target → bytes by ``O_DIRECT`` where that is to be had → sync the file → link it to its
name → sync the folder, and every folder above that is new. Names that are no keys (temporaries begin with ``~``) and
symbolic links are neither listed nor followed. Nothing is written, and nothing called missing, while a root where a run
was seen is not there (``local_root``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from functools import partial
from pathlib import Path

import msgspec

from ckptd.errors import NotFound, StorageError, TooLarge, UsageError
from ckptd.format.keys import KEY_PATTERN
from ckptd.limits import MIB, PAGE_BYTES
from ckptd.storage import (
    Backend,
    Capabilities,
    Factory,
    LeavingUploads,
    ObjectInfo,
    Settling,
    Source,
    StorageOptions,
    check_key,
    check_prefix,
)
from ckptd_backends.files import Files, FileState
from ckptd_backends.local_directories import Directories
from ckptd_backends.local_errors import mapped
from ckptd_backends.local_reader import OpenFile, page_parts, takes_direct
from ckptd_backends.local_temporaries import sweep
from ckptd_backends.local_writer import NewFile
from ckptd_backends.options import at_most, checked_options
from ckptd_backends.patience import Calls
from ckptd_backends.pool import Pool
from ckptd_backends.sources import Part, byte_view, each_part, parts_of, source_of, stored


class LocalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``storage_options`` of ``file://``."""

    part_bytes: int = 16 * MIB
    """Size of one write or read; a multiple of 4096. Smaller ones cost processor time for each, and gain nothing."""
    inflight_max: int = 4
    """Threads, and so writes and reads at once: two fill a fast SSD."""
    no_progress_seconds: float = 300.0
    """A put fails where one write of a part, or one sync, takes longer. Syncs of what went through the page cache may
    take a second more for each 50 MB."""

    def __post_init__(self) -> None:
        if self.part_bytes <= 0 or self.part_bytes % PAGE_BYTES or not 1 <= self.inflight_max <= 256:
            raise ValueError("part_bytes must be a multiple of 4096, inflight_max between 1 and 256")
        if not self.no_progress_seconds > 0:
            raise ValueError("no_progress_seconds must be above zero")


class LocalBackend:
    """``file:///absolute/folder``."""

    def __init__(self, root: str, options: LocalOptions, files: Files | None = None) -> None:
        self._url = f"file://{root}"
        self._part_bytes = options.part_bytes
        self._files = files or Files()
        self._root = self._files.resolved(root)
        self._directories = Directories(self._files, self._root)
        self._pool = Pool(options.inflight_max, f"ckptd-file-{os.path.basename(root)}")
        self._no_progress_seconds = options.no_progress_seconds

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            put_if_absent=True,
            inflight_max=self._pool.threads,
            part_bytes=self._part_bytes,
            survives_power_loss=True,
        )

    # Writing

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        source = source_of(data)
        target = self._path(key)
        async with self._operation(target) as calls:
            new = NewFile(self._files, self._directories, key, target, source.view)
            try:
                await calls.run_long(source.view.nbytes, new.create)
                await self._write(new, source, calls)
                await source.complete()
                path_taken = "direct" if new.body_bytes else "buffered"
                cached_bytes = source.view.nbytes - new.body_bytes
                state = await calls.run_long(cached_bytes, new.publish, if_absent=if_absent)
                self._directories.root.saw(key)
                return _info(key, state, path_taken)
            finally:
                new.give_up()
                await calls.last(new.discard)

    @contextlib.asynccontextmanager
    async def _operation(self, where: str) -> AsyncGenerator[Calls]:
        async with self._pool.operation():
            yield Calls(self._pool, self._no_progress_seconds, where)

    async def _write(self, new: NewFile, source: Source, calls: Calls) -> None:
        async def write(_: int, part: Part) -> None:
            await source.ready(part.start, part.stop)
            await calls.run(new.write, part.start, part.stop)
            stored(source, part)

        body_bytes = new.body_bytes
        await each_part(parts_of(body_bytes, self._part_bytes), self._pool.threads, write)
        await calls.run(new.end_body)
        rest = parts_of(source.view.nbytes, self._part_bytes, start=body_bytes)
        await each_part(rest, self._pool.threads, write)

    async def delete(self, keys: Iterable[str]) -> None:
        paths = {key: self._path(key) for key in keys}
        async with self._operation(self._root) as calls:
            if failures := await calls.run(self._delete, paths):
                raise ExceptionGroup(f"{len(failures)} of {len(paths)} objects not deleted", failures)

    def _delete(self, paths: dict[str, str]) -> list[Exception]:
        failures: list[Exception] = []
        folders: set[str] = set()
        for key, path in paths.items():
            try:
                with mapped(key, path):
                    self._directories.root.found(path, partial(self._files.unlink, path))
                folders.add(os.path.dirname(path))
            except NotFound:
                folders.add(os.path.dirname(path))  # whoever removed it may have died before that was durable
            except (StorageError, UsageError) as error:
                if not isinstance(error, UsageError):  # a folder is no object, so the object is missing
                    failures.append(error)
        # The names are gone for good before the caller goes on to delete what they stood for.
        for folder in sorted(folders, reverse=True):
            try:
                with mapped(folder, folder):
                    self._files.fsync_directory(folder)
            except NotFound:
                continue  # another process found it empty and removed it
            except StorageError as error:
                failures.append(error)
            self._directories.remove_if_empty(folder)
        return failures

    async def settle(self, key: str) -> None:
        """See :class:`ckptd.storage.Settling`."""
        folder = os.path.dirname(self._path(key))
        async with self._operation(folder) as calls:
            with mapped(key, folder):
                await calls.run(self._directories.settle, folder)

    async def abort_stale_uploads(self) -> int:
        """See :class:`ckptd.storage.LeavingUploads`: removes the temporaries of writers on this machine that are dead,
        and those of other machines that nobody has written to for a day. Looks at a bounded number of folders."""
        async with self._pool.operation():
            removed, failures = await self._pool.run(sweep, self._files, self._directories, self._root)
        if failures:
            raise ExceptionGroup(f"{len(failures)} stale temporaries not removed, {removed} removed", failures)
        return removed

    # Reading

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        path = self._path(key)
        async with self._operation(path) as calls:
            with mapped(key, path):
                try:
                    data = await calls.wait_for(self._read_small(path, limit_bytes + 1, calls))
                except IsADirectoryError:
                    raise NotFound("no such object", key=key) from None
        self._directories.root.saw(key)
        if len(data) > limit_bytes:
            raise TooLarge(f"has more than {limit_bytes} bytes, the most that was expected", key=key)
        return data

    async def _read_small(self, path: str, limit_bytes: int, calls: Calls) -> bytes:
        try:
            return await self._files.read_small(path, limit_bytes, self._pool.executor)
        except FileNotFoundError:
            await calls.run(self._directories.root.found, path, partial(self._files.state, path))
            return await self._files.read_small(path, limit_bytes, self._pool.executor)

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        target = byte_view(out)
        file = OpenFile(self._files, self._directories.root, key, self._path(key))

        async def read(_: int, part: Part) -> None:
            await self._pool.run(file.read, target[part.start : part.stop], offset + part.start)

        async with self._pool.operation():
            direct = takes_direct(target, offset)
            if len(target) <= self._part_bytes:
                await self._pool.run(file.read_all, target, offset, direct=direct)
                return
            try:
                await self._pool.run(file.open, direct=direct)
                await each_part(page_parts(len(target), offset, self._part_bytes), self._pool.threads, read)
            finally:
                file.close()

    async def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        async with self._operation(path) as calls:
            with mapped(key, path):
                state = await calls.run(self._directories.root.found, path, partial(self._files.state, path))
        self._directories.root.saw(key)
        if not state.is_file:
            raise NotFound("no such object", key=key)
        return _info(key, state)

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        async for info in self._walk(prefix):
            yield info

    async def _walk(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async with self._operation(self._root) as calls:
            states = await calls.run(self._list, prefix)
        for state in states:
            key = prefix + state.name
            if KEY_PATTERN.fullmatch(key) is None:
                continue
            if state.is_directory:
                async for info in self._walk(f"{key}/"):
                    yield info
            elif state.is_file:
                yield _info(key, state)

    def _list(self, prefix: str) -> list[FileState]:
        """In the order of the keys: a folder sorts with its slash."""
        path = os.path.join(self._root, prefix).rstrip("/")
        try:
            with mapped(prefix, path):
                states = self._directories.root.found(path, partial(self._files.list, path))
                if not states and path == self._root:
                    self._directories.root.check()
                    states = self._files.list(path)
        except NotFound:
            return []  # nothing was ever stored there, or it has just been deleted
        return sorted(states, key=lambda state: state.name + "/" * state.is_directory)

    async def aclose(self) -> None:
        await self._pool.aclose()

    def _path(self, key: str) -> str:
        check_key(key)
        return f"{self._root}/{key}"


def _info(key: str, state: FileState, path_taken: str = "") -> ObjectInfo:
    return ObjectInfo(key, state.size_bytes, state.modified_seconds, path_taken=path_taken)


def open_local(url: str, options: StorageOptions, *, state_dir: Path | None, threads_max: int | None) -> Backend:
    """Entry point for ``file://``. A temporary lies beside its target, so nothing is journaled in ``state_dir``."""
    checked = checked_options(LocalOptions, options, url=url)
    capped = msgspec.structs.replace(checked, inflight_max=at_most(checked.inflight_max, threads_max))
    return LocalBackend(url.removeprefix("file://"), capped)


_: Factory = open_local
__: type[LeavingUploads] = LocalBackend
___: type[Settling] = LocalBackend
