"""Copies between regions, against indexing one element at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.regions import Region, copies, region
from ckptd.format.dtypes import element_count
from ckptd.format.records import Box, Span


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
    found: list[int] = []
    for box in part.boxes:
        for inside in range(element_count(box.lengths)):
            flat, stride, rest = 0, 1, inside
            for size, offset, length in reversed(list(zip(shape, box.offsets, box.lengths, strict=True))):
                rest, at = divmod(rest, length)
                flat, stride = flat + (offset + at) * stride, stride * size
            found.append(flat)
    return found


@given(parts())
def test_copies_bring_exactly_what_both_have(case: tuple[tuple[int, ...], Region, Region]) -> None:
    shape, source, target = case
    held, wanted = _elements(shape, source), _elements(shape, target)
    assert source.element_count == len(held)
    got: dict[int, int] = {}
    done = copies(source, target)
    for copy in done:
        for i in range(copy.length):
            assert copy.target + i not in got
            got[copy.target + i] = held[copy.source + i]
    assert got == {at: flat for at, flat in enumerate(wanted) if flat in set(held)}
    assert done == sorted(done)


def test_what_lies_together_is_one_copy() -> None:
    whole = region((8, 6, 4))
    assert len(copies(whole, region((8, 6, 4), Box((2, 0, 0), (3, 6, 4))))) == 1
    assert len(copies(whole, region((8, 6, 4), Box((2, 1, 0), (1, 3, 4))))) == 1
    assert len(copies(whole, region((8, 6, 4), Box((2, 1, 0), (2, 3, 4))))) == 2
    assert len(copies(region((), None), region((), None))) == 1
