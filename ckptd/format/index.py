"""The index of a commit: an entry for each tensor that is one value for the whole world, inside the manifest or beside
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ckptd.format.grid import Ranks, Shape
from ckptd.format.records import Grid, Index, IndexEntry, IndexPiece, RankLists, RankRun, encode
from ckptd.limits import INDEX_INLINE_BYTES_MAX, INDEX_PART_BYTES_TARGET


class Indexed(msgspec.Struct, frozen=True, gc=False):
    """A tensor that is one value for the whole world: its pieces, or its grid."""

    name: str
    dtype: str
    shape: Shape
    pieces: tuple[IndexPiece, ...] = ()
    chunks: Shape | None = None
    ranks: Ranks = ()
    """Of the cells, where there are chunks."""


@dataclass(frozen=True, slots=True)
class SplitIndex:
    """An index as it is put: inside the manifest, or in parts."""

    inline: tuple[IndexEntry, ...] | None
    rank_lists: RankLists
    """Of the entries inside the manifest."""
    parts: tuple[tuple[bytes, str, str], ...]
    """Encoded, with the first and the last name in each."""


class _Part:
    """Entries that lie in one record, with the lists of ranks that they name."""

    def __init__(self) -> None:
        self.entries: list[IndexEntry] = []
        self.lists: dict[tuple[int, ...], int] = {}
        self.size_bytes = 0

    def measured(self, tensor: Indexed) -> tuple[IndexEntry, int]:
        """The tensor as an entry of this record, and by how much the record would grow."""
        ranks, grid, grown = tensor.ranks, None, 0
        if tensor.chunks is not None and isinstance(ranks, range):
            run = RankRun(ranks.start, ranks[-1] + 1, ranks.step)
            grid = Grid(chunks=tensor.chunks, ranks=run)
        elif tensor.chunks is not None:
            assert isinstance(ranks, tuple)
            number = self.lists.get(ranks)
            if number is None:
                number, grown = len(self.lists), len(msgspec.json.encode(ranks))
            grid = Grid(chunks=tensor.chunks, ranks=number)
        entry = IndexEntry(dtype=tensor.dtype, grid=grid, name=tensor.name, pieces=tensor.pieces, shape=tensor.shape)
        return entry, grown + len(encode(entry))

    def add(self, tensor: Indexed, entry: IndexEntry, size_bytes: int) -> None:
        self.entries.append(entry)
        self.size_bytes += size_bytes
        if entry.grid is not None and isinstance(tensor.ranks, tuple):
            self.lists.setdefault(tensor.ranks, len(self.lists))

    def encoded(self) -> tuple[bytes, str, str]:
        data = encode(Index(rank_lists=tuple(self.lists), tensors=tuple(self.entries)))
        return data, self.entries[0].name, self.entries[-1].name


def split(tensors: Sequence[Indexed]) -> SplitIndex:
    """The index of these tensors, which are sorted by name."""
    whole = _Part()
    for tensor in tensors:
        whole.add(tensor, *whole.measured(tensor))
        if whole.size_bytes > INDEX_INLINE_BYTES_MAX:
            return SplitIndex(None, (), tuple(part.encoded() for part in _parts(tensors)))
    return SplitIndex(tuple(whole.entries), tuple(whole.lists), ())


def _parts(tensors: Sequence[Indexed]) -> list[_Part]:
    parts = [_Part()]
    for tensor in tensors:
        entry, grown = parts[-1].measured(tensor)
        if parts[-1].entries and parts[-1].size_bytes + grown > INDEX_PART_BYTES_TARGET:
            parts.append(_Part())
            entry, grown = parts[-1].measured(tensor)
        parts[-1].add(tensor, entry, grown)
    return parts
