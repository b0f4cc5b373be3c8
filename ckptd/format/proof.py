"""From the receipts of all ranks to the manifest: the proof that a commit is (promise P4).

A pure function, so that any daemon that sees all receipts computes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptd.errors import CoverageError
from ckptd.format.cover import check_cover, check_layout
from ckptd.format.digests import DIGEST_BYTES, hex_digest
from ckptd.format.keys import Version, index_key, receipt_key, shard_key
from ckptd.format.records import (
    Index,
    IndexEntry,
    IndexPiece,
    IndexRef,
    Layout,
    Manifest,
    Receipt,
    ReceiptRef,
    Snapshot,
    TensorEntry,
    decode,
    decode_layout,
    encode,
)
from ckptd.format.shard import block_count
from ckptd.limits import INDEX_INLINE_BYTES_MAX, INDEX_PART_BYTES_TARGET


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit puts: the parts of the index first, the manifest last."""

    manifest: Manifest
    index_parts: Mapping[str, bytes]
    """Key → bytes; empty where the index lies in the manifest."""
    pinned: bool
    """A rank asked for it to be kept."""


def prove(receipts: Sequence[bytes]) -> Commit:
    """The commit that these receipts, one per rank in order of rank, add up to.

    Raises :class:`CoverageError` where they do not belong together, or a tensor that any rank has seen is not covered
    exactly once; :class:`FormatError` where one cannot be read.
    """
    decoded = [decode(data, Receipt) for data in receipts]
    snapshots = [decode(receipt.snapshot, Snapshot) for receipt in decoded]
    _check_belong_together(snapshots)
    entries = _index(decoded, snapshots)
    first = snapshots[0]
    index, parts = _split_index(entries, first.version)
    manifest = Manifest(
        bytes=sum(receipt.shard.bytes for receipt in decoded),
        generation=first.generation,
        index=index,
        index_parts=tuple(
            IndexRef(bytes=len(data), digest=hex_digest(data), first=first_name, key=key, last=last_name)
            for key, (data, first_name, last_name) in parts.items()
        ),
        launch=first.launch,
        metrics=first.metrics,
        parent=first.parent,
        parts=tuple(sorted({part for snapshot in snapshots for part in snapshot.parts})),
        receipts=tuple(
            ReceiptRef(
                bytes=len(data),
                digest=hex_digest(data),
                key=receipt_key(first.version, snapshot.rank, snapshot.world),
                rank=snapshot.rank,
            )
            for data, snapshot in zip(receipts, snapshots, strict=True)
        ),
        run=first.run,
        step=first.step,
        world=first.world,
    )
    pinned = any(snapshot.pin for snapshot in snapshots)
    return Commit(manifest, {key: data for key, (data, _, _) in parts.items()}, pinned)


def _check_belong_together(snapshots: Sequence[Snapshot]) -> None:
    if not snapshots:
        raise CoverageError("no receipts")
    first = snapshots[0]
    if len(snapshots) != first.world:
        raise CoverageError(f"{len(snapshots)} receipts for a world of {first.world} ranks")
    for rank, snapshot in enumerate(snapshots):
        if snapshot.rank != rank:
            raise CoverageError(f"the receipt of rank {rank} says that it is of rank {snapshot.rank}")
        for field in ("run", "step", "generation", "world", "launch", "parent"):
            mine, theirs = getattr(snapshot, field), getattr(first, field)
            if mine != theirs:
                raise CoverageError(f"ranks 0 and {rank} disagree on {field}: {theirs!r} and {mine!r}")


def _index(receipts: Sequence[Receipt], snapshots: Sequence[Snapshot]) -> list[IndexEntry]:
    """What is one value for the whole world, sorted by name. Every tensor that a rank has seen is covered, the rank's
    own values by the rank itself."""
    seen: dict[str, tuple[int, TensorEntry, list[IndexPiece]]] = {}
    for receipt, snapshot in zip(receipts, snapshots, strict=True):
        rank = snapshot.rank
        for entry in _checked_layout(receipt, snapshot).tensors:
            first_rank, first, found = seen.setdefault(entry.name, (rank, entry, []))
            if _described(entry) != _described(first):
                raise CoverageError(
                    f"{entry.name}: rank {first_rank} has {_described(first)}, rank {rank} has {_described(entry)}"
                )
            pieces = [IndexPiece(at=p.at, box=p.box, bytes=p.bytes, rank=rank, span=p.span) for p in entry.pieces]
            if entry.per_rank:
                check_cover(entry.name, entry.shape, pieces)
            else:
                found += pieces
    entries = [
        IndexEntry(dtype=first.dtype, name=name, pieces=tuple(pieces), shape=first.shape)
        for name, (_, first, pieces) in sorted(seen.items())
        if not first.per_rank
    ]
    for indexed in entries:
        check_cover(indexed.name, indexed.shape, indexed.pieces)
    return entries


def _described(entry: TensorEntry) -> str:
    """That in which all ranks must agree on a tensor; of its own value, a rank decides dtype and shape alone."""
    return "a value of its own" if entry.per_rank else f"{entry.dtype}{list(entry.shape)}"


def _checked_layout(receipt: Receipt, snapshot: Snapshot) -> Layout:
    """A rank's layout, sound in itself and in keeping with the receipt."""
    layout, shard = decode_layout(snapshot.layout), receipt.shard
    try:
        pieces = check_layout(layout)
        sizes = [layout.header_bytes, *(piece.bytes for piece in pieces)]
        blocks = sum(block_count(size, shard.block_bytes) for size in sizes)
        if shard.bytes != layout.shard_bytes or len(shard.blocks) != blocks * DIGEST_BYTES:
            raise CoverageError("the receipt's size or digests do not fit its layout")
        if hex_digest(shard.blocks) != shard.digest:
            raise CoverageError("the receipt's digests do not add up")
        if shard.key != shard_key(snapshot.version, snapshot.rank, snapshot.world, shard.attempt):
            raise CoverageError(f"the receipt's shard lies at {shard.key[:200]}, which is not its place")
    except CoverageError as error:
        raise CoverageError(f"rank {snapshot.rank}: {error}") from None
    return layout


def _split_index(
    entries: list[IndexEntry], version: Version
) -> tuple[tuple[IndexEntry, ...] | None, dict[str, tuple[bytes, str, str]]]:
    """The entries, inline or as parts: key → (bytes, first name, last name)."""
    sizes = [len(encode(entry)) for entry in entries]
    if sum(sizes) <= INDEX_INLINE_BYTES_MAX:
        return tuple(entries), {}
    parts: dict[str, tuple[bytes, str, str]] = {}
    start = 0
    while start < len(entries):
        stop, size = start, 0
        while stop < len(entries) and (stop == start or size + sizes[stop] <= INDEX_PART_BYTES_TARGET):
            size += sizes[stop]
            stop += 1
        chunk = entries[start:stop]
        data = encode(Index(tensors=tuple(chunk)))
        parts[index_key(version, len(parts))] = (data, chunk[0].name, chunk[-1].name)
        start = stop
    return None, parts
