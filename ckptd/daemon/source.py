"""A slot as the source of a put: parts leave while it fills, and each block is digested once, just before it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from ckptd.checkpoint.concurrency import each, in_thread
from ckptd.daemon.fill import Fill
from ckptd.format.digests import DIGEST_BYTES, digest_blocks
from ckptd.limits import MIB

DIGESTED_AT_ONCE_BYTES = 32 * MIB
"""Of a shard that is still being filled; so that digesting keeps up with it."""
DIGESTS_AT_ONCE = 4
COPIED_AT_ONCE_BYTES = MIB
"""A tenth of a millisecond, for which the loop has to wait."""


class Blocks(NamedTuple):
    """The digest blocks of a slot, by number."""

    starts: array[int]
    stops: array[int]
    of_shard: int
    """So many are the shard's, see :func:`ckptd.format.shard.block_bounds`. The others are of what lies behind it in
    the slot and is to be digested too, though it is not put."""

    @classmethod
    def of(cls, shard: Iterable[tuple[int, int]], residents: Iterable[tuple[int, int]] = ()) -> Blocks:
        """From where each starts and stops."""
        bounds = list(shard)
        of_shard = len(bounds)
        bounds += residents
        return cls(array("Q", [start for start, _ in bounds]), array("Q", [stop for _, stop in bounds]), of_shard)


class SlotSource:
    """A :class:`ckptd.storage.Source`. :meth:`release` it when the puts are over."""

    def __init__(self, fill: Fill, blocks: Blocks, threads: Executor) -> None:
        self._fill = fill
        self._starts, self._stops, self._shard_blocks = blocks
        self._digests = bytearray(DIGEST_BYTES * len(self._stops))
        self._claimed = bytearray(len(self._stops))
        self._digesting: set[asyncio.Future[None]] = set()
        self._threads = threads
        self._view = fill.held.arena.shard(fill.slot, fill.record)
        self._held = fill.held.arena.held(fill.slot, fill.record)
        self.began_seconds = time.monotonic()
        self.sent_bytes = 0
        """Of parts that were ready; at most the size of the shard, where a backend repeats none."""
        self.progress_seconds = time.monotonic()
        """When a part last became ready, on the monotonic clock."""

    @property
    def view(self) -> memoryview:
        return self._view

    async def ready(self, start: int, stop: int) -> None:
        """See :class:`ckptd.storage.Source`. Raises :class:`ckptd.errors.SnapshotVoided`."""
        await self._fill.final(stop)
        await self._digest(bisect_right(self._stops, start), bisect_right(self._stops, stop))
        self._fill.check()
        self._advance(stop - start)

    def _advance(self, size: int) -> None:
        self.sent_bytes = min(self.sent_bytes + size, len(self._view))
        self.progress_seconds = time.monotonic()

    async def digested(self) -> None:
        """Digest everything, as it becomes final, and return when it is sealed and digested. Raises
        :class:`ckptd.errors.SnapshotVoided`."""

        async def one(start: int) -> None:
            stop = min(start + DIGESTED_AT_ONCE_BYTES, len(self._view))
            await self._fill.final(stop)
            await self._digest(bisect_right(self._stops, start), bisect_right(self._stops, stop))

        await each(range(0, len(self._view), DIGESTED_AT_ONCE_BYTES), DIGESTS_AT_ONCE, one)
        await self.complete()

    async def copy(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Copy bytes of the sealed shard: from each place as many as the memory beside it takes. Raises
        :class:`ckptd.errors.SnapshotVoided`."""
        await in_thread(self._copy, parts)
        self._fill.check()
        self._advance(sum(len(out) for _, out in parts))

    def _copy(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        for start, out in parts:
            for at in range(0, len(out), COPIED_AT_ONCE_BYTES):
                stop = min(at + COPIED_AT_ONCE_BYTES, len(out))
                out[at:stop] = self._view[start + at : start + stop]

    async def complete(self) -> None:
        """Waits for the seal, and for all digests. Raises :class:`ckptd.errors.SnapshotVoided`."""
        await self._fill.ended()
        self._fill.check()
        await self._digest(0, len(self._stops))
        self._fill.check()

    async def _digest(self, first: int, stop: int) -> None:
        """Digest what is unclaimed of these blocks, and wait for all digests that are being taken."""
        while (begin := self._claimed.find(0, first, stop)) >= 0:
            claimed = self._claimed.find(1, begin, stop)
            end = claimed if claimed >= 0 else stop
            self._claimed[begin:end] = b"\1" * (end - begin)
            task = asyncio.get_running_loop().run_in_executor(self._threads, self._digest_blocks, begin, end)
            self._digesting.add(task)
            task.add_done_callback(self._digesting.discard)
        if self._digesting:
            # Whoever is cancelled here leaves the digests to the others: a claimed block is digested once.
            done, _ = await asyncio.wait(set(self._digesting))
            for task in done:
                task.result()

    def _digest_blocks(self, first: int, stop: int) -> None:
        found = digest_blocks(self._held, zip(self._starts[first:stop], self._stops[first:stop], strict=True))
        self._digests[first * DIGEST_BYTES : stop * DIGEST_BYTES] = found

    @property
    def unhealthy(self) -> str:
        """Why what was saved is of no use, or empty; known once :meth:`complete` has returned."""
        return self._fill.unhealthy

    @property
    def blocks(self) -> bytes:
        """The packed digests of the shard's blocks; complete once :meth:`complete` has returned."""
        return bytes(self._digests[: self._shard_blocks * DIGEST_BYTES])

    @property
    def resident_blocks(self) -> bytes:
        """Those of the resident pieces, likewise."""
        return bytes(self._digests[self._shard_blocks * DIGEST_BYTES :])

    async def release(self) -> None:
        """Let go of the slot's memory. Idempotent."""
        if self._digesting:
            await asyncio.wait(set(self._digesting))
        with contextlib.suppress(BufferError):  # the traceback of a failed put may still hold a part of it
            self._held.release()
            self._view.release()
