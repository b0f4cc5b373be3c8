"""Grids: pieces → grid → pieces is the same, whatever is no grid is none, and nothing walks over cells needlessly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CoverageError
from ckptd.format.cover import check_cover
from ckptd.format.grid import (
    as_grid,
    cell_box,
    cell_counts,
    cell_of,
    cells_within,
    chunks_of,
    compact,
    ranks_of,
)
from ckptd.format.records import Box, Grid, IndexPiece, RankRun

Shape = tuple[int, ...]


@st.composite
def grids(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """A shape without a 0, and chunks for it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    return shape, tuple(draw(st.integers(1, size)) for size in shape)


def boxes_of_grid(shape: Shape, chunks: Shape) -> list[Box]:
    """All cells in row-major order, without the module's own arithmetic."""
    starts = [range(0, size, chunk) for size, chunk in zip(shape, chunks, strict=True)]
    return [
        Box(offsets, tuple(min(c, n - o) for c, n, o in zip(chunks, shape, offsets, strict=True)))
        for offsets in itertools.product(*starts)
    ]


@settings(max_examples=300)
@given(grids(), st.data())
def test_pieces_to_a_grid_and_back(grid: tuple[Shape, Shape], data: st.DataObject) -> None:
    shape, chunks = grid
    boxes = boxes_of_grid(shape, chunks)
    ranks = data.draw(st.lists(st.integers(0, 20), min_size=len(boxes), max_size=len(boxes)))
    held = data.draw(st.permutations(list(zip(boxes, ranks, strict=True))))
    found = as_grid(shape, held)
    assert found == (chunks, tuple(ranks))
    counts = cell_counts(shape, chunks)
    assert math.prod(counts) == len(boxes)
    assert [cell_box(shape, chunks, cell) for cell in range(len(boxes))] == boxes
    assert [cell_of(box, shape, chunks, counts) for box in boxes] == list(range(len(boxes)))


@settings(max_examples=300)
@given(grids(), st.data())
def test_the_cells_within_a_box_are_those_that_share_an_element(grid: tuple[Shape, Shape], data: st.DataObject) -> None:
    shape, chunks = grid
    low = tuple(data.draw(st.integers(0, size)) for size in shape)
    box = Box(low, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, low, strict=True)))
    sharing = [
        cell
        for cell, other in enumerate(boxes_of_grid(shape, chunks))
        if all(
            max(a, b) < min(a + n, b + m)
            for a, n, b, m in zip(box.offsets, box.lengths, other.offsets, other.lengths, strict=True)
        )
    ]
    assert list(cells_within(box, shape, chunks)) == sharing


@settings(max_examples=300)
@given(grids(), st.data())
def test_what_is_not_exactly_the_cells_is_no_grid(grid: tuple[Shape, Shape], data: st.DataObject) -> None:
    shape, chunks = grid
    boxes = boxes_of_grid(shape, chunks)
    held = [(box, rank) for rank, box in enumerate(boxes)]
    number = data.draw(st.integers(0, len(held) - 1))
    assert as_grid(shape, [*held, held[number]]) is None
    fewer = held[:number] + held[number + 1 :]
    assert not fewer or as_grid(shape, fewer) is None
    dims = [d for d, length in enumerate(boxes[number].lengths) if length > 1]
    if not dims:
        return
    # Cut one cell in two: still an exact cover, and a grid only if that makes finer chunks of all.
    d = data.draw(st.sampled_from(dims))
    box = boxes[number]
    cut = data.draw(st.integers(1, box.lengths[d] - 1))
    halves = []
    for offset, length in ((0, cut), (cut, box.lengths[d] - cut)):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[d] += offset
        lengths[d] = length
        halves.append((Box(tuple(offsets), tuple(lengths)), 99))
    cut_up = [*fewer, *halves]
    check_cover("w", shape, [IndexPiece(at=0, box=b, bytes=0, rank=r) for b, r in cut_up])
    found = as_grid(shape, cut_up)
    if found is not None:
        assert sorted(map(repr, boxes_of_grid(shape, found[0]))) == sorted(repr(b) for b, _ in cut_up)


def test_a_last_box_alone_does_not_tell_its_chunk() -> None:
    last, middle = Box((4,), (1,)), Box((2,), (2,))
    assert chunks_of((5,), [last]) is None
    assert chunks_of((5,), [last, middle]) == (2,)
    assert chunks_of((5,), [Box((0,), (5,))]) == (5,)
    assert chunks_of((), [Box((), ())]) == ()
    assert as_grid((0, 3), []) is None


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([5], range(5, 6)),
        ([0, 1, 2], range(3)),
        ([3, 7, 11], range(3, 12, 4)),
        ([0, 4, 1, 5], (0, 4, 1, 5)),
        ([2, 1, 0], (2, 1, 0)),
        ([1, 1], (1, 1)),
        ([0, 1, 3], (0, 1, 3)),
    ],
)
def test_ranks_are_a_run_only_where_they_rise_evenly(ranks: Sequence[int], expected: range | tuple[int, ...]) -> None:
    assert compact(ranks) == expected
    assert list(compact(ranks)) == ranks


def test_a_run_and_a_list_are_read_back() -> None:
    run = Grid(chunks=(2,), ranks=RankRun(3, 8, 2))
    assert ranks_of("w", (5,), run, ()) == range(3, 8, 2)
    assert ranks_of("w", (5,), Grid(chunks=(2,), ranks=1), ((9,), (4, 2, 4))) == (4, 2, 4)
    assert ranks_of("s", (), Grid(chunks=(), ranks=RankRun(7, 8, 1)), ()) == range(7, 8)


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((2**60,), Grid(chunks=(1,), ranks=RankRun(0, 100_000, 1))),
        ((2**60, 2**60), Grid(chunks=(1, 1), ranks=0)),
        ((2**60,) * 64, Grid(chunks=(1,) * 64, ranks=0)),
        ((5,), Grid(chunks=(2,), ranks=RankRun(0, 4, 1))),
        ((5,), Grid(chunks=(2,), ranks=RankRun(0, 4, 2))),
        ((5,), Grid(chunks=(2,), ranks=RankRun(0, 6, 2))),
        ((5,), Grid(chunks=(2,), ranks=RankRun(9, 3, 1))),
        ((5,), Grid(chunks=(2, 1), ranks=RankRun(0, 3, 1))),
        ((5,), Grid(chunks=(0,), ranks=RankRun(0, 3, 1))),
        ((5,), Grid(chunks=(6,), ranks=RankRun(0, 1, 1))),
        ((0,), Grid(chunks=(0,), ranks=RankRun(0, 1, 1))),
        ((5,), Grid(chunks=(2,), ranks=1)),
    ],
)
def test_a_grid_that_does_not_hold_is_refused_without_walking_over_it(shape: Shape, grid: Grid) -> None:
    with pytest.raises(CoverageError, match="w: a grid"):
        ranks_of("w", shape, grid, ((0, 1),))
