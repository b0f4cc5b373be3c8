"""Which elements of a stored piece go where: arithmetic over boxes and flat ranges. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ckptd.format.cover import span_boxes
from ckptd.format.dtypes import element_count
from ckptd.format.records import Box, IndexPiece, Piece, Span

Shape = tuple[int, ...]


class Copy(NamedTuple):
    """``length`` elements that lie together in a piece as well as in the memory that wants them."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor as it lies in memory or in a shard: boxes one behind the other, each in row-major order."""

    boxes: tuple[Box, ...]

    @property
    def element_count(self) -> int:
        return sum(element_count(box.lengths) for box in self.boxes)

    def placed(self) -> Iterator[tuple[Box, int]]:
        """Each box, and which element of the region is its first."""
        position = 0
        for box in self.boxes:
            yield box, position
            position += element_count(box.lengths)


def region(shape: Shape, part: Box | Span | None = None) -> Region:
    """A box or a flat range of a tensor, or all of it."""
    if isinstance(part, Span):
        return Region(tuple(span_boxes(part, shape)))
    return Region((part if part is not None else Box((0,) * len(shape), shape),))


def piece_region(piece: Piece | IndexPiece, shape: Shape) -> Region:
    """What a piece holds, as it lies in its shard."""
    return region(shape, piece.box if piece.box is not None else piece.span)


def copies(source: Region, target: Region) -> list[Copy]:
    """What to copy so that ``target`` has every element that ``source`` holds of it, in order of the source."""
    found = [
        copy
        for box, start in source.placed()
        for wanted, target_start in target.placed()
        for copy in _box_copies(box, start, wanted, target_start)
    ]
    found.sort()
    return found


def _box_copies(source: Box, source_start: int, target: Box, target_start: int) -> Iterator[Copy]:
    dims = range(len(source.offsets))
    low = [max(source.offsets[d], target.offsets[d]) for d in dims]
    high = [min(source.offsets[d] + source.lengths[d], target.offsets[d] + target.lengths[d]) for d in dims]
    if any(high[d] <= low[d] for d in dims):
        return
    lengths = [high[d] - low[d] for d in dims]
    # Dimensions at the end that both hold whole lie together, and so does what is left of the one before them.
    together = len(lengths)
    while together and lengths[together - 1] == source.lengths[together - 1] == target.lengths[together - 1]:
        together -= 1
    outer = max(together - 1, 0)
    count = element_count(tuple(lengths[outer:]))
    source_strides, target_strides = _strides(source.lengths), _strides(target.lengths)
    for index in product(*(range(low[d], high[d]) for d in range(outer))):
        at = (*index, *low[outer:])
        yield Copy(
            source_start + sum((at[d] - source.offsets[d]) * source_strides[d] for d in dims),
            target_start + sum((at[d] - target.offsets[d]) * target_strides[d] for d in dims),
            count,
        )


def _strides(lengths: Sequence[int]) -> list[int]:
    strides = [1] * len(lengths)
    for d in range(len(lengths) - 2, -1, -1):
        strides[d] = strides[d + 1] * lengths[d + 1]
    return strides
