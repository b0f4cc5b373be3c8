"""Where each tensor of the state goes in a slot; kept from save to save while the structure stays the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import torch

from ckptd.arena.memory import pages
from ckptd.format import records
from ckptd.format.names import piece_name
from ckptd.format.records import Layout, Piece, TensorEntry
from ckptd.format.shard import ShardLayout, StoredPiece, file_order, lay_out
from ckptd.limits import SLOT_SLACK_BYTES_MIN, SLOT_SLACK_FRACTION
from ckptd_client.capture import Capture, Leaf
from ckptd_client.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of one rank's slot for one structure of its state: the shard, and behind it, from the next page
    boundary on, what is kept in memory only."""

    shard: ShardLayout
    """Its offsets are those of all leaves, by number, from the slot's start."""
    resident_bytes: int
    """Where what is kept in memory only ends in the slot; 0 where there is none."""
    layout: msgspec.Raw
    """The encoded :class:`ckptd.format.records.Layout`."""
    order: tuple[int, ...]
    """Numbers of the leaves that have bytes, in the order in which they lie in the slot."""
    sizes: tuple[int, ...]
    """Bytes of every leaf, by number."""

    @property
    def shard_bytes(self) -> int:
        return self.shard.size_bytes

    @property
    def held_bytes(self) -> int:
        """Of the snapshot in the slot, its record excepted."""
        return max(self.shard_bytes, self.resident_bytes)

    @property
    def doc_at(self) -> int:
        """Where the snapshot's record begins in the slot."""
        return pages(self.held_bytes)

    @classmethod
    def of(cls, capture: Capture) -> Plan:
        """Raises :class:`ckptd.errors.StateError` where the state does not fit the format."""
        leaves = capture.leaves
        stored = _stored(leaves)
        owned = [i for i, leaf in enumerate(leaves) if not leaf.resident and not _is_seen_only(leaf)]
        shard = lay_out([stored[i] for i in owned])
        resident = [i for i, leaf in enumerate(leaves) if leaf.resident]
        resident_at, resident_bytes = _behind(shard, [stored[i] for i in resident])
        at = dict(zip((*owned, *resident), (*shard.offsets, *resident_at), strict=True))
        layout = Layout(
            aliases=capture.aliases,
            header_bytes=len(shard.header),
            resident_bytes=resident_bytes,
            shard_bytes=shard.size_bytes,
            tensors=tuple(_entries(leaves, stored, at)),
        )
        sizes = tuple(piece.size_bytes for piece in stored)
        order = tuple(sorted((i for i in at if sizes[i]), key=lambda i: at[i]))
        offsets = tuple(at.get(i, 0) for i in range(len(stored)))
        full = ShardLayout(shard.header, offsets, shard.size_bytes)
        return cls(full, resident_bytes, msgspec.Raw(records.encode(layout)), order, sizes)

    def slot_bytes(self, doc_bytes: int) -> int:
        """Of a slot that holds this shard and its record, with room for plain values that grow."""
        bare = self.doc_at + pages(doc_bytes)
        return bare + pages(max(SLOT_SLACK_BYTES_MIN, int(bare * SLOT_SLACK_FRACTION)))

    def views(self, slot: memoryview, leaves: Sequence[Leaf]) -> list[torch.Tensor]:
        """For each leaf a tensor over its place in the slot, of its dtype and shape."""
        whole = torch.frombuffer(slot, dtype=torch.uint8)
        # Slot and offsets are aligned for every dtype, so one operation a tensor will do.
        as_dtype = {dtype: whole.view(dtype) for dtype in {leaf.tensor.dtype for leaf in leaves}}
        found: list[torch.Tensor] = []
        for leaf, start, size in zip(leaves, self.shard.offsets, self.sizes, strict=True):
            shape, dtype = leaf.tensor.shape, leaf.tensor.dtype
            if size == 0:
                found.append(torch.empty(shape, dtype=dtype))
            else:
                found.append(as_dtype[dtype].as_strided(shape, _row_major(shape), start // dtype.itemsize))
        return found


def _row_major(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return strides


def _stored(leaves: Sequence[Leaf]) -> list[StoredPiece]:
    """What each leaf is called in the shard, and how it lies there."""
    counts = Counter(leaf.name for leaf in leaves if not leaf.resident)
    numbers: Counter[str] = Counter()
    stored: list[StoredPiece] = []
    for leaf in leaves:
        name = piece_name(leaf.name, numbers[leaf.name], counts[leaf.name])
        numbers[leaf.name] += 1
        stored.append(StoredPiece(name, dtype_name(leaf.tensor.dtype), tuple(leaf.tensor.shape)))
    return stored


def _behind(shard: ShardLayout, pieces: Sequence[StoredPiece]) -> tuple[list[int], int]:
    """Where pieces lie behind a shard, from the next page boundary on, and where they end, 0 for none; large items
    first, so that each is aligned."""
    offsets = [0] * len(pieces)
    position = pages(shard.size_bytes)
    for i in file_order(pieces):
        offsets[i] = position
        position += pieces[i].size_bytes
    return offsets, position if pieces else 0


def _is_seen_only(leaf: Leaf) -> bool:
    """The rank knows the tensor, and other ranks own all of it."""
    return leaf.tensor.numel() == 0 and (leaf.box is not None or leaf.span is not None)


def _entries(leaves: Sequence[Leaf], stored: Sequence[StoredPiece], at: Mapping[int, int]) -> Iterator[TensorEntry]:
    """One for each tensor, with its pieces. Those of one tensor follow each other."""
    for name, numbers in groupby(range(len(leaves)), key=lambda i: leaves[i].name):
        found = [(i, leaves[i]) for i in numbers]
        pieces = [
            (leaf.resident, Piece(at=at[i], box=leaf.box, bytes=stored[i].size_bytes, span=leaf.span))
            for i, leaf in found
            if i in at
        ]
        first, leaf = found[0]
        yield TensorEntry(
            dtype=stored[first].dtype,
            name=name,
            per_rank=leaf.per_rank,
            pieces=tuple(piece for resident, piece in pieces if not resident),
            resident=tuple(piece for resident, piece in pieces if resident),
            shape=leaf.shape,
        )
