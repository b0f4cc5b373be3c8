"""Which bytes of a stored piece go where: arithmetic over boxes and flat ranges. Pure.

A tensor split by columns shares many short rows with one that is not. They are never listed one by one: rows that lie
at regular distances in both memories are one :class:`Slab`, whatever their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

import msgspec

from ckptd.format.cover import span_boxes
from ckptd.format.dtypes import element_count
from ckptd.format.records import Box, IndexPiece, Piece, Span

Shape = tuple[int, ...]


class Copy(NamedTuple):
    """``length`` bytes that lie together in the source as well as in the target."""

    source: int
    target: int
    length: int


class Slab(NamedTuple):
    """A regular lattice of bytes that source and target both hold. All numbers are bytes.

    The last dimension lies together in both: its step is 1 byte. Steps fall from the first dimension to the last, and
    no two neighboring dimensions could be one.
    """

    source: int
    """Of the first byte."""
    target: int
    lengths: tuple[int, ...]
    source_steps: tuple[int, ...]
    """How far apart neighbors along each dimension lie."""
    target_steps: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return element_count(self.lengths)

    @property
    def source_stop(self) -> int:
        """Behind the last byte of the source."""
        if len(self.lengths) == 1:
            return self.source + self.lengths[0]
        return self.source + _extent(self.lengths, self.source_steps)

    def copies(self) -> Iterator[Copy]:
        """One by one, in order of the source."""
        outer = self.lengths[:-1]
        for index in product(*map(range, outer)):
            yield Copy(
                self.source + sum(i * step for i, step in zip(index, self.source_steps, strict=False)),
                self.target + sum(i * step for i, step in zip(index, self.target_steps, strict=False)),
                self.lengths[-1],
            )


class Region(msgspec.Struct, frozen=True, gc=False):
    """A part of a tensor as it lies in memory or in a shard: boxes one behind the other, each in row-major order."""

    boxes: tuple[Box, ...]

    @property
    def element_count(self) -> int:
        if len(self.boxes) == 1:
            return element_count(self.boxes[0].lengths)
        count = 0
        for box in self.boxes:
            count += element_count(box.lengths)
        return count


def region(shape: Shape, part: Box | Span | None = None) -> Region:
    """A box or a flat range of a tensor, or all of it."""
    if isinstance(part, Span):
        return Region(tuple(span_boxes(part, shape)))
    return Region((part if part is not None else Box((0,) * len(shape), shape),))


def piece_region(piece: Piece | IndexPiece, shape: Shape) -> Region:
    """What a piece holds, as it lies in its shard."""
    return region(shape, piece.box if piece.box is not None else piece.span)


def piece_of_rank(piece: Piece, rank: int) -> IndexPiece:
    """A piece of a rank's shard."""
    return IndexPiece(at=piece.at, box=piece.box, bytes=piece.bytes, rank=rank, span=piece.span)


def holds_exactly(piece: Piece | IndexPiece, part: Region, shape: Shape) -> bool:
    """Whether a piece is that part and nothing else; the same as an equal region, for less time."""
    if piece.span is not None or len(part.boxes) != 1:
        return piece_region(piece, shape) == part
    (box,) = part.boxes
    return box == piece.box if piece.box is not None else box.lengths == shape


def slabs(source: Region, target: Region, item_bytes: int, source_at: int = 0, target_at: int = 0) -> list[Slab]:
    """What to copy so that ``target``, which lies at byte ``target_at``, has every element that ``source``, at byte
    ``source_at``, holds of it. In order of the source. Needs time for the boxes, not for their rows."""
    if source == target:  # by far the most frequent
        size = source.element_count * item_bytes
        return [Slab(source_at, target_at, (size,), (1,), (1,))] if size else []
    found: list[Slab] = []
    wanted = _placed(target, item_bytes, target_at)
    for box, start in _placed(source, item_bytes, source_at):
        for other, other_start in wanted:
            slab = _box_slab(box, start, other, other_start, item_bytes)
            if slab is not None:
                found.append(slab)
    if len(found) < 2:
        return found
    found.sort()
    return joined(found)


def joined(found: Sequence[Slab]) -> list[Slab]:
    """The same bytes in fewer slabs: what lies together in both memories is one. In order of the source."""
    made: list[Slab] = []
    for slab in found:
        if made and len(slab.lengths) == 1:
            last = made[-1]
            size = last.lengths[0]
            if len(last.lengths) == 1 and (slab.source - size, slab.target - size) == (last.source, last.target):
                made[-1] = Slab(last.source, last.target, (size + slab.lengths[0],), (1,), (1,))
                continue
        made.append(slab)
    return made


def clipped(slab: Slab, start: int, stop: int) -> list[Slab]:
    """What of a slab lies at the bytes ``[start, stop)`` of its source: at most two slabs for each dimension and one
    more, as a range begins and ends within a row."""
    if slab.source >= start and slab.source_stop <= stop:
        return [slab]
    source, target, lengths, source_steps, target_steps = slab
    low, high = start - source, stop - source
    if len(lengths) == 1:
        first, last = max(low, 0), min(high, lengths[0])
        return [Slab(source + first, target + first, (last - first,), (1,), (1,))] if first < last else []
    count, step = lengths[0], source_steps[0]
    extent = _extent(lengths[1:], source_steps[1:])
    # Rows [whole, end) lie inside; the one before and the one behind may reach into the range.
    whole = min(max(-(-low // step), 0), count)
    end = max(min((high - extent) // step + 1, count), whole)

    def row(number: int) -> list[Slab]:
        at = Slab(
            source + number * step,
            target + number * target_steps[0],
            lengths[1:],
            source_steps[1:],
            target_steps[1:],
        )
        return clipped(at, start, stop)

    found = row(whole - 1) if whole > 0 else []
    if end - whole == 1:
        found += row(whole)
    elif end > whole:
        inside = source + whole * step, target + whole * target_steps[0], (end - whole, *lengths[1:])
        found.append(Slab(*inside, source_steps, target_steps))
    return found + row(end) if end < count else found


def _placed(part: Region, item_bytes: int, at: int) -> list[tuple[Box, int]]:
    """Each box, and at which byte it starts."""
    if len(part.boxes) == 1:
        return [(part.boxes[0], at)]
    sizes = [element_count(box.lengths) * item_bytes for box in part.boxes]
    return list(zip(part.boxes, accumulate(sizes, initial=at), strict=False))


def _box_slab(source: Box, source_at: int, target: Box, target_at: int, item_bytes: int) -> Slab | None:
    """What two boxes have in common. Dimensions that lie together in both become one on the way, from the last on."""
    lengths, source_steps, target_steps = [item_bytes], [1], [1]
    source_step = target_step = item_bytes
    for d in range(len(source.offsets) - 1, -1, -1):
        source_low, source_length = source.offsets[d], source.lengths[d]
        target_low, target_length = target.offsets[d], target.lengths[d]
        low = max(source_low, target_low)
        count = min(source_low + source_length, target_low + target_length) - low
        if count <= 0:
            return None
        source_at += (low - source_low) * source_step
        target_at += (low - target_low) * target_step
        if count > 1:
            size = lengths[-1]
            if source_step == size * source_steps[-1] and target_step == size * target_steps[-1]:
                lengths[-1] = size * count
            else:
                lengths.append(count)
                source_steps.append(source_step)
                target_steps.append(target_step)
        source_step *= source_length
        target_step *= target_length
    return Slab(source_at, target_at, tuple(lengths[::-1]), tuple(source_steps[::-1]), tuple(target_steps[::-1]))


def _extent(lengths: Sequence[int], steps: Sequence[int]) -> int:
    """From the first byte of a lattice to behind its last."""
    return sum((length - 1) * step for length, step in zip(lengths, steps, strict=True)) + 1
