"""What a manifest names beside shards: receipts, the index, and what the state trees have in common.

All of it is small, and handed out only where size and digest are those that the manifest promises. Of what lies in
parts, only the part that is needed is loaded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator
from functools import partial

from ckptd.checkpoint.concurrency import in_thread
from ckptd.checkpoint.kept import Kept
from ckptd.checkpoint.objects import damaged, decode_at, place
from ckptd.checkpoint.selectors import spoken
from ckptd.errors import NotFound, TooLarge, UsageError
from ckptd.format.digests import hex_digest
from ckptd.format.keys import common_key, index_key, manifest_key, receipt_key, receipts_key
from ckptd.format.records import (
    AnyRecord,
    Common,
    Index,
    IndexEntry,
    IndexRef,
    Manifest,
    ObjectRef,
    RankLists,
    ReceiptList,
    ReceiptRef,
)
from ckptd.limits import MIB, RECEIPTS_INLINE_MAX
from ckptd.storage import Backend

PARTS_KEPT_BYTES = 64 * MIB
"""Of parts of the index, as they lie in storage, that stay in memory beyond the newest one; and of parts of the list of
receipts."""


class Catalog:
    """The small objects of one checkpoint. Raises :class:`ckptd.errors.IntegrityError` or
    :class:`ckptd.errors.FormatError`, naming the object, for one that is missing, short or changed."""

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend = backend
        self._manifest = manifest
        self._version = manifest.version
        self._indexes = Kept[int, Index](PARTS_KEPT_BYTES, 1)
        self._receipt_lists = Kept[int, ReceiptList](PARTS_KEPT_BYTES, 1)

    @property
    def manifest_place(self) -> str:
        """The manifest as messages name it."""
        return place(self._backend, manifest_key(self._version))

    async def receipt_bytes(self, rank: int) -> bytes:
        """A receipt as it lies in storage, equal to what the manifest promises."""
        manifest = self._manifest
        if not 0 <= rank < manifest.world:
            raise UsageError(f"{spoken(self._version)} has ranks 0 to {manifest.world - 1}, not {rank}")
        refs, first = manifest.receipts, 0
        count = manifest.world
        if manifest.receipt_parts:
            number, first = rank // RECEIPTS_INLINE_MAX, rank - rank % RECEIPTS_INLINE_MAX
            count = min(RECEIPTS_INLINE_MAX, manifest.world - first)
            refs = (await self._receipt_list(number)).receipts
        wanted = receipt_key(self._version, rank, manifest.world)
        ref = refs[rank - first] if len(refs) == count else None
        if ref is None or (ref.rank, ref.key) != (rank, wanted):
            raise damaged(self.manifest_place, f"does not name {wanted}")
        return await self._object(ref)

    async def find(self, name: str) -> tuple[IndexEntry | None, RankLists]:
        """What the index says of a tensor, or nothing, and the lists of ranks that it may name. Loads only the part of
        the index that can hold it."""
        entries, lists = self._manifest.index, self._manifest.rank_lists
        if entries is None:
            number = bisect_right(self._manifest.index_parts, name, key=lambda ref: ref.first) - 1
            if number < 0 or name > self._manifest.index_parts[number].last:
                return None, ()
            part = await self._index_part(number)
            entries, lists = part.tensors, part.rank_lists
        at = bisect_left(entries, name, key=lambda entry: entry.name)
        return (entries[at] if at < len(entries) and entries[at].name == name else None), lists

    async def _index_part(self, number: int) -> Index:
        key, ref = index_key(self._version, number), self._manifest.index_parts[number]
        return await self._indexes.get(number, partial(self._load, key, ref, Index))

    async def _receipt_list(self, number: int) -> ReceiptList:
        parts = self._manifest.receipt_parts
        if number >= len(parts):
            raise damaged(self.manifest_place, f"names {len(parts)} parts of its receipts, and there are more")
        key = receipts_key(self._version, number)
        return await self._receipt_lists.get(number, partial(self._load, key, parts[number], ReceiptList))

    async def entries(self) -> AsyncIterator[IndexEntry]:
        """Every tensor that is one value for the whole world, in order of name; one part of the index at a time."""
        for entry in self._manifest.index or ():
            yield entry
        for number in range(len(self._manifest.index_parts)):
            for entry in (await self._index_part(number)).tensors:
                yield entry

    async def common(self) -> tuple[Common, int] | None:
        """What the state trees have in common, with its size in bytes, where the manifest names it."""
        ref = self._manifest.common
        return None if ref is None else await self._load(common_key(self._version), ref, Common)

    async def beside(self) -> AsyncIterator[tuple[str, bytes]]:
        """Key and bytes of every object that the manifest names beside receipts, equal to what it promises."""
        manifest = self._manifest
        named: list[tuple[str, ObjectRef | IndexRef]] = [
            (index_key(self._version, number), ref) for number, ref in enumerate(manifest.index_parts)
        ]
        named += [(receipts_key(self._version, number), ref) for number, ref in enumerate(manifest.receipt_parts)]
        if manifest.common is not None:
            named.append((common_key(self._version), manifest.common))
        for key, ref in named:
            yield key, await self._named(key, ref)

    async def _load(self, key: str, ref: ObjectRef | IndexRef, kind: type[AnyRecord]) -> tuple[AnyRecord, int]:
        data = await self._named(key, ref)
        return await in_thread(decode_at, place(self._backend, key), data, kind), len(data)

    async def _named(self, key: str, ref: ObjectRef | IndexRef) -> bytes:
        if ref.key != key:
            raise damaged(self.manifest_place, f"names {ref.key[:200]} where {key} must be")
        return await self._object(ref)

    async def _object(self, ref: ObjectRef | IndexRef | ReceiptRef) -> bytes:
        where = place(self._backend, ref.key)
        try:
            data = await self._backend.get(ref.key, limit_bytes=ref.bytes)
        except NotFound:
            raise damaged(where, "is missing, though the manifest promises it") from None
        except TooLarge:
            raise damaged(where, f"is longer than the {ref.bytes} bytes that the manifest promises") from None
        if len(data) != ref.bytes:
            raise damaged(where, f"has {len(data)} bytes, and the manifest promises {ref.bytes}")
        if await in_thread(hex_digest, data) != ref.digest:
            raise damaged(where, "differs from the digest that the manifest promises")
        return data
