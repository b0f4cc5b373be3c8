"""One snapshot to one root: shard, then receipt."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ckptd.checkpoint.objects import token
from ckptd.checkpoint.unchanged import Described
from ckptd.daemon.assembled import AssembledSource
from ckptd.daemon.fencing import check_generation, check_run
from ckptd.daemon.fill import Fill
from ckptd.daemon.owner import Owner
from ckptd.daemon.receipts import put_debug_mark, put_receipt, put_unhealthy, receipt_in
from ckptd.daemon.source import Blocks, SlotSource
from ckptd.errors import (
    FormatError,
    IntegrityError,
    NotFound,
    SaveError,
    first_line,
)
from ckptd.format.cover import check_layout, held_bytes, resident_start, residents_in_slot_order
from ckptd.format.digests import DIGEST_BYTES, digest, hex_digest
from ckptd.format.keys import receipt_key, shard_key
from ckptd.format.records import Reference, ShardProof, Snapshot, decode, decode_layout, receipt_of
from ckptd.format.remainder import Remainder, remainder, runs_within
from ckptd.format.shard import block_bounds, block_count, cut_in_blocks, header_digests
from ckptd.limits import BLOCK_BYTES_WRITTEN, RECEIPT_BYTES_MAX
from ckptd.storage import Backend, ObjectInfo, settle

LAYOUTS_KEPT = 64
"""Of as many ranks of a node; 16 bytes a digest block each."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a slot says that it holds, checked as far as that goes without the shard's bytes."""

    doc: bytes
    snapshot: Snapshot
    header_bytes: int
    """Of the shard."""
    blocks: Blocks
    """Those of resident pieces only where they are to be compared with what their owners write."""

    @property
    def receipt_key(self) -> str:
        return receipt_key(self.snapshot.version, self.snapshot.rank, self.snapshot.world)

    def described(self, blocks: bytes) -> Described:
        """``blocks``: the digests of the shard's blocks."""
        header_blocks = block_count(self.header_bytes, BLOCK_BYTES_WRITTEN)
        digests = blocks[header_blocks * DIGEST_BYTES :]
        return Described(self.snapshot.version, bytes(self.snapshot.layout), digests, BLOCK_BYTES_WRITTEN)


def read_contents(fill: Fill, owner: Owner) -> Contents:
    """Blocking. Raises :class:`FormatError`, :class:`IntegrityError`, :class:`ckptd.errors.CoverageError`."""
    record = fill.record
    doc = fill.held.arena.doc(fill.slot, record)
    snapshot = decode(doc, Snapshot)
    if (snapshot.version, snapshot.rank) != (record.version, owner.seat.rank):
        raise FormatError(
            f"slot {fill.slot} of {owner.seat} holds rank {snapshot.rank} at {snapshot.version}, "
            f"and its record says {record.version}"
        )
    extent = _extents.of(snapshot.layout, check_replicas=snapshot.check_replicas)
    if extent.shard_bytes != record.shard_bytes:
        raise FormatError(f"a shard of {record.shard_bytes} bytes is described as {extent.shard_bytes}")
    if extent.held_bytes != max(record.held_bytes, record.shard_bytes):
        raise FormatError(f"a snapshot of {record.held_bytes} bytes is described as {extent.held_bytes}")
    return Contents(doc, snapshot, extent.header_bytes, extent.blocks)


class _Extent(NamedTuple):
    """Where a layout's bytes lie."""

    shard_bytes: int
    held_bytes: int
    header_bytes: int
    blocks: Blocks


class _Extents:
    """Those of the layouts that came last. A layout is the same from save to save, and takes longer to decode and check
    than all else that is done with a small shard."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[bytes, bool], _Extent] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, raw: msgspec.Raw, *, check_replicas: bool) -> _Extent:
        """Raises :class:`FormatError`, :class:`ckptd.errors.CoverageError`."""
        key = digest(memoryview(raw)), check_replicas
        with self._lock:
            found = self._known.get(key)
        if found is None:
            found = _extent(raw, check_replicas=check_replicas)
        with self._lock:
            self._known[key] = found
            self._known.move_to_end(key)
            while len(self._known) > LAYOUTS_KEPT:
                self._known.popitem(last=False)
        return found


_extents = _Extents()


def _extent(raw: msgspec.Raw, *, check_replicas: bool) -> _Extent:
    layout = decode_layout(raw)
    sizes = [piece.bytes for piece in check_layout(layout)]
    residents = residents_in_slot_order(layout) if check_replicas else []
    resident_sizes = [piece.bytes for piece in residents]
    blocks = Blocks.of(
        block_bounds(layout.header_bytes, sizes, BLOCK_BYTES_WRITTEN),
        cut_in_blocks(resident_start(layout), resident_sizes, BLOCK_BYTES_WRITTEN),
    )
    return _Extent(layout.shard_bytes, held_bytes(layout), layout.header_bytes, blocks)


async def existing_receipt(backend: Backend, contents: Contents) -> bytes | None:
    """The receipt of this very snapshot, where an earlier attempt has put it. Durable on return."""
    try:
        data = await backend.get(contents.receipt_key, limit_bytes=RECEIPT_BYTES_MAX)
    except NotFound:
        return None
    receipt = receipt_in(data, contents.receipt_key)
    if bytes(receipt.snapshot) != contents.doc:
        return None
    await settle(backend, contents.receipt_key)  # the shard was durable first, and lies beside it
    return data


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A durable shard with its durable receipt."""

    receipt: bytes
    path_taken: str


async def _store_everything() -> Sequence[Reference]:
    return ()


async def upload(
    backend: Backend,
    contents: Contents,
    source: SlotSource,
    owner: Owner,
    refer: Callable[[], Awaitable[Sequence[Reference]]] = _store_everything,
) -> Uploaded:
    """Put the shard and then its receipt, at the root of its run and nowhere else. Durable on return.

    ``refer``: asked once the root is known as that of the run, for what is not to be stored again; where there is such,
    the source is digested then.

    Raises :class:`SnapshotVoided`, :class:`Superseded`, :class:`SaveSkipped`, :class:`SaveError`, and what the store
    raises.
    """
    snapshot = contents.snapshot
    await check_run(backend, snapshot.run)
    references = await refer()
    attempt = token()
    key = shard_key(snapshot.version, snapshot.rank, snapshot.world, attempt)
    left = await asyncio.to_thread(_left, contents.snapshot, references) if references else None
    size = left.size_bytes if left is not None else len(source.view)
    info = await (backend.put(key, source) if left is None else _put_remainder(backend, key, left, source))
    try:
        if info.size_bytes != size:
            raise IntegrityError(f"{key}: stored {info.size_bytes} of {size} bytes")
        await check_generation(backend, snapshot, owner)
        if source.unhealthy:
            # Before the receipt, and so before the commit: there is no moment in which it passes for good.
            await put_unhealthy(backend, snapshot.version, snapshot.rank, source.unhealthy)
            await _tell_others(owner, snapshot, source.unhealthy)
        blocks = source.blocks
        if left is not None:
            blocks = header_digests(left.header, BLOCK_BYTES_WRITTEN) + contents.described(blocks).digests
        proof = ShardProof(
            attempt=attempt,
            block_bytes=BLOCK_BYTES_WRITTEN,
            blocks=blocks,
            bytes=info.size_bytes,
            checksum=info.checksum,
            digest=await asyncio.to_thread(hex_digest, blocks),
            key=key,
            references=tuple(references),
            resident_blocks=source.resident_blocks,
        )
        receipt = receipt_of(proof, msgspec.Raw(contents.doc))
        if snapshot.debug:
            await put_debug_mark(backend, snapshot.version)
        return Uploaded(await put_receipt(backend, contents.receipt_key, receipt), info.path_taken)
    except (SaveError, IntegrityError):
        # Certainly no receipt names it. After any other error one may.
        await _discard(backend, key)
        raise


def _left(snapshot: Snapshot, references: Sequence[Reference]) -> Remainder:
    return remainder(decode_layout(snapshot.layout), references)


async def _put_remainder(backend: Backend, key: str, left: Remainder, source: SlotSource) -> ObjectInfo:
    async def fill(start: int, stop: int, out: memoryview) -> None:
        header = left.header[start:stop]
        out[: len(header)] = header
        runs = runs_within(left.runs, start, stop)
        await source.copy([(run.start, out[run.at - start : run.at - start + run.length]) for run in runs])

    assembled = AssembledSource(left.size_bytes, fill, complete=source.complete)
    try:
        return await backend.put(key, assembled)
    finally:
        assembled.close()


async def _discard(backend: Backend, key: str) -> None:
    try:
        await backend.delete([key])
    except Exception as error:
        log.warning("%s remains, of no use: %s", key, first_line(error))


async def _tell_others(owner: Owner, snapshot: Snapshot, reason: str) -> None:
    """A disk of this node's own is not seen by the others. Where the tier that they see is down, they do not learn of
    it before it is copied there."""
    if owner.nearest.shared:
        return
    try:
        await put_unhealthy(owner.home.backend, snapshot.version, snapshot.rank, reason)
    except Exception as error:
        log.warning("%s is unhealthy, and %s does not say so: %s", snapshot.version, owner.home, first_line(error))
