"""Reading a committed checkpoint: nothing is handed out that its digest does not vouch for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Self

from ckptd.checkpoint import leases
from ckptd.checkpoint.catalog import Catalog
from ckptd.checkpoint.concurrency import each, in_thread
from ckptd.checkpoint.kept import Kept
from ckptd.checkpoint.locating import promised_pieces, sought
from ckptd.checkpoint.objects import damaged, place
from ckptd.checkpoint.regions import Region
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import spoken
from ckptd.checkpoint.shard_map import RankRecords, ShardMap, map_shard
from ckptd.errors import (
    AccessDenied,
    CoverageError,
    IntegrityError,
    NoCheckpoint,
    NotFound,
    ShortRead,
    StorageError,
    UsageError,
)
from ckptd.format.common_tree import Merge
from ckptd.format.fingerprints import Part
from ckptd.format.keys import Version, tombstone_key
from ckptd.format.records import (
    Common,
    IndexEntry,
    IndexPiece,
    Manifest,
    TensorEntry,
)
from ckptd.format.references import Stretch
from ckptd.limits import MIB

WINDOWS_IN_FLIGHT_MAX = 16
RECEIPTS_KEPT_BYTES = 256 * MIB
"""Of receipts, as they lie in storage, that stay in memory beyond the newest one; decoded they take up to three times
that. A reader of everything opens some tens of them, each of some MiB at most."""
RECEIPTS_IN_FLIGHT_MAX = 8
_log = logging.getLogger(__name__)

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
        self._shards = Kept[int, ShardMap](RECEIPTS_KEPT_BYTES, RECEIPTS_IN_FLIGHT_MAX)
        self._catalog = Catalog(run.backend, manifest)
        self._common = Kept[None, Common](0, 1)

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
        return self._catalog.manifest_place

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
        return await self._catalog.receipt_bytes(rank)

    async def find(self, name: str) -> IndexEntry | None:
        """What the index says of a tensor that is one value for the whole world, or nothing. Loads only the part of
        the index that can hold it. The index has no digest that anybody else vouches for; see :meth:`locate`."""
        return (await self._catalog.find(name))[0]

    async def locate(self, name: str, wanted: Region) -> list[IndexPiece]:
        """The pieces of a tensor that is one value for the whole world which hold some element of ``wanted``, in order
        of rank and place, as the receipts of their ranks promise them; together they hold all of it. Opens no other
        receipts, and takes a time that grows with the pieces that it finds (and with those that the index lists, where
        they are no grid).

        Raises :class:`IntegrityError` where the index and the receipts do not agree, or some of it is not there;
        :class:`UsageError` for a name that is not in the index, or elements that the tensor does not have.
        """
        entry, lists = await self._catalog.find(name)
        if entry is None:
            raise UsageError(f"{spoken(self.version)} has no {name!r} that is one value for all ranks")
        try:
            parts = sought(entry, lists, wanted, self.manifest.world)
            found = await each(parts.items(), RECEIPTS_IN_FLIGHT_MAX, partial(self._promised, entry))
        except CoverageError as error:
            raise IntegrityError(f"{self.manifest_place}: {error.message}") from None
        return [piece for of_rank in found for piece in of_rank]

    async def _promised(self, entry: IndexEntry, sought_of: tuple[int, list[Part]]) -> list[IndexPiece]:
        rank, parts = sought_of
        return promised_pieces(entry, rank, (await self._shard(rank)).entry(entry.name), parts)

    async def block_bytes(self, rank: int) -> int:
        """How long the digest blocks of a rank's shard are."""
        return (await self._shard(rank)).records.receipt.shard.block_bytes

    async def shard(self, rank: int) -> ShardMap:
        """The map of a rank's shard."""
        return await self._shard(rank)

    def entries(self) -> AsyncIterator[IndexEntry]:
        """Every tensor that is one value for the whole world, in order of name; one part of the index at a time."""
        return self._catalog.entries()

    def beside(self) -> AsyncIterator[tuple[str, bytes]]:
        """Key and bytes of every object that the manifest names beside receipts, equal to what it promises."""
        return self._catalog.beside()

    async def common(self) -> Common:
        """What the state trees of all ranks have in common; of a single rank, its own."""
        return await self._common.get(None, self._load_common)

    async def aliases(self) -> Mapping[str, str]:
        """Further names of tensors → the names in the index, or of values that each rank calls its own."""
        return (await self.common()).aliases

    # Bytes

    async def read_shard(self, rank: int, out: memoryview, *, on_bytes: OnBytes | None = None) -> None:
        """A rank's whole shard, every block verified, with the pieces that it refers to in their places. ``out``:
        exactly its size, from ``start`` to ``stop`` of :meth:`shard`."""
        shard = await self._shard(rank)
        await self.read(rank, shard.start, shard.stop, out, on_bytes=on_bytes)

    async def read(self, rank: int, start: int, stop: int, out: memoryview, *, on_bytes: OnBytes | None = None) -> None:
        """The bytes ``[start, stop)`` of a rank's shard, as its layout counts them and wherever they are stored, into
        ``out``, of exactly that size. Whole digest blocks are read and verified, in parallel."""
        shard = await self._shard(rank)
        if not shard.start <= start <= stop <= shard.stop:
            raise UsageError(f"bytes {start} to {stop} of a shard of {shard.stop} bytes")
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

        await each(shard.windows(shard.start, shard.stop), self._width, one)

    async def _fill(self, shard: ShardMap, window: tuple[int, int], target: memoryview) -> None:
        """Read the blocks of a window into ``target``, of exactly their size, and verify them. What differs is read
        once more: bytes may have been damaged on the way, and what is stored is sound."""
        if self._lease is not None:
            with contextlib.suppress(StorageError):  # what is deleted then shows as missing
                await self._lease.keep()
        stretch = shard.stretch(shard.starts[window[0]])
        if (bad := await self._first_bad_block(shard, stretch, window, target)) is not None:
            _log.warning("%s differs from its digest: reading again", place(self._backend, stretch.key))
            bad = await self._first_bad_block(shard, stretch, window, target)
        if bad is not None:
            first, last = shard.starts[bad], shard.starts[bad + 1]
            lies, moved = shard.what_lies_at(first, last), stretch.at - stretch.start
            what = f"bytes {first + moved} to {last + moved}, {lies}, differ from their digest"
            raise self._damaged(stretch.key, what)

    async def _first_bad_block(
        self, shard: ShardMap, stretch: Stretch, window: tuple[int, int], target: memoryview
    ) -> int | None:
        key, moved = stretch.key, stretch.at - stretch.start
        async with self._gate:
            try:
                await self._backend.read_into(key, target, offset=shard.starts[window[0]] + moved)
            except NotFound:
                raise self._damaged(key, "is missing, though the manifest promises it") from None
            except ShortRead as error:
                promise = f"the receipt promises {shard.object_bytes(key)} bytes"
                raise self._damaged(key, f"ends early: {error.message}; {promise}") from error
            return await in_thread(shard.first_bad_block, window, target)

    # Details

    async def _shard(self, rank: int) -> ShardMap:
        async def load() -> tuple[ShardMap, int]:
            data = await self.receipt_bytes(rank)
            return await in_thread(map_shard, self.run.backend.url, self.manifest, rank, data), len(data)

        return self._shards.peek(rank) or await self._shards.get(rank, load)

    async def _load_common(self) -> tuple[Common, int]:
        found = await self._catalog.common()
        if found is not None:
            return found
        if self.manifest.world == 1:
            _, snapshot, layout = await self.receipt(0)
            return Common(aliases=layout.aliases, tree=snapshot.tree), 0
        merge, names = Merge(), dict[str, object]()  # as the first release committed
        for rank in range(self.manifest.world):
            _, snapshot, layout = await self.receipt(rank)
            merge.add(snapshot.tree, layout.aliases)
            names |= {entry.name: None for entry in layout.tensors}
        return Common(aliases=merge.aliases(names), tree=merge.tree), 0

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
