"""Whether an S3 server keeps its word: tried, not believed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ckptd.errors import AlreadyExists, StorageError, Unavailable
from ckptd.storage import Finding
from ckptd_backends.s3_body import Body, checksum_of, in_base64
from ckptd_backends.s3_client import Requests, answer_seconds
from ckptd_backends.s3_errors import error_code

CLOCK_SKEW_SECONDS_MAX = 60.0
"""S3 refuses requests at 15 minutes; long before that somebody should know."""
PROBE = b"ckptd self-test: these bytes must come back as they are\r\n0\r\n\r\n"

CONDITIONAL_PUT = "conditional put"
"""The subject of the finding that decides whether several writers may share a run."""

_CHECKSUM_REFUSED = {"BadDigest", "XAmzContentChecksumMismatch", "InvalidDigest", "InvalidRequest"}


class SelfTest:
    """One run over one root. The probes' names begin with ``~``, so that no scan shows them; they are deleted."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._name = requests.place.name(f"~probe-{secrets.token_hex(8)}")

    async def run(self) -> list[Finding]:
        """The findings, in the order of the tests. One is always about :data:`CONDITIONAL_PUT`."""
        tests: tuple[Callable[[], Awaitable[Finding]], ...] = (
            self._route,
            self._bytes_come_back,
            self._conditional_put,
            self._checksums,
        )
        try:
            return [await test() for test in tests] + [await self._clock()]
        finally:
            await self._send("delete_object")

    async def _send(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._requests.send(operation, self._name, Key=self._name, **parameters)

    async def _put(self, *, checksum: bytes | None = None, **parameters: Any) -> dict[str, Any]:
        if self._requests.options.checksum == "crc32c":
            parameters["ChecksumCRC32C"] = in_base64(checksum or checksum_of(PROBE))
        return await self._send("put_object", Body=Body(memoryview(PROBE)), **parameters)

    async def _route(self) -> Finding:
        return Finding("ok", "route", await self._requests.pool.run(self._requests.route))

    async def _bytes_come_back(self) -> Finding:
        await self._put()
        answer = await self._send("get_object")
        stored = await self._requests.pool.run(answer["Body"].read)
        if stored == PROBE:
            return Finding("ok", "bytes", "what was put comes back")
        return Finding(
            "error",
            "bytes",
            f"the store changed what was put: {len(PROBE)} bytes went in, {len(stored)} other bytes came back",
            "it may keep the framing of the upload inside the object; do not use this store",
        )

    async def _conditional_put(self) -> Finding:
        subject = CONDITIONAL_PUT
        try:
            await self._put(IfNoneMatch="*")
        except AlreadyExists:
            return Finding("ok", subject, "a second put of the same name was refused")
        except Unavailable:
            raise
        except StorageError as error:
            return Finding("error", subject, f"the store refuses the condition: {error.message}", _ONE_WRITER)
        return Finding("error", subject, "the store ignored If-None-Match and overwrote the object", _ONE_WRITER)

    async def _checksums(self) -> Finding:
        if self._requests.options.checksum == "none":
            return Finding("warning", "checksums", "off by option: damage on the way shows only in verify")
        try:
            await self._put(checksum=b"\0\0\0\0")
        except StorageError as error:
            if error_code(error) in _CHECKSUM_REFUSED:
                return Finding("ok", "checksums", "a put with a wrong checksum was refused")
            raise
        return Finding(
            "warning", "checksums", "the store accepts wrong checksums: damage on the way shows only in verify"
        )

    async def _clock(self) -> Finding:
        before = time.time()
        there = answer_seconds(await self._put())
        skew = there - (before + time.time()) / 2
        if there and abs(skew) > CLOCK_SKEW_SECONDS_MAX:
            return Finding("warning", "clock", f"the store's clock differs by {skew:+.0f} s", "set the clock, by NTP")
        return Finding(
            "ok", "clock", f"the store's clock differs by {skew:+.0f} s" if there else "the store tells none"
        )


_ONE_WRITER = "use one writer for each run, or another store"
