"""One file that is being read. Blocking; the counterpart of :mod:`ckptd_backends.local_writer`."""

from __future__ import annotations

from ckptd.errors import NotFound, ShortRead
from ckptd.limits import MIB, PAGE_BYTES
from ckptd_backends.files import Files, address_of, unsupported
from ckptd_backends.local_errors import mapped
from ckptd_backends.sources import Part, parts_of

DIRECT_READ_BYTES_MIN = 4 * MIB
"""Smaller reads go through the page cache."""


class OpenFile:
    """The calls: ``open``, any number of ``read`` at once, and always ``close`` at last."""

    def __init__(self, files: Files, key: str, path: str) -> None:
        self._files = files
        self._key = key
        self._path = path
        self._descriptor = -1

    def open(self) -> None:
        """Raises :class:`NotFound` where nothing is, or a folder; :class:`ckptd.errors.AccessDenied` for a link, a pipe
        or what else no writer of ckptd has put there."""
        with mapped(self._key, self._path):
            try:
                self._descriptor = self._files.open(self._path)
            except IsADirectoryError:
                raise NotFound("no such object", key=self._key) from None

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            self._files.close(self._descriptor)
            self._descriptor = -1

    def read(self, out: memoryview, offset: int) -> None:
        """Fill ``out`` with the bytes from ``offset`` on. Raises :class:`ShortRead`."""
        done = 0
        fell_back = False
        with mapped(self._key, self._path):
            while done < len(out):
                try:
                    count = self._files.read(self._descriptor, out[done:], offset + done)
                except OSError as error:
                    if fell_back or not unsupported(error):
                        raise
                    fell_back = True
                    self.set_direct(False)  # a short read left us unaligned, or there is no direct I/O here
                    continue
                if count == 0:
                    raise ShortRead(f"ends at byte {offset + done}, wanted up to {offset + len(out)}", key=self._key)
                done += count

    def set_direct(self, direct: bool) -> None:
        """Read past the page cache from now on, where the file system can, or through it."""
        try:
            self._files.set_direct(self._descriptor, direct)
        except OSError as error:
            if not unsupported(error):
                raise


def direct_body(out: memoryview, offset: int) -> Part:
    """The part of ``out`` that lies on whole pages both in memory and in the file, or an empty one at its end if that
    is too small to be worth while."""
    head = -offset % PAGE_BYTES
    body = (len(out) - head) // PAGE_BYTES * PAGE_BYTES
    if body >= DIRECT_READ_BYTES_MIN and (address_of(out) + head) % PAGE_BYTES == 0:
        return Part(head, head + body)
    return Part(len(out), len(out))


def edges(out: memoryview, body: Part, part_bytes: int) -> list[Part]:
    """What lies before and behind the body, in parts."""
    return [*parts_of(body.start, part_bytes), *parts_of(len(out), part_bytes, start=body.stop)]
