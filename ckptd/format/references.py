"""Where the bytes of a rank are stored: in its own shard, and where it refers to them, in those of other checkpoints.

Places are those of the slot, as its layout has them. The header of a shard that refers to others is its own, and
shorter than the slot's; it counts as ending where the data starts in the slot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptd.errors import CoverageError
from ckptd.format.keys import CHECKPOINTS, Version, parse_version
from ckptd.format.records import Layout, Piece, ShardProof
from ckptd.limits import PAGE_BYTES

MISFIT = "the receipt's size or digests do not fit its layout"


class Stretch(NamedTuple):
    """Bytes ``[start, stop)`` of the slot that lie together in one object."""

    start: int
    stop: int
    key: str
    at: int
    """Of the first of them, in the object."""


def holder_of(key: str) -> Version:
    """The checkpoint whose shard lies there."""
    return parse_version(key.removeprefix(CHECKPOINTS).partition("/")[0])


def referenced_bytes(shard: ShardProof) -> int:
    """Of pieces that lie in shards of other checkpoints."""
    return sum(extent.bytes for reference in shard.references for extent in reference.extents)


def header_bytes(layout: Layout, shard: ShardProof) -> int:
    """How long the header of the stored shard is: what is left beside its pieces. May be anything, see
    :func:`stretches`."""
    return shard.bytes - (layout.shard_bytes - layout.header_bytes - referenced_bytes(shard))


def stretches(layout: Layout, pieces: Sequence[Piece], shard: ShardProof) -> list[Stretch]:
    """Where everything of a rank is stored, by place in the slot: its header first, then all pieces without a gap.

    ``pieces``: in file order. Raises :class:`CoverageError` where the receipt contradicts its layout or itself.
    """
    header = header_bytes(layout, shard)
    if not shard.references:
        if header != layout.header_bytes:
            raise CoverageError(MISFIT)
        return [Stretch(0, layout.shard_bytes, shard.key, 0)]
    if not 0 < header <= layout.header_bytes or header % PAGE_BYTES:
        raise CoverageError(f"a shard of {shard.bytes} bytes cannot hold what its references leave")
    own_at, position = 0, layout.header_bytes - header
    found: list[Stretch] = []
    for start, stop, key, at in _elsewhere(pieces, shard):
        if start < position or start < layout.header_bytes:
            raise CoverageError(f"two references hold byte {start}")
        if position < start:
            found.append(Stretch(position, start, shard.key, own_at))
            own_at += start - position
        found.append(Stretch(start, stop, key, at))
        position = stop
    if position < layout.shard_bytes:
        found.append(Stretch(position, layout.shard_bytes, shard.key, own_at))
    return found


def _elsewhere(pieces: Sequence[Piece], shard: ShardProof) -> list[Stretch]:
    """What lies in other shards, by place."""
    keys = [reference.key for reference in shard.references]
    if keys != sorted(set(keys)):
        raise CoverageError("references are not in order")
    own = shard.key.rpartition("/")[0]
    starts = {piece.at for piece in pieces if piece.bytes}
    stops = {piece.at + piece.bytes for piece in pieces if piece.bytes}
    found: list[Stretch] = []
    for reference in shard.references:
        if reference.key.rpartition("/")[0] == own or not reference.extents:
            raise CoverageError(f"{reference.key}: a reference to nothing of another checkpoint")
        for extent in reference.extents:
            stop = extent.start + extent.bytes
            if not extent.bytes or extent.start not in starts or stop not in stops:
                raise CoverageError(f"{reference.key}: bytes {extent.start} to {stop} are no whole pieces")
            if extent.at + extent.bytes > reference.bytes:
                raise CoverageError(
                    f"{reference.key}: {extent.bytes} bytes at {extent.at} of a shard of {reference.bytes}"
                )
            found.append(Stretch(extent.start, stop, reference.key, extent.at))
    return sorted(found)


def within(found: Sequence[Stretch], start: int, stop: int) -> Iterator[Stretch]:
    """The parts of stretches that hold ``[start, stop)``, all of which is stored."""
    number = bisect_right(found, start, key=lambda stretch: stretch.start) - 1
    while start < stop:
        stretch = found[number]
        end = min(stop, stretch.stop)
        yield Stretch(start, end, stretch.key, stretch.at + start - stretch.start)
        start, number = end, number + 1
