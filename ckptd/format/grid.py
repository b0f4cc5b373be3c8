"""Tensors cut by a regular grid: at the multiples of one length in each dimension, every cell on one rank.

So a tensor over any number of ranks is an index entry of constant size. All arithmetic is by cell, in a time that does
not depend on how many cells there are; only whoever asks for cells walks over them. A piece that is all of its tensor
is the grid of one cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ckptd.errors import CoverageError
from ckptd.format.dtypes import element_count
from ckptd.format.records import Box, Grid, RankLists, RankRun

Shape = tuple[int, ...]
Ranks = range | tuple[int, ...]
"""Whose shard holds each cell, in row-major order of the cells."""


def cell_counts(shape: Shape, chunks: Shape) -> Shape:
    """How many cells there are along each dimension."""
    return tuple(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))


def cell_box(shape: Shape, chunks: Shape, cell: int) -> Box:
    """The part of the tensor that a cell is."""
    offsets: list[int] = []
    for count, chunk in zip(reversed(cell_counts(shape, chunks)), reversed(chunks), strict=True):
        cell, at = divmod(cell, count)
        offsets.append(at * chunk)
    offsets.reverse()
    lengths = tuple(min(chunk, size - at) for size, chunk, at in zip(shape, chunks, offsets, strict=True))
    return Box(tuple(offsets), lengths)


def cell_of(box: Box, shape: Shape, chunks: Shape, counts: Shape) -> int | None:
    """Which cell a box is, or ``None`` where it is none. ``counts``: :func:`cell_counts`."""
    cell = 0
    for at, length, size, chunk, count in zip(box.offsets, box.lengths, shape, chunks, counts, strict=True):
        number, beside = divmod(at, chunk)
        if beside or length != min(chunk, size - at):
            return None
        cell = cell * count + number
    return cell


def cells_within(box: Box, shape: Shape, chunks: Shape) -> Iterator[int]:
    """The cells that hold some element of a box, in order; only these are walked over."""
    if not element_count(box.lengths):
        return
    ranges = [
        range(at // chunk, (at + length - 1) // chunk + 1)
        for at, length, chunk in zip(box.offsets, box.lengths, chunks, strict=True)
    ]
    counts = cell_counts(shape, chunks)
    for index in product(*ranges):
        cell = 0
        for number, count in zip(index, counts, strict=True):
            cell = cell * count + number
        yield cell


def chunks_of(shape: Shape, boxes: Sequence[Box]) -> Shape | None:
    """The only lengths of cells with which these boxes, none of them empty, can be part of a grid; ``None`` where they
    do not tell. Says nothing about whether they are."""
    chunks: list[int] = []
    for d, size in enumerate(shape):
        for box in boxes:
            # A box at the end may be a last cell, which is shorter, unless it starts at 0 too.
            if box.offsets[d] == 0 or box.offsets[d] + box.lengths[d] < size:
                chunks.append(box.lengths[d])
                break
        else:
            return None
    return tuple(chunks)


def as_grid(shape: Shape, held: Sequence[tuple[Box, int]]) -> tuple[Shape, tuple[int, ...]] | None:
    """Chunks, and the rank of each cell, where these boxes with their ranks are exactly the cells of a grid."""
    chunks = chunks_of(shape, [box for box, _ in held])
    if chunks is None or not element_count(shape):
        return None
    counts = cell_counts(shape, chunks)
    if element_count(counts) != len(held):
        return None
    ranks = [-1] * len(held)
    for box, rank in held:
        cell = cell_of(box, shape, chunks, counts)
        if cell is None or ranks[cell] != -1:
            return None
        ranks[cell] = rank
    return chunks, tuple(ranks)


def compact(ranks: Sequence[int]) -> Ranks:
    """Ranks as a run where they rise evenly, else as they are."""
    first = ranks[0]
    step = ranks[1] - first if len(ranks) > 1 else 1
    if step < 1:
        return tuple(ranks)
    run = range(first, ranks[-1] + 1, step)
    return run if len(run) == len(ranks) and all(a == b for a, b in zip(run, ranks, strict=True)) else tuple(ranks)


def ranks_of(name: str, shape: Shape, grid: Grid, lists: RankLists) -> Ranks:
    """Whose shard holds each cell of a grid that anybody may have written. Raises :class:`CoverageError` unless the
    grid has chunks that fit the shape, and as many ranks as cells. Walks neither over ranks nor over cells."""
    if len(grid.chunks) != len(shape) or not all(
        1 <= chunk <= size for chunk, size in zip(grid.chunks, shape, strict=True)
    ):
        raise CoverageError(f"{name}: a grid of cells {grid.chunks} does not fit the shape {shape}")
    cells = element_count(cell_counts(shape, grid.chunks))
    if isinstance(grid.ranks, RankRun):
        run = range(grid.ranks.start, grid.ranks.stop, grid.ranks.step)
        if len(run) != cells or not run or run[-1] != grid.ranks.stop - 1:
            raise CoverageError(
                f"{name}: a grid of {cells} cells on {len(run)} ranks, {run.start}:{run.stop}:{run.step}"
            )
        return run
    if grid.ranks >= len(lists):
        raise CoverageError(f"{name}: a grid on a list of ranks that is not there")
    ranks = lists[grid.ranks]
    if len(ranks) != cells:
        raise CoverageError(f"{name}: a grid of {cells} cells on {len(ranks)} ranks")
    return ranks
