"""Reading a committed checkpoint: nothing is handed out that its digest does not vouch for."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self, TypeVar

from ckptd.checkpoint import leases
from ckptd.checkpoint.concurrency import each, in_thread
from ckptd.checkpoint.objects import damaged, decode_at, place
from ckptd.checkpoint.regions import Region, piece_region, slabs
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import spoken
from ckptd.checkpoint.shard_map import RankRecords, ShardMap, map_shard
from ckptd.errors import (
    AccessDenied,
    IntegrityError,
    NoCheckpoint,
    NotFound,
    ShortRead,
    StorageError,
    TooLarge,
    UsageError,
)
from ckptd.format.digests import hex_digest
from ckptd.format.keys import Version, index_key, manifest_key, receipt_key, tombstone_key
from ckptd.format.records import Index, IndexEntry, IndexPiece, IndexRef, Manifest, TensorEntry

WINDOWS_IN_FLIGHT_MAX = 16
RECORDS_KEPT_MAX = 8
"""Ranks whose receipt, and parts of the index that, stay in memory; a receipt may have many MiB."""

K = TypeVar("K")
V = TypeVar("V")
OnBytes = Callable[[int], None]
"""Called with the size of what has just been read and verified."""


class CheckpointReader:
    """Reads one checkpoint. Bounded memory beyond what the caller gives: windows in flight and a few records.

    Bytes that are missing, short or changed raise :class:`IntegrityError` or :class:`FormatError`, naming the object;
    a store that cannot tell raises its :class:`StorageError`. Of a read that raised, ``out`` holds anything. To be
    closed, best by ``async with``.
    """

    def __init__(self, run: Run, manifest: Manifest, lease: leases.HeldLease | None = None) -> None:
        self.run = run
        self.manifest = manifest
        self._backend = run.backend
        self._lease = lease
        self._width = max(1, min(WINDOWS_IN_FLIGHT_MAX, run.backend.capabilities.inflight_max))
        self._gate = asyncio.Semaphore(self._width)
        self._loading = asyncio.Lock()
        self._shards: dict[int, ShardMap] = {}
        self._parts: dict[str, tuple[IndexEntry, ...]] = {}

    @classmethod
    async def open(cls, run: Run, version: Version, *, holder: str | None = None) -> CheckpointReader:
        """Read the manifest. With ``holder`` (host, process, launch), hold a reader's lease until :meth:`aclose`, so
        that the checkpoint is not deleted meanwhile; where the store is read-only to us, go on without.

        Raises :class:`NoCheckpoint` where it is not committed, or is being deleted.
        """
        lease = None
        if holder is not None:
            with contextlib.suppress(AccessDenied):
                lease = await leases.take(
                    run.backend, leases.reader_stem(version), purpose="reader", holder=holder, version=version
                )
        try:
            if lease is not None:
                await _refuse_announced(run, version)
            return cls(run, await run.manifest(version), lease)
        except BaseException:
            if lease is not None:
                await lease.release()
            raise

    @property
    def version(self) -> Version:
        return self.manifest.version

    @property
    def manifest_place(self) -> str:
        """The manifest as messages name it."""
        return place(self._backend, manifest_key(self.version))

    async def aclose(self) -> None:
        """Give the lease back. Idempotent; the backend stays open."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # Records

    async def receipt(self, rank: int) -> RankRecords:
        """What there is of a rank: receipt, snapshot and layout."""
        return (await self._shard(rank)).records

    async def promised(self, rank: int, name: str) -> TensorEntry | None:
        """What a rank's receipt says of a tensor, or nothing."""
        return (await self._shard(rank)).entry(name)

    async def receipt_bytes(self, rank: int) -> bytes:
        """A receipt as it lies in storage, equal to what the manifest promises."""
        if not 0 <= rank < self.manifest.world:
            raise UsageError(f"{spoken(self.version)} has ranks 0 to {self.manifest.world - 1}, not {rank}")
        refs = self.manifest.receipts
        wanted = receipt_key(self.version, rank, self.manifest.world)
        if len(refs) != self.manifest.world or (refs[rank].rank, refs[rank].key) != (rank, wanted):
            raise damaged(self.manifest_place, f"does not name {wanted}")
        return await self._object(wanted, refs[rank].bytes, refs[rank].digest)

    async def find(self, name: str) -> IndexEntry | None:
        """Where the pieces of a tensor lie that is one value for the whole world, or nothing. Loads only the part of
        the index that can hold it."""
        entries = self.manifest.index
        if entries is None:
            number = bisect_right(self.manifest.index_parts, name, key=lambda ref: ref.first) - 1
            if number < 0 or name > self.manifest.index_parts[number].last:
                return None
            entries = await self._index_part(number)
        at = bisect_left(entries, name, key=lambda entry: entry.name)
        return entries[at] if at < len(entries) and entries[at].name == name else None

    async def locate(self, name: str, wanted: Region) -> list[IndexPiece]:
        """The stored pieces of a tensor that hold some of ``wanted``; none where the world has no such tensor."""
        entry = await self.find(name)
        if entry is None:
            return []
        return [piece for piece in entry.pieces if slabs(piece_region(piece, entry.shape), wanted, 1)]

    async def block_bytes(self, rank: int) -> int:
        """How long the digest blocks of a rank's shard are."""
        return (await self._shard(rank)).records.receipt.shard.block_bytes

    async def shard(self, rank: int) -> ShardMap:
        """The map of a rank's shard."""
        return await self._shard(rank)

    async def entries(self) -> AsyncIterator[IndexEntry]:
        """Every tensor that is one value for the whole world, in order of name; one part of the index at a time."""
        for entry in self.manifest.index or ():
            yield entry
        for number in range(len(self.manifest.index_parts)):
            for entry in await self._index_part(number):
                yield entry

    async def index_part_bytes(self, number: int) -> bytes:
        """A part of the index as it lies in storage, equal to what the manifest promises."""
        ref: IndexRef = self.manifest.index_parts[number]
        if ref.key != index_key(self.version, number):
            raise damaged(self.manifest_place, f"names a foreign index, {ref.key[:200]}")
        return await self._object(ref.key, ref.bytes, ref.digest)

    # Bytes

    async def read_shard(self, rank: int, out: memoryview, *, on_bytes: OnBytes | None = None) -> None:
        """A rank's whole shard, every block verified. ``out``: exactly its size, see ``receipt(rank)``."""
        await self.read(rank, 0, (await self._shard(rank)).size_bytes, out, on_bytes=on_bytes)

    async def read(self, rank: int, start: int, stop: int, out: memoryview, *, on_bytes: OnBytes | None = None) -> None:
        """The bytes ``[start, stop)`` of a rank's shard into ``out``, of exactly that size. Whole digest blocks are
        read and verified, in parallel."""
        shard = await self._shard(rank)
        if not 0 <= start <= stop <= shard.size_bytes:
            raise UsageError(f"bytes {start} to {stop} of a shard of {shard.size_bytes} bytes")
        if out.readonly or not out.c_contiguous or out.nbytes != stop - start:
            raise UsageError(f"{stop - start} bytes need writable, contiguous memory of that size, not {out.nbytes}")
        if start == stop:
            return
        view = out.cast("B")

        async def one(window: tuple[int, int]) -> None:
            begin, end = shard.starts[window[0]], shard.starts[window[1]]
            low, high = max(begin, start), min(end, stop)
            wanted = view[low - start : high - start]
            if (low, high) == (begin, end):
                await self._fill(shard, window, wanted)
            else:
                blocks = memoryview(bytearray(end - begin))
                await self._fill(shard, window, blocks)
                wanted[:] = blocks[low - begin : high - begin]
            if on_bytes is not None:
                on_bytes(high - low)

        await each(shard.windows(start, stop), self._width, one)

    async def check_shard(self, rank: int, *, on_bytes: OnBytes | None = None) -> None:
        """Read and verify a rank's whole shard, and keep nothing."""
        shard = await self._shard(rank)

        async def one(window: tuple[int, int]) -> None:
            size = shard.starts[window[1]] - shard.starts[window[0]]
            await self._fill(shard, window, memoryview(bytearray(size)))
            if on_bytes is not None:
                on_bytes(size)

        await each(shard.windows(0, shard.size_bytes), self._width, one)

    async def _fill(self, shard: ShardMap, window: tuple[int, int], target: memoryview) -> None:
        """Read the blocks of a window into ``target``, of exactly their size, and verify them."""
        if self._lease is not None:
            with contextlib.suppress(StorageError):  # what is deleted then shows as missing
                await self._lease.keep()
        key = shard.records.receipt.shard.key
        async with self._gate:
            try:
                await self._backend.read_into(key, target, offset=shard.starts[window[0]])
            except NotFound:
                raise self._damaged(key, "is missing, though the manifest promises it") from None
            except ShortRead as error:
                promise = f"the receipt promises {shard.size_bytes} bytes"
                raise self._damaged(key, f"ends early: {error.message}; {promise}") from error
            bad = await in_thread(shard.first_bad_block, window, target)
        if bad is not None:
            first, last = shard.starts[bad], shard.starts[bad + 1]
            lies = shard.what_lies_at(first, last)
            raise self._damaged(key, f"bytes {first} to {last}, {lies}, differ from their digest")

    # Details

    async def _shard(self, rank: int) -> ShardMap:
        async with self._loading:  # one receipt at a time, as each may be large
            found = self._shards.get(rank)
            if found is None:
                data = await self.receipt_bytes(rank)
                found = await in_thread(map_shard, self.run.backend.url, self.manifest, rank, data)
                _remember(self._shards, rank, found)
            return found

    async def _index_part(self, number: int) -> tuple[IndexEntry, ...]:
        key = index_key(self.version, number)
        async with self._loading:
            found = self._parts.get(key)
            if found is None:
                data = await self.index_part_bytes(number)
                found = (await in_thread(decode_at, place(self._backend, key), data, Index)).tensors
                _remember(self._parts, key, found)
            return found

    async def _object(self, key: str, size_bytes: int, wanted: str) -> bytes:
        """A small object that another one vouches for."""
        try:
            data = await self._backend.get(key, limit_bytes=size_bytes)
        except NotFound:
            raise self._damaged(key, "is missing, though the manifest promises it") from None
        except TooLarge:
            raise self._damaged(key, f"is longer than the {size_bytes} bytes that the manifest promises") from None
        if len(data) != size_bytes:
            raise self._damaged(key, f"has {len(data)} bytes, and the manifest promises {size_bytes}")
        if await in_thread(hex_digest, data) != wanted:
            raise self._damaged(key, "differs from the digest that the manifest promises")
        return data

    def _damaged(self, key: str, what: str) -> IntegrityError:
        return damaged(place(self._backend, key), what)


async def _refuse_announced(run: Run, version: Version) -> None:
    """Raise :class:`NoCheckpoint` where a deletion is announced. Whoever deletes announces it before looking for
    leases, and we took ours before looking here: one of the two sees the other."""
    try:
        await run.backend.head(tombstone_key(version))
    except NotFound:
        return
    raise NoCheckpoint(f"{run.backend.url}: {spoken(version)} is being deleted")


def _remember(cache: dict[K, V], key: K, value: V) -> None:
    while len(cache) >= RECORDS_KEPT_MAX:
        del cache[next(iter(cache))]
    cache[key] = value
