"""Sources of a put whose bytes do not lie together: they are brought together part by part, never all at once."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Awaitable, Callable

from ckptd.limits import PAGE_BYTES

_NO_RESERVE = 0x4000
"""``MAP_NORESERVE``, which Python's mmap does not name: pages count when they are touched."""

Fill = Callable[[int, int, memoryview], Awaitable[None]]
"""Brings the bytes from the first to the second place of the object into memory of just that size. May raise, to
abandon the put."""
OnStored = Callable[[int], None]
"""Called with the size of what has just been stored."""


async def _nothing() -> None:
    pass


class AssembledSource:
    """A :class:`ckptd.storage.ReleasableSource`: a part is filled when it is asked for, and its memory given back when
    it is stored. To be closed."""

    def __init__(
        self,
        size_bytes: int,
        fill: Fill,
        *,
        on_stored: OnStored | None = None,
        complete: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """``complete``: awaited before the object becomes visible."""
        self._fill = fill
        self._on_stored = on_stored
        self._complete = complete
        self._pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._memory = memoryview(self._pages)
        self._view = self._memory.toreadonly()

    @property
    def view(self) -> memoryview:
        return self._view

    async def ready(self, start: int, stop: int) -> None:
        """See :class:`ckptd.storage.Source`. Raises what ``fill`` raises."""
        await self._fill(start, stop, self._memory[start:stop])

    def stored(self, start: int, stop: int) -> None:
        """See :class:`ckptd.storage.ReleasableSource`."""
        if self._on_stored is not None:
            self._on_stored(stop - start)
        first = -(-start // PAGE_BYTES) * PAGE_BYTES
        last = stop if stop == len(self._view) else stop // PAGE_BYTES * PAGE_BYTES
        if first < last:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)

    async def complete(self) -> None:
        """See :class:`ckptd.storage.Source`."""
        await self._complete()

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        with contextlib.suppress(BufferError):  # the traceback of a failed put may still hold a part of it
            self._view.release()
            self._memory.release()
            self._pages.close()
