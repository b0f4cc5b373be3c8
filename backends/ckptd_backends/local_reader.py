"""One file that is being read. Blocking; the counterpart of :mod:`ckptd_backends.local_writer`."""

from __future__ import annotations

from ckptd.errors import NotFound, ShortRead
from ckptd.limits import MIB, PAGE_BYTES
from ckptd_backends.files import Files, address_of, new_pages, unsupported
from ckptd_backends.local_errors import mapped
from ckptd_backends.local_root import Root
from ckptd_backends.sources import Part

DIRECT_READ_BYTES_MIN = 4 * MIB
"""Smaller reads go through the page cache."""


class OpenFile:
    """The calls: ``open``, any number of ``read`` at once, and always ``close`` at last."""

    def __init__(self, files: Files, root: Root, key: str, path: str) -> None:
        self._files = files
        self._root = root
        self._key = key
        self._path = path
        self._descriptor = -1
        self._direct = False

    def open(self, *, direct: bool) -> None:
        """``direct``: read past the page cache, where the file system can. Raises :class:`NotFound` where nothing is,
        or a folder; :class:`ckptd.errors.AccessDenied` for a link, a pipe or what else no writer of ckptd has put
        there."""
        with mapped(self._key, self._path):
            try:
                self._descriptor = self._root.found(self._path, lambda: self._files.open(self._path))
            except IsADirectoryError:
                raise NotFound("no such object", key=self._key) from None
        self._set_direct(direct)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            self._files.close(self._descriptor)
            self._descriptor = -1

    def read_all(self, out: memoryview, offset: int, *, direct: bool) -> None:
        """All three calls in one."""
        try:
            self.open(direct=direct)
            self.read(out, offset)
        finally:
            self.close()

    def read(self, out: memoryview, offset: int) -> None:
        """Fill ``out`` with the bytes from ``offset`` on. Raises :class:`ShortRead`."""
        with mapped(self._key, self._path):
            done = self._read_pages(out, offset) if self._direct else 0
            if done < len(out) and self._direct:
                self._set_direct(False)  # the file ends here, a short read left us unaligned, or it takes no direct I/O
            while done < len(out):
                count = self._files.read(self._descriptor, out[done:], offset + done)
                if count == 0:
                    raise ShortRead(f"ends at byte {offset + done}, wanted up to {offset + len(out)}", key=self._key)
                done += count

    def _read_pages(self, out: memoryview, offset: int) -> int:
        """The whole pages that hold these bytes, in one call: what lies in the first and the last page beside them goes
        to memory of its own. Returns how many bytes of ``out`` are filled."""
        before, behind = offset % PAGE_BYTES, -(offset + len(out)) % PAGE_BYTES
        edges = new_pages(2)
        first, last = edges[:PAGE_BYTES], edges[PAGE_BYTES:]
        body = out[PAGE_BYTES - before if before else 0 : len(out) - (PAGE_BYTES - behind if behind else 0)]
        parts = [*([first] if before else []), body, *([last] if behind else [])]
        try:
            count = self._files.read_parts(self._descriptor, parts, offset - before)
        except OSError as error:
            if unsupported(error):
                return 0
            raise
        if before:
            size = min(PAGE_BYTES, count) - before
            if size <= 0:
                return 0
            out[:size] = first[before : before + size]
        if behind and (size := count - before - (len(out) - (PAGE_BYTES - behind))) > 0:
            size = min(size, PAGE_BYTES - behind)
            out[len(out) - (PAGE_BYTES - behind) :][:size] = last[:size]
        return min(count - before, len(out))

    def _set_direct(self, direct: bool) -> None:
        try:
            self._files.set_direct(self._descriptor, direct)
            self._direct = direct
        except OSError as error:
            if not unsupported(error):
                raise


def takes_direct(out: memoryview, offset: int) -> bool:
    """Whether it is worth while to read these bytes past the page cache, and possible: pages of the file lie on pages
    of the memory."""
    return len(out) >= DIRECT_READ_BYTES_MIN and (address_of(out) - offset) % PAGE_BYTES == 0


def page_parts(size: int, offset: int, part_bytes: int) -> list[Part]:
    """``[0, size)`` of what is read from ``offset`` on, cut between pages of the file."""
    first = min(part_bytes - offset % PAGE_BYTES, size)
    starts = [0, *range(first, size, part_bytes)]
    return [Part(start, stop) for start, stop in zip(starts, [*starts[1:], size], strict=True)]
