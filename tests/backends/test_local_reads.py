"""Reading files past the page cache, whatever is wanted of them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from ckptd.errors import ShortRead
from ckptd_backends.files import Files, address_of
from ckptd_backends.local import LocalBackend, LocalOptions
from tests.backends.test_local import aligned, takes_direct


@contextlib.asynccontextmanager
async def backend_at(root: Path, files: Files, part_bytes: int = 1 << 20) -> AsyncGenerator[LocalBackend]:
    backend = LocalBackend(str(root / "run"), LocalOptions(part_bytes=part_bytes), files)
    try:
        yield backend
    finally:
        await backend.aclose()


class CountingFiles(Files):
    """Counts the reads of whole pages."""

    def __init__(self) -> None:
        self.page_reads = 0

    def read_parts(self, descriptor: int, outs: Sequence[memoryview], offset: int) -> int:
        self.page_reads += 1
        return super().read_parts(descriptor, outs, offset)


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 5000])
@pytest.mark.parametrize("part_bytes", [1 << 20, 16 << 20])
async def test_pages_are_read_directly_whatever_is_wanted_of_them(tmp_path: Path, start: int, part_bytes: int) -> None:
    """The bytes beside those that are wanted, in the first page and in the last, reach nobody's memory."""
    data = random.Random(start).randbytes((9 << 20) + 777)
    files = CountingFiles()
    async with backend_at(tmp_path, files, part_bytes) as backend:
        await backend.put("x", data)
        for stop in (start + (5 << 20), start + (5 << 20) + 100, (9 << 20) + 4000 - 4096, len(data)):
            memory = bytearray(b"\xaa") * (len(data) + 3 * 4096)
            page = -address_of(memoryview(memory)) % 4096
            at = page + 4096 + start % 4096  # as far from a page's start as in the file
            await backend.read_into("x", memoryview(memory)[at : at + stop - start], offset=start)
            assert memory[at : at + stop - start] == data[start:stop]
            assert memory.count(0xAA, 0, at) == at
            assert memory.count(0xAA, at + stop - start) == len(memory) - at - (stop - start)
        assert files.page_reads >= 4 or not takes_direct(tmp_path)
        more = memoryview(mmap.mmap(-1, len(data) + 4096))[: len(data) + 1]
        with pytest.raises(ShortRead, match=f"ends at byte {len(data)}"):
            await backend.read_into("x", more)


async def test_a_file_system_that_refuses_direct_reads(tmp_path: Path) -> None:
    class Refusing(Files):
        def read_parts(self, descriptor: int, outs: Sequence[memoryview], offset: int) -> int:
            raise OSError(errno.EINVAL, "Invalid argument")

    data = aligned((5 << 20) + 33)
    async with backend_at(tmp_path, Refusing()) as backend:
        await backend.put("x", data)
        out = mmap.mmap(-1, len(data))
        await backend.read_into("x", memoryview(out))
        assert out[:] == data
