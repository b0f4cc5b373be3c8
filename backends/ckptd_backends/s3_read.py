"""Downloads: ranges in parallel, straight into memory, each under watch while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ckptd.errors import ShortRead, StorageError, TooLarge, Unavailable
from ckptd_backends.retry import retried
from ckptd_backends.s3_body import Download
from ckptd_backends.s3_client import Requests
from ckptd_backends.s3_errors import mapped
from ckptd_backends.sources import Part, each_part, parts_of


async def read_ranges(requests: Requests, key: str, out: memoryview, offset: int) -> None:
    """Fill ``out`` with the object's bytes from ``offset`` on; each range is tried again by itself."""

    async def read(_: int, part: Part) -> None:
        what = f"bytes {offset + part.start} to {offset + part.stop} of {key}"
        await retried(requests.part_policy, what, lambda _: read_one(part))

    async def read_one(part: Part) -> None:
        download = Download(out[part.start : part.stop])
        with _Watch(download, requests.options.no_progress_seconds):
            start, stop = offset + part.start, offset + part.stop
            await requests.run(download.breaker, _read_range, requests, key, start, stop, download)

    await each_part(parts_of(len(out), requests.options.part_bytes), requests.pool.threads, read)


async def read_whole(requests: Requests, key: str, limit_bytes: int) -> bytes:
    """A small object. Raises :class:`TooLarge` before any of its bytes are read."""
    download = Download()
    with _Watch(download, requests.options.no_progress_seconds):
        return await requests.run(download.breaker, _read_whole, requests, key, limit_bytes, download)


class _Watch:
    """Stops a download when nothing arrives for so long. A socket's own time limit starts anew with every byte.

    A context manager. No closure that knows itself: that is a cycle, and would hold the memory that was filled until
    Python next looks for such.
    """

    def __init__(self, download: Download, no_progress_seconds: float) -> None:
        self._download = download
        self._seconds = no_progress_seconds
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._look(0)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, before: int) -> None:
        if self._download.moves == before > 0:
            self._download.stop()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look, self._download.moves)


def _read_range(requests: Requests, key: str, start: int, stop: int, download: Download) -> None:
    download.begin()
    answer = requests.send_here("get_object", key, Key=requests.place.name(key), Range=f"bytes={start}-{stop - 1}")
    with mapped(key, requests.place.url(requests.place.name(key))), contextlib.closing(answer["Body"]):
        size, wanted = _size_of(answer, key), stop - start
        if not answer.get("ContentRange") and not (start == 0 and size == wanted):
            raise StorageError("the store ignores byte ranges", key=key)
        if size < wanted:
            raise ShortRead(f"ends at byte {start + size}, wanted up to {stop}", key=key)
        download.fill(answer["Body"])


def _read_whole(requests: Requests, key: str, limit_bytes: int, download: Download) -> bytes:
    download.begin()
    answer = requests.send_here("get_object", key, Key=requests.place.name(key))
    with mapped(key, requests.place.url(requests.place.name(key))), contextlib.closing(answer["Body"]):
        size = _size_of(answer, key)
        if size > limit_bytes:
            raise TooLarge(f"has {size} bytes, expected at most {limit_bytes}", key=key)
        data = bytearray(size)
        download.out = memoryview(data)
        download.fill(answer["Body"])
        return bytes(data)


def _size_of(answer: dict[str, Any], key: str) -> int:
    """How long the body is by its header. Without one, an answer that was cut off would pass for a whole one."""
    if "ContentLength" not in answer:
        raise Unavailable(
            "the answer does not say how long it is",
            key=key,
            hint="a gateway in between may compress or re-chunk",
        )
    return int(answer["ContentLength"])
