"""The restore plan: which bytes of which shards are read, and where each of them goes. Pure and deterministic.

A plan knows the stored pieces of the wanted tensors and how long each shard's digest blocks are, and nothing else. It
reads whole blocks, as only those can be verified, and each of them at most once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import msgspec

from ckptd.checkpoint.regions import Region, Slab, clipped, holds_exactly, joined, piece_region, slabs
from ckptd.checkpoint.shard_map import WINDOW_BYTES
from ckptd.errors import CoverageError, UsageError
from ckptd.format.dtypes import ITEM_BYTES
from ckptd.format.records import IndexPiece
from ckptd.limits import KIB

LONG_STRETCH_BLOCKS = 8
"""Wanted bytes that lie together and are at least as many as in this many blocks are long enough for a read of their
own: nothing is read only to reach them."""
GAP_BYTES_MAX = 512 * KIB
"""Between shorter stretches so much is read through: a request costs an object store as much time as this."""
TARGET_ALIGNMENT_BYTES = 16
"""In staging memory: the largest item of any dtype."""


class Want(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A part of a tensor that is to lie in staging memory, dense and row-major box by box."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    region: Region
    pieces: tuple[IndexPiece, ...]
    """Stored pieces that together hold all of the region, none of it twice; others do no harm."""
    target: int = 0
    """Byte of the staging memory where it starts; see :func:`stage`."""

    @property
    def size_bytes(self) -> int:
        return self.region.element_count * ITEM_BYTES[self.dtype]


class Read(NamedTuple):
    """One request: bytes ``[start, stop)`` of a rank's shard, whole blocks, at most ``WINDOW_BYTES`` of them."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What is read of one rank's shard."""

    rank: int
    reads: tuple[Read, ...]
    """In ascending order, without overlap."""
    bytes_wanted: int
    """That go to staging memory."""
    _slabs: tuple[Slab, ...]
    """In order of the source, whose byte 0 is the shard's."""
    _reach: tuple[int, ...]
    """For each slab, how far it and those before it reach."""

    @property
    def bytes_read(self) -> int:
        return sum(read.stop - read.start for read in self.reads)

    @property
    def requests(self) -> int:
        return len(self.reads)

    def slabs(self, read: Read) -> list[Slab]:
        """Where the bytes of a read go: from the read's first byte on, into staging memory."""
        first = bisect_right(self._reach, read.start)
        last = bisect_left(self._slabs, read.stop, lo=first, key=lambda slab: slab.source)
        return [
            Slab(part.source - read.start, *part[1:])
            for slab in self._slabs[first:last]
            for part in clipped(slab, read.start, read.stop)
        ]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All reads of one restore."""

    shards: tuple[ShardPlan, ...]
    """In order of rank; only those of which something is read."""
    target_bytes: int
    """How much staging memory the wants reach."""

    @property
    def bytes_wanted(self) -> int:
        return sum(shard.bytes_wanted for shard in self.shards)

    @property
    def bytes_read(self) -> int:
        return sum(shard.bytes_read for shard in self.shards)

    @property
    def requests(self) -> int:
        return sum(shard.requests for shard in self.shards)

    def reads(self) -> Iterator[tuple[ShardPlan, Read]]:
        """Shard by shard, in ascending order."""
        return ((shard, read) for shard in self.shards for read in shard.reads)


def stage(wants: Sequence[Want]) -> tuple[list[Want], int]:
    """Give each want a place of its own in staging memory, aligned to its items; returns them in the given order, and
    the bytes of memory.

    They are laid in the order in which they are stored, and at the same distances where they are whole pieces: what is
    all of a shard lies in memory as it does there, and can be read straight into place.
    """
    stored = [_stored_at(want) for want in wants]
    placed = list(wants)
    position = 0
    for i in sorted(range(len(wants)), key=stored.__getitem__):
        want, at = wants[i], stored[i][1]
        # As far off the alignment as it is in the shard, so that what follows it there can follow it here.
        phase = at % TARGET_ALIGNMENT_BYTES if at % ITEM_BYTES[want.dtype] == 0 else 0
        position += (phase - position) % TARGET_ALIGNMENT_BYTES
        placed[i] = Want(
            name=want.name,
            dtype=want.dtype,
            shape=want.shape,
            region=want.region,
            pieces=want.pieces,
            target=position,
        )
        position += want.size_bytes
    return placed, position


def make_plan(wants: Iterable[Want], block_bytes: Mapping[int, int]) -> ReadPlan:
    """The reads that bring every want to its target. ``block_bytes``: for each rank that holds a piece, how long the
    digest blocks of its shard are, at most ``WINDOW_BYTES``; a piece is cut into them from its start.

    Raises :class:`CoverageError`, naming the tensor, where its pieces do not hold all that is wanted of it. Needs time
    for each pair of a want and a piece, and for each read; not for the rows of either.
    """
    found: dict[int, _Shard] = {}
    reach = 0
    for want in wants:
        item, size, held = ITEM_BYTES[want.dtype], want.size_bytes, 0
        for piece in want.pieces:
            whole = piece.bytes == size and holds_exactly(piece, want.region, want.shape)
            parts = () if whole else slabs(piece_region(piece, want.shape), want.region, item, piece.at, want.target)
            if not (size if whole else parts):
                continue
            shard = found.get(piece.rank)
            if shard is None:
                shard = found[piece.rank] = _Shard.of(piece.rank, block_bytes[piece.rank])
            held += shard.add_whole(piece, want.target) if whole else shard.add(parts, piece)
        if held != size:
            raise CoverageError(f"{want.name}: the pieces hold {held} of the {size} bytes that are wanted")
        reach = max(reach, want.target + size)
    return ReadPlan(tuple(found[rank].plan() for rank in sorted(found)), reach)


def _stored_at(want: Want) -> tuple[int, int]:
    """Where the first of a want's pieces lies: rank and byte."""
    if len(want.pieces) == 1 and want.pieces[0].bytes:
        return want.pieces[0].rank, want.pieces[0].at
    return min(((piece.rank, piece.at) for piece in want.pieces if piece.bytes), default=(-1, 0))


class _Blocks(NamedTuple):
    """Wanted blocks that lie together in one piece: bytes of the shard."""

    start: int
    stop: int
    at: int
    """Where the piece starts, from which its blocks count."""


@dataclass(slots=True)
class _Shard:
    """What is wanted of one shard, while it is gathered."""

    rank: int
    block_bytes: int
    slabs: list[Slab]
    blocks: list[_Blocks]
    bytes_wanted: int = 0

    @classmethod
    def of(cls, rank: int, block_bytes: int) -> _Shard:
        if not 0 < block_bytes <= WINDOW_BYTES:
            raise UsageError(f"blocks of {block_bytes} bytes in the shard of rank {rank}, not of 1 to {WINDOW_BYTES}")
        return cls(rank, block_bytes, [], [])

    def add_whole(self, piece: IndexPiece, target: int) -> int:
        """Want all of a piece, as it lies. Returns its bytes."""
        self.blocks.append(_Blocks(piece.at, piece.at + piece.bytes, piece.at))
        self.slabs.append(Slab(piece.at, target, (piece.bytes,), (1,), (1,)))
        self.bytes_wanted += piece.bytes
        return piece.bytes

    def add(self, parts: Sequence[Slab], piece: IndexPiece) -> int:
        """Want these parts of a piece. Returns their bytes."""
        size = 0
        for part in parts:
            size += part.size_bytes
            self.blocks.extend(_touched(part, piece, self.block_bytes))
        self.slabs.extend(parts)
        self.bytes_wanted += size
        return size

    def plan(self) -> ShardPlan:
        self.slabs.sort()
        found = tuple(joined(self.slabs))
        reads = tuple(Read(self.rank, start, stop) for start, stop in _windows(self.blocks, self.block_bytes))
        reach = tuple(accumulate((slab.source_stop for slab in found), max))
        return ShardPlan(self.rank, reads, self.bytes_wanted, found, reach)


def _touched(slab: Slab, piece: IndexPiece, block_bytes: int) -> list[_Blocks]:
    """The blocks of a piece that hold some of a slab. Rows with less than a block between them leave out none, so what
    is listed are never more rows than there are blocks."""
    at, end = piece.at, piece.at + piece.bytes
    extent = 1
    listed = len(slab.lengths)
    while listed and slab.source_steps[listed - 1] - extent < block_bytes:
        listed -= 1
        extent += (slab.lengths[listed] - 1) * slab.source_steps[listed]
    starts = [slab.source]
    for length, step in zip(slab.lengths[:listed], slab.source_steps, strict=False):
        starts = [start + i * step for start in starts for i in range(length)]
    return [
        _Blocks(
            start - (start - at) % block_bytes,
            min(start + extent + (at - start - extent) % block_bytes, end),
            at,
        )
        for start in starts
    ]


def _windows(blocks: list[_Blocks], block_bytes: int) -> Iterator[tuple[int, int]]:
    """The wanted blocks in as few reads as the limits of a window and of what may be read in vain allow."""
    wanted = _disjoint(blocks)
    in_long = _in_long_stretches(wanted, LONG_STRETCH_BLOCKS * block_bytes)
    start = stop = -1
    bridge = False  # whether what lies behind ``stop`` may be read in vain
    for (first, end, at), long in zip(wanted, in_long, strict=True):
        bridge = bridge and not long and first - stop <= GAP_BYTES_MAX and end - start <= WINDOW_BYTES
        if first != stop and not bridge:
            if stop >= 0:
                yield start, stop
            start = first
        while end - start > WINDOW_BYTES:
            # The last border of two blocks within the window, which is where the piece starts if no more fits.
            cut = at + (start + WINDOW_BYTES - at) // block_bytes * block_bytes
            yield start, cut
            start = cut
        stop, bridge = end, not long
    if stop >= 0:
        yield start, stop


def _disjoint(blocks: list[_Blocks]) -> list[_Blocks]:
    """In ascending order, each block once. Those of two pieces stay apart, as they are counted from other starts."""
    blocks.sort()
    made: list[_Blocks] = []
    for one in blocks:
        if made and made[-1].at == one.at and one.start <= made[-1].stop:
            made[-1] = _Blocks(made[-1].start, max(made[-1].stop, one.stop), one.at)
        else:
            made.append(one)
    return made


def _in_long_stretches(wanted: Sequence[_Blocks], long_bytes: int) -> list[bool]:
    """Of each, whether it belongs to a stretch without a gap of at least ``long_bytes``."""
    found: list[bool] = []
    begin = 0  # of the stretch
    for i, one in enumerate(wanted):
        if i and wanted[i - 1].stop != one.start:
            begin = i
        if i + 1 == len(wanted) or wanted[i + 1].start != one.stop:
            found += [one.stop - wanted[begin].start >= long_bytes] * (i + 1 - begin)
    return found
