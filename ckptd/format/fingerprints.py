"""Whether two ranks hold equal values of a part of a tensor, by the digests in their receipts."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from ckptd.errors import CoverageError
from ckptd.format.digests import DIGEST_BYTES, digest
from ckptd.format.dtypes import element_count
from ckptd.format.records import Box, IndexPiece, Piece

Shape = tuple[int, ...]
Part = tuple[Shape, Shape] | tuple[int, int]
"""Which elements: offsets and lengths of a box, or start and stop of a flat range that is not all of the tensor."""


class Fingerprint(NamedTuple):
    """Equal fingerprints: equal bytes. Different ones: different bytes, where they are comparable."""

    cut_bytes: int
    """How long the blocks are of which it was made; 0 where it is the digest of all bytes."""
    digest: bytes

    def comparable(self, other: Fingerprint) -> bool:
        return self.cut_bytes == other.cut_bytes


def fingerprints(
    pieces: Sequence[Piece], blocks: bytes, first_block: int, block_bytes: int, wanted: Container[int] | None = None
) -> dict[int, Fingerprint]:
    """Those of pieces that lie one behind the other, by where they lie; pieces without bytes have none.

    ``blocks``: packed digests, of which number ``first_block`` is the first of the first piece. ``wanted``: only those
    that lie there.
    """
    found: dict[int, Fingerprint] = {}
    at = first_block * DIGEST_BYTES
    for piece in pieces:
        end = at - (-piece.bytes // block_bytes) * DIGEST_BYTES
        if piece.bytes and (wanted is None or piece.at in wanted):
            if piece.bytes <= block_bytes:
                found[piece.at] = Fingerprint(0, blocks[at:end])
            else:
                found[piece.at] = Fingerprint(block_bytes, digest(blocks[at:end]))
        at = end
    return found


def part_of(piece: Piece | IndexPiece, shape: Shape) -> Part:
    """What a piece holds, the same for every piece that holds just that, however it says so."""
    box = box_of(piece, shape)
    if box is not None:
        return box.offsets, box.lengths
    assert piece.span is not None
    return piece.span.start, piece.span.stop


def box_of(piece: Piece | IndexPiece, shape: Shape) -> Box | None:
    """A piece as one box; ``None`` for a flat range that is not all of the tensor."""
    if piece.box is not None:
        return piece.box
    if piece.span is not None and piece.span.stop - piece.span.start < element_count(shape):
        return None
    return Box((0,) * len(shape), shape)


def check_same(name: str, part: Part, one: tuple[int, Fingerprint], other: tuple[int, Fingerprint]) -> None:
    """Raise :class:`CoverageError` unless two ranks hold the same. ``one``, ``other``: rank and fingerprint."""
    if one[1] == other[1]:
        return
    ranks = f"{name}: ranks {one[0]} and {other[0]}"
    if not one[1].comparable(other[1]):
        raise CoverageError(f"{ranks} both saved {_words(part)}, with blocks of other lengths, so none can be left out")
    raise CoverageError(f"{ranks} hold different values of the same part, {_words(part)}")


def _words(part: Part) -> str:
    first, second = part
    return f"{first}:{second}" if isinstance(first, int) else f"{first}+{second}"
