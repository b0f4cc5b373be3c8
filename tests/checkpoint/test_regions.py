"""Copies between regions, against indexing one element at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.regions import Copy, Region, clipped, holds_exactly, joined, piece_region, region, slabs
from ckptd.format.dtypes import element_count
from ckptd.format.records import Box, IndexPiece, Span
from tests.checkpoint.builder import flat_numbers


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, Region]:
    """A shape and two regions of it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))

    def part() -> Region:
        kind = draw(st.sampled_from(["all", "box", "span"]))
        if kind == "all":
            return region(shape)
        if kind == "span":
            start = draw(st.integers(0, element_count(shape)))
            return region(shape, Span(start, draw(st.integers(start, element_count(shape)))))
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        lengths = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
        return region(shape, Box(offsets, lengths))

    return shape, part(), part()


def _elements(shape: tuple[int, ...], part: Region) -> list[int]:
    """The flat number of each element of a region, in its order."""
    return [flat for box in part.boxes for flat in flat_numbers(shape, box)]


def _copies(source: Region, target: Region, item_bytes: int = 1) -> list[Copy]:
    return [copy for slab in slabs(source, target, item_bytes) for copy in slab.copies()]


@given(parts(), st.sampled_from([1, 2, 4]))
def test_slabs_bring_exactly_what_both_have(case: tuple[tuple[int, ...], Region, Region], item_bytes: int) -> None:
    shape, source, target = case
    held, wanted = _elements(shape, source), _elements(shape, target)
    assert source.element_count == len(held)
    got: dict[int, int] = {}
    done = _copies(source, target, item_bytes)
    for copy in done:
        assert (copy.source % item_bytes, copy.target % item_bytes, copy.length % item_bytes) == (0, 0, 0)
        for i in range(0, copy.length, item_bytes):
            at = (copy.target + i) // item_bytes
            assert at not in got
            got[at] = held[(copy.source + i) // item_bytes]
    assert got == {at: flat for at, flat in enumerate(wanted) if flat in set(held)}
    found = slabs(source, target, item_bytes)
    assert found == sorted(found)
    assert sum(slab.size_bytes for slab in found) == sum(copy.length for copy in done)
    for slab in found:
        assert slab.source_stop == max(copy.source + copy.length for copy in slab.copies())
        assert list(slab.copies()) == sorted(slab.copies())


@given(parts(), st.integers(0, 300), st.integers(0, 300))
def test_a_range_cuts_slabs_exactly(case: tuple[tuple[int, ...], Region, Region], start: int, length: int) -> None:
    _, source, target = case
    for slab in slabs(source, target, 3):
        inside = {
            (copy.source + i, copy.target + i)
            for copy in slab.copies()
            for i in range(copy.length)
            if start <= copy.source + i < start + length
        }
        cut = clipped(slab, start, start + length)
        assert len(cut) <= 2 * len(slab.lengths) + 1
        got = [(copy.source + i, copy.target + i) for part in cut for copy in part.copies() for i in range(copy.length)]
        assert len(got) == len(inside)
        assert set(got) == inside
        assert cut == sorted(cut)


@given(parts())
def test_a_piece_holds_exactly_the_region_that_it_is(case: tuple[tuple[int, ...], Region, Region]) -> None:
    shape, part, other = case
    box = other.boxes[0] if len(other.boxes) == 1 else None
    for piece in (
        IndexPiece(at=0, box=box, bytes=0, rank=0),
        IndexPiece(at=0, bytes=0, rank=0, span=Span(0, element_count(shape) // 2)),
    ):
        for wanted in (part, other, region(shape)):
            assert holds_exactly(piece, wanted, shape) == (piece_region(piece, shape) == wanted)


def test_what_lies_together_is_one_copy() -> None:
    whole = region((8, 6, 4))
    assert len(_copies(whole, region((8, 6, 4), Box((2, 0, 0), (3, 6, 4))))) == 1
    assert len(_copies(whole, region((8, 6, 4), Box((2, 1, 0), (1, 3, 4))))) == 1
    assert len(_copies(whole, region((8, 6, 4), Box((2, 1, 0), (2, 3, 4))))) == 2
    assert len(_copies(region((), None), region((), None))) == 1
    assert slabs(region((5, 5), Span(3, 22)), region((5, 5), Span(3, 22)), 4) == slabs(region((19,)), region((19,)), 4)
    assert len(slabs(region((5, 5), Span(3, 22)), region((5, 5)), 4)) == 1  # three boxes, and one row of memory


def test_many_rows_are_one_slab() -> None:
    (slab,) = slabs(region((50_000, 4096)), region((50_000, 4096), Box((0, 1024), (50_000, 1024))), 4)
    assert (slab.lengths, slab.source_steps, slab.target_steps) == ((50_000, 4096), (16384, 1), (4096, 1))
    cut = clipped(slab, 16384 * 10 + 5000, 16384 * 40_000 + 5000)
    assert [part.lengths for part in cut] == [(3192,), (39_989, 4096), (904,)]


def test_neighbors_join_only_where_both_memories_agree() -> None:
    first, *others = (
        slabs(region((4,)), region((4,)), 1, source_at=source, target_at=target)[0]
        for source, target in ((0, 100), (4, 104), (8, 109), (13, 113))
    )
    assert [part.lengths for part in joined([first, *others])] == [(8,), (4,), (4,)]
