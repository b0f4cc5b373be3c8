"""From the receipts of all ranks to the manifest: the proof that a commit is (promise P4).

A pure function, so that any daemon that sees all receipts computes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptd.errors import CoverageError
from ckptd.format.cover import check_cover, check_layout
from ckptd.format.digests import DIGEST_BYTES, hex_digest
from ckptd.format.keys import Version, index_key, receipt_key
from ckptd.format.records import (
    Index,
    IndexEntry,
    IndexPiece,
    IndexRef,
    Manifest,
    Receipt,
    ReceiptRef,
    Snapshot,
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
    return Commit(manifest, {key: data for key, (data, _, _) in parts.items()})


def _check_belong_together(snapshots: Sequence[Snapshot]) -> None:
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
    seen: dict[str, tuple[str, tuple[int, ...], int, list[IndexPiece]]] = {}
    for rank, (receipt, snapshot) in enumerate(zip(receipts, snapshots, strict=True)):
        layout = decode_layout(snapshot.layout)
        try:
            pieces = check_layout(layout)
        except CoverageError as error:
            raise CoverageError(f"rank {rank}: {error}") from None
        blocks = block_count(layout.header_bytes) + sum(block_count(piece.bytes) for piece in pieces)
        if receipt.shard.bytes != layout.shard_bytes or len(receipt.shard.blocks) != blocks * DIGEST_BYTES:
            raise CoverageError(f"rank {rank}: the receipt's size or digests do not fit its layout")
        if hex_digest(receipt.shard.blocks) != receipt.shard.digest:
            raise CoverageError(f"rank {rank}: the receipt's digests do not add up")
        for entry in layout.tensors:
            if entry.per_rank:
                continue
            dtype, shape, first_rank, found = seen.setdefault(entry.name, (entry.dtype, entry.shape, rank, []))
            if (dtype, shape) != (entry.dtype, entry.shape):
                raise CoverageError(
                    f"{entry.name}: rank {first_rank} has {dtype}{list(shape)}, "
                    f"rank {rank} has {entry.dtype}{list(entry.shape)}"
                )
            found += [IndexPiece(at=p.at, box=p.box, bytes=p.bytes, rank=rank, span=p.span) for p in entry.pieces]
    entries = [
        IndexEntry(dtype=dtype, name=name, pieces=tuple(pieces), shape=shape)
        for name, (dtype, shape, _, pieces) in sorted(seen.items())
    ]
    for indexed in entries:
        check_cover(indexed.name, indexed.shape, indexed.pieces)
    return entries


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
