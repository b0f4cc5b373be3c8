"""Ways to move memory to an S3 server and back: ckptd's, boto3's, and what bare sockets do."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from crc32c import crc32c

from ckptd.storage import Backend, open_backend
from devtools.seaweedfs import S3Endpoint

PART_BYTES = 16 * 2**20
AT_ONCE = 8
"""Requests; the same for all."""

Verify = Callable[[int, memoryview], None]
"""Takes where a part begins, and what has arrived; raises where that is wrong."""


class Way(ABC):
    """One way. Each is opened once, and used several times."""

    def __init__(self, server: S3Endpoint, run: str) -> None:
        self.server = server
        self.run = run
        """A prefix of its own in the bucket."""

    def open(self) -> None:  # noqa: B027
        """Make clients; not timed."""

    @abstractmethod
    def upload(self, key: str, view: memoryview) -> None:
        """All of it, whole at the return."""

    @abstractmethod
    def download(self, key: str, out: memoryview, verify: Verify) -> None:
        """Fill ``out``, every part verified."""

    def close(self) -> None:  # noqa: B027
        """End what was opened."""


class Ckptd(Way):
    """Its backend, in its event loop."""

    def open(self) -> None:
        self._runner = asyncio.Runner()
        options = {**self.server.options, "part_bytes": PART_BYTES, "inflight_max": AT_ONCE}
        self._backend: Backend = open_backend(f"s3://{self.server.bucket}/{self.run}", options)

    def upload(self, key: str, view: memoryview) -> None:
        self._runner.run(self._backend.put(key, view))

    def download(self, key: str, out: memoryview, verify: Verify) -> None:
        async def part(start: int) -> None:
            target = out[start : start + PART_BYTES]
            await self._backend.read_into(key, target, offset=start)
            await asyncio.to_thread(verify, start, target)

        async def all_parts() -> None:
            async with asyncio.TaskGroup() as group:
                for start in range(0, len(out), PART_BYTES):
                    group.create_task(part(start))

        self._runner.run(all_parts())

    def close(self) -> None:
        self._runner.run(self._backend.aclose())
        self._runner.close()


class _View(io.RawIOBase):
    """A view as a file, without copies: boto3 takes no memoryview."""

    def __init__(self, view: memoryview, least_bytes: int) -> None:
        self._view, self._at, self._least = view, 0, least_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._view)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, len(self._view))[whence] + offset
        return self._at

    def read(self, size: int = -1) -> Any:
        stop = len(self._view) if size < 0 else self._at + max(size, self._least)
        found = self._view[self._at : stop]
        self._at += len(found)
        return found or b""


class Boto3Parts(Way):
    """``upload_part`` straight from a view, in threads, and ranged ``get_object`` read into memory; as it comes."""

    tuned = False

    def open(self) -> None:
        self._client = _client(self.server, tuned=self.tuned)
        self._threads = ThreadPoolExecutor(AT_ONCE)

    def upload(self, key: str, view: memoryview) -> None:
        where = {"Bucket": self.server.bucket, "Key": f"{self.run}/{key}"}
        algorithm = {"ChecksumAlgorithm": "CRC32C"} if self.tuned else {}  # of itself it knows CRC32 only
        where["UploadId"] = self._client.create_multipart_upload(**where, **algorithm)["UploadId"]

        def send(start: int) -> dict[str, Any]:
            part = view[start : start + PART_BYTES]
            checksum: dict[str, str] = {}
            if self.tuned:
                value = crc32c(part, gil_release_mode=1).to_bytes(4, "big")
                checksum = {"ChecksumCRC32C": base64.b64encode(value).decode()}
            number, body = start // PART_BYTES + 1, _View(part, 2**20 if self.tuned else 1)
            sent = self._client.upload_part(**where, PartNumber=number, Body=body, **checksum)
            return {"PartNumber": number, "ETag": sent["ETag"], **checksum}

        parts = list(self._threads.map(send, range(0, len(view), PART_BYTES)))
        self._client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})

    def download(self, key: str, out: memoryview, verify: Verify) -> None:
        where = {"Bucket": self.server.bucket, "Key": f"{self.run}/{key}"}

        def read(start: int) -> None:
            target = out[start : start + PART_BYTES]
            stop, at = start + len(target), 0
            body = self._client.get_object(**where, Range=f"bytes={start}-{stop - 1}")["Body"]
            while at < len(target):
                count = body.readinto(target[at:])
                if not count:
                    raise EOFError(f"{key} ends early")
                at += count
            verify(start, target)

        list(self._threads.map(read, range(0, len(out), PART_BYTES)))

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()


class Boto3PartsTuned(Boto3Parts):
    """The same with all that makes it faster: payload not signed, CRC32C given, long reads of the body."""

    tuned = True


class Boto3Transfer(Way):
    """boto3's transfer manager, as it comes."""

    tuned = False

    def open(self) -> None:
        self._client = _client(self.server, tuned=self.tuned)
        self._config = TransferConfig(
            multipart_chunksize=PART_BYTES, max_concurrency=AT_ONCE, preferred_transfer_client="classic"
        )

    def upload(self, key: str, view: memoryview) -> None:
        self._client.upload_fileobj(_Bytes(view), self.server.bucket, f"{self.run}/{key}", Config=self._config)

    def download(self, key: str, out: memoryview, verify: Verify) -> None:
        self._client.download_fileobj(self.server.bucket, f"{self.run}/{key}", _Into(out), Config=self._config)

        def check(start: int) -> None:
            verify(start, out[start : start + PART_BYTES])

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(check, range(0, len(out), PART_BYTES)))

    def close(self) -> None:
        self._client.close()


class Boto3TransferTuned(Boto3Transfer):
    """The same with the payload not signed and no checksum that nobody asked for."""

    tuned = True


class _Bytes(_View):
    """What the transfer manager wants: reads that give bytes."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(view, 1)

    def read(self, size: int = -1) -> Any:
        return bytes(super().read(size))


class _Into(io.RawIOBase):
    """Memory as a file to write."""

    def __init__(self, out: memoryview) -> None:
        self._out, self._at = out, 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, len(self._out))[whence] + offset
        return self._at

    def write(self, data: Any) -> int:
        self._out[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


class BareSockets(Way):
    """The floor: the bytes alone, one request a part, no signature, no checksum."""

    def open(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE)

    def upload(self, key: str, view: memoryview) -> None:
        def send(start: int) -> None:
            part = view[start : start + PART_BYTES]
            with self._connection() as connection:
                connection.sendall(f"PUT /b/{key} HTTP/1.1\r\nContent-Length: {len(part)}\r\n\r\n".encode())
                connection.sendall(part)
                if not connection.recv(65536).startswith(b"HTTP/1.1 200"):
                    raise ConnectionError("the sink refuses")

        list(self._threads.map(send, range(0, len(view), PART_BYTES)))

    def download(self, key: str, out: memoryview, verify: Verify) -> None:
        def read(start: int) -> None:
            target, at = out[start : start + PART_BYTES], 0
            with self._connection() as connection:
                stop = start + len(target) - 1
                connection.sendall(f"GET /b/{key} HTTP/1.1\r\nRange: bytes={start}-{stop}\r\n\r\n".encode())
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += connection.recv(1)
                while at < len(target):
                    at += connection.recv_into(target[at:])
            verify(start, target)

        list(self._threads.map(read, range(0, len(out), PART_BYTES)))

    def _connection(self) -> socket.socket:
        parts = urlsplit(self.server.endpoint_url)
        return socket.create_connection((parts.hostname or "", parts.port or 80))

    def close(self) -> None:
        self._threads.shutdown()


WAYS: dict[str, type[Way]] = {
    "bare sockets": BareSockets,
    "ckptd": Ckptd,
    "boto3 parts": Boto3Parts,
    "boto3 parts, tuned": Boto3PartsTuned,
    "boto3 transfer manager": Boto3Transfer,
    "boto3 transfer manager, tuned": Boto3TransferTuned,
}


def _client(server: S3Endpoint, *, tuned: bool) -> Any:
    options: dict[str, Any] = {"max_pool_connections": AT_ONCE + 4, "signature_version": "s3v4"}
    if tuned:
        options |= {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"payload_signing_enabled": False, "addressing_style": "path"},
        }
    else:
        options["s3"] = {"addressing_style": "path"}
    return cast(Any, boto3).client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name=server.region,
        config=Config(proxies={}, **options),
    )


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and processor seconds of this process."""
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - cpu
