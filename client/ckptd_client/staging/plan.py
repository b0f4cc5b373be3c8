"""Where each tensor of the state goes in a slot; kept from save to save while the structure stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from ckptd.arena.memory import pages
from ckptd.format import records
from ckptd.format.names import piece_name
from ckptd.format.records import Layout, Piece, TensorEntry
from ckptd.format.shard import ShardLayout, StoredPiece, lay_out
from ckptd.limits import SLOT_SLACK_BYTES_MIN, SLOT_SLACK_FRACTION
from ckptd_client.capture import Capture, Leaf
from ckptd_client.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of one rank's shard for one structure of its state."""

    shard: ShardLayout
    layout: msgspec.Raw
    """The encoded :class:`ckptd.format.records.Layout`."""
    order: tuple[int, ...]
    """Numbers of the leaves that have bytes, in the order in which they lie in the shard."""
    sizes: tuple[int, ...]
    """Bytes of every leaf, by number."""

    @property
    def shard_bytes(self) -> int:
        return self.shard.size_bytes

    @classmethod
    def of(cls, capture: Capture) -> Plan:
        """Raises :class:`ckptd.errors.StateError` where the state does not fit the format."""
        stored = [
            StoredPiece(piece_name(leaf.name, 0, 1), dtype_name(leaf.tensor.dtype), tuple(leaf.tensor.shape))
            for leaf in capture.leaves
        ]
        owned = [i for i, leaf in enumerate(capture.leaves) if not _is_seen_only(leaf)]
        shard = lay_out([stored[i] for i in owned])
        at = dict(zip(owned, shard.offsets, strict=True))
        entries = [_entry(leaf, stored[i], at.get(i)) for i, leaf in enumerate(capture.leaves)]
        layout = Layout(
            aliases=capture.aliases,
            header_bytes=len(shard.header),
            shard_bytes=shard.size_bytes,
            tensors=tuple(entries),
        )
        sizes = tuple(piece.size_bytes for piece in stored)
        order = tuple(sorted((i for i in owned if sizes[i]), key=lambda i: at[i]))
        offsets = tuple(at.get(i, 0) for i in range(len(stored)))
        full = ShardLayout(shard.header, offsets, shard.size_bytes)
        return cls(full, msgspec.Raw(records.encode(layout)), order, sizes)

    def slot_bytes(self, doc_bytes: int) -> int:
        """Of a slot that holds this shard and its record, with room for plain values that grow."""
        bare = pages(self.shard_bytes) + pages(doc_bytes)
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


def _is_seen_only(leaf: Leaf) -> bool:
    """The rank knows the tensor, and other ranks own all of it."""
    return leaf.tensor.numel() == 0 and (leaf.box is not None or leaf.span is not None)


def _entry(leaf: Leaf, stored: StoredPiece, at: int | None) -> TensorEntry:
    pieces = () if at is None else (Piece(at=at, box=leaf.box, bytes=stored.size_bytes, span=leaf.span),)
    return TensorEntry(
        dtype=stored.dtype, name=leaf.name, per_rank=leaf.per_rank, pieces=pieces, shape=tuple(leaf.shape)
    )
