"""Checkpoints made by hand: shards and receipts as a client and a daemon would write them, without either."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptd.format.cover import pieces_in_file_order, resident_start, residents_in_slot_order
from ckptd.format.digests import digest_blocks, hex_digest
from ckptd.format.dtypes import ITEM_BYTES, element_count
from ckptd.format.keys import Version, shard_key
from ckptd.format.names import piece_name
from ckptd.format.records import (
    Box,
    Layout,
    Parent,
    Piece,
    Reference,
    ShardProof,
    Snapshot,
    Span,
    TensorEntry,
    encode,
    receipt_of,
)
from ckptd.format.remainder import remainder
from ckptd.format.shard import StoredPiece, cut_in_blocks, header_digests, lay_out
from ckptd.limits import BLOCK_BYTES_MAX, PAGE_BYTES

RUN = "0123456789abcdef0123456789abcdef"
EMPTY_TREE = {"$": "dict", "v": []}


@dataclass(frozen=True)
class Held:
    """A tensor as one rank holds it: pieces are where they lie in it, and their bytes. ``resident``: those in its slot
    only."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[tuple[Box | Span | None, bytes]] = ()
    per_rank: bool = False
    resident: Sequence[tuple[Box | Span | None, bytes]] = ()


@dataclass(frozen=True)
class Rank:
    """One rank's save."""

    tensors: Sequence[Held] = ()
    rank: int = 0
    world: int = 1
    step: int = 100
    generation: int = 1
    run: str = RUN
    launch: str = "launch#0"
    parent: Version | None = None
    parts: Sequence[str] = ("model",)
    aliases: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    tree: Any = field(default_factory=lambda: EMPTY_TREE)
    attempt: str = "a1"
    block_bytes: int = BLOCK_BYTES_MAX
    check_replicas: bool = False
    references: Sequence[Reference] = ()
    """What of it lies in shards of other checkpoints."""
    format: int = 0
    """Of the receipt; 0: as it is written now."""

    @property
    def version(self) -> Version:
        return Version(self.step, self.generation)

    def stored(self) -> tuple[Layout, bytes]:
        """The layout and the shard's bytes, without what lies elsewhere."""
        layout, slot = self.held()
        if not self.references:
            return layout, slot[: layout.shard_bytes]
        left = remainder(layout, self.references)
        return layout, left.header + b"".join(slot[run.start : run.start + run.length] for run in left.runs)

    def held(self) -> tuple[Layout, bytes]:
        """The layout and the slot's bytes: the shard, and resident pieces behind it."""
        pieces = [
            StoredPiece(piece_name(held.name, number, len(held.pieces)), held.dtype, _shape(where, held.shape))
            for held in self.tensors
            for number, (where, _) in enumerate(held.pieces)
        ]
        laid = lay_out(pieces)
        shard = bytearray(laid.size_bytes)
        shard[: len(laid.header)] = laid.header
        offsets = iter(laid.offsets)
        behind = bytearray()
        start = -(-laid.size_bytes // PAGE_BYTES) * PAGE_BYTES
        entries: list[TensorEntry] = []
        for held in self.tensors:
            found: list[Piece] = []
            for where, data in held.pieces:
                at = next(offsets)
                shard[at : at + len(data)] = data
                found.append(_piece(where, at, data))
            residents = []
            for where, data in held.resident:
                residents.append(_piece(where, start + len(behind), data))
                behind += data
            entries.append(
                TensorEntry(
                    dtype=held.dtype,
                    name=held.name,
                    per_rank=held.per_rank,
                    pieces=tuple(found),
                    resident=tuple(residents),
                    shape=held.shape,
                )
            )
        layout = Layout(
            aliases=dict(self.aliases),
            header_bytes=len(laid.header),
            resident_bytes=start + len(behind) if behind else 0,
            shard_bytes=len(shard),
            tensors=tuple(entries),
        )
        return layout, bytes(shard).ljust(start if behind else 0, b"\0") + bytes(behind)

    def snapshot(self, layout: Layout) -> Snapshot:
        parent = self.parent and Parent(generation=self.parent.generation, step=self.parent.step)
        return Snapshot(
            check_replicas=self.check_replicas,
            generation=self.generation,
            launch=self.launch,
            layout=msgspec.Raw(encode(layout)),
            metrics=dict(self.metrics),
            parent=parent,
            parts=tuple(self.parts),
            rank=self.rank,
            run=self.run,
            step=self.step,
            tree=msgspec.Raw(msgspec.json.encode(self.tree)),
            world=self.world,
        )

    def receipt(self) -> bytes:
        layout, slot = self.held()
        sizes = [piece.bytes for piece in pieces_in_file_order(layout)]
        header = remainder(layout, self.references).header if self.references else slot[: layout.header_bytes]
        blocks = header_digests(header, self.block_bytes)
        blocks += digest_blocks(memoryview(slot), cut_in_blocks(layout.header_bytes, sizes, self.block_bytes))
        sizes = [piece.bytes for piece in residents_in_slot_order(layout)] if self.check_replicas else []
        resident_blocks = digest_blocks(
            memoryview(slot), cut_in_blocks(resident_start(layout), sizes, self.block_bytes)
        )
        proof = ShardProof(
            attempt=self.attempt,
            block_bytes=self.block_bytes,
            blocks=blocks,
            bytes=len(self.stored()[1]),
            checksum="",
            digest=hex_digest(blocks),
            key=shard_key(self.version, self.rank, self.world, self.attempt),
            references=tuple(self.references),
            resident_blocks=resident_blocks,
        )
        receipt = receipt_of(proof, msgspec.Raw(encode(self.snapshot(layout))))
        return encode(msgspec.structs.replace(receipt, format=self.format or receipt.format))


def _piece(where: Box | Span | None, at: int, data: bytes) -> Piece:
    box, span = (where, None) if isinstance(where, Box) else (None, where)
    return Piece(at=at, box=box, bytes=len(data), span=span)


def whole(name: str, dtype: str, shape: tuple[int, ...], *, per_rank: bool = False, seed: int = 1) -> Held:
    """A tensor that one rank holds all of, filled with a pattern."""
    size = element_count(shape) * ITEM_BYTES[dtype]
    return Held(name, dtype, shape, [(None, bytes((seed + 7 * i) % 251 for i in range(size)))], per_rank)


def zeros(where: Box | Span | None, dtype: str, shape: tuple[int, ...]) -> tuple[Box | Span | None, bytes]:
    """A piece of zeros, of the length that it must have."""
    return where, bytes(element_count(_shape(where, shape)) * ITEM_BYTES[dtype])


def _shape(where: Box | Span | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(where, Box):
        return where.lengths
    return (where.stop - where.start,) if where else shape


def changed(receipt: bytes, path: str, value: object) -> bytes:
    """A receipt in which the member at ``path`` (``snapshot/layout/shard_bytes``) is another."""
    record = json.loads(receipt)
    *folders, name = path.split("/")
    node = record
    for folder in folders:
        node = node[int(folder) if isinstance(node, list) else folder]
    node[int(name) if isinstance(node, list) else name] = value
    return msgspec.json.encode(record)
