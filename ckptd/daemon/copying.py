"""One rank's shard from a nearer tier to a further one: verified on the way, never whole in memory, under its name."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

from ckptd.checkpoint.objects import place
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.daemon.receipts import put_first, skip_reason
from ckptd.errors import IntegrityError, NotFound, SaveError, SaveSkipped
from ckptd.format.keys import receipt_key
from ckptd.limits import PAGE_BYTES, RECEIPT_BYTES_MAX
from ckptd.storage import Backend

_NO_RESERVE = 0x4000
"""``MAP_NORESERVE``, which Python's mmap does not name: pages count when they are touched."""

OnBytes = Callable[[int], None]
"""Called with the size of what has just been stored, or was there already."""


class CopySource:
    """A :class:`ckptd.storage.ReleasableSource` over a shard in another tier: a part is read and verified when it is
    asked for, and its memory given back when it is stored. To be closed."""

    def __init__(self, reader: CheckpointReader, rank: int, size_bytes: int, on_bytes: OnBytes) -> None:
        self._reader = reader
        self._rank = rank
        self._on_bytes = on_bytes
        self._pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._memory = memoryview(self._pages)
        self._view = self._memory.toreadonly()

    @property
    def view(self) -> memoryview:
        return self._view

    async def ready(self, start: int, stop: int) -> None:
        """See :class:`ckptd.storage.Source`. Raises what :meth:`CheckpointReader.read` raises."""
        await self._reader.read(self._rank, start, stop, self._memory[start:stop])

    def stored(self, start: int, stop: int) -> None:
        """See :class:`ckptd.storage.ReleasableSource`."""
        self._on_bytes(stop - start)
        first = -(-start // PAGE_BYTES) * PAGE_BYTES
        last = stop if stop == len(self._view) else stop // PAGE_BYTES * PAGE_BYTES
        if first < last:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)

    async def complete(self) -> None:
        """Every part was verified when it was read."""

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        with contextlib.suppress(BufferError):  # the traceback of a failed put may still hold a part of it
            self._view.release()
            self._memory.release()
            self._pages.close()


async def copy_shard(reader: CheckpointReader, rank: int, target: Backend, on_bytes: OnBytes) -> bytes:
    """The rank's receipt, as it is durable at ``target`` on return, with its shard: the same names, the same bytes.
    What an earlier attempt has brought there is not sent again.

    Raises :class:`SaveSkipped` where the rank was given up there, :class:`SaveError` where another shard is in its
    place, :class:`IntegrityError` for damage in the nearer tier, and what the stores raise.
    """
    shard = (await reader.receipt(rank)).receipt.shard
    data = await reader.receipt_bytes(rank)
    key = receipt_key(reader.version, rank, reader.manifest.world)
    try:
        found = await target.get(key, limit_bytes=RECEIPT_BYTES_MAX)
    except NotFound:
        if not await _is_stored(target, shard.key, shard.bytes):
            await _put_shard(reader, rank, target, on_bytes)
        found = await put_first(target, key, data)
    else:
        on_bytes(shard.bytes)
    if found == data:
        return data
    if (reason := skip_reason(found)) is not None:
        raise SaveSkipped(f"{place(target, key)}: skipped: {reason}")
    raise SaveError(f"{place(target, key)} is the receipt of another attempt than that in {reader.run.backend.url}")


async def _is_stored(target: Backend, key: str, size_bytes: int) -> bool:
    """An attempt's name is put whole or not at all, and with no other bytes."""
    try:
        return (await target.head(key)).size_bytes == size_bytes
    except NotFound:
        return False


async def _put_shard(reader: CheckpointReader, rank: int, target: Backend, on_bytes: OnBytes) -> None:
    shard = (await reader.receipt(rank)).receipt.shard
    source = CopySource(reader, rank, shard.bytes, on_bytes)
    try:
        stored = await target.put(shard.key, source)
    finally:
        source.close()
    if stored.size_bytes != shard.bytes:
        raise IntegrityError(f"{place(target, shard.key)}: stored {stored.size_bytes} of {shard.bytes} bytes")
