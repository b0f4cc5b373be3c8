"""Multipart uploads: parts straight from memory, each with its checksum, and nothing left behind where one fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from dataclasses import dataclass
from typing import Any

from ckptd.errors import CkptdError, StorageError, Unavailable, first_line
from ckptd.storage import ObjectInfo, Source
from ckptd_backends.retry import is_retryable, retried
from ckptd_backends.s3_body import Body, checksum_of, in_base64
from ckptd_backends.s3_client import Requests, answer_seconds, encryption, required
from ckptd_backends.s3_connections import Breaker
from ckptd_backends.s3_errors import UploadGone
from ckptd_backends.s3_journal import OpenUpload, UploadJournal
from ckptd_backends.s3_options import part_bytes_for
from ckptd_backends.sources import Part, each_part, parts_of, stored

log = logging.getLogger("ckptd.storage")


ABORT_SECONDS = 5.0
"""How long a put that fails or is cancelled may take to clean up behind itself before it leaves that to the journal."""


@dataclass(frozen=True, slots=True)
class SentPart:
    """What the store said of a part, and the checksum that it verified (empty where checksums are off)."""

    number: int
    etag: str
    checksum: bytes


class Upload:
    """One multipart upload of a source. Used once."""

    def __init__(self, requests: Requests, journal: UploadJournal, key: str, source: Source) -> None:
        self._requests = requests
        self._journal = journal
        self._key = key
        self._where = {"Key": requests.place.name(key)}
        self._source = source
        self._size = source.view.nbytes
        self._checked = requests.options.checksum == "crc32c"

    async def run(self) -> ObjectInfo:
        """Upload, complete, and return what is there then. Where that fails the upload is aborted."""
        pool, policy = self._requests.pool, self._requests.part_policy
        upload = await pool.run(self._journal.begin, self._key)
        try:
            await self._create(upload)
            parts = parts_of(self._size, part_bytes_for(self._size, self._requests.options.part_bytes))
            sent = await each_part(parts, pool.threads, self._send)
            await self._source.complete()
            seconds = await retried(
                policy, f"complete {self._key}", lambda _: self._complete(sent), retry_on=_with_this_upload
            )
        except BaseException as error:
            never_was = not upload.upload_id and isinstance(error, CkptdError) and not error.retryable
            if never_was or await self._aborted(upload):
                await pool.run(self._journal.ended, upload)
            raise
        await pool.run(self._journal.ended, upload)
        checksum = "crc32c:" + ",".join(part.checksum.hex() for part in sent) if self._checked else ""
        return ObjectInfo(self._key, self._size, seconds, checksum, "multipart")

    async def _create(self, upload: OpenUpload) -> None:
        parameters = {**self._where, **encryption(self._requests.options)}
        if self._checked:
            parameters["ChecksumAlgorithm"] = "CRC32C"
        answer = await self._requests.send("create_multipart_upload", self._key, **parameters)
        self._where["UploadId"] = required(answer, "UploadId", self._key)
        await self._requests.pool.run(self._journal.created, upload, answer["UploadId"])

    async def _send(self, index: int, part: Part) -> SentPart:
        what = f"part {index + 1} of {self._key}"

        async def attempt(_: int) -> SentPart:
            await self._source.ready(part.start, part.stop)
            body = Body(self._source.view[part.start : part.stop])
            try:
                sent = await self._requests.run(Breaker(), self._send_here, what, index + 1, body)
            finally:
                body.release()
            stored(self._source, part)
            return sent

        return await retried(self._requests.part_policy, what, attempt, retry_on=_with_this_upload)

    def _send_here(self, what: str, number: int, body: Body) -> SentPart:
        parameters: dict[str, Any] = {**self._where, "PartNumber": number, "Body": body}
        checksum = body.checksum() if self._checked else b""
        if checksum:
            parameters["ChecksumCRC32C"] = in_base64(checksum)
        answer = self._requests.send_here("upload_part", what, **parameters)
        return SentPart(number, required(answer, "ETag", what), checksum)

    async def _complete(self, sent: list[SentPart]) -> float:
        """Make the object visible; returns when, by the store's clock.

        An answer may get lost, and the next attempt then hears that there is no such upload. So after any failure that
        leaves it open, the store is asked for the object itself.
        """
        parts = [
            {"PartNumber": part.number, "ETag": part.etag}
            | ({"ChecksumCRC32C": in_base64(part.checksum)} if part.checksum else {})
            for part in sent
        ]
        try:
            answer = await self._requests.send(
                "complete_multipart_upload", self._key, MultipartUpload={"Parts": parts}, **self._where
            )
            required(answer, "ETag", self._key)
        except Unavailable:
            if (seconds := await self._seconds_if_there(sent)) is None:
                raise
            return seconds
        return answer_seconds(answer)

    async def _seconds_if_there(self, sent: list[SentPart]) -> float | None:
        """When the object was completed, if it is there with our size and our checksum; where the store keeps none,
        its ETag must be the usual one."""
        try:
            head = await self._requests.send("head_object", self._key, Key=self._where["Key"], ChecksumMode="ENABLED")
        except StorageError:
            return None  # not there, or it cannot be told; either way the first error stands
        if "ChecksumCRC32C" in head:
            same = head["ChecksumCRC32C"].startswith(in_base64(checksum_of(b"".join(part.checksum for part in sent))))
        else:
            same = head["ETag"].strip('"') == _etag_over(sent)
        return head["LastModified"].timestamp() if same and head["ContentLength"] == self._size else None

    async def _aborted(self, upload: OpenUpload) -> bool:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await abort(self._requests, upload)
        except (CkptdError, TimeoutError) as error:
            upload.abandoned = True  # the journal has it; it is tried again after the next upload and at the next start
            log.warning("the upload of %s could not be aborted: %s", self._key, first_line(error))
            return False
        return True


async def abort(requests: Requests, upload: OpenUpload) -> int:
    """Abort an upload of this writer's or of a dead one's; returns how many the store still knew.

    Where its id is not known, all uploads of the very same name are meant: names are used by one writer.
    """
    name = requests.place.name(upload.key)
    ids = [upload.upload_id] if upload.upload_id else await _ids_of(requests, upload.key, name)
    aborted = 0
    for upload_id in ids:
        try:
            await requests.send("abort_multipart_upload", upload.key, Key=name, UploadId=upload_id)
            aborted += 1
        except UploadGone:
            continue
    return aborted


async def abort_abandoned(requests: Requests, journal: UploadJournal) -> None:
    """Make up for aborts that the store did not answer. Never raises: what fails again stays in the journal."""
    for upload in journal.abandoned():
        with contextlib.suppress(CkptdError, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await abort(requests, upload)
            await requests.pool.run(journal.ended, upload)


async def abort_stale(requests: Requests, journal: UploadJournal) -> tuple[int, list[Exception]]:
    """Abort this writer's abandoned uploads, and those of dead ones. How many the store still knew, and what went
    wrong."""
    aborted = 0
    failures: list[Exception] = []

    async def settled(upload: OpenUpload) -> bool:
        nonlocal aborted
        try:
            aborted += await abort(requests, upload)
        except CkptdError as error:
            failures.append(error)
            return False
        return True

    for upload in journal.abandoned():
        if await settled(upload):
            await requests.pool.run(journal.ended, upload)
    with journal.dead_writers() as journals:
        for dead in journals:
            if all([await settled(upload) for upload in dead.uploads()]):
                dead.remove()
    return aborted, failures


async def _ids_of(requests: Requests, key: str, name: str) -> list[str]:
    answer = await requests.send("list_multipart_uploads", key, Prefix=name)
    return [found["UploadId"] for found in answer.get("Uploads", []) if found["Key"] == name]


def _with_this_upload(error: BaseException) -> bool:
    return is_retryable(error) and not isinstance(error, UploadGone)


def _etag_over(sent: list[SentPart]) -> str:
    try:
        digests = b"".join(bytes.fromhex(part.etag.strip('"')) for part in sent)
    except ValueError:
        return "unknown"
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(sent)}"
