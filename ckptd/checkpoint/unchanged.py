"""Which pieces of a rank need not be stored again, as an older committed checkpoint has them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import msgspec

from ckptd.format.digests import DIGEST_BYTES
from ckptd.format.fingerprints import Part, part_of
from ckptd.format.keys import Version
from ckptd.format.records import Extent, Layout, Piece, Receipt, Reference, ShardProof, Snapshot, decode, decode_layout
from ckptd.format.references import header_bytes, holder_of, stretches, within
from ckptd.format.shard import block_count
from ckptd.limits import REFERENCED_SHARE_MIN


@dataclass(frozen=True)
class Described:
    """A rank's state: what it consists of, and the digests of all of it."""

    version: Version
    layout_data: bytes
    """The layout, as it lies in the snapshot."""
    digests: bytes
    """Of the blocks of all pieces in file order."""
    block_bytes: int
    """How long a block is at most; each piece is cut from its start."""

    @cached_property
    def layout(self) -> Layout:
        """Raises :class:`ckptd.errors.FormatError`."""
        return decode_layout(msgspec.Raw(self.layout_data))


def described(receipt: Receipt) -> Described:
    """What a receipt says, wherever the pieces are stored. Raises :class:`ckptd.errors.FormatError`."""
    snapshot, shard = decode(receipt.snapshot, Snapshot), receipt.shard
    state = Described(snapshot.version, bytes(snapshot.layout), b"", shard.block_bytes)
    first = block_count(header_bytes(state.layout, shard), shard.block_bytes)
    return replace(state, digests=shard.blocks[first * DIGEST_BYTES :])


class _Named(NamedTuple):
    """A piece, and what it is a piece of."""

    piece: Piece
    identity: tuple[str, str, tuple[int, ...], Part]
    digests: bytes


def unchanged(base: bytes, new: Described, suspect: Set[Version] = frozenset()) -> tuple[Reference, ...]:
    """Where the pieces of ``new`` are stored already that equal those of ``base``, a committed receipt.

    Equal: the same part of a tensor of the same name, dtype and shape, with the same digests. A shard is referred to
    only where at least :data:`REFERENCED_SHARE_MIN` of it is needed, as all of its checkpoint stays for that; and none
    of a ``suspect`` one. Raises :class:`ckptd.errors.FormatError` and :class:`ckptd.errors.CoverageError` for a receipt
    that is none.
    """
    receipt, block_bytes = decode(base, Receipt), new.block_bytes
    shard = receipt.shard
    sizes = {shard.key: shard.bytes} | {reference.key: reference.bytes for reference in shard.references}
    if holder_of(shard.key) in suspect or _bytes_alike(shard, new) < REFERENCED_SHARE_MIN * min(sizes.values()):
        return ()
    old = described(receipt)
    named = _named(old)
    stored = stretches(old.layout, [one.piece for one in named], shard)
    known = {one.identity: one for one in named if one.piece.bytes}
    one_block_bytes = min(block_bytes, shard.block_bytes)
    found: dict[str, list[Extent]] = defaultdict(list)
    for piece, identity, mine in _named(new):
        same = known.get(identity)
        if same is None or same.digests != mine:
            continue
        if block_bytes != shard.block_bytes and piece.bytes > one_block_bytes:
            continue  # digests of blocks that are cut in other places say nothing
        (there,) = within(stored, same.piece.at, same.piece.at + piece.bytes)
        if holder_of(there.key) not in {*suspect, new.version}:
            _add(found[there.key], piece, there.at)
    return tuple(
        Reference(bytes=sizes[key], extents=tuple(extents), key=key)
        for key, extents in sorted(found.items())
        if sum(extent.bytes for extent in extents) >= REFERENCED_SHARE_MIN * sizes[key]
    )


def _bytes_alike(shard: ShardProof, new: Described) -> int:
    """At most so many bytes are unchanged. In most states none are, and then layouts need not be looked at."""
    known = set(_cut(shard.blocks))
    return sum(one in known for one in _cut(new.digests)) * new.block_bytes


def _cut(digests: bytes) -> Iterator[bytes]:
    return (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))


def _named(state: Described) -> list[_Named]:
    """All pieces in file order."""
    pieces = sorted(
        ((piece, entry) for entry in state.layout.tensors for piece in entry.pieces),
        key=lambda item: (item[0].at, item[0].bytes),
    )
    found: list[_Named] = []
    at = 0
    for piece, entry in pieces:
        end = at + block_count(piece.bytes, state.block_bytes) * DIGEST_BYTES
        identity = entry.name, entry.dtype, entry.shape, part_of(piece, entry.shape)
        found.append(_Named(piece, identity, state.digests[at:end]))
        at = end
    return found


def _add(extents: list[Extent], piece: Piece, at: int) -> None:
    last = extents[-1] if extents else None
    if last is not None and (last.start + last.bytes, last.at + last.bytes) == (piece.at, at):
        extents[-1] = Extent(at=last.at, bytes=last.bytes + piece.bytes, start=last.start)
    elif piece.bytes:
        extents.append(Extent(at=at, bytes=piece.bytes, start=piece.at))
