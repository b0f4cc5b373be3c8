"""Which pieces of a tensor hold elements of a part of it, and whether they are what their ranks promise. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ckptd.checkpoint.regions import Region
from ckptd.errors import CoverageError, UsageError
from ckptd.format.cover import boxes_of, check_box_cover, clipped
from ckptd.format.fingerprints import Part, part_of
from ckptd.format.grid import cell_box, cells_within, ranks_of
from ckptd.format.records import Box, IndexEntry, IndexPiece, RankLists, TensorEntry

Sought = dict[int, list[Part]]
"""Rank → the parts that its shard must hold."""


def sought(entry: IndexEntry, lists: RankLists, wanted: Region, world: int) -> Sought:
    """The parts of a tensor that hold some element of ``wanted``, by rank in order; together they hold all of it. Walks
    over the cells that it touches, or over the pieces that are listed.

    Raises :class:`CoverageError` where the index does not cover it, or is none; :class:`UsageError` where ``wanted``
    does not lie in the tensor.
    """
    _check_inside(entry, wanted)
    if entry.grid is None:
        return _listed(entry, wanted, world)
    if entry.pieces:
        raise CoverageError(f"{entry.name}: has a grid as well as pieces")
    ranks, chunks = ranks_of(entry.name, entry.shape, entry.grid, lists), entry.grid.chunks
    cells = dict.fromkeys(cell for box in wanted.boxes for cell in cells_within(box, entry.shape, chunks))
    found: Sought = defaultdict(list)
    for cell in cells:
        box = cell_box(entry.shape, chunks, cell)
        found[ranks[cell]].append((box.offsets, box.lengths))
    return _of_the_world(entry.name, found, world)


def _listed(entry: IndexEntry, wanted: Region, world: int) -> Sought:
    found: Sought = defaultdict(list)
    for piece in touched(entry.name, entry.shape, entry.pieces, wanted):
        found[piece.rank].append(part_of(piece, entry.shape))
    return _of_the_world(entry.name, found, world)


def touched(name: str, shape: tuple[int, ...], pieces: Iterable[IndexPiece], wanted: Region) -> list[IndexPiece]:
    """The pieces that hold some element of ``wanted``. Raises :class:`CoverageError` unless together they hold each of
    them once."""
    found: list[IndexPiece] = []
    held: list[list[tuple[Box, int]]] = [[] for _ in wanted.boxes]
    for piece in pieces:
        boxes = boxes_of(piece, shape)
        inside = False
        for of_box, box in zip(held, wanted.boxes, strict=True):
            parts = [(part, piece.rank) for part in (clipped(mine, box) for mine in boxes) if part is not None]
            of_box += parts
            inside = inside or bool(parts)
        if inside:
            found.append(piece)
    for of_box, box in zip(held, wanted.boxes, strict=True):
        check_box_cover(name, box, of_box)
    return found


def promised_pieces(
    entry: IndexEntry, rank: int, promised: TensorEntry | None, parts: Sequence[Part]
) -> list[IndexPiece]:
    """The pieces of a rank that hold these parts, as its receipt promises them, in order of place. Raises
    :class:`CoverageError` where it does not."""
    if promised is None or (promised.dtype, promised.shape) != (entry.dtype, entry.shape):
        raise CoverageError(f"{entry.name!r} is not what rank {rank} saved")
    there = {part_of(piece, entry.shape): piece for piece in promised.pieces if piece.bytes}
    found: list[IndexPiece] = []
    for part in parts:
        piece = there.get(part)
        if piece is None:
            raise CoverageError(f"{entry.name!r} has a piece that rank {rank} has not")
        found.append(IndexPiece(at=piece.at, box=piece.box, bytes=piece.bytes, rank=rank, span=piece.span))
    found.sort(key=lambda piece: piece.at)
    return found


def _of_the_world(name: str, found: Sought, world: int) -> Sought:
    for rank in found:
        if rank >= world:
            raise CoverageError(f"{name}: lies on rank {rank} of {world}")
    return dict(sorted(found.items()))


def _check_inside(entry: IndexEntry, wanted: Region) -> None:
    for box in wanted.boxes:
        if len(box.offsets) != len(entry.shape) or not all(
            at >= 0 and at + length <= size
            for at, length, size in zip(box.offsets, box.lengths, entry.shape, strict=True)
        ):
            raise UsageError(f"{entry.name}: {box.offsets}+{box.lengths} does not lie in shape {entry.shape}")
