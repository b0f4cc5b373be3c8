"""What is left of a rank's shard where some of its pieces are referred to: a shard with a header of its own. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ckptd.format.names import piece_name
from ckptd.format.records import Layout, Piece, Reference
from ckptd.format.shard import StoredPiece, lay_in_order


class Run(NamedTuple):
    """Bytes that lie together in the slot as well as in the stored shard."""

    at: int
    """Where in the stored shard."""
    start: int
    """Where in the slot."""
    length: int


@dataclass(frozen=True)
class Remainder:
    """A shard as it is stored."""

    header: bytes
    pieces: tuple[tuple[Piece, StoredPiece], ...]
    """In file order."""
    offsets: tuple[int, ...]
    """Where each of them lies in the stored shard."""
    size_bytes: int

    @cached_property
    def runs(self) -> list[Run]:
        """All pieces, in as few runs as there are."""
        runs: list[Run] = []
        for (piece, _), at in zip(self.pieces, self.offsets, strict=True):
            last = runs[-1] if runs else None
            if last is not None and last.start + last.length == piece.at:
                runs[-1] = last._replace(length=last.length + piece.bytes)
            elif piece.bytes:
                runs.append(Run(at, piece.at, piece.bytes))
        return runs


def runs_within(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """The parts of runs, which are in order, that hold some of the bytes ``[start, stop)`` of the stored shard."""
    number = max(bisect_right(runs, start, key=lambda run: run.at) - 1, 0)
    while number < len(runs) and runs[number].at < stop:
        run = runs[number]
        first, last = max(run.at, start), min(run.at + run.length, stop)
        if first < last:
            yield Run(first, run.start + first - run.at, last - first)
        number += 1


def remainder(layout: Layout, references: Sequence[Reference]) -> Remainder:
    """What a rank stores itself. Without references that is all of its pieces, as they lie in the slot."""
    extents = sorted((e.start, e.start + e.bytes) for reference in references for e in reference.extents)
    starts = [start for start, _ in extents]
    left: list[tuple[Piece, StoredPiece]] = []
    for piece, stored in named_pieces(layout):
        number = bisect_right(starts, piece.at) - 1
        if not piece.bytes or number < 0 or piece.at >= extents[number][1]:
            left.append((piece, stored))
    laid = lay_in_order([stored for _, stored in left])
    return Remainder(laid.header, tuple(left), laid.offsets, laid.size_bytes)


def named_pieces(layout: Layout) -> list[tuple[Piece, StoredPiece]]:
    """All pieces of a rank in file order, each as the header of its shard describes it."""
    found: list[tuple[Piece, StoredPiece]] = []
    for entry in layout.tensors:
        for number, piece in enumerate(entry.pieces):
            shape = entry.shape
            if piece.box is not None:
                shape = piece.box.lengths
            elif piece.span is not None:
                shape = (piece.span.stop - piece.span.start,)
            name = piece_name(entry.name, number, len(entry.pieces))
            found.append((piece, StoredPiece(name, entry.dtype, shape)))
    found.sort(key=lambda item: (item[0].at, item[0].bytes))
    return found
