"""Amazon S3, and what speaks its language: MinIO, SeaweedFS, Ceph …

Small objects go up in one request, larger ones in parallel parts straight from memory, each with a CRC32C that the
store checks. Whole operations are retried by the wrapper ``Retrying``; only the parts of large transfers are retried
here, since nobody else knows them, so that one lost part does not cost the whole object.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ckptd.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigError,
    NotFound,
    StorageError,
    TooLarge,
    UsageError,
)
from ckptd.format.keys import KEY_PATTERN
from ckptd.limits import RECEIPT_BYTES_MAX
from ckptd.storage import (
    Backend,
    Capabilities,
    Factory,
    Finding,
    LeavingUploads,
    ObjectInfo,
    SelfTesting,
    Source,
    StorageOptions,
    check_key,
    check_prefix,
)
from ckptd_backends.options import at_most, checked_options
from ckptd_backends.pool import Pool
from ckptd_backends.s3_body import Body, in_base64
from ckptd_backends.s3_client import Requests, answer_seconds, encryption, required
from ckptd_backends.s3_connections import Breaker
from ckptd_backends.s3_delete import Deletions
from ckptd_backends.s3_errors import error_code, from_s3, not_s3
from ckptd_backends.s3_journal import UploadJournal
from ckptd_backends.s3_options import OBJECT_BYTES_MAX, S3Options, place_of
from ckptd_backends.s3_read import read_ranges, read_whole
from ckptd_backends.s3_selftest import CONDITIONAL_PUT, SelfTest
from ckptd_backends.s3_upload import Upload, abort_abandoned, abort_stale
from ckptd_backends.sources import Whole, byte_view, source_of

CONDITIONAL_PUT_BYTES_MAX = RECEIPT_BYTES_MAX
"""Conditional puts go up in one request, since on completing a multipart upload several servers let two writers win."""


class S3Backend:
    """``s3://bucket/prefix``."""

    def __init__(self, url: str, options: S3Options, state_dir: Path | None) -> None:
        self._url = url
        self._pool = Pool(options.inflight_max, url)
        self._requests = Requests(place_of(url), options, self._pool)
        self._journal = UploadJournal(state_dir, f"{options.endpoint_url or ''} {url}")
        self._capabilities = Capabilities(
            put_if_absent=True,
            inflight_max=options.inflight_max,
            part_bytes=options.part_bytes,
            survives_power_loss=True,
        )
        self._deletions = Deletions(self._requests)
        self._bucket_seen = False
        self._bucket_lock = asyncio.Lock()

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """``put_if_absent`` holds until :meth:`self_test` has found out that the store does not honour it."""
        return self._capabilities

    # Writing

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        check_key(key)
        source = source_of(data)
        size = source.view.nbytes
        if size > OBJECT_BYTES_MAX:
            raise TooLarge(f"{size} bytes are more than S3 takes, {OBJECT_BYTES_MAX}", key=key)
        if if_absent and size > CONDITIONAL_PUT_BYTES_MAX:
            raise UsageError(f"{key}: a conditional put takes at most {CONDITIONAL_PUT_BYTES_MAX} bytes, not {size}")
        async with self._pool.operation():
            await self._see_bucket()
            if if_absent or size <= self._capabilities.part_bytes:
                return await self._put_single(key, source, if_absent)
            info = await Upload(self._requests, self._journal, key, source).run()
            await abort_abandoned(self._requests, self._journal)  # the store answers again
            return info

    async def _put_single(self, key: str, source: Source, if_absent: bool) -> ObjectInfo:
        view = source.view
        if view:
            await source.ready(0, view.nbytes)
        if not isinstance(source, Whole):
            view = memoryview(bytes(view))  # sending makes it visible, so it must have been read before completion
        await source.complete()
        parameters: dict[str, Any] = {"Key": self._requests.place.name(key), **encryption(self._requests.options)}
        if if_absent and self._capabilities.put_if_absent:
            parameters["IfNoneMatch"] = "*"
        elif if_absent:
            await self._refuse_if_there(key)
        body = Body(view)
        try:
            return await self._requests.run(Breaker(), self._put_here, key, body, parameters)
        finally:
            body.release()

    def _put_here(self, key: str, body: Body, parameters: dict[str, Any]) -> ObjectInfo:
        checksum = body.checksum() if self._requests.options.checksum == "crc32c" else b""
        if checksum:
            parameters["ChecksumCRC32C"] = in_base64(checksum)
        answer = self._requests.send_here("put_object", key, Body=body, **parameters)
        required(answer, "ETag", key)
        stored = f"crc32c:{checksum.hex()}" if checksum else ""
        return ObjectInfo(key, len(body), answer_seconds(answer), stored, "single")

    async def _refuse_if_there(self, key: str) -> None:
        try:
            await self._head(key)
        except NotFound:
            return
        raise AlreadyExists("an object is there", key=key)

    async def delete(self, keys: Iterable[str]) -> None:
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            check_key(key)
        async with self._pool.operation():
            if failures := await self._deletions.run(wanted):
                raise ExceptionGroup(f"{len(failures)} of {len(wanted)} objects not deleted", failures)

    # Reading

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        check_key(key)
        async with self._pool.operation():
            return await read_whole(self._requests, key, limit_bytes)

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        check_key(key)
        target = byte_view(out)
        async with self._pool.operation():
            if target:
                await read_ranges(self._requests, key, target, offset)
            else:
                await self._head(key)

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)
        async with self._pool.operation():
            return await self._head(key)

    async def _head(self, key: str) -> ObjectInfo:
        await self._see_bucket()  # a HEAD does not tell a missing bucket from a missing object
        name = self._requests.place.name(key)
        try:
            found = await self._requests.send("head_object", key, Key=name, ChecksumMode="ENABLED")
        except StorageError as error:
            code = error_code(error)
            if code in ("400", "403") or not from_s3(error):
                await self._explain(key, name)
                if code != "403":  # a GET finds nothing wrong
                    raise not_s3(f"HEAD {self._requests.place.url(name)}: {code}, and yet it is there", key) from error
            raise
        return ObjectInfo(
            key,
            found["ContentLength"],
            found["LastModified"].timestamp(),
            _stored_checksum(found.get("ChecksumCRC32C", "")),
        )

    async def _explain(self, key: str, name: str) -> None:
        """Raise the reason that the answer to a HEAD has no room for, if a GET tells one."""
        answer = await self._requests.send("get_object", key, Key=name, Range="bytes=0-0")
        answer["Body"].close()

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """The whole listing is fetched first: not every store lists in the order of keys."""
        check_prefix(prefix)
        async with self._pool.operation():
            found = await self._list(prefix)
        for info in sorted(found, key=lambda info: info.key):
            yield info

    async def _list(self, prefix: str) -> list[ObjectInfo]:
        place = self._requests.place
        parameters = {"Prefix": place.name(prefix)}
        found: list[ObjectInfo] = []
        while True:
            page = await self._requests.send("list_objects_v2", prefix, **parameters)
            required(page, "Name", prefix)
            for entry in page.get("Contents", []):
                key = entry["Key"].removeprefix(place.prefix)
                if KEY_PATTERN.fullmatch(key):
                    found.append(ObjectInfo(key, entry["Size"], entry["LastModified"].timestamp()))
            if not page.get("IsTruncated"):
                return found
            if required(page, "NextContinuationToken", prefix) == parameters.get("ContinuationToken"):
                raise StorageError(f"the listing of {place.url(parameters['Prefix'])} does not move on", key=prefix)
            parameters["ContinuationToken"] = page["NextContinuationToken"]

    # The store itself

    async def _see_bucket(self) -> None:
        """Find out once, before the first request whose failure would not say so, that the bucket is there."""
        async with self._bucket_lock:
            if self._bucket_seen:
                return
            try:
                # Unlike a HEAD of the bucket, the answer to this names what is wrong.
                await self._requests.send("list_objects_v2", "", Prefix=self._requests.place.prefix, MaxKeys=1)
            except AccessDenied as error:
                if error_code(error) != "AccessDenied":
                    raise  # else listing alone may be forbidden, and the operation itself will tell
            except ConfigError as error:
                if not self._requests.options.create_bucket or error_code(error) != "NoSuchBucket":
                    raise
                await self._requests.create_bucket()
            self._bucket_seen = True

    async def self_test(self) -> list[Finding]:
        """See :class:`ckptd.storage.SelfTesting`. Where conditional puts are not honoured, ``put_if_absent`` is taken
        back, and such puts look first and then write, which is safe for a single writer only."""
        async with self._pool.operation():
            await self._see_bucket()
            findings = await SelfTest(self._requests).run()
        honoured = all(finding.level == "ok" for finding in findings if finding.subject == CONDITIONAL_PUT)
        self._capabilities = replace(self._capabilities, put_if_absent=honoured)
        return findings

    async def abort_stale_uploads(self) -> int:
        """See :class:`ckptd.storage.LeavingUploads`."""
        async with self._pool.operation():
            aborted, failures = await abort_stale(self._requests, self._journal)
        if failures:
            raise ExceptionGroup(f"{len(failures)} stale uploads not aborted, {aborted} aborted", failures)
        return aborted

    async def aclose(self) -> None:
        await self._requests.aclose()
        self._journal.close()


def _stored_checksum(text: str) -> str:
    """S3's spelling, base64 and ``-<parts>`` where it is one over the checksums of parts, in ours."""
    encoded, _, parts = text.partition("-")
    if not encoded:
        return ""
    checksum = base64.b64decode(encoded).hex()
    return f"crc32c-of:{checksum}-{parts}" if parts else f"crc32c:{checksum}"


def open_s3(url: str, options: StorageOptions, *, state_dir: Path | None, threads_max: int | None) -> Backend:
    """Entry point for ``s3://``. Open uploads are journaled below ``state_dir``, if there is one."""
    checked = checked_options(S3Options, options, url=url)
    capped = msgspec.structs.replace(checked, inflight_max=at_most(checked.inflight_max, threads_max))
    return S3Backend(url, capped, state_dir)


_: Factory = open_s3
__: tuple[type[SelfTesting], type[LeavingUploads]] = (S3Backend, S3Backend)
