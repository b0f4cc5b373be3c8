"""Ways to do it wrong, each of which the model has to find: tests of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import msgspec

from ckptd.checkpoint import retention
from ckptd.checkpoint.objects import token
from ckptd.checkpoint.run import Run
from ckptd.daemon.copying import ShardCopy
from ckptd.daemon.link import Link
from ckptd.daemon.receipts import put_first, put_receipt, put_same
from ckptd.daemon.upload import Contents, Uploaded
from ckptd.errors import AlreadyExists
from ckptd.format.digests import hex_digest
from ckptd.format.keys import Version, checkpoint_prefix, manifest_key, shard_key
from ckptd.format.proof import prove
from ckptd.format.records import Receipt, ShardProof, encode
from ckptd.limits import BLOCK_BYTES_WRITTEN
from ckptd.storage import Backend, ObjectInfo, Source
from ckptd_backends.local import LocalBackend
from ckptd_backends.local_directories import Directories
from ckptd_backends.sources import source_of
from tests.power.files import ModelFiles, PowerLost
from tests.power.life import Life, Pending, Snapshotted, contents_of
from tests.power.life import save as _save

Wrong = Callable[[], AbstractContextManager[object]]

_fsync, _link, _rename, _unlink = ModelFiles.fsync, ModelFiles.link, ModelFiles.rename, ModelFiles.unlink


def _nothing(*_: object) -> None:
    """Done, it says."""


async def _nothing_later(*_: object) -> None:
    """Done, it says."""


def _link_and_sync(files: ModelFiles, descriptor: int, target: str) -> None:
    _link(files, descriptor, target)
    _fsync(files, descriptor)


def _rename_and_sync(files: ModelFiles, source: str, target: str) -> None:
    _rename(files, source, target)
    descriptor = files.open(target)
    _fsync(files, descriptor)
    files.close(descriptor)


async def _put_in_place(
    backend: LocalBackend, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False
) -> ObjectInfo:
    files, path, source = backend._files, backend._path(key), source_of(data)
    view = source.view
    await source.ready(0, view.nbytes)
    await source.complete()
    folder = os.path.dirname(path)
    backend._directories.ensure(folder)
    try:
        descriptor = files.create(path)
    except FileExistsError:
        if if_absent:
            raise AlreadyExists("an object is there", key=key) from None
        files.unlink(path)
        descriptor = files.create(path)
    files.write(descriptor, view, 0)
    files.fsync(descriptor)
    files.fsync_directory(folder)
    files.close(descriptor)
    return ObjectInfo(key, view.nbytes, 0.0)


def _delete_unsynced(backend: LocalBackend, paths: Mapping[str, str]) -> list[Exception]:
    for path in paths.values():
        if _is_there(backend, path):
            backend._files.unlink(path)
    return []


def _delete_what_is_there(backend: LocalBackend, paths: Mapping[str, str]) -> list[Exception]:
    for path in paths.values():
        if _is_there(backend, path):
            backend._files.unlink(path)
            backend._files.fsync_directory(os.path.dirname(path))
    return []


def _is_there(backend: LocalBackend, path: str) -> bool:
    try:
        backend._files.state(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _proof(contents: Contents, source: Snapshotted, attempt: str) -> Receipt:
    snapshot = contents.snapshot
    proof = ShardProof(
        attempt=attempt,
        block_bytes=BLOCK_BYTES_WRITTEN,
        blocks=source.blocks,
        bytes=source.view.nbytes,
        checksum="",
        digest=hex_digest(source.blocks),
        key=shard_key(snapshot.version, snapshot.rank, snapshot.world, attempt),
    )
    return Receipt(shard=proof, snapshot=msgspec.Raw(contents.doc))


async def _upload_receipt_first(backend: Backend, contents: Contents, source: Snapshotted, _: object) -> Uploaded:
    receipt = _proof(contents, source, token())
    data = await put_receipt(backend, contents.receipt_key, receipt)
    await backend.put(receipt.shard.key, source)
    return Uploaded(data, "")


async def _save_manifest_first(life: Life, pending: Pending, adopted: bool) -> None:
    world = pending.member.world
    slots = [contents_of(replace(pending.member, rank=rank), pending.step) for rank in range(world)]
    sources = [Snapshotted(shard, contents.blocks) for shard, contents in slots]
    receipts = [
        _proof(contents, source, f"{pending.version}") for (_, contents), source in zip(slots, sources, strict=True)
    ]
    proved = prove([encode(receipt) for receipt in receipts])
    await put_same(life.backend, manifest_key(pending.version), encode(proved.manifest))
    for key, data in proved.objects.items():
        await put_same(life.backend, key, data)
    for (_, contents), source, receipt in zip(slots, sources, receipts, strict=True):
        await life.backend.put(receipt.shard.key, source)
        await put_same(life.backend, contents.receipt_key, encode(receipt))


async def _save_told_early(life: Life, pending: Pending, adopted: bool) -> None:
    """The last rank's snapshot is said to be durable when its put has only begun."""
    world = pending.member.world
    life.promises.durable.add((pending.version, world - 1, world))
    await _save(life, pending, adopted)


async def _delete_data_first(this: Any, version: Version) -> None:
    run = this.survey.run
    await run.backend.delete([info.key async for info in run.backend.scan(checkpoint_prefix(version))])
    await run.backend.delete([manifest_key(version)])


def _on_files(**methods: object) -> Wrong:
    return lambda: mock.patch.multiple(ModelFiles, **methods)


def _on_backend(**methods: object) -> Wrong:
    return lambda: mock.patch.multiple(LocalBackend, **methods)


def _shards_unsynced(files: ModelFiles, descriptor: int) -> None:
    if files.state_of(descriptor).size_bytes < 8192:
        _fsync(files, descriptor)


def _unlink_and_die(files: ModelFiles, path: str) -> None:
    """Whoever removes a manifest dies of it: few stories come to that by chance."""
    _unlink(files, path)
    if "/manifests/" in path and "~" not in path:
        files.stopped = True
        raise PowerLost


@contextlib.contextmanager
def _gone_is_gone() -> Iterator[None]:
    with (
        mock.patch.object(retention, "settle", _nothing_later),
        mock.patch.object(LocalBackend, "_delete", _delete_what_is_there),
        mock.patch.object(ModelFiles, "unlink", _unlink_and_die),
    ):
        yield


WRONG: Mapping[str, Wrong] = {
    "files are not synced": _on_files(fsync=_nothing),
    "shards are not synced": _on_files(fsync=_shards_unsynced),
    "new folders are not synced": lambda: mock.patch.object(Directories, "_sync_name", _nothing),
    "folders are not synced": _on_files(fsync_directory=_nothing),
    "named before it is synced": _on_files(fsync=_nothing, link=_link_and_sync, rename=_rename_and_sync),
    "written in place": _on_backend(put=_put_in_place),
    "receipt before shard": lambda: mock.patch("tests.power.life.upload", _upload_receipt_first),
    "manifest before shards": lambda: mock.patch("tests.power.life.save", _save_manifest_first),
    "told before it is durable": lambda: mock.patch("tests.power.life.save", _save_told_early),
    "data deleted before its manifest": lambda: mock.patch.object(
        cast(Any, retention)._Pass, "_delete_committed", _delete_data_first
    ),
    "deletions are not synced": _on_backend(_delete=_delete_unsynced),
    "a receipt that is seen is taken to be durable": lambda: mock.patch("ckptd.daemon.upload.settle", _nothing_later),
    "a manifest that is seen is taken to be durable": lambda: mock.patch("ckptd.daemon.commit.settle", _nothing_later),
    "a manifest that is gone is taken to be gone for good": _gone_is_gone,
}
"""What is wrong → the context in which it is done so."""


_copy = Link._copy  # pyright: ignore[reportPrivateUsage]


async def _copy_told_early(link: Link, run: Run, version: Version) -> asyncio.Task[None]:
    link._on_copied(link.owner, link.target, run.id, version)
    return await _copy(link, run, version)


async def _receipt_alone(copy: ShardCopy, *_: object) -> bytes:
    return await put_first(copy.target, copy._key, copy.near)


WRONG_WITH_TIERS: Mapping[str, Wrong] = {
    "files are not synced": WRONG["files are not synced"],
    "folders are not synced": WRONG["folders are not synced"],
    "a copy counts before it is committed": lambda: mock.patch.object(Link, "_copy", _copy_told_early),
    "a copy without its shards": lambda: mock.patch.object(ShardCopy, "bring", _receipt_alone),
}
"""The same for what goes on to further tiers."""
