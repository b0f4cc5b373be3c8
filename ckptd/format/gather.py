"""What the receipts of all ranks say of their tensors, taken in one after the other and kept small.

A tensor of a large world is kept as a grid and a trail (see :mod:`ckptd.format.trails`), so memory grows with the ranks
and with the tensors, not with their product. What a trail cannot tell, such as where a piece lies in its shard once
a grid has turned out not to be one, is looked up in the receipts again: see :meth:`Gathered.questions`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ckptd.errors import CoverageError
from ckptd.format.cover import check_cover, not_covered
from ckptd.format.dtypes import element_count
from ckptd.format.fingerprints import Fingerprint, Part, box_of, check_same, part_of
from ckptd.format.grid import Shape, as_grid, cell_box, cell_counts, cell_of, chunks_of, compact
from ckptd.format.index import Indexed
from ckptd.format.records import Box, IndexPiece, Layout, Piece, TensorEntry
from ckptd.format.trails import Trails, Walked
from ckptd.limits import INTEGER_MAX

TRAIL_FROM_PIECES = 8
"""A tensor of fewer pieces is kept as a list of them."""

Prints = Mapping[int, Fingerprint]
"""The fingerprints of a rank's pieces by where they lie; those without bytes have none."""


class Gathered:
    """All tensors that ranks have seen."""

    def __init__(self, *, early: bool = False) -> None:
        """``early``: as the first release committed. All pieces are listed, and what ranks call their own stays so."""
        self.by_name: dict[str, _Shared | _Own] = {}
        self._early = early
        self._trails = Trails()
        self._replicas: dict[tuple[str, Part], tuple[int, Fingerprint]] = {}

    def add(self, rank: int, layout: Layout, prints: Prints, residents: Prints | None) -> None:
        """The layout of the next rank. ``prints``: at least of its own values. ``residents``: where replicas are to be
        compared, the fingerprints of resident pieces; then ``prints`` has all of the shard's.

        Raises :class:`CoverageError` where it does not agree with the ranks before.
        """
        self._trails.begin(rank)
        by_name = self.by_name
        for entry in layout.tensors:
            found = by_name.get(entry.name)
            if found is None:
                found = _Own(rank, entry) if entry.per_rank else _Shared(rank, entry, early=self._early)
                by_name[entry.name] = found
            if isinstance(found, _Own):
                found.take(rank, entry, prints)
            else:
                found.take(rank, entry, self._trails)
                if residents is not None:
                    self._compare(rank, entry, entry.pieces, prints)
                    self._compare(rank, entry, entry.resident, residents)

    def _compare(self, rank: int, entry: TensorEntry, pieces: Iterable[Piece], prints: Prints) -> None:
        for piece in pieces:
            if piece.bytes:
                part = part_of(piece, entry.shape)
                first, known = self._replicas.setdefault((entry.name, part), (rank, prints[piece.at]))
                if known.comparable(prints[piece.at]):
                    check_same(entry.name, part, (first, known), (rank, prints[piece.at]))

    def questions(self) -> list[int]:
        """The ranks whose receipts are to be looked at again, each once, by :meth:`answer`; none in the end."""
        asked: set[int] = set()
        for found in self.by_name.values():
            if isinstance(found, _Shared):
                asked.update(found.questions(self._trails))
        return sorted(asked)

    def answer(self, rank: int, layout: Layout, prints: Prints) -> None:
        """The layout of a rank again, with the fingerprints of all its pieces."""
        for entry in layout.tensors:
            found = self.by_name.get(entry.name)
            if isinstance(found, _Shared):
                found.answer(rank, entry, prints)

    def indexed(self) -> list[Indexed]:
        """All that is one value for the whole world, sorted by name. Raises :class:`CoverageError` where a tensor is
        not covered exactly once."""
        found: list[Indexed] = []
        for name, tensor in sorted(self.by_name.items()):
            if isinstance(tensor, _Shared):
                found.append(tensor.indexed(name, self._trails))
            elif not self._early and (promoted := tensor.indexed(name)) is not None:
                found.append(promoted)
        return found


class _Own:
    """A value that each rank calls its own."""

    def __init__(self, rank: int, entry: TensorEntry) -> None:
        self._rank = rank
        self._first = entry
        self._parts: list[tuple[Part, Fingerprint]] | None = None
        self._same = True

    def take(self, rank: int, entry: TensorEntry, prints: Prints) -> None:
        if not entry.per_rank:
            raise _disagreement(self._rank, self._first, rank, entry)
        if not _is_whole(entry):
            check_cover(entry.name, entry.shape, [_index_piece(piece, rank) for piece in entry.pieces])
        if not self._same:
            return
        parts = [(part_of(piece, entry.shape), prints[piece.at]) for piece in entry.pieces if piece.bytes]
        if self._parts is None:
            self._parts = parts
        self._same = (entry.dtype, entry.shape, parts) == (self._first.dtype, self._first.shape, self._parts)

    def indexed(self, name: str) -> Indexed | None:
        """Nothing where ranks have different values."""
        if not self._same:
            return None
        pieces = [_index_piece(piece, self._rank) for piece in self._first.pieces if piece.bytes]
        return _listed_or_grid(name, self._first, pieces)


class _Shared:
    """One value for the whole world."""

    def __init__(self, rank: int, entry: TensorEntry, *, early: bool) -> None:
        self._rank = rank
        self._early = early
        self._entry = msgspec.structs.replace(entry, pieces=(), resident=())
        self._pieces: list[IndexPiece] = []
        self._try_at = TRAIL_FROM_PIECES
        self._trail = -1
        self._chunks: Shape = ()
        self._counts: Shape = ()
        self._missing: frozenset[int] = frozenset()
        """Ranks whose pieces were on a trail that turned out to lead nowhere."""
        self._left_at = -1
        """The rank that left it, some of whose pieces may not have been on it."""
        self._found = 0
        """For how many of them the pieces have been looked up."""
        self._doubles: dict[Part, list[int]] | None = None
        """Parts that several ranks have saved."""
        self._answers: dict[tuple[Part, int], Fingerprint] = {}

    def take(self, rank: int, entry: TensorEntry, trails: Trails) -> None:
        mine = self._entry
        if entry.per_rank or entry.dtype != mine.dtype or entry.shape != mine.shape:
            raise _disagreement(self._rank, mine, rank, entry)
        for piece in entry.pieces:
            if not piece.bytes and not self._early:
                continue
            if self._trail >= 0:
                box = box_of(piece, mine.shape)
                cell = None if box is None else cell_of(box, mine.shape, self._chunks, self._counts)
                if cell is not None:
                    self._trail = trails.step(self._trail, rank, cell)
                    continue
                self._missing, self._left_at, self._trail = trails.ranks(self._trail), rank, -1
            self._pieces.append(_index_piece(piece, rank))
            if len(self._pieces) == self._try_at and not self._early:
                self._try_at *= 2
                self._seek_trail(trails)

    def _seek_trail(self, trails: Trails) -> None:
        shape = self._entry.shape
        held = _boxes(self._pieces, shape)
        chunks = None if held is None or self._missing else chunks_of(shape, [box for box, _ in held])
        if held is None or chunks is None:
            return
        counts = cell_counts(shape, chunks)
        cells = [cell_of(box, shape, chunks, counts) for box, _ in held]
        if None in cells or element_count(counts) > INTEGER_MAX:
            return
        for cell, (_, rank) in zip(cells, held, strict=True):
            self._trail = trails.step(self._trail, rank, cell or 0)
        self._pieces, self._chunks, self._counts = [], chunks, counts

    def questions(self, trails: Trails) -> Iterable[int]:
        if self._found < len(self._missing):
            return self._missing
        if self._doubles is None:
            if self._trail < 0 and (self._early or len(self._pieces) < 2):
                self._doubles = {}
                return ()
            self._doubles = {} if self._early else self._doubled(trails)
            return {rank for ranks in self._doubles.values() for rank in ranks}
        return ()

    def _doubled(self, trails: Trails) -> dict[Part, list[int]]:
        shape = self._entry.shape
        if self._trail >= 0:
            boxes = ((cell_box(shape, self._chunks, cell), r) for cell, r in trails.walk(self._trail).doubled.items())
            return {(box.offsets, box.lengths): ranks for box, ranks in boxes}
        if len(self._pieces) < 2:
            return {}
        holders: dict[Part, list[int]] = defaultdict(list)
        for piece in self._pieces:
            holders[part_of(piece, shape)].append(piece.rank)
        # One rank that saved a part twice has no copy of another's: that stays an overlap.
        return {part: sorted(ranks) for part, ranks in holders.items() if len(set(ranks)) == len(ranks) > 1}

    def answer(self, rank: int, entry: TensorEntry, prints: Prints) -> None:
        if self._doubles is None:
            if rank not in self._missing:
                return
            self._found += 1
            there = {piece.at for piece in self._pieces if piece.rank == rank} if rank == self._left_at else ()
            self._pieces += [_index_piece(p, rank) for p in entry.pieces if p.bytes and p.at not in there]
            return
        for piece in entry.pieces if self._doubles else ():
            part = part_of(piece, entry.shape)
            if part in self._doubles:
                self._answers[part, rank] = prints[piece.at]

    def indexed(self, name: str, trails: Trails) -> Indexed:
        entry, doubles = self._entry, self._doubles or {}
        walked = trails.walk(self._trail) if self._trail >= 0 else None
        if walked is not None and (len(walked.holders) != element_count(self._counts) or not walked.exact):
            raise self._not_covered(name, walked)
        for part, ranks in doubles.items():
            first = ranks[0], self._answers[part, ranks[0]]
            for rank in ranks[1:]:
                check_same(name, part, first, (rank, self._answers[part, rank]))
        if walked is not None:
            return Indexed(name, entry.dtype, entry.shape, chunks=self._chunks, ranks=walked.ranks)
        if self._early:
            check_cover(name, entry.shape, self._pieces)
            return Indexed(name, entry.dtype, entry.shape, pieces=tuple(self._pieces))
        pieces = self._pieces
        if doubles:
            pieces = [p for p in pieces if p.rank == doubles.get(part_of(p, entry.shape), [p.rank])[0]]
        return _listed_or_grid(name, entry, sorted(pieces, key=lambda piece: (piece.rank, piece.at)))

    def _not_covered(self, name: str, walked: Walked) -> CoverageError:
        shape = self._entry.shape
        for cell, ranks in walked.doubled.items():
            if len(set(ranks)) != len(ranks):
                box = cell_box(shape, self._chunks, cell)
                return CoverageError(f"{name}: a rank of {ranks[:16]} has saved {box.offsets}+{box.lengths} twice")
        found = sum(element_count(cell_box(shape, self._chunks, cell).lengths) for cell in walked.holders)
        ranks = sorted({rank for ranks in walked.holders.values() for rank in ranks})
        return not_covered(name, shape, found, ranks)


def _listed_or_grid(name: str, entry: TensorEntry, pieces: list[IndexPiece]) -> Indexed:
    """``pieces``: without empty ones. Raises :class:`CoverageError` unless they cover the tensor exactly once."""
    if len(pieces) == 1 and _is_all(
        pieces[0]
    ):  # nearly all tensors of many a state, and it may have a hundred thousand
        rank = pieces[0].rank
        return Indexed(name, entry.dtype, entry.shape, chunks=entry.shape, ranks=range(rank, rank + 1))
    held = _boxes(pieces, entry.shape)
    grid = as_grid(entry.shape, held) if held else None
    if grid is not None:
        return Indexed(name, entry.dtype, entry.shape, chunks=grid[0], ranks=compact(grid[1]))
    check_cover(name, entry.shape, pieces)
    return Indexed(name, entry.dtype, entry.shape, pieces=tuple(pieces))


def _boxes(pieces: Sequence[IndexPiece], shape: Shape) -> list[tuple[Box, int]] | None:
    """The pieces as boxes with their ranks; ``None`` where one is a flat range."""
    found: list[tuple[Box, int]] = []
    for piece in pieces:
        box = box_of(piece, shape)
        if box is None:
            return None
        found.append((box, piece.rank))
    return found


def _is_whole(entry: TensorEntry) -> bool:
    """One piece that is all of the tensor, as nearly all values of a rank's own are."""
    return len(entry.pieces) == 1 and _is_all(entry.pieces[0])


def _is_all(piece: Piece | IndexPiece) -> bool:
    """As it is written of a piece that is all of its tensor."""
    return piece.box is None and piece.span is None


def _index_piece(piece: Piece, rank: int) -> IndexPiece:
    return IndexPiece(at=piece.at, box=piece.box, bytes=piece.bytes, rank=rank, span=piece.span)


def _disagreement(first_rank: int, first: TensorEntry, rank: int, entry: TensorEntry) -> CoverageError:
    return CoverageError(
        f"{entry.name}: rank {first_rank} has {_described(first)}, rank {rank} has {_described(entry)}"
    )


def _described(entry: TensorEntry) -> str:
    """That in which all ranks must agree on a tensor; of its own value, a rank decides dtype and shape alone."""
    return "a value of its own" if entry.per_rank else f"{entry.dtype}{list(entry.shape)}"
